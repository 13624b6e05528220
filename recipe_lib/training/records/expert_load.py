"""How evenly a mixture's experts were used in a step, over all ranks."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipe_lib.models.mixture import Mixture

if TYPE_CHECKING:
    from recipe_lib.config.schema import FullFinetuneConfig
    from recipe_lib.parallel.world import World


def expert_load(model: nn.Module, world: "World", cfg: "FullFinetuneConfig") -> dict[str, Tensor]:
    """Numbers of the step that ends, on the device: nothing for a model without experts, or with compiled layers.
    Of a pipeline all ranks have them, whatever their layers.

    `expert_load_max_over_mean`: tokens of the busiest expert over those of the average one, of the layer where that is
    most. `dropped_tokens`: choices that no expert computed. `router_aux_loss`: the mean over layers and micro-batches,
    where there is one. A collective.
    """
    mixture = getattr(getattr(model, "spec", None), "mixture", None)
    if mixture is None or cfg.compile:
        return {}
    mixtures = [(name, module) for name, module in model.named_modules() if isinstance(module, Mixture)]
    loads = {name: module.load for name, module in mixtures if module.load is not None}
    rows = torch.zeros(len(mixture.layers), mixture.num_experts, dtype=torch.int64, device=world.device)
    others = torch.zeros(3, dtype=torch.float64, device=world.device)
    for name, load in loads.items():
        rows[_number(name)] = load.rows
        others += torch.stack([_summed(load.loss, world), *load.loss.new_tensor([load.expected, load.calls])])
        load.clear()
    world.sum_over_sequence(rows)
    world.sum_over_sequence(others[:2])  # each has as many calls
    rows, others = world.all_reduce_sum(rows), world.all_reduce_sum(others)
    used = rows[list(mixture.layers)].double()
    numbers = {
        "expert_load_max_over_mean": (used.amax(dim=1) / used.mean(dim=1).clamp(min=1e-9)).max(),
        "dropped_tokens": others[1] - rows.sum(),
    }
    if cfg.router_aux_loss_coef:
        numbers["router_aux_loss"] = others[0] / others[2].clamp(min=1)
    return numbers


def _number(name: str) -> int:
    """The layer that a module is in: `model.layers.3.mlp` is in number 3."""
    return int(next(part for part in name.split(".") if part.isdecimal()))


def _summed(loss: Tensor, world: "World") -> Tensor:
    """Of ranks that share tokens each knows a part of the loss. A collective of theirs."""
    if world.tensor is not None:
        loss = loss.clone()
        dist.all_reduce(loss, group=world.mesh["tensor"].get_group())
    return loss
