"""Load a PEFT adapter from a folder into a model with adapters.

Each rank reads its own slices. Ranks, scalings and fused modules of the file need not be those of
the model: what differs is converted while it is read.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from recipe_lib.adapters.layers import AdaptedModule
from recipe_lib.adapters.peft_names import (
    EMBEDDING_A,
    EMBEDDING_B,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    FileModule,
    MergedRows,
    list_targets,
    unstack_expert_factors,
)
from recipe_lib.checkpoint.adapter_files import (
    AdapterFile,
    check_fits,
    find_used_parts,
    is_stacked,
    read_adapter,
)
from recipe_lib.checkpoint.safetensors_files import FileTensor
from recipe_lib.checkpoint.weight_loading import find_extras_to_read, read_part
from recipe_lib.errors import CheckpointError
from recipe_lib.models.language_model import LanguageModel, list_local_parts
from recipe_lib.models.meta_init import find_fully_saved_tensors
from recipe_lib.models.spec import ModelSpec


@torch.no_grad()
def load_adapter(model: nn.Module, spec: ModelSpec, folder: Path, *, some: bool = False) -> int:
    """Fill the model's adapters from a PEFT adapter; return the number of modules filled.

    An adapter of a lower rank than the model's is filled up with zeros, and stays at its rank:
    where A and B are both zero, so are their gradients. One that is scaled by another number has
    the ratio put into B. Extra parameters, which a recipe added, are read too, and the model must
    have those that the folder has. Weights of the base that the folder brings along take their
    places (see `SavedWeights`).

    model: with adapters, materialized, plain or sharded. folder: of an adapter that `check_adapter`
    has let pass. some: a module that has no adapter in the folder (those of some layers) is left as
    `init_adapters` made it, which changes nothing; without it that is a fault.

    Raises CheckpointError.
    """
    adapter = read_adapter(folder)
    saved = check_fits(adapter, spec)
    if isinstance(model, LanguageModel):
        saved.put_into(model)
    adapted = {
        name: module for name, module in model.named_modules() if isinstance(module, AdaptedModule)
    }
    filled_names = set()
    modules = adapter.list_modules(spec)
    for module in modules:
        # In a pipeline another rank may have the module's layer.
        parts = [part for part in module.parts if part.module in adapted]
        for number, part in enumerate(parts):
            _fill_module(
                adapter,
                module,
                part=part,
                number=number,
                num_parts=len(parts),
                target=adapted[part.module],
                model=model,
            )
            filled_names.add(part.module)
    _fill_extras(adapter, model)
    if filled_names != adapted.keys() and not some:
        targets = list_targets(find_used_parts(adapter, module) for module in modules)
        raise CheckpointError(
            f"{folder}: has no adapter for {min(adapted.keys() - filled_names)};"
            f" set lora.target_modules=[{','.join(targets)}]"
        )
    return len(filled_names)


def _fill_extras(adapter: AdapterFile, model: nn.Module) -> None:
    file_extras = {
        name: FileTensor(adapter.path, entry, extra=True)
        for name, (_, entry) in adapter.extras.items()
    }
    tensors = find_fully_saved_tensors(model)
    names = find_extras_to_read(model, adapter.folder, file_extras)
    with safe_open(str(adapter.path), framework="pt") as file:
        for name in names:
            for local, offsets in list_local_parts(model, name, tensors[name]):
                read_part(file.get_slice(adapter.extras[name][0]), local, offsets)
    if isinstance(model, LanguageModel):
        model.loaded_extras |= frozenset(names)


def _fill_module(
    adapter: AdapterFile,
    module: FileModule,
    *,
    part: MergedRows,
    number: int,
    num_parts: int,
    target: AdaptedModule,
    model: nn.Module,
) -> None:
    """Fill the adapter of one module of ours from a module of the file.

    part: our module in the file's, which may be fused. number, num_parts: which of the fused
    module's adapted parts it is, and how many there are.
    """
    settings = target.settings
    is_stack = is_stacked(adapter, module, parts=num_parts, rank=settings.rank)
    first = number * settings.rank if is_stack else 0  # of the stack's ranks, those of this part
    rank = settings.rank if is_stack else adapter.config.get_rank(module)
    if rank > settings.rank:
        raise CheckpointError(
            f"{adapter.folder}: has rank {rank}, found lora.rank={settings.rank}; set"
            f" lora.rank={rank}"
        )
    ratio = adapter.config.compute_scaling(module) / settings.scaling
    if module.experts:
        _fill_experts(
            adapter, module, name=part.module, rank=rank, ratio=ratio, target=target, model=model
        )
        return
    start = part.start

    def get_local_parts(suffix: str) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        return list_local_parts(model, f"{part.module}.{suffix}", target.get_parameter(suffix))

    suffixes = (EMBEDDING_A, EMBEDDING_B) if module.is_embedding else (LORA_A, LORA_B)
    with safe_open(str(adapter.path), framework="pt") as file:
        entries = adapter.tensors[module.name]

        # A `[r, in]`: rows beyond the file's rank stay zero.
        source = file.get_slice(entries[suffixes[0]][0])
        for local, (row, column) in get_local_parts(suffixes[0]):
            local.zero_()
            rows = source[first + min(row, rank) : first + min(row + len(local), rank)]
            local[: len(rows)].copy_(rows[:, column : column + local.shape[1]])

        # B `[out, r]`: a fused module has the rows of all its parts.
        source = file.get_slice(entries[suffixes[1]][0])
        for local, (row, _) in get_local_parts(suffixes[1]):
            local.zero_()
            rows = source[start + row : start + row + len(local)][:, first : first + rank]
            # Multiplied only where needed: an adapter is loaded to the bit where it can be.
            local[:, :rank].copy_(rows if abs(ratio - 1) < 1e-6 else rows.double() * ratio)

        if target.lora_magnitude_vector is not None:
            source = file.get_slice(entries[MAGNITUDE][0])
            for local, (row,) in get_local_parts(MAGNITUDE):
                local.copy_(source[start + row : start + row + len(local)])


def _fill_experts(
    adapter: AdapterFile,
    module: FileModule,
    *,
    name: str,
    rank: int,
    ratio: float,
    target: AdaptedModule,
    model: nn.Module,
) -> None:
    """Fill the adapters of a layer's experts.

    A file has the factors of the experts one below, or next to, the other: see `expert_factors`.

    name: of our module. rank: of the file. ratio: of the file's scaling to the model's.
    """
    factors = unstack_expert_factors(
        adapter.read(module.name, LORA_A), adapter.read(module.name, LORA_B), module.experts
    )
    if abs(ratio - 1) >= 1e-6:
        factors = (factors[0], factors[1].double() * ratio)
    # A is `[E, r, i]` and B `[E, o, r]`: the rank is dimension 1 or 2.
    for suffix, factor, dim in zip((LORA_A, LORA_B), factors, (1, 2), strict=True):
        for local, offset in list_local_parts(
            model, f"{name}.{suffix}", target.get_parameter(suffix)
        ):
            local.zero_()
            begin = offset[dim]
            num_ranks = min(max(rank - begin, 0), local.shape[dim])
            part = [slice(at, at + size) for at, size in zip(offset, local.shape, strict=True)]
            part[dim] = slice(begin, begin + num_ranks)
            local.narrow(dim, 0, num_ranks).copy_(factor[tuple(part)])
