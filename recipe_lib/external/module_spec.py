"""The spec of a model that transformers, or a user's plugin, implements, read off the module that
its class makes.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.adapters.lora import build_adapter_settings
from recipe_lib.config.schema import LoraConfig, ParallelConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.external import stage_parts
from recipe_lib.external.build import ExternalModel, ModuleSource, make_module
from recipe_lib.external.inspection import (
    TRANSFORMERS,
    add_adapters,
    build_transformers_config,
    find_embedding_and_head,
    find_uncalled_linears,
    format_one_line,
    get_linear_shape,
    is_encoder,
    is_transposed,
    list_layer_linears,
    list_without_adapter,
    select_adapter_targets,
    spell_config,
)
from recipe_lib.external.proven_plan import infer_proven_plan
from recipe_lib.external.tensor_parallel import shard_module
from recipe_lib.external.tensor_plan.small_models import shrink
from recipe_lib.models.config_fields import check_sizes, refuse_quantized
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.models.meta_init import list_persistent_buffers, seed_host_generators
from recipe_lib.models.spec import (
    ExternalSpec,
    StageParts,
    TensorLayout,
    WeightEntry,
    WrittenLayout,
)
from recipe_lib.parallel.world import World

_MANY_POSITIONS = 2**24  # of a model whose config names no limit
_POSITION_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
    "seq_length",
)
_STD_KEYS = ("initializer_range", "init_std", "initializer_std")


@dataclass(frozen=True)
class ModuleSpec(ExternalSpec):
    """A model of another library; see the class that this is derived from."""

    source: ModuleSource

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Build the model on meta, with parameters of `dtype`, and with our call signature.

        What its class computed for the buffers is in `computed_buffers`; `materialize` puts it
        there. Floating point buffers keep the type that the class gives them. Of a multimodal model
        `list_other_parts` have no gradient.
        """
        model = make_module(self.source, dtype)
        buffers = dict(model.named_buffers())
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device="meta")
        adopted = ExternalModel.adopt(model, self, self.source.config, buffers)
        for name in adopted.other_parts:
            adopted.get_submodule(name).requires_grad_(False)
        return adopted

    @torch.no_grad()
    def make_first_vectors(self, seed: int) -> dict[str, Tensor]:
        """Return the values that its class begins vectors and numbers with: parameters of less than
        two dimensions.

        The class' own `_init_weights`, or its modules' `reset_parameters`, runs over a model of
        which nothing else has values; random ones follow from (seed, the module's name). Where a
        class has neither, biases are 0, others 1.
        """
        model: Any = make_module(self.source)
        vectors: dict[str, Tensor] = {}
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() < 2 and parameter.is_floating_point():
                    value = torch.full(parameter.shape, 0.0 if "bias" in name else 1.0)
                    module._parameters[name] = nn.Parameter(value, False)
                    vectors[f"{prefix}.{name}" if prefix else name] = value
        # Those inside before the one around them.
        for name, module in reversed(list(model.named_modules())):
            with seed_host_generators(f"{seed}/{name}"):
                if hasattr(model, "_init_weights"):
                    model._init_weights(module)
                elif any(True for _ in module.parameters(recurse=False)) and hasattr(
                    module, "reset_parameters"
                ):
                    module.reset_parameters()
        return vectors

    def list_layer_kinds(self) -> list[str]:
        """List the kinds of the layers: equal texts stand for the same parameters and the same kind
        of attention.
        """
        model: Any = make_module(self.source)
        types = getattr(getattr(model, "config", None), "layer_types", None)
        kinds = []
        for at, name in enumerate(list_layer_names(model)):
            layer = model.get_submodule(name)
            shapes = [
                (inside, tuple(parameter.shape)) for inside, parameter in layer.named_parameters()
            ]
            kinds.append(
                f"{type(layer).__name__} {types[at] if types and at < len(types) else ''} {shapes}"
            )
        return kinds

    def layout(self) -> TensorLayout:
        return build_layout(self.source)

    def build_weight_map(self, file_names: Collection[str]) -> list[WeightEntry]:
        """Build the map from the model's tensors to a file's; see `weight_names.build_weight_map`.

        The file has the model's own names, or lacks the prefix of those of its body; or it has
        those of which transformers makes the model's. A tied weight is under any of its names. A
        buffer that a file lacks keeps its first value.
        """
        layout = self.layout()
        in_file = frozenset(file_names)
        prefix = layout.prefix
        bare = bool(in_file and prefix) and not any(name.startswith(prefix) for name in in_file)
        read = (find_reading(self.source, in_file) if in_file else None) or Reading({}, {})
        entries = []
        for name in layout.shapes:
            names = layout.names.get(name, (name,))
            spellings = [other.removeprefix(prefix) for other in names] if bare else list(names)
            written = next(
                (spelling for spelling in spellings if spelling in in_file), spellings[0]
            )
            written = next(
                (read.renamed[other] for other in names if other in read.renamed), written
            )
            made = next((read.made[other] for other in names if other in read.made), None)
            if made is not None and written not in in_file:
                entries.append(WeightEntry(name, made.names()[0], made=made))
            elif not (in_file and name in layout.buffers and written not in in_file):
                entries.append(WeightEntry(name, written))
        return entries

    def tied_names(self, file_names: Collection[str]) -> dict[str, str]:
        """Return the names that tied weights may have in these files, also where transformers
        renames them.
        """
        tied = self.layout().tied_names()
        read = find_reading(self.source, frozenset(file_names)) or Reading({}, {})
        return tied | {
            read.renamed[name]: parameter
            for name, parameter in tied.items()
            if name in read.renamed
        }

    def build_written_layout(self) -> WrittenLayout | None:
        return find_written_layout(self.source)

    def spell_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        if self.source.implementation != TRANSFORMERS:
            return dict(config)
        return spell_config(config, self.family)

    def list_adapted_linears(self, cfg: LoraConfig) -> list[str]:
        layout = self.layout()
        return select_adapter_targets(
            layout.linears,
            cfg.target_modules,
            list_without_adapter(layout.linears, layout.uncalled, self.family),
        )

    def add_adapters(self, model: Any, cfg: LoraConfig, dtype: torch.dtype) -> None:
        add_adapters(model, cfg, build_adapter_settings(cfg, dtype))

    def shard_tensors(self, model: Any, parallel: ParallelConfig, world: World) -> dict[str, str]:
        return shard_module(
            model, plan=infer_proven_plan(model, parallel, world), parallel=parallel, world=world
        )

    def find_stage_parts(self) -> StageParts:
        return stage_parts.find_parts(self)

    def build_shrunk(self, layers: int = 2, keys: int = 4) -> "ModuleSpec":
        """Build the spec of a small model of the same class of transformers, with so many layers at
        least; keys: as in `shrink`.
        """
        config = shrink(build_transformers_config(self.source.config, self.family), layers, keys)
        return read_spec(json.loads(config.to_json_string(use_diff=False)), self.family)


def read_spec(
    config: Mapping[str, Any], where: str, implementation: str = TRANSFORMERS
) -> ModuleSpec:
    """Read the spec of a model that is not native; its class is made once, without memory for
    parameters.

    where: the file, folder or preset, named in errors. implementation: `transformers`, or a name
    that is registered.

    Raises SetupError if transformers is not installed, ConfigError for a name that no plugin
    registered, and CheckpointError for a config.json that its class does not take, or a model
    without embedding or output projection.
    """
    refuse_quantized(config, where)
    check_sizes(config, where)
    family = str(config.get("model_type", implementation))
    if implementation == TRANSFORMERS:
        build_transformers_config(config, where)
    source, model = _build_source(
        dict(config), where=where, implementation=implementation, family=family
    )
    if implementation == TRANSFORMERS and is_encoder(model.config):
        raise CheckpointError(
            f"{where}: config.json: model_type {family!r} lets each token see later ones, and would"
            " learn to copy them, expected a causal language model; set is_decoder to true in"
            " config.json if it was trained so"
        )
    embedding_and_head = find_embedding_and_head(model)
    if embedding_and_head is None:
        raise CheckpointError(
            f"{where}: {type(model).__name__} has no embedding and output projection that could be"
            " found; expected get_input_embeddings and get_output_embeddings, or nn.Embedding and"
            " nn.Linear outside the layers"
        )
    embedding, head = embedding_and_head
    return ModuleSpec(
        family=family,
        vocab_size=embedding.weight.shape[0],
        max_positions=_find_number(
            model, config=source.config, keys=_POSITION_KEYS, default=_MANY_POSITIONS
        ),
        init_std=float(_find_number(model, config=source.config, keys=_STD_KEYS, default=0.02)),
        tied=embedding.weight is head.weight,
        num_layers=len(list_layer_names(model)),
        implementation=implementation,
        source=source,
    )


def _build_source(
    config: dict[str, Any], where: str, implementation: str, family: str
) -> tuple[ModuleSource, Any]:
    """Build the model's module, with transformers' fused attention if its class has that."""
    first = ""
    for attention in ("sdpa", "eager"):
        source = ModuleSource(implementation, config, attention)
        try:
            return source, make_module(source)
        except (ValueError, ImportError) as error:  # a class without sdpa says so by one of these
            first = first or format_one_line(error)
        except (
            TypeError,
            AttributeError,
            RuntimeError,
            KeyError,
            IndexError,
            AssertionError,
        ) as error:
            raise CheckpointError(
                f"{where}: {family} cannot be built from config.json ({format_one_line(error)})"
            ) from error
    raise CheckpointError(f"{where}: {family} cannot be built ({first})")


def _find_number(
    model: nn.Module, config: dict[str, Any], keys: Iterable[str], default: float
) -> Any:
    """Return the first number of the config under one of the keys, with the defaults of the class;
    `default` where there is none.
    """
    built_config: Any = getattr(model, "config", None)
    if hasattr(built_config, "get_text_config"):
        built_config = built_config.get_text_config()
    values: list[Any] = [getattr(built_config, key, None) or config.get(key) for key in keys]
    return next((value for value in values if type(value) in (int, float) and value > 0), default)


# How the files of a transformers model name and shape its weights, where its class does so in
# another way.
#
# transformers 5 renames tensors of many architectures while it reads them, and makes other tensors
# of some: of the matrices of a mixture's experts, which lie apart in the file, one parameter of 3
# dimensions. Here its own table of these (`transformers.conversion_mapping`) is asked which tensors
# of a file make which parameter, and its own operations make them, a parameter, or some experts of
# one, at a time.


_FAULTS = (
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    StopIteration,
)


class TensorConversion:
    """Tensors that one of transformers' operations makes of others."""

    def __init__(self, first: str, converter: Any, module: Any, config: Any) -> None:
        self.first = first  # the name that it is known by
        # Pattern of the converter -> names of the tensors that it takes, in their order.
        self.sources = dict[str, list[str]]()
        # What it makes -> that tensor's name in the file that it is made for, if it has another.
        self.written: dict[str, str] = {}
        self._converter = converter
        self._module = module
        self._config = config

    def names(self) -> list[str]:
        """Return the names of all tensors that it takes."""
        return [name for names in self.sources.values() for name in names]

    def makes(self) -> list[str]:
        """Return the names of all tensors that it makes, of several the first is `first`."""
        patterns = self._converter.target_patterns
        return [self.first.replace(patterns[0], other) for other in patterns]

    def convert(
        self, read: Callable[[str], Tensor], names: Mapping[str, list[str]] | None = None
    ) -> dict[str, Tensor]:
        """Make tensors of those of the file, by name. read: a tensor by its name. names: of
        `sources`, those to take.
        """
        converter = deepcopy(self._converter)
        for pattern, taken in (names or self.sources).items():
            for name in taken:
                converter.add_tensor(self.first, name, pattern, read(name))
        made = converter.convert(self.first, model=self._module, config=self._config)
        return {
            self.written.get(name, name): value[0] if isinstance(value, list) else value
            for name, value in made.items()
        }

    def shapes(
        self, shape_of: Callable[[str], tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of what is made; None where the tensors do not go together."""
        try:
            converted = self.convert(lambda name: torch.empty(shape_of(name), device="meta"))
        except _FAULTS:
            return None
        return {name: tuple(value.shape) for name, value in converted.items()}

    def pieces(self) -> Iterator[tuple[int, int | None, dict[str, list[str]]]]:
        """Yield parts that can be made by themselves: first row, row after the last or None for
        all, tensors to take.

        Experts that are stacked, one by one; else everything at once.
        """
        counts = {len(names) for names in self.sources.values()}
        if len(counts) != 1 or not _is_stacking(self._converter.operations):
            yield 0, None, self.sources
            return
        for at in range(counts.pop()):
            yield at, at + 1, {pattern: [names[at]] for pattern, names in self.sources.items()}


def _is_stacking(operations: list[Any]) -> bool:
    """Return True if operations stack tensors along the first dimension, and leave that alone
    afterwards.
    """
    first, *others = operations
    if type(first).__name__ != "MergeModulelist" or first.dim != 0:
        return False
    touched = [getattr(other, key, 1) for other in others for key in ("dim", "dim0", "dim1")]
    return (
        all(type(other).__name__ in ("Concatenate", "Transpose", "Interleave") for other in others)
        and 0 not in touched
    )


@lru_cache(maxsize=8)
def build_layout(source: ModuleSource) -> TensorLayout:
    """Build what the files of a model hold, by one build of its class."""
    model = make_module(source)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parameters = dict(model.named_parameters())
    linears = list_layer_linears(model)
    buffers = list_persistent_buffers(model)
    return TensorLayout(
        {name: tuple(tensor.shape) for name, tensor in (parameters | buffers).items()},
        frozenset(buffers),
        names={name: tuple(names[id(parameter)]) for name, parameter in parameters.items()},
        prefix=f"{prefix}." if (prefix := getattr(model, "base_model_prefix", "")) else "",
        linears={name: get_linear_shape(module) for name, module in linears.items()},
        transposed=frozenset(name for name, module in linears.items() if is_transposed(module)),
        plain=frozenset(name for name, module in linears.items() if type(module) is nn.Linear),
        uncalled=find_uncalled_linears(model),
        modules=tuple(name for name, _ in model.named_modules() if name),
        unread=tuple(sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())),
    )


@dataclass(frozen=True)
class Reading:
    """A map of how the tensors of a file become a model's parameters, by the parameter's name."""

    renamed: Mapping[str, str]  # those that have another name in the file -> that name
    made: Mapping[str, TensorConversion]  # those that a conversion makes


@lru_cache(maxsize=4)
def find_reading(source: ModuleSource, file_names: frozenset[str]) -> Reading | None:
    """Find how transformers would read these tensors; None for a model whose files it reads as they
    are.
    """
    table = _get_conversion_table(source, legacy=True)
    if table is None:
        return None
    module = _build_module(source)
    from transformers import core_model_loading as loading

    renamings, converters = _split_table(table)
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    state = module.state_dict()
    renamed: dict[str, str] = {}
    made: dict[str, TensorConversion] = {}
    for name in sorted(file_names, key=loading.dot_natural_key):
        parameter, pattern = loading.rename_source_key(
            name, renamings, converters, module.base_model_prefix, state
        )
        if parameter not in state and name in state:
            parameter, pattern = loading.rename_source_key(
                name, [], [], base_model_prefix=module.base_model_prefix, meta_state_dict=state
            )
        if parameter not in state:
            continue
        if pattern is None:
            renamed.setdefault(parameter, name)
        else:
            conversion = made.setdefault(
                parameter,
                TensorConversion(
                    parameter, converter=by_pattern[pattern], module=module, config=module.config
                ),
            )
            conversion.sources.setdefault(pattern, []).append(name)
    for conversion in list(made.values()):  # one may make several parameters
        made |= {name: conversion for name in conversion.makes() if name in state}
    return Reading(renamed, made)


@lru_cache(maxsize=4)
def find_written_layout(source: ModuleSource) -> WrittenLayout | None:
    """Find how transformers writes the model, in the layout of the architecture's own checkpoints;
    None: as it has it.

    Also None where that could not be read again as the same parameters.
    """
    table = _get_conversion_table(source, legacy=False)
    if not table:
        return None
    module = _build_module(source)
    layout = build_layout(source)
    from transformers import core_model_loading as loading

    try:
        back = [
            entry.reverse_transform()
            for entry in table
            if not isinstance(entry, loading.PrefixChange)
        ][::-1]
        renamings, converters = _split_table(back)
        by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        renamed: dict[str, str] = {}
        groups: dict[str, TensorConversion] = {}
        for name in sorted(layout.shapes, key=loading.dot_natural_key):
            first, pattern = loading.apply_converters(name, converters)
            if pattern is None:
                renamed[loading.apply_renamings(name, renamings)] = name
            else:
                group = groups.setdefault(
                    first,
                    TensorConversion(
                        first, converter=by_pattern[pattern], module=module, config=module.config
                    ),
                )
                group.sources.setdefault(pattern, []).append(name)
        shapes = {name: layout.shapes[own] for name, own in renamed.items()}
        made: dict[str, TensorConversion] = {}
        for group in groups.values():
            made_shapes = group.shapes(layout.shapes.__getitem__)
            if made_shapes is None:
                return None
            group.written = {name: loading.apply_renamings(name, renamings) for name in made_shapes}
            shapes |= {group.written[name]: shape for name, shape in made_shapes.items()}
            made |= dict.fromkeys(group.written.values(), group)
    except _FAULTS:
        return None
    found_again = WrittenLayout(shapes, renamed, made)
    return found_again if _can_read_back(source, found_again) else None


def _can_read_back(source: ModuleSource, written: WrittenLayout) -> bool:
    """Return True if files of these tensors would be read as the parameters that they were made
    of.
    """
    layout = build_layout(source)
    read = find_reading(source, frozenset(written.shapes))
    if read is None:
        return False
    for name, shape in layout.shapes.items():
        names = layout.names.get(name, (name,))
        renamed = next((read.renamed[other] for other in names if other in read.renamed), None)
        if renamed is not None:
            if written.shapes[renamed] != shape or written.renamed.get(renamed) != name:
                return False
            continue
        conversion = next((read.made[other] for other in names if other in read.made), None)
        shapes = conversion.shapes(written.shapes.__getitem__) if conversion else None
        if shapes is None or all(shapes.get(other) != shape for other in names):
            return False
    return True


@lru_cache(maxsize=2)
def _build_module(source: ModuleSource) -> nn.Module:
    """Build the class' module without values: conversions ask it for shapes and its config."""
    return make_module(source)


def _get_conversion_table(source: ModuleSource, *, legacy: bool) -> list[Any] | None:
    """Return transformers' conversions of a model's files, in the order in which they are read;
    None: it has no such table.
    """
    if source.implementation != TRANSFORMERS:
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # of a release before 5
        return None
    return list(get_model_conversion_mapping(_build_module(source), add_legacy=legacy))


def _split_table(table: list[Any]) -> tuple[list[Any], list[Any]]:
    """Split a table into entries that give another name alone, and those that make other
    tensors.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    return (
        [entry for entry in table if isinstance(entry, WeightRenaming)],
        [entry for entry in table if isinstance(entry, WeightConverter)],
    )
