"""The runner beside transformers' Trainer: the same training, and the tokens/s of each.

Both sides have, of one seed: the model, the batches in their order, the optimizer (`optim.adamw`,
torch's fused one, where the overrides say nothing else), the clipping, attention and threads. The
schedule is Trainer's own, and so are its loss, autocast (`bf16=True`), data loader and loop. No
side evaluates or checkpoints on the way; both log every `train.log_every` steps.

Timed is the loop alone, all its steps, the first included. Of the runner it is what run.json calls
`loop_seconds`: placing the model and building the optimizer, the hash of the batches, a row on disk
for every step, progress, and the last evaluation, kept to one block. Of Trainer it is from
`on_train_begin` to `on_train_end`: it has its optimizer by then, and its log is a line printed to
nowhere. Trainer gains from what a run does to glibc's allocator, since both are in one process.

A round before the timed ones has a log line of Trainer's for every step: its losses and norms are
what is compared.
"""

import contextlib
import gc
import importlib.metadata
import importlib.util
import io
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from precexp import environment
from precexp.config import RunConfig, UserError
from precexp.data import Batches
from precexp.model import build_model
from precexp.optim import build_optimizer
from precexp.precision import build_precision
from precexp.record import read_run, write_json
from precexp.run import read_blocks, run, steps_of
from precexp.sweep import PlannedRun
from precexp.train import place

ROUNDS = 7
STEPS = 40  # of each round
OVERRIDES = (
    "optim=adamw",
    "train.eval_every=1000000",
    "train.eval_batches=1",
    "train.eval_batch_size=1",
    "wandb.mode=disabled",
)
PRECISIONS = "precision=fp32,bf16_mixed"  # where the overrides choose none

# What Trainer calls our schedules.
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


@dataclass(frozen=True, kw_only=True)
class TrainerResult:
    """Of one precision: tokens per second of each round, and how far the two trainings differ."""

    precision: str
    optim: str
    runner: list[float]
    trainer: list[float]
    ratio: float  # the median of the rounds' ratios runner / Trainer
    ratio_least: float
    ratio_most: float
    loss_difference: float  # the largest of a step, in nats per token
    grad_norm_difference: float  # the largest of a step, relative
    final_loss: float  # the runner's, of the last step


@dataclass(frozen=True, kw_only=True)
class _Training:
    """What one side came to."""

    losses: list[float]  # of each step, if it was logged
    grad_norms: list[float]
    tokens_per_second: float


def bench(
    planned: Sequence[PlannedRun], *, rounds: int, output: Path | None
) -> list[TrainerResult]:
    """Measures, prints and, given `output`, writes the results as JSON.

    The precisions take turns in each round, and who of the two comes first changes with it. Raises
    UserError where there is no accelerate, or Trainer has no such training.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise UserError(
            "bench trainer: transformers' Trainer needs the package accelerate; "
            "pip install 'precexp[trainer]'"
        )
    for each in planned:
        _require_peer(each.config)
    curves = [(_train_runner(each), _train_trainer(each, log_every=1)) for each in planned]
    speeds: list[tuple[list[float], list[float]]] = [([], []) for _ in planned]
    for round_number in range(rounds):
        for each, (runner, trainer) in zip(planned, speeds, strict=True):
            for is_runner in (True, False) if round_number % 2 else (False, True):
                done = _train_runner(each) if is_runner else _train_trainer(each)
                (runner if is_runner else trainer).append(done.tokens_per_second)
    results = [
        _result(each, *speed, *curve)
        for each, speed, curve in zip(planned, speeds, curves, strict=True)
    ]
    Console().print(_table(results, planned[0].config))
    if output is not None:
        _write(output, results, planned[0].config)
    return results


def _require_peer(config: RunConfig) -> None:
    """UserError for what Trainer does otherwise, so that the two would not be one training."""
    if config.precision.loss_scaling:
        raise UserError(
            "precision.loss_scaling: Trainer's schedule waits where a step is skipped, ours does "
            "not; allowed here: fp32, bf16_mixed, bf16_pure, bf16_plain"
        )


def _train_runner(planned: PlannedRun) -> _Training:
    gc.collect()  # as Trainer does before its loop
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "run"
        record = run(planned.config, arm=planned.arm, directory=folder)
        rows = read_run(folder).rows
    seconds = record.timing["loop_seconds"]
    assert isinstance(seconds, float)
    return _Training(
        losses=[_known(row.loss) for row in rows],
        grad_norms=[_known(row.grad_norm) for row in rows],
        tokens_per_second=rows[-1].tokens / seconds,
    )


def _known(value: float | None) -> float:
    assert value is not None
    return value


class _Blocks(Dataset):
    """The blocks in the order in which they are served, as Trainer takes them."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self._blocks = torch.cat([*batches])

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self._blocks[place], "labels": self._blocks[place]}


class _Stopwatch(TrainerCallback):
    """Times Trainer's loop."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.began = self.seconds = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.began = self._now()

    def on_train_end(self, *_: object, **__: object) -> None:
        self.seconds = self._now() - self.began

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _train_trainer(planned: PlannedRun, *, log_every: int | None = None) -> _Training:
    """The same training by Trainer; its losses and norms are of `log_every` steps each."""
    config = planned.config
    device = environment.pick_device(config.device)
    environment.set_switches(seed=config.seed, deterministic=config.deterministic)
    precision = build_precision(config.precision, device=device)
    blocks = read_blocks(config.model, config.data)
    steps = steps_of(config.train, blocks)
    batches = Batches(blocks.train, batch_size=config.train.batch_size, seed=config.seed)
    served = [batches.next_batch() for _ in range(steps * config.train.grad_accumulation)]
    model = build_model(config.model, seed=config.seed)
    optimizer = build_optimizer(model.parameters(), config.optim, config.train, seed=config.seed)
    place(model, optimizer, precision, device=device, compiled=config.model.compile)
    watch = _Stopwatch(device)
    with tempfile.TemporaryDirectory() as directory:
        arguments = _arguments(config, directory, device, steps, log_every)
        trainer = Trainer(
            model,
            arguments,
            train_dataset=_Blocks(served),
            optimizers=(optimizer, None),
            callbacks=[watch],
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    return _Training(
        losses=[line["loss"] for line in logged],
        grad_norms=[line["grad_norm"] for line in logged],
        tokens_per_second=sum(batch.numel() for batch in served) / watch.seconds,
    )


def _arguments(
    config: RunConfig, directory: str, device: torch.device, steps: int, log_every: int | None
) -> TrainingArguments:
    train = config.train
    return TrainingArguments(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=train.batch_size,
        gradient_accumulation_steps=train.grad_accumulation,
        train_sampling_strategy="sequential",
        learning_rate=train.lr,
        lr_scheduler_type=SCHEDULES[train.schedule],
        warmup_steps=train.warmup_steps,
        max_grad_norm=train.max_grad_norm or 0.0,  # 0: no clipping
        bf16=config.precision.autocast_dtype == "bfloat16",
        use_cpu=device.type == "cpu",
        seed=config.seed,
        logging_steps=log_every or train.log_every,
        logging_nan_inf_filter=False,  # it waits for the device at each step
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )


def _result(
    planned: PlannedRun,
    runner: list[float],
    trainer: list[float],
    ours: _Training,
    theirs: _Training,
) -> TrainerResult:
    ratios = [r / t for r, t in zip(runner, trainer, strict=True)]
    losses = zip(ours.losses, theirs.losses, strict=True)
    norms = zip(ours.grad_norms, theirs.grad_norms, strict=True)
    return TrainerResult(
        precision=planned.arm.precision,
        optim=planned.arm.optim,
        runner=runner,
        trainer=trainer,
        ratio=statistics.median(ratios),
        ratio_least=min(ratios),
        ratio_most=max(ratios),
        loss_difference=max(abs(a - b) for a, b in losses),
        grad_norm_difference=max(abs(a / b - 1) for a, b in norms),
        final_loss=ours.losses[-1],
    )


def _write(output: Path, results: Sequence[TrainerResult], config: RunConfig) -> None:
    device = environment.pick_device(config.device)
    described = environment.describe(device, attention=config.model.attention)
    accelerate = {"accelerate": importlib.metadata.version("accelerate")}
    value = {
        "config": {
            "model": config.model.name,
            "steps": config.train.max_steps,
            "tokens_per_step": config.train.batch_size
            * config.train.grad_accumulation
            * config.data.block_size,
        },
        "results": [asdict(result) for result in results],
        "environment": {**described, **accelerate},
    }
    write_json(output, value)


def _table(results: Sequence[TrainerResult], config: RunConfig) -> Table:
    rounds = len(results[0].runner)
    table = Table(title=f"{config.model.name}, {rounds} rounds: tokens/s")
    for column in ("", "", "median", "least", "most", "largest loss difference"):
        table.add_column(column, justify="right" if column else "left")
    for each in results:
        for name, values in (("precexp", each.runner), ("Trainer", each.trainer)):
            figures = (statistics.median(values), min(values), max(values))
            table.add_row(each.precision, name, *(f"{figure:,.0f}" for figure in figures))
        ratios = (each.ratio, each.ratio_least, each.ratio_most)
        table.add_row(
            each.precision,
            "ratio",
            *(f"{ratio:.3f}" for ratio in ratios),
            f"{each.loss_difference:.1e}",
            end_section=True,
        )
    return table
