"""What the probes cost: the time inside them over that of the steps of the same run.

A difference of two runs would have to be told from their noise, which is larger than one in a
hundred. So the training loop is given probes that look at the clock when they are entered and left.
On CUDA both times are those of the host, which no step but a probed one makes wait.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import Tensor

from precexp import environment
from precexp.data import Batches, eval_subset
from precexp.model import build_model
from precexp.numerics import Probing, build_probes
from precexp.optim import build_optimizer
from precexp.precision import build_precision
from precexp.record import Row, write_json
from precexp.run import read_blocks, steps_of
from precexp.sweep import PlannedRun
from precexp.train import place, train

ROUNDS = 3
STEPS = 100
OVERRIDES = (
    "precision=fp32,bf16_pure",
    "train.probe_every=50,1",
    "train.eval_every=1000000",
    "wandb.mode=disabled",
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a recipe at an interval, by round: seconds inside the probes over those of the steps."""

    precision: str
    probe_every: int | None
    shares: list[float]
    milliseconds_per_step: list[float]  # of the whole step, probes included


class _Timed:
    """Probes with a stopwatch."""

    def __init__(self, probes: Probing) -> None:
        self.seconds = 0.0
        self._probes = probes

    def before_update(self, step: int) -> None:
        began = time.perf_counter()
        self._probes.before_update(step)
        self.seconds += time.perf_counter() - began

    def after_update(self, step: int, *, skipped: bool) -> Mapping[str, float] | None:
        began = time.perf_counter()
        found = self._probes.after_update(step, skipped=skipped)
        self.seconds += time.perf_counter() - began
        return found

    def state(self) -> Mapping[str, Tensor]:
        return self._probes.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._probes.load(state)


def bench(planned: list[PlannedRun], *, rounds: int, output: Path | None) -> list[Cost]:
    """Measures the runs in turn, prints and, given `output`, writes the result as JSON."""
    measured = [[_measure(run) for run in planned] for _ in range(rounds)]
    costs = [
        Cost(
            precision=run.arm.precision,
            probe_every=run.config.train.probe_every,
            shares=[share for share, _ in column],
            milliseconds_per_step=[1000 * seconds for _, seconds in column],
        )
        for run, column in zip(planned, zip(*measured, strict=True), strict=True)
    ]
    Console().print(_table(costs))
    if output is not None:
        config = planned[0].config
        device = environment.pick_device(config.device)
        write_json(
            output,
            {
                "model": config.model.name,
                "steps": config.train.max_steps,
                "costs": [asdict(cost) for cost in costs],
                "environment": environment.describe(device, attention=config.model.attention),
            },
        )
    return costs


def _measure(planned: PlannedRun) -> tuple[float, float]:
    """Seconds inside the probes over seconds of the steps, and seconds of a step."""
    config = planned.config
    device = environment.pick_device(config.device)
    environment.set_switches(seed=config.seed, deterministic=config.deterministic)
    precision = build_precision(config.precision, device=device)
    model = build_model(config.model, seed=config.seed)
    optimizer = build_optimizer(model.parameters(), config.optim, config.train, seed=config.seed)
    place(model, optimizer, precision, device=device, compiled=config.model.compile)
    blocks = read_blocks(config.model, config.data)
    scaler = precision.build_scaler()
    total_steps = steps_of(config.train, blocks)
    probes = _Timed(
        build_probes(
            model,
            optimizer,
            config.optim,
            every=config.train.probe_every,
            total_steps=total_steps,
            seed=config.seed,
            loss_scaling=scaler.is_enabled(),
        )
    )
    events = train(
        model,
        optimizer,
        Batches(blocks.train, batch_size=config.train.batch_size, seed=config.seed),
        precision,
        config.train,
        scaler=scaler,
        eval_blocks=eval_subset(blocks.eval, 1),
        total_steps=total_steps,
        probes=probes,
    )
    seconds = [event.step_seconds or 0.0 for event in events if isinstance(event, Row)]
    return probes.seconds / sum(seconds), sum(seconds) / len(seconds)


def _table(costs: list[Cost]) -> Table:
    table = Table(title="time inside the probes over that of the steps")
    for column in ("precision", "probe_every", "median", "least", "most", "ms a step"):
        table.add_column(column, justify="right" if column != "precision" else "left")
    for cost in costs:
        figures = (statistics.median(cost.shares), min(cost.shares), max(cost.shares))
        table.add_row(
            cost.precision,
            "off" if cost.probe_every is None else str(cost.probe_every),
            *(f"{figure:.2%}" for figure in figures),
            f"{statistics.median(cost.milliseconds_per_step):.0f}",
        )
    return table
