"""What only a GPU can show: the original experiment in miniature, then a step of each optimizer.

`make gpu-check` runs the GPU's tests and then this. Its six runs (experiment=miniature) have a
process each; their losses, speed and memory, planned and measured, and the optimizers' times go
into a folder of small files: runs.csv, losses.csv, memory.json, optimizer.csv, and summary.md for
people. What was not measured, as everything of a GPU's where there is none, is empty or null.
"""

import csv
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from precexp import environment
from precexp.bench import optimizer
from precexp.bench.optimizer import OptimizerResult
from precexp.record import RecordedRun, read_run, write_json
from precexp.run import preflight
from precexp.sweep import PlannedRun, launch, subdirectory

ROUNDS = 2  # of the optimizers
OVERRIDES = ("experiment=miniature", "wandb.mode=disabled")
REFERENCE = Path("outputs/reference")
LARGE, SMALL = "opt-1.3b", "opt-125m"  # on whose shapes the optimizers step
LARGE_BYTES = 44e9  # of the GPU: AdamW's foreach in fp32 beside the parameters takes 37e9
PUBLISHED = "published bf16"
OURS = ("default bf16 triton", "default bf16 native", "default bf16 aten")
MIB = 2**20

Cell = str | int | float | None

TIMINGS = (
    "first_step_seconds",
    "step_seconds_median",
    "tokens_per_second",
    "model_flops_per_second",
    "model_flop_utilisation",
)
RUN_HEADS = (
    "arm", "status", "train loss", "eval loss", "skipped", "tokens/s", "MFU", "bytes/param",
    "planned MiB", "measured MiB",
)  # fmt: skip
RESULTS = ("final_train_loss", "final_eval_loss", "steps", "skipped_steps")


def bench(
    planned: Sequence[PlannedRun],
    shapes: PlannedRun,
    *,
    device: torch.device,
    rounds: int,
    output: Path,
) -> bool:
    """Runs and times all of it and writes the folder; whether every run completed.

    Raises UserError for what the device cannot run.
    """
    for each in planned:
        preflight(each.config)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="precexp-") as folder:
        runs = [_launched(each, Path(folder)) for each in planned]
    rows = [_row(run) for run in runs]
    _write_csv(output / "runs.csv", rows)
    _write_csv(output / "losses.csv", _losses(runs))
    described = environment.describe(device, attention=planned[0].config.model.attention)
    memory = {"runs": [_memory(run) for run in runs], "environment": described}
    write_json(output / "memory.json", memory)
    steps = optimizer.bench(
        shapes, device=device, rounds=rounds, threads=1, output=output / "optimizer.csv"
    )
    summary = _summary(rows, steps, described, shapes=shapes.config.model.name)
    (output / "summary.md").write_text(summary, encoding="utf-8")
    print(f"results: {output}")
    return all(run.record.status == "completed" for run in runs)


def folder_of(device: torch.device) -> Path:
    """Where results of the device belong, below the working directory."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return REFERENCE / "".join(c if c.isalnum() else "-" for c in name.lower())


def shapes_for(device: torch.device) -> str:
    """The model whose parameters, gradients and states the device has room for."""
    if device.type != "cuda":
        return SMALL
    total = torch.cuda.get_device_properties(device).total_memory
    return LARGE if total >= LARGE_BYTES else SMALL


def _launched(planned: PlannedRun, folder: Path) -> RecordedRun:
    directory = folder / subdirectory(planned.config, planned.arm)
    launch(replace(planned, directory=directory))
    return read_run(directory)


def _row(run: RecordedRun) -> dict[str, Cell]:
    record = run.record
    planned, measured = (_block(record.memory, name) for name in ("planned", "measured"))
    results, timing = _block(vars(record), "results"), _block(vars(record), "timing")
    return {
        "arm": run.label,
        "status": record.status,
        "error": record.error,
        **{key: results.get(key) for key in RESULTS},
        **{key: timing.get(key) for key in TIMINGS},
        "total_bytes_per_param": _block(record.census or {}, "bytes_per_param").get("total"),
        "planned_peak_bytes": planned.get("peak_bytes"),
        "measured_peak_bytes": measured.get("peak_bytes"),
        "reserved_bytes": measured.get("reserved_bytes"),
        "init_hash": str(record.evidence["init_hash"]),
        "data_hash": str(record.evidence["data_hash"]),
    }


def _losses(runs: Sequence[RecordedRun]) -> list[dict[str, Cell]]:
    """The training loss of each run, at 40 steps or a few more."""
    longest = max((run.rows for run in runs), key=len)
    stride = max(1, len(longest) // 40)
    return [
        {
            "step": row.step,
            **{run.label: run.rows[i].loss if i < len(run.rows) else None for run in runs},
        }
        for i, row in enumerate(longest)
        if i % stride == 0 or i == len(longest) - 1
    ]


def _memory(run: RecordedRun) -> dict[str, object]:
    """The run's memory as recorded, and planned over measured, less 1, of the peak."""
    planned, measured = (_block(run.record.memory, name) for name in ("planned", "measured"))
    known = planned and measured.get("peak_bytes")
    return {
        "arm": run.label,
        "residual": planned["peak_bytes"] / measured["peak_bytes"] - 1 if known else None,
        "planned": {key: value for key, value in planned.items() if key != "ways_out"} or None,
        "measured": measured or None,
    }


def _block(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The block of that name; empty where the run did not come to it."""
    return values.get(name) or {}


def _summary(
    rows: Sequence[Mapping[str, Cell]],
    steps: Sequence[OptimizerResult],
    described: Mapping[str, Any],
    *,
    shapes: str,
) -> str:
    packages = described["packages"]
    versions = f"torch {packages['torch']}, transformers {packages['transformers']}"
    cuda = f"CUDA {described['cuda']}, " if described["cuda"] else ""
    lines = [
        f"# {described['device']}",
        "",
        f"{versions}, {cuda}precexp at {described['commit']}; "
        f"TF32 {'on' if described['allow_tf32'] else 'off'}.",
        "",
        *_table(
            RUN_HEADS,
            [
                (
                    str(row["arm"]),
                    str(row["status"]),
                    _spelled(row["final_train_loss"], "{:.4f}"),
                    _spelled(row["final_eval_loss"], "{:.4f}"),
                    _spelled(row["skipped_steps"], "{}"),
                    _spelled(row["tokens_per_second"], "{:,.0f}"),
                    _spelled(row["model_flop_utilisation"], "{:.1%}"),
                    _spelled(row["total_bytes_per_param"], "{:.1f}"),
                    _spelled(row["planned_peak_bytes"], "{:,.1f}", 1 / MIB),
                    _spelled(row["measured_peak_bytes"], "{:,.1f}", 1 / MIB),
                )
                for row in rows
            ],
        ),
        "",
        f"A step of each optimizer on the shapes of {shapes}; the floor is a copy of 18 bytes per "
        "parameter:",
        "",
        *_table(
            ("optimizer", "ms", "of the floor's bandwidth", "extra MiB", "state bytes/param"),
            [
                (
                    each.name,
                    _spelled(each.step_seconds_median, "{:.2f}", 1e3),
                    _spelled(1 / each.ratio_to_floor if each.ratio_to_floor else None, "{:.0%}"),
                    _spelled(each.peak_extra_bytes, "{:,.1f}", 1 / MIB),
                    _spelled(each.state_bytes_per_param, "{:.1f}"),
                )
                for each in steps
            ],
        ),
        "",
        _against_published(steps),
        "",
    ]
    return "\n".join(lines)


def _against_published(steps: Sequence[OptimizerResult]) -> str:
    seconds = {each.name: each.step_seconds_median for each in steps}
    name, ours = next((name, time) for name in OURS if (time := seconds.get(name)) is not None)
    theirs = seconds[PUBLISHED]
    assert theirs is not None
    return f"A step of the published optimizer takes {theirs / ours:.1f} times as long as {name}."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _spelled(value: Cell, form: str, factor: float = 1) -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    return form.format(value if factor == 1 else value * factor)


def _write_csv(path: Path, rows: Sequence[Mapping[str, Cell]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["step"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
