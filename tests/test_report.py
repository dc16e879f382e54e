"""Reading, matching and comparing runs, on small sweeps made by the record's own writer."""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from precexp.config import Arm, RunConfig, UserError, conf_dir, config_hash, load
from precexp.record import Row, RunWriter, Status
from precexp.report import Report, all_completed, build_report
from precexp.report.build import ArmResult, problem
from precexp.report.tables import verdict_of

STEPS = (1, 2, 3, 4)
DTYPES = {"fp32": "float32", "bf16_mixed": "float32", "bf16_pure": "bfloat16"}


def config_of(
    precision: str, seed: int, *, optim: str = "anyprecision", overrides: Mapping[str, object]
) -> RunConfig:
    """The default config with these choices, composed without Hydra."""
    values = copy.deepcopy(composed_from(precision, optim))
    for key, value in {"name": "demo", "seed": seed, **overrides}.items():
        OmegaConf.update(values, key, value)
    return load(values)


@cache
def composed_from(precision: str, optim: str) -> DictConfig:
    """The default config with these choices: reading the files is most of what a fake run costs."""
    values = OmegaConf.load(conf_dir() / "config.yaml")
    assert isinstance(values, DictConfig)
    for key in ("defaults", "hydra"):
        values.pop(key)
    groups = {"model": "opt-tiny", "data": "bundled", "precision": precision, "optim": optim}
    for group, choice in groups.items():
        values[group] = OmegaConf.load(conf_dir() / group / f"{choice}.yaml")
    return values


@dataclass(kw_only=True)
class FakeRun:
    """What a run of a fake sweep is to have recorded; `status` None leaves it planned only."""

    precision: str = "fp32"
    seed: int = 1
    optim: str = "anyprecision"
    loss: float | None = 3.0  # the final eval loss
    status: Status | None = "completed"
    error: str | None = None
    steps: tuple[int, ...] = STEPS
    init_hash: str | None = None  # None: the seed's
    data_hash: str | None = None  # of every step; None: the seed's
    overrides: dict[str, object] = field(default_factory=dict)
    record: dict[str, object] = field(default_factory=dict)  # keys of run.json to set
    probes: dict[int, dict[str, float]] = field(default_factory=dict)  # by step
    lr: dict[int, float] = field(default_factory=dict)  # by step

    @cached_property
    def config(self) -> RunConfig:
        return config_of(self.precision, self.seed, optim=self.optim, overrides=self.overrides)

    @property
    def arm(self) -> Arm:
        return Arm(precision=self.precision, optim=self.optim, overrides={})

    @property
    def place(self) -> str:
        return f"{self.arm.label}/seed-{self.seed}-{config_hash(self.config)[:8]}"

    def write(self, directory: Path) -> Path:
        """Records the run below the sweep's directory; returns its own."""
        place = directory / self.place
        if self.status is None:
            return place
        with RunWriter(place, self.config, self.arm) as writer:
            writer.evidence(init_hash=self.init_hash or f"init-{self.seed}")
            for step in self.steps:
                writer.write(self.row(step))
                hashed = self.data_hash or f"data-{self.seed}-{step}"
                writer.evidence(data_hash=hashed, at_step=step)
            writer.update(census=census_of(self.precision))
            if self.status == "completed":
                writer.update(results=self.results(), timing={"tokens_per_second": 1000.0})
            writer.update(status=self.status, error=self.error, **self.record)
        return place

    def row(self, step: int) -> Row:
        last = step == self.steps[-1]
        loss = self.loss if last and self.loss is not None else 5.0 - 0.3 * step
        return Row(
            step=step,
            tokens=2048 * step,
            loss=loss,
            eval_loss=loss,
            grad_norm=1.0,
            lr=self.lr.get(step, 1e-3),
            loss_scale=None,
            skipped=False,
            step_seconds=0.1,
            peak_bytes=None,
            probes=self.probes.get(step),
        )

    def results(self) -> dict[str, object]:
        return {
            "final_eval_loss": self.loss,
            "final_train_loss": self.loss,
            "eval_bits_per_byte": None if self.loss is None else self.loss / 2,
            "steps": self.steps[-1],
            "applied_steps": self.steps[-1],
            "skipped_steps": 0,
            "tokens": 2048 * self.steps[-1],
        }


def census_of(precision: str) -> dict[str, object]:
    dtype = DTYPES[precision]
    size = 4 if dtype == "float32" else 2
    states = ["exp_avg", "exp_avg_sq"] + (["compensation"] if precision == "bf16_pure" else [])
    roles = ["parameters", "gradients", *states, "buffers"]
    parts = {"weights": size, "gradients": size, "states": size * len(states)}
    return {
        "bytes_per_param": {**parts, "total": sum(parts.values())},
        "tensors": [{"role": r, "dtype": dtype, "count": 9, "bytes": 9 * size} for r in roles],
    }


def write_sweep(directory: Path, *runs: FakeRun) -> list[Path]:
    """A sweep of these runs with its sweep.json; returns the runs' directories."""
    places = [run.write(directory) for run in runs]
    plan = [
        {
            "directory": run.place,
            "arm": run.arm.label,
            "seed": run.seed,
            "config_hash": config_hash(run.config),
        }
        for run in runs
    ]
    directory.mkdir(exist_ok=True)
    text = json.dumps({"schema": 1, "name": directory.name, "runs": plan})
    (directory / "sweep.json").write_text(text)
    return places


def report_on(*directories: Path, reference: str | None = None) -> Report:
    return build_report(directories, reference=reference, margin=0.01)


def arms_of(report: Report) -> dict[str, ArmResult]:
    (group,) = report.groups
    return {arm.label: arm for arm in group.arms}


def verdicts_of(report: Report) -> dict[str, str | None]:
    (group,) = report.groups
    return {arm.label: verdict_of(arm, group) for arm in group.arms}


def change_rows(place: Path, text: str) -> None:
    """Writes other rows, in a record that does not vouch for them, as of another writer."""
    (place / "metrics.jsonl").write_text(text)
    record = json.loads((place / "run.json").read_text())
    del record["rows_sha256"], record["own_sha256"]
    (place / "run.json").write_text(json.dumps(record))


def pair_of_arms(*pure: FakeRun) -> list[FakeRun]:
    """fp32 on seeds 1 and 2 with losses 3.0 and 3.1, and these runs."""
    return [FakeRun(seed=1, loss=3.0), FakeRun(seed=2, loss=3.1), *pure]


def test_arms_are_compared_seed_by_seed(tmp_path: Path) -> None:
    pure = [FakeRun(precision="bf16_pure", seed=s, loss=v) for s, v in ((1, 3.1), (2, 3.2004))]
    write_sweep(tmp_path, *pair_of_arms(*pure))
    report = report_on(tmp_path)
    assert verdicts_of(report) == {
        "fp32-anyprecision": "reference",
        "bf16_pure-anyprecision": "worse",
    }
    arm = arms_of(report)["bf16_pure-anyprecision"]
    assert arm.comparison is not None
    assert arm.comparison.difference == pytest.approx((0.1 + 0.1004) / 2)
    assert arm.loss_mean == pytest.approx((3.1 + 3.2004) / 2)
    assert arm.bits_per_byte == pytest.approx((3.1 + 3.2004) / 4)
    assert report.groups[0].margin == pytest.approx(0.01 * 3.05)
    assert all_completed(report)


def test_reference_comes_first_whatever_the_order_of_the_sweep(tmp_path: Path) -> None:
    runs = [
        FakeRun(precision="bf16_mixed"),
        FakeRun(precision="fp32"),
        FakeRun(precision="fp32", optim="adamw"),
    ]
    write_sweep(tmp_path, *runs)
    assert list(arms_of(report_on(tmp_path))) == [
        "fp32-adamw",
        "bf16_mixed-anyprecision",
        "fp32-anyprecision",
    ]
    asked = report_on(tmp_path, reference="bf16_mixed-anyprecision")
    assert asked.groups[0].reference == "bf16_mixed-anyprecision"


@pytest.mark.parametrize(
    ("precisions", "reference"),
    [
        (["bf16_mixed", "fp32"], "fp32-anyprecision"),
        (["bf16_pure", "bf16_mixed"], "bf16_mixed-anyprecision"),
        (["bf16_pure"], "bf16_pure-anyprecision"),
    ],
)
def test_default_reference(tmp_path: Path, precisions: list[str], reference: str) -> None:
    write_sweep(tmp_path, *(FakeRun(precision=precision) for precision in precisions))
    assert report_on(tmp_path).groups[0].reference == reference


def test_unknown_reference_lists_the_labels(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun(), FakeRun(precision="bf16_pure"))
    with pytest.raises(UserError, match="allowed: fp32-anyprecision, bf16_pure-anyprecision"):
        report_on(tmp_path, reference="fp23")


def test_groups_that_do_not_match_are_kept_apart_and_the_key_is_named(tmp_path: Path) -> None:
    runs = [
        FakeRun(precision=precision, overrides={"train.lr": lr})
        for lr in (1e-3, 2e-3)
        for precision in ("fp32", "bf16_pure")
    ]
    write_sweep(tmp_path, *runs)
    report = report_on(tmp_path)
    assert [group.title for group in report.groups] == ["train.lr=0.001", "train.lr=0.002"]
    assert report.differing == {"train.lr": ["0.001", "0.002"]}
    assert [len(arm.runs) for group in report.groups for arm in group.arms] == [1, 1, 1, 1]


def test_a_reference_that_a_group_lacks_leaves_it_uncompared(tmp_path: Path) -> None:
    runs = [
        FakeRun(precision="bf16_pure", overrides={"train.lr": 1e-3}),
        FakeRun(precision="bf16_mixed", overrides={"train.lr": 2e-3}),
        FakeRun(precision="fp32", overrides={"train.lr": 2e-3}),
    ]
    write_sweep(tmp_path, *runs)
    report = report_on(tmp_path, reference="bf16_mixed-anyprecision")
    assert [group.reference for group in report.groups] == [None, "bf16_mixed-anyprecision"]
    assert report.groups[0].arms[0].comparison is None


@pytest.mark.parametrize("evidence", [{"init_hash": "other"}, {"data_hash": "other"}])
def test_runs_whose_evidence_disagrees_are_refused(
    tmp_path: Path, evidence: dict[str, str]
) -> None:
    pure = FakeRun(precision="bf16_pure", **evidence)  # type: ignore[arg-type]
    place = write_sweep(tmp_path, FakeRun(), pure)[1]
    report = report_on(tmp_path)
    (reason,) = report.groups[0].evidence.refused.values()
    assert list(report.groups[0].evidence.refused) == [place]
    assert "bf16_pure-anyprecision, seed 1" in reason
    assert next(iter(evidence)) in reason
    assert arms_of(report)["bf16_pure-anyprecision"].num_seeds == 0


def test_data_is_compared_at_the_last_common_step(tmp_path: Path) -> None:
    short = FakeRun(precision="bf16_pure", status="interrupted", steps=(1, 2))
    write_sweep(tmp_path, FakeRun(), short)
    evidence = report_on(tmp_path).groups[0].evidence
    assert (evidence.num_checked, evidence.refused, evidence.unverified) == (1, {}, [])


def test_data_that_differs_late_is_refused(tmp_path: Path) -> None:
    hashes = {"1": "data-1-1", "4": "other"}  # as the reference's at step 1, not at step 4
    evidence = {"init_hash": "init-1", "data_hash": "other", "data_hash_at": hashes}
    write_sweep(tmp_path, FakeRun(), FakeRun(precision="bf16_pure", record={"evidence": evidence}))
    (reason,) = report_on(tmp_path).groups[0].evidence.refused.values()
    assert "data_hash at step 4" in reason


def test_a_reference_that_failed_before_it_had_weights_vouches_for_none(tmp_path: Path) -> None:
    never = {"init_hash": None, "data_hash": None, "data_hash_at": {}}
    failed = FakeRun(status="failed", steps=(), record={"evidence": never})
    others = [FakeRun(precision=precision) for precision in ("bf16_mixed", "bf16_pure")]
    others[1].init_hash = "other"
    write_sweep(tmp_path, failed, *others)
    evidence = report_on(tmp_path).groups[0].evidence
    assert [path.parent.name for path in evidence.refused] == ["bf16_pure-anyprecision"]


def test_no_common_evaluation_is_said_not_guessed(tmp_path: Path) -> None:
    early = FakeRun(precision="bf16_pure", status="interrupted", steps=(9,))
    write_sweep(tmp_path, FakeRun(), early)
    (line,) = report_on(tmp_path).groups[0].evidence.unverified
    assert "no evaluation step in common" in line


def test_a_diverged_run_counts_against_its_arm(tmp_path: Path) -> None:
    diverged = FakeRun(
        precision="bf16_pure", seed=2, status="diverged", steps=(1, 2, 3), loss=math.nan
    )
    pure = FakeRun(precision="bf16_pure", seed=1, loss=3.0)
    places = write_sweep(tmp_path, *pair_of_arms(pure, diverged))
    report = report_on(tmp_path)
    arm = arms_of(report)["bf16_pure-anyprecision"]
    assert (arm.num_seeds, list(arm.diverged)) == (1, [2])
    assert verdicts_of(report)["bf16_pure-anyprecision"] == "undecided"
    run = next(run for run in report.runs if run.directory == places[3])
    assert str(problem(run)).startswith("diverged at step 3")
    assert not all_completed(report)


def test_a_completed_run_with_a_nan_loss_counts_as_diverged(tmp_path: Path) -> None:
    pure = [FakeRun(precision="bf16_pure", seed=seed, loss=math.nan) for seed in (1, 2)]
    write_sweep(tmp_path, *pair_of_arms(*pure))
    report = report_on(tmp_path)
    arm = arms_of(report)["bf16_pure-anyprecision"]
    assert (arm.num_seeds, len(arm.diverged), arm.loss_mean) == (0, 2, None)
    assert verdicts_of(report)["bf16_pure-anyprecision"] == "worse"


def test_a_planned_run_without_a_record_is_missing(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun(), FakeRun(precision="bf16_pure", status=None))
    report = report_on(tmp_path)
    assert [run.status for run in report.runs] == ["completed", "missing"]
    assert verdicts_of(report)["bf16_pure-anyprecision"] == "undecided"
    assert not all_completed(report)


def test_a_run_that_no_sweep_plans_any_more_does_not_decide_the_exit_code(tmp_path: Path) -> None:
    FakeRun(status="interrupted", overrides={"train.lr": 5e-4}).write(tmp_path)
    write_sweep(tmp_path, FakeRun())
    report = report_on(tmp_path)
    assert sorted(run.status for run in report.runs) == ["completed", "interrupted"]
    assert all_completed(report)


def test_a_killed_run_is_incomplete(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun(), FakeRun(seed=2, status="running", steps=(1, 2)))
    killed = report_on(tmp_path).runs[1]
    assert killed.status == "running"
    assert problem(killed) == "incomplete after step 2: still running, or killed"


def test_a_half_written_last_row_is_no_row(tmp_path: Path) -> None:
    (place,) = write_sweep(tmp_path, FakeRun(status="running"))
    with (place / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 5, "tok')
    curve = report_on(tmp_path).runs[0].curve
    assert curve is not None
    assert curve.last_step == STEPS[-1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"schema": 99}', "schema 99"),
        ("[1, 2", "run.json"),
        ('{"schema": 1}', "not a run.json of precexp"),
    ],
)
def test_an_unreadable_record_does_not_hide_the_others(
    tmp_path: Path, text: str, reason: str
) -> None:
    place = write_sweep(tmp_path, FakeRun(seed=1), FakeRun(seed=2))[1]
    (place / "run.json").write_text(text)
    report = report_on(tmp_path)
    assert [run.status for run in report.runs] == ["completed", "unreadable"]
    assert reason in str(report.runs[1].error)
    assert not all_completed(report)


def test_a_block_of_the_wrong_shape_is_unreadable_and_null_is_empty(tmp_path: Path) -> None:
    wrong, empty = write_sweep(
        tmp_path,
        FakeRun(seed=1, record={"timing": [1, 2]}),
        FakeRun(seed=2, record={"timing": None, "warnings": None}),
    )
    statuses = {run.directory: run.status for run in report_on(tmp_path).runs}
    assert statuses == {wrong: "unreadable", empty: "completed"}


def test_an_unreadable_plan_is_listed_beside_the_runs(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun())
    (tmp_path / "sweep.json").write_text('{"schema": 7, "runs": []}')
    report = report_on(tmp_path)
    assert [run.status for run in report.runs] == ["unreadable", "completed"]
    assert "schema 7" in str(report.runs[0].error)


def test_a_run_directory_alone_has_nothing_to_compare_with(tmp_path: Path) -> None:
    place = FakeRun().write(tmp_path)
    report = report_on(place)
    assert verdicts_of(report) == {"fp32-anyprecision": None}
    assert all_completed(report)


def test_one_run_found_twice_counts_once(tmp_path: Path) -> None:
    place = write_sweep(tmp_path, FakeRun())[0]
    assert len(report_on(tmp_path, place).runs) == 1


def test_of_repeated_runs_of_one_seed_the_first_counts(tmp_path: Path) -> None:
    for name, loss in (("a", 3.0), ("b", 3.5)):
        write_sweep(tmp_path / name, FakeRun(loss=loss))
    arm = arms_of(report_on(tmp_path / "a", tmp_path / "b"))["fp32-anyprecision"]
    assert (len(arm.runs), arm.num_seeds, arm.loss_mean) == (2, 1, 3.0)


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_a_directory_without_runs_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=name) as raised:
        report_on(tmp_path / name)
    assert len(str(raised.value).splitlines()) == 1


def test_dropout_is_reported(tmp_path: Path) -> None:
    write_sweep(tmp_path, FakeRun(overrides={"model.dropout": 0.1}))
    assert report_on(tmp_path).groups[0].evidence.dropout == 0.1
