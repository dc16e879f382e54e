"""Follows every storage of a training step from its birth to its death, and says what a peak holds.

The step runs as it is; a dispatch mode writes down each storage that an operation makes and when it
goes, and the log is replayed afterwards, when it is known what each storage was for. It works for
real tensors and for fake ones, which have no memory: the same trace measures and plans.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from precexp.train import Phase

Category = Literal[
    "weights",
    "gradients",
    "optimizer_state",
    "activations",
    "autocast_copies",
    "loss",
    "inputs",
    "temporaries",
    "buffers",
]
CATEGORIES: tuple[Category, ...] = Category.__args__  # type: ignore[attr-defined]
PHASES: tuple[Phase, ...] = Phase.__args__  # type: ignore[attr-defined]

ROUNDING = {"cuda": 512, "cpu": 1}  # bytes: a storage takes a multiple of them, by device type

_aten = torch.ops.aten


@dataclass(eq=False)
class Storage:
    """A piece of memory that tensors share."""

    num_bytes: int  # as the allocator rounds them
    shape: tuple[int, ...]  # of the first tensor in it
    dtype: torch.dtype
    origin: str
    category: Category | None = None  # None: a temporary, as far as is known
    ignored: bool = False  # on another device in a run on the planned one
    replaces: "Storage | None" = None  # a gradient that autograd, unobserved, would add to in place


@dataclass(frozen=True, kw_only=True)
class LargeTensor:
    """Tensors of one kind that are alive at a peak."""

    origin: str
    category: Category
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int  # of all of them


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What the replay of a trace comes to. All in bytes."""

    peak_bytes: int
    peak_phase: str
    phases: Mapping[str, int]  # the peak in each
    steady_bytes: int  # between steps
    categories: Mapping[Category, int]  # at the peak; they sum to it
    phase_categories: Mapping[str, Mapping[Category, int]]  # at each phase's peak
    steady_categories: Mapping[Category, int]  # between steps
    largest: Sequence[LargeTensor]  # at the peak


class Trace(TorchDispatchMode):
    """Logs the storages of one device. Enter it around steps that report their phases to `phase`.

    `rounding`: storages take a multiple of so many bytes (512 on CUDA, 1 on a CPU). `host_scalars`:
    0-dim optimizer states do not count, as those of a run on a GPU that keeps them on the host.
    `scratch` gives the bytes that an operation takes while it runs, beyond what it returns.
    """

    def __init__(
        self,
        *,
        rounding: int,
        host_scalars: bool,
        scratch: Callable[[object, Sequence[object], Mapping[str, object]], int] | None = None,
    ) -> None:
        super().__init__()
        self._rounding = rounding
        self._host_scalars = host_scalars
        self._scratch = scratch
        self._device: torch.device | None = None
        self._alive: dict[int, tuple[Storage, weakref.ref]] = {}
        self._before: list[Storage] = []
        self._log: list[tuple[str, Storage | str]] = []  # birth, death or phase
        self._phase = ""
        self._born_forward: dict[int, Storage] = {}
        self._modules: list[str] = []
        self._params: dict[int, str] = {}  # storages of the parameters
        self._loss_shape: tuple[int, int] | None = None  # elements of logits, vocabulary

    # What is known beforehand

    def watch_roots(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Iterable[Tensor]
    ) -> None:
        """Counts what is there before the step."""
        for name, param in model.named_parameters():
            self._device = self._device or param.device
            storage = self._found(param, name)
            storage.category = "weights"
            self._params[id(param.untyped_storage())] = name
            if param.grad is not None:
                self._found(param.grad, f"gradient of {name}").category = "gradients"
        for name, buffer in model.named_buffers():
            self._found(buffer, name).category = "buffers"
        for batch in inputs:
            if batch.device == self._device:
                self._found(batch, "token ids").category = "inputs"
        self.tag_states(model, optimizer)

    def tag_states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Marks the states of the optimizer; call it after a step."""
        names = {id(param): name for name, param in model.named_parameters()}
        for group in optimizer.param_groups:
            for param in group["params"]:
                for key, value in optimizer.state.get(param, {}).items():
                    if not isinstance(value, Tensor) or value.device != self._device:
                        continue
                    storage = self._found(value, f"{key} of {names.get(id(param), '?')}")
                    if value.ndim or key != "step":
                        storage.category = "optimizer_state"
                    else:  # a counter
                        storage.category = "buffers"
                        storage.ignored = self._host_scalars and not group.get("fused")

    @contextmanager
    def hooks(self, model: nn.Module, *, vocab_size: int, tokens: int) -> Iterator[None]:
        """While it lasts, names the modules at work and marks gradients as they come."""
        self._loss_shape = (vocab_size * tokens, vocab_size)
        handles = []
        for name, module in model.named_modules():
            handles += [
                module.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name)),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        for name, param in model.named_parameters():
            if param.requires_grad:
                handles.append(
                    param.register_post_accumulate_grad_hook(
                        lambda param, name=name: self._tag_gradient(param, name)
                    )
                )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def phase(self, name: str) -> None:
        """A phase begins; an empty name is the time between steps."""
        if name != "forward" and self._phase == "forward":
            for storage in self._born_forward.values():  # what outlives the forward pass
                storage.category = storage.category or "activations"
            self._born_forward.clear()
        self._phase = name
        self._log.append(("phase", name))

    # What happens

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if self._scratch is not None and (scratch := self._scratch(func, args, kwargs)):
            storage = Storage(scratch, (scratch,), torch.uint8, f"{func} at work")
            self._log += [("birth", storage), ("death", storage)]
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device == self._device:
                self._see(tensor, func, args)
        return result

    def _see(self, tensor: Tensor, func: object, args: Sequence[object]) -> None:
        raw = tensor.untyped_storage()
        if id(raw) in self._alive or raw.nbytes() == 0:
            return
        where = self._modules[-1] if self._modules else ""
        storage = self._add(raw, tensor, f"{func}{f' in {where}' if where else ''}")
        if self._is_logits(tensor):
            storage.category = "loss"
        if self._phase == "forward":
            if func is _aten._to_copy.default and self._is_param(args[0]):
                storage.category = "autocast_copies"
                storage.origin = f"copy of {self._params[id(args[0].untyped_storage())]}"  # type: ignore[union-attr]
            self._born_forward[id(raw)] = storage
        if self._phase == "backward" and func is _aten.add.Tensor and not torch.is_grad_enabled():
            storage.replaces = self._accumulated(tensor, args[0])
        self._log.append(("birth", storage))

    def _accumulated(self, total: Tensor, old: object) -> Storage | None:
        """What `total` is the new value of, if autograd adds it up in place when unobserved.

        A dispatch mode turns that off. A view is never added to in place.
        """
        if (
            isinstance(old, Tensor)
            and old.shape == total.shape
            and old.dtype == total.dtype
            and not old._is_view()
        ):
            entry = self._alive.get(id(old.untyped_storage()))
            return entry[0] if entry else None
        return None

    def _is_param(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and id(tensor.untyped_storage()) in self._params

    def _is_logits(self, tensor: Tensor) -> bool:
        if self._loss_shape is None or self._phase == "step":
            return False
        return tensor.ndim > 1 and (tensor.numel(), tensor.shape[-1]) == self._loss_shape

    def _found(self, tensor: Tensor, origin: str) -> Storage:
        """The storage of a tensor that is there, first seen or not, under its name."""
        raw = tensor.untyped_storage()
        if id(raw) in self._alive:
            storage, _ = self._alive[id(raw)]
            storage.origin, storage.shape = origin, tuple(tensor.shape)
            return storage
        storage = self._add(raw, tensor, origin)
        self._before.append(storage)
        return storage

    def _add(self, raw: torch.UntypedStorage, tensor: Tensor, origin: str) -> Storage:
        size = -(-raw.nbytes() // self._rounding) * self._rounding
        storage = Storage(size, tuple(tensor.shape), tensor.dtype, origin)
        key = id(raw)

        def die(_: weakref.ref) -> None:
            del self._alive[key]
            self._born_forward.pop(key, None)
            self._params.pop(key, None)
            self._log.append(("death", storage))

        self._alive[key] = (storage, weakref.ref(raw, die))
        return storage

    def _tag_gradient(self, param: Tensor, name: str) -> None:
        assert param.grad is not None
        self._found(param.grad, f"gradient of {name}").category = "gradients"

    def _leave(self, *_: object) -> None:
        self._modules.pop()

    # What it comes to

    def replay(self, *, num_largest: int = 10) -> Timeline:
        """The trace with what is known of each storage by now."""
        allocated = 0
        peak_places: dict[str, tuple[int, int]] = {}  # by phase: bytes, place in the events
        events = list(self._events())
        for place, (phase, sign, storage) in enumerate(events):
            allocated += sign * storage.num_bytes
            if phase not in peak_places or allocated > peak_places[phase][0]:
                peak_places[phase] = (allocated, place)
        held = {phase: _held(events[: place + 1]) for phase, (_, place) in peak_places.items()}
        phases = {phase: peak_places[phase][0] for phase in PHASES if phase in peak_places}
        peak = max(phases.values())
        peak_phase = next(phase for phase, num_bytes in phases.items() if num_bytes == peak)
        return Timeline(
            peak_bytes=peak,
            peak_phase=peak_phase,
            phases=phases,
            steady_bytes=allocated,
            categories=_by_category(held[peak_phase]),
            phase_categories={phase: _by_category(held[phase]) for phase in phases},
            steady_categories=_by_category(_held(events)),
            largest=_largest(held[peak_phase], num_largest),
        )

    def _events(self) -> Iterator[tuple[str, int, Storage]]:
        """Phase, +1 for a birth or -1 for a death, storage; in-place accumulation restored."""
        for storage in self._before:
            if not storage.ignored:
                yield "", 1, storage
        phase = ""
        replaced: set[Storage] = set()
        for place, (kind, what) in enumerate(self._log):
            if isinstance(what, str):
                phase = what
            elif what.ignored or (kind == "death" and what in replaced):
                continue
            elif kind == "death":
                yield phase, -1, what
            else:
                old = what.replaces
                if old is not None and self._dies_before_next_birth(old, place):
                    replaced.add(old)
                    yield phase, -1, old
                yield phase, 1, what

    def _dies_before_next_birth(self, storage: Storage, place: int) -> bool:
        for kind, what in self._log[place + 1 :]:
            if kind == "birth":
                return False
            if kind == "death" and what is storage:
                return True
        return False


def _held(events: Iterable[tuple[str, int, Storage]]) -> set[Storage]:
    held: set[Storage] = set()
    for _, sign, storage in events:
        if sign > 0:
            held.add(storage)
        else:
            held.discard(storage)
    return held


def _by_category(held: Iterable[Storage]) -> dict[Category, int]:
    totals = dict.fromkeys(CATEGORIES, 0)
    for storage in held:
        totals[storage.category or "temporaries"] += storage.num_bytes
    return totals


def _largest(held: Iterable[Storage], count: int) -> list[LargeTensor]:
    kinds: dict[tuple, list[Storage]] = defaultdict(list)
    for each in held:
        kinds[each.origin, each.category or "temporaries", each.shape, each.dtype].append(each)
    found = [
        LargeTensor(
            origin=origin,
            category=category,
            shape=shape,
            dtype=str(dtype).removeprefix("torch."),
            count=len(storages),
            bytes=sum(storage.num_bytes for storage in storages),
        )
        for (origin, category, shape, dtype), storages in kinds.items()
    ]
    return sorted(found, key=lambda each: -each.bytes)[:count]
