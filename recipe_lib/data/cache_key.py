"""The name of tokenized rows: whatever could change one of them changes the name."""

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from recipe_lib.data.dataset import ARRAYS
from recipe_lib.data.encoding import SourceEncoder
from recipe_lib.data.row_files import hash_of
from recipe_lib.data.samples import TextTokenizer
from recipe_lib.data.sources import RowFile

# What a tokenizer reads in its folder, and the packages and folders of ours whose code decides on ids and labels.
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens*", "added_tokens*", "chat_template*", "generation_config.json", "config.json",
)  # fmt: skip
PACKAGES = ("tokenizers", "sentencepiece", "tiktoken", "jinja2", "pyarrow", "numpy")
FOLDERS = ("data", "tokenizers")


def cache_key(
    settings: Mapping[str, Any], files: Sequence[RowFile], encoders: Sequence[SourceEncoder], tokenizer: TextTokenizer
) -> str | None:
    """SHA-256 in hex over settings, the content and the place of all files, tokenizer, formats and our own code.

    None: something has no file to look at, so that what was made of it must not be used again. Of a plugin's format
    the file that it stands in is looked at, and not what that file imports. Raises DataError: a file cannot be read.
    """
    readers = [_code_of(encoder.read) for encoder in encoders]
    token_files = _tokenizer_files(Path(tokenizer.place))
    if None in readers or not token_files:
        return None
    decides = {
        "settings": settings,
        "files": [[file.place, file.identity] for file in files],
        "columns": [encoder.columns for encoder in encoders],
        "sources": [encoder.source.source for encoder in encoders],
        "formats": readers,
        "tokenizer": [tokenizer.place, token_files, tokenizer.chat_template, tokenizer.chat_template_place],
        "ids": [tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos_by_default, sorted(tokenizer.stop_ids)],
        "arrays": ARRAYS,
        "code": _our_code(),
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _tokenizer_files(file: Path) -> list[list[str]]:
    """Names and hashes of what a tokenizer is read from; empty, if it is no file."""
    if not file.is_file():
        return []
    found = {file, *(path for pattern in TOKENIZER_FILES for path in file.parent.glob(pattern) if path.is_file())}
    return _hashes(found)


def _code_of(reader: Any) -> list[str] | None:
    """The name of a function and the hash of the file that it stands in."""
    try:
        file = Path(inspect.getsourcefile(inspect.unwrap(reader)) or "")
    except TypeError:
        return None
    return [getattr(reader, "__qualname__", ""), *_hashes([file])[0]] if file.is_file() else None


@cache
def _our_code() -> list[Any]:
    here = Path(__file__).parents[1]
    files = _hashes(path for folder in FOLDERS for path in (here / folder).glob("*.py"))
    return [files, [[name, _version(name)] for name in PACKAGES]]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _hashes(paths: Iterable[Path]) -> list[list[str]]:
    return [[path.name, hash_of(path)["sha256"]] for path in sorted(paths)]
