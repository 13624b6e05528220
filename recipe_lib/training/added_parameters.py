"""Extra parameters of a run: said at its start, and refused before it where the export would lose
them.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recipe_lib.checkpoint.model_export import find_extra_fault
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.logs import warn_on_first_rank
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.models.meta_init import check_extra, find_extra_tensors
from recipe_lib.parallel.world import World


def models_of(recipe: Any) -> dict[str, nn.Module]:
    """Return the recipe's modules by the name of the attribute that holds them, each once."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, value in vars(recipe).items():
        if isinstance(value, nn.Module):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def check_models(recipe: Any, cfg: FullFinetuneConfig, world: World) -> None:
    """Refuse, before weights are read, extra parameters that nothing starts or that the export
    would lose.

    Collective. Raises SetupError, and ConfigError for `checkpoint.extra_parameters: error`.
    """
    check_each(recipe, world, check_extra)
    for model in models_of(recipe).values():
        fault = find_extra_fault(cfg.checkpoint, _merged(world, _sizes(model)))
        if fault is not None:
            raise ConfigError(fault)


def check_trained(recipe: Any, world: World) -> None:
    """SetupError, on all ranks, for a trained extra parameter of a model that the recipe's
    optimizers leave out.
    """
    optimizers = [value for value in vars(recipe).values() if isinstance(value, Optimizer)]
    stepped = {
        id(one)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for one in group["params"]
    }

    def check(model: nn.Module) -> None:
        if not any(id(parameter) in stepped for parameter in model.parameters()):
            return  # a reference, say
        for name, tensor in find_extra_tensors(model).items():
            if tensor.requires_grad and id(tensor) not in stepped:
                raise SetupError(
                    f"{name}: requires a gradient, and no optimizer has it; give build_optimizer"
                    " every parameter that requires one, or freeze it by requires_grad_(False)"
                )

    check_each(recipe, world, check)


def check_each(recipe: Any, world: World, check: Callable[[nn.Module], None]) -> None:
    """Raise on all ranks what a check raises of any model of the recipe. Collective."""
    with world.raise_together():
        for model in models_of(recipe).values():
            check(model)


def describe_extra(model: nn.Module, world: World) -> list[str]:
    """Return lines for the log: which parameters and buffers no family has, and where their values
    are from.
    """
    loaded = model.loaded_extras if isinstance(model, LanguageModel) else frozenset()
    every = _sizes(model)
    start = {name: count for name, count in every.items() if name not in loaded}
    read = {name: count for name, count in every.items() if name in loaded}
    lines = []
    for found, origin in (
        (start, "start from reset_parameters, no checkpoint has them"),
        (read, "are read"),
    ):
        found = _merged(world, found)
        if found:
            lines.append(
                f"extra parameters: {sum(found.values()):,} numbers {origin}: {in_short(found)}"
            )
    return lines


def warn_of_export(model: nn.Module, world: World, folder: Path) -> None:
    """Say which tensors of an exported folder other programs will not load. Collective in a
    pipeline.
    """
    found = _merged(
        world,
        {name: value.numel() for name, value in find_extra_tensors(model, saved=True).items()},
    )
    if found:
        warn_on_first_rank(
            "warning: %s: transformers and other programs ignore its extra parameters, and so"
            " compute something else; a recipe that adds them reads them: %s",
            folder,
            in_short(found),
        )


def in_short(names: Iterable[str]) -> str:
    """Return the names, those of several layers together: `model.layers.*.mlp.extra.weight (5)`."""
    counts = Counter(
        ".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in names
    )
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())


def _sizes(model: nn.Module) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in find_extra_tensors(model).items()}


def _merged(world: World, own: dict[str, int]) -> dict[str, int]:
    """Those of all ranks; only those of a pipeline have different ones."""
    if world.pipeline is None:
        return own
    return {name: count for part in world.gather_json(own) for name, count in part.items()}
