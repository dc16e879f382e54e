"""What a sweep is: its planned runs, how one is launched, its report and exit code."""

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from precexp.config import (
    Arm,
    ReportConfig,
    RunConfig,
    UserError,
    as_dict,
    config_hash,
    differing_keys,
)
from precexp.launcher import LAUNCHERS, POLL_SECONDS, Launcher, Place, one_at_a_time
from precexp.record import (
    FINISHED,
    InUseError,
    NewerSchemaError,
    RecordError,
    Status,
    has_altered_rows,
    in_use,
    lock_directory,
    one_line,
    read_record,
    sealed,
    taken_by,
    unsealed,
    write_json,
    write_record,
)
from precexp.redact import redacted

SCHEMA = 1
STOP = ".stopped"  # in the sweep's directory: a run failed, and sweep.fail_fast is on
LEFT = 3  # as an exit code: another process works in the run, or has done it


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    config: RunConfig
    arm: Arm
    directory: Path


def subdirectory(config: RunConfig, arm: Arm) -> str:
    """The run's directory below its sweep's (docs/record.md)."""
    return f"{arm.label}/seed-{config.seed}-{config_hash(config)[:8]}"


def preflight(planned: Sequence[PlannedRun], directory: Path) -> None:
    """Raises UserError for any mistake in any of the runs, before anything is written."""
    check_directory(directory, is_sweep=planned[0].directory != directory)
    repeated = len(planned) - len({run.directory for run in planned})
    if repeated:
        raise UserError(f"sweep: {repeated} of its runs are the same as another one of them")
    from precexp.run import preflight as preflight_run  # torch and transformers: seconds to import

    for run in planned:
        if finished(run) is None:
            preflight_run(run.config)


def finished(planned: PlannedRun) -> Status | None:
    """`completed` or `diverged` if the run is recorded so; None if it is to start or to go on.

    Raises RecordError if its directory holds a run of another config.
    """
    path = planned.directory / "run.json"
    if not path.exists():
        return None
    try:
        record = read_record(path)
    except NewerSchemaError:
        raise
    except RecordError:
        return None  # the run sets it aside
    problem = taken_by(record, planned.config)
    if problem is None:
        return None
    if record.config_hash == config_hash(planned.config):
        # With other rows than it ended with, it goes on from its checkpoint.
        return None if has_altered_rows(planned.directory, record) else record.status
    raise RecordError(f"{planned.directory}: {problem}; choose another name=")


def changes(planned: Sequence[PlannedRun]) -> list[str]:
    """A line per way in which runs differ from earlier ones of their arm and seed beside them."""
    lines: dict[str, int] = {}
    for run in planned:
        for path in sorted(run.directory.parent.glob(f"seed-{run.config.seed}-*/run.json")):
            with suppress(RecordError):
                earlier = read_record(path)
                differing = differing_keys(earlier.config or {}, as_dict(run.config))
                if differing and not run.directory.exists():
                    text = ", ".join(differing)
                    lines[text] = lines.get(text, 0) + 1
    return [
        f"{count} of the runs begin beside earlier ones whose config differs ({text})"
        for text, count in lines.items()
    ]


def interrupt_on_sigterm() -> None:
    """SIGTERM ends a run like Ctrl-C: its record says `interrupted`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def check_directory(directory: Path, *, is_sweep: bool) -> None:
    """Raises RecordError if the directory is not precexp's, cannot be written in, or is in use.

    A sweep's may be: its launchers share it.
    """
    if directory.is_dir() and any(directory.iterdir()):
        if not is_sweep:
            os.close(lock_directory(directory))
        theirs, other = ("sweep.json", "run.json") if is_sweep else ("run.json", "sweep.json")
        if (directory / other).exists():
            holds = "a run, not a sweep" if is_sweep else "a sweep, not a run"
            raise RecordError(f"{directory}: holds {holds}; choose another name=")
        # A sweep may have died before its sweep.json was written, or found no room for it.
        if not any((directory / name).exists() for name in (theirs, ".hydra", LAUNCHERS)):
            raise RecordError(f"{directory}: holds no run of precexp; choose another name=")
    parent = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=".precexp-"):
            pass
    except OSError as error:
        raise RecordError(f"{directory}: cannot be written ({error.strerror})") from None


def write_plan(directory: Path, name: str, planned: Sequence[PlannedRun]) -> None:
    """sweep.json: what the end table and the exit code compare the records with."""
    plan = {"schema": SCHEMA, "name": name, "runs": _runs_of(directory, planned)}
    write_json(directory / "sweep.json", sealed(plan))
    (directory / STOP).unlink(missing_ok=True)


def check_plan(directory: Path, planned: Sequence[PlannedRun]) -> None:
    """Raises RecordError if the launchers that are at work in the directory plan other runs."""
    try:
        plan = unsealed(json.loads((directory / "sweep.json").read_text(encoding="utf-8")))
        theirs = sorted(plan["runs"], key=lambda run: run["directory"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{directory}/sweep.json: cannot be read ({one_line(error)})") from None
    if theirs != sorted(_runs_of(directory, planned), key=lambda run: run["directory"]):
        raise RecordError(
            f"{directory}: another process works in it on a sweep of other runs; "
            "choose another name="
        )


def _runs_of(directory: Path, planned: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    return [
        {
            "directory": str(run.directory.relative_to(directory)),
            "arm": run.arm.label,
            "seed": run.config.seed,
            "config_hash": config_hash(run.config),
        }
        for run in planned
    ]


def do_all(
    planned: Sequence[PlannedRun], launcher: Launcher, do: Callable[[Launcher], object]
) -> None:
    """Has `do` launch the runs, and launch again those that other processes leave undone.

    A run that another launcher works in is left to it, and waited for. A run whose process died is
    recorded as failed; of those that only died with a worker beside them, another try is made.
    Raises KeyboardInterrupt if the jobs were stopped.
    """
    may_retry = launcher.place == "workers"
    while True:
        lost, num_begun = False, _num_claimed(planned, launcher)
        try:
            do(launcher)
        except UserError:
            raise
        except Exception as error:
            if launcher.place == "launcher":
                raise
            lost = True
            print(f"precexp: jobs were lost: {one_line(error)}", file=sys.stderr, flush=True)
        is_stuck = lost and _num_claimed(planned, launcher) == num_begun
        _settle_deaths(planned, launcher, retry=lost and may_retry)
        may_retry = may_retry and not lost
        if launcher.stops:
            raise KeyboardInterrupt
        if is_stuck or not _wait_for_undone(planned, launcher):
            return
        launcher = dataclasses.replace(launcher, again=True)


def _num_claimed(planned: Sequence[PlannedRun], launcher: Launcher) -> int:
    return sum(launcher.has_claimed(config_hash(run.config)) for run in planned)


def _settle_deaths(planned: Sequence[PlannedRun], launcher: Launcher, *, retry: bool) -> None:
    """Records the death of runs that a job of this launcher began and did not end, or lets them be
    launched again."""
    for run in planned:
        key = config_hash(run.config)
        if not launcher.has_claimed(key):
            continue
        while _is_in_use(run.directory):  # a process that outlived its job makes its checkpoint
            time.sleep(POLL_SECONDS)
        if _status_of(run) in (None, "running"):
            if retry:
                launcher.unclaim(key)
            else:
                _record_death(run, "its process died")


def _wait_for_undone(planned: Sequence[PlannedRun], launcher: Launcher) -> bool:
    """Whether a run is to be launched again: False when all have ended, or are not to start."""
    told = False
    while True:
        undone = [run for run in planned if _is_undone(run, launcher)]
        if not undone:
            return False
        if not all(_is_in_use(run.directory) for run in undone):
            return True
        if not told:
            print(f"waiting for {len(undone)} runs that other processes work in", flush=True)
            told = True
        time.sleep(POLL_SECONDS)


def _is_undone(planned: PlannedRun, launcher: Launcher) -> bool:
    """Whether the run was neither ended nor tried since the launcher began."""
    return not (
        launcher.has_claimed(config_hash(planned.config))
        or _stopped_by_failure(planned)
        or finished(planned)
        or _failed_since(planned, launcher)
    )


def _stopped_by_failure(planned: PlannedRun) -> bool:
    sweep = planned.directory.parents[1]  # of a run of a sweep
    return planned.config.sweep.fail_fast and (sweep / STOP).exists()


def _failed_since(planned: PlannedRun, launcher: Launcher) -> bool:
    """Whether another try of the run has failed since the launcher began."""
    path = planned.directory / "run.json"
    if not path.exists() or path.stat().st_mtime_ns <= launcher.began_ns:
        return False
    return _status_of(planned) == "failed"


def _status_of(planned: PlannedRun) -> Status | None:
    """As its directory's record has it; None if there is none that can be read."""
    try:
        return read_record(planned.directory / "run.json").status
    except (OSError, RecordError):
        return None


def _is_in_use(directory: Path) -> bool:
    if not directory.exists():
        return False
    try:
        os.close(lock_directory(directory))
    except InUseError:
        return True
    return False


def launch(planned: PlannedRun, launcher: Launcher | None = None) -> int:
    """Runs it, from where it stopped if it did, in a process of its own if the config says so.

    Returns 0 if it completed, 1 if not, 2 for a mistake of the user's; in a sweep, LEFT if the run
    is another's. A failure is recorded and printed at once, so that a sweep goes on; only an
    interrupt is raised. `launcher` is the sweep's; None for a run of no sweep.
    """
    where = os.path.relpath(planned.directory)
    if status := finished(planned):
        if launcher is None or not launcher.again:
            print(f"{where}: has {status}, left as it is", flush=True)
        return 0 if status == "completed" else 1
    if launcher is None:
        code = _launch(planned, isolated=_isolated(planned.config, "launcher"))
        return _failed(planned, str(in_use(planned.directory)), code=2) if code == LEFT else code
    return _launch_in_sweep(planned, launcher, where)


def _launch_in_sweep(planned: PlannedRun, launcher: Launcher, where: str) -> int:
    key = config_hash(planned.config)
    if launcher.stops:
        return 1
    if _stopped_by_failure(planned):
        print(f"{where}: not started, because of sweep.fail_fast", flush=True)
        return 1
    if launcher.has_claimed(key) or _failed_since(planned, launcher):
        return 1  # it was told then
    code = LEFT
    if not _is_in_use(planned.directory):
        launcher.claim(key)
        code = _launch(planned, isolated=_isolated(planned.config, launcher.place))
    if code == LEFT:
        launcher.unclaim(key)
        if not launcher.again:
            print(f"{where}: another process works in it, left to that", flush=True)
    elif code != 0 and planned.config.sweep.fail_fast:
        (planned.directory.parents[1] / STOP).touch()
    return code


def _launch(planned: PlannedRun, *, isolated: bool) -> int:
    if not isolated:
        return _run(planned)
    # Forked from a server that has imported torch and begun nothing: no CUDA context, no threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["precexp.run"])
    # A joblib worker's default is joblib's own kind, which a process told of it does not know.
    multiprocessing.set_start_method("forkserver", force=True)
    process = context.Process(target=_run_and_exit, args=(planned,))
    process.start()
    try:
        process.join()
    except KeyboardInterrupt:
        process.terminate()  # it makes a checkpoint, and may be as long about it as it likes
        process.join()
        raise
    assert process.exitcode is not None
    if process.exitcode not in (0, 1, 2, LEFT):
        _record_death(planned, f"its process died with exit code {process.exitcode}")
        return 1
    return process.exitcode


def finish(directory: Path, config: ReportConfig) -> int:
    """Writes and prints the sweep's report from its records; 0 if every planned run completed."""
    from precexp.report import all_completed, build_report, print_report, write_report

    report = build_report(
        [directory],
        reference=config.reference,
        margin=config.margin,
        metric=config.metric,
        tuned=config.tuned,
    )
    with one_at_a_time(directory):
        write_report(report, directory / "report")
    print_report(report, Console())
    return 0 if all_completed(report) else 1


def _run_and_exit(planned: PlannedRun) -> None:
    interrupt_on_sigterm()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        sys.exit(_run(planned))
    except KeyboardInterrupt:  # recorded, and the parent's to tell
        sys.exit(1)


def _end_with_parent() -> None:
    """A run whose launcher was killed makes a checkpoint and ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _run(planned: PlannedRun) -> int:
    from precexp.run import run  # torch and transformers: seconds to import

    try:
        record = run(planned.config, arm=planned.arm, directory=planned.directory)
    except InUseError:
        return LEFT
    except UserError as error:
        if _status_of(planned) in FINISHED:  # another process has done it since this one looked
            return LEFT
        return _failed(planned, str(error), code=2)
    except Exception as error:
        return _failed(planned, f"{one_line(error)}{_keep_traceback(planned.directory)}")
    if record.status != "completed":
        return _failed(planned, f"{record.status}: {record.error}")
    return 0


def _keep_traceback(directory: Path) -> str:
    """Writes the traceback of the exception at hand; returns what to tell the user of it."""
    path = directory / "traceback.txt"
    try:
        path.write_text(redacted(traceback.format_exc()), encoding="utf-8")
    except OSError:  # a full disk, perhaps the very reason
        with suppress(OSError):
            path.unlink()
        return ""
    return f" (more in {path.name} there)"


def _failed(planned: PlannedRun, reason: str, *, code: int = 1) -> int:
    where = os.path.relpath(planned.directory)
    print(f"precexp: {where}: {reason}", file=sys.stderr, flush=True)
    return code


def _isolated(config: RunConfig, place: Place) -> bool:
    """Whether the run gets a process of its own, which it has in a job's."""
    if config.sweep.isolate != "auto" or place != "launcher":
        return config.sweep.isolate if config.sweep.isolate != "auto" else place == "workers"
    from precexp.environment import pick_device  # torch

    return pick_device(config.device).type == "cuda"


def _record_death(planned: PlannedRun, error: str) -> None:
    """Says of a run whose process died what the process itself could not."""
    path = planned.directory / "run.json"
    if path.exists():
        record = read_record(path)
        if record.status == "running":
            record = dataclasses.replace(record, status="failed", error=error)
            write_record(path, record)
    _failed(planned, error)
