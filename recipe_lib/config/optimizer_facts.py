"""Read facts of optimizers without importing them: config keys that they read, states they keep.

Each file of `recipe_lib/optim/algorithms` is an optimizer of that name, with `FACTS =
OptimizerFacts(...)` of literals. They are read here as text, so that the config package needs no
torch; a plugin, a user's file with an optimizer, gives the same to `register`. Checks of a config
and the planner call `find_optimizer_facts`.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# dtype of a config -> bytes of a number.
BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
# Bits of a state's numbers -> how many of them share a scale in fp32, in rows that are long enough.
_BLOCK_SIZES = {8: 256, 4: 128}
# Folder of the optimizers that ship.
ALGORITHMS = Path(__file__).resolve().parent.parent / "optim" / "algorithms"


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts of one optimizer. The methods' `cfg` is the config's section `optimizer`."""

    # Keys of the section that it reads, besides name, lr and weight_decay; others have no effect.
    keys: tuple[str, ...]
    # Names of the state tensors that it keeps for a parameter, each of the parameter's shape.
    states: tuple[str, ...]
    # The same for a matrix of a layer; None: as for other parameters. Muon's are others.
    layer_matrix_states: tuple[str, ...] | None = None
    # A key that has to be set, and not 0, for it to keep states; None: it always keeps them.
    states_need: str | None = None

    def list_states(self, cfg: Any, *, layer_matrix: bool) -> tuple[str, ...]:
        """Return the names of the states kept for a parameter.

        layer_matrix: the parameter is a matrix of a layer, not of embedding or head.
        """
        if self.states_need is not None and not getattr(cfg, self.states_need):
            return ()
        if layer_matrix and self.layer_matrix_states is not None:
            return self.layer_matrix_states
        return self.states

    def get_state_bits(self, cfg: Any) -> int | None:
        """Return the bits of a state's numbers; None: those of the parameter's dtype."""
        return resolve_state_bits(cfg) if "state_bits" in self.keys else None

    def has_master_weights(self, cfg: Any) -> bool:
        return "master_weights" in self.keys and bool(cfg.master_weights)


def resolve_state_bits(cfg: Any) -> int | None:
    """Return the bits of a state's numbers that the section `optimizer` asks for.

    None: those of the parameter's dtype.
    """
    # Beside master weights, an fp32 copy that steps update, the states are fp32 too, unless
    # `state_bits` says otherwise.
    return 32 if cfg.state_bits is None and cfg.master_weights else cfg.state_bits


@cache
def read_built_in_optimizers() -> dict[str, OptimizerFacts]:
    """Return the facts of the optimizers that ship, by name, in the order of the alphabet."""
    return {path.stem: _read_facts(path) for path in sorted(ALGORITHMS.glob("[!_]*.py"))}


# Name of a plugin's optimizer -> its facts, in this process.
_of_plugins: dict[str, OptimizerFacts] = {}


def find_optimizer_facts(name: str) -> OptimizerFacts | None:
    """Return an optimizer's facts; None if a plugin registered it without any, or nobody did."""
    return read_built_in_optimizers().get(name) or _of_plugins.get(name)


def compute_state_bytes(optimizer: Any, width: int, *, in_layer: bool) -> float:
    """Return the bytes of states and master weights for one parameter of a matrix with long rows.

    optimizer: the config's section; None: an optimizer that is not known.
    width: bytes of that parameter.
    in_layer: it is of a layer's matrix, for which Muon keeps one state, not of embedding or head.
    """
    facts = None if optimizer is None else find_optimizer_facts(optimizer.name)
    if facts is None:
        return 2 * width  # not known: two states of the number's type, as Adam's
    bits = facts.get_state_bits(optimizer)
    state_bytes: float = width if bits is None else bits / 8
    if bits in _BLOCK_SIZES:
        state_bytes += 4 / _BLOCK_SIZES[bits]  # the block's scale
    num_states = len(facts.list_states(optimizer, layer_matrix=in_layer))
    master_bytes = 4 if facts.has_master_weights(optimizer) else 0
    return num_states * state_bytes + master_bytes


def register_facts(name: str, facts: OptimizerFacts) -> None:
    """Register the facts of a plugin's optimizer for `find_optimizer_facts`."""
    _of_plugins[name] = facts


def _read_facts(path: Path) -> OptimizerFacts:
    # Parsed, not imported: the file imports torch.
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FACTS":
            assert isinstance(node.value, ast.Call)
            return OptimizerFacts(
                **{str(word.arg): ast.literal_eval(word.value) for word in node.value.keywords}
            )
    raise TypeError(f"{path}: has no line FACTS = OptimizerFacts(...) of literals")
