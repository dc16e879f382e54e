from dataclasses import replace

import pytest
import torch
from torch import nn

from precexp import precision as precision_module
from precexp.config import UserError, load
from precexp.precision import (
    Census,
    CensusError,
    Precision,
    build_precision,
    check_census,
    take_census,
)
from tests.test_config import composed

CPU = torch.device("cpu")


def recipe(*overrides: str) -> Precision:
    return build_precision(load(composed(*overrides)).precision, device=CPU)


class Tied(nn.Module):
    """An embedding tied to its head, a norm and a float32 buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("frequencies", torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(ids)))


def stepped(precision: Precision) -> Census:
    """The census of a model after one SGD step with momentum under the recipe."""
    model = Tied()
    precision.cast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with precision.forward_context():
        logits = model(torch.arange(6).view(2, 3))
        loss = logits.float().square().mean()
    precision.build_scaler().scale(loss).backward()
    optimizer.step()
    return take_census(model, optimizer=optimizer, logits=logits, loss=loss)


EXPECTED = {  # parameters, forward, gradients
    "fp32": (torch.float32, torch.float32, torch.float32),
    "bf16_mixed": (torch.float32, torch.bfloat16, torch.float32),
    "fp16_amp": (torch.float32, torch.float16, torch.float32),
    "bf16_pure": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "bf16_plain": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_gives_the_dtypes_it_promises(name: str) -> None:
    precision = recipe(f"precision={name}")
    census = stepped(precision)
    found = tuple(census.dtypes(role) for role in ("parameters", "forward", "gradients"))
    assert found == tuple({dtype} for dtype in EXPECTED[name])
    check_census(census, precision.promised() | {"momentum_buffer": EXPECTED[name][0]})


def test_only_parameters_are_cast_and_tied_ones_stay_tied() -> None:
    model = Tied()
    recipe("precision=bf16_pure").cast_parameters(model)
    assert model.head.weight is model.embedding.weight
    assert model.norm.weight.dtype == torch.bfloat16
    assert model.get_buffer("frequencies").dtype == torch.float32


def test_gradients_accumulate_in_the_dtype_asked_for() -> None:
    precision = recipe("precision=bf16_pure", "precision.accumulation_dtype=float32")
    model = Tied()
    precision.cast_parameters(model)
    tiny = 2**-10  # a bf16 sum that starts at 1 rounds every such addend away
    for scale in (1.0, *[tiny] * 64):
        (model.norm.weight.sum() * scale).backward()
    assert model.norm.weight.dtype == torch.bfloat16
    assert model.norm.weight.grad is not None
    assert model.norm.weight.grad.dtype == torch.float32
    torch.testing.assert_close(model.norm.weight.grad, torch.full((4,), 1 + 64 * tiny))


def test_tied_parameters_are_counted_once() -> None:
    census = take_census(Tied())
    assert census.num_parameters == 10 * 4 + 2 * 4
    assert census.bytes_per_param(["parameters"]) == 4.0


def test_a_census_before_any_step_says_null_of_what_it_has_not_seen() -> None:
    found = take_census(Tied()).as_record()["bytes_per_param"]
    assert found == {"weights": 4.0, "gradients": None, "states": None, "total": None}


def test_bytes_per_param_leave_out_the_step_counters() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    census = take_census(model, optimizer=optimizer)
    assert census.as_record()["bytes_per_param"] == {
        "weights": 4.0, "gradients": 4.0, "states": 8.0, "total": 16.0}  # fmt: skip
    assert census.dtypes("step") == {torch.float32}


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("parameters", "parameters should be torch.float16 but are torch.bfloat16"),
        ("momentum_buffer", "momentum_buffer should be torch.float16 but are torch.bfloat16"),
        ("exp_avg", "exp_avg should be torch.float16 but are none at all"),
    ],
)
def test_a_dtype_that_was_not_promised_is_an_error(role: str, message: str) -> None:
    precision = recipe("precision=bf16_pure")
    promised = precision.promised() | {"momentum_buffer": torch.bfloat16, role: torch.float16}
    with pytest.raises(CensusError, match=message):
        check_census(stepped(precision), promised)


def test_a_state_that_was_not_promised_is_an_error() -> None:
    precision = recipe("precision=bf16_pure")
    with pytest.raises(CensusError, match="momentum_buffer"):
        check_census(stepped(precision), precision.promised())


def test_disabled_parts_are_no_ops() -> None:
    precision = recipe("precision=fp32")
    assert not precision.build_scaler().is_enabled()
    with precision.forward_context():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    return torch.device("cuda")


@pytest.mark.parametrize("name", ["bf16_pure", "bf16_mixed", "bf16_plain"])
def test_bf16_is_refused_where_a_gpu_only_emulates_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = on_a_gpu(monkeypatch, (7, 5))
    config = load(composed(f"precision={name}")).precision
    with pytest.raises(
        UserError, match=r"Tesla T4 has no native bf16 \(capability 7.5, needed 8.0"
    ):
        build_precision(config, device=device)
    build_precision(replace(config, allow_emulated_bf16=True), device=device)


def test_other_recipes_and_newer_gpus_are_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    old = on_a_gpu(monkeypatch, (7, 5))
    for name in ("fp32", "fp16_amp"):
        build_precision(load(composed(f"precision={name}")).precision, device=old)
    new = on_a_gpu(monkeypatch, precision_module.NATIVE_BF16_CAPABILITY)
    build_precision(load(composed("precision=bf16_pure")).precision, device=new)
