"""A run that stops anywhere and goes on is bitwise the run that never stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from precexp import run as running
from precexp import sweep as sweeping
from precexp.bench.faults import outcome_of
from precexp.cli import compose
from precexp.config import UserError
from precexp.export import export_initial
from precexp.interrupts import Interrupts
from precexp.record import Row, read_run
from precexp.train import has_diverged, train
from tests.micro import MICRO

# The memory of a micro run is of no interest here, and planning it takes longer than training it.
EVERY = ("train.max_steps=12", "train.eval_every=4", "train.checkpoint_every=5", "train.lr=1e-2")
RECIPES = ("fp32", "bf16_mixed", "fp16_amp", "bf16_pure", "bf16_plain")
QUICK = (
    ("fp16_amp", "anyprecision"),
    ("bf16_pure", "anyprecision"),
    ("bf16_pure", "anyprecision_packed"),
    ("bf16_mixed", "adamw"),
)
OPTIMIZERS = ("anyprecision", "anyprecision_packed", "anyprecision_published", "adamw")


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "planned_memory", lambda *_: None)
    monkeypatch.setattr(running, "measured_memory", lambda *_, **__: None)


class Killed(BaseException):
    """What no code of ours catches, as a kill."""


def run(directory: Path, cache_dir: Path, *overrides: str) -> None:
    planned = compose([*MICRO, f"data.cache_dir={cache_dir}", *EVERY, *overrides])
    running.run(planned.config, arm=planned.arm, directory=directory)


def run_until(step: int, error: BaseException, directory: Path, *arguments: object) -> None:
    """As `run`, but the error is raised after the step's row is written."""

    def stopping(*args: object, **kwargs: object) -> Iterator[object]:
        for event in train(*args, **kwargs):  # type: ignore[arg-type]
            yield event
            if isinstance(event, Row) and event.step == step:
                raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "train", stopping)
        with pytest.raises(type(error)):
            run(directory, *arguments)  # type: ignore[arg-type]


def check_resume(tmp_path: Path, cache_dir: Path, *overrides: str, kill_at: int = 8) -> list[str]:
    """Kills a run after a step and lets it go on; returns the notices of the resumed run."""
    run(tmp_path / "whole", cache_dir, *overrides)
    run_until(kill_at, Killed(), tmp_path / "killed", cache_dir, *overrides)
    run(tmp_path / "killed", cache_dir, *overrides)
    assert outcome_of(tmp_path / "killed") == outcome_of(tmp_path / "whole")
    return read_run(tmp_path / "killed").record.notices


@pytest.mark.parametrize(
    ("precision", "optim"),
    [
        pytest.param(
            precision,
            optim,
            marks=() if (precision, optim) in QUICK else pytest.mark.slow,
        )
        for precision in RECIPES
        for optim in OPTIMIZERS
    ],
)
def test_every_recipe_and_optimizer_goes_on_bitwise(
    precision: str, optim: str, tmp_path: Path, cache_dir: Path
) -> None:
    notices = check_resume(tmp_path, cache_dir, f"precision={precision}", f"optim={optim}")
    assert "resumed after step 5; steps 6 to 8 are done again" in notices


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=bf16_pure", "train.grad_accumulation=3", "model.dropout=0.2"),
        ("precision=bf16_pure", "optim.momentum_dtype=float32", "optim.variance_dtype=float32"),
        ("precision=bf16_plain", "optim.weight_rounding=stochastic"),
        # The loss scale falls, and grows again, before and after the checkpoint.
        ("precision=fp16_amp", "precision.initial_scale=1e6", "precision.scale_growth_interval=2"),
    ],
)
def test_accumulation_dropout_mixed_states_and_loss_scales_go_on(
    overrides: tuple[str, ...], tmp_path: Path, cache_dir: Path
) -> None:
    check_resume(tmp_path, cache_dir, *overrides)


def test_the_second_epoch_goes_on_in_its_middle(tmp_path: Path, cache_dir: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"A line of text, number {i}.\n" for i in range(60)))
    check_resume(
        tmp_path, cache_dir, "data=text", f"data.train_files=[{text}]", "data.block_size=32",
        "data.eval_fraction=0.3", "train.max_steps=30", "train.checkpoint_every=7", kill_at=25,
    )  # fmt: skip
    facts = outcome_of(tmp_path / "whole")["checkpoint"]
    assert isinstance(facts, dict)
    assert facts["position"] == 60  # of some twenty blocks


def test_step_counts_that_bf16_cannot_hold_go_on(tmp_path: Path, cache_dir: Path) -> None:
    check_resume(
        tmp_path, cache_dir, "precision=bf16_pure", "train.max_steps=306", "train.eval_every=306",
        "train.checkpoint_every=301", kill_at=303,
    )  # fmt: skip


def test_a_run_killed_before_its_first_checkpoint_begins_anew(
    tmp_path: Path, cache_dir: Path
) -> None:
    notices = check_resume(tmp_path, cache_dir, kill_at=3)
    assert "resumed after step 0; steps 1 to 3 are done again" in notices


def test_a_run_killed_after_its_last_step_completes(tmp_path: Path, cache_dir: Path) -> None:
    notices = check_resume(tmp_path, cache_dir, kill_at=12)
    assert any(note.startswith("resumed after step 1") for note in notices)


@pytest.mark.parametrize("part", ["train_files", "eval_files"])
def test_a_run_does_not_go_on_with_another_text(part: str, tmp_path: Path, cache_dir: Path) -> None:
    for name in ("train_files", "eval_files"):
        write_lines(tmp_path / f"{name}.txt", "A line of text")
    files = [f"data.{name}=[{tmp_path / name}.txt]" for name in ("train_files", "eval_files")]
    more = ("data=text", *files, "train.checkpoint_every=3")
    run(tmp_path / "whole", cache_dir, *more)
    run_until(8, Killed(), tmp_path / "killed", cache_dir, *more)
    write_lines(tmp_path / f"{part}.txt", "Quite another text")
    running.read_blocks.cache_clear()  # as in a process of its own
    with pytest.raises(UserError, match="data: the text or its tokenizer has changed since"):
        run(tmp_path / "killed", cache_dir, *more)
    write_lines(tmp_path / f"{part}.txt", "A line of text")
    running.read_blocks.cache_clear()
    run(tmp_path / "killed", cache_dir, *more)
    assert outcome_of(tmp_path / "killed") == outcome_of(tmp_path / "whole")


def test_a_run_keeps_the_init_hash_of_the_weights_it_began_with(
    tmp_path: Path, cache_dir: Path
) -> None:
    tiny = [text for text in MICRO if text.startswith("model.")]
    for seed in (1, 2):
        export_initial([*tiny, f"seed={seed}"], tmp_path / f"seed-{seed}")
    weights, others = (tmp_path / f"seed-{seed}/model.safetensors" for seed in (1, 2))
    more = ("model=hf", f"model.path={tmp_path / 'seed-1'}", "model.pretrained=true")
    hf = [text for text in MICRO if not text.startswith("model.")]

    def train_it(name: str) -> None:
        planned = compose([*hf, f"data.cache_dir={cache_dir}", *EVERY, *more])
        running.run(planned.config, arm=planned.arm, directory=tmp_path / name)

    train_it("whole")
    save = running.save_checkpoint

    def killed_after(*args: object, **kwargs: object) -> None:
        save(*args, **kwargs)  # type: ignore[arg-type]
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "save_checkpoint", killed_after)
        with pytest.raises(Killed):
            train_it("killed")
    weights.write_bytes(others.read_bytes())
    train_it("killed")
    assert outcome_of(tmp_path / "killed") == outcome_of(tmp_path / "whole")
    notices = read_run(tmp_path / "killed").record.notices
    assert any(note.startswith("the initial weights of model.path are not") for note in notices)


def write_lines(path: Path, text: str) -> None:
    path.write_text("".join(f"{text}, number {i}.\n" for i in range(200)))


# Checkpoints that cannot be trusted


def damage_flip(folder: Path) -> None:
    path = folder / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def damage_cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def damage_facts(folder: Path) -> None:
    (folder / "checkpoint.json").write_text('{"schema": 1, "step":')


def damage_missing(folder: Path) -> None:
    (folder / "rng.safetensors").unlink()


def damage_position(folder: Path) -> None:
    path = folder / "checkpoint.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "position": facts["position"] + 1}))


@pytest.mark.parametrize(
    "damage",
    [
        damage_flip,
        damage_position,
        *(
            pytest.param(d, marks=pytest.mark.slow)
            for d in (damage_cut, damage_facts, damage_missing)
        ),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    damage: Callable[[Path], None], tmp_path: Path, cache_dir: Path
) -> None:
    more = ("train.checkpoint_every=3",)
    run(tmp_path / "whole", cache_dir, *more)
    run_until(8, Killed(), tmp_path / "killed", cache_dir, *more)
    damage(tmp_path / "killed/checkpoints/step-00000006")
    run(tmp_path / "killed", cache_dir, *more)
    assert outcome_of(tmp_path / "killed") == outcome_of(tmp_path / "whole")
    notices = read_run(tmp_path / "killed").record.notices
    assert any(note.startswith("checkpoint step-00000006 is damaged") for note in notices)
    assert "resumed after step 3; steps 4 to 8 are done again" in notices


def test_rows_that_cannot_be_read_take_the_run_back_to_before_them(
    tmp_path: Path, cache_dir: Path
) -> None:
    run(tmp_path / "whole", cache_dir)
    run_until(8, Killed(), tmp_path / "killed", cache_dir)
    path = tmp_path / "killed/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], "garbage\n", *lines[4:]]))
    run(tmp_path / "killed", cache_dir)
    assert outcome_of(tmp_path / "killed") == outcome_of(tmp_path / "whole")


def test_a_row_that_was_altered_takes_the_run_back_to_before_it(
    tmp_path: Path, cache_dir: Path
) -> None:
    run(tmp_path / "whole", cache_dir)
    run_until(8, Killed(), tmp_path / "killed", cache_dir)
    path = tmp_path / "killed/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["loss"] = 1.25
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(tmp_path / "killed", cache_dir)
    assert outcome_of(tmp_path / "killed") == outcome_of(tmp_path / "whole")
    notices = read_run(tmp_path / "killed").record.notices
    assert "checkpoint step-00000005 is not of the recorded rows and not used" in notices


def test_checkpoints_of_no_use_do_not_crowd_out_new_ones(tmp_path: Path, cache_dir: Path) -> None:
    more = ("train.checkpoint_every=3", "train.keep_last=1")
    run_until(8, Killed(), tmp_path / "killed", cache_dir, *more)
    damage_flip(tmp_path / "killed/checkpoints/step-00000006")
    (tmp_path / "killed/checkpoints/.step-00000009.partial").mkdir()
    run_until(4, Killed(), tmp_path / "killed", cache_dir, *more)
    found = sorted(path.name for path in (tmp_path / "killed/checkpoints").iterdir())
    assert found == ["step-00000003"]


def test_another_config_does_not_overwrite_a_run_whose_record_is_lost(
    tmp_path: Path, cache_dir: Path
) -> None:
    run_until(8, Killed(), tmp_path / "run", cache_dir)
    (tmp_path / "run/run.json").unlink()
    rows = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="a checkpoint of another config"):
        run(tmp_path / "run", cache_dir, "train.lr=5e-4")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == rows


def test_a_record_of_a_later_precexp_is_left_alone(tmp_path: Path, cache_dir: Path) -> None:
    run_until(8, Killed(), tmp_path / "run", cache_dir)
    path = tmp_path / "run/run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))
    before = path.read_bytes()
    with pytest.raises(UserError, match="schema 2"):
        run(tmp_path / "run", cache_dir)
    assert path.read_bytes() == before


def test_a_record_that_cannot_be_read_is_set_aside(tmp_path: Path, cache_dir: Path) -> None:
    run(tmp_path / "whole", cache_dir)
    run_until(8, Killed(), tmp_path / "killed", cache_dir)
    (tmp_path / "killed/run.json").write_text('{"schema": 1, "run_')
    run(tmp_path / "killed", cache_dir)
    found, whole = read_run(tmp_path / "killed"), read_run(tmp_path / "whole")
    assert found.record.results == whole.record.results
    assert (tmp_path / "killed/run.json.damaged").read_text() == '{"schema": 1, "run_'
    assert (tmp_path / "killed/metrics.jsonl.damaged").exists()
    assert any("run.json could not be read" in note for note in found.record.notices)


def test_a_disk_that_is_full_fails_the_run_and_keeps_the_checkpoint_before(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precexp import checkpoint

    write = checkpoint.save_file

    def full(tensors: dict, path: Path) -> None:
        if "step-00000010" in str(path):
            raise OSError(28, "No space left on device")
        write(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(OSError, match="checkpoint not written"):
            run(tmp_path / "run", cache_dir)
    record = read_run(tmp_path / "run").record
    assert record.status == "failed"
    assert "No space left" in str(record.error)
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000005"]
    run(tmp_path / "run", cache_dir)
    run(tmp_path / "whole", cache_dir)
    assert outcome_of(tmp_path / "run") == outcome_of(tmp_path / "whole")


# Signals


def test_an_interrupt_makes_a_checkpoint_of_the_step_it_came_in(
    tmp_path: Path, cache_dir: Path
) -> None:
    def interrupting(*args: object, **kwargs: object) -> Iterator[object]:
        for event in train(*args, **kwargs):  # type: ignore[arg-type]
            if isinstance(event, Row) and event.step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            yield event

    never = ("train.checkpoint_every=null",)
    run(tmp_path / "whole", cache_dir, *never)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "train", interrupting)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", cache_dir, *never)
    record = read_run(tmp_path / "run").record
    assert (record.status, record.error) == (
        "interrupted", "KeyboardInterrupt: by SIGTERM after step 7",
    )  # fmt: skip
    run(tmp_path / "run", cache_dir, *never)
    found, whole = read_run(tmp_path / "run"), read_run(tmp_path / "whole")
    assert "resumed after step 7" in found.record.notices
    assert found.record.results == whole.record.results
    assert found.record.evidence == whole.record.evidence


@pytest.mark.parametrize("lr", [1e-3, 1e30])
def test_an_interrupt_that_finds_a_run_at_its_end_ends_the_sweep(
    lr: float, command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = running.save_checkpoint

    def interrupted(*args: object, **kwargs: object) -> object:
        if kwargs["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return save(*args, **kwargs)  # type: ignore[arg-type]

    def diverging(*args: object, **kwargs: object) -> Iterator[object]:
        for event in train(*args, **kwargs):  # type: ignore[arg-type]
            if isinstance(event, Row) and has_diverged(event):
                os.kill(os.getpid(), signal.SIGTERM)
            yield event

    sweep = ("-m", "name=s", "seed=1,2", f"train.lr={lr}", "train.checkpoint_every=4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "save_checkpoint", interrupted)
        patch.setattr(running, "train", diverging)
        assert command(*sweep) == 1
    assert "precexp: interrupted" in capsys.readouterr().err
    assert statuses(tmp_path / "outputs/s") == ["completed" if lr < 1 else "diverged"]
    assert command(*sweep) == (0 if lr < 1 else 1)
    assert statuses(tmp_path / "outputs/s") == ["completed" if lr < 1 else "diverged"] * 2


def test_a_second_signal_of_a_kind_ends_the_process() -> None:
    script = (
        "import os, signal\n"
        "from precexp.interrupts import Interrupts\n"
        "with Interrupts() as interrupts:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(interrupts.asked, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "SIGTERM\n")


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_the_same_command_carries_on_after_a_kill(tmp_path: Path, cache_dir: Path) -> None:
    directory = tmp_path / "outputs/x"
    steps = ("train.max_steps=400", "train.eval_every=400", "train.checkpoint_every=20")
    command = [
        sys.executable, "-m", "precexp", *MICRO, f"data.cache_dir={cache_dir}", *steps, "name=x",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while len(list(directory.glob("checkpoints/step-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert read_run(directory).record.status == "running"
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = read_run(directory)
    assert after.record.status == "completed"
    assert [row.step for row in after.rows] == list(range(1, 401))
    assert any(note.startswith("resumed after step ") for note in after.record.notices)


# Endless overflow


def test_gradients_that_overflow_at_any_scale_end_the_run_as_diverged(
    tmp_path: Path, cache_dir: Path
) -> None:
    run(
        tmp_path / "run", cache_dir, "precision=fp16_amp", "precision.initial_scale=1e38",
        "train.max_steps=100", "train.checkpoint_every=null",
    )  # fmt: skip
    record = read_run(tmp_path / "run").record
    assert record.status == "diverged"
    assert str(record.error).startswith("50 steps in a row were skipped up to step 50")
    assert record.results["applied_steps"] == 0


def test_a_run_killed_once_it_gave_up_takes_no_further_step(
    tmp_path: Path, cache_dir: Path
) -> None:
    overflowing = (
        "precision=fp16_amp", "precision.initial_scale=1e38", "train.max_steps=100",
        "train.eval_every=100", "train.checkpoint_every=10",
    )  # fmt: skip
    run(tmp_path / "whole", cache_dir, *overflowing)
    save = running.save_checkpoint

    def killed_after(*args: object, **kwargs: object) -> None:
        save(*args, **kwargs)  # type: ignore[arg-type]
        if kwargs["step"] == 50:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "save_checkpoint", killed_after)
        with pytest.raises(Killed):
            run(tmp_path / "killed", cache_dir, *overflowing)
    run(tmp_path / "killed", cache_dir, *overflowing)
    assert outcome_of(tmp_path / "killed") == outcome_of(tmp_path / "whole")


# Sweeps


def fail_on(monkeypatch: pytest.MonkeyPatch, *seeds: int) -> list[int]:
    """Makes the runs of these seeds fail before their training; returns the seeds that began."""
    build, begun = running.build_model, []

    def failing(model: object, *, seed: int) -> object:
        begun.append(seed)
        if seed in seeds:
            raise RuntimeError("no luck")
        return build(model, seed=seed)  # type: ignore[arg-type]

    monkeypatch.setattr(running, "build_model", failing)
    return begun


def statuses(directory: Path) -> list[str]:
    return [read_run(path.parent).record.status for path in sorted(directory.rglob("run.json"))]


def test_the_same_command_carries_a_sweep_on(
    command: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        fail_on(patch, 2)
        assert command("-m", "name=s", "seed=1,2,3") == 1
    assert statuses(tmp_path / "outputs/s") == ["completed", "failed", "completed"]
    before = (tmp_path / "outputs/s").glob("*/seed-1-*/run.json")
    content = {path: path.read_bytes() for path in before}
    capsys.readouterr()
    with monkeypatch.context() as patch:
        begun = fail_on(patch)
        assert command("-m", "name=s", "seed=1,2,3") == 0
    assert begun == [2]
    assert statuses(tmp_path / "outputs/s") == ["completed"] * 3
    assert content == {path: path.read_bytes() for path in content}
    out = capsys.readouterr().out
    assert out.count("has completed, left as it is") == 2
    assert "3 of 3 runs completed." in out


def test_a_diverged_run_is_left_alone_and_the_exit_code_says_so(
    command: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("-m", "name=s", "seed=1", "train.lr=1e30") == 1
    begun = fail_on(monkeypatch)
    assert command("-m", "name=s", "seed=1", "train.lr=1e30") == 1
    assert begun == []


def test_a_changed_config_begins_beside_the_old_one_and_names_the_keys(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("-m", "name=s", "seed=1,2") == 0
    capsys.readouterr()
    assert command("-m", "name=s", "seed=1,2", "train.lr=5e-4") == 0
    assert (
        "2 of the runs begin beside earlier ones whose config differs (train.lr: 0.001, not 0.0005)"
    ) in capsys.readouterr().out
    assert statuses(tmp_path / "outputs/s") == ["completed"] * 4


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((), ("train.lr=5e-4",), "holds a run of another config (train.lr: 0.001, not 0.0005)"),
        (("-m", "seed=1"), (), "holds a sweep, not a run"),
        ((), ("-m", "seed=1"), "holds a run, not a sweep"),
    ],
)
def test_a_directory_of_something_else_is_refused_and_left_alone(
    first: tuple[str, ...],
    second: tuple[str, ...],
    words: str,
    command: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command("name=x", *first) == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert command("name=x", *second) == 2
    error = capsys.readouterr().err
    assert error == f"precexp: outputs/x: {words}; choose another name=\n"
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_folder_that_is_not_precexps_is_refused(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outputs/x").mkdir(parents=True)
    (tmp_path / "outputs/x/thesis.tex").write_text("mine")
    assert command("name=x") == 2
    assert "outputs/x: holds no run of precexp" in capsys.readouterr().err


def test_a_single_run_that_has_completed_is_left_alone(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("name=x") == 0
    before = (tmp_path / "outputs/x/run.json").read_bytes()
    assert command("name=x", "train.log_every=1") == 0  # which changes no number
    assert (tmp_path / "outputs/x/run.json").read_bytes() == before
    assert "has completed, left as it is" in capsys.readouterr().out


def test_fail_fast_starts_no_further_run_and_carrying_on_forgets_it(
    command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        begun = fail_on(patch, 1)
        assert command("-m", "name=s", "seed=1,2,3", "sweep.fail_fast=true") == 1
        assert begun == [1]
    assert statuses(tmp_path / "outputs/s") == ["failed"]
    assert command("-m", "name=s", "seed=1,2,3", "sweep.fail_fast=true") == 0
    assert statuses(tmp_path / "outputs/s") == ["completed"] * 3


def test_an_interrupted_isolated_run_is_gone_on_with(
    command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        """A process whose parent is told to stop while it runs."""

        exitcode = 1

        def __init__(self) -> None:
            self.terminated = 0
            self.joins = 0

        def start(self) -> None:
            pass

        def join(self) -> None:
            self.joins += 1
            if self.joins == 1:
                raise KeyboardInterrupt

        def terminate(self) -> None:
            self.terminated += 1

    process = Interrupted()

    class Context:
        def set_forkserver_preload(self, modules: list[str]) -> None:
            pass

        def Process(self, **_: object) -> Interrupted:
            return process

    monkeypatch.setattr(sweeping.multiprocessing, "get_context", lambda _: Context())
    assert command("name=x", "sweep.isolate=true") == 1
    assert (process.terminated, process.joins) == (1, 2)
