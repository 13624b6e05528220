"""Deferred weight gradients and FSDP: gradients that are made after backward are reduced after it too, unit by unit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from recipe_lib.ops.deferred import DeferredGradients


class DeferredReduction:
    """The FSDP units with weights whose gradients are deferred; without FSDP there are none.

    Private parts of torch's FSDP2 are used here: a unit's reduction (`post_backward`), and what its root does at the
    end of backward.
    """

    def __init__(self, model: nn.Module) -> None:
        """model: sharded, or not."""
        self._root: Any = model if isinstance(model, FSDPModule) else None
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._units = [unit for unit in units if any(_is_deferred(entry) for entry in _parameters(unit))]

    @contextmanager
    def unreduced(self) -> Iterator[None]:
        """Inside, these units keep the gradients that backward makes whole, to be reduced with those to come."""
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
                _reduce(current)
            current = unit
            entry.run()
        if self._root is not None:
            for unit in self._units:
                _reduce(unit)
            self._root._get_fsdp_state()._root_post_backward_final_callback()

    def _places(self) -> dict[int, FSDPModule]:
        """The unit of each whole parameter, by its id."""
        entries = [(unit, entry) for unit in self._units for entry in _parameters(unit)]
        return {id(entry._unsharded_param): unit for unit, entry in entries if hasattr(entry, "_unsharded_param")}


def _reduce(unit: FSDPModule) -> None:
    """Reduces what gradients a unit has; all of one type, as those kept since backward have been turned to theirs."""
    for entry in _parameters(unit):
        entry.accumulate_unsharded_grad_if_needed()
        if hasattr(entry, "_unsharded_param"):
            entry.to_accumulated_grad_if_needed()
    _group(unit).post_backward()


def _group(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()._fsdp_param_group


def _parameters(unit: FSDPModule) -> list[Any]:
    group = _group(unit)
    return [] if group is None else group.fsdp_params


def _is_deferred(entry: Any) -> bool:
    """Whether a parameter of FSDP's is the trained weight of a linear."""
    return entry.sharded_param.requires_grad and isinstance(entry._module_info.module, nn.Linear)


def _parameter_of(weight: Tensor) -> Any:
    """The parameter that a weight is, or is a part of."""
    node = weight.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0] if node.next_functions else None
    return weight if node is None else node.variable
