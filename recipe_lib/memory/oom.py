"""Out of memory as one line: where, how much was held, and which levers are left."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from recipe_lib.config.mesh import micro_batches
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import OutOfMemoryError
from recipe_lib.memory.peaks import PeakMemory
from recipe_lib.units import format_bytes


@contextmanager
def explain_out_of_memory(phase: str, cfg: FullFinetuneConfig, peak: PeakMemory) -> Iterator[None]:
    """Turns the device's refusal inside the block into an OutOfMemoryError that names phase, peak and levers."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = peak.read()
        where = ", ".join([phase, *getattr(error, "__notes__", [])])  # of a pipeline: stage, micro-batch and action
        raise OutOfMemoryError(
            f"{where}: out of memory on {peak.device} with {format_bytes(held['allocated'])} allocated and "
            f"{format_bytes(held['reserved'])} reserved; next lever: {'; '.join(levers(cfg)) or 'more ranks'}"
        ) from error


def levers(cfg: FullFinetuneConfig) -> list[str]:
    """The config keys that would still lower the peak, the cheapest first."""
    memory, found = cfg.memory, []
    if cfg.parallel.pipeline > 1:
        found += _pipeline_levers(cfg)
    if cfg.batch_size > 1 and cfg.parallel.pipeline_microbatches is None:
        found.append(f"batch_size={cfg.batch_size // 2} with gradient_accumulation_steps x 2")
    if memory.activation_checkpointing != "full":
        found.append("memory.activation_checkpointing=full")
    if cfg.parallel.fsdp_wrap_policy == "layers":
        found.append("parallel.fsdp_wrap_policy=memory_efficient")
    if cfg.dtype != "bf16":
        found.append("dtype=bf16")
    if memory.loss_chunks < 32:
        found.append(f"memory.loss_chunks={memory.loss_chunks * 4}")
    if not memory.activation_offload and memory.activation_checkpointing in ("none", "full"):
        found.append("memory.activation_offload=true")
    if not memory.cpu_offload and not memory.optimizer_offload:
        found.append("memory.optimizer_offload=true")
    if not memory.cpu_offload:
        found.append("memory.cpu_offload=true")
    return [*found, f"max_seq_len={cfg.max_seq_len // 2}"]


def _pipeline_levers(cfg: FullFinetuneConfig) -> list[str]:
    """Smaller micro-batches where their number is set, a schedule that keeps fewer, layers divided by memory."""
    rows, count = micro_batches(cfg)
    found = []
    if cfg.parallel.pipeline_microbatches is not None and rows > 1:
        found.append(f"parallel.pipeline_microbatches={count * (2 if rows % 2 == 0 else rows)}")
    if cfg.parallel.pipeline_schedule == "gpipe":
        found.append("parallel.pipeline_schedule=1f1b")
    if cfg.parallel.pipeline_balance == "compute" and cfg.parallel.pipeline_layers_per_stage is None:
        found.append("parallel.pipeline_balance=memory")
    return found
