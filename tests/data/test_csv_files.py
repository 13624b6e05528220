"""CSV and TSV against Python's own reader, and every mistake of such a file in a line."""

import csv
import json
import random
from pathlib import Path

import pytest

from recipe_lib.config.schema_data import DataConfig
from recipe_lib.data import build_dataset
from recipe_lib.data.sample_files import CsvFile
from recipe_lib.data.samples import SampleFault
from recipe_lib.errors import DataError

PIECES = ["a", "ü 漢", '"', '""', ",", ";", "\t", "\n", "\r\n", " ", "x" * 300, ""]


def cell(draw: random.Random) -> str:
    return "".join(draw.choices(PIECES, k=draw.randrange(6)))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("name", "delimiter"), [("a.csv", ","), ("a.csv", ";"), ("a.tsv", "\t"), ("a.csv", "\t")]
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_samples_are_those_of_pythons_reader(
    name: str, delimiter: str, end: str, mark: str, tmp_path: Path
) -> None:
    """Read in order, and by number from anywhere."""
    draw = random.Random(f"{name}{delimiter}{end}")
    written = [{"one": cell(draw), "two": cell(draw) or "-"} for _ in range(200)]
    path = tmp_path / name
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(mark)
        writer = csv.DictWriter(file, ["one", "two"], delimiter=delimiter, lineterminator=end)
        writer.writeheader()
        writer.writerows(written)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, delimiter=delimiter)
        expected, ends = [], [1]
        for row in reader:
            expected.append(row)
            ends.append(reader.line_num)
        lines = [end + 1 for end in ends[:-1]]  # in which each row begins
    assert expected == written
    found = CsvFile(path)
    assert len(found) == 200
    assert [sample for _, sample in found.read()] == expected
    assert [sample for _, sample in found.read_first(7)] == expected[:7]
    for start, stop in ((0, 1), (17, 40), (199, None), (200, None), (5, 5)):
        part = list(CsvFile(path).read(start, stop))
        assert [sample for _, sample in part] == expected[start:stop]
        for number, (place, _) in enumerate(part, start):
            assert place == found.locate_sample(number)
            assert place == f"{path}:{lines[number]}"


def test_an_index_column_without_a_name_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",instruction,output\n0,a,b\n\n1,c,d\n")
    assert [sample for _, sample in CsvFile(tmp_path / "a.csv").read()] == [
        {"instruction": "a", "output": "b"},
        {"instruction": "c", "output": "d"},
    ]


def test_a_row_of_other_cells_is_a_bad_sample(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a,b\n1,2\n"3\n3",4,5\n6\n7,8\n')
    found = list(CsvFile(tmp_path / "a.csv").read())
    assert [isinstance(sample, SampleFault) for _, sample in found] == [False, True, True, False]
    assert [place.rpartition(":")[2] for place, _ in found] == ["2", "3", "5", "6"]
    assert "found 3 cells, expected 2 (a, b)" in str(found[1][1])


def test_a_large_row_is_never_a_sample(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"a,b\n1,{'x' * 5000}\n1,2\n")
    found = [sample for _, sample in CsvFile(tmp_path / "a.csv", 1000).read()]
    assert isinstance(found[0], SampleFault) and "data.max_sample_mib" in str(found[0])
    assert found[1] == {"a": "1", "b": "2"}


CHAT = [{"role": "user", "content": 'Say "a,\nb"'}, {"role": "assistant", "content": "a;\tb"}]


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t")])
@pytest.mark.parametrize("column", ["messages", "conversations", "chat"])
def test_conversations_as_json_text(
    name: str, delimiter: str, column: str, tmp_path: Path, plain
) -> None:
    """Cells hold text alone: JSON in them is read as in JSON lines, and what is none is a fault
    with its line.
    """
    form = "sharegpt" if column == "conversations" else "messages"
    texts = [
        json.dumps(CHAT),
        json.dumps(CHAT)[:-2],
        "[{'role': 'user'}]",
        "",
        json.dumps([CHAT[0], "x"]),
    ]
    with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows(
            [[column, "tools"], *([text, "[]"] for text in texts)]
        )
    columns = {"messages": "chat"} if column == "chat" else {}
    settings = {"columns": columns, "cache": False, "format": form if column == "chat" else "auto"}
    dataset = build_dataset(
        DataConfig(source=str(tmp_path / name), on_invalid="skip", **settings), plain, 99
    )
    (tmp_path / "a.jsonl").write_text(json.dumps({column: CHAT}))
    expected = build_dataset(DataConfig(source=str(tmp_path / "a.jsonl"), **settings), plain, 99)
    assert dataset.ids.tolist() == expected.ids.tolist() and len(dataset) == 1
    assert [line.removeprefix(f"{tmp_path / name}:") for _, line in dataset.report.bad_lines] == [
        (
            f"3: .{column}: found text that is no JSON (line 1 column {len(texts[1]) + 1}: invalid"
            " JSON (Expecting ',' delimiter)), expected a list of objects as JSON"
        ),
        (
            f"4: .{column}: found text that is no JSON (line 1 column 3: invalid JSON (Expecting"
            " property name enclosed in double quotes)), expected a list of objects as JSON"
        ),
        f"5: .{column}: found empty text, expected a list of objects",
        f"6: .{column}|fromjson|.[1]: found text, expected an object",
    ]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "a.csv: the file is empty, expected samples"),
        (b"a,b\n", "a.csv: found a header (a, b) and no rows, expected samples below it"),
        (b"a,b,a\n1,2,3\n", "a.csv:1: found the column a twice"),
        (b'a,b\n1,2\n"3,4\n', "a.csv:3: found a row that is no CSV"),
        (b'a,b\n1,"2"3\n', "a.csv:2: found a row that is no CSV"),
        (b"a,b\n1,\xe9\n", "a.csv:2: found the byte 0xe9, expected UTF-8"),
    ],
)
def test_mistakes(content: bytes, line: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(CsvFile(tmp_path / "a.csv").read())
    assert line in str(caught.value)
