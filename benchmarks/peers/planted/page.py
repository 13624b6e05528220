"""Format docs/measurements/planted_faults.md: what tools make of mistakes that cost a run.

`planted_faults.py` calls `page` with the results of each tool. A cell is one fault under one tool:
its `outcome` (rejected, warned, silent ...), the `line` of output that is the evidence, `seconds`
and a `note`. The page has a table of outcomes, and under it every cell's evidence.
"""

from collections import Counter
from typing import Any

from benchmarks.peers.planted.faults import FAULTS, SOUND
from benchmarks.peers.planted.states import CHANGES, SOUND_RESUME
from benchmarks.peers.planted.verdict import FOUND, GOOD, NAMED_TRACEBACK, NOT_APPLICABLE, OUTCOMES

COMMAND = "python -m benchmarks.peers.planted_faults --model FOLDER --environments FOLDER"
_GROUP_OF_STATES = "saving, going on, packing"
# Paragraphs that explain the outcomes.
_WORDS = (
    (
        "**rejected**: ended before the first step, without a traceback, in a line that names the"
        " fault. **stopped**: the same after a step. **warned**: trained, with a line that names"
        " it. **handled**: trained without a word, and what was measured (trained text, losses)"
        " shows no harm. **found by check**: the run says nothing, the tool's own check command"
        " does. **traceback, named**: ended in a traceback, an exception of which names the fault."
        " **ends, unnamed** and **traceback**: ended, and nothing names it. **hangs**: killed after"
        " five minutes. **silent**: trained as if nothing were. **n/a**: the tool has no such"
        " thing; the reason stands below."
    ),
    "",
    (
        "A line names a fault if it has the fault's words (`benchmarks/peers/planted/words.py`), is"
        " not among the lines of the tool's sound runs, numbers apart, is no line of metrics, and"
        " is no echo of the config. Seconds run from the start of the command to the line; where"
        " there is none, to the end."
    ),
)


def format_page(results: dict[str, Any], order: list[str]) -> str:
    """Return the page as Markdown.

    results: tool's name -> `title`, `told`, `versions`, `date`, `cells` by fault's name, and more.
    order: names of tools in the columns' order.
    """
    tools = [results[name] for name in order if name in results]
    lines = [
        "# Planted faults",
        "",
        (
            "What this tool and others make of mistakes that cost a run: each planted alone into a"
            " sound run of seconds on a CPU, a real model of 260 thousand parameters, 24"
            " conversations. Outcomes are computed from exit code, output and what was written, by"
            " rules in the code; no cell is typed in."
        ),
        "",
        (
            f"`{COMMAND}` writes this page and `planted_faults.json`, which has every line of"
            " evidence."
        ),
        "",
        *(_format_tool(tool) for tool in tools),
        "",
        *_WORDS,
        "",
        *_summarize(tools),
        "",
        *_format_table(tools),
        "",
        "## Evidence",
        "",
        *_format_evidence(tools),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _format_tool(tool: dict[str, Any]) -> str:
    """Return a tool's line: versions, how it was run, when, and why it is out, if it is."""
    versions = ", ".join(f"{name} {version}" for name, version in tool["versions"].items())
    load = tool.get("load")
    busy = (
        ""
        if not load
        else (
            f"; load of the machine's {tool['machine']} {load[0]} at the start, {load[1]} at"
            " the end"
        )
    )
    unfit = f"; out of it: {tool['unfit']}" if "unfit" in tool else ""
    return f"- **{tool['title']}** ({versions}): {tool['told']}. {tool['date']}{busy}{unfit}."


def _summarize(tools: list[dict[str, Any]]) -> list[str]:
    """Return a table of the number of faults by outcome and tool."""
    lines = [
        "| |" + "".join(f" {tool['title']} |" for tool in tools),
        "|---|" + "---:|" * len(tools),
    ]
    names = [name for name, *_ in _list_rows() if name not in (SOUND.name, SOUND_RESUME.name)]
    # For each tool: number of faults by outcome.
    counts = [
        Counter(tool["cells"][name]["outcome"] for name in names if name in tool["cells"])
        for tool in tools
    ]
    for outcome in OUTCOMES:
        if any(count[outcome] for count in counts):
            lines.append(f"| {outcome} |" + "".join(f" {count[outcome]} |" for count in counts))
    # For each tool: (faults that are told or handled, faults that apply).
    good = [
        (sum(count[name] for name in GOOD), sum(count.values()) - count[NOT_APPLICABLE])
        for count in counts
    ]
    lines.append(
        "| **told or handled, of those that apply** |"
        + "".join(f" **{a} of {b}** |" for a, b in good)
    )
    told = [sum(count[name] for name in (*GOOD, FOUND, NAMED_TRACEBACK)) for count in counts]
    lines.append(
        "| the same with check commands and tracebacks that name it |"
        + "".join(f" {n} |" for n in told)
    )
    return lines


def _list_rows() -> list[tuple[str, str, str]]:
    """Return (name, title, group) of every fault, in the order of the page."""
    rows = [
        (SOUND.name, SOUND.title, "no fault"),
        (SOUND_RESUME.name, SOUND_RESUME.title, "no fault"),
    ]
    rows += [(fault.name, fault.title, fault.group) for fault in FAULTS]
    return rows + [(change.name, change.title, _GROUP_OF_STATES) for change in CHANGES]


def _format_table(tools: list[dict[str, Any]]) -> list[str]:
    """Return the table of outcomes, a line for each fault, under its group."""
    lines = [
        "| fault |" + "".join(f" {tool['title']} |" for tool in tools),
        "|---|" + "---|" * len(tools),
    ]
    group = ""
    for name, title, fault_group in _list_rows():
        if fault_group != group:
            group = fault_group
            lines.append(f"| *{group}* |" + " |" * len(tools))
        lines.append(
            f"| {title} |"
            + "".join(f" {_format_cell(tool['cells'].get(name))} |" for tool in tools)
        )
    return lines


def _format_cell(cell: dict[str, Any] | None) -> str:
    """Return a cell's outcome and seconds; a silent one is bold."""
    if cell is None:
        return "not run"
    if cell["outcome"] == NOT_APPLICABLE:
        return NOT_APPLICABLE
    bold = "**" if cell["outcome"] == "silent" else ""
    return f"{bold}{cell['outcome']}{bold}, {cell['seconds']:.1f} s"


def _format_evidence(tools: list[dict[str, Any]]) -> list[str]:
    """Return a section for each fault, with a line for each tool: what it said, and a note."""
    lines = []
    for name, title, _ in _list_rows():
        lines += [f"### {title}", ""]
        for tool in tools:
            cell = tool["cells"].get(name)
            if cell is None:
                continue
            told = f": `{_quote_line(cell['line'])}`" if cell["line"] else ""
            note = f" ({cell['note'][:240]})" if cell["note"] else ""
            lines.append(f"- {tool['title']}, {cell['outcome']}{told}{note.replace('|', '/')}")
        lines.append("")
    return lines


def _quote_line(line: str) -> str:
    """Return a line of output that may stand between backticks, cut at 300 characters."""
    text = " ".join(line.replace("`", "'").replace("|", "/").split())
    return text if len(text) <= 300 else f"{text[:300]} ..."
