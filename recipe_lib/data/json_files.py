"""Reads JSON files, an item at a time in memory: a list of objects, `{"data": [...]}`, or one object."""

import codecs
import json
import re
from array import array
from collections.abc import Iterator
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np

from recipe_lib.data.column_names import is_idle_beside, says_nothing
from recipe_lib.data.sample_files import LocalFile, Located, empty, not_utf8, opened, parse_sample
from recipe_lib.data.samples import kind_of
from recipe_lib.errors import DataError

READ_BYTES = 2**20  # bytes that are read at a time
# A fault so near to the end of the window may be only that the window ends there (in a word or in an escape).
UNSURE = 16

_BLANK = re.compile("[ \t\n\r]*")
_OUTSIDE, _INSIDE = re.compile(r'[\[\]{}"]'), re.compile(r'\\.?|"', re.DOTALL)  # of a text in quotes

TOO_LONG = object()


class JsonFile(LocalFile):
    """A .json file. Its index is made by decoding each item once, which also finds every fault of the file."""

    def __len__(self) -> int:
        return len(self._index[0])

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Located]:
        """As SampleFile says."""
        items = self._index[0][start:stop]
        with opened(self.path) as file:
            for sample, (first, end, _) in enumerate(items, start=start):
                if end - first > self.sample_limit:
                    yield self.place_of(sample), self.too_large(int(end - first))
                    continue
                file.seek(int(first))
                yield self.place_of(sample), parse_sample(file.read(int(end - first)))

    def first(self, count: int) -> Iterator[Located]:
        """As SampleFile says; a file that turns out to be no list of objects is read as a whole."""
        with opened(self.path) as file:
            scanner = _Scanner(file, self.place, self.sample_limit)
            if scanner.next_letter() != "[":
                yield from self.read(0, count)
                return
            items = scanner.list_items(count).tolist()
        with opened(self.path) as file:
            for number, (start, end, line) in enumerate(zip(items[::3], items[1::3], items[2::3], strict=True)):
                if end - start <= self.sample_limit:
                    file.seek(start)
                    yield f"{self.place}:{line}: .[{number}]", parse_sample(file.read(end - start))

    def place_of(self, sample: int) -> str:
        """As SampleFile says."""
        items, path, _ = self._index
        line = int(items[sample, 2])
        return f"{self.place}:{line}: {path}[{sample}]" if line else self.place

    @property
    def keys_beside(self) -> dict[str, str]:
        """Return the keys beside the list of samples, as SampleFile says."""
        return self._index[2]

    @cached_property
    def _index(self) -> tuple[np.ndarray, str, dict[str, str]]:
        """Return first byte, byte after the last one and line (0: the file is the sample) of each item, int64
        `[samples, 3]`; the path of the list; and what stands beside it."""
        with opened(self.path) as file:
            scanner = _Scanner(file, self.place, self.sample_limit)
            is_list = scanner.next_letter() == "["
            items = np.array(scanner.items(), np.int64).reshape(-1, 3)
            return items, "." if is_list else ".data", scanner.beside


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
        self.byte = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        file.seek(self.byte)

    def items(self) -> array:
        """Return three numbers for each item, as JsonFile's index has them. Raises DataError."""
        opening = self.next_letter()
        if not opening:
            raise empty(self.place)
        if opening not in "[{":
            value = self.value()
            raise DataError(f'{self.place}: found {_describe(value)}, expected a list of objects or {{"data": [...]}}')
        items = self.list_items() if opening == "[" else self.object_items()
        if self.next_letter():
            raise self.invalid("Extra data", self.at)
        return items

    def list_items(self, count: int | None = None) -> array:
        """Return what `items` does of the list that begins here; of the first `count` items alone, after which the
        scanner can be used no more."""
        items = array("q")
        self.advance(self.at + 1)
        mark = self.next_letter()
        while mark != "]" or items:
            first, line = self.byte, self.line
            self.value()
            items.extend((first, self.byte, line))
            if count is not None and len(items) == 3 * count:
                return items
            mark = self.next_letter()
            if mark not in (",", "]"):
                raise self.invalid("Expecting ',' delimiter", self.at)
            if mark == "]":
                break
            self.advance(self.at + 1)
            self.next_letter()
        self.advance(self.at + 1)
        return items

    def object_items(self) -> array:
        """Return what `items` does of the list under the key `data` of the object that begins here; else the object
        itself."""
        start = self.byte
        items = None
        mark = ","
        num_data_keys = 0
        self.advance(self.at + 1)
        if self.next_letter() == "}":
            mark = "}"
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
                items = self.list_items()
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
        if items is None:
            self.beside.clear()  # the object is the one sample, and these are its columns
            return array("q", (start, self.byte, 0))
        return items

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
