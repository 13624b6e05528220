"""The shape of a model as plain numbers, and where it comes from: a `config.json` or a preset.

Our own decoder is described by a `DecoderSpec`, and the code that builds, loads, adapts and shards
it reads its fields. Of any other model its `ExternalSpec` answers, by methods. No torch here, and
no implementation: the registry names the module that has one.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from recipe_lib.config.schema import LoraConfig, ParallelConfig
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.reading import describe_fault, read_json
from recipe_lib.units import name_first

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from recipe_lib.models.weight_names import FileView


# What the library asks of a model that it does not implement itself, and how the tensors of one lie
# in files.


@dataclass(frozen=True)
class WeightEntry:
    """One parameter and its place in a file."""

    our_name: str  # the parameter
    file_name: str  # the tensor in the file
    # its rows (dimension 0) of that tensor, when the file fuses several parameters into one; length
    # None: the tensor is the parameter
    start: int = 0
    length: int | None = None
    # how an external model's parameter is made of several tensors, of which file_name is the first,
    # or of one in another form
    made: "FileConversion | None" = None
    # how one of ours is
    view: "FileView | None" = None


class Conversion(Protocol):
    """Tensors that are made of others."""

    def names(self) -> list[str]:
        """Return the names of all tensors that it takes."""

    def convert(
        self, read: "Callable[[str], Tensor]", names: Mapping[str, list[str]] | None = None
    ) -> "dict[str, Tensor]":
        """Return what is made of the tensors, by name; of the file's names where it is written.

        read: returns a tensor by its name. names: those to take, as `FileConversion.pieces` has;
        None: all.
        """


class FileConversion(Conversion, Protocol):
    """Parameters that are made of a file's tensors."""

    def shapes(
        self, shape_of: Callable[[str], tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of what is made; None where the tensors do not go together."""

    def pieces(self) -> Iterator[tuple[int, int | None, dict[str, list[str]]]]:
        """Yield parts that can be made by themselves.

        Each is (first row, row after the last or None: all, tensors to take).
        """


@dataclass(frozen=True)
class TensorLayout:
    """The tensors of a model, and its modules."""

    shapes: dict[str, tuple[int, ...]]  # of every parameter and persistent buffer
    buffers: frozenset[str]  # which of these are no parameters
    names: dict[str, tuple[str, ...]]  # all names of a parameter; a tied one has several
    prefix: str  # of the names of its body, which files may leave out
    # those inside the layers that may have an adapter, as (outputs, inputs)
    linears: dict[str, tuple[int, int]]
    transposed: frozenset[str]  # those of the linears whose weight is `[in, out]`
    plain: frozenset[str]  # those of torch's own class, which can be quantized
    uncalled: dict[str, str]  # linears that are never called as one, and why
    modules: tuple[str, ...]  # all names
    unread: tuple[str, ...] = ()  # patterns of files' names that its class does not read

    def tied_names(self) -> dict[str, str]:
        """Return names of tied weights, with and without prefix, and their parameter.

        All names of one parameter have to hold the same.
        """
        tied: dict[str, str] = {}
        for parameter, names in self.names.items():
            if len(names) > 1:
                for name in names:
                    tied[name] = tied[name.removeprefix(self.prefix)] = parameter
        return tied


@dataclass(frozen=True)
class WrittenLayout:
    """The tensors of the files that are written for a model, and what they are made of."""

    shapes: Mapping[str, tuple[int, ...]]  # file name -> shape
    renamed: Mapping[str, str]  # file name -> parameter
    made: Mapping[str, Conversion]  # file name -> what makes it of parameters


@dataclass(frozen=True)
class StageParts:
    """The parts that a model is cut into for the stages of a pipeline, by names of modules."""

    first: tuple[str, ...]  # what runs before the layers, and what text does not run through
    layers: tuple[str, ...]  # in order
    last: tuple[str, ...]  # what runs after them
    embedding: str  # the one of `first` whose weight may be the output projection too
    width: int  # of the hidden states `[b, s, width]` between layers
    returned: int = 0  # the length of the tuple that a layer returns; 0: hidden states alone


@dataclass(frozen=True)
class ExternalSpec(ABC):
    """A model of another library or of a user's plugin."""

    family: str  # model_type of config.json
    vocab_size: int  # rows of the embedding
    max_positions: int  # tokens of a sequence that the model was made for
    init_std: float  # standard deviation of random weights
    tied: bool  # the output projection is the embedding
    num_layers: int
    implementation: str  # what `model.implementation` says for it

    @abstractmethod
    def spell_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config.json with both names of what a release of its library renamed."""

    @abstractmethod
    def build(self, dtype: "torch.dtype") -> "nn.Module":
        """Build the model on the meta device, called as a decoder is; `build_meta` calls this."""

    @abstractmethod
    def make_first_vectors(self, seed: int) -> "dict[str, Tensor]":
        """Return what its own class begins parameters of less than two dimensions with."""

    @abstractmethod
    def list_layer_kinds(self) -> list[str]:
        """Return a text for each layer.

        Equal texts stand for layers of the same parameters and the same kind of attention.
        """

    @abstractmethod
    def layout(self) -> TensorLayout:
        """Return its tensors and modules."""

    @abstractmethod
    def build_weight_map(self, file_names: Collection[str]) -> list[WeightEntry]:
        """Return its entries, see `recipe_lib.models.weight_names.build_weight_map`."""

    @abstractmethod
    def tied_names(self, file_names: Collection[str]) -> dict[str, str]:
        """Return the names of tied weights among those of a file, and their parameters."""

    @abstractmethod
    def build_written_layout(self) -> WrittenLayout | None:
        """Return the layout of the files that are written; None: that of `build_weight_map`."""

    @abstractmethod
    def list_adapted_linears(self, cfg: LoraConfig) -> list[str]:
        """Return names of the linears that the config gives an adapter.

        Raises ConfigError for one that cannot have any.
        """

    @abstractmethod
    def add_adapters(self, model: Any, cfg: LoraConfig, dtype: "torch.dtype") -> None:
        """Put adapters on them, in place; `recipe_lib.adapters.add_adapters` calls this."""

    @abstractmethod
    def find_stage_parts(self) -> StageParts:
        """Return where its layers are divided among the ranks of a pipeline.

        Raises ConfigError if they cannot be.
        """

    @abstractmethod
    def shard_tensors(self, model: Any, parallel: ParallelConfig, world: Any) -> dict[str, str]:
        """Shard its matrices over ranks, see `recipe_lib.parallel.shard_tensors`."""


_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PRESETS = Path(__file__).parent / "presets"
MAX_BYTES = 2**26  # of a config.json
SCORE = "score.weight"  # of a score head, in files too


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: how fast each pair of a head's channels turns."""

    base: float  # the longest wavelength is about 2 pi base
    width: int  # channels of a head that turn: all, or a fraction
    kind: str = "default"  # or `linear`, `llama3`, `yarn`, `longrope`
    # that kind's own parameters, see `recipe_lib.ops.rope`
    numbers: Mapping[str, Any] = field(default_factory=dict, hash=False)
    attention_factor: float = 1.0  # multiplies cosines and sines (yarn, longrope)


@dataclass(frozen=True)
class MixtureSpec:
    """A mixture of experts in place of a layer's MLP."""

    num_experts: int
    top_k: int  # experts that compute a token
    mlp_width: int  # of one expert
    layers: tuple[bool, ...]  # per layer: True if it has experts; others have an MLP
    normalized: bool  # the scores of a token's experts add up to 1
    router_bias: bool
    expert_bias: bool
    activation: str  # as of a decoder, or `clamped_swiglu` (gpt-oss)
    interleaved: bool  # gate and up take turns among an expert's inner channels (gpt-oss)
    alpha: float  # of clamped_swiglu: what the gate is multiplied by in its sigmoid
    limit: float  # of clamped_swiglu: the most that gate and up are


@dataclass(frozen=True)
class FileCodes:
    """The forms of weights that are quantized in a checkpoint's files; by default none are."""

    # rows and columns of a scale, where linears are in FP8
    fp8_block: tuple[int, int] | None = None
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
    # Each head has a score that takes part in the softmax and attends to nothing (gpt-oss)
    sinks: bool = False
    codes: FileCodes = FileCodes()
    # rows of a score head, which then is in place of the output projection
    num_labels: int | None = None

    @property
    def head_rows(self) -> int:
        """Return the rows of the matrix that comes after the last norm."""
        return self.num_labels or self.vocab_size


ModelSpec = DecoderSpec | ExternalSpec


def has_score_head(spec: ModelSpec) -> TypeGuard[DecoderSpec]:
    """Return True if the model has a score head."""
    return isinstance(spec, DecoderSpec) and spec.num_labels is not None


def read_config(path: Path) -> dict[str, Any]:
    """Read a `config.json`, given its folder or itself.

    Raises CheckpointError when it cannot be read.
    """
    path = Path(path)
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        config = read_json(file, MAX_BYTES)
    except FileNotFoundError:
        raise CheckpointError(_explain_missing_config(file)) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file}: not a readable JSON file ({describe_fault(error)}); download the file again"
        ) from None
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{file}: found a JSON {type(config).__name__}, expected an object with model_type"
        )
    return config


def _explain_missing_config(file: Path) -> str:
    """Return what the folder is instead of a model, if that is one of the usual mistakes."""
    folder = file.parent
    if (folder / "adapter_config.json").is_file():
        return (
            f"{folder}: is an adapter (it has adapter_config.json), not a model; set"
            " lora.adapter_path to it and model.path to the model that it was trained on"
        )
    has_weights = any((folder / name).is_file() for name in _WEIGHTS)
    is_looked_for = file.name == "config.json" and not has_weights
    return (describe_other_weights(folder, "config.json") if is_looked_for else None) or (
        f"{file}: no such file; expected a Hugging Face model folder with config.json"
    )


def list_presets() -> list[str]:
    """Return the names of the shipped architectures, `family/size`, sorted."""
    return sorted(
        str(file.relative_to(PRESETS).with_suffix("").as_posix())
        for file in PRESETS.glob("*/*.json")
    )


def read_preset_config(name: str) -> dict[str, Any]:
    """Read the `config.json` of a preset.

    name: a shipped name such as `llama3/8B`, or the path of a .json file or its folder. Raises
    ConfigError if there is neither.
    """
    if name in list_presets():
        return read_config(PRESETS / f"{name}.json")
    path = Path(name)
    if os.path.exists(path) and (not os.path.isdir(path) or os.path.isfile(path / "config.json")):
        return read_config(path)
    raise ConfigError(
        f"model.preset={name}: no such preset or file; expected a path to a config.json or one of "
        + ", ".join(list_presets())
    )


# Folders whose weights are not a Hugging Face model's: what they have, and what to do about it. No
# torch here.


# Patterns of file names, the most telling first, and what to do with a folder that has such files
# alone.
_FORMATS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("*.gguf",),
        "GGUF files cannot be trained: take the safetensors checkpoint that this one was made from",
    ),
    (
        ("consolidated*.safetensors",),
        (
            "consolidated files are Mistral's own format: download the model's Hugging Face files"
            " (config.json and model*.safetensors), or convert it with transformers'"
            " convert_mistral_weights_to_hf"
        ),
    ),
    (
        ("consolidated*.pth",),
        (
            "consolidated files are Meta's own format, pickled, and are not read: download the"
            " model's Hugging Face files (config.json and model*.safetensors), or convert it with"
            " transformers' convert_llama_weights_to_hf"
        ),
    ),
    (
        ("*.bin", "*.pt", "*.pth"),
        (
            "pickled weights can run code and are not read: download the safetensors files, or"
            " convert them"
        ),
    ),
    (
        ("model-*-of-*.safetensors",),
        "parts of a model are read by its model.safetensors.index.json: download the folder again",
    ),
    (
        ("*.safetensors",),
        (
            "weights are read from model.safetensors, or from the files that"
            " model.safetensors.index.json names: rename it if it is the whole model, or download"
            " the folder again"
        ),
    ),
)
# Beside a model these are optimizer.pt, training_args.bin and such.
_STATES = ("*.bin", "*.pt", "*.pth")


def list_weight_files(folder: Path) -> list[str]:
    """Return the names of a folder's files with weights of any format, sorted.

    Those of a trainer's state are not among them.
    """
    patterns = [pattern for kinds, _ in _FORMATS for pattern in kinds if pattern not in _STATES]
    globbed = map(folder.glob, (*patterns, "pytorch_model*.bin"))
    return sorted({path.name for path in chain.from_iterable(globbed)})


def describe_other_weights(folder: Path, missing: str) -> str | None:
    """Return one line for a folder that has weights of another kind; None: it has none at all.

    missing: the file that it has not.
    """
    for patterns, remedy in _FORMATS:
        paths = chain.from_iterable(map(folder.glob, patterns))
        names = [path.name for path in paths if path.is_file()]
        if names:
            return f"{folder}: has {name_first(sorted(names))} but no {missing}; {remedy}"
    return None
