"""What a real run takes: asked of the allocator, and of a trace for what it was.

After the last step, outside every timing, two more training steps run: one unobserved, whose peaks
the allocator tells, and one traced, which says what the peak is made of. By then the optimizer has
its states; in a first step it makes them.
"""

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precexp.config import RunConfig
from precexp.memory.trace import PHASES, ROUNDING, Timeline, Trace
from precexp.precision import Precision
from precexp.train import training_step

_MARK = "precexp phase: "

_Step = Callable[[Callable[[str], None]], None]  # a step that tells its phases


@dataclass(frozen=True, kw_only=True)
class Start:
    """What was allocated before a run began, on CUDA by earlier runs of the process."""

    device: torch.device
    baseline_bytes: int | None  # None on a CPU, where it is not known


def start(device: torch.device) -> Start:
    """Forgets the peaks of earlier runs of this process."""
    if device.type != "cuda":
        return Start(device=device, baseline_bytes=None)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return Start(device=device, baseline_bytes=torch.cuda.memory_allocated(device))


def held_bytes(
    begun: Start,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    inputs: Sequence[Tensor] = (),
) -> int:
    """What a run holds: on CUDA allocated since the start, on a CPU what its tensors take."""
    if begun.baseline_bytes is not None:
        return torch.cuda.memory_allocated(begun.device) - begun.baseline_bytes
    params = list(model.parameters())
    states = _states(optimizer)
    return _storage_bytes([*params, *(p.grad for p in params), *model.buffers(), *states, *inputs])


def model_bytes(begun: Start, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> int:
    """What a run holds but for the optimizer's states: some are made when the model is placed."""
    return held_bytes(begun, model, optimizer) - _storage_bytes(_states(optimizer))


def _states(optimizer: torch.optim.Optimizer) -> list[object]:
    return [value for state in optimizer.state.values() for value in state.values()]


def _storage_bytes(tensors: Iterable[object]) -> int:
    """Of the storages under the tensors, each once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, Tensor)
    }
    return sum(storages.values())


def measure(
    begun: Start,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    scaler: torch.amp.GradScaler,
    config: RunConfig,
    *,
    after_init: int,
) -> dict[str, object]:
    """The `memory.measured` of run.json (docs/record.md). The model is of no use afterwards."""
    device = begun.device
    batch = torch.zeros((config.train.batch_size, config.data.block_size), dtype=torch.int64)
    batches = [batch] * config.train.grad_accumulation

    def step(on_phase: Callable[[str], None]) -> None:
        training_step(
            model,
            optimizer,
            batches,
            precision,
            scaler,
            max_grad_norm=config.train.max_grad_norm,
            on_phase=on_phase,
        )
        on_phase("")
        optimizer.zero_grad(set_to_none=True)

    optimizer.zero_grad(set_to_none=True)
    run_peak = _run_peak(begun)
    steady = held_bytes(begun, model, optimizer, [batch])
    phases = step_peaks(begun, step, before=steady)
    peak = max(phases.values())
    timeline = trace_step(step, model, optimizer, [batch], tokens=batch.numel())
    categories = {str(key): num_bytes for key, num_bytes in timeline.categories.items()}
    return {
        "peak_bytes": peak,
        "peak_phase": next(phase for phase in phases if phases[phase] == peak),
        "phases": phases,
        "steady_bytes": steady,
        "categories": {**categories, "unattributed": peak - sum(categories.values())},
        "bytes_per_param": None,
        "largest": [vars(each) for each in timeline.largest],
        "closed_form_bytes": None,
        "unseen": None,
        "baseline_bytes": begun.baseline_bytes,
        "init_bytes": after_init,
        "train_alloc_delta_bytes": steady - after_init,
        "train_peaked_delta_bytes": peak - steady,
        "allocated_bytes": steady,
        "reserved_bytes": torch.cuda.memory_reserved(device) if device.type == "cuda" else None,
        "process_bytes": _process_bytes(device),
        "run_peak_bytes": run_peak,
    }


def trace_step(
    step: _Step,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    inputs: Iterable[Tensor],
    *,
    tokens: int,
) -> Timeline:
    """Runs a step of real tensors under a trace."""
    device = next(model.parameters()).device
    trace = Trace(rounding=ROUNDING[device.type], host_scalars=device.type == "cuda")
    trace.watch_roots(model, optimizer, inputs)
    with trace.hooks(model, vocab_size=model.config.vocab_size, tokens=tokens), trace:
        step(trace.phase)  # type: ignore[arg-type]
    trace.tag_states(model, optimizer)
    return trace.replay()


def step_peaks(begun: Start, step: _Step, *, before: int) -> dict[str, int]:
    """The allocator's peaks in each phase of a step, in bytes above the baseline.

    `before` is what is held when the step begins.
    """
    if begun.baseline_bytes is None:
        return {phase: before + above for phase, above in _cpu_peaks(step).items()}
    return _cuda_peaks(begun.device, begun.baseline_bytes, step)


def _cpu_peaks(step: _Step) -> dict[str, int]:
    """In bytes above what there is before the step.

    From the events of torch's profiler, so every allocation counts, also one inside an operation.
    """
    marks: list[torch.profiler.record_function] = []

    def on_phase(name: str) -> None:
        if marks:
            marks[-1].__exit__(None, None, None)
        marks.append(torch.profiler.record_function(f"{_MARK}{name}"))
        marks[-1].__enter__()

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step(on_phase)
        marks[-1].__exit__(None, None, None)
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted(results.events(), key=lambda event: event.start_ns())
    allocated, phase = 0, ""
    peaks: dict[str, int] = {}
    for event in events:
        if event.name().startswith(_MARK):
            phase = event.name().removeprefix(_MARK)
            peaks[phase] = max(peaks.get(phase, allocated), allocated)
        elif event.name() == "[memory]":
            allocated += event.nbytes()
            peaks[phase] = max(peaks.get(phase, allocated), allocated)
    return {phase: peaks[phase] for phase in PHASES}


def _cuda_peaks(device: torch.device, baseline_bytes: int, step: _Step) -> dict[str, int]:
    """The host waits for nothing: the allocator counts when memory is asked for."""
    peaks: dict[str, int] = {}
    current = ""

    def on_phase(name: str) -> None:
        nonlocal current
        peak = torch.cuda.max_memory_allocated(device) - baseline_bytes
        peaks[current] = max(peaks.get(current, 0), peak)
        torch.cuda.reset_peak_memory_stats(device)
        current = name

    torch.cuda.reset_peak_memory_stats(device)
    step(on_phase)
    return {phase: peaks[phase] for phase in PHASES}


def _run_peak(begun: Start) -> int | None:
    """The most that the run has had allocated, evaluations included."""
    if begun.baseline_bytes is None:
        return None
    return torch.cuda.max_memory_allocated(begun.device) - begun.baseline_bytes


def _process_bytes(device: torch.device) -> int | None:
    """What nvidia-smi shows for this process; None on a CPU and without nvidia-ml-py."""
    if device.type != "cuda":
        return None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:  # each driver has errors of its own, and the number is only nice to have
        return None
    return next((p.usedGpuMemory for p in processes if p.pid == os.getpid()), None)
