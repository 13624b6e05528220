"""Where samples come from: files, folders of files, hub datasets. Each is a list of SampleFiles, read by number."""

from collections.abc import Callable, Iterator
from pathlib import Path

from recipe_lib.config.local_files import COMPRESSED, cache_root, find_files
from recipe_lib.config.schema import SourceConfig
from recipe_lib.config.schema_data import is_hub, resolved_sources
from recipe_lib.data.compressed import unpacked
from recipe_lib.data.csv_files import CsvFile
from recipe_lib.data.hub import HubSamples
from recipe_lib.data.json_files import JsonFile
from recipe_lib.data.parquet import ParquetFile
from recipe_lib.data.sample_files import SAMPLE_LIMIT, JsonLinesFile, Located, SampleFile, TextFile

__all__ = ["Located", "SampleFile", "find_files", "open_sources", "read_samples", "resolved_sources"]

_KINDS: dict[str, Callable[[Path, int, str], SampleFile]] = {
    ".csv": CsvFile,
    ".json": JsonFile,
    ".jsonl": JsonLinesFile,
    ".parquet": ParquetFile,
    ".tsv": CsvFile,
    ".txt": TextFile,
}


def open_sources(
    cfg: SourceConfig, sample_limit: int = SAMPLE_LIMIT, cache: Path | None = None, section: str = "data"
) -> list[SampleFile]:
    """The files of one source (`cfg.source`, `cfg.split`), by name, which is the order of its samples.

    sample_limit: bytes of a sample; a larger one cannot be used. cache: where compressed files are unpacked; None: the
    default one. Others are looked up and not read yet. section: of the config, with the key `source`. Raises DataError:
    nothing is there, or a kind that is not read."""
    if is_hub(cfg.source):
        return [HubSamples(cfg.source, cfg.split or "train", sample_limit, f"{section}.source")]
    return [_opened(path, sample_limit, cache) for path in find_files(cfg.source, f"{section}.source")]


def _opened(path: Path, sample_limit: int, cache: Path | None) -> SampleFile:
    if path.suffix not in COMPRESSED:
        return _KINDS[path.suffix](path, sample_limit, str(path))
    inside = unpacked(path, cache or cache_root(None))
    return _KINDS[inside.suffix](inside, sample_limit, str(path))


def read_samples(source: str, split: str) -> Iterator[Located]:
    """All samples of one source, in order. Raises DataError like `open_sources` and `SampleFile.read`."""
    for file in open_sources(SourceConfig(source, split=split)):
        yield from file.read()
