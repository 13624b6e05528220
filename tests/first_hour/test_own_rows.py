"""The README's own-JSONL block, typed as written by a new user: eight conversations, a tiny model
in the place of the one that it names, on a hub of this machine, and at the end a conversation.
"""

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import tune_forked
from tests.cli.hub import REPOSITORIES, Hub, run_hub
from tests.house.documents import list_blocks
from tests.house.files import ROOT

pytestmark = pytest.mark.slow

MODEL = "Qwen/Qwen3-0.6B"  # as the block names it


def block() -> list[str]:
    """The lines, as they stand in the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Your own JSONL in six lines\n")[1].split("\n## ")[0]
    (found,) = [
        one
        for one in list_blocks(ROOT / "README.md")
        if one.language == "bash" and one.text in section
    ]
    return found.text.splitlines()


@pytest.fixture
def hub(realdata: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in (realdata / "stories260K-hf").iterdir()}
    monkeypatch.setitem(REPOSITORIES, MODEL, files)
    with run_hub() as server:
        yield server


@pytest.fixture
def home(hub: Hub, tmp_path: Path, realdata: Path) -> tuple[Path, dict[str, str | None]]:
    """A folder with the file of conversations, and what is changed in the environment in which
    `tune` is typed.
    """
    place = tmp_path / "home"
    place.mkdir()
    samples = json.loads(
        (realdata / "datasets" / "alpaca" / "identity.json").read_text(encoding="utf-8")
    )
    samples = sorted(samples, key=lambda row: len(row["output"]))[
        :8
    ]  # the config's bf16 is slow on most CPUs
    with (place / "chats.jsonl").open("w", encoding="utf-8") as file:
        for row in samples:
            question = "\n".join(filter(None, [row["instruction"], row.get("input")]))
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": row["output"]},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return place, {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": hub.address,
        "HF_HUB_OFFLINE": None,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "no_proxy": "127.0.0.1",
    }


def typed(
    line: str, home: tuple[Path, dict[str, str | None]], said: str = ""
) -> subprocess.CompletedProcess[str]:
    """A line, as a shell takes its words. said: what is typed while it runs."""
    place, changes = home
    program, *words = shlex.split(line)
    assert program == "tune"
    done = tune_forked(*words, said=said, cwd=place, timeout=300, **changes)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done


def test_the_block_ends_in_a_conversation(home: tuple[Path, dict[str, str | None]]):
    lines = block()
    assert [line.split()[1] for line in lines] == [
        "download",
        "data",
        "data",
        "plan",
        "run",
        "generate",
    ]
    downloaded = typed(lines[0], home)
    assert "next: tune plan qwen3/0.6B_" in downloaded.stderr
    checked = typed(lines[1], home)
    assert "8 " in checked.stdout + checked.stderr
    shown = typed(lines[2], home).stdout
    assert "Assistant:" in shown  # the model has no chat template
    planned = typed(lines[3], home).stdout
    assert "FITS" in planned.splitlines()[0]
    run = typed(lines[4], home)
    assert (
        f"tune generate {lines[5].split()[2]}" in run.stdout + run.stderr
    )  # the next command, in whatever form
    summary = json.loads(
        (home[0] / lines[5].split()[2] / "summary.json").read_text(encoding="utf-8")
    )
    assert summary["status"] == "done" and summary["steps"] >= 3
    metrics = (home[0] / lines[5].split()[2] / "metrics.jsonl").read_text(encoding="utf-8")
    losses = [json.loads(line)["loss"] for line in metrics.splitlines()]
    third = len(losses) // 3  # an epoch
    assert sum(losses[-third:]) < sum(losses[:third])
    answers = typed(lines[5], home, said="Who are you?\n/reset\nAnd now?\n").stdout
    assert len(answers.encode()) > 20
