"""Derive recipes as users do from the shipped one, with steps whose micro-batches are not alike.

`derive_recipe(sum_losses)` is the recipe whose step is `sum_losses`. A plan, which computes a run's
peak of memory from few simulated micro-batches, has to be right for each of STEPS.
"""

from collections.abc import Callable
from typing import Any

import torch

from tests.recipes.runs import FULL, get_recipe_class, import_recipe_module


def derive_recipe(step: Callable[[Any, Any], None]) -> type:
    """Return a recipe whose training step is `step(recipe, batches)`, then the optimizer's.

    step: runs forward and backward of all micro-batches.
    """

    class Own(get_recipe_class(import_recipe_module(FULL))):  # type: ignore[misc]
        def train_step(self, batches: Any) -> None:
            step(self, batches)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    return Own


def sum_losses(recipe: Any, batches: Any) -> None:
    """Run one backward of all micro-batches, so that all their activations are alive at once."""
    torch.stack([recipe.compute_loss(batch) for batch in batches.micro_batches]).sum().backward()


def keep_each(recipe: Any, batches: Any) -> None:
    """Keep a tensor of every micro-batch until the step's end."""
    kept = []
    for batch in batches.micro_batches:
        recipe.compute_loss(batch).backward()
        kept.append(torch.zeros(40_000, device=recipe.device))


def keep_from_the_third(recipe: Any, batches: Any) -> None:
    """Keep a tensor of every micro-batch but the first two: those alone are alike."""
    kept = []
    for number, batch in enumerate(batches.micro_batches):
        recipe.compute_loss(batch).backward()
        if number >= 2:
            kept.append(torch.zeros(40_000, device=recipe.device))


def allocate_after_every_fourth(recipe: Any, batches: Any) -> None:
    """Allocate more for a moment after every fourth micro-batch, with all gradients alive."""
    for number, batch in enumerate(batches.micro_batches):
        recipe.compute_loss(batch).backward()
        if number % 4 == 3:
            torch.zeros(400_000, device=recipe.device)


def take_by_number(recipe: Any, batches: Any) -> None:
    """Take micro-batches by index, without iterating; keep a tensor of each."""
    kept = []
    for number in range(recipe.cfg.gradient_accumulation_steps):
        recipe.compute_loss(batches.micro_batches[number]).backward()
        kept.append(torch.zeros(40_000, device=recipe.device))


def run_halves(recipe: Any, batches: Any) -> None:
    """Run one backward for each half of the micro-batches."""
    half = len(batches.micro_batches) // 2
    for part in (batches.micro_batches[:half], batches.micro_batches[half:]):
        torch.stack([recipe.compute_loss(batch) for batch in part]).sum().backward()


def copy_gradients_after_the_last(recipe: Any, batches: Any) -> None:
    """Copy all gradients after the last micro-batch."""
    for number, batch in enumerate(batches.micro_batches):
        recipe.compute_loss(batch).backward()
        if number == len(batches.micro_batches) - 1:
            copies = [parameter.grad.clone() for parameter in recipe.model.parameters()]
            del copies


def run_as_shipped(recipe: Any, batches: Any) -> None:
    """Run micro-batches as the shipped recipe does."""
    for batch in batches.micro_batches:
        recipe.compute_loss(batch).backward()


def run_from_a_list(recipe: Any, batches: Any) -> None:
    """Run micro-batches as the shipped recipe does, from a list of them."""
    for batch in list(batches.micro_batches):
        recipe.compute_loss(batch).backward()


def keep_twice_as_much(recipe: Any, batches: Any) -> None:
    """Keep twice as much of each micro-batch as of the one before it: no two are alike."""
    kept = []
    for number, batch in enumerate(batches.micro_batches):
        recipe.compute_loss(batch).backward()
        kept.append(torch.zeros(1000 * 2**number, device=recipe.device))


# Step -> numbers of micro-batches that it is tried with.
STEPS = {
    sum_losses: (3, 5),
    keep_each: (8,),
    keep_from_the_third: (5,),
    allocate_after_every_fourth: (5,),
    take_by_number: (5,),
    run_halves: (5,),
    copy_gradients_after_the_last: (5,),
    keep_twice_as_much: (5,),
}
