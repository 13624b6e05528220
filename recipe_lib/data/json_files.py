"""Reads JSON files, an item at a time in memory: a list of objects, `{"data": [...]}`, or one object."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from recipe_lib.data.column_names import is_idle_beside, says_nothing
from recipe_lib.data.sample_files import IndexedFile, empty, not_utf8, parse_sample, skip_mark
from recipe_lib.data.samples import SampleFault, kind_of
from recipe_lib.errors import DataError

READ_BYTES = 2**20  # bytes that are read at a time
# A fault so near to the end of the window may be only that the window ends there (in a word or in an escape).
UNSURE = 16

_BLANK = re.compile("[ \t\n\r]*")
_OUTSIDE, _INSIDE = re.compile(r'[\[\]{}"]'), re.compile(r'\\.?|"', re.DOTALL)  # of a text in quotes

TOO_LONG = object()


class JsonFile(IndexedFile):
    """A .json file. Its index is made by decoding each item once, which also finds every fault of the file."""

    def scan(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        """As IndexedFile says."""
        scanner = _Scanner(file, self.place, self.sample_limit)
        self._list_path = "." if scanner.next_letter() == "[" else ".data"
        self._beside = scanner.beside
        yield from scanner.items()

    def decode(self, content: bytes, number: int) -> dict[str, Any] | SampleFault:
        """As IndexedFile says."""
        return parse_sample(content)

    def locate(self, number: int, line: int) -> str:
        """As IndexedFile says."""
        return f"{self.place}:{line}: {self._list_path}[{number}]" if line else self.place

    @property
    def keys_beside(self) -> dict[str, str]:
        """Return the keys beside the list of samples, as SampleFile says."""
        len(self)  # they are known once the file was scanned
        return self._beside


def _describe(value: Any) -> str:
    """Return what kind of value was read, for error lines."""
    return "a very long value" if value is TOO_LONG else kind_of(value)


class _Scanner:
    """A window onto the text of a file, which moves on as values are taken from it.

    `text[at]` is the next letter; `byte`, `line`, `column` say where it is in the file.
    """

    def __init__(self, file: BinaryIO, place: str, sample_limit: int) -> None:
        """sample_limit: a value of more letters is passed over, not decoded."""
        self.file, self.place, self.sample_limit = file, place, sample_limit
        self.letters = codecs.getincrementaldecoder("utf-8")()
        self.decoder = json.JSONDecoder()
        self.text, self.at, self.ended = "", 0, False
        self.beside = dict[str, str]()  # keys of the object that holds the list, as SampleFile.keys_beside
        self.line, self.column = 1, 1
        self.byte = skip_mark(file)

    def items(self) -> Iterator[tuple[int, int, int]]:
        """Yield what JsonFile's `scan` does. Raises DataError."""
        opening = self.next_letter()
        if not opening:
            raise empty(self.place)
        if opening not in "[{":
            value = self.value()
            raise DataError(f'{self.place}: found {_describe(value)}, expected a list of objects or {{"data": [...]}}')
        yield from self.list_items() if opening == "[" else self.object_items()
        if self.next_letter():
            raise self.invalid("Extra data", self.at)

    def list_items(self) -> Iterator[tuple[int, int, int]]:
        """Yield what `items` does of the list that begins here."""
        self.advance(self.at + 1)
        mark = "]" if self.next_letter() == "]" else ","
        while mark == ",":
            first, line = self.byte, self.line
            self.value()
            yield first, self.byte, line
            mark = self.next_letter()
            if mark not in (",", "]"):
                raise self.invalid("Expecting ',' delimiter", self.at)
            if mark == ",":
                self.advance(self.at + 1)
                self.next_letter()
        self.advance(self.at + 1)

    def object_items(self) -> Iterator[tuple[int, int, int]]:
        """Yield what `items` does of the list under the key `data` of the object that begins here; else the object
        itself."""
        start = self.byte
        has_list = False
        num_data_keys = 0
        self.advance(self.at + 1)
        mark = "}" if self.next_letter() == "}" else ","
        while mark == ",":
            if self.next_letter() != '"':
                raise self.invalid("Expecting property name enclosed in double quotes", self.at)
            key = self.value()
            num_data_keys += key == "data"
            if num_data_keys > 1:
                raise DataError(f"{self.place}:{self.line}: found the key 'data' twice, expected it once; correct it")
            if self.next_letter() != ":":
                raise self.invalid("Expecting ':' delimiter", self.at)
            self.advance(self.at + 1)
            if self.next_letter() == "[" and key == "data":
                has_list = True
                yield from self.list_items()
            else:
                value = self.value()
                if not says_nothing(value):
                    self.beside[str(key)] = "" if is_idle_beside(str(key), value) else _describe(value)
            mark = self.next_letter()
            if mark not in (",", "}"):
                raise self.invalid("Expecting ',' delimiter", self.at)
            if mark == ",":
                self.advance(self.at + 1)
        self.advance(self.at + 1)
        if not has_list:
            self.beside.clear()  # the object is the one sample, and these are its columns
            yield start, self.byte, 0

    def next_letter(self) -> str:
        """Pass over blanks; return the letter after them, or nothing at the end of the file."""
        while True:
            match = _BLANK.match(self.text, self.at)
            self.advance(match.end() if match else self.at)
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.grow()

    def value(self) -> Any:
        """Take the value that begins here; TOO_LONG for one over the limit."""
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos >= len(self.text) - UNSURE
                if self.ended or not cut:
                    raise self.invalid(error.msg, error.pos) from None
                if len(self.text) - self.at > self.sample_limit:
                    self.pass_over()
                    return TOO_LONG
            except RecursionError:
                raise DataError(f"{self.place}: JSON nested too deep, expected a list of objects") from None
            except ValueError:  # Python refuses integers of thousands of digits
                raise self.invalid("a number of too many digits", self.at) from None
            else:
                if end < len(self.text) or self.ended:  # a number at the window's end may go on
                    self.advance(end)
                    return value
            self.grow()

    def pass_over(self) -> None:
        """Pass over the list, object or text that begins here, by its brackets and quotes alone."""
        at, depth, inside = self.at, 0, False
        while True:
            found = (_INSIDE if inside else _OUTSIDE).search(self.text, at)
            if found is None or found[0] == "\\":  # which may belong to the next letter
                self.advance(found.start() if found else len(self.text))
                if self.ended:
                    raise self.invalid("Unterminated value", self.at)
                self.grow()
                at = self.at
                continue
            at = found.end()
            if found[0] == '"':
                inside = not inside
            elif not inside:
                depth += 1 if found[0] in "[{" else -1
            if not inside and depth == 0:
                self.advance(at)
                return

    def advance(self, end: int) -> None:
        """Move on to `text[end]`."""
        passed = self.text[self.at : end]
        self.byte += len(passed) if passed.isascii() else len(passed.encode())
        self.line, self.column = self._place(end)
        self.at = end

    def grow(self) -> None:
        """Let go of what is passed and read on, as much as there is already or more."""
        block = self.file.read(max(READ_BYTES, len(self.text) - self.at))
        try:
            more = self.letters.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line = self.line + self.text.count("\n", self.at) + error.object[: error.start].count(b"\n")
            raise not_utf8(self.place, line, error.object[error.start]) from None
        self.text, self.at, self.ended = self.text[self.at :] + more, 0, not block

    def invalid(self, said: str, position: int) -> DataError:
        """Return the fault at a position of the window."""
        line, column = self._place(position)
        remedy = "; if every line is an object of its own, name the file .jsonl" if said == "Extra data" else ""
        return DataError(
            f"{self.place}:{line}: column {column}: invalid JSON ({said}), expected a list of objects{remedy}"
        )

    def _place(self, position: int) -> tuple[int, int]:
        """Return (line, column) of a position that is not before `at`."""
        last = self.text.rfind("\n", self.at, position)
        if last < 0:
            return self.line, self.column + position - self.at
        return self.line + self.text.count("\n", self.at, position), position - last
