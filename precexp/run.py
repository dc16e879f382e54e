"""One experiment from start to finish."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from precexp import environment
from precexp.checkpoint import (
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    load_numerics,
    save_checkpoint,
)
from precexp.config import (
    Arm,
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    UserError,
    config_hash,
)
from precexp.data import Batches, TokenBlocks, eval_subset, load_blocks
from precexp.flops import model_flops_per_token, peak_flops_per_second, utilisation
from precexp.interrupts import Interrupts
from precexp.memory import ledger
from precexp.memory.advice import ways_out
from precexp.memory.plan import MIB, plan
from precexp.model import build_model, init_hash, read_model_config, require_positions
from precexp.numerics import LossWarning, Probing, build_probes, typical_weight, warnings_of
from precexp.optim import build_optimizer, promised_states
from precexp.outcome import Outcome
from precexp.precision import Census, Precision, build_precision, check_census, take_census
from precexp.progress import Progress
from precexp.record import RecordError, Row, RunRecord, RunWriter, one_line, read_record
from precexp.tracking import Tracker, check_login
from precexp.train import Phase, checkpoints_at, has_diverged, place, train


def run(config: RunConfig, *, arm: Arm, directory: Path) -> RunRecord:
    """Trains and records one run in its directory; returns its record, completed or diverged.

    Any exception leaves the record `failed` (or `interrupted`) and goes on to the caller.
    """
    began = time.perf_counter()
    device = environment.pick_device(config.device)
    environment.set_switches(seed=config.seed, deterministic=config.deterministic)
    precision = build_precision(config.precision, device=device)
    with (
        environment.own_gpu(device),
        RunWriter(directory, config, arm) as record,
        ExitStack() as stack,
    ):
        checkpoint = _rewind(record, directory / "checkpoints")
        tracker = stack.enter_context(
            Tracker(
                config.wandb,
                record.record,
                directory=directory,
                group=config.name,
                earlier=record.rows,
            )
        )
        record.update(environment=environment.describe(device, attention=config.model.attention))
        begun = ledger.start(device)
        phase = _LastPhase()
        blocks = read_blocks(config.model, config.data)
        _require_same_blocks(checkpoint, blocks)
        total_steps = steps_of(config.train, blocks)
        model = build_model(config.model, seed=config.seed)
        _record_init(record, init_hash(model), goes_on=checkpoint is not None)
        _warn(
            record,
            warnings_of(
                config.optim,
                config.train,
                param_dtype=precision.param_dtype,
                total_steps=total_steps,
                weight=typical_weight(model),
            ),
        )
        batches = Batches(blocks.train, batch_size=config.train.batch_size, seed=config.seed)
        _tell(record, [*blocks.notices, *_notices(config, device), *tracker.notices])
        outcome = Outcome(began=began, eval_bytes_per_token=blocks.eval_bytes_per_token)
        outcome.replay(record.rows)
        with (
            _explained_out_of_memory(phase, record, config, device),
            Progress(total_steps, log_every=config.train.log_every, label=arm.label) as progress,
            Interrupts() as interrupts,
        ):
            training = _begin(
                config,
                model,
                batches,
                precision,
                checkpoint,
                total_steps=total_steps,
                blocks_sha256=blocks.sha256,
            )
            if record.record.census is None:
                record.update(census=take_census(model).as_record())
            init_bytes = ledger.model_bytes(begun, model, training.optimizer)
            _follow(
                train(
                    model,
                    training.optimizer,
                    batches,
                    precision,
                    config.train,
                    scaler=training.scaler,
                    eval_blocks=eval_subset(blocks.eval, _num_eval_blocks(config.train)),
                    total_steps=total_steps,
                    after_step=checkpoint.step if checkpoint else 0,
                    tokens_served=checkpoint.tokens if checkpoint else 0,
                    on_phase=phase.begin,
                    probes=training.probes,
                ),
                training,
                config,
                record,
                outcome,
                sinks=(record, tracker, progress, outcome),
                interrupts=interrupts,
            )

        record.evidence(data_hash=batches.data_hash)
        timing = outcome.timing(setup_ended=phase.first_began, compiled=config.model.compile)
        arithmetic = utilisation(
            flops_per_token=model_flops_per_token(model, block_size=config.data.block_size),
            tokens_per_second=timing["tokens_per_second"],
            peak=peak_flops_per_second(device, precision.forward_dtype),
        )
        record.update(
            status=outcome.status,
            error=outcome.error,
            results=outcome.results(),
            timing={"started": outcome.started, **timing, **arithmetic},
        )
        if interrupts.asked is not None:  # while the last checkpoint was written
            tracker.finish(record.record)
            raise KeyboardInterrupt(f"by {interrupts.asked} after the last step")
        measured = measured_memory(
            record,
            begun,
            model,
            training.optimizer,
            precision,
            training.scaler,
            config,
            init_bytes=init_bytes,
        )
        # At once: planning takes a while, and may be killed.
        record.update(memory={"planned": None, "measured": measured})
        planned = planned_memory(record, config, device)
        record.update(memory={"planned": planned, "measured": measured})
        tracker.finish(record.record)
        _tell(record, tracker.notices)  # what went wrong with wandb on the way
        return record.record


@dataclass(frozen=True, kw_only=True)
class _Training:
    """What a checkpoint holds, as it was begun or gone on with."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    batches: Batches
    blocks_sha256: str
    probes: Probing
    promised: Mapping[str, torch.dtype]  # of the census, by role
    total_steps: int


def _begin(
    config: RunConfig,
    model: PreTrainedModel,
    batches: Batches,
    precision: Precision,
    checkpoint: Checkpoint | None,
    *,
    total_steps: int,
    blocks_sha256: str,
) -> _Training:
    """Places the model beside an optimizer, and takes both to where the checkpoint left them."""
    optimizer = build_optimizer(model.parameters(), config.optim, config.train, seed=config.seed)
    device = environment.pick_device(config.device)
    place(model, optimizer, precision, device=device, compiled=config.model.compile)
    scaler = precision.build_scaler()
    if checkpoint is not None:
        load_checkpoint(
            checkpoint, model=model, optimizer=optimizer, scaler=scaler, batches=batches
        )
    probes = build_probes(
        model,
        optimizer,
        config.optim,
        every=config.train.probe_every,
        total_steps=total_steps,
        seed=config.seed,
        loss_scaling=scaler.is_enabled(),
    )
    if checkpoint is not None:
        probes.load(load_numerics(checkpoint))
    return _Training(
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        batches=batches,
        blocks_sha256=blocks_sha256,
        probes=probes,
        promised=precision.promised()
        | promised_states(config.optim, param_dtype=precision.param_dtype),
        total_steps=total_steps,
    )


def _follow(
    events: Iterator[Row | Census],
    training: _Training,
    config: RunConfig,
    record: RunWriter,
    outcome: Outcome,
    *,
    sinks: Sequence[RunWriter | Tracker | Progress | Outcome],
    interrupts: Interrupts,
) -> None:
    """Hands on the rows, makes checkpoints where they are due, and stops where it is asked to.

    Raises KeyboardInterrupt after the checkpoint of the step in which a signal came.
    """
    batches = training.batches
    if outcome.gave_up:  # with the step of the checkpoint
        return
    for event in events:
        if isinstance(event, Census):
            record.update(census=event.as_record())
            check_census(event, training.promised)
            print(event.summary(), file=sys.stderr)
            continue
        for sink in sinks:
            sink.write(event)
        if event.eval_loss is not None:
            record.evidence(data_hash=batches.data_hash, at_step=event.step)
        # On CUDA the model may be ahead of the row: then a later row is the place to stop.
        served = batches.position * config.data.block_size
        stops = interrupts.asked is not None and event.tokens == served
        is_due = checkpoints_at(event.step, config.train, total_steps=training.total_steps)
        if (is_due or stops) and not has_diverged(event):
            record.sync()
            save_checkpoint(
                record.directory / "checkpoints",
                step=event.step,
                tokens=event.tokens,
                model=training.model,
                optimizer=training.optimizer,
                scaler=training.scaler,
                batches=batches,
                blocks_sha256=training.blocks_sha256,
                config_hash=record.record.config_hash,
                rows_sha256=record.rows_sha256,
                keep_last=config.train.keep_last,
                recorded={
                    "census": record.record.census,
                    "data_hash_at": record.record.evidence["data_hash_at"],
                },
                numerics=training.probes.state(),
            )
        if outcome.status == "diverged":
            return
        if stops:
            raise KeyboardInterrupt(f"by {interrupts.asked} after step {event.step}")


def _rewind(record: RunWriter, directory: Path) -> Checkpoint | None:
    """Takes the record back to the newest whole checkpoint, or to nothing; returns that one."""
    rows = record.rows
    checkpoint, problems = find_checkpoint(
        directory,
        config_hash=record.record.config_hash,
        rows_sha256_at=record.rows_sha256_at,
    )
    _tell(record, problems)
    step = checkpoint.step if checkpoint is not None else 0
    recorded = checkpoint.facts.get("recorded") if checkpoint is not None else None
    if recorded and record.record.census is None:  # run.json could not be read
        hashes = {"data_hash_at": recorded["data_hash_at"]}
        record.update(census=recorded["census"], evidence={**record.record.evidence, **hashes})
    record.rewind(step)
    if rows:
        again = f"; steps {step + 1} to {len(rows)} are done again" if len(rows) > step else ""
        _tell(record, [f"resumed after step {step}{again}"])
    return checkpoint


def _require_same_blocks(checkpoint: Checkpoint | None, blocks: TokenBlocks) -> None:
    """UserError if the run would go on with other tokens than it began with."""
    begun_with = None if checkpoint is None else checkpoint.facts.get("blocks_sha256")
    if begun_with not in (None, blocks.sha256):  # None: of a precexp that did not record it
        raise UserError(
            "data: the text or its tokenizer has changed since the run began, and half of it would "
            "be trained on each; put it back, or choose another name="
        )


def _record_init(record: RunWriter, found: str, *, goes_on: bool) -> None:
    """Records the init_hash; that of a run that goes on is of the weights it began with."""
    begun_with = record.record.evidence["init_hash"] if goes_on else None
    if begun_with in (None, found):
        record.evidence(init_hash=found)
    else:
        _tell(
            record,
            [
                "the initial weights of model.path are not those that the run began with any "
                "more; it goes on from its checkpoint, and init_hash is of the earlier ones"
            ],
        )


def preflight(config: RunConfig) -> None:
    """Finds a user's mistake before anything is written; UserError says it in one line.

    Builds the token cache on the way, since only the tokens show whether the text is long enough.
    """
    device = environment.pick_device(config.device)
    build_precision(config.precision, device=device)
    check_login(config.wandb)
    steps_of(config.train, read_blocks(config.model, config.data))


@cache
def read_blocks(model: ModelConfig, data: DataConfig) -> TokenBlocks:
    """The tokens that the model will be given; UserError if it has no place for them."""
    architecture = read_model_config(model)
    require_positions(architecture, model, block_size=data.block_size)
    return load_blocks(
        data,
        model_path=model.path,
        vocab_size=architecture.vocab_size,
        trust_remote_code=model.trust_remote_code,
    )


def steps_of(config: TrainConfig, blocks: TokenBlocks) -> int:
    """The number of optimizer steps; UserError if an epoch has not even one."""
    if config.max_steps is not None:
        return config.max_steps
    assert config.epochs is not None
    per_step = config.batch_size * config.grad_accumulation
    steps = config.epochs * len(blocks.train) // per_step
    if steps == 0:
        raise UserError(
            f"train.epochs: {config.epochs} epochs of {len(blocks.train)} blocks make no step of "
            f"{per_step} blocks; allowed: more epochs, or a train.batch_size of at most "
            f"{config.epochs * len(blocks.train) // config.grad_accumulation}"
        )
    return steps


class OutOfMemory(RuntimeError):
    """The GPU's memory was not enough: one line that says for what, and what would be."""


@dataclass
class _LastPhase:
    """What is under way: the building of the model, then a phase of the training step."""

    name: str = "build"
    first_began: float | None = None  # time.perf_counter() at the first step's beginning

    def begin(self, name: Phase) -> None:
        self.name = name
        if self.first_began is None:
            self.first_began = time.perf_counter()


@contextmanager
def _explained_out_of_memory(
    phase: _LastPhase, record: RunWriter, config: RunConfig, device: torch.device
) -> Iterator[None]:
    """Records the plan of what the GPU could not hold, and says what would be smaller."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        planned = planned_memory(record, config, device)
        record.update(memory={"planned": planned, "measured": None})
        raise OutOfMemory(out_of_memory(phase.name, planned)) from error


_PLANS: dict[tuple[object, ...], dict[str, Any]] = {}  # of this process, by what they depend on


def planned_memory(
    record: RunWriter, config: RunConfig, device: torch.device
) -> dict[str, object] | None:
    """The `memory.planned` of the run; a run of the same arm that has it spares the planning.

    Where it cannot be planned the record says why, and the run is none the worse.
    """
    for path in sorted(record.directory.parent.glob("*/run.json")):
        with suppress(RecordError, UserError):
            other = read_record(path)
            planned = (other.memory or {}).get("planned")
            if (
                isinstance(planned, dict)
                and planned.get("device") == device.type
                and all(
                    (other.environment or {}).get(key) == record.record.environment.get(key)
                    for key in ("packages", "commit")
                )
                and config_hash(replace(config, seed=other.seed)) == other.config_hash
            ):
                return planned
    train = config.train
    kind = (
        config.model,
        config.data.block_size,
        config.precision,
        config.optim,
        train.batch_size,
        train.grad_accumulation,
        train.max_grad_norm,
        device.type,
    )
    if kind in _PLANS:
        return _PLANS[kind]
    try:
        planned = plan(config, device=device.type)  # type: ignore[arg-type]
        ways = [asdict(way) for way in ways_out(config, planned)]
        _PLANS[kind] = {**planned.as_record(), "ways_out": ways}
        return _PLANS[kind]
    except Exception as error:
        _tell(record, [f"memory was not planned: {one_line(error)}"])
        return None


def measured_memory(
    record: RunWriter,
    begun: ledger.Start,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    scaler: torch.amp.GradScaler,
    config: RunConfig,
    *,
    init_bytes: int,
) -> dict[str, object] | None:
    """The `memory.measured` of the run, by further steps of the model, which is used up."""
    try:
        return ledger.measure(
            begun, model, optimizer, precision, scaler, config, after_init=init_bytes
        )
    except Exception as error:
        _tell(record, [f"memory was not measured: {one_line(error)}"])
        return None


def out_of_memory(phase: str, planned: Mapping[str, Any] | None) -> str:
    """What ran out where, what the plan says it was for, and the cheapest ways out."""
    text = f"CUDA out of memory in the {phase} phase"
    if planned is None:
        return text
    largest = sorted(planned["categories"].items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {num_bytes / MIB:,.0f}" for name, num_bytes in largest)
    text += f"; planned peak {planned['peak_bytes'] / MIB:,.0f} MiB ({parts})"
    ways = (
        f"{way['overrides']} (-{way['saved_bytes'] / MIB:,.0f} MiB)"
        for way in planned["ways_out"][:3]
    )
    return f"{text}; smaller: {', or '.join(ways)}" if planned["ways_out"] else text


def _num_eval_blocks(config: TrainConfig) -> int | None:
    return None if config.eval_batches is None else config.eval_batches * config.eval_batch_size


def _notices(config: RunConfig, device: torch.device) -> list[str]:
    notices = []
    if device.type == "cpu" and config.precision.autocast_dtype == "float16":
        notices.append("fp16 on a CPU is about 20 times slower than fp32 or bf16; meant for tests")
    if config.model.dropout:
        notices.append(
            f"model.dropout={config.model.dropout}: masks differ between dtypes, so the arms are "
            "matched in distribution only"
        )
    return notices


def _tell(record: RunWriter, notices: Sequence[str]) -> None:
    """Records and prints the notices that the record has not got yet."""
    for notice in notices:
        if notice not in record.record.notices:
            record.notice(notice)
            _say_once(notice)


def _warn(record: RunWriter, found: Sequence[LossWarning]) -> None:
    """Records what precision is going to lose; prints what no run of the arm beside it has told."""
    told: set[object] = set()
    for path in record.directory.parent.glob("seed-*/run.json"):
        if path.parent != record.directory:
            with suppress(RecordError):
                told |= {
                    str(warning.get("message")) for warning in read_record(path).warnings or []
                }
    record.update(warnings=[asdict(warning) for warning in found])
    for warning in found:
        if warning.message not in told:
            _say_once(f"{record.record.arm['label']}: {warning.message}")


@cache
def _say_once(notice: str) -> None:
    """Prints a notice, unless an earlier run of this process said the same."""
    print(notice, file=sys.stderr, flush=True)
