"""The text that blocks are made of: rows, read anew as often as wanted, and what they come from."""

import codecs
import glob
import gzip
import hashlib
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from precexp.config import DataConfig, UserError
from precexp.hub import hub_error, prepare_hub

if TYPE_CHECKING:
    from datasets import Dataset

CORPUS = Path(__file__).parents[1] / "corpus"

# File name endings, and who reads them: ourselves or the loader of `datasets` of that name.
FORMATS = {
    ".txt": "text",
    ".txt.gz": "text",
    ".txt.xz": "text",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}

_CHUNK_BYTES = 2**20
_ROWS_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True)
class Text:
    """One part, training or evaluation, of the text."""

    key: str  # the config key that names it
    origin: str  # the files or the split, for messages
    rows: Callable[[], Iterator[str]]  # a fresh pass; None in the source is an empty row
    sha256: str  # of the content, whatever the names
    num_bytes: int  # about: the files' size, their markup included


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The whole text. `eval` None: it has no evaluation part of its own."""

    train: Text
    eval: Text | None
    rows: Literal["documents", "lines"]


def open_corpus(config: DataConfig) -> Corpus:
    """Finds and hashes the text that the config names. Raises UserError for what is not there.

    `rows` auto is lines for .txt, documents for all else. Files are found by name or pattern, and
    read in the order given; text files are UTF-8, with any line ends, read as "\\n".
    """
    if config.source == "bundled":
        train, evaluation = CORPUS / "austen-train.txt.xz", CORPUS / "austen-valid.txt.xz"
        return _files_corpus(config, [train], [evaluation])
    if config.source == "files":
        train = _found("data.train_files", config.train_files)
        return _files_corpus(config, train, _found("data.eval_files", config.eval_files))
    return _dataset_corpus(config)


def _files_corpus(config: DataConfig, train: list[Path], evaluation: list[Path]) -> Corpus:
    format = _format_of(train + evaluation)
    auto = "lines" if format == "text" else "documents"
    return Corpus(
        train=_files_text("data.train_files", train, format, config),
        eval=_files_text("data.eval_files", evaluation, format, config) if evaluation else None,
        rows=auto if config.rows == "auto" else config.rows,
    )


def _files_text(key: str, paths: list[Path], format: str, config: DataConfig) -> Text:
    digest, num_bytes = hashlib.sha256(format.encode()), 0
    for path in paths:
        with _naming(key, path):
            sha256, size = _read_through(
                path, encoding_errors=None if format == "parquet" else config.encoding_errors
            )
        if size == 0:
            raise UserError(f"{key}: {path} is empty")
        digest.update(sha256)
        num_bytes += size
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return Text(
        key=key,
        origin=f"{paths[0].name}{more}",
        rows=partial(_file_rows, key, paths, format, config),
        sha256=digest.hexdigest(),
        num_bytes=num_bytes,
    )


def _file_rows(key: str, paths: list[Path], format: str, config: DataConfig) -> Iterator[str]:
    for path in paths:
        with _naming(key, path):
            if format == "text":
                yield from _lines(path, config.encoding_errors)
            else:
                yield from _streamed(path, format, config)


def _found(key: str, patterns: tuple[str, ...]) -> list[Path]:
    """The files of the names and patterns, in their order; those of one pattern sorted."""
    paths = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        matches = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
        matches = sorted(matches)
        if not matches:
            raise UserError(f"{key}: {pattern} is not found")
        for match in matches:
            if not match.is_file():
                raise UserError(
                    f"{key}: {match} is not a file; give files, or a pattern as {match}/*.txt"
                )
        paths += matches
    return paths


def _format_of(paths: list[Path]) -> str:
    """The one format of all the files."""
    formats: dict[str, Path] = {}
    for path in paths:
        name = path.name.lower()
        format = next((FORMATS[ending] for ending in FORMATS if name.endswith(ending)), None)
        if format is None:
            raise UserError(f"{path}: unknown file name ending; allowed: {', '.join(FORMATS)}")
        formats.setdefault(format, path)
    if len(formats) > 1:
        raise UserError(
            f"data.train_files, data.eval_files: {' and '.join(map(str, formats.values()))} are of "
            f"different formats; give files of one of: {', '.join(FORMATS)}"
        )
    return next(iter(formats))


@contextmanager
def _naming(key: str, source: Path | str) -> Iterator[None]:
    """Turns what goes wrong in reading a file or split into one line that names it."""
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(
            f"{key}: {source} is not UTF-8 at byte offset {error.start}: {error.reason}; "
            "convert it, or set data.encoding_errors=replace"
        ) from None
    # What files that are cut short, damaged or not what their name says raise, in the libraries.
    except (OSError, EOFError, ValueError, TypeError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        raise UserError(f"{key}: can't read {source}: {reason}") from None


def _read_through(path: Path, *, encoding_errors: str | None) -> tuple[bytes, int]:
    """sha256 and size of the uncompressed content, in one pass that also checks that it is UTF-8.

    `encoding_errors` None: it is not text, and not checked.

    Raises UnicodeDecodeError with `start` counted from the beginning of the file.
    """
    digest, size = hashlib.sha256(), 0
    decoder = None
    if encoding_errors is not None:
        decoder = codecs.getincrementaldecoder("utf-8")(encoding_errors)
    with _opened(path) as file:
        while True:
            chunk = file.read(_CHUNK_BYTES)
            if decoder:
                try:
                    decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    # The decoder had kept the first bytes of a character from the last chunk.
                    kept = len(error.object) - len(chunk)
                    error.start += size - kept
                    raise
            if not chunk:
                return digest.digest(), size
            digest.update(chunk)
            size += len(chunk)


def _opened(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".xz":
        return lzma.open(path)  # type: ignore[return-value]
    if path.suffix.lower() == ".gz":
        return gzip.open(path)  # type: ignore[return-value]
    return path.open("rb")


def _lines(path: Path, errors: str) -> Iterator[str]:
    """The lines without their ends. A byte order mark at the beginning is dropped."""
    with _opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", errors=errors) as lines:
        for line in lines:
            yield line.removesuffix("\n")


def _streamed(path: Path, format: str, config: DataConfig) -> Iterator[str]:
    """The text column of a .jsonl, .csv or .parquet, a chunk in memory at a time."""
    import datasets

    # It logs each error that it raises, and we report what is raised.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    options = _loader_options(format, config)
    files = [glob.escape(str(path))]
    stream = datasets.load_dataset(  # type: ignore[call-overload]
        format,
        data_files=files,
        split="train",
        streaming=True,
        **options,  # type: ignore[arg-type]
    )
    if config.text_column in (stream.column_names or ()):  # unknown for some: a JSON list
        stream = stream.select_columns([config.text_column])
    for batch in stream.iter(batch_size=_ROWS_AT_ONCE):
        yield from _strings(batch, config.text_column, str(path))


def _loader_options(format: str, config: DataConfig) -> dict[str, object]:
    if format == "parquet":
        return {"batch_size": _ROWS_AT_ONCE}
    # The JSON loader heeds encoding_errors only under an encoding not spelled utf-8.
    options: dict[str, object] = {"encoding": "utf8", "encoding_errors": config.encoding_errors}
    if format == "json":
        # Else a column of text and numbers comes out as JSON, quotes and all.
        return options | {"on_mixed_types": None, "parse_agent_traces": False}
    # Else a chunk of figures comes out as numbers, and the words NA and None as nothing.
    return options | {"converters": {config.text_column: str}, "keep_default_na": False}


def _strings(batch: Mapping[str, list[object]], column: str, origin: str) -> Iterator[str]:
    if column not in batch:
        raise _no_column(column, origin, list(batch))
    for value in batch[column]:
        if value is not None and not isinstance(value, str):
            raise UserError(
                f"data.text_column: {column!r} of {origin} holds {type(value).__name__}, not text; "
                f"its columns: {_listed(list(batch))}"
            )
        yield value or ""


def _no_column(column: str, origin: str, columns: list[str]) -> UserError:
    return UserError(
        f"data.text_column: {column!r} is not a column of {origin}; its columns: {_listed(columns)}"
    )


def _listed(names: list[str]) -> str:
    text = ", ".join(map(str, names)).replace("\n", " ")
    return text if len(text) <= 200 else f"{text[:200]}..."


def _dataset_corpus(config: DataConfig) -> Corpus:
    assert config.path is not None  # a rule of DataConfig
    splits = _load_splits(config.path, config.subset)
    if "train" not in splits:
        raise UserError(
            f"data.path: {config.path} has no split train; its splits: {_listed(list(splits))}"
        )
    held_out = next((name for name in ("validation", "test") if name in splits), None)
    return Corpus(
        train=_split_text("train", splits["train"], config),
        eval=_split_text(held_out, splits[held_out], config) if held_out else None,
        rows="documents" if config.rows == "auto" else config.rows,
    )


def _load_splits(path: str, subset: str | None) -> "dict[str, Dataset]":
    folder = Path(path).expanduser()
    if folder.exists():
        return _load_folder(folder, subset)
    prepare_hub("data.path", path)
    from datasets import DatasetDict, load_dataset
    from datasets.exceptions import DatasetsError

    try:
        loaded = load_dataset(path, subset, keep_in_memory=False)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise hub_error("data.path", path, error) from None
    assert isinstance(loaded, DatasetDict)  # as no one split was asked for
    return {str(name): split for name, split in loaded.items()}


def _load_folder(folder: Path, subset: str | None) -> "dict[str, Dataset]":
    if not ((folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()):
        raise UserError(
            f"data.path: {folder} is not a folder written by save_to_disk; for files of text: "
            "data=text data.train_files=[...]"
        )
    if subset is not None:
        raise UserError(f"data.subset: {subset} is for the hub, not for the folder {folder}")
    from datasets import Dataset, load_from_disk

    with _naming("data.path", folder):
        loaded = load_from_disk(str(folder), keep_in_memory=False)
    if isinstance(loaded, Dataset):
        return {"train": loaded}
    return {str(name): split for name, split in loaded.items()}


def _split_text(name: str, split: "Dataset", config: DataConfig) -> Text:
    origin = f"split {name} of {config.path}"
    if config.text_column not in split.column_names:
        raise _no_column(config.text_column, origin, split.column_names)
    paths = [Path(file["filename"]) for file in split.cache_files]
    digest = hashlib.sha256(b"arrow")
    for path in paths:
        with _naming("data.path", path):
            digest.update(_read_through(path, encoding_errors=None)[0])
    return Text(
        key="data.path",
        origin=origin,
        rows=partial(_split_rows, split, config.text_column, origin),
        sha256=digest.hexdigest(),
        num_bytes=sum(os.path.getsize(path) for path in paths),
    )


def _split_rows(split: "Dataset", column: str, origin: str) -> Iterator[str]:
    with _naming("data.path", origin):
        for batch in split.select_columns([column]).iter(batch_size=_ROWS_AT_ONCE):
            yield from _strings(batch, column, origin)  # type: ignore[arg-type]
