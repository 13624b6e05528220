"""What `tune doctor` prints."""

from collections.abc import Iterable
from typing import Any

from recipe_lib.cli.doctor_findings import Finding
from recipe_lib.plan.timing.calibration import LARGE_MATMUL
from recipe_lib.plan.timing.cost import OPERATIONS, wire_bytes
from recipe_lib.report.terminal import heading, open_console, put, put_section, terminal_width, text_of
from recipe_lib.report.view import Section, Table
from recipe_lib.units import format_bytes, format_duration

NAME, WIDTH = 16, 160  # columns: of names; without a terminal
Row = tuple[str, str]


def report(facts: dict[str, Any], faults: list[Finding], hints: list[Finding]) -> str:
    """Return the whole text, findings last: that is what stays on the screen."""
    links = [(facts["links"], ""), (facts["links_without_p2p"], ", NCCL_P2P_DISABLE=1")]
    folders = [(folder["use"], ", ".join(_folder(folder))) for folder in facts["machine"]["folders"]]
    sections = [
        _section("software", software(facts)),
        _section("GPUs", gpus(facts)),
        _section("rates", rates(facts)),
        _section("links", peers(facts)),
        *(_collectives(measured, note) for measured, note in links if measured),
        _section("host", host(facts)),
        _section("folders", folders),
    ]
    console = open_console(terminal_width(WIDTH))
    for section in sections:
        put_section(console, section)
    for title, findings in (("advice", hints), ("findings", faults)) if hints else (("findings", faults),):
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
    """Bytes a second, as links are advertised: GB is 10^9."""
    if rate < 1e9:
        return f"{rate / 1e6:.0f} MB/s"
    return f"{rate / 1e9:.2f} GB/s" if rate < 1e10 else f"{rate / 1e9:.1f} GB/s"


def software(facts: dict[str, Any]) -> list[Row]:
    """Versions, and the variables that change what is measured."""
    machine, torch = facts["machine"], facts["steps"].get("torch", {})
    packages = machine["packages"]
    build = f"CUDA {torch['cuda']}, NCCL {torch['nccl']}" if torch.get("cuda") else "built without CUDA"
    lines = [
        ("python", f"{machine['python']} on {machine['system']}"),
        ("torch", f"{torch.get('version') or packages['torch']}, {build if torch else 'which does not start'}"),
        ("driver", machine["driver"] or "none (nvidia-smi is not there, or says nothing)"),
    ]
    ao = packages["torchao"]
    fits = "cannot be imported with this torch" if "torchao" in facts["failed"] else "can be imported with it"
    lines.append(("torchao", f"{ao}, {fits}" if ao else "not installed"))
    others = ", ".join(f"{name} {packages[name] or '-'}" for name in packages if name not in ("torch", "torchao"))
    lines.append(("others", others))
    variables = " ".join(f"{name}={value}" for name, value in machine["environment"].items())
    return lines + [("environment", variables or "none of NCCL_*, CUDA_*, OMP_*, PYTORCH_* is set")]


def gpus(facts: dict[str, Any]) -> list[Row]:
    """A line for each."""
    torch = facts["steps"].get("torch", {})
    found, lines = torch.get("gpus", []), []
    for number, gpu in enumerate(found):
        memory = f"{format_bytes(gpu['memory'])}, {format_bytes(gpu['free'])} free"
        lines.append((f"GPU {number}", f"{gpu['name']}, sm_{''.join(map(str, gpu['capability']))}, {memory}"))
    if not found:
        listed = facts["machine"]["listed_gpus"]
        said = f" (torch says: {torch['error']})" if torch.get("error") else ""
        unseen = ("unseen", f"{len(listed)} that torch does not see{said}")
        return [unseen if listed else ("none", f"what follows is the CPU's{said}")]
    return lines


def rates(facts: dict[str, Any]) -> list[Row]:
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
        lines.append((f"GPU {number}", ", ".join(parts) or "not measured"))
    if measured:
        lines.append(_rates_for_plans(measured))
        lines.append(("its memory", f"{per_second(measured['bandwidth'])} read and written by an addition"))
        lines.append(("an operator", f"{1e6 * measured['host_seconds']:.1f} us for the host to issue"))
    return lines


def _rates_for_plans(measured: dict[str, Any]) -> Row:
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


def peers(facts: dict[str, Any]) -> list[Row]:
    """Copies between GPUs."""
    ways = [way for way in facts["peers"] if not way["both"]]
    if not ways:
        return []
    access, good = sum(bool(way["access"]) for way in ways), [way for way in facts["peers"] if not way["wrong"]]
    speeds = [way["rate"] for way in ways]
    span = f"{per_second(min(speeds))} to {per_second(max(speeds))}"
    return [
        ("peer access", f"{access} of {len(ways)} ways, as the driver says"),
        ("peer copies", f"{len(good)} of {len(facts['peers'])} arrive whole; one way {span}"),
    ]


def _collectives(measured: dict[str, Any], note: str) -> Section:
    """Return a line for each size, two columns for each operation: the time, and what goes over the links."""
    where = "the CPU, over gloo (which says nothing of GPUs)" if measured["backend"] == "gloo" else "GPUs, over NCCL"
    title = f"{measured['ranks']} ranks on {where}{note}: time of one, and what a rank sends a second"
    rows = []
    for size in sorted({point["bytes"] for point in measured["points"]}):
        points = {point["operation"]: point for point in measured["points"] if point["bytes"] == size}
        cells = [cell(points.get(operation), measured["ranks"]) for operation in OPERATIONS]
        rows.append([format_bytes(size).replace(".00 ", " "), *(text for pair in cells for text in pair)])
    header = ["size", *(name for operation in OPERATIONS for name in (operation, ""))]
    failed = tuple(f"failed  {line}" for line in measured["failed"])
    return Section(title, table=Table(title, header, rows, (), notes=failed))


def cell(point: dict[str, Any] | None, ranks: int) -> tuple[str, str]:
    """Time and bandwidth of one collective; WRONG where its numbers are."""
    if point is None or point["wrong"]:
        return ("WRONG" if point else "-"), ""
    sent = wire_bytes(point["operation"], point["bytes"], ranks) / point["seconds"]
    return format_duration(point["seconds"]), per_second(sent)


def host(facts: dict[str, Any]) -> list[Row]:
    """Memory and limits."""
    machine = facts["machine"]
    memory, shared, locked = machine["memory"], machine["shared_memory"], machine["locked_memory"]
    free = "" if memory["free"] is None else f"{format_bytes(memory['free'])} "
    space = f"{format_bytes(shared['total'])}, {format_bytes(shared['free'])} free" if shared else "not there"
    locks = "no limit" if locked is None else format_bytes(locked)
    return [
        ("memory", f"{format_bytes(memory['total'])}, {free}{memory['what']}"),
        ("locked memory", f"{locks} (ulimit -l; InfiniBand cards count against it)"),
        ("/dev/shm", f"{space} (NCCL exchanges through it where GPUs cannot reach each other)"),
        ("cores", str(machine["cores"])),
    ]


def _folder(found: dict[str, Any]) -> Iterable[str]:
    yield found["path"] if found["exists"] else f"{found['path']} (not there yet)"
    yield found["file_system"] + (", shared between machines" if found["shared"] else "")
    if found["fault"]:
        yield f"cannot be written to: {found['fault']}"
    else:
        yield f"{format_bytes(found['free'])} of {format_bytes(found['total'])} free"
    if found["write_rate"]:
        yield f"takes {per_second(found['write_rate'])}"
