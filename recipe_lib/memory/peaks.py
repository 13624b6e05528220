"""The most memory a process has held since it was last asked: on its device, or its resident set on
a CPU.
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

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): writing it resets the peak resident set


class Peaks(TypedDict):
    """Bytes since the last reset.

    active: in blocks handed out, and in freed ones that a stream still uses. allocated: in blocks
    handed out. reserved: taken from the device by the caching allocator. kind: `device`; or
    `resident set`, where all three are the process's resident set; or `resident set since start`,
    where the system does not let that be reset.
    """

    active: int
    allocated: int
    reserved: int
    kind: str


class PeakMemory:
    """Peaks of the memory of `device`; `reset` starts a new measurement, `read` gives the peaks
    since then.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Peaks are counted from what is held now."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)
            return
        self.resettable = False
        with suppress(
            OSError
        ):  # no such file (macOS), or not allowed: the peak since the start is all there is
            _CLEAR.write_text(_RESET_PEAK)
            self.resettable = True

    def read(self) -> Peaks:
        """The peaks, in bytes."""
        if self.device.type != "cpu":
            stats = torch.get_device_module(self.device).memory_stats(self.device)
            active, allocated, reserved = (
                int(stats.get(f"{kind}_bytes.all.peak", 0))
                for kind in ("active", "allocated", "reserved")
            )
            return Peaks(active=active, allocated=allocated, reserved=reserved, kind="device")
        unit = (
            1 if sys.platform == "darwin" else 1024
        )  # ru_maxrss is in bytes there, in KiB elsewhere
        peak = (
            _read_proc_bytes(_STATUS, "VmHWM:")
            or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        )
        kind = "resident set" if self.resettable else "resident set since start"
        return Peaks(active=peak, allocated=peak, reserved=peak, kind=kind)


def _read_proc_bytes(path: Path, name: str) -> int | None:
    """Return the bytes of the line of a file under /proc that begins so; None: not Linux, or no
    such line.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


# Out of memory as one line: where, how much was held, and which levers are left.


@contextmanager
def explain_out_of_memory(phase: str, cfg: FullFinetuneConfig, peak: PeakMemory) -> Iterator[None]:
    """Turns the device's refusal inside the block into an OutOfMemoryError that names phase, peak
    and levers.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = peak.read()
        where = ", ".join(
            [phase, *getattr(error, "__notes__", [])]
        )  # of a pipeline: stage, micro-batch and action
        raise OutOfMemoryError(
            f"{where}: out of memory on {peak.device} with {format_bytes(held['allocated'])}"
            f" allocated and {format_bytes(held['reserved'])} reserved; next lever:"
            f" {'; '.join(list_levers(cfg)) or 'more ranks'}"
        ) from error


def list_levers(cfg: FullFinetuneConfig) -> list[str]:
    """The config keys that would still lower the peak, the cheapest first."""
    memory, parallel = cfg.memory, cfg.parallel
    rows, count = compute_micro_batches(cfg)
    cuts = parallel.pipeline_microbatches is not None
    helps = {
        # In a pipeline smaller micro-batches, a schedule that keeps fewer, layers divided by
        # memory.
        f"parallel.pipeline_microbatches={count * (2 if rows % 2 == 0 else rows)}": (
            parallel.pipeline > 1 and cuts and rows > 1
        ),
        "parallel.pipeline_schedule=1f1b": (
            parallel.pipeline > 1 and parallel.pipeline_schedule == "gpipe"
        ),
        "parallel.pipeline_balance=memory": (
            parallel.pipeline > 1
            and parallel.pipeline_balance == "compute"
            and parallel.pipeline_layers_per_stage is None
        ),
        f"batch_size={cfg.batch_size // 2} with gradient_accumulation_steps x 2": (
            cfg.batch_size > 1 and not cuts
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
        f"max_seq_len={cfg.max_seq_len // 2}": True,
    }
    return [lever for lever, is_left in helps.items() if is_left]


# Host memory that offloading takes: how much, how much there is, and a refusal before the model
# takes any of it.


_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# By a key of the section `memory`, what else than more memory helps.
_REMEDIES = {
    "cpu_offload": "remove memory.cpu_offload",
    "stream_layers": (
        "choose lora.quantize_base=nf4 for frozen layers, or remove memory.stream_layers"
    ),
    "optimizer_offload": "choose optimizer.state_bits=8",
    "activation_offload": "choose a smaller batch_size or memory.activation_checkpointing=full",
}


def round_up_to_pinned(num_bytes: int) -> int:
    """What torch takes for so many bytes of pinned memory: the next power of two, so that blocks
    can be used again (ATen/core/CachingHostAllocator.h). It keeps what was freed for itself.
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


def check_host_needs(
    needs: Mapping[str, int], allowed: float | None, ranks: int, free: tuple[int, str]
) -> None:
    """SetupError, one line, where offloading needs more host memory than there is.

    needs: key of the section `memory`, such as `cpu_offload`, -> bytes of one rank. allowed: GiB
    that the config allows all ranks of this machine, None: what is free. ranks: of this machine.
    free: as `free_host_memory` found it before any of it was taken.
    """
    total = ranks * sum(needs.values())
    if not total:
        return
    room, what = free
    if allowed is not None and allowed * GIB < room:
        room, what = int(allowed * GIB), "allowed by memory.host_memory_limit_gib"
    if total <= room:
        return
    keys = [key for key, size in needs.items() if size]
    parts = ", ".join(f"memory.{key} {format_bytes(needs[key])}" for key in keys)
    rank = f"{ranks} ranks" if ranks > 1 else "one rank"
    more = "raise memory.host_memory_limit_gib" if "allowed" in what else "use a machine with more"
    remedies = [_REMEDIES[key] for key in keys if key in _REMEDIES]
    raise SetupError(
        f"host memory: found {format_bytes(room)} {what}, expected {format_bytes(total)} for {rank}"
        f" on this machine (each: {parts}); {', or '.join([more, *remedies])}"
    )


def find_free_host_memory(proc: Path = _PROC, groups: Path = _GROUPS) -> tuple[int, str]:
    """Bytes that can still be taken, and what limits them: the machine, or a control group (a
    container's, a job's) whose limit is nearer.
    """
    free = _read_proc_bytes(proc / "meminfo", "MemAvailable:")
    if free is None:  # not Linux: all there is
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = [(free, "free on this machine")]
    found += [
        (limit, "left in this process's control group")
        for limit in _read_control_group_limits(proc, groups)
    ]
    return min(found)


def _read_control_group_limits(proc: Path, groups: Path) -> list[int]:
    """What the process's groups of version 2 and 1, and those around them, leave; none without
    limits. Pages of files, which the kernel gives back, count as free.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for kinds, name in (line.split(":", 2)[1:] for line in lines):
        if kinds == "":
            root, limit, used = groups, "memory.max", "memory.current"
        elif "memory" in kinds.split(","):
            root, limit, used = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        place = root / name.strip("/")
        while True:
            try:
                left = (
                    int((place / limit).read_text())
                    - int((place / used).read_text())
                    + _read_file_cache_bytes(place)
                )
                found.append(max(left, 0))
            except (OSError, ValueError):  # no such file, or the word `max`
                pass
            if place == root or root not in place.parents:
                break
            place = place.parent
    return found


def _read_file_cache_bytes(group: Path) -> int:
    lines = (
        (group / "memory.stat").read_text().split("\n") if (group / "memory.stat").exists() else []
    )
    sizes = {name: int(size) for name, _, size in (line.partition(" ") for line in lines if line)}
    return sum(sizes.get(name, 0) for name in ("inactive_file", "active_file"))
