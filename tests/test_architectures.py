"""Causal language models of every kind, from folders as users have them, in every recipe."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from precexp import run as running
from precexp.bench import memory as bench
from precexp.cli import compose, main
from precexp.config import RunConfig
from precexp.data.tokenizer import save_tokenizer
from precexp.model import build_model, init_hash, num_parameters
from precexp.optim import build_optimizer, promised_states
from precexp.precision import build_precision, check_census, take_census
from precexp.train import place, training_step
from tests.micro import MICRO

CPU = torch.device("cpu")
# bytes per parameter: weights, gradients, states
RECIPES = {
    "fp32": (4, 4, 8),
    "bf16_mixed": (4, 4, 8),
    "fp16_amp": (4, 4, 8),
    "bf16_pure": (2, 2, 6),
    "bf16_plain": (2, 2, 4),
}
# As Llama and Qwen name them; fewer heads for keys and values than for queries.
GROUPED = {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 128,
}  # fmt: skip
ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: GPT2Config(n_embd=96, n_layer=2, n_head=4, vocab_size=2048, n_positions=128),
    "llama": lambda: LlamaConfig.from_dict(GROUPED | {"tie_word_embeddings": False}),
    "llama-tied": lambda: LlamaConfig.from_dict(GROUPED | {"tie_word_embeddings": True}),
    "qwen2": lambda: Qwen2Config.from_dict(GROUPED),
    "qwen3": lambda: Qwen3Config.from_dict(GROUPED | {"head_dim": 24}),
    "pythia": lambda: GPTNeoXConfig(
        hidden_size=96, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=2048, max_position_embeddings=128,
    ),
    "opt": lambda: OPTConfig(
        hidden_size=96, ffn_dim=384, word_embed_proj_dim=96, num_hidden_layers=2,
        num_attention_heads=4, vocab_size=2048, max_position_embeddings=128,
    ),
}  # fmt: skip
TIED = {"gpt2", "llama-tied", "opt"}
ROTARY = {"llama", "llama-tied", "qwen2", "qwen3", "pythia"}
DISK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per architecture and dtype on disk, called <architecture>-<dtype>."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, architecture in ARCHITECTURES.items():
        model = AutoModelForCausalLM.from_config(architecture())
        with torch.no_grad():
            for param in model.parameters():  # biases and gains too: no two of them alike
                param.add_(torch.randn_like(param) * 0.02)
        for dtype in DISK_DTYPES:
            folder = root / folder_name(name, dtype)
            model.to(dtype).save_pretrained(folder)
            save_tokenizer(None, folder, model_path=None, trust_remote_code=False)
            model.float()
    return root


def folder_name(architecture: str, dtype: torch.dtype) -> str:
    return f"{architecture}-{str(dtype).removeprefix('torch.')}"


@cache
def composed(*overrides: str) -> RunConfig:
    return compose(
        ["model=hf", "model.path=set below", "data.block_size=32", "train.batch_size=2",
         "precision.initial_scale=1", *overrides]
    ).config  # fmt: skip


def config_of(folder: Path, *overrides: str) -> RunConfig:
    config = composed(*overrides)
    return replace(config, model=replace(config.model, path=str(folder)))


def rotary_buffers(model: nn.Module) -> list[torch.Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]


def rotary_formula(buffer: torch.Tensor) -> torch.Tensor:
    width = 2 * buffer.numel()
    return 1 / 10_000 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


@pytest.mark.parametrize("dtype", DISK_DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_of_any_dtype_on_disk_become_float32_masters(
    architecture: str, dtype: torch.dtype, folders: Path
) -> None:
    folder = folders / folder_name(architecture, dtype)
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = build_model(config_of(folder, "model.pretrained=true").model, seed=0)
    for (name, ours), theirs in zip(model.named_parameters(), stored.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert theirs.dtype == dtype
        assert torch.equal(ours, theirs.float()), name
    assert bool(rotary_buffers(model)) == (architecture in ROTARY)
    assert all(torch.equal(b, rotary_formula(b)) for b in rotary_buffers(model))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_its_weights_a_folder_gives_those_of_the_seed(
    architecture: str, folders: Path
) -> None:
    configs = [config_of(folders / folder_name(architecture, dtype)) for dtype in DISK_DTYPES]
    first, again = (build_model(config.model, seed=0) for config in configs[:2])
    other = build_model(configs[2].model, seed=1)
    assert init_hash(first) == init_hash(again)
    assert init_hash(first) != init_hash(other)
    assert all(torch.equal(b, rotary_formula(b)) for b in rotary_buffers(first))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tied_weights_are_one_parameter_and_untied_ones_two(
    architecture: str, folders: Path
) -> None:
    for pretrained in ("true", "false"):
        folder = folders / folder_name(architecture, torch.bfloat16)
        model = build_model(config_of(folder, f"model.pretrained={pretrained}").model, seed=0)
        place(
            model, torch.optim.SGD(model.parameters()),
            build_precision(config_of(folder, "precision=bf16_pure").precision, device=CPU),
            device=CPU, compiled=False,
        )  # fmt: skip
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert isinstance(head, nn.Linear)
        assert isinstance(embedding, nn.Embedding)
        assert (head.weight is embedding.weight) == (architecture in TIED)
        tied = embedding.weight.numel() if architecture in TIED else 0
        total = sum(value.numel() for value in model.state_dict().values())  # has both names
        assert num_parameters(model) == total - tied


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_steps_have_the_dtypes_of_the_recipe(
    architecture: str, recipe: str, folders: Path
) -> None:
    folder = folders / folder_name(architecture, torch.bfloat16)
    config = config_of(folder, "model.pretrained=true", f"precision={recipe}", "data.block_size=8")
    precision = build_precision(config.precision, device=CPU)
    model = build_model(config.model, seed=1)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer = build_optimizer(model.parameters(), config.optim, config.train)
    place(model, optimizer, precision, device=CPU, compiled=False)
    scaler = precision.build_scaler()
    batch = torch.arange(16).view(2, 8)
    training_step(model, optimizer, [batch], precision, scaler, max_grad_norm=1.0)
    optimizer.zero_grad()
    done = training_step(model, optimizer, [batch], precision, scaler, max_grad_norm=1.0)
    assert not done.skipped
    census = take_census(model, optimizer=optimizer, logits=done.logits, loss=done.loss)
    states = promised_states(config.optim, param_dtype=precision.param_dtype)
    check_census(census, precision.promised() | states)
    assert census.dtypes("parameters") == {precision.param_dtype}
    record = census.as_record()["bytes_per_param"]
    assert record == dict(
        zip(("weights", "gradients", "states"), RECIPES[recipe], strict=True),
        total=sum(RECIPES[recipe]),
    )
    for name, buffer in model.named_buffers():
        assert buffer.dtype == buffers[name].dtype, name
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize(
    ("architecture", "recipe"),
    [
        ("gpt2", "bf16_mixed"),
        ("llama", "bf16_pure"),
        ("llama-tied", "fp32"),
        ("llama-tied", "bf16_mixed"),
        ("qwen2", "bf16_mixed"),
        ("qwen3", "bf16_pure"),
        ("pythia", "bf16_pure"),
        ("pythia", "bf16_mixed"),
        ("opt", "fp32"),
    ],
)
def test_the_planned_peaks_are_the_allocators(
    architecture: str, recipe: str, folders: Path
) -> None:
    folder = folders / folder_name(architecture, torch.float16)
    config = config_of(
        folder, f"precision={recipe}", "model.pretrained=true", "data.block_size=64",
        "train.batch_size=4",
    )  # fmt: skip
    compared = bench.compare("", config)
    assert max(map(abs, compared.residuals.values())) < 1e-3  # the same for models of our own


@pytest.mark.parametrize(
    ("architecture", "recipe"),
    [
        ("llama", "fp32"),
        ("qwen3", "bf16_mixed"),
        ("pythia", "bf16_pure"),
        pytest.param("gpt2", "fp16_amp", marks=pytest.mark.slow),
        pytest.param("llama-tied", "bf16_plain", marks=pytest.mark.slow),
    ],
)
def test_a_run_of_a_folder_and_a_text_file_completes(
    architecture: str, recipe: str, folders: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged, that a single man.\n" * 60)
    planned = compose(
        ["model=hf", f"model.path={folders / folder_name(architecture, torch.bfloat16)}",
         "model.pretrained=true", f"precision={recipe}", "precision.initial_scale=1", "data=text",
         f"data.train_files=[{text}]", f"data.cache_dir={tmp_path}", "data.block_size=16",
         "train.batch_size=2", "train.max_steps=2", "train.warmup_steps=0", "train.eval_batches=1",
         "wandb.mode=disabled"]
    )  # fmt: skip
    running.run(planned.config, arm=planned.arm, directory=tmp_path / "run")
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["status"] == "completed"
    assert record["results"]["applied_steps"] == 2
    assert record["results"]["final_eval_loss"] < 12  # ln 2,048 is 7.6; these weights were shaken
    measured, foreseen = record["memory"]["measured"], record["memory"]["planned"]
    assert measured["peak_bytes"] == pytest.approx(foreseen["peak_bytes"], rel=1e-2)


@pytest.mark.parametrize(
    ("spoil", "overrides", "words"),
    [
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            ["model.pretrained=true"],
            "holds no weights (model.safetensors or pytorch_model.bin); give a folder that does",
        ),
        (
            lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
            ["data.tokenizer=null"],
            "has no tokenizer files; give data.tokenizer=FOLDER (or a tokenizer.json, or bundled)",
        ),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "no-such-model"}'),
            [],
            "model type `no-such-model`",
        ),
        (
            lambda folder: T5Config(vocab_size=2048).save_pretrained(folder),
            [],
            "is an encoder-decoder (t5); allowed: causal language models",
        ),
        (
            lambda folder: None,
            ["model.vocab_size=2000"],
            "2,048 entries are more than model.vocab_size=2000; give a smaller tokenizer or a "
            "larger vocabulary",
        ),
    ],
    ids=["no weights", "no tokenizer", "unknown", "encoder-decoder", "small vocabulary"],
)
@pytest.mark.parametrize("flags", [(), ("-m", "seed=1,2")], ids=["run", "sweep"])
def test_a_folder_that_will_not_do_is_one_line_exit_2_and_nothing_on_disk(
    spoil: Callable[[Path], object],
    overrides: list[str],
    words: str,
    flags: tuple[str, ...],
    folders: Path,
    tmp_path: Path,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(folders / folder_name("llama", torch.bfloat16), folder)
    spoil(folder)
    options = ["model=hf", "model.path=model", f"data.cache_dir={cache_dir}", *MICRO[5:]]
    assert main([*flags, *options, *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("precexp: ")
    assert words in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
