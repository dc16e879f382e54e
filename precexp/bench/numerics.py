"""What each mode of AnyPrecisionAdamW keeps of the update it is asked for, at bf16 everywhere.

Three experiments: the decay of idle weights, a variance whose gradients become ten times smaller,
and the gradients of one training run given to every candidate and to an AdamW in float64.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from precexp import environment
from precexp.config import RunConfig
from precexp.data import Batches
from precexp.model import build_model
from precexp.optim import AnyPrecisionAdamW
from precexp.optim.kernel import unpacked_variance
from precexp.record import write_json
from precexp.run import read_blocks
from precexp.sweep import PlannedRun
from precexp.train import next_token_loss

OVERRIDES = (
    "model.hidden_size=64", "model.ffn_dim=256", "model.num_hidden_layers=2",
    "model.num_attention_heads=2", "model.word_embed_proj_dim=64",
    "data.block_size=64", "train.batch_size=4",
)  # fmt: skip
CANDIDATES: Mapping[str, Mapping[str, object]] = {
    "bf16, no Kahan": {"use_kahan_summation": False},
    "published": {"mode": "published"},
    "default": {},
    "packed": {"mode": "packed"},
}
DECAY_RATES = (2e-5, 5e-6, 1e-6)  # lr * weight_decay
BETAS2 = (0.999, 0.95)


@dataclass(frozen=True, kw_only=True)
class NumericsResult:
    """By candidate, then by decay rate or beta2 (as text, for JSON)."""

    decay_realised: dict[str, dict[str, float]]  # of what was asked
    variance_ratio: dict[str, dict[str, float]]  # mean of v / v in float64
    update_error: dict[str, dict[str, float]]  # |w - w64| / |w64 - w0|
    config: dict[str, object]
    environment: dict[str, object]


def bench(planned: PlannedRun, *, output: Path | None) -> NumericsResult:
    """Measures, prints and, given `output`, writes the result as JSON."""
    errors = {beta2: update_errors(planned.config, beta2=beta2) for beta2 in BETAS2}
    result = NumericsResult(
        decay_realised={
            name: {f"{rate:g}": decay_realised(name, rate) for rate in DECAY_RATES}
            for name in CANDIDATES
        },
        variance_ratio={
            name: {f"{beta2:g}": variance_ratio(name, beta2) for beta2 in BETAS2}
            for name in CANDIDATES
        },
        update_error={
            name: {f"{beta2:g}": errors[beta2][name] for beta2 in BETAS2} for name in CANDIDATES
        },
        config={"model": asdict(planned.config.model), "steps": STEPS, "lr": LR, "decay": DECAY},
        environment=environment.describe(torch.device("cpu"), attention="eager"),
    )
    Console().print(_table(result))
    if output is not None:
        write_json(output, asdict(result))
    return result


def decay_realised(candidate: str, rate: float, *, steps: int = 2000) -> float:
    """How much of the decay asked for idle weights get: log of the norm's ratio over the asked."""
    weight = _normal(20_000, seed=0) * 0.02
    param = nn.Parameter(weight.to(torch.bfloat16))
    optimizer = _build(candidate, [param], lr=1e-4, weight_decay=rate / 1e-4, beta2=0.95)
    before = torch.linalg.vector_norm(param.detach().double())
    for _ in range(steps):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    (after,) = optimizer.master_weights()
    ratio = torch.linalg.vector_norm(after.double()) / before
    return math.log(ratio.item()) / (steps * math.log1p(-rate))


def variance_ratio(candidate: str, beta2: float, *, steps: int = 2000, after: int = 5000) -> float:
    """Mean of v / true v, after gradients have become ten times smaller `after` steps ago."""
    param = nn.Parameter(torch.zeros(20_000, dtype=torch.bfloat16))
    optimizer = _build(candidate, [param], lr=0.0, weight_decay=0.0, beta2=beta2)
    true = torch.zeros(param.shape, dtype=torch.float64)
    for step in range(steps + after):
        scale = 1e-3 if step < steps else 1e-4
        param.grad = (_normal(param.numel(), seed=step) * scale).to(torch.bfloat16)
        true.mul_(beta2).addcmul_(param.grad.double(), param.grad.double(), value=1 - beta2)
        optimizer.step()
    return (_variance(optimizer, param).double() / true).mean().item()


STEPS, LR, DECAY, BETA1, EPS = 1000, 1e-3, 0.1, 0.9, 1e-8


def update_errors(config: RunConfig, *, beta2: float, steps: int = STEPS) -> dict[str, float]:
    """|w - w64| / |w64 - w0| of each candidate: w64 is an AdamW in float64 on the same gradients.

    They are the bf16 gradients of a model that float64 AdamW trains on the config's text. w is
    weight + compensation; w0 is a bf16 number, so that all start alike.
    """
    model = build_model(config.model, seed=0)
    params = list(model.parameters())
    for param in params:
        param.data = param.data.to(torch.bfloat16).float()
    start = [param.detach().double() for param in params]
    replicas = {
        name: [nn.Parameter(param.detach().to(torch.bfloat16)) for param in params]
        for name in CANDIDATES
    }
    optimizers = {
        name: _build(name, copies, lr=LR, weight_decay=DECAY, beta2=beta2)
        for name, copies in replicas.items()
    }
    exact = _Float64AdamW(start, beta2=beta2)
    for lr, grads in _gradients(model, config, steps=steps):
        exact.step(grads, lr=lr)
        for param, weight in zip(params, exact.weights, strict=True):
            param.data.copy_(weight)
        for name, optimizer in optimizers.items():
            for copy, grad in zip(replicas[name], grads, strict=True):
                copy.grad = grad
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
    moved = _norm(w - w0 for w, w0 in zip(exact.weights, start, strict=True))
    return {
        name: _norm(
            a.double() - b for a, b in zip(optimizer.master_weights(), exact.weights, strict=True)
        )
        / moved
        for name, optimizer in optimizers.items()
    }


def _gradients(
    model: nn.Module, config: RunConfig, *, steps: int
) -> Iterator[tuple[float, list[Tensor]]]:
    """Of each step: the learning rate (cosine after a warm-up) and the clipped bf16 gradients."""
    blocks = read_blocks(config.model, config.data)
    batches = Batches(blocks.train, batch_size=config.train.batch_size, seed=0)
    params = list(model.parameters())
    for step in range(steps):
        ids = batches.next_batch()
        next_token_loss(model(input_ids=ids).logits, ids).backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        warm_up = min(1.0, (step + 1) / (steps / 15))
        lr = LR * warm_up * 0.5 * (1 + math.cos(math.pi * step / steps))
        grads = [param.grad.to(torch.bfloat16) for param in params if param.grad is not None]
        model.zero_grad()
        yield lr, grads


class _Float64AdamW:
    """AdamW as its paper has it, in float64."""

    def __init__(self, start: list[Tensor], *, beta2: float) -> None:
        self.weights = [weight.clone() for weight in start]
        self._beta2 = beta2
        self._momenta = [torch.zeros_like(weight) for weight in start]
        self._variances = [torch.zeros_like(weight) for weight in start]
        self._step = 0

    def step(self, grads: list[Tensor], *, lr: float) -> None:
        self._step += 1
        scale = 1 / math.sqrt(1 - self._beta2**self._step)
        for i, grad in enumerate(grads):
            g = grad.double()
            self._momenta[i].lerp_(g, 1 - BETA1)
            self._variances[i].mul_(self._beta2).addcmul_(g, g, value=1 - self._beta2)
            denominator = self._variances[i].sqrt().mul_(scale).add_(EPS)
            self.weights[i].mul_(1 - lr * DECAY).addcdiv_(
                self._momenta[i], denominator, value=-lr / (1 - BETA1**self._step)
            )


def _build(
    candidate: str, params: list[nn.Parameter], *, lr: float, weight_decay: float, beta2: float
) -> AnyPrecisionAdamW:
    options = {"use_kahan_summation": True, **CANDIDATES[candidate]}
    return AnyPrecisionAdamW(
        params,
        lr=lr,
        betas=(BETA1, beta2),
        eps=EPS,
        weight_decay=weight_decay,
        momentum_dtype=torch.bfloat16,
        **options,  # type: ignore[arg-type]
    )


def _variance(optimizer: AnyPrecisionAdamW, param: nn.Parameter) -> Tensor:
    """The variance with all its bits."""
    state = optimizer.state[param]
    variance = state["exp_avg_sq"].float()
    words = state.get("compensation")
    if words is None or words.dtype != torch.int16:
        return variance
    return unpacked_variance(variance, words)


def _normal(count: int, *, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def _norm(parts: Iterator[Tensor]) -> float:
    return math.sqrt(sum(part.square().sum().item() for part in parts))


def _table(result: NumericsResult) -> Table:
    table = Table(title="AnyPrecisionAdamW, everything in bf16")
    columns = {
        **{f"decay {rate}": ("decay_realised", rate) for rate in map("{:g}".format, DECAY_RATES)},
        **{f"v, beta2 {b}": ("variance_ratio", b) for b in map("{:g}".format, BETAS2)},
        **{f"update error, {b}": ("update_error", b) for b in map("{:g}".format, BETAS2)},
    }
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name in CANDIDATES:
        cells = [f"{getattr(result, field)[name][key]:.3g}" for field, key in columns.values()]
        table.add_row(name, *cells)
    return table
