"""Weight gradients that are deferred are those that autograd would have made, and hold nothing once
they are added.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recipe_lib.ops import deferred
from recipe_lib.ops.deferred import defer_weight_gradients, enable_split_backward, linear


def made(dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 5, 8, generator=generator, dtype=dtype)
    shapes = [(12, 8), (12,), (8, 12)]
    return hidden, [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes
    ]


def network(hidden: Tensor, parameters: list[nn.Parameter], multiply: Any = linear) -> Tensor:
    first, bias, second = parameters
    return multiply(multiply(hidden, first, bias).sin(), second, None)


def plain(dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor | None]]:
    hidden, parameters = made(dtype)
    hidden.requires_grad_()
    network(hidden, parameters, nn.functional.linear).square().sum().backward()
    assert hidden.grad is not None
    return hidden.grad, [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_they_come_when_they_are_asked_for_and_are_the_same(mode: str, dtype: torch.dtype) -> None:
    wanted, gradients = plain(dtype)
    hidden, parameters = made(dtype)
    hidden.requires_grad_()
    runs = []

    def counted(hidden: Tensor) -> Tensor:
        runs.append(1)
        return network(hidden, parameters)

    with enable_split_backward():
        out = (
            checkpoint(counted, hidden, use_reentrant=False) if mode == "full" else counted(hidden)
        )
        with defer_weight_gradients() as later:
            out.square().sum().backward()
    tight = {"atol": 0, "rtol": 0} if dtype == torch.bfloat16 else {"atol": 1e-12, "rtol": 1e-12}
    torch.testing.assert_close(hidden.grad, wanted, **tight)
    assert [parameter.grad is None for parameter in parameters] == [
        True,
        False,
        True,
    ]  # the bias' is made at once
    assert len(later) == 2 and later[0].weights[0] is parameters[2]
    for entry in later:
        entry.run()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, **tight)
    assert len(runs) == (2 if mode == "full" else 1)
    with pytest.raises(RuntimeError, match="added already"):
        later[0].run()


@pytest.mark.slow
def test_nothing_is_held_once_they_are_added() -> None:
    hidden, parameters = made()
    inner = hidden.clone()
    known = weakref.ref(inner)
    with enable_split_backward():
        out = network(inner, parameters)
        with defer_weight_gradients() as later:
            out.sum().backward()
    del inner, out
    gc.collect()
    assert (
        known() is not None or later[1].compute is not None
    )  # the first linear's input is what its gradient takes
    held = [entry for entry in later if entry.compute is not None]
    assert len(held) == 2
    for entry in later:
        entry.run()
    gc.collect()
    assert known() is None and all(entry.compute is None for entry in later)


def test_gradients_add_up_and_go_through_parts_of_parameters() -> None:
    generator = torch.Generator().manual_seed(2)
    fused = nn.Parameter(torch.randn(6, 4, generator=generator, dtype=torch.float64))
    hidden = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    with enable_split_backward():
        for _ in range(2):
            with defer_weight_gradients() as later:
                linear(hidden, fused[2:5]).sum().backward()
            later[0].run()
    wanted = torch.zeros_like(fused)
    wanted[2:5] = 2 * hidden.sum(dim=0)
    torch.testing.assert_close(fused.grad, wanted)


def test_frozen_weights_and_whole_backwards_note_nothing() -> None:
    hidden, parameters = made()
    parameters[0].requires_grad_(False)
    with enable_split_backward():
        with defer_weight_gradients() as later:
            network(hidden.requires_grad_(), parameters).sum().backward()
        assert [entry.weights[0] is parameters[2] for entry in later] == [True]
        parameters[2].grad = None
        network(hidden, parameters).sum().backward()
        assert parameters[2].grad is not None
    assert not deferred.is_deferring() and not deferred.is_split_backward_enabled()
    with pytest.raises(RuntimeError, match="nothing is deferred"):
        deferred.defer_gradients([parameters[0]], lambda: [None])
