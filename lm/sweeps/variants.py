"""Prepare the variants of a sweep: resolve configs, match widths, count costs, refuse duplicates."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lm import data, parameters
from lm.config import MESH_AXES, Resolved, flatten, to_dict
from lm.config.values import show
from lm.cost import flops
from lm.data import Corpus, batches
from lm.step import init_state, train_steps
from lm.sweeps.addition import RESULTS
from lm.sweeps.analysis import expected_difference, noise_of
from lm.sweeps.plan import Plan, PlannedVariant
from lm.sweeps.record import read_page_record
from lm.sweeps.results import runs_from_csv
from lm.sweeps.stacked import split_config, with_values
from lm.sweeps.tuning import GRID, LEARNING_RATE, is_scale
from lm.system.errors import UserError, first_line
from lm.system.text_tables import plural, table
from lm.training.batch_source import BatchSource
from lm.training.memory import check_arrays
from lm.training.run import resolve_config
from lm.training.unused import unused_parameters
from lm.training.warm_start import WarmStart, warm_start
from lm.workdir.config_changes import experiment_digest


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant that can be trained."""

    plan: PlannedVariant  # what the sweep file says about it
    config: Resolved  # with seed 0, at the first value of each list
    corpus: Corpus
    n_params: int
    flops: float  # of training, per token
    # by seed, what a run starts from
    warm_starts: dict[int, WarmStart] = dataclasses.field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Return the training tokens of one run."""
        t = self.config.train
        return t.steps * t.batch_size * t.seq_len

    @property
    def sources(self) -> dict[str, str]:
        """Return by name the fingerprint of each source of a mixture; {} for one source."""
        return _sources(self.corpus)

    @property
    def n_runs(self) -> int:
        """Return the number of runs without extensions of the lists."""
        return self.plan.n_points * len(self.plan.tuning_seeds) + len(self.plan.seeds)

    @property
    def first_point(self) -> tuple:
        return tuple(values[0] for values in self.plan.lists.values())

    def run_config(self, point: tuple, seed: int) -> Resolved:
        """Return the config of one run; `point` has a value of each list."""
        names = [key.removeprefix("optimizer.") for key in self.plan.lists]
        return with_values(self.config, dict(zip(names, point, strict=True)), seed)


def resolve_variants(plan: Plan, say: Callable[[str], None]) -> dict[str, Variant]:
    """Resolve all variants of a plan, by name: open data, match widths, load warm starts.

    Raises:
        UserError: a config is invalid, data lacks a split, a comparison is between different test
            tokens, or two variants have equal configs.
    """
    resolved = _resolve_configs(plan.targets | plan.variants, say)
    _refuse_other_tokens(plan, resolved)
    with _problems() as problems:
        for name, planned in plan.variants.items():
            if planned.match:
                config, corpus = resolved[name]
                with problems.of(f"variant {name!r}"):
                    resolved[name] = matched(config, resolved[planned.match][0]), corpus
    with _problems() as problems:
        for name, planned in plan.variants.items():
            config, _ = resolved[name]
            match = planned.match
            computed = f", with model.d_ff from params of {match!r}" if match else ""
            with problems.of(f"variant {name!r}{computed}"):
                check_arrays(config, dict.fromkeys(MESH_AXES, 1))  # each device has its own runs
    variants = {}
    digests = {}
    for name, planned in plan.variants.items():
        config, corpus = resolved[name]
        cost = flops.flops_per_token(config.model, config.train.seq_len)
        variant = Variant(planned, config, corpus, _n_params(config), cost)
        variants[name] = dataclasses.replace(variant, warm_starts=_warm_starts(name, variant, say))
        rated = variant.run_config((1.0, *variant.first_point[1:]), 0)
        # The digest of a config leaves out what may change in a run, and on_spike may.
        digests[name] = f"{experiment_digest(rated)} {rated.train.on_spike == 'skip'}"
    refuse_duplicates(variants, digests)
    return variants


class _Problems(list):
    """Mistakes in the variants, to be shown together."""

    @contextlib.contextmanager
    def of(self, place: str) -> Iterator[None]:
        """Collect a UserError in the block, with the place that it is about."""
        try:
            yield
        except UserError as error:
            self += [f"{place}: {problem}" for problem in error.problems]


@contextlib.contextmanager
def _problems() -> Iterator[_Problems]:
    """Raise UserError at the end of the block if it has collected any problems."""
    problems = _Problems()
    yield problems
    if problems:
        raise UserError(*problems)


def _sources(corpus: Corpus) -> dict[str, str]:
    record = corpus.record or {}
    return {part.name: record[part.name]["fingerprint"] for part in corpus.split("test").parts}


def _refuse_other_tokens(plan: Plan, resolved: dict[str, tuple[Resolved, Corpus]]) -> None:
    """Raise UserError if the variants of a comparison are tested on different tokens.

    Two mixtures of the same sources may have different weights: the report then compares each
    source.
    """
    with _problems() as problems:
        for first, second in (*plan.comparisons, *plan.placebos):
            a, corpus = resolved[first]
            b, other = resolved[second]
            same_sources = bool(_sources(corpus)) and _sources(corpus) == _sources(other)
            if same_sources or corpus.fingerprint == other.fingerprint:
                continue
            differ = _differing_keys(a, b)
            keys = [key for key in differ if key.startswith(("data.", "train.seq_len"))]
            problems.append(
                f"comparisons: {first!r} and {second!r} are tested on different tokens "
                f"({', '.join(keys)}): their losses cannot be compared; give both the same, or "
                "write a sweep file with texts"
            )


def _differing_keys(a: Resolved, b: Resolved) -> list[str]:
    theirs = flatten(to_dict(b))
    return [key for key, value in flatten(to_dict(a)).items() if value != theirs[key]]


def _resolve_configs(
    variants: dict[str, PlannedVariant], say
) -> dict[str, tuple[Resolved, Corpus]]:
    corpora: dict[tuple, Corpus] = {}
    resolved = {}
    with _problems() as problems:
        for name, planned in variants.items():
            config = planned.config
            key = (config.data, config.train.seq_len)
            if key not in corpora:
                corpora[key] = data.open_corpus(config.data, seq_len=config.train.seq_len, say=say)
            corpus = corpora[key]
            with problems.of(f"variant {name!r}"):
                resolved[name] = resolve_config(config, corpus), corpus
            if missing := [split for split in ("validation", "test") if split not in corpus.splits]:
                problems.append(
                    f"variant {name!r}: {corpus.name} has no {missing[0]} split, which a sweep "
                    "needs"
                )
    return resolved


def _warm_starts(name: str, variant: Variant, say) -> dict[int, WarmStart]:
    """Return by seed the parameters that the variant's runs start from; none without init_from."""
    seeds = [*variant.plan.seeds]
    if variant.plan.n_points:
        seeds += variant.plan.tuning_seeds
    starts: dict[int, WarmStart] = {}
    alike: dict[str, list[WarmStart]] = {}  # of seeds whose runs load the same parameters
    for seed in seeds:
        config = variant.run_config(variant.first_point, seed)
        if start := warm_start(config, variant.corpus, lambda text: None):
            starts[seed] = start
            alike.setdefault(start.groups, []).append(start)
    for groups, members in alike.items():
        say(f"{name}, {plural(len(members), 'seed')}: {members[0].title}\n{groups}")
    return starts


def matched(config: Resolved, target: Resolved) -> Resolved:
    """Return a config with the d_ff at which its parameters are nearest to those of another one.

    Raises:
        UserError: they are not linear in d_ff, or are more at any width.
    """

    def with_width(d_ff: int) -> Resolved:
        return dataclasses.replace(config, model=dataclasses.replace(config.model, d_ff=d_ff))

    one, two, many = (_n_params(with_width(d_ff)) for d_ff in (1, 2, 1001))
    if two == one or many - one != 1000 * (two - one):
        raise UserError(
            f"match_params: the parameters of ffn = {config.model.ffn} are not linear in d_ff; set "
            "d_ff"
        )
    d_ff = 1 + round((_n_params(target) - one) / (two - one))
    if d_ff < 1:
        raise UserError(
            f"match_params: {one:,} parameters with d_ff = 1, but {_n_params(target):,} to match; "
            "set d_ff"
        )
    return with_width(d_ff)


def _n_params(config: Resolved) -> int:
    return parameters.count(parameters.parameter_table(config.model))


def refuse_idle_changes(variants: dict[str, Variant], say: Callable[[str], None]) -> set[str]:
    """Trace all variants, and raise UserError if two have the same fingerprint.

    Returns:
        The names of the variants that can be traced. For the others `say` is called, because only
        their runs fail.
    """
    fingerprints = {}
    for name, v in variants.items():
        try:
            warm = v.warm_starts.get(v.plan.seeds[0])
            fingerprints[name], unused = fingerprint(v.run_config(v.first_point, 0), v.corpus, warm)
            if unused:
                say(f"WARNING: variant {name!r}: {unused}")
        except UserError:
            raise
        except Exception as error:
            say(f"WARNING: variant {name!r} cannot be traced: {first_line(error)}")
    refuse_duplicates(variants, fingerprints)
    return set(fingerprints)


def refuse_duplicates(variants: dict[str, Variant], fingerprints: dict[str, str]) -> None:
    """Raise UserError if two variants are the same experiment, apart from their learning rates.

    Variants with equal fingerprints have equal runs at the same learning rate. They are allowed if
    they compare values of a tuned key: their lists have no value in common, or, for a key other
    than the rate, are not the same. Different arms in different cells are allowed, too.
    """
    problems = []
    for a, b in itertools.combinations(fingerprints, 2):
        one, two = variants[a].plan, variants[b].plan
        if fingerprints[a] != fingerprints[b] or (one.cell != two.cell and one.arm != two.arm):
            continue
        config = variants[a].config
        keys = [key for key in _differing_keys(config, variants[b].config) if key not in one.lists]
        if not keys and _compare_tuned_values(one.lists, two.lists):
            continue
        reasons = [f"variants {a!r} and {b!r} are the same experiment"]
        if keys:
            verb = "has" if len(keys) == 1 else "have"
            reasons.append(f"{', '.join(keys)} {verb} no effect here")
        # What the sweep file sets differently, or for one of the two only, without an effect.
        values = flatten(to_dict(config))
        for key in sorted((one.changes.keys() | two.changes.keys()) - {*keys, *one.lists}):
            if repr(one.changes.get(key, ...)) != repr(two.changes.get(key, ...)):
                reasons.append(f"{key} is {show(values[key])} in both")
        if one.cell != two.cell:
            reasons.append("the values of the budget replace those of sizes and texts")
        problems.append("; ".join(reasons))
    if problems:
        raise UserError(*problems)


def _compare_tuned_values(ours: dict[str, tuple], theirs: dict[str, tuple]) -> bool:
    """Return whether two variants with these lists ask which values of a tuned key are better."""
    for key, values in ours.items():
        if not set(values) & set(theirs[key]):
            return True
        if key != LEARNING_RATE and values != theirs[key]:
            return True
    return False


def fingerprint(
    config: Resolved, corpus: Corpus, warm: WarmStart | None = None
) -> tuple[str, str | None]:
    """Return a hash (sha256) of everything that determines a run, except its learning rate.

    The second result is what `unused_parameters` says of the traced program.

    Two configs may differ in a key that has no effect (rope_theta without RoPE). They then compile
    to the same program: the hash covers the lowered StableHLO of initialization and train step, the
    seed, the number of steps, the corpus and its tokenizer, the starts of the windows of the first
    and the last thousand steps, and the parameters of a warm start.
    """
    t = config.train
    program, values = split_config(config)  # the config with seed 0
    # Other hyperparameters become constants, so that the program's text has them.
    program = with_values(program, values | {"learning_rate": 1.0})
    split = corpus.split("train")
    source = BatchSource(split, program)
    init = jax.jit(functools.partial(init_state, program))
    state = jax.eval_shape(init, jnp.uint32(0))
    # Constants, because an unused one does not appear in the program's text.
    training = jax.jit(
        lambda state, resident, inputs, n: train_steps(state, resident, inputs, n, program)
    )
    steps = training.trace(state, source.resident, source.train(0, 1), jnp.int32(1))
    digest = hashlib.sha256(
        (init.lower(jnp.uint32(0)).as_text() + steps.lower().as_text()).encode()
    )
    ends = [np.arange(min(t.steps, 1000)), np.arange(max(0, t.steps - 1000), t.steps)]
    starts = batches.window_starts(split, config, np.unique(np.concatenate(ends)))
    digest.update(np.ascontiguousarray(starts, np.int64).tobytes())
    digest.update(repr((t.seed, t.steps, corpus.fingerprint)).encode())
    if warm:
        digest.update(warm.checksum().encode())
    return digest.hexdigest(), unused_parameters(steps, state)


def describe_variants(plan: Plan, variants: dict[str, Variant]) -> str:
    """Return the question, a table of the variants, and the number and cost of the runs."""
    rows = [["variant", "parameters", "FLOPs/token", "tokens per run", "tuned", "changes"]]
    for name, v in variants.items():
        lists = [(key, values) for key, values in v.plan.lists.items() if len(values) > 1]
        tuned = ", then ".join(
            f"{key.rpartition('.')[2]} {_range(values)}" for key, values in lists
        )
        numbers = (f"{v.n_params:,}", f"{v.flops:,.0f}", f"{v.tokens:,}")
        rows.append([name, *numbers, tuned or "nothing", _changes(name, variants)])
    n_tuning = sum(v.plan.n_points for v in variants.values()) * plan.budget.tuning_seeds
    total = sum(v.n_runs * v.flops * v.tokens for v in variants.values())
    texts = ", ".join(dict.fromkeys(v.corpus.name for v in variants.values()))
    lines = [
        f"question: {plan.sweep.question}",
        f"base: {plan.sweep.base}, data {texts}, budget {plan.budget_name}",
        table(rows, right=(1, 2, 3)),
        f"{plural(n_tuning, 'run')} to tune ({plural(plan.budget.tuning_seeds, 'tuning seed')}), "
        "and more where the best value is at the edge of its list; then "
        f"{plural(len(variants) * plan.budget.seeds, 'run')} at the tuned values "
        f"({plural(plan.budget.seeds, 'fresh seed')})",
    ]
    for cell, p in {p.cell: p for p in plan.variants.values()}.items():
        place = f"{cell}: " if cell else ""
        lines.append(f"{place}seeds {_range(p.seeds)}, tuning seeds {_range(p.tuning_seeds)}")
    lines.append(f"training: {total:.3g} FLOPs without extensions")
    if plan.comparisons:
        lines.append(_what_can_be_found(plan, variants))
    return "\n".join(lines)


def _what_can_be_found(plan: Plan, variants: dict[str, Variant]) -> str:
    """Return the differences that a sweep would find, by the noise of the published page whose
    baseline is nearest in size: those of its least precise comparison.
    """
    sizes = [v.n_params for v in variants.values() if v.plan.arm == plan.sweep.baseline]
    n_params = int(np.median(sizes))
    noises = []
    for path in sorted(RESULTS.glob("*/sweep.json")):
        record = read_page_record(path.parent)
        if record.get("design") != GRID and "+" not in record["name"]:
            noise = noise_of(record, runs_from_csv(path.parent / "runs.csv"), n_params)
            noises += [noise] if noise else []
    if not noises:
        return "smallest detectable difference: not known, without a published page"
    nearest = min(noises, key=lambda noise: abs(math.log(noise.n_params / n_params)))
    n_tests = len({(variants[a].plan.arm, variants[b].plan.arm) for a, b in plan.comparisons})
    has_lengths = bool(plan.sweep.lengths) and len(plan.cells) > 1
    # Without placebos in the budget, one is a check only.
    like = [like for _, like in plan.placebos if plan.budget.placebos]
    found = []
    for pair in plan.comparisons:
        n_lists = max(sum(map(is_scale, plan.variants[name].tuned)) for name in pair)
        noise = nearest._replace(of_tuning=n_lists * nearest.of_tuning)
        difference = expected_difference(
            noise,
            plan.budget.seeds,
            1 + like.count(pair[1]),
            len(plan.cells),
            n_tests,
            first_to_last=has_lengths,
        )
        found.append(difference)
    alone, first = max(found)
    of_which = " of the least precise comparison" if len(set(found)) > 1 else ""
    place = f", {nearest.cell}" if nearest.cell else ""
    over = f", mean of {plural(len(plan.cells), 'cell')}" if len(plan.cells) > 1 else ""
    if has_lengths:
        over = ", from the first length to the last"
    of_tests = f", {first:.4f} as the first of {n_tests} comparisons" if n_tests > 1 else ""
    return (
        f"smallest detectable difference{of_which} (80 % power): {alone:.4f} nats per token{over}"
        f"{of_tests}; "
        f"margin {plan.sweep.margin:g}; with the noise of {RESULTS / nearest.page}{place} "
        f"({nearest.n_params:,} parameters)"
    )


def _range(values: Sequence) -> str:
    """Return the first and the last value, and how many there are.

    >>> _range((0.001, 0.002, 0.004)), _range((7,))
    ('0.001 to 0.004 (3)', '7')
    """
    return f"{values[0]} to {values[-1]} ({len(values)})" if len(values) > 1 else f"{values[0]}"


def _changes(name: str, variants: dict[str, Variant]) -> str:
    """Return what a variant changes, with a matched width and its remaining difference."""
    v = variants[name]
    changes = {key: value for key, value in v.plan.changes.items() if key not in v.plan.lists}
    if match := v.plan.match:
        to_target = ""
        if target := variants.get(match):
            to_target = (
                f": {v.n_params - target.n_params:+,} parameters, "
                f"{v.flops - target.flops:+,.0f} FLOPs/token"
            )
        changes["model.d_ff"] = f"{v.config.model.d_ff} (params of {match!r}{to_target})"
    return ", ".join(f"{key}={value}" for key, value in changes.items()) or "nothing: the base"
