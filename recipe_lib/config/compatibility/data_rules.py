"""List the refused combinations (`Rule`) about samples: data, tokenizer, validation, best step.

`table.py` joins them to the table of all rules. A format is the value of `data.format`, by which
samples are read; the best step is chosen by a metric of validation (`checkpoint.keep_best`), which
also stops a run early (`validation.patience`).
"""

from typing import Any

from recipe_lib.config.compatibility.rule import DPO_RECIPE, TWO_STAGES, Rule
from recipe_lib.config.key_conditions import list_formats, list_generated_metrics
from recipe_lib.config.registry import BUILT_IN
from recipe_lib.config.schema import SAMPLES
from recipe_lib.config.schema_data import resolve_sources
from recipe_lib.config.suggest import did_you_mean, quote

# Keys that `list_unused_formats` looks at.
FORMAT_KEYS = (
    "data.source",
    "data.sources",
    "data.format",
    "validation.source",
    "validation.format",
)


def list_unused_formats(cfg: Any, samples: str) -> set[str]:
    """Return the formats of a config whose samples are not of the kind that its recipe trains on.

    samples: the kind that is asked about, a key of SAMPLES. Empty if the recipe trains on another
    kind. A format that a plugin registered is not judged: its kind of samples is not known.
    """
    if getattr(cfg, "samples", "answers") != samples:
        return set()
    return list_formats(cfg) & set(BUILT_IN["data.format"][1]) - set(SAMPLES[samples])


DATA_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("data.source", "data.sources"),
        applies=lambda cfg: not resolve_sources(cfg.data),
        reason="neither is set",
        remedy=(
            "set data.source to a file or folder of samples (JSON, JSON lines, CSV, Parquet, text;"
            " also .gz and .zst) or to hub:OWNER/NAME, or data.sources to several"
        ),
        example=("~data.source",),
    ),
    Rule(
        keys=("data.source", "data.sources"),
        applies=lambda cfg: cfg.data.source is not None and len(cfg.data.sources) > 0,
        reason="both are set",
        remedy="move data.source into the list, or remove one of the two",
        example=("data.source=own.jsonl", "data.sources=[{source: more.jsonl}]"),
    ),
    Rule(
        keys=("data.pad_to_multiple_of", "max_seq_len"),
        applies=lambda cfg: cfg.data.pad_to_multiple_of > cfg.max_seq_len,
        reason="every sequence would be padded beyond the longest that there can be",
        remedy="lower data.pad_to_multiple_of to max_seq_len or less",
        example=("data.pad_to_multiple_of=4096",),
    ),
    Rule(
        keys=("data.format",),
        applies=lambda cfg: "preference" in list_unused_formats(cfg, "answers"),
        reason="this recipe has no use for pairs of a chosen and a rejected answer",
        remedy="choose another format, or run dpo_distributed",
        example=("data.format=preference",),
        reads=FORMAT_KEYS,
    ),
    Rule(
        keys=("data.format",),
        applies=lambda cfg: list_unused_formats(cfg, "answers") & {"kto", "classification"},
        reason="this recipe has no use for the labels of such samples",
        remedy=(
            "choose another format, or run dpo_distributed with dpo.loss=kto, or reward_distributed"
            " with reward.loss=classification"
        ),
        example=("data.format=kto",),
        reads=FORMAT_KEYS,
    ),
)

UNUSED_TEMPLATE = Rule(
    keys=("tokenizer.chat_template", "data.template"),
    applies=lambda cfg: cfg.tokenizer.chat_template is not None and cfg.data.template == "plain",
    reason="the built-in plain template would be used in place of the file",
    remedy="remove one of the two",
    example=("tokenizer.chat_template=chat.jinja", "data.template=plain"),
)


def _compares_steps(cfg: Any) -> bool:
    """Return True if `checkpoint.best_metric` has an effect."""
    return cfg.checkpoint.keep_best or cfg.validation.patience is not None


def _find_unknown_metric(cfg: Any) -> str | None:
    """Return the fault of a `checkpoint.best_metric` that validation lacks; None: it has it."""
    metric = cfg.checkpoint.best_metric
    known = [*cfg.validation_numbers, *(f"validation_{name}" for name in cfg.validation.metrics)]
    if not _compares_steps(cfg) or metric in known:
        return None
    hint = did_you_mean(metric, known)
    return (
        f"found {quote(metric)}, expected {' or '.join(known)}{hint}; the Config of a recipe of"
        " your own names others as its validation_numbers"
    )


def _refuse_generation(dimension: str) -> Rule:
    """Return the rule that refuses a plugin's metric with several ranks along a mesh dimension.

    dimension: `tensor`, `context` or `pipeline`. `mine` in examples is a metric of a plugin.
    """
    example = ["validation.metrics=[mine]", "validation.source=held_out.jsonl"]
    example += TWO_STAGES if dimension == "pipeline" else [f"parallel.{dimension}=2"]
    return Rule(
        keys=("validation.metrics", f"parallel.{dimension}"),
        applies=lambda cfg: (
            bool(list_generated_metrics(cfg)) and getattr(cfg.parallel, dimension) > 1
        ),
        reason=(
            "a plugin's metric is measured of generated answers, which takes whole layers on each"
            " rank"
        ),
        remedy=f"set parallel.{dimension}=1, or measure after training with `tune eval`",
        example=tuple(example),
    )


VALIDATION_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("validation.metrics", "data.format"),
        # A recipe with a loss of its own: pairs, labels, scores or a teacher.
        applies=lambda cfg: bool(cfg.validation.metrics) and cfg.own_loss is not None,
        reason="the recipe's validation has numbers of its own, and no single answers to measure",
        remedy="remove validation.metrics",
        example=("validation.metrics=[exact_match]", "validation.source=held_out.jsonl"),
        recipe=DPO_RECIPE,
    ),
    _refuse_generation("tensor"),
    _refuse_generation("context"),
    _refuse_generation("pipeline"),
    Rule(
        keys=("checkpoint.keep_best", "validation.patience", "validation.source"),
        applies=lambda cfg: _compares_steps(cfg) and cfg.validation.source is None,
        reason="which step is best is found by validation, and there is none",
        remedy="set validation.source to samples that are not trained on, or remove the others",
        example=("checkpoint.keep_best=true",),
    ),
    Rule(
        keys=("checkpoint.best_metric",),
        applies=_find_unknown_metric,
        reason="validation gives no such number",
        remedy="choose one that it gives",
        example=(
            "checkpoint.keep_best=true",
            "validation.source=own.jsonl",
            "checkpoint.best_metric=eval_loss",
        ),
        reads=("checkpoint.keep_best", "validation.patience", "validation.source"),
    ),
    Rule(
        keys=("validation.metrics", "compile"),
        applies=lambda cfg: bool(list_generated_metrics(cfg)) and cfg.compile,
        reason=(
            "answers are generated token by token, for which compiled layers would be compiled anew"
            " again and again"
        ),
        remedy="set compile=false, or measure after training with `tune eval`",
        example=("validation.metrics=[mine]", "validation.source=held_out.jsonl", "compile=true"),
    ),
)
