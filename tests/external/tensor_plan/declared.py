"""Compare tensor-parallel placements that a model declares with a plan made from its forward.

A tensor plan says for each parameter along which dimension ranks divide it. Tests read what others
have declared, as DTensors, by `read_declared` and compare by `list_differences`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan


class Declaration(NamedTuple):
    """How a parameter is declared to be sharded."""

    dim: int  # that is sharded evenly; -1: the parameter is replicated
    # "sharded": each rank has its shard's. "partial": ranks have summands of it.
    gradient: str


def read_declared(model: nn.Module, mesh_dim: str = "tensor") -> dict[str, Declaration]:
    """Return the declarations, by parameter, of a model's DTensors along one mesh dimension.

    A replicated parameter's gradient is "partial": parallel.tensor sums all of these over ranks.
    Raises ValueError for a parameter that has no placement there.
    """
    declarations = {}
    for name, parameter in model.named_parameters():
        names = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
        if mesh_dim not in names:
            raise ValueError(f"{name} is not placed on the mesh's dimension {mesh_dim}")
        assert isinstance(parameter, DTensor)
        placement = parameter.placements[names.index(mesh_dim)]
        if isinstance(placement, Shard):
            declarations[name] = Declaration(placement.dim, "sharded")
        else:
            declarations[name] = Declaration(-1, "partial")
    return declarations


def list_differences(plan: ShardingPlan, declared: Mapping[str, Declaration]) -> list[str]:
    """Return a line for each parameter whose declaration is missing or differs from the plan."""
    planned_names = {parameter.name for parameter in plan.parameters}
    lines = [
        f"{name}: declared, but not the model's" for name in declared if name not in planned_names
    ]
    for parameter in plan.parameters:
        name = parameter.name
        expected = _describe_sharding(parameter.dim)
        if name not in declared:
            lines.append(f"{name}: not declared, expected {expected}")
            continue
        declaration = declared[name]
        if declaration.dim != parameter.dim:
            reason = f" ({parameter.reason})" if parameter.reason else ""
            lines.append(
                f"{name}: declared {_describe_sharding(declaration.dim)},"
                f" expected {expected}{reason}"
            )
        elif len(parameter.segments) > 1:  # a fused matrix, each part of which is cut
            parts = " + ".join(map(str, parameter.segments))
            lines.append(
                f"{name}: declared one even cut along dim {declaration.dim}, expected one of each"
                f" part of {parts}"
            )
        elif declaration.gradient != parameter.gradient:
            lines.append(
                f"{name}: declared a {declaration.gradient} gradient, expected {parameter.gradient}"
            )
    return lines


def _describe_sharding(dim: int) -> str:
    """Return the words of a line for a parameter that is sharded along `dim` (-1: replicated)."""
    return "whole" if dim < 0 else f"cut along dim {dim}"
