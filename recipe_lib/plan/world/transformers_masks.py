"""Masks that models of transformers make in a run, in a simulation, where tensors have no values to go by."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from recipe_lib.config.schema import FullFinetuneConfig


@contextmanager
def masks_of_a_run(cfg: FullFinetuneConfig, documents: int) -> Iterator[None]:
    """Inside, transformers looks for documents in positions as it does in a run.

    With values it finds that a row is one document, and makes no mask; without, it takes rows for packed ones and makes
    one of b s s bytes. documents: of a packed row.
    """
    if cfg.model.implementation != "transformers":
        yield
        return
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices

    def find(positions: Tensor) -> Tensor | None:
        found = original(positions)
        if found is None or (cfg.data.packing and documents > 1):
            return found
        (found[:, -1] == 0).all()  # what a run looks at, with the memory that it takes
        return None

    with mock.patch.object(masking_utils, "find_packed_sequence_indices", find):
        yield
