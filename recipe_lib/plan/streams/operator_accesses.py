"""Which tensors an operator reads and which it writes, from its schema; of collectives from a table."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from recipe_lib.plan.tracing.operator_costs import tensors_in

# Operators whose schema does not say what they write: the places of those arguments.
_WRITES = {
    "c10d::_allgather_base_": (0,),
    "c10d::allgather_": (0,),
    "c10d::allgather_into_tensor_coalesced_": (0,),
    "c10d::allgather_coalesced_": (0,),
    "c10d::_reduce_scatter_base_": (0,),
    "c10d::reduce_scatter_": (0,),
    "c10d::reduce_scatter_tensor_coalesced_": (0,),
    "c10d::allreduce_": (0,),
    "c10d::allreduce_coalesced_": (0,),
    "c10d::broadcast_": (0,),
    "c10d::reduce_": (0,),
    "c10d::alltoall_base_": (0,),
    "c10d::alltoall_": (0,),
    "c10d::gather_": (0,),
    "c10d::scatter_": (0,),
    "c10d::recv_": (0,),
    "c10d::recv_any_source_": (0,),
    "fsdp::all_gather_copy_in": (1,),
}
# What these write they do not read.
_ONLY_WRITES = frozenset({"aten::copy_", "aten::zero_", "aten::fill_", "aten::_foreach_copy_", "aten::_foreach_zero_"})


def accesses(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """(tensors read, tensors written); what is changed in place is among both."""
    places, names = _written(func)
    written = [tensor for place in places if place < len(args) for tensor in tensors_in(args[place])]
    written += [tensor for name in names if name in kwargs for tensor in tensors_in(kwargs[name])]
    if func._schema.name in _ONLY_WRITES:
        read = tensors_in([value for place, value in enumerate(args) if place not in places])
    else:
        read = tensors_in((tuple(args), tuple(value for name, value in kwargs.items() if name not in names)))
    return read, [*written, *tensors_in(result)]


@cache
def _written(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Places of positional arguments, and names of others, that an operator writes."""
    schema = func._schema
    if schema.name in _WRITES:
        return _WRITES[schema.name], ()
    arguments = [
        (place, argument)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    places = tuple(place for place, argument in arguments if not argument.kwarg_only)
    return places, tuple(argument.name for _, argument in arguments)
