"""The arithmetic of training: the formula against a count of what torch really does."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, OPTConfig

from precexp import flops
from precexp.train import next_token_loss

T = 1e12
OPT = OPTConfig(
    vocab_size=512, hidden_size=64, word_embed_proj_dim=64, ffn_dim=256, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64, dropout=0.0,
)  # fmt: skip


def llama(*, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, head_dim=32, tie_word_embeddings=tied,
    )  # fmt: skip


CONFIGS = {
    "opt, tied": OPT,
    "llama, untied, wide heads": llama(tied=False),
    "llama, tied": llama(tied=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_has_as_many_operations_as_the_formula_says(name: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager")
    ids = torch.zeros((2, 32), dtype=torch.int64)
    counter = FlopCounterMode(display=False)  # of matrix products: no norm, no bias, no softmax
    with counter:
        next_token_loss(model(input_ids=ids).logits, ids).backward()
    counted = counter.get_total_flops() / ids.numel()
    # The formula's N has the vectors too, 1.5 % of these small models. Seen: 0.1 to 1.5 %.
    assert flops.model_flops_per_token(model, block_size=32) == pytest.approx(counted, rel=0.02)


def test_opt_125m_costs_what_the_formula_says_by_hand() -> None:
    config = OPTConfig(vocab_size=50272, hidden_size=768, ffn_dim=3072, num_hidden_layers=12)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    multiplied = 125_239_296 - 2050 * 768  # without the embeddings of positions
    expected = 6 * multiplied + 12 * 12 * 768 * 1024
    assert flops.model_flops_per_token(model, block_size=1024) == expected


def test_of_a_mixture_of_experts_nothing_is_claimed() -> None:
    config = MixtralConfig(hidden_size=64, num_hidden_layers=2, num_local_experts=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert flops.model_flops_per_token(model, block_size=32) is None


@pytest.fixture
def matmul() -> Iterator[object]:
    """torch's flags of matrix products on CUDA, put back afterwards."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_tf32
    yield flags
    flags.allow_tf32 = before


@pytest.mark.parametrize(
    ("dtype", "tf32", "peak"),
    [
        (torch.bfloat16, False, 312 * T),
        (torch.float16, True, 312 * T),
        (torch.float32, True, 156 * T),
        (torch.float32, False, 19.5 * T),
    ],
)
def test_the_peak_is_that_of_the_forwards_dtype(
    monkeypatch: pytest.MonkeyPatch, matmul: Any, dtype: torch.dtype, tf32: bool, peak: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    matmul.allow_tf32 = tf32
    assert flops.peak_flops_per_second(torch.device("cuda"), dtype) == peak


def test_a_slice_of_a_known_gpu_has_no_known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    )
    assert flops.peak_flops_per_second(torch.device("cuda"), torch.bfloat16) is None
    assert flops.peak_flops_per_second(torch.device("cpu"), torch.bfloat16) is None


def test_what_is_not_known_makes_nothing_up() -> None:
    known = flops.utilisation(flops_per_token=100, tokens_per_second=5.0, peak=1000.0)
    assert known == {
        "model_flops_per_token": 100,
        "model_flops_per_second": 500.0,
        "model_flop_utilisation": 0.5,
    }
    no_peak = flops.utilisation(flops_per_token=100, tokens_per_second=5.0, peak=None)
    assert no_peak == {**known, "model_flop_utilisation": None}
    one_step = flops.utilisation(flops_per_token=100, tokens_per_second=None, peak=1000.0)
    assert one_step["model_flops_per_second"] is one_step["model_flop_utilisation"] is None
