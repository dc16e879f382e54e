from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from precexp import config as config_module
from precexp.config import (
    ConfigError,
    RunConfig,
    arm_of,
    conf_dir,
    config_hash,
    load,
    match_key,
    matched_values,
)

CHOICES = {
    group: sorted(p.stem for p in (conf_dir() / group).glob("*.yaml"))
    for group in ("model", "data", "precision", "optim", "rounding", "experiment")
}


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
        return compose("config", ["name=test", *overrides])


def loaded(*overrides: str) -> RunConfig:
    return load(composed(*overrides))


def test_every_choice_of_every_group_loads() -> None:
    given = {"hf": "path=somewhere", "text": "train_files=[a.txt]"}
    for group, choices in CHOICES.items():
        for choice in choices:
            needed = [f"{group}.{given[choice]}"] if choice in given else []
            if group == "data":  # the hub's data sets come in blocks that opt-tiny has no place for
                needed.append("model=opt-125m")
            assert loaded(f"{group}={choice}", *needed).name == "test"


def test_defaults_are_the_designs() -> None:
    config = loaded()
    train = config.train
    assert (config.model.name, config.data.source, config.optim.name) == (
        "opt-tiny", "bundled", "anyprecision")  # fmt: skip
    assert (train.max_steps, train.batch_size, train.lr, train.schedule) == (
        300,
        16,
        1e-3,
        "linear",
    )
    assert (train.warmup_steps, train.beta1, train.beta2, train.eps) == (20, 0.9, 0.95, 1e-8)
    assert (train.weight_decay, train.max_grad_norm) == (0.1, 1.0)
    assert (train.log_every, train.eval_every, config.data.block_size) == (10, 50, 128)


@pytest.mark.parametrize("size", ["125m", "1.3b"])
def test_the_original_experiment_is_as_published(size: str) -> None:
    config = loaded(f"experiment=opt-{size}")
    train = config.train
    assert config.model.name == f"opt-{size}"
    assert (config.data.path, config.data.subset) == ("Salesforce/wikitext", "wikitext-103-raw-v1")
    assert (config.data.block_size, train.batch_size, train.eval_batch_size) == (1024, 12, 12)
    assert (train.lr, train.schedule, train.warmup_steps) == (2e-4, "linear", 500)
    assert (train.weight_decay, train.beta1, train.beta2, train.eps) == (0.1, 0.9, 0.95, 1e-8)
    assert (train.max_grad_norm, train.epochs, train.max_steps) == (1.0, 1, None)
    assert (train.log_every, train.eval_every, train.checkpoint_every) == (10, 100, 1000)
    assert (config.seed, config.model.dropout) == (42, 0.0)


RECIPES = {  # param, autocast, loss scaling, states, Kahan: docs/architecture.md
    "fp32": ("float32", None, False, "float32", False),
    "bf16_mixed": ("float32", "bfloat16", False, "float32", False),
    "fp16_amp": ("float32", "float16", True, "float32", False),
    "bf16_pure": ("bfloat16", None, False, "bfloat16", True),
    "bf16_plain": ("bfloat16", None, False, "bfloat16", False),
}


def test_recipes_are_the_designs_table() -> None:
    assert set(RECIPES) == set(CHOICES["precision"])
    for name, expected in RECIPES.items():
        p = loaded(f"precision={name}").precision
        assert expected == (
            p.param_dtype, p.autocast_dtype, p.loss_scaling, p.state_dtype, p.kahan)  # fmt: skip


def test_one_optimizer_serves_every_recipe() -> None:
    optim = loaded("precision=bf16_pure").optim
    assert optim.name == "anyprecision"
    assert optim.use_kahan_summation
    assert optim.momentum_dtype == optim.variance_dtype == optim.compensation_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.lr=abc"], "train.lr: 'abc' is not allowed; it must be a number"),
        (["train.lr=-1"], "train.lr: -1.0"),
        (["train.lr=nan"], "train.lr: nan is not a finite number"),
        (["train.batch_size=0"], "train.batch_size: 0"),
        (["train.batch_size=1.5"], "train.batch_size: 1.5"),
        (["train.batch_size=true"], "train.batch_size: True"),
        (["train.max_steps=null"], "train.max_steps, train.epochs"),
        (["train.epochs=1"], "train.max_steps, train.epochs"),
        (["train.schedule=step"], "allowed: linear, cosine, constant"),
        (["+train.foo=1"], "train.foo: unknown key"),
        (["+trian=1"], "trian: unknown key (did you mean train?)"),
        (["~train.lr"], "train.lr: missing"),
        (["device=gpu"], "device: 'gpu' is not allowed; allowed: auto, cpu, cuda"),
        (["seed=-1"], "seed: -1"),
        (["deterministic=1"], "deterministic: 1 is not allowed; it must be true or false"),
        (["name=a/b"], "name: 'a/b'"),
        (["name=.."], "name: '..'"),
        (["data.block_size=513"], "512 positions of model=opt-tiny"),
        (["data=text"], "data.train_files"),
        (["data=text", "data.train_files=[]"], "data.train_files: give at least one file"),
        (["data=hf"], "data.path"),
        (["data=hf", "data.path=https://me:pass@hub.org/x"], "data.path: holds a password"),
        (["data=hf", "data.path='https://hub.org/x?token=abc'"], "data.path: holds a password"),
        (["wandb.entity=hf_abcdefghijklmnopqrstuvwx"], "wandb.entity: holds a password or token"),
        (["data.eval_fraction=1"], "data.eval_fraction"),
        (["model=hf"], "model.path"),
        (["model.pretrained=true"], "opt-tiny has no published checkpoint"),
        (["model.num_attention_heads=3"], "a multiple of model.num_attention_heads=3"),
        (["model.dropout=1"], "model.dropout"),
        (["precision.param_dtype=float16"], "float16 weights are refused"),
        (["precision.param_dtype=fp16"], "allowed: float32, bfloat16, float16"),
        (["precision.state_dtype=float16"], "second moment underflows"),
        (["precision=bf16_pure", "precision.autocast_dtype=bfloat16"], "needs float32 parameters"),
        (["optim.variance_dtype=float16"], "squared gradients underflow"),
        (["optim=adamw", "precision=bf16_pure", "precision.accumulation_dtype=float32"],
         "allowed with optim=adamw: null, bfloat16"),
        (["sweep.isolate=maybe"], "sweep.isolate: 'maybe' is not allowed; allowed: auto, true"),
        (["report.margin=0"], "report.margin"),
        (["report.tuned=[train.lrr]"], "did you mean train.lr?"),
        (["report.tuned=[seed]"], "report.tuned: seed is what a choice is made over"),
        (["wandb.mode=on"], "wandb.mode"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_key(overrides: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(*overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spelling", ["1e-4", "0.0001", "1E-04"])
def test_a_float_in_scientific_notation_is_a_float(spelling: str, tmp_path: Path) -> None:
    assert loaded(f"train.lr={spelling}").train.lr == 1e-4
    file = tmp_path / "values.yaml"
    file.write_text(f"lr: {spelling}\n")
    merged = OmegaConf.merge(composed(), {"train": OmegaConf.load(file)})
    assert isinstance(merged, DictConfig)
    assert load(merged).train.lr == 1e-4


def test_a_single_file_needs_no_brackets() -> None:
    assert loaded("data=text", "data.train_files=a.txt").data.train_files == ("a.txt",)


def test_hashes_ignore_what_changes_no_number() -> None:
    plain = loaded()
    renamed = loaded("name=other", "wandb.mode=disabled", "report.margin=0.01", "train.log_every=7",
                     "data.cache_dir=elsewhere", "sweep.isolate=true")  # fmt: skip
    assert config_hash(plain) == config_hash(renamed)


def test_match_key_leaves_out_only_what_a_comparison_varies() -> None:
    plain = loaded()
    for override in ("seed=7", "precision=bf16_pure", "optim=adamw"):
        other = loaded(override)
        assert match_key(other) == match_key(plain)
        assert config_hash(other) != config_hash(plain)
    for override in ("train.lr=2e-3", "data.block_size=64", "model.dropout=0.1"):
        assert match_key(loaded(override)) != match_key(plain)


def test_matched_values_name_what_differs() -> None:
    ours = matched_values(config_module.as_dict(loaded()))
    theirs = matched_values(config_module.as_dict(loaded("train.lr=2e-3", "precision=bf16_pure")))
    assert {key for key in ours if ours[key] != theirs[key]} == {"train.lr"}


def arm(*overrides: str, precision: str = "fp32", optim: str = "anyprecision"):
    choices = (f"precision={precision}", f"optim={optim}")
    return arm_of(
        composed(*choices, *overrides), precision=precision, optim=optim, base=composed(*choices)
    )


def test_an_arm_is_labelled_by_its_choices_and_overrides() -> None:
    assert arm(precision="bf16_pure").label == "bf16_pure-anyprecision"
    changed = arm("optim.variance_dtype=float32", "train.lr=5e-4", precision="bf16_pure")
    assert changed.label == "bf16_pure-anyprecision-variance_dtype-float32"
    assert changed.overrides == {"optim.variance_dtype": "float32"}


def test_an_override_of_the_recipe_that_the_optimizer_follows_counts_once() -> None:
    assert arm("precision.kahan=false", precision="bf16_pure").overrides == {
        "precision.kahan": False
    }


def test_labels_are_folder_names() -> None:
    spelled = replace(arm(), overrides={"optim.eps": "1e-8 /x", "optim.a": None, "optim.b": True})
    assert spelled.label == "fp32-anyprecision-eps-1e-8__x-a-null-b-true"
