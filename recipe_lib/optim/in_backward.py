"""When parameters are stepped, and where the optimizer's states are in the meantime.

Of AdamW's memory gradients and states are three times the parameters. A gradient can go as soon as it is there, if its
parameter is stepped at once (as LOMO does, arXiv 2306.09782), and states can wait in host memory, if each parameter's
are fetched for its step (ZeRO-Offload, arXiv 2101.06840, sends gradients to the host instead, and steps there).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from recipe_lib.config.schema import MemoryConfig
from recipe_lib.models.decoder import Decoder, OutputHead
from recipe_lib.ops.device import has_host
from recipe_lib.ops.head_losses import CrossEntropy, HeadLoss
from recipe_lib.ops.row_gradients import RowGradients, embedding_by_rows
from recipe_lib.optim.clipping import GradNormsInBackward
from recipe_lib.optim.offloaded_states import OffloadedStates
from recipe_lib.optim.row_steps import RowSteps, step_only
from recipe_lib.parallel.parallelize import Parallel


@dataclass(frozen=True)
class OptimizerLevers:
    """What `memory.optimizer_in_backward` and `memory.optimizer_offload` came to.

    norms: of gradients that are gone when `clip_grad_norm` is called; None: none are. place_state: a state's memory
    where it waits, without values; None: next to its parameter. gradient_chunks: of parameters whose gradients backward
    makes in chunks of rows, how many.
    """

    norms: GradNormsInBackward | None = None
    place_state: Callable[[Tensor], Tensor] | None = None
    gradient_chunks: Mapping[nn.Parameter, int] = field(default_factory=dict)


def apply_optimizer_levers(
    optimizer: Optimizer, model: nn.Module, parallel: Parallel, memory: MemoryConfig, device: torch.device
) -> OptimizerLevers:
    """Says when the optimizer steps each parameter, and where its states wait; call it once, after `build_optimizer`.

    `memory.optimizer_offload`: states are in pinned host memory, and `optimizer.step()` takes the parameters one after
    the other, large ones in chunks of rows, each with its states on the device. On a CPU nothing changes.

    `memory.optimizer_in_backward`: a parameter is stepped when backward has made its gradient, which is freed. A
    sharded parameter's is there when FSDP has summed it. Parameters whose gradients are not whole at that moment are
    left for `optimizer.step()` after backward: a tied embedding's come twice, and those that every rank of a
    tensor-parallel group has are summed once a step. There may be one backward a step. Of an embedding and an output
    projection that one rank has whole, backward makes the gradient in chunks of rows, and steps these.
    """
    by_rows, streamed = RowSteps(optimizer), parallel.layers
    instead = streamed.stepped if streamed is not None else None
    offloaded = OffloadedStates(optimizer, device, instead) if memory.optimizer_offload and has_host(device) else None
    place = offloaded.placed if offloaded is not None else None
    if not memory.optimizer_in_backward:
        return OptimizerLevers(place_state=place)
    norms = GradNormsInBackward()
    step_one: Callable[[nn.Parameter], Any] = offloaded.step_one if offloaded else lambda one: step_only(optimizer, one)

    def step(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None:  # torch calls hooks also where backward has given none
            step_in_place_of(parameter, parameter)

    def step_in_place_of(owner: nn.Parameter, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if parameter.grad.device.type != device.type:  # offloaded by FSDP: torch 2.11 does not wait for the copy
            torch.get_device_module(device).current_stream().synchronize()
        if parameter in norms.by_rows:
            raise ValueError(
                "memory.optimizer_in_backward: an embedding or output projection is used outside its loss, such as by "
                "a penalty on its weights, and would be stepped twice; set it to false for this recipe"
            )
        norms.add(parameter)
        step_one(owner)
        parameter.grad = None

    if streamed is not None:
        streamed.step_with(step_in_place_of)
    chosen = _made_at_once(optimizer, model, parallel.tensor_gradients)
    for parameter in chosen:
        if instead is None or instead(parameter) is parameter:
            parameter.register_post_accumulate_grad_hook(step)
    return OptimizerLevers(norms, place, _make_by_rows(model, chosen, offloaded or by_rows, norms, memory))


def _made_at_once(
    optimizer: Optimizer, model: nn.Module, tensor_gradients: Mapping[str, str]
) -> Sequence[nn.Parameter]:
    """The optimizer's parameters whose gradient is whole when backward gives it, once."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if len(names[id(parameter)]) == 1 and tensor_gradients.get(names[id(parameter)][0]) != "partial"
    ]


def _make_by_rows(
    model: nn.Module,
    chosen: Sequence[nn.Parameter],
    steps: OffloadedStates | RowSteps,
    norms: GradNormsInBackward,
    memory: MemoryConfig,
) -> dict[nn.Parameter, int]:
    """Backward makes the gradients of embedding and output projection by rows, where these are plain and large.

    Returns in how many pieces each."""
    made: dict[nn.Parameter, int] = {}
    if not isinstance(model, Decoder):
        return made

    def rows_of(weight: nn.Parameter) -> RowGradients | None:
        plain = any(one is weight for one in chosen) and not isinstance(weight, DTensor)
        pieces = steps.pieces(weight) if plain else []

        @torch.no_grad()
        def take(number: int, gradient: Tensor) -> None:
            norms.add(weight, gradient)
            steps.step_rows(weight, number, gradient)

        if not pieces:
            return None
        made[weight] = len(pieces)
        return RowGradients(pieces, take)

    embedding, head = model.model.embed_tokens, model.lm_head
    if type(embedding) is nn.Embedding and (rows := rows_of(embedding.weight)) is not None:
        embedding.forward = partial(_embed, embedding, rows)  # type: ignore[method-assign]
    if type(head) is OutputHead and (rows := rows_of(head.weight)) is not None:
        head.forward = partial(_project, head.forward, rows)  # type: ignore[method-assign]
    return made


def _project(
    forward: Callable[..., Tensor],
    rows: RowGradients,
    hidden: Tensor,
    *,
    labels: Tensor | None = None,
    head_loss: HeadLoss | None = None,
) -> Tensor:
    """The head's forward, of which only our own cross-entropy gives the weight's gradient by rows."""
    head_loss = head_loss or CrossEntropy()
    if labels is not None and isinstance(head_loss, CrossEntropy):
        return forward(hidden, labels=labels, head_loss=replace(head_loss, rows=rows))
    found = forward(hidden, labels=labels, head_loss=head_loss)
    if found.requires_grad:
        rows.note_whole(found)
    return found


def _embed(embedding: nn.Embedding, rows: RowGradients, tokens: Tensor) -> Tensor:
    return embedding_by_rows(tokens, embedding.weight, rows)
