"""List the configs of `gpu_check.py ladder`, which measures what each memory lever saves and costs.

A lever is a config key that trades memory for time or precision. A basis is a config without any
lever (`plain`), as shipped, or with all levers that save (`everything`). A rung is a basis, or a
basis with one lever added or removed: a line of the report's tables. `gpu_ladder.py` calls
`list_rungs`; `ConfigCase` serves other benchmarks too.
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
ONE_ROW = ("batch_size=1", "gradient_accumulation_steps=1")  # one sequence a step
# Each gradient is stepped and freed at once, so it can neither be accumulated nor clipped by the
# norm of all.
IN_BACKWARD = (
    "memory.optimizer_in_backward=true",
    "clip_grad_norm=null",
    "gradient_accumulation_steps=1",
)
TINY = ("max_seq_len=64", "device=auto", "dtype=bf16")  # of the demo's configs, in dry runs
# Bases.
PLAIN = "plain"
SHIPPED = "shipped"
EVERYTHING = "everything"


@dataclasses.dataclass(frozen=True)
class ConfigCase:
    """Hold a shipped config with overrides, and the rank of many that runs."""

    config: str  # name, such as `llama3/8B_lora`
    overrides: tuple[str, ...] = ()  # `key=value`
    ranks: int = 1
    rank: int = 0  # the one that runs

    @property
    def rows(self) -> PlannedSequence:
        """Return the sequences that are planned and run, of max_seq_len tokens."""
        return choose_sequence(self.read(), "max", ranks=self.ranks)

    def read(self, *more_overrides: str) -> Any:
        """Read the config. Raises ConfigError if overrides do not go together."""
        # A copy, since the cache gives everyone the same object.
        return copy.deepcopy(_read(self.config, (*self.overrides, *more_overrides)))

    def load(self) -> tuple[type, Any]:
        """Return (the recipe's class, the config with a model of random weights)."""
        cfg = self.read()
        plannable_cfg, _ = make_plannable(cfg)
        plannable_cfg.compile = cfg.compile
        return find_recipe_class(find_config_recipe(self.config)), plannable_cfg


@functools.cache
def _read(config: str, overrides: tuple[str, ...]) -> Any:
    """Read a config once; `_list_turned_off` asks for the same ones again and again."""
    return load_config(config, overrides, find_config_recipe(config).load_schema())


@dataclasses.dataclass(frozen=True)
class Lever:
    """Hold one value of a lever that saves memory."""

    on: tuple[str, ...]  # overrides that turn it on
    off: tuple[str, ...]  # overrides that turn it off, the same for all values of a lever
    saves: bool = False  # it is on in the basis `everything`
    methods: tuple[str, ...] = METHODS  # that have it
    kept: tuple[str, ...] = ()  # methods whose basis `plain` has it on, as a part of the method
    rounds: bool = False  # it changes results by rounding
    # A plan for a CPU has exactly the bytes of a run there. False where the plan counts offloaded
    # tensors as another memory's, or knows a kernel by formula alone.
    exact: bool = True


# Overrides that turn levers of several values off. `~key` removes a key.
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
    Lever(("memory.recompute_cheap=true",), ("memory.recompute_cheap=false",), saves=True),
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
    """Hold one line of a table: the table's basis, with a lever added to it or removed from it."""

    method: str
    basis: str  # of its table: PLAIN, SHIPPED or EVERYTHING
    words: tuple[str, ...]  # overrides added to the basis; empty: the basis itself
    case: ConfigCase
    removed: bool = False  # the words turn a lever off
    rounds: bool = False  # `Lever.rounds` of the lever that is added
    exact: bool = True  # `Lever.exact` of the lever that is added

    @property
    def against(self) -> tuple[str, str, tuple[str, ...]]:
        """Return the key of the rung that this one is compared with.

        It is the basis of the same table; a basis is compared with the plain one.
        """
        return (self.method, self.basis if self.words else PLAIN, ())

    @property
    def key(self) -> tuple[str, str, tuple[str, ...]]:
        """Return (method, basis, words), which no other rung has."""
        return (self.method, self.basis, self.words)


def list_rungs(gpu: bool, methods: Iterable[str] = METHODS) -> list[Rung]:
    """List all rungs of these methods: of Llama 3 8B, or without a GPU of the demo's tiny model."""
    rungs = []
    for method in methods:
        rungs += build_ladder(method, gpu)
    return rungs


def build_ladder(method: str, real: bool = True) -> list[Rung]:
    """Build a method's rungs: each basis, then those that differ from it by a lever.

    To plain each lever is added; from shipped and everything each is removed. real: of Llama 3 8B,
    else of the demo's model.
    """
    case = ConfigCase(f"llama3/8B_{method}")
    if not real:
        quantized = ("lora.quantize_base=nf4",) if method == "qlora" else ()
        case = ConfigCase("demo/full" if method == "full" else "demo/lora", (*TINY, *quantized))
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
    """Return those of `lever_offs` that change this config: the levers that are on in it."""
    unchanged_cfg = case.read()
    # Without duplicates, since the values of a lever are turned off alike.
    return [words for words in dict.fromkeys(lever_offs) if case.read(*words) != unchanged_cfg]


def _change_case(case: ConfigCase, words: tuple[str, ...]) -> ConfigCase:
    """Return the case with further overrides."""
    return dataclasses.replace(case, overrides=(*case.overrides, *words))
