"""Settings that do not go together, with the reason and the remedy: one entry each.

`load_config` refuses by this table, `docs/config.md` prints it, and the tests walk it. A
combination that only the world (ranks, devices, files) can decide is not here: it is checked where
the world is known. A key that another one makes idle is no fault: `needs` at the key in the schema
says so.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from recipe_lib.config.aliases import CHOICE_ALIASES
from recipe_lib.config.key_conditions import get_trained_dtype, list_formats, list_generated_metrics
from recipe_lib.config.mesh import (
    SCHEDULES,
    compute_micro_batches,
    count_fewest_micro_batches,
    count_token_ranks,
    find_schedule_fault,
)
from recipe_lib.config.registry import BUILT_IN
from recipe_lib.config.schema import LINEARS, MIXTURE_TARGETS, SAMPLES
from recipe_lib.config.schema_data import resolve_sources
from recipe_lib.config.suggest import did_you_mean, quote


@dataclass(frozen=True)
class Rule:
    """One combination of settings that is refused.

    keys: those it is about, whose places an error names. applies: true for a config that has it; a
    text where reason and remedy do not say all: what it has found, with its numbers and the remedy.
    example: overrides that bring it about on a config of `recipe` with a checkpoint and local data.
    reads: further keys that it looks at.
    """

    keys: tuple[str, ...]
    applies: Callable[[Any], Any]
    reason: str
    remedy: str
    example: tuple[str, ...]
    recipe: str = "full_finetune_distributed"
    reads: tuple[str, ...] = ()

    def line(self, cfg: Any) -> str:
        """`model.path, model.preset: both are set; keep ...`, for a config that has it."""
        applies = self.applies(cfg)
        what = applies if isinstance(applies, str) else f"{self.reason}; {self.remedy}"
        return f"{', '.join(self.keys)}: {what}"


def find_broken_rules(cfg: Any, judged: Collection[str]) -> list[Rule]:
    """The entries that a config breaks. judged: dotted keys that may be judged; one about another
    is skipped.
    """
    return [
        rule
        for rule in RULES
        if all(key in judged for key in (*rule.keys, *rule.reads)) and rule.applies(cfg)
    ]


_DPO, _REWARD, _DISTILL = "dpo_distributed", "reward_distributed", "distill_distributed"
_FORMATS = ("data.source", "data.sources", "data.format", "validation.source", "validation.format")
_LORA, _EXTERNAL = "lora_finetune_distributed", "model.implementation=transformers"
_TARGETS = (*LINEARS, "embedding", "head", *MIXTURE_TARGETS, "all-linear")
_BATCH = ("batch_size", "gradient_accumulation_steps")
_SCHEDULE = ("parallel.pipeline", "parallel.pipeline_schedule", "parallel.pipeline_stages_per_rank")
_SPLITTING = ", ".join(name for name, facts in SCHEDULES.items() if facts.splits)
# What every example of a pipeline of two needs with it.
_PIPELINE = ("parallel.pipeline=2", "gradient_accumulation_steps=4")
_IN_BACKWARD = (
    "memory.optimizer_in_backward=true",
    "memory.optimizer_offload=true",
    "clip_grad_norm=null",
)
_PIPELINE_IN_ONE = ("parallel.pipeline=2", "batch_size=4", "parallel.pipeline_microbatches=4")


def _unused_formats(cfg: Any, samples: str) -> set[str]:
    """The formats that a recipe for such samples has no use for; empty for another recipe."""
    others = list_formats(cfg) & {*BUILT_IN["data.format"][1]} - {*SAMPLES[samples]}
    return others if getattr(cfg, "samples", "answers") == samples else set()


def is_external_model(cfg: Any) -> bool:
    """Return whether the model is another library's."""
    return bool(cfg.model.implementation != "native")


def _divides_layers(name: str) -> Callable[[Any], bool]:
    return lambda cfg: bool(list_generated_metrics(cfg)) and getattr(cfg.parallel, name) > 1


def _judges_steps(cfg: Any) -> bool:
    return cfg.checkpoint.keep_best or cfg.validation.patience is not None


def _unknown_metric(cfg: Any) -> str | None:
    metric = cfg.checkpoint.best_metric
    names = [*cfg.validation_numbers, *(f"validation_{name}" for name in cfg.validation.metrics)]
    if not _judges_steps(cfg) or metric in names:
        return None
    own = "the Config of a recipe of your own names others as its validation_numbers"
    return (
        f"found {quote(metric)}, expected {' or '.join(names)}{did_you_mean(metric, names)}; {own}"
    )


def _streams_trained(cfg: Any) -> bool:
    return bool(cfg.memory.stream_layers) and getattr(cfg, "trained_adapters", None) is None


def _steps_in_backward(cfg: Any) -> bool:
    return cfg.memory.optimizer_in_backward and cfg.memory.optimizer_offload


def _unknown_target(cfg: Any) -> str | None:
    unknown = [name for name in cfg.lora.target_modules if name not in _TARGETS]
    if is_external_model(cfg) or not unknown:
        return None
    meant = CHOICE_ALIASES.get(unknown[0])
    hint = f"; did you mean {meant}?" if meant else did_you_mean(unknown[0], _TARGETS)
    return f"found {quote(unknown[0])}, expected a list [...] of {', '.join(_TARGETS)}{hint}"


def _of_mixture(cfg: Any) -> bool:
    return not is_external_model(cfg) and any(
        name in MIXTURE_TARGETS for name in cfg.lora.target_modules
    )


def _uneven(cfg: Any) -> str | None:
    sequences, count = (
        cfg.batch_size * cfg.gradient_accumulation_steps,
        cfg.parallel.pipeline_microbatches,
    )
    if cfg.parallel.pipeline == 1 or not count or sequences % count == 0:
        return None
    fewest = count_fewest_micro_batches(cfg.parallel)
    fitting = [number for number in range(fewest, sequences + 1) if sequences % number == 0]
    choose = f"choose one of {', '.join(map(str, fitting))}" if fitting else "choose a divisor"
    return (
        f"found {count} micro-batches for the {sequences} sequences of a step (batch_size"
        f" {cfg.batch_size} x gradient_accumulation_steps {cfg.gradient_accumulation_steps}),"
        f" expected a divisor of them; {choose}"
    )


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule(("model.path", "model.preset"), lambda cfg: cfg.model.path is None and cfg.model.preset is None,
         "neither is set", "set model.path to a checkpoint, or model.preset to an architecture with random weights",
         ("~model.path",)),
    Rule(("model.path", "model.preset"), lambda cfg: cfg.model.path is not None and cfg.model.preset is not None,
         "both are set",
         "keep one: model.path trains a checkpoint, model.preset starts from random weights (~KEY removes KEY)",
         ("model.preset=llama3/8B",)),
    Rule(("model.preset", "tokenizer.path"),
         lambda cfg: cfg.model.path is None and cfg.model.preset is not None and cfg.tokenizer.path is None,
         "an architecture brings no tokenizer", "set tokenizer.path to a folder or file that has one",
         ("~model.path", "model.preset=llama3/8B")),
    Rule(("dtype", "device"), lambda cfg: cfg.dtype == "fp64" and cfg.device == "cuda",
         "fp64 is for checks of the arithmetic on a CPU; no attention kernel of a GPU takes it",
         "choose bf16 or fp32, or device=cpu", ("dtype=fp64", "device=cuda")),
    Rule(("dtype", "parallel.reduce_dtype"),
         lambda cfg: cfg.dtype == "fp64" and cfg.parallel.reduce_dtype is not None,
         "summing in a lower precision would undo what fp64 is for", "remove parallel.reduce_dtype",
         ("dtype=fp64", "parallel.reduce_dtype=fp32")),
    Rule(("parallel.accumulate_grad_in_fp32", "parallel.reduce_gradients", "parallel.reduce_dtype"),
         lambda cfg: cfg.parallel.accumulate_grad_in_fp32 and cfg.parallel.reduce_gradients == "step"
         and cfg.parallel.reduce_dtype == "bf16",
         "FSDP reduces once a step what it has added up, in the dtype that it has added up in",
         "remove parallel.reduce_dtype (fp32 is reduced), or parallel.accumulate_grad_in_fp32",
         ("parallel.accumulate_grad_in_fp32=true", "parallel.reduce_gradients=step", "parallel.reduce_dtype=bf16",
          "gradient_accumulation_steps=2")),
    Rule(("resume", "overwrite_output_dir"), lambda cfg: cfg.resume is not None and cfg.overwrite_output_dir,
         "one goes on from what output_dir holds, the other replaces it", "remove one of the two",
         ("resume=latest", "overwrite_output_dir=true")),
    Rule(("optimizer.master_weights", "optimizer.stochastic_rounding"),
         lambda cfg: cfg.optimizer.master_weights and cfg.optimizer.stochastic_rounding,
         "each is there so that small steps add up, and fp32 weights need no stochastic rounding for it",
         "remove one of the two",
         ("optimizer.master_weights=true", "optimizer.stochastic_rounding=true")),
    Rule(("dtype", "optimizer.state_bits"), lambda cfg: cfg.optimizer.state_bits is not None and cfg.dtype == "fp64",
         "fewer bits would undo what fp64 is for", "remove optimizer.state_bits",
         ("dtype=fp64", "optimizer.state_bits=8")),
    Rule(("optimizer.name", "optimizer.implementation", "dtype", "device"),
         lambda cfg: cfg.optimizer.name == "sgd" and cfg.optimizer.implementation == "fused" and cfg.device == "cpu"
         and get_trained_dtype(cfg) == "bf16",
         "torch's kernel leaves most elements of bf16 weights on a CPU as they are", "choose auto or foreach",
         ("optimizer.name=sgd", "optimizer.implementation=fused", "device=cpu")),
    Rule(("clip_grad_norm", "memory.optimizer_in_backward"),
         lambda cfg: cfg.memory.optimizer_in_backward and cfg.clip_grad_norm is not None,
         "a parameter is stepped before the norm of all gradients is known",
         "set clip_grad_norm=null (the norm is logged all the same), or remove memory.optimizer_in_backward",
         ("memory.optimizer_in_backward=true",)),
    Rule(("gradient_accumulation_steps", "memory.optimizer_in_backward"),
         lambda cfg: cfg.memory.optimizer_in_backward and cfg.gradient_accumulation_steps > 1,
         "each backward would be a separate step",
         "set gradient_accumulation_steps=1 (batch_size has the sequences), or remove memory.optimizer_in_backward",
         ("memory.optimizer_in_backward=true", "clip_grad_norm=null", "gradient_accumulation_steps=2")),
    Rule(("memory.optimizer_in_backward", "parallel.pipeline"),
         lambda cfg: cfg.memory.optimizer_in_backward and cfg.parallel.pipeline > 1,
         "a pipeline adds up the gradients of several micro-batches", "remove one of the two",
         ("memory.optimizer_in_backward=true", "clip_grad_norm=null", *_PIPELINE_IN_ONE)),
    Rule(("memory.optimizer_in_backward", "parallel.strategy"),
         lambda cfg: cfg.memory.optimizer_in_backward and cfg.parallel.strategy == "ddp",
         "replicas sum their gradients once a step, after backward",
         "set parallel.strategy=fsdp, or remove memory.optimizer_in_backward",
         ("memory.optimizer_in_backward=true", "clip_grad_norm=null", "parallel.strategy=ddp")),
    Rule(("memory.optimizer_in_backward", "parallel.data_replicate"),
         lambda cfg: cfg.memory.optimizer_in_backward and cfg.parallel.data_replicate > 1,
         "FSDP holds what it sums over copies of the model to the end of backward, so that no gradient would be freed",
         "set parallel.data_replicate=1, or remove memory.optimizer_in_backward",
         ("memory.optimizer_in_backward=true", "clip_grad_norm=null", "parallel.data_replicate=2")),
    Rule(("memory.activation_checkpointing", "memory.activation_offload"),
         lambda cfg: cfg.memory.activation_offload and cfg.memory.activation_checkpointing in ("selective", "budget"),
         "selective and budget keep their tensors outside the saved-tensor hooks, on the device",
         "choose full (each layer's input is sent) or none (all that it keeps is sent)",
         ("memory.activation_checkpointing=selective", "memory.activation_offload=true")),
    Rule(("memory.activation_checkpointing", "memory.activation_budget_gib"),
         lambda cfg: cfg.memory.activation_checkpointing == "budget" and cfg.memory.activation_budget_gib is None,
         "budget needs to know how much", "set memory.activation_budget_gib (GiB), or choose none, selective or full",
         ("memory.activation_checkpointing=budget",)),
    Rule(("model.implementation", "memory.activation_checkpointing", "memory.activation_budget_gib"),
         lambda cfg: is_external_model(cfg) and cfg.memory.activation_checkpointing == "budget"
         and cfg.memory.activation_budget_gib is not None,
         "what its layers keep is found out for the decoder of model.implementation=native alone",
         "choose none, selective or full",
         (_EXTERNAL, "memory.activation_checkpointing=budget", "memory.activation_budget_gib=4")),
    Rule(("model.implementation", "memory.mlp_tiles"), lambda cfg: cfg.memory.mlp_tiles > 1 and is_external_model(cfg),
         "the MLPs of model.implementation=native alone can be computed in pieces", "remove memory.mlp_tiles",
         ("model.implementation=transformers", "memory.mlp_tiles=4")),
    Rule(("compile", "memory.mlp_tiles"), lambda cfg: cfg.memory.mlp_tiles > 1 and cfg.compile,
         "compiled code decides itself what it keeps, and could compute the tiles together again",
         "remove one of the two", ("compile=true", "memory.mlp_tiles=4")),
    Rule(("lora.target_modules",), _unknown_target,
         "a native model has no linears of such names", f"choose of {', '.join(_TARGETS)}",
         ("lora.target_modules=[c_attn]",), recipe=_LORA, reads=("model.implementation",)),
    Rule(("model.implementation", "parallel.tensor", "compile", "parallel.fsdp_wrap_policy"),
         lambda cfg: is_external_model(cfg) and cfg.parallel.tensor > 1 and cfg.compile
         and not isinstance(cfg.parallel.fsdp_wrap_policy, str),
         "a layer that runs by an inferred plan is compiled whole, and FSDP would gather parts of it while it runs",
         "set compile=false, or parallel.fsdp_wrap_policy=layers",
         (_EXTERNAL, "parallel.tensor=2", "compile=true", "parallel.fsdp_wrap_policy=[mlp]")),
    Rule(("lora.target_modules", "lora.dora"), lambda cfg: _of_mixture(cfg) and cfg.lora.dora,
         "adapters of routers and experts have no lengths of their own, in PEFT neither",
         "set lora.dora=false (LoRA), or remove router and experts from the list",
         ("lora.target_modules=[q, experts]", "lora.dora=true"), recipe=_LORA),
    Rule(("lora.target_modules", "lora.dropout"), lambda cfg: _of_mixture(cfg) and cfg.lora.dropout > 0,
         "adapters of routers and experts have no dropout, in PEFT neither",
         "set lora.dropout=0, or remove router and experts from the list",
         ("lora.target_modules=[q, router]", "lora.dropout=0.1"), recipe=_LORA),
    Rule(("router_aux_loss_coef", "memory.mlp_tiles"),
         lambda cfg: cfg.router_aux_loss_coef > 0 and cfg.memory.mlp_tiles > 1,
         "the loss is one of all tokens of a micro-batch, of which tiles know a part",
         "set router_aux_loss_coef=0, or memory.mlp_tiles=1", ("router_aux_loss_coef=0.01", "memory.mlp_tiles=2")),
    Rule(("router_aux_loss_coef", "compile"), lambda cfg: cfg.router_aux_loss_coef > 0 and cfg.compile,
         "compiled layers do not add to the loss", "set router_aux_loss_coef=0, or compile=false",
         ("router_aux_loss_coef=0.01", "compile=true")),
    Rule(("memory.stream_layers", "memory.optimizer_in_backward", "memory.optimizer_offload"),
         lambda cfg: _streams_trained(cfg) and not _steps_in_backward(cfg),
         "a trained layer has to be stepped while it is on the device, and its states not to stay there",
         "set memory.optimizer_in_backward=true memory.optimizer_offload=true clip_grad_norm=null, or use "
         "memory.cpu_offload",
         ("memory.stream_layers=true",)),
    Rule(("memory.stream_layers", "parallel.tensor"),
         lambda cfg: _streams_trained(cfg) and _steps_in_backward(cfg) and cfg.parallel.tensor > 1,
         "the gradients of norms are summed over a tensor-parallel group after backward, when their layer is gone",
         "set parallel.tensor=1, or use memory.cpu_offload",
         ("memory.stream_layers=true", "parallel.tensor=2", *_IN_BACKWARD)),
    Rule(("memory.stream_layers", "optimizer.name"),
         lambda cfg: _streams_trained(cfg) and _steps_in_backward(cfg) and cfg.optimizer.name == "muon",
         "its step takes a matrix whole, whose parts it shares out among the ranks",
         "choose adamw or sgd, or use memory.cpu_offload",
         ("memory.stream_layers=true", "optimizer.name=muon", *_IN_BACKWARD)),
    Rule(("lora.dora", "lora.dropout", "parallel.tensor"),
         lambda cfg: is_external_model(cfg) and cfg.parallel.tensor > 1 and cfg.lora.dora and cfg.lora.dropout > 0,
         "DoRA with dropout multiplies by the frozen matrix twice, and an inferred plan is one of a single product",
         "set lora.dropout=0, lora.dora=false (LoRA), or parallel.tensor=1",
         (_EXTERNAL, "parallel.tensor=2", "lora.dora=true", "lora.dropout=0.1"), recipe=_LORA,
         reads=("model.implementation",)),
    Rule(("data.source", "data.sources"), lambda cfg: not resolve_sources(cfg.data), "neither is set",
         "set data.source to a file or folder of samples (JSON, JSON lines, CSV, Parquet, text; also .gz and .zst) or "
         "to hub:OWNER/NAME, or data.sources to several",
         ("~data.source",)),
    Rule(("data.source", "data.sources"), lambda cfg: cfg.data.source is not None and len(cfg.data.sources) > 0,
         "both are set", "move data.source into the list, or remove one of the two",
         ("data.source=own.jsonl", "data.sources=[{source: more.jsonl}]")),
    Rule(("data.pad_to_multiple_of", "max_seq_len"), lambda cfg: cfg.data.pad_to_multiple_of > cfg.max_seq_len,
         "every sequence would be padded beyond the longest that there can be",
         "lower data.pad_to_multiple_of to max_seq_len or less", ("data.pad_to_multiple_of=4096",)),
    Rule(("data.format",), lambda cfg: "preference" in _unused_formats(cfg, "answers"),
         "this recipe has no use for pairs of a chosen and a rejected answer",
         "choose another format, or run dpo_distributed", ("data.format=preference",), reads=_FORMATS),
    Rule(("data.format",), lambda cfg: _unused_formats(cfg, "answers") & {"kto", "classification"},
         "this recipe has no use for the labels of such samples",
         "choose another format, or run dpo_distributed with dpo.loss=kto, or reward_distributed with "
         "reward.loss=classification", ("data.format=kto",), reads=_FORMATS),
    Rule(("dpo.loss", "data.format"), lambda cfg: _unused_formats(cfg, "pairs"),
         "the loss compares a chosen with a rejected answer, which samples of this format do not have",
         "set data.format to preference", ("data.format=alpaca",), recipe=_DPO, reads=_FORMATS),
    Rule(("dpo.loss", "data.format"), lambda cfg: _unused_formats(cfg, "labeled answers"),
         "the loss is one of answers that are wanted or not, which samples of this format do not say",
         "set data.format to kto, or to preference, whose pairs are taken apart",
         ("dpo.loss=kto", "data.format=alpaca"), recipe=_DPO, reads=_FORMATS),
    Rule(("reward.loss", "data.format"), lambda cfg: _unused_formats(cfg, "pairs"),
         "the loss compares a chosen with a rejected answer, which samples of this format do not have",
         "set data.format to preference, or reward.loss=classification", ("data.format=alpaca",), _REWARD, _FORMATS),
    Rule(("reward.loss", "data.format"), lambda cfg: _unused_formats(cfg, "classes"),
         "samples of this format have no class", "set data.format to classification, or reward.loss=pairwise",
         ("reward.loss=classification", "data.format=preference"), recipe=_REWARD, reads=_FORMATS),
    Rule(("model.implementation", "reward.loss"), is_external_model,
         "the score head is one of our own decoder", "set model.implementation=native", (_EXTERNAL,), recipe=_REWARD),
    Rule(("lora.target_modules", "reward.loss"), lambda cfg: "head" in cfg.lora.target_modules,
         "a score head is in the place of the output head, and is trained whole",
         "leave head out of lora.target_modules", ("lora.target_modules=[q, head]",), recipe=_REWARD),
    Rule(("distill.teacher", "distill.teacher_preset"),
         lambda cfg: len(cfg.distill.sources) != 1
         and f"found {' and '.join(cfg.distill.sources) or 'none of them'}, expected one; set distill.teacher to a "
         "checkpoint with the model's tokenizer, and no other (~KEY removes KEY)",
         "there is one teacher", "set one", ("distill.teacher_preset=llama3/8B",), recipe=_DISTILL),
    Rule(("distill.divergence", "parallel.pipeline"), lambda cfg: cfg.parallel.pipeline > 1,
         "the teacher would need stages and a schedule of its own",
         "set parallel.pipeline=1; a teacher that is too large is smaller with distill.quantize_teacher, and on the "
         "host with distill.stream_teacher",
         ("parallel.pipeline=2", "gradient_accumulation_steps=4"), recipe=_DISTILL),
    Rule(("distill.divergence", "model.implementation"), is_external_model,
         "teacher and model hand hidden states to each other's output heads, which those of model.implementation="
         "native do", "remove model.implementation", (_EXTERNAL,), recipe=_DISTILL),
    Rule(("dtype", "distill.quantize_teacher"),
         lambda cfg: cfg.distill.quantize_teacher != "none" and cfg.dtype == "fp64",
         "rounding the teacher's weights would undo what fp64 is for",
         "remove distill.quantize_teacher, or choose bf16 or fp32", ("dtype=fp64", "distill.quantize_teacher=nf4"),
         recipe=_DISTILL),
    Rule(("tokenizer.chat_template", "data.template"),
         lambda cfg: cfg.tokenizer.chat_template is not None and cfg.data.template == "plain",
         "the built-in plain template would be used in place of the file", "remove one of the two",
         ("tokenizer.chat_template=chat.jinja", "data.template=plain")),
    Rule(("parallel.context", "parallel.tensor", "max_seq_len"),
         lambda cfg: cfg.max_seq_len % count_token_ranks(cfg.parallel) != 0,
         "each rank has as many tokens of a sequence as the others, and max_seq_len is no multiple of parallel.context "
         "x parallel.tensor", "make max_seq_len a multiple of it", ("parallel.tensor=2", "max_seq_len=1023")),
    Rule(("model.implementation", "parallel.context"), lambda cfg: is_external_model(cfg) and cfg.parallel.context > 1,
         "ranks that share sequences exchange tokens for heads around attention, which is ours in a native model alone",
         "set parallel.context=1; for long sequences of other models there are memory.activation_offload and "
         "parallel.tensor", (_EXTERNAL, "parallel.context=2")),
    Rule(("parallel.tensor", "loss"), lambda cfg: cfg.parallel.tensor > 1 and cfg.loss != "cross_entropy",
         "it is called with the logits of the whole vocabulary, which no rank has",
         "remove loss, or set parallel.tensor=1", ("parallel.tensor=2", "loss=mine")),
    Rule(("parallel.tensor", "lora.dora"),
         lambda cfg: cfg.parallel.tensor > 1 and cfg.lora.dora and not is_external_model(cfg),
         "the norms of a matrix' rows are not reduced over the ranks that share them",
         "set lora.dora=false (LoRA), or parallel.tensor=1", ("parallel.tensor=2", "lora.dora=true"), recipe=_LORA,
         reads=("model.implementation",)),
    Rule(("parallel.tensor", "lora.target_modules"),
         lambda cfg: cfg.parallel.tensor > 1 and not {"embedding", "head"}.isdisjoint(cfg.lora.target_modules),
         "adapters of embedding and head are not shared by the vocabulary",
         "leave embedding and head out of lora.target_modules, or set parallel.tensor=1",
         ("parallel.tensor=2", "lora.target_modules=[q, head]"), recipe=_LORA),
    Rule(("parallel.strategy", "memory.cpu_offload"),
         lambda cfg: cfg.parallel.strategy == "ddp" and cfg.memory.cpu_offload,
         "it is FSDP that brings offloaded parameters to the device", "remove memory.cpu_offload, or choose fsdp",
         ("parallel.strategy=ddp", "memory.cpu_offload=true")),
    Rule(("dtype", "matmul_dtype"), lambda cfg: cfg.matmul_dtype is not None and cfg.dtype == "fp64",
         "rounding what is multiplied would undo what fp64 is for", "remove matmul_dtype, or choose bf16 or fp32",
         ("dtype=fp64", "matmul_dtype=int8")),
    Rule(("parallel.tensor", "matmul_dtype"), lambda cfg: cfg.matmul_dtype is not None and cfg.parallel.tensor > 1,
         "the matmuls of a tensor-parallel group gather and multiply in one, in dtype",
         "remove matmul_dtype, or set parallel.tensor=1", ("parallel.tensor=2", "matmul_dtype=int8")),
    Rule(("lora.quantize_base", "matmul_dtype"),
         lambda cfg: cfg.matmul_dtype is not None and cfg.lora.quantize_base != "none",
         "weights of 4 or 8 bits are multiplied in dtype, since rounding them a second time would lose more",
         "remove one of the two", ("lora.quantize_base=nf4", "matmul_dtype=int8"), recipe=_LORA),
    Rule(("model.implementation", "matmul_dtype"), lambda cfg: cfg.matmul_dtype is not None and is_external_model(cfg),
         "only our own models' linears are known to be safe to round", "remove matmul_dtype, or model.implementation",
         ("model.implementation=transformers", "matmul_dtype=int8")),
    Rule(("dtype", "matmul_dtype"), lambda cfg: cfg.matmul_dtype == "fp8" and cfg.dtype == "fp32",
         "FP8 matmuls give bf16", "set dtype=bf16, or choose int8", ("dtype=fp32", "matmul_dtype=fp8")),
    Rule(("device", "matmul_dtype"), lambda cfg: cfg.matmul_dtype == "fp8" and cfg.device == "cpu",
         "FP8 matmuls take a GPU of compute capability 8.9 or more",
         "remove matmul_dtype, or choose int8, which runs anywhere", ("device=cpu", "matmul_dtype=fp8")),
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
    Rule(("parallel.pipeline_schedule", "qat"),
         lambda cfg: cfg.parallel.pipeline > 1 and cfg.qat is not None
         and SCHEDULES[cfg.parallel.pipeline_schedule].splits,
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
    Rule(("parallel.pipeline_microbatches", "batch_size", "gradient_accumulation_steps"), _uneven,
         "the sequences of a step, batch_size x gradient_accumulation_steps, are no multiple of the micro-batches",
         "choose a divisor of them", (*_PIPELINE, "parallel.pipeline_microbatches=3"), reads=_SCHEDULE),
    Rule(("parallel.pipeline", "parallel.pipeline_schedule", "parallel.pipeline_microbatches"),
         lambda cfg: not _uneven(cfg) and find_schedule_fault(cfg.parallel, compute_micro_batches(cfg)[1]),
         "ranks would wait for each other even in the middle of a step: all schedules but gpipe need as many "
         "micro-batches a step as the pipeline has ranks",
         "set parallel.pipeline_microbatches (by default gradient_accumulation_steps) higher",
         ("parallel.pipeline=4",), reads=(*_BATCH, *_SCHEDULE)),
    Rule(("parallel.pipeline_schedule", "compile"),
         lambda cfg: cfg.parallel.pipeline > 1 and cfg.compile and SCHEDULES[cfg.parallel.pipeline_schedule].splits,
         f"the weight gradients of compiled layers cannot be deferred, as {_SPLITTING} do",
         "set compile=false, or choose gpipe, 1f1b or interleaved_1f1b",
         (*_PIPELINE, "parallel.pipeline_schedule=zbv", "compile=true"), reads=("parallel.pipeline",)),
    Rule(("lora.target_modules",), lambda cfg: len(cfg.lora.target_modules) == 0,
         "an empty list leaves nothing to train", "name at least one of q, k, v, o, gate, up, down, embedding, head",
         ("lora.target_modules=[]",), recipe=_LORA),
    Rule(("dtype", "lora.quantize_base"), lambda cfg: cfg.lora.quantize_base != "none" and cfg.dtype == "fp64",
         "rounding the frozen weights would undo what fp64 is for",
         "remove lora.quantize_base, or choose bf16 or fp32", ("dtype=fp64", "lora.quantize_base=nf4"), recipe=_LORA),
    Rule(("dtype", "lora.dtype"), lambda cfg: cfg.lora.dtype is not None and cfg.dtype == "fp64",
         "adapters in a lower precision would undo what fp64 is for", "remove lora.dtype",
         ("dtype=fp64", "lora.dtype=fp32"), recipe=_LORA),
    Rule(("model.preset", "lora.merge_on_save"),
         lambda cfg: cfg.lora.merge_on_save and cfg.model.path is None and cfg.model.preset is not None,
         "adapters are merged into the files of a checkpoint, and random weights have none",
         "remove lora.merge_on_save, or set model.path",
         ("~model.path", "model.preset=llama3/8B", "tokenizer.path=x", "lora.merge_on_save=true"), recipe=_LORA,
         reads=("model.path",)),
    Rule(("validation.metrics", "data.format"), lambda cfg: bool(cfg.validation.metrics) and cfg.own_loss is not None,
         "the recipe's validation has numbers of its own, and no single answers to measure",
         "remove validation.metrics", ("validation.metrics=[exact_match]", "validation.source=held_out.jsonl"),
         recipe="dpo_distributed"),
    *(Rule(("validation.metrics", f"parallel.{name}"), _divides_layers(name),
           "a plugin's metric is measured of generated answers, which takes whole layers on each rank",
           f"set parallel.{name}=1, or measure after training with `tune eval`",
           ("validation.metrics=[mine]", "validation.source=held_out.jsonl", f"parallel.{name}=2",
            *(["gradient_accumulation_steps=4"] if name == "pipeline" else [])))
      for name in ("tensor", "context", "pipeline")),
    Rule(("checkpoint.keep_best", "validation.patience", "validation.source"),
         lambda cfg: _judges_steps(cfg) and cfg.validation.source is None,
         "which step is best is found by validation, and there is none",
         "set validation.source to samples that are not trained on, or remove the others",
         ("checkpoint.keep_best=true",)),
    Rule(("checkpoint.best_metric",), _unknown_metric, "validation gives no such number", "choose one that it gives",
         ("checkpoint.keep_best=true", "validation.source=own.jsonl", "checkpoint.best_metric=eval_loss"),
         reads=("checkpoint.keep_best", "validation.patience", "validation.source")),
    Rule(("validation.metrics", "compile"), lambda cfg: bool(list_generated_metrics(cfg)) and cfg.compile,
         "answers are generated token by token, for which compiled layers would be compiled anew again and again",
         "set compile=false, or measure after training with `tune eval`",
         ("validation.metrics=[mine]", "validation.source=held_out.jsonl", "compile=true")),
)
# fmt: on
