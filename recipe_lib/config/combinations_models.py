"""Combinations of models that are not native, and settings that are made for ours."""

from collections.abc import Callable
from typing import Any

from recipe_lib.config.combination import Incompatible

_LORA = "lora_finetune_distributed"
_LINEARS = {"q", "k", "v", "o", "gate", "up", "down"}
_FOREIGN = "model.source=transformers"


def _foreign(also: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda cfg: cfg.model.source != "native" and also(cfg)


MODELS: tuple[Incompatible, ...] = (
    Incompatible(
        "words for the linears of our models",
        _foreign(lambda cfg: set(cfg.lora.targets) != _LINEARS),
        ("model.source", "lora.targets"),
        "its words are for linears of our own models, and adapters of embedding and head too",
        "remove lora.targets, and set lora.modules to the ends of its linears' names, as c_attn",
        (_FOREIGN, "lora.targets=[q, v]"),
        recipe=_LORA,
    ),
    Incompatible(
        "names of modules of our models",
        lambda cfg: cfg.model.source == "native",
        ("model.source", "lora.modules"),
        "it names linears of models that are not native",
        "remove lora.modules and set lora.targets",
        ("lora.modules=[c_attn]",),
        unread="lora.modules",
        recipe=_LORA,
    ),
    Incompatible(
        "merged weights of another model's class",
        _foreign(lambda cfg: cfg.lora.merge),
        ("model.source", "lora.merge"),
        "only adapters of our own models are merged here",
        "remove lora.merge, and merge the adapter with PEFT",
        (_FOREIGN, "lora.merge=true"),
        recipe=_LORA,
    ),
    Incompatible(
        "compiled layers by an inferred plan",
        _foreign(lambda cfg: cfg.parallel.tensor > 1 and cfg.compile),
        ("model.source", "parallel.tensor", "compile"),
        "an inferred plan is run by following each call of the model's forward, which compiled layers do not make",
        "set compile=false, or parallel.tensor=1",
        (_FOREIGN, "parallel.tensor=2", "compile=true"),
    ),
    Incompatible(
        "gathers of an inferred plan",
        _foreign(lambda cfg: cfg.parallel.tensor > 1),
        ("model.source", "parallel.tensor_recompute_gather"),
        "an inferred plan shares matrices, not tokens: it gathers nothing",
        "remove parallel.tensor_recompute_gather",
        (_FOREIGN, "parallel.tensor=2", "parallel.tensor_recompute_gather=true"),
        unread="parallel.tensor_recompute_gather",
    ),
    Incompatible(
        "copied kv heads of an inferred plan",
        _foreign(lambda cfg: cfg.parallel.tensor > 1),
        ("model.source", "parallel.tensor_copy_kv_heads"),
        "an inferred plan leaves whole what the ranks cannot share",
        "remove parallel.tensor_copy_kv_heads",
        (_FOREIGN, "parallel.tensor=2", "parallel.tensor_copy_kv_heads=true"),
        unread="parallel.tensor_copy_kv_heads",
    ),
    Incompatible(
        "quantized weights by an inferred plan",
        _foreign(lambda cfg: cfg.parallel.tensor > 1 and cfg.lora.quantize != "none"),
        ("model.source", "parallel.tensor", "lora.quantize"),
        "the ranks of an inferred plan do not share quantized weights",
        "remove lora.quantize, or set parallel.tensor=1: FSDP shares quantized weights",
        (_FOREIGN, "parallel.tensor=2", "lora.quantize=nf4"),
        recipe=_LORA,
    ),
    Incompatible(
        "adapters of another type by an inferred plan",
        _foreign(lambda cfg: cfg.parallel.tensor > 1 and cfg.lora.dtype is not None),
        ("model.source", "parallel.tensor", "lora.dtype"),
        "the plan is of adapters that have the type of the weights beside them",
        "remove lora.dtype, or set parallel.tensor=1",
        (_FOREIGN, "parallel.tensor=2", "lora.dtype=fp32"),
        recipe=_LORA,
    ),
)
