"""The options of a command line that say how tokens are drawn."""

import argparse

from recipe_lib.cli.arguments import Parser


def add_draw_options(options: Parser) -> None:
    """--max-new-tokens, --temperature, --top-k, --top-p, --seed."""
    options.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of an answer; default: 256")
    temperature = "0 (default): always the likeliest token; 1: draw as the model was trained"
    options.add_argument("--temperature", type=float, default=0.0, metavar="T", help=temperature)
    options.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    options.add_argument("--top-p", type=float, metavar="P", help="draw from the fewest likeliest that sum to P")
    options.add_argument("--seed", type=int, default=42, help="of the draws; default: 42")


def draw_faults(arguments: argparse.Namespace) -> list[str]:
    """What is wrong with how many tokens are to be drawn, and how."""
    temperature, top_k, top_p = arguments.temperature, arguments.top_k, arguments.top_p
    faults = []
    if arguments.max_new_tokens < 1:
        faults.append(f"--max-new-tokens: found {arguments.max_new_tokens}, expected a number >= 1")
    if not 0 <= temperature < float("inf"):
        faults.append(f"--temperature: found {temperature}, expected a number >= 0")
    if top_k is not None and top_k < 1:
        faults.append(f"--top-k: found {top_k}, expected a number >= 1")
    if top_p is not None and not 0 < top_p <= 1:
        faults.append(f"--top-p: found {top_p}, expected a number above 0 and up to 1")
    if temperature == 0 and (top_k is not None or top_p is not None):
        given = " and ".join(name for name, value in (("--top-k", top_k), ("--top-p", top_p)) if value is not None)
        faults.append(f"{given}: without effect at temperature 0, which takes the likeliest token; add --temperature 1")
    if not 0 <= arguments.seed < 2**63:
        faults.append(f"--seed: found {arguments.seed}, expected a number from 0 to 2^63 - 1")
    return faults
