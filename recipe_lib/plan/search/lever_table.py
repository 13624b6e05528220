"""List the levers of a run: changes of config keys that trade memory, time and quality.

`list_levers(cfg, settings)` is the one table for all questions. `tune plan --advice` tries each
lever alone (`advice.try_levers`), a plan's "next" line names the first lever that lowers the
largest kind of memory (`advice.name_next_lever`), and a search for the fastest settings takes
those with a `search_group` where nothing fits without them (`trial_order.list_groups`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
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

RANKS_KEY = "--nproc_per_node"  # an option of the launcher, no config key; shown as it is typed
LENGTH_KEY = "max_seq_len"
PACKING_KEY = "data.packing"
MICRO_BATCHES_KEY = "gradient_accumulation_steps"  # micro-batches of a step
RESHARD_KEY = "parallel.reshard_after_forward"
MAX_LOSS_CHUNKS = 64  # of the logits; the advice goes no further

# Kinds of memory (`trace.STORAGE_KINDS`) that grow with the micro-batch, and those of gathered
# parameters.
_OF_BATCH = ("activations", "logits", "temporary", "batch")
_GATHERED = ("gathered", "communication")
_SAME_SEQUENCES = "the same sequences a step"  # a note
_EXPERTS = "experts"  # in `lora.target_modules`: the matrices of all experts


class SearchGroup(Enum):
    """Levers that a search takes together, each group only if nothing fits with those before."""

    OTHER_MODEL = 1  # less memory for another model, such as a teacher or a reference
    FEWER_BITS = 2  # frozen weights are quantized
    OPTIMIZER_STATES = 3
    HOST_MEMORY = 4


@dataclass(frozen=True)
class Lever:
    """One change of a config to try; without changes, the config as it is."""

    # Dotted key -> value; `RANKS_KEY` for the number of ranks.
    changes: Changes = field(default_factory=dict)
    # Text: what it costs, or does besides.
    note: str = ""
    # True: it makes sense for this run; False: it is left out of the list.
    when: bool = True
    # Kinds of memory that it lowers.
    lowers: tuple[str, ...] = ()
    # Group in which a search takes it if nothing fits without; None: a search never takes it.
    search_group: SearchGroup | None = None
    # True: advice shows it even if it saves neither memory nor time.
    is_always_shown: bool = False
    # True: it makes room for a long sequence by sending to other ranks or copying to the host, and
    # advice shows these bytes.
    shows_traffic: bool = False


def list_levers(cfg: Any, settings: PlanSettings) -> list[Lever]:
    """Return the levers of a run: for less memory and for less time.

    Among those that lower a kind of memory the cheapest is first. Levers that change nothing in
    this config are left out. Some may not go with its other keys: `apply_changes` returns None for
    them.
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
    cfg: Any, key: str, values: Mapping[Any, str], lowers: str, search_group: SearchGroup
) -> list[Lever]:
    """Return a lever for each value of a key.

    values: value -> note on what it costs, least memory first. lowers: the kind of memory that
    values before the config's own lower. search_group: of the same values.
    """
    levers = []
    saving_fields: dict[str, Any] = {"lowers": (lowers,), "search_group": search_group}
    for value, note in values.items():
        # The config's own value and those after it take as much memory, or more.
        if value == get_value(cfg, key):
            saving_fields = {}
        levers.append(Lever({key: value}, note, **saving_fields))
    return levers


def _list_batch_levers(cfg: Any, settings: PlanSettings) -> list[Lever]:
    batch_size = cfg.batch_size
    num_micro_batches = cfg.gradient_accumulation_steps
    is_long_run = is_long(cfg)
    # The largest size below the config's that divides it, so that a step has the same sequences.
    smaller_size = next(
        (divisor for divisor in range(batch_size // 2, 0, -1) if batch_size % divisor == 0),
        batch_size,
    )
    sequence = settings.sequence
    half_tokens = sequence.tokens // 2
    # Of the documents; without known lengths as long as a sequence, so that packing gains nothing.
    median_tokens = max(1, (sequence.histogram or {}).get("p50", cfg.max_seq_len))
    return [
        Lever(
            {
                "batch_size": smaller_size,
                MICRO_BATCHES_KEY: num_micro_batches * batch_size // smaller_size,
            },
            _SAME_SEQUENCES,
            lowers=_OF_BATCH,
        ),
        Lever(
            {"batch_size": 2 * batch_size, MICRO_BATCHES_KEY: num_micro_batches // 2},
            _SAME_SEQUENCES,
            when=num_micro_batches % 2 == 0,
        ),
        Lever(set_checkpointing(cfg, "full"), lowers=("activations",)),
        # `selective` keeps more than `full`: it lowers activations only in place of `none`.
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
        Lever(  # tiles of LONG_SEQUENCE // 2 tokens
            {"memory.mlp_tiles": cfg.max_seq_len // (LONG_SEQUENCE // 2)},
            when=is_long_run and cfg.memory.mlp_tiles == 1,
        ),
        Lever(
            {"memory.activation_offload": True},
            "kept in host memory meanwhile",
            lowers=("activations",),
            is_always_shown=is_long_run,
            shows_traffic=is_long_run,
        ),
        Lever(
            {LENGTH_KEY: half_tokens},
            "shorter packs: more of them"
            if cfg.data.packing
            else f"data.truncation={cfg.data.truncation} for longer sequences",
            when=half_tokens > 0,
        ),
        Lever(
            {PACKING_KEY: True},
            f"about {cfg.max_seq_len / median_tokens:.0f} documents in a sequence of"
            f" {cfg.max_seq_len} tokens, in place of one and padding",
            # `group` is 2 where sequences are pairs.
            when=2 * median_tokens <= cfg.max_seq_len and sequence.group == 1,
        ),
    ]


def _list_sharing_levers(cfg: Any, ranks: int) -> list[Lever]:
    parallel = cfg.parallel
    num_micro_batches = cfg.gradient_accumulation_steps
    several = ranks > 1
    takes_any_ranks = parallel.data_shard == -1  # the mesh takes any number of ranks
    twice_the_copies = 2 * parallel.data_replicate
    more_ranks: Changes = {RANKS_KEY: 2 * ranks}
    return [
        *_list_context_and_tensor_levers(cfg, ranks),
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
            {REDUCE_KEY: "step"},
            "whole gradients on every rank, reduced once a step",
            when=several,
        ),
        Lever(
            {REDUCE_KEY: "step", RESHARD_KEY: False},
            "whole weights and gradients (ZeRO-1), gathered and reduced once",
            when=several and parallel.reduce_gradients != "step" and parallel.reshard_after_forward,
        ),
        Lever(
            {"parallel.data_replicate": 1, "parallel.data_shard": -1},
            when=several and twice_the_copies > 2,
        ),
        Lever(
            {"parallel.data_replicate": twice_the_copies},
            "copies of the sharded model",
            when=several
            and takes_any_ranks
            and count_data_ranks(cfg, ranks) % twice_the_copies == 0,
        ),
        Lever({"parallel.strategy": "fsdp"}, when=several),
        Lever({"parallel.strategy": "ddp"}, "whole models, nothing gathered", when=several),
        Lever(
            {"parallel.reduce_dtype": None},
            "gradients are summed in bf16: less exact",
            when=several and parallel.reduce_dtype == "fp32" and cfg.dtype == "bf16",
        ),
        Lever(
            more_ranks | {MICRO_BATCHES_KEY: num_micro_batches // 2},
            _SAME_SEQUENCES,
            when=takes_any_ranks and num_micro_batches % 2 == 0,
        ),
        Lever(
            more_ranks, "more sequences a step", when=takes_any_ranks and num_micro_batches % 2 == 1
        ),
    ]


def _list_context_and_tensor_levers(cfg: Any, ranks: int) -> list[Lever]:
    num_micro_batches = cfg.gradient_accumulation_steps
    is_long_run = is_long(cfg)
    sizes = list_contexts(cfg, ranks)
    # Fewer ranks have batches of their own: each has more micro-batches, for the same step.
    context_levers = [
        Lever(
            {
                CONTEXT_KEY: size,
                MICRO_BATCHES_KEY: num_micro_batches * size // cfg.parallel.context,
            },
            f"each rank has 1/{size} of every sequence; {_SAME_SEQUENCES}",
            is_always_shown=is_long_run,
            shows_traffic=is_long_run,
        )
        for size in (sizes if is_long_run else sizes[:1])
    ]
    tensor_levers = [
        Lever(
            {
                "parallel.tensor": cfg.parallel.tensor * size,
                MICRO_BATCHES_KEY: num_micro_batches * size,
            },
            f"each rank has 1/{cfg.parallel.tensor * size} of every matrix and sequence",
            when=is_long_run and cfg.parallel.context == 1,
            is_always_shown=True,
            shows_traffic=True,
        )
        for size in sizes
    ]
    return context_levers + tensor_levers


def list_contexts(cfg: Any, ranks: int) -> list[int]:
    """Return the sizes of context parallelism above the config's, up to all ranks of a stage."""
    same_batch_ranks = count_same_batch_ranks(cfg.parallel)
    data_ranks = ranks // same_batch_ranks if ranks % same_batch_ranks == 0 else 1
    factors = [factor for factor in range(2, data_ranks + 1) if data_ranks % factor == 0]
    return [cfg.parallel.context * factor for factor in factors]


def _list_adapter_levers(cfg: Any) -> list[Lever]:
    """Return the levers of adapters, and of the frozen weights that they adapt.

    Only for a config whose `trained_adapters` is not None.
    """
    adapters = cfg.trained_adapters
    has_experts = _EXPERTS in adapters.target_modules
    targets = [name for name in adapters.target_modules if name != _EXPERTS]
    if not has_experts:
        targets.append(_EXPERTS)
    rounded_note = "frozen weights are rounded"
    notes_by_type = {
        "nf4": rounded_note,
        "int8": rounded_note,
        "none": "frozen weights are not rounded",
    }
    return [
        *_list_values(
            cfg,
            QUANTIZE_KEY,
            values=notes_by_type,
            lowers="parameters",
            search_group=SearchGroup.FEWER_BITS,
        ),
        Lever(
            {"lora.rank": adapters.rank // 2},
            "smaller adapters",
            when=adapters.rank > 1 and adapters.adapter_path is None,
        ),
        Lever(
            {"lora.target_modules": targets},
            f"adapters {'without' if has_experts else 'with'} those of all experts",
            when=bool(targets) and adapters.adapter_path is None and get_mixture(cfg) is not None,
            is_always_shown=True,
        ),
    ]


def _list_other_model_levers(cfg: Any) -> list[Lever]:
    levers: list[Lever] = []
    for key, values in cfg.other_model_levers.items():
        if len(values) > 1:  # as many bits as the config may choose
            levers += _list_values(
                cfg, key, values=values, lowers="parameters", search_group=SearchGroup.OTHER_MODEL
            )
        else:  # a switch, such as streaming its layers
            ((value, note),) = values.items()
            levers.append(Lever({key: value}, note, search_group=SearchGroup.OTHER_MODEL))
    return levers


def _list_weight_levers(cfg: Any) -> list[Lever]:
    is_full = cfg.trained_adapters is None
    is_adamw = cfg.optimizer.name == "adamw"
    return [
        # `adapters_instead` is empty, and its lever left out, where the recipe has no adapters.
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
            search_group=SearchGroup.OPTIMIZER_STATES
            if is_full
            else None,  # adapters have few states
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
    is_full = cfg.trained_adapters is None
    stream_note = "layers are in host memory, and copied one ahead of the one that computes"
    if is_full:
        stream_note += f"; each is stepped in backward: {_describe_not_done_in_backward(cfg)}"
    return [
        Lever(
            {OFFLOAD_KEY: True},
            "offloaded optimizer states",
            lowers=("optimizer",),
            search_group=SearchGroup.OPTIMIZER_STATES,
        ),
        Lever(
            stream_layers(cfg),
            stream_note,
            when=cfg.memory.stream_layers is not True,
            lowers=("parameters",) if ranks == 1 and not cfg.memory.cpu_offload else (),
            search_group=None if is_full else SearchGroup.HOST_MEMORY,
        ),
        Lever({STREAM_KEY: False}),
        Lever(
            {"memory.cpu_offload": True},
            "the optimizer runs on the CPU and parameters cross PCIe",
            lowers=("parameters",),
            search_group=SearchGroup.HOST_MEMORY,
        ),
        Lever({"memory.cpu_offload": False}),
    ]


def _describe_not_done_in_backward(cfg: Any) -> str:
    fewer = ", and a step has fewer sequences" if cfg.gradient_accumulation_steps > 1 else ""
    return f"gradients are not clipped{fewer}"
