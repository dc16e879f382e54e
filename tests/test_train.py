import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from precexp.config import RunConfig, load
from precexp.data import Batches
from precexp.model import build_model
from precexp.optim import build_optimizer, lr_at
from precexp.precision import Census, build_precision
from precexp.record import Row
from precexp.train import (
    accumulate_gradients,
    checkpoints_at,
    clip_gradients,
    evaluate,
    next_token_loss,
    place,
    train,
    training_step,
)
from tests.test_config import composed

CPU = torch.device("cpu")
BLOCKS = np.random.default_rng(0).integers(0, 64, size=(40, 16), dtype=np.uint16)
MICRO = (
    "model.hidden_size=16",
    "model.ffn_dim=32",
    "model.word_embed_proj_dim=16",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.vocab_size=64",
    "model.max_position_embeddings=32",
    "data.block_size=16",
    "train.batch_size=4",
    "train.eval_batch_size=4",
    "train.max_steps=6",
    "train.eval_every=4",
    "train.warmup_steps=2",
    "train.lr=1e-2",
)


def micro(*overrides: str) -> RunConfig:
    return load(composed(*MICRO, *overrides))


class Trained:
    """A run of `train` to its end."""

    def __init__(
        self, config: RunConfig, prepare: Callable[[PreTrainedModel], object] = lambda model: None
    ) -> None:
        precision = build_precision(config.precision, device=CPU)
        self.model = build_model(config.model, seed=config.seed)
        precision.cast_parameters(self.model)
        prepare(self.model)
        optimizer = build_optimizer(self.model.parameters(), config.optim, config.train)
        batches = Batches(BLOCKS, batch_size=config.train.batch_size, seed=config.seed)
        assert config.train.max_steps is not None
        self.events = list(
            train(
                self.model,
                optimizer,
                batches,
                precision,
                config.train,
                scaler=precision.build_scaler(),
                eval_blocks=BLOCKS[:6],
                total_steps=config.train.max_steps,
            )
        )
        self.rows = [event for event in self.events if isinstance(event, Row)]
        self.censuses = [event for event in self.events if isinstance(event, Census)]

    def weights(self) -> torch.Tensor:
        return torch.cat([param.detach().float().flatten() for param in self.model.parameters()])


def test_rows_count_steps_and_tokens_and_evaluate_when_due_and_last() -> None:
    config = micro("train.grad_accumulation=2")
    rows = Trained(config).rows
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.tokens for row in rows] == [2 * 4 * 16 * step for step in range(1, 7)]
    assert [row.eval_loss is not None for row in rows] == [False, False, False, True, False, True]
    assert [row.lr for row in rows] == [lr_at(s, config.train, total_steps=6) for s in range(1, 7)]
    assert all(row.step_seconds is not None and row.step_seconds > 0 for row in rows)
    assert {(row.loss_scale, row.skipped, row.peak_bytes) for row in rows} == {(None, False, None)}


def test_training_lowers_the_loss() -> None:
    rows = Trained(micro("train.max_steps=40", "train.schedule=constant")).rows
    assert rows[0].loss == pytest.approx(math.log(64), abs=0.1)
    assert rows[-1].eval_loss is not None
    assert rows[-1].eval_loss < math.log(64) - 0.3


RECIPES = ("fp32", "bf16_mixed", "fp16_amp", "bf16_pure", "bf16_plain")


@pytest.mark.parametrize("optim", ["anyprecision", "adamw"])
@pytest.mark.parametrize("precision", RECIPES)
def test_the_same_run_twice_is_bitwise_the_same(precision: str, optim: str) -> None:
    config = micro(f"precision={precision}", f"optim={optim}")
    first, second = Trained(config), Trained(config)
    assert torch.equal(first.weights(), second.weights())
    timeless = [[replace(row, step_seconds=None) for row in run.rows] for run in (first, second)]
    assert timeless[0] == timeless[1]
    assert all(math.isfinite(row.loss or math.nan) for row in first.rows)


def test_accumulated_micro_batches_equal_one_large_batch() -> None:
    whole = Trained(micro("train.batch_size=8"))
    parts = Trained(micro("train.batch_size=2", "train.grad_accumulation=4"))
    for one, many in zip(whole.rows, parts.rows, strict=True):
        assert one.loss == pytest.approx(many.loss, rel=1e-5)
        assert one.grad_norm == pytest.approx(many.grad_norm, rel=1e-4)
    # Adam turns rounding noise of tiny gradients into steps of up to lr; worst seen 3e-5.
    torch.testing.assert_close(whole.weights(), parts.weights(), rtol=0, atol=3e-4)


def test_the_norm_is_of_unscaled_gradients_before_clipping() -> None:
    clip = "train.max_grad_norm=1e-3"
    in_fp32 = Trained(micro(clip)).rows[0].grad_norm
    in_fp16 = Trained(micro(clip, "precision=fp16_amp")).rows[0].grad_norm
    assert in_fp32 is not None
    assert in_fp32 > 0.1
    assert in_fp16 == pytest.approx(in_fp32, rel=0.01)  # fp16 has 11 bits; scaled it were x65536


def test_the_norm_of_bf16_gradients_is_computed_in_fp32() -> None:
    param = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    param.grad = torch.full((1000,), 0.1, dtype=torch.bfloat16)
    exact = param.grad.double().norm().item()
    norm = clip_gradients([param], max_norm=1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    assert param.grad.double().norm().item() == pytest.approx(1.0, rel=2**-8)  # bf16 rounding


def test_no_clipping_leaves_the_gradients_alone() -> None:
    param = torch.nn.Parameter(torch.zeros(10))
    param.grad = torch.full((10,), 5.0)
    assert clip_gradients([param], max_norm=None).item() == pytest.approx(5 * math.sqrt(10))
    assert torch.equal(param.grad, torch.full((10,), 5.0))


def test_an_overflow_skips_the_step_and_its_place_in_the_schedule() -> None:
    config = micro("precision=fp16_amp", "precision.initial_scale=1e30")
    trained = Trained(config)
    skipped = [row.skipped for row in trained.rows]
    num_skipped = skipped.index(False) if False in skipped else len(skipped)
    assert num_skipped >= 3
    scales = [row.loss_scale for row in trained.rows]
    assert scales[:3] == pytest.approx([1e30, 5e29, 2.5e29])
    assert [row.lr for row in trained.rows] == [
        lr_at(s, config.train, total_steps=6) for s in range(1, 7)]  # fmt: skip
    assert len(trained.censuses) == (1 if False in skipped else 0)
    assert all(math.isfinite(row.loss or math.nan) for row in trained.rows)


def test_a_run_whose_steps_are_all_skipped_changes_no_weight_and_has_no_census() -> None:
    config = micro("precision=fp16_amp", "precision.initial_scale=1e38", "train.max_steps=3")
    trained = Trained(config)
    assert all(row.skipped for row in trained.rows)
    assert trained.censuses == []
    fresh = build_model(config.model, seed=config.seed)
    assert torch.equal(
        trained.weights(), torch.cat([p.detach().flatten() for p in fresh.parameters()])
    )


def poison(model: PreTrainedModel) -> None:
    next(model.parameters()).data[0, 0] = math.nan


def test_a_loss_that_is_not_finite_is_the_last_row() -> None:
    rows = Trained(micro(), prepare=poison).rows
    assert [row.step for row in rows] == [1]
    assert math.isnan(rows[0].loss or 0.0)


def test_an_eval_loss_that_is_not_finite_is_the_last_row() -> None:
    def poison_evaluation(model: PreTrainedModel) -> None:
        def spoil(module, args, output):  # type: ignore[no-untyped-def]
            if not module.training:
                output.logits.fill_(math.nan)

        model.register_forward_hook(spoil)

    rows = Trained(micro(), prepare=poison_evaluation).rows
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert math.isnan(rows[-1].eval_loss or 0.0)


class HostReads(TorchDispatchMode):
    """Counts the operations that on CUDA would make the host wait for the device."""

    WAITS = (
        torch.ops.aten._local_scalar_dense.default,  # item(), bool(), if
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func in self.WAITS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optim", ["anyprecision", "adamw"])
@pytest.mark.parametrize("precision", RECIPES)
def test_only_loss_scaling_reads_a_tensor_in_a_step(precision: str, optim: str) -> None:
    config = micro(f"precision={precision}", f"optim={optim}", "precision.initial_scale=1")
    recipe = build_precision(config.precision, device=CPU)
    model = build_model(config.model, seed=0)
    recipe.cast_parameters(model)
    optimizer = build_optimizer(model.parameters(), config.optim, config.train)
    scaler = recipe.build_scaler()
    ids = torch.from_numpy(BLOCKS[:2].astype(np.int64))
    training_step(model, optimizer, [ids], recipe, scaler, max_grad_norm=1.0)  # makes the states
    with HostReads() as of_the_model, recipe.forward_context():
        model(input_ids=ids)  # in transformers 5.17 it reads its mask
    with HostReads() as reads:
        training_step(model, optimizer, [ids], recipe, scaler, max_grad_norm=1.0)
    if scaler.is_enabled():
        assert reads.count > of_the_model.count  # this test would see a read
    else:
        assert reads.count == of_the_model.count


@pytest.mark.gpu
@pytest.mark.parametrize("optim", ["anyprecision", "adamw"])
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "bf16_pure"])
def test_on_a_gpu_no_step_makes_the_host_wait(precision: str, optim: str) -> None:
    device = torch.device("cuda")
    config = micro(f"precision={precision}", f"optim={optim}")
    recipe = build_precision(config.precision, device=device)
    model = build_model(config.model, seed=0)
    optimizer = build_optimizer(model.parameters(), config.optim, config.train)
    place(model, optimizer, recipe, device=device, compiled=False)
    scaler = recipe.build_scaler()
    ids = torch.from_numpy(BLOCKS[:2].astype(np.int64))

    def step() -> None:
        training_step(model, optimizer, [ids, ids], recipe, scaler, max_grad_norm=1.0)
        optimizer.zero_grad(set_to_none=True)

    step()  # makes the states
    mode = torch.cuda.set_sync_debug_mode
    model.register_forward_pre_hook(
        lambda *_: mode("default")
    )  # a forward may be transformers' own
    model.register_forward_hook(lambda *_: mode("error"))
    mode("error")
    try:
        step()
    finally:
        mode("default")


def test_the_backward_pass_is_outside_autocast() -> None:
    seen: list[bool] = []
    config = micro("precision=bf16_mixed")
    precision = build_precision(config.precision, device=CPU)
    model = build_model(config.model, seed=0)
    next(model.parameters()).register_hook(
        lambda grad: seen.append(torch.is_autocast_enabled("cpu"))
    )
    ids = torch.from_numpy(BLOCKS[:2].astype(np.int64))
    accumulate_gradients(model, [ids], precision, precision.build_scaler())
    assert seen
    assert not any(seen)


def test_the_loss_is_the_mean_over_predicted_tokens_in_fp32() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(10).view(2, 5) % 7
    log_probabilities = logits.double().log_softmax(-1)
    picked = [log_probabilities[b, t, ids[b, t + 1]] for b in range(2) for t in range(4)]
    loss = next_token_loss(logits, ids)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-sum(picked).item() / 8, rel=1e-6)  # type: ignore[union-attr]


def test_evaluation_does_not_depend_on_its_batch_size_and_leaves_training_mode() -> None:
    config = micro()
    precision = build_precision(config.precision, device=CPU)
    model = build_model(config.model, seed=0)
    losses = {
        size: evaluate(model, BLOCKS[:7], precision, batch_size=size) for size in (1, 2, 3, 7, 50)
    }
    assert max(losses.values()) - min(losses.values()) < 1e-6  # fp32 matmuls of other shapes
    assert model.training
    assert all(param.grad is None for param in model.parameters())


def test_evaluation_drops_nothing() -> None:
    config = micro("model.dropout=0.5")
    precision = build_precision(config.precision, device=CPU)
    model = build_model(config.model, seed=0)
    first = evaluate(model, BLOCKS[:4], precision, batch_size=4)
    assert evaluate(model, BLOCKS[:4], precision, batch_size=4) == first


def test_checkpoints_are_due_every_so_often_and_at_the_end() -> None:
    every_two = micro("train.checkpoint_every=2").train
    due = [step for step in range(1, 6) if checkpoints_at(step, every_two, total_steps=5)]
    assert due == [2, 4, 5]
    never = micro().train
    assert not any(checkpoints_at(step, never, total_steps=5) for step in range(1, 6))
