"""Weight gradients that are deferred: backward computes the gradient of the input alone.

A zero-bubble schedule of a pipeline cuts a stage's backward in two: the gradient of its input, for
which another rank waits, and the gradients of its weights, which nobody waits for (arXiv
2401.10241). Here each linear settles that: its backward computes the one and notes, for the other,
its input `[.., i]` and the gradient of its output `[.., o]`. So autograd runs once, whatever is
frozen, checkpointed or sharded, and a checkpointed layer is computed again once.

    with enable_split_backward():
        hidden = model(...)                  # linears become ones that can be deferred
        with defer_weight_gradients() as deferred:
            hidden.backward(gradient)        # no weight of such a linear has a gradient yet
    for entry in deferred:
        entry.run()                          # adds it to the weight's
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

T = TypeVar("T")


class Switch(Generic[T]):
    """A value of the process, and another one inside a block.

    Not of a thread: on a GPU backward runs in threads of autograd's own.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    @contextmanager
    def set(self, value: T) -> Iterator[T]:
        """Set the value inside the block."""
        before = self.value
        self.value = value
        try:
            yield value
        finally:
            self.value = before


_split_backward = Switch(False)
_deferred: "Switch[list[DeferredGradients] | None]" = Switch(None)


@dataclass
class DeferredGradients:
    """Gradients that are not computed yet."""

    # as the linear saw them, perhaps parts of parameters
    weights: Sequence[Tensor]
    # returns a gradient, or None, for each of them; it holds what that takes, until `run`
    compute: Callable[[], Sequence[Tensor | None]] | None

    def run(self) -> None:
        """Add the gradients to those of the parameters, as autograd would; once."""
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
        torch.autograd.backward(
            [weight for weight, _ in pairs], [gradient for _, gradient in pairs]
        )


def enable_split_backward() -> AbstractContextManager[bool]:
    """Inside, forwards make linears whose weight gradient can be deferred.

    Their backward has to run inside too.
    """
    return _split_backward.set(True)


def defer_weight_gradients() -> "AbstractContextManager[list[DeferredGradients]]":
    """Inside, backward defers the weight gradients that can be.

    The list that the block is given has them, last layer first.
    """
    return cast(AbstractContextManager[list[DeferredGradients]], _deferred.set([]))


def disable_deferring() -> AbstractContextManager[Any]:
    """Inside, backward computes weight gradients at once, in `defer_weight_gradients` too."""
    return _deferred.set(None)


def is_split_backward_enabled() -> bool:
    """Return True if a forward is to be made of linears that can be deferred.

    Not in code that is being compiled.
    """
    return not torch.compiler.is_compiling() and _split_backward.value


def is_deferring() -> bool:
    """Return True if the backward that runs now is to defer what it can."""
    return _deferred.value is not None


def defer_gradients(
    weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor | None]]
) -> None:
    """Put off the gradients of `weights`, which `compute` returns."""
    if _deferred.value is None:
        raise RuntimeError("nothing is deferred here")
    _deferred.value.append(DeferredGradients(weights, compute))


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `hidden [.., i] @ weight.T [i, o] + bias`; its weight gradient can be deferred."""
    # To a mode of torch functions it is one call of a linear, whatever it is made of.
    if not torch.compiler.is_dynamo_compiling() and has_torch_function((hidden, weight)):
        return cast(Tensor, handle_torch_function(linear, (hidden, weight), hidden, weight, bias))
    if is_split_backward_enabled() and weight.requires_grad and torch.is_grad_enabled():
        return _Linear.apply(hidden, weight, bias)
    return F.linear(hidden, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The weight is not saved: what checkpointing gives back of a saved tensor has no way to the
        # parameter.
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
            hidden = hidden.detach()  # its graph would keep the stage's input until then
            defer_gradients([weight], lambda: [_compute_weight_gradient(out_grad, hidden)])
            return hidden_grad, None, bias_grad
        return hidden_grad, _compute_weight_gradient(out_grad, hidden), bias_grad


def _compute_weight_gradient(out_grad: Tensor, hidden: Tensor) -> Tensor:
    return out_grad.flatten(0, -2).t() @ hidden.flatten(0, -2)


def linear_in_dtype(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `hidden [.., i] @ weight.T [i, o]`, computed in a dtype.

    The operands may be in other ones, and are kept for backward as they came.
    """
    return cast(Tensor, _LinearInDtype.apply(hidden, weight, dtype))


class _LinearInDtype(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        # Saved before they are converted: backward converts again, so that no wide copy is kept.
        ctx.save_for_backward(hidden, weight)
        ctx.dtype = dtype
        return F.linear(hidden.to(dtype), weight.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        hidden_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            hidden_grad = (out_grad @ weight.to(ctx.dtype)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = _compute_weight_gradient(out_grad, hidden.to(ctx.dtype)).to(weight.dtype)
        return hidden_grad, weight_grad, None
