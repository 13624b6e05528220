"""Collectives as torch dispatches them, read into `Collective`: group, members, bytes of the whole tensor."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recipe_lib.config.mesh import place_with_context, with_context
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.parallel import World
from recipe_lib.plan.trace import Collective
from recipe_lib.plan.tracing.operator_costs import dtype_name, tensors_in

# Of c10d's operators: the kind, which argument holds the whole tensor.
_C10D = {
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::alltoall_base_": ("all_to_all", 0),
    "c10d::alltoall_": ("all_to_all", 0),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
}
_FUNCTIONAL = {
    "_c10d_functional::all_gather_into_tensor": ("all_gather", True),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", False),
    "_c10d_functional::all_reduce": ("all_reduce", False),
    "_c10d_functional::all_reduce_": ("all_reduce", False),
    "_c10d_functional::all_to_all_single": ("all_to_all", False),
    "_c10d_functional::broadcast": ("broadcast", False),
}


def group_names(world: World) -> dict[str, str]:
    """The dimension of each of the world's groups."""
    found = {world.mesh.get_group(dim).group_name: dim for dim in world.mesh.mesh_dim_names or ()}
    return found | ({world.context.name: "context"} if world.context is not None else {})


def mesh_and_place(world: World, parallel: ParallelConfig) -> tuple[dict[str, int], dict[str, int]]:
    """The sizes of the mesh's dimensions, and this rank's place along them."""
    names = world.mesh.mesh_dim_names or ()
    mesh = dict(zip(names, world.mesh.shape, strict=True))
    place = dict(zip(names, world.mesh.get_coordinate() or (), strict=True))
    return with_context(parallel, mesh), place_with_context(parallel, place)


def read_collective(func: Any, args: Sequence[Any], groups: Mapping[str, str]) -> Collective | None:
    """The collective that an operator is, or None (a wait, a barrier). groups: a group's name -> mesh dimension."""
    name = func._schema.name
    if name in _C10D:
        operation, whole = _C10D[name]
        group = next((value for value in args if isinstance(value, torch.ScriptObject)), None)
        process_group = dist.ProcessGroup.unbox(group) if group is not None else dist.group.WORLD
        tensors = tensors_in(args[whole])
        found = _collective(operation, process_group, tensors, 1, groups, waits=not _is_asynchronous(func, args))
        if operation in ("send", "recv"):
            found.ranks = _the_two(process_group, args)
        return found
    if name in _FUNCTIONAL:
        operation, grows = _FUNCTIONAL[name]
        process_group = torch._C._distributed_c10d._resolve_process_group(args[-1])
        factor = process_group.size() if grows else 1
        return _collective(operation, process_group, tensors_in(args[0]), factor, groups, waits=False)
    return None


def _is_asynchronous(func: Any, args: Sequence[Any]) -> bool:
    """Its argument says so, or the default of that, which torch leaves out; without one: it is not."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("async_op", "asyncOp"):
            return bool(args[place] if place < len(args) else argument.default_value)
    return False


def _the_two(group: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """This rank and the one that it exchanges with, whose place in the group is the operator's first number."""
    place = next(value for value in args if type(value) is int)
    return tuple(sorted((dist.get_rank(), dist.get_global_rank(group, place))))


def _collective(
    operation: str, group: Any, tensors: list[Tensor], factor: int, groups: Mapping[str, str], *, waits: bool
) -> Collective:
    return Collective(
        operation=operation,
        dim=groups.get(group.group_name, "world"),
        ranks=tuple(dist.get_process_group_ranks(group)),
        bytes=factor * sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtype=dtype_name(tensors[0].dtype) if tensors else "",
        waits=waits,
    )
