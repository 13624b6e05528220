"""Read the files of a PEFT adapter, and check them against a model, a config and a base model.

Commands and runs call `read_adapter(folder)`, then `check_fits` (names and shapes against a model)
and `check_base` (the weights it was trained on); a run that trains it further calls
`check_adapter`. A `FileModule` is a module as the file names it; it has several modules of ours as
its parts where the file fuses them (Phi 3's qkv). A target is a word of lora.target_modules.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
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
from recipe_lib.checkpoint.adapter_base_weights import (
    VOCABULARY,
    FileTensorName,
    SavedTensor,
    SavedWeights,
    add_saved,
    find_saved,
)
from recipe_lib.checkpoint.adapter_config import (
    TENSOR_FILE,
    AdapterConfig,
    compute_scaling,
    find_first_matches,
    list_saved_names,
    read_adapter_config,
)
from recipe_lib.checkpoint.huggingface import (
    check_copies,
    check_finite,
    compute_base_fingerprint,
)
from recipe_lib.checkpoint.safetensors_files import READABLE_TYPES, Header, read_header
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError, raise_faults
from recipe_lib.models.spec import SCORE, ExternalSpec, ModelSpec, has_score_head
from recipe_lib.reading import parse_json
from recipe_lib.units import name_first

# Metadata keys that this library writes into the tensor file.
BASE_FINGERPRINT = "tune_base"  # hash of the base that the adapter was trained on
BASE_DTYPE = "tune_base_dtype"  # dtype of the base in training
BASE_STORAGE = "tune_base_storage"  # value of lora.quantize_base in training
BASE_IMPLEMENTATION = "tune_base_implementation"  # library of a base that is not our own decoder
SCORE_KEYS = "tune_score_head"  # the base's values of SCORE_CONFIG_KEYS, as JSON
# Keys of config.json that belong to a score head.
SCORE_CONFIG_KEYS = ("id2label", "label2id", "pad_token_id", "problem_type")


@dataclass(frozen=True)
class AdapterFile:
    """An adapter on disk, without the data of its tensors."""

    # Folder with adapter_config.json and the tensor file.
    folder: Path
    # Contents of adapter_config.json.
    config: AdapterConfig
    # Name of a module in Hugging Face's files -> suffix such as `lora_A.weight` -> (name in the
    # tensor file, header entry).
    tensors: Mapping[str, Mapping[str, FileTensorName]]
    # Metadata of the tensor file.
    metadata: Mapping[str, str]
    # Name in our model -> a parameter that a recipe added to it, or the weight of a score head.
    extras: Mapping[str, FileTensorName] = field(default_factory=dict)
    # Name in the base -> full weights, rows or biases that the file has for it (modules_to_save).
    saved: Mapping[str, SavedTensor] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / TENSOR_FILE

    def list_modules(self, spec: ModelSpec) -> list[FileModule]:
        """Return the modules of a model that this adapter has matrices for.

        Modules of the file that the model lacks are left out; `check_fits` refuses them.

        spec: of the base.
        """
        modules = [
            module for name, module in build_file_modules(spec).items() if name in self.tensors
        ]
        self.config.match_patterns(modules)  # all at once, for `AdapterConfig.get_rank`
        return modules

    def read(self, module: str, suffix: str) -> torch.Tensor:
        """Return a tensor by its module and the suffix of its name, such as `lora_A.weight`."""
        return self.read_tensor(self.tensors[module][suffix][0])

    def read_tensor(self, name: str) -> torch.Tensor:
        with safe_open(str(self.path), framework="pt") as file:
            return file.get_tensor(name)


def read_adapter(folder: Path, spec: ModelSpec | None = None) -> AdapterFile:
    """Return the adapter in a folder, without reading the data of its tensors.

    spec: of the base, which says how the class of a multimodal one names its modules; None: modules
    have the names of a text model, unless this library wrote the file.

    Raises CheckpointError if files are missing or broken, or hold other than an adapter's tensors.
    """
    config = read_adapter_config(folder)
    path = folder / TENSOR_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: has adapter_model.bin but no {TENSOR_FILE}; pickled weights can run code"
            " and are not read: save the adapter with safe_serialization=True"
            if (folder / "adapter_model.bin").is_file()
            else f"{folder}: has no {TENSOR_FILE}; export or download the adapter again"
        )
    header = read_header(path)
    tensors: dict[str, dict[str, FileTensorName]] = {}
    extras: dict[str, FileTensorName] = {}
    saved: dict[str, SavedTensor] = {}
    extra_names = list_saved_names(header)
    unknown_names = []
    has_class_names = isinstance(spec, ExternalSpec) or BASE_IMPLEMENTATION in header.metadata
    for name, entry in header.tensors.items():
        module_and_suffix = split_name(name, of_text=not has_class_names)
        if get_extra_name(name) in extra_names:
            extras[get_extra_name(name)] = (name, entry)
        elif module_and_suffix is not None and ".token_adapter." not in name:
            module, suffix = module_and_suffix
            tensors.setdefault(complete_module_name(module, config.parameters), {})[suffix] = (
                name,
                entry,
            )
            if suffix == BASE_WEIGHT:  # in both: part of the adapter, and may resize the base
                add_saved(saved, name, entry)
        # This includes trained rows of single tokens, whose names end like that of a base weight.
        elif not add_saved(saved, name, entry):
            unknown_names.append(name)
    _check_contents(path, header, unknown=unknown_names, extras=extras)
    return AdapterFile(
        folder=folder,
        config=config,
        tensors=tensors,
        metadata=header.metadata,
        extras=extras,
        saved=saved,
    )


def read_score_keys(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return key -> value of config.json for a model with an adapter's score head.

    Empty if the adapter has stored none, or they cannot be parsed.

    metadata: of the tensor file.
    """
    try:
        keys = parse_json(metadata.get(SCORE_KEYS, "{}"))
    except ValueError:
        return {}
    stored_keys = keys if isinstance(keys, dict) else {}
    return {name: stored_keys[name] for name in SCORE_CONFIG_KEYS if name in stored_keys}


def _check_contents(
    path: Path, header: Header, *, unknown: list[str], extras: Collection[str]
) -> None:
    """Raise CheckpointError for tensors of unknown names or types, and for a file without tensors.

    unknown: names that are none of an adapter's. extras: parameters that a recipe added, which may
    be of any type.
    """
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
        first_name = min(unreadable)
        faults.append(
            f"{path}: {first_name} is of type {types[first_name]}, expected F32, BF16, F16 or F64;"
            " export the adapter again"
        )
    raise_faults(CheckpointError, faults)


def check_fits(adapter: AdapterFile, spec: ModelSpec) -> SavedWeights:
    """Check an adapter against a model; return the full weights of the base in its file.

    spec: of the base model. Raises CheckpointError, with all faults at once, if names or shapes are
    not those of an adapter for this model, and for NaN or infinite values.
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
    known_modules = build_file_modules(saved.spec)
    unknown_names = adapter.tensors.keys() - known_modules.keys()
    faults: list[str | None] = []
    # transformers 4 had a linear for each expert, such as `mlp.experts.3.up_proj`.
    single_experts = sorted(name for name in unknown_names if re.search(r"\.experts\.\d+\.", name))
    modules: set[str] = set()
    if isinstance(spec, ExternalSpec):
        modules.update(spec.layout().modules, spec.layout().left_out_modules)
    has_experts = getattr(spec, "mixture", None) is not None or any(
        name.endswith(".experts") for name in modules
    )
    if single_experts and has_experts:
        faults.append(
            f"{adapter.path}: adapts the linears of each expert ({single_experts[0]}), as"
            " transformers 4 has them; expected mlp.experts.gate_up_proj and"
            " mlp.experts.down_proj, in each of which all experts of a layer are one parameter;"
            " merge it with transformers 4 and PEFT, or train it again"
        )
    elif unknown_names & modules:
        faults.append(
            f"{adapter.path}: {name_first(unknown_names & modules, 'is', 'are')} no linear of this"
            " model, and linears alone may have an adapter with"
            " model.implementation=transformers; merge it with PEFT (merge_and_unload)"
        )
    elif unknown_names:
        base = f" ({adapter.config.base})" if adapter.config.base else ""
        faults.append(
            f"{adapter.path}: {name_first(unknown_names, 'is', 'are')} no module of this model; the"
            f" adapter was made for another base{base}"
        )
    # PEFT selects the experts' parameters by target_parameters, not by these keys.
    linears = [module for module in adapter.list_modules(saved.spec) if not module.experts]
    faults.append(_find_unselected_fault(adapter, linears))
    module_faults = (
        _find_module_fault(adapter, known_modules[name])
        for name in sorted(adapter.tensors.keys() - unknown_names)
    )
    # Only the first: the faults of other modules have the same cause.
    faults.append(next(filter(None, module_faults), None))
    raise_faults(CheckpointError, faults)
    return saved


def _find_unselected_fault(adapter: AdapterFile, modules: list[FileModule]) -> str | None:
    """Return a line about the first module whose adapter PEFT would drop; None: it drops none."""
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
    """Return a line about missing, unknown or misshapen tensors of a module; None: all is well."""
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
            f"{adapter.path}: {module.name} has DoRA's {MAGNITUDE}, adapter_config.json says"
            " use_dora false; export or download the adapter again"
        )
    if BASE_WEIGHT in tensors:  # PEFT saves the weight itself with an adapted embedding or head
        expected[BASE_WEIGHT] = (module.rows, module.columns)
    unknown_suffixes = tensors.keys() - expected.keys()
    if unknown_suffixes:
        return (
            f"{adapter.path}: {module.name}.{min(unknown_suffixes)} is no tensor of this kind of"
            " module; export the adapter again"
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
    """Raise CheckpointError if a run cannot train an adapter further.

    Called before the model is allocated; reads little more than headers.

    spec: of the model. cfg: the run's section `lora`. base: folder of the base model, compared with
    the adapter's own base where the adapter's file has its hash; None: not compared.
    """
    adapter = read_adapter(folder, spec)
    saved = check_fits(adapter, spec)
    if saved.parameters:
        raise CheckpointError(
            f"{adapter.path}: brings {min(saved.parameters)} along, and only the matrices of"
            f" adapters are trained further; merge it into its base first (tune export {folder}"
            " --merge), and train the merged model"
        )
    raise_faults(
        CheckpointError, [_find_kind_fault(adapter, cfg), _find_target_fault(adapter, spec, cfg)]
    )
    # Only after these: a rank means nothing if targets or the kind of adapter differ.
    raise_faults(CheckpointError, [_find_rank_fault(adapter, spec, cfg)])
    if base is not None:
        check_base(adapter, spec, base)


def check_base(adapter: AdapterFile, spec: ModelSpec, base: Path) -> None:
    """Raise CheckpointError if the adapter was trained on other weights than those in `base`.

    Compares the hash in the adapter's metadata, and frozen weights that PEFT has saved with it; an
    adapter that has neither passes.
    """
    fingerprint = adapter.metadata.get(BASE_FINGERPRINT)
    if fingerprint is not None and fingerprint != compute_base_fingerprint(spec, base):
        base_name = f", {adapter.config.base}" if adapter.config.base else ""
        raise CheckpointError(
            f"{adapter.folder}: was trained on other weights than those of {base}; use its own base"
            f" model{base_name}"
        )
    frozen = {
        name: tensor.frozen for name, tensor in adapter.saved.items() if tensor.frozen is not None
    }
    # A matrix with another number of rows replaces the base's: it is not compared.
    resized = {
        name for name in VOCABULARY & frozen.keys() if frozen[name][1].shape[0] != spec.vocab_size
    }
    copies = {name: file_name for name, (file_name, _) in frozen.items() if name not in resized}
    check_copies(adapter.path, copies=copies, spec=spec, base=base)


def _find_kind_fault(adapter: AdapterFile, cfg: LoraConfig) -> str | None:
    """Return a line if DoRA or rsLoRA is on in the adapter or the config alone; else None."""
    config = adapter.config
    flags = {"dora": (config.dora, cfg.dora), "rslora": (config.rslora, cfg.rslora)}
    changes = [
        f"lora.{key}={str(flag).lower()}"
        for key, (flag, cfg_flag) in flags.items()
        if flag != cfg_flag
    ]
    if not changes:
        return None
    kind = ("DoRA" if config.dora else "LoRA") + (" scaled by rsLoRA" if config.rslora else "")
    return (
        f"{adapter.folder}: holds {kind}, the config asks for another kind; set {' '.join(changes)}"
    )


# Return a line if the adapter has other targets than the config, or lacks some layers; else None.
def _find_target_fault(adapter: AdapterFile, spec: ModelSpec, cfg: LoraConfig) -> str | None:
    expected = {module.name: module for module in find_adapted_modules(spec, cfg)}
    modules = {
        module.name: find_used_parts(adapter, module) for module in adapter.list_modules(spec)
    }
    if isinstance(spec, ExternalSpec):
        return _find_external_target_fault(adapter, expected, modules)
    adapted_parts = chain.from_iterable(module.parts for module in modules.values())
    has_other_targets = any(not is_target(part, cfg) for part in adapted_parts)
    targets = list_targets(modules.values())
    missing_names = [name for name in expected if name not in modules]
    partial_names = [
        name for name in missing_names if set(list_targets([expected[name]])) & set(targets)
    ]
    if partial_names:
        first_module = expected[partial_names[0]]
        adapted_kind = "layers or matrices" if first_module.experts else "layers"
        return (
            f"{adapter.path}: has no adapter for {first_module.full_name}, though other"
            f" {adapted_kind} have one; adapters of some {adapted_kind} only cannot be trained on:"
            " merge it into the base first (tune export --merge)"
        )
    if missing_names or has_other_targets:
        return (
            f"{adapter.folder}: adapts {', '.join(targets)}, found lora.target_modules "
            f"{', '.join(cfg.target_modules)}; set "
            f"lora.target_modules=[{','.join(targets)}]"
        )
    return None


def _find_external_target_fault(
    adapter: AdapterFile, expected: Collection[str], adapted: Collection[str]
) -> str | None:
    """Return a line if the adapter has other modules of an external model than the config's.

    External models (of another library) have no short names of targets as our decoder has, so the
    line gives the last parts of the modules' names.

    expected, adapted: names of modules by the config, and in the adapter.
    """
    if set(expected) == set(adapted):
        return None
    first_name = min(set(expected) ^ set(adapted))
    fault = "has no adapter for" if first_name in expected else "adapts"
    names = (name.removesuffix(".base_layer") for name in adapted)
    last_parts = sorted({name.rpartition(".")[2] for name in names})
    return (
        f"{adapter.folder}: {fault} {first_name}, unlike lora.target_modules; set"
        f" lora.target_modules=[{','.join(last_parts)}]"
    )


def find_used_parts(adapter: AdapterFile, module: FileModule) -> FileModule:
    """Return a fused module (such as qkv) with only those parts whose rows the adapter changes.

    If the adapter changes no rows yet, as B is zero, all parts are kept.
    """
    if len(module.parts) == 1:
        return module
    lora_b = adapter.read(module.name, LORA_B)
    parts = tuple(
        part for part in module.parts if lora_b[part.start : part.start + part.rows].any()
    )
    return replace(module, parts=parts or module.parts)


def is_stacked(adapter: AdapterFile, module: FileModule, parts: int, rank: int) -> bool:
    """Return True if the adapter of a fused module stacks one adapter of `rank` for each part.

    `peft_folders.export_adapter` writes such. B is block-diagonal then: a part's rows are zero in
    the columns of the other parts.

    parts: number of the module's parts that are adapted.
    """
    if parts < 2 or adapter.config.get_rank(module) != parts * rank:
        return False
    lora_b = adapter.read(module.name, LORA_B)
    for index, part in enumerate(find_used_parts(adapter, module).parts):
        rows = lora_b[part.start : part.start + part.rows]
        if rows[:, : index * rank].any() or rows[:, (index + 1) * rank :].any():
            return False
    return True


def find_usual_scaling(adapter: AdapterFile, spec: ModelSpec) -> float:
    """Return the scaling of the modules without a pattern of their own in adapter_config.json.

    If all modules match a pattern, return the scaling that most of them have.
    """
    scalings = [adapter.config.compute_scaling(module) for module in adapter.list_modules(spec)]
    usual = compute_scaling(adapter.config.alpha, adapter.config.rank, adapter.config.rslora)
    return usual if usual in scalings else max(set(scalings), key=scalings.count)


def _find_rank_fault(adapter: AdapterFile, spec: ModelSpec, cfg: LoraConfig) -> str | None:
    """Return a line if the adapter's rank or scaling differs from the config's; else None.

    The largest rank of its modules must be lora.rank, and their usual scaling the config's.
    """
    ranks = []
    for module in adapter.list_modules(spec):
        num_targets = sum(is_target(part, cfg) for part in module.parts)
        is_stack = is_stacked(adapter, module, parts=num_targets, rank=cfg.rank)
        ranks.append(cfg.rank if is_stack else adapter.config.get_rank(module))
    rank = max(ranks)
    usual = find_usual_scaling(adapter, spec)
    expected = compute_scaling(cfg.alpha, cfg.rank, cfg.rslora)
    if rank != cfg.rank or abs(usual / expected - 1) > 1e-6:
        alpha = usual / compute_scaling(1.0, rank, cfg.rslora)
        return (
            f"{adapter.folder}: has rank {rank} and alpha {alpha:g}, found lora.rank={cfg.rank} "
            f"lora.alpha={cfg.alpha:g}; set lora.rank={rank} lora.alpha={alpha:g}"
        )
    return None


def find_unselected(config: AdapterConfig, names: Sequence[str]) -> tuple[str, str] | None:
    """Return (the first module whose adapter PEFT would drop, the config key that excludes it).

    PEFT loads only the modules that the keys of adapter_config.json select. The keys are looked at
    in PEFT's order. Return None if PEFT drops no module.

    names: of modules, as in the file. Raises CheckpointError for a pattern that cannot be matched,
    see `find_first_matches`.
    """
    is_excluded = _match(config, "exclude_modules", names)
    is_targeted = _match(config, "target_modules", names)
    targets: Any = config.selection.get("target_modules")
    layers: Any = config.selection.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    for index, name in enumerate(names):
        if any(f".{name}.weight".endswith(f".{end}") for end in config.parameters):
            continue  # selected by target_parameters: PEFT looks at no other key
        if is_excluded[index]:
            return name, "exclude_modules"
        if any(f".{module}." in f".{name}." for module in config.modules_to_save):
            return name, "modules_to_save"
        # None: PEFT's own table of the model family's modules, or target_parameters, selects.
        if targets is not None and not is_targeted[index]:
            return name, "target_modules"
        if isinstance(targets, list) and name in targets:
            continue  # PEFT ignores layers_to_transform for a full name
        if layers and _find_layer(config, name) not in layers:
            return name, "layers_to_transform"
    return None


def _match(config: AdapterConfig, key: str, names: Sequence[str]) -> list[bool]:
    """Return for each name True if the value of a key matches it.

    The value is a list of ends of names, or a pattern of whole names.
    """
    value: Any = config.selection.get(key)
    # PEFT's keyword for every linear but the output head.
    if key == "target_modules" and isinstance(value, str) and value.lower() == "all-linear":
        return [not name.endswith(("embed_tokens", "lm_head")) for name in names]
    if isinstance(value, str) and value:
        where = f"{config.path}: {key}:"
        matches = find_first_matches((value,), tuple(names), where, whole=True)
        return [number is not None for number in matches]
    return [any(f".{name}".endswith(f".{end}") for end in value or ()) for name in names]


def _find_layer(config: AdapterConfig, name: str) -> int | None:
    """Return the index of the layer that a module is in; None: its name has none.

    If its name has several numbers, the first one counts, as in PEFT.
    """
    patterns: Any = config.selection.get("layers_pattern")
    if not patterns:
        layer_match = re.match(r".*?\.[^.]*\.(\d+)\.", name)
    else:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        matches = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name) for pattern in patterns)
        layer_match = next((match for match in matches if match), None)
    return int(layer_match[1]) if layer_match else None
