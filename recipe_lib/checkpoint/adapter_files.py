"""Read a PEFT adapter's files, and check them against a model, a config and a base.

`read_adapter` reads the headers alone. `check_fits` compares names and shapes with a model,
`check_adapter` also with the section `lora` of a run that is to train on, and `check_base` the
weights that it was trained on. `find_unselected` does what PEFT does when it loads an adapter.
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

# Keys of the metadata of the tensor file that are ours: which base the adapter was trained on, and
# how the run kept it.
BASE_FINGERPRINT = "tune_base"
BASE_DTYPE = "tune_base_dtype"
BASE_STORAGE = "tune_base_storage"  # the value of lora.quantize_base
BASE_IMPLEMENTATION = "tune_base_implementation"  # of a model that was not our own decoder
SCORE_KEYS = "tune_score_head"  # keys of config.json that belong to a score head, as JSON
OF_SCORES = ("id2label", "label2id", "pad_token_id", "problem_type")


@dataclass(frozen=True)
class AdapterFile:
    """An adapter on disk."""

    folder: Path
    config: AdapterConfig
    # Module as files name it -> suffix of the tensor's name -> (name in the file, header).
    tensors: Mapping[str, Mapping[str, FileTensorName]]
    # Of the tensor file.
    metadata: Mapping[str, str]
    # Our name -> a parameter that a recipe added to the model, or a score head's weight.
    extras: Mapping[str, FileTensorName] = field(default_factory=dict)
    # PEFT's name -> a weight of the base that the file has.
    saved: Mapping[str, SavedTensor] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Path of the file with the tensors."""
        return self.folder / TENSOR_FILE

    def list_modules(self, spec: ModelSpec) -> list[FileModule]:
        """Return the modules of a model that have an adapter here.

        After `check_fits` no adapter is of another model's module.
        """
        modules = [
            module for name, module in build_file_modules(spec).items() if name in self.tensors
        ]
        self.config.match_patterns(modules)  # all at once, for `AdapterConfig.get_rank`
        return modules

    def read(self, module: str, suffix: str) -> torch.Tensor:
        """Return a whole tensor of an adapter."""
        return self.read_tensor(self.tensors[module][suffix][0])

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor by its name in the file."""
        with safe_open(str(self.path), framework="pt") as file:
            return file.get_tensor(name)


def read_adapter(folder: Path) -> AdapterFile:
    """Return the adapter in a folder, checked by itself. Raises CheckpointError.

    Its tensors are not read yet.
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
            if suffix == BASE_WEIGHT:  # both: it belongs to the adapter, and may resize the base
                add_saved(saved, name, entry)
        # Rows of tokens too, whose names end as that of a copy beside an adapter does.
        elif not add_saved(saved, name, entry):
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
    """Return the keys of config.json that an adapter with a score head keeps.

    They are names of classes, and padding.
    """
    try:
        keys = parse_json(metadata.get(SCORE_KEYS, "{}"))
    except ValueError:
        return {}
    if not isinstance(keys, dict):
        return {}
    return {name: keys[name] for name in OF_SCORES if name in keys}


def _check_contents(
    path: Path, header: Header, *, unknown: list[str], extras: Collection[str]
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
    """Return the base's weights that the adapter has, if it is one for this model.

    spec: of the base as it is. Raises CheckpointError, all faults at once, if names or shapes are
    not those of an adapter for this model, and for NaN or infinite numbers.
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
    single_experts = sorted(name for name in unknown_names if re.search(r"\.experts\.\d+\.", name))
    modules = set(spec.layout().modules) if isinstance(spec, ExternalSpec) else set()
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
    linears = [module for module in adapter.list_modules(saved.spec) if not module.experts]
    faults.append(_find_unselected_fault(adapter, linears))
    module_faults = (
        _find_module_fault(adapter, known_modules[name])
        for name in sorted(adapter.tensors.keys() - unknown_names)
    )
    faults.append(next(filter(None, module_faults), None))  # the others have the same cause
    raise_faults(CheckpointError, faults)
    return saved


def _find_unselected_fault(adapter: AdapterFile, modules: list[FileModule]) -> str | None:
    """Return a line about the first module whose adapter PEFT would drop; None if it takes all."""
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
    """Raise CheckpointError if a run cannot go on to train an adapter, before memory is taken.

    Headers are read, and little more.

    spec, cfg: the model's and the run's. base: the checkpoint that it will be trained on, compared
    with the one the adapter was trained on where its file says which that was.
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
    # Only then: the rank of an adapter with other targets or of another kind says nothing.
    raise_faults(CheckpointError, [_find_rank_fault(adapter, spec, cfg)])
    if base is not None:
        check_base(adapter, spec, base)


def check_base(adapter: AdapterFile, spec: ModelSpec, base: Path) -> None:
    """Raise CheckpointError if the adapter's file tells that it was trained on other weights."""
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
    # A matrix with other rows is not compared: it takes the base's place.
    resized = {
        name for name in VOCABULARY & frozen.keys() if frozen[name][1].shape[0] != spec.vocab_size
    }
    copies = {name: file_name for name, (file_name, _) in frozen.items() if name not in resized}
    check_copies(adapter.path, copies=copies, spec=spec, base=base)


def _find_kind_fault(adapter: AdapterFile, cfg: LoraConfig) -> str | None:
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
        first = expected[partial_names[0]]
        adapted_kind = "layers or matrices" if first.experts else "layers"
        return (
            f"{adapter.path}: has no adapter for {first.full_name}, though other {adapted_kind}"
            f" have one; adapters of some {adapted_kind} only cannot be trained on: merge it into"
            " the base first (tune export --merge)"
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
    """Return a line for an adapter of other modules than the run adapts in an external model.

    Its modules have no short names such as ours, so the line tells the ends of their names.

    expected, adapted: names of modules, by the config and in the adapter.
    """
    if set(expected) == set(adapted):
        return None
    first = min(set(expected) ^ set(adapted))
    fault = "has no adapter for" if first in expected else "adapts"
    ends = sorted({name.rpartition(".")[2] for name in adapted})
    return (
        f"{adapter.folder}: {fault} {first}, unlike lora.target_modules; set"
        f" lora.target_modules=[{','.join(ends)}]"
    )


def find_used_parts(adapter: AdapterFile, module: FileModule) -> FileModule:
    """Return the module with only those of its fused parts whose rows the adapter changes.

    All of them, if the adapter changes none yet.
    """
    if len(module.parts) == 1:
        return module
    second = adapter.read(module.name, LORA_B)
    parts = tuple(
        part for part in module.parts if second[part.start : part.start + part.rows].any()
    )
    return replace(module, parts=parts or module.parts)


def is_stacked(adapter: AdapterFile, module: FileModule, parts: int, rank: int) -> bool:
    """Return True if a fused module's adapter is a stack of one adapter of `rank` for each part.

    B is block-diagonal then: a part's rows are zero in the columns of the other parts.

    parts: how many of the module's parts are adapted.
    """
    if parts < 2 or adapter.config.get_rank(module) != parts * rank:
        return False
    second = adapter.read(module.name, LORA_B)
    for number, part in enumerate(find_used_parts(adapter, module).parts):
        rows = second[part.start : part.start + part.rows]
        if rows[:, : number * rank].any() or rows[:, (number + 1) * rank :].any():
            return False
    return True


def find_usual_scaling(adapter: AdapterFile, spec: ModelSpec) -> float:
    """Return the scaling that the config gives to all modules without a pattern.

    If there are no such modules, the scaling that most of them have.
    """
    scalings = [adapter.config.compute_scaling(module) for module in adapter.list_modules(spec)]
    usual = compute_scaling(adapter.config.alpha, adapter.config.rank, adapter.config.rslora)
    return usual if usual in scalings else max(set(scalings), key=scalings.count)


def _find_rank_fault(adapter: AdapterFile, spec: ModelSpec, cfg: LoraConfig) -> str | None:
    """Return a line for an adapter of another rank or scaling than the run's, or None.

    Every module has to have lora.rank or less, and the scaling that is usual among them must be the
    config's.
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
    """Return the first module whose adapter PEFT leaves out, and the key by which it does.

    None if PEFT leaves out none: it loads those modules of a file that the keys of the config
    select. The order of the questions is PEFT's.

    names: of modules, as the file has them. Raises CheckpointError for a pattern that cannot be
    matched.
    """
    is_excluded = _match(config, "exclude_modules", names)
    is_targeted = _match(config, "target_modules", names)
    targets: Any = config.selection.get("target_modules")
    layers: Any = config.selection.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    for number, name in enumerate(names):
        if any(f".{name}.weight".endswith(f".{end}") for end in config.parameters):
            continue  # by its parameter: PEFT asks no other key then
        if is_excluded[number]:
            return name, "exclude_modules"
        if any(f".{saved}." in f".{name}." for saved in config.saved):
            return name, "modules_to_save"
        # None stands for PEFT's own table of a family's modules, or for target_parameters.
        if targets is not None and not is_targeted[number]:
            return name, "target_modules"
        if isinstance(targets, list) and name in targets:
            continue  # by its whole name, whatever the layers
        if layers and _find_layer(config, name) not in layers:
            return name, "layers_to_transform"
    return None


def _match(config: AdapterConfig, key: str, names: Sequence[str]) -> list[bool]:
    """Return for each name whether a key that takes ends of names or a pattern names it."""
    value: Any = config.selection.get(key)
    # PEFT's word for every linear but the head.
    if key == "target_modules" and isinstance(value, str) and value.lower() == "all-linear":
        return [not name.endswith(("embed_tokens", "lm_head")) for name in names]
    if isinstance(value, str) and value:
        where = f"{config.path}: {key}:"
        matches = find_first_matches((value,), tuple(names), where, whole=True)
        return [number is not None for number in matches]
    return [any(f".{name}".endswith(f".{end}") for end in value or ()) for name in names]


def _find_layer(config: AdapterConfig, name: str) -> int | None:
    """Return the number of the layer that a module is in, or None.

    Of several numbers in its name it is the first, as in PEFT.
    """
    patterns: Any = config.selection.get("layers_pattern")
    if not patterns:
        layer_match = re.match(r".*?\.[^.]*\.(\d+)\.", name)
    else:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        matches = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name) for pattern in patterns)
        layer_match = next((match for match in matches if match), None)
    return int(layer_match[1]) if layer_match else None
