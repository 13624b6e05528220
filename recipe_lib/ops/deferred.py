"""Defer weight gradients: backward computes the gradient of the input alone.

A zero-bubble schedule of a pipeline cuts a stage's backward in two: the gradient of its input, for
which another rank waits, and the gradients of its weights, which nobody waits for (arXiv
2401.10241). `parallel.pipeline` runs forward in `enable_split_backward`, backward in
`defer_weight_gradients`, and later `run` of each entry that the second block has collected.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

# The backward of each linear does the cut: it computes the gradient of its input, and for that of
# its weight keeps its input `[.., i]` and the gradient of its output `[.., o]`. So autograd runs
# once, whatever is frozen, checkpointed or sharded, and a checkpointed layer is recomputed once.

T = TypeVar("T")


class Switch(Generic[T]):
    """A value of the whole process that a block can set for its duration.

    It is the same in all threads: on a GPU backward runs in threads of autograd's.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    @contextmanager
    def set(self, value: T) -> Iterator[T]:
        before = self.value
        self.value = value
        try:
            yield value
        finally:
            self.value = before


_split_backward = Switch(False)  # True: forwards use linears whose weight gradient can be deferred
# The list that backward appends to; None: it computes weight gradients at once.
_deferred: "Switch[list[DeferredGradients] | None]" = Switch(None)


@dataclass
class DeferredGradients:
    """Weight gradients of one operator that are not computed yet."""

    # The weights as the linear was given them: parameters, or views of their parts.
    weights: Sequence[Tensor]
    # Returns a gradient, or None, for each weight. It holds inputs and output gradients until then;
    # None: `run` has been called.
    compute: Callable[[], Sequence[Tensor | None]] | None

    def run(self) -> None:
        """Compute the gradients and add them to the parameters', as autograd would.

        Raises RuntimeError if it is called a second time.
        """
        if self.compute is None:
            raise RuntimeError("these gradients have been added already")
        with torch.no_grad():
            gradients = self.compute()
        # It holds inputs and output gradients, which are not needed any more.
        self.compute = None
        pairs = [
            (weight, gradient)
            for weight, gradient in zip(self.weights, gradients, strict=True)
            if gradient is not None
        ]
        del gradients
        # By autograd, as a weight may be a view of a parameter.
        torch.autograd.backward(
            [weight for weight, _ in pairs], [gradient for _, gradient in pairs]
        )


def enable_split_backward() -> AbstractContextManager[bool]:
    """Let forwards inside the block use linears whose weight gradient can be deferred.

    Their backward has to run inside too.
    """
    return _split_backward.set(True)


def defer_weight_gradients() -> "AbstractContextManager[list[DeferredGradients]]":
    """Let backward inside the block defer the weight gradients that can be deferred.

    The block is given the list that they are appended to, last layer first.
    """
    return cast(AbstractContextManager[list[DeferredGradients]], _deferred.set([]))


def disable_deferring() -> AbstractContextManager[Any]:
    """Let backward inside the block compute weight gradients at once.

    The block may lie inside one of `defer_weight_gradients`.
    """
    return _deferred.set(None)


def is_split_backward_enabled() -> bool:
    """Return True inside `enable_split_backward`, but not in code that is being compiled."""
    return not torch.compiler.is_compiling() and _split_backward.value


def is_deferring() -> bool:
    """Return True inside `defer_weight_gradients`."""
    return _deferred.value is not None


def defer_gradients(
    weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor | None]]
) -> None:
    """Defer the gradients of `weights`, which `compute` returns; see `DeferredGradients`.

    Raises RuntimeError if it is called outside of `defer_weight_gradients`.
    """
    if _deferred.value is None:
        raise RuntimeError("nothing is deferred here")
    _deferred.value.append(DeferredGradients(weights, compute))


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `hidden [.., i] @ weight.T [i, o] + bias`; its weight gradient can be deferred."""
    # As torch's functions do, so that a torch function mode sees one call, of a linear.
    if not torch.compiler.is_dynamo_compiling() and has_torch_function((hidden, weight)):
        return cast(Tensor, handle_torch_function(linear, (hidden, weight), hidden, weight, bias))
    if is_split_backward_enabled() and weight.requires_grad and torch.is_grad_enabled():
        return _Linear.apply(hidden, weight, bias)
    return F.linear(hidden, weight, bias)


class _Linear(torch.autograd.Function):
    """The node of `linear` inside `enable_split_backward`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The weight is held, not saved: what checkpointing gives back of a saved tensor is not the
        # parameter, to which a deferred gradient is added.
        ctx.save_for_backward(hidden)
        ctx.weight = weight
        return F.linear(hidden, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (hidden,) = ctx.saved_tensors
        weight = ctx.weight
        hidden_grad = out_grad @ weight.detach() if ctx.needs_input_grad[0] else None
        bias_grad = out_grad.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[2] else None
        if is_deferring():
            hidden = hidden.detach()  # its graph would keep the stage's input until `run`
            defer_gradients([weight], lambda: [_compute_weight_gradient(out_grad, hidden)])
            return hidden_grad, None, bias_grad
        return hidden_grad, _compute_weight_gradient(out_grad, hidden), bias_grad


def _compute_weight_gradient(out_grad: Tensor, hidden: Tensor) -> Tensor:
    """Return `[o, i]`, given the output's gradient `[.., o]` and the input `[.., i]`."""
    return out_grad.flatten(0, -2).t() @ hidden.flatten(0, -2)


def linear_in_dtype(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `hidden [.., i] @ weight.T [i, o]`, computed in `dtype`.

    The operands may be in other dtypes, in which they are saved for backward, hidden only for a
    weight that is trained. The weight's gradient is never deferred.
    """
    return cast(Tensor, _LinearInDtype.apply(hidden, weight, dtype))


class _LinearInDtype(torch.autograd.Function):
    """The node of `linear_in_dtype`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        # Saved before they are converted: backward converts again, so that no wide copy is kept.
        # A frozen weight's node, such as a router's beside adapters, has no use for its input.
        ctx.save_for_backward(hidden if ctx.needs_input_grad[1] else None, weight)
        ctx.dtypes = (dtype, hidden.dtype)
        return F.linear(hidden.to(dtype), weight.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        dtype, hidden_dtype = ctx.dtypes
        hidden_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            hidden_grad = (out_grad @ weight.to(dtype)).to(hidden_dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = _compute_weight_gradient(out_grad, hidden.to(dtype)).to(weight.dtype)
        return hidden_grad, weight_grad, None
