"""The GPU memory that the experiment which began this published, taken apart.

One optimizer step of each inventory runs on fake tensors, with loops that keep their temporaries
alive as the originals' did. docs/published-table.md says what follows from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from precexp import environment
from precexp.cli import compose
from precexp.memory.trace import Trace
from precexp.model import build_model, num_parameters
from precexp.record import write_json

MIB = 2**20
# In MiB, rounded down as they were printed.
PUBLISHED = {
    "mixed": {"init": 5019, "train_alloc_delta": 20076, "train_peaked_delta": 123, "total": 25218},
    "pure": {"init": 5019, "train_alloc_delta": 12548, "train_peaked_delta": 124, "total": 17691},
}


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What a row of the table is taken to have trained with."""

    name: str
    row: str  # of the published table
    param_dtype: torch.dtype
    states: Mapping[str, torch.dtype]
    step: Callable[[Sequence[nn.Parameter], Mapping[str, list[Tensor]]], None]

    @property
    def bytes_per_param(self) -> int:
        """Of weights, gradients and states."""
        return 2 * self.param_dtype.itemsize + sum(d.itemsize for d in self.states.values())


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """An inventory beside its row; in MiB."""

    inventory: str
    row: str
    bytes_per_param: int
    inventory_mib: float  # weights, gradients and states
    peaked_mib: float  # how far one optimizer step rises above what it leaves
    peaked_by_two_steps_mib: float
    published_peaked_mib: int
    published_alloc_mib: int
    unexplained_mib: float  # of the row's init and alloc delta, beyond the inventory


def bench(*, output: Path | None) -> list[Reproduced]:
    """Reproduces the table's `peaked` column, prints and, given `output`, writes JSON."""
    found = [_reproduced(inventory) for inventory in INVENTORIES]
    Console().print(_table(found))
    if output is not None:
        described = environment.describe(torch.device("cpu"), attention="sdpa")
        rows = [asdict(each) for each in found]
        write_json(output, {"published": PUBLISHED, "rows": rows, "environment": described})
    return found


def _reproduced(inventory: Inventory) -> Reproduced:
    row = PUBLISHED[inventory.row]
    with FakeTensorMode():
        model = build_model(compose(["model=opt-1.3b"]).config.model, seed=0)
        for param in model.parameters():
            param.data = param.data.to(inventory.param_dtype)
            param.grad = torch.zeros_like(param)
        peaked, by_two_steps = (_peaked_bytes(model, inventory, num_steps=n) for n in (1, 2))
        total = inventory.bytes_per_param * num_parameters(model) / MIB
    return Reproduced(
        inventory=inventory.name,
        row=inventory.row,
        bytes_per_param=inventory.bytes_per_param,
        inventory_mib=total,
        peaked_mib=peaked / MIB,
        peaked_by_two_steps_mib=by_two_steps / MIB,
        published_peaked_mib=row["train_peaked_delta"],
        published_alloc_mib=row["train_alloc_delta"],
        unexplained_mib=row["init"] + row["train_alloc_delta"] - total,
    )


def _peaked_bytes(model: nn.Module, inventory: Inventory, *, num_steps: int) -> int:
    """Peak of the first optimizer steps, less what is allocated after them."""
    decaying = [param for param in model.parameters() if param.ndim >= 2]
    others = [param for param in model.parameters() if param.ndim < 2]
    states: dict[str, list[Tensor]] = {name: [] for name in inventory.states}
    trace = Trace(rounding=512, host_scalars=True)
    trace.watch_roots(model, torch.optim.SGD(model.parameters()), [])
    with trace, torch.no_grad():
        trace.phase("step")
        for _ in range(num_steps):
            inventory.step([*decaying, *others], states)
        trace.phase("")
    timeline = trace.replay()
    return timeline.phases["step"] - timeline.steady_bytes


# The steps. Only what they allocate matters here, and when it goes: a local variable lives until
# the next parameter's takes its name.


def _step_of_hf_adamw(params: Sequence[nn.Parameter], states: Mapping[str, list[Tensor]]) -> None:
    for i, param in enumerate(params):
        if i == len(states["variance"]):
            for name in states:
                states[name].append(torch.zeros_like(param))
        momentum, variance = states["momentum"][i], states["variance"][i]
        denominator = variance.sqrt().add_(1e-6)
        param.addcdiv_(momentum, denominator, value=-1e-4)


def _step_of_any_precision(
    params: Sequence[nn.Parameter], states: Mapping[str, list[Tensor]]
) -> None:
    for i, param in enumerate(params):
        if i == len(states["variance"]):
            for name in states:
                states[name].append(torch.zeros_like(param, dtype=torch.bfloat16))
        momentum, variance, compensation = (states[name][i] for name in states)
        denominator = (variance.sqrt() / 0.1).add_(1e-8)
        compensation.addcdiv_(momentum, denominator, value=-1e-4)
        buffer = param.clone()
        param.add_(compensation)
        compensation.add_(buffer.sub_(param))


_FP32_STATES: Mapping[str, torch.dtype] = {"momentum": torch.float32, "variance": torch.float32}
_BF16_STATES: Mapping[str, torch.dtype] = {
    "momentum": torch.bfloat16,
    "variance": torch.bfloat16,
    "compensation": torch.bfloat16,
}
INVENTORIES = (
    Inventory(
        name="fp32 weights, HF's AdamW",
        row="mixed",
        param_dtype=torch.float32,
        states=_FP32_STATES,
        step=_step_of_hf_adamw,
    ),
    Inventory(
        name="bf16 weights, AnyPrecisionAdamW",
        row="pure",
        param_dtype=torch.bfloat16,
        states=_BF16_STATES,
        step=_step_of_any_precision,
    ),
    Inventory(
        name="fp32 weights, AnyPrecisionAdamW",
        row="pure",
        param_dtype=torch.float32,
        states=_BF16_STATES,
        step=_step_of_any_precision,
    ),
)


def _table(found: Sequence[Reproduced]) -> Table:
    table = Table(title="the first optimizer step of OPT-1.3b, MiB = 2^20 bytes")
    table.add_column("inventory", no_wrap=True)
    for column in ("held", "peaked", "published", "two\nsteps", "un-\nexplained"):
        table.add_column(column, justify="right")
    for each in found:
        table.add_row(
            each.inventory,
            f"{each.inventory_mib:,.1f}",
            f"{each.peaked_mib:.2f}",
            str(each.published_peaked_mib),
            f"{each.peaked_by_two_steps_mib:.2f}",
            f"{each.unexplained_mib:,.1f}",
        )
    return table
