"""python -m precexp.dashboard DIR... [wandb.project=NAME] [wandb.entity=NAME]
      [wandb.mode=auto|online|offline] [report.reference=LABEL] [report.margin=0.01]
      [KEY=VALUE[,VALUE...]] [--output DIR]

Shows recorded runs in wandb: a run `comparison` with the report's tables, figures and differences,
and a saved workspace of the project. The same sweeps update what they made before.

Offline, both are written into the directory of the report, with a line on how to send them. What is
not given is taken from the records. KEY=VALUE is as in python -m precexp.report.
"""

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from precexp.comparison import Comparison, compare, log_comparison, values_of
from precexp.config import UserError, WandbConfig, conf_dir
from precexp.record import one_line
from precexp.report import Report, write_report
from precexp.report.__main__ import ALLOWED, parse_arguments, recorded_blocks, report_for
from precexp.report.__main__ import Arguments as ReportArguments
from precexp.tracking import (
    RunIdentity,
    environment,
    mode_of,
    offline_reason,
    remove_runs,
    start_run,
    upload_command,
)

if TYPE_CHECKING:
    import wandb

WANDB_ALLOWED = "wandb.project=NAME, wandb.entity=NAME, wandb.mode=auto|online|offline"
MODES = ("auto", "online", "offline")


class WandbFailed(Exception):
    """wandb did not take what it was sent; one line."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The command line: what the report takes, and what is of wandb."""

    report: ReportArguments
    wandb: dict[str, str]


def main(argv: Sequence[str]) -> int:
    """Exit status 0; 1 with one line if wandb did not take something; 2 for a user's mistake."""
    if "--help" in argv or "-h" in argv:
        print(__doc__, end="")
        return 0
    try:
        arguments = read_arguments(argv)
        _require_library()
        report = report_for(arguments.report)
        config = _configured(recorded_wandb(arguments.report.directories), arguments.wandb)
        output = arguments.report.output or report.output
        write_report(report, output)
        comparison = compare(report, output, project=config.project)
        for line in publish(comparison, config, arguments=argv):
            print(line)
    except WandbFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Raises UserError naming the first argument that is not allowed."""
    ours: dict[str, str] = {}
    others: list[str] = []
    for argument in argv:
        key, _, value = argument.partition("=")
        if not key.startswith("wandb.") or Path(argument).exists():
            others.append(argument)
            continue
        if key not in ("wandb.project", "wandb.entity", "wandb.mode"):
            raise UserError(f"{argument}: unknown argument; allowed: {ALLOWED}, {WANDB_ALLOWED}")
        if not value:
            raise UserError(f"{key}: no value; allowed: {WANDB_ALLOWED}")
        ours[key.removeprefix("wandb.")] = value
    if ours.get("mode", "auto") not in MODES:
        raise UserError(f"wandb.mode: {ours['mode']!r} is not allowed; allowed: {', '.join(MODES)}")
    try:
        return Arguments(report=parse_arguments(others), wandb=ours)
    except UserError as error:
        more = f", {WANDB_ALLOWED}" if str(error).endswith(ALLOWED) else ""
        raise UserError(f"{error}{more}") from None


def recorded_wandb(directories: Sequence[Path]) -> WandbConfig:
    """The `wandb` block of the first readable run, with what it lacks from config.yaml."""
    values = dict(OmegaConf.load(conf_dir() / "config.yaml").wandb)
    recorded = next(filter(None, recorded_blocks(directories, "wandb")), {})
    values |= {key: recorded[key] for key in values if key in recorded}
    return WandbConfig(**{**values, "tags": tuple(values["tags"])})


def publish(comparison: Comparison, config: WandbConfig, *, arguments: Sequence[str]) -> list[str]:
    """Sends the comparison and its workspace, or writes what can be sent; returns lines to print.

    Raises UserError where precexp.tracking.check_login does, and WandbFailed once the files are
    written.
    """
    mode = mode_of(config)
    with environment(comparison.directory):
        # A sweep that was to stay away from wandb can still be looked at here.
        reason = offline_reason("offline" if mode == "disabled" else mode)
        from precexp.workspace import build_workspace, save_workspace, write_workspace

        run, reason = _start(comparison, config, reason)
        workspace = build_workspace(comparison, config, entity=config.entity or run.entity)
        path = comparison.directory / "workspace.json"
        path.write_text(write_workspace(workspace), encoding="utf-8")
        url = run.url
        _log(run, comparison)
        if reason is not None:
            if mode == "online":
                raise WandbFailed(f"wandb.mode=online: {reason}; to upload: {upload_command(run)}")
            return [
                *_about_runs(comparison),
                f"comparison: offline ({reason}); to upload: {upload_command(run)}",
                f"workspace: {path}; to save it in wandb: {_online_command(arguments)}",
            ]
        try:
            address = save_workspace(workspace, comparison)
        except Exception as error:  # any: the library passes on whatever goes wrong
            raise WandbFailed(f"workspace: not saved ({one_line(error)}); it is {path}") from None
    return [*_about_runs(comparison), f"comparison: {url}", f"workspace: {address}"]


def _start(
    comparison: Comparison, config: WandbConfig, reason: str | None
) -> tuple["wandb.Run", str | None]:
    """Opens the run `comparison`, without what an earlier call has left of it on this machine."""
    # Two offline attempts at one run would be uploaded one after the other, into one history.
    remove_runs(comparison.directory, comparison.run_id)
    shutil.rmtree(comparison.directory / "wandb" / "artifacts", ignore_errors=True)
    identity = RunIdentity(
        group=comparison.sweeps[0],
        job_type="comparison",
        name="comparison",
        fixed_id=comparison.run_id,
    )
    try:
        return start_run(
            config,
            identity,
            directory=comparison.directory,
            values=values_of(comparison),
            reason=reason,
        )
    except Exception as error:  # any, as in precexp.tracking
        raise _failed(error) from None


def _log(run: "wandb.Run", comparison: Comparison) -> None:
    try:
        log_comparison(run, comparison)
        run.finish(exit_code=0)
    except TimeoutError:
        command = upload_command(run)
        raise WandbFailed(f"comparison: upload given up; to complete it: {command}") from None
    except Exception as error:  # any, as in precexp.tracking
        with suppress(Exception, SystemExit):
            run.finish(exit_code=1)  # or its threads would outlive the service
        raise _failed(error) from None


def _failed(error: Exception) -> WandbFailed:
    """Ends what is open of wandb: it would hold up the end of the process."""
    import wandb

    with suppress(Exception, SystemExit):
        wandb.teardown(exit_code=1)
    return WandbFailed(f"comparison: not logged ({one_line(error)})")


def _about_runs(comparison: Comparison) -> list[str]:
    """What the workspace lacks: runs that wandb has nothing of, or not yet."""
    lines = []
    if comparison.num_untracked:
        lines.append(
            f"runs: wandb has nothing of {comparison.num_untracked} of "
            f"{len(comparison.report.runs)}, which only the comparison shows"
        )
    patterns = _offline_runs(comparison.report)
    if patterns:
        lines.append(f"runs: kept offline; to upload: wandb sync {' '.join(patterns)}")
    return lines


def _offline_runs(report: Report) -> list[str]:
    """Shell patterns of the offline runs that wandb does not mark as uploaded."""
    patterns: dict[str, None] = {}
    for run in report.runs:
        folders = (run.directory / "wandb").glob("offline-run-*")
        if all(any(folder.glob("*.synced")) for folder in folders):
            continue
        sweep = next(one for one in report.directories if run.directory.is_relative_to(one))
        stars = "/*" * len(run.directory.relative_to(sweep).parts)
        patterns[f"{shlex.quote(os.path.relpath(sweep))}{stars}/wandb/offline-run-*"] = None
    return list(patterns)


def _online_command(arguments: Sequence[str]) -> str:
    """The same command, online."""
    kept = [argument for argument in arguments if not argument.startswith("wandb.mode=")]
    return shlex.join(["python", "-m", "precexp.dashboard", *kept, "wandb.mode=online"])


def _configured(recorded: WandbConfig, given: dict[str, str]) -> WandbConfig:
    mode = next((mode for mode in MODES if mode == given.get("mode")), recorded.mode)
    return replace(
        recorded,
        mode=mode,
        project=given.get("project", recorded.project),
        entity=given.get("entity", recorded.entity),
    )


def _require_library() -> None:
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise UserError("wandb-workspaces is not installed: pip install 'precexp[dashboard]'")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
