"""Axolotl: `rl` and `adapter` say which recipe is meant."""

from recipe_lib.config.other_configs import trainer_keys as trainer
from recipe_lib.config.other_configs.axolotl_data import convert_datasets
from recipe_lib.config.other_configs.axolotl_keys import (
    DEFAULTS,
    METHODS,
    NEEDS,
    NO_RL,
    NULL_MEANS,
    OF_ADAPTERS,
    OF_PAIRS,
    PAIR_LOSSES,
    QAT_TYPES,
    REFUSED,
    SAME,
    WITHOUT,
)
from recipe_lib.config.other_configs.conversion import ConfigImport, KeyTable, is_off
from recipe_lib.config.other_configs.methods import is_here, refuse_missing
from recipe_lib.config.other_configs.their_data import TEMPLATE, hold_out
from recipe_lib.config.other_configs.their_file import TheirFile

__all__ = ["DEFAULTS", "NAME", "NULL_MEANS", "convert", "is_theirs"]

NAME = "axolotl"


def is_theirs(theirs: TheirFile) -> bool:
    """Whether a file is Axolotl's."""
    return "base_model" in theirs.values


def convert(conversion: ConfigImport) -> None:
    """Notes every key of the file. Raises ConfigError for what cannot be trained here."""
    refuse_missing(conversion, METHODS)
    rl, adapter = conversion.value("rl"), conversion.value("adapter")
    rl = None if rl is None else str(rl)
    if rl is not None and (rl not in PAIR_LOSSES or rl in NEEDS and not is_here(NEEDS[rl])):
        raise conversion.stop(f"rl: {rl}: {NO_RL.get(rl, 'expected ' + ', '.join(PAIR_LOSSES))}", "rl")
    if not is_off(adapter) and adapter not in ("lora", "qlora"):
        raise conversion.stop(f"adapter: {adapter}: expected lora, qlora, or none", "adapter")
    adapted = not is_off(adapter)
    conversion.recipe = "lora_finetune_distributed" if adapted else "full_finetune_distributed"
    method = "dpo" if rl is not None else "reward" if conversion.is_on("reward_model") else None
    if method is not None:
        conversion.recipe = f"{method}_distributed"
        conversion.ours[f"{method}.trainable"] = "adapters" if adapted else "all"
    for key in (*(() if adapted else OF_ADAPTERS), *(() if rl is not None else OF_PAIRS)):
        conversion.defaults.pop(key, None)
    convert_datasets(conversion, "" if method is None else "kto" if rl == "kto" else "preference")
    trainer.convert_fsdp_config(conversion)
    if not adapted:
        for key in conversion.keys():
            if key.startswith(("lora_", "peft_")) and not conversion.noted(key):
                conversion.drop(key, "there is no adapter")
    TABLE.apply(conversion)


def _adapter(c: ConfigImport, key: str) -> None:
    sharded = any(c.is_on(name) for name in ("fsdp", "deepspeed")) or bool(c.theirs.under("fsdp_config"))
    if is_off(c.value(key)):
        c.drop(key, "is off, as here")
    else:
        why = "adapters are fp32 there, as PEFT makes them" if not sharded else ""
        c.carry(key, {} if sharded else {"lora.dtype": "fp32"}, why)


def _rl(c: ConfigImport, key: str) -> None:
    name = str(c.value(key))
    if name == "simpo" and c.value("cpo_alpha") != 0:
        why = "SimPO alone: there the chosen answer's likelihood is added cpo_alpha times, 1 unless it is set"
        c.change(key, {"dpo.loss": "simpo"}, why)
    else:
        c.carry(key, {"dpo.loss": PAIR_LOSSES[name]})
    if "cpo_alpha" in c.theirs.values:
        c.drop("cpo_alpha", "part of rl: simpo")


def _reward(c: ConfigImport, key: str) -> None:
    c.carry(key, {"reward.loss": "pairwise"})


def _rounded(c: ConfigImport, key: str) -> None:
    kind = QAT_TYPES.get(str(c.value(key)).lower())
    if kind is None:
        c.refuse(key, f"expected {', '.join(QAT_TYPES)}", may_be_left_out=False)
    else:
        c.carry(key, {"qat": kind})


def _rounded_inputs(c: ConfigImport, key: str) -> None:
    if QAT_TYPES.get(str(c.value(key)).lower()) == QAT_TYPES.get(str(c.value("qat.weight_dtype")).lower()) == "fp8":
        c.carry(key, {}, "part of qat: fp8")
    else:
        c.change(key, {}, "weights alone are rounded, inputs are not")


def _alpha(c: ConfigImport, key: str) -> None:
    c.carry(key, {"lora.alpha": c.value(key)})


def _targets(c: ConfigImport, key: str) -> None:
    """`lora_target_linear`, all of them, or a list, or both, which are all of them."""
    if c.noted(key):
        return
    listed = c.value("lora_target_modules") or []
    names = [str(name) for name in (listed if isinstance(listed, list) else [listed])]
    if c.value("lora_target_linear"):
        c.carry(key, {"lora.target_modules": ["all-linear"]})
        if key != "lora_target_modules" and c.is_on("lora_target_modules"):
            c.carry("lora_target_modules", {}, "part of lora_target_linear")
    elif names:
        c.carry(key, {"lora.target_modules": trainer.target_modules(names)})
        if key != "lora_target_linear":
            c.drop("lora_target_linear", "is off, as here")
    else:
        c.drop(key, "is off, as here")


def _quantized(c: ConfigImport, key: str) -> None:
    kind = "nf4" if key == "load_in_4bit" else "int8"
    if not c.value(key):
        c.drop(key, "is off, as here")
    elif is_off(c.value("adapter")):
        c.refuse(key, "quantized weights are not trained without an adapter")
    else:
        why = "" if kind == "nf4" else "weights have a scale a row, outliers are not kept in 16 bits"
        (c.change if why else c.carry)(key, {"lora.quantize_base": kind}, why)


def _dtype(c: ConfigImport, key: str) -> None:
    """Four keys there say what one does here."""
    if c.noted(key):
        return
    on = [name for name in ("bf16", "bfloat16", "fp16", "float16", "float32") if c.is_on(name)]
    if key == "float32" or not on or (key in ("bf16",) and not c.value(key) and "float32" in on):
        c.carry(key, {"dtype": "fp32"} if key == "float32" or not on else {})
    elif not c.value(key):
        c.drop(key, "is off, as here")
    elif key in ("fp16", "float16"):
        if any(name.startswith("bf") for name in on if name in c.theirs.values):
            c.drop(key, "bf16 is set, too")
        else:
            c.change(key, {"dtype": "bf16"}, "bf16 has as many bits, a larger range, and needs no scaled loss")
    else:
        c.carry(key, {"dtype": "bf16"})


def _checkpointing(c: ConfigImport, key: str) -> None:
    value = c.value(key)
    if is_off(value):
        c.drop(key, "is off, as here")
        return
    offloads = str(value).lower() in ("offload", "unsloth", "offload_disk")
    ours = {"memory.activation_checkpointing": "full"} | ({"memory.activation_offload": True} if offloads else {})
    if value == "offload_disk":
        c.change(key, ours, "layers' inputs are kept in host memory, not on the disk")
    else:
        c.carry(key, ours)


def _offloading(c: ConfigImport, key: str) -> None:
    if is_off(c.value(key)):
        c.drop(key, "is off, as here")
    elif c.value(key) == "disk":
        c.change(key, {"memory.activation_offload": True}, "in host memory, not on the disk")
    else:
        c.carry(key, {"memory.activation_offload": True})


def _inputs(c: ConfigImport, key: str) -> None:
    if c.recipe in ("dpo_distributed", "reward_distributed"):
        c.drop(key, "of pairs the answers alone are compared")
    elif "data.train_on" in c.ours:
        c.drop(key, "roles_to_train takes its place")
    else:
        c.carry(key, {"data.train_on": "all" if c.value(key) else "assistant"})


def _tiles(c: ConfigImport, key: str) -> None:
    if is_off(c.value(key)):
        c.drop(key, "is off, as here")
    elif c.is_on("tiled_mlp_num_shards"):
        c.carry(key, {})
    else:
        c.change(key, {"memory.mlp_tiles": 4}, "as many tiles as the sequence is long there, 4 here")


def _batch_size(c: ConfigImport, key: str) -> None:
    c.refuse(
        key,
        "how many sequences a step has depends on the ranks; micro_batch_size and gradient_accumulation_steps say it",
    )


def _template(c: ConfigImport, key: str) -> None:
    if c.value(key) in ("tokenizer_default",):
        c.carry(key, {})
    elif c.value(key) == "jinja":
        c.drop(key, "part of chat_template_jinja")
    else:
        c.change(key, {}, TEMPLATE)


def _jinja(c: ConfigImport, key: str) -> None:
    text = str(c.value(key))
    if "{" in text:
        c.refuse(key, "tokenizer.chat_template takes a file; write the template into one")
    else:
        c.carry(key, {"tokenizer.chat_template": text})


def _project(c: ConfigImport, key: str) -> None:
    c.carry(key, {"log.project": c.value(key), "log.trackers": ["wandb"]})


def _tensorboard(c: ConfigImport, key: str) -> None:
    if c.value(key):
        c.carry(key, {"log.trackers": [*c.ours.get("log.trackers", []), "tensorboard"]})
    else:
        c.drop(key, "is off, as here")


def _packing(c: ConfigImport, key: str) -> None:
    c.carry(key, {"data.packing": bool(c.value(key))})


def _tokenizer(c: ConfigImport, key: str) -> None:
    if c.value(key) == c.value("base_model"):
        c.drop(key, "the model's own tokenizer is used")
    else:
        c.carry(key, {"tokenizer.path": c.value(key)})


def _too_long(c: ConfigImport, key: str) -> None:
    kinds = {"drop": "drop", "truncate": "truncate", "raise": "error"}
    if c.value(key) in kinds:
        c.carry(key, {"data.truncation": kinds[c.value(key)]})
    else:
        c.refuse(key, f"expected {', '.join(kinds)}")


TABLE = KeyTable(
    same=SAME,
    converted={
        "adapter": _adapter,
        "rl": _rl,
        "lr_scheduler": trainer.convert_schedule,
        **trainer.CONVERTED,
        "optimizer": trainer.convert_optimizer,
        "num_epochs": trainer.convert_epochs,
        "val_set_size": hold_out,
        "eval_steps": trainer.convert_eval_steps,
        "eval_batch_size": trainer.convert_eval_batch_size,
        "reward_model": _reward,
        "qat.weight_dtype": _rounded,
        "qat.activation_dtype": _rounded_inputs,
        "lora_alpha": _alpha,
        "lora_target_linear": _targets,
        "lora_target_modules": _targets,
        "load_in_4bit": _quantized,
        "load_in_8bit": _quantized,
        **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "float32"), _dtype),
        "gradient_checkpointing": _checkpointing,
        "activation_offloading": _offloading,
        "train_on_inputs": _inputs,
        "tiled_mlp": _tiles,
        "batch_size": _batch_size,
        "chat_template": _template,
        "chat_template_jinja": _jinja,
        "wandb_project": _project,
        "use_tensorboard": _tensorboard,
        "sample_packing": _packing,
        "tokenizer_config": _tokenizer,
        "excess_length_strategy": _too_long,
    },
    without=WITHOUT,
    refused=REFUSED,
)
