"""What is not in a saved state of a run that trains adapters: the frozen weights, and how the adapters are used.

A state says which they were, so that it is never loaded with others.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_lib.adapters.layers import AdaptedModule
from recipe_lib.adapters.peft_names import TARGETS, target_of
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.checkpoint.ownership import FROZEN, Holders, find_holders
from recipe_lib.checkpoint.rank_agreement import RankGroup, together
from recipe_lib.errors import CheckpointError

_PIECE_ELEMENTS = 2**22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def frozen_mark(model: nn.Module, world: RankGroup, holders: Holders | None = None) -> str | None:
    """A hash of the sums of every frozen parameter's bits, the same for any sharding; None: none is frozen. Collective.

    Each rank adds up its own part in place; the sums alone travel. holders: of the model, if they are known.
    """
    model.state_dict()  # FSDP's hook frees gathered parameters, so that what follows sees the shards
    holders = holders or find_holders(model, world)
    parameters = dict(model.named_parameters())
    frozen: dict[int, list[str]] = {leader: [] for leader in holders.leaders}  # by the group that counts them
    for name, kind in holders.kinds.items():
        if kind == FROZEN:
            frozen[holders.first[name]].append(name)
    if not any(frozen.values()):
        return None

    def add_up() -> list[int]:
        sums = [_sum_of_bits(name, parameters[name].detach(), holders) for name in frozen[holders.own]]
        return [int(number) for number in torch.stack(sums).tolist()] if sums else []

    totals = dict.fromkeys((name for name, kind in holders.kinds.items() if kind == FROZEN), 0)
    for leader, part in zip(holders.leaders, world.gather_json(together(world, add_up)), strict=True):
        for name, number in zip(frozen[leader], part, strict=True):
            totals[name] = (totals[name] + number) % 2**64
    types: dict[str, str] = {}
    for found in holders.gather({name: str(parameters[name].dtype) for name in frozen[holders.own]}, world):
        types |= found
    text = " ".join(f"{name}:{types[name]}:{total}" for name, total in totals.items())
    return hashlib.sha256(text.encode()).hexdigest()


def _sum_of_bits(name: str, parameter: torch.Tensor, holders: Holders) -> torch.Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    if holders.counts_here(name, parameter):
        for piece in local.reshape(-1).split(_PIECE_ELEMENTS):
            total += piece.view(_BITS[piece.element_size()]).sum(dtype=torch.int64)
    return total


def adapter_use(model: nn.Module, world: RankGroup, holders: Holders) -> dict[str, Any] | None:
    """What of the section `lora` decides what the adapters' numbers mean; None: the model has none. Collective."""
    adapted = [(name, module) for name, module in model.named_modules() if isinstance(module, AdaptedModule)]
    own: dict[str, list[Any]] = {
        "settings": [
            [module.settings.rank, module.settings.scaling, module.settings.dora] for _, module in adapted[:1]
        ],
        "targets": sorted({target_of(name) or name.rpartition(".")[2] for name, _ in adapted}),
        "kinds": sorted({module.kind for module in model.modules() if isinstance(module, QuantizedLinear)}),
    }
    parts = holders.gather(own, world)
    settings, targets, kinds = (
        [item for part in parts for item in part[key]] for key in ("settings", "targets", "kinds")
    )
    if not settings:
        return None
    rank, scaling, dora = settings[0]
    return {
        "rank": rank,
        "scaling": scaling,
        "dora": dora,
        "targets": [target for target in TARGETS if target in targets] + sorted(set(targets) - set(TARGETS)),
        "quantize": min(kinds, default="none"),
    }


def check_use(path: Path, saved: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
    """CheckpointError unless the state at `path` was saved with the adapters that the model has `now`."""
    if (saved is None) != (now is None):
        was, here = ("all weights", "adapters") if saved is None else ("adapters", "all weights")
        raise CheckpointError(
            f"{path}: is the state of a run that trained {was}, this run trains {here}; resume with the run's own "
            "recipe and config"
        )
    if saved is None or now is None:
        return
    other = [key for key in now if saved[key] != now[key]]
    if other:
        raise CheckpointError(
            f"{path}: was saved with lora {_describe(saved, other)}, found {_describe(now, other)}; resume with the "
            "run's own section lora"
        )


def _describe(use: dict[str, Any], keys: list[str]) -> str:
    shown = {key: ", ".join(value) if isinstance(value, list) else value for key, value in use.items()}
    return " and ".join(f"{key} {shown[key]}" for key in keys)


def check_mark(path: Path, saved: str | None, now: str | None) -> None:
    """CheckpointError unless the frozen weights are those of the run that saved the state at `path`."""
    if saved != now:
        raise CheckpointError(
            f"{path}: was saved with other frozen weights than this run has loaded; resume with the run's own "
            "model, dtype and lora.quantize_base"
        )
