"""Multiply by a frozen matrix and its LoRA adapter as one node of autograd.

`adapters.layers` calls `multiply_adapted` where nothing stands between the two products, such as
dropout or DoRA. The adapter's product is added into the frozen one's by the matmul that makes it,
in forward and in backward. As nodes of their own each would write a tensor of that size, and a sum
would read both: with matrices of 16 channels that is most of what an adapter costs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from recipe_lib.ops.fused_kernels import call_with_gradient, register_shaped_work
from recipe_lib.ops.kept_tensors import has_others_function, is_keeping_results
from recipe_lib.ops.mlp import linear_in_dtype


class FrozenProduct(NamedTuple):
    """The product of hidden states and a frozen matrix, as `multiply(hidden, *arguments)`."""

    multiply: Callable[..., Tensor]  # returns a new tensor
    # Returns the gradient of hidden, a new tensor, given that of the result and the arguments.
    differentiate: Callable[..., Tensor]
    arguments: tuple[Any, ...]

    def is_trained(self) -> bool:
        """Return True if one of the arguments is trained, which `multiply_adapted` would ignore."""
        return any(isinstance(part, Tensor) and part.requires_grad for part in self.arguments)


def can_add_in_place(hidden: Tensor, lora_a: Tensor) -> bool:
    """Return True if `multiply_adapted` can be used here, for a product that is not trained.

    Not in code that is being compiled, as compilers fuse sums themselves; not under a torch
    function mode of others, which may count the calls of linears; and not where selective
    checkpointing keeps the results of matmuls, into which nothing may be added.
    """
    return (
        hidden.dtype == lora_a.dtype
        and not torch.compiler.is_compiling()
        and not has_others_function(hidden)
        and not torch._C._is_any_autocast_enabled()
        and not is_keeping_results()
    )


def multiply_adapted(
    hidden: Tensor, frozen: FrozenProduct, lora_a: Tensor, lora_b: Tensor, scaling: float
) -> Tensor:
    """Return `[..., out]`: the product of hidden `[..., in]`, plus `scaling * hidden A^T B^T`.

    lora_a: A `[r, in]`. lora_b: B `[out, r]`. All of one dtype; see `can_add_in_place`. Hidden and
    `[..., r]` are saved for backward.
    """
    narrow = _narrow(hidden, lora_a, scaling)
    return call_with_gradient(
        partial(_multiply, frozen.multiply),
        *(hidden, lora_a, lora_b, narrow, *frozen.arguments),
        # Not `frozen` itself: its tensors are saved, so that hooks see them, and not held.
        differentiate=partial(_differentiate, frozen.differentiate, scaling, hidden.requires_grad),
        kept=range(4 + len(frozen.arguments)),
    )


@register_shaped_work()
@torch.no_grad()
def _narrow(hidden: Tensor, lora_a: Tensor, scaling: float) -> Tensor:
    """Return `[..., r]`: `scaling * hidden A^T`."""
    return F.linear(hidden, lora_a).mul_(scaling)


def _decide(function: Callable[..., Any], *arguments: Any) -> Sequence[Any]:
    """Return what decides the operators of a product: its function by name, and all arguments."""
    return (f"{function.__module__}.{function.__qualname__}", *arguments)


@register_shaped_work(_decide)
def _multiply(
    multiply: Callable[..., Tensor],
    hidden: Tensor,
    lora_a: Tensor,  # `narrow` is made of it; it is an argument as it gets a gradient
    lora_b: Tensor,
    narrow: Tensor,
    *arguments: Any,
) -> Tensor:
    product = multiply(hidden, *arguments)
    _flatten(product).addmm_(_flatten(narrow), lora_b.t())
    return product


@register_shaped_work(_decide)
def _differentiate(
    differentiate: Callable[..., Tensor],
    scaling: float,
    trains_hidden: bool,
    out_grad: Tensor,
    hidden: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    narrow: Tensor,
    *arguments: Any,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden, A and B."""
    out_rows = out_grad.reshape(-1, out_grad.shape[-1])
    narrow_grad = (out_rows @ lora_b).mul_(scaling)
    a_grad = narrow_grad.t() @ hidden.reshape(-1, hidden.shape[-1])
    b_grad = out_rows.t() @ _flatten(narrow)
    if not trains_hidden:
        return None, a_grad, b_grad
    hidden_grad = differentiate(out_grad, *arguments)
    _flatten(hidden_grad).addmm_(narrow_grad, lora_a)
    return hidden_grad, a_grad, b_grad


def _flatten(tensor: Tensor) -> Tensor:
    """Return `[rows, channels]` as a view of `[..., channels]`, to add into."""
    return tensor.view(-1, tensor.shape[-1])


def cast_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return `hidden.to(weight.dtype) @ weight.T`; hidden is saved for backward unconverted."""
    if hidden.dtype == weight.dtype:
        return F.linear(hidden, weight)
    # A torch function mode sees one call, of `linear`, in place of a conversion and a product.
    if not torch.compiler.is_dynamo_compiling() and has_torch_function((hidden, weight)):
        return cast(Tensor, handle_torch_function(linear, (hidden, weight), hidden, weight))
    return linear(hidden, weight)


def linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return `hidden.to(weight.dtype) @ weight.T`, for operands of two dtypes."""
    return linear_in_dtype(hidden, weight, weight.dtype)


def add_scaled(tensor: Tensor, update: Tensor, scaling: float) -> Tensor:
    """Return `tensor + scaling * update`, without the product in memory."""
    # Not `torch.add(..., alpha=scaling)`, the same to the bit: where `update` is a product of two
    # matrices, inductor of torch 2.11 to 2.13 makes an `addmm` of it, and leaves alpha out
    # (docs/upstream/add_alpha.md).
    return torch.sub(tensor, update, alpha=-scaling)
