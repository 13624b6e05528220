"""Adapters on a foreign model: any linear inside its layers, of whatever class, by the ends of its name."""

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from recipe_lib.adapters.layers import AdaptedMatrix, AdapterSettings, adapted_linear
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models.foreign_build import is_linear, is_transposed, linear_shape
from recipe_lib.models.layers import layer_names


class AdaptedForeign(AdaptedMatrix):
    """A linear of a class that is not torch's own, such as transformers' Conv1D: its own forward, and an adapter."""

    def __init__(self, base: nn.Module, settings: AdapterSettings) -> None:
        nn.Module.__init__(self)
        self.__dict__.update({name: value for name, value in base.__dict__.items() if not name.startswith("_")})
        self._parameters.update(base._parameters)
        self._buffers.update(base._buffers)
        self.kind = type(base)
        self.transposed = is_transposed(base)
        outputs, inputs = linear_shape(base)
        self.add_adapter(inputs, outputs, settings)

    def frozen_rows(self, start: int, stop: int) -> Tensor:
        """Rows of W `[stop - start, in]`."""
        weight: Any = self.weight
        return weight[:, start:stop].t() if self.transposed else weight[start:stop]

    def frozen_forward(self, hidden: Tensor) -> Tensor:
        """Hidden `[..., in]` to `[..., out]` by the frozen part alone."""
        return self.kind.forward(self, hidden)


def foreign_targets(linears: Collection[str], modules: Collection[str]) -> list[str]:
    """The names of those linears that an adapter is for. modules: ends of names; empty: all.

    Raises ConfigError for an end that no name has.
    """
    for end in modules:
        if not any(ends_in(name, end) for name in linears):
            leaves = sorted({name.rpartition(".")[2] for name in linears})
            raise ConfigError(
                f"lora.modules: {end!r} is the end of no linear of this model; its linears end in {', '.join(leaves)}"
            )
    return [name for name in linears if not modules or any(ends_in(name, end) for end in modules)]


def ends_in(name: str, end: str) -> bool:
    """Whether a module's name has this end, in whole parts, as PEFT understands it."""
    return name == end or name.endswith(f".{end}")


def add_foreign_adapters(model: nn.Module, cfg: LoraConfig, settings: AdapterSettings) -> None:
    """Puts adapters on linears inside the layers, in place, and quantises those of torch's own class if asked to.

    Linears that a recipe added are left as they are. Raises ConfigError as `foreign_targets` does, and for a model
    whose layers have no linears.
    """
    inside = tuple(f"{name}." for name in layer_names(model))
    own: Any = getattr(model, "own_tensors", None)
    linears = {
        name: module
        for name, module in model.named_modules()
        if name.startswith(inside) and is_linear(module) and (own is None or f"{name}.weight" in own)
    }
    if not linears:
        raise ConfigError("lora.modules: the model's layers have no linears that could have an adapter")
    wanted = set(foreign_targets(linears, cfg.modules))
    for name, base in linears.items():
        owner, _, child = name.rpartition(".")
        own = settings if name in wanted else None
        if type(base) is nn.Linear:
            placed: nn.Module = adapted_linear(base, own, cfg.quantize)
        else:
            placed = base if own is None else AdaptedForeign(base, own)
        setattr(model.get_submodule(owner), child, placed)
