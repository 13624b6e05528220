"""The shape of a decoder as plain numbers, and where it comes from: a `config.json` or a preset. No torch here."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.models.external_spec import ExternalSpec
from recipe_lib.reading import read_json
from recipe_lib.units import name_first

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PRESETS = Path(__file__).parent / "presets"
MAX_BYTES = 2**26  # of a config.json
SCORE = "score.weight"  # of a score head, in files too


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: how fast each pair of a head's channels turns with the position.

    base: the longest wavelength is about 2 pi base. width: channels of a head that turn (all, or a fraction).
    kind: `default`, `linear`, `llama3`, `yarn` or `longrope`; `numbers` are that kind's own parameters.
    attention_factor: what cosines and sines are multiplied by (yarn, longrope).
    """

    base: float
    width: int
    kind: str = "default"
    numbers: Mapping[str, Any] = field(default_factory=dict, hash=False)
    attention_factor: float = 1.0


@dataclass(frozen=True)
class MixtureSpec:
    """A mixture of experts in place of a layer's MLP."""

    num_experts: int
    top_k: int  # experts that compute a token
    mlp_width: int  # of one expert
    layers: tuple[bool, ...]  # per layer: whether it has experts; others have an MLP
    normalized: bool  # the scores of a token's experts add up to 1
    router_bias: bool
    expert_bias: bool
    activation: str  # as of a decoder, or `clamped_swiglu` (gpt-oss)
    interleaved: bool  # gate and up take turns among an expert's inner channels (gpt-oss)
    alpha: float  # of clamped_swiglu: what the gate is multiplied by in its sigmoid
    limit: float  # of clamped_swiglu: the most that gate and up are


@dataclass(frozen=True)
class FileCodes:
    """How a checkpoint's files have weights that are quantized already; by default they have none."""

    fp8_block: tuple[int, int] | None = None  # rows and columns of a scale, where linears are in FP8
    mxfp4: bool = False  # experts are in MXFP4


@dataclass(frozen=True)
class DecoderSpec:
    """Every number that the decoder of any family needs; widths are in channels."""

    family: str  # model_type of config.json, without the `_text` of multimodal ones
    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    max_positions: int  # rows the model was made for; longer ones run, but were never trained on
    norm_eps: float
    rope: RopeSpec
    local_rope: RopeSpec | None  # of layers with a window, where it differs (Gemma 3)
    windows: tuple[int | None, ...]  # per layer: tokens it sees, its own included; None: all
    attention_scale: float  # scores are multiplied by it before the softmax
    attention_softcap: float | None  # scores are squashed into +- this (Gemma 2)
    logit_softcap: float | None  # logits likewise
    embedding_scale: float | None  # embeddings are multiplied by it (Gemma)
    activation: str  # `silu`, `gelu` or `gelu_tanh`
    norm_offset: bool  # norms multiply by 1 + weight (Gemma)
    post_norms: bool  # attention and MLP have a norm after them too (Gemma 2, 3)
    head_norms: bool  # queries and keys have a norm over each head (Qwen 3, Gemma 3)
    qkv_bias: bool
    output_bias: bool  # of attention's output projection
    mlp_bias: bool
    tied: bool  # the output projection is the embedding
    fused_file: bool  # the file holds qkv_proj and gate_up_proj (Phi 3)
    init_std: float  # standard deviation of random weights
    mixture: MixtureSpec | None = None
    width_norms: bool = False  # queries and keys have a norm over all heads together (OLMoE)
    qkv_clip: float | None = None  # queries, keys and values are clamped into +- this (OLMoE)
    sinks: bool = False  # each head has a score that takes part in the softmax and attends to nothing (gpt-oss)
    codes: FileCodes = FileCodes()
    num_labels: int | None = None  # rows of a score head, which then is in place of the output projection

    @property
    def head_rows(self) -> int:
        """Rows of the matrix that comes after the last norm."""
        return self.num_labels or self.vocab_size


ModelSpec = DecoderSpec | ExternalSpec


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a `config.json`, given its folder or itself. Raises CheckpointError when it cannot be read."""
    path = Path(path)
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        config = read_json(file, MAX_BYTES)
    except FileNotFoundError:
        raise CheckpointError(_no_config(file)) from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}); download the file again") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: not a readable JSON file ({error}); download the file again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: found a JSON {type(config).__name__}, expected an object with model_type")
    return config


def _no_config(file: Path) -> str:
    """Why there is no config.json: what the folder is instead of a model, if that is one of the usual mistakes."""
    folder = file.parent
    if (folder / "adapter_config.json").is_file():
        return (
            f"{folder}: is an adapter (it has adapter_config.json), not a model; set lora.adapter_path to it and "
            "model.path to the model that it was trained on"
        )
    found = None
    if file.name == "config.json" and not any((folder / name).is_file() for name in _WEIGHTS):
        found = other_weights(folder, "config.json")
    return found or f"{file}: no such file; expected a Hugging Face model folder with config.json"


def preset_names() -> list[str]:
    """Names of the shipped architectures, `family/size`, sorted."""
    return sorted(str(file.relative_to(PRESETS).with_suffix("").as_posix()) for file in PRESETS.glob("*/*.json"))


def preset_config(name: str) -> dict[str, Any]:
    """The `config.json` of a preset: a shipped name such as `llama3/8B`, or the path of a .json file or its folder."""
    if name in preset_names():
        return read_config(PRESETS / f"{name}.json")
    path = Path(name)
    if os.path.exists(path) and (not os.path.isdir(path) or os.path.isfile(path / "config.json")):
        return read_config(path)
    raise ConfigError(
        f"model.preset={name}: no such preset or file; expected a path to a config.json or one of "
        + ", ".join(preset_names())
    )


# Folders whose weights are not a Hugging Face model's: what they have, and what to do about it. No
# torch here.


# Patterns of file names, the most telling first, and what to do with a folder that has such files alone.
_FORMATS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("*.gguf",), "GGUF files cannot be trained: take the safetensors checkpoint that this one was made from"),
    (
        ("consolidated*.safetensors",),
        "consolidated files are Mistral's own format: download the model's Hugging Face files (config.json and "
        "model*.safetensors), or convert it with transformers' convert_mistral_weights_to_hf",
    ),
    (
        ("consolidated*.pth",),
        "consolidated files are Meta's own format, pickled, and are not read: download the model's Hugging Face files "
        "(config.json and model*.safetensors), or convert it with transformers' convert_llama_weights_to_hf",
    ),
    (
        ("*.bin", "*.pt", "*.pth"),
        "pickled weights can run code and are not read: download the safetensors files, or convert them",
    ),
    (
        ("model-*-of-*.safetensors",),
        "parts of a model are read by its model.safetensors.index.json: download the folder again",
    ),
    (
        ("*.safetensors",),
        "weights are read from model.safetensors, or from the files that model.safetensors.index.json names: rename "
        "it if it is the whole model, or download the folder again",
    ),
)
_STATES = ("*.bin", "*.pt", "*.pth")  # beside a model these are optimizer.pt, training_args.bin and such


def list_weight_files(folder: Path) -> list[str]:
    """Return the names of a folder's files with weights of any format; not those of a trainer's state."""
    patterns = [pattern for kinds, _ in _FORMATS for pattern in kinds if pattern not in _STATES]
    return sorted({path.name for pattern in (*patterns, "pytorch_model*.bin") for path in folder.glob(pattern)})


def other_weights(folder: Path, missing: str) -> str | None:
    """One line for a folder without the file `missing` that has weights of another kind; None: it has none at all."""
    for patterns, remedy in _FORMATS:
        found = sorted(path.name for pattern in patterns for path in folder.glob(pattern) if path.is_file())
        if found:
            return f"{folder}: has {name_first(found)} but no {missing}; {remedy}"
    return None
