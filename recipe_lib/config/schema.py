"""Every key of a config: its type, default, legal values and one line of description.

The dataclasses are the schema that a YAML file is checked against, that `docs/config.md` and
`tune cat --describe` are generated from, and that a recipe reads. This file imports no torch.
"""

from dataclasses import dataclass, field

from recipe_lib.config import idle
from recipe_lib.config.field import key
from recipe_lib.config.recipe_facts import RecipeFacts
from recipe_lib.config.schema_adapters import LINEARS, PEFT_NAMES, DpoConfig, LoraConfig
from recipe_lib.config.schema_data import DataConfig, ModelConfig, SourceConfig, TokenizerConfig, ValidationConfig
from recipe_lib.config.schema_parallel import MemoryConfig, ParallelConfig

__all__ = [
    "LINEARS",
    "PEFT_NAMES",
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
    betas: list[float] = key(
        [0.9, 0.95], "AdamW's two decay rates.", minimum=0, below=1, length=2, needs="optimizer.name != sgd"
    )
    eps: float = key(1e-8, "AdamW's epsilon.", above=0, needs="optimizer.name != sgd")
    momentum: float | None = key(
        None, "Momentum; null: for sgd 0, for muon 0.95.", minimum=0, below=1, needs="optimizer.name != adamw"
    )
    implementation: str = key(
        "auto",
        "`fused`: one kernel, least memory; `foreach`: grouped; `single`: one parameter at a time; `auto`: fused where "
        "torch has such a kernel and it is right (for SGD neither with FSDP nor in bf16 on a CPU), else foreach.",
        choices=("auto", "fused", "foreach", "single"),
        needs=idle.steps_with_torch,
    )
    state_bits: int | None = key(
        None,
        "Bits of each number of AdamW's states; 8 and 4: in blocks with a scale each; null: those of dtype.",
        choices=(4, 8, 16, 32),
        needs="optimizer.name != sgd",
    )
    master_weights: bool = key(
        False,
        "Also keep the weights in fp32, which the steps add up in; dtype=bf16 is what is computed with.",
        needs=("optimizer.name != sgd", idle.trains_bf16),
    )
    stochastic_rounding: bool = key(
        False,
        "Round a step's bf16 weights up or down at random, so that steps smaller than a bit add up.",
        needs=("optimizer.name != sgd", idle.trains_bf16),
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
        0.0,
        "Share of optimizer.lr that the rate falls to, one step after the last.",
        minimum=0,
        maximum=1,
        needs="lr_scheduler.type != constant",
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
class FullFinetuneConfig(RecipeFacts):
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
    loss: str = key("cross_entropy", "The loss.", kind="loss", needs=idle.sums_over_tokens)
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

    @property
    def trained_adapters(self) -> LoraConfig | None:
        """As everywhere."""
        return self.lora


@dataclass
class DpoFinetuneConfig(LoraFinetuneConfig):
    """Config of `dpo_distributed`."""

    recipe: str = key("dpo_distributed", "The recipe this config is for.")
    dpo: DpoConfig = field(default_factory=DpoConfig)

    @property
    def sequences_per_item(self) -> int:
        """A chosen answer and a rejected one."""
        return 2

    @property
    def trained_adapters(self) -> LoraConfig | None:
        """As `dpo.trainable` says."""
        return self.lora if self.dpo.trainable == "adapters" else None

    @property
    def adapters_instead(self) -> dict[str, str]:
        """As everywhere."""
        return {"dpo.trainable": "adapters"}

    @property
    def runs_reference(self) -> bool:
        """As the loss needs one."""
        return self.dpo.needs_reference

    @property
    def sums_losses(self) -> bool:
        """Log-probabilities of tokens."""
        return False
