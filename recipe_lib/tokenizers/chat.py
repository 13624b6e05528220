"""Chat templates. A template is a program, and mostly somebody else's, also where the user has named its file: it is
rendered in a separate process with bounded memory and time (`template_process`).

There is one such process for each of ours, whatever the number of templates. It is started anew after a fork, since
two processes cannot share its pipes, and after it had to be stopped.
"""

import atexit
import contextlib
import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from recipe_lib.config.local_files import OTHER_TEMPLATE
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import template_process
from recipe_lib.tokenizers.template_process import Options, RenderRequest

TIMEOUT_SECONDS = 10.0  # that a template may take to compile, or to write one conversation once
MAX_ANSWER_BYTES = 1 << 31  # bytes; what the process may answer is far below, by its own limits

START_SECONDS = 60.0  # that the process may take to start, on a machine with better things to do
_TOO_LONG = "was stopped: it took more than {:g} s"

_TODAY = re.compile(r"""strftime_now\(\s*(["'])([^"'\\{}]*)\1\s*\)""")

Messages = Sequence[Mapping[str, Any]]


class _Stopped(Exception):  # noqa: N818  (turned into a DataError)
    """The process is gone; str(): why, as the end of a sentence about the template."""


class _TemplateProcess:
    """The process that renders, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._known = set[str]()  # names of the templates that it has compiled

    def ask(self, template: Mapping[str, Any], request: Mapping[str, Any] | None) -> Any:
        """Make the template known, then put the request. Raises _Stopped; the process is gone then."""
        with self._lock:
            try:
                if self._child is None:
                    self._child = _start()
                if template["name"] not in self._known:
                    fault = _exchange(self._child, template, START_SECONDS)
                    if fault is not None:
                        return fault
                    self._known.add(template["name"])
                return None if request is None else _exchange(self._child, request)
            except _Stopped:
                self.drop(kill=True)
                raise

    def drop(self, kill: bool) -> None:
        """Give back the pipes. kill: also end the process."""
        child, self._child = self._child, None
        self._known.clear()
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        if kill:
            child.kill()
            child.wait()
        else:
            child.returncode = 0  # it is another process' child; ours must not wait for it

    def after_fork(self) -> None:
        """Leave the parent's process to it."""
        self._lock = threading.Lock()
        self.drop(kill=False)


def _start() -> subprocess.Popen[bytes]:
    """Return the process. Raises _Stopped."""
    folders = sorted({str(Path(module.__file__ or "").parents[1]) for module in (jinja2, markupsafe)})
    program = "import runpy, sys; sys.path += sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, template_process.__file__, *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=kept,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for us; without us its input ends, and so does it
        )
    except OSError as error:
        raise _Stopped(f"could not be started in a separate process ({error.strerror})") from None


def _exchange(child: subprocess.Popen[bytes], request: Mapping[str, Any], more: float = 0.0) -> Any:
    """Return what the process answers, within the request's seconds and `more`. Raises _Stopped."""
    assert child.stdin and child.stdout
    line = json.dumps(request, default=str).encode("ascii") + b"\n"
    try:
        child.stdin.write(line)
        child.stdin.flush()
        return json.loads(_read_line(child.stdout.fileno(), time.monotonic() + request["seconds"] + more))
    except TimeoutError:  # it watches the time itself, so it does not even do that
        raise _Stopped(_TOO_LONG.format(TIMEOUT_SECONDS)) from None
    except (OSError, ValueError):
        raise _Stopped(_why_ended(child)) from None


def _read_line(descriptor: int, deadline: float) -> bytes:
    """Return the bytes up to the next line end.

    Raises TimeoutError; ValueError: the other side ended, or wrote too many bytes."""
    waiter = select.poll()
    waiter.register(descriptor, select.POLLIN)
    parts = list[bytes]()
    length = 0
    while length < MAX_ANSWER_BYTES:
        if not waiter.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        part = os.read(descriptor, 1 << 20)
        if not part:
            break
        parts.append(part)
        length += len(part)
        if part.endswith(b"\n"):
            return b"".join(parts)
    raise ValueError


def _why_ended(child: subprocess.Popen[bytes]) -> str:
    """Return why the process has ended; one that has not is killed."""
    try:
        code = child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    if code == -signal.SIGALRM:
        return _TOO_LONG.format(TIMEOUT_SECONDS)
    how = f"signal {-code}" if code < 0 else f"code {code}"
    return f"was stopped: its process ended with {how} (it may use {template_process.MEMORY >> 20} MiB)"


_process = _TemplateProcess()
os.register_at_fork(after_in_child=_process.after_fork)
atexit.register(_process.drop, kill=True)


def with_date_of_training(source: str) -> str:
    """The template with the date that it shows in training in the place of each `strftime_now("%d %b %Y")`: other
    programs then write the text of training, whatever the day. A format that is no plain text stays as it is."""
    return _TODAY.sub(lambda found: f'"{template_process.DATE.strftime(found[2])}"', source)


class ChatTemplate:
    """A compiled chat template. source: its Jinja; place: the file it came from, and remedy: what to do about one that
    is of no use, for error lines."""

    def __init__(
        self, source: str, place: str, special_tokens: Mapping[str, str | None], remedy: str = OTHER_TEMPLATE
    ) -> None:
        """Raises DataError for what is not Jinja."""
        self.source, self.place, self._remedy = source, place, remedy
        tokens = {role: text for role, text in special_tokens.items() if text is not None}
        name = hashlib.sha256(json.dumps([source, tokens], sort_keys=True).encode()).hexdigest()
        self._template = {
            "name": name,
            "source": source,
            "tokens": tokens,
            "seconds": TIMEOUT_SECONDS,
            "remedy": remedy,
        }
        fault = self._ask(None)
        if fault is not None:
            raise DataError(f"{place}: {fault}")

    def render_many(
        self,
        messages: Messages,
        wanted: Sequence[RenderRequest],
        tools: Messages | None = None,
        options: Options | None = None,
    ) -> list[str | DataError]:
        """Renderings of one conversation, in one go; where the template objects, what it said.

        options: `marks`, two letters to write around what `{% generation %}` holds; `variables`, more that the template
        sees. Raises DataError: the template took too long or had to be stopped."""
        request = {
            "name": self._template["name"],
            "messages": list(messages),
            "wanted": list(wanted),
            "tools": tools,
            "options": options,
            "seconds": (1 + len(wanted)) * TIMEOUT_SECONDS,
        }
        pairs = self._ask(request)
        return [DataError(f"{self.place}: {fault}") if text is None else text for text, fault in pairs]

    def _ask(self, request: Mapping[str, Any] | None) -> Any:
        try:
            return _process.ask(self._template, request)
        except _Stopped as stopped:
            raise DataError(f"{self.place}: the chat template {stopped}; {self._remedy}") from None
