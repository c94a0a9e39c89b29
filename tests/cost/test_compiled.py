"""--plan --compiled: the compilers of TPUs and GPUs run without devices; mistakes are one message
and exit code 2.
"""

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest
from tiny import tiny

from launch.gke import TPUS, is_slice
from lm.config import MESH_AXES, Config, MeshConfig, checks
from lm.config.schema import TrainConfig
from lm.cost import compiled, hlo, traffic
from lm.cost.communication import Bytes
from lm.cost.compiled import compile_step, slice_of
from lm.cost.devices import DEVICES
from lm.cost.estimate import estimate, factorizations, product_seconds
from lm.cost.hlo import parse_collectives
from lm.cost.report import describe, describe_compiled
from lm.kernels.platform import compiler_options
from lm.system.errors import UserError

SIZES = {"replica": 1, "fsdp": 4, "tensor": 2, "sequence": 1}
MODEL = {
    "n_layers": 3,
    "d_model": 256,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_head": 64,
    "d_ff": 1024,
    "vocab_size": 512,
}
CONFIG = tiny(
    model=MODEL
    | {"compute_dtype": "bfloat16", "scan_layers": True, "remat": "block", "attention": "einsum"},
    train={"batch_size": 16, "seq_len": 256, "micro_batch_size": 2},
    mesh=SIZES,
)
# In the words of XLA:TPU: no known_trip_count, and a copy of an overlapped collective in each of
# its fusions.
TPU_HLO = """\
%cond (p: (s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3), metadata={op_name="a"}
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}
%fused.1 (p: bf16[64]) -> bf16[256] {
  %g.1 = bf16[256]{0} all-gather(%p), channel_id=7, replica_groups={{0,2,4,6},{1,3,5,7}}, attributes={chain_id="0"}
}
%fused.2 (p: bf16[64]) -> bf16[256] {
  %g.2 = bf16[256]{0} all-gather(%p), channel_id=7, replica_groups={{0,2,4,6},{1,3,5,7}}, attributes={chain_id="0"}
}
%body (p: (s32[])) -> (s32[]) {
  %f.1 = bf16[256] fusion(%x), kind=kCustom, calls=%fused.1
  %f.2 = bf16[256] fusion(%x), kind=kCustom, calls=%fused.2
  %r = f32[16]{0} all-reduce(%y), channel_id=8, replica_groups=[4,2]<=[8], to_apply=%add
}
ENTRY %main (a: f32[]) -> f32[] {
  %w = (s32[]) while(%t), condition=%cond, body=%body
  %s = f32[8]{0} reduce-scatter(%z), channel_id=9, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
}
"""


def test_collectives_of_tpus_have_their_axes_and_are_counted_once_per_iteration():
    found = [
        (c.kind, c.axes(SIZES), c.times, c.payload, c.overlapped)
        for c in parse_collectives(TPU_HLO)
    ]
    assert found == [
        ("all-gather", ("fsdp",), 3, 512, True),
        ("all-reduce", ("tensor",), 3, 64, False),
        ("reduce-scatter", ("fsdp",), 1, 128, False),
    ]
    with pytest.raises(ValueError, match="unknown trip count"):
        parse_collectives(TPU_HLO.replace("direction=LT", "direction=NE"))


def test_the_lines_of_a_kernel_do_not_end_a_computation():
    """The attributes of Pallas kernels span several lines, and some lines start with a brace."""
    kernel = '  %k = f32[8] custom-call(%z), frontend_attributes={kernel={\n"a": 1\n}}, metadata={op_name="k"}\n'
    assert len(parse_collectives(TPU_HLO.replace("  %s =", kernel + "  %s ="))) == 3


def test_cycles_are_counted_once_per_iteration_and_not_within_fusions():
    text = TPU_HLO.replace(
        "%f.1 = bf16[256] fusion(", '%f.1 = bf16[256] {"estimated_cycles":"100"} fusion('
    )
    text = text.replace("%g.1 = ", '%g.1 = {"estimated_cycles":"7"} ')
    text = text.replace("%s = ", '%s = {"estimated_cycles":"20"} ')
    assert hlo.compute_cycles(text) == 3 * 100 + 20


def test_the_program_says_which_arguments_it_replaces_and_what_its_largest_buffers_are():
    program = """\
HloModule m, input_output_alias={ {0}: (1, {}, may-alias) }, entry_computation_layout={(f32[9]{0}, bf16[4,8]{1,0})}
ENTRY %main (a: f32[9], b: bf16[4,8]) -> f32[8] {
  %a = f32[9]{0} parameter(0), metadata={op_name="batch[\\'tokens\\']"}
  %b = bf16[4,8]{1,0} parameter(1), metadata={op_name="state.params[\\'embedding\\']"}
  ROOT %c.1 = f32[8] add(%a, %b), metadata={op_name="jit(step)/mul"}
}
"""
    assignment = """\
BufferAssignment:
allocation 0: size 64, parameter 1, shape |bf16[4,8]| at ShapeIndex {}, maybe-live-out:
 value: <2 b @0> (size=64,offset=0): bf16[4,8]{1,0}
allocation 1: size 512, color 1, preallocated-temp:
 value: <5 c.1 @0> (size=512,offset=0): f32[8]{0:T(8)S(1)}
allocation 2: size 900, preallocated-temp:
 value: <7 c.1{0} @0> (size=800,offset=100): f32[8]
 value: <8 c.1{1} (phi) @0> (size=700,offset=100): f32[8]
"""
    assert hlo.aliased_bytes(program) == 64
    assert hlo.largest_buffers(assignment, program, 9) == [
        (800, "jit(step)/mul"),
        (64, "state.params['embedding']"),
    ]


def test_a_kernel_moves_its_operands_and_results_and_of_slices_only_what_it_uses():
    """Counted by hand: f32[100] is a stack of 4 layers, from which a loop of 4 turns reads f32[25]
    each.
    """
    program = """\
%cond (p: (s32[])) -> pred[] {
  %limit = s32[] constant(4)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}
%slice_and_add (a: f32[100], b: f32[25]) -> f32[25] {
  %a.1 = f32[100]{0} parameter(0)
  %b.1 = f32[25]{0} parameter(1)
  %d.1 = f32[25]{0} dynamic-slice(%a.1, %i), dynamic_slice_sizes={25}
  ROOT %s.1 = f32[25]{0} add(%d.1, %b.1)
}
%slice_in_16_bits (a: f32[100]) -> bf16[25] {
  %a.5 = f32[100]{0} parameter(0)
  %c.5 = bf16[100]{0} convert(%a.5)
  ROOT %s.5 = bf16[25]{0} slice(%c.5), slice={[0:25]}
}
%nested (a: f32[100]) -> bf16[25] {
  %a.6 = f32[100]{0} parameter(0)
  %n.6 = bf16[25]{0} fusion(%a.6), kind=kLoop, calls=%slice_in_16_bits
  ROOT %o.6 = bf16[25]{0} negate(%n.6)
}
%relabelled (a: f32[100]) -> f32[10,10] {
  %a.7 = f32[100]{0} parameter(0)
  ROOT %b.7 = f32[10,10]{1,0} bitcast(%a.7)
}
%update (a: f32[100], b: f32[25]) -> f32[100] {
  %a.2 = f32[100]{0} parameter(0)
  %b.2 = f32[25]{0} parameter(1)
  ROOT %u.2 = f32[100]{0} dynamic-update-slice(%a.2, %b.2, %i)
}
%product (a: bf16[8,4], b: bf16[4,2]) -> bf16[8,2] {
  %a.3 = bf16[8,4]{1,0} parameter(0)
  %b.3 = bf16[4,2]{1,0} parameter(1)
  ROOT %p.3 = bf16[8,2]{1,0} dot(%a.3, %b.3), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%total (a: f32[25]) -> f32[] {
  %a.4 = f32[25]{0} parameter(0)
  ROOT %r.4 = f32[] reduce(%a.4, %zero), dimensions={0}, to_apply=%add
}
%body (p: (f32[100], f32[25])) -> (f32[100], f32[25]) {
  %stack = f32[100]{0} get-tuple-element(%p), index=0
  %layer = f32[25]{0} get-tuple-element(%p), index=1
  %sum = f32[25]{0} fusion(%stack, %layer), kind=kLoop, calls=%slice_and_add, metadata={op_name="jit(f)/while/body/add"}
  %next = f32[100]{0} fusion(%stack, %sum), kind=kLoop, calls=%update
  ROOT %t = (f32[100], f32[25]) tuple(%next, %sum)
}
ENTRY %main (x: bf16[8,4], y: bf16[4,2]) -> bf16[8,2] {
  %x = bf16[8,4]{1,0} parameter(0)
  %y = bf16[4,2]{1,0:T(8,128)S(1)} parameter(1)
  %w = (f32[100], f32[25]) while(%t), condition=%cond, body=%body
  %h = f32[25]{0} get-tuple-element(%w), index=1
  %stacked = f32[100]{0} get-tuple-element(%w), index=0
  %r = f32[] fusion(%h), kind=kInput, calls=%total
  %k = f32[25]{0} custom-call(%h), custom_call_target="__cudnn$fmhaSoftmax"
  %c = bf16[25]{0} fusion(%stacked), kind=kLoop, calls=%slice_in_16_bits
  %d = bf16[25]{0} fusion(%stacked), kind=kLoop, calls=%nested
  %cublas.1 = (f32[25]{0}, (s32[]{:T(128)}, f32[100]{0})) custom-call(), custom_call_target="other"
  %o = f32[25]{0} negate(%cublas.1#0)
  %q = bf16[25]{0} fusion(%cublas.1#1#1), kind=kLoop, calls=%slice_in_16_bits
  %e = f32[10,10]{1,0} fusion(%stacked), kind=kLoop, calls=%relabelled
  %g = (bf16[8,8]{1,0}, s8[1000]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"
  ROOT %z = bf16[8,2]{1,0} fusion(%x, %y), kind=kOutput, calls=%product
}
"""
    found = {(k.kind, k.owner): (k.moved, k.times) for k in traffic.kernels(program)}
    assert found == {
        (traffic.OTHER, "jit(f)/while/body/add"): (3 * 25 * 4, 4),  # a slice, its addend, the sum
        (traffic.OTHER, "next"): (2 * 25 * 4, 4),  # in place
        (traffic.OTHER, "lt"): (1 + 4, 4),  # the condition of the loop
        (traffic.REDUCTIONS, "r"): (25 * 4 + 4, 1),
        (traffic.ATTENTION, "k"): (2 * 25 * 4, 1),
        (traffic.OTHER, "c"): (25 * 4 + 25 * 2, 1),
        (traffic.OTHER, "d"): (25 * 4 + 25 * 2, 1),
        (traffic.OTHER, "cublas.1"): (25 * 4 + 4 + 100 * 4, 1),
        (traffic.OTHER, "o"): (2 * 25 * 4, 1),  # element 0 of a tuple, in the text of JAX 0.12
        (traffic.OTHER, "q"): (25 * 4 + 25 * 2, 1),
        (traffic.OTHER, "e"): (2 * 100 * 4, 1),
        (traffic.PRODUCTS, "g"): (2 * (2 * 32 + 64), 1),  # without the workspace of cuBLAS
        (traffic.PRODUCTS, "z"): (2 * (32 + 16), 1),  # y is not in the device's memory
    }


def test_an_all_reduce_that_a_tpu_fuses_with_a_slice_is_a_reduce_scatter():
    """One fusion may have several arrays, each sliced along another dimension."""
    text = TPU_HLO.replace("%body", "%all-reduce-scatter.1")
    for result, payload in ("f32[16]{0}", 64), ("(f32[3,8]{1,0}, f32[4,2]{0,1})", 128):
        collectives = parse_collectives(text.replace("f32[16]{0}", result))
        (found,) = [c for c in collectives if c.times == 3 and c.kind == "reduce-scatter"]
        assert (found.payload, found.axes(SIZES)) == (payload, ("tensor",))


def test_what_crosses_slices_is_a_transfer_of_the_host_on_tpus():
    send = (
        "  %send.1 = (f32[2,8]{1,0:T(8,128)}, u32[]{:S(2)}, token[]) send(%a, %b), is_host_transfer=true, "
        'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation='
        '"SUM",_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}\n'
    )
    (found,) = [
        c for c in parse_collectives(TPU_HLO.replace("  %s =", send + "  %s =")) if c.over_slices
    ]
    assert (found.kind, found.axes(SIZES), found.sent) == ("all-reduce", ("slices",), 64)


def test_options_of_the_compiler_are_those_of_the_platform_with_the_changes_of_the_config():
    options = ("xla_enable_async_all_gather=false", "xla_dump_to=here")
    train = dataclasses.replace(CONFIG.train, compiler_options=options)
    text = describe(estimate(dataclasses.replace(CONFIG, train=train), "v5e", 8))
    for option in (
        "xla_enable_async_all_reduce=true",
        "xla_enable_async_all_gather=false",
        "xla_dump_to=here",
    ):
        assert f"\n  {option}" in text
    assert compiler_options("cpu", "cpu", None) == {}
    for name, fused in {"v5e": True, "v5p": False, "v6e": False}.items():
        options = compiler_options("tpu", DEVICES[name].kind)
        # XLA refuses it on other chips
        assert ("xla_tpu_enable_async_collective_fusion" in options) == fused
    ((key, message),) = checks.compiler_options(
        Config(train=TrainConfig(compiler_options=("xla_a", "b=c")))
    )
    assert key == "train.compiler_options"
    assert "'xla_a' is not NAME=VALUE" in message


def test_slices_are_those_of_gke_and_others_are_refused():
    for device, n, topology in (
        ("v5p", 64, "4x4x4"),
        ("v5p", 128, "4x4x8"),
        ("v4", 192, "4x4x12"),
        ("v4", 256, "4x8x8"),
    ):
        assert slice_of(device, n) == f"{device}:{topology}"
        assert is_slice(TPUS[device], topology)
    mistakes = {
        "no v5e slice of 48 devices": ("v5e", 48),
        "multiples of 64 up to 4096": ("v4", 8192),
        "no description of a100-pcie": ("a100-pcie", 8),
        "12 is not a": ("h100", 12),
    }
    for message, arguments in mistakes.items():
        with pytest.raises(UserError, match=message):
            slice_of(*arguments)


def test_without_the_compiler_one_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError,
        match=r"--compiled: the compiler for v5e is not installed; pip install -e '.\[tpu\]'",
    ):
        compile_step(CONFIG, "v5e", SIZES)
    with pytest.raises(UserError, match=r"pip install -e '.\[cuda\]'"):
        compile_step(CONFIG, "h100", SIZES)


def test_an_error_of_the_compiler_is_one_message_that_names_its_text(monkeypatch, tmp_path):
    full = "RESOURCE_EXHAUSTED: Used 20.1G of 15.75G hbm"
    texts = {  # by the message
        "ValueError: a layer has no shape": "Traceback:\n  x\nValueError: a layer has no shape\n",
        full: f"E0000 log: x\njax.Error: {full}\nmore: text\n",
    }
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: True)
    for message, text in texts.items():
        monkeypatch.setattr(compiled, "_run_compiler", lambda job, environment, folder, last, text=text: bool(
            (folder / compiled.LOG).write_text(text) and False
        ))  # fmt: skip
        with pytest.raises(UserError, match=message) as error:
            compile_step(CONFIG, "v5e", SIZES, dump=str(tmp_path / "dump"))
        assert "8 x v5e, mesh replica 1 x fsdp 4 x tensor 2 x sequence 1" in str(error.value)
        named = Path(str(error.value).split("text is in ")[1])
        assert named.read_text() == text
        assert named.parents[1] == tmp_path / "dump"


def test_the_report_has_the_compilers_figures_beside_those_of_the_plan():
    e = estimate(CONFIG, "v5e", 8)
    gathers, sums = ("all-gather", ("fsdp",)), ("all-reduce", ("fsdp",))
    c = compiled.Compiled(
        program="training", peak=5 * 10**6, aliased=0, state=10**6, compute=0.5,
        buffers=[(7000, "state.params['embedding']")],
        sent=Bytes(float, {gathers: 4e6, sums: 2e6}), overlapped=Bytes(float, {gathers: 3e6}), seconds=12.0,
        kernels=[
            traffic.Kernel(traffic.PRODUCTS, "jit(train_step)/jvp()/layers/0/ffn/dot_general", 819, 10),
            traffic.Kernel(traffic.OTHER, "jit(train_step)/jvp()/layers/0/ffn/mul", 819 * 10**6, 2),
            traffic.Kernel(traffic.OTHER, "jit(train_step)/jvp()/layers/1/ffn/mul", 819 * 10**6, 1),
        ],
    )  # fmt: skip
    text = describe_compiled(e, c)
    lines = {line.split("  ")[1]: line for line in text.splitlines() if line.startswith("  ")}
    assert "5.00 MB" in lines["largest use of memory per device"]
    assert lines["train state of 1.00 MB per device"].endswith("COPIED: 1.00 MB of it")
    assert "4.00 MB" in lines["sent per device and step: all-gather over fsdp"]
    assert lines["sent per device and step: all-gather over fsdp"].endswith("75% overlapped")
    assert "0 B" in lines["sent per device and step: all-reduce over fsdp"]
    assert "0.5 s" in lines["time of a step without communication and kernels"]
    assert "7.00 kB" in lines["params/embedding"]
    # a v5e: 819 GB/s
    assert re.search(r"3 x +2.46 GB +3 ms$", lines["layers/*/ffn/mul (element by element)"])
    assert "13 x" in lines["all kernels"]
    of_step = float(lines["time of a step: products at 91% of the peak, then the rest"].split()[-2])
    assert of_step == pytest.approx(3 + 1e3 * product_seconds(CONFIG, DEVICES["v5e"], 8), rel=0.01)
    assert "replaced in place" in describe_compiled(e, dataclasses.replace(c, aliased=10**6))
    short = dataclasses.replace(e, config=tiny(model={"compute_dtype": "bfloat16"}))
    # columns do not touch
    assert re.search(r"kernels +0.5 s [\d.]+e-10 s$", describe_compiled(short, c), re.M)
    decode = describe_compiled(e, dataclasses.replace(c, program="decode", state=0, compute=None))
    assert decode.startswith("Compiled for one of 8 v5e chips in 12 s ")
    assert not {"plan", "state"} & set(decode.split())


def installed(device: str):
    module, extra = compiled.PLUGINS["tpu" if device.startswith("v") else "gpu"]
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None, reason=f"needs the extra [{extra}]"
    )


CUDNN = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None, reason="needs cuDNN, of the extra [cuda]"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "attention"),
    [
        pytest.param("v5e", "auto", marks=installed("v5e")),
        pytest.param("v5p", "einsum", marks=installed("v5p")),
        pytest.param("h100", "tied", marks=installed("h100")),
        pytest.param("h100", "cudnn", marks=[installed("h100"), CUDNN]),
        pytest.param("h100", "gated_delta", marks=installed("h100")),
    ],
)
def test_the_real_compilers_agree_with_the_plan(device, attention, tmp_path):
    """The state is replaced in place, and what is sent over fsdp 4 and tensor 2 was planned."""
    mixing = {"attention": attention}
    if attention == "gated_delta":
        mixing = {"gated_delta": "all"}
    if attention == "tied":  # gradients of the tied embedding are sent once on GPUs
        mixing = {"tie_embeddings": True}
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, **mixing))
    if attention == "tied":
        muon = dataclasses.replace(CONFIG.optimizer, name="muon")
        config = dataclasses.replace(config, optimizer=muon)
    if attention == "cudnn":  # which reads the documents as a mask
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, packing="documents")
        )
    e = estimate(config, device, 8)
    c = compile_step(config, device, e.sizes, dump=str(tmp_path))
    assert c.aliased >= c.state
    assert c.state <= c.peak <= 2 * e.memory.total
    assert any(tmp_path.rglob(compiled.PROGRAM.format("train_step")))
    assert c.buffers[0][0] <= c.peak
    for collective in (("all-gather", ("fsdp",)), ("all-reduce", ("tensor",))):
        assert c.sent[collective] == pytest.approx(e.sent_by_collective[collective], rel=0.1), (
            collective
        )
    if device == "h100":
        scattered = "reduce-scatter", ("fsdp",)
        assert c.sent[scattered] == pytest.approx(e.sent_by_collective[scattered], rel=0.01)


@pytest.mark.slow
@installed("v5e")
def test_several_slices_compile_and_what_crosses_them_was_planned():
    """Two slices of 4 chips: replica 4 is 2 x 2. Muon's matrices are exchanged within a slice."""
    sizes, muon = (
        SIZES | {"replica": 4, "fsdp": 2, "tensor": 1},
        dataclasses.replace(CONFIG.optimizer, name="muon"),
    )
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(**sizes), optimizer=muon)
    e, c = estimate(config, "v5e", 8, n_slices=2), compile_step(config, "v5e", sizes, n_slices=2)
    assert c.aliased >= c.state
    exchanged, crossing = ("all-to-all", ("fsdp",)), ("all-reduce", ("slices",))
    assert c.sent[exchanged] == e.sent_by_collective[exchanged]
    # Small parameters are not scattered over the replicas of a slice first.
    assert c.sent[crossing] == pytest.approx(e.sent_by_collective[crossing], rel=0.15)
    with pytest.raises(
        UserError, match=r"config.mesh.replica: 1 is not a multiple of the 2 TPU slices"
    ):
        estimate(CONFIG, "v5e", 8, n_slices=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "device", [pytest.param(device, marks=installed(device)) for device in ("v5e", "h100")]
)
def test_evaluation_and_generation_compile(device):
    """Evaluation needs less memory than training; a cache has the keys and values of 16 texts in
    each layer.
    """
    train = compile_step(CONFIG, device, SIZES)
    found = {
        name: compile_step(CONFIG, device, SIZES, program=name)
        for name in ("evaluation", "prefill", "decode")
    }
    assert found["evaluation"].peak < train.peak
    assert all(c.state == 0 and c.peak for c in found.values())
    assert found["prefill"].sent == found["decode"].sent == {}  # on one device
    cache = 3 * 2 * 16 * 256 * 2 * 64 * 2
    assert found["decode"].aliased >= cache


@pytest.mark.slow
@installed("h100")
def test_on_a_gpu_biases_are_added_in_products_and_logits_are_read_twice():
    """Once for log Z and the target's logit, once for their gradient."""
    gpt2 = MODEL | {"attn_bias": True, "norm": "layer", "n_kv_heads": 4, "vocab_size": 50_304}
    model = gpt2 | {"compute_dtype": "bfloat16", "scan_layers": False, "attention": "einsum"}
    config = tiny(model=model, train={"batch_size": 16, "seq_len": 256})
    c = compile_step(config, "h100", dict.fromkeys(SIZES, 1))
    forward = [
        k for k in c.kernels if "queries_keys_values" in k.owner and "transpose" not in k.owner
    ]
    assert forward
    # Attention by einsum may copy them.
    assert traffic.OTHER not in {k.kind for k in forward if k.moved > 2**20}
    logits = 16 * 256 * 50_304 * 4
    reads = [k for k in c.kernels if k.kind != traffic.PRODUCTS and k.moved >= logits]
    assert sum(k.total for k in reads) < 2.7 * logits  # the gradient is written in 16 bits


MESHES = factorizations(8, 4)
# changes of sections; each mesh has one of them, so that each is compiled with several meshes
VARIANTS = [
    {},
    {"model": {"scan_layers": False, "window_pattern": (64, 0)}},
    {"data": {"packing": "documents"}, "model": {"attn_softcap": 30.0}},
    {"optimizer": {"name": "muon"}},
    {"train": {"micro_batch_size": None, "loss_chunk": 128}, "model": {"remat": "dots"}},
    {"model": {"remat": "none", "norm": "layer", "n_kv_heads": 8}},
    {"model": {"attention": "auto", "scan_layers": False, "remat": "none"}},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "device", [pytest.param(device, marks=installed(device)) for device in ("v5e", "h100")]
)
@pytest.mark.parametrize("number", range(len(MESHES)))
def test_every_mesh_of_eight_devices_compiles(device, number, tmp_path):
    """The state is replaced in place, nothing is partitioned involuntarily, and gathers are as
    planned.
    """
    sizes, changes = (
        dict(zip(MESH_AXES, MESHES[number], strict=True)),
        VARIANTS[number % len(VARIANTS)],
    )
    sections = {
        "model": MODEL
        | {
            "n_heads": 8,
            "n_kv_heads": 8,
            "d_head": 32,
            "compute_dtype": "bfloat16",
            "remat": "block",
        },
        "train": {"batch_size": 16, "seq_len": 1024, "micro_batch_size": 1},
        "mesh": sizes,
    }
    sections["model"] |= {
        "scan_layers": True,
        "attention": "einsum" if device == "h100" else "auto",
    }
    config = tiny(
        **{name: sections.get(name, {}) | changes.get(name, {}) for name in {*sections, *changes}}
    )
    e, c = estimate(config, device, 8), compile_step(config, device, sizes, dump=str(tmp_path))
    (log,) = tmp_path.rglob(compiled.LOG)
    assert "rematerialization" not in log.read_text()
    assert c.aliased >= c.state
    for kind, axes in c.sent:
        gathers = kind in ("all-gather", "all-to-all")
        assert not gathers or c.sent[kind, axes] <= max(
            1.1 * e.sent_by_collective[kind, axes], 1e5
        ), (kind, axes)
