"""Metrics and progress: what is written and read back, on disk, in TensorBoard, in W&B and in a
terminal.
"""

import collections
import contextlib
import io
import json
import math
import os
import struct
import sys
from contextlib import closing
from pathlib import Path

import pytest
from running import small_disk

from lm.system.errors import UserError
from lm.training.loss_curve import loss_curve, to_png
from lm.training.progress import Progress
from lm.workdir.metrics import (
    TIMING_FIELDS,
    MetricsWriter,
    _wandb_id,
    best_step,
    cut_back,
    read_metrics,
    to_line,
    validation_losses,
)


def write(workdir, steps, **options):
    writer = MetricsWriter(workdir, tensorboard=False, **options)
    for step in steps:
        writer.write({"step": step, "loss": 1 / (step + 3), "tokens": 10 * step})
        if step % 2 == 0:
            writer.write({"step": step, "split": "validation", "loss": 2 / (step + 3)})
    writer.fsync()
    writer.close()


def test_lines_are_read_back_bit_for_bit(tmp_path):
    detail = {"updates": {"layers": [math.inf, 1.0], "embedding": -math.inf}}
    with closing(MetricsWriter(tmp_path, tensorboard=False)) as writer:
        writer.write(
            {"step": 1, "loss": 1 / 3, "grad_norm": math.inf} | dict.fromkeys(TIMING_FIELDS, 7.0)
        )
        writer.write({"step": 1, "split": "validation", "loss": 2 / 3})
        writer.write({"step": 2, "detail": detail})
    path = tmp_path / "metrics.jsonl"
    first, *others = read_metrics(path)
    assert (first["loss"], first["grad_norm"], first["mfu"]) == (1 / 3, math.inf, 7.0)
    assert others == [
        {"step": 1, "split": "validation", "loss": 2 / 3},
        {"step": 2, "detail": detail},
    ]
    assert read_metrics(path, timing=False)[0] == {"step": 1, "loss": 1 / 3, "grad_norm": math.inf}
    for text in path.read_text().splitlines():
        json.loads(text, parse_constant=pytest.fail)  # strict JSON has no word for infinity


def test_the_file_of_a_resumed_run_equals_that_of_an_uninterrupted_one(tmp_path):
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole", range(8))
    for i, torn in enumerate(["", '{"step": 5, "lo', '{"step": 2, "loss": 1']):
        cut = tmp_path / str(i)
        cut.mkdir()
        write(cut, range(6))
        with open(cut / "metrics.jsonl", "a") as file:
            file.write(torn)
        write(cut, range(4, 8), resume_step=3)
        assert (cut / "metrics.jsonl").read_bytes() == (
            tmp_path / "whole" / "metrics.jsonl"
        ).read_bytes()
    write(cut, range(2))  # a start without a checkpoint replaces old files
    assert [line["step"] for line in read_metrics(cut / "metrics.jsonl")] == [0, 0, 1]


def test_lines_of_the_newest_step_are_known_after_a_resume(tmp_path):
    write(tmp_path, range(6))
    with closing(MetricsWriter(tmp_path, resume_step=4, tensorboard=False)) as writer:
        assert [line.get("split") for line in writer.lines_of(4)] == [None, "validation"]
        assert writer.lines_of(5) == []
        writer.write({"step": 5, "loss": math.inf})
        writer.write({"step": 5, "split": "test", "loss": 1.0})
        assert writer.lines_of(5) == [
            {"step": 5, "loss": math.inf},
            {"step": 5, "split": "test", "loss": 1.0},
        ]
        assert writer.lines_of(4) == []
        assert writer.validation_losses() == {0: 2 / 3, 2: 2 / 5, 4: 2 / 7}


def test_only_losses_over_the_same_windows_are_compared():
    """eval.max_batches and eval.batch_size may change at a resume; the last step is also evaluated
    in full.
    """
    runs = [(2, 4, 1.0), (4, 8, 3.0), (6, 8, 2.5), (8, 8, math.nan), (10, 8, 2.75), (10, 99, 2.0)]
    lines = [{"step": s, "split": "validation", "windows": w, "loss": loss} for s, w, loss in runs]
    losses = validation_losses(
        [{"step": 10, "loss": 1.5}, *lines, {"step": 10, "split": "test", "loss": 1.0}]
    )
    assert losses == {4: 3.0, 6: 2.5, 10: 2.75}
    assert best_step([2, 4, 6, 8, 10], losses) == 6
    assert best_step([2, 8], losses) is None


def test_a_wrong_line_is_an_error_that_names_it(tmp_path):
    write(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    changed = [
        lines[1][:9],
        lines[1].replace("0.66", "0.76"),
        lines[1].replace("crc32", "crc33"),
        "1",
        "null",
        "[]",
    ]
    changed += map(
        to_line, [{"loss": 2.0}, {"step": "1", "loss": 2.0}, {"step": True, "loss": 2.0}]
    )
    for wrong in changed:
        path.write_text("\n".join([lines[0], wrong, *lines[2:]]) + "\n")
        before = path.read_bytes()
        with pytest.raises(
            UserError, match=r"is corrupted: line 2: .*; correct or remove that line"
        ):
            cut_back(path, 1)
        assert path.read_bytes() == before


def test_missing_lines_before_a_checkpoint_are_reported(tmp_path):
    write(tmp_path, range(6))
    with closing(MetricsWriter(tmp_path, resume_step=5, tensorboard=False)) as writer:
        assert [writer.last_step(limit) for limit in (9, 5, 3, -1)] == [5, 5, 3, 0]
        config = {"config": {"log": {"every": 10}}}  # the record of a checkpoint of earlier code
        assert writer.missing_lines(14, config) is None
        assert "steps 6 to 15 are missing" in writer.missing_lines(15, config)
        assert writer.missing_lines(5, config | {"log_every": 1}) is None
        assert "steps 6 to 7 are missing" in writer.missing_lines(7, config | {"log_every": 2})


# ---- TensorBoard and W&B -------------------------------------------------------------------------


def tensorboard_view(workdir: Path):
    """Return (tag, step) as TensorBoard shows them: a session start at step n hides earlier events
    from step n on.
    """
    from tensorboardX.proto.event_pb2 import Event

    shown = []
    for path in sorted((workdir / "tensorboard").iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):  # TFRecord: length, its checksum, the data, its checksum
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
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
        writer.write({"step": steps[-1], "detail": {"attention": {"layers/max_logit": [2.0, 5.0]}}})
        writer.write({"step": steps[-1], "scores": {"task/arc_easy/acc": 0.25}})
        writer.close()
    of_step_5 = (
        "eval/validation/loss",
        "attention/layers/max_logit/0",
        "attention/layers/max_logit/1",
    )
    expected = [("train/loss", s) for s in range(6)] + [
        (tag, 5) for tag in (*of_step_5, "task/arc_easy/acc")
    ]
    assert tensorboard_view(tmp_path) == expected


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
        writer = MetricsWriter(
            tmp_path, resume_step=resume_step, tensorboard=False, wandb={"project": "p"}
        )
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
        with pytest.raises(
            OSError, match=r"No space left on device: .*(metrics\.jsonl|tensorboard)"
        ):
            collections.deque(writer.write({"step": step} | line) for step in range(1000))
        with contextlib.suppress(OSError):
            writer.close()


# ---- Progress ------------------------------------------------------------------------------------


def show(progress):
    for step, speed in ((10, 41234.0), (20, 41234.001)):
        line = {
            "step": step,
            "loss": 2.5,
            "tokens": 1000 * step,
            "tokens_per_second": speed,
            "mfu": 0.4321,
        }
        progress.update(line)
    progress.evaluation(
        {"step": 20, "split": "validation", "loss": 1.5, "bits_per_byte": 2.1640425613334453}
    )
    progress.update({"step": 30, "loss": 2.25})
    progress.close()


PLAIN = [
    # 990,000 tokens at this speed
    "step   10/1000  loss 2.5000  41.2 ktokens/s  MFU 43.2 %  ETA 24.0 seconds",
    "step   20/1000  loss 2.5000  41.2 ktokens/s  MFU 43.2 %  ETA 23.8 seconds",
    "step   20/1000  validation: loss 1.5000  bits_per_byte 2.1640",
    "step   30/1000  loss 2.2500",
]


def test_a_file_gets_plain_lines():
    stream = io.StringIO()
    show(Progress(1000, stream))
    assert stream.getvalue().splitlines() == PLAIN


def training_lines(speeds) -> list[str]:
    """Return the lines of calls of 4 steps that log every second one: two lines with the speed of
    their call.
    """
    stream = io.StringIO()
    progress = Progress(1000, stream)
    for step in range(2, 4 * len(speeds) + 1, 2):
        speed = speeds[(step - 1) // 4]
        line = {"step": step, "loss": 2.5, "tokens": 1000 * step, "tokens_per_second": speed}
        progress.update(line | {"flops_per_second": 2 * speed, "mfu": None})
    return stream.getvalue().splitlines()


def test_speed_and_eta_are_a_running_mean_that_is_shown_once_for_each_measurement():
    """They seemed to be those of the last call: 4.4, 1.4, 2.5, 1.2 minutes in one run, each on
    several lines.
    """
    lines = training_lines([1000.0, 4000.0] * 30)
    assert ["tokens/s" in line for line in lines] == [True, False] * 60
    shown = [line for line in lines if "tokens/s" in line]
    # As many tokens at 1,000 as at 4,000 per second: 1,600 on average, the harmonic mean.
    for line in shown[20:]:
        speed = float(line.split()[4])
        assert 1.45 < speed < 1.8, line
        flops, seconds_left = float(line.split()[6]), float(line.split()[9]) * 60
        assert flops == pytest.approx(2 * speed, rel=0.01)
        assert seconds_left == pytest.approx(
            (1000 - int(line.split()[1].split("/")[0])) / speed, rel=0.01
        )
    assert "1.00 ktokens/s" in shown[0]
    # A run that becomes slow for good is soon shown as slow.
    assert (
        "1.00 ktokens/s"
        in training_lines([4000.0] * 30 + [1000.0 + i / 100 for i in range(20)])[-2]
    )


def test_an_evaluation_of_a_part_of_a_split_says_so():
    """A run whose eval.max_batches is set ends with two evaluations of one split."""
    stream = io.StringIO()
    progress = Progress(20, stream)
    for is_part, n in ((True, 16384), (False, 27700)):
        progress.evaluation(
            {"step": 20, "split": "validation", "loss": 1.5, "tokens": n}, is_part=is_part
        )
    part, whole = stream.getvalue().splitlines()
    assert part == "step 20/20  validation (first 16,384 tokens): loss 1.5000  tokens 16384"
    assert whole == "step 20/20  validation: loss 1.5000  tokens 27700"


def read_all(terminal: int) -> bytes:
    """Return what was written to a pseudo-terminal whose other end is closed. Reading past its end
    raises OSError.
    """
    parts = []
    with open(terminal, "rb", buffering=0) as stream, contextlib.suppress(OSError):
        while part := stream.read(4096):
            parts.append(part)
    return b"".join(parts)


def test_a_narrow_terminal_gets_a_bar_of_its_width_and_lines_that_stay(monkeypatch):
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 30, 0, 0))
    with open(theirs, "w") as stream:
        show(Progress(1000, stream))
    drawn = read_all(ours).decode().replace("\r\n", "\n").split("\r")
    assert f"{PLAIN[2]}\n" in drawn  # the evaluation stays
    bars = [part for part in drawn if part.startswith("step") and not part.endswith("\n")]
    assert bars
    assert all(len(bar) <= 30 for bar in bars)


def test_a_corrupted_id_of_a_wandb_run_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "wandb_id.txt"
    assert _wandb_id(path) == _wandb_id(path)
    for content in (b"", b"\xff\xfe", b"../other", b"0123456789"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"wandb_id.txt is corrupted: .*; delete it"):
            _wandb_id(path)
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read: it is a pipe"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_the_loss_curve_shows_runs_of_one_step(tmp_path):
    lines = [
        {"step": 20, "loss": 2.6},
        {"step": 20, "split": "validation", "loss": 2.7},
        {"step": 20, "detail": {}},
    ]
    figure = loss_curve(lines, 3.3)
    (axes,) = figure.axes
    training, validation, _ = axes.lines
    assert training.get_xdata().tolist() == [20]
    assert "None" not in (training.get_marker(), validation.get_marker())
    assert to_png(figure).startswith(b"\x89PNG")
