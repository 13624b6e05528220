"""A tokenizer: a vocabulary, the special tokens around it, and the chat template that came with it."""

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from recipe_lib.errors import DataError
from recipe_lib.tokenizers.chat import ChatTemplate, with_date_of_training
from recipe_lib.tokenizers.special_tokens import AddedToken, Settings
from recipe_lib.tokenizers.turn_end import TurnEnd, find_turn_end
from recipe_lib.tokenizers.vocabulary import TextPosition, Vocabulary, alternation

KEPT_TEXTS, KEPT_LENGTH = 256, 16_384  # texts whose ids are remembered, and how many letters they have at most


class Tokenizer:
    """Text to ids and back.

    vocab_size: one more than the largest id. bos_id, eos_id, pad_id: None where the tokenizer has none.
    add_bos_by_default: the tokenizer begins a text with BOS by default. place: its file, for error lines.
    """

    def __init__(self, vocabulary: Vocabulary, settings: Settings, place: str) -> None:
        self.place = place
        self._vocabulary = vocabulary
        # A sample is encoded whole and in pieces, and templates repeat themselves: most texts come again at once.
        self._encode = lru_cache(maxsize=KEPT_TEXTS)(self._encode_text)
        self._added = settings.listed | {token.content: token for token in vocabulary.added} | settings.added
        self._by_id = {token.id: token for token in self._added.values()}
        self.bos_id = self._role(settings, "bos_token", settings.bos_id)
        self.eos_id = self._role(settings, "eos_token", settings.eos_id)
        self.pad_id = self._role(settings, "pad_token", None)
        for role in (self.bos_id, self.eos_id):
            if role is not None and role not in self._by_id:
                content = vocabulary.token_bytes(role).decode("utf-8", errors="replace")
                self._by_id[role] = self._added[content] = AddedToken(content, role)
        self.vocab_size = max([vocabulary.size, *(i + 1 for i in self._by_id)])
        self.ordinary_size = max([vocabulary.size, *(t.id + 1 for t in self._added.values() if not t.special)])
        self.add_bos_by_default = self.bos_id is not None and (
            settings.add_bos if isinstance(settings.add_bos, bool) else vocabulary.begins_with(self.bos_id)
        )
        self._declared_stops = frozenset(settings.stop_ids)
        self._special_ids = frozenset(token.id for token in self._by_id.values() if token.special)
        matched = {token.content for token in vocabulary.added} if vocabulary.matches_added else set()
        always = {
            content: token
            for content, token in self._added.items()
            if not token.special and token.id >= vocabulary.size and content not in matched
        }
        self._always_ids = frozenset(token.id for token in always.values())
        specials = {content: token for content, token in self._added.items() if token.special}
        self._split_ordinary = _splitter(always)
        self._split_special = _splitter(always | specials)
        self._template: ChatTemplate | None = None
        if settings.chat_template is not None:
            found = {"bos_token": self.bos_id, "eos_token": self.eos_id}
            tokens = {role: self.token_bytes(i).decode() for role, i in found.items() if i is not None}
            self._template = ChatTemplate(
                settings.chat_template, settings.chat_template_place, settings.roles | tokens, settings.template_remedy
            )

    @property
    def chat_template(self) -> str | None:
        """The chat template's Jinja source; None: the tokenizer has none."""
        return self._template.source if self._template else None

    @property
    def dated_template(self) -> str | None:
        """The same, with the date of training where it asks for today's."""
        return with_date_of_training(self._template.source) if self._template else None

    @property
    def chat_template_place(self) -> str:
        """The file the chat template came from; without one, the tokenizer's own."""
        return self._template.place if self._template else self.place

    @property
    def vocabulary(self) -> Vocabulary:
        """What encodes ordinary text."""
        return self._vocabulary

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
        """Ids that end an answer: the configured ones, EOS, and what the chat template puts after an answer."""
        end = self.turn_end.token or self.turn_end.next_turn
        return self._known_stops | ({self._added[end].id} if end else set())

    @cached_property
    def turn_end(self) -> TurnEnd:
        """How the chat template ends an answer."""
        if self._template is None:
            return TurnEnd()
        stops = {self.token_bytes(token).decode(errors="replace") for token in self._known_stops}
        bos = None if self.bos_id is None else self.token_bytes(self.bos_id).decode()
        return find_turn_end(self._template.render_many, lambda text: _split(text, self._split_special), stops, bos)

    @property
    def _known_stops(self) -> frozenset[int]:
        return self._declared_stops | (frozenset() if self.eos_id is None else {self.eos_id})

    def is_special(self, token: int) -> bool:
        """Whether an id is one of the special tokens."""
        return token in self._special_ids

    def encode(self, text: str, *, add_bos: bool = False, allow_special: bool = False) -> list[int]:
        """Ids of a text. add_bos: begin with BOS, if there is one and the text does not. allow_special: special
        tokens written in the text become their ids; otherwise they are ordinary text."""
        ids = self.encode_pieces([text], allow_special=allow_special)[0]
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_pieces(
        self, pieces: Sequence[str], *, allow_special: bool = True, literal: str | None = None
    ) -> list[list[int]]:
        """Ids of each piece of one text that must not share a token. literal: a character that is taken out again
        after special tokens were looked for; who writes it into one of them keeps that one from being found."""
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
                    ids += self._encode(text, place) if len(text) <= KEPT_LENGTH else self._encode_text(text, place)
                    place, strip_next = TextPosition.INSIDE, False
                if token is not None:
                    ids.append(token.id)
                    place, strip_next = TextPosition.AFTER_SPECIAL, token.rstrip
            found.append(ids)
        return found

    def _encode_text(self, text: str, place: TextPosition) -> tuple[int, ...]:
        return tuple(self._vocabulary.encode(text, place))

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD. skip_special: special tokens leave no text."""
        decoder = StreamDecoder(self, skip_special=skip_special)
        return "".join([decoder.push(int(i)) for i in ids]) + decoder.finish()

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id stands for, special tokens as they are written. Raises DataError for no id of ours."""
        added, vocabulary = self._by_id.get(token), self._vocabulary
        if added is not None and (added.special or token in self._always_ids):
            return added.content.encode()
        if added is None and not 0 <= token < vocabulary.size:
            raise DataError(f"{self.place}: found the id {token}, expected one from 0 to {self.vocab_size - 1}")
        return vocabulary.token_bytes(token)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as the chat template writes it. Raises DataError: no template, or it objects."""
        return self._needed_template().render(messages, add_generation_prompt, tools)

    def render_chats(
        self,
        messages: Sequence[Mapping[str, Any]],
        wanted: Sequence[tuple[int, bool, Sequence[tuple[int, str]]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[str | DataError]:
        """Several renderings of a conversation in one go, as `ChatTemplate.render_many` has them."""
        return self._needed_template().render_many(messages, wanted, tools, options)

    def _needed_template(self) -> ChatTemplate:
        if self._template is None:
            raise DataError(
                f"{self.place}: the tokenizer has no chat template; set tokenizer.chat_template to a Jinja file"
            )
        return self._template

    def eats_space(self, token_before: int | None) -> bool:
        """Whether a text that begins after this id (None: at the start) begins with a space that is not its own."""
        if token_before is None or token_before == self.bos_id:
            return self._vocabulary.eats_first_space
        return self._vocabulary.eats_space_after_special

    def _role(self, settings: Settings, role: str, number: int | None) -> int | None:
        """The id of a special token: by its text, else by a number in a config, else what the vocabulary says."""
        if role in settings.roles:
            content = settings.roles[role]
            if content is None:
                return None
            found = self._added[content].id if content in self._added else self._vocabulary.find(content)
            if found is None:
                raise DataError(
                    f"{self.place}: found {role} {content!r}, which is no token of the vocabulary; "
                    f"correct {role} in tokenizer_config.json"
                )
            if content not in self._added:
                self._added[content] = self._by_id[found] = AddedToken(content, found)
            return found
        own = {"bos_token": self._vocabulary.bos_id, "eos_token": self._vocabulary.eos_id}.get(role)
        return number if own is None else own


class StreamDecoder:
    """Turns ids into text one at a time; half a character is kept back until the rest of its bytes has come.

    prompt: the ids that the text goes on from, so that its first space is kept or dropped as it would be there.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special: bool = True) -> None:
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
            return text if self._skip else text + tokenizer.token_bytes(token).decode()
        written = tokenizer.token_bytes(token)
        if self._drop_space and written:
            written = written[1:] if written.startswith(b" ") else written
            self._drop_space = False
        return self._bytes.decode(written)

    def finish(self) -> str:
        """What an incomplete last character leaves: U+FFFD, or nothing."""
        return self._bytes.decode(b"", final=True)


def _splitter(tokens: Mapping[str, AddedToken]) -> tuple[re.Pattern[str] | None, Mapping[str, AddedToken]]:
    return alternation(tokens), tokens


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
