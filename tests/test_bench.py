"""Benchmarks on micro models, and stand-ins: what they write, not what they measure."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from precexp.bench import optimizer, startup
from precexp.bench.__main__ import main
from precexp.cli import compose
from tests.micro import MICRO as MICRO_RUN

MICRO = (
    "model.hidden_size=16", "model.word_embed_proj_dim=16", "model.ffn_dim=32",
    "model.num_attention_heads=2", "model.num_hidden_layers=1", "model.vocab_size=64",
)  # fmt: skip


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "precexp.bench", "optimizer", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_every_candidate_has_a_row_and_those_of_gpus_no_number(tmp_path: Path) -> None:
    table = tmp_path / "optimizer.csv"
    done = bench("--shapes", "opt-tiny", "--rounds", "1", "--output", str(table), *MICRO)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in csv.DictReader(table.open())}
    assert set(rows) == {optimizer.FLOOR, *(each.name for each in optimizer._candidates())}
    for name, row in rows.items():
        assert (row["step_seconds_median"] == "") == ("triton" in name or "24-bit" in name), name
    assert float(rows["default bf16 native"]["state_bytes_per_param"]) == 6
    assert float(rows[optimizer.FUSED]["state_bytes_per_param"]) == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
def test_a_gpu_that_is_not_there_is_an_error_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["optimizer", "--device", "cuda"]) == 2
    error = capsys.readouterr().err
    assert error == "precexp: --device cuda: torch sees no CUDA GPU here\n"


OPTIMS = ("anyprecision", "adamw")
# What the environment of `make gpu-check` need not have: importing one of them fails.
NOT_NEEDED = ("wandb", "wandb_workspaces", "datasets", "triton", "accelerate", "hatchling")


def test_the_gpu_check_runs_on_a_cpu_without_what_it_need_not_have(
    cache_dir: Path, tmp_path: Path
) -> None:
    """All of it at micro size, from the checkout: so it works the day there is a GPU."""
    block = f"import sys\nsys.modules.update(dict.fromkeys({NOT_NEEDED}))\n"
    (tmp_path / "sitecustomize.py").write_text(block)  # Python reads it at each start
    output = tmp_path / "results"
    micro = [text for text in MICRO_RUN if "max_steps" not in text]
    done = subprocess.run(
        [sys.executable, "-m", "precexp.bench", "gpu-check", "--device=cpu", "--rounds=1",
         "--shapes=opt-tiny", f"--output={output}", *micro, "model.vocab_size=2048",
         "train.max_steps=2", f"data.cache_dir={cache_dir}"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = list(csv.DictReader((output / "runs.csv").open()))
    arms = [f"{p}-{o}" for p in ("bf16_pure", "bf16_mixed", "fp16_amp") for o in OPTIMS]
    assert [run["arm"] for run in runs] == arms
    assert len({run["init_hash"] for run in runs}) == len({run["data_hash"] for run in runs}) == 1
    for run in runs:
        assert run["status"] == "completed"
        assert float(run["tokens_per_second"]) > 0
        assert run["measured_peak_bytes"]
        assert run["reserved_bytes"] == run["model_flop_utilisation"] == ""  # of GPUs alone
    losses = list(csv.DictReader((output / "losses.csv").open()))
    assert [row["step"] for row in losses] == ["1", "2"]
    assert all(6 < float(row[arm]) < 9 for row in losses for arm in arms)
    memory = json.loads((output / "memory.json").read_text())
    assert all(abs(run["residual"]) < 0.01 for run in memory["runs"])
    steps = {row["name"]: row for row in csv.DictReader((output / "optimizer.csv").open())}
    assert steps["default bf16 triton"]["step_seconds_median"] == ""
    assert float(steps["published bf16"]["step_seconds_median"]) > 0
    summary = (output / "summary.md").read_text()
    assert all(f"| {arm} | completed |" in summary for arm in arms)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
def test_without_a_gpu_the_gpu_check_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["gpu-check"]) == 2
    assert capsys.readouterr().err == "precexp: --device cuda: torch sees no CUDA GPU here\n"


def stand_in(folder: Path, script: str) -> str:
    """An executable in Python's place."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_start_is_timed_to_its_first_row_and_then_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"echo $$ >> {tmp_path}/pids; mkdir -p outputs/startup; sleep 0.2"
    script += "; echo '{}' > outputs/startup/metrics.jsonl; exec sleep 60"
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, script))
    output = tmp_path / "startup.json"
    config = compose(startup.OVERRIDES).config
    result = startup.bench(config, startup.OVERRIDES, rounds=2, output=output)
    assert len(result.seconds) == 2
    assert all(0.2 <= seconds < 30 for seconds in result.seconds)
    assert result.least <= result.median <= result.most
    assert json.loads(output.read_text())["seconds"] == result.seconds
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 3  # with the one that warms up
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_start_that_fails_is_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, "echo no disk >&2; exit 1"))
    with pytest.raises(RuntimeError, match="no row: no disk"):
        startup.bench(compose([]).config, [], rounds=1, output=None)


def test_a_start_that_is_a_users_mistake_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["startup", "precision=fp31"]) == 2
    assert capsys.readouterr().err.startswith("precexp: precision: 'fp31' is not")
