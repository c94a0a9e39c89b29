"""Bytes per device, against compiled programs and by hand."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from running import python
from tiny import tiny

from lm import parameters
from lm.config import MESH_AXES
from lm.cost.devices import DEVICES
from lm.cost.memory import (
    activation_bytes,
    layer_bytes,
    logit_bytes,
    memory_per_device,
    moved_activation_bytes,
    scores_per_query,
    train_state_bytes,
)
from lm.parameters import init_params
from lm.step import loss_sum

ONE = {"replica": 1, "fsdp": 1, "tensor": 1, "sequence": 1}
MESHES = [[8, 1, 1, 1], [1, 8, 1, 1], [2, 2, 2, 1], [1, 2, 2, 2]]
SMALL = {"model": {"vocab_size": 20}, "train": {"batch_size": 16}}
LARGE = {
    "model": {"n_layers": 4, "d_model": 256, "d_ff": 1024, "remat": "block"},
    "train": {"batch_size": 16, "micro_batch_size": 1},
}
FLAGS = (  # keep the barriers of jax.checkpoint, and schedule for memory instead of concurrency
    "--xla_cpu_enable_concurrency_optimized_scheduler=false "
    "--xla_disable_hlo_passes=optimization-barrier-expander,cse_barrier_expander"
)
COMPILED = f"""
import jax; jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from tiny import tiny
from lm.config import MESH_AXES
from lm.cost.memory import abstract_train_state, local_bytes
from lm.parallel.mesh import BATCH_AXES, make_mesh
from lm.step import train_step

for sections, sizes in [*(({SMALL}, mesh) for mesh in {MESHES}), ({LARGE}, [1, 8, 1, 1])]:
    mesh = make_mesh(dict(zip(MESH_AXES, sizes)))
    state = abstract_train_state(tiny(**sections), mesh)
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P(BATCH_AXES))
        batch = {{"tokens": jax.ShapeDtypeStruct((16, 9), np.int32, sharding=rows)}}
        shardings = (jax.tree.map(lambda a: a.sharding, state), None)
        step = jax.jit(train_step, static_argnames="config", keep_unused=True, out_shardings=shardings)
        memory = step.lower(state, batch, tiny(**sections)).compile().memory_analysis()
    print(local_bytes(state) + local_bytes(batch), memory.argument_size_in_bytes, memory.temp_size_in_bytes)
"""


@pytest.mark.slow
def test_the_state_has_the_bytes_of_compiled_programs_and_unrolled_layers_are_not_gathered_at_once():
    """Arguments have the predicted size, parameters are divided by the axes that shard them, and
    temporary memory is within the estimate, and far less than the gathered parameters of all
    layers."""
    *small, large = (
        [*map(int, line.split())] for line in python(COMPILED, XLA_FLAGS=FLAGS).splitlines()
    )
    table = parameters.parameter_table(tiny(**SMALL).model)
    for mesh, (predicted, arguments, _) in zip(MESHES, small, strict=True):
        sizes = dict(zip(MESH_AXES, mesh, strict=True))
        params, optimizer = train_state_bytes(tiny(**SMALL), sizes)
        shards = sizes["fsdp"] * sizes["tensor"]
        assert params == 4 * sum(
            p.size // (1 if p.kind == "norm" else shards) for p in table.values()
        )
        # two moments; the counters of Adam, the schedule and weight decay
        assert optimizer == 2 * params + 3 * 4
        assert predicted == arguments
    m, layers = memory_per_device(tiny(**LARGE), DEVICES["h100"], ONE | {"fsdp": 8}), 0
    for path, p in parameters.parameter_table(tiny(**LARGE).model).items():
        layers += 4 * p.size if path.startswith("layers/") else 0
    assert large[2] < m.total - m.parameters - m.optimizer
    assert large[2] < layers / 2


@pytest.mark.parametrize(
    ("device", "model", "seq_len", "keys"),
    [
        ("h100", {"compute_dtype": "bfloat16"}, 4096, 0),  # cuDNN's flash attention keeps none
        ("v5e", {"compute_dtype": "bfloat16", "attention": "einsum"}, 4096, 4096),
        ("v5e", {}, 4096, 0),  # nor does splash attention
        (
            "v5e",
            {"scan_layers": True, "window_pattern": (4096, 0)},
            4096,
            0,
        ),  # a window of all tokens is none
        ("v5e", {"compute_dtype": "bfloat16"}, 64, 64),  # one chunk
        (
            "v5e",
            {"attn_sink": True},
            4096,
            (4096 + 256) / 2,
        ),  # chunked: flash attention has no sink
        ("v5e", {"gated_delta": "all", "attention": "einsum"}, 4096, 0),
        (
            "h100",
            {"gated_delta": "three_of_four", "n_layers": 8},
            4096,
            (4096 + 256) / 2 / 4,
        ),  # 2 of 8 layers
        (
            "h100",
            {"gated_delta": "three_of_four", "n_layers": 8, "attention": "einsum"},
            4096,
            4096 / 4,
        ),
        # rotated features beside those of a head make it wider than cuDNN's limit
        (
            "h100",
            {"mixers": ("attention", "latent"), "compute_dtype": "bfloat16", "d_head": 128},
            4096,
            (4096 + 256) / 2 / 2,
        ),
    ],
)
def test_scores_per_query(device, model, seq_len, keys):
    config = tiny(model={"d_model": 32} | model, train={"seq_len": seq_len})
    assert scores_per_query(config, DEVICES[device], ONE) == keys


# Of a layer in float32 with d_model 16, 4 heads of 4, 2 key-value heads and d_ff 24 (GLU): the
# inputs and outputs of both norms; queries, keys and values; attention's output in two layouts;
# gate, up and their product.
LAYER = 4 * 16 + (4 + 2 * 2) * 4 + 2 * 4 * 4 + 3 * 24


def test_activations_and_logits_by_hand():
    """4 x 8 tokens, vocabulary 19, 2 layers; attention scores and weights of 4 heads and 8 keys."""
    config = tiny(model={"attention": "einsum"})
    layer = LAYER + (1 + 1) * 4 * 8
    assert config.model.ffn == "glu"
    assert activation_bytes(config, DEVICES["h100"], ONE) == 2 * layer * 32 * 4
    for remat, kept in {"block": 16, "dots": 16 + (4 + 2 * 2) * 4 + 16 + 2 * 24}.items():
        changed = tiny(model={"attention": "einsum", "remat": remat})
        assert activation_bytes(changed, DEVICES["h100"], ONE) == 2 * kept * 32 * 4
        assert layer_bytes(changed, DEVICES["h100"], ONE) == layer * 32 * 4
    # queries, attention's output and scores
    doubled = tiny(model={"attention": "einsum", "attn_differential": True})
    more = 4 * 4 + 4 * 4 + (1 + 1) * 4 * 8
    assert activation_bytes(doubled, DEVICES["h100"], ONE) == 2 * (layer + more) * 32 * 4
    for residual, carried in {
        "hyper_connections": 4 * 16,
        "depth_attention": 5 * 16,
    }.items():  # 2 x 2 outputs and x
        remat = tiny(model={"attention": "einsum", "residual": residual, "remat": "block"})
        assert activation_bytes(remat, DEVICES["h100"], ONE) == 2 * (16 + carried) * 32 * 4
        assert layer_bytes(remat, DEVICES["h100"], ONE) == (layer + 2 * carried) * 32 * 4
    # scores and weights, before and after their mixing
    mixed = tiny(model={"mixers": ("talking_heads",)})
    assert activation_bytes(mixed, DEVICES["h100"], ONE) == 2 * (LAYER + 4 * 4 * 8) * 32 * 4
    twice = tiny(model={"attention": "einsum", "branches": ("attention", "attention", "ffn")})
    more = 2 * 16 + (4 + 2 * 2) * 4 + 2 * 4 * 4 + (1 + 1) * 4 * 8
    assert activation_bytes(twice, DEVICES["h100"], ONE) == 2 * (layer + more) * 32 * 4
    assert logit_bytes(config, ONE) == 2 * 32 * 19 * 4
    assert logit_bytes(tiny(train={"loss_chunk": 8}), ONE) == 2 * 8 * 19 * 4
    rounded = tiny(
        model={"compute_dtype": "bfloat16", "round_logits": True}, train={"loss_chunk": 8}
    )
    assert logit_bytes(rounded, ONE) == 2 * 8 * 19 * 2


@pytest.mark.parametrize("device", ["v5e", "h100"])
def test_the_worst_moment_is_the_loss_or_the_backward_pass_of_a_layer(device):
    """bfloat16 products, fsdp 2: 16 tokens per device; weights of a layer: attention 768,
    feed-forward 1152.
    """
    model = {"compute_dtype": "bfloat16", "remat": "block", "attention": "einsum"}
    config, sizes = tiny(model=model | {"vocab_size": 18}), ONE | {"fsdp": 2}
    weights, gains, ffn, embedding = 768 + 1152, 2 * 16, 1152, 18 * 16
    m = memory_per_device(config, DEVICES[device], sizes)
    assert (m.loss, m.activations) == (0, 2 * 16 * 16 * 2)
    assert m.parameters == 4 * (2 * (weights / 2 + gains) + 16 + 2 * embedding / 2)
    last_axis_sharded = 256 + 384  # of attention's and the feed-forward layer's last product
    gathered = {"v5e": 2 * (weights + gains) + 4 * ffn, "h100": 8 * (weights + gains)}[device]
    assert m.layer == gathered + 2 * (LAYER + (1 + 2) * 4 * 8) * 16
    assert m.copies == {"v5e": 2 * weights, "h100": 2 * 4 * last_axis_sharded}[device]
    # gradients of the head, and of the embedding
    whole = {"v5e": embedding, "h100": 2 * embedding}[device]
    assert m.gradients == 4 * 2 * (weights / 2 + gains) + 4 * whole
    large = memory_per_device(tiny(model=model | {"vocab_size": 5000}), DEVICES[device], sizes)
    assert (large.layer, large.loss) == (0, 2 * 5000 * 16 + 2 * 3 * 16 * 16 + (4 + 2) * 16 * 5000)


def test_a_chunk_of_the_loss_counts_the_tokens_of_a_device():
    """Of its 32 tokens, each of 8 devices has the logits of 8 at a time, in the program and in the
    estimate.
    """
    config = tiny(model={"vocab_size": 23}, train={"batch_size": 8, "seq_len": 32, "loss_chunk": 8})
    sizes = ONE | {"fsdp": 8}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 4)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 33), "int32")}
    params = jax.eval_shape(lambda: init_params(config.model, 0))
    with jax.sharding.use_abstract_mesh(mesh):
        program = str(
            jax.make_jaxpr(lambda params, batch: loss_sum(params, batch, config))(params, batch)
        )
    assert "f32[8,23]" in program
    assert logit_bytes(config, sizes) == 2 * 8 * 23 * 4


def test_moved_activations_by_hand():
    """Two layers 6 times, 8 times with remat; logits 5 times."""
    for remat, times in (("none", 6), ("dots", 6), ("block", 8)):
        expected = 32 * (2 * times * LAYER * 4 + 5 * 19 * 4)
        assert moved_activation_bytes(tiny(model={"remat": remat}), ONE) == expected
        micro_batches = tiny(model={"remat": remat}, train={"micro_batch_size": 1})
        assert moved_activation_bytes(micro_batches, ONE) == expected
