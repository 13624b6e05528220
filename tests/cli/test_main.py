"""The entry point: help, mistakes, and how little a verb costs that needs no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipe_lib.__main__ import start
from recipe_lib.cli.main import VERBS, main
from recipe_lib.config.paths import list_configs
from tests.cli.commands import ROOT, TUNE, build_environment, tune
from tests.selection import mark_slow_but

CONFIG = "llama3/8B_full"
CHEAP = [
    [],
    ["ls", "qwen3", "8B", "lora"],
    ["-V"],
    ["help", "run"],
    ["cat", CONFIG, "--resolved", "batch_size=3"],
    ["validate", CONFIG, "batch_sice=3"],
    ["cp", CONFIG, "--help"],
    ["import", f"{ROOT}/tests/config/torchtune_lora.yaml"],
    ["run", "full_finetune_distributed", "--config", CONFIG, "optimizer.lrr=1"],
    ["run", "--nproc_per_node", "four", "full_finetune_distributed", "--config", CONFIG],
    ["plan", CONFIG, "--device", "rx7900xtx"],
    ["tp-plan", "llama3/8B", "--tensor", "two"],
    ["doctor", "--nproc_per_node", "two"],
    ["generate", "nowhere", "--prompt", "a", "--top-k", "0"],
    ["download", "--help"],
    ["frobnicate"],
]

# Runs a command line in a fresh interpreter and reports what it imported and how long its CPU
# worked.
PROBE = """
import json, os, sys
from recipe_lib.cli.main import main
code = main(sys.argv[1:])
sys.stdout.flush()
heavy = sorted({"torch", "torchao", "transformers", "huggingface_hub", "tokenizers", "numpy"} & set(sys.modules))
times = os.times()
json.dump({"code": code, "heavy": heavy, "seconds": times.user + times.system}, open(3, "w"))
"""


@pytest.mark.parametrize("words", mark_slow_but(CHEAP, 6), ids=" ".join)
def test_no_torch_and_little_time(words: list[str], tmp_path, record_property):
    with open(tmp_path / "report", "w") as report:
        result = subprocess.run(
            [
                "bash",
                "-c",
                f'exec "$@" 3> {tmp_path / "report"}',
                "-",
                sys.executable,
                "-c",
                PROBE,
                *words,
            ],
            cwd=ROOT,
            env=build_environment(),
            capture_output=True,
            text=True,
            pass_fds=[report.fileno()],
        )
    found = json.loads((tmp_path / "report").read_text())
    print(f"tune {' '.join(words)}: {found['seconds']:.2f} s of CPU")
    record_property("cpu_seconds", found["seconds"])
    assert found["heavy"] == []
    assert "Traceback" not in result.stderr
    assert found["code"] in (0, 2)
    # 0.3 s is the promise on a quiet machine; a loaded one may take three times as long, importing
    # torch ten times.
    assert found["seconds"] < 0.9


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_every_verb(words: list[str], capsys: pytest.CaptureFixture):
    assert main(words) == 0
    printed = capsys.readouterr()
    assert all(f"  {verb} " in printed.out for verb in VERBS)
    assert printed.err == ""


def test_help_for_help_and_beside_an_option_of_all_verbs(capsys: pytest.CaptureFixture):
    assert main(["help", "help"]) == main(["help", "-q"]) == main(["help"]) == 0
    printed = capsys.readouterr().out
    assert printed == 3 * printed[: len(printed) // 3] and printed.startswith("usage: tune VERB")
    assert main(["help", "-q", "run"]) == 0
    assert capsys.readouterr().out.startswith("usage: tune run ")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture):
    assert main([verb, "--help"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"usage: tune {verb} ")
    assert printed.err == ""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["lss"], "error: tune: unknown verb 'lss'; did you mean ls?"),
        (["generat", "x"], "error: tune: unknown verb 'generat'; did you mean generate?"),
        (
            ["zzz"],
            (
                "error: tune: unknown verb 'zzz'; one of: ls, cat, cp, import, validate, download,"
                " data, plan, tp-plan, doctor, run, eval, export, upload, generate, completion"
            ),
        ),
        (
            ["--verbos"],
            "error: tune: unknown option '--verbos'; did you mean --verbose?",
        ),
        (
            ["cat", CONFIG, "--resolvd"],
            "error: tune cat: unknown option --resolvd; did you mean --resolved?",
        ),
        (
            ["generate", "x", "--promt", "a"],
            "error: tune generate: unknown option --promt; did you mean --prompt?",
        ),
        (
            ["generate", "x", "--prompt", "\udcff"],
            "error: --prompt: is not UTF-8; give it in UTF-8 text",
        ),
        (["ls", "--all"], "error: tune ls: unknown option --all; see `tune ls --help`"),
        (["cat"], "error: tune cat: CONFIG is missing; see `tune cat --help`"),
        (["cp"], "error: tune cp: RECIPE|CONFIG and DEST are missing; see `tune cp --help`"),
        (
            ["generate", "x", "--prompt"],
            (
                "error: tune generate: argument --prompt: expected one argument; see `tune generate"
                " --help`"
            ),
        ),
        (["cp", "a", "b", "c"], "error: tune cp: unexpected argument c; see `tune cp --help`"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture):
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.err == line + "\n"
    assert printed.out == ""


def test_a_closed_pipe_is_no_traceback():
    script = f"{' '.join(TUNE)} cat {CONFIG} --describe | true; echo ${{PIPESTATUS[0]}}"
    for _ in range(2):
        result = subprocess.run(
            ["bash", "-c", script],
            cwd=ROOT,
            env=build_environment(PYTHONUNBUFFERED="1"),
            capture_output=True,
            text=True,
        )
        assert result.stderr == ""
        assert result.stdout == "141\n"


@pytest.mark.slow
def test_a_pipe_that_is_closed_while_rich_prints_ends_as_any_other(monkeypatch: pytest.MonkeyPatch):
    """rich would end the process with 1 by itself."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(["data", "show", "demo/full", "--limit", "1"]) == 141


needs_full = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="no device that is always full"
)


@needs_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["cat", CONFIG], ["help", "ls"]], ids=" ".join)
def test_output_to_a_full_disk_is_one_line(words: list[str], unbuffered: str):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*TUNE, *words],
            cwd=ROOT,
            env=build_environment(PYTHONUNBUFFERED=unbuffered),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert result.stderr == "error: standard output: No space left on device; free some space\n"
    assert result.returncode == 6


@needs_full
@pytest.mark.parametrize(
    ("module", "line", "code"),
    [
        ("recipe_lib", "ls nosuch 2>/dev/full", 2),
        ("recipe_lib.cli.main", "ls nosuch 2>&-", 2),
        ("recipe_lib.cli.main", "ls >&-", 0),
        ("recipe_lib", "help run >&-", 0),
        ("recipe_lib", "ls nosuch >&- 2>&-", 2),
    ],
)
def test_a_stream_that_takes_nothing_changes_no_exit_code(module: str, line: str, code: int):
    result = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m {module} {line}"],
        cwd=ROOT,
        env=build_environment(PYTHONUNBUFFERED=None),
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (code, "")


@pytest.mark.slow
def test_a_letter_without_a_code_in_the_output_is_written_out(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(
        "# \xab\nrecipe: full_finetune_distributed\n", encoding="utf-8"
    )
    result = tune("cat", tmp_path / "mine.yaml", PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert "\\xab" in result.stdout and result.stdout.isascii()


def test_an_interrupted_import_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """As Ctrl-C while modules are imported; the entry point itself has imported none of ours."""

    def interrupt(name: str, *more: object) -> None:
        raise KeyboardInterrupt

    probe = (
        "import recipe_lib.__main__, sys; print([name for name in sys.modules if"
        " name.startswith('recipe_lib')])"
    )
    imported = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=ROOT,
        env=build_environment(),
        capture_output=True,
        text=True,
    )
    assert imported.stdout == "['recipe_lib', 'recipe_lib.__main__']\n"
    monkeypatch.setattr("builtins.__import__", interrupt)
    code = start()
    monkeypatch.undo()
    assert code == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_it_runs_as_a_process():
    result = tune("ls")
    assert result.returncode == 0
    assert result.stderr == ""
    assert list_configs()["full_finetune_distributed"][0] in result.stdout
