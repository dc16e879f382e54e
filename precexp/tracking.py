"""wandb as a view of the record: the same config, rows and summary, one wandb run per run.

Reports read the record on disk, so no failure of wandb stops a run: it becomes a line in `notices`.

What wandb keeps goes under the run's directory. Of the machine it gets the host name alone: no
command line, script, user name, git state, code, packages or terminal output. run.json has the
environment. `precexp.dashboard` opens its run here too, so these rules hold for it as well.
"""

import dataclasses
import json
import os
import secrets
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from precexp.config import UserError, WandbConfig
from precexp.record import Row, RunRecord, one_line, to_json

if TYPE_CHECKING:
    import wandb  # half a second, which only a tracked run pays

INIT_SECONDS = 5  # until a server that does not answer is given up
FINISH_SECONDS = 15  # for what is still to be uploaded after the last step

Mode = Literal["auto", "online", "offline", "disabled"]

WANDB_MODES: dict[str, Mode] = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What tells a wandb run from the others of its project."""

    group: str
    job_type: str
    name: str
    fixed_id: str | None = None  # goes on with the run of this id if the server has it


def check_login(config: WandbConfig) -> None:
    """Raises UserError if the run is to be online and nobody is logged in. Asks no one, no server.

    Imports wandb only if the run is to be online.
    """
    if mode_of(config) == "online":
        with environment():
            offline_reason("online")


class Tracker:
    """Mirrors one run in wandb while its context is open.

    A run that is resumed goes on under its id, `earlier` being its rows so far: offline they are
    written again in place of the earlier attempt's files, online the ones that the server lacks.

    Entering raises UserError where check_login does. Leaving without `finish` ends the wandb run as
    failed. `notices` are lines for the user: where the run is or how to upload it, what went wrong.
    """

    def __init__(
        self,
        config: WandbConfig,
        record: RunRecord,
        *,
        directory: Path,
        group: str,
        earlier: Sequence[Row] = (),
    ) -> None:
        self.notices: list[str] = []
        self._config = config
        self._record = record
        self._directory = directory
        self._group = group
        self._earlier = earlier
        self._run: wandb.Run | None = None
        self._first_step = 0  # that the server does not have yet

    def __enter__(self) -> "Tracker":
        mode = mode_of(self._config)
        if mode != "disabled":
            with environment(self._directory):
                reason = offline_reason(mode)
                with self._until_failure("before its first row"):
                    self._start(reason)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._until_failure("at its end"):
            self._close(exit_code=1)

    def write(self, row: Row) -> None:
        if self._run is None or row.step < self._first_step:
            return
        values = {k: v for k, v in dataclasses.asdict(row).items() if v is not None}
        probes = values.pop("probes", {})
        values.update({f"numerics/{name}": value for name, value in probes.items()})
        values["skipped"] = int(row.skipped)  # a number, to be drawn
        with self._until_failure(f"at step {row.step}"):
            self._run.log(values, step=row.step, commit=True)

    def finish(self, record: RunRecord) -> None:
        """Ends the wandb run: the record's results as its summary, 0 if completed, else 1."""
        if self._run is None:
            return
        with self._until_failure("at its end"):
            self._run.summary.update(_summary(record))
            self._close(exit_code=0 if record.status == "completed" else 1)

    def _start(self, reason: str | None) -> None:
        """Opens the wandb run: offline for this reason; online, if possible, where it is None."""
        record, label = self._record, str(self._record.arm["label"])
        earlier_id = next(iter(wandb_ids(self._directory)), None)
        if earlier_id is not None:
            remove_runs(self._directory, earlier_id)
        identity = RunIdentity(
            group=self._group,
            job_type=label,
            name=f"{label}-seed-{record.seed}",
            fixed_id=earlier_id,
        )
        values = {
            **record.config,
            "arm": record.arm,
            "run_id": record.run_id,
            "config_hash": record.config_hash,
            "match_key": record.match_key,
        }
        self._run, reason = start_run(
            self._config, identity, directory=self._directory, values=values, reason=reason
        )
        if reason is None:
            self.notices.append(f"wandb: {self._run.url}")
        else:
            self.notices.append(f"wandb: offline ({reason}); to upload: {self._upload_all()}")
        _define_axes(self._run)
        self._first_step = self._run.step
        for row in self._earlier:
            self.write(row)

    def _upload_all(self) -> str:
        """The command that uploads this run and the others of its sweep: one line for them all."""
        folder, depth = self._directory, 0
        while folder.name != self._group and folder != folder.parent:
            folder, depth = folder.parent, depth + 1
        if folder == folder.parent:  # the run is not in a folder of the sweep's name
            folder, depth = self._directory, 0
        place = shlex.quote(os.path.relpath(folder))
        return f"wandb sync {place}{'/*' * depth}/wandb/offline-run-*"

    def _close(self, *, exit_code: int) -> None:
        """Ends the wandb run, if one is open."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish(exit_code=exit_code)
        except TimeoutError:
            self.notices.append(f"wandb: upload given up; to complete it: {upload_command(run)}")

    @contextmanager
    def _until_failure(self, when: str) -> Iterator[None]:
        """Turns a failure of wandb, whatever it is, into the end of tracking and one notice."""
        try:
            yield
        except Exception as error:
            self.notices.append(f"wandb: tracking ended {when} ({one_line(error)})")
            self._run = None
            # Also ends the run, as failed. A service that has died would be kept otherwise: the
            # process's next run would fail on it, and its exit print a traceback.
            with suppress(Exception, SystemExit):
                import wandb

                wandb.teardown(exit_code=1)


def mode_of(config: WandbConfig) -> Mode:
    """The mode asked for: config.mode, or under auto WANDB_MODE where that is set."""
    asked = os.environ.get("WANDB_MODE")
    if config.mode != "auto" or not asked:
        return config.mode
    if asked not in WANDB_MODES:
        raise UserError(f"WANDB_MODE: {asked!r} is not allowed; allowed: {', '.join(WANDB_MODES)}")
    return WANDB_MODES[asked]


def offline_reason(mode: Mode) -> str | None:
    """Why a run will be offline, as far as this machine knows; None if it can go online.

    Raises UserError if it is to be online and cannot. Call it inside `environment`.
    """
    problem = None if mode == "offline" else _login_problem()
    if mode == "online" and problem is not None:
        raise UserError(
            f"wandb.mode: online is not possible ({problem}); run `wandb login`, set "
            "WANDB_API_KEY, or choose auto, offline or disabled"
        )
    return "as asked" if mode == "offline" else problem


def start_run(
    config: WandbConfig,
    identity: RunIdentity,
    *,
    directory: Path,
    values: Mapping[str, object],
    reason: str | None,
) -> tuple["wandb.Run", str | None]:
    """Opens a wandb run, and says why it is offline; None if it is online.

    Online is tried where `reason` is None; what then goes wrong becomes the reason. `values` are
    its config. Call it inside `environment`.
    """
    if reason is None:
        try:
            return _open(config, identity, directory=directory, values=values, mode="online"), None
        except Exception as error:  # any: no network, a refused key, a broken server
            reason = one_line(error)
            if identity.fixed_id is not None:  # it is taken until the service ends
                import wandb

                wandb.teardown()
    return _open(config, identity, directory=directory, values=values, mode="offline"), reason


def _open(
    config: WandbConfig,
    identity: RunIdentity,
    *,
    directory: Path,
    values: Mapping[str, object],
    mode: Literal["online", "offline"],
) -> "wandb.Run":
    import wandb

    # Ours, because WANDB_RUN_ID would give one id to every run of a sweep.
    run_id = identity.fixed_id or secrets.token_hex(6)
    try:
        return wandb.init(
            mode=mode,
            id=run_id,
            resume="allow" if identity.fixed_id and mode == "online" else None,
            dir=str(directory),
            project=config.project,
            entity=config.entity,
            group=identity.group,
            job_type=identity.job_type,
            name=identity.name,
            tags=config.tags or None,  # None: those of WANDB_TAGS
            config=dict(values),
            reinit="create_new",  # by default, a run that is still open would be handed out
            settings=_settings(),
        )
    except Exception:
        remove_runs(directory, run_id)
        raise


def wandb_ids(directory: Path) -> list[str]:
    """The ids of the wandb runs that were opened for the run recorded in the directory."""
    return sorted({path.name.rpartition("-")[2] for path in _folders(directory, "*")})


def remove_runs(directory: Path, run_id: str) -> None:
    """Removes what wandb keeps under the directory of the run of this id."""
    for folder in _folders(directory, run_id):
        shutil.rmtree(folder, ignore_errors=True)


def _folders(directory: Path, run_id: str) -> Iterator[Path]:
    """wandb's folders, online and offline, as it names them: [offline-]run-TIME-ID."""
    return (directory / "wandb").glob(f"*run-*-{run_id}")


def _login_problem() -> str | None:
    """Why wandb cannot go online as far as this machine knows; None if it can.

    wandb itself looks: in WANDB_API_KEY, its settings files, netrc, WANDB_IDENTITY_TOKEN_FILE.
    """
    try:
        import wandb

        return None if wandb.login(prompt=False, verify=False) else "no API key"
    except Exception as error:  # any: a malformed key, a setting of the user's that wandb refuses
        return one_line(error)


@contextmanager
def environment(directory: Path | None = None) -> Iterator[None]:
    """Variables that wandb reads while it starts and has no argument for.

    `directory` is where it is to keep what it writes.
    """
    variables = {
        "WANDB_SILENT": "true",  # it prints before it has seen any settings of ours
        "WANDB_MODE": "online",  # otherwise login would not look for a key; init is told the mode
        # Reports of its own errors: a process would wait 12 s at its end to send them nowhere.
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_HTTP_TIMEOUT": str(FINISH_SECONDS),  # for each request of its public API
    }
    if directory is not None:
        variables["WANDB_CACHE_DIR"] = str(directory.absolute())  # its service's log
        # Tables that are still to be uploaded: an offline run refers to them.
        variables["WANDB_DATA_DIR"] = str((directory / "wandb").absolute())
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _settings() -> "wandb.Settings":
    import wandb

    return wandb.Settings(
        init_timeout=INIT_SECONDS,
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
        silent=True,
        console="off",
        program="precexp",  # the script's path otherwise
        symlink=False,
        disable_git=True,
        disable_code=True,
        save_code=False,
        disable_job_creation=True,
        label_disable=True,
        x_save_requirements=False,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_disable_stats=True,  # polling would compete with the training that is measured
    )


def _define_axes(run: "wandb.Run") -> None:
    """Losses over tokens, which compare across batch sizes; everything else over steps."""
    run.define_metric("step", hidden=True)
    run.define_metric("tokens", hidden=True)
    run.define_metric("*", step_metric="step")
    run.define_metric("loss", step_metric="tokens")
    run.define_metric("eval_loss", step_metric="tokens", summary="min,last")


def _summary(record: RunRecord) -> dict[str, object]:
    """The record's outcome under the record's own names, spelled as in run.json."""
    evidence = {k: v for k, v in record.evidence.items() if k != "data_hash_at"}  # one per eval
    census = record.census or {}
    summary = {
        "status": record.status,
        "error": record.error,
        "results": record.results,
        "timing": record.timing,
        "memory": {key: _peak(record.memory.get(key)) for key in ("planned", "measured")},
        "evidence": evidence,
        "bytes_per_param": census.get("bytes_per_param"),
    }
    return json.loads(to_json(summary))


def _peak(memory: object) -> dict[str, object] | None:
    """The peak alone: run.json has what it is made of."""
    return {"peak_bytes": memory.get("peak_bytes")} if isinstance(memory, Mapping) else None


def upload_command(run: "wandb.Run") -> str:
    """The command that uploads what the run has kept on disk."""
    return shlex.join(["wandb", "sync", str(Path(run.dir).parent)])
