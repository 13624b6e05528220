"""Renders chat templates in a sandbox, and matches patterns; as a program, in a separate process.

Templates see what they see elsewhere: `messages`, `add_generation_prompt`, `tools`, the special
tokens by name, `raise_exception`, `strftime_now`, `tojson`, `{% break %}`, and `{% generation %}`
(which marks what an answer is).

As a program it reads requests as lines of JSON from standard input and answers with one line each.
It can open no file or socket, and has bounded memory and time: a template that came with a
checkpoint is somebody else's code. This file imports nothing but Jinja and the standard library, so
that it starts quickly and holds nothing to steal.
"""

import contextlib
import datetime
import html.entities  # noqa: F401
import json
import pprint  # noqa: F401  (Jinja imports it, html, textwrap, jinja2.constants, jinja2.debug late: no file opens then)
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

# The clock is frozen, or the same samples would be other tokens tomorrow and a run could not be
# resumed. It shows the date that Llama 3's templates fall back to where there is no clock.
DATE = datetime.datetime(2024, 7, 26)

SPARE_CHARACTERS = 1 << 20  # a rendering may be this much longer than 16 times what it is made from
MEMORY = 1 << 30  # bytes that the process may have


class RenderRequest(NamedTuple):
    """Asks for one rendering of a conversation."""

    num_messages: int  # of its first messages
    add_generation_prompt: bool = False  # a prompt for the next answer follows
    replacements: Sequence[
        tuple[int, str]
    ] = ()  # (number of a message, what stands in place of its content)


# `marks`: two letters to write around what `{% generation %}` holds; `variables`: more that the
# template sees.
Options = Mapping[str, Any]


class TemplateFault(Exception):  # noqa: N818  (an outcome, turned into a DataError by who asks)
    """A template that is not valid Jinja or has failed; str(): one line, without the template's
    place.
    """


def _make_sandbox() -> Any:
    """Return an environment of Jinja's, which is imported here: tokenizers are, where no template
    is rendered.
    """
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %} ... {% endgeneration %}` renders as what is between, in its own scope
        as transformers has it; the environment's `marks` stand around it, a letter each or nothing.
        """

        tags = {"generation"}

        def __init__(self, environment: jinja2.Environment) -> None:
            super().__init__(environment)
            environment.extend(marks=("", ""))

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(
                line
            )

        def _marked(self, caller: Callable[[], str]) -> str:
            begin, end = self.environment.marks  # type: ignore[attr-defined]
            return f"{begin}{caller()}{end}"

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """Also refuses the products that would fill the memory in one expression."""

        intercepted_binops = frozenset({"*", "**"})
        largest = SPARE_CHARACTERS

        def call_binop(
            self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
        ) -> Any:
            if operator == "**" or not all(
                isinstance(side, (int, float)) for side in (left, right)
            ):
                size = [
                    len(side) if hasattr(side, "__len__") else abs(side) for side in (left, right)
                ]
                if operator == "**" or size[0] * size[1] > self.largest:
                    raise jinja2.sandbox.SecurityError(f"{operator} is too large here")
            return super().call_binop(context, operator, left, right)

    return Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _dump_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """JSON as text for a model: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class Renderer:
    """A compiled template. tokens: the special tokens by their names, `bos_token` etc."""

    def __init__(self, source: str, tokens: Mapping[str, str], remedy: str = "") -> None:
        """remedy: what else than to correct it helps. Raises TemplateFault for a source that is not
        Jinja.
        """
        self._tokens, self._length = dict(tokens), len(source)
        from jinja2 import TemplateSyntaxError

        environment = _make_sandbox()
        environment.filters["tojson"] = _dump_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = DATE.strftime
        self._environment = environment
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            said = " ".join((error.message or "").split())
            raise TemplateFault(
                f"line {error.lineno}: the chat template is not valid Jinja ({said}); correct it,"
                f" or {remedy}"
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
        """Return the first messages of a conversation as text, the contents of some replaced.

        Raises TemplateFault with what the template itself objects to."""
        num_messages, prompt, replacements = request
        taken = list(messages[:num_messages])
        for number, content in replacements:
            if number < num_messages:
                taken[number] = {**taken[number], "content": content}
        options = options or {}
        self._environment.marks = options.get("marks") or ("", "")  # type: ignore[attr-defined]
        room = (
            SPARE_CHARACTERS + 16 * self._length + 16 * len(json.dumps([taken, tools], default=str))
        )
        parts, length = [], 0
        try:
            given = {"messages": taken, "add_generation_prompt": prompt, "tools": tools}
            given = {**self._tokens, "documents": None, **(options.get("variables") or {}), **given}
            for part in self._template.generate(**given):
                parts.append(part)
                length += len(part)
                if length > room:
                    _raise_exception(f"it renders more than {room} characters")
        except RecursionError:
            raise TemplateFault("the chat template failed (it calls itself without end)") from None
        except MemoryError:
            raise TemplateFault("the chat template failed (it needs too much memory)") from None
        except Exception as error:  # noqa: BLE001  (a template is a program: it can raise anything)
            said = " ".join(str(error).split()) or type(error).__name__
            raise TemplateFault(f"the chat template failed ({said})") from None
        text = "".join(parts)
        if not text.isascii() and re.search("[\ud800-\udfff]", text):
            raise TemplateFault("the chat template failed (it writes half of a character)")
        return text


def match_patterns(
    patterns: Sequence[str], names: Sequence[str], whole: bool
) -> list[int | None] | str:
    """Return for each name the number of the first pattern that matches it, None without one.

    whole: a pattern takes all of a name, not its end after a dot. Returns a text, the end of a
    sentence about it, for a pattern that is no regular expression.
    """
    compiled = []
    for pattern in patterns:
        try:
            # As `peft.utils.other.get_pattern_key` has it: no other spelling is the same for
            # `a)|(b`.
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
    """Imports what is imported only when it is used: afterwards no file can be opened."""
    import jinja2.constants
    import jinja2.debug  # noqa: F401

    warm = Renderer("{{ 'a\\n\u00e9' | tojson }}{{ strftime_now('%d %b') }}{{ ''.a.b }}", {})
    with contextlib.suppress(TemplateFault):
        warm.render([], RenderRequest(0))
    with contextlib.suppress(TemplateFault):
        Renderer("{% for %}", {})


def _limit_process() -> None:
    """No new file, no growing file, no core, bounded memory; for good."""
    if resource is None:
        return
    limits = {
        "RLIMIT_AS": MEMORY,
        "RLIMIT_FSIZE": 0,
        "RLIMIT_NOFILE": 3,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": 0,
    }
    for name, limit in limits.items():
        if hasattr(resource, name):
            with contextlib.suppress(
                ValueError, OSError
            ):  # a system may know a limit without allowing it
                resource.setrlimit(getattr(resource, name), (limit, limit))


def _answer_request(request: Any, known: dict[str, Renderer]) -> Any:
    """Matches (`patterns`, `names`, `whole`); compiles (`source`, `tokens`, `remedy`) or renders
    (`messages`, `wanted`, `tools`, `options`) with the template `name`.
    """
    if "patterns" in request:
        return match_patterns(request["patterns"], request["names"], request["whole"])
    if "source" in request:
        try:
            known[request["name"]] = Renderer(
                request["source"], request["tokens"], request["remedy"]
            )
        except TemplateFault as fault:
            return str(fault)
        except MemoryError:
            return "the chat template failed (it needs too much memory)"
        return None
    found = []
    template, given = known[request["name"]], [request["tools"], request["options"]]
    for wanted in request["wanted"]:
        try:
            found.append([template.render(request["messages"], wanted, *given), None])
        except TemplateFault as fault:
            found.append([None, str(fault)])
    return found


def _serve() -> None:
    known: dict[str, Renderer] = {}
    _warm_up()
    _limit_process()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])  # then the kernel ends the process
        sys.stdout.buffer.write(json.dumps(_answer_request(request, known)).encode("ascii") + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    _serve()
