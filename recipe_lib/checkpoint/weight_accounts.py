"""What each tensor of a checkpoint's files is to a model: read, left out for a reason, or a fault of one line.

Every reader of a model folder takes its tensors from `read_headers`, and their places from `match_tensors`, so that
none of them is dropped without a word.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from recipe_lib.checkpoint.converted import Reader, hold_same_numbers, made_for
from recipe_lib.checkpoint.foreign_tensors import describe_foreign_tensors
from recipe_lib.checkpoint.quantized_checks import quantized_fault
from recipe_lib.checkpoint.tensor_files import DTYPE_NAMES, FileTensor, Header, read_header
from recipe_lib.checkpoint.weight_files import INDEX, SINGLE, find_weights, list_unread_weights
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError
from recipe_lib.logs import get_logger
from recipe_lib.models import read_config
from recipe_lib.models.scored_spec import head_labels
from recipe_lib.models.spec import SCORE, ModelSpec
from recipe_lib.models.weight_names import (
    WeightEntry,
    buffer_names,
    find_tied_copies,
    parameter_shapes,
    weight_map,
    why_left_out,
)
from recipe_lib.units import format_bytes, name_first

EXTRA = "tune_extra_parameters"  # metadata of a file: names of those of its tensors that only a recipe's model has
_READABLE = {DTYPE_NAMES[dtype] for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


def read_headers(folder: Path) -> dict[str, FileTensor]:
    """Return every tensor of the folder's safetensors files, by its name in the file.

    Of a file that the index names all tensors are taken, also those that it does not name, as transformers takes them.
    Raises CheckpointError, also for a name under which two files have different tensors.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: has no config.json; expected a Hugging Face model folder")
    index = find_weights(folder)
    _check_named_file(folder, INDEX if index else SINGLE)
    headers = {name: read_header(folder / name) for name in sorted(set(index.values()) or {SINGLE})}
    lost = [name for name, file_name in index.items() if name not in headers[file_name].tensors]
    if lost:
        fault = f"names {min(lost)} in {index[min(lost)]}, which does not hold it"
        more = f" (and {len(lost) - 1} more such names)" if len(lost) > 1 else ""
        raise CheckpointError(f"{folder / INDEX}: {fault}{more}; download the folder again")
    extras = {name for header in headers.values() for name in extra_names(header)}
    tensors: dict[str, FileTensor] = {}
    for file_name, header in headers.items():
        for name, entry in header.tensors.items():
            tensor = FileTensor(folder / file_name, entry, name in extras)
            if name in tensors and not _have_same_numbers(name, tensors[name], tensor):
                raise CheckpointError(
                    f"{folder}: {name} is in {tensors[name].file.name} and, with other numbers, in {file_name}; "
                    "download the folder again"
                )
            tensors.setdefault(name, tensor)
    return tensors


def _check_named_file(folder: Path, file_name: str) -> None:
    """Raise CheckpointError for a config.json that has transformers read another file than we do."""
    named = read_config(folder).get("transformers_weights")
    if named not in (None, file_name):
        raise CheckpointError(
            f"{folder}: config.json: transformers_weights: found {show(str(named))!r}, expected {file_name}, the file "
            "that is read; rename the weights, and take the key out"
        )


def _have_same_numbers(name: str, first: FileTensor, second: FileTensor) -> bool:
    """Return whether two files have the same tensor under one name."""
    with Reader({name: first}) as first_file, Reader({name: second}) as second_file:
        is_same = hold_same_numbers(first_file.slice(name), second_file.slice(name))
    return is_same and first.entry.dtype == second.entry.dtype


def extra_names(header: Header) -> set[str]:
    """Return the tensors of a file that its metadata names as extra parameters."""
    return set(header.metadata.get(EXTRA, "").split())


def check_weights(spec: ModelSpec, folder: Path) -> None:
    """Finds every fault that headers show, before memory is taken: CheckpointError, one line a kind of fault.

    Names that are missing, unknown, or of another shape; types that are no weights (quantized); files that are
    missing, cut short or git-lfs pointers; an index that disagrees with its files or names files elsewhere.
    """
    match_tensors(spec, folder, parameter_shapes(spec))


def match_tensors(
    spec: ModelSpec, folder: Path, shapes: dict[str, tuple[int, ...]]
) -> tuple[list[WeightEntry], dict[str, FileTensor]]:
    """Return the entries to read and the tensors they lie in. Raises CheckpointError as `check_weights` does.

    shapes: of the parameters, by our names.
    """
    found = read_headers(folder)
    fault = quantized_fault(spec, folder, found)
    if fault:
        raise CheckpointError(fault)
    entries = weight_map(spec, [name for name in found if not found[name].extra])
    if SCORE not in found and head_labels(read_config(folder)) is None:
        entries = [entry for entry in entries if entry.our_name != SCORE]  # a new head, which starts at random
    copies = find_tied_copies(spec, entries, found)
    expected = file_shapes([entry for entry in entries if entry.made is None and entry.view is None], shapes)
    forms = {name: form for entry in entries if entry.view for name, form in entry.view.tensors().items()}
    expected |= {name: form.shape for name, form in forms.items()}
    readable = {name: form.dtypes for name, form in forms.items()}
    taken = {name for entry in entries if entry.made for name in entry.made.names()}
    buffers = buffer_names(spec)  # of any type: tables of integers too
    counts = {entry.file_name for entry in entries if entry.our_name in buffers}
    expected |= {copy: expected[entry.file_name] for copy, entry in copies.items() if entry.file_name in expected}
    unused = found.keys() - expected.keys() - taken
    faults = [
        *describe_foreign_tensors(
            spec,
            folder,
            missing=expected.keys() - found.keys(),
            foreign={
                name
                for name in unused
                if not (found[name].extra or why_left_out(spec, name, len(found[name].entry.shape)))
            },
        ),
        _type_fault(
            folder, {name: found[name] for name in ((expected.keys() - counts) | taken) & found.keys()}, readable
        ),
        find_shape_fault(
            folder,
            expected,
            {name: found[name] for name in found if found[name].entry.dtype in readable.get(name, _READABLE)},
        ),
        _conversion_fault(folder, entries, shapes, found),
    ]
    if any(faults):
        raise CheckpointError(*(fault for fault in faults if fault))
    for copy, entry in copies.items():
        _check_copy(folder, copy, entry, found)
    return entries, found


def _check_copy(folder: Path, copy: str, entry: WeightEntry, found: Mapping[str, FileTensor]) -> None:
    """Raise CheckpointError for a tied tensor that has other numbers than the one that it is tied to.

    transformers 5 does not tie the two then, others drop one of them: which one is meant only the user knows.
    """
    with Reader(found) as read:
        tensors = read.opened(entry, torch.float32), read.slice(copy)
        if hold_same_numbers(*tensors) and hold_same_numbers(*reversed(tensors)):
            return
    raise CheckpointError(
        f"{folder}: {copy} differs from {entry.file_name}, and config.json ties the two; if it was trained, set "
        "tie_word_embeddings to false in config.json; if not, leave it out of a copy of the folder"
    )


def tell_left_out(spec: ModelSpec, folder: Path, what: str, found: Mapping[str, FileTensor] | None = None) -> None:
    """Log a line for each reason to leave tensors of a checked folder out, and for files that are not read.

    what: begins the lines, `model` of what is loaded, `export` of what is written. found: of `read_headers`.
    """
    found = read_headers(folder) if found is None else found
    entries = weight_map(spec, [name for name in found if not found[name].extra])
    reasons: dict[str, list[str]] = defaultdict(list)
    for copy, entry in find_tied_copies(spec, entries, found).items():
        reasons[f"the same numbers as {entry.file_name}"].append(copy)
    used = {name for entry in entries for name in _file_names(entry)}.union(*reasons.values())
    for name in found.keys() - used:
        reason = why_left_out(spec, name, len(found[name].entry.shape))
        if reason is not None and not found[name].extra:
            reasons[reason].append(name)
    for reason, names in reasons.items():
        size = sum(found[name].entry.end - found[name].entry.start for name in names)
        counted = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
        get_logger().info("%s: left out: %s (%s, %s): %s", what, _shorten(names), counted, format_bytes(size), reason)
    unread = list_unread_weights(folder, {tensor.file.name for tensor in found.values()})
    if unread:
        get_logger().info("%s: not read: %s: other files have the weights", what, _shorten(unread))
    kept = sorted(buffer_names(spec) - {entry.our_name for entry in entries})
    if kept:
        get_logger().info("%s: not in the files: %s (%d): keep their first values", what, _shorten(kept), len(kept))


def _file_names(entry: WeightEntry) -> Collection[str]:
    """Return the names of the tensors that a parameter is made of."""
    if entry.made is not None:
        return entry.made.names()
    return [entry.file_name] if entry.view is None else entry.view.tensors()


def _shorten(names: Collection[str]) -> str:
    """Return names without the numbers of their layers, as a line may show them; of many the parts that they are of."""
    shown = sorted({show(re.sub(r"\.\d+(?=\.)", ".*", name)) for name in names})
    if len(shown) > 3:
        shown = sorted({re.sub(r"^((model\.)?[^.]+)\..*", r"\1.*", name) for name in shown})
    return ", ".join(shown)


def file_shapes(entries: list[WeightEntry], shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shape that each tensor of a file must have; that of a fused one is its parts' rows together."""
    expected: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        shape = shapes[entry.our_name]
        if not shape:  # a number by itself has no rows
            expected[entry.file_name] = ()
            continue
        rows = entry.start + shape[0]
        expected[entry.file_name] = (max(rows, expected.get(entry.file_name, (0,))[0]), *shape[1:])
    return expected


def _type_fault(folder: Path, tensors: dict[str, FileTensor], readable: Mapping[str, Collection[str]]) -> str | None:
    """readable: the types of tensors that others than weights' are expected of."""
    unreadable = {
        name: tensor.entry.dtype
        for name, tensor in tensors.items()
        if tensor.entry.dtype not in readable.get(name, _READABLE)
    }
    if not unreadable:
        return None
    first = min(unreadable)
    expected, remedy = (
        "F32, BF16, F16 or F64",
        "quantized weights cannot be trained: take the checkpoint they were made from",
    )
    if set(readable.get(first, _READABLE)) != _READABLE:  # codes, and what scales them
        *others, last = readable[first]
        expected = f"{', '.join(others)} or {last}" if others else last
        remedy = "check that config.json and the weights are of one checkpoint"
    return f"{folder}: {name_first(unreadable, 'is', 'are')} of type {unreadable[first]}, expected {expected}; {remedy}"


def find_shape_fault(
    folder: Path, expected: dict[str, tuple[int, ...]], found: dict[str, FileTensor], by: str = "config.json"
) -> str | None:
    """Return a line for tensors of another shape than expected; None: there are none. by: what expects the shapes."""
    misshapen = [name for name in sorted(expected.keys() & found.keys()) if found[name].entry.shape != expected[name]]
    if not misshapen:
        return None
    more = f" (and {len(misshapen) - 1} more of another shape)" if len(misshapen) > 1 else ""
    return (
        f"{folder}: {misshapen[0]} has shape {list(found[misshapen[0]].entry.shape)}, {by} makes it "
        f"{list(expected[misshapen[0]])}{more}; check that {by} and the weights are of one model"
    )


def _find_single(names: list[str]) -> str | None:
    """Return the first name whose numbers are not those of a name of each kind: an expert that has not all matrices."""
    kinds: dict[str, dict[tuple[str, ...], str]] = defaultdict(dict)
    for name in names:
        kinds[re.sub(r"\d+", "*", name)][tuple(re.findall(r"\d+", name))] = name
    common = set.intersection(*(set(held) for held in kinds.values())) if kinds else set()
    single = [name for held in kinds.values() for numbers, name in held.items() if numbers not in common]
    return min(single, default=None)


def _conversion_fault(
    folder: Path, entries: list[WeightEntry], shapes: dict[str, tuple[int, ...]], found: dict[str, FileTensor]
) -> str | None:
    """Return what is wrong with tensors of which transformers makes others: their number, or their shapes."""
    faults = []
    for entry in entries:
        if entry.made is not None:
            made = entry.made.shapes(lambda name: found[name].entry.shape)
            shape = made_for(made, entry.our_name) if made else None
            if shape != shapes[entry.our_name]:
                faults.append((entry, shape))
    if not faults:
        return None
    (entry, shape), others = faults[0], len(faults) - 1
    names = entry.made.names() if entry.made else []
    result = "which do not go together" if shape is None else f"which make {list(shape)}"
    single = _find_single(names)
    result += f", {single} having no counterpart" if single else ""
    more = f" (and {others} more of another shape)" if others else ""
    return (
        f"{folder}: {entry.our_name} is made of {len(names)} tensors ({entry.file_name} and others), {result}; "
        f"config.json makes it {list(shapes[entry.our_name])}{more}; check that config.json and the weights are of "
        "one model"
    )
