"""Measure a model and its base on held-out samples: `tune eval [torchrun flags] WHAT ...`.

The command `tune` calls `run(words)`, which reads the command line. With torchrun's flags each rank
runs `main` here. eval_ranks.py, which imports torch, evaluates.
"""

import argparse
import sys
from pathlib import Path

from recipe_lib.cli.arguments import (
    DRAW_OPTIONS,
    STORAGES,
    SWITCH,
    Parser,
    find_draw_faults,
    find_lone_options,
    find_low_numbers,
)
from recipe_lib.cli.launch import add_rendezvous, check_launch, launch, take_flags
from recipe_lib.config.local_files import check_model_present
from recipe_lib.config.registry import list_names, load_plugin
from recipe_lib.config.suggest import did_you_mean, show
from recipe_lib.errors import DONE, ConfigError, raise_faults, send_nowhere
from recipe_lib.units import choose_lines

DESCRIPTION = """Measures a model on held-out samples, next to the model that it was trained from.

WHAT is a run's output_dir, a model folder, an adapter's folder, or a hub id that was downloaded. \
A run is measured on
its validation.source; --data gives other samples, in any format that training reads.

Each sequence is looked at once: loss (mean over label tokens), perplexity, token_accuracy (label \
tokens that are the
likeliest ones). Then the last question of each is answered, and the answer compared with the \
sample's: exact_match, and
the metrics of a plugin. examples.jsonl has every sequence, report.html the first of them; of a \
run they are written to
its folder eval/.

Flags of torchrun (--nproc_per_node 4) divide the sequences, and with key=value \
(parallel.tensor=2, dtype=bf16) the
model, among ranks.

--lm-eval TASKS runs tasks of lm-evaluation-harness (extra `eval`) on the model in place of all \
this."""
PARSER = Parser(
    "eval",
    DESCRIPTION,
    {
        "what": {
            "metavar": "WHAT",
            "help": "output_dir, model, adapter, or a hub id that was downloaded",
        },
        "overrides": {
            "nargs": "*",
            "metavar": "key=value",
            "help": "keys of a config, such as batch_size=16 or dtype=fp32",
        },
        "--data": {
            "metavar": "SOURCE",
            "help": "held-out samples, as data.source; default: the run's validation.source",
        },
        "--format": {
            "metavar": "FORMAT",
            "help": "of --data, as data.format; default: found by its columns",
        },
        "--max-samples": {"type": int, "metavar": "N", "help": "only the first N samples"},
        "--base": {
            "metavar": "MODEL",
            "help": "the model before training; default: the one that run or adapter names",
        },
        "--no-base": SWITCH | {"help": "measure what was trained alone"},
        "--quantize-base": {
            "default": "auto",
            "choices": STORAGES,
            "help": "how an adapter's base is kept; auto: as trained",
        },
        "--metric": {
            "action": "append",
            "default": [],
            "metavar": "NAME",
            "help": "a metric that a plugin registers; repeatable",
        },
        "--plugin": {
            "action": "append",
            "default": [],
            "metavar": "FILE",
            "help": "a Python file of yours, imported first",
        },
        "--no-generate": SWITCH | {"help": "likelihoods alone, no answers"},
        **DRAW_OPTIONS,
        "--lm-eval": {
            "metavar": "TASKS",
            "help": "tasks of lm-evaluation-harness, separated by commas",
        },
        "--include-path": {"metavar": "DIR", "help": "--lm-eval: a folder with tasks of your own"},
        "--num-fewshot": {
            "type": int,
            "metavar": "N",
            "help": "--lm-eval: examples before each question",
        },
        "--limit": {
            "type": int,
            "metavar": "N",
            "help": "--lm-eval: only the first N documents of each task",
        },
        "--out": {
            "metavar": "DIR",
            "help": "where to write; default: eval/ in the run's folder, else nothing is written",
        },
        "--json": SWITCH | {"help": "the numbers as one JSON object"},
        "--recipe": {
            "metavar": "RECIPE",
            "help": "a recipe of your own that the run was made with",
        },
    },
)


def run(words: list[str]) -> int:
    """Evaluate, in this process or on several ranks; print the numbers."""
    flags, eval_words = take_flags(words, "eval")
    arguments = PARSER.parse(eval_words)
    check_options(arguments)
    check_launch(flags, "eval")
    if flags:
        if arguments.lm_eval:
            raise ConfigError("--lm-eval: runs in one process; leave torchrun's flags out")
        return launch(add_rendezvous(flags), Path(__file__), eval_words)
    from recipe_lib.cli.eval_ranks import evaluate

    evaluate(arguments)
    return DONE


def main(argv: list[str]) -> None:
    """Evaluate as one of several ranks; torchrun starts this file by its path."""
    try:
        run(argv)
    except BrokenPipeError:
        # The reader of the numbers is gone (`| head`); the rank has not failed.
        send_nowhere(sys.stdout)


def check_options(arguments: argparse.Namespace) -> None:
    """Import plugins, and raise ConfigError for options that make no sense.

    Also for an unknown metric; raises CheckpointError for a model that is not on this machine.
    """
    harness_options = [
        name
        for name in ("include_path", "num_fewshot", "limit")
        if getattr(arguments, name) is not None
    ]
    faults = choose_lines(
        (
            arguments.base and arguments.no_base,
            "--no-base: leaves out the model that --base names; remove one of the two",
        ),
        (
            arguments.format and not arguments.data,
            (
                "--format: is of --data, which is missing; write validation.format=... for the"
                " run's own samples"
            ),
        ),
        (
            arguments.metric and arguments.no_generate,
            "--metric: measures answers, which --no-generate leaves out; remove one of the two",
        ),
        (
            arguments.lm_eval and arguments.out,
            "--out: --lm-eval prints its numbers and writes nothing; leave one of the two out",
        ),
    )
    # The first option of lm-evaluation-harness that is given without it.
    lone = [] if arguments.lm_eval else find_lone_options(harness_options[:1], "--lm-eval")
    low = find_low_numbers(arguments, max_samples=1, limit=1, num_fewshot=0)
    raise_faults(ConfigError, [*find_draw_faults(arguments), *low, *faults, *lone])
    # A plugin registers metrics, among which --metric chooses.
    for plugin in arguments.plugin:
        load_plugin(plugin)
    for name in arguments.metric:
        if name not in list_names("metric"):
            known = list_names("metric")
            hint = (
                did_you_mean(name, known)
                or f"; expected one of {', '.join(known)}, or register it in a --plugin"
            )
            raise ConfigError(f"--metric: unknown metric {show(name)}{hint}")
    check_model_present(arguments.what)
