"""`tune doctor`: check whether this machine's GPUs, links, memory and folders do what they should.

Packages and folders are looked at here; `run_isolated` measures the rest in forks with a time
limit, which need a parent that has never touched a GPU. doctor_report.py judges the facts and
prints them. The rates were measured on one GPU; copies between GPUs have not run so far
(docs/measurements/on_a_gpu.md), but their check is the same code on any device, and tested on CPU.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from recipe_lib.cli.arguments import SWITCH, Parser, check_output, find_low_numbers
from recipe_lib.cli.launch import count_cores, end_with_parent, list_local_gpus
from recipe_lib.config.local_files import get_cache_root
from recipe_lib.errors import DONE, ConfigError, get_first_line, raise_faults, send_nowhere
from recipe_lib.files import replace_text
from recipe_lib.report.phases import phase
from recipe_lib.units import MIB

FOUND = 1  # exit code: something is not as it should be
STEP_SECONDS = 60.0  # for one step of a process; the slowest takes some seconds
VERSION = 3  # of what --json writes
# Without GPUs: more would stand in each other's way, and a process takes some 200 MB.
RANKS_PER_CORE = 4
DESCRIPTION = """Looks at this machine as a run would use it: versions, GPUs and whether copies \
between them arrive
whole, collectives by size, copies to the host, rates of matrix products, memory, folders. Says in \
a line each
what is wrong, and what to set. Takes seconds on a CPU, longer with more GPUs; leaves no file but \
that of --write.

  tune doctor
  tune doctor --nproc_per_node 2 --write machine.json
  tune plan --config llama3/8B_full --calibration machine.json

Exit codes: 0 all is well; 1 something is not, see the findings; 2 a mistake to correct."""
PARSER = Parser(
    "doctor",
    DESCRIPTION,
    {
        "--nproc_per_node --nproc-per-node": {
            "type": int,
            "metavar": "N",
            "help": "ranks that exchange; default: one a GPU",
        },
        "--output_dir --output-dir": {
            "metavar": "DIR",
            "default": "outputs",
            "help": "where runs will write; default: outputs",
        },
        "--json": SWITCH | {"help": "everything as one JSON object, in place of the report"},
        "--write": {
            "metavar": "FILE",
            "help": "write the measured rates, for `tune plan --calibration FILE`",
        },
    },
)


def run(words: list[str]) -> int:
    """Print facts and findings; write the measured rates where asked to."""
    arguments = read_arguments(words)
    facts = gather_facts(arguments)
    from recipe_lib.cli.doctor_report import ADVICE, find_faults, format_report

    findings = find_faults(facts)
    is_healthy = all(finding["name"] in ADVICE for finding in findings)
    if arguments.json:
        head = {"version": VERSION, "healthy": is_healthy, "findings": findings}
        print(json.dumps(head | facts, indent=2))
    else:
        print(format_report(facts, findings), end="")
    if arguments.write:
        print(write_rates(arguments.write, facts), file=sys.stderr)
    return DONE if is_healthy else FOUND


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the command line; `nproc_per_node` is None for one rank a GPU. Raises ConfigError."""
    arguments = PARSER.parse(words)
    raise_faults(ConfigError, find_low_numbers(arguments, nproc_per_node=1))
    check_output("--write", arguments.write)
    return arguments


def gather_facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all facts as `--json` shows them: machine, steps, failed, links.

    machine: `describe_machine`. steps: step -> its result. failed: step -> why it failed. links:
    `measure_links`, None for one rank.
    """
    from huggingface_hub import constants

    folders = {
        "output_dir": Path(arguments.output_dir),
        "models": Path(constants.HF_HUB_CACHE),
        "data.cache_dir": get_cache_root(None),
    }
    with phase("measuring this machine's device"):
        device = run_isolated(list_device_steps, seconds=STEP_SECONDS)[0]
    facts: dict[str, Any] = {
        "machine": describe_machine(folders),
        "steps": device.values,
        "failed": device.failed,
        "links": None,
    }
    gpus = len(facts["steps"].get("torch", {}).get("gpus", []))
    ranks = arguments.nproc_per_node or max(1, gpus)
    max_ranks = gpus or RANKS_PER_CORE * count_cores()
    if ranks > max_ranks:
        reason = (
            "the GPUs that torch sees"
            if gpus
            else f"{RANKS_PER_CORE} for each core, as there is no GPU"
        )
        raise ConfigError(
            f"--nproc_per_node: found {ranks}, expected at most {max_ranks}, {reason}"
        )
    # A torch that does not start would fail in each rank again.
    if ranks > 1 and "torch" not in facts["failed"]:
        with phase(f"timing collectives among {ranks} ranks"):
            facts["links"] = measure_links(ranks, gpus > 0)
    return facts


def measure_links(ranks: int, on_gpu: bool) -> dict[str, Any]:
    """Time collectives among ranks on this machine; return backend, ranks, points and failed.

    points: operation, bytes, and seconds of the slowest rank. failed: what hung, broke or gave
    wrong numbers, as "rank 1: all_reduce of 1.00 MiB: why".
    """
    import torch

    from recipe_lib.plan.measured.measure_rates import CPU_SIZES, GPU_SIZES, list_collective_steps

    def list_steps(rank: int, folder: Path) -> Iterable[Step]:
        # This rank's share of the cores, as the others run at the same time.
        if not on_gpu:
            torch.set_num_threads(max(1, count_cores() // ranks))
        return list_collective_steps(
            rank,
            ranks,
            folder,
            on_gpu=on_gpu,
            sizes=GPU_SIZES if on_gpu else CPU_SIZES,
            seconds=2 * STEP_SECONDS,
        )

    outcomes = run_isolated(list_steps, ranks, STEP_SECONDS)
    points = []
    failed = []
    for rank, outcome in enumerate(outcomes):
        failed += [f"rank {rank}: {name}: {reason}" for name, reason in outcome.failed.items()]
    for name in outcomes[0].values:
        rows = [outcome.values[name] for outcome in outcomes if name in outcome.values]
        # "meet" joins the group and moves nothing; a time without all ranks is none.
        if name == "meet" or len(rows) < ranks:
            continue
        if wrong := sum(row["wrong"] for row in rows):
            failed.append(f"{name}: {wrong} wrong numbers")
        points.append(rows[0] | {"seconds": max(row["seconds"] for row in rows)})
    return {
        "backend": "nccl" if on_gpu else "gloo",
        "ranks": ranks,
        "points": points,
        "failed": failed,
    }


def write_rates(path: str, facts: dict[str, Any]) -> str:
    """Write the rates as a calibration file, if they were measured; return a line about it."""
    from recipe_lib.plan.measured.rates_file import add_links

    steps = facts["steps"]
    links = facts["links"]
    measured = steps.get("calibration")
    if measured is None:
        return f"{path}: not written, as the device's rates could not be measured; see the findings"
    # Times of links where a collective failed or was wrong are no rates.
    if links and links["failed"]:
        links = None
    low_precision = {
        name: steps[f"{name} matmuls"] for name in ("int8", "fp8") if f"{name} matmuls" in steps
    }
    replace_text(Path(path), json.dumps(add_links(measured, links, low_precision), indent=2) + "\n")
    return f"{path}: rates of {measured['device']}; `tune plan --calibration {path}` uses the file"


GRACE_SECONDS = 3.0  # how long the others may send nothing after one rank has failed
# A process inside a driver that does not answer cannot be killed: it is not waited for longer.
KILL_SECONDS = 5.0

# Name of a step, and the function that makes it; its result is sent through a pipe.
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
# Bytes: a word; a page and a word; one and many megabytes with a ragged end. Small ones go through
# another path.
COPIED = (4, 4100, MIB, 64 * MIB + 12)


def describe_machine(folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return what can be known of the machine in this process; sizes in bytes.

    folders: use of a folder -> its path.
    """
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": count_cores(),
        "packages": {name: find_version(name) for name in PACKAGES},
        # In the order in which Triton looks for one.
        "compiler": os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc"),
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


def read_driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"\d+(\.\d+)+", text)
    return match[0] if match else None


def measure_host_memory() -> dict[str, Any]:
    """Return total and free bytes of the host, and as `what` a phrase on what limits a process.

    That is the machine, or a control group (a container's, a batch job's).
    """
    from recipe_lib.memory.peaks import find_free_host_memory

    free, limit = find_free_host_memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"total": total, "free": free, "what": limit}


def probe_folder(path: Path) -> dict[str, Any]:
    """Return path, total and free bytes, and fault: why a folder cannot be written to, or None."""
    path = path.expanduser().absolute()
    # A run makes its folder: what counts is the nearest one above that is there.
    existing_folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    usage = shutil.disk_usage(existing_folder)
    fault = None
    try:
        # Permissions do not tell of a disk that is mounted read-only, or full.
        TemporaryFile(dir=existing_folder).close()
    except OSError as error:
        fault = error.strerror or type(error).__name__
    return {"path": str(path), "total": usage.total, "free": usage.free, "fault": fault}


def list_device_steps(rank: int, folder: Path) -> Iterator[Step]:
    """Yield the steps that look at torch, the GPUs or the CPU, torchao, and copies between GPUs."""
    yield "torch", describe_torch
    yield "host memory", measure_host_memory
    from recipe_lib.cli.doctor_report import LOW_PRECISION

    # Imports torch, which is known to start by now.
    from recipe_lib.plan.measured.measure_rates import calibrate, measure_matmul_rate

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
    """Return the versions that torch was built with, and the GPUs that it sees.

    Of a GPU: name, memory and free (bytes), capability. error: why torch sees none, as it says.
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
        # torch that sees no GPU is a finding, and no failure of this step.
        described["error"] = get_first_line(error)
        return described
    for number in range(module.device_count()):
        free, total = module.mem_get_info(number)
        gpu = {"name": module.get_device_name(number), "memory": total, "free": free}
        described["gpus"].append(gpu | {"capability": list(module.get_device_capability(number))})
    return described


def measure_gpu(device: str) -> dict[str, float]:
    """Return the rates of copies with the host, and of `bf16` matrix products."""
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

    copy(target, source): torch's own if None; tests plant another. Returns wrong, a line for each
    size that did not arrive as it was, and rate, bytes a second of the largest.
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
    """The outcome of one process."""

    values: dict[str, Any] = field(default_factory=dict)  # by step
    failed: dict[str, str] = field(default_factory=dict)  # step -> why, in a few words


def run_isolated(
    work: Callable[[int, Path], Iterable[Step]], ranks: int = 1, seconds: float = 60.0
) -> list[Outcome]:
    """Make the steps of `work(rank, folder)` in `ranks` processes at once; return the outcomes.

    folder: empty at first, shared by the ranks. seconds: a rank that sends nothing for so long is
    killed. A single process goes on after a step that failed.
    """
    running = []
    outcomes: list[Outcome] = []
    # Processes, as a driver or a link that is broken does not answer, or takes its process along.
    with TemporaryDirectory(prefix="tune-doctor-", ignore_cleanup_errors=True) as name:
        for rank in range(ranks):
            receiver, sender = Pipe(duplex=False)
            arguments = (work, rank, Path(name), sender, os.getpid(), ranks == 1)
            process = get_context("fork").Process(target=_run_steps, args=arguments, daemon=True)
            process.start()
            # The fork has its own: without this one the pipe ends when the fork does.
            sender.close()
            running.append((process, receiver))
        for process, receiver in running:
            outcomes.append(_collect_outcome(process, receiver, seconds))
            # The others may wait for the rank that failed, and will not come further.
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
    """Make the steps as one process, which prints nothing; send each result through the pipe.

    parent: process id. goes_on: also after a step that failed.
    """
    # Objects that the parent has dropped must not be collected here: their end may wait for threads
    # that a fork has not.
    gc.freeze()
    end_with_parent(parent)
    send_nowhere(1, 2)
    for name, step in work(rank, folder):
        pipe.send(("begun", name, None))
        try:
            pipe.send(("done", name, step()))
        except Exception as error:  # noqa: BLE001  (whatever a machine does wrong is reported)
            pipe.send(("failed", name, f"{type(error).__name__}: {get_first_line(error, 300)}"))
            if not goes_on:
                return


def _collect_outcome(process: ForkProcess, pipe: Connection, seconds: float) -> Outcome:
    """Collect what a process sends until it ends; kill it if it sends nothing for `seconds`."""
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
