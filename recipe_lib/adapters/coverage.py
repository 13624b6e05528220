"""What adapters and quantized weights cover of a model, counted on its modules as they are."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recipe_lib.adapters.expert_layers import QuantizedExperts
from recipe_lib.adapters.layers import AdaptedModule
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.errors import ConfigError
from recipe_lib.models.find_layers import layer_names
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.models.mixture import ExpertLinear

_NAMED = 3  # kinds of matrices that a line names
_SMALL = 0.005  # share of the layers' weights below which what is left out is not worth a word


@dataclass(frozen=True)
class Coverage:
    """The frozen matrices of a model's layers. layers: how many there are. adapted: kind of module -> in how many of
    them, and how many the lists have in which it is.

    outside: adapted modules outside of the layers. numbers: of all matrices of the layers; quantized: those kept in
    fewer bits, of linears many modules, and of the experts of so many layers. bare, wide: kind -> numbers without an
    adapter, and in their own type; kinds are names without the numbers of layers. shapes: kind -> dimensions.
    """

    layers: int
    adapted: Mapping[str, tuple[int, int]]
    outside: tuple[str, ...]
    numbers: int
    linears: int
    experts: int
    quantized: int
    bare: Mapping[str, int]
    wide: Mapping[str, int]
    shapes: Mapping[str, int]


def cover(model: nn.Module) -> Coverage:
    """Counts modules and numbers of a model, sharded or not."""
    others = tuple(f"{name}." for name in model.other_parts) if isinstance(model, LanguageModel) else ()
    names = [name for name in layer_names(model) if not name.startswith(others)]
    adapted: dict[str, set[str]] = {}
    bare: dict[str, int] = {}
    wide: dict[str, int] = {}
    shapes: dict[str, int] = {}
    numbers = linears = quantized = 0
    experts: set[str] = set()
    lists = Counter(map(_name_list, names))  # a model may have others beside that of its layers
    for layer in names:
        for name, module in model.get_submodule(layer).named_modules():
            name = name or _name_list(layer).rpartition(".")[2]  # an element that is a linear itself
            has_adapter = isinstance(module, AdaptedModule)
            if has_adapter:
                adapted.setdefault(kind_of(name), set()).add(layer)
            if isinstance(module, QuantizedLinear):
                count = module.in_features * module.out_features
                numbers, quantized = numbers + count, quantized + count
                if isinstance(module, QuantizedExperts):
                    experts.add(layer)
                else:
                    linears += 1
                if not has_adapter:
                    _add(bare, kind_of(name), count)
                continue
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() < 2 or "lora_" in f"{name}.{parameter_name}":
                    continue
                own = name if parameter_name == "weight" else f"{name}.{parameter_name}"
                count = parameter.numel()
                numbers += count
                shapes[kind_of(own)] = parameter.dim()
                _add(wide, kind_of(own), count)
                if not has_adapter:
                    _add(bare, kind_of(own), count)
    inside = tuple(f"{name}." for name in names)
    outside = tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, AdaptedModule) and not name.startswith(inside)
    )
    found = {
        kind: (len(layers), sum(lists[name] for name in set(map(_name_list, layers))))
        for kind, layers in adapted.items()
    }
    return Coverage(len(names), found, outside, numbers, linears, len(experts), quantized, bare, wide, shapes)


def refuse_unquantized(model: nn.Module, kind: str) -> None:
    """Raises ConfigError where most of the layers' weights would stay as they are in a run that asked for `kind`."""
    if kind == "none":
        return
    found = cover(model)
    left = found.numbers - found.quantized
    if found.numbers and left > found.numbers / 2:
        fused = any(found.shapes[name] > 2 for name in _largest(found.wide))
        why = (
            "parameters of 3 dimensions, as a mixture's experts are, are not quantized"
            if fused
            else "only torch's own linears are quantized"
        )
        if kind == "nf4" and _undivided(model):
            why = "their matrices are not divisible into blocks of 64"
        raise ConfigError(
            f"lora.quantize_base={kind}: {_share(found.wide, found.numbers)} would stay in {_type(model)}: {why}; set "
            "lora.quantize_base=none, and shard the base over more ranks (FSDP) or memory.cpu_offload=true"
        )


def _undivided(model: nn.Module) -> bool:
    """Whether a plain linear, or an expert, was left because of its size."""
    inside = (module for name in layer_names(model) for module in model.get_submodule(name).modules())
    kinds = (nn.Linear, ExpertLinear)
    return any(isinstance(module, kinds) and module.in_features * module.out_features % 64 for module in inside)


def describe_targets(found: Coverage, words: Mapping[str, str]) -> str:
    """The modules with an adapter, `q_proj, v_proj, up_proj (in 1 of 4 layers)`. words: kind -> shorter name."""
    leaves = [kind.rpartition(".")[2] for kind in found.adapted]
    named = []
    for kind, (layers, whole) in found.adapted.items():
        part = "" if layers == whole else f" (in {layers} of {whole} layers)"
        leaf = kind.rpartition(".")[2]
        named.append(words.get(kind, leaf if leaves.count(leaf) == 1 and not leaf.isdigit() else kind) + part)
    return ", ".join(dict.fromkeys([*named, *(words.get(name, name) for name in found.outside)]))


def describe_bare(found: Coverage) -> str:
    """What of the layers has no adapter, and its share of their weights; empty where it is next to nothing."""
    return f"none on {_share(found.bare, found.numbers)}" if _matters(found.bare, found.numbers) else ""


def describe_quantized(found: Coverage, kind: str, model: nn.Module) -> str:
    """How many linears are kept in fewer bits, and what of the layers is not."""
    experts = f" and the experts of {found.experts}" if found.experts else ""
    said = f"{found.linears} linears of the layers{experts} in {kind}"
    if not _matters(found.wide, found.numbers):
        return said
    return f"{said}, but not {_share(found.wide, found.numbers)}, which stay in {_type(model)}"


def kind_of(name: str) -> str:
    """The last two parts of a name within a layer, without the numbers that others have too, as of experts."""
    *before, last = name.split(".")
    return ".".join([*(part for part in before if not part.isdigit()), last][-2:])


def _name_list(layer: str) -> str:
    """Return the name of the list that a layer is an element of."""
    return layer.rpartition(".")[0]


def _add(numbers: dict[str, int], kind: str, count: int) -> None:
    numbers[kind] = numbers.get(kind, 0) + count


def _matters(numbers: Mapping[str, int], total: int) -> bool:
    return sum(numbers.values()) > _SMALL * total


def _largest(numbers: Mapping[str, int]) -> list[str]:
    return sorted(numbers, key=lambda kind: (-numbers[kind], kind))[:_NAMED]


def _share(numbers: Mapping[str, int], total: int) -> str:
    """`experts.gate_up_proj, experts.down_proj and 2 more (96.1 % of the layers' weights)`."""
    more = len(numbers) - _NAMED
    others = f" and {more} more" if more > 0 else ""
    return f"{', '.join(_largest(numbers))}{others} ({sum(numbers.values()) / total:.1%} of the layers' weights)"


def _type(model: nn.Module) -> str:
    """The type of the weights that are neither quantized nor an adapter's."""
    found: list[Tensor] = [
        parameter
        for name, parameter in model.named_parameters()
        if "lora_" not in name and parameter.is_floating_point() and parameter.element_size() > 1
    ]
    kinds = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float64: "fp64"}
    return kinds.get(found[0].dtype, str(found[0].dtype)) if found else "their type"
