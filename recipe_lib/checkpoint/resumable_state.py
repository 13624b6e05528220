"""Resumable state: saved as a new folder that is either whole or not there, and used only after it
was verified.

    output_dir/state/step_40/   shard-00001-of-00002.safetensors ...   model and optimizer, each rank its own part
                                rng-00001.safetensors ...              random number generators, per rank
                                state.json                             step, data position, optimizer settings
                                manifest.json                          every file's size and SHA-256; written last

The order is: files, flush each, manifest, flush the folder, rename, flush the parent, and only then
remove older states. "Latest" is computed from the manifests, never stored. Another world size, or
another size of a pipeline, may load what one has saved.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from recipe_lib import files
from recipe_lib.checkpoint.model_export import gather_whole
from recipe_lib.checkpoint.optimizer_state import (
    MODEL,
    OPTIMIZER,
    PlaceState,
    check_adapter_use,
    check_frozen_hash,
    describe_tensor,
    gather_adapter_use,
    gather_optimizer_settings,
    get_parameter_name,
    hash_frozen_parameters,
    list_model_tensors,
    list_optimizer_tensors,
    make_optimizer_states,
    restore_settings,
)
from recipe_lib.checkpoint.rank_groups import (
    Holders,
    RankGroup,
    check_shared,
    find_holders,
    run_on_all_ranks,
    run_on_rank_0,
)
from recipe_lib.checkpoint.run_files import (
    PREFIX,
    STATE,
    STATE_NAME,
    DamagedState,
    Manifest,
    check_presence,
    find_damaged_file,
    find_free,
    list_readable_states,
    list_state_folders,
    prune_states,
    read_state_json,
    write_manifest,
)
from recipe_lib.checkpoint.safetensors_files import (
    DTYPES,
    PlannedTensor,
    read_header,
    write_tensor_file,
)
from recipe_lib.config.local_files import describe_damaged_state
from recipe_lib.errors import CheckpointError
from recipe_lib.files import FileRecord
from recipe_lib.logs import get_logger
from recipe_lib.models.language_model import get_runs, list_local_parts, restore_file_order
from recipe_lib.reading import parse_json
from recipe_lib.report.phases import phase
from recipe_lib.units import MIB


def save_state(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any],
    world: RankGroup,
    keep: int | None,
) -> Path:
    """Saves everything that a run needs to go on, as `root/step_N`, then removes all but the newest
    `keep`. Collective.

    Of a model with frozen parameters only the trained ones are saved, and a mark by which the
    others are known again. root: `output_dir/state`, on a disk that all ranks share. optimizer:
    None saves the weights alone, as of a best step, which `load_state` reads without one. keep:
    None removes nothing. step: optimizer steps done. extra: JSON values that `load_state` gives
    back. A step that is saved again becomes `step_N-2`, and so on: a folder is never written over.
    Returns the new folder. Raises StorageError on every rank if any rank fails; then nothing has
    changed on the disk.
    """
    holders = find_holders(model, world)
    tensors = list_model_tensors(
        model, holders
    )  # before the optimizer's: FSDP frees gathered parameters in it
    if optimizer is not None:
        tensors |= run_on_all_ranks(world, lambda: list_optimizer_tensors(model, optimizer))
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if holders.is_ours(get_parameter_name(name))
    }
    settings = {
        "extra": extra,
        "optimizer": (
            None
            if optimizer is None
            else gather_optimizer_settings(model, optimizer, world, holders)
        ),
        "adapters": gather_adapter_use(model, world, holders),
        "frozen": hash_frozen_parameters(model, world, holders),
        "runs": {
            name: runs for part in world.gather_json(get_runs(model)) for name, runs in part.items()
        },
    }
    shard = _plan_shard(tensors, world)
    needed = sum(world.gather_json(sum(tensor.num_bytes for tensor in shard.planned))) + MIB * (
        world.size + 1
    )
    place = run_on_rank_0(world, lambda: _begin(root, step, needed))
    temporary, final = root / place["temporary"], root / place["final"]
    try:
        run_on_all_ranks(world, lambda: check_shared(temporary))
        records = run_on_all_ranks(world, lambda: _write_shard(temporary, shard, world))
        if optimizer is not None:
            records.append(
                run_on_all_ranks(world, lambda: save_rng(temporary, world.rank, world.device))
            )
        gathered = world.gather_json([asdict(record) for record in records])
        all_records = [FileRecord(**record) for part in gathered for record in part]
        run_on_rank_0(
            world,
            lambda: _publish(
                temporary, final, step, place["sequence"], world.size, all_records, settings
            ),
        )
    except BaseException:
        if world.rank == 0:
            files.discard(temporary)
        raise
    if keep is not None:
        run_on_rank_0(world, lambda: prune_states(root, keep))
    return final


def _begin(root: Path, step: int, needed: int) -> dict[str, Any]:
    """Rank 0: room on the disk, a new name, a new sequence number, and an empty temporary
    folder.
    """
    root.mkdir(parents=True, exist_ok=True)
    files.remove_leftovers(root, f"{PREFIX}*")
    files.require_space(root, needed, f"the state of step {step}")
    name = find_free(root / f"{PREFIX}{step}").name
    sequence = 1 + max((manifest.sequence for _, manifest in list_readable_states(root)), default=0)
    temporary = files.make_temporary_path(root / name)
    files.make_folder(temporary)
    return {"temporary": temporary.name, "final": name, "sequence": sequence}


# One safetensors file a rank, written piece by piece, and no pickle. torch plans who writes and who
# reads which part of a sharded tensor; its own storage either pickles its metadata or serializes a
# rank's whole share in host memory. Here every header is JSON, tensors stream to the disk in
# pieces, and the hash of a file is made on the way. The metadata key is the one that torch's
# HuggingFaceStorageReader knows.
SHARDING = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class _Shard:
    """What a rank writes of a state."""

    planned: list[PlannedTensor]
    sharding: dict[
        str, dict[str, list[int]]
    ]  # of each tensor: where its part begins, and the shape of the whole
    pieces: Iterator[torch.Tensor]  # the parts, each taken when it is written


def _plan_shard(tensors: dict[str, torch.Tensor], world: RankGroup) -> _Shard:
    """Return this rank's share of what the ranks have; of what several have, one writes it.
    Collective.
    """
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors)
    plans = [planner.create_local_plan()] * world.size
    if world.size > 1:
        dist.all_gather_object(plans, plans[world.rank])
    planned: list[PlannedTensor] = []
    sharding: dict[str, dict[str, list[int]]] = {}
    items: list[WriteItem] = []
    for item in planner.finish_plan(planner.create_global_plan(plans)[0][world.rank]).items:
        name, data = item.index.fqn, item.tensor_data
        assert data is not None  # all that is saved are tensors
        if not math.prod(data.chunk.sizes):
            continue
        if name in sharding:
            raise RuntimeError("a rank holds two parts of one tensor; a file can name it once")
        items.append(item)
        planned.append(PlannedTensor(name, data.properties.dtype, tuple(data.chunk.sizes)))
        sharding[name] = {
            "saved_offsets": list(data.chunk.offsets),
            "global_shape": list(data.size),
        }
    return _Shard(planned, sharding, (planner.resolve_data(item) for item in items))


def _write_shard(folder: Path, shard: _Shard, world: RankGroup) -> list[FileRecord]:
    """Write this rank's tensor file and flush it; a rank with nothing to write has none."""
    if not shard.planned:
        return []
    path = folder / f"shard-{world.rank + 1:05d}-of-{world.size:05d}.safetensors"
    metadata = {"format": "pt", SHARDING: json.dumps(shard.sharding, separators=(",", ":"))}
    return [write_tensor_file(path, shard.planned, shard.pieces, metadata)]


def _publish(
    temporary: Path,
    final: Path,
    step: int,
    sequence: int,
    world_size: int,
    records: list[FileRecord],
    settings: dict[str, Any],
) -> None:
    own = files.write_json(temporary / STATE, settings)
    write_manifest(temporary, step, sequence, world_size, [*records, own])
    files.publish_folder(temporary, final)


def find_state(root: Path, resume: str, world: RankGroup) -> Path | None:
    """The state to go on from, verified byte by byte, the same on all ranks. Collective.

    root: `output_dir/state`. resume: `latest`, or the path of a state folder. `latest` takes the
    newest that is whole, and warns of damaged ones; None if there is no state at all. Raises
    CheckpointError if none is whole, or if the given folder is not.
    """
    if resume != "latest":
        path = Path(resume)
        damage = verify_state(path, world)
        if damage:
            raise CheckpointError(describe_damaged_state(resume, damage))
        return path
    names = run_on_rank_0(world, lambda: _list_candidates(root))
    damages: list[str] = []
    for name in names:
        damage = verify_state(root / name, world)
        if damage is None:
            if damages and world.rank == 0:
                for line in damages:
                    get_logger().warning("warning: %s; it is not used", line)
                get_logger().warning("warning: resuming from %s", root / name)
            return root / name
        damages.append(f"{root / name}: {damage}")
    if damages:
        raise CheckpointError(
            f"{root}: no intact checkpoint ({'; '.join(damages)}); to start over set"
            " overwrite_output_dir=true or another output_dir"
        )
    if world.rank == 0:
        get_logger().info(
            "resume=latest: %s holds no state yet; starting from the first step", root
        )
    return None


def _list_candidates(root: Path) -> list[str]:
    """Rank 0: names of all state folders, newest first; those without a readable manifest first, to
    be reported.
    """
    if not root.is_dir():
        return []
    try:
        files.remove_leftovers(root, f"{PREFIX}*")
    except OSError:  # a disk that is read only may still be read
        get_logger().warning("warning: %s: what a killed save left could not be removed", root)
    readable = [path for path, _ in list_readable_states(root)]
    unreadable = [path for path in list_state_folders(root) if path not in readable]
    return [path.name for path in [*unreadable, *readable]]


def verify_state(path: Path, world: RankGroup) -> str | None:
    """What is wrong with a state's folder, or None. Collective.

    Rank 0 looks at names and sizes, all ranks hash their share."""
    damage = run_on_rank_0(world, lambda: _find_missing_files(path))
    if damage:
        return damage
    manifest = run_on_all_ranks(world, lambda: _read_whole_manifest(path))
    found = world.gather_json(find_damaged_file(path, manifest, world.rank, world.size))
    return next((line for line in found if line), None)


def _find_missing_files(path: Path) -> str | None:
    if not path.is_dir():
        return "no such folder"
    try:
        manifest = check_presence(path)
    except DamagedState as damage:
        return str(damage)
    if STATE_NAME.fullmatch(path.name) and not re.fullmatch(
        rf"{PREFIX}{manifest.step}(-\d+)?", path.name
    ):
        return f"its manifest is that of step {manifest.step}"
    return None


def _read_whole_manifest(path: Path) -> Manifest:
    try:
        manifest = check_presence(path)
        if all(record.name != STATE for record in manifest.files):
            raise DamagedState(f"{STATE} is missing")
        return manifest
    except DamagedState as damage:
        raise CheckpointError(
            f"{path}: {damage}; find_state takes one that is whole: set resume=latest"
        ) from damage


def load_state(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    world: RankGroup,
    place_state: PlaceState = None,
) -> dict[str, Any]:
    """Load a state that `find_state` has verified, and return the `extra` it was saved with.
    Collective.

    The model must be materialized, and the optimizer built over its parameters; None: what the
    state holds of the model alone is read, to look at or to export. Works for any world size;
    random number generators are restored when it is the one that saved. place_state: memory for an
    offloaded state; None: next to its parameter. Raises CheckpointError if the state is that of
    another model, dtype or optimizer.
    """
    manifest = run_on_all_ranks(world, lambda: _read_whole_manifest(path))
    names = [record.name for record in manifest.files if record.name.startswith("shard-")]
    saved = run_on_all_ranks(world, lambda: _read_settings(path, optimizer is not None))
    holders = find_holders(model, world)
    adapters = gather_adapter_use(model, world, holders)
    run_on_all_ranks(world, lambda: check_adapter_use(path, saved.get("adapters"), adapters))
    metadata = run_on_all_ranks(world, lambda: _read_shards(path, names))
    targets = run_on_all_ranks(
        world, lambda: _make_targets(path, metadata, model, optimizer, holders, place_state)
    )
    mark = hash_frozen_parameters(model, world, holders)
    run_on_all_ranks(world, lambda: check_frozen_hash(path, saved.get("frozen"), mark))
    run_on_all_ranks(world, lambda: _read_tensors(path, metadata, targets))
    _reorder_fused(targets, saved.get("runs", {}), model)
    if optimizer is None:
        return saved["extra"]
    groups = gather_optimizer_settings(model, optimizer, world, holders)["groups"]
    run_on_all_ranks(
        world, lambda: restore_settings(model, optimizer, saved["optimizer"], str(path), groups)
    )
    if manifest.world_size == world.size:
        run_on_all_ranks(world, lambda: load_rng(path, world.rank, world.device))
    return saved["extra"]


def has_adapters(path: Path) -> bool:
    """Whether a state that `find_state` has verified is one of adapters, without the frozen
    weights.
    """
    return read_state_json(path).get("adapters") is not None


def _read_settings(path: Path, with_optimizer: bool) -> dict[str, Any]:
    saved = read_state_json(path)
    if with_optimizer and saved.get("optimizer") is None:
        raise CheckpointError(
            f"{path}: holds the weights of a best step and no optimizer, and cannot be resumed"
            " from; resume=latest goes on from the newest state, `tune export` makes a model or an"
            " adapter of these weights"
        )
    return saved


def _read_shards(folder: Path, names: Sequence[str]) -> Metadata:
    """Return what the files hold, by their headers: of each tensor type, global shape, and where
    each part lies.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, str] = {}
    for file_name in names:
        header = read_header(folder / file_name)
        sharding = parse_json(header.metadata[SHARDING])
        for name, entry in header.tensors.items():
            offsets = torch.Size(sharding[name]["saved_offsets"])
            shape = torch.Size(sharding[name]["global_shape"])
            properties = TensorProperties(dtype=DTYPES[entry.dtype])
            saved = tensors.setdefault(name, TensorStorageMetadata(properties, shape, []))
            saved.chunks.append(ChunkStorageMetadata(offsets, torch.Size(entry.shape)))
            places[MetadataIndex(name, offsets)] = file_name
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places)


def _read_tensors(path: Path, metadata: Metadata, targets: dict[str, torch.Tensor]) -> None:
    """Copy each planned slice straight into this rank's tensors; one file is open at a time.

    It plans alone: the ranks of a pipeline have tensors of other names.
    """
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, metadata)
    by_file: dict[str, list[ReadItem]] = {}
    for item in planner.create_local_plan().items:
        by_file.setdefault(metadata.storage_data[item.storage_index], []).append(item)
    with phase(f"reading {path.name}"):
        for file_name, items in by_file.items():
            with safe_open(str(path / file_name), framework="pt") as file:
                for item in items:
                    ranges = zip(item.storage_offsets, item.lengths, strict=True)
                    part = file.get_slice(item.storage_index.fqn)[
                        tuple(slice(at, at + n) for at, n in ranges)
                    ]
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part.view(target.shape))


@torch.no_grad()
def _reorder_fused(
    targets: dict[str, torch.Tensor], saved: dict[str, Any], model: nn.Module
) -> None:
    """Where the ranks that saved held a fused matrix in another order than these do, puts it in
    theirs. Collective.
    """
    for full_name, tensor in targets.items():
        name = get_parameter_name(full_name)
        dim, runs = saved.get(name, (0, ()))
        before = (dim, tuple((start, stop) for start, stop in runs)) if runs else None
        now = get_runs(model).get(name)
        if not tensor.dim() or before == now:
            continue
        dim = dim if now is None else now[0]
        if tensor.shape[dim] != model.get_parameter(name).shape[dim]:
            raise CheckpointError(
                f"optimizer.state_bits: found states of {name} in blocks that another"
                " parallel.tensor has in another order; resume with the run's own parallel.tensor"
            )
        in_file = restore_file_order(gather_whole(tensor), before)
        for part, offset in list_local_parts(model, name, tensor):
            part.copy_(
                in_file[
                    tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))
                ]
            )


def _make_targets(
    path: Path,
    metadata: Metadata,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    holders: Holders,
    place_state: PlaceState,
) -> dict[str, torch.Tensor]:
    """This rank's tensors to fill, after comparing names, shapes and types of the model with the
    saved ones.
    """
    saved = {
        name: (entry.properties.dtype, tuple(entry.size))
        for name, entry in metadata.state_dict_metadata.items()
    }
    own = list_model_tensors(model, holders)
    saved_model = {name for name in saved if name.startswith(f"{MODEL}/")}
    unknown = saved_model - {f"{MODEL}/{name}" for name in holders.list_saved_names()}
    for name in sorted(
        unknown | {name for name, tensor in own.items() if tensor.numel()} - saved_model
    ):
        holder = "the state" if name in saved_model else "the model"
        raise CheckpointError(
            f"{path}: is the state of another model: only {holder} has {name.split('/', 1)[1]}; "
            "resume with the run's own config"
        )
    for name in sorted(saved_model & own.keys()):
        dtype, shape = saved[name]
        here = (own[name].dtype, tuple(own[name].shape))
        if (dtype, shape) != here:
            raise CheckpointError(
                f"{path}: {name.split('/', 1)[1]} is {describe_tensor(dtype, shape)}, this run's"
                f" model has {describe_tensor(*here)}; resume with the run's own config"
            )
    states = {name: entry for name, entry in saved.items() if name.startswith(f"{OPTIMIZER}/")}
    filled = {name: tensor for name, tensor in own.items() if name in saved_model}
    if optimizer is None:
        return filled
    return filled | make_optimizer_states(model, optimizer, states, str(path), holders, place_state)


# States of the random number generators of one rank, as uint8 tensors in a safetensors file.


def _get_rng_file_name(rank: int) -> str:
    """Name of the rank's file in a state folder."""
    return f"rng-{rank + 1:05d}.safetensors"


def save_rng(folder: Path, rank: int, device: torch.device) -> FileRecord:
    """Write this rank's generators: the host's, and that of its device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    plan = [PlannedTensor(name, state.dtype, tuple(state.shape)) for name, state in states.items()]
    return write_tensor_file(
        folder / _get_rng_file_name(rank), plan, states.values(), {"format": "pt"}
    )


def load_rng(folder: Path, rank: int, device: torch.device) -> None:
    """Sets this rank's generators as they were saved; a device type that has no saved state is left
    alone.
    """
    with safe_open(str(folder / _get_rng_file_name(rank)), framework="pt") as file:
        torch.set_rng_state(file.get_tensor("cpu"))
        if device.type != "cpu" and device.type in file.keys():
            torch.get_device_module(device).set_rng_state(file.get_tensor(device.type), device)
