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
)
