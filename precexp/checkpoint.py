"""What a run needs to go on from a step: tensors as safetensors, the rest as JSON, no pickle."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from precexp.config import UserError
from precexp.data import Batches
from precexp.record import one_line, sealed, to_json, unsealed

SCHEMA = 1
NUMERICS = "numerics.safetensors"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One that was found whole: its files are as long and hash as they did when it was written."""

    directory: Path
    step: int
    tokens: int  # served up to and in the step
    facts: Mapping[str, Any]  # checkpoint.json


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    tokens: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batches: Batches,
    blocks_sha256: str,
    config_hash: str,
    rows_sha256: str,
    keep_last: int,
    recorded: Mapping[str, object],
    numerics: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes `directory`/step-<step>/ whole or not at all, and keeps the last few.

    It holds model.safetensors (tied parameters once), optimizer.safetensors (states in their own
    dtypes, as <parameter>/<state>), rng.safetensors, numerics.safetensors (what the probes need, if
    there are any) and checkpoint.json with the files' sizes and sha256, and those of the rows so
    far and of itself. Raises OSError if it cannot be written; the
    earlier ones are there still.
    """
    final = directory / f"step-{step:08d}"
    partial = directory / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
        files: dict[str, Mapping[str, Tensor]] = {
            "model.safetensors": {name: param.detach() for param, name in names.items()},
            "optimizer.safetensors": {
                f"{names[param]}/{key}": value
                for param, state in optimizer.state.items()
                for key, value in state.items()
            },
            "rng.safetensors": _rng_states(),
        }
        if numerics:
            files[NUMERICS] = numerics
        for name, tensors in files.items():
            contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
            save_file(contiguous, partial / name)
        facts = {
            "schema": SCHEMA,
            "step": step,
            "tokens": tokens,
            "config_hash": config_hash,
            "rows_sha256": rows_sha256,
            "recorded": recorded,  # of run.json, should that be lost
            "position": batches.position,
            "data_hash": batches.data_hash,
            "blocks_sha256": blocks_sha256,
            "scaler": scaler.state_dict(),
            "states": list(dict.fromkeys(key for s in optimizer.state.values() for key in s)),
            "rng": {"python": random.getstate(), "numpy": _numpy_state()},
            "bytes": {name: (partial / name).stat().st_size for name in files},
            "sha256": {name: _sha256(partial / name) for name in files},
        }
        text = to_json(sealed(facts), indent=1) + "\n"
        (partial / "checkpoint.json").write_text(text, encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)  # one that was found damaged
        partial.rename(final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"{final}: checkpoint not written ({one_line(error)})") from error
    _sync(directory)
    kept = [path for path in _steps(directory) if path.name <= final.name][-keep_last:]
    for old in set(_steps(directory)) - set(kept):  # those beyond were found of no use
        shutil.rmtree(old, ignore_errors=True)
    return final


def find_checkpoint(
    directory: Path, *, config_hash: str, rows_sha256_at: Callable[[int], str | None]
) -> tuple[Checkpoint | None, Sequence[str]]:
    """The newest whole checkpoint of these rows, and a line per one that cannot be used.

    `rows_sha256_at` gives the hash of the rows up to a step, None where they do not reach it.
    Raises UserError for a checkpoint of another config.
    """
    problems: list[str] = []
    for partial in directory.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
    for checkpoint in _whole(directory, problems):
        folder = checkpoint.directory
        if checkpoint.facts["config_hash"] != config_hash:
            raise UserError(f"{folder}: a checkpoint of another config; choose another name=")
        if checkpoint.facts["rows_sha256"] == rows_sha256_at(checkpoint.step):
            return checkpoint, problems
        problems.append(f"checkpoint {folder.name} is not of the recorded rows and not used")
    return None, problems


def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batches: Batches,
) -> None:
    """Puts everything back as it was after the step, each tensor in the dtype it was saved in."""
    load_tensors(checkpoint, model=model, optimizer=optimizer)
    facts = checkpoint.facts
    if scaler.is_enabled():
        scaler.load_state_dict(facts["scaler"])
    batches.seek(facts["position"], facts["data_hash"])
    _set_rng_states(load_file(checkpoint.directory / "rng.safetensors"), facts["rng"])


def load_numerics(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """What the probes need to go on; empty in a checkpoint of a run without any."""
    if NUMERICS not in checkpoint.facts["sha256"]:
        return {}
    return load_file(checkpoint.directory / NUMERICS)


def load_tensors(
    checkpoint: Checkpoint, *, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Puts parameters and optimizer states back, each in the dtype it was saved in."""
    weights = load_file(checkpoint.directory / "model.safetensors")
    names: dict[Tensor, str] = {}
    with torch.no_grad():
        for name, param in model.named_parameters():
            assert weights[name].dtype == param.dtype, name
            param.copy_(weights[name])
            names[param] = name
    saved = load_file(checkpoint.directory / "optimizer.safetensors")
    keys = checkpoint.facts["states"]
    states = {
        name: {key: saved[f"{name}/{key}"] for key in keys if f"{name}/{key}" in saved}
        for name in weights
    }
    params = [param for group in optimizer.param_groups for param in group["params"]]
    optimizer.load_state_dict(
        {
            "param_groups": optimizer.state_dict()["param_groups"],
            "state": {
                i: states[names[param]] for i, param in enumerate(params) if states[names[param]]
            },
        }
    )


def newest_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest whole one, whatever the rows."""
    return next(_whole(directory, []), None)


def _whole(directory: Path, problems: list[str]) -> Iterator[Checkpoint]:
    """The checkpoints that are whole, from the newest on; a line to `problems` per damaged one."""
    for folder in reversed(_steps(directory)):
        try:
            yield _verified(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"checkpoint {folder.name} is damaged and not used ({one_line(error)})")


def _verified(folder: Path) -> Checkpoint:
    """Raises ValueError, OSError, KeyError or TypeError for what is not whole."""
    facts: Mapping[str, Any] = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
    if facts["schema"] > SCHEMA:
        raise ValueError(f"schema {facts['schema']}; this precexp reads up to {SCHEMA}")
    facts = unsealed(facts)
    for name, digest in facts["sha256"].items():
        path = folder / name
        if path.stat().st_size != facts["bytes"][name]:
            raise ValueError(f"{name} has {path.stat().st_size} bytes, not {facts['bytes'][name]}")
        if _sha256(path) != digest:
            raise ValueError(f"{name} has another sha256")
    return Checkpoint(
        directory=folder, step=int(facts["step"]), tokens=int(facts["tokens"]), facts=facts
    )


def _steps(directory: Path) -> list[Path]:
    """The checkpoints' folders by step; names sort as numbers do up to 10^8 steps."""
    found = (path for path in directory.glob("step-*") if path.is_dir())
    return sorted(found, key=lambda path: (len(path.name), path.name))


def _rng_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _numpy_state() -> list[Any]:
    name, keys, *rest = np.random.get_state()
    return [name, np.asarray(keys).tolist(), *rest]


def _set_rng_states(torch_states: Mapping[str, Tensor], others: Mapping[str, Any]) -> None:
    torch.set_rng_state(torch_states["cpu"])
    if "cuda" in torch_states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch_states["cuda"])
    version, internal, gauss = others["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = others["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
