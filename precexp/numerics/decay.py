"""How much of the weight decay a step stores: the step done again on the sample, with and without.

What a step made of its decay cannot be read from the weights: the gradient's part is hundreds of
times as large and rounds with it. So the run's own optimizer takes the step twice on copies of the
sampled weights, states and gradients, with the same random bits, once with weight_decay = 0. What
differs between the two is the decay that was stored.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from precexp.numerics.arithmetic import Arithmetic, true_weight

# Of decay_kept: where one standard deviation is more than this, it is not measured.
MOST_NOISE = 0.25


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the optimizer as the sample sees it, all `[n]`: what it is given."""

    weight: Tensor
    grad: Tensor
    states: Mapping[str, Tensor]  # stored, without the step counter; empty before the first
    num_steps: int  # taken before
    group: Mapping  # the optimizer's options


def stored_difference(kind: type[torch.optim.Optimizer], step: Step) -> Tensor:
    """What the decay changes in weight + compensation (float64 `[n]`), by taking the step twice."""
    with_decay = _taken(kind, step, weight_decay=step.group["weight_decay"])
    return with_decay - _taken(kind, step, weight_decay=0.0)


def noise(arithmetic: Arithmetic, *, rate: float, count: int) -> float:
    """The standard deviation of decay_kept with so many weights that lose lr x weight_decay.

    Of weights that lie q |w| apart, a share r / q moves by q |w| where chance, be it that of the
    other part of the update, decides: sqrt(q / (r n)). Outside the update none does.
    """
    if arithmetic.decay_outside:
        return 0.0
    spacing = 2.0 ** (1 - arithmetic.master_bits)
    return math.sqrt(spacing / (rate * count))


def _taken(kind: type[torch.optim.Optimizer], step: Step, *, weight_decay: float) -> Tensor:
    """Weight + compensation after the step, float64 `[n]`."""
    param = nn.Parameter(step.weight.clone())
    if step.grad.dtype != param.dtype:
        param.grad_dtype = step.grad.dtype
    param.grad = step.grad
    names = inspect.signature(kind).parameters
    options = {k: v for k, v in step.group.items() if k in names and k != "params"}
    twin = kind([param], **{**options, "weight_decay": weight_decay})  # type: ignore[call-arg]
    if step.states:
        state = {name: tensor.clone() for name, tensor in step.states.items()}
        state["step"] = torch.tensor(float(step.num_steps))
        twin.load_state_dict({**twin.state_dict(), "state": {0: state}})
    twin.step()
    return true_weight(param.detach(), twin.state[param].get("compensation"))
