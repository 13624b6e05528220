"""Late copies into memory that is taken and given back by a storage's size, as FSDP and layer
streaming do it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.memory.late_copies import LateCopies


class LateMemory(LateCopies):
    """As `LateCopies`. Memory that a storage is given begins as NaN, and a copy from or to a
    storage that has none is too late.
    """

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Inside, storages that change their size are followed."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> object:
            result = resize(storage, size)
            self.computing.issued += 1
            if size:
                storage.fill_(255)
                reference = self._made.get(storage._cdata, (lambda: None, 0))[0]
                if reference() is not None:
                    self._made[storage._cdata] = (reference, self.computing.issued)  # type: ignore[assignment]
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _place(self, tensor: Tensor) -> Callable[[], Tensor | None]:
        place, storage = super()._place(tensor), tensor.untyped_storage()
        return lambda: place() if storage.nbytes() else None
