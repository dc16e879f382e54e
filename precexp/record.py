"""The record of a run: run.json and metrics.jsonl in its directory (docs/record.md).

No torch here: reports read records on machines that have none.
"""

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from precexp.config import (
    Arm,
    RunConfig,
    UserError,
    as_dict,
    config_hash,
    differing_keys,
    match_key,
)
from precexp.redact import redacted

SCHEMA = 1

Status = Literal["running", "completed", "diverged", "failed", "interrupted"]


# Keys of run.json, which may be null, too.
BLOCKS = ("arm", "config", "environment", "evidence", "census", "memory", "timing", "results")
LISTS = {"warnings": dict, "notices": str}  # by what they hold

FINISHED = ("completed", "diverged")  # what a sweep that is carried on leaves alone


class RecordError(UserError):
    """A record that cannot be read, or a run directory that cannot be taken."""


class NewerSchemaError(RecordError):
    """A record of a later precexp."""


class InUseError(RecordError):
    """A directory that another process works in."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One optimizer step. None = not measured; losses in nats per predicted token."""

    step: int
    tokens: int  # served so far, this step's included
    loss: float | None  # mean over all micro-batches of the step
    eval_loss: float | None
    grad_norm: float | None  # before clipping, of the unscaled gradients, in fp32
    lr: float
    loss_scale: float | None  # None: the recipe scales no loss
    skipped: bool
    step_seconds: float | None
    peak_bytes: int | None  # CUDA: most allocated since the run began
    probes: Mapping[str, float] | None


@dataclass(kw_only=True)
class RunRecord:
    """run.json. Every key is always present; null = not measured."""

    schema: int = SCHEMA
    run_id: str
    status: Status = "running"
    error: str | None = None
    config_hash: str
    match_key: str
    arm: dict[str, object]
    seed: int
    config: dict[str, object]
    environment: dict[str, object] = field(default_factory=dict)
    evidence: dict[str, object] = field(
        default_factory=lambda: {"init_hash": None, "data_hash": None, "data_hash_at": {}}
    )
    census: dict[str, object] | None = None
    warnings: list[dict[str, object]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    memory: dict[str, object] = field(default_factory=lambda: {"planned": None, "measured": None})
    timing: dict[str, object] = field(default_factory=dict)
    results: dict[str, object] = field(default_factory=dict)
    rows_sha256: str | None = None  # of metrics.jsonl when the run ended


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run as read back: its directory, its run.json and its rows."""

    directory: Path
    record: RunRecord
    rows: list[Row]

    @property
    def label(self) -> str:
        return str(self.record.arm["label"])


class RunWriter:
    """Owns a run directory: holds its lock, writes run.json whole at each change, appends rows.

    A directory with an unfinished run of the same config is taken over: `rows` are its rows that
    can be read, and `rewind` says up to where they count. Leaving the context with an exception
    records `failed` (KeyboardInterrupt: `interrupted`). Raises RecordError if the directory holds a
    finished run or one of another config, or if another process works in it.
    """

    def __init__(self, directory: Path, config: RunConfig, arm: Arm) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._lock = lock_directory(directory)
        try:
            self.record = RunRecord(
                run_id=f"{config.name}-{arm.label}-seed-{config.seed}-{config_hash(config)[:8]}",
                config_hash=config_hash(config),
                match_key=match_key(config),
                arm={**dataclasses.asdict(arm), "label": arm.label},
                seed=config.seed,
                config=as_dict(config),
            )
            self._take_over(config)
            path = directory / "metrics.jsonl"
            self.rows = _readable_rows(path)
            self._hash = hashlib.sha256(path.read_bytes() if path.exists() else b"")
            self._replace()
            self._file = path.open("a", encoding="utf-8")
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self.record.status == "running":
            interrupted = isinstance(error, KeyboardInterrupt)
            with suppress(OSError):  # a full disk: the record goes on saying `running`
                self.update(
                    status="interrupted" if interrupted else "failed", error=one_line(error)
                )
        self._file.close()
        os.close(self._lock)

    def rewind(self, step: int) -> None:
        """Drops the rows after the step, and the evidence of them: they will be written again."""
        self.rows = [row for row in self.rows if row.step <= step]
        self._file.close()
        path = self.directory / "metrics.jsonl"
        text = "".join(map(_line_of, self.rows))
        _replace_text(path, text)
        self._hash = hashlib.sha256(text.encode())
        self._file = path.open("a", encoding="utf-8")
        hashes = self.record.evidence["data_hash_at"]
        assert isinstance(hashes, dict)
        kept = {at: digest for at, digest in hashes.items() if int(at) <= step}
        self.update(evidence={**self.record.evidence, "data_hash": None, "data_hash_at": kept})

    def write(self, row: Row) -> None:
        """Appends the row; it is with the operating system when this returns."""
        line = _line_of(row)
        self._file.write(line)
        self._file.flush()
        self._hash.update(line.encode())

    def sync(self) -> None:
        """Returns when all rows so far are on the disk."""
        os.fsync(self._file.fileno())

    @property
    def rows_sha256(self) -> str:
        """Of all rows of metrics.jsonl so far."""
        return self._hash.hexdigest()

    def rows_sha256_at(self, step: int) -> str | None:
        """Of the rows that an earlier attempt left, up to the step; None if they end before it."""
        if step > len(self.rows):
            return None
        return hashlib.sha256("".join(map(_line_of, self.rows[:step])).encode()).hexdigest()

    def update(self, **changes: object) -> None:
        """Changes keys of run.json and replaces the file; a status also vouches for the rows."""
        for key, value in changes.items():
            assert hasattr(self.record, key), key
            setattr(self.record, key, value)
        if "status" in changes:
            ended = self.record.status != "running"
            self.record.rows_sha256 = self.rows_sha256 if ended else None
        self._replace()

    def notice(self, text: str) -> None:
        self.update(notices=[*self.record.notices, redacted(text)])

    def evidence(
        self,
        *,
        init_hash: str | None = None,
        data_hash: str | None = None,
        at_step: int | None = None,
    ) -> None:
        """Records what shows that runs are matched: the fp32 init, the tokens up to a step."""
        evidence = self.record.evidence
        if init_hash is not None:
            evidence["init_hash"] = init_hash
        if data_hash is not None:
            evidence["data_hash"] = data_hash
        if at_step is not None:
            hashes = evidence["data_hash_at"]
            assert isinstance(hashes, dict)
            hashes[str(at_step)] = data_hash
        self.update(evidence=evidence)

    def _take_over(self, config: RunConfig) -> None:
        """Goes on with the record that is there: what the earlier attempt was told stays told."""
        path = self.directory / "run.json"
        if not path.exists():
            return
        try:
            earlier = read_record(path)
        except NewerSchemaError:
            raise
        except RecordError as error:
            self._keep_damaged("run.json", "metrics.jsonl")
            self.record.notices.append(
                f"run.json could not be read, and is kept as .damaged: {error}"
            )
            return
        altered = earlier.config_hash == self.record.config_hash and has_altered_rows(
            self.directory, earlier
        )
        if not altered and (problem := taken_by(earlier, config)):
            raise RecordError(f"{self.directory}: {problem}; choose another name=")
        self.record.evidence = {**self.record.evidence, **(earlier.evidence or {})}
        self.record.census = earlier.census
        self.record.notices = earlier.notices or []
        self.record.warnings = earlier.warnings or []
        if altered:
            self._keep_damaged("metrics.jsonl")
            self.record.notices.append(
                "metrics.jsonl was altered since the run ended, and is kept as .damaged"
            )

    def _keep_damaged(self, *names: str) -> None:
        for name in names:
            found = self.directory / name
            if found.exists():
                shutil.copyfile(found, found.with_name(f"{name}.damaged"))

    def _replace(self) -> None:
        write_record(self.directory / "run.json", self.record)


def taken_by(record: RunRecord, config: RunConfig) -> str | None:
    """Why a run of this config cannot go on with the record; None if it can."""
    if record.config_hash != config_hash(config):
        differing = differing_keys(record.config or {}, as_dict(config))
        return f"holds a run of another config ({', '.join(differing) or 'of another precexp'})"
    if record.status in FINISHED:
        return f"holds a run already, which has {record.status}"
    return None


def lock_directory(directory: Path) -> int:
    """Takes the directory for this process until the returned descriptor closes.

    The lock dies with its owner, however it dies. Raises InUseError if another holds it.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise in_use(directory) from None
    return descriptor


def in_use(directory: Path) -> InUseError:
    return InUseError(f"{directory}: another process works in it; choose another name=")


def one_line(error: BaseException) -> str:
    """The error's class and the first line of its message, without secrets."""
    lines = redacted(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def to_json(value: object, indent: int | None = None) -> str:
    """Strict JSON: the floats that JSON does not know become "nan", "inf", "-inf"."""
    return json.dumps(_spell_floats(value), indent=indent, allow_nan=False)


def write_json(path: Path, value: object) -> None:
    """Replaces the file whole: a reader sees the old text or the new, never a part."""
    _replace_text(path, to_json(value, indent=2) + "\n")


def write_record(path: Path, record: RunRecord) -> None:
    """Replaces run.json whole."""
    write_json(path, sealed(dataclasses.asdict(record)))


def sealed(values: Mapping[str, object]) -> dict[str, object]:
    """The values and `own_sha256`, which vouches for them."""
    return {**values, "own_sha256": _sha256_of(values)}


def unsealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without their seal, where they have one. Raises ValueError if it is broken."""
    content = dict(values)
    if content.pop("own_sha256", None) not in (None, _sha256_of(content)):
        raise ValueError("altered since precexp wrote it (own_sha256 is of other content)")
    return content


def _sha256_of(values: Mapping[str, object]) -> str:
    as_read = json.loads(to_json(values))  # a tuple reads back as a list, a nan as "nan"
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def _replace_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        error.filename = error.filename or str(path)  # a failed write does not say of what
        raise


def read_run(directory: Path) -> RecordedRun:
    """The run recorded in the directory.

    Raises RecordError if there is none that can be read, or one that was altered since it ended.
    """
    record = read_record(directory / "run.json")
    path = directory / "metrics.jsonl"
    if has_altered_rows(directory, record):
        raise RecordError(f"{path}: altered since the run ended (run.json has another rows_sha256)")
    return RecordedRun(directory=directory, record=record, rows=list(_read_rows(path)))


def has_altered_rows(directory: Path, record: RunRecord) -> bool:
    """Whether the directory's rows are others than those its run had when it ended."""
    rows = directory / "metrics.jsonl"
    return record.rows_sha256 is not None and _sha256(rows) != record.rows_sha256


def read_record(path: Path) -> RunRecord:
    """run.json: an absent key reads as null, an unknown one is ignored, a newer schema refused."""
    values = _read_object(path)
    schema = values.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        kind = NewerSchemaError if isinstance(schema, int) else RecordError
        raise kind(f"{path}: schema {schema!r}; this precexp reads up to {SCHEMA}")
    known = {f.name for f in dataclasses.fields(RunRecord)}
    required = {"run_id", "config_hash", "match_key", "arm", "seed", "config"}
    if missing := sorted(required - values.keys()):
        raise RecordError(f"{path}: no {missing[0]!r} in it; not a run.json of precexp")
    ours = {k: v for k, v in values.items() if k in known}
    for name in BLOCKS:
        if not isinstance(ours.get(name), dict | None):
            raise RecordError(f"{path}: {name} is not a block of keys")
    for name, kind in LISTS.items():
        found = ours.get(name) or []
        if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
            raise RecordError(f"{path}: {name} is not a list of what it should be")
    try:
        unsealed(values)
    except ValueError as error:
        if values["own_sha256"] != _sha256_of(ours):  # keys that others add are no alteration
            raise RecordError(f"{path}: {error}") from None
    return RunRecord(**{k: _read_floats(v) for k, v in ours.items()})  # type: ignore[arg-type]


def _sha256(path: Path) -> str | None:
    """Of the file's bytes; None if there is no such file."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_rows(path: Path) -> Iterator[Row]:
    if not path.exists():
        return
    names = [f.name for f in dataclasses.fields(Row)]
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return  # the writer was killed in the middle of this row
            try:
                values = json.loads(line)
                yield Row(**{name: _read_floats(values.get(name)) for name in names})  # type: ignore[arg-type]
            except (ValueError, AttributeError):
                raise RecordError(f"{path}: line {number} is not a row") from None


def _line_of(row: Row) -> str:
    return to_json(dataclasses.asdict(row)) + "\n"


def _readable_rows(path: Path) -> list[Row]:
    """The rows from the first step on, up to one that cannot be read or is not the next step."""
    rows: list[Row] = []
    with suppress(RecordError, UnicodeDecodeError):
        for row in _read_rows(path):
            if row.step != len(rows) + 1:
                break
            rows.append(row)
    return rows


def _read_object(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"{path}: not found") from None
    except (ValueError, OSError) as error:
        raise RecordError(f"{path}: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise RecordError(f"{path}: not a JSON object")
    return values


_NAMED_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _spell_floats(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): _spell_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_floats(item) for item in value]
    return value


def _read_floats(value: object) -> object:
    """Undoes _spell_floats one level deep: the keys that hold numbers are at most there."""
    if isinstance(value, str):
        return _NAMED_FLOATS.get(value, value)
    if isinstance(value, dict):
        return {k: _NAMED_FLOATS.get(v, v) if isinstance(v, str) else v for k, v in value.items()}
    return value
