"""Which kernels the simulated device has: those that the planned GPU would run, where torch would choose by device.

On an unknown device attention falls to the path that holds scores of `[s, s]`, and the norm to a chain of elementwise
operators. These registrations make the simulated device choose what CUDA chooses; for `cpu`, what a CPU does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recipe_lib.config.card_limits import VARLEN_CAPABILITY
from recipe_lib.plan.world.simulated_device import MODULE

_KEY = "AutogradPrivateUse1"
_library: Any = None


def pin_kernels(like_cpu: bool, capability: tuple[int, int] = (8, 0)) -> None:
    """Chooses for the process. like_cpu: as a CPU does, for comparison with real runs there. capability: of a GPU."""
    global _library
    MODULE.capability = capability
    MODULE.kernels = "cpu" if like_cpu else "cuda"
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        _library.impl("scaled_dot_product_attention", attention_kernel, _KEY)
        _library.impl("rms_norm", _rms_norm, _KEY)
        # A kernel of its own, never called, is what makes autograd take the fused norm as one node.
        _library.impl("_fused_rms_norm", _fused_rms_norm, "PrivateUse1")
        _library.impl("dropout", _dropout, _KEY)
        _library.impl("softmax.int", _softmax, _KEY)
        # torch has a shape rule for the fused AdamW and none for the fused SGD; both write into what they are given.
        for name in ("_fused_sgd_", "_fused_sgd_.tensor_lr"):
            _library.impl(name, lambda *args, **kwargs: None, "Meta")
        for name in ("silu_backward", "mish_backward"):
            _library.impl(name, _as_one(getattr(torch.ops.aten, name).default), _KEY)


def attention_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What `F.scaled_dot_product_attention` calls on the planned device."""
    aten = torch.ops.aten
    if MODULE.kernels == "cpu" and query.shape[-1] == value.shape[-1] and dropout_p == 0.0:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    half = query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    flashes = MODULE.kernels != "cpu" and half and width <= 256 and MODULE.capability >= VARLEN_CAPABILITY
    if attn_mask is None and flashes:
        query, key, value = (_padded(tensor, 8) for tensor in (query, key, value))
        scale = scale if scale is not None else width**-0.5
        output = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[
            0
        ]
        return output[..., :width]
    if MODULE.kernels == "cpu" or (enable_gqa and query.shape[-3] != key.shape[-3]):
        return _composite(
            aten.scaled_dot_product_attention.default,
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]


def _rms_norm(hidden: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if MODULE.kernels == "cpu" or (weight is not None and weight.dtype != hidden.dtype):
        return _composite(torch.ops.aten._fused_rms_norm.default, hidden, shape, weight, eps)[0]
    return torch.ops.aten._fused_rms_norm(hidden, shape, weight, eps)[0]


def _fused_rms_norm(*args: Any) -> Any:
    return _composite(torch.ops.aten._fused_rms_norm.default, *args)


def _dropout(hidden: Tensor, rate: float, train: bool) -> Tensor:
    if MODULE.kernels == "cpu" and train and rate > 0:
        return hidden * torch.empty_like(hidden).bernoulli_(1 - rate).div_(1 - rate)
    return _composite(torch.ops.aten.dropout.default, hidden, rate, train)


def _softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """CUDA has a kernel that reads fp16 and writes fp32, without a copy of what it reads; for no other type."""
    if MODULE.kernels == "cuda" and scores.dtype == torch.float16 and dtype == torch.float32:
        return torch.ops.aten._softmax(scores, dim, True)
    return _composite(torch.ops.aten.softmax.int, scores, dim, dtype)


def _as_one(operator: Any) -> Callable[..., Tensor]:
    """An operator that CPU and CUDA have a kernel for, and a device of its own a chain of others."""

    def run(*args: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return run


def _composite(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch does where a device brings nothing of its own."""
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
