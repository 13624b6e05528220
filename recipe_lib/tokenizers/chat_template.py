"""Chat templates: programs, and mostly somebody else's, that write a conversation as text.

`ChatTemplate` has them rendered in a separate process with bounded memory and time
(`template_process`). `find_turn_end` finds out how one ends an answer. The process also matches
patterns of a stranger's file (`match_apart`).
"""

import atexit
import contextlib
import hashlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from recipe_lib.config.local_files import OTHER_TEMPLATE
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import template_process
from recipe_lib.tokenizers.vocabulary import AddedToken

_ANSWER = "\ue123"  # a letter that no template writes, in the place of an answer


@dataclass(frozen=True)
class TurnEnd:
    """The end of an answer in a chat template."""

    # The special token that ends it, the last one of several (Command R7B). Empty: none.
    token: str = ""
    # What follows it where an answer comes last (a line end, Phi-3's EOS): no model is asked.
    closing: str = ""
    # The special token of the user's next turn, if that alone ends the answer (GLM-4.5).
    next_turn: str = ""


def find_turn_end(
    render_many: Callable[..., Sequence[str | DataError]],
    split: Callable[[str], Iterable[tuple[str, AddedToken | None]]],
    stops: Collection[str],
    bos: str | None,
) -> TurnEnd:
    """Return how a template ends an answer: one that comes last, and one that a question follows.

    render_many: `ChatTemplate.render_many`. split: a text as (what is before a special token, the
    token). stops: special tokens that are known to end answers. bos: BOS as text, if there is one.
    """
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    requests = [template_process.RenderRequest(num_messages) for num_messages in (2, 3)]
    last, followed = render_many([*messages, messages[0]], requests)
    if isinstance(last, DataError) or _ANSWER not in last:
        return TurnEnd()  # a template for other conversations than this one
    pieces_at_end = _list_pieces_after_answer(split, last)
    pieces_before_turn = []
    if not isinstance(followed, DataError) and _ANSWER in followed:
        pieces_before_turn = _list_pieces_after_answer(split, followed)
    # What comes after an answer in both cases belongs to the answer.
    pairs = zip(pieces_at_end, pieces_before_turn, strict=False)
    shared = [piece for piece, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    first = next((at for at, (_, is_special) in enumerate(shared) if is_special), None)
    if first is not None:
        run = [text for text, _ in takewhile(lambda piece: piece[1], shared[first:])]
        rest = "".join(text for text, _ in pieces_at_end[first + len(run) :])
        # Some begin the next turn without being asked: that is no part of what the model stops at.
        if rest.strip():
            last_stop = max((at for at, text in enumerate(run) if text in stops), default=0)
            run = run[: last_stop + 1]
        closing = "".join(text for text, _ in pieces_at_end[first + len(run) :])
        return TurnEnd(run[-1], closing)
    special_texts = [text for text, is_special in pieces_at_end if is_special]
    if special_texts:
        # Without a second rendering, what follows the first may begin another turn.
        return TurnEnd(special_texts[-1] if pieces_before_turn else special_texts[0])
    next_pieces = pieces_before_turn[len(pieces_at_end) :]
    text, is_special = next_pieces[0] if next_pieces else ("", False)
    return TurnEnd(next_turn=text if is_special and text != bos else "")


def _list_pieces_after_answer(
    split: Callable[[str], Iterable[tuple[str, Any]]], rendered: str
) -> list[tuple[str, bool]]:
    """Return what follows the answer, as (text, True for a special token)."""
    pieces: list[tuple[str, bool]] = []
    for text, token in split(rendered[rendered.rindex(_ANSWER) + 1 :]):
        if text:
            pieces.append((text, False))
        if token is not None:
            pieces.append((token.content, token.special))
    return pieces


TIMEOUT_SECONDS = 10.0  # that a template may take to compile, or to write one conversation once
MAX_ANSWER_BYTES = 1 << 31  # bytes; what the process may answer is far below, by its own limits

START_SECONDS = 60.0  # that the process may take to start, on a busy machine
_TOO_LONG = "was stopped: it took more than {:g} s"

Messages = Sequence[Mapping[str, Any]]


# No error by name: it is turned into a DataError.
class Stopped(Exception):  # noqa: N818
    """The process is gone. Its text says why, as the end of a sentence about the template."""


class _TemplateProcess:
    """The process that renders, started when it is first needed.

    There is one for each process of ours, whatever the number of templates. It is started anew
    after a fork, since two processes cannot share its pipes, and after it had to be stopped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._known = set[str]()  # names of the templates that it has compiled

    def ask(
        self, request: Mapping[str, Any] | None, template: Mapping[str, Any] | None = None
    ) -> Any:
        """Make the template known, if there is one, then return the answer to the request.

        Raises Stopped; the process is gone then.
        """
        with self._lock:  # threads share the pipes
            try:
                more = 0.0 if self._child else START_SECONDS
                self._child = self._child or _start()
                if template is not None and template["name"] not in self._known:
                    fault = _exchange(self._child, template, START_SECONDS)
                    if fault is not None:
                        return fault
                    self._known.add(template["name"])
                return None if request is None else _exchange(self._child, request, more)
            except Stopped:
                self.drop(kill=True)
                raise

    def drop(self, kill: bool) -> None:
        """Give back the pipes. kill: also end the process."""
        child = self._child
        self._child = None
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

    def reset_after_fork(self) -> None:
        """Leave the parent's process to it."""
        self._lock = threading.Lock()
        self.drop(kill=False)


def _start() -> subprocess.Popen[bytes]:
    """Start the process that renders. Raises Stopped."""
    # Found here and imported there alone, where nothing else is on the path.
    specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    folders = sorted({str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin})
    program = (
        "import runpy, sys; sys.path += sys.argv[2:]; runpy.run_path(sys.argv[1],"
        " run_name='__main__')"
    )
    # No other variable: they may hold tokens and passwords.
    environment = {
        name: os.environ[name]
        for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
        if name in os.environ
    }
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, template_process.__file__, *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for us; without us its input ends, and so does it
        )
    except OSError as error:
        raise Stopped(f"could not be started in a separate process ({error.strerror})") from None


def _exchange(child: subprocess.Popen[bytes], request: Mapping[str, Any], more: float = 0.0) -> Any:
    """Return what the process answers, within the request's seconds and `more`. Raises Stopped."""
    assert child.stdin and child.stdout
    try:
        child.stdin.write(json.dumps(request, default=str).encode("ascii") + b"\n")
        child.stdin.flush()
        waiter = select.poll()
        waiter.register(child.stdout, select.POLLIN)
        # The process watches the time itself: without an answer it does not even do that.
        if not waiter.poll(1000 * (request["seconds"] + more)):
            raise Stopped(_TOO_LONG.format(TIMEOUT_SECONDS))
        return json.loads(child.stdout.readline(MAX_ANSWER_BYTES))
    except (OSError, ValueError):  # no answer, or a part of one
        raise Stopped(_explain_end(child)) from None


def _explain_end(child: subprocess.Popen[bytes]) -> str:
    """Return why the process has ended; kill one that has not."""
    try:
        code = child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    if code == -signal.SIGALRM:
        return _TOO_LONG.format(TIMEOUT_SECONDS)
    status = f"signal {-code}" if code < 0 else f"code {code}"
    return (
        f"was stopped: its process ended with {status} (it may use {template_process.MEMORY >> 20}"
        " MiB)"
    )


_process = _TemplateProcess()
os.register_at_fork(after_in_child=_process.reset_after_fork)
atexit.register(_process.drop, kill=True)


def match_apart(
    patterns: Sequence[str], names: Sequence[str], whole: bool, seconds: float
) -> list[int | None] | str:
    """Return what `template_process.match_patterns` does, from the process that renders.

    A pattern of a stranger's file may take for ever to match. seconds: that it may take. Raises
    Stopped.
    """
    answer: list[int | None] | str = _process.ask(
        {"patterns": patterns, "names": names, "whole": whole, "seconds": seconds}
    )
    return answer


class ChatTemplate:
    """A compiled chat template.

    source: its Jinja. place: the file it came from, for error lines.
    """

    def __init__(
        self,
        source: str,
        place: str,
        special_tokens: Mapping[str, str | None],
        remedy: str = OTHER_TEMPLATE,
    ) -> None:
        """Compile a template. Raises DataError for a source that is not Jinja.

        special_tokens: by their names, `bos_token` etc. remedy: what to do about a template that is
        of no use, for error lines.
        """
        self.source = source
        self.place = place
        self._remedy = remedy
        tokens = {role: text for role, text in special_tokens.items() if text is not None}
        # By its contents: the process knows a template that two tokenizers have once.
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
        requests: Sequence[template_process.RenderRequest],
        tools: Messages | None = None,
        options: template_process.Options | None = None,
    ) -> list[str | DataError]:
        """Return renderings of one conversation; where the template objects, an error of its words.

        options: `marks`, two letters to write around what `{% generation %}` holds; `variables`,
        more that the template sees. Raises DataError if the template took too long or had to be
        stopped.
        """
        pairs = self._ask(
            {
                "name": self._template["name"],
                "messages": list(messages),
                "wanted": list(requests),
                "tools": tools,
                "options": options,
                "seconds": (1 + len(requests)) * TIMEOUT_SECONDS,
            }
        )
        return [
            DataError(f"{self.place}: {fault}") if text is None else text for text, fault in pairs
        ]

    def _ask(self, request: Mapping[str, Any] | None) -> Any:
        try:
            return _process.ask(request, self._template)
        except Stopped as stopped:
            raise DataError(f"{self.place}: the chat template {stopped}; {self._remedy}") from None
