"""The command line: composes the config with Hydra, checks it, runs it. The only user of Hydra."""

import argparse
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import NoReturn

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from precexp import __version__, set_process_defaults
from precexp.config import UserError, arm_of, conf_dir, load
from precexp.engine import Engine, end_workers, engine_of
from precexp.launcher import (
    Launcher,
    heeding,
    launching,
    passing_on_signals,
    relaying,
)
from precexp.record import read_record
from precexp.sweep import (
    PlannedRun,
    changes,
    check_plan,
    do_all,
    finish,
    interrupt_on_sigterm,
    launch,
    preflight,
    subdirectory,
    write_plan,
)

CONFIG_NAME = "config"

# Its plugins' own schemas check our presets of the same names; Hydra wants that said in YAML. Here,
# because a launcher's workers compose, too, before they call anything of ours.
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/.* is validated against")


def entry() -> NoReturn:
    """The console script."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: all completed; 1: a run failed, diverged or was interrupted; 2: user error."""
    set_process_defaults()
    if "--version" in arguments:
        print(f"precexp {__version__}")
        return 0
    interrupt_on_sigterm()
    OmegaConf.register_new_resolver("run_subdir", _run_subdirectory, replace=True)
    parser = get_args_parser()
    parser.error = _refuse_arguments  # type: ignore[method-assign]
    try:
        args = parser.parse_intermixed_args(arguments)
        hydra = _create_hydra(args.config_dir)
        if args.cfg or args.info or args.help or args.hydra_help or args.shell_completion:
            return _show(hydra, args, parser)
        return _run(hydra, args)
    except UserError as error:
        return _refuse(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        return _refuse(_explain(error))
    except OSError as error:  # the report or sweep.json could not be written
        print(f"precexp: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("precexp: interrupted", file=sys.stderr)
        return 1
    finally:
        GlobalHydra.instance().clear()
        _choices_alone.cache_clear()


def compose(overrides: Sequence[str]) -> PlannedRun:
    """The one run that the overrides describe, for commands that leave no run directory.

    Raises UserError as the command line would say it.
    """
    ((_, planned),) = compose_sweep(overrides, multirun=False)
    return planned


def compose_sweep(
    overrides: Sequence[str], *, multirun: bool, config_dir: str | None = None
) -> list[tuple[Sequence[str], PlannedRun]]:
    """Every run of the sweep that the overrides describe, with its own overrides; as `compose`."""
    try:
        hydra = _create_hydra(config_dir)
        mode = RunMode.MULTIRUN if multirun else RunMode.RUN
        master = _compose(hydra, CONFIG_NAME, ["name=unnamed", *overrides], mode)
        jobs = _jobs(hydra, master) if multirun else [master]
        return [(_overrides_of(job), _planned(job, Path(job.hydra.run.dir))) for job in jobs]
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error)) from None
    finally:
        GlobalHydra.instance().clear()
        _choices_alone.cache_clear()


def _create_hydra(config_dir: str | None) -> Hydra:
    """Hydra over our conf/ and, before it, the user's --config-dir."""
    search_path = create_config_search_path(str(conf_dir().resolve()))
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise UserError(f"--config-dir: {config_dir} is not a folder")
        search_path.prepend(
            provider="command-line",
            path=f"file://{Path(config_dir).resolve()}",
            anchor=SearchPathQuery(provider="schema"),
        )
    return Hydra.create_main_hydra2(task_name="precexp", config_search_path=search_path)


def _run(hydra: Hydra, args: argparse.Namespace) -> int:
    overrides = list(args.overrides)
    config_name = args.config_name or CONFIG_NAME
    is_sweep = args.multirun or hydra.get_mode(config_name, overrides) == RunMode.MULTIRUN
    master = _compose(hydra, config_name, overrides, RunMode.MULTIRUN if is_sweep else RunMode.RUN)
    if master.name is None and any(text.startswith("name=") for text in overrides):
        raise UserError("name: cannot be swept; it names the whole sweep")
    what, engine = _claim_name(hydra, config_name, overrides, master, is_sweep=is_sweep)
    flags = ["-m"] if args.multirun else []
    for option, value in (("--config-dir", args.config_dir), ("--config-name", args.config_name)):
        flags += [option, value] if value else []
    command = shlex.join(["python", "-m", "precexp", *flags, *what.overrides])
    print(f"carry on with: {command}", flush=True)
    if engine is not None:
        return _run_sweep(hydra, config_name, what, engine)
    result = hydra.run(config_name, _job, what.overrides, with_log_configuration=False)
    path = what.directory / "run.json"
    if path.exists():
        print(f"{read_record(path).status}: {what.directory}")
    return result.return_value


def _claim_name(
    hydra: Hydra, config_name: str, overrides: list[str], master: DictConfig, *, is_sweep: bool
) -> tuple["_Plan", Engine | None]:
    """Checks all that is planned and makes its directory, a new one where it was given no name."""
    if master.name is not None:
        what = _plan(hydra, config_name, overrides, is_sweep=is_sweep)
        preflight(what.planned, what.directory)
        engine = engine_of(what.master, what.planned) if is_sweep else None
        what.directory.mkdir(parents=True, exist_ok=True)
        return what, engine
    for name in _timestamps():
        what = _plan(hydra, config_name, [*overrides, f"name={name}"], is_sweep=is_sweep)
        preflight(what.planned, what.directory)
        engine = engine_of(what.master, what.planned) if is_sweep else None
        with suppress(FileExistsError):  # begun by another in the same microsecond
            what.directory.mkdir(parents=True)
            return what, engine
    raise AssertionError("timestamps do not end")


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What a command comes to."""

    master: DictConfig
    overrides: list[str]  # its name among them
    directory: Path
    planned: list[PlannedRun]


def _plan(hydra: Hydra, config_name: str, overrides: list[str], *, is_sweep: bool) -> _Plan:
    mode = RunMode.MULTIRUN if is_sweep else RunMode.RUN
    master = _compose(hydra, config_name, overrides, mode)
    directory = Path(master.hydra.sweep.dir if is_sweep else master.hydra.run.dir)
    planned = (
        [_planned_in_sweep(job, directory) for job in _jobs(hydra, master)]
        if is_sweep
        else [_planned(master, directory)]
    )
    return _Plan(master=master, overrides=overrides, directory=directory, planned=planned)


def _timestamps() -> Iterator[str]:
    """Names for a sweep that was given none: now, and others where that is taken."""
    now = f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"
    yield now
    for number in count(2):
        yield f"{now}-{number}"


def _run_sweep(hydra: Hydra, config_name: str, what: _Plan, engine: Engine) -> int:
    directory, planned = what.directory, what.planned

    def settle(alone: bool) -> None:
        if not alone:
            return check_plan(directory, planned)
        for line in changes(planned):
            print(line, flush=True)
        return write_plan(directory, str(what.master.name), planned)

    def launch_all(launcher: Launcher) -> None:
        job = partial(_job, launcher=launcher)
        overrides = [*what.overrides, *engine.overrides]
        with ExitStack() as stack:
            if engine.log_files is not None:
                stack.enter_context(relaying(engine.log_files))
            if engine.place != "launcher":
                stack.enter_context(passing_on_signals(launcher))
            if engine.place == "workers":
                stack.callback(end_workers)
            hydra.multirun(config_name, job, overrides, with_log_configuration=False)

    with launching(
        directory, place=engine.place, environment=engine.environment, settle=settle
    ) as launcher:
        try:
            do_all(planned, launcher, launch_all)
        finally:
            exit_code = finish(directory, planned[0].config.report)
    return exit_code


def _job(composed: DictConfig, launcher: Launcher | None = None) -> int:
    """What Hydra's launchers call for each run, in this process or in another."""
    if launcher is None or launcher.place == "launcher":
        return _do(composed, launcher)
    try:
        with heeding(launcher):
            return _do(composed, launcher)
    except KeyboardInterrupt:  # recorded; and joblib would kill the other workers
        return 1


def _do(composed: DictConfig, launcher: Launcher | None) -> int:
    runtime = HydraConfig.get()
    directory = Path(runtime.runtime.output_dir)
    planned = _planned(OmegaConf.create({**composed, "hydra": runtime}), directory)
    if not (directory / "run.json").exists():
        folder = directory / ".hydra"
        folder.mkdir(exist_ok=True)
        OmegaConf.save(composed, folder / "config.yaml")
        OmegaConf.save(OmegaConf.create({"hydra": runtime}), folder / "hydra.yaml")
        OmegaConf.save(runtime.overrides.task, folder / "overrides.yaml")
    if launcher is None or not launcher.again:
        where = os.path.relpath(directory)
        print(f"{planned.arm.label}, seed {planned.config.seed}: {where}", flush=True)
    return launch(planned, launcher)


def _jobs(hydra: Hydra, master: DictConfig) -> list[DictConfig]:
    """The composed config of every run of the sweep, as Hydra's basic sweeper will make them."""
    params = [f"{key}={value}" for key, value in (master.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=hydra.config_loader)
    overrides = parser.parse_overrides([*params, *_overrides_of(master)])
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    return [
        _telling_unknown_keys(
            lambda job: hydra.config_loader.load_sweep_config(master, job), list(job)
        )
        for job in jobs
    ]


def _overrides_of(composed: DictConfig) -> list[str]:
    """As they were typed: an interpolation in one is resolved in each job."""
    overrides = OmegaConf.to_container(composed.hydra.overrides.task, resolve=False)
    assert isinstance(overrides, list)
    return overrides


def _compose(hydra: Hydra, config_name: str, overrides: list[str], mode: RunMode) -> DictConfig:
    return _telling_unknown_keys(
        lambda changed: hydra.compose_config(
            config_name, changed, run_mode=mode, with_log_configuration=False
        ),
        overrides,
    )


def _telling_unknown_keys(
    compose: Callable[[list[str]], DictConfig], overrides: list[str]
) -> DictConfig:
    """Composes; where Hydra knows no such key, adds it, so that `load` refuses it in our words,
    with the allowed ones, in place of Hydra's advice to add it."""
    try:
        return compose(overrides)
    except ConfigCompositionException as error:
        unknown = re.match(r"Could not override '([^']+)'", str(error))
        if unknown is None:
            raise
        key = unknown[1]
        added = [f"++{text}" if text.partition("=")[0] == key else text for text in overrides]
        if added == overrides:
            raise
        return _telling_unknown_keys(compose, added)


def _planned(composed: DictConfig, directory: Path) -> PlannedRun:
    """The run of a composed config, its `hydra` part included."""
    task = composed.copy()
    with open_dict(task):
        del task["hydra"]
    choices = composed.hydra.runtime.choices
    if not {"precision", "optim"} <= choices.keys():
        raise UserError("precision, optim: the config chooses none of them in its defaults list")
    base = _choices_alone(choices.precision, choices.optim)
    arm = arm_of(task, precision=choices.precision, optim=choices.optim, base=base)
    return PlannedRun(config=load(task), arm=arm, directory=directory)


def _planned_in_sweep(composed: DictConfig, directory: Path) -> PlannedRun:
    planned = _planned(composed, directory)
    return replace(planned, directory=directory / composed.hydra.sweep.subdir)


@cache
def _choices_alone(precision: str, optim: str) -> DictConfig:
    """The config composed from the two choices and nothing else."""
    return (
        GlobalHydra.instance()
        .config_loader()
        .load_configuration(
            CONFIG_NAME, [f"precision={precision}", f"optim={optim}"], run_mode=RunMode.RUN
        )
    )


def _run_subdirectory(*, _root_: DictConfig) -> str:
    """The resolver behind hydra.sweep.subdir."""
    planned = _planned(_root_, Path())
    return subdirectory(planned.config, planned.arm)


def _show(hydra: Hydra, args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Hydra's own answers about the config; nothing runs."""
    config_name = args.config_name or CONFIG_NAME
    if args.help:
        hydra.app_help(config_name=config_name, args_parser=parser, args=args)
    elif args.hydra_help:
        hydra.hydra_help(config_name=config_name, args_parser=parser, args=args)
    elif args.cfg:
        if args.multirun:
            raise UserError("-m, --cfg: one config is shown; leave -m out and give one value a key")
        _compose(hydra, config_name, args.overrides, RunMode.RUN)
        hydra.show_cfg(config_name, args.overrides, args.cfg, args.package, args.resolve)
    elif args.shell_completion:
        hydra.shell_completion(config_name=config_name, overrides=args.overrides)
    else:
        hydra.show_info(args.info, config_name=config_name, overrides=args.overrides)
    return 0


def _refuse_arguments(reason: str) -> NoReturn:
    raise UserError(f"{reason}; see python -m precexp --help")


def _refuse(reason: str) -> int:
    print(f"precexp: {reason}", file=sys.stderr)
    return 2


def _explain(error: Exception) -> str:
    """Hydra's or OmegaConf's error in one line."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return f"{group}: {choice!r} is not a choice; allowed: {', '.join(sorted(error.options))}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not understood; write key=value (a list as [a,b])"
    ambiguous = re.match(r"Ambiguous value for argument '(.+)'", str(error))
    if ambiguous:
        return f"{ambiguous[1]}: to sweep over the values, add -m; a list is written key=[a,b]"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:4]) or type(error).__name__
