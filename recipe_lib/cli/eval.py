"""`tune eval [torchrun flags] WHAT [key=value ...]`: what was trained, measured on held-out samples, and its base."""

from pathlib import Path

from recipe_lib.cli.eval_options import check, parser, read
from recipe_lib.cli.launch import launch
from recipe_lib.cli.torchrun_flags import check_launch, take_flags, with_rendezvous
from recipe_lib.errors import DONE, ConfigError

__all__ = ["parser", "run"]


def run(words: list[str]) -> int:
    """Evaluates, in this process or on several ranks; prints the numbers."""
    flags, rest = take_flags(words, "eval")
    arguments = read(rest)
    check(arguments)
    check_launch(flags, "eval")
    if flags:
        if arguments.lm_eval:
            raise ConfigError("--lm-eval: runs in one process; leave torchrun's flags out")
        return launch(with_rendezvous(flags), Path(__file__).with_name("eval_ranks.py"), rest)
    from recipe_lib.cli.eval_ranks import evaluate

    evaluate(arguments)
    return DONE
