"""What an operator does, from its schema and its tensors: arithmetic, bytes moved, whether it takes
memory, and which ranks it is a collective of.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry

from recipe_lib.memory.budget import GROUPED, count_grouped_flops
from recipe_lib.plan.tracing.trace import Collective

_COMMUNICATES = ("c10d::", "_c10d_functional::", "_dtensor::")
DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int64: "int64",
    torch.int32: "int32",
}


def format_dtype(dtype: torch.dtype) -> str:
    """`bf16`, `uint8`: as a report writes it."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class Cost:
    """flops: multiply and add are two. bytes: read and written. makes_memory: its outputs may be
    new storages. communicates: a collective. transfer: `to_host` or `to_device` for a copy between
    host and device. shape: of a matmul or of attention, as `Op` has it. on_host: all of its tensors
    are the host's.
    """

    name: str
    flops: int
    bytes: int
    dtype: str
    is_view: bool
    makes_memory: bool
    communicates: bool
    transfer: str = ""
    shape: tuple[int, ...] = ()
    on_host: bool = False


def compute_cost(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Cost:
    """The cost of one call."""
    schema = func._schema
    name = schema.name
    returns = schema.returns
    aliases = any(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )
    is_view = aliases or name in _VIEWS or name.startswith("profiler::")
    makes_memory = not is_view and any(value.alias_info is None for value in returns)
    if name in ("aten::reshape", "aten::contiguous", "aten::_reshape_copy"):
        makes_memory = True
    outputs = list_tensors(result)
    flops = size = 0
    shape: tuple[int, ...] = ()
    inputs = list_tensors((args, tuple(kwargs.values())))
    if not is_view:
        size = sum(map(_count_bytes, inputs)) + (
            sum(map(_count_bytes, outputs)) if outputs else _count_written_bytes(schema, args)
        )
        shape = (
            read_matmul_shape(name, args)
            or read_grouped_shape(name, args)
            or read_attention_shape(func, args, kwargs)
        )
        if name == "aten::embedding":  # reads rows, not the table
            size = 2 * sum(map(_count_bytes, outputs))
        elif name == "aten::copy_":  # writes what is in its arguments already
            size = sum(map(_count_bytes, inputs))
        elif name == "fsdp::all_gather_copy_in":  # the shards into their place among all ranks'
            size = 2 * sum(map(_count_bytes, args[0]))
        elif (
            name == "tune_recipes::label_log_probs"
        ):  # once for each row's largest logit, once for the sum
            size += _count_bytes(args[0])
        if name in _EMPTY:
            size = 0
        flops = _count_flops(func, args, kwargs, result, shape)
    of = outputs or list_tensors(args)
    dtype = _EIGHT_BITS.get(name) or (DTYPE_NAMES.get(of[0].dtype, "") if of else "")
    communicates = name.startswith(_COMMUNICATES)
    transfer = _find_transfer(args, of) if name in _COPIES else ""
    on_host = bool(inputs or outputs) and all(
        tensor.device.type == "cpu" for tensor in (*inputs, *outputs)
    )
    return Cost(
        name, flops, size, dtype, is_view, makes_memory, communicates, transfer, shape, on_host
    )


def _count_flops(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, shape: tuple[int, ...]
) -> int:
    """Operations of a matmul or attention, 0 of others. shape: of a matmul, where it is known."""
    name = func._schema.name
    count = flop_registry.get(_WITH_RESULT.get(func._overloadpacket, func._overloadpacket))
    if name.startswith("aten::_scaled_dot_product"):
        rows, queries, keys, _, width = (
            shape  # whole, not only causal: two products forward, five backward
        )
        return (5 if name.endswith("_backward") else 2) * 2 * rows * queries * keys * width
    if name in GROUPED:
        return count_grouped_flops(args, result)
    if name in _VARLEN and any(tensor.dim() == 3 for tensor in list_tensors(args)):
        return _VARLEN[name] * _count_varlen_flops(args)
    if count is not None:
        return int(count(*args, **kwargs, out_val=result))
    return 2 * math.prod(shape) if name == "aten::_int_mm" else 0


def _count_written_bytes(schema: Any, args: Sequence[Any]) -> int:
    """Bytes that an operator without results writes into its arguments; a fused optimizer's
    gradients, which its schema names for a scale that nobody gives it, are only read.
    """
    written = [
        value
        for argument, value in zip(schema.arguments, args, strict=False)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and argument.name != "grads"
    ]
    return sum(map(_count_bytes, list_tensors(written)))


def is_blocking(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a copy between host and device is not said to be `non_blocking`."""
    return not kwargs.get("non_blocking", name == "aten::copy_" and len(args) > 2 and args[2])


def _find_transfer(args: Sequence[Any], results: Sequence[Tensor]) -> str:
    """Which way a copy goes, if between host and device; `copy_` has the tensor that it writes
    first.
    """
    devices = [tensor.device.type for tensor in list_tensors(args)]
    source, target = devices[-1], results[0].device.type if results else devices[0]
    if (source == "cpu") == (target == "cpu") or "meta" in (source, target):
        return ""
    return "to_host" if target == "cpu" else "to_device"


# Attention over documents in one flat list, and how often it multiplies scores: twice forward, five
# times backward. torch has a count of its own for aten's, which takes all documents to be as long
# as the longest one.
_VARLEN = {
    "torch_attn::_varlen_attn": 2,
    "torch_attn::_varlen_attn_backward": 5,
    "aten::_flash_attention_forward": 2,
    "aten::_flash_attention_backward": 5,
}


def _count_varlen_flops(args: Sequence[Any]) -> int:
    """Operations of one product of queries and keys, documents taken to be equally long; counted
    whole, not causal.
    """
    tensors = [value for value in args if isinstance(value, Tensor)]
    tokens, heads, width = next(tensor.shape for tensor in tensors if tensor.dim() == 3)
    documents = next((len(tensor) - 1 for tensor in tensors if tensor.dtype == torch.int32), 1)
    return 2 * heads * width * tokens * tokens // max(1, documents)


# Products added to their first argument in place: torch counts those with a result.
_WITH_RESULT = {
    torch.ops.aten.addmm_: torch.ops.aten.addmm,
    torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm,
}

# Matmuls whose rate is that of their operands' type, not of their result's.
_EIGHT_BITS = {"aten::_int_mm": "int8", "aten::_scaled_mm": "fp8"}

_COPIES = frozenset({"aten::copy_", "aten::_to_copy"})

# Views whose schema does not say so.
_VIEWS = frozenset({"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"})
_EMPTY = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)


def list_tensors(value: Any) -> list[Tensor]:
    """The tensors among an operator's arguments or results."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for entry in value for tensor in list_tensors(entry)]
    return []


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# The shapes that decide how fast a matmul or attention runs, from an operator's arguments.


_BATCHED = frozenset({"aten::bmm", "aten::baddbmm", "aten::baddbmm_"})
_FLAT = frozenset({"aten::mm", "aten::addmm", "aten::addmm_", "aten::_int_mm", "aten::_scaled_mm"})


def read_matmul_shape(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    """`(matrices, m, k, n)` of `[m, k] @ [k, n]`; () for an operator that is no matmul."""
    if name not in _FLAT and name not in _BATCHED:
        return ()
    dims = 3 if name in _BATCHED else 2
    first = 1 if name.startswith(("aten::addmm", "aten::baddbmm")) else 0
    left, right = args[first], args[first + 1]
    if left.dim() != dims or right.dim() != dims:
        return ()
    return (
        int(left.shape[0]) if dims == 3 else 1,
        int(left.shape[-2]),
        int(left.shape[-1]),
        int(right.shape[-1]),
    )


def read_grouped_shape(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    """`(matrices, m, k, n, place of rows)` of a matmul of many weights; () for any other operator.

    Rows `[r, k]` by weights `[E, k, n]`: m is r / E, the rows of each expert where all have as
    many; their place is 1. Gradients of weights, `[m, r]` by `[r, n]`: the inner dimension is r /
    E, place 2. Fewer rows than experts are experts of one row each.
    """
    if name not in GROUPED:
        return ()
    left, right, ends = args[:3]
    if left.dim() != 2:
        return ()
    if right.dim() == 3:
        rows, inner = left.shape
        matrices, each = _share_rows(int(rows), int(right.shape[0]))
        return (matrices, each, int(inner), int(right.shape[2]), 1)
    outer = left.shape[1] if name == "tune_recipes::grouped_gradient_loop" else left.shape[0]
    matrices, each = _share_rows(int(right.shape[0]), len(ends))
    return (matrices, int(outer), each, int(right.shape[1]), 2)


def _share_rows(rows: int, experts: int) -> tuple[int, int]:
    """(experts that have rows, rows of each): shared out evenly, rounded up."""
    return max(1, min(rows, experts)), max(1, -(-rows // experts))


def read_attention_shape(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, ...]:
    """`(rows times heads, queries, keys, keys that a query sees on average, width)` of an attention
    operator; () for any other. Documents of one flat list count as rows of equal length.
    """
    named = {
        argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)
    }
    named.update(kwargs)
    query, key = named.get("query"), named.get("key")
    if not isinstance(query, Tensor) or not isinstance(key, Tensor):
        return ()
    window = None
    if query.dim() == 4:
        rows, heads, queries, width = query.shape
        keys = key.shape[2]
    else:
        tokens, heads, width = query.shape
        bounds = named.get("cu_seq_q", named.get("cum_seq_q"))
        rows = len(bounds) - 1 if isinstance(bounds, Tensor) and bounds.dtype == torch.int32 else 1
        queries = keys = max(1, tokens // max(1, rows))
        window = named.get("window_size") or [
            named.get("window_size_left"),
            named.get("window_size_right"),
        ]
    left, right = window or (None, None)
    causal = bool(named.get("is_causal")) or right == 0
    return (
        rows * heads,
        queries,
        keys,
        _count_seen_keys(keys, causal, -1 if left is None else left),
        width,
    )


def _count_seen_keys(keys: int, causal: bool, window: int) -> int:
    """Keys that a query sees on average. window: how many before itself it sees, -1 for all."""
    if not causal:
        return keys
    reach = min(keys, window + 1) if window >= 0 else keys
    return max(1, round(reach - reach * (reach - 1) / (2 * keys)))


# Tensors with memory of their own, and the wrappers that hold such.


PLAIN_TENSORS = frozenset({FakeTensor, Tensor, nn.Parameter})


def has_memory(tensor: Tensor) -> bool:
    """A wrapper has none of its own; what it holds was seen when that was made."""
    return type(tensor) in PLAIN_TENSORS or not hasattr(tensor, "__tensor_flatten__")


def list_plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor consists of: of a sharded one its local part, of a wrapper
    what it holds.
    """
    if has_memory(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    held = (getattr(tensor, name) for name in names)
    return [
        part for value in held if isinstance(value, Tensor) for part in list_plain_tensors(value)
    ]


# Sums of gradients by autograd's engine, which are made in place where no mode looks on.
#
# Where several operators read a tensor, the engine sums its gradients as they arrive. It adds to
# the one that it has if nothing else holds that memory (torch/csrc/autograd/input_buffer.cpp), but
# under a mode of Python, as a trace is one, it always makes a new tensor. Of a tied embedding that
# is one more gradient of the whole matrix than a run has.


ADD, ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor

# Owners of a gradient that is the engine's alone, as a mode sees it: of the tensor in C++ (the
# engine, the operator's arguments, Python's object), of its memory, and of the object in Python.
# Torch 2.11 and 2.13, Python 3.11; with other counts a sum is traced as it comes, which plans too
# much.
_ALONE = (4, 2, 4)


def is_summed_in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that a mode sees would, without the mode, have been `add_`. To be called
    with the mode's own arguments and nothing else that refers to what is in them.
    """
    if (
        func is not ADD
        or kwargs
        or torch.is_grad_enabled()
        or torch._C._current_graph_task_id() == -1
    ):
        return False
    held, arrived = args
    if not isinstance(arrived, Tensor) or held.shape != arrived.shape:
        return False
    memory = torch._C._storage_Use_Count(held.untyped_storage()._cdata)
    return (
        held._use_count(),
        memory,
        sys.getrefcount(held),
    ) == _ALONE and is_non_overlapping_and_dense_or_false(held)


# Collectives, from their operators.


# The kind of each, which argument holds the tensors, and whether the whole tensor is as often as
# large as there are ranks.
_COLLECTIVES = {
    "c10d::_allgather_base_": ("all_gather", 0, False),
    "c10d::allgather_": ("all_gather", 0, False),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0, False),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, False),
    "c10d::reduce_scatter_": ("reduce_scatter", 1, False),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, False),
    "c10d::allreduce_": ("all_reduce", 0, False),
    "c10d::allreduce_coalesced_": ("all_reduce", 0, False),
    "c10d::broadcast_": ("broadcast", 0, False),
    "c10d::alltoall_base_": ("all_to_all", 0, False),
    "c10d::alltoall_": ("all_to_all", 0, False),
    "c10d::send": ("send", 0, False),
    "c10d::recv_": ("recv", 0, False),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0, True),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0, False),
    "_c10d_functional::all_reduce": ("all_reduce", 0, False),
    "_c10d_functional::all_reduce_": ("all_reduce", 0, False),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0, False),
    "_c10d_functional::broadcast": ("broadcast", 0, False),
}


def read_collective(func: Any, args: Sequence[Any], groups: Mapping[str, str]) -> Collective | None:
    """The collective that an operator is, or None (a wait, a barrier). groups: a group's name ->
    mesh dimension.
    """
    name = func._schema.name
    if name not in _COLLECTIVES:
        return None
    operation, argument, grows = _COLLECTIVES[name]
    group: Any = dist.group.WORLD
    if func.namespace != "c10d":
        group = torch._C._distributed_c10d._resolve_process_group(args[-1])
    elif objects := [value for value in args if isinstance(value, torch.ScriptObject)]:
        group = dist.ProcessGroup.unbox(objects[0])
    ranks = dist.get_process_group_ranks(group)
    if operation in (
        "send",
        "recv",
    ):  # this rank and the other one, whose place in the group is the first number
        other = next(value for value in args if type(value) is int)
        ranks = sorted((dist.get_rank(), ranks[other]))
    tensors = list_tensors(args[argument])
    return Collective(
        operation=operation,
        dim=groups.get(group.group_name, "world"),
        ranks=tuple(ranks),
        bytes=(len(ranks) if grows else 1) * sum(map(_count_bytes, tensors)),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtype=format_dtype(tensors[0].dtype) if tensors else "",
        waits=func.namespace == "c10d" and not _is_asynchronous(func, args),
    )


def _is_asynchronous(func: Any, args: Sequence[Any]) -> bool:
    """Its argument says so, or the default of that, which torch leaves out; without one: it is
    not.
    """
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("async_op", "asyncOp"):
            return bool(args[place] if place < len(args) else argument.default_value)
    return False
