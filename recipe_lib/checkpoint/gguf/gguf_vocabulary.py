"""A tokenizer's pieces and special tokens as GGUF files have them. No torch.

A byte-level tokenizer.json is kept with its merges (`gpt2`), a sentencepiece model with the scores
of its pieces (`llama`), which stand in its own file or follow from the order of the merges in a
tokenizer.json made of it.

llama.cpp has each way in which a byte-level tokenizer.json cuts text before it merges bytes in its
code, under a name that the file gives. It is found by what tokenizer.json says itself: the patterns
it cuts with, and whether a whole word of the vocabulary is taken without merging.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from recipe_lib.config.suggest import did_you_mean, show
from recipe_lib.errors import CheckpointError, DataError
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from recipe_lib.tokenizers.special_tokens import read_json
from recipe_lib.tokenizers.vocabulary import JsonVocabulary, SentencePieceVocabulary

_PHI3 = {b"<unk>", b"<s>", b"</s>", b"<|endoftext|>"}
_SAYS_PHI3 = re.compile("phi-?3", re.IGNORECASE)
_ADDED_SCORE, _UNUSED_SCORE = -1000.0, -10000.0  # below any piece's: they are never made of others
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
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
    """What a file says of its tokenizer.

    model: `gpt2` (byte-level merges) or `llama` (sentencepiece). pre: how text is cut, see
    `find_pre_tokenizer`. tokens, kinds: of each id. scores: of `llama`; merges: of `gpt2`. ids: a
    role, such as `bos`, -> id. strips: special tokens drop white space after them. notes: what
    differs from the tokenizer, a line each.
    """

    model: str
    pre: str
    tokens: list[bytes]
    kinds: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    ids: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_space: bool | None = None
    template: str | None = None
    strips: bool = False
    notes: list[str] = field(default_factory=list)

    def choose_name(self, name: str) -> str:
        """The model's name in the file. llama.cpp goes by it: with Phi-3 in it, special tokens drop
        white space after them, and a vocabulary without Phi-3's is not loaded.
        """
        if not (self.strips and _PHI3.issubset(self.tokens)):
            return _SAYS_PHI3.sub("Phi 3", name)
        return name if _SAYS_PHI3.search(name) else f"{name} (Phi-3)"


def read_vocabulary(folder: Path, size: int, pre: str | None = None) -> GgufVocabulary:
    """The tokenizer of a model folder. size: rows of the model's embedding, of which each gets a
    piece.

    pre: llama.cpp's name of the pre-tokenizer, where it is not known. CheckpointError: no
    tokenizer, or one that the format has no place for.
    """
    try:
        tokenizer = load_tokenizer(folder, by_key=False)
        if not isinstance(tokenizer.vocabulary, (SentencePieceVocabulary, JsonVocabulary)):
            other = folder / "tokenizer.json"  # next to the tiktoken vocabulary of Llama 3
            tokenizer = load_tokenizer(other, by_key=False) if other.is_file() else tokenizer
    except DataError as error:
        raise CheckpointError(*error.args) from error
    if isinstance(tokenizer.vocabulary, SentencePieceVocabulary):
        found = _convert_sentencepiece(tokenizer, tokenizer.vocabulary, size)
    elif isinstance(tokenizer.vocabulary, JsonVocabulary):
        content = read_json(Path(tokenizer.place))
        found = _convert_json(tokenizer, content, size, pre)
    else:
        raise CheckpointError(
            f"{tokenizer.place}: is a tiktoken vocabulary, whose merges a GGUF file has and it has"
            " not; put the tokenizer.json of the model's own repository next to it"
        )
    if pre is not None and found.model != "gpt2":
        raise CheckpointError(
            f"--pre: {tokenizer.place} is a sentencepiece model, which cuts no text; leave it out"
        )
    _add_special_tokens(found, tokenizer, size)
    return found


def _add_special_tokens(found: GgufVocabulary, tokenizer: Tokenizer, size: int) -> None:
    """Added tokens, the ids of those with a role, and the chat template."""
    beyond = 0
    for token in tokenizer.added_tokens:
        if token.id >= size:
            beyond += 1
            continue
        kind = PieceKind.CONTROL if token.special else PieceKind.USER_DEFINED
        if found.kinds[token.id] == PieceKind.UNKNOWN:
            continue
        found.kinds[token.id] = kind
        text = (
            token.content
            if token.special or found.model == "gpt2"
            else token.content.replace("▁", " ")
        )
        found.tokens[token.id] = text.encode()
        if found.scores is not None:
            found.scores[token.id] = _ADDED_SCORE
    if beyond:
        found.notes.append(
            f"{beyond} tokens of the tokenizer have no row in the model, and are left out"
        )
    roles = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "padding": tokenizer.pad_id}
    end = tokenizer.turn_end.token
    stops = {token.content: token.id for token in tokenizer.added_tokens}
    if end is not None and stops.get(end) != tokenizer.eos_id:
        roles["eot"] = stops.get(end)
    unknown = next((at for at, kind in enumerate(found.kinds) if kind == PieceKind.UNKNOWN), None)
    if unknown is not None:
        roles["unknown"] = unknown
    found.ids = {role: token for role, token in roles.items() if token is not None and token < size}
    found.add_bos = tokenizer.add_bos_by_default
    found.template = tokenizer.chat_template
    found.strips = any(token.special and token.rstrip for token in tokenizer.added_tokens)
    if found.strips and not _PHI3.issubset(found.tokens):
        found.notes.append(
            "llama.cpp keeps white space after special tokens, which this tokenizer drops"
        )


def _make_empty(model: str, pre: str, size: int) -> GgufVocabulary:
    """Ids that no piece has are written as unused ones of a name that no text has."""
    tokens = [f"[PAD{at}]".encode() for at in range(size)]
    return GgufVocabulary(model, pre, tokens, [PieceKind.UNUSED] * size)


def _convert_sentencepiece(
    tokenizer: Tokenizer, vocabulary: SentencePieceVocabulary, size: int
) -> GgufVocabulary:
    model, found = vocabulary.model, _make_empty("llama", "default", size)
    found.scores = [_UNUSED_SCORE] * size
    kinds = {
        PieceKind.UNKNOWN: model.is_unknown,
        PieceKind.CONTROL: model.is_control,
        PieceKind.UNUSED: model.is_unused,
        PieceKind.BYTE: model.is_byte,
    }
    pieces = min(size, len(model))
    for at in range(pieces):
        found.tokens[at] = model.id_to_piece(at).encode()
        found.scores[at] = model.get_score(at)
        found.kinds[at] = next((kind for kind, test in kinds.items() if test(at)), PieceKind.NORMAL)
    normal = [found.scores[at] for at in range(pieces) if found.kinds[at] == PieceKind.NORMAL]
    if any(score != int(score) for score in normal):
        raise CheckpointError(
            f"{tokenizer.place}: is a sentencepiece model of the kind unigram, which llama.cpp does"
            " not merge as it does; expected one of byte pairs"
        )
    _set_space_rules(found, tokenizer)
    return found


def _set_space_rules(found: GgufVocabulary, tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.vocabulary
    found.add_space = vocabulary.eats_first_space
    if isinstance(vocabulary, SentencePieceVocabulary) and vocabulary.collapses_spaces:
        found.notes.append(
            "llama.cpp keeps several spaces in a row, which this tokenizer makes one"
        )
    if vocabulary.eats_first_space and not vocabulary.eats_space_after_special:
        found.notes.append(
            "llama.cpp puts a space before text after special tokens too, which this tokenizer does"
            " at the start alone"
        )


def _convert_json(
    tokenizer: Tokenizer, content: dict[str, Any], size: int, pre: str | None
) -> GgufVocabulary:
    place, model = Path(tokenizer.place), content.get("model") or {}
    if model.get("type", "BPE") != "BPE":
        raise CheckpointError(
            f"{place}: found a model of type {model.get('type')!r}, which llama.cpp does not merge"
            " as it does; expected BPE"
        )
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []
    ]
    if model.get("byte_fallback"):
        found = _make_empty("llama", "default", size)
        _set_space_rules(found, tokenizer)
        found.scores = [_UNUSED_SCORE] * size
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", "", 1), rank)
        for piece, at in model["vocab"].items():
            if at < size:
                is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
                found.kinds[at] = PieceKind.BYTE if is_byte else PieceKind.NORMAL
                found.tokens[at] = piece.encode()
                found.scores[at] = -float(ranks.get(piece, len(merges) + at))
        unknown = model["vocab"].get(model.get("unk_token"))
        if unknown is not None and unknown < size:
            found.kinds[unknown] = PieceKind.UNKNOWN
        return found
    found = _make_empty("gpt2", find_pre_tokenizer(content, place, pre), size)
    found.merges = merges
    if content.get("normalizer"):
        found.notes.append(
            f"llama.cpp does not normalize text ({content['normalizer'].get('type')}), as this"
            " tokenizer does: letters that are written as several signs are other tokens there"
        )
    for piece, at in model["vocab"].items():
        if at < size:
            found.tokens[at], found.kinds[at] = piece.encode(), PieceKind.NORMAL
    return found


def _make_word_pattern(digits: str) -> str:
    """Words with what stands before them, digits, signs, white space."""
    return _CONTRACTIONS + rf"|{_START}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _make_cased_word_pattern(digits: str, end: str) -> str:
    """The same, with a new word where a small letter is followed by a capital one."""
    cased = f"{_START}{_UPPER}*{_LOWER}+{end}|{_START}{_UPPER}+{_LOWER}*{end}"
    return rf"{cased}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


@dataclass(frozen=True)
class PreTokenizer:
    """One way of cutting. steps: patterns or kinds of steps in their order. whole_words: None: it
    does not matter.
    """

    name: str
    steps: tuple[str, ...]
    whole_words: bool | None = None
    normalizer: str | None = None


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
_BY_NAME_ALONE = (
    "default", "deepseek-llm", "deepseek-coder", "deepseek-v3", "deepseek-r1-qwen", "falcon", "falcon3", "starcoder",
    "refact", "command-r", "stablelm2", "olmo", "smaug-bpe", "codeshell", "exaone", "exaone4", "minerva-7b", "llama4",
    "chatglm-bpe", "glm4", "megrez", "hunyuan", "kimi-k2", "granite-docling", "lfm2", "seed-coder",
)  # fmt: skip


def find_pre_tokenizer(content: Mapping[str, Any], where: Path, named: str | None = None) -> str:
    """The name for a tokenizer.json. named: by the user. CheckpointError: none is known to cut as
    it does.
    """
    known = [one.name for one in _KNOWN]
    if named is not None:
        names = [*known, *_BY_NAME_ALONE]
        if named not in names:
            hint = did_you_mean(named, names) or f"; one of {', '.join(names)}"
            raise CheckpointError(f"--pre: llama.cpp has no pre-tokenizer {show(named)!r}{hint}")
        return named
    steps = _list_steps(content.get("pre_tokenizer"))
    whole_words = bool((content.get("model") or {}).get("ignore_merges"))
    normalizer = (content.get("normalizer") or {}).get("type")
    for one in _KNOWN:
        if (
            one.steps == steps
            and one.whole_words in (None, whole_words)
            and one.normalizer == normalizer
        ):
            return one.name
    raise CheckpointError(
        f"{where}: its pre_tokenizer is none of those known here ({', '.join(known)}), and a wrong"
        " one gives other tokens; name the one of llama.cpp that cuts text as it does with --pre"
    )


def _list_steps(pre: Any) -> tuple[str, ...] | None:
    """The steps as PreTokenizer has them; None: with one that is not among them."""
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
