"""Map the tensors of checkpoint files to the parameters of a model of another library.

`module_spec` asks `find_reading` which tensors of files make each parameter, and
`find_written_layout` how files are written. transformers 5 renames tensors of many architectures
while it reads them, and converts some: the matrices of a mixture's experts lie apart in the file,
and become one parameter of 3 dimensions.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.external.experts import find_experts
from recipe_lib.external.inspection import (
    TRANSFORMERS,
    find_uncalled_linears,
    get_linear_shape,
    is_transposed,
    list_layer_linears,
    list_other_parts,
)
from recipe_lib.external.modules import ModuleSource, find_needless_parts, get_module
from recipe_lib.external.routers import find_router_weights
from recipe_lib.models.meta_init import list_persistent_buffers
from recipe_lib.models.spec import TensorLayout, WrittenLayout

# transformers' table (`transformers.conversion_mapping`) has two kinds of entries: a
# `WeightRenaming`, and a `WeightConverter` with patterns of source names, patterns of target names
# and operations. The code below runs these operations itself, on one parameter or one expert at a
# time, to hold little.

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


@dataclass(eq=False)
class TensorConversion:
    """One conversion of a group of tensors by transformers' operations.

    Inputs are tensors of a file and outputs parameters when files are read, the reverse when they
    are written. `spec.FileConversion` documents the methods without a docstring.
    """

    first: str  # name of the first output tensor
    converter: Any  # a `WeightConverter`
    module: Any  # the class' module on meta, an argument of the converter's `convert`
    # Source pattern of the converter -> names of the input tensors that match it, in order.
    sources: dict[str, list[str]] = field(default_factory=dict)
    # When files are written: output tensor -> its name in the file, if they differ.
    written: dict[str, str] = field(default_factory=dict)

    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    def makes(self) -> list[str]:
        """Return the names of all output tensors, `first` among them."""
        patterns = self.converter.target_patterns
        return [self.first.replace(patterns[0], pattern) for pattern in patterns]

    def convert(
        self, read: Callable[[str], Tensor], names: Mapping[str, list[str]] | None = None
    ) -> dict[str, Tensor]:
        # A copy: a converter collects the tensors that it is given.
        converter = deepcopy(self.converter)
        for pattern, pattern_names in (names or self.sources).items():
            for name in pattern_names:
                converter.add_tensor(self.first, name, pattern, read(name))
        outputs = converter.convert(self.first, model=self.module, config=self.module.config)
        return {
            self.written.get(name, name): value[0] if isinstance(value, list) else value
            for name, value in outputs.items()
        }

    def shapes(
        self, shape_of: Callable[[str], tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]] | None:
        try:  # on meta
            converted = self.convert(lambda name: torch.empty(shape_of(name), device="meta"))
        except _CONVERSION_ERRORS:
            return None
        return {name: tuple(value.shape) for name, value in converted.items()}

    def pieces(self) -> Iterator[tuple[int, int | None, dict[str, list[str]]]]:
        # Stacked experts are yielded one by one, other conversions as one part.
        num_names = {len(names) for names in self.sources.values()}
        if len(num_names) != 1 or not _is_stacking(self.converter.operations):
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
    model = get_module(source)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parameters = dict(model.named_parameters())
    linears = list_layer_linears(model)
    buffers = list_persistent_buffers(model)
    unread = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    if any(name.endswith("position_ids") for name, _ in model.named_buffers()):
        # Older releases saved this buffer; transformers passes it by in any class that has it.
        unread.add(r"(^|\.)position_ids$")
    frozen_parts = tuple(f"{part}." for part in list_other_parts(model))
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
        left_out_modules=_list_left_out_modules(source),
        frozen=frozenset(name for name in parameters | buffers if name.startswith(frozen_parts)),
        unread=tuple(sorted(unread)),
        experts=find_experts(model),
        routers=find_router_weights(model),
    )


def _list_left_out_modules(source: ModuleSource) -> tuple[str, ...]:
    if source.has_all_parts:
        return ()
    prefixes = tuple(f"{part}." for part in find_needless_parts(source))
    if not prefixes:
        return ()
    full_model = get_module(replace(source, has_all_parts=True))
    return tuple(name for name, _ in full_model.named_modules() if f"{name}.".startswith(prefixes))


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
    module = get_module(source)
    from transformers import core_model_loading as loading

    renamings, converters, by_pattern = _split_table(table)
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
                parameter, TensorConversion(parameter, by_pattern[pattern], module)
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
    module = get_module(source)
    layout = build_layout(source)
    from transformers import core_model_loading as loading

    try:
        # Undo the last conversion first.
        reverse_table = [
            entry.reverse_transform()
            for entry in table
            if not isinstance(entry, loading.PrefixChange)
        ][::-1]
        renamings, converters, by_pattern = _split_table(reverse_table)
        renamed: dict[str, str] = {}
        groups: dict[str, TensorConversion] = {}
        for name in sorted(layout.shapes, key=loading.dot_natural_key):
            first, pattern = loading.apply_converters(name, converters)
            if pattern is None:
                renamed[loading.apply_renamings(name, renamings)] = name
            else:
                group = groups.setdefault(
                    first, TensorConversion(first, by_pattern[pattern], module)
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
    return list(get_model_conversion_mapping(get_module(source), add_legacy=legacy))


def _split_table(table: list[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return (entries that only rename tensors, entries that convert them), in their order.

    The third value has the converters by their source patterns.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    return renamings, converters, by_pattern
