"""What a run of one process does to its weights, beside what its optimizer's formula would do with
the same gradients.

Runs on ranks are compared with runs of one process; these are compared with a plain loop, so that a
fault that both have is seen.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

from recipe_lib import training
from tests.recipes.runs import list_parameters
from tests.training.formulas import Formula, clip_gradients


class Watch:
    """Call it with the recipe before it trains; then `report` when it has. norms: of each step's
    gradients.
    """

    def __init__(self) -> None:
        self.formulas: dict[str, Formula] = {}
        self.norms: list[float] = []

    def __call__(self, recipe: Any) -> None:
        cfg, named = recipe.cfg, dict(recipe.model.named_parameters())
        named = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self.formulas = {
            name: Formula(cfg.optimizer, name, parameter) for name, parameter in named.items()
        }
        original = recipe.train_step
        clip = training.clip_grad_norm

        def watch(*args: Any, **kwargs: Any) -> Any:
            gradients, norm = clip_gradients(
                {name: one.grad.clone() for name, one in named.items()}, cfg.clip_grad_norm
            )
            rate = compute_rate(cfg, len(self.norms))
            self.norms.append(norm)
            for name, formula in self.formulas.items():
                formula.step(gradients[name], rate)
            return clip(*args, **kwargs)

        def train_step(batches: Any) -> Any:
            training.clip_grad_norm = watch  # type: ignore[assignment]
            try:
                return original(batches)
            finally:
                training.clip_grad_norm = clip

        recipe.train_step = train_step

    def report(self, recipe: Any) -> dict[str, Any]:
        """norms; errors, those of `Formula.error`; unmoved, the trained parameters that are where
        they began; still, those of them whose formula is not; start and weights, before and after.
        """
        found = {name: parameter.detach() for name, parameter in recipe.model.named_parameters()}
        still = {
            name
            for name, one in self.formulas.items()
            if torch.equal(found[name].double(), one.start)
        }
        return {
            "norms": self.norms,
            "errors": {name: formula.error(found[name]) for name, formula in self.formulas.items()},
            "unmoved": sorted(still),
            "still": sorted(
                name
                for name in still
                if not torch.equal(self.formulas[name].stored(), found[name].double())
            ),
            "start": {name: formula.start for name, formula in self.formulas.items()},
            "weights": {name: found[name].clone().detach() for name in self.formulas},
        }


def compute_rate(cfg: Any, step: int) -> float:
    """The learning rate of a step, of a run without warm-up that does `max_steps` steps."""
    assert cfg.lr_scheduler.warmup_steps == 0
    if cfg.lr_scheduler.type == "constant":
        return cfg.optimizer.lr
    done, least = step / cfg.max_steps, cfg.lr_scheduler.min_lr_ratio
    left = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done}[cfg.lr_scheduler.type]
    return cfg.optimizer.lr * (least + (1 - least) * left)


def read_trained_weights(recipe: Any) -> dict[str, torch.Tensor]:
    """Every trained parameter, whole, on the first rank; nothing on the others. A collective of all
    ranks.
    """
    trained = {
        name for name, parameter in recipe.model.named_parameters() if parameter.requires_grad
    }
    found = {name: value for name, value in list_parameters(recipe).items() if name in trained}
    if recipe.world.pipeline is not None:
        stages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(stages, found)
        found = {name: value for stage in stages for name, value in stage.items()}
    return found if recipe.world.is_main else {}


def measure_distance(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> float:
    """How far weights are from those wanted, in parts of the way that these have come from the
    start.
    """
    assert found.keys() == wanted.keys() == start.keys()
    off = sum(
        float((found[name].double() - wanted[name].double()).square().sum()) for name in wanted
    )
    way = sum(float((wanted[name].double() - start[name]).square().sum()) for name in wanted)
    return math.sqrt(off / way)
