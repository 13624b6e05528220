"""Weights of the base that an adapter's file brings along: PEFT puts them in the place of the
base's own.

PEFT saves whole tensors (`modules_to_save`, trained biases, the embedding and head of a resized
vocabulary), rows of some tokens (`trainable_token_indices`), and with `lora_bias` a bias of B,
which is added to the base's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.adapters.peft_names import (
    EMBEDDING,
    EMBEDDING_A,
    HEAD,
    LORA_B,
    MAGNITUDE,
    PREFIX,
    build_file_modules,
    get_extra_name,
)
from recipe_lib.checkpoint.safetensors_files import TensorEntry, have_same_numbers
from recipe_lib.checkpoint.tensor_matching import compute_file_shapes
from recipe_lib.errors import CheckpointError, raise_faults
from recipe_lib.models.families import has_score_head
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.models.meta_init import find_stored_weights
from recipe_lib.models.spec import SCORE, ExternalSpec, ModelSpec
from recipe_lib.models.weight_names import (
    WeightEntry,
    build_weight_map,
    compute_parameter_shapes,
    get_buffer_names,
    get_router_name,
)
from recipe_lib.units import name_first

EMBEDDING_WEIGHT, HEAD_WEIGHT = f"{EMBEDDING}.weight", f"{HEAD}.weight"
VOCABULARY = {EMBEDDING_WEIGHT, HEAD_WEIGHT}
# What follows a module's name -> what follows it in the base, and the field of SavedTensor. The
# first that fits counts.
_ENDINGS = {
    ".token_adapter.trainable_tokens_delta": (
        ".weight",
        "rows",
    ),  # rows themselves, not what is added to them
    ".token_adapter.base_layer.weight": (".weight", "frozen"),
    ".modules_to_save.weight": (
        ".weight",
        "again",
    ),  # these two stand beside the weight of a resized vocabulary, which
    ".original_module.weight": (".weight", "again"),  # PEFT then saves three times
    ".lora_B.bias": (".bias", "added"),
    ".base_layer.bias": (".bias", "copy"),
    ".base_layer.weight": (".weight", "frozen"),
}
FileTensorName = tuple[str, TensorEntry]


@dataclass(frozen=True)
class SavedTensor:
    """What a file has of one tensor of the base; each is its name there and its header, None: it is
    not there.
    """

    copy: FileTensorName | None = None  # in the base's place
    frozen: FileTensorName | None = None  # a copy that PEFT saves though it was not trained
    rows: FileTensorName | None = None  # `[tokens, m]`, those of some tokens
    added: FileTensorName | None = None  # a bias of B, added to the base's
    again: FileTensorName | None = None  # the copy once more, or the base's own beside it


def add_saved(saved: dict[str, SavedTensor], name: str, entry: TensorEntry) -> bool:
    """Add a tensor that is no adapter's under the base's name for it; False: it cannot be one of
    the base.
    """
    if not name.startswith(PREFIX):
        return False
    ending = next((ending for ending in _ENDINGS if name.endswith(ending)), "")
    if not ending and "lora_" in name:
        return False
    base_ending, kind = _ENDINGS.get(ending, ("", "copy"))
    base_name = get_extra_name(name.removesuffix(ending) + base_ending)
    before = saved.get(base_name, SavedTensor())
    if kind != "again" and getattr(before, kind) is not None:
        return False  # two tensors for one
    saved[base_name] = replace(before, **{kind: (name, entry)})
    return True


@dataclass(frozen=True)
class SavedWeights:
    """The saved tensors of an adapter by the parameters of the model that they are for."""

    path: Path  # of the file
    # Of the base with them: they may resize its vocabulary, and tell its embedding and head apart.
    spec: ModelSpec
    # Our parameter -> what is saved of it, and the row of that where it begins.
    parts: Mapping[str, tuple[SavedTensor, int]] = field(default_factory=dict)
    # Our parameter -> the tokens whose rows are saved, in the order of the rows.
    token_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # Our bias -> what the bias that is added to it is multiplied with.
    scalings: Mapping[str, float] = field(default_factory=dict)

    def read_rows(
        self, name: str, start: int, stop: int, read_base: Callable[[], Tensor]
    ) -> Tensor:
        """Return rows `[start, stop)` of a parameter as the adapter has them. read_base: returns
        the base's.
        """
        if name == HEAD_WEIGHT and getattr(self.spec, "tied", False):
            name = EMBEDDING_WEIGHT
        if name not in self.parts:
            return read_base()
        tensor, offset = self.parts[name]
        whole = tensor.copy is not None and not tensor.copy[1].shape  # a number has no rows
        in_file = ... if whole else slice(offset + start, offset + stop)
        with safe_open(str(self.path), framework="pt") as file:
            rows = read_base() if tensor.copy is None else file.get_slice(tensor.copy[0])[in_file]
            if tensor.rows is not None:
                rows = rows.clone()  # they may be the base's own
                for number, row in enumerate(self.token_rows[name]):
                    if start <= row < stop:
                        rows[row - start] = file.get_slice(tensor.rows[0])[number].to(rows)
            if tensor.added is not None:
                rows = (
                    rows + file.get_slice(tensor.added[0])[in_file].to(rows) * self.scalings[name]
                )
        return rows

    @torch.no_grad()
    def put_into(self, model: LanguageModel) -> None:
        """Give the model these weights, and keep the base's for `adapters_off`. It is whole, on one
        device.

        Raises CheckpointError for a model that ranks share, and for a weight that is kept in 4 or 8
        bits.
        """
        if not self.parts:
            return
        base: dict[str, nn.Parameter] = {}
        shapes = compute_parameter_shapes(self.spec)
        stored = find_stored_weights(model)
        for name in self.parts:
            if name in stored:
                raise CheckpointError(
                    f"{self.path}: {name} is saved as a whole, and cannot be kept in 4 or 8 bits;"
                    " use --quantize-base none, or merge the adapter first (tune export --merge)"
                )
            parameter = model.get_parameter(name)
            if isinstance(parameter, DTensor):
                raise CheckpointError(
                    f"{self.path}: brings {name} along, which ranks cannot share; merge the adapter"
                    " first (tune export --merge), or use one process"
                )
            num_rows = shapes[name][0] if shapes[name] else 1
            rows = self.read_rows(name, start=0, stop=num_rows, read_base=parameter.cpu)
            new = rows.to(parameter, copy=True)
            before = new.clone()  # of rows that the base has not got, the adapter's
            common = slice(min(len(parameter), len(new))) if parameter.dim() else ...
            before[common] = parameter[common]
            base[name] = nn.Parameter(before, requires_grad=False)
            _set_weight(model, name, new)
        if self.spec.tied and EMBEDDING_WEIGHT in base:
            base[HEAD_WEIGHT] = base[EMBEDDING_WEIGHT]
            _set_weight(model, HEAD_WEIGHT, model.get_parameter(EMBEDDING_WEIGHT))
        model.spec = self.spec
        model.base_weights = base


def _set_weight(model: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter, and make room in the adapter of a matrix with another number of rows."""
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    is_resized = owner.get_parameter(leaf).shape != value.shape
    setattr(
        owner,
        leaf,
        value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False),
    )
    if not is_resized:
        return
    row_dims = {
        EMBEDDING_A: 1,
        LORA_B: 0,
    }  # of the adapter's tensors, the dimension that is the matrix's rows
    if name != EMBEDDING_WEIGHT:
        row_dims[MAGNITUDE] = 0
    for inner_name, adapter in list(owner.named_parameters()):
        if inner_name in row_dims:
            shape = list(adapter.shape)
            shape[row_dims[inner_name]] = len(value)
            inner_owner, _, inner_leaf = inner_name.rpartition(".")
            room = nn.Parameter(adapter.new_zeros(shape), requires_grad=adapter.requires_grad)
            setattr(owner.get_submodule(inner_owner), inner_leaf, room)


# The saved weights in an adapter's file beside a base: of which tensors, of what shape, and what
# stays tied.


if TYPE_CHECKING:
    from recipe_lib.checkpoint.adapter_files import AdapterFile

_REMEDY = "merge the adapter with PEFT first (merge_and_unload)"
_DOWNLOAD = "export or download the adapter again"
_NOTHING = SavedTensor()


@dataclass(frozen=True)
class _BaseTensor:
    """A tensor of the base under the name that PEFT has for it: our parameters in it, and its
    shape.
    """

    entries: tuple[WeightEntry, ...]
    shape: tuple[int, ...]


def find_saved(adapter: "AdapterFile", base: ModelSpec) -> SavedWeights:
    """Return what an adapter's file has of the weights of a base. Raises CheckpointError, all
    faults at once.

    base: the spec of the base as it is. A name that the base lacks, another shape, and what the
    config says otherwise are refused.
    """
    if not (
        adapter.saved or adapter.config.saved or adapter.config.token_rows or adapter.config.biases
    ):
        return SavedWeights(adapter.path, base)
    base_tensors = _list_base_tensors(base)
    saved = _drop_untrained(adapter, base_tensors)
    faults = [
        *_list_name_faults(adapter, base, base_tensors),
        _find_misfit(adapter, saved, base_tensors, can_resize=not isinstance(base, ExternalSpec)),
        *_list_missing(adapter, saved, base_tensors),
    ]
    raise_faults(CheckpointError, faults)
    saved, spec = _settle_vocabulary(adapter, saved, base)
    modules = build_file_modules(base)
    parts: dict[str, tuple[SavedTensor, int]] = {}
    token_rows: dict[str, tuple[int, ...]] = {}
    scalings: dict[str, float] = {}
    for name, tensor in saved.items():
        for entry in base_tensors[name].entries:
            parts[entry.our_name] = (tensor, entry.start)
            if tensor.rows is not None:
                token_rows[entry.our_name] = _find_token_rows(adapter, name) or ()
            if tensor.added is not None:
                scalings[entry.our_name] = adapter.config.compute_scaling(
                    modules[name.removesuffix(".bias")]
                )
    return SavedWeights(
        path=adapter.path, spec=spec, parts=parts, token_rows=token_rows, scalings=scalings
    )


def _list_base_tensors(base: ModelSpec) -> dict[str, _BaseTensor]:
    """Return what may be saved of a base, by PEFT's names."""
    if isinstance(base, ExternalSpec):
        shapes = compute_parameter_shapes(base)
        names = shapes.keys() - get_buffer_names(base)
        return {name: _BaseTensor((WeightEntry(name, name),), shapes[name]) for name in names}
    spec = base if has_score_head(base) else replace(base, tied=False)
    entries = [
        entry for entry in build_weight_map(spec) if entry.view is None and entry.our_name != SCORE
    ]
    shapes = compute_file_shapes(entries, compute_parameter_shapes(spec))
    base_tensors: dict[str, _BaseTensor] = {}
    for entry in entries:
        name = entry.file_name
        if (
            ".mlp.router." in entry.our_name
        ):  # PEFT has the name of the module, files may have an older one
            name = entry.our_name.replace(".mlp.router.", f".mlp.{get_router_name(spec)}.")
        before = base_tensors[name].entries if name in base_tensors else ()
        base_tensors[name] = _BaseTensor((*before, entry), shapes[entry.file_name])
    return base_tensors


def _drop_untrained(
    adapter: "AdapterFile", base_tensors: Mapping[str, _BaseTensor]
) -> dict[str, SavedTensor]:
    """Return what changes the base: of the copies that PEFT saves untrained, those with another
    number of rows.
    """
    changing = {}
    for name, tensor in adapter.saved.items():
        frozen = tensor.frozen if name in base_tensors else None
        if frozen is not None and frozen[1].shape != base_tensors[name].shape:
            tensor = replace(tensor, copy=tensor.copy or frozen)
        if tensor.copy or tensor.rows or tensor.added:
            changing[name] = tensor
    return changing


def _list_name_faults(
    adapter: "AdapterFile", base: ModelSpec, base_tensors: Mapping[str, _BaseTensor]
) -> list[str]:
    """Return what is wrong with the names of the tensors that are saved, a line for each kind of
    fault.
    """
    faults: list[str] = []
    unknown: list[str] = []
    homeless: list[str] = []
    tied = base.layout().tied_names() if isinstance(base, ExternalSpec) else set()
    for name, tensor in sorted(adapter.saved.items()):
        parts = (tensor.copy, tensor.rows, tensor.added, tensor.frozen, tensor.again)
        file_name = next(part for part in parts if part)[0]
        if tensor.added is not None and name not in base_tensors:
            homeless.append(file_name)
        elif name in tied and (tensor.copy or tensor.rows):
            faults.append(
                f"{adapter.path}: {file_name} is one of two tied matrices of the base; {_REMEDY}"
            )
        elif name not in base_tensors or not _is_where_peft_looks(adapter, name, tensor):
            unknown.append(file_name)
    if homeless:
        faults.append(
            f"{adapter.path}: {homeless[0]} is a bias of an adapter (lora_bias), and that linear of"
            " the base has none to take it up, in PEFT's merge either; use it with PEFT as it is,"
            " or train one with lora_bias=False"
        )
    if unknown:
        faults.append(
            f"{adapter.path}: {name_first(unknown, 'is', 'are')} no tensor of a LoRA or DoRA"
            " adapter, nor a weight of this base that can be replaced; expected names such as"
            " base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        )
    return faults


def _is_where_peft_looks(adapter: "AdapterFile", name: str, tensor: SavedTensor) -> bool:
    """Return whether a copy has the name that it has beside an adapter, or the plain one where
    there is none.
    """
    if tensor.copy is None:
        return tensor.again is None
    return (".base_layer." in tensor.copy[0]) == (name.rpartition(".")[0] in adapter.tensors)


def _find_misfit(
    adapter: "AdapterFile",
    saved: Mapping[str, SavedTensor],
    base_tensors: Mapping[str, _BaseTensor],
    can_resize: bool,
) -> str | None:
    """Return what is wrong with the first tensor of another shape than expected; the others have
    the same cause.

    can_resize: the vocabulary can have another size.
    """
    for name in sorted(saved.keys() & base_tensors.keys()):
        tensor = saved[name]
        shape = base_tensors[name].shape
        tokens = _find_token_rows(adapter, name) or ()
        new_shape = shape
        if can_resize and name in VOCABULARY and tensor.copy is not None and tensor.copy[1].shape:
            new_shape = (tensor.copy[1].shape[0], *shape[1:])
        expected_shapes = (
            (tensor.copy, new_shape),
            (tensor.added, shape),
            (tensor.rows, (len(tokens), *shape[1:])),
        )
        for part, expected_shape in expected_shapes:
            if part is not None and part[1].shape != expected_shape:
                return (
                    f"{adapter.path}: {part[0]} has shape {list(part[1].shape)}, base and"
                    f" adapter_config.json make it {list(expected_shape)}; the adapter was made for"
                    " another base"
                )
        # PEFT leaves the bias of such a linear out (0.21): no merged weights compute what was
        # trained.
        has_bias = name.removesuffix("weight") + "bias" in base_tensors
        if tensor.rows is not None and (has_bias or len(base_tensors[name].entries) > 1):
            return (
                f"{adapter.config.path}: trainable_token_indices: found rows of {name}, which"
                f" {'has a bias' if has_bias else 'is several matrices here'}; expected those of"
                " the embedding or of a head without a bias"
            )
        num_rows = new_shape[0] if new_shape else 0
        if tensor.rows is not None and tokens and max(tokens) >= num_rows:
            return (
                f"{adapter.config.path}: trainable_token_indices: found {max(tokens)}, expected"
                f" numbers below {num_rows}, the rows of {name}; {_DOWNLOAD}"
            )
    return None


def _list_missing(
    adapter: "AdapterFile",
    saved: Mapping[str, SavedTensor],
    base_tensors: Mapping[str, _BaseTensor],
) -> list[str]:
    """Return a line for tensors that the config promises, and for those that it does not know
    of.
    """
    faults = []
    for name in sorted(base_tensors):
        if saved.get(name, _NOTHING).copy is None and _is_listed(adapter, name):
            faults.append(
                f"{adapter.path}: has no {name}, which modules_to_save names; {_DOWNLOAD}"
            )
            break  # one is enough: the others have the same cause
    saved_rows = {
        name: tensor.rows[0] for name, tensor in sorted(saved.items()) if tensor.rows is not None
    }
    for end, tokens in adapter.config.token_rows.items():
        if tokens and not any(_is_named_by(name, end) for name in saved_rows):
            faults.append(
                f"{adapter.path}: has no trainable_tokens_delta of {end or EMBEDDING}; {_DOWNLOAD}"
            )
    for name, file_name in saved_rows.items():
        if not _find_token_rows(adapter, name):
            faults.append(
                f"{adapter.config.path}: trainable_token_indices: names no tokens of {name}, which"
                f" {file_name} has rows of; {_DOWNLOAD}"
            )
    biased = {
        name.removesuffix(".bias") for name, tensor in saved.items() if tensor.added is not None
    }
    unlike_config = adapter.tensors.keys() - biased if adapter.config.biases else biased
    if unlike_config:
        has, said = ("has no", "true") if adapter.config.biases else ("has", "false")
        first = min(unlike_config)
        faults.append(
            f"{adapter.path}: {has} {first}.lora_B.bias, lora_bias is {said} in its config;"
            f" {_DOWNLOAD}"
        )
    return faults


def _is_listed(adapter: "AdapterFile", name: str) -> bool:
    """Return whether modules_to_save names the module of a tensor, or one that it is in, as PEFT
    compares names.
    """
    module = name.rpartition(".")[0].split(".")
    ends = tuple(map(get_extra_name, adapter.config.saved))
    return any(".".join(module[:length]).endswith(ends) for length in range(1, len(module) + 1))


def _is_named_by(name: str, end: str) -> bool:
    """Return whether a name in trainable_token_indices is that of a tensor's module; empty: the
    embedding's.
    """
    module = name.rpartition(".")[0]
    return module.endswith(get_extra_name(end)) if end else module in (EMBEDDING, HEAD)


def _find_token_rows(adapter: "AdapterFile", name: str) -> tuple[int, ...] | None:
    """Return the tokens whose rows are saved; those of a tied head are the embedding's unless it
    has its own.
    """
    for row_name in [name, EMBEDDING_WEIGHT] if name == HEAD_WEIGHT else [name]:
        for end, tokens in adapter.config.token_rows.items():
            if _is_named_by(row_name, end):
                return tokens
    return None


def _settle_vocabulary(
    adapter: "AdapterFile", saved: dict[str, SavedTensor], base: ModelSpec
) -> tuple[dict[str, SavedTensor], ModelSpec]:
    """Return what is saved, and the spec of the base with it: of another vocabulary, or no longer
    tied.

    As in PEFT and transformers, a matrix that is saved for itself is no longer the other's, unless
    both are the same.
    """
    if isinstance(base, ExternalSpec):
        return saved, base
    embedding = saved.get(EMBEDDING_WEIGHT, _NOTHING)
    head = saved.get(HEAD_WEIGHT, _NOTHING)
    tied = base.tied
    if tied and (head != _NOTHING or _is_listed(adapter, EMBEDDING_WEIGHT)):
        is_listed = (
            _is_listed(adapter, EMBEDDING_WEIGHT)
            or _is_listed(adapter, HEAD_WEIGHT)
            or head.rows is not None
        )
        is_same = _have_same_numbers(adapter, embedding, head)
        if not (is_listed or is_same or _NOTHING in (embedding, head)):
            raise CheckpointError(
                f"{adapter.path}: {EMBEDDING_WEIGHT} and {HEAD_WEIGHT} differ, which are one matrix"
                " of the base, and modules_to_save names neither; name both in"
                f" {adapter.config.path}, or {_DOWNLOAD}"
            )
        tied = is_same or not is_listed
    if tied:
        embedding = head if embedding == _NOTHING else embedding
        saved = {name: tensor for name, tensor in saved.items() if name not in VOCABULARY}
        if embedding != _NOTHING:
            saved[EMBEDDING_WEIGHT] = embedding
    copies = [tensor.copy for tensor in (embedding, head) if tensor.copy is not None]
    vocab_size = copies[0][1].shape[0] if copies else base.vocab_size
    matrices = {EMBEDDING_WEIGHT: embedding}
    if not (tied or has_score_head(base)):
        matrices[HEAD_WEIGHT] = head
    for name, tensor in matrices.items():
        num_rows = tensor.copy[1].shape[0] if tensor.copy is not None else base.vocab_size
        if num_rows != vocab_size:
            raise CheckpointError(
                f"{adapter.path}: {copies[0][0]} has {vocab_size} rows, {name} has {num_rows}: the"
                " vocabulary was resized, and one of its two matrices is not in the file; save the"
                " adapter again with save_embedding_layers=True"
            )
    return saved, replace(base, vocab_size=vocab_size, tied=tied)


def _have_same_numbers(adapter: "AdapterFile", embedding: SavedTensor, head: SavedTensor) -> bool:
    """Return whether both matrices are saved with the same numbers."""
    with safe_open(str(adapter.path), framework="pt") as file:
        for of_embedding, of_head in ((embedding.copy, head.copy), (embedding.rows, head.rows)):
            if of_embedding is None or of_head is None:
                if of_embedding is not of_head:
                    return False
            elif not have_same_numbers(file.get_slice(of_embedding[0]), file.get_slice(of_head[0])):
                return False
    return _find_token_rows(adapter, EMBEDDING_WEIGHT) == _find_token_rows(adapter, HEAD_WEIGHT)
