"""A folder in memory for the tests that save hundreds of times: a disk's flushes would be most of
their time.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def memory_root() -> Iterator[Path]:
    """A temporary folder on tmpfs, or where temporary folders are where there is none."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tune-", dir=place) as name:
        yield Path(name)


@pytest.fixture
def memory_path(memory_root: Path) -> Path:
    """An empty folder in it."""
    return Path(tempfile.mkdtemp(dir=memory_root))
