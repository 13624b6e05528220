"""Exchange tensors between ranks at one call of a forward, as a tensor-parallel plan says.

A boundary is one exchange of the plan, at an argument or a result of a torch function call; its
kinds (enter, leave, gather ...) are in `sharding_plan.Boundary`. `plan_executor` makes calls with
boundaries by `Exchanges.call`. Training and the proof of a plan (`proven_plan`) share this code:
`Ranks` has the collectives of processes for one, of threads for the other.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from recipe_lib.errors import SetupError
from recipe_lib.external.tensor_plan.sharding_plan import (
    Boundary,
    ParameterPlan,
    ShardingPlan,
    compute_bounds,
    list_places,
    replace_argument,
)
from recipe_lib.external.tensor_plan.sourced_integers import Division
from recipe_lib.models.language_model import Entry, replace_entries
from recipe_lib.ops.fused_kernels import call_with_gradient

TensorFunction = Callable[[Tensor], Tensor]  # a collective, or a part of one
Rank: TypeAlias = int | Tensor  # index of a rank; a tensor `[]` in code that is compiled
# Exchanges whose results several calls share:
# (kind of exchange, `Boundary.activation`, id of the tensor) -> (the tensor, its result)
Entered = dict[tuple[str, int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Ranks:
    """One of the ranks that share a model, and their collectives."""

    rank: int  # index of this rank
    size: int  # number of ranks
    all_reduce: TensorFunction  # a tensor -> its sum over ranks
    all_gather: TensorFunction  # `[n, ...]` of each of t ranks -> `[t * n, ...]` on all
    reduce_scatter: TensorFunction  # `[t * n, ...]` -> this rank's `[n, ...]` of the sum


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of one rank at the boundaries of a plan."""

    plan: ShardingPlan
    ranks: Ranks
    # Returns this rank's index. In code that is compiled it is a tensor `[]`, so that all ranks
    # compile the same graph.
    rank: Callable[[], Rank]
    # Returns the exchanges so far whose results later calls share; `_pass_once` adds to it. A
    # tensor is kept with its result, so that no other one gets its id.
    entered: Callable[[], Entered]
    # Returns the tokens in each row of the forward that runs; 0: ranks do not share tokens.
    length: Callable[[], int]
    # Gets (function, args, kwargs, result) of every call that is made here, for what is recomputed
    # in backward; a fifth argument True says that it costs little to run again.
    note: Callable[..., None]

    def call(
        self,
        boundaries: list[Boundary],
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a torch function with the exchanges of its boundaries; return the model's result."""
        inputs: dict[str, list[Boundary]] = {}
        outputs: dict[str, list[Boundary]] = {}
        for boundary in boundaries:
            by_place = outputs if boundary.place.startswith("output") else inputs
            by_place.setdefault(boundary.place, []).append(boundary)
        args, kwargs = self._pass_all(args, kwargs, inputs)
        leaving = next(
            (boundary for boundary in boundaries if boundary.kind in ("leave", "lookup")), None
        )
        if leaving is None:
            result = function(*args, **kwargs)
            self.note(function, args, kwargs, result)
        else:
            # A sum that is sliced to each rank's tokens is one reduce-scatter.
            token_slice = next(
                (boundary for boundary in outputs["output"] if boundary.kind == "slice"), None
            )
            token_slice = token_slice if self.length() else None
            outputs["output"] = [
                boundary for boundary in outputs["output"] if boundary.kind == "enter"
            ]
            run = self._look_up if leaving.kind == "lookup" else self._leave
            result = run(leaving, token_slice, function=function, args=args, kwargs=kwargs)
        return self._pass_all((), {"output": result}, outputs)[1]["output"]

    def _pass_all(
        self, args: Any, kwargs: Any, by_place: dict[str, list[Boundary]]
    ) -> tuple[Any, Any]:
        for place, boundaries in by_place.items():
            tensor = self._pass(dict(list_places(args, kwargs))[place], boundaries)
            args, kwargs = replace_argument(args, kwargs=kwargs, place=place, value=tensor)
        return args, kwargs

    def _pass(self, tensor: Tensor, boundaries: list[Boundary]) -> Tensor:
        """Exchange a tensor at the boundaries of one place, several of which are one collective."""
        by_kind = {boundary.kind: boundary for boundary in boundaries}
        if "assemble" in by_kind:
            return self.assemble(tensor, by_kind["assemble"])
        token_boundary = by_kind.get("slice") or by_kind.get("gather") if self.length() else None
        if token_boundary is not None and token_boundary.kind == "slice":
            gather, slice_ = self._make_token_exchange(token_boundary, summed=False)
            return self._pass_once(
                "slice",
                boundary=token_boundary,
                tensor=tensor,
                make=partial(self._exchange_linear, tensor, slice_, gather),
            )
        entering = by_kind.get("enter") or by_kind.get("cut")
        needs_sum = entering is not None and tensor.requires_grad
        if token_boundary is not None:
            kind = "gather and enter" if needs_sum else "gather"
            gather, slice_ = self._make_token_exchange(token_boundary, needs_sum)
            tensor = self._pass_once(
                kind,
                boundary=token_boundary,
                tensor=tensor,
                make=partial(self._exchange_linear, tensor, gather, slice_),
            )
        elif entering is not None and needs_sum and torch.is_grad_enabled():
            tensor = self._pass_once(
                "enter",
                boundary=entering,
                tensor=tensor,
                make=partial(enter, tensor, self.ranks.all_reduce),
            )
        cut = by_kind.get("cut")
        if cut is None:
            return tensor
        settings = (cut.dim, cut.segments, self.rank(), self.ranks.size, cut.whole)
        part = take_own_part(tensor, *settings)
        self.note(take_own_part, (tensor, *settings), {}, part, True)
        return part

    def assemble(self, tensor: Tensor, parts: Boundary | ParameterPlan) -> Tensor:
        """Gather the `whole` segments of a parameter, of which a rank has its part.

        Each rank uses them for its own heads alone, so their gradients are summed over ranks, and
        scattered. parts: where the segments are (`dim`, `segments`, `whole`).
        """
        return self._exchange_linear(
            tensor,
            partial(_assemble_parameter, parts=parts, ranks=self.ranks),
            partial(_scatter_gradient, parts=parts, ranks=self.ranks),
        )

    def _make_token_exchange(
        self, where: Boundary, summed: bool
    ) -> tuple[TensorFunction, TensorFunction]:
        """Return two functions: a rank's tokens to all tokens, and all tokens to a rank's.

        where: a boundary of the kind gather or slice. summed: the second takes its tokens of the
        sum over ranks, by a reduce-scatter.
        """
        gather = partial(_gather_tokens, where=where, length=self.length(), ranks=self.ranks)
        return gather, partial(
            _take_own_tokens,
            where=where,
            length=self.length(),
            rank=self.rank(),
            ranks=self.ranks,
            summed=summed,
        )

    def _exchange_linear(
        self, tensor: Tensor, forward: TensorFunction, backward: TensorFunction
    ) -> Tensor:
        """Exchange as `exchange` does, and note the forward as one that may run again."""
        result = exchange(tensor, forward, backward)
        self.note(forward, (tensor,), {}, result, True)
        return result

    def _pass_once(
        self, kind: str, boundary: Boundary, tensor: Tensor, make: Callable[[], Tensor]
    ) -> Tensor:
        """Return the result of `make`, or that of an earlier exchange of the same tensor.

        make: exchanges the tensor. A result of a call is new, so that nothing is shared for it.
        """
        if boundary.place.startswith("output"):
            return make()
        entered = self.entered()
        key = (kind, boundary.activation, id(tensor))
        if key not in entered:
            entered[key] = (tensor, make())
        return entered[key][1]

    def _leave(
        self,
        boundary: Boundary,
        cut: Boundary | None,
        *,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Call a function, and sum its result over ranks; its bias is added once, to the sum.

        cut: a slice of tokens: the result is this rank's tokens of the sum. None: all tokens.
        """
        bias = dict(list_places(args, kwargs))[boundary.bias] if boundary.bias else None
        if bias is not None:
            args, kwargs = replace_argument(
                args, kwargs=kwargs, place=boundary.bias, value=torch.zeros_like(bias)
            )
        part = function(*args, **kwargs)
        result = self._sum(part / self.ranks.size if boundary.mean else part, cut)
        if bias is None:
            return result
        biased = result + bias
        self.note(torch.add, (result, bias), {}, biased)
        return biased

    def _sum(self, tensor: Tensor, cut: Boundary | None) -> Tensor:
        """Sum a tensor over ranks; cut: as in `_leave`."""
        if cut is not None:
            gather, scatter = self._make_token_exchange(cut, summed=True)
            return exchange(tensor, scatter, gather)
        return exchange(tensor, self.ranks.all_reduce, lambda gradient: gradient)

    def _look_up(
        self,
        boundary: Boundary,
        cut: Boundary | None,
        *,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Call an embedding of which this rank has a range of rows, and sum over ranks.

        Tokens outside the range give zeros here. cut: as in `_leave`.
        """
        rank = self.rank()
        if not isinstance(rank, int):
            raise SetupError(
                f"compile: {boundary.module} embeds tokens within a layer, which is not compiled"
                " where ranks share the vocabulary; set compile=false"
            )
        ((start, stop),) = compute_bounds(
            self.plan.parameter(boundary.parameters[0]).segments, rank, self.ranks.size
        )
        arguments = dict(list_places(args, kwargs))
        place, tokens = next(
            (place, value)
            for place, value in arguments.items()
            if torch.is_tensor(value) and not value.is_floating_point()
        )
        is_own = (tokens >= start) & (tokens < stop)
        args, kwargs = replace_argument(
            args, kwargs=kwargs, place=place, value=torch.where(is_own, tokens - start, 0)
        )
        # F.embedding's padding_idx, by position or by name, is an index of the rank's rows too.
        for place in ("2", "padding_idx"):
            padding = arguments.get(place)
            if padding is not None:
                own_padding = padding - start if start <= padding < stop else None
                args, kwargs = replace_argument(args, kwargs=kwargs, place=place, value=own_padding)
        return self._sum(function(*args, **kwargs).masked_fill(~is_own.unsqueeze(-1), 0), cut)


def exchange(tensor: Tensor, forward: TensorFunction, backward: TensorFunction) -> Tensor:
    """Return forward(tensor), with backward(gradient) as its backward; nothing is saved for it.

    forward: linear in the tensor; returns new memory or a view. backward: maps the gradient of the
    result to that of the tensor.
    """
    return call_with_gradient(forward, tensor, differentiate=backward, kept=())


def enter(tensor: Tensor, all_reduce: TensorFunction) -> Tensor:
    """Return a tensor as it is, with its gradient summed over ranks.

    For a tensor that all ranks have, and of which each computes a part of the result. all_reduce:
    `Ranks.all_reduce`.
    """
    return exchange(tensor, lambda value: value.view_as(value), all_reduce)


def _list_lengths(
    parts: Boundary | ParameterPlan, size: int, whole: tuple[int, ...] = ()
) -> list[int]:
    """Return the length of each segment on a rank; whole: indices of those that it has all of."""
    return [
        stop - start
        for start, stop in compute_bounds(parts.segments, rank=0, size=size, whole=whole)
    ]


def _assemble_parameter(tensor: Tensor, parts: Boundary | ParameterPlan, ranks: Ranks) -> Tensor:
    """Return a rank's part of a parameter with its `whole` segments gathered from all ranks."""
    pieces = list(tensor.split(_list_lengths(parts, ranks.size), parts.dim))
    # This rank's parts of the segments that become whole, in one gather along a new dimension 0.
    own_parts = torch.cat([pieces[index] for index in parts.whole], parts.dim)
    gathered = ranks.all_gather(own_parts.unsqueeze(0).contiguous())
    lengths = [parts.segments[index] // ranks.size for index in parts.whole]
    for index, piece in zip(parts.whole, gathered.split(lengths, parts.dim + 1), strict=True):
        pieces[index] = piece.movedim(0, parts.dim).flatten(parts.dim, parts.dim + 1)
    return torch.cat(pieces, parts.dim)


def _scatter_gradient(gradient: Tensor, parts: Boundary | ParameterPlan, ranks: Ranks) -> Tensor:
    """Return the gradient of a rank's part of a parameter, from that of the assembled one.

    The gradient of the gathered segments is summed over ranks.
    """
    dim = parts.dim
    pieces = list(gradient.split(_list_lengths(parts, ranks.size, parts.whole), dim))
    by_rank = [
        pieces[index].unflatten(dim, (ranks.size, -1)).movedim(dim, 0) for index in parts.whole
    ]
    summed = ranks.reduce_scatter(torch.cat(by_rank, dim + 1).contiguous())[0]
    own_pieces = summed.split([parts.segments[index] // ranks.size for index in parts.whole], dim)
    for index, piece in zip(parts.whole, own_pieces, strict=True):
        pieces[index] = piece
    return torch.cat(pieces, dim)


def _gather_tokens(tensor: Tensor, where: Boundary, length: int, ranks: Ranks) -> Tensor:
    """Return a tensor with whole rows of `length` tokens along `where.dim`, from ranks' tokens."""
    moved, token_dim = _move_tokens_to_front(tensor, where, length // ranks.size)
    gathered = (
        ranks.all_gather(moved.contiguous()).movedim(0, token_dim).flatten(where.dim, where.dim + 1)
    )
    return gathered.contiguous()  # no copy where it is a view of a contiguous tensor


def _take_own_tokens(
    tensor: Tensor, where: Boundary, length: int, rank: Rank, ranks: Ranks, summed: bool
) -> Tensor:
    """Return a rank's tokens of a tensor with whole rows of `length` tokens along `where.dim`.

    summed: they are taken of the tensor's sum over ranks, by a reduce-scatter.
    """
    moved, token_dim = _move_tokens_to_front(tensor, where, length)
    part = length // ranks.size
    if summed:
        own_tokens = ranks.reduce_scatter(moved.contiguous())
    elif isinstance(rank, int):
        own_tokens = moved.narrow(0, rank * part, part)
    else:
        own_tokens = moved.index_select(0, rank * part + torch.arange(part, device=moved.device))
    return own_tokens.movedim(0, token_dim).flatten(where.dim, where.dim + 1).contiguous()


def _move_tokens_to_front(tensor: Tensor, where: Boundary, length: int) -> tuple[Tensor, int]:
    """Return the tensor as `[length, ...]`, and the dimension in which its tokens were.

    `where.dim` is split in two: the `length` tokens of a row, and what a view has put there with
    them, such as the batch.
    """
    split = tensor.unflatten(where.dim, (length, -1) if where.tokens_first else (-1, length))
    token_dim = where.dim if where.tokens_first else where.dim + 1
    return split.movedim(token_dim, 0), token_dim


def get_trained_length(ids: Any, plan: ShardingPlan, size: int) -> int:
    """Return the length s of rows of token ids `[b, s]` whose tokens `size` ranks share.

    0: every rank has all tokens. That is so if the plan shares none, or without gradients: a
    forward that generates makes other calls, and saves nothing anyway. Raises ValueError for an s
    that the ranks do not divide.
    """
    if not plan.shared_tokens or not torch.is_grad_enabled():
        return 0
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] % size:
        shape = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(
            f"found token ids of {shape}, expected [b, s] with an s that {size} ranks can share"
            " evenly"
        )
    return int(ids.shape[1])


def take_own_part(
    tensor: Tensor,
    dim: int,
    segments: tuple[int, ...],
    rank: Rank,
    size: int,
    whole: tuple[int, ...] = (),
) -> Tensor:
    """Return a rank's part of a tensor: its `1 / size` of each segment along dim, in order.

    segments: lengths along dim, which repeat until dim ends. whole: indices, over all repetitions,
    of segments to take all of.
    """
    repeated = segments * (tensor.shape[dim] // sum(segments))
    if not isinstance(rank, int):  # compiled code
        return tensor.index_select(
            dim, _make_row_indices(repeated, rank=rank, size=size, whole=whole)
        )
    return torch.cat(
        [
            tensor.narrow(dim, start, stop - start)
            for start, stop in compute_bounds(repeated, rank=rank, size=size, whole=whole)
        ],
        dim,
    )


def take_parameter_part(tensor: Tensor, plan: ParameterPlan, rank: int, size: int) -> Tensor:
    """Return a rank's part of a parameter, or of its gradient; all of it if the plan cuts none.

    tensor: of the whole parameter's shape.
    """
    if plan.dim < 0:
        return tensor
    return take_own_part(tensor, plan.dim, plan.segments, rank=rank, size=size)


def _make_row_indices(
    segments: tuple[int, ...], rank: Tensor, size: int, whole: tuple[int, ...]
) -> Tensor:
    """Return the indices along a dimension of a rank's part, where the rank is a tensor `[]`.

    Raises SetupError if ranks have parts of different sizes: the code is compiled for all of them.
    """
    rank_bounds = [
        compute_bounds(segments, rank=index, size=size, whole=whole) for index in range(size)
    ]
    if len({tuple(stop - start for start, stop in bounds) for bounds in rank_bounds}) > 1:
        raise SetupError(
            f"compile: a layer divides {sum(segments)} numbers among {size} ranks unevenly, which"
            " is not compiled; set compile=false"
        )
    # Rank r's bounds are rank 0's plus r times the step from rank 0's to rank 1's.
    first, second = rank_bounds[:2]
    return torch.cat(
        [
            torch.arange(start, stop, device=rank.device) + rank * (next_start - start)
            for (start, stop), (next_start, _) in zip(first, second, strict=True)
        ]
    )


def divide_attributes(
    model: nn.Module, plan: ShardingPlan, size: int
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the model's attributes of `plan.rewrites` are divided by `size`."""
    entries: list[Entry] = []
    for rewrite in plan.rewrites:
        owner: Any = model.get_submodule(rewrite.module)
        *path, name = rewrite.attribute.split(".")
        for attribute in path:
            owner = getattr(owner, attribute)
        entries.append((owner.__dict__, name, Division(size, rewrite.kept).divide(rewrite.value)))
    return replace_entries(entries)
