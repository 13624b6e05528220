"""Renders conversations, by the tokenizer's chat template or by the built-in plain one."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from recipe_lib.data.escaping import Escape, SpecialTokens, encode_escaped
from recipe_lib.data.plain_template import bos_text, eos_text, plain_or_fault
from recipe_lib.data.samples import Conversation, Message, SampleFault
from recipe_lib.data.template_behavior import Habits, learn_habits
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import RenderRequest, Tokenizer
from recipe_lib.tokenizers.tokenizer import TurnEnd

Tools = Sequence[Mapping[str, Any]] | None


class Template:
    """Holds what writes conversations for one tokenizer, and what is known of it.

    special: looks for special tokens. stops: the tokens that generation stops at, as text.
    """

    def __init__(self, tokenizer: Tokenizer, special: SpecialTokens, is_chat: bool, add_bos: bool) -> None:
        """is_chat: the tokenizer's own template, not the plain one. add_bos: for the plain one."""
        self.tokenizer = tokenizer
        self.special = special
        self.is_chat = is_chat
        # It is written, so that what follows is encoded as it is after BOS.
        self._bos = bos_text(tokenizer, add_bos)
        self.stops = {tokenizer.token_bytes(i).decode(errors="replace") for i in tokenizer.stop_ids}

    @cached_property
    def end(self) -> TurnEnd:
        """Return how an answer ends; the plain template has no token but EOS for it."""
        return self.tokenizer.turn_end if self.is_chat else TurnEnd()

    @cached_property
    def habits(self) -> Habits:
        """Return what the template makes of thoughts and tool calls."""
        source = self.tokenizer.chat_template
        if not self.is_chat or source is None:
            return Habits()
        letter = self.special.unused_letters([], 1)[0]
        return learn_habits(self.tokenizer.render_chats, source, self.special.pattern, letter)

    def render(
        self,
        messages: Sequence[Message],
        requests: Sequence[RenderRequest],
        tools: Tools = None,
        options: Mapping[str, Any] | None = None,
    ) -> Sequence[str | DataError]:
        """Return renderings of one conversation, all made in one go; where the template objects, what it said.

        options: as `ChatTemplate.render_many` has them. Raises DataError: the template cannot be run at all.
        """
        if self.is_chat:
            return self.tokenizer.render_chats(messages, requests, tools, options)
        eos = eos_text(self.tokenizer)
        return [plain_or_fault(messages, request, eos, self._bos) for request in requests]


class RenderedChat:
    """Holds a conversation and its renderings, each of which is made once."""

    def __init__(self, template: Template, conversation: Conversation, escape: Escape) -> None:
        """escape: how special tokens in the conversation's texts are written."""
        self.template = template
        self.escape = escape
        self.messages = conversation.messages
        self.tools = conversation.tools
        self.places = conversation.places
        self._variables = conversation.variables
        self._renderings = dict[RenderRequest, str | DataError]()

    @property
    def whole(self) -> str:
        """Return the rendering of all messages. Raises SampleFault like `get_text`."""
        return self.get_text(RenderRequest(len(self.messages)))

    @cached_property
    def letters(self) -> Sequence[str]:
        """Return two letters that neither the conversation nor the template holds."""
        content = [self.messages, self.tools, self._variables]
        return self.template.special.unused_letters(content, 2)

    def render(
        self,
        requests: Sequence[RenderRequest],
        messages: Sequence[Message] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Sequence[str | DataError]:
        """Return renderings as `Template.render` does. messages: other ones; the sample's variables win."""
        given = dict(options or {})
        if self._variables:
            given["variables"] = {**given.get("variables", {}), **self._variables}
        return self.template.render(messages or self.messages, requests, self.tools, given or None)

    def fetch(self, requests: Iterable[RenderRequest]) -> None:
        """Make the renderings that will be asked for, in one go."""
        missing = [one for one in dict.fromkeys(requests) if one not in self._renderings]
        if missing:
            self._renderings |= zip(missing, self.render(missing), strict=True)

    def get_text(self, request: RenderRequest) -> str:
        """Return a rendering. Raises SampleFault for what the template objects to."""
        self.fetch([request])
        return require_text(self._renderings[request])

    def show_tokens(self, text: str) -> list[str]:
        """Return a text as tokens, for error lines."""
        tokenizer = self.template.tokenizer
        ids = encode_escaped(tokenizer, [text], self.escape)[0]
        return [tokenizer.token_bytes(i).decode(errors="replace") for i in ids]


def require_text(rendering: str | DataError) -> str:
    """Return a rendering.

    Raises SampleFault: a template that objects to a conversation makes the sample a bad one, not the run.
    """
    if isinstance(rendering, DataError):
        raise SampleFault("refused by the chat template", str(rendering))
    return rendering
