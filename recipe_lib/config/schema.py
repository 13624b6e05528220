"""Every key of a config: its type, default, legal values and one line of description.

The dataclasses are the schema that a YAML file is checked against, that `docs/config.md` and
`tune cat --describe` are generated from, and that a recipe reads. This file imports no torch.
"""

from dataclasses import dataclass, field

from recipe_lib.config.field import key
from recipe_lib.config.schema_data import DataConfig, ModelConfig, SourceConfig, TokenizerConfig, ValidationConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DpoConfig",
    "DpoFinetuneConfig",
    "FullFinetuneConfig",
    "LogConfig",
    "LoraConfig",
    "LoraFinetuneConfig",
    "LrSchedulerConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "SourceConfig",
    "TokenizerConfig",
    "ValidationConfig",
    "key",
]


@dataclass
class OptimizerConfig:
    """The optimizer."""

    name: str = key("adamw", "The optimizer.", kind="optimizer.name")
    lr: float = key(2e-5, "Peak learning rate.", above=0)
    weight_decay: float = key(0.0, "Decoupled weight decay, applied to every parameter.", minimum=0)
    betas: list[float] = key([0.9, 0.95], "AdamW's two decay rates.", minimum=0, below=1, length=2)
    eps: float = key(1e-8, "AdamW's epsilon.", above=0)
    momentum: float | None = key(None, "Momentum; null: for sgd 0, for muon 0.95.", minimum=0, below=1)
    implementation: str = key(
        "auto",
        "`fused`: one kernel, least memory; `foreach`: grouped; `single`: one parameter at a time; `auto`: fused where "
        "torch has such a kernel and it is right (for SGD neither with FSDP nor in bf16 on a CPU), else foreach.",
        choices=("auto", "fused", "foreach", "single"),
    )
    state_bits: int | None = key(
        None,
        "Bits of each number of AdamW's states; 8 and 4: in blocks with a scale each; null: those of dtype.",
        choices=(4, 8, 16, 32),
    )
    master_weights: bool = key(
        False, "Also keep the weights in fp32, which the steps add up in; dtype=bf16 is what is computed with."
    )
    stochastic_rounding: bool = key(
        False, "Round a step's bf16 weights up or down at random, so that steps smaller than a bit add up."
    )


@dataclass
class LrSchedulerConfig:
    """The learning rate over the steps."""

    type: str = key("cosine", "Shape after the warm-up.", choices=("cosine", "linear", "constant"))
    warmup_steps: int = key(0, "Steps over which the rate rises linearly to optimizer.lr.", minimum=0)
    warmup_ratio: float | None = key(
        None, "In place of warmup_steps: the share of all optimizer steps, rounded up.", minimum=0, maximum=1
    )
    min_lr_ratio: float = key(
        0.0, "Share of optimizer.lr that the rate falls to, one step after the last.", minimum=0, maximum=1
    )


@dataclass
class ParallelConfig:
    """How the ranks divide the work."""

    strategy: str = key(
        "fsdp",
        "`fsdp`: shards, gathered layer by layer; `ddp`: every data rank has all weights, and trained gradients are "
        "summed once a step; `auto`: what `tune run` plans to be faster and to fit.",
        choices=("fsdp", "ddp", "auto"),
    )
    data_shard: int = key(
        -1,
        "Ranks that share one copy of parameters, gradients and states; -1: all that are left.",
        minimum=1,
        most=2**16,
        also=(-1,),
    )
    data_replicate: int = key(1, "Copies of the sharded model (HSDP).", minimum=1, most=2**16)
    tensor: int = key(
        1, "Ranks that share each matrix and each row (tensor and sequence parallel).", minimum=1, most=2**16
    )
    tensor_regather_in_backward: str = key(
        "auto",
        "Gather a sequence's shards again in backward rather than keep them; `auto`: if layers are not checkpointed.",
        choices=("auto", "true", "false"),
    )
    tensor_replicate_kv_heads: bool = key(
        False, "With fewer kv heads than `tensor`: every rank has all of their weights, and computes the head it needs."
    )
    pipeline: int = key(
        1, "Ranks, one behind the other, that the layers are divided among (pipeline).", minimum=1, most=2**12
    )
    pipeline_schedule: str = key(
        "1f1b",
        "Order of the micro-batches' forwards and backwards on the ranks of a pipeline; those with `zero` or `v` in "
        "their names defer weight gradients to when a rank would wait.",
        choices=("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"),
    )
    pipeline_microbatches: int | None = key(
        None,
        "Micro-batches that the batch_size x gradient_accumulation_steps rows of a data rank go through the pipeline "
        "in; null: gradient_accumulation_steps.",
        minimum=1,
        most=2**16,
    )
    pipeline_stages_per_rank: int = key(
        2,
        "Stages on each rank of an interleaved schedule; `zbv` and `dualpipev` have 2, the others 1.",
        minimum=2,
        most=2**10,
    )
    pipeline_max_deferred_weight_grads: int | None = key(
        None,
        "Most micro-batches of a rank (each of its stages counted) whose weight gradients are deferred at a time, in "
        "schedules that defer them; fewer take less memory, the bubble is longer; null: as the schedule has it.",
        minimum=1,
    )
    pipeline_balance: str = key(
        "compute",
        "Layers of each stage: even in `compute`, or in `memory` of parameters and states; embedding and head counted.",
        choices=("compute", "memory"),
    )
    pipeline_layers_per_stage: list[int] | None = key(
        None, "Layers of each stage, one number a stage; null: by pipeline_balance.", minimum=1
    )
    fsdp_wrap_policy: str | list[str] = key(
        "auto",
        "FSDP units: `layers`; `memory_efficient` (also embedding and output, each its own); `auto` (memory_efficient "
        "if either is larger than a layer, else layers); or a list of module-name patterns.",
        choices=("auto", "layers", "memory_efficient"),
    )
    reshard_after_forward: bool = key(True, "Free a unit's gathered parameters after its forward; false: keep them.")
    reduce_dtype: str | None = key(
        None, "Gradients are summed over ranks in it; null: their own.", choices=("fp32", "bf16")
    )
    heartbeat_timeout_seconds: float = key(
        60.0,
        "Seconds that a rank waits in a step for one that does not answer or stands still: then all ranks end, with a "
        "line that names it, and exit code 7. Loading, validation and saving may take longer.",
        minimum=1.0,
    )


@dataclass
class MemoryConfig:
    """Levers that trade time for memory."""

    activation_checkpointing: str = key(
        "none",
        "`full`: keep only each layer's input; `selective`: also keep attention outputs and every second matmul; "
        "`budget`: keep what saves the most time, up to activation_budget_gib.",
        choices=("none", "full", "selective", "budget"),
    )
    activation_budget_gib: float | None = key(
        None, "GiB on a rank that the layers may keep for backward; of checkpointing `budget`.", above=0, most=2**20
    )
    activation_offload: bool = key(
        False, "Keep what the layers keep for backward in pinned host memory; copied beside the computation."
    )
    activation_offload_prefetch_layers: int = key(
        1,
        "Layers whose kept tensors are back on the device, or still on their way out, beside the present one's.",
        minimum=1,
        most=2**12,
    )
    mlp_tiles: int = key(
        1,
        "Pieces of a row's tokens that an MLP computes one after the other, again in backward.",
        minimum=1,
        most=2**16,
    )
    optimizer_in_backward: bool = key(
        False, "Step each parameter when its gradient is there, and free that; needs clip_grad_norm=null."
    )
    optimizer_offload: bool = key(
        False, "Keep optimizer states in pinned host memory; each parameter's visit the device for its step."
    )
    host_memory_limit_gib: float | None = key(
        None,
        "GiB of host memory that all ranks of a machine may take for what is offloaded; null: what is free.",
        above=0,
        most=2**20,
    )
    cpu_offload: bool = key(False, "Keep sharded parameters, gradients and optimizer states in host memory.")
    loss_chunks: int = key(8, "Pieces the loss is computed in; more: less memory for logits.", minimum=1, most=2**16)
    loss_kernel: str = key(
        "chunked",
        "Who computes cross-entropy of the output head: `chunked`: ours; `torch`: its linear_cross_entropy, where it "
        "has one; `liger`: Liger's kernel (extra `liger`).",
        choices=("chunked", "torch", "liger"),
    )


# The linears of a native model's layers, and what PEFT's files call the parts that may have an adapter.
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
PEFT_NAMES = {name: f"{name}_proj" for name in LINEARS} | {"embedding": "embed_tokens", "head": "lm_head"}
_SHORT_NAMES = {long: short for short, long in PEFT_NAMES.items()}


@dataclass
class LoraConfig:
    """Adapters: trained low-rank matrices beside frozen weights (LoRA, arXiv 2106.09685)."""

    rank: int = key(16, "Rank of the two matrices.", minimum=1, most=2**16)
    alpha: float = key(32.0, "The product is multiplied by alpha / rank.", above=0)
    dropout: float = key(0.0, "Share of the adapter's inputs set to zero in training.", minimum=0, below=1)
    target_modules: list[str] = key(
        ["all-linear"],
        "What gets an adapter: q, k, v, o, gate, up, down, embedding, head (or q_proj, ..., embed_tokens, lm_head, "
        "which "
        "mean the same), `all-linear`: every linear of the layers; of a model that is not native, ends of its linears' "
        "names, as `c_attn`.",
    )
    rslora: bool = key(False, "Multiply by alpha / sqrt(rank) instead (arXiv 2312.03732).")
    dora: bool = key(False, "Also train the length of each output's weights (DoRA, arXiv 2402.09353).")
    quantize_base: str = key(
        "none",
        "Store the layers' frozen weights in 4 bits (`nf4`, arXiv 2305.14314) or 8.",
        choices=("none", "nf4", "int8"),
    )
    dtype: str | None = key(None, "Type of the adapters' weights; null: dtype.", choices=("fp32", "bf16"))
    adapter_path: str | None = key(None, "Folder of a PEFT adapter to go on training; null: a new one.", path=True)
    merge_on_save: bool = key(False, "At the end also write the model with the adapter merged in, as output_dir/model.")

    def __post_init__(self) -> None:
        """Each target under one name, so that two configs that mean the same are the same."""
        named = [_SHORT_NAMES.get(name, name) for name in self.target_modules]
        if "all-linear" in named:
            named = ["all-linear", *(name for name in named if name not in LINEARS)]
        self.target_modules = list(dict.fromkeys(named))

    @property
    def targets(self) -> list[str]:
        """The short names of a native model's targets, `all-linear` taken apart."""
        rest = [name for name in self.target_modules if name != "all-linear"]
        return [*LINEARS, *rest] if len(rest) < len(self.target_modules) else rest


@dataclass
class DpoConfig:
    """Preference optimization on pairs of a chosen and a rejected answer (DPO, arXiv 2305.18290)."""

    loss: str = key(
        "sigmoid",
        "`sigmoid`: DPO, with label_smoothing conservative DPO; `ipo` (arXiv 2310.12036); `simpo`: mean "
        "log-probabilities, no reference (arXiv 2405.14734).",
        choices=("sigmoid", "ipo", "simpo"),
    )
    beta: float = key(0.1, "How strongly the model is held to the reference (simpo: scale of the reward).", above=0)
    label_smoothing: float = key(0.0, "sigmoid: share of pairs taken to be the wrong way round.", minimum=0, below=0.5)
    simpo_gamma: float = key(0.5, "simpo: least difference of rewards (gamma).", minimum=0)
    reference_free: bool = key(False, "sigmoid, ipo: take a reference that finds both answers equally likely.")
    trainable: str = key(
        "adapters",
        "`adapters`: the reference is the model without them; `all`: every parameter, the reference is a frozen "
        "second copy.",
        choices=("adapters", "all"),
    )


@dataclass
class CheckpointConfig:
    """What is saved, and when."""

    save_every_n_steps: int | None = key(None, "Steps between resumable states; null: only when stopped.", minimum=1)
    keep_last_n: int = key(2, "Resumable states to keep; older ones are removed after a newer one is safe.", minimum=1)
    save_model: bool = key(True, "Write the trained model as a Hugging Face folder at the end.")
    max_shard_gib: float = key(4.0, "Largest safetensors file of that folder, GiB.", above=0, most=2**20)
    extra_parameters: str = key(
        "error",
        "Parameters that a recipe of your own adds to a model: `error`: refuse before training to save a model that "
        "has any; `save`: write them too, for that recipe; other programs ignore them.",
        choices=("error", "save"),
    )


@dataclass
class LogConfig:
    """What is shown and recorded."""

    every_n_steps: int = key(1, "Steps between log lines; metrics.jsonl always has every step.", minimum=1)
    progress: str = key(
        "auto",
        "`live`: one moving line; `plain`: lines; `auto`: live on a terminal.",
        choices=("auto", "live", "plain"),
    )
    trackers: list[str] = key([], "Also log to these (extras): tensorboard, wandb, trackio.", kind="log.trackers")
    project: str = key("tune-recipes", "Project name at the trackers.")
    run_name: str | None = key(None, "Run name at the trackers; null: the output folder's name.")
    communication_step: int | None = key(
        3, "Step of which the time spent in communication is measured, with several ranks; null: none.", minimum=1
    )


@dataclass
class FullFinetuneConfig:
    """Config of `full_finetune_distributed`."""

    recipe: str = key("full_finetune_distributed", "The recipe this config is for.")
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LrSchedulerConfig = field(default_factory=LrSchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    seed: int = key(42, "Root of the seeds of model, data and dropout.", minimum=0)
    dtype: str = key(
        "bf16",
        "Type of parameters, gradients and compute (fp64 is for checks on a CPU).",
        choices=("fp32", "bf16", "fp64"),
    )
    device: str = key("auto", "`auto`: cuda if there is one.", choices=("auto", "cpu", "cuda"))
    batch_size: int = key(1, "Rows per rank in a micro-batch.", minimum=1, most=2**20)
    gradient_accumulation_steps: int = key(1, "Micro-batches per optimizer step.", minimum=1, most=2**16)
    epochs: int = key(1, "Passes over the rows.", minimum=1, most=10**6)
    max_steps: int | None = key(None, "Stop after this many optimizer steps.", minimum=1)
    max_seq_len: int = key(2048, "Longest row, tokens.", minimum=1, most=2**24)
    loss: str = key("cross_entropy", "The loss.", kind="loss")
    clip_grad_norm: float | None = key(1.0, "Largest global gradient norm; null: no clipping.", above=0)
    output_dir: str = key("outputs/run", "Folder for metrics, states and the trained model.", path=True)
    overwrite_output_dir: bool = key(
        False, "Replace the run in output_dir: its model goes when the new one is complete; what no run wrote stays."
    )
    resume: str | None = key(None, "`latest`, or a folder output_dir/state/step_N, to go on from.", path=True)
    compile: bool = key(False, "torch.compile each layer.")
    matmul_dtype: str | None = key(
        None,
        "Type that the layers' linears multiply in: `fp8` (Hopper, Ada and later) or `int8` (Ampere and later), "
        "scaled row by row; weights stay in dtype. null: dtype.",
        choices=("fp8", "int8"),
    )


@dataclass
class LoraFinetuneConfig(FullFinetuneConfig):
    """Config of `lora_finetune_distributed`."""

    recipe: str = key("lora_finetune_distributed", "The recipe this config is for.")
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class DpoFinetuneConfig(LoraFinetuneConfig):
    """Config of `dpo_distributed`."""

    recipe: str = key("dpo_distributed", "The recipe this config is for.")
    dpo: DpoConfig = field(default_factory=DpoConfig)
