"""A checkpoint folder's weights: each rank reads its own slices of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_lib.checkpoint.converted import Reader, load_converted
from recipe_lib.checkpoint.tensor_files import FileTensor
from recipe_lib.checkpoint.weight_accounts import find_shape_fault, match_tensors, tell_left_out
from recipe_lib.errors import CheckpointError, raise_faults
from recipe_lib.models.language_model import LanguageModel, modules_elsewhere, own_parts
from recipe_lib.models.meta_init import init_weight, persistent_buffers, reset_extra, saved_whole, stored_weights
from recipe_lib.models.spec import SCORE, ModelSpec
from recipe_lib.models.weight_names import OpenView, WeightEntry, parameter_shapes
from recipe_lib.ops.device import holds_values
from recipe_lib.report.phases import phase
from recipe_lib.units import MIB, name_first

READ_BYTES = 256 * MIB  # the most that is copied to host memory at a time
_CHECKED = 2**24  # numbers that are looked at together


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
    entries, tensors = match_tensors(spec, folder, expected | shapes)
    entries = [entry for entry in entries if entry.our_name in shapes]  # others are of another rank's stages
    extras = extras_to_read(model, folder, tensors)
    reset_extra(model, seed, extras)
    entries += [WeightEntry(name, name) for name in extras]
    by_file: dict[Path, list[WeightEntry]] = {}
    for entry in entries:
        if entry.made is not None or entry.view is not None:
            continue  # see below
        by_file.setdefault(tensors[entry.file_name].file, []).append(entry)
    with phase(_loading(stored), sum(map(len, by_file.values())), "tensors") as going:
        for path, in_file in by_file.items():
            with safe_open(str(path), framework="pt") as file:
                for entry in in_file:
                    _load_entry(model, file.get_slice(entry.file_name), entry, parameters, stored)
                    going.advance(1)
    _load_views(model, entries, tensors, parameters, stored)
    load_converted(model, parameters, entries, tensors)
    tell_left_out(spec, folder, what="model", tensors=tensors)
    read = {entry.our_name for entry in entries} & parameters.keys()
    if SCORE in parameters.keys() - read:
        init_weight(model, SCORE, seed, spec)
    if isinstance(model, LanguageModel):
        model.loaded_extras |= frozenset(extras)
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
    tensors: Mapping[str, FileTensor],
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
            with Reader(tensors) as read:
                source = OpenView(entry.view, read.slice, dtype)
                if holder is not None:
                    holder.fill_weight(source.rows)
                else:
                    for local, offsets in own_parts(model, entry.our_name, parameters[entry.our_name]):
                        read_part(source, local, offsets)
            going.advance(1)


def _lacking(folder: Path, names: Collection[str]) -> CheckpointError:
    return CheckpointError(
        f"{folder}: the recipe's model has no {name_first(names)}, which config.json makes part of it; leave the "
        "model's own modules under their names, and add others next to them"
    )


def extras_to_read(model: nn.Module, folder: Path, tensors: dict[str, FileTensor]) -> list[str]:
    """Return the extra parameters of the model that the folder has, and the weight of a score head that an adapter has.

    Raises CheckpointError for those that only the folder has.
    """
    parameters = saved_whole(model)
    exported = {name: tensor for name, tensor in tensors.items() if tensor.extra}
    elsewhere = modules_elsewhere(model)
    strange = {name for name in exported.keys() - parameters.keys() if name.rpartition(".")[0] not in elsewhere}
    if strange:
        raise unknown_extras(folder, strange)
    shapes = {name: tuple(parameters[name].shape) for name in parameters.keys() & exported.keys()}
    raise_faults(CheckpointError, [find_shape_fault(folder, shapes, exported, by="the recipe")])
    return list(shapes)


def unknown_extras(folder: Path, names: Collection[str]) -> CheckpointError:
    """The fault of a folder with extra parameters that the model does not have."""
    return CheckpointError(
        f"{folder}: holds {name_first(names)}, which a recipe added to the model and this one has not; use it with the "
        "recipe that adds it, or take the checkpoint that it was trained from"
    )


def _check_finite(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """CheckpointError for numbers that are none: every later step would be NaN. Each rank looks at its own parts."""
    local_tensors = {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()
    }
    checks: dict[str, torch.Tensor] = {}
    for name, tensor in local_tensors.items():
        if tensor.numel() and tensor.is_floating_point() and holds_values(tensor.device):
            parts = [torch.isfinite(part).all() for part in tensor.reshape(-1).split(_CHECKED)]
            checks[name] = torch.stack(parts).all()
    bad = [name for name, good in checks.items() if not good]
    if bad:
        named = name_first(bad, "holds", "hold")
        raise CheckpointError(
            f"{folder}: {named} NaN or infinite numbers; take an earlier state of its training, or download it again"
        )


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
