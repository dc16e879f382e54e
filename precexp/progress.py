"""How a run is doing, for whoever watches: a bar on a terminal, plain lines anywhere else.

Both go to stderr, so that stdout holds results alone: `precexp ... > table.txt` keeps the table and
the progress stays in sight.
"""

import dataclasses
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

from precexp.record import Row

REFRESH_SECONDS = 0.1  # drawing takes half a millisecond of the training thread
BAR_WIDTH = 12


class Progress:
    """Shows rows while its context is open. A terminal or pipe that goes away is no error.

    `label` stands above the bar, or begins each line: the lines of runs that share a file mix.
    Lines come every `log_every` steps, at each evaluation and at the last step. Tokens per second
    are those of the last `log_every` steps.
    """

    def __init__(self, total_steps: int, *, log_every: int, label: str) -> None:
        self._total_steps = total_steps
        self._log_every = log_every
        self._label = label
        self._last: Row | None = None
        self._served: deque[tuple[int, float]] = deque(maxlen=log_every)  # (tokens, seconds)
        self._num_skipped = 0
        self._eval_loss: float | None = None  # the newest
        self._stream = sys.stderr
        self._watched = True
        self._bar = _build_bar(self._stream)
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total_steps, numbers="")
            self._drawn_at = -REFRESH_SECONDS

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            with self._while_watched():
                self._bar.console.print(self._label, markup=False, highlight=False)
                self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            with self._while_watched():
                self._bar.stop()

    def write(self, row: Row) -> None:
        self._count(row)
        if self._watched and self._bar is not None:
            self._draw(self._bar, row)
        elif self._watched and self._stream is not None:
            self._print(self._stream, row)
        self._last = row

    def _count(self, row: Row) -> None:
        self._num_skipped += row.skipped
        self._eval_loss = self._eval_loss if row.eval_loss is None else row.eval_loss
        # The first row of a resumed run does not say how many of its tokens are this step's.
        tokens_before = self._last.tokens if self._last else 0 if row.step == 1 else None
        if row.step_seconds is not None and tokens_before is not None:
            self._served.append((row.tokens - tokens_before, row.step_seconds))

    def _print(self, stream: TextIO, row: Row) -> None:
        is_last = row.step == self._total_steps
        if row.step % self._log_every and row.eval_loss is None and not is_last:
            return
        position = f"step {row.step}/{self._total_steps}"
        line = "  ".join([*filter(None, [self._label]), position, *self._numbers(row)])
        with self._while_watched():
            print(line, file=stream, flush=True)

    def _draw(self, bar: Bar, row: Row) -> None:
        now = time.monotonic()
        if now - self._drawn_at < REFRESH_SECONDS and row.step < self._total_steps:
            return
        self._drawn_at = now
        # No norm, so that a line of 80 columns holds the rest.
        shown = dataclasses.replace(row, eval_loss=self._eval_loss, grad_norm=None)
        numbers = "  ".join(self._numbers(shown))
        with self._while_watched():
            if self._last is None and row.step > 1:  # resumed: the steps before cost no time here
                bar.reset(self._task, completed=row.step - 1)
            bar.update(self._task, completed=row.step, numbers=numbers, refresh=True)

    def _numbers(self, row: Row) -> list[str]:
        numbers = []
        if row.loss is not None:
            numbers.append(f"loss {row.loss:.3f}")
        if row.eval_loss is not None:
            numbers.append(f"eval {row.eval_loss:.3f}")
        numbers.append(f"lr {row.lr:.1e}")
        if row.grad_norm is not None:
            numbers.append(f"norm {row.grad_norm:.3g}")
        if row.loss_scale is not None:
            numbers += [f"scale {row.loss_scale:g}", f"skipped {self._num_skipped}"]
        seconds = sum(seconds for _, seconds in self._served)
        if seconds > 0:
            tokens = sum(tokens for tokens, _ in self._served)
            numbers.append(f"{tokens / seconds:,.0f} tok/s")
        return numbers

    @contextmanager
    def _while_watched(self) -> Iterator[None]:
        """Ends the show, and nothing else, when the pipe is broken or the terminal has hung up."""
        try:
            yield
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._watched = False


def _build_bar(stream: TextIO | None) -> Bar | None:
    """The bar, or None where none can be drawn."""
    console = Console(file=stream)
    if not _is_terminal(stream) or not console.is_terminal or console.is_dumb_terminal:
        return None
    return Bar(
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        BarColumn(bar_width=BAR_WIDTH, table_column=Column(no_wrap=True)),
        # The one that gives way, to a second line, where the terminal is narrow.
        TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=False)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        console=console,
        auto_refresh=False,  # a drawing thread would take its time from training
        redirect_stdout=_is_terminal(sys.stdout),  # else prints meant for a file land in the bar
    )


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether the stream is an open terminal. (sys.stderr is None where there is no console.)"""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False
