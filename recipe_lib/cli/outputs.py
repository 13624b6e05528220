"""Files that a command writes where an option says: checked before the work is done, and never over another file."""

import os
from pathlib import Path

from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError
from recipe_lib.reading import JSON_LIMIT, parse_json, read_bytes

# Keys that our JSON files have: a plan, rates of a device, a tensor-parallel plan, a list of receipts.
_JSON = ({"schema", "verdict"}, {"matmul", "device"}, {"model", "tokens"}, {"receipts", "unreadable"})


def check_output(option: str, path: str | None) -> None:
    """Refuses a file that could not be written, and one that is there and that no earlier use of the option wrote."""
    if path is None or (option == "--json" and path == "-"):
        return
    if os.path.isdir(path):
        raise ConfigError(f"{option}: {show(path)} is a folder; expected the name of a file")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise ConfigError(f"{option}: {show(os.path.dirname(path))}: no such folder; make it, or choose another name")
    if os.path.isfile(path) and not _is_ours(option, Path(path)):
        raise ConfigError(
            f"{option}: {show(path)} is there already and is no file that {option} writes; move it away, or choose "
            "another name"
        )


def _is_ours(option: str, path: Path) -> bool:
    try:
        content = read_bytes(path, JSON_LIMIT)  # a larger file is none of ours
        if option == "--html":
            return content.startswith(b"<!DOCTYPE html>") and b"color-scheme: light dark" in content[:4096]
        if option == "--snapshot":
            return content.startswith(b"\x80") and b"device_traces" in content
        found = parse_json(content)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and any(keys <= found.keys() for keys in _JSON)
