"""A tokenizer: a vocabulary, the special tokens around it, and the chat template that came with it.

`load_tokenizer` finds it in a checkpoint folder by what is there. Chat templates are programs, and
mostly somebody else's: they are rendered in a separate process with bounded memory and time
(`template_process`).
"""

import atexit
import codecs
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from recipe_lib.config.local_files import OTHER_TEMPLATE, TEMPLATE_IN_FOLDER, find_tokenizer
from recipe_lib.errors import DataError
from recipe_lib.reading import read_bytes
from recipe_lib.tokenizers import template_process
from recipe_lib.tokenizers.special_tokens import (
    AddedToken,
    Settings,
    read_json,
    read_settings,
    read_template,
)
from recipe_lib.tokenizers.template_process import Options, RenderRequest
from recipe_lib.tokenizers.vocabulary import (
    JsonVocabulary,
    SentencePieceVocabulary,
    TextPosition,
    TiktokenVocabulary,
    Vocabulary,
    compile_alternation,
)

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
    last, followed = render_many([*messages, messages[0]], [RenderRequest(2), RenderRequest(3)])
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


KEPT_TEXTS = 256  # texts whose ids are remembered
KEPT_LENGTH = 16_384  # letters that such a text has at most


class Tokenizer:
    """Turns text into ids and back.

    vocabulary: encodes ordinary text. vocab_size: one more than the largest id. ordinary_size: the
    same, of ids that are not special. bos_id, eos_id, pad_id: None where the tokenizer has none.
    add_bos_by_default: the tokenizer begins a text with BOS by default. place: its file, for error
    lines.
    """

    def __init__(self, vocabulary: Vocabulary, settings: Settings, place: str) -> None:
        self.place = place
        self.vocabulary = vocabulary
        # A sample is encoded whole and in pieces, and templates repeat themselves: most texts come
        # again at once.
        self._encode = lru_cache(maxsize=KEPT_TEXTS)(self._encode_text)
        declared = {token.content: token for token in vocabulary.added}
        # The later ones know more of a token than its id.
        self._added = settings.listed | declared | settings.added
        self._by_id = {token.id: token for token in self._added.values()}
        self.bos_id = self._find_role_id(settings, "bos_token", settings.bos_id)
        self.eos_id = self._find_role_id(settings, "eos_token", settings.eos_id)
        self.pad_id = self._find_role_id(settings, "pad_token", None)
        for token_id in (self.bos_id, self.eos_id):
            # Known by a number alone: it is special all the same.
            if token_id is not None and token_id not in self._by_id:
                content = vocabulary.get_token_bytes(token_id).decode("utf-8", errors="replace")
                self._by_id[token_id] = self._added[content] = AddedToken(content, token_id)
        self.vocab_size = max([vocabulary.size, *(i + 1 for i in self._by_id)])
        ordinary_ids = [token.id for token in self._added.values() if not token.special]
        self.ordinary_size = max([vocabulary.size, *(i + 1 for i in ordinary_ids)])
        self.add_bos_by_default = False
        if self.bos_id is not None:
            self.add_bos_by_default = (
                settings.add_bos
                if isinstance(settings.add_bos, bool)
                else vocabulary.puts_bos_first(self.bos_id)
            )
        self._declared_stops = frozenset(settings.stop_ids)
        self._special_ids = frozenset(token.id for token in self._by_id.values() if token.special)
        # Added tokens that are not special are found in any text: by the vocabulary, or here.
        found_by_vocabulary = declared if vocabulary.matches_added else {}
        always = {
            content: token
            for content, token in self._added.items()
            if not token.special
            and token.id >= vocabulary.size
            and content not in found_by_vocabulary
        }
        self._always_ids = frozenset(token.id for token in always.values())
        specials = {content: token for content, token in self._added.items() if token.special}
        self._split_ordinary = (compile_alternation(always), always)
        always_or_special = always | specials
        self._split_special = (compile_alternation(always_or_special), always_or_special)
        self._template: ChatTemplate | None = None
        if settings.chat_template is not None:
            role_texts = dict(settings.roles)
            for role, token_id in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
                if token_id is not None:
                    role_texts[role] = self.get_token_bytes(token_id).decode()
            self._template = ChatTemplate(
                settings.chat_template,
                settings.chat_template_place,
                special_tokens=role_texts,
                remedy=settings.template_remedy,
            )

    @property
    def chat_template(self) -> str | None:
        """The chat template's Jinja source; None: the tokenizer has none."""
        return self._template.source if self._template else None

    @property
    def dated_template(self) -> str | None:
        """The chat template with the date of training in the place of each `strftime_now(...)`.

        Other programs then write the text of training, whatever the day. A format that is no plain
        text stays as it is.
        """
        source = self.chat_template
        return source and _TODAY.sub(
            lambda match: f'"{template_process.DATE.strftime(match[2])}"', source
        )

    @property
    def chat_template_place(self) -> str:
        """The file the chat template came from; without one, the tokenizer's own."""
        return self._template.place if self._template else self.place

    @property
    def added_tokens(self) -> tuple[AddedToken, ...]:
        """The tokens beside the vocabulary's ordinary ones."""
        return tuple(self._added.values())

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The special tokens as text."""
        return tuple(content for content, token in self._added.items() if token.special)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: configured ones, EOS, and what the template puts after it."""
        end = self.turn_end.token or self.turn_end.next_turn
        return self._known_stops | ({self._added[end].id} if end else set())

    @cached_property
    def turn_end(self) -> TurnEnd:
        """The end of an answer in the chat template."""
        if self._template is None:
            return TurnEnd()
        stops = {
            self.get_token_bytes(token).decode(errors="replace") for token in self._known_stops
        }
        bos = None if self.bos_id is None else self.get_token_bytes(self.bos_id).decode()
        return find_turn_end(
            self._template.render_many, lambda text: _split(text, self._split_special), stops, bos
        )

    @property
    def _known_stops(self) -> frozenset[int]:
        return self._declared_stops | (frozenset() if self.eos_id is None else {self.eos_id})

    def is_special(self, token: int) -> bool:
        """Return True if an id is one of the special tokens."""
        return token in self._special_ids

    def encode(self, text: str, *, add_bos: bool = False, allow_special: bool = False) -> list[int]:
        """Return the ids of a text.

        add_bos: begin with BOS, if there is one and the text does not. allow_special: special
        tokens written in the text become their ids; otherwise they are ordinary text.
        """
        ids = self.encode_pieces([text], allow_special=allow_special)[0]
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_pieces(
        self, pieces: Sequence[str], *, allow_special: bool = True, literal: str | None = None
    ) -> list[list[int]]:
        """Return the ids of each piece of one text; no token reaches from one into the next.

        literal: a character that is taken out again after special tokens were looked for. A special
        token with it inside is not found: so a user's text with one in it stays text.
        """
        ids_of_pieces: list[list[int]] = []
        splitter = self._split_special if allow_special else self._split_ordinary
        position = TextPosition.START
        strip_next = False
        for piece in pieces:
            ids: list[int] = []
            for text, token in _split(piece, splitter):
                if strip_next:
                    text = text.lstrip()
                if token is not None and token.lstrip:
                    text = text.rstrip()
                if literal:
                    text = text.replace(literal, "")
                if text:
                    encode = self._encode if len(text) <= KEPT_LENGTH else self._encode_text
                    ids += encode(text, position)
                    position = TextPosition.INSIDE
                    strip_next = False
                if token is not None:
                    ids.append(token.id)
                    position = TextPosition.AFTER_SPECIAL
                    strip_next = token.rstrip
            ids_of_pieces.append(ids)
        return ids_of_pieces

    def _encode_text(self, text: str, position: TextPosition) -> tuple[int, ...]:
        return tuple(self.vocabulary.encode(text, position))

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Return the text of the ids; bytes that are no UTF-8 become U+FFFD.

        skip_special: special tokens leave no text.
        """
        decoder = StreamDecoder(self, skip_special=skip_special)
        return "".join([decoder.push(int(i)) for i in ids]) + decoder.finish()

    def get_token_bytes(self, token: int) -> bytes:
        """Return the bytes that an id stands for, special tokens as they are written.

        Raises DataError for an id that the tokenizer does not have.
        """
        added = self._by_id.get(token)
        if added is not None and (added.special or token in self._always_ids):
            return added.content.encode()
        if added is None and not 0 <= token < self.vocabulary.size:
            raise DataError(
                f"{self.place}: found the id {token}, expected one from 0 to {self.vocab_size - 1}"
            )
        return self.vocabulary.get_token_bytes(token)

    def render_chats(
        self,
        messages: Sequence[Mapping[str, Any]],
        requests: Sequence[RenderRequest],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[str | DataError]:
        """Return several renderings of a conversation, as `ChatTemplate.render_many` does.

        Raises DataError if there is no template, or it cannot be run.
        """
        if self._template is None:
            raise DataError(
                f"{self.place}: the tokenizer has no chat template; set tokenizer.chat_template to"
                " a Jinja file"
            )
        return self._template.render_many(messages, requests, tools=tools, options=options)

    def eats_space(self, token_before: int | None) -> bool:
        """Return True if a text after this id is encoded with a first space that is not its own.

        token_before: None at the start.
        """
        if token_before is None or token_before == self.bos_id:
            return self.vocabulary.eats_first_space
        return self.vocabulary.eats_space_after_special

    def _find_role_id(self, settings: Settings, role: str, config_id: int | None) -> int | None:
        """Return the id of a special token.

        It is known by its text, else by what the vocabulary says, else by a config's `config_id`.
        """
        if role in settings.roles:
            content = settings.roles[role]
            if content is None:
                return None
            if content in self._added:
                return self._added[content].id
            token = self.vocabulary.find(content)
            if token is None:
                raise DataError(
                    f"{self.place}: found {role} {content!r}, which is no token of the vocabulary; "
                    f"correct {role} in tokenizer_config.json"
                )
            # A piece of the vocabulary that has a role is special.
            self._added[content] = self._by_id[token] = AddedToken(content, token)
            return token
        ids = {"bos_token": self.vocabulary.bos_id, "eos_token": self.vocabulary.eos_id}
        file_id = ids.get(role)
        return config_id if file_id is None else file_id


class StreamDecoder:
    """Turns ids into text one at a time.

    Half a character is held back until the rest of its bytes has come.

    prompt: the ids that the text goes on from, so that its first space is kept or dropped as it
    would be there.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        last = prompt[-1] if prompt else None
        is_after_text = last is not None and not tokenizer.is_special(last)
        # The first piece has a space that the tokenizer itself put before the text.
        self._drop_space = not is_after_text and tokenizer.eats_space(last)

    def push(self, token: int) -> str:
        """Return the text that this id completes; empty while a character is incomplete."""
        tokenizer = self._tokenizer
        if tokenizer.is_special(token):
            text = self._bytes.decode(b"", final=True)  # no character goes on after it
            self._bytes.reset()
            self._drop_space = tokenizer.eats_space(token)
            return text if self._skip else text + tokenizer.get_token_bytes(token).decode()
        written = tokenizer.get_token_bytes(token)
        if self._drop_space and written:
            written = written[1:] if written.startswith(b" ") else written
            self._drop_space = False
        return self._bytes.decode(written)

    def finish(self) -> str:
        """Return what an incomplete last character leaves: U+FFFD, or nothing."""
        return self._bytes.decode(b"", final=True)


def _split(
    text: str, splitter: tuple[re.Pattern[str] | None, Mapping[str, AddedToken]]
) -> Iterable[tuple[str, AddedToken | None]]:
    """Yield the text as (what is before a token, the token); the last has none."""
    pattern, tokens = splitter
    start = 0
    for match in pattern.finditer(text) if pattern else ():
        yield text[start : match.start()], tokens[match.group()]
        start = match.end()
    yield text[start:], None


TIMEOUT_SECONDS = 10.0  # that a template may take to compile, or to write one conversation once
MAX_ANSWER_BYTES = 1 << 31  # bytes; what the process may answer is far below, by its own limits

START_SECONDS = 60.0  # that the process may take to start, on a busy machine
_TOO_LONG = "was stopped: it took more than {:g} s"

_TODAY = re.compile(r"""strftime_now\(\s*(["'])([^"'\\{}]*)\1\s*\)""")

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
    request = {"patterns": patterns, "names": names, "whole": whole, "seconds": seconds}
    answer: list[int | None] | str = _process.ask(request)
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
        requests: Sequence[RenderRequest],
        tools: Messages | None = None,
        options: Options | None = None,
    ) -> list[str | DataError]:
        """Return renderings of one conversation; where the template objects, an error of its words.

        options: `marks`, two letters to write around what `{% generation %}` holds; `variables`,
        more that the template sees. Raises DataError if the template took too long or had to be
        stopped.
        """
        request = {
            "name": self._template["name"],
            "messages": list(messages),
            "wanted": list(requests),
            "tools": tools,
            "options": options,
            "seconds": (1 + len(requests)) * TIMEOUT_SECONDS,
        }
        pairs = self._ask(request)
        return [
            DataError(f"{self.place}: {fault}") if text is None else text for text, fault in pairs
        ]

    def _ask(self, request: Mapping[str, Any] | None) -> Any:
        try:
            return _process.ask(request, self._template)
        except Stopped as stopped:
            raise DataError(f"{self.place}: the chat template {stopped}; {self._remedy}") from None


LLAMA3_SIZE = 128_000  # pieces of Llama 3's vocabulary, without special tokens
MAX_BYTES = 2**28  # of a tokenizer's file; the largest in use has some 35 MiB


def load_tokenizer(
    path: Path | str, chat_template: Path | str | None = None, *, by_key: bool = True
) -> Tokenizer:
    """Return the tokenizer in a folder, or of a tokenizer file with the files next to it.

    chat_template: a Jinja file that replaces the tokenizer's own template. by_key: errors name the
    keys `tokenizer.path` and `tokenizer.chat_template` as the remedy; else the folder. Raises
    DataError.
    """
    file = find_tokenizer(Path(path), by_key=by_key)
    settings = read_settings(file.parent, OTHER_TEMPLATE if by_key else TEMPLATE_IN_FOLDER)
    if chat_template is not None:
        settings.chat_template = read_template(Path(chat_template))
        settings.chat_template_place = str(chat_template)
    return Tokenizer(_read_vocabulary(file, settings), settings, str(file))


def _read_vocabulary(file: Path, settings: Settings) -> Vocabulary:
    try:
        content = read_bytes(file, MAX_BYTES).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); copy the file again") from None
    head = content[:4096]
    if not head.strip():
        raise DataError(f"{file}: the file is empty; copy it again")
    if head.startswith(b"version https://git-lfs"):
        raise DataError(
            f"{file}: found a git-lfs pointer, expected the file itself; run `git lfs pull`"
        )
    if head.lstrip()[:1] == b"{":
        return JsonVocabulary(file, content)
    if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\s", head):
        tiktoken = TiktokenVocabulary(file, content)
        _add_llama3_tokens(tiktoken, settings, file)
        return tiktoken
    _add_tokens_of_json(settings, file.parent)
    special = [content for content, token in settings.added.items() if token.special]
    return SentencePieceVocabulary(file, content, settings.legacy, special)


def _add_tokens_of_json(settings: Settings, folder: Path) -> None:
    """Add the tokens of a tokenizer.json that is next to a sentencepiece model.

    It may be the only file that lists them.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    content = read_json(file)
    entries = content.get("added_tokens") if isinstance(content, dict) else None
    for entry in entries or []:
        token = AddedToken.read(entry, str(file))
        settings.added.setdefault(token.content, token)


def _add_llama3_tokens(vocabulary: TiktokenVocabulary, settings: Settings, file: Path) -> None:
    """Add Llama 3.1's 256 special tokens to a vocabulary of Llama 3's size, if none are listed.

    Meta's own folders have no tokenizer_config.json.
    """
    if settings.added:
        return
    if vocabulary.size != LLAMA3_SIZE:
        raise DataError(
            f"{file}: found {vocabulary.size} tiktoken pieces and no special tokens, expected Llama"
            f" 3's {LLAMA3_SIZE} or a tokenizer_config.json with added_tokens_decoder next to the"
            " file"
        )
    # Offset -> name; the others are reserved, and numbered in their order.
    named = {
        0: "begin_of_text",
        1: "end_of_text",
        4: "finetune_right_pad_id",
        6: "start_header_id",
        7: "end_header_id",
        8: "eom_id",
        9: "eot_id",
        10: "python_tag",
    }
    reserved = iter(range(256))
    for offset in range(256):
        name = named.get(offset) or f"reserved_special_token_{next(reserved)}"
        settings.added[f"<|{name}|>"] = AddedToken(f"<|{name}|>", LLAMA3_SIZE + offset)
    settings.roles.setdefault("bos_token", "<|begin_of_text|>")
    settings.roles.setdefault("eos_token", "<|end_of_text|>")
    settings.stop_ids |= {LLAMA3_SIZE + 1, LLAMA3_SIZE + 8, LLAMA3_SIZE + 9}
