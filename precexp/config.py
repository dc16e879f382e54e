"""What a run is, as typed values: names, types and rules. The values live in conf/*.yaml."""

import dataclasses
import difflib
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from precexp.redact import redacted

Dtype = Literal["float32", "bfloat16", "float16"]

# What may differ between two runs of one config_hash: it changes no number of the run.
NOT_HASHED = (
    "name",
    "wandb",
    "report",
    "sweep",
    "plan",
    "data.cache_dir",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep_last",
    "train.probe_every",
)
# What may differ, besides, between two runs that are compared.
NOT_MATCHED = ("seed", "precision", "optim")
# What `report.tuned` may name: it makes a recipe train well or badly, and leaves alone the initial
# weights, the tokens served and how they are evaluated, without which nothing would match.
TUNABLE = (
    "train.lr",
    "train.beta1",
    "train.beta2",
    "train.eps",
    "train.weight_decay",
    "train.schedule",
    "train.warmup_steps",
    "train.max_grad_norm",
    "model.dropout",
)
# Of memory, in bytes.
UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class UserError(ValueError):
    """A mistake of the user's: one line that names the key or file and what is allowed."""


class ConfigError(UserError):
    """A value in the config that is not allowed."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str
    path: str | None
    pretrained: bool
    hidden_size: int | None
    ffn_dim: int | None
    num_hidden_layers: int | None
    num_attention_heads: int | None
    vocab_size: int | None
    max_position_embeddings: int | None
    word_embed_proj_dim: int | None
    do_layer_norm_before: bool | None
    dropout: float
    attention: Literal["sdpa", "eager", "flash"]
    gradient_checkpointing: bool
    compile: bool
    trust_remote_code: bool

    def __post_init__(self) -> None:
        _require(0 <= self.dropout < 1, "model.dropout", self.dropout, "in [0, 1)")
        for key in (
            "hidden_size",
            "ffn_dim",
            "num_hidden_layers",
            "num_attention_heads",
            "vocab_size",
            "max_position_embeddings",
            "word_embed_proj_dim",
        ):
            value = getattr(self, key)
            _require(value is None or value > 0, f"model.{key}", value, "positive")
        if self.pretrained and self.path is None:
            raise ConfigError(
                f"model.pretrained=true needs model.path (a folder or hub id): {self.name} has no "
                "published checkpoint"
            )
        if self.hidden_size and self.num_attention_heads:
            _require(
                self.hidden_size % self.num_attention_heads == 0,
                "model.hidden_size",
                self.hidden_size,
                f"a multiple of model.num_attention_heads={self.num_attention_heads}",
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    source: Literal["bundled", "files", "dataset"]
    path: str | None
    subset: str | None
    train_files: tuple[str, ...]
    eval_files: tuple[str, ...]
    text_column: str
    rows: Literal["auto", "documents", "lines"]
    encoding_errors: Literal["strict", "replace"]
    tokenizer: str | None
    block_size: int
    eval_fraction: float
    cache_dir: str

    def __post_init__(self) -> None:
        _require(self.block_size >= 2, "data.block_size", self.block_size, "at least 2")
        _require(0 < self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "in (0, 1)")
        if self.source == "files" and not self.train_files:
            raise ConfigError("data.train_files: give at least one file, as [a.txt,b.txt]")
        if self.source == "dataset" and self.path is None:
            raise ConfigError("data.path: give a hub id or a folder written by save_to_disk")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    param_dtype: Dtype
    autocast_dtype: Dtype | None
    autocast_cache: bool
    loss_scaling: bool
    initial_scale: float
    scale_growth_interval: int
    accumulation_dtype: Dtype | None
    state_dtype: Dtype
    kahan: bool
    allow_emulated_bf16: bool

    def __post_init__(self) -> None:
        if self.param_dtype == "float16":
            raise ConfigError(
                "precision.param_dtype: float16 weights are refused, because eps and small updates "
                "underflow in them; allowed: float32, bfloat16 (fp16 training is fp16_amp)"
            )
        if self.state_dtype == "float16":
            raise ConfigError(
                "precision.state_dtype: float16 is refused, because the second moment underflows; "
                "allowed: float32, bfloat16"
            )
        if self.autocast_dtype == "float32":
            raise ConfigError(
                "precision.autocast_dtype: float32 is no autocast; allowed: bfloat16, float16, null"
            )
        if self.accumulation_dtype == "float16":
            raise ConfigError(
                "precision.accumulation_dtype: float16 is refused; allowed: float32, bfloat16, null"
            )
        if self.autocast_dtype is not None and self.param_dtype != "float32":
            raise ConfigError(
                f"precision.autocast_dtype: {self.autocast_dtype} needs float32 parameters, "
                f"not {self.param_dtype}; allowed here: null"
            )
        _require(self.initial_scale > 0, "precision.initial_scale", self.initial_scale, "positive")
        _require(
            self.scale_growth_interval > 0,
            "precision.scale_growth_interval",
            self.scale_growth_interval,
            "positive",
        )


@dataclass(frozen=True, kw_only=True)
class AnyPrecisionConfig:
    name: Literal["anyprecision"]
    momentum_dtype: Dtype
    variance_dtype: Dtype
    compensation_dtype: Dtype
    use_kahan_summation: bool
    mode: Literal["default", "packed", "published"]
    implementation: Literal["auto", "native", "triton", "aten"]
    stochastic_rounding: Literal["auto"] | bool
    decay: Literal["inside", "outside"]
    weight_rounding: Literal["nearest", "stochastic"]

    def __post_init__(self) -> None:
        if self.use_kahan_summation and self.weight_rounding == "stochastic":
            raise ConfigError(
                "optim.weight_rounding: stochastic is for weights without Kahan summation, as in "
                "precision=bf16_plain; allowed here: nearest"
            )
        if self.mode == "packed" and self.use_kahan_summation and self.variance_dtype != "bfloat16":
            raise ConfigError(
                f"optim.variance_dtype: {self.variance_dtype} is not allowed with "
                "optim.mode=packed; allowed: bfloat16"
            )
        if self.variance_dtype == "float16":
            raise ConfigError(
                "optim.variance_dtype: float16 is refused, because squared gradients underflow; "
                "allowed: float32, bfloat16"
            )


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    name: Literal["adamw"]
    implementation: Literal["auto", "fused", "foreach", "loop"]


OptimConfig = AnyPrecisionConfig | AdamWConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    max_steps: int | None
    epochs: int | None
    batch_size: int
    eval_batch_size: int
    grad_accumulation: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    schedule: Literal["linear", "cosine", "constant"]
    warmup_steps: int
    max_grad_norm: float | None
    log_every: int
    eval_every: int
    eval_batches: int | None
    checkpoint_every: int | None
    keep_last: int
    probe_every: int | None

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.epochs is None):
            raise ConfigError("train.max_steps, train.epochs: give one of them, the other null")
        for key in ("batch_size", "eval_batch_size", "grad_accumulation", "log_every", "keep_last"):
            _require(getattr(self, key) > 0, f"train.{key}", getattr(self, key), "positive")
        for key in (
            "max_steps",
            "epochs",
            "eval_batches",
            "checkpoint_every",
            "probe_every",
            "max_grad_norm",
        ):
            value = getattr(self, key)
            _require(value is None or value > 0, f"train.{key}", value, "positive or null")
        _require(self.eval_every > 0, "train.eval_every", self.eval_every, "positive")
        _require(self.lr >= 0, "train.lr", self.lr, "at least 0")
        _require(self.eps > 0, "train.eps", self.eps, "positive")
        _require(self.weight_decay >= 0, "train.weight_decay", self.weight_decay, "at least 0")
        _require(0 <= self.beta1 < 1, "train.beta1", self.beta1, "in [0, 1)")
        _require(0 <= self.beta2 < 1, "train.beta2", self.beta2, "in [0, 1)")
        _require(self.warmup_steps >= 0, "train.warmup_steps", self.warmup_steps, "at least 0")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    output: str | None
    device: Literal["cuda", "cpu"]
    gpu_memory: str | None

    def __post_init__(self) -> None:
        if self.output is not None:
            _require(self.output.endswith(".json"), "plan.output", self.output, "a .json file")
        if self.gpu_memory is not None:
            parse_bytes("plan.gpu_memory", self.gpu_memory)


# What a report compares; less is better.
Metric = Literal[
    "final_eval_loss",
    "last_tenth_eval_loss",  # mean over the last 10 % of the evaluations
    "final_train_loss",
    "eval_bits_per_byte",
    "eval_perplexity",
]


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    margin: float
    reference: str | None
    metric: Metric
    tuned: tuple[str, ...]

    def __post_init__(self) -> None:
        _require(self.margin > 0, "report.margin", self.margin, "positive")
        check_tuned(self.tuned)


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    isolate: Literal["auto"] | bool
    fail_fast: bool


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    mode: Literal["auto", "online", "offline", "disabled"]
    project: str
    entity: str | None
    tags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str
    seed: int
    device: Literal["auto", "cpu", "cuda"]
    deterministic: bool
    model: ModelConfig
    data: DataConfig
    precision: PrecisionConfig
    optim: OptimConfig
    train: TrainConfig
    plan: PlanConfig
    report: ReportConfig
    sweep: SweepConfig
    wandb: WandbConfig

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self.name) or set(self.name) <= {"."}:
            raise ConfigError(
                f"name: {self.name!r} is a folder's name; allowed: letters, digits, '.', '_', '-'"
            )
        _require(0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2^63)")
        positions = self.model.max_position_embeddings
        if positions is not None and self.data.block_size > positions:
            raise ConfigError(
                f"data.block_size: {self.data.block_size} is more than the {positions} positions "
                f"of model={self.model.name}; allowed: 2 to {positions}"
            )
        if (
            isinstance(self.optim, AnyPrecisionConfig)
            and self.optim.mode == "packed"
            and self.optim.use_kahan_summation
            and self.precision.param_dtype != "bfloat16"
        ):
            raise ConfigError(
                "optim.mode: packed needs bfloat16 parameters where Kahan summation is on; allowed "
                f"with precision.param_dtype={self.precision.param_dtype}: default, published"
            )
        if isinstance(self.optim, AdamWConfig) and self.precision.accumulation_dtype not in (
            None,
            self.precision.param_dtype,
        ):
            raise ConfigError(
                "precision.accumulation_dtype: torch's AdamW needs gradients of the parameters' "
                f"dtype; allowed with optim=adamw: null, {self.precision.param_dtype}"
            )


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The side of a comparison that a run is on: which recipe and which optimizer.

    `overrides` maps the full key of each value that departs from the composed choice files to it.
    """

    precision: str
    optim: str
    overrides: Mapping[str, object]

    @property
    def label(self) -> str:
        parts = [self.precision, self.optim]
        for key, value in self.overrides.items():
            parts += [key.rpartition(".")[2], "null" if value is None else _spelled(value)]
        return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(parts))


def conf_dir() -> Path:
    """The folder of the YAML files: inside the package in a wheel, beside it in a checkout."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "conf"


def load(composed: DictConfig) -> RunConfig:
    """The composed config as a RunConfig; ConfigError names the key and the allowed values."""
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "config"
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from None
    config = _parse(RunConfig, values, "")
    assert isinstance(config, RunConfig)
    return config


def parse_bytes(key: str, text: str) -> int:
    """ "24GiB" as a number of bytes; ConfigError names the key and the allowed units."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)", text.strip())
    if found is None or found[2] not in UNITS or float(found[1]) == 0:
        raise ConfigError(
            f"{key}: {text!r} is not allowed; it must be a positive number and one of "
            f"{', '.join(UNITS)}, as 24GiB"
        )
    return int(float(found[1]) * UNITS[found[2]])


def as_dict(config: RunConfig) -> dict[str, object]:
    """The config as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def config_hash(config: RunConfig) -> str:
    """sha256 over everything that can change a number of the run (docs/architecture.md)."""
    return _hash_without(as_dict(config), NOT_HASHED)


def match_key(config: RunConfig) -> str:
    """sha256 over everything that must be equal between runs that are compared."""
    return _hash_without(as_dict(config), NOT_HASHED + NOT_MATCHED)


def match_key_without(config: Mapping[str, object], tuned: Sequence[str]) -> str:
    """The match key of a resolved config as it is when the tuned keys may differ, too."""
    return _hash_without(config, (*NOT_HASHED, *NOT_MATCHED, *tuned))


def matched_values(config: Mapping[str, object], tuned: Sequence[str] = ()) -> dict[str, object]:
    """The values under the match key of a resolved config, as {full key: value}."""
    return dict(flatten(_without(config, (*NOT_HASHED, *NOT_MATCHED, *tuned))))


def check_tuned(keys: Sequence[str]) -> None:
    """Raises ConfigError for a key that `report.tuned` may not name."""
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise ConfigError(f"report.tuned: {key} is given twice")
        if key not in TUNABLE:
            allowed = f"allowed: {', '.join(TUNABLE)}"
            raise ConfigError(f"report.tuned: {_why_not_tuned(key)}; {allowed}")


def _why_not_tuned(key: str) -> str:
    known = set(_keys_of(RunConfig))
    if key == "seed":
        return "seed is what a choice is made over, and a best seed would be luck"
    if key.partition(".")[0] in NOT_MATCHED:
        return f"{key} tells the arms apart, and each is to be compared"
    if key not in known:
        return f"{key} is an unknown key{_did_you_mean(key, known)}"
    if any(key == name or key.startswith(f"{name}.") for name in NOT_HASHED):
        return f"{key} changes no number of a run"
    return f"{key} changes what is trained on or evaluated, so that runs would not match"


def _keys_of(kind: type, prefix: str = "") -> Iterator[str]:
    """The full keys of the blocks that a config has, and of all that is in them."""
    for name, hint in typing.get_type_hints(kind).items():
        yield f"{prefix}{name}"
        for inner in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(inner):
                yield from _keys_of(typing.cast(type, inner), f"{prefix}{name}.")


def differing_keys(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """What differs under the config hash between two resolved configs, each as `key: a, not b`."""
    before, after = (dict(flatten(_without(config, NOT_HASHED))) for config in (one, other))
    return [
        f"{key}: {before.get(key, 'absent')}, not {after.get(key, 'absent')}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]


def arm_of(composed: DictConfig, *, precision: str, optim: str, base: DictConfig) -> Arm:
    """The arm of a composed config, given its two choices and `base`, composed from them alone.

    The optimizer's choice file takes dtypes from the recipe, so it is resolved under the recipe as
    overridden: precision.kahan=false is one override, not two.
    """
    under_recipe = OmegaConf.create({"precision": composed.precision, "optim": base.optim})
    plain = {
        **_leaves({"precision": base.precision}),
        **_leaves({"optim": under_recipe.optim}),
    }
    actual = _leaves({"precision": composed.precision, "optim": composed.optim})
    overrides = {key: value for key, value in actual.items() if plain.get(key) != value}
    return Arm(precision=precision, optim=optim, overrides=overrides)


def _leaves(groups: Mapping[str, DictConfig]) -> dict[str, object]:
    return {
        f"{group}.{key}": value
        for group, node in groups.items()
        for key, value in OmegaConf.to_container(node, resolve=True).items()  # type: ignore[union-attr]
    }


def _require(holds: bool, key: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{key}: {value} is not allowed; it must be {allowed}")


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse(kind: object, value: object, key: str) -> object:
    """`value` as `kind`; ConfigError names `key`."""
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(typing.cast(type, kind), value, key)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{key}: {value!r} is not allowed; allowed: {_allowed(kind)}")
        return value
    if origin in (types.UnionType, typing.Union):
        return _parse_union(arguments, value, key)
    if origin is tuple:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list):
            raise ConfigError(f"{key}: {value!r} is not a list; write [a,b]")
        return tuple(_parse(arguments[0], item, key) for item in value)
    return _parse_scalar(typing.cast(type, kind), value, key)


def _parse_dataclass(kind: type, value: object, key: str) -> object:
    if not isinstance(value, dict):
        raise ConfigError(f"{key}: {value!r} is not a block of keys")
    fields = typing.get_type_hints(kind)
    prefix = f"{key}." if key else ""
    for name in value:
        if name not in fields:
            raise ConfigError(
                f"{prefix}{name}: unknown key{_did_you_mean(str(name), fields)}; "
                f"allowed: {', '.join(f'{prefix}{field}' for field in fields)}"
            )
    for name in fields:
        if name not in value:
            raise ConfigError(f"{prefix}{name}: missing")
    return kind(**{n: _parse(hint, value[n], f"{prefix}{n}") for n, hint in fields.items()})


def _parse_union(kinds: tuple[object, ...], value: object, key: str) -> object:
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if all(dataclasses.is_dataclass(kind) for kind in kinds):  # told apart by their `name`
        names = {typing.get_args(typing.get_type_hints(kind)["name"])[0]: kind for kind in kinds}
        name = value.get("name") if isinstance(value, dict) else value
        if name not in names:
            raise ConfigError(f"{key}.name: {name!r} is not allowed; allowed: {', '.join(names)}")
        return _parse(names[name], value, key)
    errors = []
    for kind in kinds:
        try:
            return _parse(kind, value, key)
        except ConfigError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    allowed = ", ".join(_allowed(kind) for kind in kinds)
    raise ConfigError(f"{key}: {value!r} is not allowed; allowed: {allowed}")


def _parse_scalar(kind: type, value: object, key: str) -> object:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{key}: {value} is not a finite number")
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        if redacted(str(value)) != str(value):
            raise ConfigError(
                f"{key}: holds a password or token, and configs are recorded; leave it to the "
                "environment (HF_TOKEN, WANDB_API_KEY) or to ~/.netrc"
            )
        return str(value)
    raise ConfigError(f"{key}: {value!r} is not allowed; it must be {_allowed(kind)}")


def _allowed(kind: object) -> str:
    if typing.get_origin(kind) is Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[
        typing.cast(type, kind)
    ]


def _did_you_mean(name: str, names: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _hash_without(values: Mapping[str, object], keys: tuple[str, ...]) -> str:
    text = json.dumps(_without(values, keys), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _without(values: Mapping[str, object], keys: tuple[str, ...]) -> dict[str, object]:
    left = {}
    for name, value in values.items():
        if name in keys:
            continue
        inner = tuple(key.removeprefix(f"{name}.") for key in keys if key.startswith(f"{name}."))
        left[name] = _without(value, inner) if isinstance(value, Mapping) else value
    return left


def flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
