"""Export a trained model as a Hugging Face folder, written tensor by tensor.

A run calls `export_model` at its end. It plans the files from the model's shapes (`plan_tensors`,
`plan_shards`), gathers one parameter at a time, and streams it to the disk from rank 0
(`write_model`). The folder is written under a temporary name (`stage_folder`) and renamed when it
is complete. "Collective": all ranks must call the function.
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

# Keys of the original config.json that are left out of the exported one: they would make other
# programs run code, expect quantized weights, or take the export for the original.
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
    the disk by rank 0; other pipeline stages send it there in pieces, through host memory. An `out`
    that a run published is replaced once the new one is complete.

    Args:
        model: plain or sharded.
        spec: of the model.
        source_config: the config.json that the spec was read from.
        out: folder of the export.
        tokenizer_folder: folder from which tokenizer files and generation_config.json are copied;
            or a tokenizer file, which is copied with the settings next to it.
        max_shard_bytes: bytes of data in a file, unless a tensor alone has more.
        world: all ranks.
        chat_template, stop_ids: those of training, where they differ from the tokenizer's files, so
            that other programs prompt and stop the model alike.
        save_extra: write the parameters that a recipe added to the model too, which only that
            recipe can read; False: such a model is refused.
        card: text of README.md; None: none is written.

    Raises StorageError or CheckpointError on every rank; then `out` is as it was.
    """
    # A hook of FSDP in it frees gathered parameters, so that what follows sees the shards.
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

    Args:
        out: folder of the model.
        spec: of the model.
        parameters: our name -> shape and dtype in the files.
        read: yields a parameter by its name, see `TensorPieces`.
        extras: names of parameters that the model's family does not have.
        config: contents of config.json.
        side_files: files beside the weights.
        max_shard_bytes: bytes of data in a file, unless a tensor alone has more.
        world: all ranks.
        reads_alone: `read` is not collective: each rank writes files of its own, to a disk that all
            ranks share.
    """
    shards = plan_shards(spec, parameters, max_shard_bytes=max_shard_bytes, extras=extras)
    pieces = TensorPieces(spec, read=read, parameters=parameters, extras=extras)
    # A model with a score head needs the padding id: its readers take the score of the last token
    # before padding.
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
                    # A chain keeps no reference to the tensor that it yielded: it is freed before
                    # the next one is gathered.
                    pieces=chain.from_iterable(
                        pieces.read_tensor(tensor.name) for tensor in shards[name]
                    ),
                    metadata={"format": "pt"} | make_extra_metadata(extra_names),
                )

        if reads_alone:
            run_on_all_ranks(world, lambda: check_shared(temporary))
            names_here = list(shards)[world.rank :: world.size]
            run_on_all_ranks(world, lambda: write_files(names_here, write_tensor_file))
        else:
            write_files(shards, partial(write_gathered, world=world))


def describe_extra_fault(names: Collection[str]) -> str:
    """Return the error text for an export of a model with parameters that a recipe added.

    names: of these.
    """
    return (
        f"found {name_first(names)}, which the recipe added and no other program knows; "
        "set checkpoint.extra_parameters=save to write it too, or checkpoint.save_model=false"
    )


def find_extra_fault(cfg: CheckpointConfig, names: Collection[str]) -> str | None:
    """Return why a run with these extra parameters cannot start; None if it can.

    names: of the parameters that the recipe added to the model.
    """
    if not names or not cfg.save_model or cfg.extra_parameters == "save":
        return None
    return f"checkpoint.extra_parameters: {describe_extra_fault(names)}"


def make_extra_metadata(names: Collection[str]) -> dict[str, str]:
    """Return the metadata of a tensor file that names its extra parameters; empty without any."""
    return {EXTRA_PARAMETERS_KEY: " ".join(sorted(names))} if names else {}


def check_room(model: nn.Module, out: Path, world: RankGroup) -> None:
    """Raise StorageError if the disk of `out` has no room for the model. Collective.

    A run calls this before it trains, as it would otherwise fail after hours.

    out: folder of the export at the end.
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
        # Leftovers of a killed export count as free: they are removed before the next export.
        leftovers = files.list_leftovers(folder, out.name) if folder == out.parent else []
        files.require_space(
            folder,
            num_bytes - sum(map(files.count_folder_bytes, leftovers)),
            f"the model at the end of the run{_describe_second_copy(out)}",
        )

    run_on_rank_0(world, require)


def _describe_second_copy(out: Path) -> str:
    """Return the part of an error text that says that an existing `out` needs room too."""
    return f", in addition to the one in {out} that stays until then," if out.exists() else ""


def plan_tensors(
    tensors: Mapping[str, torch.Tensor], holders: Holders, world: RankGroup
) -> dict[str, PlannedTensor]:
    """Return name -> shape and dtype of the tensors of all pipeline stages. Collective.

    tensors: those of this rank's stage.
    """
    # As values that JSON holds.
    plans_here = [
        (name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()
    ]
    return {
        name: PlannedTensor(name, DTYPES[dtype], tuple(shape))
        for name, dtype, shape in chain.from_iterable(holders.gather(plans_here, world))
    }


def plan_shards(
    spec: ModelSpec,
    parameters: Mapping[str, PlannedTensor],
    max_shard_bytes: int,
    extras: Collection[str] = (),
) -> dict[str, list[PlannedTensor]]:
    """Return file name -> the tensors in it, in the model's order.

    Files are named as transformers does.

    parameters: our name -> shape and dtype in the files. max_shard_bytes: bytes of data in a file;
    a larger tensor has a file of its own. extras: names of the parameters that the model's family
    does not have; they come last.
    """
    layout = build_written_layout(spec)
    if layout is None:
        entries = build_weight_map(spec)
        shapes = compute_file_shapes(
            entries, {name: parameter.shape for name, parameter in parameters.items()}
        )
        dtypes = {entry.file_name: parameters[entry.our_name].dtype for entry in entries}
    else:
        # The family's files have tensors that are converted from several parameters of ours.
        shapes = dict(layout.shapes)
        dtypes = {name: parameters[our_name].dtype for name, our_name in layout.renamed.items()}
        dtypes |= {
            name: parameters[conversion.names()[0]].dtype
            for name, conversion in layout.made.items()
        }
    shapes |= {name: parameters[name].shape for name in extras}
    dtypes |= {name: parameters[name].dtype for name in extras}
    shards: list[list[PlannedTensor]] = []
    filled_bytes = 0
    for name, shape in shapes.items():
        tensor = PlannedTensor(name, dtypes[name], shape)
        if not shards or filled_bytes + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(tensor)
        filled_bytes += tensor.num_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{index:05d}-of-{len(shards):05d}.safetensors": shard
        for index, shard in enumerate(shards, start=1)
    }


class TensorPieces:
    """The data of the tensors in an export's files, with one parameter in memory at a time.

    Where tensors are converted from several parameters (`Conversion`), these are held together.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        read: Callable[[str], Iterator[torch.Tensor]],
        parameters: Mapping[str, PlannedTensor],
        extras: Collection[str],
    ) -> None:
        """Look up which parameters each tensor of the files is made of.

        read: yields a parameter by its name on rank 0, as one tensor or as pieces of its bytes;
        collective. parameters: our name -> shape and dtype. extras: see `plan_shards`.
        """
        self._read = read
        self._parameters = parameters
        self._layout = build_written_layout(spec)
        self._current: Conversion | None = None  # whose results are in `_converted`
        self._converted: dict[str, torch.Tensor] = {}  # its tensors that are not written yet
        # Name in the file -> the parameters that it is made of, in row order.
        self._parts: dict[str, list[str]] = {}
        if self._layout is None:
            for entry in sorted(build_weight_map(spec), key=lambda entry: entry.start):
                self._parts.setdefault(entry.file_name, []).append(entry.our_name)
        else:
            self._parts = {name: [our_name] for name, our_name in self._layout.renamed.items()}
        self._parts |= {name: [name] for name in extras}

    def read_tensor(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor's data in consecutive pieces, on rank 0. Collective."""
        if name in self._parts:
            for part in self._parts[name]:
                yield from self._read(part)
            return
        assert self._layout is not None
        conversion = self._layout.made[name]
        if conversion is not self._current:
            self._current = conversion
            self._converted = {}  # frees the last conversion's tensors before the next are gathered
            parameters: dict[str, torch.Tensor] = {}
            for input_name in conversion.names():
                parameter = self._assemble(input_name)
                if parameter is not None:
                    parameters[input_name] = parameter
            if parameters:  # on rank 0; the other ranks get none
                self._converted = conversion.convert(parameters.__getitem__)
        if name in self._converted:
            tensor = self._converted.pop(name)
            # Experts `[E, o, i]` go one by one: only one of them is made contiguous at a time.
            yield from (tensor.split(1) if tensor.dim() == 3 else (tensor,))

    def _assemble(self, name: str) -> torch.Tensor | None:
        """Return a full parameter on rank 0, None on the other ranks. Collective.

        A parameter of another pipeline stage is put together from pieces of its bytes.
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

    # Folder from which the tokenizer's files are copied, or a tokenizer file; None: no tokenizer.
    tokenizer_folder: Path | None
    # Text or file of a template that replaces the tokenizer's own; None: it stays.
    chat_template: str | Path | None = None
    # Token ids that end an answer, for generation_config.json.
    stop_ids: Collection[int] = ()
    # Text of README.md; None: none is written.
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

    At the end of the block rank 0 adds the other files and renames the folder. After an error the
    temporary folder is removed, and `out` is as it was.

    Args:
        out: folder of the export.
        shards: file name -> the tensors that the caller will write into it.
        contents: name of a JSON file -> its contents.
        side_files: files beside the weights.
        world: all ranks.
        pad_id: the padding id in config.json of a model with a score head, which the tokenizer must
            pad with; None: the tokenizer's own.

    Raises StorageError or CheckpointError on every rank.
    """
    tokenizer_paths = list_tokenizer_files(side_files.tokenizer_folder)
    temporary = Path(
        run_on_rank_0(world, lambda: _make_temporary_folder(out, shards, tokenizer_paths))
    )

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


def _make_temporary_folder(
    out: Path, shards: Mapping[str, Sequence[PlannedTensor]], copied: Sequence[Path]
) -> str:
    """Check the room on the disk and make a temporary folder next to `out`, on rank 0.

    Return its path, as text for JSON.

    shards: file name -> the tensors in it. copied: files that will be copied into the folder.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    files.remove_leftovers(out.parent, out.name)  # first: they take up the space
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
    """Return an iterator of a tensor on rank 0, as one tensor or as pieces of bytes. Collective.

    The rows of a fused matrix are put into the order of files: tensor parallelism has another. See
    `Holders.stream_to_rank_0` for the pieces.
    """

    def gather() -> Iterator[torch.Tensor]:
        yield restore_file_order(gather_whole(tensors[name].detach()), get_runs(model).get(name))

    return holders.stream_to_rank_0(name, gather)


def gather_whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return the full parameter, gathered on the device that computes with it. Collective."""
    if not isinstance(parameter, DTensor):
        return parameter
    # With CPU offload its shards are in host memory, where the mesh's backend cannot gather them.
    on_device = parameter.to(parameter.device_mesh.device_type)
    return gather_full(on_device.to_local(), on_device)


def list_model_files(
    shards: Mapping[str, Sequence[PlannedTensor]], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON files of a model's folder: config.json, and an index if it has shards."""
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
    """Return the config.json of an export.

    source_config: the config.json that the spec was read from. dtype: of the exported weights.
    """
    is_external = isinstance(spec, ExternalSpec)
    # Of a multimodal model only the text model is trained and written.
    source = source_config if is_external else get_text_config(source_config)
    config = {key: value for key, value in source.items() if key not in _DROPPED_KEYS}
    if not is_external:
        causal_class = FAMILIES[spec.family].architectures[0]
        config["architectures"] = [
            get_score_architecture(spec) if has_score_head(spec) else causal_class
        ]
    config["tie_word_embeddings"] = spec.tied
    config["dtype"] = str(dtype).removeprefix("torch.")
    return spell_config(config, spec)


def spell_config(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return a config.json that has keys which transformers 5 renamed under both names.

    Readers before transformers 5 know only the older names.
    """
    return (
        spec.spell_config(config)
        if isinstance(spec, ExternalSpec)
        else spell_native(config, spec.family)
    )
