"""Find Hugging Face model folders, and load their weights into a model.

Runs and commands call `find_checkpoint` with a path or hub id (nothing is downloaded here), and
`load_weights` to fill a model; `check_weights`, `check_room` and `export_model` are re-exported for
them. `compute_base_fingerprint` tells one base of adapters from another. An extra parameter is one
that a recipe added to the model. A spec holds a model's sizes and kinds.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_lib.checkpoint.model_export import check_room, export_model
from recipe_lib.checkpoint.safetensors_files import FileTensor, Reader, have_same_numbers
from recipe_lib.checkpoint.tensor_matching import (
    check_weights,
    find_shape_fault,
    get_converted,
    log_left_out,
    match_tensors,
    read_headers,
)
from recipe_lib.config.local_files import (
    MODEL_FILES,
    NEVER_DOWNLOADED,
    describe_missing_model,
    find_model_folder,
)
from recipe_lib.config.paths import list_presets
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError, raise_faults
from recipe_lib.models.language_model import (
    LanguageModel,
    get_modules_elsewhere,
    get_tensor_names,
    list_local_parts,
)
from recipe_lib.models.meta_init import (
    find_fully_saved_tensors,
    find_stored_weights,
    get_slices,
    init_weight,
    list_persistent_buffers,
    reset_extra,
)
from recipe_lib.models.spec import SCORE, DecoderSpec, FileConversion, ModelSpec
from recipe_lib.models.weight_names import WeightEntry, build_weight_map, compute_parameter_shapes
from recipe_lib.ops.device import holds_values
from recipe_lib.report.phases import phase
from recipe_lib.units import MIB, name_first

__all__ = [
    "check_room",
    "check_weights",
    "export_model",
    "find_adapter_base",
    "find_checkpoint",
    "load_weights",
]


def find_checkpoint(path_or_hub_id: str | Path) -> Path:
    """Return the folder of a checkpoint: a path, or a hub id that is in the local hub cache.

    Nothing is downloaded. Raises CheckpointError if there is no such folder.
    """
    folder = find_model_folder(path_or_hub_id)
    if folder is not None:
        return folder
    name = str(path_or_hub_id)
    try:
        # The patterns of a download, so that a snapshot counts as whole without the other files.
        return Path(
            snapshot_download(
                name,
                allow_patterns=MODEL_FILES,
                ignore_patterns=NEVER_DOWNLOADED,
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        raise CheckpointError(describe_missing_model(name)) from error


def find_adapter_base(folder: str | Path, name: str, *, is_preset: bool = False) -> Path:
    """Return the folder of the base that the adapter in `folder` names.

    name: of the base: a hub id, or a path, perhaps one of another machine. is_preset: the base is
    known to be an architecture with random weights; False: its name tells, if no such folder is
    there. Raises CheckpointError if the base is not found, or had random weights.
    """
    try:
        if not is_preset:
            return find_checkpoint(name)
    except CheckpointError as error:
        # The name of a preset or of a config.json: both stand for random weights.
        if name not in list_presets() and not name.endswith(".json"):
            raise CheckpointError(
                f"{show(str(folder))}: its base is {error}, or say where it is with --base"
            ) from error
    raise CheckpointError(
        f"{show(str(folder))}: was trained with random weights (model.preset={name}), which are in"
        " no checkpoint; start from model.path to have an adapter that others can load"
    )


READERS = 4  # threads that read
READ_BYTES = 256 * MIB // READERS  # the most that one of them copies to host memory at a time


@torch.no_grad()
def load_weights(model: nn.Module, spec: ModelSpec, folder: Path, seed: int = 0) -> None:
    """Fill the model's parameters in place; each rank reads its own slices and nothing else.

    In a pipeline a rank reads the weights of its stages, and checks the tensors of all stages.
    At most READERS * READ_BYTES are in host memory at a time, and as much again while it is cast.
    Weights that the model keeps quantized are quantized while they are read, from the rows that
    hold a rank's blocks; no rank has a whole one. Extra parameters are read if the folder was
    exported with them, else they start from `reset_parameters` and the seed.

    model: materialized, plain or sharded (DTensor) in any dimension, on any device; values are cast
    to the parameter's type. folder: of a Hugging Face model.

    Raises CheckpointError as `check_weights` does, for weights that are not finite, and where model
    or folder has parameters that the other lacks; SetupError as `reset_extra` does.
    """
    names = get_tensor_names(model)
    parameters: dict[str, torch.Tensor] = {
        **{names.get(name, name): parameter for name, parameter in model.named_parameters()},
        **list_persistent_buffers(model),
    }
    stored = {names.get(name, name): module for name, module in find_stored_weights(model).items()}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    # A quantized linear has no parameter of the weight's name and shape: its codes are packed.
    shapes |= {name: (module.out_features, module.in_features) for name, module in stored.items()}
    expected_shapes = compute_parameter_shapes(spec)
    # Experts' matrices are quantized as one matrix, and lie apart in the file.
    class_experts = names.values() & stored.keys()
    shapes |= {name: expected_shapes[name] for name in class_experts}
    missing_names = expected_shapes.keys() - shapes.keys()
    # In a pipeline the missing ones are those of other ranks' stages.
    if missing_names and not get_modules_elsewhere(model):
        raise CheckpointError(
            f"{folder}: the recipe's model has no {name_first(missing_names)}, which config.json"
            " makes part of it; leave the model's own modules under their names, and add others"
            " next to them"
        )
    # All stages' shapes are compared, so that each rank of a pipeline refuses the same folder.
    entries, tensors = match_tensors(spec, folder, expected_shapes | shapes)
    entries = [entry for entry in entries if entry.our_name in shapes]
    extras = find_extras_to_read(model, folder, tensors)
    reset_extra(model, seed, extras)
    entries += [WeightEntry(name, name) for name in extras]
    # By file, so that no more than one stays open: a large checkpoint has hundreds of them.
    entries_by_file: dict[Path, list[WeightEntry]] = {}
    for entry in entries:
        if entry.made is None:
            entries_by_file.setdefault(tensors[entry.file_name].file, []).append(entry)
    title = "loading and quantizing weights" if stored else "loading weights"
    with phase(title, sum(map(len, entries_by_file.values())), "tensors") as progress:
        for file_entries in entries_by_file.values():
            # A parameter that is made of several tensors may open other files too.
            plain = [entry for entry in file_entries if entry.our_name not in stored]
            quantized = [entry for entry in file_entries if entry.our_name in stored]
            with Reader(tensors) as reader, ThreadPoolExecutor(READERS) as pool:
                read_plain = partial(_read_plain, model, reader, parameters)
                # One at a time: what quantizing takes on the device is planned for one.
                read_quantized = partial(_read_quantized, reader, stored, class_experts)
                for _ in chain(pool.map(read_plain, plain), map(read_quantized, quantized)):
                    progress.advance(1)
    _load_converted(model, parameters, entries=entries, tensors=tensors, stored=stored)
    log_left_out(spec, folder, topic="model", tensors=tensors)
    loaded = {entry.our_name for entry in entries} & parameters.keys()
    if SCORE in parameters.keys() - loaded:
        init_weight(model, name=SCORE, seed=seed, spec=spec)
    if isinstance(model, LanguageModel):
        model.loaded_extras |= frozenset(extras)
    check_finite(((name, parameters[name]) for name in sorted(loaded)), folder)


@torch.no_grad()  # which each thread has for itself
def _read_plain(
    model: nn.Module, reader: Reader, parameters: Mapping[str, torch.Tensor], entry: WeightEntry
) -> None:
    """Read this rank's part of one parameter.

    The parameter is a tensor of a file, or made of several, or decoded from codes.

    parameters: of the model, by our names.
    """
    parameter = parameters[entry.our_name]
    source = reader.open_entry(entry, parameter.dtype)
    for local, offsets in list_local_parts(model, entry.our_name, parameter):
        # The rows of a fused matrix (Phi 3's qkv) that are this parameter's begin at entry.start.
        starts = (offsets[0] + entry.start, *offsets[1:]) if offsets else ()
        if entry.view is not None or not reader.fill(entry.file_name, local, starts):
            read_part(source, local, starts)


def _read_quantized(
    reader: Reader, stored: Mapping[str, Any], class_experts: Collection[str], entry: WeightEntry
) -> None:
    """Read this rank's part of a weight, and quantize it.

    stored: name of a weight -> the module that keeps it quantized. class_experts: names of those
    weights that are experts of another library's class.
    """
    module = stored[entry.our_name]
    source = reader.open_entry(entry, module.dtype)
    read_rows = _make_row_reader(source, entry.start) if entry.view is None else source.rows
    if entry.our_name in class_experts:
        read_rows = _ExpertRows(lambda expert: source[expert : expert + 1][0], module)
    module.fill_weight(read_rows)


@torch.no_grad()
def _load_converted(
    model: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    *,
    entries: Sequence[WeightEntry],
    tensors: Mapping[str, FileTensor],
    stored: Mapping[str, Any],
) -> None:
    """Fill the parameters that are converted from other tensors, in place.

    Each rank reads only the experts it has. In host memory are at a time the tensors of one
    conversion, or of one expert, and their result.

    parameters: of the model, by our names. tensors: of the files, by their names there. stored: as
    for `_read_quantized`.
    """
    with Reader(tensors) as reader:
        expert_names = set(get_tensor_names(model).values()) & stored.keys()
        for conversion, all_names in _group_by_conversion(entries):
            names = [name for name in all_names if name not in expert_names]
            for name in expert_names.intersection(all_names):
                read_expert = _make_expert_reader(conversion, name, reader)
                stored[name].fill_weight(_ExpertRows(read_expert, stored[name]))
            quantized_names = [name for name in names if name in stored]
            local_parts = {
                name: list_local_parts(model, name, parameters[name])
                for name in names
                if name not in stored
            }
            all_parts = list(chain.from_iterable(local_parts.values()))
            for start, stop, input_names in conversion.pieces():
                is_needed = any(_has_rows_in(part, start, stop) for part in all_parts)
                if not (quantized_names or is_needed):
                    continue
                converted = conversion.convert(reader.read, input_names)
                for name in names:
                    value = get_converted(converted, name)
                    if name in stored:
                        stored[name].fill_weight(_make_row_reader(value, 0))
                        continue
                    for local, offset in local_parts[name]:
                        _copy_overlap(local, offset, value=value, start=start)


class _ExpertRows:
    """Rows of the matrices of experts as one matrix `[E o, i]`, read one expert at a time.

    It is called as `fill_weight` calls its argument.
    """

    def __init__(self, read_expert: Callable[[int], torch.Tensor], module: Any) -> None:
        """Read by `read_expert(index)`, which returns a matrix as the file has it.

        module: the `QuantizedExperts` that are filled.
        """
        self._read_expert = read_expert
        self._module = module
        self._expert = -1  # the one that was read last: rows are asked for in order
        self._matrix = torch.empty(0)

    def __call__(self, start: int, stop: int, columns: slice) -> torch.Tensor:
        height = self._module.expert_rows
        pieces = []
        while start < stop:
            expert, first = divmod(start, height)
            if expert != self._expert:
                self._matrix = torch.empty(0)  # gone before the next one is read
                matrix = self._read_expert(expert)
                self._matrix = matrix.t() if self._module.transposed else matrix
                self._expert = expert
            last = min(first + stop - start, height)
            pieces.append(self._matrix[first:last, columns])
            start += last - first
        return torch.cat(pieces)


def _make_expert_reader(
    conversion: FileConversion, name: str, reader: Reader
) -> Callable[[int], torch.Tensor]:
    """Return a function of an expert's index that makes its matrix of tensors of the files.

    name: of the parameter with the matrices of all experts.
    """
    pieces = list(conversion.pieces())
    if pieces[0][1] is None:  # the conversion makes all experts at once
        matrices = get_converted(conversion.convert(reader.read, pieces[0][2]), name)
        return lambda expert: matrices[expert]
    return lambda expert: get_converted(conversion.convert(reader.read, pieces[expert][2]), name)[0]


def _group_by_conversion(entries: Sequence[WeightEntry]) -> list[tuple[FileConversion, list[str]]]:
    # By identity: conversions are plain objects without a hash of their contents.
    groups: dict[int, tuple[FileConversion, list[str]]] = {}
    for entry in entries:
        if entry.made is not None:
            groups.setdefault(id(entry.made), (entry.made, []))[1].append(entry.our_name)
    return list(groups.values())


def _has_rows_in(part: tuple[torch.Tensor, tuple[int, ...]], start: int, stop: int | None) -> bool:
    """Return True if a rank's part of a parameter has any of the rows `[start, stop)`.

    part: (tensor, where it begins in the parameter by dimension). stop: None: up to the last row.
    """
    local, offset = part
    return bool(local.numel()) and (
        stop is None or not offset or (offset[0] < stop and start < offset[0] + local.shape[0])
    )


def _copy_overlap(
    local: torch.Tensor, offset: tuple[int, ...], *, value: torch.Tensor, start: int
) -> None:
    """Copy what a rank's part and the rows `value` of the parameter have in common.

    local: this rank's part. offset: where it begins in the parameter, by dimension. start: number
    of the first row of `value`.
    """
    if not offset:  # a number by itself has no rows
        read_part(value, local, offset)
        return
    first_row = max(offset[0], start)
    end_row = min(offset[0] + local.shape[0], start + value.shape[0])
    if first_row < end_row:
        common = local[first_row - offset[0] : end_row - offset[0]]
        read_part(value, common, (first_row - start, *offset[1:]))


def find_extras_to_read(
    model: nn.Module, folder: Path, tensors: dict[str, FileTensor]
) -> list[str]:
    """Return the names of the model's extra parameters that the folder has.

    The weight of an adapter's score head is one of them. Raises CheckpointError for extra
    parameters that only the folder has, or has in another shape.

    folder: named in errors. tensors: of its files, by their names there.
    """
    parameters = find_fully_saved_tensors(model)
    exported = {name: tensor for name, tensor in tensors.items() if tensor.extra}
    elsewhere = get_modules_elsewhere(model)
    unknown_names = {
        name
        for name in exported.keys() - parameters.keys()
        if name.rpartition(".")[0] not in elsewhere  # another stage of the pipeline has it
    }
    if unknown_names:
        raise make_unknown_extras_error(folder, unknown_names)
    shapes = {name: tuple(parameters[name].shape) for name in parameters.keys() & exported.keys()}
    raise_faults(CheckpointError, [find_shape_fault(folder, shapes, exported, by="the recipe")])
    return list(shapes)


def make_unknown_extras_error(folder: Path, names: Collection[str]) -> CheckpointError:
    """Return the error for a folder with extra parameters that the model does not have."""
    return CheckpointError(
        f"{folder}: holds {name_first(names)}, which a recipe added to the model and this one has"
        " not; use it with the recipe that adds it, or take the checkpoint that it was trained"
        " from"
    )


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], where: Path) -> None:
    """Raise CheckpointError for NaN or infinite numbers: every later step would be NaN.

    Each rank looks at its own parts.

    tensors: (name, tensor), taken one at a time. where: the file or folder that has them.
    """
    is_finite: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() and local.is_floating_point() and holds_values(local.device):
            # The least and the largest number are NaN if one is. One pass without a mask: isfinite
            # takes 30 times as long on a CPU.
            is_finite[name] = torch.stack(local.aminmax()).isfinite().all()
    # Only now, since each answer that is read waits for the device.
    bad_names = [name for name, good in is_finite.items() if not good]
    if bad_names:
        raise CheckpointError(
            f"{where}: {name_first(bad_names, 'holds', 'hold')} NaN or infinite numbers; take an"
            " earlier state of its training, or download it again"
        )


def _make_row_reader(source: Any, offset: int) -> Callable[[int, int, slice], torch.Tensor]:
    """Return a function of (start, stop, columns) that reads rows of a weight, or parts of them.

    source: slices of the opened tensor. offset: its row at which the weight begins.
    """
    return lambda start, stop, columns: source[offset + start : offset + stop, columns]


def read_part(source: Any, local: torch.Tensor, offsets: tuple[int, ...]) -> None:
    """Copy the part of a file's tensor that begins at `offsets` into `local`, some rows at a time.

    source: slices of the opened tensor, or a tensor. offsets: one per dimension of `local`.
    """
    if not local.numel():
        return
    if not offsets:  # a number by itself
        local.copy_(source[...])
        return
    _read_along(0, source, local=local, offsets=offsets)


def _read_along(dim: int, source: Any, *, local: torch.Tensor, offsets: tuple[int, ...]) -> None:
    """Copy as `read_part` does, in pieces along dimension `dim`.

    A single row that has more than READ_BYTES is cut along the next dimension.
    """
    num_rows = local.shape[dim]
    row_bytes = local.numel() // num_rows * 8  # no readable type is wider than 8 bytes
    rows_at_once = max(1, READ_BYTES // row_bytes)
    for start in range(0, num_rows, rows_at_once):
        piece = local.narrow(dim, start, min(rows_at_once, num_rows - start))
        starts = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        if row_bytes > READ_BYTES and dim + 1 < local.dim():
            _read_along(dim + 1, source, local=piece, offsets=starts)
        else:
            piece.copy_(source[get_slices(starts, piece.shape)])


_SAMPLE_COLUMNS = 64  # numbers of a row that a base's fingerprint takes


def compute_base_fingerprint(spec: ModelSpec, folder: Path) -> str:
    """Return a hash of 64 numbers of every weight's middle row, rounded to bf16.

    It is the same for the same weights in files of other types, sizes or layouts.
    """
    digest = hashlib.sha256()
    tensors = read_headers(folder)
    # A score head is trained along with the adapter: it is no mark of the base.
    entries = [entry for entry in build_weight_map(spec, tensors) if entry.our_name != SCORE]
    with Reader(tensors) as reader:
        for entry in sorted(entries, key=lambda entry: entry.our_name):
            sample = _read_middle(reader, entry).flatten()[:_SAMPLE_COLUMNS].to(torch.bfloat16)
            digest.update(f"{entry.our_name} ".encode())
            digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read_middle(reader: Reader, entry: WeightEntry) -> torch.Tensor:
    """Return the row in the middle of a parameter; of stacked experts, one of the middle expert."""
    if entry.made is not None:
        pieces = list(entry.made.pieces())
        input_names = pieces[len(pieces) // 2][2]
        rows = get_converted(entry.made.convert(reader.read, input_names), entry.our_name)
        return rows[len(rows) // 2 :][:1]
    source = reader.open_entry(entry, torch.bfloat16)
    shape = source.get_shape() if entry.view is None else entry.view.shape
    if not shape:
        return source[...]
    middle = entry.start + (entry.length or shape[0]) // 2
    rows = slice(middle, middle + 1)
    if entry.view is None:
        return source[rows]
    # Of stacked experts `[E, o, i]` one row of the middle expert.
    return source[(rows, *(slice(0, 1) for _ in shape[2:]))]


def check_copies(path: Path, copies: Mapping[str, str], spec: ModelSpec, base: Path) -> None:
    """Raise CheckpointError if frozen weights in an adapter's file differ from the base's.

    PEFT saves frozen weights with an adapted embedding or head.

    path: the adapter's file. copies: our parameter -> the tensor's name in that file. base: folder
    of the base.
    """
    if not copies:
        return
    tensors = read_headers(base)
    entries = {entry.our_name: entry for entry in build_weight_map(spec, tensors)}
    for name, copy in copies.items():
        # The files of a tied model have the embedding alone.
        entry = entries.get(name) or entries["model.embed_tokens.weight"]
        with safe_open(str(path), framework="pt") as file, Reader(tensors) as reader:
            rows = file.get_slice(copy)
            is_same = have_same_numbers(rows, reader.open_entry(entry, rows[:1].dtype))
        if not is_same:
            raise CheckpointError(
                f"{path}: {copy} differs from {entry.file_name} of {base}: the adapter was trained"
                " on other weights (a resized or trained embedding); use its own base model"
            )


SAMPLE = 512  # rows of an embedding whose median norm is taken for the usual one
TINY = 1e-2  # a row of a hundredth of the usual length was left as it was initialized, or is zero


def find_untrained_embeddings(
    spec: DecoderSpec, folder: Path, tokens: Collection[int], special: Collection[int]
) -> list[int]:
    """Return the ids among `tokens` whose row of the embedding was never trained.

    Vocabularies are padded with rows that no text ever reached: they are zeros, tiny, or copies of
    one vector. So a row counts as untrained if it is next to zero, or the very same as that of
    another of `tokens` and `special`.

    folder: of the model. special: ids of all special tokens. Raises CheckpointError if the folder's
    files cannot be read.
    """
    headers = read_headers(folder)
    entry = next(
        entry
        for entry in build_weight_map(spec, headers)
        if entry.our_name == "model.embed_tokens.weight"
    )
    num_rows = headers[entry.file_name].entry.shape[0]
    with Reader(headers) as reader:
        embedding = reader.open_entry(entry, torch.float32)
        sample = np.unique(np.linspace(0, num_rows - 1, min(SAMPLE, num_rows)).astype(int))
        sample_rows = [embedding[index : index + 1].float().flatten() for index in sample.tolist()]
        usual_norm = torch.stack(sample_rows).norm(dim=1).median()
        rows = {
            token: embedding[token : token + 1].float().flatten()
            for token in {*tokens, *special}
            if token < num_rows
        }
    row_counts = Counter(row.numpy().tobytes() for row in rows.values())
    untrained = {
        token
        for token, row in rows.items()
        if row.norm() < TINY * usual_norm or row_counts[row.numpy().tobytes()] > 1
    }
    return sorted(token for token in tokens if token in untrained)
