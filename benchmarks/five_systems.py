"""What the authors of five public pieces of work showed, and what a command prints here for each of
their rows.

    python benchmarks/five_systems.py

A row's last cell is read from the output of its command, or from the page that its command writes:
nothing is typed. Outputs are kept in docs/five_systems.json, so that the page can be checked
without running everything again; `--only TEXT` runs the commands again that have TEXT in them.
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
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=PAGE, help="the page; default: docs/five_systems.md"
    )
    parser.add_argument("--only", help="run the commands again that have this in them")
    arguments = parser.parse_args()
    kept: dict[str, str] = (
        json.loads(OUTPUTS.read_text(encoding="utf-8")) if OUTPUTS.exists() else {}
    )
    commands = dict.fromkeys(
        row.command for system in SYSTEMS for row in system.rows if row.page is None
    )
    for command in commands:
        if command not in kept or (arguments.only and arguments.only in command):
            print(command, flush=True)
            kept[command] = run_command(command)
            replace_text(OUTPUTS, json.dumps(kept, indent=1) + "\n")
    kept = {command: kept[command] for command in commands}
    replace_text(OUTPUTS, json.dumps(kept, indent=1) + "\n")
    replace_text(arguments.output, write_page(kept))


def run_command(command: str) -> str:
    """Return the lines of a command's output that rows look for; of tests, that all passed.
    SystemExit if none did.

    How many tests a file has, and how long they take, is not kept: both change with every test that
    is added.
    """
    words = shlex.split(command)
    program = {"tune": ["-m", "recipe_lib"], "pytest": ["-m", "pytest"], "python": []}[words[0]]
    done = subprocess.run(
        [sys.executable, *program, *words[1:]],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "160"},
    )
    if words[0] == "pytest":
        lines = ["all passed"] if done.returncode == 0 else []
    else:
        patterns = [
            row.pattern for system in SYSTEMS for row in system.rows if row.command == command
        ]
        lines = [
            line
            for line in done.stdout.splitlines()
            if any(re.search(pattern, line) for pattern in patterns)
        ]
    if not lines:
        said = (done.stdout + done.stderr)[-2000:]
        raise SystemExit(
            f"{command}: exit code {done.returncode}, nothing printed that a row looks for:\n{said}"
        )
    return "\n".join(lines)


def read_cell(row: Row, kept: dict[str, str]) -> str:
    """Return what a row's last cell says: the lines that it looks for, their groups alone where
    they have some.

    SystemExit where there are fewer lines or more: a row that takes the first of several may be
    another run's.
    """
    text = kept[row.command] if row.page is None else read_section(row)
    cells = []
    for match in re.finditer(row.pattern, text, re.MULTILINE):
        groups = ["" if group is None else group for group in match.groups()] or [match.group(0)]
        cells.append(" ".join(" ".join(groups).split()))
    if len(cells) != row.lines:
        place = row.page or row.command
        raise SystemExit(
            f"{place}: {len(cells)} lines like {row.pattern!r}, expected {row.lines}, for"
            f" {row.shown!r}"
        )
    if row.against:
        own, other = (
            read_tokens_per_second(kept[command]) for command in (row.command, row.against)
        )
        cells.append(f"{own / other:.0%}")
    # As plain words in a cell: a link would lead from another folder, and `[a] [b]` be taken for
    # one.
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "; ".join(cells))
    return text.replace("|", "/").replace("**", "").replace("[", r"\[")


def read_tokens_per_second(text: str) -> float:
    """Return the tokens a second, in thousands, that a plan says."""
    found = re.search(r"([\d.]+) K a second", text)
    if found is None:
        raise SystemExit(f"no thousands of tokens a second in {text!r}")
    return float(found[1])


def read_section(row: Row) -> str:
    """Return the text of a row's page, or of the one section of it that the row names."""
    assert row.page is not None
    text = (REPOSITORY / row.page).read_text(encoding="utf-8")
    if not row.section:
        return text
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


def write_page(kept: dict[str, str]) -> str:
    """Return the document."""
    rows = [row for system in SYSTEMS for row in system.rows]
    others, missing = (
        sum(bool(row.differs) for row in rows),
        sum(len(system.missing) for system in SYSTEMS),
    )
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
            f"Of {len(rows) + missing} rows {others} are no like for like: what differs from the"
            f" authors' run stands in the cell, behind *differs*. {missing} are not shown, behind a"
            " `-`."
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
            lines.append(
                f"| {row.shown} | {_format_command(row)} | {read_cell(row, kept)}{row.note}{differs} |"
            )
        lines += [f"| {shown} | - | {why} |" for shown, why in system.missing]
    return "\n".join(lines) + "\n"


def _format_command(row: Row) -> str:
    where = f", [{Path(row.page).stem}]({row.page.removeprefix('docs/')})" if row.page else ""
    return (LONG[row.command] if row.command in LONG else f"`{row.command}`") + where


def _describe_need(command: str) -> str:
    return (
        f", with `REALDATA_DIR`, a folder that has `{NEEDS[command]}`" if command in NEEDS else ""
    )


if __name__ == "__main__":
    main()
