"""The arrays of a dataset while they are made, in files or in memory, and read back as maps of those files."""

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from recipe_lib.data.dataset import ARRAYS
from recipe_lib.data.encoding import Chunk
from recipe_lib.files import sha256_of


class ArrayWriter:
    """Takes chunks in order and appends them to one file for each array; folder None: in memory.

    with ArrayWriter(folder) as writer:
        writer.append(chunk, file_number)
        writer.sync()
    """

    def __init__(self, folder: Path | None) -> None:
        """Raises OSError."""
        self._folder, self._ids = folder, 0
        self.items = 0
        self.classes: dict[str, int] = {}  # name -> its number, for all chunks
        self._hashes = {name: hashlib.sha256() for name in ARRAYS}
        self._files: dict[str, BinaryIO] = {}
        try:
            for name in ARRAYS:
                self._files[name] = io.BytesIO() if folder is None else open(folder / name, "xb")
            self._write("offsets", np.zeros(1))
        except OSError:
            self._close()
            raise

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, *_exception: Any) -> None:
        self._close()

    def append(self, chunk: Chunk, file: int) -> None:
        """All items of a chunk, from the file with that number. Raises OSError."""
        lengths = np.frombuffer(chunk.lengths, dtype=np.int64)
        self._write("ids", np.frombuffer(chunk.ids, dtype=np.int32))
        self._write("trained", np.frombuffer(chunk.trained, dtype=np.uint8))
        self._write("offsets", np.cumsum(lengths) + self._ids)
        self._write("file_of", np.full(len(chunk.sample_of), file))
        self._write("sample_of", np.frombuffer(chunk.sample_of, dtype=np.int64))
        self._write("digests", np.frombuffer(chunk.digests, dtype=np.uint64))
        values = np.frombuffer(chunk.values, dtype=np.float64)
        numbers = [self.classes.setdefault(name, len(self.classes)) for name in chunk.classes]
        self._write("values", np.array(numbers, dtype=np.float64)[values.astype(np.int64)] if numbers else values)
        self._ids += int(lengths.sum())
        self.items += len(chunk.sample_of)

    def sync(self) -> None:
        """Everything is on the disk. Raises OSError."""
        for file in self._files.values():
            file.flush()
            if self._folder is not None:
                os.fsync(file.fileno())

    @property
    def checksums(self) -> dict[str, str]:
        """SHA-256 of each array's bytes, in hex."""
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}

    def arrays(self) -> dict[str, np.ndarray]:
        """What was written."""
        if self._folder is not None:
            return map_arrays(self._folder)
        return {name: np.frombuffer(self._files[name].getbuffer(), dtype=kind) for name, kind in ARRAYS.items()}  # type: ignore[attr-defined]

    def _write(self, name: str, values: np.ndarray) -> None:
        content = np.ascontiguousarray(values, dtype=ARRAYS[name]).data
        self._hashes[name].update(content)
        self._files[name].write(content)

    def _close(self) -> None:
        if self._folder is not None:
            for file in self._files.values():
                file.close()


def map_arrays(folder: Path) -> dict[str, np.ndarray]:
    """The arrays in a folder, as read-only maps, whose pages processes share. Raises OSError or ValueError."""
    return {name: np.memmap(folder / name, dtype=kind, mode="r").view(np.ndarray) for name, kind in ARRAYS.items()}


def difference(folder: Path, checksums: Mapping[str, Any]) -> str | None:
    """What is wrong with the files in a folder, in a few words; None: they are as they were written. Raises OSError."""
    for name in ARRAYS:
        if not (folder / name).is_file():
            return f"{name} is missing"
        if sha256_of(folder / name) != checksums.get(name):
            return f"{name} has other content than was written"
    return None
