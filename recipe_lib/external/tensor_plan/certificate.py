"""Proves a plan on a small model with real weights, in one process: by taint, and by running every rank's part.

Taint: everything that rank r does not hold becomes NaN, and the model runs as it is. What r computes of each input of a
row product must come out bit by bit as without NaN; the outputs of these products are put right, as the sum over ranks
would, and so the model's output must come out bit by bit, too. A cut at a wrong place, a norm over a cut dimension or
an activation that mixes ranks lets NaN through. Rehearsal: every rank runs on its own, smaller parameters, with the
plan's boundaries and rewrites, and the parts add up to the whole.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from recipe_lib.errors import SetupError
from recipe_lib.external.tensor_plan.calls import CallKey, Calls, output_values, places_in, replaced, tensors_in
from recipe_lib.external.tensor_plan.exchanges import others_lost, own_part, part_of_tokens, rewritten, row_length
from recipe_lib.external.tensor_plan.sharding_plan import Boundary, ShardingPlan, bounds

# The whole and the sum of its parts differ by rounding, which some models do in float32 whatever their weights are.
_ROUNDING = 2e-3


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What was proven. checked: comparisons. failures: one line each, naming rank, module and parameters."""

    checked: int
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True if something was compared and everything was equal."""
        return self.checked > 0 and not self.failures


def certify(
    model: torch.nn.Module, plan: ShardingPlan, size: int, inputs: dict[str, Any], rehearse: bool = True
) -> Certificate:
    """Runs a small model on the CPU as each of `size` ranks would.

    model: with real weights, on the CPU, which are not changed. plan: of this very model. inputs: of one forward.
    rehearse: also runs every rank on its own part, which proves rewrites and biases. Raises SetupError for a size that
    the plan does not allow, and for parameters on the meta device.
    """
    if plan.axes and not all(axis.vocabulary or axis.size % size == 0 for axis in plan.axes):
        raise SetupError(
            f"certificate: {size} ranks cannot share this plan's axes, expected one of {list(plan.legal_sizes)}"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise SetupError(
            "certificate: found weights on the meta device, expected real ones; build the model on the CPU"
        )
    model.eval()
    clean = _ProofForward(model, plan, "clean", length=row_length(next(tensors_in(inputs)), plan, size))
    whole = _forward(model, clean, {}, inputs)
    failures, checked = list(clean.failures), 0
    for rank in range(size):
        run = _ProofForward(model, plan, "taint", rank, size, clean, clean.length)
        with _told(run):
            output = _forward(model, run, _parts(model, plan, rank, size, _others_lost), inputs)
            run.compare_output(whole, output)
        failures += run.failures
        checked += run.checked
    if rehearse and not failures:
        found, more = _rehearse(model, plan, size, clean, inputs)
        failures += found
        checked += more
    return Certificate(checked, tuple(dict.fromkeys(failures)))


def _forward(
    model: torch.nn.Module, run: "_ProofForward", values: dict[str, torch.Tensor], inputs: dict[str, Any]
) -> Any:
    """One forward with some parameters replaced; random layers draw the same each time."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
        with run:
            return torch.func.functional_call(model, values, (), copies)


def _parts(
    model: torch.nn.Module, plan: ShardingPlan, rank: int, size: int, part: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a rank computes with of the parameters that are cut. part: `own_part`, or `_others_lost`."""
    held = dict(model.named_parameters())
    cut = [each for each in plan.parameters if each.dim >= 0]
    return {each.name: part(held[each.name].detach(), each.dim, each.segments, rank, size, each.whole) for each in cut}


def _others_lost(
    tensor: torch.Tensor, dim: int, segments: tuple[int, ...], rank: int, size: int, whole: tuple[int, ...] = ()
) -> torch.Tensor:
    """The tensor with NaN wherever it is not the rank's own part (`own_part`)."""
    found = torch.full_like(tensor, torch.nan)
    repeated = segments * (tensor.shape[dim] // sum(segments))
    for start, stop in bounds(repeated, rank, size, whole):
        found.narrow(dim, start, stop - start).copy_(tensor.narrow(dim, start, stop - start))
    return found


class _ProofForward(Calls):
    """One forward. kind: `clean` keeps what goes in and out at boundaries, `taint` compares, `part` runs a rank's."""

    def __init__(
        self,
        model: torch.nn.Module,
        plan: ShardingPlan,
        kind: str,
        rank: int = 0,
        size: int = 1,
        clean: Any = None,
        length: int = 0,
    ):
        super().__init__(model)
        self.plan, self.kind, self.rank, self.size, self.clean = plan, kind, rank, size, clean
        self.boundaries = plan.boundaries_by_call()
        self.length = length  # of a row, 0: no tokens are shared out
        self.runs: dict[CallKey, int] = {}
        self.tokens: dict[tuple[CallKey, str, int], torch.Tensor] = {}  # whole ones, where they are gathered
        self.kept: dict[tuple[CallKey, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.biases: dict[tuple[CallKey, int], torch.Tensor] = {}
        self.reached: set[CallKey] = set()
        self.failures: list[str] = []
        self.checked = 0

    def on_call(self, key: CallKey, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does a call, with what its boundaries ask for."""
        here = self.boundaries.get(key)
        if not here:
            return function(*args, **kwargs)
        self.reached.add(key)
        if getattr(function, "__name__", "") != here[0].function:
            self.fail(here[0], f"is {getattr(function, '__name__', function)}, expected {here[0].function}")
            return function(*args, **kwargs)
        run = self.runs[key] = self.runs.get(key, -1) + 1
        for boundary in sorted(here, key=lambda each: each.kind == "cut"):
            if not boundary.place.startswith("output") and boundary.kind in ("cut", "gather", "slice"):
                tensor = dict(places_in(args, kwargs))[boundary.place]
                change = self._cut if boundary.kind == "cut" else self._tokens
                args, kwargs = replaced(args, kwargs, boundary.place, change(boundary, tensor, (key, run)))
        leaving = [boundary for boundary in here if boundary.kind in ("leave", "lookup")]
        result = self._leaving(leaving[0], (key, run), function, args, kwargs) if leaving else function(*args, **kwargs)
        for boundary in here:
            if boundary.kind in ("gather", "slice") and boundary.place == "output":
                result = self._tokens(boundary, result, (key, run))
            elif boundary.kind in ("gather", "slice") and boundary.place.startswith("output"):
                number = int(boundary.place.split(".")[1])
                passed = self._tokens(boundary, result[number], (key, run))
                result = type(result)([passed if at == number else each for at, each in enumerate(result)])
        return result

    def _tokens(self, boundary: Boundary, tensor: torch.Tensor, where: tuple[CallKey, int]) -> torch.Tensor:
        """Tokens as a rank gives them away (`gather`), compared with the whole model's, or has them left (`slice`)."""
        if not self.length:
            return tensor
        place = (where[0], boundary.place, where[1])
        if self.kind == "clean":
            if boundary.kind == "gather":
                self.tokens[place] = tensor.clone()
            return tensor

        def own(each: torch.Tensor) -> torch.Tensor:
            return part_of_tokens(each, boundary, self.length, self.rank, self.size)

        if boundary.kind == "slice" and self.kind == "part":
            return own(tensor).contiguous()
        if boundary.kind == "slice":
            return others_lost(tensor, boundary, self.length, self.rank, self.size)
        if place not in self.clean.tokens:
            self.fail(boundary, "is reached more often than by the whole model")
            return tensor
        whole: torch.Tensor = self.clean.tokens[place]
        self.checked += 1
        expected = own(whole)
        ours = own(tensor) if self.kind == "taint" else tensor
        if self.kind == "taint" and not torch.equal(ours, expected):
            wrong = int((ours != expected).sum())
            self.fail(boundary, f"gets {wrong} of {expected.numel()} elements that depend on other ranks' tokens")
        elif self.kind == "part" and (ours.shape != expected.shape or not close(ours.double(), expected.double())):
            shapes = f"{list(ours.shape)} of its own tokens, not its part {list(expected.shape)}"
            self.fail(boundary, f"gets {shapes} of the whole")
        return whole.clone()

    def _leaving(self, boundary: Boundary, place: Any, function: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """A product that sums over ranks, or a look-up."""
        taken = dict(places_in(args, kwargs)).get(boundary.taken) if boundary.taken else None
        if self.kind == "part" and boundary.bias:
            self.biases[place] = dict(places_in(args, kwargs))[boundary.bias].detach()
            args, kwargs = replaced(args, kwargs, boundary.bias, torch.zeros_like(self.biases[place]))
        result: torch.Tensor = function(*args, **kwargs)
        if self.kind == "clean":
            self.kept[place] = (None if taken is None else taken.clone(), result.clone())
            return result
        return self._leave(boundary, place, taken, result, args, kwargs)

    def _cut(self, boundary: Boundary, whole: torch.Tensor, where: Any) -> torch.Tensor:
        if self.kind == "clean":
            return whole
        if self.kind == "part":
            return own_part(whole, boundary.dim, boundary.segments, self.rank, self.size, boundary.whole)
        if not whole.is_floating_point():
            return whole
        return _others_lost(whole, boundary.dim, boundary.segments, self.rank, self.size, boundary.whole)

    def _leave(
        self, boundary: Boundary, place: Any, taken: Any, result: torch.Tensor, args: Any, kwargs: Any
    ) -> torch.Tensor:
        """Compares what goes into a product that sums over ranks, and gives the whole sum."""
        if place not in self.clean.kept:
            self.fail(boundary, "is reached more often than by the whole model")
            return result
        going_in: torch.Tensor = self.clean.kept[place][0]
        coming_out: torch.Tensor = self.clean.kept[place][1]
        self.checked += 1
        if boundary.kind == "lookup":
            weight = self.plan.parameter(boundary.parameters[0])
            tokens = next(each for each in tensors_in((args, kwargs)) if not each.is_floating_point())
            ((start, stop),) = bounds(weight.segments, self.rank, self.size)
            own = (tokens >= start) & (tokens < stop)
            if self.kind == "taint" and not torch.equal(result[own], coming_out[own]):
                self.fail(boundary, "does not give the rows of the rank's own tokens")
            return coming_out.clone()
        own = own_part(going_in, boundary.dim, boundary.segments, self.rank, self.size)
        if self.kind == "taint":
            ours = own_part(taken, boundary.dim, boundary.segments, self.rank, self.size)
            if not torch.equal(ours, own):
                wrong = int((ours != own).sum())
                self.fail(boundary, f"gets {wrong} of {own.numel()} elements that depend on other ranks' parameters")
        else:
            if taken.shape != own.shape or not close(taken, own):
                self.fail(
                    boundary, f"gets {list(taken.shape)} on its own part, not its part {list(own.shape)} of the whole"
                )
            self.kept[place] = (taken, result / self.size if boundary.mean else result)
        return coming_out.clone()

    def compare_output(self, whole: Any, output: Any) -> None:
        """What the model gives, all of it, or of tokens the rank's part, must be as without NaN."""
        self.compare_reached()
        tokens = {axis.size for axis in self.plan.axes if axis.output}
        for before, after in zip(tensors_in(output_values(whole)), tensors_in(output_values(output)), strict=True):
            if tokens and before.dim() and before.shape[-1] in tokens:
                before, after = (
                    own_part(each, -1, (each.shape[-1],), self.rank, self.size) for each in (before, after)
                )
            self.checked += 1
            if not torch.equal(before, after):
                self.failures.append(
                    f"rank {self.rank} of {self.size}: {int((before != after).sum())} of {before.numel()} elements of"
                    " the model's output depend on other ranks' parameters"
                )

    def compare_reached(self) -> None:
        """Every boundary lies on the way of the forward; a size that decides on the way may lead elsewhere."""
        for key, boundaries in self.boundaries.items():
            if key not in self.reached:
                self.fail(boundaries[0], "is never reached")

    def fail(self, boundary: Boundary, found: str) -> None:
        """Notes a failure at a boundary."""
        self.failures.append(
            f"rank {self.rank} of {self.size}: {', '.join(boundary.parameters)}: {boundary.function} in"
            f" {boundary.module or 'the model itself'} (call {boundary.call}) {found}"
        )


def _rehearse(
    model: torch.nn.Module, plan: ShardingPlan, size: int, clean: _ProofForward, inputs: dict[str, Any]
) -> tuple[list[str], int]:
    """Runs every rank on its own parameters; the sums of what leaves must be what the whole model has."""
    failures: list[str] = []
    checked = 0
    sums: dict[Any, torch.Tensor] = {}
    for rank in range(size):
        run = _ProofForward(model, plan, "part", rank, size, clean, clean.length)
        with _told(run), rewritten(model, plan, size):
            values = _parts(model, plan, rank, size, own_part)
            whole = {each.name for each in plan.parameters if each.role == "vocabulary"}
            _forward(model, run, {name: values[name] for name in values.keys() - whole}, inputs)
            run.compare_reached()
        failures += run.failures
        checked += run.checked
        for place, (_, part) in run.kept.items():
            sums[place] = sums[place] + part if place in sums else part + run.biases.get(place, 0)
    for (key, run), total in sums.items():
        if not failures and not close(total, clean.kept[key, run][1]):
            clean.fail(clean.boundaries[key][-1], "does not add up to the whole over ranks")
            failures += clean.failures[-1:]
    return failures, checked


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True where two tensors differ by no more than rounding does, in terms of the largest element."""
    if left.shape != right.shape:
        return False
    if not left.numel():
        return True
    scale = float(right.abs().max())
    return bool(torch.isfinite(left).all()) and float((left - right).abs().max()) <= _ROUNDING * scale + 1e-12


@contextlib.contextmanager
def _told(run: _ProofForward) -> Iterator[None]:
    """A forward that fails is a failure of the plan."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, KeyError) as error:
        line = (str(error).splitlines() or [""])[0]
        run.failures.append(f"rank {run.rank} of {run.size}: the forward on its part fails in {run.module}: {line}")
