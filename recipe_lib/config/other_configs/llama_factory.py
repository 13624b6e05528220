"""LLaMA-Factory's keys."""

from recipe_lib.config.other_configs import trainer_keys as trainer
from recipe_lib.config.other_configs.conversion import ConfigImport, KeyTable
from recipe_lib.config.other_configs.llama_factory_data import convert_datasets
from recipe_lib.config.other_configs.llama_factory_keys import (
    DEFAULTS,
    METHODS,
    NO_STAGES,
    NULL_MEANS,
    OF_ADAPTERS,
    OF_PAIRS,
    OTHER_PURPOSES,
    REFUSED,
    SAME,
    STAGES,
    WITHOUT,
)
from recipe_lib.config.other_configs.methods import is_here, refuse_missing
from recipe_lib.config.other_configs.their_data import TEMPLATE, hold_out
from recipe_lib.config.other_configs.their_file import TheirFile

__all__ = ["DEFAULTS", "NAME", "NULL_MEANS", "convert", "is_theirs"]

NAME = "llama-factory"


def is_theirs(theirs: TheirFile) -> bool:
    """Whether a file is LLaMA-Factory's."""
    own = ("stage", "finetuning_type", "template", "cutoff_len", "dataset_dir")
    return "model_name_or_path" in theirs.values and any(key in theirs.values for key in own)


def convert(conversion: ConfigImport) -> None:
    """Notes every key of the file. Raises ConfigError for what does not train, or cannot be trained here."""
    for key, instead in OTHER_PURPOSES:
        if conversion.is_on(key):
            raise conversion.stop(f"{key}: {instead}", key)
    if not any(conversion.theirs.under(key) for key in ("stage", "do_train", "dataset", "finetuning_type")):
        raise conversion.stop("it has no dataset and trains nothing; `tune generate MODEL` is for talking to a model")
    refuse_missing(conversion, METHODS)
    stage, kind = str(conversion.value("stage")), str(conversion.value("finetuning_type"))
    if stage not in STAGES or (STAGES[stage] and not is_here(STAGES[stage])):
        raise conversion.stop(f"stage: {stage}: {NO_STAGES.get(stage, 'expected ' + ', '.join(STAGES))}", "stage")
    if kind not in ("lora", "full"):
        raise conversion.stop(f"finetuning_type: {kind}: there is none of it; choose full or lora", "finetuning_type")
    adapted = kind == "lora"
    conversion.recipe = "lora_finetune_distributed" if adapted else "full_finetune_distributed"
    method = {"dpo": "dpo", "kto": "dpo", "rm": "reward"}.get(stage)
    if method:
        conversion.recipe = f"{method}_distributed"
        conversion.ours[f"{method}.trainable"] = "adapters" if adapted else "all"
    if stage == "kto":
        conversion.defaults["pref_loss"] = "kto"
    for key in (*(() if adapted else OF_ADAPTERS), *(() if method == "dpo" else OF_PAIRS)):
        conversion.defaults.pop(key, None)
    convert_datasets(conversion, stage)
    trainer.convert_fsdp_config(conversion)
    if not adapted:
        for key in conversion.keys():
            if key.startswith(("lora_", "use_dora", "use_rslora")) and not conversion.noted(key):
                conversion.drop(key, "there is no adapter")
    TABLE.apply(conversion)


def _said(c: ConfigImport, key: str) -> None:
    """`stage`, `finetuning_type`: the recipe."""
    c.carry(key, {}, f"recipe: {c.recipe}")


def _trains(c: ConfigImport, key: str) -> None:
    if c.value(key):
        c.carry(key, {})
    else:
        c.refuse(key, "a run trains")


def _rank(c: ConfigImport, key: str) -> None:
    c.carry(key, {"lora.rank": c.value(key)} | ({} if c.is_on("lora_alpha") else {"lora.alpha": 2 * c.value(key)}))


def _target(c: ConfigImport, key: str) -> None:
    value = c.value(key)
    names = value if isinstance(value, list) else [part.strip() for part in str(value).split(",")]
    c.carry(key, {"lora.target_modules": ["all-linear"] if names == ["all"] else trainer.target_modules(names)})


def _adapter(c: ConfigImport, key: str) -> None:
    value = c.value(key)
    if "," in str(value):
        c.refuse(key, "one adapter is gone on with; merge the others first: `tune export`")
    elif c.value("create_new_adapter"):
        c.refuse(key, "a new adapter goes onto the merged model: `tune export` merges")
    else:
        c.carry(key, {"lora.adapter_path": value})


def _bits(c: ConfigImport, key: str) -> None:
    kinds = {4: "nf4", 8: "int8"}
    method = str(c.value("quantization_method") or "bitsandbytes").lower()
    if c.value(key) not in kinds or method not in ("bitsandbytes", "bnb") or c.value("quantization_type") == "fp4":
        c.refuse(key, "expected 4 (nf4) or 8 bits of bitsandbytes", may_be_left_out=False)
        return
    why = "" if c.value(key) == 4 else "weights have a scale a row, outliers are not kept in 16 bits"
    (c.change if why else c.carry)(key, {"lora.quantize_base": kinds[c.value(key)]}, why)
    for other in ("quantization_method", "quantization_type", "double_quantization"):
        c.drop_once(other, "part of quantization_bit")


def _pure(c: ConfigImport, key: str) -> None:
    """Without `pure_bf16` what is trained is kept in fp32 and computed with in bf16."""
    if c.value(key):
        c.carry(key, {"dtype": "bf16"})
    elif c.value("finetuning_type") == "lora":
        c.carry(key, {"lora.dtype": "fp32"}, "what is trained is fp32 there")
    else:
        c.carry(key, {"optimizer.master_weights": True}, "what is trained is fp32 there")


def _half(c: ConfigImport, key: str) -> None:
    if not c.value(key):
        c.drop(key, "is off, as here")
    elif key == "fp16":
        c.change(key, {"dtype": "bf16"}, "bf16 has as many bits, a larger range, and needs no scaled loss")
    else:
        c.carry(key, {"dtype": "bf16"})


def _checkpointing(c: ConfigImport, key: str) -> None:
    c.carry(key, {"memory.activation_checkpointing": "none" if c.value(key) else "full"})


def _length(c: ConfigImport, key: str) -> None:
    why = "longer samples are cut at their end, there prompt and answer in proportion"
    c.change(key, {"max_seq_len": c.value(key)}, why)


def _template(c: ConfigImport, key: str) -> None:
    c.change(key, {}, TEMPLATE)


def _packing(c: ConfigImport, key: str) -> None:
    if not c.value(key):
        c.drop(key, "is off, as here")
    elif c.value("neat_packing"):
        c.carry(key, {"data.packing": True})
    elif c.value("stage") == "pt":
        c.carry(key, {}, "texts are cut where a sequence ends")
    else:
        c.change(key, {"data.packing": True}, "no sample sees another; there they do, without neat_packing")


def _samples(c: ConfigImport, key: str) -> None:
    c.carry(key, {"data.max_samples": c.value(key)})


def _prompt(c: ConfigImport, key: str) -> None:
    if c.value(key):
        c.carry(key, {"data.train_on": "all"})
    else:
        c.drop(key, "is off, as here")


def _history(c: ConfigImport, key: str) -> None:
    if c.value(key):
        c.carry(key, {"data.train_on": "last"})
    else:
        c.drop(key, "is off, as here")


def _loss(c: ConfigImport, key: str) -> None:
    name = str(c.value(key))
    if name in ("sigmoid", "ipo", "simpo") or c.value("stage") == "kto":
        c.carry(key, {"dpo.loss": "kto" if c.value("stage") == "kto" else name})
    else:
        c.refuse(key, "expected sigmoid, ipo or simpo", may_be_left_out=False)


def _reference(c: ConfigImport, key: str) -> None:
    if c.value(key) == c.value("model_name_or_path"):
        c.carry(key, {}, "the reference is the model before training")
    else:
        c.refuse(key, "the reference is the model before training, no other one")


def _attention(c: ConfigImport, key: str) -> None:
    c.drop(key, "attention takes the fastest kernel that is right")


def _float8(c: ConfigImport, key: str) -> None:
    if c.value(key):
        c.change(key, {"matmul_dtype": "fp8"}, "with a scale for each row")
    else:
        c.drop(key, "is off, as here")


def _muon(c: ConfigImport, key: str) -> None:
    if c.value(key):
        c.change(
            key,
            {"optimizer.name": "muon"},
            "AdamW steps what is no matrix here; the rates of the two are scaled otherwise there",
        )
    else:
        c.drop(key, "is off, as here")


def _order(c: ConfigImport, key: str) -> None:
    c.carry(key, {"data.shuffle": not c.value(key)})


def _probabilities(c: ConfigImport, key: str) -> None:
    c.refuse(key, "a source of data.sources has a weight: how often its samples are taken in an epoch")


def _mix(c: ConfigImport, key: str) -> None:
    if c.value(key) == "concat":
        c.carry(key, {})
    else:
        c.refuse(key, "sources are put together, each by its weight: data.sources")


TABLE = KeyTable(
    same=SAME,
    converted={
        "stage": _said,
        "finetuning_type": _said,
        "do_train": _trains,
        "lr_scheduler_type": trainer.convert_schedule,
        **trainer.CONVERTED,
        "optim": trainer.convert_optimizer,
        "use_muon": _muon,
        "num_train_epochs": trainer.convert_epochs,
        "max_samples": _samples,
        "val_size": hold_out,
        "eval_steps": trainer.convert_eval_steps,
        "per_device_eval_batch_size": trainer.convert_eval_batch_size,
        "lora_rank": _rank,
        "lora_target": _target,
        "adapter_name_or_path": _adapter,
        "quantization_bit": _bits,
        "pure_bf16": _pure,
        "bf16": _half,
        "fp16": _half,
        "disable_gradient_checkpointing": _checkpointing,
        "cutoff_len": _length,
        "template": _template,
        "packing": _packing,
        "neat_packing": _packing,
        "train_on_prompt": _prompt,
        "mask_history": _history,
        "pref_loss": _loss,
        "ref_model": _reference,
        "flash_attn": _attention,
        "fp8": _float8,
        "disable_shuffling": _order,
        "interleave_probs": _probabilities,
        "mix_strategy": _mix,
    },
    without=WITHOUT,
    refused=REFUSED,
)
