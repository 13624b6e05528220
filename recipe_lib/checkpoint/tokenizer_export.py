"""A tokenizer's files in an export: with the template, the special tokens and the stop tokens of
the training.
"""

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import SentencePieceProcessor

from recipe_lib import files
from recipe_lib.errors import DataError
from recipe_lib.logs import get_logger
from recipe_lib.reading import JSON_LIMIT, find_object, open_regular, read_object, suggest_remedy
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from recipe_lib.tokenizers.special_tokens import AddedToken, read_json, read_template
from recipe_lib.tokenizers.vocabulary import SentencePieceVocabulary
from recipe_lib.units import format_bytes

GENERATION = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG, TOKENIZER_JSON, TOKENS_MAP = (
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
)
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


def list_tokenizer_files(source: Path | None) -> list[Path]:
    """Return the files to copy: what a folder has of TOKENIZER_FILES, or a tokenizer file with the
    settings next to it.

    Raises DataError for one that cannot be copied, as a link that leads nowhere: without it the
    export is another one.
    """
    if source is None:
        return []
    folder = source.parent if source.is_file() else source
    names = SETTINGS_FILES if source.is_file() else (*TOKENIZER_FILES, *SETTINGS_FILES)
    found = [
        folder / name
        for name in names
        if os.path.lexists(folder / name) and folder / name != source
    ]
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
    """The tokenizer's files, with template and stop tokens that the model was trained with, where
    they differ.

    chat_template: its text or its file; None: the tokenizer keeps its own. A template stands in
    tokenizer_config.json too, where older programs look for it, and with it BOS and EOS. A
    sentencepiece model gets a tokenizer.json, without which transformers needs packages that few
    have. pad_id: named for padding in a tokenizer_config.json, so that what a tokenizer pads with
    is what the model's config.json takes for padding.
    """
    settings: dict[str, Any] = {}
    for path in copied:
        if path.name == GENERATION and stop_ids:
            settings = read_json(path)
        elif path.name != TOKENIZER_CONFIG and (
            chat_template is None or path.name not in _TEMPLATES
        ):
            files.copy_file(path, temporary / path.name)
    if stop_ids:
        files.write_json(temporary / GENERATION, settings | {"eos_token_id": sorted(stop_ids)})
    text = read_template(chat_template) if isinstance(chat_template, Path) else chat_template
    if text is not None:
        files.write_bytes(temporary / CHAT_TEMPLATE, text.encode())
    vocabulary = next((path for path in copied if path.name not in SETTINGS_FILES), None)
    before = next((path for path in copied if path.name == TOKENIZER_CONFIG), None)
    _write_settings(
        temporary,
        before,
        None if vocabulary is None else _load_if_readable(vocabulary),
        text,
        pad_id,
    )


def _load_if_readable(vocabulary: Path) -> Tokenizer | None:
    """The tokenizer; None for one that we cannot read, which is copied as it is."""
    try:
        return load_tokenizer(
            vocabulary.parent if vocabulary.name in TOKENIZER_FILES else vocabulary
        )
    except DataError:
        return None


def _write_settings(
    temporary: Path,
    before: Path | None,
    tokenizer: Tokenizer | None,
    template: str | None,
    pad_id: int | None,
) -> None:
    """tokenizer_config.json, with what transformers needs and it lacks, and tokenizer.json where
    there is none.
    """
    try:
        read: dict[str, Any] | None = {} if before is None else read_object(before)
    except (OSError, ValueError):
        read = None
    if read is None or (tokenizer is None and template is None):
        if before is not None:
            files.copy_file(before, temporary / TOKENIZER_CONFIG)
        return
    config = dict(read)
    if tokenizer is not None and not (temporary / TOKENIZER_JSON).is_file():
        made = make_tokenizer_json(tokenizer)
        if made is not None:
            files.write_bytes(temporary / TOKENIZER_JSON, made.encode())
            config["tokenizer_class"] = _ANY_CLASS
        elif isinstance(tokenizer.vocabulary, SentencePieceVocabulary):
            get_logger().warning(
                "warning: %s: this sentencepiece model cannot be written as tokenizer.json; the"
                " export has a copy of it, which other programs may not read, or read as other ids;"
                " put the tokenizer.json of the model's own repository into the export",
                tokenizer.place,
            )
    if (temporary / TOKENIZER_JSON).is_file():
        config.setdefault("tokenizer_class", _ANY_CLASS)
    if template is not None:
        config["chat_template"] = template
    if tokenizer is not None and config != read:
        # BOS and EOS as they are written, where the tokenizer's own files do not name them.
        named = find_object(temporary / TOKENS_MAP)
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        unnamed = {
            role: number for role, number in ids.items() if number is not None and role not in named
        }
        config = {
            **{
                role: tokenizer.get_token_bytes(number).decode() for role, number in unnamed.items()
            },
            **config,
        }
    is_written = before is not None or config != read
    if is_written and tokenizer is not None and pad_id is not None and pad_id != tokenizer.pad_id:
        config["pad_token"] = tokenizer.get_token_bytes(pad_id).decode("utf-8", errors="replace")
    if config != read:
        files.write_json(temporary / TOKENIZER_CONFIG, config)
    elif before is not None:
        files.copy_file(before, temporary / TOKENIZER_CONFIG)


# A sentencepiece model as a tokenizer.json, which transformers reads without the packages that
# parse the model.


_SPACE = "▁"
_SAMPLES = (
    "Hello there, how are you?",
    "  two  spaces,\ta tab\n\nand lines \n of 1234567890 digits ",
    "Ünïcödé, 漢字, العربية, 🦙 and a zero\u200bwidth",
    "def f(x):\n    return {'a': [x ** 2, \"b\"]}\n",
)


def make_tokenizer_json(tokenizer: Tokenizer) -> str | None:
    """The file's text; None for a tokenizer that is no sentencepiece model, or is one that this
    cannot write.

    It is compared with the tokenizer itself on some texts, alone and after special tokens: what
    would differ is not given.
    """
    vocabulary = tokenizer.vocabulary
    if not isinstance(vocabulary, SentencePieceVocabulary):
        return None
    model = vocabulary.model
    scores = {model.id_to_piece(i): model.get_score(i) for i in range(len(model))}
    if len(scores) != len(model):
        return None
    unigrams = tokenizers.models.Unigram(
        list(scores.items()), model.unk_id(), byte_fallback=_has_bytes(model)
    )
    for kind in (_build_byte_pairs(model, scores), unigrams):
        built = tokenizers.Tokenizer(kind)
        _set_space_rules(built, vocabulary)
        added = sorted(tokenizer.added_tokens, key=lambda token: token.id)
        built.add_tokens([_convert_added_token(token) for token in added])
        if all(built.token_to_id(token.content) == token.id for token in added) and _encodes_same(
            built, tokenizer
        ):
            if tokenizer.add_bos_by_default and tokenizer.bos_id is not None:
                bos = tokenizer.get_token_bytes(tokenizer.bos_id).decode()
                built.post_processor = tokenizers.processors.TemplateProcessing(
                    single=f"{bos}:0 $A:0",
                    pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
                    special_tokens=[(bos, tokenizer.bos_id)],
                )
            return json.dumps(json.loads(built.to_str()), indent=1, ensure_ascii=False) + "\n"
    return None


def _build_byte_pairs(model: SentencePieceProcessor, scores: dict[str, float]) -> Any:
    """The merges are what two pieces make another one, the best scored first."""
    ids = {piece: at for at, piece in enumerate(scores)}
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right], left, right))
    merges.sort(key=lambda merge: merge[:3])
    pairs = [(left, right) for *_, left, right in merges]
    unknown = model.id_to_piece(model.unk_id())
    return tokenizers.models.BPE(
        ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=_has_bytes(model)
    )


def _has_bytes(model: SentencePieceProcessor) -> bool:
    return any(model.is_byte(i) for i in range(len(model)))


def _set_space_rules(built: Any, vocabulary: SentencePieceVocabulary) -> None:
    """Where a space is put before a text: nowhere, at its start alone, or after special tokens
    too.
    """
    spaces = [tokenizers.normalizers.Replace(" ", _SPACE)]
    if vocabulary.collapses_spaces:
        spaces.insert(0, tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    stripped = [tokenizers.decoders.Strip(" ", 1, 0)] if vocabulary.eats_first_space else []
    if vocabulary.eats_space_after_special:
        built.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend(_SPACE), *spaces]
        )
    elif vocabulary.eats_first_space:
        if vocabulary.collapses_spaces:
            built.normalizer = spaces[0]
        built.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
            _SPACE, prepend_scheme="first", split=False
        )
    else:
        built.normalizer = tokenizers.normalizers.Sequence(spaces)
    replaced = tokenizers.decoders.Replace(_SPACE, " ")
    fallback, fused = tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()
    built.decoder = tokenizers.decoders.Sequence([replaced, fallback, fused, *stripped])


def _convert_added_token(token: AddedToken) -> Any:
    return tokenizers.AddedToken(
        token.content,
        special=token.special,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
    )


def _encodes_same(built: Any, tokenizer: Tokenizer) -> bool:
    """Whether both give the same ids for the samples, and for the vocabulary's own words.

    A text alone is taken without spaces around it: models that drop them do so at the ends of a
    whole text only.
    """
    marks = [
        tokenizer.get_token_bytes(i).decode()
        for i in (tokenizer.bos_id, tokenizer.eos_id)
        if i is not None
    ]
    return all(
        built.encode(text, add_special_tokens=False).ids
        == tokenizer.encode(text, allow_special=True)
        for sample in (*_SAMPLES, *_list_words(tokenizer))
        for text in (sample.strip(), *(f"{mark}{sample}{mark}{sample}" for mark in marks))
    )


def _list_words(tokenizer: Tokenizer) -> Iterator[str]:
    """All pieces as text, some thousand at a time."""
    texts = [
        tokenizer.get_token_bytes(i).decode(errors="ignore") for i in range(tokenizer.vocab_size)
    ]
    words = [
        text
        for i, text in enumerate(texts)
        if text and not tokenizer.is_special(i) and "⁇" not in text
    ]
    for start in range(0, len(words), 4096):
        yield "".join(words[start : start + 4096])
