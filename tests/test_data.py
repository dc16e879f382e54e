import gzip
import hashlib
import json
import lzma
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer

from precexp.config import DataConfig, UserError
from precexp.data import Batches, TokenBlocks, eval_subset, load_blocks
from precexp.data import stream as stream_module
from precexp.data.text import CORPUS
from precexp.data.tokenizer import BUNDLED, train_tokenizer

RAW = RawTokenizer.from_file(str(BUNDLED))
END = RAW.token_to_id("</s>")
PROSE = "It is a truth universally acknowledged, that a single man must be in want of a wife.\n"


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """data=text of small blocks, with nothing named yet."""
    return DataConfig(
        source="files",
        path=None,
        subset=None,
        train_files=("unset",),
        eval_files=(),
        text_column="text",
        rows="auto",
        encoding_errors="strict",
        tokenizer=None,
        block_size=8,
        eval_fraction=0.25,
        cache_dir=str(tmp_path / "cache"),
    )


def load(config: DataConfig, *, vocab_size: int = 2048) -> TokenBlocks:
    return load_blocks(config, model_path=None, vocab_size=vocab_size, trust_remote_code=False)


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def ids_of(*parts: np.ndarray) -> list[int]:
    return np.concatenate([part.ravel() for part in parts]).tolist()


def encoded(*texts: str) -> list[int]:
    return [i for text in texts for i in RAW.encode(text).ids]


def refusal(config: DataConfig, *, vocab_size: int = 2048) -> str:
    with pytest.raises(UserError) as refused:
        load(config, vocab_size=vocab_size)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# The bundled text


def unpacked(name: str) -> bytes:
    return lzma.decompress((CORPUS / name).read_bytes())


def test_the_bundled_corpus_is_the_one_that_was_given() -> None:
    train = unpacked("austen-train.txt.xz")
    valid = unpacked("austen-valid.txt.xz")
    assert (len(train), len(valid)) == (3_769_295, 242_730)


def test_the_bundled_tokenizer_is_trained_on_the_bundled_text() -> None:
    with lzma.open(CORPUS / "austen-train.txt.xz", "rt", encoding="utf-8", newline="") as lines:
        trained = train_tokenizer(lines, 2048)
    assert json.loads(trained.to_str()) == json.loads(BUNDLED.read_text(encoding="utf-8"))


def test_the_bundled_tokenizer_loses_nothing() -> None:
    valid = unpacked("austen-valid.txt.xz").decode()
    for text in (valid, "naïve £5 \t\n 日本語 🙂 \x00"):
        assert RAW.decode(RAW.encode(text).ids) == text


def test_the_bundled_blocks_are_the_bundled_text(config: DataConfig) -> None:
    bundled = replace(config, source="bundled", rows="lines", tokenizer="bundled", block_size=128)
    blocks = load(bundled)
    assert blocks.train.shape[1] == blocks.eval.shape[1] == 128
    assert blocks.train.dtype == np.uint16
    assert isinstance(blocks.train, np.memmap)
    valid = unpacked("austen-valid.txt.xz")
    assert valid.decode().startswith(RAW.decode(ids_of(blocks.eval)))
    num_tokens = len(RAW.encode(valid.decode()).ids)
    # Lines are encoded one by one, which can cut a token that would span two of them.
    assert blocks.eval_bytes_per_token == pytest.approx(len(valid) / num_tokens, rel=0.01)


# Packing


def test_lines_are_one_running_text(config: DataConfig, tmp_path: Path) -> None:
    lines = [PROSE, "\n", "  \n", "No end at the end"]
    given = replace(config, train_files=(write(tmp_path / "a.txt", "".join(lines) * 9),))
    blocks = load(given)
    text = RAW.decode(ids_of(blocks.train, blocks.eval))
    assert ("".join([PROSE, "\n\n", "No end at the end"]) * 9).startswith(text[:200])
    assert END not in ids_of(blocks.train, blocks.eval)
    assert "blank rows: 18, kept as a newline each" in blocks.notices


def test_documents_end_in_a_separator_and_blank_ones_are_none(
    config: DataConfig, tmp_path: Path
) -> None:
    documents = ["one two three", "", "  \n ", "four five", "six seven eight nine"] * 5
    rows = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    blocks = load(replace(config, train_files=(write(tmp_path / "a.jsonl", rows),)))
    expected = [i for document in documents if document.strip() for i in [*encoded(document), END]]
    ids = ids_of(blocks.train, blocks.eval)
    assert ids == expected[: len(ids)]
    assert len(expected) - len(ids) < config.block_size
    assert "blank rows: 10, skipped" in blocks.notices


def test_what_is_left_over_is_reported(config: DataConfig, tmp_path: Path) -> None:
    train, evaluation = PROSE * 10, PROSE * 3
    given = replace(
        config,
        train_files=(write(tmp_path / "a.txt", train),),
        eval_files=(write(tmp_path / "b.txt", evaluation),),
    )
    blocks = load(given)
    for name, text, part in (
        ("training", train, blocks.train),
        ("evaluation", evaluation, blocks.eval),
    ):
        tokens = encoded(*text.splitlines(keepends=True))
        assert ids_of(part) == tokens[: part.size]
        assert len(tokens) // 8 == len(part)
        line = f"{name} tokens: {len(tokens)} in {len(part)} blocks of 8, {len(tokens) % 8} left"
        assert any(notice.startswith(line) for notice in blocks.notices)
    assert blocks.eval_bytes_per_token == len(evaluation) / len(
        encoded(*evaluation.splitlines(keepends=True))
    )


def test_without_an_evaluation_text_the_end_of_the_training_text_is_held_out(
    config: DataConfig, tmp_path: Path
) -> None:
    given = replace(config, train_files=(write(tmp_path / "a.txt", PROSE * 40),))
    first = load(given)
    num_blocks = len(first.train) + len(first.eval)
    assert len(first.eval) == round(0.25 * num_blocks)
    tokens = encoded(*[PROSE] * 40)
    assert ids_of(first.train, first.eval) == tokens[: 8 * num_blocks]
    assert any(
        notice.startswith(f"evaluation text: the last {len(first.eval)} of {num_blocks} blocks")
        for notice in first.notices
    )
    again = load(replace(given, cache_dir=str(tmp_path / "other")))
    np.testing.assert_array_equal(first.eval, again.eval)
    assert len(load(replace(given, eval_fraction=1e-6)).eval) == 1
    assert len(load(replace(given, eval_fraction=1 - 1e-6)).train) == 1


def test_every_block_is_full_however_short_the_documents(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of the tokenizer that holds less than a block makes no short one."""
    rows = "".join(json.dumps({"text": f"w{n}"}) + "\n" for n in range(60))
    given = replace(config, train_files=(write(tmp_path / "a.jsonl", rows),))
    whole = load(given)
    monkeypatch.setattr(stream_module, "_BATCH_PIECES", 1)
    piecewise = load(replace(given, cache_dir=str(tmp_path / "other")))
    np.testing.assert_array_equal(whole.train, piecewise.train)
    np.testing.assert_array_equal(whole.eval, piecewise.eval)


def test_a_row_of_any_length_is_encoded_in_bounded_pieces(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "PIECE_CHARS", 50)
    row = " ".join(PROSE.split()) + " " + "x" * 170 + " end"
    given = replace(config, train_files=(write(tmp_path / "a.txt", row),))
    blocks = load(given)
    assert row.startswith(RAW.decode(ids_of(blocks.train, blocks.eval)))


# Files


@pytest.mark.parametrize("ending", ["txt", "txt.gz", "txt.xz"])
def test_text_files_may_be_compressed(config: DataConfig, tmp_path: Path, ending: str) -> None:
    opened = {"txt": open, "txt.gz": gzip.open, "txt.xz": lzma.open}[ending]
    path = tmp_path / f"a.{ending}"
    with opened(path, "wb") as file:  # type: ignore[operator]
        file.write((PROSE * 20).encode())
    blocks = load(replace(config, train_files=(str(path),)))
    tokens = encoded(*[PROSE] * 20)
    assert ids_of(blocks.train, blocks.eval) == tokens[: len(tokens) // 8 * 8]


def test_line_ends_and_byte_order_marks_make_no_difference(
    config: DataConfig, tmp_path: Path
) -> None:
    unix = load(replace(config, train_files=(write(tmp_path / "a.txt", PROSE * 20),)))
    windows = ("\ufeff" + PROSE * 20).replace("\n", "\r\n")
    same = load(replace(config, train_files=(write(tmp_path / "b.txt", windows),)))
    np.testing.assert_array_equal(unix.train, same.train)


def test_figures_and_missing_value_words_stay_text(config: DataConfig, tmp_path: Path) -> None:
    csv = "id,text\n" + "".join(f"{n},{text}\n" for n, text in enumerate(["1", "NA", "2.50"] * 9))
    given = replace(config, train_files=(write(tmp_path / "a.csv", csv),), block_size=4)
    blocks = load(given)
    text = RAW.decode(ids_of(blocks.train, blocks.eval), skip_special_tokens=False)
    assert text.startswith("1</s>NA</s>2.50</s>1</s>")


def test_parquet_and_jsonl_of_one_text_give_the_same_blocks(
    config: DataConfig, tmp_path: Path
) -> None:
    from datasets import Dataset

    rows = Dataset.from_dict(
        {"text": [PROSE.strip(), None, "the second"] * 9, "n": list(range(27))}
    )
    rows.to_parquet(str(tmp_path / "a.parquet"))
    rows.to_json(str(tmp_path / "a.jsonl"))
    parquet, jsonl = (
        load(replace(config, train_files=(str(tmp_path / name),)))
        for name in ("a.parquet", "a.jsonl")
    )
    np.testing.assert_array_equal(parquet.train, jsonl.train)
    assert "blank rows: 9, skipped" in parquet.notices


def test_patterns_name_files_in_a_fixed_order(config: DataConfig, tmp_path: Path) -> None:
    for name, word in (("b", "second "), ("a", "first ")):
        write(tmp_path / f"{name}.txt", word * 40)
    blocks = load(replace(config, train_files=(str(tmp_path / "*.txt"),)))
    assert RAW.decode(ids_of(blocks.train)).startswith("first first")


@pytest.mark.parametrize("padding", [0, 2**20 - 2, 2**20 - 1, 2**20, 3 * 2**20 + 5])
def test_bytes_that_are_not_utf8_are_named_by_their_offset(
    config: DataConfig, tmp_path: Path, padding: int
) -> None:
    before = b"a" * padding + "é".encode()
    path = write(tmp_path / "latin.txt", before + b"caf\xe9 and more\n" * 9)
    given = replace(config, train_files=(path,))
    message = refusal(given)
    assert message.startswith(
        f"data.train_files: {path} is not UTF-8 at byte offset {len(before) + 3}"
    )
    assert "data.encoding_errors=replace" in message


@pytest.mark.parametrize("ending", ["txt", "jsonl", "csv"])
def test_bytes_that_are_not_utf8_can_be_replaced(
    config: DataConfig, tmp_path: Path, ending: str
) -> None:
    rows = {"txt": b"caf\xe9 x\n", "jsonl": b'{"text": "caf\xe9 x"}\n', "csv": b"caf\xe9 x\n"}
    head = b"text\n" if ending == "csv" else b""
    path = write(tmp_path / f"latin.{ending}", head + rows[ending] * 30)
    given = replace(config, train_files=(path,))
    assert "byte offset" in refusal(given)
    blocks = load(replace(given, encoding_errors="replace"))
    assert RAW.decode(ids_of(blocks.train)).startswith("caf\ufffd x")


def test_files_that_cannot_be_used_are_named(config: DataConfig, tmp_path: Path) -> None:
    good = write(tmp_path / "good.txt", PROSE * 20)
    cut = write(tmp_path / "cut.txt.gz", gzip.compress(os.urandom(5000))[:-900])
    other = write(tmp_path / "other.csv", "text\nx\n")
    (tmp_path / "folder.txt").mkdir()
    for path, reason in (
        (str(tmp_path / "missing.txt"), "missing.txt is not found"),
        (str(tmp_path / "*.nothing"), "*.nothing is not found"),
        (write(tmp_path / "empty.txt", ""), "empty.txt is empty"),
        (str(tmp_path / "folder.txt"), "folder.txt is not a file"),
        (write(tmp_path / "a.pdf", "x"), "unknown file name ending; allowed: .txt, "),
        (cut, "can't read"),
        (write(tmp_path / "a.parquet", "no parquet"), "can't read"),
        (write(tmp_path / "a.jsonl", "{not json\n"), "can't read"),
    ):
        message = refusal(replace(config, train_files=(path,)))
        assert reason in message
        assert Path(path).name in message
    assert "different formats" in refusal(replace(config, train_files=(good, other)))
    missing = replace(config, train_files=(good,), eval_files=(str(tmp_path / "missing.txt"),))
    assert refusal(missing).startswith("data.eval_files: ")
    assert not list((tmp_path / "cache").rglob("meta.json"))


def test_a_column_that_is_not_there_or_not_text_is_refused(
    config: DataConfig, tmp_path: Path
) -> None:
    rows = "".join(json.dumps({"body": PROSE, "n": n}) + "\n" for n in range(9))
    given = replace(config, train_files=(write(tmp_path / "a.jsonl", rows),))
    assert "'text' is not a column of" in refusal(given)
    assert "its columns: body, n" in refusal(given)
    assert "'n' of" in refusal(replace(given, text_column="n"))
    assert len(load(replace(given, text_column="body")).train)


def test_text_shorter_than_a_block_is_refused(config: DataConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "short.txt", "few words\n")
    given = replace(config, train_files=(path,), block_size=64)
    message = refusal(given)
    assert message.startswith("data.train_files: short.txt: ")
    assert "less than a training and an evaluation block of data.block_size=64" in message
    long = write(tmp_path / "long.txt", PROSE * 50)
    message = refusal(replace(given, train_files=(long,), eval_files=(path,)))
    assert message.startswith("data.eval_files: short.txt: ")
    assert not list((tmp_path / "cache").rglob("*.partial"))


# Data sets


def datasets_of(**splits: str) -> object:
    from datasets import Dataset, DatasetDict

    return DatasetDict({name: Dataset.from_dict({"text": [text]}) for name, text in splits.items()})


@pytest.mark.parametrize(
    ("splits", "held_out"),
    [
        (("train", "validation", "test"), "validation"),
        (("train", "test"), "test"),
        (("train",), None),
    ],
)
def test_a_saved_data_set_brings_its_own_evaluation_split(
    config: DataConfig, tmp_path: Path, splits: tuple[str, ...], held_out: str | None
) -> None:
    texts = {name: f"{name} " * 60 for name in splits}
    datasets_of(**texts).save_to_disk(str(tmp_path / "saved"))  # type: ignore[attr-defined]
    blocks = load(replace(config, source="dataset", path=str(tmp_path / "saved")))
    assert RAW.decode(ids_of(blocks.train)).startswith("train train")
    assert RAW.decode(ids_of(blocks.eval)[4:]).strip().split()[1] == (held_out or "train")


def test_a_single_saved_split_is_the_training_text(config: DataConfig, tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"text": [PROSE] * 20}).save_to_disk(str(tmp_path / "saved"))
    assert len(load(replace(config, source="dataset", path=str(tmp_path / "saved"))).train)


def test_data_sets_that_cannot_be_used_are_refused(config: DataConfig, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    datasets_of(dev=PROSE).save_to_disk(str(saved))  # type: ignore[attr-defined]
    given = replace(config, source="dataset", path=str(saved))
    assert "has no split train; its splits: dev" in refusal(given)
    assert refusal(replace(given, subset="raw")).startswith("data.subset: raw")
    (tmp_path / "plain").mkdir()
    plain = refusal(replace(given, path=str(tmp_path / "plain")))
    assert "is not a folder written by save_to_disk" in plain
    assert "not found" in refusal(replace(given, path="./nowhere"))


def test_a_hub_data_set_is_asked_for_by_name_and_subset(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wikitext as the hub gives it: a row is a line, about a third of them blank."""
    import datasets

    asked = []

    def hub(path: str, subset: str | None, *, keep_in_memory: bool) -> object:
        asked.append((path, subset, keep_in_memory))
        lines = [" = Title = \n", "", " A line of prose . \n", ""] * 20
        split = datasets.Dataset.from_dict({"text": lines})
        return datasets.DatasetDict({"train": split, "validation": split, "test": split})

    monkeypatch.setattr(datasets, "load_dataset", hub)
    given = replace(
        config, source="dataset", path="Salesforce/wikitext", subset="raw", rows="lines"
    )
    blocks = load(given)
    assert asked == [("Salesforce/wikitext", "raw", False)]
    text = RAW.decode(ids_of(blocks.train), skip_special_tokens=False)
    assert text.startswith(" = Title = \n\n A line of prose . \n\n = Title = \n")
    assert "</s>" not in text
    assert "blank rows: 80, kept as a newline each" in blocks.notices


# The tokenizer


def test_ids_beyond_the_models_vocabulary_are_refused_before_the_text_is_read(
    config: DataConfig,
) -> None:
    message = refusal(config, vocab_size=100)
    assert message == (
        "data.tokenizer: bundled: 2,048 entries are more than model.vocab_size=100; give a smaller "
        "tokenizer or a larger vocabulary"
    )


def test_a_folder_without_tokenizer_files_is_refused(config: DataConfig, tmp_path: Path) -> None:
    """transformers makes an empty tokenizer of it, which would encode any text to nothing."""
    from transformers import GPT2Config

    GPT2Config(vocab_size=2048, n_embd=16, n_layer=1, n_head=2).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"model\.path: .*model has no tokenizer files"):
        load_blocks(
            replace(config, tokenizer=None),
            model_path=str(tmp_path / "model"),
            vocab_size=2048,
            trust_remote_code=False,
        )


def test_a_tokenizer_may_be_a_file_or_a_folder(config: DataConfig, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    smaller = train_tokenizer([PROSE], 280)
    smaller.save(str(tmp_path / "mine.json"))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=smaller, eos_token="</s>")
    wrapped.save_pretrained(str(tmp_path / "folder"))
    given = replace(config, train_files=(write(tmp_path / "a.txt", PROSE * 40),))
    file, folder = (
        load(replace(given, tokenizer=str(tmp_path / name)), vocab_size=280)
        for name in ("mine.json", "folder")
    )
    np.testing.assert_array_equal(file.train, folder.train)
    assert file.max_id < 280
    broken = write(tmp_path / "broken.json", "{}")
    message = refusal(replace(given, tokenizer=broken))
    assert message.startswith(f"data.tokenizer: {broken}: not a tokenizer.json")


def test_documents_need_a_separator(config: DataConfig, tmp_path: Path) -> None:
    bare = train_tokenizer([PROSE], 280)
    text = bare.to_str().replace("</s>", "<x>")
    given = replace(
        config,
        tokenizer=write(tmp_path / "bare.json", text),
        train_files=(write(tmp_path / "a.jsonl", json.dumps({"text": PROSE * 40}) + "\n"),),
    )
    assert "has no end-of-text token to put between documents" in refusal(given)
    assert len(load(replace(given, rows="lines")).train)


# The cache


@pytest.fixture
def given(config: DataConfig, tmp_path: Path) -> DataConfig:
    return replace(config, train_files=(write(tmp_path / "a.txt", PROSE * 40),))


def entry_of(config: DataConfig) -> Path:
    (meta,) = Path(config.cache_dir).glob("tokens/*/meta.json")
    return meta.parent


def test_the_second_run_tokenises_nothing(
    given: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(given)
    monkeypatch.setattr("precexp.data.tokens.write_stream", lambda *_, **__: pytest.fail("again"))
    moved = write(tmp_path / "moved.txt", PROSE * 40)
    for config in (given, replace(given, train_files=(moved,))):
        again = load(config)
        np.testing.assert_array_equal(first.train, again.train)
        assert again.eval_bytes_per_token == first.eval_bytes_per_token
    with pytest.raises(ValueError, match="read-only"):
        again.train[0, 0] = 1


def test_whatever_changes_the_blocks_is_another_entry(given: DataConfig, tmp_path: Path) -> None:
    train_tokenizer([PROSE], 280).save(str(tmp_path / "mine.json"))
    changed = [
        given,
        replace(given, train_files=(write(tmp_path / "b.txt", PROSE * 41),)),
        replace(given, eval_files=given.train_files),
        replace(given, block_size=16),
        replace(given, eval_fraction=0.5),
        replace(given, rows="documents"),
        replace(given, tokenizer=str(tmp_path / "mine.json")),
    ]
    for number, config in enumerate(changed, start=1):
        load(config)
        assert len(list(Path(given.cache_dir).glob("tokens/*/meta.json"))) == number


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "no meta"])
def test_a_damaged_entry_is_built_again(given: DataConfig, damage: str) -> None:
    first = ids_of(load(given).train)
    train, meta = entry_of(given) / "train.bin", entry_of(given) / "meta.json"
    content = bytearray(train.read_bytes())
    if damage == "flipped":
        content[5] ^= 1
        train.write_bytes(content)
    elif damage == "cut":
        train.write_bytes(content[:-2])
    elif damage == "gone":
        train.unlink()
    else:
        meta.write_text("{", encoding="utf-8")
    again = load(given)
    assert ids_of(again.train) == first
    assert any("damaged" in notice for notice in again.notices)
    assert not any("damaged" in notice for notice in load(given).notices)


def test_what_killed_builds_left_is_removed_and_a_living_one_is_not(given: DataConfig) -> None:
    folder = Path(given.cache_dir) / "tokens"
    for name in ("dead", "alive"):
        (folder / f"{name}.partial").mkdir(parents=True)
    from precexp.data.tokens import _lock

    with _lock(folder / "alive"):
        load(given)
    assert [path.name for path in folder.glob("*.partial")] == ["alive.partial"]


def _load_in_process(config: DataConfig, results: "multiprocessing.Queue[str]") -> None:
    blocks = load(config)
    results.put(hashlib.sha256(blocks.train.tobytes() + blocks.eval.tobytes()).hexdigest())


def test_processes_that_need_one_entry_at_once_get_the_same(given: DataConfig) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    # Forked, so that they start together; the tokenizer's threads are not started yet in a child.
    processes = [context.Process(target=_load_in_process, args=(given, results)) for _ in range(4)]
    for process in processes:
        process.start()
    hashes = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert len(hashes) == 1
    assert len(list(Path(given.cache_dir).glob("tokens/*/meta.json"))) == 1
    assert not list(Path(given.cache_dir).glob("tokens/*.partial"))


def test_a_cache_that_cannot_be_written_is_named(given: DataConfig, tmp_path: Path) -> None:
    file = write(tmp_path / "file", "x")
    message = refusal(replace(given, cache_dir=f"{file}/cache"))
    assert message.startswith(f"data.cache_dir: can't use {file}/cache/tokens: ")


def test_a_disk_that_fills_up_leaves_no_entry(
    given: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("precexp.data.tokens.write_stream", full)
    assert "No space left on device" in refusal(given)
    assert not [path for path in Path(given.cache_dir).glob("tokens/*") if path.is_dir()]


# Batches


def blocks_of(num_blocks: int, block_size: int = 2) -> np.ndarray:
    return np.arange(num_blocks * block_size, dtype=np.uint16).reshape(num_blocks, block_size)


def served(batches: Batches, num_batches: int) -> Iterator[list[int]]:
    for _ in range(num_batches):
        yield (batches.next_batch()[:, 0] // 2).tolist()


def test_every_epoch_serves_every_block_once_in_an_order_of_its_own() -> None:
    batches = Batches(blocks_of(10), batch_size=4, seed=3)
    assert batches.steps_per_epoch == 2
    order = [block for batch in served(batches, 5) for block in batch]
    first, second = order[:10], order[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_the_order_is_that_of_the_seed_and_of_nothing_else() -> None:
    import torch

    orders = []
    for seed, global_seed in ((1, 1), (1, 2), (2, 1)):
        torch.manual_seed(global_seed)
        np.random.seed(global_seed)
        orders.append(list(served(Batches(blocks_of(50), batch_size=5, seed=seed), 10)))
    assert orders[0] == orders[1] != orders[2]
    # Written down, so that an upgrade of numpy that changes the order is seen.
    assert orders[0][0] == [3, 5, 24, 27, 43]


def test_the_data_hash_is_the_chain_that_the_docstring_says() -> None:
    batches = Batches(blocks_of(10), batch_size=4, seed=0)
    expected = b""
    for _ in range(4):
        ids = batches.next_batch().numpy().astype("<u4")
        expected = hashlib.sha256(expected + ids.tobytes()).digest()
        assert batches.data_hash == expected.hex()


def test_seek_goes_on_where_another_stopped() -> None:
    whole = Batches(blocks_of(10), batch_size=4, seed=0)
    list(served(whole, 3))
    rest = Batches(blocks_of(10), batch_size=4, seed=0)
    rest.seek(whole.position, whole.data_hash)
    assert list(served(rest, 4)) == list(served(whole, 4))
    assert rest.data_hash == whole.data_hash


def test_a_batch_may_be_larger_than_the_data() -> None:
    batches = Batches(blocks_of(3), batch_size=7, seed=0)
    assert sorted(next(served(batches, 1)))[-1] == 2
    assert batches.next_batch().shape == (7, 2)


def test_the_evaluation_subset_is_spread_evenly() -> None:
    blocks = blocks_of(100)
    assert (eval_subset(blocks, 4)[:, 0] // 2).tolist() == [0, 25, 50, 75]
    for num_blocks in (None, 100, 1000):
        assert eval_subset(blocks, num_blocks) is blocks
