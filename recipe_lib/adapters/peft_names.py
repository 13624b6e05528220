"""The names of adapters in PEFT's files, and how they lie next to ours.

A file names an adapter after the module of the Hugging Face model that it belongs to. That is a
module of ours, but for models whose file fuses several linears into one (Phi 3): there one adapter
of the file stands next to several of ours.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor

from recipe_lib.adapters.lora import LINEARS, TARGETS_BY_MODULE
from recipe_lib.config.schema import MIXTURE_TARGETS, LoraConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models.spec import DecoderSpec, ExternalSpec, ModelSpec
from recipe_lib.models.weight_names import (
    build_weight_map,
    compute_parameter_shapes,
    get_router_name,
)

PREFIX = "base_model.model."
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
TARGETS = (*LINEARS, *MIXTURE_TARGETS, "embedding", "head")
LINEAR = "all-linear"  # the target of every linear of an external model
LORA_A, LORA_B, MAGNITUDE, BASE_WEIGHT = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_magnitude_vector",
    "base_layer.weight",
)
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
SUFFIXES = (LORA_A, LORA_B, MAGNITUDE, BASE_WEIGHT, EMBEDDING_A, EMBEDDING_B)
# What the decoder is called in multimodal models, older and newer releases of transformers.
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
# PEFT wraps a module once for each of its parameters that have an adapter, the first of them
# innermost.
_EXPERTS = {"gate_up_proj": "base_layer", "down_proj": ""}


@dataclass(frozen=True)
class MergedRows:
    """A module of ours and its rows of the file's matrix, `[start, start + rows)`; target: its
    short name.
    """

    module: str
    target: str
    start: int
    rows: int


@dataclass(frozen=True)
class FileModule:
    """A module as files name it: its matrix is `[rows, columns]`, of one part or of several fused
    ones.

    experts: how many such matrices one below the other it has, each with an adapter; 0: it is no
    experts'. parameter: the end of the name by which PEFT finds it, where it is a parameter's and
    not a linear's.
    """

    name: str
    rows: int
    columns: int
    parts: tuple[MergedRows, ...]
    experts: int = 0
    parameter: str = ""

    @property
    def full_name(self) -> str:
        """The whole name of what has the adapter: of the parameter, where that is not a linear's
        weight.
        """
        inside = self.parameter.rpartition(".")[0]
        owner = self.name.removesuffix(".base_layer")
        return f"{owner.removesuffix(inside)}{self.parameter}" if self.parameter else self.name

    @property
    def is_embedding(self) -> bool:
        """Whether it is the embedding, whose adapter has names and shapes of its own."""
        return self.name == EMBEDDING

    def shapes(self, rank: int, dora: bool) -> dict[str, tuple[int, ...]]:
        """The adapter's tensors: what follows the module's name -> shape."""
        if self.is_embedding:
            shapes = {EMBEDDING_A: (rank, self.rows), EMBEDDING_B: (self.columns, rank)}
            return shapes | ({MAGNITUDE: (self.columns,)} if dora else {})
        ranks = rank * max(1, self.experts)
        shapes = {LORA_A: (ranks, self.columns), LORA_B: (self.rows, ranks)}
        return shapes | ({MAGNITUDE: (self.rows,)} if dora else {})


def unstack_expert_factors(first: Tensor, second: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """A `[E, r, i]` and B `[E, o, r]` of PEFT's `[E r, i]` and `[o, r E]`, in the second of which
    experts are inner.
    """
    return first.unflatten(0, (experts, -1)), second.unflatten(1, (-1, experts)).permute(2, 0, 1)


def stack_expert_factors(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The other way round."""
    return first.flatten(0, 1), second.permute(1, 2, 0).flatten(1)


def get_target(module: str) -> str | None:
    """The word that lora.target_modules has for a module of ours; None: it cannot have an
    adapter.
    """
    return TARGETS_BY_MODULE.get(".".join(module.split(".")[-2:]))


def build_file_modules(spec: ModelSpec) -> dict[str, FileModule]:
    """Every module that may have an adapter, by its name in a file, in the model's order."""
    if isinstance(spec, ExternalSpec):
        return {
            name: FileModule(name, rows, columns, (MergedRows(name, LINEAR, 0, rows),))
            for name, (rows, columns) in spec.layout().linears.items()
        }
    shapes = compute_parameter_shapes(spec)
    if spec.tied:  # the head has no parameter of its own, and yet may have an adapter
        shapes[f"{HEAD}.weight"] = shapes[f"{EMBEDDING}.weight"]
    places = {entry.our_name: (entry.file_name, entry.start) for entry in build_weight_map(spec)}
    parts: dict[str, list[MergedRows]] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        target = get_target(module)
        if target and module != name:
            file_name, start = (
                (name, 0) if target in MIXTURE_TARGETS else places.get(name, (name, 0))
            )
            parts.setdefault(file_name.removesuffix(".weight"), []).append(
                MergedRows(module, target, start, shape[0])
            )
    found: dict[str, FileModule] = {}
    for name, held in parts.items():
        shape = shapes[f"{held[0].module}.weight"]
        if held[0].target in MIXTURE_TARGETS:
            of_mixture = _build_mixture_module(spec, held[0], shape)
            found[of_mixture.name] = of_mixture
        else:
            is_taken = spec.mixture is not None and held[0].target in _TAKEN_FOR_EXPERTS
            parameter = ".".join([*name.split(".")[-2:], "weight"]) if is_taken else ""
            rows = sum(part.rows for part in held)
            found[name] = FileModule(name, rows, shape[1], tuple(held), parameter=parameter)
    return found


def _build_mixture_module(
    spec: DecoderSpec, part: MergedRows, shape: tuple[int, ...]
) -> FileModule:
    """A router, or the experts' matrices of a layer, by the names of transformers' modules."""
    if part.target == "router":
        name = part.module.removesuffix("router") + get_router_name(spec)
        return FileModule(
            name, shape[0], shape[1], (part,), parameter=f"mlp.{get_router_name(spec)}.weight"
        )
    owner, leaf = part.module.rsplit(".", 1)
    name = ".".join(filter(None, (owner, _EXPERTS[leaf])))
    experts, rows, columns = shape
    return FileModule(name, rows, columns, (part,), experts, f"mlp.experts.{leaf}")


def find_adapted_modules(spec: ModelSpec, cfg: LoraConfig) -> list[FileModule]:
    """Return those with at least one part that is a target.

    Raises ConfigError for a name in lora.target_modules that none has, and for DoRA where PEFT has
    none.
    """
    modules = build_file_modules(spec)
    if isinstance(spec, ExternalSpec):
        return [modules[name] for name in spec.list_adapted_linears(cfg)]
    adapted = [
        module for module in modules.values() if any(is_target(part, cfg) for part in module.parts)
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
    """Whether the config wants an adapter on a part; of an external model's modules,
    `adapted_modules` has chosen.
    """
    return part.target == LINEAR or part.target in cfg.targets


def list_targets(modules: Iterable[FileModule]) -> list[str]:
    """The targets of all parts of the modules, in the order of TARGETS."""
    found = {part.target for module in modules for part in module.parts}
    return [target for target in (*TARGETS, LINEAR) if target in found]


def split_name(name: str, *, of_text: bool = True) -> tuple[str, str] | None:
    """A tensor's name in a file as the module's and what follows; None: not an adapter's name.

    of_text: the module's name in a text-only model, which may be a part of the one that the file is
    for. The name is that of transformers 5.
    `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight` is (`model.layers.0.mlp.up_proj`,
    `lora_A.weight`).
    """
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(f".{suffix}")), None)
    if suffix is None or not name.startswith(PREFIX):
        return None
    module = name.removeprefix(PREFIX).removesuffix(f".{suffix}")
    older = next((end for end in _RENAMED if module.endswith(end)), "")
    module = module.removesuffix(older) + _RENAMED.get(older, "")
    for other, own in _MULTIMODAL.items():
        if of_text and module.startswith(other):
            return own + module.removeprefix(other), suffix
    return module, suffix


def complete_module_name(module: str, parameters: Collection[str]) -> str:
    """The name that `FileModule` has for a module of a file: there experts have the outer name for
    any one matrix.

    parameters: ends of the names of those that have an adapter.
    """
    ends = {name.rpartition(".")[2] for name in parameters}
    is_first = (
        module.endswith(".mlp.experts") and "gate_up_proj" in ends and "down_proj" not in ends
    )
    return f"{module}.{_EXPERTS['gate_up_proj']}" if is_first else module


def get_extra_name(name: str) -> str:
    """The name, in our model, of a tensor that a file has as it is: an extra parameter, which is no
    adapter's.
    """
    name = name.removeprefix(PREFIX)
    return next(
        (
            own + name.removeprefix(other)
            for other, own in _MULTIMODAL.items()
            if name.startswith(other)
        ),
        name,
    )


def list_spellings(module: str) -> list[str]:
    """The names that a module of a text-only model has there and in multimodal ones, as an
    adapter's config may say.
    """
    others = [
        other + module.removeprefix(own)
        for other, own in _MULTIMODAL.items()
        if module.startswith(own)
    ]
    return [module, *others]


def get_file_name(name: str, multimodal: bool) -> str:
    """The name that a module or parameter of ours has in the model that an adapter is loaded in."""
    return (
        f"model.language_model.{name.removeprefix('model.')}"
        if multimodal and name[:6] == "model."
        else name
    )
