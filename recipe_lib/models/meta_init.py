"""A decoder without memory, and random weights that depend on the seed alone, not on who holds which part."""

import hashlib
import math
from collections.abc import Callable
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from recipe_lib.models.decoder import Decoder
from recipe_lib.models.external_spec import ExternalSpec
from recipe_lib.models.extra_parameters import extra_tensors, reset_extra
from recipe_lib.models.language_model import LanguageModel, own_parts
from recipe_lib.models.spec import DecoderSpec, ModelSpec

_BLOCK_ELEMENTS = 2**22  # random numbers are drawn 16 MiB at a time


def build_meta(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """The decoder with parameters of `dtype` on the meta device: shapes, no bytes.

    An external model is a module of its own class that is called as a decoder is. What is added to it later is extra:
    see `recipe_lib.models.extra_parameters`.
    """
    if isinstance(spec, ExternalSpec):
        model = cast(Decoder, spec.build(dtype))
    else:
        with torch.device("meta"):
            model = Decoder(spec).to(dtype)
    model.note_built()
    return model


def allocate(model: nn.Module, device: torch.device) -> None:
    """Gives a meta model uninitialized memory, for a process that has all of it; tied parameters stay tied.

    Buffers of an external model get the values that its class gave them. A rank of several calls `materialize`.
    """
    ties = shared_parameters(model)
    model.to_empty(device=device)
    for (owner, name), *others in ties:
        for other, other_name in others:
            setattr(other, other_name, getattr(owner, name))
    if isinstance(model, LanguageModel):
        for name, buffer in model.named_buffers():
            if name in model.computed_buffers:
                buffer.copy_(model.computed_buffers[name])


def shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter that several modules own."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [shared for shared in places.values() if len(shared) > 1]


@runtime_checkable
class StoredWeight(Protocol):
    """A module whose weight `[out, in]` is no parameter: it makes its own form of it, from rows that it asks for."""

    in_features: int
    out_features: int

    def fill_weight(self, read_rows: Callable[[int, int, slice], Tensor]) -> None:
        """read_rows: `(start, stop, columns)` to that part of the weight. All ranks that share the weight call it."""


def stored_weights(model: nn.Module) -> dict[str, StoredWeight]:
    """The modules whose weight is no parameter, by the name that it would have; `NAME_...` are what they keep."""
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, StoredWeight)}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong into a checkpoint, by name."""
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, spec: ModelSpec) -> None:
    """Fills materialized parameters in place: normal with `spec.init_std`; norms neutral, biases 0.

    A parameter's values follow from (seed, its name, its full shape) alone. Each rank draws only the blocks of rows
    that its shard overlaps and keeps its part of them; nothing is communicated, and no more than a block is held.
    A quantized weight is made of the values that it would have had. An external model's vectors and numbers are what
    its own class begins with; extra parameters start as `reset_extra` says.
    """
    reset_extra(model, seed)
    vectors = spec.first_vectors(seed) if isinstance(spec, ExternalSpec) else {}
    stored = stored_weights(model)
    for name, module in stored.items():
        _fill_stored(module, f"{seed}/{name}", spec.init_std)
    extras = extra_tensors(model)
    for name, parameter in model.named_parameters():
        if name.rpartition("_")[0] in stored or name in extras:
            continue
        for local, offset in own_parts(model, name, parameter):
            if name in vectors:
                local.copy_(vectors[name][tuple(slice(at, at + n) for at, n in zip(offset, local.shape, strict=True))])
            elif isinstance(spec, DecoderSpec) and name.endswith("norm.weight"):
                local.fill_(0.0 if spec.norm_offset else 1.0)
            elif name.endswith(".bias"):
                local.zero_()
            else:
                _fill_normal(local, offset, parameter.shape, f"{seed}/{name}", spec.init_std)


@torch.no_grad()
def init_weight(model: nn.Module, name: str, seed: int, spec: ModelSpec) -> None:
    """Fills one parameter of a materialized model as `init_weights` does."""
    parameter = model.get_parameter(name)
    for local, offset in own_parts(model, name, parameter):
        _fill_normal(local, offset, parameter.shape, f"{seed}/{name}", spec.init_std)


def _fill_stored(module: StoredWeight, key: str, std: float) -> None:
    shape = torch.Size((module.out_features, module.in_features))

    def draw_rows(start: int, stop: int, columns: slice) -> Tensor:
        rows = torch.empty((stop - start, shape[1]))
        _fill_normal(rows, (start, 0), shape, key, std)
        return rows[:, columns]

    module.fill_weight(draw_rows)


def _fill_normal(local: Tensor, offset: tuple[int, ...], shape: torch.Size, key: str, std: float) -> None:
    """Writes the part at `offset` of a normal tensor of `shape`."""
    fill_random(local, offset, shape, key, lambda values, generator: values.normal_(0.0, std, generator=generator))


def fill_random(
    local: Tensor,
    offset: tuple[int, ...],
    shape: torch.Size,
    key: str,
    draw: Callable[[Tensor, torch.Generator], Tensor],
) -> None:
    """Writes into `local` the part that begins at `offset` of a random tensor of `shape`, which follows from `key`.

    draw: `fn(values, generator)` fills fp32 values on the host. Each block of rows has a generator of its own.
    """
    if local.numel() == 0:
        return
    block_rows = max(1, _BLOCK_ELEMENTS // math.prod(shape[1:]))
    first, last = offset[0], offset[0] + local.shape[0]
    columns = tuple(slice(start, start + size) for start, size in zip(offset[1:], local.shape[1:], strict=True))
    for block in range(first // block_rows, -(-last // block_rows)):
        top, bottom = block * block_rows, min((block + 1) * block_rows, shape[0])
        digest = hashlib.sha256(f"{key}/{block}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        values = draw(torch.empty((bottom - top, *shape[1:]), dtype=torch.float32), generator)
        start, stop = max(top, first), min(bottom, last)
        local[start - first : stop - first].copy_(values[(slice(start - top, stop - top), *columns)])
