"""Rules of the sections `data` and `tokenizer`."""

from typing import Any

from recipe_lib.config.compatibility.rule import Rule
from recipe_lib.config.key_conditions import list_formats
from recipe_lib.config.registry import BUILT_IN
from recipe_lib.config.schema import SAMPLES
from recipe_lib.config.schema_data import resolve_sources

FORMAT_KEYS = (
    "data.source",
    "data.sources",
    "data.format",
    "validation.source",
    "validation.format",
)


def list_unused_formats(cfg: Any, samples: str) -> set[str]:
    """Return the formats of a config that a recipe for such samples has no use for.

    samples: a key of SAMPLES. Empty for a recipe that trains on others. A plugin's formats are not
    judged: nobody knows what its samples are.
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
