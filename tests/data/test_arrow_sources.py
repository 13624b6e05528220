"""Parquet files and hub datasets: any range of rows, whatever the row groups; nulls; what is
missing or damaged.
"""

import re
import sys

import pytest

from recipe_lib.config.schema import SourceConfig
from recipe_lib.data import sources
from recipe_lib.data.sources import open_sources
from recipe_lib.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
writer = pytest.importorskip("pyarrow.parquet")


def opened(source, split=None):
    (file,) = open_sources(SourceConfig(str(source), split=split))
    return file


def refused(source, line):
    with pytest.raises(DataError) as caught:
        len(opened(source))
    assert re.search(line, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def write(path, rows, **options):
    writer.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


@pytest.mark.parametrize("group", [1, 7, 30, 100])
@pytest.mark.parametrize("batch", [1, 4, 256])
def test_any_range_of_rows(tmp_path, monkeypatch, group, batch):
    monkeypatch.setattr(sources, "ROWS_AT_ONCE", batch)
    rows = [{"n": number, "text": "x" * number} for number in range(60)]
    path = write(tmp_path / "a.parquet", rows, row_group_size=group)
    file, expected = opened(path), [(f"{path}: .[{row['n']}]", row) for row in rows]
    assert len(file) == 60 and list(file.read()) == expected
    for start, stop in (
        (0, 0),
        (0, 1),
        (59, 60),
        (6, 8),
        (7, 14),
        (17, 43),
        (58, 99),
        (60, 70),
        (29, None),
    ):
        assert list(file.read(start, stop)) == expected[start:stop], (start, stop)
    assert [file.locate_sample(row) for row in range(60)] == [place for place, _ in expected]


def test_nulls_inside_a_column_are_left_out(tmp_path):
    """A table fills objects up to the same fields; a template would print them."""
    messages = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {
            "role": "assistant",
            "content": "y",
            "tool_calls": [{"function": {"name": "g", "arguments": {"b": None}}}],
        },
    ]
    path = write(tmp_path / "a.parquet", [{"messages": messages, "tools": None}])
    ((_, row),) = opened(path).read()
    assert row["tools"] is None
    assert row["messages"] == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {
            "role": "assistant",
            "content": "y",
            "tool_calls": [{"function": {"name": "g", "arguments": {}}}],
        },
    ]


def test_parquet_files_that_are_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", [{"a": 1}])
    content = path.read_bytes()
    (tmp_path / "b.parquet").write_bytes(content[:-10])
    refused(
        tmp_path / "b.parquet",
        r"b.parquet: found no Parquet table, or one that is cut short; write or download it again$",
    )
    (tmp_path / "c.parquet").write_bytes(b"")
    refused(tmp_path / "c.parquet", r"c.parquet: found no Parquet table")
    writer.write_table(
        pyarrow.table({"a": pyarrow.array([], pyarrow.int64())}), tmp_path / "d.parquet"
    )
    refused(tmp_path / "d.parquet", r"d.parquet: the file is empty, expected samples")
    damaged = bytearray(content)
    damaged[4:40] = bytes(36)
    (tmp_path / "e.parquet").write_bytes(damaged)
    with pytest.raises(DataError, match=r"e.parquet: the Parquet file cannot be read"):
        list(opened(tmp_path / "e.parquet").read())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(
        path,
        r"a.parquet: Parquet needs the package pyarrow; run `pip install 'datasets<6,>=4'"
        r" 'pyarrow>=17'`$",
    )


def test_hub_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(
        "hub:owner/name",
        r"hub:owner/name needs the package datasets; run `pip install 'datasets<6,>=4'"
        r" 'pyarrow>=17'`",
    )


@pytest.mark.parametrize(
    "name", ["", ":x", "../x", "/tmp", "a/b/c", "a b", "owner/", "owner/name:"]
)
def test_hub_names_that_are_none(name):
    refused(
        f"hub:{name}",
        rf"data.source: found 'hub:{name}', expected hub:OWNER/NAME or hub:OWNER/NAME:SUBSET$",
    )


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the hub: the datasets library itself over a file of this folder; what it was
    asked for.
    """
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, subset=None, *, split):
        asked.append((name, subset, split))
        if name == "owner/none":
            raise datasets.exceptions.DatasetNotFoundError(
                "Dataset 'owner/none' doesn't exist\nmore"
            )
        rows = [{"n": number, "inner": {"a": number, "b": None}} for number in range(600)]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_hub_rows(hub):
    file = opened("hub:owner/name", "test")
    expected = [(f"hub:owner/name: .[{n}]", {"n": n, "inner": {"a": n}}) for n in range(600)]
    assert len(file) == 600 and list(file.read()) == expected
    for start, stop in ((0, 1), (255, 257), (256, 512), (590, 900), (600, 601), (300, None)):
        assert list(file.read(start, stop)) == expected[start:stop]
    assert hub == [("owner/name", None, "test")]
    assert len(opened("hub:owner/name:main")) == 600 and hub[-1] == ("owner/name", "main", "train")
    refused(
        "hub:owner/none",
        r"hub:owner/none: the hub dataset cannot be loaded \(Dataset 'owner/none' doesn't exist\)$",
    )


def test_the_fault_of_a_hub_dataset_names_the_key_that_has_it(hub):
    (file,) = open_sources(SourceConfig(source="hub:owner/none"), section="data.sources[1]")
    with pytest.raises(DataError, match=r"^data\.sources\[1\]\.source: hub:owner/none: the hub "):
        len(file)


def test_identity_of_hub_rows(hub, tmp_path, monkeypatch):
    first, again = opened("hub:owner/name").identity, opened("hub:owner/name").identity
    assert first == again and len(first["sha256"]) == 64 and first["name"] == "hub:owner/name train"
    import datasets

    other = datasets.Dataset.from_list([{"n": 1}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: other)
    assert opened("hub:owner/name").identity["sha256"] != first["sha256"]
    other.save_to_disk(str(tmp_path / "saved"))
    kept = datasets.load_from_disk(str(tmp_path / "saved"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: kept)
    size = sum(file.stat().st_size for file in (tmp_path / "saved").glob("*.arrow"))
    assert opened("hub:owner/name").identity["size"] == size > 0
