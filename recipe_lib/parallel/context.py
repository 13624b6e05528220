"""Context parallel for the decoder: each rank of a group has some of the tokens of every sequence
(Ulysses).

The model is given whole micro-batches `[b, s]`, and its layers this rank's `[b, s / c, d]`,
consecutive tokens of each row. Where tokens meet, in attention, ranks exchange them for heads
(`recipe_lib.ops.gathered`), and what is made of a batch for attention (documents, masks, windows)
is that of whole rows. The loss is that of all tokens, the same on all ranks of the group; a rank's
gradients are those of its part, which FSDP (with ddp the sum once a step) adds up, as ranks that
share a sequence are neighbors in the mesh's data dimension.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models.decoder import Attention, Decoder, Rotary
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.models.meta_init import find_extra_tensors
from recipe_lib.models.spec import DecoderSpec
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.gathered import Group
from recipe_lib.ops.head_losses import HeadLoss
from recipe_lib.ops.rope import compute_rotation
from recipe_lib.ops.sequence_shards import (
    exchange_for_heads,
    exchange_for_tokens,
    gather_tokens,
    shard_tokens,
    sum_over_ranks,
)
from recipe_lib.parallel.world import World


def shard_sequences(model: Decoder, parallel: ParallelConfig, world: World) -> None:
    """Divide the tokens of a meta model's micro-batches among the ranks that share sequences, in
    place.

    Called after `shard_tensors`, whose ranks divide a rank's tokens and heads first. The model then
    takes micro-batches whose length the ranks of both divide. Without such ranks the model is left
    as it is. Raises ConfigError: see `check_context`, `refuse_for_context`.
    """
    group = world.context
    if group is None:
        return
    refuse_for_context(model)
    check_context(model.spec, parallel)
    for module in model.modules():
        if isinstance(module, Attention):
            module.to_heads, module.to_tokens = (
                partial(exchange_for_heads, group=group),
                partial(exchange_for_tokens, group=group),
            )
    trunk: Any = model.model
    trunk.rotary = [partial(_rotate_local_tokens, rotary, group) for rotary in trunk.rotary]
    trunk.prepare = partial(_prepare_local_attention, trunk.prepare, group)
    if trunk.embed_tokens is not None:  # else another stage of a pipeline has it
        embedding: Any = trunk.embed_tokens
        embedding.forward = partial(_embed_local_tokens, embedding.forward, group)
    head: Any = model.head
    if head is not None:  # else another stage has it
        head.forward = partial(_run_local_head, head.forward, group)
    whole: Any = model
    if world.pipeline is None:
        whole.forward = partial(_gather_logits, model.forward, group, 0)
    else:  # a call runs a part of the model, of which only the head gives logits
        whole.run_head = partial(_gather_logits, model.run_head, group, 1)


def refuse_for_context(model: LanguageModel) -> None:
    """ConfigError for a model that is not ours, for extra parameters, and for another forward of
    attention.

    A rank has some of the tokens of a sequence there, and what looks at others would see none of
    them.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(
            "parallel.context: found a model whose attention is not ours, expected"
            " model.implementation=native; set that, or parallel.context=1"
        )
    own = [
        f"another forward of {name}"
        for name, module in model.named_modules()
        if isinstance(module, Attention) and type(module).forward is not Attention.forward
    ]
    found = next(iter(find_extra_tensors(model)), None) or next(iter(own), None)
    if found is not None:
        raise ConfigError(
            f"parallel.context: found {found}, which the recipe added, expected a model as it is"
            " built: ranks that share sequences have a part of the tokens each; set"
            " parallel.context=1"
        )


def check_context(spec: DecoderSpec, parallel: ParallelConfig) -> None:
    """Refuse a model whose heads `parallel.context` ranks cannot share: ConfigError, with the sizes
    that fit.

    A rank has as many heads as the others, all of its tensor-parallel part; kv heads may be fewer
    than the ranks.
    """
    size, tensor = parallel.context, parallel.tensor
    heads, kv_heads = spec.num_heads // tensor, max(1, spec.num_kv_heads // tensor)
    fits = [
        other
        for other in range(1, heads + 1)
        if heads % other == 0 and (kv_heads % other == 0 or other % kv_heads == 0)
    ]
    if size in fits:
        return
    each = f"{heads} attention heads and {kv_heads} key and value heads"
    each += f" on each of {tensor} ranks of parallel.tensor" if tensor > 1 else ""
    raise ConfigError(
        f"parallel.context={size}: the model has {each}, which {size} ranks cannot share evenly;"
        f" sizes that fit: {', '.join(map(str, fits))}"
    )


def _rotate_local_tokens(rotary: Rotary, group: Group, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As `Rotary`, of this rank's tokens: by frequencies that may depend on the longest position of
    all.
    """
    return compute_rotation(
        shard_tokens(positions, group), rotary.frequencies(positions), rotary.factor
    )


def _prepare_local_attention(
    prepare: Callable[..., AttentionInfo], group: Group, info: AttentionInfo | None, **shape: Any
) -> AttentionInfo:
    """As `prepare_attention`, of whole rows; what is counted of tokens is this rank's."""
    prepared = prepare(info, **shape)
    return (
        prepared
        if prepared.real is None
        else replace(prepared, real=prepared.real.shard_rows(group.rank, group.size))
    )


def _embed_local_tokens(
    forward: Callable[[Tensor], Tensor], group: Group, tokens: Tensor
) -> Tensor:
    """Tokens `[b, s]` to embeddings of this rank's."""
    return forward(shard_tokens(tokens, group).contiguous())


def _run_local_head(
    forward: Callable[..., Tensor],
    group: Group,
    hidden: Tensor,
    *,
    labels: Tensor | None = None,
    head_loss: HeadLoss | None = None,
) -> Tensor:
    """Of labels `[b, s]` the loss of all ranks' tokens; or what head_loss gives for each token, of
    all `[b, s]`.
    """
    if labels is None:
        return forward(hidden)
    found = forward(hidden, labels=shard_tokens(labels, group), head_loss=head_loss)
    return gather_tokens(found, group) if found.dim() else sum_over_ranks(found, group)


def _gather_logits(
    run: Callable[..., Tensor], group: Group, place: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Run the model or its head; logits, which ranks have of their tokens, are gathered: for short
    texts.

    place: of the tokens `[b, s]` among the arguments.
    """
    found = run(*args, **kwargs)
    if kwargs.get("labels") is not None:
        return found
    rows, length = args[place].shape
    return gather_tokens(found.view(rows, length // group.size, -1), group)
