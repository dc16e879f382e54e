"""Tracking: what wandb keeps is what the record says, and no state of wandb stops a run.

Offline runs are read back with wandb's own reader, online ones by a stand-in for its server.
"""

import math
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import pytest

from precexp import tracking
from precexp.config import UserError, WandbConfig
from precexp.record import Row, RunRecord
from precexp.tracking import Tracker, check_login, wandb_ids
from tests.wandb_server import (
    KEY,
    WandbServer,
    clean_wandb,
    only,
    records_of,
    serving,
    summary_of,
)

TOKEN = "hf_thetokenthatmustnotleak"


def wandb_config(mode: Literal["auto", "online", "offline", "disabled"]) -> WandbConfig:
    return WandbConfig(mode=mode, project="precexp", entity=None, tags=("a-tag",))


def make_record(*, seed: int = 1, status: Literal["running", "completed"] = "running") -> RunRecord:
    return RunRecord(
        run_id=f"sweep-bf16_pure-anyprecision-false-seed-{seed}",
        status=status,
        config_hash="c" * 64,
        match_key="d" * 64,
        arm={
            "precision": "bf16_pure",
            "optim": "anyprecision",
            "overrides": {"precision.kahan": False},
            "label": "bf16_pure-anyprecision-false",
        },
        seed=seed,
        config={"name": "sweep", "seed": seed, "train": {"lr": 1e-3, "max_steps": 4}},
        evidence={"init_hash": "e" * 64, "data_hash": "f" * 64, "data_hash_at": {"2": "f" * 64}},
        census={"bytes_per_param": {"weights": 2.0, "total": 10.0}, "tensors": []},
        timing={"tokens_per_second": 21034.5},
        memory={
            "planned": {"peak_bytes": 1000, "categories": {"weights": 400}},
            "measured": {"peak_bytes": 1010, "reserved_bytes": 2000},
        },
        results={"final_eval_loss": 5.25, "skipped_steps": 1},
    )


def make_row(step: int, *, loss: float = 5.5, eval_loss: float | None = None) -> Row:
    return Row(
        step=step,
        tokens=2048 * step,
        loss=loss,
        eval_loss=eval_loss,
        grad_norm=0.85,
        lr=9.1e-4,
        loss_scale=None,
        skipped=step == 2,
        step_seconds=0.1,
        peak_bytes=None,
        probes={"moved/all": 0.25},
    )


ROWS = [
    make_row(1),
    make_row(2, eval_loss=5.25),
    make_row(3, loss=math.nan, eval_loss=math.inf),
    make_row(4, eval_loss=5.75),
]


@pytest.fixture(autouse=True)
def _clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with clean_wandb(tmp_path_factory.mktemp("home")):
        yield


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two offline runs made in one process: `completed` and `failed`."""
    folder = tmp_path_factory.mktemp("sweep")
    with clean_wandb(folder / "home") as patch:
        patch.setenv("WANDB_API_KEY", KEY)
        patch.setenv("HF_TOKEN", TOKEN)
        for seed, name in enumerate(("completed", "failed"), start=1):
            (folder / name).mkdir()
            with (
                suppress(KeyError),
                Tracker(
                    wandb_config("offline"),
                    make_record(seed=seed),
                    directory=folder / name,
                    group="sweep",
                ) as tracker,
            ):
                for row in ROWS:
                    tracker.write(row)
                if name == "failed":
                    raise KeyError("the training broke")
                tracker.finish(make_record(seed=seed, status="completed"))
    return folder


@pytest.fixture(scope="module")
def completed(sweep: Path) -> list[dict[str, dict]]:
    return records_of(sweep / "completed")


@pytest.fixture(scope="module")
def failed(sweep: Path) -> list[dict[str, dict]]:
    return records_of(sweep / "failed")


def test_rows_are_those_of_the_record(completed: list[dict[str, dict]]) -> None:
    items = [history["item"] for history in only(completed, "history")]
    ours = [{k: v for k, v in item.items() if not k.startswith("_")} for item in items]
    assert ours[0] == {
        "step": 1,
        "tokens": 2048,
        "loss": 5.5,
        "grad_norm": 0.85,
        "lr": 9.1e-4,
        "skipped": 0,
        "step_seconds": 0.1,
        "numerics/moved/all": 0.25,
    }
    assert ours[1] == {**ours[0], "step": 2, "tokens": 4096, "skipped": 1, "eval_loss": 5.25}
    assert [item["step"] for item in ours] == [item["_step"] for item in items] == [1, 2, 3, 4]


def test_numbers_that_are_not_finite_are_kept(completed: list[dict[str, dict]]) -> None:
    third = only(completed, "history")[2]["item"]
    assert (third["loss"], third["eval_loss"]) == ("NaN", "Infinity")


def test_each_run_of_a_process_is_a_run_of_its_own_in_one_group(
    completed: list[dict[str, dict]], failed: list[dict[str, dict]]
) -> None:
    (first,), (second,) = only(completed, "run"), only(failed, "run")
    assert first["run_id"] != second["run_id"]
    assert first["run_group"] == second["run_group"] == "sweep"
    assert first["job_type"] == second["job_type"] == "bf16_pure-anyprecision-false"
    assert first["display_name"] == "bf16_pure-anyprecision-false-seed-1"
    assert second["display_name"] == "bf16_pure-anyprecision-false-seed-2"
    assert first["tags"] == ["a-tag"]
    assert [len(only(records, "history")) for records in (completed, failed)] == [4, 4]


def test_exit_codes_tell_completed_from_failed(
    completed: list[dict[str, dict]], failed: list[dict[str, dict]]
) -> None:
    for records, expected in ((completed, 0), (failed, 1)):
        (end,) = only(records, "exit")  # has whole seconds of runtime too, where it is slow
        assert end["exit_code"] == expected


def test_the_config_is_there_before_the_first_row(completed: list[dict[str, dict]]) -> None:
    first_row = next(i for i, record in enumerate(completed) if "history" in record)
    (run,) = only(completed[:first_row], "run")
    config = run["config"]["update"]
    record = make_record()
    assert config.pop("_wandb") == {}
    assert config == {
        **record.config,
        "arm": record.arm,
        "run_id": record.run_id,
        "config_hash": record.config_hash,
        "match_key": record.match_key,
    }


def test_losses_are_drawn_over_tokens_and_the_rest_over_steps(
    completed: list[dict[str, dict]],
) -> None:
    metrics = {m.get("name") or m["glob_name"]: m for m in only(completed, "metric")}
    axes = {name: metric.get("step_metric") for name, metric in metrics.items()}
    assert axes == {
        "step": None,
        "tokens": None,
        "*": "step",
        "loss": "tokens",
        "eval_loss": "tokens",
    }
    assert metrics["eval_loss"]["summary"] == {"min": True, "last": True}


def test_the_summary_is_the_outcome_of_the_record(completed: list[dict[str, dict]]) -> None:
    summary, record = summary_of(completed), make_record()
    assert summary["status"] == "completed"
    assert summary["error"] is None
    assert summary["results"] == record.results
    assert summary["timing"] == record.timing
    assert summary["evidence"] == {"init_hash": "e" * 64, "data_hash": "f" * 64}
    assert summary["bytes_per_param"] == {"weights": 2.0, "total": 10.0}
    peaks = {"planned": {"peak_bytes": 1000}, "measured": {"peak_bytes": 1010}}
    assert summary["memory"] == peaks
    assert summary["eval_loss"] == {"min": 5.25, "last": 5.75}


def test_no_secret_and_nothing_of_the_machine_but_its_name_is_kept(sweep: Path) -> None:
    files = [path for path in sweep.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    kept = b"".join(path.read_bytes() for path in files)
    assert b"config_hash" in kept, "what wandb keeps can be searched as text"
    for text in (KEY, TOKEN, "WANDB_API_KEY", "HF_TOKEN", str(Path(__file__)), sys.executable):
        assert text.encode() not in kept
    names = {path.name for path in files}
    assert not names & {"wandb-metadata.json", "requirements.txt", "output.log"}


def test_wandb_keeps_everything_under_the_run(sweep: Path) -> None:
    assert not list((sweep / "home").rglob("*"))
    assert [path.name for path in (sweep / "completed").iterdir()] == ["wandb"]


def track(
    config: WandbConfig, directory: Path, *, rows: list[Row] = ROWS, seed: int = 1
) -> list[str]:
    """Tracks a completed run; returns the notices."""
    directory.mkdir(parents=True, exist_ok=True)
    record = make_record(seed=seed)
    with Tracker(config, record, directory=directory, group="sweep") as tracker:
        for row in rows:
            tracker.write(row)
        tracker.finish(make_record(seed=seed, status="completed"))
    return tracker.notices


def test_a_diverged_run_is_a_failed_run_whose_summary_says_nan(tmp_path: Path) -> None:
    record = make_record()
    with Tracker(wandb_config("offline"), record, directory=tmp_path, group="sweep") as tracker:
        tracker.write(ROWS[0])
        record.status, record.results = "diverged", {"final_eval_loss": math.nan}
        tracker.finish(record)
    records = records_of(tmp_path)
    assert only(records, "exit") == [{"exit_code": 1}]
    assert summary_of(records)["status"] == "diverged"
    assert summary_of(records)["results"] == {"final_eval_loss": "nan"}


@pytest.mark.parametrize("place", ["sweep", "sweep/an arm/seed-1"])
def test_one_command_uploads_the_offline_runs_of_a_sweep(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (notice,) = track(wandb_config("offline"), tmp_path / "my outputs" / place)
    stars = "/*/*" if place != "sweep" else ""
    command = f"wandb sync 'my outputs/sweep'{stars}/wandb/offline-run-*"
    assert notice == f"wandb: offline (as asked); to upload: {command}"
    echo = subprocess.run(
        ["sh", "-c", command.replace("wandb sync", "echo", 1)], capture_output=True, text=True
    )
    (run,) = tmp_path.rglob("offline-run-*")
    assert echo.stdout.strip() == str(run.relative_to(tmp_path))


SCRIPT = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from tests.test_tracking import track, wandb_config
    from precexp import tracking
    from precexp.tracking import check_login

    tracking.INIT_SECONDS = 2
    config = wandb_config(sys.argv[1])
    check_login(config)
    assert "wandb" not in sys.modules
    print(track(config, Path(sys.argv[2])))
    print("wandb" in sys.modules)
    """
)


def run_script(
    mode: str,
    directory: Path,
    *,
    stdin: int = subprocess.DEVNULL,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """The lines of a process that tracks a run and nothing else; it prints no more than them."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode, str(directory)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **environment},
        stdin=stdin,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


def test_disabled_neither_imports_wandb_nor_writes(tmp_path: Path) -> None:
    assert run_script("disabled", tmp_path / "run") == ["[]", "False"]
    assert not list((tmp_path / "run").iterdir())


def test_without_a_key_auto_is_offline_and_asks_nobody(tmp_path: Path) -> None:
    """A terminal on stdin is where wandb itself would ask for the key and wait for ever."""
    ours, theirs = os.openpty()
    notices, imported = run_script("auto", tmp_path / "run", stdin=theirs)
    os.close(ours)
    os.close(theirs)
    assert "wandb: offline (no API key); to upload: wandb sync " in notices
    assert imported == "True"


@pytest.mark.parametrize(
    ("variable", "imported"), [("disabled", "False"), ("offline", "True"), ("dryrun", "True")]
)
def test_auto_obeys_wandb_mode(variable: str, imported: str, tmp_path: Path) -> None:
    environment = {"WANDB_MODE": variable, "WANDB_API_KEY": KEY}
    notices, was_imported = run_script("auto", tmp_path / "run", environment=environment)
    assert was_imported == imported
    assert ("offline (as asked)" in notices) == (variable != "disabled")


def test_online_without_a_key_is_refused_before_and_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")  # what is written in the command wins
    for attempt in (check_login, lambda config: track(config, tmp_path)):
        with pytest.raises(UserError, match=r"wandb\.mode: online .*no API key.*`wandb login`"):
            attempt(wandb_config("online"))
    assert not list(tmp_path.iterdir())


def test_a_key_that_cannot_be_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(UserError, match=r"WANDB_API_KEY invalid.*40"):
        check_login(wandb_config("online"))


def test_a_mode_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "onlin")
    with pytest.raises(UserError, match=r"WANDB_MODE: 'onlin' .*allowed: online, "):
        check_login(wandb_config("auto"))
    check_login(wandb_config("offline"))


def log_in_with_netrc(patch: pytest.MonkeyPatch) -> None:
    host = os.environ["WANDB_BASE_URL"].removeprefix("http://")
    (Path.home() / ".netrc").write_text(f"machine {host}\n  login user\n  password {KEY}\n")


def log_in_with_variable(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("WANDB_API_KEY", KEY)


def log_in_with_settings(patch: pytest.MonkeyPatch) -> None:
    settings = Path.home() / ".config/wandb/settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"[default]\napi_key = {KEY}\n")


@pytest.mark.parametrize("log_in", [log_in_with_netrc, log_in_with_variable, log_in_with_settings])
def test_every_way_to_log_in_is_found(
    log_in: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    log_in(monkeypatch)
    check_login(wandb_config("online"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("server", ["refuses", "is silent"])
def test_a_server_out_of_reach_means_offline_in_bounded_time(server: str, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if server == "is silent":
            listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        environment = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url}
        began = time.monotonic()
        notices, _ = run_script("auto", tmp_path, environment=environment)
        seconds = time.monotonic() - began
    # Of the whole process, whose end wandb can hold up by 12 s more. Seen 4.8.
    assert seconds < 2 + 6
    assert notices.startswith("['wandb: offline (CommError: Timed out")
    assert notices.count("wandb: ") == 1
    assert len(only(records_of(tmp_path), "history")) == len(ROWS)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with serving(monkeypatch) as server:
        yield server


def test_with_a_key_auto_is_online_and_says_where(
    server: WandbServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (notice,) = track(wandb_config("auto"), tmp_path)
    run = server.upserts[0]
    assert notice == f"wandb: {server.url}/somebody/precexp/runs/{run['name']}"
    assert (run["project"], run["groupName"]) == ("precexp", "sweep")
    assert run["jobType"] == "bf16_pure-anyprecision-false"
    assert run["program"] == "precexp", "not the path of the script"
    kept = server.runs[run["name"]]
    assert [row["step"] for row in kept.rows] == [1, 2, 3, 4]
    assert kept.exit_codes == [0]
    assert wandb_ids(tmp_path) == [run["name"]]
    assert capfd.readouterr() == ("", "")


def test_a_server_lost_on_the_way_costs_bounded_time_and_no_row(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "FINISH_SECONDS", 1)
    with Tracker(
        wandb_config("online"), make_record(), directory=tmp_path, group="sweep"
    ) as tracker:
        tracker.write(ROWS[0])
        server.shutdown()
        server.server_close()
        for row in ROWS[1:]:
            tracker.write(row)
        began = time.monotonic()
        tracker.finish(make_record(status="completed"))
    assert time.monotonic() - began < 1 + 3  # seen 1.5
    (folder,) = (tmp_path / "wandb").glob("run-*")
    assert tracker.notices[1:] == [f"wandb: upload given up; to complete it: wandb sync {folder}"]
    assert len(only(records_of(tmp_path), "history")) == len(ROWS)


def fail(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("method", "when"),
    [("log", "at step 1"), ("finish", "at its end"), ("define_metric", "before")],
)
def test_a_failure_of_wandb_ends_tracking_and_not_the_run(
    method: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setattr(wandb.Run, method, fail)
    notices = track(wandb_config("offline"), tmp_path)
    assert len(notices) == 2
    assert notices[1].startswith(f"wandb: tracking ended {when}")
    assert notices[1].endswith("(OSError: [Errno 28] No space left on device)")


def test_the_service_may_die_and_the_next_run_is_tracked(tmp_path: Path) -> None:
    with Tracker(
        wandb_config("offline"), make_record(), directory=tmp_path / "first", group="sweep"
    ) as tracker:
        tracker.write(ROWS[0])
        kill_service()
        for row in ROWS[1:]:
            tracker.write(row)
        tracker.finish(make_record(status="completed"))
    assert len(tracker.notices) == 2
    assert "tracking ended at step 2" in tracker.notices[1]

    assert len(track(wandb_config("offline"), tmp_path / "second")) == 1
    assert only(records_of(tmp_path / "second"), "exit") == [{"exit_code": 0}]


def kill_service() -> None:
    """Kills wandb's service, the child of this process, as the kernel would if memory ran out."""
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    (service,) = [c for c in children if "wandb-core" in Path(f"/proc/{c}/cmdline").read_text()]
    os.kill(int(service), 9)
    time.sleep(0.2)  # until the connection has noticed


def test_a_directory_wandb_cannot_use_ends_tracking_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "wandb").write_text("in the way")
    (notice,) = track(wandb_config("offline"), tmp_path)
    assert notice.startswith("wandb: tracking ended before its first row (")


def test_a_wandb_run_that_is_open_already_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path) as theirs:
        assert len(track(wandb_config("offline"), tmp_path / "run")) == 1
        theirs.log({"theirs": 1})
    assert len(only(records_of(tmp_path / "run"), "history")) == len(ROWS)
    assert len(only(records_of(tmp_path), "history")) == 1


def test_the_environment_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "false")
    before = dict(os.environ)
    track(wandb_config("offline"), tmp_path)
    after = dict(os.environ)
    after.pop("WANDB_SERVICE")  # wandb's own, for the children of this process
    assert after == before


# A run that is resumed


def resume(mode: Literal["online", "offline"], directory: Path) -> None:
    """Two rows of an attempt that breaks off, then one that goes on after the first of them."""
    with (
        suppress(KeyError),
        Tracker(wandb_config(mode), make_record(), directory=directory, group="sweep") as tracker,
    ):
        for row in ROWS[:2]:
            tracker.write(row)
        raise KeyError("killed")
    with Tracker(
        wandb_config(mode), make_record(), directory=directory, group="sweep", earlier=ROWS[:1]
    ) as tracker:
        for row in ROWS[1:]:
            tracker.write(row)
        tracker.finish(make_record(status="completed"))


def test_a_resumed_run_is_one_run_offline_with_each_step_once(tmp_path: Path) -> None:
    resume("offline", tmp_path)
    assert len(wandb_ids(tmp_path)) == 1
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
    records = records_of(tmp_path)
    assert [history["item"]["step"] for history in only(records, "history")] == [1, 2, 3, 4]


def test_a_resumed_run_goes_on_online_under_its_id_and_sends_no_row_twice(
    server: WandbServer, tmp_path: Path
) -> None:
    resume("online", tmp_path)
    (run,) = server.runs.values()
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    assert run.exit_codes == [1, 0]
    assert server.operations.count("RunResumeStatus") == 1


def test_a_run_that_was_offline_goes_on_online_with_all_its_rows(
    server: WandbServer, tmp_path: Path
) -> None:
    with (
        suppress(KeyError),
        Tracker(
            wandb_config("offline"), make_record(), directory=tmp_path, group="sweep"
        ) as tracker,
    ):
        tracker.write(ROWS[0])
        raise KeyError("killed")
    (earlier_id,) = wandb_ids(tmp_path)
    with Tracker(
        wandb_config("online"), make_record(), directory=tmp_path, group="sweep", earlier=ROWS[:1]
    ) as tracker:
        tracker.write(ROWS[1])
        tracker.finish(make_record(status="completed"))
    assert list(server.runs) == [earlier_id]
    assert [row["step"] for row in server.runs[earlier_id].rows] == [1, 2]
    assert wandb_ids(tmp_path) == [earlier_id]
