"""How long packing takes and how full the packs are, for typical mixes of lengths: `python -m
benchmarks.packing`.

The lower bound says how many packs any way of packing needs at least; bounds of bin packing are due
to Martello and Toth (1990). One core; the order of the items is drawn at random.
"""

import argparse
import time

import numpy as np

from recipe_lib.data.data_plan import pack

ITEMS = 1_000_000
# name: (capacity, what the lengths are drawn from)
MIXES = {
    "instructions, 2k": (2048, "lognormal 5.3 0.8"),
    "chats, 4k": (4096, "lognormal 6.5 1.0"),
    "chats, 8k": (8192, "exponential 1200"),
    "short and long, 8k": (8192, "bimodal 200 6000"),
    "uniform, 4k": (4096, "uniform 1 4096"),
    "long documents, 32k": (32768, "lognormal 9.0 0.7"),
    "all sizes, 128k": (131072, "lognormal 7.0 1.8"),
}


def draw_lengths(name: str, number: int, seed: int = 0) -> tuple[np.ndarray, int]:
    """Lengths int64 `[number]` of one of the mixes, and the capacity that goes with it."""
    capacity, kind = MIXES[name]
    word, *numbers = kind.split()
    first, second = (*map(float, numbers), 0.0)[:2]
    draw = np.random.default_rng(seed)
    lengths: np.ndarray
    if word == "lognormal":
        lengths = draw.lognormal(first, second, number)
    elif word == "exponential":
        lengths = draw.exponential(first, number)
    elif word == "uniform":
        lengths = draw.integers(int(first), int(second) + 1, number)
    else:
        middles = np.where(draw.random(number) < 0.9, first, second)
        lengths = draw.normal(middles, middles / 5)
    return np.clip(lengths, 1, capacity).astype(np.int64), capacity


def compute_lower_bound(lengths: np.ndarray, capacity: int) -> int:
    """Packs that are needed at least: by the sum of the lengths, or by the long items that no two
    fit together.

    For a limit k: items over capacity - k share a pack with nothing that is k or longer, other
    items over half of the capacity with none of their kind; what is between k and the half fills
    what these leave, then packs of its own.
    """
    rising = np.sort(lengths)
    sums = np.concatenate([[0], np.cumsum(rising)])
    half = np.searchsorted(rising, capacity // 2, side="right")
    limits = np.unique(np.concatenate([[0], rising[:half]]))
    alone = np.searchsorted(rising, capacity - limits, side="right")
    large = np.maximum(alone - half, 0)
    small = sums[half] - sums[np.searchsorted(rising, limits, side="left")]
    left = large * capacity - (sums[np.maximum(alone, half)] - sums[half])
    return int((len(rising) - alone + large + np.maximum(0, -(-(small - left) // capacity))).max())


def main(argv: list[str] | None = None) -> None:
    """Prints a line for each mix."""
    parser = argparse.ArgumentParser(
        description="Packs synthetic lengths; prints seconds and how full the packs are."
    )
    parser.add_argument("--items", type=int, default=ITEMS)
    number = parser.parse_args(argv).items
    print(f"{number} items")
    print(
        f"{'mix':22} {'capacity':>8} {'mean':>8} {'seconds':>8} {'packs':>8} {'over bound':>10}"
        f" {'filled':>8}"
    )
    for name in MIXES:
        lengths, capacity = draw_lengths(name, number)
        began = time.perf_counter()
        packs = len(pack(lengths, capacity))
        seconds = time.perf_counter() - began
        over = packs / compute_lower_bound(lengths, capacity) - 1
        filled = lengths.sum() / (packs * capacity)
        print(
            f"{name:22} {capacity:8} {lengths.mean():8.0f} {seconds:8.2f} {packs:8} {over:10.3%}"
            f" {filled:8.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
