"""What each tensor of a checkpoint's files is to a model: read, left out for a reason, or a fault
of one line.

Every reader of a model folder takes its tensors from `read_headers`, and their places from
`match_tensors`, so that none of them is dropped without a word.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from recipe_lib.checkpoint.model_folders import INDEX, SINGLE, find_weights, list_unread_weights
from recipe_lib.checkpoint.safetensors_files import (
    DTYPE_NAMES,
    FileTensor,
    Header,
    Reader,
    have_same_numbers,
    read_header,
)
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError, raise_faults
from recipe_lib.logs import get_logger
from recipe_lib.models import read_config
from recipe_lib.models.families import count_head_labels
from recipe_lib.models.spec import SCORE, DecoderSpec, ModelSpec
from recipe_lib.models.weight_names import (
    WeightEntry,
    build_weight_map,
    compute_parameter_shapes,
    find_tied_copies,
    get_buffer_names,
    why_left_out,
)
from recipe_lib.units import format_bytes, name_first, pluralize

EXTRA = (  # metadata of a file: names of those of its tensors that only a recipe's model has
    "tune_extra_parameters"
)
READABLE_TYPES = {
    DTYPE_NAMES[dtype] for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
_WRAPPER = r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^(module|base_model\.model)\."
_LAYER = re.compile(r"^(?:(?:model|transformer|gpt_neox|language_model)\.)*(?:layers|h)\.(\d+)\.")
_UNTIED = "; if the embedding is the head, set tie_word_embeddings to true in config.json"
_LEAVE_OUT = "if the model does not need it, leave it out of a copy of the folder"
_FP8, _MXFP4 = "F8_E4M3", "U8"
_BLOCKS = ("gate_up_proj_blocks", "down_proj_blocks")  # ends of the names of MXFP4
_ORIGINAL = "take the checkpoint that this one was made from"
Made = TypeVar("Made")


def read_headers(folder: Path) -> dict[str, FileTensor]:
    """Return every tensor of the folder's safetensors files, by its name in the file.

    Of a file that the index names all tensors are taken, also those that it does not name, as
    transformers takes them. Raises CheckpointError, also for a name under which two files have
    different tensors.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: has no config.json; expected a Hugging Face model folder")
    index = find_weights(folder)
    file_read = INDEX if index else SINGLE
    named = read_config(folder).get("transformers_weights")
    if named not in (None, file_read):  # transformers would read another file than we do
        raise CheckpointError(
            f"{folder}: config.json: transformers_weights: found {show(str(named))!r}, expected"
            f" {file_read}, the file that is read; rename the weights, and take the key out"
        )
    headers = {name: read_header(folder / name) for name in sorted(set(index.values()) or {SINGLE})}
    lost = [name for name, file_name in index.items() if name not in headers[file_name].tensors]
    if lost:
        fault = f"names {min(lost)} in {index[min(lost)]}, which does not hold it"
        more = f" (and {len(lost) - 1} more such names)" if len(lost) > 1 else ""
        raise CheckpointError(f"{folder / INDEX}: {fault}{more}; download the folder again")
    extras = {name for header in headers.values() for name in list_extra_names(header)}
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
    """Return whether two files have the same tensor under one name."""
    with Reader({name: first}) as first_file, Reader({name: second}) as second_file:
        is_same_type = first.entry.dtype == second.entry.dtype
        return is_same_type and have_same_numbers(first_file.slice(name), second_file.slice(name))


def list_extra_names(header: Header) -> set[str]:
    """Return the tensors of a file that its metadata names as extra parameters."""
    return set(header.metadata.get(EXTRA, "").split())


def check_weights(spec: ModelSpec, folder: Path) -> None:
    """Raise CheckpointError for all faults that headers show, before memory is taken: one line a
    kind of fault.

    Names that are missing, unknown, or of another shape; types that are no weights (quantized);
    files that are missing, cut short or git-lfs pointers; an index that disagrees with its files or
    names files elsewhere.
    """
    match_tensors(spec, folder, compute_parameter_shapes(spec))


def match_tensors(
    spec: ModelSpec, folder: Path, shapes: dict[str, tuple[int, ...]]
) -> tuple[list[WeightEntry], dict[str, FileTensor]]:
    """Return the entries to read and the tensors they lie in. Raises CheckpointError as
    `check_weights` does.

    shapes: of the parameters, by our names.
    """
    tensors = read_headers(folder)
    raise_faults(CheckpointError, [find_quantized_fault(spec, folder, tensors)])
    entries = build_weight_map(spec, [name for name in tensors if not tensors[name].extra])
    if SCORE not in tensors and count_head_labels(read_config(folder)) is None:
        entries = [
            entry for entry in entries if entry.our_name != SCORE
        ]  # a new head, which starts at random
    expected = compute_file_shapes(
        [entry for entry in entries if entry.made is None and entry.view is None], shapes
    )
    readable: dict[
        str, Collection[str]
    ] = {}  # of tensors that are no plain weights, the types that they may have
    for entry in entries:
        if entry.view is not None:
            for name, form in entry.view.tensors().items():
                expected[name] = form.shape
                readable[name] = form.dtypes
    conversion_inputs = set[str]().union(
        *(entry.made.names() for entry in entries if entry.made is not None)
    )
    copies = find_tied_copies(spec, entries, tensors)
    expected |= {
        copy: expected[entry.file_name]
        for copy, entry in copies.items()
        if entry.file_name in expected
    }
    unused = _explain_unused(spec, tensors, expected.keys() | conversion_inputs)
    buffers = get_buffer_names(spec)  # of any type: tables of integers too
    buffer_files = {entry.file_name for entry in entries if entry.our_name in buffers}
    weights = ((expected.keys() - buffer_files) | conversion_inputs) & tensors.keys()
    unreadable = {
        name
        for name in tensors
        if tensors[name].entry.dtype not in readable.get(name, READABLE_TYPES)
    }
    faults = [
        *describe_foreign_tensors(
            spec,
            folder,
            missing=expected.keys() - tensors.keys(),
            foreign={name for name, reason in unused.items() if reason is None},
        ),
        _find_type_fault(folder, {name: tensors[name] for name in weights & unreadable}, readable),
        find_shape_fault(
            folder, expected, {name: tensors[name] for name in tensors.keys() - unreadable}
        ),
        _find_conversion_fault(folder, entries, shapes, tensors),
    ]
    raise_faults(CheckpointError, faults)
    for copy, entry in copies.items():
        _check_copy(folder, copy, entry, tensors)
    return entries, tensors


def _explain_unused(
    spec: ModelSpec, tensors: Mapping[str, FileTensor], used: Collection[str]
) -> dict[str, str | None]:
    """Return why each tensor that is not used may be left out, None: it may not; a recipe's extra
    ones are not here.
    """
    return {
        name: why_left_out(spec, name, len(tensors[name].entry.shape))
        for name in sorted(tensors.keys() - used)
        if not tensors[name].extra
    }


def _check_copy(
    folder: Path, copy: str, entry: WeightEntry, tensors: Mapping[str, FileTensor]
) -> None:
    """Raise CheckpointError for a tied tensor that has other numbers than the one that it is tied
    to.

    transformers 5 does not tie the two then, others drop one of them: which one is meant only the
    user knows.
    """
    with Reader(tensors) as read:
        weight = read.open_entry(entry, torch.float32)
        opened_copy = read.slice(copy)
        # Both ways: each casts the second to the type of the first, and the narrower one would hide
        # a difference.
        if have_same_numbers(weight, opened_copy) and have_same_numbers(opened_copy, weight):
            return
    raise CheckpointError(
        f"{folder}: {copy} differs from {entry.file_name}, and config.json ties the two; if it was"
        " trained, set tie_word_embeddings to false in config.json; if not, leave it out of a copy"
        " of the folder"
    )


def log_left_out(
    spec: ModelSpec, folder: Path, what: str, tensors: Mapping[str, FileTensor] | None = None
) -> None:
    """Log a line for each reason to leave tensors of a checked folder out, and for files that are
    not read.

    what: begins the lines, `model` of what is loaded, `export` of what is written. tensors: of
    `read_headers`.
    """
    tensors = read_headers(folder) if tensors is None else tensors
    entries = build_weight_map(spec, [name for name in tensors if not tensors[name].extra])
    names_by_reason: dict[str, list[str]] = defaultdict(list)
    for copy, entry in find_tied_copies(spec, entries, tensors).items():
        names_by_reason[f"the same numbers as {entry.file_name}"].append(copy)
    used = {name for entry in entries for name in _list_file_names(entry)}.union(
        *names_by_reason.values()
    )
    for name, reason in _explain_unused(spec, tensors, used).items():
        if reason is not None:
            names_by_reason[reason].append(name)
    for reason, names in names_by_reason.items():
        size = sum(tensors[name].entry.end - tensors[name].entry.start for name in names)
        named = f"{_shorten(names)} ({pluralize(len(names), 'tensor')}, {format_bytes(size)})"
        get_logger().info("%s: left out: %s: %s", what, named, reason)
    unread = list_unread_weights(folder, {tensor.file.name for tensor in tensors.values()})
    if unread:
        get_logger().info("%s: not read: %s: other files have the weights", what, _shorten(unread))
    kept = sorted(get_buffer_names(spec) - {entry.our_name for entry in entries})
    if kept:
        get_logger().info(
            "%s: not in the files: %s (%d): keep their first values",
            what,
            _shorten(kept),
            len(kept),
        )


def _list_file_names(entry: WeightEntry) -> Collection[str]:
    """Return the names of the tensors that a parameter is made of."""
    if entry.made is not None:
        return entry.made.names()
    return [entry.file_name] if entry.view is None else entry.view.tensors()


def _shorten(names: Collection[str]) -> str:
    """Return names without the numbers of their layers, as a line may show them; of many the parts
    that they are of.
    """
    shown = sorted({show(re.sub(r"\.\d+(?=\.)", ".*", name)) for name in names})
    if len(shown) > 3:
        shown = sorted({re.sub(r"^((model\.)?[^.]+)\..*", r"\1.*", name) for name in shown})
    return ", ".join(shown)


def compute_file_shapes(
    entries: list[WeightEntry], shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shape that each tensor of a file must have; that of a fused one is its parts' rows
    together.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        shape = shapes[entry.our_name]
        if not shape:  # a number by itself has no rows
            expected[entry.file_name] = ()
            continue
        rows = entry.start + shape[0]
        expected[entry.file_name] = (max(rows, expected.get(entry.file_name, (0,))[0]), *shape[1:])
    return expected


def _find_type_fault(
    folder: Path, unreadable: Mapping[str, FileTensor], readable: Mapping[str, Collection[str]]
) -> str | None:
    """Return a line for tensors of types that cannot be read. readable: the types of those that are
    no weights.
    """
    if not unreadable:
        return None
    first = min(unreadable)
    expected = "F32, BF16, F16 or F64"
    remedy = "quantized weights cannot be trained: take the checkpoint they were made from"
    types = readable.get(first, READABLE_TYPES)
    if set(types) != READABLE_TYPES:  # codes, and what scales them
        *before, last = types
        expected = f"{', '.join(before)} or {last}" if before else last
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
    """Return a line for tensors of another shape than expected; None: there are none. by: what
    expects the shapes.
    """
    names = sorted(expected.keys() & tensors.keys())
    misshapen = [name for name in names if tensors[name].entry.shape != expected[name]]
    if not misshapen:
        return None
    more = f" (and {len(misshapen) - 1} more of another shape)" if len(misshapen) > 1 else ""
    return (
        f"{folder}: {misshapen[0]} has shape {list(tensors[misshapen[0]].entry.shape)}, {by} makes"
        f" it {list(expected[misshapen[0]])}{more}; check that {by} and the weights are of one"
        " model"
    )


def get_converted(made: Mapping[str, Made], name: str) -> Made:
    """Return what of a conversion, tensors or shapes, is a parameter's: that of its name, or the
    first.
    """
    return made[name] if name in made else next(iter(made.values()))


def _find_single(names: list[str]) -> str | None:
    """Return the first name whose numbers are not those of a name of each kind: an expert that has
    not all matrices.
    """
    numbers = {name: tuple(re.findall(r"\d+", name)) for name in names}
    kinds: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for name in names:
        kinds[re.sub(r"\d+", "*", name)].add(numbers[name])
    common = set.intersection(*kinds.values()) if kinds else set()
    return min((name for name in names if numbers[name] not in common), default=None)


def _find_conversion_fault(
    folder: Path,
    entries: list[WeightEntry],
    shapes: dict[str, tuple[int, ...]],
    tensors: dict[str, FileTensor],
) -> str | None:
    """Return what is wrong with tensors of which transformers makes others: their number, or their
    shapes.
    """
    misfits = []
    for entry in entries:
        if entry.made is not None:
            shapes_made = entry.made.shapes(lambda name: tensors[name].entry.shape)
            shape = get_converted(shapes_made, entry.our_name) if shapes_made else None
            if shape != shapes[entry.our_name]:
                misfits.append((entry, entry.made.names(), shape))
    if not misfits:
        return None
    entry, names, shape = misfits[0]
    result = "which do not go together" if shape is None else f"which make {list(shape)}"
    single = _find_single(names)
    result += f", {single} having no counterpart" if single else ""
    more = f" (and {len(misfits) - 1} more of another shape)" if len(misfits) > 1 else ""
    return (
        f"{folder}: {entry.our_name} is made of {len(names)} tensors ({entry.file_name} and"
        f" others), {result}; config.json makes it {list(shapes[entry.our_name])}{more}; check that"
        " config.json and the weights are of one model"
    )


_OTHER = "; check that config.json and the weights are of one model"
_BEYOND = (
    " (a layer beyond num_hidden_layers); correct num_hidden_layers in config.json, or"
    f" {_LEAVE_OUT}"
)
# What tensors are by their names, and what to do; the first pattern that is found in one says it.
_KINDS = {
    _WRAPPER: " (names of a wrapper); save the module inside of it (torch.compile: model._orig_mod, "
    "DistributedDataParallel: model.module, PEFT: model.merge_and_unload())",
    r"\.(lora_\w+|modules_to_save|base_layer)\.": " (of an adapter); merge it into the model (PEFT: "
    "model.merge_and_unload()), and save that",
    r"[._](qweight|qzeros|scales|g_idx|(weight|input)_(scale|zero_point|packed|shape)\w*|absmax|quant_map|SCB)$":
    " (of quantized weights); take the checkpoint that this one was made from",
    r"^(v_head|value_head|score|classifier|reward_head)\.": " (a head that predicts no tokens); name its class in "
    "architectures of config.json (...ForSequenceClassification has score.weight alone, for reward_distributed); "
    f"{_LEAVE_OUT}",
    r"\.bias$": " (a bias); set attention_bias or mlp_bias in config.json if the family has it; "
    f"{_LEAVE_OUT}",
}  # fmt: skip


def describe_foreign_tensors(
    spec: ModelSpec, folder: Path, missing: Collection[str], foreign: Collection[str]
) -> list[str]:
    """Return a line for parameters that the files lack, and one for each kind of tensors that the
    model has not.
    """
    names_by_kind: dict[str, list[str]] = defaultdict(list)
    for name in sorted(foreign):
        names_by_kind[_find_kind(spec, name)].append(name)
    lost = sorted(set(missing) - {re.sub(_WRAPPER, r"\1", name) for name in foreign})
    lines = []
    if lost:
        remedy = _UNTIED if lost[0].endswith("lm_head.weight") else ""
        lines.append(
            f"{folder}: {name_first(lost, 'is', 'are')} missing; download the folder again{remedy}"
        )
    for kind, names in names_by_kind.items():
        lines.append(
            f"{folder}: {name_first(names, 'belongs', 'belong')} to no part of this model{kind}"
        )
    return lines


def _find_kind(spec: ModelSpec, name: str) -> str:
    """Return what a tensor is that the model has not, and what to do."""
    layer = _LAYER.search(name)
    if layer and int(layer[1]) >= spec.num_layers:
        return _BEYOND
    return next((kind for pattern, kind in _KINDS.items() if re.search(pattern, name)), _OTHER)


def find_quantized_fault(
    spec: ModelSpec, folder: Path, found: Mapping[str, FileTensor]
) -> str | None:
    """One line for codes that config.json does not speak of, and for codes without their scales;
    None: no such fault.

    Of tensors that are no codes nothing is said here.
    """
    if not isinstance(spec, DecoderSpec):
        return None
    types = {name: tensor.entry.dtype for name, tensor in found.items()}
    blocks = sorted(name for name in types if name.endswith(_BLOCKS))
    odd = [name for name in blocks if types[name] != _MXFP4]
    if odd:
        named = name_first(odd, "has", "have")
        return (
            f"{folder}: {named} the name of MXFP4 blocks and type {types[odd[0]]}, expected U8;"
            f" {_ORIGINAL}"
        )
    if blocks and not spec.codes.mxfp4:
        return _describe_undeclared(folder, blocks, "MXFP4 blocks", "quant_method mxfp4")
    codes = sorted(name for name, kind in types.items() if kind == _FP8)
    bare = [name for name in codes if f"{name}_scale_inv" not in types]
    if len(bare) < len(codes) and spec.codes.fp8_block is None:
        return _describe_undeclared(
            folder,
            codes,
            "FP8 numbers with scales of blocks",
            "quant_method fp8 and weight_block_size",
        )
    if bare and spec.codes.fp8_block is not None:
        named = name_first(bare, "has", "have")
        return (
            f"{folder}: {named} FP8 numbers without scales, expected {bare[0]}_scale_inv;"
            f" {_ORIGINAL}"
        )
    return None


def _describe_undeclared(folder: Path, names: Sequence[str], what: str, expected: str) -> str:
    return (
        f"{folder}: {name_first(names, 'has', 'have')} {what}, which config.json does not say;"
        f" expected quantization_config with {expected}: take the config.json of the same"
        " checkpoint"
    )
