"""Count how often the host waits for the device in a step, of each recipe with each lever.

Run `python -m benchmarks.host_waits --output docs/host_waits.json`; `benchmarks.levers` writes the
counts into its page. A lever is a config key that trades memory for time or precision, a setting a
value of it. Waits are counted on a simulated device, without a GPU.
"""

import argparse
import json
from pathlib import Path

from recipe_lib.errors import UserError
from recipe_lib.plan.streams.check_recipe import check_streams
from tests.plan.apart import build_settings, call_in_fork
from tests.recipes.levers import LEVERS, LOSS, Setting

# Recipe on the page -> (config, overrides that it needs).
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
# Without settings of a loss of the tests' own, or of files that only a test writes.
COUNTED = [
    setting for setting in LEVERS if LOSS not in str(setting) and "{folder}" not in str(setting)
]
NOT_RUN = "-"  # the config is refused, or the recipe has no such key


def count_waits(recipe: str, setting: Setting | None) -> dict[str, int]:
    """Count the waits of the first rank's second step, by the line of code that waits.

    setting: None for the plain recipe. Raises UserError if the two do not go together.
    """
    config, recipe_overrides = RECIPES[recipe]
    overrides = () if setting is None else setting.overrides
    ranks = 1 if setting is None else setting.ranks
    recipe_class, cfg, plan_settings = build_settings(
        config, ranks, *recipe_overrides, *SMALL, *overrides
    )
    return check_streams(recipe_class, cfg, plan_settings, compares=False).ranks[0].waits


def count(recipe: str, setting: Setting | None) -> int | str:
    """Return the waits of all lines together, or NOT_RUN if the two do not go together."""
    try:
        return sum(count_waits(recipe, setting).values())
    except UserError:
        return NOT_RUN


def count_by_recipe(setting: Setting | None) -> dict[str, int | str]:
    """Count the waits of each recipe with a setting."""
    return {recipe: count(recipe, setting) for recipe in RECIPES}


def build_rows() -> dict[str, dict[str, int | str]]:
    """Return setting (empty: none) -> recipe -> waits."""
    rows = {}
    for setting in [None, *COUNTED]:
        # In a fork, since a simulated device cannot be removed from a process.
        row = call_in_fork(count_by_recipe, setting)
        rows["" if setting is None else str(setting)] = row
        print(setting, row, flush=True)
    return rows


def main() -> None:
    """Count all waits and write the file."""
    parser = argparse.ArgumentParser(
        description="Count how often the host waits for the device in a step.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="docs/host_waits.json")
    parser.parse_args().output.write_text(json.dumps(build_rows(), indent=1) + "\n")


if __name__ == "__main__":
    main()
