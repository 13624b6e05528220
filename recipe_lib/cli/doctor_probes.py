"""What `tune doctor` looks at: packages, host memory, limits and disks here; GPUs in processes of their own.

The rates were measured on one GPU; copies between GPUs have not run so far (docs/measurements/on_a_gpu.md).
What compares numbers is the same code on any device, and is tested with copies that deliver the wrong ones.

A driver or a link that is broken does not answer, or takes the process along: `run_isolated` does the steps in forks
with a time limit. The result of each step is sent as soon as it is there. The forks need a parent that has never
touched a GPU.
"""

import gc
import importlib.metadata
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import permutations
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from recipe_lib.cli.launch import cores, end_with_parent
from recipe_lib.cli.local_gpus import own_gpus
from recipe_lib.errors import first_line
from recipe_lib.units import MIB

GRACE_SECONDS = 3.0  # how long the others may go on after one rank has failed
KILL_SECONDS = 5.0  # a process inside a driver that does not answer cannot be killed: it is not waited for longer
STUCK = "does not even end when it is killed: the driver hangs; restart the machine"

# A step's name, and what is done; it returns plain values.
Step = tuple[str, Callable[[], Any]]

PACKAGES = ("torch", "torchao", "safetensors", "tokenizers", "huggingface_hub", "transformers", "peft", "triton")
# What this package was made for, as its requirements say; of a checkout, those of its pyproject.toml.
RANGES = {"torch": ((2, 11), (2, 16)), "torchao": ((0, 15), (0, 19))}
# Variables that change what is measured here; tokens and passwords have other names.
REPORTED = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|CUDA|OMP|MKL|PYTORCH)_\w+|TORCH_\w*LOGS|HF_HOME|HF_HUB_CACHE|XDG_CACHE_HOME"
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
        "packages": {name: find_version(name) for name in PACKAGES},
        "compiler": os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc"),  # as Triton looks for one
        "driver": read_driver_version(),
        "listed_gpus": [{"name": name, "memory": size} for name, size in own_gpus()],
        "environment": {name: value for name, value in sorted(os.environ.items()) if REPORTED.fullmatch(name)},
        "memory": measure_host_memory(),
        "shared_memory": measure_space(Path("/dev/shm")),
        "folders": [{"use": use, **probe_folder(path)} for use, path in folders.items()],
    }


def find_version(package: str) -> str | None:
    """Return the version of a package, without importing it; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def in_range(package: str, version: str) -> bool:
    """Whether a version lies in the range that this package was made for."""
    first, after = RANGES[package]
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return first <= numbers < after


def read_driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None without one."""
    try:
        found = re.search(r"\d+(\.\d+)+", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[0] if found else None


def measure_host_memory() -> dict[str, Any]:
    """total: of the machine. free: what this process can still get, None where torch is broken, which comes with the
    module that knows. what: limits it, the machine or a control group (a container's, a batch job's)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        from recipe_lib.memory.peaks import free_host_memory
    except (ImportError, OSError):
        return {"total": total, "free": None, "what": "free, not known"}
    free, what = free_host_memory()
    return {"total": total, "free": free, "what": what}


def measure_space(path: Path) -> dict[str, int] | None:
    """total and free bytes of the file system there; None where there is no such folder."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return {"total": usage.total, "free": usage.free}


def probe_folder(path: Path) -> dict[str, Any]:
    """Return what a folder that is to be written to is: space, and how fast it takes bytes.

    Of one that is not there yet, the nearest one above. fault: why it cannot be written to, or None.
    """
    path = path.expanduser().absolute()
    place = next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))
    found: dict[str, Any] = {"path": str(path), "exists": place == path, "write_rate": None, "fault": None}
    found |= {"total": None, "free": None}
    found |= measure_space(place) or {}
    try:
        found["write_rate"] = measure_write_rate(place, min(WRITTEN, (found["free"] or 0) // 2))
    except OSError as error:
        found["fault"] = error.strerror or type(error).__name__
    return found


def measure_write_rate(place: Path, size: int) -> float | None:
    """Bytes a second that a new file takes, flushed to the disk; it is removed. None for a size of nothing."""
    block = os.urandom(MIB)  # some file systems do not store zeros
    with tempfile.NamedTemporaryFile(dir=place, prefix=".tune-doctor-", buffering=0) as file:
        start = time.perf_counter()
        for _ in range(size // MIB):
            file.write(block)
        os.fsync(file.fileno())
        seconds = time.perf_counter() - start
    return size // MIB * MIB / seconds if size >= MIB else None


def device_steps(rank: int, folder: Path) -> Iterator[Step]:
    """Yield what torch says of itself and the GPUs, the rates of each GPU, or of a CPU, torchao, and copies."""
    yield "torch", describe_torch
    from recipe_lib.plan.timing.calibrate import calibrate, copy_rates, matmul_rate  # torch, once it is known to start

    gpus = describe_torch()["gpus"]
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
    if find_version("torchao"):
        yield "torchao", import_torchao
    for source, target in permutations(range(len(gpus)), 2):
        yield f"copies from GPU {source} to GPU {target}", partial(copy_between, source, target)


def import_torchao() -> str:
    """Import torchao, which may not fit this torch; return its version."""
    import torchao

    return torchao.__version__


def describe_torch() -> dict[str, Any]:
    """Return versions that torch was built with, and the GPUs that it sees: name, memory and free bytes, capability.

    error: why torch sees no GPU, as far as it says.
    """
    import torch

    described: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "nccl": None}
    described |= {"gpus": [], "error": None}
    if torch.version.cuda is None:
        return described
    module = torch.get_device_module("cuda")
    described["nccl"] = ".".join(map(str, module.nccl.version()))
    try:
        module.init()
    except (RuntimeError, AssertionError) as error:
        described["error"] = first_line(error)
        return described
    for number in range(module.device_count()):
        free, total = module.mem_get_info(number)
        gpu = {"name": module.get_device_name(number), "memory": total, "free": free}
        described["gpus"].append(gpu | {"capability": list(module.get_device_capability(number))})
    return described


def on_device(device: str, measure: Callable[[], Any]) -> Any:
    """What `measure` returns with that GPU as the current one."""
    import torch

    with torch.get_device_module("cuda").device(device):
        return measure()


def copy_between(source: int, target: int) -> dict[str, Any]:
    """Copy from one GPU to another; return "from", "to", "access" and what `verify_copies` gives.

    access: the driver says that the target can read the source's memory.
    """
    import torch

    access = torch.get_device_module("cuda").can_device_access_peer(target, source)
    arrived = verify_copies(f"cuda:{source}", f"cuda:{target}")
    return {"from": source, "to": target, "access": access, **arrived}


def verify_copies(
    source: str,
    target: str,
    copy: Callable[[Any, Any], None] | None = None,
    sizes: tuple[int, ...] = COPIED,
) -> dict[str, Any]:
    """Copy between devices in several sizes and patterns, and compare each on the host.

    copy(target, source): torch's own if None; tests plant another. Returns {"wrong": of each size and pattern that
    arrived otherwise, a line, "rate": bytes a second of the largest}.
    """
    import torch

    copy = copy or (lambda target, source: target.copy_(source, non_blocking=True))
    wrong: list[str] = []
    rate = 0.0
    for size in sizes:
        for name, words in patterns(size // 4):
            # What is there before is neither what is sent nor zeros: copies that never happen are seen.
            received = torch.full_like(words, 0x5A5A5A5A).to(target)
            sent = words.to(source, copy=True)
            _synchronize(source, target)
            start = time.perf_counter()
            copy(received, sent)
            _synchronize(source, target)
            rate = size / (time.perf_counter() - start)
            arrived = received.cpu()
            if not torch.equal(arrived, words):
                other = (arrived != words).nonzero().flatten()
                wrong.append(
                    f"{size} bytes of {name}: {len(other)} of {len(words)} words are others, the first is "
                    f"{int(arrived[other[0]])} where {int(words[other[0]])} was sent"
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


def _synchronize(*devices: str) -> None:
    """Wait for all devices that take part."""
    import torch

    for device in devices:
        torch.get_device_module(device).synchronize(device)


@dataclass
class Outcome:
    """What became of one process."""

    values: dict[str, Any] = field(default_factory=dict)  # by step
    failed: dict[str, str] = field(default_factory=dict)  # step -> why, in a few words
    begun: str = "start"  # the last step


# The pipe from a process that has not ended -> it, and what became of it so far.
Running = dict[Any, tuple[ForkProcess, Outcome]]


def run_isolated(work: Callable[[int, Path], Iterable[Step]], ranks: int = 1, seconds: float = 60.0) -> list[Outcome]:
    """Do the steps of `work(rank, folder)` in `ranks` processes at once; return what became of each.

    folder: empty at first, shared by the ranks. seconds: how long no rank may come further; then all are killed. One
    process goes on after a step that failed; of several, the one that failed ends, as the others wait for it.
    """
    outcomes = [Outcome() for _ in range(ranks)]
    running: Running = {}
    why = ""
    with TemporaryDirectory(prefix="tune-doctor-", ignore_cleanup_errors=True) as name:
        try:
            for rank, outcome in enumerate(outcomes):
                mine, theirs = Pipe(duplex=False)
                arguments = (work, rank, Path(name), theirs, os.getpid(), ranks == 1)
                process = get_context("fork").Process(target=_live, args=arguments)
                process.start()
                theirs.close()
                running[mine] = process, outcome
            why = _listen(running, seconds)
        finally:
            for process, _ in running.values():
                process.kill()
            for process, outcome in running.values():
                process.join(KILL_SECONDS)
                outcome.failed.setdefault(outcome.begun, why if process.exitcode else STUCK)
    return outcomes


def _live(
    work: Callable[[int, Path], Iterable[Step]],
    rank: int,
    folder: Path,
    pipe: Connection,
    parent: int,
    goes_on: bool,
) -> None:
    """Live as one process, which prints nothing. goes_on: also after a step that failed."""
    gc.freeze()  # what the parent has thrown away is not to be taken down here: it may wait for threads
    end_with_parent(parent)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.stdout = sys.stderr = os.fdopen(nowhere, "w")
    for name, step in work(rank, folder):
        pipe.send(("begun", name, None))
        try:
            pipe.send(("done", name, step()))
        except Exception as error:  # noqa: BLE001  (whatever a machine does wrong is to be reported)
            first = (str(error).strip().splitlines() or [""])[0]
            pipe.send(("failed", name, f"{type(error).__name__}: {first}"[:300]))
            if not goes_on:
                sys.exit(1)


def _listen(running: Running, seconds: float) -> str:
    """Take in what the processes send; return why those that are left in `running` are to be killed.

    Until all have ended, or for `seconds` without a word from any, or for a short while after the first failure.
    """
    failed = False
    deadline = time.monotonic() + seconds
    while running:
        ready: list[Any] = wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ready:
            return "ended, as another rank had failed" if failed else f"not done after {seconds:.0f} s"
        for pipe in ready:
            process, outcome = running[pipe]
            try:
                kind, name, value = pipe.recv()
            except (EOFError, OSError):  # it has ended
                del running[pipe]
                process.join(KILL_SECONDS)
                if process.exitcode != 0:
                    outcome.failed.setdefault(outcome.begun, _describe_end(process.exitcode))
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    failed = True
                continue
            if kind == "begun":
                outcome.begun = name
            else:
                (outcome.values if kind == "done" else outcome.failed)[name] = value
            if not failed:
                deadline = time.monotonic() + seconds
    return ""


def _describe_end(code: int | None) -> str:
    if code is None:
        return STUCK
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
