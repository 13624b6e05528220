"""An adapter from a folder into a model: each rank its own slices."""

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
    """Fills the model's adapters from a PEFT adapter that `check_adapter` has let pass; returns how
    many modules.

    model: with adapters, materialized, plain or sharded. An adapter of a lower rank than the
    model's is filled up with zeros, and stays at its rank: where A and B are both zero, so are
    their gradients. One that is scaled by another number has the ratio put into B. some: a module
    that has no adapter in the folder (those of some layers) is left as `init_adapters` made it,
    which changes nothing; without it that is a fault. Extra parameters, which a recipe added, are
    read too, and the model must have those that the folder has. Weights of the base that the folder
    brings along take their places (see `SavedWeights`). Raises CheckpointError.
    """
    adapter = read_adapter(folder)
    saved = check_fits(adapter, spec)
    if isinstance(model, LanguageModel):
        saved.put_into(model)
    adapted = {
        name: module for name, module in model.named_modules() if isinstance(module, AdaptedModule)
    }
    filled = set()
    for module in adapter.modules(spec):
        used = [part for part in module.parts if part.module in adapted]
        for number, part in enumerate(used):
            _fill_module(adapter, module, part, number, len(used), adapted[part.module], model)
            filled.add(part.module)
    _fill_extras(adapter, model)
    if filled != adapted.keys() and not some:
        raise CheckpointError(
            f"{folder}: has no adapter for {min(adapted.keys() - filled)}; set lora.target_modules="
            f"[{','.join(list_targets(find_used_parts(adapter, module) for module in adapter.modules(spec)))}]"
        )
    return len(filled)


def _fill_extras(adapter: AdapterFile, model: nn.Module) -> None:
    found = {
        name: FileTensor(adapter.path, entry, extra=True)
        for name, (_, entry) in adapter.extras.items()
    }
    tensors = find_fully_saved_tensors(model)
    names = find_extras_to_read(model, adapter.folder, found)
    with safe_open(str(adapter.path), framework="pt") as file:
        for name in names:
            for local, offsets in list_local_parts(model, name, tensors[name]):
                read_part(file.get_slice(adapter.extras[name][0]), local, offsets)
    if isinstance(model, LanguageModel):
        model.loaded_extras |= frozenset(names)


def _fill_module(
    adapter: AdapterFile,
    module: FileModule,
    part: MergedRows,
    number: int,
    parts: int,
    target: AdaptedModule,
    model: nn.Module,
) -> None:
    """One module of ours. number, parts: which of the fused module's adapted parts it is, and how
    many there are.
    """
    rank, settings = adapter.config.get_rank(module), target.settings
    stacked = is_stacked(adapter, module, parts, settings.rank)
    first = number * settings.rank if stacked else 0
    count = settings.rank if stacked else rank
    if count > settings.rank:
        raise CheckpointError(
            f"{adapter.folder}: has rank {count}, found lora.rank={settings.rank}; set"
            f" lora.rank={count}"
        )
    ratio = adapter.config.compute_scaling(module) / settings.scaling
    if module.experts:
        _fill_experts(adapter, module, part.module, count, ratio, target, model)
        return
    start = part.start

    def held(suffix: str) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        return list_local_parts(model, f"{part.module}.{suffix}", target.get_parameter(suffix))

    suffixes = (EMBEDDING_A, EMBEDDING_B) if module.is_embedding else (LORA_A, LORA_B)
    with safe_open(str(adapter.path), framework="pt") as file:
        entries = adapter.tensors[module.name]

        source = file.get_slice(entries[suffixes[0]][0])
        for local, (row, column) in held(suffixes[0]):
            local.zero_()
            rows = source[first + min(row, count) : first + min(row + len(local), count)]
            local[: len(rows)].copy_(rows[:, column : column + local.shape[1]])

        source = file.get_slice(entries[suffixes[1]][0])
        for local, (row, _) in held(suffixes[1]):
            local.zero_()
            rows = source[start + row : start + row + len(local)][:, first : first + count]
            local[:, :count].copy_(rows if abs(ratio - 1) < 1e-6 else rows.double() * ratio)

        if target.lora_magnitude_vector is not None:
            for local, (row,) in held(MAGNITUDE):
                local.copy_(
                    file.get_slice(entries[MAGNITUDE][0])[start + row : start + row + len(local)]
                )


def _fill_experts(
    adapter: AdapterFile,
    module: FileModule,
    name: str,
    rank: int,
    ratio: float,
    target: AdaptedModule,
    model: nn.Module,
) -> None:
    """The factors of a layer's experts, which a file has one below, or next to, the other: see
    `expert_factors`.
    """
    factors = unstack_expert_factors(
        adapter.read(module.name, LORA_A), adapter.read(module.name, LORA_B), module.experts
    )
    if abs(ratio - 1) >= 1e-6:
        factors = (factors[0], factors[1].double() * ratio)
    for suffix, whole, dim in zip((LORA_A, LORA_B), factors, (1, 2), strict=True):
        for local, offset in list_local_parts(
            model, f"{name}.{suffix}", target.get_parameter(suffix)
        ):
            local.zero_()
            begin, size = offset[dim], local.shape[dim]
            taken = min(max(rank - begin, 0), size)
            part = [slice(at, at + each) for at, each in zip(offset, local.shape, strict=True)]
            part[dim] = slice(begin, begin + taken)
            local.narrow(dim, 0, taken).copy_(whole[tuple(part)])
