"""Count the bytes of live tensors: of each storage that an operator makes, until it is freed.

`with LiveBytes() as live: ...; live.peak` is the peak of what ran inside.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While entered, follows the storages that operators return."""

    def __init__(self, also: Callable[[], int] = lambda: 0):
        """Begin at 0 bytes. also: returns bytes to add, of memory that no operator returns."""
        super().__init__()
        self.peak = 0  # the most bytes after any operator
        self._also = also
        # Address of the storage in C++ -> weak reference to it.
        self._storages: dict[int, Callable[[], torch.UntypedStorage | None]] = {}

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        # Views and in-place results share a storage with an argument.
        argument_storages = {storage._cdata for storage in _list_storages((args, kwargs))}
        for storage in _list_storages(result):
            if storage._cdata not in argument_storages:
                self._storages[storage._cdata] = weakref.ref(storage, self._forget(storage._cdata))
        self.peak = max(self.peak, self.count_bytes() + self._also())
        return result

    def _forget(self, key: int) -> Callable[[Any], None]:
        """Return a callback of a weak reference: it drops the storage at address `key`."""

        def forget(reference: Any) -> None:
            if self._storages.get(key) is reference:  # else another storage has the address by now
                del self._storages[key]

        return forget

    def count_bytes(self) -> int:
        """Return the bytes of the live storages that operators have made since entering."""
        storages = [reference() for reference in list(self._storages.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)


def _list_storages(values: Any) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in `values` that are not on the meta device."""
    return [
        leaf.untyped_storage()
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"
    ]
