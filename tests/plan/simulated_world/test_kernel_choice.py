"""The simulated device computes with the operators that CUDA has, one node of autograd each where
CUDA has one.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.plan.simulated_world.simulated_device import pin_kernels, register_device
from tests.plan.apart import call_in_fork

# Operators that torch takes apart on a device without a kernel of its own, and that autograd has a
# formula for where there is one: those that CUDA has a kernel for are pinned, the formulas of the
# others are for nested tensors or CPUs.
PINNED = {"_fused_rms_norm", "silu_backward", "mish_backward"}
APART_ON_CUDA_TOO = {
    "chunk",
    "linear",
    "matmul",
    "matmul.out",
    "max_pool2d",
    "narrow",
    "native_channel_shuffle",
    "value_selecting_reduction_backward",
}


# Views, empty tensors, and what autograd copies a gradient with whose strides are not the leaf's.
LEFT_OUT = {
    "_unsafe_view",
    "alias",
    "copy_",
    "detach",
    "device",
    "empty",
    "empty_like",
    "expand",
    "new_empty_strided",
}
LEFT_OUT |= {"slice", "t", "transpose", "unsqueeze", "view"}


class Names(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def issued() -> dict[str, list[str]]:
    """By case the operators that do work, forward and backward, on the simulated device."""
    device = register_device()
    pin_kernels(like_cpu=False)
    found = {}
    with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
        for case, (call, shapes, dtype, _) in CASES.items():
            leaves = [
                torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
                for shape in shapes
            ]
            with Names() as noted:
                output = call(*leaves)
                output.backward(torch.empty_like(output))
            found[case] = [name for name in noted.found if name not in LEFT_OUT]
    return found


def test_no_operator_is_taken_apart_that_cuda_has_whole() -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and has(name, "CompositeImplicitAutograd")
        and has(name, "Autograd")
    }
    assert found == PINNED | APART_ON_CUDA_TOO


QKV = [(2, 4, 8, 64)] * 3
WIDE = [(2, 4, 8, 320)] * 3
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"


def both(name: str) -> list[str]:
    """Forward and backward of an operator."""
    return [name, f"{name}_backward"]


# What is called, shapes of its arguments, their dtype, and the operators of CUDA.
CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], torch.dtype, list[str]]] = {
    "silu": (F.silu, [(2, 8)], torch.bfloat16, both("silu")),
    "mish": (F.mish, [(2, 8)], torch.bfloat16, both("mish")),
    "gelu": (F.gelu, [(2, 8)], torch.bfloat16, both("gelu")),
    "dropout": (lambda x: F.dropout(x, 0.1), [(2, 8)], torch.bfloat16, both("native_dropout")),
    "softmax": (lambda x: x.softmax(-1), [(2, 8)], torch.float32, ["_softmax", "_softmax_backward_data"]),
    "softmax of fp16 in fp32": (
        lambda x: x.softmax(-1, torch.float32), [(2, 8)], torch.float16, ["_softmax", "_softmax_backward_data"]
    ),
    "softmax of bf16 in fp32": (
        lambda x: x.softmax(-1, torch.float32), [(2, 8)], torch.bfloat16,
        ["_to_copy", "_softmax", "_softmax_backward_data", "_to_copy"],
    ),
    "rms norm": (lambda x, w: F.rms_norm(x, (8,), w), [(2, 8), (8,)], torch.bfloat16, both("_fused_rms_norm")),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (8,), w, b), [(2, 8), (8,), (8,)], torch.bfloat16, both("native_layer_norm")
    ),
    "group norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 8, 4), (8,), (8,)], torch.bfloat16, both("native_group_norm")
    ),
    "attention": (F.scaled_dot_product_attention, QKV, torch.bfloat16, both(FLASH)),
    "attention in fp32": (F.scaled_dot_product_attention, QKV, torch.float32, both(EFFICIENT)),
    "attention of wide heads": (F.scaled_dot_product_attention, WIDE, torch.bfloat16, both(EFFICIENT)),
    "products": (torch.matmul, [(2, 3, 4), (2, 4, 5)], torch.bfloat16, ["bmm"] * 3),
    "convolution": (F.conv1d, [(2, 8, 9), (4, 8, 3)], torch.bfloat16, both("convolution")),
}  # fmt: skip


def test_operators_are_those_of_cuda() -> None:
    assert call_in_fork(issued) == {case: expected for case, (*_, expected) in CASES.items()}
