"""Export a trained model as a Hugging Face folder, written tensor by tensor.

`export_model` plans the files from the model's shapes (`plan_tensors`, `plan_shards`), gathers one
parameter at a time, and streams it to the disk from rank 0. The folder is written under a temporary
name (`stage_folder`) and takes its own when it is whole.
"""

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
from recipe_lib.checkpoint.model_folders import INDEX, SINGLE
from recipe_lib.checkpoint.rank_groups import (
    Holders,
    RankGroup,
    check_shared,
    find_holders,
    run_on_all_ranks,
    run_on_rank_0,
    write_gathered,
)
from recipe_lib.checkpoint.run_files import publish
from recipe_lib.checkpoint.safetensors_files import (
    DTYPE_NAMES,
    DTYPES,
    EXTRA_PARAMETERS_KEY,
    PlannedTensor,
    write_tensor_file,
)
from recipe_lib.checkpoint.side_files import CARD, copy_tokenizer, list_tokenizer_files
from recipe_lib.checkpoint.tensor_matching import compute_file_shapes
from recipe_lib.config.schema import CheckpointConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.models.config_spelling import spell_native
from recipe_lib.models.families import (
    FAMILIES,
    get_score_architecture,
    get_text_config,
)
from recipe_lib.models.language_model import get_runs, restore_file_order
from recipe_lib.models.meta_init import list_persistent_buffers
from recipe_lib.models.spec import Conversion, ExternalSpec, ModelSpec, has_score_head
from recipe_lib.models.weight_names import build_weight_map, build_written_layout
from recipe_lib.ops.dtensor_shards import gather_full
from recipe_lib.units import MIB, name_first

# Keys of a source's config.json that are left out of ours: they would make another program run
# code, or look for weights of another kind.
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
    """Write the folder `out`: safetensors files, config.json, tokenizer files. Collective.

    One parameter at a time is gathered on its device, by the ranks that have it, and streamed to
    the disk by rank 0; from other ranks of a pipeline it comes there in pieces, through the hosts.
    An `out` that a run published is replaced when the new one is whole.

    source_config: the config.json that the spec was read from.
    tokenizer_folder: its tokenizer files and generation_config.json are copied; or a tokenizer
        file, which is taken with the settings next to it.
    chat_template, stop_ids: what the model was trained with, where it differs from those files, so
        that others prompt it and stop it as we do.
    save_extra: write extra parameters too, which only a recipe that adds them reads; without it a
        model that has any is refused.
    card: the text of its README.md.

    Raises StorageError or CheckpointError on every rank; then `out` is as it was.
    """
    # FSDP's hook frees gathered parameters, so that what follows sees the shards
    model.state_dict()
    parameters = {
        name: parameter.detach() for name, parameter in model.named_parameters()
    } | list_persistent_buffers(model)
    holders = find_holders(model, world)
    planned = plan_tensors(parameters, holders, world)
    family_names = {entry.our_name for entry in build_weight_map(spec)}
    extras = [name for name in planned if name not in family_names]
    if extras and not save_extra:
        raise CheckpointError(f"{out}: {describe_extra_fault(extras)}")
    write_model(
        out,
        spec,
        planned,
        read=partial(stream_parameter, model, parameters, holders),
        extras=extras,
        config=export_config(source_config, spec, next(model.parameters()).dtype),
        side_files=SideFiles(
            tokenizer_folder, chat_template=chat_template, stop_ids=stop_ids, card=card
        ),
        max_shard_bytes=max_shard_bytes,
        world=world,
    )


def write_model(
    out: Path,
    spec: ModelSpec,
    parameters: Mapping[str, PlannedTensor],
    *,
    read: Callable[[str], Iterator[torch.Tensor]],
    extras: Collection[str],
    config: dict[str, Any],
    side_files: "SideFiles",
    max_shard_bytes: int,
    world: RankGroup,
    reads_alone: bool = False,
) -> None:
    """Write the folder `out` of a model whose parameters are planned. Collective.

    read, parameters: see `TensorPieces`. extras: the parameters that the model's family does not
    have. config: for config.json. reads_alone: `read` is no collective, so that each rank writes
    files of its own, to a disk that all ranks share.
    """
    shards = plan_shards(spec, parameters, max_shard_bytes=max_shard_bytes, extras=extras)
    pieces = TensorPieces(spec, read=read, parameters=parameters, extras=extras)
    # Readers of a model with a score head find a sequence's end by where padding begins.
    is_scored = any(
        name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()
    )
    with stage_folder(
        out,
        shards=shards,
        contents=list_model_files(shards, config),
        side_files=side_files,
        pad_id=config.get("pad_token_id") if is_scored else None,
        world=world,
    ) as temporary:

        def write_files(names: Iterable[str], write: Callable[..., Any]) -> None:
            for name in names:
                extra_names = {tensor.name for tensor in shards[name]} & set(extras)
                write(
                    temporary / name,
                    shards[name],
                    pieces=pieces.read_all(shards[name]),
                    metadata={"format": "pt"} | make_extra_metadata(extra_names),
                )

        if reads_alone:
            run_on_all_ranks(world, lambda: check_shared(temporary))
            own_names = list(shards)[world.rank :: world.size]
            run_on_all_ranks(world, lambda: write_files(own_names, write_tensor_file))
        else:
            write_files(shards, partial(write_gathered, world=world))


def describe_extra_fault(names: Collection[str]) -> str:
    """Return what is wrong with exporting a model that has extra parameters, and the remedy."""
    return (
        f"found {name_first(names)}, which the recipe added and no other program knows; "
        "set checkpoint.extra_parameters=save to write it too, or checkpoint.save_model=false"
    )


def find_extra_fault(cfg: CheckpointConfig, names: Collection[str]) -> str | None:
    """Return why a run whose model has these extra parameters does not start; None if it does."""
    if not names or not cfg.save_model or cfg.extra_parameters == "save":
        return None
    return f"checkpoint.extra_parameters: {describe_extra_fault(names)}"


def make_extra_metadata(names: Collection[str]) -> dict[str, str]:
    """Return the metadata of a file with these extra parameters."""
    return {EXTRA_PARAMETERS_KEY: " ".join(sorted(names))} if names else {}


def check_room(model: nn.Module, out: Path, world: RankGroup) -> None:
    """Raise StorageError if the disk of `out` has no room for the model. Collective.

    A run asks before it trains, not when the model is to be saved.
    """
    holders = find_holders(model, world)
    num_bytes_here = sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if holders.is_ours(name)
    )
    num_bytes = sum(holders.gather(num_bytes_here, world))

    def require() -> None:
        folder = next(parent for parent in out.absolute().parents if parent.is_dir())
        # What a killed export left is removed before the next one is written.
        leftovers = files.list_leftovers(folder, out.name) if folder == out.parent else []
        files.require_space(
            folder,
            num_bytes - sum(map(files.count_folder_bytes, leftovers)),
            f"the model at the end of the run{_describe_second_copy(out)}",
        )

    run_on_rank_0(world, require)


def _describe_second_copy(out: Path) -> str:
    """Return what a message on room says where there is a model already: both must fit."""
    return f", in addition to the one in {out} that stays until then," if out.exists() else ""


def plan_tensors(
    tensors: Mapping[str, torch.Tensor], holders: Holders, world: RankGroup
) -> dict[str, PlannedTensor]:
    """Return name -> shape and type of the tensors of all ranks. Collective.

    In a pipeline other ranks have other tensors.
    """
    rows = [(name, DTYPE_NAMES[value.dtype], tuple(value.shape)) for name, value in tensors.items()]
    return {
        name: PlannedTensor(name, DTYPES[dtype], tuple(shape))
        for name, dtype, shape in chain.from_iterable(holders.gather(rows, world))
    }


def plan_shards(
    spec: ModelSpec,
    parameters: Mapping[str, PlannedTensor],
    max_shard_bytes: int,
    extras: Collection[str] = (),
) -> dict[str, list[PlannedTensor]]:
    """Return file name -> its tensors, filled in the model's order.

    A tensor larger than a shard has a file of its own. The names are those of transformers.

    max_shard_bytes: bytes of data that a file may have. extras: the parameters that the model's
    family does not have; they come last.
    """
    layout = build_written_layout(spec)
    if layout is None:
        entries = build_weight_map(spec)
        shapes = compute_file_shapes(
            entries, {name: parameter.shape for name, parameter in parameters.items()}
        )
        dtypes = {entry.file_name: parameters[entry.our_name].dtype for entry in entries}
    else:
        # The family's files have other tensors than our model has parameters.
        shapes = dict(layout.shapes)
        dtypes = {name: parameters[our_name].dtype for name, our_name in layout.renamed.items()}
        dtypes |= {
            name: parameters[conversion.names()[0]].dtype
            for name, conversion in layout.made.items()
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
    """The data of a file's tensors, one gathered parameter at a time.

    Of tensors that one conversion makes, all the parameters that it takes are held together.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        read: Callable[[str], Iterator[torch.Tensor]],
        parameters: Mapping[str, PlannedTensor],
        extras: Collection[str],
    ) -> None:
        """Keep how a parameter is read, and which parameters each tensor of the files is made of.

        read: yields a whole parameter, or pieces of its bytes, on rank 0; collective. parameters:
        shape and type of each. extras: see `plan_shards`.
        """
        self._read = read
        self._parameters = parameters
        self._layout = build_written_layout(spec)
        self._current: Conversion | None = None
        self._converted: dict[str, torch.Tensor] = {}
        # Name in the file -> the parameters that it is made of, in row order.
        self._parts: dict[str, list[str]] = {}
        if self._layout is None:
            for entry in sorted(build_weight_map(spec), key=lambda entry: entry.start):
                self._parts.setdefault(entry.file_name, []).append(entry.our_name)
        else:
            self._parts = {name: [our_name] for name, our_name in self._layout.renamed.items()}
        self._parts |= {name: [name] for name in extras}

    def read_all(self, tensors: Iterable[PlannedTensor]) -> Iterator[torch.Tensor]:
        """Yield the tensors in consecutive pieces of rows, on rank 0. Collective."""
        # chain keeps no reference to what it gave, so that a gathered tensor is gone before the
        # next one is gathered.
        return chain.from_iterable(self._read_tensor(tensor.name) for tensor in tensors)

    def _read_tensor(self, name: str) -> Iterator[torch.Tensor]:
        if name in self._parts:
            for part in self._parts[name]:
                yield from self._read(part)
            return
        assert self._layout is not None
        conversion = self._layout.made[name]
        if conversion is not self._current:
            self._current = conversion
            self._converted = {}  # the former one's tensors are gone before these are gathered
            parameters: dict[str, torch.Tensor] = {}
            for input_name in conversion.names():
                parameter = self._assemble(input_name)
                if parameter is not None:
                    parameters[input_name] = parameter
            if parameters:  # on rank 0 alone
                self._converted = conversion.convert(parameters.__getitem__)
        if name in self._converted:
            tensor = self._converted.pop(name)
            # Experts `[E, o, i]` are made contiguous one by one.
            yield from (tensor.split(1) if tensor.dim() == 3 else (tensor,))

    def _assemble(self, name: str) -> torch.Tensor | None:
        """Return a whole parameter on rank 0, None on the other ranks. Collective.

        What comes from another rank of a pipeline is put together from its bytes.
        """
        planned = self._parameters[name]
        parameter = None
        for piece in self._read(name):
            if piece.shape == planned.shape:
                parameter = piece
                continue
            if parameter is None:
                parameter = torch.empty(planned.shape, dtype=planned.dtype)
                unfilled_bytes = parameter.view(-1).view(torch.uint8)
            unfilled_bytes[: len(piece)] = piece
            unfilled_bytes = unfilled_bytes[len(piece) :]
        return parameter


@dataclass(frozen=True)
class SideFiles:
    """The files beside the weights of an exported folder."""

    # Where its files are copied from: a folder, or a tokenizer file. None: no tokenizer.
    tokenizer_folder: Path | None
    # A template's text or file, in the place of the tokenizer's own.
    chat_template: str | Path | None = None
    # Ids that end an answer, for generation_config.json.
    stop_ids: Collection[int] = ()
    # Text of README.md, if it has one.
    card: str | None = None


@contextmanager
def stage_folder(
    out: Path,
    *,
    shards: Mapping[str, Sequence[PlannedTensor]],
    contents: Mapping[str, Any],
    side_files: SideFiles,
    world: RankGroup,
    pad_id: int | None = None,
) -> Iterator[Path]:
    """Yield a temporary folder for the tensor files, which then becomes `out`. Collective.

    Rank 0 adds the other files when the caller is done. After an error the temporary folder is
    gone, and `out` is as it was.

    contents: JSON files by name, and what they hold. pad_id: of a model with a score head, the id
    that its config.json takes for padding.
    """
    tokenizer_paths = list_tokenizer_files(side_files.tokenizer_folder)
    temporary = Path(run_on_rank_0(world, lambda: _begin_folder(out, shards, tokenizer_paths)))

    def finish() -> None:
        for name, content in contents.items():
            files.write_json(temporary / name, content)
        copy_tokenizer(
            temporary,
            tokenizer_paths,
            chat_template=side_files.chat_template,
            stop_ids=side_files.stop_ids,
            pad_id=pad_id,
        )
        if side_files.card is not None:
            files.write_bytes(temporary / CARD, side_files.card.encode())
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
    """Check the room on the disk and make a temporary folder next to `out`; return its path.

    For rank 0. copied: files that will be copied into the folder.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    files.remove_leftovers(out.parent, out.name)  # first: they take the space
    num_bytes = (
        sum(tensor.num_bytes for tensor in chain.from_iterable(shards.values()))
        + sum(path.stat().st_size for path in copied)
        + MIB * (1 + len(shards))  # headers, index, config
    )
    files.require_space(out.parent, num_bytes, f"the model{_describe_second_copy(out)}")
    temporary = files.make_temporary_path(out)
    files.make_folder(temporary)
    return str(temporary)


def stream_parameter(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], holders: Holders, name: str
) -> Iterator[torch.Tensor]:
    """Return an iterator of a tensor, whole or as pieces of bytes, on rank 0. Collective.

    The rows of a fused matrix are in the order that files have, not in that of this rank's shards.
    See `Holders.stream_to_rank_0`.
    """

    def gather() -> Iterator[torch.Tensor]:
        yield restore_file_order(gather_whole(tensors[name].detach()), get_runs(model).get(name))

    return holders.stream_to_rank_0(name, gather)


def gather_whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return the full parameter, gathered on the device that computes with it. Collective."""
    if not isinstance(parameter, DTensor):
        return parameter
    # Its shards may be kept in host memory, where the mesh's backend cannot gather them.
    on_device = parameter.to(parameter.device_mesh.device_type)
    return gather_full(on_device.to_local(), on_device)


def list_model_files(
    shards: Mapping[str, Sequence[PlannedTensor]], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON files of a model's folder: config.json, and an index of several shards."""
    if SINGLE in shards:
        return {"config.json": config}
    total_size = sum(tensor.num_bytes for tensor in chain.from_iterable(shards.values()))
    file_names: dict[str, str] = {}
    for file_name, shard in shards.items():
        file_names |= {tensor.name: file_name for tensor in shard}
    return {
        INDEX: {"metadata": {"total_size": total_size}, "weight_map": file_names},
        "config.json": config,
    }


def export_config(
    source_config: dict[str, Any], spec: ModelSpec, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the config.json of an exported model.

    It is the source's, with the type and the architecture of what is written.
    """
    is_external = isinstance(spec, ExternalSpec)
    # Of a multimodal model we train and write the text model alone.
    source = source_config if is_external else get_text_config(source_config)
    config = {key: value for key, value in source.items() if key not in _DROPPED_KEYS}
    if not is_external:
        causal = FAMILIES[spec.family].architectures[0]
        config["architectures"] = [get_score_architecture(spec) if has_score_head(spec) else causal]
    config["tie_word_embeddings"] = spec.tied
    config["dtype"] = str(dtype).removeprefix("torch.")
    return spell_config(config, spec)


def spell_config(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return a config.json whose renamed keys have both names.

    Readers before transformers 5 know the older names alone.
    """
    return (
        spec.spell_config(config)
        if isinstance(spec, ExternalSpec)
        else spell_native(config, spec.family)
    )
