"""The plan against the allocator: peaks of a training step on a CPU, in every phase.

Each case is planned for a CPU, then built and trained, and torch's profiler adds up what its
allocator really handed out. Small shapes: what is compared are the rules, and they do not depend
on sizes.
"""

from collections.abc import Mapping, Sequence
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


def bench(*, output: Path | None, overrides: Sequence[str] = ()) -> list[Comparison]:
    """Compares every case, prints and, given `output`, writes JSON."""
    found = []
    for case in track(CASES, description="comparing", transient=True):
        found.append(compare(" ".join(case), compose([*BASE, *case, *overrides]).config))
    Console().print(_table(found))
    if output is not None:
        cases = [{**asdict(each), "residuals": each.residuals} for each in found]
        described = environment.describe(torch.device("cpu"), attention="sdpa")
        write_json(output, {"base": list(BASE), "cases": cases, "environment": described})
    return found


def compare(case: str, config: RunConfig) -> Comparison:
    """Plans a training step on a CPU and runs it there."""
    planned = plan(config, device="cpu")
    return Comparison(case=case, planned=planned.phases, real=real_peaks(config))


def real_peaks(config: RunConfig) -> dict[str, int]:
    """The allocator's peaks in the second step of the run, in bytes by phase."""
    device = torch.device("cpu")
    precision = build_precision(config.precision, device=device)
    model = build_model(config.model, seed=config.seed)
    optimizer = build_optimizer(model.parameters(), config.optim, config.train, seed=config.seed)
    place(model, optimizer, precision, device=device, compiled=False)
    scaler = precision.build_scaler()
    ids = torch.zeros((config.train.batch_size, config.data.block_size), dtype=torch.int64)

    def step(on_phase=lambda _: None) -> None:  # type: ignore[no-untyped-def]
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
    held = ledger.held_by(model, optimizer, [ids])
    return {phase: held + above for phase, above in ledger.allocator_peaks(step).items()}


def _table(found: Sequence[Comparison]) -> Table:
    table = Table(title="planned over real peak, less 1, in %")
    table.add_column("case", overflow="fold")
    for column in ("real MiB", "forward", "backward", "step", "peak"):
        table.add_column(column, justify="right")
    for each in found:
        cells = (f"{100 * each.residuals[name]:+.3f}" for name in (*each.real, "peak"))
        table.add_row(each.case, f"{max(each.real.values()) / 2**20:.2f}", *cells)
    return table
