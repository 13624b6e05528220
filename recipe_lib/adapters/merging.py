"""An adapter added to the weight that it was trained with, some rows at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recipe_lib.ops.fused_kernels import cut_rows

_PIECE_ELEMENTS = 2**24  # elements of the weight that are computed at a time: 64 MiB in fp32


@dataclass(frozen=True)
class Update:
    """The adapter of a weight `[n, m]`: `scaling * second @ first`, with first `[r, m]` and second `[n, r]`.

    lengths: DoRA's, of the n rows, or with `by_column` (an embedding) of the m columns. None: LoRA.
    """

    first: Tensor
    second: Tensor
    scaling: float
    lengths: Tensor | None = None
    by_column: bool = False

    def of_rows(self, start: int, stop: int) -> "Update":
        """The update of these rows of the weight alone; not for one whose lengths are by column."""
        lengths = None if self.lengths is None else self.lengths[start:stop]
        return replace(self, second=self.second[start:stop], lengths=lengths)

    def add_to(self, rows: Tensor, start: int) -> Tensor:
        """Rows of the weight, the first of them number `start`, with the update; DoRA's lengths not yet applied."""
        second = self.second[start : start + len(rows)].to(rows.dtype)
        return torch.addmm(rows, second, self.first.to(rows.dtype), alpha=self.scaling)


@torch.no_grad()
def merge_rows(read_rows: Callable[[int, int], Tensor], count: int, update: Update | None) -> Iterator[Tensor]:
    """The merged weight `[count, m]` in consecutive pieces of rows, computed in fp32 (fp64 for a weight of fp64).

    read_rows: `(start, stop)` to those rows of the weight; it is called twice for an embedding with DoRA, whose
    lengths are those of whole columns. update: None leaves the weight as it is.
    """
    if update is None:
        for start, stop in _pieces(read_rows, count):
            yield _wide(read_rows(start, stop))
        return
    factors = _column_factors(read_rows, count, update) if update.by_column and update.lengths is not None else None
    for start, stop in _pieces(read_rows, count):
        rows = update.add_to(_wide(read_rows(start, stop)), start)
        if factors is not None:
            rows.mul_(factors)
        elif update.lengths is not None:
            lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            rows.mul_(update.lengths[start:stop].to(rows.dtype).unsqueeze(1) / lengths)
        yield rows


def _column_factors(read_rows: Callable[[int, int], Tensor], count: int, update: Update) -> Tensor:
    """What each column `[m]` is multiplied by: its trained length over the one it has with the update."""
    squares = sum(
        update.add_to(_wide(read_rows(start, stop)), start).square_().sum(dim=0)
        for start, stop in _pieces(read_rows, count)
    )
    assert isinstance(squares, Tensor) and update.lengths is not None
    return update.lengths.to(squares.dtype) / squares.sqrt_()


def _wide(rows: Tensor) -> Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _pieces(read_rows: Callable[[int, int], Tensor], count: int) -> list[tuple[int, int]]:
    width = read_rows(0, 1).shape[1] if count else 1
    return cut_rows(count, width, _PIECE_ELEMENTS)
