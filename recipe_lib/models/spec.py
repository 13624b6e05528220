"""Describe a model's shape as plain numbers (a spec), and read the `config.json` it comes from.

`models.families.read_spec` makes a spec of a config.json. The code that builds, loads, adapts and
shards our own decoder reads the fields of its `DecoderSpec`. For a model of another library or of a
plugin (external) it calls the methods of an `ExternalSpec`. This module imports no torch.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from recipe_lib.config.local_files import ADAPTER_CONFIG
from recipe_lib.config.schema import LoraConfig, ParallelConfig
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.reading import describe_fault, read_json
from recipe_lib.units import name_first

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from recipe_lib.models.mixture import Routers
    from recipe_lib.models.weight_names import FileView


# The interface to models that are implemented elsewhere, and to their tensors in files.


@dataclass(frozen=True)
class WeightEntry:
    """One parameter, and the tensor or tensors of files that it is read from."""

    our_name: str  # of the parameter in the model
    file_name: str  # of the tensor in the file, or of the first of several
    # The parameter's rows (dimension 0) of that tensor, when the file fuses several parameters into
    # one; length None: the parameter is the whole tensor.
    start: int = 0
    length: int | None = None
    # Makes an external model's parameter of several tensors, or of one in another form; None: the
    # parameter is the tensor, or rows of it.
    made: "FileConversion | None" = None
    # The same for a parameter of our own decoder.
    view: "FileView | None" = None


class Conversion(Protocol):
    """A function that makes tensors of other tensors: parameters of a file's, or the reverse."""

    def names(self) -> list[str]:
        """Return the names of all tensors that it takes."""

    def convert(
        self, read: "Callable[[str], Tensor]", names: Mapping[str, list[str]] | None = None
    ) -> "dict[str, Tensor]":
        """Return name -> tensor of all that is made: parameters, or a file's tensors for writing.

        read: returns a tensor by its name. names: the tensors to take, in the form of
        `FileConversion.pieces`; None: all.
        """


class FileConversion(Conversion, Protocol):
    """A conversion of a file's tensors to parameters, of an external model."""

    def shapes(
        self, shape_of: Callable[[str], tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]] | None:
        """Return the parameters' shapes, by name; None if the tensors' shapes do not fit together.

        shape_of: returns the shape of a tensor, given its name.
        """

    def pieces(self) -> Iterator[tuple[int, int | None, dict[str, list[str]]]]:
        """Yield parts of the parameters that can be made by themselves, to hold little at a time.

        Each is (its first row, the row after its last, the `names` for `convert`). None in place of
        the second: all rows.
        """


@dataclass(frozen=True)
class ExpertsLayout:
    """The way in which a module of experts keeps its matrices, and is called."""

    inner: str  # name of the parameter that hidden states are multiplied by first
    outer: str  # name of the parameter that the result is multiplied by
    transposed: bool  # matrices are `[E, in, out]`; False: `[E, out, in]`
    gated: bool  # what the first returns has gates beside the channels of the second
    # True: it is called with rows `[E n, d]`, n for each expert, and multiplies by no scores
    # (Llama 4); False: with tokens `[n, d]`, the indices `[n, k]` of their experts, and scores.
    takes_rows: bool
    # PEFT takes the matrices for `[E, out, in]`, though they are transposed: it goes by a mark of
    # the class.
    is_unmarked: bool = False


@dataclass(frozen=True)
class TensorLayout:
    """The tensors and modules of an external model, by their names in it."""

    shapes: dict[str, tuple[int, ...]]  # name -> shape, of every parameter and persistent buffer
    buffers: frozenset[str]  # the names in `shapes` that are buffers
    names: dict[str, tuple[str, ...]]  # parameter -> all its names; a tied one has several
    prefix: str  # of names of the model without its head, such as `model.`; files may leave it out
    # Name -> (output, input channels), of the linears in the layers that may have an adapter.
    linears: dict[str, tuple[int, int]]
    transposed: frozenset[str]  # names of the linears whose weight is `[in, out]`
    plain: frozenset[str]  # names of the linears of torch's own class, which can be quantized
    uncalled: dict[str, str]  # linears whose forward the model never calls -> why
    modules: tuple[str, ...]  # names of all modules
    # Names of the modules that the model is built without, as text does not run through them.
    left_out_modules: tuple[str, ...] = ()
    # Names in `shapes` that are of other such parts, which the class does not run without.
    frozen: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()  # patterns of names in files that the model's class does not read
    # Name of a module -> its layout, of the experts in the layers.
    experts: Mapping[str, ExpertsLayout] = field(default_factory=dict)
    # Name of a module -> shape `[E, d]` of its parameter `weight`, of the routers that have one.
    routers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def tied_names(self) -> dict[str, str]:
        """Return name -> parameter for all names of tied weights, with and without prefix.

        A file may have a tensor under several of these names; their values must be equal then.
        """
        tied: dict[str, str] = {}
        for parameter, names in self.names.items():
            if len(names) > 1:
                for name in names:
                    tied[name] = tied[name.removeprefix(self.prefix)] = parameter
        return tied


@dataclass(frozen=True)
class WrittenLayout:
    """The tensors of the files that a model is written to, and the parameters they are made of."""

    shapes: Mapping[str, tuple[int, ...]]  # name in the file -> shape
    renamed: Mapping[str, str]  # name in the file -> the parameter that is written
    made: Mapping[str, Conversion]  # name in the file -> the conversion that makes it of parameters


@dataclass(frozen=True)
class TextModel:
    """The text model of a multimodal one, as a model of its own."""

    spec: "ExternalSpec"
    config: dict[str, Any]  # its config.json
    names: Mapping[str, str]  # its parameter or buffer -> the one of the multimodal model


@dataclass(frozen=True)
class StageParts:
    """The parts that a model is cut into for the stages of a pipeline, by names of modules."""

    first: tuple[str, ...]  # what runs before the layers, and what text does not run through
    layers: tuple[str, ...]  # in the order in which they run
    last: tuple[str, ...]  # what runs after the layers
    embedding: str  # the one of `first` whose weight may be tied to the output projection's
    width: int  # channels of the hidden states `[b, s, width]` between layers
    returned: int = 0  # length of the tuple that a layer returns; 0: it returns a tensor


@dataclass(frozen=True)
class ExternalSpec(ABC):
    """A model of another library or of a user's plugin."""

    family: str  # model_type of config.json
    vocab_size: int  # rows of the embedding
    max_positions: int  # tokens of the longest sequence that the model was made for
    init_std: float  # standard deviation of random weights
    tied: bool  # True: the output projection's weight is the embedding's
    num_layers: int
    implementation: str  # its value of `model.implementation`
    architecture: str  # name of its class

    @abstractmethod
    def spell_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config.json with the older and the newer names of keys.

        Its library has renamed some, and releases of it read one name alone.
        """

    @abstractmethod
    def build(self, dtype: "torch.dtype") -> "nn.Module":
        """Build the model on the meta device, called as a decoder is; `build_meta` calls this."""

    @abstractmethod
    def make_first_vectors(self, seed: int) -> "dict[str, Tensor]":
        """Return name -> values that its class initializes vectors and scalar parameters with."""

    @abstractmethod
    def list_layer_kinds(self) -> list[str]:
        """Return a text for each layer, equal for layers of the same parameters and attention."""

    @abstractmethod
    def layout(self) -> TensorLayout:
        """Return its tensors and modules."""

    @abstractmethod
    def build_weight_map(self, file_names: Collection[str]) -> list[WeightEntry]:
        """Return an entry for each parameter, see `models.weight_names.build_weight_map`."""

    @abstractmethod
    def tied_names(self, file_names: Collection[str]) -> dict[str, str]:
        """Return name -> parameter, for those of a checkpoint's names that are tied weights."""

    @abstractmethod
    def explain_unread(self, file_names: Collection[str]) -> dict[str, str]:
        """Return name -> why the model does not read it, of names in a checkpoint's files.

        Names that the model reads may be among them; names that are unknown are not.
        """

    @abstractmethod
    def build_written_layout(self) -> WrittenLayout | None:
        """Return the layout of the files that are written; None: that of `build_weight_map`."""

    @abstractmethod
    def list_adapted_linears(self, cfg: LoraConfig) -> list[str]:
        """Return the names of the linears that the config gives an adapter.

        Raises ConfigError for one that cannot have an adapter.
        """

    @abstractmethod
    def add_adapters(self, model: Any, cfg: LoraConfig, dtype: "torch.dtype") -> None:
        """Add adapters to the linears of `list_adapted_linears`, in place.

        dtype: of the adapters.
        """

    @abstractmethod
    def find_text_model(self) -> TextModel | None:
        """Return the text model that a multimodal model has inside.

        None: this is no multimodal model, or its library has no class for its text alone.
        """

    @abstractmethod
    def is_multimodal(self) -> bool:
        """Return True if the model has parts that text does not run through."""

    @abstractmethod
    def build_shrunk(self, min_layers: int = 2, num_key_heads: int = 4) -> "ExternalSpec":
        """Build the spec of a small model of the same class of transformers, not of a plugin's.

        It has one layer of each kind, but at least `min_layers`. num_key_heads: of keys and
        values, in a model that has fewer of them than of queries.
        """

    @abstractmethod
    def check_packing(self, tensor_ranks: int, *, compiled: bool) -> None:
        """Raise SetupError if a small copy of the model does not keep packed documents apart.

        Nothing is checked for a plugin's model, of which there is no small copy. tensor_ranks: the
        size of tensor parallelism. compiled: layers are.
        """

    @abstractmethod
    def describe_scans(self, device_type: str) -> str:
        """Return a text on what computes its scans on a device; empty for a model without scans.

        Scans carry a state along a sequence: kernels compute them, or loops in torch's operators.
        """

    @abstractmethod
    def find_stage_parts(self) -> StageParts:
        """Return the names of the parts that pipeline stages are made of.

        Raises ConfigError for a model that cannot be cut into stages.
        """

    @abstractmethod
    def record_routers(self, model: Any) -> "Routers":
        """Let the routers of a model record their choices in training, in place; return them.

        Raises ConfigError, with the reason why not, for routers whose choices cannot be read. There
        are none in a model without experts.
        """

    @abstractmethod
    def shard_tensors(self, model: Any, parallel: ParallelConfig, world: Any) -> dict[str, str]:
        """Shard its matrices over tensor-parallel ranks, in place.

        Returns parameter -> kind of its gradient on a rank: `sharded`, that of this rank's part, or
        `partial`, a summand of the whole gradient.
        """


_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PRESETS = Path(__file__).parent / "presets"  # the folder of the shipped config.json files
MAX_BYTES = 2**26  # the largest config.json that is read
SCORE = "score.weight"  # the name of a score head's weight, in models and in files


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: the frequency at which each pair of a head's channels rotates."""

    base: float  # `rope_theta`: the longest wavelength is about 2 pi base positions
    width: int  # the number of a head's channels that rotate: all, or a fraction
    kind: str = "default"  # or `linear`, `llama3`, `yarn`, `longrope`
    # Keyword arguments of that kind's function in `recipe_lib.ops.rope`.
    numbers: Mapping[str, Any] = field(default_factory=dict, hash=False)
    attention_factor: float = 1.0  # multiplies cosines and sines (yarn, longrope)


@dataclass(frozen=True)
class MixtureSpec:
    """A mixture of experts in place of a layer's MLP."""

    num_experts: int  # of a layer
    top_k: int  # number of experts that compute a token
    mlp_width: int  # inner channels of one expert
    layers: tuple[bool, ...]  # for each layer True if it has experts; others have an MLP
    normalized: bool  # True: the scores of a token's experts add up to 1
    router_bias: bool  # True: the router has a bias
    expert_bias: bool  # True: the experts' linears have biases
    activation: str  # a value of `DecoderSpec.activation`, or `clamped_swiglu` (gpt-oss)
    interleaved: bool  # True: gate and up alternate among an expert's inner channels (gpt-oss)
    alpha: float  # of clamped_swiglu: multiplies the gate inside its sigmoid
    limit: float  # of clamped_swiglu: gate and up are clamped to it


@dataclass(frozen=True)
class FileCodes:
    """The forms of weights that are quantized in a checkpoint's files; by default none are."""

    # (rows, columns) of the blocks that share a scale, if linears are in FP8; None: they are not.
    fp8_block: tuple[int, int] | None = None
    mxfp4: bool = False  # True: experts are in MXFP4


@dataclass(frozen=True)
class DecoderSpec:
    """The shape of a decoder of any family; widths are in channels."""

    family: str  # model_type of config.json, without the `_text` of multimodal ones
    vocab_size: int  # rows of the embedding
    width: int  # of hidden states
    mlp_width: int  # inner channels of an MLP
    num_layers: int
    num_heads: int  # of queries
    num_kv_heads: int  # of keys and values
    head_width: int
    max_positions: int  # tokens of the longest sequence it was made for; longer ones run too
    norm_eps: float  # added to the mean square in norms
    rope: RopeSpec
    local_rope: RopeSpec | None  # of layers with a window (Gemma 3); None: `rope` in all layers
    windows: tuple[int | None, ...]  # for each layer: keys a token sees, its own too; None: all
    attention_scale: float  # multiplies scores before the softmax
    attention_softcap: float | None  # scores become cap * tanh(scores / cap) (Gemma 2)
    logit_softcap: float | None  # the same for logits
    embedding_scale: float | None  # multiplies embeddings (Gemma)
    activation: str  # `silu`, `gelu` or `gelu_tanh`
    norm_offset: bool  # norms multiply by 1 + weight (Gemma)
    post_norms: bool  # attention and MLP have a norm after them too (Gemma 2, 3)
    head_norms: bool  # queries and keys have a norm over each head (Qwen 3, Gemma 3)
    qkv_bias: bool  # query, key and value projections have biases
    output_bias: bool  # attention's output projection has one
    mlp_bias: bool  # the linears of MLPs have biases
    tied: bool  # the output projection's weight is the embedding's
    fused_file: bool  # files have several matrices of a layer in one (Phi 3, Granite 4)
    init_std: float  # standard deviation of random weights
    mixture: MixtureSpec | None = None  # experts of layers; None: all layers have an MLP
    width_norms: bool = False  # queries and keys have a norm over all heads together (OLMoE)
    qkv_clip: float | None = None  # queries, keys and values are clamped to +- this (OLMoE)
    # Each head has a score that takes part in the softmax and has no value (gpt-oss).
    sinks: bool = False
    # For each layer True if its queries and keys rotate by position (SmolLM3); None: all do.
    rotated: tuple[bool, ...] | None = None
    residual_scale: float = 1.0  # multiplies the outputs of attention and MLP (Granite)
    logit_scale: float | None = None  # multiplies logits (Granite)
    codes: FileCodes = FileCodes()  # how the files' weights are quantized
    # Rows of a score head, which takes the place of the output projection; None: there is none.
    num_labels: int | None = None

    @property
    def head_rows(self) -> int:
        """Return the rows of the head's matrix, be it a score head or the output projection."""
        return self.num_labels or self.vocab_size


ModelSpec = DecoderSpec | ExternalSpec


def has_score_head(spec: ModelSpec) -> TypeGuard[DecoderSpec]:
    """Return True if the model has a score head."""
    return isinstance(spec, DecoderSpec) and spec.num_labels is not None


def read_config(path: Path) -> dict[str, Any]:
    """Read a `config.json`. path: the file, or its folder.

    Raises CheckpointError if there is none, or if it is no JSON object.
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
    """Return the error line for a missing config.json.

    It names the usual mistakes: the folder of an adapter, or weights in another format.
    """
    folder = file.parent
    if (folder / ADAPTER_CONFIG).is_file():
        return (
            f"{folder}: is an adapter (it has {ADAPTER_CONFIG}), not a model; set"
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


# Folders with weights in other formats than Hugging Face's, and what a user can do about it.


# (patterns of file names, remedy for a folder with such files). The first that matches is shown, so
# that narrow patterns stand before wide ones.
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
# Patterns that next to a model match optimizer.pt, training_args.bin and the like, no weights.
_STATES = ("*.bin", "*.pt", "*.pth")


def list_weight_files(folder: Path) -> list[str]:
    """Return the names of a folder's files with weights of any format, sorted.

    Files of a trainer's state are left out.
    """
    patterns = [pattern for kinds, _ in _FORMATS for pattern in kinds if pattern not in _STATES]
    globbed = map(folder.glob, (*patterns, "pytorch_model*.bin"))
    return sorted({path.name for path in chain.from_iterable(globbed)})


def describe_other_weights(folder: Path, missing: str) -> str | None:
    """Return one line about a folder with weights of another format; None: it has no weights.

    missing: the name of the file that was looked for.
    """
    for patterns, remedy in _FORMATS:
        paths = chain.from_iterable(map(folder.glob, patterns))
        names = [path.name for path in paths if path.is_file()]
        if names:
            return f"{folder}: has {name_first(sorted(names))} but no {missing}; {remedy}"
    return None
