"""A mixture's experts with their adapters, for the files of a merged model: a layer's at a time."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from recipe_lib.adapters.merging import Update, merge_rows
from recipe_lib.adapters.peft_names import FIRST, SECOND, expert_factors
from recipe_lib.adapters.quantized import can_quantize, dequantized
from recipe_lib.checkpoint.adapter_files import AdapterFile
from recipe_lib.checkpoint.converted import Reader
from recipe_lib.checkpoint.tensor_files import FileTensor
from recipe_lib.models.spec import DecoderSpec
from recipe_lib.models.weight_names import weight_map


class MergedExperts:
    """Reads a parameter `[E, o, i]` as the run had it, and gives what files have of it.

    All of it is in host memory, since the scales of a quantized one are those of all experts together.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        adapter: AdapterFile,
        found: Mapping[str, FileTensor],
        storage: str,
        dtype: torch.dtype,
    ) -> None:
        """found: the base's tensors. storage, dtype: how the run kept them."""
        self._places = {entry.our_name: entry for entry in weight_map(spec, found)}
        self._modules = {f"{module.parts[0].module}.weight": module for module in adapter.modules(spec)}
        self._adapter, self._found, self._storage, self._dtype = adapter, found, storage, dtype
        self._name = ""

    def pieces(self, made: Any, name: str) -> Iterator[torch.Tensor]:
        """The data of a tensor of files, in consecutive pieces. made: the `WrittenExperts` that it is one of."""
        if self._name != made.parameter:
            self._read(made.parameter)
        expert, first, last = made.tensors[name]
        if expert is not None:
            yield self._merged(expert)[first:last]
            return
        for number in range(len(self._weight)):
            yield self._merged(number).t().unsqueeze(0)

    def _read(self, name: str) -> None:
        self._name, self._weight = "", torch.empty(0)
        with Reader(self._found) as read:
            weight = read.opened(self._places[name], self._dtype)[:].to(self._dtype)
        _, rows, columns = weight.shape
        if self._storage != "none" and can_quantize(columns, rows, self._storage):
            weight = dequantized(weight.flatten(0, 1), self._storage).view_as(weight)
        self._name, self._weight = name, weight
        self._factors: tuple[torch.Tensor, torch.Tensor] | None = None
        module = self._modules.get(name)
        if module is not None:
            self._scaling = self._adapter.config.scaling_of(module)
            first, second = (self._adapter.read(module.name, suffix) for suffix in (FIRST, SECOND))
            self._factors = expert_factors(first, second, module.experts)

    def _merged(self, number: int) -> torch.Tensor:
        """One expert's matrix `[o, i]`."""
        weight = self._weight[number]
        update = None
        if self._factors is not None:
            first, second = self._factors
            update = Update(first[number], second[number], self._scaling)
        return torch.cat(list(merge_rows(lambda start, stop: weight[start:stop], len(weight), update)))
