"""The fixed sample of a model's parameters that every probe reads, by kind of parameter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

KINDS = ("embedding", "attention", "mlp", "norm", "bias")

MOST_PER_KIND = 16_384  # elements: a fraction is then known to 0.004, one standard deviation

_STREAM = 7_0001  # beside the seed, so that no other generator of the run has these numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """A parameter's part of the sample."""

    param: nn.Parameter
    kind: str
    places: Tensor  # int64 [n], of the elements in the flattened parameter; on its device
    where: slice  # of the elements in the sample
    is_whole: bool  # all elements of the parameter are in it
    weight: float  # the kind's number of parameters over that of its elements in the sample

    @property
    def count(self) -> int:
        return self.where.stop - self.where.start

    def pick(self, tensor: Tensor) -> Tensor:
        """The sampled elements of a tensor of the parameter's shape, `[n]`; it may be a view."""
        if self.is_whole and tensor.ndim == 1:  # most sites: at each step, even a view would count
            return tensor
        if not tensor.is_contiguous():  # reshaped, it would be copied whole
            return torch.take(tensor, self.places)
        flat = tensor.view(-1)
        return flat if self.is_whole else flat.index_select(0, self.places)


def kinds_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """The kind of each parameter, tied ones once.

    `embedding`: of an embedding, be it tied to the output, and an output head of its own.
    `bias`: what is called so, that of a norm too. `norm`: the rest of what a module with norm in
    its class's name holds. `attention`: what is below a module with attention or attn in its name.
    `mlp`: all else, so too what an unknown architecture has besides.
    """
    output = getattr(model, "get_output_embeddings", lambda: None)()
    kinds: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            kind = _kind_of(path.lower(), name, module, param, is_output=module is output)
            if kinds.get(param) != "embedding":  # the head's, where the two are tied
                kinds[param] = kind
    return kinds


def _kind_of(path: str, name: str, module: nn.Module, param: Tensor, *, is_output: bool) -> str:
    if param.ndim < 2 and name.lower().endswith("bias"):
        return "bias"
    class_name = type(module).__name__.lower()
    if is_output or "embedding" in class_name:
        return "embedding"
    if "norm" in class_name or (param.ndim < 2 and "norm" in path.rpartition(".")[2]):
        return "norm"
    if "attn" in path or "attention" in path or "attention" in class_name:
        return "attention"
    return "mlp"


def draw_sample(
    model: nn.Module,
    params: Iterable[nn.Parameter],
    *,
    seed: int,
    most_per_kind: int = MOST_PER_KIND,
) -> list[Site]:
    """The sites of a sample of the parameters, kind after kind.

    Of each kind it has at most so many elements, drawn evenly and without replacement from a
    generator of its own: all global random states stay as they are.
    """
    own = set(params)
    kinds = {param: kind for param, kind in kinds_of(model).items() if param in own}
    random = np.random.default_rng([seed, _STREAM])
    sites: list[Site] = []
    start = 0
    for kind in KINDS:
        members = [param for param, own_kind in kinds.items() if own_kind == kind]
        total = sum(param.numel() for param in members)
        count = min(total, most_per_kind)
        drawn = np.empty(0, np.int64)
        if total:
            drawn = np.sort(random.choice(total, count, replace=False, shuffle=False))
        for param, places in zip(members, _split(drawn, members), strict=True):
            if len(places):
                sites.append(
                    Site(
                        param=param,
                        kind=kind,
                        places=torch.from_numpy(places).to(param.device),
                        where=slice(start, start + len(places)),
                        is_whole=len(places) == param.numel(),
                        weight=total / count,
                    )
                )
                start += len(places)
    return sites


def _split(drawn: np.ndarray, members: Sequence[Tensor]) -> list[np.ndarray]:
    """Sorted places in all members after one another, as places in each."""
    ends = np.cumsum([member.numel() for member in members])
    starts = ends - [member.numel() for member in members]
    cuts = np.searchsorted(drawn, ends[:-1]) if len(members) else []
    parts = np.split(drawn, cuts)
    return [part - start for part, start in zip(parts, starts, strict=False)]
