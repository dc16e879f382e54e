"""Kills, damage and full disks: what is recorded is right, and the next command carries on."""

import errno
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from precexp import run as running
from precexp.bench import faults
from precexp.bench.faults import Faults, Kill, outcome_of
from precexp.checkpoint import Checkpoint, find_checkpoint
from precexp.cli import compose, compose_sweep
from precexp.data import load_blocks
from precexp.record import RecordError, read_run
from precexp.report.read import read_plan
from precexp.sweep import PlannedRun, subdirectory, write_plan
from tests.micro import MICRO

EVERY = ("train.max_steps=12", "train.eval_every=4", "train.checkpoint_every=5")


# Kills


def test_runs_killed_at_random_moments_come_to_what_they_would_have() -> None:
    survival = faults.survive("bf16_pure", 10, random.Random(0))
    killed = survival.at_file_operations + survival.in_writes + survival.at_random_times
    assert killed == 10
    assert min(survival.at_file_operations, survival.in_writes) >= 3
    assert survival.identical == survival.runs


def test_a_kill_inside_a_checkpoint_or_a_replaced_record_changes_nothing(tmp_path: Path) -> None:
    harness = Faults(tmp_path, ["precision=fp32"])
    whole, extent = harness.run_whole()

    middle = extent.operations.index("os.rename .step-00000006.partial") + 1

    def next_one(start: str) -> Kill:
        after = extent.operations[middle:]
        place = next(i for i, text in enumerate(after, 1) if text.startswith(start))
        return Kill(kind="file operation", at=middle + place)

    kills = [
        next_one("open .run.json."),  # the temporary file has no content yet
        next_one("os.rename .run.json."),
        next_one("os.mkdir .step-"),
        next_one("open checkpoint.json"),
        next_one("os.rename .step-"),
    ]
    for i, kill in enumerate(kills):
        shutil.rmtree(tmp_path / faults.CACHE, ignore_errors=True)  # its files count
        assert [each for each, _ in harness.run_killed(f"killed-{i}", [kill], whole)] == [kill]
        assert outcome_of(tmp_path / f"killed-{i}") == outcome_of(whole.directory)


def test_a_sweep_survives_what_befalls_its_runs_and_carries_on(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    OmegaConf.register_new_resolver(
        "lr_of_seed", lambda *, _root_: 1e30 if _root_.seed == 3 else 1e-3, replace=True
    )
    sweep = (
        "-m", "name=s", "seed=1,2,3,4,5,6", "train.lr=${lr_of_seed:}", "sweep.isolate=true",
        "train.max_steps=120", "train.eval_every=120", "train.checkpoint_every=10",
    )  # fmt: skip
    places = {
        planned.config.seed: tmp_path / "outputs/s" / subdirectory(planned.config, planned.arm)
        for _, planned in compose_sweep([*MICRO, *sweep[1:]], multirun=True)
    }
    blocked = places[2] / "checkpoints"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("in the way")
    (tmp_path / "outputs/s/.hydra").mkdir()  # so that the folder is taken for precexp's
    with met_by({places[4]: signal.SIGTERM, places[5]: signal.SIGKILL}):
        assert command(*sweep) == 1
    expected = {
        1: "completed", 2: "failed", 3: "diverged", 4: "interrupted", 5: "failed", 6: "completed",
    }  # fmt: skip
    assert statuses_of(tmp_path / "outputs/s") == expected
    said = capsys.readouterr()
    assert "2 of 6 runs completed." in said.out
    assert "its process died with exit code -9" in said.err
    for status in ("failed", "diverged", "interrupted"):
        assert status in said.out
    ended = {seed: (places[seed] / "run.json").read_bytes() for seed in (1, 3, 6)}

    blocked.unlink()
    assert command(*sweep) == 1  # one has diverged, and that is a result
    assert statuses_of(tmp_path / "outputs/s") == {
        seed: "diverged" if seed == 3 else "completed" for seed in expected
    }
    assert ended == {seed: (places[seed] / "run.json").read_bytes() for seed in ended}
    for seed in (4, 5):
        found = read_run(places[seed])
        assert [row.step for row in found.rows] == list(range(1, 121))
        assert any(note.startswith("resumed after step ") for note in found.record.notices)
    assert "5 of 6 runs completed." in capsys.readouterr().out


@contextmanager
def met_by(fates: dict[Path, signal.Signals]) -> Iterator[None]:
    """Sends its signal to the process of each of these runs as soon as it has a checkpoint."""
    done = threading.Event()

    def watch() -> None:
        for directory, fate in fates.items():
            while not list(directory.glob("checkpoints/step-*")):
                if done.wait(0.005):
                    return
            (process,) = multiprocessing.active_children()
            assert process.pid is not None
            os.kill(process.pid, fate)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def statuses_of(sweep: Path) -> dict[int, str]:
    found = [json.loads(path.read_text()) for path in sweep.rglob("run.json")]
    return {record["seed"]: record["status"] for record in sorted(found, key=lambda r: r["seed"])}


# Damage


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a completed run in `whole` and a sweep.json that plans it."""
    base = tmp_path_factory.mktemp("base")
    Faults(base, ["precision=bf16_pure"]).run_whole()
    write_plan(base, "s", [replace(planned_in(base), directory=base / "whole")])
    return base


def planned_in(base: Path) -> PlannedRun:
    return compose(
        [*faults.MICRO, f"data.train_files=[{base / 'text.txt'}]", f"data.cache_dir={base}/cache"]
    )


def damage(path: Path, generator: random.Random) -> None:
    """Flips a bit or cuts the file, somewhere."""
    content = bytearray(path.read_bytes())
    place = generator.randrange(len(content))
    if generator.random() < 0.25:
        path.write_bytes(content[:place])
    else:
        content[place] ^= 1 << generator.randrange(8)
        path.write_bytes(content)


@contextmanager
def damaged(paths: list[Path], generator: random.Random) -> Iterator[None]:
    """One of the files is damaged for as long as the context is open."""
    path = generator.choice(paths)
    before = path.read_bytes()
    damage(path, generator)
    try:
        yield
    finally:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(before)


def test_damage_to_a_record_is_found_or_harmless(base: Path) -> None:
    generator = random.Random(0)
    directory = base / "whole"
    paths = [directory / "run.json", directory / "metrics.jsonl", base / "sweep.json"]
    whole, plan = read_run(directory), read_plan(base / "sweep.json")
    found = 0
    for _ in range(90):
        with damaged(paths, generator):
            try:
                assert (read_run(directory), read_plan(base / "sweep.json")) == (whole, plan)
            except RecordError:
                found += 1
    assert found > 80  # the rest is in white space, or in a seal


def test_damage_to_a_checkpoint_is_found_or_harmless(base: Path) -> None:
    generator = random.Random(1)
    directory = base / "whole"
    rows = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    config_hash = read_run(directory).record.config_hash

    def found() -> tuple[int, dict[str, object], int]:
        checkpoint, problems = find_checkpoint(
            directory / "checkpoints",
            config_hash=config_hash,
            rows_sha256_at=lambda step: sha256("".join(rows[:step]).encode()).hexdigest(),
        )
        assert checkpoint is not None
        return checkpoint.step, content_of(checkpoint), len(problems)

    last, content, _ = found()
    with_problems = 0
    for _ in range(70):
        with damaged(sorted((directory / f"checkpoints/step-{last:08d}").iterdir()), generator):
            step, now, num_problems = found()
            assert (step, num_problems) == (last - 3, 1) or now == content
            with_problems += num_problems
    assert with_problems > 60


def content_of(checkpoint: Checkpoint) -> dict[str, object]:
    tensors = {
        f"{name} {key}": (str(tensor.dtype), tensor.view(torch.uint8).tolist())
        for name in sorted(checkpoint.facts["sha256"])
        for key, tensor in load_file(checkpoint.directory / name).items()
        if tensor.ndim
    }
    return {"tensors": tensors, "facts": checkpoint.facts}


def test_damage_to_the_token_cache_is_found_or_harmless(base: Path) -> None:
    generator = random.Random(2)

    def blocks() -> dict[str, object]:
        planned = planned_in(base).config
        found = load_blocks(planned.data, model_path=None, vocab_size=8192, trust_remote_code=False)
        return {**vars(found), "train": found.train.tolist(), "eval": found.eval.tolist()}

    before = blocks()
    rebuilt = 0
    for _ in range(40):
        files = [p for p in (base / "cache").rglob("*") if p.is_file() and p.suffix != ".lock"]
        with damaged(sorted(files), generator):
            after = blocks()
        rebuilt += after["notices"] != before["notices"]
        assert {**after, "notices": None} == {**before, "notices": None}
    assert rebuilt > 30


def test_a_completed_run_whose_record_is_damaged_is_made_whole_by_the_same_command(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("-m", "name=s", "seed=1", "train.checkpoint_every=2") == 0
    (path,) = (tmp_path / "outputs/s").rglob("run.json")
    before = read_run(path.parent)
    path.write_text(re.sub(r'("final_eval_loss": [0-9.]*)[0-9]', r"\g<1>0", path.read_text()))
    with pytest.raises(RecordError, match=r"run\.json: altered since precexp wrote it"):
        read_run(path.parent)
    assert command("-m", "name=s", "seed=1", "train.checkpoint_every=2") == 0
    after = read_run(path.parent)
    assert after.record.results == before.record.results
    assert after.record.evidence == before.record.evidence
    assert after.record.census == before.record.census
    assert "resumed after step 4" in after.record.notices


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.usefixtures("_no_memory")
@pytest.mark.parametrize("harm", [cut, Path.unlink])
@pytest.mark.parametrize("checkpoints", ["train.checkpoint_every=2", "train.checkpoint_every=null"])
def test_a_completed_run_whose_rows_are_damaged_is_made_whole_by_the_same_command(
    harm: Callable[[Path], None],
    checkpoints: str,
    command: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep = ("-m", "name=s", "seed=1", checkpoints)
    assert command(*sweep) == 0
    (path,) = (tmp_path / "outputs/s").rglob("metrics.jsonl")
    before = read_run(path.parent)
    harm(path)
    assert command(*sweep) == 0
    after = read_run(path.parent)
    assert after.record.results == before.record.results
    assert after.record.evidence == before.record.evidence
    assert after.record.census == before.record.census
    assert [row.loss for row in after.rows] == [row.loss for row in before.rows]
    kept = "metrics.jsonl was altered since the run ended, and is kept as .damaged"
    assert kept in after.record.notices


@pytest.mark.parametrize(("key", "value"), [("warnings", None), ("memory", None), ("config", [1])])
def test_a_record_of_others_beside_a_run_does_not_stop_it(
    key: str,
    value: object,
    command: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "plan", lambda *_, **__: 1 / 0)  # it takes a while
    assert command("-m", "name=s", "seed=1") == 0
    (path,) = (tmp_path / "outputs/s").rglob("run.json")
    values = json.loads(path.read_text())
    del values["own_sha256"]
    path.write_text(json.dumps({**values, key: value}))
    assert command("-m", "name=s", "seed=1,2") == 0
    assert statuses_of(tmp_path / "outputs/s") == {1: "completed", 2: "completed"}


# Full disks, and files in the way


@pytest.fixture
def _no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "planned_memory", lambda *_: None)
    monkeypatch.setattr(running, "measured_memory", lambda *_, **__: None)


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Files cannot grow beyond: to a writer, as a disk that is full (EFBIG for ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("_no_memory")
@pytest.mark.parametrize("room", [100, 3_000, 6_000, 100_000])
def test_a_run_that_finds_no_room_fails_and_goes_on_when_there_is_some(
    room: int, tmp_path: Path, cache_dir: Path
) -> None:
    planned = compose([*MICRO, *EVERY, f"data.cache_dir={cache_dir}"])

    def run(name: str) -> None:
        running.run(planned.config, arm=planned.arm, directory=tmp_path / name)

    run("whole")
    with files_up_to(room), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        run("cramped")
    if (tmp_path / "cramped/run.json").exists():
        assert read_run(tmp_path / "cramped").record.status in ("running", "failed")
    assert not list((tmp_path / "cramped").rglob(".*partial"))
    run("cramped")
    assert outcome_of(tmp_path / "cramped") == outcome_of(tmp_path / "whole")


@pytest.mark.usefixtures("_no_memory")
def test_a_sweep_that_finds_no_room_for_its_plan_goes_on_when_there_is_some(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("name=warm") == 0  # the token cache
    capsys.readouterr()
    with files_up_to(100):
        assert command("-m", "name=s", "seed=1") == 1
    error = capsys.readouterr().err
    assert error == f"precexp: [Errno 27] {os.strerror(errno.EFBIG)}: 'outputs/s/sweep.json'\n"
    assert command("-m", "name=s", "seed=1") == 0
    assert statuses_of(tmp_path / "outputs/s") == {1: "completed"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """`outputs` on a file system of 1 MB."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.usefixtures("_no_memory")
def test_a_full_disk_fails_the_run_and_more_room_completes_it(
    small_disk: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("name=x", "train.checkpoint_every=2") == 1
    error = capsys.readouterr().err
    assert "checkpoint not written" in error
    assert "Traceback" not in error
    found = read_run(small_disk / "x")
    assert (found.record.status, [row.step for row in found.rows]) == ("failed", [1, 2, 3, 4])
    assert [path.name for path in (small_disk / "x/checkpoints").iterdir()] == ["step-00000002"]
    remount(small_disk, "size=50m")
    assert command("name=x", "train.checkpoint_every=2") == 0
    assert [row.step for row in read_run(small_disk / "x").rows] == [1, 2, 3, 4]


def test_a_disk_that_cannot_be_written_is_refused(
    small_disk: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    remount(small_disk, "ro")
    assert command("name=x") == 2
    error = capsys.readouterr().err
    assert error == "precexp: outputs/x: cannot be written (Read-only file system)\n"


def remount(folder: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("outputs", "precexp: outputs/x: cannot be written (Not a directory)"),
        ("outputs/x", "precexp: outputs/x: cannot be written (Not a directory)"),
        ("cache", "precexp: data.cache_dir: can't use cache/tokens: "),
    ],
)
def test_a_file_where_a_folder_should_be_is_refused(
    place: str,
    words: str,
    command: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("in the way")
    assert command("name=x", "data.cache_dir=cache") == 2
    error = capsys.readouterr().err
    assert error.startswith(words)
    assert error.count("\n") == 1
    assert (tmp_path / place).read_text() == "in the way"


@pytest.mark.usefixtures("_no_memory")
def test_a_file_in_the_way_of_checkpoints_fails_the_run_until_it_is_gone(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outputs/x/.hydra").mkdir(parents=True)
    (tmp_path / "outputs/x/checkpoints").write_text("in the way")
    assert command("name=x", "train.checkpoint_every=2") == 1
    assert "Traceback" not in capsys.readouterr().err
    assert read_run(tmp_path / "outputs/x").record.status == "failed"
    (tmp_path / "outputs/x/checkpoints").unlink()
    assert command("name=x", "train.checkpoint_every=2") == 0
