"""runs.csv, arms.csv and numerics.csv: every number in full, for programs.

Unmeasured is an empty cell.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from precexp.report.build import (
    ArmResult,
    Group,
    Report,
    bytes_per_param,
    mean_of,
    measured_bytes,
    result,
    timing,
)
from precexp.report.curves import Floats, Steps
from precexp.report.probes import ArmProbes, probed_arms
from precexp.report.protocol import Place, places_of
from precexp.report.read import ReportedRun
from precexp.report.statistics import mean_and_std
from precexp.report.tables import verdict_of
from precexp.report.tuning import spell_setting

Cell = str | int | float | None


def write_csvs(report: Report, output: Path) -> None:
    """runs.csv, arms.csv and, where something was probed, numerics.csv."""
    _write_csv(output / "runs.csv", RUN_COLUMNS, run_rows(report))
    _write_csv(output / "arms.csv", ARM_COLUMNS, arm_rows(report))
    if arms := probed_arms(report):
        with (output / "numerics.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(NUMERICS_COLUMNS)
            for found in arms:
                writer.writerows(_numerics_rows(found))


def run_rows(report: Report) -> list[dict[str, Cell]]:
    """A row per planned or recorded run: {column: cell}."""
    places = places_of(report)
    return [_run_row(run, places.get(run.directory)) for run in report.runs]


def arm_rows(report: Report) -> list[dict[str, Cell]]:
    """A row per arm and match group: {column: cell}."""
    return [_arm_row(arm, group, report) for group in report.groups for arm in group.arms]


RUN_COLUMNS = (
    "run_id",
    "arm",
    "precision",
    "optim",
    "seed",
    "status",
    "error",
    "steps",
    "applied_steps",
    "skipped_steps",
    "tokens",
    "final_eval_loss",
    "final_train_loss",
    "eval_perplexity",
    "eval_bits_per_byte",
    "tokens_per_second",
    "step_seconds_median",
    "model_flop_utilisation",
    "weights_bytes_per_param",
    "gradients_bytes_per_param",
    "states_bytes_per_param",
    "total_bytes_per_param",
    "peak_allocated_bytes",
    "init_hash",
    "data_hash",
    "config_hash",
    "match_key",
    "tuned",
    "half",
    "chosen",
    "directory",
)
RESULTS = RUN_COLUMNS[7:15]
TIMINGS = RUN_COLUMNS[15:18]


def _run_row(run: ReportedRun, place: Place | None) -> dict[str, Cell]:
    record = run.record
    arm = record.arm if record else {}
    evidence = record.evidence if record else {}
    return {
        "run_id": record.run_id if record else None,
        "arm": run.label,
        "precision": _text(arm.get("precision")),
        "optim": _text(arm.get("optim")),
        "seed": run.seed,
        "status": run.status,
        "error": run.error,
        **{key: result(run, key) for key in RESULTS},
        **{key: timing(run, key) for key in TIMINGS},
        **{
            f"{part}_bytes_per_param": bytes_per_param(run, part)
            for part in ("weights", "gradients", "states", "total")
        },
        "peak_allocated_bytes": measured_bytes(run, "peak_bytes"),
        "init_hash": _text(evidence.get("init_hash")),
        "data_hash": _text(evidence.get("data_hash")),
        "config_hash": run.config_hash,
        "match_key": record.match_key if record else None,
        "tuned": place.setting if place else None,
        "half": place.half if place else None,
        "chosen": str(place.is_chosen).lower() if place else None,
        "directory": run.directory.as_posix(),
    }


ARM_COLUMNS = (
    "label",
    "precision",
    "optim",
    "num_seeds",
    "num_diverged",
    "final_eval_loss_mean",
    "final_eval_loss_std",
    "eval_bits_per_byte_mean",
    "metric",
    "metric_mean",
    "metric_std",
    "num_pairs",
    "difference",
    "ci_low",
    "ci_high",
    "margin",
    "verdict",
    "reason",
    "seeds_needed",
    "permutation_p",
    "last_tenth_difference",
    "last_tenth_ci_low",
    "last_tenth_ci_high",
    "num_reached",
    "tokens_to_reference_loss",
    "seconds_to_reference_loss",
    "applied_steps_mean",
    "skipped_steps_mean",
    "tokens_per_second_mean",
    "model_flop_utilisation_mean",
    "total_bytes_per_param",
    "tuned",
    "num_values",
    "num_selection_seeds",
    "selection_mean",
    "group",
    "match_key",
)


def _arm_row(arm: ArmResult, group: Group, report: Report) -> dict[str, Cell]:
    against, late, reach = arm.comparison, arm.late, arm.reach
    runs = arm.compared.values()
    chosen = arm.tuning.chosen if arm.tuning else None
    mean, std = mean_and_std(
        [loss for run in runs if (loss := result(run, "final_eval_loss")) is not None]
    )
    return {
        "label": arm.label,
        "precision": arm.precision,
        "optim": arm.optim,
        "num_seeds": arm.num_seeds,
        "num_diverged": len(arm.diverged),
        "final_eval_loss_mean": mean,
        "final_eval_loss_std": std,
        "eval_bits_per_byte_mean": arm.bits_per_byte,
        "metric": report.metric,
        "metric_mean": arm.loss_mean,
        "metric_std": arm.loss_std,
        "num_pairs": against.num_pairs if against else None,
        "difference": against.difference if against else None,
        "ci_low": against.ci_low if against else None,
        "ci_high": against.ci_high if against else None,
        "margin": group.margin,
        "verdict": verdict_of(arm, group),
        "reason": against.reason if against else None,
        "seeds_needed": against.seeds_needed if against else None,
        "permutation_p": against.permutation_p if against else None,
        "last_tenth_difference": late.mean if late else None,
        "last_tenth_ci_low": late.low if late else None,
        "last_tenth_ci_high": late.high if late else None,
        "num_reached": reach.num_reached if reach else None,
        "tokens_to_reference_loss": reach.tokens if reach else None,
        "seconds_to_reference_loss": reach.seconds if reach else None,
        "applied_steps_mean": mean_of(runs, result, "applied_steps"),
        "skipped_steps_mean": mean_of(runs, result, "skipped_steps"),
        "tokens_per_second_mean": mean_of(arm.runs, timing, "tokens_per_second"),
        "model_flop_utilisation_mean": mean_of(arm.runs, timing, "model_flop_utilisation"),
        "total_bytes_per_param": mean_of(arm.runs, bytes_per_param, "total"),
        "tuned": spell_setting(chosen.setting, report.tuned) if chosen else None,
        "num_values": len(arm.tuning.trials) if arm.tuning else None,
        "num_selection_seeds": len(group.halves.selection) if group.halves else None,
        "selection_mean": chosen.mean if chosen else None,
        "group": group.title,
        "match_key": group.match_key,
    }


NUMERICS_COLUMNS = ("label", "group", "seed", "step", "probe", "kind", "value")
MOST_STEPS = 100  # of a series of probes; of a longer one every so many are written


def _numerics_rows(found: ArmProbes) -> Iterator[Sequence[Cell]]:
    """Each probe of each run that counts, then the means over them; `kind` is empty for a count."""
    arm = (found.arm.label, found.group.title)
    for run in found.runs:
        for key, points in (run.curve.probes if run.curve is not None else {}).items():
            probe, _, kind = key.partition("/")
            for step, value in _thinned(points.step, points.values):
                yield (*arm, run.seed, step, probe, kind, value)
    for (probe, kind), band in found.bands.items():
        for step, value in _thinned(band.step, band.mean):
            yield (*arm, "mean", step, probe, kind, value)


def _thinned(steps: Steps, values: Floats) -> Iterator[tuple[int, float]]:
    stride = -(-len(steps) // MOST_STEPS)
    return zip(steps[::stride].tolist(), values[::stride].tolist(), strict=True)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Cell]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
