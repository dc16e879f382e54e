"""AdamW whose parameters and states may each have their own dtype, with Kahan summation.

The constructor and the names of the states are those of torchdistx's AnyPrecisionAdamW, so that it
drops into code written for that one. By default the arithmetic differs: it is done in float32 from
start to end, each buffer is rounded once, when it is stored, and weight decay is part of the
compensated update, where the published order rounds it away in bf16. Kahan summation for bf16
weights: Zamirai et al., "Revisiting BFloat16 Training", arXiv:2010.06192.
"""

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Literal

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from precexp.optim import aten, kernel, published
from precexp.optim.kernel import Batch, Form, Rates

Mode = Literal["default", "packed", "published"]
Implementation = Literal["auto", "native", "triton", "aten"]

MODES = ("default", "packed", "published")
IMPLEMENTATIONS = ("auto", "native", "triton", "aten")

# In float16 squared gradients below 6e-8 are 0, and the update would be divided by eps alone.
_VARIANCE_DTYPES = (torch.float32, torch.bfloat16)
_DTYPES = (*_VARIANCE_DTYPES, torch.float16)

# Above, rounding to nearest keeps a bf16 variance from following gradients that shrink.
SAFE_BETA2 = 0.98

_Carry = Callable[[Form, Batch, Rates], None]


class AnyPrecisionAdamW(Optimizer):
    """AdamW with a dtype for each state and, for 16-bit weights, a compensation buffer.

    Args:
        params: parameters or parameter groups; a group may override every argument below.
        lr: learning rate, at least 0.
        betas: decay rates of momentum and variance, each in [0, 1). A bf16 momentum needs
            beta1 <= 0.95: above, rounding keeps it from following gradients that shrink.
        eps: added to the root of the variance, at least 0.
        weight_decay: decoupled, at least 0.
        use_kahan_summation: keep what rounding takes from each weight and add it to the next
            update. Without it, updates below half a unit in a weight's last place are lost.
        momentum_dtype: of `exp_avg`: float32, bfloat16 or float16.
        variance_dtype: of `exp_avg_sq`: float32 or bfloat16.
        compensation_buffer_dtype: of `compensation`: float32, bfloat16 or float16.
        mode: `default` computes in float32 and rounds once; `published` repeats torchdistx's
            operations bit for bit; `packed` is for bfloat16 weights and variances with Kahan
            summation: its `compensation` is an int16 word of 10 more bits of the weight and 6 more
            of the variance. Without Kahan summation, `packed` is `default`.
        implementation: `native` (compiled C, on a CPU), `triton` (one launch for all tensors, on a
            CUDA GPU), `aten` (torch's operations, anywhere), or `auto`: the device's own where it
            can be had. Under TRITON_INTERPRET=1, triton takes native's place.
        stochastic_rounding: of a bfloat16 variance, and of what the weight's rounding leaves (a
            bfloat16 compensation, the last bit of a packed weight). `auto`: always of the latter,
            of the variance where beta2 > 0.98. The bits are a function of `rounding_seed`, the step
            and the element, so a resumed run has the same ones.
        rounding_seed: at least 0.
        decay: an ablation: `outside` multiplies and rounds the stored weight first, as published.
        weight_rounding: an ablation: `stochastic` rounds a bfloat16 weight without compensation.

    torch's GradScaler works as it does with any optimizer: it does not call a step that it skips.

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
        *,
        mode: Mode = "default",
        implementation: Implementation = "auto",
        stochastic_rounding: bool | Literal["auto"] = "auto",
        rounding_seed: int = 0,
        decay: Literal["inside", "outside"] = "inside",
        weight_rounding: Literal["nearest", "stochastic"] = "nearest",
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
                "mode": mode,
                "implementation": implementation,
                "stochastic_rounding": stochastic_rounding,
                "rounding_seed": rounding_seed,
                "decay": decay,
                "weight_rounding": weight_rounding,
            },
        )

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Adds parameters with options of their own; ValueError for one that is not allowed."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if len(set(group["params"])) != len(group["params"]):
                raise ValueError("params: a parameter is in the group twice; it would step twice")
            _check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise

    # torch.compile would drop the float32 -> bf16 -> float32 of a stored weight, and with it the
    # whole compensation, without a word.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_multiplier: float | Tensor = 1.0,
    ) -> float | None:
        """Updates every parameter that has a gradient; returns the closure's loss.

        Gradients count `grad_multiplier` times, as after a clip, and are left as they are; a 0-dim
        tensor on their device makes no host wait. Raises RuntimeError for a sparse gradient, and
        where the implementation asked for can't be had.
        """
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
        on_gpu = isinstance(grad_multiplier, Tensor) and grad_multiplier.device.type != "cpu"
        multiplier = grad_multiplier if on_gpu else float(grad_multiplier)
        # By what decides on it: parameters of a kind are looked at once, since there are hundreds.
        kinds: dict[tuple[object, ...], Batch] = {}
        batches: dict[tuple[_Carry, Form, Rates, torch.device], Batch] = {}
        for param, grad, group in updates:
            state = self._state_of(param, group)
            state["step"] += 1
            self._num_steps[param] += 1
            if group["mode"] == "published":
                published.adamw_(param, kernel.scaled(grad, multiplier), state, group)
                continue
            buffers = [param, grad, state["exp_avg"], state["exp_avg_sq"]]
            if group["use_kahan_summation"]:
                buffers.append(state["compensation"])
            is_dense = _is_one_dense_layout(buffers)
            kind = (id(group), is_dense, param.device, *[buffer.dtype for buffer in buffers])
            if kind not in kinds:
                form = _form_of(buffers, group)
                rates = Rates(
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    eps=group["eps"],
                    grad_multiplier=multiplier,
                )
                carry = _carry_of(form, buffers, group["implementation"], is_dense=is_dense)
                kinds[kind] = batches.setdefault((carry, form, rates, param.device), Batch())
            _append(kinds[kind], buffers, group, num_steps=self._num_steps[param])
        for (carry, form, rates, _), batch in batches.items():
            carry(form, batch, rates)
        return loss

    def keeps_residual(self, param: Tensor) -> bool:
        """Whether set_residual can be called for the parameter."""
        group = self._group_of(param)
        return group["use_kahan_summation"] and group["mode"] != "published"

    def set_residual(self, param: Tensor, residual: Tensor) -> None:
        """Sets what the parameter lacks: weight before a cast minus weight after it, in any dtype.

        Call it after the cast. ValueError if the parameter has no compensation to hold it.
        """
        group = self._group_of(param)
        if not self.keeps_residual(param):
            raise ValueError(
                "set_residual: needs use_kahan_summation=True, and not mode=published, which "
                "starts from zero"
            )
        if residual.shape != param.shape:
            raise ValueError(
                f"set_residual: the residual's shape is {tuple(residual.shape)}, "
                f"the parameter's {tuple(param.shape)}"
            )
        state = self._state_of(param, group)
        if _is_packed(group):
            residual = _packed(param, residual)
        state["compensation"].copy_(residual.detach())

    @torch.no_grad()
    def master_weights(self) -> list[Tensor]:
        """Weight + compensation as new float32 tensors, in the order of the parameter groups."""
        weights = []
        for group in self.param_groups:
            for param in group["params"]:
                weight = param.detach().to(torch.float32, copy=True)
                compensation = self.state[param].get("compensation")
                if compensation is not None and _is_packed(group):
                    weight = kernel.unpacked_weight(weight, compensation)
                elif compensation is not None and group["use_kahan_summation"]:
                    weight += compensation
                weights.append(weight)
        return weights

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads the state, each tensor in the dtype that it was saved in.

        Learning rates and the like become the saved ones, as in torch; the implementation stays
        this optimizer's. Kahan summation is on where this optimizer or the saved one has it on;
        states that were not saved start from zero, and a compensation is packed where this
        optimizer packs and the saved one did not. Saved states of torch.optim.AdamW and of
        torchdistx load too.
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
            group["implementation"] = old["implementation"]
            if _is_packed(group):
                self._pack(group)

    def _pack(self, group: Mapping) -> None:
        """Packs what a group has loaded as numbers."""
        for param in group["params"]:
            state = self.state[param]
            if "exp_avg_sq" in state:
                state["exp_avg_sq"] = state["exp_avg_sq"].to(torch.bfloat16)
            if "compensation" in state and state["compensation"].dtype is not torch.int16:
                state["compensation"] = _packed(param, state["compensation"])

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._num_steps = {
            param: int(values["step"]) for param, values in self.state.items() if "step" in values
        }

    def _group_of(self, param: Tensor) -> dict:
        for group in self.param_groups:
            if any(own is param for own in group["params"]):
                return group
        raise ValueError("params: the parameter is not one of this optimizer's")

    def _state_of(self, param: Tensor, group: Mapping) -> dict[str, Tensor]:
        """The parameter's state; what is missing, as after an incomplete checkpoint, is created."""
        state = self.state[param]
        if _is_packed(group) and param.dtype != torch.bfloat16:
            raise ValueError(
                f"params: a parameter of {param.dtype} cannot be packed; mode=packed is for "
                "bfloat16"
            )
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            self._num_steps[param] = 0
        dtypes = {"exp_avg": group["momentum_dtype"], "exp_avg_sq": group["variance_dtype"]}
        if group["use_kahan_summation"]:
            dtypes["compensation"] = (
                torch.int16 if _is_packed(group) else group["compensation_buffer_dtype"]
            )
        for key, dtype in dtypes.items():
            if key not in state:
                state[key] = torch.zeros_like(
                    param, dtype=dtype, memory_format=torch.preserve_format
                )
        return state


def _append(batch: Batch, buffers: list[Tensor], group: Mapping, *, num_steps: int) -> None:
    """Adds a parameter that is at its step `num_steps` to the batch."""
    beta1, beta2 = group["betas"]
    param, grad, exp_avg, exp_avg_sq, *compensation = buffers
    batch.params.append(param)
    batch.grads.append(grad)
    batch.exp_avgs.append(exp_avg)
    batch.exp_avg_sqs.append(exp_avg_sq)
    batch.compensations += compensation
    batch.step_sizes.append(group["lr"] / (1 - beta1**num_steps))
    batch.variance_scales.append(1 / math.sqrt(1 - beta2**num_steps))
    batch.decay_rates.append(group["lr"] * group["weight_decay"])
    batch.seeds.append(group["rounding_seed"])
    batch.steps.append(num_steps)


def _form_of(buffers: list[Tensor], group: Mapping) -> Form:
    """The form of the buffers as they are: a loaded state keeps the dtype that it was saved in."""
    param, grad, exp_avg, exp_avg_sq, *rest = (buffer.dtype for buffer in buffers)
    compensation = rest[0] if rest else None
    asked = group["stochastic_rounding"]
    variance_stalls = group["betas"][1] > SAFE_BETA2
    if compensation is None:
        rounds_randomly = group["weight_rounding"] == "stochastic" and param == torch.bfloat16
    else:
        rounds_randomly = bool(asked) and compensation in (torch.bfloat16, torch.int16)
    return Form(
        param=param,
        grad=grad,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        compensation=compensation,
        stochastic_variance=(
            exp_avg_sq == torch.bfloat16
            and compensation is not torch.int16
            and (variance_stalls if asked == "auto" else asked)
        ),
        stochastic_remainder=rounds_randomly,
        decay_outside=group["decay"] == "outside",
    )


def _carry_of(
    form: Form, buffers: list[Tensor], asked: Implementation, *, is_dense: bool
) -> _Carry:
    """Who carries out a step over the buffers of a parameter; `is_dense`: they lie alike."""
    device = buffers[0].device
    compiled = kernel.implementation_on(device)
    _check_implementation(asked, device)  # parameters may have moved since the optimizer was made
    if asked == "aten" or compiled is None or not is_dense:
        return aten.adamw_
    if detect_fake_mode(buffers) is not None:  # nothing is computed, so nothing is compiled
        return kernel.adamw_
    problem = kernel.problem_with(form, device)
    if problem is None:
        return kernel.adamw_
    if asked == compiled:
        raise RuntimeError(f"implementation: {asked} is not possible here: {problem}")
    return aten.adamw_


def _is_one_dense_layout(buffers: list[Tensor]) -> bool:
    """Whether element i in memory is the same element in all buffers, without gaps."""
    first = buffers[0]
    if any(buffer.shape != first.shape for buffer in buffers):
        raise ValueError(
            f"a state of shape {[tuple(buffer.shape) for buffer in buffers[2:]]} is loaded for a "
            f"parameter of shape {tuple(first.shape)}"
        )
    if all(buffer.is_contiguous() for buffer in buffers):
        return True
    return (
        all(buffer.stride() == first.stride() for buffer in buffers)
        and torch._prims_common.is_non_overlapping_and_dense(first)  # type: ignore[attr-defined]
    )


def _is_packed(group: Mapping) -> bool:
    return group["mode"] == "packed" and group["use_kahan_summation"]


def _packed(param: Tensor, residual: Tensor) -> Tensor:
    """The words that hold the residual, and of the variance no more than its bfloat16 has."""
    stored = param.detach().float()
    weight = stored + residual.detach().to(param.device, torch.float32)
    rest = weight.view(torch.int32) + 32 - stored.view(torch.int32)
    return (rest.clamp_(-(2**15), 2**15 - 64) & ~63).to(torch.int16)


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
    for key, allowed in (
        ("mode", MODES),
        ("implementation", IMPLEMENTATIONS),
        ("decay", ("inside", "outside")),
        ("weight_rounding", ("nearest", "stochastic")),
        ("stochastic_rounding", ("auto", True, False)),
    ):
        if group[key] not in allowed:
            raise ValueError(
                f"{key}: {group[key]!r} is not allowed; allowed: {', '.join(map(str, allowed))}"
            )
    seed = group["rounding_seed"]
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"rounding_seed: {seed!r} is not allowed; it must be in [0, 2^63)")
    for key in ("amsgrad", "maximize", "capturable", "differentiable"):  # of a torch checkpoint
        if group.get(key):
            raise ValueError(f"{key}: AnyPrecisionAdamW has no such variant; it must be false")
    if group["use_kahan_summation"] and group["weight_rounding"] == "stochastic":
        raise ValueError(
            "weight_rounding: stochastic is for weights without Kahan summation; allowed: nearest"
        )
    if _is_packed(group) and group["variance_dtype"] != torch.bfloat16:
        raise ValueError(
            f"variance_dtype: {group['variance_dtype']} is not allowed with mode=packed; "
            "allowed: bfloat16"
        )
    for param in group["params"]:
        _check_param(param, group)


def _check_param(param: Tensor, group: Mapping) -> None:
    if param.dtype not in _DTYPES or param.layout != torch.strided:
        raise ValueError(
            f"params: a {param.layout} parameter of {param.dtype} is not allowed; "
            f"allowed: dense ones of {_names(_DTYPES)}"
        )
    if hasattr(param, "placements"):  # a DTensor: its shards would round by bits of their own
        raise ValueError("params: AnyPrecisionAdamW takes no DTensor; it is for one device")
    _check_implementation(group["implementation"], param.device)


def _check_implementation(asked: Implementation, device: torch.device) -> None:
    compiled = kernel.implementation_on(device)
    allowed = ["auto", "aten"] if compiled is None else ["auto", "aten", compiled]
    if asked not in allowed:
        raise ValueError(
            f"implementation: {asked} is not for parameters on {device.type}; "
            f"allowed: {', '.join(allowed)}"
        )


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
