"""The search finds what trying every combination finds: what it leaves out could not have been the
fastest.
"""

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.units import GIB
from tests.plan.apart import build_settings, call_in_fork
from tests.plan.configs import build_wide_model

RANKS = 2
ROWS = 2  # of a rank
MEMORY = 8 * GIB  # of a card
FIXED = (
    "memory.loss_chunks",
    "memory.cpu_offload",
    "memory.optimizer_offload",
    "optimizer.state_bits",
    "parallel.data_replicate",
)


def both(folder: Path) -> tuple[Any, Any, int, int]:
    """Changes and speed of the fastest by the search, and by every combination; how many each
    estimated.
    """
    from recipe_lib.plan.build_plan import make_plan
    from recipe_lib.plan.plan_schema import DOES_NOT_FIT, OutsideTorch
    from recipe_lib.plan.search.fastest_settings import search
    from recipe_lib.plan.search.trial_order import (
        list_groups,
        list_micro_batch_sizes,
        list_pipelines,
        list_sharings,
        set_micro_batch,
    )
    from recipe_lib.plan.search.trials import (
        CHECKPOINTING,
        apply_changes,
        find_differing,
        run_in_processes,
        set_checkpointing,
        try_settings,
    )

    recipe_class, cfg, plain = build_settings(
        "llama3/8B_full",
        RANKS,
        *build_wide_model(folder, "batch_size=1", f"gradient_accumulation_steps={ROWS}"),
        device="h100",
    )
    hardware = dataclasses.replace(plain.hardware, memory=MEMORY)
    wanted = dataclasses.replace(plain, hardware=hardware, outside=OutsideTorch(0, 0))
    begun = [variant for group in list_groups(cfg, wanted, FIXED) for variant in group]
    ways = [*list_sharings(cfg, RANKS, FIXED), *list_pipelines(cfg, wanted, FIXED)]
    every = [
        variant | way | set_checkpointing(cfg, kind) | set_micro_batch(cfg, way, size)
        for variant, way, kind in product(begun, ways, CHECKPOINTING)
        for size in list_micro_batch_sizes(cfg, way)
    ]
    result = search(recipe_class, cfg, wanted, want=1, fixed=FIXED)
    tried = run_in_processes(
        lambda changes: try_settings(recipe_class, cfg, wanted, changes, FIXED), every
    )
    fitting = sorted(
        (one for one in tried if one is not None and one.may_fit), key=lambda one: -one.speed
    )
    for one in fitting:
        plan, _ = make_plan(
            recipe_class, apply_changes(cfg, one.changes), dataclasses.replace(wanted, timed=False)
        )
        if plan.verdict != DOES_NOT_FIT:
            break
    (found,) = result.fitting
    return (
        (found.changes, found.speed),
        (find_differing(cfg, one.changes), one.speed),
        result.tried,
        len(every),
    )


@pytest.mark.slow
def test_the_fastest_is_that_of_every_combination(tmp_path: Path):
    found, fastest, tried, every = call_in_fork(both, tmp_path)
    print(f"{found} of {tried}, {fastest} of {every}")
    assert found[1] == pytest.approx(fastest[1], rel=1e-6)
    assert tried < 0.6 * every
