"""Context parallel for the decoder (Ulysses): each rank has some of the tokens of every sequence.

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
from recipe_lib.models import DecoderSpec, find_extra_tensors
from recipe_lib.models.decoder import Attention, Decoder, Rotary
from recipe_lib.models.language_model import LanguageModel
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
    as it is. Raise ConfigError: see `check_context`, `refuse_for_context`.
    """
    group = world.context
    if group is None:
        return
    refuse_for_context(model)
    check_context(model.spec, parallel)
    for module in model.modules():
        if isinstance(module, Attention):
            module.to_heads = partial(exchange_for_heads, group=group)
            module.to_tokens = partial(exchange_for_tokens, group=group)
    trunk: Any = model.model
    trunk.rotary = [partial(_rotate_local_tokens, rotary, group) for rotary in trunk.rotary]
    trunk.prepare = partial(_prepare_local_attention, trunk.prepare, group)
    if trunk.embed_tokens is not None:  # else another stage of a pipeline has it
        embedding: Any = trunk.embed_tokens
        embedding.forward = partial(_embed_local_tokens, embedding.forward, group)
    head: Any = model.head
    if head is not None:  # else another stage has it
        head.forward = partial(_run_local_head, head.forward, group)
    replaced: Any = model
    if world.pipeline is None:
        replaced.forward = partial(_gather_logits, model.forward, group, 0)
    else:  # a call runs a part of the model, of which only the head gives logits
        replaced.run_head = partial(_gather_logits, model.run_head, group, 1)


def refuse_for_context(model: LanguageModel) -> None:
    """Raise ConfigError for a model that is not ours, or that a recipe has changed.

    Changes are extra parameters, and another forward of attention. A rank has some of the tokens of
    a sequence there, and what looks at others would see none of them.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(
            "parallel.context: found a model whose attention is not ours, expected"
            " model.implementation=native; set that, or parallel.context=1"
        )
    changes = [
        f"another forward of {name}"
        for name, module in model.named_modules()
        if isinstance(module, Attention) and type(module).forward is not Attention.forward
    ]
    additions = [*find_extra_tensors(model), *changes]
    if additions:
        raise ConfigError(
            f"parallel.context: found {additions[0]}, which the recipe added, expected a model as"
            " it is built: ranks that share sequences have a part of the tokens each; set"
            " parallel.context=1"
        )


def check_context(spec: DecoderSpec, parallel: ParallelConfig) -> None:
    """Raise ConfigError for a model whose heads the ranks cannot share, with the sizes that fit.

    A rank has as many heads as the others, all of its tensor-parallel part; kv heads may be fewer
    than the ranks.
    """
    size = parallel.context
    tensor = parallel.tensor
    heads = spec.num_heads // tensor
    kv_heads = max(1, spec.num_kv_heads // tensor)
    fits = [
        ranks
        for ranks in range(1, heads + 1)
        if heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
    ]
    if size not in fits:
        counts = f"{heads} attention heads and {kv_heads} key and value heads"
        counts += f" on each of {tensor} ranks of parallel.tensor" if tensor > 1 else ""
        raise ConfigError(
            f"parallel.context={size}: the model has {counts}, which {size} ranks cannot share"
            f" evenly; sizes that fit: {', '.join(map(str, fits))}"
        )


def _rotate_local_tokens(rotary: Rotary, group: Group, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of this rank's tokens.

    Their frequencies may depend on the longest position of all.
    """
    return compute_rotation(
        shard_tokens(positions, group), rotary.frequencies(positions), rotary.factor
    )


def _prepare_local_attention(
    prepare: Callable[..., AttentionInfo], group: Group, info: AttentionInfo | None, **shape: Any
) -> AttentionInfo:
    """Prepare attention on whole rows; what is counted of tokens is this rank's."""
    prepared = prepare(info, **shape)
    if prepared.real is None:
        return prepared
    return replace(prepared, real=prepared.real.shard_rows(group.rank, group.size))


def _embed_local_tokens(
    forward: Callable[[Tensor], Tensor], group: Group, tokens: Tensor
) -> Tensor:
    """Return the embeddings of this rank's of the tokens `[b, s]`."""
    return forward(shard_tokens(tokens, group).contiguous())


def _run_local_head(
    forward: Callable[..., Tensor],
    group: Group,
    hidden: Tensor,
    *,
    labels: Tensor | None = None,
    head_loss: HeadLoss | None = None,
) -> Tensor:
    """Return the loss of all ranks' tokens of labels `[b, s]`.

    A head_loss that gives a number for each token gives those of all `[b, s]`.
    """
    if labels is None:
        return forward(hidden)
    loss = forward(hidden, labels=shard_tokens(labels, group), head_loss=head_loss)
    return gather_tokens(loss, group) if loss.dim() else sum_over_ranks(loss, group)


def _gather_logits(
    run: Callable[..., Tensor], group: Group, place: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Run the model or its head; logits, which ranks have of their tokens, are gathered.

    So logits are for short texts. place: of the tokens `[b, s]` among the arguments.
    """
    output = run(*args, **kwargs)
    if kwargs.get("labels") is not None:
        return output
    rows, length = args[place].shape
    return gather_tokens(output.view(rows, length // group.size, -1), group)
