"""Calls with boundaries, as one rank makes them: the same for ranks that train and for the threads of a proof."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from recipe_lib.errors import SetupError
from recipe_lib.external.tensor_plan.calls import places_in, replaced
from recipe_lib.external.tensor_plan.sharding_plan import Boundary, ParameterPlan, ShardingPlan, bounds
from recipe_lib.external.tensor_plan.sourced_integers import Division

Total = Callable[[Tensor], Tensor]
Rank: TypeAlias = int | Tensor
Entered = dict[tuple[str, int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Collectives:
    """What ranks do together. total: a tensor to its sum over ranks. gather: `[n, ...]` of each to `[N, ...]` on all.
    scatter: the sum of all ranks' `[N, ...]`, to each its `[n, ...]`."""

    total: Total
    gather: Total
    scatter: Total


@dataclass(frozen=True)
class Exchanges:
    """Which rank of how many, and how they exchange.

    rank: in code that is compiled a tensor `[]`, so that the code is the same on all ranks. entered: what has entered,
    been gathered or been cut so far, by how, activation and id; one tensor does so once for all calls that share it.
    length: tokens in each row of the forward that runs; 0: no tokens are shared out. note: gets every call that is made
    here, and whether what it gives costs little to make again.
    """

    plan: ShardingPlan
    rank: Callable[[], Rank]
    size: int
    collectives: Collectives
    entered: Callable[[], Entered]
    length: Callable[[], int]
    note: Callable[..., None] = lambda *call: None

    def call(self, here: list[Boundary], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does a call that has boundaries. Returns what the model is to get."""
        by_place: dict[str, list[Boundary]] = {}
        for boundary in here:
            by_place.setdefault(boundary.place, []).append(boundary)
        for place, found in by_place.items():
            if not place.startswith("output"):
                tensor = self._pass(dict(places_in(args, kwargs))[place], found)
                args, kwargs = replaced(args, kwargs, place, tensor)
        leaving = next((boundary for boundary in here if boundary.kind in ("leave", "lookup")), None)
        if leaving is not None:
            cut = next((each for each in by_place["output"] if each.kind == "slice"), None)
            run = self._look_up if leaving.kind == "lookup" else self._leave
            rest = [each for each in by_place.pop("output") if each.kind == "enter"]
            result = self._pass(run(leaving, cut if self.length() else None, function, args, kwargs), rest)
        else:
            result = function(*args, **kwargs)
            self.note(function, args, kwargs, result)
        for place, found in by_place.items():
            if place == "output":
                result = self._pass(result, found)
            elif place.startswith("output"):
                number = int(place.split(".")[1])
                passed = self._pass(result[number], found)
                result = type(result)([passed if at == number else each for at, each in enumerate(result)])
        return result

    def _pass(self, tensor: Tensor, here: list[Boundary]) -> Tensor:
        """A tensor through the boundaries of one place."""
        found = {boundary.kind: boundary for boundary in here}
        if (parts := found.get("assemble")) is not None:
            return self.assemble(tensor, parts)
        if not self.length():
            found = {kind: each for kind, each in found.items() if kind not in ("gather", "slice")}
        if (cut := found.get("slice")) is not None:
            return self._once("slice", cut, tensor, lambda: self._slice(tensor, cut))
        entering = found.get("enter") or found.get("cut")
        if (gather := found.get("gather")) is not None:
            summed = entering is not None and tensor.requires_grad
            way = "gather and enter" if summed else "gather"
            tensor = self._once(way, gather, tensor, lambda: self._gather(tensor, gather, summed))
        elif entering is not None and tensor.requires_grad and torch.is_grad_enabled():
            total = self.collectives.total
            tensor = self._once("enter", entering, tensor, lambda: cast(Tensor, Enter.apply(tensor, total)))
        if (part := found.get("cut")) is not None:
            settings = (part.dim, part.segments, self.rank(), self.size, part.whole)
            whole, tensor = tensor, own_part(tensor, *settings)
            self.note(own_part, (whole, *settings), {}, tensor, True)
        return tensor

    def assemble(self, tensor: Tensor, parts: Boundary | ParameterPlan) -> Tensor:
        """A rank's part of a parameter, with all of its `whole` segments."""
        whole = cast(Tensor, _Assemble.apply(tensor, parts, self))
        self.note(_assembled, (tensor, parts, self), {}, whole, True)
        return whole

    def _gather(self, tensor: Tensor, where: Boundary, summed: bool) -> Tensor:
        result = gather_tokens(tensor, where, self, summed)
        self.note(_all_tokens, (tensor, where, self.length(), self), {}, result, True)
        return result

    def _slice(self, tensor: Tensor, where: Boundary) -> Tensor:
        result = take_tokens(tensor, where, self, summed=False)
        self.note(_own_tokens, (tensor, where, self.length(), self.rank(), self, False), {}, result, True)
        return result

    def _once(self, way: str, boundary: Boundary, tensor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        entered, place = self.entered(), (way, boundary.activation, id(tensor))
        if boundary.place.startswith("output"):
            return make()
        if place not in entered:
            entered[place] = (tensor, make())
        return entered[place][1]

    def _leave(
        self, boundary: Boundary, cut: Boundary | None, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """The sum over ranks of what a function gives, or a rank's tokens of it; its bias is added once."""
        bias = dict(places_in(args, kwargs))[boundary.bias] if boundary.bias else None
        if bias is not None:
            args, kwargs = replaced(args, kwargs, boundary.bias, torch.zeros_like(bias))
        given = function(*args, **kwargs)
        result = self._sum(given / self.size if boundary.mean else given, cut)
        if bias is None:
            return result
        biased = result + bias
        self.note(torch.add, (result, bias), {}, biased)
        return biased

    def _sum(self, tensor: Tensor, cut: Boundary | None) -> Tensor:
        if cut is not None:
            return take_tokens(tensor, cut, self, summed=True)
        return cast(Tensor, Leave.apply(tensor, self.collectives.total))

    def _look_up(
        self, boundary: Boundary, cut: Boundary | None, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Rows of this rank's own tokens, zeros for others, summed over ranks."""
        segments = self.plan.parameter(boundary.parameters[0]).segments
        rank = self.rank()
        if not isinstance(rank, int):
            raise SetupError(
                f"compile: {boundary.module} embeds tokens within a layer, which is not compiled where ranks share the "
                "vocabulary; set compile=false"
            )
        ((start, stop),) = bounds(segments, rank, self.size)
        held = list(places_in(args, kwargs))
        place, tokens = next((at, each) for at, each in held if torch.is_tensor(each) and not each.is_floating_point())
        own = (tokens >= start) & (tokens < stop)
        args, kwargs = replaced(args, kwargs, place, torch.where(own, tokens - start, 0))
        padding = next(((at, each) for at, each in held if at in ("2", "padding_idx") and each is not None), None)
        if padding is not None:
            inside = start <= padding[1] < stop
            args, kwargs = replaced(args, kwargs, padding[0], padding[1] - start if inside else None)
        return self._sum(function(*args, **kwargs).masked_fill(~own.unsqueeze(-1), 0), cut)


class Enter(torch.autograd.Function):
    """What all ranks have goes into what each has a part of: its gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, total: Total) -> Tensor:
        ctx.total = total
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.total(gradients[0]), None


class Leave(torch.autograd.Function):
    """The sum over ranks of what each has a part of; a gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, total: Total) -> Tensor:
        return total(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Assemble(torch.autograd.Function):
    """A rank's part of a parameter, with all of the segments that every rank computes with; a sum of their gradients.

    Each rank uses those segments for its heads alone, so that its gradient of them is a part of a sum.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, parts: Boundary | ParameterPlan, ranks: Exchanges) -> Tensor:
        ctx.settings = (parts, ranks)
        return _assembled(tensor, parts, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        parts, ranks = ctx.settings
        dim, pieces = parts.dim, list(gradients[0].split(_lengths(parts, ranks.size, parts.whole), parts.dim))
        needed = torch.cat([_by_rank(pieces[at], dim, ranks.size) for at in parts.whole], dim + 1)
        summed = ranks.collectives.scatter(needed.contiguous())[0]
        own = summed.split([parts.segments[at] // ranks.size for at in parts.whole], dim)
        for at, piece in zip(parts.whole, own, strict=True):
            pieces[at] = piece
        return torch.cat(pieces, dim), None, None


def _lengths(parts: Boundary | ParameterPlan, size: int, whole: tuple[int, ...] = ()) -> list[int]:
    return [stop - start for start, stop in bounds(parts.segments, 0, size, whole)]


def _by_rank(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A whole segment as `[ranks, ...]`."""
    return tensor.unflatten(dim, (size, -1)).movedim(dim, 0)


def _assembled(tensor: Tensor, parts: Boundary | ParameterPlan, ranks: Exchanges) -> Tensor:
    pieces = list(tensor.split(_lengths(parts, ranks.size), parts.dim))
    own = torch.cat([pieces[at] for at in parts.whole], parts.dim)
    gathered = ranks.collectives.gather(own.unsqueeze(0).contiguous())
    lengths = [parts.segments[at] // ranks.size for at in parts.whole]
    for at, piece in zip(parts.whole, gathered.split(lengths, parts.dim + 1), strict=True):
        pieces[at] = piece.movedim(0, parts.dim).flatten(parts.dim, parts.dim + 1)
    return torch.cat(pieces, parts.dim)


def gather_tokens(tensor: Tensor, where: Boundary, ranks: Exchanges, summed: bool) -> Tensor:
    """A rank's tokens to those of all ranks. summed: its gradient is a part of a sum over ranks, not the whole."""
    return cast(Tensor, _GatherTokens.apply(tensor, where, ranks, summed))


def take_tokens(tensor: Tensor, where: Boundary, ranks: Exchanges, summed: bool) -> Tensor:
    """Of all tokens the rank's. summed: of the sum over ranks."""
    return cast(Tensor, _TakeTokens.apply(tensor, where, ranks, summed))


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, where: Boundary, ranks: Exchanges, summed: bool) -> Tensor:
        ctx.settings = (where, ranks.length(), ranks.rank(), ranks, summed)
        return _all_tokens(tensor, where, ranks.length(), ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _own_tokens(gradients[0], *ctx.settings), None, None, None


class _TakeTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, where: Boundary, ranks: Exchanges, summed: bool) -> Tensor:
        ctx.settings = (where, ranks.length(), ranks)
        return _own_tokens(tensor, where, ranks.length(), ranks.rank(), ranks, summed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_tokens(gradients[0], *ctx.settings), None, None, None


def _all_tokens(tensor: Tensor, where: Boundary, length: int, ranks: Exchanges) -> Tensor:
    moved, place = _tokens_in_front(tensor, where, length // ranks.size)
    whole = ranks.collectives.gather(moved.contiguous()).movedim(0, place).flatten(where.dim, where.dim + 1)
    return whole.contiguous()  # a view of a contiguous one is no copy


def _own_tokens(tensor: Tensor, where: Boundary, length: int, rank: Rank, ranks: Exchanges, summed: bool) -> Tensor:
    if not summed:
        return part_of_tokens(tensor, where, length, rank, ranks.size).contiguous()
    moved, place = _tokens_in_front(tensor, where, length)
    own = ranks.collectives.scatter(moved.contiguous()).movedim(0, place).flatten(where.dim, where.dim + 1)
    return own.contiguous()


def _tokens_in_front(tensor: Tensor, where: Boundary, length: int) -> tuple[Tensor, int]:
    """`[tokens, ...]` with the tokens of a row apart from the rest of their dimension, and where they were."""
    wide = tensor.unflatten(where.dim, (length, -1) if where.tokens_first else (-1, length))
    place = where.dim if where.tokens_first else where.dim + 1
    return wide.movedim(place, 0), place


def part_of_tokens(tensor: Tensor, where: Boundary, length: int, rank: Rank, size: int) -> Tensor:
    """A rank's tokens of a tensor that has whole rows of `length`."""
    moved, place = _tokens_in_front(tensor, where, length)
    part = length // size
    if isinstance(rank, int):
        own = moved.narrow(0, rank * part, part)
    else:
        own = moved.index_select(0, rank * part + torch.arange(part, device=moved.device))
    return own.movedim(0, place).flatten(where.dim, where.dim + 1)


def others_lost(tensor: Tensor, where: Boundary, length: int, rank: int, size: int) -> Tensor:
    """The tensor with NaN, or 0, for all tokens but the rank's."""
    lost = torch.nan if tensor.is_floating_point() else 0
    found = torch.full(tensor.shape, lost, dtype=tensor.dtype)
    part = length // size
    here, there = (_tokens_in_front(each, where, length)[0].narrow(0, rank * part, part) for each in (found, tensor))
    here.copy_(there)
    return found


def row_length(ids: Any, plan: ShardingPlan, size: int) -> int:
    """Tokens in each row of the token ids `[b, s]` that a forward gets; 0 where none of them can be shared out."""
    if not plan.shared_tokens or not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] % size:
        return 0
    return int(ids.shape[1])


def trained_length(ids: Any, plan: ShardingPlan, size: int) -> int:
    """As `row_length`, of a forward that may want gradients: without them every rank has all tokens.

    A forward that generates goes other ways, and keeps nothing anyway. Raises ValueError for rows of which the ranks
    cannot have equal parts.
    """
    if not plan.shared_tokens or not torch.is_grad_enabled():
        return 0
    found = row_length(ids, plan, size)
    if not found:
        shape = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"found token ids of {shape}, expected [b, s] with an s that {size} ranks can share evenly")
    return found


def own_part(
    tensor: Tensor, dim: int, segments: tuple[int, ...], rank: Rank, size: int, whole: tuple[int, ...] = ()
) -> Tensor:
    """A rank's part of a tensor: of each segment along dim, which repeat as often as there is room, or all of it.

    whole: numbers of the segments to take all of.
    """
    repeated = segments * (tensor.shape[dim] // sum(segments))
    if not isinstance(rank, int):
        return tensor.index_select(dim, _numbers(repeated, rank, size, whole))
    pieces = [tensor.narrow(dim, start, stop - start) for start, stop in bounds(repeated, rank, size, whole)]
    return torch.cat(pieces, dim)


def _numbers(segments: tuple[int, ...], rank: Tensor, size: int, whole: tuple[int, ...]) -> Tensor:
    """Which rows a rank has; equally many on all ranks."""
    of_ranks = [bounds(segments, each, size, whole) for each in range(size)]
    if len({tuple(stop - start for start, stop in found) for found in of_ranks}) > 1:
        raise SetupError(
            f"compile: a layer divides {sum(segments)} numbers among {size} ranks unevenly, which is not compiled; set "
            "compile=false"
        )
    first, second = of_ranks[:2]
    pieces = [
        torch.arange(start, stop, device=rank.device) + rank * (later - start)
        for (start, stop), (later, _) in zip(first, second, strict=True)
    ]
    return torch.cat(pieces)


@contextlib.contextmanager
def rewritten(model: nn.Module, plan: ShardingPlan, size: int) -> Iterator[None]:
    """While it is entered, the plan's integer attributes are divided by size."""
    changed = []
    for each in plan.rewrites:
        held: Any = model.get_submodule(each.module)
        *path, name = each.attribute.split(".")
        for step in path:
            held = getattr(held, step)
        changed.append((held.__dict__, name, held.__dict__[name]))
        held.__dict__[name] = Division(size, each.kept).of(each.value)
    try:
        yield
    finally:
        for values, name, value in changed:
            values[name] = value
