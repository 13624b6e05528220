"""Recipes as users make them of the shipped one: micro-batches of a step that are not alike, in one
way each.
"""

from collections.abc import Callable
from typing import Any

import torch

from tests.recipes.runs import FULL, get_recipe_class, import_recipe_module


def made(step: Callable[[Any, Any], None]) -> type:
    """A recipe whose training step is `step(recipe, batches)`, and then the optimizer's."""

    class Own(get_recipe_class(import_recipe_module(FULL))):  # type: ignore[misc]
        def train_step(self, batches: Any) -> None:
            step(self, batches)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    return Own


def sums_losses(recipe: Any, batches: Any) -> None:
    """One backward of all micro-batches: what each of them keeps is there at a time."""
    torch.stack([recipe.compute_loss(batch) for batch in batches.micro_batches]).sum().backward()


def keeps_each(recipe: Any, batches: Any) -> None:
    """A tensor of every micro-batch stays until the step's end."""
    kept = []
    for batch in batches.micro_batches:
        recipe.compute_loss(batch).backward()
        kept.append(torch.zeros(40_000, device=recipe.device))


def keeps_from_the_third(recipe: Any, batches: Any) -> None:
    """The same, and the first two micro-batches are alike."""
    kept = []
    for number, batch in enumerate(batches.micro_batches):
        recipe.compute_loss(batch).backward()
        if number >= 2:
            kept.append(torch.zeros(40_000, device=recipe.device))


def every_fourth(recipe: Any, batches: Any) -> None:
    """Every fourth micro-batch takes more for a moment, with all gradients there."""
    for number, batch in enumerate(batches.micro_batches):
        recipe.compute_loss(batch).backward()
        if number % 4 == 3:
            torch.zeros(400_000, device=recipe.device)


def by_number(recipe: Any, batches: Any) -> None:
    """Micro-batches taken by their number, not by going through them; each leaves something."""
    kept = []
    for number in range(recipe.cfg.gradient_accumulation_steps):
        recipe.compute_loss(batches.micro_batches[number]).backward()
        kept.append(torch.zeros(40_000, device=recipe.device))


def in_slices(recipe: Any, batches: Any) -> None:
    """Two halves of the micro-batches, with a backward each."""
    half = len(batches.micro_batches) // 2
    for part in (batches.micro_batches[:half], batches.micro_batches[half:]):
        torch.stack([recipe.compute_loss(batch) for batch in part]).sum().backward()


def last_is_another(recipe: Any, batches: Any) -> None:
    """The last micro-batch keeps its gradients' copies beside them."""
    for number, batch in enumerate(batches.micro_batches):
        recipe.compute_loss(batch).backward()
        if number == len(batches.micro_batches) - 1:
            copies = [parameter.grad.clone() for parameter in recipe.model.parameters()]
            del copies


def alike(recipe: Any, batches: Any) -> None:
    """As the shipped recipe has it."""
    for batch in batches.micro_batches:
        recipe.compute_loss(batch).backward()


def lists_them(recipe: Any, batches: Any) -> None:
    """As the shipped recipe has it, of a list of its own."""
    for batch in list(batches.micro_batches):
        recipe.compute_loss(batch).backward()


def doubles(recipe: Any, batches: Any) -> None:
    """A later micro-batch leaves more than the one before it, so that no two are alike."""
    kept = []
    for number, batch in enumerate(batches.micro_batches):
        recipe.compute_loss(batch).backward()
        kept.append(torch.zeros(1000 * 2**number, device=recipe.device))


# And how many micro-batches a step is tried with.
STEPS = {
    sums_losses: (3, 5),
    keeps_each: (8,),
    keeps_from_the_third: (5,),
    every_fourth: (5,),
    by_number: (5,),
    in_slices: (5,),
    last_is_another: (5,),
    doubles: (5,),
}
