"""Which sums of gradients a trace takes for in place, against those that torch's profiler sees
without a mode.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.plan.tracing.operator_costs import ADD, ADD_IN_PLACE, is_summed_in_place

SIZE = 16
STEPS: Sequence[Callable[[Tensor, Tensor], Tensor]] = (
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a @ b,
    lambda a, b: F.linear(a, b),
    lambda a, b: a.t(),
    lambda a, b: torch.cat([a[: SIZE // 2], b[SIZE // 2 :]]),
    lambda a, b: a.reshape(2, -1).reshape(SIZE, SIZE),
    lambda a, b: F.rms_norm(a, (SIZE,), b[0]),
    lambda a, b: F.layer_norm(a, (SIZE,), b[0], b[1]),
    lambda a, b: a.softmax(-1) * b,
    lambda a, b: F.silu(a) + a.std(0) + a.logsumexp(-1, keepdim=True),
    lambda a, b: F.scaled_dot_product_attention(a[None], b[None], a[None])[0],
    lambda a, b: F.embedding(torch.arange(SIZE), a),
    lambda a, b: Doubled.apply(a) + Kept.apply(b),
)


class Doubled(torch.autograd.Function):
    """Adds in its own backward: no sum of the engine's."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        once, again = gradient * 1, gradient * 1
        return once + again


class Kept(torch.autograd.Function):
    """Its gradient is made in forward, and its context holds it on."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.gradient = torch.ones_like(value)
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.gradient


class Sums(TorchDispatchMode):
    """Counts sums of whole matrices in backward, in place and not, and makes them so."""

    def __init__(self) -> None:
        super().__init__()
        self.in_place = self.anew = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is ADD and all(
            isinstance(value, Tensor) and value.shape == (SIZE, SIZE) for value in args
        ):
            if is_summed_in_place(func, args, kwargs or {}):
                self.in_place, func = self.in_place + 1, ADD_IN_PLACE
            else:
                self.anew += 1
        return func(*args, **(kwargs or {}))


def loss_of(seed: int) -> Tensor:
    """Of a graph drawn by chance, in which most values are read several times."""
    dice = random.Random(seed)
    values = [torch.nn.Parameter(torch.ones(SIZE, SIZE)) * 1.0]
    for _ in range(10):
        values.append(dice.choice(STEPS)(dice.choice(values), dice.choice(values)))
    return torch.stack([value.sum() for value in values[-3:]]).sum()


@pytest.mark.slow
def test_sums_are_in_place_where_they_are_without_a_mode() -> None:
    both = [0, 0]
    for seed in range(50):
        loss = loss_of(seed)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            loss.backward()
        whole = [
            event.name
            for event in profiler.events()
            if event.input_shapes[:2] == [[SIZE, SIZE]] * 2
        ]
        real = [whole.count("aten::add_"), whole.count("aten::add")]
        loss, sums = loss_of(seed), Sums()
        with sums:
            loss.backward()
        assert [sums.in_place, sums.anew] == real, seed
        both = [one + more for one, more in zip(both, real, strict=True)]
    assert min(both) > 50  # there were enough of either kind
