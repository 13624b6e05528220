"""Tell which part of a step runs, and which module, while a recipe is traced.

A `Tracer` follows a run with `with running.follow(...):`, and asks `running.locate()` at every
operator and allocation that it notes.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# Sequence numbers of autograd's nodes are below it, but for the nodes that accumulate gradients:
# these tell nothing of the module.
_NO_NODE = 2**63


class RunningModules:
    """The modules and optimizers that run inside `with running.follow(...)`.

    Global hooks of torch follow forward and the optimizer's step. Backward runs no modules: there
    the sequence number of the running autograd node tells which module made that node.
    """

    def __init__(self) -> None:
        self._modules: list[str] = []  # names of the modules that run, the innermost last
        self._names: dict[int, str] = {}  # id of a module -> its dotted name
        # Autograd numbers its nodes in the order in which forward makes them. Nodes from number
        # `_sequence[i]` on were made in the module `_sequence_module[i]`.
        self._sequence: list[int] = [0]
        self._sequence_module: list[str] = [""]
        self._backward_module = ""  # name of the module whose backward ran last
        self._num_optimizers = 0  # optimizers whose step runs now

    @contextmanager
    def follow(self, before_optimizer: Callable[[Any], None]) -> Iterator[None]:
        """Follow what runs in the block; `before_optimizer` gets each optimizer that will step."""

        def begin(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._num_optimizers += 1
            before_optimizer(optimizer)

        def end(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._num_optimizers -= 1

        # A handle is a context that removes its hook.
        with (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(begin),
            register_optimizer_step_post_hook(end),
        ):
            yield

    def name_modules(self, model: nn.Module, prefix: str) -> None:
        """Set the names that `locate` returns for a model's modules: `prefix` + dotted name."""
        self._names |= {id(module): prefix + name for name, module in model.named_modules()}

    def locate(self) -> tuple[str, str]:
        """Return (part of the step, as `trace.Op` has it; name of the module) that run now."""
        modules = self._modules
        # Private functions of torch, as no public ones tell which backward and node run.
        if torch._C._current_graph_task_id() == -1:  # no backward runs
            if self._num_optimizers:
                return "optimizer", ""
            return ("forward", modules[-1]) if modules else ("other", "")
        if modules:  # activation checkpointing runs a forward inside of backward
            return "recompute", modules[-1]
        node = torch._C._current_autograd_node()
        if node is not None:
            node_number = node._sequence_nr()
            # Between two numbered nodes, as for hooks on gradients, the module stays the last one.
            if 0 <= node_number < _NO_NODE:
                index = bisect_right(self._sequence, node_number) - 1
                self._backward_module = self._sequence_module[index]
        return "backward", self._backward_module

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # compiled code calls no modules
            return
        # A module that `name_modules` was not given has its class's name.
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
        next_node = torch.autograd._get_sequence_nr()
        module = self._modules[-1] if self._modules else ""
        if next_node == self._sequence[-1]:  # the module before made no node
            self._sequence_module[-1] = module
            return
        self._sequence.append(next_node)
        self._sequence_module.append(module)
