"""The search finds what trying every combination finds: what it leaves out could not have been the fastest."""

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.units import GIB
from tests.plan.apart import apart, settings
from tests.plan.configs import wide_model

FIXED = ("memory.optimizer_offload", "optimizer.state_bits", "lora.quantize_base")
ON_DEVICE = ("memory.cpu_offload", *FIXED)
CASES = {
    # Ranks, GiB of a card, rows of a rank, fixed
    "peers": ("llama3/8B_full", 2, 8.0, "h100", 2, ON_DEVICE),
    "host": ("llama3/8B_lora", 1, 1.4, "h100", 2, FIXED),
}


def both(
    folder: Path, name: str, ranks: int, memory: float, device: str, rows: int, fixed: tuple[str, ...]
) -> tuple[Any, Any, int, int]:
    """Changes and speed of the fastest by the search, and by every combination; how many each estimated."""
    from recipe_lib.plan.build_plan import make_plan
    from recipe_lib.plan.result import DOES_NOT_FIT, OutsideTorch
    from recipe_lib.plan.search.fastest_settings import search
    from recipe_lib.plan.search.trial_order import list_groups, micro_batch, pipelines, sharings, sizes
    from recipe_lib.plan.search.trials import (
        CHECKPOINTING,
        changed,
        checkpointing,
        find_differing,
        in_processes,
        try_settings,
    )

    recipe_class, cfg, plain = settings(
        name, ranks, *wide_model(folder, "batch_size=1", f"gradient_accumulation_steps={rows}"), device=device
    )
    hardware = dataclasses.replace(plain.hardware, memory=int(memory * GIB))
    wanted = dataclasses.replace(plain, hardware=hardware, outside=OutsideTorch(0, 0))
    begun = [variant for group in list_groups(cfg, wanted, fixed) for variant in group]
    ways = [*sharings(cfg, ranks, fixed), *pipelines(cfg, wanted, fixed)]
    every = [
        variant | way | checkpointing(cfg, kind) | micro_batch(cfg, way, size)
        for variant, way, kind in product(begun, ways, CHECKPOINTING)
        for size in sizes(cfg, way)
    ]
    result = search(recipe_class, cfg, wanted, want=1, fixed=fixed)
    tried = in_processes(lambda changes: try_settings(recipe_class, cfg, wanted, changes, fixed), every)
    fitting = sorted((one for one in tried if one is not None and one.may_fit), key=lambda one: -one.speed)
    for one in fitting:
        plan, _ = make_plan(recipe_class, changed(cfg, one.changes), dataclasses.replace(wanted, timed=False))
        if plan.verdict != DOES_NOT_FIT:
            break
    (found,) = result.found
    return (
        (found.changes, found.speed),
        (find_differing(cfg, one.changes), one.speed),
        result.tried,
        len(every),
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_the_fastest_is_that_of_every_combination(case: str, tmp_path: Path):
    found, fastest, tried, every = apart(both, tmp_path, *CASES[case])
    print(f"{case}: {found} of {tried}, {fastest} of {every}")
    assert ("memory.stream_layers" in found[0]) == (case == "host")
    assert found[1] == pytest.approx(fastest[1], rel=1e-6)
    assert tried < 0.6 * every
