"""Define the keys of a config: type, default, legal values and one line of description each.

The dataclasses are the schema that a YAML file is checked against; `docs/config.md` and `tune cat
--describe` are generated from them (also from the first line of a section's docstring). A recipe,
such as `full_finetune_distributed`, gets an object of one: FullFinetuneConfig, or a subclass with
sections of its own. A field is declared by `key(default, help, limits...)`. Imports no torch.
"""

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

from recipe_lib.config import key_conditions
from recipe_lib.config.flat_schema import key
from recipe_lib.config.schema_data import (
    DataConfig,
    ModelConfig,
    SourceConfig,
    TokenizerConfig,
    ValidationConfig,
)
from recipe_lib.config.schema_training import (
    LrSchedulerConfig,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
)

# Kind of samples that a recipe trains on -> values of `data.format` with such samples. Formats of
# plugins (files of a user's that register names) are in none: their kind of samples is not known.
SAMPLES: dict[str, tuple[str, ...]] = {
    "answers": ("alpaca", "sharegpt", "messages", "prompt_completion", "text"),
    "pairs": ("preference",),
    "labeled answers": ("kto", "preference"),
    "classes": ("classification",),
}


class RecipeFacts:
    """Facts on a recipe's batches and model, which planner, checks and parallelism read.

    These are the facts of full fine-tuning; the config of another recipe overrides those that
    differ, so that no code has to ask for a recipe's name. A key is a dotted name, `dpo.beta`.
    """

    # Whether the model has a score head, which reads each sequence's last token, in place of the
    # head that predicts the next token.
    scores_sequences: ClassVar[bool] = False
    # Key -> the value with which adapters are trained in place of all parameters; empty: no key
    # chooses between the two.
    adapters_instead: ClassVar[dict[str, str]] = {}
    # Key that names the checkpoint of a further model (a teacher) -> key of a preset, an
    # architecture with random weights, in its place.
    other_models: ClassVar[dict[str, str]] = {}
    # Key by which such a model takes less memory -> value, that of least memory first -> note on
    # what it costs.
    other_model_levers: ClassVar[dict[str, dict[Any, str]]] = {}
    # Those keys of the recipe's own sections that change the memory of a run.
    memory_keys: ClassVar[tuple[str, ...]] = ()
    # Combinations of its keys that are refused (`compatibility.rule.Rule`), besides those of all
    # recipes.
    rules: ClassVar[tuple[Any, ...]] = ()
    # Key of the recipe -> its names in other tools and in earlier releases, parted by spaces.
    key_aliases: ClassVar[dict[str, str]] = {}
    # Section of another tool -> section of the recipe.
    section_aliases: ClassVar[dict[str, str]] = {}
    # Names in `key_aliases` that mean something else in other recipes: not hinted at there.
    ambiguous_names: ClassVar[frozenset[str]] = frozenset()
    # Key of other tools that the recipe lacks -> text on what to use in its place.
    key_answers: ClassVar[dict[str, str]] = {}

    @property
    def samples(self) -> str:
        """Return the kind of samples that the recipe trains on, a key of SAMPLES."""
        return "answers"

    @property
    def trains_on_pairs(self) -> bool:
        """Return True if a sample is a pair of answers: data.format=preference."""
        return self.samples == "pairs"

    @property
    def compares_mismatched(self) -> bool:
        """Return True if a step also evaluates each prompt with the answer of another sample.

        KTO does, to estimate the KL divergence.
        """
        return False

    @property
    def sequences_per_item(self) -> int:
        """Return the number of sequences that `batch_size=1` puts into a micro-batch."""
        return 2 if self.trains_on_pairs else 1

    @property
    def num_labels(self) -> int | None:
        """Return the number of scores of a score head; None: as many as the checkpoint's has."""
        return None

    @property
    def own_loss(self) -> str | None:
        """Return a text on the key that replaces `loss`; None: `loss` itself counts.

        It is part of an error or a note, such as `the loss of pairs is dpo.loss, ipo`.
        """
        return None

    @property
    def trained_adapters(self) -> "LoraConfig | None":
        """Return the settings of the adapters that are trained; None: every parameter is."""
        return None

    @property
    def runs_reference(self) -> bool:
        """Return True if a step also evaluates micro-batches by a frozen model."""
        return False

    @property
    def copies_model(self) -> bool:
        """Return True if the frozen model of `runs_reference` is a second copy of the model."""
        # With adapters it is the model itself, with the adapters turned off.
        return self.runs_reference and self.trained_adapters is None

    @property
    def validation_numbers(self) -> tuple[str, ...]:
        """Return the names of validation's metrics, the choices of `checkpoint.best_metric`."""
        return ("validation_loss",)


__all__ = [
    "LINEARS",
    "PEFT_NAMES",
    "CheckpointConfig",
    "DataConfig",
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
class CheckpointConfig:
    """What is saved, and when."""

    save_every_n_steps: int | None = key(
        None,
        "Steps between resumable states; null: only when stopped.",
        minimum=1,
        known_as="torchtune save_every_n_steps; HF save_steps",
    )
    keep_last_n: int = key(
        2,
        "Resumable states to keep; older ones are removed after a newer one is safe.",
        minimum=1,
        known_as="torchtune keep_last_n_checkpoints; HF save_total_limit",
    )
    keep_best: bool = key(
        False,
        "Keep the weights of the step that is best by best_metric, in output_dir/state/best, and"
        " export those.",
        known_as="HF load_best_model_at_end",
    )
    best_metric: str = key(
        "validation_loss",
        "The number of the recipe's validation that says which step is best; of a preference run"
        " also validation_reward_accuracy, validation_reward_margin.",
        needs="checkpoint.keep_best or validation.patience",
        known_as="HF metric_for_best_model",
    )
    greater_is_better: bool | None = key(
        None,
        "Whether a higher best_metric is better; null: unless its name ends in loss, perplexity,"
        " error, divergence, cross_entropy, _kl or _rejected.",
        needs="checkpoint.keep_best or validation.patience",
        known_as="HF greater_is_better",
    )
    save_model: bool = key(
        True,
        "Write the trained model as a Hugging Face folder at the end.",
        known_as="HF Trainer.save_model",
    )
    max_shard_gib: float = key(
        4.0,
        "Largest safetensors file of that folder, GiB.",
        above=0,
        most=2**20,
        known_as="HF max_shard_size",
    )
    carry: bool = key(
        True,
        "Put what the folder of model.path has besides the text model (a vision tower, heads that"
        " predict several tokens) into the exported model, unchanged; false: export the text model"
        " alone.",
        known_as="none has it: HF writes what its class has read",
    )
    extra_parameters: str = key(
        "error",
        "Parameters that a recipe of your own adds to a model: `error`: refuse before training to"
        " save a model that has any; `save`: write them too, for that recipe; other programs ignore"
        " them.",
        choices=("error", "save"),
        known_as="none has it: HF saves every parameter of a model",
    )


@dataclass
class LogConfig:
    """What is shown and recorded."""

    every_n_steps: int = key(
        1,
        "Steps between log lines; metrics.jsonl always has every step.",
        minimum=1,
        known_as="torchtune log_every_n_steps; HF logging_steps",
    )
    progress: str = key(
        "auto",
        "`live`: one moving line; `plain`: lines; `auto`: live on a terminal.",
        choices=("auto", "live", "plain"),
        known_as="HF disable_tqdm",
    )
    trackers: list[str] = key(
        [],
        "Also log to these (extras): tensorboard, wandb, trackio.",
        kind="log.trackers",
        known_as="HF report_to",
    )
    project: str = key(
        "tune-recipes",
        "Project name at the trackers.",
        known_as="HF WANDB_PROJECT; Axolotl wandb_project",
    )
    run_name: str | None = key(
        None,
        "Run name at the trackers; null: the output folder's name.",
        known_as="HF run_name",
    )
    communication_step: int | None = key(
        3,
        "Step of which the time spent in communication is measured, with several ranks; null:"
        " none.",
        minimum=1,
        known_as="none has it: others measure by their profilers",
    )


@dataclass
class FullFinetuneConfig(RecipeFacts):
    """Config of `full_finetune_distributed`."""

    recipe: str = key(
        "full_finetune_distributed",
        "The recipe this config is for.",
        known_as="torchtune: the first word of `tune run`",
    )
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
    seed: int = key(
        42, "Root of the seeds of model, data and dropout.", minimum=0, known_as="HF seed"
    )
    dtype: str = key(
        "bf16",
        "Type of parameters, gradients and compute (fp64 is for checks on a CPU).",
        choices=("fp32", "bf16", "fp64"),
        known_as="torchtune dtype; HF bf16",
    )
    device: str = key(
        "auto",
        "`auto`: cuda if there is one.",
        choices=("auto", "cpu", "cuda"),
        known_as="torchtune device",
    )
    batch_size: int = key(
        1,
        "Sequences per rank in a micro-batch.",
        minimum=1,
        most=2**20,
        known_as="HF per_device_train_batch_size; torchtune batch_size",
    )
    gradient_accumulation_steps: int = key(
        1,
        "Micro-batches per optimizer step.",
        minimum=1,
        most=2**16,
        known_as="HF gradient_accumulation_steps",
    )
    epochs: int = key(
        1,
        "Passes over the training data.",
        minimum=1,
        most=10**6,
        known_as="HF num_train_epochs; torchtune epochs",
    )
    max_steps: int | None = key(
        None,
        "Stop after this many optimizer steps.",
        minimum=1,
        known_as="HF max_steps; torchtitan training.steps",
    )
    max_seq_len: int = key(
        2048,
        "Longest sequence, tokens.",
        minimum=1,
        most=2**24,
        known_as="torchtune max_seq_len; TRL max_length",
    )
    loss: str = key(
        "cross_entropy",
        "The loss.",
        kind="loss",
        needs=key_conditions.SUMS_OVER_TOKENS,
        known_as="torchtune loss",
    )
    router_aux_loss_coef: float = key(
        0.0,
        "Weight of the loss that evens the loads of a mixture's experts; of each layer and"
        " micro-batch, the mean, over tokens that are no padding.",
        minimum=0,
        most=1000,
        known_as="HF router_aux_loss_coef; Megatron moe_aux_loss_coeff",
    )
    clip_grad_norm: float | None = key(
        1.0,
        "Largest global gradient norm; null: no clipping.",
        above=0,
        known_as="torch clip_grad_norm_; HF max_grad_norm",
    )
    output_dir: str = key(
        "outputs/run",
        "Folder for metrics, states and the trained model.",
        path=True,
        known_as="HF output_dir",
    )
    overwrite_output_dir: bool = key(
        False,
        "Replace the run in output_dir: its model goes when the new one is complete; what no run"
        " wrote stays.",
        known_as="HF overwrite_output_dir (before 5)",
    )
    resume: str | None = key(
        None,
        "`latest`, or a folder output_dir/state/step_N, to resume from.",
        path=True,
        known_as="HF resume_from_checkpoint",
    )
    compile: bool = key(
        False, "torch.compile each layer.", known_as="torchtune compile; HF torch_compile"
    )
    fused_kernels: bool = key(
        True,
        "On a GPU, rotary embedding, gated activation, soft-capped scores, loss and dequantized"
        " weights are fused, each into a kernel or few, by torch.compile with Triton; without"
        " Triton, said at the start, they run operator by operator. A plan takes Triton to be"
        " there.",
        needs="device != cpu",
        known_as="Axolotl liger_rope, liger_glu_activation",
    )
    matmul_dtype: str | None = key(
        None,
        "Type that the layers' linears multiply in: `fp8` (Hopper, Ada and later) or `int8` (Ampere"
        " and later), scaled row by row; weights stay in dtype. null: dtype.",
        choices=("fp8", "int8"),
        known_as="torchtitan float8; HF fp8 mixed_precision",
    )
    qat: str | None = key(
        None,
        "Quantization-aware training: the layers' linears compute with weights rounded to this"
        " type, fp8 with inputs too, as an export in it will; what is trained and saved are the"
        " weights before rounding. null: off.",
        choices=("int4", "int8", "fp8"),
        known_as="torchao QATConfig; torchtune qat_distributed quantizer; Axolotl qat.weight_dtype",
    )
    qat_group_size: int = key(
        32,
        "int4: weights of a row that share a scale; divides the rows of every linear.",
        minimum=2,
        most=2**16,
        needs="qat = int4",
        known_as="torchao group_size; torchtune groupsize; Axolotl qat.group_size",
    )
    qat_start_step: int = key(
        0,
        "Optimizer steps that train without rounding first.",
        minimum=0,
        needs="qat",
        known_as="torchtune and Axolotl fake_quant_after_n_steps",
    )


# The linears of a native model's layers (native: this project's decoder, not another library's).
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
# Part of a model that may have an adapter -> what PEFT's files call it.
PEFT_NAMES = {name: f"{name}_proj" for name in LINEARS} | {
    "embedding": "embed_tokens",
    "head": "lm_head",
}
# Parts of a mixture of experts, which PEFT finds by target_parameters, not by target_modules.
EXPERTS = "experts"
ROUTER = "router"
MIXTURE_TARGETS = (ROUTER, EXPERTS)
_SHORT_NAMES = {peft_name: name for name, peft_name in PEFT_NAMES.items()}


@dataclass
class LoraConfig:
    """Adapters: trained low-rank matrices added to frozen weights (LoRA, arXiv 2106.09685)."""

    rank: int = key(
        16,
        "Rank of the two matrices.",
        minimum=1,
        most=2**16,
        needs=key_conditions.TRAINS_ADAPTERS,
        known_as="PEFT r; torchtune lora_rank",
    )
    alpha: float = key(
        32.0,
        "The product is multiplied by alpha / rank.",
        above=0,
        needs=key_conditions.TRAINS_ADAPTERS,
        known_as="PEFT lora_alpha",
    )
    dropout: float = key(
        0.0,
        "Share of the adapter's inputs set to zero in training.",
        minimum=0,
        below=1,
        needs=key_conditions.TRAINS_ADAPTERS,
        known_as="PEFT lora_dropout",
    )
    target_modules: list[str] = key(
        ["all-linear"],
        "What gets an adapter: q, k, v, o, gate, up, down, embedding, head (or q_proj, ...,"
        " embed_tokens, lm_head, which mean the same), of a mixture of experts router and experts"
        " (each expert's factors are its own), `all-linear`: every linear of the layers, which"
        " routers and experts are not; of a model that is not native, ends of its linears' names,"
        " as `c_attn`, router and experts.",
        needs=key_conditions.TRAINS_ADAPTERS,
        known_as="PEFT target_modules",
    )
    rslora: bool = key(
        False,
        "Multiply by alpha / sqrt(rank) instead (arXiv 2312.03732).",
        needs=key_conditions.TRAINS_ADAPTERS,
        known_as="PEFT use_rslora",
    )
    dora: bool = key(
        False,
        "Also train the length of each output's weights (DoRA, arXiv 2402.09353).",
        needs=key_conditions.TRAINS_ADAPTERS,
        known_as="PEFT use_dora",
    )
    quantize_base: str = key(
        "none",
        "Store the layers' frozen weights in 4 bits (`nf4`, arXiv 2305.14314) or 8.",
        choices=("none", "nf4", "int8"),
        needs=key_conditions.TRAINS_ADAPTERS,
        known_as="torchtune quantize_base; HF load_in_4bit",
    )
    dtype: str | None = key(
        None,
        "Type of the adapters' weights; null: dtype.",
        choices=("fp32", "bf16"),
        needs=key_conditions.TRAINS_ADAPTERS,
        known_as="PEFT autocast_adapter_dtype",
    )
    adapter_path: str | None = key(
        None,
        "Folder of a PEFT adapter to go on training; null: a new one.",
        path=True,
        needs=key_conditions.TRAINS_ADAPTERS,
        known_as="Axolotl lora_model_dir; LLaMA-Factory adapter_name_or_path",
    )
    merge_on_save: bool = key(
        False,
        "At the end also write the model with the adapter merged in, as output_dir/model.",
        needs=(key_conditions.TRAINS_ADAPTERS, "checkpoint.save_model"),
        known_as="PEFT merge_and_unload",
    )

    def __post_init__(self) -> None:
        """Give each of `target_modules` its short name, once, and drop what `all-linear` covers.

        So two configs that mean the same are the same.
        """
        targets = [_SHORT_NAMES.get(name, name) for name in self.target_modules]
        if "all-linear" in targets:
            targets = ["all-linear", *(name for name in targets if name not in LINEARS)]
        self.target_modules = list(dict.fromkeys(targets))

    @property
    def targets(self) -> list[str]:
        """Return the short names of a native model's targets, with LINEARS for `all-linear`."""
        single_targets = [name for name in self.target_modules if name != "all-linear"]
        has_all = "all-linear" in self.target_modules
        return [*LINEARS, *single_targets] if has_all else single_targets


@dataclass
class LoraFinetuneConfig(FullFinetuneConfig):
    """Config of `lora_finetune_distributed`."""

    recipe: str = key(
        "lora_finetune_distributed",
        "The recipe this config is for.",
        known_as="torchtune: the first word of `tune run`",
    )
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def trained_adapters(self) -> LoraConfig | None:
        """Return the section `lora`; None if a key of the recipe says to train every parameter."""
        trains_adapters = all(
            attrgetter(name)(self) == value for name, value in self.adapters_instead.items()
        )
        return self.lora if trains_adapters else None
