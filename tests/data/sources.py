"""Read all samples of a source, for the tests of readers."""

from collections.abc import Iterator

from recipe_lib.config.schema import SourceConfig
from recipe_lib.data.sample_files import LocatedSample
from recipe_lib.data.sources import open_sources


def read_samples(source: str, split: str) -> Iterator[LocatedSample]:
    """Yield all samples of one source, in order. source: a path. split: of the source."""
    for file in open_sources(SourceConfig(source, split=split)):
        yield from file.read()
