"""Comparing anything: metrics, filters, forced comparisons, and what stands beside the verdict."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from precexp.config import UserError
from precexp.report import Report, build_report, write_report
from precexp.report.__main__ import main
from precexp.report.curves import difference_band
from precexp.report.plots import draw_loss_curves
from precexp.report.reach import last_tenth, reach_of
from precexp.report.read import Curve
from precexp.report.tables import fixed
from tests.test_report import (
    FakeRun,
    arms_of,
    change_rows,
    pair_of_arms,
    report_on,
    write_sweep,
)
from tests.test_report_outputs import markdown_of, rows_of, section_of


def curve_of(*eval_losses: float, seconds: float = 1.0, tokens: int = 100) -> Curve:
    """A curve with these eval losses, a step each; nan where nothing was evaluated."""
    count = len(eval_losses)
    steps = np.arange(1, count + 1)
    return Curve(
        step=steps,
        tokens=steps * tokens,
        seconds=np.multiply(steps, seconds, dtype=np.float64),
        loss=np.full(count, 5.0),
        eval_loss=np.array(eval_losses),
        grad_norm=np.ones(count),
        lr=np.full(count, 1e-3),
        loss_scale=np.full(count, math.nan),
        skipped=np.zeros(count, dtype=np.bool_),
        probes={},
    )


def two_learning_rates() -> list[FakeRun]:
    """fp32 and bf16_pure, seeds 1 and 2, at two learning rates."""
    return [
        FakeRun(precision=precision, seed=seed, loss=3.0 + seed / 10, overrides={"train.lr": lr})
        for lr in (1e-3, 2e-3)
        for precision in ("fp32", "bf16_pure")
        for seed in (1, 2)
    ]


def filtered(directory: Path, **filters: str) -> Report:
    by_key = {key.replace("__", "."): value for key, value in filters.items()}
    return build_report([directory], reference=None, margin=0.01, filters=by_key)


def test_last_tenth_is_the_mean_of_the_last_tenth_of_the_evaluations() -> None:
    losses = np.arange(20, 0, -1.0)
    assert last_tenth(curve_of(*losses)) == 1.5
    assert last_tenth(curve_of(math.nan, 7.0, math.nan, 4.0, math.nan)) == 4.0
    assert last_tenth(curve_of(math.nan)) is None


def test_reach_is_the_first_evaluation_at_the_references_last_loss() -> None:
    reference = curve_of(5.0, 4.0, 3.0, 3.5)
    fast, slow = curve_of(5.0, 3.4, 3.6, 3.7, seconds=2.0), curve_of(5.0, 4.5, 3.9, 3.6)
    found = reach_of([(fast, reference)])
    assert found is not None
    assert (found.num_reached, found.tokens, found.seconds) == (1, 200, 4)
    both = reach_of([(fast, reference), (slow, reference)])
    assert both is not None
    assert (both.num_reached, both.num_seeds) == (1, 2)
    assert (both.tokens, both.seconds) == (math.inf, math.inf)
    assert reach_of([]) is None


def test_a_diverged_run_never_reaches_the_loss(tmp_path: Path) -> None:
    pure = [
        FakeRun(precision="bf16_pure", seed=1, loss=2.9),
        FakeRun(precision="bf16_pure", seed=2, status="diverged", loss=math.nan, steps=(1, 2)),
    ]
    write_sweep(tmp_path, *pair_of_arms(*pure))
    reach = arms_of(report_on(tmp_path))["bf16_pure-anyprecision"].reach
    assert reach is not None
    assert (reach.num_reached, reach.num_seeds, reach.tokens) == (1, 2, math.inf)
    beside = section_of(markdown_of(tmp_path), "Beside the verdict")
    assert "| 1 of 2 | never | never |" in beside
    assert "[diverged](" in beside


def test_curves_are_compared_only_where_as_many_tokens_were_served(tmp_path: Path) -> None:
    write_sweep(tmp_path, *pair_of_arms(FakeRun(precision="bf16_pure", seed=1)))
    reference, pure = arms_of(report_on(tmp_path)).values()
    assert len(difference_band(pure, reference).step) == 4
    curve = pure.compared[1].curve
    assert curve is not None
    curve.tokens[:] *= 2
    assert len(difference_band(pure, reference).step) == 0


def test_the_metric_decides_what_is_compared(tmp_path: Path) -> None:
    pure = [FakeRun(precision="bf16_pure", seed=s, loss=3.2) for s in (1, 2)]
    write_sweep(tmp_path, *pair_of_arms(*pure))
    report = build_report([tmp_path], reference=None, margin=0.01, metric="eval_bits_per_byte")
    fp32, pure_arm = arms_of(report).values()
    assert fp32.loss_mean == pytest.approx(3.05 / 2)
    assert report.groups[0].margin == pytest.approx(0.01 * 3.05 / 2)
    assert pure_arm.comparison is not None
    assert pure_arm.comparison.difference == pytest.approx(0.15 / 2)
    write_report(report)
    assert "bits per byte over 2 seeds" in (tmp_path / "report/report.md").read_text()
    row = rows_of(tmp_path / "report/arms.csv")[0]
    assert (row["metric"], row["metric_mean"]) == ("eval_bits_per_byte", "1.525")
    assert row["final_eval_loss_mean"] == "3.05"


def test_the_noise_of_the_references_seeds_is_the_yardstick(tmp_path: Path) -> None:
    write_sweep(tmp_path, *pair_of_arms(FakeRun(precision="bf16_pure", seed=1)))
    assert report_on(tmp_path).groups[0].noise == pytest.approx(0.1 / math.sqrt(2))
    assert "itself varies by 0.0707" in section_of(markdown_of(tmp_path), "Verdict")


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({"train__lr": "1e-3"}, 4),
        ({"train__lr": "0.002,1e-3"}, 8),
        ({"seed": "2", "precision": "bf16_pure"}, 2),
        ({"arm": "fp32-anyprecision"}, 4),
        ({"train__epochs": "null"}, 8),
        ({"precision__kahan": "true"}, 4),
    ],
)
def test_filters_keep_the_runs_with_these_values(
    tmp_path: Path, filters: dict[str, str], count: int
) -> None:
    write_sweep(tmp_path, *two_learning_rates())
    report = filtered(tmp_path, **filters)
    assert len(report.runs) == count
    assert report.num_filtered == 8 - count


def test_the_report_says_what_a_filter_left_out(tmp_path: Path) -> None:
    write_sweep(tmp_path, *two_learning_rates(), FakeRun(seed=3, status=None))
    report = filtered(tmp_path, train__lr="1e-3")
    write_report(report)
    text = (tmp_path / "report/report.md").read_text(encoding="utf-8")
    assert (
        "Only runs with `train.lr=1e-3`: 4 of 9; 5 are left out, 1 of them for want of a record."
    ) in section_of(text, "Verdict")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("train.lrr", "1", "train.lrr: no run has this key; the nearest: train.lr"),
        ("train.lr", "5", "train.lr: no run has '5'; there are: 0.001, 0.002"),
        ("precision", "bf16", "precision: no run has 'bf16'; there are: bf16_pure, fp32"),
    ],
)
def test_a_filter_that_leaves_nothing_says_what_there_is(
    tmp_path: Path, key: str, value: str, words: str
) -> None:
    write_sweep(tmp_path, *two_learning_rates())
    with pytest.raises(UserError) as raised:
        build_report([tmp_path], reference=None, margin=0.01, filters={key: value})
    assert words in str(raised.value)


def test_a_forced_comparison_is_one_group_under_a_banner(tmp_path: Path) -> None:
    write_sweep(tmp_path, *two_learning_rates())
    report = build_report([tmp_path], reference=None, margin=0.01, force=True)
    assert list(arms_of(report)) == [
        "fp32-anyprecision (train.lr=0.001)",
        "bf16_pure-anyprecision (train.lr=0.001)",
        "fp32-anyprecision (train.lr=0.002)",
        "bf16_pure-anyprecision (train.lr=0.002)",
    ]
    assert all(arm.num_seeds == 2 for arm in arms_of(report).values())
    write_report(report)
    text = (tmp_path / "report/report.md").read_text(encoding="utf-8")
    assert (
        "**Forced: these runs do not match.** They differ in `train.lr` (0.001 \\| 0.002)" in text
    )


def test_a_forced_comparison_takes_runs_whose_evidence_disagrees_and_says_so(
    tmp_path: Path,
) -> None:
    other = FakeRun(precision="bf16_pure", init_hash="other", overrides={"train.lr": 2e-3})
    write_sweep(tmp_path, FakeRun(), other)
    report = build_report([tmp_path], reference=None, margin=0.01, force=True)
    assert arms_of(report)["bf16_pure-anyprecision"].num_seeds == 1
    (line,) = report.groups[0].evidence.unverified
    assert "init_hash" in line


def test_matched_runs_need_no_force(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun(), FakeRun(precision="bf16_pure"))
    assert not build_report([tmp_path], reference=None, margin=0.01, force=True).forced


def test_two_sweeps_are_compared_as_one(tmp_path: Path) -> None:
    write_sweep(tmp_path / "a", *pair_of_arms())
    write_sweep(tmp_path / "b", *(FakeRun(precision="bf16_pure", seed=s) for s in (1, 2)))
    fp32, pure = arms_of(report_on(tmp_path / "a", tmp_path / "b")).values()
    assert fp32.num_seeds == pure.num_seeds == 2
    assert pure.comparison is not None
    assert pure.comparison.num_pairs == 2


def test_curves_without_a_common_evaluation_say_so(tmp_path: Path) -> None:
    early = FakeRun(precision="bf16_pure", steps=(1, 2), overrides={"train.max_steps": 2})
    late = FakeRun(steps=(3, 4))
    write_sweep(tmp_path, late, early)
    report = build_report([tmp_path], reference=None, margin=0.01, force=True)
    titles = [axes.get_title(loc="left") for axes in draw_loss_curves(report).axes]
    assert any("No evaluation in common" in title for title in titles)


def test_the_table_for_a_paper(tmp_path: Path) -> None:
    pure = [FakeRun(precision="bf16_pure", seed=s, loss=v) for s, v in ((1, 3.1), (2, 3.2004))]
    write_sweep(tmp_path, *pair_of_arms(*pure))
    markdown_of(tmp_path)
    lines = (tmp_path / "report/arms.tex").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in lines if "bf16" in line]
    assert row.startswith(r"\texttt{bf16\_pure-anyprecision} & $10$ & $3.1502$ $\pm$ 0.0710 & ")
    assert row.endswith(r" & $+0.1002$ & $[+0.0989, +0.1015]$ & worse \\")


# What records of others, and of runs that ended badly, may hold


def test_a_metrics_file_cut_in_a_row_leaves_a_report(tmp_path: Path) -> None:
    pure = [FakeRun(precision="bf16_pure", seed=s) for s in (1, 2)]
    places = write_sweep(tmp_path, *pair_of_arms(*pure))
    for place in places[1:]:
        path = place / "metrics.jsonl"
        path.write_text(path.read_text()[:-9])
    markdown_of(tmp_path)
    assert "bf16_pure" in (tmp_path / "report/report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", "one"),
        ("match_key", None),
        ("status", "lost"),
        ("status", None),
        ("warnings", [1]),
        ("notices", [{}]),
    ],
)
def test_a_record_of_other_types_is_unreadable_and_named(
    key: str, value: object, tmp_path: Path
) -> None:
    place = write_sweep(tmp_path, FakeRun(), FakeRun(precision="bf16_pure"))[1]
    record = json.loads((place / "run.json").read_text())
    (place / "run.json").write_text(json.dumps({**record, key: value}))
    assert [run.status for run in report_on(tmp_path).runs] == ["completed", "unreadable"]
    assert "unreadable" in section_of(markdown_of(tmp_path), "Runs & failures")


def test_numbers_beyond_all_measure_are_no_numbers(tmp_path: Path) -> None:
    place = write_sweep(tmp_path, FakeRun(), FakeRun(precision="bf16_pure", loss=1e300))[0]
    text = (place / "run.json").read_text().replace('"final_eval_loss": 3.0', f'"x": 1{"0" * 400}')
    (place / "run.json").write_text(text)
    path = place / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 2', f'"step": 1{"0" * 30}'))
    markdown_of(tmp_path)


@pytest.mark.parametrize("value", ["[1", "*a", ": :", "!!python/object:x"])
def test_a_filter_that_is_no_yaml_is_text(value: str, tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun())
    with pytest.raises(UserError, match="seed: no run has"):
        filtered(tmp_path, seed=value)


def test_the_first_finished_run_of_a_seed_counts(tmp_path: Path) -> None:
    """A repeat of the reference that diverged excuses nobody."""
    diverged = [FakeRun(precision="bf16_pure", seed=s, status="diverged") for s in (1, 2)]
    write_sweep(tmp_path / "a", *pair_of_arms(*diverged))
    write_sweep(tmp_path / "b", FakeRun(seed=1, status="diverged"))
    arm = arms_of(report_on(tmp_path / "a", tmp_path / "b"))["bf16_pure-anyprecision"]
    assert arm.comparison is not None
    assert arm.comparison.verdict == "worse"


def test_seeds_that_the_reference_lost_are_named(tmp_path: Path) -> None:
    write_sweep(
        tmp_path,
        *pair_of_arms(*(FakeRun(precision="bf16_pure", seed=s) for s in (1, 2, 3))),
        FakeRun(seed=3, status="diverged"),
    )
    verdict = section_of(markdown_of(tmp_path), "Verdict")
    assert "`fp32-anyprecision` diverged on seed 3: nothing is compared there." in verdict


def test_what_was_not_evaluated_is_not_measured_and_not_never(tmp_path: Path) -> None:
    for place in write_sweep(tmp_path, *pair_of_arms(FakeRun(precision="bf16_pure", seed=1))):
        change_rows(place, "")
    assert all(arm.reach is None for arm in arms_of(report_on(tmp_path)).values())


def test_the_last_tenth_is_compared_at_the_same_steps(tmp_path: Path) -> None:
    places = write_sweep(tmp_path, *pair_of_arms(FakeRun(precision="bf16_pure", seed=1)))
    rows = (places[2] / "metrics.jsonl").read_text().splitlines(keepends=True)
    change_rows(places[2], "".join(rows[:-1]))
    late = arms_of(report_on(tmp_path))["bf16_pure-anyprecision"].late
    assert late is not None
    assert late.mean == 0


def test_every_form_says_that_a_comparison_is_forced_or_filtered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sweep(tmp_path, *two_learning_rates())
    assert main([str(tmp_path), "--force", "seed=1", "report.metric=eval_bits_per_byte"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Forced: these runs do not match." in out
    assert "Only runs with seed=1: 4 of 8; 4 are left out." in out
    assert "bits per byte (1 % of" in out.replace("0.5 %", "1 %")
    report = tmp_path / "report"
    for name in ("report.md", "report.html", "arms.tex"):
        text = (report / name).read_text(encoding="utf-8")
        assert "these runs do not match" in text, name
        assert "4 are left out" in text, name
    assert "every other value are the same" not in (report / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["seed=1", "seed=2"], "seed: given twice; write seed=1,2"),
        (["sweep.json"], "sweep.json: not a directory"),
    ],
)
def test_more_mistakes_are_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_sweep(tmp_path, FakeRun())
    monkeypatch.chdir(tmp_path)
    assert main([".", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_small_numbers_do_not_read_as_nothing() -> None:
    assert fixed(0.00001234) == "1.2e-05"
    assert fixed(-0.00001234, sign=True) == "-1.2e-05"
    assert fixed(0.0) == "0.0000"


def test_labels_are_no_markup_to_the_terminal_nor_to_latex(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record: dict[str, object] = {"arm": {"precision": "fp32", "optim": "x", "label": r"a[/b]^~\c"}}
    write_sweep(tmp_path, FakeRun(record=record))
    assert main([str(tmp_path)]) == 0
    assert r"a[/b]^~\c" in capsys.readouterr().out
    tex = (tmp_path / "report/arms.tex").read_text(encoding="utf-8")
    assert r"a[/b]\textasciicircum{}\textasciitilde{}\textbackslash{}c" in tex
