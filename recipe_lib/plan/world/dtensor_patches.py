"""torch kept from what would make a trace wrong or slow: DTensor's tensors of the global size and long lists of shards,
and rules that it looks for at every operator."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch._library import simple_registry
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

_PROPAGATIONS = ("_propagate_tensor_meta_non_cached", "propagate_tensor_meta", "propagate_op_sharding_non_cached")


@contextmanager
def propagation_unseen(mute: Callable[[int], None]) -> Iterator[None]:
    """DTensor finds out shapes with tensors of the global size, which no rank ever holds.

    mute: called with 1 before that, with -1 after.
    """

    def unseen(original: Callable[..., Any], finds_shapes: bool) -> Callable[..., Any]:
        def run(propagator: Any, schema: Any, *args: Any, **kwargs: Any) -> Any:
            if finds_shapes and not schema.op._schema.returns:
                return None  # nothing to find out, and an optimizer's thousands of tensors to do it with
            mute(1)
            try:
                return original(propagator, schema, *args, **kwargs)
            finally:
                mute(-1)

        return run

    with ExitStack() as stack:
        for name in _PROPAGATIONS:
            if name in vars(ShardingPropagator):
                replacement = unseen(vars(ShardingPropagator)[name], "tensor_meta" in name)
                stack.enter_context(mock.patch.object(ShardingPropagator, name, replacement))
        yield


def on_shards(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """The arguments of an optimizer's operator over lists of shards, as the plain tensors they are on this rank.

    DTensor looks at each of thousands to find that they are cut alike, which takes seconds. None for anything else.
    """
    if func._schema.returns or not args or not isinstance(args[0], (list, tuple)):
        return None
    found = {
        (tensor.device_mesh, tensor.placements)
        for value in args
        if isinstance(value, (list, tuple))
        for tensor in value
        if isinstance(tensor, DTensor)
    }
    if len(found) != 1:
        return None

    def local(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(local(entry) for entry in value)
        return value._local_tensor if isinstance(value, DTensor) else value

    return tuple(map(local, args)), {name: local(value) for name, value in kwargs.items()}


@contextmanager
def no_rules_under(mode: type) -> Iterator[None]:
    """torch looks at every operator whether somebody has a rule for it under this mode, at 2 us; nobody has."""
    find = simple_registry.find_torch_dispatch_rule

    def find_other(op: Any, kind: type) -> Any:
        return None if kind is mode else find(op, kind)

    with mock.patch.object(simple_registry, "find_torch_dispatch_rule", find_other):
        yield
