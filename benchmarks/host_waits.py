"""Count how often the host waits for the device in a step, of each recipe with each lever.

    python -m benchmarks.host_waits --output docs/host_waits.json
    python -m benchmarks.levers --output docs/measurements/levers.md

The waits are counted on the simulated device; the second command writes them into its page.
"""

import argparse
import json
from pathlib import Path

from recipe_lib.errors import UserError
from recipe_lib.plan.streams.check_recipe import check_streams
from tests.plan.apart import build_settings, call_in_fork
from tests.recipes.levers import LEVERS, LOSS, Setting

# Recipe -> config, and overrides that make it small and of the device's kind.
RECIPES = {
    "full": ("demo/full", ()),
    "LoRA": ("demo/lora", ()),
    "QLoRA": ("demo/lora", ("lora.quantize_base=nf4",)),
    "DPO": (
        "tests/recipes/pairs.yaml",
        (
            "model.preset=demo/0.5M",
            "data.source=pairs.jsonl",
            "tokenizer.path=examples/demo/tokenizer",
            "dtype=fp32",
        ),
    ),
}
SMALL = ("device=auto", "max_seq_len=64", "batch_size=4")
# Settings of a loss of the tests' own, or of a run's own files, are not counted.
COUNTED = [
    setting for setting in LEVERS if LOSS not in str(setting) and "{folder}" not in str(setting)
]
NOT_RUN = "-"  # refused, or of a key that the recipe has not


def count_waits(recipe: str, setting: Setting | None) -> dict[str, int]:
    """Count the waits of the first rank's second step, by the line that waits.

    UserError where recipe and setting do not go together.
    """
    config, recipe_overrides = RECIPES[recipe]
    overrides = () if setting is None else setting.overrides
    ranks = 1 if setting is None else setting.ranks
    recipe_class, cfg, plan_settings = build_settings(
        config, ranks, *recipe_overrides, *SMALL, *overrides
    )
    return check_streams(recipe_class, cfg, plan_settings, compares=False).ranks[0].waits


def count(recipe: str, setting: Setting | None) -> int | str:
    """Count the waits of all lines together; NOT_RUN where the two do not go together."""
    try:
        return sum(count_waits(recipe, setting).values())
    except UserError:
        return NOT_RUN


def count_by_recipe(setting: Setting | None) -> dict[str, int | str]:
    """Count the waits of each recipe with a setting."""
    return {recipe: count(recipe, setting) for recipe in RECIPES}


def build_rows() -> dict[str, dict[str, int | str]]:
    """Count the waits by setting, "" for none, and recipe."""
    rows = {}
    for setting in [None, *COUNTED]:
        row = call_in_fork(count_by_recipe, setting)
        rows["" if setting is None else str(setting)] = row
        print(setting, row, flush=True)
    return rows


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="docs/host_waits.json")
    parser.parse_args().output.write_text(json.dumps(build_rows(), indent=1) + "\n")


if __name__ == "__main__":
    main()
