"""A model's adapters as a PEFT folder, which PEFT, vLLM and we ourselves read."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipe_lib.adapters.layers import AdaptedModule
from recipe_lib.adapters.lora import is_adapter
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
    """Writes the folder `out`: adapter_config.json and adapter_model.safetensors as PEFT names
    them. Collective.

    One parameter at a time is gathered, by the ranks that have it, and streamed to the disk by rank
    0. base: the name or folder that loads the frozen weights. base_folder: where they are here; a
    mark of them goes into the file, and another base is refused when the adapter is read again.
    source_config: the base's config.json. tokenizer_folder, chat_template, stop_ids: as for
    `export_model`. Fused projections (Phi 3) have their parts' adapters stacked: the same sum, of a
    larger rank. save_extra, card: as for `export_model`; PEFT calls such modules modules_to_save.
    An `out` that a run published is replaced when the new one is whole. Raises StorageError or
    CheckpointError on every rank; then `out` is as it was.
    """
    # FSDP's hook frees gathered parameters, so that what follows sees the shards
    model.state_dict()
    modules = find_adapted_modules(spec, cfg)
    ranks = {module.name: cfg.rank * len(_list_targets(module, cfg)) for module in modules}
    multimodal = (
        isinstance(spec, DecoderSpec) and (source_config or {}).get("model_type") == "gemma3"
    )
    holders = find_holders(model, world)
    adapters = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    dtype = next(
        iter(plan_tensors(adapters, holders, world).values())
    ).dtype  # a rank of a pipeline may have none
    plan = [
        PlannedTensor(f"{PREFIX}{get_file_name(module.name, multimodal)}.{suffix}", dtype, shape)
        for module in modules
        for suffix, shape in module.shapes(ranks[module.name], cfg.dora).items()
    ]
    whole_tensors = find_fully_saved_tensors(
        model
    )  # a score head among them, which is trained whole
    extras = plan_tensors(whole_tensors, holders, world)
    added = [name for name in extras if name != SCORE]
    if added and not save_extra:
        raise CheckpointError(f"{out}: {describe_extra_fault(added)}")
    plan += [
        replace(extra, name=f"{PREFIX}{get_file_name(name, multimodal)}")
        for name, extra in extras.items()
    ]
    saved = dict.fromkeys(
        module for part in holders.gather(find_extra_modules(model), world) for module in part
    )
    if has_score_head(spec):
        saved[SCORE.removesuffix(".weight")] = None
    fields = make_config_fields(
        cfg,
        base,
        ranks,
        target_modules=_choose_target_modules(modules, spec, multimodal),
        parameters=[module.parameter for module in modules if module.parameter],
        saved=[get_file_name(name, multimodal) for name in saved],
    )
    fields["task_type"] = "SEQ_CLS" if has_score_head(spec) else fields["task_type"]
    transposed = [
        module.transposed for module in model.modules() if isinstance(module, AdaptedModule)
    ]
    fields["fan_in_fan_out"] = bool(transposed) and all(transposed)  # a stage may have none
    metadata = run_on_all_ranks(
        world, lambda: _make_metadata(model, spec, cfg, base_folder, source_config or {})
    )
    metadata |= make_extra_metadata(added)
    pad_id = (source_config or {}).get("pad_token_id") if has_score_head(spec) else None
    beside = SideFiles(tokenizer_folder, chat_template, stop_ids, card, pad_id)
    with stage_folder(out, {TENSOR_FILE: plan}, {CONFIG_FILE: fields}, beside, world) as temporary:
        of_adapters = (_gather_pieces(model, module, cfg, holders) for module in modules)
        of_extras = (stream_parameter(model, whole_tensors, holders, name) for name in extras)
        pieces = chain.from_iterable(chain(of_adapters, of_extras))
        write_gathered(temporary / TENSOR_FILE, plan, pieces, metadata, world)


def compute_file_rank(spec: ModelSpec, cfg: LoraConfig) -> int:
    """The largest rank in an exported file: larger than `cfg.rank` where adapters of fused
    projections are stacked.
    """
    return max(
        cfg.rank * len(_list_targets(module, cfg)) for module in find_adapted_modules(spec, cfg)
    )


def _list_targets(module: FileModule, cfg: LoraConfig) -> list[str]:
    return [part.target for part in module.parts if is_target(part, cfg)]


def _choose_target_modules(
    modules: list[FileModule], spec: ModelSpec, multimodal: bool
) -> list[str] | str:
    """What the last parts of names are; in a multimodal model a pattern, as its other part may have
    the same names.

    The whole names, where a module without an adapter has such a last part too: PEFT would put one
    there.
    """
    ends = sorted({module.name.rsplit(".", 1)[-1] for module in modules if not module.parameter})
    if isinstance(spec, ExternalSpec):
        names = {module.name for module in modules}
        if any(
            name.rpartition(".")[2] in ends for name in spec.layout().modules if name not in names
        ):
            return sorted(names)
    if not multimodal:
        return ends
    head = "|lm_head" if HEAD in ends else ""  # which is beside the language model
    return rf".*\blanguage_model\.(.*\.)?({'|'.join(ends)}){head}"


def _make_metadata(
    model: nn.Module,
    spec: ModelSpec,
    cfg: LoraConfig,
    base_folder: Path | None,
    source_config: Mapping[str, Any],
) -> dict[str, str]:
    """What PEFT looks for, and what merging has to know of the base."""
    metadata = {"format": "pt", BASE_STORAGE: cfg.quantize_base}
    stored = find_stored_weights(model)  # what is quantized has its own types
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
        kept = {name: source_config[name] for name in OF_SCORES if name in source_config}
        metadata[SCORE_KEYS] = json.dumps(kept)
    return metadata


def _gather_pieces(
    model: nn.Module, module: FileModule, cfg: LoraConfig, holders: Holders
) -> Iterator[torch.Tensor]:
    """On rank 0 the data of a module's planned tensors, in their order, a gathered parameter at a
    time. Collective.
    """
    first = _get_factor_names(module)[0]
    names = [f"{part.module}.{first}" for part in module.parts]
    holder = next(
        name for name in names if name in holders.first
    )  # all parts of a module are in one layer
    return holders.stream_to_rank_0(holder, lambda: _gather_own_pieces(model, module, cfg))


def _get_factor_names(module: FileModule) -> tuple[str, str]:
    return (EMBEDDING_A, EMBEDDING_B) if module.is_embedding else (LORA_A, LORA_B)


@torch.no_grad()
def _gather_own_pieces(
    model: nn.Module, module: FileModule, cfg: LoraConfig
) -> Iterator[torch.Tensor]:
    """What `_pieces` gives, on the ranks that have the module. Collective."""
    held = [(part, model.get_submodule(part.module)) for part in module.parts]
    names = _get_factor_names(module)
    adapted = [owner for _, owner in held if isinstance(owner, AdaptedModule)]
    if module.experts:
        ((part, owner),) = held
        runs = [get_runs(model).get(f"{part.module}.{name}") for name in names]
        parameters = [gather_whole(owner.get_parameter(name).detach()) for name in names]
        yield from stack_expert_factors(*map(restore_file_order, parameters, runs))
        return
    for owner in adapted:
        yield gather_whole(owner.get_parameter(names[0]).detach())
    for part, owner in held:  # B of a fused module: a block for each of its parts, zeros elsewhere
        if len(held) == 1:
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
        for _, owner in held:
            yield _gather_lengths(owner, adapted[0].settings.dtype)


def _gather_lengths(module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """DoRA's lengths; of a fused module's part without an adapter those that its rows have.
    Collective.
    """
    if isinstance(module, AdaptedModule):
        return gather_whole(module.get_parameter(MAGNITUDE).detach())
    return torch.linalg.vector_norm(gather_frozen_weight(module).float(), dim=1).to(dtype)


def gather_frozen_weight(module: nn.Module) -> torch.Tensor:
    """The whole weight `[out, in]` of a linear, gathered and dequantized. Collective."""
    if not isinstance(module, QuantizedLinear):
        return gather_whole(module.get_parameter("weight").detach())
    linear = nn.Linear(
        module.in_features, module.out_features, bias=False, device="meta", dtype=module.dtype
    )
    copy = QuantizedLinear(linear, module.kind)
    for name, parameter in module.named_parameters(recurse=False):
        if name != "bias":
            setattr(copy, name, nn.Parameter(gather_whole(parameter.detach()), requires_grad=False))
    return copy.dequantize_weight()
