"""A .json file is read item by item, and gives what reading all of it would give: rows, places,
faults.
"""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_lib.config.schema import SourceConfig
from recipe_lib.data.sources import open_sources
from recipe_lib.errors import DataError


def opened(path):
    (file,) = open_sources(SourceConfig(str(path)))
    return file


def read(path):
    return list(opened(path).read())


def refused(path, line):
    with pytest.raises(DataError) as caught:
        read(path)
    assert re.search(line, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_rows_have_their_line(tmp_path):
    (tmp_path / "a.json").write_text(
        '[\n {"a": 1},\n\n {"a": "]},{"},\n {"a":\n  [2]}, {"a": 3}\n]\n'
    )
    places, rows = zip(*read(tmp_path / "a.json"), strict=True)
    assert rows == ({"a": 1}, {"a": "]},{"}, {"a": [2]}, {"a": 3})
    assert [place.removeprefix(str(tmp_path)) for place in places] == [
        "/a.json:2: .[0]", "/a.json:4: .[1]", "/a.json:5: .[2]", "/a.json:6: .[3]",
    ]  # fmt: skip


def test_json_of_other_shapes(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"data": [{"a": 1}, {"a": 2}], "version": 1}')
    assert [row for _, row in read(file)] == [{"a": 1}, {"a": 2}]
    file.write_text(
        '{"x": {"data": [7]},\n "data" : [\n  {"a": 1},\n  {"a": 2}\n ], "version": 1}\n'
    )
    assert read(file) == [(f"{file}:3: .data[0]", {"a": 1}), (f"{file}:4: .data[1]", {"a": 2})]
    file.write_text('{"data": []}')
    assert read(file) == []
    file.write_text('{"a": 1}')
    assert read(file) == [(str(file), {"a": 1})]
    file.write_text("\ufeff [ ] ", encoding="utf-8")
    assert read(file) == []


CASES = [
    (b"", r"a.json: the file is empty, expected samples or text"),
    (b" \n ", r"the file is empty"),
    (
        b'[{"a": 1},\n {"a" 2}]',
        r"a.json:2: column 7: invalid JSON \(Expecting ':' delimiter\), expected a list",
    ),
    (b'[{"a": 1}\n {"a": 2}]', r"a.json:2: column 2: invalid JSON \(Expecting ',' delimiter\)"),
    (b'[{"a": 1},\n {"a": 2}', r"a.json:2: column 10: invalid JSON"),
    (b'[{"a": 1},]', r"a.json:1: column \d+: invalid JSON"),
    (b'[{"a": 1}] x', r"a.json:1: column 12: invalid JSON \(Extra data\)"),
    (
        b'{"a": 1}\n{"a": 2}\n',
        r"a.json:2: column 1: invalid JSON \(Extra data\).*name the file .jsonl",
    ),
    (b'["\n\xff"]', r"a.json:2: found the byte 0xff, expected UTF-8"),
    (b"3", r'a.json: found a number, expected a list of objects or {"data"'),
    (b"null", r'a.json: found null, expected a list of objects or {"data"'),
    (b"[" * 100_000, r"a.json: JSON nested too deep"),
    (b'{"a":' * 100_000, r"a.json: JSON nested too deep"),
]


@pytest.mark.parametrize(("content", "line"), CASES)
def test_json_files_that_are_refused(content, line, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    refused(tmp_path / "a.json", line)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), max_size=6)


@settings(max_examples=40, deadline=None)
@given(
    rows=ROWS,
    ascii=st.booleans(),
    indent=st.sampled_from([None, 0, 3]),
    wrapped=st.booleans(),
)
def test_any_rows(tmp_path_factory, rows, ascii, indent, wrapped):
    """Every range equals json's own reading, and every line is where the item begins."""
    folder = tmp_path_factory.mktemp("json")
    content = {"more": rows, "data": rows, "n": [1]} if wrapped else rows
    text = json.dumps(content, ensure_ascii=ascii, indent=indent)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair can only be written as an escape
        text = json.dumps(content, indent=indent)
    (folder / "a.json").write_text(text, encoding="utf-8")
    file = opened(folder / "a.json")
    assert len(file) == len(rows)
    found = list(file.read())
    assert [row for _, row in found] == (json.loads(text)["data"] if wrapped else json.loads(text))
    lines = text.split("\n")
    for number, (place, _) in enumerate(found):
        path = ".data" if wrapped else "."
        line = int(re.search(rf":(\d+): {re.escape(path)}\[{number}\]$", place)[1])
        assert "{" in lines[line - 1]
        assert list(file.read(number, number + 1)) == [found[number]]


@pytest.mark.parametrize("last", ['[{"a": 2}, {"a": 3}]', "3"])
def test_a_list_that_stands_twice_is_none(last, tmp_path):
    (tmp_path / "a.json").write_text(f'{{"data": [{{"a": 1}}],\n"data": {last}}}')
    with pytest.raises(DataError, match=r"a.json:2: found the key 'data' twice, expected it once"):
        read(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"data": 3}')
    assert [row for _, row in read(tmp_path / "a.json")] == [{"data": 3}]


def test_numbers_among_items(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 12345, "data": [{"n": 67890.5e3}]}')
    assert [row for _, row in read(tmp_path / "a.json")] == [{"n": 67890.5e3}]


def test_a_letter_cut_in_two(tmp_path):
    (tmp_path / "a.json").write_bytes('[{"a": "é日😀"}]'.encode())
    assert [row for _, row in read(tmp_path / "a.json")] == [{"a": "é日😀"}]
    (tmp_path / "a.json").write_bytes('[\n{"a": "é日'.encode()[:-1])
    refused(tmp_path / "a.json", r"a.json:2: found the byte 0xe6, expected UTF-8")
