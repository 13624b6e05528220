"""Rows come out of files in order, each with its place; what cannot be read is one line with file
and line.
"""

import copy
import hashlib
import json
import multiprocessing
import re
import tracemalloc
from multiprocessing.reduction import ForkingPickler

import pytest

from recipe_lib.config import load_config
from recipe_lib.config.schema import SourceConfig
from recipe_lib.data import sample_files
from recipe_lib.data.find_format import settle_formats
from recipe_lib.data.samples import SampleFault
from recipe_lib.data.sources import open_sources
from recipe_lib.errors import DataError
from tests.data.sources import read_samples


def read(source, split="train"):
    return list(read_samples(str(source), split))


def opened(path):
    (file,) = open_sources(SourceConfig(str(path)))
    return file


def refused(source, line):
    with pytest.raises(DataError) as caught:
        read(source)
    assert re.search(line, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_lines(tmp_path):
    content = (
        b'\xef\xbb\xbf{"a": 1}\n\n{"a": 2}\r\n{"a" 3}\n[1]\n"x"\n{"a": "\xff"}\n'
        + b"[" * 100_000
        + b'\n{"a": 4}'
    )
    (tmp_path / "a.jsonl").write_bytes(content)
    found = {place.rpartition(":")[2]: row for place, row in read(tmp_path / "a.jsonl")}
    assert {line: row for line, row in found.items() if isinstance(row, dict)} == {
        "1": {"a": 1}, "3": {"a": 2}, "9": {"a": 4},
    }  # fmt: skip
    faults = {line: str(row) for line, row in found.items() if isinstance(row, SampleFault)}
    assert faults == {
        "4": "column 6: invalid JSON (Expecting ':' delimiter), expected an object a line",
        "5": "found a list, expected an object with the columns of the sample",
        "6": "found text, expected an object with the columns of the sample",
        "7": "column 8: found the byte 0xff, expected UTF-8",
        "8": "JSON nested too deep, expected an object a line",
    }


@pytest.mark.parametrize(
    "content", ['[{"a": 1}, {"a": 2}]', '[{"a": 1},\n {"a": 2}]\n', '\ufeff\n [\n{"a": 1}\n]']
)
def test_a_list_in_json_lines(content, tmp_path):
    (tmp_path / "a.jsonl").write_text(content, encoding="utf-8")
    rows = [str(row) for _, row in read(tmp_path / "a.jsonl")]
    hint = "; if the file is one list of objects, name it .json"
    assert [hint in row for row in rows] == [True] + [False] * (len(rows) - 1)
    (_, first), *_ = opened(tmp_path / "a.jsonl").read_first(1)
    assert str(first) == rows[0]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_json_lines(content, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    refused(tmp_path / "a.jsonl", r"a.jsonl: the file is empty, expected samples")


def write_lines(path, count, blank_every=None):
    """Lines of differing lengths, ends and letters, some of them blank; gives (line, row) of each
    row.
    """
    rows, lines = [], []
    for number in range(count):
        if blank_every and number % blank_every == 1:
            lines.append((" \t" * (number % 3)).encode() + b"\n")
        rows.append(
            (len(lines) + 1, {"n": number, "text": "é" * (number % 7) + "x" * (number % 50)})
        )
        end = b"\r\n" if number % 5 == 0 else b"\n"
        lines.append(
            b" " * (number % 2) + json.dumps(rows[-1][1], ensure_ascii=False).encode() + end
        )
    path.write_bytes(b"".join(lines).removesuffix(b"\n"))
    return rows


@pytest.mark.parametrize("blank_every", [None, 3])
@pytest.mark.parametrize("block", [1, 7, 64, 2**20])
def test_json_lines_by_number(blank_every, block, tmp_path, monkeypatch):
    """Any range of rows is what a plain reading of the file gives, however the pass for the index
    cuts the file.
    """
    monkeypatch.setattr(sample_files, "BLOCK", block)
    path = tmp_path / "a.jsonl"
    rows = [(f"{path}:{line}", row) for line, row in write_lines(path, 60, blank_every)]
    file = opened(path)
    assert len(file) == 60 and list(file.read()) == rows
    for start, stop in ((0, 0), (0, 1), (59, 60), (17, 43), (58, 99), (60, 70), (5, None)):
        assert list(file.read(start, stop)) == rows[start:stop], (start, stop)
    assert [file.locate_sample(row) for row in range(60)] == [place for place, _ in rows]


def test_identity_is_that_of_the_content(tmp_path):
    one, two = tmp_path / "a.jsonl", tmp_path / "more" / "a.jsonl"
    two.parent.mkdir()
    write_lines(one, 10), write_lines(two, 10)
    content = one.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    assert (
        opened(one).identity
        == {"name": "a.jsonl", "size": len(content), "sha256": digest}
        == opened(two).identity
    )
    two.write_bytes(content[:-2] + b"!}")
    assert opened(two).identity["sha256"] != digest and opened(two).identity["size"] == len(content)


def _sums(file, ranges, answers):
    answers.put([sum(row["n"] for _, row in file.read(start, stop)) for start, stop in ranges])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_files_serve_forked_processes_and_pickles(name, tmp_path):
    path = tmp_path / name
    rows = [{"n": number} for number in range(500)]
    if name == "a.parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(
            pyarrow.Table.from_pylist(rows), path, row_group_size=70
        )
    else:
        path.write_text(
            json.dumps(rows)
            if name == "a.json"
            else "".join(f"{json.dumps(row)}\n" for row in rows)
        )
    file = opened(path)
    assert len(file) == 500
    list(file.read(3, 5))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    workers = [
        context.Process(target=_sums, args=(file, [(0, 250), (250, 500)], answers))
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    expected = [sum(range(250)), sum(range(250, 500))]
    assert [answers.get(timeout=60) for _ in workers] == [expected, expected]
    for worker in workers:
        worker.join()
    assert ForkingPickler.dumps(file)
    assert list(copy.deepcopy(file).read(7, 9)) == list(file.read(7, 9))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_memory_does_not_grow_with_the_file(name, tmp_path):
    """15 MB of rows are indexed, hashed and read in less than 10 MB."""
    path, line = tmp_path / name, json.dumps({"text": "x" * 1000})
    with path.open("w") as file:
        file.write("[" if name == "a.json" else "")
        for number in range(15_000):
            file.write(line + ("\n" if name == "a.jsonl" else ",\n" if number < 14_999 else "]"))
    tracemalloc.start()
    try:
        file = opened(path)
        assert len(file) == 15_000 and file.identity["size"] > 15_000_000
        assert sum(len(row["text"]) for _, row in file.read()) == 15_000_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000


def test_a_file_that_changed_since(tmp_path):
    """What no longer fits the index is a fault of the row, not a crash."""
    for name, content in (("a.jsonl", '{"a": 1}\n{"a": 2}\n'), ("a.json", '[{"a": 1}, {"a": 2}]')):
        (tmp_path / name).write_text(content)
        file = opened(tmp_path / name)
        assert len(file) == 2
        (tmp_path / name).write_text('{"b"')
        assert [type(row) for _, row in file.read()] == [SampleFault, SampleFault]
    (tmp_path / "a.json").unlink()
    with pytest.raises(
        DataError, match=r"a.json: the file cannot be read \(No such file or directory\)"
    ):
        list(file.read())


def test_numbers_of_too_many_digits(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": ' + "1" * 5000 + "}\n")
    assert "a number of more digits than can be read" in str(read(tmp_path / "a.jsonl")[0][1])
    (tmp_path / "a.json").write_text('[{"a": 1},\n{"a": ' + "1" * 5000 + "}]")
    refused(
        tmp_path / "a.json", r"a.json:2: column 1: invalid JSON \(a number of too many digits\)"
    )


def test_text_keeps_its_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\ntwo é\n".encode())
    assert read(tmp_path / "a.txt") == [(str(tmp_path / "a.txt"), {"text": "one\r\ntwo é\n"})]
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\xe9")
    refused(tmp_path / "a.txt", r"a.txt:3: found the byte 0xe9, expected UTF-8; convert the file")


def test_folders_are_read_in_order_of_names(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.json"):
        (tmp_path / name).write_text(json.dumps({"name": name}))
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "._a.jsonl").write_bytes(b"\0\5\x16\7")
    (tmp_path / "more.json").mkdir()
    assert [row["name"] for _, row in read(tmp_path)] == ["a.jsonl", "b.jsonl", "c.json"]


def test_a_source_that_is_not_there_is_told_by_its_key(tmp_path):
    names = [str(tmp_path / f"{number}.jsonl") for number in range(2)]
    for source in (names[0], str(tmp_path)):
        with pytest.raises(DataError, match=r"; set validation\.source to one"):
            open_sources(SourceConfig(source), section="validation")
    cfg = load_config(
        "demo/full",
        ["~data.source", f"data.sources=[{{source: {names[0]}}}, {{source: {names[1]}}}]"],
    )
    with pytest.raises(
        DataError, match=r"0.jsonl: no such file or folder; set data\.sources\[0\]\.source to one"
    ):
        settle_formats(cfg)
    cfg = load_config(
        "demo/full",
        ["data.format=alpaca", f"validation.source={names[1]}", "validation.format=auto"],
    )
    with pytest.raises(
        DataError, match=r"1.jsonl: no such file or folder; set validation\.source to one"
    ):
        settle_formats(cfg)


def test_sources_that_are_not_there(tmp_path):
    refused(tmp_path / "x.json", r"x.json: no such file or folder; set data.source")
    refused(tmp_path, "found no file of samples in the folder")
    (tmp_path / "a.xlsx").write_text("a,b")
    refused(
        tmp_path / "a.xlsx",
        r"a.xlsx: found a .xlsx file, expected one of .csv, .json, .jsonl, .parquet, .tsv, .txt",
    )
    (tmp_path / "a.parquet.gz").write_text("a,b")
    refused(tmp_path / "a.parquet.gz", r"found a .parquet.gz file, expected one of .csv")
    (tmp_path / "rows").write_text("{}")
    refused(tmp_path / "rows", r"rows: found a nameless file")


@pytest.mark.parametrize("name", [
    "b.arrow", "b.avro", "b.feather", "b.jsonlines", "b.ndjson", "b.orc", "b.xlsx", "B.JSONL", "b.jsonl.bz2",
    "b.csv.xz", "b.json.zip", "b.parquet.gz", "b.TXT.GZ", "b.ndjson.gz",
])  # fmt: skip
def test_no_samples_of_a_folder_are_passed_over(name, tmp_path):
    """Files that hold rows for other tools; what is no data (README.md, a script, a picture) is
    passed over.
    """
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    for other in ("README.md", "make.py", "a.png", "LICENSE", ".b.arrow", "images.zip", "notes.xz"):
        (tmp_path / other).write_bytes(b"x")
    (tmp_path / "b.ndjson.d").mkdir()
    assert [row for _, row in read(tmp_path)] == [{"a": 1}]
    (tmp_path / name).write_bytes(b"x")
    refused(tmp_path, rf": found {re.escape(name)} in the folder, which would not be read")


def test_what_save_to_disk_of_datasets_wrote(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "Lima."}])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "more")
    for folder, part in (("one", ""), ("more", "['train']")):
        path = tmp_path / folder
        refused(
            path,
            rf"{folder}: found a Dataset\w* that save_to_disk of the package datasets wrote,"
            r" .*\.to_parquet",
        )
        with pytest.raises(DataError) as caught:
            read(path)
        call = re.search(r"load_from_disk.*to_parquet\('rows.parquet'\)", str(caught.value))[0]
        assert part.replace("'", '"') in call
        call = call.replace("rows.parquet", str(tmp_path / "rows.parquet"))
        eval(call, {"load_from_disk": datasets.load_from_disk})  # noqa: S307  (the line that a user copies)
        assert [row for _, row in read(tmp_path / "rows.parquet")] == [{"text": "Lima."}]


def test_a_file_without_permission(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}")

    def no(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", no)
    refused(
        tmp_path / "a.jsonl",
        r"a.jsonl: the file cannot be read \(Permission denied\); check its permissions",
    )


def test_real_files(realdata):
    folder = realdata / "datasets"
    assert len(read(folder / "alpaca" / "alpaca_en_demo.json")) == len(
        json.loads((folder / "alpaca" / "alpaca_en_demo.json").read_text())
    )
    rows = read(folder / "gsm8k" / "test.jsonl")
    assert len(rows) == 1319 and rows[-1][0].endswith("test.jsonl:1319")
    text = (folder / "alpaca" / "identity.json").read_text().split("\n")
    for place, row in read(folder / "alpaca" / "identity.json"):
        line = int(re.search(r":(\d+): \.\[\d+\]$", place).group(1))
        assert json.dumps(row["instruction"], ensure_ascii=False) in text[line], place


@pytest.mark.parametrize(
    "name", ["alpaca/identity.json", "gsm8k/test.jsonl", "dpo/dpo_en_demo.json"]
)
def test_real_files_by_number(realdata, name):
    file = opened(realdata / "datasets" / name)
    rows = list(file.read())
    assert len(rows) == len(file)
    for start in range(0, len(file), 97):
        assert list(file.read(start, start + 3)) == rows[start : start + 3]
