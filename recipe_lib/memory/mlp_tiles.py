"""Compute MLPs for some of a batch's tokens at a time, a piece, to have few inner activations.

`apply_memory_levers` calls `chunk_mlps(model, memory.mlp_tiles)`, which replaces the forward of
each layer's MLP (arXiv 2001.04451). A gated MLP of n tokens and f channels has three tensors
`[n, f]` in forward and about six in backward; with c pieces they are `[n / c, f]`. Only the input
`[n, d]` is kept: each piece is computed again in backward.
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
from recipe_lib.ops.attention import RealTokens
from recipe_lib.ops.chunked_heads import split_rows

_in_pieces = deferred.Switch(False)  # True while a piece is computed, in forward or backward

# (`module._parameters`, a name in it, the parameter)
ParameterEntry = tuple[dict[str, Any], str, Tensor]


def chunk_mlps(model: nn.Module, chunks: int, *, is_stage: bool = False) -> None:
    """Let each layer's MLP compute `chunks` pieces of the tokens in turn, in place.

    Call it after whatever changes what an MLP computes (adapters, tensor parallelism, low
    precision), and before layers are checkpointed and sharded by FSDP. Sizes of pieces differ by at
    most a token; with fewer tokens than pieces, each token is a piece. Weight gradients of the
    pieces are summed in the weights' dtype, and each weight gets the sum once.

    chunks: number of pieces; 1: nothing changes. is_stage: True if the model is a rank's part of a
    pipeline. Raises ConfigError for a model without MLPs of our own decoder.
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
        chunked = _make_chunked_forward(cast(MethodType, mlp.forward).__func__, chunks)
        mlp.forward = MethodType(chunked, mlp)  # type: ignore[method-assign]


def is_computing_piece() -> bool:
    """Return True while a piece is computed: selective checkpointing keeps nothing of it."""
    return _in_pieces.value


def _make_chunked_forward(forward: Any, chunks: int) -> Any:
    """Return an MLP's forward that computes at most `chunks` pieces.

    forward: the MLP's, as a function of the module, the hidden states and further arguments.
    """

    def run(mlp: nn.Module, hidden: Tensor, *arguments: Any) -> Tensor:
        flat = hidden.flatten(0, -2)
        num_tokens = flat.shape[0]
        num_pieces = min(chunks, num_tokens)
        modules = list(mlp.modules())
        for argument in arguments:  # a tensor-parallel MLP is given the norm before it
            if isinstance(argument, nn.Module):
                modules += argument.modules()

        # A closure that lives until backward: it must not hold the hidden states.
        def compute_piece(piece: Tensor, part: slice) -> Tensor:
            """Return the MLP's output for `piece`, the tokens `part` of all."""
            piece_arguments = [
                argument.take(part, num_tokens) if isinstance(argument, RealTokens) else argument
                for argument in arguments
            ]
            return cast(Tensor, forward(mlp, piece, *piece_arguments))

        trained = [parameter for _, _, parameter in find_parameters(modules, _is_trained)]
        if not torch.is_grad_enabled() or not (hidden.requires_grad or trained):
            return _compute_pieces(compute_piece, flat, num_pieces).view(*hidden.shape[:-1], -1)
        # An autograd node of its own saves the input, and before the pieces are computed. So the
        # recomputation of a checkpointed layer, which ends at the last saved tensor, ends here: no
        # piece is computed a third time.
        saved = _SaveInput.apply(torch.empty(0, requires_grad=True), flat)
        # `saved` is in a tuple, so that autograd does not take it for an input of the next node.
        settings = (compute_piece, modules, num_pieces, saved)
        out = cast(Tensor, _ChunkedForward.apply(settings, flat, *trained))
        return out.view(*hidden.shape[:-1], -1)

    return run


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad


def find_parameters(
    modules: Iterable[nn.Module], is_selected: Callable[[Tensor], bool]
) -> list[ParameterEntry]:
    """Return the entries of the parameters for which `is_selected` is True.

    A parameter that several modules have has an entry for each.
    """
    entries = []
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and is_selected(parameter):
                entries.append((module._parameters, name, parameter))
    return entries


@contextmanager
def exchange_parameters(
    entries: Sequence[ParameterEntry], replace: Callable[[Any], Tensor]
) -> Iterator[list[Tensor]]:
    """Replace parameters in their modules by `replace(parameter)`, inside the block.

    The block is given the replacements, in the order of `entries`.
    """
    replacements = [replace(parameter) for _, _, parameter in entries]
    with replace_entries(
        (parameters, name, replacement)
        for (parameters, name, _), replacement in zip(entries, replacements, strict=True)
    ):
        yield replacements


def _compute_pieces(
    compute_piece: Callable[[Tensor, slice], Tensor], hidden: Tensor, num_pieces: int
) -> Tensor:
    """Return the MLP's output `[n, d]` of hidden states `[n, d]`, computed piece by piece.

    compute_piece: `fn(hidden [m, d], slice of the m among n) -> [m, d]`.
    """
    out: Tensor | None = None
    with _in_pieces.set(True):
        for part in split_rows(hidden.shape[0], num_pieces):
            piece = compute_piece(hidden[part], part)
            if out is None:  # its dtype and width are known from the first piece
                out = piece.new_empty(hidden.shape[0], piece.shape[-1])
            out[part] = piece
            del piece  # before the next one is made
    assert out is not None
    return out


class _SaveInput(torch.autograd.Function):
    """Saves a tensor for another node, whose backward reads `grad_fn.saved_tensors` of the result.

    So the tensor passes through saved-tensor hooks, those of checkpointing and of offloading.
    anchor: requires a gradient, so that there is a node even if the hidden states need none.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        raise AssertionError("nothing is computed from what this returned")


class _ChunkedForward(torch.autograd.Function):
    """Runs an MLP's pieces without a graph; backward makes the graph of one piece at a time.

    settings: (function that computes a piece, modules with the MLP's parameters, number of pieces,
    result of `_SaveInput`). trained: the parameters that get gradients.
    """

    @staticmethod
    def forward(ctx: Any, settings: tuple[Any, ...], hidden: Tensor, *trained: Tensor) -> Tensor:
        ctx.compute_piece, ctx.modules, ctx.num_pieces, ctx.saved = settings
        ctx.random_state = (torch.get_rng_state(), *get_device_states(hidden))
        return _compute_pieces(ctx.compute_piece, hidden, ctx.num_pieces)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden = ctx.saved.grad_fn.saved_tensors[0].detach()
        ctx.saved = None
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[1] else None
        with (
            # Leaves with the parameters' memory and without their hooks, which would reduce, or
            # step by, the gradient of one piece.
            exchange_parameters(
                find_parameters(ctx.modules, _is_trained),
                lambda parameter: parameter.detach().requires_grad_(),
            ) as leaves,
            _replay_random_state(hidden, ctx.random_state),
            deferred.disable_deferring(),
            _in_pieces.set(True),
        ):
            for part in split_rows(hidden.shape[0], ctx.num_pieces):
                piece = hidden[part].requires_grad_(hidden_grad is not None)
                with torch.enable_grad():
                    out = ctx.compute_piece(piece, part)
                inputs = leaves if hidden_grad is None else [*leaves, piece]
                torch.autograd.backward(out, gradients[0][part], inputs=inputs)
                del out
                if hidden_grad is not None:
                    hidden_grad[part] = piece.grad
                del piece
        return (None, hidden_grad, *(leaf.grad for leaf in leaves))


@contextmanager
def _replay_random_state(hidden: Tensor, state: tuple[Any, ...]) -> Iterator[None]:
    """Draw random numbers (dropout) from a former state inside the block.

    After it the present state is restored. hidden: a tensor on the device that computes. state:
    (the CPU's, indices of devices, their states), as torch's checkpointing has them.
    """
    cpu_state, devices, device_states = state
    device_type = hidden.device.type
    with torch.random.fork_rng(
        devices=devices, enabled=True, device_type="cuda" if device_type == "cpu" else device_type
    ):
        torch.set_rng_state(cpu_state)
        if device_states:
            set_device_states(devices, device_states, device_type=device_type)
        yield
