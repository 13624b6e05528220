"""Which layers each stage of a pipeline has."""

from recipe_lib.config.pipeline import stage_count
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models.spec import DecoderSpec


def split_layers(spec: DecoderSpec, parallel: ParallelConfig) -> list[range]:
    """The layers of each stage, first to last.

    Raises ConfigError for fewer layers than stages, and for a `parallel.pipeline_split` that does not fit the model.
    """
    stages, layers = stage_count(parallel), spec.num_layers
    if stages > layers:
        raise ConfigError(
            f"parallel.pipeline: found {stages} stages for {layers} layers, expected a layer for each stage at least; "
            f"set parallel.pipeline to {layers} or fewer, or a schedule with fewer stages on a rank"
        )
    counts = parallel.pipeline_split
    if isinstance(counts, str):
        counts = _even(layers, stages)
    if len(counts) != stages or sum(counts) != layers:
        raise ConfigError(
            f"parallel.pipeline_split: found {len(counts)} stages with {sum(counts)} layers, expected {stages} stages "
            f"(parallel.pipeline_schedule={parallel.pipeline_schedule} on {parallel.pipeline} ranks) with the model's "
            f"{layers} layers in all"
        )
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _even(layers: int, stages: int) -> list[int]:
    return [layers * (stage + 1) // stages - layers * stage // stages for stage in range(stages)]
