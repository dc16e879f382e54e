"""How an arm stores a step: how many bits of each thing, and which roundings are random.

A number with b significand bits in [2^e, 2^(e+1)) has neighbours 2^(e+1-b) away, so what is added
to it and is below 2^(e-b) is lost where it is rounded to nearest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from precexp.config import AdamWConfig, AnyPrecisionConfig, OptimConfig
from precexp.optim import kernel
from precexp.optim.anyprecision import SAFE_BETA2
from precexp.precision import torch_dtype

SIGNIFICAND_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
PACKED_WEIGHT_BITS = 18  # the 8 of bfloat16, and 10 of the word
PACKED_VARIANCE_BITS = 14  # and 6 of the word


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The roundings of an optimizer's step over parameters of one dtype."""

    weight_dtype: torch.dtype
    weight_bits: int
    has_compensation: bool
    master_bits: int  # of weight + compensation where that is largest, counted from the weight's
    master_is_random: bool
    decay_outside: bool  # the stored weight is multiplied and rounded, before the update
    momentum_bits: int
    variance_bits: int
    variance_is_random: bool
    eps_dtype: torch.dtype  # of the root of the variance that eps is added to


def arithmetic_of(config: OptimConfig, *, param_dtype: torch.dtype, beta2: float) -> Arithmetic:
    """Of the optimizer that the config builds over parameters of the dtype."""
    bits = SIGNIFICAND_BITS[param_dtype]
    match config:
        case AdamWConfig():
            # torch's fused kernel computes in float32 and rounds each tensor once.
            fused = config.implementation in ("auto", "fused")
            return Arithmetic(
                weight_dtype=param_dtype,
                weight_bits=bits,
                has_compensation=False,
                master_bits=bits,
                master_is_random=False,
                decay_outside=not fused,
                momentum_bits=bits,
                variance_bits=bits,
                variance_is_random=False,
                eps_dtype=torch.float32 if fused else param_dtype,
            )
        case AnyPrecisionConfig():
            return _of_anyprecision(config, param_dtype, beta2)


def _of_anyprecision(
    config: AnyPrecisionConfig, param_dtype: torch.dtype, beta2: float
) -> Arithmetic:
    bits = SIGNIFICAND_BITS[param_dtype]
    kahan = config.use_kahan_summation
    published = config.mode == "published"
    packed = config.mode == "packed" and kahan
    compensation, variance = (
        torch_dtype(name) for name in (config.compensation_dtype, config.variance_dtype)
    )
    asked = config.stochastic_rounding
    master_bits = bits
    if kahan:
        # A remainder is at most half of what the weight's neighbours are apart.
        master_bits = PACKED_WEIGHT_BITS if packed else bits + 1 + SIGNIFICAND_BITS[compensation]
        rounds_randomly = bool(asked) and (packed or compensation == torch.bfloat16)
    else:
        rounds_randomly = config.weight_rounding == "stochastic" and param_dtype == torch.bfloat16
    return Arithmetic(
        weight_dtype=param_dtype,
        weight_bits=bits,
        has_compensation=kahan,
        master_bits=master_bits,
        master_is_random=rounds_randomly and not published,
        decay_outside=published or config.decay == "outside",
        momentum_bits=SIGNIFICAND_BITS[torch_dtype(config.momentum_dtype)],
        variance_bits=PACKED_VARIANCE_BITS if packed else SIGNIFICAND_BITS[variance],
        variance_is_random=(
            variance == torch.bfloat16
            and not (packed or published)
            and (beta2 > SAFE_BETA2 if asked == "auto" else asked)
        ),
        eps_dtype=variance if published else torch.float32,
    )


def true_weight(weight: Tensor, compensation: Tensor | None) -> Tensor:
    """Weight + compensation in float64; an int16 one is the packed form's word."""
    if compensation is None:
        return weight.double()
    if compensation.dtype is torch.int16:
        return kernel.unpacked_weight(weight, compensation).double()
    return weight.double() + compensation.double()


def true_variance(variance: Tensor, compensation: Tensor | None) -> Tensor:
    """The stored second moment in float32, with what a packed word has of it."""
    if compensation is not None and compensation.dtype is torch.int16:
        return kernel.unpacked_variance(variance, compensation)
    return variance.float()
