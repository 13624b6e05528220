"""Define when a key of a config has an effect, and reset idle keys, which have none.

`needs` at a key in the schema is a condition, or a tuple of them: a line `KEY`, which has to be set
(neither null, false nor `[]`), or `KEY OP VALUE`, with `=`, `!=`, `>` or `in` and values parted by
commas; several may be joined by ` or `. What no such line can say is a `Condition`. `load_config`
calls `reset_idle_keys` and tells of each; docs/config.md prints the conditions.
"""

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from recipe_lib.config.optimizer_facts import find_optimizer_facts, read_built_in_optimizers
from recipe_lib.config.suggest import format_word

# Values of `validation.metrics` that are computed from token probabilities. Any other is a metric
# of generated answers, which a plugin (a user's file) registers.
SCORED_METRICS = ("exact_match", "token_accuracy")
# Begins a source that is a dataset on the hub (huggingface.co): `hub:OWNER/NAME`.
HUB = "hub:"


@dataclass(frozen=True)
class Condition:
    """A condition for a key to have an effect that no line of the schema can express."""

    # Ends the sentence `Only with ...` in docs/config.md.
    text: str
    # Called with a config object: the reason why the key has no effect in it (`dtype is fp32`);
    # None: it has one. So are the functions `_why_...` below.
    why_not: Callable[[Any], str | None]


def reset_idle_keys(cfg: Any, keys: Iterable[Any], judged_keys: Iterable[str]) -> dict[str, str]:
    """Put the keys that have no effect back to their defaults, in place.

    keys: `flat_schema.Key`s in the schema's order, in which a key stands after those that it needs.
    judged_keys: names of keys without a fault; others are left alone. Returns key -> why it has no
    effect, of those that had another value.
    """
    reasons = {}
    judged_keys = set(judged_keys)
    for key in keys:
        if "needs" not in key.limits or key.name not in judged_keys:
            continue
        reason = explain_idle_key(cfg, key)
        if reason is not None and _get_value(cfg, key.name) != key.default:
            reasons[key.name] = reason
            section, _, word = key.name.rpartition(".")
            owner = _get_value(cfg, section) if section else cfg
            # A copy: a list or mapping of the schema must not be shared by configs.
            setattr(owner, word, copy.deepcopy(key.default))
    return reasons


def explain_idle_key(cfg: Any, key: Any) -> str | None:
    """Return why a key has no effect in this config, `parallel.pipeline is 1`; None if it has.

    key: a `flat_schema.Key`.
    """
    reasons = (
        need.why_not(cfg) if isinstance(need, Condition) else _find_unmet(cfg, need)
        for need in key.limits.get("needs", ())
    )
    return next(filter(None, reasons), None)


def describe_needs(needs: Iterable[Any]) -> str:
    """Return conditions as docs/config.md has them: `parallel.pipeline > 1`, with backquotes."""
    return " and ".join(need.text if isinstance(need, Condition) else f"`{need}`" for need in needs)


def _find_unmet(cfg: Any, condition: str) -> str | None:
    """Return why a line of the schema does not hold; None if it does."""
    reasons = []
    for alternative in condition.split(" or "):
        name, _, rest = alternative.partition(" ")
        try:
            value = _get_value(cfg, name)
        except AttributeError:
            return None  # a class without the key, as a recipe without dpo
        operator, _, operands = rest.partition(" ")
        if _is_met(value, operator, operands.split(", ")):
            return None
        reasons.append(f"{name} is {_format_value(value)}")
    return ", ".join(reasons)


def _is_met(value: Any, operator: str, operands: list[str]) -> bool:
    """Return True if a value meets a condition.

    operator: empty (the value is set), `=`, `!=`, `>` or `in`.
    """
    if not operator:
        # Not by its truth value: 0 counts as set.
        return value is not None and value is not False and value != []
    if operator == ">":
        return bool(value > float(operands[0]))
    return (_format_value(value) in operands) != (operator == "!=")


def _format_value(value: Any) -> str:
    """Return a value as text for a comparison or a reason; a list as `set` or `[]`."""
    if isinstance(value, list):
        return "set" if value else "[]"
    return format_word(value)


def _get_value(cfg: Any, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), cfg)


def list_formats(cfg: Any) -> set[str]:
    """Return every value of `data.format` that a config's sources have, those of validation too."""
    sources = cfg.data.sources or [cfg.data]  # the section itself has `format` too
    formats = {source.format or cfg.data.format for source in sources}
    if cfg.validation.source is not None:
        formats.add(cfg.validation.format or cfg.data.format)
    return formats


def is_hub(source: str | None) -> bool:
    """Return True if a source is a hub dataset; False for a file, a folder and None."""
    return source is not None and source.startswith(HUB)


def list_generated_metrics(cfg: Any) -> list[str]:
    """Return the names in `validation.metrics` that are measured of generated answers."""
    return [name for name in cfg.validation.metrics if name not in SCORED_METRICS]


def get_trained_dtype(cfg: Any) -> str:
    """Return the dtype of what is trained, `bf16`, `fp32` or `fp64`; with adapters, theirs."""
    # The class of a user's own recipe may lack the property.
    adapters = getattr(cfg, "trained_adapters", None)
    return str(cfg.dtype if adapters is None else adapters.dtype or cfg.dtype)


# Conditions on data.format. A format that is `auto` or a plugin's is in none of these sets, so that
# the key keeps its value: it is not known yet what the samples are.


def _refuse_formats(cfg: Any, formats_without: set[str]) -> str | None:
    """Return the reason if every format of a config is in `formats_without`; None: one is not.

    formats_without: formats with which the key has no effect.
    """
    formats = list_formats(cfg)
    return f"data.format is {' and '.join(sorted(formats))}" if formats <= formats_without else None


def _why_labels_are_fixed(cfg: Any) -> str | None:
    """Return why `data.train_on` has no effect: samples of some formats say what is trained."""
    reason = _refuse_formats(cfg, {"preference", "kto", "classification"})
    if reason or cfg.data.train_on == "all":
        return reason
    # Of a text all tokens are labels, which `all` says as well: only that value is not idle.
    return _refuse_formats(cfg, {"text"})


def _why_parses_like_format(cfg: Any) -> str | None:
    """Return why `data.parse_special_tokens` has no effect: the format does the same without it."""
    if cfg.data.parse_special_tokens:
        return _refuse_formats(cfg, {"text", "prompt_completion"})
    return _refuse_formats(cfg, {"alpaca", "sharegpt", "messages"})


HAS_TURNS = Condition("a format with turns", lambda cfg: _refuse_formats(cfg, {"text"}))
HAS_EARLIER_ANSWERS = Condition(
    "a format of conversations",
    lambda cfg: _refuse_formats(cfg, {"text", "preference", "kto", "classification"}),
)
MAY_EXCEED_LENGTH = Condition(
    "another format than `text`, which is cut into sequences of max_seq_len",
    lambda cfg: _refuse_formats(cfg, {"text"}),
)
LABELS_ARE_OPEN = Condition(
    "a format whose samples leave open what is trained", _why_labels_are_fixed
)
HAS_TEXTS = Condition(
    "a format whose samples may be texts",
    lambda cfg: _refuse_formats(cfg, {"alpaca", "sharegpt", "messages", "classification"}),
)
PARSES_UNLIKE_FORMAT = Condition("another value than the format's own", _why_parses_like_format)


# Conditions on sources and validation.


def _why_not_hub(cfg: Any) -> str | None:
    sources = [source.source for source in cfg.data.sources]
    sources += [cfg.data.source, cfg.validation.source]
    reads_hub = any(is_hub(source) for source in sources)
    return None if reads_hub else "no source is a dataset of the hub"


def _why_not_generated(cfg: Any) -> str | None:
    if cfg.validation.source is None:
        return "validation.source is null"
    return None if list_generated_metrics(cfg) else "validation.metrics names no metric of a plugin"


READS_HUB = Condition("a hub dataset", _why_not_hub)
VALIDATES_ON_HUB = Condition(
    "a hub dataset in `validation.source`",
    lambda cfg: (
        None if is_hub(cfg.validation.source) else "validation.source is no dataset of the hub"
    ),
)
GENERATES_IN_VALIDATION = Condition("a plugin's metric in `validation.metrics`", _why_not_generated)


# Conditions on the optimizer and on what is trained.


def require_optimizer_key(word: str) -> Condition:
    """Return the condition that `optimizer.name` reads a key, such as `eps`, of its section."""

    def why_not(cfg: Any) -> str | None:
        facts = find_optimizer_facts(cfg.optimizer.name)
        # A plugin's optimizer without facts may read any key.
        is_read = facts is None or word in facts.keys
        return None if is_read else f"optimizer.name is {cfg.optimizer.name}"

    names_without = [
        name for name, facts in read_built_in_optimizers().items() if word not in facts.keys
    ]
    return Condition(f"`optimizer.name != {', '.join(names_without)}`", why_not)


def _why_not_bf16(cfg: Any) -> str | None:
    dtype = get_trained_dtype(cfg)
    key = "dtype" if dtype == cfg.dtype else "lora.dtype"
    return None if dtype == "bf16" else f"{key} is {dtype}"


def _why_not_by_torch(cfg: Any) -> str | None:
    """Return why `optimizer.implementation`, which chooses among torch's kernels, has no effect."""
    facts = find_optimizer_facts(cfg.optimizer.name)
    if facts is None:
        return None
    if "implementation" not in facts.keys:
        return f"optimizer.name is {cfg.optimizer.name}"
    if "state_bits" not in facts.keys:
        return None
    # torch's own optimizers keep states in the parameter's dtype; for all else the step is of this
    # project, which has one implementation.
    parameter_bits = {"bf16": 16, "fp32": 32, "fp64": 64}.get(get_trained_dtype(cfg))
    if cfg.optimizer.state_bits not in (None, parameter_bits):
        return f"optimizer.state_bits is {cfg.optimizer.state_bits}, which has one implementation"
    for word in ("master_weights", "stochastic_rounding"):
        if getattr(cfg.optimizer, word):
            return f"optimizer.{word} is true, which has one implementation"
    return None


def _why_no_adapters(cfg: Any) -> str | None:
    # adapters_instead: {key of the recipe: the value with which it trains adapters}; empty: it has
    # no such key.
    if getattr(cfg, "trained_adapters", None) is not None or not cfg.adapters_instead:
        return None
    ((name, _),) = cfg.adapters_instead.items()
    return f"{name} is {_get_value(cfg, name)}"


TRAINS_BF16 = Condition("bf16 weights that are trained", _why_not_bf16)
STEPS_WITH_TORCH = Condition("a step of torch's own optimizers", _why_not_by_torch)
SUMS_OVER_TOKENS = Condition(
    "a recipe without its own loss", lambda cfg: getattr(cfg, "own_loss", None)
)
TRAINS_ADAPTERS = Condition("a recipe that trains adapters", _why_no_adapters)
