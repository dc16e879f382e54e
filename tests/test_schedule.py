"""The schedules are transformers', step for step and bit for bit."""

import dataclasses

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from precexp.config import TrainConfig
from precexp.optim import lr_at

TRAIN = TrainConfig(
    max_steps=40,
    epochs=None,
    batch_size=2,
    eval_batch_size=2,
    grad_accumulation=1,
    lr=2e-4,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    weight_decay=0.1,
    schedule="linear",
    warmup_steps=7,
    max_grad_norm=1.0,
    log_every=1,
    eval_every=1,
    eval_batches=None,
    checkpoint_every=None,
    keep_last=2,
    probe_every=None,
)


def transformers_lrs(train: TrainConfig, total_steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=train.lr)
    match train.schedule:
        case "linear":
            scheduler = get_linear_schedule_with_warmup(optimizer, train.warmup_steps, total_steps)
        case "cosine":
            scheduler = get_cosine_schedule_with_warmup(optimizer, train.warmup_steps, total_steps)
        case "constant":
            scheduler = get_constant_schedule_with_warmup(optimizer, train.warmup_steps)
    lrs = []
    for _ in range(total_steps):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return lrs


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 7, 40, 55])
def test_a_whole_run_has_the_learning_rates_of_transformers(schedule, warmup_steps):
    train = dataclasses.replace(TRAIN, schedule=schedule, warmup_steps=warmup_steps)
    ours = [lr_at(step, train, total_steps=40) for step in range(1, 41)]
    assert ours == transformers_lrs(train, 40)


def test_a_warm_up_starts_at_zero_and_ends_at_the_peak():
    assert lr_at(1, TRAIN, total_steps=40) == 0
    assert lr_at(8, TRAIN, total_steps=40) == TRAIN.lr


def test_a_warm_up_longer_than_the_run_never_reaches_the_peak():
    train = dataclasses.replace(TRAIN, warmup_steps=55)
    lrs = [lr_at(step, train, total_steps=40) for step in range(1, 41)]
    assert lrs == sorted(lrs)
    assert lrs[-1] == pytest.approx(TRAIN.lr * 39 / 55, rel=1e-15)
