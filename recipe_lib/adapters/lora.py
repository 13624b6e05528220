"""Add LoRA or DoRA adapters to a model, initialize them, and run the model without them.

A recipe calls `add_adapters` on a meta model, before checkpointing, compiling and sharding. It
loads the frozen weights once there is memory, and then calls `init_adapters`: the model begins as
the one that was loaded. `measure_coverage` counts what has an adapter, for the log and for errors.
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
from recipe_lib.models import Decoder, ExternalSpec
from recipe_lib.models.language_model import (
    LanguageModel,
    get_modules_elsewhere,
    is_external,
    list_layer_names,
    list_local_parts,
)
from recipe_lib.models.meta_init import fill_random
from recipe_lib.models.mixture import ExpertLinear, Mixture
from recipe_lib.ops.dtensor_shards import locate_local_part
from recipe_lib.units import format_bytes

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # by value of `lora.dtype`
# Word of lora.target_modules -> (module of a layer, its linear).
LINEARS = {
    "q": ("self_attn", "q_proj"),
    "k": ("self_attn", "k_proj"),
    "v": ("self_attn", "v_proj"),
    "o": ("self_attn", "o_proj"),
    "gate": ("mlp", "gate_proj"),
    "up": ("mlp", "up_proj"),
    "down": ("mlp", "down_proj"),
}

# Last two parts of a module's name -> word of lora.target_modules.
TARGETS_BY_MODULE = {f"{owner}.{child}": word for word, (owner, child) in LINEARS.items()} | {
    "mlp.router": "router",
    "experts.gate_up_proj": "experts",
    "experts.down_proj": "experts",
    "model.embed_tokens": "embedding",
    "lm_head": "head",
}


def add_adapters(model: Decoder, cfg: LoraConfig, dtype: torch.dtype) -> None:
    """Freeze a meta model and put adapters on its `cfg.targets`, in place.

    In an external model (another library's) they go on the linears of its layers that
    `cfg.target_modules` names. Frozen parameters keep names and dtypes, also those that the
    embedding and the head share. With `cfg.quantize_base` all linears of the layers, adapted or
    not, are quantized.

    dtype: of the adapters if `cfg.dtype` is None. Raises ConfigError for a target that no layer
    has, if `cfg.quantize_base` would leave most of the layers' weights unquantized, and for a model
    that `parallelize` has sharded already.
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
    layers = [model.get_submodule(name) for name in list_layer_names(model)]
    for target, (owner, child) in LINEARS.items():
        owners = [
            layer.get_submodule(owner)
            for layer in layers
            if isinstance(dict(layer.named_modules()).get(f"{owner}.{child}"), nn.Linear)
        ]
        if target in cfg.target_modules and layers and not owners:
            has_experts = owner == "mlp" and _find_mixtures(layers)
            hint = "; experts are named by experts" if has_experts else ""
            raise ConfigError(
                f"lora.target_modules: {target}: no layer of the model has a linear"
                f" {owner}.{child}; remove it from the list{hint}"
            )
        # Linears that are no target may still be quantized.
        target_settings = settings if target in cfg.targets else None
        for module in owners:
            adapted = adapt(getattr(module, child), target_settings, cfg.quantize_base)
            setattr(module, child, adapted)
    _adapt_mixtures(layers, cfg, settings)
    refuse_unquantized(model, cfg.quantize_base)
    if "embedding" in cfg.targets:
        model.model.embed_tokens = adapt(model.model.embed_tokens, settings)
    if "head" in cfg.targets:
        model.lm_head = adapt(model.lm_head, settings)


def quantize_frozen(model: Decoder, kind: str, dtype: torch.dtype) -> None:
    """Freeze a meta model and quantize its layers' linears, without adapters.

    kind: `nf4`, `int8` or `none`. dtype: has no effect without adapters. Raises ConfigError if most
    of the layers' weights would stay unquantized.
    """
    add_adapters(model, LoraConfig(target_modules=[], quantize_base=kind), dtype)


def _find_mixtures(layers: list[nn.Module]) -> list[Mixture]:
    return [module for module in nn.ModuleList(layers).modules() if isinstance(module, Mixture)]


def _adapt_mixtures(layers: list[nn.Module], cfg: LoraConfig, settings: AdapterSettings) -> None:
    """Put adapters on routers and experts of the layers, and quantize experts.

    Raises ConfigError if one of them is a target and no layer has experts.
    """
    mixtures = _find_mixtures(layers)
    targets = [target for target in MIXTURE_TARGETS if target in cfg.target_modules]
    if targets and layers and not mixtures:
        raise ConfigError(
            f"lora.target_modules: {targets[0]}: no layer of the model has experts; remove it from"
            " the list"
        )
    expert_settings = settings if "experts" in targets else None
    for mixture in mixtures:
        if "router" in targets:
            mixture.router = adapt(mixture.router, settings)
        for name in ("gate_up_proj", "down_proj"):
            base = getattr(mixture.experts, name)
            setattr(mixture.experts, name, adapt(base, expert_settings, cfg.quantize_base))


def build_adapter_settings(cfg: LoraConfig, dtype: torch.dtype) -> AdapterSettings:
    """Return the settings of the config's adapters; dtype: used if `cfg.dtype` is None."""
    return AdapterSettings(
        rank=cfg.rank,
        scaling=cfg.alpha / (math.sqrt(cfg.rank) if cfg.rslora else cfg.rank),
        dropout=cfg.dropout,
        dora=cfg.dora,
        dtype=_DTYPES[cfg.dtype] if cfg.dtype else dtype,
    )


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Fill the adapters of a model whose frozen weights are loaded.

    The model then computes what it did without them. As in PEFT, A is uniform within 1 / sqrt(in)
    and B zero; for an embedding A is zero and B normal. A parameter's values follow from seed, name
    and full shape alone. With DoRA it is a collective: magnitudes are norms of the loaded weights.
    """
    for name, parameter in get_adapter_parameters(model).items():
        # With the name and not a running number: a rank of a pipeline has some of the parameters.
        key = f"{seed}/{name}"
        for local, offset in list_local_parts(model, name, parameter):
            if name.endswith("lora_A.weight"):
                draw = _make_uniform(1 / math.sqrt(parameter.shape[-1]))
                fill_random(local, offset=offset, shape=parameter.shape, key=key, draw=draw)
            elif name.endswith("lora_embedding_B"):
                fill_random(local, offset=offset, shape=parameter.shape, key=key, draw=_draw_normal)
            else:
                local.zero_()
    init_lengths(model)


def _draw_normal(values: Tensor, generator: torch.Generator) -> Tensor:
    return values.normal_(generator=generator)


def _make_uniform(bound: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    return lambda values, generator: values.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def init_lengths(model: nn.Module) -> None:
    """Set DoRA's magnitudes to the norms of the adapted weights, in place; without DoRA do nothing.

    A collective: the weights of one FSDP unit (a module wrapped by itself) are gathered at a time.
    """
    for unit, members in _group_by_unit(model):
        if unit is not None:
            unit.unshard()
        norms = [module.compute_weight_norms() for module in members]
        if unit is not None:
            unit.reshard()
        # Written after resharding, which discards what is written to a gathered parameter.
        for module, lengths in zip(members, norms, strict=True):
            local, offset = locate_local_part(module.lora_magnitude_vector)
            local.copy_(lengths[offset[0] : offset[0] + local.shape[0]])


def _group_by_unit(model: nn.Module) -> list[tuple[FSDPModule | None, list[AdaptedModule]]]:
    """Return the modules with DoRA's magnitudes, by the FSDP unit that holds their parameters.

    A unit None has those that are not sharded.
    """
    units = {
        name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)
    }
    members: dict[str | None, list[AdaptedModule]] = {}
    for name, module in model.named_modules():
        if isinstance(module, AdaptedModule) and module.lora_magnitude_vector is not None:
            # Units are nested; the innermost has the longest name.
            around = [unit for unit in units if unit in ("", name) or name.startswith(f"{unit}.")]
            members.setdefault(max(around, key=len, default=None), []).append(module)
    return [(None if unit is None else units[unit], modules) for unit, modules in members.items()]


def is_adapter(name: str) -> bool:
    """Return True if a parameter of this name belongs to an adapter."""
    return any(part.startswith("lora_") for part in name.split("."))


def get_adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapters' parameters by name, in the model's order.

    They are all that is trained, but for parameters that a recipe unfreezes.
    """
    return {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Let the model compute with its frozen weights alone, without gradients, inside the block.

    All ranks must enter it together. Blocks must not be nested.
    """
    modules = [module for module in model.modules() if isinstance(module, AdaptedModule)]
    for module in modules:
        module.is_off = True
    _swap_base_weights(model)
    try:
        # With gradients a checkpointed layer would run forward again after the block, adapters on.
        with torch.no_grad():
            yield
    finally:
        _swap_base_weights(model)
        for module in modules:
            module.is_off = False


def _swap_base_weights(model: nn.Module) -> None:
    """Exchange parameters that an adapter's file replaced in full for the base's, or back.

    `model.base_weights` has the ones that are not in use, by name.
    """
    replaced: dict[str, nn.Parameter] = {}
    for name, parameter in getattr(model, "base_weights", {}).items():
        owner, _, leaf = name.rpartition(".")
        replaced[name] = model.get_parameter(name)
        setattr(model.get_submodule(owner), leaf, parameter)
    if replaced:
        model.base_weights = replaced  # type: ignore[assignment]  # a dict, which is no module


def describe_adapters(model: nn.Module, cfg: LoraConfig) -> str:
    """Return in one line, for the log, what is trained and what is frozen.

    It counts full parameters, also of a sharded model; in a pipeline those of this rank. If all
    linears are targets, it also names matrices of the layers without adapter, such as experts.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    coverage = measure_coverage(model)
    targets = describe_targets(coverage, {} if is_external(model) else TARGETS_BY_MODULE)
    where = " in this rank's layers" if get_modules_elsewhere(model) else ""
    parts = [
        f"adapters: {'DoRA' if cfg.dora else 'LoRA'} of rank {cfg.rank} on {targets}{where}:"
        f" {sum(parameter.numel() for parameter in trained):,} parameters trained,"
        f" {_format_size(trained)} on top of {_format_size(frozen)} frozen"
    ]
    if "all-linear" in cfg.target_modules and _is_worth_naming(coverage.bare, coverage.numbers):
        parts.append(f"none on {_describe_share(coverage.bare, coverage.numbers)}")
    if cfg.quantize_base != "none":
        rest = ""
        if _is_worth_naming(coverage.wide, coverage.numbers):
            rest = (
                f", but not {_describe_share(coverage.wide, coverage.numbers)}, which stay in"
                f" {_describe_dtype(model)}"
            )
        parts.append(f"{coverage.quantized} linears of the layers in {cfg.quantize_base}{rest}")
    return "; ".join(parts)


def _format_size(parameters: Iterable[Tensor]) -> str:
    return format_bytes(sum(parameter.nbytes for parameter in parameters))


_NAMED = 3  # the most kinds of matrices that a log line names
_SMALL = 0.005  # share of the layers' weights below which matrices left out are not mentioned


@dataclass(frozen=True)
class Coverage:
    """The frozen matrices of a model's layers, by whether they are adapted and quantized.

    A kind is a matrix's name without the numbers of layers, such as `mlp.up_proj`, see
    `get_matrix_kind`.
    """

    # Kind -> (number of layers where it is adapted, length of the lists of layers that have it).
    adapted: Mapping[str, tuple[int, int]]
    outside: tuple[str, ...]  # names of adapted modules outside of the layers
    quantized: int  # modules that are kept in fewer bits
    numbers: int  # elements of all matrices of the layers
    bare: Mapping[str, int]  # kind -> elements without an adapter
    wide: Mapping[str, int]  # kind -> elements that are not quantized


def measure_coverage(model: nn.Module) -> Coverage:
    """Count the adapted and quantized matrices of a model's layers, sharded or not."""
    # Other parts, such as the image encoder of a multimodal model, are not counted.
    other_parts = model.other_parts if isinstance(model, LanguageModel) else ()
    prefixes = tuple(f"{part}." for part in other_parts)
    names = [name for name in list_layer_names(model) if not name.startswith(prefixes)]
    adapted: dict[str, set[str]] = {}
    bare: Counter[str] = Counter()
    wide: Counter[str] = Counter()
    quantized: list[int] = []
    # Number of layers by list of layers, of which a model may have several.
    lists = Counter(map(_get_list_name, names))
    for layer in names:
        for name, module in model.get_submodule(layer).named_modules():
            # A layer that is itself a linear has the name of its list.
            name = name or _get_list_name(layer).rpartition(".")[2]
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
    """Raise ConfigError if most of the layers' weights are not quantized; kind `none`: never."""
    coverage = measure_coverage(model)
    if kind != "none" and sum(coverage.wide.values()) > coverage.numbers / 2:
        unknown = find_unknown_experts(model)
        raise ConfigError(
            f"lora.quantize_base={kind}: {_describe_share(coverage.wide, coverage.numbers)} would"
            f" stay in {_describe_dtype(model)}: torch's own linears and experts are quantized,"
            f" with nf4 those of blocks of 64{unknown and f', and {unknown}'}; set"
            " lora.quantize_base=none, and shard the base over more ranks (FSDP) or"
            " memory.cpu_offload=true"
        )


def find_unknown_experts(model: nn.Module) -> str:
    """Return words for messages on experts that `external.experts` does not know; "": none."""
    unknown = [
        f"{type(module).__name__}.{name} is in no layout of experts that is known"
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and not isinstance(module, (nn.Conv1d, ExpertLinear))
    ]
    return unknown[0] if unknown else ""


def describe_targets(coverage: Coverage, words: Mapping[str, str]) -> str:
    """Return the modules with an adapter: `q_proj, v_proj, up_proj (in 1 of 4 layers)`.

    words: kind -> the name to show, for kinds that have a shorter one.
    """
    leaves = [kind.rpartition(".")[2] for kind in coverage.adapted]
    descriptions = []
    for (kind, (count, total)), leaf in zip(coverage.adapted.items(), leaves, strict=True):
        # The last part of the name alone, if no other kind has it and it is no number.
        name = leaf if leaves.count(leaf) == 1 and not leaf.isdigit() else kind
        share = "" if count == total else f" (in {count} of {total} layers)"
        descriptions.append(words.get(kind, name) + share)
    descriptions += [words.get(name, name) for name in coverage.outside]
    return ", ".join(dict.fromkeys(descriptions))


def get_matrix_kind(name: str) -> str:
    """Return the last two parts of a name within a layer, without numbers such as an expert's."""
    *before, last = name.split(".")
    return ".".join([*(part for part in before if not part.isdigit()), last][-2:])


def _get_list_name(layer: str) -> str:
    return layer.rpartition(".")[0]


def _is_worth_naming(numbers: Mapping[str, int], total: int) -> bool:
    return sum(numbers.values()) > _SMALL * total


def _describe_share(numbers: Mapping[str, int], total: int) -> str:
    """Return `gate_up_proj, down_proj, q_proj and 2 more (96.1% of the layers' weights)`.

    numbers: kind -> elements. total: elements of all matrices of the layers.
    """
    more = len(numbers) - _NAMED
    rest = f" and {more} more" if more > 0 else ""
    largest = sorted(numbers, key=lambda kind: (-numbers[kind], kind))[:_NAMED]
    return (
        f"{', '.join(largest)}{rest} ({sum(numbers.values()) / total:.1%} of the layers' weights)"
    )


def _describe_dtype(model: nn.Module) -> str:
    """Return the dtype of the weights that are neither quantized nor an adapter's, for messages."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float64: "fp64"}
    frozen = (weight for name, weight in model.named_parameters() if "lora_" not in name)
    # Quantized weights are carried as floating-point numbers of 8 bits.
    wide = (weight for weight in frozen if weight.is_floating_point() and weight.itemsize > 1)
    return next((names.get(weight.dtype, str(weight.dtype)) for weight in wide), "their type")
