"""Find and read the weights of the base that an adapter's file brings along.

PEFT puts them in the place of the base's own: whole tensors (`modules_to_save`, trained biases, the
embedding and head of a resized vocabulary), rows of some tokens (`trainable_token_indices`), and
with `lora_bias` a bias of B, which is added to the base's. `adapter_files` calls `add_saved` while
it reads a file, then `find_saved` to match the tensors with a base. `SavedWeights` reads them.
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
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.models.meta_init import find_stored_weights
from recipe_lib.models.spec import SCORE, ExternalSpec, ModelSpec, has_score_head
from recipe_lib.models.weight_names import (
    WeightEntry,
    build_weight_map,
    compute_parameter_shapes,
    get_buffer_names,
    get_router_name,
)
from recipe_lib.units import name_first

if TYPE_CHECKING:  # adapter_files imports this module
    from recipe_lib.checkpoint.adapter_files import AdapterFile

# Names in the base's files: the two matrices with a row for each token.
EMBEDDING_WEIGHT = f"{EMBEDDING}.weight"
HEAD_WEIGHT = f"{HEAD}.weight"
VOCABULARY = {EMBEDDING_WEIGHT, HEAD_WEIGHT}
# End of a tensor's name -> (end of its name in the base, field of SavedTensor). The first that fits
# counts.
_ENDINGS = {
    # The rows themselves, though called a delta: not what is added to them.
    ".token_adapter.trainable_tokens_delta": (".weight", "rows"),
    ".token_adapter.base_layer.weight": (".weight", "frozen"),
    # These two stand beside the weight of a resized vocabulary: PEFT then saves it three times.
    ".modules_to_save.weight": (".weight", "duplicate"),
    ".original_module.weight": (".weight", "duplicate"),
    ".lora_B.bias": (".bias", "lora_bias"),
    ".base_layer.bias": (".bias", "replacement"),
    ".base_layer.weight": (".weight", "frozen"),
}
FileTensorName = tuple[str, TensorEntry]  # name in the adapter's file, entry of its header


@dataclass(frozen=True)
class SavedTensor:
    """The tensors in an adapter's file for one tensor of the base. None: not in the file."""

    replacement: FileTensorName | None = None  # trained, takes the base's place
    frozen: FileTensorName | None = None  # a copy that PEFT saves though it was not trained
    rows: FileTensorName | None = None  # `[tokens, m]`, trained rows of some tokens
    lora_bias: FileTensorName | None = None  # a bias of B, added to the base's
    # `replacement` once more, or the base's own tensor beside it.
    duplicate: FileTensorName | None = None


def add_saved(saved: dict[str, SavedTensor], name: str, entry: TensorEntry) -> bool:
    """Add a tensor of an adapter's file to `saved`, under the base's name for it.

    Return False, and add nothing, if it cannot be a tensor of the base.

    name: in the file. entry: of the file's header.
    """
    if not name.startswith(PREFIX):
        return False
    ending = next((ending for ending in _ENDINGS if name.endswith(ending)), "")
    if not ending and "lora_" in name:
        return False
    base_ending, kind = _ENDINGS.get(ending, ("", "replacement"))
    base_name = get_extra_name(name.removesuffix(ending) + base_ending)
    saved_parts = saved.get(base_name, SavedTensor())
    if kind != "duplicate" and getattr(saved_parts, kind) is not None:
        return False  # two tensors for one
    saved[base_name] = replace(saved_parts, **{kind: (name, entry)})
    return True


@dataclass(frozen=True)
class SavedParameter:
    """What an adapter's file has for a parameter of the model."""

    # For the tensor of the base that the parameter is in.
    tensor: SavedTensor
    # Where the parameter begins in it; a fused tensor has several.
    first_row: int
    # The tokens whose rows are saved, in the order of the rows.
    token_rows: tuple[int, ...]
    # The adapter's, factor of the bias of B.
    scaling: float


@dataclass(frozen=True)
class SavedWeights:
    """The saved tensors of an adapter by the parameters of the model that they are for."""

    # The adapter's file.
    path: Path
    # Sizes and kinds of the base with these tensors in place: they may resize its vocabulary, and
    # untie embedding and head.
    spec: ModelSpec
    # By our names; those of the model that are not here are the base's own.
    parameters: Mapping[str, SavedParameter] = field(default_factory=dict)

    def read_rows(
        self, name: str, start: int, stop: int, read_base: Callable[[], Tensor]
    ) -> Tensor:
        """Return rows `[start, stop)` of a parameter, with those that the adapter replaces.

        name: our parameter; all rows of one that is not saved are the base's. read_base: returns
        these rows of the base; called only where they are needed.
        """
        if name == HEAD_WEIGHT and getattr(self.spec, "tied", False):
            name = EMBEDDING_WEIGHT
        if name not in self.parameters:
            return read_base()
        parameter = self.parameters[name]
        tensor = parameter.tensor
        # A number has no rows.
        is_number = tensor.replacement is not None and not tensor.replacement[1].shape
        file_rows = (
            ... if is_number else slice(parameter.first_row + start, parameter.first_row + stop)
        )
        with safe_open(str(self.path), framework="pt") as file:
            rows = (
                read_base()
                if tensor.replacement is None
                else file.get_slice(tensor.replacement[0])[file_rows]
            )
            if tensor.rows is not None:
                rows = rows.clone()  # they may be the base's own
                for index, token in enumerate(parameter.token_rows):
                    if start <= token < stop:
                        rows[token - start] = file.get_slice(tensor.rows[0])[index].to(rows)
            if tensor.lora_bias is not None:
                added = file.get_slice(tensor.lora_bias[0])[file_rows]
                rows = rows + added.to(rows) * parameter.scaling
        return rows

    @torch.no_grad()
    def put_into(self, model: LanguageModel) -> None:
        """Set these weights in a model on one device; keep the base's in `model.base_weights`.

        The model computes with the latter while its adapters are disabled. Raises CheckpointError
        for a weight that is sharded over ranks, or kept in 4 or 8 bits.
        """
        if not self.parameters:
            return
        base: dict[str, nn.Parameter] = {}
        shapes = compute_parameter_shapes(self.spec)
        stored = find_stored_weights(model)
        for name in self.parameters:
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
            # A copy, since the rows may be the base's own, which are read again without adapters.
            weight = rows.to(parameter, copy=True)
            # Rows that the base lacks, as those of new tokens, are the adapter's there too.
            base_weight = weight.clone()
            common_rows = slice(min(len(parameter), len(weight))) if parameter.dim() else ...
            base_weight[common_rows] = parameter[common_rows]
            base[name] = nn.Parameter(base_weight, requires_grad=False)
            _set_weight(model, name, weight)
        if self.spec.tied and EMBEDDING_WEIGHT in base:
            base[HEAD_WEIGHT] = base[EMBEDDING_WEIGHT]
            _set_weight(model, HEAD_WEIGHT, model.get_parameter(EMBEDDING_WEIGHT))
        model.spec = self.spec
        model.base_weights = base


def _set_weight(model: nn.Module, name: str, value: Tensor) -> None:
    """Set a frozen parameter. If it has another number of rows, its adapter gets that many too.

    name: our parameter. value: a Parameter is shared, not copied.
    """
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    is_resized = owner.get_parameter(leaf).shape != value.shape
    if not isinstance(value, nn.Parameter):  # a tied head is given the embedding's own
        value = nn.Parameter(value, requires_grad=False)
    setattr(owner, leaf, value)
    if not is_resized:
        return
    # Name of an adapter's tensor -> its dimension that stands for the matrix's rows.
    row_dims = {EMBEDDING_A: 1, LORA_B: 0} | ({} if name == EMBEDDING_WEIGHT else {MAGNITUDE: 0})
    for inner_name, adapter in list(owner.named_parameters()):
        if inner_name in row_dims:
            shape = list(adapter.shape)
            shape[row_dims[inner_name]] = len(value)
            inner_owner, _, inner_leaf = inner_name.rpartition(".")
            resized = nn.Parameter(adapter.new_zeros(shape), requires_grad=adapter.requires_grad)
            setattr(owner.get_submodule(inner_owner), inner_leaf, resized)


# Ends of error lines.
_REMEDY = "merge the adapter with PEFT first (merge_and_unload)"
_DOWNLOAD = "export or download the adapter again"
_NOTHING = SavedTensor()  # of a tensor that is not in the file


@dataclass(frozen=True)
class _BaseTensor:
    """A tensor of the base under the name that PEFT has for it."""

    # Our parameters in it; several if the files fuse them.
    entries: tuple[WeightEntry, ...]
    # In the base's files.
    shape: tuple[int, ...]


def find_saved(adapter: "AdapterFile", base: ModelSpec) -> SavedWeights:
    """Return the weights of a base that an adapter's file has.

    Raises CheckpointError, all faults at once, for a name that the base lacks, for another shape,
    and for tensors that adapter_config.json names and the file lacks, or the other way around.

    base: spec of the base as its own files have it.
    """
    config = adapter.config
    if not (adapter.saved or config.modules_to_save or config.token_rows or config.has_lora_bias):
        return SavedWeights(adapter.path, base)
    base_tensors = _list_base_tensors(base)
    saved = _drop_untrained(adapter, base_tensors)
    faults = [
        *_list_name_faults(adapter, base, base_tensors),
        _find_misfit(
            adapter, saved, base_tensors=base_tensors, can_resize=not isinstance(base, ExternalSpec)
        ),
        *_list_missing(adapter, saved, base_tensors),
    ]
    raise_faults(CheckpointError, faults)
    saved, spec = _settle_vocabulary(adapter, saved, base)
    modules = build_file_modules(base)
    parameters: dict[str, SavedParameter] = {}
    for name, tensor in saved.items():
        scaling = 1.0
        if tensor.lora_bias is not None:
            scaling = config.compute_scaling(modules[name.removesuffix(".bias")])
        for entry in base_tensors[name].entries:
            parameters[entry.our_name] = SavedParameter(
                tensor,
                first_row=entry.start,
                token_rows=_find_token_rows(adapter, name),
                scaling=scaling,
            )
    return SavedWeights(adapter.path, spec, parameters)


def _list_base_tensors(base: ModelSpec) -> dict[str, _BaseTensor]:
    """Return the tensors of a base that an adapter's file may have, by PEFT's names."""
    if isinstance(base, ExternalSpec):
        shapes = compute_parameter_shapes(base)
        names = shapes.keys() - get_buffer_names(base)
        return {name: _BaseTensor((WeightEntry(name, name),), shapes[name]) for name in names}
    # Untied, since a file may have the head of a tied model for itself.
    spec = base if has_score_head(base) else replace(base, tied=False)
    entries = [
        entry for entry in build_weight_map(spec) if entry.view is None and entry.our_name != SCORE
    ]
    shapes = compute_file_shapes(entries, compute_parameter_shapes(spec))
    base_tensors: dict[str, _BaseTensor] = {}
    for entry in entries:
        name = entry.file_name
        if ".mlp.router." in entry.our_name:
            # PEFT has the name of the module; files may have an older one.
            name = entry.our_name.replace(".mlp.router.", f".mlp.{get_router_name(spec)}.")
        fused_entries = base_tensors[name].entries if name in base_tensors else ()
        base_tensors[name] = _BaseTensor((*fused_entries, entry), shapes[entry.file_name])
    return base_tensors


def _drop_untrained(
    adapter: "AdapterFile", base_tensors: Mapping[str, _BaseTensor]
) -> dict[str, SavedTensor]:
    """Return the saved tensors that change the base, by its names.

    A copy that PEFT saves untrained changes it only by another number of rows.

    base_tensors: of the base, by PEFT's names.
    """
    changes = {}
    for name, tensor in adapter.saved.items():
        frozen = tensor.frozen if name in base_tensors else None
        if frozen is not None and frozen[1].shape != base_tensors[name].shape:
            tensor = replace(tensor, replacement=tensor.replacement or frozen)
        if tensor.replacement or tensor.rows or tensor.lora_bias:
            changes[name] = tensor
    return changes


def _list_name_faults(
    adapter: "AdapterFile", base: ModelSpec, base_tensors: Mapping[str, _BaseTensor]
) -> list[str]:
    faults: list[str] = []
    unknown: list[str] = []
    without_base: list[str] = []  # biases of B whose linear in the base has none
    tied = base.layout().tied_names() if isinstance(base, ExternalSpec) else set()
    for name, tensor in sorted(adapter.saved.items()):
        parts = (tensor.replacement, tensor.rows, tensor.lora_bias, tensor.frozen, tensor.duplicate)
        file_name = next(part for part in parts if part)[0]
        if tensor.lora_bias is not None and name not in base_tensors:
            without_base.append(file_name)
        elif name in tied and (tensor.replacement or tensor.rows):
            faults.append(
                f"{adapter.path}: {file_name} is one of two tied matrices of the base; {_REMEDY}"
            )
        elif name not in base_tensors or not _is_where_peft_looks(adapter, name, tensor):
            unknown.append(file_name)
    if without_base:
        faults.append(
            f"{adapter.path}: {without_base[0]} is a bias of an adapter (lora_bias), and that"
            " linear of the base has none to take it up, in PEFT's merge either; use it with PEFT"
            " as it is, or train one with lora_bias=False"
        )
    if unknown:
        faults.append(
            f"{adapter.path}: {name_first(unknown, 'is', 'are')} no tensor of a LoRA or DoRA"
            " adapter, nor a weight of this base that can be replaced; expected names such as"
            " base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        )
    return faults


def _is_where_peft_looks(adapter: "AdapterFile", name: str, tensor: SavedTensor) -> bool:
    """Return True if a copy has the name under which PEFT looks for it.

    A module with an adapter has its weights inside of `base_layer`, others have them by plain name.

    name: of the tensor in the base.
    """
    if tensor.replacement is None:
        return tensor.duplicate is None
    has_adapter = name.rpartition(".")[0] in adapter.tensors
    return (".base_layer." in tensor.replacement[0]) == has_adapter


def _find_misfit(
    adapter: "AdapterFile",
    saved: Mapping[str, SavedTensor],
    *,
    base_tensors: Mapping[str, _BaseTensor],
    can_resize: bool,
) -> str | None:
    """Return a line about the first saved tensor that does not fit the base; None: all fit.

    One is enough: the others have the same cause.

    can_resize: the adapter may give the base a vocabulary of another size.
    """
    for name in sorted(saved.keys() & base_tensors.keys()):
        tensor = saved[name]
        shape = base_tensors[name].shape
        tokens = _find_token_rows(adapter, name)
        new_shape = shape
        if (
            can_resize
            and name in VOCABULARY
            and tensor.replacement is not None
            and tensor.replacement[1].shape
        ):
            new_shape = (tensor.replacement[1].shape[0], *shape[1:])
        for part, expected_shape in (
            (tensor.replacement, new_shape),
            (tensor.lora_bias, shape),
            (tensor.rows, (len(tokens), *shape[1:])),
        ):
            if part is not None and part[1].shape != expected_shape:
                return (
                    f"{adapter.path}: {part[0]} has shape {list(part[1].shape)}, base and"
                    f" adapter_config.json make it {list(expected_shape)}; the adapter was made for"
                    " another base"
                )
        # PEFT 0.21 leaves the bias of such a linear out: no merged weights compute what was
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
    """Return lines for tensors that adapter_config.json names and the file lacks, and the reverse.

    saved: the tensors that change the base. base_tensors: of the base, by PEFT's names.
    """
    faults = [
        f"{adapter.path}: has no {name}, which modules_to_save names; {_DOWNLOAD}"
        for name in sorted(base_tensors)
        if saved.get(name, _NOTHING).replacement is None and _is_listed(adapter, name)
    ][:1]  # one is enough: the others have the same cause
    saved_rows = {
        name: tensor.rows[0] for name, tensor in sorted(saved.items()) if tensor.rows is not None
    }
    faults += [
        f"{adapter.path}: has no trainable_tokens_delta of {end or EMBEDDING}; {_DOWNLOAD}"
        for end, tokens in adapter.config.token_rows.items()
        if tokens and not any(_is_named_by(name, end) for name in saved_rows)
    ]
    faults += [
        f"{adapter.config.path}: trainable_token_indices: names no tokens of {name}, which"
        f" {file_name} has rows of; {_DOWNLOAD}"
        for name, file_name in saved_rows.items()
        if not _find_token_rows(adapter, name)
    ]
    biased = {
        name.removesuffix(".bias") for name, tensor in saved.items() if tensor.lora_bias is not None
    }
    if adapter.config.has_lora_bias and adapter.tensors.keys() - biased:
        faults.append(
            f"{adapter.path}: has no {min(adapter.tensors.keys() - biased)}.lora_B.bias, lora_bias"
            f" is true in its config; {_DOWNLOAD}"
        )
    elif biased and not adapter.config.has_lora_bias:
        faults.append(
            f"{adapter.path}: has {min(biased)}.lora_B.bias, lora_bias is false in its config;"
            f" {_DOWNLOAD}"
        )
    return faults


def _is_listed(adapter: "AdapterFile", name: str) -> bool:
    """Return True if modules_to_save names the module of a tensor, or one that it is in.

    PEFT compares the ends of names.
    """
    module = name.rpartition(".")[0].split(".")
    ends = tuple(map(get_extra_name, adapter.config.modules_to_save))
    return any(".".join(module[:length]).endswith(ends) for length in range(1, len(module) + 1))


def _is_named_by(name: str, end: str) -> bool:
    """Return True if a tensor's module is named by `end`, a key of trainable_token_indices.

    An empty one names the embedding, and a head that is tied to it.
    """
    module = name.rpartition(".")[0]
    return module.endswith(get_extra_name(end)) if end else module in (EMBEDDING, HEAD)


def _find_token_rows(adapter: "AdapterFile", name: str) -> tuple[int, ...]:
    """Return the tokens whose rows of a weight are saved; empty for none.

    Those of a tied head are the embedding's unless it has its own.
    """
    for end, tokens in adapter.config.token_rows.items():
        if _is_named_by(name, end):
            return tokens
    return _find_token_rows(adapter, EMBEDDING_WEIGHT) if name == HEAD_WEIGHT else ()


def _settle_vocabulary(
    adapter: "AdapterFile", saved: dict[str, SavedTensor], base: ModelSpec
) -> tuple[dict[str, SavedTensor], ModelSpec]:
    """Return the saved tensors, and the spec of the base with them in place.

    The base may get another vocabulary size, or be untied: as in PEFT and transformers, embedding
    and head are no longer one matrix if one of them is saved by itself, unless both are equal. For
    a base that stays tied the embedding is returned and no head.
    """
    if isinstance(base, ExternalSpec):
        return saved, base
    embedding = saved.get(EMBEDDING_WEIGHT, _NOTHING)
    head = saved.get(HEAD_WEIGHT, _NOTHING)
    is_tied = base.tied
    if is_tied and (head != _NOTHING or _is_listed(adapter, EMBEDDING_WEIGHT)):
        is_listed = head.rows is not None or any(_is_listed(adapter, name) for name in VOCABULARY)
        is_same = _have_same_numbers(adapter, embedding, head)
        if not (is_listed or is_same or _NOTHING in (embedding, head)):
            raise CheckpointError(
                f"{adapter.path}: {EMBEDDING_WEIGHT} and {HEAD_WEIGHT} differ, which are one matrix"
                " of the base, and modules_to_save names neither; name both in"
                f" {adapter.config.path}, or {_DOWNLOAD}"
            )
        is_tied = is_same or not is_listed
    if is_tied:
        embedding = head if embedding == _NOTHING else embedding
        saved = {name: tensor for name, tensor in saved.items() if name not in VOCABULARY}
        if embedding != _NOTHING:
            saved[EMBEDDING_WEIGHT] = embedding
    copies = [tensor.replacement for tensor in (embedding, head) if tensor.replacement is not None]
    vocab_size = copies[0][1].shape[0] if copies else base.vocab_size
    matrices = {EMBEDDING_WEIGHT: embedding}
    if not (is_tied or has_score_head(base)):
        matrices[HEAD_WEIGHT] = head
    for name, tensor in matrices.items():
        num_rows = (
            tensor.replacement[1].shape[0] if tensor.replacement is not None else base.vocab_size
        )
        if num_rows != vocab_size:
            raise CheckpointError(
                f"{adapter.path}: {copies[0][0]} has {vocab_size} rows, {name} has {num_rows}: the"
                " vocabulary was resized, and one of its two matrices is not in the file; save the"
                " adapter again with save_embedding_layers=True"
            )
    return saved, replace(base, vocab_size=vocab_size, tied=is_tied)


def _have_same_numbers(adapter: "AdapterFile", embedding: SavedTensor, head: SavedTensor) -> bool:
    with safe_open(str(adapter.path), framework="pt") as file:
        for first, second in (
            (embedding.replacement, head.replacement),
            (embedding.rows, head.rows),
        ):
            if first is None or second is None:
                if first is not second:
                    return False
            elif not have_same_numbers(file.get_slice(first[0]), file.get_slice(second[0])):
                return False
    return _find_token_rows(adapter, EMBEDDING_WEIGHT) == _find_token_rows(adapter, HEAD_WEIGHT)
