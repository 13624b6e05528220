"""Tables of guides that quote plans have what the commands above them print."""

import re
from collections.abc import Callable

import pytest

from recipe_lib.cli.main import main
from recipe_lib.cli.plan import NO_ROOM
from tests.house.documents import list_blocks
from tests.house.files import ROOT
from tests.plan.apart import call_in_fork

DOCS = ROOT / "docs"
# Row of the table -> what the report's line has.
TENSOR_ROWS = {
    "kept for backward by the layers": (
        r"model\.layers\.0-31 [\d.]+ B [\d.]+ GiB [\d.]+ GiB ([\d.]+ GiB)"
    ),
    "peak reserved": r"peak reserved ([\d.]+)",
    "sent per step": r"one rank \d+ [\d.]+ GiB ([\d.]+ GiB)",
    "tokens a second, all ranks (data sheet, for ranking)": r"a step, ([\d.]+ K) a second",
}

PEAK = r" step ([\d.]+) GiB [\d.]+ GiB ([\d.]+) GiB"  # active and reserved


def read_plans(page: str) -> list[list[str]]:
    """Return the words behind `tune` of the page's commands that plan."""
    commands = [
        words
        for block in list_blocks(DOCS / page)
        if block.language == "bash"
        for words in block.list_commands()
    ]
    return [words[1:] for words in commands if words[:2] == ["tune", "plan"]]


def read_rows(page: str) -> dict[str, list[str]]:
    """Return the cells of the page's tables by the first one of their row."""
    lines = [
        line
        for line in (DOCS / page).read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


@pytest.fixture
def print_plan(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[list[str]], str]:
    """A plan's report in one line; whether the run fits does not matter."""
    monkeypatch.setenv("COLUMNS", "100")

    def plan(words: list[str]) -> str:
        capfd.readouterr()
        code = call_in_fork(main, words)
        report, said = capfd.readouterr()
        assert code in (0, NO_ROOM), said
        return " ".join(report.split())

    return plan


@pytest.mark.slow
def test_plans_with_and_without_tensor_parallel(print_plan: Callable[[list[str]], str]) -> None:
    rows = read_rows("tensor_parallel.md")
    plans = read_plans("tensor_parallel.md")[:2]
    assert ["parallel.tensor=8" in words for words in plans] == [False, True]
    for column, words in enumerate(plans):
        text = print_plan([*words, "--full"])
        for row, pattern in TENSOR_ROWS.items():
            (printed,) = set(re.findall(pattern, text))
            assert rows[row][column].removesuffix(" GiB") == printed.removesuffix(" GiB"), row
        tokens = int(rows["tokens of a step"][column].replace(",", ""))
        assert f"tokens {tokens / 1000:.1f} K a step" in text


@pytest.mark.slow
def test_ways_to_have_room_for_long_sequences(print_plan: Callable[[list[str]], str]) -> None:
    """Without `--advice`, which plans many: the run as it is, and with the change that takes the
    least time.
    """
    (words,) = [
        words[:-1] for words in read_plans("long_sequences.md") if words[-1:] == ["--advice"]
    ]
    rows = read_rows("long_sequences.md")
    changes = [change for change in rows if change.startswith(("parallel.", "memory."))]
    assert len(changes) == 5
    text = print_plan(words)
    active, reserved = re.findall(PEAK, text)[-1]  # behind the first step
    page = (DOCS / "long_sequences.md").read_text(encoding="utf-8")
    assert (
        f"takes {reserved} GiB reserved on each card, {active} GiB of them active at the peak"
        in page
    )
    assert (
        rows["none"][0] == f"{active} GiB"
        and f" step {rows['none'][1]}, " in text
        and "exceeds by" in text
    )
    lowered, *_, verdict = rows["memory.activation_offload=true"]
    text = print_plan([*words, "memory.activation_offload=true"])
    peak = float(re.findall(PEAK, text)[-1][0])
    assert peak - float(active) == pytest.approx(float(lowered.removesuffix(" GiB")), abs=0.011)
    assert (verdict == "does not fit") == ("exceeds by" in text)
