"""One AdamW step over many tensors as one operator of torch, whoever carries it out.

`precexp::adamw_` is native.c on a CPU and a Triton kernel on CUDA. As an operator of torch it also
runs under fake tensors and dispatch modes, where a call with raw pointers would write through null.
"""

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

BUFFERS = ("param", "grad", "exp_avg", "exp_avg_sq", "compensation")

BLOCK = 2**16  # elements whose random bits are independent

# A tensor as the kernels read it.
TABLE_ROW = np.dtype(
    [
        *((name, np.uint64) for name in (*BUFFERS, "random")),  # addresses
        *((name, np.uint64) for name in ("random_start", "random_stride")),
        ("numel", np.int64),
        *((name, np.float32) for name in ("step_size", "variance_scale", "decay_rate")),
        ("half", np.uint32),  # native.c says of what
        ("first_program", np.uint32),  # of those on a GPU that update the tensor
    ],
    align=True,
)


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
    def is_stochastic(self) -> bool:
        return self.stochastic_variance or self.stochastic_remainder

    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        return (self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.compensation)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What is the same for all tensors of a call."""

    beta1: float
    beta2: float
    eps: float
    grad_multiplier: float | Tensor  # a tensor: 0-dim, on the parameters' device


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
    seeds: list[int] = field(default_factory=list)  # of the random bits, in [0, 2^63)
    steps: list[int] = field(default_factory=list)  # the number of this one

    def buffers(self) -> Iterator[tuple[Tensor, ...]]:
        """The tensors of each parameter, in the order of the lists."""
        lists = [self.params, self.grads, self.exp_avgs, self.exp_avg_sqs]
        if self.compensations:
            lists.append(self.compensations)
        return zip(*lists, strict=True)

    def random_bits(self, device: torch.device) -> dict[tuple[int, int], "RandomBits"]:
        """Those of the steps in the batch, on the device, by seed and step."""
        return {
            (seed, step): RandomBits.of(seed, step, device)
            for seed, step in set(zip(self.seeds, self.steps, strict=True))
        }

    def table(self, random: Mapping[tuple[int, int], "RandomBits"]) -> np.ndarray:
        """The batch as rows of TABLE_ROW, `[num_tensors]`.

        They point into the random bits, if there are any: keep those until the rows have been used.
        """
        table = np.zeros(len(self.params), TABLE_ROW)
        lists = [self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.compensations]
        for name, tensors in zip(BUFFERS, lists, strict=True):
            if tensors:
                table[name] = [tensor.data_ptr() for tensor in tensors]
        table["numel"] = [param.numel() for param in self.params]
        table["step_size"] = self.step_sizes
        table["variance_scale"] = self.variance_scales
        table["decay_rate"] = self.decay_rates
        table["half"] = 0x7FFF + np.array(self.steps) % 2
        if random:
            bits = [random[key] for key in zip(self.seeds, self.steps, strict=True)]
            table["random"] = [each.table.data_ptr() for each in bits]
            table["random_stride"] = [each.stride for each in bits]
            factors = np.array([each.numel_factor for each in bits], np.uint64)
            table["random_start"] = factors * table["numel"].astype(np.uint64)
        return table


@dataclass(frozen=True, kw_only=True, eq=False)
class RandomBits:
    """The random bits of a step, 16 for an element: a function of seed, step, numel and element.

    They depend on nothing else, so a resumed run has the same ones, in any grouping. Those of a
    block of 2^16 elements are the table's from `place(numel, block)` on: within a block they are
    independent; two elements of different blocks share theirs in a step with probability 2^-13.
    The bits of a variance are half a block from those of the weight's remainder.
    """

    table: Tensor  # uint16 [2^17], the same 2^16 twice
    numel_factor: int
    stride: int

    @classmethod
    def of(cls, seed: int, step: int, device: torch.device) -> "RandomBits":
        words = _random_words(seed, step)
        bits = words[:-2].view(np.uint16)
        return cls(
            table=to_device(np.concatenate([bits, bits]), device),
            numel_factor=int(words[-2]),
            stride=int(words[-1]),
        )

    def place(self, numel: int, block: int) -> int:
        """In [0, 2^16), a multiple of 8, so that a GPU loads the bits of 8 elements at once."""
        return (self.numel_factor * numel + self.stride * block) % 2**64 >> 48 & ~7

    def for_remainders(self, numel: int, elements: range) -> Tensor:
        """Of the table's dtype, `[len(elements)]`: those of a tensor's elements."""
        return self._from(numel, elements, distance=0)

    def for_variances(self, numel: int, elements: range) -> Tensor:
        """As `for_remainders`, for the variances."""
        return self._from(numel, elements, distance=BLOCK // 2)

    def _from(self, numel: int, elements: range, *, distance: int) -> Tensor:
        pieces = []
        for block in range(elements.start // BLOCK, -(-elements.stop // BLOCK)):
            own = range(max(elements.start, block * BLOCK), min(elements.stop, (block + 1) * BLOCK))
            first = (self.place(numel, block) ^ distance) + own.start % BLOCK
            pieces.append(self.table[first : first + len(own)])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@functools.lru_cache(maxsize=4)
def _random_words(seed: int, step: int) -> np.ndarray:
    """uint64 `[2^14 + 2]` of Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").

    NumPy keeps the output of its bit generators the same over its versions.
    """
    return np.random.Philox(key=[seed, step]).random_raw(2**14 + 2)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor there; the host does not wait for the copy to a GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def scaled(grad: Tensor, multiplier: float | Tensor) -> Tensor:
    """The gradient times the multiplier, itself where that is the number 1."""
    if not isinstance(multiplier, Tensor) and multiplier == 1:
        return grad
    return grad * multiplier


def unpacked_weight(weight: Tensor, words: Tensor) -> Tensor:
    """The float32 weights with the 10 bits more, signed, that their int16 words have."""
    return (weight.float().view(torch.int32) + (words.to(torch.int32) & ~63)).view(torch.float32)


def unpacked_variance(variance: Tensor, words: Tensor) -> Tensor:
    """The float32 variances with the 6 bits more that their int16 words have."""
    more = (words.to(torch.int32) & 63) << 10
    return (variance.float().view(torch.int32) | more).view(torch.float32)


class BuildError(Exception):
    """Why a step cannot be compiled here: one line."""


def implementation_on(device: torch.device) -> Literal["native", "triton"] | None:
    """Who carries the operator out there, if it can be compiled; None on devices without any."""
    match device.type:
        case "cuda":
            return "triton"
        case "cpu":
            return "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "native"
    return None


@functools.cache
def problem_with(form: Form, device: torch.device) -> str | None:
    """Why the form has no compiled step on the device, told once; None if it has one."""
    try:
        _module_on(device).prepare(form, device)
    except BuildError as error:
        _tell(f"no {implementation_on(device)} optimizer step ({error})")
        return str(error)
    return None


def _module_on(device: torch.device) -> ModuleType:
    """The module of the implementation. Raises BuildError."""
    if implementation_on(device) == "native":
        from precexp.optim import native

        return native
    try:
        from precexp.optim import triton_step
    except ImportError as error:
        raise BuildError(str(error)) from None
    return triton_step


@functools.cache
def _tell(problem: str) -> None:
    print(
        f"precexp: {problem}; taking torch's operations, which are several times slower",
        file=sys.stderr,
    )


def adamw_(form: Form, batch: Batch, rates: Rates) -> None:
    """Updates the batch in place by the operator. The caller has seen that it can be had."""
    multiplier = rates.grad_multiplier
    given_as_tensor = isinstance(multiplier, Tensor)
    torch.ops.precexp.adamw_(
        batch.params,
        batch.grads,
        batch.exp_avgs,
        batch.exp_avg_sqs,
        batch.compensations,
        batch.step_sizes,
        batch.variance_scales,
        batch.decay_rates,
        batch.seeds,
        batch.steps,
        rates.beta1,
        rates.beta2,
        rates.eps,
        1.0 if given_as_tensor else multiplier,
        multiplier if given_as_tensor else None,
        form.stochastic_variance,
        form.stochastic_remainder,
        form.decay_outside,
    )


_LIBRARY = torch.library.Library("precexp", "DEF")
_LIBRARY.define(
    "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] compensations, float[] step_sizes, float[] variance_scales, float[] decay_rates, "
    "int[] seeds, int[] steps, float beta1, float beta2, float eps, float grad_multiplier, "
    "Tensor? grad_multiplier_tensor, bool stochastic_variance, bool stochastic_remainder, "
    "bool decay_outside) -> ()"
)


def _adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    compensations: list[Tensor],
    step_sizes: list[float],
    variance_scales: list[float],
    decay_rates: list[float],
    seeds: list[int],
    steps: list[int],
    beta1: float,
    beta2: float,
    eps: float,
    grad_multiplier: float,
    grad_multiplier_tensor: Tensor | None,
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
        seeds=seeds,
        steps=steps,
    )
    multiplier = grad_multiplier if grad_multiplier_tensor is None else grad_multiplier_tensor
    rates = Rates(beta1=beta1, beta2=beta2, eps=eps, grad_multiplier=multiplier)
    _module_on(params[0].device).adamw_(form, batch, rates)


_LIBRARY.impl("adamw_", _adamw, "CPU")
_LIBRARY.impl("adamw_", _adamw, "CUDA")
torch.library.register_fake("precexp::adamw_", lambda *_: None, lib=_LIBRARY)
