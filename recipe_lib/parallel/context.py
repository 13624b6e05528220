"""Divide the tokens of every sequence among ranks: context parallelism by DeepSpeed Ulysses.

`parallelize` calls `shard_sequences` on the meta model. Each of c ranks is given whole
micro-batches `[b, s]`, and computes its consecutive tokens of each row, `[b, s / c, d]`. In
attention the ranks exchange tokens for heads: each has all tokens of some heads. Below, real tokens
are those that are no padding, and labels -100 at tokens without loss.
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

# The loss is that of all tokens, the same on all ranks of the group. A rank's gradients are those
# of its tokens; FSDP, or with ddp the sum once a step, adds them up, since ranks that share a
# sequence are neighbors in the mesh's data dimensions.


def shard_sequences(model: Decoder, parallel: ParallelConfig, world: World) -> None:
    """Change a meta model, in place, to compute this rank's tokens of each sequence.

    Called after `shard_tensors`, as tensor parallelism divides heads and tokens too: the ranks here
    divide a rank's part of them. The model then takes micro-batches whose length is a multiple of
    `parallel.context * parallel.tensor`. Without context parallelism the model is left as it is.
    Raise ConfigError for heads that the ranks cannot share evenly (`check_context`).
    """
    group = world.context
    if group is None:
        return
    check_context(model.spec, parallel)
    for module in model.modules():
        if isinstance(module, Attention):
            # Called before and after attention; both do nothing by default.
            module.to_heads = partial(exchange_for_heads, group=group)
            module.to_tokens = partial(exchange_for_tokens, group=group)
    trunk: Any = model.model  # the decoder without its output head
    trunk.rotary = [partial(_rotate_local_tokens, rotary, group) for rotary in trunk.rotary]
    trunk.prepare = partial(_prepare_local_attention, trunk.prepare, group)
    if trunk.embed_tokens is not None:  # else another stage of a pipeline has it
        embedding: Any = trunk.embed_tokens
        embedding.forward = partial(_embed_local_tokens, embedding.forward, group)
    head: Any = model.head
    if head is not None:  # else another stage has it
        head.forward = partial(_run_local_head, head.forward, group)
    # `Any`, since a type checker refuses to assign to a method.
    assignable_model: Any = model
    if world.pipeline is None:
        assignable_model.forward = partial(_gather_logits, model.forward, group, 0)
    else:  # a call runs one part of the model, and only that of the head returns logits
        assignable_model.run_head = partial(_gather_logits, model.run_head, group, 1)


def refuse_for_context(model: LanguageModel) -> None:
    """Raise ConfigError for an external model, and for one that a recipe has changed.

    Changes are parameters of a recipe's own, and an attention with another forward: code that reads
    other tokens of a sequence would miss those of other ranks. Called before `shard_tensors`, which
    gives each attention another forward.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(
            "parallel.context: found a model whose attention is not ours, expected"
            " model.implementation=native; set that, or parallel.context=1"
        )
    changes = [
        f"another forward of {name}"
        for name, module in model.named_modules()
        if isinstance(module, Attention)
        and vars(module).get("forward", type(module).forward) is not Attention.forward
    ]
    additions = [*find_extra_tensors(model), *changes]
    if additions:
        raise ConfigError(
            f"parallel.context: found {additions[0]}, which the recipe added, expected a model as"
            " it is built: ranks that share sequences have a part of the tokens each; set"
            " parallel.context=1"
        )


def check_context(spec: DecoderSpec, parallel: ParallelConfig) -> None:
    """Raise ConfigError if `parallel.context` ranks cannot share a model's heads evenly.

    The error names the sizes that fit. The heads are those of a rank's tensor-parallel part. If
    there are fewer kv heads than ranks, several ranks get the same one.
    """
    size = parallel.context
    tensor = parallel.tensor
    heads = spec.num_heads // tensor
    kv_heads = max(1, spec.num_kv_heads // tensor)  # with fewer kv heads than ranks each has one
    fitting_sizes = [
        ranks
        for ranks in range(1, heads + 1)
        if heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
    ]
    if size not in fitting_sizes:
        counts = f"{heads} attention heads and {kv_heads} key and value heads"
        counts += f" on each of {tensor} ranks of parallel.tensor" if tensor > 1 else ""
        raise ConfigError(
            f"parallel.context={size}: the model has {counts}, which {size} ranks cannot share"
            f" evenly; sizes that fit: {', '.join(map(str, fitting_sizes))}"
        )


def _rotate_local_tokens(rotary: Rotary, group: Group, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of this rank's tokens.

    positions: of all tokens, `[b, s]`. The frequencies are computed from all of them, as they may
    depend on the largest one.
    """
    return compute_rotation(
        shard_tokens(positions, group), rotary.frequencies(positions), rotary.factor
    )


def _prepare_local_attention(
    prepare: Callable[..., AttentionInfo], group: Group, info: AttentionInfo | None, **shape: Any
) -> AttentionInfo:
    """Prepare attention for whole rows, but note only this rank's tokens as real ones.

    Means over real tokens are computed of this rank's. shape: as `prepare` takes it.
    """
    prepared = prepare(info, **shape)
    if prepared.real is None:
        return prepared
    return replace(prepared, real=prepared.real.shard_rows(group.rank, group.size))


def _embed_local_tokens(
    forward: Callable[[Tensor], Tensor], group: Group, tokens: Tensor
) -> Tensor:
    """Return the embeddings `[b, s / c, d]` of this rank's part of the tokens `[b, s]`."""
    return forward(shard_tokens(tokens, group).contiguous())


def _run_local_head(
    forward: Callable[..., Tensor],
    group: Group,
    hidden: Tensor,
    *,
    labels: Tensor | None = None,
    head_loss: HeadLoss | None = None,
) -> Tensor:
    """Run the output head on this rank's hidden states, and return the loss of all ranks' tokens.

    labels: of all tokens, `[b, s]`. The loss is `[]`, or `[b, s]` if head_loss returns a value for
    each token. Without labels return this rank's logits, which `_gather_logits` gathers.
    """
    if labels is None:
        return forward(hidden)
    loss = forward(hidden, labels=shard_tokens(labels, group), head_loss=head_loss)
    return gather_tokens(loss, group) if loss.dim() else sum_over_ranks(loss, group)


def _gather_logits(
    run: Callable[..., Tensor], group: Group, tokens_index: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Run the model or its head, and gather logits to those of all tokens on every rank.

    With labels the output is a loss, and returned as it is. tokens_index: the index in `args` of
    the tokens `[b, s]`.
    """
    output = run(*args, **kwargs)
    if kwargs.get("labels") is not None:
        return output
    rows, length = args[tokens_index].shape
    return gather_tokens(output.view(rows, length // group.size, -1), group)
