"""Bytes, counts and seconds as people read them. Inside the code: bytes, tokens, seconds. GiB = 1024^3."""

from collections.abc import Collection

GIB = 1024**3
MIB = 1024**2


def gib(num_bytes: float) -> float:
    """Bytes as GiB (1024^3)."""
    return num_bytes / GIB


def format_bytes(num_bytes: float) -> str:
    """`16106127360` -> `15.00 GiB`; small sizes in MiB, KiB or B."""
    for size, unit in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(number: float) -> str:
    """`8030261248` -> `8.03 B`; `260032` -> `260.0 K`."""
    for size, unit, digits in ((1e12, "T", 2), (1e9, "B", 2), (1e6, "M", 1), (1e3, "K", 1)):
        if abs(number) >= size:
            return f"{number / size:.{digits}f} {unit}"
    return f"{number:.0f}"


def counted(count: int, noun: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def name_first(names: Collection[str], one: str = "", many: str = "") -> str:
    """`a.weight and 3 more are`: the first of some names and how many others, with the verb of that number."""
    if len(names) == 1:
        return f"{min(names)} {one}".rstrip()
    return f"{min(names)} and {len(names) - 1} more {many}".rstrip()


def format_seconds(seconds: float) -> str:
    """`3725` -> `1h02m`; `75.2` -> `1m15s`; `0.32` -> `0.32s`."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"
    if seconds >= 60:
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
    return f"{seconds:.2f}s" if seconds < 10 else f"{seconds:.0f}s"


def choose_lines(*lines: tuple[object, str]) -> list[str]:
    """Return the lines whose count, or whatever they are about, is not nothing."""
    return [line for count, line in lines if count]
