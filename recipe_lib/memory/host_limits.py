"""Host memory that offloading takes: how much, how much there is, and a refusal before the model takes any of it."""

import os
from collections.abc import Mapping
from pathlib import Path

from recipe_lib.errors import SetupError
from recipe_lib.units import GIB, format_bytes

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# By a key of the section `memory`, what else than more memory helps.
_REMEDIES = {
    "cpu_offload": "remove memory.cpu_offload",
    "stream_layers": "choose lora.quantize_base=nf4 for frozen layers, or remove memory.stream_layers",
    "optimizer_offload": "choose optimizer.state_bits=8",
    "activation_offload": "choose a smaller batch_size or memory.activation_checkpointing=full",
}


def pinned_bytes(num_bytes: int) -> int:
    """What torch takes for so many bytes of pinned memory: the next power of two, so that blocks can be used again
    (ATen/core/CachingHostAllocator.h). It keeps what was freed for itself."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


def check_needs(needs: Mapping[str, int], allowed: float | None, ranks: int, free: tuple[int, str]) -> None:
    """SetupError, one line, where offloading needs more host memory than there is.

    needs: key of the section `memory`, such as `cpu_offload`, -> bytes of one rank. allowed: GiB that the config allows
    all ranks of this machine, None: what is free. ranks: of this machine. free: as `free_host_memory` found it before
    any of it was taken.
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
        f"host memory: found {format_bytes(room)} {what}, expected {format_bytes(total)} for {rank} on this machine "
        f"(each: {parts}); {', or '.join([more, *remedies])}"
    )


def free_host_memory(proc: Path = _PROC, groups: Path = _GROUPS) -> tuple[int, str]:
    """Bytes that can still be taken, and what limits them: the machine, or a control group (a container's, a job's)
    whose limit is nearer."""
    found = [(_free_of_machine(proc), "free on this machine")]
    found += [(limit, "left in this process's control group") for limit in _free_of_groups(proc, groups)]
    return min(found)


def _free_of_machine(proc: Path) -> int:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # not Linux: all there is


def _free_of_groups(proc: Path, groups: Path) -> list[int]:
    """What the process's groups of version 2 and 1, and those around them, leave; none without limits. Pages of files,
    which the kernel gives back, count as free."""
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
                left = int((place / limit).read_text()) - int((place / used).read_text()) + _files_of(place)
                found.append(max(left, 0))
            except (OSError, ValueError):  # no such file, or the word `max`
                pass
            if place == root or root not in place.parents:
                break
            place = place.parent
    return found


def _files_of(group: Path) -> int:
    lines = (group / "memory.stat").read_text().split("\n") if (group / "memory.stat").exists() else []
    sizes = {name: int(size) for name, _, size in (line.partition(" ") for line in lines if line)}
    return sum(sizes.get(name, 0) for name in ("inactive_file", "active_file"))
