"""Whether every parameter was given values, whoever gave them: a tensor counts how often it is written to."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.errors import SetupError
from recipe_lib.models.language_model import LanguageModel, WriteMark
from recipe_lib.ops.device import holds_values


def note_unwritten(model: LanguageModel) -> None:
    """Notes parameters and buffers as without values: right after they were given memory."""
    model.note_unwritten({name: _mark(tensor) for name, tensor in _tensors(model)})


def check_written(model: nn.Module) -> None:
    """SetupError if a parameter or buffer still holds what its memory held before. Nothing without `note_unwritten`.

    What has been moved elsewhere since then is taken to be written.
    """
    before = model.unwritten if isinstance(model, LanguageModel) else {}
    left = [
        name
        for name, tensor in _tensors(model)
        if tensor.numel() and holds_values(tensor.device) and before.get(name) == _mark(tensor)
    ]
    if left:
        more = f" and {len(left) - 1} more have" if len(left) > 1 else " has"
        raise SetupError(
            f"{left[0]}{more} no values after load_weights; call load_weights or init_weights for a model's "
            "parameters, and init_adapters for adapters, or fill them there in place"
        )


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, _own(tensor)) for name, tensor in (*model.named_parameters(), *model.named_buffers())]


@torch.no_grad()
def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mark(tensor: Tensor) -> WriteMark:
    return WriteMark(tensor.data_ptr(), tensor._version)
