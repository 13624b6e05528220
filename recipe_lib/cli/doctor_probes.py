"""What `tune doctor` looks at: packages, host memory, limits and disks here; GPUs in processes of their own.

The rates were measured on one GPU; copies between GPUs have not run so far (docs/measurements/on_a_gpu.md).
What compares numbers is the same code on any device, and is tested with copies that deliver the wrong ones.
"""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from recipe_lib.cli.isolated_probe import Step
from recipe_lib.cli.launch import cores
from recipe_lib.cli.local_gpus import TIMEOUT_SECONDS, own_gpus
from recipe_lib.units import MIB

PACKAGES = ("torch", "torchao", "safetensors", "tokenizers", "huggingface_hub", "transformers", "peft", "triton")
# What this package was made for, as its requirements say; of a checkout, those of its pyproject.toml.
RANGES = {"torch": ((2, 11), (2, 16)), "torchao": ((0, 15), (0, 19))}
# Variables that change what is measured here; tokens and passwords have other names.
REPORTED = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|CUDA|OMP|MKL|PYTORCH)_\w+|TORCH_\w*LOGS|HF_HOME|HF_HUB_CACHE|XDG_CACHE_HOME"
)
SHARED_FILE_SYSTEMS = re.compile(
    r"nfs\d?|lustre|ceph|gpfs|beegfs\w*|cifs|smb\d?|glusterfs|fuse\.\w+|9p|virtiofs|afs|wekafs|pvfs2|orangefs"
)
WRITTEN = 64 * MIB  # to measure a disk
# Bytes: a word; a page and a word; one and many megabytes with a ragged end. Small ones go through another path.
COPIED = (4, 4100, MIB, 64 * MIB + 12)
LOW_PRECISION = {"int8": (7, 5), "fp8": (8, 9)}  # from which compute capability tensor cores and torch can


def machine(folders: Mapping[str, Path]) -> dict[str, Any]:
    """Everything here. folders: what it is for -> where. Bytes and bytes/second throughout."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": cores(),
        "packages": {name: installed(name) for name in PACKAGES},
        "compiler": os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc"),  # as Triton looks for one
        "driver": driver(),
        "listed_gpus": [{"name": name, "memory": size} for name, size in own_gpus()],
        "environment": {name: value for name, value in sorted(os.environ.items()) if REPORTED.fullmatch(name)},
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
    first, after = RANGES[package]
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return first <= numbers < after


def driver() -> str | None:
    """The version of NVIDIA's driver; None without one, "does not answer" where nvidia-smi hangs."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True).stdout.strip()
    except subprocess.TimeoutExpired:
        return "does not answer"
    except (OSError, subprocess.SubprocessError):
        return None


def host_memory() -> dict[str, Any]:
    """total: of the machine. free: what this process can still get, None where torch is broken, which comes with the
    module that knows. what: limits it, the machine or a control group (a container's, a batch job's)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        from recipe_lib.memory.peaks import free_host_memory
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


def device_steps(rank: int, folder: Path) -> Iterator[Step]:
    """What torch says of itself and the GPUs; then the rates of each GPU, and of a CPU where there is none."""
    found: dict[str, Any] = {}

    def look() -> dict[str, Any]:
        found.update(describe_torch())
        return found

    yield "torch", look
    from recipe_lib.plan.timing.calibrate import calibrate, copy_rates, matmul_rate  # torch, once it is known to start

    gpus = found.get("gpus", [])
    for number in range(len(gpus)):
        device = f"cuda:{number}"
        yield f"copies of GPU {number}", partial(on_device, device, partial(copy_rates, device))
        yield f"matmuls of GPU {number}", partial(on_device, device, partial(matmul_rate, device, "bf16"))
    for name, capability in LOW_PRECISION.items() if gpus else ():
        if tuple(gpus[0]["capability"]) >= capability:
            yield f"{name} matmuls", partial(on_device, "cuda:0", partial(matmul_rate, "cuda:0", name))
    if not gpus:
        import torch

        torch.set_num_threads(1)  # the shapes are tiny
    yield "calibration", partial(calibrate, "cuda" if gpus else "cpu")


def torchao_steps(rank: int, folder: Path) -> Iterator[Step]:
    """Imports torchao, which says itself whether it fits this torch."""

    def load() -> str:
        import torchao

        return torchao.__version__

    yield "torchao", load


def describe_torch() -> dict[str, Any]:
    """Versions that torch was built with, and the GPUs that it sees: name, memory and free bytes, capability; whether
    this torch has kernels for it. error: why torch sees no GPU, as far as it says."""
    import torch

    described: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "nccl": None,
        "built_for": [],
        "gpus": [],
        "error": None,
    }
    if torch.version.cuda is None:
        return described
    module = torch.get_device_module("cuda")
    described["nccl"] = ".".join(map(str, module.nccl.version()))
    try:
        module.init()
    except (RuntimeError, AssertionError) as error:
        described["error"] = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return described
    described["built_for"] = module.get_arch_list()
    for number in range(module.device_count()):
        capability = module.get_device_capability(number)
        free, total = module.mem_get_info(number)
        gpu = {"name": module.get_device_name(number), "memory": total, "free": free, "capability": list(capability)}
        described["gpus"].append(gpu | {"supported": has_kernels(capability, described["built_for"])})
    return described


def has_kernels(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Whether a torch built for these (`sm_90`, `compute_90`, with `a` or `f` at the end for one card alone) has
    kernels for a card: of the same generation and not newer, or code that the driver can compile for it."""
    for name in built_for:
        kind, _, number = name.partition("_")
        digits = "".join(letter for letter in number if letter.isdigit())
        if not digits:
            continue
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if kind == "compute" and (major, minor) <= tuple(capability):
            return True
    return False


def on_device(device: str, measure: Callable[[], Any]) -> Any:
    """What `measure` returns with that GPU as the current one."""
    import torch

    with torch.get_device_module("cuda").device(device):
        return measure()


def peer_steps(rank: int, folder: Path) -> Iterator[Step]:
    """Copies between every two GPUs, in each direction and in both at once."""
    import torch

    count = torch.get_device_module("cuda").device_count()
    for first, second in permutations(range(count), 2):
        yield f"copies from GPU {first} to GPU {second}", partial(copy_between, first, second, both=False)
    for first, second in combinations(range(count), 2):
        name = f"copies between GPU {first} and GPU {second} both ways at once"
        yield name, partial(copy_between, first, second, both=True)


def copy_between(first: int, second: int, *, both: bool) -> dict[str, Any]:
    """{"from", "to", "both", "access": whether the driver says that the second can read the first's memory, "wrong",
    "rate"}, the last two of `verify_copies`."""
    import torch

    access = torch.get_device_module("cuda").can_device_access_peer(second, first)
    there, back = (f"cuda:{first}", f"cuda:{second}"), (f"cuda:{second}", f"cuda:{first}")
    found = verify_copies([there, back] if both else [there])
    return {"from": first, "to": second, "both": both, "access": access, **found}


def verify_copies(
    ways: list[tuple[str, str]], copy: Callable[[Any, Any], None] | None = None, sizes: tuple[int, ...] = COPIED
) -> dict[str, Any]:
    """Copies between devices, all of the ways at once, in several sizes and patterns, each compared on the host.

    copy(target, source): torch's own if None; tests plant another. Returns {"wrong": of each size and pattern that
    arrived otherwise, a line, "rate": bytes a second of the largest, all ways together}.
    """
    import torch

    copy = copy or (lambda target, source: target.copy_(source, non_blocking=True))
    wrong: list[str] = []
    rate = 0.0
    for size in sizes:
        for name, sent in patterns(size // 4):
            # What is there before is neither what is sent nor zeros: copies that never happen are seen.
            pairs = [(torch.full_like(sent, 0x5A5A5A5A).to(to), sent.to(where, copy=True)) for where, to in ways]
            _settle(ways)
            start = time.perf_counter()
            for target, source in pairs:
                copy(target, source)
            _settle(ways)
            rate = len(ways) * size / (time.perf_counter() - start)
            for target, _ in pairs:
                arrived = target.cpu()
                if not torch.equal(arrived, sent):
                    other = (arrived != sent).nonzero().flatten()
                    wrong.append(
                        f"{size} bytes of {name}: {len(other)} of {len(sent)} words are others, the first is "
                        f"{int(arrived[other[0]])} where {int(sent[other[0]])} was sent"
                    )
    return {"wrong": wrong, "rate": rate}


@cache
def patterns(words: int) -> tuple[tuple[str, Any], ...]:
    """(name, int32 tensor on the host): noise, zeros, ones, and places, which show what lands elsewhere."""
    import torch

    generator = torch.Generator().manual_seed(words)
    noise = torch.randint(-(2**31), 2**31 - 1, (words,), generator=generator, dtype=torch.int64).to(torch.int32)
    return (
        ("noise", noise),
        ("zeros", torch.zeros(words, dtype=torch.int32)),
        ("ones", torch.full((words,), -1, dtype=torch.int32)),
        ("places", torch.arange(1, words + 1, dtype=torch.int32)),
    )


def _settle(ways: list[tuple[str, str]]) -> None:
    """Waits for all devices that take part."""
    import torch

    for device in {device for way in ways for device in way}:
        if torch.device(device).type != "cpu":
            torch.get_device_module("cuda").synchronize(device)
