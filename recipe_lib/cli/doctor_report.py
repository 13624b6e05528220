"""What `tune doctor` makes of the facts: what is wrong, what is worth knowing, and the text that it prints."""

from collections.abc import Iterator
from typing import Any

from recipe_lib.cli.doctor_probes import LOW_PRECISION, RANGES, in_range
from recipe_lib.plan.timing.calibration import LARGE_MATMUL
from recipe_lib.plan.timing.cost import OPERATIONS, wire_bytes
from recipe_lib.report.terminal import heading, open_console, put, put_section, terminal_width, text_of
from recipe_lib.report.view import Section, Table
from recipe_lib.units import GIB, MIB, counted, format_bytes, format_duration, format_seconds

# {"name": to look up in docs/doctor.md, "line": what is so, "remedy": what to do about it; each one line}
Finding = dict[str, str]

IN_USE = GIB  # of a GPU by others; a desktop takes less
SLOW_GPU = 0.8  # of the fastest like it
SHARED_MEMORY = 512 * MIB  # for NCCL among GPUs that cannot reach each other
MEMORY = 2 * GIB  # of the host, for torch alone
DISK = 5 * GIB
SLOW_DISK = 100e6  # bytes/second
SLOW_COPY = 6e9  # bytes/second: a quarter of what PCIe 4 gives with 16 lanes
SAVED = 15 * GIB  # of 8B parameters in bf16
_NO_P2P = "set NCCL_P2P_DISABLE=1 for every run (ranks then exchange through host memory)"
REMEDIES = {
    "package-version": "install a version of that range, with pip; of torchao the one that its release notes name for "
    "this torch",
    "torchao": "install the torchao that its release notes name for this torch, or the newest in the range",
    "torch-broken": "install it anew, and restart the machine if its driver does not answer",
    "gpu-unseen": "install a torch with CUDA, see pytorch.org/get-started, and a driver for that CUDA or a newer one",
    "gpu-broken": "of `no kernel image` install a torch built for the card; else look for its errors in `dmesg`, and "
    "leave it out with CUDA_VISIBLE_DEVICES",
    "gpu-in-use": "end the programs that `nvidia-smi` shows, or plan with `tune plan --reserve-gib`",
    "gpu-slow": "look at its clocks, temperature and power limit (`nvidia-smi -q -d PERFORMANCE`)",
    "peer-copies-wrong": _NO_P2P,
    "peer-copies-hang": f"{_NO_P2P}; switch the IOMMU off in the BIOS where the machine is your own",
    "collectives-fail": "of gloo see that the machine's name leads to one of its addresses (/etc/hosts), or set "
    "GLOO_SOCKET_IFNAME=lo; of NCCL try again with NCCL_P2P_DISABLE=1, then NCCL_SHM_DISABLE=1, and see what "
    "NCCL_DEBUG=INFO says",
    "collectives-wrong": "try again with NCCL_P2P_DISABLE=1, then NCCL_SHM_DISABLE=1, and keep what helps",
    "host-memory": "end other programs, or raise the container's limit",
    "shared-memory": "start the container with --shm-size=8g or --ipc=host",
    "folder-unwritable": "make it writable, or set output_dir, HF_HUB_CACHE or data.cache_dir to another folder",
    "disk-full": "free some space, or set output_dir, HF_HUB_CACHE or data.cache_dir to another folder",
    "not-measured": "try again; if it stays, what else is found here may be why",
    "not-fused": "install Triton (`pip install triton`) and gcc or clang; CC names another compiler",
    "gpus-unlike": "choose with CUDA_VISIBLE_DEVICES which take part",
    "no-peer-access": "`tune plan --search` tries parallel.pipeline, which sends the least",
    "slow-copies": "see that all lanes of its slot are in use (`nvidia-smi -q`), or leave memory.*_offload out",
    "slow-disk": "set output_dir, or HF_HUB_CACHE, to another folder",
}
ADVICE = ("not-fused", "gpus-unlike", "no-peer-access", "slow-copies", "slow-disk")  # not wrong, and worth knowing
# How the name of a step begins -> what it is called when it failed; other steps were not measured.
_BROKEN = {
    "torchao": "torchao",
    "torch": "torch-broken",
    "matmuls of GPU": "gpu-broken",
    "copies of GPU": "gpu-broken",
    "copies from GPU": "peer-copies-hang",
}


def judge(facts: dict[str, Any]) -> tuple[list[Finding], list[Finding]]:
    """Return what is wrong, and what is as it should be and yet worth knowing."""
    faults: list[Finding] = []
    hints: list[Finding] = []
    for look in (_judge_packages, _judge_gpus, _judge_speed, _judge_links, _judge_host, _judge_steps):
        for name, line in look(facts):
            (hints if name in ADVICE else faults).append({"name": name, "line": line, "remedy": REMEDIES[name]})
    return faults, hints


def _list_gpus(facts: dict[str, Any]) -> list[dict[str, Any]]:
    return facts["steps"].get("torch", {}).get("gpus", [])


def _judge_steps(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for step, why in facts["failed"].items():
        yield next((_BROKEN[begin] for begin in _BROKEN if step.startswith(begin)), "not-measured"), f"{step}: {why}"


def _judge_packages(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    machine = facts["machine"]
    for name, ((major, minor), (above, after)) in RANGES.items():
        version = machine["packages"][name]
        if version is None or not in_range(name, version):
            found = f"found {version}" if version else "not installed"
            yield "package-version", f"{name}: {found}, expected {name}>={major}.{minor},<{above}.{after}"
    needed = {"Triton": machine["packages"]["triton"], "a C compiler": machine["compiler"]}
    missing = " and no ".join(what for what, found in needed.items() if not found)
    if missing and _list_gpus(facts):
        line = f"there is no {missing}: kernels are not fused, and QLoRA is much slower"
        yield "not-fused", line


def _judge_gpus(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """GPUs that torch does not see or shares with other programs, and that are not alike."""
    torch = facts["steps"].get("torch")
    gpus = _list_gpus(facts)
    listed = facts["machine"]["listed_gpus"]
    if listed and torch and not gpus:
        why = f"it says: {torch['error'] or 'nothing'}" if torch["cuda"] else "it is built without CUDA"
        yield "gpu-unseen", f"the driver lists {counted(len(listed), 'GPU')}, torch {torch['version']} sees none; {why}"
    for number, gpu in enumerate(gpus):
        used = gpu["memory"] - gpu["free"]
        if used > IN_USE:  # without what this process holds of it, some hundred MiB
            line = f"GPU {number}: {format_bytes(used)} of {format_bytes(gpu['memory'])} are in use"
            yield "gpu-in-use", line
    if len({gpu["name"] for gpu in gpus}) > 1:
        yield "gpus-unlike", "the GPUs are not alike: ranks share evenly, so the slowest and the smallest decide"


def _judge_speed(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """GPUs that are slower than others like them; slow copies to and from the host."""
    steps = facts["steps"]
    gpus = _list_gpus(facts)
    rates = {number: steps[name] for number in range(len(gpus)) if (name := f"matmuls of GPU {number}") in steps}
    for number, rate in rates.items():
        name = gpus[number]["name"]
        best = max(rates[other] for other in rates if gpus[other]["name"] == name)
        if rate < SLOW_GPU * best:
            line = f"another {name} here at {best / 1e12:.0f}; all ranks wait for the slowest"
            yield "gpu-slow", f"GPU {number}: bf16 matmuls at {rate / 1e12:.0f} TFLOP/s, {line}"
    slowest = min(
        (min(rate.values()) for name, rate in steps.items() if name.startswith("copies of")), default=SLOW_COPY
    )
    if slowest < SLOW_COPY:
        yield "slow-copies", f"copies to or from the host at {slowest / 1e9:.1f} GB/s make offloading slow"


def _judge_links(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Copies between GPUs that deliver something else; collectives that hang, break or give wrong numbers."""
    wrong_ways = [way for way in facts["peers"] if way["wrong"]]
    if wrong_ways:
        first = wrong_ways[0]
        access = "; the driver reports peer access all the same" if any(way["access"] for way in wrong_ways) else ""
        line = f"copies between GPUs arrive wrong, {len(wrong_ways)} of {len(facts['peers'])} ways; GPU"
        line += f" {first['from']} to GPU {first['to']}: {first['wrong'][0]}{access}"
        yield "peer-copies-wrong", line
    if facts["peers"] and not any(way["access"] for way in facts["peers"]):
        yield "no-peer-access", "GPUs cannot read each other's memory, so exchange goes through the host"
    links = facts["links"]
    if links is None:
        return
    if links["failed"]:
        # of ranks that ended because of another one, the cause is not theirs
        causes = [line for line in links["failed"] if not line.endswith("another rank had failed")]
        line = f"collectives among {links['ranks']} ranks ({links['backend']}): {(causes or links['failed'])[0]}"
        yield "collectives-fail", line
    wrong = [row for row in links["points"] if row["wrong"]]
    if wrong:
        line = f"{wrong[0]['operation']} of {format_bytes(wrong[0]['bytes'])} among {links['ranks']} ranks gives"
        yield "collectives-wrong", f"{line} {wrong[0]['wrong']} wrong numbers"


def _judge_host(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Host memory, and folders that cannot be written to, are nearly full or slow."""
    machine = facts["machine"]
    memory = machine["memory"]
    if memory["free"] is not None and memory["free"] < MEMORY:
        line = f"host memory: {format_bytes(memory['free'])} {memory['what']}, torch alone takes about as much a rank"
        yield "host-memory", line
    shared = (machine["shared_memory"] or {"free": 0})["free"]
    if len(_list_gpus(facts)) > 1 and shared < SHARED_MEMORY:
        yield "shared-memory", f"/dev/shm: {format_bytes(shared)} is free, NCCL exchanges through it"
    for folder in machine["folders"]:
        place = f"{folder['use']} ({folder['path']})"
        rate = folder["write_rate"]
        if folder["fault"]:
            yield "folder-unwritable", f"{place}: {folder['fault']}"
        elif folder["free"] < DISK:
            line = f"{place}: {format_bytes(folder['free'])} are free; a saved 8B model takes {format_bytes(SAVED)}"
            yield "disk-full", line
        if rate and rate < SLOW_DISK and folder["use"] != "data.cache_dir":
            line = f"{place}: the disk takes {rate / 1e6:.0f} MB/s, an 8B model in bf16 {format_seconds(SAVED / rate)}"
            yield "slow-disk", line


NAME, WIDTH = 16, 160  # columns: of names; without a terminal
Row = tuple[str, str]


def report(facts: dict[str, Any], faults: list[Finding], hints: list[Finding]) -> str:
    """Return the whole text, findings last: that is what stays on the screen."""
    console = open_console(terminal_width(WIDTH))
    for title, rows in (
        ("software", _list_software(facts)),
        ("GPUs and rates", _describe_gpus(facts)),
        ("links", _describe_peers(facts["peers"])),
    ):
        put_section(console, _section(title, rows))
    if facts["links"]:
        put_section(console, _tabulate_collectives(facts["links"]))
    put_section(console, _section("host", _describe_host(facts["machine"])))
    put_section(console, _section("folders", [_describe_folder(folder) for folder in facts["machine"]["folders"]]))
    for title, findings in (("advice", hints), ("findings", faults)):
        if findings or title == "findings":
            heading(console, title)
        for finding in findings:
            put(console, f"{finding['name']}: {finding['line']}", indent=2, wrap=False)
            put(console, f"-> {finding['remedy']}", indent=4, wrap=False)
    if not faults:
        put(console, "none: all is well", indent=2)
    return text_of(console).lstrip("\n")


def _section(title: str, rows: list[Row]) -> Section:
    """Return a section whose values begin in the same column as those of others."""
    return Section(title, facts=[(f"{name:<{NAME}}", value) for name, value in rows])


def per_second(rate: float) -> str:
    """Return bytes a second as links are advertised: GB is 10^9."""
    if rate < 1e9:
        return f"{rate / 1e6:.0f} MB/s"
    return f"{rate / 1e9:.2f} GB/s" if rate < 1e10 else f"{rate / 1e9:.1f} GB/s"


def _list_software(facts: dict[str, Any]) -> list[Row]:
    """Versions, and the variables that change what is measured."""
    machine = facts["machine"]
    packages = machine["packages"]
    torch = facts["steps"].get("torch", {})
    build = f"CUDA {torch['cuda']}, NCCL {torch['nccl']}" if torch.get("cuda") else "built without CUDA"
    fits = "cannot be imported with this torch" if "torchao" in facts["failed"] else "can be imported with it"
    variables = " ".join(f"{name}={value}" for name, value in machine["environment"].items())
    return [
        ("python", f"{machine['python']} on {machine['system']}"),
        ("torch", f"{torch.get('version') or packages['torch']}, {build if torch else 'which does not start'}"),
        ("driver", machine["driver"] or "none"),
        ("torchao", f"{packages['torchao']}, {fits}" if packages["torchao"] else "not installed"),
        ("others", ", ".join(f"{name} {packages[name] or '-'}" for name in packages if name not in RANGES)),
        ("environment", variables or "none of NCCL_*, CUDA_*, OMP_*, PYTORCH_* is set"),
    ]


def _describe_gpus(facts: dict[str, Any]) -> list[Row]:
    """Return a line for each GPU, then what plans take: matrix products, memory, operators."""
    steps = facts["steps"]
    rows = []
    for number, gpu in enumerate(_list_gpus(facts)):
        parts = [gpu["name"], f"sm_{''.join(map(str, gpu['capability']))}"]
        parts += [format_bytes(gpu["memory"]), f"{format_bytes(gpu['free'])} free"]
        products = steps.get(f"matmuls of GPU {number}")
        parts.append(f"bf16 matmuls {products / 1e12:.1f} TFLOP/s" if products else "not measured")
        if number == 0:
            low = {name: steps.get(f"{name} matmuls") for name in LOW_PRECISION}
            parts += [f"{name} {rate / 1e12:.1f}" for name, rate in low.items() if rate]
        copies = steps.get(f"copies of GPU {number}")
        if copies:
            parts.append(f"to it {per_second(copies['copy_to_device'])}")
            parts.append(f"from it {per_second(copies['copy_to_host'])}")
        rows.append((f"GPU {number}", ", ".join(parts)))
    rows = rows or [("none", "what follows is the CPU's")]  # a finding says why torch sees none
    measured = steps.get("calibration")
    if measured:
        rows.append(_describe_rates_for_plans(measured))
        memory = f"{per_second(measured['bandwidth'])} read and written by an addition"
        rows.append(("its memory", memory))
        operator = f"{1e6 * measured['host_seconds']:.1f} us for the host to issue"
        rows.append(("an operator", operator))
    return rows


def _describe_rates_for_plans(measured: dict[str, Any]) -> Row:
    """Return the line of the products that a plan takes: on a GPU of the shape that is measured cold as well."""
    if measured["dry_run"]:
        best = {name: max(point["rate"] for point in points) for name, points in measured["matmul"].items()}
        shown = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in best.items())
        return "cpu", f"matmuls {shown} TFLOP/s, one core and tiny shapes: a dry run, no figure to plan with"
    rates = {tuple(point["shape"]): point["rate"] / 1e12 for point in measured["matmul"]["bf16"]}
    rate = rates.get(LARGE_MATMUL, max(rates.values()))
    share = measured.get("step_share")
    in_steps = f", {share * rate:.1f} in steps" if share else ""
    return "GPU 0 loaded", f"bf16 matmuls {rate:.1f} TFLOP/s{in_steps}, for plans"


def _describe_peers(ways: list[dict[str, Any]]) -> list[Row]:
    """Copies between GPUs."""
    if not ways:
        return []
    speeds = [way["rate"] for way in ways]
    whole = sum(not way["wrong"] for way in ways)
    reached = sum(bool(way["access"]) for way in ways)
    span = f"{per_second(min(speeds))} to {per_second(max(speeds))}"
    return [
        ("peer access", f"{reached} of {len(ways)} ways, as the driver says"),
        ("peer copies", f"{whole} of {len(ways)} arrive whole; {span}"),
    ]


def _tabulate_collectives(measured: dict[str, Any]) -> Section:
    """Return a line for each size, two columns for each operation: the time, and what goes over the links."""
    where = "the CPU, over gloo (which says nothing of GPUs)" if measured["backend"] == "gloo" else "GPUs, over NCCL"
    title = f"{measured['ranks']} ranks on {where}: time of one, and what a rank sends a second"
    points = {(point["bytes"], point["operation"]): point for point in measured["points"]}
    rows = []
    for size in sorted({point["bytes"] for point in measured["points"]}):
        row = [format_bytes(size).replace(".00 ", " ")]
        for operation in OPERATIONS:
            row += _describe_collective(points.get((size, operation)), measured["ranks"])
        rows.append(row)
    header = ["size", *(name for operation in OPERATIONS for name in (operation, ""))]
    failed = tuple(f"failed  {line}" for line in measured["failed"])
    return Section(title, table=Table(title, header, rows, (), notes=failed))


def _describe_collective(point: dict[str, Any] | None, ranks: int) -> tuple[str, str]:
    """Return time and bandwidth; WRONG where its numbers are."""
    if point is None or point["wrong"]:
        return ("WRONG" if point else "-"), ""
    sent = wire_bytes(point["operation"], point["bytes"], ranks) / point["seconds"]
    return format_duration(point["seconds"]), per_second(sent)


def _describe_host(machine: dict[str, Any]) -> list[Row]:
    """Memory and limits."""
    memory = machine["memory"]
    shared = machine["shared_memory"]
    free = "" if memory["free"] is None else f"{format_bytes(memory['free'])} "
    space = f"{format_bytes(shared['total'])}, {format_bytes(shared['free'])} free" if shared else "not there"
    return [
        ("memory", f"{format_bytes(memory['total'])}, {free}{memory['what']}"),
        ("/dev/shm", f"{space} (NCCL exchanges through it where GPUs cannot reach each other)"),
        ("cores", str(machine["cores"])),
    ]


def _describe_folder(folder: dict[str, Any]) -> Row:
    parts = [folder["path"] if folder["exists"] else f"{folder['path']} (not there yet)"]
    if folder["fault"]:
        parts.append(f"cannot be written to: {folder['fault']}")
    else:
        parts.append(f"{format_bytes(folder['free'])} of {format_bytes(folder['total'])} free")
    if folder["write_rate"]:
        parts.append(f"takes {per_second(folder['write_rate'])}")
    return folder["use"], ", ".join(parts)
