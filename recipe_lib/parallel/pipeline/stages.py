"""A model cut down to what one rank of a pipeline has: its stages' layers, and embedding or head where they belong.

The model keeps its class, and its parameters their names. What it does when it is called is the part of it whose turn
it is, as the pipeline's driver says: the layers of a stage, or after the last of them final norm and output head.
"""

from types import MethodType
from typing import Protocol

from torch import Tensor, nn

from recipe_lib.config.mesh import SCHEDULES, stage_count, stages_of_rank
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.ops.deferred import linear
from recipe_lib.parallel.modified_model import refuse_for_pipeline
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


def _linear(module: nn.Linear, hidden: Tensor) -> Tensor:
    return linear(hidden, module.weight, module.bias)
