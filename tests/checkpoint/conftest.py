"""Provide a folder in memory for tests that save hundreds of times: to flush a disk takes long."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def memory_root() -> Iterator[Path]:
    """Return a temporary folder on tmpfs, or on disk where there is no tmpfs."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tune-", dir=parent) as name:
        yield Path(name)


@pytest.fixture
def memory_path(memory_root: Path) -> Path:
    """Return an empty folder in the one of `memory_root`."""
    return Path(tempfile.mkdtemp(dir=memory_root))
