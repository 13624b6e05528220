"""Memory of a storage that is resized: what is noted, against what torch does."""

import pytest
import torch

from recipe_lib.plan.tracing.tracer import Tracer

BEFORE = 4096  # bytes


@pytest.mark.parametrize("size", [0, BEFORE, 3 * BEFORE])
def test_memory_before_and_after_a_resize_is_there_at_once(size: int) -> None:
    """torch allocates, copies and then frees, unless one of the two sizes is 0."""
    tracer = Tracer("cpu")
    with tracer.activate():
        tracer.begin_phase("step")
        storage = torch.empty(BEFORE, dtype=torch.uint8).fill_(7).untyped_storage()
        address = storage.data_ptr()
        storage.resize_(size)
        was_copied = size > 0 and storage.data_ptr() != address and storage[BEFORE - 1] == 7
    assert was_copied == (size > 0)
    assert tracer.trace.find_active_peaks() == {"step": BEFORE + size}
