"""Token blocks, and batches of them in an order fixed by the seed alone."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from precexp.config import DataConfig, UserError
from precexp.data.text import Corpus, open_corpus
from precexp.data.tokenizer import build_tokenizer, require_vocabulary
from precexp.data.tokens import Meta, PartFacts, Tokens, open_tokens


@dataclass(frozen=True, kw_only=True)
class TokenBlocks:
    """The data of a run. Blocks are `[num_blocks, block_size]` ids on disk, mapped read-only."""

    train: np.ndarray
    eval: np.ndarray
    sha256: str  # of both, whatever the files they came from
    max_id: int
    eval_bytes_per_token: float  # bytes of UTF-8 text behind a token: for bits per byte
    notices: tuple[str, ...]


def load_blocks(
    config: DataConfig, *, model_path: str | None, vocab_size: int, trust_remote_code: bool
) -> TokenBlocks:
    """The text that the config names, tokenised and cut into blocks of block_size.

    The text is one stream: nothing is padded, and what is left over at its end is dropped and
    counted. The evaluation part is the user's eval_files, the corpus' own or the validation, else
    test, split; without one, the last eval_fraction of the training blocks (at least one), which
    is the same for every seed. Without data.tokenizer, that of `model_path` is taken.

    Raises UserError, naming the key or the file, for whatever the user has to change; ids that a
    model of `vocab_size` does not have are refused before anything is tokenised.
    """
    tokenizer = build_tokenizer(
        config.tokenizer, model_path=model_path, trust_remote_code=trust_remote_code
    )
    require_vocabulary(tokenizer, vocab_size=vocab_size)
    corpus = open_corpus(config)
    if corpus.rows == "documents" and tokenizer.separator_id is None:
        raise UserError(
            f"{tokenizer.origin} has no end-of-text token to put between documents; give a folder "
            "whose tokenizer_config.json names one, or data.rows=lines"
        )
    tokens = open_tokens(corpus, tokenizer, config)
    return TokenBlocks(
        train=tokens.train,
        eval=tokens.eval,
        sha256=_sha256_of(tokens.meta),
        max_id=tokens.meta.max_id,
        eval_bytes_per_token=tokens.meta.eval.num_bytes / tokens.meta.eval.num_tokens,
        notices=_notices(tokens, corpus, config),
    )


def _sha256_of(meta: Meta) -> str:
    parts = f"{meta.train.sha256} {meta.eval.sha256} {meta.dtype} {meta.block_size}"
    return hashlib.sha256(parts.encode()).hexdigest()


def _notices(tokens: Tokens, corpus: Corpus, config: DataConfig) -> tuple[str, ...]:
    meta = tokens.meta
    notices = [
        _part_notice("training", meta.train, config.block_size),
        _part_notice("evaluation", meta.eval, config.block_size),
    ]
    if corpus.eval:
        notices.append(f"evaluation text: {corpus.eval.origin}")
    else:
        notices.append(
            f"evaluation text: the last {meta.eval.num_blocks:,} of "
            f"{meta.train.num_blocks + meta.eval.num_blocks:,} blocks of {corpus.train.origin} "
            f"(data.eval_fraction={config.eval_fraction})"
        )
    if meta.num_blank_rows:
        fate = "kept as a newline each" if corpus.rows == "lines" else "skipped"
        notices.append(f"blank rows: {meta.num_blank_rows:,}, {fate}")
    if tokens.rebuilt:
        notices.append("token cache: an entry was damaged and has been built again")
    return tuple(notices)


def _part_notice(name: str, part: PartFacts, block_size: int) -> str:
    left_over = part.num_tokens - part.num_blocks * block_size
    return (
        f"{name} tokens: {part.num_tokens:,} in {part.num_blocks:,} blocks of {block_size}, "
        f"{left_over:,} left over"
    )


def eval_subset(blocks: np.ndarray, num_blocks: int | None) -> np.ndarray:
    """`num_blocks` of the blocks, evenly spaced, the same each time; all for None or too many."""
    if num_blocks is None or num_blocks >= len(blocks):
        return blocks
    return blocks[np.arange(num_blocks) * len(blocks) // num_blocks]


class Batches:
    """Batches of training blocks for ever: one shuffled epoch after the other, as one stream.

    Epoch e is a permutation drawn from (seed, e) alone, so the order needs no state but `position`,
    the number of blocks served. A batch may end one epoch and begin the next; no block is left out.
    `data_hash` is the evidence of what was served: the hex of h, which begins empty and which each
    batch makes sha256(h + ids as little-endian uint32).
    """

    def __init__(self, blocks: np.ndarray, *, batch_size: int, seed: int) -> None:
        self._blocks = blocks
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0
        self._order = self._order_of(0)
        self.position = 0
        self.data_hash = ""

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch."""
        return len(self._blocks) // self._batch_size

    def next_batch(self) -> torch.Tensor:
        """The next ids, int64 on the CPU, `[batch_size, block_size]`."""
        positions = range(self.position, self.position + self._batch_size)
        ids = np.asarray(self._blocks[[self._block_at(position) for position in positions]])
        served = bytes.fromhex(self.data_hash) + ids.astype("<u4").tobytes()
        self.data_hash = hashlib.sha256(served).hexdigest()
        self.position += self._batch_size
        return torch.from_numpy(ids.astype(np.int64))

    def seek(self, position: int, data_hash: str) -> None:
        """Continues as from where another Batches of these blocks and this seed had come to."""
        self.position, self.data_hash = position, data_hash

    def _block_at(self, position: int) -> int:
        epoch, place = divmod(position, len(self._blocks))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        return int(self._order[place])

    def _order_of(self, epoch: int) -> np.ndarray:
        # Sorted raw bits, because numpy promises those, and not `permutation`, to stay the same.
        bits = np.random.Philox(key=[self._seed, epoch])
        return np.argsort(bits.random_raw(len(self._blocks)), kind="stable")
