import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from precexp.config import Arm, RunConfig, load
from precexp.record import (
    RecordError,
    Row,
    RunWriter,
    lock_directory,
    read_run,
    to_json,
    write_json,
)
from precexp.redact import redacted
from tests.test_config import composed

ARM = Arm(precision="fp32", optim="anyprecision", overrides={})
ROW = Row(
    step=1,
    tokens=2048,
    loss=7.5,
    eval_loss=None,
    grad_norm=1.0,
    lr=1e-3,
    loss_scale=None,
    skipped=False,
    step_seconds=0.1,
    peak_bytes=None,
    probes=None,
)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load(composed())


def test_a_run_reads_back_as_it_was_written(tmp_path: Path, config: RunConfig) -> None:
    rows = [ROW, replace(ROW, step=2, loss=math.nan, eval_loss=math.inf, grad_norm=-math.inf)]
    with RunWriter(tmp_path / "run", config, ARM) as writer:
        for row in rows:
            writer.write(row)
        writer.update(status="completed", results={"final_eval_loss": math.nan, "steps": 2})
    run = read_run(tmp_path / "run")
    assert run.record.status == "completed"
    assert run.label == "fp32-anyprecision"
    assert run.rows[0] == rows[0]
    assert math.isnan(run.rows[1].loss or 0.0)
    assert (run.rows[1].eval_loss, run.rows[1].grad_norm) == (math.inf, -math.inf)
    assert math.isnan(run.record.results["final_eval_loss"])  # type: ignore[arg-type]


def test_files_are_strict_json_with_every_key(tmp_path: Path, config: RunConfig) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    with RunWriter(tmp_path, config, ARM) as writer:
        writer.write(replace(ROW, loss=math.nan))
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row["loss"] == "nan"
    assert set(row) == {
        "step", "tokens", "loss", "eval_loss", "grad_norm", "lr", "loss_scale", "skipped",
        "step_seconds", "peak_bytes", "probes"}  # fmt: skip
    record = json.loads((tmp_path / "run.json").read_text(), parse_constant=refuse)
    assert set(record) == {
        "schema", "run_id", "status", "error", "config_hash", "match_key", "arm", "seed", "config",
        "environment", "evidence", "census", "warnings", "notices", "memory", "timing", "results",
        "rows_sha256", "own_sha256",
    }  # fmt: skip
    assert set(record["arm"]) == {"precision", "optim", "overrides", "label"}


def test_config_and_rows_are_on_disk_while_the_run_goes_on(
    tmp_path: Path, config: RunConfig
) -> None:
    with RunWriter(tmp_path, config, ARM) as writer:
        assert read_run(tmp_path).record.config["train"]["lr"] == 1e-3  # type: ignore[index]
        writer.write(ROW)
        running = read_run(tmp_path)
        assert (running.rows, running.record.status) == ([ROW], "running")


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("boom\nmore"), "failed"), (KeyboardInterrupt(), "interrupted")],
)
def test_leaving_with_an_exception_is_recorded(
    error: BaseException, status: str, tmp_path: Path, config: RunConfig
) -> None:
    with pytest.raises(type(error)), RunWriter(tmp_path, config, ARM):
        raise error
    record = read_run(tmp_path).record
    assert record.status == status
    assert record.error == ("RuntimeError: boom" if status == "failed" else "KeyboardInterrupt")


@pytest.mark.parametrize("status", ["completed", "diverged"])
def test_a_directory_with_a_finished_run_is_refused(
    status: str, tmp_path: Path, config: RunConfig
) -> None:
    with RunWriter(tmp_path, config, ARM) as writer:
        writer.update(status=status)
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(RecordError, match=f"holds a run already, which has {status}"):
        RunWriter(tmp_path, config, ARM)
    assert (tmp_path / "run.json").read_bytes() == before
    os.close(lock_directory(tmp_path))  # nothing keeps the lock


def test_a_run_of_another_config_is_refused_by_its_keys(tmp_path: Path, config: RunConfig) -> None:
    with RunWriter(tmp_path, config, ARM):
        pass
    other = load(composed("train.lr=0.5", "wandb.project=other"))
    with pytest.raises(RecordError, match=r"another config \(train\.lr: 0\.001, not 0\.5\)"):
        RunWriter(tmp_path, other, ARM)


def test_an_unfinished_run_is_taken_over_from_a_step(tmp_path: Path, config: RunConfig) -> None:
    with RunWriter(tmp_path, config, ARM) as writer:
        for step in (1, 2, 3):
            writer.write(replace(ROW, step=step))
            writer.evidence(data_hash=f"hash-{step}", at_step=step)
        writer.notice("told before")
        writer.update(status="failed", error="RuntimeError: boom")
    with RunWriter(tmp_path, config, ARM) as writer:
        assert [row.step for row in writer.rows] == [1, 2, 3]
        writer.rewind(2)
        writer.write(replace(ROW, step=3, loss=1.0))
        found = read_run(tmp_path)
    assert (found.record.status, found.record.error) == ("running", None)
    assert found.record.notices == ["told before"]
    assert found.record.evidence["data_hash_at"] == {"1": "hash-1", "2": "hash-2"}
    assert [(row.step, row.loss) for row in found.rows] == [(1, 7.5), (2, 7.5), (3, 1.0)]


def test_a_directory_that_another_process_uses_is_refused(
    tmp_path: Path, config: RunConfig
) -> None:
    script = (
        "import sys; from pathlib import Path; from precexp.record import lock_directory;"
        "lock_directory(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(RecordError, match="another process works in it"):
            RunWriter(tmp_path, config, ARM)
        other.kill()
    os.close(lock_directory(tmp_path))  # the lock died with its owner


def test_a_row_cut_short_by_a_kill_is_left_out(tmp_path: Path, config: RunConfig) -> None:
    with RunWriter(tmp_path, config, ARM) as writer:
        writer.write(ROW)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "tok')
    assert read_run(tmp_path).rows == [ROW]


def test_a_damaged_row_is_named(tmp_path: Path, config: RunConfig) -> None:
    with RunWriter(tmp_path, config, ARM) as writer:
        writer.write(ROW)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("{]\n")
    with pytest.raises(RecordError, match="line 2 is not a row"):
        read_run(tmp_path)


def test_readers_skip_unknown_keys_and_take_absent_ones_as_null(
    tmp_path: Path, config: RunConfig
) -> None:
    with RunWriter(tmp_path, config, ARM) as writer:
        writer.write(ROW)
    values = json.loads((tmp_path / "run.json").read_text())
    write_json(tmp_path / "run.json", {**values, "later": 1})
    assert read_run(tmp_path).rows == [ROW]
    for key in ("census", "rows_sha256", "own_sha256"):  # as of another writer
        del values[key]
    write_json(tmp_path / "run.json", values)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 2, "lr": 0.1, "more": 3}\n')
    run = read_run(tmp_path)
    assert run.record.census is None
    assert (run.rows[0].step, run.rows[0].loss) == (1, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 2}', "schema 2; this precexp reads up to 1"),
        ('{"schema": 1}', "no 'arm' in it"),
        ("[]", "not a JSON object"),
        ("{", "run.json: JSONDecodeError"),
    ],
)
def test_an_unreadable_record_is_refused_with_the_reason(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RecordError, match=message):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("config", [1]), ("evidence", "x"), ("memory", 3), ("warnings", 5), ("notices", [{}])],
)
def test_a_record_whose_keys_hold_something_else_is_refused(
    key: str, value: object, tmp_path: Path, config: RunConfig
) -> None:
    with RunWriter(tmp_path, config, ARM):
        pass
    values = json.loads((tmp_path / "run.json").read_text())
    del values["own_sha256"]  # as of another writer
    write_json(tmp_path / "run.json", {**values, key: value})
    with pytest.raises(RecordError, match=f"run.json: {key} is not a "):
        read_run(tmp_path)
    with RunWriter(tmp_path, config, ARM) as writer:
        assert "kept as .damaged" in writer.record.notices[0]


def test_nested_floats_are_spelled() -> None:
    assert to_json({"a": [math.inf, {"b": math.nan}], "c": (1.5,)}) == (
        '{"a": ["inf", {"b": "nan"}], "c": [1.5]}'
    )


@pytest.mark.parametrize(
    "text",
    [
        "https://me:pass-word@hub.org/x: not found",
        "https://hub.org/x?rev=1&token=pass-word: not found",
        "hf_passwordpasswordpassword is refused",
        "the key of the environment, 0123456789abcdef-pass-word, is refused",
    ],
)
def test_no_secret_of_an_error_or_notice_is_recorded(
    text: str, tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "0123456789abcdef-pass-word")
    with suppress(RuntimeError), RunWriter(tmp_path, config, ARM) as writer:
        writer.notice(f"a notice: {text}")
        raise RuntimeError(text)
    kept = (tmp_path / "run.json").read_text()
    assert "pass" not in kept
    assert kept.count("***") == 2


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("https://me:p@ss@host/x", "https://***@host/x"),
        ("https://h/x?X-Amz-Signature=0f&X-Amz-Date=1", "https://h/x?X-Amz-Signature=***&X-Amz-Date=1"),
        ("https://h/x?sv=1&sig=a%2F", "https://h/x?sv=1&sig=***"),
        ("https://h/#access_token=a", "https://h/#access_token=***"),
        ("https://h/?Token=a", "https://h/?Token=***"),
        ("long: abcdefghijklmnopqrstuvwxyz", "long: ***"),
        ("told: a-password-of-many", "told: ***"),
    ],
)  # fmt: skip
def test_secrets_of_urls_and_of_the_environment_are_hidden_whole(
    text: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "abcdefghijklmnop")  # with which the other begins
    monkeypatch.setenv("B_TOKEN", "abcdefghijklmnopqrstuvwxyz")
    monkeypatch.setenv("PGPASSWORD", "a-password-of-many\n")
    assert redacted(text) == kept


@pytest.mark.parametrize(
    "text",
    [
        "/data/me@work/key=3/part.parquet",
        "hf://datasets/a/b@main/c",
        "https://host/a@b?page=2&keys=all#top",
        "token=5",
    ],
)
def test_what_only_resembles_a_secret_is_kept(text: str) -> None:
    assert redacted(text) == text
