"""Weight gradients that are deferred: backward gives what goes on to the layer before, and notes
what a weight's takes.

A zero-bubble schedule of a pipeline cuts a stage's backward in two: the gradient of its input, for
which another rank waits, and the gradients of its weights, which nobody waits for (arXiv
2401.10241). Here that is settled in each linear: its backward computes the one and notes, for the
other, its input `[.., i]` and the gradient of its output `[.., o]`. So autograd runs once, whatever
is frozen, checkpointed or sharded, and a checkpointed layer is computed again once.

    with splittable():
        hidden = model(...)                  # linears become ones that can be deferred
        with defer_weight_gradients() as later:
            hidden.backward(gradient)        # no weight of such a linear has a gradient yet
    for entry in later:
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
        """Inside, the value is another."""
        before, self.value = self.value, value
        try:
            yield value
        finally:
            self.value = before


_splittable = Switch(False)
_deferred: "Switch[list[DeferredGradients] | None]" = Switch(None)


@dataclass
class DeferredGradients:
    """Gradients that are not computed yet. weights: as the linear saw them, perhaps parts of
    parameters.

    compute: gives a gradient for each of them; it holds what that takes, until `run`.
    """

    weights: Sequence[Tensor]
    compute: Callable[[], Sequence[Tensor | None]] | None

    def run(self) -> None:
        """Adds the gradients to those of the parameters, as autograd would; once."""
        if self.compute is None:
            raise RuntimeError("these gradients have been added already")
        with torch.no_grad():
            found = self.compute()
        self.compute = None
        pairs = [
            (weight, grad)
            for weight, grad in zip(self.weights, found, strict=True)
            if grad is not None
        ]
        del found
        torch.autograd.backward([weight for weight, _ in pairs], [grad for _, grad in pairs])


def enable_split_backward() -> AbstractContextManager[bool]:
    """Inside, forwards make linears whose weight gradient can be deferred; their backward is run
    inside too.
    """
    return _splittable.set(True)


def defer_weight_gradients() -> "AbstractContextManager[list[DeferredGradients]]":
    """Inside, backward defers the weight gradients that can be, and records them in the list, last
    layer first.
    """
    return cast(AbstractContextManager[list[DeferredGradients]], _deferred.set([]))


def disable_deferring() -> AbstractContextManager[Any]:
    """Inside, backward computes all weight gradients at once, within `defer_weight_gradients`
    too.
    """
    return _deferred.set(None)


def is_split_backward_enabled() -> bool:
    """Whether a forward is to be made of linears that can be deferred; not in code that is being
    compiled.
    """
    return not torch.compiler.is_compiling() and _splittable.value


def is_deferring() -> bool:
    """Whether the backward that runs now is to defer what it can."""
    return _deferred.value is not None


def defer_gradients(
    weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor | None]]
) -> None:
    """Puts off the gradients of `weights`, which `compute` gives."""
    if _deferred.value is None:
        raise RuntimeError("nothing is deferred here")
    _deferred.value.append(DeferredGradients(weights, compute))


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`hidden [.., i] @ weight.T [i, o] + bias`, whose weight gradient can be deferred where that
    is asked for.
    """
    # To a mode it is a call of a linear.
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
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,), (hidden,), weight = gradients, ctx.saved_tensors, ctx.weight
        hidden_grad = gradient @ weight.detach() if ctx.needs_input_grad[0] else None
        bias_grad = gradient.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[2] else None
        if is_deferring():
            hidden = hidden.detach()  # its graph would keep the stage's input until then
            defer_gradients([weight], lambda: [_compute_weight_gradient(gradient, hidden)])
            return hidden_grad, None, bias_grad
        return hidden_grad, _compute_weight_gradient(gradient, hidden), bias_grad


def _compute_weight_gradient(gradient: Tensor, hidden: Tensor) -> Tensor:
    """`[o, i]` of `[.., o]` and `[.., i]`."""
    return gradient.flatten(0, -2).t() @ hidden.flatten(0, -2)


def linear_in_dtype(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`hidden [.., i] @ weight.T [i, o]` in a dtype, of operands that may be in others and are kept
    as they came.
    """
    return cast(Tensor, _LinearIn.apply(hidden, weight, dtype))


class _LinearIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.dtype = dtype
        return F.linear(hidden.to(dtype), weight.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,), (hidden, weight) = gradients, ctx.saved_tensors
        hidden_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            hidden_grad = (gradient @ weight.to(ctx.dtype)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = _compute_weight_gradient(gradient, hidden.to(ctx.dtype)).to(weight.dtype)
        return hidden_grad, weight_grad, None
