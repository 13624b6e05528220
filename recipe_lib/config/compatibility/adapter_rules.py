"""Rules of the section `lora`."""

from typing import Any

from recipe_lib.config.aliases import CHOICE_ALIASES
from recipe_lib.config.compatibility.rule import LORA_RECIPE, Rule, is_external_model
from recipe_lib.config.schema import LINEARS, MIXTURE_TARGETS
from recipe_lib.config.suggest import did_you_mean, quote

_TARGETS = (*LINEARS, "embedding", "head", *MIXTURE_TARGETS, "all-linear")


def _find_unknown_target(cfg: Any) -> str | None:
    """Return the fault of the first target that a native model does not have."""
    unknown = [name for name in cfg.lora.target_modules if name not in _TARGETS]
    # An external model's targets are ends of its own modules' names, known once it is built.
    if is_external_model(cfg) or not unknown:
        return None
    alias = CHOICE_ALIASES.get(unknown[0])
    hint = f"; did you mean {alias}?" if alias else did_you_mean(unknown[0], _TARGETS)
    return f"found {quote(unknown[0])}, expected a list [...] of {', '.join(_TARGETS)}{hint}"


def _adapts_mixture(cfg: Any) -> bool:
    """Return True if routers or experts of a native mixture get adapters."""
    targets = cfg.lora.target_modules
    return not is_external_model(cfg) and any(name in MIXTURE_TARGETS for name in targets)


UNKNOWN_TARGET = Rule(
    keys=("lora.target_modules",),
    applies=_find_unknown_target,
    reason="a native model has no linears of such names",
    remedy=f"choose of {', '.join(_TARGETS)}",
    example=("lora.target_modules=[c_attn]",),
    recipe=LORA_RECIPE,
    reads=("model.implementation",),
)

MIXTURE_ADAPTER_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("lora.target_modules", "lora.dora"),
        applies=lambda cfg: _adapts_mixture(cfg) and cfg.lora.dora,
        reason="adapters of routers and experts have no lengths of their own, in PEFT neither",
        remedy="set lora.dora=false (LoRA), or remove router and experts from the list",
        example=("lora.target_modules=[q, experts]", "lora.dora=true"),
        recipe=LORA_RECIPE,
    ),
    Rule(
        keys=("lora.target_modules", "lora.dropout"),
        applies=lambda cfg: _adapts_mixture(cfg) and cfg.lora.dropout > 0,
        reason="adapters of routers and experts have no dropout, in PEFT neither",
        remedy="set lora.dropout=0, or remove router and experts from the list",
        example=("lora.target_modules=[q, router]", "lora.dropout=0.1"),
        recipe=LORA_RECIPE,
    ),
)

ADAPTER_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("lora.target_modules",),
        applies=lambda cfg: len(cfg.lora.target_modules) == 0,
        reason="an empty list leaves nothing to train",
        remedy="name at least one of q, k, v, o, gate, up, down, embedding, head",
        example=("lora.target_modules=[]",),
        recipe=LORA_RECIPE,
    ),
    Rule(
        keys=("dtype", "lora.quantize_base"),
        applies=lambda cfg: cfg.lora.quantize_base != "none" and cfg.dtype == "fp64",
        reason="rounding the frozen weights would undo what fp64 is for",
        remedy="remove lora.quantize_base, or choose bf16 or fp32",
        example=("dtype=fp64", "lora.quantize_base=nf4"),
        recipe=LORA_RECIPE,
    ),
    Rule(
        keys=("dtype", "lora.dtype"),
        applies=lambda cfg: cfg.lora.dtype is not None and cfg.dtype == "fp64",
        reason="adapters in a lower precision would undo what fp64 is for",
        remedy="remove lora.dtype",
        example=("dtype=fp64", "lora.dtype=fp32"),
        recipe=LORA_RECIPE,
    ),
    Rule(
        keys=("model.preset", "lora.merge_on_save"),
        applies=lambda cfg: (
            cfg.lora.merge_on_save and cfg.model.path is None and cfg.model.preset is not None
        ),
        reason="adapters are merged into the files of a checkpoint, and random weights have none",
        remedy="remove lora.merge_on_save, or set model.path",
        example=(
            "~model.path",
            "model.preset=llama3/8B",
            "tokenizer.path=x",
            "lora.merge_on_save=true",
        ),
        recipe=LORA_RECIPE,
        reads=("model.path",),
    ),
)
