"""A plan says of tensors that kernels cannot count in 32 bits, from the first element that is too
many.
"""

import pytest

from recipe_lib.plan.build_plan import LIMIT, note_large_tensors
from recipe_lib.plan.tracing.trace import Trace
from tests.plan.made_traces import Writer


def trace_with(num_bytes: int, **fields: object) -> Trace:
    writer = Writer()
    writer.begin_phase("step")
    writer.allocate(2**20, kind="activations", module="model.layers.0")
    writer.allocate(num_bytes, **fields)
    return writer.trace


def test_the_border_is_the_first_element_too_many() -> None:
    assert LIMIT - 1 == 2_147_483_647  # the largest number of 32 bits with a sign
    assert note_large_tensors(trace_with(2 * LIMIT - 2, kind="temporary"), 2) == []
    (note,) = note_large_tensors(
        trace_with(2 * LIMIT, kind="temporary", module="model.layers.1.self_attn"), 2
    )
    assert note.startswith(
        "model.layers.1.self_attn makes a tensor of 2,147,483,648 elements (4.00 GiB): "
    )
    assert "parallel.context" in note and "max_seq_len" in note
    assert note_large_tensors(trace_with(2 * LIMIT, kind="temporary"), 4) == []  # half as many


OTHERS: list[dict[str, object]] = [
    {"kind": "parameters"},
    {"kind": "optimizer"},
    {"kind": "temporary", "device": False},
    {"kind": "gradients", "label": "model.embed_tokens.weight"},
]


@pytest.mark.parametrize("fields", OTHERS)
def test_what_no_kernel_counts_element_by_element_is_left_out(fields: dict[str, object]) -> None:
    assert note_large_tensors(trace_with(8 * LIMIT, **fields), 2) == []
