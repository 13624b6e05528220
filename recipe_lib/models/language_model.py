"""What the library knows of a model's tensors besides their values, whoever wrote its forward."""

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
    """A causal language model, called as `Decoder.forward` is.

    spec: its shape. own_tensors: names of the parameters and buffers that it was built with,
    whatever is added or left out later; None before `note_built`. modules_elsewhere: those that
    other ranks of a pipeline have. other_parts: modules of a multimodal model that text does not
    run through. computed_buffers: name -> values on the host, of buffers that were computed as they
    were made. loaded_extras: extra tensors that were read from files. runs: of parameters whose
    parts on the ranks are not in the file's order. unwritten: the marks of tensors at the moment at
    which they were given memory. on_host: names of parameters in host memory, on the device while
    their module runs. compile_layer: compiles the layer of a name by a backend, where torch.compile
    of its forward would not do. base_weights: parameters of the base that an adapter's file brought
    others for, by name.
    """

    spec: Any
    built_tensors: frozenset[str] | None = None
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
    def find_stage_parts(self) -> StageParts:
        """Where it is cut into the stages of a pipeline. Raises ConfigError for a model that cannot
        be.
        """

    @abstractmethod
    def keep_stages(self, layers: Collection[int], *, first: bool, last: bool) -> None:
        """Leaves out what other ranks of a pipeline have: layers of other numbers, and unless it
        has the first or the last stage, what is before or behind the layers. A tied embedding is on
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
        """Hidden states behind layers of these numbers. hidden: those before the first of them;
        None: it is layer 0.

        tokens, positions, attention: see `Decoder.forward`.
        """

    @abstractmethod
    def compute_hidden_shape(self, tokens: torch.Size, ranks: int) -> tuple[int, ...]:
        """The shape of this rank's hidden states between layers, of tokens `[b, s]`; ranks: of its
        tensor parallel group. It may depend on whether gradients are wanted.
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
        """What is behind the layers: logits, or the loss; see `Decoder.forward`. hidden: behind the
        last layer.
        """

    def note_built(self) -> None:
        """What it has now is its own: parameters and buffers that it is given later are extra."""
        names = [name for name, _ in self.named_parameters(remove_duplicate=False)]
        names += [name for name, _ in self.named_buffers(remove_duplicate=False)]
        self.built_tensors = frozenset(names)


def hold_tied_weight(embedding: nn.Embedding) -> nn.Embedding:
    """Return what has the head's matrix under the embedding's name on a rank of a pipeline that
    embeds nothing.
    """
    holder = nn.Embedding(*embedding.weight.shape, device="meta")
    holder.weight = embedding.weight
    return holder


def get_built_tensors(model: nn.Module) -> frozenset[str] | None:
    """The names of what a model was built with; None for one that `build_meta` did not make."""
    return model.built_tensors if isinstance(model, LanguageModel) else None


def is_external(model: nn.Module) -> bool:
    """Whether it is a model that the library does not implement itself."""
    return isinstance(model, LanguageModel) and isinstance(model.spec, ExternalSpec)


def get_modules_elsewhere(model: nn.Module) -> frozenset[str]:
    """The modules of the whole model that other ranks of a pipeline have."""
    return model.modules_elsewhere if isinstance(model, LanguageModel) else frozenset()


# Where a model's layers are: the modules that sharding, checkpointing and compilation treat one by
# one.


def list_layer_names(model: nn.Module) -> list[str]:
    """Names of the layers: the elements with parameters of every outermost module list, in module
    order.
    """
    names: list[str] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(outer) for outer in lists):
            lists.append(f"{name}." if name else "")
            elements = module.named_children()  # by name: a part of a model may lack some
            names += [
                f"{lists[-1]}{index}"
                for index, element in elements
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
    """The runs of every parameter that is not in the file's order, by name."""
    return dict(model.runs) if isinstance(model, LanguageModel) else {}


def list_local_parts(
    model: nn.Module, name: str, parameter: Tensor
) -> list[tuple[Tensor, tuple[int, ...]]]:
    """This rank's part of a parameter in pieces, which share memory with it, and where each begins
    in the file.
    """
    local, offset = locate_local_part(parameter)
    found = get_runs(model).get(name)
    if found is None:
        return [(local, offset)]
    dim, runs = found
    pieces, at = [], -offset[dim]  # of a run, counted from where this rank's part begins
    for start, stop in runs:
        low, high = max(at, 0), min(at + stop - start, local.shape[dim])
        if low < high:
            begins: Any = (*offset[:dim], start + low - at, *offset[dim + 1 :])
            pieces.append((local.narrow(dim, low, high - low), begins))
        at += stop - start
    return pieces


def restore_file_order(whole: Tensor, found: Runs | None) -> Tensor:
    """A whole tensor, gathered from the ranks, whose runs follow one another (None: it is as the
    file has it), in the order of the file.
    """
    if found is None:
        return whole
    dim, runs = found
    result = whole.new_empty(whole.shape)
    at = 0
    for start, stop in runs:
        result.narrow(dim, start, stop - start).copy_(whole.narrow(dim, at, stop - start))
        at += stop - start
    return result


# Whether every parameter was given values, whoever gave them: a tensor counts how often it is
# written to.


def note_unwritten(model: LanguageModel) -> None:
    """Notes parameters and buffers as without values: right after they were given memory."""
    model.unwritten = {name: _get_write_mark(tensor) for name, tensor in _list_tensors(model)}


def check_written(model: nn.Module) -> None:
    """SetupError if a parameter or buffer still holds what its memory held before. Nothing without
    `note_unwritten`.

    What has been moved elsewhere since then is taken to be written.
    """
    before = model.unwritten if isinstance(model, LanguageModel) else {}
    left = [
        name
        for name, tensor in _list_tensors(model)
        if tensor.numel()
        and holds_values(tensor.device)
        and before.get(name) == _get_write_mark(tensor)
    ]
    if left:
        more = f" and {len(left) - 1} more have" if len(left) > 1 else " has"
        raise SetupError(
            f"{left[0]}{more} no values after load_weights; call load_weights or init_weights for a"
            " model's parameters, and init_adapters for adapters, or fill them there in place"
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
    """While it is entered, dicts (attributes, parameters or modules of a module) have these values
    for these keys.
    """
    changed = list(entries)
    before = [held[name] for held, name, _ in changed]
    try:
        for held, name, value in changed:
            held[name] = value
        yield
    finally:
        for (held, name, _), value in zip(changed, before, strict=True):
            held[name] = value
