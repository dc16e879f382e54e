"""A precision recipe as a value, and the census that says whether a run really has it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from precexp.config import PrecisionConfig, UserError

# The first capability with bf16 matrix units: below it, torch emulates bf16, slower than fp32.
NATIVE_BF16_CAPABILITY = (8, 0)

STEP = "step"  # an optimizer's step counter: listed in the census, no state of a parameter


class CensusError(RuntimeError):
    """A dtype in the program is not the one that the recipe or the optimizer promised."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a recipe on a device. Disabled parts are no-ops, so callers never branch."""

    device_type: str
    param_dtype: torch.dtype
    gradient_dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    autocast_cache: bool
    loss_scaling: bool
    initial_scale: float
    scale_growth_interval: int

    @property
    def forward_dtype(self) -> torch.dtype:
        return self.autocast_dtype or self.param_dtype

    def cast_parameters(
        self,
        model: nn.Module,
        *,
        on_cast: Callable[[nn.Parameter, Tensor], None] = lambda param, full: None,
    ) -> None:
        """Casts the parameters in place, tied ones once; never a buffer: rotary ones need fp32.

        `on_cast` is given each one after its cast, with what it held before, which then goes: no
        second full copy of the model lives.
        """
        for param in model.parameters():
            full = param.data
            param.data = full.to(self.param_dtype)
            if self.gradient_dtype != self.param_dtype:
                param.grad_dtype = self.gradient_dtype
            on_cast(param, full)

    def forward_context(self) -> torch.autocast:
        """The context of a forward pass with its loss; the backward pass stays outside."""
        return torch.autocast(
            self.device_type,
            dtype=self.autocast_dtype,
            enabled=self.autocast_dtype is not None,
            cache_enabled=self.autocast_cache,
        )

    def build_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(
            self.device_type,
            init_scale=self.initial_scale,
            growth_interval=self.scale_growth_interval,
            enabled=self.loss_scaling,
        )

    def promised(self) -> dict[str, torch.dtype]:
        """What the recipe promises of the census, by role; the optimizer promises its states."""
        return {
            "parameters": self.param_dtype,
            "forward": self.forward_dtype,
            "gradients": self.gradient_dtype,
            "loss": torch.float32,
        }


def build_precision(config: PrecisionConfig, *, device: torch.device) -> Precision:
    """The recipe on the device; UserError where it has bf16 and the device would emulate that."""
    param_dtype = torch_dtype(config.param_dtype)
    gradient_dtype = torch_dtype(config.accumulation_dtype or config.param_dtype)
    autocast_dtype = torch_dtype(config.autocast_dtype) if config.autocast_dtype else None
    if torch.bfloat16 in (param_dtype, autocast_dtype) and not config.allow_emulated_bf16:
        _require_native_bf16(device)
    return Precision(
        device_type=device.type,
        param_dtype=param_dtype,
        gradient_dtype=gradient_dtype,
        autocast_dtype=autocast_dtype,
        autocast_cache=config.autocast_cache,
        loss_scaling=config.loss_scaling,
        initial_scale=config.initial_scale,
        scale_growth_interval=config.scale_growth_interval,
    )


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _require_native_bf16(device: torch.device) -> None:
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < NATIVE_BF16_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        have, need = (".".join(map(str, c)) for c in (capability, NATIVE_BF16_CAPABILITY))
        raise UserError(
            f"precision: {name} has no native bf16 (capability {have}, needed {need}); "
            "allowed here: fp32, fp16_amp, or precision.allow_emulated_bf16=true"
        )


@dataclass(frozen=True, kw_only=True)
class TensorCount:
    """How many elements of a dtype play a role, and their bytes."""

    role: str
    dtype: torch.dtype
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Census:
    """What dtypes are in the program; gradients and states come with the first applied step."""

    num_parameters: int
    tensors: tuple[TensorCount, ...]
    state_roles: frozenset[str]

    def dtypes(self, role: str) -> set[torch.dtype]:
        return {row.dtype for row in self.tensors if row.role == role}

    def bytes_per_param(self, roles: Iterable[str]) -> float | None:
        """Bytes per parameter of all tensors in the roles; None if the census has none of them."""
        sizes = [row.bytes for role in roles for row in self.tensors if row.role == role]
        return sum(sizes) / self.num_parameters if sizes else None

    def summary(self) -> str:
        """One line: what dtype plays each role, and the bytes per parameter."""
        roles = dict.fromkeys(row.role for row in self.tensors if row.role != STEP)
        dtypes = (
            f"{role} {'+'.join(sorted(_name(dtype) for dtype in self.dtypes(role)))}"
            for role in roles
        )
        total = self.bytes_per_param(["parameters", "gradients", *self.state_roles])
        return f"census: {', '.join(dtypes)}; {total:g} bytes per parameter"

    def as_record(self) -> dict[str, object]:
        """The `census` of run.json (docs/record.md)."""
        weights = self.bytes_per_param(["parameters"])
        gradients = self.bytes_per_param(["gradients"])
        states = self.bytes_per_param(self.state_roles)
        parts = [weights, gradients, states]
        total = None if None in parts else sum(part for part in parts if part is not None)
        return {
            "bytes_per_param": {
                "weights": weights,
                "gradients": gradients,
                "states": states,
                "total": total,
            },
            "tensors": [
                {
                    "role": row.role,
                    "dtype": _name(row.dtype),
                    "count": row.count,
                    "bytes": row.bytes,
                }
                for row in self.tensors
            ],
        }


def take_census(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    logits: Tensor | None = None,
    loss: Tensor | None = None,
) -> Census:
    """Counts parameters (tied once) and buffers and, given the rest of a step, that as well.

    Call it with the optimizer while the gradients of an applied step are still alive.
    """
    params = list(model.parameters())
    groups: dict[str, list[Tensor]] = {"parameters": [*params], "buffers": [*model.buffers()]}
    states: dict[str, list[Tensor]] = {}
    if optimizer is not None:
        groups["gradients"] = [param.grad for param in params if param.grad is not None]
        for state in optimizer.state.values():
            for role, value in state.items():
                if isinstance(value, Tensor):
                    states.setdefault(role, []).append(value)
    if logits is not None:
        groups["forward"] = [logits]
    if loss is not None:
        groups["loss"] = [loss]
    return Census(
        num_parameters=sum(param.numel() for param in params),
        tensors=tuple(
            count for role, found in {**groups, **states}.items() for count in _count(role, found)
        ),
        state_roles=frozenset(states) - {STEP},
    )


def check_census(census: Census, promised: Mapping[str, torch.dtype]) -> None:
    """Raises CensusError naming the first role that has not just the promised dtype."""
    for role, dtype in promised.items():
        found = census.dtypes(role)
        if found != {dtype}:
            names = ", ".join(sorted(map(str, found))) or "none at all"
            raise CensusError(f"{role} should be {dtype} but are {names}")
    unpromised = census.state_roles - promised.keys()
    if unpromised:
        raise CensusError(f"optimizer state {min(unpromised)!r} was not promised")


def _count(role: str, tensors: Iterable[Tensor]) -> list[TensorCount]:
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors:
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return [
        TensorCount(role=role, dtype=dtype, count=count, bytes=count * dtype.itemsize)
        for dtype, count in counts.items()
    ]
