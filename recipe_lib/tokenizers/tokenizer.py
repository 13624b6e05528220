"""Define a tokenizer: a vocabulary, its special tokens, and the chat template that came with it.

`load_tokenizer` returns the `Tokenizer` of a checkpoint folder or tokenizer file, whose kind it
finds by its contents. `read_settings` reads special tokens and the chat template from the folder's
JSON files. A `StreamDecoder` decodes ids while they are generated. An added token is one beside the
vocabulary of ordinary text; a special one is found in a text only if that is allowed.
"""

import codecs
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from recipe_lib import reading
from recipe_lib.config.local_files import (
    OTHER_TEMPLATE,
    TEMPLATE_IN_FOLDER,
    describe_template_fault,
    find_tokenizer,
)
from recipe_lib.errors import DataError
from recipe_lib.tokenizers.chat_template import ChatTemplate, TurnEnd, find_turn_end
from recipe_lib.tokenizers.template_process import DATE, RenderRequest
from recipe_lib.tokenizers.vocabulary import (
    AddedToken,
    JsonVocabulary,
    SentencePieceVocabulary,
    TextPosition,
    TiktokenVocabulary,
    Vocabulary,
    compile_alternation,
)

TEMPLATE_LIMIT = 2**24  # bytes; the longest template in use has some 20 KB
# Keys of tokenizer_config.json that name a special token
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# `strftime_now("...")` of a chat template, with a plain literal as format, which is group 2
_TODAY = re.compile(r"""strftime_now\(\s*(["'])([^"'\\{}]*)\1\s*\)""")
KEPT_TEXTS = 256  # texts whose ids are cached
KEPT_LENGTH = 16_384  # characters of a text whose ids are cached, at most


@dataclass
class Settings:
    """The settings of a tokenizer, from all JSON files of its folder."""

    # Role (`bos_token` etc.) -> text of the token; None: a file says that there is none
    roles: dict[str, str | None] = field(default_factory=dict)
    # Text -> token, of added_tokens.json, which has nothing but ids
    listed: dict[str, AddedToken] = field(default_factory=dict)
    # Text -> token, of the other files
    added: dict[str, AddedToken] = field(default_factory=dict)
    # Whether texts begin with BOS; None: no file says it
    add_bos: bool | None = None
    # Whether text after a special token is encoded like the start of a text (Llama 2)
    legacy: bool = True
    # Ids at which generation stops, of config.json and generation_config.json
    stop_ids: set[int] = field(default_factory=set)
    eos_id: int | None = None  # of config.json or generation_config.json
    bos_id: int | None = None  # of the same files
    # Jinja source; None: there is none
    chat_template: str | None = None
    # File and key that the template came from, for error lines
    chat_template_place: str = ""
    # What to do about a template that cannot be used, for error lines
    template_remedy: str = OTHER_TEMPLATE


class Tokenizer:
    """An encoder of text as ids, and decoder of ids.

    vocabulary: encodes ordinary text. vocab_size: one more than the largest id. ordinary_size: the
    same, of the vocabulary and the added tokens that are not special. bos_id, eos_id, pad_id: None
    if the tokenizer has none. add_bos_by_default: whether texts begin with BOS by the tokenizer's
    own settings. place: its file, for error lines.
    """

    def __init__(self, vocabulary: Vocabulary, settings: Settings, place: str) -> None:
        self.place = place
        self.vocabulary = vocabulary
        # Cached: a sample is encoded both whole and in pieces, and templates repeat texts, so most
        # texts come again soon.
        self._encode = lru_cache(maxsize=KEPT_TEXTS)(self._encode_text)
        declared = {token.content: token for token in vocabulary.added}
        # Text -> added token. Later sources win, since they know more of a token than its id.
        self._added = settings.listed | declared | settings.added
        self._by_id = {token.id: token for token in self._added.values()}  # id -> added token
        self.bos_id = self._find_role_id(settings, "bos_token", settings.bos_id)
        self.eos_id = self._find_role_id(settings, "eos_token", settings.eos_id)
        self.pad_id = self._find_role_id(settings, "pad_token", None)
        for token_id in (self.bos_id, self.eos_id):
            # A token that is named by its id alone is special too.
            if token_id is not None and token_id not in self._by_id:
                content = vocabulary.get_token_bytes(token_id).decode("utf-8", errors="replace")
                self._by_id[token_id] = self._added[content] = AddedToken(content, token_id)
        self.vocab_size = max([vocabulary.size, *(i + 1 for i in self._by_id)])
        ordinary_ids = [token.id for token in self._added.values() if not token.special]
        self.ordinary_size = max([vocabulary.size, *(i + 1 for i in ordinary_ids)])
        self.add_bos_by_default = self.bos_id is not None and (
            settings.add_bos
            if isinstance(settings.add_bos, bool)
            else vocabulary.puts_bos_first(self.bos_id)
        )
        eos_ids = set() if self.eos_id is None else {self.eos_id}
        self._known_stops = frozenset(settings.stop_ids | eos_ids)
        self._special_ids = frozenset(token.id for token in self._by_id.values() if token.special)
        # Added tokens that are not special are found in any text, by the vocabulary or here.
        matched_by_vocabulary = declared if vocabulary.matches_added else {}
        always_matched = {
            content: token
            for content, token in self._added.items()
            if not token.special
            and token.id >= vocabulary.size
            and content not in matched_by_vocabulary
        }
        # Their ids; they are not special, but the vocabulary does not have their bytes.
        self._always_ids = frozenset(token.id for token in always_matched.values())
        specials = {content: token for content, token in self._added.items() if token.special}
        # The texts of the special tokens
        self.special_texts = tuple(specials)
        # All added tokens, special ones included
        self.added_tokens = tuple(self._added.values())
        # (pattern of the tokens to find in a text, text -> token): without the special tokens, and
        # with them
        self._split_ordinary = (compile_alternation(always_matched), always_matched)
        always_or_special = always_matched | specials
        self._split_special = (compile_alternation(always_or_special), always_or_special)
        # Jinja source; None: there is no chat template
        self.chat_template = settings.chat_template
        # The file that the template came from; without a template, the tokenizer's file
        self.chat_template_place = settings.chat_template_place or place
        self._template: ChatTemplate | None = None
        if settings.chat_template is not None:
            role_ids = {"bos_token": self.bos_id, "eos_token": self.eos_id}
            role_texts = settings.roles | {
                role: self.get_token_bytes(token_id).decode()
                for role, token_id in role_ids.items()
                if token_id is not None
            }
            self._template = ChatTemplate(
                settings.chat_template,
                settings.chat_template_place,
                special_tokens=role_texts,
                remedy=settings.template_remedy,
            )

    @property
    def dated_template(self) -> str | None:
        """Return the chat template with the date of training in place of each `strftime_now(...)`.

        With it other programs render the same text as training, on any day. A call whose format is
        not a plain literal stays as it is.
        """
        return self.chat_template and _TODAY.sub(
            lambda match: f'"{DATE.strftime(match[2])}"', self.chat_template
        )

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Return the ids that end an answer: configured ones, EOS, the template's end of a turn.

        Where a template ends a turn by the next one's first token, it is that token.
        """
        end = self.turn_end.token or self.turn_end.next_turn
        return self._known_stops | ({self._added[end].id} if end else set())

    @cached_property
    def turn_end(self) -> TurnEnd:
        """Return how the chat template ends an answer; an empty TurnEnd without a template.

        Found by rendering two conversations, once.
        """
        if self._template is None:
            return TurnEnd()
        stops = {
            self.get_token_bytes(token).decode(errors="replace") for token in self._known_stops
        }
        bos = None if self.bos_id is None else self.get_token_bytes(self.bos_id).decode()
        return find_turn_end(
            self._template.render_many,
            split=lambda text: _split(text, self._split_special),
            stops=stops,
            bos=bos,
        )

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def encode(self, text: str, *, add_bos: bool = False, allow_special: bool = False) -> list[int]:
        """Return the ids of a text.

        add_bos: begin with BOS, if there is one and the text does not. allow_special: special
        tokens written in the text become their ids; otherwise they are ordinary text.
        """
        ids = self.encode_pieces([text], allow_special=allow_special)[0]
        return self.put_bos(ids) if add_bos else ids

    def put_bos(self, ids: list[int]) -> list[int]:
        """Return the ids with BOS in front, unless it is there or the tokenizer has none."""
        bos = self.bos_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def encode_pieces(
        self, pieces: Sequence[str], *, allow_special: bool = True, literal: str | None = None
    ) -> list[list[int]]:
        """Return the ids of each piece of one text; no token reaches from one into the next.

        allow_special: as for `encode`. literal: a character that is removed after the search for
        special tokens. A special token with it inside is not found, and is encoded as text.
        """
        ids_of_pieces: list[list[int]] = []
        splitter = self._split_special if allow_special else self._split_ordinary
        position = TextPosition.START
        strip_next = False  # whether the last token drops the white space after it
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
        """Return the text of the ids; invalid UTF-8 becomes U+FFFD.

        skip_special: leave out special tokens.
        """
        decoder = StreamDecoder(self, skip_special=skip_special)
        return "".join([decoder.push(int(i)) for i in ids]) + decoder.finish()

    def get_token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; of a special token, those of its text.

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
        """Return a rendering of a conversation for each request, or the error of one that fails.

        messages: {role, content, ...}. tools: descriptions of functions. options: `marks`, two
        letters to write around the contents of `{% generation %}`, and `variables`, further
        variables of the template. Raises DataError if there is no template, or it had to be
        stopped.
        """
        if self._template is None:
            raise DataError(
                f"{self.place}: the tokenizer has no chat template; set tokenizer.chat_template to"
                " a Jinja file"
            )
        return self._template.render_many(messages, requests, tools=tools, options=options)

    def eats_space(self, token_before: int | None) -> bool:
        """Return True if the tokenizer puts a space before a text that follows this id.

        Decoding has to drop that space. token_before: None if the text is at the start.
        """
        if token_before is None or token_before == self.bos_id:
            return self.vocabulary.eats_first_space
        return self.vocabulary.eats_space_after_special

    def _find_role_id(self, settings: Settings, role: str, config_id: int | None) -> int | None:
        """Return the id of the special token of a role, such as `bos_token`; None: there is none.

        It is found by its text in the settings, else it is the vocabulary's, else `config_id`, the
        id in config.json or generation_config.json. Raises DataError for a text that is no token.
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
            # An ordinary token of the vocabulary becomes special by its role.
            self._added[content] = self._by_id[token] = AddedToken(content, token)
            return token
        ids = {"bos_token": self.vocabulary.bos_id, "eos_token": self.vocabulary.eos_id}
        file_id = ids.get(role)
        return config_id if file_id is None else file_id


class StreamDecoder:
    """A decoder of ids to text, one id at a time.

    An incomplete character is held back until the rest of its bytes has come. prompt: the ids
    before the text, which decide whether the tokenizer itself has put a space before it; that space
    is dropped. skip_special: leave out special tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        last = prompt[-1] if prompt else None
        is_after_text = last is not None and not tokenizer.is_special(last)
        # Whether the next token begins with a space that the tokenizer itself has put there. It is
        # so at the start and after special tokens.
        self._drop_space = not is_after_text and tokenizer.eats_space(last)

    def push(self, token: int) -> str:
        """Return the text that this id completes; empty while a character is incomplete."""
        tokenizer = self._tokenizer
        if tokenizer.is_special(token):
            # No character goes on after it: what is incomplete becomes U+FFFD.
            text = self._bytes.decode(b"", final=True)
            self._bytes.reset()
            self._drop_space = tokenizer.eats_space(token)
            return text if self._skip else text + tokenizer.get_token_bytes(token).decode()
        token_bytes = tokenizer.get_token_bytes(token)
        if self._drop_space and token_bytes:
            token_bytes = token_bytes[1:] if token_bytes.startswith(b" ") else token_bytes
            self._drop_space = False
        return self._bytes.decode(token_bytes)

    def finish(self) -> str:
        """Return U+FFFD for an incomplete last character; else an empty text."""
        return self._bytes.decode(b"", final=True)


def _split(
    text: str, splitter: tuple[re.Pattern[str] | None, Mapping[str, AddedToken]]
) -> Iterable[tuple[str, AddedToken | None]]:
    """Yield (text before a token, the token) in order; the last pair has None for the token.

    splitter: (pattern of the tokens' texts, text -> token); the pattern is None without tokens.
    """
    pattern, tokens = splitter
    start = 0
    for match in pattern.finditer(text) if pattern else ():
        yield text[start : match.start()], tokens[match.group()]
        start = match.end()
    yield text[start:], None


LLAMA3_SIZE = 128_000  # tokens of Llama 3's vocabulary, without special ones
MAX_BYTES = 2**28  # bytes of a tokenizer's file; the largest in use has some 35 MiB


def load_tokenizer(
    path: Path | str, chat_template: Path | str | None = None, *, by_key: bool = True
) -> Tokenizer:
    """Return the tokenizer in a folder, or of a tokenizer file with the files next to it.

    chat_template: a Jinja file that replaces the tokenizer's own template; None: keep that. by_key:
    errors name the config keys `tokenizer.path` and `tokenizer.chat_template` as the remedy; else
    the folder. Raises DataError if a file is missing, damaged or of no known kind.
    """
    file = find_tokenizer(Path(path), by_key=by_key)
    settings = read_settings(file.parent, OTHER_TEMPLATE if by_key else TEMPLATE_IN_FOLDER)
    if chat_template is not None:
        settings.chat_template = read_template(Path(chat_template))
        settings.chat_template_place = str(chat_template)
    return Tokenizer(_read_vocabulary(file, settings), settings, str(file))


def _read_vocabulary(file: Path, settings: Settings) -> Vocabulary:
    try:
        content = reading.read_bytes(file, MAX_BYTES).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); copy the file again") from None
    head = content[:4096]  # enough to tell the kind of file
    if not head.strip():
        raise DataError(f"{file}: the file is empty; copy it again")
    if head.startswith(b"version https://git-lfs"):
        raise DataError(
            f"{file}: found a git-lfs pointer, expected the file itself; run `git lfs pull`"
        )
    if head.lstrip()[:1] == b"{":
        return JsonVocabulary(file, content)
    # tiktoken: lines of `base64 rank`
    if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\s", head):
        tiktoken = TiktokenVocabulary(file, content)
        _add_llama3_tokens(tiktoken, settings, file)
        return tiktoken
    _add_tokens_of_json(settings, file.parent)
    special = [content for content, token in settings.added.items() if token.special]
    return SentencePieceVocabulary(file, model=content, legacy=settings.legacy, special=special)


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

    Meta's own folders have no tokenizer_config.json. Raises DataError if no tokens are listed and
    the vocabulary has another size.
    """
    if settings.added:
        return
    if vocabulary.size != LLAMA3_SIZE:
        raise DataError(
            f"{file}: found {vocabulary.size} tiktoken pieces and no special tokens, expected Llama"
            f" 3's {LLAMA3_SIZE} or a tokenizer_config.json with added_tokens_decoder next to the"
            " file"
        )
    # Offset from LLAMA3_SIZE -> name; the other offsets are reserved tokens, numbered in order
    name_by_offset = {
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
        name = name_by_offset.get(offset) or f"reserved_special_token_{next(reserved)}"
        settings.added[f"<|{name}|>"] = AddedToken(f"<|{name}|>", LLAMA3_SIZE + offset)
    settings.roles.setdefault("bos_token", "<|begin_of_text|>")
    settings.roles.setdefault("eos_token", "<|end_of_text|>")
    # end_of_text, eom_id, eot_id
    settings.stop_ids |= {LLAMA3_SIZE + 1, LLAMA3_SIZE + 8, LLAMA3_SIZE + 9}


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises DataError if it cannot be read or is no JSON; the latter has line and column.
    """
    try:
        return reading.read_json(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); copy the file again") from None
    except ValueError as error:
        raise DataError(f"{path}: {error}; copy the file again") from None


def read_settings(folder: Path, template_remedy: str = OTHER_TEMPLATE) -> Settings:
    """Read the settings from the files of a tokenizer's folder; each of them may be missing.

    They are tokenizer_config.json, special_tokens_map.json, added_tokens.json,
    generation_config.json, config.json and chat_template.jinja. template_remedy: what to do about a
    template that cannot be used, for error lines. Raises DataError for a file that cannot be read,
    or is no JSON object.
    """
    settings = Settings(template_remedy=template_remedy)
    config_file = folder / "tokenizer_config.json"
    config = _read_object(config_file)
    list_file = folder / "added_tokens.json"
    settings.listed = {
        content: AddedToken.read({"content": content}, str(list_file), id)
        for content, id in _read_object(list_file).items()
    }
    for key, entry in (config.get("added_tokens_decoder") or {}).items():
        # JSON has ids as texts; a key that is no id becomes None, which AddedToken.read refuses.
        id = int(key) if str(key).isdigit() else None
        token = AddedToken.read(entry, str(config_file), id)
        settings.added[token.content] = token
    # tokenizer_config.json comes last, so that it wins.
    for source in (_read_object(folder / "special_tokens_map.json"), config):
        for role in ROLES:
            if role in source:
                role_entry = source[role]  # a text, or an object with it
                text = role_entry.get("content") if isinstance(role_entry, dict) else role_entry
                settings.roles[role] = text if isinstance(text, str) and text else None
    settings.add_bos = config.get("add_bos_token")
    settings.legacy = config.get("legacy") is not False  # true unless the file says otherwise
    _read_ids(settings, folder)
    _read_template(settings, folder, config)
    return settings


def _read_object(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise DataError(
            f"{path}: found {type(content).__name__}, expected a JSON object; copy the file again"
        )
    return content


def _read_ids(settings: Settings, folder: Path) -> None:
    """Read the ids of BOS, EOS and stop tokens from config.json and generation_config.json.

    The latter wins.
    """
    for name in ("config.json", "generation_config.json"):
        content = _read_object(folder / name)
        eos = content.get("eos_token_id")
        values = eos if isinstance(eos, list) else [eos]  # a number or a list
        eos_ids = [value for value in values if isinstance(value, int) and value >= 0]
        settings.stop_ids.update(eos_ids)
        if eos_ids:
            settings.eos_id = eos_ids[0]
        bos_id = content.get("bos_token_id")
        if isinstance(bos_id, int):
            settings.bos_id = bos_id


def _read_template(settings: Settings, folder: Path, config: dict[str, Any]) -> None:
    """Read the chat template: chat_template.jinja wins over tokenizer_config.json.

    config: content of tokenizer_config.json.
    """
    file = folder / "chat_template.jinja"
    if os.path.lexists(file):
        settings.chat_template = read_template(file, settings.template_remedy)
        settings.chat_template_place = str(file)
        return
    template = config.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        template_by_name = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = template_by_name.get("default")
    if isinstance(template, str) and template:
        settings.chat_template = template
        settings.chat_template_place = f"{folder / 'tokenizer_config.json'}: chat_template"


def read_template(path: Path, remedy: str = "set tokenizer.chat_template to a Jinja file") -> str:
    """Return the text of a Jinja file.

    remedy: what to do if it cannot be read, for the error. Raises DataError for a file that cannot
    be read, or is no UTF-8 text.
    """
    try:
        return reading.read_text(path, TEMPLATE_LIMIT)
    except OSError as error:
        raise DataError(describe_template_fault(path, error, remedy)) from None
    except ValueError as error:
        raise DataError(f"{path}: found {error}, expected a Jinja text") from None
