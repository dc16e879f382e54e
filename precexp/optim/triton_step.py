"""The step on a GPU: one Triton kernel over a table of pointers, so one launch for all tensors.

The arithmetic and the random bits are those of native.c. 16-bit numbers are widened and rounded by
operations on integers: exact on a GPU, and right in Triton's interpreter too, whose own conversions
of bfloat16 are not.
"""

import contextlib
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from precexp.optim.kernel import BUFFERS, TABLE_ROW, Batch, BuildError, Form, Rates, to_device

# A program updates a chunk of one tensor, a tile at a time: 8 elements for each of its 128 threads,
# in bfloat16 128 bits. A chunk lies within a block of random bits, so it has one key.
CHUNK = 2**14
TILE = 2**10

_ALIGNMENT = 16  # of pointers, in bytes, for loads of 128 bits
_ROW = tl.constexpr(TABLE_ROW.itemsize // 8)  # words of 64 bits

_DTYPES = {
    None: None,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int16: tl.int16,
}


def adamw_(form: Form, batch: Batch, rates: Rates) -> None:
    """Updates the batch, all on one device, in place. The host waits for nothing."""
    device = batch.params[0].device
    random = batch.random_bits(device) if form.is_stochastic else {}
    table = batch.table(random)
    programs = -(-table["numel"] // CHUNK)
    table["first_program"] = np.cumsum(programs) - programs
    aligned = not any((table[name] % _ALIGNMENT).any() for name in BUFFERS)
    _launch(form, table, rates, int(programs.sum()), device, aligned=aligned)


def prepare(form: Form, device: torch.device) -> None:
    """Compiles the step of the form. Raises BuildError."""
    rates = Rates(beta1=0.0, beta2=0.0, eps=0.0, grad_multiplier=1.0)
    try:
        _launch(form, np.zeros(1, TABLE_ROW), rates, 0, device, aligned=True)
    except Exception as error:  # of Triton, of the compilers that it calls, of the driver
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BuildError(lines[-1]) from error


def _launch(
    form: Form,
    table: np.ndarray,
    rates: Rates,
    num_programs: int,
    device: torch.device,
    *,
    aligned: bool,
) -> None:
    words = to_device(table.view(np.int64), device)
    multiplier = rates.grad_multiplier
    given_as_tensor = isinstance(multiplier, Tensor)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        _adamw[(num_programs,)](
            words,
            words.view(torch.int32),
            len(table),
            1.0 if given_as_tensor else multiplier,
            multiplier.to(device, torch.float32) if given_as_tensor else None,
            1 - rates.beta1,
            1 - rates.beta2,
            rates.eps,
            **constants_of(form, aligned=aligned),
        )


def constants_of(form: Form, *, aligned: bool) -> dict[str, Any]:
    """What the kernel is compiled for. `aligned`: all pointers are multiples of 16 bytes."""
    return {
        **{
            f"{name}_dtype": _DTYPES[dtype]
            for name, dtype in zip(BUFFERS, form.dtypes, strict=True)
        },
        "stochastic_variance": form.stochastic_variance,
        "stochastic_remainder": form.stochastic_remainder,
        "decay_outside": form.decay_outside,
        "is_aligned": aligned,
        "chunk_size": CHUNK,
        "tile_size": TILE,
    }


@triton.jit(do_not_specialize=["num_tensors"])
def _adamw(
    words,
    halves,  # the same memory
    num_tensors,
    grad_multiplier,
    grad_multiplier_pointer,
    one_minus_beta1,
    one_minus_beta2,
    eps,
    param_dtype: tl.constexpr,
    grad_dtype: tl.constexpr,
    exp_avg_dtype: tl.constexpr,
    exp_avg_sq_dtype: tl.constexpr,
    compensation_dtype: tl.constexpr,
    stochastic_variance: tl.constexpr,
    stochastic_remainder: tl.constexpr,
    decay_outside: tl.constexpr,
    is_aligned: tl.constexpr,
    chunk_size: tl.constexpr,
    tile_size: tl.constexpr,
):
    # The tensor is the last whose first program is not after this one.
    program = tl.program_id(0)
    tensor = 0
    end = num_tensors
    while end - tensor > 1:
        middle = (tensor + end) // 2
        is_before = tl.load(halves + (middle * 2 * _ROW + 22)) <= program
        tensor = tl.where(is_before, middle, tensor)
        end = tl.where(is_before, end, middle)
    words += tensor * _ROW
    halves += tensor * 2 * _ROW

    params = _address(tl.load(words), param_dtype, is_aligned)
    grads = _address(tl.load(words + 1), grad_dtype, is_aligned)
    exp_avgs = _address(tl.load(words + 2), exp_avg_dtype, is_aligned)
    exp_avg_sqs = _address(tl.load(words + 3), exp_avg_sq_dtype, is_aligned)
    compensations = tl.load(words + 4)
    if compensation_dtype is not None:
        compensations = _address(compensations, compensation_dtype, is_aligned)
    random = _address(tl.load(words + 5), tl.int16, True)
    random_start = tl.load(words + 6)
    random_stride = tl.load(words + 7)
    numel = tl.load(words + 8)
    step_size = tl.load(halves + 18).to(tl.float32, bitcast=True)
    variance_scale = tl.load(halves + 19).to(tl.float32, bitcast=True)
    decay_rate = tl.load(halves + 20).to(tl.float32, bitcast=True)
    half = tl.load(halves + 21)
    if grad_multiplier_pointer is not None:
        grad_multiplier = tl.load(grad_multiplier_pointer)

    chunk = program - tl.load(halves + 22)
    offset = chunk.to(tl.int64) * chunk_size
    params += offset
    grads += offset
    exp_avgs += offset
    exp_avg_sqs += offset
    compensations += offset
    count = tl.minimum(numel - offset, chunk_size).to(tl.int32)
    place = random_start + (offset >> 16) * random_stride >> 48 & 0xFFF8
    for_remainders = random + tl.multiple_of(place + (offset & 0xFFFF), 8)
    for_variances = random + tl.multiple_of((place ^ 0x8000) + (offset & 0xFFFF), 8)
    num_full = count // tile_size * tile_size  # of these no lane is masked: a mask costs wide loads
    for start in range(0, num_full, tile_size):
        i = start + tl.arange(0, tile_size)
        _update(
            params + i, grads + i, exp_avgs + i, exp_avg_sqs + i, compensations + i, None,
            for_remainders + i, for_variances + i,
            grad_multiplier, step_size, variance_scale, decay_rate, half,
            one_minus_beta1, one_minus_beta2, eps,
            param_dtype, grad_dtype, exp_avg_dtype, exp_avg_sq_dtype, compensation_dtype,
            stochastic_variance, stochastic_remainder, decay_outside,
        )  # fmt: skip
    if num_full < count:
        i = num_full + tl.arange(0, tile_size)
        _update(
            params + i, grads + i, exp_avgs + i, exp_avg_sqs + i, compensations + i, i < count,
            for_remainders + i, for_variances + i,
            grad_multiplier, step_size, variance_scale, decay_rate, half,
            one_minus_beta1, one_minus_beta2, eps,
            param_dtype, grad_dtype, exp_avg_dtype, exp_avg_sq_dtype, compensation_dtype,
            stochastic_variance, stochastic_remainder, decay_outside,
        )  # fmt: skip


@triton.jit
def _update(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    compensations,
    mask,
    for_remainders,
    for_variances,
    grad_multiplier,
    step_size,
    variance_scale,
    decay_rate,
    half,
    one_minus_beta1,
    one_minus_beta2,
    eps,
    param_dtype: tl.constexpr,
    grad_dtype: tl.constexpr,
    exp_avg_dtype: tl.constexpr,
    exp_avg_sq_dtype: tl.constexpr,
    compensation_dtype: tl.constexpr,
    stochastic_variance: tl.constexpr,
    stochastic_remainder: tl.constexpr,
    decay_outside: tl.constexpr,
):
    """One AdamW update of the elements at the pointers."""
    param = _value(tl.load(params, mask), param_dtype)
    grad = _value(tl.load(grads, mask), grad_dtype)
    old_momentum = _value(tl.load(exp_avgs, mask), exp_avg_dtype)
    old_variance = _value(tl.load(exp_avg_sqs, mask), exp_avg_sq_dtype)
    weight = param
    if decay_outside:
        weight = _value(_rounded(weight * (1 - decay_rate), param_dtype, half), param_dtype)
    if compensation_dtype is not None:
        compensation = tl.load(compensations, mask)
        if compensation_dtype == tl.int16:
            # The word: 10 more bits of the weight, signed, and 6 more of the variance.
            word = compensation.to(tl.int32)
            weight = (_bits(weight) + (word & -64)).to(tl.float32, bitcast=True)
            more = (word & 63) << 10
            old_variance = (_bits(old_variance) | more).to(tl.float32, bitcast=True)
        else:
            weight += _value(compensation, compensation_dtype)

    g = grad * grad_multiplier
    momentum = old_momentum + one_minus_beta1 * (g - old_momentum)
    variance = old_variance + one_minus_beta2 * (g * g - old_variance)
    denominator = tl.sqrt(variance) * variance_scale + eps
    if not decay_outside:
        weight -= weight * decay_rate
    weight -= step_size * (momentum / denominator)

    tl.store(exp_avgs, _rounded(momentum, exp_avg_dtype, half), mask)
    for_remainder = half
    if stochastic_remainder:
        for_remainder = tl.load(for_remainders, mask).to(tl.int32) & 0xFFFF
    if compensation_dtype == tl.int16:
        is_nan = weight != weight
        is_nan_variance = variance != variance
        below = 32
        if stochastic_remainder:
            below = for_remainder >> 10
        master = tl.where(is_nan, 0x7FC00000, _bits(weight) + below)
        bits = tl.where(is_nan_variance, 0x7FC00000, _bits(variance) + 512)
        word = tl.where(is_nan, 0, master & 0xFFC0)
        word |= tl.where(is_nan_variance, 0, bits >> 10 & 63)
        tl.store(params, _upper(master + 0x8000), mask)
        tl.store(exp_avg_sqs, _upper(bits), mask)
        tl.store(compensations, word.to(tl.int16), mask)
    else:
        for_variance = half
        if stochastic_variance:
            for_variance = tl.load(for_variances, mask).to(tl.int32) & 0xFFFF
        rounded = _rounded(variance, exp_avg_sq_dtype, for_variance)
        tl.store(exp_avg_sqs, rounded, mask)
        if compensation_dtype is None:
            rounded = _rounded(weight, param_dtype, for_remainder)
            tl.store(params, rounded, mask)
        else:
            rounded = _rounded(weight, param_dtype, half)
            tl.store(params, rounded, mask)
            remainder = weight - _value(rounded, param_dtype)
            rounded = _rounded(remainder, compensation_dtype, for_remainder)
            tl.store(compensations, rounded, mask)


@triton.jit
def _address(word, dtype: tl.constexpr, is_aligned: tl.constexpr):
    """The word as a pointer to integers of the dtype's size."""
    if dtype == tl.float32:
        pointer = word.to(tl.pointer_type(tl.int32))
    else:
        pointer = word.to(tl.pointer_type(tl.int16))
    if is_aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _upper(bits):
    return (bits >> 16).to(tl.int16)


@triton.jit
def _value(stored, dtype: tl.constexpr):
    """What the loaded integers are as float32."""
    if dtype == tl.float32:
        value = stored.to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:
        value = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = stored.to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _rounded(x, dtype: tl.constexpr, below):
    """To the dtype, as an integer; a bfloat16 by what is added below its bits.

    Adding to the bits of a NaN could make it a zero: CUDA's is 0x7FFFFFFF.
    """
    if dtype == tl.float32:
        stored = _bits(x)
    elif dtype == tl.float16:
        stored = x.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        stored = _upper(tl.where(x != x, 0x7FC00000, _bits(x) + below))
    return stored
