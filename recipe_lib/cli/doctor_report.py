"""Find what is wrong in the facts of `tune doctor`, and format the text that it prints.

doctor.py calls `find_faults(facts)` and `format_report(facts, findings)`. `facts` has `machine`
(versions, folders), `steps` (a measured step's name -> its result), `failed` (a step's name -> why)
and `links` (timed collectives, or None), as --json prints them; bytes, seconds, bytes/s, FLOP/s.
"""

import re
from collections.abc import Iterator
from typing import Any

from recipe_lib.config.scan_packages import describe_scans
from recipe_lib.plan.measured.rates_file import LARGE_MATMUL, LOW_PRECISION
from recipe_lib.plan.timing.cost import OPERATIONS, count_wire_bytes
from recipe_lib.report.terminal import (
    WIDE_REPORT,
    get_terminal_width,
    open_console,
    put,
    put_heading,
    put_section,
    read_console,
)
from recipe_lib.report.view import Section, Table
from recipe_lib.units import GIB, MIB, format_bytes, format_duration, pluralize

# Package -> (first version that tune-recipes was made for, first one after those), as in
# pyproject.toml.
RANGES = {"torch": ((2, 11), (2, 16)), "torchao": ((0, 15), (0, 19))}
# {"name": as in docs/doctor.md, "line": what is wrong, "remedy": what to do about it}
Finding = dict[str, str]

# Bytes of a GPU that others use, above which it is a finding; a desktop takes less.
MAX_USED_BY_OTHERS = GIB
SLOW_GPU = 0.8  # of the fastest GPU's rate; below it a GPU is slow
MIN_SHARED_MEMORY = 512 * MIB  # least, for NCCL among GPUs that cannot reach each other
MIN_HOST_MEMORY = 2 * GIB  # least free memory of the host, which torch alone takes
MIN_DISK = 5 * GIB  # least free space of a folder
SAVED_8B_MODEL = 15 * GIB  # size of 8B parameters in bf16
# The remedy where copies between GPUs (peer to peer) are wrong or hang.
_NO_P2P = "set NCCL_P2P_DISABLE=1 for every run (ranks then exchange through host memory)"
# Name of a finding -> what to do about it.
REMEDIES = {
    "package-version": (
        "install a version of that range, with pip; of torchao the one that its release notes name"
        " for this torch"
    ),
    "torchao": (
        "install the torchao that its release notes name for this torch, or the newest in the range"
    ),
    "torch-broken": "install it anew, and restart the machine if its driver does not answer",
    "gpu-unseen": (
        "install a torch with CUDA, see pytorch.org/get-started, and a driver for that CUDA or a"
        " newer one"
    ),
    "gpu-broken": (
        "of `no kernel image` install a torch built for the card; else look for its errors in"
        " `dmesg`, and leave it out with CUDA_VISIBLE_DEVICES"
    ),
    "gpu-in-use": (
        "end the programs that `nvidia-smi` shows, or plan with `tune plan --reserve-gib`"
    ),
    "gpu-slow": "look at its clocks, temperature and power limit (`nvidia-smi -q -d PERFORMANCE`)",
    "gpus-unlike": "leave out a weaker card with CUDA_VISIBLE_DEVICES",
    "peer-copies-wrong": _NO_P2P,
    "peer-copies-hang": (
        f"{_NO_P2P}; switch the IOMMU off in the BIOS where the machine is your own"
    ),
    "collectives-fail": (
        "of gloo see that the machine's name leads to one of its addresses (/etc/hosts), or set"
        " GLOO_SOCKET_IFNAME=lo; of NCCL try again with NCCL_P2P_DISABLE=1, then"
        " NCCL_SHM_DISABLE=1, and see what NCCL_DEBUG=INFO says"
    ),
    "host-memory": "end other programs, or raise the container's limit",
    "shared-memory": "start the container with --shm-size=8g or --ipc=host",
    "folder-unwritable": (
        "make it writable, or set output_dir, HF_HUB_CACHE or data.cache_dir to another folder"
    ),
    "disk-full": (
        "free some space, or set output_dir, HF_HUB_CACHE or data.cache_dir to another folder"
    ),
    "not-measured": "try again; if it stays, what else is found here may be why",
    "not-fused": (
        "install Triton (`pip install triton`) and gcc or clang; CC names another compiler"
    ),
}
# Findings that leave the exit code 0: all works as it should.
ADVICE = ("not-fused", "gpus-unlike")
# How a step's name begins -> the finding if it failed; of any other step it is "not-measured".
# The first that fits counts, so "torchao" stands before "torch".
_FAILED_STEPS = {
    "torchao": "torchao",
    "torch": "torch-broken",
    "rates of GPU": "gpu-broken",
    "copies from GPU": "peer-copies-hang",
}


def find_faults(facts: dict[str, Any]) -> list[Finding]:
    """Return the findings: what is wrong, and what to do about it."""
    faults = [
        *_check_packages(facts),
        *_check_gpus(facts),
        *_check_links(facts),
        *_check_host(facts),
    ]
    for step, reason in facts["failed"].items():
        name = next(
            (finding for begin, finding in _FAILED_STEPS.items() if step.startswith(begin)),
            "not-measured",
        )
        faults.append((name, f"{step}: {reason}"))
    return [{"name": name, "line": line, "remedy": REMEDIES[name]} for name, line in faults]


def _list_gpus(facts: dict[str, Any]) -> list[dict[str, Any]]:
    return facts["steps"].get("torch", {}).get("gpus", [])


def _list_copies(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: value for name, value in facts["steps"].items() if name.startswith("copies from")}


def _check_packages(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    # Yields (name of a finding, line), as all `_check_...` do.
    machine = facts["machine"]
    for name, ((major, minor), (above, after)) in RANGES.items():
        version = machine["packages"][name]
        if not is_in_range(name, version or ""):
            expected = f"{name}>={major}.{minor},<{above}.{after}"
            yield "package-version", f"{name}: found {version or 'none'}, expected {expected}"
    compilers = {"Triton": machine["packages"]["triton"], "a C compiler": machine["compiler"]}
    missing = " and no ".join(name for name, version in compilers.items() if not version)
    if missing and _list_gpus(facts):
        yield "not-fused", f"there is no {missing}: kernels are not fused, and QLoRA is much slower"


def is_in_range(package: str, version: str) -> bool:
    """Return True if a version lies in the range that this package was made for."""
    first, after = RANGES[package]
    # Major and minor; what follows may be `.dev20260101+cu130`.
    major_minor = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return first <= major_minor < after


def _check_gpus(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    torch = facts["steps"].get("torch")
    gpus = _list_gpus(facts)
    listed = facts["machine"]["listed_gpus"]
    if listed and torch and not gpus:
        reason = f"it says: {torch['error'] or 'nothing'}"
        yield (
            "gpu-unseen",
            f"the driver lists {pluralize(len(listed), 'GPU')}, torch {torch['version']} sees"
            f" none; {reason if torch['cuda'] else 'it is built without CUDA'}",
        )
    for number, gpu in enumerate(gpus):
        used = gpu["memory"] - gpu["free"]
        # The context of the process that asked is in it too, some hundred MiB.
        if used > MAX_USED_BY_OTHERS:
            yield (
                "gpu-in-use",
                f"GPU {number}: {format_bytes(used)} of {format_bytes(gpu['memory'])} are in use",
            )
    steps = facts["steps"]
    rates = {
        number: steps[name]["bf16"]
        for number in range(len(gpus))
        if (name := f"rates of GPU {number}") in steps
    }
    for number, rate in rates.items():
        best = max(rates.values())
        same_model_rates = [
            rates[index] for index in rates if gpus[index]["name"] == gpus[number]["name"]
        ]
        if rate < SLOW_GPU * best:
            line = f"bf16 matmuls at {rate / 1e12:.0f} TFLOP/s, another one at {best / 1e12:.0f}"
            # A card that is slower than one of its model is throttled; another model is weaker.
            name = "gpu-slow" if rate < SLOW_GPU * max(same_model_rates) else "gpus-unlike"
            yield name, f"GPU {number}: {line}; all ranks wait for the slowest"


def _check_links(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    copies = _list_copies(facts)
    wrong = [f"{name}: {copy['wrong'][0]}" for name, copy in copies.items() if copy["wrong"]]
    if wrong:
        yield "peer-copies-wrong", f"{wrong[0]}; {len(wrong)} of {len(copies)} ways are wrong"
    links = facts["links"]
    if links and links["failed"]:
        yield (
            "collectives-fail",
            f"collectives among {links['ranks']} ranks ({links['backend']}):"
            f" {'; '.join(links['failed'][:2])}",
        )


def _check_host(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    memory = facts["steps"].get("host memory")
    if memory and memory["free"] < MIN_HOST_MEMORY:
        yield (
            "host-memory",
            f"host memory: {format_bytes(memory['free'])} {memory['what']}, torch alone takes about"
            " as much a rank",
        )
    shared = facts["machine"]["shared_memory"]["free"]
    # Docker gives a container 64 MiB of it.
    if len(_list_gpus(facts)) > 1 and shared < MIN_SHARED_MEMORY:
        yield (
            "shared-memory",
            f"/dev/shm: {format_bytes(shared)} is free, NCCL exchanges through it",
        )
    for folder in facts["machine"]["folders"]:
        name = f"{folder['use']} ({folder['path']})"
        if folder["fault"]:
            yield "folder-unwritable", f"{name}: {folder['fault']}"
        elif folder["free"] < MIN_DISK:
            yield (
                "disk-full",
                f"{name}: {format_bytes(folder['free'])} are free; a saved 8B model takes"
                f" {format_bytes(SAVED_8B_MODEL)}",
            )


def format_report(facts: dict[str, Any], findings: list[Finding]) -> str:
    """Return the report on facts and findings."""
    console = open_console(get_terminal_width(WIDE_REPORT))
    # Findings last: they stay on the screen.
    for section in (
        Section("software", facts=_list_software(facts)),
        Section("GPUs and rates", facts=_describe_gpus(facts)),
        _describe_links(facts),
        Section("host", facts=_describe_host(facts)),
    ):
        put_section(console, section)
    put_heading(console, "findings")
    for finding in findings:
        put(console, f"{finding['name']}: {finding['line']}", indent=2, wrap=False)
        put(console, f"-> {finding['remedy']}", indent=4, wrap=False)
    if not findings:
        put(console, "none: all is well", indent=2)
    return read_console(console).lstrip("\n")


def format_rate(rate: float) -> str:
    """Return bytes a second as GB/s."""
    # 10^9, as links are advertised.
    return f"{rate / 1e9:.2f} GB/s"


def _list_software(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what is installed, with versions: (name, text) of each line."""
    machine = facts["machine"]
    packages = machine["packages"]
    torch = facts["steps"].get("torch", {})
    build = (
        f"CUDA {torch['cuda']}, NCCL {torch['nccl']}" if torch.get("cuda") else "built without CUDA"
    )
    return [
        ("python", f"{machine['python']} on {machine['system']}"),
        (
            "torch",
            (
                f"{torch.get('version') or packages['torch']},"
                f" {build if torch else 'which does not start'}"
            ),
        ),
        ("driver", machine["driver"] or "none"),
        (
            "packages",
            ", ".join(f"{name} {packages[name] or '-'}" for name in packages if name != "torch"),
        ),
        (
            "scans of hybrids",
            describe_scans(machine["scan_kernels"], "cuda" if _list_gpus(facts) else "cpu"),
        ),
    ]


def _describe_gpus(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a line for each GPU, then the rates that plans use: (name, text) of each line."""
    steps = facts["steps"]
    rows = []
    for number, gpu in enumerate(_list_gpus(facts)):
        parts = [gpu["name"], f"sm_{''.join(map(str, gpu['capability']))}"]
        parts += [format_bytes(gpu["memory"]), f"{format_bytes(gpu['free'])} free"]
        rates = steps.get(f"rates of GPU {number}")
        if rates:
            copied = (
                f"to it {format_rate(rates['copy_to_device'])}, from it"
                f" {format_rate(rates['copy_to_host'])}"
            )
            parts += [f"bf16 matmuls {rates['bf16'] / 1e12:.1f} TFLOP/s", copied]
        rows.append((f"GPU {number}", ", ".join(parts)))
    measured = steps.get("calibration")
    # `dry_run`: the rates of a CPU are of one core and tiny shapes, no figures to plan with.
    if measured and not measured["dry_run"]:
        rates = {  # shape -> TFLOP/s
            tuple(point["shape"]): point["rate"] / 1e12 for point in measured["matmul"]["bf16"]
        }
        rate = rates.get(LARGE_MATMUL, max(rates.values()))
        # In the steps of a run a matrix product has a share of its rate when measured alone.
        share = measured.get("step_share")
        in_steps = f", {share * rate:.1f} in steps" if share else ""
        rows += [
            ("GPU 0 loaded", f"bf16 matmuls {rate:.1f} TFLOP/s{in_steps}, for plans"),
            *(
                (f"{name} matmuls", f"{steps[f'{name} matmuls'] / 1e12:.1f} TFLOP/s")
                for name in LOW_PRECISION
                if f"{name} matmuls" in steps
            ),
            ("its memory", f"{format_rate(measured['bandwidth'])} read and written by an addition"),
            ("an operator", f"{1e6 * measured['host_seconds']:.1f} us for the host to issue"),
        ]
    return rows or [("none", "that torch sees")]


def _describe_links(facts: dict[str, Any]) -> Section:
    section = Section("links")
    copies = _list_copies(facts).values()
    links = facts["links"]
    if copies:
        rates = [copy["rate"] for copy in copies]
        intact = sum(not copy["wrong"] for copy in copies)
        span = f"{format_rate(min(rates))} to {format_rate(max(rates))}"
        section.facts = [("copies", f"{intact} of {len(copies)} arrive whole; {span}")]
    # Where a collective failed the table would lack a cell.
    if links and not links["failed"]:
        section.table = _build_collectives_table(links)
    return section


def _build_collectives_table(measured: dict[str, Any]) -> Table:
    """Return a table with a row for each size: time and sent bytes per second of each operation.

    measured: `links` of the facts, without failures.
    """
    points = {  # (bytes, operation) -> seconds
        (point["bytes"], point["operation"]): point["seconds"] for point in measured["points"]
    }
    rows = []
    for size in sorted({size for size, _ in points}):
        row = [format_bytes(size).replace(".00 ", " ")]  # sizes are whole KiB or MiB
        for operation in OPERATIONS:
            seconds = points[size, operation]
            sent_bytes = count_wire_bytes(operation, size, measured["ranks"])
            row += [format_duration(seconds), format_rate(sent_bytes / seconds)]
        rows.append(row)
    header = ["size"]
    for operation in OPERATIONS:
        header += [operation, ""]  # over two columns: time, and rate
    devices = (
        "the CPU, over gloo (which says nothing of GPUs)"
        if measured["backend"] == "gloo"
        else "GPUs, over NCCL"
    )
    note = f"{measured['ranks']} ranks on {devices}: time of one, and what a rank sends a second"
    return Table("collectives", header=header, rows=rows, left=(), notes=(note,))


def _describe_host(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return cores, memory and folders: (name, text) of each line."""
    memory = facts["steps"].get("host memory")
    rows = [("cores", str(facts["machine"]["cores"]))]
    if memory:
        sizes = f"{format_bytes(memory['total'])}, {format_bytes(memory['free'])}"
        rows.append(("memory", f"{sizes} {memory['what']}"))
    for folder in (
        {"use": "/dev/shm", **facts["machine"]["shared_memory"]},
        *facts["machine"]["folders"],
    ):
        space = f"{format_bytes(folder['free'])} of {format_bytes(folder['total'])} free"
        rows.append((folder["use"], f"{folder['path']}, {space}"))
    return rows
