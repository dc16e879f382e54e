"""Models of every origin: float32, from the seed alone, tied, or refused in one line."""

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from huggingface_hub import constants
from omegaconf import OmegaConf
from torch import nn
from transformers import (
    BertConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)

from precexp import hub
from precexp.config import ModelConfig, UserError, conf_dir
from precexp.model import build_model, init_hash, num_parameters, read_model_config

OPT = OPTConfig(
    hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50,
    max_position_embeddings=24, word_embed_proj_dim=16, pad_token_id=1,
)  # fmt: skip
GPT2 = GPT2Config(
    n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=24, bos_token_id=0, eos_token_id=0
)
LLAMA = LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=50, max_position_embeddings=24,
)  # fmt: skip


def choice(name: str, **overrides: object) -> ModelConfig:
    """The model group's choice of that name."""
    values = OmegaConf.load(conf_dir() / "model" / f"{name}.yaml")
    return ModelConfig(**OmegaConf.to_container(OmegaConf.merge(values, overrides)))  # type: ignore[arg-type]


TINY = choice("opt-tiny")


def read_from(path: Path | str) -> ModelConfig:
    return choice("hf", path=str(path))


def saved(config: PreTrainedConfig, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


@pytest.fixture
def float16_opt(tmp_path: Path) -> tuple[Path, OPTForCausalLM]:
    """A checkpoint saved in float16, as facebook's are, and the model that it came from."""
    torch.manual_seed(1)
    model = OPTForCausalLM(OPT).half()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    return tmp_path, model


def dtypes(model: nn.Module) -> set[torch.dtype]:
    return {param.dtype for param in model.parameters()}


def dropouts(model: nn.Module) -> set[float]:
    """What is dropped anywhere: by modules, and by modules that hold a probability."""
    found = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    for module in model.modules():
        for name in ("dropout", "attention_dropout", "layerdrop"):
            value = getattr(module, name, None)
            if isinstance(value, int | float):
                found.add(value)
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [("opt-125m", 125_239_296), ("opt-350m", 331_196_416), ("opt-1.3b", 1_315_758_080)],
)
def test_published_sizes(name: str, expected: int) -> None:
    with torch.device("meta"):
        model = build_model(choice(name), seed=0)
    assert num_parameters(model) == expected


def test_weights_depend_on_the_seed_alone_and_global_random_states_are_untouched() -> None:
    torch.manual_seed(5)
    first = build_model(TINY, seed=0)
    torch.manual_seed(6)
    before = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    second, third = build_model(TINY, seed=0), build_model(TINY, seed=1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), str(numpy.random.get_state()))
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert init_hash(first) == init_hash(second)
    assert init_hash(first) != init_hash(third)


def test_the_default_dtype_of_the_process_does_not_matter() -> None:
    expected = init_hash(build_model(TINY, seed=0))
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = build_model(TINY, seed=0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert init_hash(model) == expected


def test_no_token_starts_at_zero_and_the_model_is_in_training_mode() -> None:
    """OPT's own pad id would zero row 1, which here is a token like any other."""
    model = build_model(TINY, seed=0)
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, nn.Parameter)
    assert (embedding.norm(dim=1) > 0).all()
    assert model.training
    assert not model.config.use_cache


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_float16_checkpoint_gives_float32_parameters(
    float16_opt: tuple[Path, OPTForCausalLM], pretrained: bool
) -> None:
    folder, source = float16_opt
    model = build_model(replace(read_from(folder), pretrained=pretrained), seed=0)
    assert dtypes(model) == {torch.float32}
    equal = [
        torch.equal(ours, theirs.float())
        for ours, theirs in zip(model.parameters(), source.parameters(), strict=True)
        if ours.ndim > 1  # biases and gains are 0 and 1 in both
    ]
    assert all(equal) if pretrained else not any(equal)


def test_pretrained_weights_do_not_depend_on_the_seed(
    float16_opt: tuple[Path, OPTForCausalLM],
) -> None:
    config = replace(read_from(float16_opt[0]), pretrained=True)
    assert init_hash(build_model(config, seed=0)) == init_hash(build_model(config, seed=1))


@pytest.mark.parametrize("pretrained", [False, True])
def test_tied_weights_stay_tied_and_count_once(
    float16_opt: tuple[Path, OPTForCausalLM], pretrained: bool
) -> None:
    model = build_model(replace(read_from(float16_opt[0]), pretrained=pretrained), seed=0)
    state = model.state_dict()  # has both names
    head, embedding = state["lm_head.weight"], state["model.decoder.embed_tokens.weight"]
    assert head.data_ptr() == embedding.data_ptr()
    assert num_parameters(model) == sum(value.numel() for value in state.values()) - head.numel()


@pytest.mark.parametrize("architecture", [GPT2, LLAMA], ids=lambda config: config.model_type)
def test_other_architectures_come_from_a_folder(
    architecture: PreTrainedConfig, tmp_path: Path
) -> None:
    model = build_model(read_from(saved(architecture, tmp_path)), seed=0)
    assert dtypes(model) == {torch.float32}
    assert model.config.model_type == architecture.model_type
    assert dropouts(model) <= {0.0}
    ids = torch.arange(24).unsqueeze(0)
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_rotary_buffers_are_those_of_the_formula(tmp_path: Path) -> None:
    """A model-wide cast through bf16 and back would leave them rounded."""
    config = replace(read_from(saved(LLAMA, tmp_path)), pretrained=False)
    buffers = {
        name.rpartition(".")[2]: b for name, b in build_model(config, seed=0).named_buffers()
    }
    exponents = torch.arange(0, 4, 2, dtype=torch.float32) / 4  # heads are 4 wide
    assert torch.equal(buffers["inv_freq"], 1 / 10_000**exponents)


@pytest.mark.parametrize("architecture", [OPT, GPT2], ids=lambda config: config.model_type)
def test_dropout_zero_turns_every_dropout_off(
    architecture: PreTrainedConfig, tmp_path: Path
) -> None:
    config = read_from(saved(architecture, tmp_path))
    assert config.dropout == 0
    model = build_model(config, seed=0)
    assert dropouts(model) == {0.0}
    values = {name: value for name, value in vars(model.config).items() if "drop" in name}
    assert values
    assert not any(isinstance(value, float) and value for value in values.values())


def test_another_dropout_is_that_of_the_blocks_outputs(tmp_path: Path) -> None:
    """The rest stays as the model has it: OPT drops nothing else, GPT-2 0.1 in two more places."""
    opt = read_model_config(replace(TINY, dropout=0.1))
    assert (opt.dropout, opt.attention_dropout, opt.layerdrop) == (0.1, 0.0, 0.0)
    model = build_model(replace(TINY, dropout=0.1), seed=0)
    assert model.model.decoder.layers[0].dropout == 0.1  # type: ignore[union-attr, index]
    gpt2 = read_model_config(replace(read_from(saved(GPT2, tmp_path / "gpt2")), dropout=0.2))
    assert (gpt2.resid_pdrop, gpt2.embd_pdrop, gpt2.attn_pdrop) == (0.2, 0.1, 0.1)
    with pytest.raises(UserError, match=r"^model\.dropout: llama has no dropout .* allowed: 0$"):
        read_model_config(replace(read_from(saved(LLAMA, tmp_path / "llama")), dropout=0.1))


def test_dropout_changes_no_initial_weight() -> None:
    dropping = build_model(replace(TINY, dropout=0.1), seed=0)
    assert init_hash(dropping) == init_hash(build_model(TINY, seed=0))


def test_the_hash_covers_values_names_and_shapes_and_refuses_a_cast_model() -> None:
    class Named(nn.Module):
        def __init__(self, name: str, *shape: int) -> None:
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.zeros(*shape)))

    models = [Named("a", 2, 3), Named("a", 3, 2), Named("b", 2, 3)]
    hashes = [init_hash(model) for model in models]
    with torch.no_grad():
        next(models[0].parameters())[0, 0] = 1e-30
    hashes.append(init_hash(models[0]))
    assert len(set(hashes)) == 4
    with pytest.raises(AssertionError, match=r"^a is torch\.bfloat16"):
        init_hash(models[0].bfloat16())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_is_what_was_asked_for_and_changes_no_weight(attention: str) -> None:
    model = build_model(replace(TINY, attention=attention), seed=0)  # type: ignore[arg-type]
    assert model.config._attn_implementation == attention
    assert init_hash(model) == init_hash(build_model(TINY, seed=0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="flash attention may be possible here")
def test_flash_attention_is_refused_on_a_cpu() -> None:
    with pytest.raises(UserError, match=r"^model\.attention: flash .* allowed here: sdpa, eager$"):
        build_model(replace(TINY, attention="flash"), seed=0)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    ids = torch.arange(32).view(2, 16)

    def gradients(model: PreTrainedModel) -> list[torch.Tensor | None]:
        model(input_ids=ids, labels=ids).loss.backward()
        return [param.grad for param in model.parameters()]

    def saves_memory(model: PreTrainedModel) -> bool:
        return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())

    plain = build_model(TINY, seed=0)
    saving = build_model(replace(TINY, gradient_checkpointing=True), seed=0)
    assert saves_memory(saving)
    assert not saves_memory(plain)
    for a, b in zip(gradients(plain), gradients(saving), strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("architecture", "ffn"),
    [(OPT, "ffn_dim"), (GPT2, "n_inner"), (LLAMA, "intermediate_size")],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_field_given_replaces_that_of_the_folder(
    architecture: PreTrainedConfig, ffn: str, tmp_path: Path
) -> None:
    config = replace(
        read_from(saved(architecture, tmp_path)), num_hidden_layers=3, vocab_size=64, ffn_dim=48
    )
    model = build_model(config, seed=0)
    assert model.config.num_hidden_layers == 3
    assert getattr(model.config, ffn) == 48
    assert model.get_input_embeddings().weight.shape == (64, 16)  # type: ignore[union-attr]
    kept = build_model(read_from(tmp_path), seed=0)
    assert num_parameters(kept) < num_parameters(model)


def test_a_width_given_gives_the_heads_their_own(tmp_path: Path) -> None:
    """Llama's config.json holds head_dim, which the width decides unless it is written there."""
    folder = saved(LLAMA, tmp_path)
    values = json.loads((folder / "config.json").read_text())
    del values["head_dim"]
    (folder / "config.json").write_text(json.dumps(values))
    found = read_model_config(replace(read_from(folder), hidden_size=32))
    assert (found.hidden_size, found.head_dim) == (32, 8)


def test_a_field_that_the_architecture_lacks_is_refused(tmp_path: Path) -> None:
    config = replace(read_from(saved(GPT2, tmp_path)), word_embed_proj_dim=8)
    with pytest.raises(UserError, match=r"^model\.word_embed_proj_dim: .*gpt2.* allowed: null$"):
        build_model(config, seed=0)


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    config = replace(read_from(saved(LLAMA, tmp_path)), num_attention_heads=1)
    with pytest.raises(UserError, match=r"^model\.num_attention_heads: 1 is not a multiple of "):
        build_model(config, seed=0)


def test_a_field_that_disagrees_with_pretrained_weights_is_refused(
    float16_opt: tuple[Path, OPTForCausalLM],
) -> None:
    config = replace(read_from(float16_opt[0]), pretrained=True)
    build_model(replace(config, hidden_size=16, ffn_dim=32), seed=0)
    with pytest.raises(UserError, match=r"^model\.ffn_dim: 64 disagrees .* allowed: 32, null$"):
        build_model(replace(config, hidden_size=16, ffn_dim=64), seed=0)


def refusal(config: ModelConfig) -> str:
    """The one line with which the model is refused."""
    with pytest.raises(UserError) as caught:
        build_model(config, seed=0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    t5 = T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=50)
    assert "is an encoder-decoder (t5)" in refusal(read_from(saved(t5, tmp_path)))


def test_more_than_a_language_model_is_refused(tmp_path: Path) -> None:
    assert "more than a language model" in refusal(read_from(saved(Gemma3Config(), tmp_path)))


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    values = OPT.to_dict() | {"quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    message = refusal(replace(read_from(tmp_path), pretrained=True))
    assert message.endswith("holds quantized weights, which cannot be trained")


def test_bert_looks_at_no_later_token(tmp_path: Path) -> None:
    bert = BertConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=50,
    )  # fmt: skip
    model = build_model(read_from(saved(bert, tmp_path)), seed=0)
    ids = torch.tensor([[1, 2, 3], [1, 2, 4]])
    first, second = model(input_ids=ids).logits
    torch.testing.assert_close(first[:2], second[:2])
    assert not torch.allclose(first[2], second[2])


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert refusal(read_from(tmp_path)) == f"model.path: {tmp_path} holds no config.json"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "no-such-model"}'])
def test_a_config_that_says_nothing_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert refusal(read_from(tmp_path)).startswith(f"model.path: {tmp_path}")


def test_a_config_with_a_value_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "opt", "hidden_size": "wide"}')
    assert refusal(read_from(tmp_path)).startswith(f"model.path: {tmp_path}")


def test_a_folder_without_weights_cannot_be_pretrained(tmp_path: Path) -> None:
    config = read_from(saved(OPT, tmp_path))
    build_model(config, seed=0)
    assert refusal(replace(config, pretrained=True)) == (
        f"model.path: {tmp_path} holds no weights (model.safetensors or pytorch_model.bin); "
        "give a folder that does, or model.pretrained=false for random ones"
    )


def test_weights_that_cannot_be_read_are_refused(
    float16_opt: tuple[Path, OPTForCausalLM],
) -> None:
    file = float16_opt[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = refusal(replace(read_from(float16_opt[0]), pretrained=True))
    assert message.startswith(f"model.path: {float16_opt[0]}: ")


def test_weights_that_lack_a_parameter_are_refused(tmp_path: Path) -> None:
    OPTForCausalLM(OPTConfig(**{**OPT.to_dict(), "num_hidden_layers": 1})).save_pretrained(tmp_path)
    message = refusal(replace(read_from(saved(OPT, tmp_path)), pretrained=True))
    assert "lack 16 of the model's parameters, model.decoder.layers.1." in message


def test_a_checkpoints_own_code_runs_only_when_allowed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import OPTConfig, OPTForCausalLM\n"
        f"Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class OwnConfig(OPTConfig):\n    model_type = 'own'\n"
        "class OwnModel(OPTForCausalLM):\n    config_class = OwnConfig\n"
        "    def __init__(self, config):\n        super().__init__(config)\n        self.half()\n"
    )
    values = OPT.to_dict() | {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_from(tmp_path)
    assert refusal(config).endswith("model.trust_remote_code=true")
    assert not (tmp_path / "ran").exists()
    model = build_model(replace(config, trust_remote_code=True), seed=0)
    assert (tmp_path / "ran").exists()
    assert dtypes(model) == {torch.float32}


def test_without_a_network_a_hub_id_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    hub._answers.cache_clear()
    began = time.monotonic()
    try:
        message = refusal(read_from("nobody/nothing"))
    finally:
        hub._answers.cache_clear()
    assert message.startswith("model.path: can't load 'nobody/nothing' from the hub: no network")
    assert time.monotonic() - began < 5  # seen 0.05; one retry of the library alone takes 23


def test_random_weights_of_a_published_size_need_no_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("precexp.model.prepare_hub", lambda key, name: pytest.fail("asked"))
    assert read_model_config(choice("opt-1.3b")).vocab_size == 50272


def test_without_a_path_every_field_is_needed() -> None:
    message = refusal(replace(TINY, ffn_dim=None))
    assert message.startswith("model.ffn_dim: null needs model.path")
