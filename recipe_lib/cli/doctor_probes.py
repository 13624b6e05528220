"""What `tune doctor` looks at: packages and folders here; host memory and GPUs in processes of
their own.

The rates were measured on one GPU; copies between GPUs have not run so far
(docs/measurements/on_a_gpu.md). What compares numbers is the same code on any device, and is tested
with copies that deliver the wrong ones.

A driver or a link that is broken does not answer, or takes the process along: `run_isolated` does
the steps in forks with a time limit. The result of each step is sent as soon as it is there. The
forks need a parent that has never touched a GPU.
"""

import gc
import importlib.metadata
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from recipe_lib.cli.launch import count_cores, end_with_parent
from recipe_lib.cli.local_gpus import list_local_gpus
from recipe_lib.errors import get_first_line
from recipe_lib.units import MIB

GRACE_SECONDS = 3.0  # how long the others may say nothing after one rank has failed
# A process inside a driver that does not answer cannot be killed: it is not waited for longer
KILL_SECONDS = 5.0

# A step's name, and what is done; it returns plain values.
Step = tuple[str, Callable[[], Any]]

PACKAGES = (
    "torch",
    "torchao",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "transformers",
    "peft",
    "triton",
)
# What this package was made for, as its requirements say; of a checkout, those of its
# pyproject.toml.
RANGES = {"torch": ((2, 11), (2, 16)), "torchao": ((0, 15), (0, 19))}
# Bytes: a word; a page and a word; one and many megabytes with a ragged end. Small ones go through
# another path.
COPIED = (4, 4100, MIB, 64 * MIB + 12)
LOW_PRECISION = {
    "int8": (7, 5),
    "fp8": (8, 9),
}  # from which compute capability tensor cores and torch can


def describe_machine(folders: Mapping[str, Path]) -> dict[str, Any]:
    """Everything here. folders: what it is for -> where. Bytes throughout."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": count_cores(),
        "packages": {name: find_version(name) for name in PACKAGES},
        "compiler": (
            os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")
        ),  # as Triton looks for one
        "driver": read_driver_version(),
        "listed_gpus": [name for name, _ in list_local_gpus()],
        "shared_memory": probe_folder(Path("/dev/shm")),
        "folders": [{"use": use, **probe_folder(path)} for use, path in folders.items()],
    }


def find_version(package: str) -> str | None:
    """Return the version of a package, without importing it; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_in_range(package: str, version: str) -> bool:
    """Whether a version lies in the range that this package was made for."""
    first, after = RANGES[package]
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return first <= numbers < after


def read_driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None without one."""
    try:
        found = re.search(
            r"\d+(\.\d+)+", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        )
    except OSError:
        return None
    return found[0] if found else None


def measure_host_memory() -> dict[str, Any]:
    """total: of the machine. free: what a process can still get. what: limits it, the machine or a
    control group (a container's, a batch job's).
    """
    from recipe_lib.memory.peaks import find_free_host_memory

    free, what = find_free_host_memory()
    return {
        "total": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "free": free,
        "what": what,
    }


def probe_folder(path: Path) -> dict[str, Any]:
    """Return path, total and free bytes of a folder; of one that is not there yet, the nearest one
    above.

    fault: why it cannot be written to, or None.
    """
    path = path.expanduser().absolute()
    place = next(folder for folder in (path, *path.parents) if folder.is_dir())
    usage = shutil.disk_usage(place)
    fault = None
    try:
        TemporaryFile(dir=place).close()
    except OSError as error:
        fault = error.strerror or type(error).__name__
    return {"path": str(path), "total": usage.total, "free": usage.free, "fault": fault}


def list_device_steps(rank: int, folder: Path) -> Iterator[Step]:
    """Yield what torch says of itself and the GPUs, the rates of each GPU, or of a CPU, torchao,
    and copies.
    """
    yield "torch", describe_torch
    yield "host memory", measure_host_memory
    from recipe_lib.plan.measured.measure_rates import (
        calibrate,
        measure_matmul_rate,
    )  # torch, once it is known to start

    gpus = describe_torch()["gpus"]
    for number in range(len(gpus)):
        yield f"rates of GPU {number}", partial(measure_gpu, f"cuda:{number}")
    for name, capability in LOW_PRECISION.items() if gpus else ():
        if tuple(gpus[0]["capability"]) >= capability:
            yield f"{name} matmuls", partial(measure_matmul_rate, "cuda:0", name)
    if not gpus:
        import torch

        torch.set_num_threads(1)  # the shapes are tiny
    yield "calibration", partial(calibrate, "cuda" if gpus else "cpu")
    if find_version("torchao"):
        yield "torchao", import_torchao
    for source, target in permutations(range(len(gpus)), 2):
        yield (
            f"copies from GPU {source} to GPU {target}",
            partial(verify_copies, f"cuda:{source}", f"cuda:{target}"),
        )


def import_torchao() -> str:
    """Import torchao, which may not fit this torch; return its version."""
    import torchao

    return torchao.__version__


def describe_torch() -> dict[str, Any]:
    """Return versions that torch was built with, and the GPUs that it sees: name, memory and free
    bytes, capability.

    error: why torch sees no GPU, as far as it says.
    """
    import torch

    described: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": None,
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
        described["error"] = get_first_line(error)
        return described
    for number in range(module.device_count()):
        free, total = module.mem_get_info(number)
        gpu = {"name": module.get_device_name(number), "memory": total, "free": free}
        described["gpus"].append(gpu | {"capability": list(module.get_device_capability(number))})
    return described


def measure_gpu(device: str) -> dict[str, float]:
    """Return the rates of copies with the host, and of `bf16` products."""
    import torch

    from recipe_lib.plan.measured.measure_rates import measure_copy_rates, measure_matmul_rate

    with torch.get_device_module("cuda").device(device):
        return measure_copy_rates(device) | {"bf16": measure_matmul_rate(device, "bf16")}


def verify_copies(
    source: str,
    target: str,
    copy: Callable[[Any, Any], None] | None = None,
    sizes: tuple[int, ...] = COPIED,
) -> dict[str, Any]:
    """Copy noise between devices in several sizes, and compare each on the host.

    copy(target, source): torch's own if None; tests plant another. Returns {"wrong": of each size
    that arrived otherwise, a line, "rate": bytes a second of the largest}.
    """
    import torch

    copy = copy or (lambda target, source: target.copy_(source, non_blocking=True))
    wrong: list[str] = []
    rate = 0.0
    for size in sizes:
        generator = torch.Generator().manual_seed(size)
        words = torch.randint(
            -(2**31), 2**31 - 1, (size // 4,), generator=generator, dtype=torch.int32
        )
        # What is there before is neither what is sent nor zeros: copies that never happen are seen.
        received = torch.full_like(words, 0x5A5A5A5A).to(target)
        sent = words.to(source, copy=True)
        for device in (source, target):
            torch.get_device_module(device).synchronize(device)
        start = time.perf_counter()
        copy(received, sent)
        for device in (source, target):
            torch.get_device_module(device).synchronize(device)
        rate = size / (time.perf_counter() - start)
        arrived = received.cpu()
        if not torch.equal(arrived, words):
            wrong.append(
                f"{size} bytes: {int((arrived != words).sum())} of {len(words)} words are others"
            )
    return {"wrong": wrong, "rate": rate}


@dataclass
class Outcome:
    """What became of one process."""

    values: dict[str, Any] = field(default_factory=dict)  # by step
    failed: dict[str, str] = field(default_factory=dict)  # step -> why, in a few words


def run_isolated(
    work: Callable[[int, Path], Iterable[Step]], ranks: int = 1, seconds: float = 60.0
) -> list[Outcome]:
    """Do the steps of `work(rank, folder)` in `ranks` processes at once; return what became of
    each.

    folder: empty at first, shared by the ranks. seconds: how long a rank may not come further; then
    it is killed, and the others get `GRACE_SECONDS`. One process goes on after a step that failed;
    of several, the one that failed ends, as the others wait for it.
    """
    running = []
    outcomes: list[Outcome] = []
    with TemporaryDirectory(prefix="tune-doctor-", ignore_cleanup_errors=True) as name:
        for rank in range(ranks):
            mine, theirs = Pipe(duplex=False)
            arguments = (work, rank, Path(name), theirs, os.getpid(), ranks == 1)
            process = get_context("fork").Process(target=_run_steps, args=arguments, daemon=True)
            process.start()
            theirs.close()
            running.append((process, mine))
        for process, pipe in running:
            outcomes.append(_collect_outcome(process, pipe, seconds))
            if outcomes[-1].failed:
                seconds = GRACE_SECONDS
    return outcomes


def _run_steps(
    work: Callable[[int, Path], Iterable[Step]],
    rank: int,
    folder: Path,
    pipe: Connection,
    parent: int,
    goes_on: bool,
) -> None:
    """Live as one process, which prints nothing. goes_on: also after a step that failed."""
    # What the parent has thrown away is not to be taken down here: it may wait for threads
    gc.freeze()
    end_with_parent(parent)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    for name, step in work(rank, folder):
        pipe.send(("begun", name, None))
        try:
            pipe.send(("done", name, step()))
        except Exception as error:  # noqa: BLE001  (whatever a machine does wrong is to be reported)
            pipe.send(("failed", name, f"{type(error).__name__}: {get_first_line(error, 300)}"))
            if not goes_on:
                return


def _collect_outcome(process: ForkProcess, pipe: Connection, seconds: float) -> Outcome:
    """Take in what a process sends until it has ended; kill it after so many seconds without a
    word.
    """
    outcome = Outcome()
    step = "start"
    try:
        while pipe.poll(seconds):
            kind, step, value = pipe.recv()
            if kind == "done":
                outcome.values[step] = value
            elif kind == "failed":
                outcome.failed[step] = value
        outcome.failed[step] = f"not done after {seconds:.0f} s"
        process.kill()
    except (EOFError, OSError):  # it has ended
        pass
    process.join(KILL_SECONDS)
    if process.exitcode:
        outcome.failed.setdefault(step, f"ended with exit code {process.exitcode}")
    return outcome
