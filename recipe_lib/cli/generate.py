"""Print answers of a model, or of an adapter on its base, as they are made, for `tune generate`.

main.py calls `run(words)`, which reads the command line. answer.py, which imports torch, loads and
answers, and calls `talk` here for a conversation, lines of a terminal or of a pipe. Standard output
has the text and one newline after it; everything else goes to standard error.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from recipe_lib.cli.arguments import (
    DRAW_OPTIONS,
    STORAGES,
    SWITCH,
    Parser,
    check_output_path,
    find_draw_faults,
    find_lone_options,
    find_low_numbers,
)
from recipe_lib.config.local_files import check_model_present
from recipe_lib.config.suggest import show
from recipe_lib.errors import DONE, ConfigError, DataError, raise_faults
from recipe_lib.logs import print_wrapped
from recipe_lib.units import choose_lines

if TYPE_CHECKING:
    from recipe_lib.generation.sample import Chat

DESCRIPTION = """Answers with a model, and streams the text to standard output.

WHAT is a model folder, the folder of a PEFT adapter (its base is found by its \
adapter_config.json), a run's output_dir
(its model/ or adapter/, the newer one), or a hub id that `tune download` has fetched.

With --prompt it gives one answer. Without, it is a conversation: what is typed is answered, and \
so is each line of a
pipe. /reset forgets what was said, /exit or Ctrl-D ends, Ctrl-C stops an answer.

--prompts answers those of a file in batches, one JSON object a line; with --out FILE a second \
start goes on with it.

The prompt is a user's message: it is put into the tokenizer's chat template, or without one into \
the plain template
that training uses. --raw takes it as the beginning of the text itself; --raw --prompt '' begins \
from nothing."""

DTYPES = ("auto", "fp32", "bf16", "fp16", "fp64")  # of --dtype
PROMPT_SUFFIXES = (".txt", ".jsonl")  # of --prompts
# At a terminal, the first line of a conversation.
CHAT_HELP = "/reset forgets what was said, /exit or Ctrl-D ends, Ctrl-C stops an answer"
PARSER = Parser(
    "generate",
    DESCRIPTION,
    {
        "checkpoint": {
            "metavar": "WHAT",
            "help": "model, adapter or output_dir, or a hub id that was downloaded",
        },
        "--prompt": {
            "metavar": "TEXT",
            "help": "what to answer or to continue; without it: a conversation",
        },
        "--prompts": {"metavar": "FILE", "help": "prompts to answer: .txt, one a line, or .jsonl"},
        "--out": {
            "metavar": "FILE",
            "help": "--prompts: where the answers go; default: standard output",
        },
        "--batch-size": {
            "type": int,
            "metavar": "N",
            "help": "--prompts: answered at a time; default: 8",
        },
        "--system": {"metavar": "TEXT", "help": "the system's message, before everything else"},
        "--raw": SWITCH | {"help": "continue the prompt as it stands, without a template"},
        "--base": {
            "metavar": "MODEL",
            "help": "an adapter's base; default: the one that the adapter names",
        },
        "--quantize-base": {
            "default": "auto",
            "choices": STORAGES,
            "help": "how an adapter's base is kept; auto: as it was trained",
        },
        **DRAW_OPTIONS,
        "--dtype": {"default": "auto", "choices": DTYPES, "help": "auto: the checkpoint's"},
        "--device": {
            "default": "auto",
            "choices": ("auto", "cpu", "cuda"),
            "help": "auto: cuda if there is one",
        },
    },
)


def run(words: list[str]) -> int:
    """Load the model, and print one answer, those of a file, or those of a conversation."""
    arguments = PARSER.parse(words)
    check_options(arguments)
    # Before torch is imported, which takes seconds.
    for name in filter(None, (arguments.checkpoint, arguments.base)):
        check_model_present(name)

    from recipe_lib.report.phases import importing

    with importing("torch"):
        from recipe_lib.cli.answer import answer
    answer(arguments, talk)
    return DONE


def check_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that make no sense, all of them at once.

    Sets `arguments.batch_size` to 8 if it is not given.
    """
    # Options of --prompts that are given without it.
    lone = [
        name
        for name in ("out", "batch_size")
        if getattr(arguments, name) is not None and arguments.prompts is None
    ]
    faults = choose_lines(
        (
            arguments.prompt == "" and not arguments.raw,
            "--prompt: is empty; give a text, or begin from nothing with --raw",
        ),
        (
            arguments.prompt is not None and arguments.prompts,
            "--prompt: --prompts has prompts already; leave one of the two out",
        ),
        (
            arguments.prompts is not None and Path(arguments.prompts).suffix not in PROMPT_SUFFIXES,
            f"--prompts: found {show(str(arguments.prompts))}, expected a file"
            f" {' or '.join(PROMPT_SUFFIXES)}",
        ),
        (
            arguments.raw and arguments.prompt is None and arguments.prompts is None,
            "--raw: continues a text, and there is none; give it with --prompt",
        ),
        (
            arguments.raw and arguments.system is not None,
            "--system: --raw writes no messages; leave one of the two out",
        ),
        (arguments.system == "", "--system: is empty; give a text, or leave it out"),
        (_is_broken(arguments.prompt or ""), "--prompt: is not UTF-8; give it in UTF-8 text"),
        (_is_broken(arguments.system or ""), "--system: is not UTF-8; give it in UTF-8 text"),
    )
    # A --batch-size without --prompts is told already.
    low = find_low_numbers(arguments, **({} if lone else {"batch_size": 1}))
    raise_faults(
        ConfigError,
        [*find_draw_faults(arguments), *find_lone_options(lone, "--prompts"), *low, *faults],
    )
    arguments.batch_size = arguments.batch_size or 8
    if arguments.out is not None:
        out = str(Path(arguments.out).expanduser())
        check_output_path("--out", out, [("--prompts", arguments.prompts)], makes_folders=True)


def is_interactive() -> bool:
    """Return True if somebody types: standard input is a terminal."""
    return bool(sys.stdin and sys.stdin.isatty())


def talk(chat: "Chat", name: str) -> None:
    """Answer line by line until the lines end. name: of the model, for a terminal's first line.

    At a terminal a line that cannot be answered is a note. In a pipe it raises ConfigError or
    DataError, which ends the conversation.
    """
    if is_interactive():
        _tell(f"{name}; {CHAT_HELP}")
    for number, line in enumerate(
        _read_typed_lines() if is_interactive() else _read_piped_lines(), start=1
    ):
        question = line.strip()
        if question == "/exit":
            return
        if question == "/reset":
            chat.reset()
            _tell("the conversation begins anew")
        elif _is_broken(question):  # at a terminal; a pipe's reader raises
            _tell("note: this line is not UTF-8 and was left out; check the terminal's encoding")
        elif question:
            _print_answer(chat, line, number)


def _print_answer(chat: "Chat", question: str, number: int) -> None:
    """Print an answer as it is made. number: of the line that asked.

    Raises ConfigError or DataError for a line of a pipe that cannot be answered, which at a
    terminal is a note.
    """
    has_begun = False
    try:
        with contextlib.closing(chat.answer(question)) as pieces:
            for piece in pieces:
                has_begun = True
                sys.stdout.write(piece)
                sys.stdout.flush()
    except (ConfigError, DataError) as error:
        if has_begun:
            raise
        # A pipe's reader would take the next answer for this one.
        if not is_interactive():
            hint = "; a line /reset before it begins anew" if chat.messages else ""
            raise type(error)(
                *(f"standard input: line {number}: {fault}{hint}" for fault in error.faults)
            ) from error
        _tell(f"note: {error}; this line was left out, /reset begins anew")
        return
    except KeyboardInterrupt:
        if not is_interactive():
            raise
        print(flush=True)
        _tell("stopped")
        return
    print(flush=True)
    if chat.why_ended:
        _tell(f"note: {chat.why_ended}")


def _is_broken(line: str) -> bool:
    """Return True if a line had bytes that are not UTF-8: Python reads them as lone surrogates."""
    return any("\ud800" <= letter <= "\udfff" for letter in line)


def _read_typed_lines() -> Iterator[str]:
    """Yield the lines that are typed at a terminal, until Ctrl-D; Ctrl-C drops a line."""
    # Once it is imported, input() has readline's keys and history.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    # Without it, the locale decides whether input() fails at bytes that are not UTF-8.
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            if sys.stdout.isatty():
                yield input("> ")
            else:
                # input() would write its prompt to standard output, among the answers.
                print("> ", end="", file=sys.stderr, flush=True)
                yield input()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)


def _read_piped_lines() -> Iterator[str]:
    """Yield the lines of a pipe. Raises ConfigError for one that is not UTF-8."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    for number, line in enumerate(sys.stdin or (), start=1):
        if _is_broken(line):
            raise ConfigError(f"standard input: line {number} is not UTF-8; give it in UTF-8 text")
        yield line.rstrip("\r\n")


def _tell(line: str) -> None:
    print_wrapped(line, sys.stderr)
