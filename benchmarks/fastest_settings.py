"""The fastest settings that fit the cards that a shipped config is meant for, which its header
says.

    python -m benchmarks.fastest_settings                      all configs, a minute or two of CPU time for each
    python -m benchmarks.fastest_settings llama3/8B_lora ...   some

Found by the search of `tune plan --search`, and kept in benchmarks/fastest_settings.json; how the
base weights of adapters are rounded is left as it is. `benchmarks/planned_peaks.py` writes the
headers, of which this calls that part.
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

METHOD = "lora.quantize_base"  # which way to train a config is, not a setting


@dataclass
class Fastest:
    """cards: how many of how many GB. settings: overrides of the config, as typed. Both speeds:
    tokens a second of all cards; shipped: of the config as it is.
    """

    cards: str
    settings: str
    tokens_per_second: float
    shipped: float


def main() -> None:
    """Searches for the configs that are named, or all, on all cores, and writes their headers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="CONFIG")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    found, plans = read_fastest(), read_plans()
    chosen = arguments.names or [name for name in list_names() if not name.startswith("demo/")]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=spawn, max_tasks_per_child=1) as pool:
        begun = {
            pool.submit(find_fastest, name, *find_meant_cards(plans[name])): name for name in chosen
        }
        for future in as_completed(begun):
            name = begun[future]
            found[name] = asdict(future.result())
            FASTEST.write_text(
                json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8"
            )
            write_header(name, plans[name])
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)


def find_fastest(name: str, size: int, ranks: int) -> Fastest:
    """The fastest settings of a config on so many cards of so many GB, in this process."""
    cards = f"{ranks}x{size}GB"
    best = search_settings(name, cards).fitting[0]
    cfg, settings = prepare_request(name, cards)
    kind = find_recipe_class(find_config_recipe(name))
    plain = estimate_run(kind, cfg, settings)
    return Fastest(cards, format_overrides(best.changes), best.speed, plain.tokens / plain.seconds)


def search_settings(name: str, cards: str, words: tuple[str, ...] = ()) -> SearchResult:
    """The fastest settings of a config with these overrides, which stay, on cards such as `4x24GB`;
    in this process.
    """
    cfg, settings = prepare_request(name, cards, words)
    fixed = {word.partition("=")[0] for word in words} | {METHOD}
    return search(
        find_recipe_class(find_config_recipe(name)), cfg, settings, want=1, fixed=fixed, processes=1
    )


def prepare_request(
    name: str, cards: str, words: tuple[str, ...] | list[str] = ()
) -> tuple[Any, PlanSettings]:
    """What a plan takes: the config and where it runs, with sequences as long as it allows."""
    cfg, _ = make_plannable(load_config(name, words, find_config_recipe(name).schema()))
    ranks, hardware = parse_fit(cards)
    sequence = choose_sequence(cfg, "max", ranks=ranks)
    return cfg, PlanSettings(hardware, sequence, ranks, phases=("load", "save"))


if __name__ == "__main__":
    main()
