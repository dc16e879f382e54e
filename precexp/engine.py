"""How a sweep's runs are done: in a row, or several at once by a launcher that is a package.

It reads the composed config of a sweep, Hydra's own part included; the launchers' presets are in
conf/hydra/launcher/.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from precexp.config import UserError
from precexp.launcher import Place
from precexp.sweep import PlannedRun


@dataclass(frozen=True, kw_only=True)
class _Plugin:
    """A launcher that is a package of its own."""

    package: str
    module: str
    extra: str  # of pyproject.toml
    place: Place
    key: str  # of the number of runs at once


# The launchers of Hydra that precexp runs sweeps with (conf/hydra/launcher/).
PLUGINS = {
    "basic": None,
    "joblib": _Plugin(
        package="hydra-joblib-launcher",
        module="hydra_plugins.hydra_joblib_launcher",
        extra="joblib",
        place="workers",
        key="hydra.launcher.n_jobs",
    ),
    "submitit_local": _Plugin(
        package="hydra-submitit-launcher",
        module="hydra_plugins.hydra_submitit_launcher",
        extra="submitit",
        place="jobs",
        key="hydra.sweeper.max_batch_size",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One of Hydra's launchers, and how many runs of a sweep it does at once."""

    place: Place
    overrides: Sequence[str]  # that hold it to the number
    environment: Mapping[str, str | None]  # of its jobs' processes
    log_files: str | None = None  # a pattern: where its jobs print, if not here


def engine_of(master: DictConfig, planned: Sequence[PlannedRun]) -> Engine:
    """The launcher that the composed config of a sweep chooses.

    Raises UserError for a launcher that is not there, or for more runs at once than GPUs.
    """
    chosen = master.hydra.runtime.choices["hydra/launcher"]
    if chosen not in PLUGINS:
        raise UserError(
            f"hydra/launcher: {chosen!r} is not one that precexp knows how to share GPUs with; "
            f"allowed: {', '.join(PLUGINS)}"
        )
    plugin = PLUGINS[chosen]
    if plugin is not None and find_spec(plugin.module) is None:
        raise UserError(
            f"hydra/launcher: {chosen} needs {plugin.package}; "
            f"pip install 'precexp[{plugin.extra}]'"
        )
    if plugin is None:
        return Engine(place="launcher", overrides=[], environment={})
    num_at_once = _num_at_once(master, planned, plugin)
    if plugin.place == "workers" and num_at_once == 1:  # then joblib makes no worker
        return Engine(place="launcher", overrides=[f"{plugin.key}=1"], environment={})
    return Engine(
        place=plugin.place,
        overrides=[f"{plugin.key}={num_at_once}"],
        environment={
            "OMP_NUM_THREADS": str(_threads_per_run(num_at_once)),
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),  # submitit hides them
            "TERM": "dumb",  # lines: the bars of runs at the same time would overwrite each other
        },
        log_files=_log_files(master) if plugin.place == "jobs" else None,
    )


def _num_at_once(master: DictConfig, planned: Sequence[PlannedRun], plugin: _Plugin) -> int:
    """How many of the runs are done at the same time; UserError if that is more than the GPUs."""
    from precexp import environment  # torch

    asked = OmegaConf.select(master, plugin.key)
    if asked is None:
        asked = -1
    if asked == 0:
        raise UserError(f"{plugin.key}: 0 is not allowed; it must be 1 or more, or -1 for all")
    num_cores = environment.num_cores()
    devices = {environment.pick_device(run.config.device).type for run in planned}
    num_gpus = environment.num_gpus() if "cuda" in devices else None
    if asked == -1:
        asked = num_cores if num_gpus is None else num_gpus
    elif asked < 0:
        asked = max(1, num_cores + 1 + asked)  # as joblib reads it
    batch = master.hydra.sweeper.get("max_batch_size") or asked
    num_at_once = min(asked, batch, len(planned))
    if num_gpus is not None and num_at_once > num_gpus:
        raise UserError(
            f"{plugin.key}: {num_at_once} runs at once would share {num_gpus} GPU"
            f"{'s' if num_gpus > 1 else ''}; allowed: up to {num_gpus}, or device=cpu"
        )
    return num_at_once


def _threads_per_run(num_at_once: int) -> int:
    """Each run's share of the cores, or what the user says if that is less."""
    from precexp.environment import num_cores

    share = max(1, num_cores() // num_at_once)
    given = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(given)) if given.isdecimal() and int(given) else share


def _log_files(master: DictConfig) -> str:
    folder = str(OmegaConf.select(master, "hydra.launcher.submitit_folder"))
    return f"{folder.replace('%j', '*')}/*_log.*"


def end_workers() -> None:
    """Of joblib, which would keep them for five minutes, in case they are of use."""
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True)
