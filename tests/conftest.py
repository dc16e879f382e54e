"""Keeps every test off the network, off the user's caches, and on at most two threads."""

import os

from precexp import set_process_defaults

set_process_defaults()  # before any test imports torch
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
for secret in ("WANDB_API_KEY", "HF_TOKEN"):
    os.environ.pop(secret, None)

import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
