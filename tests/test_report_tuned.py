"""Tuned comparisons: chosen on one half of the seeds, compared on the other, by equal budgets."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from precexp import run as run_module
from precexp.cli import compose_sweep
from precexp.config import UserError, match_key, match_key_without
from precexp.report import Report, build_report, print_report, write_report
from precexp.report.__main__ import main, parse_arguments, recorded_settings
from precexp.report.build import ArmResult
from precexp.report.charts import chart_data
from precexp.report.tuning import Trial, best, halve, in_order, seeds_in_all
from tests.test_report import FakeRun, arms_of, verdicts_of, write_sweep
from tests.test_report_outputs import section_of

PURE = "bf16_pure-anyprecision"
FP32 = "fp32-anyprecision"
SEEDS = (1, 2, 3, 4)
GRID = (1e-3, 2e-3, 4e-3)


def run_of(precision: str, lr: float, seed: int, loss: float, **other: object) -> FakeRun:
    return FakeRun(
        precision=precision,
        seed=seed,
        loss=loss,
        overrides={"train.lr": lr},
        **other,  # type: ignore[arg-type]
    )


def grid_of(precision: str, losses: dict[float, tuple[float, ...]]) -> list[FakeRun]:
    """Runs of an arm: by learning rate, the loss of each seed from 1 on."""
    return [
        run_of(precision, lr, seed, loss)
        for lr, found in losses.items()
        for seed, loss in enumerate(found, 1)
    ]


def flat(loss: float, seeds: int = 4) -> tuple[float, ...]:
    """A loss that varies a little from seed to seed."""
    return tuple(loss + 0.001 * (seed % 2) for seed in range(seeds))


def fair_sweep() -> list[FakeRun]:
    """Both arms reach 3.0, at learning rates of their own; at the other's each is far off."""
    return [
        *grid_of("fp32", {1e-3: flat(3.5), 2e-3: flat(3.0), 4e-3: flat(3.4)}),
        *grid_of("bf16_pure", {1e-3: flat(3.0002), 2e-3: flat(3.6), 4e-3: flat(3.7)}),
    ]


def tuned_report(directory: Path, *, tuned: tuple[str, ...] = ("train.lr",)) -> Report:
    return build_report([directory], reference=None, margin=0.01, tuned=tuned)


def arms_at(directory: Path, *runs: FakeRun) -> dict[str, ArmResult]:
    write_sweep(directory, *runs)
    return arms_of(tuned_report(directory))


def chosen_of(arm: ArmResult) -> object:
    assert arm.tuning is not None
    assert arm.tuning.chosen is not None
    return arm.tuning.chosen.setting[0]


def reason_of(arm: ArmResult) -> str:
    assert arm.comparison is not None
    return arm.comparison.reason


def written(directory: Path) -> str:
    report = tuned_report(directory)
    write_report(report)
    return (report.output / "report.md").read_text(encoding="utf-8")


def printed(report: Report) -> str:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as captured:
        print_report(report, console)
    return captured.get()


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_seeds_are_halved_in_order_and_the_odd_one_compares() -> None:
    halves = halve([7, 3, 1, 3, 5, 9])
    assert (list(halves.selection), list(halves.comparison)) == ([1, 3], [5, 7, 9])
    assert [len(halve(range(seeds_in_all(count))).comparison) for count in (2, 3, 9)] == [2, 3, 9]


def test_the_least_mean_is_best_and_of_equals_the_smaller_value() -> None:
    trials = [
        Trial(setting=(8e-3,), losses={1: 3.0, 2: 3.0}),
        Trial(setting=(2e-3,), losses={1: 2.9, 2: 3.1}),
        Trial(setting=(1e-2,), losses={1: 3.0, 2: 3.2}),
    ]
    found = best(trials)
    assert found is not None
    assert found.setting == (2e-3,)
    assert [each.setting for each in in_order(trials)] == [(2e-3,), (8e-3,), (1e-2,)]


def test_values_are_ordered_as_numbers_and_before_words() -> None:
    settings = (("cosine",), (10,), (None,), (9.5,))
    trials = in_order(Trial(setting=setting, losses={}) for setting in settings)
    assert [trial.setting[0] for trial in trials] == [9.5, 10, "cosine", None]


def test_a_value_that_lost_a_seed_comes_last_whatever_its_mean() -> None:
    trials = [
        Trial(setting=(1,), losses={1: 4.0, 2: 4.0}),
        Trial(setting=(2,), losses={1: 2.0}, lost=[2]),
        Trial(setting=(3,), losses={}, lost=[1, 2]),
    ]
    assert sorted(trials, key=lambda trial: trial.rank) == trials


def test_each_arm_is_compared_at_its_own_best_value(tmp_path: Path) -> None:
    arms = arms_at(tmp_path, *fair_sweep())
    assert (chosen_of(arms[FP32]), chosen_of(arms[PURE])) == (2e-3, 1e-3)
    assert {label: sorted(arm.compared) for label, arm in arms.items()} == {
        FP32: [3, 4],
        PURE: [3, 4],
    }
    assert arms[FP32].loss_mean == pytest.approx(3.0005)
    assert verdicts_of(tuned_report(tmp_path))[PURE] == "equivalent"


def test_the_recorded_match_key_stays_and_the_groups_are_the_reports(tmp_path: Path) -> None:
    places = write_sweep(tmp_path, *fair_sweep())
    recorded = [json.loads((place / "run.json").read_text()) for place in places]
    assert len({record["match_key"] for record in recorded}) == 3
    for record, run in zip(recorded, fair_sweep(), strict=True):
        assert record["match_key"] == match_key(run.config)
        assert match_key_without(record["config"], ()) == record["match_key"]
    assert len(build_report([tmp_path], reference=None, margin=0.01).groups) == 3
    (group,) = tuned_report(tmp_path).groups
    assert group.match_key == match_key_without(recorded[0]["config"], ["train.lr"])
    assert group.title == ""


def test_what_differs_besides_the_tuned_keys_still_keeps_runs_apart(tmp_path: Path) -> None:
    other = FakeRun(overrides={"train.lr": 1e-3, "train.beta2": 0.999})
    write_sweep(tmp_path, *grid_of("fp32", {1e-3: (3.0,), 2e-3: (3.1,)}), other)
    report = tuned_report(tmp_path)
    assert [group.title for group in report.groups] == ["train.beta2=0.95", "train.beta2=0.999"]
    assert list(report.differing) == ["train.beta2"]


def test_an_arm_that_was_lucky_when_it_chose_is_judged_by_the_other_seeds(tmp_path: Path) -> None:
    """Its best value is 0.3 better than the reference where it chose, and 0.3 worse elsewhere."""
    lucky = {1e-3: (2.7, 2.7, 3.3, 3.3005), 2e-3: flat(3.1), 4e-3: flat(3.1)}
    reference = grid_of("fp32", dict.fromkeys(GRID, flat(3.0)))
    arm = arms_at(tmp_path, *reference, *grid_of("bf16_pure", lucky))[PURE]
    assert chosen_of(arm) == 1e-3
    assert arm.comparison is not None
    assert arm.comparison.verdict == "worse"
    assert arm.comparison.difference == pytest.approx(0.3, abs=0.01)


def test_what_the_comparison_seeds_say_of_other_values_changes_nothing(tmp_path: Path) -> None:
    """All that is not on a selection seed, nor at the chosen value, may be anything."""
    plain = fair_sweep()
    write_sweep(tmp_path / "plain", *plain)
    others = [
        run_of(run.precision, run.config.train.lr, run.seed, 0.5)
        if run.seed in (3, 4) and run.config.train.lr == 4e-3
        else run
        for run in fair_sweep()
    ]
    write_sweep(tmp_path / "others", *others)
    one, other = (arms_of(tuned_report(tmp_path / name)) for name in ("plain", "others"))
    for label in (FP32, PURE):
        assert one[label].comparison == other[label].comparison
        assert chosen_of(one[label]) == chosen_of(other[label])


def test_a_value_that_diverges_on_a_selection_seed_is_not_chosen(tmp_path: Path) -> None:
    runs = [run for run in fair_sweep() if (run.precision, run.seed) != ("bf16_pure", 1)]
    lost = {"status": "diverged", "steps": (1, 2)}
    runs += [run_of("bf16_pure", 1e-3, 1, math.nan, **lost)]
    runs += [run_of("bf16_pure", lr, 1, loss) for lr, loss in ((2e-3, 3.6), (4e-3, 3.7))]
    write_sweep(tmp_path, *runs)
    assert chosen_of(arms_of(tuned_report(tmp_path))[PURE]) == 2e-3
    assert (
        f"`{PURE}` diverged or failed on selection seed 1 at train.lr=0.001, which comes after"
    ) in section_of(written(tmp_path), "Tuning")


def test_an_arm_that_diverges_everywhere_is_judged_by_it(tmp_path: Path) -> None:
    lost = {"status": "diverged", "steps": (1, 2)}
    runs = grid_of("fp32", dict.fromkeys(GRID, flat(3.0)))
    runs += [run_of("bf16_pure", lr, seed, math.nan, **lost) for lr in GRID for seed in SEEDS]
    write_sweep(tmp_path, *runs)
    assert verdicts_of(tuned_report(tmp_path))[PURE] == "worse"
    assert "at none of its values" in section_of(written(tmp_path), "Tuning")


@pytest.mark.parametrize("who", ["bf16_pure", "fp32"])
def test_unequal_grids_get_no_verdict_and_it_is_said(tmp_path: Path, who: str) -> None:
    runs = [run for run in fair_sweep() if (run.precision, run.config.train.lr) != (who, 4e-3)]
    arms = arms_at(tmp_path, *runs)
    assert verdicts_of(tuned_report(tmp_path))[PURE] == "undecided"
    assert "unequal budgets are no fair comparison" in reason_of(arms[PURE])
    assert "0.001 | 0.002 | 0.004" in reason_of(arms[PURE])
    assert "did not try the same values" in section_of(written(tmp_path), "Tuning")
    assert "did not try the same values" in printed(tuned_report(tmp_path))


def test_values_on_comparison_seeds_alone_are_not_part_of_the_budget(tmp_path: Path) -> None:
    extra = run_of("bf16_pure", 8e-3, 4, 1.0)
    arms = arms_at(tmp_path, *fair_sweep(), extra)
    assert chosen_of(arms[PURE]) == 1e-3
    assert verdicts_of(tuned_report(tmp_path))[PURE] == "equivalent"


def test_the_runs_that_a_comparison_does_not_need_may_be_left_out(tmp_path: Path) -> None:
    """A thrifty sweep: the grid on the selection seeds, the comparison seeds at the best alone."""
    chosen = {"fp32": 2e-3, "bf16_pure": 1e-3}
    runs = [
        run
        for run in fair_sweep()
        if run.seed in (1, 2) or run.config.train.lr == chosen[run.precision]
    ]
    assert len(runs) == 16
    assert arms_at(tmp_path, *runs)[PURE].comparison is not None
    assert verdicts_of(tuned_report(tmp_path))[PURE] == "equivalent"


@pytest.mark.parametrize("status", ["running", "interrupted", None])
@pytest.mark.parametrize("who", ["bf16_pure", "fp32"])
def test_an_unfinished_selection_gets_no_verdict(
    tmp_path: Path, who: str, status: str | None
) -> None:
    runs = [
        run_of(who, 4e-3, 2, 3.0, status=status, steps=(1, 2))
        if (run.precision, run.seed, run.config.train.lr) == (who, 2, 4e-3)
        else run
        for run in fair_sweep()
    ]
    arms = arms_at(tmp_path, *runs)
    assert verdicts_of(tuned_report(tmp_path))[PURE] == "undecided"
    whose = "its" if who == "bf16_pure" else "the reference's"
    assert f"1 of {whose} selection run is not finished" in reason_of(arms[PURE])


def test_an_unfinished_comparison_run_is_only_a_pair_less(tmp_path: Path) -> None:
    runs = [
        run_of("bf16_pure", 1e-3, 3, 3.0, status="running", steps=(1, 2))
        if (run.precision, run.seed, run.config.train.lr) == ("bf16_pure", 3, 1e-3)
        else run
        for run in fair_sweep()
    ]
    arm = arms_at(tmp_path, *runs)[PURE]
    assert arm.comparison is not None
    assert (arm.comparison.verdict, arm.comparison.num_pairs) == ("undecided", 1)


@pytest.mark.parametrize(
    ("num_seeds", "words"),
    [
        (1, "its one seed leaves none to select on; at least 3 are needed"),
        (2, "at least 2 are needed (comparison seeds: 3 in all)"),
    ],
)
def test_too_few_seeds_say_how_many_are_needed(tmp_path: Path, num_seeds: int, words: str) -> None:
    runs = [run for run in fair_sweep() if run.seed <= num_seeds]
    arm = arms_at(tmp_path, *runs)[PURE]
    assert arm.comparison is not None
    assert arm.comparison.verdict == "undecided"
    assert words in arm.comparison.reason
    assert words in written(tmp_path)


def test_undecided_counts_the_seeds_to_select_on_too(tmp_path: Path) -> None:
    noisy = {**dict.fromkeys(GRID[1:], flat(3.5)), 1e-3: (3.0, 3.0, 3.06, 2.97)}
    arms = arms_at(
        tmp_path,
        *grid_of("fp32", dict.fromkeys(GRID, flat(3.0))),
        *grid_of("bf16_pure", noisy),
    )
    found = arms[PURE].comparison
    assert found is not None
    assert found.seeds_needed is not None
    in_all = 2 * found.seeds_needed - 1
    assert f"about {found.seeds_needed} seeds would decide" in found.reason
    assert found.reason.endswith(f"(comparison seeds: {in_all} in all)")


@pytest.mark.parametrize(("chosen", "end"), [(1e-3, "smallest"), (4e-3, "largest")])
def test_a_best_value_at_the_edge_of_the_grid_is_a_notice(
    tmp_path: Path, chosen: float, end: str
) -> None:
    losses = {lr: flat(3.0 if lr == chosen else 3.5) for lr in GRID}
    write_sweep(tmp_path, *grid_of("fp32", losses))
    notice = f"The best `train.lr` of `{FP32}`, {chosen}, is the grid's {end}: extend the grid."
    assert notice in section_of(written(tmp_path), "Tuning")
    assert notice.replace("`", "") in printed(tuned_report(tmp_path))


def test_a_best_value_inside_the_grid_is_none(tmp_path: Path) -> None:
    losses = {lr: flat(3.0 if lr == 2e-3 else 3.5) for lr in GRID}
    write_sweep(tmp_path, *grid_of("fp32", losses))
    assert "extend the grid" not in written(tmp_path)


def test_a_grid_of_one_value_tunes_nothing_and_says_so(tmp_path: Path) -> None:
    write_sweep(tmp_path, *grid_of("fp32", {1e-3: flat(3.0)}))
    tuning = section_of(written(tmp_path), "Tuning")
    assert "tried one value alone, so nothing was tuned" in tuning
    assert "extend the grid" not in tuning


def test_several_keys_are_tuned_together(tmp_path: Path) -> None:
    runs = [
        FakeRun(
            precision=precision,
            seed=seed,
            loss=3.0 + 0.001 * seed + abs(lr - best_lr) * 100 + (beta2 - 0.95),
            overrides={"train.lr": lr, "train.beta2": beta2},
        )
        for precision, best_lr in (("fp32", 1e-3), ("bf16_pure", 2e-3))
        for lr in (1e-3, 2e-3)
        for beta2 in (0.95, 0.999)
        for seed in SEEDS
    ]
    write_sweep(tmp_path, *runs)
    report = tuned_report(tmp_path, tuned=("train.lr", "train.beta2"))
    assert verdicts_of(report)[PURE] == "equivalent"
    write_report(report)
    chosen = [row["tuned"] for row in rows_of(report.output / "arms.csv")]
    assert chosen == [f"train.lr={lr}, train.beta2=0.95" for lr in (0.001, 0.002)]


def test_every_form_of_the_report_says_what_was_chosen(tmp_path: Path) -> None:
    write_sweep(tmp_path, *fair_sweep())
    report = tuned_report(tmp_path)
    text = written(tmp_path)
    output = report.output
    tuning = section_of(text, "Tuning")
    assert "Selected on 2 seeds (1, 2); compared on 2 seeds (3, 4)." in tuning
    assert f"| `{FP32}` | 3 values × 2 seeds | 0.002 | 3.0005 | 0.004 | 3.4005 |" in tuning
    assert "| 0.001 | 3.5005 | **3.0007** |" in tuning
    assert "| arm | train.lr | seeds |" in section_of(text, "Verdict")
    assert "one `match_key` without `train.lr`" in section_of(text, "Matched check")
    assert "| train.lr=0.001 | comparison (chosen) | 3 |" in section_of(text, "Runs & failures")
    arms = {row["label"]: row for row in rows_of(output / "arms.csv")}
    assert arms[PURE]["tuned"] == "train.lr=0.001"
    assert (arms[PURE]["num_values"], arms[PURE]["num_selection_seeds"]) == ("3", "2")
    assert float(arms[PURE]["selection_mean"]) == pytest.approx(3.0007)
    halves = {(row["seed"], row["half"]) for row in rows_of(output / "runs.csv")}
    assert halves == {
        ("1", "selection"), ("2", "selection"), ("3", "comparison"), ("4", "comparison")
    }  # fmt: skip
    chosen = [row for row in rows_of(output / "runs.csv") if row["chosen"] == "true"]
    assert {row["tuned"] for row in chosen if row["arm"] == FP32} == {"train.lr=0.002"}
    assert len(chosen) == 8
    assert "train.lr & bytes/param" in (output / "arms.tex").read_text()
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "<dt>train.lr</dt><dd>0.002</dd>" in page
    assert page.count('class="multiple tried"') == 2
    assert page.count("comparison seed 3: ") == 2
    assert (output / "tuning-1.svg").read_text().count("selection seed 1: ") == 6
    lines = printed(report)
    assert f"{PURE}: 3 values × 2 seeds; best 0.001, 3.0007; next 0.002, 3.6005" in lines


def test_the_experiment_gives_every_arm_the_same_grid_and_seeds() -> None:
    grids: dict[str, set[tuple[float, int]]] = {}
    for _, run in compose_sweep(["experiment=tuned"], multirun=True):
        assert run.config.report.tuned == ("train.lr",)
        grids.setdefault(run.arm.precision, set()).add((run.config.train.lr, run.config.seed))
    assert list(grids) == ["fp32", "bf16_mixed", "bf16_pure", "bf16_plain"]  # the quickstart's
    for grid in grids.values():
        assert grid == grids["fp32"]
        assert len(grid) == 18


def test_a_tuned_sweep_ends_with_its_report(
    command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "planned_memory", lambda *_: None)
    axes = ("precision=fp32,bf16_pure", "train.lr=1e-3,1e-2", "seed=1,2")
    assert command("experiment=tuned", "name=t", *axes) == 0
    text = (tmp_path / "outputs" / "t" / "report" / "report.md").read_text()
    assert "Selected on 1 seed (1); compared on 1 seed (2)." in section_of(text, "Tuning")
    assert len(rows_of(tmp_path / "outputs" / "t" / "report" / "runs.csv")) == 8


def test_curves_are_those_of_the_comparison_seeds_at_the_chosen_value(tmp_path: Path) -> None:
    stray = run_of("fp32", 4e-3, 3, math.nan, status="diverged", steps=(1, 2))
    runs = [run for run in fair_sweep() if run.place != stray.place]
    write_sweep(tmp_path, *runs, stray)
    report = tuned_report(tmp_path)
    (group,) = chart_data(report, report.output)["groups"]  # type: ignore[misc]
    assert sorted((run["arm"], run["seed"]) for run in group["runs"]) == [
        (arm, seed) for arm in (0, 1) for seed in (3, 4)
    ]


def test_a_report_that_tunes_nothing_says_nothing_of_it(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun(), FakeRun(precision="bf16_pure"))
    write_report(tuned_report(tmp_path))
    assert (tmp_path / "report" / "tuning-1.svg").exists() is False  # one seed: none to select on
    report = build_report([tmp_path], reference=None, margin=0.01)
    write_report(report)
    text = (report.output / "report.md").read_text()
    assert "## Tuning" not in text
    assert "tuned" not in section_of(text, "Runs & failures")


def test_a_chart_that_is_drawn_no_more_is_removed(tmp_path: Path) -> None:
    write_sweep(tmp_path, *fair_sweep())
    written(tmp_path)
    chart = tmp_path / "report" / "tuning-1.svg"
    assert chart.exists()
    write_report(build_report([tmp_path], reference=None, margin=0.01))
    assert not chart.exists()


@pytest.mark.parametrize("text", ["[train.lr,train.beta2]", "train.lr, train.beta2"])
def test_keys_are_given_with_or_without_brackets(text: str) -> None:
    found = parse_arguments(["a", f"report.tuned={text}"]).tuned
    assert found == ("train.lr", "train.beta2")
    assert parse_arguments(["a"]).tuned is None


def test_the_recorded_keys_are_taken_up_and_may_be_overruled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = fair_sweep()
    for run in runs:
        run.overrides["report.tuned"] = ["train.lr"]
    write_sweep(tmp_path, *runs)
    assert recorded_settings([tmp_path]).tuned == ("train.lr",)
    assert main([str(tmp_path)]) == 0
    assert "Tuned: train.lr." in capsys.readouterr().out
    assert main([str(tmp_path), "report.tuned=[]"]) == 0
    assert "Tuned:" not in capsys.readouterr().out


def test_a_recorded_sweep_can_be_reported_as_tuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sweep(tmp_path, *fair_sweep())
    assert main([str(tmp_path), "report.tuned=[train.lr]"]) == 0
    assert "Tuned: train.lr." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("train.lrr", "train.lrr is an unknown key (did you mean train.lr?)"),
        ("seed", "seed is what a choice is made over"),
        ("precision", "precision tells the arms apart"),
        ("optim.mode", "optim.mode tells the arms apart"),
        ("train.log_every", "train.log_every changes no number of a run"),
        ("wandb.project", "wandb.project changes no number of a run"),
        ("data.block_size", "data.block_size changes what is trained on"),
        ("train.max_steps", "train.max_steps changes what is trained on"),
        ("train.lr,train.lr", "train.lr is given twice"),
    ],
)
def test_a_key_that_cannot_be_tuned_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, words: str
) -> None:
    write_sweep(tmp_path, FakeRun())
    assert main([str(tmp_path), f"report.tuned=[{key}]"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: report.tuned: ")
    assert words in error
    assert error.count("\n") == 1
    with pytest.raises(UserError, match=r"report\.tuned: "):
        tuned_report(tmp_path, tuned=tuple(key.split(",")))
