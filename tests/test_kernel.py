"""The compiled step against torch's operations, its random bits, and where it comes from.

It is the native one; in a process under TRITON_INTERPRET=1, which test_triton.py starts, Triton's.
"""

import copy
import io
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from precexp.optim import AnyPrecisionAdamW, kernel
from precexp.optim.kernel import RandomBits

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = "triton" if INTERPRETED else "native"
IMPLEMENTATIONS = (COMPILED, "aten")
SHAPES = [(33, 57), (1031,), (1,), (), (0, 3), (2, 3)]

# (parameter, momentum, variance, compensation), all that recipes make and some that they do not
MIXES = [
    (BF16, BF16, BF16, BF16),
    (BF16, BF16, BF16, None),
    (BF16, FP32, FP32, BF16),
    (BF16, BF16, FP32, FP32),
    (FP32, FP32, FP32, None),
    (FP32, BF16, BF16, BF16),
    (FP16, FP16, BF16, FP16),
]

PLACE = 2**-16  # of the largest bf16 momenta under gradients of 0.01


def made_params(
    dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES, device: str = "cpu"
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) * 0.02 for shape in shapes]
    return [nn.Parameter(weight.to(device, dtype)) for weight in weights]


def made(
    mix: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None] = MIXES[0],
    *,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    device: str = "cpu",
    **options: Any,
) -> AnyPrecisionAdamW:
    param, momentum, variance, compensation = mix
    kahan = {} if compensation is None else {"compensation_buffer_dtype": compensation}
    return AnyPrecisionAdamW(
        made_params(param, shapes, device),
        use_kahan_summation=compensation is not None,
        momentum_dtype=momentum,
        variance_dtype=variance,
        **{"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1, **kahan, **options},
    )


def run(optimizer: AnyPrecisionAdamW, *, steps: int, first: int = 0) -> AnyPrecisionAdamW:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for param in params_of(optimizer):
            grad = torch.randn(param.shape, generator=generator) * 0.01
            param.grad = grad.to(param.device, param.dtype)
        optimizer.step()
    return optimizer


def difference_of_masters(mix: Any) -> float:
    """How far those of two implementations may be apart after a few steps."""
    param, momentum, _, compensation = mix
    if compensation is None and param != FP32:
        return 2e-4  # a unit of a weight of 0.05
    return 1e-5 if momentum == BF16 else 1e-6


def params_of(optimizer: AnyPrecisionAdamW) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def buffers_of(optimizer: AnyPrecisionAdamW) -> list[Tensor]:
    """Parameters and states, in order."""
    return [
        tensor.detach()
        for param in params_of(optimizer)
        for tensor in (param, *optimizer.state[param].values())
    ]


def same(first: AnyPrecisionAdamW, second: AnyPrecisionAdamW) -> bool:
    pairs = zip(buffers_of(first), buffers_of(second), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("options", [{}, {"stochastic_rounding": False}, {"decay": "outside"}])
@pytest.mark.parametrize("mix", MIXES)
def test_the_compiled_step_is_that_of_torchs_operations(mix: Any, options: dict) -> None:
    """Up to a place: a compiler may fuse a product and a sum, and ties go elsewhere by turns."""
    compiled, plain = (
        run(made(mix, implementation=name, **options), steps=3) for name in IMPLEMENTATIONS
    )
    for a, b in zip(params_of(compiled), params_of(plain), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            left, right = compiled.state[a][key], plain.state[b][key]
            unit = torch.finfo(left.dtype).eps
            atol = PLACE if left.dtype == BF16 and key == "exp_avg" else 1e-7
            torch.testing.assert_close(left, right, rtol=2 * unit, atol=atol)
    for a, b in zip(compiled.master_weights(), plain.master_weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=difference_of_masters(mix))


@pytest.mark.parametrize("options", [{}, {"stochastic_rounding": False}, {"decay": "outside"}])
def test_the_compiled_packed_step_is_that_of_torchs_operations(options: dict) -> None:
    compiled, plain = (
        run(made(mode="packed", implementation=name, **options), steps=3)
        for name in IMPLEMENTATIONS
    )
    for a, b in zip(compiled.master_weights(), plain.master_weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-16, atol=1e-5)
    assert all(
        compiled.state[param]["compensation"].dtype == torch.int16 for param in params_of(compiled)
    )


# Random bits


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_weight_is_rounded_up_as_often_as_it_lies_above(implementation: str) -> None:
    count = 200_000
    weight = nn.Parameter(torch.ones(count, dtype=BF16))
    optimizer = AnyPrecisionAdamW(
        [weight], lr=2**-10, betas=(0.0, 0.0), eps=1e-30, variance_dtype=FP32,
        weight_rounding="stochastic", implementation=implementation,  # type: ignore[arg-type]
    )  # fmt: skip
    weight.grad = torch.full_like(weight, -1.0)
    optimizer.step()  # to 1 + 2^-10, an eighth of the way to the next bf16
    up = (weight > 1).sum().item()
    assert set(weight.tolist()) == {1.0, 1 + 2**-7}
    assert abs(up - count / 8) < 5 * math.sqrt(count * 7 / 64)


def test_both_implementations_draw_the_same_bits() -> None:
    weights = []
    for implementation in IMPLEMENTATIONS:
        weight = nn.Parameter(torch.ones(70_001, dtype=BF16))  # over two blocks
        optimizer = AnyPrecisionAdamW(
            [weight], lr=2**-9, betas=(0.0, 0.0), eps=1e-30, variance_dtype=FP32,
            weight_rounding="stochastic", implementation=implementation,  # type: ignore[arg-type]
        )  # fmt: skip
        for _ in range(3):
            weight.grad = torch.full_like(weight, -1.0)
            optimizer.step()
        weights.append(weight)
    assert torch.equal(*weights)


def bits_of(seed: int, step: int) -> RandomBits:
    return RandomBits.of(seed, step, torch.device("cpu"))


def test_bits_are_even_and_differ_between_steps_and_seeds() -> None:
    draws = [bits_of(*key).table[: 2**16].double() for key in ((0, 1), (0, 2), (1, 1))]
    spread = 2**16 / math.sqrt(12)  # of a uniform variable on [0, 2^16)
    for draw in draws:
        assert abs(draw.mean().item() - (2**16 - 1) / 2) < 5 * spread / 2**8
        assert draw.std().item() == pytest.approx(spread, rel=1e-2)
    neighbours = torch.stack([draws[0][:-1], draws[0][1:]])
    for pair in (*map(torch.stack, itertools.combinations(draws, 2)), neighbours):
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 5 / 2**8


def test_blocks_and_tensors_begin_at_places_of_their_own() -> None:
    bits = bits_of(3, 4)
    for places in (
        [bits.place(10**9, block) for block in range(2000)],
        [bits.place(numel, 0) for numel in range(768, 768 + 2000)],
    ):
        assert all(0 <= place < 2**16 and place % 8 == 0 for place in places)
        assert len(set(places)) > 1000  # of 2^13 places
    assert bits.place(10**9, 0) != bits_of(3, 5).place(10**9, 0)


@pytest.mark.parametrize("mode", ["default", "packed"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_grouping_changes_no_bit(mode: str, implementation: str) -> None:
    runs = []
    for order in ((0, 1, 2), (2, 0, 1)):
        params = made_params(BF16, [(5, 7), (33,), (4, 4)])
        groups = [{"params": [params[i]]} for i in order] if order[0] else [{"params": params}]
        optimizer = AnyPrecisionAdamW(
            groups,
            use_kahan_summation=True,
            momentum_dtype=BF16,
            mode=mode,  # type: ignore[arg-type]
            implementation=implementation,  # type: ignore[arg-type]
        )
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(BF16)
            optimizer.step()
        runs.append([tensor for p in params for tensor in (p, *optimizer.state[p].values())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# Resuming


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("mode", "mix"),
    [("default", MIXES[0]), ("packed", MIXES[0])]
    if INTERPRETED
    else [*(("default", mix) for mix in MIXES), *(("published", mix) for mix in MIXES[:5]),
          ("packed", MIXES[0])],
)  # fmt: skip
def test_a_resumed_run_is_the_uninterrupted_one(mode: str, mix: Any, implementation: str) -> None:
    options: dict[str, Any] = {
        "mode": mode, "implementation": implementation, "shapes": [(33, 57), (1031,), ()],
    }  # fmt: skip
    whole = run(made(mix, **options), steps=20)
    stopped = run(made(mix, **options), steps=10)
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)
    file.seek(0)
    resumed = made(mix, **options)
    for param, saved in zip(params_of(resumed), params_of(stopped), strict=True):
        param.data.copy_(saved.data)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    run(resumed, steps=10, first=10)
    assert same(whole, resumed)


def test_a_checkpoint_of_torchs_adamw_can_be_packed() -> None:
    params = made_params(BF16)
    before = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.99))
    for param in params:
        param.grad = torch.full_like(param, 0.01)
    before.step()
    packed = AnyPrecisionAdamW(params, mode="packed", use_kahan_summation=True, momentum_dtype=BF16)
    packed.load_state_dict(copy.deepcopy(before.state_dict()))
    variance = before.state[params[0]]["exp_avg_sq"]
    assert torch.equal(packed.state[params[0]]["exp_avg_sq"], variance)
    run(packed, steps=2)
    assert packed.state[params[0]]["compensation"].dtype == torch.int16
    assert packed.state[params[0]]["step"] == 3


def test_a_state_of_another_shape_is_refused() -> None:
    optimizer = run(made(shapes=[(8,)]), steps=1)
    (param,) = params_of(optimizer)
    optimizer.state[param]["exp_avg"] = torch.zeros(4, dtype=BF16)
    with pytest.raises(ValueError, match="of shape"):
        run(optimizer, steps=1)


# What a cast rounds away


@pytest.mark.parametrize(("mode", "unit"), [("default", 2**-16), ("packed", 2**-17)])
def test_the_residual_of_a_cast_is_kept(mode: str, unit: float) -> None:
    torch.manual_seed(0)
    full = torch.randn(10_000)
    full[:3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])  # half-way between two bf16
    param = nn.Parameter(full.to(BF16))
    optimizer = AnyPrecisionAdamW([param], mode=mode, use_kahan_summation=True)  # type: ignore[arg-type]
    assert optimizer.keeps_residual(param)
    optimizer.set_residual(param, full - param.detach().float())
    (master,) = optimizer.master_weights()
    assert ((master - full).abs() <= unit * full.abs()).all()
    assert torch.equal(param, full.to(BF16))


def test_the_published_optimizer_starts_from_zero() -> None:
    param = nn.Parameter(torch.zeros(3, dtype=BF16))
    optimizer = AnyPrecisionAdamW([param], mode="published", use_kahan_summation=True)
    assert not optimizer.keeps_residual(param)
    with pytest.raises(ValueError, match="published"):
        optimizer.set_residual(param, torch.zeros(3))


# Numbers that are not finite, multipliers, fakes


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", ["default", "packed"])
@pytest.mark.parametrize("grad_dtype", [BF16, FP32])
def test_a_nan_stays_a_nan(mode: str, implementation: str, grad_dtype: torch.dtype) -> None:
    """Rounding by adding to the bits of 0x7FFFFFFF, CUDA's NaN, would make it -0.0."""
    param = nn.Parameter(torch.ones(40, dtype=BF16))
    optimizer = AnyPrecisionAdamW(
        [param], mode=mode, implementation=implementation, use_kahan_summation=True,  # type: ignore[arg-type]
        momentum_dtype=BF16, betas=(0.9, 0.999),
    )  # fmt: skip
    bits = {BF16: (torch.int16, 0x7FFF), FP32: (torch.int32, 0x7FFFFFFF)}[grad_dtype]
    grad = torch.full((40,), bits[1], dtype=bits[0]).view(grad_dtype)
    assert grad.isnan().all()
    param.grad_dtype = grad_dtype
    param.grad = grad
    for _ in range(3):
        optimizer.step()
        assert param.isnan().all()
        assert optimizer.state[param]["exp_avg"].isnan().all()
        assert optimizer.state[param]["exp_avg_sq"].isnan().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_multiplier_is_a_clip_that_leaves_the_gradients(implementation: str) -> None:
    clipped, multiplied = (
        made(MIXES[4], implementation=implementation, shapes=[(33,)]) for _ in range(2)
    )
    (a,), (b,) = params_of(clipped), params_of(multiplied)
    a.grad, b.grad = torch.full((33,), 0.25), torch.full((33,), 0.5)
    clipped.step()
    multiplied.step(grad_multiplier=torch.tensor(0.5))
    assert same(clipped, multiplied)
    assert (b.grad == 0.5).all()


def test_a_fake_step_touches_no_memory() -> None:
    """The memory of a fake tensor is at address 0: a call with raw pointers would write there."""
    with FakeTensorMode():
        param = nn.Parameter(torch.zeros(8, dtype=BF16))
        param.grad = torch.zeros(8, dtype=BF16)
        optimizer = AnyPrecisionAdamW([param], use_kahan_summation=True, implementation=COMPILED)
        optimizer.step()
        optimizer.step()
    assert optimizer.state[param]["compensation"].shape == (8,)


def test_the_operator_keeps_the_promises_of_torch_library() -> None:
    optimizer = run(made(shapes=[(8,), (3, 5)]), steps=1)
    params = params_of(optimizer)
    states = [
        [optimizer.state[p][key] for p in params]
        for key in ("exp_avg", "exp_avg_sq", "compensation")
    ]
    grads = [p.grad for p in params]
    args = (
        [p.detach() for p in params], grads, *states,
        [1e-3] * 2, [1.0] * 2, [0.0] * 2, [5, 7], [2, 2], 0.9, 0.95, 1e-8, 1.0, None,
        False, True, False,
    )  # fmt: skip
    results = torch.library.opcheck(
        torch.ops.precexp.adamw_.default, args, test_utils=("test_schema", "test_faketensor")
    )
    assert results == dict.fromkeys(("test_schema", "test_faketensor"), "SUCCESS")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_compensation_is_not_compiled_away(implementation: str, compiled: bool) -> None:
    optimizer = made(implementation=implementation, shapes=[(64,)])
    step: Callable[[], object] = torch.compile(optimizer.step) if compiled else optimizer.step
    (param,) = params_of(optimizer)
    for _ in range(3):
        param.grad = torch.full_like(param, 0.01)
        step()
    compensation = optimizer.state[param]["compensation"]
    assert compensation.count_nonzero() > 32
    assert compensation.abs().max() <= param.abs().max() * 2**-8


def test_the_operator_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests of dispatch above would say nothing about a step."""
    calls = []
    carry_out = kernel.adamw_
    monkeypatch.setattr(kernel, "adamw_", lambda *args: (calls.append(args), carry_out(*args)))
    run(made(), steps=2)
    assert len(calls) == 2
