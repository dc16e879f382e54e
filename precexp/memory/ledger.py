"""What the CUDA allocator says of a run. On a CPU nothing is measured, which is None."""

import torch


def start(device: torch.device) -> int | None:
    """Forgets what earlier runs of this process left behind; returns the bytes still allocated."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return allocated_bytes(device)


def allocated_bytes(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def measured(
    device: torch.device, *, baseline: int | None, after_init: int | None
) -> dict[str, int | None] | None:
    """`memory.measured` of run.json; None on a CPU.

    Allocated bytes count from `baseline`, what was allocated before the run; `after_init` is what
    was allocated once the model was on the device.
    """
    if device.type != "cuda":
        return None
    assert baseline is not None
    assert after_init is not None
    allocated = torch.cuda.memory_allocated(device)
    peak = torch.cuda.max_memory_allocated(device)
    return {
        "baseline_bytes": baseline,
        "init_bytes": after_init - baseline,
        "allocated_bytes": allocated - baseline,
        "peak_bytes": peak - baseline,
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "train_alloc_delta_bytes": allocated - after_init,
        "train_peaked_delta_bytes": peak - allocated,
    }
