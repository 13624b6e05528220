"""Where rows come from: files, folders of files, hub datasets. Each is a list of RowFiles, read by row number."""

from collections.abc import Callable, Iterator
from pathlib import Path

from recipe_lib.config.local_files import find_files
from recipe_lib.config.schema import SourceConfig
from recipe_lib.config.schema_data import is_hub, resolved_sources
from recipe_lib.data.hub import HubRows
from recipe_lib.data.json_files import JsonFile
from recipe_lib.data.parquet import ParquetRows
from recipe_lib.data.row_files import ROW_LIMIT, JsonLinesFile, Located, RowFile, TextFile

__all__ = ["Located", "RowFile", "find_files", "open_sources", "read_rows", "resolved_sources"]

_KINDS: dict[str, Callable[[Path, int], RowFile]] = {
    ".json": JsonFile,
    ".jsonl": JsonLinesFile,
    ".parquet": ParquetRows,
    ".txt": TextFile,
}


def open_sources(cfg: SourceConfig, row_limit: int = ROW_LIMIT) -> list[RowFile]:
    """The files of one source (`cfg.source`, `cfg.split`), by name, which is the order of its rows.

    row_limit: bytes of a row; a larger one cannot be used. Files are looked up and not read yet. Raises DataError:
    nothing is there, or a kind that is not read.
    """
    if is_hub(cfg.source):
        return [HubRows(cfg.source, cfg.split or "train", row_limit)]
    return [_KINDS[path.suffix](path, row_limit) for path in find_files(cfg.source)]


def read_rows(source: str, split: str) -> Iterator[Located]:
    """All rows of one source, in order. Raises DataError like `open_sources` and `RowFile.read`."""
    for file in open_sources(SourceConfig(source, split=split)):
        yield from file.read()
