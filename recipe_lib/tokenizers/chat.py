"""Chat templates: Jinja that came with a checkpoint, rendered in a sandbox that can neither reach out nor run away.

Templates see what they see elsewhere: `messages`, `add_generation_prompt`, `tools`, the special tokens by name,
`raise_exception`, `strftime_now`, `tojson`, `{% break %}`, and `{% generation %}` (which only marks).
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from recipe_lib.errors import DataError

# The clock stands still, or the same rows would be other tokens tomorrow and a run could not be resumed. It shows the
# date that Llama 3's templates fall back to where there is no clock.
DATE = datetime.datetime(2024, 7, 26)

SPARE_CHARACTERS = 1 << 20  # a rendering may be this much longer than 16 times what it is made from


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` renders as what is between."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Also refuses the products that would fill the memory in one expression."""

    intercepted_binops = frozenset({"*", "**"})
    largest = SPARE_CHARACTERS

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or not all(isinstance(side, (int, float)) for side in (left, right)):
            size = [len(side) if hasattr(side, "__len__") else abs(side) for side in (left, right)]
            if operator == "**" or size[0] * size[1] > self.largest:
                raise jinja2.sandbox.SecurityError(f"{operator} is too large here")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as text for a model: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class ChatTemplate:
    """A compiled chat template. place: the file it came from, for error lines."""

    def __init__(self, source: str, place: str, special_tokens: Mapping[str, str | None]) -> None:
        """Raises DataError for a template that is not Jinja."""
        self.source, self.place = source, place
        self._tokens = {role: text for role, text in special_tokens.items() if text is not None}
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = DATE.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"{place}: line {error.lineno}: the chat template is not valid Jinja ({error.message}); correct it, "
                "or set tokenizer.chat_template to another file"
            ) from None
        except RecursionError:
            raise DataError(f"{place}: the chat template is nested too deep; use another file") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as text. Raises DataError with what the template itself objects to."""
        room = SPARE_CHARACTERS + 16 * len(self.source) + 16 * len(json.dumps([messages, tools], default=str))
        parts, length = [], 0
        try:
            given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools}
            for part in self._template.generate(**self._tokens, **given, documents=None):
                parts.append(part)
                length += len(part)
                if length > room:
                    raise jinja2.TemplateError(f"it renders more than {room} characters")
        except RecursionError:
            raise DataError(f"{self.place}: the chat template failed (it calls itself without end)") from None
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{self.place}: the chat template failed ({said})") from None
        return "".join(parts)
