"""What the search leaves out without a simulation: its bounds are under what simulations say, and
not far under.
"""

from itertools import product
from typing import Any

import pytest

from tests.plan.apart import build_settings, call_in_fork

WAYS = (
    "batch_size=1 gradient_accumulation_steps=4",
    (
        "batch_size=2 gradient_accumulation_steps=2 parallel.reshard_after_forward=false"
        " parallel.reduce_gradients=step"
    ),
    "batch_size=4 gradient_accumulation_steps=1 parallel.data_replicate=2",
    "batch_size=4 gradient_accumulation_steps=2 parallel.pipeline=2 parallel.pipeline_schedule=zbv",
)
STATES = "optimizer.implementation=single"


def bounds(name: str, kind: str, ways: tuple[str, ...]) -> list[tuple[str, str, float, float]]:
    """Of every way by every other: bound over what a simulation says, of bytes and of seconds."""
    from recipe_lib.plan.search.trial_order import compute_least_bytes
    from recipe_lib.plan.search.trials import estimate_run

    found: dict[str, Any] = {}
    for way in ways:
        more = (
            *way.split(),
            f"memory.activation_checkpointing={kind}",
            "parallel.strategy=fsdp",
            STATES,
        )
        recipe_class, cfg, wanted = build_settings(name, 4, *more, device="rtx4090")
        found[way] = cfg, wanted, estimate_run(recipe_class, cfg, wanted)
    rows = []
    for way, known in product(ways, ways):
        (cfg, wanted, quickly), (known_cfg, _, other) = found[way], found[known]
        if (
            known_cfg.parallel.pipeline > 1
        ):  # a search begins with the others, and knows their layers
            continue
        held = compute_least_bytes(cfg, wanted, other, known_cfg, other) / quickly.active
        rows.append((way, known, held, other.least_seconds / quickly.seconds))
    return rows


def test_a_backward_need_not_find_gradients_where_all_may_be_deferred():
    from recipe_lib.plan.search.trial_order import compute_least_bytes
    from recipe_lib.plan.search.trials import Estimate

    known = Estimate(
        0, 0, 0, 0, 1.0, 1000, held=2**30, parameters=2**29, trained=2**29, module="", kept=2**28
    )
    _, alone, _ = build_settings("demo/full", 2)
    least = {}
    for schedule in ("1f1b", "zbv"):
        more = (
            "parallel.pipeline=2",
            f"parallel.pipeline_schedule={schedule}",
            "gradient_accumulation_steps=4",
        )
        _, cfg, wanted = build_settings("demo/full", 2, *more)
        least[schedule] = compute_least_bytes(cfg, wanted, known, alone, known) - 2**30
    assert least == {
        "1f1b": 2**28 + 2**27 * cfg.batch_size,
        "zbv": max(2**28, 2**27 * cfg.batch_size),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "ways"),
    [("llama3/8B_full", "full", WAYS), ("llama3/8B_lora", "none", WAYS[:3:2])],
)
def test_bounds_are_under_what_simulations_say(name: str, kind: str, ways: tuple[str, ...]):
    rows = call_in_fork(bounds, name, kind, ways)
    for way, known, held, seconds in rows:
        print(f"{way} by {known}: {held:.3f} {seconds:.3f}")
    assert (
        max(held for _, _, held, _ in rows) <= 1.005
    )  # what an estimate of active bytes may be off by
    assert max(seconds for *_, seconds in rows) <= 1
    assert max(held for _, _, held, _ in rows) > 0.9
    assert sum(held for _, _, held, _ in rows) / len(rows) > 0.7
