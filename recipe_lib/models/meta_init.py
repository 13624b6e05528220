"""A decoder without memory, and random weights that depend on the seed alone, not on who holds
which part.
"""

import hashlib
import math
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from recipe_lib.errors import SetupError
from recipe_lib.models.decoder import Decoder
from recipe_lib.models.language_model import (
    LanguageModel,
    get_built_tensors,
    list_local_parts,
    note_unwritten,
)
from recipe_lib.models.spec import SCORE, DecoderSpec, ExternalSpec, ModelSpec
from recipe_lib.ops.device import holds_values

_BLOCK_ELEMENTS = 2**22  # random numbers are drawn 16 MiB at a time


def build_meta(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """The decoder with parameters of `dtype` on the meta device: shapes, no bytes.

    An external model is a module of its own class that is called as a decoder is. What is added to
    it later is extra: see `recipe_lib.models.meta_init`.
    """
    if isinstance(spec, ExternalSpec):
        model = cast(Decoder, spec.build(dtype))
    else:
        with torch.device("meta"):
            model = Decoder(spec).to(dtype)
    model.note_built()
    return model


def allocate(
    model: nn.Module, device: torch.device, empty: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Gives a meta model uninitialized memory, for a process that has all of it; tied parameters
    stay tied.

    Buffers of an external model get the values that its class gave them. A rank of several calls
    `materialize`. empty: memory for one tensor; None: on the device.
    """
    ties = find_shared_parameters(model)
    model._apply(empty or (lambda tensor: torch.empty_like(tensor, device=device)))
    for (owner, name), *others in ties:
        for other, other_name in others:
            setattr(other, other_name, getattr(owner, name))
    if isinstance(model, LanguageModel) and holds_values(device):
        note_unwritten(model)
        for name, buffer in model.named_buffers():
            if name in model.computed_buffers:
                buffer.copy_(model.computed_buffers[name])


def find_shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter that several modules own."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [shared for shared in places.values() if len(shared) > 1]


@runtime_checkable
class StoredWeight(Protocol):
    """A module whose weight `[out, in]` is no parameter: it makes its own form of it, from rows
    that it asks for.
    """

    in_features: int
    out_features: int

    def fill_weight(self, read_rows: Callable[[int, int, slice], Tensor]) -> None:
        """read_rows: `(start, stop, columns)` to that part of the weight. All ranks that share the
        weight call it.
        """


def find_stored_weights(model: nn.Module) -> dict[str, StoredWeight]:
    """The modules whose weight is no parameter, by the name that it would have; `NAME_...` are what
    they keep.
    """
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, StoredWeight)
    }


def list_persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
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

    A parameter's values follow from (seed, its name, its full shape) alone. Each rank draws only
    the blocks of rows that its shard overlaps and keeps its part of them; nothing is communicated,
    and no more than a block is held. A quantized weight is made of the values that it would have
    had. An external model's vectors and numbers are what its own class begins with; extra
    parameters start as `reset_extra` says.
    """
    reset_extra(model, seed)
    vectors = spec.make_first_vectors(seed) if isinstance(spec, ExternalSpec) else {}
    stored = find_stored_weights(model)
    for name, module in stored.items():
        _fill_stored(module, f"{seed}/{name}", spec.init_std)
    extras = find_extra_tensors(model)
    for name, parameter in model.named_parameters():
        if name.rpartition("_")[0] in stored or name in extras:
            continue
        for local, offset in list_local_parts(model, name, parameter):
            if name in vectors:
                local.copy_(
                    vectors[name][
                        tuple(slice(at, at + n) for at, n in zip(offset, local.shape, strict=True))
                    ]
                )
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
    for local, offset in list_local_parts(model, name, parameter):
        _fill_normal(local, offset, parameter.shape, f"{seed}/{name}", spec.init_std)


def _fill_stored(module: StoredWeight, key: str, std: float) -> None:
    shape = torch.Size((module.out_features, module.in_features))

    def draw_rows(start: int, stop: int, columns: slice) -> Tensor:
        rows = torch.empty((stop - start, shape[1]))
        _fill_normal(rows, (start, 0), shape, key, std)
        return rows[:, columns]

    module.fill_weight(draw_rows)


def _fill_normal(
    local: Tensor, offset: tuple[int, ...], shape: torch.Size, key: str, std: float
) -> None:
    """Writes the part at `offset` of a normal tensor of `shape`."""
    fill_random(
        local,
        offset,
        shape,
        key,
        lambda values, generator: values.normal_(0.0, std, generator=generator),
    )


def fill_random(
    local: Tensor,
    offset: tuple[int, ...],
    shape: torch.Size,
    key: str,
    draw: Callable[[Tensor, torch.Generator], Tensor],
) -> None:
    """Writes into `local` the part that begins at `offset` of a random tensor of `shape`, which
    follows from `key`.

    draw: `fn(values, generator)` fills fp32 values on the host. Each block of rows has a generator
    of its own.
    """
    if local.numel() == 0:
        return
    block_rows = max(1, _BLOCK_ELEMENTS // math.prod(shape[1:]))
    first, last = offset[0], offset[0] + local.shape[0]
    columns = tuple(
        slice(start, start + size) for start, size in zip(offset[1:], local.shape[1:], strict=True)
    )
    for block in range(first // block_rows, -(-last // block_rows)):
        top, bottom = block * block_rows, min((block + 1) * block_rows, shape[0])
        digest = hashlib.sha256(f"{key}/{block}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        values = draw(torch.empty((bottom - top, *shape[1:]), dtype=torch.float32), generator)
        start, stop = max(top, first), min(bottom, last)
        local[start - first : stop - first].copy_(
            values[(slice(start - top, stop - top), *columns)]
        )


# Extra parameters: those, and the buffers, that a recipe adds to a model, which no checkpoint of
# its family has.
#
# `build_meta` notes what the model is made of; what is there besides, and no adapter's, is extra.
# It starts from the `reset_parameters` of its own module, which runs on a copy of that module with
# whole tensors on the host, so that a start follows from the seed and the module's name: each rank
# keeps its part of the same numbers.


_METHODS = ("reset_parameters", "_reset_parameters")  # torch's own modules have one or the other
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def find_extra_tensors(model: nn.Module, *, saved: bool = False) -> dict[str, Tensor]:
    """The extra parameters and buffers by name, of this rank's part of the model; shared ones once.

    saved: only what belongs into a file, without the buffers that are not persistent. Empty for a
    model that was not made by `build_meta`.
    """
    own = get_built_tensors(model)
    if own is None:
        return {}
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    others = set(own)
    for prefix, module in model.named_modules():
        inside = f"{prefix}." if prefix else ""
        others |= {inside + name for name in getattr(module, "adapter_tensors", ())}
        if hasattr(
            module, "fill_weight"
        ):  # a `StoredWeight`, whose parameters stand for its weight
            others |= {
                inside + name
                for name, _ in module.named_parameters(recurse=False)
                if name[:7] == "weight_"
            }
        if saved:
            others |= {inside + name for name in module._non_persistent_buffers_set}
    return {name: tensor for name, tensor in tensors.items() if name not in others}


def find_fully_saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What the file of an adapter has besides it: the extra parameters, and the weight of a score
    head.
    """
    return find_extra_tensors(model, saved=True) | {
        name: weight
        for name, weight in model.named_parameters()
        if name == SCORE and weight.requires_grad
    }


def find_extra_modules(model: nn.Module) -> list[str]:
    """The modules that are extra as a whole and have something to save: the outermost of each,
    lists of them apart.
    """
    found: dict[str, None] = {}
    for name in find_extra_tensors(model, saved=True):
        around = [
            path
            for path in _list_owners(model, name)
            if path and not _has_built_tensor(model, path)
        ]
        runs = [path for path in around if not isinstance(model.get_submodule(path), _CONTAINERS)]
        if runs:
            found[runs[-1]] = None
    return list(found)


def check_extra(model: nn.Module) -> None:
    """SetupError for an extra parameter or buffer that nothing could start, or that has the name of
    an adapter's.

    The model may be on the meta device.
    """
    extras = find_extra_tensors(model)
    adapted = any(hasattr(module, "adapter_tensors") for module in model.modules())
    for name in extras if adapted else ():
        if any(part.startswith("lora_") for part in name.split(".")):
            raise SetupError(
                f"{name}: lora_ begins the names of adapters; give what the recipe adds another"
                " name"
            )
    _assign_resets(model, extras.keys() - _get_computed_buffers(model))


@torch.no_grad()
def reset_extra(model: nn.Module, seed: int, loaded: Collection[str] = ()) -> None:
    """Starts the extra tensors of a materialized model, but for those that are loaded, by their
    modules' own methods.

    In fp32, whatever the model's type; numbers follow from (seed, the module's name). A module
    around others runs after them, as a constructor does. Buffers that were computed when their
    module was made, not on the meta device, keep what they have. Raises SetupError for what has no
    such method, or is left without a value by it.
    """
    extras = find_extra_tensors(model)
    wanted = extras.keys() - set(loaded) - _get_computed_buffers(model)
    for path, names in _assign_resets(model, wanted).items():
        if not all(holds_values(extras[name].device) for name in names):
            continue  # a plan
        with _seed_host_generators(f"{seed}/{path}"):
            values = _compute_reset_values(model.get_submodule(path))
        for name in sorted(names):
            _keep_part(model, name, extras[name], values.get(name.removeprefix(f"{path}.")))


def _get_computed_buffers(model: nn.Module) -> set[str]:
    """Buffers that have the values that their modules computed."""
    return set(model.computed_buffers) if isinstance(model, LanguageModel) else set()


def _has_built_tensor(model: nn.Module, path: str) -> bool:
    return any(name.startswith(f"{path}.") for name in get_built_tensors(model) or ())


def _list_owners(model: nn.Module, name: str) -> list[str]:
    """The module of an extra tensor, which may have the model's own too, and those around it that
    have none.
    """
    path = name.rpartition(".")[0]
    owners = [path]
    while "." in path and not _has_built_tensor(model, path):
        path = path.rpartition(".")[0]
        owners.append(path)
    return owners if len(owners) == 1 or not _has_built_tensor(model, owners[-1]) else owners[:-1]


def _assign_resets(model: nn.Module, names: Collection[str]) -> dict[str, list[str]]:
    """Module -> the extra tensors that its `reset_parameters`, and those of modules in it, are to
    start.

    It is the outermost extra module that has one. Raises SetupError for a tensor without one.
    """
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        around = _list_owners(model, name)
        able = [path for path in around if _find_reset(model.get_submodule(path)) is not None]
        if not able:
            kind = type(model.get_submodule(around[0])).__name__.removeprefix("FSDP")
            raise SetupError(
                f"{name}: no checkpoint has it, since the recipe added it, and its module ({kind})"
                " has no reset_parameters to start it from; put it into a module of your own with"
                " that method"
            )
        found.setdefault(able[-1], []).append(name)
    return found


def _find_reset(module: nn.Module) -> Callable[[], Any] | None:
    return next(
        (getattr(module, name) for name in _METHODS if callable(getattr(module, name, None))), None
    )


def _compute_reset_values(module: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and buffers of a module, as its methods start them on the host; without
    those they leave.
    """
    copy = _copy_on_host(module, {})
    before = {name: (tensor, tensor._version) for name, tensor in _iterate_tensors(copy)}
    _reset(copy)
    written = {}
    for name, tensor in _iterate_tensors(copy):
        was, version = before.get(name, (None, 0))
        if (was is not tensor or version != tensor._version) and not (
            tensor.is_floating_point() and tensor.isnan().any()
        ):
            written[name] = tensor
    return written


def _iterate_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _reset(module: nn.Module) -> None:
    for child in module.children():
        _reset(child)
    method = _find_reset(module)
    if method is not None:
        method()


def _copy_on_host(module: nn.Module, made: dict[int, Any]) -> nn.Module:
    """A module like it, with whole tensors of fp32 that have no values yet; what it shares stays
    shared.
    """
    if id(module) in made:
        return made[id(module)]
    kind = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)
    copy = nn.Module.__new__(kind)
    made[id(module)] = copy
    copy.__dict__.update(module.__dict__)

    def empty(tensor: Tensor | None) -> Any:
        if tensor is None or id(tensor) in made:
            return None if tensor is None else made[id(tensor)]
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        host = torch.full(tensor.shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype)
        trained = isinstance(tensor, nn.Parameter)
        made[id(tensor)] = nn.Parameter(host, tensor.requires_grad) if trained else host
        return made[id(tensor)]

    copy._parameters = {name: empty(parameter) for name, parameter in module._parameters.items()}
    copy._buffers = {name: empty(buffer) for name, buffer in module._buffers.items()}
    copy._modules = {
        name: None if child is None else _copy_on_host(child, made)
        for name, child in module._modules.items()
    }
    return copy


def _keep_part(model: nn.Module, name: str, tensor: Tensor, value: Tensor | None) -> None:
    """Copies this rank's part of a whole value."""
    if value is None or value.shape != tensor.shape:
        found = (
            "nothing"
            if value is None
            else f"the shape {list(value.shape)} for {list(tensor.shape)}"
        )
        raise SetupError(
            f"{name}: no checkpoint has it, since the recipe added it, and reset_parameters of its"
            f" module leaves {found} in it; give it every number there"
        )
    for local, offset in list_local_parts(model, name, tensor):
        local.copy_(
            value[tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True))]
        )


@contextmanager
def _seed_host_generators(key: str) -> Iterator[None]:
    """Inside the block the host's generators draw what follows from the key; after it they go on as
    before.
    """
    state = random.getstate()
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(
            seed
        )  # not those of accelerators, which have the dropout's numbers
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
