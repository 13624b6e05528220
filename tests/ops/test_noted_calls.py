"""Layers whose calls are noted by torch's functions' names: only what gives the same values again is
made again, whatever else such a layer does.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint

from recipe_lib.ops.kept_tensors import KeptTensors
from tests.memory.live_bytes import LiveBytes

Layer = Callable[[Tensor, Tensor], Tensor]
FREED = 4 * 16 * 8  # bytes of a tensor of a layer


@torch.library.custom_op("noted_calls::silu", mutates_args=())
def add_noise(hidden: Tensor) -> Tensor:
    """A custom operator that has the name of a cheap function, and is random."""
    return hidden + torch.rand_like(hidden)


add_noise.register_autograd(lambda context, gradient: gradient)


def softmax(hidden: Tensor) -> Tensor:
    """Another library's function, which is random."""
    if has_torch_function_unary(hidden):
        return handle_torch_function(softmax, (hidden,), hidden)
    return hidden * torch.rand_like(hidden)


class Noisy(Tensor):
    """Tensors whose product is random."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            if getattr(function, "__name__", "") == "mul":
                result = result + torch.rand_like(result)
        return result.as_subclass(cls) if isinstance(result, Tensor) else result


def normalize(hidden: Tensor) -> Tensor:
    """Return what is made again: of 16 rows of 8, `FREED` bytes are not kept."""
    return hidden * hidden.square().mean(-1, keepdim=True).rsqrt()


def drop(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(normalize(hidden), 0.5) @ weight


def write_in_place(hidden: Tensor, weight: Tensor) -> Tensor:
    normed = normalize(hidden)
    product = normed @ weight  # which saves the norm before it is written into
    return F.silu(product + 1, inplace=True) * product


def write_into_a_result(hidden: Tensor, weight: Tensor) -> Tensor:
    normed = normalize(hidden)
    doubled = normed * 2
    doubled.add_(1)
    doubled += normed.detach()
    return doubled @ weight


def write_out(hidden: Tensor, weight: Tensor) -> Tensor:
    biases = torch.ones(8)
    normed = normalize(hidden) + biases
    torch.mul(torch.ones(8), torch.rand(8), out=biases)
    return (normed @ weight) * biases


def call_custom_operator(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.noted_calls.silu(normalize(hidden)) @ weight


def call_another_librarys_function(hidden: Tensor, weight: Tensor) -> Tensor:
    return softmax(normalize(hidden)) @ weight


def call_a_subclass(hidden: Tensor, weight: Tensor) -> Tensor:
    noisy = normalize(hidden).as_subclass(Noisy) * torch.ones(8)
    return noisy.as_subclass(Tensor) @ weight


def map_rows(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: (row * 2).sigmoid() * row)(normalize(hidden)) @ weight


def select_by_mask(hidden: Tensor, weight: Tensor) -> Tensor:
    normed = normalize(hidden)
    (rows,) = torch.where(normed[:, 0] > 0)
    return normed.index_select(0, rows) @ weight + (normed[normed[:, 1] > 0] @ weight).sum()


def branch(hidden: Tensor, weight: Tensor) -> Tensor:
    normed = normalize(hidden)
    return normed @ weight if normed.sum() > 0 else (normed * 2) @ weight


@torch.compiler.disable
def run_uncompiled(hidden: Tensor) -> Tensor:
    return hidden.sigmoid() * hidden


def call_an_undecorated(hidden: Tensor, weight: Tensor) -> Tensor:
    return run_uncompiled(normalize(hidden)) @ weight


def read_inference_tensors(hidden: Tensor, weight: Tensor) -> Tensor:
    with torch.inference_mode():
        bias = torch.ones(8)
    return (normalize(hidden) + bias) @ weight


def checkpoint_a_part(hidden: Tensor, weight: Tensor) -> Tensor:
    inner = checkpoint(lambda x: (normalize(x) @ weight).tanh(), hidden, use_reentrant=False)
    return normalize(inner) @ weight


def read_complex_numbers(hidden: Tensor, weight: Tensor) -> Tensor:
    numbers = torch.view_as_complex(normalize(hidden).reshape(16, 4, 2))
    rotated = numbers * torch.polar(torch.ones(4), torch.arange(4.0))
    return (torch.view_as_real(rotated * rotated.conj()).flatten(1) + hidden) @ weight


def loop(hidden: Tensor, weight: Tensor) -> Tensor:
    """Longer than Python's stack is deep."""
    state = hidden
    for _ in range(2000):
        state = (state * 0.9 + hidden).sigmoid()
    return normalize(state) @ weight


LAYERS: list[Layer] = [
    drop,
    write_in_place,
    write_into_a_result,
    write_out,
    call_custom_operator,
    call_another_librarys_function,
    call_a_subclass,
    map_rows,
    select_by_mask,
    branch,
    call_an_undecorated,
    read_inference_tensors,
    checkpoint_a_part,
    read_complex_numbers,
    loop,
]


def run_layer(layer: Layer, notes: bool) -> list[Tensor]:
    """Return the result of a layer, and the gradients of its input and weight."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(16, 8, generator=generator).requires_grad_()
    weight = torch.randn(8, 8, generator=generator).requires_grad_()
    torch.manual_seed(2)
    if notes:
        with KeptTensors().layer(notes_calls=True):
            result = layer(hidden, weight)
    else:
        result = layer(hidden, weight)
    torch.manual_seed(4)  # backward draws no numbers of forward's
    result.square().sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return [result.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_results_and_gradients_are_the_same_bits(layer: Layer) -> None:
    for actual, expected in zip(run_layer(layer, True), run_layer(layer, False), strict=True):
        assert torch.equal(actual, expected)


def test_a_layer_frees_what_it_can_make_again() -> None:
    def keep(notes: bool) -> int:
        hidden = torch.randn(16, 8).requires_grad_()
        weight = torch.randn(8, 8).requires_grad_()
        with LiveBytes() as live:
            if notes:
                with KeptTensors().layer(notes_calls=True):
                    result = normalize(hidden) @ weight
            else:
                result = normalize(hidden) @ weight
            kept = live.count_bytes()
        del result
        return kept

    # The norm's result and its factors, but for the mean or the factors: one number a row.
    assert keep(False) - keep(True) == FREED + 4 * 16


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.ops.noted_calls.silu, (torch.ones(3),)),
        (softmax, (torch.ones(3),)),
        (F.dropout, (torch.ones(3), 0.5)),
        (torch.bernoulli, (torch.full((3,), 0.5),)),
        (Tensor.add_, (torch.ones(3), 1)),
        (Tensor.__iadd__, (torch.ones(3), 1)),
        (Tensor.mul, (torch.ones(3).as_subclass(Noisy), 2)),
        (torch.where, (torch.ones(3) > 0,)),
        (Tensor.__getitem__, (torch.ones(3), torch.ones(3) > 0)),
        (Tensor.__getitem__, (torch.ones(3), slice(2))),
        (Tensor.transpose, (torch.ones(3, 3), 0, 1)),
        (torch.matmul, (torch.ones(3, 3), torch.ones(3, 3))),
    ],
)
def test_what_is_not_noted(function: Any, args: Any) -> None:
    kept = KeptTensors()
    kept.note(function, args, {}, function(*args))
    assert not kept._nodes


def test_what_is_written_out_is_not_noted() -> None:
    out = torch.empty(3)
    kept = KeptTensors()
    arguments = (torch.ones(3), 2)
    kept.note(torch.mul, arguments, {"out": out}, torch.mul(*arguments, out=out))
    assert not kept._nodes


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (Tensor.add, (torch.ones(3), 1)),
        (Tensor.__rsub__, (torch.ones(3), 1)),
        (torch.mul, (torch.ones(3), nn.Parameter(torch.ones(3)))),
        (F.silu, (torch.ones(3),)),
        (F.gelu, (torch.ones(3),)),
        (Tensor.softmax, (torch.ones(3), -1)),
        (Tensor.__getitem__, (torch.ones(3), torch.tensor([0, 2]))),
        (torch.cat, ([torch.ones(3), torch.ones(3)],)),
        (F.rms_norm, (torch.ones(2, 3), (3,))),
    ],
)
def test_what_is_noted(function: Any, args: Any) -> None:
    kept = KeptTensors()
    kept.note(function, args, {}, function(*args))
    assert any(node.producer is not None for node in kept._nodes.values())


def test_compiled_code_within_a_layer() -> None:
    compiled = torch.compile(lambda hidden: hidden.sigmoid() * hidden, backend="aot_eager")

    def layer(hidden: Tensor, weight: Tensor) -> Tensor:
        return compiled(normalize(hidden)) @ weight

    for actual, expected in zip(run_layer(layer, True), run_layer(layer, False), strict=True):
        assert torch.equal(actual, expected)
