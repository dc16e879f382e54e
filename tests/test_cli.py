"""The program as its users run it: in this process where possible, in its own where it must be."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from precexp import __version__
from precexp import run as run_module
from precexp import sweep as sweep_module
from precexp.cli import compose, compose_sweep, main
from precexp.config import UserError
from precexp.record import read_run
from precexp.sweep import PlannedRun
from tests.micro import MICRO

planned_memory = run_module.planned_memory


@pytest.fixture(autouse=True)
def _no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning takes longer than a micro run; tests/test_memory.py has it."""
    monkeypatch.setattr(run_module, "planned_memory", lambda *_: None)


def records(directory: Path) -> dict[str, dict]:
    """run.json of every run below the directory, by the run's path."""
    return {
        str(path.parent.relative_to(directory)): json.loads(path.read_text())
        for path in sorted(directory.rglob("run.json"))
    }


def rows(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_single_run_leaves_its_record(
    command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "planned_memory", planned_memory)
    assert command("precision=bf16_pure", "name=one") == 0
    directory = tmp_path / "outputs" / "one"
    assert {p.name for p in directory.iterdir()} == {".hydra", "run.json", "metrics.jsonl"}
    record = json.loads((directory / "run.json").read_text())
    assert (record["schema"], record["status"], record["error"]) == (1, "completed", None)
    assert record["arm"]["label"] == "bf16_pure-anyprecision"
    assert set(record["evidence"]["data_hash_at"]) == {"2", "4"}
    assert record["evidence"]["data_hash_at"]["4"] == record["evidence"]["data_hash"]
    assert record["results"]["steps"] == record["results"]["applied_steps"] == 4
    assert record["results"]["tokens"] == 4 * 2 * 32
    planned, measured = record["memory"]["planned"], record["memory"]["measured"]
    assert planned["device"] == "cpu"
    assert measured["peak_bytes"] == pytest.approx(planned["peak_bytes"], rel=1e-3)
    assert sum(measured["categories"].values()) == measured["peak_bytes"]
    assert record["warnings"] == []
    assert [row["step"] for row in rows(directory)] == [1, 2, 3, 4]
    assert rows(directory)[-1]["eval_loss"] == record["results"]["final_eval_loss"]


BYTES = {"fp32": 16.0, "bf16_mixed": 16.0, "fp16_amp": 16.0, "bf16_pure": 10.0, "bf16_plain": 8.0}


def test_every_recipe_has_the_bytes_per_parameter_of_the_design(
    command: Callable[..., int], tmp_path: Path
) -> None:
    assert command("-m", "name=all", f"precision={','.join(BYTES)}") == 0
    found = {
        record["arm"]["precision"]: record["census"]["bytes_per_param"]["total"]
        for record in records(tmp_path / "outputs" / "all").values()
    }
    assert found == BYTES


def test_adamw_under_pure_bf16_has_eight_bytes_per_parameter(
    command: Callable[..., int], tmp_path: Path
) -> None:
    assert command("name=x", "precision=bf16_pure", "optim=adamw") == 0
    census = records(tmp_path / "outputs" / "x")["."]["census"]
    assert census["bytes_per_param"] == {
        "weights": 2.0, "gradients": 2.0, "states": 4.0, "total": 8.0}  # fmt: skip


def test_a_sweep_lays_out_matched_runs_and_reports_them(
    command: Callable[..., int], tmp_path: Path
) -> None:
    assert command("-m", "name=s", "precision=fp32,bf16_pure", "optim=anyprecision,adamw",
                   "seed=1,2") == 0  # fmt: skip
    directory = tmp_path / "outputs" / "s"
    found = records(directory)
    plan = json.loads((directory / "sweep.json").read_text())
    assert {run["directory"] for run in plan["runs"]} == set(found)
    for path, record in found.items():
        assert path == (
            f"{record['arm']['label']}/seed-{record['seed']}-{record['config_hash'][:8]}"
        )
    for seed in (1, 2):
        evidence = [r["evidence"] for r in found.values() if r["seed"] == seed]
        assert len(evidence) == 4
        assert len({e["init_hash"] for e in evidence}) == 1
        assert len({e["data_hash"] for e in evidence}) == 1
    assert len({r["evidence"]["init_hash"] for r in found.values()}) == 2
    assert len({r["evidence"]["data_hash"] for r in found.values()}) == 2
    assert len({r["match_key"] for r in found.values()}) == 1
    report = {p.name for p in (directory / "report").iterdir()}
    assert {"report.html", "report.md", "runs.csv", "arms.csv", "loss_curves.svg"} <= report
    with (directory / "report" / "runs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 8


def test_an_interpolation_in_an_override_is_resolved_in_each_job() -> None:
    planned = compose_sweep(["seed=3,4", "train.warmup_steps=${seed}"], multirun=True)
    assert [run.config.train.warmup_steps for _, run in planned] == [3, 4]


def test_overrides_of_an_arm_name_its_directory(
    command: Callable[..., int], tmp_path: Path
) -> None:
    assert command("-m", "name=s", "precision=bf16_pure",
                   "optim.variance_dtype=float32,bfloat16") == 0  # fmt: skip
    arms = {path.split("/")[0] for path in records(tmp_path / "outputs" / "s")}
    assert arms == {"bf16_pure-anyprecision", "bf16_pure-anyprecision-variance_dtype-float32"}


def test_two_runs_of_one_config_write_the_same_numbers(
    command: Callable[..., int], tmp_path: Path
) -> None:
    for name in ("first", "second"):
        assert command("precision=bf16_mixed", f"name={name}") == 0
    first, second = (
        [{**row, "step_seconds": None} for row in rows(tmp_path / "outputs" / name)]
        for name in ("first", "second")
    )
    assert first == second


def test_without_a_name_runs_get_their_own_directories(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command() == 0
    assert command() == 0
    names = {path.name for path in (tmp_path / "outputs").iterdir()}
    assert len(names) == 2
    printed = capsys.readouterr().out
    assert all(f"name={name}" in printed for name in names)
    assert printed.startswith("carry on with: python -m precexp ")


def test_a_failing_run_does_not_stop_the_others(
    command: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    build_model = run_module.build_model

    def fail_on_seed_2(config, *, seed):  # type: ignore[no-untyped-def]
        if seed == 2:
            raise RuntimeError("CUDA error: planted\nwith a second line")
        return build_model(config, seed=seed)

    monkeypatch.setattr(run_module, "build_model", fail_on_seed_2)
    assert command("-m", "name=s", "seed=1,2,3") == 1
    found = records(tmp_path / "outputs" / "s")
    assert {r["seed"]: r["status"] for r in found.values()} == {
        1: "completed", 2: "failed", 3: "completed"}  # fmt: skip
    (failed,) = [path for path, r in found.items() if r["status"] == "failed"]
    assert found[failed]["error"] == "RuntimeError: CUDA error: planted"
    assert "planted" in (tmp_path / "outputs" / "s" / failed / "traceback.txt").read_text()
    output = capsys.readouterr()
    assert output.err.count("planted") == 1  # at once
    assert "planted" in output.out  # and in the end table


def test_a_diverged_run_is_recorded_with_its_step(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("name=d", "train.lr=1e30", "train.max_steps=6") == 1
    record = records(tmp_path / "outputs" / "d")["."]
    assert record["status"] == "diverged"
    assert record["error"] == "eval loss nan at step 2"
    assert rows(tmp_path / "outputs" / "d")[-1]["eval_loss"] == "nan"
    assert "diverged" in capsys.readouterr().err


MISTAKES = [
    (("precison=bf16_pure",), "precison: unknown key (did you mean precision?); allowed: name,"),
    (("precision=bf16",), "precision: 'bf16' is not a choice; allowed: bf16_mixed, bf16_plain,"),
    (("optim.use_kahan=1",), "unknown key (did you mean use_kahan_summation?)"),
    (("+optim.use_kahan=1",), "optim.use_kahan: unknown key"),
    (("experiment=quick",), "experiment: 'quick' is not a choice; allowed: miniature, opt-1.3b, "),
    (("-m", "precison=a,b"), "precison: unknown key (did you mean precision?)"),
    (("-m", "precision=fp32,bf16"), "precision: 'bf16' is not a choice"),
    (("-m", "train.lr=1e-3,abc"), "train.lr: 'abc' is not allowed; it must be a number"),
    (("-m", "name=a,b"), "name: cannot be swept"),
    (("-m", "seed=1,1"), "1 of its runs are the same"),
    (("train.lr=abc",), "train.lr: 'abc' is not allowed; it must be a number"),
    (("precision=fp32,bf16_pure",), "to sweep over the values, add -m"),
    (("nonsense",), "nonsense: not understood; write key=value"),
    (("--config-dir", "nowhere"), "--config-dir: nowhere is not a folder"),
    (("data.block_size=513",), "data.block_size: 513 is more than the 512 positions"),
    (("model.vocab_size=100",), "vocabulary"),
    (("data=text", "data.train_files=[missing.txt]"), "missing.txt"),
    (("device=cuda",), "device: cuda is not there"),
    (("train.max_steps=null", "train.epochs=1", "train.batch_size=1000000"), "train.epochs"),
    (("wandb.mode=online",), "wandb"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda v: str(v)[:40])
def test_a_mistake_is_one_line_exit_2_and_nothing_on_disk(
    arguments: tuple[str, ...],
    message: str,
    command: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("precexp: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_output_directory_that_cannot_be_made_is_refused(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outputs").write_text("a file")
    assert command("name=x") == 2
    assert capsys.readouterr().err == ("precexp: outputs/x: cannot be written (Not a directory)\n")


def test_the_quickstart_is_a_sweep_by_itself(command: Callable[..., int], tmp_path: Path) -> None:
    micro = ("train.max_steps=2", "train.eval_every=2")
    assert command("experiment=quickstart", "name=q", *micro) == 0
    found = records(tmp_path / "outputs" / "q").values()
    assert {(r["arm"]["precision"], r["seed"]) for r in found} == {
        (precision, seed)
        for precision in ("fp32", "bf16_mixed", "bf16_pure", "bf16_plain")
        for seed in (1, 2)
    }


def test_the_quickstarts_axes_can_be_changed(command: Callable[..., int], tmp_path: Path) -> None:
    assert command("experiment=quickstart", "name=q", "precision=fp32", "seed=7") == 0
    found = records(tmp_path / "outputs" / "q").values()
    assert [(r["arm"]["precision"], r["seed"]) for r in found] == [("fp32", 7)]


def test_own_configs_join_through_config_dir(command: Callable[..., int], tmp_path: Path) -> None:
    own = tmp_path / "own" / "precision"
    own.mkdir(parents=True)
    base = Path(__file__).parent.parent / "conf" / "precision" / "bf16_pure.yaml"
    (own / "mine.yaml").write_text(base.read_text())
    assert command("--config-dir", "own", "precision=mine", "name=x") == 0
    assert records(tmp_path / "outputs" / "x")["."]["arm"]["label"] == "mine-anyprecision"


def test_a_stray_conf_folder_is_not_picked_up(command: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("seed: 99\n")
    assert command("name=x") == 0
    assert records(tmp_path / "outputs" / "x")["."]["seed"] == 42


def test_checkpoints_are_written_when_asked_for(
    command: Callable[..., int], tmp_path: Path
) -> None:
    assert command("name=x", "train.checkpoint_every=1") == 0
    folder = tmp_path / "outputs" / "x" / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_config_is_shown_and_nothing_runs(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--cfg", "job", "precision=bf16_pure", "-p", "precision") == 0
    assert "kahan: true" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_of_a_sweep_no_config_is_shown(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("-m", "--cfg", "job", "precision=fp32,bf16_pure") == 2
    assert "leave -m out" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"precexp {__version__}\n"


def test_compose_serves_other_commands() -> None:
    planned = compose(["precision=bf16_pure", "train.lr=1e-4"])
    assert planned.arm.label == "bf16_pure-anyprecision"
    assert planned.config.train.lr == 1e-4
    with pytest.raises(UserError, match="precision: 'bf16' is not a choice"):
        compose(["precision=bf16"])


def test_an_isolated_run_is_recorded_like_any_other(
    command: Callable[..., int], tmp_path: Path
) -> None:
    assert command("name=x", "sweep.isolate=true") == 0
    assert read_run(tmp_path / "outputs" / "x").record.status == "completed"


def start_and_die(planned: PlannedRun) -> None:
    """What an isolated run does whose process the kernel kills in the middle."""
    run_module.Progress.__enter__ = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
    sweep_module._run(planned)


def test_an_isolated_run_whose_process_dies_is_a_failed_run(
    command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "_run_and_exit", start_and_die)
    assert command("-m", "name=x", "sweep.isolate=true", "seed=1") == 1
    (record,) = records(tmp_path / "outputs" / "x").values()
    assert record["status"] == "failed"
    assert record["error"] == "its process died with exit code -9"


@pytest.fixture
def started(cache_dir: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An endless run in a process of its own, some steps in."""
    endless = ("name=x", "train.max_steps=1000000", "train.eval_every=1000000")
    with subprocess.Popen(
        [sys.executable, "-m", "precexp", *MICRO, f"data.cache_dir={cache_dir}", *endless],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        metrics = tmp_path / "outputs" / "x" / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_says_so(
    number: signal.Signals, started: subprocess.Popen[str], tmp_path: Path
) -> None:
    started.send_signal(number)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 1
    assert errors.endswith("precexp: interrupted\n")
    assert "Traceback" not in errors
    assert read_run(tmp_path / "outputs" / "x").record.status == "interrupted"


def test_a_killed_run_has_its_config_and_rows_and_never_claims_to_have_ended(
    started: subprocess.Popen[str], tmp_path: Path
) -> None:
    started.kill()
    started.communicate(timeout=60)
    run = read_run(tmp_path / "outputs" / "x")
    assert run.record.status == "running"
    assert run.record.config["train"]["max_steps"] == 1000000  # type: ignore[index]
    assert [row.step for row in run.rows] == list(range(1, len(run.rows) + 1))


def test_a_directory_in_use_is_refused(
    started: subprocess.Popen[str],
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert started.poll() is None
    assert command("name=x") == 2
    assert "outputs/x: another process works in it" in capsys.readouterr().err
