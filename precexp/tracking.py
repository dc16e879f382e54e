"""wandb as a view of the record: the same config, rows and summary, one wandb run per run.

Reports read the record on disk, so no failure of wandb stops a run: it becomes a line in `notices`.

What wandb keeps goes under the run's directory. Of the machine it gets the host name alone: no
command line, user name, git state, code, packages or terminal output. run.json has the environment.
"""

import dataclasses
import json
import os
import secrets
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def check_login(config: WandbConfig) -> None:
    """Raises UserError if the run is to be online and nobody is logged in. Asks no one, no server.

    Imports wandb only if the run is to be online.
    """
    if _mode(config) == "online":
        with _environment():
            problem = _login_problem()
        if problem is not None:
            raise _no_login(problem)


class Tracker:
    """Mirrors one run in wandb while its context is open.

    Entering raises UserError where check_login does. Leaving without `finish` ends the wandb run as
    failed. `notices` are lines for the user: where the run is or how to upload it, what went wrong.
    """

    def __init__(
        self, config: WandbConfig, record: RunRecord, *, directory: Path, group: str
    ) -> None:
        self.notices: list[str] = []
        self._config = config
        self._record = record
        self._directory = directory
        self._group = group
        self._run: wandb.Run | None = None

    def __enter__(self) -> "Tracker":
        mode = _mode(self._config)
        if mode != "disabled":
            with _environment(cache=self._directory):
                self._start(mode)
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
        if self._run is None:
            return
        values = {k: v for k, v in dataclasses.asdict(row).items() if v is not None}
        with self._until_failure(f"at step {row.step}"):
            self._run.log(values, step=row.step, commit=True)

    def finish(self, record: RunRecord) -> None:
        """Ends the wandb run: the record's results as its summary, 0 if completed, else 1."""
        if self._run is None:
            return
        with self._until_failure("at its end"):
            self._run.summary.update(_summary(record))
            self._close(exit_code=0 if record.status == "completed" else 1)

    def _start(self, mode: Mode) -> None:
        """Opens the wandb run: online if that is asked for and possible, else offline."""
        reason = "as asked" if mode == "offline" else _login_problem()
        if mode == "online" and reason is not None:
            raise _no_login(reason)
        if reason is None:
            try:
                self._run = self._open("online")
                self.notices.append(f"wandb: {self._run.url}")
            except Exception as error:  # any: no network, a refused key, a broken server
                reason = one_line(error)
        with self._until_failure("before its first row"):
            if self._run is None:
                self._run = self._open("offline")
                self.notices.append(f"wandb: offline ({reason}); to upload: {self._upload_all()}")
            _define_axes(self._run)

    def _open(self, mode: Literal["online", "offline"]) -> "wandb.Run":
        import wandb

        record, label = self._record, str(self._record.arm["label"])
        # Ours, because WANDB_RUN_ID would give one id to every run of a sweep.
        run_id = secrets.token_hex(6)
        try:
            return wandb.init(
                mode=mode,
                id=run_id,
                dir=str(self._directory),
                project=self._config.project,
                entity=self._config.entity,
                group=self._group,
                job_type=label,
                name=f"{label}-seed-{record.seed}",
                tags=self._config.tags or None,  # None: those of WANDB_TAGS
                config={
                    **record.config,
                    "arm": record.arm,
                    "run_id": record.run_id,
                    "config_hash": record.config_hash,
                    "match_key": record.match_key,
                },
                reinit="create_new",  # by default, a run that is still open would be handed out
                settings=_settings(),
            )
        except Exception:
            for folder in (self._directory / "wandb").glob(f"*run-*-{run_id}"):
                shutil.rmtree(folder, ignore_errors=True)
            raise

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
            self.notices.append(f"wandb: upload given up; to complete it: {_upload(run)}")

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


def _mode(config: WandbConfig) -> Mode:
    """The mode asked for: config.mode, or under auto WANDB_MODE where that is set."""
    asked = os.environ.get("WANDB_MODE")
    if config.mode != "auto" or not asked:
        return config.mode
    if asked not in WANDB_MODES:
        raise UserError(f"WANDB_MODE: {asked!r} is not allowed; allowed: {', '.join(WANDB_MODES)}")
    return WANDB_MODES[asked]


def _login_problem() -> str | None:
    """Why wandb cannot go online as far as this machine knows; None if it can.

    wandb itself looks: in WANDB_API_KEY, its settings files, netrc, WANDB_IDENTITY_TOKEN_FILE.
    """
    try:
        import wandb

        return None if wandb.login(prompt=False, verify=False) else "no API key"
    except Exception as error:  # any: a malformed key, a setting of the user's that wandb refuses
        return one_line(error)


def _no_login(problem: str) -> UserError:
    return UserError(
        f"wandb.mode: online is not possible ({problem}); run `wandb login`, set WANDB_API_KEY, or "
        "choose auto, offline or disabled"
    )


@contextmanager
def _environment(cache: Path | None = None) -> Iterator[None]:
    """Variables that wandb reads while it starts and has no argument for."""
    variables = {
        "WANDB_SILENT": "true",  # it prints before it has seen any settings of ours
        "WANDB_MODE": "online",  # otherwise login would not look for a key; init is told the mode
        # Reports of its own errors: a process would wait 12 s at its end to send them nowhere.
        "WANDB_ERROR_REPORTING": "false",
    }
    if cache is not None:
        variables["WANDB_CACHE_DIR"] = str(cache.absolute())  # its service's log
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
        "evidence": evidence,
        "bytes_per_param": census.get("bytes_per_param"),
    }
    return json.loads(to_json(summary))


def _upload(run: "wandb.Run") -> str:
    """The command that uploads what the run has kept on disk."""
    return shlex.join(["wandb", "sync", str(Path(run.dir).parent)])
