"""Render chat templates in a separate process, since they are programs that others have written.

A `Tokenizer` makes a `ChatTemplate` and calls `render_many`. The separate process runs the file
template_process.py, with bounded memory and time. `find_turn_end` finds how a template ends an
answer. `match_apart` matches regular expressions from a downloaded file in the same process, as
they may never end.
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

_ANSWER = "\ue123"  # a private-use letter, which no template writes, as the text of an answer


@dataclass(frozen=True)
class TurnEnd:
    """The end of an answer in a chat template."""

    # The special token that ends an answer, the last if there are several (Command R7B); "": none
    token: str = ""
    # Text after that token at the end of a conversation (a line end, Phi-3's EOS), which the model
    # does not write
    closing: str = ""
    # The special token that begins the user's turn, if only that ends the answer (GLM-4.5); else ""
    next_turn: str = ""


def find_turn_end(
    render_many: Callable[..., Sequence[str | DataError]],
    split: Callable[[str], Iterable[tuple[str, AddedToken | None]]],
    stops: Collection[str],
    bos: str | None,
) -> TurnEnd:
    """Return how a template ends an answer; an empty TurnEnd if it renders no question and answer.

    Two conversations are compared: one that ends with the answer, one in which a question follows.
    render_many: `ChatTemplate.render_many`. split: splits a text into (text before an added token,
    the token). stops: texts of special tokens that are known to end answers. bos: text of BOS;
    None: there is none.
    """
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    # The first two of the messages, which end with the answer, and all three
    requests = [template_process.RenderRequest(num_messages) for num_messages in (2, 3)]
    last, followed = render_many([*messages, messages[0]], requests)
    if isinstance(last, DataError) or _ANSWER not in last:
        return TurnEnd()
    pieces_at_end = _list_pieces_after_answer(split, last)
    pieces_before_turn = []
    if not isinstance(followed, DataError) and _ANSWER in followed:
        pieces_before_turn = _list_pieces_after_answer(split, followed)
    # What comes after an answer in both cases belongs to the answer.
    pairs = zip(pieces_at_end, pieces_before_turn, strict=False)
    shared = [piece for piece, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    first = next((index for index, (_, is_special) in enumerate(shared) if is_special), None)
    if first is not None:
        end_tokens = [text for text, _ in takewhile(lambda piece: piece[1], shared[first:])]
        text_behind = "".join(text for text, _ in pieces_at_end[first + len(end_tokens) :])
        # Some templates begin the next turn here already; the model stops before that.
        if text_behind.strip():
            last_stop = max(
                (index for index, text in enumerate(end_tokens) if text in stops), default=0
            )
            end_tokens = end_tokens[: last_stop + 1]
        closing = "".join(text for text, _ in pieces_at_end[first + len(end_tokens) :])
        return TurnEnd(end_tokens[-1], closing)
    # The template ends an answer by a special token only where the conversation ends.
    special_texts = [text for text, is_special in pieces_at_end if is_special]
    if special_texts:
        # If the second rendering failed, a token after the first one may begin another turn.
        return TurnEnd(special_texts[-1] if pieces_before_turn else special_texts[0])
    # Nothing ends the answer but the token that begins the next turn.
    next_pieces = pieces_before_turn[len(pieces_at_end) :]
    text, is_special = next_pieces[0] if next_pieces else ("", False)
    return TurnEnd(next_turn=text if is_special and text != bos else "")


def _list_pieces_after_answer(
    split: Callable[[str], Iterable[tuple[str, Any]]], rendered: str
) -> list[tuple[str, bool]]:
    """Return what follows the answer, as (text, whether it is a special token).

    split: as for `find_turn_end`. rendered: contains `_ANSWER`.
    """
    pieces: list[tuple[str, bool]] = []
    for text, token in split(rendered[rendered.rindex(_ANSWER) + 1 :]):
        if text:
            pieces.append((text, False))
        if token is not None:
            pieces.append((token.content, token.special))
    return pieces


TIMEOUT_SECONDS = 10.0  # for a template to compile, or to render one conversation once
MAX_ANSWER_BYTES = 1 << 31  # of one answer; the process's own limits keep it far below

START_SECONDS = 60.0  # for the process to start, on a busy machine
_TOO_LONG = "was stopped: it took more than {:g} s"

Messages = Sequence[Mapping[str, Any]]  # {role, content, ...} of each message


# It has no Error in its name, as it is turned into a DataError.
class Stopped(Exception):  # noqa: N818
    """Raised if the process is gone; the text says why, as the end of a sentence."""


class _TemplateProcess:
    """The process that renders, started when it is first needed.

    A Python process has one for all its templates. A fork starts its own, since two processes
    cannot share its pipes. After it had to be stopped, the next request starts a new one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None  # None: not started, or stopped
        self._known = set[str]()  # names of the templates that the process has compiled

    def ask(
        self, request: Mapping[str, Any] | None, template: Mapping[str, Any] | None = None
    ) -> Any:
        """Have the template compiled, if it is not, then return the answer to the request.

        Returns the template's fault, a text, if it cannot be compiled. request: sent as a line of
        JSON; None: only compile. template: the request that compiles it; None: none is needed.
        Raises Stopped if the process could not be started, took too long or has ended.
        """
        with self._lock:  # threads share the pipes
            try:
                extra_seconds = 0.0 if self._child else START_SECONDS
                self._child = self._child or _start()
                if template is not None and template["name"] not in self._known:
                    fault = _exchange(self._child, template, START_SECONDS)
                    if fault is not None:
                        return fault
                    self._known.add(template["name"])
                return None if request is None else _exchange(self._child, request, extra_seconds)
            except Stopped:
                self.drop(kill=True)
                raise

    def drop(self, kill: bool) -> None:
        """Close this side's ends of the pipes. kill: also end the process."""
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
            # After a fork it is the parent's child: Popen must not wait for it.
            child.returncode = 0

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self.drop(kill=False)


def _start() -> subprocess.Popen[bytes]:
    """Start the process that renders. Raises Stopped if it cannot be started."""
    # `-I -S` leave site-packages out of the path: only the folders of these two packages are added.
    specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    folders = sorted({str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin})
    program = (
        "import runpy, sys; sys.path += sys.argv[2:]; runpy.run_path(sys.argv[1],"
        " run_name='__main__')"
    )
    # No other environment variables: they may hold tokens and passwords.
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
            # Ctrl-C goes to this process alone. When it ends, the input of the other one ends, and
            # so does that.
            start_new_session=True,
        )
    except OSError as error:
        raise Stopped(f"could not be started in a separate process ({error.strerror})") from None


def _exchange(child: subprocess.Popen[bytes], request: Mapping[str, Any], more: float = 0.0) -> Any:
    """Return the process's answer to a request, whose key `seconds` is its time limit.

    more: seconds to wait beyond that. Raises Stopped after both, or if the process has ended.
    """
    assert child.stdin and child.stdout
    try:
        child.stdin.write(json.dumps(request, default=str).encode("ascii") + b"\n")
        child.stdin.flush()
        waiter = select.poll()
        waiter.register(child.stdout, select.POLLIN)
        # The process has a timer of its own, which ends it; this one (in ms) is for one that hangs.
        if not waiter.poll(1000 * (request["seconds"] + more)):
            raise Stopped(_TOO_LONG.format(TIMEOUT_SECONDS))
        return json.loads(child.stdout.readline(MAX_ANSWER_BYTES))
    except (OSError, ValueError):  # no answer, or a part of one
        raise Stopped(_explain_end(child)) from None


def _explain_end(child: subprocess.Popen[bytes]) -> str:
    """Return why the process has ended, the end of an error line; kill it if it has not."""
    try:
        code = child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    if code == -signal.SIGALRM:  # its own timer
        return _TOO_LONG.format(TIMEOUT_SECONDS)
    status = f"signal {-code}" if code < 0 else f"code {code}"
    return (
        f"was stopped: its process ended with {status} (it may use {template_process.MEMORY >> 20}"
        " MiB)"
    )


_process = _TemplateProcess()  # one for all templates of this Python process
os.register_at_fork(after_in_child=_process.reset_after_fork)
atexit.register(_process.drop, kill=True)


def match_apart(
    patterns: Sequence[str], names: Sequence[str], whole: bool, seconds: float
) -> list[int | None] | str:
    """Return for each name the index of the first pattern that matches it, None without one.

    A text instead, the end of an error line, if a pattern is no regular expression. They are
    matched in the process that renders, as a pattern from a downloaded file may take forever.
    whole: a pattern has to match a whole name; else its end, after a dot. Raises Stopped after
    `seconds`.
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

        special_tokens: text by role, `bos_token` etc. remedy: what to do about a template that
        cannot be used, for error lines.
        """
        self.place = place
        self._remedy = remedy
        tokens = {role: text for role, text in special_tokens.items() if text is not None}
        # Named by its contents, so that the same template of two tokenizers is compiled once
        name = hashlib.sha256(json.dumps([source, tokens], sort_keys=True).encode()).hexdigest()
        self._template = {  # the request that compiles it
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
        """Return a rendering of a conversation for each request, or the error of one that fails.

        requests: each with the number of leading messages to render. tools: descriptions of
        functions. options: `marks`, two letters to write around the contents of
        `{% generation %}`; `variables`, further variables of the template. Raises DataError if the
        template took too long or had to be stopped.
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
