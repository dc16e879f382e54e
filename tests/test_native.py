"""The compiled C step: its threads, and where it comes from."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from precexp.optim import anyprecision, aten, kernel, native
from precexp.optim.kernel import Form
from tests.test_kernel import BF16, MIXES, made, run, same


@pytest.mark.parametrize("mode", ["default", "packed"])
def test_the_number_of_threads_changes_no_bit(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_ELEMENTS_PER_THREAD", 100)
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 2, 7):  # which also cuts between two elements of a pair
            torch.set_num_threads(threads)
            runs.append(run(made(mode=mode, implementation="native"), steps=3))
    finally:
        torch.set_num_threads(before)
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that has built nothing, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caches = (native.step_of, kernel.problem_with, kernel._tell)
    for cache in caches:
        cache.cache_clear()
    yield tmp_path
    for cache in caches:
        cache.cache_clear()


FORM = Form(
    param=BF16, grad=BF16, exp_avg=BF16, exp_avg_sq=BF16, compensation=BF16,
    stochastic_variance=False, stochastic_remainder=True, decay_outside=False,
)  # fmt: skip


def test_parameters_that_left_the_cpu_are_not_stepped_natively() -> None:
    buffers = [torch.zeros(3, dtype=BF16, device="meta")] * 5
    with pytest.raises(
        ValueError, match="native is not for parameters on meta; allowed: auto, aten"
    ):
        anyprecision._carry_of(FORM, buffers, "native", is_dense=True)
    assert anyprecision._carry_of(FORM, buffers, "auto", is_dense=True) is aten.adamw_


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_torchs_operations_step_in(
    compiler: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", compiler)
    fallen_back = run(made(), steps=3)
    told = capfd.readouterr().err
    assert told.startswith(
        f"precexp: no native optimizer step ({'no C' if compiler[0] == 'n' else compiler}"
    )
    run(made(MIXES[1]), steps=1)  # another form, the same reason
    assert (told + capfd.readouterr().err).count("\n") == 1
    assert same(fallen_back, run(made(implementation="aten"), steps=3))
    with pytest.raises(RuntimeError, match="implementation: native is not possible here: "):
        run(made(implementation="native"), steps=1)


def test_a_cache_that_cannot_be_made_is_a_reason_and_no_crash(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fresh / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    assert kernel.problem_with(FORM, torch.device("cpu")) is not None


def test_the_library_is_built_once_and_again_if_damaged(fresh: Path) -> None:
    native.step_of(FORM)
    (library,) = (fresh / "precexp" / "native").iterdir()
    stamp = library.stat().st_mtime_ns
    native.step_of.cache_clear()
    native.step_of(FORM)
    assert library.stat().st_mtime_ns == stamp


def test_a_damaged_library_is_built_again(fresh: Path) -> None:
    native.step_of(FORM)
    (library,) = (fresh / "precexp" / "native").iterdir()
    damaged = library.with_suffix(".damaged")
    damaged.write_bytes(library.read_bytes()[:100])
    damaged.replace(library)  # a new file: the old one is mapped into this process
    script = (
        "import torch; from precexp.optim import native; from tests.test_native import FORM;"
        "native.step_of(FORM)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])
    assert library.stat().st_size > 100


def test_processes_that_build_at_once_do_not_harm_each_other(fresh: Path) -> None:
    script = "from tests.test_kernel import made, run; run(made(implementation='native'), steps=1)"
    processes = [
        subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[1])
        for _ in range(3)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert not list((fresh / "precexp" / "native").glob(".build-*"))
