"""All ranks of a run have the same settings: the check, before anything is set up."""

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from recipe_lib.config.keys import read_schema
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import ConfigError

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World

_ABSENT = "no such key"


def check_same_config(cfg: FullFinetuneConfig, world: "World") -> None:
    """Compares the settings of all ranks, paths apart, which machines may have in different places. A collective.

    Where each machine has a config of its own, or has decided `parallel.strategy: auto` by its own GPUs, ranks that
    train differently would wait for each other. Raises ConfigError on every rank, with each key that differs.
    """
    found = [dict(pairs) for pairs in world.gather_json(list(_settings(cfg)))]
    faults = []
    for name in dict.fromkeys(key for settings in found for key in settings):
        values = [settings.get(name, _ABSENT) for settings in found]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            faults.append(
                f"{name}: found {values[0]} on rank 0 and {values[other]} on rank {other}, expected the same on all "
                "ranks; start every machine with the same config and overrides"
            )
    if faults:
        raise ConfigError(*faults)


def _settings(cfg: FullFinetuneConfig) -> Iterator[tuple[str, str]]:
    """(key, value as text); of paths and trackers, which may be a machine's own, nothing."""
    config_class: Any = type(cfg)  # mypy takes a dataclass for unhashable, its class too
    for name, key in read_schema(config_class).keys.items():
        if key.section_class is None and not key.limits.get("path") and name != "log.trackers":
            yield name, str(attrgetter(name)(cfg))
