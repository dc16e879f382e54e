"""How long one waits for the first step: from the start of the process to its first row on disk.

Each round starts the command line anew, in a folder of its own, and ends it as soon as the row is
there. The round before the first is not counted: it makes the token cache, and reads the libraries
from the disk.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

import precexp
from precexp import environment
from precexp.config import RunConfig
from precexp.record import write_json

ROUNDS = 5
# No evaluation before the first row; the process is ended before there is any.
OVERRIDES = (
    "train.max_steps=1000", "train.eval_every=1000", "train.log_every=1", "wandb.mode=offline",
)  # fmt: skip
POLL_SECONDS = 0.005


@dataclass(frozen=True, kw_only=True)
class StartupResult:
    """Seconds of each round."""

    seconds: list[float]
    median: float
    least: float
    most: float
    overrides: list[str]
    environment: dict[str, object]


def bench(
    config: RunConfig, overrides: Sequence[str], *, rounds: int, output: Path | None
) -> StartupResult:
    """Measures the run that the overrides describe, prints and, given `output`, writes JSON.

    Raises RuntimeError where it ends before its first row.
    """
    _seconds_to_first_row(overrides)
    seconds = [
        _seconds_to_first_row(overrides)
        for _ in track(range(rounds), description="starting", transient=True)
    ]
    result = StartupResult(
        seconds=seconds,
        median=statistics.median(seconds),
        least=min(seconds),
        most=max(seconds),
        overrides=list(overrides),
        environment=environment.describe(
            environment.pick_device(config.device), attention=config.model.attention
        ),
    )
    Console().print(
        f"start to first row on disk: median {result.median:.2f} s of {rounds} "
        f"({result.least:.2f} to {result.most:.2f})"
    )
    if output is not None:
        write_json(output, asdict(result))
    return result


def _seconds_to_first_row(overrides: Sequence[str]) -> float:
    checkout = str(Path(precexp.__file__).parents[1])
    path = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as told:
        rows = Path(folder) / "outputs" / "startup" / "metrics.jsonl"
        command = [sys.executable, "-m", "precexp", "name=startup", *overrides]
        began = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdout=told, stderr=told
        )
        try:
            while not (rows.exists() and rows.stat().st_size):
                if process.poll() is not None:
                    told.seek(0)
                    last = told.read().strip().splitlines()[-1:]
                    raise RuntimeError(f"no row: {''.join(last) or process.returncode}")
                time.sleep(POLL_SECONDS)
            return time.perf_counter() - began
        finally:
            process.terminate()
            process.wait()
