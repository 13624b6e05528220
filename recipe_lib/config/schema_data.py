"""Define the sections of a config about what is trained: model, tokenizer, data, validation.

A field is declared by `key(default, help, limits...)`. The text `help`, and the first line of a
class's docstring, stand in docs/config.md. `resolve_sources` returns the training data that a
config names, by `data.source` or `data.sources`; readers of samples call it.
"""

from dataclasses import dataclass, field

from recipe_lib.config import key_conditions
from recipe_lib.config.flat_schema import key


@dataclass
class ModelConfig:
    """The model to train: a checkpoint, or an architecture with random weights."""

    path: str | None = key(
        None,
        "Checkpoint folder, or a hub id that `tune download` has fetched.",
        path=True,
        known_as="HF model_name_or_path",
    )
    preset: str | None = key(
        None,
        "Architecture to initialize at random: a shipped name, or a config.json of yours.",
        path=True,
        known_as="torchtitan model.flavor",
    )
    implementation: str = key(
        "native",
        "Whose module it is: `native`: ours; `transformers`: that library's class of the"
        " config.json (extra `transformers`); or what a plugin registered.",
        kind="model",
        known_as="none has it: HF's keys choose kernels within its own model (attn_implementation)",
    )


@dataclass
class TokenizerConfig:
    """The tokenizer; by default the one in the checkpoint folder."""

    path: str | None = key(
        None,
        "Folder or file of the tokenizer; null: `model.path`.",
        path=True,
        known_as="HF tokenizer_name; PEFT tokenizer_name_or_path",
    )
    chat_template: str | None = key(
        None,
        "Jinja file to use in place of the tokenizer's own chat template.",
        path=True,
        known_as="HF chat_template",
    )


@dataclass
class SourceConfig:
    """One of several sources of samples; what it leaves null is taken from the section `data`."""

    source: str = field(
        metadata={"help": "Like data.source.", "path": True, "known_as": "Axolotl datasets[].path"}
    )
    weight: float = key(
        1.0,
        "How often its samples are taken in an epoch: 2 is each one twice, 0.5 is half of them,"
        " drawn anew.",
        above=0,
        most=1000,
        known_as="Megatron --data-path weights; LLaMA-Factory interleave_probs",
    )
    format: str | None = key(
        None,
        "Like data.format; null: the same.",
        kind="data.format",
        also=("auto",),
        known_as="LLaMA-Factory formatting; Axolotl type",
    )
    split: str | None = key(
        None, "Like data.split; null: the same.", known_as="HF load_dataset split"
    )
    columns: dict[str, str] | None = key(
        None, "Like data.columns; null: the same.", known_as="torchtune column_map"
    )
    max_samples: int | None = key(
        None, "Use only its first samples.", minimum=1, known_as="LLaMA-Factory max_samples"
    )


@dataclass
class DataConfig:
    """The training data."""

    source: str | None = key(
        None,
        "File or folder (.json, .jsonl, .csv, .tsv, .parquet, .txt; the first four and .txt also"
        " with .gz or .zst), or `hub:OWNER/NAME` or `hub:OWNER/NAME:SUBSET` (extra `datasets`,"
        " which .parquet needs too; .zst: extra `zstd`).",
        path=True,
        known_as="HF load_dataset path; TRL dataset_name",
    )
    sources: list[SourceConfig] = key(
        [],
        "Several sources with weights, in place of data.source.",
        known_as="Axolotl datasets; TRL dataset mixtures",
    )
    format: str = key(
        "auto",
        "How a sample is read; `auto`: found by the columns of the first samples.",
        kind="data.format",
        also=("auto",),
        known_as="LLaMA-Factory formatting; Axolotl type",
    )
    split: str = key(
        "train",
        "Split of a hub dataset.",
        needs=key_conditions.READS_HUB,
        known_as="HF load_dataset split",
    )
    columns: dict[str, str] = key(
        {},
        "The format's column name -> the name it has in your file.",
        known_as="torchtune column_map; LLaMA-Factory columns",
    )
    ignore_columns: list[str] = key(
        [],
        "Columns of the rows that change nothing, and keys of their messages as `messages.KEY`:"
        " they are not read, and counted; any other that is not read and not known to change"
        " nothing makes a sample invalid.",
        known_as="none has it: others leave columns out unsaid",
    )
    template: str = key(
        "auto",
        "How turns become text: `chat` is the tokenizer's chat template, `plain` a built-in one,"
        " `auto` chat if any.",
        choices=("auto", "chat", "plain"),
        needs=key_conditions.HAS_TURNS,
        known_as="LLaMA-Factory template",
    )
    train_on: str | list[str] = key(
        "assistant",
        "Label tokens: every answer (`assistant`), the `last` one, `all` tokens, or a list of"
        " roles; a message's own `train: false` takes it out.",
        choices=("assistant", "last", "all"),
        items=("system", "user", "assistant", "tool"),
        needs=key_conditions.LABELS_ARE_OPEN,
        known_as="Axolotl roles_to_train; TRL assistant_only_loss",
    )
    history: str = key(
        "auto",
        "Answers of a conversation whose chat template writes earlier turns anew (drops their"
        " thoughts): `auto`: those that do not fit into one sequence get their own, rendered as"
        " when generating; `split`: each answer gets its own; `refuse`: such a sample is a bad"
        " one.",
        choices=("auto", "split", "refuse"),
        needs=(key_conditions.HAS_EARLIER_ANSWERS, "data.train_on != all"),
        known_as="none has it: others train all answers of one rendering, or the last one",
    )
    check_label_mask: bool = key(
        True,
        "Stop a run in which no token or every token is a label; false: do not.",
        known_as="none has it: others train on such samples",
    )
    packing: bool | str = key(
        False,
        "Pack several sequences into one of up to max_seq_len tokens; none sees another. `auto`:"
        " where a small copy of the model shows that.",
        choices=("auto",),
        known_as="TRL packing; torchtune packed",
    )
    pad_to_multiple_of: int = key(
        1,
        "Sequence lengths are rounded up to a multiple of it, by padding that enters no number; at"
        " most max_seq_len.",
        minimum=1,
        known_as="HF pad_to_multiple_of",
    )
    shuffle: bool = key(
        True,
        "Draw a new order each epoch from the seed; false: file order.",
        known_as="torchtune shuffle",
    )
    add_bos: bool = key(
        True,
        "Begin each sequence (format `text`: each file) with BOS if the tokenizer does; a chat"
        " template writes its own.",
        known_as="torchtune add_bos",
    )
    add_eos: bool = key(
        True,
        "End each `text`, each completion and each answer that is rendered already with EOS, unless"
        " an end token ends it.",
        needs=key_conditions.HAS_TEXTS,
        known_as="torchtune add_eos; Axolotl, TRL and LLaMA-Factory always do",
    )
    parse_special_tokens: bool | None = key(
        None,
        "Special tokens that samples spell out become tokens; false: they stay text. null: by"
        " format: in the texts of `text`, `prompt_completion`, `preference`, `kto` and"
        " `classification`, and not in messages.",
        needs=key_conditions.PARSES_UNLIKE_FORMAT,
        known_as="LLaMA-Factory split_special_tokens; HF has it too: its opposite",
    )
    max_samples: int | None = key(
        None,
        "Use only the first samples of the source.",
        minimum=1,
        known_as="LLaMA-Factory max_samples",
    )
    max_sample_mib: float = key(
        16.0,
        "Largest sample as it is in its file, MiB; a larger one cannot be read (on_invalid).",
        above=0,
        most=4096,
        known_as="none has it: others read a sample of any size",
    )
    on_invalid: str = key(
        "error",
        "What a sample that cannot be read does.",
        choices=("error", "skip"),
        known_as="none has it: others stop, or leave samples out unsaid",
    )
    truncation: str = key(
        "truncate",
        "What a sequence over max_seq_len tokens does.",
        choices=("truncate", "drop", "error"),
        needs=key_conditions.MAY_EXCEED_LENGTH,
        known_as="Axolotl excess_length_strategy",
    )
    num_proc: int | None = key(
        None,
        "Processes per machine that tokenize; null: one for each CPU core.",
        minimum=1,
        most=2**10,
        known_as="HF datasets num_proc",
    )
    num_workers: int = key(
        0,
        "Processes per rank that make batches ahead of the steps; 0: none.",
        minimum=0,
        most=2**8,
        known_as="torch DataLoader num_workers",
    )
    cache: bool = key(
        True,
        "Keep tokenized samples on disk for the next start and for the other ranks of the machine.",
        known_as="HF disable_caching (datasets)",
    )
    cache_dir: str | None = key(
        None,
        "Folder for them; null: $XDG_CACHE_HOME/tune-recipes, or ~/.cache/tune-recipes.",
        path=True,
        needs="data.cache",
        known_as="HF datasets cache_dir",
    )


@dataclass
class ValidationConfig:
    """Loss on data that is not trained on; off while `source` is null."""

    source: str | None = key(
        None,
        "Like data.source; the other data.* keys apply to it as well. null: no validation.",
        path=True,
        known_as="LLaMA-Factory eval_dataset",
    )
    format: str | None = key(
        None,
        "Like data.format; null: the same.",
        kind="data.format",
        also=("auto",),
        needs="validation.source",
        known_as="Axolotl test_datasets type; torchtune dataset_val's class",
    )
    split: str | None = key(
        None,
        "Like data.split, such as test, or train[:5%]; null: the same.",
        needs=key_conditions.VALIDATES_ON_HUB,
        known_as="HF load_dataset split; TRL dataset_test_split",
    )
    every_n_steps: int | None = key(
        None,
        "Steps between validations; null: at the end of each epoch.",
        minimum=1,
        needs="validation.source",
        known_as="torchtune run_val_every_n_steps; HF eval_steps",
    )
    max_samples: int | None = key(
        None,
        "Use only the first samples.",
        minimum=1,
        needs="validation.source",
        known_as="LLaMA-Factory max_samples",
    )
    batch_size: int | None = key(
        None,
        "Sequences per rank in a validation batch; null: batch_size.",
        minimum=1,
        most=2**20,
        needs="validation.source",
        known_as="HF per_device_eval_batch_size",
    )
    metrics: list[str] = key(
        [],
        "Also measure: `token_accuracy`, label tokens that are the likeliest ones; `exact_match`,"
        " sequences of which all are, as greedy decoding gives them; or a plugin's metric of"
        " generated answers.",
        kind="metric",
        also=("token_accuracy",),
        needs="validation.source",
        known_as="HF compute_metrics",
    )
    max_new_tokens: int = key(
        256,
        "Tokens of an answer that is generated for a plugin's metric.",
        minimum=1,
        most=2**20,
        needs=key_conditions.GENERATES_IN_VALIDATION,
        known_as="HF generation_max_length",
    )
    patience: int | None = key(
        None,
        "Stop after this many validations in a row without a better checkpoint.best_metric; null:"
        " never.",
        minimum=1,
        known_as="HF early_stopping_patience; Lightning EarlyStopping.patience",
    )
    min_delta: float = key(
        0.0,
        "By how much more the number has to be better to count for patience.",
        minimum=0,
        needs="validation.patience",
        known_as="HF early_stopping_threshold; Lightning EarlyStopping.min_delta",
    )


def resolve_sources(cfg: DataConfig) -> list[SourceConfig]:
    """Return every source of training data; null fields are filled in from the section `data`.

    `data.source` alone is one source of weight 1; none at all is an empty list. `cfg` is not
    changed.
    """
    if cfg.sources:
        return [_fill_source(source, cfg) for source in cfg.sources]
    return [] if cfg.source is None else [_fill_source(SourceConfig(cfg.source), cfg)]


def list_sources_by_section(data: DataConfig) -> dict[str, SourceConfig]:
    """Return the sources of `resolve_sources` by the section that declares each.

    That is `data`, or `data.sources[0]` and so on; errors name the key `SECTION.source`.
    """
    return {
        f"data.sources[{number}]" if data.sources else "data": source
        for number, source in enumerate(resolve_sources(data))
    }


def _fill_source(source: SourceConfig, cfg: DataConfig) -> SourceConfig:
    """Return a copy of a source, with the section's values where the source's are null."""
    columns = cfg.columns if source.columns is None else source.columns
    return SourceConfig(
        source=source.source,
        weight=source.weight,
        format=cfg.format if source.format is None else source.format,
        split=cfg.split if source.split is None else source.split,
        columns=dict(columns),
        max_samples=cfg.max_samples if source.max_samples is None else source.max_samples,
    )


def resolve_validation_source(
    data: DataConfig, validation: "ValidationConfig"
) -> SourceConfig | None:
    """Return the source of validation data, filled in from `data`; None: no validation."""
    if validation.source is None:
        return None
    return SourceConfig(
        source=validation.source,
        format=validation.format or data.format,
        split=validation.split or data.split,
        columns=dict(data.columns),
        # Not data.max_samples, which is about the training data alone.
        max_samples=validation.max_samples,
    )
