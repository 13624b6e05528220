"""Load a PEFT adapter's folder into a model, and export a model's adapters as such a folder.

A run calls `load_adapter` where it trains an adapter further, and `export_adapter` at its end. A
`FileModule` is a module as the file names it; its parts are modules of ours, several where the file
fuses them (Phi 3's qkv). Adapters compute `W x + scaling B A x`, A `[r, in]`, B `[out, r]`.
"Collective": all ranks must call the function.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from recipe_lib.adapters.layers import AdaptedExpertModule, AdaptedModule
from recipe_lib.adapters.lora import get_adapter_parameters, is_adapter
from recipe_lib.adapters.peft_names import (
    EMBEDDING_A,
    EMBEDDING_B,
    HEAD,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    PREFIX,
    FileModule,
    MergedRows,
    find_adapted_modules,
    get_file_name,
    is_target,
    list_targets,
    stack_expert_factors,
    unstack_expert_factors,
)
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.checkpoint.adapter_config import TENSOR_FILE, make_config_fields
from recipe_lib.checkpoint.adapter_files import (
    BASE_DTYPE,
    BASE_FINGERPRINT,
    BASE_IMPLEMENTATION,
    BASE_STORAGE,
    SCORE_CONFIG_KEYS,
    SCORE_KEYS,
    AdapterFile,
    check_fits,
    find_used_parts,
    is_stacked,
    read_adapter,
)
from recipe_lib.checkpoint.huggingface import (
    compute_base_fingerprint,
    find_extras_to_read,
    read_part,
)
from recipe_lib.checkpoint.model_export import (
    SideFiles,
    describe_extra_fault,
    gather_whole,
    make_extra_metadata,
    plan_tensors,
    stage_folder,
    stream_parameter,
)
from recipe_lib.checkpoint.rank_groups import (
    Holders,
    RankGroup,
    find_holders,
    run_on_all_ranks,
    write_gathered,
)
from recipe_lib.checkpoint.safetensors_files import FileTensor, PlannedTensor
from recipe_lib.config.local_files import ADAPTER_CONFIG
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.models.language_model import (
    LanguageModel,
    get_runs,
    list_local_parts,
    restore_file_order,
)
from recipe_lib.models.meta_init import (
    find_extra_modules,
    find_fully_saved_tensors,
    find_stored_weights,
    get_slices,
)
from recipe_lib.models.spec import SCORE, DecoderSpec, ExternalSpec, ModelSpec, has_score_head


@torch.no_grad()
def load_adapter(
    model: nn.Module, spec: ModelSpec, folder: Path, *, allow_missing: bool = False
) -> int:
    """Fill the model's adapters from a PEFT adapter; return the number of modules filled.

    Each rank reads its own slices. Modules that the file fuses are split while they are read. An
    adapter of a lower rank than the model's is padded with zeros, and keeps its rank in training:
    where A and B are both zero, so are their gradients. If the scalings differ, B is multiplied by
    their ratio. Parameters that a recipe added are read too. Full weights in the folder replace the
    base's (`SavedWeights`).

    Args:
        model: with adapters, materialized, plain or sharded.
        spec: sizes and kinds of the base, as its config.json gives them.
        folder: of the adapter.
        allow_missing: leave modules without an adapter in the folder as `init_adapters` made them
            (B is zero); otherwise such a module is an error.

    Raises CheckpointError if the adapter does not fit the model, or lacks one of its modules.
    """
    adapter = read_adapter(folder, spec)
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
        for index, part in enumerate(parts):
            _fill_module(
                adapter,
                module,
                part=part,
                part_index=index,
                num_parts=len(parts),
                target=adapted[part.module],
                model=model,
            )
            filled_names.add(part.module)
    _fill_extras(adapter, model)
    if filled_names != adapted.keys() and not allow_missing:
        targets = list_targets(find_used_parts(adapter, module) for module in modules)
        raise CheckpointError(
            f"{folder}: has no adapter for {min(adapted.keys() - filled_names)};"
            f" set lora.target_modules=[{','.join(targets)}]"
        )
    return len(filled_names)


# Fill the parameters that a recipe added to the model, and a score head, from an adapter's file.
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
    part_index: int,
    num_parts: int,
    target: AdaptedModule,
    model: nn.Module,
) -> None:
    """Fill the adapter of one module of ours from a module of the file.

    part: our module, and its rows of the file's module. part_index: index of the part among the
    file module's adapted parts. num_parts: how many of these there are. target: our module's
    adapter.
    """
    settings = target.settings
    is_stack = is_stacked(adapter, module, parts=num_parts, rank=settings.rank)
    # In a stack of one adapter for each part, this part's columns of B and rows of A begin here.
    rank_offset = part_index * settings.rank if is_stack else 0
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

    # This rank's part of A or B in pieces, each with the row and column of the full matrix at which
    # it begins.
    def get_local_parts(suffix: str) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        return list_local_parts(model, f"{part.module}.{suffix}", target.get_parameter(suffix))

    suffixes = _get_factor_names(module)
    with safe_open(str(adapter.path), framework="pt") as file:
        entries = adapter.tensors[module.name]

        # A `[r, in]`: rows beyond the file's rank stay zero.
        source = file.get_slice(entries[suffixes[0]][0])
        for local, (row, column) in get_local_parts(suffixes[0]):
            local.zero_()
            rows = source[rank_offset + min(row, rank) : rank_offset + min(row + len(local), rank)]
            local[: len(rows)].copy_(rows[:, column : column + local.shape[1]])

        # B `[out, r]`: a fused module has the rows of all its parts.
        source = file.get_slice(entries[suffixes[1]][0])
        for local, (row, _) in get_local_parts(suffixes[1]):
            local.zero_()
            rows = source[part.start + row : part.start + row + len(local)][
                :, rank_offset : rank_offset + rank
            ]
            # Not multiplied by a ratio of 1, so that the weights are loaded bit for bit.
            local[:, :rank].copy_(rows if abs(ratio - 1) < 1e-6 else rows.double() * ratio)

        if target.lora_magnitude_vector is not None:
            source = file.get_slice(entries[MAGNITUDE][0])
            for local, (row,) in get_local_parts(MAGNITUDE):
                local.copy_(source[part.start + row : part.start + row + len(local)])


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

    The file has the experts' A below each other and their B side by side
    (`unstack_expert_factors`).

    name: of our module. rank: of the file. ratio: the file's scaling over the model's. target: our
    module's adapter.
    """
    factors = unstack_expert_factors(
        adapter.read(module.name, LORA_A), adapter.read(module.name, LORA_B), module
    )
    if abs(ratio - 1) >= 1e-6:  # as in `_fill_module`: a ratio of 1 leaves the bits as they are
        factors = (factors[0], factors[1].double() * ratio)
    # A is `[E, r, i]` and B `[E, o, r]`: the rank is dimension 1 or 2.
    for suffix, factor, dim in zip((LORA_A, LORA_B), factors, (1, 2), strict=True):
        for local, offset in list_local_parts(
            model, f"{name}.{suffix}", target.get_parameter(suffix)
        ):
            local.zero_()
            # Beyond the file's rank zeros stay.
            num_filled = min(max(rank - offset[dim], 0), local.shape[dim])
            filled = local.narrow(dim, 0, num_filled)
            filled.copy_(factor[get_slices(offset, filled.shape)])


def export_adapter(
    model: nn.Module,
    spec: ModelSpec,
    cfg: LoraConfig,
    out: Path,
    *,
    base: str,
    world: RankGroup,
    base_folder: Path | None = None,
    source_config: Mapping[str, Any] | None = None,
    tokenizer_folder: Path | None = None,
    chat_template: str | Path | None = None,
    stop_ids: Collection[int] = (),
    save_extra: bool = False,
    card: str | None = None,
) -> None:
    """Write the folder `out`: adapter_config.json and adapter_model.safetensors. Collective.

    One parameter at a time is gathered, by the ranks that have it, and streamed to the disk by rank
    0. The adapters of a fused projection's parts (Phi 3's qkv) are stacked into one of a larger
    rank, which adds the same to the output. An `out` that a run published is replaced once the new
    one is complete.

    Args:
        model: with adapters.
        spec: of the base.
        cfg: the config's section `lora`.
        out: folder of the adapter.
        base: name or folder of the base, for adapter_config.json.
        world: all ranks.
        base_folder: the base on this machine, whose hash goes into the file so that another base is
            refused when the adapter is read; None: no hash.
        source_config: the base's config.json.
        tokenizer_folder, chat_template, stop_ids, save_extra, card: as for `export_model`; modules
            with extra parameters become PEFT's modules_to_save.

    Raises StorageError or CheckpointError on every rank; then `out` is as it was.
    """
    # A hook of FSDP in it frees gathered parameters, so that what follows sees the shards.
    model.state_dict()
    source_config = source_config or {}
    modules = find_adapted_modules(spec, cfg)
    # Of Gemma 3 only the language model is trained, a part of the multimodal model in the files.
    is_multimodal = isinstance(spec, DecoderSpec) and source_config.get("model_type") == "gemma3"
    holders = find_holders(model, world)
    # The adapters of all ranks: a pipeline stage may have none itself.
    adapters = plan_tensors(get_adapter_parameters(model), holders, world)
    # Parameters that are trained without an adapter: those of the recipe, and a score head.
    full_tensors = find_fully_saved_tensors(model)
    extras = plan_tensors(full_tensors, holders, world)
    recipe_extras = [name for name in extras if name != SCORE]
    if recipe_extras and not save_extra:
        raise CheckpointError(f"{out}: {describe_extra_fault(recipe_extras)}")
    dtype = next(iter(adapters.values())).dtype
    plan = _plan_file(modules, extras, cfg=cfg, dtype=dtype, is_multimodal=is_multimodal)
    fields = _make_fields(
        model,
        spec,
        cfg,
        base=base,
        modules=modules,
        # Of all pipeline stages.
        modules_to_save=chain.from_iterable(holders.gather(find_extra_modules(model), world)),
        is_multimodal=is_multimodal,
    )
    make_metadata = partial(
        _make_metadata, model, spec, cfg=cfg, base_folder=base_folder, source_config=source_config
    )
    metadata = run_on_all_ranks(world, make_metadata) | make_extra_metadata(recipe_extras)
    with stage_folder(
        out,
        shards={TENSOR_FILE: plan},
        contents={ADAPTER_CONFIG: fields},
        side_files=SideFiles(
            tokenizer_folder, chat_template=chat_template, stop_ids=stop_ids, card=card
        ),
        pad_id=source_config.get("pad_token_id") if has_score_head(spec) else None,
        world=world,
    ) as temporary:
        adapter_pieces = (
            _gather_pieces(model, module=module, cfg=cfg, holders=holders) for module in modules
        )
        extra_pieces = (
            stream_parameter(model, tensors=full_tensors, holders=holders, name=name)
            for name in extras
        )
        # Generators in a chain: nothing is gathered before it is written.
        write_gathered(
            temporary / TENSOR_FILE,
            plan,
            pieces=chain.from_iterable(chain(adapter_pieces, extra_pieces)),
            metadata=metadata,
            world=world,
        )


def compute_file_rank(spec: ModelSpec, cfg: LoraConfig) -> int:
    """Return the largest rank of the adapters in an exported file.

    It is larger than `cfg.rank` where the adapters of a fused projection are stacked.
    """
    return max(_compute_rank(module, cfg) for module in find_adapted_modules(spec, cfg))


# Return the rank of a module's adapter in an exported file: of a stack, that of all parts together.
def _compute_rank(module: FileModule, cfg: LoraConfig) -> int:
    return cfg.rank * sum(is_target(part, cfg) for part in module.parts)


def _plan_file(
    modules: list[FileModule],
    extras: Mapping[str, PlannedTensor],
    *,
    cfg: LoraConfig,
    dtype: torch.dtype,
    is_multimodal: bool,
) -> list[PlannedTensor]:
    """Return the tensors of a file: the adapters', in the order of the modules, then the extras.

    extras: parameters that are trained without an adapter. dtype: of the adapters. is_multimodal:
    the base's files have a multimodal model, of which ours is a part.
    """
    plan: list[PlannedTensor] = []
    for module in modules:
        prefix = f"{PREFIX}{get_file_name(module.name, is_multimodal)}"
        shapes = module.shapes(_compute_rank(module, cfg), cfg.dora)
        plan += [PlannedTensor(f"{prefix}.{end}", dtype, shape) for end, shape in shapes.items()]
    return plan + [
        replace(extra, name=f"{PREFIX}{get_file_name(name, is_multimodal)}")
        for name, extra in extras.items()
    ]


def _make_fields(
    model: nn.Module,
    spec: ModelSpec,
    cfg: LoraConfig,
    *,
    base: str,
    modules: list[FileModule],
    modules_to_save: Iterable[str],
    is_multimodal: bool,
) -> dict[str, Any]:
    """Return the contents of adapter_config.json.

    base: name or folder of the base. modules_to_save: names of the modules with extra parameters on
    all ranks. is_multimodal: see `_plan_file`.
    """
    is_scored = has_score_head(spec)
    # A dict keeps the model's order and has each name once.
    saved_modules = dict.fromkeys(modules_to_save)
    if is_scored:
        saved_modules[SCORE.removesuffix(".weight")] = None
    fields = make_config_fields(
        cfg,
        base,
        ranks={module.name: _compute_rank(module, cfg) for module in modules},
        target_modules=_choose_target_modules(modules, spec, is_multimodal),
        parameters=[module.parameter for module in modules if module.parameter],
        modules_to_save=[get_file_name(name, is_multimodal) for name in saved_modules],
    )
    if is_scored:
        fields["task_type"] = "SEQ_CLS"
    # Of experts PEFT knows how their matrices lie.
    is_transposed = [
        module.transposed
        for module in model.modules()
        if isinstance(module, AdaptedModule) and not isinstance(module, AdaptedExpertModule)
    ]
    # False for a pipeline stage without adapters, for which `all` alone would be true.
    fields["fan_in_fan_out"] = bool(is_transposed) and all(is_transposed)
    return fields


def _choose_target_modules(
    modules: list[FileModule], spec: ModelSpec, is_multimodal: bool
) -> list[str] | str:
    """Return target_modules for PEFT.

    They are the last parts of the modules' names; full names or a pattern if PEFT would take these
    for other modules too.
    """
    ends = sorted({module.name.rsplit(".", 1)[-1] for module in modules if not module.parameter})
    if isinstance(spec, ExternalSpec):
        names = {module.name for module in modules if not module.parameter}
        # PEFT opens the adapter on the class with all its parts.
        layout = spec.layout()
        unadapted_names = {*layout.modules, *layout.left_out_modules} - names
        # Full names if PEFT would otherwise adapt another module whose name ends so.
        if any(name.rpartition(".")[2] in ends for name in unadapted_names):
            return sorted(names)
    if not is_multimodal:
        return ends
    # A pattern, since the vision part of a multimodal model may have the same names.
    head = "|lm_head" if HEAD in ends else ""  # it is not inside the language model
    return rf".*\blanguage_model\.(.*\.)?({'|'.join(ends)}){head}"


def _make_metadata(
    model: nn.Module,
    spec: ModelSpec,
    *,
    cfg: LoraConfig,
    base_folder: Path | None,
    source_config: Mapping[str, Any],
) -> dict[str, str]:
    """Return the metadata of the tensor file: PEFT's key, and facts on the base for merging.

    base_folder: None: its hash is left out. source_config: the base's config.json.
    """
    metadata = {"format": "pt", BASE_STORAGE: cfg.quantize_base}
    # Quantized weights are left out: their codes and scales have other dtypes than the base.
    stored = find_stored_weights(model)
    dtype = next(
        parameter.dtype
        for name, parameter in model.named_parameters()
        if not is_adapter(name) and name.rpartition("_")[0] not in stored
    )
    if isinstance(spec, ExternalSpec):
        metadata[BASE_IMPLEMENTATION] = spec.implementation
    metadata[BASE_DTYPE] = str(dtype).removeprefix("torch.")
    if base_folder is not None:
        metadata[BASE_FINGERPRINT] = compute_base_fingerprint(spec, base_folder)
    if has_score_head(spec):
        score_keys = {
            name: source_config[name] for name in SCORE_CONFIG_KEYS if name in source_config
        }
        metadata[SCORE_KEYS] = json.dumps(score_keys)
    return metadata


def _gather_pieces(
    model: nn.Module, module: FileModule, cfg: LoraConfig, holders: Holders
) -> Iterator[torch.Tensor]:
    """Return an iterator of a module's tensors on rank 0, gathered one at a time. Collective.

    They are in the order of `_plan_file`. On the other ranks the iterator must be run through too,
    and yields nothing.
    """
    first_factor = _get_factor_names(module)[0]
    names = [f"{part.module}.{first_factor}" for part in module.parts]
    # Any adapted part will do: all parts are in one layer, and so on the ranks of one stage.
    name = next(name for name in names if name in holders.first_ranks)
    return holders.stream_to_rank_0(name, lambda: _gather_own_pieces(model, module, cfg))


# Return the ends of the names of A and B.
def _get_factor_names(module: FileModule) -> tuple[str, str]:
    return (EMBEDDING_A, EMBEDDING_B) if module.is_embedding else (LORA_A, LORA_B)


@torch.no_grad()
def _gather_own_pieces(
    model: nn.Module, module: FileModule, cfg: LoraConfig
) -> Iterator[torch.Tensor]:
    """Yield a module's tensors for `_gather_pieces`, on the ranks that have it. Collective."""
    # Each part, and our module; only those that are targets have an adapter.
    owners = [(part, model.get_submodule(part.module)) for part in module.parts]
    names = _get_factor_names(module)
    adapted = [owner for _, owner in owners if isinstance(owner, AdaptedModule)]
    if module.experts:
        ((part, owner),) = owners  # experts are never fused with other modules
        runs = [get_runs(model).get(f"{part.module}.{name}") for name in names]
        parameters = [gather_whole(owner.get_parameter(name).detach()) for name in names]
        lora_a, lora_b = map(restore_file_order, parameters, runs)
        yield from stack_expert_factors(lora_a, lora_b, module)
        return
    # A `[parts * r, in]` of a fused module: those of its parts below each other.
    for owner in adapted:
        yield gather_whole(owner.get_parameter(names[0]).detach())
    # B `[out, parts * r]` of a fused module: block-diagonal, a block for each part.
    for part, owner in owners:
        if len(owners) == 1:
            lora_b = gather_whole(owner.get_parameter(names[1]).detach())
            yield restore_file_order(lora_b, get_runs(model).get(f"{part.module}.{names[1]}"))
            continue
        dtype = adapted[0].settings.dtype
        lora_b = torch.zeros(part.rows, cfg.rank * len(adapted), dtype=dtype)
        if owner in adapted:
            first_column = adapted.index(owner) * cfg.rank
            lora_b[:, first_column : first_column + cfg.rank] = gather_whole(
                owner.get_parameter(names[1]).detach()
            ).cpu()
        yield lora_b
    if cfg.dora:
        for _, owner in owners:
            yield _gather_lengths(owner, adapted[0].settings.dtype)


def _gather_lengths(module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """Return DoRA's magnitudes `[out]`, the lengths of a weight's rows. Collective.

    For a part of a fused module without an adapter they are computed from the frozen weight, which
    they leave as it is.
    """
    if isinstance(module, AdaptedModule):
        return gather_whole(module.get_parameter(MAGNITUDE).detach())
    return torch.linalg.vector_norm(gather_frozen_weight(module).float(), dim=1).to(dtype)


def gather_frozen_weight(module: nn.Module) -> torch.Tensor:
    """Return the full weight `[out, in]` of a linear, gathered and dequantized. Collective."""
    if not isinstance(module, QuantizedLinear):
        return gather_whole(module.get_parameter("weight").detach())
    linear = nn.Linear(
        module.in_features, module.out_features, bias=False, device="meta", dtype=module.dtype
    )
    # Codes and scales are gathered, which are smaller than the weight, and dequantized here.
    copy = QuantizedLinear(linear, module.kind)
    for name, parameter in module.named_parameters(recurse=False):
        if name != "bias":
            setattr(copy, name, nn.Parameter(gather_whole(parameter.detach()), requires_grad=False))
    return copy.dequantize_weight()
