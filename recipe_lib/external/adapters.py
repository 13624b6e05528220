"""Adapters on an external model: any linear inside its layers, of whatever class, by the ends of its name."""

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from recipe_lib.adapters.layers import AdaptedMatrix, AdapterSettings, adapt
from recipe_lib.config.schema import PEFT_NAMES, LoraConfig
from recipe_lib.errors import ConfigError
from recipe_lib.external.find_modules import is_transposed, layer_linears, linear_shape, uncalled_linears
from recipe_lib.models.language_model import own_tensors

# Names of linears that PEFT (0.21) takes for experts, which transformers 5 has fused, in models of these kinds: in
# peft.utils.transformers_weight_conversion the keys of _MOE_TARGET_MODULE_MAPPING.
_FUSED = {
    "mixtral": frozenset({"gate", "w1", "w2", "w3"}),
    "qwen2_moe": frozenset({"gate", "gate_proj", "up_proj", "down_proj"}),
}


class AdaptedExternal(AdaptedMatrix):
    """A linear of a class that is not torch's own, such as transformers' Conv1D: its own forward, and an adapter."""

    def __init__(self, base: nn.Module, settings: AdapterSettings) -> None:
        super().__init__(base, settings, linear_shape(base))
        self.kind = type(base)
        self.transposed = is_transposed(base)

    def frozen_rows(self, start: int, stop: int) -> Tensor:
        """Rows of W `[stop - start, in]`."""
        weight: Any = self.weight
        return weight[:, start:stop].t() if self.transposed else weight[start:stop]

    def frozen_forward(self, hidden: Tensor) -> Tensor:
        """Hidden `[..., in]` to `[..., out]` by the frozen part alone."""
        return self.kind.forward(self, hidden)


def adapter_targets(linears: Collection[str], targets: Collection[str], left: Mapping[str, str]) -> list[str]:
    """The names of those linears that an adapter is for. targets: `lora.target_modules`, ends of names or short names.

    left: names of modules that cannot have an adapter -> why, as `without_adapter` has them. Raises ConfigError for an
    end that no linear's name has, or that one of them has.
    """
    ends = [] if "all-linear" in targets else [PEFT_NAMES.get(name, name) for name in targets]
    for end in ends:
        refused = next((name for name in left if ends_in(name, end)), None)
        if refused is not None:
            raise ConfigError(
                f"lora.target_modules: {end!r}: {refused} cannot have an adapter: {left[refused]}; remove it"
            )
        if not any(ends_in(name, end) for name in linears):
            leaves = sorted({leaf_of(name) for name in linears if name not in left})
            raise ConfigError(
                f"lora.target_modules: {end!r} is the end of no linear of this model; its linears end in "
                f"{', '.join(leaves)}"
            )
    return [name for name in linears if name not in left and (not ends or any(ends_in(name, end) for end in ends))]


def without_adapter(linears: Collection[str], uncalled: Mapping[str, str], family: str) -> dict[str, str]:
    """Linears, and parameters that stand for some, that get no adapter: name -> why."""
    kind = _fused_as(family)
    taken = _FUSED.get(kind or "", frozenset())
    why = f"PEFT takes the name for the experts of {family}, and would not open the adapter"
    return dict(uncalled) | {name: why for name in linears if leaf_of(name) in taken}


def _fused_as(family: str) -> str | None:
    """The kind of mixture for whose fused experts PEFT takes names of linears; None: it does not."""
    if find_spec("transformers") is None:
        return None
    from transformers import conversion_mapping

    same = getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
    kind = same.get(family) or (family if family == "mixtral" else None)
    return kind if kind in _FUSED else None


def leaf_of(name: str) -> str:
    """The last part of a module's name; with the one before it, where that is a number alone."""
    *_, before, last = ("", *name.split("."))
    return f"{before}.{last}" if last.isdigit() and before else last


def ends_in(name: str, end: str) -> bool:
    """Whether a module's name has this end, in whole parts, as PEFT understands it."""
    return name == end or name.endswith(f".{end}")


def add_adapters(model: Any, cfg: LoraConfig, settings: AdapterSettings) -> None:
    """Puts adapters on linears inside the layers, in place, and quantizes those of torch's own class if asked to.

    Linears that a recipe added are left as they are. Raises ConfigError as `adapter_targets` does, and for a model
    whose layers have no linears for an adapter.
    """
    built = own_tensors(model)
    linears = {name: base for name, base in layer_linears(model).items() if built is None or f"{name}.weight" in built}
    left = without_adapter(linears, uncalled_linears(model), model.spec.family)
    wanted = set(adapter_targets(linears, cfg.target_modules, left))
    if not wanted:
        raise ConfigError("lora.target_modules: the model's layers have no linears that could have an adapter")
    for name, base in linears.items():
        owner, _, child = name.rpartition(".")
        own = settings if name in wanted else None
        if type(base) is nn.Linear:
            placed = adapt(base, own, cfg.quantize_base)
        else:
            placed = base if own is None else AdaptedExternal(base, own)
        setattr(model.get_submodule(owner), child, placed)
