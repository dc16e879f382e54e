"""The optimizers and the schedule. Which parameters decay is decided here, alike for every arm."""

from collections.abc import Iterable

import torch
from torch import nn

from precexp.config import AdamWConfig, AnyPrecisionConfig, OptimConfig, TrainConfig, UserError
from precexp.optim.anyprecision import AnyPrecisionAdamW
from precexp.optim.schedule import lr_at
from precexp.precision import torch_dtype

__all__ = ["AnyPrecisionAdamW", "build_optimizer", "lr_at", "promised_states"]

FUSED_DEVICES = {"cpu", "cuda"}  # where torch has a fused AdamW, of the devices that precexp uses


def build_optimizer(
    params: Iterable[nn.Parameter], config: OptimConfig, train: TrainConfig, *, seed: int = 0
) -> torch.optim.Optimizer:
    """The optimizer over two groups: what decays (matrices, embeddings too), then what does not.

    Biases and norm gains do not decay. `seed` is that of random rounding. UserError where an
    implementation asked for cannot be had.
    """
    params = [param for param in params if param.requires_grad]
    groups: list[dict[str, list[nn.Parameter] | float]] = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    match config:
        case AnyPrecisionConfig():
            return AnyPrecisionAdamW(
                groups,
                lr=train.lr,
                betas=(train.beta1, train.beta2),
                eps=train.eps,
                use_kahan_summation=config.use_kahan_summation,
                momentum_dtype=torch_dtype(config.momentum_dtype),
                variance_dtype=torch_dtype(config.variance_dtype),
                compensation_buffer_dtype=torch_dtype(config.compensation_dtype),
                mode=config.mode,
                rounding_seed=seed,
                implementation=config.implementation,
                stochastic_rounding=config.stochastic_rounding,
                decay=config.decay,
                weight_rounding=config.weight_rounding,
            )
        case AdamWConfig():
            devices = {param.device.type for param in params}
            return _build_adamw(groups, config, train, devices=devices)


def promised_states(config: OptimConfig, *, param_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each parameter-shaped state that the optimizer will have, by its name."""
    match config:
        case AnyPrecisionConfig():
            promised = {
                "exp_avg": torch_dtype(config.momentum_dtype),
                "exp_avg_sq": torch_dtype(config.variance_dtype),
            }
            if config.use_kahan_summation:
                packed = config.mode == "packed"
                promised["compensation"] = (
                    torch.int16 if packed else torch_dtype(config.compensation_dtype)
                )
            return promised
        case AdamWConfig():
            return {"exp_avg": param_dtype, "exp_avg_sq": param_dtype}


def _build_adamw(
    groups: list[dict[str, list[nn.Parameter] | float]],
    config: AdamWConfig,
    train: TrainConfig,
    *,
    devices: set[str],
) -> torch.optim.AdamW:
    # Asked here, because torch looks at the first step: too late to choose, too late to tell.
    fused_possible = devices <= FUSED_DEVICES
    if config.implementation == "fused" and not fused_possible:
        raise UserError(
            "optim.implementation: fused is not possible here, because torch has it for parameters "
            f"on {', '.join(sorted(FUSED_DEVICES))} alone; allowed: auto, foreach, loop"
        )
    fused = config.implementation in ("fused", "auto") and fused_possible
    return torch.optim.AdamW(
        groups,
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=fused,
        foreach=not fused and config.implementation != "loop",
    )
