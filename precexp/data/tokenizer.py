"""The tokenizer of a run: which one, what it encodes to, and a fingerprint for the cache."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from precexp.config import UserError
from precexp.hub import hub_error, prepare_hub

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

BUNDLED = Path(__file__).parents[1] / "corpus" / "tokenizer.json"

# What the files of a tokenizer are called, as patterns.
_FILES = ("*tokenizer*", "*vocab*", "*.model", "*.tiktoken", "tekken.json")

# What ends a document in a tokenizer that names no end-of-text token itself.
_SEPARATORS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Texts to token ids. No text gets special tokens that are not in it."""

    origin: str  # "key: name", for messages
    encode: Callable[[list[str]], list[list[int]]]
    vocab_size: int  # the largest id + 1
    separator_id: int | None  # ends a document
    fingerprint: str  # equal fingerprints encode alike


def build_tokenizer(
    name: str | None, *, model_path: str | None, trust_remote_code: bool
) -> Tokenizer:
    """The tokenizer called `name`: bundled, a tokenizer.json, a local folder or a hub id.

    None is the one of `model_path`, else the bundled one. Raises UserError if it can't be loaded.
    """
    key = "data.tokenizer"
    if name is None and model_path is not None:
        key, name = "model.path", model_path
    if name is None or name == "bundled":
        return _from_file(f"{key}: bundled", BUNDLED)
    path = Path(name).expanduser()
    if path.is_file():
        return _from_file(f"{key}: {name}", path)
    return _from_transformers(key, str(path), trust_remote_code)


def require_vocabulary(tokenizer: Tokenizer, *, vocab_size: int) -> None:
    """UserError if the tokenizer has ids that a model of `vocab_size` has not."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{tokenizer.origin}: {tokenizer.vocab_size:,} entries are more than "
            f"model.vocab_size={vocab_size}; give a smaller tokenizer or a larger vocabulary"
        )


def save_tokenizer(
    name: str | None, folder: Path, *, model_path: str | None, trust_remote_code: bool
) -> None:
    """Writes the tokenizer that `build_tokenizer` takes, for AutoTokenizer to load.

    Raises UserError if it can't be loaded any more.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    name = name or model_path or "bundled"
    path = BUNDLED if name == "bundled" else Path(name).expanduser()
    if not path.is_file():
        prepare_hub("data.tokenizer", str(path))
        try:
            loaded = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise hub_error("data.tokenizer", str(path), error) from None
        loaded.save_pretrained(folder)
        return
    loaded = PreTrainedTokenizerFast(tokenizer_file=str(path))
    separator = next((token for token in _SEPARATORS if token in loaded.get_vocab()), None)
    if separator is not None:
        loaded.eos_token = separator
    loaded.save_pretrained(folder)


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> "tokenizers.Tokenizer":
    """A byte-level BPE with one special token, `</s>`: how the bundled tokenizer.json was made.

    All 256 bytes are in it, so that it encodes any text and decodes it to the same text.
    """
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, pre_tokenizers, trainers

    raw = Raw(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    raw.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(lines, trainer)
    return raw


def _from_file(origin: str, path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Raw

    try:
        raw = Raw.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise UserError(
            f"{origin}: not a tokenizer.json that tokenizers can read: {error}"
        ) from None
    return _from_raw(origin, raw, separator_id=None)


def _from_raw(origin: str, raw: "tokenizers.Tokenizer", *, separator_id: int | None) -> Tokenizer:
    raw.no_truncation()
    raw.no_padding()
    vocabulary = raw.get_vocab(with_added_tokens=True)
    if separator_id is None:
        separator_id = _separator_in(vocabulary)

    def encode(texts: list[str]) -> list[list[int]]:
        # Special tokens off: OPT's tokenizer would begin every text with </s>.
        encoded = raw.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    return Tokenizer(
        origin=origin,
        encode=encode,
        vocab_size=max(vocabulary.values()) + 1,
        separator_id=separator_id,
        fingerprint=_fingerprint(raw.to_str(), separator_id),
    )


def _from_transformers(key: str, name: str, trust_remote_code: bool) -> Tokenizer:
    prepare_hub(key, name)
    from transformers import AutoTokenizer

    origin, folder = f"{key}: {name}", Path(name)
    lacking = UserError(
        f"{origin} has no tokenizer files; give data.tokenizer=FOLDER (or a tokenizer.json, or "
        "bundled)"
    )
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _FILES):
        raise lacking
    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise hub_error(key, name, error) from None
    # Without some of its files transformers makes a tokenizer of special tokens alone.
    if not loaded.get_vocab().keys() - set(loaded.all_special_tokens):
        raise lacking
    if loaded.is_fast:
        return _from_raw(origin, loaded.backend_tokenizer, separator_id=loaded.eos_token_id)
    return _from_slow(origin, loaded)


def _from_slow(origin: str, loaded: "PreTrainedTokenizerBase") -> Tokenizer:
    """A tokenizer written in Python: it has no JSON, so its class and vocabulary identify it."""
    vocabulary, separator_id = loaded.get_vocab(), loaded.eos_token_id
    assert separator_id is None or isinstance(separator_id, int)

    def encode(texts: list[str]) -> list[list[int]]:
        return loaded(texts, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[return-value]

    identity = json.dumps([type(loaded).__qualname__, sorted(vocabulary.items())])
    return Tokenizer(
        origin=origin,
        encode=encode,
        vocab_size=max(vocabulary.values()) + 1,
        separator_id=separator_id,
        fingerprint=_fingerprint(identity, separator_id),
    )


def _separator_in(vocabulary: dict[str, int]) -> int | None:
    return next((vocabulary[token] for token in _SEPARATORS if token in vocabulary), None)


def _fingerprint(identity: str, separator_id: int | None) -> str:
    return hashlib.sha256(f"{separator_id} {identity}".encode()).hexdigest()
