"""The published AnyPrecisionAdamW, operation by operation: for comparison, not for use.

The order and the roundings are those of torchdistx's optimizer, which `golden/` in the tests fixes
bit for bit on x86 CPUs. It loses weight decay in bf16 at usual settings, and its bf16 variance
cannot follow gradients that shrink at beta2 = 0.999 (docs/numerics.md).
"""

from collections.abc import Mapping

from torch import Tensor
from torch._guards import detect_fake_mode


def adamw_(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], group: Mapping) -> None:
    """Updates a parameter and its states in place; `step` counts this step already.

    Never fuse or compile this: each operation rounds to the dtype of what it writes.
    """
    beta1, beta2 = group["betas"]
    step, momentum, variance = state["step"], state["exp_avg"], state["exp_avg_sq"]
    if group["weight_decay"]:
        param.mul_(1 - group["lr"] * group["weight_decay"])
    momentum.mul_(beta1).add_(grad, alpha=1 - beta1)
    variance.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    # Of the step as a float32 tensor: Python's floats would correct by other bits.
    step_size = group["lr"] / (1 - beta1**step)
    factor = -step_size if detect_fake_mode(step) is None else 0.0  # a fake step has no value
    denominator = variance.sqrt() / (1 - beta2**step) ** 0.5
    denominator.add_(group["eps"])
    if not group["use_kahan_summation"]:
        param.addcdiv_(momentum, denominator, value=factor)  # type: ignore[arg-type]
        return
    compensation = state["compensation"]
    compensation.addcdiv_(momentum, denominator, value=factor)  # type: ignore[arg-type]
    before = param.clone()
    param.add_(compensation)
    compensation.add_(before.sub_(param))
