"""What a run comes to, gathered from its rows: status, error, results and timing of run.json."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from precexp.record import Row
from precexp.train import has_diverged

# From the largest initial scale, 2^24, so many halvings end where nothing is left of a gradient.
MOST_SKIPPED = 50


@dataclass
class Outcome:
    """Takes each row as it comes, those of earlier attempts first."""

    began: float  # time.perf_counter() at the start of this attempt
    eval_bytes_per_token: float
    loop_began: float = field(default_factory=time.perf_counter)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    last: Row | None = None
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    has_row: bool = False  # of this attempt
    first_step_seconds: float | None = None  # of this attempt
    step_seconds: list[float] = field(default_factory=list)  # but for each attempt's first step

    def replay(self, rows: Sequence[Row]) -> None:
        """Takes in what an earlier attempt wrote."""
        for row in rows:
            self._count(row)
        self.step_seconds += [row.step_seconds for row in rows[1:] if row.step_seconds is not None]

    def write(self, row: Row) -> None:
        if not self.has_row:
            self.has_row = True
            self.first_step_seconds = row.step_seconds
        elif row.step_seconds is not None:
            self.step_seconds.append(row.step_seconds)
        self._count(row)

    def _count(self, row: Row) -> None:
        self.last = row
        self.skipped_steps += row.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if row.skipped else 0

    @property
    def gave_up(self) -> bool:
        """Whether the gradients overflow at any loss scale."""
        return self.skipped_in_a_row >= MOST_SKIPPED

    @property
    def status(self) -> str:
        if self.last is not None and (has_diverged(self.last) or self.gave_up):
            return "diverged"
        return "completed"

    @property
    def error(self) -> str | None:
        if self.last is None or self.status == "completed":
            return None
        if self.gave_up:
            return (
                f"{MOST_SKIPPED} steps in a row were skipped up to step {self.last.step}: the "
                f"gradients overflow even at a loss scale of {self.last.loss_scale:.2g}"
            )
        in_training = not math.isfinite(self.last.loss or 0.0)
        name, loss = ("loss", self.last.loss) if in_training else ("eval loss", self.last.eval_loss)
        return f"{name} {loss} at step {self.last.step}"

    def results(self) -> dict[str, object]:
        """The `results` of run.json; losses in nats per token."""
        assert self.last is not None
        loss = self.last.eval_loss
        return {
            "final_eval_loss": loss,
            "final_train_loss": self.last.loss,
            "eval_perplexity": None if loss is None else _exp(loss),
            "eval_bits_per_byte": None
            if loss is None
            else loss / math.log(2) / self.eval_bytes_per_token,
            "steps": self.last.step,
            "applied_steps": self.last.step - self.skipped_steps,
            "skipped_steps": self.skipped_steps,
            "tokens": self.last.tokens,
        }

    def timing(self, *, setup_ended: float | None, compiled: bool) -> dict[str, float | None]:
        """Seconds; tokens per second over the steps alone, the first (which warms up) left out.

        `setup_ended` is time.perf_counter() at the first step's beginning. `compile_seconds` is by
        how much the first step, which compiles, took longer than the median one. Call it when the
        loop ends: `loop_seconds` is all of it, evaluations and records included.
        """
        assert self.last is not None
        timed = self.step_seconds
        first, median = self.first_step_seconds, statistics.median(timed) if timed else None
        beyond = None if first is None or median is None else first - median
        tokens_per_step = self.last.tokens / self.last.step
        return {
            "setup_seconds": None if setup_ended is None else setup_ended - self.began,
            "first_step_seconds": first,
            "compile_seconds": beyond if compiled else None,
            "step_seconds_median": median,
            "tokens_per_second": tokens_per_step * len(timed) / sum(timed) if timed else None,
            "loop_seconds": time.perf_counter() - self.loop_began,
            "total_seconds": time.perf_counter() - self.began,
        }


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
