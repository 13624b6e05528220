"""Export a model's adapters as a PEFT folder, which PEFT, vLLM and we ourselves read.

`export_adapter` writes adapter_config.json and adapter_model.safetensors. One parameter at a time
is gathered and streamed to the disk, as for a whole model.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipe_lib.adapters.layers import AdaptedModule
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
    find_adapted_modules,
    get_file_name,
    is_target,
    stack_expert_factors,
)
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.checkpoint.adapter_config import CONFIG_FILE, TENSOR_FILE, make_config_fields
from recipe_lib.checkpoint.adapter_files import (
    BASE_DTYPE,
    BASE_FINGERPRINT,
    BASE_IMPLEMENTATION,
    BASE_STORAGE,
    OF_SCORES,
    SCORE_KEYS,
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
from recipe_lib.checkpoint.safetensors_files import PlannedTensor
from recipe_lib.checkpoint.weight_loading import compute_base_fingerprint
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.models.families import has_score_head
from recipe_lib.models.language_model import get_runs, restore_file_order
from recipe_lib.models.meta_init import (
    find_extra_modules,
    find_fully_saved_tensors,
    find_stored_weights,
)
from recipe_lib.models.spec import SCORE, DecoderSpec, ExternalSpec, ModelSpec


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
    0. Fused projections (Phi 3) have their parts' adapters stacked: the same sum, of a larger rank.
    An `out` that a run published is replaced when the new one is whole.

    base: the name or folder that loads the frozen weights.
    base_folder: where they are here; a fingerprint of them goes into the file, and another base is
        refused when the adapter is read again.
    source_config: the base's config.json.
    tokenizer_folder, chat_template, stop_ids, save_extra, card: as for `export_model`; PEFT calls
        modules with extra parameters modules_to_save.

    Raises StorageError or CheckpointError on every rank; then `out` is as it was.
    """
    # FSDP's hook frees gathered parameters, so that what follows sees the shards
    model.state_dict()
    source_config = source_config or {}
    modules = find_adapted_modules(spec, cfg)
    # Of Gemma 3 we train the language model, which is a part of the files' multimodal one.
    is_multimodal = isinstance(spec, DecoderSpec) and source_config.get("model_type") == "gemma3"
    holders = find_holders(model, world)
    # Of all ranks: one of a pipeline may have no adapter.
    adapters = plan_tensors(get_adapter_parameters(model), holders, world)
    # A score head is among these: it is trained whole.
    whole_tensors = find_fully_saved_tensors(model)
    extras = plan_tensors(whole_tensors, holders, world)
    recipe_extras = [name for name in extras if name != SCORE]
    if recipe_extras and not save_extra:
        raise CheckpointError(f"{out}: {describe_extra_fault(recipe_extras)}")
    plan = _plan_adapters(modules, cfg, next(iter(adapters.values())).dtype, is_multimodal)
    plan += [
        replace(extra, name=f"{PREFIX}{get_file_name(name, is_multimodal)}")
        for name, extra in extras.items()
    ]
    extra_modules = chain.from_iterable(holders.gather(find_extra_modules(model), world))
    fields = _make_fields(
        model, spec, cfg, base, modules=modules, saved=extra_modules, is_multimodal=is_multimodal
    )
    metadata = run_on_all_ranks(
        world,
        lambda: _make_metadata(
            model, spec, cfg=cfg, base_folder=base_folder, source_config=source_config
        ),
    )
    staging = stage_folder(
        out,
        shards={TENSOR_FILE: plan},
        contents={CONFIG_FILE: fields},
        side_files=SideFiles(tokenizer_folder, chat_template, stop_ids, card),
        pad_id=source_config.get("pad_token_id") if has_score_head(spec) else None,
        world=world,
    )
    with staging as temporary:
        adapter_pieces = (_gather_pieces(model, module, cfg, holders) for module in modules)
        extra_pieces = (stream_parameter(model, whole_tensors, holders, name) for name in extras)
        # Generators in a chain: nothing is gathered before it is written.
        write_gathered(
            temporary / TENSOR_FILE,
            plan,
            pieces=chain.from_iterable(chain(adapter_pieces, extra_pieces)),
            metadata=metadata | make_extra_metadata(recipe_extras),
            world=world,
        )


def compute_file_rank(spec: ModelSpec, cfg: LoraConfig) -> int:
    """Return the largest rank in an exported file.

    It is larger than `cfg.rank` where adapters of fused projections are stacked.
    """
    return max(_compute_rank(module, cfg) for module in find_adapted_modules(spec, cfg))


def _compute_rank(module: FileModule, cfg: LoraConfig) -> int:
    return cfg.rank * sum(is_target(part, cfg) for part in module.parts)


def _plan_adapters(
    modules: list[FileModule], cfg: LoraConfig, dtype: torch.dtype, is_multimodal: bool
) -> list[PlannedTensor]:
    """Return the adapters' tensors of a file, in the order of the modules."""
    plan: list[PlannedTensor] = []
    for module in modules:
        prefix = f"{PREFIX}{get_file_name(module.name, is_multimodal)}"
        shapes = module.shapes(_compute_rank(module, cfg), cfg.dora)
        plan += [PlannedTensor(f"{prefix}.{end}", dtype, shape) for end, shape in shapes.items()]
    return plan


def _make_fields(
    model: nn.Module,
    spec: ModelSpec,
    cfg: LoraConfig,
    base: str,
    *,
    modules: list[FileModule],
    saved: Iterable[str],
    is_multimodal: bool,
) -> dict[str, Any]:
    """Return the contents of adapter_config.json.

    saved: the modules with extra parameters, of all ranks.
    """
    is_scored = has_score_head(spec)
    # A dict keeps the model's order and has each name once.
    saved_modules = dict.fromkeys(saved)
    if is_scored:
        saved_modules[SCORE.removesuffix(".weight")] = None
    fields = make_config_fields(
        cfg,
        base,
        ranks={module.name: _compute_rank(module, cfg) for module in modules},
        target_modules=_choose_target_modules(modules, spec, is_multimodal),
        parameters=[module.parameter for module in modules if module.parameter],
        saved=[get_file_name(name, is_multimodal) for name in saved_modules],
    )
    if is_scored:
        fields["task_type"] = "SEQ_CLS"
    is_transposed = [
        module.transposed for module in model.modules() if isinstance(module, AdaptedModule)
    ]
    # The bool is for a stage of a pipeline without adapters.
    fields["fan_in_fan_out"] = bool(is_transposed) and all(is_transposed)
    return fields


def _choose_target_modules(
    modules: list[FileModule], spec: ModelSpec, is_multimodal: bool
) -> list[str] | str:
    """Return target_modules for PEFT: the last parts of the modules' names, where that is clear."""
    ends = sorted({module.name.rsplit(".", 1)[-1] for module in modules if not module.parameter})
    if isinstance(spec, ExternalSpec):
        names = {module.name for module in modules}
        unadapted_names = set(spec.layout().modules) - names
        # Whole names, where PEFT would put an adapter on another module with such an end too.
        if any(name.rpartition(".")[2] in ends for name in unadapted_names):
            return sorted(names)
    if not is_multimodal:
        return ends
    # A pattern, since the other parts of a multimodal model may have the same names.
    head = "|lm_head" if HEAD in ends else ""  # which is beside the language model
    return rf".*\blanguage_model\.(.*\.)?({'|'.join(ends)}){head}"


def _make_metadata(
    model: nn.Module,
    spec: ModelSpec,
    *,
    cfg: LoraConfig,
    base_folder: Path | None,
    source_config: Mapping[str, Any],
) -> dict[str, str]:
    """Return the file's metadata: what PEFT looks for, and what merging must know of the base."""
    metadata = {"format": "pt", BASE_STORAGE: cfg.quantize_base}
    stored = find_stored_weights(model)  # codes and scales have types of their own, not the run's
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
        score_keys = {name: source_config[name] for name in OF_SCORES if name in source_config}
        metadata[SCORE_KEYS] = json.dumps(score_keys)
    return metadata


def _gather_pieces(
    model: nn.Module, module: FileModule, cfg: LoraConfig, holders: Holders
) -> Iterator[torch.Tensor]:
    """Return an iterator of the data of a module's planned tensors, on rank 0. Collective.

    The tensors are in the order of the plan, gathered one at a time.
    """
    first = _get_factor_names(module)[0]
    names = [f"{part.module}.{first}" for part in module.parts]
    # Any part tells the ranks: all parts of a module are in one layer, and so on one stage.
    name = next(name for name in names if name in holders.first)
    return holders.stream_to_rank_0(name, lambda: _gather_own_pieces(model, module, cfg))


def _get_factor_names(module: FileModule) -> tuple[str, str]:
    return (EMBEDDING_A, EMBEDDING_B) if module.is_embedding else (LORA_A, LORA_B)


@torch.no_grad()
def _gather_own_pieces(
    model: nn.Module, module: FileModule, cfg: LoraConfig
) -> Iterator[torch.Tensor]:
    """Yield what `_gather_pieces` does, on the ranks that have the module. Collective."""
    owners = [(part, model.get_submodule(part.module)) for part in module.parts]
    names = _get_factor_names(module)
    adapted = [owner for _, owner in owners if isinstance(owner, AdaptedModule)]
    if module.experts:
        ((part, owner),) = owners
        runs = [get_runs(model).get(f"{part.module}.{name}") for name in names]
        parameters = [gather_whole(owner.get_parameter(name).detach()) for name in names]
        yield from stack_expert_factors(*map(restore_file_order, parameters, runs))
        return
    # A of a fused module: its parts' below each other.
    for owner in adapted:
        yield gather_whole(owner.get_parameter(names[0]).detach())
    # B of a fused module: a block for each of its parts, zeros elsewhere.
    for part, owner in owners:
        if len(owners) == 1:
            second = gather_whole(owner.get_parameter(names[1]).detach())
            yield restore_file_order(second, get_runs(model).get(f"{part.module}.{names[1]}"))
            continue
        dtype = adapted[0].settings.dtype
        second = torch.zeros(part.rows, cfg.rank * len(adapted), dtype=dtype)
        if owner in adapted:
            at = adapted.index(owner) * cfg.rank
            second[:, at : at + cfg.rank] = gather_whole(
                owner.get_parameter(names[1]).detach()
            ).cpu()
        yield second
    if cfg.dora:
        for _, owner in owners:
            yield _gather_lengths(owner, adapted[0].settings.dtype)


def _gather_lengths(module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """Return DoRA's lengths `[out]`. Collective.

    A fused module's part without an adapter has those of its rows, which change nothing.
    """
    if isinstance(module, AdaptedModule):
        return gather_whole(module.get_parameter(MAGNITUDE).detach())
    return torch.linalg.vector_norm(gather_frozen_weight(module).float(), dim=1).to(dtype)


def gather_frozen_weight(module: nn.Module) -> torch.Tensor:
    """Return the whole weight `[out, in]` of a linear, gathered and dequantized. Collective."""
    if not isinstance(module, QuantizedLinear):
        return gather_whole(module.get_parameter("weight").detach())
    linear = nn.Linear(
        module.in_features, module.out_features, bias=False, device="meta", dtype=module.dtype
    )
    # Codes and scales are gathered, not the weight, and dequantized here.
    copy = QuantizedLinear(linear, module.kind)
    for name, parameter in module.named_parameters(recurse=False):
        if name != "bias":
            setattr(copy, name, nn.Parameter(gather_whole(parameter.detach()), requires_grad=False))
    return copy.dequantize_weight()
