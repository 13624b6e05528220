"""Counts the bytes of tensors that live: every storage that an operator makes, until it dies or is
resized.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While entered, keeps an account of the storages that operators return.

    now(): bytes of those that are alive. peak: the most after any operator. `also(...)`: called
    after each operator and added to the account, for bytes that no operator returns.
    """

    def __init__(self, also: Callable[[], int] = lambda: 0):
        super().__init__()
        self.peak = 0
        self._also = also
        self._storages: dict[int, Callable[[], torch.UntypedStorage | None]] = {}

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        given = {
            storage._cdata for storage in _list_storages((args, kwargs))
        }  # views and in-place results make nothing
        for storage in _list_storages(result):
            if storage._cdata not in given:
                self._storages[storage._cdata] = weakref.ref(storage, self._forget(storage._cdata))
        self.peak = max(self.peak, self.now() + self._also())
        return result

    def _forget(self, key: int) -> Callable[[Any], None]:
        def forget(reference: Any) -> None:
            if self._storages.get(key) is reference:  # else another storage has the address by now
                del self._storages[key]

        return forget

    def now(self) -> int:
        """Bytes of the storages made since entering that are alive."""
        storages = [reference() for reference in list(self._storages.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)


def _list_storages(values: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"
    ]
