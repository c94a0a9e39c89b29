"""Metrics and progress: what is written and read back, on disk, in TensorBoard, in W&B and in a terminal."""

import collections
import contextlib
import io
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from running import small_disk

from lm.errors import UserError
from lm.training.loss_curve import loss_curve, loss_curve_png
from lm.training.progress import Progress, duration
from lm.workdir.metrics import TIMING_FIELDS, MetricsWriter, _scalars, _wandb_id, cut_back, read_metrics


def write(workdir, steps, **options):
    writer = MetricsWriter(workdir, tensorboard=False, **options)
    for step in steps:
        writer.write({"step": step, "loss": 1 / (step + 3), "tokens": 10 * step})
        if step % 2 == 0:
            writer.write({"step": step, "split": "validation", "loss": 2 / (step + 3)})
    writer.fsync()
    writer.close()


def test_lines_are_read_back_bit_for_bit(tmp_path):
    write(tmp_path, range(4))
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["loss"] for line in lines if "split" not in line] == [1 / 3, 1 / 4, 1 / 5, 1 / 6]
    assert lines[1] == {"step": 0, "split": "validation", "loss": 2 / 3}


def test_non_finite_numbers_are_strict_json(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "low": -math.inf})
    writer.close()

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse)["loss"] == "NaN"
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(line["loss"])
    assert (line["grad_norm"], line["low"]) == (math.inf, -math.inf)


def test_details_have_one_curve_per_path_and_layer():
    detail = {"attention": {"layers/max_logit": [2.0, 5.0]}, "gradients": {"embedding": 0.5}}
    assert dict(_scalars({"step": 3, "detail": detail})) == {
        "attention/layers/max_logit/0": 2.0,
        "attention/layers/max_logit/1": 5.0,
        "gradients/embedding": 0.5,
    }


def test_non_finite_details_are_read_back(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write({"step": 1, "detail": {"updates": {"layers": [math.inf, 1.0], "embedding": -math.inf}}})
    writer.close()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["detail"] == {"updates": {"layers": [math.inf, 1.0], "embedding": -math.inf}}


@pytest.mark.parametrize("torn", ["", '{"step": 5, "lo', '{"step": 2, "loss": 1'])
def test_the_file_of_a_resumed_run_equals_that_of_an_uninterrupted_one(tmp_path, torn):
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    write(tmp_path / "whole", range(8))
    write(tmp_path / "cut", range(6))
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as file:
        file.write(torn)
    write(tmp_path / "cut", range(4, 8), resume_step=3)
    whole, cut = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def test_lines_of_the_newest_step_are_known_after_a_resume(tmp_path):
    write(tmp_path, range(6))
    writer = MetricsWriter(tmp_path, resume_step=4, tensorboard=False)
    assert [line.get("split") for line in writer.lines_of(4)] == [None, "validation"]
    assert writer.lines_of(5) == []
    writer.write({"step": 5, "loss": math.inf})
    writer.write({"step": 5, "split": "test", "loss": 1.0})
    assert writer.lines_of(5) == [{"step": 5, "loss": math.inf}, {"step": 5, "split": "test", "loss": 1.0}]
    assert writer.lines_of(4) == []
    writer.close()


def test_a_start_without_a_checkpoint_replaces_old_files(tmp_path):
    write(tmp_path, range(3))
    write(tmp_path, range(2))
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 0, 1]


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    write(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:9], *lines[2:]]) + "\n")
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"is corrupted: line 2: .*; correct or remove that line"):
        cut_back(path, 1)
    assert path.read_bytes() == before


WRONG_LINES = [
    "1", "null", "[]", '{"loss": 2.0}', '{"step": "1", "loss": 2.0}', '{"step": true, "loss": 2.0}', '{"step": 1}',
    '{"step": 1, "loss": "2"}', '{"step": 1, "detail": 3}', '{"step": 1, "split": 3, "loss": 2}',
    '{"step": 1, "split": "test"}', '{"step": 1, "split": "test", "sums": [1.5], "counts": [3]}',
]  # fmt: skip


@pytest.mark.parametrize("line", WRONG_LINES)
def test_a_line_without_its_values_is_an_error_that_names_it(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    with pytest.raises(UserError, match="is corrupted: line 1: "):
        cut_back(tmp_path / "metrics.jsonl", 1)


def test_missing_lines_are_counted_up_to_a_step(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in (1, 2, 2, 3):
        writer.write({"step": step, "loss": 1.0})
    assert (writer.n_lines(2), writer.n_lines(3)) == (3, 4)
    writer.close()
    writer = MetricsWriter(tmp_path, resume_step=2, tensorboard=False)
    assert (writer.n_lines(2), writer.gap(2, 3)) == (3, None)
    assert "3 of the 5 lines up to step 4; lines of steps 3 to 4 are missing" in writer.gap(4, 5)
    assert "lines of steps before 2 are missing" in writer.gap(2, 5)
    writer.close()


def test_timing_fields_are_left_out_on_request(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write({"step": 1, "loss": 2.0} | dict.fromkeys(TIMING_FIELDS, 7.0))
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl", timing=False) == [{"step": 1, "loss": 2.0}]
    assert set(read_metrics(tmp_path / "metrics.jsonl")[0]) >= {"tokens_per_second", "mfu"}


# ---- TensorBoard and W&B ---------------------------------------------------------------------------------------


def tensorboard_events(workdir: Path):
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted((workdir / "tensorboard").iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):  # TFRecord: length, its checksum, the data, its checksum
            (length,) = struct.unpack_from("<Q", data, at)
            yield Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4


def tensorboard_view(workdir: Path):
    """Return (tag, step) as TensorBoard shows them: a session start at step n hides earlier events from step n on."""
    shown = []
    for event in tensorboard_events(workdir):
        if event.HasField("session_log"):
            shown = [point for point in shown if point[1] < event.step]
        shown += [(value.tag, event.step) for value in event.summary.value]
    return shown


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path):
    for resume_step, steps in [(None, range(5)), (2, range(3, 6))]:
        writer = MetricsWriter(tmp_path, resume_step=resume_step)
        for step in steps:
            writer.write({"step": step, "loss": 1.0})
        writer.write({"step": steps[-1], "split": "validation", "loss": 2.0, "source": "text"})
        writer.close()
    assert tensorboard_view(tmp_path) == [("train/loss", s) for s in range(6)] + [("eval/validation/loss", 5)]


def test_wandb_that_is_configured_but_not_installed_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[wandb\]'"):
        MetricsWriter(tmp_path, tensorboard=False, wandb={"project": "lm"})


def test_wandb_continues_the_same_run(tmp_path, monkeypatch):
    calls = []

    class FakeWandb:
        def init(self, **arguments):
            calls.append(arguments)
            return self

        def log(self, values, step):
            calls.append((values, step))

        def finish(self):
            calls.append("finish")

    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    for resume_step in (None, 1):
        writer = MetricsWriter(tmp_path, resume_step=resume_step, tensorboard=False, wandb={"project": "p"})
        writer.write({"step": 2, "loss": 3.0})
        writer.close()
    first, second = calls[0], calls[3]
    assert first == second
    assert (first["project"], first["resume"]) == ("p", "allow")
    assert calls[1:3] == [({"train/loss": 3.0}, 2), "finish"]


@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, tensorboard):
    with small_disk(tmp_path) as disk:
        writer = MetricsWriter(disk, tensorboard=tensorboard)
        line = {f"number_{i}": i / 7 for i in range(100)}
        with pytest.raises(OSError, match=r"No space left on device: .*(metrics\.jsonl|tensorboard)"):
            collections.deque(writer.write({"step": step} | line) for step in range(1000))
        with contextlib.suppress(OSError):
            writer.close()


# ---- Progress --------------------------------------------------------------------------------------------------


def show(progress, clock):
    for step in (10, 20):
        clock[0] += 5.0
        progress.update({"step": step, "loss": 2.5, "tokens_per_second": 41234.0, "mfu": 0.4321})
    progress.evaluation({"step": 20, "split": "validation", "loss": 1.5, "bits_per_byte": 2.1640425613334453})
    progress.update({"step": 30, "loss": 2.25, "tokens_per_second": 999.6, "flops_per_second": 1.234e12})
    progress.close()


def test_a_file_gets_plain_lines():
    stream, clock = io.StringIO(), [0.0]
    show(Progress(1000, stream, clock=lambda: clock[0]), clock)
    assert stream.getvalue().splitlines() == [
        "step   10/1000  loss 2.5000  41.2 ktokens/s  MFU 43.2 %",
        "step   20/1000  loss 2.5000  41.2 ktokens/s  MFU 43.2 %  ETA 8:10",  # 980 steps of half a second
        "step   20/1000  validation: loss 1.5000  bits_per_byte 2.1640",
        "step   30/1000  loss 2.2500  1.00 ktokens/s  1.23 TFLOP/s  ETA 8:05",
    ]


def test_the_remaining_time_follows_the_present_speed():
    """30 steps of 10 s (compilation, or a busy machine) no longer count once 30 steps took 1 s each."""
    stream, now = io.StringIO(), 0.0
    progress = Progress(100, stream, clock=lambda: now)
    for step in range(1, 61):
        now += 10 if step <= 30 else 1
        progress.update({"step": step, "loss": 2.5})
    assert stream.getvalue().splitlines()[-1] == "step  60/100  loss 2.5000  ETA 0:40"


def test_the_remaining_time_of_dispatches_of_many_lines():
    """The lines of a dispatch come at once, so the speed follows from the time between dispatches: 50 steps in 60 s."""
    stream, now = io.StringIO(), 0.0
    progress = Progress(1000, stream, clock=lambda: now)
    for step in range(1, 201):
        now += 60 if step % 50 == 1 else 0.001
        progress.update({"step": step, "loss": 2.5})
    lines = stream.getvalue().splitlines()
    assert not any("ETA" in line for line in lines[:50])
    assert lines[-1] == "step  200/1000  loss 2.5000  ETA 16:01"


def read_all(terminal: int) -> bytes:
    """Return what was written to a pseudo-terminal whose other end is closed. Reading past its end raises OSError."""
    parts = []
    with open(terminal, "rb", buffering=0) as stream, contextlib.suppress(OSError):
        while part := stream.read(4096):
            parts.append(part)
    return b"".join(parts)


def test_a_narrow_terminal_gets_one_line_cut_to_its_width(monkeypatch):
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 30, 0, 0))
    clock = [0.0]
    with open(theirs, "w") as stream:
        show(Progress(1000, stream, clock=lambda: clock[0]), clock)
    output = read_all(ours).decode()
    live, after = output.split("\r\x1b[K")  # the live line is wiped before the evaluation
    assert live == "\rstep   10/1000  loss 2.5000  \x1b[K\rstep   20/1000  loss 2.5000  \x1b[K"
    lasting, last_live = after.split("\r\n", 1)
    assert lasting == "step   20/1000  validation: loss 1.5000  bits_per_byte 2.1640"
    assert last_live == "\rstep   30/1000  loss 2.2500  \x1b[K\r\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.4, "0:07"), (59.6, "1:00"), (754, "12:34"), (18367, "5:06:07"), (273960, "3d 04:06")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_tensorboard_does_not_import_torch(tmp_path):
    """tensorboardX would import torch if it is installed, which takes seconds at every start."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    job = (
        "import sys\nfrom pathlib import Path\nfrom lm.workdir.tensorboard import EventFile\n"
        f"EventFile(Path({str(tmp_path)!r}), 1).close()\nassert 'torch' not in sys.modules\n"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    done = subprocess.run([sys.executable, "-c", job], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"../other", b"0123456789"])
def test_a_corrupted_id_of_a_wandb_run_is_an_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "wandb_id.txt"
    made = _wandb_id(path)
    assert _wandb_id(path) == made
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"wandb_id.txt is corrupted: .*; delete it"):
        _wandb_id(path)


def test_the_loss_curve_leaves_out_lines_with_several_losses(tmp_path):
    lines = ['{"step": 1, "loss": 2.5}', '{"step": 2, "loss": [2.5, 3.0]}', '{"step": 3, "loss": []}']
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert loss_curve_png(tmp_path / "metrics.jsonl").startswith(b"\x89PNG")


def test_the_loss_curve_shows_a_run_that_logged_one_step():
    lines = [{"step": 20, "loss": 2.6}, {"step": 20, "split": "validation", "loss": 2.7}]
    (axes,) = loss_curve(lines, 3.3).axes
    training, validation, _ = axes.lines
    assert training.get_marker() != "None"
    assert validation.get_marker() != "None"
    assert axes.get_xlim()[0] == 0
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_a_loss_curve_of_many_steps_is_a_line():
    (axes,) = loss_curve([{"step": step, "loss": 2.6} for step in range(1, 100)]).axes
    assert axes.lines[0].get_marker() == "None"
