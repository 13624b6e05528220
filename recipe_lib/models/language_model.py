"""What the library knows of a model's tensors besides their values, whoever wrote its forward."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recipe_lib.models.external_spec import ExternalSpec, StageParts
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.dtensor_shards import Runs
from recipe_lib.ops.head_losses import HeadLoss


class WriteMark(NamedTuple):
    """Where this rank's part of a tensor lies, and how often it was written to in place."""

    address: int
    writes: int


class LanguageModel(nn.Module):
    """A causal language model, called as `Decoder.forward` is.

    spec: its shape. own_tensors: names of the parameters and buffers that it was built with, whatever is added or left
    out later; None before `note_built`. modules_elsewhere: those that other ranks of a pipeline have. other_parts:
    modules of a multimodal model that text does not run through. computed_buffers: name -> values on the host, of
    buffers that were computed as they were made. loaded_extras: extra tensors that were read from files. runs: of
    parameters whose parts on the ranks are not in the file's order. unwritten: the marks of tensors at the moment at
    which they were given memory. on_host: names of parameters in host memory, on the device while their module runs.
    compile_layer: compiles the layer of a name by a backend, where torch.compile of its forward would not do.
    base_weights: parameters of the base that an adapter's file brought others for, by name.
    """

    spec: Any
    own_tensors: frozenset[str] | None = None
    modules_elsewhere: frozenset[str] = frozenset()
    other_parts: tuple[str, ...] = ()
    computed_buffers: Mapping[str, Tensor] = MappingProxyType({})
    loaded_extras: frozenset[str] = frozenset()
    runs: Mapping[str, Runs] = MappingProxyType({})
    unwritten: Mapping[str, WriteMark] = MappingProxyType({})
    on_host: frozenset[str] = frozenset()
    compile_layer: Callable[[str, Any], None] | None = None
    base_weights: Mapping[str, nn.Parameter] = MappingProxyType({})

    @abstractmethod
    def stage_parts(self) -> StageParts:
        """Where it is cut into the stages of a pipeline. Raises ConfigError for a model that cannot be."""

    @abstractmethod
    def keep_stages(self, layers: Collection[int], *, first: bool, last: bool) -> None:
        """Leaves out what other ranks of a pipeline have: layers of other numbers, and unless it has the first or the
        last stage, what is before or behind the layers. A tied embedding is on both."""

    @abstractmethod
    def run_stage(
        self,
        hidden: Tensor | None,
        tokens: Tensor,
        positions: Tensor | None,
        attention: AttentionInfo | None,
        layers: Iterable[int],
    ) -> Tensor:
        """Hidden states behind layers of these numbers. hidden: those before the first of them; None: it is layer 0.

        tokens, positions, attention: see `Decoder.forward`.
        """

    @abstractmethod
    def hidden_shape(self, tokens: torch.Size, ranks: int) -> tuple[int, ...]:
        """The shape of this rank's hidden states between layers, of tokens `[b, s]`; ranks: of its tensor parallel
        group. It may depend on whether gradients are wanted."""

    @abstractmethod
    def run_head(
        self, hidden: Tensor, tokens: Tensor, *, labels: Tensor | None = None, head_loss: HeadLoss | None = None
    ) -> Tensor:
        """What is behind the layers: logits, or the loss; see `Decoder.forward`. hidden: behind the last layer."""

    def note_built(self) -> None:
        """What it has now is its own: parameters and buffers that it is given later are extra."""
        names = [name for name, _ in self.named_parameters(remove_duplicate=False)]
        names += [name for name, _ in self.named_buffers(remove_duplicate=False)]
        self.own_tensors = frozenset(names)

    def note_computed_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Buffers have values of their own, besides those that are known already."""
        self.computed_buffers = {**self.computed_buffers, **values}

    def note_loaded_extras(self, names: Collection[str]) -> None:
        """Extra tensors have the values of a file."""
        self.loaded_extras = self.loaded_extras | frozenset(names)

    def note_runs(self, runs: Mapping[str, Runs]) -> None:
        """Parameters are cut within the matrices that they hold."""
        self.runs = dict(runs)

    def note_unwritten(self, marks: Mapping[str, WriteMark]) -> None:
        """Tensors have memory and no values yet."""
        self.unwritten = dict(marks)

    def note_on_host(self, names: Collection[str]) -> None:
        """Parameters are to lie in host memory."""
        self.on_host = frozenset(names)


def own_tensors(model: nn.Module) -> frozenset[str] | None:
    """The names of what a model was built with; None for one that `build_meta` did not make."""
    return model.own_tensors if isinstance(model, LanguageModel) else None


def is_external(model: nn.Module) -> bool:
    """Whether it is a model that the library does not implement itself."""
    return isinstance(model, LanguageModel) and isinstance(model.spec, ExternalSpec)


def modules_elsewhere(model: nn.Module) -> frozenset[str]:
    """The modules of the whole model that other ranks of a pipeline have."""
    return model.modules_elsewhere if isinstance(model, LanguageModel) else frozenset()
