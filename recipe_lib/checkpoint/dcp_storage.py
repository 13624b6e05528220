"""Storage for torch.distributed.checkpoint: one safetensors file a rank, written piece by piece, and no pickle.

torch plans who writes and who reads which part of a sharded tensor. Its own storage either pickles its metadata or
serializes a rank's whole share in host memory; here every header is JSON, tensors stream to the disk in pieces, and
the hash of a file is made on the way. The metadata key is the one that torch's HuggingFaceStorageReader knows.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from recipe_lib.checkpoint.tensor_files import DTYPES, PlannedTensor, read_header, write_tensor_file
from recipe_lib.files import FileRecord
from recipe_lib.reading import parse_json

SHARDING = "DCP_SHARDING_INFO"


def shard_name(rank: int, size: int) -> str:
    """Name of a rank's file in a state folder."""
    return f"shard-{rank + 1:05d}-of-{size:05d}.safetensors"


class ShardWriter(StorageWriter):
    """Writes this rank's part into `folder/shard-R-of-N.safetensors`; `records` then holds the file, if any."""

    def __init__(self, folder: Path, rank: int, size: int):
        self.path = folder / shard_name(rank, size)
        self.records: list[FileRecord] = []

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """A writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Nothing to prepare: the folder is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the planned parts and flushes the file; a rank without any writes no file."""
        items = [item for item in plan.items if math.prod(_chunk(item).sizes)]
        if items:
            planned = [
                PlannedTensor(item.index.fqn, item.tensor_data.properties.dtype, tuple(_chunk(item).sizes))
                for item in items
            ]
            if len({tensor.name for tensor in planned}) != len(planned):
                raise RuntimeError("a rank holds two parts of one tensor; a file can name it once")
            sharding = {
                item.index.fqn: {
                    "saved_offsets": list(_chunk(item).offsets),
                    "global_shape": list(item.tensor_data.size),
                }
                for item in items
            }
            metadata = {"format": "pt", SHARDING: json.dumps(sharding, separators=(",", ":"))}
            pieces = (planner.resolve_data(item) for item in items)
            self.records.append(write_tensor_file(self.path, planned, pieces, metadata))
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: what the metadata would say is in the headers."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Only used where torch is to choose a storage by itself."""
        return False


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
        raise RuntimeError(f"{item.index.fqn} is not a tensor; only tensors are saved here")
    return item.tensor_data.chunk


def read_shards(folder: Path, names: Sequence[str]) -> Metadata:
    """What the files hold, from their headers: per tensor its type, its global shape, and where each part lies."""
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


class ShardReader(StorageReader):
    """Reads the parts that this rank needs out of any number of ranks' files."""

    def __init__(self, folder: Path, metadata: Metadata):
        """metadata: from `read_shards`."""
        self.folder, self.metadata = folder, metadata

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """A reader serves one load."""

    def read_metadata(self) -> Metadata:
        """What `read_shards` found."""
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies each planned slice straight into its tensor; one file is open at a time."""
        by_file: dict[str, list] = {}
        for item in plan.items:
            by_file.setdefault(self.metadata.storage_data[item.storage_index], []).append(item)
        for file_name, items in by_file.items():
            with safe_open(str(self.folder / file_name), framework="pt") as file:
                for item in items:
                    ranges = zip(item.storage_offsets, item.lengths, strict=True)
                    part = file.get_slice(item.storage_index.fqn)[tuple(slice(at, at + n) for at, n in ranges)]
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part.view(target.shape))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Only used where torch is to choose a storage by itself."""
        return False
