"""Describe a model that transformers, or a user's plugin (a file that registers a class), has.

`models.families.read_spec` calls `read_spec` here where `model.implementation` is not native. It
builds the class on meta and reads sizes, layers and tied weights off it. Code that loads, adapts
and shards models calls the methods of the `ModuleSpec`. The second half of the file maps tensors
of checkpoint files to parameters, by transformers' own table of conversions.
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

_MANY_POSITIONS = 2**24  # tokens; the longest sequence of a model whose config names no limit
# Keys under which configs of transformers give the longest sequence, in tokens.
_POSITION_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
    "seq_length",
)
# Keys under which they give the standard deviation of random weights.
_STD_KEYS = ("initializer_range", "init_std", "initializer_std")


@dataclass(frozen=True)
class ModuleSpec(ExternalSpec):
    """A model of transformers or of a plugin, as the library asks for it."""

    source: ModuleSource  # the implementation's name, the config and the kind of attention

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Build the model on meta, with parameters of `dtype` and our call signature.

        The values of buffers, as the class' constructor computed them, are in the model's
        `computed_buffers`. `parallel.materialize` puts them back, in their own types. Parts of a
        multimodal model that text does not run through (`other_parts`) are frozen.
        """
        model = make_module(self.source, dtype)
        buffers = dict(model.named_buffers())
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device="meta")
        external_model = ExternalModel.adopt(model, self, self.source.config, buffers)
        for name in external_model.other_parts:
            external_model.get_submodule(name).requires_grad_(False)
        return external_model

    @torch.no_grad()
    def make_first_vectors(self, seed: int) -> dict[str, Tensor]:
        """Return initial values of all parameters of fewer than two dimensions, by name.

        The class' own `_init_weights`, or its modules' `reset_parameters`, computes them. Random
        ones depend on the seed and the module's name alone. Where a class has neither function,
        biases are 0 and other parameters 1.
        """
        model: Any = make_module(self.source)
        vectors: dict[str, Tensor] = {}
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() < 2 and parameter.is_floating_point():
                    value = torch.full(parameter.shape, 0.0 if "bias" in name else 1.0)
                    module._parameters[name] = nn.Parameter(value, False)
                    vectors[f"{prefix}.{name}" if prefix else name] = value
        # Children before their parents, as in torch's `Module.apply`.
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
        """Return a text for each layer; layers with equal texts have equal shapes and attention."""
        model: Any = make_module(self.source)
        types = getattr(getattr(model, "config", None), "layer_types", None)
        kinds = []
        for index, name in enumerate(list_layer_names(model)):
            layer = model.get_submodule(name)
            shapes = [
                (parameter_name, tuple(parameter.shape))
                for parameter_name, parameter in layer.named_parameters()
            ]
            kind = types[index] if types and index < len(types) else ""
            kinds.append(f"{type(layer).__name__} {kind} {shapes}")
        return kinds

    def layout(self) -> TensorLayout:
        """Return names, shapes and ties of the model's tensors, its linears and its modules."""
        return build_layout(self.source)

    def build_weight_map(self, file_names: Collection[str]) -> list[WeightEntry]:
        """Return an entry for each tensor of the model: where checkpoint files have it.

        file_names: names of all tensors in the files; empty: files that are to be written. The
        names may be the model's own, these without its `base_model_prefix` (`model.`), or those
        that transformers converts when it reads the files. A tied weight is under any of its names.
        A buffer that the files lack has no entry, and keeps the value its constructor computed.
        """
        layout = self.layout()
        in_file = frozenset(file_names)
        prefix = layout.prefix
        lacks_prefix = bool(in_file and prefix) and not any(
            name.startswith(prefix) for name in in_file
        )
        reading = (find_reading(self.source, in_file) if in_file else None) or Reading({}, {})
        entries = []
        for name in layout.shapes:
            names = layout.names.get(name, (name,))
            spellings = [alias.removeprefix(prefix) if lacks_prefix else alias for alias in names]
            file_name = next(
                (spelling for spelling in spellings if spelling in in_file), spellings[0]
            )
            # A name that transformers' table gives replaces the one found above.
            file_name = next(
                (reading.renamed[alias] for alias in names if alias in reading.renamed), file_name
            )
            conversion = next(
                (reading.made[alias] for alias in names if alias in reading.made), None
            )
            if conversion is not None and file_name not in in_file:
                entries.append(WeightEntry(name, conversion.names()[0], made=conversion))
            elif not (in_file and name in layout.buffers and file_name not in in_file):
                entries.append(WeightEntry(name, file_name))
        return entries

    def tied_names(self, file_names: Collection[str]) -> dict[str, str]:
        """Return name in the files -> parameter, for all names that a tied weight may have.

        These are the model's names, and those of files whose tensors transformers renames.
        """
        tied = self.layout().tied_names()
        reading = find_reading(self.source, frozenset(file_names)) or Reading({}, {})
        return tied | {
            reading.renamed[name]: parameter
            for name, parameter in tied.items()
            if name in reading.renamed
        }

    def build_written_layout(self) -> WrittenLayout | None:
        """Return the layout of files that are written; None: that of `build_weight_map`."""
        return find_written_layout(self.source)

    def spell_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config.json with older and newer names of keys that transformers has renamed."""
        if self.source.implementation != TRANSFORMERS:
            return dict(config)  # a plugin has one name for a key
        return spell_config(config, self.family)

    def list_adapted_linears(self, cfg: LoraConfig) -> list[str]:
        """Return the names of the linears that get an adapter.

        Raises ConfigError for a target that cannot have one.
        """
        layout = self.layout()
        return select_adapter_targets(
            layout.linears,
            cfg.target_modules,
            list_without_adapter(layout.linears, layout.uncalled, self.family),
        )

    def add_adapters(self, model: Any, cfg: LoraConfig, dtype: torch.dtype) -> None:
        """Add adapters of `dtype` to the model's linears, in place, as `list_adapted_linears`."""
        add_adapters(model, cfg, build_adapter_settings(cfg, dtype))

    def shard_tensors(self, model: Any, parallel: ParallelConfig, world: World) -> dict[str, str]:
        """Shard a meta model over tensor-parallel ranks, in place, by a plan that is proven first.

        Returns name of a parameter -> "sharded", "full" or "partial": what its gradient on a rank
        is.
        """
        return shard_module(
            model, plan=infer_proven_plan(model, parallel, world), parallel=parallel, world=world
        )

    def find_stage_parts(self) -> StageParts:
        """Return the names of the parts of pipeline stages; ConfigError if it cannot be cut."""
        return stage_parts.find_parts(self)

    def build_shrunk(self, min_layers: int = 2, num_key_heads: int = 4) -> "ModuleSpec":
        """Build the spec of a small model of the same class of transformers, not of a plugin's.

        It has one layer of each kind, but at least `min_layers`. num_key_heads: the most heads of
        keys and values in a model that has fewer of them than of queries.
        """
        config = shrink(
            build_transformers_config(self.source.config, self.family), min_layers, num_key_heads
        )
        return read_spec(json.loads(config.to_json_string(use_diff=False)), self.family)


def read_spec(
    config: Mapping[str, Any], where: str, implementation: str = TRANSFORMERS
) -> ModuleSpec:
    """Read the spec of a model that is not native off its class, built once on meta.

    config: the content of config.json. where: the file, folder or preset, named in errors.
    implementation: `transformers`, or a name that a plugin registered.

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
    """Build the module, with torch's fused attention (sdpa) if its class has that.

    Returns (its source, the module). where, family: for errors. Raises CheckpointError where the
    class cannot be built from the config.
    """
    first_error = ""
    for attention in ("sdpa", "eager"):
        source = ModuleSource(implementation, config, attention)
        try:
            return source, make_module(source)
        except (ValueError, ImportError) as error:  # a class without sdpa says so by one of these
            first_error = first_error or format_one_line(error)
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
    raise CheckpointError(f"{where}: {family} cannot be built ({first_error})")


def _find_number(
    model: nn.Module, config: dict[str, Any], keys: Iterable[str], default: float
) -> Any:
    """Return the first positive number under one of the keys; `default` where there is none.

    config: the content of config.json. The config object of the built model is asked before it,
    as that has the class' defaults for keys that are left out.
    """
    built_config: Any = getattr(model, "config", None)
    if hasattr(built_config, "get_text_config"):
        built_config = built_config.get_text_config()
    built_values = ((getattr(built_config, key, None), config.get(key)) for key in keys)
    values: list[Any] = [in_file if built is None else built for built, in_file in built_values]
    numbers = (value for value in values if isinstance(value, (int, float)))
    # True is an int of Python's, and no number here.
    return next((value for value in numbers if value > 0 and value is not True), default)


# Read and write checkpoint files whose tensors have other names or shapes than the parameters.
#
# transformers 5 renames tensors of many architectures while it reads them, and converts some: the
# matrices of a mixture's experts lie apart in the file, and become one parameter of 3 dimensions.
# Its table (`transformers.conversion_mapping`) has two kinds of entries: a `WeightRenaming`, and a
# `WeightConverter` with patterns of source names, patterns of target names and operations. The code
# below runs these operations itself, on one parameter or one expert at a time, to hold little.


# What transformers' operations raise where tensors do not fit them.
_CONVERSION_ERRORS = (
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
    """One conversion of a group of tensors by transformers' operations (a `spec.Conversion`).

    Inputs are tensors of a file and outputs parameters when files are read, the reverse when they
    are written. `find_reading` and `find_written_layout` make them and fill in `sources`.
    """

    def __init__(self, first: str, converter: Any, module: Any, config: Any) -> None:
        self.first = first  # name of the first output tensor
        # Source pattern of the converter -> names of the input tensors that match it, in order.
        self.sources = dict[str, list[str]]()
        # When files are written: output tensor -> its name in the file, if they differ.
        self.written: dict[str, str] = {}
        # A `WeightConverter`; the next two are arguments of its `convert`.
        self._converter = converter
        self._module = module
        self._config = config

    def names(self) -> list[str]:
        """Return the names of all input tensors."""
        return [name for names in self.sources.values() for name in names]

    def makes(self) -> list[str]:
        """Return the names of all output tensors, `first` among them."""
        patterns = self._converter.target_patterns
        return [self.first.replace(patterns[0], pattern) for pattern in patterns]

    def convert(
        self, read: Callable[[str], Tensor], names: Mapping[str, list[str]] | None = None
    ) -> dict[str, Tensor]:
        """Convert the input tensors; return the outputs by name, of the files if these are written.

        read: returns an input tensor by its name. names: the part of `sources` to convert; None:
        all.
        """
        # A copy: a converter collects the tensors that it is given.
        converter = deepcopy(self._converter)
        for pattern, pattern_names in (names or self.sources).items():
            for name in pattern_names:
                converter.add_tensor(self.first, name, pattern, read(name))
        outputs = converter.convert(self.first, model=self._module, config=self._config)
        return {
            self.written.get(name, name): value[0] if isinstance(value, list) else value
            for name, value in outputs.items()
        }

    def shapes(
        self, shape_of: Callable[[str], tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of the output tensors, by a run on meta; None where inputs do not fit.

        shape_of: returns the shape of an input tensor by its name.
        """
        try:
            converted = self.convert(lambda name: torch.empty(shape_of(name), device="meta"))
        except _CONVERSION_ERRORS:
            return None
        return {name: tuple(value.shape) for name, value in converted.items()}

    def pieces(self) -> Iterator[tuple[int, int | None, dict[str, list[str]]]]:
        """Yield (start, stop, names for `convert`) of parts that can be converted by themselves.

        start, stop: rows of dimension 0 of the outputs; stop None: to the end. Stacked experts are
        yielded one by one, other conversions as one part.
        """
        num_names = {len(names) for names in self.sources.values()}
        if len(num_names) != 1 or not _is_stacking(self._converter.operations):
            yield 0, None, self.sources
            return
        for expert in range(num_names.pop()):
            yield (
                expert,
                expert + 1,
                {pattern: [names[expert]] for pattern, names in self.sources.items()},
            )


def _is_stacking(operations: list[Any]) -> bool:
    """Return True if operations stack tensors along dimension 0, and change no rows after that.

    Each row of the output is then made of one tensor of each pattern. operations: of a
    `WeightConverter`, in order.
    """
    stacking, *later_operations = operations
    if type(stacking).__name__ != "MergeModulelist" or stacking.dim != 0:
        return False
    return all(
        type(operation).__name__ in ("Concatenate", "Transpose", "Interleave")
        and all(getattr(operation, key, 1) != 0 for key in ("dim", "dim0", "dim1"))
        for operation in later_operations
    )


@lru_cache(maxsize=8)
def build_layout(source: ModuleSource) -> TensorLayout:
    """Build the list of a model's tensors, linears and modules, by one build of its class."""
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
    """A mapping of the tensors of checkpoint files to the parameters and buffers of a model."""

    renamed: Mapping[str, str]  # parameter -> the name that its tensor has in the file
    made: Mapping[str, TensorConversion]  # parameter -> the conversion that makes it


@lru_cache(maxsize=4)
def find_reading(source: ModuleSource, file_names: frozenset[str]) -> Reading | None:
    """Find how transformers would read these tensors; None where it has no table of conversions.

    file_names: names of all tensors in the files. Tensors that the model has no use for are left
    out of the result.
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
        # The table may rename a tensor that has the model's name already.
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
    # The keys so far are first outputs; a conversion may make further parameters.
    for conversion in list(made.values()):
        made |= {name: conversion for name in conversion.makes() if name in state}
    return Reading(renamed, made)


@lru_cache(maxsize=4)
def find_written_layout(source: ModuleSource) -> WrittenLayout | None:
    """Find the names and shapes with which transformers writes the architecture's checkpoints.

    None: the model's own names and shapes are to be written. transformers has no conversion for
    them then, or files that it converts could not be read back as the same parameters.
    """
    table = _get_conversion_table(source, legacy=False)
    if not table:
        return None
    module = _build_module(source)
    layout = build_layout(source)
    from transformers import core_model_loading as loading

    try:
        # Undo the last conversion first.
        reverse_table = [
            entry.reverse_transform()
            for entry in table
            if not isinstance(entry, loading.PrefixChange)
        ][::-1]
        renamings, converters = _split_table(reverse_table)
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
        shapes = {name: layout.shapes[parameter] for name, parameter in renamed.items()}
        made: dict[str, TensorConversion] = {}
        for group in groups.values():
            made_shapes = group.shapes(layout.shapes.__getitem__)
            if made_shapes is None:
                return None
            group.written = {name: loading.apply_renamings(name, renamings) for name in made_shapes}
            shapes |= {group.written[name]: shape for name, shape in made_shapes.items()}
            made |= dict.fromkeys(group.written.values(), group)
    except _CONVERSION_ERRORS:
        return None
    written = WrittenLayout(shapes, renamed, made)
    return written if _can_read_back(source, written) else None


def _can_read_back(source: ModuleSource, written: WrittenLayout) -> bool:
    """Return True if files of this layout would be read as the parameters they are made of."""
    layout = build_layout(source)
    reading = find_reading(source, frozenset(written.shapes))
    if reading is None:
        return False
    for name, shape in layout.shapes.items():
        names = layout.names.get(name, (name,))
        file_name = next(
            (reading.renamed[alias] for alias in names if alias in reading.renamed), None
        )
        if file_name is not None:
            if written.shapes[file_name] != shape or written.renamed.get(file_name) != name:
                return False
            continue
        conversion = next((reading.made[alias] for alias in names if alias in reading.made), None)
        shapes = conversion.shapes(written.shapes.__getitem__) if conversion else None
        if shapes is None or all(shapes.get(alias) != shape for alias in names):
            return False
    return True


@lru_cache(maxsize=2)
def _build_module(source: ModuleSource) -> nn.Module:
    """Build the class' module on meta and keep it; conversions read its shapes and config."""
    return make_module(source)


def _get_conversion_table(source: ModuleSource, *, legacy: bool) -> list[Any] | None:
    """Return the entries of transformers' table for a model's files, in the order of reading.

    None: a plugin's model, or a release of transformers before 5, which has no table. legacy: with
    entries for the names of older checkpoints, which are read but not written.
    """
    if source.implementation != TRANSFORMERS:
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # a release before 5
        return None
    return list(get_model_conversion_mapping(_build_module(source), add_legacy=legacy))


def _split_table(table: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return (entries that only rename tensors, entries that convert them), in their order."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    return (
        [entry for entry in table if isinstance(entry, WeightRenaming)],
        [entry for entry in table if isinstance(entry, WeightConverter)],
    )
