"""Run a simulation in a process of its own, and build what it simulates.

A plan runs a recipe on a simulated device, which cannot be removed from a process once it is there.
So a test calls it with `call_in_fork`; `build_settings` gives the arguments, of a shipped config.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any


def call_in_fork(work: Callable[..., Any], *args: Any) -> Any:
    """Return `work(*args)`, computed in a fork, which may itself start processes.

    Raises AssertionError with the fork's traceback if `work` raises.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(writer, work, args))
    process.start()
    # Else this process's copy of the writer would keep `recv` waiting when the fork dies.
    writer.close()
    try:
        succeeded, result = reader.recv()
    finally:
        process.join()
    if not succeeded:
        raise AssertionError(result)
    return result


def _send_result(pipe: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Send (True, result), or (False, traceback), through the pipe."""
    try:
        pipe.send((True, work(*args)))
    except BaseException as error:  # noqa: BLE001  (all of it is the test's to judge)
        pipe.send((False, "".join(traceback.format_exception(error))))


def build_settings(
    name: str, ranks: int, *overrides: str, device: str = "24GB"
) -> tuple[type, Any, Any]:
    """Return (recipe class, config that needs no weights, plan settings) of a shipped config.

    Every row has max_seq_len tokens. device: a name of the planner's table, or memory such as 24GB.
    """
    from recipe_lib.cli.plan_request import find_recipe_class
    from recipe_lib.cli.recipes import find_config_recipe
    from recipe_lib.config import load_config
    from recipe_lib.plan.build_plan import PlanSettings
    from recipe_lib.plan.hardware import find_hardware
    from recipe_lib.plan.simulated_world.planned_data import choose_sequence
    from recipe_lib.plan.simulated_world.shape_only_model import make_plannable

    recipe = find_config_recipe(name)
    cfg, _ = make_plannable(load_config(name, overrides, recipe.load_schema()))
    sequence = choose_sequence(cfg, "max", ranks=ranks)
    settings = PlanSettings(
        hardware=find_hardware(device), ranks=ranks, sequence=sequence, phases=()
    )
    return find_recipe_class(recipe), cfg, settings
