"""What llama.cpp is to know of a model: its architecture and numbers; and what it does not compute. No torch.

A spec is checked against what llama.cpp computes for the family, so that a file which would load and give other
answers is refused, or has its difference said.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from recipe_lib.errors import CheckpointError
from recipe_lib.models.external_spec import ExternalSpec
from recipe_lib.models.spec import DecoderSpec, FileCodes, ModelSpec, RopeSpec

# Our family -> llama.cpp's name of the architecture.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
}
_PATTERNS = {"gemma2": 2, "gemma3": 6}  # every so many layers, one without a window
_YARN_BETAS = (32.0, 1.0)  # others are read from the file for other architectures only
_WIDE_SCALE = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, whose scores are scaled by the width over the heads


@dataclass(frozen=True)
class Architecture:
    """name: llama.cpp's. numbers: metadata by their keys without the architecture's name. notes: what it does not
    compute as the model was trained, a line each."""

    name: str
    numbers: dict[str, Any]
    notes: tuple[str, ...] = ()
    factors: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def permuted(self) -> bool:
        """Whether query and key rows have the order of its rotary embedding, in which pairs are neighbors."""
        return self.name == "llama"


def architecture_of(spec: ModelSpec, where: str) -> Architecture:
    """The architecture of a model. CheckpointError: llama.cpp has none for it, or would compute something else."""
    if isinstance(spec, ExternalSpec) or spec.family not in ARCHITECTURES or spec.mixture is not None:
        family = spec.family
        raise CheckpointError(
            f"{where}: model_type {family!r} is not written as GGUF; expected one of {', '.join(ARCHITECTURES)}; "
            "export it with --hf or --merge, and use llama.cpp's own convert_hf_to_gguf.py"
        )
    fault = _fault(spec)
    if fault:
        raise CheckpointError(f"{where}: {fault}, which llama.cpp does not compute; serve the Hugging Face folder")
    rope, factors = _rope_numbers(spec, spec.rope)
    numbers: dict[str, Any] = {
        "context_length": spec.max_positions,
        "embedding_length": spec.width,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.mlp_width,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_width,
        "attention.value_length": spec.head_width,
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        "vocab_size": spec.vocab_size,
        **rope,
    }
    if spec.family == "gemma2":
        numbers |= {"attn_logit_softcapping": spec.attention_softcap, "final_logit_softcapping": spec.logit_softcap}
    elif spec.logit_softcap is not None:
        numbers["final_logit_softcapping"] = spec.logit_softcap
    window = next((one for one in spec.windows if one is not None), None)
    if spec.family in _PATTERNS and window is not None:
        numbers["attention.sliding_window"] = window
    elif spec.family == "phi3":
        numbers["attention.sliding_window"] = window or 0  # llama.cpp tells Phi 4 from Phi 3 by it
    if spec.local_rope is not None:
        numbers["rope.freq_base_swa"] = float(spec.local_rope.base)
    too_large = [f"{name} {value}" for name, value in numbers.items() if isinstance(value, int) and value >= 2**32]
    if too_large:
        raise CheckpointError(f"{where}: found {too_large[0]}, expected below 2^32, as a GGUF file has 32 bits for it")
    return Architecture(ARCHITECTURES[spec.family], numbers, _notes(spec, window), factors)


def _fault(spec: DecoderSpec) -> str | None:
    """What of the model llama.cpp has no word for, as `found ...`."""
    if spec.codes != FileCodes():
        return "found weights that are quantized in its files"
    if spec.family in ("gemma", "gemma2", "gemma3") and spec.qkv_bias:
        return "found attention_bias"
    if spec.family != "llama" and (spec.output_bias or spec.mlp_bias):
        return "found attention_bias or mlp_bias in its output projections"
    if spec.family == "phi3" and spec.num_heads * spec.head_width != spec.width:
        return "found heads that are not as wide together as the model"
    if spec.family == "gemma3" and spec.attention_softcap is not None:
        return "found attn_logit_softcapping"
    if spec.family == "gemma2" and (spec.attention_softcap is None or spec.logit_softcap is None):
        return "found no attn_logit_softcapping or final_logit_softcapping"
    if spec.family not in ("gemma2", "gemma3") and spec.logit_softcap is not None:
        return "found final_logit_softcapping"
    pattern = _PATTERNS.get(spec.family)
    if pattern is not None:
        expected = tuple((layer + 1) % pattern != 0 for layer in range(spec.num_layers))
        if any(spec.windows) and tuple(window is not None for window in spec.windows) != expected:
            return f"found windows in other layers than all but every {pattern}."
    scale = spec.head_width**-0.5
    if _WIDE_SCALE.get(spec.family) == spec.num_layers:
        scale = (spec.width // spec.num_heads) ** -0.5
    if abs(spec.attention_scale / scale - 1) > 1e-4:
        found, expected_scalar = spec.attention_scale**-2, scale**-2
        return f"found query_pre_attn_scalar {found:g}, expected {expected_scalar:g}"
    return _rope_fault(spec)


def _rope_fault(spec: DecoderSpec) -> str | None:
    rope, local = spec.rope, spec.local_rope
    if spec.family != "phi3" and rope.width != spec.head_width:
        return f"found {rope.width} rotating channels of {spec.head_width}"
    if local is not None and local.kind != "default":
        return f"found a rotary embedding of type {local.kind} in layers with a window"
    if rope.kind == "longrope" and spec.family != "phi3":
        return "found a rotary embedding of type longrope"
    if rope.kind == "llama3" and spec.family != "llama":
        return "found a rotary embedding of type llama3"
    if rope.kind == "yarn" and not rope.numbers["whole_channels"]:
        return "found a rotary embedding of type yarn with truncate=false"
    if rope.kind == "yarn" and (rope.numbers["beta_fast"], rope.numbers["beta_slow"]) != _YARN_BETAS:
        return "found a rotary embedding of type yarn with other beta_fast and beta_slow than {:g} and {:g}".format(
            *_YARN_BETAS
        )
    return None


def _rope_numbers(spec: DecoderSpec, rope: RopeSpec) -> tuple[dict[str, Any], dict[str, tuple[float, ...]]]:
    """The metadata of the rotary embedding, and the tables of factors that are tensors of the file."""
    numbers: dict[str, Any] = {"rope.dimension_count": rope.width, "rope.freq_base": float(rope.base)}
    given = rope.numbers
    if rope.kind == "linear":
        numbers |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(given["factor"])}
    elif rope.kind == "yarn":
        numbers |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(given["factor"]),
            "rope.scaling.original_context_length": int(given["original_positions"]),
            # llama.cpp multiplies YaRN's usual one with it
            "rope.scaling.attn_factor": rope.attention_factor / _usual_magnitude(float(given["factor"])),
        }
    elif rope.kind == "llama3":
        return numbers, {"rope_freqs.weight": _llama3_factors(rope)}
    elif rope.kind == "longrope":
        numbers |= {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": int(given["original_positions"]),
            "rope.scaling.attn_factor": rope.attention_factor,
        }
        names = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
        return numbers, {name: tuple(given[key]) for name, key in names.items()}
    if spec.family == "phi3" and rope.kind == "default":
        numbers["rope.scaling.original_context_length"] = spec.max_positions
    return numbers, {}


def _usual_magnitude(factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _llama3_factors(rope: RopeSpec) -> tuple[float, ...]:
    """What each pair's frequency is divided by: nothing for short waves, the factor for long ones, between them a
    mean (https://arxiv.org/abs/2407.21783)."""
    given, factors = rope.numbers, []
    factor, original = given["factor"], given["original_positions"]
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    for pair in range(rope.width // 2):
        turns = original * rope.base ** (-2 * pair / rope.width) / (2 * math.pi)  # in the first context
        share = min(1.0, max(0.0, (turns - low) / (high - low))) if high > low else float(turns >= high)
        factors.append(1 / ((1 - share) / factor + share))
    return tuple(factors)


def _notes(spec: DecoderSpec, window: int | None) -> tuple[str, ...]:
    if spec.rope.kind == "longrope":
        first = int(spec.rope.numbers["original_positions"])
        return (
            f"llama.cpp takes the rotary embedding's long factors by the size of its context, not by the length of a "
            f"text: up to {first} tokens, -c {first} gives the model's answers",
        )
    if spec.family in _PATTERNS or window is None or window >= spec.max_positions:
        return ()
    return (
        f"llama.cpp has no sliding window for {spec.family}: beyond {window} tokens of context it sees more than the "
        f"model was trained with; a context of {window} (-c {window}) gives the same answers",
    )
