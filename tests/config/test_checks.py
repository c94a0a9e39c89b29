"""Keys that contradict each other, although each value is in range."""

import importlib.util

from lm.command_line.loading import load, load_values, parse_settings
from lm.config import schema
from lm.config.values import show

CONTRADICTIONS = [
    ("model.d_model=100 model.n_heads=8", ("model.d_model: 100 is not divisible by n_heads = 8; "
                                          "use n_heads = 10")),
    ("model.d_model=2147483647 model.n_heads=3",
     "model.d_model: 2147483647 is not divisible by n_heads = 3; use n_heads = 1"),
    # no conflict with the default, 4
    ("model.d_model=250 model.n_heads=0", "model.n_heads: 0 is out of range"),
    ("model.d_head=7", "model.d_head: 7 is odd, but RoPE rotates pairs of features; use 8"),
    ("model.d_model=12", "model.d_head: 3 is odd"),
    ("model.rope_width=3", "model.rope_width: 3 must be even and at most the width of a head, 64"),
    ("model.rope_width=66", ("model.rope_width: 66 must be even and at most the width of a head, "
                            "64")),
    ("model.rope_scaling=llama3 model.rope_low_freq_factor=4",
     "model.rope_low_freq_factor: 4.0 is not less than rope_high_freq_factor = 4.0; Llama 3.1 "
     "has 1 and 4"),
    ("model.parametrization=mup model.attn_scale=0.1", "model.attn_scale: 0.1, but muP scales attention scores"),
    ("model.d_model=9 model.n_heads=3 model.positions=sinusoidal", "model.d_model: 9 is odd"),
    ("model.n_kv_heads=3", "model.n_kv_heads: 3 does not divide n_heads = 4; use one of [1, 2, 4]"),
    ("model.norm=layer model.norm_algorithm=running_mean model.norm_ddof=1", "model.norm_ddof: 1"),
    ("model.norm=layer model.d_model=1 model.n_heads=1 model.positions=none model.norm_ddof=1",
     "model.norm_ddof: 1 would divide by 0"),
    (("model.norm=layer model.norm_algorithm=running_mean model.d_model=1 model.n_heads=1 "
     "model.positions=none"),
     "model.norm_algorithm: running_mean divides by d_model - 1"),
    ("model.tie_embeddings=true model.head_bias=true", "model.head_bias: true"),
    ("model.positions=learned model.max_positions=64", "model.max_positions: 64 is less than"),
    ("mesh.sequence=2 model.ffn=moe", ("mesh.sequence: 2, but model.ffn needs whole sequences on "
                                      "a device; use 1")),
    ("model.conv_stream=true model.residual=hyper_connections", "model.conv_stream: it changes the one stream"),
    ("model.residual_scalars=true model.residual=depth_attention", "model.residual_scalars: it changes the one stream"),
    ("model.residual=hyper_connections model.norm_placement=parallel",
     "model.norm_placement: parallel normalizes the plain sum"),
    ("model.attn_sink=true model.attn_forget=true", "model.attn_sink: true, but the gates of attn_forget"),
    ("model.residual=hyper_connections model.parametrization=mup", "model.residual: hyper_connections, but muP"),
    ("model.gated_delta=three_of_four model.attn_softcap=50",
     "model.attn_softcap: 50.0, but layers of gated_delta have no attention scores"),
    ("model.gated_delta=all model.window_pattern=(0,64)", "model.window_pattern: (0, 64), but layers of gated_delta"),
    ("model.gated_delta=all model.attn_scale=0.1", "model.attn_scale: 0.1, but layers of gated_delta"),
    ("model.attention=xla model.attn_softcap=50", "model.attention: xla does not support attn_softcap"),
    ("model.attention=cudnn", "model.attention: cudnn needs compute_dtype = bfloat16"),
    ("model.n_layers=100000", ("model.n_layers: 100000 layers, compiled one by one, would take "
                              "minutes to days")),
    (("model.attention=cudnn model.compute_dtype=bfloat16 model.scan_layers=true "
     "model.window_pattern=(64,0)"),
     "model.attention: cudnn needs one window"),
    *((f"name={name}", "name: ") for name in
      ("../run", "a/b", "a\\\\b", ".", "", "a\\nb", "\x1b[2J", "\u202egnp", "a" * 5000)),
    ("data.splits=(0.5,0.5,0.5)", "data.splits: (0.5, 0.5, 0.5) must be three fractions"),
    ("data.splits=(0,0.5,0.5)", "data.splits: (0.0, 0.5, 0.5) must be three fractions"),
    ("data.splits=(0.5,0.5)", "data.splits: (0.5, 0.5) must be three fractions"),
    ("data.tokenizer=none", "data.tokenizer: none, but tfds:tiny_shakespeare is text"),
    ("data.tokenizer=bpe:256", "data.tokenizer: bpe:256 is too small"),
    ("data.source=tokens:x", "data.tokenizer: char is learned from text"),
    ("data.source=tokens:x data.tokenizer=none data.splits=(0.8,0.1,0.1)", "data.splits: token shards name"),
    ("data.source=tokens:x data.tokenizer=none data.packing=documents data.order=epochs",
     "data.packing: documents needs"),
    ("data.packing=documents", "data.order: crops cut across documents"),
    ("data.packing=documents data.order=epochs data.stride=3", "data.stride: 3 has no effect with packing"),
    ("train.debug=true model.scan_layers=true", "train.debug: true"),
    ("train.debug=true train.steps_per_dispatch=2", "train.steps_per_dispatch: 2"),
    ("optimizer.name=schedule_free", "optimizer.schedule: cosine, but schedule_free"),
    ("optimizer.name=schedule_free optimizer.schedule=constant optimizer.b1=0", "optimizer.b1: 0.0"),
    ("optimizer.name=schedule_free optimizer.schedule=constant train.ema=0.9", "train.ema: 0.9"),
    ("optimizer.name=schedule_free optimizer.schedule=constant model.param_dtype=bfloat16",
     "model.param_dtype: bfloat16 is too coarse"),
    ("optimizer.decay_steps=2000", "optimizer.decay_steps: 2000 is more than train.steps = 1000"),
    ("optimizer.warmup_steps=1000", ("optimizer.warmup_steps: 1000 is not less than the schedule "
                                    "of 1000")),
    ("train.profile=(5,3)", "train.profile: (5, 3) must be (first, last)"),
    ("train.profile=(5,5000)", "train.profile: (5, 5000)"),
    ("train.profile=5", "train.profile: (5,)"),
    ("eval.sample_prompt=", "eval.sample_prompt: empty"),
    ("eval.patience=3", "eval.patience: 3 counts evaluations during training; set eval.every"),
    ("eval.probes=repeat train.seq_len=2", ("eval.probes: a probe has 4 tokens; use train.seq_len "
                                           "= 3")),
    ("eval.harness_every=5", ("eval.harness_every: the steps between scores and the tasks belong "
                             "together")),
    ("eval.harness_tasks=arc_easy", ("eval.harness_every: the steps between scores and the tasks "
                                    "belong together")),
    ("eval.final_splits=test+valdation", ("eval.final_splits: there is no split 'valdation'; did "
                                         "you mean valid")),
    ("mesh.fsdp=0", "mesh.fsdp: 0 is not a number of devices"),
    ("mesh.fsdp=-1", "mesh: replica and fsdp are both -1"),
]  # fmt: skip


def test_a_contradiction_is_reported_once(config_file, the_problem):
    path = config_file()
    for overrides, expected in CONTRADICTIONS:
        assert the_problem(path, *overrides.split()).startswith(f"config.{expected}"), overrides


FITTING = [
    "model.parametrization=mup optimizer.name=muon",
    "model.scan_layers=true model.window_pattern=(64,64,0)",
    "model.attention=cudnn model.compute_dtype=bfloat16 model.scan_layers=true model.n_layers=1 "
    "model.window_pattern=(64,0)",
    "model.positions=none model.d_head=7",
    "eval.sample_prompt= eval.sample_tokens=0",
    "data.splits=(0.7,0.0,0.3)",
    "train.steps=0 optimizer.warmup_steps=20 optimizer.decay_steps=100",
]


def test_keys_that_go_together_are_accepted(config_file):
    path = config_file()
    for overrides in FITTING:
        load(path, overrides.split())


MIXTURE = repr((("plays", "text:plays", 1.0), ("docs", "python_docs", 1.0)))
WITHOUT_EFFECT = [  # a key, the value of another with which it has no effect, and the advice
    ("model.norm_ddof=1", "model.norm=rms", "model.norm = layer"),
    ("model.n_experts=4", "model.ffn=glu", "model.ffn = moe"),
    ("model.ffn_bias=true", "model.ffn=moe", "ffn_bias = false, or moe_first_layer = 1"),
    ("model.norm=layer", "model.norm_placement=none", "another model.norm_placement"),
    ("model.rope_window_theta=500", "model.window_pattern=(0,)", "none, or a window in some layers"),
    ("model.max_positions=512", "model.positions=rope", "none, or model.positions = learned"),
    ("model.rope_theta=500", "model.positions=none", "model.positions = rope"),
    ("model.rope_factor=8", "model.rope_scaling=none", "another model.rope_scaling"),
    ("model.rope_original_max_positions=64", "model.rope_scaling=linear",
     "model.rope_scaling = llama3 or yarn or dynamic"),
    ("model.qk_norm_over=all_heads", "model.qk_norm=false", "another model.qk_norm"),
    ("model.mup_base_d_head=8", "model.parametrization=standard", "model.parametrization = mup"),
    ("data.field=story", "data.source=text:x", "data.source = jsonl or csv"),
    ("data.special_tokens=true", "data.tokenizer=char", "data.tokenizer = bpe or hf"),
    ("data.unk=true", "data.tokenizer=bpe:300", "data.tokenizer = char or word"),
    ("data.max_epochs=2", "data.mixture=none", "another data.mixture"),
    ("data.source=text:x", f"data.mixture={MIXTURE}",
     "data.mixture = none, or leave data.source at tfds:tiny_shakespeare"),
    ("data.offline=python_docs", f"data.mixture={MIXTURE}", "data.mixture = none"),
    ("eval.max_batches=2", "eval.every=0", "another eval.every"),
    ("eval.harness_limit=2", "eval.harness_tasks=none", "another eval.harness_tasks"),
    ("data.stride=3", "data.order=crops", "data.order = epochs"),
    ("optimizer.momentum=0.9", "optimizer.name=adamw", "optimizer.name = sgd"),
    ("optimizer.b1=0.8", "optimizer.name=sgd", "another optimizer.name"),
    ("optimizer.final_fraction=0", "optimizer.schedule=constant", "optimizer.schedule = linear or cosine"),
    ("optimizer.decay_steps=2000", "optimizer.schedule=constant", "another optimizer.schedule"),
    ("optimizer.cautious_decay=true", "optimizer.weight_decay=0.0", "another optimizer.weight_decay"),
]  # fmt: skip


def test_a_key_without_effect_is_refused_on_the_command_line_and_reported_elsewhere(
    config_file, the_problem
):
    """A file may have keys for several update rules, and a run that an earlier version started must
    resume.
    """
    warnings, epochs = [], "config.data.order = 'epochs'"  # the order of a mixture
    for key, other, advice in WITHOUT_EFFECT:
        path, name = config_file(epochs), key.partition("=")[0]
        refused = the_problem(path, key, other)
        assert refused.startswith(f"config.{name}: "), refused
        assert f"has no effect with {other.replace('=', ' = ')}; use {advice}" in refused
        load(path, [key, other], warnings.append, resuming=True)
        values, _ = parse_settings([key, other], "")
        load_values(path, values, warnings.append)  # variants of a sweep share their base
        path = config_file(epochs, f"config.{name} = {values[name]!r}")
        load(path, [other], warnings.append)
        assert warnings == [f"WARNING: {refused}"] * 2
        load(path, [f"{name}={show(schema()[name][1].default)}", other], warnings.append)
        assert warnings == [f"WARNING: {refused}"] * 2
        warnings.clear()


def test_a_router_that_the_cross_entropy_does_not_train_is_reported(config_file, the_problem):
    """The weight of one expert over the sum of one is 1, whatever the router says."""
    path, one, warnings = config_file(), ["model.ffn=moe", "model.experts_per_token=1"], []
    refused = the_problem(path, *one)
    assert refused.startswith("config.model.experts_per_token: 1 expert has the weight 1")
    assert "use normalize_experts = false" in refused
    load(path, one, warnings.append, resuming=True)
    load(path, [*one, "model.normalize_experts=false"], warnings.append)
    assert warnings == [f"WARNING: {refused}"]


def test_the_condition_of_a_key_names_another_key_of_its_section_and_values_that_this_one_takes():
    for name, (_, field) in schema().items():
        if only := field.metadata["only"]:
            other, _, values = only
            limits = schema()[f"{name.partition('.')[0]}.{other}"][1].metadata
            if allowed := limits["choices"] or limits["forms"]:
                assert {*values} <= {value.partition(":")[0] for value in allowed}, name


def test_packages_that_are_not_installed_are_reported_before_the_run(
    config_file, the_problem, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install -e '.[wandb]'" in the_problem(config_file(), "log.wandb=true")
    tasks = "eval.harness_every=5", "eval.harness_tasks=arc_easy"
    assert "pip install -e '.[eval]'" in the_problem(config_file(), *tasks)
