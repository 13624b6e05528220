"""Convert a tokenizer to the vocabulary and special tokens of a GGUF file. No torch.

`gguf_adapter` calls `read_vocabulary`. A byte-level tokenizer.json is kept with its merges (kind
`gpt2`), a sentencepiece model with the scores of its pieces (kind `llama`). The former cuts text
before it merges bytes; llama.cpp has the ways of cutting (pre-tokenizers) in its code, and the file
names one (`find_pre_tokenizer`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from recipe_lib.config.suggest import did_you_mean, show
from recipe_lib.errors import CheckpointError, DataError
from recipe_lib.tokenizers.tokenizer import Tokenizer, load_tokenizer, read_json
from recipe_lib.tokenizers.vocabulary import JsonVocabulary, SentencePieceVocabulary

_PHI3 = {b"<unk>", b"<s>", b"</s>", b"<|endoftext|>"}  # by which llama.cpp knows Phi 3's vocabulary
_SAYS_PHI3 = re.compile("phi-?3", re.IGNORECASE)  # in a model's name
# Scores of added tokens and of ids that the tokenizer does not use. They are below any piece's, so
# that no merge makes these tokens.
_ADDED_SCORE = -1000.0
_UNUSED_SCORE = -10000.0
# Parts of the patterns with which known tokenizers cut text. _UPPER and _LOWER: letters that may
# stand in the capital and the small part of a word; _START: a sign before a word.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"


class PieceKind(IntEnum):
    """The format's numbers for kinds of pieces."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class GgufVocabulary:
    """A tokenizer as a GGUF file has it."""

    # `gpt2` (byte-level merges) or `llama` (sentencepiece).
    model: str
    # Name of the way in which text is cut, see `find_pre_tokenizer`.
    pre: str
    # Piece of each id, in UTF-8.
    tokens: list[bytes]
    # PieceKind of each id.
    kinds: list[int]
    # Score of each id, of `llama` alone.
    scores: list[float] | None = None
    # Two pieces with a space between, the first merge first; of `gpt2` alone.
    merges: list[str] | None = None
    # Role, such as `bos` -> id.
    ids: dict[str, int] = field(default_factory=dict)
    # True: texts get BOS at their start.
    add_bos: bool = False
    # True: texts get a space at their start; None: the file does not say.
    add_space: bool | None = None
    # Chat template; None: there is none.
    template: str | None = None
    # True: special tokens drop white space after them.
    strips: bool = False
    # What llama.cpp does otherwise than the tokenizer, a line each.
    notes: list[str] = field(default_factory=list)

    def choose_name(self, name: str) -> str:
        """Return the name that a model gets in the file.

        llama.cpp goes by it: with Phi-3 in it, special tokens drop white space after them, and a
        vocabulary without Phi-3's pieces is not loaded.
        """
        if not (self.strips and _PHI3.issubset(self.tokens)):
            return _SAYS_PHI3.sub("Phi 3", name)
        return name if _SAYS_PHI3.search(name) else f"{name} (Phi-3)"


def read_vocabulary(folder: Path, size: int, pre: str | None = None) -> GgufVocabulary:
    """Return the tokenizer of a model folder as a GGUF file has it.

    size: rows of the model's embedding, of which each gets a piece. pre: llama.cpp's name of the
    pre-tokenizer, as the user gives it; None: it is looked up. Raises CheckpointError if there is
    no tokenizer, or one that the format cannot hold.
    """
    try:
        tokenizer = load_tokenizer(folder, by_key=False)
        if not isinstance(tokenizer.vocabulary, (SentencePieceVocabulary, JsonVocabulary)):
            # Llama 3's repository has both; its tiktoken vocabulary has no merges.
            json_file = folder / "tokenizer.json"
            if json_file.is_file():
                tokenizer = load_tokenizer(json_file, by_key=False)
    except DataError as error:
        raise CheckpointError(*error.args) from error
    if isinstance(tokenizer.vocabulary, SentencePieceVocabulary):
        vocabulary = _convert_sentencepiece(tokenizer, tokenizer.vocabulary, size)
    elif isinstance(tokenizer.vocabulary, JsonVocabulary):
        vocabulary = _convert_json(tokenizer, size=size, pre=pre)
    else:
        raise CheckpointError(
            f"{tokenizer.place}: is a tiktoken vocabulary, whose merges a GGUF file has and it has"
            " not; put the tokenizer.json of the model's own repository next to it"
        )
    if pre is not None and vocabulary.model != "gpt2":
        raise CheckpointError(
            f"--pre: {tokenizer.place} is a sentencepiece model, which cuts no text; leave it out"
        )
    _add_special_tokens(vocabulary, tokenizer, size)
    return vocabulary


def _add_special_tokens(vocabulary: GgufVocabulary, tokenizer: Tokenizer, size: int) -> None:
    """Set the added tokens, the ids of tokens with a role, and the chat template.

    size: rows of the model's embedding.
    """
    tokens = [token for token in tokenizer.added_tokens if token.id < size]
    num_left_out = len(tokenizer.added_tokens) - len(tokens)
    for token in tokens:
        if vocabulary.kinds[token.id] == PieceKind.UNKNOWN:
            continue  # llama.cpp looks for it by its kind
        text = token.content
        if not token.special and vocabulary.model == "llama":
            text = text.replace("▁", " ")  # matched in the text as it is
        vocabulary.kinds[token.id] = PieceKind.CONTROL if token.special else PieceKind.USER_DEFINED
        vocabulary.tokens[token.id] = text.encode()
        if vocabulary.scores is not None:
            vocabulary.scores[token.id] = _ADDED_SCORE
    if num_left_out:
        vocabulary.notes.append(
            f"{num_left_out} tokens of the tokenizer have no row in the model, and are left out"
        )
    roles = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "padding": tokenizer.pad_id}
    turn_end = tokenizer.turn_end.token
    ids = {token.content: token.id for token in tokenizer.added_tokens}
    if turn_end is not None and ids.get(turn_end) != tokenizer.eos_id:
        roles["eot"] = ids.get(turn_end)
    if PieceKind.UNKNOWN in vocabulary.kinds:
        roles["unknown"] = vocabulary.kinds.index(PieceKind.UNKNOWN)
    vocabulary.ids = {
        role: token for role, token in roles.items() if token is not None and token < size
    }
    vocabulary.add_bos = tokenizer.add_bos_by_default
    vocabulary.template = tokenizer.chat_template
    vocabulary.strips = any(token.special and token.rstrip for token in tokenizer.added_tokens)
    if vocabulary.strips and not _PHI3.issubset(vocabulary.tokens):
        vocabulary.notes.append(
            "llama.cpp keeps white space after special tokens, which this tokenizer drops"
        )


def _make_empty(model: str, pre: str, size: int) -> GgufVocabulary:
    """Return a vocabulary to be filled: `size` unused ids, with pieces that no text has."""
    return GgufVocabulary(
        model,
        pre,
        tokens=[f"[PAD{token}]".encode() for token in range(size)],
        kinds=[PieceKind.UNUSED] * size,
    )


# Return the vocabulary of a sentencepiece model, without added tokens and roles.
def _convert_sentencepiece(
    tokenizer: Tokenizer, vocabulary: SentencePieceVocabulary, size: int
) -> GgufVocabulary:
    model = vocabulary.model
    converted = _make_empty("llama", "default", size)
    converted.scores = [_UNUSED_SCORE] * size
    is_kind = {
        PieceKind.UNKNOWN: model.is_unknown,
        PieceKind.CONTROL: model.is_control,
        PieceKind.UNUSED: model.is_unused,
        PieceKind.BYTE: model.is_byte,
    }
    for token in range(min(size, len(model))):
        converted.tokens[token] = model.id_to_piece(token).encode()
        converted.scores[token] = model.get_score(token)
        kinds = (kind for kind, test in is_kind.items() if test(token))
        converted.kinds[token] = next(kinds, PieceKind.NORMAL)
    normal_scores = [
        score
        for score, kind in zip(converted.scores, converted.kinds, strict=True)
        if kind == PieceKind.NORMAL
    ]
    # Scores of byte pairs are ranks, those of unigrams logarithms of probabilities.
    if any(score != int(score) for score in normal_scores):
        raise CheckpointError(
            f"{tokenizer.place}: is a sentencepiece model of the kind unigram, which llama.cpp does"
            " not merge as it does; expected one of byte pairs"
        )
    _set_space_rules(converted, tokenizer)
    return converted


# Set where spaces are put into a text, and note where llama.cpp treats spaces otherwise.
def _set_space_rules(converted: GgufVocabulary, tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.vocabulary
    converted.add_space = vocabulary.eats_first_space
    if isinstance(vocabulary, SentencePieceVocabulary) and vocabulary.collapses_spaces:
        converted.notes.append(
            "llama.cpp keeps several spaces in a row, which this tokenizer makes one"
        )
    if vocabulary.eats_first_space and not vocabulary.eats_space_after_special:
        converted.notes.append(
            "llama.cpp puts a space before text after special tokens too, which this tokenizer does"
            " at the start alone"
        )


# Return the vocabulary of a tokenizer.json, without added tokens and roles.
def _convert_json(tokenizer: Tokenizer, *, size: int, pre: str | None) -> GgufVocabulary:
    path = Path(tokenizer.place)
    content = read_json(path)
    model = content.get("model") or {}
    if model.get("type", "BPE") != "BPE":
        raise CheckpointError(
            f"{path}: found a model of type {model.get('type')!r}, which llama.cpp does not merge"
            " as it does; expected BPE"
        )
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []
    ]
    if model.get("byte_fallback"):  # made of a sentencepiece model
        converted = _make_empty("llama", "default", size)
        _set_space_rules(converted, tokenizer)
        converted.scores = [_UNUSED_SCORE] * size
        # Piece -> index of the first merge that makes it.
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", "", 1), rank)
        for piece, token in model["vocab"].items():
            if token < size:
                is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
                converted.kinds[token] = PieceKind.BYTE if is_byte else PieceKind.NORMAL
                converted.tokens[token] = piece.encode()
                # llama.cpp merges the best score first; pieces that no merge makes come last.
                converted.scores[token] = -float(ranks.get(piece, len(merges) + token))
        unknown = model["vocab"].get(model.get("unk_token"))
        if unknown is not None and unknown < size:
            converted.kinds[unknown] = PieceKind.UNKNOWN
        return converted
    converted = _make_empty("gpt2", find_pre_tokenizer(content, path, pre), size)
    converted.merges = merges
    if content.get("normalizer"):
        converted.notes.append(
            f"llama.cpp does not normalize text ({content['normalizer'].get('type')}), as this"
            " tokenizer does: letters that are written as several signs are other tokens there"
        )
    for piece, token in model["vocab"].items():
        if token < size:
            converted.tokens[token] = piece.encode()
            converted.kinds[token] = PieceKind.NORMAL
    return converted


def _make_word_pattern(digits: str) -> str:
    """Return the pattern that cuts text into words (with a sign before), digits, signs, spaces.

    digits: pattern of digits that stay together.
    """
    return _CONTRACTIONS + rf"|{_START}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _make_cased_word_pattern(digits: str, end: str) -> str:
    """Return the pattern that also begins a word where a small letter is followed by a capital.

    digits: pattern of digits that stay together. end: pattern of a word's ending; empty: none.
    """
    cased = f"{_START}{_UPPER}*{_LOWER}+{end}|{_START}{_UPPER}+{_LOWER}*{end}"
    return rf"{cased}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


@dataclass(frozen=True)
class PreTokenizer:
    """One way of cutting text that llama.cpp has."""

    # llama.cpp's name of it.
    name: str
    # Patterns, or kinds of steps (`digits`, `words`), in their order.
    steps: tuple[str, ...]
    # True: words of the vocabulary are taken without merging; None: either way.
    whole_words: bool | None = None
    # Type of the normalizer in tokenizer.json; None: it must have none.
    normalizer: str | None = None


# Those that are found by the contents of tokenizer.json.
_KNOWN = (
    PreTokenizer("llama-bpe", (_make_word_pattern(r"\p{N}{1,3}"),), whole_words=True),
    PreTokenizer("dbrx", (_make_word_pattern(r"\p{N}{1,3}"),), whole_words=False),
    PreTokenizer("qwen2", (_make_word_pattern(r"\p{N}"),), normalizer="NFC"),
    PreTokenizer("tekken", (_make_cased_word_pattern(r"\p{N}", ""),), whole_words=True),
    PreTokenizer("gpt-4o", (_make_cased_word_pattern(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
    PreTokenizer("smollm", ("digits", "words")),
    PreTokenizer("gpt-2", ("words",)),
)
# Others that llama.cpp has and that --pre may name.
# fmt: off
_BY_NAME_ALONE = (
    "default", "deepseek-llm", "deepseek-coder", "deepseek-v3", "deepseek-r1-qwen", "falcon",
    "falcon3", "starcoder", "refact", "command-r", "stablelm2", "olmo", "smaug-bpe", "codeshell",
    "exaone", "exaone4", "minerva-7b", "llama4", "chatglm-bpe", "glm4", "megrez", "hunyuan",
    "kimi-k2", "granite-docling", "lfm2", "seed-coder",
)
# fmt: on


def find_pre_tokenizer(content: Mapping[str, Any], where: Path, named: str | None = None) -> str:
    """Return llama.cpp's name of the way in which a tokenizer.json cuts text.

    It is found by the patterns that the file cuts with, its normalizer, and whether words of the
    vocabulary are taken without merging.

    content: of the file. named: the name that the user gives; None: none. Raises CheckpointError
    for a given name that llama.cpp lacks, and if no way is known to cut as the file does.
    """
    known_names = [known.name for known in _KNOWN]
    if named is not None:
        names = [*known_names, *_BY_NAME_ALONE]
        if named not in names:
            hint = did_you_mean(named, names) or f"; one of {', '.join(names)}"
            raise CheckpointError(f"--pre: llama.cpp has no pre-tokenizer {show(named)!r}{hint}")
        return named
    steps = _list_steps(content.get("pre_tokenizer"))
    whole_words = bool((content.get("model") or {}).get("ignore_merges"))
    normalizer = (content.get("normalizer") or {}).get("type")
    for known in _KNOWN:
        has_same_words = known.whole_words in (None, whole_words)
        if known.steps == steps and has_same_words and known.normalizer == normalizer:
            return known.name
    raise CheckpointError(
        f"{where}: its pre_tokenizer is none of those known here ({', '.join(known_names)}), and a"
        " wrong one gives other tokens; name the one of llama.cpp that cuts text as it does with"
        " --pre"
    )


def _list_steps(pre: Any) -> tuple[str, ...] | None:
    """Return the steps as PreTokenizer has them; None if one of them is of no known kind.

    pre: the value of `pre_tokenizer` in tokenizer.json.
    """
    if not isinstance(pre, Mapping):
        return None
    parts = pre.get("pretokenizers") if pre.get("type") == "Sequence" else [pre]
    steps: list[str] = []
    for part in parts or ():
        pattern = (part.get("pattern") or {}).get("Regex")
        match part.get("type"):
            case "Split" if (
                pattern and part.get("behavior") == "Isolated" and not part.get("invert")
            ):
                steps.append(pattern)
            case "Digits" if part.get("individual_digits"):
                steps.append("digits")
            case "ByteLevel" if not part.get("add_prefix_space"):
                steps += ["words"] if part.get("use_regex", True) else []
            case _:
                return None
    return tuple(steps)
