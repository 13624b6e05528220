"""The rotary embedding of a `config.json`: `rope_theta` and `rope_scaling`, or the newer `rope_parameters`."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recipe_lib.errors import CheckpointError
from recipe_lib.models.spec import RopeSpec

if TYPE_CHECKING:
    from recipe_lib.models.family_fields import Fields

# What a family's own class takes where the file has none.
_WITHOUT_ANY: dict[str, dict[str, Any]] = {
    "gpt_oss": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
NEWER = "rope_parameters"  # the key of config.json since transformers 5
OLDER = "rope_scaling"
LAYER_KINDS = ("full_attention", "sliding_attention")  # which the newer one may tell apart
POSITIONS = "original_max_position_embeddings"
_STRETCHED = ("llama3", "yarn", "longrope")  # types with such a number

NUMBERS = (1e-30, 1e30)  # of a config.json: what fp32 holds, and its square too
ROPE_NUMBERS = (1e-9, 1e9)  # factors and lengths of a rotary embedding
BASES = (1e-9, 1e12)


def is_within(value: Any, bounds: tuple[float, float]) -> bool:
    """Return whether a value out of JSON is a number of that size (true is not a number)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and bounds[0] <= value <= bounds[1]


def show_bounds(bounds: tuple[float, float]) -> str:
    """`from 1e-09 to 1e+09`, for an error."""
    return f"from {bounds[0]:g} to {bounds[1]:g}"


def read_rope(fields: "Fields", family: str, head_width: int) -> tuple[RopeSpec, RopeSpec | None]:
    """The rotary embedding of a model, and a second one for layers with a window where the family has one."""
    key = _find_spelling(fields)
    ropes = _read_ropes(fields, family, key, head_width)
    # transformers takes the older spelling then, with the base of rope_theta: a model that nobody may have meant.
    both = key == NEWER and fields.config.get(OLDER)
    if both and _read_ropes(fields, family, OLDER, head_width) != ropes:
        raise fields.fault(OLDER, f"what {NEWER} says as well; take one of the two out")
    return ropes


def complete_ropes(fields: "Fields", family: str) -> dict[str, Any]:
    """Return `rope_parameters` with all that config.json says of rotary embeddings, in either spelling."""
    ropes = []
    for base, given in _find_ropes(fields, family, _find_spelling(fields)).items():
        rope = {"rope_theta": fields.number(base), **given, "rope_type": _find_kind(fields, given)}
        rope.pop("type", None)
        fraction = fields.config.get("partial_rotary_factor")
        if fraction is not None:
            rope.setdefault("partial_rotary_factor", fraction)
        positions = fields.config.get(POSITIONS)
        if positions is not None and rope["rope_type"] in _STRETCHED:
            rope[POSITIONS] = positions
        ropes.append(rope)
    return ropes[0] if len(ropes) == 1 else dict(zip(LAYER_KINDS, ropes, strict=True))


def _find_spelling(fields: "Fields") -> str:
    """Return the key that counts: the newer one where config.json has both."""
    return OLDER if fields.config.get(NEWER) is None else NEWER


def _read_ropes(fields: "Fields", family: str, key: str, head_width: int) -> tuple[RopeSpec, RopeSpec | None]:
    """Return what one spelling of the two says."""
    ropes = [
        _one_rope(fields, key, given, fields.number(base), head_width)
        for base, given in _find_ropes(fields, family, key).items()
    ]
    return ropes[0], ropes[1] if len(ropes) > 1 else None


def _find_ropes(fields: "Fields", family: str, key: str) -> dict[str, Mapping[str, Any]]:
    """Return the objects of a model's rotary embeddings in one spelling, by the older key for the base of each."""
    given = _WITHOUT_ANY.get(family, {}) if fields.config.get(key) is None else fields.config[key] or {}
    if not isinstance(given, Mapping):
        raise fields.fault(key, "an object, or null")
    if family != "gemma3":
        return {"rope_theta": given}
    nested = not given.keys().isdisjoint(LAYER_KINDS)
    everywhere, local = (given.get(kind) or {} for kind in LAYER_KINDS) if nested else (given, {})
    return {"rope_theta": everywhere, "rope_local_base_freq": local}


def _find_kind(fields: "Fields", given: Mapping[str, Any]) -> Any:
    """Return the type of a rotary embedding, by its present name."""
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "su" or (kind == "yarn" and fields.config.get("model_type") == "phi3"):
        return "longrope"  # what Phi 3's first files called it
    return kind


def _one_rope(fields: "Fields", key: str, given: Mapping[str, Any], base: float, head_width: int) -> RopeSpec:
    """One rotary embedding from its object in config.json; `base` counts unless the object has its own."""
    kind = _find_kind(fields, given)
    if kind not in ROPE_TYPES:
        raise CheckpointError(
            f"{fields.where}: config.json: {key}: type {kind!r} is not supported; expected one of "
            f"{', '.join(ROPE_TYPES)}"
        )
    numbers = _Numbers(fields, key, given)
    base = numbers.optional("rope_theta") or base
    fraction = numbers.optional("partial_rotary_factor")
    if fraction is None:
        fraction = fields.optional_number("partial_rotary_factor") or 1.0
    if fraction != 1 and fields.config.get("model_type") != "phi3":  # other classes of transformers do not read it
        raise CheckpointError(
            f"{fields.where}: config.json: partial_rotary_factor: found {fraction:g}, expected 1 or no such key: "
            "models of this model_type rotate all channels"
        )
    width = int(head_width * fraction)
    if width % 2 or not 2 <= width <= head_width:
        raise CheckpointError(
            f"{fields.where}: config.json: head width {head_width} with partial_rotary_factor {fraction:g} gives "
            f"{width} rotating channels; expected an even number from 2 to {head_width}"
        )
    own, attention_factor = _SCALINGS[kind](fields, numbers, width)
    return RopeSpec(base, width, kind, own, attention_factor)


class _Numbers:
    """The numbers of a rope object; a missing or absurd one is one CheckpointError line."""

    def __init__(self, fields: "Fields", key: str, given: Mapping[str, Any]) -> None:
        self.fields, self.key, self.given = fields, key, given

    def _fault(self, name: str, expected: str) -> CheckpointError:
        found = repr(self.given[name])[:80] if name in self.given else "no such key"
        return CheckpointError(
            f"{self.fields.where}: config.json: {self.key}.{name}: found {found}, expected {expected}"
        )

    def optional(self, name: str) -> float | None:
        """A number above 0, or None where the file has none."""
        return None if self.given.get(name) is None else self.required(name)

    def required(self, name: str) -> float:
        """A number above 0."""
        bounds = BASES if name == "rope_theta" else ROPE_NUMBERS
        if not is_within(self.given.get(name), bounds):
            raise self._fault(name, f"a number {show_bounds(bounds)}")
        return float(self.given[name])

    def factors(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` numbers above 0."""
        values = self.given.get(name)
        numbers = values if isinstance(values, list) else []
        if len(numbers) != length or not all(is_within(number, ROPE_NUMBERS) for number in numbers):
            raise self._fault(name, f"a list of {length} numbers {show_bounds(ROPE_NUMBERS)}")
        return tuple(map(float, numbers))

    def original_positions(self) -> float:
        """Positions the model was first trained on, before its context was stretched."""
        name = POSITIONS
        outer = self.fields.optional_integer(name)
        own = self.optional(name)
        positions = float(outer or own or self.fields.integer("max_position_embeddings"))
        if positions < 2:  # its logarithm divides
            raise (self.fields.fault if outer else self._fault)(name, "2 positions or more")
        return positions


def _default(fields: "Fields", numbers: _Numbers, width: int) -> tuple[dict[str, Any], float]:
    return {}, 1.0


def _linear(fields: "Fields", numbers: _Numbers, width: int) -> tuple[dict[str, Any], float]:
    return {"factor": numbers.required("factor")}, 1.0


def _llama3(fields: "Fields", numbers: _Numbers, width: int) -> tuple[dict[str, Any], float]:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    return {name: numbers.required(name) for name in names} | {"original_positions": numbers.original_positions()}, 1.0


def _yarn(fields: "Fields", numbers: _Numbers, width: int) -> tuple[dict[str, Any], float]:
    """YaRN (arXiv 2309.00071): the attention factor is 0.1 ln(factor) + 1 unless the file gives one."""
    factor, attention_factor = numbers.required("factor"), numbers.optional("attention_factor")
    mscale, mscale_all = numbers.optional("mscale"), numbers.optional("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all:
        attention_factor = _magnitude(factor, mscale) / _magnitude(factor, mscale_all)
    own = {
        "factor": factor,
        "beta_fast": numbers.optional("beta_fast") or 32.0,
        "beta_slow": numbers.optional("beta_slow") or 1.0,
        "original_positions": numbers.original_positions(),
        "whole_channels": numbers.given.get("truncate", True) is not False,
    }
    return own, attention_factor or _magnitude(factor, 1.0)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(fields: "Fields", numbers: _Numbers, width: int) -> tuple[dict[str, Any], float]:
    """LongRoPE (arXiv 2402.13753): one factor per pair of channels, another set for rows beyond the first context."""
    original = numbers.original_positions()
    factor = numbers.optional("factor") or fields.integer("max_position_embeddings") / original
    attention_factor = numbers.optional("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    own = {
        "short_factor": numbers.factors("short_factor", width // 2),
        "long_factor": numbers.factors("long_factor", width // 2),
        "original_positions": original,
    }
    return own, attention_factor


_SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
