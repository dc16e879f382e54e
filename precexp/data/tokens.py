"""Tokens on disk: a text is tokenised once, cut into blocks, and mapped from a cache ever after.

A cache entry is `<cache_dir>/tokens/<key>/` with train.bin and eval.bin (little-endian ids) and
meta.json. Its key is made of contents, so a changed text or tokenizer is another entry.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console

from precexp.config import DataConfig, UserError
from precexp.data.stream import TokenStream, write_stream
from precexp.data.text import Corpus
from precexp.data.tokenizer import Tokenizer
from precexp.record import sealed, unsealed, write_json

FORMAT = 1  # part of the key: raise it when the same text would give other blocks


@dataclass(frozen=True, kw_only=True)
class PartFacts:
    """What meta.json knows of one part."""

    num_blocks: int
    num_tokens: int  # those left over at the end included
    num_bytes: int  # of the text as UTF-8
    sha256: str  # of its file


@dataclass(frozen=True, kw_only=True)
class Meta:
    """meta.json."""

    dtype: Literal["<u2", "<u4"]
    block_size: int
    max_id: int
    num_blank_rows: int
    train: PartFacts
    eval: PartFacts


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A cache entry, opened: the blocks are mapped read-only, `[num_blocks, block_size]`."""

    train: np.ndarray
    eval: np.ndarray
    meta: Meta
    rebuilt: bool  # the entry was there, damaged


def open_tokens(corpus: Corpus, tokenizer: Tokenizer, config: DataConfig) -> Tokens:
    """The blocks of the corpus, from the cache or, the first time, into it.

    Processes that need one entry at once wait for the first of them to build it. Raises UserError
    for a text too short to cut, and for a cache_dir that can't be used.
    """
    folder = Path(config.cache_dir).expanduser() / "tokens"
    entry = folder / _key(corpus, tokenizer, config)
    try:
        if tokens := _read(entry):
            return tokens
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(entry):
            return _read(entry) or _rebuild(entry, corpus, tokenizer, config)
    except OSError as error:
        raise UserError(
            f"data.cache_dir: can't use {folder}: {error.strerror or error}; give a folder that "
            "can be written and has room"
        ) from None


def _key(corpus: Corpus, tokenizer: Tokenizer, config: DataConfig) -> str:
    parts = {
        "format": FORMAT,
        "train": corpus.train.sha256,
        "eval": corpus.eval.sha256 if corpus.eval else config.eval_fraction,
        "rows": corpus.rows,
        "text_column": config.text_column,
        "encoding_errors": config.encoding_errors,
        "tokenizer": tokenizer.fingerprint,
        "block_size": config.block_size,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _read(entry: Path) -> Tokens | None:
    """The entry, or None if it is not there or is not what meta.json says."""
    try:
        values = unsealed(json.loads((entry / "meta.json").read_text(encoding="utf-8")))
        train, evaluation = PartFacts(**values.pop("train")), PartFacts(**values.pop("eval"))
        meta = Meta(**values, train=train, eval=evaluation)
        return Tokens(
            train=_map(entry / "train.bin", meta, train),
            eval=_map(entry / "eval.bin", meta, evaluation),
            meta=meta,
            rebuilt=False,
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _map(path: Path, meta: Meta, part: PartFacts) -> np.ndarray:
    """The blocks in the file. Raises ValueError if its bytes or its size are not as recorded."""
    if _sha256(path) != part.sha256:
        raise ValueError(f"{path}: damaged")
    return np.memmap(path, meta.dtype, mode="r").reshape(part.num_blocks, meta.block_size)


@contextlib.contextmanager
def _lock(entry: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds the right to build the entry; it ends with its owner, however that ends.

    Raises BlockingIOError if another process has it and `wait` is false.
    """
    with entry.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            Console(stderr=True).print("waiting for another process that tokenises the same text")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _rebuild(entry: Path, corpus: Corpus, tokenizer: Tokenizer, config: DataConfig) -> Tokens:
    """Builds the entry in a folder beside it and renames that into place. The lock is held."""
    _remove_leftovers(entry.parent)
    damaged = entry.exists()
    if damaged:
        shutil.rmtree(entry)
    partial = entry.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        meta = _build(partial, corpus, tokenizer, config)
        write_json(partial / "meta.json", sealed(dataclasses.asdict(meta)))
        partial.rename(entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    tokens = _read(entry)
    assert tokens is not None
    return dataclasses.replace(tokens, rebuilt=damaged)


def _remove_leftovers(folder: Path) -> None:
    """Removes what killed processes left of entries that nobody is building."""
    for partial in folder.glob("*.partial"):
        entry = partial.with_suffix("")
        with contextlib.suppress(BlockingIOError), _lock(entry, wait=False):
            shutil.rmtree(partial, ignore_errors=True)


def _build(folder: Path, corpus: Corpus, tokenizer: Tokenizer, config: DataConfig) -> Meta:
    """Writes train.bin and eval.bin. Without an evaluation text, eval.bin is the end of train's."""
    write = functools.partial(
        write_stream, rows=corpus.rows, tokenizer=tokenizer, block_size=config.block_size
    )
    if corpus.eval:  # first: it is short, and as likely to be refused
        evaluation = write(folder / "eval.bin", corpus.eval, min_blocks=1)
        train = write(folder / "train.bin", corpus.train, min_blocks=1)
    else:
        whole = write(folder / "train.bin", corpus.train, min_blocks=2)
        train, evaluation = _split_end(whole, folder / "eval.bin", config)
    return Meta(
        dtype=train.dtype,
        block_size=config.block_size,
        max_id=max(train.max_id, evaluation.max_id),
        num_blank_rows=train.num_blank_rows + evaluation.num_blank_rows,
        train=_cut(train, config.block_size),
        eval=_cut(evaluation, config.block_size),
    )


def _split_end(
    stream: TokenStream, eval_path: Path, config: DataConfig
) -> tuple[TokenStream, TokenStream]:
    """Moves the last eval_fraction of the blocks, and what is left over, to the evaluation."""
    num_blocks = stream.num_tokens // config.block_size
    num_eval = min(max(1, round(config.eval_fraction * num_blocks)), num_blocks - 1)
    boundary = (num_blocks - num_eval) * config.block_size
    with stream.path.open("rb") as whole, eval_path.open("wb") as end:
        whole.seek(boundary * np.dtype(stream.dtype).itemsize)
        shutil.copyfileobj(whole, end)
    bytes_before = stream.bytes_before(boundary)
    train = dataclasses.replace(stream, num_tokens=boundary, num_bytes=bytes_before)
    evaluation = TokenStream(
        path=eval_path,
        dtype=stream.dtype,
        num_tokens=stream.num_tokens - boundary,
        num_bytes=stream.num_bytes - bytes_before,
    )
    return train, evaluation


def _cut(stream: TokenStream, block_size: int) -> PartFacts:
    """Cuts the file after its last whole block."""
    num_blocks = stream.num_tokens // block_size
    os.truncate(stream.path, num_blocks * block_size * np.dtype(stream.dtype).itemsize)
    return PartFacts(
        num_blocks=num_blocks,
        num_tokens=stream.num_tokens,
        num_bytes=stream.num_bytes,
        sha256=_sha256(stream.path),
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
