"""Define the base class of all models, and read facts about a model's tensors.

`LanguageModel` is the base of our own `Decoder` and of models of other libraries. Pipelines run it
by its methods, in stages (consecutive layers on one rank). Loading, sharding and checkpoints read
its attributes, mostly by the functions below, which take any module.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.errors import SetupError
from recipe_lib.models.mixture import Routers
from recipe_lib.models.spec import ExternalSpec, StageParts
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.device import holds_values
from recipe_lib.ops.dtensor_shards import Runs, get_detached_local, locate_local_part
from recipe_lib.ops.head_losses import HeadLoss

# (address of this rank's part of a tensor, how often it was written to in place: `_version`)
WriteMark = tuple[int, int]
# Packages whose classes a `Decoder` is built of.
_OUR_PACKAGES = ("recipe_lib.", "torch.")


class LanguageModel(nn.Module):
    """A causal language model, called as `Decoder.forward` is.

    `abstractmethod` only marks the methods that a subclass has to define: nn.Module has no ABCMeta,
    which would enforce it.
    """

    # The model's shape as plain numbers, a `ModelSpec`.
    spec: Any
    # Names of the parameters and buffers that it was built with; None before `note_built`. Those
    # that a recipe adds later are extra tensors.
    built_tensors: frozenset[str] | None = None
    # Names of the modules that other ranks of a pipeline have, and this one has not.
    modules_elsewhere: frozenset[str] = frozenset()
    # Names of the modules of a multimodal model that text does not run through.
    other_parts: tuple[str, ...] = ()
    # Name -> values on the host, of buffers that their module computed when it was built.
    computed_buffers: Mapping[str, Tensor] = MappingProxyType({})
    # Names of the extra tensors that were read from files.
    loaded_extras: frozenset[str] = frozenset()
    # Name -> runs, of parameters whose parts on the ranks are not in the order of the checkpoint's
    # tensor; see `list_local_parts`.
    runs: Mapping[str, Runs] = MappingProxyType({})
    # Name of a weight -> name of the parameter that it is in another library's class, and in files.
    # Experts are modules here.
    tensor_names: Mapping[str, str] = MappingProxyType({})
    # Name -> mark of a tensor at the time it was given memory, for `check_written`.
    unwritten: Mapping[str, WriteMark] = MappingProxyType({})
    # Names of the parameters in host memory, which layer streaming copies to the device while their
    # module runs.
    on_host: frozenset[str] = frozenset()
    # `fn(layer name, backend)` compiles a layer, for models whose layers' forwards torch.compile
    # does not take as they are; None: it takes them.
    compile_layer: Callable[[str, Any], None] | None = None
    # The routers whose choices are counted in training.
    routers: Routers = Routers()
    # Name -> the base model's parameter, where an adapter's file has a whole parameter in its place
    # (PEFT's `modules_to_save`).
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

        hidden: the hidden states before the first of these layers; None: it is layer 0, and tokens
        are embedded. tokens: int64 `[b, s]`. positions: `[b, s]`; None: 0, 1, ... in each row.
        attention: the documents of each row; None: a row is one document. layers: their indices in
        the whole model, in order.
        """

    @abstractmethod
    def compute_hidden_shape(self, tokens: torch.Size, ranks: int) -> tuple[int, ...]:
        """Return the shape of this rank's hidden states between layers, of tokens `[b, s]`.

        ranks: the size of its tensor-parallel group. Call it with gradients enabled or disabled as
        the model will run: some models divide tokens over these ranks in training alone.
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

        tokens: int64 `[b, s]`. labels: `[b, s]`, the token after each; -100 does not count.
        head_loss: computes the loss of hidden states and labels; None: summed cross-entropy.
        """

    def note_built(self) -> None:
        """Record the present tensors as the model's own: those that are added later are extra."""
        self.built_tensors = frozenset(name for name, _ in iterate_tensors(self))


def iterate_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all parameters and buffers, shared ones under each name."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def hold_tied_weight(embedding: nn.Embedding) -> nn.Embedding:
    """Return a module that has the output head's tied weight under the embedding's name.

    It is for the last rank of a pipeline, which has the head and does not embed.
    """
    holder = nn.Embedding(*embedding.weight.shape, device="meta")
    holder.weight = embedding.weight
    return holder


def get_built_tensors(model: nn.Module) -> frozenset[str] | None:
    """Return the names of a model's own tensors; None if `note_built` was not called on it."""
    return model.built_tensors if isinstance(model, LanguageModel) else None


def is_external(model: nn.Module) -> bool:
    """Return True for a model whose forward is another library's."""
    return isinstance(model, LanguageModel) and isinstance(model.spec, ExternalSpec)


def find_own_forwards(model: nn.Module) -> list[str]:
    """Return the names of the modules that a recipe has given another forward.

    It is a module's alone, or that of a recipe's class. Of an external model, which has classes of
    another library, only forwards of single modules are found.
    """
    return [
        name
        for name, module in model.named_modules()
        if "forward" in vars(module)
        or not (is_external(model) or type(module).forward.__module__.startswith(_OUR_PACKAGES))
    ]


def get_modules_elsewhere(model: nn.Module) -> frozenset[str]:
    """Return the names of the modules that other ranks of a pipeline have and this one has not."""
    return model.modules_elsewhere if isinstance(model, LanguageModel) else frozenset()


def get_tensor_names(model: nn.Module) -> Mapping[str, str]:
    """Return name of a weight -> that of its parameter in the model's class, where they differ."""
    return model.tensor_names if isinstance(model, LanguageModel) else {}


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
# Some matrices are made of several (queries, keys and values, or gate and up). Tensor parallelism
# cuts each of these by itself, so that the ranks' parts, one after the other, are not in the order
# of the checkpoint's tensor. For such a parameter `LanguageModel.runs` has the dimension that is
# cut, and runs `(start, stop)` of the checkpoint's tensor in the order of the ranks' parts.


def get_runs(model: nn.Module) -> dict[str, Runs]:
    """Return name -> runs, of the parameters that are not in the checkpoint's order."""
    return dict(model.runs) if isinstance(model, LanguageModel) else {}


def list_local_parts(
    model: nn.Module, name: str, parameter: Tensor
) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Return this rank's part of a parameter, in pieces with offsets in the checkpoint's tensor.

    An offset has an index for each dimension. The pieces share memory with the parameter. There is
    one if the parameter is in the checkpoint's order.
    """
    local, offset = locate_local_part(parameter)
    parameter_runs = get_runs(model).get(name)
    if parameter_runs is None:
        return [(local, offset)]
    dim, runs = parameter_runs
    pieces = []
    begin = -offset[dim]  # where a run begins, counted from the beginning of this rank's part
    for start, stop in runs:
        low = max(begin, 0)
        high = min(begin + stop - start, local.shape[dim])
        if low < high:
            file_offset: Any = (*offset[:dim], start + low - begin, *offset[dim + 1 :])
            pieces.append((local.narrow(dim, low, high - low), file_offset))
        begin += stop - start
    return pieces


def restore_file_order(gathered: Tensor, parameter_runs: Runs | None) -> Tensor:
    """Return a full tensor, gathered from the ranks, in the checkpoint's order.

    parameter_runs: of the parameter, from `get_runs`; None: it is in that order already.
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


# A check that every parameter was given values, by whatever code. A tensor's `_version` counts how
# often it is written to in place.


def note_unwritten(model: LanguageModel) -> None:
    """Record all parameters and buffers as without values; called once they have memory."""
    model.unwritten = {name: _get_write_mark(tensor) for name, tensor in _list_tensors(model)}


def check_written(model: nn.Module) -> None:
    """Raise SetupError if a parameter or buffer still holds what its memory held before.

    It checks nothing if `note_unwritten` was not called.
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
        rest = f" and {len(unwritten) - 1} more have" if len(unwritten) > 1 else " has"
        raise SetupError(
            f"{unwritten[0]}{rest} no values after load_weights; call load_weights or init_weights"
            " for a model's parameters, and init_adapters for adapters, or fill them there in place"
        )


def _list_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return (name, this rank's part) of all parameters and buffers."""
    return [
        (name, get_detached_local(tensor))
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]


def _get_write_mark(tensor: Tensor) -> WriteMark:
    return tensor.data_ptr(), tensor._version


Entry = tuple[dict[str, Any], str, Any]  # (a dict, a key in it, its value inside the block)


def mix_in(mixin: type, module: nn.Module) -> None:
    """Put a mixin's methods before those of a module's class, in place.

    The class keeps its name, by which its source is found.
    """
    base: Any = type(module)
    module.__class__ = combine_classes(mixin, base)


@cache  # so that alike modules have one class
def combine_classes(mixin: Any, base: Any) -> Any:
    """Return a class with a mixin's methods before those of a class, whose name it keeps."""
    return type(base.__name__, (mixin, base), {"__module__": base.__module__})


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
