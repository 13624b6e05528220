"""Divide layers among the stages of a pipeline, as evenly in time, or in memory, as can be.

`parallelize` calls `split_layers`. A stage is consecutive layers of one rank, which may have
several. The cost of the most expensive rank (`parallel.pipeline_balance`) is minimized, since a
pipeline is as slow, and needs as much memory, as that rank. A rank with several stages divides its
layers among them evenly in time. Each rank computes the same split by itself.
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

# All layers of a model count alike, as their average, also where some have a window or experts and
# others not. So a split is a number of layers for each stage, and the greedy algorithm of
# `_balance_layers` is optimal: if equal items are added one by one, each to the sum that is
# smallest with it, the largest sum is as small as can be.

# Bytes of a weight by `lora.quantize_base`; nf4: 4 bits and the scales of its blocks. None: not
# quantized, as wide as the model's dtype.
_QUANTIZED_BYTES = {"none": None, "nf4": 0.516, "int8": 1.0}
# By `memory.activation_checkpointing`, the part of a layer's matrix products in forward that
# backward computes again.
_RECOMPUTED_SHARES = {"none": 0.0, "selective": 0.5, "budget": 0.5, "full": 1.0}


def split_layers(spec: ModelSpec, cfg: Any, shards: int = 1) -> list[range]:
    """Return the indices of the layers of each stage, first to last.

    cfg: a recipe's config. shards: number of ranks that FSDP shards a stage's parameters over, read
    for `parallel.pipeline_balance: memory` only. Raise ConfigError for fewer layers than stages,
    for a `parallel.pipeline_layers_per_stage` that does not fit the model, and for an external
    model that cannot be divided.
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
        layer_time, head_time = estimate_times(sizes, cfg)
        last_rank = find_stage_rank(parallel, stages - 1)

        def compute_time(rank: int, counts: dict[int, int]) -> float:
            return layer_time * sum(counts.values()) + (head_time if rank == last_rank else 0)

        by_time = parallel.pipeline_balance == "compute"
        cost = compute_time if by_time else make_memory_cost(sizes, cfg, shards)
        counts = _balance_layers(parallel, layers=layers, cost=cost, head=head_time / layer_time)
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        empty_stage = next(
            (f", stage {stage} with {count}" for stage, count in enumerate(counts) if count < 1), ""
        )
        raise ConfigError(
            f"parallel.pipeline_layers_per_stage: found {len(counts)} stages with {sum(counts)}"
            f" layers{empty_stage}, expected {stages} stages of one layer or more"
            f" (parallel.pipeline_schedule={parallel.pipeline_schedule} on {parallel.pipeline}"
            f" ranks) with the model's {layers} layers in all; list {stages} numbers with that sum,"
            " or set null"
        )
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a decoder that stands for an external model, under the names of `DecoderSpec`.

    Each layer has as many weights as the model's layers on average, all experts included: attention
    of full width with one head, and the rest in a gated MLP.
    """

    num_layers: int
    width: int  # channels of hidden states
    vocab_size: int  # rows of the embedding
    mlp_width: int  # channels of the MLP
    windows: tuple[None, ...]  # by layer, the tokens that attention sees; None: all
    tied: bool  # the embedding is the output head
    head_width: int  # channels of an attention head
    head_rows: int  # rows of the output head
    num_heads: int = 1
    num_kv_heads: int = 1
    mixture: None = None  # no experts


Sizes = DecoderSpec | _Sizes


def get_sizes(spec: ModelSpec) -> Sizes:
    """Return a model's sizes, from which its times and bytes are estimated.

    Raise ConfigError for an external model that cannot be divided into stages.
    """
    if isinstance(spec, DecoderSpec):
        return spec
    parts = spec.find_stage_parts()
    num_layers = len(parts.layers)
    prefixes = tuple(f"{name}." for name in parts.layers)
    num_elements = sum(
        prod(shape) for name, shape in spec.layout().shapes.items() if name.startswith(prefixes)
    )
    # 4 width^2: the matrices of attention, q, k, v and o.
    mlp_weights = max(0, num_elements // num_layers - 4 * parts.width**2)
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


# A function of a rank's index in the pipeline and its numbers of layers by stage. It returns the
# cost of the rank: operations of a token, or bytes.
Cost = Callable[[int, dict[int, int]], float]


def _balance_layers(parallel: ParallelConfig, layers: int, cost: Cost, head: float) -> list[int]:
    """Return the number of layers of each stage that makes the largest cost of a rank smallest.

    layers: number of the model's. cost: must not fall when layers are added. head: the time of the
    last stage's head, in times of a layer.
    """
    ranks = range(parallel.pipeline)
    last = count_stages(parallel) - 1  # the last stage
    # By rank, its numbers of layers by stage: one each to begin with.
    counts_by_rank = {rank: dict.fromkeys(list_rank_stages(parallel, rank), 1) for rank in ranks}
    for _ in range(layers - last - 1):
        candidates = {rank: _add_layer(counts_by_rank[rank], last, head) for rank in ranks}
        # Of equal ranks the last one gets the layer: with one stage on each rank it has fewer
        # micro-batches in flight.
        chosen = min(reversed(ranks), key=lambda rank: cost(rank, candidates[rank]))
        counts_by_rank[chosen] = candidates[chosen]
    return [counts_by_rank[find_stage_rank(parallel, stage)][stage] for stage in range(last + 1)]


def _add_layer(counts: dict[int, int], last: int, head: float) -> dict[int, int]:
    """Return a rank's numbers of layers by stage with one more, on the stage that is fastest.

    last: the last stage of the pipeline, whose head takes as long as `head` layers.
    """
    chosen = min(counts, key=lambda stage: counts[stage] + (head if stage == last else 0))
    return counts | {chosen: counts[chosen] + 1}


# Sizes below: h attention heads and k kv heads of e channels, v rows of the head, d the width.


def count_layer_weights(spec: Sizes) -> int:
    """Return the elements of one layer's matrices, on average over the layers.

    These are attention and MLP, or in a layer with experts router and all experts for the MLP.
    """
    return _count_attention_weights(spec) + _average_over_layers(
        spec,
        3 * spec.width * spec.mlp_width,
        lambda mixture: mixture.num_experts * spec.width * (1 + 3 * mixture.mlp_width),
    )


def _count_attention_weights(spec: Sizes) -> int:
    # q and o have h e channels each, k and v have k e each.
    return 2 * spec.width * _count_attention_channels(spec)


def _count_attention_channels(spec: Sizes) -> int:
    """Return the channels of a token's queries and keys together, (h + k) e."""
    return (spec.num_heads + spec.num_kv_heads) * spec.head_width


def _average_over_layers(
    spec: Sizes, dense: int, count_of_mixture: Callable[[MixtureSpec], int]
) -> int:
    """Return a count averaged over a model's layers.

    dense: the count of a layer with an MLP. count_of_mixture: returns that of one with experts.
    """
    if not isinstance(spec, DecoderSpec) or spec.mixture is None:
        return dense
    layers = spec.mixture.layers  # True for each layer with experts
    share = sum(layers) / len(layers)
    return round(share * count_of_mixture(spec.mixture) + (1 - share) * dense)


def estimate_times(spec: Sizes, cfg: Any) -> tuple[float, float]:
    """Return the floating-point operations of a layer and of the head, for a token of a step.

    A layer takes 2 for each weight in forward, as many for the gradient of its input, and as many
    for those of its weights if they are trained. Attention takes 4 h e for each token that it sees:
    half of `max_seq_len` on average, or the window if that is less. Its backward takes 2.5 times
    as many. What is checkpointed is computed forward again. The head has v d weights and is not
    checkpointed. The embedding takes none. cfg: a recipe's config.
    """
    checkpointing = cfg.memory.activation_checkpointing
    half = cfg.max_seq_len / 2
    seen_tokens = [half if window is None else min(half, window) for window in spec.windows]
    attention = 4 * spec.num_heads * spec.head_width * sum(seen_tokens) / max(1, len(seen_tokens))
    # Products with each matrix: forward, gradient of the input, and gradient of the weight.
    passes = 3 if cfg.trained_adapters is None else 2
    # Elements of a layer's matrices that a token is multiplied by: in a mixture those of the router
    # and of the experts that it is sent to.
    active_weights = _count_attention_weights(spec) + _average_over_layers(
        spec,
        3 * spec.width * spec.mlp_width,
        lambda mixture: spec.width * (mixture.num_experts + 3 * mixture.top_k * mixture.mlp_width),
    )
    # Attention: 1 forward and 2.5 backward; only full checkpointing computes it forward again.
    layer = 2 * active_weights * (passes + _RECOMPUTED_SHARES[checkpointing]) + attention * (
        4.5 if checkpointing == "full" else 3.5
    )
    return layer, 2.0 * spec.head_rows * spec.width * passes


def make_memory_cost(spec: Sizes, cfg: Any, shards: int = 1) -> Cost:
    """Return a function that estimates the bytes of a rank from the layers of its stages.

    Counted are parameters, gradients and optimizer states, of embedding and head on their ranks
    too; the tensors that layers keep of the micro-batches in flight; and on the last rank the
    head's gradient before it is added up, and one chunk of its logits. Left out are bytes that all
    ranks have alike, as of the layer that is being computed and of tensors between ranks.

    cfg: a recipe's config. shards: number of ranks that FSDP shards a stage's parameters over.
    """
    parallel: ParallelConfig = cfg.parallel
    adapters = cfg.trained_adapters
    width = BYTES.get(cfg.dtype, 2)  # bytes of an element
    # Items of a micro-batch (sequences, or pairs of two), and micro-batches of a step.
    rows, num_micro_batches = compute_micro_batches(cfg)
    # Tokens of a micro-batch on a rank.
    tokens = rows * cfg.max_seq_len * cfg.sequences_per_item // count_token_ranks(parallel)
    # Bytes of optimizer states on the device for a trained weight of a layer, and for one of
    # embedding and head.
    states, vocabulary_states = (
        0
        if cfg.memory.optimizer_offload
        else compute_state_bytes(cfg.optimizer, width, in_layer=in_layer)
        for in_layer in (True, False)
    )
    parts = shards * parallel.tensor  # ranks among which each matrix is divided
    copies = width if cfg.copies_model else 0  # bytes of a weight's frozen copy, as in a reference
    # Bytes on a rank of a weight of embedding and head, with its gradient and states if trained.
    entry_width = ((2 * width + vocabulary_states if adapters is None else width) + copies) / parts
    if adapters is None:
        layer_bytes = count_layer_weights(spec) * ((2 * width + states + copies) / parts)
    else:
        layer_bytes = count_layer_weights(spec) * (
            (_QUANTIZED_BYTES.get(adapters.quantize_base) or width) / parts
        )
        adapts_experts = "experts" in adapters.target_modules
        adapter_weights = _count_adapter_weights(spec, adapters.rank, adapts_experts)
        layer_bytes += adapter_weights * (2 * width + states) / parts
    # Elements that a layer holds of a token, until backward and for deferred weight gradients.
    kept = count_kept_elements(spec, cfg.memory.activation_checkpointing)
    deferred = count_deferred_elements(spec) if adapters is None else 0
    embedding_bytes = spec.vocab_size * spec.width * entry_width
    num_head_weights = spec.head_rows * spec.width
    chunk_tokens = tokens * parallel.tensor / cfg.memory.loss_chunks
    logits_bytes = chunk_tokens * spec.head_rows * (width + 8) / parallel.tensor
    gradient_bytes = num_head_weights * width / parallel.tensor if adapters is None else 0
    head_bytes = num_head_weights * entry_width + logits_bytes + gradient_bytes
    # By rank, the bytes of embedding and head.
    end_bytes = {find_stage_rank(parallel, 0): embedding_bytes}
    last = find_stage_rank(parallel, count_stages(parallel) - 1)
    # With ZBV the first rank has the last stage too, and a tied head there is the embedding itself.
    end_bytes[last] = (
        end_bytes.get(last, 0)
        + head_bytes
        - (embedding_bytes if spec.tied and last in end_bytes else 0)
    )
    # By rank, the different states that it is in during a step. A state has by stage the numbers of
    # micro-batches between forward and backward, and of those with deferred weight gradients.
    moments_by_rank = {
        rank: {
            tuple((stage, *in_flight) for stage, in_flight in moment.items())
            for moment in count_moments(order)
        }
        for rank, order in compute_orders(parallel, num_micro_batches).items()
    }

    def compute_bytes(rank: int, counts: dict[int, int]) -> float:
        elements = max(  # of a token, kept by the layers of all stages
            sum(counts[stage] * (ahead * kept + later * deferred) for stage, ahead, later in moment)
            for moment in moments_by_rank[rank]
        )
        return (
            layer_bytes * sum(counts.values()) + end_bytes.get(rank, 0) + elements * tokens * width
        )

    return compute_bytes


def count_kept_elements(spec: Sizes, checkpointing: str) -> int:
    """Return how many elements a layer keeps of a token from forward to backward.

    checkpointing: `memory.activation_checkpointing`. `budget` counts as `full`, since the bytes
    that it keeps beyond the layers' inputs do not depend on the number of layers.
    """
    channels = _count_attention_channels(spec)
    if checkpointing in ("full", "budget"):
        return spec.width
    if checkpointing == "selective":  # it keeps nothing of experts
        return 2 * spec.width + channels + _average_over_layers(spec, spec.mlp_width, lambda _: 0)
    inner = _average_over_layers(
        spec, 4 * spec.mlp_width, lambda mixture: 3 * mixture.top_k * mixture.mlp_width
    )
    return 4 * spec.width + 2 * channels + inner


def count_deferred_elements(spec: Sizes) -> int:
    """Return how many elements of a token a layer keeps for its deferred weight gradients.

    These are the input of each linear, shared ones once, and the gradient of its output.
    """
    inner = _average_over_layers(
        spec, spec.mlp_width, lambda mixture: mixture.top_k * mixture.mlp_width
    )
    return 4 * spec.width + 2 * _count_attention_channels(spec) + 3 * inner


def _count_adapter_weights(spec: Sizes, rank: int, adapts_experts: bool) -> int:
    """Return the elements of a layer's adapters, with one on each of its seven linears.

    rank: `lora.rank`. adapts_experts: True if experts have adapters too, two each: on gate and up,
    and on down.
    """
    inner = _average_over_layers(
        spec,
        3 * (spec.width + spec.mlp_width),
        lambda mixture: (
            mixture.num_experts * (2 * spec.width + 3 * mixture.mlp_width) if adapts_experts else 0
        ),
    )
    return rank * (4 * spec.width + 2 * _count_attention_channels(spec) + inner)
