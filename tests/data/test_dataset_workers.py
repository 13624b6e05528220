"""Tokenizing in several processes gives what one process gives, faults included."""

import multiprocessing
import os
import signal
import time

import pytest

from recipe_lib.config.registry import register
from recipe_lib.config.schema import DataConfig
from recipe_lib.data import build_dataset
from recipe_lib.data import tokenize_dataset as building
from recipe_lib.data.samples import Completion, Document
from recipe_lib.data.tokenize_dataset import count_workers, map_in_order
from recipe_lib.errors import DataError, SetupError
from tests.distributed.ranks import run_ranks

PARENT = os.getpid()


@pytest.fixture(autouse=True)
def many_small_tasks(monkeypatch):
    monkeypatch.setattr(building, "SAMPLES_PER_TASK", 3)
    monkeypatch.setattr(building, "BYTES_PER_WORKER", 1)


def build(tokenizer, source, workers, max_seq_len=64, **settings):
    cfg = DataConfig(source=source, cache=False, num_proc=workers, **settings)
    return build_dataset(cfg, tokenizer, max_seq_len)


def rows_of_all_kinds(count):
    """Good, bad, long, doubled and empty rows."""
    for number in range(count):
        row = {"prompt": f"the cat {number}", "completion": " sat" * (1 + number * 7 % 30)}
        if number % 11 == 5:
            row = {"prompt": number, "completion": "x"}
        if number % 13 == 7:
            row = {"prompt": "the", "completion": " same"}
        yield row


def test_any_number_of_workers_gives_the_same(chatml, rows_file, tmp_path):
    settings = {"format": "prompt_completion", "on_invalid": "skip"}
    rows_file(*rows_of_all_kinds(40), name="a.jsonl")
    rows_file(*rows_of_all_kinds(17), name="b.jsonl")
    alone = build(chatml, str(tmp_path), 1, 24, **settings)
    assert (
        alone.report.duplicate_sequences
        and alone.report.truncated_sequences
        and alone.report.bad_samples
    )
    for workers in (2, 3):
        shared = build(chatml, str(tmp_path), workers, 24, **settings)
        assert shared.fingerprint == alone.fingerprint
        assert (
            shared.report == alone.report
            and shared.report.format_lines() == alone.report.format_lines()
        )
        assert shared.digests.tolist() == alone.digests.tolist()
        assert [shared.locate_item(item) for item in range(shared.items)] == [
            alone.locate_item(i) for i in range(alone.items)
        ]


def test_workers_do_work_and_texts_are_cut_alike(plain, tmp_path, monkeypatch):
    @register("data.format", "with_process")
    def read(row):
        return Document(f"{os.getpid() == PARENT} {row['text']}")

    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("the cat sat on the mat.\n" * (number + 1))
    alone = build(plain, str(tmp_path), 1, 8, format="with_process")
    assert "True" in "".join(plain.decode(alone[row].tokens) for row in range(len(alone)))
    shared = build(plain, str(tmp_path), 2, 8, format="with_process")
    assert "True" not in "".join(plain.decode(shared[row].tokens) for row in range(len(shared)))


def test_max_rows_holds_over_files(chatml, rows_file, tmp_path):
    rows_file(*rows_of_all_kinds(5), name="a.jsonl")
    rows_file(*rows_of_all_kinds(5), name="b.jsonl")
    for workers in (1, 2):
        dataset = build(chatml, str(tmp_path), workers, format="prompt_completion", max_samples=7)
        assert dataset.report.samples_read == 7 and dataset.locate_item(6).endswith("b.jsonl:2")


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_fault_in_the_order_of_the_rows_is_told(chatml, rows_file, workers):
    @register("data.format", "slow_at_first")
    def read(row):
        time.sleep(row["wait"])
        return Completion(row["prompt"], row["completion"])

    rows = [{"prompt": "the cat", "completion": " sat", "wait": 0.0} for _ in range(30)]
    rows[4] |= {"prompt": "the " * 99, "wait": 0.3}
    rows[25] |= {"prompt": "the " * 99}
    with pytest.raises(
        DataError, match=r"rows.jsonl:5: found \d+ tokens, expected at most max_seq_len=64; raise"
    ):
        build(chatml, rows_file(*rows), workers, format="slow_at_first", truncation="error")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_cannot_be_counted_comes_after_the_rows_before_it(
    chatml, rows_file, tmp_path, workers
):
    (tmp_path / "b.json").write_text("[{]")
    rows_file(
        {"prompt": "the", "completion": " cat"}, {"prompt": 1, "completion": "x"}, name="a.jsonl"
    )
    with pytest.raises(DataError, match=r"a.jsonl:2: .prompt: found a number"):
        build(chatml, str(tmp_path), workers, format="prompt_completion")
    with pytest.raises(DataError, match=r"b.json:1: column 3: invalid JSON"):
        build(chatml, str(tmp_path), workers, format="prompt_completion", on_invalid="skip")


def test_a_killed_worker_is_one_line(chatml, rows_file):
    @register("data.format", "deadly")
    def read(row):
        if os.getpid() != PARENT:
            os.kill(os.getpid(), signal.SIGKILL)
        return Completion(row["prompt"], row["completion"])

    source = rows_file(*({"prompt": "the cat", "completion": " sat"} for _ in range(9)))
    with pytest.raises(
        SetupError,
        match=r"^data.num_proc: one of 2 processes that tokenize was killed \(out of memory\?",
    ):
        build(chatml, source, 2, format="deadly")


def test_our_own_fault_in_a_worker_keeps_its_traceback(chatml, rows_file):
    @register("data.format", "broken")
    def read(row):
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError, match="ours") as caught:
        build(chatml, rows_file(*({"a": 1} for _ in range(9))), 2, format="broken")
    assert "test_dataset_workers" in str(caught.value.__cause__)


def test_in_order_is_lazy_and_ends_its_workers():
    taken = map_in_order(lambda number: (number, os.getpid()), range(1000), 2)
    first = [next(taken) for _ in range(20)]
    assert [number for number, _ in first] == list(range(20))
    taken.close()
    for process in {process for _, process in first}:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_workers_end_when_their_parent_is_killed(tmp_path):
    """Otherwise an orphan would hold the lock of the cache, which it has inherited."""

    seen = tmp_path / "workers"
    seen.touch()
    child = os.fork()
    if child == 0:
        try:
            for process in map_in_order(_name_after_a_while, range(99), 2):
                with open(seen, "a") as file:
                    file.write(f"{process}\n")
        finally:
            os._exit(1)
    deadline = time.monotonic() + 20
    while len(set(seen.read_text().split())) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    workers = set(seen.read_text().split())
    assert len(workers) == 2
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [worker for worker in workers if alive(worker)]
    for worker in left:
        os.kill(int(worker), signal.SIGKILL)
    assert not left


def _name_after_a_while(_piece):
    time.sleep(0.05)
    return os.getpid()


def alive(process):
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_fork_once_there_is_a_process_group():
    assert count_workers(4) == 4 and count_workers(4, shared_by=3) == 1 and count_workers(None) >= 1

    def in_a_rank():
        multiprocessing.current_process()._config["daemon"] = False
        return count_workers(4)

    assert run_ranks(in_a_rank, 1) == [1]
    assert run_ranks(in_a_rank, 1, process_group=False) == [4]
    assert run_ranks(lambda: count_workers(4), 1, process_group=False) == [
        1
    ]  # a daemon may not fork
