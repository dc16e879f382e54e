"""The plan against the allocator: peaks of a training step, in every phase.

Each case is planned, then built and trained, and asked of torch's allocator. On a CPU the shapes
are small: what is compared are the rules, which do not depend on sizes. On CUDA they are those of
the original experiment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from precexp import environment
from precexp.cli import compose
from precexp.config import RunConfig
from precexp.memory import ledger
from precexp.memory.plan import plan
from precexp.model import build_model
from precexp.optim import build_optimizer
from precexp.precision import build_precision
from precexp.record import write_json
from precexp.train import place, training_step

BASE = (
    "model.hidden_size=192", "model.word_embed_proj_dim=192", "model.ffn_dim=768",
    "model.num_attention_heads=4", "model.num_hidden_layers=3", "model.vocab_size=4096",
    "model.max_position_embeddings=512", "data.block_size=128", "train.batch_size=4",
    "model.attention=sdpa",
)  # fmt: skip
CASES: Sequence[tuple[str, ...]] = (
    ("precision=fp32",),
    ("precision=fp32", "optim=adamw", "optim.implementation=foreach", "model.attention=eager"),
    ("precision=fp32", "optim=adamw", "data.block_size=32", "train.batch_size=1"),
    ("precision=bf16_mixed",),
    ("precision=bf16_mixed", "optim=adamw", "data.block_size=32", "train.batch_size=1"),
    ("precision=bf16_mixed", "optim=adamw", "optim.implementation=loop", "train.batch_size=1"),
    ("precision=bf16_mixed", "model.attention=eager", "train.grad_accumulation=4"),
    ("precision=bf16_mixed", "model.gradient_checkpointing=true"),
    ("precision=bf16_pure",),
    ("precision=bf16_pure", "optim=anyprecision_published", "train.batch_size=1"),
    ("precision=bf16_pure", "optim=anyprecision_packed", "train.grad_accumulation=4"),
    ("precision=bf16_pure", "model.attention=eager", "data.block_size=32"),
    ("precision=bf16_pure", "model.dropout=0.1"),
    ("precision=bf16_pure", "model.gradient_checkpointing=true"),
    ("precision=bf16_pure", "precision.accumulation_dtype=float32"),
    ("precision=bf16_plain", "model.do_layer_norm_before=false", "model.word_embed_proj_dim=96"),
    ("precision=fp16_amp", "precision.initial_scale=1", "data.block_size=16", "train.batch_size=2"),
)
GPU_BASE = ("data.block_size=1024", "train.batch_size=12", "precision.initial_scale=1")
GPU_CASES: Sequence[tuple[str, ...]] = tuple(
    (f"model={model}", f"precision={precision}", f"optim={optim}")
    for model in ("opt-125m", "opt-1.3b")
    for precision in ("fp32", "bf16_mixed", "fp16_amp", "bf16_pure")
    for optim in ("anyprecision", "adamw")
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Peaks in bytes by phase, planned and real."""

    case: str
    planned: Mapping[str, int]
    real: Mapping[str, int]

    @property
    def residuals(self) -> dict[str, float]:
        """Planned over real, less 1: by phase, and of the peak."""
        pairs = {phase: (self.planned[phase], self.real[phase]) for phase in self.real}
        pairs["peak"] = (max(self.planned.values()), max(self.real.values()))
        return {name: planned / real - 1 for name, (planned, real) in pairs.items()}


def bench(*, device: torch.device, output: Path | None) -> list[Comparison]:
    """Compares every case, prints and, given `output`, writes JSON.

    On CUDA, a case that is planned to be larger than the GPU's memory is left out.
    """
    on_gpu = device.type == "cuda"
    base, cases = (GPU_BASE, GPU_CASES) if on_gpu else (BASE, CASES)
    found = []
    for case in track(cases, description="comparing", transient=True):
        config = compose([*base, *case]).config
        planned = plan(config, device="cuda" if on_gpu else "cpu")
        if on_gpu and planned.peak_bytes > torch.cuda.mem_get_info(device)[0]:
            continue
        real = real_peaks(config, device=device)
        found.append(Comparison(case=" ".join(case), planned=planned.phases, real=real))
    Console().print(_table(found))
    if output is not None:
        described = environment.describe(device, attention="sdpa")
        results = [{**asdict(each), "residuals": each.residuals} for each in found]
        write_json(output, {"base": list(base), "cases": results, "environment": described})
    return found


def compare(case: str, config: RunConfig) -> Comparison:
    """Plans a training step on a CPU and runs it there."""
    planned = plan(config, device="cpu")
    return Comparison(
        case=case, planned=planned.phases, real=real_peaks(config, device=torch.device("cpu"))
    )


def real_peaks(config: RunConfig, *, device: torch.device) -> dict[str, int]:
    """The allocator's peaks in the second step of the run, in bytes by phase."""
    begun = ledger.start(device)
    precision = build_precision(config.precision, device=device)
    model = build_model(config.model, seed=config.seed)
    optimizer = build_optimizer(model.parameters(), config.optim, config.train, seed=config.seed)
    place(model, optimizer, precision, device=device, compiled=False)
    scaler = precision.build_scaler()
    ids = torch.zeros((config.train.batch_size, config.data.block_size), dtype=torch.int64)

    def step(on_phase: Callable[[str], None] = lambda _: None) -> None:
        training_step(
            model,
            optimizer,
            [ids] * config.train.grad_accumulation,
            precision,
            scaler,
            max_grad_norm=config.train.max_grad_norm,
            on_phase=on_phase,
        )
        on_phase("")
        optimizer.zero_grad(set_to_none=True)

    step()
    held = ledger.held_bytes(begun, model, optimizer, [ids])
    return ledger.step_peaks(begun, step, before=held)


def _table(found: Sequence[Comparison]) -> Table:
    table = Table(title="planned over real peak, less 1, in %")
    table.add_column("case", overflow="fold")
    for column in ("real MiB", "forward", "backward", "step", "peak"):
        table.add_column(column, justify="right")
    for each in found:
        cells = (f"{100 * each.residuals[name]:+.3f}" for name in (*each.real, "peak"))
        table.add_row(each.case, f"{max(each.real.values()) / 2**20:.2f}", *cells)
    return table
