"""Simulations in a process of their own: the simulated device cannot be taken back."""

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any


def call_in_fork(work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)` in a fork, which may fork on; what it raises is raised here."""
    context = multiprocessing.get_context("fork")
    mine, other = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(other, work, args))
    process.start()
    other.close()
    try:
        good, answer = mine.recv()
    finally:
        process.join()
    if not good:
        raise AssertionError(answer)
    return answer


def _answer(pipe: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, work(*args)))
    except BaseException as error:  # noqa: BLE001  (all of it is the test's to judge)
        pipe.send((False, "".join(traceback.format_exception(error))))


def build_settings(
    name: str, ranks: int, *overrides: str, device: str = "24GB"
) -> tuple[type, Any, Any]:
    """(recipe class, plannable config, plan settings) for a shipped config, with rows of
    max_seq_len.
    """
    from recipe_lib.cli.plan_request import find_recipe_class
    from recipe_lib.cli.recipes import find_config_recipe
    from recipe_lib.config import load_config
    from recipe_lib.plan.build_plan import PlanSettings
    from recipe_lib.plan.hardware import find_hardware
    from recipe_lib.plan.simulated_world.planned_data import choose_sequence
    from recipe_lib.plan.simulated_world.shape_only_model import make_plannable

    recipe = find_config_recipe(name)
    cfg, _ = make_plannable(load_config(name, overrides, recipe.schema()))
    sequence = choose_sequence(cfg, "max", ranks=ranks)
    wanted = PlanSettings(hardware=find_hardware(device), ranks=ranks, sequence=sequence, phases=())
    return find_recipe_class(recipe), cfg, wanted
