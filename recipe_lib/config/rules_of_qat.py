"""What quantization-aware training (`qat`) does not go together with: rows of `recipe_lib.config.rules`."""

from typing import Any

from recipe_lib.config.mesh import SCHEDULES
from recipe_lib.config.rule import Rule

_LORA = "lora_finetune_distributed"
_SPLITTING = ", ".join(name for name, facts in SCHEDULES.items() if facts.splits)


def _defers(cfg: Any) -> bool:
    return cfg.parallel.pipeline > 1 and cfg.qat is not None and SCHEDULES[cfg.parallel.pipeline_schedule].splits


# fmt: off
QAT_RULES: tuple[Rule, ...] = (
    Rule(("dtype", "qat"), lambda cfg: cfg.qat is not None and cfg.dtype == "fp64",
         "torchao rounds weights of fp32 and bf16", "remove qat, or choose bf16 or fp32", ("dtype=fp64", "qat=int8")),
    Rule(("checkpoint.keep_best", "validation.patience", "qat_start_step"),
         lambda cfg: cfg.qat is not None and cfg.qat_start_step > 0 and cfg.validation.source is not None
         and (cfg.checkpoint.keep_best or cfg.validation.patience is not None),
         "validations before rounding begins are of another model than those after it, and mostly better",
         "set qat_start_step=0, or remove checkpoint.keep_best and validation.patience",
         ("qat=int4", "qat_start_step=5", "checkpoint.keep_best=true", "validation.source=own.jsonl"),
         reads=("qat", "validation.source")),
    Rule(("recipe", "qat"), lambda cfg: cfg.qat is not None and cfg.scores_sequences,
         "quantized folders are exported of models that predict tokens", "remove qat",
         ("qat=int8",), recipe="reward_distributed"),
    Rule(("matmul_dtype", "qat"), lambda cfg: cfg.qat is not None and cfg.matmul_dtype is not None,
         "products that are rounded once more are not those of the export", "remove one of the two",
         ("qat=int4", "matmul_dtype=int8")),
    Rule(("parallel.tensor", "qat"), lambda cfg: cfg.qat is not None and cfg.parallel.tensor > 1,
         "ranks that share a matrix gather and multiply in one, and of rows cut in pieces none has the scale",
         "remove qat, or set parallel.tensor=1 (FSDP shards the weights as well)", ("parallel.tensor=2", "qat=int8")),
    Rule(("model.implementation", "qat"), lambda cfg: cfg.qat is not None and cfg.model.implementation != "native",
         "only our own models' linears are known to be those that an export rounds",
         "remove qat, or model.implementation", ("model.implementation=transformers", "qat=int8")),
    Rule(("parallel.pipeline_schedule", "qat"), _defers,
         f"the weight gradients of rounded linears cannot be deferred, as {_SPLITTING} do",
         "remove qat, or choose gpipe, 1f1b or interleaved_1f1b",
         ("parallel.pipeline=2", "gradient_accumulation_steps=4", "parallel.pipeline_schedule=zbv", "qat=int8"),
         reads=("parallel.pipeline",)),
    Rule(("lora.quantize_base", "qat"), lambda cfg: cfg.qat is not None and cfg.lora.quantize_base != "none",
         "the merged weight is what is rounded, not a base that was rounded to another grid before",
         "remove one of the two", ("lora.quantize_base=nf4", "qat=int4"), recipe=_LORA),
    Rule(("lora.dropout", "qat"), lambda cfg: cfg.qat is not None and cfg.lora.dropout > 0,
         "base and adapter are rounded as one matrix, whose input is the same for both", "set lora.dropout=0",
         ("lora.dropout=0.1", "qat=int4"), recipe=_LORA),
    Rule(("lora.dora", "qat"), lambda cfg: cfg.qat is not None and cfg.lora.dora,
         "the lengths of rows would be those of a matrix that is not rounded",
         "set lora.dora=false (LoRA), or remove qat", ("lora.dora=true", "qat=int4"), recipe=_LORA),
)
# fmt: on
