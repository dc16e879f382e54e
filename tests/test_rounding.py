"""experiment=rounding: that its arms are what they claim, and that it runs."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from precexp import run as run_module
from precexp.bench import rounding
from precexp.bench.__main__ import main
from precexp.cli import compose, compose_sweep
from precexp.config import Arm, RunConfig, UserError, conf_dir, config_hash, match_key

# By choice of conf/rounding: dtypes of momentum, variance and compensation (None: no Kahan), then
# mode, stochastic_rounding, decay, weight_rounding.
FP32, BF16 = "float32", "bfloat16"
ARMS = {
    "master": ((FP32, FP32, FP32), "default", "auto", "inside", "nearest"),
    "plain": ((BF16, BF16, None), "default", False, "inside", "nearest"),
    "stochastic_weights": ((BF16, BF16, None), "default", False, "inside", "stochastic"),
    "published": ((BF16, BF16, BF16), "published", "auto", "inside", "nearest"),
    "kahan_nearest": ((BF16, BF16, BF16), "default", False, "inside", "nearest"),
    "kahan": ((BF16, BF16, BF16), "default", "auto", "inside", "nearest"),
    "packed": ((BF16, BF16, BF16), "packed", "auto", "inside", "nearest"),
    "fp32_variance": ((BF16, FP32, BF16), "default", "auto", "inside", "nearest"),
}  # fmt: skip


@pytest.fixture(scope="module")
def planned() -> dict[str, list[tuple[RunConfig, Arm]]]:
    """The matrix's runs of one seed by choice of conf/rounding, in its order."""
    found: dict[str, list[tuple[RunConfig, Arm]]] = {}
    for overrides, run in compose_sweep(["experiment=rounding", "seed=1"], multirun=True):
        values = dict(text.split("=") for text in overrides)
        found.setdefault(values["rounding"], []).append((run.config, run.arm))
    return found


def test_the_matrix_is_eight_arms_by_two_beta2_by_three_seeds(
    planned: dict[str, list[tuple[RunConfig, Arm]]],
) -> None:
    assert list(planned) == list(ARMS)
    for runs in planned.values():
        assert [config.train.beta2 for config, _ in runs] == [0.95, 0.999]
    experiment = OmegaConf.load(conf_dir() / "experiment" / "rounding.yaml")
    assert experiment.hydra.sweeper.params.seed == "1,2,3"
    configs = [config for runs in planned.values() for config, _ in runs]
    assert len({config_hash(config) for config in configs}) == 16
    assert len({match_key(config) for config in configs}) == 2  # one for each beta2
    assert configs[0].train.lr * configs[0].train.weight_decay < 2**-9


def test_every_arm_rounds_as_its_name_says(
    planned: dict[str, list[tuple[RunConfig, Arm]]],
) -> None:
    for name, (states, *how) in ARMS.items():
        for config, _ in planned[name]:
            optim = config.optim
            assert optim.name == "anyprecision"
            kept = optim.compensation_dtype if optim.use_kahan_summation else None
            assert (optim.momentum_dtype, optim.variance_dtype, kept) == states, name
            assert [
                optim.mode, optim.stochastic_rounding, optim.decay, optim.weight_rounding,
            ] == how, name  # fmt: skip


def test_the_arms_differ_in_the_optimizer_alone(
    planned: dict[str, list[tuple[RunConfig, Arm]]],
) -> None:
    """Weights, forward pass and gradients are bf16 in all of them."""
    for runs in planned.values():
        for config, _ in runs:
            precision = config.precision
            assert (precision.param_dtype, precision.autocast_dtype) == ("bfloat16", None)
            assert precision.accumulation_dtype is None
            assert not precision.loss_scaling


def test_a_run_in_the_matrix_is_named_by_what_it_changes(
    planned: dict[str, list[tuple[RunConfig, Arm]]],
) -> None:
    labels = {name: {arm.label for _, arm in runs} for name, runs in planned.items()}
    assert labels == {
        "master": {"bf16_pure-anyprecision-state_dtype-float32"},
        "plain": {"bf16_plain-anyprecision-stochastic_rounding-false"},
        "stochastic_weights": {
            "bf16_plain-anyprecision-stochastic_rounding-false-weight_rounding-stochastic"
        },
        "published": {"bf16_pure-anyprecision_published"},
        "kahan_nearest": {"bf16_pure-anyprecision-stochastic_rounding-false"},
        "kahan": {"bf16_pure-anyprecision"},
        "packed": {"bf16_pure-anyprecision_packed"},
        "fp32_variance": {"bf16_pure-anyprecision-variance_dtype-float32"},
    }


def test_an_arm_of_the_matrix_can_be_had_alone() -> None:
    planned = compose(["rounding=packed", "model=opt-125m"])
    assert planned.arm.label == "bf16_pure-anyprecision_packed"
    assert planned.config.model.name == "opt-125m"


def _add_seed(sweep: Path, *, shift: float) -> None:
    """A second seed of each run: the first, with losses that differ by the shift and its arm."""
    for i, path in enumerate(sorted(sweep.rglob("run.json"))):
        values = json.loads(path.read_text(encoding="utf-8"))
        del values["rows_sha256"], values["own_sha256"]  # as of another writer
        values["seed"] = 2
        values["results"]["final_eval_loss"] += shift + 1e-3 * i
        copy = path.parent.parent / "seed-2"
        copy.mkdir()
        (copy / "run.json").write_text(json.dumps(values), encoding="utf-8")


def test_every_arm_of_the_matrix_trains_and_its_questions_are_answered(
    command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no number of the page is written by hand."""
    monkeypatch.setattr(run_module, "planned_memory", lambda *_: None)
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n{rounding.BEGIN}old\n{rounding.END}After.\n")
    assert command("experiment=rounding", "name=matrix", "train.beta2=0.999", "seed=1") == 0
    sweep = Path("outputs/matrix")
    _add_seed(sweep, shift=0.1)
    assert main(["rounding", str(sweep), "--output", "results", "--docs", "page.md"]) == 0
    with open("results/arms.csv", encoding="utf-8", newline="") as file:
        arms = {row["rounding"]: row for row in csv.DictReader(file)}
    assert list(arms) == list(ARMS)
    assert {name: row["bytes_per_param"] for name, row in arms.items()} == {
        "master": "16.0", "plain": "8.0", "stochastic_weights": "8.0", "published": "10.0",
        "kahan_nearest": "10.0", "kahan": "10.0", "packed": "10.0", "fp32_variance": "12.0",
    }  # fmt: skip
    with open("results/contrasts.csv", encoding="utf-8", newline="") as file:
        contrasts = list(csv.DictReader(file))
    assert [(row["arm"], row["against"]) for row in contrasts] == [
        (question.arm, question.against) for question in rounding.QUESTIONS
    ]
    for row in contrasts:
        own, other = (float(arms[row[side]]["final_eval_loss_mean"]) for side in ("arm", "against"))
        assert float(row["difference"]) == pytest.approx(own - other, abs=1e-12)
        assert float(row["ci_low"]) <= float(row["difference"]) <= float(row["ci_high"])
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"Before.\n{rounding.BEGIN}")
    assert text.endswith(f"{rounding.END}After.\n")
    assert "old" not in text
    summary = Path("results/summary.md").read_text(encoding="utf-8").rstrip("\n")
    assert summary in text
    assert rounding.fill(text, summary, name="page.md") == text


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"a\.md: no <!-- by precexp\.bench rounding --> with <!-- end"
    ):
        rounding.fill(f"{rounding.END}{rounding.BEGIN}", "text", name="a.md")


def test_what_is_no_matrix_is_refused_in_one_line(
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "planned_memory", lambda *_: None)
    assert command("rounding=master", "name=one") == 0
    capsys.readouterr()
    assert main(["rounding", "outputs/one"]) == 2
    assert capsys.readouterr().err.startswith("precexp: outputs/one: no run of rounding=plain (")
