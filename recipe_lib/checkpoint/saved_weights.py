"""Weights of the base that an adapter's file brings along: PEFT puts them in the place of the base's own.

PEFT saves whole tensors (`modules_to_save`, trained biases, the embedding and head of a resized vocabulary), rows of
some tokens (`trainable_token_indices`), and with `lora_bias` a bias of B, which is added to the base's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.adapters.peft_names import EMBEDDING, EMBEDDING_FIRST, HEAD, LENGTHS, PREFIX, SECOND, extra_name
from recipe_lib.checkpoint.tensor_files import TensorEntry
from recipe_lib.errors import CheckpointError
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.models.meta_init import stored_weights
from recipe_lib.models.spec import ModelSpec
from recipe_lib.models.weight_names import parameter_shapes

EMBEDDING_WEIGHT, HEAD_WEIGHT = f"{EMBEDDING}.weight", f"{HEAD}.weight"
VOCABULARY = {EMBEDDING_WEIGHT, HEAD_WEIGHT}
# What follows a module's name -> what follows it in the base, and the field of SavedTensor. The first that fits counts.
_ENDINGS = {
    ".token_adapter.trainable_tokens_delta": (".weight", "rows"),  # rows themselves, not what is added to them
    ".token_adapter.base_layer.weight": (".weight", "frozen"),
    ".modules_to_save.weight": (".weight", "again"),  # these two stand beside the weight of a resized vocabulary, which
    ".original_module.weight": (".weight", "again"),  # PEFT then saves three times
    ".lora_B.bias": (".bias", "added"),
    ".base_layer.bias": (".bias", "copy"),
    ".base_layer.weight": (".weight", "frozen"),
}
FileTensorName = tuple[str, TensorEntry]


@dataclass(frozen=True)
class SavedTensor:
    """What a file has of one tensor of the base; each is its name there and its header, None: it is not there."""

    copy: FileTensorName | None = None  # in the base's place
    frozen: FileTensorName | None = None  # a copy that PEFT saves though it was not trained
    rows: FileTensorName | None = None  # `[tokens, m]`, those of some tokens
    added: FileTensorName | None = None  # a bias of B, added to the base's
    again: FileTensorName | None = None  # the copy once more, or the base's own beside it


def add_saved(saved: dict[str, SavedTensor], name: str, entry: TensorEntry) -> bool:
    """Add a tensor that is no adapter's under the base's name for it; False: it cannot be one of the base."""
    if not name.startswith(PREFIX):
        return False
    ending = next((ending for ending in _ENDINGS if name.endswith(ending)), "")
    if not ending and "lora_" in name:
        return False
    base_ending, kind = _ENDINGS.get(ending, ("", "copy"))
    base_name = extra_name(name.removesuffix(ending) + base_ending)
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

    def read_rows(self, name: str, start: int, stop: int, read_base: Callable[[], Tensor]) -> Tensor:
        """Return rows `[start, stop)` of a parameter as the adapter has them. read_base: returns the base's."""
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
                rows = rows + file.get_slice(tensor.added[0])[in_file].to(rows) * self.scalings[name]
        return rows

    @torch.no_grad()
    def put_into(self, model: LanguageModel) -> None:
        """Give the model these weights, and keep the base's for `adapters_off`. It is whole, on one device.

        Raises CheckpointError for a model that ranks share, and for a weight that is kept in 4 or 8 bits.
        """
        if not self.parts:
            return
        base: dict[str, nn.Parameter] = {}
        shapes = parameter_shapes(self.spec)
        stored = stored_weights(model)
        for name in self.parts:
            if name in stored:
                raise CheckpointError(
                    f"{self.path}: {name} is saved as a whole, and cannot be kept in 4 or 8 bits; use --quantize-base "
                    "none, or merge the adapter first (tune export --merge)"
                )
            parameter = model.get_parameter(name)
            if isinstance(parameter, DTensor):
                raise CheckpointError(
                    f"{self.path}: brings {name} along, which ranks cannot share; merge the adapter first (tune export "
                    "--merge), or use one process"
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
    setattr(owner, leaf, value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False))
    if not is_resized:
        return
    row_dims = {EMBEDDING_FIRST: 1, SECOND: 0}  # of the adapter's tensors, the dimension that is the matrix's rows
    if name != EMBEDDING_WEIGHT:
        row_dims[LENGTHS] = 0
    for inner_name, adapter in list(owner.named_parameters()):
        if inner_name in row_dims:
            shape = list(adapter.shape)
            shape[row_dims[inner_name]] = len(value)
            inner_owner, _, inner_leaf = inner_name.rpartition(".")
            room = nn.Parameter(adapter.new_zeros(shape), requires_grad=adapter.requires_grad)
            setattr(owner.get_submodule(inner_owner), inner_leaf, room)
