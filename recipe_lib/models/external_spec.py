"""What the library asks of a model that it does not implement itself, and how the tensors of one lie in files.

Our own decoder is described by numbers (`DecoderSpec`), and the code that builds, loads, adapts and shards it reads
these. Of any other model its spec answers, by the methods of `ExternalSpec`. No torch here, and no implementation: the
registry names the module that has one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from recipe_lib.config.schema import LoraConfig, ParallelConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from recipe_lib.models.file_views import FileView


@dataclass(frozen=True)
class WeightEntry:
    """One parameter and its place in a file.

    our_name: the parameter. file_name: the tensor in the file. start, length: its rows (dimension 0) of that tensor,
    when the file fuses several parameters into one; length None: the tensor is the parameter. made: how an external
    model's parameter is made of several tensors, of which file_name is the first, or of one in another form; view: how
    one of ours is.
    """

    our_name: str
    file_name: str
    start: int = 0
    length: int | None = None
    made: "Conversion | None" = None
    view: "FileView | None" = None


class Conversion(Protocol):
    """Tensors that are made of others. written: what is made -> that tensor's name in a file, if it has another."""

    written: dict[str, str]

    def names(self) -> list[str]:
        """The names of all tensors that it takes."""

    def convert(
        self, read: "Callable[[str], Tensor]", names: Mapping[str, list[str]] | None = None
    ) -> "dict[str, Tensor]":
        """What is made of the tensors, by name. read: a tensor by its name. names: those to take, as `pieces` has."""

    def shapes(self, shape_of: Callable[[str], tuple[int, ...]]) -> dict[str, tuple[int, ...]] | None:
        """The shapes of what is made; None where the tensors do not go together."""

    def pieces(self) -> Iterator[tuple[int, int | None, dict[str, list[str]]]]:
        """(first row, row after the last or None: all, tensors to take) of parts that can be made by themselves."""


@dataclass(frozen=True)
class TensorLayout:
    """The tensors of a model, and its modules.

    shapes: every parameter and persistent buffer. buffers: which of these are no parameters. names: all names of a
    parameter, of which those of a tied one are several. prefix: of the names of its body, which files may leave out.
    linears: those inside the layers that may have an adapter, as (outputs, inputs). transposed: those of them whose
    weight is `[in, out]`. plain: those of torch's own class, which can be quantized. uncalled: linears that are never
    called as one, and why. modules: all names. unread: patterns of names that files may have and its class does not
    read.
    """

    shapes: dict[str, tuple[int, ...]]
    buffers: frozenset[str]
    names: dict[str, tuple[str, ...]]
    prefix: str
    linears: dict[str, tuple[int, int]]
    transposed: frozenset[str]
    plain: frozenset[str]
    uncalled: dict[str, str]
    modules: tuple[str, ...]
    unread: tuple[str, ...] = ()

    def tied_names(self) -> dict[str, str]:
        """Return names of tied weights, with and without prefix, and their parameter: all have to hold the same."""
        tied: dict[str, str] = {}
        for parameter, names in self.names.items():
            for name in names if len(names) > 1 else ():
                tied[name] = tied[name.removeprefix(self.prefix)] = parameter
        return tied


@dataclass(frozen=True)
class WrittenLayout:
    """The tensors of the files that are written for a model: file name -> shape; and what they are made of.

    renamed: file name -> parameter. made: file name -> conversion, whose tensors to take are parameters.
    """

    shapes: Mapping[str, tuple[int, ...]]
    renamed: Mapping[str, str]
    made: Mapping[str, Conversion]


@dataclass(frozen=True)
class StageParts:
    """Where a model is cut into the stages of a pipeline, by names of modules.

    first: what runs before the layers, and what text does not run through. layers: in order. last: what runs after
    them. embedding: the one of `first` whose weight may be the output projection too. width: of the hidden states
    `[b, s, width]` between layers. returned: the length of the tuple that a layer returns; 0: hidden states alone.
    """

    first: tuple[str, ...]
    layers: tuple[str, ...]
    last: tuple[str, ...]
    embedding: str
    width: int
    returned: int = 0


@dataclass(frozen=True)
class ExternalSpec(ABC):
    """A model of another library or of a user's plugin: what its users have to know, and what only it can do."""

    family: str  # model_type of config.json
    vocab_size: int  # rows of the embedding
    max_positions: int  # tokens of a sequence that the model was made for
    init_std: float  # standard deviation of random weights
    tied: bool  # the output projection is the embedding
    num_layers: int

    @property
    @abstractmethod
    def implementation(self) -> str:
        """What `model.implementation` says for it."""

    def spell_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config.json of the model with both names of what a release of its library renamed."""
        return dict(config)

    @abstractmethod
    def build(self, dtype: "torch.dtype") -> "nn.Module":
        """The model on the meta device, called as a decoder is. See `build_meta`, which calls this."""

    @abstractmethod
    def first_vectors(self, seed: int) -> "dict[str, Tensor]":
        """What its own class begins parameters of less than two dimensions with."""

    @abstractmethod
    def layer_kinds(self) -> list[str]:
        """What each layer is: equal texts stand for layers of the same parameters and the same kind of attention."""

    @abstractmethod
    def layout(self) -> TensorLayout:
        """Its tensors and modules."""

    @abstractmethod
    def weight_map(self, file_names: Collection[str]) -> list[WeightEntry]:
        """See `recipe_lib.models.weight_names.weight_map`."""

    @abstractmethod
    def tied_names(self, file_names: Collection[str]) -> dict[str, str]:
        """Return the names that tied weights may have among those of a file, and their parameters."""

    @abstractmethod
    def written_layout(self) -> WrittenLayout | None:
        """The layout of the files that are written; None: that of `weight_map`."""

    @abstractmethod
    def adapted_linears(self, cfg: LoraConfig) -> list[str]:
        """Names of the linears that the config gives an adapter. Raises ConfigError for one that cannot have any."""

    @abstractmethod
    def add_adapters(self, model: Any, cfg: LoraConfig, dtype: "torch.dtype") -> None:
        """Puts adapters on them, in place; see `recipe_lib.adapters.add_adapters`, which calls this."""

    @abstractmethod
    def token_reader(self, model: Any, padding: "Tensor | None" = None) -> "Callable[[Tensor], Tensor]":
        """For generating: a function of tokens `[b, s]` that follow one another, to the logits `[b, v]` after them.

        padding: int64 `[b]`, how many tokens each row begins with that are none; None: no row. SetupError for a class
        that takes no mask of them."""

    @abstractmethod
    def reads_padding(self, model: Any) -> bool:
        """Whether prompts of different lengths can be read together: its class takes a mask of what is padding."""

    @abstractmethod
    def stage_parts(self) -> StageParts:
        """Where its layers are divided among the ranks of a pipeline. Raises ConfigError if they cannot be."""

    @abstractmethod
    def shard_tensors(self, model: Any, parallel: ParallelConfig, world: Any) -> dict[str, str]:
        """Shards its matrices over tensor-parallel ranks; see `recipe_lib.parallel.shard_tensors`."""
