"""When FSDP reduces the gradients of a pipeline's stages.

Deferred weight gradients are made after backward, and reduced after it too, unit by unit. Gradients that are reduced
once a step (`parallel.reduce_gradients`) are with the last action of their stage.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from recipe_lib.ops.deferred import DeferredGradients
from recipe_lib.parallel.fsdp_parts import end_backward, entries_of, reduce_kept_gradients
from recipe_lib.parallel.gradient_accumulation import GradientAccumulation
from recipe_lib.parallel.pipeline.schedules import MAKING_GRADIENTS, Action


class DeferredReduction:
    """The FSDP units of a rank's stages, and those of them whose weights' gradients are deferred; without FSDP none.

    is_last: whether the action that runs is one of those that `begin` has returned.

    Private parts of torch's FSDP2 are used here, by `fsdp_parts`: a unit's reduction, and what its root does at the end
    of backward.
    """

    def __init__(self, model: nn.Module, accumulation: GradientAccumulation | None) -> None:
        """model: sharded, or not. accumulation: whether units reduce once a step; None: with each micro-batch."""
        self._root: Any = model if isinstance(model, FSDPModule) else None
        self._once = accumulation if accumulation is not None and accumulation.once else None
        self.is_last = False
        units = _units_in([model])
        self._units = [unit for unit in units if any(_is_deferred(entry) for entry in entries_of(unit))]

    @contextmanager
    def unreduced(self) -> Iterator[None]:
        """Inside, these units keep the gradients that backward makes whole, to be reduced with those to come."""
        if self._once is not None:  # they do anyway
            yield
            return
        for unit in self._units:
            unit.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for unit in self._units:
                unit.set_requires_gradient_sync(True, recurse=False)

    def add(self, later: list[DeferredGradients]) -> None:
        """Computes the gradients, last layer first, and reduces those of a unit before the next one's are made."""
        units = self._places() if self._root is not None else {}
        current: FSDPModule | None = None
        later.reverse()
        while later:
            entry = later.pop()
            unit = units.get(id(_parameter_of(entry.weights[0])), current)
            if current is not None and unit is not current:
                reduce_kept_gradients(current)
            current = unit
            entry.run()
        if self._root is not None:
            for unit in self._units:
                reduce_kept_gradients(unit)
            end_backward(self._root)

    def begin(self, actions: Sequence[Action]) -> set[int]:
        """Before a step's actions. Where gradients are reduced once a step none is from here on, and the places of the
        actions that do are returned: of each stage the last one."""
        if self._once is None:
            return set()
        self._once.begin(is_last=False)
        return set({one.stage: at for at, one in enumerate(actions) if one.kind in MAKING_GRADIENTS}.values())

    def reduce_if_last(self, modules: Sequence[nn.Module]) -> None:
        """In an action that is the last of its stage: what follows is the last backward of these modules, whose units
        reduce their sums in it, and free their weights.

        Not sooner: at the end of each backward, also one of the head alone, FSDP reduces what any unit has.
        """
        if self.is_last:
            for unit in _units_in(modules):
                unit.set_requires_gradient_sync(True, recurse=False)
                unit.set_reshard_after_backward(True, recurse=False)

    def end(self) -> None:
        """After a step's actions: reduces what no stage has, what is in the root and what several stages share."""
        if self._once is not None:
            self._root.set_requires_gradient_sync(True)
            self._root.set_reshard_after_backward(True)
            end_backward(self._root)

    def _places(self) -> dict[int, FSDPModule]:
        """The unit of each whole parameter, by its id."""
        entries = [(unit, entry) for unit in self._units for entry in entries_of(unit)]
        return {id(entry._unsharded_param): unit for unit, entry in entries if hasattr(entry, "_unsharded_param")}


def _units_in(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    return [unit for module in modules for unit in module.modules() if isinstance(unit, FSDPModule)]


def _is_deferred(entry: Any) -> bool:
    """Whether a parameter of FSDP's is the trained weight of a linear."""
    return entry.sharded_param.requires_grad and isinstance(entry._module_info.module, nn.Linear)


def _parameter_of(weight: Tensor) -> Any:
    """The parameter that a weight is, or is a part of."""
    node = weight.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0] if node.next_functions else None
    return weight if node is None else node.variable
