"""A tokenizer: a vocabulary, the special tokens around it, and the chat template that came with
it.
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

# How a chat template ends an answer, found by rendering one that comes last and one that a question
# follows.


_ANSWER = "\ue123"  # a letter that no template writes


@dataclass(frozen=True)
class TurnEnd:
    """token: the special token that ends an answer, the last one where there are several (Command
    R7B); empty: the template writes none there. closing: what it writes after that where an answer
    comes last (a line end, Phi-3's EOS); no model is asked for it. next_turn: the special token
    that begins the user's next turn, if that alone says that the answer is over (GLM-4.5).
    """

    token: str = ""
    closing: str = ""
    next_turn: str = ""


def find_turn_end(
    render_many: Callable[..., Sequence[str | DataError]],
    split: Callable[[str], Iterable[tuple[str, AddedToken | None]]],
    stops: Collection[str],
    bos: str | None,
) -> TurnEnd:
    """render_many: `ChatTemplate.render_many`. split: a text as (what is before a special token,
    the token). stops: special tokens that are known to end answers.
    """
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    last, followed = render_many([*messages, messages[0]], [RenderRequest(2), RenderRequest(3)])
    if isinstance(last, DataError) or _ANSWER not in last:
        return TurnEnd()  # a template for other conversations than this one
    alone = _list_pieces_after_answer(split, last)
    later = (
        []
        if isinstance(followed, DataError) or _ANSWER not in followed
        else _list_pieces_after_answer(split, followed)
    )
    shared = [
        piece
        for piece, _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, later, strict=False))
    ]
    first = next((at for at, (_, is_special) in enumerate(shared) if is_special), None)
    if first is not None:
        run = [text for text, _ in takewhile(lambda piece: piece[1], shared[first:])]
        after = "".join(text for text, _ in alone[first + len(run) :])
        # Some begin the next turn without being asked: what the model stops at is no part of that
        if after.strip():
            run = run[: max((at for at, text in enumerate(run) if text in stops), default=0) + 1]
        return TurnEnd(run[-1], "".join(text for text, _ in alone[first + len(run) :]))
    special = [text for text, is_special in alone if is_special]
    if special:
        return TurnEnd(special[-1] if later else special[0])
    begins, is_special = (later[len(alone) :] or [("", False)])[0]
    return TurnEnd(next_turn=begins if is_special and begins != bos else "")


def _list_pieces_after_answer(
    split: Callable[[str], Iterable[tuple[str, Any]]], rendered: str
) -> list[tuple[str, bool]]:
    """What follows the answer, as (text, whether it is a special token)."""
    found: list[tuple[str, bool]] = []
    for text, token in split(rendered[rendered.rindex(_ANSWER) + 1 :]):
        found += [(text, False)] if text else []
        found += [(token.content, token.special)] if token is not None else []
    return found


KEPT_TEXTS, KEPT_LENGTH = (
    256,
    16_384,
)  # texts whose ids are remembered, and how many letters they have at most


class Tokenizer:
    """Turns text into ids and back.

    vocabulary: what encodes ordinary text. vocab_size: one more than the largest id. bos_id,
    eos_id, pad_id: None where the tokenizer has none. add_bos_by_default: the tokenizer begins a
    text with BOS by default. place: its file, for error lines.
    """

    def __init__(self, vocabulary: Vocabulary, settings: Settings, place: str) -> None:
        self.place = place
        self.vocabulary = vocabulary
        # A sample is encoded whole and in pieces, and templates repeat themselves: most texts come
        # again at once.
        self._encode = lru_cache(maxsize=KEPT_TEXTS)(self._encode_text)
        self._added = (
            settings.listed | {token.content: token for token in vocabulary.added} | settings.added
        )
        self._by_id = {token.id: token for token in self._added.values()}
        self.bos_id = self._find_role_id(settings, "bos_token", settings.bos_id)
        self.eos_id = self._find_role_id(settings, "eos_token", settings.eos_id)
        self.pad_id = self._find_role_id(settings, "pad_token", None)
        for role in (self.bos_id, self.eos_id):
            if role is not None and role not in self._by_id:
                content = vocabulary.get_token_bytes(role).decode("utf-8", errors="replace")
                self._by_id[role] = self._added[content] = AddedToken(content, role)
        self.vocab_size = max([vocabulary.size, *(i + 1 for i in self._by_id)])
        self.ordinary_size = max(
            [vocabulary.size, *(t.id + 1 for t in self._added.values() if not t.special)]
        )
        self.add_bos_by_default = self.bos_id is not None and (
            settings.add_bos
            if isinstance(settings.add_bos, bool)
            else vocabulary.puts_bos_first(self.bos_id)
        )
        self._declared_stops = frozenset(settings.stop_ids)
        self._special_ids = frozenset(token.id for token in self._by_id.values() if token.special)
        matched = (
            {token.content for token in vocabulary.added} if vocabulary.matches_added else set()
        )
        always = {
            content: token
            for content, token in self._added.items()
            if not token.special and token.id >= vocabulary.size and content not in matched
        }
        self._always_ids = frozenset(token.id for token in always.values())
        specials = {content: token for content, token in self._added.items() if token.special}
        self._split_ordinary = (compile_alternation(always), always)
        matched_in_text = always | specials
        self._split_special = (compile_alternation(matched_in_text), matched_in_text)
        self._template: ChatTemplate | None = None
        if settings.chat_template is not None:
            found = {"bos_token": self.bos_id, "eos_token": self.eos_id}
            tokens = {
                role: self.get_token_bytes(i).decode() for role, i in found.items() if i is not None
            }
            self._template = ChatTemplate(
                settings.chat_template,
                settings.chat_template_place,
                settings.roles | tokens,
                settings.template_remedy,
            )

    @property
    def chat_template(self) -> str | None:
        """The chat template's Jinja source; None: the tokenizer has none."""
        return self._template.source if self._template else None

    @property
    def dated_template(self) -> str | None:
        """The same, with the date that it shows in training in the place of each `strftime_now("%d
        %b %Y")`: other programs then write the text of training, whatever the day. A format that is
        no plain text stays as it is.
        """
        source = self.chat_template
        return source and _TODAY.sub(
            lambda found: f'"{template_process.DATE.strftime(found[2])}"', source
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
        """Ids that end an answer: the configured ones, EOS, and what the chat template puts after
        an answer.
        """
        end = self.turn_end.token or self.turn_end.next_turn
        return self._known_stops | ({self._added[end].id} if end else set())

    @cached_property
    def turn_end(self) -> TurnEnd:
        """How the chat template ends an answer."""
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
        """Whether an id is one of the special tokens."""
        return token in self._special_ids

    def encode(self, text: str, *, add_bos: bool = False, allow_special: bool = False) -> list[int]:
        """Ids of a text. add_bos: begin with BOS, if there is one and the text does not.
        allow_special: special tokens written in the text become their ids; otherwise they are
        ordinary text.
        """
        ids = self.encode_pieces([text], allow_special=allow_special)[0]
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_pieces(
        self, pieces: Sequence[str], *, allow_special: bool = True, literal: str | None = None
    ) -> list[list[int]]:
        """Ids of each piece of one text that must not share a token. literal: a character that is
        taken out again after special tokens were looked for; who writes it into one of them keeps
        that one from being found.
        """
        found: list[list[int]] = []
        splitter = self._split_special if allow_special else self._split_ordinary
        place, strip_next = TextPosition.START, False
        for piece in pieces:
            ids: list[int] = []
            for text, token in _split(piece, splitter):
                if strip_next:
                    text = text.lstrip()
                if token is not None and token.lstrip:
                    text = text.rstrip()
                text = text.replace(literal, "") if literal else text
                if text:
                    ids += (
                        self._encode(text, place)
                        if len(text) <= KEPT_LENGTH
                        else self._encode_text(text, place)
                    )
                    place, strip_next = TextPosition.INSIDE, False
                if token is not None:
                    ids.append(token.id)
                    place, strip_next = TextPosition.AFTER_SPECIAL, token.rstrip
            found.append(ids)
        return found

    def _encode_text(self, text: str, place: TextPosition) -> tuple[int, ...]:
        return tuple(self.vocabulary.encode(text, place))

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD. skip_special: special tokens
        leave no text.
        """
        decoder = StreamDecoder(self, skip_special=skip_special)
        return "".join([decoder.push(int(i)) for i in ids]) + decoder.finish()

    def get_token_bytes(self, token: int) -> bytes:
        """The bytes that an id stands for, special tokens as they are written. Raises DataError for
        no id of ours.
        """
        added, vocabulary = self._by_id.get(token), self.vocabulary
        if added is not None and (added.special or token in self._always_ids):
            return added.content.encode()
        if added is None and not 0 <= token < vocabulary.size:
            raise DataError(
                f"{self.place}: found the id {token}, expected one from 0 to {self.vocab_size - 1}"
            )
        return vocabulary.get_token_bytes(token)

    def render_chats(
        self,
        messages: Sequence[Mapping[str, Any]],
        requests: Sequence[RenderRequest],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[str | DataError]:
        """Return several renderings of a conversation in one go, as `ChatTemplate.render_many` has
        them.

        Raises DataError: there is no template, or it cannot be run.
        """
        if self._template is None:
            raise DataError(
                f"{self.place}: the tokenizer has no chat template; set tokenizer.chat_template to"
                " a Jinja file"
            )
        return self._template.render_many(messages, requests, tools, options)

    def eats_space(self, token_before: int | None) -> bool:
        """Whether a text that begins after this id (None: at the start) begins with a space that is
        not its own.
        """
        if token_before is None or token_before == self.bos_id:
            return self.vocabulary.eats_first_space
        return self.vocabulary.eats_space_after_special

    def _find_role_id(self, settings: Settings, role: str, number: int | None) -> int | None:
        """The id of a special token: by its text, else by a number in a config, else what the
        vocabulary says.
        """
        if role in settings.roles:
            content = settings.roles[role]
            if content is None:
                return None
            found = (
                self._added[content].id if content in self._added else self.vocabulary.find(content)
            )
            if found is None:
                raise DataError(
                    f"{self.place}: found {role} {content!r}, which is no token of the vocabulary; "
                    f"correct {role} in tokenizer_config.json"
                )
            if content not in self._added:
                self._added[content] = self._by_id[found] = AddedToken(content, found)
            return found
        own = {"bos_token": self.vocabulary.bos_id, "eos_token": self.vocabulary.eos_id}.get(role)
        return number if own is None else own


class StreamDecoder:
    """Turns ids into text one at a time; half a character is kept back until the rest of its bytes
    has come.

    prompt: the ids that the text goes on from, so that its first space is kept or dropped as it
    would be there.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special: bool = True
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        last = prompt[-1] if prompt else None
        after_text = last is not None and not tokenizer.is_special(last)
        self._drop_space = not after_text and tokenizer.eats_space(last)

    def push(self, token: int) -> str:
        """The text that this id completes; empty while a character is incomplete."""
        tokenizer = self._tokenizer
        if tokenizer.is_special(token):
            text = self._bytes.decode(b"", final=True)
            self._bytes.reset()
            self._drop_space = tokenizer.eats_space(token)
            return text if self._skip else text + tokenizer.get_token_bytes(token).decode()
        written = tokenizer.get_token_bytes(token)
        if self._drop_space and written:
            written = written[1:] if written.startswith(b" ") else written
            self._drop_space = False
        return self._bytes.decode(written)

    def finish(self) -> str:
        """What an incomplete last character leaves: U+FFFD, or nothing."""
        return self._bytes.decode(b"", final=True)


def _split(
    text: str, splitter: tuple[re.Pattern[str] | None, Mapping[str, AddedToken]]
) -> Iterable[tuple[str, AddedToken | None]]:
    """The text as (what is before a token, the token); the last has none."""
    pattern, tokens = splitter
    start = 0
    for match in pattern.finditer(text) if pattern else ():
        yield text[start : match.start()], tokens[match.group()]
        start = match.end()
    yield text[start:], None


# Chat templates. A template is a program, and mostly somebody else's, also where the user has named
# its file: it is rendered in a separate process with bounded memory and time (`template_process`).
#
# There is one such process for each of ours, whatever the number of templates. It is started anew
# after a fork, since two processes cannot share its pipes, and after it had to be stopped.


TIMEOUT_SECONDS = 10.0  # that a template may take to compile, or to write one conversation once
MAX_ANSWER_BYTES = 1 << 31  # bytes; what the process may answer is far below, by its own limits

START_SECONDS = 60.0  # that the process may take to start, on a machine with better things to do
_TOO_LONG = "was stopped: it took more than {:g} s"

_TODAY = re.compile(r"""strftime_now\(\s*(["'])([^"'\\{}]*)\1\s*\)""")

Messages = Sequence[Mapping[str, Any]]


class Stopped(Exception):  # noqa: N818  (turned into a DataError)
    """The process is gone; str(): why, as the end of a sentence about the template."""


class _TemplateProcess:
    """The process that renders, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._known = set[str]()  # names of the templates that it has compiled

    def ask(
        self, request: Mapping[str, Any] | None, template: Mapping[str, Any] | None = None
    ) -> Any:
        """Make the template known, if there is one, then put the request. Raises Stopped; the
        process is gone then.
        """
        with self._lock:
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
    """Return the process. Raises Stopped."""
    specs = [
        importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")
    ]  # imported there alone
    folders = sorted({str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin})
    program = (
        "import runpy, sys; sys.path += sys.argv[2:]; runpy.run_path(sys.argv[1],"
        " run_name='__main__')"
    )
    kept = {
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
            env=kept,
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
        if not waiter.poll(
            1000 * (request["seconds"] + more)
        ):  # it watches the time itself, and does not even do that
            raise Stopped(_TOO_LONG.format(TIMEOUT_SECONDS))
        return json.loads(child.stdout.readline(MAX_ANSWER_BYTES))
    except (OSError, ValueError):  # no answer, or a part of one
        raise Stopped(_explain_end(child)) from None


def _explain_end(child: subprocess.Popen[bytes]) -> str:
    """Return why the process has ended; one that has not is killed."""
    try:
        code = child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    if code == -signal.SIGALRM:
        return _TOO_LONG.format(TIMEOUT_SECONDS)
    how = f"signal {-code}" if code < 0 else f"code {code}"
    return (
        f"was stopped: its process ended with {how} (it may use {template_process.MEMORY >> 20}"
        " MiB)"
    )


_process = _TemplateProcess()
os.register_at_fork(after_in_child=_process.after_fork)
atexit.register(_process.drop, kill=True)


def match_apart(
    patterns: Sequence[str], names: Sequence[str], whole: bool, seconds: float
) -> list[int | None] | str:
    """Return what `template_process.match_patterns` does, from the process that renders. Raises
    Stopped.
    """
    request = {"patterns": patterns, "names": names, "whole": whole, "seconds": seconds}
    answer: list[int | None] | str = _process.ask(request)
    return answer


class ChatTemplate:
    """A compiled chat template. source: its Jinja; place: the file it came from, and remedy: what
    to do about one that is of no use, for error lines.
    """

    def __init__(
        self,
        source: str,
        place: str,
        special_tokens: Mapping[str, str | None],
        remedy: str = OTHER_TEMPLATE,
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
        requests: Sequence[RenderRequest],
        tools: Messages | None = None,
        options: Options | None = None,
    ) -> list[str | DataError]:
        """Renderings of one conversation, in one go; where the template objects, what it said.

        options: `marks`, two letters to write around what `{% generation %}` holds; `variables`,
        more that the template sees. Raises DataError: the template took too long or had to be
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


# Finds the tokenizer in a checkpoint folder by what is there.


LLAMA3_SIZE = 128_000
MAX_BYTES = 2**28  # of a tokenizer's file; the largest in use has some 35 MiB


def load_tokenizer(
    path: Path | str, chat_template: Path | str | None = None, *, by_key: bool = True
) -> Tokenizer:
    """The tokenizer in a folder, or a tokenizer file with the files next to it.

    chat_template: a Jinja file that replaces the tokenizer's own template. by_key: what is wrong
    can be put right by the keys `tokenizer.path` and `tokenizer.chat_template`; else in the folder.
    Raises DataError.
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
    """A tokenizer.json next to a sentencepiece model may be the only file that lists the added
    tokens.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    content = read_json(file)
    for entry in (content.get("added_tokens") or []) if isinstance(content, dict) else []:
        token = AddedToken.read(entry, str(file))
        settings.added.setdefault(token.content, token)


def _add_llama3_tokens(vocabulary: TiktokenVocabulary, settings: Settings, file: Path) -> None:
    """Without tokenizer_config.json, a vocabulary of Llama 3's size has Llama 3.1's 256 special
    tokens.
    """
    if settings.added:
        return
    if vocabulary.size != LLAMA3_SIZE:
        raise DataError(
            f"{file}: found {vocabulary.size} tiktoken pieces and no special tokens, expected Llama"
            f" 3's {LLAMA3_SIZE} or a tokenizer_config.json with added_tokens_decoder next to the"
            " file"
        )
    named = {
        0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id", 7: "end_header_id",
        8: "eom_id", 9: "eot_id", 10: "python_tag",
    }  # fmt: skip
    reserved = iter(range(256))
    for offset in range(256):
        name = named.get(offset) or f"reserved_special_token_{next(reserved)}"
        settings.added[f"<|{name}|>"] = AddedToken(f"<|{name}|>", LLAMA3_SIZE + offset)
    settings.roles.setdefault("bos_token", "<|begin_of_text|>")
    settings.roles.setdefault("eos_token", "<|end_of_text|>")
    settings.stop_ids |= {LLAMA3_SIZE + 1, LLAMA3_SIZE + 8, LLAMA3_SIZE + 9}
