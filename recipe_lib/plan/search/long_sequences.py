"""Ways to have room for a long sequence on several ranks: to share it, to share matrices and tokens, to send what
layers keep to the host. What each sends is reported with its bytes and its time."""

from typing import Any

from recipe_lib.config.mesh import same_batch_ranks
from recipe_lib.plan.search.estimate import Estimate
from recipe_lib.plan.search.trials import Changes
from recipe_lib.units import format_bytes

LONG_SEQUENCE = 8192  # tokens of a sequence from which on the ways are weighed
CONTEXT_KEY, TENSOR_KEY, TURNS_KEY = "parallel.context", "parallel.tensor", "gradient_accumulation_steps"


def contexts(cfg: Any, ranks: int) -> list[int]:
    """Ranks that could share a sequence besides those that do: more of them, up to all of a pipeline's stage."""
    own = cfg.parallel.context
    copies = ranks // same_batch_ranks(cfg.parallel) if ranks % same_batch_ranks(cfg.parallel) == 0 else 1
    return [own * times for times in range(2, copies + 1) if copies % times == 0]


def ways_to_share(cfg: Any, ranks: int) -> list[tuple[Changes, str]]:
    """Changes with a note each: where sequences are long every number of ranks that could share one, or the matrices;
    else twice as many. A step has the same sequences: fewer ranks have batches of their own, and take more turns."""
    parallel, turns = cfg.parallel, cfg.gradient_accumulation_steps
    sizes, found = contexts(cfg, ranks), []
    for size in sizes if is_long(cfg) else sizes[:1]:
        changes = {CONTEXT_KEY: size, TURNS_KEY: turns * size // parallel.context}
        found.append((changes, f"each rank has 1/{size} of every sequence; the same sequences a step"))
    for size in sizes if is_long(cfg) and parallel.context == 1 else []:
        changes = {TENSOR_KEY: parallel.tensor * size, TURNS_KEY: turns * size}
        found.append((changes, f"each rank has 1/{parallel.tensor * size} of every matrix and sequence"))
    return found


def is_long(cfg: Any) -> bool:
    """Whether the ways to have room for a sequence are weighed with each other."""
    return bool(cfg.max_seq_len >= LONG_SEQUENCE)


def traffic_text(one: Estimate, base: Estimate) -> str:
    """What a rank sends to others in a step, and to and from the host, and what it did without the change."""
    return (
        f"sends {format_bytes(one.sent)} a step (without it {format_bytes(base.sent)}), to and from the host "
        f"{format_bytes(one.copied)} ({format_bytes(base.copied)})"
    )
