"""Finds the tokenizer in a checkpoint folder by what is there.

Order: `tokenizer.model` (sentencepiece or tiktoken, which its content says), `tokenizer.json`, a single
`*.model.v*` (Mistral). A real tokenizer.model comes first because it is the file that the model was trained with,
and because conversions to tokenizer.json differ from it on leading and double spaces.
"""

import codecs
import re
from pathlib import Path

from recipe_lib.config.local_files import OTHER_TEMPLATE, TEMPLATE_IN_FOLDER, find_tokenizer
from recipe_lib.errors import DataError
from recipe_lib.reading import read_bytes
from recipe_lib.tokenizers.special_tokens import AddedToken, Settings, read_json, read_settings, read_template
from recipe_lib.tokenizers.tokenizer import Tokenizer
from recipe_lib.tokenizers.vocabulary import JsonVocabulary, SentencePieceVocabulary, TiktokenVocabulary, Vocabulary

LLAMA3_SIZE = 128_000
MAX_BYTES = 2**28  # of a tokenizer's file; the largest in use has some 35 MiB


def load_tokenizer(path: Path | str, chat_template: Path | str | None = None, *, by_key: bool = True) -> Tokenizer:
    """The tokenizer in a folder, or a tokenizer file with the files next to it.

    chat_template: a Jinja file that replaces the tokenizer's own template. by_key: what is wrong can be put right by
    the keys `tokenizer.path` and `tokenizer.chat_template`; else in the folder. Raises DataError.
    """
    file = find_tokenizer(Path(path), by_key=by_key)
    settings = read_settings(file.parent, OTHER_TEMPLATE if by_key else TEMPLATE_IN_FOLDER)
    if chat_template is not None:
        settings.chat_template = read_template(Path(chat_template))
        settings.chat_template_place = str(chat_template)
    return Tokenizer(_read_vocabulary(file, settings), settings, str(file))


def _read_vocabulary(file: Path, settings: Settings) -> Vocabulary:
    content = _read(file)
    head = content[:4096]
    if not head.strip():
        raise DataError(f"{file}: the file is empty; copy it again")
    if head.startswith(b"version https://git-lfs"):
        raise DataError(f"{file}: found a git-lfs pointer, expected the file itself; run `git lfs pull`")
    if head.lstrip()[:1] == b"{":
        return JsonVocabulary(file, content)
    if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\s", head):
        tiktoken = TiktokenVocabulary(file, content)
        _add_llama3_tokens(tiktoken, settings, file)
        return tiktoken
    _add_tokens_of_json(settings, file.parent)
    special = [content for content, token in settings.added.items() if token.special]
    return SentencePieceVocabulary(file, content, settings.legacy, special)


def _read(file: Path) -> bytes:
    try:
        return read_bytes(file, MAX_BYTES).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); copy the file again") from None


def _add_tokens_of_json(settings: Settings, folder: Path) -> None:
    """A tokenizer.json next to a sentencepiece model may be the only file that lists the added tokens."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    content = read_json(file)
    for entry in (content.get("added_tokens") or []) if isinstance(content, dict) else []:
        token = AddedToken.read(entry, str(file))
        settings.added.setdefault(token.content, token)


def _add_llama3_tokens(vocabulary: TiktokenVocabulary, settings: Settings, file: Path) -> None:
    """Without tokenizer_config.json, a vocabulary of Llama 3's size has Llama 3.1's 256 special tokens."""
    if settings.added:
        return
    if vocabulary.size != LLAMA3_SIZE:
        raise DataError(
            f"{file}: found {vocabulary.size} tiktoken pieces and no special tokens, expected Llama 3's {LLAMA3_SIZE} "
            "or a tokenizer_config.json with added_tokens_decoder next to the file"
        )
    named = {
        0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id", 7: "end_header_id",
        8: "eom_id", 9: "eot_id", 10: "python_tag",
    }  # fmt: skip
    reserved = iter(range(256))
    for offset in range(256):
        name = named.get(offset) or f"reserved_special_token_{next(reserved)}"
        settings.added[f"<|{name}|>"] = AddedToken(f"<|{name}|>", LLAMA3_SIZE + offset)
    settings.roles.setdefault("bos_token", "<|begin_of_text|>")
    settings.roles.setdefault("eos_token", "<|end_of_text|>")
    settings.stop_ids |= {LLAMA3_SIZE + 1, LLAMA3_SIZE + 8, LLAMA3_SIZE + 9}
