"""Write a Hugging Face model, or a LoRA adapter in PEFT's layout, as a GGUF file for llama.cpp.

`tune export --gguf` calls `write_gguf_model` and `write_gguf_adapter`, which write a file, read it
back and compare. A spec holds a model's sizes and kinds as its config.json gives them.
`describe_architecture` checks it against what llama.cpp computes for the model's family: a file
that would load and give other answers is refused, or the difference is noted for the user.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from recipe_lib.adapters.peft_names import (
    EMBEDDING_A,
    EMBEDDING_B,
    HEAD,
    LORA_A,
    LORA_B,
    FileModule,
)
from recipe_lib.checkpoint.adapter_base_weights import SavedWeights
from recipe_lib.checkpoint.adapter_files import (
    AdapterFile,
    check_base,
    check_fits,
    find_usual_scaling,
    read_adapter,
)
from recipe_lib.checkpoint.gguf.gguf_file import (
    GgufTensor,
    check_gguf,
    choose_types,
    import_gguf,
    write_gguf,
)
from recipe_lib.checkpoint.gguf.gguf_vocabulary import GgufVocabulary, read_vocabulary
from recipe_lib.checkpoint.safetensors_files import FileTensor
from recipe_lib.checkpoint.tensor_matching import check_weights, read_headers
from recipe_lib.errors import CheckpointError
from recipe_lib.models import read_config, read_trained_spec
from recipe_lib.models.spec import DecoderSpec, ExternalSpec, FileCodes, ModelSpec, RopeSpec
from recipe_lib.models.weight_names import build_weight_map

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
# Family -> period of its attention windows, in layers: the last layer of a period has no window.
_PATTERNS = {"gemma2": 2, "gemma3": 6}
# YaRN's (beta_fast, beta_slow). llama.cpp reads other values for other architectures only.
_YARN_BETAS = (32.0, 1.0)
# Family -> layers of its 27B model, the one whose attention scale is (width / heads)^-0.5.
_WIDE_SCALE = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True)
class Architecture:
    """A model's architecture, as llama.cpp is to know it."""

    # llama.cpp's name of the architecture.
    name: str
    # The file's metadata: key without the architecture's name before it -> value.
    metadata: dict[str, Any]
    # What llama.cpp does not compute as the model was trained, a line each.
    notes: tuple[str, ...] = ()
    # Name of a tensor of the file -> factors of the rotary embedding's frequencies, one for each
    # pair of channels.
    rope_tables: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def is_permuted(self) -> bool:
        """Return True if rows of query and key have channels that rotate together side by side."""
        return self.name == "llama"


def describe_architecture(spec: ModelSpec, where: str) -> Architecture:
    """Return what llama.cpp is to know of a model.

    where: the model's folder, named in errors. Raises CheckpointError if llama.cpp has no such
    architecture, or would compute something else.
    """
    if isinstance(spec, ExternalSpec) or spec.family not in ARCHITECTURES or spec.mixture:
        raise CheckpointError(
            f"{where}: model_type {spec.family!r} is not written as GGUF; expected one of"
            f" {', '.join(ARCHITECTURES)}; export it with --hf or --merge, and use llama.cpp's own"
            " convert_hf_to_gguf.py"
        )
    fault = _find_unsupported(spec)
    if fault:
        raise CheckpointError(
            f"{where}: {fault}, which llama.cpp does not compute; serve the Hugging Face folder"
        )
    rope_metadata, rope_tables = _make_rope_metadata(spec, spec.rope)
    metadata: dict[str, Any] = {
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
        **rope_metadata,
    }
    # The same in all layers that have one.
    window = next((window for window in spec.windows if window is not None), None)
    # llama.cpp tells Phi 4 from Phi 3 by a window of 0.
    windows = dict.fromkeys(_PATTERNS, window) | {"phi3": window or 0}
    local_rope = spec.local_rope
    optional = {
        "attn_logit_softcapping": spec.attention_softcap if spec.family == "gemma2" else None,
        "final_logit_softcapping": spec.logit_softcap,
        "attention.sliding_window": windows.get(spec.family),
        "rope.freq_base_swa": None if local_rope is None else float(local_rope.base),
    }
    metadata |= {key: value for key, value in optional.items() if value is not None}
    for key, value in metadata.items():
        if isinstance(value, int) and value >= 2**32:
            raise CheckpointError(
                f"{where}: found {key} {value}, expected below 2^32, as a GGUF file has 32 bits for"
                " it"
            )
    return Architecture(
        name=ARCHITECTURES[spec.family],
        metadata=metadata,
        notes=_list_notes(spec, window),
        rope_tables=rope_tables,
    )


def _find_unsupported(spec: DecoderSpec) -> str | None:
    """Return the first part of the model that llama.cpp does not compute, as `found ...`; or None.

    The text is the middle of an error line.
    """
    family = spec.family
    period = _PATTERNS.get(family, 1)
    # True for layers that have a window in llama.cpp.
    expected_windows = tuple((layer + 1) % period != 0 for layer in range(spec.num_layers))
    scale = spec.head_width**-0.5  # of attention scores, in llama.cpp
    if _WIDE_SCALE.get(family) == spec.num_layers:
        scale = (spec.width // spec.num_heads) ** -0.5
    has_softcaps = spec.attention_softcap is not None and spec.logit_softcap is not None
    # Text -> True if the model has it: llama.cpp has no key for it, or another fixed value.
    faults = {
        "found weights that are quantized in its files": spec.codes != FileCodes(),
        "found attention_bias": family in ("gemma", "gemma2", "gemma3") and spec.qkv_bias,
        "found attention_bias or mlp_bias in its output projections": (
            family != "llama" and (spec.output_bias or spec.mlp_bias)
        ),
        "found heads that are not as wide together as the model": (
            family == "phi3" and spec.num_heads * spec.head_width != spec.width
        ),
        "found attn_logit_softcapping": family == "gemma3" and spec.attention_softcap is not None,
        "found no attn_logit_softcapping or final_logit_softcapping": (
            family == "gemma2" and not has_softcaps
        ),
        "found final_logit_softcapping": (
            family not in ("gemma2", "gemma3") and spec.logit_softcap is not None
        ),
        f"found windows in other layers than all but every {period}.": (
            family in _PATTERNS
            and any(spec.windows)
            and tuple(window is not None for window in spec.windows) != expected_windows
        ),
        f"found query_pre_attn_scalar {spec.attention_scale**-2:g}, expected {scale**-2:g}": (
            abs(spec.attention_scale / scale - 1) > 1e-4
        ),
        **_list_rope_faults(spec),
    }
    return next((fault for fault, is_found in faults.items() if is_found), None)


def _list_rope_faults(spec: DecoderSpec) -> dict[str, bool]:
    """Return text -> True if the model has it, for each rotary embedding that llama.cpp lacks."""
    rope = spec.rope
    local = spec.local_rope
    is_yarn = rope.kind == "yarn"
    betas = (rope.numbers["beta_fast"], rope.numbers["beta_slow"]) if is_yarn else _YARN_BETAS
    return {
        f"found {rope.width} rotating channels of {spec.head_width}": (
            spec.family != "phi3" and rope.width != spec.head_width
        ),
        f"found a rotary embedding of type {local and local.kind} in layers with a window": (
            local is not None and local.kind != "default"
        ),
        "found a rotary embedding of type longrope": (
            rope.kind == "longrope" and spec.family != "phi3"
        ),
        "found a rotary embedding of type llama3": rope.kind == "llama3" and spec.family != "llama",
        "found a rotary embedding of type yarn with truncate=false": (
            is_yarn and not rope.numbers["whole_channels"]
        ),
        "found a rotary embedding of type yarn with other beta_fast and beta_slow than {:g} and"
        " {:g}".format(*_YARN_BETAS): (betas != _YARN_BETAS),
    }


def _make_rope_metadata(
    spec: DecoderSpec, rope: RopeSpec
) -> tuple[dict[str, Any], dict[str, tuple[float, ...]]]:
    """Return the metadata of the rotary embedding, and its tables of factors by tensor name.

    rope: of the spec, that of layers without a window.
    """
    metadata: dict[str, Any] = {
        "rope.dimension_count": rope.width,
        "rope.freq_base": float(rope.base),
    }
    settings = rope.numbers
    if rope.kind == "linear":
        metadata["rope.scaling.type"] = "linear"
        metadata["rope.scaling.factor"] = float(settings["factor"])
    elif rope.kind == "yarn":
        factor = float(settings["factor"])
        usual_magnitude = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
        metadata |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": factor,
            "rope.scaling.original_context_length": int(settings["original_positions"]),
            # llama.cpp multiplies YaRN's usual magnitude with it.
            "rope.scaling.attn_factor": rope.attention_factor / usual_magnitude,
        }
    elif rope.kind == "llama3":
        return metadata, {"rope_freqs.weight": _compute_llama3_factors(rope)}
    elif rope.kind == "longrope":
        metadata |= {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": int(settings["original_positions"]),
            "rope.scaling.attn_factor": rope.attention_factor,
        }
        return metadata, {
            "rope_factors_long.weight": tuple(settings["long_factor"]),
            "rope_factors_short.weight": tuple(settings["short_factor"]),
        }
    if spec.family == "phi3" and rope.kind == "default":
        metadata["rope.scaling.original_context_length"] = spec.max_positions
    return metadata, {}


def _compute_llama3_factors(rope: RopeSpec) -> tuple[float, ...]:
    """Return the divisor of each channel pair's frequency, `[rope width / 2]`.

    It is 1 for short waves, Llama 3's factor for long ones, a harmonic mean of the two between them
    (https://arxiv.org/abs/2407.21783).
    """
    settings = rope.numbers
    low = settings["low_freq_factor"]
    high = settings["high_freq_factor"]
    divisors = []
    for pair in range(rope.width // 2):
        # How often the pair turns within the context of pretraining.
        frequency = rope.base ** (-2 * pair / rope.width)
        turns = settings["original_positions"] * frequency / (2 * math.pi)
        share = float(turns >= high)  # of the frequency that stays
        if high > low:
            share = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - share) / settings["factor"] + share))
    return tuple(divisors)


# Return what llama.cpp computes otherwise than the model in use, a line each. window: keys that a
# token sees in layers with a window; None: no layer has one.
def _list_notes(spec: DecoderSpec, window: int | None) -> tuple[str, ...]:
    if spec.rope.kind == "longrope":
        num_positions = int(spec.rope.numbers["original_positions"])
        return (
            (
                "llama.cpp takes the rotary embedding's long factors by the size of its context,"
                f" not by the length of a text: up to {num_positions} tokens, -c {num_positions}"
                " gives the model's answers"
            ),
        )
    if spec.family in _PATTERNS or window is None or window >= spec.max_positions:
        return ()
    return (
        (
            f"llama.cpp has no sliding window for {spec.family}: beyond {window} tokens of context"
            f" it sees more than the model was trained with; a context of {window} (-c {window})"
            " gives the same answers"
        ),
    )


# Type of most tensors of a file -> the format's number for it (`general.file_type`).
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "q4_k_m": 15, "bf16": 32}
_BLOCKS_VERSION = 2  # of the formats of quantized blocks (`general.quantization_version`)
# Architectures with a model of 80 layers and shared value heads, whose tensors llama.cpp gives
# other types than those of smaller models.
_LARGE = {"llama", "qwen2"}


@dataclass(frozen=True)
class GgufReport:
    """Summary of a file that was written and read back."""

    # What differs from the model in use, a line each.
    notes: tuple[str, ...]
    # Type -> number of tensors.
    types: Counter[str]
    # Number of fields in its metadata.
    num_fields: int

    @property
    def check(self) -> str:
        """Return the line for the log: what was read back and compared."""
        kinds = ", ".join(f"{count} in {name.lower()}" for name, count in self.types.items())
        return (
            f"{self.types.total()} tensors read back, {kinds}; {self.num_fields} fields are equal"
        )


def write_gguf_model(
    folder: Path, out: Path, kind: str, *, name: str, pre: str | None = None
) -> GgufReport:
    """Write a model folder as the file `out`, read it back and compare.

    One tensor at a time is in memory.

    kind: type of its matrices: `f16`, `bf16`, `f32`, `q8_0` or `q4_k_m`. name: of the model, for
    people who look at the file. pre: see `read_vocabulary`. Raises CheckpointError if llama.cpp
    cannot use the model or the file reads back otherwise, StorageError if it cannot be written,
    SetupError if the package gguf is missing; then there is no file.
    """
    import_gguf()  # refuses before anything is read
    spec = read_trained_spec(read_config(folder), str(folder))
    architecture = describe_architecture(spec, str(folder))
    assert isinstance(spec, DecoderSpec)
    check_weights(spec, folder)
    vocabulary = read_vocabulary(folder, spec.vocab_size, pre)
    tensors = list_model_tensors(spec, folder=folder, architecture=architecture, kind=kind)
    fields = {
        "general.type": "model",
        "general.name": vocabulary.choose_name(name),
        "general.file_type": _FILE_TYPES[kind],
        "general.quantization_version": _BLOCKS_VERSION,
    }
    fields |= {f"{architecture.name}.{key}": value for key, value in architecture.metadata.items()}
    fields |= make_vocabulary_fields(vocabulary)
    write_gguf(out, architecture=architecture.name, fields=fields, tensors=tensors)
    check_gguf(out, fields, tensors)
    notes = architecture.notes + tuple(vocabulary.notes)
    return GgufReport(notes, Counter(tensor.kind for tensor in tensors), len(fields))


def list_model_tensors(
    spec: DecoderSpec, folder: Path, architecture: Architecture, kind: str
) -> list[GgufTensor]:
    """Return the tensors of the file in the model's order, the rotary embedding's tables first.

    folder: of the Hugging Face model. kind: as for `write_gguf_model`. Raises CheckpointError for a
    parameter that a recipe added to the model.
    """
    tensors = read_headers(folder)
    extras = sorted(name for name, tensor in tensors.items() if tensor.extra)
    if extras:
        raise CheckpointError(
            f"{folder}: {extras[0]} was added by a recipe, and llama.cpp does not compute with it"
        )
    # The package gguf knows the names that transformers writes; a folder may have older ones.
    usual_names = {entry.our_name: entry.file_name for entry in build_weight_map(spec)}
    file_names = {
        usual_names[entry.our_name]: entry.file_name
        for entry in build_weight_map(spec, list(tensors))
    }
    gguf_names = find_gguf_names(architecture.name, spec.num_layers, list(file_names))
    tables = architecture.rope_tables
    readers: dict[str, Callable[[], Tensor]] = {
        name: partial(torch.tensor, factors, dtype=torch.float32)
        for name, factors in tables.items()
    }
    shapes: dict[str, tuple[int, ...]] = {name: (len(factors),) for name, factors in tables.items()}
    for usual_name, file_name in file_names.items():
        name = gguf_names[usual_name]
        tensor = tensors[file_name]
        readers[name] = _make_reader(
            spec, architecture, name=usual_name, tensor=tensor, file_name=file_name
        )
        shapes[name] = tensor.entry.shape
    shares_heads = spec.num_heads != spec.num_kv_heads or architecture.name != "llama"
    is_large = architecture.name in _LARGE and spec.num_layers == 80 and shares_heads
    types = choose_types(shapes, kind, spec.num_layers, large=is_large)
    return [
        GgufTensor(name, shape=shapes[name], kind=types[name], read=readers[name])
        for name in shapes
    ]


def find_gguf_names(architecture: str, layers: int, names: list[str]) -> dict[str, str]:
    """Return name in a Hugging Face file -> name in a GGUF file, by the tables of package gguf.

    architecture: llama.cpp's name. layers: their number. Raises CheckpointError for a name that the
    tables lack.
    """
    gguf = import_gguf()
    kinds = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[architecture], layers)
    gguf_names = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}
    for name, gguf_name in gguf_names.items():
        if gguf_name is None:
            raise CheckpointError(
                f"{name}: the package gguf has no name for it in {architecture}; update the package"
            )
    return gguf_names


def _make_reader(
    spec: DecoderSpec,
    architecture: Architecture,
    *,
    name: str,
    tensor: FileTensor,
    file_name: str,
) -> Callable[[], Tensor]:
    """Return a function that reads a tensor, with the values that llama.cpp wants.

    name: the one that transformers writes. file_name: the one in this folder's file.
    """

    def read() -> Tensor:
        with safe_open(str(tensor.file), framework="pt") as file:
            values = file.get_tensor(file_name)
        # llama.cpp multiplies with the norm's weight, Gemma with 1 + weight.
        if spec.norm_offset and name.endswith("norm.weight"):
            return values.float() + 1
        return permute_rows(values, spec, name) if architecture.is_permuted else values

    return read


def permute_rows(values: Tensor, spec: DecoderSpec, name: str) -> Tensor:
    """Return query and key rows in the order of llama.cpp's Llama; other tensors unchanged.

    The two channels that rotate together are next to each other there; in the files of Hugging Face
    they are half a head apart.

    values: `[rows, ...]`. name: that of a weight or a bias, or ending in `lora_b` for an adapter's
    B.
    """
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(name.rsplit(".", 2)[-2])
    if heads is None or name.rsplit(".", 1)[-1] not in ("weight", "bias", "lora_b"):
        return values
    return values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(values.shape)


def make_vocabulary_fields(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """Return the metadata of the tokenizer, key -> value; keys without a value are left out."""
    fields: dict[str, Any] = {
        "model": vocabulary.model,
        "pre": vocabulary.pre,
        "tokens": vocabulary.tokens,
        "token_type": [int(kind) for kind in vocabulary.kinds],
        "scores": vocabulary.scores,
        "merges": vocabulary.merges,
        **{f"{role}_token_id": token for role, token in vocabulary.ids.items()},
        "add_bos_token": vocabulary.add_bos,
        "add_space_prefix": vocabulary.add_space,
    }
    fields = {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}
    if vocabulary.template is not None:
        fields["tokenizer.chat_template"] = vocabulary.template
    return fields


def write_gguf_adapter(
    adapter_folder: Path, base: Path, out: Path, kind: str, *, name: str
) -> GgufReport:
    """Write an adapter's folder as the file `out`, read it back and compare.

    base: folder of the model that the adapter is for. kind: `f16`, `bf16` or `f32`. name: for
    people who look at the file. Raises CheckpointError if llama.cpp cannot use the adapter or the
    file reads back otherwise, StorageError if it cannot be written, SetupError if the package gguf
    is missing; then there is no file.
    """
    import_gguf()  # refuses before anything is read
    spec = read_trained_spec(read_config(base), str(base))
    architecture = describe_architecture(spec, str(base))
    assert isinstance(spec, DecoderSpec)
    adapter = read_adapter(adapter_folder)
    saved = check_fits(adapter, spec)
    check_base(adapter, spec, base)
    _check_loadable(adapter, spec, saved)
    modules = adapter.list_modules(spec)
    # llama.cpp divides by the rank of each module, and has one alpha for all.
    alpha = find_usual_scaling(adapter, spec) * adapter.config.get_rank(modules[0])
    tensors = _list_adapter_tensors(
        adapter, modules, spec=spec, architecture=architecture, kind=kind, alpha=alpha
    )
    fields = {
        "general.type": "adapter",
        "general.name": name,
        "adapter.type": "lora",
        "adapter.lora.alpha": float(alpha),
        "general.file_type": _FILE_TYPES[kind],
    }
    write_gguf(out, architecture=architecture.name, fields=fields, tensors=tensors)
    check_gguf(out, fields, tensors)
    return GgufReport((), Counter(tensor.kind for tensor in tensors), len(fields))


def _check_loadable(adapter: AdapterFile, spec: DecoderSpec, saved: SavedWeights) -> None:
    """Raise CheckpointError for an adapter that llama.cpp does not load.

    saved: full weights of the base that are in the adapter's file.
    """
    adapts_embedding = any(module.is_embedding for module in adapter.list_modules(spec))
    faults = {
        "is a DoRA adapter": adapter.config.dora,
        f"has the extra parameter {min(adapter.extras, default=None)}": bool(adapter.extras),
        f"brings {min(saved.parameters, default=None)} of the base along": bool(saved.parameters),
        "adapts the embedding or the output projection of a model that has one matrix for both": (
            spec.tied and (HEAD in adapter.tensors or adapts_embedding)
        ),
    }
    fault = next((fault for fault, is_found in faults.items() if is_found), None)
    if fault:
        raise CheckpointError(
            f"{adapter.folder}: {fault}, which llama.cpp does not load; merge it (tune export"
            f" {adapter.folder} --merge)"
        )


def _list_adapter_tensors(
    adapter: AdapterFile,
    modules: list[FileModule],
    *,
    spec: DecoderSpec,
    architecture: Architecture,
    kind: str,
    alpha: float,
) -> list[GgufTensor]:
    """Return A and B of each module, named after the weight that they change.

    kind: `f16`, `bf16` or `f32`. alpha: the one alpha of the file.
    """
    names = find_gguf_names(
        architecture.name, spec.num_layers, [f"{module.name}.weight" for module in modules]
    )
    tensors = []
    for module in modules:
        # llama.cpp multiplies with alpha / rank everywhere: a module of another scaling has the
        # rest in its B.
        factor = adapter.config.compute_scaling(module) * adapter.config.get_rank(module) / alpha
        matrices = _read_factors(
            adapter, module, spec=spec, architecture=architecture, factor=factor
        )
        name = names[f"{module.name}.weight"]
        tensors += [
            GgufTensor(
                name=f"{name}.{suffix}",
                shape=tuple(matrix.shape),
                kind=kind.upper(),
                read=matrix.contiguous,
            )
            for suffix, matrix in zip(("lora_a", "lora_b"), matrices, strict=True)
        ]
    return tensors


def _read_factors(
    adapter: AdapterFile,
    module: FileModule,
    *,
    spec: DecoderSpec,
    architecture: Architecture,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """Return A `[r, in]` and B `[out, r]` of a module.

    Of the embedding A is `[v, r]`, from which tokens' rows are taken, and B `[d, r]`.

    factor: is multiplied into B.
    """
    if module.is_embedding:
        lora_a = adapter.read(module.name, EMBEDDING_A).T
        lora_b = adapter.read(module.name, EMBEDDING_B)
    else:
        lora_a, lora_b = (adapter.read(module.name, suffix) for suffix in (LORA_A, LORA_B))
    if architecture.is_permuted:
        # The rows of the weight are permuted, and so are those of what is added to it.
        lora_b = permute_rows(lora_b, spec, f"{module.name}.lora_b")
    return lora_a, lora_b.float() * factor if factor != 1 else lora_b
