"""The part of a step and the module that run now in a traced program.

Hooks on modules and optimizers tell it in forward and in the optimizer's step. Backward runs no
modules: there the number of the autograd node that runs tells which module made it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

_NO_NODE = 2**63  # nodes that accumulate gradients have larger numbers than any that a module made


class RunningModules:
    """The modules and optimizers that run inside `with running.follow(...)`."""

    def __init__(self) -> None:
        self._modules: list[str] = []  # names of those that run, the innermost last
        self._names: dict[int, str] = {}  # id of a module -> its dotted name
        # Autograd numbers its nodes in the order in which forward makes them. Nodes from number
        # `_sequence[i]` on were made in the module `_sequence_module[i]`.
        self._sequence: list[int] = [0]
        self._sequence_module: list[str] = [""]
        self._backward_module = ""
        self._num_optimizers = 0  # whose step runs

    @contextmanager
    def follow(self, before_optimizer: Callable[[Any], None]) -> Iterator[None]:
        """Follow what runs inside the block.

        before_optimizer: called with each optimizer whose step begins.
        """

        def begin(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._num_optimizers += 1
            before_optimizer(optimizer)

        def end(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._num_optimizers -= 1

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
        """Call a model's modules by their dotted names from here on."""
        self._names |= {id(module): prefix + name for name, module in model.named_modules()}

    def locate(self) -> tuple[str, str]:
        """Return the part of the step and the name of the module that run now."""
        modules = self._modules
        if torch._C._current_graph_task_id() == -1:  # no backward runs
            if self._num_optimizers:
                return "optimizer", ""
            return ("forward", modules[-1]) if modules else ("other", "")
        if modules:
            return "recompute", modules[-1]
        node = torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            # Between two numbered nodes, as for hooks on gradients, the module stays the last one.
            if 0 <= number < _NO_NODE:
                index = bisect_right(self._sequence, number) - 1
                self._backward_module = self._sequence_module[index]
        return "backward", self._backward_module

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # compiled code calls no modules
            return
        self._modules.append(self._names.get(id(module), type(module).__name__))
        self._mark_sequence()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._modules:
            self._modules.pop()
        self._mark_sequence()

    def _mark_sequence(self) -> None:
        """Note that nodes made from here on belong to the innermost module."""
        number = torch.autograd._get_sequence_nr()
        module = self._modules[-1] if self._modules else ""
        if number == self._sequence[-1]:  # the module before made no node
            self._sequence_module[-1] = module
            return
        self._sequence.append(number)
        self._sequence_module.append(module)
