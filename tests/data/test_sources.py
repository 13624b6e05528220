"""Rows come out of files in order, each with its place; what cannot be read is one line with file and line."""

import json
import re
import sys
import types

import pytest

from recipe_lib.data.samples import RowFault
from recipe_lib.data.sources import read_rows
from recipe_lib.errors import DataError


def read(source, split="train"):
    return list(read_rows(str(source), split))


def refused(source, line):
    with pytest.raises(DataError) as caught:
        read(source)
    assert re.search(line, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_rows_have_their_line(tmp_path):
    (tmp_path / "a.json").write_text('[\n {"a": 1},\n\n {"a": "]},{"},\n {"a":\n  [2]}, {"a": 3}\n]\n')
    places, rows = zip(*read(tmp_path / "a.json"), strict=True)
    assert rows == ({"a": 1}, {"a": "]},{"}, {"a": [2]}, {"a": 3})
    assert [place.removeprefix(str(tmp_path)) for place in places] == [
        "/a.json:2 (row 1)", "/a.json:4 (row 2)", "/a.json:5 (row 3)", "/a.json:6 (row 4)",
    ]  # fmt: skip


def test_json_of_other_shapes(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"data": [{"a": 1}, {"a": 2}], "version": 1}')
    assert [row for _, row in read(file)] == [{"a": 1}, {"a": 2}]
    file.write_text('{"x": {"data": [7]},\n "data" : [\n  {"a": 1},\n  {"a": 2}\n ], "version": 1}\n')
    assert read(file) == [(f"{file}:3 (row 1)", {"a": 1}), (f"{file}:4 (row 2)", {"a": 2})]
    file.write_text('{"data": []}')
    assert read(file) == []
    file.write_text('{"a": 1}')
    assert read(file) == [(f"{file} (row 1)", {"a": 1})]
    file.write_text("\ufeff [ ] ", encoding="utf-8")
    assert read(file) == []


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", r"a.json: the file is empty, expected rows or text"),
        (b" \n ", r"the file is empty"),
        (b'[{"a": 1},\n {"a" 2}]', r"a.json:2: column 7: invalid JSON \(Expecting ':' delimiter\), expected a list"),
        (b'[{"a": 1}\n {"a": 2}]', r"a.json:2: column 2: invalid JSON \(Expecting ',' delimiter\)"),
        (b'[{"a": 1},\n {"a": 2}', r"a.json:2: column 10: invalid JSON"),
        (b'[{"a": 1},]', r"a.json:1: column \d+: invalid JSON"),
        (b'[{"a": 1}] x', r"a.json:1: column 12: invalid JSON \(Extra data\)"),
        (b'{"a": 1}\n{"a": 2}\n', r"a.json:2: column 1: invalid JSON \(Extra data\).*name the file .jsonl"),
        (b'["\n\xff"]', r"a.json:2: found the byte 0xff, expected UTF-8"),
        (b"3", r'a.json: found int, expected a list of objects or {"data"'),
        (b"[" * 100_000, r"a.json: JSON nested too deep"),
        (b'{"a":' * 100_000, r"a.json: JSON nested too deep"),
    ],
)
def test_json_files_that_are_refused(content, line, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    refused(tmp_path / "a.json", line)


def test_json_lines(tmp_path):
    content = b'\xef\xbb\xbf{"a": 1}\n\n{"a": 2}\r\n{"a" 3}\n[1]\n"x"\n{"a": "\xff"}\n' + b"[" * 100_000 + b'\n{"a": 4}'
    (tmp_path / "a.jsonl").write_bytes(content)
    found = {place.rpartition(":")[2]: row for place, row in read(tmp_path / "a.jsonl")}
    assert {line: row for line, row in found.items() if isinstance(row, dict)} == {
        "1": {"a": 1}, "3": {"a": 2}, "9": {"a": 4},
    }  # fmt: skip
    faults = {line: str(row) for line, row in found.items() if isinstance(row, RowFault)}
    assert faults == {
        "4": "column 6: invalid JSON (Expecting ':' delimiter), expected an object a line",
        "5": "found a list, expected an object with the columns of the row",
        "6": "found str, expected an object with the columns of the row",
        "7": "column 8: found the byte 0xff, expected UTF-8",
        "8": "JSON nested too deep, expected an object a line",
    }


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_json_lines(content, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    refused(tmp_path / "a.jsonl", r"a.jsonl: the file is empty, expected rows")


def test_text_keeps_its_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\ntwo é\n".encode())
    assert read(tmp_path / "a.txt") == [(str(tmp_path / "a.txt"), {"text": "one\r\ntwo é\n"})]
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\xe9")
    refused(tmp_path / "a.txt", r"a.txt:3: found the byte 0xe9, expected UTF-8; convert the file")


def test_folders_are_read_in_order_of_names(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.json"):
        (tmp_path / name).write_text(json.dumps({"name": name}))
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "more.json").mkdir()
    assert [row["name"] for _, row in read(tmp_path)] == ["a.jsonl", "b.jsonl", "c.json"]


def test_sources_that_are_not_there(tmp_path):
    refused(tmp_path / "x.json", r"x.json: no such file or folder; set data.source")
    refused(tmp_path, r"found no .json, .jsonl, .txt file in the folder")
    (tmp_path / "a.csv").write_text("a,b")
    refused(tmp_path / "a.csv", r"a.csv: found a .csv file, expected one of .json, .jsonl, .txt")
    (tmp_path / "rows").write_text("{}")
    refused(tmp_path / "rows", r"rows: found a nameless file")


def test_a_file_without_permission(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}")

    def no(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", no)
    refused(tmp_path / "a.jsonl", r"a.jsonl: the file cannot be opened \(Permission denied\); check its permissions")


def test_hub_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(
        "hub:owner/name", r"hub:owner/name needs the package datasets; run `pip install 'tune-recipes\[datasets\]'`"
    )


def test_hub_rows(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        if name == "owner/none":
            raise FileNotFoundError("Dataset 'owner/none' doesn't exist\nmore")
        return [{"a": 1}, {"a": 2}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert read("hub:owner/name", "test") == [
        ("hub:owner/name (row 1)", {"a": 1}),
        ("hub:owner/name (row 2)", {"a": 2}),
    ]
    assert asked == [("owner/name", "test")]
    refused(
        "hub:owner/none", r"hub:owner/none: the hub dataset cannot be loaded \(Dataset 'owner/none' doesn't exist\)$"
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
        line = int(re.search(r":(\d+) \(row", place).group(1))
        assert json.dumps(row["instruction"], ensure_ascii=False) in text[line], place
