"""The lines of `gpu_check.py ladder`, each a shipped config with overrides.

`list_rungs` gives them: for each method the config without any lever and with each one, as it is
shipped, and with all levers that save. Later lines of a table differ from its first by one lever.
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
# Names of the bases.
PLAIN = "plain"
SHIPPED = "shipped"
EVERYTHING = "everything"


@dataclasses.dataclass(frozen=True)
class ConfigCase:
    """A shipped config with overrides, as one rank of many, with rows of its max_seq_len."""

    config: str
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    rank: int = 0

    @property
    def rows(self) -> PlannedSequence:
        """Return rows that are as long as there can be."""
        return choose_sequence(self.read(), "max", ranks=self.ranks)

    def read(self, *more_overrides: str) -> Any:
        """Read the config, with further overrides; ConfigError where they do not go together."""
        # A copy, since the cache gives everyone the same object.
        return copy.deepcopy(_read(self.config, (*self.overrides, *more_overrides)))

    def load(self) -> tuple[type, Any]:
        """Return the recipe's class, and the config with nothing but the model's shape.

        It is compiled if the config says so.
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
    """One value of a lever that saves memory."""

    on: tuple[str, ...]  # overrides that turn it on
    off: tuple[str, ...]  # overrides that turn it off, for all values of the lever alike
    saves: bool = False  # the line of all that save has it
    methods: tuple[str, ...] = METHODS  # that have it
    kept: tuple[str, ...] = ()  # methods whose plain line has it
    rounds: bool = False  # it changes results
    # A plan for a CPU has the bytes of a run there. Not where it counts what is offloaded as
    # another memory's, or knows a kernel on paper alone.
    exact: bool = True


# What turns levers of several values off.
_NO_CHECKPOINTS = ("memory.activation_checkpointing=none",)
_CLIPPED = ("memory.optimizer_in_backward=false", "clip_grad_norm=1.0")
_BITS = ("~optimizer.state_bits",)
_MATMULS = ("~matmul_dtype",)
_UNROUNDED = ("lora.quantize_base=none",)
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
    """One line of a table: the table's basis, with a lever added to it or removed from it."""

    method: str
    basis: str  # of its table: `plain`, `shipped` or `everything`
    words: tuple[str, ...]  # overrides added to the basis; empty: the basis itself
    case: ConfigCase
    removed: bool = False  # the words turn a lever off
    rounds: bool = False  # of the lever that is added
    exact: bool = True  # of the lever that is added

    @property
    def against(self) -> tuple[str, str, tuple[str, ...]]:
        """Return the key of the line that it is compared with; of a basis the plain one."""
        return (self.method, self.basis if self.words else PLAIN, ())

    @property
    def key(self) -> tuple[str, str, tuple[str, ...]]:
        """Return what no other line has."""
        return (self.method, self.basis, self.words)


def list_rungs(gpu: bool, methods: Iterable[str] = METHODS) -> list[Rung]:
    """List all lines of these methods: of Llama 3 8B, or of a tiny model for a dry run."""
    rungs = []
    for method in methods:
        rungs += build_ladder(method, gpu)
    return rungs


def build_ladder(method: str, real: bool = True) -> list[Rung]:
    """Build a method's lines: plain, shipped and everything, and those that change a lever.

    To plain each lever is added; from shipped and everything each is removed. real: of Llama 3 8B.
    """
    case = ConfigCase(f"llama3/8B_{method}")
    if not real:
        rounded = ("lora.quantize_base=nf4",) if method == "qlora" else ()
        case = ConfigCase("demo/full" if method == "full" else "demo/lora", (*TINY, *rounded))
    levers = [lever for lever in LEVERS if method in lever.methods]
    addable_levers = [lever for lever in levers if method not in lever.kept]
    plain_words = [*case.overrides, *ONE_ROW]
    for words in _list_turned_off(case, [lever.off for lever in addable_levers]):
        plain_words += words
    everything_words = [*case.overrides, *ONE_ROW]
    for lever in levers:
        if lever.saves:
            everything_words += lever.on

    plain_case = ConfigCase(case.config, tuple(plain_words))
    rungs = [Rung(method, PLAIN, words=(), case=plain_case)]
    for lever in addable_levers:
        rung = Rung(
            method,
            PLAIN,
            words=lever.on,
            case=_change_case(plain_case, lever.on),
            rounds=lever.rounds,
            exact=lever.exact,
        )
        rungs.append(rung)
    everything_case = ConfigCase(case.config, tuple(everything_words))
    for basis, basis_case in ((SHIPPED, case), (EVERYTHING, everything_case)):
        rungs.append(Rung(method, basis, words=(), case=basis_case))
        for words in _list_turned_off(basis_case, [lever.off for lever in levers]):
            changed_case = _change_case(basis_case, words)
            rungs.append(Rung(method, basis, words=words, case=changed_case, removed=True))
    return rungs


def _list_turned_off(
    case: ConfigCase, lever_offs: Iterable[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Return the overrides, of those that turn a lever off, that change this config."""
    cfg = case.read()
    # Once each, since the values of a lever are turned off alike.
    return [words for words in dict.fromkeys(lever_offs) if case.read(*words) != cfg]


def _change_case(case: ConfigCase, words: tuple[str, ...]) -> ConfigCase:
    return dataclasses.replace(case, overrides=(*case.overrides, *words))
