"""A tensor parallel plan as data: which parameter is cut along which axis, and where ranks exchange what they have."""

import dataclasses
import hashlib
import json
from typing import Any

from recipe_lib.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is held.

    role: `column` (the axis comes out of its product), `row` (its product sums over the axis), `vocabulary` (rows of
    tokens), `sharded` (carries the axis without a product: a bias, a value per head) or `replicated`.
    dim: the dimension that is cut, -1 for none. axis: number of the axis, -1 for none.
    segments: lengths along dim; each of them is cut into equal consecutive parts, one a rank.
    whole: numbers of the segments of which a rank holds its part but computes with all, gathered for each use.
    unit: elements of the whole dim that belong to one step of the axis.
    gradient: `sharded`; `full`, the same on each rank; `partial`, to be summed over ranks.
    after_reduction: a bias of a row product, to be added once, to the sum over ranks.
    reason: what keeps a replicated parameter whole.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    dim: int = -1
    axis: int = -1
    segments: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    unit: int = 0
    gradient: str = "full"
    after_reduction: bool = False
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of the model that is cut. size: its steps; tensor sizes that divide it are legal.

    vocabulary: an axis of tokens, which may be cut unevenly: rank r of t holds rows from r * ceil(size / t) on.
    output: the last dimension of what the model gives (logits) has the axis, so that a rank gives its part alone.
    """

    number: int
    size: int
    parameters: tuple[str, ...]
    vocabulary: bool = False
    output: bool = False


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Where a forward that runs on one rank's part does more than the whole model's forward.

    kind: `enter` (forward as it is; the gradient is summed over ranks), `leave` (what comes out is summed over ranks; a
    gradient passes as it is), `lookup` (a leave, of rows picked by token: tokens of other ranks give zeros), `cut` (a
    whole tensor of which the rank takes its part; its gradient is an enter's), `gather` (a rank's tokens become those
    of all; its gradient is the rank's part), `slice` (of all tokens the rank's; its gradient is gathered), `assemble`
    (of a parameter, its `whole` segments are gathered; their gradient is summed and scattered). A gather that enters
    has its gradient summed and scattered; what leaves and is sliced is summed and scattered.
    module, call: path of a module, and number of the torch function call in one forward of it (calls.Calls counts).
    place: `output` or `output.1` of that call; or the argument, `0`, `1.2` or `weight` (calls.places_in names them).
    axes: numbers. parameters: those of the product, or those that the activation enters.
    activation: entering calls with one number share one tensor, which has to enter once.
    bias: leave only: the argument that is to be added after the sum, empty for none. mean: leave only: what comes out
    is the mean over a rank's part, and the sum over ranks is divided by their number.
    taken, dim, segments: the argument that carries the axis (leave) or is cut, the dimension, and the lengths that are
    cut evenly; they repeat as often as the dimension has room for. Of an assemble the parameter's. whole: of an
    assemble or a cut, as a ParameterPlan's.
    function, source: the torch function, and the file and line that calls it; for people.
    width: numbers a token of what ranks sum there: leave and lookup in the forward, enter and cut in the backward;
    0 where they sum nothing, or where the traced forward took no token ids.
    tokens_first: of a gather or a slice: with other things in dimension dim, the tokens of a row are the outermost
    there, instead of the innermost.
    """

    kind: str
    module: str
    call: int
    place: str
    axes: tuple[int, ...]
    parameters: tuple[str, ...] = ()
    activation: int = -1
    bias: str = ""
    taken: str = ""
    dim: int = 0
    segments: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    function: str = ""
    source: str = ""
    width: int = 0
    tokens_first: bool = False
    mean: bool = False


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """An integer attribute that has to be divided by the tensor size, because the forward makes shapes of it.

    module: path of the module. attribute: its name; `config.num_heads` for one of an object that the module holds.
    kept: how much of it each rank has; the rest is divided.
    """

    module: str
    attribute: str
    value: int
    axes: tuple[int, ...]
    kept: int = 0


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """A plan for a whole model. refused: why axes that look possible stay whole. legal_sizes: tensor sizes above 1.

    shared_tokens: of the elements of activations that no axis cuts, the share of those of which a rank has its own
    tokens alone; 0: every rank has all tokens, and a plan with more takes rows that the ranks divide.
    local_outputs: of layers and of modules outside of them, those that give a rank's tokens alone.
    """

    axes: tuple[Axis, ...]
    parameters: tuple[ParameterPlan, ...]
    boundaries: tuple[Boundary, ...]
    rewrites: tuple[Rewrite, ...]
    refused: tuple[str, ...]
    legal_sizes: tuple[int, ...]
    shared_tokens: float = 0.0
    local_outputs: tuple[str, ...] = ()

    def parameter(self, name: str) -> ParameterPlan:
        """The plan of one parameter. Raises ConfigError for a name that the plan does not have."""
        for found in self.parameters:
            if found.name == name:
                return found
        raise ConfigError(f"tensor plan: no parameter {name}, expected one of the model's; make the plan anew")

    def boundaries_by_call(self) -> dict[tuple[str, int], list[Boundary]]:
        """The boundaries of each call, by its `calls.CallKey`."""
        found: dict[tuple[str, int], list[Boundary]] = {}
        for boundary in self.boundaries:
            found.setdefault((boundary.module, boundary.call), []).append(boundary)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain dicts, lists, strings, integers and booleans, for YAML or JSON."""
        found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return found

    def hash(self) -> str:
        """16 hexadecimal digits that are the same for equal plans, on any machine; texts for people do not count."""
        held = self.to_dict()
        del held["refused"], held["shared_tokens"], held["local_outputs"]  # these follow from the rest
        for item in held["parameters"]:
            del item["reason"]
        for item in held["boundaries"]:
            del item["source"], item["function"], item["width"]
        text = json.dumps(held, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def bounds(segments: tuple[int, ...], rank: int, size: int, whole: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    """Start and stop of a rank's part of each segment. Parts of a segment that `size` does not divide are uneven.

    whole: numbers of segments to take all of.
    """
    found = []
    offset = 0
    for number, length in enumerate(segments):
        part = -(-length // size)
        start, stop = (0, length) if number in whole else (min(rank * part, length), min((rank + 1) * part, length))
        found.append((offset + start, offset + stop))
        offset += length
    return found
