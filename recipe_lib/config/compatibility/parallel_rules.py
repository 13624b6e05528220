"""List the refused combinations (`Rule`) of the section `parallel`: tensor, context, DDP, pipeline.

`table.py` joins them to the table of all rules. An external model is another library's
(`model.implementation=transformers`); its tensor plan, how each module's tensors are divided, is
inferred from one forward.
"""

from typing import Any

from recipe_lib.config.compatibility.rule import (
    EXTERNAL_MODEL,
    LORA_RECIPE,
    TWO_STAGES,
    Rule,
    is_external_model,
)
from recipe_lib.config.mesh import (
    SCHEDULES,
    compute_micro_batches,
    count_fewest_micro_batches,
    count_token_ranks,
    find_schedule_fault,
)

# Keys that rules about a pipeline's micro-batches look at (`Rule.reads`).
_BATCH_KEYS = ("batch_size", "gradient_accumulation_steps")
_SCHEDULE_KEYS = (
    "parallel.pipeline",
    "parallel.pipeline_schedule",
    "parallel.pipeline_stages_per_rank",
)
# Names of the schedules that split backward, and do its weight gradients later.
DEFERRING_SCHEDULES = ", ".join(name for name, facts in SCHEDULES.items() if facts.splits)


def _find_uneven_micro_batches(cfg: Any) -> str | None:
    """Return the fault of a number of micro-batches that does not divide the sequences of a step.

    None if it does, or there is no pipeline.
    """
    num_sequences = cfg.batch_size * cfg.gradient_accumulation_steps
    num_micro_batches = cfg.parallel.pipeline_microbatches
    if (
        cfg.parallel.pipeline == 1
        or not num_micro_batches
        or num_sequences % num_micro_batches == 0
    ):
        return None
    fewest = count_fewest_micro_batches(cfg.parallel)
    divisors = [
        number for number in range(fewest, num_sequences + 1) if num_sequences % number == 0
    ]
    choose = f"choose one of {', '.join(map(str, divisors))}" if divisors else "choose a divisor"
    return (
        f"found {num_micro_batches} micro-batches for the {num_sequences} sequences of a step"
        f" (batch_size {cfg.batch_size} x gradient_accumulation_steps"
        f" {cfg.gradient_accumulation_steps}), expected a divisor of them; {choose}"
    )


COMPILED_INFERRED_PLAN = Rule(
    keys=("model.implementation", "parallel.tensor", "compile", "parallel.fsdp_wrap_policy"),
    applies=lambda cfg: (
        is_external_model(cfg)
        and cfg.parallel.tensor > 1
        and cfg.compile
        # A list of module names, by which units may be parts of a layer.
        and not isinstance(cfg.parallel.fsdp_wrap_policy, str)
    ),
    reason=(
        "a layer that runs by an inferred plan is compiled whole, and FSDP would gather parts"
        " of it while it runs"
    ),
    remedy="set compile=false, or parallel.fsdp_wrap_policy=layers",
    example=(
        EXTERNAL_MODEL,
        "parallel.tensor=2",
        "compile=true",
        "parallel.fsdp_wrap_policy=[mlp]",
    ),
)

DORA_BY_INFERRED_PLAN = Rule(
    keys=("lora.dora", "lora.dropout", "parallel.tensor"),
    applies=lambda cfg: (
        is_external_model(cfg)
        and cfg.parallel.tensor > 1
        and cfg.lora.dora
        and cfg.lora.dropout > 0
    ),
    reason=(
        "DoRA with dropout multiplies by the frozen matrix twice, and an inferred plan is one"
        " of a single product"
    ),
    remedy="set lora.dropout=0, lora.dora=false (LoRA), or parallel.tensor=1",
    example=(EXTERNAL_MODEL, "parallel.tensor=2", "lora.dora=true", "lora.dropout=0.1"),
    recipe=LORA_RECIPE,
    reads=("model.implementation",),
)

SHARED_TENSOR_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("parallel.context", "parallel.tensor", "max_seq_len"),
        applies=lambda cfg: cfg.max_seq_len % count_token_ranks(cfg.parallel) != 0,
        reason=(
            "each rank has as many tokens of a sequence as the others, and max_seq_len is no"
            " multiple of parallel.context x parallel.tensor"
        ),
        remedy="make max_seq_len a multiple of it",
        example=("parallel.tensor=2", "max_seq_len=1023"),
    ),
    Rule(
        keys=("model.implementation", "parallel.context"),
        applies=lambda cfg: is_external_model(cfg) and cfg.parallel.context > 1,
        reason=(
            "ranks that share sequences exchange tokens for heads around attention, which is ours"
            " in a native model alone"
        ),
        remedy=(
            "set parallel.context=1; for long sequences of other models there are"
            " memory.activation_offload and parallel.tensor"
        ),
        example=(EXTERNAL_MODEL, "parallel.context=2"),
    ),
    Rule(
        keys=("parallel.tensor", "loss"),
        applies=lambda cfg: cfg.parallel.tensor > 1 and cfg.loss != "cross_entropy",
        reason="it is called with the logits of the whole vocabulary, which no rank has",
        remedy="remove loss, or set parallel.tensor=1",
        example=("parallel.tensor=2", "loss=mine"),
    ),
    Rule(
        keys=("parallel.tensor", "lora.dora"),
        applies=lambda cfg: (
            cfg.parallel.tensor > 1 and cfg.lora.dora and not is_external_model(cfg)
        ),
        reason="the norms of a matrix' rows are not reduced over the ranks that share them",
        remedy="set lora.dora=false (LoRA), or parallel.tensor=1",
        example=("parallel.tensor=2", "lora.dora=true"),
        recipe=LORA_RECIPE,
        reads=("model.implementation",),
    ),
    Rule(
        keys=("parallel.tensor", "lora.target_modules"),
        applies=lambda cfg: (
            cfg.parallel.tensor > 1
            and not {"embedding", "head"}.isdisjoint(cfg.lora.target_modules)
        ),
        reason="adapters of embedding and head are not shared by the vocabulary",
        remedy="leave embedding and head out of lora.target_modules, or set parallel.tensor=1",
        example=("parallel.tensor=2", "lora.target_modules=[q, head]"),
        recipe=LORA_RECIPE,
    ),
    Rule(
        keys=("parallel.strategy", "memory.cpu_offload"),
        applies=lambda cfg: cfg.parallel.strategy == "ddp" and cfg.memory.cpu_offload,
        reason="it is FSDP that brings offloaded parameters to the device",
        remedy="remove memory.cpu_offload, or choose fsdp",
        example=("parallel.strategy=ddp", "memory.cpu_offload=true"),
    ),
)

PIPELINE_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("parallel.pipeline_microbatches", "batch_size", "gradient_accumulation_steps"),
        applies=_find_uneven_micro_batches,
        reason=(
            "the sequences of a step, batch_size x gradient_accumulation_steps, are no multiple of"
            " the micro-batches"
        ),
        remedy="choose a divisor of them",
        example=(*TWO_STAGES, "parallel.pipeline_microbatches=3"),
        reads=_SCHEDULE_KEYS,
    ),
    Rule(
        keys=("parallel.pipeline", "parallel.pipeline_schedule", "parallel.pipeline_microbatches"),
        applies=lambda cfg: (
            # The rule above tells of those; the number of micro-batches is not known then.
            not _find_uneven_micro_batches(cfg)
            and find_schedule_fault(cfg.parallel, compute_micro_batches(cfg)[1])
        ),
        reason=(
            "ranks would wait for each other even in the middle of a step: all schedules but gpipe"
            " need as many micro-batches a step as the pipeline has ranks"
        ),
        remedy="set parallel.pipeline_microbatches (by default gradient_accumulation_steps) higher",
        example=("parallel.pipeline=4",),
        reads=(*_BATCH_KEYS, *_SCHEDULE_KEYS),
    ),
    Rule(
        keys=("parallel.pipeline_schedule", "compile"),
        applies=lambda cfg: (
            cfg.parallel.pipeline > 1
            and cfg.compile
            and SCHEDULES[cfg.parallel.pipeline_schedule].splits
        ),
        reason=(
            f"the weight gradients of compiled layers cannot be deferred, as"
            f" {DEFERRING_SCHEDULES} do"
        ),
        remedy="set compile=false, or choose gpipe, 1f1b or interleaved_1f1b",
        example=(*TWO_STAGES, "parallel.pipeline_schedule=zbv", "compile=true"),
        reads=("parallel.pipeline",),
    ),
)
