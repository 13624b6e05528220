"""Provide fixtures that write a config's text, load it, or list its faults."""

from collections.abc import Callable
from pathlib import Path

import pytest

from recipe_lib.config import FullFinetuneConfig, load_config
from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError

# Sections that every config needs; written last, so that a test's own lines count from 1.
NEEDED = {"model": "  path: checkpoint\n", "data": "  source: rows.jsonl\n"}


def complete(text: str) -> str:
    """Return the text with the sections that every config needs, unless it has them."""
    missing_sections = [
        f"{section}:\n{keys}" for section, keys in NEEDED.items() if f"{section}:" not in text
    ]
    return text + "".join(missing_sections)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """Return a function that writes a config file and returns its path."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "c.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


@pytest.fixture
def load(write) -> Callable[..., FullFinetuneConfig]:
    """Return a function that completes a config's text and loads it with overrides."""

    def load(text: str, *overrides: str, schema: type = FullFinetuneConfig) -> FullFinetuneConfig:
        return load_config(write(complete(text)), overrides, schema)

    return load


@pytest.fixture
def faults(write) -> Callable[..., list[str]]:
    """Return a function that lists the faults of a config's text, a line each.

    In them the file is called `c.yaml`. The function fails the test if the text loads. Its argument
    `whole`: the text is not completed.
    """

    def faults(
        text: str | bytes, *overrides: str, schema: type = FullFinetuneConfig, whole: bool = False
    ) -> list[str]:
        path = write(text if whole or isinstance(text, bytes) else complete(text))
        with pytest.raises(ConfigError) as caught:
            load_config(path, overrides, schema)
        assert str(caught.value) == "\n".join(caught.value.faults)
        for fault in caught.value.faults:
            assert "\n" not in fault
            assert fault.isprintable()
        return [
            fault.replace(str(path), "c.yaml").replace(show(str(path)), "c.yaml")
            for fault in caught.value.faults
        ]

    return faults
