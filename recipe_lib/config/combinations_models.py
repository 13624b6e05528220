"""Combinations of models that are not native, and settings that are made for ours."""

from collections.abc import Callable
from typing import Any

from recipe_lib.config.aliases import CHOICE_ALIASES
from recipe_lib.config.combination import Incompatible
from recipe_lib.config.schema import LINEARS
from recipe_lib.config.suggest import did_you_mean, quote

_LORA = "lora_finetune_distributed"
_TARGETS = (*LINEARS, "embedding", "head", "all-linear")
_FOREIGN = "model.implementation=transformers"


def _foreign(also: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda cfg: cfg.model.implementation != "native" and also(cfg)


def _unknown_targets(cfg: Any) -> list[str]:
    return [name for name in cfg.lora.target_modules if name not in _TARGETS]


def _unknown_target(cfg: Any) -> str:
    found = _unknown_targets(cfg)[0]
    hint = did_you_mean(found, _TARGETS) if found not in CHOICE_ALIASES else f"; did you mean {CHOICE_ALIASES[found]}?"
    return f"found {quote(found)}, expected a list [...] of {', '.join(_TARGETS)}{hint}"


MODELS: tuple[Incompatible, ...] = (
    Incompatible(
        "targets that a native model has not",
        lambda cfg: cfg.model.implementation == "native" and bool(_unknown_targets(cfg)),
        ("lora.target_modules",),
        "a native model has no linears of such names",
        f"choose of {', '.join(_TARGETS)}",
        ("lora.target_modules=[c_attn]",),
        recipe=_LORA,
        reads=("model.implementation",),
        told=_unknown_target,
    ),
    Incompatible(
        "merged weights of another model's class",
        _foreign(lambda cfg: cfg.lora.merge_on_save),
        ("model.implementation", "lora.merge_on_save"),
        "only adapters of our own models are merged here",
        "remove lora.merge_on_save, and merge the adapter with PEFT",
        (_FOREIGN, "lora.merge_on_save=true"),
        recipe=_LORA,
    ),
    Incompatible(
        "compiled layers by an inferred plan",
        _foreign(lambda cfg: cfg.parallel.tensor > 1 and cfg.compile),
        ("model.implementation", "parallel.tensor", "compile"),
        "an inferred plan is run by following each call of the model's forward, which compiled layers do not make",
        "set compile=false, or parallel.tensor=1",
        (_FOREIGN, "parallel.tensor=2", "compile=true"),
    ),
    Incompatible(
        "gathers of an inferred plan",
        _foreign(lambda cfg: cfg.parallel.tensor > 1),
        ("model.implementation", "parallel.tensor_regather_in_backward"),
        "an inferred plan shares matrices, not tokens: it gathers nothing",
        "remove parallel.tensor_regather_in_backward",
        (_FOREIGN, "parallel.tensor=2", "parallel.tensor_regather_in_backward=true"),
        unread="parallel.tensor_regather_in_backward",
    ),
    Incompatible(
        "copied kv heads of an inferred plan",
        _foreign(lambda cfg: cfg.parallel.tensor > 1),
        ("model.implementation", "parallel.tensor_replicate_kv_heads"),
        "an inferred plan leaves whole what the ranks cannot share",
        "remove parallel.tensor_replicate_kv_heads",
        (_FOREIGN, "parallel.tensor=2", "parallel.tensor_replicate_kv_heads=true"),
        unread="parallel.tensor_replicate_kv_heads",
    ),
    Incompatible(
        "quantized weights by an inferred plan",
        _foreign(lambda cfg: cfg.parallel.tensor > 1 and cfg.lora.quantize_base != "none"),
        ("model.implementation", "parallel.tensor", "lora.quantize_base"),
        "the ranks of an inferred plan do not share quantized weights",
        "remove lora.quantize_base, or set parallel.tensor=1: FSDP shares quantized weights",
        (_FOREIGN, "parallel.tensor=2", "lora.quantize_base=nf4"),
        recipe=_LORA,
    ),
    Incompatible(
        "adapters of another type by an inferred plan",
        _foreign(lambda cfg: cfg.parallel.tensor > 1 and cfg.lora.dtype is not None),
        ("model.implementation", "parallel.tensor", "lora.dtype"),
        "the plan is of adapters that have the type of the weights beside them",
        "remove lora.dtype, or set parallel.tensor=1",
        (_FOREIGN, "parallel.tensor=2", "lora.dtype=fp32"),
        recipe=_LORA,
    ),
)
