"""What each layer keeps for backward so that most time is saved with so many bytes.

Next to its input, which it always keeps, a layer can keep what matmuls, attention and its sums over ranks gave; each of
these is so many bytes, and so many seconds less of recomputation. Taken are those that save most time a byte, for the
first layers if there is not room for all; then layers that keep everything, and compute nothing again. The seconds are
those of a plain roofline, the same for every device, so that every rank and every plan chooses alike: only their order
matters, and that a matmul is worth more than attention over a short row, and less than over a long one, follows from
operations alone.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from recipe_lib.errors import ConfigError
from recipe_lib.memory.aten_names import ATTENTION, INTEGER_MATMUL, MATMUL, SUM
from recipe_lib.units import GIB, format_bytes

FLOPS, BANDWIDTH, LINK = 2e14, 1.5e12, 2e10  # a second, of no card in particular: 130 operations a byte is common

Chosen = frozenset[tuple[str, int]]  # kinds of operators, and which of their kind in the layer, from 0


@dataclass(frozen=True)
class Operator:
    """One that can be kept. number: which of its kind in its layer. bytes: of its results. seconds: to do it again."""

    kind: str
    number: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class LayerCost:
    """A layer's forward. stage: of a pipeline. input: bytes of its hidden states. operators: those that can be kept
    and are computed again otherwise. everything: bytes that it keeps without checkpointing, input included. other:
    seconds of what cannot be kept alone and is computed again."""

    name: str
    stage: int
    input: int
    operators: tuple[Operator, ...]
    everything: int
    other: float


@dataclass
class BudgetChoice:
    """kept: by layer, the operators that it keeps; None: everything, it is not checkpointed. bytes: at once, at most.
    seconds: of recomputation in a micro-batch, by the roofline; full: if only inputs were kept."""

    kept: dict[str, Chosen | None] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0
    full: float = 0.0

    def describe(self) -> str:
        """`keeps 3.97 of 4.00 GiB ...` in one line."""
        whole = sum(chosen is None for chosen in self.kept.values())
        counts = Counter(kind for chosen in self.kept.values() for kind, _ in chosen or ())
        names = {ATTENTION: "attention", MATMUL: "matmul", INTEGER_MATMUL: "integer matmul", SUM: "sum over ranks"}
        parts = [f"{counts[kind]} x {name}" for kind, name in names.items() if counts[kind]]
        parts += [f"everything of {whole} layers"] if whole else []
        share = self.seconds / self.full if self.full else 0.0
        return (
            f"layers keep {format_bytes(self.bytes)}: their inputs{''.join(f', {part}' for part in parts)}; "
            f"about {share:.0%} of what checkpointing=full computes is computed again"
        )


Moments = Sequence[dict[int, int]]  # what may be there at once: by stage, the micro-batches that its layers keep


def choose(layers: Sequence[LayerCost], budget: float, moments: Moments) -> BudgetChoice:
    """What each layer keeps, under `budget` GiB at every moment.

    Raises ConfigError for a budget that the layers' inputs alone do not fit in.
    """
    room = _Room(int(budget * GIB), moments)
    least = room.after(_inputs(layers))
    if least > room.budget:
        raise ConfigError(
            f"memory.activation_budget_gib: found {budget:g} GiB, expected at least {least / GIB:.3g}, which the "
            "layers' "
            "inputs take (checkpointing `full`); raise it, or make batch_size or max_seq_len smaller"
        )
    room.take(_inputs(layers))
    choice = BudgetChoice(full=sum(layer.other + sum(one.seconds for one in layer.operators) for layer in layers))
    choice.seconds = choice.full
    taken: dict[str, set[tuple[str, int]]] = {layer.name: set() for layer in layers}
    for layer, one in _by_worth(layers):
        if room.take({layer.stage: one.bytes}):
            taken[layer.name].add((one.kind, one.number))
            choice.seconds -= one.seconds
    choice.kept = {name: frozenset(chosen) for name, chosen in taken.items()}
    for layer in layers:
        more = layer.everything - layer.input - sum(_taken(layer, taken[layer.name]))
        if room.take({layer.stage: more}):
            again = sum(one.seconds for one in layer.operators if (one.kind, one.number) not in taken[layer.name])
            choice.kept[layer.name] = None
            choice.seconds -= layer.other + again
    choice.bytes = room.used()
    return choice


def _inputs(layers: Sequence[LayerCost]) -> dict[int, int]:
    found: Counter[int] = Counter()
    for layer in layers:
        found[layer.stage] += layer.input
    return found


def _taken(layer: LayerCost, chosen: set[tuple[str, int]]) -> list[int]:
    return [one.bytes for one in layer.operators if (one.kind, one.number) in chosen]


def _by_worth(layers: Sequence[LayerCost]) -> list[tuple[LayerCost, Operator]]:
    """What saves most seconds a byte first; of equals, the first layer's."""
    pairs = [(layer, one) for layer in layers for one in layer.operators]
    return sorted(pairs, key=lambda pair: -pair[1].seconds / pair[1].bytes)


class _Room:
    """Bytes of each stage's layers, against the budget at every moment."""

    def __init__(self, budget: int, moments: Moments) -> None:
        self.budget, self._moments = budget, moments
        self._bytes: Counter[int] = Counter()

    def after(self, more: dict[int, int]) -> int:
        """The most bytes at once if there were more."""
        return max(
            (
                sum(count * (self._bytes[stage] + more.get(stage, 0)) for stage, count in moment.items())
                for moment in self._moments
            ),
            default=0,
        )

    def take(self, more: dict[int, int]) -> bool:
        """Takes it if there is room."""
        if self.after(more) > self.budget:
            return False
        for stage, size in more.items():
            self._bytes[stage] += size
        return True

    def used(self) -> int:
        """The most bytes at once."""
        return self.after({})
