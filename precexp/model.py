"""The model: an architecture from the YAML or a checkpoint, weights from the seed or a checkpoint.

Every parameter is float32 here. The recipe casts them afterwards, and whoever trains compiles the
model after that cast (`model.compile()` for model.compile=true), so that both see the final dtypes.
"""

import hashlib
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from transformers.utils.import_utils import is_flash_attn_2_available

from precexp.config import ModelConfig, UserError
from precexp.hub import hub_error, is_local, prepare_hub

# The fields of ModelConfig that are an OPT's architecture, and how other architectures spell them.
ARCHITECTURE = {
    "hidden_size": ("hidden_size",),
    "ffn_dim": ("ffn_dim", "intermediate_size", "n_inner"),
    "num_hidden_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings",),
    "word_embed_proj_dim": ("word_embed_proj_dim",),
    "do_layer_norm_before": ("do_layer_norm_before",),
}

# What architectures call the dropout of a block's output; attention and embeddings have others.
RESIDUAL_DROPOUTS = (
    "dropout",
    "resid_pdrop",
    "resid_dropout",
    "residual_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
)

# A folder with one of these has weights.
WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)

ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2"}


def read_model_config(config: ModelConfig) -> PreTrainedConfig:
    """The architecture; read vocab_size and, where it has one, max_position_embeddings off it.

    With every architecture field given it is OPT as written, and nothing is read from anywhere.
    Otherwise, and for pretrained weights, it is what `model.path` holds. Raises UserError.
    """
    given = {
        field: value for field in ARCHITECTURE if (value := getattr(config, field)) is not None
    }
    if config.pretrained:
        found = _read_checkpoint_config(config)
        _require_weights(found, config)
        _require_agreement(found, given, config)
    elif len(given) == len(ARCHITECTURE):
        # Nothing is padded here, and with a pad id the row of a real token would start at 0.
        found = OPTConfig(**given, pad_token_id=None)
    else:
        found = _read_checkpoint_config(config, given)
    _set_dropout(found, config)
    found.use_cache = False
    return found


def require_positions(
    architecture: PreTrainedConfig, config: ModelConfig, *, block_size: int
) -> None:
    """UserError if the model has no place for so many tokens."""
    positions = getattr(architecture, "max_position_embeddings", None)
    if positions is not None and block_size > positions:
        raise UserError(
            f"data.block_size: {block_size} is more than the {positions} positions of "
            f"model={config.name}; allowed: 2 to {positions}"
        )


def build_model(config: ModelConfig, *, seed: int) -> PreTrainedModel:
    """The model on the CPU in training mode, all parameters float32, tied ones tied.

    Weights that no checkpoint gives depend on the seed alone: the global random state is neither
    used nor changed. Raises UserError.
    """
    architecture = read_model_config(config)
    if config.attention == "flash" and not is_flash_attn_2_available():
        raise UserError(
            "model.attention: flash needs an NVIDIA GPU and the package flash-attn; "
            "allowed here: sdpa, eager"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would touch every GPU's too
        try:
            if config.pretrained:
                model = _load_checkpoint(config, architecture)
            else:
                model = AutoModelForCausalLM.from_config(
                    architecture,
                    dtype=torch.float32,
                    attn_implementation=ATTENTION[config.attention],
                    trust_remote_code=config.trust_remote_code,
                )
            if config.gradient_checkpointing:
                _enable_checkpointing(model)
        except (ValueError, ImportError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"model={config.name}: {_sentence(error)}") from None
    for param in model.parameters():  # code of a checkpoint's own may have set a dtype
        param.data = param.data.float()
    return model.train()


def _enable_checkpointing(model: PreTrainedModel) -> None:
    # transformers 5.24 gave it this name; before, it is the other
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def num_parameters(model: nn.Module) -> int:
    """The number of parameters, tied ones counted once."""
    return sum(param.numel() for param in model.parameters())


def init_hash(model: nn.Module) -> str:
    """sha256 over name, shape and float32 bytes of each parameter in order, tied ones once.

    Call it before the cast: every precision of one seed then has the same hash.
    """
    digest = hashlib.sha256()
    for name, param in model.named_parameters():
        assert param.dtype == torch.float32, f"{name} is {param.dtype}"
        digest.update(f"{name} {tuple(param.shape)}\n".encode())
        digest.update(param.detach().cpu().contiguous().view(-1).numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


def _read_checkpoint_config(
    config: ModelConfig, given: dict[str, object] | None = None
) -> PreTrainedConfig:
    """The config at `model.path`, with the given architecture fields in place of its own."""
    path = config.path
    if path is None:
        missing = next(field for field in ARCHITECTURE if getattr(config, field) is None)
        raise UserError(f"model.{missing}: null needs model.path, to read it from; give a number")
    if not is_local(path):
        prepare_hub("model.path", path)
    elif not (Path(path) / "config.json").is_file():
        raise UserError(f"model.path: {path} holds no config.json")
    try:
        found = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        if given:
            # As if config.json said so: what the class derives from these values is derived anew.
            values, _ = PreTrainedConfig.get_config_dict(path)
            found = type(found).from_dict(values | _spelled(found, given, path), name_or_path=path)
    except UserError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        if "trust_remote_code" in str(error):
            raise _needs_trust(path) from None
        raise UserError(f"model.path: {path}: {_sentence(error)}") from None
    _require_causal(found, config)
    return found


def _load_checkpoint(config: ModelConfig, architecture: PreTrainedConfig) -> PreTrainedModel:
    path = config.path
    assert path is not None
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            path,
            config=architecture,
            dtype=torch.float32,
            attn_implementation=ATTENTION[config.attention],
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"model.path: the weights of {path} lack {len(missing)} of the model's parameters, "
            f"{missing[0]} among them"
        )
    return model


def _require_weights(found: PreTrainedConfig, config: ModelConfig) -> None:
    """UserError, before anything is built, for weights that are not there or cannot be trained."""
    path = config.path
    assert path is not None
    if getattr(found, "quantization_config", None) is not None:
        raise UserError(f"model.path: {path} holds quantized weights, which cannot be trained")
    if is_local(path) and not any((Path(path) / name).is_file() for name in WEIGHTS):
        raise UserError(
            f"model.path: {path} holds no weights ({SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME}); "
            "give a folder that does, or model.pretrained=false for random ones"
        )


def _require_causal(found: PreTrainedConfig, config: ModelConfig) -> None:
    """UserError unless transformers, or trusted code, has a causal language model for it."""
    kind = found.model_type
    if found.is_encoder_decoder:
        raise UserError(
            f"model.path: {config.path} is an encoder-decoder ({kind}); "
            "allowed: causal language models"
        )
    if type(found) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if "AutoModelForCausalLM" not in (getattr(found, "auto_map", None) or {}):
            raise UserError(
                f"model.path: {config.path} ({kind}) is not a causal language model that "
                "transformers knows"
            )
        if not config.trust_remote_code:
            raise _needs_trust(str(config.path))
    if getattr(found, "vocab_size", None) is None:
        raise UserError(
            f"model.path: {config.path} ({kind}) is more than a language model; "
            "allowed: its text model alone"
        )
    heads, key_value_heads = (
        getattr(found, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    if isinstance(heads, int) and key_value_heads and heads % key_value_heads:
        raise UserError(
            f"model.num_attention_heads: {heads} is not a multiple of the {key_value_heads} "
            f"key-value heads of {config.path}"
        )
    if hasattr(found, "is_decoder"):  # BERT and its kin look ahead without it
        found.is_decoder = True


def _spelled(found: PreTrainedConfig, given: dict[str, object], path: str) -> dict[str, object]:
    """The given fields under the names that this architecture's config.json has for them."""
    spelled = {}
    for field, value in given.items():
        name = next((name for name in ARCHITECTURE[field] if hasattr(found, name)), None)
        if name is None:
            raise UserError(
                f"model.{field}: {path} ({found.model_type}) has no such setting; allowed: null"
            )
        spelled[found.attribute_map.get(name, name)] = value
    return spelled


def _require_agreement(
    found: PreTrainedConfig, given: dict[str, object], config: ModelConfig
) -> None:
    spelled = _spelled(found, given, str(config.path))
    for (field, value), name in zip(given.items(), spelled, strict=True):
        if (actual := getattr(found, name)) != value:
            raise UserError(
                f"model.{field}: {value} disagrees with the weights of {config.path}, "
                f"which have {actual}; allowed: {actual}, null"
            )


def _set_dropout(found: PreTrainedConfig, config: ModelConfig) -> None:
    """Zero turns every dropout off, another value sets that of the blocks' outputs."""
    if config.dropout == 0:
        _drop_nothing(found)
        return
    names = [name for name in RESIDUAL_DROPOUTS if hasattr(found, name)]
    if not names:
        raise UserError(
            f"model.dropout: {found.model_type} has no dropout on the outputs of its blocks; "
            "allowed: 0"
        )
    for name in names:
        setattr(found, name, config.dropout)


def _drop_nothing(found: PreTrainedConfig) -> None:
    for name, value in list(vars(found).items()):
        if isinstance(value, PreTrainedConfig):
            _drop_nothing(value)
        elif "drop" in name and type(value) in (int, float):
            setattr(found, name, 0.0)


def _needs_trust(path: str) -> UserError:
    return UserError(
        f"model.path: {path} brings Python code of its own; read it, and allow it to run with "
        "model.trust_remote_code=true"
    )


def _unreadable(path: str, error: Exception) -> UserError:
    if is_local(path):
        return UserError(f"model.path: {path}: {_sentence(error)}")
    return hub_error("model.path", path, error)


def _sentence(error: Exception) -> str:
    """The first sentence of an error of transformers', on one line."""
    return " ".join(str(error).split()).partition(". ")[0]
