"""A model cut down to what one rank of a pipeline has: its stages' layers, and embedding or head where they belong.

The model keeps its class, and its parameters their names. What it does when it is called is the part of it whose turn
it is, as the pipeline's driver says: the layers of a stage, or after the last of them final norm and output head.
"""

from types import MethodType
from typing import Protocol

from torch import Tensor, nn

from recipe_lib.config.mesh import SCHEDULES, stage_count, stages_of_rank
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models.extra_parameters import extra_tensors
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.ops.deferred import linear
from recipe_lib.parallel.pipeline.balance import split_layers
from recipe_lib.parallel.pipeline.driver import Pipeline
from recipe_lib.parallel.world import World


class PipelineConfig(Protocol):
    """What a config needs for a pipeline."""

    parallel: ParallelConfig


def split_pipeline(model: LanguageModel, cfg: PipelineConfig, world: World) -> Pipeline | None:
    """Leaves a meta model with this rank's stages alone, in place; returns what runs them, None without a pipeline.

    A tied embedding is on the first and on the last stage; see `sum_tied_gradients`. Raises
    ConfigError: see `split_layers`, `refuse_for_pipeline`, `LanguageModel.stage_parts`.
    """
    if world.pipeline is None:
        return None
    parallel, spec, parts = cfg.parallel, model.spec, model.stage_parts()
    layers = split_layers(spec, cfg, world.mesh["data_shard"].size())
    refuse_for_pipeline(model, layers)
    mine = stages_of_rank(parallel, world.pipeline.rank)
    # That the model was built with; adapters and stored weights have others.
    dtype = next(model.get_submodule(parts.last[0]).parameters()).dtype
    kept = {number for stage in mine for number in layers[stage]}
    model.keep_stages(kept, first=0 in mine, last=stage_count(parallel) - 1 in mine)
    if SCHEDULES[parallel.pipeline_schedule].splits:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = MethodType(_linear, module)  # type: ignore[method-assign]
    pipeline = Pipeline(model, cfg, world, {stage: layers[stage] for stage in mine}, dtype)
    model.forward = pipeline.run_part  # type: ignore[method-assign, assignment]
    return pipeline


def refuse_for_pipeline(model: LanguageModel, stages: list[range]) -> None:
    """ConfigError for extra parameters that no stage, or more than one, would have. The model is still whole."""
    extras = extra_tensors(model)
    if not extras:
        return
    last, parts = len(stages) - 1, model.stage_parts()
    stage_of = {f"{parts.layers[layer]}.": stage for stage, layers in enumerate(stages) for layer in layers}
    stage_of |= {f"{name}.": last for name in parts.last}
    stage_of |= {f"{name}.": 0 for name in parts.first if name != parts.embedding or not model.spec.tied}
    places: dict[int, set[int]] = {}
    for name, tensor in _named(model):
        prefix = next((start for start in stage_of if name.startswith(start)), None)
        if name in extras and prefix is None:
            raise ConfigError(
                f"parallel.pipeline: found {name}, which the recipe added outside of the layers, expected it on one "
                "stage; put it into a layer, the last norm or the head, or set parallel.pipeline=1"
            )
        if prefix is not None:
            places.setdefault(id(tensor), set()).add(stage_of[prefix])
    shared = [name for name, tensor in extras.items() if len(places[id(tensor)]) > 1]
    if shared:
        raise ConfigError(
            f"parallel.pipeline: found {shared[0]}, which the recipe added to layers of several stages, expected it on "
            "one; give each layer its own, or set parallel.pipeline=1"
        )


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    named = list(model.named_parameters(remove_duplicate=False))
    return [*named, *model.named_buffers(remove_duplicate=False)]  # type: ignore[list-item]


def _linear(module: nn.Linear, hidden: Tensor) -> Tensor:
    return linear(hidden, module.weight, module.bias)
