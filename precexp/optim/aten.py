"""The step in torch's own operations: on any device, for any layout, with bounded temporaries.

The same arithmetic as native.c, where there is no compiler; random bits are the same bit for bit.
"""

import torch
from torch import Tensor

from precexp.optim.kernel import Batch, Form, Rates

# Elements per pass. The temporaries are float32 or int32, so this bounds them: on a CPU they stay
# in its cache, on a GPU a pass is long enough to hide its launches.
_CPU_CHUNK = 2**16
_GPU_CHUNK = 2**24


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
                decay=batch.decays[index],
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
    decay: float,
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
        param.copy_(param.float() * decay)
    if form.is_packed:
        assert compensation is not None
        word = compensation.to(torch.int32)
        weight = (_bits(param.float()) + (word & ~63)).view(torch.float32)
        variance = (_bits(exp_avg_sq.float()) | (word & 63) << 10).view(torch.float32)
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
        weight.mul_(decay)
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
    """The 16 random bits of elements first to first + count, less 2^15: int16 `[count]`.

    A hash of two elements holds them: Wellons' lowbias32 with a second key between its rounds, as
    in native.c. int32 wraps like uint32; its shift to the right copies the sign, which the masks
    take off again.
    """
    key1, key2 = key & 0xFFFFFFFF, key >> 32
    x = torch.arange(first // 2, (first + count + 1) // 2, dtype=torch.int32, device=device)
    x ^= _signed(key1)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x += _signed(key2)
    x *= _signed(0x846CA68B)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x ^= _signed(0x80008000)
    return x.view(torch.int16)[first % 2 :][:count]  # little-endian: the even element's first


def _store(buffer: Tensor, values: Tensor, random: Tensor | None, form: Form) -> None:
    """Rounds the values into the buffer: to the nearest, or a bfloat16 by the random bits.

    The latter uses the values up.
    """
    if random is None:
        buffer.copy_(values)
        return
    is_nan = None if form.is_16_bit else values.isnan()  # as native.c, on why
    _bits(values).add_(random).add_(2**15)
    buffer.view(torch.int16).copy_(values.view(torch.int16)[1::2])  # little-endian: the upper half
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
    master += 32 if random is None else (random.to(torch.int32) + 2**15) >> 10
    word = (_bits(variance).add_(512) >> 10).bitwise_and_(63).bitwise_or_(master & 0xFFC0)
    compensation.copy_(word)  # the lower half
    master += 2**15
    param.view(torch.int16).copy_(weight.view(torch.int16)[1::2])
    exp_avg_sq.view(torch.int16).copy_(variance.view(torch.int16)[1::2])
    if is_nan is not None and is_nan_variance is not None:
        param.masked_fill_(is_nan, torch.nan)
        exp_avg_sq.masked_fill_(is_nan_variance, torch.nan)
        compensation.masked_fill_(is_nan | is_nan_variance, 0)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
