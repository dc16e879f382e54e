"""What a sweep is: its planned runs, how one is launched, its report and exit code."""

import dataclasses
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
from precexp.record import (
    NewerSchemaError,
    RecordError,
    Status,
    lock_directory,
    one_line,
    read_record,
    sealed,
    taken_by,
    write_json,
    write_record,
)
from precexp.redact import redacted

SCHEMA = 1
STOP = ".stopped"  # in the sweep's directory: a run failed, and sweep.fail_fast is on


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
        return record.status
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
    """Raises RecordError if the directory is in use, not precexp's, or cannot be written in."""
    if directory.is_dir() and any(directory.iterdir()):
        os.close(lock_directory(directory))
        theirs, other = ("sweep.json", "run.json") if is_sweep else ("run.json", "sweep.json")
        if (directory / other).exists():
            holds = "a run, not a sweep" if is_sweep else "a sweep, not a run"
            raise RecordError(f"{directory}: holds {holds}; choose another name=")
        if not any((directory / name).exists() for name in (theirs, ".hydra")):
            raise RecordError(f"{directory}: holds no run of precexp; choose another name=")
    parent = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=".precexp-"):
            pass
    except OSError as error:
        raise RecordError(f"{directory}: cannot be written ({error.strerror})") from None


def write_plan(directory: Path, name: str, planned: Sequence[PlannedRun]) -> None:
    """sweep.json: what the end table and the exit code compare the records with."""
    runs = [
        {
            "directory": str(run.directory.relative_to(directory)),
            "arm": run.arm.label,
            "seed": run.config.seed,
            "config_hash": config_hash(run.config),
        }
        for run in planned
    ]
    write_json(directory / "sweep.json", sealed({"schema": SCHEMA, "name": name, "runs": runs}))
    (directory / STOP).unlink(missing_ok=True)


def launch(planned: PlannedRun) -> int:
    """Runs it, from where it stopped if it did, in a process of its own if the config says so.

    Returns 0 if it completed, 1 if not, 2 for a mistake of the user's. A failure is recorded and
    printed at once, so that a sweep goes on; only an interrupt is raised.
    """
    where = os.path.relpath(planned.directory)
    if status := finished(planned):
        print(f"{where}: has {status}, left as it is", flush=True)
        return 0 if status == "completed" else 1
    sweep = planned.directory.parents[1]  # of a run of a sweep
    if (sweep / STOP).exists():
        print(f"{where}: not started, because of sweep.fail_fast", flush=True)
        return 1
    code = _launch(planned)
    if code != 0 and planned.config.sweep.fail_fast and (sweep / "sweep.json").exists():
        (sweep / STOP).touch()
    return code


def _launch(planned: PlannedRun) -> int:
    if not _isolated(planned.config):
        return _run(planned)
    # Forked from a server that has imported torch and begun nothing: no CUDA context, no threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["precexp.run"])
    process = context.Process(target=_run_and_exit, args=(planned,))
    process.start()
    try:
        process.join()
    except KeyboardInterrupt:
        process.terminate()  # it makes a checkpoint, and may be as long about it as it likes
        process.join()
        raise
    assert process.exitcode is not None
    if process.exitcode not in (0, 1, 2):
        _record_death(planned, process.exitcode)
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
    write_report(report, directory / "report")
    print_report(report, Console())
    return 0 if all_completed(report) else 1


def _run_and_exit(planned: PlannedRun) -> None:
    interrupt_on_sigterm()
    try:
        sys.exit(_run(planned))
    except KeyboardInterrupt:  # recorded, and the parent's to tell
        sys.exit(1)


def _run(planned: PlannedRun) -> int:
    from precexp.run import run  # torch and transformers: seconds to import

    try:
        record = run(planned.config, arm=planned.arm, directory=planned.directory)
    except UserError as error:
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


def _isolated(config: RunConfig) -> bool:
    if config.sweep.isolate != "auto":
        return config.sweep.isolate
    from precexp.environment import pick_device  # torch

    return pick_device(config.device).type == "cuda"


def _record_death(planned: PlannedRun, exit_code: int) -> None:
    """Says of a run whose process died what the process itself could not."""
    error = f"its process died with exit code {exit_code}"
    path = planned.directory / "run.json"
    if path.exists():
        record = read_record(path)
        if record.status == "running":
            record = dataclasses.replace(record, status="failed", error=error)
            write_record(path, record)
    _failed(planned, error)
