"""`lm check` finds what is wrong with an idea: each mistake breaks a property, and right ones none.

A mistake is an idea of a few lines at a site, under a key that is true in all configs.
"""

import dataclasses
import itertools
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from running import ROOT

from lm import check, ideas, step
from lm.checking import new_ideas, properties, together
from lm.checking.card import PROPERTIES
from lm.checking.source import where_it_starts
from lm.checking.subject import Broken, Subject
from lm.config import Config
from lm.declarations import small_weight
from lm.generation import kv_cache
from lm.layers.attention import Mask
from lm.system.errors import UserError

KEY = "norm_bias"  # any key that is true


def subject(number: int = 0, **model) -> Subject:
    """Return a subject of its own: programs are compiled once for equal configs."""
    c = dataclasses.replace(Config().model, **model)
    s = Subject(dataclasses.replace(Config(), model=c))
    s.config = dataclasses.replace(s.config, model=s.changed(d_ff=49 + number))
    return s


def at_values(function):
    return "values", types.SimpleNamespace(apply=function)


def over_positions(v_BTGK, f):
    """Return f over the axis of positions."""
    return jnp.moveaxis(f(jnp.moveaxis(v_BTGK, -3, 0)), 0, -3)


def mean_of_all(here, v):
    return v + jnp.mean(v, axis=-3, keepdims=True)


def shifted_by_one(here, v):
    return v + over_positions(v, lambda v_T: jnp.concatenate([v_T[:1] * 0, v_T[:-1]]))


def own_running_sum(here, v):
    return over_positions(v, lambda v_T: jnp.cumsum(v_T, axis=0))


def mean_of_the_batch(here, v):
    return v - jnp.mean(v, axis=0, keepdims=True) if v.ndim == 4 else v


def place_in_the_array(here, v):
    return v * jnp.log(2.0 + jnp.arange(v.shape[-3]))[:, None, None].astype(v.dtype)


def of_a_similar_layer(here, v):
    return v * (1 + here.prototype)


def in_float32(here, v):
    return jnp.sin(v.astype(jnp.float32))


def overflows(here, v):
    return jnp.log(jnp.exp(v.astype(jnp.float32))).astype(v.dtype)


def without_gradient(here, v):
    return jax.lax.stop_gradient(v)


@jax.custom_vjp
def halved(v):
    return v / 2


halved.defvjp(lambda v: (v / 2, None), lambda _, g: (g,))


def wrong_gradient(here, v):
    return halved(v)


def uncounted_products(here, v):
    products = jnp.einsum("...gk,...hk->...gh", v, v)
    return v + jnp.einsum("...gh,...hk->...gk", products, v)


def unread():
    table = lambda c: {"unread_D": small_weight((c.d_model,), "D")}  # noqa: E731
    return "values", types.SimpleNamespace(table=table, apply=lambda here, v: v)


def read_in_one_layer():
    def apply(here, v):
        first = here.p["of_first_GK"].astype(v.dtype) if here.prototype == 0 else 0
        return v + first

    table = lambda c: {"of_first_GK": small_weight((c.n_kv_heads, c.d_head), "GK")}  # noqa: E731
    return "values", types.SimpleNamespace(table=table, apply=apply)


def term_that_is_a_mean():
    """In the stream, where a number has no type that would tell."""

    def apply(here, x_BTD):
        here.stream["loss/mine"] += jnp.mean(jnp.square(x_BTD)).astype(jnp.float32)
        return x_BTD

    idea = types.SimpleNamespace(
        apply=apply,
        carry=lambda c, x_BTD: {"loss/mine": jnp.float32(0)},
        loss_weights=lambda c, fraction: {"mine": 1.0},
    )
    return "block_input", idea


def next_head(here, v):
    return jnp.roll(v, 1, axis=-2)


def sum_of_heads(here, v):
    return v + jnp.sum(v, axis=-2, keepdims=True)


def exponential_in_16_bits(here, v):
    return jnp.exp(-jnp.abs(v))


def stream_twice():
    return "block_input", types.SimpleNamespace(apply=lambda here, x_BTD: x_BTD * 50)


def half_at_start():
    same = lambda c: True  # noqa: E731
    idea = types.SimpleNamespace(apply=lambda here, v: v / 2, same_at_start=same)
    return "values", idea


def carried_and_not_read():
    def apply(here, x_BTD):
        here.stream["kept"] = x_BTD
        return x_BTD

    carry = lambda c, x_BTD: {"kept": x_BTD}  # noqa: E731
    return "block_input", types.SimpleNamespace(apply=apply, carry=carry)


def kept_for_the_backward_pass():
    def apply(here, v):
        for i in range(40):
            v = jnp.sin(v + i)
        return v

    return "values", types.SimpleNamespace(apply=apply)


MISTAKES = {
    "a mean over all positions": (at_values(mean_of_all), "sees_earlier_tokens"),
    "a shift that ignores documents": (at_values(shifted_by_one), "sees_earlier_tokens"),
    "a sum that ignores documents": (at_values(own_running_sum), "sees_earlier_tokens"),
    "a shift without a cache": (at_values(shifted_by_one), "cached_decoding"),
    "a mean over the batch": (at_values(mean_of_the_batch), "examples_are"),
    "positions counted in the array": (at_values(place_in_the_array), "cached_decoding"),
    "positions counted in the row": (at_values(place_in_the_array), "a_packed_document"),
    "the number of a similar layer": (at_values(of_a_similar_layer), "scanned"),
    "another dtype": (at_values(in_float32), "bfloat16"),
    "no gradient": (at_values(without_gradient), "gradients"),
    "a wrong gradient": (at_values(wrong_gradient), "gradients"),
    "products that are not declared": (at_values(uncounted_products), "flops"),
    "a parameter that nothing reads": (unread(), "the_loss_reads"),
    "a parameter that one layer reads": (read_in_one_layer(), "the_loss_reads"),
    "a term of the loss that is a mean": (term_that_is_a_mean(), "micro_batches"),
    "an exponential without its largest exponent": (at_values(overflows), "large_weights"),
    "values of the next head": (at_values(next_head), "axes_have_no_order"),
    "values of all heads": (at_values(sum_of_heads), "heads_are_independent"),
    "an exponential in 16 bits": (at_values(exponential_in_16_bits), "exponentials"),
    "a stream that grows": (stream_twice(), "branches_that_add_nothing"),
    "not the same at step 0": (half_at_start(), "starts_as_the_model"),
    "carried, but not read": (carried_and_not_read(), "what_is_carried"),
    "activations that no plan knows": (kept_for_the_backward_pass(), "the_plan_has_the_memory"),
}


def property_of(name: str):
    (found,) = (f for f in PROPERTIES.values() if f.__name__.startswith(name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=MISTAKES)
def test_a_mistake_breaks_a_property(number, monkeypatch, fresh_tables):
    (site, idea), name = list(MISTAKES.values())[number]
    monkeypatch.setitem(ideas.SITES[site], KEY, idea)
    fresh_tables()
    with pytest.raises((Broken, TypeError)):
        property_of(name)(subject(number))


@pytest.mark.slow
def test_a_mistake_in_the_mask_or_the_cache_breaks_a_property(monkeypatch):
    """Off by one, in both directions."""
    visible = Mask.visible

    def one_more(mask):
        earlier = dataclasses.replace(mask, k_positions=jnp.asarray(mask.k_positions) - 1)
        return visible(earlier) | visible(mask)

    with monkeypatch.context() as m:
        m.setattr(Mask, "visible", one_more)
        with pytest.raises(Broken, match="depends on the later token"):
            properties.sees_earlier_tokens_of_its_document(subject(20))
    slot_times = kv_cache.slot_times
    with monkeypatch.context() as m:
        m.setattr(kv_cache, "slot_times", lambda last, n: slot_times(last - 1, n))
        with pytest.raises(Broken, match="decoded and in the full pass"):
            properties.cached_decoding_is_the_full_pass(subject(21))


@pytest.mark.slow
def test_a_turn_that_is_no_repetition_breaks_a_property(monkeypatch, fresh_tables):
    site, idea = at_values(lambda here, v: v * (1 + here.turn))
    monkeypatch.setitem(ideas.SITES[site], KEY, idea)
    fresh_tables()
    with pytest.raises(Broken, match="2 turns and 2 times the layers"):
        property_of("loops_are")(subject(22, loops=2))


@pytest.mark.slow
def test_a_loss_divided_by_all_positions_breaks_a_property(monkeypatch):
    fields_read = step.fields_read

    def counting_all(*arguments):
        fields = fields_read(*arguments)
        return fields | {"counts": jnp.ones_like(fields["weights"])}

    monkeypatch.setattr(step, "fields_read", counting_all)
    with pytest.raises(Broken, match="the loss of a step, and the mean over its targets"):
        property_of("losses_are_means")(subject(23))


def test_a_property_without_meaning_accuses_nobody():
    """Large weights without norms grow beyond float32."""
    assert property_of("large_weights")(subject(24, norm_placement="none")) == "not without norms"


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"mixers": ("rg_lru", "attention"), "loops": 2, "loop_layers": (1, 3)},
        {"branches": ("ffn*0.5", "attention", "ffn*0.5"), "mixers": ("latent",)},
        {"ffn": "moe", "residual": "hyper_connections", "gated_delta": "three_of_four"},
        {"masked_diffusion": True, "mixers": ("latent", "attention"), "window_pattern": (0, 5)},
    ],
)
def test_right_models_keep_all_properties(keys):
    config = Config()
    s = Subject(dataclasses.replace(config, model=dataclasses.replace(config.model, **keys)))
    for holds in PROPERTIES.values():
        assert holds(s)


def test_a_failure_names_the_line_where_it_starts(monkeypatch, fresh_tables):
    """And the shortest text."""
    site, idea = at_values(place_in_the_array)
    monkeypatch.setitem(ideas.SITES[site], KEY, idea)
    fresh_tables()
    s = subject(30)
    with pytest.raises(Broken) as found:
        properties.a_packed_document_is_the_same_alone(s)
    where = where_it_starts(s, found.value)
    assert "starts at layers/0/attention/v, after layers/0/attention/k" in where
    monkeypatch.setitem(ideas.SITES[site], KEY, at_values(mean_of_all)[1])
    fresh_tables()
    with pytest.raises(Broken, match="in a text of 2 tokens, position 0 depends on the later"):
        properties.sees_earlier_tokens_of_its_document(subject(31))


def test_training_checks_ideas_of_ones_own(monkeypatch, fresh_tables):
    """Those of this package are known by the names of their files."""
    folder = ROOT / "lm" / "ideas"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert files == new_ideas.BUILT_IN, "run python -m lm.check, then add the name"
    assert new_ideas.check_new_ideas(Subject(Config()).config) is None
    site, idea = at_values(lambda here, v: v * 2)
    monkeypatch.setitem(ideas.SITES[site], KEY, idea)
    fresh_tables()
    assert "looks back only" in new_ideas.check_new_ideas(subject(32).config)
    for number, (site, idea) in enumerate((at_values(mean_of_all), unread())):
        monkeypatch.setitem(ideas.SITES[site], KEY, idea)
        fresh_tables()
        with pytest.raises(UserError, match="depend"):
            new_ideas.check_new_ideas(subject(33 + number).config)


def test_ideas_that_go_together_share_models():
    refused = {"residual_scalars", "attn_sink"}

    def is_refused(config):
        return sum(bool(getattr(config.model, key)) for key in refused) > 1

    groups = together.groups(Config(), is_refused)
    flat = [choice for group in groups for choice in group]
    assert sorted(flat, key=str) == sorted(together.choices(), key=str)
    assert all(not refused <= {key for key, _ in group} for group in groups)


@pytest.mark.slow
def test_each_two_ideas_are_right_together_or_refused():
    """In about 18 models, chosen such that any two that are not refused meet in one."""
    found, apart = together.pairs(Config())
    met = {frozenset(pair) for group in found for pair in itertools.combinations(group, 2)}
    met |= set(map(frozenset, apart))
    every = itertools.combinations(together.choices(), 2)
    assert not {frozenset((a, b)) for a, b in every if a[0] != b[0]} - met
    assert len(apart) < 40, "ideas that work alone should mostly work together"
    for group in found:
        together.check_together(Config(), group, smaller=(1, 2))


OVER_DEVICES = """
import sys, types
import jax.numpy as jnp
from lm import check, ideas
if "sum" in sys.argv:  # over the positions of a device
    idea = types.SimpleNamespace(apply=lambda here, v: jnp.cumsum(v, axis=-3))
    ideas.SITES["values"]["norm_bias"] = idea
config = "configs/shakespeare_small.py"
sys.exit(check.main(["--config", config, "--only", "devices"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("idea", "code", "said"), [("sum", 2, "BROKEN"), ("none", 0, "ok ")])
def test_devices_are_simulated(idea, code, said):
    command = [sys.executable, "-c", OVER_DEVICES, idea]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout + done.stderr
    assert "not run" not in done.stdout


def test_the_command_prints_a_card(command):
    config = ("--config", ROOT / "configs/shakespeare_small.py")
    code, output = command(check.main, *config, "--only", "export,FLOPs,ln V")
    assert code == 0
    assert "ok      FLOPs = traced program" in output
    assert output.rstrip().splitlines()[-1].startswith("3 of 3 hold")
    code, output = command(check.main, *config, "--only", "xyz")
    assert code == 2
    assert "looks back only" in output
