"""Writes the demo's rows: numbers, dates and units in words, as `train.jsonl` and `heldout.jsonl`
beside this file.

    python examples/demo/make_data.py

Rows are in the Alpaca format (instruction, input, output). All are drawn from a fixed seed, so the
files come out the same every time. The training file has every number below 100 and a part of those
above; the held-out file has larger numbers only, and no instruction of it occurs in the training
file. Who answers it has learned how numbers, dates and units are written, not the rows.
"""

import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SEED = 20
TRAIN_ROWS = 6000
HELDOUT_ROWS = 300

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen"
).split()
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
DAYS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth"
    " fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth twenty-first"
    " twenty-second twenty-third twenty-fourth twenty-fifth twenty-sixth twenty-seventh"
    " twenty-eighth"
).split()
# (large unit, small unit, zeros that the number gains)
UNITS = (
    ("centimetres", "millimetres", 1),
    ("metres", "centimetres", 2),
    ("kilometres", "metres", 3),
    ("kilograms", "grams", 3),
    ("litres", "millilitres", 3),
    ("euros", "cents", 2),
)


def in_words(number: int) -> str:
    """`4072` -> `four thousand and seventy-two`; 0 <= number < 10000."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    rest = number % size
    joint = " and " if 0 < rest < 100 else " "
    return f"{ONES[number // size]} {name}" + (joint + in_words(rest) if rest else "")


def to_words(number: int) -> tuple[str, str]:
    """Return the instruction that asks to spell a number out, and its answer."""
    return f"Write {number} in words.", in_words(number)


def to_digits(number: int) -> tuple[str, str]:
    """Return the instruction that asks for the digits of a number, and its answer."""
    return f"Write {in_words(number)} in digits.", str(number)


def number_to_words(draw: random.Random) -> tuple[str, str]:
    """Draw a number of three or four digits, to be spelled out."""
    return to_words(draw.randrange(100, draw.choice((1000, 10000))))


def words_to_number(draw: random.Random) -> tuple[str, str]:
    """Draw a number that is spelled out, to be written in digits."""
    return to_digits(draw.randrange(100, draw.choice((1000, 10000))))


def date_in_words(draw: random.Random) -> tuple[str, str]:
    """Draw a date of 1900 to 2099, to be spelled out."""
    year, month, day = draw.randint(1900, 2099), draw.randint(1, 12), draw.randint(1, 28)
    return (
        f"Which day is {year}-{month:02d}-{day:02d}?",
        f"the {DAYS[day - 1]} of {MONTHS[month - 1]} {year}",
    )


def unit(draw: random.Random) -> tuple[str, str]:
    """Draw a length, weight, volume or sum of money, for the next smaller unit."""
    large, small, zeros = draw.choice(UNITS)
    number = draw.randint(2, 999)
    return f"How many {small} are {number} {large}?", f"{number}{'0' * zeros} {small}"


# One round of kinds; numbers come twice, as they are the hardest.
KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    number_to_words,
    words_to_number,
    date_in_words,
    number_to_words,
    words_to_number,
    unit,
)


def draw_rows(seed: int) -> Iterator[tuple[str, str]]:
    """Endless different (instruction, answer) pairs, the kinds in turn."""
    draw, seen = random.Random(seed), set()
    while True:
        for kind in KINDS:
            row = kind(draw)
            while row[0] in seen:
                row = kind(draw)
            seen.add(row[0])
            yield row


def write_rows(name: str, rows: list[tuple[str, str]]) -> None:
    """One JSON object a line."""
    lines = [
        json.dumps({"instruction": question, "input": "", "output": answer})
        for question, answer in rows
    ]
    (FOLDER / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{FOLDER / name}: {len(rows)} rows")


def main() -> None:
    """Write both files."""
    rows = draw_rows(SEED)
    write_rows("heldout.jsonl", list(islice(rows, HELDOUT_ROWS)))
    small = [write(number) for number in range(100) for write in (to_words, to_digits)]
    write_rows("train.jsonl", small + list(islice(rows, TRAIN_ROWS - len(small))))


if __name__ == "__main__":
    main()
