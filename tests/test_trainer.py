"""transformers' Trainer beside us: one training on both sides, and our optimizer inside it."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from precexp import run as running
from precexp.bench.__main__ import main
from precexp.cli import compose
from precexp.config import TrainConfig
from precexp.model import build_model
from precexp.optim import AnyPrecisionAdamW, build_optimizer, lr_at
from precexp.precision import build_precision
from precexp.train import training_step
from tests.micro import MICRO

README = Path(__file__).parents[1] / "README.md"
STEPS = 5
IDS = torch.arange(2 * 16).view(2, 16).repeat(STEPS, 1)  # batches of two blocks


@pytest.fixture(autouse=True)
def _no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a run takes longer than a micro run; tests/test_memory.py has it."""
    monkeypatch.setattr(running, "planned_memory", lambda *_: None)
    monkeypatch.setattr(running, "measured_memory", lambda *_, **__: None)


def bench(cache_dir: Path, *arguments: str) -> int:
    micro = [text for text in MICRO if "train.eval" not in text and "max_steps" not in text]
    return main(
        ["trainer", "--rounds=1", "--steps=4", *micro, f"data.cache_dir={cache_dir}",
         "train.lr=1e-2", *arguments]
    )  # fmt: skip


def test_both_sides_of_the_benchmark_train_alike(cache_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "trainer.json"
    assert bench(cache_dir, "train.max_grad_norm=0.5", f"--output={output}") == 0
    results = json.loads(output.read_text())["results"]
    assert [each["precision"] for each in results] == ["fp32", "bf16_mixed"]
    for each in results:
        assert each["optim"] == "adamw"
        assert each["ratio"] == each["runner"][0] / each["trainer"][0] > 0
        # Seen equal to the bit on a CPU; what is allowed is a few roundings of float32.
        assert each["loss_difference"] < 3e-6
        assert each["grad_norm_difference"] < 3e-6
        assert 6 < each["final_loss"] < 7.6  # ln 2,048 is 7.62: it learned something
    assert len({each["final_loss"] for each in results}) == 2


def test_pure_bf16_trains_alike_but_for_the_gradient_norm(cache_dir: Path, tmp_path: Path) -> None:
    """Trainer's norm of bf16 gradients is bf16, ours float32: so nothing may be clipped by it."""
    output = tmp_path / "trainer.json"
    options = ("precision=bf16_pure", "optim=anyprecision", "train.grad_accumulation=2")
    assert bench(cache_dir, *options, "train.max_grad_norm=null", f"--output={output}") == 0
    (result,) = json.loads(output.read_text())["results"]
    assert result["loss_difference"] < 3e-6
    assert 0 < result["grad_norm_difference"] < 2**-8


def test_another_order_of_the_batches_would_show(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precexp.bench import trainer

    real, output = trainer.Batches, tmp_path / "trainer.json"
    monkeypatch.setattr(trainer, "Batches", lambda *args, seed, **kw: real(*args, seed=1, **kw))
    assert bench(cache_dir, "precision=fp32", f"--output={output}") == 0
    (result,) = json.loads(output.read_text())["results"]
    assert result["loss_difference"] > 1e-3


def test_what_cannot_be_compared_is_one_line(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(cache_dir, "precision=fp16_amp") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("precexp: precision.loss_scaling: Trainer's schedule waits")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert bench(cache_dir) == 2
    assert capsys.readouterr().err == (
        "precexp: bench trainer: transformers' Trainer needs the package accelerate; "
        "pip install 'precexp[trainer]'\n"
    )


class Blocks(Dataset):
    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": IDS[place], "labels": IDS[place]}


def test_our_optimizer_drops_into_trainer_as_the_readme_has_it(tmp_path: Path) -> None:
    """The README's own lines, on a bf16 model, against our own loop.

    Without clipping: Trainer's norm of bf16 gradients has three digits, ours is float32.
    """
    (code,) = re.findall(r"```python\n(.*?adamw_anyprecision.*?)```", README.read_text(), re.S)
    config = compose([*MICRO, "precision=bf16_pure"]).config
    train = replace(config.train, lr=1e-2, weight_decay=0.1, warmup_steps=1, max_grad_norm=None)
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=2,
        learning_rate=train.lr, adam_beta1=train.beta1, adam_beta2=train.beta2,
        weight_decay=train.weight_decay, warmup_steps=1, max_grad_norm=0, logging_steps=1,
        train_sampling_strategy="sequential", use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    model, ours = (build_model(config.model, seed=1) for _ in range(2))
    for each in (model, ours):
        each.to(torch.bfloat16)  # type: ignore[arg-type]
    lines: dict[str, object] = {"model": model, "args": args, "dataset": Blocks()}
    exec(code, lines)
    trainer = lines["trainer"]
    assert isinstance(trainer, Trainer)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]

    optimizer = build_optimizer(ours.parameters(), config.optim, train)
    assert losses == own_losses(ours, optimizer, train)
    assert losses[-1] < losses[0]
    for param, other in zip(model.parameters(), ours.parameters(), strict=True):
        assert torch.equal(param, other)
    theirs = trainer.optimizer.optimizer  # type: ignore[union-attr]  # in accelerate's wrapper
    assert isinstance(theirs, AnyPrecisionAdamW)
    assert len(theirs.state) == len(list(model.parameters()))
    for state in theirs.state.values():
        assert state["step"] == STEPS
        for name in ("exp_avg", "exp_avg_sq", "compensation"):
            assert state[name].dtype == torch.bfloat16
            assert state[name].count_nonzero() > 0


def own_losses(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, train: TrainConfig
) -> list[float]:
    """The losses of our own loop over the same blocks."""
    precision = build_precision(
        compose(["precision=bf16_pure"]).config.precision, device=torch.device("cpu")
    )
    losses = []
    for step, batch in enumerate(IDS.split(2), start=1):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, train, total_steps=STEPS)
        done = training_step(
            model, optimizer, [batch], precision, precision.build_scaler(),
            max_grad_norm=train.max_grad_norm,
        )  # fmt: skip
        optimizer.zero_grad()
        losses.append(done.loss.item())
    return losses
