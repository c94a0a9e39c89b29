"""A config that cannot fit in memory is refused before anything is allocated, and the error names
its keys.
"""

import itertools
from types import SimpleNamespace

import pytest
from tiny import tiny

from lm.config import MESH_AXES
from lm.config.values import divisors
from lm.parallel import processes
from lm.parallel.mesh import check_mesh
from lm.step import n_micro_batches
from lm.system.errors import TemporaryError, UserError
from lm.training import job, memory
from lm.training.dispatch import dispatches
from lm.training.memory import check_arrays, report_out_of_memory

ONE = dict.fromkeys(MESH_AXES, 1)
LARGEST = 2**31 - 1


@pytest.fixture
def small_device(monkeypatch):
    """Let each device have 16 GB."""
    monkeypatch.setattr(memory, "device_memory", lambda device: 16e9)


TOO_LARGE = {
    "batch_size": ({"train": {"batch_size": 10**6, "seq_len": 1024}}, ["inputs of a layer", "micro_batch_size"]),
    "vocab_size": ({"model": {"vocab_size": 2 * 10**9}}, ["config.model.{vocab_size, d_model,"]),
    "n_layers": ({"model": {"n_layers": 10**5, "d_model": 512}}, ["state: reduce config.model.{", "n_layers"]),
    "d_model": ({"model": {"d_model": LARGEST - 1, "d_head": 8}}, ["config.model.{"]),
    "all sizes": ({"model": dict.fromkeys(("d_model", "n_layers", "d_ff", "vocab_size"), LARGEST)}, ["config.model.{"]),
    "seq_len": ({"train": {"seq_len": 10**9}}, ["inputs of a layer", "seq_len"]),
    "positions": ({"model": {"positions": "learned", "max_positions": 2 * 10**9}}, ["max_positions"]),
    "steps_per_dispatch": ({"train": {"steps_per_dispatch": LARGEST}}, ["config.train.{steps_per_dispatch,"]),
}  # fmt: skip


def test_what_cannot_fit_is_refused_with_its_keys(small_device):
    for case, (sections, expected) in TOO_LARGE.items():
        with pytest.raises(
            UserError, match=r"^out of memory: training needs at least .* which has 16.0 GB; "
        ) as error:
            check_arrays(tiny(**sections), ONE)
        assert error.value.code == 2
        assert [text for text in expected if text not in str(error.value)] == [], case


def test_what_fits_is_not_refused(small_device, monkeypatch):
    check_arrays(tiny(), ONE)
    check_arrays(tiny(model={"d_model": 4096, "d_ff": 4096}), ONE)
    monkeypatch.setattr(memory, "device_memory", lambda device: None)  # the memory is unknown
    check_arrays(tiny(model={"vocab_size": 2 * 10**9}), ONE)


PROGRAMS = {
    "training": (
        {},
        ["the training program", "config.train.{micro_batch_size, seq_len, loss_chunk}"],
    ),
    "evaluation": ({"eval.batch_size": 512}, ["the evaluation program", "config.eval.batch_size"]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_needs_more_memory_than_there_is_is_refused_before_its_first_run(
    train, tmp_path, monkeypatch, name
):
    """Its bytes are the compiler's: just enough memory is accepted."""
    changes, expected = PROGRAMS[name]
    needed = []
    check = memory.check_program

    def asked(program, compiled, *others):
        m = compiled.memory_analysis()
        arguments = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
        needed.append((arguments + m.temp_size_in_bytes, program))
        check(program, compiled, *others)

    monkeypatch.setattr(job, "check_program", asked)
    changes = [f"--config.{key}={value}" for key, value in changes.items()]
    assert train(tmp_path / "first", *changes)[0] == 0
    available = max(needed)[0]
    assert max(needed)[1] == name
    monkeypatch.setattr(memory, "device_memory", lambda device: available - 1)
    code, text = train(tmp_path / "second", *changes)
    assert code == 2
    assert [part for part in expected if part not in text] == []
    monkeypatch.setattr(memory, "device_memory", lambda device: available)
    assert train(tmp_path / "third", *changes)[0] == 0


def test_a_smaller_micro_batch_is_proposed_by_the_share_that_fits(small_device):
    """32 of 128 sequences fit; half of this share is left for what does not shrink with the batch."""
    config = tiny(train={"batch_size": 128})
    parts = {"argument_size_in_bytes": 10, "output_size_in_bytes": 10, "alias_size_in_bytes": 10}
    needs = SimpleNamespace(**parts, temp_size_in_bytes=4 * 16e9 - 10)
    compiled = SimpleNamespace(memory_analysis=lambda: needs)
    with pytest.raises(UserError, match=r"try --config.train.micro_batch_size=16$"):
        memory.check_program("training", compiled, config, ONE)
    with pytest.raises(UserError, match=r"batch_size, config.train.{seq_len, loss_chunk}$"):
        memory.check_program("evaluation", compiled, config, ONE)


def test_evaluation_without_training_needs_no_gradients(small_device):
    sizes = {"vocab_size": 14 * 10**7, "tie_embeddings": True}  # 9.0 GB of parameters
    optimizer = {"name": "sgd"}
    with pytest.raises(UserError, match="out of memory"):
        check_arrays(
            tiny(model=sizes, train={"batch_size": 1, "seq_len": 32}, optimizer=optimizer), ONE
        )
    check_arrays(tiny(model=sizes, train={"steps": 0, "batch_size": 1}, optimizer=optimizer), ONE)


OUT_OF_MEMORY = [
    MemoryError("Unable to allocate 7.28 TiB"),
    RuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
]


def test_running_out_of_memory_is_reported_with_keys_and_other_errors_are_not_changed():
    wanted = r"^out of memory: .*; use a smaller config.train.micro_batch_size"
    for error in OUT_OF_MEMORY:
        with pytest.raises(UserError, match=wanted) as caught, report_out_of_memory():
            raise error
        assert caught.value.code == 2
    for error in (ValueError("wrong"), TemporaryError("RESOURCE_EXHAUSTED: the record")):
        with pytest.raises(type(error), match=str(error)), report_out_of_memory():
            raise error


@pytest.mark.slow
def test_one_of_several_processes_that_runs_out_of_memory_ends_with_the_code_of_a_mistake(
    train, tmp_path, monkeypatch
):
    """A scheduler would start the run again after another code."""

    def leave(code, message):
        raise SystemExit(code)

    monkeypatch.setattr(processes, "are_several", lambda: True)
    monkeypatch.setattr(processes, "leave", leave)
    monkeypatch.setattr(job.Loop, "train", lambda *_: (_ for _ in ()).throw(OUT_OF_MEMORY[1]))
    assert train(tmp_path / "run")[0] == UserError.code


# ---- Very large numbers are checked and planned in little time and memory ------------------------


def test_divisors_and_micro_batches_equal_a_search_of_all_numbers():
    for n in range(1, 100):
        assert divisors(n) == [i for i in range(1, n + 1) if n % i == 0]
        for size in (None, *range(1, n + 5)):
            expected = next(i for i in range(1, n + 1) if n % i == 0 and n // i <= (size or n))
            assert n_micro_batches(n, size) == expected
    assert n_micro_batches(LARGEST, LARGEST - 1) == LARGEST  # a large prime is not searched
    with pytest.raises(
        UserError, match="is not divisible by replica x fsdp = 2; use 2147483646 or 2147483648"
    ):
        check_mesh(tiny(train={"batch_size": LARGEST}), 2)


def test_dispatches_are_planned_one_at_a_time():
    config = tiny(train={"steps": LARGEST, "steps_per_dispatch": 7})
    assert [d.end for d in itertools.islice(dispatches(0, config), 3)] == [7, 14, 21]
    assert [tuple(d) for d in dispatches(LARGEST - 9, config)] == [
        (LARGEST - 9, 7),
        (LARGEST - 2, 2),
    ]
