"""Keeps every test off the network, off the user's caches, and on at most two threads.

And the command line on a micro model, which several files run.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from precexp import set_process_defaults

set_process_defaults()  # before any test imports torch
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
for secret in ("WANDB_API_KEY", "HF_TOKEN"):
    os.environ.pop(secret, None)

import pytest  # noqa: E402
import torch  # noqa: E402

from precexp.cli import main  # noqa: E402
from tests.micro import MICRO  # noqa: E402


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def command(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., int]]:
    """Runs the command line in an empty folder with a micro model; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    yield lambda *arguments: main([*MICRO, f"data.cache_dir={cache_dir}", *arguments])
    signal.signal(signal.SIGTERM, handler)
