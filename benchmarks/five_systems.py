"""What the authors of five public pieces of work showed, and what a command prints here for each of their rows.

    python -m benchmarks.five_systems --output docs/five_systems.md

A row's last cell is read from the output of its command, or from the page that its command writes: nothing is typed.
Outputs are kept in docs/five_systems.json, so that the page can be checked without running everything again;
`--only TEXT` runs the commands again that have TEXT in them.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.five_systems_rows import LONG, SYSTEMS, Row
from recipe_lib.files import replace_text

REPOSITORY = Path(__file__).resolve().parents[1]
KEPT = REPOSITORY / "docs" / "five_systems.json"
_SECONDS = re.compile(r" in \d+(\.\d+)?s( \([\d:]+\))?")  # of pytest, never the same twice


def main() -> None:
    """Runs the commands whose output is not kept yet, or that `--only` names, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", help="run the commands again that have this in them")
    arguments = parser.parse_args()
    kept: dict[str, str] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    wanted = dict.fromkeys(row.command for system in SYSTEMS for row in system.rows if row.page is None)
    for command in wanted:
        if command not in kept or (arguments.only and arguments.only in command):
            print(command, flush=True)
            kept[command] = output_of(command)
            replace_text(KEPT, json.dumps(kept, indent=1) + "\n")
    kept = {command: kept[command] for command in wanted}
    replace_text(KEPT, json.dumps(kept, indent=1) + "\n")
    replace_text(arguments.output, page(kept))


def output_of(command: str) -> str:
    """What a command prints, without times, of the lines that a row looks for. SystemExit where there is none."""
    words = shlex.split(command)
    if words[0] == "tune":
        words = [sys.executable, "-m", "recipe_lib", *words[1:]]
    elif words[0] in ("pytest", "python"):
        words = [sys.executable, *(["-m", "pytest"] if words[0] == "pytest" else []), *words[1:]]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, env=os.environ | {"COLUMNS": "160"})
    printed = _SECONDS.sub("", done.stdout)
    patterns = [row.pattern for system in SYSTEMS for row in system.rows if row.command == command]
    lines = [line for line in printed.splitlines() if any(re.search(pattern, line) for pattern in patterns)]
    if not lines:
        raise SystemExit(f"{command}: exit code {done.returncode}, nothing printed like {patterns}:\n{printed[-2000:]}")
    return "\n".join(lines)


def found(row: Row, kept: dict[str, str]) -> str:
    """What a row's last cell says: the first line that it looks for, its groups alone where it has some."""
    text = kept[row.command] if row.page is None else (REPOSITORY / row.page).read_text(encoding="utf-8")
    cells = []
    for match in re.finditer(row.pattern, text, re.MULTILINE):
        words = ["" if piece is None else piece for piece in match.groups()] or [match.group(0)]
        cells.append(" ".join(" ".join(words).split()))
        if len(cells) == row.lines:
            break
    if not cells:
        raise SystemExit(f"{row.page}: has nothing like {row.pattern!r}, for the row {row.shown!r}")
    # As plain words in a cell: a link would lead from another folder.
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "; ".join(cells))
    return text.replace("|", "/").replace("**", "")


def page(kept: dict[str, str]) -> str:
    """The document."""
    lines = [
        "# The five systems",
        "",
        "Five public pieces of work are what this library stands on. Each table has what its authors showed, in their "
        "order, and beside it a command and what it prints here. `python -m benchmarks.five_systems --output "
        "docs/five_systems.md` writes the page from the commands' output and from the pages under "
        "[measurements](measurements/README.md) that they write. Figures are planned or come from a CPU; none was "
        "measured on a GPU. A `-` says what is not shown.",
        "",
        "Long commands, by their letters:",
        "",
        *(f"- {letter}: `{command}`" for command, letter in LONG.items()),
    ]
    for system in SYSTEMS:
        lines += ["", f"## {system.title}", "", f"{system.link}. {system.text}", ""]
        lines += ["| what its authors showed | command | what it prints |", "| --- | --- | --- |"]
        lines += [f"| {row.shown} | {_command(row)} | {found(row, kept)}{row.note} |" for row in system.rows]
        lines += [f"| {shown} | - | {why} |" for shown, why in system.missing]
    return "\n".join(lines) + "\n"


def _command(row: Row) -> str:
    where = f", [{Path(row.page).stem}]({row.page.removeprefix('docs/')})" if row.page else ""
    return (LONG[row.command] if row.command in LONG else f"`{row.command}`") + where


if __name__ == "__main__":
    main()
