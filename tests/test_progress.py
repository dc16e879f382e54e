"""Progress: plain lines where there is no terminal, a bar that fits where there is one."""

import contextlib
import io
import math
import os
import pty
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

from precexp.progress import Progress
from precexp.record import Row


def make_row(
    step: int,
    *,
    loss: float | None = 5.1234,
    eval_loss: float | None = None,
    grad_norm: float | None = 0.85,
    loss_scale: float | None = None,
    skipped: bool = False,
    step_seconds: float | None = 0.1,
) -> Row:
    return Row(
        step=step,
        tokens=step * 2048,
        loss=loss,
        eval_loss=eval_loss,
        grad_norm=grad_norm,
        lr=9.1e-4,
        loss_scale=loss_scale,
        skipped=skipped,
        step_seconds=step_seconds,
        peak_bytes=None,
        probes=None,
    )


def lines_of(
    rows: Iterable[Row],
    capsys: pytest.CaptureFixture[str],
    *,
    total_steps: int = 300,
    log_every: int = 10,
    label: str = "",
) -> list[str]:
    with Progress(total_steps, log_every=log_every, label=label) as progress:
        for row in rows:
            progress.write(row)
    captured = capsys.readouterr()
    assert captured.out == "", "stdout is for results"
    return captured.err.splitlines()


def test_a_line_says_what_the_row_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of([make_row(50, eval_loss=5.4567)], capsys) == [
        "step 50/300  loss 5.123  eval 5.457  lr 9.1e-04  norm 0.85"
    ]


def test_lines_come_at_log_steps_evaluations_and_the_last_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [make_row(step, eval_loss=5.0 if step == 7 else None) for step in range(1, 26)]
    lines = lines_of(rows, capsys, total_steps=25)
    assert [line.split()[1] for line in lines] == ["7/25", "10/25", "20/25", "25/25"]


def test_each_line_names_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of([make_row(10), make_row(20)], capsys, label="bf16_pure-adamw")
    assert all(line.startswith("bf16_pure-adamw  step ") for line in lines)


def test_what_is_not_measured_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [make_row(1, loss=None, grad_norm=None, step_seconds=None)]
    assert lines_of(rows, capsys, log_every=1) == ["step 1/300  lr 9.1e-04"]


def test_speed_is_that_of_the_last_log_steps(capsys: pytest.CaptureFixture[str]) -> None:
    slow_then_fast = [make_row(s, step_seconds=1.0 if s <= 10 else 0.1) for s in range(1, 21)]
    slow, fast = lines_of(slow_then_fast, capsys)
    assert slow.endswith("  2,048 tok/s")
    assert fast.endswith("  20,480 tok/s")


def test_a_resumed_run_does_not_count_the_tokens_of_its_first_life(
    capsys: pytest.CaptureFixture[str],
) -> None:
    *_, line = lines_of([make_row(step) for step in range(101, 111)], capsys)
    assert line.endswith("  20,480 tok/s")


def test_numbers_that_are_not_finite_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [make_row(10, loss=math.nan, eval_loss=math.inf, grad_norm=-math.inf)]
    (line,) = lines_of(rows, capsys)
    assert "loss nan  eval inf" in line
    assert "norm -inf" in line


def test_scaled_runs_show_their_scale_and_skipped_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [make_row(step, loss_scale=65536.0, skipped=step <= 2) for step in range(1, 11)]
    (line,) = lines_of(rows, capsys)
    assert "scale 65536  skipped 2" in line


def test_streams_that_are_not_there_do_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress(3, log_every=1, label="") as progress:
            for step in (1, 2, 3):
                progress.write(make_row(step))


SCRIPT = textwrap.dedent(
    """
    import sys
    from test_progress import make_row
    from precexp.progress import Progress

    first = int(sys.argv[1])
    with Progress(100, log_every=10, label="bf16_pure-adamw") as progress:
        print("a result")
        for step in range(first, 101):
            progress.write(make_row(step, eval_loss=5.5 if step == 1 else None))
    """
)


def test_a_broken_pipe_does_not_stop_the_run() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, "1"],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        stderr=write_end,
        text=True,
    )
    os.close(write_end)
    assert (result.returncode, result.stdout) == (0, "a result\n")


def run_on_terminal(*, first: int = 1, columns: int = 80, term: str = "xterm") -> tuple[str, str]:
    """What the script puts on stdout (a pipe) and on stderr (a terminal)."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(first)],
        cwd=Path(__file__).parent,
        env={**os.environ, "COLUMNS": str(columns), "TERM": term},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # Linux says EIO where the other end has closed
        pass
    os.close(ours)
    out, _ = process.communicate()
    assert process.returncode == 0, shown.decode()
    return out, shown.decode()


def test_a_terminal_gets_a_bar_in_one_line_and_stdout_only_results() -> None:
    out, shown = run_on_terminal(columns=80)
    assert out == "a result\n"
    assert "a result" not in shown
    assert "bf16_pure-adamw" in shown
    last = shown.replace("\x1b[2K", "\r").split("\r")[-2]
    for part in ("100/100", "loss 5.123  eval 5.500  lr 9.1e-04  20,480 tok/s", "0:00:00"):
        assert part in last


def test_the_bar_of_a_resumed_run_stands_where_the_run_does() -> None:
    _, shown = run_on_terminal(first=60)
    drawn = re.findall(r"(\d+)/100", shown)
    assert drawn[:2] == ["0", "59"], "before the first row, and where that began"


def test_a_dumb_terminal_gets_lines() -> None:
    _, shown = run_on_terminal(term="dumb")
    assert "bf16_pure-adamw  step 10/100  loss 5.123" in shown


def test_a_terminal_that_hangs_up_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("precexp.progress.REFRESH_SECONDS", 0.0)
    terminal = open(theirs, "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(3, log_every=1, label="") as progress:
        progress.write(make_row(1))
        os.close(ours)
        progress.write(make_row(2))
        progress.write(make_row(3))
    with contextlib.suppress(OSError):  # it still holds what could not be drawn
        terminal.close()
