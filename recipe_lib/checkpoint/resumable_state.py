"""Save, verify and load the state from which a run resumes.

A run calls `save_state` every so many steps, and `find_state` and `load_state` when it resumes. A
state is a folder `output_dir/state/step_N` that is either complete or not there; `save_state` lists
its files. It may be loaded with another number of ranks and other parallelism than it was saved
with. "Collective": all ranks must call the function.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
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
    DtypeAndShape,
    PlaceState,
    check_adapter_settings,
    check_frozen_hash,
    gather_adapter_settings,
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
from recipe_lib.logs import get_logger
from recipe_lib.models.language_model import get_runs, list_local_parts, restore_file_order
from recipe_lib.models.meta_init import get_slices
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
    """Save everything that a run needs to go on, as `root/step_N`; return the new folder.

    The folder has these files, and its name only once all of them are flushed; older states are
    removed after that:

        shard-00001-of-00002.safetensors ...   model and optimizer, a file for each rank's shards
        rng-00001.safetensors ...              random number generators, per rank
        state.json                             step, data position, optimizer settings
        manifest.json                          every file's size and SHA-256; written last

    Frozen parameters are not saved but hashed, so that `load_state` can check them. A step that is
    saved again becomes `step_N-2`, and so on: a folder is never written over. Collective.

    Args:
        root: `output_dir/state`, on a disk that all ranks share.
        step: number of optimizer steps done.
        model: plain or sharded.
        optimizer: None saves the weights alone, for a best step.
        extra: JSON values that `load_state` returns, such as the position in the data.
        world: all ranks.
        keep: number of newest states that stay, older ones are removed; None: all stay.

    Raises StorageError on every rank if any rank fails; then nothing has changed on the disk.
    """
    holders = find_holders(model, world)
    # Before the optimizer's tensors: this call makes FSDP free gathered parameters.
    tensors = list_model_tensors(model, holders)
    optimizer_settings = None
    if optimizer is not None:
        tensors |= run_on_all_ranks(world, lambda: list_optimizer_tensors(model, optimizer))
        optimizer_settings = gather_optimizer_settings(
            model, optimizer=optimizer, world=world, holders=holders
        )
    tensors = {
        full_name: tensor
        for full_name, tensor in tensors.items()
        if holders.is_ours(get_parameter_name(full_name))
    }
    settings: dict[str, Any] = {
        "extra": extra,
        "optimizer": optimizer_settings,
        # What the loading run's model must have too: adapters of these settings, frozen weights of
        # this hash.
        "adapters": gather_adapter_settings(model, world, holders),
        "frozen": hash_frozen_parameters(model, world, holders),
        # The order of the rows of fused matrices, which depends on the tensor parallel size.
        "runs": dict(chain.from_iterable(map(dict.items, world.gather_json(get_runs(model))))),
    }
    shard = _plan_shard(tensors, world)
    num_bytes = sum(world.gather_json(sum(tensor.num_bytes for tensor in shard.planned)))
    num_bytes += MIB * (world.size + 1)  # headers, generators, state.json, manifest
    folder_names = run_on_rank_0(world, lambda: _make_state_folder(root, step, num_bytes))
    temporary = root / folder_names["temporary"]
    final = root / folder_names["final"]

    def publish(records: list[files.FileRecord]) -> None:
        records.append(files.write_json(temporary / STATE, settings))
        # Last: a folder without a manifest was never finished.
        write_manifest(
            temporary,
            step=step,
            sequence=folder_names["sequence"],
            world_size=world.size,
            records=records,
        )
        files.publish_folder(temporary, final)

    try:
        run_on_all_ranks(world, lambda: check_shared(temporary))
        records = run_on_all_ranks(world, lambda: _write_shard(temporary, shard, world))
        if optimizer is not None:
            records.append(
                run_on_all_ranks(world, lambda: save_rng(temporary, world.rank, world.device))
            )
        gathered = world.gather_json([asdict(record) for record in records])
        all_records = [files.FileRecord(**fields) for fields in chain.from_iterable(gathered)]
        run_on_rank_0(world, lambda: publish(all_records))
    except BaseException:
        if world.rank == 0:
            files.discard(temporary)
        raise
    if keep is not None:
        run_on_rank_0(world, lambda: prune_states(root, keep))
    return final


def _make_state_folder(root: Path, step: int, num_bytes: int) -> dict[str, Any]:
    """Check the room on the disk and make a temporary folder, on rank 0.

    num_bytes: of the state. Return a dict with the names of the temporary folder (`temporary`) and
    of the finished one (`final`), and the state's number among all saved ones (`sequence`).
    """
    root.mkdir(parents=True, exist_ok=True)
    files.remove_leftovers(root, f"{PREFIX}*")  # first: they take up the space
    files.require_space(root, num_bytes, f"the state of step {step}")
    name = find_free(root / f"{PREFIX}{step}").name
    # A count tells which state is newest: clocks of machines differ, and a run that resumed from
    # an older state saves earlier steps later.
    sequence = 1 + max((manifest.sequence for _, manifest in list_readable_states(root)), default=0)
    temporary = files.make_temporary_path(root / name)
    files.make_folder(temporary)
    return {"temporary": temporary.name, "final": name, "sequence": sequence}


# Each rank writes one safetensors file. The planners of torch.distributed.checkpoint decide which
# rank writes and reads which part of a sharded tensor. Its storage writers are not used: they
# pickle their metadata, or serialize all of a rank's tensors in host memory. Here every header is
# JSON, tensors are streamed to the disk, and a file's hash is computed on the way. The metadata key
# is the one that torch's HuggingFaceStorageReader reads.
SHARDING = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class _Shard:
    """The tensors of a state that one rank writes."""

    # Name, dtype and local shape of each.
    planned: list[PlannedTensor]
    # Name -> {`saved_offsets`: where the local part begins, by dimension; `global_shape`}.
    sharding: dict[str, dict[str, list[int]]]
    # The tensors' data in the same order, each fetched when it is written.
    pieces: Iterator[torch.Tensor]


def _plan_shard(tensors: dict[str, torch.Tensor], world: RankGroup) -> _Shard:
    """Return the tensors that this rank writes. Collective.

    tensors: all that this rank has. Of a replicated tensor torch's planner lets one rank write it.
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
        name = item.index.fqn
        data = item.tensor_data
        assert data is not None  # it is None only for objects that are no tensors
        if not math.prod(data.chunk.sizes):  # an empty shard, where there are more ranks than rows
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


def _write_shard(folder: Path, shard: _Shard, world: RankGroup) -> list[files.FileRecord]:
    if not shard.planned:
        return []
    path = folder / f"shard-{world.rank + 1:05d}-of-{world.size:05d}.safetensors"
    metadata = {"format": "pt", SHARDING: json.dumps(shard.sharding, separators=(",", ":"))}
    return [write_tensor_file(path, shard.planned, pieces=shard.pieces, metadata=metadata)]


def find_state(root: Path, resume: str, world: RankGroup) -> Path | None:
    """Return the folder of the state to resume from, verified by its hashes. Collective.

    All ranks return the same folder; None if there is no state at all.

    root: `output_dir/state`. resume: `latest` for the newest undamaged state, with warnings about
    damaged ones; or the path of a state folder. Raises CheckpointError if all states are damaged,
    or the given one is.
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
    """Return the names of all state folders in `root`, newest first, on rank 0.

    Those without a readable manifest come first, so that they are reported.
    """
    if not root.is_dir():
        return []
    try:
        files.remove_leftovers(root, f"{PREFIX}*")
    except OSError:  # a read-only disk can still be resumed from
        get_logger().warning("warning: %s: what a killed save left could not be removed", root)
    readable = [path for path, _ in list_readable_states(root)]
    unreadable = [path for path in list_state_folders(root) if path not in readable]
    return [path.name for path in [*unreadable, *readable]]


def verify_state(path: Path, world: RankGroup) -> str | None:
    """Return what is wrong with a state's folder, as a text; None: nothing. Collective.

    Rank 0 compares names and sizes of files, then each rank hashes a part of the files.
    """
    # Names and sizes first: a missing or truncated file is found without hashing gigabytes.
    damage = run_on_rank_0(world, lambda: _find_missing_files(path))
    if damage:
        return damage
    manifest = run_on_all_ranks(world, lambda: _read_whole_manifest(path))
    damage_here = find_damaged_file(path, manifest, part=world.rank, parts=world.size)
    return next((line for line in world.gather_json(damage_here) if line), None)


# Return what is wrong with names and sizes of a state's files, as a text; None: nothing.
def _find_missing_files(path: Path) -> str | None:
    if not path.is_dir():
        return "no such folder"
    try:
        manifest = check_presence(path)
    except DamagedState as damage:
        return str(damage)
    is_named_after_step = re.fullmatch(rf"{PREFIX}{manifest.step}(-\d+)?", path.name)
    # A folder that the user has renamed otherwise may hold any step.
    if STATE_NAME.fullmatch(path.name) and not is_named_after_step:
        return f"its manifest is that of step {manifest.step}"
    return None


# Return the manifest of a state. Raises CheckpointError if one of its files is missing.
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
    """Load a state that `find_state` has verified; return the `extra` that it was saved with.

    The number of ranks may differ from that of the run that saved; random number generators are
    restored only if it does not. Collective.

    Args:
        path: folder of the state.
        model: materialized (not on the meta device), plain or sharded.
        optimizer: over the model's parameters; None: only the model is loaded, for an export.
        world: all ranks.
        place_state: function that allocates an offloaded optimizer state; None: states are on their
            parameters' devices.

    Raises CheckpointError if the state is of another model, dtype or optimizer.
    """
    manifest = run_on_all_ranks(world, lambda: _read_whole_manifest(path))
    shard_names = [record.name for record in manifest.files if record.name.startswith("shard-")]
    saved = run_on_all_ranks(world, lambda: _read_settings(path, optimizer is not None))
    holders = find_holders(model, world)
    adapters = gather_adapter_settings(model, world, holders)
    run_on_all_ranks(world, lambda: check_adapter_settings(path, saved.get("adapters"), adapters))
    metadata = run_on_all_ranks(world, lambda: _read_shards(path, shard_names))
    targets = run_on_all_ranks(
        world,
        lambda: _make_targets(
            path,
            metadata,
            model=model,
            optimizer=optimizer,
            holders=holders,
            place_state=place_state,
        ),
    )
    # Before the first value of the model changes: after an error it is as it was.
    frozen_hash = hash_frozen_parameters(model, world, holders)
    run_on_all_ranks(world, lambda: check_frozen_hash(path, saved.get("frozen"), frozen_hash))
    run_on_all_ranks(world, lambda: _read_tensors(path, metadata, targets))
    _reorder_fused(targets, saved.get("runs", {}), model)
    if optimizer is None:
        return saved["extra"]
    groups = gather_optimizer_settings(model, optimizer=optimizer, world=world, holders=holders)[
        "groups"
    ]
    run_on_all_ranks(
        world,
        lambda: restore_settings(
            model, optimizer, saved["optimizer"], path=path, current_groups=groups
        ),
    )
    # Each rank has its own generators: another number of ranks draws other dropout masks.
    if manifest.world_size == world.size:
        run_on_all_ranks(world, lambda: load_rng(path, world.rank, world.device))
    return saved["extra"]


def has_adapters(path: Path) -> bool:
    """Return True if a verified state holds adapters, and not a model's own weights."""
    return read_state_json(path).get("adapters") is not None


# Return the contents of state.json. with_optimizer: raise CheckpointError if it has no optimizer.
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
    """Return dtype, global shape and saved parts of each tensor, and the file of each part.

    names: of the folder's tensor files.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    file_names: dict[MetadataIndex, str] = {}
    for file_name in names:
        header = read_header(folder / file_name)
        sharding = parse_json(header.metadata[SHARDING])
        for name, entry in header.tensors.items():
            offsets = torch.Size(sharding[name]["saved_offsets"])
            shape = torch.Size(sharding[name]["global_shape"])
            properties = TensorProperties(dtype=DTYPES[entry.dtype])
            saved = tensors.setdefault(name, TensorStorageMetadata(properties, shape, []))
            saved.chunks.append(ChunkStorageMetadata(offsets, torch.Size(entry.shape)))
            file_names[MetadataIndex(name, offsets)] = file_name
    return Metadata(state_dict_metadata=dict(tensors), storage_data=file_names)


def _read_tensors(path: Path, metadata: Metadata, targets: dict[str, torch.Tensor]) -> None:
    """Copy the saved slices into this rank's tensors `targets`; one file is open at a time."""
    # Planned without the other ranks: in a pipeline they have tensors of other names.
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, metadata)
    items_by_file: dict[str, list[ReadItem]] = {}
    for item in planner.create_local_plan().items:
        items_by_file.setdefault(metadata.storage_data[item.storage_index], []).append(item)
    with phase(f"reading {path.name}"):
        for file_name, items in items_by_file.items():
            with safe_open(str(path / file_name), framework="pt") as file:
                for item in items:
                    slices = get_slices(item.storage_offsets, item.lengths)
                    part = file.get_slice(item.storage_index.fqn)[slices]
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part.view(target.shape))


@torch.no_grad()
def _reorder_fused(
    targets: dict[str, torch.Tensor], saved: dict[str, Any], model: nn.Module
) -> None:
    """Put the rows of fused matrices into the order of this run's ranks. Collective.

    A fused matrix (such as gate and up) has its rows in an order that depends on the size of tensor
    parallelism.

    saved: the order in the state: parameter -> (dimension, ranges [start, stop] of rows of the
    checkpoint's matrix, in the state's order).
    """
    for full_name, tensor in targets.items():
        name = get_parameter_name(full_name)
        dim, runs = saved.get(name, (0, ()))
        saved_order = (dim, tuple((start, stop) for start, stop in runs)) if runs else None
        order = get_runs(model).get(name)
        if not tensor.dim() or saved_order == order:
            continue
        dim = dim if order is None else order[0]
        # A quantized optimizer state is stored in blocks of several rows: it cannot be reordered.
        if tensor.shape[dim] != model.get_parameter(name).shape[dim]:
            raise CheckpointError(
                f"optimizer.state_bits: found states of {name} in blocks that another"
                " parallel.tensor has in another order; resume with the run's own parallel.tensor"
            )
        in_file_order = restore_file_order(gather_whole(tensor), saved_order)
        for part, offset in list_local_parts(model, name, tensor):
            part.copy_(in_file_order[get_slices(offset, part.shape)])


def _make_targets(
    path: Path,
    metadata: Metadata,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    holders: Holders,
    place_state: PlaceState,
) -> dict[str, torch.Tensor]:
    """Return this rank's tensors of model and optimizer that are to be filled, by full name.

    A full name is `model/NAME` or `optimizer/STATE/NAME`. Raises CheckpointError if the model's
    names, shapes or dtypes are not the saved ones.
    """
    saved = {
        name: DtypeAndShape(entry.properties.dtype, tuple(entry.size))
        for name, entry in metadata.state_dict_metadata.items()
    }
    model_tensors = list_model_tensors(model, holders)
    saved_names = {name for name in saved if name.startswith(f"{MODEL}/")}
    # Compared with the names on all ranks: the state has the tensors of all pipeline stages.
    unknown_names = saved_names - {f"{MODEL}/{name}" for name in holders.list_saved_names()}
    # Empty shards are not saved.
    missing_names = {name for name, tensor in model_tensors.items() if tensor.numel()} - saved_names
    for name in sorted(unknown_names | missing_names):
        holder = "the state" if name in saved_names else "the model"
        raise CheckpointError(
            f"{path}: is the state of another model: only {holder} has {name.split('/', 1)[1]}; "
            "resume with the run's own config"
        )
    for name in sorted(saved_names & model_tensors.keys()):
        tensor = model_tensors[name]
        current = DtypeAndShape(tensor.dtype, tuple(tensor.shape))
        if saved[name] != current:
            raise CheckpointError(
                f"{path}: {name.split('/', 1)[1]} is {saved[name].describe()}, this run's"
                f" model has {current.describe()}; resume with the run's own config"
            )
    targets = {name: tensor for name, tensor in model_tensors.items() if name in saved_names}
    if optimizer is None:
        return targets
    states = {name: entry for name, entry in saved.items() if name.startswith(f"{OPTIMIZER}/")}
    return targets | make_optimizer_states(
        model, optimizer, states, path=path, holders=holders, place_state=place_state
    )


def _get_rng_file_name(rank: int) -> str:
    return f"rng-{rank + 1:05d}.safetensors"


def save_rng(folder: Path, rank: int, device: torch.device) -> files.FileRecord:
    """Write the states of this rank's random number generators: of the CPU and of its device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    plan = [PlannedTensor(name, state.dtype, tuple(state.shape)) for name, state in states.items()]
    path = folder / _get_rng_file_name(rank)
    return write_tensor_file(path, plan, pieces=states.values(), metadata={"format": "pt"})


def load_rng(folder: Path, rank: int, device: torch.device) -> None:
    """Restore this rank's random number generators; its device's only if its state was saved."""
    with safe_open(str(folder / _get_rng_file_name(rank)), framework="pt") as file:
        torch.set_rng_state(file.get_tensor("cpu"))
        if device.type != "cpu" and device.type in file.keys():
            torch.get_device_module(device).set_rng_state(file.get_tensor(device.type), device)
