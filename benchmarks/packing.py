"""Measure how long packing takes and how full the packs are, for typical mixes of lengths.

Run `python -m benchmarks.packing`. A pack is a sequence of several documents, here items of some
length in tokens; its capacity is the most tokens that it holds. The number of packs is compared
with a lower bound for any way of packing, a bound of Martello and Toth (1990) for bin packing.
"""

import argparse
import time

import numpy as np

from recipe_lib.data.data_plan import pack

ITEMS = 1_000_000
# Name -> (capacity, distribution of the lengths with its parameters, as `draw_lengths` reads it).
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
    """Return (lengths in tokens, int64 `[number]`, the capacity) of one of MIXES."""
    capacity, description = MIXES[name]
    distribution, *words = description.split()
    parameters = [float(word) for word in words]
    generator = np.random.default_rng(seed)
    lengths: np.ndarray
    if distribution == "lognormal":
        mean, deviation = parameters
        lengths = generator.lognormal(mean, deviation, number)
    elif distribution == "exponential":
        lengths = generator.exponential(parameters[0], number)
    elif distribution == "uniform":
        lowest, highest = parameters
        lengths = generator.integers(int(lowest), int(highest) + 1, number)
    else:
        # Bimodal: nine of ten are short.
        short, long = parameters
        means = np.where(generator.random(number) < 0.9, short, long)
        lengths = generator.normal(means, means / 5)
    return np.clip(lengths, 1, capacity).astype(np.int64), capacity


def compute_lower_bound(lengths: np.ndarray, capacity: int) -> int:
    """Return the least number of packs that these lengths need, by the best of several bounds.

    A bound has a limit k, and leaves out items below it. Items over capacity - k then have a pack
    of their own. Other items over half of the capacity are in different packs. Items from k to the
    half fill the room beside these, then further packs.
    """
    rising = np.sort(lengths)
    sums = np.concatenate([[0], np.cumsum(rising)])  # tokens of the first n items
    half = np.searchsorted(rising, capacity // 2, side="right")  # number of items up to the half
    # No other limit gives another bound.
    limits = np.unique(np.concatenate([[0], rising[:half]]))
    # From here on arrays have an entry for each limit. Index of the first item that is alone.
    first_alone = np.searchsorted(rising, capacity - limits, side="right")
    num_alone = len(rising) - first_alone
    num_large = np.maximum(first_alone - half, 0)
    small_tokens = sums[half] - sums[np.searchsorted(rising, limits, side="left")]
    # Tokens that fit beside the large items.
    room = num_large * capacity - (sums[np.maximum(first_alone, half)] - sums[half])
    num_small_packs = np.maximum(0, -(-(small_tokens - room) // capacity))
    return int((num_alone + num_large + num_small_packs).max())


def main(argv: list[str] | None = None) -> None:
    """Measure on one core, and print a line for each mix."""
    parser = argparse.ArgumentParser(
        description="Packs synthetic lengths; prints seconds and how full the packs are."
    )
    parser.add_argument("--items", type=int, default=ITEMS)
    num_items = parser.parse_args(argv).items
    print(f"{num_items} items")
    print(
        f"{'mix':22} {'capacity':>8} {'mean':>8} {'seconds':>8} {'packs':>8} {'over bound':>10}"
        f" {'filled':>8}"
    )
    for name in MIXES:
        lengths, capacity = draw_lengths(name, num_items)
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
