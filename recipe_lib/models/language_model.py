"""The base of all models, and facts about their tensors, whoever wrote the forward.

`LanguageModel` is the base of our own decoder and of models of other libraries: how they are run in
stages, and what loading, sharding and checkpoints read of their tensors besides values.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.errors import SetupError
from recipe_lib.models.spec import ExternalSpec, StageParts
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.device import holds_values
from recipe_lib.ops.dtensor_shards import Runs, get_detached_local, locate_local_part
from recipe_lib.ops.head_losses import HeadLoss

# Where this rank's part of a tensor lies, and how often it was written to in place.
WriteMark = tuple[int, int]


class LanguageModel(nn.Module):
    """A causal language model, called as `Decoder.forward` is."""

    # its shape
    spec: Any
    # names of the parameters and buffers that it was built with, whatever is added or left out
    # later; None before `note_built`
    built_tensors: frozenset[str] | None = None
    # modules that other ranks of a pipeline have
    modules_elsewhere: frozenset[str] = frozenset()
    # modules of a multimodal model that text does not run through
    other_parts: tuple[str, ...] = ()
    # name -> values on the host, of buffers that were computed as they were made
    computed_buffers: Mapping[str, Tensor] = MappingProxyType({})
    # extra tensors that were read from files
    loaded_extras: frozenset[str] = frozenset()
    # of parameters whose parts on the ranks are not in the file's order
    runs: Mapping[str, Runs] = MappingProxyType({})
    # the marks of tensors at the moment at which they were given memory
    unwritten: Mapping[str, WriteMark] = MappingProxyType({})
    # names of parameters in host memory, on the device while their module runs
    on_host: frozenset[str] = frozenset()
    # compiles the layer of a name by a backend, where torch.compile of its forward would not do
    compile_layer: Callable[[str, Any], None] | None = None
    # name -> parameter of the base that an adapter's file brought another one for
    base_weights: Mapping[str, nn.Parameter] = MappingProxyType({})

    @abstractmethod
    def find_stage_parts(self) -> StageParts:
        """Return where it is cut into the stages of a pipeline.

        Raises ConfigError for a model that cannot be.
        """

    @abstractmethod
    def keep_stages(self, layers: Collection[int], *, first: bool, last: bool) -> None:
        """Leave out what other ranks of a pipeline have.

        layers: the numbers of those that stay. first, last: it has the first or the last stage, so
        that what is before or behind the layers stays too. A tied embedding is on both.
        """

    @abstractmethod
    def run_stage(
        self,
        hidden: Tensor | None,
        tokens: Tensor,
        positions: Tensor | None,
        attention: AttentionInfo | None,
        layers: Iterable[int],
    ) -> Tensor:
        """Return hidden states behind the layers of these numbers.

        hidden: those before the first of them; None: it is layer 0. tokens, positions, attention:
        see `Decoder.forward`.
        """

    @abstractmethod
    def compute_hidden_shape(self, tokens: torch.Size, ranks: int) -> tuple[int, ...]:
        """Return the shape of this rank's hidden states between layers, of tokens `[b, s]`.

        ranks: of its tensor-parallel group. The shape may depend on whether gradients are wanted.
        """

    @abstractmethod
    def run_head(
        self,
        hidden: Tensor,
        tokens: Tensor,
        *,
        labels: Tensor | None = None,
        head_loss: HeadLoss | None = None,
    ) -> Tensor:
        """Return logits, or the loss, see `Decoder.forward`; hidden: behind the last layer."""

    def note_built(self) -> None:
        """Note what it has now as its own: what it is given later is extra."""
        names = [name for name, _ in self.named_parameters(remove_duplicate=False)]
        names += [name for name, _ in self.named_buffers(remove_duplicate=False)]
        self.built_tensors = frozenset(names)


def hold_tied_weight(embedding: nn.Embedding) -> nn.Embedding:
    """Return a module that has the head's matrix under the embedding's name.

    For a rank of a pipeline that embeds nothing.
    """
    holder = nn.Embedding(*embedding.weight.shape, device="meta")
    holder.weight = embedding.weight
    return holder


def get_built_tensors(model: nn.Module) -> frozenset[str] | None:
    """Return names of what a model was built with; None for one that `build_meta` did not make."""
    return model.built_tensors if isinstance(model, LanguageModel) else None


def is_external(model: nn.Module) -> bool:
    """Return True if it is a model that the library does not implement itself."""
    return isinstance(model, LanguageModel) and isinstance(model.spec, ExternalSpec)


def get_modules_elsewhere(model: nn.Module) -> frozenset[str]:
    """Return the modules of the whole model that other ranks of a pipeline have."""
    return model.modules_elsewhere if isinstance(model, LanguageModel) else frozenset()


# Where a model's layers are: the modules that sharding, checkpointing and compilation treat one by
# one.


def list_layer_names(model: nn.Module) -> list[str]:
    """Return the names of the layers, in module order.

    They are the elements with parameters of every outermost module list.
    """
    names: list[str] = []
    list_prefixes: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(tuple(list_prefixes)):
            prefix = f"{name}." if name else ""
            list_prefixes.append(prefix)
            # By name, not by index: a rank of a pipeline may lack some.
            names += [
                prefix + element_name
                for element_name, element in module.named_children()
                if next(element.parameters(), None) is not None
            ]
    return names


# This rank's part of a model's parameters, in the order of the checkpoint's tensors.
#
# Tensor parallel cuts a matrix that holds several others (queries, keys and values, gate and up)
# within each of them, so that the ranks' parts one after the other are not in the file's order.
# `LanguageModel.runs` says of such a parameter along which dimension, and which runs `(start,
# stop)` of the file follow one another.


def get_runs(model: nn.Module) -> dict[str, Runs]:
    """Return the runs of every parameter that is not in the file's order, by name."""
    return dict(model.runs) if isinstance(model, LanguageModel) else {}


def list_local_parts(
    model: nn.Module, name: str, parameter: Tensor
) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Return this rank's part of a parameter in pieces, and where each begins in the file.

    The pieces share memory with the parameter.
    """
    local, offset = locate_local_part(parameter)
    parameter_runs = get_runs(model).get(name)
    if parameter_runs is None:
        return [(local, offset)]
    dim, runs = parameter_runs
    pieces = []
    begin = -offset[dim]  # of a run, counted from where this rank's part begins
    for start, stop in runs:
        low = max(begin, 0)
        high = min(begin + stop - start, local.shape[dim])
        if low < high:
            file_offset: Any = (*offset[:dim], start + low - begin, *offset[dim + 1 :])
            pieces.append((local.narrow(dim, low, high - low), file_offset))
        begin += stop - start
    return pieces


def restore_file_order(gathered: Tensor, parameter_runs: Runs | None) -> Tensor:
    """Return a full tensor, gathered from the ranks, in the order of the file.

    parameter_runs: those that follow one another in it; None: it is as the file has it.
    """
    if parameter_runs is None:
        return gathered
    dim, runs = parameter_runs
    ordered = gathered.new_empty(gathered.shape)
    begin = 0
    for start, stop in runs:
        length = stop - start
        ordered.narrow(dim, start, length).copy_(gathered.narrow(dim, begin, length))
        begin += length
    return ordered


# Whether every parameter was given values, whoever gave them: a tensor counts how often it is
# written to.


def note_unwritten(model: LanguageModel) -> None:
    """Note parameters and buffers as without values: right after they were given memory."""
    model.unwritten = {name: _get_write_mark(tensor) for name, tensor in _list_tensors(model)}


def check_written(model: nn.Module) -> None:
    """Check that no parameter or buffer still holds what its memory held before.

    Raises SetupError. It checks nothing without `note_unwritten`.
    """
    marks = model.unwritten if isinstance(model, LanguageModel) else {}
    # What has been moved elsewhere since then has another mark, and is taken to be written.
    unwritten = [
        name
        for name, tensor in _list_tensors(model)
        if marks.get(name) == _get_write_mark(tensor)
        and tensor.numel()
        and holds_values(tensor.device)
    ]
    if unwritten:
        more = f" and {len(unwritten) - 1} more have" if len(unwritten) > 1 else " has"
        raise SetupError(
            f"{unwritten[0]}{more} no values after load_weights; call load_weights or init_weights"
            " for a model's parameters, and init_adapters for adapters, or fill them there in place"
        )


def _list_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (name, get_detached_local(tensor))
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]


def _get_write_mark(tensor: Tensor) -> WriteMark:
    return tensor.data_ptr(), tensor._version


# What modules hold, exchanged for a while.


Entry = tuple[dict[str, Any], str, Any]  # a dict, a key of it, and a value


@contextmanager
def replace_entries(entries: Iterable[Entry]) -> Iterator[None]:
    """Inside, dicts have these values for these keys.

    The dicts are attributes, parameters or modules of a module.
    """
    changes = list(entries)
    previous = [entry_dict[key] for entry_dict, key, _ in changes]
    try:
        for entry_dict, key, value in changes:
            entry_dict[key] = value
        yield
    finally:
        for (entry_dict, key, _), value in zip(changes, previous, strict=True):
            entry_dict[key] = value
