"""Render chat templates in a sandbox, and match patterns; as a program, in a separate process.

chat_template.py starts this file as a program, which reads requests as lines of JSON from standard
input and answers each with a line. It can open no file or socket, and has bounded memory and time,
because a checkpoint's template is somebody else's code. Only Jinja and the standard library are
imported, so that it starts quickly and holds no secrets. Templates see what transformers gives
them, and `{% generation %}`, which marks the text of an answer.
"""

import contextlib
import datetime
import html.entities  # noqa: F401
import json
import pprint  # noqa: F401
import re
import signal
import sys
import textwrap  # noqa: F401
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

try:
    import resource
except ImportError:  # a system without limits still has the sandbox and the time limit
    resource = None  # type: ignore[assignment]

# html.entities, pprint and textwrap are imported for Jinja, which would do so when it first uses
# them: no file can be opened by then. `_warm_up` imports the rest.

# `strftime_now` has a fixed date. With today's, the same samples would have other tokens tomorrow,
# and a run could not be resumed. It is the date that Llama 3's templates use without a clock.
DATE = datetime.datetime(2024, 7, 26)

SPARE_CHARACTERS = 1 << 20  # a rendering may have 16 times the characters of its input, and these
MEMORY = 1 << 30  # bytes of address space that the process may have


class RenderRequest(NamedTuple):
    """A request for one rendering of a conversation."""

    num_messages: int  # number of leading messages to render
    add_generation_prompt: bool = False  # whether a prompt for the next answer follows
    # For each message with another content: (index of the message, the content)
    replacements: Sequence[tuple[int, str]] = ()


# Key `marks`: two letters to write around the contents of `{% generation %}`. Key `variables`:
# further variables of the template, by name
Options = Mapping[str, Any]


# It has no Error in its name: it is sent as a text to the process that asks, which makes a
# DataError of it.
class TemplateFault(Exception):  # noqa: N818
    """Raised for a template that is not valid Jinja or fails.

    The text is one line, without the file that the template came from.
    """


def _make_sandbox() -> Any:
    """Return a Jinja environment in which a template can do no harm."""
    # Imported here, since every process that has a tokenizer imports this module.
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """The tag `{% generation %} ... {% endgeneration %}`, which renders as its contents.

        They have a scope of their own, as in transformers. The environment's `marks`, two letters
        or two empty texts, are written around the contents.
        """

        tags = {"generation"}

        def __init__(self, environment: jinja2.Environment) -> None:
            super().__init__(environment)
            environment.extend(marks=("", ""))

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            block = jinja2.nodes.CallBlock(self.call_method("_put_marks"), [], [], body)
            return block.set_lineno(line)

        def _put_marks(self, caller: Callable[[], str]) -> str:
            begin, end = self.environment.marks  # type: ignore[attr-defined]
            return f"{begin}{caller()}{end}"

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """Jinja's sandbox, which also refuses products that would fill the memory at once."""

        intercepted_binops = frozenset({"*", "**"})  # operators that Jinja hands to call_binop
        largest = SPARE_CHARACTERS  # most items of a product: characters of a text, or list items

        def call_binop(
            self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
        ) -> Any:
            sides = (left, right)
            are_numbers = all(isinstance(side, (int, float)) for side in sides)
            # Refuse all powers (9**9**9 never ends), and texts or lists repeated too often.
            if operator == "**" or not are_numbers:
                sizes = [len(side) if hasattr(side, "__len__") else abs(side) for side in sides]
                if operator == "**" or sizes[0] * sizes[1] > self.largest:
                    raise jinja2.sandbox.SecurityError(f"{operator} is too large here")
            return super().call_binop(context, operator=operator, left=left, right=right)

    return Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _dump_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """Return JSON as text for a model: nothing is escaped for HTML, as Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class Renderer:
    """A compiled template."""

    def __init__(self, source: str, tokens: Mapping[str, str], remedy: str = "") -> None:
        """Compile a template. Raises TemplateFault for a source that is not Jinja.

        tokens: text of the special tokens by role, `bos_token` etc. remedy: what to do other than
        correct the template, for error lines.
        """
        from jinja2 import TemplateSyntaxError

        self._tokens = dict(tokens)
        self._length = len(source)  # characters
        environment = _make_sandbox()
        environment.filters["tojson"] = _dump_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = DATE.strftime
        self._environment = environment
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            message = " ".join((error.message or "").split())
            raise TemplateFault(
                f"line {error.lineno}: the chat template is not valid Jinja ({message});"
                f" correct it, or {remedy}"
            ) from None
        except RecursionError:
            raise TemplateFault("the chat template is nested too deep; use another file") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        request: RenderRequest,
        tools: Any = None,
        options: Options | None = None,
    ) -> str:
        """Return the rendering that a request asks for.

        messages: {role, content, ...}. tools: descriptions of functions; None: none. options: see
        `Options`. Raises TemplateFault for a template that fails, with its own message if it raises
        an exception.
        """
        # Unpacked by position, since a request that has come as JSON is a list.
        num_messages, add_generation_prompt, replacements = request
        rendered_messages = list(messages[:num_messages])
        for number, content in replacements:
            if number < num_messages:
                rendered_messages[number] = {**rendered_messages[number], "content": content}
        options = options or {}
        self._environment.marks = options.get("marks") or ("", "")  # type: ignore[attr-defined]
        input_length = self._length + len(json.dumps([rendered_messages, tools], default=str))
        max_length = SPARE_CHARACTERS + 16 * input_length  # characters of the rendering
        variables: dict[str, Any] = {**self._tokens, "documents": None}
        variables |= options.get("variables") or {}
        # Set last, so that no sample's variables replace the conversation itself.
        variables["messages"] = rendered_messages
        variables["add_generation_prompt"] = add_generation_prompt
        variables["tools"] = tools
        parts = []
        length = 0
        try:
            # In parts, so that a template that writes without end is stopped before memory is full.
            for part in self._template.generate(**variables):
                parts.append(part)
                length += len(part)
                if length > max_length:
                    _raise_exception(f"it renders more than {max_length} characters")
        except RecursionError:
            raise TemplateFault("the chat template failed (it calls itself without end)") from None
        except MemoryError:
            raise TemplateFault("the chat template failed (it needs too much memory)") from None
        except Exception as error:  # noqa: BLE001  (a template is a program: it can raise anything)
            message = " ".join(str(error).split()) or type(error).__name__
            raise TemplateFault(f"the chat template failed ({message})") from None
        text = "".join(parts)
        # A lone surrogate, which no tokenizer can encode
        if not text.isascii() and re.search("[\ud800-\udfff]", text):
            raise TemplateFault("the chat template failed (it writes half of a character)")
        return text


def match_patterns(
    patterns: Sequence[str], names: Sequence[str], whole: bool
) -> list[int | None] | str:
    """Return for each name the index of the first pattern that matches it, None without one.

    If a pattern is no regular expression, return a text instead, the end of an error line. whole: a
    pattern has to match a whole name; else the name's end, after a dot or from its start.
    """
    compiled = []
    for pattern in patterns:
        try:
            # The same text as in `peft.utils.other.get_pattern_key`: any other would match
            # differently for patterns such as `a)|(b`.
            compiled.append(re.compile(pattern if whole else rf"(.*\.)?({pattern})$"))
        except (re.error, OverflowError, RecursionError) as error:
            return f"is no regular expression ({error})"
    pattern_numbers: list[int | None] = []
    for name in names:
        matches = (regex.fullmatch(name) if whole else regex.match(name) for regex in compiled)
        pattern_numbers.append(
            next((number for number, match in enumerate(matches) if match), None)
        )
    return pattern_numbers


def _warm_up() -> None:
    """Use Jinja once, so that it imports its modules now; afterwards no file can be opened."""
    import jinja2.constants
    import jinja2.debug  # noqa: F401

    # A filter, a date, an undefined name, and below a syntax error: Jinja imports a part for each.
    warm = Renderer("{{ 'a\\n\u00e9' | tojson }}{{ strftime_now('%d %b') }}{{ ''.a.b }}", {})
    with contextlib.suppress(TemplateFault):
        warm.render([], RenderRequest(0))
    with contextlib.suppress(TemplateFault):
        Renderer("{% for %}", {})


def _limit_process() -> None:
    """Limit this process for good: no new or growing files, cores or children, little memory."""
    if resource is None:
        return
    limits = {  # names in `resource` -> soft and hard limit
        "RLIMIT_AS": MEMORY,
        "RLIMIT_FSIZE": 0,
        "RLIMIT_NOFILE": 3,  # the three standard streams, which are open
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": 0,
    }
    for name, limit in limits.items():
        if hasattr(resource, name):
            # A system may know a limit but not allow to set it.
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(getattr(resource, name), (limit, limit))


def _answer_request(request: Any, renderers: dict[str, Renderer]) -> Any:
    """Match patterns, compile the template `name`, or render with it; return the answer.

    A request to match has the keys `patterns`, `names`, `whole`; the answer is that of
    `match_patterns`. One to compile has `name`, `source`, `tokens`, `remedy`; the answer is None,
    or the fault. One to render has `name`, `messages`, `wanted` (RenderRequests), `tools`,
    `options`; the answer is [text, None] or [None, fault] for each RenderRequest. renderers:
    compiled templates by name, to which a new one is added.
    """
    if "patterns" in request:
        return match_patterns(request["patterns"], request["names"], request["whole"])
    name = request["name"]
    if "source" in request:
        try:
            renderers[name] = Renderer(request["source"], request["tokens"], request["remedy"])
        except TemplateFault as fault:
            return str(fault)
        except MemoryError:
            return "the chat template failed (it needs too much memory)"
        return None
    answers: list[list[str | None]] = []
    for render_request in request["wanted"]:
        try:
            text = renderers[name].render(
                request["messages"],
                render_request,
                tools=request["tools"],
                options=request["options"],
            )
            answers.append([text, None])
        except TemplateFault as fault:
            answers.append([None, str(fault)])
    return answers


def _serve() -> None:
    renderers: dict[str, Renderer] = {}
    _warm_up()
    _limit_process()  # after the imports, which open files
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # After this time SIGALRM, which has no handler, ends the process.
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        answer = json.dumps(_answer_request(request, renderers))
        sys.stdout.buffer.write(answer.encode("ascii") + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    _serve()
