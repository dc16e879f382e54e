"""What makes a training step smaller, and the largest batch that fits: plans beside a plan."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from precexp.config import AdamWConfig, RunConfig, UserError
from precexp.memory.plan import Plan, plan

_WORTH = 0.01  # of the peak: less is no way out
_BOTH = "both of these"
_MOST = 2**16  # blocks in a batch


@dataclass(frozen=True, kw_only=True)
class WayOut:
    """A change of the config that trains the same model on the same tokens per step."""

    overrides: str
    cost: str
    peak_bytes: int
    saved_bytes: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a memory of so many bytes holds of a run."""

    memory_bytes: int
    fits: bool  # even at the high end of what a plan can't see
    may_fit: bool  # at the low end
    largest_batch_size: int | None  # that fits; None if not even 1 does
    largest_batch_size_low: int | None  # that may fit


def ways_out(config: RunConfig, planned: Plan) -> list[WayOut]:
    """Those that save 1 % of the peak or more, the cheapest for the user first."""
    found = []
    for overrides, cost, changed in _candidates(config):
        try:
            peak = plan(changed, device=planned.device).peak_bytes
        except UserError:  # a model without checkpointing
            continue
        if planned.peak_bytes - peak >= _WORTH * planned.peak_bytes:
            found.append(
                WayOut(
                    overrides=overrides,
                    cost=cost,
                    peak_bytes=peak,
                    saved_bytes=planned.peak_bytes - peak,
                )
            )
    # Together two ways can save less than one of them: checkpoints of more micro-batches.
    least = min((way.peak_bytes for way in found if way.cost != _BOTH), default=0)
    return [way for way in found if way.cost != _BOTH or way.peak_bytes < least]


def _candidates(config: RunConfig) -> Iterator[tuple[str, str, RunConfig]]:
    """Overrides, what they cost, and the config under them."""
    model, train, optim = config.model, config.train, config.optim
    if model.attention == "eager":
        changed = replace(config, model=replace(model, attention="sdpa"))
        yield "model.attention=sdpa", "nothing", changed
    if isinstance(optim, AdamWConfig) and optim.implementation in ("foreach", "loop"):
        changed = replace(config, optim=replace(optim, implementation="fused"))
        yield "optim.implementation=fused", "nothing", changed
    halved = None
    if train.batch_size % 2 == 0:
        batch, accumulation = train.batch_size // 2, train.grad_accumulation * 2
        halved = replace(train, batch_size=batch, grad_accumulation=accumulation)
        overrides = f"train.batch_size={batch} train.grad_accumulation={accumulation}"
        yield overrides, "smaller matrix products", replace(config, train=halved)
    if not model.gradient_checkpointing:
        saving = replace(model, gradient_checkpointing=True)
        overrides = "model.gradient_checkpointing=true"
        yield overrides, "a second forward pass", replace(config, model=saving)
        if halved is not None:
            both = f"train.batch_size={halved.batch_size} train.grad_accumulation="
            both += f"{halved.grad_accumulation} {overrides}"
            yield both, _BOTH, replace(config, model=saving, train=halved)


def fit(config: RunConfig, planned: Plan, *, memory_bytes: int) -> Fit:
    """Whether the planned run fits, and the largest batch_size that does."""
    peaks = {config.train.batch_size: planned}

    def plan_of(batch_size: int) -> Plan:
        if batch_size not in peaks:
            train = replace(config.train, batch_size=batch_size)
            peaks[batch_size] = plan(replace(config, train=train), device=planned.device)
        return peaks[batch_size]

    return Fit(
        memory_bytes=memory_bytes,
        fits=_highest(planned) <= memory_bytes,
        may_fit=_lowest(planned) <= memory_bytes,
        largest_batch_size=_largest(plan_of, _highest, memory_bytes),
        largest_batch_size_low=_largest(plan_of, _lowest, memory_bytes),
    )


def _highest(planned: Plan) -> int:
    return planned.peak_bytes + sum(each.high_bytes for each in planned.unseen)


def _lowest(planned: Plan) -> int:
    return planned.peak_bytes + sum(each.low_bytes for each in planned.unseen)


def _largest(
    plan_of: Callable[[int], Plan], need: Callable[[Plan], int], memory_bytes: int
) -> int | None:
    """The largest batch whose need is within the memory, by bisection.

    Need grows with the batch almost in a line, so the bisection asks where the line would cross.
    """
    if need(plan_of(1)) > memory_bytes:
        return None
    low, high = 1, 2  # low fits
    while need(plan_of(high)) <= memory_bytes:
        low = high
        if high == _MOST:
            return high
        slope = (need(plan_of(high)) - need(plan_of(1))) / (high - 1)
        room = (memory_bytes - need(plan_of(high))) / max(slope, 1)
        high = min(_MOST, max(high + 1, high + int(min(room, _MOST)) + 1))
    while high - low > 1:
        span = need(plan_of(high)) - need(plan_of(low))
        part = (memory_bytes - need(plan_of(low))) / max(span, 1)
        middle = min(high - 1, max(low + 1, low + int(part * (high - low))))
        if need(plan_of(middle)) <= memory_bytes:
            low = middle
        else:
            high = middle
    return low
