"""Write docs/five_systems.md: what five systems' authors showed, and what a command prints here.

Run `python benchmarks/five_systems.py`; `--only TEXT` runs the commands again that have TEXT in
them. A system is a public piece of work that this library builds on; its rows are in
five_systems_rows.py. A row's last cell is read from its command's output, kept in
docs/five_systems.json, or from a page that the command writes: nothing is typed.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.five_systems_rows import LONG, NEEDS, SYSTEMS, Row  # noqa: E402
from recipe_lib.files import replace_text  # noqa: E402

PAGE = REPOSITORY / "docs" / "five_systems.md"
OUTPUTS = REPOSITORY / "docs" / "five_systems.json"


def main() -> None:
    """Run the commands whose output is not kept yet, or that `--only` names, and write the page."""
    parser = argparse.ArgumentParser(
        description="Write docs/five_systems.md from what commands print.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=PAGE, help="the page; default: docs/five_systems.md"
    )
    parser.add_argument("--only", help="run the commands again that have this in them")
    arguments = parser.parse_args()
    outputs: dict[str, str] = {}
    if OUTPUTS.exists():
        outputs = json.loads(OUTPUTS.read_text(encoding="utf-8"))
    commands = dict.fromkeys(row.command for row in list_rows() if row.page is None)
    for command in commands:
        if command not in outputs or (arguments.only and arguments.only in command):
            print(command, flush=True)
            outputs[command] = run_command(command)
            # After each command, so that an interrupted run need not begin again.
            replace_text(OUTPUTS, json.dumps(outputs, indent=1) + "\n")
    # Without those of commands that no row has any more.
    outputs = {command: outputs[command] for command in commands}
    replace_text(OUTPUTS, json.dumps(outputs, indent=1) + "\n")
    replace_text(arguments.output, format_page(outputs))


def list_rows() -> list[Row]:
    """Return the rows of all systems."""
    rows: list[Row] = []
    for system in SYSTEMS:
        rows += system.rows
    return rows


def run_command(command: str) -> str:
    """Run a command; return the lines of its output that rows look for.

    Of tests, return `all passed`: their number and seconds change with every test that is added.
    Raises SystemExit if there is no such line, or if a test failed.
    """
    words = shlex.split(command)
    # Of this checkout, whatever is installed.
    program = {"tune": ["-m", "recipe_lib"], "pytest": ["-m", "pytest"], "python": []}[words[0]]
    completed = subprocess.run(
        [sys.executable, *program, *words[1:]],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "160"},  # so that no line that a row looks for is wrapped
    )
    if words[0] == "pytest":
        lines = ["all passed"] if completed.returncode == 0 else []
    else:
        patterns = [row.pattern for row in list_rows() if row.command == command]
        lines = [
            line
            for line in completed.stdout.splitlines()
            if any(re.search(pattern, line) for pattern in patterns)
        ]
    if not lines:
        output = (completed.stdout + completed.stderr)[-2000:]
        raise SystemExit(
            f"{command}: exit code {completed.returncode}, nothing printed that a row looks for:\n"
            f"{output}"
        )
    return "\n".join(lines)


def read_cell(row: Row, outputs: dict[str, str]) -> str:
    """Return a row's last cell: the lines that its pattern finds, or their groups.

    outputs: command -> what it has printed. Raises SystemExit unless there are `row.lines` of them:
    the first of several might be another run's.
    """
    text = outputs[row.command] if row.page is None else read_section(row)
    cells = []
    for match in re.finditer(row.pattern, text, re.MULTILINE):
        groups = ["" if group is None else group for group in match.groups()] or [match.group(0)]
        cells.append(" ".join(" ".join(groups).split()))
    if len(cells) != row.lines:
        source = row.page or row.command
        raise SystemExit(
            f"{source}: {len(cells)} lines like {row.pattern!r}, expected {row.lines}, for"
            f" {row.shown!r}"
        )
    if row.against:
        rate = read_tokens_per_second(outputs[row.command])
        reference_rate = read_tokens_per_second(outputs[row.against])
        cells.append(f"{rate / reference_rate:.0%}")
    # As plain words in a cell: a link would lead from another folder, and `[a] [b]` be taken for
    # one.
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "; ".join(cells))
    return text.replace("|", "/").replace("**", "").replace("[", r"\[")


def read_tokens_per_second(text: str) -> float:
    """Return the thousands of tokens a second in a plan's output. Raises SystemExit without any."""
    match = re.search(r"([\d.]+) K a second", text)
    if match is None:
        raise SystemExit(f"no thousands of tokens a second in {text!r}")
    return float(match[1])


def read_section(row: Row) -> str:
    """Return the text of a row's page, or of the section of it that the row names.

    Raises SystemExit unless the page has that section once.
    """
    assert row.page is not None
    text = (REPOSITORY / row.page).read_text(encoding="utf-8")
    if not row.section:
        return text
    # Each part begins with a heading and ends before the next, of whatever level.
    sections = [
        part
        for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE)
        if part.startswith(row.section)
    ]
    if len(sections) != 1:
        raise SystemExit(
            f"{row.page}: {len(sections)} sections {row.section!r}, expected one, for {row.shown!r}"
        )
    return sections[0]


def format_page(outputs: dict[str, str]) -> str:
    """Return the page as Markdown. outputs: command -> what it has printed."""
    rows = list_rows()
    num_differing = sum(bool(row.differs) for row in rows)
    num_missing = sum(len(system.missing) for system in SYSTEMS)
    lines = [
        "# The five systems",
        "",
        (
            "Five public pieces of work are what this library stands on. Each table has what its"
            " authors showed, in their order, and beside it a command and what it prints here."
            " `python benchmarks/five_systems.py` writes the page from the commands' output and"
            " from the pages under [measurements](measurements/README.md) that they write. What is"
            " printed is planned or comes from a CPU, not from a GPU; many of the authors' figures"
            " were measured on GPUs. [What was measured here on an H200](measurements/on_a_gpu.md)"
            " has pages of its own."
        ),
        "",
        (
            f"Of {len(rows) + num_missing} rows {num_differing} are no like for like: what differs"
            f" from the authors' run stands in the cell, behind *differs*. {num_missing} are not"
            " shown, behind a `-`."
        ),
        "",
        (
            "Long commands, by their letters; some need real data, which do not come with the"
            " repository ([what the folder holds](measurements/README.md#real-data)):"
        ),
        "",
        *(f"- {letter}: `{command}`{_describe_need(command)}" for command, letter in LONG.items()),
    ]
    for system in SYSTEMS:
        lines += ["", f"## {system.title}", "", f"{system.link}. {system.text}", ""]
        lines += ["| what its authors showed | command | what it prints |", "| --- | --- | --- |"]
        for row in system.rows:
            differs = f"; *differs*: {row.differs}" if row.differs else ""
            printed = f"{read_cell(row, outputs)}{row.note}{differs}"
            lines.append(f"| {row.shown} | {_format_command(row)} | {printed} |")
        lines += [f"| {shown} | - | {why} |" for shown, why in system.missing]
    return "\n".join(lines) + "\n"


def _format_command(row: Row) -> str:
    """Return a row's command, or the letter that stands for it, and a link to its page."""
    shown_command = LONG.get(row.command, f"`{row.command}`")
    if row.page is None:
        return shown_command
    return f"{shown_command}, [{Path(row.page).stem}]({row.page.removeprefix('docs/')})"


def _describe_need(command: str) -> str:
    """Return which real data a command needs, to follow it in a list; empty if none."""
    if command not in NEEDS:
        return ""
    return f", with `REALDATA_DIR`, a folder that has `{NEEDS[command]}`"


if __name__ == "__main__":
    main()
