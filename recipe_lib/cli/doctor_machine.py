"""What `tune doctor` reads about this machine without a GPU's help: packages, host memory, limits, disks."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe_lib.cli.launch import cores
from recipe_lib.cli.local_gpus import SECONDS, own_gpus
from recipe_lib.units import MIB

PACKAGES = ("torch", "torchao", "safetensors", "tokenizers", "huggingface_hub", "transformers", "peft", "triton")
# What this package was made for, as its requirements say; of a checkout, those of its pyproject.toml.
RANGES = {"torch": ((2, 11), (2, 14)), "torchao": ((0, 15), (0, 19))}
# Variables that change what is measured here; tokens and passwords have other names.
TOLD = re.compile(r"(NCCL|TORCH_NCCL|GLOO|CUDA|OMP|MKL|PYTORCH)_\w+|TORCH_\w*LOGS|HF_HOME|HF_HUB_CACHE|XDG_CACHE_HOME")
SHARED_FILE_SYSTEMS = re.compile(
    r"nfs\d?|lustre|ceph|gpfs|beegfs\w*|cifs|smb\d?|glusterfs|fuse\.\w+|9p|virtiofs|afs|wekafs|pvfs2|orangefs"
)
WRITTEN = 64 * MIB  # to measure a disk


def machine(folders: Mapping[str, Path]) -> dict[str, Any]:
    """Everything here. folders: what it is for -> where. Bytes and bytes/second throughout."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": cores(),
        "packages": {name: installed(name) for name in PACKAGES},
        "driver": driver(),
        "listed_gpus": [{"name": name, "memory": size} for name, size in own_gpus()],
        "environment": {name: value for name, value in sorted(os.environ.items()) if TOLD.fullmatch(name)},
        "memory": host_memory(),
        "locked_memory": locked_memory(),
        "shared_memory": space_of(Path("/dev/shm")),
        "infiniband": sorted(os.listdir("/sys/class/infiniband")) if os.path.isdir("/sys/class/infiniband") else [],
        "folders": [{"use": use, **folder(path)} for use, path in folders.items()],
    }


def installed(package: str) -> str | None:
    """The version of a package, without importing it; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def in_range(package: str, version: str) -> bool:
    """Whether a version lies in the range that this package was made for."""
    first, behind = RANGES[package]
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return first <= numbers < behind


def driver() -> str | None:
    """The version of NVIDIA's driver; None without one, "does not answer" where nvidia-smi hangs."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=SECONDS, check=True).stdout.strip()
    except subprocess.TimeoutExpired:
        return "does not answer"
    except (OSError, subprocess.SubprocessError):
        return None


def host_memory() -> dict[str, Any]:
    """total: of the machine. free: what this process can still get, None where torch is broken, which comes with the
    module that knows. what: limits it, the machine or a control group (a container's, a batch job's)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        from recipe_lib.memory.host_limits import free_host_memory
    except (ImportError, OSError):
        return {"total": total, "free": None, "what": "free, not known"}
    free, what = free_host_memory()
    return {"total": total, "free": free, "what": what}


def locked_memory() -> int | None:
    """Bytes that a process may lock in memory (`ulimit -l`); None: as many as there are."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def space_of(path: Path) -> dict[str, int] | None:
    """total and free bytes of the file system there; None where there is no such folder."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return {"total": usage.total, "free": usage.free}


def folder(path: Path) -> dict[str, Any]:
    """A folder that is to be written to: file system, space, and how fast it takes bytes; the nearest one above, where
    it is not there yet. fault: why it cannot be written to, or None."""
    path = path.expanduser().absolute()
    place = next((each for each in (path, *path.parents) if each.is_dir()), Path("/"))
    kind = file_system(place)
    found: dict[str, Any] = {
        "path": str(path),
        "exists": place == path,
        "file_system": kind,
        "shared": bool(SHARED_FILE_SYSTEMS.fullmatch(kind)),
        "total": None,
        "free": None,
        "write_rate": None,
        "fault": None,
    }
    try:
        found |= space_of(place) or {}
        found["write_rate"] = write_rate(place, min(WRITTEN, (found["free"] or 0) // 2))
    except OSError as error:
        found["fault"] = error.strerror or type(error).__name__
    return found


def write_rate(place: Path, size: int) -> float | None:
    """Bytes a second that a new file takes, flushed to the disk; it is removed. None for a size of nothing."""
    block = os.urandom(MIB)  # some file systems do not store zeros
    with tempfile.NamedTemporaryFile(dir=place, prefix=".tune-doctor-", buffering=0) as file:
        start = time.perf_counter()
        for _ in range(size // MIB):
            file.write(block)
        os.fsync(file.fileno())
        seconds = time.perf_counter() - start
    return size // MIB * MIB / seconds if size >= MIB else None


def file_system(place: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The kind of file system that a folder is on, as the kernel names it; "unknown" off Linux."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return "unknown"
    best, kind = "", "unknown"
    for line in lines:
        _, where, name = line.split(" ")[:3]
        where = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), where)
        inside = str(place) == where or str(place).startswith(where.rstrip("/") + "/")
        if inside and len(where) >= len(best):  # of two in one place the later one is seen
            best, kind = where, name
    return kind
