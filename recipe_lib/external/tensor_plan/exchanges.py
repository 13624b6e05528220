"""Calls with boundaries, as one rank makes them: the same for ranks that train and for the threads
of a proof.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

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
from recipe_lib.ops.fused_kernels import GradientNode

Change = Callable[[Tensor], Tensor]
Rank: TypeAlias = int | Tensor
Entered = dict[tuple[str, int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Ranks:
    """One of the ranks that share a model, and what they do together.

    total: a tensor to its sum over ranks. gather: `[n, ...]` of each to `[N, ...]` on all. scatter:
    the sum of all ranks' `[N, ...]`, to each its `[n, ...]`.
    """

    rank: int
    size: int
    total: Change
    gather: Change
    scatter: Change


@dataclass(frozen=True)
class Exchanges:
    """What one of the ranks does at the boundaries of a plan.

    rank: in code that is compiled a tensor `[]`, so that the code is the same on all ranks.
    entered: what has entered, been gathered or been cut so far, by how, activation and id; one
    tensor does so once for all calls that share it. length: tokens in each row of the forward that
    runs; 0: no tokens are shared out. note: gets every call that is made here, and whether what it
    gives costs little to make again.
    """

    plan: ShardingPlan
    ranks: Ranks
    rank: Callable[[], Rank]
    entered: Callable[[], Entered]
    length: Callable[[], int]
    note: Callable[..., None]

    def call(
        self, here: list[Boundary], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Does a call that has boundaries. Returns what the model is to get."""
        going_in: dict[str, list[Boundary]] = {}
        coming_out: dict[str, list[Boundary]] = {}
        for boundary in here:
            by_place = coming_out if boundary.place.startswith("output") else going_in
            by_place.setdefault(boundary.place, []).append(boundary)
        args, kwargs = self._pass_all(args, kwargs, going_in)
        leaving = next(
            (boundary for boundary in here if boundary.kind in ("leave", "lookup")), None
        )
        if leaving is not None:
            cut = next((each for each in coming_out["output"] if each.kind == "slice"), None)
            run = self._look_up if leaving.kind == "lookup" else self._leave
            coming_out["output"] = [each for each in coming_out["output"] if each.kind == "enter"]
            result = run(leaving, cut if self.length() else None, function, args, kwargs)
        else:
            result = function(*args, **kwargs)
            self.note(function, args, kwargs, result)
        return self._pass_all((), {"output": result}, coming_out)[1]["output"]

    def _pass_all(
        self, args: Any, kwargs: Any, by_place: dict[str, list[Boundary]]
    ) -> tuple[Any, Any]:
        """Arguments, or what a call gives, through the boundaries of their places."""
        for place, here in by_place.items():
            tensor = self._pass(dict(list_places(args, kwargs))[place], here)
            args, kwargs = replace_argument(args, kwargs, place, tensor)
        return args, kwargs

    def _pass(self, tensor: Tensor, here: list[Boundary]) -> Tensor:
        """A tensor through the boundaries of one place."""
        found = {boundary.kind: boundary for boundary in here}
        if (parts := found.get("assemble")) is not None:
            return self.assemble(tensor, parts)
        if not self.length():
            found = {kind: each for kind, each in found.items() if kind not in ("gather", "slice")}
        if (cut := found.get("slice")) is not None:
            everyone, own = self._make_token_exchange(cut, summed=False)
            return self._pass_once(
                "slice", cut, tensor, partial(self._exchange_linear, tensor, own, everyone)
            )
        entering = found.get("enter") or found.get("cut")
        if (gather := found.get("gather")) is not None:
            summed = entering is not None and tensor.requires_grad
            way = "gather and enter" if summed else "gather"
            everyone, own = self._make_token_exchange(gather, summed)
            tensor = self._pass_once(
                way, gather, tensor, partial(self._exchange_linear, tensor, everyone, own)
            )
        elif entering is not None and tensor.requires_grad and torch.is_grad_enabled():
            tensor = self._pass_once(
                "enter", entering, tensor, partial(enter, tensor, self.ranks.total)
            )
        if (part := found.get("cut")) is not None:
            settings = (part.dim, part.segments, self.rank(), self.ranks.size, part.whole)
            whole, tensor = tensor, take_own_part(tensor, *settings)
            self.note(take_own_part, (whole, *settings), {}, tensor, True)
        return tensor

    def assemble(self, tensor: Tensor, parts: Boundary | ParameterPlan) -> Tensor:
        """A rank's part of a parameter, with all of its `whole` segments.

        Each rank uses those segments for its heads alone, so that its gradient of them is a part of
        a sum.
        """
        together = partial(_assemble_parameter, parts=parts, ranks=self.ranks)
        return self._exchange_linear(
            tensor, together, partial(_scatter_gradient, parts=parts, ranks=self.ranks)
        )

    def _make_token_exchange(self, where: Boundary, summed: bool) -> tuple[Change, Change]:
        """What makes all ranks' tokens of a rank's, and the other way round. summed: of the sum
        over ranks.
        """
        length, ranks = self.length(), self.ranks
        everyone = partial(_gather_tokens, where=where, length=length, ranks=ranks)
        return everyone, partial(
            _take_own_tokens,
            where=where,
            length=length,
            rank=self.rank(),
            ranks=ranks,
            summed=summed,
        )

    def _exchange_linear(self, tensor: Tensor, forward: Change, backward: Change) -> Tensor:
        result = exchange(tensor, forward, backward)
        self.note(forward, (tensor,), {}, result, True)
        return result

    def _pass_once(
        self, way: str, boundary: Boundary, tensor: Tensor, make: Callable[[], Tensor]
    ) -> Tensor:
        entered, place = self.entered(), (way, boundary.activation, id(tensor))
        if boundary.place.startswith("output"):
            return make()
        if place not in entered:
            entered[place] = (tensor, make())
        return entered[place][1]

    def _leave(
        self,
        boundary: Boundary,
        cut: Boundary | None,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """The sum over ranks of what a function gives, or a rank's tokens of it; its bias is added
        once.
        """
        bias = dict(list_places(args, kwargs))[boundary.bias] if boundary.bias else None
        if bias is not None:
            args, kwargs = replace_argument(args, kwargs, boundary.bias, torch.zeros_like(bias))
        given = function(*args, **kwargs)
        result = self._sum(given / self.ranks.size if boundary.mean else given, cut)
        if bias is None:
            return result
        biased = result + bias
        self.note(torch.add, (result, bias), {}, biased)
        return biased

    def _sum(self, tensor: Tensor, cut: Boundary | None) -> Tensor:
        if cut is not None:
            everyone, own = self._make_token_exchange(cut, summed=True)
            return exchange(tensor, own, everyone)
        return exchange(tensor, self.ranks.total, lambda gradient: gradient)

    def _look_up(
        self,
        boundary: Boundary,
        cut: Boundary | None,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Rows of this rank's own tokens, zeros for others, summed over ranks."""
        segments = self.plan.parameter(boundary.parameters[0]).segments
        rank = self.rank()
        if not isinstance(rank, int):
            raise SetupError(
                f"compile: {boundary.module} embeds tokens within a layer, which is not compiled"
                " where ranks share the vocabulary; set compile=false"
            )
        ((start, stop),) = compute_bounds(segments, rank, self.ranks.size)
        held = list(list_places(args, kwargs))
        place, tokens = next(
            (at, each)
            for at, each in held
            if torch.is_tensor(each) and not each.is_floating_point()
        )
        own = (tokens >= start) & (tokens < stop)
        args, kwargs = replace_argument(args, kwargs, place, torch.where(own, tokens - start, 0))
        padding = next(
            ((at, each) for at, each in held if at in ("2", "padding_idx") and each is not None),
            None,
        )
        if padding is not None:
            inside = start <= padding[1] < stop
            args, kwargs = replace_argument(
                args, kwargs, padding[0], padding[1] - start if inside else None
            )
        return self._sum(function(*args, **kwargs).masked_fill(~own.unsqueeze(-1), 0), cut)


def exchange(tensor: Tensor, forward: Change, backward: Change) -> Tensor:
    """What `forward` makes of a tensor, whose gradient is what `backward` makes of that of the
    result. Keeps nothing.

    forward must be linear in the tensor, and give new memory or a view.
    """
    return cast(Tensor, GradientNode.apply(forward, backward, (), tensor))


def enter(tensor: Tensor, total: Change) -> Tensor:
    """What all ranks have goes into what each has a part of: its gradient is summed over ranks."""
    return exchange(tensor, lambda whole: whole.view_as(whole), total)


def _list_lengths(
    parts: Boundary | ParameterPlan, size: int, whole: tuple[int, ...] = ()
) -> list[int]:
    return [stop - start for start, stop in compute_bounds(parts.segments, 0, size, whole)]


def _assemble_parameter(tensor: Tensor, parts: Boundary | ParameterPlan, ranks: Ranks) -> Tensor:
    pieces = list(tensor.split(_list_lengths(parts, ranks.size), parts.dim))
    own = torch.cat([pieces[at] for at in parts.whole], parts.dim)
    gathered = ranks.gather(own.unsqueeze(0).contiguous())
    lengths = [parts.segments[at] // ranks.size for at in parts.whole]
    for at, piece in zip(parts.whole, gathered.split(lengths, parts.dim + 1), strict=True):
        pieces[at] = piece.movedim(0, parts.dim).flatten(parts.dim, parts.dim + 1)
    return torch.cat(pieces, parts.dim)


def _scatter_gradient(gradient: Tensor, parts: Boundary | ParameterPlan, ranks: Ranks) -> Tensor:
    """The gradient of a rank's part: of segments that all ranks compute with, the sum of theirs."""
    dim, pieces = (
        parts.dim,
        list(gradient.split(_list_lengths(parts, ranks.size, parts.whole), parts.dim)),
    )
    by_rank = [pieces[at].unflatten(dim, (ranks.size, -1)).movedim(dim, 0) for at in parts.whole]
    summed = ranks.scatter(torch.cat(by_rank, dim + 1).contiguous())[0]
    own = summed.split([parts.segments[at] // ranks.size for at in parts.whole], dim)
    for at, piece in zip(parts.whole, own, strict=True):
        pieces[at] = piece
    return torch.cat(pieces, dim)


def _gather_tokens(tensor: Tensor, where: Boundary, length: int, ranks: Ranks) -> Tensor:
    moved, place = _move_tokens_to_front(tensor, where, length // ranks.size)
    whole = ranks.gather(moved.contiguous()).movedim(0, place).flatten(where.dim, where.dim + 1)
    return whole.contiguous()  # a view of a contiguous one is no copy


def _take_own_tokens(
    tensor: Tensor, where: Boundary, length: int, rank: Rank, ranks: Ranks, summed: bool
) -> Tensor:
    """A rank's tokens of a tensor that has whole rows of `length`. summed: of the sum over
    ranks.
    """
    moved, place = _move_tokens_to_front(tensor, where, length)
    part = length // ranks.size
    if summed:
        own = ranks.scatter(moved.contiguous())
    elif isinstance(rank, int):
        own = moved.narrow(0, rank * part, part)
    else:
        own = moved.index_select(0, rank * part + torch.arange(part, device=moved.device))
    return own.movedim(0, place).flatten(where.dim, where.dim + 1).contiguous()


def _move_tokens_to_front(tensor: Tensor, where: Boundary, length: int) -> tuple[Tensor, int]:
    """`[tokens, ...]` with the tokens of a row apart from the rest of their dimension, and where
    they were.
    """
    wide = tensor.unflatten(where.dim, (length, -1) if where.tokens_first else (-1, length))
    place = where.dim if where.tokens_first else where.dim + 1
    return wide.movedim(place, 0), place


def get_trained_length(ids: Any, plan: ShardingPlan, size: int) -> int:
    """Tokens in each row of the token ids `[b, s]` that a forward gets; 0: every rank has all
    tokens.

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
    """A rank's part of a tensor: of each segment along dim, which repeat as often as there is room,
    or all of it.

    whole: numbers of the segments to take all of.
    """
    repeated = segments * (tensor.shape[dim] // sum(segments))
    if not isinstance(rank, int):
        return tensor.index_select(dim, _make_row_numbers(repeated, rank, size, whole))
    pieces = [
        tensor.narrow(dim, start, stop - start)
        for start, stop in compute_bounds(repeated, rank, size, whole)
    ]
    return torch.cat(pieces, dim)


def _make_row_numbers(
    segments: tuple[int, ...], rank: Tensor, size: int, whole: tuple[int, ...]
) -> Tensor:
    """Which rows a rank has; equally many on all ranks."""
    of_ranks = [compute_bounds(segments, each, size, whole) for each in range(size)]
    if len({tuple(stop - start for start, stop in found) for found in of_ranks}) > 1:
        raise SetupError(
            f"compile: a layer divides {sum(segments)} numbers among {size} ranks unevenly, which"
            " is not compiled; set compile=false"
        )
    first, second = of_ranks[:2]
    pieces = [
        torch.arange(start, stop, device=rank.device) + rank * (later - start)
        for (start, stop), (later, _) in zip(first, second, strict=True)
    ]
    return torch.cat(pieces)


def divide_attributes(
    model: nn.Module, plan: ShardingPlan, size: int
) -> contextlib.AbstractContextManager[None]:
    """While it is entered, the plan's integer attributes are divided by size."""
    entries: list[Entry] = []
    for each in plan.rewrites:
        held: Any = model.get_submodule(each.module)
        *path, name = each.attribute.split(".")
        for step in path:
            held = getattr(held, step)
        entries.append((held.__dict__, name, Division(size, each.kept).divide(each.value)))
    return replace_entries(entries)
