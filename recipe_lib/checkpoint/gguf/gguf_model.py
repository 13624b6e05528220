"""A Hugging Face model folder as one GGUF file."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from recipe_lib.checkpoint.gguf.architectures import Architecture, architecture_of
from recipe_lib.checkpoint.gguf.gguf_file import GgufTensor, TypeReport, check_gguf, package, write_gguf
from recipe_lib.checkpoint.gguf.gguf_vocabulary import GgufVocabulary, read_vocabulary
from recipe_lib.checkpoint.gguf.tensor_types import TypeChoice, choose_types
from recipe_lib.checkpoint.tensor_files import FileTensor
from recipe_lib.checkpoint.weight_accounts import check_weights, read_headers
from recipe_lib.errors import CheckpointError
from recipe_lib.models import read_config, read_trained_spec
from recipe_lib.models.spec import DecoderSpec
from recipe_lib.models.weight_names import weight_map

# The format's numbers for what most tensors of a file are.
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "q4_k_m": 15, "bf16": 32}
_BLOCKS_VERSION = 2  # of the block formats
_LARGE = {"llama", "qwen2"}  # architectures with a model of 80 layers and shared value heads


@dataclass(frozen=True)
class GgufReport:
    """What was written: what differs from the model in use, tensors of another type than the kind's, and how the file
    compares with the model."""

    notes: tuple[str, ...]
    types: tuple[TypeReport, ...]
    num_fields: int

    @property
    def check(self) -> str:
        """The line that says how the file compares."""
        kinds = ", ".join(map(str, self.types))
        return f"{sum(one.count for one in self.types)} tensors read back, {kinds}; {self.num_fields} fields are equal"


def write_gguf_model(folder: Path, out: Path, kind: str, *, name: str, pre: str | None = None) -> GgufReport:
    """Writes the file `out`, reads it back and compares. One tensor at a time is in memory.

    kind: one of GGUF_KINDS. name: of the model, for who looks at the file. pre: see `read_vocabulary`. Raises
    CheckpointError, StorageError or SetupError; then there is no file.
    """
    package()
    spec = read_trained_spec(read_config(folder), str(folder))
    architecture = architecture_of(spec, str(folder))
    assert isinstance(spec, DecoderSpec)
    check_weights(spec, folder)
    vocabulary = read_vocabulary(folder, spec.vocab_size, pre)
    tensors = model_tensors(spec, folder, architecture, kind)
    fields = {
        "general.type": "model",
        "general.name": vocabulary.name_for(name),
        "general.file_type": _FILE_TYPES[kind],
        "general.quantization_version": _BLOCKS_VERSION,
        **{f"{architecture.name}.{key}": value for key, value in architecture.numbers.items()},
        **vocabulary_fields(vocabulary),
    }
    write_gguf(out, architecture.name, fields, tensors)
    types = check_gguf(out, fields, tensors)
    notes = (*architecture.notes, *vocabulary.notes, *_other_types(tensors))
    return GgufReport(notes, tuple(types), len(fields))


def _other_types(tensors: list[GgufTensor]) -> list[str]:
    """A line for each type that the rows of some tensors are no whole blocks of."""
    lines: dict[TypeChoice, list[GgufTensor]] = {}
    for tensor in tensors:
        if tensor.choice.instead_of:
            lines.setdefault(tensor.choice, []).append(tensor)
    return [
        f"{len(held)} tensors are in {choice.name.lower()} instead of {str(choice.instead_of).lower()}, whose blocks "
        f"rows of {held[0].shape[-1]} are no multiple of: {held[0].name}{' and others' if len(held) > 1 else ''}"
        for choice, held in lines.items()
    ]


def model_tensors(spec: DecoderSpec, folder: Path, architecture: Architecture, kind: str) -> list[GgufTensor]:
    """The tensors of the file, in the model's order; tables of the rotary embedding first."""
    found = read_headers(folder)
    extras = sorted(name for name, tensor in found.items() if tensor.extra)
    if extras:
        raise CheckpointError(f"{folder}: {extras[0]} was added by a recipe, and llama.cpp does not compute with it")
    usual = {entry.our_name: entry.file_name for entry in weight_map(spec)}
    places = {usual[entry.our_name]: entry.file_name for entry in weight_map(spec, list(found))}
    names = gguf_names(architecture.name, spec.num_layers, list(places))
    readers = {names[own]: _reader(spec, architecture, own, found[held], held) for own, held in places.items()}
    shapes = {names[own]: found[held].entry.shape for own, held in places.items()}
    for table, factors in architecture.factors.items():
        readers[table] = partial(torch.tensor, factors, dtype=torch.float32)
        shapes[table] = (len(factors),)
    large = architecture.name in _LARGE and spec.num_layers == 80
    large = large and (spec.num_heads != spec.num_kv_heads or architecture.name != "llama")
    choices = choose_types(shapes, kind, spec.num_layers, large=large)
    order = [*architecture.factors, *names.values()]
    return [GgufTensor(name, shapes[name], choices[name], readers[name]) for name in order]


def gguf_names(architecture: str, layers: int, names: list[str]) -> dict[str, str]:
    """Name in a Hugging Face file -> name in a GGUF file, by the package's tables."""
    gguf = package()
    kinds = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[architecture], layers)
    made = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}
    for name, found in made.items():
        if found is None:
            raise CheckpointError(f"{name}: the package gguf has no name for it in {architecture}; update the package")
    return made


def _reader(
    spec: DecoderSpec, architecture: Architecture, name: str, tensor: FileTensor, held: str
) -> Callable[[], Tensor]:
    """What reads a tensor, as llama.cpp wants its values."""

    def read() -> Tensor:
        with safe_open(str(tensor.file), framework="pt") as file:
            values = file.get_tensor(held)
        if spec.norm_offset and name.endswith("norm.weight"):
            return values.float() + 1
        return permuted(values, spec, name) if architecture.permuted else values

    return read


def permuted(values: Tensor, spec: DecoderSpec, name: str) -> Tensor:
    """Query and key rows with the two channels that turn together next to each other, as llama.cpp's Llama has them;
    in the files of Hugging Face they are half a head apart. Others unchanged."""
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(name.rsplit(".", 2)[-2])
    if heads is None or name.rsplit(".", 1)[-1] not in ("weight", "bias", "lora_b"):
        return values
    return values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(values.shape)


def vocabulary_fields(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """The metadata of the tokenizer."""
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
    own = {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}
    if vocabulary.template is not None:
        own["tokenizer.chat_template"] = vocabulary.template
    return own
