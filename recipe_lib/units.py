"""Format bytes, counts and seconds as people read them.

Reports, logs and errors call these functions; all other code computes in bytes, tokens and seconds.
`Bytes`, `Seconds` and `Count` are numbers that tables show with their units.
"""

from collections.abc import Collection, Iterable
from typing import Any

GIB = 1024**3  # bytes
MIB = 1024**2  # bytes
Unit = tuple[int, str]  # (bytes of one, name): (GIB, "GiB")


def convert_to_gib(num_bytes: float) -> float:
    """Return a number of bytes in GiB (1024^3 bytes)."""
    return num_bytes / GIB


def format_bytes(num_bytes: float) -> str:
    """Return `15.00 GiB` for `16106127360`; small sizes in MiB, KiB or B."""
    return (
        _format_scaled(num_bytes, ((GIB, "GiB", 2), (MIB, "MiB", 2), (1024, "KiB", 2)))
        or f"{num_bytes:.0f} B"
    )


def _format_scaled(number: float, scales: Iterable[tuple[float, str, int]]) -> str | None:
    """Return a number in the first scale that it reaches; None if it reaches none.

    scales: (size, unit, digits after the point), the largest first.
    """
    for size, unit, digits in scales:
        if abs(number) >= size:
            return f"{number / size:.{digits}f} {unit}"
    return None


def format_count(number: float) -> str:
    """Return `8.03 B` for `8030261248`, `260.0 K` for `260032`."""
    return (
        _format_scaled(number, ((1e12, "T", 2), (1e9, "B", 2), (1e6, "M", 1), (1e3, "K", 1)))
        or f"{number:.0f}"
    )


def format_seconds(seconds: float) -> str:
    """Return `1h02m` for `3725`, `1m15s` for `75.2`, `0.32s` for `0.32`."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"
    if seconds >= 60:
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
    return f"{seconds:.2f}s" if seconds < 10 else f"{seconds:.0f}s"


def format_clock(seconds: float) -> str:
    """Return seconds that go by, without a fraction: `7s`, `1m15s`."""
    return format_seconds(seconds) if seconds >= 60 else f"{seconds:.0f}s"


def format_duration(seconds: float) -> str:
    """Return what an operation takes: `2.84 s`, `12.4 ms`, `85.0 us`, from a minute on `1m15s`."""
    if abs(seconds) >= 60:
        return format_seconds(seconds)
    return _format_scaled(seconds, ((1.0, "s", 2), (1e-3, "ms", 1))) or f"{seconds * 1e6:.1f} us"


class Bytes(int):
    """A cell of a table that is shown as a size."""

    def __str__(self) -> str:
        return format_bytes(self)


class Seconds(float):
    """A cell of a table that is shown as a duration."""

    def __str__(self) -> str:
        return format_duration(self)


class Count(float):
    """A cell of a table that is shown as a number in few letters."""

    def __str__(self) -> str:
        return format_count(self)


def format_change(change: Any) -> str:
    """Return a difference with its sign: `+1.20 GiB`, `-12.4 ms`, `none` for 0.

    change: a `Bytes`, `Seconds` or `Count`, whose type gives the unit.
    """
    return f"{'+' if change > 0 else '-'}{type(change)(abs(change))}" if change else "none"


def pluralize(count: int, noun: str) -> str:
    """Return `1 sample`, `2 samples`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def name_first(names: Collection[str], one: str = "", many: str = "") -> str:
    """Return `a.weight and 3 more are`: the first name by the alphabet, and how many others are.

    one, many: the verb for a single name and for several; "": none.
    """
    if len(names) == 1:
        return f"{min(names)} {one}".rstrip()
    return f"{min(names)} and {len(names) - 1} more {many}".rstrip()


def choose_lines(*lines: tuple[object, str]) -> list[str]:
    """Return the text of each (count, text) whose count is true: not 0, None or empty."""
    return [line for count, line in lines if count]


def format_ranges(numbers: Iterable[int]) -> str:
    """Return `0-2,5` for `[0, 1, 2, 5]`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def choose_unit(largest: int) -> Unit:
    """Return the unit for figures of which `largest` bytes is the largest: GiB, MiB or KiB.

    Figures that are added up in a report have one unit.
    """
    if largest >= GIB // 4:
        return GIB, "GiB"
    return (MIB, "MiB") if largest >= MIB // 4 else (1024, "KiB")


def count_hundredths(num_bytes: int, unit: Unit) -> int:
    """Return bytes in hundredths of the unit, rounded."""
    return round(num_bytes * 100 / unit[0])


def format_hundredths(number: int, unit: Unit | None = None) -> str:
    """Return hundredths of a unit as text: `1234` -> `12.34 GiB`."""
    return f"{number / 100:,.2f}" + (f" {unit[1]}" if unit else "")


def share_out(total: int, parts: list[int]) -> list[int]:
    """Return integers in the proportion of `parts` whose sum is `total` (largest-remainder method).

    Each is less than 1 off its exact share, so that rounded figures in a report add up to the
    rounded figure above them. Return zeros if the parts add up to 0.
    """
    parts_sum = sum(parts)
    if not parts_sum:
        return [0] * len(parts)
    shares = [total * part // parts_sum for part in parts]
    # Rounding down leaves some units over: they go to the parts that lost the most.
    remainders = [total * part % abs(parts_sum) for part in parts]
    by_remainder = sorted(range(len(parts)), key=remainders.__getitem__, reverse=True)
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares
