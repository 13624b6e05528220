"""Read samples in .json files: a list of objects, `{"data": [...]}`, or one object.

`open_sources` (sources.py) makes a `JsonFile` for each such file. One pass decodes each item by
itself to find where it begins and ends, so that a file may be larger than memory, and each error
has its line. Keys beside the list `data` are kept: they are a fault if they may matter.
"""

import codecs
import json
import os
import re
from collections.abc import Iterator
from mmap import ACCESS_READ, mmap
from typing import Any, BinaryIO

from recipe_lib.data.column_names import is_blank, is_idle, why_not_column
from recipe_lib.data.sample_files import IndexedFile, build_empty_fault, build_utf8_fault
from recipe_lib.data.samples import describe_kind
from recipe_lib.errors import DataError

# A value over the limit is cut so many bytes behind it. An error in the last so many characters may
# come from the cut, within a word or an escape.
UNSURE = 16

_BLANK = re.compile(rb"[ \t\n\r]*+")
_TOKEN = re.compile(rb'[\[\]{}]|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # a bracket, or a text in quotes
_WORD = re.compile(rb'[^\s,:\[\]{}"]*+')  # a number, or `true`

TOO_LONG = object()  # stands for a value over the limit


class JsonFile(IndexedFile):
    """A .json file. Its index is made by decoding each item once, which finds all its errors."""

    def scan(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        if os.fstat(file.fileno()).st_size == 0:
            raise build_empty_fault(self.place)
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            scanner = _Scanner(content, self.place, self.sample_limit)
            opening = scanner.skip_blanks()
            if not opening:
                raise build_empty_fault(self.place)
            self._list_path = "." if opening == b"[" else ".data"  # jq path of the list
            self._beside = scanner.beside
            yield from scanner.scan_items()

    def locate(self, sample_index: int, line: int) -> str:
        return f"{self.place}:{line}: {self._list_path}[{sample_index}]" if line else self.place

    @property
    def keys_beside(self) -> dict[str, str]:
        len(self)  # scans the file, if that was not done yet
        return self._beside


def _describe(value: Any) -> str:
    return "a very long value" if value is TOO_LONG else describe_kind(value)


class _Scanner:
    """A position in a JSON file, from which values are read one after the other.

    `content[at]` is the next byte, and `line` its line, from 1.
    """

    def __init__(self, content: mmap, place: str, sample_limit: int) -> None:
        """Begin after any byte order mark.

        place: of the file, for error lines. sample_limit: bytes; larger values are skipped.
        """
        self.content = content
        self.place = place
        self.sample_limit = sample_limit  # bytes
        self.at = len(codecs.BOM_UTF8) if content[:3] == codecs.BOM_UTF8 else 0
        self.line = 1
        self.decoder = json.JSONDecoder()
        # Key beside the list `data` -> the kind of its value; "" for one that changes nothing
        self.beside = dict[str, str]()

    def scan_items(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first byte, byte after the last, line) of each sample; line 0: the whole file.

        Raises DataError for invalid JSON, or a file that is neither a list nor an object.
        """
        opening = self.skip_blanks()
        if opening not in (b"[", b"{"):
            raise DataError(
                f"{self.place}: found {_describe(self.take_value())}, expected a list of objects"
                ' or {"data": [...]}'
            )
        yield from self.scan_list() if opening == b"[" else self.scan_object()
        if self.skip_blanks():
            raise self.build_fault("Extra data", self.at)

    def scan_entries(self, closing: bytes) -> Iterator[None]:
        """Skip the list or object that begins here, up to `closing`; yield at each entry's start.

        The caller has to read the entry before it asks for the next. closing: its last byte.
        """
        self.advance(self.at + 1)
        mark = closing if self.skip_blanks() == closing else b","
        while mark == b",":
            yield
            mark = self.skip_blanks()
            if mark not in (b",", closing):
                raise self.build_fault("Expecting ',' delimiter", self.at)
            if mark == b",":
                self.advance(self.at + 1)
                self.skip_blanks()
        self.advance(self.at + 1)

    def scan_list(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first byte, byte after the last, line) of each item of the list here."""
        for _ in self.scan_entries(b"]"):
            first = self.at
            line = self.line
            self.take_value()
            yield first, self.at, line

    def scan_object(self) -> Iterator[tuple[int, int, int]]:
        """Yield the items of the list under the key `data` of the object here, as `scan_list` does.

        Without such a list the object itself is the only item, with line 0.
        """
        start = self.at
        has_list = False
        num_data_keys = 0
        for _ in self.scan_entries(b"}"):
            if self.skip_blanks() != b'"':
                raise self.build_fault("Expecting property name enclosed in double quotes", self.at)
            key = self.take_value()
            num_data_keys += key == "data"  # a bool
            if num_data_keys > 1:
                raise DataError(
                    f"{self.place}:{self.line}: found the key 'data' twice, expected it once;"
                    " correct it"
                )
            if self.skip_blanks() != b":":
                raise self.build_fault("Expecting ':' delimiter", self.at)
            self.advance(self.at + 1)
            if self.skip_blanks() == b"[" and key == "data":
                has_list = True
                yield from self.scan_list()
            else:
                value = self.take_value()
                if not is_blank(value):
                    why = why_not_column(str(key), value, is_text=False)
                    changes_nothing = not why and is_idle(str(key), value)
                    self.beside[str(key)] = "" if changes_nothing else _describe(value)
        if not has_list:
            self.beside.clear()  # the object is the one sample, and these are its columns
            yield start, self.at, 0

    def skip_blanks(self) -> bytes:
        """Skip white space; return the byte after it, or b"" at the end of the file."""
        blanks = _BLANK.match(self.content, self.at)
        self.advance(blanks.end() if blanks else self.at)
        return self.content[self.at : self.at + 1]

    def take_value(self) -> Any:
        """Decode the value that begins here, move behind it and return it; TOO_LONG over the limit.

        Raises DataError for invalid JSON or UTF-8.
        """
        end, is_closed = self._find_end()
        # A value over the limit is decoded up to the limit only, to find errors in that part. (A
        # cut may also fall within a character: only at the value's end is that an error.)
        cut = min(end, self.at + self.sample_limit + UNSURE)
        try:
            text, _ = codecs.utf_8_decode(self.content[self.at : cut], "strict", cut == end)
            value, length = self.decoder.raw_decode(text)
        except UnicodeDecodeError as error:
            line = self.line + error.object[: error.start].count(b"\n")
            raise build_utf8_fault(self.place, line, error.object[error.start]) from None
        except json.JSONDecodeError as error:
            # A value that was cut is unterminated, and near the cut other errors may follow from it
            is_fault = not error.msg.startswith("Unterminated") and error.pos < len(text) - UNSURE
            if cut == end or is_fault:
                raise self.build_fault(
                    error.msg, self.at + len(text[: error.pos].encode())
                ) from None
            if not is_closed:
                raise self.build_fault("Unterminated value", end) from None
            self.advance(end)
            return TOO_LONG
        except RecursionError:
            raise DataError(
                f"{self.place}: JSON nested too deep, expected a list of objects"
            ) from None
        except ValueError:  # Python refuses integers of thousands of digits
            raise self.build_fault("a number of too many digits", self.at) from None
        self.advance(self.at + len(text[:length].encode()))
        return value

    def _find_end(self) -> tuple[int, bool]:
        """Return (byte after the value that begins here, whether it ends before the file does).

        Only brackets and quotes are looked at; the value may be invalid.
        """
        depth = 0
        word = _WORD.match(self.content, self.at)
        if word and word.end() > self.at:
            return word.end(), True
        for token in _TOKEN.finditer(self.content, self.at):
            depth += (token[0] in (b"[", b"{")) - (token[0] in (b"]", b"}"))
            if depth <= 0:
                return token.end(), True
        return len(self.content), False

    def advance(self, end: int) -> None:
        """Move to `content[end]`, and count the lines up to there."""
        self.line += self.content[self.at : end].count(b"\n")
        self.at = end

    def build_fault(self, message: str, position: int) -> DataError:
        """Return the error at a byte of the file, which must not be before `at`.

        message: of Python's JSON decoder.
        """
        line = self.line + self.content[self.at : position].count(b"\n")
        # The line up to the position
        line_start = self.content[
            self.content.rfind(b"\n", 0, position) + 1 : position
        ].removeprefix(codecs.BOM_UTF8)
        remedy = (
            "; if every line is an object of its own, name the file .jsonl"
            if message == "Extra data"
            else ""
        )
        column = len(line_start.decode(errors="replace")) + 1
        return DataError(
            f"{self.place}:{line}: column {column}: invalid JSON ({message}), expected a list of"
            f" objects{remedy}"
        )
