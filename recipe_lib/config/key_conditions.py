"""Keys that another key makes idle: `needs` at a key in the schema says what has to hold for it to
have an effect.

A condition is `KEY`, which has to be set (neither null, false nor empty), or `KEY OP VALUE`, with
`=`, `!=`, `>` or `in` and values parted by commas; several may be joined by ` or `. What no such
line can say is a `Condition`, with a function of the config that returns the reason, or None while
the key has an effect. No torch.
"""

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from recipe_lib.config.optimizer_facts import find_optimizer_facts, read_built_in_optimizers

SCORED_METRICS = (
    "exact_match",
    "token_accuracy",
)  # of `validation.metrics`, measured of likelihoods


@dataclass(frozen=True)
class Condition:
    """What has to hold for a key to have an effect, where no line of the schema can say it."""

    # As the reference has it.
    text: str
    # Why a key has no effect in a config; None where it has.
    why_not: Callable[[Any], str | None]


def reset_idle_keys(cfg: Any, keys: Iterable[Any], judged: Iterable[str]) -> list[str]:
    """Puts the keys that have no effect back to their defaults, in place; a line for each that had
    another value.

    keys: of the schema, in its order: a key stands after those that it needs. judged: names of keys
    without a fault.
    """
    lines, judged = [], set(judged)
    for key in keys:
        if (
            "needs" not in key.limits
            or key.name not in judged
            or _value(cfg, key.name) == key.default
        ):
            continue
        if reason := explain_idle_key(cfg, key):
            lines.append(f"{key.name} has no effect: {reason}")
            section, _, word = key.name.rpartition(".")
            setattr(_value(cfg, section) if section else cfg, word, copy.deepcopy(key.default))
    return lines


def explain_idle_key(cfg: Any, key: Any) -> str | None:
    """`parallel.pipeline is 1`, for a key that has no effect in this config; None for one that
    has.
    """
    needs = key.limits.get("needs", ())
    for condition in needs if isinstance(needs, tuple) else (needs,):
        reason = (
            condition.why_not(cfg) if isinstance(condition, Condition) else _unmet(cfg, condition)
        )
        if reason:
            return reason
    return None


def describe_needs(needs: Any) -> str:
    """The conditions as the reference has them: `parallel.pipeline > 1`."""
    parts = needs if isinstance(needs, tuple) else (needs,)
    return " and ".join(each.text if isinstance(each, Condition) else f"`{each}`" for each in parts)


def _unmet(cfg: Any, condition: str) -> str | None:
    reasons = []
    for one in condition.split(" or "):
        name, _, rest = one.partition(" ")
        try:
            value = _value(cfg, name)
        except AttributeError:
            return None  # a class without the key, as a recipe without dpo
        operator, _, values = rest.partition(" ")
        if _holds(value, operator, values.split(", ")):
            return None
        reasons.append(f"{name} is {_text(value)}")
    return ", ".join(reasons)


def _holds(value: Any, operator: str, wanted: list[str]) -> bool:
    if not operator:
        return value is not None and value is not False and value != []
    if operator == ">":
        return bool(value > float(wanted[0]))
    return (_text(value) in wanted) == (operator != "!=")


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return ("set" if value else "[]") if isinstance(value, list) else str(value)


def _value(cfg: Any, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), cfg)


def list_formats(cfg: Any) -> set[str]:
    """Every format that samples are read in, those of validation too."""
    named = {source.format or cfg.data.format for source in cfg.data.sources} or {cfg.data.format}
    return named | (
        {cfg.validation.format or cfg.data.format} if cfg.validation.source is not None else set()
    )


def _only(cfg: Any, without: set[str]) -> str | None:
    found = list_formats(cfg)
    return f"data.format is {' and '.join(sorted(found))}" if found <= without else None


HAS_TURNS = Condition("a format with turns", lambda cfg: _only(cfg, {"text"}))
HAS_EARLIER_ANSWERS = Condition(
    "a format of conversations",
    lambda cfg: _only(cfg, {"text", "preference", "kto", "classification"}),
)
MAY_EXCEED_LENGTH = Condition(
    "another format than `text`, which is cut into sequences of max_seq_len",
    lambda cfg: _only(cfg, {"text"}),
)
LABELS_ARE_OPEN = Condition(
    "a format whose samples leave open what is trained",
    lambda cfg: (
        _only(cfg, {"preference", "kto", "classification"})
        or (_only(cfg, {"text"}) if cfg.data.train_on != "all" else None)
    ),
)
HAS_TEXTS = Condition(
    "a format whose samples may be texts",
    lambda cfg: _only(cfg, {"alpaca", "sharegpt", "messages", "classification"}),
)
PARSES_UNLIKE_FORMAT = Condition(
    "another value than the format's own",
    lambda cfg: _only(
        cfg,
        (
            {"text", "prompt_completion"}
            if cfg.data.parse_special_tokens
            else {"alpaca", "sharegpt", "messages"}
        ),
    ),
)


def _why_not_hub(cfg: Any) -> str | None:
    sources = [
        *(source.source for source in cfg.data.sources),
        cfg.data.source,
        cfg.validation.source,
    ]
    return (
        None
        if any(str(source).startswith("hub:") for source in sources)
        else "no source is a dataset of the hub"
    )


READS_HUB = Condition("a hub dataset", _why_not_hub)
VALIDATES_ON_HUB = Condition(
    "a hub dataset in `validation.source`",
    lambda cfg: (
        None
        if str(cfg.validation.source).startswith("hub:")
        else "validation.source is no dataset of the hub"
    ),
)


def _why_not_generated(cfg: Any) -> str | None:
    if cfg.validation.source is None:
        return "validation.source is null"
    return None if list_generated_metrics(cfg) else "validation.metrics names no metric of a plugin"


GENERATES_IN_VALIDATION = Condition("a plugin's metric in `validation.metrics`", _why_not_generated)


def list_generated_metrics(cfg: Any) -> list[str]:
    """The names in `validation.metrics` that are measured of generated answers: a plugin's."""
    return [name for name in cfg.validation.metrics if name not in SCORED_METRICS]


def get_trained_dtype(cfg: Any) -> str:
    """The type of what is trained: the adapters' own, where adapters are."""
    adapters = getattr(cfg, "trained_adapters", None)
    return str(cfg.dtype if adapters is None else adapters.dtype or cfg.dtype)


def _why_not_bf16(cfg: Any) -> str | None:
    dtype = get_trained_dtype(cfg)
    if dtype == "bf16":
        return None
    return f"{'dtype' if dtype == cfg.dtype else 'lora.dtype'} is {dtype}"


TRAINS_BF16 = Condition("bf16 weights that are trained", _why_not_bf16)


def require_optimizer_key(word: str) -> Condition:
    """The condition that `optimizer.name` reads a key of its section; of a plugin's without facts
    nobody knows.
    """

    def why_not(cfg: Any) -> str | None:
        facts = find_optimizer_facts(cfg.optimizer.name)
        return (
            None
            if facts is None or word in facts.keys
            else f"optimizer.name is {cfg.optimizer.name}"
        )

    others = [name for name, facts in read_built_in_optimizers().items() if word not in facts.keys]
    return Condition(f"`optimizer.name != {', '.join(others)}`", why_not)


def _why_not_by_torch(cfg: Any) -> str | None:
    facts = find_optimizer_facts(cfg.optimizer.name)
    if facts is None or "implementation" not in facts.keys:
        return None if facts is None else f"optimizer.name is {cfg.optimizer.name}"
    same = {"bf16": 16, "fp32": 32, "fp64": 64}.get(get_trained_dtype(cfg))
    if "state_bits" not in facts.keys:
        return None
    if cfg.optimizer.state_bits not in (None, same):
        return f"optimizer.state_bits is {cfg.optimizer.state_bits}, which has one implementation"
    for word in ("master_weights", "stochastic_rounding"):
        if getattr(cfg.optimizer, word):
            return f"optimizer.{word} is true, which has one implementation"
    return None


STEPS_WITH_TORCH = Condition("a step of torch's own optimizers", _why_not_by_torch)
SUMS_OVER_TOKENS = Condition(
    "a recipe without its own loss", lambda cfg: getattr(cfg, "own_loss", None)
)


def _why_no_adapters(cfg: Any) -> str | None:
    if getattr(cfg, "trained_adapters", None) is not None or not cfg.adapters_instead:
        return None
    ((name, _),) = cfg.adapters_instead.items()
    return f"{name} is {_value(cfg, name)}"


TRAINS_ADAPTERS = Condition("`dpo.trainable, distill.trainable = adapters`", _why_no_adapters)
