"""Sums of gradients by autograd's engine, which are made in place where no mode looks on.

Where several operators read a tensor, the engine sums its gradients as they arrive. It adds to the one that it has if
nothing else holds that memory (torch/csrc/autograd/input_buffer.cpp), but under a mode of Python, as a trace is one, it
always makes a new tensor. Of a tied embedding that is one more gradient of the whole matrix than a run has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false

ADD, ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor

# Owners of a tensor and of its memory that a mode sees of a gradient which is the engine's alone: the engine, the
# operator's arguments and Python's wrappers of them. Torch 2.11 and 2.13; with others such a sum is traced as it comes.
_OWNERS, _OWNERS_OF_MEMORY = 4, 2


def is_summed_in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that a mode sees would, without the mode, have been `add_`."""
    if func is not ADD or kwargs or torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
        return False
    held, arrived = args
    return (
        isinstance(arrived, Tensor)
        and held.shape == arrived.shape
        and held._use_count() == arrived._use_count() == _OWNERS
        and torch._C._storage_Use_Count(held.untyped_storage()._cdata) == _OWNERS_OF_MEMORY
        and is_non_overlapping_and_dense_or_false(held)
    )
