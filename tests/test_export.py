"""An exported folder is the run's model, to transformers' own loader."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from precexp import run as running
from precexp.cli import compose
from precexp.data import build_tokenizer, eval_subset
from precexp.export import main
from precexp.precision import build_precision
from precexp.record import read_record
from precexp.train import evaluate
from tests.micro import MICRO

CPU = torch.device("cpu")


def run(directory: Path, cache_dir: Path, *overrides: str) -> None:
    planned = compose(
        [*MICRO, f"data.cache_dir={cache_dir}", "train.lr=1e-2", "train.checkpoint_every=2",
         *overrides]
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "planned_memory", lambda *_: None)
        patch.setattr(running, "measured_memory", lambda *_, **__: None)
        running.run(planned.config, arm=planned.arm, directory=directory)


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "bf16_pure"])
def test_the_loaded_folder_has_the_eval_loss_of_the_run(
    precision: str, tmp_path: Path, cache_dir: Path
) -> None:
    run(tmp_path / "run", cache_dir, f"precision={precision}")
    assert main([str(tmp_path / "run")]) == 0
    folder = tmp_path / "run/export"
    config = compose([*MICRO, f"precision={precision}", f"data.cache_dir={cache_dir}"]).config
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation=config.model.attention
    )
    expected = torch.bfloat16 if precision == "bf16_pure" else torch.float32
    assert {param.dtype for param in model.parameters()} == {expected}
    blocks = eval_subset(running.read_blocks(config.model, config.data).eval, 2)
    recipe = build_precision(config.precision, device=CPU)
    loss = evaluate(model, blocks, recipe, batch_size=config.train.eval_batch_size)
    assert loss == read_record(tmp_path / "run/run.json").results["final_eval_loss"]


@pytest.mark.parametrize("optim", ["anyprecision", "anyprecision_packed"])
def test_float32_has_the_compensation_folded_in(
    optim: str, tmp_path: Path, cache_dir: Path
) -> None:
    run(tmp_path / "run", cache_dir, "precision=bf16_pure", f"optim={optim}")
    output = tmp_path / "full"
    assert main([str(tmp_path / "run"), "--dtype", "float32", "--output", str(output)]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    saved = tmp_path / "run/checkpoints/step-00000004"
    weights, states = (load_file(saved / f"{n}.safetensors") for n in ("model", "optimizer"))
    moved = 0
    for name, param in loaded.named_parameters():
        stored = weights[name].float()
        assert param.dtype == torch.float32
        assert ((param - stored).abs() <= stored.abs() * 2**-8).all()  # half an ulp, and a tie
        if optim == "anyprecision":
            assert torch.equal(param, stored + states[f"{name}/compensation"].float())
        moved += int((param != stored).sum())
    assert moved > 0


def test_the_tokenizer_encodes_as_the_run_did(tmp_path: Path, cache_dir: Path) -> None:
    run(tmp_path / "run", cache_dir)
    assert main([str(tmp_path / "run")]) == 0
    loaded = AutoTokenizer.from_pretrained(tmp_path / "run/export")
    ours = build_tokenizer(None, model_path=None, trust_remote_code=False)
    text = "It is a truth universally acknowledged.\n"
    assert loaded(text, add_special_tokens=False)["input_ids"] == ours.encode([text])[0]
    assert loaded.eos_token == "</s>"


def test_a_model_from_a_folder_is_exported_too(tmp_path: Path, cache_dir: Path) -> None:
    source = GPT2Config(vocab_size=2048, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    source.save_pretrained(tmp_path / "source")
    planned = compose(
        ["model=hf", f"model.path={tmp_path / 'source'}", "data.tokenizer=bundled",
         f"data.cache_dir={cache_dir}", *MICRO[5:], "train.checkpoint_every=4"]
    )  # fmt: skip
    running.run(planned.config, arm=planned.arm, directory=tmp_path / "run")
    assert main([str(tmp_path / "run")]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run/export")
    assert loaded.config.model_type == "gpt2"
    assert loaded.config.use_cache


def test_mistakes_are_one_line(
    tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", cache_dir, "train.checkpoint_every=null")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    for arguments, words in (
        ([str(tmp_path / "nowhere")], "run.json: not found"),
        ([str(tmp_path / "run")], "no whole checkpoint in it to export; run with train.checkpoint"),
        ([str(tmp_path / "run"), f"--output={tmp_path / 'taken'}"], "taken exists already"),
    ):
        capsys.readouterr()
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert words in error
        assert len(error.splitlines()) == 1
