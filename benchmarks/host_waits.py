"""How often the host waits for the device in a step of each recipe, with each value of each lever.

python -m benchmarks.host_waits --output docs/host_waits.json
python -m benchmarks.levers --output docs/measurements/levers.md
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
COUNTED = [
    setting for setting in LEVERS if LOSS not in str(setting) and "{folder}" not in str(setting)
]
NOT_RUN = "-"  # refused, or of a key that the recipe has not


def count_waits(recipe: str, setting: Setting | None) -> dict[str, int]:
    """By line, of the first rank's second step. Raises UserErrors where the two do not go
    together.
    """
    config, own = RECIPES[recipe]
    overrides = () if setting is None else setting.overrides
    ranks = 1 if setting is None else setting.ranks
    cls, cfg, wanted = build_settings(config, ranks, *own, *SMALL, *overrides)
    return check_streams(cls, cfg, wanted, compares=False).ranks[0].waits


def count(recipe: str, setting: Setting | None) -> int | str:
    """The same as one number."""
    try:
        return sum(count_waits(recipe, setting).values())
    except UserError:
        return NOT_RUN


def count_by_recipe(setting: Setting | None) -> dict[str, int | str]:
    """By recipe."""
    return {recipe: count(recipe, setting) for recipe in RECIPES}


def build_rows() -> dict[str, dict[str, int | str]]:
    """By setting, "" for none, and recipe."""
    found = {}
    for setting in [None, *COUNTED]:
        found["" if setting is None else str(setting)] = row = call_in_fork(
            count_by_recipe, setting
        )
        print(setting, row, flush=True)
    return found


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="docs/host_waits.json")
    parser.parse_args().output.write_text(json.dumps(build_rows(), indent=1) + "\n")


if __name__ == "__main__":
    main()
