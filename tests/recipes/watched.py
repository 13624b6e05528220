"""Compare a run of one process with its optimizer's formula, fed with the same gradients.

    watch = Watch()
    run = run_here(argv, before_training=watch)
    errors = watch.report(run.recipe)["errors"]

Tests compare runs on ranks with runs of one process; a fault that both have shows here.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

from recipe_lib import training
from tests.recipes.runs import list_parameters
from tests.training.formulas import Formula, clip_gradients


class Watch:
    """Steps the formula of each trained parameter along with a recipe.

    Call it with the recipe before the recipe trains, and `report` afterwards.
    """

    def __init__(self) -> None:
        self.formulas: dict[str, Formula] = {}  # by parameter
        self.norms: list[float] = []  # of each step's gradients, before clipping

    def __call__(self, recipe: Any) -> None:
        """Follow the recipe's steps from now on."""
        cfg = recipe.cfg
        parameters = {
            name: parameter
            for name, parameter in recipe.model.named_parameters()
            if parameter.requires_grad
        }
        self.formulas = {
            name: Formula(cfg.optimizer, name, parameter) for name, parameter in parameters.items()
        }
        original = recipe.train_step
        clip = training.clip_grad_norm

        # In place of `clip_grad_norm`: gradients are complete then, and not clipped yet.
        def watch(*args: Any, **kwargs: Any) -> Any:
            gradients = {name: parameter.grad.clone() for name, parameter in parameters.items()}
            gradients, norm = clip_gradients(gradients, cfg.clip_grad_norm)
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
        """Return by key what the run has done.

        norms: gradient norm of each step, before clipping. errors: by parameter, the distance from
        the formula's weights, relative to the formula's change. unmoved: names of the trained
        parameters that have not changed; still: those of them that by their formula should have.
        start, weights: the trained parameters before (fp64) and after.
        """
        weights = {name: parameter.detach() for name, parameter in recipe.model.named_parameters()}
        unmoved = []
        still = []
        for name, formula in sorted(self.formulas.items()):
            if torch.equal(weights[name].double(), formula.start):
                unmoved.append(name)
                if not torch.equal(formula.round_weights(), weights[name].double()):
                    still.append(name)
        return {
            "norms": self.norms,
            "errors": {
                name: formula.measure_error(weights[name])
                for name, formula in self.formulas.items()
            },
            "unmoved": unmoved,
            "still": still,
            "start": {name: formula.start for name, formula in self.formulas.items()},
            "weights": {name: weights[name].clone().detach() for name in self.formulas},
        }


def compute_rate(cfg: Any, step: int) -> float:
    """Return the learning rate of a step (from 0), for a config without warm-up steps."""
    assert cfg.lr_scheduler.warmup_steps == 0
    if cfg.lr_scheduler.type == "constant":
        return cfg.optimizer.lr
    progress = step / cfg.max_steps
    decay = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress}
    min_ratio = cfg.lr_scheduler.min_lr_ratio
    return cfg.optimizer.lr * (min_ratio + (1 - min_ratio) * decay[cfg.lr_scheduler.type])


def read_trained_weights(recipe: Any) -> dict[str, torch.Tensor]:
    """Return every full trained parameter by name on the first rank, nothing on the others.

    A collective of all ranks.
    """
    trained = {
        name for name, parameter in recipe.model.named_parameters() if parameter.requires_grad
    }
    weights = {name: value for name, value in list_parameters(recipe).items() if name in trained}
    if recipe.world.pipeline is not None:  # each rank has the layers of its stages
        weights_by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(weights_by_rank, weights)
        for rank_weights in weights_by_rank:
            weights |= rank_weights
    return weights if recipe.world.is_main else {}


def measure_distance(
    weights: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    start: dict[str, torch.Tensor],
) -> float:
    """Return how far weights are from the expected ones, relative to how far these are from start.

    Both distances are L2 norms over all parameters.
    """
    assert weights.keys() == expected.keys() == start.keys()
    squared_error = 0.0
    squared_change = 0.0
    for name, value in expected.items():
        squared_error += float((weights[name].double() - value.double()).square().sum())
        squared_change += float((value.double() - start[name]).square().sum())
    return math.sqrt(squared_error / squared_change)
