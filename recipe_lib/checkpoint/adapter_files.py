"""A PEFT adapter's files: what is in them, from their headers, and whether it goes with a model and
a config.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from recipe_lib.adapters.peft_names import (
    BASE_WEIGHT,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    PREFIX,
    FileModule,
    build_file_modules,
    complete_module_name,
    find_adapted_modules,
    get_extra_name,
    is_target,
    list_targets,
    split_name,
)
from recipe_lib.adapters.peft_patterns import PatternError, find_first_matches
from recipe_lib.checkpoint.adapter_base_weights import (
    VOCABULARY,
    FileTensorName,
    SavedTensor,
    SavedWeights,
    add_saved,
    find_saved,
)
from recipe_lib.checkpoint.adapter_config import (
    PATTERN_REMEDY,
    TENSOR_FILE,
    AdapterConfig,
    compute_scaling,
    list_saved_names,
    read_adapter_config,
)
from recipe_lib.checkpoint.safetensors_files import Header, read_header
from recipe_lib.checkpoint.tensor_matching import READABLE_TYPES
from recipe_lib.checkpoint.weight_loading import (
    check_copies,
    check_finite,
    compute_base_fingerprint,
)
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError, raise_faults
from recipe_lib.models.families import has_score_head
from recipe_lib.models.spec import SCORE, ExternalSpec, ModelSpec
from recipe_lib.reading import parse_json
from recipe_lib.units import name_first

# Metadata of that file, besides what PEFT reads: which base it was trained on, and how that was
# stored.
BASE_FINGERPRINT, BASE_DTYPE, BASE_STORAGE = "tune_base", "tune_base_dtype", "tune_base_storage"
SCORE_KEYS = "tune_score_head"  # what `score_config` adds to a config.json
OF_SCORES = ("id2label", "label2id", "pad_token_id", "problem_type")
_EXPERT_APART = re.compile(r"\.experts\.\d+\.")
BASE_IMPLEMENTATION = (  # of a model that was not the library's own decoder
    "tune_base_implementation"
)


@dataclass(frozen=True)
class AdapterFile:
    """An adapter on disk."""

    folder: Path
    config: AdapterConfig
    # Module as files name it -> what follows its name -> (name in the file, header).
    tensors: Mapping[str, Mapping[str, FileTensorName]]
    metadata: Mapping[str, str]
    extras: Mapping[str, FileTensorName] = field(
        default_factory=dict
    )  # by our name, what a recipe added to the model
    saved: Mapping[str, SavedTensor] = field(
        default_factory=dict
    )  # of the base, by the name that PEFT has for each

    @property
    def path(self) -> Path:
        """The file with the tensors."""
        return self.folder / TENSOR_FILE

    def modules(self, spec: ModelSpec) -> list[FileModule]:
        """Return the modules that have an adapter; all of them are the model's, once `check_fits`
        has said so.
        """
        modules = [
            module for name, module in build_file_modules(spec).items() if name in self.tensors
        ]
        self.config.match_patterns(modules)
        return modules

    def read(self, module: str, suffix: str) -> torch.Tensor:
        """Return a whole tensor."""
        with safe_open(str(self.path), framework="pt") as file:
            return file.get_tensor(self.tensors[module][suffix][0])

    def read_extra(self, name: str) -> torch.Tensor:
        """Return a whole extra parameter."""
        with safe_open(str(self.path), framework="pt") as file:
            return file.get_tensor(self.extras[name][0])


def read_adapter(folder: Path) -> AdapterFile:
    """Return the adapter in a folder, checked by itself. Raises CheckpointError."""
    config = read_adapter_config(folder)
    path = folder / TENSOR_FILE
    if not path.is_file():
        pickled = folder / "adapter_model.bin"
        raise CheckpointError(
            f"{folder}: has adapter_model.bin but no {TENSOR_FILE}; pickled weights can run code"
            " and are not read: save the adapter with safe_serialization=True"
            if pickled.is_file()
            else f"{folder}: has no {TENSOR_FILE}; export or download the adapter again"
        )
    header = read_header(path)
    tensors: dict[str, dict[str, FileTensorName]] = {}
    extras: dict[str, FileTensorName] = {}
    saved: dict[str, SavedTensor] = {}
    names_of_extras = list_saved_names(header)
    unknown = []
    for name, entry in header.tensors.items():
        module_and_suffix = split_name(name, of_text=BASE_IMPLEMENTATION not in header.metadata)
        if get_extra_name(name) in names_of_extras:
            extras[get_extra_name(name)] = (name, entry)
        elif module_and_suffix is not None and ".token_adapter." not in name:
            module, suffix = module_and_suffix
            tensors.setdefault(complete_module_name(module, config.parameters), {})[suffix] = (
                name,
                entry,
            )
            if suffix == BASE_WEIGHT:
                add_saved(saved, name, entry)
        elif not add_saved(
            saved, name, entry
        ):  # rows of tokens too, which end as a copy beside an adapter does
            unknown.append(name)
    _check_contents(path, header, unknown=unknown, extras=extras)
    return AdapterFile(
        folder=folder,
        config=config,
        tensors=tensors,
        metadata=header.metadata,
        extras=extras,
        saved=saved,
    )


def read_score_keys(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of config.json that an adapter with a score head keeps: classes' names,
    padding.
    """
    try:
        keys = parse_json(metadata.get(SCORE_KEYS, "{}"))
    except ValueError:
        return {}
    return (
        {name: keys[name] for name in OF_SCORES if name in keys} if isinstance(keys, dict) else {}
    )


def _check_contents(
    path: Path, header: Header, unknown: list[str], extras: Collection[str]
) -> None:
    faults = []
    if unknown:
        faults.append(
            f"{path}: {name_first(unknown, 'is', 'are')} no tensor of a LoRA or DoRA adapter;"
            " expected names such as"
            " base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        )
    if not header.tensors:
        faults.append(f"{path}: holds no tensors; export the adapter again")
    types = {
        name: entry.dtype
        for name, entry in header.tensors.items()
        if get_extra_name(name) not in extras
    }
    unreadable = [name for name, dtype in types.items() if dtype not in READABLE_TYPES]
    if unreadable:
        first = min(unreadable)
        faults.append(
            f"{path}: {first} is of type {types[first]}, expected F32, BF16, F16 or F64; export the"
            " adapter again"
        )
    raise_faults(CheckpointError, faults)


def check_fits(adapter: AdapterFile, spec: ModelSpec) -> SavedWeights:
    """Return what the adapter has of the base's weights. spec: of the base as it is.

    Raises CheckpointError, all faults at once, if names or shapes are not those of an adapter for
    this model, and for numbers that are none.
    """
    if SCORE in adapter.extras and not has_score_head(spec):
        raise CheckpointError(
            f"{adapter.folder}: is an adapter with a score head, which predicts no tokens; expected"
            " one of a causal language model; PEFT opens it on transformers'"
            " AutoModelForSequenceClassification, and a run with lora.merge_on_save=true writes"
            " both as one model"
        )
    with safe_open(str(adapter.path), framework="pt") as file:
        check_finite(((name, file.get_tensor(name)) for name in file.keys()), adapter.path)
    saved = find_saved(adapter, spec)
    known = build_file_modules(saved.spec)
    strange = adapter.tensors.keys() - known.keys()
    faults: list[str | None] = []
    apart = sorted(name for name in strange if _EXPERT_APART.search(name))
    modules = set(spec.layout().modules) if isinstance(spec, ExternalSpec) else set()
    has_experts = getattr(spec, "mixture", None) is not None or any(
        name.endswith(".experts") for name in modules
    )
    if apart and has_experts:
        faults.append(
            f"{adapter.path}: adapts the linears of each expert ({apart[0]}), as transformers 4 has"
            " them; expected mlp.experts.gate_up_proj and mlp.experts.down_proj, in each of which"
            " all experts of a layer are one parameter; merge it with transformers 4 and PEFT, or"
            " train it again"
        )
    elif strange & modules:
        faults.append(
            f"{adapter.path}: {name_first(strange & modules, 'is', 'are')} no linear of this model,"
            " and linears alone may have an adapter with model.implementation=transformers; merge"
            " it with PEFT (merge_and_unload)"
        )
    elif strange:
        faults.append(
            f"{adapter.path}: {name_first(strange, 'is', 'are')} no module of this model; the"
            " adapter was made for another base"
            + (f" ({adapter.config.base})" if adapter.config.base else "")
        )
    adapted = adapter.modules(saved.spec)
    faults.append(
        _find_unselected_fault(adapter, [module for module in adapted if not module.experts])
    )
    module_faults = (
        _find_module_fault(adapter, known[name])
        for name in sorted(adapter.tensors.keys() - strange)
    )
    faults.append(
        next(filter(None, module_faults), None)
    )  # one is enough: the others have the same cause
    raise_faults(CheckpointError, faults)
    return saved


def _find_unselected_fault(adapter: AdapterFile, modules: list[FileModule]) -> str | None:
    """Return the first module with an adapter that PEFT leaves out, and the key; None: it takes
    all.
    """
    names = []
    for module in modules:
        suffix, (name, _) = next(iter(adapter.tensors[module.name].items()))
        names.append(name.removeprefix(PREFIX).removesuffix(f".{suffix}"))
    unselected = find_unselected(adapter.config, names)
    if unselected is None:
        return None
    name, key = unselected
    return (
        f"{adapter.config.path}: {key}: leaves out {name}, which {adapter.path.name} has an adapter"
        f" for, and PEFT would drop; make {key} fit the file, or remove the module's tensors"
        " from it"
    )


def _find_module_fault(adapter: AdapterFile, module: FileModule) -> str | None:
    config = adapter.config
    tensors = adapter.tensors[module.name]
    expected = module.shapes(config.get_rank(module), config.dora)
    missing = expected.keys() - tensors.keys()
    if module.is_embedding and LORA_A in tensors:
        return (
            f"{config.path}: target_parameters: found the embedding's weight, expected embed_tokens"
            " among target_modules; merge it with PEFT first (merge_and_unload), or train it again"
        )
    if missing:
        return (
            f"{adapter.path}: {module.name}.{min(missing)} is missing; export or download the"
            " adapter again"
        )
    if MAGNITUDE in tensors and not config.dora:
        return (
            f"{adapter.path}: {module.name} has DoRA's {MAGNITUDE}, adapter_config.json says use_dora"
            " false; export or download the adapter again"
        )
    if BASE_WEIGHT in tensors:
        expected[BASE_WEIGHT] = (module.rows, module.columns)
    strange = tensors.keys() - expected.keys()
    if strange:
        name = f"{module.name}.{min(strange)}"
        return (
            f"{adapter.path}: {name} is no tensor of this kind of module; export the adapter again"
        )
    for suffix, expected_shape in expected.items():
        shape = tensors[suffix][1].shape
        if shape != expected_shape:
            return (
                f"{adapter.path}: {module.name}.{suffix} has shape {list(shape)}, base and"
                f" adapter_config.json make it {list(expected_shape)}; the adapter was made for"
                " another base or rank"
            )
    return None


def check_adapter(folder: Path, spec: ModelSpec, cfg: LoraConfig, base: Path | None = None) -> None:
    """Raise CheckpointError for what is wrong with going on to train an adapter, before memory is
    taken.

    spec, cfg: the model's and the run's. base: the checkpoint that it will be trained on, compared
    with the one the adapter was trained on where its file says which that was. Reads headers, and
    little more.
    """
    adapter = read_adapter(folder)
    saved = check_fits(adapter, spec)
    if saved.parts:
        raise CheckpointError(
            f"{adapter.path}: brings {min(saved.parts)} along, and only the matrices of adapters"
            f" are trained further; merge it into its base first (tune export {folder} --merge),"
            " and train the merged model"
        )
    raise_faults(
        CheckpointError, [_find_kind_fault(adapter, cfg), _find_target_fault(adapter, spec, cfg)]
    )
    raise_faults(CheckpointError, [_find_rank_fault(adapter, spec, cfg)])
    if base is not None:
        check_base(adapter, spec, base)


def check_base(adapter: AdapterFile, spec: ModelSpec, base: Path) -> None:
    """Raise CheckpointError unless the adapter was trained on these weights, as far as its file can
    tell.
    """
    made_for = adapter.metadata.get(BASE_FINGERPRINT)
    if made_for is not None and made_for != compute_base_fingerprint(spec, base):
        raise CheckpointError(
            f"{adapter.folder}: was trained on other weights than those of {base}; use its own base"
            " model" + (f", {adapter.config.base}" if adapter.config.base else "")
        )
    frozen = {
        name: tensor.frozen for name, tensor in adapter.saved.items() if tensor.frozen is not None
    }
    resized = {
        name for name in VOCABULARY & frozen.keys() if frozen[name][1].shape[0] != spec.vocab_size
    }
    copies = {name: file_name for name, (file_name, _) in frozen.items() if name not in resized}
    check_copies(adapter.path, copies, spec, base)


def _find_kind_fault(adapter: AdapterFile, cfg: LoraConfig) -> str | None:
    found = adapter.config
    changes = []
    if found.dora != cfg.dora:
        changes.append(f"lora.dora={str(found.dora).lower()}")
    if found.rslora != cfg.rslora:
        changes.append(f"lora.rslora={str(found.rslora).lower()}")
    if not changes:
        return None
    kind = ("DoRA" if found.dora else "LoRA") + (" scaled by rsLoRA" if found.rslora else "")
    return (
        f"{adapter.folder}: holds {kind}, the config asks for another kind; set {' '.join(changes)}"
    )


def _find_target_fault(adapter: AdapterFile, spec: ModelSpec, cfg: LoraConfig) -> str | None:
    wanted = {module.name: module for module in find_adapted_modules(spec, cfg)}
    found = {module.name: find_used_parts(adapter, module) for module in adapter.modules(spec)}
    extra = {
        part.target
        for module in found.values()
        for part in module.parts
        if not is_target(part, cfg)
    }
    if isinstance(spec, ExternalSpec):
        return _find_external_target_fault(adapter, wanted, found)
    targets = list_targets(found.values())
    missing = [name for name in wanted if name not in found]
    partial = [name for name in missing if set(list_targets([wanted[name]])) & set(targets)]
    if partial:
        first = wanted[partial[0]]
        others = "layers or matrices" if first.experts else "layers"
        return (
            f"{adapter.path}: has no adapter for {first.full_name}, though other {others} have one;"
            f" adapters of some {others} only cannot be trained on: merge it into the base first"
            " (tune export --merge)"
        )
    if missing or extra:
        return (
            f"{adapter.folder}: adapts {', '.join(targets)}, found lora.target_modules "
            f"{', '.join(cfg.target_modules)}; set "
            f"lora.target_modules=[{','.join(targets)}]"
        )
    return None


def _find_external_target_fault(
    adapter: AdapterFile, wanted: Collection[str], found: Collection[str]
) -> str | None:
    """Of an external model, whose modules have no words."""
    if set(wanted) == set(found):
        return None
    first = min(set(wanted) ^ set(found))
    fault = "has no adapter for" if first in wanted else "adapts"
    ends = sorted({name.rpartition(".")[2] for name in found})
    return (
        f"{adapter.folder}: {fault} {first}, unlike lora.target_modules; set"
        f" lora.target_modules=[{','.join(ends)}]"
    )


def find_used_parts(adapter: AdapterFile, module: FileModule) -> FileModule:
    """The module with only those of its fused parts whose rows the adapter changes (all, if it
    changes none yet).
    """
    if len(module.parts) == 1:
        return module
    second = adapter.read(module.name, LORA_B)
    parts = tuple(
        part for part in module.parts if second[part.start : part.start + part.rows].any()
    )
    return replace(module, parts=parts or module.parts)


def is_stacked(adapter: AdapterFile, module: FileModule, parts: int, rank: int) -> bool:
    """Whether a fused module's adapter is that of `parts` adapters of `rank`, one after the other,
    separate in B.
    """
    if parts < 2 or adapter.config.get_rank(module) != parts * rank:
        return False
    second = adapter.read(module.name, LORA_B)
    used = find_used_parts(adapter, module).parts
    return all(
        not second[part.start : part.start + part.rows, at * rank : (at + 1) * rank].any()
        for number, part in enumerate(used)
        for at in range(parts)
        if at != number
    )


def find_usual_scaling(adapter: AdapterFile, spec: ModelSpec) -> float:
    """The scaling that the config gives to all modules without a pattern; if there are none, what
    most of them have.
    """
    scalings = [adapter.config.compute_scaling(module) for module in adapter.modules(spec)]
    usual = compute_scaling(adapter.config.alpha, adapter.config.rank, adapter.config.rslora)
    return usual if usual in scalings else max(set(scalings), key=scalings.count)


def _find_rank_fault(adapter: AdapterFile, spec: ModelSpec, cfg: LoraConfig) -> str | None:
    """Every module has to have lora.rank or less, and the scaling that is usual among them must be
    the config's.
    """
    ranks = []
    for module in adapter.modules(spec):
        rank = adapter.config.get_rank(module)
        targets = sum(is_target(part, cfg) for part in module.parts)
        ranks.append(cfg.rank if is_stacked(adapter, module, targets, cfg.rank) else rank)
    rank, usual = max(ranks), find_usual_scaling(adapter, spec)
    if rank != cfg.rank or abs(usual / compute_scaling(cfg.alpha, cfg.rank, cfg.rslora) - 1) > 1e-6:
        alpha = usual / compute_scaling(1.0, rank, cfg.rslora)
        return (
            f"{adapter.folder}: has rank {rank} and alpha {alpha:g}, found lora.rank={cfg.rank} "
            f"lora.alpha={cfg.alpha:g}; set lora.rank={rank} lora.alpha={alpha:g}"
        )
    return None


# The modules that PEFT puts an adapter on, by the keys of a config: it leaves others out when it
# loads a file.


_ALL_LINEAR = "all-linear"  # but for the head, which is a linear too
_NO_LINEARS = ("embed_tokens", "lm_head")


def find_unselected(config: AdapterConfig, names: Sequence[str]) -> tuple[str, str] | None:
    """Return the first module that PEFT would leave out, and the key by which it does; None: it
    leaves out none.

    names: of modules, as the file has them. Raises CheckpointError for a pattern that cannot be
    matched.
    """
    excluded = _match(config, "exclude_modules", names)
    targeted = _match(config, "target_modules", names)
    chosen: Any = config.selection.get("target_modules")
    layers: Any = config.selection.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    for number, name in enumerate(names):
        if any(f".{name}.weight".endswith(f".{end}") for end in config.parameters):
            continue  # by its parameter: PEFT asks no other key then
        if excluded[number]:
            return name, "exclude_modules"
        if any(f".{saved}." in f".{name}." for saved in config.saved):
            return name, "modules_to_save"
        if (
            chosen is not None and not targeted[number]
        ):  # None: PEFT's own table, or target_parameters
            return name, "target_modules"
        if isinstance(chosen, list) and name in chosen:
            continue  # by its whole name, whatever the layers
        if layers and _find_layer(config, name) not in layers:
            return name, "layers_to_transform"
    return None


def _match(config: AdapterConfig, key: str, names: Sequence[str]) -> list[bool]:
    """Return for each name whether a key that takes ends of names or a pattern names it."""
    chosen: Any = config.selection.get(key)
    if key == "target_modules" and isinstance(chosen, str) and chosen.lower() == _ALL_LINEAR:
        return [not name.endswith(_NO_LINEARS) for name in names]
    if isinstance(chosen, str) and chosen:
        try:
            return [
                number is not None
                for number in find_first_matches((chosen,), tuple(names), whole=True)
            ]
        except PatternError as fault:
            raise CheckpointError(f"{config.path}: {key}: {fault}; {PATTERN_REMEDY}") from None
    return [any(f".{name}".endswith(f".{end}") for end in chosen or ()) for name in names]


def _find_layer(config: AdapterConfig, name: str) -> int | None:
    """Return the number of the layer that a module is in; of several numbers in its name the
    first.
    """
    patterns: Any = config.selection.get("layers_pattern")
    if not patterns:
        layer_match = re.match(r".*?\.[^.]*\.(\d+)\.", name)
    else:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        matches = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name) for pattern in patterns)
        layer_match = next((match for match in matches if match), None)
    return int(layer_match[1]) if layer_match else None
