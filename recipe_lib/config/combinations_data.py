"""Combinations of settings of the data that are refused."""

from typing import Any

from recipe_lib.config.combination import Incompatible
from recipe_lib.config.registry import BUILT_IN
from recipe_lib.config.sources import is_hub, resolved_sources

_PREFERENCE = "preference"
_FORMATS = ("data.source", "data.sources", "data.format", "validation.source", "validation.format")


def formats(cfg: Any) -> set[str]:
    """Every format that rows are read in, those of validation too."""
    named = {source.format or "" for source in resolved_sources(cfg.data)} or {cfg.data.format}
    return named | ({cfg.validation.format or cfg.data.format} if cfg.validation.source is not None else set())


def trains_on_pairs(cfg: Any) -> bool:
    """It is the config of preference optimization."""
    return getattr(cfg, "dpo", None) is not None


def _reads_hub(cfg: Any) -> bool:
    sources = [source.source for source in resolved_sources(cfg.data)]
    return any(is_hub(source) for source in (*sources, cfg.validation.source))


DATA: tuple[Incompatible, ...] = (
    Incompatible(
        "no data",
        lambda cfg: not resolved_sources(cfg.data),
        ("data.source", "data.sources"),
        "neither is set",
        "set data.source to a file or folder of rows (.json, .jsonl, .parquet, .txt) or to hub:OWNER/NAME, "
        "or data.sources to several",
        ("~data.source",),
    ),
    Incompatible(
        "one source and several",
        lambda cfg: cfg.data.source is not None and len(cfg.data.sources) > 0,
        ("data.source", "data.sources"),
        "both are set",
        "move data.source into the list, or remove one of the two",
        ("data.sources=[{source: more.jsonl}]",),
    ),
    Incompatible(
        "split of a local file",
        lambda cfg: not _reads_hub(cfg),
        ("data.source", "data.split"),
        "a local file has no splits",
        "remove data.split, or name the split's own file",
        ("data.split=test",),
        unread="data.split",
        reads=("data.sources", "validation.source"),
    ),
    Incompatible(
        "padding beyond the longest row",
        lambda cfg: cfg.data.pad_to_multiple_of > cfg.max_seq_len,
        ("data.pad_to_multiple_of", "max_seq_len"),
        "every row would be padded beyond the longest that there can be",
        "lower data.pad_to_multiple_of to max_seq_len or less",
        ("data.pad_to_multiple_of=4096",),
    ),
    Incompatible(
        "template without turns",
        lambda cfg: formats(cfg) <= {"text", "prompt_completion"},
        ("data.format", "data.template"),
        "rows of text or prompt_completion have no turns to put in a template",
        "remove data.template, or choose a format that has turns",
        ("data.format=text", "data.template=chat"),
        unread="data.template",
        reads=_FORMATS,
    ),
    Incompatible(
        "history of rows that are one sequence",
        lambda cfg: formats(cfg) <= {"text", "prompt_completion", _PREFERENCE},
        ("data.format", "data.history"),
        "rows of text, prompt_completion and preference have no earlier answers that are trained",
        "remove data.history, or choose a format that has them",
        ("data.format=prompt_completion", "data.history=split"),
        unread="data.history",
        reads=_FORMATS,
    ),
    Incompatible(
        "history where all of it is trained",
        lambda cfg: cfg.data.train_on == "all",
        ("data.train_on", "data.history"),
        "a conversation of which every token is trained is one sequence",
        "remove data.history, or set data.train_on to assistant",
        ("data.train_on=all", "data.history=split"),
        unread="data.history",
    ),
    Incompatible(
        "long rows of plain text",
        lambda cfg: formats(cfg) == {"text"},
        ("data.format", "data.truncation"),
        "a text is cut into rows of max_seq_len, so that none is longer",
        "remove data.truncation",
        ("data.format=text", "data.truncation=drop"),
        unread="data.truncation",
        reads=_FORMATS,
    ),
    Incompatible(
        "answers of plain text",
        lambda cfg: formats(cfg) == {"text"} and cfg.data.train_on != "all",
        ("data.format", "data.train_on"),
        "a text has no answers, all of it is trained",
        "remove data.train_on, or choose a format that has answers",
        ("data.format=text", "data.train_on=last"),
        unread="data.train_on",
        reads=_FORMATS,
    ),
    Incompatible(
        "answers of pairs",
        lambda cfg: formats(cfg) == {_PREFERENCE},
        ("data.format", "data.train_on"),
        "of a pair the chosen and the rejected answer are what the loss sees",
        "remove data.train_on",
        ("data.train_on=all",),
        unread="data.train_on",
        recipe="dpo_distributed",
        reads=_FORMATS,
    ),
    Incompatible(
        "pairs for another loss",
        lambda cfg: not trains_on_pairs(cfg) and _PREFERENCE in formats(cfg),
        ("data.format",),
        "this recipe has no use for pairs of a chosen and a rejected answer",
        "choose another format, or run dpo_distributed",
        ("data.format=preference",),
        reads=_FORMATS,
    ),
    Incompatible(
        "no pairs",
        lambda cfg: bool(formats(cfg) & {*BUILT_IN["data.format"][1]} - {_PREFERENCE}),
        ("dpo.loss", "data.format"),
        "the loss compares a chosen with a rejected answer, which rows of this format do not have",
        "set data.format to preference",
        ("data.format=alpaca",),
        recipe="dpo_distributed",
        reads=_FORMATS,
    ),
    Incompatible(
        "folder of no cache",
        lambda cfg: not cfg.data.cache,
        ("data.cache", "data.cache_dir"),
        "nothing is kept on disk",
        "remove data.cache_dir, or set data.cache to true",
        ("data.cache=false", "data.cache_dir=rows"),
        unread="data.cache_dir",
    ),
    Incompatible(
        "unused chat template",
        lambda cfg: cfg.tokenizer.chat_template is not None and cfg.data.template == "plain",
        ("tokenizer.chat_template", "data.template"),
        "the built-in plain template would be used in place of the file",
        "remove one of the two",
        ("tokenizer.chat_template=chat.jinja", "data.template=plain"),
    ),
    *(
        Incompatible(
            f"validation.{word} without validation",
            lambda cfg: cfg.validation.source is None,
            ("validation.source", f"validation.{word}"),
            "validation is off while its source is null",
            f"set validation.source, or remove validation.{word}",
            ("~validation.source", f"validation.{word}={'alpaca' if word == 'format' else 1}"),
            unread=f"validation.{word}",
        )
        for word in ("format", "every_n_steps", "max_samples", "batch_size")
    ),
)
