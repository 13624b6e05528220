"""The most memory a process has held since it was last asked: on its device, or its resident set on a CPU."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import torch

from recipe_lib.config.mesh import micro_batches
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import OutOfMemoryError
from recipe_lib.units import format_bytes

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): writing it resets the peak resident set


class Peaks(TypedDict):
    """Bytes since the last reset.

    active: in blocks handed out, and in freed ones that a stream still uses. allocated: in blocks handed out.
    reserved: taken from the device by the caching allocator. kind: `device`; or `resident set`, where all three are
    the process's resident set; or `resident set since start`, where the system does not let that be reset.
    """

    active: int
    allocated: int
    reserved: int
    kind: str


class PeakMemory:
    """Peaks of the memory of `device`; `reset` starts a new measurement, `read` gives the peaks since then."""

    def __init__(self, device: torch.device):
        self.device = device
        self.resettable = False
        self.reset()

    def reset(self) -> None:
        """Peaks are counted from what is held now."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)
            return
        try:
            _CLEAR.write_text(_RESET_PEAK)
            self.resettable = True
        except OSError:  # no such file (macOS), or not allowed: the peak since the start is all there is
            self.resettable = False

    def read(self) -> Peaks:
        """The peaks, in bytes."""
        if self.device.type != "cpu":
            stats = torch.get_device_module(self.device).memory_stats(self.device)
            active, allocated, reserved = (
                int(stats.get(f"{kind}_bytes.all.peak", 0)) for kind in ("active", "allocated", "reserved")
            )
            return Peaks(active=active, allocated=allocated, reserved=reserved, kind="device")
        peak = _resident_peak()
        kind = "resident set" if self.resettable else "resident set since start"
        return Peaks(active=peak, allocated=peak, reserved=peak, kind=kind)


def _resident_peak() -> int:
    """Bytes of the process's peak resident set."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# Out of memory as one line: where, how much was held, and which levers are left.


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
