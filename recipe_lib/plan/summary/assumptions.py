"""Assumptions of a plan in sentences, with what is not modeled, and warnings."""

from typing import TYPE_CHECKING, Any

import torch

from recipe_lib.config.mesh import compute_micro_batches
from recipe_lib.plan.allocation.caching_allocator import LAUNCH_QUEUE
from recipe_lib.plan.allocation.untraced_memory import choose_attention_backend
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.summary.rank_memory import judge_host
from recipe_lib.plan.summary.step_time import list_first_ranks
from recipe_lib.plan.tracing.pipeline_actions import count_micro_batches_to_trace
from recipe_lib.plan.tracing.trace import ALLOC, Trace
from recipe_lib.plan.tracing.trace_rank import Simulated
from recipe_lib.units import format_bytes

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings

# Elements of a tensor from which on kernels that count in 32 bits fail: FlashAttention 2, which
# torch's attention runs, and Liger's kernels (Liger-Kernel issue 803). torch's own pointwise
# kernels and those that its compiler makes count such tensors in 64 bits.
LIMIT = 2**31
# Kinds of memory that are computed from tokens, and grow with them.
_TOKEN_KINDS = ("activations", "temporary", "logits", "communication", "gradients")


def list_assumptions(cfg: Any, settings: "PlanSettings", simulated: Simulated) -> list[str]:
    """Return the assumptions of a plan, and the notes of the rank that was simulated."""
    sequence = settings.sequence
    multiple = cfg.data.pad_to_multiple_of
    padding = -sequence.tokens % multiple
    padded = f", padded to {sequence.tokens + padding}" if multiple > 1 else ""
    # Why the length is that one, the run's own lines say.
    source = sequence.source.partition(":")[0]
    lines = [
        (
            f"sequences of {sequence.tokens} tokens{padded} ({source}), batch_size"
            f" {cfg.batch_size}, gradient_accumulation_steps {cfg.gradient_accumulation_steps}"
        ),
        f"kernels: {_describe_kernels(cfg, settings.hardware)}; torch {torch.__version__}",
        (
            "allocator: torch's default settings; `expandable` with"
            " PYTORCH_ALLOC_CONF=expandable_segments:True"
        ),
    ]
    traced = settings.traced_ranks or list_first_ranks(cfg.parallel, settings.ranks)
    if settings.ranks > 1:
        named = f"ranks {', '.join(map(str, traced))}" if len(traced) > 1 else f"rank {traced[0]}"
        lines.append(
            f"of {settings.ranks} ranks, {named} simulated; first ranks hold the larger part"
            " of uneven shards"
        )
    if cfg.parallel.pipeline > 1:
        lines += _list_pipeline_assumptions(cfg, len(traced))
    lines += judge_host(cfg, settings, simulated.trace)[1]
    if not simulated.repeats and not simulated.step_growth:
        lines.append(
            "the second step left less memory than the first: later steps may differ from it"
        )
    return lines + simulated.notes


def _describe_kernels(cfg: Any, hardware: Hardware) -> str:
    """Return whose kernels are simulated."""
    if hardware.architecture == "cpu":
        kernels = "a CPU's"
    else:
        kernels = "flash attention (documents of packed sequences: varlen flash), fused RMSNorm"
        if cfg.fused_kernels:
            kernels += (
                ", fused rotary embedding, gated activation, soft-capped scores, loss and"
                " dequantizing (by Triton)"
            )
    if choose_attention_backend(hardware.architecture) == "cudnn":
        kernels += (
            "; for unpacked sequences torch takes cuDNN's attention here: its times, with flash"
            " attention's workspace"
        )
    return kernels


def _list_pipeline_assumptions(cfg: Any, simulated_ranks: int) -> list[str]:
    """Return what the figures of a pipeline rest on."""
    count = compute_micro_batches(cfg)[1]
    traced = max(count_micro_batches_to_trace(cfg, place) for place in range(cfg.parallel.pipeline))
    lines = [
        "pipeline: every rank computes as fast as its trace says; a transfer begins when both ranks"
        " are ready"
    ]
    if traced < count:
        lines.append(
            f"pipeline: at most {traced} of the {count} micro-batches of a step are traced on a"
            " rank, which is enough to hold all that it holds with all of them; the others take as"
            " long as those like them"
        )
    if simulated_ranks < cfg.parallel.pipeline:
        lines.append(
            "pipeline: --rank leaves pipeline ranks out, so neither the heaviest rank nor the time"
            " is certain"
        )
    return lines


def list_not_modeled(cfg: Any, ranks: int, trace: Trace) -> list[str]:
    """Return what a plan leaves out. trace: of the heaviest of so many ranks."""
    lines = ["CUDA graphs", "other processes on the device"]
    if ranks > 1:
        lines.append("NCCL's buffers are a published figure of another machine, not a model")
    if trace.uses:
        lines.append(
            "record_stream: how soon another stream is done with memory that is freed; planned is"
            f" the longest that a host can be ahead of it, {LAUNCH_QUEUE:,} kernels"
        )
    if cfg.trained_adapters is not None and cfg.trained_adapters.merge_on_save:
        lines.append(
            "lora.merge_on_save: the merged model is written layer by layer after training"
        )
    return lines


def note_large_tensors(trace: Trace, itemsize: int) -> list[str]:
    """Return a warning where a tensor computed from tokens may have LIMIT elements or more.

    itemsize: bytes of an element.
    """
    storages = (trace.storages[number] for kind, number in trace.events if kind == ALLOC)
    # A storage with a label is a parameter's.
    of_tokens = [
        storage
        for storage in storages
        if storage.device and storage.kind in _TOKEN_KINDS and not storage.label
    ]
    largest = max(of_tokens, key=lambda storage: storage.bytes, default=None)
    if largest is None or largest.bytes < LIMIT * itemsize:
        return []
    return [
        f"{largest.module or 'the step'} makes a tensor of {largest.bytes // itemsize:,} elements"
        f" ({format_bytes(largest.bytes)}): kernels that count in 32 bits, such as FlashAttention"
        f" 2, fail from {LIMIT:,} on; share sequences among more ranks (parallel.context), or set"
        " max_seq_len lower"
    ]
