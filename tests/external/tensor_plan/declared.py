"""Checks a tensor parallel declaration that somebody wrote against the plan that a model's own
forward leads to.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan


class Declaration(NamedTuple):
    """How a parameter is said to be held. dim: that is cut evenly, -1 for none. gradient: as in
    plan.ParameterPlan.
    """

    dim: int
    gradient: str


def read_declared(model: nn.Module, mesh_dim: str = "tensor") -> dict[str, Declaration]:
    """What the placements of a model's DTensors say along one dimension of their mesh.

    A parameter that every rank has is one whose gradients are summed over ranks: parallel.tensor
    does so with all of them. Raises ValueError for a parameter that has no placement there.
    """
    found = {}
    for name, parameter in model.named_parameters():
        names = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
        if mesh_dim not in names:
            raise ValueError(f"{name} is not placed on the mesh's dimension {mesh_dim}")
        assert isinstance(parameter, DTensor)
        placed = parameter.placements[names.index(mesh_dim)]
        found[name] = (
            Declaration(placed.dim, "sharded")
            if isinstance(placed, Shard)
            else Declaration(-1, "partial")
        )
    return found


def list_differences(plan: ShardingPlan, declared: Mapping[str, Declaration]) -> list[str]:
    """A line for each parameter that is declared otherwise than the plan has it; empty if there is
    none.
    """
    found = [
        f"{name}: declared, but not the model's"
        for name in declared
        if name not in _list_names(plan)
    ]
    for each in plan.parameters:
        if each.name not in declared:
            found.append(f"{each.name}: not declared, expected {_read_way(each.dim)}")
            continue
        said = declared[each.name]
        if said.dim != each.dim:
            why = f" ({each.reason})" if each.reason else ""
            found.append(
                f"{each.name}: declared {_read_way(said.dim)}, expected {_read_way(each.dim)}{why}"
            )
        elif len(each.segments) > 1:
            parts = " + ".join(map(str, each.segments))
            found.append(
                f"{each.name}: declared one even cut along dim {said.dim}, expected one of each"
                f" part of {parts}"
            )
        elif said.gradient != each.gradient:
            found.append(
                f"{each.name}: declared a {said.gradient} gradient, expected {each.gradient}"
            )
    return found


def _list_names(plan: ShardingPlan) -> set[str]:
    return {each.name for each in plan.parameters}


def _read_way(dim: int) -> str:
    return "whole" if dim < 0 else f"cut along dim {dim}"
