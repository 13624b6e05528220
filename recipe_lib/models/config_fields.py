"""Read the keys of a `config.json`, and check each value.

`recipe_lib.models.families` builds a model's spec, its shape as plain numbers, with these readers.
`Fields` reads numbers and flags, `read_rope` rotary embeddings, `read_codes` the forms of quantized
weights. `check_sizes` refuses sizes that no machine can hold.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recipe_lib.errors import CheckpointError, raise_faults
from recipe_lib.models.spec import FileCodes, RopeSpec

# Key -> value, for keys that files of many families leave out.
COMMON: dict[str, Any] = {
    "num_key_value_heads": None,  # as many as heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "sliding_window": None,
    "layer_types": None,
}
# The values of `layer_types`, and keys of `rope_parameters` where it has an object for each.
LAYER_KINDS = ("full_attention", "sliding_attention")
# Activation in files -> our name of it.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, eq=False)
class Fields:
    """One config.json, or an object in it, whose readers raise CheckpointError, in one line.

    Readers take the name of a key, and raise if it is missing or its value is not as they say.
    """

    config: Mapping[str, Any]
    where: str  # the file or preset, named in errors
    # Put before a key's name in errors: `rope_scaling.` for that object of the file.
    inside: str = ""
    # Least and largest of the numbers that are read: fp32 holds them and their squares.
    bounds: tuple[float, float] = (1e-30, 1e30)

    def make_fault(self, key: str, expected: str) -> CheckpointError:
        found = repr(self.config[key])[:80] if key in self.config else "no such key"
        return CheckpointError(
            f"{self.where}: config.json: {self.inside}{key}: found {found}, expected {expected}"
        )

    def read_integer(self, key: str) -> int:
        """Return a positive integer."""
        value = self.config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.make_fault(key, "a positive integer")
        return value

    def read_number(self, key: str, bounds: tuple[float, float] | None = None) -> float:
        """Return a number above 0 within bounds; bounds None: `self.bounds`."""
        bounds = bounds or self.bounds
        if not is_within(self.config.get(key), bounds):
            raise self.make_fault(key, f"a number {format_bounds(bounds)}")
        return float(self.config[key])

    def read_numbers(self, key: str, length: int) -> tuple[float, ...]:
        """Return a list of `length` numbers within `self.bounds`."""
        values = self.config.get(key)
        if (
            not isinstance(values, list)
            or len(values) != length
            or not all(is_within(value, self.bounds) for value in values)
        ):
            raise self.make_fault(key, f"a list of {length} numbers {format_bounds(self.bounds)}")
        return tuple(map(float, values))

    def read_flag(self, key: str) -> bool:
        value = self.config.get(key)
        if not isinstance(value, bool):
            raise self.make_fault(key, "true or false")
        return value

    def read_optional_integer(self, key: str) -> int | None:
        """Return a positive integer; None if the key is null or missing."""
        return None if self.config.get(key) is None else self.read_integer(key)

    def read_optional_number(
        self, key: str, bounds: tuple[float, float] | None = None
    ) -> float | None:
        """Return a number as `read_number` does; None if the key is null or missing."""
        return None if self.config.get(key) is None else self.read_number(key, bounds)


def read_activation(fields: Fields, key: str) -> str:
    """Return our name of the activation under a key.

    Raises CheckpointError for one that is not in `_ACTIVATIONS`.
    """
    name = fields.config.get(key)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise fields.make_fault(key, "one of " + ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def read_layer_windows(
    fields: Fields, layers: int, sliding_by_default: list[bool]
) -> tuple[int | None, ...]:
    """Return the attention window of each layer, in tokens; None: a layer attends to all tokens.

    layers: their number. sliding_by_default: True for each layer that has a window where the file
    has no `layer_types`. Raises CheckpointError for `layer_types` that do not fit, and for layers
    with a window if the file does not say its size.
    """
    window = fields.read_optional_integer("sliding_window")
    types = fields.config["layer_types"]
    is_complete = isinstance(types, list) and len(types) == layers
    if types is None:
        sliding = sliding_by_default
    elif is_complete and all(kind in LAYER_KINDS for kind in types):
        sliding = [kind == "sliding_attention" for kind in types]
    else:
        raise fields.make_fault(
            "layer_types", f"{layers} times sliding_attention or full_attention"
        )
    if window is None and any(sliding):
        raise fields.make_fault(
            "sliding_window", "a positive integer, because some layers are sliding_attention"
        )
    return tuple(window if slides else None for slides in sliding)


# `fn(fields, common)` returns the value of one field of `DecoderSpec`. common: field -> value, of
# the fields that all families read alike.
Read = Callable[[Fields, dict[str, Any]], Any]


@dataclass(frozen=True)
class Family:
    """One family of decoders: how its config.json is read."""

    # Field of `DecoderSpec` -> a value or a `Read`, for fields that not all families read alike.
    shape: Mapping[str, Any]
    # The classes in `architectures` that are its causal decoder; exports name the first.
    architectures: tuple[str, ...]
    # Key -> value, for keys that its files leave out.
    defaults: dict[str, Any]
    # Values of `model_type` besides the family's name.
    model_types: tuple[str, ...] = ()


# The rotary embedding of a `config.json`: `rope_theta` and `rope_scaling`, or the newer
# `rope_parameters`.


# Family -> the rotary embedding that its class in transformers has where the file has none.
_WITHOUT_ANY: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
NEWER = "rope_parameters"  # the key of config.json since transformers 5
OLDER = "rope_scaling"  # the key of earlier files, next to `rope_theta`
# Key of the length of the context, in tokens, that a model was trained on before it was stretched.
POSITIONS = "original_max_position_embeddings"
_STRETCHED = ("llama3", "yarn", "longrope")  # types that need POSITIONS

ROPE_NUMBERS = (1e-9, 1e9)  # bounds of the factors and lengths of a rotary embedding
BASES = (1e-9, 1e12)  # bounds of `rope_theta`


def is_within(value: Any, bounds: tuple[float, float]) -> bool:
    """Return True if a value of JSON is a number within bounds; true and false are none."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and bounds[0] <= value <= bounds[1]
    )


def format_bounds(bounds: tuple[float, float]) -> str:
    """Return `from 1e-09 to 1e+09`, for an error."""
    return f"from {bounds[0]:g} to {bounds[1]:g}"


def read_rope(fields: Fields, family: str, head_width: int) -> tuple[RopeSpec, RopeSpec | None]:
    """Return the rotary embedding of a model, and a second one for layers with a window.

    The second is None for families that have one embedding. head_width: channels of a head. Raises
    CheckpointError for an embedding that is not supported or makes no sense.
    """
    key = _find_spelling(fields)
    ropes = _read_ropes(fields, family=family, key=key, head_width=head_width)
    # A file with both spellings: transformers takes the older one, with the base of `rope_theta`.
    # Where the two differ, nobody can tell which model was meant.
    has_both = key == NEWER and fields.config.get(OLDER)
    if has_both and _read_ropes(fields, family=family, key=OLDER, head_width=head_width) != ropes:
        raise fields.make_fault(OLDER, f"what {NEWER} says as well; take one of the two out")
    return ropes


def complete_ropes(fields: Fields, family: str) -> dict[str, Any]:
    """Return a complete `rope_parameters`, for the config.json of an export.

    It also has the values that the model's config.json has under other keys.
    """
    ropes = []
    for base, given in _find_ropes(fields, family, _find_spelling(fields)).items():
        rope = {
            "rope_theta": fields.read_number(base),
            **given,
            "rope_type": _find_kind(fields, given),
        }
        rope.pop("type", None)
        fraction = fields.config.get("partial_rotary_factor")
        if fraction is not None:
            rope.setdefault("partial_rotary_factor", fraction)
        positions = fields.config.get(POSITIONS)
        if positions is not None and rope["rope_type"] in _STRETCHED:
            rope[POSITIONS] = positions
        ropes.append(rope)
    return ropes[0] if len(ropes) == 1 else dict(zip(LAYER_KINDS, ropes, strict=True))


def _find_spelling(fields: Fields) -> str:
    """Return the key that is read: the newer one if config.json has it, else the older one."""
    return OLDER if fields.config.get(NEWER) is None else NEWER


def _read_ropes(
    fields: Fields, family: str, key: str, head_width: int
) -> tuple[RopeSpec, RopeSpec | None]:
    """Return what `read_rope` does, from the object under `key`, NEWER or OLDER."""
    ropes = [
        _read_rope_object(
            fields, key=key, given=given, base=fields.read_number(base), head_width=head_width
        )
        for base, given in _find_ropes(fields, family, key).items()
    ]
    return ropes[0], ropes[1] if len(ropes) > 1 else None


def _find_ropes(fields: Fields, family: str, key: str) -> dict[str, Mapping[str, Any]]:
    """Return key of the base -> object, of a model's one or two rotary embeddings.

    key: NEWER or OLDER.
    """
    given = fields.config.get(key)
    if not isinstance(given, Mapping | None):
        raise fields.make_fault(key, "an object, or null")
    given = (_WITHOUT_ANY.get(family) if given is None else given) or {}
    if family != "gemma3":
        return {"rope_theta": given}
    if given.keys().isdisjoint(LAYER_KINDS):
        return {"rope_theta": given, "rope_local_base_freq": {}}
    for kind in LAYER_KINDS:
        if not isinstance(given.get(kind), Mapping | None):
            raise Fields(given, where=fields.where, inside=f"{key}.").make_fault(
                kind, "an object, or null"
            )
    full, sliding = (given.get(kind) or {} for kind in LAYER_KINDS)
    return {"rope_theta": full, "rope_local_base_freq": sliding}


def _find_kind(fields: Fields, given: Mapping[str, Any]) -> Any:
    """Return the type of a rotary embedding, an older name replaced by its present one."""
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "su" or (kind == "yarn" and fields.config.get("model_type") == "phi3"):
        return "longrope"  # Phi 3's first files have it under these names
    return kind


def _read_rope_object(
    fields: Fields, key: str, given: Mapping[str, Any], base: float, head_width: int
) -> RopeSpec:
    """Read one rotary embedding from its object `given`, which config.json has under `key`.

    base: taken if the object has no `rope_theta` of its own.
    """
    kind = _find_kind(fields, given)
    if kind not in ROPE_TYPES:
        raise CheckpointError(
            f"{fields.where}: config.json: {key}: type {kind!r} is not supported; expected one of "
            f"{', '.join(ROPE_TYPES)}"
        )
    numbers = Fields(given, where=fields.where, inside=f"{key}.", bounds=ROPE_NUMBERS)
    base = numbers.read_optional_number("rope_theta", BASES) or base
    key = "partial_rotary_factor"
    fraction = numbers.read_optional_number(key) or fields.read_optional_number(key) or 1.0
    # Other classes of transformers do not read this key.
    if fraction != 1 and fields.config.get("model_type") != "phi3":
        raise CheckpointError(
            f"{fields.where}: config.json: partial_rotary_factor: found {fraction:g}, expected 1 or"
            " no such key: models of this model_type rotate all channels"
        )
    width = int(head_width * fraction)
    if width % 2 or not 2 <= width <= head_width:
        raise CheckpointError(
            f"{fields.where}: config.json: head width {head_width} with partial_rotary_factor"
            f" {fraction:g} gives {width} rotating channels; expected an even number from 2 to"
            f" {head_width}"
        )
    parameters, attention_factor = _SCALINGS[kind](fields, numbers, width)
    return RopeSpec(
        base=base,
        width=width,
        kind=kind,
        numbers=parameters,
        attention_factor=attention_factor,
    )


def _read_original_positions(fields: Fields, numbers: Fields) -> float:
    """Return the length of the context that the model was trained on before it was stretched."""
    outer = fields.read_optional_integer(POSITIONS)  # Phi 3's files have it beside the object
    inner = numbers.read_optional_number(POSITIONS)
    positions = float(outer or inner or fields.read_integer("max_position_embeddings"))
    if positions < 2:  # its logarithm divides
        raise (fields if outer else numbers).make_fault(POSITIONS, "2 positions or more")
    return positions


# Readers of one type each, see `_SCALINGS`.


def _read_llama3(fields: Fields, numbers: Fields, width: int) -> tuple[dict[str, Any], float]:
    parameters = {
        name: numbers.read_number(name)
        for name in ("factor", "low_freq_factor", "high_freq_factor")
    }
    parameters["original_positions"] = _read_original_positions(fields, numbers)
    return parameters, 1.0


def _read_yarn(fields: Fields, numbers: Fields, width: int) -> tuple[dict[str, Any], float]:
    factor = numbers.read_number("factor")
    attention_factor = numbers.read_optional_number("attention_factor")
    mscale = numbers.read_optional_number("mscale")
    mscale_all = numbers.read_optional_number("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all:
        attention_factor = _compute_magnitude(factor, mscale) / _compute_magnitude(
            factor, mscale_all
        )
    parameters = {
        "factor": factor,
        "beta_fast": numbers.read_optional_number("beta_fast") or 32.0,
        "beta_slow": numbers.read_optional_number("beta_slow") or 1.0,
        "original_positions": _read_original_positions(fields, numbers),
        "whole_channels": numbers.config.get("truncate", True) is not False,
    }
    # arXiv 2309.00071: 0.1 ln(factor) + 1, if the file has neither it nor both mscales.
    return parameters, attention_factor or _compute_magnitude(factor, 1.0)


def _compute_magnitude(factor: float, weight: float) -> float:
    """Return YaRN's attention factor for a context that is stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _read_longrope(fields: Fields, numbers: Fields, width: int) -> tuple[dict[str, Any], float]:
    """Read LongRoPE (arXiv 2402.13753): a factor for each pair of channels.

    `short_factor` is for sequences within the original context, `long_factor` for longer ones.
    """
    original = _read_original_positions(fields, numbers)
    factor = numbers.read_optional_number("factor")
    factor = factor or fields.read_integer("max_position_embeddings") / original
    attention_factor = numbers.read_optional_number("attention_factor")
    if attention_factor is None and factor > 1:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    parameters = {
        "short_factor": numbers.read_numbers("short_factor", width // 2),
        "long_factor": numbers.read_numbers("long_factor", width // 2),
        "original_positions": original,
    }
    return parameters, 1.0 if attention_factor is None else attention_factor


# Type -> its reader, `fn(fields, numbers, width)`. fields: the config.json. numbers: the object of
# the embedding in it. width: rotating channels. It returns (keyword arguments of the type's
# function in `recipe_lib.ops.rope`, the factor of cosines and sines).
_SCALINGS: dict[str, Callable[[Fields, Fields, int], tuple[dict[str, Any], float]]] = {
    "default": lambda fields, numbers, width: ({}, 1.0),
    "linear": lambda fields, numbers, width: ({"factor": numbers.read_number("factor")}, 1.0),
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
}


# The largest sizes that a `config.json` may have: far above any model, far below those that hang a
# machine.
#
# A width of 10^18 overflows torch's storage, 10^9 layers fill the host's memory before anything is
# computed; both are typing errors or a hostile file. The bounds hold for our own decoder and for
# models of transformers alike.


MAX_WIDTH = 2**20  # channels
MAX_POSITIONS = 2**40  # tokens
MAX_LAYERS = 4096
# Largest value -> the keys that it bounds, separated by spaces.
_SIZES = {
    MAX_WIDTH: (
        "hidden_size n_embd d_model dim hidden_dim head_dim kv_lora_rank q_lora_rank embedding_size"
        " word_embed_proj_dim"
    ),
    2**24: (
        "intermediate_size ffn_dim n_inner d_ff moe_intermediate_size"
        " shared_expert_intermediate_size"
    ),
    2**16: (
        "num_attention_heads num_key_value_heads n_head n_heads num_heads "
        "num_experts num_local_experts n_routed_experts n_shared_experts num_experts_per_tok"
    ),
    MAX_POSITIONS: (
        "max_position_embeddings original_max_position_embeddings sliding_window max_window_layers"
    ),
    2**27: "n_positions n_ctx vocab_size type_vocab_size",  # an embedding has a row for each
    MAX_LAYERS: "num_hidden_layers n_layer n_layers num_layers",
}
# Key of config.json -> the most it may say.
MAX_SIZES: dict[str, int] = {key: most for most, keys in _SIZES.items() for key in keys.split()}


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Check that no size is too large for a machine, also those of a multimodal file's parts.

    where: the file or preset, named in errors. Raises CheckpointError, one line a key. All other
    checks are those of the family's readers.
    """
    raise_faults(CheckpointError, _find_size_faults(config, where, ""))


def _find_size_faults(config: Mapping[str, Any], where: str, prefix: str) -> Iterator[str]:
    """Yield an error line for each size that is too large.

    prefix: put before keys; `text_config.` for that part of a file, empty for the file itself.
    """
    for key, most in MAX_SIZES.items():
        value = config.get(key)
        if isinstance(value, (int, float)) and value > most:
            yield (
                f"{where}: config.json: {prefix}{key}: found {str(value)[:40]}, expected at most"
                f" {most}"
            )
    if prefix:
        return  # a part has no parts
    for part in ("text_config", "vision_config", "audio_config"):
        inner = config.get(part)
        if isinstance(inner, Mapping):
            yield from _find_size_faults(inner, where, f"{part}.")


# Quantized weights, by `config.json`: two forms are read (FP8 in blocks; MXFP4 of gpt-oss), and all
# others are refused.


# Keys of a config.json that say so: transformers' own, then those of other programs.
_KEYS = ("quantization_config", "compression_config", "quantization")
# Parts of error lines: the weights that are read in any model, and what to do.
_PLAIN = "fp32, bf16 or fp16 weights"
_REMEDY = "download the checkpoint that this one was made from"


def read_codes(config: Mapping[str, Any], where: str) -> FileCodes:
    """Read how the weights of the files are quantized; the default FileCodes: they are not.

    where: the file or preset, named in errors. Raises CheckpointError, with the key and the method,
    for a form that is not read.
    """
    codes = FileCodes()
    for key in filter(config.get, _KEYS):
        section: Any = config[key]
        names_method = key == _KEYS[0] and isinstance(section, Mapping)
        method = section.get("quant_method") if names_method else None
        if method == "fp8":
            codes = FileCodes(fp8_block=_read_fp8_block(section, where))
        elif method == "mxfp4" and config.get("model_type") == "gpt_oss":
            codes = FileCodes(mxfp4=True)
        elif method == "mxfp4":
            raise CheckpointError(
                f"{where}: config.json: {key}: the weights are quantized (mxfp4), which is read of"
                f" model_type gpt_oss alone; found {str(config.get('model_type'))[:80]}, expected"
                f" {_PLAIN}; {_REMEDY}"
            )
        else:
            raise _make_refusal(
                key,
                section=section,
                where=where,
                expected=f"{_PLAIN}, or fp8 with weight_block_size",
            )
    return codes


def refuse_quantized(config: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for weights that are quantized in any form.

    For models of other libraries, whose weights are read as the files have them. where: the file or
    preset, named in errors.
    """
    for key in filter(config.get, _KEYS):
        section = config[key]
        method = section.get("quant_method") if isinstance(section, Mapping) else None
        is_native = method in ("fp8", "mxfp4")
        remedy = f"{_PLAIN}, or model.implementation=native" if is_native else _PLAIN
        raise _make_refusal(key, section=section, where=where, expected=remedy)


def _make_refusal(key: str, section: Any, where: str, expected: str) -> CheckpointError:
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    if method is None:
        method = "MLX" if key == "quantization" else "unknown method"
    return CheckpointError(
        f"{where}: config.json: {key}: the weights are quantized ({str(method)[:80]}); expected"
        f" {expected}; {_REMEDY}"
    )


def _read_fp8_block(section: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Return (rows, columns) of the blocks that share a scale.

    section: of `quant_method` fp8. Raises CheckpointError for a form that is not read.
    """
    block = section.get("weight_block_size")
    sizes = block if isinstance(block, list) else []
    is_pair = len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)
    is_dynamic = str(section.get("activation_scheme", "dynamic")).lower() == "dynamic"
    # Key -> (True if its value is one that is read, the expected value for the error).
    expected = {
        "weight_block_size": (
            is_pair,
            "two positive integers (scales of whole rows or tensors are not read)",
        ),
        "activation_scheme": (is_dynamic, "dynamic (scales of activations are not read)"),
        "fmt": (section.get("fmt") in (None, "e4m3"), "e4m3"),
        "scale_fmt": (section.get("scale_fmt") in (None, "float", "ue8m0"), "float or ue8m0"),
        "expert_dtype": (section.get("expert_dtype") in (None, "fp8"), "fp8"),
        "modules_to_convert": (
            not section.get("modules_to_convert"),
            "none (embeddings in fp8 are not read)",
        ),
    }
    for key, (is_right, remedy) in expected.items():
        if not is_right:
            value = str(section[key])[:80] if key in section else "none"
            raise CheckpointError(
                f"{where}: config.json: quantization_config.{key}: found {value}"
                f" (quant_method fp8), expected {remedy}; {_REMEDY}"
            )
    return sizes[0], sizes[1]
