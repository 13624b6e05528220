"""The page of the five systems is what its commands and the pages that they write say."""

import ast
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import five_systems
from benchmarks.five_systems import OUTPUTS, PAGE, format_page, read_cell, run_command
from benchmarks.five_systems_rows import FOUR_CARDS, LONG, NEEDS, SYSTEMS, ZERO_1, Row
from tests.house.files import ROOT, list_python_files, parse_tree
from tests.house.test_commands import check_python
from tests.selection import mark_slow_except

ROWS = [row for system in SYSTEMS for row in system.rows]
COMMANDS = list(dict.fromkeys(row.command for row in ROWS))
TUNE = [command for command in COMMANDS if command.startswith("tune ")]
TESTS = [command for command in COMMANDS if command.startswith("pytest ")]
SCRIPTS = [command for command in COMMANDS if command.startswith("python ")]


def kept() -> dict[str, str]:
    outputs: dict[str, str] = json.loads(OUTPUTS.read_text(encoding="utf-8"))
    return outputs


def test_the_page_is_made_from_kept_outputs_and_pages():
    assert PAGE.read_text(encoding="utf-8") == format_page(kept()), (
        "run `python benchmarks/five_systems.py`"
    )


def test_every_cell_says_something():
    assert len(SYSTEMS) == 5 and all(len(system.rows) >= 7 for system in SYSTEMS)
    assert set(TUNE + TESTS + SCRIPTS) == set(COMMANDS) and set(NEEDS) <= set(LONG) <= set(COMMANDS)
    assert set(kept()) == {row.command for row in ROWS if row.page is None}


def test_a_row_that_another_runs_line_could_answer_is_refused():
    """A page with several tables has rows of one name: without its section none of them is read."""
    (row,) = [row for row in ROWS if row.command == ZERO_1]
    assert "36 / 4.71" in read_cell(row, {})
    for other in (
        replace(row, section=""),
        replace(row, lines=1),
        replace(row, section="## Llama"),
    ):
        with pytest.raises(
            SystemExit, match=r"gradient_reduction\.md: \d (lines|sections) .*, expected (one|\d)"
        ):
            read_cell(other, {})
    of_output = Row("x", "tune x", "^tokens .*")
    with pytest.raises(
        SystemExit, match=r"^tune x: 2 lines like '\^tokens \.\*', expected 1, for 'x'$"
    ):
        read_cell(of_output, {"tune x": "tokens 1\ntokens 2"})


def test_no_count_of_tests_is_quoted():
    """It would be another one with the next test that is added."""
    assert {kept()[command] for command in TESTS} == {"all passed"}
    assert not re.search(r"\d+ (passed|failed|tests)\b", PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", TESTS)
def test_named_tests_are_there(command: str):
    _, file, *options = shlex.split(command)
    names = [
        node.name for node in ast.walk(parse_tree(ROOT / file)) if isinstance(node, ast.FunctionDef)
    ]
    chosen = options[options.index("-k") + 1].split(" or ") if "-k" in options else ["test_"]
    for word in chosen:
        assert any(name.startswith("test_") and word in name for name in names), word


def test_it_runs_as_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As a file, without arguments; and it runs nothing whose output is kept."""
    shutil.copy(OUTPUTS, tmp_path / "kept.json")
    monkeypatch.setattr(five_systems, "OUTPUTS", tmp_path / "kept.json")
    monkeypatch.setattr(five_systems, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(sys, "argv", ["benchmarks/five_systems.py"])
    five_systems.main()
    assert (tmp_path / "page.md").read_bytes() == PAGE.read_bytes()
    assert (tmp_path / "kept.json").read_bytes() == OUTPUTS.read_bytes()
    words = [sys.executable, "benchmarks/five_systems.py", "--help"]
    started = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert started.returncode == 0 and "--only" in started.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [command for command in SCRIPTS if "docs/upstream" not in command]
)
def test_scripts_start(command: str):
    check_python(shlex.split(command)[1:], ROOT)


# Every benchmark whose first lines name REALDATA_DIR, and their command.
REAL = {
    path.stem: re.search(
        r"^    python (-m benchmarks\.\w+)",
        ast.get_docstring(parse_tree(path), clean=False) or "",
        re.M,
    )
    for path in list_python_files("benchmarks")
    if "REALDATA_DIR" in (ast.get_docstring(parse_tree(path)) or "") and path.stem != "realdata"
}


@pytest.mark.parametrize("name", mark_slow_except(sorted(REAL), ["tp_losses"]))
def test_a_benchmark_without_its_real_data_says_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = REAL[name]
    assert command is not None and command[1].endswith(f".{name}")
    monkeypatch.delenv("REALDATA_DIR", raising=False)
    monkeypatch.setattr(sys, "argv", [name, "--output", str(tmp_path / "page.md")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    needed = [re.escape(need) for words, need in NEEDS.items() if f".{name} " in words] or [r"\S+"]
    line = rf"error: REALDATA_DIR: not set, expected a folder with {needed[0]}; see \S+\n"
    assert ended.value.code == 2 and re.fullmatch(line, capsys.readouterr().err)
    assert not (tmp_path / "page.md").exists()


def test_all_that_need_real_data_are_known():
    callers = [
        path.stem
        for path in list_python_files("benchmarks")
        if "find_real_data(" in path.read_text("utf-8")
    ]
    assert {*callers} - {"realdata", "tp_curve"} | {"tp_trace"} == REAL.keys()
    assert {Path(command.split()[2].replace(".", "/")).name for command in NEEDS} <= REAL.keys()


# Of the commands that print what is kept, two; all plans are of one, and this one the quickest.
PRINTED = ["tune cat llama3/8B_full --resolved", f"{FOUR_CARDS} --full"]


@pytest.mark.slow
@pytest.mark.parametrize("command", PRINTED)
def test_commands_print_what_is_kept(command: str):
    assert run_command(command) == kept()[command], f"run it again: --only {command!r}"
