"""A text as one stream of token ids in a file, written as they come, in bounded memory."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from precexp.config import UserError
from precexp.data.text import Text
from precexp.data.tokenizer import Tokenizer

# A longer row is cut into pieces, so that the tokenizer's memory is bounded, and at fixed places,
# so that the tokens do not depend on what it is batched with.
PIECE_CHARS = 2**20
_BATCH_PIECES = 1000
_BATCH_CHARS = 2**20

_SHOWN_FROM_BYTES = 2**24  # smaller texts take seconds: no progress bar


@dataclass(kw_only=True)
class TokenStream:
    """The tokens of a text in a file, one after the other, and what was counted in writing them."""

    path: Path
    dtype: Literal["<u2", "<u4"]
    num_tokens: int = 0
    num_bytes: int = 0
    num_blank_rows: int = 0
    max_id: int = 0
    marks: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])  # tokens, bytes so far

    def bytes_before(self, token: int) -> int:
        """How much text lies before the token: exact at the marks, linear between them."""
        tokens, num_bytes = zip(*self.marks, strict=True)
        return round(np.interp(token, tokens, num_bytes))


def write_stream(
    path: Path,
    text: Text,
    *,
    rows: Literal["documents", "lines"],
    tokenizer: Tokenizer,
    block_size: int,
    min_blocks: int,
) -> TokenStream:
    """Tokenises the text into the file, batch by batch. UserError if it has too few tokens."""
    stream = TokenStream(path=path, dtype="<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    with path.open("wb") as file, _progress(text) as advance:
        for batch in _batches(text.rows(), rows):
            ids = batch.encode(tokenizer)
            file.write(ids.astype(stream.dtype).data)
            stream.num_tokens += len(ids)
            stream.num_bytes += batch.num_bytes
            stream.num_blank_rows += batch.num_blank_rows
            stream.max_id = max(stream.max_id, int(ids.max(initial=0)))
            stream.marks.append((stream.num_tokens, stream.num_bytes))
            advance(batch.num_bytes)
    if stream.num_tokens < min_blocks * block_size:
        blocks = "a block" if min_blocks == 1 else "a training and an evaluation block"
        raise UserError(
            f"{text.key}: {text.origin}: {stream.num_tokens:,} tokens of text are less than "
            f"{blocks} of data.block_size={block_size}; give more text or smaller blocks"
        )
    return stream


@dataclass(kw_only=True)
class _Batch:
    """Pieces of text that are encoded in one call, each by itself."""

    pieces: list[str] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)  # whether a document ends after the piece
    num_chars: int = 0
    num_blank_rows: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(len(piece.encode()) for piece in self.pieces)

    @property
    def is_full(self) -> bool:
        return len(self.pieces) >= _BATCH_PIECES or self.num_chars >= _BATCH_CHARS

    def add(self, piece: str, *, ends: bool) -> None:
        self.pieces.append(piece)
        self.ends.append(ends)
        self.num_chars += len(piece)

    def encode(self, tokenizer: Tokenizer) -> np.ndarray:
        """The ids, uint32, with the separator after each piece that ends a document."""
        separator = [] if tokenizer.separator_id is None else [tokenizer.separator_id]
        encoded = tokenizer.encode(self.pieces)
        runs = (
            itertools.chain(ids, separator if ends else ())
            for ids, ends in zip(encoded, self.ends, strict=True)
        )
        ids = np.fromiter(itertools.chain.from_iterable(runs), dtype=np.uint32)
        if ids.max(initial=0) >= tokenizer.vocab_size:
            raise UserError(
                f"{tokenizer.origin}: gives id {ids.max()}, beyond its own vocabulary of "
                f"{tokenizer.vocab_size:,}"
            )
        return ids


def _batches(rows: Iterator[str], kind: Literal["documents", "lines"]) -> Iterator[_Batch]:
    """The rows in batches, in order: lines each with its newline, or documents without the blank.

    A blank line is its newline alone, whatever spaces it has.
    """
    batch = _Batch()
    for row in rows:
        is_blank = not row or row.isspace()
        batch.num_blank_rows += is_blank
        if kind == "lines":
            row = "\n" if is_blank else row if row.endswith("\n") else row + "\n"
        elif is_blank:
            continue
        for piece, is_last in _pieces(row):
            batch.add(piece, ends=is_last and kind == "documents")
            if batch.is_full:
                yield batch
                batch = _Batch()
    yield batch


def _pieces(row: str) -> Iterator[tuple[str, bool]]:
    """Cuts a row of over PIECE_CHARS before a space, where there is one. True with the last."""
    start = 0
    while len(row) - start > PIECE_CHARS:
        end = row.rfind(" ", start + 1, start + PIECE_CHARS)
        end = end if end != -1 else start + PIECE_CHARS
        yield row[start:end], False
        start = end
    yield row[start:] if start else row, True


@contextlib.contextmanager
def _progress(text: Text) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal and the text is long; advanced by bytes of text."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    hidden = not console.is_terminal or text.num_bytes < _SHOWN_FROM_BYTES
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden
    ) as bar:
        task = bar.add_task(f"tokenising {text.origin}", total=text.num_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)
