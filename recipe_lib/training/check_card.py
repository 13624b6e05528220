"""Whether this rank's GPU can compute what the config asks for, before memory is taken."""

import torch

from recipe_lib.config.card_limits import card_faults
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import ConfigError
from recipe_lib.ops.device import capability_of
from recipe_lib.parallel import World


def check_card(cfg: FullFinetuneConfig, world: World) -> None:
    """ConfigError by name for what the card lacks; nothing on a CPU."""
    capability = capability_of(world.device)
    if capability is None:
        return
    name = torch.get_device_module(world.device).get_device_name(world.device)
    if faults := card_faults(cfg, name, capability):
        raise ConfigError(*faults)
