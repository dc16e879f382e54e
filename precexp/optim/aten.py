"""The step in torch's own operations: on any device, for any layout, with bounded temporaries.

The same arithmetic as native.c, where there is no compiler; random bits are the same bit for bit.
"""

from dataclasses import replace

import torch
from torch import Tensor

from precexp.optim.kernel import (
    BLOCK,
    Batch,
    Form,
    Rates,
    scaled,
    unpacked_variance,
    unpacked_weight,
)

# Elements per pass. The temporaries have 4 bytes each, so this bounds them: on a CPU they stay in
# its cache, on a GPU a pass is long enough to hide its launches.
_CPU_CHUNK = BLOCK
_GPU_CHUNK = 2**24


def adamw_(form: Form, batch: Batch, rates: Rates) -> None:
    """Updates the batch in place. The buffers of a parameter need not have one layout."""
    device = batch.params[0].device
    size = _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK
    random = {
        key: replace(bits, table=bits.table.to(torch.int32))
        for key, bits in (batch.random_bits(device) if form.is_stochastic else {}).items()
    }
    # Bias is corrected by the step size: after infinitely many steps there is none.
    last_step = torch.full((), torch.inf, device=device)
    for index, buffers in enumerate(batch.buffers()):
        flat = [tensor.reshape(-1) for tensor in buffers]
        numel = flat[0].numel()
        bits = random.get((batch.seeds[index], batch.steps[index]))
        for start in range(0, numel, size):
            parts = [tensor[start : start + size] for tensor in flat]
            elements = range(start, min(start + size, numel))
            _update(
                form,
                parts,
                rates,
                last_step,
                step_size=batch.step_sizes[index],
                variance_scale=batch.variance_scales[index],
                decay_rate=batch.decay_rates[index],
                for_remainder=bits.for_remainders(numel, elements)
                if bits and form.stochastic_remainder
                else None,
                for_variance=bits.for_variances(numel, elements)
                if bits and form.stochastic_variance
                else None,
            )
        for buffer, copy in zip(buffers, flat, strict=True):
            if not buffer.is_contiguous() and buffer is not buffers[1]:
                buffer.copy_(copy.view(buffer.shape))


def _update(
    form: Form,
    parts: list[Tensor],
    rates: Rates,
    last_step: Tensor,
    *,
    step_size: float,
    variance_scale: float,
    decay_rate: float,
    for_remainder: Tensor | None,
    for_variance: Tensor | None,
) -> None:
    """One AdamW update in float32, in place; every buffer is rounded to its own dtype once.

    By the random bits, int32, where there are any.

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
        weight = param.to(torch.float32, copy=compensation is not None)
        if compensation is not None:
            weight += compensation
        variance = exp_avg_sq.float()
    momentum = exp_avg.float()
    if not form.decay_outside:  # torch multiplies by 1 - rate, in float32 a few per cent off
        weight.add_(weight, alpha=-decay_rate)
    torch._fused_adamw_(  # type: ignore[attr-defined]
        [weight], [scaled(grad.float(), rates.grad_multiplier)], [momentum], [variance], [],
        [last_step], lr=step_size / variance_scale, beta1=rates.beta1, beta2=rates.beta2,
        weight_decay=0.0, eps=rates.eps / variance_scale, amsgrad=False, maximize=False,
    )  # fmt: skip
    exp_avg.copy_(momentum)
    if form.is_packed:
        _store_packed(parts, weight, variance, for_remainder, form)
        return
    _store(exp_avg_sq, variance, for_variance, form)
    if compensation is None:
        _store(param, weight, for_remainder, form)
    else:
        param.copy_(weight)
        _store(compensation, weight.sub_(param), for_remainder, form)


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
