"""Sums of gradients by autograd's engine, which are made in place where no mode looks on.

Where several operators read a tensor, the engine sums its gradients as they arrive. It adds to the one that it has if
nothing else holds that memory (torch/csrc/autograd/input_buffer.cpp), but under a mode of Python, as a trace is one, it
always makes a new tensor. Of a tied embedding that is one more gradient of the whole matrix than a run has.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false

ADD, ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor

# Owners of a gradient that is the engine's alone, as a mode sees it: of the tensor in C++ (the engine, the operator's
# arguments, Python's object), of its memory, and of the object in Python. Torch 2.11 and 2.13, Python 3.11; with other
# counts a sum is traced as it comes, which plans too much.
_ALONE = (4, 2, 4)


def is_summed_in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that a mode sees would, without the mode, have been `add_`. To be called with the mode's own
    arguments and nothing else that refers to what is in them."""
    if func is not ADD or kwargs or torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
        return False
    held, arrived = args
    if not isinstance(arrived, Tensor) or held.shape != arrived.shape:
        return False
    memory = torch._C._storage_Use_Count(held.untyped_storage()._cdata)
    return (held._use_count(), memory, sys.getrefcount(held)) == _ALONE and is_non_overlapping_and_dense_or_false(held)
