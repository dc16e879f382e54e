"""The learning rate of a step, as Hugging Face's schedules with warm-up have it."""

import math

from precexp.config import TrainConfig


def lr_at(step: int, train: TrainConfig, *, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 1, in a run of `total_steps`.

    It equals transformers' get_*_schedule_with_warmup at index step - 1, so the first step of a
    warm-up has 0. A warm-up longer than the run never reaches `train.lr`.
    """
    assert step >= 1, step
    index = step - 1
    if index < train.warmup_steps:
        return train.lr * (index / train.warmup_steps)
    decay_steps = max(1, total_steps - train.warmup_steps)
    match train.schedule:
        case "linear":
            factor = max(0.0, (total_steps - index) / decay_steps)
        case "cosine":
            progress = (index - train.warmup_steps) / decay_steps
            factor = max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
        case "constant":
            factor = 1.0
    return train.lr * factor
