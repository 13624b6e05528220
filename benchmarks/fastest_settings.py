"""Search the fastest settings of shipped configs on the cards that they are meant for.

Run `python -m benchmarks.fastest_settings [CONFIG ...]`; all configs take minutes of CPU time each.
The results are kept in benchmarks/fastest_settings.json, and written into the comments at the head
of the config's file. fit.py and longest.py call `search_settings` and `prepare_request`.
"""

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.planned_peaks import (
    FASTEST,
    find_meant_cards,
    list_names,
    read_fastest,
    read_plans,
    write_header,
)
from recipe_lib.cli.plan_request import find_recipe_class
from recipe_lib.cli.recipes import find_config_recipe
from recipe_lib.config import load_config
from recipe_lib.plan.build_plan import PlanSettings
from recipe_lib.plan.hardware import parse_fit
from recipe_lib.plan.search.fastest_settings import SearchResult, search
from recipe_lib.plan.search.trials import estimate_run, format_overrides
from recipe_lib.plan.simulated_world.planned_data import choose_sequence
from recipe_lib.plan.simulated_world.shape_only_model import make_plannable

# Not searched: it tells LoRA from QLoRA, which have configs of their own.
METHOD = "lora.quantize_base"


@dataclass
class Fastest:
    """Hold the fastest settings of a config."""

    cards: str  # how many of how many GB, such as `4x24GB`
    settings: str  # overrides of the config, as they are typed
    tokens_per_second: float  # of all cards
    shipped: float  # tokens a second of all cards, of the config as it is


def main() -> None:
    """Search for the configs that are named, or for all, and write results and headers of files."""
    parser = argparse.ArgumentParser(
        description="Search the fastest settings of shipped configs on their cards.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="CONFIG")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    fastest = read_fastest()  # by config's name, `Fastest` as a dict
    plans = read_plans()  # by config's name, planned bytes by number of ranks
    chosen_names = arguments.names or [
        name for name in list_names() if not name.startswith("demo/")
    ]
    # A new process for each search: a simulated device cannot be removed from a process.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=spawn, max_tasks_per_child=1) as pool:
        searches = {
            pool.submit(find_fastest, name, *find_meant_cards(plans[name])): name
            for name in chosen_names
        }
        for future in as_completed(searches):
            name = searches[future]
            fastest[name] = asdict(future.result())
            FASTEST.write_text(
                json.dumps(dict(sorted(fastest.items())), indent=1) + "\n", encoding="utf-8"
            )
            write_header(name, plans[name])
            print(f"{name}: {fastest[name]}", file=sys.stderr, flush=True)


def find_fastest(name: str, size: int, ranks: int) -> Fastest:
    """Find the fastest settings of a config on `ranks` cards of `size` GB, in this process.

    Raises IndexError if nothing fits, though the config is meant for these cards.
    """
    cards = f"{ranks}x{size}GB"
    best = search_settings(name, cards).fitting[0]
    cfg, settings = prepare_request(name, cards)
    recipe_class = find_recipe_class(find_config_recipe(name))
    estimate = estimate_run(recipe_class, cfg, settings)
    return Fastest(
        cards=cards,
        settings=format_overrides(best.changes),
        tokens_per_second=best.speed,
        shipped=estimate.tokens / estimate.seconds,
    )


def search_settings(name: str, cards: str, words: tuple[str, ...] = ()) -> SearchResult:
    """Search for the fastest settings of a config on cards such as `4x24GB`, in this process.

    words: overrides, whose keys are not searched.
    """
    cfg, settings = prepare_request(name, cards, words)
    fixed = {word.partition("=")[0] for word in words} | {METHOD}
    return search(
        find_recipe_class(find_config_recipe(name)), cfg, settings, want=1, fixed=fixed, processes=1
    )


def prepare_request(
    name: str, cards: str, words: tuple[str, ...] | list[str] = ()
) -> tuple[Any, PlanSettings]:
    """Return (config, settings of its plan) for cards such as `4x24GB`.

    words: overrides. Sequences have max_seq_len tokens; the plan is of loading and saving, too.
    """
    cfg, _ = make_plannable(load_config(name, words, find_config_recipe(name).load_schema()))
    ranks, hardware = parse_fit(cards)
    sequence = choose_sequence(cfg, "max", ranks=ranks)
    return cfg, PlanSettings(hardware, sequence, ranks, phases=("load", "save"))


if __name__ == "__main__":
    main()
