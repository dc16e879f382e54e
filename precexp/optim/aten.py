"""The step in torch's own operations: on any device, for any layout, with bounded temporaries.

The same arithmetic as native.c, where there is no compiler; random bits are the same bit for bit.
"""

import functools

import torch
from torch import Tensor

from precexp.optim.kernel import Batch, Form, Rates, unpacked_variance, unpacked_weight

# Elements per pass. The temporaries are float32 or int32, so this bounds them: on a CPU they stay
# in its cache, on a GPU a pass is long enough to hide its launches.
_CPU_CHUNK = 2**16
_GPU_CHUNK = 2**24

_BLOCK = 2**16  # elements whose random bits have one key


def adamw_(form: Form, batch: Batch, rates: Rates) -> None:
    """Updates the batch in place. The buffers of a parameter need not have one layout."""
    for index, buffers in enumerate(batch.buffers()):
        flat = [tensor.reshape(-1) for tensor in buffers]
        size = _CPU_CHUNK if buffers[0].device.type == "cpu" else _GPU_CHUNK
        for start in range(0, flat[0].numel(), size):
            _update(
                form,
                [tensor[start : start + size] for tensor in flat],
                rates,
                step_size=batch.step_sizes[index],
                variance_scale=batch.variance_scales[index],
                decay_rate=batch.decay_rates[index],
                first=start,
                key=batch.keys[index],
            )
        for buffer, copy in zip(buffers, flat, strict=True):
            if not buffer.is_contiguous() and buffer is not buffers[1]:
                buffer.copy_(copy.view(buffer.shape))


def _update(
    form: Form,
    parts: list[Tensor],
    rates: Rates,
    *,
    step_size: float,
    variance_scale: float,
    decay_rate: float,
    first: int,
    key: int,
) -> None:
    """One AdamW update in float32, in place; every buffer is rounded to its own dtype once.

    `first` is the place of the parts' first element in their tensors.

    `.float()` of a float32 tensor is that tensor: then the arithmetic happens in place and the
    `copy_` that stores the result does nothing.
    """
    param, grad, exp_avg, exp_avg_sq, *rest = parts
    compensation = rest[0] if rest else None
    if form.decay_outside:
        param.copy_(param.float() * (1 - decay_rate))
    if form.is_packed:
        assert compensation is not None
        weight = unpacked_weight(param, compensation)
        variance = unpacked_variance(exp_avg_sq, compensation)
    else:
        weight = param.float() if compensation is None else param.float() + compensation
        variance = exp_avg_sq.float()

    grad = grad.float()
    if rates.grad_multiplier != 1:
        grad = grad * rates.grad_multiplier
    momentum = exp_avg.float().lerp_(grad, 1 - rates.beta1)
    variance = variance.mul_(rates.beta2).addcmul_(grad, grad, value=1 - rates.beta2)
    exp_avg.copy_(momentum)
    denominator = variance.sqrt().mul_(variance_scale).add_(rates.eps)
    if not form.decay_outside:
        weight.add_(weight, alpha=-decay_rate)
    weight.addcdiv_(momentum, denominator, value=-step_size)

    for_remainder = for_variance = None
    if form.stochastic_remainder:
        for_remainder = random_bits(first, param.numel(), key, param.device)
    if form.stochastic_variance:
        swapped = (key & 0xFFFFFFFF) << 32 | key >> 32
        for_variance = random_bits(first, param.numel(), swapped, param.device)
    if form.is_packed:
        _store_packed(parts, weight, variance, for_remainder, form)
        return
    _store(exp_avg_sq, variance, for_variance, form)
    if compensation is None:
        _store(param, weight, for_remainder, form)
    else:
        param.copy_(weight)
        _store(compensation, weight.sub_(param), for_remainder, form)


def random_bits(first: int, count: int, key: int, device: torch.device) -> Tensor:
    """The 16 random bits of elements first to first + count, as int32 `[count]`.

    A word holds those of two elements. It is made as native.c says, in int32, which wraps like
    uint32; its shift to the right copies the sign, which the masks take off again.
    """
    blocks = range(first // _BLOCK, (first + count - 1) // _BLOCK + 1)
    begin = first - blocks.start * _BLOCK
    if len(blocks) == 1:
        places = slice(begin // 2, (begin + count + 1) // 2)
        x = _first_round(device)[places] + _signed(_block_key(blocks.start, key))
        begin %= 2
    else:
        keys = [_signed(_block_key(block, key)) for block in blocks]
        x = _first_round(device) + torch.tensor(keys, dtype=torch.int32, device=device)[:, None]
    _last_rounds(x)
    halves = x.view(torch.uint16).view(-1)  # little-endian: the even element's first
    return halves[begin : begin + count].to(torch.int32)


@functools.cache
def _first_round(device: torch.device) -> Tensor:
    """Of the places in a block, int32 `[2^15]`."""
    return torch.arange(_BLOCK // 2, dtype=torch.int32, device=device).mul_(0x7FEB352D)


def _last_rounds(x: Tensor) -> Tensor:
    """In place."""
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _signed(0x846CA68B)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _block_key(block: int, key: int) -> int:
    x = (block ^ key) & 0xFFFFFFFF
    x ^= x >> 16
    x = (x * 0x7FEB352D + (key >> 32)) & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def _store(buffer: Tensor, values: Tensor, random: Tensor | None, form: Form) -> None:
    """Rounds the values into the buffer: to the nearest, or a bfloat16 by the random bits.

    The latter uses the values up.
    """
    if random is None:
        buffer.copy_(values)
        return
    is_nan = None if form.is_16_bit else values.isnan()  # as native.c, on why
    upper = _bits(values).add_(random).bitwise_right_shift_(16)
    buffer.view(torch.int16).copy_(upper)
    if is_nan is not None:
        buffer.masked_fill_(is_nan, torch.nan)


def _store_packed(
    parts: list[Tensor], weight: Tensor, variance: Tensor, random: Tensor | None, form: Form
) -> None:
    """Stores 26 bits of the weight and 22 of the variance in bfloat16, bfloat16 and int16."""
    param, _, _, exp_avg_sq, compensation = parts
    is_nan = is_nan_variance = None
    if not form.is_16_bit:
        is_nan, is_nan_variance = weight.isnan(), variance.isnan()
    master = _bits(weight)
    master += 32 if random is None else random >> 10
    word = (_bits(variance).add_(512) >> 10).bitwise_and_(63).bitwise_or_(master & 0xFFC0)
    compensation.copy_(word)  # the lower half
    master += 2**15
    param.view(torch.int16).copy_(master.bitwise_right_shift_(16))
    exp_avg_sq.view(torch.int16).copy_(_bits(variance).bitwise_right_shift_(16))
    if is_nan is not None and is_nan_variance is not None:
        param.masked_fill_(is_nan, torch.nan)
        exp_avg_sq.masked_fill_(is_nan_variance, torch.nan)
        compensation.masked_fill_(is_nan | is_nan_variance, 0)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
