"""The conversation of `tune generate`: lines of a pipe and of a terminal, and a message of the
system.
"""

import io
import os
import pty
import re
import select
import sys
import time
from pathlib import Path

import peft
import pytest
import torch
import transformers

from recipe_lib.cli.main import main
from tests.cli.adapter_runs import write_adapter_run
from tests.cli.commands import become_tune
from tests.cli.test_generate import write_model
from tests.report.terminal_screen import read_lines

LONG = ["--max-new-tokens", "12"]
REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{%"
    " endif %}{{ m.content }}{% endfor %}"
)
LEAVES_OUT = (
    "{% for m in messages %}{% if m.role != 'system' %}<s>{{ m.content }}</s>{% endif %}{% endfor"
    " %}<s>"
)


@pytest.fixture(scope="module")
def run(realdata: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output_dir of a run that trained an adapter."""
    folder = tmp_path_factory.mktemp("talk") / "run"
    write_adapter_run(realdata, folder)
    return folder


def piped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, text: str, *words: object
) -> tuple[str, str]:
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["generate", *map(str, words)]) == 0
    return capsys.readouterr()


def told(err: str) -> list[str]:
    """The notes, without the lines that say what was loaded and why an answer ended."""
    return [
        line
        for line in err.splitlines()
        if not line.startswith(("adapter:", "note: stopped after"))
    ]


@pytest.mark.slow
def test_a_pipe_is_answered_line_by_line(
    run: Path, realdata: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With the history: the second answer is that of transformers to both questions."""
    out, err = piped(monkeypatch, capsys, "Hi\n\nWho are you?\r\n", run, *LONG)
    first = piped(monkeypatch, capsys, "Hi", run, *LONG)[0]
    assert out.startswith(first) and out != first + first and told(err) == []
    assert main(["generate", str(run), "--prompt", "Hi", *LONG]) == 0
    assert capsys.readouterr().out == first

    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "adapter")
    turns = [("user", "Hi"), ("assistant", first.removesuffix("\n")), ("user", "Who are you?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    asked = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(
        realdata / "stories260K-hf", dtype=torch.float32
    )
    model = peft.PeftModel.from_pretrained(base, run / "adapter")
    answer = model.generate(**asked, max_new_tokens=12, do_sample=False)[
        0, asked["input_ids"].shape[1] :
    ]
    assert out == first + tokenizer.decode(answer, skip_special_tokens=True) + "\n"


@pytest.mark.slow
def test_commands_of_a_pipe(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    answer = piped(monkeypatch, capsys, "Hi\n", run, *LONG)[0]
    out, err = piped(monkeypatch, capsys, "Hi\n/reset\nHi\n/exit\nHi\n", run, *LONG)
    assert out == answer * 2 and told(err) == ["the conversation begins anew"]
    assert piped(monkeypatch, capsys, "", run)[0] == ""


def test_a_line_that_is_too_long_ends_a_pipe(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Whoever pairs answers with lines would take the next answer for this one's."""
    answer = piped(monkeypatch, capsys, "Hi\n", run, *LONG)[0]
    for before, again in (
        ("Hi\n\n", "; a line /reset before it begins anew"),
        ("Hi\n/reset\n", ""),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{before}{'cat ' * 600}\nHi\n"))
        assert main(["generate", str(run), *LONG]) == 2
        printed = capsys.readouterr()
        assert printed.out == answer
        line = told(printed.err)[-1]
        assert re.fullmatch(
            r"error: standard input: line 3: the conversation: \d+ tokens; the model takes 512,"
            r" completion included" + re.escape(again),
            line,
        )


def test_a_line_that_is_not_utf8(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nb\udcffb\n"))
    assert main(["generate", str(run), *LONG]) == 2
    line = "error: standard input: line 2 is not UTF-8; give it in UTF-8 text\n"
    assert capsys.readouterr().err.endswith(line)


def test_a_message_of_the_system(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    words = [run, "--system", "Be kind.", *LONG]
    out = piped(monkeypatch, capsys, "Hi\n/reset\nHi\n", *words)[0]
    assert main(["generate", *map(str, words), "--prompt", "Hi"]) == 0
    assert out == capsys.readouterr().out * 2
    assert out != piped(monkeypatch, capsys, "Hi\n/reset\nHi\n", run, *LONG)[0]


@pytest.mark.parametrize(
    ("template", "why"), [(REFUSES, "no system here"), (LEAVES_OUT, "does not write a system")]
)
def test_a_template_without_a_place_for_the_system(
    template: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_model(tmp_path / "model", template=template)
    capsys.readouterr()
    for more in (["--prompt", "Hi"], []):
        assert main(["generate", str(folder), "--system", "Be kind.", *more]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        assert printed.err.startswith("error: --system: ") and why in printed.err
        assert printed.err.endswith("; leave it out, and put it into the question\n")


class Terminal:
    """`tune` on a pseudo-terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.process, self.side = pty.fork()
        if self.process == 0:
            become_tune(*words, TERM="xterm")
        self.text = ""

    def until(self, end: str, seconds: float = 60, more: int = 0) -> str:
        """What is written until it ends so, or until there are `more` letters; else up to the end
        of the process.
        """
        begun, deadline = len(self.text), time.monotonic() + seconds
        while time.monotonic() < deadline:
            new = self.text[begun:]
            if (end and new.endswith(end)) or (more and len(new) > more):
                return new
            if select.select([self.side], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.side, 65536).decode(errors="replace")
                except OSError:
                    return self.text[begun:]
        raise AssertionError(f"{self.text!r} does not end with {end!r}")

    def type(self, text: str) -> None:
        os.write(self.side, text.encode())


@pytest.mark.slow
def test_at_a_terminal(run: Path) -> None:
    """Rows of what goes on are gone before the first token; Ctrl-C stops an answer and no more,
    Ctrl-D ends.
    """
    terminal = Terminal("generate", str(run), "--max-new-tokens", "400")
    before = read_lines(terminal.until("\n> "))
    first = " ".join(" ".join(before[-3:-1]).split())  # in as many lines as it takes
    assert first.endswith(
        "adapter; /reset forgets what was said, /exit or Ctrl-D ends, Ctrl-C stops an answer"
    )
    assert before[-1] == ">" and not any(
        "importing" in line or "reading" in line for line in before
    )
    terminal.type(f"{'cat ' * 600}\n")
    long = " ".join(terminal.until("\n> ").split())
    assert (
        "the model takes 512, completion included; this line was left out, /reset begins anew"
        in long
    )
    os.write(terminal.side, b"caf\xff\n")  # readline itself drops a letter that is begun, as \xe9
    assert (
        "note: this line is not UTF-8 and was left out; check the terminal's encoding"
        in terminal.until("\n> ")
    )
    terminal.type("Once upon a time\n")
    said = terminal.until("", more=40)
    terminal.type("\x03")
    said += terminal.until("\n> ")
    assert "stopped" in said or "note: stopped after" in said
    assert "Traceback" not in said and "reading" not in read_lines(said)[1]
    terminal.type("\x04")
    terminal.until("")
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.process, 0)[1]) == 0
