"""Weights of the base that an adapter's file brings along: PEFT puts them in the place of the base's own.

PEFT saves whole tensors (`modules_to_save`, trained biases, the embedding and head of a resized vocabulary), rows of
some tokens (`trainable_token_indices`), and with `lora_bias` a bias of B, which is added to the base's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.adapters.peft_names import EMBEDDING, HEAD, LENGTHS, PREFIX, extra_name
from recipe_lib.checkpoint.tensor_files import TensorEntry
from recipe_lib.errors import CheckpointError
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.models.meta_init import stored_weights
from recipe_lib.models.spec import ModelSpec
from recipe_lib.models.weight_names import parameter_shapes

EMBEDDING_WEIGHT, HEAD_WEIGHT = f"{EMBEDDING}.weight", f"{HEAD}.weight"
VOCABULARY = {EMBEDDING_WEIGHT, HEAD_WEIGHT}
COPY, ROWS, ADDED, FROZEN, AGAIN = "copy", "rows", "added", "frozen", "again"
# What follows a module's name -> what follows it in the base, and what the tensor is there. The first that fits counts.
_ENDINGS = {
    ".token_adapter.trainable_tokens_delta": (".weight", ROWS),  # which are rows themselves, not what is added to them
    ".token_adapter.base_layer.weight": (".weight", FROZEN),
    ".modules_to_save.weight": (".weight", AGAIN),  # these two stand beside the weight of a resized vocabulary, which
    ".original_module.weight": (".weight", AGAIN),  # PEFT then saves three times
    ".lora_B.bias": (".bias", ADDED),
    ".base_layer.bias": (".bias", COPY),
    ".base_layer.weight": (".weight", FROZEN),
}
FileTensorName = tuple[str, TensorEntry]


@dataclass(frozen=True)
class SavedTensor:
    """What a file has of one tensor of the base; each is its name there and its header, None: it is not there.

    copy: in the base's place. frozen: the same, saved by PEFT though it was not trained. rows: those of some tokens.
    added: to the base's. again: the copy once more, or the base's own beside it.
    """

    copy: FileTensorName | None = None
    frozen: FileTensorName | None = None
    rows: FileTensorName | None = None
    added: FileTensorName | None = None
    again: FileTensorName | None = None


def add_saved(found: dict[str, SavedTensor], name: str, entry: TensorEntry) -> bool:
    """Notes a tensor that is no adapter's under the base's name for it; False: it cannot be one of the base."""
    if not name.startswith(PREFIX):
        return False
    ending = next((ending for ending in _ENDINGS if name.endswith(ending)), "")
    if not ending and "lora_" in name:
        return False
    end, kind = _ENDINGS.get(ending, ("", COPY))
    base_name = extra_name(name.removesuffix(ending) + end)
    held = found.get(base_name, SavedTensor())
    if kind != AGAIN and getattr(held, kind) is not None:
        return False  # two tensors for one
    found[base_name] = replace(held, **{kind: (name, entry)})
    return True


@dataclass(frozen=True)
class SavedWeights:
    """The saved tensors of an adapter by the parameters of the model that they are for.

    spec: of the base with them, whose vocabulary they may resize and whose embedding and head they may tell apart.
    parts: our parameter -> what is saved of it, and the row of that where it begins. scalings: our parameter -> what
    is multiplied with the bias that is added.
    """

    path: Path
    spec: ModelSpec
    parts: Mapping[str, tuple[SavedTensor, int]]
    token_rows: Mapping[str, tuple[int, ...]]
    scalings: Mapping[str, float]

    def read_rows(self, name: str, start: int, stop: int, read_base: Callable[[], Tensor]) -> Tensor:
        """Return rows `[start, stop)` of a parameter as the adapter has them. read_base: gives the base's."""
        if name == HEAD_WEIGHT and getattr(self.spec, "tied", False):
            name = EMBEDDING_WEIGHT
        if name not in self.parts:
            return read_base()
        held, first = self.parts[name]
        with safe_open(str(self.path), framework="pt") as file:
            if held.copy is None:
                rows = read_base()
            else:
                rows = file.get_slice(held.copy[0])[first + start : first + stop]
            if held.rows is not None:
                rows = rows.clone()
                for number, row in enumerate(self.token_rows[name]):
                    if start <= row < stop:
                        rows[row - start] = file.get_slice(held.rows[0])[number].to(rows)
            if held.added is not None:
                added = file.get_slice(held.added[0])[first + start : first + stop].to(rows)
                rows = rows + added * self.scalings[name]
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
            rows = self.read_rows(name, 0, shapes[name][0], lambda parameter=parameter: parameter.cpu())  # type: ignore[misc]
            new = rows.to(parameter, copy=True)
            before = new.clone()  # of rows that the base has not got, the adapter's
            common = min(len(parameter), len(new))
            before[:common] = parameter[:common]
            base[name] = nn.Parameter(before, requires_grad=False)
            _set_weight(model, name, new)
        if self.spec.tied and EMBEDDING_WEIGHT in base:
            base[HEAD_WEIGHT] = base[EMBEDDING_WEIGHT]
            _set_weight(model, HEAD_WEIGHT, model.get_parameter(EMBEDDING_WEIGHT))
        model.spec = self.spec
        model.base_weights = base


def _set_weight(model: nn.Module, name: str, value: Tensor) -> None:
    """Sets a parameter, and makes room in the adapter of a matrix with another number of rows."""
    owner = model.get_submodule(name.rpartition(".")[0])
    resized = owner.get_parameter(name.rpartition(".")[2]).shape != value.shape
    parameter = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
    setattr(owner, name.rpartition(".")[2], parameter)
    if not resized:
        return
    by_row = {"lora_embedding_A": 1, "lora_B.weight": 0} | ({} if name == EMBEDDING_WEIGHT else {LENGTHS: 0})
    for inner, adapter in list(owner.named_parameters()):
        if inner in by_row:
            shape = list(adapter.shape)
            shape[by_row[inner]] = len(value)
            room = nn.Parameter(adapter.new_zeros(shape), requires_grad=adapter.requires_grad)
            setattr(owner.get_submodule(inner.rpartition(".")[0]), inner.rpartition(".")[2], room)
