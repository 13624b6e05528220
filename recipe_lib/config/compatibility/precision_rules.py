"""Rules of low-precision matmuls (`matmul_dtype`) and quantization-aware training (`qat`)."""

from recipe_lib.config.compatibility.parallel_rules import DEFERRING_SCHEDULES
from recipe_lib.config.compatibility.rule import (
    EXTERNAL_MODEL,
    LORA_RECIPE,
    TWO_STAGES,
    Rule,
    is_external_model,
)
from recipe_lib.config.mesh import SCHEDULES

MATMUL_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("dtype", "matmul_dtype"),
        applies=lambda cfg: cfg.matmul_dtype is not None and cfg.dtype == "fp64",
        reason="rounding what is multiplied would undo what fp64 is for",
        remedy="remove matmul_dtype, or choose bf16 or fp32",
        example=("dtype=fp64", "matmul_dtype=int8"),
    ),
    Rule(
        keys=("parallel.tensor", "matmul_dtype"),
        applies=lambda cfg: cfg.matmul_dtype is not None and cfg.parallel.tensor > 1,
        reason="the matmuls of a tensor-parallel group gather and multiply in one, in dtype",
        remedy="remove matmul_dtype, or set parallel.tensor=1",
        example=("parallel.tensor=2", "matmul_dtype=int8"),
    ),
    Rule(
        keys=("lora.quantize_base", "matmul_dtype"),
        applies=lambda cfg: cfg.matmul_dtype is not None and cfg.lora.quantize_base != "none",
        reason=(
            "weights of 4 or 8 bits are multiplied in dtype, since rounding them a second time"
            " would lose more"
        ),
        remedy="remove one of the two",
        example=("lora.quantize_base=nf4", "matmul_dtype=int8"),
        recipe=LORA_RECIPE,
    ),
    Rule(
        keys=("model.implementation", "matmul_dtype"),
        applies=lambda cfg: cfg.matmul_dtype is not None and is_external_model(cfg),
        reason="only our own models' linears are known to be safe to round",
        remedy="remove matmul_dtype, or model.implementation",
        example=(EXTERNAL_MODEL, "matmul_dtype=int8"),
    ),
    Rule(
        keys=("dtype", "matmul_dtype"),
        applies=lambda cfg: cfg.matmul_dtype == "fp8" and cfg.dtype == "fp32",
        reason="FP8 matmuls give bf16",
        remedy="set dtype=bf16, or choose int8",
        example=("dtype=fp32", "matmul_dtype=fp8"),
    ),
    Rule(
        keys=("device", "matmul_dtype"),
        applies=lambda cfg: cfg.matmul_dtype == "fp8" and cfg.device == "cpu",
        reason="FP8 matmuls take a GPU of compute capability 8.9 or more",
        remedy="remove matmul_dtype, or choose int8, which runs anywhere",
        example=("device=cpu", "matmul_dtype=fp8"),
    ),
)

QAT_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("dtype", "qat"),
        applies=lambda cfg: cfg.qat is not None and cfg.dtype == "fp64",
        reason="torchao rounds weights of fp32 and bf16",
        remedy="remove qat, or choose bf16 or fp32",
        example=("dtype=fp64", "qat=int8"),
    ),
    Rule(
        keys=("checkpoint.keep_best", "validation.patience", "qat_start_step"),
        applies=lambda cfg: (
            cfg.qat is not None
            and cfg.qat_start_step > 0
            and cfg.validation.source is not None
            and (cfg.checkpoint.keep_best or cfg.validation.patience is not None)
        ),
        reason=(
            "validations before rounding begins are of another model than those after it, and"
            " mostly better"
        ),
        remedy="set qat_start_step=0, or remove checkpoint.keep_best and validation.patience",
        example=(
            "qat=int4",
            "qat_start_step=5",
            "checkpoint.keep_best=true",
            "validation.source=own.jsonl",
        ),
        reads=("qat", "validation.source"),
    ),
    Rule(
        keys=("matmul_dtype", "qat"),
        applies=lambda cfg: cfg.qat is not None and cfg.matmul_dtype is not None,
        reason="products that are rounded once more are not those of the export",
        remedy="remove one of the two",
        example=("qat=int4", "matmul_dtype=int8"),
    ),
    Rule(
        keys=("parallel.tensor", "qat"),
        applies=lambda cfg: cfg.qat is not None and cfg.parallel.tensor > 1,
        reason=(
            "ranks that share a matrix gather and multiply in one, and of rows cut in pieces none"
            " has the scale"
        ),
        remedy="remove qat, or set parallel.tensor=1 (FSDP shards the weights as well)",
        example=("parallel.tensor=2", "qat=int8"),
    ),
    Rule(
        keys=("model.implementation", "qat"),
        applies=lambda cfg: cfg.qat is not None and is_external_model(cfg),
        reason="only our own models' linears are known to be those that an export rounds",
        remedy="remove qat, or model.implementation",
        example=(EXTERNAL_MODEL, "qat=int8"),
    ),
    Rule(
        keys=("parallel.pipeline_schedule", "qat"),
        applies=lambda cfg: (
            cfg.parallel.pipeline > 1
            and cfg.qat is not None
            and SCHEDULES[cfg.parallel.pipeline_schedule].splits
        ),
        reason=(
            f"the weight gradients of rounded linears cannot be deferred, as"
            f" {DEFERRING_SCHEDULES} do"
        ),
        remedy="remove qat, or choose gpipe, 1f1b or interleaved_1f1b",
        example=(*TWO_STAGES, "parallel.pipeline_schedule=zbv", "qat=int8"),
        reads=("parallel.pipeline",),
    ),
    Rule(
        keys=("lora.quantize_base", "qat"),
        applies=lambda cfg: cfg.qat is not None and cfg.lora.quantize_base != "none",
        reason=(
            "the merged weight is what is rounded, not a base that was rounded to another grid"
            " before"
        ),
        remedy="remove one of the two",
        example=("lora.quantize_base=nf4", "qat=int4"),
        recipe=LORA_RECIPE,
    ),
    Rule(
        keys=("lora.dropout", "qat"),
        applies=lambda cfg: cfg.qat is not None and cfg.lora.dropout > 0,
        reason="base and adapter are rounded as one matrix, whose input is the same for both",
        remedy="set lora.dropout=0",
        example=("lora.dropout=0.1", "qat=int4"),
        recipe=LORA_RECIPE,
    ),
    Rule(
        keys=("lora.dora", "qat"),
        applies=lambda cfg: cfg.qat is not None and cfg.lora.dora,
        reason="the lengths of rows would be those of a matrix that is not rounded",
        remedy="set lora.dora=false (LoRA), or remove qat",
        example=("lora.dora=true", "qat=int4"),
        recipe=LORA_RECIPE,
    ),
)
