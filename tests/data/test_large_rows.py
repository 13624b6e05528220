"""A row over data.max_sample_mib is a bad row and is never held; a Parquet file that unpacks to far
more is refused.
"""

import json
import re
import resource

import pytest

from recipe_lib.config.schema import DataConfig, SourceConfig
from recipe_lib.data import build_dataset, sources
from recipe_lib.data.sample_files import SAMPLE_LIMIT
from recipe_lib.data.samples import SampleFault
from recipe_lib.data.sources import open_sources
from recipe_lib.errors import DataError
from recipe_lib.units import MIB

LARGE = 5 * MIB
GOOD = {"text": "short"}


def rows_of(path, sample_limit=SAMPLE_LIMIT):
    (file,) = open_sources(SourceConfig(str(path)), sample_limit)
    assert len(file) == len(list(file.read()))
    return list(file.read())


def write(path, rows):
    lines = [json.dumps(row) for row in rows]
    path.write_text(
        "\n".join(lines) + "\n" if path.suffix == ".jsonl" else f"[\n{','.join(lines)}\n]"
    )


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize(
    "large", ["x" * LARGE, ['a"]}\\', {"b": "[" * LARGE}]], ids=["text", "brackets"]
)
def test_a_large_row_is_a_bad_one(suffix, large, tmp_path):
    path = tmp_path / f"a.{suffix}"
    write(path, [GOOD, {"text": large}, GOOD])
    (_, first), (place, fault), (_, last) = rows_of(path, sample_limit=2 * MIB)
    assert first == last == GOOD
    assert place.startswith(f"{path}:2" if suffix == "jsonl" else f"{path}:2: .[1]")
    assert isinstance(fault, SampleFault) and fault.cause == "too large"
    assert re.fullmatch(
        r"found a sample of 5.00 MiB, expected at most data.max_sample_mib=2; divide the text, or"
        r" raise .*",
        str(fault),
    )


def test_a_large_text_is_a_bad_row(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 2000)
    ((place, fault),) = rows_of(tmp_path / "a.txt", sample_limit=1000)
    assert place == str(tmp_path / "a.txt") and isinstance(fault, SampleFault)
    assert isinstance(rows_of(tmp_path / "a.txt")[0][1], dict)


@pytest.mark.parametrize(("length", "kept"), [(1000, True), (1001, False)])
@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_the_limit_is_of_the_row_without_its_line_end(length, kept, end, tmp_path):
    line = json.dumps({"text": ""})
    line = line.replace('""', '"' + "x" * (length - len(line)) + '"')
    (tmp_path / "a.jsonl").write_bytes((line + end).encode())
    ((_, row),) = rows_of(tmp_path / "a.jsonl", sample_limit=1000)
    assert isinstance(row, dict) is kept


class Letters:
    """A tokenizer of bytes."""

    place, vocab_size, ordinary_size, bos_id, eos_id = "letters", 256, 256, None, None
    add_bos_by_default, chat_template, chat_template_place = False, None, ""
    special_texts, stop_ids = (), frozenset()

    def encode(self, text, *, add_bos=False, allow_special=False):
        return list(text.encode())


def test_what_a_large_row_does_is_for_bad_rows_to_say(tmp_path):
    write(tmp_path / "a.jsonl", [GOOD, {"text": "x" * 2 * MIB}, {"text": "other"}])
    cfg = DataConfig(
        source=str(tmp_path / "a.jsonl"),
        format="text",
        cache=False,
        check_label_mask=False,
        max_sample_mib=1,
    )
    with pytest.raises(
        DataError,
        match=(
            r"a.jsonl:2: found a sample of 2.00 MiB, .*; correct the sample, or set data.on_invalid"
        ),
    ):
        build_dataset(cfg, Letters(), 64)
    cfg.on_invalid = "skip"
    assert build_dataset(cfg, Letters(), 64).report.bad_samples == {"too large": 1}
    cfg.on_invalid, cfg.max_sample_mib = "error", 3
    assert build_dataset(cfg, Letters(), 64).report.texts == 3


pyarrow = pytest.importorskip("pyarrow")
writer = pytest.importorskip("pyarrow.parquet")


@pytest.mark.parametrize("row_groups", [1, 12], ids=["one group", "a group a row"])
def test_a_parquet_file_that_unpacks_to_far_more_is_refused(row_groups, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_UNPACKED_BYTES", MIB)
    table = pyarrow.table({"text": ["b " * MIB] * 12})
    writer.write_table(
        table,
        tmp_path / "a.parquet",
        compression="zstd",
        row_group_size=12 // row_groups,
        use_dictionary=False,
    )
    assert (tmp_path / "a.parquet").stat().st_size < MIB / 10
    with pytest.raises(
        DataError,
        match=r"a.parquet: .* KiB say that they unpack to 12 samples of .*, expected at most 200",
    ):
        rows_of(tmp_path / "a.parquet")


def test_values_of_a_dictionary_are_unpacked_few_at_a_time(tmp_path, monkeypatch):
    """One text of 12 MiB, kept once, is the value of 400 rows: 5 GB if they were all unpacked
    together.
    """
    monkeypatch.setattr(sources, "BYTES_AT_ONCE", 64 * MIB)
    column = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 400, pyarrow.int32()), ["x" * 12 * MIB]
    )
    writer.write_table(
        pyarrow.table({"text": column, "id": list(range(400))}),
        tmp_path / "a.parquet",
        dictionary_pagesize_limit=2**30,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (file,) = open_sources(SourceConfig(str(tmp_path / "a.parquet")))
    found = [(len(row["text"]), row["id"]) for _, row in file.read(0, 10)]
    assert found == [(12 * MIB, number) for number in range(10)]
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 1024 * MIB


def test_large_rows_of_a_parquet_file(tmp_path):
    table = pyarrow.table({"text": ["a", "b" * 5000, "c"], "messages": [[{"role": "user"}]] * 3})
    writer.write_table(table, tmp_path / "a.parquet")
    (_, first), (place, fault), (_, last) = rows_of(tmp_path / "a.parquet", sample_limit=1000)
    assert (first["text"], last["text"]) == ("a", "c")
    assert place.endswith(": .[1]") and isinstance(fault, SampleFault)


def test_a_footer_that_counts_more_rows_than_bytes_can_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_ROWS_PER_BYTE", 0.001)
    writer.write_table(pyarrow.table({"text": ["a"] * 1000}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="unpack to 1000 samples"):
        rows_of(tmp_path / "a.parquet")
