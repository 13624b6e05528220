"""Which models are simulated with few of their layers, and which whole."""

from collections.abc import Callable
from dataclasses import replace

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import UserError
from recipe_lib.plan.tracing.more_layers import more_layers, more_rows
from recipe_lib.plan.tracing.simulate import Simulated
from recipe_lib.plan.tracing.simulated_micro_batches import treats_all_alike
from recipe_lib.plan.world.shape_only_model import find_layer_pattern, layer_count, with_layers

# Of the shorter run: three turns of a layer's loop, of which the first and the last may be unlike the others, and two
# layers at the ends of a step for which FSDP gathers ahead of time.
_TURNS, _ENDS = 3, 2
# Two shallow models have to be so much less than the whole one.
_WORTHWHILE = 1.4


def simulate_deep(
    recipe_class: type, cfg: FullFinetuneConfig, simulated: Callable[[FullFinetuneConfig], Simulated]
) -> Simulated:
    """Return `simulated(cfg)`, by two simulations of few layers where they tell what all of them do.

    Not for a recipe that does not say that it treats all layers alike, nor for a pipeline, whose stages have few.
    """
    depths = few_layers(recipe_class, cfg)
    if depths is not None:
        layers, period = layer_count(cfg), depths[1] - depths[0]
        try:
            short, long = (simulated(with_layers(cfg, depth)) for depth in depths)
        except UserError:
            return simulated(cfg)  # which says it of the model that was asked for
        found = _deeper(short, long, (layers - depths[1]) // period, period)
        if found is not None:
            return found
    return simulated(cfg)


def few_layers(recipe_class: type, cfg: FullFinetuneConfig) -> tuple[int, int] | None:
    """Return the layers of the two simulations; None: the whole model is simulated."""
    adapters = cfg.trained_adapters
    patterns = [*_patterns(cfg.parallel.fsdp_wrap_policy), *(_patterns(adapters.target_modules) if adapters else ())]
    named = any(letter.isdigit() for pattern in patterns for letter in pattern)
    budget = cfg.memory.activation_checkpointing == "budget"  # for all layers together, which then differ
    # Buckets of DDP hold several layers' gradients, and Muon shares all matrices out among the ranks.
    across = cfg.parallel.strategy == "ddp" or cfg.optimizer.name == "muon"
    if cfg.parallel.pipeline > 1 or budget or named or across or not treats_all_alike(recipe_class):
        return None
    layers = layer_count(cfg)
    lead, period = find_layer_pattern(cfg)
    ahead = 2 * cfg.memory.activation_offload_prefetch_layers + 1 if cfg.memory.activation_offload else 0
    short = lead + _TURNS * period + _ENDS + ahead + cfg.compile  # what a compiled layer made lives a layer longer
    short += (layers - short) % period
    return (short, short + period) if _WORTHWHILE * (2 * short + period) <= layers else None


def _deeper(short: Simulated, long: Simulated, more: int, period: int) -> Simulated | None:
    """The run of a model with `more` periods of layers beyond the longer one's; None where the two do not tell."""

    def same(one: Simulated) -> tuple[object, ...]:
        left = (one.repeats, one.grows, one.traced, one.untraced, one.likeness.alike, one.likeness.growth)
        return (one.coordinates, one.mesh, one.tokens, one.notes, one.estimate, *left)

    if same(short) != same(long):
        return None
    trace, modules = (
        more_layers(short.trace, long.trace, more, period),
        more_rows(short.modules, long.modules, more, period),
    )
    return None if trace is None or modules is None else replace(long, trace=trace, modules=modules)


def _patterns(value: str | list[str]) -> list[str]:
    """Names of modules that a config has; a word such as `layers` is none."""
    return [] if isinstance(value, str) else value
