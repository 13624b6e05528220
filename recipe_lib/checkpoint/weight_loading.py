"""A checkpoint folder's weights: each rank reads its own slices of them."""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_lib.checkpoint.safetensors_files import FileTensor, Reader, have_same_numbers
from recipe_lib.checkpoint.tensor_matching import (
    find_shape_fault,
    get_converted,
    log_left_out,
    match_tensors,
    read_headers,
)
from recipe_lib.errors import CheckpointError, raise_faults
from recipe_lib.models.language_model import LanguageModel, get_modules_elsewhere, list_local_parts
from recipe_lib.models.meta_init import (
    find_fully_saved_tensors,
    find_stored_weights,
    init_weight,
    list_persistent_buffers,
    reset_extra,
)
from recipe_lib.models.spec import SCORE, DecoderSpec, FileConversion, ModelSpec
from recipe_lib.models.weight_names import WeightEntry, build_weight_map, compute_parameter_shapes
from recipe_lib.ops.device import holds_values
from recipe_lib.report.phases import phase
from recipe_lib.units import MIB, name_first

READ_BYTES = 256 * MIB  # the most that is copied to host memory at a time
_CHECKED = 2**24  # numbers that are looked at together


@torch.no_grad()
def load_weights(model: nn.Module, spec: ModelSpec, folder: Path, seed: int = 0) -> None:
    """Fills the model's parameters in place; each rank reads its own slices and nothing else.

    In a pipeline it reads what its stages have, and yet finds what is wrong with the tensors of all
    stages. model: materialized, plain or sharded (DTensor) in any dimension, on any device; values
    are cast to the parameter's type. Weights that are quantized are so while they are read, from
    the rows that hold a rank's blocks; no rank has a whole one. At most READ_BYTES are in host
    memory at a time, and as much again while it is cast. Extra parameters, which the recipe added,
    are read if the folder was exported with them, else they start from `reset_parameters` and the
    seed. Raises CheckpointError as `check_weights` does, for weights that are not finite, and for a
    model and a folder of which one has parameters that the other lacks; SetupError as `reset_extra`
    does.
    """
    parameters: dict[str, torch.Tensor] = {
        **dict(model.named_parameters()),
        **list_persistent_buffers(model),
    }
    stored = find_stored_weights(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    shapes |= {name: (module.out_features, module.in_features) for name, module in stored.items()}
    elsewhere = get_modules_elsewhere(model)
    expected = compute_parameter_shapes(spec)
    lost = expected.keys() - shapes.keys()
    if lost and not elsewhere:
        raise CheckpointError(
            f"{folder}: the recipe's model has no {name_first(lost)}, which config.json makes part"
            " of it; leave the model's own modules under their names, and add others next to them"
        )
    entries, tensors = match_tensors(spec, folder, expected | shapes)
    entries = [
        entry for entry in entries if entry.our_name in shapes
    ]  # others are of another rank's stages
    extras = find_extras_to_read(model, folder, tensors)
    reset_extra(model, seed, extras)
    entries += [WeightEntry(name, name) for name in extras]
    by_file: dict[Path, list[WeightEntry]] = {}
    for entry in entries:
        if entry.made is None:
            by_file.setdefault(tensors[entry.file_name].file, []).append(entry)
    what = "loading and quantizing weights" if stored else "loading weights"
    with phase(what, sum(map(len, by_file.values())), "tensors") as going:
        for in_file in by_file.values():
            with Reader(
                tensors
            ) as read:  # a parameter that is made of several tensors may open other files too
                for entry in in_file:
                    _load_entry(model, read, entry, parameters, stored)
                    going.advance(1)
    _load_converted(model, parameters, entries, tensors)
    log_left_out(spec, folder, what="model", tensors=tensors)
    loaded = {entry.our_name for entry in entries} & parameters.keys()
    if SCORE in parameters.keys() - loaded:
        init_weight(model, SCORE, seed, spec)
    if isinstance(model, LanguageModel):
        model.loaded_extras |= frozenset(extras)
    check_finite(((name, parameters[name]) for name in sorted(loaded)), folder)


def _load_entry(
    model: nn.Module,
    read: Reader,
    entry: WeightEntry,
    parameters: Mapping[str, torch.Tensor],
    stored: Mapping[str, Any],
) -> None:
    """Read this rank's part of a parameter that is a tensor of a file, or made of several, or of
    codes.
    """
    holder = stored.get(entry.our_name)
    if holder is not None:
        source = read.open_entry(entry, holder.dtype)
        holder.fill_weight(
            _make_row_reader(source, entry.start) if entry.view is None else source.rows
        )
        return
    parameter = parameters[entry.our_name]
    source = read.open_entry(entry, parameter.dtype)
    for local, offsets in list_local_parts(model, entry.our_name, parameter):
        read_part(source, local, (offsets[0] + entry.start, *offsets[1:]) if offsets else ())


@torch.no_grad()
def _load_converted(
    model: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    entries: Sequence[WeightEntry],
    tensors: Mapping[str, FileTensor],
) -> None:
    """Fill those parameters that are made of other tensors, in place; of experts each rank reads
    those it has.

    As much as all tensors of one conversion, or those of one expert, are in host memory at a time,
    and what they make.
    """
    stored = find_stored_weights(model)
    with Reader(tensors) as read:
        for conversion, names in _group_by_conversion(entries):
            quantized = [name for name in names if name in stored]
            places = {
                name: list_local_parts(model, name, parameters[name])
                for name in names
                if name not in stored
            }
            for start, stop, taken in conversion.pieces():
                if not quantized and not any(
                    _has_rows_in(part, start, stop) for parts in places.values() for part in parts
                ):
                    continue
                made = conversion.convert(read, taken)
                for name in names:
                    value = get_converted(made, name)
                    if name in stored:
                        stored[name].fill_weight(_make_row_reader(value, 0))
                    else:
                        for local, offset in places[name]:
                            _copy_overlap(local, offset, value, start)


def _group_by_conversion(entries: Sequence[WeightEntry]) -> list[tuple[FileConversion, list[str]]]:
    """Each conversion with the parameters that it makes."""
    found: dict[int, tuple[FileConversion, list[str]]] = {}
    for entry in entries:
        if entry.made is not None:
            found.setdefault(id(entry.made), (entry.made, []))[1].append(entry.our_name)
    return list(found.values())


def _has_rows_in(part: tuple[torch.Tensor, tuple[int, ...]], start: int, stop: int | None) -> bool:
    """Whether a rank's part of a parameter has any of its rows from `start` to `stop`."""
    local, offset = part
    if not local.numel():
        return False
    return stop is None or not offset or (offset[0] < stop and start < offset[0] + local.shape[0])


def _copy_overlap(
    local: torch.Tensor, offset: tuple[int, ...], value: torch.Tensor, start: int
) -> None:
    """Copies what a part and the rows from `start` on have in common."""
    if not local.numel():
        return
    if not offset:
        local.copy_(value)
        return
    first, last = max(offset[0], start), min(offset[0] + local.shape[0], start + value.shape[0])
    if first < last:
        columns = tuple(
            slice(at, at + size) for at, size in zip(offset[1:], local.shape[1:], strict=True)
        )
        local[first - offset[0] : last - offset[0]].copy_(
            value[(slice(first - start, last - start), *columns)]
        )


def find_extras_to_read(
    model: nn.Module, folder: Path, tensors: dict[str, FileTensor]
) -> list[str]:
    """Return the extra parameters of the model that the folder has, and the weight of a score head
    that an adapter has.

    Raises CheckpointError for those that only the folder has.
    """
    parameters = find_fully_saved_tensors(model)
    exported = {name: tensor for name, tensor in tensors.items() if tensor.extra}
    elsewhere = get_modules_elsewhere(model)
    strange = {
        name
        for name in exported.keys() - parameters.keys()
        if name.rpartition(".")[0] not in elsewhere
    }
    if strange:
        raise make_unknown_extras_error(folder, strange)
    shapes = {name: tuple(parameters[name].shape) for name in parameters.keys() & exported.keys()}
    raise_faults(CheckpointError, [find_shape_fault(folder, shapes, exported, by="the recipe")])
    return list(shapes)


def make_unknown_extras_error(folder: Path, names: Collection[str]) -> CheckpointError:
    """The fault of a folder with extra parameters that the model does not have."""
    return CheckpointError(
        f"{folder}: holds {name_first(names)}, which a recipe added to the model and this one has"
        " not; use it with the recipe that adds it, or take the checkpoint that it was trained"
        " from"
    )


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], where: Path) -> None:
    """Raise CheckpointError for numbers that are none: every later step would be NaN. Each rank
    looks at its own parts.

    tensors: by name, one after the other. where: the file or folder that has them.
    """
    checks: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() and local.is_floating_point() and holds_values(local.device):
            parts = [torch.isfinite(part).all() for part in local.reshape(-1).split(_CHECKED)]
            checks[name] = torch.stack(parts).all()
    bad = [name for name, good in checks.items() if not good]
    if bad:
        named = name_first(bad, "holds", "hold")
        raise CheckpointError(
            f"{where}: {named} NaN or infinite numbers; take an earlier state of its training, or"
            " download it again"
        )


def _make_row_reader(source: Any, offset: int) -> Callable[[int, int, slice], torch.Tensor]:
    """Reads rows, or columns of them, of a weight that begins at row `offset` of the file's
    tensor.
    """
    return lambda start, stop, columns: source[offset + start : offset + stop, columns]


def read_part(source: Any, local: torch.Tensor, offsets: tuple[int, ...]) -> None:
    """Copies the part of the file's tensor that begins at `offsets` into `local`, some rows at a
    time.
    """
    if not local.numel():
        return
    if not offsets:  # a number by itself
        local.copy_(source[...])
        return
    _read_along(0, source, local, offsets)


def _read_along(dim: int, source: Any, local: torch.Tensor, offsets: tuple[int, ...]) -> None:
    """As `read_part`, for one that is read in pieces along this dimension, or the next where those
    are too large.
    """
    count = local.shape[dim]
    row_bytes = local.numel() // count * 8  # no readable type is wider than 8 bytes
    rows = max(1, READ_BYTES // row_bytes)
    for start in range(0, count, rows):
        piece = local.narrow(dim, start, min(rows, count - start))
        places = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        if row_bytes > READ_BYTES and dim + 1 < local.dim():
            _read_along(dim + 1, source, piece, places)
        else:
            piece.copy_(
                source[
                    tuple(
                        slice(at, at + size) for at, size in zip(places, piece.shape, strict=True)
                    )
                ]
            )


# Which base an adapter belongs to: a mark of the weights that does not depend on how files store
# them.


_SAMPLE_COLUMNS = 64


def compute_base_fingerprint(spec: ModelSpec, folder: Path) -> str:
    """A hash of some numbers of every weight, rounded to bf16: the same for files of other types,
    sizes or layouts.
    """
    digest = hashlib.sha256()
    tensors = read_headers(folder)
    entries = [
        entry for entry in build_weight_map(spec, tensors) if entry.our_name != SCORE
    ]  # it is trained
    with Reader(tensors) as read:
        for entry in sorted(entries, key=lambda entry: entry.our_name):
            digest.update(_format_sample(entry.our_name, _read_middle(read, entry)))
    return digest.hexdigest()


def _read_middle(read: Reader, entry: WeightEntry) -> torch.Tensor:
    """Return the row in the middle of a parameter, of experts in the middle one."""
    if entry.made is not None:
        pieces = list(entry.made.pieces())
        rows = get_converted(entry.made.convert(read, pieces[len(pieces) // 2][2]), entry.our_name)
        return rows[len(rows) // 2 :][:1]
    source = read.open_entry(entry, torch.bfloat16)
    shape = source.get_shape() if entry.view is None else entry.view.shape
    if not shape:
        return source[...]
    middle = entry.start + (entry.length or shape[0]) // 2
    rows = slice(middle, middle + 1)
    return source[rows] if entry.view is None else source[(rows, *(slice(0, 1) for _ in shape[2:]))]


def _format_sample(name: str, rows: torch.Tensor) -> bytes:
    """A parameter's name, and the first numbers of some of its rows."""
    sample = rows.flatten()[:_SAMPLE_COLUMNS].to(torch.bfloat16)
    return f"{name} ".encode() + sample.contiguous().view(torch.uint8).numpy().tobytes()


def check_copies(path: Path, copies: Mapping[str, str], spec: ModelSpec, base: Path) -> None:
    """Compares the frozen weights that an adapter's file holds with the base's own. Raises
    CheckpointError.

    PEFT saves them with an adapted embedding or head. copies: our parameter -> the tensor's name in
    the file.
    """
    if not copies:
        return
    found = read_headers(base)
    places = {entry.our_name: entry for entry in build_weight_map(spec, found)}
    for name, copy in copies.items():
        entry = places.get(name) or places["model.embed_tokens.weight"]  # a tied head
        with safe_open(str(path), framework="pt") as file, Reader(found) as read:
            rows = file.get_slice(copy)
            alike = have_same_numbers(rows, read.open_entry(entry, rows[:1].dtype))
        if not alike:
            raise CheckpointError(
                f"{path}: {copy} differs from {entry.file_name} of {base}: the adapter was trained"
                " on other weights (a resized or trained embedding); use its own base model"
            )


# Which rows of a checkpoint's embedding were never trained: read from the file, a few rows at a
# time.


SAMPLE = 512  # rows that say what is usual
TINY = 1e-2  # a row of a hundredth of the usual length was left as it was initialized, or is zero


def find_untrained_embeddings(
    spec: DecoderSpec, folder: Path, tokens: Collection[int], special: Collection[int]
) -> list[int]:
    """The ids among `tokens` whose embedding is next to zero, or the very same as that of another
    special token.

    Vocabularies are padded with rows that no text ever reached: they are zeros, tiny, or copies of
    one vector. special: ids of all special tokens. Raises CheckpointError.
    """
    headers = read_headers(folder)
    entry = next(
        entry
        for entry in build_weight_map(spec, headers)
        if entry.our_name == "model.embed_tokens.weight"
    )
    with Reader(headers) as read:
        rows, size = read.open_entry(entry, torch.float32), headers[entry.file_name].entry.shape[0]
        sample = np.unique(np.linspace(0, size - 1, min(SAMPLE, size)).astype(int)).tolist()
        usual = (
            torch.stack([rows[at : at + 1].float().flatten() for at in sample]).norm(dim=1).median()
        )
        own = {
            token: rows[token : token + 1].float().flatten()
            for token in {*tokens, *special}
            if token < size
        }
    same = Counter(row.numpy().tobytes() for row in own.values())
    return sorted(
        token
        for token in tokens
        if token in own
        and (own[token].norm() < TINY * usual or same[own[token].numpy().tobytes()] > 1)
    )
