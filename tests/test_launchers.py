"""Sweeps whose runs are done by several processes at once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from precexp import cli, engine, environment
from precexp.cli import compose_sweep
from precexp.record import RecordError, read_run
from precexp.sweep import PlannedRun, check_plan, subdirectory, write_plan
from tests.micro import MICRO

LAUNCHERS = (
    "joblib",
    pytest.param("submitit_local", marks=pytest.mark.slow),
)


def statuses_of(sweep: Path) -> dict[int, str]:
    found = [json.loads(path.read_text()) for path in sweep.rglob("run.json")]
    return {record["seed"]: record["status"] for record in found}


def planned_in(sweep: Path, *overrides: str) -> list[PlannedRun]:
    return [
        PlannedRun(
            config=run.config, arm=run.arm, directory=sweep / subdirectory(run.config, run.arm)
        )
        for _, run in compose_sweep([*MICRO, *overrides], multirun=True)
    ]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_runs_at_once_end_as_runs_in_a_row_do(
    launcher: str,
    command: Callable[..., int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    sweep = tmp_path / "outputs/s"
    arguments = (
        "-m", f"hydra/launcher={launcher}", "name=s", "seed=1,2,3", "train.checkpoint_every=2",
    )  # fmt: skip
    _, blocked, _ = planned_in(sweep, "seed=1,2,3", "train.checkpoint_every=2")
    blocked.directory.mkdir(parents=True)
    (blocked.directory / "checkpoints").write_text("in the way")
    (sweep / ".hydra").mkdir()  # so that the folder is taken for precexp's
    assert command(*arguments) == 1
    said = capfd.readouterr()
    assert statuses_of(sweep) == {1: "completed", 2: "failed", 3: "completed"}
    assert f"precexp: {os.path.relpath(blocked.directory)}: OSError" in said.err
    assert "2 of 3 runs completed." in said.out
    assert "deprecated" not in said.err  # in Hydra, which warns of our presets in each worker
    share = max(1, environment.num_cores() // min(3, environment.num_cores()))
    threads = {read_run(p.parent).record.environment["threads"] for p in sweep.rglob("run.json")}
    assert threads == {share}

    (blocked.directory / "checkpoints").unlink()
    assert command(*arguments) == 0
    assert set(statuses_of(sweep).values()) == {"completed"}
    said = capfd.readouterr()
    assert said.out.count("has completed, left as it is") == 2
    assert "3 of 3 runs completed." in said.out


def test_two_launchers_of_one_sweep_do_each_run_once(tmp_path: Path, cache_dir: Path) -> None:
    steps = ("train.max_steps=150", "train.eval_every=150")
    both = [start(tmp_path, cache_dir, "name=s", "seed=1,2,3,4", *steps) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    for directory in [path.parent for path in (tmp_path / "outputs/s").rglob("run.json")]:
        found = read_run(directory)
        assert found.record.status == "completed"
        assert [row.step for row in found.rows] == list(range(1, 151))
        assert not any("resumed" in note for note in found.record.notices)
    for text in said:
        assert "4 of 4 runs completed." in text
    # Each was begun by one of them, and left by the other.
    assert sum(text.count("left to that") + text.count("left as it is") for text in said) == 4


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_stops_its_jobs_after_a_checkpoint(
    launcher: str, number: int, tmp_path: Path, cache_dir: Path
) -> None:
    steps = ("train.max_steps=1000", "train.eval_every=1000")
    arguments = (f"hydra/launcher={launcher}", "name=s", "seed=1,2,3", *steps)
    process = start(tmp_path, cache_dir, *arguments)
    sweep = tmp_path / "outputs/s"
    wait_for_rows(sweep)
    process.send_signal(number)
    said, _ = process.communicate()
    assert process.returncode == 1, said
    found = statuses_of(sweep)
    assert "interrupted" in found.values()
    assert set(found.values()) <= {"interrupted", "completed"}
    carried_on = start(tmp_path, cache_dir, *arguments)
    said, _ = carried_on.communicate()
    assert carried_on.returncode == 0, said
    assert "3 of 3 runs completed." in said
    for path in sweep.rglob("run.json"):
        assert [row.step for row in read_run(path.parent).rows] == list(range(1, 1001))


def start(tmp_path: Path, cache_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "precexp", "-m", *MICRO, f"data.cache_dir={cache_dir}", *arguments],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(engine.__file__).parent.parent)},
    )  # fmt: skip


def wait_for_rows(sweep: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(path.stat().st_size > 10_000 for path in sweep.rglob("metrics.jsonl")):
            return
        time.sleep(0.02)
    raise AssertionError(f"no run of {sweep} has begun")


def test_a_launcher_of_other_runs_is_refused_while_one_is_at_work(tmp_path: Path) -> None:
    planned = planned_in(tmp_path, "seed=1,2")
    write_plan(tmp_path, "s", planned)
    check_plan(tmp_path, planned)
    check_plan(tmp_path, planned[::-1])
    with pytest.raises(RecordError, match="a sweep of other runs; choose another name="):
        check_plan(tmp_path, planned[:1])


def test_sweeps_begun_in_one_microsecond_have_a_directory_each(
    command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_timestamps", lambda: iter(["now", "now-2"]))
    assert command("-m", "seed=1") == 0
    assert command("-m", "seed=1") == 0
    assert sorted(path.name for path in (tmp_path / "outputs").iterdir()) == ["now", "now-2"]


# Mistakes


@contextmanager
def gpus(number: int) -> Iterator[None]:
    """As if there were so many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "num_gpus", lambda: number)
        patch.setattr(environment, "pick_device", lambda _: torch.device("cuda"))
        patch.setattr(cli, "preflight", lambda *_: None)  # it would ask the GPU
        yield


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
         "hydra.launcher.n_jobs: 2 runs at once would share 1 GPU; allowed: up to 1, or "
         "device=cpu"),
        (["hydra/launcher=submitit_local", "hydra.sweeper.max_batch_size=2"],
         "hydra.sweeper.max_batch_size: 2 runs at once would share 1 GPU; allowed: up to 1, or "
         "device=cpu"),
    ],
)  # fmt: skip
def test_more_runs_at_once_than_gpus_are_refused(
    arguments: list[str],
    words: str,
    command: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with gpus(1):
        assert command("-m", "name=s", "seed=1,2,3", *arguments) == 2
    assert capsys.readouterr().err == f"precexp: {words}\n"
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=0"], "hydra.launcher.n_jobs: 0 is not"),
        (["hydra/launcher=submitit_slurm"], "hydra/launcher: 'submitit_slurm' is not one that"),
        (["hydra/launcher=jolib"], "hydra/launcher: 'jolib' is not a choice; allowed: basic, "),
    ],
)
def test_a_launcher_that_cannot_be_used_is_refused(
    arguments: list[str],
    words: str,
    command: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command("-m", "name=s", "seed=1,2", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"precexp: {words}")
    assert error.count("\n") == 1
    assert not (tmp_path / "outputs").exists()


def test_a_launcher_that_is_not_installed_names_its_extra(
    command: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda _: None)
    assert command("-m", "name=s", "seed=1,2", "hydra/launcher=joblib") == 2
    assert capsys.readouterr().err == (
        "precexp: hydra/launcher: joblib needs hydra-joblib-launcher; "
        "pip install 'precexp[joblib]'\n"
    )
    assert not (tmp_path / "outputs").exists()


def test_a_gpu_is_one_processs_until_that_ends(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom precexp.environment import take_free\n"
        "print(take_free(['a', 'b'], Path(sys.argv[1]))[0], flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "0\n"
        index, descriptor = environment.take_free(["a", "b"], tmp_path)
        assert index == 1
        os.close(descriptor)
        other.kill()
    index, descriptor = environment.take_free(["a", "b"], tmp_path)
    assert index == 0
    os.close(descriptor)
