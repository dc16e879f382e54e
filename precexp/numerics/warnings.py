"""What arithmetic proves of a run before its first step: which of its numbers rounding eats.

A warning is for what happens at any gradients of the kind that it names, not for what may happen.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from precexp.config import AdamWConfig, OptimConfig, TrainConfig
from precexp.numerics.arithmetic import Arithmetic, arithmetic_of
from precexp.optim import lr_at

Code = Literal[
    "decay_lost",
    "decay_below_compensation",
    "updates_below_half_ulp",
    "variance_stalls",
    "momentum_stalls",
    "eps_is_zero",
]

# Of what the schedule adds up to: a tail in which the learning rate goes to zero is no fault.
LEAST_SHARE = 0.1
_MOST_STEPS_READ = 10_000
_MOST_READ_PER_PARAMETER = 4096


@dataclass(frozen=True, kw_only=True)
class LossWarning:
    """One of the `warnings` of run.json: `value` is below `threshold`, and so something is lost."""

    code: Code
    message: str  # one line: the numbers, what follows, and the remedy
    value: float
    threshold: float
    remedy: str


def warnings_of(
    optim: OptimConfig,
    train: TrainConfig,
    *,
    param_dtype: torch.dtype,
    total_steps: int,
    weight: float | None,
) -> list[LossWarning]:
    """What the arm loses in a run of so many steps; `weight` is the size of a typical one."""
    arithmetic = arithmetic_of(optim, param_dtype=param_dtype, beta2=train.beta2)
    stride = max(1, total_steps // _MOST_STEPS_READ)
    rates = [lr_at(s, train, total_steps=total_steps) for s in range(1, total_steps + 1, stride)]
    decays = [rate * train.weight_decay for rate in rates]
    found = [
        _decay_lost(arithmetic, decays),
        _decay_below_compensation(arithmetic, decays),
        _updates_below_half_ulp(arithmetic, rates, weight),
        _variance_stalls(arithmetic, optim, train),
        _momentum_stalls(arithmetic, train),
        _eps_is_zero(arithmetic, train),
    ]
    return [warning for warning in found if warning is not None]


@torch.no_grad()
def typical_weight(model: nn.Module) -> float | None:
    """The median size of the entries of matrices, from an even sample of each; None without any."""
    parts = []
    for param in model.parameters():
        if param.ndim >= 2 and param.is_contiguous():
            stride = max(1, param.numel() // _MOST_READ_PER_PARAMETER)
            parts.append(param.detach().view(-1)[::stride].abs().float())
    return torch.cat(parts).median().item() if parts else None


def _decay_lost(arithmetic: Arithmetic, decays: list[float]) -> LossWarning | None:
    """w (1 - r) rounds to w for every w where r < 2^-(bits + 1), with r = lr x weight_decay."""
    threshold = 2.0 ** -(arithmetic.weight_bits + 1)
    below = _below(decays, threshold)
    if not arithmetic.decay_outside or below is None:
        return None
    value, when = below
    return _warning(
        "decay_lost",
        f"lr x weight_decay is {value:.2g}{when}, below 2^-{arithmetic.weight_bits + 1}: a "
        f"{_name(arithmetic.weight_dtype)} weight times 1 - {value:.2g} rounds to itself, so none "
        "of the decay is applied",
        value,
        threshold,
        "decay inside the compensated update: optim=anyprecision or optim=anyprecision_packed with "
        "optim.decay=inside and precision.kahan=true",
    )


def _decay_below_compensation(arithmetic: Arithmetic, decays: list[float]) -> LossWarning | None:
    """A weight 2^e whose gradient is 0 stays where its remainder's half ulp exceeds r 2^e."""
    threshold = 2.0**-arithmetic.master_bits
    below = _below(decays, threshold)
    if (
        below is None
        or arithmetic.decay_outside
        or arithmetic.master_is_random
        or not arithmetic.has_compensation
    ):
        return None
    value, when = below
    return _warning(
        "decay_below_compensation",
        f"lr x weight_decay is {value:.2g}{when}, below 2^-{arithmetic.master_bits}: weights "
        "without gradients stop to decay, for their compensation rounds the decay to nothing",
        value,
        threshold,
        "a compensation that is rounded stochastically: optim.stochastic_rounding=auto and "
        "optim.compensation_dtype=bfloat16",
    )


def _updates_below_half_ulp(
    arithmetic: Arithmetic, rates: list[float], weight: float | None
) -> LossWarning | None:
    """A steady gradient's update is lr, which a weight in [2^e, 2^(e+1)) keeps above 2^(e-bits)."""
    if not weight or not math.isfinite(weight) or arithmetic.master_is_random:
        return None
    threshold = 2.0 ** (math.floor(math.log2(weight)) - arithmetic.master_bits)
    below = _below(rates, threshold)
    if below is None:
        return None
    value, when = below
    return _warning(
        "updates_below_half_ulp",
        f"lr is {value:.2g}{when}, below {threshold:.2g}: half an ulp of the median weight, "
        f"{weight:.2g}, is more than the update of a steady gradient, so at least half of the "
        "weights stay where they are",
        value,
        threshold,
        "a compensation (precision.kahan=true with optim=anyprecision), "
        "optim.weight_rounding=stochastic, or float32 weights",
    )


def _variance_stalls(
    arithmetic: Arithmetic, optim: OptimConfig, train: TrainConfig
) -> LossWarning | None:
    """v beta2 rounds to v for some v of every binade where 1 - beta2 < 2^-bits: none gets past."""
    if arithmetic.variance_is_random:
        return None
    return _stalls(
        "variance_stalls",
        "variance",
        "beta2",
        train.beta2,
        _stall_bits(arithmetic.variance_bits, optim),
        "optim=anyprecision with optim.stochastic_rounding=auto, optim=anyprecision_packed, "
        "optim.variance_dtype=float32, or a train.beta2 of at most {most}",
    )


def _momentum_stalls(arithmetic: Arithmetic, train: TrainConfig) -> LossWarning | None:
    """As of the variance; a momentum is always rounded to nearest."""
    return _stalls(
        "momentum_stalls",
        "momentum",
        "beta1",
        train.beta1,
        arithmetic.momentum_bits,
        "optim.momentum_dtype=float32, or a train.beta1 of at most {most}",
    )


def _stall_bits(bits: int, optim: OptimConfig) -> int:
    # torch's foreach kernels round the factor itself to the tensor's dtype: 1 - 2^-bits is one of
    # its numbers, and moves every value.
    rounds_factor = isinstance(optim, AdamWConfig) and optim.implementation == "foreach"
    return bits + 1 if rounds_factor else bits


def _stalls(
    code: Code, what: str, key: str, beta: float, bits: int, remedy: str
) -> LossWarning | None:
    threshold = 2.0**-bits
    value = 1 - beta
    if value >= threshold:
        return None
    most = math.floor((1 - threshold) * 1e6) / 1e6
    return _warning(
        code,
        f"1 - {key} is {value:.2g}, below 2^-{bits} = {threshold:.2g}: the {what}, rounded to "
        "nearest, can grow but does not follow gradients that shrink",
        value,
        threshold,
        remedy.format(most=f"{most:g}"),
    )


def _eps_is_zero(arithmetic: Arithmetic, train: TrainConfig) -> LossWarning | None:
    """Half of the smallest positive number of the dtype rounds to 0."""
    name = _name(arithmetic.eps_dtype)
    info = torch.finfo(arithmetic.eps_dtype)
    threshold = info.smallest_normal * info.eps / 2
    if train.eps > threshold:
        return None
    return _warning(
        "eps_is_zero",
        f"eps is {train.eps:.2g}, at most {threshold:.2g}: it is 0 in {name}, and the first update "
        "of a weight without gradients 0 / 0",
        train.eps,
        threshold,
        "a larger train.eps, as 1e-8",
    )


def _below(values: list[float], threshold: float) -> tuple[float, str] | None:
    """The largest of a schedule's values, or that of its steps below the threshold, and when.

    None unless the values below the threshold are a tenth of the sum of all.
    """
    total, largest = sum(values), max(values)
    lost = [value for value in values if value < threshold]
    if total == 0 or sum(lost) < LEAST_SHARE * total:
        return None
    if largest < threshold:
        return largest, " at most"
    return max(lost), f" and less in {len(lost) / len(values):.0%} of the steps"


def _warning(code: Code, claim: str, value: float, threshold: float, remedy: str) -> LossWarning:
    return LossWarning(
        code=code,
        message=f"{code}: {claim}; remedy: {remedy}",
        value=value,
        threshold=threshold,
        remedy=remedy,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
