"""MLPs that take a row's tokens in pieces, so that their inner width exists for one piece at a
time.

A gated MLP of n tokens and f channels has three tensors `[n, f]` in forward and about six in
backward; with c pieces they are `[n / c, f]`. What is kept is its input `[n, d]` alone: each piece
is computed again in backward, whatever `memory.activation_checkpointing` says. A layer that is
computed again itself stops before its MLP where nothing after that is kept, so that with `full` a
piece is still computed twice, not three times. (Chunks of a feed-forward layer: arXiv 2001.04451.)
Bytes are those of the simulated device; values are compared on a CPU and a GPU
(docs/measurements/on_a_gpu.md).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from recipe_lib.errors import ConfigError
from recipe_lib.models.decoder import MLP
from recipe_lib.models.language_model import replace_entries
from recipe_lib.models.mixture import Mixture
from recipe_lib.ops import deferred
from recipe_lib.ops.chunked_heads import split_rows
from recipe_lib.ops.real_tokens import RealTokens

_in_pieces = deferred.Switch(False)


def chunk_mlps(model: nn.Module, chunks: int, *, is_stage: bool = False) -> None:
    """Lets each layer's MLP compute `chunks` pieces of the tokens one after the other, in place; 1:
    nothing changes.

    Called after whatever changes what an MLP computes (adapters, sharing, low precision) and before
    layers are checkpointed and sharded. Pieces are even to within a token; fewer tokens than pieces
    are a piece each. The sum of the pieces' weight gradients is made in the weights' dtype, and
    handed to each weight once. Raises ConfigError for a model without MLPs of the decoder's.
    """
    if chunks == 1:
        return
    mlps = [module for module in model.modules() if isinstance(module, (MLP, Mixture))]
    if not mlps and not is_stage:  # a stage of a pipeline may have no layers
        raise ConfigError(
            f"memory.mlp_tiles: found {chunks} for a model without MLPs of ours, expected 1; remove"
            " memory.mlp_tiles"
        )
    for mlp in mlps:
        forward = cast(MethodType, mlp.forward).__func__
        mlp.forward = MethodType(_make_chunked_forward(forward, chunks), mlp)  # type: ignore[method-assign]


def is_computing_piece() -> bool:
    """Whether what is computed now is a piece, of which selective checkpointing is to keep
    nothing.
    """
    return _in_pieces.value


def _make_chunked_forward(forward: Any, chunks: int) -> Any:
    """`forward(mlp, hidden [..., d], *others)` in pieces; modules among the others belong to it, as
    the norm before.
    """

    def run(mlp: nn.Module, hidden: Tensor, *others: Any) -> Tensor:
        flat = hidden.flatten(0, -2)
        pieces = min(chunks, flat.shape[0])
        modules = [
            module
            for each in (mlp, *others)
            if isinstance(each, nn.Module)
            for module in each.modules()
        ]
        places = find_parameters(modules, lambda parameter: parameter.requires_grad)
        trained = [parameter for _, _, parameter in places]
        whole = (forward, (mlp, *others), modules, pieces)
        if not torch.is_grad_enabled() or not (hidden.requires_grad or trained):
            return _compute_pieces(flat, *whole).view(*hidden.shape[:-1], -1)
        # A separate autograd node keeps the input: a layer that is computed again for it ends here,
        # before the pieces.
        kept = (
            _SaveInput.apply(torch.empty(0, requires_grad=True), flat),
        )  # a tuple, so that it is no input of the next
        found = cast(Tensor, _ChunkedForward.apply(whole, kept, flat, *trained))
        return found.view(*hidden.shape[:-1], -1)

    return run


ParameterEntry = tuple[
    dict[str, Any], str, Tensor
]  # `module._parameters`, a name there, and the parameter


def find_parameters(
    modules: Iterable[nn.Module], is_wanted: Callable[[Tensor], bool]
) -> list[ParameterEntry]:
    """Return the places of parameters in modules, those of a shared one all."""
    places = [(module._parameters, name) for module in modules for name in module._parameters]
    return [
        (own, name, one)
        for own, name in places
        if (one := own[name]) is not None and is_wanted(one)
    ]


@contextmanager
def exchange_parameters(
    places: Sequence[ParameterEntry], replace: Callable[[Any], Tensor]
) -> Iterator[list[Tensor]]:
    """Inside, modules have in these places what `replace` makes of their parameters."""
    replacements = [replace(parameter) for _, _, parameter in places]
    with replace_entries(
        (own, name, one) for (own, name, _), one in zip(places, replacements, strict=True)
    ):
        yield replacements


def _compute_pieces(
    hidden: Tensor, forward: Any, others: tuple[Any, ...], modules: Sequence[nn.Module], pieces: int
) -> Tensor:
    """`[n, d]` to `[n, d]`, one piece after the other into one tensor."""
    found: Tensor | None = None
    with _in_pieces.set(True):
        for part in split_rows(hidden.shape[0], pieces):
            piece = forward(others[0], hidden[part], *_take_rows(others[1:], part, hidden.shape[0]))
            if found is None:
                found = piece.new_empty(hidden.shape[0], piece.shape[-1])
            found[part] = piece
            del piece
    assert found is not None
    return found


def _take_rows(arguments: Sequence[Any], part: slice, rows: int) -> list[Any]:
    """Return what else a forward takes, of a piece of its tokens; of ranks that share tokens each
    has the same piece.
    """
    return [
        argument.take(part, rows) if isinstance(argument, RealTokens) else argument
        for argument in arguments
    ]


class _SaveInput(torch.autograd.Function):
    """Keeps a tensor for somebody else's backward, under the hooks that are in force:
    checkpointing's, offloading's.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        raise AssertionError("nothing is computed from what this returned")


class _ChunkedForward(torch.autograd.Function):
    """Forward without a graph; backward makes the graph of one piece at a time."""

    @staticmethod
    def forward(
        ctx: Any, whole: tuple[Any, ...], kept: tuple[Tensor], hidden: Tensor, *trained: Tensor
    ) -> Tensor:
        ctx.whole, ctx.kept = whole, kept[0]
        ctx.random = (torch.get_rng_state(), *get_device_states(hidden))
        return _compute_pieces(hidden, *whole)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,), (forward, others, modules, pieces) = ctx.kept.grad_fn.saved_tensors, ctx.whole
        ctx.kept = None
        hidden = hidden.detach()
        total = torch.empty_like(hidden) if ctx.needs_input_grad[2] else None
        with (
            # Leaves of the same memory, whose gradients nobody else watches: the parameters' own
            # would get each piece's gradient, and step or reduce what is a part of the sum.
            exchange_parameters(
                find_parameters(modules, lambda parameter: parameter.requires_grad),
                lambda parameter: parameter.detach().requires_grad_(),
            ) as leaves,
            _replay_random_state(hidden, ctx.random),
            deferred.disable_deferring(),
            _in_pieces.set(True),
        ):
            for part in split_rows(hidden.shape[0], pieces):
                piece = hidden[part].requires_grad_(total is not None)
                with torch.enable_grad():
                    found = forward(
                        others[0], piece, *_take_rows(others[1:], part, hidden.shape[0])
                    )
                wanted = [*leaves, piece] if total is not None else leaves
                torch.autograd.backward(found, gradients[0][part], inputs=wanted)
                del found
                if total is not None:
                    total[part] = piece.grad
                del piece
        return (None, None, total, *(leaf.grad for leaf in leaves))


@contextmanager
def _replay_random_state(hidden: Tensor, state: tuple[Any, ...]) -> Iterator[None]:
    """Inside, random numbers (dropout) come as they came from that state; after it, as if none had
    been drawn.
    """
    host, devices, states = state
    kind = hidden.device.type
    with torch.random.fork_rng(
        devices=devices, enabled=True, device_type="cuda" if kind == "cpu" else kind
    ):
        torch.set_rng_state(host)
        if states:
            set_device_states(devices, states, device_type=kind)
        yield
