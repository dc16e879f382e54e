"""The benchmark of optimizers on a micro model: what it writes, not what it measures."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from precexp.bench import optimizer
from precexp.bench.__main__ import main

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
