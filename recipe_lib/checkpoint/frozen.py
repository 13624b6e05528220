"""What is not in a saved state of a run that trains adapters: the frozen weights, and how the adapters are used.

A state says which they were, so that it is never loaded beside others.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_lib.adapters.layers import AdaptedModule
from recipe_lib.adapters.peft_names import TARGETS, target_of
from recipe_lib.adapters.quantised import QuantisedLinear
from recipe_lib.checkpoint.ranks import Ranks, together
from recipe_lib.errors import CheckpointError

_PIECE_ELEMENTS = 2**22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def counts_here(tensor: torch.Tensor, rank: int) -> bool:
    """Whether this rank's part of a tensor is to be counted: what several ranks hold counts on one of them."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinates = zip(tensor.device_mesh.get_coordinate() or [], tensor.placements, strict=True)
    return not any(place.is_replicate() and at for at, place in coordinates)


def frozen_mark(model: nn.Module, world: Ranks) -> str | None:
    """A hash of the sums of every frozen parameter's bits, the same for any sharding; None: none is frozen. Collective.

    Each rank adds up its own part in place; the sums alone travel.
    """
    model.state_dict()  # FSDP's hook frees gathered parameters, so that what follows sees the shards
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if not frozen:
        return None

    def add_up() -> list[int]:
        sums = [_sum_of_bits(parameter.detach(), world.rank) for parameter in frozen.values()]
        return [int(number) for number in torch.stack(sums).tolist()]

    totals = [sum(parts) % 2**64 for parts in zip(*world.gather_json(together(world, add_up)), strict=True)]
    text = " ".join(f"{name}:{frozen[name].dtype}:{total}" for name, total in zip(frozen, totals, strict=True))
    return hashlib.sha256(text.encode()).hexdigest()


def _sum_of_bits(parameter: torch.Tensor, rank: int) -> torch.Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    if counts_here(parameter, rank):
        for piece in local.reshape(-1).split(_PIECE_ELEMENTS):
            total += piece.view(_BITS[piece.element_size()]).sum(dtype=torch.int64)
    return total


def adapter_use(model: nn.Module) -> dict[str, Any] | None:
    """What of the section `lora` decides what the adapters' numbers mean; None: the model has none."""
    adapted = [(name, module) for name, module in model.named_modules() if isinstance(module, AdaptedModule)]
    if not adapted:
        return None
    settings = adapted[0][1].settings
    targets = {target_of(name) or name.rpartition(".")[2] for name, _ in adapted}
    kinds = {module.kind for module in model.modules() if isinstance(module, QuantisedLinear)}
    return {
        "rank": settings.rank,
        "scaling": settings.scaling,
        "dora": settings.dora,
        "targets": [target for target in TARGETS if target in targets] + sorted(targets - set(TARGETS)),
        "quantize": min(kinds, default="none"),
    }


def check_use(path: Path, saved: dict[str, Any] | None, model: nn.Module) -> None:
    """CheckpointError unless the state at `path` was saved with the adapters that this model has."""
    now = adapter_use(model)
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
    """CheckpointError unless the frozen weights are those beside which the state at `path` was saved."""
    if saved != now:
        raise CheckpointError(
            f"{path}: was saved beside other frozen weights than this run has loaded; resume with the run's own "
            "model, dtype and lora.quantize"
        )
