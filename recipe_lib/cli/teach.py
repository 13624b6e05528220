"""`tune teach --config CONFIG --out DIR`: writes a teacher's likeliest tokens, so that training needs no teacher."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe_lib.cli.arguments import Parser, add_configs, take_configs
from recipe_lib.cli.start_checks import check_data
from recipe_lib.config import DistillFinetuneConfig, load_config
from recipe_lib.config.local_files import check_folder
from recipe_lib.config.registry import load_plugin
from recipe_lib.errors import DONE, ConfigError

DTYPES = ("fp16", "bf16", "fp32")
DESCRIPTION = """Runs the teacher of a config (of the recipe distill_distributed) once over its training and validation
sequences, and writes its likeliest tokens of each label with their log-probabilities, and what is left for all others:

  tune teach --config demo/distill --top-k 64 --out outputs/taught
  tune run distill_distributed --config demo/distill ~distill.teacher distill.from_disk=outputs/taught

It takes 6 bytes of disk for each of the k tokens of a label (8 with --dtype fp32). The divergence is then between k + 1
outcomes, all other tokens being one. A call that was stopped goes on where it was. It runs on one device: a teacher
that is too large for it is smaller with distill.quantize_teacher=nf4, or on the host with
distill.stream_teacher=true."""


def parser(words: Sequence[str] = ()) -> Parser:
    """The options of the verb."""
    options = Parser("teach", DESCRIPTION)
    add_configs(options, words)
    options.add_argument("--out", required=True, metavar="DIR", help="folder to write, or to go on with")
    options.add_argument("--top-k", type=int, default=64, metavar="K", help="tokens of each label; default: 64")
    options.add_argument("--dtype", default="fp16", choices=DTYPES, help="of log-probabilities; default: fp16")
    options.add_argument(
        "--shard-sequences", type=int, default=1024, metavar="N", help="sequences in a file; default: 1024"
    )
    options.add_argument("--plugin", metavar="FILE", action="append", default=[], help="as for `tune run`")
    return options


def run(words: list[str]) -> int:
    """Writes the folder."""
    arguments = parser(words).parse(words)
    for plugin in arguments.plugin:
        load_plugin(plugin)
    cfg = read_config(arguments)
    out = Path(arguments.out).expanduser()
    check_folder(out, "--out")
    check_data(cfg)

    from recipe_lib.report.phases import importing

    with importing("torch"):
        from recipe_lib.training.write_taught import teach

    teach(cfg, out, arguments.top_k, arguments.dtype, arguments.shard_sequences)
    return DONE


def read_config(arguments: argparse.Namespace) -> Any:
    """The config, of the recipe that has a teacher; what the options ask for makes sense. ConfigError."""
    cfg = load_config(take_configs(arguments), arguments.overrides, DistillFinetuneConfig)
    faults = [
        f"{name}: found {value}, expected a number >= 1"
        for name, value in (("--top-k", arguments.top_k), ("--shard-sequences", arguments.shard_sequences))
        if value < 1
    ]
    if cfg.distill.from_disk is not None:
        faults.append("distill.from_disk: is what `tune teach` writes; set distill.teacher")
    if faults:
        raise ConfigError(*faults)
    return cfg
