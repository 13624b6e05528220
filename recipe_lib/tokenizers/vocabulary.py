"""Define the three kinds of vocabulary behind one class: sentencepiece, tiktoken, tokenizer.json.

A `Tokenizer` has one `Vocabulary`, which encodes ordinary text as ids and returns the bytes of an
id. No text is encoded as a special token here; special tokens, BOS and decoding are the
Tokenizer's. A tokenizer.json may make a text longer without bound, so `read_growth` and
`check_length` check it before the tokenizers library allocates the memory.
"""

import base64
import copy
import itertools
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers
from sentencepiece import SentencePieceProcessor

from recipe_lib.errors import DataError, get_first_line
from recipe_lib.reading import parse_json

MAX_VOCABULARY = 2**27  # ids; far above any there is, and what a row of int32 ids can hold


@dataclass(frozen=True)
class AddedToken:
    """A token added to the vocabulary. The fields are named as in tokenizer.json."""

    # Text of the token
    content: str
    id: int
    # Whether text is encoded as this token only if special tokens are allowed
    special: bool = True
    # Whether the white space before it is dropped
    lstrip: bool = False
    # Whether the white space after it is dropped
    rstrip: bool = False

    @staticmethod
    def read(entry: Any, where: str, id: int | None = None) -> "AddedToken":
        """Return the token of an object in tokenizer.json or tokenizer_config.json.

        where: file, for error lines. id: used in place of the object's; None: it has one. Raises
        DataError for an entry without text, or without an id from 0 to MAX_VOCABULARY - 1.
        """
        try:
            number = entry["id"] if id is None else id
            flags = {
                name: bool(entry.get(name, name == "special"))
                for name in ("special", "lstrip", "rstrip")
            }
            # `type`, since JSON's true is an int to isinstance.
            is_id = type(number) is int and 0 <= number < MAX_VOCABULARY
            if not isinstance(entry["content"], str) or not entry["content"] or not is_id:
                raise TypeError
        except (KeyError, TypeError, AttributeError):
            raise DataError(
                f"{where}: found the added token {str(entry)[:80]}, expected an object with"
                " `content` and an id; copy the file again"
            ) from None
        return AddedToken(entry["content"], number, **flags)


class TextPosition(Enum):
    """The position of a piece of ordinary text.

    It matters as some vocabularies put a space before the first word of a text.
    """

    START = "start of the text"
    AFTER_SPECIAL = "right after a special token"
    INSIDE = "goes on from other text"


class Vocabulary(ABC):
    """An encoder of ordinary text as ids, which also has the bytes of each id."""

    size: int  # number of ids, without added tokens
    added: tuple[AddedToken, ...] = ()  # tokens that the file itself declares as added
    matches_added = False  # whether encode() itself finds added tokens that are not special
    eats_first_space = False  # whether encode() puts a space before the first word of a text
    eats_space_after_special = False  # whether it does so after a special token too
    bos_id: int | None = None  # by the file itself; None: it names none
    eos_id: int | None = None  # by the file itself; None: it names none
    _bytes: list[bytes]  # bytes of each id

    @abstractmethod
    def encode(self, text: str, position: TextPosition) -> list[int]:
        """Return the ids of a piece of ordinary text.

        position: decides whether a space is put before it.
        """

    @abstractmethod
    def find(self, piece: str) -> int | None:
        """Return the id of a token as the file spells it; None: there is none."""

    def get_token_bytes(self, token: int) -> bytes:
        """Return the bytes of an id, which may be a part of a character."""
        return self._bytes[token]

    def puts_bos_first(self, bos_id: int) -> bool:
        """Return True if this tokenizer puts BOS before a text by default.

        Models are trained with it. bos_id: the tokenizer's BOS. A subclass whose file decides it
        overrides this.
        """
        return True


class SentencePieceVocabulary(Vocabulary):
    """A sentencepiece model (protobuf), encoded by the sentencepiece library."""

    # Appended to the protobuf, where a later field wins: normalizer_spec {add_dummy_prefix: false,
    # remove_extra_whitespaces: false}. Text inside of other text must not get a leading space.
    NO_PREFIX = b"\x1a\x04\x18\x00\x20\x00"

    def __init__(self, path: Path, model: bytes, legacy: bool, special: Iterable[str]) -> None:
        """Read the model and find out how it treats spaces.

        path: named in errors. model: content of the file. legacy: text after a special token begins
        like a new text (the Llama-2 convention of Hugging Face). special: strings that ordinary
        text must not turn into one token, even where the model would. Raises DataError if the
        content is no sentencepiece model.
        """
        try:
            self.model = SentencePieceProcessor(model_proto=model)  # as the file has it
            # For text inside of other text
            self._inner = SentencePieceProcessor(model_proto=model + self.NO_PREFIX)
        except RuntimeError as error:
            raise DataError(
                f"{path}: found no sentencepiece model ({get_first_line(error, 160)}); copy the"
                " file again"
            ) from None
        self.size = len(self.model)
        # The library returns -1 for none.
        self.bos_id = self.model.bos_id() if self.model.bos_id() >= 0 else None
        self.eos_id = self.model.eos_id() if self.model.eos_id() >= 0 else None
        self.added = tuple(
            AddedToken(self.model.id_to_piece(i), i)
            for i in range(self.size)
            if self.model.is_control(i)
        )
        # Try how the model treats spaces: the protobuf may leave out fields at their default.
        pieces = self.model.encode("a", out_type=str)
        self.eats_first_space = bool(pieces) and pieces[0].startswith("▁")  # "▁" stands for a space
        self.eats_space_after_special = self.eats_first_space and legacy
        self.collapses_spaces = self.model.encode("a  a") == self.model.encode("a a")
        # Special tokens that the model itself would find in ordinary text
        encoded_as_special = [
            s for s in special if len(s) > 1 and self.model.piece_to_id(s) in self._inner.encode(s)
        ]
        self._breakable = compile_alternation(encoded_as_special)
        self._bytes = [self._decode_piece(i) for i in range(self.size)]

    def encode(self, text: str, position: TextPosition) -> list[int]:
        """Return the ids of a piece of ordinary text.

        A special token that it spells out is cut after its first letter, so that it stays text.
        """
        ids: list[int] = []
        for part in _break_matches(text, self._breakable):
            if position is TextPosition.START or (
                position is TextPosition.AFTER_SPECIAL and self.eats_space_after_special
            ):
                ids += self.model.encode(part)
            else:
                # NO_PREFIX also stops the model from collapsing spaces, so collapse them here.
                text_inside = re.sub(" {2,}", " ", part) if self.collapses_spaces else part
                ids += self._inner.encode(text_inside)
            position = TextPosition.INSIDE
        return ids

    def find(self, piece: str) -> int | None:
        # For an unknown piece the library returns the id of the unknown token.
        token = self.model.piece_to_id(piece)
        return token if self.model.id_to_piece(token) == piece else None

    def _decode_piece(self, token: int) -> bytes:
        piece = self.model.id_to_piece(token)
        if self.model.is_byte(token):  # spelled `<0x0A>`
            return bytes([int(piece[3:5], 16)])
        # The library decodes an unknown token as this text.
        text = " ⁇ " if self.model.is_unknown(token) else piece.replace("▁", " ")
        return text.encode()


class TiktokenVocabulary(Vocabulary):
    """Base64 lines of a byte-level BPE, encoded by the tiktoken library with Llama 3's pattern."""

    # Splits a text into words before the BPE merges
    LLAMA3_PATTERN = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    # The library fails on white space of more than a million characters, so it is cut.
    LONG_SPACE = re.compile(r"\s{500000}")

    def __init__(self, path: Path, content: bytes) -> None:
        """Read the lines of a file. path: named in errors.

        Raises DataError for a line of another form, or if pieces are missing.
        """
        ranks = _read_ranks(path, content)
        self.size = len(ranks)
        self._ids = ranks
        self._bytes = sorted(ranks, key=ranks.__getitem__)
        self._encoding = tiktoken.Encoding(
            "llama3", pat_str=self.LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )

    def encode(self, text: str, position: TextPosition) -> list[int]:
        cuts = [0, *(match.end() for match in self.LONG_SPACE.finditer(text)), len(text)]
        parts = (text[start:stop] for start, stop in itertools.pairwise(cuts))
        return list(itertools.chain.from_iterable(map(self._encoding.encode_ordinary, parts)))

    def find(self, piece: str) -> int | None:
        return self._ids.get(piece.encode())


class JsonVocabulary(Vocabulary):
    """A tokenizer.json, encoded by the tokenizers library."""

    matches_added = True

    def __init__(self, path: Path, content: bytes) -> None:
        """Read and build the tokenizer.

        path: named in errors. content: of the file. Raises DataError if it is no tokenizer, or may
        make a text longer without bound.
        """
        # Texts are encoded one by one, so threads for batches would be idle.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._path = path
        text = content.decode("utf-8", errors="replace")
        try:
            fields = parse_json(text)
            # Checked before the library reads the file: that may already take all memory.
            self._growth = read_growth(path, fields)
            with _catch_panics(path):
                self._first = _build_tokenizer(text)
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001  (the library raises nothing narrower)
            raise DataError(
                f"{path}: found no tokenizer ({get_first_line(error, 160)}); copy the file again"
            ) from None
        self.added = tuple(
            AddedToken.read(entry, str(path)) for entry in fields.get("added_tokens") or []
        )
        self._after_special = self._build_variant(fields, keep_always=True)
        # Position of a text -> the tokenizer for it: the file may put a space before the first text
        # alone, or after special tokens as well, but never inside
        self._variants = {
            TextPosition.START: self._first,
            TextPosition.AFTER_SPECIAL: self._after_special,
            TextPosition.INSIDE: self._build_variant(fields, keep_always=False),
        }
        pieces = fields["model"]["vocab"]
        # A unigram model has a list of pieces with their scores.
        last_id = max(pieces.values(), default=-1) if isinstance(pieces, dict) else len(pieces) - 1
        self.size = last_id + 1
        if self.size > MAX_VOCABULARY:
            raise DataError(
                f"{path}: found the id {self.size - 1}, expected ids below {MAX_VOCABULARY}; copy"
                " the file again"
            )
        # If the decoder drops a first space, the encoder has put it there.
        self.eats_first_space = any(map(_drops_first_space, _list_steps(fields.get("decoder"))))
        self.eats_space_after_special = self.eats_first_space and self._after_special is self._first
        with _catch_panics(path):
            # [the id that the file's post-processor puts before a text], or []
            self._puts_first = self._first.encode("", add_special_tokens=True).ids[:1]
        self._to_bytes = _make_piece_decoder(fields.get("decoder"))

    def encode(self, text: str, position: TextPosition) -> list[int]:
        """Return the ids of a piece of ordinary text.

        Added tokens that are not special are found in it. Raises DataError if the text becomes too
        long by normalization, or the library panics.
        """
        tokenizer = self._variants[position]
        with _catch_panics(self._path):
            check_length(self._path, tokenizer, text=text, growth=self._growth)
            # The fast method computes no offsets, and takes a sixth less time.
            return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def get_token_bytes(self, token: int) -> bytes:
        piece = self._first.id_to_token(token)
        return b"" if piece is None else self._to_bytes(piece)

    def find(self, piece: str) -> int | None:
        return self._first.token_to_id(piece)

    def puts_bos_first(self, bos_id: int) -> bool:
        return self._puts_first == [bos_id]

    def _build_variant(self, fields: dict[str, Any], keep_always: bool) -> Any:
        """Return the same tokenizer without the space that it puts before a text.

        fields: JSON of the file. keep_always: drop only a space that is put once, at the start of a
        text, and keep one that is put after every special token as well.
        """
        sections = {name: fields.get(name) for name in ("normalizer", "pre_tokenizer")}
        changed = copy.deepcopy(sections)
        _drop_prefix(changed, keep_always)
        return (
            self._first if changed == sections else _build_tokenizer(json.dumps(fields | changed))
        )


def _build_tokenizer(text: str) -> Any:
    """Return the tokenizer of a tokenizer.json, without truncation and padding."""
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # special tokens in ordinary text stay text
    return tokenizer


def _drop_prefix(fields: dict[str, Any], keep_always: bool) -> None:
    """Change a tokenizer.json's fields, in place, so that no leading space is put before a text.

    keep_always: leave a space that is put before every piece of text between added tokens.
    """
    # Metaspace has `prepend_scheme` ("first", "always" or "never"), ByteLevel `add_prefix_space`,
    # as older files have for Metaspace too.
    for section, kind in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        outer = fields.get(section) or {}
        is_sequence = outer.get("type") == "Sequence"
        steps = (outer.get(kind) or []) if is_sequence else [outer]
        for step in list(steps):
            is_prepend = step.get("type") == "Prepend"
            is_put_once = step.get("prepend_scheme") == "first"
            is_put_always = is_prepend or step.get("add_prefix_space") or "prepend_scheme" in step
            if not (is_put_once or (is_put_always and not keep_always)):
                continue
            if is_prepend and is_sequence:
                steps.remove(step)
            elif is_prepend:
                fields[section] = None
            elif "prepend_scheme" in step:
                step["prepend_scheme"] = "never"
            else:
                step["add_prefix_space"] = False


def _drops_first_space(decoder: dict[str, Any]) -> bool:
    if decoder.get("type") == "Strip":
        return decoder.get("content") == " " and decoder.get("start", 0) > 0
    return decoder.get("type") == "Metaspace" and decoder.get("prepend_scheme", "always") != "never"


def _make_piece_decoder(decoder: dict[str, Any] | None) -> Any:
    """Return a function from a piece as the file spells it to the bytes it stands for."""
    steps = list(_list_steps(decoder))
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:  # a letter of the piece stands for a byte
        table = _build_byte_level_table()

        def decode_byte_level(piece: str) -> bytes:
            if all(letter in table for letter in piece):
                return bytes(table[letter] for letter in piece)
            return piece.encode()  # an added token, which is written as it is

        return decode_byte_level
    patterns = [step.get("pattern") or {} for step in steps if step.get("type") == "Replace"]
    has_spaces = "Metaspace" in kinds or any(pattern.get("String") == "▁" for pattern in patterns)

    def decode_piece(piece: str) -> bytes:
        if "ByteFallback" in kinds and re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return (piece.replace("▁", " ") if has_spaces else piece).encode()

    return decode_piece


def _build_byte_level_table() -> dict[str, int]:
    """Return GPT-2's table from a printable letter to its byte.

    Printable bytes are the letter itself; the others are the letters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + number): byte for number, byte in enumerate(unprintable)}


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
    """Return a pattern that matches any of the strings, the longest first; None for no strings."""
    # A regular expression takes the first alternative that matches, not the longest.
    ordered = sorted(set(strings), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _break_matches(text: str, pattern: re.Pattern[str] | None) -> list[str]:
    """Return the text cut after the first letter of each match, so that no part contains one.

    pattern: None cuts nothing.
    """
    if pattern is None:
        return [text]
    cuts = [0, *(match.start() + 1 for match in pattern.finditer(text)), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(cuts)]


@contextmanager
def _catch_panics(path: Path) -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is written in Rust, into a DataError.

    path: of the tokenizer.json, named in the error.
    """
    try:
        yield
    except BaseException as error:  # a panic is no Exception in Python
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{path}: the tokenizers library gave up on it ({get_first_line(error, 160)}); copy the"
            " file again"
        ) from None


# Limits on what a file may ask for. The library has none: thirty normalizers that double a text
# would fill the memory.

# Characters of a normalized text; four times the text's own length is allowed in any case
MOST_CHARACTERS = 2**24
MOST_GROWTH = 2**20  # characters that all normalizers together may make of one
# Characters that all pre-tokenizers may make of one; one that writes bytes as letters makes four
_MOST_CUT_GROWTH = 16
_MOST_ADDED_IDS = 2**16  # ids that a post-processor may put around a text
# Type of a step -> most characters that it makes of one, by Unicode's tables; other types make one
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
    """Return how many characters a tokenizer.json's normalizers make of one, at most.

    path: named in errors. content: JSON of the file. Raises DataError for a file above the limits.
    """
    content = content if isinstance(content, dict) else {}
    growth = math.prod(map(_compute_step_growth, _list_steps(content.get("normalizer"))))
    # The added tokens are normalized too.
    num_added = sum(len(token["content"]) for token in content.get("added_tokens") or [])
    if growth > MOST_GROWTH or growth * num_added > max(MOST_CHARACTERS, 4 * num_added):
        raise _make_growth_fault(path, "normalizers that make a text longer without bound")
    cut_growth = math.prod(map(_compute_step_growth, _list_steps(content.get("pre_tokenizer"))))
    if cut_growth > _MOST_CUT_GROWTH:
        raise _make_growth_fault(path, "pre-tokenizers that make a text longer without bound")
    for step in _list_steps(content.get("post_processor")):
        _check_template(path, step)
    return growth


def check_length(path: Path, tokenizer: Any, *, text: str, growth: float) -> None:
    """Raise DataError if the text, as the tokenizer normalizes it, is too long.

    tokenizer: of the tokenizers library. growth: most characters that it makes of one.
    """
    # Reading `tokenizer.normalizer` makes a new object, so it comes last: most texts are short.
    if len(text) * growth <= MOST_CHARACTERS or tokenizer.normalizer is None:
        return
    normalizer = tokenizer.normalizer
    # Normalize in pieces, so small that none of them can exceed the limit.
    step = max(1, int(MOST_CHARACTERS / growth))
    num_left = max(MOST_CHARACTERS, 4 * len(text))  # characters that the rest may still become
    for start in range(0, len(text), step):
        num_left -= len(normalizer.normalize_str(text[start : start + step]))
        if num_left < 0:
            raise _make_growth_fault(
                path, f"normalizers that make a text of {len(text)} characters too long to be read"
            )


def _list_steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part of the file, those of a sequence one by one.

    part: the normalizer, pre-tokenizer, post-processor or decoder as JSON; None: the file has none.
    """
    if not isinstance(part, dict):
        return
    sequences = [
        part[name]
        for name in ("normalizers", "pretokenizers", "processors", "decoders")
        if isinstance(part.get(name), list)
    ]
    if not sequences:
        yield part
    for step in itertools.chain(*sequences):
        yield from _list_steps(step)


def _compute_step_growth(step: dict[str, Any]) -> float:
    """Return how many characters one step makes of one, at most."""
    match step:
        case {"pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1, len(new) / len(old))
        case {"content": str(new)} | {"prepend": str(new)}:
            # A regular expression may match before each character.
            return 1 + len(new)
        case {"precompiled_charsmap": str(table)}:
            return 1 + _find_longest_replacement(table)
        case {"type": str(kind)}:
            return _GROWTH.get(kind, 1)
    return max(_GROWTH.values())  # no type: the library knows some steps by their other keys


def _find_longest_replacement(table: str) -> int:
    """Return the length of the longest replacement in sentencepiece's table, in base64."""
    try:
        content = base64.b64decode(table)
    except ValueError:  # no base64: the library will refuse the file
        return 0
    # The size of a trie in 4 bytes, the trie, and then the replacements, ended by NUL each.
    return max(map(len, content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")))


def _check_template(path: Path, step: dict[str, Any]) -> None:
    """Raise DataError for a post-processor that repeats the text, or adds ids without bound."""
    match step:
        case {"single": list(pieces), "special_tokens": dict(tokens)}:
            added = [tokens.get((piece.get("SpecialToken") or {}).get("id")) for piece in pieces]
            num_ids = sum(len(token["ids"]) for token in added if token)
            if sum("Sequence" in piece for piece in pieces) > 1 or num_ids > _MOST_ADDED_IDS:
                raise _make_growth_fault(
                    path, "a post-processor that makes a text longer without bound"
                )


def _make_growth_fault(path: Path, fault: str) -> DataError:
    return DataError(
        f"{path}: found {fault}; expected the tokenizer of a model, copy the file again"
    )
