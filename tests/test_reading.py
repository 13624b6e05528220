"""Files of strangers: only regular ones are read, none blocks, none is larger than asked for; what
a terminal shows.
"""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipe_lib.config import load_config
from recipe_lib.errors import USER_ERROR, UserError, escape_invisible, run_for_exit_code
from recipe_lib.models import read_config
from recipe_lib.reading import open_regular, parse_json, read_bytes, read_json
from recipe_lib.tokenizers import load_tokenizer
from tests.data.sources import read_samples

SECONDS = 10  # that a read may take; one that blocks takes for ever


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("blocked")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make(folder: Path, kind: str, name: str) -> Path:
    """Something under that name that is no regular file."""
    path = folder / name
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a folder":
        path.mkdir()
    else:
        place = os.getcwd()
        os.chdir(folder)  # the name of a socket is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name)
        os.chdir(place)
    return path


@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a folder", "a socket"])
def test_only_regular_files_are_opened(kind: str, tmp_path: Path):
    path = make(tmp_path, kind, "x")
    with pytest.raises(OSError) as caught:
        open_regular(path)
    assert caught.value.strerror == f"is {kind}, expected a regular file"


def model_folder(folder: Path, kind: str) -> None:
    make(folder, kind, "config.json")
    read_config(folder)


def tokenizer_settings(folder: Path, kind: str) -> None:
    (folder / "tokenizer.json").write_text("{}")
    make(folder, kind, "tokenizer_config.json")
    load_tokenizer(folder)


def chat_template(folder: Path, kind: str) -> None:
    load_tokenizer("examples/demo/tokenizer", make(folder, kind, "chat.jinja"))


READERS: dict[str, Callable[[Path, str], object]] = {
    "config.json": model_folder,
    "tokenizer_config.json": tokenizer_settings,
    "chat template": chat_template,
    "YAML": lambda folder, kind: load_config(make(folder, kind, "x.yaml")),
} | {
    suffix: lambda folder, kind, suffix=suffix: list(
        read_samples(str(make(folder, kind, f"x{suffix}")), "train")
    )
    for suffix in (".jsonl", ".json", ".txt", ".parquet")
}


@pytest.mark.parametrize("kind", ["a FIFO", "a device"])
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_every_reader_refuses_in_one_line(
    reader: Callable[[Path, str], object], kind: str, tmp_path: Path
):
    with pytest.raises(UserError) as caught:
        reader(tmp_path, kind)
    assert "\n" not in str(caught.value)
    assert f"is {kind}, expected a regular file" in str(caught.value) or "no such config" in str(
        caught.value
    )


def test_names_that_no_file_can_have(tmp_path: Path, capsys: pytest.CaptureFixture):
    with pytest.raises(OSError, match="the name holds a NUL character"):
        open_regular(tmp_path / "a\0b")
    (tmp_path / "loop").symlink_to("loop")
    for name, said in (
        ("a" * 5000, "File name too long"),
        ("loop", "Too many levels of symbolic links"),
    ):
        code = run_for_exit_code(lambda name=name: (tmp_path / name).stat() and None)
        assert code == USER_ERROR
        line = capsys.readouterr().err
        assert (
            line.endswith(f": {said}; choose another name\n")
            and line.count("\n") == 1
            and len(line) < 200
        )


def test_a_file_has_at_most_as_many_bytes_as_asked_for(tmp_path: Path):
    with open(tmp_path / "x", "wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(OSError, match="is larger than 1 MiB"):
        read_bytes(tmp_path / "x", 2**20)
    (tmp_path / "y").write_text(json.dumps({"a": 1}))
    assert read_json(tmp_path / "y") == {"a": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[" * 100_000, "JSON nested too deep"),
        (b"9" * 5000, "a number of more digits than can be read"),
        (b'{"a":\n 1,}', r"line 2 column 4: invalid JSON"),
        (b'{"a": "\xff"}', "a byte that is not UTF-8 at 7"),
    ],
)
def test_json_that_cannot_be_read(text: bytes, said: str):
    with pytest.raises(ValueError, match=said):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2J\nb", r"a\x1b[2J\nb"),
        ("gpj.\u202egnp", r"gpj.\u202egnp"),  # the rest would be written from right to left
        ("a\u2066b\u2069c\u061cd\u200fe", r"a\u2066b\u2069c\u061cd\u200fe"),
        ("pass\u200bword \ufeffx\u00ad", r"pass\u200bword \ufeffx\xad"),
        ("pass\u200dword", r"pass\u200dword"),
        ("one\u2028two\u2029three", r"one\u2028two\u2029three"),
        ("\ue000\U000e0041\U000e0100\u3164", r"\ue000\U000e0041\U000e0100\u3164"),
        ("half \ud800", r"half \ud800"),
        ("unassigned \u0378", r"unassigned \u0378"),
    ],
)
def test_what_would_not_be_seen_is_written_out(text: str, shown: str):
    assert escape_invisible(text) == shown
    assert str(UserError(text)) == shown


@pytest.mark.parametrize(
    "text",
    [
        "plain text",
        "déjà vu, 漢字\u3000かな, עברית, العربية",
        "می\u200cخواهم",  # Persian: a joiner between letters
        "क्\u200dष",  # Hindi
        "👩\u200d💻 ❤\ufe0f",
        "a\u00a0b",
        "\u0600",  # the Arabic number sign, a format character with a shape
    ],
)
def test_what_is_seen_stays(text: str):
    assert escape_invisible(text) == text


def test_what_is_kept():
    assert escape_invisible("a\nb\tc", keep="\n") == "a\nb\\tc"
