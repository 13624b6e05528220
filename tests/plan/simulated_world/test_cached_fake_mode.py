"""A remembered answer is the one that torch's own fake tensors give: geometry, type, device, and
what it shares.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from recipe_lib.plan.simulated_world.cached_fake_mode import CachedFakeMode

aten = torch.ops.aten
Arguments = tuple[Sequence[Any], dict[str, Any]]


def plain(*values: Any, **options: Any) -> Arguments:
    return values, options


def matrix() -> Tensor:
    return torch.empty(4, 6)


def turned() -> Tensor:
    return torch.empty(6, 4).t()


def several() -> list[Tensor]:
    return [torch.empty(3), torch.empty(2, 5), torch.empty(0)]


# Operator and what makes its arguments, anew for each call.
CALLS: dict[str, tuple[Any, Callable[[], Arguments]]] = {
    "product": (aten.mm.default, lambda: plain(matrix(), turned().t())),
    "sum of both": (aten.add.Tensor, lambda: plain(matrix(), turned())),
    "broadcast": (aten.mul.Tensor, lambda: plain(turned(), torch.empty(6))),
    "number": (aten.mul.Tensor, lambda: plain(turned(), 2.0)),
    "promotion": (
        aten.add.Tensor,
        lambda: plain(matrix().bfloat16(), torch.empty(6, dtype=torch.float64)),
    ),
    "comparison": (aten.eq.Scalar, lambda: plain(matrix(), 1)),
    "all": (aten.sum.default, lambda: plain(matrix())),
    "rows": (aten.sum.dim_IntList, lambda: plain(turned(), [1], True)),
    "double": (aten._to_copy.default, lambda: plain(turned(), dtype=torch.float64)),
    "half": (aten._to_copy.default, lambda: plain(matrix(), dtype=torch.bfloat16)),
    "like": (aten.empty_like.default, lambda: plain(turned())),
    "like, in rows": (
        aten.empty_like.default,
        lambda: plain(turned(), memory_format=torch.contiguous_format),
    ),
    "zeros": (
        aten.zeros.default,
        lambda: plain([3, 2], dtype=torch.int32, device=torch.device("cpu")),
    ),
    "clone": (aten.clone.default, lambda: plain(matrix()[1:, ::2])),
    "products of a batch": (
        aten.bmm.default,
        lambda: plain(torch.empty(1, 3, 4).transpose(0, 1), torch.empty(3, 4, 2)),
    ),
    "product of one row": (aten.mm.default, lambda: plain(torch.empty(1, 6), turned().t())),
    "unsqueezed": (aten.unsqueeze.default, lambda: plain(turned(), 1)),
    "of another name": (aten.alias.default, lambda: plain(turned())),
    "transposed": (aten.t.default, lambda: plain(matrix())),
    "other way round": (aten.transpose.int, lambda: plain(turned(), 0, 1)),
    "viewed": (aten.view.default, lambda: plain(matrix(), [2, -1])),
    "as another type": (aten.view.dtype, lambda: plain(matrix(), torch.int32)),
    "slice": (aten.slice.Tensor, lambda: plain(matrix(), 0, 1, 3)),
    "slice of a slice": (aten.slice.Tensor, lambda: plain(matrix()[1:], 1, 2, 6, 2)),
    "column": (aten.select.int, lambda: plain(turned(), 1, 3)),
    "expanded": (aten.expand.default, lambda: plain(torch.empty(4, 1), [4, 5])),
    "alias": (aten.detach.default, lambda: plain(matrix())),
    "split": (aten.split.Tensor, lambda: plain(turned(), 3)),
    "into sizes": (aten.split_with_sizes.default, lambda: plain(matrix(), [1, 3])),
    "unbound": (aten.unbind.int, lambda: plain(matrix(), 1)),
    "in place": (aten.add_.Tensor, lambda: plain(matrix(), turned())),
    "in place of the second": (aten.copy_.default, lambda: plain(turned(), matrix())),
    "filled": (aten.zero_.default, lambda: plain(matrix())),
    "same tensor twice": (aten.add_.Tensor, lambda: plain(*[matrix()] * 2)),
    "largest": (aten.max.dim, lambda: plain(turned(), 0)),
    "normed": (
        aten.native_layer_norm.default,
        lambda: plain(matrix(), [6], torch.empty(6), None, 1e-5),
    ),
    "softmax": (aten._softmax.default, lambda: plain(turned(), -1, False)),
    "looked up": (
        aten.embedding.default,
        lambda: plain(matrix(), torch.empty(2, 3, dtype=torch.int64)),
    ),
    "gathered": (
        aten.index_select.default,
        lambda: plain(matrix(), 1, torch.empty(2, dtype=torch.int64)),
    ),
    "joined": (aten.cat.default, lambda: plain(several()[:1] * 2)),
    "stacked": (aten.stack.default, lambda: plain([matrix(), turned()], 1)),
    "norms": (aten._foreach_norm.Scalar, lambda: plain(several())),
    "all products": (aten._foreach_mul.Scalar, lambda: plain(several(), 2.0)),
    "all in place": (aten._foreach_mul_.Scalar, lambda: plain(several(), 2.0)),
    "all of two lists": (aten._foreach_add_.List, lambda: plain(several(), several())),
    "all copied": (aten._foreach_copy_.default, lambda: plain(several(), several())),
}


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


@pytest.mark.parametrize("name", CALLS)
def test_the_second_answer_is_that_of_torch(mode: FakeTensorMode, name: str) -> None:
    operator, make = CALLS[name]
    fast = CachedFakeMode(mode)
    first = make()
    fast.call(operator, *first)
    arguments = make()
    result, remembered = fast.call(operator, *arguments)
    assert remembered is not None
    expected_arguments = make()
    expected = operator(*expected_arguments[0], **expected_arguments[1])
    assert described(result, arguments) == described(expected, expected_arguments)


@pytest.mark.parametrize(
    "name", ["product", "split", "all products", "in place", "all in place", "largest"]
)
def test_a_remembered_answer_can_be_used(mode: FakeTensorMode, name: str) -> None:
    operator, make = CALLS[name]
    fast = CachedFakeMode(mode)
    fast.call(operator, *make())
    arguments = make()
    result, _ = fast.call(operator, *arguments)
    for tensor in tensors_of(result) or tensors_of(arguments):
        assert tensor.fake_mode is mode
        copied = tensor.to(torch.float64) * 2
        assert (copied.shape, copied.dtype) == (tensor.shape, torch.float64)


@pytest.mark.parametrize(
    ("operator", "make"),
    [
        (aten.t_.default, matrix),
        (aten.transpose_.default, matrix),
        (aten.squeeze_.default, lambda: torch.empty(3, 1)),
        (aten.unsqueeze_.default, matrix),
    ],
)
def test_what_changes_the_shape_of_its_argument_is_done_each_time(
    mode: FakeTensorMode, operator: Any, make: Callable[[], Tensor]
) -> None:
    numbers = {aten.transpose_.default: (0, 1), aten.unsqueeze_.default: (0,)}.get(operator, ())
    fast = CachedFakeMode(mode)
    expected = make()
    operator(expected, *numbers)
    for _ in range(3):
        tensor = make()
        result, remembered = fast.call(operator, (tensor, *numbers), {})
        assert remembered is None
        assert result is tensor
        assert (tensor.shape, tensor.stride()) == (expected.shape, expected.stride())


def test_numbers_of_the_same_value_and_another_type_are_other_calls(mode: FakeTensorMode) -> None:
    fast = CachedFakeMode(mode)
    flags = torch.empty(3, dtype=torch.bool)
    found = [
        fast.call(aten.mul.Tensor, (flags, number), {})[0].dtype
        for number in (1, 1.0, True, 1, 1.0, True)
    ]
    assert found == [torch.int64, torch.float32, torch.bool] * 2


def test_another_geometry_is_another_call(mode: FakeTensorMode) -> None:
    fast = CachedFakeMode(mode)
    for tensor in (matrix(), turned(), matrix()[1:], matrix().double(), turned(), matrix()[1:]):
        result, _ = fast.call(aten.mul.Tensor, (tensor, 2.0), {})
        expected = tensor * 2.0
        assert (result.shape, result.stride(), result.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )


def test_another_place_in_the_same_memory_is_another_call(mode: FakeTensorMode) -> None:
    fast = CachedFakeMode(mode)
    whole = matrix()
    for first in (0, 1, 0, 1, 2):
        row, _ = fast.call(aten.select.int, (whole[first : first + 2], 0, 1), {})
        assert row.storage_offset() == 6 * (first + 1)


def test_a_tensor_with_a_known_value_keeps_it_up_to_date(mode: FakeTensorMode) -> None:
    """Optimizers count their steps in such tensors, and read them."""
    fast = CachedFakeMode(mode)
    for _ in range(2):
        steps = torch.tensor(0.0)
        for count in (1, 2):
            fast.call(aten.add_.Tensor, (steps, 1), {})
            assert steps.item() == count


def test_another_default_dtype_is_another_call(mode: FakeTensorMode) -> None:
    fast = CachedFakeMode(mode)
    counts = torch.empty(3, dtype=torch.int64)
    before = torch.get_default_dtype()
    found = []
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
            torch.set_default_dtype(dtype)
            found.append(fast.call(aten.div.Tensor, (counts, 2), {})[0].dtype)
    finally:
        torch.set_default_dtype(before)
    assert found == [torch.float32, torch.bfloat16] * 2


@pytest.mark.slow
def test_a_mode_ends_with_the_next_one() -> None:
    first = FakeTensorMode()
    gone = weakref.ref(first)
    for mode in (first, FakeTensorMode()):
        with mode:
            fast = CachedFakeMode(mode)
            for _ in range(2):
                fast.call(aten.mul.Tensor, (matrix(), 2.0), {})
    del first, mode, fast
    gc.collect()
    assert gone() is None


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for entry in value for tensor in tensors_of(entry)]
    return tensors_of(list(value.values())) if isinstance(value, dict) else []


def described(result: Any, arguments: Arguments) -> Any:
    """What a result is, without its identity: of each tensor geometry, type, device, size of the
    memory, which argument it is, and the number of the memory that it shares.
    """
    if isinstance(result, (list, tuple)):
        return type(result) in (list, tuple) and [described(value, arguments) for value in result]
    if not isinstance(result, Tensor):
        return result
    given = tensors_of(list(arguments))
    memory = [tensor.untyped_storage()._cdata for tensor in given]
    own = result.untyped_storage()
    return {
        "geometry": (tuple(result.shape), result.stride(), result.storage_offset()),
        "type": (result.dtype, result.device, result.layout),
        "bytes": own.nbytes(),
        "is": next((index for index, tensor in enumerate(given) if tensor is result), None),
        "shares": memory.index(own._cdata) if own._cdata in memory else None,
    }
