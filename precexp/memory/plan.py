"""The memory of a training step, predicted without running it and without a GPU.

The trainer's own step runs on fake tensors, which have shapes and no memory, and a Trace follows
their storages. Fake CPU tensors stand for those of a GPU: a fake CUDA tensor ends the process in a
build of torch without CUDA, and where the two devices keep different things for the backward pass,
the operation of the GPU is put in.
"""

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers.masking_utils
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from transformers import OPTConfig, PreTrainedModel

from precexp.config import AdamWConfig, AnyPrecisionConfig, ModelConfig, RunConfig, UserError
from precexp.memory.trace import ROUNDING, Category, LargeTensor, Timeline, Trace
from precexp.model import build_model, num_parameters, read_model_config, require_positions
from precexp.optim import aten, build_optimizer, promised_states
from precexp.precision import build_precision
from precexp.train import place, training_step

DeviceType = Literal["cuda", "cpu"]

MIB = 2**20

_STEPS = 2  # the optimizer's states come with the first
_MICRO_BATCHES = 2  # more of them repeat the second


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """Memory that no allocator of torch's counts, or that a plan cannot foresee."""

    name: str
    low_bytes: int
    high_bytes: int
    note: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one training step allocates, the optimizer's states being there. In bytes."""

    device: DeviceType
    num_parameters: int
    peak_bytes: int
    peak_phase: str
    phases: Mapping[str, int]
    steady_bytes: int
    categories: Mapping[Category, int]  # at the peak; they sum to it
    phase_categories: Mapping[str, Mapping[Category, int]]
    bytes_per_param: Mapping[str, float]  # weights, gradients, states, total
    largest: Sequence[LargeTensor]
    closed_form_bytes: int | None  # None where there is no formula
    unseen: Sequence[Unseen]

    def as_record(self) -> dict[str, Any]:
        """The JSON of `plan.output` and the `memory.planned` of run.json (docs/record.md)."""
        return asdict(self)


def plan(config: RunConfig, *, device: DeviceType) -> Plan:
    """The memory of a training step of the run on the device.

    Raises UserError for what cannot be planned: a config that the model or the recipe refuses, a
    batch beyond all addresses, a forward pass that reads values of its tensors.
    """
    model_config = _plannable(config.model)
    architecture = read_model_config(model_config)
    require_positions(architecture, config.model, block_size=config.data.block_size)
    assert architecture.vocab_size is not None
    trace = Trace(
        rounding=ROUNDING[device],
        host_scalars=device == "cuda",
        scratch=_cpu_scratch if device == "cpu" else None,
    )
    cpu = torch.device("cpu")
    precision = build_precision(config.precision, device=cpu)
    batch, block = config.train.batch_size, config.data.block_size
    with _refusals(config), FakeTensorMode(), _operations_of(device):
        model = build_model(model_config, seed=config.seed)
        optimizer = build_optimizer(
            model.parameters(), _plannable_optimizer(config), config.train, seed=config.seed
        )
        place(model, optimizer, precision, device=cpu, compiled=False)
        scaler = precision.build_scaler()
        ids = torch.zeros((batch, block), dtype=torch.int64)
        trace.watch_roots(model, optimizer, [ids])
        with trace.hooks(model, vocab_size=architecture.vocab_size, tokens=ids.numel()), trace:
            for _ in range(_STEPS):
                training_step(
                    model,
                    optimizer,
                    [ids] * min(config.train.grad_accumulation, _MICRO_BATCHES),
                    precision,
                    scaler,
                    max_grad_norm=config.train.max_grad_norm,
                    on_phase=trace.phase,
                    host_reads=False,
                )
                trace.tag_states(model, optimizer)
                trace.phase("")
                optimizer.zero_grad(set_to_none=True)
        timeline = trace.replay()
        return _plan_of(timeline, config, model, device)


def _plan_of(
    timeline: Timeline, config: RunConfig, model: PreTrainedModel, device: DeviceType
) -> Plan:
    count = num_parameters(model)
    at_step = timeline.phase_categories["step"]
    parts = {
        "weights": at_step["weights"] / count,
        "gradients": at_step["gradients"] / count,
        "states": timeline.steady_categories["optimizer_state"] / count,
    }
    return Plan(
        device=device,
        num_parameters=count,
        peak_bytes=timeline.peak_bytes,
        peak_phase=timeline.peak_phase,
        phases=timeline.phases,
        steady_bytes=timeline.steady_bytes,
        categories=timeline.categories,
        phase_categories=timeline.phase_categories,
        bytes_per_param={**parts, "total": sum(parts.values())},
        largest=timeline.largest,
        closed_form_bytes=closed_form_bytes(config, model),
        unseen=unseen(config, timeline.peak_bytes, device=device),
    )


def _plannable(config: ModelConfig) -> ModelConfig:
    """The same memory without what planning has no use for: weights to load, flash-attn itself."""
    attention = "sdpa" if config.attention == "flash" else config.attention
    return replace(config, pretrained=False, attention=attention)


def _plannable_optimizer(config: RunConfig) -> AnyPrecisionConfig | AdamWConfig:
    """With the compiled step of whatever device there will be, where there is to be one."""
    optim = config.optim
    if isinstance(optim, AnyPrecisionConfig) and optim.implementation in ("native", "triton"):
        return replace(optim, implementation="auto")
    return optim


@contextmanager
def _refusals(config: RunConfig) -> Iterator[None]:
    """Turns what fake tensors cannot do with a user's config into a UserError."""
    try:
        with _silenced("torch._subclasses.fake_tensor"):  # it logs what it raises
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _host_read(str(error.func), error, config.model) from None
    except RuntimeError as error:
        if ".numpy() is not supported" in str(error):
            raise _host_read("Tensor.numpy", error, config.model) from None
        if "Storage size calculation overflowed" in str(error):
            batch, block = config.train.batch_size, config.data.block_size
            raise UserError(
                f"train.batch_size, data.block_size: a batch of {batch} x {block} tokens is more "
                "than a machine can address; allowed: a smaller one"
            ) from None
        raise


@contextmanager
def _silenced(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _host_read(operation: str, error: Exception, model: ModelConfig) -> UserError:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/torch/" not in f.filename and "/precexp/" not in f.filename]
    frame = (own or frames)[-1]
    return UserError(
        f"plan: model={model.name} reads a value of a tensor ({operation} in "
        f"{Path(frame.filename).name}, line {frame.lineno}), which a plan has not got"
    )


# What a GPU does where a CPU does otherwise


@contextmanager
def _operations_of(device: DeviceType) -> Iterator[None]:
    """Makes the operations on fake CPU tensors keep what those of the device keep."""
    with ExitStack() as stack:
        # Fake tensors look like torch.compile to transformers, which then masks for packed
        # sequences and for padding; there are none.
        masking = transformers.masking_utils
        needs_no_mask = masking._ignore_causal_mask_sdpa
        for name, value in (
            ("find_packed_sequence_indices", lambda *_, **__: None),
            ("_ignore_causal_mask_sdpa", lambda _, *a, **k: needs_no_mask(None, *a, **k)),
        ):
            stack.enter_context(_replaced(masking, name, value))
        stack.enter_context(_replaced(torch, "rand", _rand_that_drops_no_layer(torch.rand)))
        if device == "cuda":
            stack.enter_context(_replaced(F, "dropout", _native_dropout))
            stack.enter_context(
                _replaced(
                    F, "scaled_dot_product_attention", _attention_of(F.scaled_dot_product_attention)
                )
            )
            stack.enter_context(_replaced(aten, "_CPU_CHUNK", aten._GPU_CHUNK))
        yield


@contextmanager
def _replaced(module: object, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _rand_that_drops_no_layer(rand: Any) -> Any:
    """With layerdrop (OPT of transformers 5.17: without, too) the host draws a number per layer and
    looks at it. All layers at work take the most memory."""

    def draw(*size: Any, **options: Any) -> Any:
        is_number = len(size) == 1 and isinstance(size[0], list | tuple) and not size[0]
        return 1.0 if is_number else rand(*size, **options)

    return draw


def _native_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Keeps a mask of a byte per element, where a CPU keeps noise of the input's dtype."""
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _attention_of(attention: Any) -> Any:
    """With dropout a CPU has no fused attention, and keeps the probabilities."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        if dropout_p > 0 and attn_mask is None:
            return torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)

    return attend


def _cpu_scratch(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """A norm in another dtype: a CPU casts its input first, a GPU as it reads."""
    dtype = kwargs.get("dtype")
    if func is torch.ops.aten.linalg_vector_norm.default and dtype not in (None, args[0].dtype):
        return args[0].numel() * dtype.itemsize
    return 0


# What stands beside the trace


def closed_form_bytes(config: RunConfig, model: PreTrainedModel) -> int | None:
    """The peak by a formula over the shapes of a pre-norm OPT; None for other models.

    A cross-check on the trace, not independent of it: its terms were found in traces of this model.
    It is the largest of three moments: the loss, the end of the backward pass, the optimizer step.
    """
    c = model.config
    if (
        not isinstance(c, OPTConfig)
        or not (c.do_layer_norm_before and c.tie_word_embeddings)
        or c.word_embed_proj_dim != c.hidden_size
        or config.model.gradient_checkpointing
    ):
        return None
    precision = build_precision(config.precision, device=torch.device("cpu"))
    width, param, grad = (
        dtype.itemsize
        for dtype in (precision.forward_dtype, precision.param_dtype, precision.gradient_dtype)
    )
    mixed = precision.autocast_dtype is not None
    count, hidden, feed_forward, vocab = (
        num_parameters(model),
        c.hidden_size,
        c.ffn_dim,
        c.vocab_size,
    )
    batch, block = config.train.batch_size, config.data.block_size
    tokens = batch * block
    states = promised_states(config.optim, param_dtype=precision.param_dtype).values()
    weights_and_states = count * (param + sum(dtype.itemsize for dtype in states))
    gradients = count * grad
    embedding = vocab * hidden
    linear = c.num_hidden_layers * (
        4 * hidden**2 + 2 * hidden * feed_forward + 5 * hidden + feed_forward
    )
    copies = width * (linear + embedding) if mixed else 0
    per_token = width * feed_forward + (24 if mixed else 8 * width) * hidden
    per_token += 2 * hidden * (c.dropout > 0) + 16
    per_head = 4 * tokens
    if c._attn_implementation == "eager":  # probabilities, not only the logarithms of their sums
        per_head = (4 + width if width < 4 else 4) * batch * block**2
    saved = c.num_hidden_layers * (tokens * per_token + c.num_attention_heads * per_head)
    last_norm = tokens * ((6 if mixed else 2 * width) * hidden + 8)
    logits = width * tokens * vocab
    at_loss = weights_and_states + copies + saved + last_norm + logits + 12 * tokens * vocab
    if config.train.grad_accumulation > 1:
        at_loss += gradients
    two_gradients = (4 if mixed else 2 * grad) * embedding  # of the tied embedding, beside the sum
    after_backward = weights_and_states + gradients + two_gradients + logits
    at_step = (
        weights_and_states + gradients + _step_temporaries(config.optim, count, embedding) * param
    )
    return max(at_loss, after_backward, at_step)


def _step_temporaries(optim: AnyPrecisionConfig | AdamWConfig, count: int, largest: int) -> int:
    """Elements that the optimizer's step makes besides its states."""
    if isinstance(optim, AdamWConfig):
        return {"foreach": count, "loop": 2 * largest}.get(optim.implementation, 0)
    return 2 * largest if optim.mode == "published" else 0


def unseen(config: RunConfig, peak_bytes: int, *, device: DeviceType) -> list[Unseen]:
    """What the plan leaves out. The ranges are experience with torch, not measured here."""
    if device == "cpu":
        return [
            Unseen(
                name="process",
                low_bytes=300 * MIB,
                high_bytes=800 * MIB,
                note="Python, torch and the data: resident before the model is built",
            ),
            Unseen(
                name="kernel scratch",
                low_bytes=0,
                high_bytes=64 * MIB,
                note="buffers inside matrix products and attention, per thread",
            ),
        ]
    checkpointing = config.model.gradient_checkpointing
    found = [
        Unseen(
            name="CUDA context",
            low_bytes=300 * MIB,
            high_bytes=700 * MIB,
            note="of the process, as nvidia-smi shows it; no allocator counts it",
        ),
        Unseen(
            name="library workspaces",
            low_bytes=8 * MIB,
            high_bytes=64 * MIB,
            note="cuBLAS: about 8 MiB, 32 MiB on Hopper, per stream; allocated",
        ),
        Unseen(
            name="attention scratch",
            low_bytes=0,
            high_bytes=128 * MIB,
            note="float32 gradients inside the fused backward pass of a layer; not at the loss",
        ),
        Unseen(
            name="fragmentation",
            low_bytes=round(peak_bytes * (0.2 if checkpointing else 0.01)),
            high_bytes=round(peak_bytes * (0.3 if checkpointing else 0.15)),
            note="what the caching allocator reserves beyond what is allocated",
        ),
    ]
    if config.model.compile:
        found.append(
            Unseen(
                name="torch.compile",
                low_bytes=0,
                high_bytes=0,
                note="planned as if model.compile=false; fusion saves some activations",
            )
        )
    return found
