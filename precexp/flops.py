"""How much arithmetic a model's training is, and how much a GPU could do at most.

A token costs 6 N + 12 L H Q T floating-point operations, forward and backward (PaLM, arXiv
2204.02311, appendix B): N parameters, L layers, H heads of Q features, blocks of T tokens. The
second term, of attention, counts the whole square of positions, as everybody's does, though a
causal kernel skips half. What gradient checkpointing computes again does not count: it is cost,
not progress.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

T = 1e12

# Published peaks without sparsity, in operations per second: of 16-bit matrix products summed in
# fp32, of TF32 ones, and of fp32 outside the tensor cores, from NVIDIA's data sheets of the
# products. Sheets that give a figure with sparsity alone are halved. GeForce cards are not in it:
# their published peaks seldom say whether they are summed in fp16, which is twice as fast there.
# The names are the driver's, and have to be equal: a MIG slice is another device.
PEAKS: dict[str, tuple[float, float, float]] = {
    "NVIDIA A10": (125 * T, 62.5 * T, 31.2 * T),
    "NVIDIA A100-PCIE-40GB": (312 * T, 156 * T, 19.5 * T),
    "NVIDIA A100-SXM4-40GB": (312 * T, 156 * T, 19.5 * T),
    "NVIDIA A100-SXM4-80GB": (312 * T, 156 * T, 19.5 * T),
    "NVIDIA A100 80GB PCIe": (312 * T, 156 * T, 19.5 * T),
    "NVIDIA H100 80GB HBM3": (989.5 * T, 494.5 * T, 67 * T),
    "NVIDIA H100 PCIe": (756.5 * T, 378 * T, 51 * T),
    "NVIDIA H200": (989.5 * T, 494.5 * T, 67 * T),
    "NVIDIA L4": (121 * T, 60 * T, 30.3 * T),
    "NVIDIA L40S": (362 * T, 183 * T, 91.6 * T),
}


def model_flops_per_token(model: PreTrainedModel, *, block_size: int) -> int | None:
    """Operations to train on a token of a block; None of a model that the formula is not for.

    N leaves out what is looked up and not multiplied: embeddings of positions, and those of tokens
    but for a matrix that also makes the logits, which counts once. A mixture of experts uses a part
    of its parameters at a time, and a model without attention heads has another formula: None.
    """
    config = model.config.get_text_config()
    layers, heads, width = (
        getattr(config, name, None)
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(width, int)):
        return None
    if any("expert" in name for name in config.to_dict()):
        return None
    features = getattr(config, "head_dim", None) or width // heads
    return 6 * _num_multiplied(model) + 12 * layers * heads * features * block_size


def peak_flops_per_second(device: torch.device, dtype: torch.dtype) -> float | None:
    """What the device's data sheet promises of matrix products of the dtype; None if unknown.

    Products of fp32 are TF32's where torch may use that.
    """
    if device.type != "cuda":
        return None
    peaks = PEAKS.get(torch.cuda.get_device_name(device))
    if peaks is None:
        return None
    half, tf32, full = peaks
    if dtype in (torch.bfloat16, torch.float16):
        return half
    return tf32 if torch.backends.cuda.matmul.allow_tf32 else full


def utilisation(
    *, flops_per_token: int | None, tokens_per_second: float | None, peak: float | None
) -> dict[str, float | None]:
    """The keys of `timing` in run.json on arithmetic (docs/record.md)."""
    per_second = (
        None
        if flops_per_token is None or tokens_per_second is None
        else flops_per_token * tokens_per_second
    )
    return {
        "model_flops_per_token": flops_per_token,
        "model_flops_per_second": per_second,
        "model_flop_utilisation": None if per_second is None or peak is None else per_second / peak,
    }


def _num_multiplied(model: nn.Module) -> int:
    output = model.get_output_embeddings()  # type: ignore[operator]
    looked_up = {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and (output is None or module.weight is not output.weight)
    }
    return sum(param.numel() for param in model.parameters() if param not in looked_up)
