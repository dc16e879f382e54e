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

from precexp.config import Arm, ReportConfig, RunConfig, UserError, config_hash
from precexp.record import (
    RecordError,
    lock_directory,
    one_line,
    read_record,
    write_json,
)

SCHEMA = 1


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
    check_directory(directory)
    repeated = len(planned) - len({run.directory for run in planned})
    if repeated:
        raise UserError(f"sweep: {repeated} of its runs are the same as another one of them")
    from precexp.run import preflight as preflight_run  # torch and transformers: seconds to import

    for run in planned:
        preflight_run(run.config)


def interrupt_on_sigterm() -> None:
    """SIGTERM ends a run like Ctrl-C: its record says `interrupted`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def check_directory(directory: Path) -> None:
    """Raises RecordError if the directory is in use or cannot be made and written in."""
    if directory.is_dir() and any(directory.iterdir()):
        os.close(lock_directory(directory))
        raise RecordError(f"{directory}: exists already; choose another name=")
    parent = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=".precexp-"):
            pass
    except OSError as error:
        raise RecordError(f"{directory}: cannot be written ({error.strerror})") from None


def write_plan(directory: Path, name: str, planned: Sequence[PlannedRun]) -> None:
    """sweep.json: what the end table and the exit code compare the records with."""
    directory.mkdir(parents=True, exist_ok=True)
    runs = [
        {
            "directory": str(run.directory.relative_to(directory)),
            "arm": run.arm.label,
            "seed": run.config.seed,
            "config_hash": config_hash(run.config),
        }
        for run in planned
    ]
    write_json(directory / "sweep.json", {"schema": SCHEMA, "name": name, "runs": runs})


def launch(planned: PlannedRun) -> int:
    """Runs it to its end, in a process of its own if the config says so.

    Returns 0 if it completed, 1 if not, 2 for a mistake of the user's. A failure is recorded and
    printed at once, so that a sweep goes on; only an interrupt is raised.
    """
    if not _isolated(planned.config):
        return _run(planned)
    process = multiprocessing.get_context("spawn").Process(target=_run_and_exit, args=(planned,))
    process.start()
    try:
        process.join()
    except KeyboardInterrupt:
        process.terminate()
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
    )
    write_report(report, directory / "report")
    print_report(report, Console())
    return 0 if all_completed(report) else 1


def _run_and_exit(planned: PlannedRun) -> None:
    interrupt_on_sigterm()
    sys.exit(_run(planned))


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
        path.write_text(traceback.format_exc(), encoding="utf-8")
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
            write_json(path, dataclasses.asdict(record))
    _failed(planned, error)
