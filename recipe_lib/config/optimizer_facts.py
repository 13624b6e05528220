"""What is known of an optimizer without importing it: the keys that it reads, and the states that
it keeps.

Each file of `recipe_lib/optim/algorithms` is an optimizer of that name, with `FACTS =
OptimizerFacts(...)` of literals. They are read here as text, so that config needs no torch; a
plugin gives the same to `register`.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
_BLOCKS = {
    8: 256,
    4: 128,
}  # numbers of a state of so many bits that share a scale in fp32, in long rows
ALGORITHMS = Path(__file__).resolve().parent.parent / "optim" / "algorithms"


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts of one optimizer.

    keys: those of the section `optimizer` that it reads, besides name, lr and weight_decay; others
    are idle. states: the state tensors that it keeps of a parameter, each of its shape.
    layer_matrix_states: of a matrix of a layer, if these are others. states_need: a key without
    which it keeps none. torch_class: the class of torch.optim that it may be.
    """

    keys: tuple[str, ...]
    states: tuple[str, ...]
    layer_matrix_states: tuple[str, ...] | None = None
    states_need: str | None = None
    torch_class: str | None = None

    def list_states(self, cfg: Any, *, layer_matrix: bool) -> tuple[str, ...]:
        """The names of the states kept of a parameter. cfg: the section `optimizer`."""
        if self.states_need is not None and not getattr(cfg, self.states_need):
            return ()
        return (
            self.states
            if self.layer_matrix_states is None or not layer_matrix
            else self.layer_matrix_states
        )

    def get_state_bits(self, cfg: Any) -> int | None:
        """Bits of a state's numbers; None: those of the parameter."""
        return resolve_state_bits(cfg) if "state_bits" in self.keys else None

    def has_master_weights(self, cfg: Any) -> bool:
        """Whether the weights are also kept in fp32."""
        return "master_weights" in self.keys and bool(cfg.master_weights)


def resolve_state_bits(cfg: Any) -> int | None:
    """Return the bits of a state's numbers that a section `optimizer` asks for; None: those of the
    parameter.

    Beside master weights, which steps add up in, the states are as exact as those unless
    `state_bits` says otherwise.
    """
    return 32 if cfg.state_bits is None and cfg.master_weights else cfg.state_bits


@cache
def read_built_in_optimizers() -> dict[str, OptimizerFacts]:
    """The optimizers that ship, by name, in the order of the alphabet."""
    return {path.stem: _read(path) for path in sorted(ALGORITHMS.glob("[!_]*.py"))}


_of_plugins: dict[str, OptimizerFacts] = {}


def find_optimizer_facts(name: str) -> OptimizerFacts | None:
    """What is known of an optimizer; None: of one that a plugin registered without facts."""
    return read_built_in_optimizers().get(name) or _of_plugins.get(name)


def compute_state_bytes(optimizer: Any, width: int, *, in_layer: bool) -> float:
    """Return bytes of the states, master weights included, for one number of a matrix with long
    rows.

    optimizer: the section. width: bytes of that number. in_layer: of a layer's matrix, of which
    Muon keeps one state, not of embedding or head. None, and an optimizer that is not known: two
    states of the number's type.
    """
    facts = None if optimizer is None else find_optimizer_facts(optimizer.name)
    if facts is None:
        return 2 * width
    bits = facts.get_state_bits(optimizer)
    each = width if bits is None else bits / 8 + (4 / _BLOCKS[bits] if bits in _BLOCKS else 0)
    count = len(facts.list_states(optimizer, layer_matrix=in_layer))
    return count * each + (4 if facts.has_master_weights(optimizer) else 0)


def register_facts(name: str, facts: OptimizerFacts) -> None:
    """Makes known what a plugin says of its optimizer."""
    _of_plugins[name] = facts


def _read(path: Path) -> OptimizerFacts:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FACTS":
            assert isinstance(node.value, ast.Call)
            return OptimizerFacts(
                **{str(word.arg): ast.literal_eval(word.value) for word in node.value.keywords}
            )
    raise TypeError(f"{path}: has no line FACTS = OptimizerFacts(...) of literals")
