"""Tell which tensors an operator reads and which it writes, by its schema.

`StreamChecker.check_operator` calls `find_accesses`. Operators of torch.distributed and FSDP write
into arguments of which their schema does not say so: `_WRITES` lists them.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from recipe_lib.ops.kept_tensors import list_tensors

# Operators whose schema does not say what they write -> index of the argument that they write.
_WRITES = {
    "c10d::_allgather_base_": 0,
    "c10d::allgather_": 0,
    "c10d::allgather_into_tensor_coalesced_": 0,
    "c10d::allgather_coalesced_": 0,
    "c10d::_reduce_scatter_base_": 0,
    "c10d::reduce_scatter_": 0,
    "c10d::reduce_scatter_tensor_coalesced_": 0,
    "c10d::allreduce_": 0,
    "c10d::allreduce_coalesced_": 0,
    "c10d::broadcast_": 0,
    "c10d::reduce_": 0,
    "c10d::alltoall_base_": 0,
    "c10d::alltoall_": 0,
    "c10d::gather_": 0,
    "c10d::scatter_": 0,
    "c10d::recv_": 0,
    "c10d::recv_any_source_": 0,
    "fsdp::all_gather_copy_in": 1,
}
# Operators that do not read the arguments that they write.
_ONLY_WRITES = frozenset(
    {"aten::copy_", "aten::zero_", "aten::fill_", "aten::_foreach_copy_", "aten::_foreach_zero_"}
)


def find_accesses(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (tensors that an operator reads, tensors that it writes).

    func: the `OpOverload`. Results count as written. An argument that is changed in place counts as
    both, unless the operator is one of `_ONLY_WRITES`.
    """
    names = [argument.name for argument in func._schema.arguments]
    # strict=False: arguments with defaults may be missing at the end of `args`.
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    written_names = _find_written(func)
    unread_names = written_names if func._schema.name in _ONLY_WRITES else frozenset()
    read = list_tensors([value for name, value in values.items() if name not in unread_names])
    written = list_tensors([value for name, value in values.items() if name in written_names])
    return read, [*written, *list_tensors(result)]


@cache
def _find_written(func: Any) -> frozenset[str]:
    arguments = func._schema.arguments
    if func._schema.name in _WRITES:
        return frozenset({arguments[_WRITES[func._schema.name]].name})
    return frozenset(
        argument.name
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )
