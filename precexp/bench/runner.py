"""What the runner costs: tokens/s of the whole program's loop against a bare loop.

Both train the same model on the same batches with the same optimizer from the same seed. The
runner's time is the wall time of its loop with everything in it: hashes, rows on disk, wandb
offline, progress, the evaluation at the end (kept to one block). The bare loop has a forward pass,
a backward pass, clipping and the step, and nothing else.
"""

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from precexp import environment
from precexp.data import Batches
from precexp.model import build_model
from precexp.optim import build_optimizer, lr_at
from precexp.precision import build_precision
from precexp.record import write_json
from precexp.run import read_blocks, run, steps_of
from precexp.sweep import PlannedRun
from precexp.train import next_token_loss, place

ROUNDS = 7
STEPS = 40
OVERRIDES = (
    "train.eval_every=1000000",
    "train.eval_batches=1",
    "train.eval_batch_size=1",
    "wandb.mode=offline",
)


@dataclass(frozen=True, kw_only=True)
class RunnerResult:
    """Tokens per second of each round, and the median of the rounds' ratios runner / bare."""

    runner: list[float]
    bare: list[float]
    ratio: float
    config: dict[str, object]
    environment: dict[str, object]


def bench(planned: PlannedRun, *, rounds: int, output: Path | None) -> RunnerResult:
    """Measures, prints and, given `output`, writes the result as JSON."""
    runner, bare = [], []
    for round_number in range(rounds):
        pair = [(runner, _runner_tokens_per_second), (bare, _bare_tokens_per_second)]
        for results, measure in pair if round_number % 2 else reversed(pair):
            results.append(measure(planned))
    config = planned.config
    device = environment.pick_device(config.device)
    result = RunnerResult(
        runner=runner,
        bare=bare,
        ratio=statistics.median(r / b for r, b in zip(runner, bare, strict=True)),
        config={
            "model": config.model.name,
            "precision": planned.arm.precision,
            "optim": planned.arm.optim,
            "steps": config.train.max_steps,
            "tokens_per_step": config.train.batch_size * config.data.block_size,
        },
        environment=environment.describe(device, attention=config.model.attention),
    )
    Console().print(_table(result))
    if output is not None:
        write_json(output, asdict(result))
    return result


def _runner_tokens_per_second(planned: PlannedRun) -> float:
    with tempfile.TemporaryDirectory() as directory:
        record = run(planned.config, arm=planned.arm, directory=Path(directory) / "run")
    tokens, seconds = record.results["tokens"], record.timing["loop_seconds"]
    assert isinstance(tokens, int)
    assert isinstance(seconds, float)
    return tokens / seconds


def _bare_tokens_per_second(planned: PlannedRun) -> float:
    config = planned.config
    device = environment.pick_device(config.device)
    precision = build_precision(config.precision, device=device)
    model = build_model(config.model, seed=config.seed)
    optimizer = build_optimizer(model.parameters(), config.optim, config.train, seed=config.seed)
    place(model, optimizer, precision, device=device, compiled=config.model.compile)
    blocks = read_blocks(config.model, config.data)
    batches = Batches(blocks.train, batch_size=config.train.batch_size, seed=config.seed)
    steps = steps_of(config.train, blocks)
    served = [batches.next_batch() for _ in range(steps)]
    params = list(model.parameters())
    loss = torch.zeros(())
    began = time.perf_counter()
    for step, batch in enumerate(served, start=1):
        ids = batch.to(device)
        with precision.forward_context():
            loss = next_token_loss(model(input_ids=ids).logits, ids)
        loss.backward()
        if config.train.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, config.train.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, config.train, total_steps=steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    loss.item()  # waits for the device
    return sum(batch.numel() for batch in served) / (time.perf_counter() - began)


def _table(result: RunnerResult) -> Table:
    table = Table(title=f"{result.config['model']}, {result.config['precision']}: tokens/s")
    for column in ("", "median", "least", "most"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in (("runner", result.runner), ("bare loop", result.bare)):
        figures = (statistics.median(values), min(values), max(values))
        table.add_row(name, *(f"{figure:,.0f}" for figure in figures))
    ratios = [r / b for r, b in zip(result.runner, result.bare, strict=True)]
    table.add_row("ratio", *(f"{x:.3f}" for x in (result.ratio, min(ratios), max(ratios))))
    return table
