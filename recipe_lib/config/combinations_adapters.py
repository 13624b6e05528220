"""Combinations of settings of adapters and of preference optimization that are refused."""

from recipe_lib.config.combination import Incompatible

_LORA, _DPO = "lora_finetune_distributed", "dpo_distributed"

# A key of the section `lora`, and a value that is not its default.
_LORA_KEYS = {
    "rank": "4", "alpha": "8", "dropout": "0.1", "target_modules": "[q]", "rslora": "true", "dora": "true",
    "quantize_base": "nf4", "dtype": "fp32", "adapter_path": "outputs/run/adapter", "merge_on_save": "true",
}  # fmt: skip

ADAPTERS: tuple[Incompatible, ...] = (
    Incompatible(
        "no targets",
        lambda cfg: len(cfg.lora.target_modules) == 0,
        ("lora.target_modules",),
        "an empty list leaves nothing to train",
        "name at least one of q, k, v, o, gate, up, down, embedding, head",
        ("lora.target_modules=[]",),
        recipe=_LORA,
    ),
    Incompatible(
        "quantized fp64",
        lambda cfg: cfg.lora.quantize_base != "none" and cfg.dtype == "fp64",
        ("dtype", "lora.quantize_base"),
        "rounding the frozen weights would undo what fp64 is for",
        "remove lora.quantize_base, or choose bf16 or fp32",
        ("dtype=fp64", "lora.quantize_base=nf4"),
        recipe=_LORA,
    ),
    Incompatible(
        "lower adapters of fp64",
        lambda cfg: cfg.lora.dtype is not None and cfg.dtype == "fp64",
        ("dtype", "lora.dtype"),
        "adapters in a lower precision would undo what fp64 is for",
        "remove lora.dtype",
        ("dtype=fp64", "lora.dtype=fp32"),
        recipe=_LORA,
    ),
    Incompatible(
        "merge into random weights",
        lambda cfg: cfg.lora.merge_on_save and cfg.model.path is None and cfg.model.preset is not None,
        ("model.preset", "lora.merge_on_save"),
        "adapters are merged into the files of a checkpoint, and random weights have none",
        "remove lora.merge_on_save, or set model.path",
        ("~model.path", "model.preset=llama3/8B", "tokenizer.path=x", "lora.merge_on_save=true"),
        recipe=_LORA,
        reads=("model.path",),
    ),
    Incompatible(
        "merge of what is not saved",
        lambda cfg: cfg.lora.merge_on_save and not cfg.checkpoint.save_model,
        ("checkpoint.save_model", "lora.merge_on_save"),
        "the adapter that would be merged is not written",
        "remove one of the two",
        ("checkpoint.save_model=false", "lora.merge_on_save=true"),
        recipe=_LORA,
    ),
    *(
        Incompatible(
            f"lora.{word} without adapters",
            lambda cfg: cfg.dpo.trainable == "all",
            ("dpo.trainable", f"lora.{word}"),
            "every parameter is trained, and there are no adapters",
            f"remove lora.{word}, or set dpo.trainable to adapters",
            ("dpo.trainable=all", f"lora.{word}={value}"),
            unread=f"lora.{word}",
            recipe=_DPO,
        )
        for word, value in _LORA_KEYS.items()
    ),
    Incompatible(
        "another loss beside dpo's",
        lambda cfg: True,
        ("dpo.loss", "loss"),
        "the loss of pairs is dpo.loss",
        "remove loss",
        ("loss=mine",),
        unread="loss",
        recipe=_DPO,
    ),
    Incompatible(
        "smoothing of another loss",
        lambda cfg: cfg.dpo.loss != "sigmoid",
        ("dpo.loss", "dpo.label_smoothing"),
        "only sigmoid reads it",
        "remove dpo.label_smoothing, or choose sigmoid",
        ("dpo.loss=ipo", "dpo.label_smoothing=0.1"),
        unread="dpo.label_smoothing",
        recipe=_DPO,
    ),
    Incompatible(
        "margin of another loss",
        lambda cfg: cfg.dpo.loss != "simpo",
        ("dpo.loss", "dpo.simpo_gamma"),
        "only simpo reads it",
        "remove dpo.simpo_gamma, or choose simpo",
        ("dpo.simpo_gamma=1.0",),
        unread="dpo.simpo_gamma",
        recipe=_DPO,
    ),
    Incompatible(
        "reference of simpo",
        lambda cfg: cfg.dpo.loss == "simpo" and cfg.dpo.reference_free,
        ("dpo.loss", "dpo.reference_free"),
        "simpo has no reference",
        "remove dpo.reference_free",
        ("dpo.loss=simpo", "dpo.reference_free=true"),
        recipe=_DPO,
    ),
)
