"""Run the command `tune`: find the verb, its first word, and hand it the rest of the command line.

A verb is a module of this package with `run(words) -> exit code` and its PARSER. Only the verb that
was asked for is imported, and none of them imports torch before it needs it.
"""

import errno
import importlib
import io
import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from recipe_lib import __version__
from recipe_lib.errors import DONE, ConfigError, StorageError, run_for_exit_code, say, send_nowhere
from recipe_lib.logs import VERBOSITY, set_verbosity

# Verb -> its line in `tune --help`, in this order.
VERBS = {
    "ls": "recipes and their configs",
    "cat": "show a config: its file, every resolved value, or every key explained",
    "cp": "copy a recipe or a config, to make it yours",
    "import": "turn a config of torchtune into one of ours",
    "validate": "check a config, all faults at once",
    "download": "fetch a model from the Hugging Face hub",
    "data": "show a config's sequences as they will be trained, or check all of them",
    "plan": "estimate a run's memory, communication and time before it starts; needs no GPU",
    "tp-plan": "show how tensor parallel would shard a model; needs no weights and no GPU",
    "doctor": "look at this machine: GPUs, links, memory, folders; what is wrong, and what to set",
    "run": "run a recipe, on one process or many",
    "eval": "measure what was trained on held-out samples, and its base: loss, perplexity, answers",
    "export": (
        "write what was trained as others load it: adapter, merged model, Hugging Face folder"
    ),
    "upload": "put a trained model or adapter with its card on the Hugging Face hub",
    "generate": "talk to what was trained, or complete a prompt",
    "completion": "what a shell completes after `tune`",
}
# Verbs of earlier versions -> what to do instead.
REMOVED_VERBS = {
    "teach": "the teacher runs with the model: `tune run distill_distributed` with distill.teacher"
}
# Verb -> its module, where the word is Python's own; the other modules are named as the verbs.
MODULES = {"import": "import_config"}
# Verb -> what a terminal shows while it works; the other verbs are done in a moment, or show it
# themselves.
WAITING_TEXTS = {
    "validate": "checking the config",
    "download": "asking the hub",
    "data": "reading the samples",
    "plan": "planning",
    "tp-plan": "planning",
    "doctor": "looking at this machine",
    "eval": "evaluating",
    "export": "exporting",
    "upload": "looking at the files",
}


def main(argv: list[str] | None = None) -> int:
    """Run `tune` with `argv` (default: the process's own); return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    _prepare_output()
    try:
        return run_for_exit_code(lambda: _run_and_flush(words))
    except KeyboardInterrupt:
        say("interrupted\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output is gone (`tune ls | head`). Nothing more can be said on that
        # pipe.
        send_nowhere(sys.stdout)
        return 128 + signal.SIGPIPE
    finally:
        say("")  # flushes standard error: a failure of the flush at exit would be the exit code


def _prepare_output() -> None:
    """Make standard output and error take any text, also where they are closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the descriptor was closed by `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="backslashreplace"))
        elif isinstance(stream, io.TextIOWrapper):
            # A letter that the locale's encoding lacks is written as its escape, not an exception.
            stream.reconfigure(errors="backslashreplace")


def _run_and_flush(words: list[str]) -> int:
    """Run the verb and write out its output; return the exit code.

    Raises StorageError if standard output is a file on a full disk.
    """
    try:
        try:
            code = _run_verb(words)
        except SystemExit as done:  # argparse leaves this way after --help
            code = done.code if isinstance(done.code, int) else 1
        sys.stdout.flush()  # here, where a closed pipe can still be answered
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        # An error without a file name is of a descriptor: our output, redirected to a full disk.
        send_nowhere(sys.stdout)
        raise StorageError("standard output: No space left on device; free some space") from error
    return code


def _run_verb(words: list[str]) -> int:
    # -q and -v may stand before the verb; `tune help VERB` is `tune VERB --help`.
    while words and words[0] in VERBOSITY:
        set_verbosity(VERBOSITY[words[0]])
        words = words[1:]
    if words and words[0] == "help":
        verbs = [word for word in words[1:] if word not in (*VERBOSITY, "help")]
        words = [*verbs[:1], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(_format_help())
        return DONE
    verb, *verb_words = words
    if verb in ("-V", "--version"):
        print(__version__)
        return DONE
    if verb in REMOVED_VERBS:
        raise ConfigError(f"tune: {verb}: {REMOVED_VERBS[verb]}")
    if verb not in VERBS:
        from recipe_lib.config.suggest import did_you_mean, show

        kind = "option" if verb.startswith("-") else "verb"
        known = [*VERBOSITY, "--version", "--help"] if kind == "option" else VERBS
        hint = did_you_mean(verb, known) or f"; one of: {', '.join(known)}"
        raise ConfigError(f"tune: unknown {kind} {show(verb)!r}{hint}")
    with _show_progress(verb):
        return importlib.import_module(get_module_name(verb)).run(verb_words)


def get_module_name(verb: str) -> str:
    """Return the name of the module that has a verb's PARSER and `run`."""
    return f"recipe_lib.cli.{MODULES.get(verb, verb.replace('-', '_'))}"


def _show_progress(verb: str) -> AbstractContextManager[Any]:
    if verb not in WAITING_TEXTS:
        return nullcontext()
    from recipe_lib.report.phases import phase  # imports rich, which `tune --help` does without

    return phase(WAITING_TEXTS[verb], leaves_line=False)


def _format_help() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:{width}}  {text}" for name, text in VERBS.items()]
    return "\n".join(
        [
            "usage: tune VERB ...",
            "",
            "Fine-tune and complete with language models, by recipes that you own.",
            "",
            *lines,
            "",
            (
                "-q says warnings and errors alone, -v more; -V the version. `tune help VERB`"
                " explains a verb."
            ),
            "Start with: tune run demo/full",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
