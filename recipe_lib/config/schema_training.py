"""Define the sections of a config about a step: optimizer, learning rate, parallelism, memory.

A field is declared by `key(default, help, limits...)`. The text `help`, and the first line of a
class's docstring, stand in docs/config.md. `needs` is the condition for a key to have an effect:
`memory.activation_offload` has to be set, or `parallel.pipeline > 1` to hold, and so on; where it
does not hold, the key is told of and has its default.
"""

from dataclasses import dataclass

from recipe_lib.config import key_conditions
from recipe_lib.config.flat_schema import key


@dataclass
class OptimizerConfig:
    """The optimizer."""

    name: str = key(
        "adamw", "The optimizer.", kind="optimizer.name", known_as="torchtitan optimizer.name"
    )
    lr: float = key(2e-5, "Peak learning rate.", above=0, known_as="HF learning_rate; torch lr")
    weight_decay: float = key(
        0.0,
        "Decoupled weight decay, applied to every parameter.",
        minimum=0,
        known_as="torch weight_decay",
    )
    betas: list[float] = key(
        [0.9, 0.95],
        "AdamW's two decay rates.",
        minimum=0,
        below=1,
        length=2,
        needs=key_conditions.require_optimizer_key("betas"),
        known_as="torch betas",
    )
    eps: float = key(
        1e-8,
        "AdamW's epsilon.",
        above=0,
        needs=key_conditions.require_optimizer_key("eps"),
        known_as="torch eps",
    )
    momentum: float | None = key(
        None,
        "Momentum; null: for sgd 0, for muon 0.95.",
        minimum=0,
        below=1,
        needs=key_conditions.require_optimizer_key("momentum"),
        known_as="torch SGD momentum",
    )
    state_bits: int | None = key(
        None,
        "Bits of each number of the optimizer's states; 8 and 4: in blocks with a scale each, of"
        " which 4 train little but the largest numbers; null: those of dtype, beside"
        " master_weights 32.",
        choices=(4, 8, 16, 32),
        needs=key_conditions.require_optimizer_key("state_bits"),
        known_as="torchao AdamW8bit, AdamW4bit; bitsandbytes optim_bits",
    )
    master_weights: bool = key(
        False,
        "Also keep the weights in fp32, which the steps add up in, and unless state_bits says"
        " otherwise the states; dtype=bf16 is what is computed with.",
        needs=(key_conditions.require_optimizer_key("master_weights"), key_conditions.TRAINS_BF16),
        known_as="DeepSpeed fp32 master weights; Megatron main_params_dtype",
    )
    stochastic_rounding: bool = key(
        False,
        "Round a step's bf16 weights, and states in bf16, up or down at random, so that changes"
        " smaller than bf16's resolution add up.",
        needs=(
            key_conditions.require_optimizer_key("stochastic_rounding"),
            key_conditions.TRAINS_BF16,
        ),
        known_as="torchao bf16_stochastic_round",
    )
    implementation: str = key(
        "auto",
        "`fused`: one kernel, least memory; `foreach`: grouped; `single`: one parameter at a time;"
        " `auto`: fused where torch has such a kernel and it is right (for SGD neither with FSDP"
        " nor in bf16 on a CPU), else foreach.",
        choices=("auto", "fused", "foreach", "single"),
        needs=key_conditions.STEPS_WITH_TORCH,
        known_as="torchtitan optimizer.implementation",
    )


@dataclass
class LrSchedulerConfig:
    """The learning rate over the steps."""

    type: str = key(
        "cosine",
        "Shape after the warm-up.",
        choices=("cosine", "linear", "constant"),
        known_as="HF lr_scheduler_type",
    )
    warmup_ratio: float | None = key(
        None,
        "In place of warmup_steps: the share of all optimizer steps, rounded up.",
        minimum=0,
        maximum=1,
        known_as="Axolotl warmup_ratio; HF warmup_ratio (before 5)",
    )
    warmup_steps: int = key(
        0,
        "Steps over which the rate rises linearly to optimizer.lr.",
        minimum=0,
        needs="lr_scheduler.warmup_ratio = null",
        known_as="HF warmup_steps",
    )
    min_lr_ratio: float = key(
        0.0,
        "Share of optimizer.lr that the rate falls to, one step after the last.",
        minimum=0,
        maximum=1,
        needs="lr_scheduler.type != constant",
        known_as="Axolotl cosine_min_lr_ratio; torchtitan min_lr_factor",
    )


@dataclass
class ParallelConfig:
    """How the ranks divide the work."""

    strategy: str = key(
        "fsdp",
        "`fsdp`: shards, gathered layer by layer; `ddp`: every data rank has all weights, and"
        " trained gradients are summed once a step; `auto`: what `tune run` plans to be faster and"
        " to fit.",
        choices=("fsdp", "ddp", "auto"),
        known_as="HF accelerate distributed_type; Lightning strategy",
    )
    data_shard: int = key(
        -1,
        "Ranks that share one copy of parameters, gradients and states; -1: all that are left.",
        minimum=1,
        most=2**16,
        also=(-1,),
        needs="parallel.strategy != ddp",
        known_as="torchtitan data_parallel_shard_degree",
    )
    data_replicate: int = key(
        1,
        "Copies of the sharded model (HSDP).",
        minimum=1,
        most=2**16,
        needs="parallel.strategy != ddp",
        known_as="torchtitan data_parallel_replicate_degree",
    )
    context: int = key(
        1,
        "Ranks that share each sequence (context parallel, Ulysses): each has some of its tokens,"
        " in attention all tokens of some heads.",
        minimum=1,
        most=2**12,
        known_as="torchtitan context_parallel_degree; ms-swift sequence_parallel_size",
    )
    tensor: int = key(
        1,
        "Ranks that share each matrix and each sequence (tensor and sequence parallel).",
        minimum=1,
        most=2**16,
        known_as="torchtitan tensor_parallel_degree; Megatron tensor_model_parallel_size",
    )
    tensor_regather_in_backward: str = key(
        "auto",
        "Gather a sequence's shards again in backward rather than keep them; `auto`: if layers are"
        " not checkpointed.",
        choices=("auto", "true", "false"),
        needs=("parallel.tensor > 1", "model.implementation = native"),
        known_as="Megatron's sequence parallelism gathers again, without a key",
    )
    tensor_replicate_kv_heads: bool = key(
        False,
        "With fewer kv heads than `tensor`: every rank has all of their weights, and computes the"
        " head it needs.",
        needs=("parallel.tensor > 1", "model.implementation = native"),
        known_as="vLLM replicates kv heads, without a key",
    )
    pipeline: int = key(
        1,
        "Ranks, one after the other, that the layers are divided among (pipeline).",
        minimum=1,
        most=2**12,
        known_as="torchtitan pipeline_parallel_degree; Megatron pipeline_model_parallel_size",
    )
    pipeline_schedule: str = key(
        "1f1b",
        "Order of the micro-batches' forwards and backwards on the ranks of a pipeline; those with"
        " `zero` or `v` in their names defer weight gradients to when a rank would wait.",
        choices=("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"),
        needs="parallel.pipeline > 1",
        known_as="torchtitan pipeline_parallel_schedule",
    )
    pipeline_microbatches: int | None = key(
        None,
        "Micro-batches that the batch_size x gradient_accumulation_steps sequences of a data rank"
        " go through the pipeline in; null: gradient_accumulation_steps.",
        minimum=1,
        most=2**16,
        needs="parallel.pipeline > 1",
        known_as="torch PipelineSchedule n_microbatches",
    )
    pipeline_stages_per_rank: int = key(
        2,
        "Stages on each rank of an interleaved schedule; `zbv` has 2, the others 1.",
        minimum=2,
        most=2**10,
        needs=(
            "parallel.pipeline > 1",
            "parallel.pipeline_schedule in interleaved_1f1b, interleaved_zero_bubble",
        ),
        known_as="Megatron num_virtual_stages_per_pipeline_rank",
    )
    pipeline_max_deferred_weight_grads: int | None = key(
        None,
        "Most micro-batches of a rank (each of its stages counted) whose weight gradients are"
        " deferred at a time, in schedules that defer them; fewer take less memory, the bubble is"
        " longer; null: as the schedule has it.",
        minimum=1,
        needs=(
            "parallel.pipeline > 1",
            "parallel.pipeline_schedule in interleaved_zero_bubble, zbv",
        ),
        known_as="Megatron (zero-bubble fork) zero_bubble_max_pending_backward",
    )
    pipeline_layers_per_stage: list[int] | None = key(
        None,
        "Layers of each stage, one number a stage; null: by pipeline_balance.",
        minimum=1,
        needs="parallel.pipeline > 1",
        known_as="torchtitan module_fqns_per_model_part; Megatron pipeline_model_parallel_layout",
    )
    pipeline_balance: str = key(
        "compute",
        "Layers of each stage: even in `compute`, or in `memory` of parameters and states;"
        " embedding and head counted.",
        choices=("compute", "memory"),
        needs=("parallel.pipeline > 1", "parallel.pipeline_layers_per_stage = null"),
        known_as="DeepSpeed partition_method",
    )
    fsdp_wrap_policy: str | list[str] = key(
        "auto",
        "FSDP units: `layers`; `memory_efficient` (also embedding and output, each its own); `auto`"
        " (memory_efficient if either is larger than a layer, else layers); or a list of"
        " module-name patterns.",
        choices=("auto", "layers", "memory_efficient"),
        needs="parallel.strategy != ddp",
        known_as="HF fsdp_auto_wrap_policy",
    )
    reshard_after_forward: bool = key(
        True,
        "Free a unit's gathered parameters after its forward; false: keep them.",
        needs="parallel.strategy != ddp",
        known_as="torch fully_shard reshard_after_forward",
    )
    reduce_dtype: str | None = key(
        None,
        "Gradients are summed over ranks in it; null: their own.",
        choices=("fp32", "bf16"),
        known_as="torch MixedPrecisionPolicy reduce_dtype",
    )
    reduce_gradients: str = key(
        "micro_batch",
        "When FSDP reduces gradients: with each `micro_batch`, or once a `step`, kept whole until"
        " then; with reshard_after_forward=false the weights too, gathered once a step (ZeRO-1).",
        choices=("micro_batch", "step"),
        needs=(
            "parallel.strategy != ddp",
            "gradient_accumulation_steps > 1 or parallel.pipeline > 1",
        ),
        known_as="torch set_requires_gradient_sync; HF accelerate sync_each_batch",
    )
    accumulate_grad_in_fp32: bool = key(
        False,
        "Add up the micro-batches' gradients of bf16 weights in fp32, rounded once at the end; on"
        " one device too.",
        needs=(
            key_conditions.TRAINS_BF16,
            "gradient_accumulation_steps > 1 or parallel.pipeline > 1",
        ),
        known_as="Megatron accumulate_allreduce_grads_in_fp32; nanotron accumulate_grad_in_fp32",
    )
    heartbeat_timeout_seconds: float = key(
        60.0,
        "Seconds that a rank waits for one whose process is stopped, in a step also for one that"
        " does not answer or hangs: then all ranks end, with a line that names it, and exit code 7."
        " In the first step one that hangs has 10 times as long; where all hang in a step, they"
        " have 5 times. Outside of steps one that does not answer, though nothing on its machine"
        " sees it stopped, has 5 times as long; one that hangs has 30 times.",
        minimum=1.0,
        known_as="torch TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC; HF ddp_timeout",
    )


@dataclass
class MemoryConfig:
    """Levers that trade time for memory."""

    activation_checkpointing: str = key(
        "none",
        "`full`: keep only each layer's input; `selective`: also keep attention outputs and every"
        " second matmul; `budget`: keep what saves the most time, up to activation_budget_gib.",
        choices=("none", "full", "selective", "budget"),
        known_as="torchtitan activation_checkpoint.mode; HF gradient_checkpointing",
    )
    activation_budget_gib: float | None = key(
        None,
        "GiB on a rank that the layers may keep for backward; of checkpointing `budget`.",
        above=0,
        most=2**20,
        needs="memory.activation_checkpointing = budget",
        known_as="torch activation_memory_budget, there a share",
    )
    recompute_cheap: bool = key(
        True,
        "Compute the outputs of norms and of gated products again in backward instead of keeping"
        " them; a third less is kept, for about one percent of a step's time.",
        needs=(
            "model.implementation = native or compile = false",
            "model.implementation = native or parallel.tensor = 1",
            "memory.activation_checkpointing != full",
            "memory.activation_checkpointing != selective",
            "compile = false or memory.activation_checkpointing != budget",
        ),
        known_as="Megatron recompute_modules",
    )
    activation_offload: bool = key(
        False,
        "Keep what the layers keep for backward in pinned host memory; copied while the device"
        " computes.",
        needs="device != cpu",
        known_as="torchtune enable_activation_offloading; TRL activation_offloading",
    )
    activation_offload_prefetch_layers: int = key(
        1,
        "Layers whose kept tensors are back on the device, or still being copied out, besides the"
        " current one's.",
        minimum=1,
        most=2**12,
        needs="memory.activation_offload",
        known_as="torchtune OffloadActivations max_fwd_stash_size",
    )
    mlp_tiles: int = key(
        1,
        "Tiles of a sequence's tokens that an MLP computes one after the other, again in backward.",
        minimum=1,
        most=2**16,
        known_as="Axolotl tiled_mlp_num_shards; Arctic TiledMLP",
    )
    cpu_offload: bool = key(
        False,
        "Keep sharded parameters, gradients and optimizer states in host memory.",
        needs="device != cpu",
        known_as="torchtune fsdp_cpu_offload; torch CPUOffloadPolicy",
    )
    stream_layers: bool | str = key(
        False,
        "Keep layers, embedding and head in pinned host memory, or `experts` alone; each layer's"
        " are copied to the device while the one before it computes. Trained ones need"
        " optimizer_in_backward and optimizer_offload with it.",
        choices=("experts",),
        needs=("device != cpu", "memory.cpu_offload = false"),
        known_as="Soup stream_layers; expert offloading of inference engines",
    )
    optimizer_in_backward: bool = key(
        False,
        "Step each parameter when its gradient is there, and free that; needs clip_grad_norm=null.",
        known_as="torchtune optimizer_in_bwd",
    )
    optimizer_offload: bool = key(
        False,
        "Keep optimizer states in pinned host memory; each parameter's are copied to the device for"
        " its step.",
        needs=("device != cpu", "memory.cpu_offload = false"),
        known_as="DeepSpeed offload_optimizer; Megatron optimizer_cpu_offload",
    )
    host_memory_limit_gib: float | None = key(
        None,
        "GiB of host memory that all ranks of a machine may take for what is offloaded; null: what"
        " is free.",
        above=0,
        most=2**20,
        needs=(
            "memory.cpu_offload or memory.optimizer_offload or memory.activation_offload or"
            " memory.stream_layers"
        ),
        known_as="none has it: others take what there is",
    )
    loss_chunks: int = key(
        8,
        "Chunks the loss is computed in; more: less memory for logits.",
        minimum=1,
        most=2**16,
        known_as="torchtune num_output_chunks",
    )
