"""How a key of a config is declared: its default, its bounds and one line about it; without torch."""

from dataclasses import field
from typing import Any


def key(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | tuple[int, ...] | None = None,
    kind: str | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    also: tuple[float, ...] | None = None,
    length: int | None = None,
    items: tuple[str, ...] | None = None,
    path: bool | None = None,
    most: float | None = None,
    needs: Any = None,
    known_as: str | None = None,
) -> Any:
    """One key of a section.

    default: its value when the config does not set it. help: one line, with the unit.
    choices: the only legal values. kind: the registry (`recipe_lib.config.registry`) its names live in.
    minimum, maximum: inclusive bounds. above, below: exclusive bounds. also: legal values outside of them.
    length: how many items a list has. On a list, choices and bounds are those of each item. items: the only legal
    items of the list that may stand in place of a choice. path: a file or folder, in which a `~` at the beginning is
    the user's home. needs: what has to hold for it to have an effect (`recipe_lib.config.idle`). most: a bound far
    above every sensible value, which only an error over it names. known_as: what torch, HF, PEFT, TRL, torchtitan,
    Megatron, torchtune or another tool calls it; or `none has it: ` and why.
    """
    limits = {
        "choices": choices,
        "kind": kind,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "below": below,
        "also": also,
        "length": length,
        "items": items,
        "path": path,
        "most": most,
        "needs": needs,
        "known_as": known_as,
    }
    metadata = {"help": help} | {name: value for name, value in limits.items() if value is not None}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
