"""What a run needs to go on from a step: tensors as safetensors, the rest as JSON, no pickle."""

import hashlib
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from precexp.data import Batches
from precexp.record import to_json

SCHEMA = 1
KEEP_LAST = 2


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batches: Batches,
    config_hash: str,
) -> Path:
    """Writes `directory`/step-<step>/ whole or not at all, and keeps the last two.

    It holds model.safetensors (tied parameters once), optimizer.safetensors (states in their own
    dtypes, as <parameter>/<state>), rng.safetensors and checkpoint.json with the files' sha256.
    """
    final = directory / f"step-{step:08d}"
    partial = directory / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    files = {
        "model.safetensors": {name: param.detach() for param, name in names.items()},
        "optimizer.safetensors": {
            f"{names[param]}/{key}": value
            for param, state in optimizer.state.items()
            for key, value in state.items()
        },
        "rng.safetensors": _rng_states(),
    }
    for name, tensors in files.items():
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, partial / name)
    facts = {
        "schema": SCHEMA,
        "step": step,
        "config_hash": config_hash,
        "position": batches.position,
        "data_hash": batches.data_hash,
        "scaler": scaler.state_dict(),
        "sha256": {name: _sha256(partial / name) for name in files},
    }
    (partial / "checkpoint.json").write_text(to_json(facts, indent=2) + "\n", encoding="utf-8")
    for path in (*partial.iterdir(), partial):
        _sync(path)
    partial.rename(final)
    _sync(directory)
    for old in sorted(directory.glob("step-*"))[:-KEEP_LAST]:
        shutil.rmtree(old)
    return final


def _rng_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
