"""Tensors of a checkpoint that its model has not, and parameters that its files lack: a line for each kind of them."""

import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from recipe_lib.models.spec import ModelSpec
from recipe_lib.units import name_first

_WRAPPER = re.compile(
    r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^(module|base_model\.model)\."
)
_LAYER = re.compile(r"^(?:(?:model|transformer|gpt_neox|language_model)\.)*(?:layers|h)\.(\d+)\.")
_UNTIED = "; if the embedding is the head, set tie_word_embeddings to true in config.json"
_LEAVE_OUT = "if the model does not need it, leave it out of a copy of the folder"


class _Kind(NamedTuple):
    """What tensors are, and what to do about them."""

    what: str
    remedy: str


_WRAPPED = _Kind(
    "names of a wrapper",
    "save the module inside of it (torch.compile: model._orig_mod, DistributedDataParallel: model.module, PEFT: "
    "model.merge_and_unload())",
)
_BEYOND = _Kind("a layer beyond num_hidden_layers", f"correct num_hidden_layers in config.json, or {_LEAVE_OUT}")
_OTHER = _Kind("", "check that config.json and the weights are of one model")
# By their names; the first pattern that is found in one says what it is.
_KINDS: dict[str, _Kind] = {
    r"\.(lora_\w+|modules_to_save|base_layer)\.": _Kind(
        "of an adapter", "merge it into the model (PEFT: model.merge_and_unload()), and save that"
    ),
    r"[._](qweight|qzeros|scales|g_idx|(weight|input)_(scale|zero_point|packed|shape)\w*|absmax|quant_map|SCB)$": _Kind(
        "of quantized weights", "take the checkpoint that this one was made from"
    ),
    r"^(v_head|value_head|score|classifier|reward_head)\.": _Kind(
        "a head that predicts no tokens",
        "name its class in architectures of config.json (...ForSequenceClassification has score.weight alone, for "
        f"reward_distributed); {_LEAVE_OUT}",
    ),
    r"\.bias$": _Kind(
        "a bias", f"set attention_bias or mlp_bias in config.json if the family has it; {_LEAVE_OUT}"
    ),
}  # fmt: skip


def describe_foreign_tensors(
    spec: ModelSpec, folder: Path, missing: Collection[str], foreign: Collection[str]
) -> list[str]:
    """Return a line for parameters that the files lack, and one for each kind of tensors that the model has not."""
    names_by_kind: dict[_Kind, list[str]] = defaultdict(list)
    for name in sorted(foreign):
        names_by_kind[_find_kind(spec, name)].append(name)
    unwrapped = {_WRAPPER.sub(r"\1", name) for name in names_by_kind.get(_WRAPPED, ())}
    lost = sorted(set(missing) - unwrapped)
    lines = []
    if lost:
        remedy = _UNTIED if lost[0].endswith("lm_head.weight") else ""
        lines.append(f"{folder}: {name_first(lost, 'is', 'are')} missing; download the folder again{remedy}")
    for kind, names in names_by_kind.items():
        what = f" ({kind.what})" if kind.what else ""
        named = name_first(names, "belongs", "belong")
        lines.append(f"{folder}: {named} to no part of this model{what}; {kind.remedy}")
    return lines


def _find_kind(spec: ModelSpec, name: str) -> _Kind:
    if _WRAPPER.search(name):
        return _WRAPPED
    layer = _LAYER.search(name)
    if layer and int(layer[1]) >= spec.num_layers:
        return _BEYOND
    return next((kind for pattern, kind in _KINDS.items() if re.search(pattern, name)), _OTHER)
