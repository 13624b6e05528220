"""Export a trained model as a Hugging Face folder, written tensor by tensor.

A run calls `export_model` at its end. It plans the files from the model's shapes (`plan_tensors`,
`export_shards.plan_shards`), gathers one parameter at a time, and streams it to the disk from rank
0 (`write_model`). The folder is written under a temporary name (`stage_folder`) and renamed when it
is complete. "Collective": all ranks must call the function.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_lib import files
from recipe_lib.checkpoint.export_shards import (
    NOTHING_CARRIED,
    Carried,
    TensorPieces,
    plan_shards,
)
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
from recipe_lib.checkpoint.side_files import (
    CARD,
    copy_tokenizer,
    list_tokenizer_files,
)
from recipe_lib.checkpoint.tensor_matching import count_tensors
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
from recipe_lib.models.spec import (
    ExternalSpec,
    ModelSpec,
    has_score_head,
)
from recipe_lib.models.weight_names import build_weight_map
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
    carried: Carried = NOTHING_CARRIED,
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
        carried: what the export has unchanged from the folder that training began with.

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
    names = {name: name for name in planned}  # name in the written model -> in this one
    text = spec.find_text_model() if isinstance(spec, ExternalSpec) else None
    if text is not None and not carried.tensors:
        # Without its other parts a multimodal model is written as its text model.
        spec = text.spec
        source_config = text.config
        names = dict(text.names) | {name: name for name in extras}

    def read(name: str) -> Iterator[torch.Tensor]:
        return stream_parameter(model, parameters, holders, names[name])

    write_model(
        out,
        spec,
        {name: replace(planned[ours], name=name) for name, ours in names.items()},
        read=read,
        extras=extras,
        config=export_config(source_config, spec, next(model.parameters()).dtype, carried=carried),
        side_files=SideFiles(
            tokenizer_folder,
            chat_template=chat_template,
            stop_ids=stop_ids,
            card=card,
            carried=carried,
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
    carried = side_files.carried
    shards = plan_shards(
        spec, parameters, max_shard_bytes=max_shard_bytes, extras=extras, carried=carried
    )
    pieces = TensorPieces(spec, read=read, parameters=parameters, extras=extras, carried=carried)
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
                    # the next one is gathered. A copy is read by the rank that writes it alone.
                    pieces=chain.from_iterable(
                        pieces.read_tensor(tensor)
                        for tensor in shards[name]
                        if tensor.source is None or reads_alone or world.rank == 0
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
    # What is unchanged from the folder that training began with.
    carried: Carried = NOTHING_CARRIED


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
    processor_paths = side_files.carried.processor_files
    copied = [*tokenizer_paths, *processor_paths]
    temporary = Path(run_on_rank_0(world, lambda: _make_temporary_folder(out, shards, copied)))

    def finish() -> None:
        for name, content in contents.items():
            files.write_json(temporary / name, content)
        for path in processor_paths:
            files.copy_file(path, temporary / path.name)
        copy_tokenizer(
            temporary,
            tokenizer_paths,
            chat_template=side_files.chat_template,
            stop_ids=side_files.stop_ids,
            pad_id=pad_id,
        )
        if side_files.card is not None:
            card = side_files.card + _describe_copies(chain.from_iterable(shards.values()))
            files.write_bytes(temporary / CARD, card.encode())
        publish(temporary, out)

    try:
        yield temporary
        run_on_rank_0(world, finish)
    except BaseException:
        if world.rank == 0:
            files.discard(temporary)
        raise


def _describe_copies(tensors: Iterable[PlannedTensor]) -> str:
    """Return the card's section on tensors that are copied from the base; empty if none is."""
    copies = {tensor.name: tensor.source for tensor in tensors if tensor.source is not None}
    if not copies:
        return ""
    return f"\n## Unchanged\n\nCopied from the base: {count_tensors(copies, copies)}.\n"


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
    source_config: dict[str, Any],
    spec: ModelSpec,
    dtype: torch.dtype,
    carried: Carried = NOTHING_CARRIED,
) -> dict[str, Any]:
    """Return the config.json of an export.

    source_config: the config.json that the spec was read from. dtype: of the exported weights.
    carried: what the export has besides the text model.
    """
    # Without its other parts a multimodal model is written as its text model.
    is_whole = isinstance(spec, ExternalSpec) or bool(carried.tensors)
    source = source_config if is_whole else get_text_config(source_config)
    config = {key: value for key, value in source.items() if key not in _DROPPED_KEYS}
    if not is_whole:
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
