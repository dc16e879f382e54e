"""The step on a CPU: native.c, compiled at first use by the system's compiler into a cache.

A C file and not inductor, because the compiled loop is faster (docs/numerics.md has the table), is
built in a third of a second, and can't drop a rounding on the way.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from precexp.environment import cache_folder
from precexp.optim.kernel import BUFFERS, Batch, BuildError, Form, Rates

SOURCE = Path(__file__).with_name("native.c")
# No fast-math: a NaN is a NaN, and sums stay as they are written.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math",
         "-fPIC", "-shared", "-pthread")  # fmt: skip
BUILD_SECONDS = 60

_DTYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.int16: 4}
_ELEMENTS_PER_THREAD = 2**16  # starting a thread costs as much as about these

_Step = Callable[[int, int, object, int], None]


def adamw_(form: Form, batch: Batch, rates: Rates) -> None:
    """Updates the batch in place, on as many threads as torch uses; BuildError if it can't."""
    random = batch.random_bits(batch.params[0].device) if form.is_stochastic else {}
    table = batch.table(random)
    numbers = (1 - rates.beta1, 1 - rates.beta2, rates.eps, float(rates.grad_multiplier))
    num_elements = int(table["numel"].sum())
    num_threads = max(1, min(torch.get_num_threads(), num_elements // _ELEMENTS_PER_THREAD))
    # ctypes lets go of the interpreter's lock while this runs.
    step_of(form)(table.ctypes.data, len(table), (ctypes.c_float * 4)(*numbers), num_threads)


def prepare(form: Form, device: torch.device) -> None:
    """Compiles the step of the form. Raises BuildError."""
    step_of(form)


@functools.cache
def step_of(form: Form) -> _Step:
    """The compiled function of the form, from the cache or built into it. Raises BuildError."""
    step = load_library(SOURCE, _macros(form)).precexp_adamw
    step.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    step.restype = None
    return step


def load_library(source: Path, macros: list[str]) -> ctypes.CDLL:
    """The C file as a library, from the cache or built into it. Raises BuildError."""
    compiler = _compiler()
    identity = "\0".join(
        [source.read_text(encoding="utf-8"), *FLAGS, *macros, _version(compiler), _cpu_features()]
    )
    name = f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    try:
        path = cache_folder("native") / name
        if not path.exists():
            _compile(compiler, source, macros, path)
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # damaged: on a disk that was full, say
            _compile(compiler, source, macros, path)
            return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{error.strerror or error}") from None


def _compile(compiler: tuple[str, ...], source: Path, macros: list[str], path: Path) -> None:
    """Builds the library beside its place and renames it there, so that none is ever seen half."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
        built = Path(folder) / path.name
        command = [*compiler, *FLAGS, *macros, str(source), "-lm", "-o", str(built)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"{compiler[0]} took over {BUILD_SECONDS} s") from None
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["it failed"]
            raise BuildError(f"{compiler[0]}: {lines[0].strip()}")
        built.replace(path)


def _compiler() -> tuple[str, ...]:
    """The C compiler's command: that of $CC, else the first of cc, gcc and clang."""
    given = tuple(os.environ.get("CC", "").split())
    for command in [given] if given else [("cc",), ("gcc",), ("clang",)]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C compiler: {' '.join(given) or 'cc, gcc, clang'} not found")


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return " ".join(compiler) + done.stdout


@functools.cache
def _cpu_features() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    wanted = ("flags", "Features", "model name", "CPU part")
    features = sorted({line for line in lines if line.startswith(wanted)})
    return "\n".join([platform.machine(), platform.processor(), *features])


def _macros(form: Form) -> list[str]:
    values = {
        **{name.upper(): _DTYPES[dtype] for name, dtype in zip(BUFFERS, form.dtypes, strict=True)},
        "STOCHASTIC_VARIANCE": int(form.stochastic_variance),
        "STOCHASTIC_REMAINDER": int(form.stochastic_remainder),
        "DECAY_OUTSIDE": int(form.decay_outside),
    }
    return [f"-D{name}={value}" for name, value in values.items()]
