"""Tokenized rows are kept, found again, checked, shared by the ranks of a machine, and never
trusted too far.
"""

import errno
import fcntl
import json
import os
import resource
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from recipe_lib.config.local_files import get_cache_root
from recipe_lib.config.registry import register
from recipe_lib.config.schema import DataConfig, FullFinetuneConfig
from recipe_lib.data import build_dataset, build_datasets
from recipe_lib.data.cache import ArrayWriter
from recipe_lib.data.encoding import SourceEncoder
from recipe_lib.data.samples import Completion
from recipe_lib.errors import DataError, StorageError
from recipe_lib.tokenizers import load_tokenizer
from recipe_lib.training import training_data
from recipe_lib.training.training_data import TrainingData
from tests.distributed.ranks import run_ranks
from tests.tokenizers.made import write_json

ROWS = [
    {"prompt": f"the {word}", "completion": f" sat {word}"} for word in ("cat", "dog", "mat", "log")
]


@pytest.fixture
def root(tmp_path):
    return tmp_path / "kept"


@pytest.fixture
def tokenized(monkeypatch):
    """How many runs of rows were tokenized in this process."""
    calls = []
    encode = SourceEncoder.encode
    monkeypatch.setattr(SourceEncoder, "encode", lambda *a: calls.append(1) or encode(*a))
    return lambda: len(calls)


def build(tokenizer, root, source, max_seq_len=64, **settings):
    settings = {"format": "prompt_completion"} | settings
    return build_dataset(
        DataConfig(source=source, cache_dir=str(root), **settings), tokenizer, max_seq_len
    )


def folders(root):
    return sorted(path for path in root.iterdir() if path.is_dir())


def same(left, right):
    assert left.fingerprint == right.fingerprint and left.report == right.report
    assert (
        left.report.format_lines() == right.report.format_lines()
        and left.largest_id == right.largest_id
    )
    for number in range(len(left)):
        assert left[number].tokens.tolist() == right[number].tokens.tolist()
        assert left[number].labels.tolist() == right[number].labels.tolist()
    assert [left.locate_item(item) for item in range(left.items)] == [
        right.locate_item(item) for item in range(right.items)
    ]


def test_the_second_start_maps_what_the_first_has_made(chatml, root, rows_file, tokenized):
    source = rows_file(*ROWS, ROWS[0])
    made = build(chatml, root, source)
    assert tokenized() == 1 and len(folders(root)) == 1
    found = build(chatml, root, source)
    assert tokenized() == 1
    same(made, found)
    same(found, build(chatml, root, source, cache=False))
    assert isinstance(found.ids.base, np.memmap) and not found.ids.flags.writeable
    assert tokenized() == 2 and len(folders(root)) == 1


def test_whatever_changes_a_row_changes_the_key(
    chatml, plain, root, rows_file, tmp_path, tokenized
):
    source = rows_file(*(row | {"text": row["prompt"]} for row in ROWS))
    build(chatml, root, source)
    settings = [
        {"max_seq_len": 63}, {"train_on": "all"}, {"add_bos": False, "template": "plain"}, {"max_samples": 3},
        {"truncation": "drop"}, {"on_invalid": "skip"}, {"columns": {"prompt": "text"}},
        {"format": "text", "ignore_columns": ["prompt", "completion"]}, {"add_eos": False},
        {"parse_special_tokens": False},
    ]  # fmt: skip
    for number, changed in enumerate(settings, start=2):
        build(chatml, root, source, **{"max_seq_len": 64} | changed)
        assert tokenized() == number, changed
    build(plain, root, source)
    build(load_tokenizer(write_json(tmp_path / "other", eos_token="<|pad|>")), root, source)
    rows_file(*ROWS, ROWS[0])
    build(chatml, root, source)
    rows_file(*ROWS, name="again.jsonl")
    build(chatml, root, str(tmp_path / "again.jsonl"))  # its places have another name
    assert tokenized() == len(folders(root)) == 15


def test_another_vocabulary_of_the_same_size_changes_the_key(root, rows_file, tmp_path, tokenized):
    folder, source = (
        write_json(tmp_path / "tokenizer"),
        rows_file({"prompt": "c", "completion": "d"}),
    )
    first = build(load_tokenizer(folder), root, source)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["c"], vocabulary["d"] = vocabulary["d"], vocabulary["c"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    second = build(load_tokenizer(folder), root, source)
    assert tokenized() == 2 and second.fingerprint != first.fingerprint


def test_another_template_in_the_same_file_changes_the_key(root, rows_file, tmp_path, tokenized):
    folder, template = write_json(tmp_path / "tokenizer"), tmp_path / "template.jinja"
    source = rows_file(*ROWS)
    for text in ("{{ messages[0].content }}", "{{ messages[-1].content }}"):
        template.write_text(text)
        build(load_tokenizer(folder, template), root, source)
    assert tokenized() == len(folders(root)) == 2


def test_what_changes_no_row_does_not(chatml, root, rows_file, tokenized):
    source = rows_file(*ROWS)
    first = build(chatml, root, source)
    os.utime(source, (1, 1))
    for changed in (
        {"shuffle": False},
        {"packing": True},
        {"num_proc": 2},
        {"check_label_mask": False},
    ):
        assert build(chatml, root, source, **changed).fingerprint == first.fingerprint
    assert tokenized() == 1


def test_a_changed_plugin_is_another_format(
    chatml, root, rows_file, tmp_path, tokenized, monkeypatch
):
    source = rows_file(*ROWS)

    def with_plugin(word):
        from recipe_lib.config import registry

        registry._components["data.format"].pop("mine", None)
        registry._loaded.clear()
        (tmp_path / "plugin.py").write_text(
            "from recipe_lib.config.registry import register\nfrom recipe_lib.data.samples import"
            " Completion\n@register('data.format', 'mine')\ndef read(row): return"
            f" Completion(row['prompt'], ' {word}')\n"
        )
        registry.load_plugin(tmp_path / "plugin.py")
        return build(chatml, root, source, format="mine")

    first, second = (
        with_plugin("cat"),
        with_plugin("horse"),
    )  # not of one length: bytecode goes by size and second
    assert first.fingerprint != second.fingerprint and tokenized() == 2
    assert with_plugin("cat").fingerprint == first.fingerprint and tokenized() == 2


def test_a_format_or_tokenizer_without_a_file_is_not_kept(chatml, root, rows_file, monkeypatch):
    class Reader:
        def __call__(self, row):
            return Completion(row["prompt"], row["completion"])

    register("data.format", "no_file")(Reader())
    assert len(build(chatml, root, rows_file(*ROWS), format="no_file")) == 4
    monkeypatch.setattr(chatml, "place", "made of nothing")
    assert len(build(chatml, root, rows_file(*ROWS))) == 4
    assert not root.exists()


@pytest.mark.parametrize(
    "name", ["ids", "trained", "offsets", "file_of", "sample_of", "digests", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "empty"])
def test_a_damaged_cache_is_made_anew(chatml, root, rows_file, said, name, damage):
    source = rows_file(*ROWS)
    made = build(chatml, root, source, cache=False)
    build(chatml, root, source)
    (folder,) = folders(root)
    content = (folder / name).read_bytes()
    middle = len(content) // 2
    if damage == "remove":
        (folder / name).unlink()
    else:
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        (folder / name).write_bytes({"flip": flipped, "cut": content[:-1], "empty": b""}[damage])
    same(made, build(chatml, root, source))
    (line,) = said
    assert line.startswith(f"data: {folder}: found a damaged cache ({name} ") and line.endswith(
        "; tokenizing anew"
    )
    same(made, build(chatml, root, source))
    assert len(said) == 1


def test_a_mapped_cache_may_be_made_anew_by_another(chatml, root, rows_file):
    source = rows_file(*ROWS)
    mapped = build(chatml, root, source)
    (folder,) = folders(root)
    before = [mapped[number].tokens.tolist() for number in range(len(mapped))]
    (folder / "manifest.json").write_text("{}")
    assert build(chatml, root, source).ids.base.filename == mapped.ids.base.filename
    assert [mapped[number].tokens.tolist() for number in range(len(mapped))] == before


def test_somebody_elses_folder_is_left_alone(chatml, root, rows_file, said):
    source = rows_file(*ROWS)
    build(chatml, root, source)
    (folder,) = folders(root)
    for path in folder.iterdir():
        path.unlink()
    (folder / "thesis.txt").write_text("years of work")
    assert len(build(chatml, root, source)) == 4
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    line = (
        f"warning: data.cache_dir: tokenized samples cannot be kept in {root} (Directory not"
        " empty); they are kept in "
    )
    assert said[-1] == f"{line}memory"


def test_a_folder_that_cannot_be_made(chatml, root, rows_file, said):
    root.write_text("a file")
    assert len(build(chatml, root, rows_file(*ROWS))) == 4
    (line,) = said
    assert (
        line.startswith(f"warning: data.cache_dir: tokenized samples cannot be kept in {root} (")
        and "memory" in line
    )
    assert root.read_text() == "a file"


def test_a_full_disk_leaves_nothing_behind(chatml, root, rows_file):
    """The limit on a file's size refuses the write as a full disk does, from within the system."""
    source = rows_file(*ROWS * 200)
    alone = build(chatml, root, source, cache=False).fingerprint

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return [build(chatml, root, source).fingerprint, *map(str, folders(root))]

    assert run_ranks(limited, 1, process_group=False) == [[alone]]
    assert build(chatml, root, source).fingerprint == alone and len(folders(root)) == 1


def test_a_disk_that_is_full_at_the_end(chatml, root, rows_file, said, monkeypatch):
    def full(_writer):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ArrayWriter, "sync", lambda writer: full(writer) if writer.folder else None)
    assert len(build(chatml, root, rows_file(*ROWS))) == 4
    assert folders(root) == [] and "(No space left on device); they are kept in memory" in said[0]


def test_a_killed_start_leaves_nothing_that_counts(chatml, root, rows_file):
    @register("data.format", "killing")
    def read(row):
        if os.environ.get("KILL_NOW"):
            os.kill(os.getpid(), signal.SIGKILL)
        return Completion(row["prompt"], row["completion"])

    source = rows_file(*ROWS)

    def killed():
        child = os.fork()
        if child == 0:
            os.environ["KILL_NOW"] = "1"
            build(chatml, root, source, format="killing")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_ranks(killed, 1, process_group=False) == [-signal.SIGKILL]
    assert [path.suffix for path in folders(root)] == [".partial"]
    assert len(build(chatml, root, source, format="killing")) == 4
    assert [path.suffix for path in folders(root)] == [""]


def counting_format(log, seconds=0.0):
    """A format that notes each row it reads in a file, whatever the process."""

    @register("data.format", "counting")
    def read(row):
        with open(log, "a") as file:
            file.write(f"{os.environ['RANK']}\n")
        time.sleep(seconds)
        return Completion(row["prompt"], row["completion"])


def test_one_rank_of_a_machine_tokenizes_and_the_first_one_at_that(
    chatml, root, rows_file, tmp_path
):
    counting_format(tmp_path / "log", seconds=0.02)
    source = rows_file(*ROWS)

    def start():
        time.sleep(0.8 if os.environ["RANK"] == "0" else 0.0)
        dataset = build(chatml, root, source, format="counting")
        return [dataset.fingerprint, str(isinstance(dataset.ids.base, np.memmap))]

    first, second = run_ranks(start, 2, process_group=False)
    assert first == second and first[1] == "True"
    assert (tmp_path / "log").read_text().split() == ["0"] * 4


def test_a_fault_is_found_once_and_told_to_all_ranks_of_the_launch(
    chatml, root, rows_file, tmp_path
):
    counting_format(tmp_path / "log", seconds=0.02)
    source = rows_file(*ROWS[:3], {"prompt": "the " * 99, "completion": "x"}, ROWS[3])

    def start():
        found = []
        for _ in range(2):  # before there is a process group, and where the ranks agree on it
            with pytest.raises(DataError) as caught:
                build(chatml, root, source, format="counting", truncation="error")
            found += caught.value.faults
        return found

    told = run_ranks(start, 2, process_group=False)
    assert len(set(told[0] + told[1])) == 1 and "rows.jsonl:4: found" in told[0][0]
    assert len((tmp_path / "log").read_text().split()) == 4  # once, up to the fault
    assert folders(root) == []
    run_ranks(start, 1, process_group=False)  # the next launch looks again
    assert len((tmp_path / "log").read_text().split()) == 12


def test_a_fault_is_of_the_same_kind_on_all_ranks(chatml, root, rows_file, monkeypatch):
    source = rows_file(*ROWS)

    def refuse(writer):
        raise StorageError(f"rank {os.environ['RANK']}: no space")

    monkeypatch.setattr(ArrayWriter, "sync", refuse)

    def start():
        with pytest.raises(StorageError) as caught:
            build(chatml, root, source)
        return str(caught.value)

    assert run_ranks(start, 2, process_group=False) == ["rank 0: no space", "rank 0: no space"]


def test_ranks_do_not_try_one_by_one_when_the_disk_is_full(
    chatml, root, rows_file, tmp_path, monkeypatch
):
    counting_format(tmp_path / "log")
    source = rows_file(*ROWS)

    def full(writer):
        if writer.folder:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ArrayWriter, "sync", full)
    assert run_ranks(
        lambda: len(build(chatml, root, source, format="counting")), 2, process_group=False
    ) == [4, 4]
    assert (
        len((tmp_path / "log").read_text().split()) == 12
    )  # once for the disk, and once in the memory of each


def test_a_waiting_process_takes_what_the_other_has_made(chatml, root, rows_file, tmp_path):
    """With the lock held by another process nothing is read; once it is free, the folder is
    there.
    """
    source = rows_file(*ROWS)
    build(chatml, root, source)
    (folder,) = folders(root)
    hidden = folder.rename(root / "hidden")

    def start():
        with open(f"{folder}.lock", "a+") as lock:
            if os.environ["RANK"] == "0":
                fcntl.flock(lock, fcntl.LOCK_EX)
                Path(tmp_path / "held").touch()
                time.sleep(0.5)
                hidden.rename(folder)
                return "made"
        while not (tmp_path / "held").exists():
            time.sleep(0.01)
        SourceEncoder.encode = None
        return str(len(build(chatml, root, source)))

    assert run_ranks(start, 2, process_group=False) == ["made", "4"]


@pytest.mark.parametrize("cache", [True, False])
def test_what_is_prepared_is_taken_once(chatml, root, rows_file, tokenized, cache, monkeypatch):
    cfg = FullFinetuneConfig(max_seq_len=64, batch_size=1)
    cfg.data = DataConfig(
        source=rows_file(*ROWS), format="prompt_completion", cache=cache, cache_dir=str(root)
    )
    cfg.validation.source = rows_file(*ROWS[:2], name="validation.jsonl")
    prepared = build_datasets(cfg, chatml)
    assert tokenized() == 2 and root.exists() == cache
    monkeypatch.setattr(training_data, "load_tokenizer_for", lambda cfg, source: chatml)
    spec = SimpleNamespace(vocab_size=chatml.vocab_size, max_positions=64)
    source, world = SimpleNamespace(folder=root, spec=spec), SimpleNamespace(data_ranks=1)
    data = TrainingData(cfg, source, world, prepared)
    assert (data.dataset, data.validation_dataset) == prepared and tokenized() == 2
    assert (len(data.dataset), len(data.validation_dataset)) == (4, 2)
    again = build_dataset(cfg.data, chatml, 64)
    assert again is not data.dataset and again.fingerprint == data.dataset.fingerprint
    assert tokenized() == (2 if cache else 3)


def test_faults_are_raised_where_rows_are_prepared(chatml, rows_file):
    cfg = FullFinetuneConfig(max_seq_len=64)
    cfg.data = DataConfig(source=rows_file(*ROWS), format="prompt_completion")
    cfg.validation.source = rows_file({"prompt": 1, "completion": "x"}, name="validation.jsonl")
    with pytest.raises(DataError, match="validation.jsonl:1: .prompt: found a number"):
        build_datasets(cfg, chatml)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert get_cache_root(None) == tmp_path / "xdg/tune-recipes"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert get_cache_root(None) == tmp_path / ".cache/tune-recipes"
    assert get_cache_root("~/mine") == tmp_path / "mine"
    assert get_cache_root("/data/cache") == Path("/data/cache")


def test_the_manifest_holds_no_more_than_numbers_and_lines(chatml, root, rows_file):
    build(chatml, root, rows_file(*ROWS))
    (folder,) = folders(root)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest) == {"content", "sha256"} and set(manifest["content"]) == {
        "checksums",
        "report",
    }
