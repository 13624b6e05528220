"""A checkpoint folder's weights: what is wrong with them, from their headers; then each rank's own slices of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_lib.checkpoint.converted import Reader, load_converted, made_for
from recipe_lib.checkpoint.quantized_checks import quantized_fault
from recipe_lib.checkpoint.tensor_files import DTYPE_NAMES, FileTensor, Header, read_header
from recipe_lib.checkpoint.weight_files import INDEX, SINGLE, find_weights
from recipe_lib.errors import CheckpointError
from recipe_lib.logs import get_logger
from recipe_lib.models.checkpoint_parts import own_parts
from recipe_lib.models.extra_parameters import reset_extra, saved_whole
from recipe_lib.models.file_views import OpenView
from recipe_lib.models.language_model import LanguageModel, modules_elsewhere
from recipe_lib.models.meta_init import init_weight, persistent_buffers, stored_weights
from recipe_lib.models.spec import SCORE, ModelSpec
from recipe_lib.models.weight_names import (
    OTHER_PARTS,
    WeightEntry,
    buffer_names,
    ignorable,
    is_other_part,
    parameter_shapes,
    weight_map,
)
from recipe_lib.ops.device import holds_values
from recipe_lib.report.phases import phase
from recipe_lib.units import MIB, format_bytes

EXTRA = "tune_extra_parameters"  # metadata of a file: names of those of its tensors that only a recipe's model has
READ_BYTES = 256 * MIB  # the most that is copied to host memory at a time
_CHECKED = 2**24  # numbers that are looked at together
_READABLE = {DTYPE_NAMES[dtype] for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


def check_weights(spec: ModelSpec, folder: Path) -> None:
    """Finds every fault that headers show, before memory is taken: CheckpointError, one line a kind of fault.

    Names that are missing, unknown, or of another shape; types that are no weights (quantized); files that are
    missing, cut short or git-lfs pointers; an index that disagrees with its files or names files elsewhere.
    """
    _match(spec, folder, parameter_shapes(spec))


def _match(
    spec: ModelSpec, folder: Path, shapes: dict[str, tuple[int, ...]]
) -> tuple[list[WeightEntry], dict[str, FileTensor]]:
    """The entries to read and the tensors they lie in."""
    found = read_headers(folder)
    fault = quantized_fault(spec, folder, found)
    if fault:
        raise CheckpointError(fault)
    entries = weight_map(spec, [name for name in found if not found[name].extra])
    entries = [entry for entry in entries if entry.our_name != SCORE or SCORE in found]  # which starts at random
    expected = file_shapes([entry for entry in entries if entry.made is None and entry.view is None], shapes)
    forms = {name: form for entry in entries if entry.view for name, form in entry.view.tensors().items()}
    expected |= {name: form.shape for name, form in forms.items()}
    readable = {name: form.dtypes for name, form in forms.items()}
    taken = {name for entry in entries if entry.made for name in entry.made.names()}
    buffers = buffer_names(spec)  # of any type: tables of integers too
    counts = {entry.file_name for entry in entries if entry.our_name in buffers}
    faults = [
        _fault(folder, "is missing", "are missing", "download the folder again", expected.keys() - found.keys()),
        _fault(
            folder,
            "belongs to no part of this model",
            "belong to no part of this model",
            "check that config.json and the weights are of one model",
            {
                name
                for name in found.keys() - expected.keys() - taken
                if not (found[name].extra or ignorable(spec, name))
            },
        ),
        _type_fault(
            folder, {name: found[name] for name in ((expected.keys() - counts) | taken) & found.keys()}, readable
        ),
        _shape_fault(
            folder,
            expected,
            {name: found[name] for name in found if found[name].entry.dtype in readable.get(name, _READABLE)},
        ),
        _conversion_fault(folder, entries, shapes, found),
    ]
    if any(faults):
        raise CheckpointError(*(fault for fault in faults if fault))
    return entries, found


def file_shapes(entries: list[WeightEntry], shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shape that each tensor of a file must have; that of a fused one is its parts' rows together."""
    expected: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        shape = shapes[entry.our_name]
        if not shape:  # a number by itself has no rows
            expected[entry.file_name] = ()
            continue
        rows = entry.start + shape[0]
        expected[entry.file_name] = (max(rows, expected.get(entry.file_name, (0,))[0]), *shape[1:])
    return expected


def _fault(folder: Path, one: str, many: str, remedy: str, names: Collection[str]) -> str | None:
    if not names:
        return None
    first, others = min(names), len(names) - 1
    found = f"{first} and {others} more {many}" if others else f"{first} {one}"
    return f"{folder}: {found}; {remedy}"


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
    more = f" and {len(unreadable) - 1} more are" if len(unreadable) > 1 else " is"
    expected, remedy = (
        "F32, BF16, F16 or F64",
        "quantized weights cannot be trained: take the checkpoint they were made from",
    )
    if set(readable.get(first, _READABLE)) != _READABLE:  # codes, and what scales them
        *others, last = readable[first]
        expected = f"{', '.join(others)} or {last}" if others else last
        remedy = "check that config.json and the weights are of one checkpoint"
    return f"{folder}: {first}{more} of type {unreadable[first]}, expected {expected}; {remedy}"


def _shape_fault(
    folder: Path, expected: dict[str, tuple[int, ...]], found: dict[str, FileTensor], by: str = "config.json"
) -> str | None:
    other = [name for name in sorted(expected.keys() & found.keys()) if found[name].entry.shape != expected[name]]
    if not other:
        return None
    more = f" (and {len(other) - 1} more of another shape)" if len(other) > 1 else ""
    return (
        f"{folder}: {other[0]} has shape {list(found[other[0]].entry.shape)}, {by} makes it "
        f"{list(expected[other[0]])}{more}; check that {by} and the weights are of one model"
    )


def _conversion_fault(
    folder: Path, entries: list[WeightEntry], shapes: dict[str, tuple[int, ...]], found: dict[str, FileTensor]
) -> str | None:
    """What is wrong with tensors of which transformers makes others: their number, or their shapes."""
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
    count = len(entry.made.names()) if entry.made else 0
    result = "which do not go together" if shape is None else f"which make {list(shape)}"
    more = f" (and {others} more of another shape)" if others else ""
    return (
        f"{folder}: {entry.our_name} is made of {count} tensors ({entry.file_name} and others), {result}; config.json "
        f"makes it {list(shapes[entry.our_name])}{more}; check that config.json and the weights are of one model"
    )


def read_headers(folder: Path) -> dict[str, FileTensor]:
    """Every tensor of the folder's safetensors files, by its name in the file. Raises CheckpointError."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: has no config.json; expected a Hugging Face model folder")
    index = find_weights(folder)
    if not index:
        header = read_header(folder / SINGLE)
        extras = extra_names(header)
        return {name: FileTensor(folder / SINGLE, entry, name in extras) for name, entry in header.tensors.items()}
    headers = {name: read_header(folder / name) for name in sorted(set(index.values()))}
    lost = [name for name, file_name in index.items() if name not in headers[file_name].tensors]
    if lost:
        fault = f"names {min(lost)} in {index[min(lost)]}, which does not hold it"
        more = f" (and {len(lost) - 1} more such names)" if len(lost) > 1 else ""
        raise CheckpointError(f"{folder / INDEX}: {fault}{more}; download the folder again")
    extras = {name for header in headers.values() for name in extra_names(header)}
    return {
        name: FileTensor(folder / file, headers[file].tensors[name], name in extras) for name, file in index.items()
    }


def extra_names(header: Header) -> set[str]:
    """The tensors of a file that its metadata names as extra parameters."""
    return set(header.metadata.get(EXTRA, "").split())


@torch.no_grad()
def load_weights(model: nn.Module, spec: ModelSpec, folder: Path, seed: int = 0) -> None:
    """Fills the model's parameters in place; each rank reads its own slices and nothing else.

    In a pipeline it reads what its stages have, and yet finds what is wrong with the tensors of all stages.
    model: materialized, plain or sharded (DTensor) in any dimension, on any device; values are cast to the
    parameter's type. Weights that are quantized are so while they are read, from the rows that hold a rank's blocks;
    no rank has a whole one. At most READ_BYTES are in host memory at a time, and as much again while it is cast.
    Extra parameters, which the recipe added, are read if the folder was exported with them, else they start from
    `reset_parameters` and the seed.
    Raises CheckpointError as `check_weights` does, for weights that are not finite, and for a model and a folder of
    which one has parameters that the other lacks; SetupError as `reset_extra` does.
    """
    parameters: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **persistent_buffers(model)}
    stored = stored_weights(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    shapes |= {name: (module.out_features, module.in_features) for name, module in stored.items()}
    elsewhere = modules_elsewhere(model)
    expected = parameter_shapes(spec)
    if not elsewhere and expected.keys() - shapes.keys():
        raise _lacking(folder, expected.keys() - shapes.keys())
    entries, found = _match(spec, folder, expected | shapes)
    entries = [entry for entry in entries if entry.our_name in shapes]  # others are of another rank's stages
    extras = extras_to_read(model, folder, found)
    reset_extra(model, seed, extras)
    entries += [WeightEntry(name, name) for name in extras]
    by_file: dict[Path, list[WeightEntry]] = {}
    for entry in entries:
        if entry.made is not None or entry.view is not None:
            continue  # see below
        by_file.setdefault(found[entry.file_name].file, []).append(entry)
    with phase(_loading(stored), sum(map(len, by_file.values())), "tensors") as going:
        for path, in_file in by_file.items():
            with safe_open(str(path), framework="pt") as file:
                for entry in in_file:
                    _load_entry(model, file.get_slice(entry.file_name), entry, parameters, stored)
                    going.advance(1)
    _load_views(model, entries, found, parameters, stored)
    load_converted(model, parameters, entries, found)
    _say_left_out(found, spec)
    read = {entry.our_name for entry in entries} & parameters.keys()
    if SCORE in parameters.keys() - read:
        init_weight(model, SCORE, seed, spec)
    if isinstance(model, LanguageModel):
        model.note_loaded_extras(extras)
    _check_finite({name: parameters[name] for name in sorted(read)}, folder)


def _loading(stored: Collection[str]) -> str:
    return "loading and quantizing weights" if stored else "loading weights"


def _load_entry(
    model: nn.Module,
    source: Any,
    entry: WeightEntry,
    parameters: Mapping[str, torch.Tensor],
    stored: Mapping[str, Any],
) -> None:
    """This rank's part of a tensor of a file."""
    if entry.our_name in stored:
        stored[entry.our_name].fill_weight(_row_reader(source, entry.start))
        return
    for local, offsets in own_parts(model, entry.our_name, parameters[entry.our_name]):
        read_part(source, local, (offsets[0] + entry.start, *offsets[1:]) if offsets else ())


def _load_views(
    model: nn.Module,
    entries: Sequence[WeightEntry],
    found: Mapping[str, FileTensor],
    parameters: Mapping[str, torch.Tensor],
    stored: Mapping[str, Any],
) -> None:
    """This rank's parts of parameters that are made of several tensors, or of codes."""
    viewed = [entry for entry in entries if entry.view is not None]
    if not viewed:
        return
    with phase(_loading(stored), len(viewed), "tensors") as going:
        for entry in viewed:
            assert entry.view is not None
            holder = stored.get(entry.our_name)
            dtype = parameters[entry.our_name].dtype if holder is None else holder.dtype
            with Reader(found) as read:
                source = OpenView(entry.view, read.slice, dtype)
                if holder is not None:
                    holder.fill_weight(source.rows)
                else:
                    for local, offsets in own_parts(model, entry.our_name, parameters[entry.our_name]):
                        read_part(source, local, offsets)
            going.advance(1)


def _lacking(folder: Path, names: Collection[str]) -> CheckpointError:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return CheckpointError(
        f"{folder}: the recipe's model has no {min(names)}{more}, which config.json makes part of it; leave the "
        "model's own modules under their names, and add others next to them"
    )


def extras_to_read(model: nn.Module, folder: Path, found: dict[str, FileTensor]) -> list[str]:
    """The extra parameters of the model that the folder has, and the weight of a score head that an adapter has. Raises
    CheckpointError for those that only it has."""
    own = saved_whole(model)
    exported = {name: tensor for name, tensor in found.items() if tensor.extra}
    elsewhere = modules_elsewhere(model)
    strange = {name for name in exported.keys() - own.keys() if name.rpartition(".")[0] not in elsewhere}
    if strange:
        raise unknown_extras(folder, strange)
    shapes = {name: tuple(own[name].shape) for name in own.keys() & exported.keys()}
    fault = _shape_fault(folder, shapes, exported, "the recipe")
    if fault:
        raise CheckpointError(fault)
    return list(shapes)


def unknown_extras(folder: Path, names: Collection[str]) -> CheckpointError:
    """The fault of a folder with extra parameters that the model does not have."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return CheckpointError(
        f"{folder}: holds {min(names)}{more}, which a recipe added to the model and this one has not; use it with the "
        "recipe that adds it, or take the checkpoint that it was trained from"
    )


def _say_left_out(found: dict[str, FileTensor], spec: ModelSpec) -> None:
    """A line for tensors of a multimodal checkpoint's other parts, which the text model does not have."""
    left = {name: tensor.entry.end - tensor.entry.start for name, tensor in found.items() if is_other_part(spec, name)}
    if left:
        parts = sorted({part for name in left for part in OTHER_PARTS if part in name.split(".")}, reverse=True)
        get_logger().info(
            "model: %s of the checkpoint left out (%d tensors, %s): the text model alone is trained and exported",
            " and ".join(parts),
            len(left),
            format_bytes(sum(left.values())),
        )


def _check_finite(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """CheckpointError for numbers that are none: every later step would be NaN. Each rank looks at its own parts."""
    found = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    checks: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        if tensor.numel() and tensor.is_floating_point() and holds_values(tensor.device):
            parts = [torch.isfinite(part).all() for part in tensor.reshape(-1).split(_CHECKED)]
            checks[name] = torch.stack(parts).all()
    bad = [name for name, good in checks.items() if not good]
    if bad:
        more = f" and {len(bad) - 1} more hold" if len(bad) > 1 else " holds"
        raise CheckpointError(f"{folder}: {bad[0]}{more} NaN or infinite numbers; download the folder again")


def _row_reader(source: Any, offset: int) -> Callable[[int, int, slice], torch.Tensor]:
    """Reads rows, or columns of them, of a weight that begins at row `offset` of the file's tensor."""
    return lambda start, stop, columns: source[offset + start : offset + stop, columns]


def read_part(source: Any, local: torch.Tensor, offsets: tuple[int, ...]) -> None:
    """Copies the part of the file's tensor that begins at `offsets` into `local`, some rows at a time."""
    if not local.numel():
        return
    if not offsets:  # a number by itself
        local.copy_(source[...])
        return
    _read_along(0, source, local, offsets)


def _read_along(dim: int, source: Any, local: torch.Tensor, offsets: tuple[int, ...]) -> None:
    """As `read_part`, for one that is read in pieces along this dimension, or the next where those are too large."""
    count = local.shape[dim]
    row_bytes = local.numel() // count * 8  # no readable type is wider than 8 bytes
    rows = max(1, READ_BYTES // row_bytes)
    for start in range(0, count, rows):
        piece = local.narrow(dim, start, min(rows, count - start))
        places = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        if row_bytes > READ_BYTES and dim + 1 < local.dim():
            _read_along(dim + 1, source, piece, places)
        else:
            piece.copy_(source[tuple(slice(at, at + size) for at, size in zip(places, piece.shape, strict=True))])
