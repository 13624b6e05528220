"""The file of receipts: what a line says, and that runs at once, torn lines and other versions do
it no harm.
"""

import json
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from recipe_lib.cli.plan import render_receipts
from recipe_lib.cli.plan_during_run import append_run_receipt
from recipe_lib.plan.measured.receipts import (
    append_receipt,
    get_receipts_file,
    make_receipt,
    read_receipts,
)
from recipe_lib.units import GIB
from tests.plan.made_receipts import build_receipt, build_run_files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "tune-recipes" / "receipts.jsonl"


def test_a_line_is_read_back_and_is_for_this_user_alone(file: Path):
    receipts = [
        build_receipt(),
        build_receipt(planned=20.0, settings={}, time="2026-11-21T10:00:00+00:00"),
    ]
    assert [append_receipt(file, receipt) for receipt in receipts] == [True, False]
    assert read_receipts(file) == (receipts, 0)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_receipts(file.with_name("none")) == ([], 0)


def test_the_newest_is_last_in_whatever_order_they_were_written(file: Path):
    """By the moment, not by the clock on the wall."""
    times = ["2026-11-20T09:00:00+01:00", "2026-11-20T08:30:00+00:00", "2026-11-20T03:10:00-05:00"]
    for time in times:
        append_receipt(file, build_receipt(time=time))
    assert [receipt.time for receipt in read_receipts(file)[0]] == [times[0], times[2], times[1]]


def append_many(file: Path, config: str) -> None:
    for number in range(50):
        append_receipt(file, build_receipt(config=config, settings={"text": f"{number} " * 1000}))


def test_runs_that_end_at_once_do_not_mix_their_lines(file: Path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_many, args=(file, config)) for config in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    receipts, unreadable = read_receipts(file)
    assert unreadable == 0
    for config in ("a", "b"):
        found = [
            receipt.run.settings["text"] for receipt in receipts if receipt.run.config == config
        ]
        assert found == [f"{number} " * 1000 for number in range(50)]


def test_a_line_is_one_write(file: Path, monkeypatch: pytest.MonkeyPatch):
    """Appending in one piece is what keeps lines whole."""
    written = []
    write = os.write
    monkeypatch.setattr(
        os, "write", lambda descriptor, data: written.append(data) or write(descriptor, data)
    )
    append_receipt(file, build_receipt())
    assert written == [file.read_bytes()]


def test_a_line_that_a_full_disk_cuts_off_is_an_error(file: Path, monkeypatch: pytest.MonkeyPatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
    with pytest.raises(OSError, match="No space left on device"):
        append_receipt(file, build_receipt())


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.update(format=2),
        lambda line: line.update(time="yesterday"),
        lambda line: line.update(time="0001-01-01"),
        lambda line: line.pop("format"),
        lambda line: line.pop("run"),
        lambda line: line["run"].update(ranks="many"),
        lambda line: line["run"].update(card_memory=10**400),
        lambda line: line["planned"].update(seconds=10**400),
        lambda line: line["planned"].update(tokens_per_second=float("nan")),
        lambda line: line["planned"].update(tokens_per_second=float("inf")),
        lambda line: line["measured"].update(reserved=0),
        lambda line: line["measured"].update(reserved=-1),
        lambda line: line["planned"].pop("reserved"),
    ],
)
def test_a_line_of_something_else_is_passed_over(change, file: Path):
    append_receipt(file, build_receipt())
    line = json.loads(file.read_text())
    change(line)
    with open(file, "a") as other:
        other.write(f"{json.dumps(line)}\n")
    append_receipt(file, build_receipt(config="later"))
    receipts, unreadable = read_receipts(file)
    assert [receipt.run.config for receipt in receipts] == ["llama3/8B_lora", "later"]
    assert unreadable == 1


@pytest.mark.parametrize(
    "left", [b'{"format": 1, "ti', b"\xff\xfe", b"[" * 100_000, b"[]", b"3", b"\n\n  \n\x00"]
)
def test_a_line_that_was_cut_off_costs_no_other(left: bytes, file: Path):
    append_receipt(file, build_receipt())
    with open(file, "ab") as other:
        other.write(left)
    append_receipt(file, build_receipt(config="later"))
    receipts, unreadable = read_receipts(file)
    assert [receipt.run.config for receipt in receipts] == ["llama3/8B_lora", "later"]
    assert unreadable == 1


def test_new_keys_are_passed_over(file: Path):
    append_receipt(file, build_receipt())
    line = json.loads(file.read_text())
    line["tomorrow"] = line["run"]["tomorrow"] = 1
    file.write_text(json.dumps(line))
    assert read_receipts(file) == ([build_receipt()], 0)


def test_errors_are_those_of_the_figures(file: Path):
    receipt = build_receipt(planned=15.0, measured=20.0, rates=(1000.0, None))
    assert receipt.errors["reserved"] == pytest.approx(-0.25)
    assert "tokens_per_second" not in receipt.errors
    append_receipt(file, receipt)
    line = json.loads(file.read_text())
    assert line["errors"] == receipt.errors
    file.write_text(json.dumps(line | {"errors": {"reserved": 9.0}}))
    assert read_receipts(file)[0][0].errors == receipt.errors


def test_no_secret_is_written(file: Path, monkeypatch: pytest.MonkeyPatch):
    token = "hf_" + "aB3dE6gH9j" * 4
    monkeypatch.setenv("MY_TOKEN", "correct-horse-battery-staple")
    append_receipt(
        file,
        build_receipt(config=f"{token}.yaml", settings={"loss": "correct-horse-battery-staple"}),
    )
    text = file.read_text()
    assert token not in text and "battery" not in text and text.count("[secret]") == 2


@pytest.mark.parametrize(
    ("state", "home", "place"),
    [
        ("/var/state", "/home/me", "/var/state/tune-recipes"),
        ("", "/home/me", "/home/me/.local/state/tune-recipes"),
        ("relative", "/home/me", "/home/me/.local/state/tune-recipes"),
        (None, "/home/me", "/home/me/.local/state/tune-recipes"),
    ],
)
def test_the_folder_is_the_specification_s(state, home, place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    if state is not None:
        monkeypatch.setenv("XDG_STATE_HOME", state)
    assert get_receipts_file() == Path(place, "receipts.jsonl")


def test_without_a_home_nothing_is_written_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="no home folder"):
        append_receipt(Path("~/.local/state/tune-recipes/receipts.jsonl"), build_receipt())
    assert list(tmp_path.iterdir()) == []


def test_the_receipt_of_a_run():
    """Of its first rank; a step's time is typical, which the first one's is not; of versions those
    that matter.
    """
    figures, summary, steps = build_run_files(
        first={"active": 5 * GIB, "allocated": 6 * GIB, "reserved": 9 * GIB}
    )
    receipt = make_receipt(figures, summary, steps)
    assert receipt.planned == {
        "active": 5 * GIB, "allocated": 6 * GIB, "reserved": 9 * GIB, "seconds": 2.0, "tokens_per_second": 2048.0,
    }  # fmt: skip
    assert receipt.measured == {
        "active": 10 * GIB, "allocated": 11 * GIB, "reserved": 12 * GIB, "seconds": 2.5, "tokens_per_second": 2000.0,
    }  # fmt: skip
    assert receipt.errors["reserved"] == -0.25
    assert receipt.errors["tokens_per_second"] == pytest.approx(0.024)
    assert receipt.versions == {"torch": "2.13.0"}
    assert vars(receipt.run) == figures["run"]


@pytest.mark.parametrize(
    ("lost", "is_kept"),
    [("peak_memory_active_gib", True), ("peak_memory_reserved_gib", False), ("versions", False)],
)
@pytest.mark.parametrize("is_absent", [True, False])
def test_a_figure_that_a_summary_lacks(
    lost: str, is_kept: bool, is_absent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is no traceback after a run that went well, and without reserved memory there is nothing
    to compare.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("TUNE_RECEIPTS", raising=False)
    (tmp_path / "metrics.jsonl").touch()
    figures, summary, _ = build_run_files(output_dir=str(tmp_path))
    summary[lost] = None
    if is_absent:
        del summary[lost]
    append_run_receipt(figures, summary)
    assert get_receipts_file().exists() == is_kept


def test_of_one_step_no_time_is_known():
    figures, summary, steps = build_run_files()
    assert set(make_receipt(figures, summary, steps[:2]).errors) == {
        "active",
        "allocated",
        "reserved",
    }


def test_the_list(file: Path):
    receipts = [build_receipt(planned=15.0, measured=20.0, rates=(1000.0, None)),
                build_receipt(planned=11.0, measured=10.0, ranks=4, time="2026-11-21T10:00:00+00:00")]  # fmt: skip
    text = render_receipts(receipts, 3, file, width=120)
    header, *rows = [line.split() for line in text.split("\n\n")[0].splitlines()]
    assert header == [
        "date",
        "card",
        "ranks",
        "config",
        "recipe",
        "planned",
        "measured",
        "error",
        "tokens/s",
    ]
    run = ["llama3/8B_lora", "lora_finetune_distributed"]
    assert rows == [
        ["2026-11-20", "rtx4090", "1", *run, "15.00", "GiB", "20.00", "GiB", "-25.0%"],
        ["2026-11-21", "rtx4090", "4", *run, "11.00", "GiB", "10.00", "GiB", "+10.0%", "-11%"],
    ]
    below = " ".join(text.split("\n\n")[1].split())
    assert below.startswith(
        "2 receipts; error of reserved memory: 17.5% mean absolute, -25.0% worst in "
    )
    assert "3 lines of it cannot be read" in below


def test_a_list_of_none_is_a_line_that_says_where_they_would_be(file: Path):
    text = render_receipts([], 0, file)
    assert (
        text.count("\n") == 1
        and str(file) in text
        and "tune run" in text
        and "TUNE_RECEIPTS=off" in text
    )


@pytest.mark.parametrize("line", ["{}", "", "x" * 300, '{"format": 1}'])
def test_a_long_file_is_read_from_its_newest_end(
    file: Path, line: str, monkeypatch: pytest.MonkeyPatch
):
    append_receipt(file, build_receipt(config="old"))
    with open(file, "a") as out:
        out.write(f"{line}\n" * 2**13)
    append_receipt(file, build_receipt(config="new"))
    monkeypatch.setattr("recipe_lib.plan.measured.receipts._NEWEST_BYTES", 2**13)
    receipts, unreadable = read_receipts(file)
    assert [receipt.run.config for receipt in receipts] == ["new"] and unreadable <= 2**13


def test_a_whole_file_is_read_to_its_first_line(file: Path, monkeypatch: pytest.MonkeyPatch):
    for config in ("a", "b"):
        append_receipt(file, build_receipt(config=config))
    monkeypatch.setattr("recipe_lib.plan.measured.receipts._NEWEST_BYTES", file.stat().st_size + 1)
    assert [receipt.run.config for receipt in read_receipts(file)[0]] == ["a", "b"]
    monkeypatch.setattr("recipe_lib.plan.measured.receipts._NEWEST_BYTES", file.stat().st_size - 2)
    receipts, unreadable = read_receipts(file)
    assert [receipt.run.config for receipt in receipts] == ["b"] and unreadable == 0
