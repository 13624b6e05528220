"""Modules of a model that nobody described: its embedding and head, and the linears that an adapter may stand for."""

import inspect
import re
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.models.language_model import layer_names

# What is asked of a weight without reading its numbers.
_OF_ITS_FORM = r"(?!\.(dtype|device|shape|size|is_meta|requires_grad|ndim)\b)"


def embedding_and_head(model: nn.Module) -> tuple[Any, Any] | None:
    """The module of the token embedding and that of the output projection; None where either is not found.

    Asked of the model, as transformers' classes answer; else the first nn.Embedding outside the layers and the last
    nn.Linear there that has as many outputs as that has rows.
    """
    embedding, head = _asked(model, "get_input_embeddings"), _asked(model, "get_output_embeddings")
    if embedding is not None and head is not None:
        return embedding, head
    inside = tuple(f"{name}." for name in layer_names(model))
    outside = [module for name, module in model.named_modules() if not name.startswith(inside)]
    embedding = embedding or next((module for module in outside if isinstance(module, nn.Embedding)), None)
    if embedding is None:
        return None
    rows = embedding.weight.shape[0]
    heads = [module for module in outside if isinstance(module, nn.Linear) and module.out_features == rows]
    head = head or (heads[-1] if heads else None)
    return None if head is None else (embedding, head)


def _asked(model: nn.Module, method: str) -> Any:
    try:
        found = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(getattr(found, "weight", None), Tensor) else None


def layer_linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linears inside the layers that the model calls as linears, by name."""
    left = uncalled_linears(model)
    return {name: module for name, module in _inside(model).items() if name not in left}


def uncalled_linears(model: nn.Module) -> dict[str, str]:
    """Linears inside the layers that are not called as one, with the reason: an adapter there would be passed by.

    A class whose kernels read a linear's weight (the state-space layers of Mamba and its descendants), and a class
    derived from nn.Linear whose forward returns something else (routers of mixtures). Plain and meta models.
    """
    found: dict[str, str] = {}
    for name, module in _inside(model).items():
        owner, _, child = name.rpartition(".")
        layer: Any = type(model.get_submodule(owner))
        if reads_weight(layer, child):
            found[name] = "its layer reads the weight without calling the linear"
        elif not _returns_outputs(module):
            found[name] = f"a {type(module).__name__} returns something else than a linear's outputs"
    return found


def other_parts(model: Any) -> list[str]:
    """Modules of a multimodal model that text does not run through (vision, audio, their projector), by name."""
    made: Any = getattr(model, "config", None)
    if not hasattr(made, "get_text_config") or made.get_text_config() is made or not hasattr(model, "get_decoder"):
        return []
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    run = {id(parameter) for part in (decoder, head) if part is not None for parameter in part.parameters()}
    if decoder is None or decoder is model:
        return []
    found: list[str] = []
    for name, module in model.named_modules():
        outer = any(name.startswith(f"{part}.") for part in found)
        parameters = [] if outer or not name else list(module.parameters())
        if parameters and not any(id(parameter) in run for parameter in parameters):
            found.append(name)
    return found


def _inside(model: nn.Module) -> dict[str, nn.Module]:
    inside = tuple(f"{name}." for name in layer_names(model))
    other = tuple(f"{name}." for name in other_parts(model))
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith(inside) and not name.startswith(other) and is_linear(module)
    }


@lru_cache(maxsize=1024)
def reads_weight(owner: type, child: str) -> bool:
    """Whether a class reads the numbers of `self.CHILD.weight` or `.bias` itself, as its source says."""
    try:
        source = inspect.getsource(owner)
    except (OSError, TypeError):  # a class made in a console
        return False
    return re.search(rf"\bself\.{re.escape(child)}\.(weight|bias)\b{_OF_ITS_FORM}", source) is not None


def _returns_outputs(module: Any) -> bool:
    """Whether what a linear's forward makes of `[2, in]` is one tensor `[2, out]`."""
    if type(module).forward is nn.Linear.forward or is_transposed(module):
        return True
    outputs, inputs = linear_shape(module)
    try:
        with torch.no_grad():
            found = module(torch.empty(2, inputs, device=module.weight.device, dtype=module.weight.dtype))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False
    return isinstance(found, Tensor) and tuple(found.shape) == (2, outputs)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear: nn.Linear, what is derived from it, or transformers' Conv1D."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D: a linear whose weight is `[in, out]`."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def linear_shape(module: Any) -> tuple[int, int]:
    """(outputs, inputs) of a linear."""
    rows, columns = module.weight.shape
    return (columns, rows) if is_transposed(module) else (rows, columns)
