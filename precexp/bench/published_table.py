"""The published memory table of OPT-1.3b, reproduced from one optimizer step on fake tensors.

The table is that of transformers' pull request 21312: bf16 mixed against pure bf16, cells as the
Trainer prints them (MiB, rounded down). Its `peaked` cells are a fingerprint: how far the memory
rose above what was left at the end depends on the dtypes and the temporaries of the optimizer that
ran. docs/published-table.md says what follows from it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from precexp import environment
from precexp.cli import compose
from precexp.memory.trace import ROUNDING, Timeline, Trace
from precexp.model import build_model, num_parameters
from precexp.record import write_json

MODEL = "opt-1.3b"
MIB = 2**20

# Fake tensors have no values: those of the hyperparameters do not matter.
_LR, _BETA1, _BETA2, _EPS = 1e-3, 0.9, 0.999, 1e-8


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """GPU cells of the table, in MiB rounded down."""

    init_alloc: int  # allocated by building the Trainer
    train_alloc: int  # allocated at the end of training beyond its beginning
    train_peaked: int  # the peak of training beyond its end

    @property
    def total(self) -> int:
        """What the table gives as the memory of the recipe."""
        return self.init_alloc + self.train_alloc + self.train_peaked


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Bytes per parameter."""

    weights: int
    gradients: int
    states: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.states


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training that may lie behind a row."""

    inventory: Inventory
    weight_dtype: torch.dtype  # of the gradients, too
    optimizer: type[torch.optim.Optimizer]
    published: PublishedRow | None  # None: a control


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What the trace gives, in bytes."""

    weights: int
    gradients: int
    step_alloc: int  # allocated by the first optimizer step, and kept
    peaked: int  # its peak beyond its end
    peaked_in_two_steps: int  # the peak of two steps beyond their end

    @property
    def total(self) -> int:
        """Weights, gradients and states."""
        return self.weights + self.gradients + self.step_alloc


# The loops of the optimizers. What an iteration binds stays alive until the next one binds it anew,
# and that is part of the peak: do not move a loop's body into a function. Weight decay works in
# place, and step counts are on the host: neither is here.


class FormerAdamW(torch.optim.Optimizer):
    """The memory of the AdamW that transformers had: two states in the dtype of the weights."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                momentum, variance = state["exp_avg"], state["exp_avg_sq"]
                momentum.mul_(_BETA1).add_(param.grad, alpha=1 - _BETA1)
                variance.mul_(_BETA2).addcmul_(param.grad, param.grad, value=1 - _BETA2)
                denominator = variance.sqrt().add_(_EPS)
                param.addcdiv_(momentum, denominator, value=-_LR)


class KahanAdamW(torch.optim.Optimizer):
    """The memory of torchdistx's AnyPrecisionAdamW with Kahan summation: three states in bf16."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    for name in ("exp_avg", "exp_avg_sq", "compensation"):
                        state[name] = torch.zeros_like(param, dtype=torch.bfloat16)
                momentum, variance = state["exp_avg"], state["exp_avg_sq"]
                momentum.mul_(_BETA1).add_(param.grad, alpha=1 - _BETA1)
                variance.mul_(_BETA2).addcmul_(param.grad, param.grad, value=1 - _BETA2)
                denominator = (variance.sqrt() / (1 - _BETA2) ** 0.5).add_(_EPS)
                compensation = state["compensation"]
                compensation.addcdiv_(momentum, denominator, value=-_LR)
                buffer = param.clone()
                param.add_(compensation)
                compensation.add_(buffer.sub_(param))


CASES: Mapping[str, Case] = {
    "bf16 mixed": Case(
        inventory=Inventory(weights=4, gradients=4, states=8),
        weight_dtype=torch.float32,
        optimizer=FormerAdamW,
        published=PublishedRow(init_alloc=5019, train_alloc=20076, train_peaked=123),
    ),
    "pure bf16": Case(
        inventory=Inventory(weights=2, gradients=2, states=6),
        weight_dtype=torch.bfloat16,
        optimizer=KahanAdamW,
        published=PublishedRow(init_alloc=5019, train_alloc=12548, train_peaked=124),
    ),
    "control: fp32 weights, bf16 states": Case(
        inventory=Inventory(weights=4, gradients=4, states=6),
        weight_dtype=torch.float32,
        optimizer=KahanAdamW,
        published=None,
    ),
}


@dataclass(frozen=True, kw_only=True)
class PublishedTableResult:
    """By case."""

    num_parameters: int  # tied ones once
    reproduced: Mapping[str, Reproduction]

    def as_record(self) -> dict[str, object]:
        """What the JSON holds, in MiB where its names do not say otherwise."""
        return {
            "model": MODEL,
            "num_parameters": self.num_parameters,
            "cases": {name: self._case(name) for name in CASES},
        }

    def inventory_mib(self, name: str) -> float:
        """Weights, gradients and states by the bytes per parameter."""
        return self.num_parameters * CASES[name].inventory.total / MIB

    def _case(self, name: str) -> dict[str, object]:
        case, found = CASES[name], self.reproduced[name]
        inventory = asdict(case.inventory)
        record: dict[str, object] = {
            "inventory_bytes_per_param": {**inventory, "total": case.inventory.total},
            "inventory": {
                **{part: self.num_parameters * size / MIB for part, size in inventory.items()},
                "total": self.inventory_mib(name),
            },
            "reproduced": {
                **{part: num_bytes / MIB for part, num_bytes in asdict(found).items()},
                "total": found.total / MIB,
            },
            "published": None,
        }
        if (row := case.published) is not None:
            record["published"] = {**asdict(row), "total": row.total}
            record["differences"] = {  # 0 to 1 is agreement with a cell rounded down
                "train_alloc": found.total / MIB - row.train_alloc,
                "train_peaked": found.peaked / MIB - row.train_peaked,
            }
            record["unexplained"] = {
                "by_cells": row.init_alloc + row.train_alloc - self.inventory_mib(name),
                "4_bytes_per_param": 4 * self.num_parameters / MIB,
            }
        return record


def bench(*, output: Path | None) -> PublishedTableResult:
    """Reproduces every case, prints and, given `output`, writes JSON."""
    result = measure()
    Console().print(_table(result))
    if output is not None:
        described = environment.describe(torch.device("cpu"), attention="sdpa")
        write_json(output, {**result.as_record(), "environment": described})
    return result


def measure() -> PublishedTableResult:
    """Traces one and two optimizer steps of every case."""
    with FakeTensorMode():
        count = num_parameters(_build(torch.float32))
        reproduced = {name: _reproduce(case) for name, case in CASES.items()}
    return PublishedTableResult(num_parameters=count, reproduced=reproduced)


def _reproduce(case: Case) -> Reproduction:
    once, twice = (_trace_steps(case, num_steps=count) for count in (1, 2))
    weights, gradients = (once.steady_categories[part] for part in ("weights", "gradients"))
    return Reproduction(
        weights=weights,
        gradients=gradients,
        step_alloc=once.steady_bytes - weights - gradients,
        peaked=once.peak_bytes - once.steady_bytes,
        peaked_in_two_steps=twice.peak_bytes - twice.steady_bytes,
    )


def _trace_steps(case: Case, *, num_steps: int) -> Timeline:
    """From weights and zero gradients to as many steps; the gradients stay."""
    model = _build(case.weight_dtype)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer = case.optimizer(_groups(model), {})
    trace = Trace(rounding=ROUNDING["cuda"], host_scalars=True)
    trace.watch_roots(model, optimizer, [])
    with trace:
        for _ in range(num_steps):
            trace.phase("step")
            optimizer.step()
            trace.tag_states(model, optimizer)
            trace.phase("")
    return trace.replay()


def _build(dtype: torch.dtype) -> nn.Module:
    model = build_model(compose([f"model={MODEL}"]).config.model, seed=0)
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model


def _groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """In the order of the Trainer: what decays, then biases and norm gains."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.ndim >= 2]},
        {"params": [param for param in params if param.ndim < 2]},
    ]


def _table(result: PublishedTableResult) -> Table:
    table = Table(title=f"{MODEL}, {result.num_parameters:,} parameters: MiB = 2^20 B")
    table.add_column("")
    for name in CASES:
        table.add_column(name, justify="right", overflow="fold")
    rows = list(CASES.values())
    found = [result.reproduced[name] for name in CASES]

    def row(words: str, *cells: str, last: bool = False) -> None:
        table.add_row(words, *cells, end_section=last)

    def published(cell: str) -> list[str]:
        return [f"{getattr(each.published, cell):,}" if each.published else "" for each in rows]

    row("weights, bytes/param", *(str(each.inventory.weights) for each in rows))
    row("gradients", *(str(each.inventory.gradients) for each in rows))
    row("states", *(str(each.inventory.states) for each in rows))
    row("inventory", *(f"{result.inventory_mib(name):,.1f}" for name in CASES), last=True)
    row("in the trace", *(f"{each.total / MIB:,.2f}" for each in found))
    row("  of it by the step", *(f"{each.step_alloc / MIB:,.2f}" for each in found))
    row("train alloc, published", *published("train_alloc"), last=True)
    row("peaked, one step", *(f"{each.peaked / MIB:,.2f}" for each in found))
    row("peaked, two steps", *(f"{each.peaked_in_two_steps / MIB:,.2f}" for each in found))
    row("train peaked, published", *published("train_peaked"), last=True)
    row("init alloc, published", *published("init_alloc"))
    block = f"{4 * result.num_parameters / MIB:,.1f}"
    row("beyond the inventory", *(block if each.published else "" for each in rows))
    return table
