"""A trained model as a Hugging Face folder, written tensor by tensor."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_lib import files
from recipe_lib.checkpoint.model_card import CARD
from recipe_lib.checkpoint.model_folders import INDEX, SINGLE
from recipe_lib.checkpoint.rank_groups import (
    Holders,
    RankGroup,
    find_holders,
    run_on_rank_0,
    write_gathered,
)
from recipe_lib.checkpoint.run_files import publish
from recipe_lib.checkpoint.safetensors_files import DTYPE_NAMES, DTYPES, PlannedTensor
from recipe_lib.checkpoint.tensor_matching import EXTRA, compute_file_shapes
from recipe_lib.checkpoint.tokenizer_export import copy_tokenizer, list_tokenizer_files
from recipe_lib.config.schema import CheckpointConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.models.families import (
    FAMILIES,
    get_score_architecture,
    get_text_config,
    has_score_head,
    spell_native,
)
from recipe_lib.models.language_model import get_runs, restore_file_order
from recipe_lib.models.meta_init import list_persistent_buffers
from recipe_lib.models.spec import Conversion, ExternalSpec, ModelSpec
from recipe_lib.models.weight_names import build_weight_map, build_written_layout
from recipe_lib.ops.dtensor_shards import gather_full
from recipe_lib.units import MIB, name_first

# They would make another program run code, or look for weights of another kind.
_DROPPED_KEYS = (
    "auto_map",
    "quantization_config",
    "compression_config",
    "quantization",
    "_name_or_path",
)


def export_model(
    model: nn.Module,
    spec: ModelSpec,
    source_config: dict[str, Any],
    out: Path,
    *,
    tokenizer_folder: Path | None,
    max_shard_bytes: int,
    world: RankGroup,
    chat_template: str | Path | None = None,
    stop_ids: Collection[int] = (),
    save_extra: bool = False,
    card: str | None = None,
) -> None:
    """Writes the folder `out`: safetensors files (with an index if several), config.json, tokenizer
    files. Collective.

    One parameter at a time is gathered on its device, by the ranks that have it, and streamed to
    the disk by rank 0; from other ranks of a pipeline it comes there in pieces, through the hosts.
    source_config: the config.json that the spec was read from. tokenizer_folder: its tokenizer
    files and generation_config.json are copied; or a tokenizer file, which is taken with the
    settings next to it. chat_template, stop_ids: what the model was trained with, where it differs
    from those files, so that others prompt it and stop it as we do. save_extra: write extra
    parameters too, which only a recipe that adds them reads; without it a model that has any is
    refused. card: the text of its README.md. An `out` that a run published is replaced when the new
    one is whole. Raises StorageError or CheckpointError on every rank; then `out` is as it was.
    """
    # FSDP's hook frees gathered parameters, so that what follows sees the shards
    model.state_dict()
    parameters = {
        name: parameter.detach() for name, parameter in model.named_parameters()
    } | list_persistent_buffers(model)
    holders = find_holders(model, world)
    everything = plan_tensors(parameters, holders, world)
    known = {entry.our_name for entry in build_weight_map(spec)}
    extras = [name for name in everything if name not in known]
    if extras and not save_extra:
        raise CheckpointError(f"{out}: {describe_extra_fault(extras)}")
    shards = plan_shards(spec, everything, max_shard_bytes, extras)

    pieces = TensorPieces(
        spec, partial(stream_parameter, model, parameters, holders), everything, extras
    )
    config = export_config(source_config, spec, next(model.parameters()).dtype)
    beside = SideFiles(tokenizer_folder, chat_template, stop_ids, card, pad_id=find_padding(config))
    with stage_folder(out, shards, list_model_files(shards, config), beside, world) as temporary:
        for name, tensors in shards.items():
            metadata = {"format": "pt"} | make_extra_metadata(
                {tensor.name for tensor in tensors} & set(extras)
            )
            write_gathered(temporary / name, tensors, pieces.read_all(tensors), metadata, world)


def describe_extra_fault(names: Collection[str]) -> str:
    """What is wrong with exporting a model that has extra parameters, and the remedy."""
    return (
        f"found {name_first(names)}, which the recipe added and no other program knows; "
        "set checkpoint.extra_parameters=save to write it too, or checkpoint.save_model=false"
    )


def find_extra_fault(cfg: CheckpointConfig, names: Collection[str]) -> str | None:
    """Why a run whose models have these extra parameters does not start; None if it does."""
    if not names or not cfg.save_model or cfg.extra_parameters == "save":
        return None
    return f"checkpoint.extra_parameters: {describe_extra_fault(names)}"


def make_extra_metadata(names: Collection[str]) -> dict[str, str]:
    """The metadata of a file with these extra parameters."""
    return {EXTRA: " ".join(sorted(names))} if names else {}


def check_room(model: nn.Module, out: Path, world: RankGroup) -> None:
    """Raises StorageError if the disk of `out` has no room for the model even now, before it is
    trained. Collective.
    """
    holders = find_holders(model, world)
    own = {name: parameter for name, parameter in model.named_parameters() if holders.is_ours(name)}
    needed = sum(
        holders.gather(sum(value.numel() * value.element_size() for value in own.values()), world)
    )

    def require() -> None:
        folder = next(parent for parent in out.absolute().parents if parent.is_dir())
        cleared = (
            sum(map(files.count_folder_bytes, files.list_leftovers(folder, out.name)))
            if folder == out.parent
            else 0
        )
        files.require_space(
            folder, needed - cleared, f"the model at the end of the run{_describe_second_copy(out)}"
        )

    run_on_rank_0(world, require)


def _describe_second_copy(out: Path) -> str:
    """What a message on room says where there is a model already: there must be room for two."""
    return f", in addition to the one in {out} that stays until then," if out.exists() else ""


def plan_tensors(
    tensors: Mapping[str, torch.Tensor], holders: Holders, world: RankGroup
) -> dict[str, PlannedTensor]:
    """Return shape and type of tensors by name, of those of other ranks of a pipeline too.
    Collective.
    """
    own = [(name, DTYPE_NAMES[value.dtype], tuple(value.shape)) for name, value in tensors.items()]
    parts = holders.gather(own, world)
    return {
        name: PlannedTensor(name, DTYPES[dtype], tuple(shape))
        for part in parts
        for name, dtype, shape in part
    }


def plan_shards(
    spec: ModelSpec,
    parameters: Mapping[str, PlannedTensor],
    max_shard_bytes: int,
    extras: Collection[str] = (),
) -> dict[str, list[PlannedTensor]]:
    """File name -> its tensors, filled in the model's order; a tensor larger than a shard has its
    own.

    extras: the parameters that the model's family does not have; they come last.
    """
    other = build_written_layout(spec)
    if other is None:
        entries = build_weight_map(spec)
        shapes = compute_file_shapes(
            entries, {name: parameter.shape for name, parameter in parameters.items()}
        )
        dtypes = {entry.file_name: parameters[entry.our_name].dtype for entry in entries}
    else:
        shapes = dict(other.shapes)
        dtypes = {name: parameters[own].dtype for name, own in other.renamed.items()}
        dtypes |= {
            name: parameters[conversion.names()[0]].dtype for name, conversion in other.made.items()
        }
    shapes |= {name: parameters[name].shape for name in extras}
    dtypes |= {name: parameters[name].dtype for name in extras}
    shards: list[list[PlannedTensor]] = []
    filled = 0
    for name, shape in shapes.items():
        tensor = PlannedTensor(name, dtypes[name], shape)
        if not shards or filled + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{at:05d}-of-{len(shards):05d}.safetensors": shard
        for at, shard in enumerate(shards, start=1)
    }


class TensorPieces:
    """The data of a file's tensors, a gathered parameter at a time; of those made by one
    conversion, all it takes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        read: Callable[[str], Iterator[torch.Tensor]],
        parameters: Mapping[str, PlannedTensor],
        extras: Collection[str],
    ) -> None:
        """read: the whole of a parameter, or pieces of its bytes, on rank 0; collective.
        parameters: what has each parameter's shape and type. extras: see `plan_shards`.
        """
        self._read, self._parameters, self._other = read, parameters, build_written_layout(spec)
        self._current: Conversion | None = None
        self._made: dict[str, torch.Tensor] = {}
        self._parts: dict[
            str, list[str]
        ] = {}  # name in the file -> the parameters it is made of, in row order
        if self._other is None:
            for entry in sorted(build_weight_map(spec), key=lambda entry: entry.start):
                self._parts.setdefault(entry.file_name, []).append(entry.our_name)
        else:
            self._parts = {name: [own] for name, own in self._other.renamed.items()}
        self._parts |= {name: [name] for name in extras}

    def read_all(self, tensors: Iterable[PlannedTensor]) -> Iterator[torch.Tensor]:
        """The tensors one after the other, in consecutive pieces of rows, on rank 0. Collective."""
        # chain keeps no reference to what it gave, so that a gathered tensor is gone before the
        # next one is gathered.
        return chain.from_iterable(self._read_tensor(tensor.name) for tensor in tensors)

    def _read_tensor(self, name: str) -> Iterator[torch.Tensor]:
        if name in self._parts:
            for part in self._parts[name]:
                yield from self._read(part)
            return
        assert self._other is not None
        conversion = self._other.made[name]
        if conversion is not self._current:
            self._made, self._current = {}, conversion
            found = {taken: self._whole(taken) for taken in conversion.names()}
            parameters = {
                taken: parameter for taken, parameter in found.items() if parameter is not None
            }
            if parameters:
                self._made = conversion.convert(parameters.__getitem__)
        if name in self._made:
            tensor = self._made.pop(name)
            yield from (
                tensor.split(1) if tensor.dim() == 3 else (tensor,)
            )  # experts are made contiguous one by one

    def _whole(self, name: str) -> torch.Tensor | None:
        """A parameter, on rank 0; what comes from another rank of a pipeline is put together.
        Collective.
        """
        parameter, found = self._parameters[name], None
        for piece in self._read(name):
            if piece.shape == parameter.shape:
                found = piece
                continue
            if found is None:
                found = torch.empty(parameter.shape, dtype=parameter.dtype)
                rest = found.view(-1).view(torch.uint8)
            rest[: len(piece)] = piece
            rest = rest[len(piece) :]
        return found


@dataclass(frozen=True)
class SideFiles:
    """What stands beside the weights of an exported folder; see `export_model`."""

    tokenizer_folder: Path | None
    chat_template: str | Path | None = None
    stop_ids: Collection[int] = ()
    card: str | None = None
    pad_id: int | None = (
        None  # of a model with a score head, what its config.json takes for padding
    )


@contextmanager
def stage_folder(
    out: Path,
    shards: Mapping[str, Sequence[PlannedTensor]],
    contents: Mapping[str, Any],
    beside: SideFiles,
    world: RankGroup,
) -> Iterator[Path]:
    """Yield a temporary folder for the files of tensors; then rank 0 adds the rest, and it becomes
    `out`. Collective.

    contents: the other files' names and what they hold, as JSON. After an error the temporary
    folder is gone, and `out` is as it was.
    """
    copied = list_tokenizer_files(beside.tokenizer_folder)
    temporary = Path(run_on_rank_0(world, lambda: _begin_folder(out, shards, copied)))

    def finish() -> None:
        for name, content in contents.items():
            files.write_json(temporary / name, content)
        copy_tokenizer(temporary, copied, beside.chat_template, beside.stop_ids, beside.pad_id)
        if beside.card is not None:
            files.write_bytes(temporary / CARD, beside.card.encode())
        publish(temporary, out)

    try:
        yield temporary
        run_on_rank_0(world, finish)
    except BaseException:
        if world.rank == 0:
            files.discard(temporary)
        raise


def _begin_folder(
    out: Path, shards: Mapping[str, Sequence[PlannedTensor]], copied: Sequence[Path]
) -> str:
    """Rank 0: room on the disk, and an empty temporary folder next to `out`; returns its path."""
    out.parent.mkdir(parents=True, exist_ok=True)
    files.remove_leftovers(out.parent, out.name)
    weights = sum(tensor.num_bytes for shard in shards.values() for tensor in shard)
    needed = (
        weights + sum(path.stat().st_size for path in copied) + MIB * (1 + len(shards))
    )  # headers, index, config
    files.require_space(out.parent, needed, f"the model{_describe_second_copy(out)}")
    temporary = files.make_temporary_path(out)
    files.make_folder(temporary)
    return str(temporary)


def stream_parameter(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], holders: Holders, name: str
) -> Iterator[torch.Tensor]:
    """Return an iterator of a tensor in the file's order, on rank 0, as `Holders.relay` has it."""

    def gather() -> Iterator[torch.Tensor]:
        yield restore_file_order(gather_whole(tensors[name].detach()), get_runs(model).get(name))

    return holders.stream_to_rank_0(name, gather)


def gather_whole(parameter: torch.Tensor) -> torch.Tensor:
    """The full parameter, gathered where it is computed with, even if its shards are kept in host
    memory.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    placed = parameter.to(parameter.device_mesh.device_type)
    return gather_full(placed.to_local(), placed)


def list_model_files(
    shards: Mapping[str, Sequence[PlannedTensor]], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a model's folder has in JSON: config.json, and before it an index where there are
    several shards.
    """
    if SINGLE in shards:
        return {"config.json": config}
    sizes = [tensor.num_bytes for shard in shards.values() for tensor in shard]
    index = {
        "metadata": {"total_size": sum(sizes)},
        "weight_map": {tensor.name: name for name, shard in shards.items() for tensor in shard},
    }
    return {INDEX: index, "config.json": config}


def export_config(
    source_config: dict[str, Any], spec: ModelSpec, dtype: torch.dtype
) -> dict[str, Any]:
    """The config.json of the exported model: the source's, with the type and the architecture of
    what is written.
    """
    external = isinstance(spec, ExternalSpec)
    written = source_config if external else get_text_config(source_config)
    config = {key: value for key, value in written.items() if key not in _DROPPED_KEYS}
    if not external:
        causal = FAMILIES[spec.family].architectures[0]
        config["architectures"] = [get_score_architecture(spec) if has_score_head(spec) else causal]
    config["tie_word_embeddings"] = spec.tied
    config["dtype"] = str(dtype).removeprefix("torch.")
    return spell_config(config, spec)


def find_padding(config: Mapping[str, Any]) -> int | None:
    """Return the id that the config.json of a model with a score head takes for padding; None: of
    any other model.
    """
    is_scored = any(
        name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()
    )
    return config.get("pad_token_id") if is_scored else None


def spell_config(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return a config.json whose renamed keys have both names: readers before transformers 5 know
    the older alone.
    """
    return (
        spec.spell_config(config)
        if isinstance(spec, ExternalSpec)
        else spell_native(config, spec.family)
    )
