"""Map the names of adapters in PEFT's files to modules of ours, and back.

A file names an adapter after the Hugging Face module that it belongs to. Where such a module fuses
several linears of ours (Phi 3), one adapter of the file is for several modules of ours.
`checkpoint.adapter_files` reads and writes adapters by `build_file_modules`, all modules that may
have one, and `split_name`, which reads a tensor's name. Experts are those of a mixture of experts.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from recipe_lib.adapters.lora import LINEARS, TARGETS_BY_MODULE
from recipe_lib.config.schema import EXPERTS, MIXTURE_TARGETS, ROUTER, LoraConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models.spec import DecoderSpec, ExpertsLayout, ExternalSpec, ModelSpec
from recipe_lib.models.weight_names import (
    build_weight_map,
    compute_parameter_shapes,
    get_router_name,
)

PREFIX = "base_model.model."  # PEFT's, of all names in a file
EMBEDDING = "model.embed_tokens"  # names of modules, in files and in our models
HEAD = "lm_head"
TARGETS = (*LINEARS, *MIXTURE_TARGETS, "embedding", "head")  # words of lora.target_modules
LINEAR = "all-linear"  # the target of every linear of an external model
# Ends of the names of an adapter's tensors
LORA_A = "lora_A.weight"
LORA_B = "lora_B.weight"
MAGNITUDE = "lora_magnitude_vector"
BASE_WEIGHT = "base_layer.weight"  # of the base, saved along with its adapter
EMBEDDING_A = "lora_embedding_A"
EMBEDDING_B = "lora_embedding_B"
SUFFIXES = (LORA_A, LORA_B, MAGNITUDE, BASE_WEIGHT, EMBEDDING_A, EMBEDDING_B)
# Prefix of names in multimodal models, of older and newer releases of transformers -> in a model of
# text alone.
_MULTIMODAL = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head": "lm_head",
}
# Ends of modules' names in transformers 4 -> in transformers 5, where the matrix is the same: PEFT
# takes either.
_RENAMED = {".block_sparse_moe.gate": ".mlp.gate"}
# Linears of a mixture's dense layers. PEFT (0.21, with transformers 5) takes these ends of
# `target_modules`, of whole names and patterns too, for the experts' parameters;
# `target_parameters` it takes as they are.
_TAKEN_FOR_EXPERTS = ("gate", "up", "down")
# Experts' parameter -> what PEFT inserts into the name of its adapter: PEFT wraps a module once for
# each of its parameters that have an adapter, the first of them innermost.
_EXPERTS = {"gate_up_proj": "base_layer", "down_proj": ""}


@dataclass(frozen=True)
class MergedRows:
    """A module of ours, and its rows in the matrix of the file's module."""

    module: str  # its name in our model
    target: str  # its word in lora.target_modules
    start: int  # the first row
    rows: int  # number of rows


@dataclass(frozen=True)
class FileModule:
    """A module as files name it, which may have an adapter."""

    name: str  # in files, without PREFIX and suffix
    rows: int  # of its matrix, or of one expert's
    columns: int  # of the same
    parts: tuple[MergedRows, ...]  # one, or several that the file has fused
    experts: int = 0  # number of matrices, each with an adapter; 0: not of experts
    # For what PEFT adapts as a parameter (`target_parameters`): the end of the parameter's name.
    # "": it is a module.
    parameter: str = ""
    # True: PEFT adapts the transposed matrices of the experts, as for an embedding.
    is_swapped: bool = False

    @property
    def full_name(self) -> str:
        """Return the full name of what PEFT adapts: the parameter, or the module."""
        inside = self.parameter.rpartition(".")[0]
        owner = self.name.removesuffix(".base_layer")
        return f"{owner.removesuffix(inside)}{self.parameter}" if self.parameter else self.name

    @property
    def is_embedding(self) -> bool:
        return self.name == EMBEDDING

    def shapes(self, rank: int, dora: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the adapter's tensors, by the end of their names.

        rank: of one matrix's adapter. dora: True: with magnitudes.
        """
        if self.is_embedding:
            shapes = {EMBEDDING_A: (rank, self.rows), EMBEDDING_B: (self.columns, rank)}
            return shapes | ({MAGNITUDE: (self.columns,)} if dora else {})
        ranks = rank * max(1, self.experts)
        rows, columns = (self.columns, self.rows) if self.is_swapped else (self.rows, self.columns)
        shapes = {LORA_A: (ranks, columns), LORA_B: (rows, ranks)}
        return shapes | ({MAGNITUDE: (self.rows,)} if dora else {})


def unstack_expert_factors(
    lora_a: Tensor, lora_b: Tensor, module: FileModule
) -> tuple[Tensor, Tensor]:
    """Return A `[E, r, i]` and B `[E, o, r]`, given PEFT's A `[E r, i]` and B `[o, r E]`."""
    # In PEFT's B experts are the inner index.
    factors_a = lora_a.unflatten(0, (module.experts, -1))
    factors_b = lora_b.unflatten(1, (-1, module.experts)).permute(2, 0, 1)
    if module.is_swapped:
        return factors_b.transpose(1, 2), factors_a.transpose(1, 2)
    return factors_a, factors_b


def stack_expert_factors(
    lora_a: Tensor, lora_b: Tensor, module: FileModule
) -> tuple[Tensor, Tensor]:
    """Return PEFT's A `[E r, i]` and B `[o, r E]`, given A `[E, r, i]` and B `[E, o, r]`."""
    factors = (lora_a, lora_b)
    if module.is_swapped:
        factors = (lora_b.transpose(1, 2), lora_a.transpose(1, 2))
    return factors[0].flatten(0, 1), factors[1].permute(1, 2, 0).flatten(1)


def get_target(module: str) -> str | None:
    """Return the word of lora.target_modules for a module of ours; None: it can have no adapter."""
    return TARGETS_BY_MODULE.get(".".join(module.split(".")[-2:]))


def build_file_modules(spec: ModelSpec) -> dict[str, FileModule]:
    """Return every module that may have an adapter, by its name in a file, in model order."""
    if isinstance(spec, ExternalSpec):
        layout = spec.layout()
        return (
            {
                name: FileModule(
                    name=name,
                    rows=rows,
                    columns=columns,
                    parts=(MergedRows(name, target=LINEAR, start=0, rows=rows),),
                )
                for name, (rows, columns) in layout.linears.items()
            }
            | {
                module.name: module
                for name, experts in layout.experts.items()
                for module in _build_class_experts(name, experts, layout.shapes)
            }
            | {
                name: FileModule(
                    name=name,
                    rows=rows,
                    columns=columns,
                    parts=(MergedRows(name, target=ROUTER, start=0, rows=rows),),
                    parameter=f"{_get_inner_name(name)}.weight",
                )
                for name, (rows, columns) in layout.routers.items()
            }
        )
    shapes = compute_parameter_shapes(spec)
    if spec.tied:  # the head has no parameter of its own, and yet may have an adapter
        shapes[f"{HEAD}.weight"] = shapes[f"{EMBEDDING}.weight"]
    entries = {entry.our_name: entry for entry in build_weight_map(spec)}
    # Name of the file's module -> our modules, several where the file fuses them.
    parts: dict[str, list[MergedRows]] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        target = get_target(module)
        if not target or module == name:
            continue
        entry = None if target in MIXTURE_TARGETS else entries.get(name)
        # Without an entry the file has our module's name.
        file_name = module if entry is None else entry.file_name.removesuffix(".weight")
        part = MergedRows(
            module, target=target, start=0 if entry is None else entry.start, rows=shape[0]
        )
        parts.setdefault(file_name, []).append(part)
    modules: dict[str, FileModule] = {}
    for name, merged in parts.items():
        shape = shapes[f"{merged[0].module}.weight"]
        target = merged[0].target
        if target in MIXTURE_TARGETS:
            file_module = _build_mixture_module(spec, merged[0], shape)
        else:
            is_parameter = spec.mixture is not None and target in _TAKEN_FOR_EXPERTS
            file_module = FileModule(
                name=name,
                rows=sum(part.rows for part in merged),
                columns=shape[1],
                parts=tuple(merged),
                parameter=".".join([*name.split(".")[-2:], "weight"]) if is_parameter else "",
            )
        modules[file_module.name] = file_module
    return modules


def _build_class_experts(
    name: str, layout: ExpertsLayout, shapes: Mapping[str, tuple[int, ...]]
) -> list[FileModule]:
    """Return the FileModules of the two matrices of each expert of another library's class.

    name: of the module of experts. shapes: of the model's parameters.
    """
    inside = _get_inner_name(name)
    modules = []
    for leaf in (layout.inner, layout.outer):
        experts, *sizes = shapes[f"{name}.{leaf}"]
        rows, columns = reversed(sizes) if layout.transposed else sizes
        part = MergedRows(f"{name}.{leaf}", target=EXPERTS, start=0, rows=rows)
        modules.append(
            FileModule(
                name=f"{name}.base_layer" if leaf == layout.inner else name,
                rows=rows,
                columns=columns,
                parts=(part,),
                experts=experts,
                parameter=f"{inside}.{leaf}",
                is_swapped=layout.is_unmarked,
            )
        )
    return modules


def _get_inner_name(name: str) -> str:
    """Return a module's name inside its layer, by which PEFT finds parameters of all layers."""
    return re.sub(r"^.*\.\d+\.", "", name)


def _build_mixture_module(
    spec: DecoderSpec, part: MergedRows, shape: tuple[int, ...]
) -> FileModule:
    """Return the FileModule of a router or of experts' matrices, by transformers' names.

    shape: of our parameter: `[E, d]` of a router, `[E, rows, columns]` of experts.
    """
    if part.target == ROUTER:
        router = get_router_name(spec)
        return FileModule(
            name=part.module.removesuffix("router") + router,
            rows=shape[0],
            columns=shape[1],
            parts=(part,),
            parameter=f"mlp.{router}.weight",
        )
    owner, leaf = part.module.rsplit(".", 1)
    experts, rows, columns = shape
    return FileModule(
        name=".".join(filter(None, (owner, _EXPERTS[leaf]))),
        rows=rows,
        columns=columns,
        parts=(part,),
        experts=experts,
        parameter=f"mlp.experts.{leaf}",
    )


def find_adapted_modules(spec: ModelSpec, cfg: LoraConfig) -> list[FileModule]:
    """Return the modules with at least one part that is a target of `cfg`.

    Raises ConfigError for DoRA if PEFT adapts one of them as a parameter, and, in an external model
    (another library's), for a name in lora.target_modules that cannot have an adapter.
    """
    modules = build_file_modules(spec)
    linears = spec.list_adapted_linears(cfg) if isinstance(spec, ExternalSpec) else modules
    adapted = [
        module
        for module in modules.values()
        if any(is_target(part, cfg) for part in module.parts)
        and (module.name in linears or module.parameter)
    ]
    without_dora = [module for module in adapted if module.parameter]
    if cfg.dora and without_dora:
        rest = [target for target in cfg.targets if target not in list_targets(without_dora)]
        raise ConfigError(
            f"lora.dora: {without_dora[0].name} is in a model with experts, where PEFT adapts it as"
            " a parameter, which has no DoRA; set lora.dora=false (LoRA)"
            + (f", or lora.target_modules=[{','.join(rest)}]" if rest else "")
        )
    return adapted


def is_target(part: MergedRows, cfg: LoraConfig) -> bool:
    """Return True if the config has an adapter on a part."""
    # `find_adapted_modules` has chosen among an external model's linears already.
    return part.target == LINEAR or part.target in cfg.targets


def list_targets(modules: Iterable[FileModule]) -> list[str]:
    """Return the targets of all parts of the modules, in the order of TARGETS."""
    targets = set[str]().union(*({part.target for part in module.parts} for module in modules))
    return [target for target in (*TARGETS, LINEAR) if target in targets]


def split_name(name: str, *, of_text: bool = True) -> tuple[str, str] | None:
    """Split a tensor's name in a file into the module's and a suffix; None: no adapter's name.

    `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight` becomes
    (`model.layers.0.mlp.up_proj`, `lora_A.weight`). The module's name is that of transformers 5.
    of_text: True: as in a model of text alone, also if the file is for a multimodal one.
    """
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(f".{suffix}")), None)
    if suffix is None or not name.startswith(PREFIX):
        return None
    module = name.removeprefix(PREFIX).removesuffix(f".{suffix}")
    older = next((end for end in _RENAMED if module.endswith(end)), "")
    module = module.removesuffix(older) + _RENAMED.get(older, "")
    return (_get_text_name(module) if of_text else module), suffix


def _get_text_name(name: str) -> str:
    """Return a name as in a model of text alone, given it as in any model."""
    for prefix, text_prefix in _MULTIMODAL.items():
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return name


def complete_module_name(module: str, parameters: Collection[str]) -> str:
    """Return `FileModule.name` of a module, given its name in one file.

    parameters: ends of the names of the parameters that have an adapter in the file.
    """
    # Experts with an adapter on one matrix alone are wrapped once, and have the outer name,
    # whichever matrix it is.
    ends = {name.rpartition(".")[2] for name in parameters}
    is_first = (
        module.endswith(".experts")
        and ends & {"gate_up_proj", "up_proj"}
        and "down_proj" not in ends
    )
    return f"{module}.base_layer" if is_first else module


def get_extra_name(name: str) -> str:
    """Return the name in our model of a file's tensor that belongs to no adapter."""
    return _get_text_name(name.removeprefix(PREFIX))


def list_spellings(module: str) -> list[str]:
    """Return the names that a module may have in a config: in text-only and multimodal models."""
    return [module] + [
        prefix + module.removeprefix(text_prefix)
        for prefix, text_prefix in _MULTIMODAL.items()
        if module.startswith(text_prefix)
    ]


def get_file_name(name: str, multimodal: bool) -> str:
    """Return the name of our module or parameter in the model that a file is written for.

    multimodal: True: in transformers' multimodal model, False: in a model of text alone.
    """
    if multimodal and name.startswith("model."):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name
