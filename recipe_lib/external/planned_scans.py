"""Stand for kernels of scans in plans, which have no values for them to run on.

`PLANNED` has a function for each kernel. Its forward and backward are an operator each, with the
memory that kernels of flash-linear-attention 0.6 and mamba-ssm 2 keep and take for a while, and the
products of their algorithms, by chunks of the sequence. No run on a GPU was compared with them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

_CHUNK = 64  # tokens in a chunk of fla's kernels; that of mamba-ssm's is an argument
_library = torch.library.Library("tune_recipes", "FRAGMENT")
_Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _Work:
    """The memory and the products of a kernel in forward."""

    kept: list[_Shape]  # for backward; the output is shaped as the values
    states: _Shape  # of all chunks; backward has their gradients too
    freed: list[_Shape]  # the rest of what it takes for a while
    products: int  # floating point operations of matmuls
    # (index of an argument, that of what is kept in its place); other arguments are kept too.
    replaced: tuple[tuple[int, int], ...] = ()


def _work_gated_delta(tensors: Sequence[Tensor], chunk: int) -> _Work:
    """Return the work of fla's gated delta rule.

    tensors: values `[b, s, H, v]`, queries and keys `[b, s, h, k]`, gates and betas `[b, s, H]`,
    with H a multiple of h.
    """
    values, queries, *_ = tensors
    *start, heads, width = queries.shape
    batch, length, value_heads, value_width = values.shape
    chunks = -(-length // chunk)
    dtype = values.dtype
    by_keys = 2 * chunk**2 * 3 * width  # keys by keys, queries by keys, corrected keys
    by_values = 2 * chunk**2 * 2 * value_width  # corrected values, and those by the scores
    by_states = 3 * 2 * chunk * width * value_width  # read twice, and updated
    return _Work(
        kept=[
            *[((*start, heads, width), dtype)] * 2,  # normalized queries and keys
            *[((*start, heads), torch.float32)] * 2,  # their norms
            ((*start, value_heads), torch.float32),  # sums of gates
            ((*start, value_heads, chunk), dtype),  # inverses
        ],
        states=((batch, chunks, value_heads, width, value_width), dtype),
        freed=[((*start, value_heads, size), dtype) for size in (width, value_width, value_width)],
        products=batch * chunks * value_heads * (by_keys + by_values + by_states + chunk**3),
        replaced=((1, 0), (2, 1), (3, 4)),
    )


def _work_mamba(tensors: Sequence[Tensor], chunk: int) -> _Work:
    """Return the work of Mamba-2's scan.

    tensors: values `[b, s, h, p]`, B and C `[b, s, g, n]`, and others.
    """
    values, b, *_ = tensors
    batch, length, heads, width = values.shape
    groups, state = b.shape[2:]
    chunks = -(-length // chunk)
    products = 2 * chunk**2 * (groups * state + heads * width) + 4 * chunk * heads * width * state
    steps = ((batch, heads, chunks, chunk), torch.float32)
    return _Work(
        kept=[steps],  # sums of decays
        states=((batch, chunks, heads, width, state), torch.float32),
        freed=[steps, ((batch, chunks, groups, chunk, chunk), torch.float32)],
        products=batch * chunks * products,
    )


_WORK = {"gated_delta_rule": _work_gated_delta, "mamba_scan": _work_mamba}


def _make(like: Tensor, shapes: Sequence[_Shape]) -> list[Tensor]:
    return [like.new_empty(shape, dtype=dtype) for shape, dtype in shapes]


def _define(name: str) -> None:
    """Define the operators of a scan's forward and backward, on tensors without values.

    Backward makes again what forward has freed.
    """

    def run(tensors: list[Tensor], chunk: int) -> list[Tensor]:
        work = _WORK[name](tensors, chunk)
        shapes = [*work.kept, work.states, *work.freed]
        return [torch.empty_like(tensors[0]), *_make(tensors[0], shapes)]

    def run_backward(tensors: list[Tensor], chunk: int) -> list[Tensor]:
        work = _WORK[name](tensors, chunk)
        shapes = [work.states, work.states, *work.freed]
        return [*map(torch.empty_like, tensors), *_make(tensors[0], shapes)]

    def count(tensors: list[Tensor], chunk: int, **_: Any) -> int:
        return _WORK[name](tensors, chunk).products

    def count_backward(tensors: list[Tensor], chunk: int, **_: Any) -> int:
        return 3 * _WORK[name](tensors, chunk).products  # forward's, and two of each

    for operator, function, counter in (
        (name, run, count),
        (f"{name}_backward", run_backward, count_backward),
    ):
        _library.define(f"{operator}(Tensor[] tensors, int chunk) -> Tensor[]")
        torch.library.register_fake(f"tune_recipes::{operator}", function, lib=_library)
        packet = getattr(torch.ops.tune_recipes, operator)
        register_flop_formula(packet, get_raw=True)(counter)


for _name in _WORK:
    _define(_name)


class _Planned(torch.autograd.Function):
    """The autograd node of a kernel."""

    @staticmethod
    def forward(ctx: Any, name: str, chunk: int, *tensors: Tensor) -> Tensor:
        ctx.name = name
        ctx.chunk = chunk
        ctx.count = len(tensors)
        output, *others = getattr(torch.ops.tune_recipes, name)(tensors, chunk)
        work = _WORK[name](tensors, chunk)
        kept = others[: len(work.kept)]
        arguments = list(tensors)
        for place, index in work.replaced:
            arguments[place] = kept[index]
        replacing = {index for _, index in work.replaced}
        others = [tensor for index, tensor in enumerate(kept) if index not in replacing]
        ctx.save_for_backward(*arguments, *others)
        return output  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors[: ctx.count]
        results = getattr(torch.ops.tune_recipes, f"{ctx.name}_backward")(tensors, ctx.chunk)
        return (None, None, *results[: ctx.count])


def _plan_gated_delta(arguments: dict[str, Any]) -> Any:
    tensors = [arguments[name] for name in ("value", "query", "key", "g", "beta")]
    return _Planned.apply("gated_delta_rule", _CHUNK, *tensors), None


def _plan_mamba(arguments: dict[str, Any]) -> Any:
    names = ("hidden_states", "B", "C", "dt", "A", "D", "dt_bias")
    tensors = [arguments[name] for name in names if arguments.get(name) is not None]
    return _Planned.apply("mamba_scan", arguments["chunk_size"], *tensors)


# Kernel -> function that plans it, of the arguments by the names of transformers' loop. Other
# kernels are planned as the loops.
PLANNED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "chunk_gated_delta_rule": _plan_gated_delta,
    "mamba_chunk_scan_combined": _plan_mamba,
}
