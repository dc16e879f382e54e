"""Each probe against a float64 oracle or a closed form, and that probes change nothing of a run."""

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from precexp import run as running
from precexp.data import Batches
from precexp.model import build_model, num_parameters
from precexp.numerics import NoProbes, Probes, build_probes
from precexp.numerics.arithmetic import arithmetic_of
from precexp.numerics.decay import MOST_NOISE, noise
from precexp.numerics.sample import draw_sample, kinds_of
from precexp.optim import build_optimizer
from precexp.precision import build_precision
from precexp.record import Row, read_run
from precexp.train import place, train
from tests import test_resume
from tests.test_train import BLOCKS, CPU, micro

KAHAN = ("precision=bf16_pure",)
PUBLISHED = (*KAHAN, "optim=anyprecision_published")
PACKED = (*KAHAN, "optim=anyprecision_packed")
PLAIN = ("precision=bf16_plain",)
TORCH = (*KAHAN, "optim=adamw")


class Probed:
    """A model whose gradients the test gives, with probes at every step."""

    def __init__(self, model: nn.Module, *overrides: str, most_per_kind: int = 2**16) -> None:
        self.config = micro(*overrides)
        precision = build_precision(self.config.precision, device=CPU)
        self.model = model
        self.params = list(model.parameters())
        self.optimizer = build_optimizer(self.params, self.config.optim, self.config.train)
        precision.cast_parameters(model)
        self.arithmetic = arithmetic_of(
            self.config.optim,
            param_dtype=precision.param_dtype,
            beta2=self.config.train.beta2,
        )
        self.probes = Probes(
            self.optimizer,
            draw_sample(model, self.params, seed=0, most_per_kind=most_per_kind),
            self.arithmetic,
            every=1,
            total_steps=10**9,
            loss_scaling=False,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.train.lr

    def step(self, *grads: Tensor | float | None) -> Mapping[str, float]:
        """A step by the gradients of the parameters, in order; the last counts for the rest."""
        for i, param in enumerate(self.params):
            grad = grads[min(i, len(grads) - 1)]
            if grad is None:
                param.grad = None
                continue
            given = torch.as_tensor(grad, dtype=param.dtype)
            param.grad = given.expand(param.shape) if given.ndim == 0 else given.view(param.shape)
            param.grad = param.grad.contiguous()
        self.probes.before_update(1)
        self.optimizer.step()
        found = self.probes.after_update(1, skipped=False)
        assert found is not None
        return found


def matrix(values: Tensor) -> nn.Module:
    """A linear layer of the kind `mlp` that holds the values."""
    layer = nn.Linear(values.numel(), 1, bias=False)
    layer.weight.data = values.clone().view(1, -1)
    return nn.Sequential(layer)


def normal(count: int, scale: float = 0.02, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


# Kinds and sample


def test_kinds_of_an_opt_are_those_of_its_layers_and_tied_weights_are_one_embedding() -> None:
    model = build_model(micro().model, seed=0)
    kinds = {
        name: kinds_of(model)[param]  # type: ignore[index]
        for name, param in model.named_parameters()
    }
    layer = "model.decoder.layers.0."
    assert kinds["model.decoder.embed_tokens.weight"] == "embedding"
    assert kinds["model.decoder.embed_positions.weight"] == "embedding"
    assert kinds[f"{layer}self_attn.q_proj.weight"] == "attention"
    assert kinds[f"{layer}self_attn.q_proj.bias"] == "bias"
    assert kinds[f"{layer}fc1.weight"] == kinds[f"{layer}fc2.weight"] == "mlp"
    assert kinds[f"{layer}self_attn_layer_norm.weight"] == "norm"
    assert kinds[f"{layer}final_layer_norm.bias"] == "bias"
    assert sum(param.numel() for param in kinds_of(model)) == num_parameters(model)


def test_kinds_of_other_architectures_follow_modules_and_names() -> None:
    gpt = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8))
    kinds = {name: kinds_of(gpt)[param] for name, param in gpt.named_parameters()}  # type: ignore[index]
    assert kinds["transformer.wte.weight"] == kinds["transformer.wpe.weight"] == "embedding"
    assert kinds["transformer.h.0.attn.c_attn.weight"] == "attention"  # a Conv1D
    assert kinds["transformer.h.0.mlp.c_fc.weight"] == "mlp"
    assert kinds["transformer.h.0.ln_1.weight"] == kinds["transformer.ln_f.weight"] == "norm"
    llama = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=1,
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=2,
            vocab_size=16,
            tie_word_embeddings=False,
        )
    )
    kinds = {name: kinds_of(llama)[param] for name, param in llama.named_parameters()}  # type: ignore[index]
    assert kinds["lm_head.weight"] == kinds["model.embed_tokens.weight"] == "embedding"
    assert kinds["model.layers.0.input_layernorm.weight"] == "norm"  # an RMSNorm
    assert kinds["model.layers.0.self_attn.o_proj.weight"] == "attention"
    assert kinds["model.layers.0.mlp.down_proj.weight"] == "mlp"
    own = nn.ParameterDict({"anything": nn.Parameter(torch.ones(2)), "bias": torch.ones(2)})
    assert list(kinds_of(own).values()) == ["mlp", "bias"]


def test_the_sample_is_fixed_by_the_seed_even_over_its_kind_and_within_its_bound() -> None:
    model = nn.Sequential(nn.Linear(100, 30), nn.Linear(30, 200))
    params = list(model.parameters())
    sites = draw_sample(model, params, seed=1, most_per_kind=600)
    again = draw_sample(model, params, seed=1, most_per_kind=600)
    other = draw_sample(model, params, seed=2, most_per_kind=600)
    assert all(torch.equal(a.places, b.places) for a, b in zip(sites, again, strict=True))
    assert not all(torch.equal(a.places, b.places) for a, b in zip(sites, other, strict=True))
    counts = {id(site.param): site.count for site in sites}
    first, second = counts[id(params[0])], counts[id(params[2])]
    assert first + second == 600
    assert first == pytest.approx(200, abs=40)  # 3,000 of 9,000 elements
    assert {site.kind: site.weight for site in sites} == {"mlp": 15, "bias": 1}
    for site in sites:
        assert len(site.places.unique()) == site.count
        assert site.places.max() < site.param.numel()
        flat = site.param.detach().flatten()
        assert torch.equal(site.pick(site.param.detach()), flat[site.places])
    covered = [place for site in sites for place in range(site.where.start, site.where.stop)]
    assert covered == list(range(600 + 230))


def test_the_elements_of_a_transposed_tensor_are_those_of_a_contiguous_one() -> None:
    model = nn.Linear(100, 30, bias=False)
    (site,) = draw_sample(model, model.parameters(), seed=1, most_per_kind=600)
    values = torch.arange(3000.0).view(30, 100)
    assert torch.equal(site.pick(values.t().contiguous().t()), site.pick(values))


# Closed forms


@pytest.mark.parametrize("rate", [2e-5, 1.9e-3])
def test_decay_that_must_vanish_is_0_and_decay_inside_is_1(rate: float) -> None:
    rates = (f"train.lr={rate}", "train.weight_decay=1")
    kept = {}
    for arm in (PUBLISHED, KAHAN, PACKED):
        probed = Probed(matrix(normal(20_000)), *arm, *rates)
        kept[arm] = [probed.step(normal(20_000, seed=s))["decay_kept/mlp"] for s in (1, 2, 3)]
    assert kept[PUBLISHED] == [0, 0, 0]
    assert kept[KAHAN] == pytest.approx([1, 1, 1], abs=0.02)  # seen 0.004, by noise() 0.005
    assert kept[PACKED] == pytest.approx([1, 1, 1], abs=0.02)


def test_decay_outside_the_update_above_its_threshold_is_kept_as_rounding_has_it() -> None:
    weights = normal(20_000).bfloat16()
    probed = Probed(matrix(weights.float()), *PUBLISHED, "train.lr=3e-3", "train.weight_decay=1")
    found = probed.step(normal(20_000, seed=1))["decay_kept/mlp"]
    w = weights.double()
    realised = (weights.float() * (1 - 3e-3)).bfloat16().double() - w
    expected = (-realised * w / 3e-3).sum().item() / (w * w).sum().item()
    assert found == pytest.approx(expected, rel=1e-4)  # seen 7e-6, of rounded compensations
    assert 0.5 < found < 1.5


def test_decay_of_plain_bf16_is_dithered_by_updates_and_lost_without() -> None:
    for lr, expected, tolerance in ((3e-3, 1, 0.05), (1e-7, 0, 1e-3)):  # seen 0.014, 2e-8
        probed = Probed(
            matrix(normal(60_000)), *PLAIN, f"train.lr={lr}", f"train.weight_decay={1e-3 / lr}"
        )
        assert noise(probed.arithmetic, rate=1e-3, count=60_000) < 0.02
        found = [probed.step(normal(60_000, seed=s))["decay_kept/mlp"] for s in (1, 2, 3)]
        # The first updates are all lr, which rounds alike all over a binade.
        assert found[-1] == pytest.approx(expected, abs=tolerance)


def test_decay_that_is_not_told_from_noise_has_no_key() -> None:
    probed = Probed(matrix(normal(1000)), *PLAIN, "train.lr=1e-4", "train.weight_decay=0.1")
    assert noise(probed.arithmetic, rate=1e-5, count=1000) > MOST_NOISE
    assert not any(key.startswith("decay_kept") for key in probed.step(1e-3))
    without = Probed(matrix(normal(1000)), *KAHAN, "train.weight_decay=0")
    assert not any(key.startswith("decay_kept") for key in without.step(1e-3))


@pytest.mark.parametrize("arm", [PUBLISHED, KAHAN, PACKED, TORCH], ids=" ".join)
def test_a_variance_that_must_stall_shows_against_the_shadow(arm: tuple[str, ...]) -> None:
    beta2 = 0.999
    probed = Probed(matrix(torch.ones(4096)), *arm, f"train.beta2={beta2}", "train.lr=0")
    oracle = torch.zeros(4096, dtype=torch.float64)
    found: Mapping[str, float] = {}
    for step in range(900):
        grad = normal(4096, 1.0 if step < 100 else 1e-3, seed=step).bfloat16()
        oracle = beta2 * oracle + (1 - beta2) * grad.double() ** 2
        found = probed.step(grad)
    (site,) = probed.probes._sites  # type: ignore[attr-defined]
    shadow = probed.probes.state()["shadow"]
    torch.testing.assert_close(shadow.double(), oracle[site.places], rtol=1e-5, atol=0)
    if arm in (KAHAN, PACKED):
        assert found["variance_ratio/mlp"] == pytest.approx(1, abs=0.02)  # seen 0.003
    else:  # what was there after 100 steps is still there
        assert found["variance_ratio/mlp"] > 0.8 / beta2**800  # seen 1.00 of it


@pytest.mark.parametrize("arm", [PLAIN, TORCH], ids=" ".join)
def test_a_norm_gain_of_1_only_moves_downwards(arm: tuple[str, ...]) -> None:
    # Below 1, bf16's numbers are 2^-8 apart, above 2^-7: 3e-3 is over half of the one, not of the
    # other.
    probed = Probed(nn.Sequential(nn.LayerNorm(8)), *arm, "train.lr=3e-3")
    up, down = torch.full((8,), -1.0), torch.full((8,), 1.0)
    found = probed.step(up, 0.0)
    assert found["moved/norm"] == found["update_kept/norm"] == 0
    found = probed.step(torch.cat([up[:2], 100 * down[2:]]), 0.0)
    assert found["moved/norm"] == 0.75
    assert torch.equal(probed.params[0].float(), torch.tensor([1.0, 1, *[1 - 2**-8] * 6]))


def test_a_kahan_compensation_keeps_what_the_gain_does_not_show() -> None:
    for arm in (KAHAN, PACKED, PUBLISHED):
        found = Probed(nn.Sequential(nn.LayerNorm(8)), *arm, "train.lr=3e-4").step(-1.0)
        assert found["moved/norm"] == 0
        assert found["update_kept/norm"] == 0
        assert found["update_kept_compensated/norm"] == pytest.approx(1, abs=2**-6)


def test_the_first_update_of_a_constant_gradient_is_lr() -> None:
    probed = Probed(
        matrix(torch.full((64,), 0.5)), "precision=fp32", "train.lr=1e-3", "train.weight_decay=0.1"
    )
    found = probed.step(0.25)
    expected = 1e-3 + 0.5 * 1e-4  # and the decay; eps / |g| = 4e-8
    assert found["update_to_weight/mlp"] == pytest.approx(expected / 0.5, rel=1e-6)
    assert found["update_kept/mlp"] == pytest.approx(1, abs=2**-24 * 0.5 / 1e-3)
    assert "update_kept_compensated/mlp" not in found
    frozen = Probed(matrix(torch.full((64,), 0.5)), "precision=fp32", "train.lr=0").step(0.25)
    assert frozen["moved/mlp"] == frozen["update_to_weight/mlp"] == 0
    assert "update_kept/mlp" not in frozen


@pytest.mark.parametrize(
    "arm",
    [("precision=fp32",), ("precision=fp32", "optim=adamw"), KAHAN, PUBLISHED, PACKED, PLAIN],
    ids=" ".join,
)
def test_probes_of_an_update_equal_a_float64_adamw(arm: tuple[str, ...]) -> None:
    probed = Probed(matrix(normal(4096)), *arm, "train.lr=1e-3", "train.weight_decay=0.1")
    (param,) = probed.params
    for step in range(1, 5):
        state = {key: value.clone() for key, value in probed.optimizer.state[param].items()}
        grad = normal(4096, seed=step).to(param.dtype)
        before = param.detach().double().flatten()
        found = probed.step(grad)
        stored = param.detach().double().flatten() - before
        m, v, x = (torch.zeros(4096, dtype=torch.float64) for _ in range(3))
        x += before
        if step > 1:
            m, v, c = (state.get(key) for key in ("exp_avg", "exp_avg_sq", "compensation"))
            assert m is not None
            assert v is not None
            m, v = m.double().flatten(), v.double().flatten()
            if c is not None and c.dtype != torch.int16:
                x += c.double().flatten()
        g = grad.double()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        u = -1e-4 * x - 1e-3 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        # The packed words, left out here, hold less than 2^-8 of v.
        rel = 2**-8 if arm == PACKED else 1e-6
        assert found["moved/mlp"] == (stored != 0).double().mean().item()
        expected = ((stored * u).sum() / (u * u).sum()).item()
        assert found["update_kept/mlp"] == pytest.approx(expected, rel=rel)
        ratio = ((u * u).sum() / (x * x).sum()).sqrt().item()
        assert found["update_to_weight/mlp"] == pytest.approx(ratio, rel=rel)


def test_underflow_counts_what_is_zero_among_gradients_that_are_not() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    grad = torch.ones(8, 4)
    grad[2:] = 0  # tokens that are not in the batch
    grad[0, 0] = 0
    grad[1, 2] = 1e-39  # subnormal
    dead = torch.ones(4, 4)
    dead[:, 1] = 0  # a unit that was not active
    dead[3, 3] = math.inf
    bias = torch.tensor([0.0, 1, 1, math.nan])
    found = Probed(model, "precision=fp32", "train.max_grad_norm=null").step(grad, dead, bias)
    assert found["gradient_underflow/embedding"] == 2 / 8
    assert found["gradient_underflow/mlp"] == 0
    assert "gradient_underflow/bias" not in found
    assert found["gradient_overflow/embedding"] == 0
    assert found["gradient_overflow/mlp"] == 1 / 16
    assert found["gradient_overflow/bias"] == 1 / 4
    weighted = (0 * 32 + 1 / 16 * 16 + 1 / 4 * 4) / 52
    assert found["gradient_overflow/all"] == pytest.approx(weighted)


def test_all_weighs_the_kinds_by_their_parameters_not_by_their_samples() -> None:
    linear = nn.Linear(100, 50)
    nn.init.ones_(linear.weight)  # they stay, upwards
    nn.init.ones_(linear.bias)
    model = nn.Sequential(linear, nn.LayerNorm(100))
    probed = Probed(model, *PLAIN, "train.lr=3e-3", "train.weight_decay=0", most_per_kind=64)
    found = probed.step(-1.0, 0.0, 1.0, 0.0)  # weights, biases, gains, biases
    assert (found["moved/mlp"], found["moved/bias"], found["moved/norm"]) == (0, 0, 1)
    assert found["moved/all"] == pytest.approx(100 / (5000 + 50 + 100 + 100))


def test_parameters_without_a_gradient_are_no_part_of_a_step() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    probed = Probed(model, "precision=bf16_pure", "train.lr=1e-2")
    alone = Probed(
        matrix(next(model.parameters()).detach().float().clone()), *KAHAN, "train.lr=1e-2"
    )
    for step in range(3):
        grad = normal(256, seed=step)
        ours, theirs = probed.step(grad, None), alone.step(grad)
        for probe in ("moved", "update_kept", "variance_ratio", "update_to_weight"):
            assert ours[f"{probe}/mlp"] == pytest.approx(theirs[f"{probe}/mlp"], rel=1e-6)
    shadow = probed.probes.state()["shadow"]
    assert shadow[:256].min() > 0
    assert shadow[256:].max() == 0
    late = probed.step(1.0)  # its first step, at which the other has taken three
    assert late["variance_ratio/mlp"] == pytest.approx(1, abs=0.01)


def test_the_nan_of_a_weight_is_measured_and_is_no_movement() -> None:
    values = torch.ones(8)
    values[0] = math.nan
    found = Probed(matrix(values), *PLAIN, "train.lr=1e-2").step(1.0)
    assert found["moved/mlp"] == 7 / 8
    assert math.isnan(found["update_kept/mlp"])


def test_nothing_as_large_as_a_parameter_is_allocated() -> None:
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            given = {
                t.untyped_storage().data_ptr()
                for t in tree_leaves((args, kwargs))
                if isinstance(t, Tensor)
            }
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in given:
                        self.elements = max(self.elements, storage.nbytes() // 2)
            return out

    model = nn.Sequential(nn.Linear(2048, 1024, bias=False))
    probed = Probed(model, *KAHAN, most_per_kind=4096)
    grad = torch.ones(1024, 2048, dtype=torch.bfloat16)
    grad[0, :] = 0
    probed.step(grad)
    with Largest() as largest:
        probed.probes.before_update(1)
    optimized = largest.elements
    probed.optimizer.step()
    with Largest() as largest:
        probed.probes.after_update(1, skipped=False)
    assert 0 < max(optimized, largest.elements) <= 2**17  # the optimizer's table of random bits


# Runs


class Run:
    """Rows, parameters and random states of a run of `train` with probes every so often."""

    def __init__(
        self,
        every: int | None,
        *overrides: str,
        prepare: Callable[[nn.Module], object] = lambda model: None,
    ) -> None:
        config = micro("train.log_every=3", *overrides)
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        precision = build_precision(config.precision, device=CPU)
        model = build_model(config.model, seed=config.seed)
        optimizer = build_optimizer(model.parameters(), config.optim, config.train)
        place(model, optimizer, precision, device=CPU, compiled=config.model.compile)
        prepare(model)
        scaler = precision.build_scaler()
        total_steps = config.train.max_steps or 0
        self.probes = build_probes(
            model,
            optimizer,
            config.optim,
            every=every,
            total_steps=total_steps,
            seed=config.seed,
            loss_scaling=scaler.is_enabled(),
        )
        events = train(
            model,
            optimizer,
            Batches(BLOCKS, batch_size=config.train.batch_size, seed=config.seed),
            precision,
            config.train,
            scaler=scaler,
            eval_blocks=BLOCKS[:6],
            total_steps=total_steps,
            probes=self.probes,
        )
        self.rows = [event for event in events if isinstance(event, Row)]
        states = [value for state in optimizer.state.values() for value in state.values()]
        self.tensors = [param.detach() for param in model.parameters()] + states
        self.random = (torch.get_rng_state().tolist(), random.getstate(), np.random.random())

    def without_probes(self) -> str:
        return repr([replace(row, probes=None, step_seconds=None) for row in self.rows])


@pytest.mark.parametrize(
    "arm",
    [
        ("precision=fp32",),
        ("precision=bf16_mixed", "optim=adamw"),
        ("precision=fp16_amp",),
        ("precision=fp16_amp", "optim=adamw", "precision.initial_scale=1e30"),
        KAHAN,
        (*KAHAN, "train.beta2=0.999", "train.grad_accumulation=2", "model.dropout=0.1"),
        (*KAHAN, "precision.accumulation_dtype=float32"),
        (*KAHAN, "optim.implementation=aten"),
        PUBLISHED,
        PACKED,
        (*PLAIN, "optim.weight_rounding=stochastic"),
        TORCH,
        (*TORCH, "optim.implementation=loop"),
        (*TORCH, "optim.implementation=foreach"),
        pytest.param((*KAHAN, "model.compile=true"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_probes_change_no_bit_of_the_run(arm: tuple[str, ...]) -> None:
    off, often, seldom = Run(None, *arm), Run(1, *arm), Run(4, *arm)
    assert isinstance(off.probes, NoProbes)
    for probed in (often, seldom):
        assert isinstance(probed.probes, Probes)
        assert probed.without_probes() == off.without_probes()
        assert all(torch.equal(a, b) for a, b in zip(probed.tensors, off.tensors, strict=True))
        assert probed.random == off.random
    assert all(row.probes is None for row in off.rows)
    assert [row.step for row in seldom.rows if row.probes] == [4, 6]  # and the last
    for sparse, dense in zip(seldom.rows, often.rows, strict=True):
        assert dense.probes
        if sparse.probes:  # they are of the step alone, but for the count of skipped ones
            same = {k: v for k, v in dense.probes.items() if k != "loss_scale_backoffs"}
            assert {k: sparse.probes[k] for k in same} == pytest.approx(same, rel=0, abs=0)


def test_skipped_steps_are_counted_and_have_the_gradients_probes_alone() -> None:
    arm = ("precision=fp16_amp", "precision.initial_scale=1e9", "train.max_steps=80")
    rows = Run(1, *arm, "train.eval_every=80").rows
    skipped = [row for row in rows if row.skipped]
    assert 3 <= len(skipped) < len(rows)
    for row in rows:
        assert row.probes is not None
        assert row.probes["loss_scale_backoffs"] == row.skipped
        assert (row.probes["gradient_overflow/all"] > 0) == row.skipped
        assert ("moved/all" in row.probes) == (not row.skipped)
    every = Run(40, *arm, "train.eval_every=80").rows
    counts = [row.probes["loss_scale_backoffs"] for row in every if row.probes]
    assert counts == [sum(row.skipped for row in rows[:40]), sum(row.skipped for row in rows[40:])]
    assert "loss_scale_backoffs" not in (Run(6).rows[-1].probes or {})


def test_gradients_that_are_not_finite_are_seen_before_clipping_spreads_them() -> None:
    def poison(model: nn.Module) -> None:
        model.model.decoder.layers[0].fc2.weight.register_hook(  # type: ignore[union-attr,operator]
            lambda grad: grad.index_fill(0, torch.tensor([0]), math.nan)
        )

    (row, *_) = Run(1, "precision=fp32", "train.max_grad_norm=1.0", prepare=poison).rows
    assert row.probes is not None
    assert row.probes["gradient_overflow/mlp"] == pytest.approx(32 / 1024)
    assert row.probes["gradient_overflow/attention"] == 0
    assert math.isnan(row.grad_norm or 0.0)


def test_planted_faults_show_in_the_probes_and_sound_arms_show_none() -> None:
    lost = "train.max_steps=6", "train.warmup_steps=0", "train.schedule=constant"
    stuck = Run(6, *TORCH, *lost, "train.lr=6e-7").rows[-1].probes or {}
    assert stuck["moved/attention"] < 0.1
    assert stuck["moved/norm"] == 0
    published = Run(6, *PUBLISHED, *lost, "train.lr=1e-3").rows[-1].probes or {}
    assert published["decay_kept/all"] == 0
    for arm in (("precision=fp32",), KAHAN, PACKED):
        sound = Run(6, *arm, *lost, "train.lr=1e-3").rows[-1].probes or {}
        assert sound["decay_kept/all"] == pytest.approx(1, abs=0.05)
        kept = sound.get("update_kept_compensated/all", sound["update_kept/all"])
        assert kept == pytest.approx(1, abs=0.01)
        assert sound["variance_ratio/all"] == pytest.approx(1, abs=0.02)


# Resume and record


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "planned_memory", lambda *_: None)
    monkeypatch.setattr(running, "measured_memory", lambda *_, **__: None)


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize(
    "arm",
    [
        (*KAHAN, "train.beta2=0.999"),
        ("precision=fp16_amp", "precision.initial_scale=1e6", "precision.scale_growth_interval=2"),
    ],
    ids=" ".join,
)
def test_probes_go_on_bitwise(arm: tuple[str, ...], tmp_path: Path, cache_dir: Path) -> None:
    test_resume.check_resume(tmp_path, cache_dir, "train.probe_every=4", *arm)
    probed = [row.step for row in read_run(tmp_path / "whole").rows if row.probes]
    assert probed == [4, 8, 12]


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("earlier", ["null", "3"])
def test_a_checkpoint_with_other_probes_or_without_goes_on(
    earlier: str, tmp_path: Path, cache_dir: Path
) -> None:
    ours = (*KAHAN, "train.beta2=0.999")
    before, now = f"train.probe_every={earlier}", "train.probe_every=2"
    test_resume.run(tmp_path / "whole", cache_dir, *ours, now)
    killed = test_resume.Killed()
    test_resume.run_until(8, killed, tmp_path / "killed", cache_dir, *ours, before)
    test_resume.run(tmp_path / "killed", cache_dir, *ours, now)
    whole, killed = (read_run(tmp_path / name).rows for name in ("whole", "killed"))
    for one, other in zip(whole, killed, strict=True):
        assert replace(one, probes=None, step_seconds=None) == replace(
            other, probes=None, step_seconds=None
        )
    if earlier == "3":  # the shadow is the same
        assert [row.probes for row in killed[5:]] == [row.probes for row in whole[5:]]
    else:  # it begins from the stored variance after step 5
        assert [row.step for row in killed if row.probes] == [6, 8, 10, 12]
        for one, other in zip(whole[5:], killed[5:], strict=True):
            if one.probes and other.probes:
                assert one.probes.keys() == other.probes.keys()
                ratio = other.probes["variance_ratio/all"]
                assert ratio == pytest.approx(1, abs=0.02)
    last = sorted((tmp_path / "killed" / "checkpoints").glob("step-*"))[-1]
    facts = json.loads((last / "checkpoint.json").read_text())
    assert "numerics.safetensors" in facts["sha256"]


def test_probe_every_is_a_positive_number_or_null() -> None:
    assert micro("train.probe_every=null").train.probe_every is None
    with pytest.raises(ValueError, match=r"train.probe_every: 0 .* positive or null"):
        micro("train.probe_every=0")
