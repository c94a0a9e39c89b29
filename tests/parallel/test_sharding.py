"""Training on a mesh equals training on one device, and communicates exactly what it should."""

import functools
import itertools
import math
import re
from collections import Counter
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from on_devices import config_of
from running import on_devices, python, slow
from tiny import tiny

from lm import model, parameters, step
from lm.config import MESH_AXES, MeshConfig
from lm.cost.communication import transfers
from lm.cost.hlo import parse_collectives
from lm.cost.memory import abstract_train_state
from lm.parallel import sharding
from lm.parallel.mesh import BATCH_AXES, check_mesh, mesh_sizes, over_slices
from lm.system.errors import UserError

MODELS = {
    "modern": {},
    "eight heads": {"model": {"n_heads": 8, "n_kv_heads": 8}},
    "scanned": {"model": {"scan_layers": True, "remat": "block"}},
    "micro-batches": {"train": {"micro_batch_size": 4, "loss_chunk": 16}},
    "everything": {
        "model": {
            "norm": "layer", "ffn": "mlp", "attn_bias": True, "ffn_bias": True, "head_bias": True, "qk_norm": True,
            "positions": "learned", "remat": "dots", "vocab_size": 20, "window_pattern": [3, 0],
        }
    },
    "norms over all heads": {
        "model": {
            "norm_placement": "output", "qk_norm": True, "qk_norm_over": "all_heads", "attn_bias": True,
            "attn_out_bias": False, "embed_scale": 4.0, "attn_scale": 0.3, "rope_width": 2,
        }
    },
    "dropout": {"model": {"tie_embeddings": True, "dropout": 0.1}},
    # The devices exchange parts of matrices for whole ones: cases with fewer and with more matrices
    # than devices.
    "muon": {"optimizer": {"name": "muon"}, "model": {"n_layers": 3}},
    "normuon": {"optimizer": {"name": "normuon"}, "model": {"ffn": "moe", "n_experts": 4}},
    "muonh": {"optimizer": {"name": "muonh"}},
    "soap": {"optimizer": {"name": "soap", "soap_every": 2}, "model": {"n_kv_heads": 4, "d_ff": 16}},  # see soap.py
    "schedule_free": {"optimizer": {"name": "schedule_free", "schedule": "constant", "cautious_decay": True}},
    "packed": {"data": {"packing": "documents"}},
}  # fmt: skip
MESHES = [
    [8, 1, 1, 1], [1, 8, 1, 1], [4, 1, 2, 1], [2, 1, 1, 4], [4, 2, 1, 1], [2, 2, 2, 1], [1, 1, 2, 4], [1, 2, 1, 4],
    [1, 2, 2, 2],
]  # fmt: skip
ONE = dict.fromkeys(MESH_AXES, 1)
ALL_MESHES = [
    list(sizes) for sizes in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(sizes) == 8
]


# XLA's CPU compiler removes the barriers of jax.checkpoint before it merges equal operations. The
# compilers for GPUs and TPUs keep them, as does the CPU compiler without these passes.
KEEP_BARRIERS = {
    "XLA_FLAGS": "--xla_disable_hlo_passes=optimization-barrier-expander,cse_barrier_expander"
}


def assert_equal(found: dict, reference: dict) -> None:
    assert found.keys() == reference.keys()
    for name, array in reference.items():
        largest = np.abs(array).max()  # gradients may be small; parameters and losses are about 1
        scale = (largest or 1.0) if name.startswith("first/") else max(1.0, largest)
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-5 * scale, err_msg=name)


def composed(state: dict) -> dict:
    """Replace SOAP's eigenvectors q by q diag(q^T l q) q^T.

    This is continuous where q is not: q has any sign, and amplifies rounding where two eigenvalues
    of l are close.
    """
    found = dict(state)
    for name in (name for name in state if "/q_left" in name or "/q_right" in name):
        q, l = (np.float64(state[key]) for key in (name, name.replace("/q_", "/")))
        n = math.isqrt(q[0].size)  # a square matrix of each layer
        q, l = q.reshape(-1, n, n), l.reshape(-1, n, n)
        found[name] = q * np.diagonal(q.mT @ l @ q, axis1=1, axis2=2)[:, None] @ q.mT
    return found


def meshes_of(model: str) -> list[list[int]]:
    """Return the meshes to test: all that the heads of "modern" allow, the rest for "eight heads",
    else one.
    """
    # see test_what_cannot_be_sharded
    few, no_sequence = (
        [mesh for mesh in ALL_MESHES if mesh[2] <= 2],
        [[2, 2, 2, 1]],
    )
    many = [mesh for mesh in ALL_MESHES if mesh not in few]
    found = {"modern": few, "eight heads": many, "dropout": no_sequence, "normuon": no_sequence}
    return (found | {"muon": [[1, 8, 1, 1], [1, 4, 2, 1]]}).get(model, [[1, 2, 2, 2]])


@pytest.mark.parametrize("model", [m if m == "scanned" else slow(m) for m in MODELS])
def test_ten_steps_on_a_mesh_equal_ten_steps_on_one_device(tmp_path, model):
    cases = [{"mesh": mesh, "sections": MODELS[model]} for mesh in [None, *meshes_of(model)]]
    reference, *others = on_devices(tmp_path, 8, cases)[0]
    for case, found in zip(cases[1:], others, strict=True):
        try:
            assert_equal(composed(found), composed(reference))
        except AssertionError as error:
            raise AssertionError(f"mesh {case['mesh']}: {error}") from error


@pytest.mark.slow
def test_bfloat16_losses_on_a_mesh_stay_close_to_those_of_one_device(tmp_path):
    """Products are rounded to 8 bits and summed in another order, so the losses are not equal."""
    cases = [
        {"mesh": mesh, "sections": {"model": {dtype: "bfloat16", "compute_dtype": "bfloat16"}}}
        for dtype, mesh in (("compute_dtype", [2, 2, 1, 2]), ("param_dtype", [2, 2, 2, 1]))
    ]
    for case, found in zip(cases, on_devices(tmp_path, 8, cases)[0], strict=True):
        (reference,), _ = on_devices(tmp_path, 1, [case | {"mesh": None}])
        np.testing.assert_allclose(found["losses"], reference["losses"], rtol=0, atol=0.03)


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_products_gather_nothing_over_tensor(tmp_path, dtype):
    """The partitioner does not support layout constraints, and would gather a constrained array.

    It would also gather heads and scores that share an axis with the examples.
    """
    case = {
        "mesh": [1, 4, 2, 1],
        "sections": {"model": {"compute_dtype": dtype, "vocab_size": 20}},
        "hlo": True,
    }
    gathers = [
        c
        for c in parse_collectives(on_devices(tmp_path, 8, [case])[1][0])
        if c.kind == "all-gather"
    ]
    assert {c.n for c in gathers} == {4}


# ---- Communication -------------------------------------------------------------------------------

SCANNED = {"model": {"scan_layers": True, "n_layers": 3, "vocab_size": 20}}
WIDE = {  # so wide that gains and scalars, which the estimate omits, are less than 1 %
    "model": {"scan_layers": True, "n_layers": 3, "vocab_size": 64, "d_model": 128, "d_ff": 384},
    "train": {"seq_len": 24},
}
COUNTED = [
    *((WIDE, mesh) for mesh in MESHES),
    (
        {**WIDE, "model": WIDE["model"] | {"tie_embeddings": True}},
        [2, 4, 1, 1],
    ),  # CPUs send bfloat16 as float32
    (
        {
            **WIDE,
            "model": WIDE["model"] | {"remat": "block"},
            "train": {"seq_len": 24, "loss_chunk": 64},
        },
        [1, 2, 2, 2],
    ),
    ({**WIDE, "train": {"seq_len": 24, "micro_batch_size": 2}}, [2, 2, 1, 2]),
    ({**WIDE, "optimizer": {"name": "muon"}}, [1, 4, 2, 1]),
]
UNROLLED = [
    ({**sections, "model": sections["model"] | {"scan_layers": False}}, mesh)
    for sections, mesh in [(WIDE, [1, 8, 1, 1]), *COUNTED[-5:]]
]


@pytest.mark.slow
@pytest.mark.parametrize(("counted", "environment"), [(COUNTED, {}), (UNROLLED, KEEP_BARRIERS)])
def test_estimated_communication_equals_that_of_the_compiled_program(
    tmp_path, counted, environment
):
    """For each collective and group size, up to 1 % of all bytes (gains, scalars)."""
    cases = [{"mesh": mesh, "sections": sections, "hlo": True} for sections, mesh in counted]
    for case, text in zip(cases, on_devices(tmp_path, 8, cases, **environment)[1], strict=True):
        sizes, config = dict(zip(MESH_AXES, case["mesh"], strict=True)), config_of(case)
        found = parse_collectives(text)
        check_sizes(found, config, sizes)
        expected, sent, exchanges = Counter(), Counter(), config.optimizer.name == "muon"
        for s in transfers(config, sizes):
            expected[s.kind, s.n] += s.sent
            if (
                s.what == "gradients of their inputs"
            ):  # on a CPU of 5 weights in each layer, elsewhere of 2 modules
                expected[s.kind, s.n] += 1.5 * s.sent
        # The partitioner exchanges a few token ids and weights when it shards them over positions.
        others = ("collective-permute",) if exchanges else ("collective-permute", "all-to-all")
        for c in found:
            sent["others" if c.kind in others else c.kind, c.n] += c.sent
        for group in expected.keys() | sent.keys():
            allowed = 0.01 * expected.total()
            assert sent[group] == pytest.approx(expected[group], rel=0, abs=allowed), (
                case["mesh"],
                group,
            )


def check_sizes(found, config, sizes) -> None:
    """Assert that no gather is larger than the largest parameter of a layer or the embedding, and
    none of activations.

    Keys and values are the exception: sequence parallelism gathers them over positions, but not
    over examples.
    """
    m, table = config.model, parameters.parameter_table(config.model)
    largest = max(p.size // (m.n_layers if p.axes[0] == "N" else 1) for p in table.values())
    for c in found:
        if c.kind == "all-gather":
            for _, shape in c.shapes:
                if len(shape) == 4 and shape[1] == config.train.seq_len and shape[3] == m.d_head:
                    assert c.n == sizes["sequence"], c
                    share = config.train.batch_size // (sizes["replica"] * sizes["fsdp"])
                    assert shape[0] == min(share, config.train.micro_batch_size or share), c
                    continue
                assert math.prod(shape) <= largest, c
                assert shape[-2:] != (config.train.seq_len, m.d_model), c


HLO = """\
HloModule test

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%inner (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %g = f32[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,1},{2,3}}
}

%outer (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %w = (s32[], f32[8,4]) while(%t), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %r = (bf16[10]{0}, pred[6]{0}) all-reduce(%x, %y), replica_groups=[1,4]<=[4], to_apply=%add
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %w2 = (s32[], f32[8,4]) while(%t), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %s = f32[2]{0} reduce-scatter(%x), replica_groups=mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}, to_apply=%add
}
"""


def test_parse_collectives_by_hand():
    gather, reduce, scatter = parse_collectives(HLO)
    assert (gather.kind, gather.n, gather.times, gather.payload) == ("all-gather", 2, 15, 128)
    assert (reduce.kind, reduce.n, reduce.times, reduce.payload) == ("all-reduce", 4, 5, 26)
    assert (scatter.kind, scatter.n, scatter.times, scatter.payload) == ("reduce-scatter", 4, 1, 32)
    assert gather.sent == 0.5 * 128 * 15
    assert reduce.sent == 2 * 0.75 * 26 * 5
    with pytest.raises(ValueError, match="unknown trip count"):
        parse_collectives(re.sub(r', backend_config=\S+"5"\}\}', "", HLO))


@pytest.mark.slow
def test_no_loop_over_the_layers_passes_on_the_whole_weights_of_all_layers(tmp_path):
    """Parameters of a layer are gathered in the forward and again in the backward pass, and not
    kept in between.
    """
    # At this length no activation has the shape of a weight.
    case = {"mesh": [1, 8, 1, 1], "sections": SCANNED | {"train": {"seq_len": 11}}, "hlo": True}
    (text,), n_layers = on_devices(tmp_path, 8, [case])[1], SCANNED["model"]["n_layers"]
    of_layers = f'"known_trip_count":{{"n":"{n_layers}"}}'  # a scatter may be a loop, too
    loops = [line for line in text.splitlines() if " while(" in line and of_layers in line]
    assert len(loops) == 2
    for p in model.block_table(config_of({"sections": SCANNED}).model).values():
        if p.kind == "weight":
            assert not any(f"[{n_layers},{','.join(map(str, p.shape))}]" in loop for loop in loops)


# ---- Shardings as types --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "sections"),
    [
        ((2, 2, 1, 2), {}),
        slow((1, 2, 2, 2), {"train": {"micro_batch_size": 1, "loss_chunk": 4, "ema": 0.9}}),
        slow((2, 2, 2, 1), {"optimizer": {"name": "muon"}, "model": {"scan_layers": True}}),
        slow((1, 4, 1, 2), {"optimizer": {"name": "schedule_free"}, "train": {"z_loss": 1e-4}}),
        slow((1, 8, 1, 1), {"optimizer": {"name": "lion"}, "train": {"on_spike": "skip"}}),
    ],
)
def test_a_step_changes_the_sharding_of_the_batch_alone(monkeypatch, sizes, sections):
    """With shardings as types a trace fails where XLA would move arrays by itself.

    Rows of the batch arrive whole, and each device takes its positions. `tensor` is left to XLA,
    and so are the statistics by row of NorMuon and SOAP, which every device has.
    """
    config = tiny(**sections | {"train": {"batch_size": 8} | sections.get("train", {})})
    explicit = AxisType.Explicit
    mesh = AbstractMesh(sizes, MESH_AXES, (explicit, explicit, AxisType.Auto, explicit))

    def by_position(batch, of_batch=step.batch_fields):
        spec = jax.P(BATCH_AXES, "sequence")
        return {name: jax.reshard(x, spec) for name, x in of_batch(batch).items()}

    def specs(avals):
        """Return the axes of each dimension, without those of tensor."""
        return [[axis for axis in a.sharding.spec if axis not in ("tensor", None)] for a in avals]

    with jax.sharding.use_abstract_mesh(mesh):
        state = abstract_train_state(config, mesh)
        rows = jax.NamedSharding(mesh, jax.P(BATCH_AXES))
        batch = {"tokens": jax.ShapeDtypeStruct((8, 9), np.int32, sharding=rows)}
        traced = functools.partial(step.train_step, config=config)
        monkeypatch.setattr(step, "batch_fields", by_position)
        after = jax.jit(traced).trace(state, batch).jaxpr.out_avals
    before = jax.tree.leaves(state)
    assert specs(after[: len(before)]) == specs(before)


# ---- Placement of arrays -------------------------------------------------------------------------


INITIALIZE = """
import functools, re, sys
import jax; jax.config.update("jax_num_cpu_devices", 8)
from tiny import tiny
from lm import model, parameters
from lm.parallel import sharding
from lm.parallel.mesh import make_mesh
from lm.config import MESH_AXES
from lm.step import init_state
config = tiny(model={"vocab_size": 64, "d_model": 1024, "d_ff": 8192}, train={"batch_size": 16})
table, init = parameters.parameter_table(config.model), functools.partial(init_state, config)
for mesh in ([1, 8, 1, 1], [1, 2, 2, 2]):
    with jax.set_mesh(make_mesh(dict(zip(MESH_AXES, mesh)))):
        shardings = jax.tree.map(lambda a: a.sharding, sharding.shard_state(jax.eval_shape(init, 0), table))
        text = jax.jit(init, out_shardings=shardings).lower(0).compile().as_text()
    sizes = [eval(shape.replace(",", "*")) for shape in re.findall(r"\\b[fus]\\d+\\[([\\d,]+)\\]", text)]
    print(max(sizes), max(p.size for p in table.values()))
"""


@pytest.mark.slow
def test_the_initial_state_is_computed_in_shards():
    """No array of the program is larger than a device's shard of the largest parameter."""
    for line, n_shards in zip(python(INITIALIZE).splitlines(), (8, 4), strict=True):
        largest, full = map(int, line.split())
        assert largest == full // n_shards


def test_a_mesh_that_does_not_fit_the_devices_is_an_error():
    assert list(mesh_sizes(MeshConfig(1, -1, 2, 1), 8).values()) == [1, 4, 2, 1]
    assert list(mesh_sizes(MeshConfig(2, 2, 2, 1), 8).values()) == [2, 2, 2, 1]
    for sizes, message in {
        (-1, 3, 1, 1): r"fsdp 3 .* does not fit 8 devices; .* must be 1, 2, 4 or 8",
        (2, 2, 1, 1): "does not fit 8 devices; set one axis to -1 and .* 1, 2, 4 or 8",
        (1, 16, 1, 1): "does not fit 8 devices",
    }.items():
        with pytest.raises(UserError, match=message):
            mesh_sizes(MeshConfig(*sizes), 8)


@pytest.mark.parametrize(
    ("sizes", "sections", "message"),
    [
        (
            (1, 1, 8, 1),
            {},
            "config.model.n_heads: 4 is not divisible by tensor = 8; use 8, .* with tensor = 1, 2 "
            "or 4",
        ),
        ((1, 1, 4, 2), {}, "config.model.n_kv_heads: 2 is not divisible by tensor = 4; use 4"),
        ((8, 1, 1, 1), {}, "config.train.batch_size: 4 is not divisible by .* = 8; use 8"),
        (
            (4, 2, 1, 1),
            {"train": {"batch_size": 20}},
            "use 16 or 24, .* with replica x fsdp = 1, 2 or 4",
        ),
        (
            (2, 1, 1, 4),
            {"train": {"seq_len": 10}},
            "train.seq_len: 10 is not divisible by sequence = 4; use 8 or 12",
        ),
        ((1, 1, 1, 8), {"model": {"dropout": 0.1}}, "config.model.dropout"),
        ((1, 1, 1, 8), {"model": {"attention": "cudnn"}}, "config.model.attention: cudnn"),
        ((1, 1, 1, 8), {"model": {"attention": "chunked"}}, "config.model.attention: chunked"),
        (
            (1, 1, 1, 8),
            {"model": {"ffn": "moe", "n_experts": 4}},
            "config.mesh.sequence: model.ffn needs whole",
        ),
    ],
)
def test_what_cannot_be_sharded(sizes, sections, message):
    config = tiny(**sections)
    object.__setattr__(config, "mesh", MeshConfig(*sizes))
    with pytest.raises(UserError, match=message):
        check_mesh(config, 8)


def test_a_vocabulary_that_tensor_does_not_divide_is_replicated():
    table = parameters.parameter_table(tiny().model)  # 19 tokens
    sizes = ONE | {"fsdp": 2, "tensor": 2}
    assert tuple(sharding.parameter_spec(table["embedding"], sizes)) == (None, "fsdp")
    assert tuple(sharding.parameter_spec(table["layers/ffn/w_gate_DF"], sizes)) == (
        None,
        "fsdp",
        "tensor",
    )
    assert tuple(sharding.parameter_spec(table["layers/attention_norm/scale_D"], sizes)) == (
        None,
        None,
    )


def test_an_axis_of_the_mesh_divides_a_parameter_once():
    """A table of values by token has two axes for tensor, the vocabulary and the heads; it is
    divided by heads.
    """
    table = parameters.parameter_table(
        tiny(model={"value_embeddings": True, "vocab_size": 20, "n_kv_heads": 2}).model
    )
    (p,) = (p for path, p in table.items() if path.endswith("value_embedding_VGK"))
    spec = sharding.parameter_spec(p, ONE | {"fsdp": 2, "tensor": 2})
    assert [axis for axis in spec if axis] == ["tensor"]
    assert spec[p.axes.index("G")] == "tensor"


def devices_of(platform: str, n_slices: int) -> list[SimpleNamespace]:
    """Return what JAX says of slices of 2 x 2 TPU chips, or of nodes of 4 GPUs, which it calls
    slices, too.
    """
    return [
        SimpleNamespace(
            id=4 * s + i, slice_index=s, process_index=s, platform=platform, device_kind=platform,
            coords=(i % 2, i // 2, 0), core_on_chip=0,
        )
        for i in range(4) for s in range(n_slices)
    ]  # fmt: skip


def test_replicas_of_tpus_cross_slices_and_other_axes_do_not_and_all_axes_may_cross_nodes_of_gpus():
    """jax.make_mesh refuses both."""
    mesh = over_slices((4, 2, 1, 1), devices_of("tpu", 2))
    assert [[{d.slice_index for d in row.flat} for row in mesh[i : i + 2]] for i in (0, 2)] == [
        [{0}, {0}],
        [{1}, {1}],
    ]
    assert len({d.id for d in mesh.flat}) == 8
    with pytest.raises(
        UserError, match=r"config.mesh.replica: 1 is not a multiple of the 2 TPU slices"
    ):
        over_slices((1, 8, 1, 1), devices_of("tpu", 2))
    mesh = over_slices((1, 4, 2, 1), devices_of("gpu", 2))
    assert [d.id for d in mesh.flat] == list(range(8))
