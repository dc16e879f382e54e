"""One AdamW step over many tensors as one operator of torch, whoever carries it out.

`precexp::adamw_` is native.c on a CPU and a Triton kernel on CUDA. As an operator of torch it also
runs under fake tensors and dispatch modes, where a call with raw pointers would write through null.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

_MASK64 = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a step over tensors has to be compiled for: their dtypes and how it rounds."""

    param: torch.dtype
    grad: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    compensation: torch.dtype | None  # int16: the word of the packed form
    stochastic_variance: bool
    stochastic_remainder: (
        bool  # of the compensation, of a packed weight, or, without, of the weight
    )
    decay_outside: bool

    @property
    def is_packed(self) -> bool:
        return self.compensation is torch.int16

    @property
    def is_16_bit(self) -> bool:
        """Whether all buffers hold bfloat16 or words."""
        return set(self.dtypes) <= {torch.bfloat16, torch.int16, None}

    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        return (self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.compensation)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What is the same for all tensors of a call."""

    beta1: float
    beta2: float
    eps: float
    grad_multiplier: float


@dataclass(kw_only=True)
class Batch:
    """Tensors of one form and device, with the numbers that differ between them; all lists alike.

    A tensor's buffers have one shape and one dense layout. `compensations` is empty without any.
    """

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    compensations: list[Tensor] = field(default_factory=list)
    step_sizes: list[float] = field(default_factory=list)  # lr / (1 - beta1^step)
    variance_scales: list[float] = field(default_factory=list)  # 1 / sqrt(1 - beta2^step)
    decay_rates: list[float] = field(default_factory=list)  # lr * weight_decay
    keys: list[int] = field(default_factory=list)  # of the random bits, in [0, 2^63)

    def buffers(self) -> Iterator[tuple[Tensor, ...]]:
        """The tensors of each parameter, in the order of the lists."""
        lists = [self.params, self.grads, self.exp_avgs, self.exp_avg_sqs]
        if self.compensations:
            lists.append(self.compensations)
        return zip(*lists, strict=True)


def unpacked_weight(weight: Tensor, words: Tensor) -> Tensor:
    """The float32 weights with the 10 bits more, signed, that their int16 words have."""
    return (weight.float().view(torch.int32) + (words.to(torch.int32) & ~63)).view(torch.float32)


def unpacked_variance(variance: Tensor, words: Tensor) -> Tensor:
    """The float32 variances with the 6 bits more that their int16 words have."""
    more = (words.to(torch.int32) & 63) << 10
    return (variance.float().view(torch.int32) | more).view(torch.float32)


def random_key(seed: int, step: int, numel: int) -> int:
    """The key of a tensor's random bits in a step: Steele et al.'s splitmix64 of the three.

    It depends on nothing else, so the bits are the same after a resume and in any grouping.
    """
    state = 0
    for value in (seed, step, numel):
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return state >> 1  # an operator's integers are signed


def adamw_(form: Form, batch: Batch, rates: Rates) -> None:
    """Updates the batch in place by the operator. The caller has seen that it can be had."""
    torch.ops.precexp.adamw_(
        batch.params,
        batch.grads,
        batch.exp_avgs,
        batch.exp_avg_sqs,
        batch.compensations,
        batch.step_sizes,
        batch.variance_scales,
        batch.decay_rates,
        batch.keys,
        rates.beta1,
        rates.beta2,
        rates.eps,
        rates.grad_multiplier,
        form.stochastic_variance,
        form.stochastic_remainder,
        form.decay_outside,
    )


_LIBRARY = torch.library.Library("precexp", "DEF")
_LIBRARY.define(
    "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] compensations, float[] step_sizes, float[] variance_scales, float[] decay_rates, "
    "int[] keys, float beta1, float beta2, float eps, float grad_multiplier, "
    "bool stochastic_variance, bool stochastic_remainder, bool decay_outside) -> ()"
)


def _register(dispatch_key: str, carry_out: Callable[[Form, Batch, Rates], None]) -> None:
    """Makes `carry_out` the operator on a device."""

    def operator(
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        compensations: list[Tensor],
        step_sizes: list[float],
        variance_scales: list[float],
        decay_rates: list[float],
        keys: list[int],
        beta1: float,
        beta2: float,
        eps: float,
        grad_multiplier: float,
        stochastic_variance: bool,
        stochastic_remainder: bool,
        decay_outside: bool,
    ) -> None:
        form = Form(
            param=params[0].dtype,
            grad=grads[0].dtype,
            exp_avg=exp_avgs[0].dtype,
            exp_avg_sq=exp_avg_sqs[0].dtype,
            compensation=compensations[0].dtype if compensations else None,
            stochastic_variance=stochastic_variance,
            stochastic_remainder=stochastic_remainder,
            decay_outside=decay_outside,
        )
        batch = Batch(
            params=params,
            grads=grads,
            exp_avgs=exp_avgs,
            exp_avg_sqs=exp_avg_sqs,
            compensations=compensations,
            step_sizes=step_sizes,
            variance_scales=variance_scales,
            decay_rates=decay_rates,
            keys=keys,
        )
        carry_out(
            form,
            batch,
            Rates(beta1=beta1, beta2=beta2, eps=eps, grad_multiplier=grad_multiplier),
        )

    _LIBRARY.impl("adamw_", operator, dispatch_key)


def _on_cpu(form: Form, batch: Batch, rates: Rates) -> None:
    from precexp.optim import native

    native.adamw_(form, batch, rates)


_register("CPU", _on_cpu)
torch.library.register_fake("precexp::adamw_", lambda *_: None, lib=_LIBRARY)
