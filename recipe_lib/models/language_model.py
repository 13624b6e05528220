"""The base class of all models, and functions that read facts about a model's tensors.

`LanguageModel` is the base of our own `Decoder` and of models of other libraries. Pipelines run it
in stages by its methods; loading, sharding and checkpoints read its attributes, mostly by the
functions below, which also take a module that is no `LanguageModel`.
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

# (address of this rank's part of a tensor, how often it was written to in place)
WriteMark = tuple[int, int]


class LanguageModel(nn.Module):
    """A causal language model, called as `Decoder.forward` is."""

    # The model's shape, a `ModelSpec`.
    spec: Any
    # Names of the parameters and buffers that it was built with, whatever is added or removed
    # later; None before `note_built`.
    built_tensors: frozenset[str] | None = None
    # Names of the modules that other ranks of a pipeline have, and this one has not.
    modules_elsewhere: frozenset[str] = frozenset()
    # Names of the modules of a multimodal model that text does not run through.
    other_parts: tuple[str, ...] = ()
    # Name -> values on the host, of buffers that their module computed when it was built.
    computed_buffers: Mapping[str, Tensor] = MappingProxyType({})
    # Names of the extra tensors, those added to a built model, that were read from files.
    loaded_extras: frozenset[str] = frozenset()
    # Name -> runs, of parameters whose parts on the ranks are not in the file's order.
    runs: Mapping[str, Runs] = MappingProxyType({})
    # Name -> mark of a tensor when it was given memory, for `check_written`.
    unwritten: Mapping[str, WriteMark] = MappingProxyType({})
    # Names of the parameters in host memory, which are on the device while their module runs.
    on_host: frozenset[str] = frozenset()
    # `fn(layer name, backend)` compiles a layer, where torch.compile of its forward would not do.
    compile_layer: Callable[[str, Any], None] | None = None
    # Name -> the base model's parameter, where an adapter's file had another one in its place.
    base_weights: Mapping[str, nn.Parameter] = MappingProxyType({})

    @abstractmethod
    def find_stage_parts(self) -> StageParts:
        """Return the names of the parts that pipeline stages are made of.

        Raises ConfigError for a model that cannot be cut into stages.
        """

    @abstractmethod
    def keep_stages(self, layers: Collection[int], *, first: bool, last: bool) -> None:
        """Remove the modules that other ranks of a pipeline have, in place.

        layers: indices of the layers that stay. first, last: True if this rank has the first or the
        last stage, so that the parts before or after the layers stay too. A tied embedding is on
        both.
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
        """Run layers, and return the hidden states after the last of them.

        hidden: the hidden states before the first; None: it is layer 0, and tokens are embedded.
        tokens, positions, attention: see `Decoder.forward`. layers: their indices, in order.
        """

    @abstractmethod
    def compute_hidden_shape(self, tokens: torch.Size, ranks: int) -> tuple[int, ...]:
        """Return the shape of this rank's hidden states between layers, of tokens `[b, s]`.

        ranks: the size of its tensor-parallel group. The shape may depend on whether gradients are
        enabled.
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
        """Return logits, or with labels the loss, of the hidden states after the last layer.

        Arguments: see `Decoder.forward`.
        """

    def note_built(self) -> None:
        """Note the present tensors as the model's own: those that are added later are extra."""
        names = [name for name, _ in self.named_parameters(remove_duplicate=False)]
        names += [name for name, _ in self.named_buffers(remove_duplicate=False)]
        self.built_tensors = frozenset(names)


def hold_tied_weight(embedding: nn.Embedding) -> nn.Embedding:
    """Return a module that has the output head's tied weight under the embedding's name.

    It is for the last rank of a pipeline, which has the head and does not embed.
    """
    holder = nn.Embedding(*embedding.weight.shape, device="meta")
    holder.weight = embedding.weight
    return holder


def get_built_tensors(model: nn.Module) -> frozenset[str] | None:
    """Return the names of a model's own tensors; None for one that `build_meta` did not make."""
    return model.built_tensors if isinstance(model, LanguageModel) else None


def is_external(model: nn.Module) -> bool:
    """Return True for a model whose forward is another library's."""
    return isinstance(model, LanguageModel) and isinstance(model.spec, ExternalSpec)


def get_modules_elsewhere(model: nn.Module) -> frozenset[str]:
    """Return the names of the modules that other ranks of a pipeline have."""
    return model.modules_elsewhere if isinstance(model, LanguageModel) else frozenset()


# A model's layers: the modules that sharding, checkpointing and compilation treat one by one.


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
            # By name, not by index: on a rank of a pipeline the list lacks some layers.
            names += [
                prefix + element_name
                for element_name, element in module.named_children()
                if next(element.parameters(), None) is not None
            ]
    return names


# This rank's part of a model's parameters, in the order of the checkpoint's tensors.
#
# Tensor parallelism cuts a matrix that is made of several (queries, keys and values, or gate and
# up) within each of them, so that the ranks' parts one after the other are not in the file's order.
# `LanguageModel.runs` has for such a parameter the dimension, and the runs `(start, stop)` of the
# file's tensor in the order in which the parts of all ranks have them.


def get_runs(model: nn.Module) -> dict[str, Runs]:
    """Return the runs of the parameters that are not in the file's order, by name."""
    return dict(model.runs) if isinstance(model, LanguageModel) else {}


def list_local_parts(
    model: nn.Module, name: str, parameter: Tensor
) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Return this rank's part of a parameter in pieces, each with its offset in the file's tensor.

    The pieces share memory with the parameter; there is one if the order is the file's.
    """
    local, offset = locate_local_part(parameter)
    parameter_runs = get_runs(model).get(name)
    if parameter_runs is None:
        return [(local, offset)]
    dim, runs = parameter_runs
    pieces = []
    begin = -offset[dim]  # of a run, relative to the begin of this rank's part
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

    parameter_runs: of its parameter; None: it is in that order already.
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


# A check that every parameter was given values, by whatever code: a tensor counts in its version
# how often it is written to.


def note_unwritten(model: LanguageModel) -> None:
    """Note all parameters and buffers as without values; call it when they were given memory."""
    model.unwritten = {name: _get_write_mark(tensor) for name, tensor in _list_tensors(model)}


def check_written(model: nn.Module) -> None:
    """Check that no parameter or buffer still holds what its memory held before.

    Raises SetupError. It checks nothing without `note_unwritten`.
    """
    marks = model.unwritten if isinstance(model, LanguageModel) else {}
    # A tensor that has been moved since then has another address, and is taken to be written.
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


# Attributes, parameters or modules of modules, replaced inside a block.


Entry = tuple[dict[str, Any], str, Any]  # (a dict, a key in it, its value inside the block)


@contextmanager
def replace_entries(entries: Iterable[Entry]) -> Iterator[None]:
    """Give keys of dicts other values inside the block, and restore them after it.

    The dicts are a module's `__dict__`, `_parameters` or `_modules`.
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
