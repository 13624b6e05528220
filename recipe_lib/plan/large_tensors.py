"""Tensors of 2^31 elements or more: known for failing in kernels that count in 32 bits.

FlashAttention 2, which torch's attention runs, and Liger's kernels do (Liger-Kernel issue 803); torch's own pointwise
kernels and those that its compiler makes count such tensors in 64 bits.
"""

from recipe_lib.plan.trace import ALLOC, Storage, Trace
from recipe_lib.units import format_bytes

LIMIT = 2**31
_KINDS = ("activations", "temporary", "logits", "communication", "gradients")


def largest_tensor(trace: Trace, itemsize: int) -> Storage | None:
    """The largest tensor that is computed from tokens, if it may have LIMIT elements. itemsize: bytes of an element."""
    made = (trace.storages[number] for kind, number in trace.events if kind == ALLOC)
    of_tokens = (one for one in made if one.device and one.kind in _KINDS and not one.label)
    largest = max(of_tokens, key=lambda one: one.bytes, default=None)
    return largest if largest is not None and largest.bytes >= LIMIT * itemsize else None


def large_tensor_notes(trace: Trace, itemsize: int) -> list[str]:
    """What to know of a plan with such a tensor."""
    found = largest_tensor(trace, itemsize)
    if found is None:
        return []
    return [
        f"{found.module or 'the step'} makes a tensor of {found.bytes // itemsize:,} elements "
        f"({format_bytes(found.bytes)}): kernels that count in 32 bits, such as FlashAttention 2, fail from {LIMIT:,} "
        "on; share sequences among more ranks (parallel.context), or set max_seq_len lower"
    ]
