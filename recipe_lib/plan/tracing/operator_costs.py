"""Read the costs of an operator from its schema and its tensors.

`compute_cost` returns arithmetic, bytes moved and whether new memory is taken; `read_collective`
returns the ranks and bytes of a communication. `Tracer`, a dispatch mode, calls both for the
operators that it sees, with the mode's func, args and kwargs. No function here runs an operator.
"""

import itertools
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
from recipe_lib.ops.kept_tensors import list_tensors
from recipe_lib.plan.tracing.trace import Collective

# Namespaces of operators that communicate with other ranks.
_COMMUNICATES = ("c10d::", "_c10d_functional::", "_dtensor::")
# Types that a device's arithmetic rate may be looked up for, by the names that reports give them.
DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int64: "int64",
    torch.int32: "int32",
}


def format_dtype(dtype: torch.dtype) -> str:
    """Return a dtype as a report writes it, such as `bf16` or `uint8`."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one call of an operator."""

    name: str  # with its namespace, such as `aten::mm`
    flops: int  # of a matmul or attention, a multiply and an add counted as two; else 0
    bytes: int  # read and written
    dtype: str  # type that the device's rate is looked up for, such as `bf16`; "": no such type
    is_view: bool  # True: it does no work and moves no bytes
    makes_memory: bool  # True: its outputs may be new storages
    communicates: bool  # True: it is a collective, a send or a receive
    transfer: str = ""  # `to_host` or `to_device` for a copy between the two; "": no such copy
    shape: tuple[int, ...] = ()  # of a matmul or attention, see the functions `read_..._shape`
    on_host: bool = False  # True: all of its tensors are in host memory


def compute_cost(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Cost:
    """Return the cost of one call of an operator that has returned `result`."""
    schema = func._schema
    name = schema.name
    returns = schema.returns
    # A result that shares an argument's memory and does not write it.
    is_alias = any(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )
    is_view = is_alias or name in _VIEWS or name.startswith("profiler::")
    # Views by their schema, but they copy where strides allow no view.
    may_copy = name in ("aten::reshape", "aten::contiguous", "aten::_reshape_copy")
    makes_memory = may_copy or (not is_view and any(value.alias_info is None for value in returns))
    outputs = list_tensors(result)
    flops = num_bytes = 0
    shape: tuple[int, ...] = ()
    inputs = list_tensors((args, tuple(kwargs.values())))
    if not is_view:
        num_bytes = _count_bytes(inputs) + (
            _count_bytes(outputs) if outputs else _count_written_bytes(schema, args)
        )
        shape = (
            read_matmul_shape(name, args)
            or read_grouped_shape(name, args)
            or read_attention_shape(func, args, kwargs)
        )
        if name == "aten::embedding":
            num_bytes = 2 * _count_bytes(outputs)  # it reads rows, not the whole table
        elif name == "aten::copy_":
            num_bytes = _count_bytes(inputs)  # its output is one of its arguments
        elif name == "fsdp::all_gather_copy_in":  # its results are the whole buffer
            # It copies this rank's shards to their place in the buffer of all ranks.
            num_bytes = 2 * _count_bytes(args[0])
        elif name == "tune_recipes::label_log_probs":
            # It reads the logits twice: for each row's maximum, and for the sum.
            num_bytes += args[0].nbytes
        if name in _EMPTY:
            num_bytes = 0
        flops = _count_flops(func, args=args, kwargs=kwargs, result=result, shape=shape)
    results = outputs or list_tensors(args)
    dtype = _EIGHT_BITS.get(name) or (DTYPE_NAMES.get(results[0].dtype, "") if results else "")
    on_host = bool(inputs or outputs) and all(
        tensor.device.type == "cpu" for tensor in (*inputs, *outputs)
    )
    return Cost(
        name=name,
        flops=flops,
        bytes=num_bytes,
        dtype=dtype,
        is_view=is_view,
        makes_memory=makes_memory,
        communicates=name.startswith(_COMMUNICATES),
        transfer=_find_transfer(args, results) if name in _COPIES else "",
        shape=shape,
        on_host=on_host,
    )


def _count_flops(
    func: Any,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    shape: tuple[int, ...],
) -> int:
    """Return the arithmetic operations of a matmul or attention; 0 for other operators.

    shape: of a matmul or attention, as `Cost.shape`; () for other operators.
    """
    name = func._schema.name
    # torch's formula for the operator; None: it has none.
    count_registered = flop_registry.get(
        _WITH_RESULT.get(func._overloadpacket, func._overloadpacket)
    )
    if name.startswith("aten::_scaled_dot_product"):
        # Not torch's formula, which the registry has for some of these operators only. All scores
        # count, those that a causal mask hides too: two products in forward, five in backward.
        rows, queries, keys, _, width = shape
        return (5 if name.endswith("_backward") else 2) * 2 * rows * queries * keys * width
    if name in GROUPED:
        return count_grouped_flops(args, result)
    if name in _VARLEN and any(tensor.dim() == 3 for tensor in list_tensors(args)):
        return _VARLEN[name] * _count_varlen_flops(args)
    if count_registered is not None:
        return int(count_registered(*args, **kwargs, out_val=result))
    # torch's registry has no formula for the int8 matmul.
    return 2 * math.prod(shape) if name == "aten::_int_mm" else 0


def _count_written_bytes(schema: Any, args: Sequence[Any]) -> int:
    # A fused optimizer's schema says that it writes its gradients, for a gradient scale that we
    # never pass: here they are only read.
    # strict=False: torch leaves out arguments at the end that have their defaults.
    written = [
        value
        for argument, value in zip(schema.arguments, args, strict=False)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and argument.name != "grads"
    ]
    return _count_bytes(list_tensors(written))


def is_blocking(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a copy between host and device is not called with `non_blocking=True`."""
    # The third argument of `copy_` is `non_blocking`.
    return not kwargs.get("non_blocking", name == "aten::copy_" and len(args) > 2 and args[2])


def _find_transfer(args: Sequence[Any], results: Sequence[Tensor]) -> str:
    """Return `to_host` or `to_device` for a copy between the two, else ""."""
    devices = [tensor.device.type for tensor in list_tensors(args)]
    source = devices[-1]  # the second argument of `copy_`, the only one of `_to_copy`
    # The first argument of `copy_` is the tensor that it writes.
    target = results[0].device.type if results else devices[0]
    if (source == "cpu") == (target == "cpu") or "meta" in (source, target):
        return ""
    return "to_host" if target == "cpu" else "to_device"


# Attention over packed documents -> number of its matmuls: two in forward, five in backward. Not
# counted by torch's formulas for aten's operators: they take all documents to be as long as the
# longest.
_VARLEN = {
    "torch_attn::_varlen_attn": 2,
    "torch_attn::_varlen_attn_backward": 5,
    "aten::_flash_attention_forward": 2,
    "aten::_flash_attention_backward": 5,
}


def _count_varlen_flops(args: Sequence[Any]) -> int:
    """Return the operations of one matmul of queries and keys, masked scores counted too.

    args: with queries `[tokens, heads, head width]` and int32 document bounds (cu_seqlens). Fake
    tensors have no values, so documents are taken to be equally long.
    """
    tensors = [value for value in args if isinstance(value, Tensor)]
    tokens, heads, width = next(tensor.shape for tensor in tensors if tensor.dim() == 3)
    documents = next((len(tensor) - 1 for tensor in tensors if tensor.dtype == torch.int32), 1)
    return 2 * heads * width * tokens * tokens // max(1, documents)


# Operators in place -> the operator that torch's `flop_registry` has the same count for.
_WITH_RESULT = {
    torch.ops.aten.addmm_: torch.ops.aten.addmm,
    torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm,
}

# Matmuls that run at the rate of their operands' type, not of their result's -> that type.
_EIGHT_BITS = {"aten::_int_mm": "int8", "aten::_scaled_mm": "fp8"}

_COPIES = frozenset({"aten::copy_", "aten::_to_copy"})

# Operators that return views although their schemas do not say so.
_VIEWS = frozenset({"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"})
# Operators that take memory and neither read nor write it.
_EMPTY = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)


def _count_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# Shapes that decide how fast a matmul or attention runs.

# Matmuls of three-dimensional and of two-dimensional tensors.
_BATCHED = frozenset({"aten::bmm", "aten::baddbmm", "aten::baddbmm_"})
_FLAT = frozenset({"aten::mm", "aten::addmm", "aten::addmm_", "aten::_int_mm", "aten::_scaled_mm"})


def read_matmul_shape(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    """Return `(matrices, m, k, n)` of a matmul `[m, k] @ [k, n]`, () for any other operator."""
    if name not in _FLAT and name not in _BATCHED:
        return ()
    dims = 3 if name in _BATCHED else 2
    # The first argument of `addmm` is the tensor that the product is added to.
    first_operand = 1 if name.startswith(("aten::addmm", "aten::baddbmm")) else 0
    left, right = args[first_operand : first_operand + 2]
    if left.dim() != dims or right.dim() != dims:
        return ()
    return (
        int(left.shape[0]) if dims == 3 else 1,
        int(left.shape[-2]),
        int(left.shape[-1]),
        int(right.shape[-1]),
    )


def read_grouped_shape(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    """Return `(matrices, m, k, n, row_index)` of a grouped matmul, () for any other operator.

    A grouped matmul multiplies each expert's rows by its weight; all experts are taken to have as
    many. row_index is the index of the entry that they are. Rows `[r, k]` by weights `[E, k, n]`: m
    is r / E, row_index 1. Gradients of weights, `[m, r]` by `[r, n]`: k is r / E, row_index 2.
    Where r < E, r experts have one row each.
    """
    if name not in GROUPED:
        return ()
    left, right, ends = args[:3]  # ends: where each expert's rows end
    if left.dim() != 2:
        return ()
    if right.dim() == 3:
        rows, inner = left.shape
        matrices, expert_rows = _share_rows(int(rows), int(right.shape[0]))
        return (matrices, expert_rows, int(inner), int(right.shape[2]), 1)
    # Our loop over experts is given its rows as they are, aten's kernel their transpose.
    outer = left.shape[1] if name == "tune_recipes::grouped_gradient_loop" else left.shape[0]
    matrices, expert_rows = _share_rows(int(right.shape[0]), len(ends))
    return (matrices, int(outer), expert_rows, int(right.shape[1]), 2)


def _share_rows(rows: int, experts: int) -> tuple[int, int]:
    """Return (experts that have rows, rows of each), with rows shared out evenly, rounded up."""
    return max(1, min(rows, experts)), max(1, -(-rows // experts))


def read_attention_shape(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the shape of an attention operator, () for any other.

    It is (rows times heads, queries, keys, keys that a query sees on average, head width). Rows are
    sequences of the batch; packed documents count as rows of equal length.
    """
    arguments = {
        argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)
    }
    arguments.update(kwargs)
    query = arguments.get("query")
    key = arguments.get("key")
    if not isinstance(query, Tensor) or not isinstance(key, Tensor):
        return ()
    window = None
    if query.dim() == 4:  # [b, h, s, d]
        rows, heads, queries, width = query.shape
        keys = key.shape[2]
    else:  # packed documents [s, h, d]
        tokens, heads, width = query.shape
        # cu_seqlens, under the names of `_varlen_attn` and of aten's flash attention.
        bounds = arguments.get("cu_seq_q", arguments.get("cum_seq_q"))
        rows = len(bounds) - 1 if isinstance(bounds, Tensor) and bounds.dtype == torch.int32 else 1
        queries = keys = max(1, tokens // max(1, rows))
        window = arguments.get("window_size") or [
            arguments.get("window_size_left"),
            arguments.get("window_size_right"),
        ]
    # Keys that a query sees before and after itself; None or -1: all. 0 after itself is causal.
    keys_before, keys_after = window or (None, None)
    causal = bool(arguments.get("is_causal")) or keys_after == 0
    return (
        rows * heads,
        queries,
        keys,
        _count_seen_keys(keys, causal=causal, window=-1 if keys_before is None else keys_before),
        width,
    )


def _count_seen_keys(keys: int, *, causal: bool, window: int) -> int:
    """Return how many of `keys` keys a query sees on average.

    window: how many keys before itself a query sees; -1: all.
    """
    if not causal:
        return keys
    most_seen = min(keys, window + 1) if window >= 0 else keys
    # The first queries see fewer: 1, 2, ... up to most_seen.
    return max(1, round(most_seen - most_seen * (most_seen - 1) / (2 * keys)))


# Types of tensors that have memory of their own. Others are wrappers around such tensors.

PLAIN_TENSORS = frozenset({FakeTensor, Tensor, nn.Parameter})


def has_memory(tensor: Tensor) -> bool:
    """Return True if a tensor has memory of its own; a wrapper (DTensor, torchao's) has none."""
    return type(tensor) in PLAIN_TENSORS or not hasattr(tensor, "__tensor_flatten__")


def list_plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors with memory inside a tensor: itself, or those of a wrapper.

    A DTensor has its local shard, a quantized tensor of torchao's its codes and scales.
    """
    if has_memory(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner_tensors = list_tensors([getattr(tensor, name) for name in names])
    return list(itertools.chain.from_iterable(map(list_plain_tensors, inner_tensors)))


# Sums of gradients by autograd's engine, which are made in place in a run without a dispatch mode.
#
# Where several operators read a tensor, the engine sums its gradients as they arrive. It adds to
# the one that it has if nothing else holds that memory (torch/csrc/autograd/input_buffer.cpp). But
# under a dispatch mode in Python, such as the tracer, it always makes a new tensor: for a tied
# embedding, one more gradient of the whole matrix than a run has.

ADD = torch.ops.aten.add.Tensor
ADD_IN_PLACE = torch.ops.aten.add_.Tensor

# Reference counts of a gradient that only the engine holds, as the mode sees it: of the tensor in
# C++ (by the engine, the operator's arguments, Python's object), of its storage, and of the object
# in Python. They are those of torch 2.11 to 2.13 and Python 3.11. With other counts a sum is traced
# as a new tensor, and a plan shows too many bytes.
_ALONE = (4, 2, 4)


def is_summed_in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an operator that a mode sees would have been `add_` without the mode.

    Pass the objects that `__torch_dispatch__` was given: more references to them change the answer.
    """
    # Autograd's engine runs backward without gradients, as a graph task; -1: no task runs.
    if (
        func is not ADD
        or kwargs
        or torch.is_grad_enabled()
        or torch._C._current_graph_task_id() == -1
    ):
        return False
    accumulated, arrived = args
    if not isinstance(arrived, Tensor) or accumulated.shape != arrived.shape:
        return False
    reference_counts = (
        accumulated._use_count(),
        torch._C._storage_Use_Count(accumulated.untyped_storage()._cdata),
        sys.getrefcount(accumulated),
    )
    return reference_counts == _ALONE and is_non_overlapping_and_dense_or_false(accumulated)


# Operator -> (kind of collective; index of the argument whose tensors give its bytes; True if that
# argument is one rank's part of the gathered tensor, False if it is as large as the whole tensor).
# Waits and barriers are left out.
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
    """Return a communicating operator's collective; None if it moves no data (a wait, a barrier).

    groups: name of a process group -> its mesh dimension. Other groups get the dimension `world`.
    """
    name = func._schema.name
    if name not in _COLLECTIVES:
        return None
    operation, tensors_index, is_part = _COLLECTIVES[name]
    group: Any = dist.group.WORLD
    # Functional operators have the group's name as the last argument, those of c10d the group.
    if func.namespace != "c10d":
        group = torch._C._distributed_c10d._resolve_process_group(args[-1])
    elif group_objects := [value for value in args if isinstance(value, torch.ScriptObject)]:
        group = dist.ProcessGroup.unbox(group_objects[0])
    ranks = dist.get_process_group_ranks(group)
    if operation in ("send", "recv"):
        # The first number among the arguments is the peer's index in the group.
        peer_index = next(value for value in args if type(value) is int)
        ranks = sorted((dist.get_rank(), ranks[peer_index]))
    tensors = list_tensors(args[tensors_index])
    return Collective(
        operation=operation,
        dim=groups.get(group.group_name, "world"),
        ranks=tuple(ranks),
        bytes=(len(ranks) if is_part else 1) * _count_bytes(tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtype=format_dtype(tensors[0].dtype) if tensors else "",
        waits=func.namespace == "c10d" and not _is_asynchronous(func, args),
    )


def _is_asynchronous(func: Any, args: Sequence[Any]) -> bool:
    """Return True if a collective of c10d returns before its stream has waited for it."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("async_op", "asyncOp"):
            # torch leaves an argument out where it has its default.
            return bool(args[index] if index < len(args) else argument.default_value)
    return False
