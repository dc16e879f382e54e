import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from precexp.checkpoint import save_checkpoint
from precexp.config import load
from precexp.data import Batches
from precexp.model import build_model
from precexp.optim import build_optimizer
from precexp.precision import build_precision
from precexp.train import accumulate_gradients
from tests.test_config import composed
from tests.test_train import BLOCKS, MICRO


def save(directory: Path, step: int) -> tuple[Path, dict[str, torch.Tensor], torch.optim.Optimizer]:
    config = load(composed(*MICRO, "precision=bf16_pure"))
    precision = build_precision(config.precision, device=torch.device("cpu"))
    model = build_model(config.model, seed=1)
    precision.cast_parameters(model)
    optimizer = build_optimizer(model.parameters(), config.optim, config.train)
    batches = Batches(BLOCKS, batch_size=2, seed=1)
    scaler = precision.build_scaler()
    accumulate_gradients(model, [batches.next_batch()], precision, scaler)
    optimizer.step()
    folder = save_checkpoint(
        directory,
        step=step,
        tokens=100 * step,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        batches=batches,
        blocks_sha256="ghi",
        config_hash="abc",
        rows_sha256="def",
        keep_last=2,
        recorded={},
    )
    return folder, {name: p.detach() for name, p in model.named_parameters()}, optimizer


def test_a_checkpoint_holds_every_tensor_in_its_own_dtype(tmp_path: Path) -> None:
    folder, weights, optimizer = save(tmp_path, 1)
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weights[name]) for name in weights)
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    states = load_file(folder / "optimizer.safetensors")
    assert len(states) == 4 * len(weights)  # step, momentum, variance, compensation
    param = next(p for group in optimizer.param_groups for p in group["params"])
    name = next(name for name in weights if weights[name].data_ptr() == param.data_ptr())
    for key in ("exp_avg", "exp_avg_sq", "compensation"):
        assert states[f"{name}/{key}"].dtype == torch.bfloat16
        assert torch.equal(states[f"{name}/{key}"], optimizer.state[param][key])


def test_its_facts_say_where_the_run_stands_and_what_its_files_hash_to(tmp_path: Path) -> None:
    folder, *_ = save(tmp_path, 7)
    facts = json.loads((folder / "checkpoint.json").read_text())
    assert (facts["step"], facts["position"], facts["config_hash"]) == (7, 2, "abc")
    assert facts["sha256"].keys() == {
        "model.safetensors", "optimizer.safetensors", "rng.safetensors"}  # fmt: skip
    for name, digest in facts["sha256"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_only_the_last_two_are_kept_and_nothing_partial_is_left(tmp_path: Path) -> None:
    for step in (5, 900, 1000):
        save(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000900", "step-00001000"]
