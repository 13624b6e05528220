"""Check this machine's GPUs, links, memory and folders for `tune doctor`.

main.py calls `run(words)`. `gather_facts` looks at packages and folders in this process and
measures the rest as steps, in forked processes with a time limit (`run_isolated`); doctor_report.py
judges the facts and formats them. Copies between GPUs were tested on CPU alone so far
(docs/measurements/on_a_gpu.md).
"""

import argparse
import gc
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
from recipe_lib.config.scan_packages import SCAN_PACKAGES, find_version
from recipe_lib.errors import DONE, ConfigError, get_first_line, raise_faults, send_nowhere
from recipe_lib.files import replace_text
from recipe_lib.report.phases import phase
from recipe_lib.units import MIB

HAS_FINDINGS = 1  # exit code: there are findings
STEP_SECONDS = 60.0  # time limit of a step; the slowest takes some seconds
VERSION = 3  # of the JSON object of --json
# The most ranks on a machine without GPUs: more would slow each other down, and each takes some
# 200 MB.
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
    """Print facts and findings, and write the rates for --write; return the exit code."""
    arguments = read_arguments(words)
    facts = gather_facts(arguments)
    from recipe_lib.cli.doctor_report import ADVICE, find_faults, format_report

    findings = find_faults(facts)
    # A finding in ADVICE is worth knowing, though all works as it should.
    is_healthy = all(finding["name"] in ADVICE for finding in findings)
    if arguments.json:
        report = {"version": VERSION, "healthy": is_healthy, "findings": findings, **facts}
        print(json.dumps(report, indent=2))
    else:
        print(format_report(facts, findings), end="")
    if arguments.write:
        print(write_rates(arguments.write, facts), file=sys.stderr)
    return DONE if is_healthy else HAS_FINDINGS


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; `nproc_per_node` None: a rank for each GPU.

    Raises ConfigError for an unknown option, fewer than one rank, and a file of --write that is not
    one of ours.
    """
    arguments = PARSER.parse(words)
    raise_faults(ConfigError, find_low_numbers(arguments, nproc_per_node=1))
    check_output("--write", arguments.write)
    return arguments


def gather_facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all facts, in the form of `--json`.

    Keys: `machine` as `describe_machine` returns it; `steps`, name of a step -> its result;
    `failed`, name of a step -> why it failed; `links` as `measure_links` returns it, None for one
    rank. Raises ConfigError for more ranks than GPUs, or without GPUs than `RANKS_PER_CORE` allows.
    """
    from huggingface_hub import constants

    folders = {  # the config's key or our word for it -> path
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
    num_gpus = len(facts["steps"].get("torch", {}).get("gpus", []))
    ranks = arguments.nproc_per_node or max(1, num_gpus)
    max_ranks = num_gpus or RANKS_PER_CORE * count_cores()
    if ranks > max_ranks:
        reason = (
            "the GPUs that torch sees"
            if num_gpus
            else f"{RANKS_PER_CORE} for each core, as there is no GPU"
        )
        raise ConfigError(
            f"--nproc_per_node: found {ranks}, expected at most {max_ranks}, {reason}"
        )
    # If torch cannot be imported, every rank would fail in the same way.
    if ranks > 1 and "torch" not in facts["failed"]:
        with phase(f"timing collectives among {ranks} ranks"):
            facts["links"] = measure_links(ranks, num_gpus > 0)
    return facts


def measure_links(ranks: int, on_gpu: bool) -> dict[str, Any]:
    """Time collectives among processes on this machine.

    Return `backend`, `ranks`, `points` (dicts of operation, bytes, and seconds of the slowest
    rank), and `failed`: lines such as "rank 1: all_reduce of 1.00 MiB: why" for collectives that
    hung, raised or gave wrong numbers.
    """
    import torch

    from recipe_lib.plan.measured.measure_rates import CPU_SIZES, GPU_SIZES, list_collective_steps

    def list_steps(rank: int, folder: Path) -> Iterable[Step]:
        # The ranks run at the same time: each gets its share of the cores.
        if not on_gpu:
            torch.set_num_threads(max(1, count_cores() // ranks))
        return list_collective_steps(
            rank,
            ranks,
            folder,
            on_gpu=on_gpu,
            sizes=GPU_SIZES if on_gpu else CPU_SIZES,
            seconds=2 * STEP_SECONDS,  # timeout of a collective: a step's own limit ends it first
        )

    outcomes = run_isolated(list_steps, ranks, STEP_SECONDS)
    points = []
    failed = []  # lines
    for rank, outcome in enumerate(outcomes):
        failed += [f"rank {rank}: {name}: {reason}" for name, reason in outcome.failed.items()]
    for name in outcomes[0].values:
        results = [outcome.values[name] for outcome in outcomes if name in outcome.values]
        # "meet" only joins the process group. A time counts only if all ranks have one.
        if name == "meet" or len(results) < ranks:
            continue
        if num_wrong := sum(result["wrong"] for result in results):
            failed.append(f"{name}: {num_wrong} wrong numbers")
        points.append(results[0] | {"seconds": max(result["seconds"] for result in results)})
    return {
        "backend": "nccl" if on_gpu else "gloo",
        "ranks": ranks,
        "points": points,
        "failed": failed,
    }


def write_rates(path: str, facts: dict[str, Any]) -> str:
    """Write the measured rates as a calibration file; return a line that says whether it did.

    facts: as of `gather_facts`. Raises StorageError if the file cannot be written.
    """
    from recipe_lib.plan.measured.rates_file import LOW_PRECISION, add_links

    steps = facts["steps"]
    links = facts["links"]
    calibration = steps.get("calibration")
    if calibration is None:
        return f"{path}: not written, as the device's rates could not be measured; see the findings"
    # If any collective failed or gave wrong numbers, the times of the links mean nothing.
    if links and links["failed"]:
        links = None
    low_precision = {
        name: steps[f"{name} matmuls"] for name in LOW_PRECISION if f"{name} matmuls" in steps
    }
    replace_text(
        Path(path), json.dumps(add_links(calibration, links, low_precision), indent=2) + "\n"
    )
    return (
        f"{path}: rates of {calibration['device']}; `tune plan --calibration {path}` uses the file"
    )


GRACE_SECONDS = 3.0  # time limit of the other ranks' steps after one rank has failed
# How long a killed process is waited for: inside a driver that hangs it cannot be killed.
KILL_SECONDS = 5.0

# (name of a step, function that runs it). Its result goes through a pipe, so it must be picklable,
# and into the object of --json.
Step = tuple[str, Callable[[], Any]]

# Packages whose versions are reported.
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
# Bytes of test copies: a word; a page and a word; one MiB; many MiB and a ragged end. Small copies
# take another path than large ones.
COPY_SIZES = (4, 4100, MIB, 64 * MIB + 12)


def describe_machine(folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return the facts on the machine that need no fork; sizes in bytes.

    A version, the compiler and the driver are None where there is none. folders: what a folder is
    for -> its path.
    """
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": count_cores(),
        "packages": {name: find_version(name) for name in PACKAGES},
        "scan_kernels": {name: find_version(name) for name in SCAN_PACKAGES},
        # The order in which Triton looks for a C compiler.
        "compiler": os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc"),
        "driver": read_driver_version(),
        "listed_gpus": [name for name, _ in list_local_gpus()],
        "shared_memory": probe_folder(Path("/dev/shm")),
        "folders": [{"use": use, **probe_folder(path)} for use, path in folders.items()],
    }


def read_driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"\d+(\.\d+)+", text)
    return match[0] if match else None


def measure_host_memory() -> dict[str, Any]:
    """Return `total` and `free` bytes of host memory, and as `what` a text on what limits them.

    The limit is the machine's, or a control group's (of a container or a batch job).
    """
    from recipe_lib.memory.peaks import find_free_host_memory

    free, limit = find_free_host_memory()
    return {
        "total": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "free": free,
        "what": limit,
    }


def probe_folder(path: Path) -> dict[str, Any]:
    """Return `path`, `total` and `free` bytes, and `fault`: why it is not writable, or None."""
    path = path.expanduser().absolute()
    # A run creates its folder: the nearest existing parent decides.
    existing_folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    usage = shutil.disk_usage(existing_folder)
    fault = None
    try:
        # Permissions do not show that a disk is mounted read-only, or full.
        TemporaryFile(dir=existing_folder).close()
    except OSError as error:
        fault = error.strerror or type(error).__name__
    return {"path": str(path), "total": usage.total, "free": usage.free, "fault": fault}


def list_device_steps(rank: int, folder: Path) -> Iterator[Step]:
    """Yield the steps on torch, the GPUs or the CPU, torchao, and copies between GPUs.

    rank and folder, which `run_isolated` gives, are not used: one process takes all steps.
    """
    yield "torch", describe_torch
    yield "host memory", measure_host_memory
    # Imported after the first step, which reports a torch that cannot be imported.
    from recipe_lib.plan.measured.measure_rates import calibrate, measure_matmul_rate
    from recipe_lib.plan.measured.rates_file import LOW_PRECISION

    gpus = describe_torch()["gpus"]
    for index in range(len(gpus)):
        yield f"rates of GPU {index}", partial(measure_gpu, f"cuda:{index}")
    # Types in which GPU 0 can multiply, by its compute capability.
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
    """Import torchao, which fails if it does not fit this torch; return its version."""
    import torchao

    return torchao.__version__


def describe_torch() -> dict[str, Any]:
    """Return the versions that torch was built with, and the GPUs that it sees.

    `version` is torch's own; `cuda` and `nccl` are None for a torch without CUDA. `gpus`: dicts of
    `name`, `memory` and `free` (bytes), `capability` ([major, minor]). `error`: torch's message if
    it cannot use any GPU, else None.
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
        # No usable GPU is a finding of the report, not a failure of this step.
        described["error"] = get_first_line(error)
        return described
    for index in range(module.device_count()):
        free, total = module.mem_get_info(index)
        described["gpus"].append(
            {
                "name": module.get_device_name(index),
                "memory": total,
                "free": free,
                "capability": list(module.get_device_capability(index)),
            }
        )
    return described


def measure_gpu(device: str) -> dict[str, float]:
    """Return `copy_to_device`, `copy_to_host` (bytes per second) and matmuls in `bf16` (FLOP/s)."""
    import torch

    from recipe_lib.plan.measured.measure_rates import measure_copy_rates, measure_matmul_rate

    with torch.get_device_module("cuda").device(device):
        return measure_copy_rates(device) | {"bf16": measure_matmul_rate(device, "bf16")}


def verify_copies(
    source: str,
    target: str,
    copy: Callable[[Any, Any], None] | None = None,
    sizes: tuple[int, ...] = COPY_SIZES,
) -> dict[str, Any]:
    """Copy random words between devices in several sizes, and compare each copy on the host.

    source, target: names of devices. copy: called as `copy(target, source)`; None: torch's `copy_`.
    Tests pass a broken one. sizes: bytes, multiples of 4. Return `wrong`, a line for each size that
    arrived changed, and `rate`, bytes per second of the last size, which is the largest.
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
        # Filled with a pattern that is neither sent nor zero: a copy that never happens is noticed.
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
    """The outcome of the steps of one process; a step that was not begun is in neither field."""

    values: dict[str, Any] = field(default_factory=dict)  # name of a step -> its result
    failed: dict[str, str] = field(default_factory=dict)  # name of a step -> why it failed


def run_isolated(
    work: Callable[[int, Path], Iterable[Step]], ranks: int = 1, seconds: float = 60.0
) -> list[Outcome]:
    """Run the steps of `work(rank, folder)` in `ranks` processes at once; return their outcomes.

    This process must not have initialized CUDA, which a fork cannot use again.

    work: gets an empty folder that the ranks share. seconds: time limit of a step; a process that
    exceeds it is killed. After a failed step a single process goes on; one of several ends.
    """
    running = []
    outcomes: list[Outcome] = []
    # In processes of their own: a broken driver or link hangs, or kills the process that uses it.
    with TemporaryDirectory(prefix="tune-doctor-", ignore_cleanup_errors=True) as name:
        for rank in range(ranks):
            receiver, sender = Pipe(duplex=False)
            arguments = (work, rank, Path(name), sender, os.getpid(), ranks == 1)
            process = get_context("fork").Process(target=_run_steps, args=arguments, daemon=True)
            process.start()
            # Closed here, so that the fork's end is the only one and the pipe ends with the fork.
            sender.close()
            running.append((process, receiver))
        for process, receiver in running:
            outcomes.append(_collect_outcome(process, receiver, seconds))
            # The other ranks may wait for the one that failed.
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
    """Run the steps in this fork, which prints nothing; send each result through the pipe.

    parent: process id of the parent. goes_on: run the further steps after a failed one.
    """
    # Garbage of the parent must not be collected here: a destructor may wait for threads that the
    # fork does not have.
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
    """Collect the results of a process until it ends; kill it if it sends none for `seconds`."""
    outcome = Outcome()
    step = "start"  # before the first message
    try:
        while pipe.poll(seconds):
            # kind: begun, done or failed. value: None, the result or the reason.
            kind, step, value = pipe.recv()
            if kind == "done":
                outcome.values[step] = value
            elif kind == "failed":
                outcome.failed[step] = value
        outcome.failed[step] = f"not done after {seconds:.0f} s"
        process.kill()
    except (EOFError, OSError):  # the process has ended
        pass
    process.join(KILL_SECONDS)
    # The reason that is there already, such as the time limit, is the nearer one.
    if process.exitcode:
        outcome.failed.setdefault(step, f"ended with exit code {process.exitcode}")
    return outcome
