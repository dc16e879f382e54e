"""What a step of each optimizer costs on the shapes of a model: time, memory, state.

The candidates are interleaved over the rounds. The floor is the time of the memory traffic alone of
a bf16 step with compensation (18 bytes per parameter), probed in the same rounds. Where libraries
with optimizers of their own are installed (torch-optimi, torchao), they are among the candidates.
"""

import csv
import ctypes
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
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
    step_seconds_median: float
    step_seconds_least: float
    ratio_to_floor: float | None
    ratio_to_fused_fp32: float | None
    peak_extra_bytes: int | None  # resident, during a step, above before it
    state_bytes_per_param: float | None


def bench(
    planned: PlannedRun, *, rounds: int, threads: int, output: Path | None
) -> list[OptimizerResult]:
    """Measures on the CPU, prints and, given `output`, writes the results as CSV."""
    torch.set_num_threads(threads)
    shapes = _shapes(planned)
    candidates = dict(_candidates())
    seconds: dict[str, list[float]] = {name: [] for name in (FLOOR, *candidates)}
    tensors = {dtype: _parameters(shapes, dtype) for dtype in (torch.bfloat16, torch.float32)}
    extra: dict[str, int | None] = {}
    states: dict[str, float] = {}
    for _ in track(range(rounds), description="timing", transient=True):
        seconds[FLOOR] += _floor_seconds(tensors[torch.bfloat16], threads)
        for name, (dtype, build) in candidates.items():
            optimizer = build(tensors[dtype])
            optimizer.step()
            seconds[name] += [_seconds(optimizer.step) for _ in range(STEPS)]
            states[name] = _state_bytes(optimizer) / sum(p.numel() for p in tensors[dtype])
            del optimizer
    # Else a peak would not show in what is resident. After the timing, since it slows steps down.
    environment.set_malloc(mmap_threshold=2**16, trim_threshold=0)
    for name, (dtype, build) in candidates.items():
        optimizer = build(tensors[dtype])
        optimizer.step()
        extra[name] = _peak_extra_bytes(optimizer.step)
        del optimizer
    results = _results(seconds, extra, states)
    Console().print(_table(results, planned, threads))
    if output is not None:
        with output.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(OptimizerResult)])
            writer.writeheader()
            writer.writerows(asdict(result) for result in results)
    return results


def _candidates() -> Iterator[tuple[str, tuple[torch.dtype, Build]]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    for mode, implementation in (
        ("default", "native"),
        ("packed", "native"),
        ("default", "aten"),
        ("packed", "aten"),
        ("published", "aten"),
    ):
        build = functools.partial(_build_any_precision, mode=mode, implementation=implementation)
        name = f"{mode} bf16 {implementation}" if mode != "published" else "published bf16"
        yield name, (bf16, build)
    for dtype, label in ((fp32, "fp32"), (bf16, "bf16")):
        for kind in ("fused", "foreach", "loop"):
            build = functools.partial(_build_torch, kind=kind)
            yield f"torch AdamW {label} {kind}", (dtype, build)
    if importlib.util.find_spec("optimi"):
        for foreach in (False, True):
            kind = "foreach" if foreach else "loop"
            yield (
                f"optimi AdamW bf16 Kahan {kind}",
                (bf16, functools.partial(_build_optimi, foreach=foreach)),
            )
    if importlib.util.find_spec("torchao"):
        yield "torchao _AdamW bf16 stochastic", (bf16, _build_torchao)


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


def _shapes(planned: PlannedRun) -> list[torch.Size]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_model_config(planned.config.model))
    return [param.shape for param in model.parameters()]


def _parameters(shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [nn.Parameter((torch.randn(shape) * 0.02).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = (torch.randn(param.shape) * 1e-3).to(dtype)
    return params


def _floor_seconds(params: list[nn.Parameter], threads: int) -> list[float]:
    """Of the traffic of a step: it reads the parameters' gradients and buffers of their size."""
    library = native.load_library(FLOOR_SOURCE, [])
    library.precexp_floor.argtypes = (*[ctypes.c_void_p] * 5, ctypes.c_int64)
    count = sum(param.numel() for param in params)
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
        return [_seconds(traffic) for _ in range(STEPS)]


def _seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.nbytes
        for param, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, Tensor) and value.shape == param.shape and param.ndim
    )


def _peak_extra_bytes(step: Callable[[], object]) -> int | None:
    """How far the resident memory rises during the step; None where the system does not say."""
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


def _table(results: list[OptimizerResult], planned: PlannedRun, threads: int) -> Table:
    table = Table(title=f"a step on the shapes of {planned.config.model.name}, {threads} thread(s)")
    table.add_column("")
    for column in ("ms", "least", "x floor", "x fused fp32", "extra MiB", "state B/param"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            r.name,
            f"{r.step_seconds_median * 1e3:.1f}",
            f"{r.step_seconds_least * 1e3:.1f}",
            f"{r.ratio_to_floor:.2f}",
            f"{r.ratio_to_fused_fp32:.2f}",
            "" if r.peak_extra_bytes is None else f"{r.peak_extra_bytes / 2**20:.1f}",
            "" if r.state_bytes_per_param is None else f"{r.state_bytes_per_param:.1f}",
        )
    return table
