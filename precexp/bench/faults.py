"""Runs that are killed over and over, and what they come to beside one that never was.

A run is a process forked from a warm one. It dies of SIGKILL as it is about to open, rename or
remove a file, of the kernel in the middle of a write (the first byte beyond a limit on the size of
files), or of SIGKILL at a random time. It is started again until it has been killed often enough,
and then left to complete.
"""

import csv
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from precexp.cli import compose
from precexp.record import RecordedRun, read_run
from precexp.sweep import PlannedRun, launch

PRECISIONS = ("fp32", "bf16_mixed", "fp16_amp", "bf16_pure", "bf16_plain")
MICRO = (
    "model.hidden_size=16", "model.ffn_dim=32", "model.word_embed_proj_dim=16",
    "model.num_hidden_layers=1", "model.num_attention_heads=2", "data=text", "data.block_size=32",
    "data.eval_fraction=0.2", "train.max_steps=12", "train.batch_size=2", "train.eval_batch_size=2",
    "train.eval_every=4", "train.eval_batches=1", "train.warmup_steps=1", "train.lr=1e-2",
    "train.checkpoint_every=3", "device=cpu", "wandb.mode=disabled",
)  # fmt: skip
KILLS_PER_RUN = 10
SMALLEST_LIMIT = 64  # bytes
CACHE = "cache"
WARM = ["precexp.bench.faults", "precexp.run"]

Kind = Literal["file operation", "write", "time"]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When a run dies: at which file operation, beyond which byte of a file, after how long."""

    kind: Kind
    at: float


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What a run that nobody kills comes to: the scale of the moments to kill others at."""

    operations: Sequence[str]  # on files, as "os.rename .step-00000003.partial"
    largest_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Survival:
    """A precision's killed runs, beside its run that was not."""

    precision: str
    runs: int
    at_file_operations: int  # kills, as the next two
    in_writes: int
    at_random_times: int
    before_the_first_row: int  # kills that found nothing recorded yet, or left nothing
    identical: int  # runs


class Faults:
    """Runs and kills runs of one config in processes forked from a warm one.

    `base` holds all that they read and write: the text, the cache and the runs.
    """

    def __init__(self, base: Path, overrides: Sequence[str]) -> None:
        self.base = base
        text = base / "text.txt"
        text.write_text("".join(f"Line {i}: {i * i} is its square.\n" for i in range(300)))
        self._overrides = [*MICRO, f"data.train_files=[{text}]", *overrides]
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(WARM)
        first = self._context.Process(target=int)  # which waits for the imports
        first.start()
        first.join()

    def run_whole(self) -> tuple[RecordedRun, Extent]:
        """A run that nobody kills, and what another like it takes, whose memory is planned."""
        exit_code, _ = self._attempt("whole", None)
        assert exit_code == 0, f"the run ended with exit code {exit_code}"
        shutil.rmtree(self.base / CACHE)
        began = time.monotonic()
        exit_code, operations = self._attempt("again", None)
        seconds = time.monotonic() - began
        assert exit_code == 0, f"the run ended with exit code {exit_code}"
        shutil.rmtree(self.base / CACHE)
        files = (path for path in (self.base / "again").rglob("*") if path.is_file())
        largest = max(path.stat().st_size for path in files)
        whole, again = read_run(self.base / "whole"), read_run(self.base / "again")
        assert _timeless(whole) == _timeless(again)
        return whole, Extent(operations=operations, largest_bytes=largest, seconds=seconds)

    def run_killed(
        self, name: str, kills: Sequence[Kill], whole: RecordedRun
    ) -> Iterator[tuple[Kill, int]]:
        """Starts a run until each of the kills has killed it, then lets it complete.

        Yields each kill and the number of rows it left. A kill that comes too late to find the run
        alive is the last. Asserts after each that what is on disk is right as far as it goes.
        """
        directory = self.base / name
        for kill in kills:
            exit_code, _ = self._attempt(name, kill)
            if exit_code == 0:
                return
            assert exit_code in (-signal.SIGKILL, -signal.SIGXFSZ), exit_code
            yield kill, _check_unfinished(directory, whole)
        exit_code, _ = self._attempt(name, None)
        assert exit_code == 0, f"{directory}: the resumed run ended with exit code {exit_code}"

    def _attempt(self, name: str, kill: Kill | None) -> tuple[int, Sequence[str]]:
        """One process of a run: its exit code, minus a signal's number, and file operations."""
        planned = compose([*self._overrides, f"data.cache_dir={self.base / CACHE}"])
        planned = replace(planned, directory=self.base / name)
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_run, args=(planned, self.base, kill, sender))
        process.start()
        sender.close()
        if kill and kill.kind == "time":
            process.join(timeout=kill.at)
            process.kill()
        try:
            operations = receiver.recv()
        except EOFError:  # it was killed
            operations = []
        process.join()
        assert process.exitcode is not None
        return process.exitcode, operations


def random_kills(generator: random.Random, extent: Extent, number: int) -> list[Kill]:
    """Of the three kinds by turns, at moments drawn from those of a run."""

    def draw(kind: Kind) -> Kill:
        if kind == "file operation":
            return Kill(kind=kind, at=generator.randint(1, len(extent.operations)))
        if kind == "write":  # small files are as likely to be hit as large ones
            span = extent.largest_bytes / SMALLEST_LIMIT
            return Kill(kind=kind, at=int(SMALLEST_LIMIT * span ** generator.random()))
        return Kill(kind=kind, at=generator.uniform(0, extent.seconds))

    kinds: tuple[Kind, ...] = ("file operation", "write", "time")
    return [draw(kinds[i % len(kinds)]) for i in range(number)]


def outcome_of(directory: Path) -> Mapping[str, object]:
    """All that a run comes to but for its times: rows, results, evidence, census, tensors."""
    found = read_run(directory)
    last = max((directory / "checkpoints").glob("step-*"))
    facts = json.loads((last / "checkpoint.json").read_text(encoding="utf-8"))
    for key in ("rows_sha256", "own_sha256"):  # the rows hold times
        del facts[key]
    return {
        "rows": _timeless(found),
        "results": found.record.results,
        "evidence": found.record.evidence,
        "census": found.record.census,
        "status": found.record.status,
        "checkpoint": facts,  # with the sha256 of parameters, states and RNG states
    }


def bench(*, num_kills: int, seed: int, output: Path | None) -> list[Survival]:
    """Kills runs of every precision `num_kills` times in all; prints and, given `output`, CSV."""
    generator = random.Random(seed)
    quotas = [len(range(i, num_kills, len(PRECISIONS))) for i in range(len(PRECISIONS))]
    found = [
        survive(precision, quota, generator)
        for precision, quota in zip(PRECISIONS, quotas, strict=True)
    ]
    Console().print(_table(found))
    if output is not None:
        with output.open("w", encoding="utf-8", newline="") as file:
            names = [field.name for field in fields(Survival)]
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(each) for each in found)
    return found


def survive(precision: str, num_kills: int, generator: random.Random) -> Survival:
    """Kills runs of the precision so many times."""
    with tempfile.TemporaryDirectory() as base:
        faults = Faults(Path(base), [f"precision={precision}"])
        whole, extent = faults.run_whole()
        expected = outcome_of(whole.directory)
        kinds: Counter[Kind] = Counter()
        early = runs = identical = 0
        while kinds.total() < num_kills:
            shutil.rmtree(faults.base / CACHE, ignore_errors=True)  # to be built, and died in
            wanted = min(KILLS_PER_RUN, num_kills - kinds.total())
            runs += 1
            name = f"killed-{runs}"
            for kill, num_rows in faults.run_killed(
                name, random_kills(generator, extent, wanted), whole
            ):
                kinds[kill.kind] += 1
                early += num_rows == 0
            identical += outcome_of(faults.base / name) == expected
    return Survival(
        precision=precision,
        runs=runs,
        at_file_operations=kinds["file operation"],
        in_writes=kinds["write"],
        at_random_times=kinds["time"],
        before_the_first_row=early,
        identical=identical,
    )


def _run(planned: PlannedRun, base: Path, kill: Kill | None, sender: Connection) -> None:
    """The process of a run, with its death arranged; sends its file operations if it lives."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    operations: list[str] = []

    def on_event(event: str, args: tuple[object, ...]) -> None:
        if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            return
        if isinstance(args[0], str | Path) and str(args[0]).startswith(str(base)):
            operations.append(f"{event} {Path(args[0]).name}")
            if kill and kill.kind == "file operation" and len(operations) == kill.at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)
    if kill and kill.kind == "write":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(kill.at), resource.RLIM_INFINITY))
    exit_code = launch(planned)
    sender.send(operations)
    sys.exit(exit_code)


def _check_unfinished(directory: Path, whole: RecordedRun) -> int:
    """Asserts that what a killed run left can be read and is the beginning of the whole run's."""
    if not (directory / "run.json").exists():
        assert not (directory / "metrics.jsonl").exists()
        return 0
    found = read_run(directory)
    # Planning and measuring come after the end, so that a run can die having completed.
    assert found.record.status in ("running", "completed"), found.record.status
    assert _timeless(found) == _timeless(whole)[: len(found.rows)]
    return len(found.rows)


def _timeless(run: RecordedRun) -> list[dict[str, object]]:
    return [{**asdict(row), "step_seconds": None} for row in run.rows]


def _table(found: Sequence[Survival]) -> Table:
    table = Table(title="runs killed at random, beside one that was not")
    table.add_column("precision")
    kills = ("killed at file operations", "in a write", "at random times")
    for column in (*kills, "of these before a row", "runs", "bitwise identical"):
        table.add_column(column, justify="right")
    for each in found:
        _, runs, *numbers, identical = asdict(each).values()
        table.add_row(each.precision, *map(str, (*numbers, runs, identical)))
    return table
