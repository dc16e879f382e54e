"""Planned memory against the allocator, its parts against arithmetic, and what a run records."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, OPTConfig

from precexp import plan as command
from precexp import run as running
from precexp.bench import memory as bench
from precexp.cli import compose
from precexp.config import RunConfig, UserError
from precexp.memory import advice, ledger, planner
from precexp.memory import plan as planning
from precexp.memory.plan import Plan, plan
from precexp.memory.trace import Trace
from precexp.model import build_model
from precexp.optim import build_optimizer
from precexp.precision import build_precision
from precexp.run import OutOfMemory
from precexp.train import place

MIB = 2**20
RECIPES = ("fp32", "bf16_mixed", "fp16_amp", "bf16_pure")
ORIGINAL = ("model.dropout=0.1", "train.batch_size=12", "data.block_size=1024")


def config_of(*overrides: str) -> RunConfig:
    return compose([*bench.BASE, *overrides]).config


def saved(config: object, folder: Path) -> list[str]:
    config.save_pretrained(folder)  # type: ignore[attr-defined]
    return ["model=hf", f"model.path={folder}", "data.block_size=64", "train.batch_size=4"]


# The trace


@pytest.fixture
def traced() -> tuple[Trace, nn.Module]:
    """Around a linear layer on a CPU, before a step."""
    model = nn.Linear(8, 8, bias=False)
    trace = Trace(rounding=512, host_scalars=False)
    trace.watch_roots(model, torch.optim.SGD(model.parameters()), [])
    trace.phase("forward")
    return trace, model


def test_a_peak_counts_what_lives_at_once_rounded_as_cuda_does(
    traced: tuple[Trace, nn.Module],
) -> None:
    trace, _ = traced
    with trace:
        first = torch.zeros(129)  # 516 bytes: 1,024 of the allocator's
        second = torch.zeros(10)
        del first, second
        third = torch.zeros(300)
        del third
    timeline = trace.replay()
    assert timeline.phases == {"forward": 512 + 1536}
    assert timeline.steady_bytes == 512
    assert timeline.categories["weights"] == 512


def test_a_gradient_that_is_added_up_counts_once(traced: tuple[Trace, nn.Module]) -> None:
    """Unobserved, autograd adds in place; under a dispatch mode it does not."""
    trace, _ = traced
    trace.phase("backward")
    with trace, torch.no_grad():
        old = torch.zeros(1024)
        old = old + torch.zeros(1024)
    assert trace.replay().phases["backward"] == 512 + 2 * 4096
    del old


def test_a_view_is_not_added_to_in_place(traced: tuple[Trace, nn.Module]) -> None:
    trace, _ = traced
    trace.phase("backward")
    with trace, torch.no_grad():
        old = torch.zeros(32, 32).t()
        old = old + torch.zeros(32, 32)
    assert trace.replay().phases["backward"] == 512 + 3 * 4096
    del old


# The plan


@pytest.mark.parametrize(
    "case",
    [case for i, case in enumerate(bench.CASES) if i % 3 == 0 or "fp16" in case[0]],
    ids=" ".join,
)
def test_the_planned_peaks_are_the_allocators(case: tuple[str, ...]) -> None:
    residuals = bench.compare("", config_of(*case)).residuals
    allowed = 3e-3 if "model.gradient_checkpointing=true" in case else 1e-3
    assert max(map(abs, residuals.values())) < allowed


def test_autocasts_cache_holds_weights_that_checkpointing_lets_go() -> None:
    """Without checkpointing the casts live as long, since the backward pass needs them."""
    options = ("precision=bf16_mixed", "model.gradient_checkpointing=true")
    cached, uncached = (
        bench.compare("", config_of(*options, f"precision.autocast_cache={cache}"))
        for cache in ("true", "false")
    )
    mlps = 2 * 768 * 192 * 2  # of a layer, in bf16
    assert cached.real["forward"] - uncached.real["forward"] > 2 * mlps
    for found in (cached, uncached):
        assert max(map(abs, found.residuals.values())) < 3e-3


@pytest.mark.parametrize("precision", RECIPES)
def test_what_a_recipe_holds_is_parameters_times_bytes(precision: str) -> None:
    planned = plan(config_of(f"precision={precision}", "train.batch_size=1"), device="cpu")
    count = planned.num_parameters
    at_step = planned.phase_categories["step"]
    weight, state = (2, 6) if precision == "bf16_pure" else (4, 8)
    assert at_step["weights"] == at_step["gradients"] == weight * count
    assert at_step["optimizer_state"] == state * count
    assert planned.bytes_per_param["total"] == 2 * weight + state
    for categories, peak in (
        (planned.categories, planned.peak_bytes),
        *((planned.phase_categories[phase], planned.phases[phase]) for phase in planned.phases),
    ):
        assert sum(categories.values()) == peak


@pytest.mark.parametrize(
    ("model", "recipe", "expected"),
    [
        ("opt-125m", "pure", {"peak": 12056.6, "forward": 9700.3, "steady": 955.5}),
        ("opt-125m", "mixed", {"peak": 13652.0, "forward": 11331.9, "steady": 1433.3}),
        pytest.param("opt-1.3b", "pure", {"peak": 33399.1}, marks=pytest.mark.slow),
        pytest.param("opt-1.3b", "mixed", {"peak": 45574.7}, marks=pytest.mark.slow),
    ],
)
def test_the_original_experiment_needs_what_was_found_before(
    model: str, recipe: str, expected: dict[str, float]
) -> None:
    """The numbers of an earlier study of these shapes; ours at the same settings is no worse."""
    theirs = {
        "pure": ("precision=bf16_pure", "optim=anyprecision_published"),
        "mixed": ("precision=bf16_mixed", "optim=adamw", "optim.implementation=foreach"),
    }[recipe]
    planned, ours = (
        plan(compose([f"model={model}", *ORIGINAL, *options]).config, device="cuda")
        for options in (theirs, theirs[:1])
    )
    assert planned.peak_bytes / MIB == pytest.approx(expected["peak"], rel=1e-3)
    if "steady" in expected:
        assert planned.steady_bytes / MIB == pytest.approx(expected["steady"], rel=1e-3)
    assert ours.peak_bytes <= planned.peak_bytes
    held = ours.num_parameters * ours.bytes_per_param["total"]
    assert ours.phases["step"] <= 1.01 * held
    assert ours.closed_form_bytes == pytest.approx(ours.peak_bytes, rel=5e-3)


@pytest.mark.parametrize(
    "options",
    [
        ("precision=fp32", "model.attention=eager"),
        ("precision=bf16_mixed", "model.attention=eager"),
        ("precision=bf16_pure", "train.grad_accumulation=2"),
        ("precision=bf16_mixed", "optim=adamw", "optim.implementation=foreach",
         "train.batch_size=1", "data.block_size=32"),
        ("precision=fp32", "train.batch_size=1", "data.block_size=16"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_formula_agrees_with_the_trace(options: tuple[str, ...]) -> None:
    planned = plan(config_of(*options), device="cuda")
    assert planned.closed_form_bytes == pytest.approx(planned.peak_bytes, rel=1e-2)


def test_there_is_no_formula_for_other_models(tmp_path: Path) -> None:
    small = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=99, n_positions=64)
    assert plan(compose(saved(small, tmp_path)).config, device="cuda").closed_form_bytes is None


def test_a_model_that_drops_layers_is_planned_with_all_of_them(tmp_path: Path) -> None:
    peaks = {}
    for layerdrop in (0.0, 0.5):
        architecture = OPTConfig(
            hidden_size=32, ffn_dim=32, num_hidden_layers=4, num_attention_heads=2, vocab_size=99,
            word_embed_proj_dim=32, layerdrop=layerdrop,
        )  # fmt: skip
        options = saved(architecture, tmp_path / str(layerdrop))
        peaks[layerdrop] = plan(compose([*options, "model.dropout=0.1"]).config, device="cuda")
    assert peaks[0.5].phases == peaks[0.0].phases


@pytest.mark.parametrize(
    ("reads", "operation"),
    [
        (lambda ids: torch.nonzero(ids), "aten.nonzero.default"),
        (lambda ids: ids.detach().numpy(), "Tensor.numpy"),
    ],
)
def test_every_way_to_read_a_tensor_is_named(
    reads: Callable[[torch.Tensor], object], operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(model: object, optimizer: object, ids: list[torch.Tensor], *_: object, **__: object):
        reads(ids[0])

    monkeypatch.setattr(planning, "training_step", step)
    with pytest.raises(UserError, match=rf"{operation} in test_memory\.py, line \d+"):
        plan(config_of(), device="cuda")


def test_planning_changes_nothing_outside() -> None:
    before = torch.nn.functional.dropout, torch.get_default_dtype(), torch.get_rng_state()
    plan(config_of("model.dropout=0.1"), device="cuda")
    after = torch.nn.functional.dropout, torch.get_default_dtype(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


# What is smaller, and what fits


def test_ways_out_save_what_a_plan_of_them_says() -> None:
    config = config_of("model.attention=eager", "optim=adamw", "optim.implementation=foreach")
    planned = plan(config, device="cuda")
    ways = {way.overrides: way for way in advice.ways_out(config, planned)}
    way = ways["model.attention=sdpa"]
    sdpa = config_of("model.attention=sdpa", "optim=adamw", "optim.implementation=foreach")
    assert way.peak_bytes == plan(sdpa, device="cuda").peak_bytes
    assert way.saved_bytes == planned.peak_bytes - way.peak_bytes
    assert "model.gradient_checkpointing=true" in ways
    assert "optim.implementation=fused" not in ways  # the peak is elsewhere


def test_two_ways_together_are_none_if_one_of_them_saves_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of()
    real = plan(config, device="cpu")
    both = 300

    def fake_plan(config: RunConfig, *, device: str) -> Plan:
        halved, saving = config.train.grad_accumulation > 1, config.model.gradient_checkpointing
        peak = {(True, False): 500, (False, True): 300, (True, True): both}[halved, saving]
        return dataclasses.replace(real, peak_bytes=peak)

    monkeypatch.setattr(advice, "plan", fake_plan)
    planned = dataclasses.replace(real, peak_bytes=1000)
    assert [way.peak_bytes for way in advice.ways_out(config, planned)] == [500, 300]
    both = 200
    assert [way.peak_bytes for way in advice.ways_out(config, planned)] == [500, 300, 200]


@pytest.mark.parametrize("memory", [90, 100, 169, 170, 1000, 12345])
def test_the_largest_batch_is_the_last_that_fits(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def need(batch_size: int) -> int:
        return max(100, 50 + 10 * batch_size + batch_size // 3)

    asked = []

    def fake_plan(config: RunConfig, *, device: str) -> Plan:
        asked.append(config.train.batch_size)
        return dataclasses.replace(real, peak_bytes=need(config.train.batch_size), unseen=[])

    config = config_of("train.batch_size=1")
    real = plan(config, device="cpu")
    monkeypatch.setattr(advice, "plan", fake_plan)
    found = advice.fit(config, fake_plan(config, device="cpu"), memory_bytes=memory)
    fitting = [batch for batch in range(1, 2000) if need(batch) <= memory]
    assert found.largest_batch_size == (max(fitting) if fitting else None)
    assert found.fits == (memory >= 100)
    assert len(asked) < 25


# The command


def run_command(*arguments: str) -> int:
    return command.main([*bench.BASE, *arguments])


def test_a_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert run_command(f"plan.output={path}", "plan.gpu_memory=8GiB", "precision=bf16_pure") == 0
    values = json.loads(path.read_text())
    assert values["schema"] == 1
    assert set(values) >= {
        "peak_bytes", "phases", "steady_bytes", "categories", "bytes_per_param", "largest",
        "closed_form_bytes", "unseen",
    }  # fmt: skip
    assert set(values["phases"]) == {"forward", "backward", "step"}
    assert values["bytes_per_param"]["total"] == pytest.approx(10, rel=1e-3)
    assert values["largest"][0]["origin"]
    assert values["fit"]["fits"]
    assert path.with_suffix(".svg").exists()
    assert path.with_suffix(".png").exists()
    out = capsys.readouterr().out
    for words in ("saved activations", "peak by formula", "CUDA context", "fits in 8GiB"):
        assert words in out


def test_a_sweep_is_planned_side_by_side_each_arm_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plans.json"
    code = run_command("-m", "precision=fp32,bf16_pure", "seed=1,2", f"plan.output={path}")
    assert code == 0
    plans = json.loads(path.read_text())["plans"]
    assert [each["title"] for each in plans] == ["precision=fp32", "precision=bf16_pure"]
    assert "precision=bf16_pure" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.gpu_memory=24Gb"], "plan.gpu_memory: '24Gb' is not allowed; .* MiB, GiB, TiB"),
        (["plan.gpu_memory=big"], "plan.gpu_memory: 'big' is not allowed"),
        (["plan.output=plan.txt"], "plan.output: plan.txt is not allowed; it must be a .json"),
        (["data.block_size=4096"], "data.block_size: 4096 is more than the 512 positions"),
        (["train.batch_size=0"], "train.batch_size: 0 is not allowed"),
        (
            ["optim=anyprecision_packed", "precision.kahan=true"],
            "optim.variance_dtype: float32 is not allowed with",
        ),
        (["precision=fp8"], "precision: 'fp8' is not a choice"),
        (["model=hf"], "model.path: Missing mandatory value"),
        (["plan.output=/no/such/folder/plan.json"], "plan.output: /no/such/folder is not a folder"),
        (["plan.output=/proc/plan.json"], "plan.output: cannot write in /proc"),
        (["train.batch_size=10000000000000"], "train.batch_size, data.block_size: a batch of 10"),
        (["--config-dir=nowhere"], "--config-dir: nowhere is not a folder"),
    ],
)
def test_a_mistake_is_one_line(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*overrides) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"precexp: {message}", line), line


def test_an_interrupt_shows_and_writes_what_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object, config: RunConfig) -> dict[str, object]:
        if config.precision.param_dtype == "bfloat16":
            raise KeyboardInterrupt
        return {**plan(config, device="cuda").as_record(), "ways_out": [], "fit": None}

    monkeypatch.setattr(planner.Planner, "plan", interrupted)
    path = tmp_path / "plans.json"
    assert run_command("-m", "precision=fp32,bf16_pure", f"plan.output={path}") == 1
    assert capsys.readouterr().err == "precexp: interrupted; 1 of 2 planned\n"
    (planned,) = json.loads(path.read_text())["plans"]
    assert planned["title"] == "precision=fp32"


def test_a_crash_of_the_planning_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "COMMAND", ["sh", "-c", "read line; kill -ABRT $$"])
    with planner.Planner() as plans, pytest.raises(planner.PlanError, match="died with exit code"):
        plans.plan(config_of())


# The ledger


def test_cuda_peaks_are_read_and_reset_at_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = [100]  # what a fake allocator has handed out, and its peak
    peak = [100]

    def hold(num_bytes: int) -> None:
        allocated[0] += num_bytes
        peak[0] = max(peak[0], allocated[0])

    def reset(_: object) -> None:
        peak[0] = allocated[0]

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)

    def step(on_phase: Callable[[str], None]) -> None:
        for _ in range(2):
            on_phase("forward")
            hold(50)
            on_phase("backward")
            hold(30)
            hold(-70)
        on_phase("step")
        hold(5)
        on_phase("")

    begun = ledger.Start(device=torch.device("cuda"), baseline_bytes=40)
    peaks = ledger.step_peaks(begun, step, before=60)
    assert peaks == {"forward": 120, "backward": 150, "step": 85}


def test_what_an_earlier_run_left_on_a_gpu_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.zeros(8, 8)  # 256 bytes
    begun = ledger.Start(device=torch.device("cuda"), baseline_bytes=1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1700)
    assert ledger.held_bytes(begun, model, optimizer) == 700  # type: ignore[arg-type]
    assert ledger.model_bytes(begun, model, optimizer) == 444  # type: ignore[arg-type]


def test_what_the_model_takes_is_the_same_whenever_its_states_are_made() -> None:
    """A pure bf16 run makes them when the model is placed, another one in its first step."""
    sizes = {}
    for precision in ("fp32", "bf16_pure"):
        config = config_of(f"precision={precision}")
        model = build_model(config.model, seed=1)
        optimizer = build_optimizer(model.parameters(), config.optim, config.train, seed=1)
        cpu = torch.device("cpu")
        place(model, optimizer, build_precision(config.precision, device=cpu), device=cpu,
              compiled=False)  # fmt: skip
        sizes[precision] = ledger.model_bytes(ledger.start(cpu), model, optimizer)
    assert sizes["fp32"] == pytest.approx(2 * sizes["bf16_pure"], rel=0.01)  # buffers are fp32


def test_what_was_measured_outlives_a_kill_while_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "planned_memory", killed)
    planned = compose(
        [*bench.BASE, "train.max_steps=1", "train.eval_batches=1", "wandb.mode=disabled",
         f"data.cache_dir={tmp_path}/cache"]
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        running.run(planned.config, arm=planned.arm, directory=tmp_path / "run")
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["status"] == "completed"
    assert record["memory"]["measured"]["peak_bytes"] > 0


def test_a_model_that_does_not_even_fit_is_explained_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(running, "place", full)
    planned = compose(
        [*bench.BASE, "train.max_steps=1", "wandb.mode=disabled", f"data.cache_dir={tmp_path}"]
    )
    with pytest.raises(OutOfMemory, match="in the build phase; planned peak "):
        running.run(planned.config, arm=planned.arm, directory=tmp_path / "run")


def test_running_out_of_memory_says_where_and_what_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: object, on_phase: Callable[[str], None], **__: object) -> Iterator[None]:
        on_phase("backward")
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    monkeypatch.setattr(running, "train", train)
    planned = compose(
        [*bench.BASE, "train.max_steps=2", "wandb.mode=disabled", f"data.cache_dir={tmp_path}"]
    )
    with pytest.raises(OutOfMemory) as raised:
        running.run(planned.config, arm=planned.arm, directory=tmp_path / "run")
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["status"] == "failed"
    assert record["memory"]["planned"]["categories"]["activations"] > 0
    assert record["error"] == f"OutOfMemory: {raised.value}"
    assert "in the backward phase; planned peak " in record["error"]
    assert "train.batch_size=2 train.grad_accumulation=2 (-" in record["error"]


def test_an_arm_is_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counting(config: RunConfig, *, device: str) -> Plan:
        calls.append(config.seed)
        return plan(config, device=device)  # type: ignore[arg-type]

    monkeypatch.setattr(running, "plan", counting)
    monkeypatch.setattr(running, "_PLANS", {})
    records = []
    for seed in (1, 2):
        planned = compose(
            [*bench.BASE, f"seed={seed}", "train.max_steps=2", "train.eval_batches=1",
             "wandb.mode=disabled", f"data.cache_dir={tmp_path}/cache"]
        )  # fmt: skip
        directory = tmp_path / "arm" / f"seed-{seed}"
        running._PLANS.clear()  # as in a process of its own
        records.append(running.run(planned.config, arm=planned.arm, directory=directory))
    assert calls == [1]
    first, second = (json.loads(json.dumps(record.memory["planned"])) for record in records)
    assert first == second


def test_a_run_of_one_step_is_measured_and_planned_with_its_optimizer_states(
    tmp_path: Path,
) -> None:
    """They are made in the first update, so that the first step's peak would be too low."""
    planned = compose(
        [*bench.BASE, "precision=fp32", "train.max_steps=1", "train.eval_batches=1",
         "wandb.mode=disabled", f"data.cache_dir={tmp_path}/cache"]
    )  # fmt: skip
    memory: Any = running.run(planned.config, arm=planned.arm, directory=tmp_path / "run").memory
    expected, measured = memory["planned"], memory["measured"]
    count = expected["num_parameters"]
    assert expected["categories"]["optimizer_state"] == 8 * count  # at the peak
    assert measured["phases"] == pytest.approx(expected["phases"], rel=1e-3)


def test_what_cannot_be_measured_fails_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(ledger, "step_peaks", broken)
    monkeypatch.setattr(running, "plan", broken)
    monkeypatch.setattr(running, "_PLANS", {})
    planned = compose(
        [*bench.BASE, "train.max_steps=1", "train.eval_batches=1", "wandb.mode=disabled",
         f"data.cache_dir={tmp_path}/cache"]
    )  # fmt: skip
    record = running.run(planned.config, arm=planned.arm, directory=tmp_path / "run")
    assert record.status == "completed"
    assert record.memory == {"planned": None, "measured": None}
    assert any("memory was not measured: RuntimeError: no prof" in note for note in record.notices)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", RECIPES)
def test_on_a_gpu_the_planned_peak_is_the_allocators(precision: str) -> None:
    options = [*bench.GPU_BASE, "model=opt-125m", f"precision={precision}"]
    config = compose(options).config
    real = bench.real_peaks(config, device=torch.device("cuda"))
    planned = plan(config, device="cuda")
    assert max(real.values()) / planned.peak_bytes == pytest.approx(1.0, abs=0.03)
