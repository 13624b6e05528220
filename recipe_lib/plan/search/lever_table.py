"""The levers of a run: which changes of its config change what it takes, and what each costs.

There is one description for all questions: `--advice` tries each lever alone, the next lever is
the first that lowers what takes the most, and a search takes those with a `resort` where nothing
fits without them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recipe_lib.config.mesh import count_same_batch_ranks
from recipe_lib.plan.build_plan import PlanSettings
from recipe_lib.plan.search.trials import (
    CONTEXT_KEY,
    LONG_SEQUENCE,
    OFFLOAD_KEY,
    QUANTIZE_KEY,
    REDUCE_KEY,
    STATES_KEY,
    STREAM_KEY,
    Changes,
    count_data_ranks,
    find_differing,
    get_value,
    is_long,
    set_checkpointing,
    step_in_backward,
    stream_layers,
)
from recipe_lib.plan.summary.step_time import get_mixture

RANKS_KEY = "--nproc_per_node"  # of the launcher, as it is typed
LENGTH_KEY = "max_seq_len"
PACKING_KEY = "data.packing"
TURNS_KEY = "gradient_accumulation_steps"
RESHARD_KEY = "parallel.reshard_after_forward"
# The order in which a search takes levers, each only if nothing fits with those before.
OTHER_MODEL, ROUNDING, STATES, HOST = range(1, 5)
MAX_LOSS_CHUNKS = 64

_OF_BATCH = ("activations", "logits", "temporary", "batch")
_GATHERED = ("gathered", "communication")
_SAME_SEQUENCES = "the same sequences a step"
_EXPERTS = "experts"


@dataclass(frozen=True)
class Lever:
    """One change to try."""

    changes: Changes = field(default_factory=dict)
    # What it costs, or means otherwise.
    note: str = ""
    # Whether the run is one that it is for.
    when: bool = True
    # Kinds of memory of which it leaves less.
    lowers: tuple[str, ...] = ()
    # When a search takes it, if nothing fits without: `OTHER_MODEL` to `HOST`; 0: never.
    resort: int = 0
    # Whether it is shown also where it gains nothing.
    weighed: bool = False
    # Whether it makes room for a long sequence, and advice says what it sends for that.
    sends: bool = False


def list_levers(cfg: Any, settings: PlanSettings) -> list[Lever]:
    """Return everything that could be changed, in either direction; of what lowers a kind of memory
    the cheapest first.

    Levers that do not go together with other settings are among them: `changed` says which.
    """
    levers = [
        *_list_batch_levers(cfg, settings),
        *_list_sharing_levers(cfg, settings.ranks),
        *(_list_adapter_levers(cfg) if cfg.trained_adapters is not None else ()),
        *_list_other_model_levers(cfg),
        *_list_weight_levers(cfg),
        *_list_host_levers(cfg, settings.ranks),
    ]
    return [lever for lever in levers if lever.when and find_differing(cfg, lever.changes)]


def _list_values(
    cfg: Any, key: str, values: Mapping[Any, str], lowers: str, resort: int
) -> list[Lever]:
    """Return a lever for each value of a key. values: by what it costs, least memory first."""
    levers = []
    less: dict[str, Any] = {"lowers": (lowers,), "resort": resort}
    for value, note in values.items():
        # The config's own value and those after it take as much memory, or more.
        if value == get_value(cfg, key):
            less = {}
        levers.append(Lever({key: value}, note, **less))
    return levers


def _list_batch_levers(cfg: Any, settings: PlanSettings) -> list[Lever]:
    """Return the levers of a micro-batch, and of what is kept of it for backward."""
    size = cfg.batch_size
    turns = cfg.gradient_accumulation_steps
    long = is_long(cfg)
    # The largest size below the config's that divides it, so that a step has the same sequences.
    smaller = next((divisor for divisor in range(size // 2, 0, -1) if size % divisor == 0), size)
    sequence = settings.sequence
    half = sequence.tokens // 2
    median = max(1, (sequence.histogram or {}).get("p50", cfg.max_seq_len))
    return [
        Lever(
            {"batch_size": smaller, TURNS_KEY: turns * size // smaller},
            _SAME_SEQUENCES,
            lowers=_OF_BATCH,
        ),
        Lever(
            {"batch_size": 2 * size, TURNS_KEY: turns // 2}, _SAME_SEQUENCES, when=turns % 2 == 0
        ),
        Lever(set_checkpointing(cfg, "full"), lowers=("activations",)),
        # Against `full` it lowers nothing.
        Lever(
            set_checkpointing(cfg, "selective"),
            lowers=("activations",) if cfg.memory.activation_checkpointing == "none" else (),
        ),
        Lever(set_checkpointing(cfg, "none")),
        Lever(
            {"memory.loss_chunks": min(4 * cfg.memory.loss_chunks, MAX_LOSS_CHUNKS)},
            when=cfg.memory.loss_chunks < MAX_LOSS_CHUNKS,
            lowers=("logits",),
        ),
        Lever(
            {"memory.mlp_tiles": cfg.max_seq_len // (LONG_SEQUENCE // 2)},
            when=long and cfg.memory.mlp_tiles == 1,
        ),
        Lever(
            {"memory.activation_offload": True},
            "kept in host memory meanwhile",
            lowers=("activations",),
            weighed=long,
            sends=long,
        ),
        Lever(
            {LENGTH_KEY: half},
            "shorter packs: more of them"
            if cfg.data.packing
            else f"data.truncation={cfg.data.truncation} for longer sequences",
            when=half > 0,
        ),
        Lever(
            {PACKING_KEY: True},
            f"about {cfg.max_seq_len / median:.0f} documents in a sequence of"
            f" {cfg.max_seq_len} tokens, in place of one and padding",
            when=2 * median <= cfg.max_seq_len and sequence.group == 1,
        ),
    ]


def _list_sharing_levers(cfg: Any, ranks: int) -> list[Lever]:
    """Return the levers of what a rank holds of model and sequence, and of the number of ranks."""
    parallel = cfg.parallel
    turns = cfg.gradient_accumulation_steps
    several = ranks > 1
    free = parallel.data_shard == -1  # the mesh takes any number of ranks
    copies = 2 * parallel.data_replicate
    more_ranks: Changes = {RANKS_KEY: 2 * ranks}
    return [
        *_list_ways_to_share(cfg, ranks),
        Lever({RESHARD_KEY: True}, when=several, lowers=_GATHERED),
        Lever({RESHARD_KEY: False}, when=several),
        Lever(
            {"parallel.fsdp_wrap_policy": "memory_efficient"},
            when=several and parallel.fsdp_wrap_policy in ("auto", "layers"),
            lowers=_GATHERED,
        ),
        Lever(
            {REDUCE_KEY: "micro_batch"},
            "reduced in every backward, none whole on a rank",
            when=several,
            lowers=("gradients",),
        ),
        Lever(
            {REDUCE_KEY: "step"}, "whole gradients on every rank, reduced once a step", when=several
        ),
        Lever(
            {REDUCE_KEY: "step", RESHARD_KEY: False},
            "whole weights and gradients (ZeRO-1), gathered and reduced once",
            when=several and parallel.reduce_gradients != "step" and parallel.reshard_after_forward,
        ),
        Lever(
            {"parallel.data_replicate": 1, "parallel.data_shard": -1}, when=several and copies > 2
        ),
        Lever(
            {"parallel.data_replicate": copies},
            "copies of the sharded model",
            when=several and free and count_data_ranks(cfg, ranks) % copies == 0,
        ),
        Lever({"parallel.strategy": "fsdp"}, when=several),
        Lever({"parallel.strategy": "ddp"}, "whole models, nothing gathered", when=several),
        Lever(
            {"parallel.reduce_dtype": None},
            "gradients are summed in bf16: less exact",
            when=several and parallel.reduce_dtype == "fp32" and cfg.dtype == "bf16",
        ),
        Lever(more_ranks | {TURNS_KEY: turns // 2}, _SAME_SEQUENCES, when=free and turns % 2 == 0),
        Lever(more_ranks, "more sequences a step", when=free and turns % 2 == 1),
    ]


def _list_ways_to_share(cfg: Any, ranks: int) -> list[Lever]:
    """Return how ranks could share a sequence; of a long one, how they could share matrices too."""
    turns = cfg.gradient_accumulation_steps
    long = is_long(cfg)
    sizes = list_contexts(cfg, ranks)
    # A step has the same sequences: fewer ranks have batches of their own, and take more turns.
    context_levers = [
        Lever(
            {CONTEXT_KEY: size, TURNS_KEY: turns * size // cfg.parallel.context},
            f"each rank has 1/{size} of every sequence; {_SAME_SEQUENCES}",
            weighed=long,
            sends=long,
        )
        for size in (sizes if long else sizes[:1])
    ]
    tensor_levers = [
        Lever(
            {"parallel.tensor": cfg.parallel.tensor * size, TURNS_KEY: turns * size},
            f"each rank has 1/{cfg.parallel.tensor * size} of every matrix and sequence",
            when=long and cfg.parallel.context == 1,
            weighed=True,
            sends=True,
        )
        for size in sizes
    ]
    return context_levers + tensor_levers


def list_contexts(cfg: Any, ranks: int) -> list[int]:
    """Return the numbers of ranks that could share a sequence: more, up to all of a stage."""
    together = count_same_batch_ranks(cfg.parallel)
    data_ranks = ranks // together if ranks % together == 0 else 1
    factors = [times for times in range(2, data_ranks + 1) if data_ranks % times == 0]
    return [cfg.parallel.context * times for times in factors]


def _list_adapter_levers(cfg: Any) -> list[Lever]:
    """Return the levers of adapters, and of the frozen weights under them."""
    adapters = cfg.trained_adapters
    has_experts = _EXPERTS in adapters.target_modules
    targets = [name for name in adapters.target_modules if name != _EXPERTS]
    if not has_experts:
        targets.append(_EXPERTS)
    rounded = "frozen weights are rounded"
    kinds = {"nf4": rounded, "int8": rounded, "none": "frozen weights are not rounded"}
    return [
        *_list_values(cfg, QUANTIZE_KEY, values=kinds, lowers="parameters", resort=ROUNDING),
        Lever(
            {"lora.rank": adapters.rank // 2},
            "smaller adapters",
            when=adapters.rank > 1 and adapters.adapter_path is None,
        ),
        Lever(
            {"lora.target_modules": targets},
            f"adapters {'without' if has_experts else 'with'} those of all experts",
            when=bool(targets) and adapters.adapter_path is None and get_mixture(cfg) is not None,
            weighed=True,
        ),
    ]


def _list_other_model_levers(cfg: Any) -> list[Lever]:
    """Return the levers of a run that has another model in memory, such as a teacher."""
    levers: list[Lever] = []
    for key, values in cfg.other_model_levers.items():
        if len(values) > 1:
            levers += _list_values(cfg, key, values=values, lowers="parameters", resort=OTHER_MODEL)
        else:
            ((value, note),) = values.items()
            levers.append(Lever({key: value}, note, resort=OTHER_MODEL))
    return levers


def _list_weight_levers(cfg: Any) -> list[Lever]:
    """Return the levers of what is trained, in which type, by which optimizer."""
    is_full = cfg.trained_adapters is None
    is_adamw = cfg.optimizer.name == "adamw"
    return [
        Lever(cfg.adapters_instead, "trains adapters in place of every parameter", when=is_full),
        Lever(
            {"matmul_dtype": "int8"},
            "products of rounded operands: compare the losses",
            when=cfg.matmul_dtype is None,
        ),
        Lever(
            {"dtype": "bf16"},
            "other rounding: compare the losses",
            lowers=("parameters",) if is_full else (),
        ),
        Lever({"optimizer.implementation": "fused"}, when=cfg.optimizer.implementation != "auto"),
        Lever(
            {STATES_KEY: 8},
            "states are rounded to 8 bits",
            when=is_adamw and cfg.optimizer.state_bits is None,
            lowers=("optimizer",),
            resort=STATES if is_full else 0,  # adapters have few states
        ),
        Lever(
            {"optimizer.name": "sgd"},
            "another optimizer, without states: needs its own optimizer.lr",
            when=is_adamw,
        ),
        Lever(
            step_in_backward(cfg),
            _describe_not_done_in_backward(cfg),
            when=not cfg.memory.optimizer_in_backward,
            lowers=("gradients",) if cfg.gradient_accumulation_steps == 1 else (),
        ),
    ]


def _list_host_levers(cfg: Any, ranks: int) -> list[Lever]:
    """Return the levers of what is in host memory between its uses."""
    is_full = cfg.trained_adapters is None
    streams = "layers are in host memory, and copied one ahead of the one that computes"
    if is_full:
        streams += f"; each is stepped in backward: {_describe_not_done_in_backward(cfg)}"
    return [
        Lever(
            {OFFLOAD_KEY: True},
            "offloaded optimizer states",
            lowers=("optimizer",),
            resort=STATES,
        ),
        Lever(
            stream_layers(cfg),
            streams,
            when=cfg.memory.stream_layers is not True,
            lowers=("parameters",) if ranks == 1 and not cfg.memory.cpu_offload else (),
            resort=0 if is_full else HOST,
        ),
        Lever({STREAM_KEY: False}),
        Lever(
            {"memory.cpu_offload": True},
            "the optimizer runs on the CPU and parameters cross PCIe",
            lowers=("parameters",),
            resort=HOST,
        ),
        Lever({"memory.cpu_offload": False}),
    ]


def _describe_not_done_in_backward(cfg: Any) -> str:
    """Return what a step loses where parameters are stepped in backward."""
    fewer = ", and a step has fewer sequences" if cfg.gradient_accumulation_steps > 1 else ""
    return f"gradients are not clipped{fewer}"
