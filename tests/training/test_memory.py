"""A config that cannot fit in memory is refused before anything is allocated, and the error names its keys."""

import itertools
import re

import pytest
from tiny import tiny, with_keys

from lm.config import MESH_AXES
from lm.config.values import divisors
from lm.errors import TemporaryError, UserError
from lm.parallel import processes
from lm.parallel.mesh import check_mesh
from lm.step import n_micro_batches
from lm.training import job, memory
from lm.training.dispatch import dispatches
from lm.training.memory import check_memory, report_out_of_memory

ONE = dict.fromkeys(MESH_AXES, 1)
LARGEST = 2**31 - 1


@pytest.fixture
def small_device(monkeypatch):
    """Let each device have 16 GB."""
    monkeypatch.setattr(memory, "device_memory", lambda device: 16e9)


TOO_LARGE = {
    "batch_size": ({"train": {"batch_size": 10**6, "seq_len": 1024}}, ["activations", "config.train.{batch_size,"]),
    "vocab_size": ({"model": {"vocab_size": 2 * 10**9}}, ["config.model.{vocab_size, d_model,"]),
    "n_layers": ({"model": {"n_layers": 10**5, "d_model": 512}}, ["state: reduce config.model.{", "n_layers"]),
    "d_model": ({"model": {"d_model": LARGEST - 1, "d_head": 8}}, ["config.model.{"]),
    "all sizes": ({"model": dict.fromkeys(("d_model", "n_layers", "d_ff", "vocab_size"), LARGEST)}, ["config.model.{"]),
    "seq_len": ({"train": {"seq_len": 10**9}}, ["activations", "seq_len"]),
    "positions": ({"model": {"positions": "learned", "max_positions": 2 * 10**9}}, ["max_positions"]),
    "logits": ({"model": {"vocab_size": 10**6}, "train": {"seq_len": 2**12}}, ["logits", "config.model.vocab_size"]),
    "evaluation": ({"eval": {"batch_size": 2**24}}, ["evaluation", "config.eval.batch_size"]),
    "steps_per_dispatch": ({"train": {"steps_per_dispatch": LARGEST}}, ["config.train.{steps_per_dispatch,"]),
}  # fmt: skip


def test_what_cannot_fit_is_refused_with_its_keys(small_device):
    for case, (sections, expected) in TOO_LARGE.items():
        with pytest.raises(UserError, match=r"^out of memory: training needs at least .* which has 16.0 GB; ") as error:
            check_memory(tiny(**sections), ONE)
        assert error.value.code == 2
        assert [text for text in expected if text not in str(error.value)] == [], case


def test_what_fits_is_not_refused(small_device, monkeypatch):
    check_memory(tiny(), ONE)
    check_memory(tiny(model={"d_model": 4096, "d_ff": 4096}), ONE)
    monkeypatch.setattr(memory, "device_memory", lambda device: None)  # the memory is unknown
    check_memory(tiny(model={"vocab_size": 2 * 10**9}), ONE)


@pytest.mark.parametrize("batch_size", [10**6, 2**20])
def test_the_micro_batch_size_that_would_fit_is_named(small_device, batch_size):
    config = tiny(train={"batch_size": batch_size, "seq_len": 1024})
    with pytest.raises(UserError) as error:
        check_memory(config, ONE)
    found = re.search(r"micro_batch_size = (\d+) with config.eval.batch_size = (\d+) would fit", str(error.value))
    micro, rows = map(int, found.groups())
    check_memory(with_keys(config, train_micro_batch_size=micro, eval_batch_size=rows), ONE)
    with pytest.raises(UserError):
        check_memory(with_keys(config, train_micro_batch_size=8 * micro, eval_batch_size=rows), ONE)


def test_evaluation_without_training_needs_no_gradients(small_device):
    sizes = {"vocab_size": 9 * 10**7, "tie_embeddings": True}  # 5.8 GB of parameters
    optimizer = {"name": "sgd"}
    with pytest.raises(UserError, match="out of memory"):
        check_memory(tiny(model=sizes, train={"batch_size": 1, "seq_len": 32}, optimizer=optimizer), ONE)
    check_memory(tiny(model=sizes, train={"steps": 0, "batch_size": 1}, optimizer=optimizer), ONE)


OUT_OF_MEMORY = [MemoryError("Unable to allocate 7.28 TiB"), RuntimeError("RESOURCE_EXHAUSTED: Out of memory")]


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
def test_one_of_several_processes_that_runs_out_of_memory_ends_with_the_code_of_a_mistake(train, tmp_path, monkeypatch):
    """A scheduler would start the run again after another code."""

    def leave(code, message):
        raise SystemExit(code)

    monkeypatch.setattr(processes, "are_several", lambda: True)
    monkeypatch.setattr(processes, "leave", leave)
    monkeypatch.setattr(job.Loop, "train", lambda *_: (_ for _ in ()).throw(OUT_OF_MEMORY[1]))
    assert train(tmp_path / "run")[0] == UserError.code


# ---- Very large numbers are checked and planned in little time and memory -----------------------------------------


def test_divisors_and_micro_batches_equal_a_search_of_all_numbers():
    for n in range(1, 100):
        assert divisors(n) == [i for i in range(1, n + 1) if n % i == 0]
        for size in (None, *range(1, n + 5)):
            expected = next(i for i in range(1, n + 1) if n % i == 0 and n // i <= (size or n))
            assert n_micro_batches(n, size) == expected
    assert n_micro_batches(LARGEST, LARGEST - 1) == LARGEST  # a large prime is not searched
    with pytest.raises(UserError, match="is not divisible by replica x fsdp = 2; use 2147483646 or 2147483648"):
        check_mesh(tiny(train={"batch_size": LARGEST}), 2)


def test_dispatches_are_planned_one_at_a_time():
    config = tiny(train={"steps": LARGEST, "steps_per_dispatch": 7})
    assert [d.end for d in itertools.islice(dispatches(0, config), 3)] == [7, 14, 21]
    assert [tuple(d) for d in dispatches(LARGEST - 9, config)] == [(LARGEST - 9, 7), (LARGEST - 2, 2)]
