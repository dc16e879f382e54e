"""The global switches of torch, set in one place at the start of a run, and what the run ran on."""

import ctypes
import fcntl
import importlib.metadata
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from precexp import __version__
from precexp.config import UserError

WAIT_SECONDS = 0.5  # between two looks for a free GPU
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "hydra-core", "numpy", "wandb")


def pick_device(name: str) -> torch.device:
    """The device of `device=`; UserError for cuda where torch sees no GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        build = torch.version.cuda or "a CPU build"
        raise UserError(
            f"device: cuda is not there (torch {torch.__version__}, {build}); "
            "allowed here: auto, cpu"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


@contextmanager
def own_gpu(device: torch.device) -> Iterator[None]:
    """On CUDA, makes a GPU that no other run works on the current one, and keeps others off it.

    Waits, and says so, while each of the visible GPUs has a run (of this user, on this machine).
    """
    if device.type != "cuda":
        yield
        return
    names = [str(torch.cuda.get_device_properties(i).uuid) for i in range(num_gpus())]
    index, lock = take_free(names, cache_folder("gpus"))
    try:
        torch.cuda.set_device(index)
        yield
    finally:
        os.close(lock)


def num_gpus() -> int:
    """The GPUs that this process may use."""
    return torch.cuda.device_count()


def take_free(names: Sequence[str], folder: Path) -> tuple[int, int]:
    """The index of the first name that no other process has, and the descriptor that keeps it.

    The name is free again when the descriptor closes, however its process ends.
    """
    told = False
    while True:
        for index, name in enumerate(names):
            descriptor = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                return index, descriptor
        if not told:
            text = f"waiting for a GPU: other runs of precexp work on all of {len(names)}"
            print(text, file=sys.stderr, flush=True)
            told = True
        time.sleep(WAIT_SECONDS)


def cache_folder(name: str) -> Path:
    """A folder of the user's cache; raises OSError if it can't be made."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(root).expanduser() / "precexp" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def num_cores() -> int:
    """The CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_switches(*, seed: int, deterministic: bool) -> None:
    """Seeds what has no generator of its own (dropout, a model's own code), sets torch's flags."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the most it takes
    torch.manual_seed(seed)
    _keep_freed_memory()


def describe(device: torch.device, *, attention: str) -> dict[str, object]:
    """The `environment` of run.json: versions, device, flags. No host name, no user, no path."""
    matmul = torch.backends.cuda.matmul
    return {
        "precexp": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": _device_name(device),
        "cuda": torch.version.cuda,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention": attention,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "allow_tf32": matmul.allow_tf32,  # in products of fp32 matrices
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,  # in fp32 convolutions
        "allow_fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "allow_bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
    }


def _keep_freed_memory() -> None:
    """Makes glibc keep what a step frees for the next step; on other C libraries, does nothing.

    By default the activations and logits of each step go back to the system and come again as
    pages to be zeroed, which takes a CPU run of opt-tiny up to a third of its time.
    """
    set_malloc(mmap_threshold=2**25, trim_threshold=2**31 - 1)  # the most that every glibc takes


def set_malloc(*, mmap_threshold: int, trim_threshold: int) -> None:
    """Bytes from which glibc maps a block of its own, and from which it returns what is free."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
        mallopt(_M_TRIM_THRESHOLD, trim_threshold)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with "-dirty" if it was changed; None for an installed package."""
    checkout = Path(__file__).parent.parent
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
