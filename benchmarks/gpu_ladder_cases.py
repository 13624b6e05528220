"""The ladder's lines: a config without any lever, with each one, as it is shipped, and with all
that save.
"""

import copy
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from recipe_lib.cli.plan_request import find_recipe_class
from recipe_lib.cli.recipes import find_config_recipe
from recipe_lib.config import load_config
from recipe_lib.plan.simulated_world.planned_data import PlannedSequence, choose_sequence
from recipe_lib.plan.simulated_world.shape_only_model import make_plannable

METHODS = ("full", "qlora", "lora")
ONE_ROW = ("batch_size=1", "gradient_accumulation_steps=1")
IN_BACKWARD = (
    "memory.optimizer_in_backward=true",
    "clip_grad_norm=null",
    "gradient_accumulation_steps=1",
)
TINY = ("max_seq_len=64", "device=auto", "dtype=bf16")
PLAIN, SHIPPED, EVERYTHING = "plain", "shipped", "everything"


@dataclasses.dataclass(frozen=True)
class ConfigCase:
    """A shipped config with overrides, as one rank of many, with rows of its max_seq_len."""

    config: str
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    rank: int = 0

    @property
    def rows(self) -> PlannedSequence:
        """As long as there can be."""
        return choose_sequence(self.read(), "max", ranks=self.ranks)

    def read(self, *more: str) -> Any:
        """The config, with further overrides; ConfigError where they do not go together."""
        return copy.deepcopy(_read(self.config, (*self.overrides, *more)))

    def load(self) -> tuple[type, Any]:
        """The recipe's class, and the config with nothing but the model's shape, compiled if it
        says so.
        """
        cfg = self.read()
        shape, _ = make_plannable(cfg)
        shape.compile = cfg.compile
        return find_recipe_class(find_config_recipe(self.config)), shape


@functools.cache
def _read(config: str, overrides: tuple[str, ...]) -> Any:
    return load_config(config, overrides, find_config_recipe(config).schema())


@dataclasses.dataclass(frozen=True)
class Lever:
    """on: what turns it on; off: what turns it off, for all values of the lever alike. saves:
    whether the line of all that save has it. methods: that have it. kept: methods whose plain line
    has it. rounds: it changes results. exact: a plan for a CPU has the bytes of a run there; not
    where it counts what is offloaded as another memory's, or knows a kernel on paper alone.
    """

    on: tuple[str, ...]
    off: tuple[str, ...]
    saves: bool = False
    methods: tuple[str, ...] = METHODS
    kept: tuple[str, ...] = ()
    rounds: bool = False
    exact: bool = True


_NO_CHECKPOINTS = ("memory.activation_checkpointing=none",)
_CLIPPED = ("memory.optimizer_in_backward=false", "clip_grad_norm=1.0")
_BITS, _MATMULS, _UNROUNDED = (
    ("~optimizer.state_bits",),
    ("~matmul_dtype",),
    ("lora.quantize_base=none",),
)
LEVERS = (
    Lever(("memory.activation_checkpointing=selective",), _NO_CHECKPOINTS),
    Lever(
        ("memory.activation_checkpointing=budget", "memory.activation_budget_gib=4"),
        _NO_CHECKPOINTS,
    ),
    Lever(("memory.activation_checkpointing=full",), _NO_CHECKPOINTS, saves=True),
    Lever(("memory.activation_offload=true",), ("memory.activation_offload=false",), saves=True),
    Lever(("memory.mlp_tiles=4",), ("memory.mlp_tiles=1",), saves=True),
    Lever(("memory.loss_chunks=32",), ("memory.loss_chunks=1",), saves=True),
    Lever(IN_BACKWARD, _CLIPPED, saves=True),
    Lever(("memory.optimizer_offload=true",), ("memory.optimizer_offload=false",), saves=True),
    Lever(("optimizer.state_bits=8",), _BITS, saves=True, rounds=True),
    Lever(("optimizer.state_bits=4",), _BITS, rounds=True),
    Lever(("memory.cpu_offload=true",), ("memory.cpu_offload=false",), exact=False),
    Lever(
        ("lora.quantize_base=nf4",),
        _UNROUNDED,
        methods=("lora", "qlora"),
        kept=("qlora",),
        rounds=True,
    ),
    Lever(("lora.quantize_base=int8",), _UNROUNDED, methods=("lora",), rounds=True),
    Lever(("matmul_dtype=int8",), _MATMULS, methods=("full", "lora"), rounds=True),
    Lever(("matmul_dtype=fp8",), _MATMULS, methods=("full", "lora"), rounds=True),
    Lever(("fused_kernels=false",), ("fused_kernels=true",), exact=False),
    Lever(("compile=true",), ("compile=false",)),
)


@dataclasses.dataclass(frozen=True)
class Rung:
    """A line. basis: of its table, `plain`, `shipped` or `everything`. words: overrides added to
    the basis; empty: the basis itself, which is compared with the plain one. removed: the words
    turn a lever off. rounds, exact: of the lever that is added.
    """

    method: str
    basis: str
    words: tuple[str, ...]
    case: ConfigCase
    removed: bool = False
    rounds: bool = False
    exact: bool = True

    @property
    def against(self) -> tuple[str, str, tuple[str, ...]]:
        """The key of the line that it is compared with."""
        return (self.method, self.basis if self.words else PLAIN, ())

    @property
    def key(self) -> tuple[str, str, tuple[str, ...]]:
        """What no other line has."""
        return (self.method, self.basis, self.words)


def list_rungs(gpu: bool, methods: Iterable[str] = METHODS) -> list[Rung]:
    """All lines of these methods: of Llama 3 8B, or of a tiny model for a dry run."""
    return [rung for method in methods for rung in build_ladder(method, gpu)]


def build_ladder(method: str, real: bool = True) -> list[Rung]:
    """The lines of a method: plain and each lever added to it; shipped, and everything, and each
    lever removed.
    """
    case = ConfigCase(f"llama3/8B_{method}")
    if not real:
        rounded = ("lora.quantize_base=nf4",) if method == "qlora" else ()
        case = ConfigCase("demo/full" if method == "full" else "demo/lora", (*TINY, *rounded))
    mine = [lever for lever in LEVERS if method in lever.methods]
    off = [lever.off for lever in mine if method not in lever.kept]
    bases = {
        PLAIN: (
            *case.overrides,
            *ONE_ROW,
            *(word for change in _list_turned_off(case, off) for word in change),
        ),
        SHIPPED: case.overrides,
        EVERYTHING: (
            *case.overrides,
            *ONE_ROW,
            *(word for lever in mine if lever.saves for word in lever.on),
        ),
    }
    found = []
    for basis, words in bases.items():
        start = dataclasses.replace(case, overrides=words)
        found.append(Rung(method, basis, (), start))
        if basis == PLAIN:
            changes = [
                (lever.on, lever.rounds, lever.exact) for lever in mine if method not in lever.kept
            ]
        else:
            changes = [
                (change, False, True)
                for change in _list_turned_off(start, [lever.off for lever in mine])
            ]
        found += [
            Rung(method, basis, change, _change_case(start, change), basis != PLAIN, rounds, exact)
            for change, rounds, exact in changes
        ]
    return found


def _list_turned_off(case: ConfigCase, changes: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Those of the changes, each of which turns a lever off, that make another config of this
    one.
    """
    own = case.read()
    return [change for change in dict.fromkeys(changes) if case.read(*change) != own]


def _change_case(case: ConfigCase, words: tuple[str, ...]) -> ConfigCase:
    return dataclasses.replace(case, overrides=(*case.overrides, *words))
