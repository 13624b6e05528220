"""Measure peaks of memory, explain running out of it, and check limits of host memory.

`TrainingLoop` reads the peak of each step from a `PeakMemory(device)`. Setup and training run in
`explain_out_of_memory`, which turns torch's error into one line with the config keys that would
lower the peak (levers). `check_host_needs` refuses offloading that the host has no memory for.
"""

import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict

import torch

from recipe_lib.config.mesh import compute_micro_batches
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import OutOfMemoryError, SetupError
from recipe_lib.units import GIB, format_bytes

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")  # folder of control groups, which limit a container or a job
_STATUS = Path("/proc/self/status")  # has the peak of the resident set
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): written to clear_refs, it resets the peak of the resident set


class Peaks(TypedDict):
    """The most bytes at a time since the last reset, by torch's three counts."""

    active: int  # bytes in blocks that tensors have, or that are freed and a stream still uses
    allocated: int  # bytes in blocks that tensors have
    reserved: int  # bytes that the caching allocator has taken from the device
    # `device`, for a GPU. On a CPU all three are the process's resident set, and this is `resident
    # set`, or `resident set since start` if the system does not let the peak be reset.
    kind: str


class PeakMemory:
    """Measures the peaks of a device's memory from one reset to the next."""

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()

    def reset(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)
            return
        self.resettable = False  # True: the resident set's peak is that since the last reset
        # The file may not exist (macOS) or not be writable: then the peak is that since the start.
        with suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
            self.resettable = True

    def read(self) -> Peaks:
        if self.device.type != "cpu":
            stats = torch.get_device_module(self.device).memory_stats(self.device)
            active, allocated, reserved = (
                int(stats.get(f"{kind}_bytes.all.peak", 0))
                for kind in ("active", "allocated", "reserved")
            )
            return Peaks(active=active, allocated=allocated, reserved=reserved, kind="device")
        # `ru_maxrss` is in bytes on macOS, in KiB elsewhere.
        unit = 1 if sys.platform == "darwin" else 1024
        usage = resource.getrusage(resource.RUSAGE_SELF)
        peak = _read_proc_bytes(_STATUS, "VmHWM:") or usage.ru_maxrss * unit
        kind = "resident set" if self.resettable else "resident set since start"
        return Peaks(active=peak, allocated=peak, reserved=peak, kind=kind)


def _read_proc_bytes(path: Path, name: str) -> int | None:
    """Return the bytes in the line of a file under /proc that begins with `name`.

    None: there is no such line, or no such file, because the system is not Linux.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


@contextmanager
def explain_out_of_memory(phase: str, cfg: FullFinetuneConfig, peak: PeakMemory) -> Iterator[None]:
    """Raise our OutOfMemoryError, with phase, peak and levers, in place of torch's in the block.

    phase: what the run does, such as `training`, for the message. peak: measures the device.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        peaks = peak.read()
        # A pipeline notes its stage, micro-batch and action.
        where = ", ".join([phase, *getattr(error, "__notes__", [])])
        raise OutOfMemoryError(
            f"{where}: out of memory on {peak.device} with {format_bytes(peaks['allocated'])}"
            f" allocated and {format_bytes(peaks['reserved'])} reserved; next lever:"
            f" {'; '.join(list_levers(cfg)) or 'more ranks'}"
        ) from error


def list_levers(cfg: FullFinetuneConfig) -> list[str]:
    """Return the config keys that would still lower the peak, the cheapest first."""
    memory = cfg.memory
    parallel = cfg.parallel
    rows, num_micro_batches = compute_micro_batches(cfg)  # rows: sequences of a micro-batch
    splits_batch = parallel.pipeline_microbatches is not None
    # The least factor by which batch_size can be divided: the global batch stays as it is.
    factor = next((n for n in range(2, cfg.batch_size) if cfg.batch_size % n == 0), cfg.batch_size)
    # Key and value -> True if this config can still use it.
    helps = {
        # For a pipeline: smaller micro-batches, a schedule that keeps fewer of them, layers divided
        # by memory.
        f"parallel.pipeline_microbatches={num_micro_batches * (2 if rows % 2 == 0 else rows)}": (
            parallel.pipeline > 1 and splits_batch and rows > 1
        ),
        "parallel.pipeline_schedule=1f1b": (
            parallel.pipeline > 1 and parallel.pipeline_schedule == "gpipe"
        ),
        "parallel.pipeline_balance=memory": (
            parallel.pipeline > 1
            and parallel.pipeline_balance == "compute"
            and parallel.pipeline_layers_per_stage is None
        ),
        f"batch_size={cfg.batch_size // factor} with gradient_accumulation_steps x {factor}": (
            cfg.batch_size > 1 and not splits_batch
        ),
        "memory.activation_checkpointing=full": memory.activation_checkpointing != "full",
        "parallel.fsdp_wrap_policy=memory_efficient": parallel.fsdp_wrap_policy == "layers",
        "dtype=bf16": cfg.dtype != "bf16",
        f"memory.loss_chunks={memory.loss_chunks * 4}": memory.loss_chunks < 32,
        "memory.activation_offload=true": (
            not memory.activation_offload and memory.activation_checkpointing in ("none", "full")
        ),
        "memory.optimizer_offload=true": not memory.cpu_offload and not memory.optimizer_offload,
        "memory.cpu_offload=true": not memory.cpu_offload,
        f"max_seq_len={cfg.max_seq_len // 2}": cfg.max_seq_len > 1,
    }
    return [lever for lever, is_left in helps.items() if is_left]


# Version of control groups -> names of the files with a group's limit and its usage, in bytes.
_GROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}
# Key of the section `memory` -> what helps other than more host memory, for messages.
_REMEDIES = {
    "cpu_offload": "remove memory.cpu_offload",
    "stream_layers": (
        "choose lora.quantize_base=nf4 for frozen layers, or remove memory.stream_layers"
    ),
    "optimizer_offload": "choose optimizer.state_bits=8",
    "activation_offload": "choose a smaller batch_size or memory.activation_checkpointing=full",
}


def round_up_to_pinned(num_bytes: int) -> int:
    """Return the bytes that torch allocates for so many bytes of pinned memory: a power of two.

    torch keeps freed blocks, to use them again for such sizes (ATen/core/CachingHostAllocator.h).
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


def check_host_needs(
    needs: Mapping[str, int], allowed: float | None, ranks: int, free: tuple[int, str]
) -> None:
    """Raise SetupError, in one line, if offloading needs more host memory than there is.

    needs: key of the section `memory`, such as `cpu_offload` -> bytes that one rank needs.
    allowed: GiB that the config allows all ranks of this machine together; None: what is free.
    ranks: number of ranks on this machine. free: the result of `find_free_host_memory` before any
    of the needed memory was taken.
    """
    total = ranks * sum(needs.values())
    if not total:
        return
    available, source = free
    remedy = "use a machine with more"
    if allowed is not None and allowed * GIB < available:
        available = int(allowed * GIB)
        source = "allowed by memory.host_memory_limit_gib"
        remedy = "raise memory.host_memory_limit_gib"
    if total <= available:
        return
    keys = [key for key, num_bytes in needs.items() if num_bytes]
    parts = ", ".join(f"memory.{key} {format_bytes(needs[key])}" for key in keys)
    rank = f"{ranks} ranks" if ranks > 1 else "one rank"
    remedies = [remedy, *(_REMEDIES[key] for key in keys if key in _REMEDIES)]
    raise SetupError(
        f"host memory: found {format_bytes(available)} {source}, expected {format_bytes(total)}"
        f" for {rank} on this machine (each: {parts}); {', or '.join(remedies)}"
    )


def find_free_host_memory(proc: Path = _PROC, groups: Path = _GROUPS) -> tuple[int, str]:
    """Return (bytes of host memory that can still be taken, what limits them, for a message).

    The limit is the machine's, or a lower one of a control group (a container's, a job's). proc,
    groups: the folders of /proc and of control groups; tests pass others.
    """
    free = _read_proc_bytes(proc / "meminfo", "MemAvailable:")
    if free is None:  # not Linux: the machine's whole memory
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        (free_bytes, "left in this process's control group")
        for free_bytes in _read_control_group_limits(proc, groups)
    ]
    return min([(free, "free on this machine"), *limits])


def _read_control_group_limits(proc: Path, groups: Path) -> list[int]:
    """Return the free bytes of each control group that the process is in, and of their parents.

    Groups are of version 1 or 2. Those without a limit are left out; empty: not Linux, or no limit.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        # `hierarchy:controllers:path`; in version 2 no controllers are named.
        _, controllers, name = line.split(":", 2)
        version = 1 if controllers else 2
        if version == 1 and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if version == 1 else groups
        limit_file, usage_file = _GROUP_FILES[version]
        group = root / name.strip("/")
        # A parent's limit holds for its groups together, so that all parents are read.
        for folder in (group, *group.parents):
            if folder != root and root not in folder.parents:
                break
            with suppress(OSError, ValueError):  # no such file, or the word `max`
                limit = int((folder / limit_file).read_text())
                usage = int((folder / usage_file).read_text())
                limits.append(max(limit - usage + _read_file_cache_bytes(folder), 0))
    return limits


def _read_file_cache_bytes(group: Path) -> int:
    """Return a group's bytes of cached files: they count as used, and the kernel frees them."""
    statistics = group / "memory.stat"
    lines = statistics.read_text().split("\n") if statistics.exists() else []
    sizes = {name: int(size) for name, _, size in (line.partition(" ") for line in lines if line)}
    return sum(sizes.get(name, 0) for name in ("inactive_file", "active_file"))
