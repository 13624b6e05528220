"""Find late copies into memory that is allocated and freed by resizing a storage.

FSDP and layer streaming resize storages, while `LateCopies` (a device whose copies run as late as
its streams allow) follows new tensors only:

    with LateMemory() as check, check.follow_resizes(): step()
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.memory.late_copies import LateCopies


class LateMemory(LateCopies):
    """`LateCopies` that follows resized storages too.

    Memory that a storage gets begins as NaN; a copy from or to a storage of no bytes is too late.
    """

    # Resizes of storages that had memory to more than nothing: both are there at once.
    num_doubled = 0

    @contextmanager
    def follow_resizes(self) -> Iterator[None]:
        """Follow storages that are resized inside."""
        # No dispatch mode sees `resize_` of a storage: it is no operator.
        resize = torch.UntypedStorage.resize_

        def follow_resize(storage: torch.UntypedStorage, size: int) -> object:
            self.num_doubled += bool(size and storage.nbytes())
            result = resize(storage, size)
            # An operation of the computing stream: copies issued before it are stale.
            self.computing.issued += 1
            if size:
                storage.fill_(255)  # all bits set: NaN in every floating-point type
                reference = self._allocations.get(storage._cdata, (lambda: None, 0))[0]
                if reference() is not None:
                    self._allocations[storage._cdata] = (reference, self.computing.issued)  # type: ignore[assignment]
            return result

        torch.UntypedStorage.resize_ = follow_resize  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _build_getter(self, tensor: Tensor) -> Callable[[], Tensor | None]:
        get_tensor = super()._build_getter(tensor)
        storage = tensor.untyped_storage()
        return lambda: get_tensor() if storage.nbytes() else None
