"""Datasets of the hub, through the package `datasets` (the extra of that name), which maps its files into memory."""

import hashlib
import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError

from recipe_lib.config.local_files import no_datasets
from recipe_lib.config.schema_data import HUB
from recipe_lib.data.parquet import without_nulls
from recipe_lib.data.sample_files import SAMPLE_LIMIT, Located, SampleFile, as_sample, hash_of
from recipe_lib.errors import DataError

ROWS_AT_ONCE = 256
NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*(:[^/:]+)?")  # and no path, which `datasets` would read as well


class HubSamples(SampleFile):
    """One split of `hub:OWNER/NAME`, or of the subset that `hub:OWNER/NAME:SUBSET` names."""

    def __init__(self, source: str, split: str, sample_limit: int = SAMPLE_LIMIT, key: str = "data.source") -> None:
        super().__init__(source, sample_limit)
        self.split = split
        if not NAME.fullmatch(source.removeprefix(HUB)):
            raise DataError(f"{key}: found {source!r}, expected {HUB}OWNER/NAME or {HUB}OWNER/NAME:SUBSET")
        try:
            import datasets  # noqa: F401  (a missing package is said before anything is read)
        except ImportError:
            raise DataError(no_datasets(source, key)) from None

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Located]:
        """As SampleFile says; inside a sample, a field that holds null is left out."""
        samples = self._samples
        stop = len(samples) if stop is None else min(stop, len(samples))
        for first in range(start, stop, ROWS_AT_ONCE):
            columns = samples[first : min(first + ROWS_AT_ONCE, stop)]
            for number, values in enumerate(zip(*columns.values(), strict=True), start=first):
                sample = as_sample(without_nulls(dict(zip(columns, values, strict=True))))
                size = text_size(sample)
                yield self.place_of(number), sample if size <= self.sample_limit else self.too_large(size)

    def place_of(self, sample: int) -> str:
        """As SampleFile says."""
        return f"{self.place}: .[{sample}]"

    @cached_property
    def identity(self) -> dict[str, Any]:
        """As SampleFile says, of the files that `datasets` keeps the samples in."""
        name = f"{self.place} {self.split}"
        files = [Path(file["filename"]) for file in self._samples.cache_files]
        if files:
            return {"name": name} | hash_of(*files)
        digest, size = hashlib.sha256(), 0
        for _, sample in self.read():
            line = json.dumps(sample, sort_keys=True, default=str).encode()
            digest.update(line)
            size += len(line)
        return {"name": name, "size": size, "sha256": digest.hexdigest()}

    @cached_property
    def _samples(self) -> Any:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError

        name, _, subset = self.place.removeprefix(HUB).partition(":")
        try:
            return load_dataset(name, subset or None, split=self.split)
        except (OSError, ValueError, DatasetsError, HTTPError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DataError(f"data.source: {self.place}: the hub dataset cannot be loaded ({said})") from None


def text_size(value: Any) -> int:
    """Letters of all texts in nested lists and dicts."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(text_size, value.values()))
    return sum(map(text_size, value)) if isinstance(value, list) else 0
