"""Show how tensor parallel would shard a model, from its config.json alone, for `tune tp-plan`.

main.py calls `run(words)`, which reads the command line and the config; tp_plan_report.py makes,
proves and prints plans. A plan says for each parameter whether and how ranks share it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe_lib.cli.arguments import (
    SWITCH,
    Parser,
    check_output,
    find_low_numbers,
    read_numbers,
    write_json,
)
from recipe_lib.config.local_files import format_install_line, has_package, is_hub_id
from recipe_lib.config.paths import list_presets
from recipe_lib.config.suggest import find_nearest, show
from recipe_lib.errors import DONE, ConfigError, SetupError, raise_faults
from recipe_lib.logs import silence_torchao

NOT_CERTIFIED = 3  # exit code: a plan could not be proved
# Entries of config.json that say how weights are stored, not what the model is.
STORAGE_ENTRIES = (
    "architectures",
    "auto_map",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)
DESCRIPTION = """Shows how tensor parallel would shard a model: the dimension that each parameter \
is sharded in, the
collectives, what each rank holds, and what is replicated and why. The plan comes from one forward \
of transformers'
model on the meta device: needs config.json, no weights and no GPU.

  tune tp-plan llama3/8B --tensor 2,4,8
  tune tp-plan outputs/demo/model --tensor 2 --certify

MODEL is a folder, a config.json, a hub id that was downloaded, or a preset of `model.preset`.

Exit codes: 0 a plan for at least one of the sizes; 3 --certify did not prove one of them; 2 a \
mistake to correct,
or no plan for any of the sizes."""
PARSER = Parser(
    "tp-plan",
    DESCRIPTION,
    {
        "model": {
            "metavar": "MODEL",
            "help": "folder, config.json, hub id in the cache, or preset",
        },
        "--tensor": {
            "default": "2,4,8",
            "metavar": "T,...",
            "help": "ranks of a group; default: 2,4,8",
        },
        "--tokens": {
            "type": int,
            "default": 8192,
            "metavar": "N",
            "help": "tokens of a micro-batch, b x s; default: 8192",
        },
        "--certify": SWITCH | {"help": "also prove the plan on a small copy with random weights"},
        "--json": {
            "metavar": "FILE",
            "help": "also write the plan and its numbers as JSON; -: in place of the report",
        },
    },
)


def run(words: list[str]) -> int:
    """Print the plan, and write it where asked to; return the exit code.

    Raises ConfigError if no size has a plan, and SetupError without transformers.
    """
    arguments = read_arguments(words)
    config_entries = read_model_config(arguments.model)
    if not has_package("transformers"):
        raise SetupError(
            f"tune tp-plan: found no package transformers; {format_install_line('transformers')}"
        )
    silence_torchao()
    from recipe_lib.checkpoint.open_exports import silence_transformers

    with silence_transformers():
        from recipe_lib.cli.tp_plan_report import (
            build_json,
            build_plans,
            print_report,
        )
        from recipe_lib.external.inspection import build_transformers_config

        # How weights are stored is no part of the model.
        shape = {key: value for key, value in config_entries.items() if key not in STORAGE_ENTRIES}
        config = build_transformers_config(shape, show(arguments.model))
        planned = build_plans(config, arguments.tensor, certifies=arguments.certify)
        if planned.has_failures() and any(plan.shared_tokens for plan in planned.plans.values()):
            # As a run does, fall back to a plan that does not share out tokens (without sequence
            # parallel).
            unshared = build_plans(config, arguments.tensor, tokens=False, certifies=True)
            if not unshared.has_failures():
                planned = unshared
    if arguments.json:
        write_json(arguments.json, build_json(arguments, planned))
    if arguments.json != "-":
        print_report(arguments.model, arguments.tokens, planned)
    return NOT_CERTIFIED if planned.has_failures() else DONE


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the command line, with the sizes of --tensor as numbers.

    Raises ConfigError for an option or a size that cannot be used.
    """
    arguments = PARSER.parse(words)
    arguments.tensor = read_numbers(
        "--tensor",
        arguments.tensor,
        range(2, 2**20),
        expected="numbers above 1, commas between them: 2,4,8",
    )
    raise_faults(ConfigError, find_low_numbers(arguments, tokens=1))
    check_output("--json", arguments.json, [("MODEL", arguments.model)])
    return arguments


def read_model_config(name: str) -> dict[str, Any]:
    """Return the content of MODEL's config.json. Raises ConfigError if it is not here.

    name: a folder, a config.json, a preset, or a hub id.
    """
    from recipe_lib.models.spec import read_config, read_preset_config
    from recipe_lib.plan.simulated_world.shape_only_model import find_in_hub_cache

    path = Path(name).expanduser()
    presets = list_presets()
    if path.exists():
        return read_config(path)
    if name in presets:
        return read_preset_config(name)
    cached = find_in_hub_cache(name)
    if cached is not None:
        return read_config(Path(cached))
    nearest = find_nearest(name, presets)
    if not nearest and not is_hub_id(name):
        raise ConfigError(
            f"tune tp-plan: {show(name)}: no such folder; expected a model folder, a preset, or a"
            " hub id such as OWNER/NAME"
        )
    hint = (
        f"did you mean {nearest}?"
        if nearest
        else f"fetch it with `tune download {show(name)}`, or name a preset"
    )
    raise ConfigError(
        f"tune tp-plan: {show(name)}: found no folder, no preset and nothing in the hub cache;"
        f" {hint}"
    )
