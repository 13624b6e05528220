"""The conversation of `tune generate` without --prompt: lines of a terminal, or of a pipe, one a turn.

Standard output carries the answers alone; a terminal's prompt and every note go to where they can be seen.
"""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from recipe_lib.config.suggest import did_you_mean
from recipe_lib.errors import ConfigError, DataError
from recipe_lib.logs import wrapped

if TYPE_CHECKING:
    from recipe_lib.generation.conversation import Chat

HELP = "/reset forgets what was said, /exit or Ctrl-D ends, Ctrl-C stops an answer"
_COMMANDS = ("/reset", "/exit", "/help")


def is_terminal() -> bool:
    """Whether somebody types."""
    return bool(sys.stdin and sys.stdin.isatty())


def talk(chat: "Chat", name: str) -> None:
    """Answers line by line until the lines end. name: of the model, for a terminal's first line.

    A line that cannot be answered is told at a terminal; in a pipe it ends the conversation (ConfigError, DataError).
    """
    if is_terminal():
        tell(f"{name}; {HELP}")
    for number, line in enumerate(lines(), start=1):
        question = line.strip()
        if question == "/exit":
            return
        if question == "/reset":
            chat.reset()
            tell("the conversation begins anew")
        elif question == "/help":
            tell(HELP)
        elif _is_broken(question):  # at a terminal
            tell("note: this line is not UTF-8 and was left out; check the terminal's encoding")
        elif question and not _is_misspelled(question):
            _answer(chat, line, number)


def _is_misspelled(question: str) -> bool:
    """A command that is none; what is piped in may begin like one."""
    if not is_terminal() or not question.startswith("/") or " " in question:
        return False
    hint = did_you_mean(question, _COMMANDS)
    if hint:
        tell(f"{question}: no such command{hint}")
    return bool(hint)


def _answer(chat: "Chat", question: str, number: int) -> None:
    """Prints an answer as it is made. At a terminal what goes wrong with one question is told, and the next one may be
    asked; who reads the answers to a pipe would take the next one for this. number: of the line."""
    begun = False
    try:
        with contextlib.closing(chat.answer(question)) as pieces:
            for piece in pieces:
                begun = True
                sys.stdout.write(piece)
                sys.stdout.flush()
    except (ConfigError, DataError) as error:
        if begun:
            raise
        if not is_terminal():
            again = "; a line /reset before it begins anew" if chat.messages else ""
            raise type(error)(*(f"standard input: line {number}: {fault}{again}" for fault in error.faults)) from error
        tell(f"note: {error}; this line was left out, /reset begins anew")
        return
    except KeyboardInterrupt:
        if not is_terminal():
            raise
        print(flush=True)
        tell("stopped")
        return
    print(flush=True)
    if chat.why_ended:
        tell(f"note: {chat.why_ended}")


def _is_broken(line: str) -> bool:
    """Whether it had bytes that are not UTF-8, as `surrogateescape` keeps them."""
    return any("\ud800" <= letter <= "\udfff" for letter in line)


def lines() -> Iterator[str]:
    """The lines that are typed or piped in, without their ends. ConfigError for a piped one that is not UTF-8."""
    return _typed() if is_terminal() else _piped()


def _typed() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then has its keys and its history)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # input() would fail, or not, by the locale
    while True:
        try:
            if sys.stdout.isatty():
                yield input("> ")
            else:  # input() would write its prompt among the answers
                print("> ", end="", file=sys.stderr, flush=True)
                yield input()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)


def _piped() -> Iterator[str]:
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    for number, line in enumerate(sys.stdin or (), start=1):
        if _is_broken(line):
            raise ConfigError(f"standard input: line {number} is not UTF-8; give it in UTF-8 text")
        yield line.rstrip("\r\n")


def tell(line: str) -> None:
    """A line for whoever sits at the terminal, broken between words there."""
    if sys.stderr.isatty():
        line = wrapped(line, shutil.get_terminal_size((80, 24)).columns)
    print(line, file=sys.stderr, flush=True)
