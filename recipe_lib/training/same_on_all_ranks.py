"""All ranks of a run have the same settings, and those that share a model the same batches: the checks."""

import hashlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from recipe_lib.config.keys import read_schema
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import StepBatches
from recipe_lib.errors import ConfigError, SetupError

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World

_ABSENT = "no such key"


def check_same_config(settings: dict[str, str], world: "World") -> None:
    """Compares the settings of all ranks (`settings_of`). A collective.

    Where each machine has a config of its own, or has decided `parallel.strategy: auto` by its own GPUs, ranks that
    train differently would wait for each other. Raises ConfigError on every rank, with each key that differs.
    """
    found = world.gather_json(settings)
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


def settings_of(cfg: FullFinetuneConfig) -> dict[str, str]:
    """Values as text by key; none of paths and trackers, which may be a machine's own."""
    config_class: Any = type(cfg)  # mypy takes a dataclass for unhashable, its class too
    keys = read_schema(config_class).keys.items()
    return {
        name: str(attrgetter(name)(cfg))
        for name, key in keys
        if key.section_class is None and not key.limits.get("path") and name != "log.trackers"
    }


def check_same_batches(batches: StepBatches, world: "World") -> None:
    """Compares the batches of a step over the ranks that have to have the same ones, by their hash. A collective.

    Those are the ranks of a tensor-parallel group, of a pipeline, and those that share sequences: batches that differ
    would train silently on a mixture of them. Raises SetupError on every rank.
    """
    if world.size == world.data_ranks:
        return
    digest = hashlib.sha256()
    for batch in batches.micro_batches:
        for tensor in (batch.tokens, batch.labels, batch.positions, batch.segments):
            if tensor is not None:
                digest.update(str(tuple(tensor.shape)).encode() + tensor.cpu().numpy().tobytes())
    found: dict[int, set[str]] = {}
    for data_rank, text in world.gather_json([world.data_rank, digest.hexdigest()]):
        found.setdefault(data_rank, set()).add(text)
    differing = [data_rank for data_rank, texts in found.items() if len(texts) > 1]
    if differing:
        kinds = ["of a pipeline"] * (world.pipeline is not None) + ["that share matrices"] * (world.tensor is not None)
        kinds += ["that share sequences"] * (world.context is not None)
        raise SetupError(
            f"data: the {world.size // world.data_ranks} ranks {' and '.join(kinds)} that have data rank "
            f"{differing[0]} found different batches for the same step, expected the same; see that every machine "
            "has the same data, tokenizer and version"
        )
