"""An adapter merged into a model of another library, in memory: its files need not have its parameters one by one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipe_lib.adapters.merging import Update, merge_rows
from recipe_lib.adapters.peft_names import EMBEDDING_FIRST, EMBEDDING_SECOND, FIRST, LENGTHS, SECOND, FileModule
from recipe_lib.adapters.quantized import can_quantize, dequantized
from recipe_lib.checkpoint.adapter_files import AdapterFile
from recipe_lib.checkpoint.rank_agreement import SingleRank
from recipe_lib.checkpoint.saved_weights import SavedWeights
from recipe_lib.checkpoint.weights_in import load_weights
from recipe_lib.checkpoint.weights_out import export_model
from recipe_lib.errors import CheckpointError
from recipe_lib.models import build_meta, read_config
from recipe_lib.models.external_spec import ExternalSpec, TensorLayout
from recipe_lib.models.meta_init import allocate


@torch.no_grad()
def merge_external(
    base_folder: Path,
    adapter: AdapterFile,
    saved: SavedWeights,
    spec: ExternalSpec,
    out: Path,
    quantize: str,
    dtype: torch.dtype,
    stored: torch.dtype,
    **beside: Any,
) -> None:
    """Writes the folder `out`: the base with the adapter added, on one rank; the model is in host memory meanwhile.

    saved: what the adapter has of the base's weights. quantize, dtype: how the run that trained the adapter kept the
    base. stored: the type of what is written. beside: as for `export_model`. Raises StorageError or CheckpointError;
    then `out` is as it was.
    """
    if adapter.extras:
        raise CheckpointError(f"{adapter.path}: holds {min(adapter.extras)}, which a recipe added; it cannot be merged")
    model = build_meta(spec, dtype)
    allocate(model, torch.device("cpu"))
    load_weights(model, spec, base_folder)
    layout = spec.layout()
    adapted = {module.name: module for module in adapter.modules(spec)}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        num_rows = len(parameter) if parameter.dim() else 1
        weight = saved.read_rows(name, start=0, stop=num_rows, read_base=parameter.detach)
        if module != name and module in layout.linears:
            weight = _merged(weight, module, adapter, adapted, quantize, layout)
        parameter.data = weight.to(stored) if weight.is_floating_point() else weight
    export_model(model, spec, read_config(base_folder), out, world=SingleRank(), **beside)


def _merged(
    weight: Tensor,
    module: str,
    adapter: AdapterFile,
    adapted: Mapping[str, FileModule],
    quantize: str,
    layout: TensorLayout,
) -> Tensor:
    """A linear's weight as the run had it, with its adapter if it has one."""
    rows, columns = weight.shape
    if quantize != "none" and module in layout.plain and can_quantize(columns, rows, quantize):
        weight = dequantized(weight, quantize)
    if module not in adapted:
        return weight
    turned = weight.t() if module in layout.transposed else weight
    pieces = merge_rows(lambda start, stop: turned[start:stop], turned.shape[0], update_of(adapter, adapted[module]))
    whole = torch.cat(list(pieces))
    return whole.t().contiguous() if module in layout.transposed else whole


def update_of(adapter: AdapterFile, module: FileModule) -> Update:
    """The adapter of one module of a file."""
    lengths = adapter.read(module.name, LENGTHS) if adapter.config.dora else None
    scaling = adapter.config.scaling_of(module)
    if module.is_embedding:  # its matrices are those of the transposed weight
        first, second = (adapter.read(module.name, suffix).t() for suffix in (EMBEDDING_SECOND, EMBEDDING_FIRST))
        return Update(first, second, scaling, lengths, by_column=True)
    return Update(adapter.read(module.name, FIRST), adapter.read(module.name, SECOND), scaling, lengths)
