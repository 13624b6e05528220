"""A sentencepiece model as a tokenizer.json, which transformers reads without the packages that parse the model."""

import json
from collections.abc import Iterator
from typing import Any

import tokenizers
from sentencepiece import SentencePieceProcessor

from recipe_lib.tokenizers.special_tokens import AddedToken
from recipe_lib.tokenizers.tokenizer import Tokenizer
from recipe_lib.tokenizers.vocabulary import SentencePieceVocabulary

_SPACE = "▁"
_SAMPLES = (
    "Hello there, how are you?",
    "  two  spaces,\ta tab\n\nand lines \n of 1234567890 digits ",
    "Ünïcödé, 漢字, العربية, 🦙 and a zero\u200bwidth",
    "def f(x):\n    return {'a': [x ** 2, \"b\"]}\n",
)


def tokenizer_json(tokenizer: Tokenizer) -> str | None:
    """The file's text; None for a tokenizer that is no sentencepiece model, or is one that this cannot write.

    It is compared with the tokenizer itself on some texts, alone and after special tokens: what would differ is not
    given.
    """
    vocabulary = tokenizer.vocabulary
    if not isinstance(vocabulary, SentencePieceVocabulary):
        return None
    model = vocabulary.model
    scores = {model.id_to_piece(i): model.get_score(i) for i in range(len(model))}
    if len(scores) != len(model):
        return None
    for kind in (_byte_pairs(model, scores), _unigrams(model, scores)):
        built = tokenizers.Tokenizer(kind)
        _put_spaces(built, vocabulary)
        added = sorted(tokenizer.added_tokens, key=lambda token: token.id)
        built.add_tokens([_added(token) for token in added])
        if all(built.token_to_id(token.content) == token.id for token in added) and _same(built, tokenizer):
            if tokenizer.add_bos_by_default and tokenizer.bos_id is not None:
                bos = tokenizer.token_bytes(tokenizer.bos_id).decode()
                built.post_processor = tokenizers.processors.TemplateProcessing(
                    single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, tokenizer.bos_id)]
                )
            return json.dumps(json.loads(built.to_str()), indent=1, ensure_ascii=False) + "\n"
    return None


def _byte_pairs(model: SentencePieceProcessor, scores: dict[str, float]) -> Any:
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
    return tokenizers.models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=_has_bytes(model))


def _unigrams(model: SentencePieceProcessor, scores: dict[str, float]) -> Any:
    return tokenizers.models.Unigram(list(scores.items()), model.unk_id(), byte_fallback=_has_bytes(model))


def _has_bytes(model: SentencePieceProcessor) -> bool:
    return any(model.is_byte(i) for i in range(len(model)))


def _put_spaces(built: Any, vocabulary: SentencePieceVocabulary) -> None:
    """Where a space is put before a text: nowhere, at its start alone, or after special tokens too."""
    spaces = [tokenizers.normalizers.Replace(" ", _SPACE)]
    if vocabulary.collapses_spaces:
        spaces.insert(0, tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    stripped = [tokenizers.decoders.Strip(" ", 1, 0)] if vocabulary.eats_first_space else []
    if vocabulary.eats_space_after_special:
        built.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend(_SPACE), *spaces])
    elif vocabulary.eats_first_space:
        if vocabulary.collapses_spaces:
            built.normalizer = spaces[0]
        built.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    else:
        built.normalizer = tokenizers.normalizers.Sequence(spaces)
    replaced = tokenizers.decoders.Replace(_SPACE, " ")
    fallback, fused = tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()
    built.decoder = tokenizers.decoders.Sequence([replaced, fallback, fused, *stripped])


def _added(token: AddedToken) -> Any:
    return tokenizers.AddedToken(
        token.content, special=token.special, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
    )


def _same(built: Any, tokenizer: Tokenizer) -> bool:
    """Whether both give the same ids for the samples, and for the vocabulary's own words.

    A text alone is taken without spaces around it: models that drop them do so at the ends of a whole text only.
    """
    marks = [tokenizer.token_bytes(i).decode() for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None]
    return all(
        built.encode(text, add_special_tokens=False).ids == tokenizer.encode(text, allow_special=True)
        for sample in (*_SAMPLES, *_words(tokenizer))
        for text in (sample.strip(), *(f"{mark}{sample}{mark}{sample}" for mark in marks))
    )


def _words(tokenizer: Tokenizer) -> Iterator[str]:
    """All pieces as text, some thousand at a time."""
    texts = [tokenizer.token_bytes(i).decode(errors="ignore") for i in range(tokenizer.vocab_size)]
    words = [text for i, text in enumerate(texts) if text and not tokenizer.is_special(i) and "⁇" not in text]
    for start in range(0, len(words), 4096):
        yield "".join(words[start : start + 4096])
