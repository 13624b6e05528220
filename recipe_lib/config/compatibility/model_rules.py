"""List the refused combinations (`Rule`) about what is trained: model, dtype, optimizer, adapters.

`table.py` joins them to the table of all rules. `lora` is the section of adapters; `matmul_dtype`
multiplies in low precision, `qat` trains for weights that are rounded afterwards. A native model is
this project's own decoder, an external one another library's (`model.implementation`).
"""

from typing import Any

from recipe_lib.config.aliases import CHOICE_ALIASES
from recipe_lib.config.compatibility.parallel_rules import DEFERRING_SCHEDULES
from recipe_lib.config.compatibility.rule import (
    EXTERNAL_MODEL,
    LORA_RECIPE,
    TWO_STAGES,
    Rule,
    is_external_model,
)
from recipe_lib.config.key_conditions import get_trained_dtype
from recipe_lib.config.mesh import SCHEDULES
from recipe_lib.config.schema import LINEARS, MIXTURE_TARGETS
from recipe_lib.config.suggest import did_you_mean, quote

MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("model.path", "model.preset"),
        applies=lambda cfg: cfg.model.path is None and cfg.model.preset is None,
        reason="neither is set",
        remedy=(
            "set model.path to a checkpoint, or model.preset to an architecture with random weights"
        ),
        example=("~model.path",),
    ),
    Rule(
        keys=("model.path", "model.preset"),
        applies=lambda cfg: cfg.model.path is not None and cfg.model.preset is not None,
        reason="both are set",
        remedy=(
            "keep one: model.path trains a checkpoint, model.preset starts from random weights"
            " (~KEY removes KEY)"
        ),
        example=("model.preset=llama3/8B",),
    ),
    Rule(
        keys=("model.preset", "tokenizer.path"),
        applies=lambda cfg: (
            cfg.model.path is None and cfg.model.preset is not None and cfg.tokenizer.path is None
        ),
        reason="an architecture brings no tokenizer",
        remedy="set tokenizer.path to a folder or file that has one",
        example=("~model.path", "model.preset=llama3/8B"),
    ),
    Rule(
        keys=("dtype", "device"),
        applies=lambda cfg: cfg.dtype == "fp64" and cfg.device == "cuda",
        reason=(
            "fp64 is for checks of the arithmetic on a CPU; no attention kernel of a GPU takes it"
        ),
        remedy="choose bf16 or fp32, or device=cpu",
        example=("dtype=fp64", "device=cuda"),
    ),
    Rule(
        keys=("dtype", "parallel.reduce_dtype"),
        applies=lambda cfg: cfg.dtype == "fp64" and cfg.parallel.reduce_dtype is not None,
        reason="summing in a lower precision would undo what fp64 is for",
        remedy="remove parallel.reduce_dtype",
        example=("dtype=fp64", "parallel.reduce_dtype=fp32"),
    ),
    Rule(
        keys=(
            "parallel.accumulate_grad_in_fp32",
            "parallel.reduce_gradients",
            "parallel.reduce_dtype",
        ),
        applies=lambda cfg: (
            cfg.parallel.accumulate_grad_in_fp32
            and cfg.parallel.reduce_gradients == "step"
            and cfg.parallel.reduce_dtype == "bf16"
        ),
        reason=(
            "FSDP reduces once a step what it has added up, in the dtype that it has added up in"
        ),
        remedy=(
            "remove parallel.reduce_dtype (fp32 is reduced), or parallel.accumulate_grad_in_fp32"
        ),
        example=(
            "parallel.accumulate_grad_in_fp32=true",
            "parallel.reduce_gradients=step",
            "parallel.reduce_dtype=bf16",
            "gradient_accumulation_steps=2",
        ),
    ),
    Rule(
        keys=("resume", "overwrite_output_dir"),
        applies=lambda cfg: cfg.resume is not None and cfg.overwrite_output_dir,
        reason="one goes on from what output_dir holds, the other replaces it",
        remedy="remove one of the two",
        example=("resume=latest", "overwrite_output_dir=true"),
    ),
    Rule(
        keys=("optimizer.master_weights", "optimizer.stochastic_rounding"),
        applies=lambda cfg: cfg.optimizer.master_weights and cfg.optimizer.stochastic_rounding,
        reason=(
            "each is there so that small steps add up, and fp32 weights need no stochastic rounding"
            " for it"
        ),
        remedy="remove one of the two",
        example=("optimizer.master_weights=true", "optimizer.stochastic_rounding=true"),
    ),
    Rule(
        keys=("dtype", "optimizer.state_bits"),
        applies=lambda cfg: cfg.optimizer.state_bits is not None and cfg.dtype == "fp64",
        reason="fewer bits would undo what fp64 is for",
        remedy="remove optimizer.state_bits",
        example=("dtype=fp64", "optimizer.state_bits=8"),
    ),
    Rule(
        keys=("optimizer.name", "optimizer.implementation", "dtype", "device"),
        applies=lambda cfg: (
            cfg.optimizer.name == "sgd"
            and cfg.optimizer.implementation == "fused"
            and cfg.device == "cpu"
            and get_trained_dtype(cfg) == "bf16"
        ),
        reason="torch's kernel leaves most elements of bf16 weights on a CPU as they are",
        remedy="choose auto or foreach",
        example=("optimizer.name=sgd", "optimizer.implementation=fused", "device=cpu"),
    ),
)

# The load-balancing loss of a mixture of experts is computed in each layer's forward.
ROUTER_LOSS_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("router_aux_loss_coef", "memory.mlp_tiles"),
        applies=lambda cfg: cfg.router_aux_loss_coef > 0 and cfg.memory.mlp_tiles > 1,
        reason="the loss is one of all tokens of a micro-batch, of which tiles know a part",
        remedy="set router_aux_loss_coef=0, or memory.mlp_tiles=1",
        example=("router_aux_loss_coef=0.01", "memory.mlp_tiles=2"),
    ),
    Rule(
        keys=("router_aux_loss_coef", "compile"),
        applies=lambda cfg: cfg.router_aux_loss_coef > 0 and cfg.compile,
        reason="compiled layers do not add to the loss",
        remedy="set router_aux_loss_coef=0, or compile=false",
        example=("router_aux_loss_coef=0.01", "compile=true"),
    ),
)


# Values of `lora.target_modules` for a native model.
_TARGETS = (*LINEARS, "embedding", "head", *MIXTURE_TARGETS, "all-linear")


def _find_unknown_target(cfg: Any) -> str | None:
    """Return the fault of the first target that a native model does not have; None: it has all."""
    unknown = [name for name in cfg.lora.target_modules if name not in _TARGETS]
    # An external model's targets are ends of its own modules' names, known once it is built.
    if is_external_model(cfg) or not unknown:
        return None
    alias = CHOICE_ALIASES.get(unknown[0])
    hint = f"; did you mean {alias}?" if alias else did_you_mean(unknown[0], _TARGETS)
    return f"found {quote(unknown[0])}, expected a list [...] of {', '.join(_TARGETS)}{hint}"


def _adapts_mixture(cfg: Any) -> bool:
    return any(name in MIXTURE_TARGETS for name in cfg.lora.target_modules)


UNKNOWN_TARGET = Rule(
    keys=("lora.target_modules",),
    applies=_find_unknown_target,
    reason="a native model has no linears of such names",
    remedy=f"choose of {', '.join(_TARGETS)}",
    example=("lora.target_modules=[c_attn]",),
    recipe=LORA_RECIPE,
    reads=("model.implementation",),
)

MIXTURE_ADAPTER_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("lora.target_modules", "lora.dora"),
        applies=lambda cfg: _adapts_mixture(cfg) and cfg.lora.dora,
        reason="adapters of routers and experts have no lengths of their own, in PEFT neither",
        remedy="set lora.dora=false (LoRA), or remove router and experts from the list",
        example=("lora.target_modules=[q, experts]", "lora.dora=true"),
        recipe=LORA_RECIPE,
    ),
    Rule(
        keys=("lora.target_modules", "lora.dropout"),
        applies=lambda cfg: _adapts_mixture(cfg) and cfg.lora.dropout > 0,
        reason="adapters of routers and experts have no dropout, in PEFT neither",
        remedy="set lora.dropout=0, or remove router and experts from the list",
        example=("lora.target_modules=[q, router]", "lora.dropout=0.1"),
        recipe=LORA_RECIPE,
    ),
)

ADAPTER_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("lora.target_modules",),
        applies=lambda cfg: len(cfg.lora.target_modules) == 0,
        reason="an empty list leaves nothing to train",
        remedy="name at least one of q, k, v, o, gate, up, down, embedding, head",
        example=("lora.target_modules=[]",),
        recipe=LORA_RECIPE,
    ),
    Rule(
        keys=("dtype", "lora.quantize_base"),
        applies=lambda cfg: cfg.lora.quantize_base != "none" and cfg.dtype == "fp64",
        reason="rounding the frozen weights would undo what fp64 is for",
        remedy="remove lora.quantize_base, or choose bf16 or fp32",
        example=("dtype=fp64", "lora.quantize_base=nf4"),
        recipe=LORA_RECIPE,
    ),
    Rule(
        keys=("dtype", "lora.dtype"),
        applies=lambda cfg: cfg.lora.dtype is not None and cfg.dtype == "fp64",
        reason="adapters in a lower precision would undo what fp64 is for",
        remedy="remove lora.dtype",
        example=("dtype=fp64", "lora.dtype=fp32"),
        recipe=LORA_RECIPE,
    ),
    Rule(
        keys=("model.preset", "lora.merge_on_save"),
        applies=lambda cfg: (
            cfg.lora.merge_on_save and cfg.model.path is None and cfg.model.preset is not None
        ),
        reason="adapters are merged into the files of a checkpoint, and random weights have none",
        remedy="remove lora.merge_on_save, or set model.path",
        example=(
            "~model.path",
            "model.preset=llama3/8B",
            "tokenizer.path=x",
            "lora.merge_on_save=true",
        ),
        recipe=LORA_RECIPE,
        reads=("model.path",),
    ),
)


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
