"""The file of `tune generate --prompts`: every line is read as it is or refused by its number; and
that of --out.
"""

import json
import os
from pathlib import Path

import pytest

from recipe_lib.cli.answer import Answers, read_prompts
from recipe_lib.errors import ConfigError, DataError, UserError
from tests.forked import call_forked

# What JSON allows inside of a string, and what ends a line elsewhere.
NO_ENDS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"
SETTINGS = "0123456789abcdef"


@pytest.mark.parametrize("letter", NO_ENDS)
def test_a_line_ends_with_a_newline_alone(letter: str, tmp_path: Path) -> None:
    texts = [f"one{letter}two", "three"]
    rows, lines = tmp_path / "prompts.jsonl", tmp_path / "prompts.txt"
    rows.write_text(
        "".join(json.dumps({"prompt": text}, ensure_ascii=letter < " ") + "\n" for text in texts),
        "utf-8",
    )
    lines.write_text("\n".join(texts), "utf-8")
    assert read_prompts(rows) == read_prompts(lines) == texts


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_ends_of_lines_and_a_mark_of_the_encoding(end: str, mark: str, tmp_path: Path) -> None:
    rows, lines = tmp_path / "prompts.jsonl", tmp_path / "prompts.txt"
    rows.write_bytes(f'{mark}{{"prompt": "a"}}{end}{end}{{"prompt": "b"}}{end}'.encode())
    lines.write_bytes(f"{mark}a{end}{end}b{end}".encode())
    assert read_prompts(rows) == read_prompts(lines) == ["a", "b"]


def test_conversations_in_the_spellings_that_training_reads(tmp_path: Path) -> None:
    asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    rows = [
        {"messages": asked},
        {"prompt": asked},
        {"messages": [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "Hi"}]},
        {"messages": [asked[0], {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        {"messages": asked, "id": 7, "source": "mine"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_prompts(path) == [asked] * len(rows)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[" * 100_000, "JSON nested too deep, expected an object a line"),
        (f'{{"prompt": {"7" * 6000}}}', "found a number of more digits than can be read"),
        ('{"prompt": "\\ud800"}', "found half a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "a\\udfff"}]}', "found half a surrogate pair"),
        (
            '{"messages": [{"role": "user", "content": "a", "name": "\\ud800"}]}',
            "found half a surrogate pair",
        ),
        (
            '{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}',
            "found prompt and messages, expected",
        ),
        ('{"prompt": "a", "prompt": "b"}', "found the key 'prompt' twice"),
        (
            '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
            "found the key 'content' twice",
        ),
        ('{"prompt": "a", "prompt": 5}', "found the key 'prompt' twice"),
        ('{"prompt": ""}', "prompt is empty; give a text"),
        ('{"prompt": 5}', "prompt: found a number, expected {"),
        ('{"prompt": null}', "prompt: found null, expected {"),
        ('{"prompt": "a", "system": "Be kind."}', "found system, which no prompt is read with"),
        ('{"prompt": "a", "tools": []}', "found tools, which no prompt is read with"),
        (
            '{"prompt": "a", "history": [], "x": 1}',
            "found history, x, which no prompt is read with",
        ),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": ["a", 5]}', ".messages[0]: found text, expected an object"),
        ('{"messages": [{"role": "user"}]}', ".messages[0].content: found nothing, expected text"),
        (
            '{"messages": [{"role": "robot", "content": "a"}]}',
            ".messages[0].role: found 'robot', expected one of",
        ),
        (
            '{"messages": [{"role": "tool", "content": "a"}]}',
            ".messages[0]: found tool after the start",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a"}]}',
            "the last message is the assistant's",
        ),
        ('"a"', "found text, expected an object"),
        ("{}", "found no keys, expected"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_by_its_number(
    line: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n', "utf-8")
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}:2: ") and said in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("ending", [".jsonl", ".txt"])
def test_what_is_no_file_is_refused_without_waiting(ending: str, tmp_path: Path) -> None:
    def said(name: str) -> str:
        with pytest.raises(UserError) as caught:
            read_prompts(tmp_path / f"{name}{ending}")
        return str(caught.value)

    (tmp_path / f"folder{ending}").mkdir()
    os.mkfifo(tmp_path / f"fifo{ending}")
    (tmp_path / f"endless{ending}").symlink_to("/dev/zero")
    (tmp_path / f"none{ending}").symlink_to(tmp_path / "nowhere")
    (tmp_path / f"latin{ending}").write_bytes(b"\xe9")
    with open(tmp_path / f"large{ending}", "wb") as file:
        file.truncate(2**40)
    for name, words in {
        "folder": "is a folder", "fifo": "is a FIFO", "endless": "is a device", "none": "No such file or directory",
        "latin": "is not UTF-8", "large": "is larger than 256 MiB", "missing": "No such file or directory",
    }.items():  # fmt: skip
        line = call_forked(lambda name=name: said(name))
        assert line.startswith("--prompts: ") and words in line and "\n" not in line


def begin(number: int = 1, settings: str = SETTINGS) -> bytes:
    return json.dumps(
        {"number": number, "settings": settings, "prompt": "a", "answer": "b"}
    ).encode()


@pytest.mark.parametrize("whole", [0, 1, 3])
@pytest.mark.parametrize("cut", [1, 5, 20, 45, 60])
def test_half_an_answer_is_written_anew(whole: int, cut: int, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    lines = b"".join(begin(number + 1) + b"\n" for number in range(whole))
    path.write_bytes(lines + begin(whole + 1)[:cut])
    answers = Answers(path, SETTINGS)
    assert (
        answers.count == whole and path.read_bytes() == lines + begin(whole + 1)[:cut]
    )  # nothing is written yet
    answers.write([{"prompt": "a", "answer": "b"}])
    answers.close()
    assert path.read_bytes() == lines + begin(whole + 1) + b"\n"


@pytest.mark.parametrize("whole", [0, 1, 3])
@pytest.mark.parametrize(
    "end",
    [
        b"my notes",
        b'{"number": 9, "settings": "',
        begin(settings="f" * 16)[:60],
        b"\0\1\2",
        b"[1, 2]",
        b" ",
    ],
)
def test_half_a_line_of_something_else_stays(whole: int, end: bytes, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    content = b"".join(begin(number + 1) + b"\n" for number in range(whole)) + end
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"answers.jsonl:{whole + 1}: .*choose another --out"):
        Answers(path, SETTINGS)
    assert path.read_bytes() == content


def test_a_full_disk_cuts_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    first = begin() + b"\n"

    def answer() -> tuple[str, int]:
        answers = Answers(path, SETTINGS)
        with pytest.raises(UserError) as caught:
            for _ in range(3):
                answers.write([{"prompt": "a", "answer": "b"}])
        return str(caught.value), caught.value.exit_code

    said, code = call_forked(answer, disk_bytes=len(first) + 30)
    assert code == 6 and said.startswith(f"{path}: ") and path.read_bytes() == first
    answers = Answers(path, SETTINGS)
    answers.write([{"prompt": "a", "answer": "b"}])
    assert answers.count == 2 and path.read_bytes() == first + begin(2) + b"\n"
