"""AdamW whose parameters and states may each have their own dtype, with Kahan summation.

The constructor and the names of the states are those of torchdistx's AnyPrecisionAdamW, so that it
drops into code written for that one. The arithmetic differs: it is done in float32 from start to
end, each buffer is rounded once, when it is stored, and weight decay is part of the compensated
update, where the published order rounds it away in bf16. Kahan summation for bf16 weights: Zamirai
et al., "Revisiting BFloat16 Training", arXiv:2010.06192.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

# In float16 squared gradients below 6e-8 are 0, and the update would be divided by eps alone.
_VARIANCE_DTYPES = (torch.float32, torch.bfloat16)
_DTYPES = (*_VARIANCE_DTYPES, torch.float16)

# Elements per pass. Temporaries are float32, so this bounds them: on a CPU they stay in its cache,
# on a GPU a pass is long enough to hide its launches.
_CPU_CHUNK = 2**17
_GPU_CHUNK = 2**24


class AnyPrecisionAdamW(Optimizer):
    """AdamW with a dtype for each state and, for 16-bit weights, a compensation buffer.

    Args:
        params: parameters or parameter groups; a group may override every argument below.
        lr: learning rate, at least 0.
        betas: decay rates of momentum and variance, each in [0, 1). A bf16 momentum needs
            beta1 <= 0.95 and a bf16 variance beta2 <= 0.98: above, rounding to nearest keeps them
            from following gradients that shrink.
        eps: added to the root of the variance, at least 0.
        weight_decay: decoupled, at least 0.
        use_kahan_summation: keep what rounding takes from each weight and add it to the next
            update. Without it, updates below half a unit in a weight's last place are lost.
        momentum_dtype: of `exp_avg`: float32, bfloat16 or float16.
        variance_dtype: of `exp_avg_sq`: float32 or bfloat16.
        compensation_buffer_dtype: of `compensation`: float32, bfloat16 or float16.

    Writing to a parameter while `compensation` holds a remainder leaves that remainder in place:
    give the new value with `set_residual(param, zeros)` where it must be exact.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        use_kahan_summation: bool = False,
        momentum_dtype: torch.dtype = torch.float32,
        variance_dtype: torch.dtype = torch.bfloat16,
        compensation_buffer_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        # The step counts as Python numbers beside the tensors in the state: reading those would
        # wait for a GPU that hosts them, and cannot be done at all under fake tensors.
        self._num_steps: dict[Tensor, int] = {}
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "use_kahan_summation": use_kahan_summation,
                "momentum_dtype": momentum_dtype,
                "variance_dtype": variance_dtype,
                "compensation_buffer_dtype": compensation_buffer_dtype,
            },
        )

    def add_param_group(self, param_group: dict[str, object]) -> None:
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    # torch.compile would drop the float32 -> bf16 -> float32 of a stored weight, and with it the
    # whole compensation, without a word.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = [
            (param, param.grad, group)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        for _, grad, _ in updates:  # before the first store: a refused step changes nothing
            if grad.layout != torch.strided:
                raise RuntimeError(
                    "AnyPrecisionAdamW takes no sparse gradients; give the embedding sparse=False"
                )
        for param, grad, group in updates:
            self._update(param, grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: Mapping) -> None:
        state = self._state_of(param, group)
        state["step"] += 1
        self._num_steps[param] += 1
        tensors = [param, grad, state["exp_avg"], state["exp_avg_sq"]]
        if group["use_kahan_summation"]:
            tensors.append(state["compensation"])
        beta1, beta2 = group["betas"]
        num_steps = self._num_steps[param]
        for parts in _chunks(tensors):
            _adamw(
                *parts,
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                decay=1 - group["lr"] * group["weight_decay"],
                step_size=group["lr"] / (1 - beta1**num_steps),
                variance_scale=1 / math.sqrt(1 - beta2**num_steps),
            )

    def set_residual(self, param: Tensor, residual: Tensor) -> None:
        """Sets what the parameter lacks: weight before a cast minus weight after it, in any dtype.

        ValueError if the parameter has no compensation to hold it.
        """
        group = next((g for g in self.param_groups if any(p is param for p in g["params"])), None)
        if group is None:
            raise ValueError("set_residual: the parameter is not one of this optimizer's")
        if not group["use_kahan_summation"]:
            raise ValueError("set_residual: needs use_kahan_summation=True")
        if residual.shape != param.shape:
            raise ValueError(
                f"set_residual: the residual's shape is {tuple(residual.shape)}, "
                f"the parameter's {tuple(param.shape)}"
            )
        self._state_of(param, group)["compensation"].copy_(residual.detach())

    @torch.no_grad()
    def master_weights(self) -> list[Tensor]:
        """Weight + compensation as new float32 tensors, in the order of the parameter groups."""
        weights = []
        for group in self.param_groups:
            for param in group["params"]:
                weight = param.detach().to(torch.float32, copy=True)
                if group["use_kahan_summation"] and "compensation" in self.state[param]:
                    weight += self.state[param]["compensation"]
                weights.append(weight)
        return weights

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads the state, each tensor in the dtype that it was saved in.

        Learning rates and the like become the saved ones, as in torch. Kahan summation is on where
        this optimizer or the saved one has it on; states that were not saved start from zero. Saved
        states of torch.optim.AdamW load too.
        """
        before = self.param_groups
        for group, saved in zip(before, state_dict["param_groups"], strict=False):
            _check_group({**group, **saved, "params": group["params"]})
        # torch casts every state to its parameter's dtype. What it was given, after the hooks of
        # others, is seen by a hook that runs last, and put back.
        given: StateDict = {}
        hook = self.register_load_state_dict_pre_hook(lambda _, last: given.update(last))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        saved_ids = chain.from_iterable(group["params"] for group in given["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, param in zip(saved_ids, params, strict=True):
            for key, value in given["state"].get(saved_id, {}).items():
                if key == "step":
                    value = torch.as_tensor(value, dtype=torch.float32, device="cpu")
                elif isinstance(value, Tensor):
                    value = value.to(param.device)
                self.state[param][key] = value
        for group, old in zip(self.param_groups, before, strict=True):
            for key, value in old.items():
                group.setdefault(key, value)
            group["use_kahan_summation"] |= old["use_kahan_summation"]

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._num_steps = {
            param: int(values["step"]) for param, values in self.state.items() if "step" in values
        }

    def _state_of(self, param: Tensor, group: Mapping) -> dict[str, Tensor]:
        """The parameter's state; what is missing, as after an incomplete checkpoint, is created."""
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            self._num_steps[param] = 0
        dtypes = {"exp_avg": group["momentum_dtype"], "exp_avg_sq": group["variance_dtype"]}
        if group["use_kahan_summation"]:
            dtypes["compensation"] = group["compensation_buffer_dtype"]
        for key, dtype in dtypes.items():
            if key not in state:
                state[key] = torch.zeros_like(
                    param, dtype=dtype, memory_format=torch.preserve_format
                )
        return state


def _adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    compensation: Tensor | None = None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    step_size: float,
    variance_scale: float,
) -> None:
    """One AdamW update in float32, in place; every tensor is rounded to its own dtype once.

    `.float()` of a float32 tensor is that tensor: then the arithmetic happens in place and the
    `copy_` that stores the result does nothing.
    """
    grad = grad.float()
    momentum = exp_avg.float().lerp_(grad, 1 - beta1)
    variance = exp_avg_sq.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    exp_avg.copy_(momentum)
    exp_avg_sq.copy_(variance)
    denominator = variance.sqrt().mul_(variance_scale).add_(eps)
    weight = param.float() if compensation is None else param.float() + compensation
    weight.mul_(decay).addcdiv_(momentum, denominator, value=-step_size)
    param.copy_(weight)
    if compensation is not None:
        compensation.copy_(weight.sub_(param))


def _chunks(tensors: list[Tensor]) -> Iterator[list[Tensor] | tuple[Tensor, ...]]:
    """Matching pieces of tensors of one shape, so that float32 temporaries stay small."""
    size = _CPU_CHUNK if tensors[0].device.type == "cpu" else _GPU_CHUNK
    if tensors[0].numel() <= size or not all(tensor.is_contiguous() for tensor in tensors):
        return iter([tensors])
    return zip(*(tensor.view(-1).split(size) for tensor in tensors), strict=True)


def _check_group(group: Mapping) -> None:
    """ValueError naming the first value of a parameter group that is not allowed."""
    for key in ("lr", "eps", "weight_decay"):
        value = group[key]
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{key}: {value!r} is not allowed; it must be a number, at least 0")
    betas = group["betas"]
    if len(betas) != 2 or not all(isinstance(b, int | float) and 0 <= b < 1 for b in betas):
        raise ValueError(f"betas: {betas!r} is not allowed; it must be two numbers in [0, 1)")
    for key, allowed in (
        ("momentum_dtype", _DTYPES),
        ("variance_dtype", _VARIANCE_DTYPES),
        ("compensation_buffer_dtype", _DTYPES),
    ):
        if group[key] not in allowed:
            raise ValueError(f"{key}: {group[key]} is not allowed; allowed: {_names(allowed)}")
    for key in ("amsgrad", "maximize", "capturable", "differentiable"):  # of a torch checkpoint
        if group.get(key):
            raise ValueError(f"{key}: AnyPrecisionAdamW has no such variant; it must be false")
    for param in group["params"]:
        if param.dtype not in _DTYPES or param.layout != torch.strided:
            raise ValueError(
                f"params: a {param.layout} parameter of {param.dtype} is not allowed; "
                f"allowed: dense ones of {_names(_DTYPES)}"
            )


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
