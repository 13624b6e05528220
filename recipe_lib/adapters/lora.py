"""Adapters for a decoder: where they go, how they begin, and the model without them.

What a recipe calls, in its order:

    add_adapters(model, cfg.lora, dtype)   # on the meta model, before checkpointing, compilation and sharding
    load_weights(model, ...)               # the frozen weights, once there is memory
    init_adapters(model, seed)             # then the adapters: the model begins as what was loaded
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from recipe_lib.adapters.layers import (
    AdaptedModule,
    AdapterSettings,
    adapt,
)
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.config.schema import MIXTURE_TARGETS, LoraConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models.decoder import Decoder
from recipe_lib.models.language_model import (
    LanguageModel,
    get_modules_elsewhere,
    is_external,
    list_layer_names,
    list_local_parts,
)
from recipe_lib.models.meta_init import fill_random
from recipe_lib.models.mixture import Mixture
from recipe_lib.models.spec import ExternalSpec
from recipe_lib.ops.dtensor_shards import locate_local_part
from recipe_lib.units import format_bytes

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Where a layer's linears are, by the word that lora.target_modules has for them.
LINEARS = {
    "q": ("self_attn", "q_proj"),
    "k": ("self_attn", "k_proj"),
    "v": ("self_attn", "v_proj"),
    "o": ("self_attn", "o_proj"),
    "gate": ("mlp", "gate_proj"),
    "up": ("mlp", "up_proj"),
    "down": ("mlp", "down_proj"),
}

TARGETS_BY_MODULE = {f"{owner}.{child}": word for word, (owner, child) in LINEARS.items()} | {
    "mlp.router": "router",
    "experts.gate_up_proj": "experts",
    "experts.down_proj": "experts",
    "model.embed_tokens": "embedding",
    "lm_head": "head",
}


def add_adapters(model: Decoder, cfg: LoraConfig, dtype: torch.dtype) -> None:
    """Freezes the model and puts adapters on its `cfg.targets`, in place; call it on the meta
    model.

    An external model's are on the linears of its layers that `cfg.target_modules` says.

    dtype: of the adapters unless `cfg.dtype` says one. Frozen parameters keep names and types, also
    those that the embedding and the head share; with `cfg.quantize_base` all linears of the layers,
    adapted or not, get quantized storage. Raises ConfigError for a target that no layer has, where
    `cfg.quantize_base` would leave most of the layers' weights as they are, and for a model that
    `parallelize` has sharded already.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ConfigError(
            "add_adapters: the model's parameters are sharded already; call it before parallelize"
        )
    settings = build_adapter_settings(cfg, dtype)
    model.requires_grad_(False)
    if isinstance(model.spec, ExternalSpec):
        model.spec.add_adapters(model, cfg, dtype)
        refuse_unquantized(model, cfg.quantize_base)
        return
    names = list_layer_names(model)
    for target, (owner, child) in LINEARS.items():
        places = [model.get_submodule(name) for name in names]
        owners = []
        for layer in places:
            if isinstance(dict(layer.named_modules()).get(f"{owner}.{child}"), nn.Linear):
                owners.append(layer.get_submodule(owner))
        if target in cfg.target_modules and names and not owners:
            experts = any(
                isinstance(module, Mixture) for layer in places for module in layer.modules()
            )
            other = "; experts are named by experts" if experts and owner == "mlp" else ""
            raise ConfigError(
                f"lora.target_modules: {target}: no layer of the model has a linear"
                f" {owner}.{child}; remove it from the list{other}"
            )
        for module in owners:
            own = settings if target in cfg.targets else None
            setattr(module, child, adapt(getattr(module, child), own, cfg.quantize_base))
    _adapt_mixtures([model.get_submodule(name) for name in names], cfg, settings)
    refuse_unquantized(model, cfg.quantize_base)
    if "embedding" in cfg.targets:
        model.model.embed_tokens = adapt(model.model.embed_tokens, settings)
    if "head" in cfg.targets:
        model.lm_head = adapt(model.lm_head, settings)


def quantize_frozen(model: Decoder, kind: str, dtype: torch.dtype) -> None:
    """Freezes a meta model and keeps its layers' linears in `kind`, as `lora.quantize_base` says
    it, without adapters.

    Raises ConfigError where that would leave most of their weights as they are.
    """
    add_adapters(model, LoraConfig(target_modules=[], quantize_base=kind), dtype)


def _adapt_mixtures(layers: list[nn.Module], cfg: LoraConfig, settings: AdapterSettings) -> None:
    """Routers and experts of the layers. Raises ConfigError where one is a target and no layer has
    it.
    """
    mixtures = [
        module for layer in layers for module in layer.modules() if isinstance(module, Mixture)
    ]
    wanted = [target for target in MIXTURE_TARGETS if target in cfg.target_modules]
    if wanted and layers and not mixtures:
        raise ConfigError(
            f"lora.target_modules: {wanted[0]}: no layer of the model has experts; remove it from"
            " the list"
        )
    of_experts = settings if "experts" in wanted else None
    for mixture in mixtures:
        if "router" in wanted:
            mixture.router = adapt(mixture.router, settings)
        for name in ("gate_up_proj", "down_proj"):
            base = getattr(mixture.experts, name)
            setattr(mixture.experts, name, adapt(base, of_experts, cfg.quantize_base))


def build_adapter_settings(cfg: LoraConfig, dtype: torch.dtype) -> AdapterSettings:
    """The settings of the config's adapters; dtype: see `add_adapters`."""
    return AdapterSettings(
        rank=cfg.rank,
        scaling=cfg.alpha / (math.sqrt(cfg.rank) if cfg.rslora else cfg.rank),
        dropout=cfg.dropout,
        dora=cfg.dora,
        dtype=_DTYPES[cfg.dtype] if cfg.dtype else dtype,
    )


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Fills the adapters of a model whose frozen weights are loaded; it then computes what it did
    without them.

    As in PEFT: A uniform within 1 / sqrt(in), B zero; of an embedding A zero, B normal. A
    parameter's values follow from (seed, its name, its full shape) alone. DoRA's lengths are those
    of the loaded weights (a collective).
    """
    for name, parameter in get_adapter_parameters(model).items():
        for local, offset in list_local_parts(model, name, parameter):
            if name.endswith("lora_A.weight"):
                bound = 1 / math.sqrt(parameter.shape[-1])
                fill_random(local, offset, parameter.shape, f"{seed}/{name}", _make_uniform(bound))
            elif name.endswith("lora_embedding_B"):
                key = f"{seed}/{name}"
                fill_random(
                    local,
                    offset,
                    parameter.shape,
                    key,
                    lambda values, generator: values.normal_(generator=generator),
                )
            else:
                local.zero_()
    init_lengths(model)


def _make_uniform(bound: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    return lambda values, generator: values.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def init_lengths(model: nn.Module) -> None:
    """Sets DoRA's lengths to those that the adapted weights have now; nothing without DoRA. A
    collective.

    The weights of one FSDP unit are gathered at a time.
    """
    for unit, members in _group_by_unit(model):
        if unit is not None:
            unit.unshard()
        found = [module.compute_weight_norms() for module in members]
        if unit is not None:
            unit.reshard()
        for module, lengths in zip(members, found, strict=True):
            local, offset = locate_local_part(module.lora_magnitude_vector)
            local.copy_(lengths[offset[0] : offset[0] + local.shape[0]])


def _group_by_unit(model: nn.Module) -> list[tuple[FSDPModule | None, list[AdaptedModule]]]:
    """The adapted modules with DoRA's lengths, by the FSDP unit that holds their parameters; None:
    not sharded.
    """
    units = {
        name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)
    }
    found: dict[str | None, list[AdaptedModule]] = {}
    for name, module in model.named_modules():
        if isinstance(module, AdaptedModule) and module.lora_magnitude_vector is not None:
            holding = [unit for unit in units if unit in ("", name) or name.startswith(f"{unit}.")]
            found.setdefault(max(holding, key=len, default=None), []).append(module)
    return [(None if unit is None else units[unit], members) for unit, members in found.items()]


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return any(part.startswith("lora_") for part in name.split("."))


def get_adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters by name, in the model's order: all that is trained, but for what a
    recipe adds.
    """
    return {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Inside the block the model computes what its frozen weights give, without gradients; all
    ranks alike.

    No gradients, because with checkpointing a layer would run forward again after the block,
    adapters on.
    """
    modules = [module for module in model.modules() if isinstance(module, AdaptedModule)]
    for module in modules:
        module.is_off = True
    _swap_base_weights(model)
    try:
        with torch.no_grad():
            yield
    finally:
        _swap_base_weights(model)
        for module in modules:
            module.is_off = False


def _swap_base_weights(model: nn.Module) -> None:
    """Exchanges what an adapter's file brought along with what the base has in its place."""
    replaced: dict[str, nn.Parameter] = {}
    for name, parameter in getattr(model, "base_weights", {}).items():
        owner, _, leaf = name.rpartition(".")
        replaced[name] = model.get_parameter(name)
        setattr(model.get_submodule(owner), leaf, parameter)
    if replaced:
        model.base_weights = replaced  # type: ignore[assignment]  # a dict, which is no module


def describe_adapters(model: nn.Module, cfg: LoraConfig) -> str:
    """One line for the log: what is trained and what is frozen, counted on the modules; the model
    may be sharded.

    Of a pipeline it is what this rank has. Where all linears are adapted, also what of the layers
    has no adapter, as experts.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    found = measure_coverage(model)
    targets = describe_targets(found, {} if is_external(model) else TARGETS_BY_MODULE)
    here = " in this rank's layers" if get_modules_elsewhere(model) else ""
    parts = [
        f"adapters: {'DoRA' if cfg.dora else 'LoRA'} of rank {cfg.rank} on {targets}{here}:"
        f" {sum(parameter.numel() for parameter in trained):,} parameters trained, {_format_size(trained)}"
        f" on top of {_format_size(frozen)} frozen"
    ]
    if "all-linear" in cfg.target_modules and _is_worth_naming(found.bare, found.numbers):
        parts.append(f"none on {_describe_share(found.bare, found.numbers)}")
    if cfg.quantize_base != "none":
        left = f", but not {_describe_share(found.wide, found.numbers)}, which stay in {_describe_dtype(model)}"
        left = left if _is_worth_naming(found.wide, found.numbers) else ""
        parts.append(f"{found.quantized} linears of the layers in {cfg.quantize_base}{left}")
    return "; ".join(parts)


def _format_size(parameters: Iterable[Tensor]) -> str:
    return format_bytes(sum(parameter.nbytes for parameter in parameters))


# What adapters and quantized weights cover of a model, counted on its modules as they are.


_NAMED = 3  # kinds of matrices that a line names
_SMALL = 0.005  # share of the layers' weights below which what is left out is not worth a word


@dataclass(frozen=True)
class Coverage:
    """The frozen matrices of a model's layers. adapted: kind of module -> in how many layers it is,
    and how many the lists have in which these are. outside: adapted modules outside of the layers.
    quantized: modules that are kept in fewer bits. numbers: of all matrices of the layers. bare,
    wide: kind -> numbers without an adapter, and in their own type; kinds are names without the
    numbers of layers.
    """

    adapted: Mapping[str, tuple[int, int]]
    outside: tuple[str, ...]
    quantized: int
    numbers: int
    bare: Mapping[str, int]
    wide: Mapping[str, int]


def measure_coverage(model: nn.Module) -> Coverage:
    """Counts modules and numbers of a model, sharded or not."""
    others = (
        tuple(f"{name}." for name in model.other_parts) if isinstance(model, LanguageModel) else ()
    )
    names = [name for name in list_layer_names(model) if not name.startswith(others)]
    adapted: dict[str, set[str]] = {}
    bare: Counter[str] = Counter()
    wide: Counter[str] = Counter()
    quantized: list[int] = []
    lists = Counter(map(_get_list_name, names))  # a model may have others beside that of its layers
    for layer in names:
        for name, module in model.get_submodule(layer).named_modules():
            name = (
                name or _get_list_name(layer).rpartition(".")[2]
            )  # an element that is a linear itself
            matrices: dict[str, int] = {}
            if isinstance(module, QuantizedLinear):
                quantized.append(module.in_features * module.out_features)
                matrices[get_matrix_kind(name)] = quantized[-1]
            else:
                for parameter_name, parameter in module.named_parameters(recurse=False):
                    full = name if parameter_name == "weight" else f"{name}.{parameter_name}"
                    if parameter.dim() > 1 and "lora_" not in f"{name}.{parameter_name}":
                        matrices[get_matrix_kind(full)] = parameter.numel()
                wide.update(matrices)
            if isinstance(module, AdaptedModule):
                adapted.setdefault(get_matrix_kind(name), set()).add(layer)
            else:
                bare.update(matrices)
    inside = tuple(f"{name}." for name in names)
    modules = [name for name, module in model.named_modules() if isinstance(module, AdaptedModule)]
    return Coverage(
        adapted={
            kind: (len(layers), sum(lists[name] for name in set(map(_get_list_name, layers))))
            for kind, layers in adapted.items()
        },
        outside=tuple(name for name in modules if not name.startswith(inside)),
        quantized=len(quantized),
        numbers=sum(quantized) + wide.total(),
        bare=bare,
        wide=wide,
    )


def refuse_unquantized(model: nn.Module, kind: str) -> None:
    """Raises ConfigError where most of the layers' weights would stay as they are in a run that
    asked for `kind`.
    """
    found = measure_coverage(model)
    if kind != "none" and sum(found.wide.values()) > found.numbers / 2:
        raise ConfigError(
            f"lora.quantize_base={kind}: {_describe_share(found.wide, found.numbers)} would stay in"
            f" {_describe_dtype(model)}: torch's own linears are quantized, with nf4 those of blocks of 64,"
            " and no parameters of 3 dimensions, as experts of other classes are; set"
            " lora.quantize_base=none, and shard the base over more ranks (FSDP) or"
            " memory.cpu_offload=true"
        )


def describe_targets(found: Coverage, words: Mapping[str, str]) -> str:
    """The modules with an adapter, `q_proj, v_proj, up_proj (in 1 of 4 layers)`. words: kind ->
    shorter name.
    """
    leaves = [kind.rpartition(".")[2] for kind in found.adapted]
    named = []
    for (kind, (layers, whole)), leaf in zip(found.adapted.items(), leaves, strict=True):
        part = "" if layers == whole else f" (in {layers} of {whole} layers)"
        named.append(
            words.get(kind, leaf if leaves.count(leaf) == 1 and not leaf.isdigit() else kind) + part
        )
    return ", ".join(dict.fromkeys([*named, *(words.get(name, name) for name in found.outside)]))


def get_matrix_kind(name: str) -> str:
    """The last two parts of a name within a layer, without the numbers that others have too, as of
    experts.
    """
    *before, last = name.split(".")
    return ".".join([*(part for part in before if not part.isdigit()), last][-2:])


def _get_list_name(layer: str) -> str:
    """Return the name of the list that a layer is an element of."""
    return layer.rpartition(".")[0]


def _is_worth_naming(numbers: Mapping[str, int], total: int) -> bool:
    return sum(numbers.values()) > _SMALL * total


def _describe_share(numbers: Mapping[str, int], total: int) -> str:
    """`experts.gate_up_proj, experts.down_proj and 2 more (96.1 % of the layers' weights)`."""
    more = len(numbers) - _NAMED
    others = f" and {more} more" if more > 0 else ""
    largest = sorted(numbers, key=lambda kind: (-numbers[kind], kind))[:_NAMED]
    return (
        f"{', '.join(largest)}{others} ({sum(numbers.values()) / total:.1%} of the layers' weights)"
    )


def _describe_dtype(model: nn.Module) -> str:
    """The type of the weights that are neither quantized nor an adapter's."""
    found: list[Tensor] = [
        parameter
        for name, parameter in model.named_parameters()
        if "lora_" not in name and parameter.is_floating_point() and parameter.element_size() > 1
    ]
    kinds = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float64: "fp64"}
    return kinds.get(found[0].dtype, str(found[0].dtype)) if found else "their type"
