"""Read a calibration: the JSON file of a device's measured rates, from which times are planned.

`measure_rates.calibrate` measures it (`tune plan --calibrate`, `tune doctor --write`), and
`add_links` adds what `tune doctor` measured between ranks. `read_calibration` reads it to plan for
a device, `read_calibrated_device` returns the device that it was measured on. A rate is a number of
bytes or FLOPs per second. Imports no torch, so that a plan starts fast.
"""

import math
from contextlib import suppress
from dataclasses import fields
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from recipe_lib.config.suggest import quote
from recipe_lib.errors import ConfigError
from recipe_lib.plan.hardware import Hardware, find_hardware, find_reported_hardware
from recipe_lib.plan.timing.cost import (
    OPERATIONS,
    Calibration,
    CollectiveTime,
    Links,
    MatmulRate,
    count_wire_bytes,
)
from recipe_lib.reading import describe_fault, read_json

VERSION = 1  # of the file's format
# Keys (fields of `Calibration`) that may be None: without a GPU, or without a second one, there was
# nothing to measure.
_UNKNOWN = (
    "link_bandwidth",
    "copy_to_device",
    "copy_to_host",
    "step_share",
    "optimizer",
    "memory",
)
# Keys that a file need not have; they are None then.
_OPTIONAL = ("links", *_UNKNOWN[1:])

# (m, n, k) of matmuls: the projections of 1B to 70B models at 512 to 8192 tokens. On a CPU, three
# tiny ones.
MATMULS = (
    (512, 2048, 2048),
    (512, 4096, 4096),
    (2048, 4096, 4096),
    (4096, 14336, 4096),
    (8192, 28672, 8192),
)
TINY_MATMULS = ((32, 32, 32), (64, 64, 64), (96, 96, 96))
LARGE_MATMUL = MATMULS[3]  # long enough to show what a device sustains
# Type -> compute capability from which tensor cores and torch can multiply in it.
LOW_PRECISION = {"int8": (7, 5), "fp8": (8, 9)}


def add_links(
    measured: dict[str, Any], links: dict[str, Any] | None, low_precision: dict[str, float]
) -> dict[str, Any]:
    """Return the calibration `measured`, of `measure_rates.calibrate`, with further rates added.

    links: {"ranks" (their number), "backend", "points": [{"operation", "bytes" (of the full
    tensor), "seconds"}, ...]}, the collectives that were timed; None: none were. low_precision:
    dtype -> operations a second that `measure_matmul_rate` returned.
    """
    shape = list(TINY_MATMULS[-1] if measured["device"] == "cpu" else LARGE_MATMUL)
    matmul = {dtype: [{"shape": shape, "rate": rate}] for dtype, rate in low_precision.items()}
    result = measured | {"matmul": measured["matmul"] | matmul}
    if links is None:
        return result
    points = {
        operation: [
            {name: point[name] for name in ("bytes", "seconds")}
            for point in links["points"]
            if point["operation"] == operation
        ]
        for operation in OPERATIONS
    }
    largest = max(points["all_gather"], key=lambda point: point["bytes"])
    return result | {
        "link_bandwidth": (
            count_wire_bytes("all_gather", largest["bytes"], links["ranks"]) / largest["seconds"]
        ),
        "links": {"ranks": links["ranks"], "backend": links["backend"], **points},
    }


def read_calibrated_device(path: str | Path) -> tuple[Hardware, str]:
    """Return the device that a file's rates were measured on, and a text on its memory.

    The text says where the device's memory is taken from if the file does not have it, else it is
    empty. Raises ConfigError as `read_calibration` does, and for a card whose memory is neither in
    the file nor in the planner's table.
    """
    place, values = _read_values(path)
    name = values["device"]
    memory = values["memory"]
    if memory is not None:
        return find_reported_hardware(name, int(memory)), ""
    memory_from = "this machine's" if name == "cpu" else "not in the file, so it is the table's"
    try:
        return find_hardware(name), f"its memory is {memory_from}"
    except ConfigError:
        raise ConfigError(
            f"{place} was measured on {quote(name)}, which is not known, and does not have its"
            " memory; add the size, such as --device 48GB"
        ) from None


def read_calibration(path: str | Path, hardware: Hardware) -> Calibration:
    """Return the rates in a calibration file, to plan for `hardware`.

    Raises ConfigError if the file cannot be read, lacks a key, has no positive number where one is
    due, or was measured on another device. If `hardware` is only a size of memory, such as 24GB,
    any card of that size will do.
    """
    place, values = _read_values(path)
    _check_device(place, values["device"], memory=values["memory"], hardware=hardware)
    measured: dict[str, Any] = {field.name: values[field.name] for field in fields(Calibration)}
    measured["matmul"] = _read_matmuls(place, values["matmul"])
    measured["links"] = _read_links(place, values["links"])
    return Calibration(**measured)


def _read_values(path: str | Path) -> tuple[str, dict[str, Any]]:
    """Return (name of the file in errors, its values by key).

    Optional keys that the file lacks are None. Raises ConfigError if the file cannot be read, is of
    another version, lacks a key, or has a value of the wrong kind; `matmul` and `links` are left to
    their own functions.
    """
    place = f"calibration: {quote(str(path))}"
    remedy = "measure again with --calibrate"
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{place} cannot be read ({describe_fault(error)}); expected a file, {remedy}"
        ) from None
    if not isinstance(values, dict) or values.get("version") != VERSION:
        raise ConfigError(f"{place} is no calibration of version {VERSION}; {remedy}")
    values = {**dict.fromkeys(_OPTIONAL), **values}
    if missing := [field.name for field in fields(Calibration) if field.name not in values]:
        raise ConfigError(f"{place} lacks {', '.join(missing)}; {remedy}")
    for name in ("device", "torch", "date"):
        if not isinstance(values[name], str):
            raise ConfigError(f"{place}: {name} is no text; {remedy}")
    for name in ("attention", "bandwidth", "host_seconds", "kernel_seconds", *_UNKNOWN):
        if not (_is_positive(values[name]) or (name in _UNKNOWN and values[name] is None)):
            raise ConfigError(
                f"{place}: {name} is {quote(str(values[name]))}; expected a positive number,"
                f" {remedy}"
            )
    return place, values


def _read_links(place: str, values: Any) -> Links | None:
    """Return the measured collectives from a file's value of `links`; None if it is None.

    place: the name of the file in errors. Raises ConfigError for a value of another form.
    """
    if values is None:
        return None
    points: dict[str, tuple[CollectiveTime, ...]] = {}
    try:
        ranks = values["ranks"]
        backend = str(values["backend"])
        for operation in OPERATIONS:
            # Small ones first.
            pairs: list[CollectiveTime] = sorted(
                (count_wire_bytes(operation, point["bytes"], ranks), point["seconds"])
                for point in values[operation]
            )
            if not pairs or not all(map(_is_positive, chain.from_iterable(pairs))):
                raise ValueError(operation)
            # By noise a collective may have taken less time than a smaller one. It gets the most
            # that a smaller one took, so that times rise with sizes.
            slowest = accumulate((seconds for _, seconds in pairs), max)
            points[operation] = tuple(zip((size for size, _ in pairs), slowest, strict=True))
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{place}: links is no list of bytes and seconds by collective; measure again with"
            " `tune doctor --write`"
        ) from None
    return Links(ranks, backend, points)


def _read_matmuls(place: str, matmul: Any) -> dict[str, tuple[MatmulRate, ...]]:
    """Return the rates of matmuls by dtype, small shapes first.

    matmul: the file's value. place: the name of the file in errors. Raises ConfigError for a value
    of another form.
    """
    rates: dict[str, Any] = {}
    try:
        for dtype, points in matmul.items():
            pairs = [(tuple(point["shape"]), point["rate"]) for point in points]
            rates[dtype] = tuple(sorted(pairs, key=lambda pair: math.prod(pair[0])))
    except (AttributeError, KeyError, TypeError):
        rates = {}
    are_positive = all(
        len(shape) == 3 and all(map(_is_positive, (*shape, rate)))
        for shape, rate in chain.from_iterable(rates.values())
    )
    if not rates or not all(rates.values()) or not are_positive:
        raise ConfigError(
            f"{place}: matmul is no list of shapes and rates by dtype; measure again with"
            " --calibrate"
        )
    return rates


def _is_positive(value: Any) -> bool:
    # A bool is an int in Python, and JSON may hold NaN and infinities.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _check_device(place: str, device: str, memory: float | None, hardware: Hardware) -> None:
    """Raise ConfigError unless rates of `device` may be used for `hardware`.

    place: the name of the file in errors. device: its name in the file. memory: its bytes; None:
    the file does not have them.
    """
    name = device
    # The rates of a card that the table lacks serve only to plan for a size of memory.
    with suppress(ConfigError):
        measured = find_hardware(device)
        name = measured.name
        memory = memory or measured.memory
    # A size such as 24GB is that of cards without error correction; with it they report 6 % less.
    has_same_size = memory is None or 0.9 < hardware.memory / memory < 1.1
    if name != hardware.name and not (hardware.rates_of and name != "cpu" and has_same_size):
        raise ConfigError(
            f"{place} was measured on {quote(device)}, the plan is for {hardware.name}; "
            "leave --device out to plan for what was measured, or leave the file out"
        )
