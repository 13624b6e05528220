"""Make calls with boundaries as one rank does: the same for ranks that train (`plan_executor`) and
for the threads of a proof (`proven_plan`), which give `Ranks` other functions.
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

Change = Callable[[Tensor], Tensor]
Rank: TypeAlias = int | Tensor
Entered = dict[tuple[str, int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Ranks:
    """One of the ranks that share a model, and what they do together."""

    rank: int
    size: int
    total: Change  # a tensor to its sum over ranks
    gather: Change  # `[n, ...]` of each to `[N, ...]` on all
    scatter: Change  # the sum of all ranks' `[N, ...]`, to each its `[n, ...]`


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of one rank at the boundaries of a plan."""

    plan: ShardingPlan
    ranks: Ranks
    # In code that is compiled a tensor `[]`, so that the code is the same on all ranks.
    rank: Callable[[], Rank]
    # What has entered, been gathered or been cut so far, by how, activation and id: a tensor does
    # so once for all calls that share it. It is kept there, so that its id is not given to another
    # one.
    entered: Callable[[], Entered]
    # Tokens in each row of the forward that runs; 0: no tokens are shared out.
    length: Callable[[], int]
    # Gets every call that is made here, and whether what it gives costs little to make again.
    note: Callable[..., None]

    def call(
        self,
        boundaries: list[Boundary],
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Do a call that has boundaries. Returns what the model is to get."""
        inputs: dict[str, list[Boundary]] = {}
        outputs: dict[str, list[Boundary]] = {}
        for boundary in boundaries:
            by_place = outputs if boundary.place.startswith("output") else inputs
            by_place.setdefault(boundary.place, []).append(boundary)
        args, kwargs = self._pass_all(args, kwargs, inputs)
        leaving = next((each for each in boundaries if each.kind in ("leave", "lookup")), None)
        if leaving is None:
            result = function(*args, **kwargs)
            self.note(function, args, kwargs, result)
        else:
            # A sum of which each rank wants its tokens is one reduce-scatter.
            cut = next((each for each in outputs["output"] if each.kind == "slice"), None)
            cut = cut if self.length() else None
            outputs["output"] = [each for each in outputs["output"] if each.kind == "enter"]
            run = self._look_up if leaving.kind == "lookup" else self._leave
            result = run(leaving, cut, function=function, args=args, kwargs=kwargs)
        return self._pass_all((), {"output": result}, outputs)[1]["output"]

    def _pass_all(
        self, args: Any, kwargs: Any, by_place: dict[str, list[Boundary]]
    ) -> tuple[Any, Any]:
        """Pass arguments, or what a call gives, through the boundaries of their places."""
        for place, boundaries in by_place.items():
            tensor = self._pass(dict(list_places(args, kwargs))[place], boundaries)
            args, kwargs = replace_argument(args, kwargs=kwargs, place=place, value=tensor)
        return args, kwargs

    def _pass(self, tensor: Tensor, boundaries: list[Boundary]) -> Tensor:
        """Pass a tensor through the boundaries of one place."""
        by_kind = {boundary.kind: boundary for boundary in boundaries}
        if "assemble" in by_kind:
            return self.assemble(tensor, by_kind["assemble"])
        tokens = by_kind.get("slice") or by_kind.get("gather") if self.length() else None
        if tokens is not None and tokens.kind == "slice":
            gather, slice_ = self._make_token_exchange(tokens, summed=False)
            return self._pass_once(
                "slice",
                boundary=tokens,
                tensor=tensor,
                make=partial(self._exchange_linear, tensor, slice_, gather),
            )
        entering = by_kind.get("enter") or by_kind.get("cut")
        needs_sum = entering is not None and tensor.requires_grad
        if tokens is not None:
            kind = "gather and enter" if needs_sum else "gather"
            gather, slice_ = self._make_token_exchange(tokens, needs_sum)
            tensor = self._pass_once(
                kind,
                boundary=tokens,
                tensor=tensor,
                make=partial(self._exchange_linear, tensor, gather, slice_),
            )
        elif entering is not None and needs_sum and torch.is_grad_enabled():
            tensor = self._pass_once(
                "enter",
                boundary=entering,
                tensor=tensor,
                make=partial(enter, tensor, self.ranks.total),
            )
        cut = by_kind.get("cut")
        if cut is None:
            return tensor
        settings = (cut.dim, cut.segments, self.rank(), self.ranks.size, cut.whole)
        part = take_own_part(tensor, *settings)
        self.note(take_own_part, (tensor, *settings), {}, part, True)
        return part

    def assemble(self, tensor: Tensor, parts: Boundary | ParameterPlan) -> Tensor:
        """Gather the `whole` segments of a rank's part of a parameter.

        Each rank uses those segments for its heads alone, so that its gradient of them is a part of
        a sum.
        """
        return self._exchange_linear(
            tensor,
            partial(_assemble_parameter, parts=parts, ranks=self.ranks),
            partial(_scatter_gradient, parts=parts, ranks=self.ranks),
        )

    def _make_token_exchange(self, where: Boundary, summed: bool) -> tuple[Change, Change]:
        """Return what makes all ranks' tokens of a rank's, and the other way round. summed: of the
        sum over ranks.
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

    def _exchange_linear(self, tensor: Tensor, forward: Change, backward: Change) -> Tensor:
        result = exchange(tensor, forward, backward)
        self.note(forward, (tensor,), {}, result, True)
        return result

    def _pass_once(
        self, kind: str, boundary: Boundary, tensor: Tensor, make: Callable[[], Tensor]
    ) -> Tensor:
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
        """Sum what a function gives over ranks, or give a rank's tokens of that; add its bias
        once.
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
        if cut is not None:
            gather, scatter = self._make_token_exchange(cut, summed=True)
            return exchange(tensor, scatter, gather)
        return exchange(tensor, self.ranks.total, lambda gradient: gradient)

    def _look_up(
        self,
        boundary: Boundary,
        cut: Boundary | None,
        *,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Look up rows of this rank's own tokens, zeros for others, and sum them over ranks."""
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
        for place in ("2", "padding_idx"):
            padding = arguments.get(place)
            if padding is not None:
                own_padding = padding - start if start <= padding < stop else None
                args, kwargs = replace_argument(args, kwargs=kwargs, place=place, value=own_padding)
        return self._sum(function(*args, **kwargs).masked_fill(~is_own.unsqueeze(-1), 0), cut)


def exchange(tensor: Tensor, forward: Change, backward: Change) -> Tensor:
    """Return what `forward` makes of a tensor; its gradient is what `backward` makes of that of the
    result. Keeps nothing.

    forward must be linear in the tensor, and give new memory or a view.
    """
    return call_with_gradient(forward, tensor, differentiate=backward, kept=())


def enter(tensor: Tensor, total: Change) -> Tensor:
    """Let what all ranks have go into what each has a part of: its gradient is summed over
    ranks.
    """
    return exchange(tensor, lambda whole: whole.view_as(whole), total)


def _list_lengths(
    parts: Boundary | ParameterPlan, size: int, whole: tuple[int, ...] = ()
) -> list[int]:
    return [
        stop - start
        for start, stop in compute_bounds(parts.segments, rank=0, size=size, whole=whole)
    ]


def _assemble_parameter(tensor: Tensor, parts: Boundary | ParameterPlan, ranks: Ranks) -> Tensor:
    pieces = list(tensor.split(_list_lengths(parts, ranks.size), parts.dim))
    own_whole = torch.cat([pieces[at] for at in parts.whole], parts.dim)
    gathered = ranks.gather(own_whole.unsqueeze(0).contiguous())
    lengths = [parts.segments[at] // ranks.size for at in parts.whole]
    for at, piece in zip(parts.whole, gathered.split(lengths, parts.dim + 1), strict=True):
        pieces[at] = piece.movedim(0, parts.dim).flatten(parts.dim, parts.dim + 1)
    return torch.cat(pieces, parts.dim)


def _scatter_gradient(gradient: Tensor, parts: Boundary | ParameterPlan, ranks: Ranks) -> Tensor:
    """Return the gradient of a rank's part: of segments that all ranks compute with, the sum of
    theirs.
    """
    dim = parts.dim
    pieces = list(gradient.split(_list_lengths(parts, ranks.size, parts.whole), dim))
    by_rank = [pieces[at].unflatten(dim, (ranks.size, -1)).movedim(dim, 0) for at in parts.whole]
    summed = ranks.scatter(torch.cat(by_rank, dim + 1).contiguous())[0]
    own_pieces = summed.split([parts.segments[at] // ranks.size for at in parts.whole], dim)
    for at, piece in zip(parts.whole, own_pieces, strict=True):
        pieces[at] = piece
    return torch.cat(pieces, dim)


def _gather_tokens(tensor: Tensor, where: Boundary, length: int, ranks: Ranks) -> Tensor:
    moved, token_dim = _move_tokens_to_front(tensor, where, length // ranks.size)
    gathered = (
        ranks.gather(moved.contiguous()).movedim(0, token_dim).flatten(where.dim, where.dim + 1)
    )
    return gathered.contiguous()  # a view of a contiguous one is no copy


def _take_own_tokens(
    tensor: Tensor, where: Boundary, length: int, rank: Rank, ranks: Ranks, summed: bool
) -> Tensor:
    """Return a rank's tokens of a tensor that has whole rows of `length`. summed: of the sum over
    ranks.
    """
    moved, token_dim = _move_tokens_to_front(tensor, where, length)
    part = length // ranks.size
    if summed:
        own_tokens = ranks.scatter(moved.contiguous())
    elif isinstance(rank, int):
        own_tokens = moved.narrow(0, rank * part, part)
    else:
        own_tokens = moved.index_select(0, rank * part + torch.arange(part, device=moved.device))
    return own_tokens.movedim(0, token_dim).flatten(where.dim, where.dim + 1).contiguous()


def _move_tokens_to_front(tensor: Tensor, where: Boundary, length: int) -> tuple[Tensor, int]:
    """Return `[tokens, ...]` with the tokens of a row apart from the rest of their dimension, and
    where they were.
    """
    wide = tensor.unflatten(where.dim, (length, -1) if where.tokens_first else (-1, length))
    token_dim = where.dim if where.tokens_first else where.dim + 1
    return wide.movedim(token_dim, 0), token_dim


def get_trained_length(ids: Any, plan: ShardingPlan, size: int) -> int:
    """Return the tokens in each row of the token ids `[b, s]` that a forward gets; 0: every rank
    has all tokens.

    So it is where no gradients are wanted: a forward that generates goes other ways, and keeps
    nothing anyway. Raises ValueError for rows of which the ranks cannot have equal parts.
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
    """Return a rank's part of a tensor: of each segment along dim, which repeat as often as there
    is room, or all of it.

    whole: numbers of the segments to take all of.
    """
    repeated = segments * (tensor.shape[dim] // sum(segments))
    if not isinstance(rank, int):
        return tensor.index_select(
            dim, _make_row_numbers(repeated, rank=rank, size=size, whole=whole)
        )
    return torch.cat(
        [
            tensor.narrow(dim, start, stop - start)
            for start, stop in compute_bounds(repeated, rank=rank, size=size, whole=whole)
        ],
        dim,
    )


def take_parameter_part(tensor: Tensor, plan: ParameterPlan, rank: int, size: int) -> Tensor:
    """Return a rank's part of a parameter, or of a tensor like it; all of one that is not cut."""
    if plan.dim < 0:
        return tensor
    return take_own_part(tensor, plan.dim, plan.segments, rank=rank, size=size)


def _make_row_numbers(
    segments: tuple[int, ...], rank: Tensor, size: int, whole: tuple[int, ...]
) -> Tensor:
    """Return which rows a rank has; equally many on all ranks."""
    of_ranks = [compute_bounds(segments, rank=each, size=size, whole=whole) for each in range(size)]
    if len({tuple(stop - start for start, stop in bounds) for bounds in of_ranks}) > 1:
        raise SetupError(
            f"compile: a layer divides {sum(segments)} numbers among {size} ranks unevenly, which"
            " is not compiled; set compile=false"
        )
    first, second = of_ranks[:2]
    return torch.cat(
        [
            torch.arange(start, stop, device=rank.device) + rank * (later - start)
            for (start, stop), (later, _) in zip(first, second, strict=True)
        ]
    )


def divide_attributes(
    model: nn.Module, plan: ShardingPlan, size: int
) -> contextlib.AbstractContextManager[None]:
    """Divide, while it is entered, the plan's integer attributes by size."""
    entries: list[Entry] = []
    for rewrite in plan.rewrites:
        owner: Any = model.get_submodule(rewrite.module)
        *path, name = rewrite.attribute.split(".")
        for step in path:
            owner = getattr(owner, step)
        entries.append((owner.__dict__, name, Division(size, rewrite.kept).divide(rewrite.value)))
    return replace_entries(entries)
