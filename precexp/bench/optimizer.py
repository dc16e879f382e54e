"""What a step of each optimizer costs on the shapes of a model: time, memory, state.

The candidates are interleaved over the rounds. The floor is the time of the memory traffic alone of
a bf16 step with compensation (18 bytes per parameter), probed in the same rounds: on a CPU the
step's own reads and writes, on a GPU a copy. Where libraries with optimizers of their own are
installed (torch-optimi, torchao, flashoptim), they are among the candidates. Those that need
another device have a row of nulls.
"""

import csv
import ctypes
import functools
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from precexp import environment
from precexp.model import read_model_config
from precexp.optim import AnyPrecisionAdamW, native
from precexp.sweep import PlannedRun

ROUNDS = 3
STEPS = 5  # timed, of each candidate in each round
FLOOR = "floor: traffic alone"
FUSED = "torch AdamW fp32 fused"
FLOOR_SOURCE = Path(__file__).with_name("floor.c")
LR, BETAS, DECAY = 1e-4, (0.9, 0.95), 0.1

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class OptimizerResult:
    """A row of the CSV. null: not measured."""

    name: str
    step_seconds_median: float | None = None
    step_seconds_least: float | None = None
    ratio_to_floor: float | None = None
    ratio_to_fused_fp32: float | None = None
    peak_extra_bytes: int | None = None  # during a step, above before it
    state_bytes_per_param: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    name: str
    dtype: torch.dtype  # of parameters and gradients
    build: Build
    devices: tuple[str, ...] = ("cpu", "cuda")


def bench(
    planned: PlannedRun, *, device: torch.device, rounds: int, threads: int, output: Path | None
) -> list[OptimizerResult]:
    """Measures, prints and, given `output`, writes the results as CSV."""
    torch.set_num_threads(threads)
    shapes = _shapes(planned)
    candidates = [each for each in _candidates() if device.type in each.devices]
    seconds: dict[str, list[float]] = {name: [] for name in (FLOOR, *(c.name for c in candidates))}
    tensors = {
        dtype: _parameters(shapes, dtype, device) for dtype in (torch.bfloat16, torch.float32)
    }
    extra: dict[str, int | None] = {}
    states: dict[str, float] = {}
    for _ in track(range(rounds), description="timing", transient=True):
        seconds[FLOOR] += _floor_seconds(tensors[torch.bfloat16], threads)
        for each in candidates:
            optimizer = each.build(tensors[each.dtype])
            optimizer.step()
            seconds[each.name] += [_seconds(optimizer.step, device) for _ in range(STEPS)]
            states[each.name] = _state_bytes(optimizer) / _count(tensors[each.dtype])
            del optimizer
    # Else a peak would not show in what is resident. After the timing, since it slows steps down.
    environment.set_malloc(mmap_threshold=2**16, trim_threshold=0)
    for each in candidates:
        optimizer = each.build(tensors[each.dtype])
        optimizer.step()
        extra[each.name] = _peak_extra_bytes(optimizer.step, device)
        del optimizer
    results = [
        *_results(seconds, extra, states),
        *(OptimizerResult(name=each.name) for each in _candidates() if each not in candidates),
    ]
    where = f"{threads} thread(s)" if device.type == "cpu" else torch.cuda.get_device_name(device)
    Console().print(_table(results, f"{planned.config.model.name}, {where}"))
    if output is not None:
        with output.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(OptimizerResult)])
            writer.writeheader()
            writer.writerows(asdict(result) for result in results)
    return results


@functools.cache
def _candidates() -> list[_Candidate]:
    bf16, fp32 = torch.bfloat16, torch.float32
    candidates = [
        _Candidate(
            name=f"{mode} bf16 {implementation}",
            dtype=bf16,
            build=functools.partial(_build_any_precision, mode=mode, implementation=implementation),
            devices=devices,
        )
        for implementation, devices in (
            ("native", ("cpu",)),
            ("triton", ("cuda",)),
            ("aten", ("cpu", "cuda")),
        )
        for mode in ("default", "packed")
    ]
    published = functools.partial(_build_any_precision, mode="published", implementation="aten")
    candidates.append(_Candidate(name="published bf16", dtype=bf16, build=published))
    for dtype, label in ((fp32, "fp32"), (bf16, "bf16")):
        for kind in ("fused", "foreach", "loop"):
            build = functools.partial(_build_torch, kind=kind)
            name = f"torch AdamW {label} {kind}"
            candidates.append(_Candidate(name=name, dtype=dtype, build=build))
    if importlib.util.find_spec("optimi"):
        for kind in ("loop", "foreach"):
            build = functools.partial(_build_optimi, foreach=kind == "foreach")
            name = f"optimi AdamW bf16 Kahan {kind}"
            candidates.append(_Candidate(name=name, dtype=bf16, build=build))
    if importlib.util.find_spec("torchao"):
        name = "torchao _AdamW bf16 stochastic"
        candidates.append(_Candidate(name=name, dtype=bf16, build=_build_torchao))
    if importlib.util.find_spec("flashoptim"):
        for bits, name, devices in (
            (24, "flashoptim AdamW bf16 24-bit master", ("cuda",)),
            (None, "flashoptim AdamW bf16 without master", ("cpu", "cuda")),
        ):
            build = functools.partial(_build_flashoptim, master_weight_bits=bits)
            candidates.append(_Candidate(name=name, dtype=bf16, build=build, devices=devices))
    return candidates


def _build_any_precision(
    params: list[nn.Parameter], *, mode: str, implementation: str
) -> torch.optim.Optimizer:
    return AnyPrecisionAdamW(
        params, lr=LR, betas=BETAS, weight_decay=DECAY, use_kahan_summation=True,
        momentum_dtype=torch.bfloat16,
        mode=mode,  # type: ignore[arg-type]
        implementation=implementation,  # type: ignore[arg-type]
    )  # fmt: skip


def _build_torch(params: list[nn.Parameter], *, kind: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        params, lr=LR, betas=BETAS, weight_decay=DECAY,
        fused=kind == "fused", foreach=kind == "foreach",
    )  # fmt: skip


def _build_optimi(params: list[nn.Parameter], *, foreach: bool) -> torch.optim.Optimizer:
    from optimi import AdamW  # type: ignore[import-not-found]

    return AdamW(params, lr=LR, betas=BETAS, weight_decay=DECAY, kahan_sum=True, foreach=foreach)


def _build_torchao(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    from torchao.optim import _AdamW  # type: ignore[import-not-found]

    return _AdamW(params, lr=LR, betas=BETAS, weight_decay=DECAY, bf16_stochastic_round=True)


def _build_flashoptim(
    params: list[nn.Parameter], *, master_weight_bits: int | None
) -> torch.optim.Optimizer:
    from flashoptim import FlashAdamW  # type: ignore[import-not-found]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that without a master weight it is fragile
        return FlashAdamW(
            params, lr=LR, betas=BETAS, weight_decay=DECAY, quantize=False,
            master_weight_bits=master_weight_bits, fused=params[0].is_cuda,
        )  # fmt: skip


def _shapes(planned: PlannedRun) -> list[torch.Size]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_model_config(planned.config.model))
    return [param.shape for param in model.parameters()]


def _parameters(
    shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device
) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [
        nn.Parameter((torch.randn(shape, device=device) * 0.02).to(dtype)) for shape in shapes
    ]
    for param in params:
        param.grad = (torch.randn(param.shape, device=device) * 1e-3).to(dtype)
    return params


def _count(params: list[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


def _floor_seconds(params: list[nn.Parameter], threads: int) -> list[float]:
    """Of the traffic of a step: it reads the parameters' gradients and buffers of their size."""
    count, device = _count(params), params[0].device
    if device.type != "cpu":
        source = torch.zeros(9 * count, dtype=torch.int8, device=device)  # read once, written once
        target = torch.empty_like(source)
        target.copy_(source)
        return [_seconds(lambda: target.copy_(source), device) for _ in range(STEPS)]
    library = native.load_library(FLOOR_SOURCE, [])
    library.precexp_floor.argtypes = (*[ctypes.c_void_p] * 5, ctypes.c_int64)
    buffers = [torch.zeros(count, dtype=torch.int16) for _ in range(5)]
    share = count // threads

    def work(thread: int) -> None:
        begin = thread * share
        pointers = [buffer.data_ptr() + 2 * begin for buffer in buffers]
        library.precexp_floor(*pointers, share)

    with ThreadPoolExecutor(threads) as pool:  # ctypes lets go of the interpreter's lock

        def traffic() -> None:
            list(pool.map(work, range(threads)))

        traffic()
        return [_seconds(traffic, device) for _ in range(STEPS)]


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    """Until its work is done; on a GPU the host's time too, if that is longer."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        tensor.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        for tensor in (
            [value] if isinstance(value, Tensor) else getattr(value, "__dict__", {}).values()
        )
        if isinstance(tensor, Tensor) and tensor.ndim
    )


def _peak_extra_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """How far allocated (on a GPU) or resident memory rises in a step; None: it is not told."""
    if device.type == "cuda":
        step()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        return None

    def resident(key: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    step()
    reset.write_text("5")  # the peak becomes what is resident now
    before = resident("VmRSS")
    step()
    return max(0, resident("VmHWM") - before)


def _results(
    seconds: dict[str, list[float]], extra: dict[str, int | None], states: dict[str, float]
) -> list[OptimizerResult]:
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        OptimizerResult(
            name=name,
            step_seconds_median=medians[name],
            step_seconds_least=min(times),
            ratio_to_floor=medians[name] / medians[FLOOR],
            ratio_to_fused_fp32=medians[name] / medians[FUSED],
            peak_extra_bytes=extra.get(name),
            state_bytes_per_param=states.get(name),
        )
        for name, times in seconds.items()
    ]


def _table(results: list[OptimizerResult], title: str) -> Table:
    table = Table(title=f"a step on the shapes of {title}")
    table.add_column("")
    for column in ("ms", "least", "x floor", "x fused fp32", "extra MiB", "state B/param"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            r.name,
            _cell(r.step_seconds_median, "{:.1f}", 1e3),
            _cell(r.step_seconds_least, "{:.1f}", 1e3),
            _cell(r.ratio_to_floor, "{:.2f}"),
            _cell(r.ratio_to_fused_fp32, "{:.2f}"),
            _cell(r.peak_extra_bytes, "{:.1f}", 2**-20),
            _cell(r.state_bytes_per_param, "{:.1f}"),
        )
    return table


def _cell(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else form.format(value * factor)
