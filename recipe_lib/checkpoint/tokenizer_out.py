"""A tokenizer's files in an export: with the template, the special tokens and the stop tokens of the training."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from recipe_lib import files
from recipe_lib.errors import DataError
from recipe_lib.logs import get_logger
from recipe_lib.reading import JSON_LIMIT, open_regular, suggest_remedy
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from recipe_lib.tokenizers.sentencepiece_json import tokenizer_json
from recipe_lib.tokenizers.special_tokens import read_json, read_template
from recipe_lib.tokenizers.vocabulary import SentencePieceVocabulary
from recipe_lib.units import format_bytes

GENERATION = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG, TOKENIZER_JSON, TOKENS_MAP = "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"
# Only these are copied from a tokenizer's folder: no code, no weights, nothing unknown.
TOKENIZER_FILES = (
    TOKENIZER_JSON,
    "tokenizer.model",
    "tokenizer.model.v1",
    "tokenizer.model.v3",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
SETTINGS_FILES = (
    TOKENIZER_CONFIG,
    TOKENS_MAP,
    "added_tokens.json",
    CHAT_TEMPLATE,
    "chat_template.json",
    GENERATION,
)
_TEMPLATES = (CHAT_TEMPLATE, "chat_template.json")
_ANY_CLASS = "PreTrainedTokenizerFast"  # transformers' class that takes tokenizer.json as it is


def tokenizer_files(source: Path | None) -> list[Path]:
    """Return the files to copy: what a folder has of TOKENIZER_FILES, or a tokenizer file with the settings
    next to it.

    Raises DataError for one that cannot be copied, as a link that leads nowhere: without it the export is
    another one.
    """
    if source is None:
        return []
    folder = source.parent if source.is_file() else source
    names = SETTINGS_FILES if source.is_file() else (*TOKENIZER_FILES, *SETTINGS_FILES)
    found = [folder / name for name in names if os.path.lexists(folder / name) and folder / name != source]
    if source.is_file():
        found.insert(0, source)
    for path in found:
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; {suggest_remedy(error)}") from error
        if size > JSON_LIMIT:
            raise DataError(f"{path}: is larger than {format_bytes(JSON_LIMIT)}; name another file")
    return found


def copy_tokenizer(
    temporary: Path,
    copied: list[Path],
    chat_template: str | Path | None,
    stop_ids: Collection[int],
    pad_id: int | None = None,
) -> None:
    """The tokenizer's files, with template and stop tokens that the model was trained with, where they differ.

    chat_template: its text or its file; None: the tokenizer keeps its own. A template stands in tokenizer_config.json
    too, where older programs look for it, and with it BOS and EOS. A sentencepiece model gets a tokenizer.json, without
    which transformers needs packages that few have. pad_id: named for padding in a tokenizer_config.json, so that what
    a tokenizer pads with is what the model's config.json takes for padding.
    """
    settings: dict[str, Any] = {}
    for path in copied:
        if path.name == GENERATION and stop_ids:
            settings = read_json(path)
        elif path.name != TOKENIZER_CONFIG and (chat_template is None or path.name not in _TEMPLATES):
            files.copy_file(path, temporary / path.name)
    if stop_ids:
        files.write_json(temporary / GENERATION, settings | {"eos_token_id": sorted(stop_ids)})
    text = read_template(chat_template) if isinstance(chat_template, Path) else chat_template
    if text is not None:
        files.write_bytes(temporary / CHAT_TEMPLATE, text.encode())
    vocabulary = next((path for path in copied if path.name not in SETTINGS_FILES), None)
    before = next((path for path in copied if path.name == TOKENIZER_CONFIG), None)
    _write_settings(temporary, before, None if vocabulary is None else _loaded(vocabulary), text, pad_id)


def _loaded(vocabulary: Path) -> Tokenizer | None:
    """The tokenizer; None for one that we cannot read, which is copied as it is."""
    try:
        return load_tokenizer(vocabulary.parent if vocabulary.name in TOKENIZER_FILES else vocabulary)
    except DataError:
        return None


def _write_settings(
    temporary: Path, before: Path | None, tokenizer: Tokenizer | None, template: str | None, pad_id: int | None
) -> None:
    """tokenizer_config.json, with what transformers needs and it lacks, and tokenizer.json where there is none."""
    read = {} if before is None else _object(before)
    if read is None or (tokenizer is None and template is None):
        if before is not None:
            files.copy_file(before, temporary / TOKENIZER_CONFIG)
        return
    config = dict(read)
    if tokenizer is not None and not (temporary / TOKENIZER_JSON).is_file():
        made = tokenizer_json(tokenizer)
        if made is not None:
            files.write_bytes(temporary / TOKENIZER_JSON, made.encode())
            config["tokenizer_class"] = _ANY_CLASS
        elif isinstance(tokenizer.vocabulary, SentencePieceVocabulary):
            get_logger().warning(
                "warning: %s: this sentencepiece model cannot be written as tokenizer.json; the export has a copy of "
                "it, which other programs may not read, or read as other ids; put the tokenizer.json of the model's "
                "own repository into the export",
                tokenizer.place,
            )
    if (temporary / TOKENIZER_JSON).is_file():
        config.setdefault("tokenizer_class", _ANY_CLASS)
    if template is not None:
        config["chat_template"] = template
    if tokenizer is not None and config != read:
        config = {**_special_tokens(temporary, tokenizer), **config}
    is_written = before is not None or config != read
    if is_written and tokenizer is not None and pad_id not in (None, tokenizer.pad_id):
        config["pad_token"] = tokenizer.token_bytes(pad_id).decode("utf-8", errors="replace")
    if config != read:
        files.write_json(temporary / TOKENIZER_CONFIG, config)
    elif before is not None:
        files.copy_file(before, temporary / TOKENIZER_CONFIG)


def _object(path: Path) -> dict[str, Any] | None:
    """What a JSON file holds; None if that is no object."""
    try:
        found = read_json(path)
    except DataError:
        return None
    return found if isinstance(found, dict) else None


def _special_tokens(temporary: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """BOS and EOS as they are written, where the tokenizer's own files do not name them."""
    named = _object(temporary / TOKENS_MAP) or {}
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {role: tokenizer.token_bytes(i).decode() for role, i in ids.items() if i is not None and role not in named}
