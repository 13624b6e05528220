"""Provide fixtures of real tokenizers, unpacked once, and of tiny ones of every kind."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from tests.tokenizers.made import write_json, write_sentencepiece, write_tiktoken


@pytest.fixture(scope="session")
def real_folder(realdata: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a real tokenizer by name, .gz files unpacked."""
    unpacked = tmp_path_factory.mktemp("tokenizers")

    def folder(name: str) -> Path:
        target = unpacked / name
        if not target.exists():
            target.mkdir()
            for file in sorted((realdata / "tokenizers" / name).iterdir()):
                packed = file.suffix == ".gz"
                content = gzip.decompress(file.read_bytes()) if packed else file.read_bytes()
                (target / (file.stem if packed else file.name)).write_bytes(content)
        return target

    return folder


@pytest.fixture(scope="session")
def real(real_folder: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    """Return a function that loads a real tokenizer, once, by FOLDER or FOLDER/FILE."""
    loaded: dict[str, Tokenizer] = {}

    def get(name: str) -> Tokenizer:
        if name not in loaded:
            folder, _, file = name.partition("/")
            loaded[name] = load_tokenizer(
                real_folder(folder) / file if file else real_folder(folder)
            )
        return loaded[name]

    return get


@pytest.fixture(scope="session", params=["json", "sentencepiece", "tiktoken"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tiny tokenizer of each kind."""
    writers = {"json": write_json, "sentencepiece": write_sentencepiece, "tiktoken": write_tiktoken}
    folder = tmp_path_factory.mktemp(request.param)
    return load_tokenizer(writers[request.param](folder))
