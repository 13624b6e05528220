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
import selectors
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
from recipe_lib.tokenizers.template_process import Options, Wanted

TIMEOUT_SECONDS = 10.0  # that a template may take to compile, or to write one conversation once
MAX_ANSWER_BYTES = 1 << 31  # bytes; what the process may answer is far below, by its own limits

START_SECONDS = 60.0  # that the process may take to start, on a machine with better things to do
_TOO_LONG = "was stopped: it took more than {:g} s"

_TODAY = re.compile(r"""strftime_now\(\s*(["'])([^"'\\{}]*)\1\s*\)""")

Messages = Sequence[Mapping[str, Any]]


class _Stopped(Exception):  # noqa: N818  (turned into a DataError)
    """The process is gone; str(): why, as the end of a sentence about the template."""


class _TemplateProcess:
    """The process and its pipes. known: names of the templates that it has compiled."""

    def __init__(self) -> None:
        folders = sorted({str(Path(module.__file__ or "").parents[1]) for module in (jinja2, markupsafe)})
        program = "import runpy, sys; sys.path += sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}
        self.known: set[str] = set()
        try:
            self._child = subprocess.Popen(
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
        self._selector = selectors.DefaultSelector()
        assert self._child.stdin and self._child.stdout
        self._input, self._output = self._child.stdin, self._child.stdout
        self._selector.register(self._output, selectors.EVENT_READ)

    def ask(self, request: Mapping[str, Any], seconds: float) -> Any:
        """What the process answers, within so many seconds. Raises _Stopped; the process is of no use then."""
        line = json.dumps(request, default=str).encode("ascii") + b"\n"
        try:
            self._input.write(line)
            self._input.flush()
            return json.loads(self._line(time.monotonic() + seconds))
        except TimeoutError:  # it watches the time itself, so it does not even do that
            raise _Stopped(_TOO_LONG.format(TIMEOUT_SECONDS)) from None
        except (OSError, ValueError):
            raise _Stopped(self._why()) from None

    def _line(self, deadline: float) -> bytes:
        """The bytes up to the next line end. Raises TimeoutError; ValueError: it ended, or wrote too many bytes."""
        parts, length = [], 0
        while length < MAX_ANSWER_BYTES:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            part = os.read(self._output.fileno(), 1 << 20)
            if not part:
                break
            parts.append(part)
            length += len(part)
            if part.endswith(b"\n"):
                return b"".join(parts)
        raise ValueError

    def _why(self) -> str:
        try:
            code = self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            code = self._child.wait()
        if code in (-signal.SIGALRM, -signal.SIGPROF):
            return _TOO_LONG.format(TIMEOUT_SECONDS)
        how = f"signal {-code}" if code < 0 else f"code {code}"
        return f"was stopped: its process ended with {how} (it may use {template_process.MEMORY >> 20} MiB)"

    def close(self, kill: bool) -> None:
        """Gives back the pipes. kill: also ends the process."""
        self._selector.close()
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):
                pipe.close()
        if kill:
            self._child.kill()
            self._child.wait()
        else:
            self._child.returncode = 0  # it is another process' child; ours must not wait for it


class _Keeper:
    """The one process, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _TemplateProcess | None = None

    def ask(self, template: Mapping[str, Any], request: Mapping[str, Any] | None, seconds: float) -> Any:
        """Makes the template known, then puts the request. Raises _Stopped."""
        with self._lock:
            try:
                if self._process is None:
                    self._process = _TemplateProcess()
                if template["name"] not in self._process.known:
                    fault = self._process.ask(template, START_SECONDS + TIMEOUT_SECONDS)
                    if fault is not None:
                        return fault
                    self._process.known.add(template["name"])
                return None if request is None else self._process.ask(request, seconds)
            except _Stopped:
                self._drop(kill=True)
                raise

    def _drop(self, kill: bool) -> None:
        if self._process is not None:
            self._process.close(kill)
        self._process = None

    def after_fork(self) -> None:
        """The parent's process is not ours."""
        self._lock = threading.Lock()
        self._drop(kill=False)

    def at_exit(self) -> None:
        """Leaves no process behind."""
        self._drop(kill=True)


_keeper = _Keeper()
os.register_at_fork(after_in_child=_keeper.after_fork)
atexit.register(_keeper.at_exit)


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
        fault = self._ask(None, 0)
        if fault is not None:
            raise DataError(f"{place}: {fault}")

    def render(self, messages: Messages, add_generation_prompt: bool, tools: Messages | None = None) -> str:
        """The conversation as text. Raises DataError with what the template itself objects to."""
        (found,) = self.render_many(messages, [(len(messages), add_generation_prompt, ())], tools)
        if isinstance(found, DataError):
            raise found
        return found

    def render_many(
        self,
        messages: Messages,
        wanted: Sequence[Wanted],
        tools: Messages | None = None,
        options: Options | None = None,
    ) -> list[str | DataError]:
        """Renderings of parts of one conversation, in one go: (how many of its messages, whether a prompt for the next
        answer follows, (number, content) to write in place of a message's own). options: `marks`, two letters to write
        around what `{% generation %}` holds; `variables`, more that the template sees. Where the template objects,
        what it said. Raises DataError: the template took too long or had to be stopped."""
        request = {"name": self._template["name"], "messages": list(messages), "wanted": list(wanted)}
        limits = {"tools": tools, "options": options, "seconds": TIMEOUT_SECONDS}
        pairs = self._ask(request | limits, (1 + len(wanted)) * TIMEOUT_SECONDS)
        return [DataError(f"{self.place}: {fault}") if text is None else text for text, fault in pairs]

    def _ask(self, request: Mapping[str, Any] | None, seconds: float) -> Any:
        try:
            return _keeper.ask(self._template, request, seconds)
        except _Stopped as stopped:
            raise DataError(f"{self.place}: the chat template {stopped}; {self._remedy}") from None
