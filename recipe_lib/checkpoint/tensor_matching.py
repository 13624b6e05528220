"""Match the tensors of a checkpoint's files with the parameters of a model.

Every tensor is read, left out for a reason that is logged, or a fault of one line. Every reader of
a model folder takes its tensors from `read_headers` and their parameters from `match_tensors`. A
`WeightEntry` is a parameter with the tensor that it is read from; its `view` or `made` makes it of
several tensors, or of codes. A spec holds a model's sizes and kinds as its config.json gives them.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch

from recipe_lib.checkpoint.model_folders import INDEX, SINGLE, find_weights
from recipe_lib.checkpoint.safetensors_files import (
    READABLE_TYPES,
    FileTensor,
    Reader,
    have_same_numbers,
    list_extra_names,
    read_header,
)
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError, raise_faults
from recipe_lib.logs import get_logger
from recipe_lib.models import count_head_labels, read_config
from recipe_lib.models.spec import (
    SCORE,
    DecoderSpec,
    ExternalSpec,
    ModelSpec,
    list_weight_files,
)
from recipe_lib.models.weight_names import (
    COMPUTED,
    FROZEN,
    SCORED,
    WeightEntry,
    build_weight_map,
    build_written_layout,
    compute_parameter_shapes,
    find_tied_copies,
    get_buffer_names,
    why_left_out,
)
from recipe_lib.units import format_bytes, name_first, pluralize

# Pattern of what wrappers of torch and PEFT insert into names.
_WRAPPER = (
    r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
    r"|^(module|base_model\.model)\."
)
# The number of a layer in a tensor's name.
_LAYER = re.compile(r"^(?:(?:model|transformer|gpt_neox|language_model)\.)*(?:layers|h)\.(\d+)\.")
# Ends of error lines.
_UNTIED = "; if the embedding is the head, set tie_word_embeddings to true in config.json"
_LEAVE_OUT = "if the model does not need it, leave it out of a copy of the folder"
_FP8 = "F8_E4M3"  # the file's type of FP8 weights
_MXFP4 = "U8"  # the file's type of MXFP4 blocks: two codes in a byte
_BLOCKS = ("gate_up_proj_blocks", "down_proj_blocks")  # ends of the names of MXFP4 blocks
_SAME_NUMBERS = "the same numbers as"  # begins the reason why another name of a weight is not read
_ORIGINAL = "take the checkpoint that this one was made from"  # end of an error line
Converted = TypeVar("Converted")  # a tensor, or its shape


def read_headers(folder: Path) -> dict[str, FileTensor]:
    """Return every tensor of the folder's safetensors files, by its name in the file.

    Of a file that the index names all tensors are taken, also those that it does not name, as
    transformers takes them. Raises CheckpointError for a file that is missing, broken, or not as
    the index says, and for a name under which two files have different tensors.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: has no config.json; expected a Hugging Face model folder")
    index = find_weights(folder)
    file_read = INDEX if index else SINGLE
    key_file = read_config(folder).get("transformers_weights")
    # transformers would read another file than we do.
    if key_file not in (None, file_read):
        raise CheckpointError(
            f"{folder}: config.json: transformers_weights: found {show(str(key_file))!r}, expected"
            f" {file_read}, the file that is read; rename the weights, and take the key out"
        )
    headers = {name: read_header(folder / name) for name in sorted(set(index.values()) or {SINGLE})}
    missing_names = [
        name for name, file_name in index.items() if name not in headers[file_name].tensors
    ]
    if missing_names:
        first = min(missing_names)
        num_more = len(missing_names) - 1
        rest = f" (and {num_more} more such names)" if num_more else ""
        raise CheckpointError(
            f"{folder / INDEX}: names {first} in {index[first]}, which does not hold it{rest};"
            " download the folder again"
        )
    extras = set(chain.from_iterable(map(list_extra_names, headers.values())))
    tensors: dict[str, FileTensor] = {}
    for file_name, header in headers.items():
        for name, entry in header.tensors.items():
            tensor = FileTensor(folder / file_name, entry, name in extras)
            if name in tensors and not _have_same_numbers(name, tensors[name], tensor):
                raise CheckpointError(
                    f"{folder}: {name} is in {tensors[name].file.name} and, with other numbers, in"
                    f" {file_name}; download the folder again"
                )
            tensors.setdefault(name, tensor)
    return tensors


def _have_same_numbers(name: str, first: FileTensor, second: FileTensor) -> bool:
    if first.entry.dtype != second.entry.dtype:
        return False
    with Reader({name: first}) as first_file, Reader({name: second}) as second_file:
        return have_same_numbers(first_file.get_slice(name), second_file.get_slice(name))


def check_weights(spec: ModelSpec, folder: Path) -> None:
    """Raise CheckpointError for all faults that headers show, before memory is taken.

    One line for each kind: names that are missing, unknown, or of another shape; types that are no
    weights (quantized); files that are missing, cut short or git-lfs pointers; an index that
    disagrees with its files or names files elsewhere.
    """
    match_tensors(spec, folder, compute_parameter_shapes(spec))


def match_tensors(
    spec: ModelSpec, folder: Path, shapes: dict[str, tuple[int, ...]]
) -> tuple[list[WeightEntry], dict[str, FileTensor]]:
    """Return the entries to read, and the tensors they lie in by the names in the files.

    shapes: of the parameters, by our names. Raises CheckpointError as `check_weights` does, and for
    tied tensors that differ.
    """
    tensors = read_headers(folder)
    raise_faults(CheckpointError, [find_quantized_fault(spec, folder, tensors)])
    entries = build_weight_map(spec, [name for name in tensors if not tensors[name].extra])
    if SCORE not in tensors and count_head_labels(read_config(folder)) is None:
        # A causal language model gets a new head, which starts at random.
        entries = [entry for entry in entries if entry.our_name != SCORE]
    plain_entries = [entry for entry in entries if entry.made is None and entry.view is None]
    # Name in the files -> the shape that the tensor must have.
    expected = compute_file_shapes(plain_entries, shapes)
    views = [entry.view for entry in entries if entry.view is not None]
    # Name in the file -> shape and types of a tensor that a view takes.
    forms = dict(chain.from_iterable(view.tensors().items() for view in views))
    expected |= {name: form.shape for name, form in forms.items()}
    # Name in the file -> types that it may have, of tensors that are no plain weights (codes,
    # scales).
    readable: dict[str, Collection[str]] = {name: form.dtypes for name, form in forms.items()}
    conversion_inputs = set[str]().union(
        *(entry.made.names() for entry in entries if entry.made is not None)
    )
    # Name of a tied tensor that the files have too -> entry of the parameter that it must equal.
    copies = find_tied_copies(spec, entries, tensors)
    expected |= {
        copy: expected[entry.file_name]
        for copy, entry in copies.items()
        if entry.file_name in expected
    }
    unused = _explain_unused(spec, tensors, expected.keys() | conversion_inputs)
    # Buffers may have any type: tables of integers too.
    buffers = get_buffer_names(spec)
    names_of_buffers = {entry.file_name for entry in entries if entry.our_name in buffers}
    weights = ((expected.keys() - names_of_buffers) | conversion_inputs) & tensors.keys()
    unreadable = {
        name
        for name in tensors
        if tensors[name].entry.dtype not in readable.get(name, READABLE_TYPES)
    }
    readable_tensors = {name: tensors[name] for name in tensors.keys() - unreadable}
    faults = [
        *describe_foreign_tensors(
            spec,
            folder,
            missing=expected.keys() - tensors.keys(),
            foreign={name for name, reason in unused.items() if reason is None},
        ),
        _find_type_fault(folder, {name: tensors[name] for name in weights & unreadable}, readable),
        # The shape of a tensor of another type says nothing: packed codes have fewer columns.
        find_shape_fault(folder, expected, readable_tensors),
        _find_conversion_fault(folder, entries, shapes=shapes, tensors=tensors),
    ]
    raise_faults(CheckpointError, faults)
    for copy, entry in copies.items():
        _check_copy(folder, copy, entry=entry, tensors=tensors)
    return entries, tensors


def _explain_unused(
    spec: ModelSpec, tensors: Mapping[str, FileTensor], used: Collection[str]
) -> dict[str, str | None]:
    """Return name -> why an unused tensor may be left out; None where it may not.

    Parameters that a recipe added are not among them.

    used: names of the tensors that parameters are read from.
    """
    names = [name for name in sorted(tensors.keys() - used) if not tensors[name].extra]
    unread = spec.explain_unread(tensors) if isinstance(spec, ExternalSpec) and names else {}
    return {
        name: why_left_out(spec, name, len(tensors[name].entry.shape)) or unread.get(name)
        for name in names
    }


def _check_copy(
    folder: Path, copy: str, *, entry: WeightEntry, tensors: Mapping[str, FileTensor]
) -> None:
    """Raise CheckpointError if a tied tensor differs from the one that it is tied to.

    transformers 5 does not tie the two then, others drop one of them: only the user knows which one
    is meant.

    copy: name of the tied tensor. entry: of the parameter that it is tied to.
    """
    with Reader(tensors) as reader:
        weight = reader.open_entry(entry, torch.float32)
        opened_copy = reader.get_slice(copy)
        # Both ways: each casts the second to the type of the first, and the narrower one would hide
        # a difference.
        if have_same_numbers(weight, opened_copy) and have_same_numbers(opened_copy, weight):
            return
    raise CheckpointError(
        f"{folder}: {copy} differs from {entry.file_name}, and config.json ties the two; if it was"
        " trained, set tie_word_embeddings to false in config.json; if not, leave it out of a copy"
        " of the folder"
    )


def list_carried(spec: ModelSpec, folder: Path) -> dict[str, FileTensor]:
    """Return the tensors of a checked folder that an export has unchanged, by name.

    The model does not read or train them, but a program that reads the export may: parts that text
    does not run through, further layers, heads that predict several tokens.
    """
    tensors = read_headers(folder)
    groups = _group_untrained(spec, tensors)
    return {
        name: tensors[name]
        for reason, names in groups.items()
        if _is_carried(reason)
        for name in names
    }


def _group_unread(spec: ModelSpec, tensors: Mapping[str, FileTensor]) -> dict[str, list[str]]:
    """Return reason -> names of the tensors of a checked folder that are not read for it."""
    entries = build_weight_map(spec, [name for name in tensors if not tensors[name].extra])
    names_by_reason: dict[str, list[str]] = defaultdict(list)
    for copy, entry in find_tied_copies(spec, entries, tensors).items():
        names_by_reason[f"{_SAME_NUMBERS} {entry.file_name}"].append(copy)
    used = set(chain.from_iterable(map(_list_file_names, entries)))
    used.update(*names_by_reason.values())
    for name, reason in _explain_unused(spec, tensors, used).items():
        if reason is not None:
            names_by_reason[reason].append(name)
    return names_by_reason


def _group_untrained(spec: ModelSpec, tensors: Mapping[str, FileTensor]) -> dict[str, list[str]]:
    """Return what `_group_unread` does, and the tensors of parts that are read and frozen."""
    groups = _group_unread(spec, tensors)
    frozen = spec.layout().frozen if isinstance(spec, ExternalSpec) else ()
    if frozen:
        entries = build_weight_map(spec, [name for name in tensors if not tensors[name].extra])
        file_names = [_list_file_names(entry) for entry in entries if entry.our_name in frozen]
        layout = build_written_layout(spec)
        # A tensor of an older name is written under the new one, in the run's type.
        written = layout.shapes if layout else {entry.file_name for entry in build_weight_map(spec)}
        groups[FROZEN] = [name for name in chain.from_iterable(file_names) if name in written]
    return groups


def _is_carried(reason: str) -> bool:
    """Return True if tensors that are not trained for this reason go into the export."""
    return reason not in (COMPUTED, SCORED) and not reason.startswith(_SAME_NUMBERS)


def log_left_out(
    spec: ModelSpec,
    folder: Path,
    topic: str,
    tensors: Mapping[str, FileTensor] | None = None,
    carries: bool = False,
) -> None:
    """Log which tensors and files of a checked folder are not used.

    There is a line for each reason to leave tensors out, one for files that are not read, and one
    for buffers that keep their first values.

    topic: begins the lines: `model` where it is loaded, `export` where it is written. tensors: as
    `read_headers` returns them; None: they are read. carries: True: the export has the tensors of
    `list_carried`.
    """
    tensors = read_headers(folder) if tensors is None else tensors
    carried: dict[str, str] = {}  # name of a tensor that the export has -> why it is not read
    groups = (_group_untrained if carries else _group_unread)(spec, tensors)
    for reason, names in groups.items():
        if carries and _is_carried(reason):
            carried |= dict.fromkeys(names, reason)
            continue
        get_logger().info("%s: left out: %s: %s", topic, count_tensors(names, tensors), reason)
    if carried:
        reasons = "; ".join(dict.fromkeys(carried.values()))
        text = count_tensors(carried, tensors)
        get_logger().info("%s: carried unchanged: %s: %s", topic, text, reasons)
    read_names = {tensor.file.name for tensor in tensors.values()}
    unread = [name for name in list_weight_files(folder) if name not in read_names]
    if unread:
        get_logger().info(
            "%s: not read: %s: other files have the weights", topic, shorten_names(unread)
        )
    entries = build_weight_map(spec, [name for name in tensors if not tensors[name].extra])
    missing_buffers = sorted(get_buffer_names(spec) - {entry.our_name for entry in entries})
    if missing_buffers:
        get_logger().info(
            "%s: not in the files: %s (%d): keep their first values",
            topic,
            shorten_names(missing_buffers),
            len(missing_buffers),
        )


def _list_file_names(entry: WeightEntry) -> Collection[str]:
    """Return the names of the tensors that a parameter is made of."""
    if entry.made is not None:
        return entry.made.names()
    return [entry.file_name] if entry.view is None else entry.view.tensors()


def count_tensors(names: Collection[str], tensors: Mapping[str, FileTensor]) -> str:
    """Return `model.visual.* (351 tensors, 1.07 GiB)`."""
    size = sum(tensors[name].num_bytes for name in names)
    return f"{shorten_names(names)} ({pluralize(len(names), 'tensor')}, {format_bytes(size)})"


def shorten_names(names: Collection[str]) -> str:
    """Return names as text for one line: with `*` for numbers, and of many only the first part."""
    short_names = sorted({show(re.sub(r"\.\d+(?=\.)", ".*", name)) for name in names})
    if len(short_names) > 3:
        short_names = sorted(
            {re.sub(r"^((model\.)?[^.]+)\..*", r"\1.*", name) for name in short_names}
        )
    return ", ".join(short_names)


def compute_file_shapes(
    entries: list[WeightEntry], shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return name in the file -> the shape that the tensor must have.

    A fused tensor (Phi 3's qkv) has the rows of all its parameters.

    shapes: of the parameters, by our names.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        shape = shapes[entry.our_name]
        if not shape:  # a number by itself has no rows
            expected[entry.file_name] = ()
            continue
        num_rows = max(entry.start + shape[0], expected.get(entry.file_name, (0,))[0])
        expected[entry.file_name] = (num_rows, *shape[1:])
    return expected


def _find_type_fault(
    folder: Path, unreadable: Mapping[str, FileTensor], readable: Mapping[str, Collection[str]]
) -> str | None:
    """Return a line for tensors of types that cannot be read; None if there are none.

    readable: name -> types that a tensor may have that is no plain weight.
    """
    if not unreadable:
        return None
    first = min(unreadable)
    expected = "F32, BF16, F16 or F64"
    remedy = "quantized weights cannot be trained: take the checkpoint they were made from"
    types = readable.get(first, READABLE_TYPES)
    if set(types) != READABLE_TYPES:  # codes, and what scales them
        *other_types, last_type = types
        expected = f"{', '.join(other_types)} or {last_type}" if other_types else last_type
        remedy = "check that config.json and the weights are of one checkpoint"
    return (
        f"{folder}: {name_first(unreadable, 'is', 'are')} of type {unreadable[first].entry.dtype},"
        f" expected {expected}; {remedy}"
    )


def find_shape_fault(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, FileTensor],
    by: str = "config.json",
) -> str | None:
    """Return a line for tensors of another shape than expected; None if there are none.

    expected: name in the files -> shape. by: where the expected shapes are from, for the line.
    """
    names = sorted(expected.keys() & tensors.keys())
    misshapen = [name for name in names if tensors[name].entry.shape != expected[name]]
    if not misshapen:
        return None
    rest = f" (and {len(misshapen) - 1} more of another shape)" if len(misshapen) > 1 else ""
    return (
        f"{folder}: {misshapen[0]} has shape {list(tensors[misshapen[0]].entry.shape)}, {by} makes"
        f" it {list(expected[misshapen[0]])}{rest}; check that {by} and the weights are of one"
        " model"
    )


def get_converted(converted: Mapping[str, Converted], name: str) -> Converted:
    """Return a parameter's part of a conversion's result.

    It is the part under its name; of a conversion that makes one parameter only, that one, whatever
    its name.

    converted: name -> tensor or shape.
    """
    return converted[name] if name in converted else next(iter(converted.values()))


def _find_incomplete_expert(names: list[str]) -> str | None:
    """Return the first tensor whose expert lacks another of its matrices; None if there is none.

    Names are of one kind if they differ in their numbers alone, those of layer and expert. An
    expert is complete if its numbers are there in every kind.
    """
    numbers_by_name = {name: tuple(re.findall(r"\d+", name)) for name in names}
    numbers_by_kind: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for name in names:
        numbers_by_kind[re.sub(r"\d+", "*", name)].add(numbers_by_name[name])
    complete = set.intersection(*numbers_by_kind.values()) if numbers_by_kind else set()
    return min((name for name in names if numbers_by_name[name] not in complete), default=None)


def _find_conversion_fault(
    folder: Path,
    entries: list[WeightEntry],
    *,
    shapes: dict[str, tuple[int, ...]],
    tensors: dict[str, FileTensor],
) -> str | None:
    """Return a line for parameters that cannot be converted from their tensors, or to their shape.

    A conversion makes a parameter of several tensors, as transformers does with those of experts.
    """
    misfits = []
    for entry in entries:
        if entry.made is not None:
            converted_shapes = entry.made.shapes(lambda name: tensors[name].entry.shape)
            # None where the tensors do not go together.
            shape = get_converted(converted_shapes, entry.our_name) if converted_shapes else None
            if shape != shapes[entry.our_name]:
                misfits.append((entry, entry.made.names(), shape))
    if not misfits:
        return None
    entry, names, shape = misfits[0]
    result = "which do not go together" if shape is None else f"which make {list(shape)}"
    single = _find_incomplete_expert(names)
    if single:
        result += f", {single} having no counterpart"
    rest = f" (and {len(misfits) - 1} more of another shape)" if len(misfits) > 1 else ""
    return (
        f"{folder}: {entry.our_name} is made of {len(names)} tensors ({entry.file_name} and"
        f" others), {result}; config.json makes it {list(shapes[entry.our_name])}{rest}; check that"
        " config.json and the weights are of one model"
    )


# Ends of a line about a tensor that the model does not have: what it is and what to do about it.
_OTHER_REMEDY = "; check that config.json and the weights are of one model"
_BEYOND_LAYERS_REMEDY = (
    " (a layer beyond num_hidden_layers); correct num_hidden_layers in config.json, or"
    f" {_LEAVE_OUT}"
)
# Pattern of a tensor's name -> such a text; the first pattern that is found in a name counts.
_REMEDIES_BY_NAME = {
    _WRAPPER: (
        " (names of a wrapper); save the module inside of it (torch.compile: model._orig_mod,"
        " DistributedDataParallel: model.module, PEFT: model.merge_and_unload())"
    ),
    r"\.(lora_\w+|modules_to_save|base_layer)\.": (
        " (of an adapter); merge it into the model (PEFT: model.merge_and_unload()), and save that"
    ),
    r"[._](qweight|qzeros|scales|g_idx|(weight|input)_(scale|zero_point|packed|shape)\w*"
    r"|absmax|quant_map|SCB)$": (
        " (of quantized weights); take the checkpoint that this one was made from"
    ),
    r"^(v_head|value_head|score|classifier|reward_head)\.": (
        " (a head that predicts no tokens); name its class in architectures of config.json"
        " (...ForSequenceClassification has score.weight alone, for reward_distributed);"
        f" {_LEAVE_OUT}"
    ),
    r"\.bias$": (
        " (a bias); set attention_bias or mlp_bias in config.json if the family has it;"
        f" {_LEAVE_OUT}"
    ),
}


def describe_foreign_tensors(
    spec: ModelSpec, folder: Path, missing: Collection[str], foreign: Collection[str]
) -> list[str]:
    """Return a line for missing parameters, and one for each kind of tensors that are not ours.

    missing, foreign: names in the files, of parameters without a tensor, and of tensors without a
    parameter.
    """
    names_by_remedy: dict[str, list[str]] = defaultdict(list)
    for name in sorted(foreign):
        names_by_remedy[_describe_foreign(spec, name)].append(name)
    # A parameter that is there under a wrapper's name is told once, as foreign.
    unwrapped_names = {re.sub(_WRAPPER, r"\1", name) for name in foreign}
    missing_names = sorted(set(missing) - unwrapped_names)
    lines = []
    if missing_names:
        remedy = _UNTIED if missing_names[0].endswith("lm_head.weight") else ""
        lines.append(
            f"{folder}: {name_first(missing_names, 'is', 'are')} missing; download the folder"
            f" again{remedy}"
        )
    return lines + [
        f"{folder}: {name_first(names, 'belongs', 'belong')} to no part of this model{remedy}"
        for remedy, names in names_by_remedy.items()
    ]


# Return the end of the line about a foreign tensor, which begins after the tensor's name.
def _describe_foreign(spec: ModelSpec, name: str) -> str:
    layer = _LAYER.search(name)
    if layer and int(layer[1]) >= spec.num_layers:
        return _BEYOND_LAYERS_REMEDY
    return next(
        (text for pattern, text in _REMEDIES_BY_NAME.items() if re.search(pattern, name)),
        _OTHER_REMEDY,
    )


def find_quantized_fault(
    spec: ModelSpec, folder: Path, tensors: Mapping[str, FileTensor]
) -> str | None:
    """Return a line for quantized weights that config.json does not declare, or without scales.

    None if there is no such fault. Only MXFP4 and FP8 are looked at.
    """
    if not isinstance(spec, DecoderSpec):
        return None
    types = {name: tensor.entry.dtype for name, tensor in tensors.items()}
    blocks = sorted(name for name in types if name.endswith(_BLOCKS))
    mistyped = [name for name in blocks if types[name] != _MXFP4]
    if mistyped:
        return (
            f"{folder}: {name_first(mistyped, 'has', 'have')} the name of MXFP4 blocks and type"
            f" {types[mistyped[0]]}, expected U8; {_ORIGINAL}"
        )
    if blocks and not spec.codes.mxfp4:
        return _describe_undeclared(
            folder, blocks, codes="MXFP4 blocks", expected="quant_method mxfp4"
        )
    fp8_names = sorted(name for name, dtype in types.items() if dtype == _FP8)
    unscaled = [name for name in fp8_names if f"{name}_scale_inv" not in types]
    if len(unscaled) < len(fp8_names) and spec.codes.fp8_block is None:
        return _describe_undeclared(
            folder,
            fp8_names,
            codes="FP8 numbers with scales of blocks",
            expected="quant_method fp8 and weight_block_size",
        )
    if unscaled and spec.codes.fp8_block is not None:
        return (
            f"{folder}: {name_first(unscaled, 'has', 'have')} FP8 numbers without scales, expected"
            f" {unscaled[0]}_scale_inv; {_ORIGINAL}"
        )
    return None


def _describe_undeclared(folder: Path, names: Sequence[str], *, codes: str, expected: str) -> str:
    return (
        f"{folder}: {name_first(names, 'has', 'have')} {codes}, which config.json does not say;"
        f" expected quantization_config with {expected}: take the config.json of the same"
        " checkpoint"
    )
