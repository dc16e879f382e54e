"""The training step and the loop: a generator of rows. It logs, prints and writes nothing."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from precexp.config import TrainConfig
from precexp.data import Batches
from precexp.numerics import NoProbes, Probing
from precexp.optim import AnyPrecisionAdamW, lr_at
from precexp.precision import Census, Precision, take_census
from precexp.record import Row

Phase = Literal["forward", "backward", "step"]

_NO_PROBES = NoProbes()

IGNORED = -100  # cross_entropy's label of a position with nothing to predict


def train(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    precision: Precision,
    config: TrainConfig,
    *,
    scaler: torch.amp.GradScaler,
    eval_blocks: np.ndarray,
    total_steps: int,
    after_step: int = 0,
    tokens_served: int = 0,
    on_phase: Callable[[Phase], None] = lambda _: None,
    probes: Probing = _NO_PROBES,
) -> Iterator[Row | Census]:
    """Yields a Row per optimizer step in order and, once, the Census of the first applied step.

    Begins after a step, as a checkpoint left everything, with the tokens served by then. The rows
    of the steps that `probes` has due have theirs.

    Ends after `total_steps`, or with the first row whose loss or eval loss is not finite. On CUDA,
    rows come in bursts, since between log steps nothing waits for the device; at a step that
    evaluates or checkpoints, the model is as it was after that step when its row comes.
    """
    device = next(model.parameters()).device
    pending: list[_PendingRow] = []
    census_due = True
    served = tokens_served
    for step in range(after_step + 1, total_steps + 1):
        watch = _Stopwatch(device)
        lr = lr_at(step, config, total_steps=total_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        micro_batches = [batches.next_batch() for _ in range(config.grad_accumulation)]
        done = training_step(
            model,
            optimizer,
            micro_batches,
            precision,
            scaler,
            max_grad_norm=config.max_grad_norm,
            on_phase=on_phase,
            before_update=partial(probes.before_update, step),
        )
        probed = probes.after_update(step, skipped=done.skipped)
        if census_due and not done.skipped:
            yield take_census(model, optimizer=optimizer, logits=done.logits, loss=done.loss)
            census_due = False
        optimizer.zero_grad(set_to_none=True)
        watch.stop()

        served += sum(batch.numel() for batch in micro_batches)
        row = Row(
            step=step,
            tokens=served,
            loss=None,
            eval_loss=None,
            grad_norm=None,
            lr=lr,
            loss_scale=done.loss_scale,
            skipped=done.skipped,
            step_seconds=None,
            peak_bytes=_peak_bytes(device),
            probes=probed,
        )
        pending.append(_PendingRow(row=row, loss=done.loss, grad_norm=done.grad_norm, watch=watch))
        evaluates = step == total_steps or step % config.eval_every == 0
        if device.type == "cuda" and not (
            evaluates
            or step % config.log_every == 0
            or checkpoints_at(step, config, total_steps=total_steps)
        ):
            continue
        rows = _settle(pending)
        pending.clear()
        if evaluates and not any(has_diverged(row) for row in rows):
            eval_loss = evaluate(model, eval_blocks, precision, batch_size=config.eval_batch_size)
            rows[-1] = replace(rows[-1], eval_loss=eval_loss)
        for row in rows:
            yield row
            if has_diverged(row):
                return


def checkpoints_at(step: int, config: TrainConfig, *, total_steps: int) -> bool:
    """Whether a checkpoint is due after the step: every so often and at the end, or never."""
    every = config.checkpoint_every
    return every is not None and (step == total_steps or step % every == 0)


def has_diverged(row: Row) -> bool:
    """Whether a loss of the row was measured and is not finite."""
    return not all(math.isfinite(x) for x in (row.loss, row.eval_loss) if x is not None)


def place(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    *,
    device: torch.device,
    compiled: bool,
) -> None:
    """Moves the fp32 model to the device and casts its parameters.

    What the cast rounds away begins the compensation, where the optimizer has one for it.
    """

    def keep_residual(param: torch.nn.Parameter, full: Tensor) -> None:
        if isinstance(optimizer, AnyPrecisionAdamW) and optimizer.keeps_residual(param):
            optimizer.set_residual(param, full - param.data.float())

    if next(model.parameters()).device.type != device.type:  # a model of fake tensors can't move
        model.to(device)  # type: ignore[arg-type]
    precision.cast_parameters(model, on_cast=keep_residual)
    if compiled:
        model.compile()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a training step came to. The gradients are still there."""

    loss: Tensor  # the mean over all micro-batches, 0-dim, fp32, on the device
    grad_norm: Tensor  # before clipping, of the unscaled gradients, as loss
    logits: Tensor  # their shape and dtype alone, on meta
    loss_scale: float | None  # that the gradients had; None without loss scaling
    skipped: bool


def training_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Tensor],
    precision: Precision,
    scaler: torch.amp.GradScaler,
    *,
    max_grad_norm: float | None,
    on_phase: Callable[[Phase], None] = lambda _: None,
    before_update: Callable[[], None] = lambda: None,
    host_reads: bool = True,
) -> StepResult:
    """Forward, backward and optimizer step over CPU token ids [batch, block] each.

    `on_phase` is told each phase as it begins, `before_update` is called when the gradients are
    unscaled and not yet clipped. Without `host_reads`, as under fake tensors, nothing
    is read from a tensor: the loss scale is unknown and no step is skipped.

    On CUDA nothing here waits for the device but where the loss is scaled: the host has to know
    whether the gradients overflowed, since it is the host that leaves the optimizer's step out, so
    the scale is read before and after and GradScaler reads its flag. A scaler that is disabled
    reads nothing. Some of transformers' models read a mask or positions in their forward.
    """
    loss, logits = accumulate_gradients(model, micro_batches, precision, scaler, on_phase)
    on_phase("step")
    scaler.unscale_(optimizer)
    before_update()
    norm = clip_gradients(list(model.parameters()), max_grad_norm)
    if not host_reads:
        optimizer.step()
        scaler.update()
        return StepResult(loss=loss, grad_norm=norm, logits=logits, loss_scale=None, skipped=False)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return StepResult(
        loss=loss,
        grad_norm=norm,
        logits=logits,
        loss_scale=scale if scaler.is_enabled() else None,
        skipped=scaler.get_scale() < scale,
    )


def accumulate_gradients(
    model: PreTrainedModel,
    micro_batches: Sequence[Tensor],
    precision: Precision,
    scaler: torch.amp.GradScaler,
    on_phase: Callable[[Phase], None] = lambda _: None,
) -> tuple[Tensor, Tensor]:
    """Forward and backward over CPU token ids [batch, block] each, gradients summed into `.grad`.

    Returns the mean loss over all micro-batches (0-dim, fp32, on the device) and the last logits'
    shape and dtype (a meta tensor: the logits themselves are large and no longer needed).
    """

    def forward_and_backward(batch: Tensor) -> tuple[Tensor, Tensor]:
        on_phase("forward")
        ids = moved(batch, device)
        with precision.forward_context():
            logits = model(input_ids=ids).logits
            loss = next_token_loss(logits, ids)
        on_phase("backward")
        scaler.scale(loss / len(micro_batches)).backward()
        return loss.detach(), logits.detach().to("meta")

    device = next(model.parameters()).device
    losses, logits = zip(*map(forward_and_backward, micro_batches), strict=True)
    return torch.stack(losses).mean(), logits[-1]


def moved(ids: Tensor, device: torch.device) -> Tensor:
    """CPU token ids on the device, without waiting for it.

    A copy from memory that is not pinned waits, `non_blocking` or not. torch gives a pinned block
    to no one else before the copy from it is done.
    """
    return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids


def next_token_loss(logits: Tensor, ids: Tensor, *, reduction: str = "mean") -> Tensor:
    """Cross-entropy of logits [batch, block, vocab] on the next token of ids, in fp32, nats.

    The last position of a block predicts nothing, so a block has block_size - 1 losses.
    """
    targets = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def clip_gradients(params: Sequence[Tensor], max_norm: float | None) -> Tensor:
    """Scales the gradients down to `max_norm`; returns their norm before (0-dim fp32, no sync).

    The norm is computed in fp32 whatever the gradients' dtype: a bf16 norm has 3 digits.
    """
    grads = [param.grad for param in params if param.grad is not None]
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, blocks: np.ndarray, precision: Precision, *, batch_size: int
) -> float:
    """The float64 mean over all predicted tokens of blocks [n, block_size] of fp32 losses, in nats.

    Uses the stored parameters in the recipe's own forward; the mean weighs every token alike, so it
    does not depend on how blocks fall into batches.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    for start in range(0, len(blocks), batch_size):
        ids = moved(torch.from_numpy(blocks[start : start + batch_size].astype(np.int64)), device)
        with precision.forward_context():
            losses = next_token_loss(model(input_ids=ids).logits, ids, reduction="none")
        total += losses.sum(dtype=torch.float64)
    model.train()
    return total.item() / (len(blocks) * (blocks.shape[1] - 1))


def _peak_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


class _Stopwatch:
    """Times a step without waiting for the device: CUDA events there, the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._cuda = device.type == "cuda"
        self._mark()

    def stop(self) -> None:
        self._mark()

    def seconds(self) -> float:
        """The time between start and stop; on CUDA, valid after the device has come so far."""
        if self._cuda:
            start, end = self._events
            return start.elapsed_time(end) / 1000
        began, ended = self._times
        return ended - began

    def _mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())


@dataclass(frozen=True, kw_only=True)
class _PendingRow:
    """A row whose loss, norm and time may still be on the device."""

    row: Row
    loss: Tensor
    grad_norm: Tensor
    watch: _Stopwatch


def _settle(pending: Sequence[_PendingRow]) -> list[Row]:
    """The rows with their losses and norms, read from the device at once."""
    losses = torch.stack([p.loss for p in pending]).tolist()
    norms = torch.stack([p.grad_norm for p in pending]).tolist()
    return [
        replace(p.row, loss=loss, grad_norm=norm, step_seconds=p.watch.seconds())
        for p, loss, norm in zip(pending, losses, norms, strict=True)
    ]
