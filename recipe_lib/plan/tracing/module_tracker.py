"""Where a traced program is: which part of a step, and in which module, in backward too."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_NO_NODE = 2**63  # sequence numbers of nodes that accumulate gradients are the largest there are


class Places:
    """Follows modules and optimizers inside `with places.following(...)`; `now()` tells the place.

    Autograd numbers its nodes in the order in which forward makes them; so the number of the node that runs in backward
    tells the module that made it.
    """

    def __init__(self) -> None:
        self._modules: list[str] = []
        self._names: dict[int, str] = {}
        self._sequence: list[int] = [0]
        self._sequence_module: list[str] = [""]
        self._backward_module = ""
        self._optimizing = 0

    @contextmanager
    def following(self, before_optimizer: Callable[[Any], None]) -> Iterator[None]:
        """before_optimizer: called with each optimizer whose step begins."""

        def begin(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._optimizing += 1
            before_optimizer(optimizer)

        def end(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._optimizing -= 1

        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
                register_optimizer_step_pre_hook(begin),
                register_optimizer_step_post_hook(end),
            ):
                stack.callback(handle.remove)
            yield

    def name_modules(self, model: nn.Module, prefix: str) -> None:
        """Modules are called by their dotted names from here on."""
        self._names |= {id(module): prefix + name for name, module in model.named_modules()}

    def now(self) -> tuple[str, str]:
        """The part of the step and the module that run now."""
        modules = self._modules
        if torch._C._current_graph_task_id() == -1:
            if self._optimizing:
                return "optimizer", ""
            return ("forward", modules[-1]) if modules else ("other", "")
        if modules:
            return "recompute", modules[-1]
        node = torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            if 0 <= number < _NO_NODE:
                self._backward_module = self._sequence_module[bisect_right(self._sequence, number) - 1]
        return "backward", self._backward_module

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # compiled code calls no modules
            return
        self._modules.append(self._names.get(id(module), type(module).__name__))
        self._mark()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._modules:
            self._modules.pop()
        self._mark()

    def _mark(self) -> None:
        number = torch.autograd._get_sequence_nr()
        module = self._modules[-1] if self._modules else ""
        if number == self._sequence[-1]:
            self._sequence_module[-1] = module
            return
        self._sequence.append(number)
        self._sequence_module.append(module)
