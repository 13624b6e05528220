"""Templates of others run in a process of their own, which cannot hang, fill the memory, open a
file or stay behind.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipe_lib.errors import DataError
from recipe_lib.tokenizers import chat_template, load_tokenizer, template_process
from recipe_lib.tokenizers.chat_template import ChatTemplate
from tests.tokenizers.made import CHATML, render, write_json

MESSAGES = [{"role": "user", "content": "a"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def child() -> int:
    """The number of the process that renders."""
    child = chat_template._process._child
    assert child is not None
    return child.pid


def template(source: str = "{{ messages[0].content }}") -> ChatTemplate:
    return ChatTemplate(source, "chat.jinja", {})


def test_one_process_serves_all_templates():
    first, second = template("1{{ messages[0].content }}"), template("2{{ messages[0].content }}")
    number = child()
    assert [render(one.render_many, MESSAGES, False) for one in (first, second, first)] == [
        "1a",
        "2a",
        "1a",
    ]
    assert child() == number != os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize("source", [ENDLESS, "{{ messages | join }}" + ENDLESS])
def test_a_template_that_does_not_end_is_stopped(source, monkeypatch):
    monkeypatch.setattr(chat_template, "TIMEOUT_SECONDS", 0.4)
    endless, number, begun = template(source), child(), time.monotonic()
    line = (
        r"^chat.jinja: the chat template was stopped: it took more than 0.4 s; set"
        r" tokenizer.chat_template to another"
    )
    with pytest.raises(DataError, match=line):
        render(endless.render_many, MESSAGES, False)
    assert time.monotonic() - begun < 10
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    assert render(template().render_many, MESSAGES, False) == "a", (
        "a new process goes on with other templates"
    )


@pytest.mark.slow
def test_a_process_that_does_not_even_answer_is_ended(monkeypatch):
    monkeypatch.setattr(chat_template, "TIMEOUT_SECONDS", 0.2)
    ours = template()
    os.kill(child(), signal.SIGSTOP)
    with pytest.raises(DataError, match="the chat template was stopped: "):
        render(ours.render_many, MESSAGES, False)
    assert render(ours.render_many, MESSAGES, False) == "a"


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content | center(2000000000) }}", "{{ 'x' | center(2000000000) }}"]
)
def test_memory_is_bounded(source):
    with pytest.raises(
        DataError,
        match=r"chat.jinja: the chat template (failed \(it needs too much memory\)|was stopped)",
    ):
        render(template(source).render_many, MESSAGES, False)
    assert render(template().render_many, MESSAGES, False) == "a"


@pytest.mark.slow
def test_a_process_that_somebody_has_killed():
    ours = template()
    os.kill(child(), signal.SIGKILL)
    with pytest.raises(
        DataError,
        match=r"was stopped: its process ended with signal 9 \(it may use 1024 MiB\); set",
    ):
        render(ours.render_many, MESSAGES, False)
    assert render(ours.render_many, MESSAGES, False) == "a"


@pytest.mark.slow
def test_a_stopped_template_ends_the_run_and_is_no_bad_row(tmp_path, monkeypatch):
    from recipe_lib.data.formats import build_conversation
    from recipe_lib.data.label_masks import Encoder

    source = "{% if messages|length == 1 %}" + ENDLESS + "{% endif %}" + CHATML
    encoder = Encoder(load_tokenizer(write_json(tmp_path, template=source)), "chat")
    monkeypatch.setattr(chat_template, "TIMEOUT_SECONDS", 0.4)
    with pytest.raises(DataError, match="it took more than 0.4 s"):
        encoder.encode(build_conversation([*MESSAGES, {"role": "assistant", "content": "b"}]))


def test_a_forked_process_has_its_own():
    ours = template()
    number = child()
    forked = os.fork()
    if not forked:
        good = render(ours.render_many, MESSAGES, False) == "a" and child() != number
        chat_template._process.drop(kill=True)
        os._exit(0 if good else 1)
    assert os.waitpid(forked, 0)[1] == 0
    assert render(ours.render_many, MESSAGES, False) == "a" and child() == number


def test_nothing_is_left_behind_and_nothing_is_handed_on():
    program = (
        "import os, pathlib\n"
        "from recipe_lib.tokenizers import chat_template as chat\n"
        "chat.ChatTemplate('x', 'p', {})\n"
        "number = chat._process._child.pid\n"
        "assert b'SECRET' not in pathlib.Path(f'/proc/{number}/environ').read_bytes()\n"
        "assert len(os.listdir(f'/proc/{number}/fd')) == 3 and os.getsid(number) == number\n"
        "print(number)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "SECRET_TOKEN": "SECRET", "PYTHONPATH": os.getcwd()},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        ("open('/etc/hostname')", "OSError"),
        ("__import__('socket').socket()", "OSError"),
        ("bytearray(2 << 30)", "MemoryError"),
        ("open(sys.argv[1], 'w').write('x')", "OSError"),
        ("os.write(int(sys.argv[2]), b'x')", "OSError"),
    ],
)
def test_the_limits_hold_whatever_the_sandbox_does(attempt, error, tmp_path: Path):
    program = (
        "import os, signal, socket, sys; sys.path.insert(0,"
        f" {str(Path(template_process.__file__).parent)!r})\nimport"
        " template_process\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f" template_process._limit_process()\ntry:\n    {attempt}\nexcept {error}:\n    sys.exit(7)"
    )
    with (tmp_path / "open").open("w") as opened:
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "new"), str(opened.fileno())], pass_fds=[opened.fileno()],
            capture_output=True,
        )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert not (tmp_path / "new").exists() and not (tmp_path / "open").read_text()


def test_the_users_own_file_is_rendered_there_too(tmp_path, monkeypatch):
    folder = write_json(tmp_path / "model", template="theirs")
    (tmp_path / "own.jinja").write_text("ours")
    asked = []
    ask = chat_template._process.ask
    monkeypatch.setattr(
        chat_template._process,
        "ask",
        lambda request, template: asked.append(template["source"]) or ask(request, template),
    )
    assert (
        render(load_tokenizer(folder, tmp_path / "own.jinja").render_chats, MESSAGES, False)
        == "ours"
    )
    assert set(asked) == {"ours"}
