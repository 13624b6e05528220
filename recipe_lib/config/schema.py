"""Every key of a config: its type, default, legal values and one line of description.

The dataclasses are the schema that a YAML file is checked against, that `docs/config.md` and
`tune cat --describe` are generated from, and that a recipe reads. This file imports no torch.
"""

from dataclasses import dataclass, field
from typing import Any


def key(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    kind: str | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    also: tuple[float, ...] | None = None,
    length: int | None = None,
    items: tuple[str, ...] | None = None,
    path: bool | None = None,
) -> Any:
    """One key of a section.

    default: its value when the config does not set it. help: one line, with the unit.
    choices: the only legal values. kind: the registry (`recipe_lib.config.registry`) its names live in.
    minimum, maximum: inclusive bounds. above, below: exclusive bounds. also: legal values outside of them.
    length: how many items a list has. On a list, choices and bounds are those of each item. items: the only legal
    items of the list that may stand in place of a choice. path: a file or folder, in which a `~` at the beginning is
    the user's home.
    """
    limits = {
        "choices": choices,
        "kind": kind,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "below": below,
        "also": also,
        "length": length,
        "items": items,
        "path": path,
    }
    metadata = {"help": help} | {name: value for name, value in limits.items() if value is not None}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    """The model to train: a checkpoint, or an architecture with random weights."""

    path: str | None = key(None, "Checkpoint folder, or a hub id that `tune download` has fetched.", path=True)
    preset: str | None = key(None, "Architecture to initialise at random: a shipped name, or a config.json of yours.")
    source: str = key(
        "native",
        "Whose module it is: `native`: ours; `transformers`: that library's class of the config.json (extra "
        "`transformers`); or what a plugin registered.",
        kind="model",
    )


@dataclass
class TokenizerConfig:
    """The tokenizer; by default the one in the checkpoint folder."""

    path: str | None = key(None, "Folder or file of the tokenizer; null: `model.path`.", path=True)
    chat_template: str | None = key(None, "Jinja file to use in place of the tokenizer's own chat template.", path=True)


@dataclass
class SourceConfig:
    """One of several sources of rows; what it leaves null is taken from the section `data`."""

    source: str = field(metadata={"help": "Like data.source.", "path": True})
    weight: float = key(
        1.0, "How often its rows are taken in an epoch: 2 is each row twice, 0.5 is half of them, drawn anew.", above=0
    )
    format: str | None = key(None, "Like data.format; null: the same.", kind="data.format")
    split: str | None = key(None, "Like data.split; null: the same.")
    columns: dict[str, str] | None = key(None, "Like data.columns; null: the same.")
    max_rows: int | None = key(None, "Use only its first rows.", minimum=1)


@dataclass
class DataConfig:
    """The training rows."""

    source: str | None = key(
        None,
        "File or folder (.json, .jsonl, .parquet, .txt), or `hub:OWNER/NAME` or `hub:OWNER/NAME:SUBSET` "
        "(extra `datasets`, which .parquet needs too).",
        path=True,
    )
    sources: list[SourceConfig] = key([], "Several sources with weights, in place of data.source.")
    format: str = key("alpaca", "How a row is read.", kind="data.format")
    split: str = key("train", "Split of a hub dataset.")
    columns: dict[str, str] = key({}, "The format's column name -> the name it has in your file.")
    template: str = key(
        "auto",
        "How turns become text: `chat` is the tokenizer's chat template, `plain` a built-in one, `auto` chat if any.",
        choices=("auto", "chat", "plain"),
    )
    train_on: str | list[str] = key(
        "assistant",
        "Tokens the loss counts: every answer (`assistant`), the `last` one, `all` tokens, or a list of roles; a "
        "message's own `train: false` takes it out.",
        choices=("assistant", "last", "all"),
        items=("system", "user", "assistant", "tool"),
    )
    trained_share: str = key(
        "check",
        "`check`: a run in which no token or every token is trained stops; `any`: it does not.",
        choices=("check", "any"),
    )
    packing: bool = key(False, "Put several rows into one of up to max_seq_len tokens; none sees another.")
    pad_to_multiple: int = key(1, "Row lengths are rounded up to a multiple of it, with padding.", minimum=1)
    shuffle: bool = key(True, "Draw a new row order each epoch from the seed; false: file order.")
    add_bos: bool = key(
        True,
        "Begin each row (format `text`: each file) with BOS if the tokenizer does; a chat template writes its own.",
    )
    max_rows: int | None = key(None, "Use only the first rows of the source.", minimum=1)
    bad_rows: str = key("error", "What a row that cannot be read does.", choices=("error", "skip"))
    long_rows: str = key("truncate", "What a row over max_seq_len tokens does.", choices=("truncate", "skip", "error"))
    workers: int | None = key(None, "Processes per machine that tokenise; null: one for each CPU core.", minimum=1)
    loader_workers: int = key(0, "Processes per rank that make batches ahead of the steps; 0: none.", minimum=0)
    cache: bool = key(True, "Keep tokenised rows on disk for the next start and for the other ranks of the machine.")
    cache_dir: str | None = key(
        None, "Folder for them; null: $XDG_CACHE_HOME/tune-recipes, or ~/.cache/tune-recipes.", path=True
    )


@dataclass
class ValidationConfig:
    """Loss on rows that are not trained on; off while `source` is null."""

    source: str | None = key(
        None, "Like data.source; the other data.* keys apply to it as well. null: no validation.", path=True
    )
    format: str | None = key(None, "Like data.format; null: the same.", kind="data.format")
    every_steps: int | None = key(None, "Steps between validations; null: at the end of each epoch.", minimum=1)
    max_rows: int | None = key(None, "Use only the first rows.", minimum=1)
    batch_size: int | None = key(None, "Rows per rank in a validation batch; null: batch_size.", minimum=1)


@dataclass
class OptimizerConfig:
    """The optimizer."""

    name: str = key("adamw", "The optimizer.", kind="optimizer.name")
    lr: float = key(2e-5, "Peak learning rate.", above=0)
    weight_decay: float = key(0.0, "Decoupled weight decay, applied to every parameter.", minimum=0)
    betas: list[float] = key([0.9, 0.95], "AdamW's two decay rates.", minimum=0, below=1, length=2)
    eps: float = key(1e-8, "AdamW's epsilon.", above=0)
    momentum: float = key(0.0, "SGD's momentum.", minimum=0, below=1)
    implementation: str = key(
        "auto",
        "`fused`: one kernel, least memory; `foreach`: grouped; `single`: one parameter at a time; `auto`: fused.",
        choices=("auto", "fused", "foreach", "single"),
    )


@dataclass
class LrScheduleConfig:
    """The learning rate over the steps."""

    kind: str = key("cosine", "Shape after the warm-up.", choices=("cosine", "linear", "constant"))
    warmup_steps: int = key(0, "Steps over which the rate rises linearly to optimizer.lr.", minimum=0)
    final_share: float = key(
        0.0, "Share of optimizer.lr that the rate falls to, one step after the last.", minimum=0, maximum=1
    )


@dataclass
class ParallelConfig:
    """How the ranks divide the work."""

    data_shard: int = key(
        -1,
        "Ranks that share one copy of parameters, gradients and states; -1: all that are left.",
        minimum=1,
        also=(-1,),
    )
    data_replicate: int = key(1, "Copies of the sharded model (HSDP).", minimum=1)
    tensor: int = key(1, "Ranks that share each matrix and each row (tensor and sequence parallel).", minimum=1)
    tensor_recompute_gather: str = key(
        "auto",
        "Gather a sequence's shards again in backward rather than keep them; `auto`: if layers are not checkpointed.",
        choices=("auto", "true", "false"),
    )
    tensor_copy_kv_heads: bool = key(
        False, "With fewer kv heads than `tensor`: every rank has all of their weights, and computes the head it needs."
    )
    pipeline: int = key(1, "Ranks, one behind the other, that the layers are divided among (pipeline).", minimum=1)
    pipeline_schedule: str = key(
        "1f1b",
        "Order of the micro-batches' forwards and backwards on the ranks of a pipeline; those with `zero` or `v` in "
        "their names put off weight gradients to when a rank would wait.",
        choices=("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"),
    )
    pipeline_microbatches: int | None = key(
        None,
        "Micro-batches that the batch_size x gradient_accumulation_steps rows of a data rank go through the pipeline "
        "in; null: gradient_accumulation_steps.",
        minimum=1,
    )
    pipeline_stages_per_rank: int = key(
        2, "Stages on each rank of an interleaved schedule; `zbv` and `dualpipev` have 2, the others 1.", minimum=2
    )
    pipeline_put_off: int | None = key(
        None,
        "Most micro-batches of a rank (each of its stages counted) that wait for their weight gradients at a time, in "
        "schedules that put these off; fewer take less memory, the bubble is longer; null: as the schedule has it.",
        minimum=1,
    )
    pipeline_split: str | list[int] = key(
        "time",
        "Layers of each stage: even in `time`, or in `memory` of parameters and states, embedding and head counted; "
        "or a list, one number a stage.",
        choices=("time", "memory"),
        minimum=1,
    )
    pipeline_timeout: float = key(
        300.0,
        "Seconds without progress of a pipeline after which all its ranks end, naming who stands still.",
        minimum=1.0,
    )
    wrapping: str | list[str] = key(
        "auto",
        "FSDP units: `layers`; `memory_efficient` (also embedding and output, each its own); `auto` (memory_efficient "
        "if either is larger than a layer, else layers); or a list of module-name patterns.",
        choices=("auto", "layers", "memory_efficient"),
    )
    reshard_after_forward: bool = key(True, "Free a unit's gathered parameters after its forward; false: keep them.")
    reduce_dtype: str | None = key(
        None, "Gradients are summed over ranks in it; null: their own.", choices=("fp32", "bf16")
    )


@dataclass
class MemoryConfig:
    """Levers that trade time for memory."""

    activation_checkpointing: str = key(
        "none",
        "`full`: keep only each layer's input; `selective`: also keep attention outputs and every second matmul.",
        choices=("none", "full", "selective"),
    )
    cpu_offload: bool = key(False, "Keep sharded parameters, gradients and optimizer states in host memory.")
    loss_chunks: int = key(8, "Pieces the loss is computed in; more: less memory for logits.", minimum=1)


@dataclass
class LoraConfig:
    """Adapters: trained low-rank matrices beside frozen weights (LoRA, arXiv 2106.09685)."""

    rank: int = key(16, "Rank of the two matrices.", minimum=1)
    alpha: float = key(32.0, "The product is multiplied by alpha / rank.", above=0)
    dropout: float = key(0.0, "Share of the adapter's inputs set to zero in training.", minimum=0, below=1)
    targets: list[str] = key(
        ["q", "k", "v", "o", "gate", "up", "down"],
        "What gets an adapter; `all-linear`: every linear of the layers.",
        choices=("q", "k", "v", "o", "gate", "up", "down", "embedding", "head", "all-linear"),
    )
    modules: list[str] = key(
        [], "Of a model that is not native: ends of the names of linears that get an adapter, as `c_attn`; []: all."
    )
    rslora: bool = key(False, "Multiply by alpha / sqrt(rank) instead (arXiv 2312.03732).")
    dora: bool = key(False, "Also train the length of each output's weights (DoRA, arXiv 2402.09353).")
    quantize: str = key(
        "none",
        "Store the layers' frozen weights in 4 bits (`nf4`, arXiv 2305.14314) or 8.",
        choices=("none", "nf4", "int8"),
    )
    dtype: str | None = key(None, "Type of the adapters' weights; null: dtype.", choices=("fp32", "bf16"))
    adapter: str | None = key(None, "Folder of a PEFT adapter to go on training; null: a new one.", path=True)
    merge: bool = key(False, "At the end also write the model with the adapter merged in, as output_dir/model.")

    def __post_init__(self) -> None:
        """`all-linear` is a word for seven others."""
        if "all-linear" in self.targets:
            linears = ["q", "k", "v", "o", "gate", "up", "down"]
            self.targets = linears + [name for name in self.targets if name in ("embedding", "head")]


@dataclass
class DpoConfig:
    """Preference optimisation on pairs of a chosen and a rejected answer (DPO, arXiv 2305.18290)."""

    loss: str = key(
        "sigmoid",
        "`sigmoid`: DPO; `cdpo`: with dpo.label_smoothing; `ipo` (arXiv 2310.12036); `simpo`: mean log-probabilities, "
        "no reference (arXiv 2405.14734).",
        choices=("sigmoid", "cdpo", "ipo", "simpo"),
    )
    beta: float = key(0.1, "How strongly the model is held to the reference (simpo: scale of the reward).", above=0)
    label_smoothing: float = key(0.0, "cdpo: share of pairs taken to be the wrong way round.", minimum=0, below=0.5)
    margin: float = key(0.5, "simpo: least difference of rewards (gamma).", minimum=0)
    reference_free: bool = key(False, "sigmoid, cdpo, ipo: take a reference that finds both answers equally likely.")
    train: str = key(
        "lora",
        "`lora`: adapters, the reference is the model without them; `full`: every parameter, the "
        "reference is a frozen second copy.",
        choices=("lora", "full"),
    )


@dataclass
class CheckpointConfig:
    """What is saved, and when."""

    save_every_steps: int | None = key(None, "Steps between resumable states; null: only when stopped.", minimum=1)
    keep: int = key(2, "Resumable states to keep; older ones are removed after a newer one is safe.", minimum=1)
    save_model: bool = key(True, "Write the trained model as a Hugging Face folder at the end.")
    max_shard_gib: float = key(4.0, "Largest safetensors file of that folder, GiB.", above=0)


@dataclass
class LogConfig:
    """What is shown and recorded."""

    every_steps: int = key(1, "Steps between log lines; metrics.jsonl always has every step.", minimum=1)
    progress: str = key(
        "auto",
        "`live`: one moving line; `plain`: lines; `auto`: live on a terminal.",
        choices=("auto", "live", "plain"),
    )
    trackers: list[str] = key([], "Also log to these (extras): tensorboard, wandb, trackio.", kind="log.trackers")
    project: str = key("tune-recipes", "Project name at the trackers.")
    run_name: str | None = key(None, "Run name at the trackers; null: the output folder's name.")


@dataclass
class FullFinetuneConfig:
    """Config of `full_finetune_distributed`."""

    recipe: str = key("full_finetune_distributed", "The recipe this config is for.")
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
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
    batch_size: int = key(1, "Rows per rank in a micro-batch.", minimum=1)
    gradient_accumulation_steps: int = key(1, "Micro-batches per optimizer step.", minimum=1)
    epochs: int = key(1, "Passes over the rows.", minimum=1)
    max_steps: int | None = key(None, "Stop after this many optimizer steps.", minimum=1)
    max_seq_len: int = key(2048, "Longest row, tokens.", minimum=1)
    loss: str = key("cross_entropy", "The loss.", kind="loss")
    clip_grad_norm: float | None = key(1.0, "Largest global gradient norm; null: no clipping.", above=0)
    output_dir: str = key("outputs/run", "Folder for metrics, states and the trained model.", path=True)
    overwrite: bool = key(False, "Replace what an earlier run left in output_dir.")
    resume: str | None = key(None, "`latest`, or a folder output_dir/state/step_N, to go on from.", path=True)
    compile: bool = key(False, "torch.compile each layer.")


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
