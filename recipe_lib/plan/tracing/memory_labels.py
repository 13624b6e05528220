"""What memory is: labels and kinds that are known when it is there already."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from recipe_lib.plan.trace import Trace
from recipe_lib.plan.tracing.operator_costs import tensors_in
from recipe_lib.plan.tracing.plain_tensors import plain_parts


class HeldStorage:
    """A storage of torch that is alive; its numbers in the trace change when it is resized."""

    __slots__ = ("history", "number", "reference")

    def __init__(self, number: int) -> None:
        self.number = number
        self.history = [number]
        self.reference: Any = None


class MemoryLabels:
    """Labels storages of the present trace. held: those that are alive, by their address."""

    def __init__(self, trace: Callable[[], Trace], held: dict[int, HeldStorage]) -> None:
        self._trace, self._held = trace, held

    def label(self, tensor: Tensor, kind: str, label: str) -> None:
        """Says what a tensor's memory is, now and in every size it had."""
        for part in plain_parts(tensor):
            held = self._held.get(part.untyped_storage()._cdata)
            for number in held.history if held else ():
                storage = self._trace().storages[number]
                if storage.kind == kind and storage.label not in ("", label):
                    storage.label = common_label(storage.label, label)
                else:
                    storage.kind, storage.label = kind, label

    def of_operator(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """What FSDP's own operators read and write is known by their names."""
        if name == "fsdp::all_gather_copy_in":
            self.mark(result, "communication")
        elif name == "fsdp::split_with_sizes_copy":
            self.mark(kwargs.get("out", args[-1]), "gathered")
        elif name == "fsdp::chunk_cat":
            self.mark(kwargs.get("out", args[-1]), "communication")

    def mark(self, value: Any, kind: str) -> None:
        for tensor in tensors_in(value):
            held = self._held.get(tensor.untyped_storage()._cdata)
            if held is not None:
                for number in held.history:
                    self._trace().storages[number].kind = kind

    def of_returned(self, name: str, args: Sequence[Any]) -> None:
        """What backward copies back from pinned memory that forward took is what forward kept for it."""
        tensors = tensors_in(args)
        source = self._held.get(tensors[-1].untyped_storage()._cdata)
        if name == "aten::copy_" and source is not None and self._trace().storages[source.number].part == "forward":
            self.mark(tensors[0], "activations")

    def of_tensor(self, tensor: Tensor) -> str:
        held = self._held.get(tensor.untyped_storage()._cdata)
        return self._trace().storages[held.number].label if held is not None else ""


def common_label(first: str, second: str) -> str:
    """The label of memory that two parameters share, such as the gradients of an FSDP unit: `model.layers.0.*`."""
    shared = os.path.commonprefix([first.split("."), second.split(".")])
    return ".".join([*(part for part in shared if part != "*"), "*"])
