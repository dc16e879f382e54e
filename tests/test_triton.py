"""The Triton step: as any compiled step in its interpreter, compiled for GPUs, and on one.

A process is either interpreted or not, so each kind of test has one of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_kernel import MIXES, buffers_of, difference_of_masters, made, params_of, run

ROOT = Path(__file__).parents[1]
pytest.importorskip("triton")


def child(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_interpreted_step_passes_the_tests_of_the_compiled_one() -> None:
    done = child("-m", "pytest", "-q", "tests/test_kernel.py", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-10_000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 50


COMPILES = """
import itertools, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from precexp.optim import triton_step
from precexp.optim.kernel import Form
from tests.test_kernel import MIXES

KINDS = {"words": "*i64", "halves": "*i32", "num_tensors": "i32"}
forms = [(mix, mix[3]) for mix in MIXES] + [(MIXES[0], torch.int16)]
for ((param, momentum, variance, _), compensation), random in itertools.product(forms, (0, 1)):
    form = Form(
        param=param, grad=param, exp_avg=momentum, exp_avg_sq=variance, compensation=compensation,
        stochastic_variance=bool(random), stochastic_remainder=bool(random),
        decay_outside=bool(random),
    )
    constants = triton_step.constants_of(form, aligned=True)
    pointer = "grad_multiplier_pointer"
    signature = {
        name: "constexpr" if name in constants else KINDS.get(name, "fp32")
        for name in triton_step._adamw.arg_names
    }
    if random:
        signature[pointer] = "*fp32"
    else:
        signature[pointer], constants[pointer] = "constexpr", None
    source = ASTSource(triton_step._adamw, signature, constants)
    for capability in (80, 90):
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"], form
        assert "ld.global.v4.b32" in compiled.asm["ptx"], form  # 128 bits at a time
        assert "st.global.v4.b32" in compiled.asm["ptx"], form
        assert ".local" not in compiled.asm["ptx"], form  # no register is spilled
        print("compiled")
"""


def test_the_step_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    done = child("-c", COMPILES, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiled") == 2 * 2 * (len(MIXES) + 1)


def test_without_a_gpu_or_the_interpreter_it_is_refused() -> None:
    with pytest.raises(ValueError, match="implementation: triton is not for parameters on cpu"):
        made(implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "packed"])
@pytest.mark.parametrize("mix", MIXES)
def test_on_a_gpu_the_step_is_that_of_torchs_operations(mode: str, mix: Any) -> None:
    if mode == "packed" and mix is not MIXES[0]:
        pytest.skip("packed is for bfloat16")
    runs = {}
    for implementation in ("triton", "aten"):
        optimizer = made(mix, mode=mode, implementation=implementation, device="cuda")
        runs[implementation] = run(optimizer, steps=5)
    pairs = zip(runs["triton"].master_weights(), runs["aten"].master_weights(), strict=True)
    for triton, aten in pairs:
        assert triton.is_cuda
        torch.testing.assert_close(triton, aten, rtol=2**-16, atol=difference_of_masters(mix))


@pytest.mark.gpu
def test_on_a_gpu_views_that_are_not_aligned_are_stepped_too() -> None:
    whole = torch.zeros(1000, dtype=torch.bfloat16, device="cuda")
    optimizers = []
    for implementation in ("triton", "aten"):
        optimizer = made(implementation=implementation, device="cuda", shapes=[(999,)])
        (param,) = params_of(optimizer)
        param.data = whole.clone()[1:].copy_(param)
        optimizers.append(run(optimizer, steps=3))
    for a, b in zip(*map(buffers_of, optimizers), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)


@pytest.mark.gpu
def test_on_a_gpu_no_step_makes_the_host_wait() -> None:
    optimizer = run(made(implementation="triton", device="cuda"), steps=1)
    multiplier = torch.tensor(0.5, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(grad_multiplier=multiplier)
    finally:
        torch.cuda.set_sync_debug_mode("default")
