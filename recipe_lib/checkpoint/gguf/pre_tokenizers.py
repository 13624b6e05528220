"""llama.cpp's name for how a byte-level tokenizer.json cuts text before it merges bytes. No torch.

llama.cpp has each way of cutting in its code, under a name that the file gives. It is found by what tokenizer.json says
itself: the patterns it cuts with, and whether a whole word of the vocabulary is taken without merging.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_lib.config.suggest import did_you_mean, show
from recipe_lib.errors import CheckpointError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    """Words with what stands before them, digits, signs, white space."""
    return _CONTRACTIONS + rf"|{_START}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, end: str) -> str:
    """The same, with a new word where a small letter is followed by a capital one."""
    cased = f"{_START}{_UPPER}*{_LOWER}+{end}|{_START}{_UPPER}+{_LOWER}*{end}"
    return rf"{cased}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


@dataclass(frozen=True)
class PreTokenizer:
    """One way of cutting. steps: patterns or kinds of steps in their order. whole_words: None: it does not matter."""

    name: str
    steps: tuple[str, ...]
    whole_words: bool | None = None
    normalizer: str | None = None


_KNOWN = (
    PreTokenizer("llama-bpe", (_words(r"\p{N}{1,3}"),), whole_words=True),
    PreTokenizer("dbrx", (_words(r"\p{N}{1,3}"),), whole_words=False),
    PreTokenizer("qwen2", (_words(r"\p{N}"),), normalizer="NFC"),
    PreTokenizer("tekken", (_cased_words(r"\p{N}", ""),), whole_words=True),
    PreTokenizer("gpt-4o", (_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
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
    """The name for a tokenizer.json. named: by the user. CheckpointError: none is known to cut as it does."""
    known = [one.name for one in _KNOWN]
    if named is not None:
        names = [*known, *_BY_NAME_ALONE]
        if named not in names:
            hint = did_you_mean(named, names) or f"; one of {', '.join(names)}"
            raise CheckpointError(f"--pre: llama.cpp has no pre-tokenizer {show(named)!r}{hint}")
        return named
    steps = _steps_of(content.get("pre_tokenizer"))
    whole_words = bool((content.get("model") or {}).get("ignore_merges"))
    normalizer = (content.get("normalizer") or {}).get("type")
    for one in _KNOWN:
        if one.steps == steps and one.whole_words in (None, whole_words) and one.normalizer == normalizer:
            return one.name
    raise CheckpointError(
        f"{where}: its pre_tokenizer is none of those known here ({', '.join(known)}), and a wrong one gives other "
        "tokens; name the one of llama.cpp that cuts text as it does with --pre"
    )


def _steps_of(pre: Any) -> tuple[str, ...] | None:
    """The steps as PreTokenizer has them; None: with one that is not among them."""
    if not isinstance(pre, Mapping):
        return None
    parts = pre.get("pretokenizers") if pre.get("type") == "Sequence" else [pre]
    steps: list[str] = []
    for part in parts or ():
        pattern = (part.get("pattern") or {}).get("Regex")
        match part.get("type"):
            case "Split" if pattern and part.get("behavior") == "Isolated" and not part.get("invert"):
                steps.append(pattern)
            case "Digits" if part.get("individual_digits"):
                steps.append("digits")
            case "ByteLevel" if not part.get("add_prefix_space"):
                steps += ["words"] if part.get("use_regex", True) else []
            case _:
                return None
    return tuple(steps)
