"""Provide fixtures: tokenizers, a writer of data files, the log's lines."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from recipe_lib.logs import get_logger
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from tests.tokenizers.conftest import made, real_folder  # noqa: F401  (fixtures)
from tests.tokenizers.made import write_json


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tiny tokenizer with ChatML, which begins no text with BOS."""
    return load_tokenizer(write_json(tmp_path_factory.mktemp("chatml")))


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return the same tokenizer without a chat template; it begins texts with BOS."""
    return load_tokenizer(
        write_json(tmp_path_factory.mktemp("plain"), template=None, add_bos_token=True)
    )


@pytest.fixture
def rows_file(tmp_path: Path) -> Callable[..., str]:
    """Return a writer of rows as JSON lines, which returns the path as text."""

    def write(*rows: object, name: str = "rows.jsonl") -> str:
        (tmp_path / name).write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
        return str(tmp_path / name)

    return write


@pytest.fixture
def said() -> list[str]:
    """Return a list that gets the log's lines as they come."""
    # The fixture `fresh_logger` removes the handler.
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    return lines
