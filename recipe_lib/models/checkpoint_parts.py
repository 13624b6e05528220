"""This rank's part of a model's parameters, in the order of the checkpoint's tensors.

Tensor parallel cuts a matrix that holds several others (queries, keys and values, gate and up) within each of them, so
that the ranks' parts one after the other are not in the file's order. `LanguageModel.runs` says of such a parameter
along which dimension, and which runs `(start, stop)` of the file follow one another.
"""

from typing import Any

from torch import Tensor, nn

from recipe_lib.models.language_model import LanguageModel
from recipe_lib.ops.dtensor_shards import Runs, local_part


def all_runs(model: nn.Module) -> dict[str, Runs]:
    """The runs of every parameter that is not in the file's order, by name."""
    return dict(model.runs) if isinstance(model, LanguageModel) else {}


def runs_of(model: nn.Module, name: str) -> Runs | None:
    """The dimension and the runs of a parameter that is not in the file's order; None for all others."""
    return all_runs(model).get(name)


def own_parts(model: nn.Module, name: str, parameter: Tensor) -> list[tuple[Tensor, tuple[int, ...]]]:
    """This rank's part of a parameter in pieces, which share memory with it, and where each begins in the file."""
    local, offset = local_part(parameter)
    found = runs_of(model, name)
    if found is None:
        return [(local, offset)]
    dim, runs = found
    pieces, at = [], -offset[dim]  # of a run, counted from where this rank's part begins
    for start, stop in runs:
        low, high = max(at, 0), min(at + stop - start, local.shape[dim])
        if low < high:
            begins: Any = (*offset[:dim], start + low - at, *offset[dim + 1 :])
            pieces.append((local.narrow(dim, low, high - low), begins))
        at += stop - start
    return pieces


def in_file_order(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """A whole parameter, gathered from the ranks, as the file has it."""
    return ordered(whole, runs_of(model, name))


def ordered(whole: Tensor, found: Runs | None) -> Tensor:
    """A whole tensor whose runs follow one another, in the order of the file."""
    if found is None:
        return whole
    dim, runs = found
    result = whole.new_empty(whole.shape)
    at = 0
    for start, stop in runs:
        result.narrow(dim, start, stop - start).copy_(whole.narrow(dim, at, stop - start))
        at += stop - start
    return result
