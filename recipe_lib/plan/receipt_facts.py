"""What a receipt says of a run in addition to its figures: sizes and settings."""

from math import prod
from typing import TYPE_CHECKING, Any

from recipe_lib.config.levers import harmless_overrides, levers_of
from recipe_lib.config.mesh import mesh_shape, with_context
from recipe_lib.models import DecoderSpec
from recipe_lib.models.weight_names import buffer_names, parameter_shapes
from recipe_lib.plan.receipts import ReceiptRun
from recipe_lib.plan.world.shape_only_model import spec_of

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings

_STRATEGY = "parallel.strategy"


def run_of(cfg: Any, shaped: Any, settings: "PlanSettings") -> ReceiptRun:
    """The run of a config. shaped: what is planned of it, with its strategy chosen."""
    spec, hardware = spec_of(shaped), settings.hardware
    shapes, buffers = parameter_shapes(spec), buffer_names(spec)
    embeddings = [shape for shape in shapes.values() if len(shape) == 2 and shape[0] == spec.vocab_size]
    levers = levers_of(cfg)
    levers.pop(_STRATEGY, None)
    if settings.ranks > 1 and _STRATEGY in (chosen := levers_of(shaped)):  # one rank shards nothing
        levers[_STRATEGY] = chosen[_STRATEGY]
    return ReceiptRun(
        recipe=settings.recipe,
        config=settings.config,
        overrides=harmless_overrides(settings.overrides),
        model=str(cfg.model.preset or cfg.model.path),
        layers=spec.num_layers,
        width=spec.width if isinstance(spec, DecoderSpec) else embeddings[0][1] if embeddings else 0,
        parameters=sum(prod(shape) for name, shape in shapes.items() if name not in buffers),
        card=hardware.name,
        card_memory=hardware.memory,
        ranks=settings.ranks,
        mesh=with_context(shaped.parallel, mesh_shape(shaped.parallel, settings.ranks)),
        sequence=settings.sequence.tokens,
        batch_size=cfg.batch_size,
        gradient_accumulation_steps=cfg.gradient_accumulation_steps,
        dtype=cfg.dtype,
        levers=levers,
    )
