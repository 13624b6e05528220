"""The one table of settings that do not go together, with the reason and the remedy.

`load_config` refuses by it, `docs/config.md` prints it, and the tests walk it. A combination that only the
world (ranks, devices, files) can decide is not here: it is checked where the world is known.
"""

from collections.abc import Collection
from typing import Any

from recipe_lib.config.combination import Incompatible
from recipe_lib.config.combinations_adapters import ADAPTERS
from recipe_lib.config.combinations_data import DATA
from recipe_lib.config.combinations_models import MODELS
from recipe_lib.config.combinations_offload import OFFLOAD
from recipe_lib.config.combinations_optimizers import OPTIMIZERS
from recipe_lib.config.combinations_pipeline import PIPELINE
from recipe_lib.config.combinations_precision import PRECISION
from recipe_lib.config.combinations_recompute import RECOMPUTE
from recipe_lib.config.combinations_stepping import STEPPING
from recipe_lib.config.combinations_tensor import TENSOR
from recipe_lib.config.combinations_training import TRAINING

INCOMPATIBLE: tuple[Incompatible, ...] = (
    *TRAINING,
    *OPTIMIZERS,
    *STEPPING,
    *OFFLOAD,
    *RECOMPUTE,
    *MODELS,
    *DATA,
    *TENSOR,
    *PRECISION,
    *PIPELINE,
    *ADAPTERS,
)


def incompatibilities(cfg: Any, changed: Collection[str], judged: Collection[str]) -> list[Incompatible]:
    """The entries of the table that a config has.

    changed: dotted keys whose value is not their default. judged: dotted keys that may be judged; an entry about
    a key outside of them (one with a fault of its own, one that the config's class lacks) is passed over.
    """
    return [
        entry
        for entry in INCOMPATIBLE
        if all(key in judged for key in (*entry.keys, *entry.reads))
        and (entry.unread is None or entry.unread in changed)
        and entry.applies(cfg)
    ]
