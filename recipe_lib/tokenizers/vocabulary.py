"""The three kinds of vocabulary behind one class: sentencepiece, tiktoken, tokenizer.json.

A vocabulary turns ordinary text into ids and an id into bytes. It knows nothing of chat, BOS or
control tokens: no text can produce one here. What all kinds share (special tokens, BOS, decoding)
is in `tokenizer.py`.
"""

import base64
import binascii
import copy
import itertools
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers
from sentencepiece import SentencePieceProcessor

from recipe_lib.errors import DataError, get_first_line
from recipe_lib.reading import parse_json
from recipe_lib.tokenizers.special_tokens import MAX_VOCABULARY, AddedToken


class TextPosition(Enum):
    """Where a piece of ordinary text stands; some vocabularies put a space before the first word of
    a text.
    """

    START = "start of the text"
    AFTER_SPECIAL = "right after a special token"
    INSIDE = "goes on from other text"


class Vocabulary(ABC):
    """Turns ordinary text into ids, and an id into the bytes it stands for."""

    size: int  # ids without the added ones
    added: tuple[AddedToken, ...] = ()  # tokens that the file itself declares as added
    matches_added = False  # encode() finds added tokens that are not special by itself
    eats_first_space = False  # encode() begins a text with a space that is not in it
    eats_space_after_special = False  # and also after a special token
    bos_id: int | None = None  # what the file itself says
    eos_id: int | None = None
    _bytes: list[bytes]  # what each id stands for

    @abstractmethod
    def encode(self, text: str, place: TextPosition) -> list[int]:
        """Return the ids of a piece of ordinary text."""

    @abstractmethod
    def find(self, piece: str) -> int | None:
        """Return the id of a token as the file spells it; None: there is none."""

    def get_token_bytes(self, token: int) -> bytes:
        """Return what an id stands for; part of a character for some."""
        return self._bytes[token]

    def puts_bos_first(self, bos_id: int) -> bool:
        """Return whether this kind of tokenizer puts BOS before a text by default, as models are
        trained with it.
        """
        return True


class SentencePieceVocabulary(Vocabulary):
    """A sentencepiece model (protobuf), encoded by the sentencepiece library."""

    # Appended to the protobuf, where a later field wins: normalizer_spec {add_dummy_prefix: false,
    # remove_extra_whitespaces: false}. Text that goes on from other text must not get a leading
    # space.
    NO_PREFIX = b"\x1a\x04\x18\x00\x20\x00"

    def __init__(self, path: Path, model: bytes, legacy: bool, special: Iterable[str]) -> None:
        """path: named in errors. model: what the file holds. legacy: text after a special token
        begins like a new text (the Llama-2 convention of Hugging Face).

        special: strings that ordinary text must not turn into one token, even where the model
        would.
        """
        try:
            self._first = SentencePieceProcessor(model_proto=model)
            self._inner = SentencePieceProcessor(model_proto=model + self.NO_PREFIX)
        except RuntimeError as error:
            said = get_first_line(error, 160)
            raise DataError(
                f"{path}: found no sentencepiece model ({said}); copy the file again"
            ) from None
        self.size = len(self._first)
        self.bos_id, self.eos_id = (
            i if i >= 0 else None for i in (self._first.bos_id(), self._first.eos_id())
        )
        control = [i for i in range(self.size) if self._first.is_control(i)]
        self.added = tuple(AddedToken(self._first.id_to_piece(i), i) for i in control)
        pieces = self._first.encode("a", out_type=str)
        self.eats_first_space = bool(pieces) and pieces[0].startswith("▁")
        self.eats_space_after_special = self.eats_first_space and legacy
        self.collapses_spaces = self._first.encode("a  a") == self._first.encode("a a")
        greedy = [
            s for s in special if len(s) > 1 and self._first.piece_to_id(s) in self._inner.encode(s)
        ]
        self._breakable = compile_alternation(greedy)
        self._bytes = [self._decode_piece(i) for i in range(self.size)]

    @property
    def model(self) -> SentencePieceProcessor:
        """The model as the file has it."""
        return self._first

    def encode(self, text: str, place: TextPosition) -> list[int]:
        """Ids of a piece of ordinary text."""
        ids: list[int] = []
        for part in _break_matches(text, self._breakable):
            if place is TextPosition.START or (
                place is TextPosition.AFTER_SPECIAL and self.eats_space_after_special
            ):
                ids += self._first.encode(part)
            else:
                ids += self._inner.encode(
                    re.sub(" {2,}", " ", part) if self.collapses_spaces else part
                )
            place = TextPosition.INSIDE
        return ids

    def find(self, piece: str) -> int | None:
        """The id of a piece; None: there is none."""
        token = self._first.piece_to_id(piece)
        return token if self._first.id_to_piece(token) == piece else None

    def _decode_piece(self, token: int) -> bytes:
        piece = self._first.id_to_piece(token)
        if self._first.is_byte(token):
            return bytes([int(piece[3:5], 16)])
        if self._first.is_unknown(token):
            return " ⁇ ".encode()
        return piece.replace("▁", " ").encode()


class TiktokenVocabulary(Vocabulary):
    """Base64 lines of a byte-level BPE, encoded by the tiktoken library with Llama 3's pattern."""

    LLAMA3_PATTERN = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    # The library gives up on white space that is longer than a million characters.
    LONG_SPACE = re.compile(r"\s{500000}")

    def __init__(self, path: Path, content: bytes) -> None:
        """path: named in errors."""
        ranks = _read_ranks(path, content)
        self.size = len(ranks)
        self._ids = ranks
        self._bytes = sorted(ranks, key=ranks.__getitem__)
        self._encoding = tiktoken.Encoding(
            "llama3", pat_str=self.LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )

    def encode(self, text: str, place: TextPosition) -> list[int]:
        """Ids of a piece of ordinary text."""
        cuts = [0, *(match.end() for match in self.LONG_SPACE.finditer(text)), len(text)]
        return [
            i
            for a, b in zip(cuts, cuts[1:], strict=False)
            for i in self._encoding.encode_ordinary(text[a:b])
        ]

    def find(self, piece: str) -> int | None:
        """The id of a piece; None: there is none."""
        return self._ids.get(piece.encode())


class JsonVocabulary(Vocabulary):
    """A tokenizer.json, encoded by the tokenizers library."""

    matches_added = True

    def __init__(self, path: Path, file: bytes) -> None:
        """path: named in errors. file: what it holds."""
        os.environ.setdefault(
            "TOKENIZERS_PARALLELISM", "false"
        )  # texts come one by one: threads of a batch would wait
        self._path = path
        text = file.decode("utf-8", errors="replace")
        try:
            content = parse_json(text)
            self._growth = read_growth(path, content)
            with _catch_panics(path):
                self._first = _build_tokenizer(text)
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001  (the library raises nothing narrower)
            raise DataError(
                f"{path}: found no tokenizer ({get_first_line(error, 160)}); copy the file again"
            ) from None
        self.added = tuple(
            AddedToken.read(entry, str(path)) for entry in content.get("added_tokens") or []
        )
        self._after_special = self._build_variant(content, keep_always=True)
        self._variants = {
            TextPosition.START: self._first,
            TextPosition.AFTER_SPECIAL: self._after_special,
            TextPosition.INSIDE: self._build_variant(content, keep_always=False),
        }
        pieces = content["model"]["vocab"]
        self.size = (
            max(pieces.values(), default=-1) + 1 if isinstance(pieces, dict) else len(pieces)
        )
        if self.size > MAX_VOCABULARY:
            raise DataError(
                f"{path}: found the id {self.size - 1}, expected ids below {MAX_VOCABULARY}; copy"
                " the file again"
            )
        self.eats_first_space = any(
            (
                part.get("type") == "Strip"
                and part.get("content") == " "
                and part.get("start", 0) > 0
            )
            or (part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never")
            for part in _list_decoders(content.get("decoder"))
        )
        self.eats_space_after_special = self.eats_first_space and self._after_special is self._first
        with _catch_panics(path):
            self._puts_first = self._first.encode("", add_special_tokens=True).ids[:1]
        self._to_bytes = _make_piece_decoder(content.get("decoder"))

    def encode(self, text: str, place: TextPosition) -> list[int]:
        """Ids of a piece of ordinary text; added tokens that are not special are found in it."""
        chosen = self._variants[place]
        with _catch_panics(self._path):
            check_length(self._path, chosen, text, self._growth)
            return chosen.encode_batch_fast([text], add_special_tokens=False)[
                0
            ].ids  # without offsets: a sixth faster

    def get_token_bytes(self, token: int) -> bytes:
        """What an id stands for; part of a character for some, nothing for ids that are not
        used.
        """
        piece = self._first.id_to_token(token)
        return b"" if piece is None else self._to_bytes(piece)

    def find(self, piece: str) -> int | None:
        """The id of a token as the file spells it; None: there is none."""
        return self._first.token_to_id(piece)

    def puts_bos_first(self, bos_id: int) -> bool:
        """Whether the file's own post-processor puts BOS before a text."""
        return self._puts_first == [bos_id]

    def _build_variant(self, content: dict[str, Any], keep_always: bool) -> Any:
        """The same tokenizer without the space that it puts before a text; `keep_always`: only
        where it is put once.
        """
        parts = {name: content.get(name) for name in ("normalizer", "pre_tokenizer")}
        changed = content | copy.deepcopy(parts)
        if not _drop_prefix(changed, keep_always):
            return self._first
        return _build_tokenizer(json.dumps(changed))


def _build_tokenizer(text: str) -> Any:
    """Return the tokenizer of a tokenizer.json, for texts as they are."""
    built = tokenizers.Tokenizer.from_str(text)
    built.no_truncation()
    built.no_padding()
    built.encode_special_tokens = True  # special tokens in ordinary text stay text
    return built


def _drop_prefix(content: dict[str, Any], keep_always: bool) -> bool:
    """Takes the leading space out of a tokenizer.json in place; true if there was one."""
    found = False
    for section, kind in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        outer = content.get(section) or {}
        parts = outer.get(kind) if outer.get("type") == "Sequence" else [outer]
        for part in list(parts or []):
            once = part.get("prepend_scheme") == "first"
            always = (
                part.get("type") == "Prepend"
                or part.get("add_prefix_space")
                or "prepend_scheme" in part
            )
            if not (once or (always and not keep_always)):
                continue
            if part.get("type") == "Prepend" and parts is not None and part is not outer:
                parts.remove(part)
            elif part.get("type") == "Prepend":
                content[section] = None
            elif part.get("prepend_scheme") == "never":
                continue
            elif "prepend_scheme" in part:
                part["prepend_scheme"] = "never"
            else:
                part["add_prefix_space"] = False
            found = True
    return found


def _list_decoders(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not decoder:
        return []
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]


def _make_piece_decoder(decoder: dict[str, Any] | None) -> Any:
    """A function from a piece as the file spells it to the bytes it stands for."""
    kinds = {part.get("type") for part in _list_decoders(decoder)}
    if "ByteLevel" in kinds:
        table = _build_byte_level_table()
        return lambda piece: (
            bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
        )
    replaced = [
        part.get("pattern") or {}
        for part in _list_decoders(decoder)
        if part.get("type") == "Replace"
    ]
    spaces = "Metaspace" in kinds or any(pattern.get("String") == "▁" for pattern in replaced)
    by_byte = "ByteFallback" in kinds

    def to_bytes(piece: str) -> bytes:
        if by_byte and re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return (piece.replace("▁", " ") if spaces else piece).encode()

    return to_bytes


def _build_byte_level_table() -> dict[str, int]:
    """GPT-2's printable letter for each byte, inverted: bytes that print stand for themselves,
    others from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _read_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except ValueError:
            raise DataError(
                f"{path}:{number}: found {line[:40]!r}, expected `base64 rank` as in a tiktoken"
                " vocabulary; copy the file again"
            ) from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if sorted(ranks.values()) != list(range(len(ranks))) or missing:
        raise DataError(
            f"{path}: found {len(ranks)} pieces that are not ranked 0 to {len(ranks) - 1} or lack"
            " single bytes; the file is cut short, copy it again"
        )
    return ranks


def compile_alternation(strings: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that matches any of the strings, the longest first; None for none."""
    ordered = sorted(set(strings), key=lambda s: (-len(s), s))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _break_matches(text: str, pattern: re.Pattern[str] | None) -> list[str]:
    """The text, cut after the first letter of each match, so that no part contains one."""
    if pattern is None:
        return [text]
    cuts = [0, *(match.start() + 1 for match in pattern.finditer(text)), len(text)]
    return [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]


@contextmanager
def _catch_panics(path: Path) -> Iterator[None]:
    """What a file makes the library written in Rust give up on, which is no Exception in Python, is
    a DataError.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{path}: the tokenizers library gave up on it ({get_first_line(error, 160)}); copy the"
            " file again"
        ) from None


# Bounds what a tokenizer.json makes of a text, before the tokenizers library takes the memory for
# it.
#
# The library has no limit of its own: thirty steps that double a text end the process.


MOST_CHARACTERS = (
    2**24
)  # of a normalized text; a longer one may have up to four times its own length
MOST_GROWTH = 2**20  # of all normalizers together, in characters for one of the text
_MOST_CUT_GROWTH = 16  # of the pre-tokenizers: one that writes bytes as letters makes four of one
_MOST_ADDED_IDS = 2**16  # that a post-processor puts around a text
# Characters that a step makes of one at most, by Unicode's own tables; those that are not here make
# no more.
_GROWTH = {
    "BertNormalizer": 12,
    "ByteLevel": 4,
    "Lowercase": 3,
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
}


def read_growth(path: Path, content: Any) -> float:
    """Return the characters that a tokenizer.json's normalizers make of one at most. DataError for
    one that has no bound.
    """
    content = content if isinstance(content, dict) else {}
    growth = math.prod(map(_compute_step_growth, _list_steps(content.get("normalizer"))))
    added = sum(
        len(token["content"]) for token in content.get("added_tokens") or []
    )  # these are normalized too
    if growth > MOST_GROWTH or growth * added > max(MOST_CHARACTERS, 4 * added):
        raise _make_growth_fault(path, "normalizers that make a text longer without bound")
    if (
        math.prod(map(_compute_step_growth, _list_steps(content.get("pre_tokenizer"))))
        > _MOST_CUT_GROWTH
    ):
        raise _make_growth_fault(path, "pre-tokenizers that make a text longer without bound")
    for step in _list_steps(content.get("post_processor")):
        _check_template(path, step)
    return growth


def check_length(path: Path, tokenizer: Any, text: str, growth: float) -> None:
    """Raise DataError if the text, as the tokenizer normalizes it, is too long. growth: as of
    `read_growth`.
    """
    # The library makes a new object for each look at its normalizer: only a text that could be too
    # long is worth it.
    if len(text) * growth <= MOST_CHARACTERS or tokenizer.normalizer is None:
        return
    normalizer = tokenizer.normalizer
    left, step = max(MOST_CHARACTERS, 4 * len(text)), max(1, int(MOST_CHARACTERS / growth))
    for start in range(0, len(text), step):
        left -= len(normalizer.normalize_str(text[start : start + step]))
        if left < 0:
            raise _make_growth_fault(
                path, f"normalizers that make a text of {len(text)} characters too long to be read"
            )


def _list_steps(part: Any) -> Iterator[dict[str, Any]]:
    """Return the steps of a part of the file, those of a sequence one after the other."""
    if not isinstance(part, dict):
        return
    inner = [
        part[name]
        for name in ("normalizers", "pretokenizers", "processors")
        if isinstance(part.get(name), list)
    ]
    if not inner:
        yield part
    for step in itertools.chain(*inner):
        yield from _list_steps(step)


def _compute_step_growth(step: dict[str, Any]) -> float:
    """Return the characters that one step makes of one at most."""
    match step:
        case {"pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1, len(new) / len(old))
        case {"content": str(new)} | {
            "prepend": str(new)
        }:  # a regular expression may match where there is nothing
            return 1 + len(new)
        case {"precompiled_charsmap": str(table)}:
            return 1 + _find_longest_replacement(table)
        case {"type": str(kind)}:
            return _GROWTH.get(kind, 1)
    return max(_GROWTH.values())  # the library knows some by their other keys


def _find_longest_replacement(table: str) -> int:
    """Return the length of the longest replacement in sentencepiece's table.

    It has the size of a trie in 4 bytes, the trie, and then the replacements, ended by NUL each.
    """
    try:
        content = base64.b64decode(table)
    except (binascii.Error, ValueError):  # the library refuses it
        return 0
    return max(map(len, content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")))


def _check_template(path: Path, step: dict[str, Any]) -> None:
    """Raise DataError for a post-processor that repeats the text, or puts ids without bound around
    it.
    """
    match step:
        case {"single": list(pieces), "special_tokens": dict(tokens)}:
            named = [tokens.get((piece.get("SpecialToken") or {}).get("id")) for piece in pieces]
            ids = sum(len(token["ids"]) for token in named if token)
            if sum("Sequence" in piece for piece in pieces) > 1 or ids > _MOST_ADDED_IDS:
                raise _make_growth_fault(
                    path, "a post-processor that makes a text longer without bound"
                )


def _make_growth_fault(path: Path, what: str) -> DataError:
    return DataError(
        f"{path}: found {what}; expected the tokenizer of a model, copy the file again"
    )
