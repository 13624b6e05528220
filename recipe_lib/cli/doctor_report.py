"""What `tune doctor` prints."""

from collections.abc import Iterable
from typing import Any

from recipe_lib.cli.doctor_findings import Finding
from recipe_lib.errors import visible
from recipe_lib.plan.timing.cost import OPERATIONS, wire_bytes
from recipe_lib.units import format_bytes

NAME = 16  # columns


def report(facts: dict[str, Any], faults: list[Finding], hints: list[Finding]) -> str:
    """The whole text, findings last: that is what stays on the screen."""
    sections = [
        ("software", software(facts)),
        ("GPUs", gpus(facts)),
        ("rates", rates(facts)),
        ("links", links(facts)),
        ("host", host(facts)),
        ("folders", folders(facts)),
        ("advice", told(hints)),
        ("findings", told(faults) or ["none: all is well"]),
    ]
    blocks = [
        "\n".join([title, *(f"  {visible(line)}".rstrip() for line in lines)]) for title, lines in sections if lines
    ]
    return "\n\n".join(blocks) + "\n"


def told(found: list[Finding]) -> list[str]:
    """What is so, and on the next line what to do."""
    return [line for each in found for line in (f"{each['name']}: {each['line']}", f"  -> {each['remedy']}")]


def row(name: str, value: str) -> str:
    """A name and what belongs to it."""
    return f"{name:<{NAME}} {value}"


def per_second(rate: float) -> str:
    """Bytes a second, as links are advertised: GB is 10^9."""
    if rate < 1e9:
        return f"{rate / 1e6:.0f} MB/s"
    return f"{rate / 1e9:.2f} GB/s" if rate < 1e10 else f"{rate / 1e9:.1f} GB/s"


def software(facts: dict[str, Any]) -> list[str]:
    """Versions, and the variables that change what is measured."""
    machine, told = facts["machine"], facts["steps"].get("torch", {})
    packages = machine["packages"]
    build = f"CUDA {told['cuda']}, NCCL {told['nccl']}" if told.get("cuda") else "built without CUDA"
    lines = [
        row("python", f"{machine['python']} on {machine['system']}"),
        row("torch", f"{told.get('version') or packages['torch']}, {build if told else 'which does not start'}"),
        row("driver", machine["driver"] or "none (nvidia-smi is not there, or says nothing)"),
    ]
    ao = packages["torchao"]
    fits = "cannot be imported beside this torch" if "torchao" in facts["failed"] else "can be imported beside it"
    lines.append(row("torchao", f"{ao}, {fits}" if ao else "not installed"))
    others = ", ".join(f"{name} {packages[name] or '-'}" for name in packages if name not in ("torch", "torchao"))
    lines.append(row("others", others))
    variables = " ".join(f"{name}={value}" for name, value in machine["environment"].items())
    return lines + [row("environment", variables or "none of NCCL_*, CUDA_*, OMP_*, PYTORCH_* is set")]


def gpus(facts: dict[str, Any]) -> list[str]:
    """A line for each."""
    told = facts["steps"].get("torch", {})
    found, lines = told.get("gpus", []), []
    for number, gpu in enumerate(found):
        memory = f"{format_bytes(gpu['memory'])}, {format_bytes(gpu['free'])} free"
        lines.append(row(f"GPU {number}", f"{gpu['name']}, sm_{''.join(map(str, gpu['capability']))}, {memory}"))
    if not found:
        listed = facts["machine"]["listed_gpus"]
        said = f" (torch says: {told['error']})" if told.get("error") else ""
        return [f"{len(listed)} that torch does not see{said}" if listed else f"none; what follows is the CPU's{said}"]
    return lines


def rates(facts: dict[str, Any]) -> list[str]:
    """Matrix products, memory, and copies to and from the host."""
    steps, lines = facts["steps"], []
    measured = steps.get("calibration")
    for number in range(len(steps.get("torch", {}).get("gpus", []))):
        copies, products = steps.get(f"copies of GPU {number}"), steps.get(f"matmuls of GPU {number}")
        parts = [f"bf16 matmuls {products / 1e12:.1f} TFLOP/s"] if products else []
        if number == 0:
            low = {name: steps.get(f"{name} matmuls") for name in ("int8", "fp8")}
            parts += [f"{name} {rate / 1e12:.1f}" for name, rate in low.items() if rate]
        if copies:
            parts.append(f"to it {per_second(copies['copy_to_device'])}, from it {per_second(copies['copy_to_host'])}")
        lines.append(row(f"GPU {number}", ", ".join(parts) or "not measured"))
    if measured:
        best = {name: max(point["rate"] for point in points) for name, points in measured["matmul"].items()}
        tiny = ", one core and tiny shapes: a dry run, no figure to plan with" if measured["dry_run"] else ""
        shown = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in best.items())
        lines.append(row("cpu" if measured["dry_run"] else "GPU 0 at best", f"matmuls {shown} TFLOP/s{tiny}"))
        lines.append(row("its memory", f"{per_second(measured['bandwidth'])} read and written by an addition"))
        lines.append(row("an operator", f"{1e6 * measured['host_seconds']:.1f} us for the host to issue"))
    return lines


def links(facts: dict[str, Any]) -> list[str]:
    """Copies between GPUs, and collectives by size: microseconds, and what goes over the links."""
    lines = []
    ways = [way for way in facts["peers"] if not way["both"]]
    if ways:
        access, good = sum(bool(way["access"]) for way in ways), [way for way in facts["peers"] if not way["wrong"]]
        speeds = [way["rate"] for way in ways]
        lines.append(row("peer access", f"{access} of {len(ways)} ways, as the driver says"))
        span = f"{per_second(min(speeds))} to {per_second(max(speeds))}"
        lines.append(row("peer copies", f"{len(good)} of {len(facts['peers'])} arrive whole; one way {span}"))
    for name, note in (("links", ""), ("links_without_p2p", ", NCCL_P2P_DISABLE=1")):
        if facts[name]:
            lines += [*([""] if lines else []), *collectives(facts[name], note)]
    return lines


def collectives(found: dict[str, Any], note: str) -> list[str]:
    """A table: a line for each size, two columns for each operation."""
    where = "the CPU, over gloo (which says nothing of GPUs)" if found["backend"] == "gloo" else "GPUs, over NCCL"
    lines = [f"{found['ranks']} ranks on {where}{note}: time of one, and what a rank sends a second"]
    lines.append(row("", "".join(f"{operation:<24}" for operation in OPERATIONS).rstrip()))
    for size in sorted({point["bytes"] for point in found["points"]}):
        here = {point["operation"]: point for point in found["points"] if point["bytes"] == size}
        cells = [cell(here[operation], found["ranks"]) if operation in here else "-" for operation in OPERATIONS]
        lines.append(row(size_text(size), "".join(f"{text:<24}" for text in cells).rstrip()))
    return lines + [row("failed", line) for line in found["failed"]]


def cell(point: dict[str, Any], ranks: int) -> str:
    """Time and bandwidth of one collective; WRONG where its numbers are."""
    if point["wrong"]:
        return "WRONG"
    sent = wire_bytes(point["operation"], point["bytes"], ranks) / point["seconds"]
    return f"{time_text(point['seconds']):>7} {per_second(sent):>11}"


def time_text(seconds: float) -> str:
    """Microseconds below a millisecond."""
    return f"{1e6 * seconds:.0f} us" if seconds < 0.001 else f"{1e3 * seconds:.1f} ms"


def size_text(size: int) -> str:
    """`1048576` -> `1 MiB`."""
    return format_bytes(size).replace(".00 ", " ")


def host(facts: dict[str, Any]) -> list[str]:
    """Memory and limits."""
    machine = facts["machine"]
    memory, shared, locked = machine["memory"], machine["shared_memory"], machine["locked_memory"]
    free = "" if memory["free"] is None else f"{format_bytes(memory['free'])} "
    space = f"{format_bytes(shared['total'])}, {format_bytes(shared['free'])} free" if shared else "not there"
    locks = "no limit" if locked is None else format_bytes(locked)
    return [
        row("memory", f"{format_bytes(memory['total'])}, {free}{memory['what']}"),
        row("locked memory", f"{locks} (ulimit -l; InfiniBand cards count against it)"),
        row("/dev/shm", f"{space} (NCCL exchanges through it where GPUs cannot reach each other)"),
        row("cores", str(machine["cores"])),
    ]


def folders(facts: dict[str, Any]) -> list[str]:
    """A line for each folder that a run writes to."""
    return [row(each["use"], ", ".join(_folder(each))) for each in facts["machine"]["folders"]]


def _folder(found: dict[str, Any]) -> Iterable[str]:
    yield found["path"] if found["exists"] else f"{found['path']} (not there yet)"
    yield found["file_system"] + (", shared between machines" if found["shared"] else "")
    if found["fault"]:
        yield f"cannot be written to: {found['fault']}"
    else:
        yield f"{format_bytes(found['free'])} of {format_bytes(found['total'])} free"
    if found["write_rate"]:
        yield f"takes {per_second(found['write_rate'])}"
