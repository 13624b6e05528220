"""Divide layers among the stages of a pipeline, as evenly in time, or in memory, as can be.

All layers of a model count the same here, also where some see a window and others all tokens, or
some have experts and others an MLP: as their average. So a split is a number of layers for each
stage. What is made as small as possible is the largest rank: a pipeline is as slow, and needs as
much memory, as that. A rank with several stages divides its layers among them evenly in time.

Of equal items, put one after the other where the sum is then smallest, the largest sum is as small
as can be, whatever is there before; so the splits found here are the best ones, and each rank that
computes them finds the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from recipe_lib.config.mesh import (
    compute_micro_batches,
    count_stages,
    count_token_ranks,
    find_stage_rank,
    list_rank_stages,
)
from recipe_lib.config.optimizer_facts import BYTES, compute_state_bytes
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models.spec import DecoderSpec, MixtureSpec, ModelSpec
from recipe_lib.parallel.pipeline.schedules import compute_orders, count_moments

# Bytes of a weight; nf4: 4 bits and the scales of its blocks.
_QUANTIZED = {"none": None, "nf4": 0.516, "int8": 1.0}
# Of a token's pass through a layer's matrices: how much of it is done again in backward.
_RECOMPUTED = {"none": 0.0, "selective": 0.5, "budget": 0.5, "full": 1.0}


def split_layers(spec: ModelSpec, cfg: Any, shards: int = 1) -> list[range]:
    """Return the layers of each stage, first to last.

    cfg: a recipe's config. shards: ranks that share one copy of a stage's parameters (FSDP), for
    `parallel.pipeline_balance: memory`. Raise ConfigError for fewer layers than stages, and for a
    `parallel.pipeline_layers_per_stage` that does not fit the model; see
    `ExternalSpec.find_stage_parts`.
    """
    parallel: ParallelConfig = cfg.parallel
    sizes = get_sizes(spec)
    stages = count_stages(parallel)
    layers = sizes.num_layers
    if stages > layers:
        raise ConfigError(
            f"parallel.pipeline: found {stages} stages for {layers} layers, expected a layer for"
            f" each stage at least; set parallel.pipeline lower ({stages // parallel.pipeline} on"
            f" each rank, {layers} in all at most), or a parallel.pipeline_schedule with fewer"
            " stages on a rank"
        )
    counts = parallel.pipeline_layers_per_stage
    if counts is None:
        layer, head = estimate_times(sizes, cfg)
        last = find_stage_rank(parallel, stages - 1)

        def compute_time(rank: int, counts: dict[int, int]) -> float:
            return layer * sum(counts.values()) + (head if rank == last else 0)

        by_time = parallel.pipeline_balance == "compute"
        cost = compute_time if by_time else make_memory_cost(sizes, cfg, shards)
        counts = _balance_layers(parallel, layers=layers, cost=cost, head=head / layer)
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        none = next(
            (f", stage {stage} with {count}" for stage, count in enumerate(counts) if count < 1), ""
        )
        raise ConfigError(
            f"parallel.pipeline_layers_per_stage: found {len(counts)} stages with {sum(counts)}"
            f" layers{none}, expected {stages} stages of one layer or more"
            f" (parallel.pipeline_schedule={parallel.pipeline_schedule} on {parallel.pipeline}"
            f" ranks) with the model's {layers} layers in all; list {stages} numbers with that sum,"
            " or set null"
        )
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a model that the library does not implement, as those of a decoder.

    Its layers have as many weights as the model's on average, those of all experts included: all
    in one gated MLP besides attention of full width.
    """

    num_layers: int
    width: int
    vocab_size: int
    mlp_width: int
    windows: tuple[None, ...]
    tied: bool
    head_width: int
    head_rows: int
    num_heads: int = 1
    num_kv_heads: int = 1
    mixture: None = None


Sizes = DecoderSpec | _Sizes  # what times and bytes are counted by


def get_sizes(spec: ModelSpec) -> Sizes:
    """Return a model's sizes. Raise ConfigError: see `ExternalSpec.find_stage_parts`."""
    if isinstance(spec, DecoderSpec):
        return spec
    parts = spec.find_stage_parts()
    num_layers = len(parts.layers)
    prefixes = tuple(f"{name}." for name in parts.layers)
    elements = sum(
        prod(shape) for name, shape in spec.layout().shapes.items() if name.startswith(prefixes)
    )
    mlp_weights = max(0, elements // num_layers - 4 * parts.width**2)
    return _Sizes(
        num_layers=num_layers,
        width=parts.width,
        vocab_size=spec.vocab_size,
        mlp_width=mlp_weights // (3 * parts.width),
        windows=(None,) * num_layers,
        tied=spec.tied,
        head_width=parts.width,
        head_rows=spec.vocab_size,
    )


Cost = Callable[[int, dict[int, int]], float]  # of a rank with so many layers in each of its stages


def _balance_layers(parallel: ParallelConfig, layers: int, cost: Cost, head: float) -> list[int]:
    """Return the layers of each stage, such that the largest cost of a rank is as small as can be.

    Where ranks are equal, the one further behind gets the layer: with one stage on each it has
    fewer micro-batches in flight. cost: may only grow with the layers. head: how many layers the
    last stage's head takes as long as.
    """
    ranks = range(parallel.pipeline)
    last = count_stages(parallel) - 1
    given = {rank: dict.fromkeys(list_rank_stages(parallel, rank), 1) for rank in ranks}
    for _ in range(layers - last - 1):
        more = {rank: _add_layer(given[rank], last, head) for rank in ranks}
        chosen = min(reversed(ranks), key=lambda rank: cost(rank, more[rank]))
        given[chosen] = more[chosen]
    counts = {stage: count for rank in ranks for stage, count in given[rank].items()}
    return [counts[stage] for stage in range(last + 1)]


def _add_layer(counts: dict[int, int], last: int, head: float) -> dict[int, int]:
    """Return a rank's layers by stage with one more, on the stage that takes the least time."""
    chosen = min(counts, key=lambda stage: counts[stage] + (head if stage == last else 0))
    return counts | {chosen: counts[chosen] + 1}


def count_layer_weights(spec: Sizes) -> int:
    """Return the elements of one layer's matrices, on average over the layers.

    They are attention's and the MLP's; of a mixture those of all experts and of the router.
    """
    return _count_attention_weights(spec) + _average_over_layers(
        spec,
        3 * spec.width * spec.mlp_width,
        lambda mixture: mixture.num_experts * spec.width * (1 + 3 * mixture.mlp_width),
    )


def _count_attention_weights(spec: Sizes) -> int:
    return 2 * spec.width * _count_attention_channels(spec)


def _count_attention_channels(spec: Sizes) -> int:
    """Return the channels of a token's queries and keys, h e + k e."""
    return (spec.num_heads + spec.num_kv_heads) * spec.head_width


def _average_over_layers(
    spec: Sizes, dense: int, count_of_mixture: Callable[[MixtureSpec], int]
) -> int:
    """Return what a layer has on average. dense: what one with an MLP has."""
    if not isinstance(spec, DecoderSpec) or spec.mixture is None:
        return dense
    layers = spec.mixture.layers
    share = sum(layers) / len(layers)
    return round(share * count_of_mixture(spec.mixture) + (1 - share) * dense)


def estimate_times(spec: Sizes, cfg: Any) -> tuple[float, float]:
    """Return a layer's and the head's operations for a token, in forward and backward.

    A layer takes 2 for each weight forward, as many for the gradient of its input, and of its
    weights if they are trained; attention 4 h e for each token that it sees, half of `max_seq_len`
    or the window, and 2.5 times that in backward. Forward again as far as layers are checkpointed.
    The head: v d weights, whatever is checkpointed. Embedding: none.
    """
    checkpointing = cfg.memory.activation_checkpointing
    half = cfg.max_seq_len / 2
    seen = [half if window is None else min(half, window) for window in spec.windows]
    attention = 4 * spec.num_heads * spec.head_width * sum(seen) / max(1, len(seen))
    passes = 3 if cfg.trained_adapters is None else 2
    # Elements of one layer's matrices that compute a token: of a mixture those of the router and of
    # the experts of its choices.
    active_weights = _count_attention_weights(spec) + _average_over_layers(
        spec,
        3 * spec.width * spec.mlp_width,
        lambda mixture: spec.width * (mixture.num_experts + 3 * mixture.top_k * mixture.mlp_width),
    )
    layer = 2 * active_weights * (passes + _RECOMPUTED[checkpointing]) + attention * (
        4.5 if checkpointing == "full" else 3.5
    )
    return layer, 2.0 * spec.head_rows * spec.width * passes


def make_memory_cost(spec: Sizes, cfg: Any, shards: int = 1) -> Cost:
    """Return what computes the bytes of a rank from the layers of its stages.

    They are parameters, gradients and optimizer states, embedding and head where they are, and what
    the layers keep of the micro-batches in flight; the head's gradient before it is added, and one
    chunk of its logits. What every rank has alike is left out, as the layer that is being computed
    and what is on its way.
    """
    parallel: ParallelConfig = cfg.parallel
    adapters = cfg.trained_adapters
    width = BYTES.get(cfg.dtype, 2)
    rows, count = compute_micro_batches(cfg)
    tokens = rows * cfg.max_seq_len * cfg.sequences_per_item // count_token_ranks(parallel)
    # What an optimizer keeps on the device for a weight of a layer (an adapter in it), and of
    # embedding and head.
    states, vocabulary_states = (
        0
        if cfg.memory.optimizer_offload
        else compute_state_bytes(cfg.optimizer, width, in_layer=in_layer)
        for in_layer in (True, False)
    )
    parts = shards * parallel.tensor
    copies = width if cfg.copies_model else 0  # of a frozen one
    entry_width = ((2 * width + vocabulary_states if adapters is None else width) + copies) / parts
    if adapters is None:
        layer = count_layer_weights(spec) * ((2 * width + states + copies) / parts)
    else:
        layer = count_layer_weights(spec) * (
            (_QUANTIZED.get(adapters.quantize_base) or width) / parts
        )
        adapts_experts = "experts" in adapters.target_modules
        adapter_weights = _count_adapter_weights(spec, adapters.rank, adapts_experts)
        layer += adapter_weights * (2 * width + states) / parts
    kept = count_kept_elements(spec, cfg.memory.activation_checkpointing)
    deferred = count_deferred_elements(spec) if adapters is None else 0
    embedding = spec.vocab_size * spec.width * entry_width
    matrix = spec.head_rows * spec.width
    chunk = tokens * parallel.tensor / cfg.memory.loss_chunks
    logits = chunk * spec.head_rows * (width + 8) / parallel.tensor
    gradient = matrix * width / parallel.tensor if adapters is None else 0
    head = matrix * entry_width + logits + gradient
    ends = {find_stage_rank(parallel, 0): embedding}
    last = find_stage_rank(parallel, count_stages(parallel) - 1)
    # A tied head on the first rank, as a V has it, is the embedding itself.
    ends[last] = ends.get(last, 0) + head - (embedding if spec.tied and last in ends else 0)
    moments_by_rank = {
        rank: {
            tuple((stage, *in_flight) for stage, in_flight in moment.items())
            for moment in count_moments(order)
        }
        for rank, order in compute_orders(parallel, count).items()
    }

    def compute_bytes(rank: int, counts: dict[int, int]) -> float:
        elements = max(
            sum(counts[stage] * (ahead * kept + later * deferred) for stage, ahead, later in moment)
            for moment in moments_by_rank[rank]
        )
        return layer * sum(counts.values()) + ends.get(rank, 0) + elements * tokens * width

    return compute_bytes


def count_kept_elements(spec: Sizes, checkpointing: str) -> int:
    """Return the elements a token that a layer keeps from forward to backward.

    checkpointing: `memory.activation_checkpointing` none, selective or full. budget: as full, since
    what is kept beyond the inputs does not depend on the number of layers.
    """
    channels = _count_attention_channels(spec)
    if checkpointing in ("full", "budget"):
        return spec.width
    if checkpointing == "selective":  # which keeps nothing of experts
        return 2 * spec.width + channels + _average_over_layers(spec, spec.mlp_width, lambda _: 0)
    inner = _average_over_layers(
        spec, 4 * spec.mlp_width, lambda mixture: 3 * mixture.top_k * mixture.mlp_width
    )
    return 4 * spec.width + 2 * channels + inner


def count_deferred_elements(spec: Sizes) -> int:
    """Return the elements a token that a layer's weight gradients take.

    They are each linear's input, shared ones once, and its output's gradient.
    """
    inner = _average_over_layers(
        spec, spec.mlp_width, lambda mixture: mixture.top_k * mixture.mlp_width
    )
    return 4 * spec.width + 2 * _count_attention_channels(spec) + 3 * inner


def _count_adapter_weights(spec: Sizes, rank: int, adapts_experts: bool) -> int:
    """Return the elements of a layer's adapters, one on each of its seven linears.

    adapts_experts: of a mixture, too, two on each expert.
    """
    inner = _average_over_layers(
        spec,
        3 * (spec.width + spec.mlp_width),
        lambda mixture: (
            mixture.num_experts * (2 * spec.width + 3 * mixture.mlp_width) if adapts_experts else 0
        ),
    )
    return rank * (4 * spec.width + 2 * _count_attention_channels(spec) + inner)
