"""What a report writes and prints, and its command."""

import csv
import io
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from precexp.report import print_report, write_report
from precexp.report.__main__ import Settings, main, parse_arguments, recorded_settings
from precexp.report.curves import Band, band_over, difference_band, thin
from precexp.report.plots import draw_loss_curves
from tests.test_report import FakeRun, arms_of, pair_of_arms, report_on, write_sweep

OUTPUTS = (
    "report.html",
    "report.md",
    "runs.csv",
    "arms.csv",
    "arms.tex",
    "loss_curves.svg",
    "loss_curves.png",
)
PROMISED = {  # DESIGN section 9
    "label",
    "precision",
    "optim",
    "num_seeds",
    "final_eval_loss_mean",
    "difference",
    "ci_low",
    "ci_high",
    "verdict",
}
MIB = 2**20
WARNING = {
    "code": "unchanged_weights",
    "message": "40 % of the weights did not change",
    "value": 0.4,
    "threshold": 0.2,
    "remedy": "precision.kahan=true",
}


def troubled_sweep(directory: Path) -> None:
    """A sweep in which each kind of trouble happened once."""
    write_sweep(
        directory,
        *pair_of_arms(
            FakeRun(precision="bf16_pure", seed=1, loss=3.001, record={"warnings": [WARNING]}),
            FakeRun(precision="bf16_pure", seed=2, status="diverged", loss=math.nan, steps=(1, 2)),
            FakeRun(precision="bf16_mixed", seed=1, status="failed", error="OOM | on\ntwo lines"),
            FakeRun(precision="bf16_mixed", seed=2, status="running", steps=(1, 2)),
            FakeRun(precision="bf16_mixed", seed=3, status=None),
        ),
    )


def markdown_of(*directories: Path) -> str:
    report = report_on(*directories)
    write_report(report)
    return (report.output / "report.md").read_text(encoding="utf-8")


def section_of(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def printed(directory: Path, **console: int | bool) -> str:
    stream = io.StringIO()
    print_report(report_on(directory), Console(file=stream, **console))  # type: ignore[arg-type]
    return stream.getvalue()


def test_each_trouble_is_listed(tmp_path: Path) -> None:
    troubled_sweep(tmp_path)
    text = markdown_of(tmp_path)
    runs = section_of(text, "Runs & failures")
    for line in (
        "- **`bf16_pure-anyprecision`, seed 2**: diverged at step 2",
        "- **`bf16_mixed-anyprecision`, seed 1**: failed after step 4: OOM \\| on two lines",
        "- **`bf16_mixed-anyprecision`, seed 2**: incomplete after step 2",
        "- **`bf16_mixed-anyprecision`, seed 3**: missing: planned, but never started",
    ):
        assert line in runs
    assert "**4 planned runs did not complete**" in section_of(text, "Verdict")
    assert WARNING["message"] in section_of(text, "Numerics")


def test_no_section_of_warnings_without_a_warning(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun())
    assert "## Numerics" not in markdown_of(tmp_path)


def test_matched_check_names_the_differing_key(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun(), FakeRun(overrides={"train.lr": 2e-3}))
    check = section_of(markdown_of(tmp_path), "Matched check")
    assert "| `train.lr` | 0.001 | 0.002 |" in check


def test_matched_check_says_what_it_refused_and_that_dropout_cannot_match(tmp_path: Path) -> None:
    dropout: dict[str, object] = {"model.dropout": 0.1}
    pure = FakeRun(precision="bf16_pure", init_hash="other", overrides=dropout)
    write_sweep(tmp_path, FakeRun(overrides=dropout), pure)
    check = section_of(markdown_of(tmp_path), "Matched check")
    assert "**Refused**: bf16_pure-anyprecision, seed 1: init_hash" in check
    assert "**Dropout is 0.1**" in check


def test_memory_lists_the_dtypes_of_states(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun(), FakeRun(precision="bf16_pure"))
    memory = section_of(markdown_of(tmp_path), "Memory & bytes per parameter")
    fp32, pure = (line for line in memory.splitlines() if line.startswith("| `"))
    assert "| 4 | 4 | 8 | 16 |" in fp32
    assert "exp_avg float32, exp_avg_sq float32 |" in fp32
    assert "| 2 | 2 | 6 | 10 |" in pure
    assert "exp_avg bfloat16, exp_avg_sq bfloat16, compensation bfloat16 |" in pure
    assert "not measured" in memory


def memory_record(*, planned: int | None, measured: int | None) -> dict[str, object]:
    """The `memory` of run.json, its peaks in MiB."""
    ways = [{"overrides": "model.attention=sdpa", "saved_bytes": 2**20}]
    return {
        "planned": planned
        and {
            "peak_bytes": planned * MIB,
            "categories": {"weights": planned * MIB - 1, "loss": 1},
            "ways_out": ways,
        },
        "measured": measured
        and {"peak_bytes": measured * MIB, "init_bytes": None, "categories": {"loss": 5}},
    }


def test_planned_and_measured_memory_stand_side_by_side(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [
        {"memory": memory_record(planned=p, measured=m)} for p, m in ((4, 5), (2, 2))
    ]
    write_sweep(
        tmp_path, FakeRun(record=records[0]), FakeRun(record=records[1], precision="bf16_pure")
    )
    text = section_of(markdown_of(tmp_path), "Memory & bytes per parameter")
    assert "MiB = 2^20 bytes" in text
    assert "| `fp32-anyprecision` | 4.0 | 5.0 | +25.00 % | +0.0 % |" in text
    assert "| `bf16_pure-anyprecision` | 2.0 | 2.0 | +0.00 % | -60.0 % |" in text
    assert "loss and logits are 100 % of the peak; `model.attention=sdpa` would take 1.0" in text
    assert rows_of(tmp_path / "report/runs.csv")[0]["peak_allocated_bytes"] == str(5 * MIB)
    assert (tmp_path / "report/memory.svg").exists()


def test_memory_that_was_only_planned_is_shown_as_planned(tmp_path: Path) -> None:
    record: dict[str, object] = {"memory": memory_record(planned=4, measured=None)}
    write_sweep(tmp_path, FakeRun(record=record))
    text = section_of(markdown_of(tmp_path), "Memory & bytes per parameter")
    assert "| `fp32-anyprecision` | 4.0 | – | – | +0.0 % |" in text
    assert "weights are 100 % of the peak" in text


def test_environments_that_differ_are_named(tmp_path: Path) -> None:
    runs = [
        FakeRun(seed=seed, record={"environment": {"packages": {"torch": version}}})
        for seed, version in ((1, "2.13.0"), (2, "2.14.1"))
    ]
    write_sweep(tmp_path, *runs)
    text = section_of(markdown_of(tmp_path), "Environment")
    assert "**Runs differ in `packages.torch`.**" in text
    assert "2.13.0 (1 run); 2.14.1 (1 run)" in text


def test_runs_csv_has_a_row_per_planned_run_and_empty_cells_for_the_unmeasured(
    tmp_path: Path,
) -> None:
    troubled_sweep(tmp_path)
    write_report(report_on(tmp_path))
    rows = rows_of(tmp_path / "report/runs.csv")
    assert [row["status"] for row in rows] == [
        "completed",
        "completed",
        "completed",
        "diverged",
        "failed",
        "running",
        "missing",
    ]
    assert list(rows[0])[:7] == [
        "run_id",
        "arm",
        "precision",
        "optim",
        "seed",
        "status",
        "error",
    ]
    assert rows[0]["final_eval_loss"] == "3.0"
    assert rows[0]["peak_allocated_bytes"] == rows[0]["step_seconds_median"] == ""
    assert rows[-1]["final_eval_loss"] == rows[-1]["match_key"] == ""
    assert rows[-1]["arm"] == "bf16_mixed-anyprecision"


def test_arms_csv_holds_the_verdict(tmp_path: Path) -> None:
    pure = [FakeRun(precision="bf16_pure", seed=s, loss=v) for s, v in ((1, 3.1), (2, 3.2004))]
    write_sweep(tmp_path, *pair_of_arms(*pure))
    write_report(report_on(tmp_path))
    reference, arm = rows_of(tmp_path / "report/arms.csv")
    assert set(arm) >= PROMISED
    assert (reference["verdict"], reference["difference"]) == ("reference", "")
    assert (arm["verdict"], arm["num_seeds"]) == ("worse", "2")
    assert float(arm["ci_low"]) < float(arm["difference"]) < float(arm["ci_high"])


def test_a_nan_is_written_as_nan(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun(loss=math.nan))
    write_report(report_on(tmp_path))
    assert rows_of(tmp_path / "report/runs.csv")[0]["final_eval_loss"] == "nan"


def test_a_report_made_twice_has_the_same_bytes(tmp_path: Path) -> None:
    troubled_sweep(tmp_path)
    made = []
    for _ in range(2):
        write_report(report_on(tmp_path))
        made.append({name: (tmp_path / "report" / name).read_bytes() for name in OUTPUTS})
    assert made[0] == made[1]


def test_links_lead_from_the_report_to_the_runs(tmp_path: Path) -> None:
    (place,) = write_sweep(tmp_path / "a sweep", FakeRun())
    output = tmp_path / "elsewhere" / "deep"
    write_report(report_on(tmp_path / "a sweep"), output)
    text = (output / "report.md").read_text(encoding="utf-8")
    link = text.split("[record](")[1].split(")")[0].replace("%20", " ")
    assert (output / link).resolve() == place / "run.json"


def test_tiny_differences_leave_room_for_the_verdict_in_80_columns(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        FakeRun(precision="bf16_mixed", seed=seed, loss=6.4449 + seed * 1e-5).write(tmp_path)
        loss = 6.44495 + seed * 1.1e-5
        FakeRun(precision="bf16_pure", seed=seed, loss=loss).write(tmp_path)
    text = printed(tmp_path, width=80)
    assert "equivalent" in text
    assert "…" not in text


def test_the_terminal_report_is_plain_in_80_columns(tmp_path: Path) -> None:
    troubled_sweep(tmp_path)
    text = printed(tmp_path, width=80)
    tables, where = text.split("\nReport: ")
    assert max(map(len, tables.splitlines())) <= 80
    assert "\x1b" not in text
    assert where.strip() == str(tmp_path / "report" / "report.html")
    assert "undecided" in text
    assert "missing: planned, but never started" in text
    assert "3 of 7 runs completed." in text


def test_the_terminal_report_has_colours_on_a_terminal(tmp_path: Path) -> None:
    troubled_sweep(tmp_path)
    assert "\x1b[" in printed(tmp_path, width=80, force_terminal=True)


@pytest.mark.parametrize("num_lrs", [1, 3])
def test_a_figure_has_panels_per_group_and_only_its_arms_in_each(
    tmp_path: Path, num_lrs: int
) -> None:
    runs = [
        FakeRun(precision=precision, overrides={"train.lr": 1e-3 * (i + 1)})
        for i in range(num_lrs)
        for precision in ("fp32", "bf16_pure")
    ]
    write_sweep(tmp_path, *runs)
    figure = draw_loss_curves(report_on(tmp_path))
    assert len(figure.axes) == 2 * num_lrs
    for losses in figure.axes[::2]:
        assert len([line for line in losses.lines if line.get_marker() != "None"]) == 2


def test_an_arm_keeps_its_colour_in_every_panel(tmp_path: Path) -> None:
    lacking: dict[str, object] = {"train.lr": 2e-3}
    write_sweep(
        tmp_path,
        FakeRun(),
        FakeRun(precision="bf16_mixed"),
        FakeRun(precision="bf16_pure"),
        FakeRun(overrides=lacking),
        FakeRun(precision="bf16_pure", overrides=lacking),
    )
    first, _, second, _ = draw_loss_curves(report_on(tmp_path)).axes
    colours = [
        [line.get_color() for line in axes.lines if line.get_marker() != "None"]
        for axes in (first, second)
    ]
    assert colours[1] == [colours[0][0], colours[0][2]]


def test_early_and_diverging_losses_do_not_squash_the_rest(tmp_path: Path) -> None:
    steps = tuple(range(1, 41))  # the loss falls from 4.7
    late = FakeRun(steps=steps, loss=3.0)
    diverged = FakeRun(precision="bf16_pure", status="diverged", steps=steps, loss=1e6)
    write_sweep(tmp_path, late, diverged)
    bottom, top = draw_loss_curves(report_on(tmp_path)).axes[0].get_ylim()
    assert top < 4.7
    (cross,) = [
        line
        for line in draw_loss_curves(report_on(tmp_path)).axes[0].lines
        if line.get_marker() == "X"
    ]
    assert bottom < np.asarray(cross.get_ydata()).item() < top


def test_runs_that_never_evaluated_still_make_a_figure(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun(status="failed", steps=()), FakeRun(seed=2, status=None))
    write_report(report_on(tmp_path))
    assert (tmp_path / "report/loss_curves.png").stat().st_size > 0


def test_a_band_is_over_the_steps_that_all_have() -> None:
    band = band_over(
        [
            (np.array([1, 2, 3]), np.array([5.0, 4.0, np.nan])),
            (np.array([2, 3, 4]), np.array([6.0, 1.0, 1.0])),
        ]
    )
    assert (band.step.tolist(), band.mean.tolist()) == ([2], [5.0])
    assert (band.low.tolist(), band.high.tolist()) == ([4.0], [6.0])


def test_difference_band_pairs_seeds_at_common_evaluations(tmp_path: Path) -> None:
    pure = FakeRun(precision="bf16_pure", seed=2, loss=3.3)
    write_sweep(tmp_path, *pair_of_arms(pure))
    reference, arm = arms_of(report_on(tmp_path)).values()
    band = difference_band(arm, reference)
    assert band.step.tolist() == [1, 2, 3, 4]
    assert band.mean == pytest.approx([0, 0, 0, 0.2])


def test_thinning_keeps_the_spikes() -> None:
    step = np.arange(10_000)
    loss = np.ones(10_000)
    loss[[1234, 5678]] = (9.0, -9.0)
    thinned = thin(Band(step=step, mean=loss, low=loss, high=loss))
    assert len(thinned.step) <= 600
    assert {1234, 5678} <= set(thinned.step.tolist())


def test_the_command_writes_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sweep(tmp_path / "sweep", FakeRun(), FakeRun(precision="bf16_pure"))
    output = tmp_path / "there"
    asked = ["report.reference=bf16_pure-anyprecision", "report.margin=0.02"]
    assert main([str(tmp_path / "sweep"), *asked, "--output", str(output)]) == 0
    assert sorted(path.name for path in output.iterdir()) == sorted(OUTPUTS)
    arms = rows_of(output / "arms.csv")
    assert (arms[0]["label"], arms[0]["margin"]) == ("bf16_pure-anyprecision", "0.06")
    assert str(output / "report.html") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no directory given"),
        (["--html"], "--html: unknown argument"),
        (["sweep", "report.marginn=1"], "report.marginn=1: unknown argument"),
        (["sweep", "report.margin=wide"], "'wide' is not a number"),
        (["sweep", "report.margin=0"], "must be positive"),
        (["sweep", "report.margin=nan"], "must be positive"),
        (["sweep", "report.margin"], "no value"),
        (["sweep", "--output"], "no value"),
        (["sweep", "report.reference=fp23"], "allowed: fp32-anyprecision"),
        (["nowhere"], "nowhere: no such directory"),
        (["sweep", "--output", "sweep/sweep.json"], "sweep.json"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    write_sweep(tmp_path / "sweep", FakeRun())
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_both_spellings_of_output() -> None:
    for arguments in (["a", "--output", "b"], ["--output=b", "a"]):
        assert parse_arguments(arguments).output == Path("b")


def test_settings_are_the_runs_own_and_else_the_default_configs(tmp_path: Path) -> None:
    settings: dict[str, object] = {"report.margin": 0.03, "report.reference": "fp32-adamw"}
    own = write_sweep(tmp_path / "own", FakeRun(overrides=settings))[0]
    assert recorded_settings([tmp_path / "own"]) == Settings(
        reference="fp32-adamw", margin=0.03, metric="final_eval_loss", tuned=()
    )
    (own / "run.json").write_text("{")
    assert recorded_settings([tmp_path / "own"]) == Settings(  # as in conf/config.yaml
        reference=None, margin=0.005, metric="final_eval_loss", tuned=()
    )


def test_reporting_imports_neither_torch_nor_wandb(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun())
    script = (
        "import sys\n"
        "from precexp.report.__main__ import main\n"
        "assert 'matplotlib' not in sys.modules  # it is slow to import\n"
        f"assert main([{str(tmp_path)!r}]) == 0\n"
        "heavy = {'torch', 'wandb', 'transformers', 'datasets', 'hydra'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
