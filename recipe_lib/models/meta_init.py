"""Build a model on the meta device, give it memory, and fill it with random weights.

A run calls `build_meta`, adds adapters and parallelism, gives the model memory by `allocate` or by
FSDP, and fills it by `init_weights` or from a checkpoint. All ranks draw the same full tensors and
keep their parts, so that a start does not depend on the number of ranks. A spec is the model's
shape as plain numbers; an external model is one of another library.
"""

import hashlib
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
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
    get_tensor_names,
    iterate_tensors,
    list_local_parts,
    note_unwritten,
)
from recipe_lib.models.spec import SCORE, DecoderSpec, ExternalSpec, ModelSpec
from recipe_lib.ops.device import holds_values

_BLOCK_ELEMENTS = 2**22  # fp32 random numbers that are drawn at a time: 16 MiB


def build_meta(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """Build the model of a spec with parameters of `dtype` on the meta device: shapes, no bytes.

    An external model is of its own class, and is called as a `Decoder` is. Tensors that are added
    to the model later are extra, see `find_extra_tensors`.
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
    """Give a meta model that is not sharded uninitialized memory, in place.

    Buffers of an external model get the values that its class computed. empty: `fn(tensor)` returns
    uninitialized memory for a tensor; None: it is on the device.
    """
    shared_parameters = find_shared_parameters(model)
    model._apply(empty or (lambda tensor: torch.empty_like(tensor, device=device)))
    # `_apply` makes a new parameter for each module: tied ones are tied again.
    for (owner, name), *sharers in shared_parameters:
        for sharer, sharer_name in sharers:
            setattr(sharer, sharer_name, getattr(owner, name))
    if isinstance(model, LanguageModel) and holds_values(device):
        note_unwritten(model)
        for name, buffer in model.named_buffers():
            if name in model.computed_buffers:
                buffer.copy_(model.computed_buffers[name])


def find_shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter that several modules have: (module, name in it)."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    return [sharers for sharers in owners.values() if len(sharers) > 1]


@runtime_checkable
class StoredWeight(Protocol):
    """A module whose weight `[out_features, in_features]` is no parameter: it is quantized.

    The module asks for rows of the weight, and stores its own form of them.
    """

    in_features: int
    out_features: int

    def fill_weight(self, read_rows: Callable[[int, int, slice], Tensor]) -> None:
        """Read the weight and store it; all ranks that share the weight call this together.

        read_rows: `fn(start, stop, columns)` returns the weight's rows start to stop, of a slice of
        columns.
        """


def find_stored_weights(model: nn.Module) -> dict[str, StoredWeight]:
    """Return name of the weight -> module, of the modules whose weight is no parameter.

    A module has parameters in its place, whose names begin with the weight's and `_`.
    """
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, StoredWeight)
    }


def list_persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong into a checkpoint, by name."""
    buffers = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return buffers


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, spec: ModelSpec) -> None:
    """Fill a model's parameters in place: normal with `spec.init_std`; norms neutral, biases 0.

    A parameter's values follow from (seed, its name, its full shape) alone. A quantized weight is
    quantized from the values that it would have had. Vectors and scalars of an external model are
    those that its own class begins with. Extra tensors are filled by `reset_extra`. The model must
    have memory.
    """
    reset_extra(model, seed)
    vectors = spec.make_first_vectors(seed) if isinstance(spec, ExternalSpec) else {}
    stored = find_stored_weights(model)
    names = get_tensor_names(model)
    for name, module in stored.items():
        _fill_stored(module, f"{seed}/{names.get(name, name)}", spec.init_std)
    extras = find_extra_tensors(model)
    for name, parameter in model.named_parameters():
        # `weight_codes` and the like: parameters that stand for a stored weight, filled above.
        if name.rpartition("_")[0] in stored or name in extras:
            continue
        for local, offset in list_local_parts(model, name, parameter):
            if name in vectors:
                local.copy_(vectors[name][get_slices(offset, local.shape)])
            elif isinstance(spec, DecoderSpec) and name.endswith("norm.weight"):
                local.fill_(0.0 if spec.norm_offset else 1.0)
            elif name.endswith(".bias"):
                local.zero_()
            else:
                key = f"{seed}/{names.get(name, name)}"
                _fill_normal(local, offset, parameter.shape, key=key, std=spec.init_std)


@torch.no_grad()
def init_weight(model: nn.Module, name: str, seed: int, spec: ModelSpec) -> None:
    """Fill one parameter of a model with memory as `init_weights` does."""
    parameter = model.get_parameter(name)
    for local, offset in list_local_parts(model, name, parameter):
        _fill_normal(local, offset, parameter.shape, key=f"{seed}/{name}", std=spec.init_std)


def _fill_stored(module: StoredWeight, key: str, std: float) -> None:
    """Fill a stored weight with normal numbers. key, std: see `fill_random`, `_fill_normal`."""
    shape = torch.Size((module.out_features, module.in_features))

    def draw_rows(start: int, stop: int, columns: slice) -> Tensor:
        rows = torch.empty((stop - start, shape[1]))
        _fill_normal(rows, (start, 0), shape, key=key, std=std)
        return rows[:, columns]

    module.fill_weight(draw_rows)


def _fill_normal(
    local: Tensor, offset: tuple[int, ...], shape: torch.Size, *, key: str, std: float
) -> None:
    """Fill `local` with the part at `offset` of a normal tensor of `shape`, see `fill_random`.

    std: its standard deviation.
    """
    fill_random(
        local,
        offset=offset,
        shape=shape,
        key=key,
        draw=lambda values, generator: values.normal_(0.0, std, generator=generator),
    )


def get_slices(offset: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a part, given where it begins and its size in each dimension."""
    return tuple(slice(start, start + size) for start, size in zip(offset, sizes, strict=True))


def fill_random(
    local: Tensor,
    offset: tuple[int, ...],
    shape: torch.Size,
    key: str,
    draw: Callable[[Tensor, torch.Generator], Tensor],
) -> None:
    """Fill `local` with the part that begins at `offset` of a random tensor of `shape`.

    key: a text that, with the shape, decides the tensor's values. draw: `fn(values, generator)`
    fills an fp32 tensor on the host, and returns it.
    """
    if local.numel() == 0:
        return
    # Each block of rows has a generator of its own, so that a rank draws only the blocks that its
    # shard overlaps, and holds one at a time.
    block_rows = max(1, _BLOCK_ELEMENTS // math.prod(shape[1:]))
    first, last = offset[0], offset[0] + local.shape[0]
    columns = get_slices(offset[1:], local.shape[1:])
    for block in range(first // block_rows, -(-last // block_rows)):
        top = block * block_rows
        bottom = min(top + block_rows, shape[0])
        digest = hashlib.sha256(f"{key}/{block}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        values = draw(torch.empty((bottom - top, *shape[1:]), dtype=torch.float32), generator)
        start = max(top, first)
        stop = min(bottom, last)
        local[start - first : stop - first].copy_(
            values[(slice(start - top, stop - top), *columns)]
        )


# Extra tensors: the parameters and buffers that a recipe adds to a model, which no checkpoint of
# its family has.
#
# `build_meta` records the model's own tensors; all others, but an adapter's, are extra. They get
# their first values by `reset_parameters` of their module, which runs on a copy of that module with
# full tensors on the host. So the values follow from the seed and the module's name, and each rank
# keeps its part.


# Names of the method that gives a module's tensors their first values. torch's own modules have one
# or the other.
_METHODS = ("reset_parameters", "_reset_parameters")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def find_extra_tensors(model: nn.Module, *, saved: bool = False) -> dict[str, Tensor]:
    """Return the extra parameters and buffers of this rank's part of the model, by name.

    Shared ones are there once. saved: True: leave out buffers that are not persistent, which no
    file has. Empty for a model that `build_meta` did not build.
    """
    built_tensors = get_built_tensors(model)
    if built_tensors is None:
        return {}
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    not_extra = set(built_tensors)
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        not_extra |= {prefix + name for name in getattr(module, "adapter_tensors", ())}
        if hasattr(module, "fill_weight"):
            # A `StoredWeight`, whose parameters `weight_...` stand for its weight.
            not_extra |= {
                prefix + name for name in module._parameters if name.startswith("weight_")
            }
        if saved:
            not_extra |= {prefix + name for name in module._non_persistent_buffers_set}
    return {name: tensor for name, tensor in tensors.items() if name not in not_extra}


def find_fully_saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that an adapter's file has besides the adapter, by name.

    These are the extra tensors, and a trained weight of a score head.
    """
    return find_extra_tensors(model, saved=True) | {
        name: weight
        for name, weight in model.named_parameters()
        if name == SCORE and weight.requires_grad
    }


def find_extra_modules(model: nn.Module) -> list[str]:
    """Return the names of the outermost modules that are extra as a whole and have saved tensors.

    Of an extra list or dict of modules its elements are named, not the list or dict.
    """
    extra_modules: dict[str, None] = {}
    for name in find_extra_tensors(model, saved=True):
        candidates = [
            path
            for path in _list_owners(model, name)
            if path
            and not _has_built_tensor(model, path)
            and not isinstance(model.get_submodule(path), _CONTAINERS)
        ]
        if candidates:
            extra_modules[candidates[-1]] = None
    return list(extra_modules)


def check_extra(model: nn.Module) -> None:
    """Raise SetupError for an extra tensor that no module can fill, or with an adapter's name.

    The model may be on the meta device.
    """
    extras = find_extra_tensors(model)
    is_adapted = any(hasattr(module, "adapter_tensors") for module in model.modules())
    for name in extras:
        if is_adapted and any(part.startswith("lora_") for part in name.split(".")):
            raise SetupError(
                f"{name}: lora_ begins the names of adapters; give what the recipe adds another"
                " name"
            )
    _assign_resets(model, extras.keys() - _get_computed_buffers(model))


@torch.no_grad()
def reset_extra(model: nn.Module, seed: int, loaded: Collection[str] = ()) -> None:
    """Fill the extra tensors of a model by `reset_parameters` of their modules, in place.

    The method runs in fp32, whatever the model's dtype. Values follow from (seed, the module's
    name). A module's method runs after those of modules in it, as a constructor's code does. The
    model must have memory. Raises SetupError for a tensor whose module has no such method, or that
    the method leaves without values.

    loaded: names of tensors that have values already, and keep them. Buffers that were computed
    when their module was made keep them too.
    """
    extras = find_extra_tensors(model)
    unset = extras.keys() - set(loaded) - _get_computed_buffers(model)
    for path, names in _assign_resets(model, unset).items():
        if not all(holds_values(extras[name].device) for name in names):
            continue  # a plan's simulated device
        with seed_host_generators(f"{seed}/{path}"):
            values = _compute_reset_values(model.get_submodule(path))
        for name in sorted(names):
            _keep_part(
                model,
                name=name,
                tensor=extras[name],
                value=values.get(name.removeprefix(f"{path}.")),
            )


def _get_computed_buffers(model: nn.Module) -> set[str]:
    return set(model.computed_buffers) if isinstance(model, LanguageModel) else set()


def _has_built_tensor(model: nn.Module, path: str) -> bool:
    return any(name.startswith(f"{path}.") for name in get_built_tensors(model) or ())


def _list_owners(model: nn.Module, name: str) -> list[str]:
    """Return the name of an extra tensor's module, then of those around it, from the inside out.

    Those around it are extra as a whole; the module itself may have tensors of the model too.
    """
    path = name.rpartition(".")[0]
    owners = [path]
    while "." in path and not _has_built_tensor(model, path):
        path = path.rpartition(".")[0]
        owners.append(path)
    return owners if len(owners) == 1 or not _has_built_tensor(model, owners[-1]) else owners[:-1]


def _assign_resets(model: nn.Module, names: Collection[str]) -> dict[str, list[str]]:
    """Return module name -> the extra tensors that its reset and those of modules in it fill.

    names: of extra tensors. For each the outermost extra module that has a reset is taken. Raises
    SetupError for a tensor for which there is none.
    """
    names_of_module: dict[str, list[str]] = {}
    for name in sorted(names):
        owners = _list_owners(model, name)
        resettable = [path for path in owners if _find_reset(model.get_submodule(path)) is not None]
        if not resettable:
            kind = type(model.get_submodule(owners[0])).__name__.removeprefix("FSDP")
            raise SetupError(
                f"{name}: no checkpoint has it, since the recipe added it, and its module ({kind})"
                " has no reset_parameters to start it from; put it into a module of your own with"
                " that method"
            )
        names_of_module.setdefault(resettable[-1], []).append(name)
    return names_of_module


def _find_reset(module: nn.Module) -> Callable[[], Any] | None:
    """Return a module's method of `_METHODS`; None if it has neither."""
    return next(
        (getattr(module, name) for name in _METHODS if callable(getattr(module, name, None))), None
    )


def _compute_reset_values(module: nn.Module) -> dict[str, Tensor]:
    """Return name -> full parameter or buffer of a module, as its reset fills it, on the host.

    Those that it leaves without values are left out.
    """
    copy = _copy_on_host(module, {})
    before = {name: (tensor, tensor._version) for name, tensor in iterate_tensors(copy)}
    _reset(copy)
    written = {}
    for name, tensor in iterate_tensors(copy):
        previous, version = before.get(name, (None, 0))
        is_written = previous is not tensor or version != tensor._version
        # The copy was filled with nan: where some is left, a part was not written.
        has_nan = tensor.is_floating_point() and bool(tensor.isnan().any())
        if is_written and not has_nan:
            written[name] = tensor
    return written


def _reset(module: nn.Module) -> None:
    """Run the resets of a module and of all in it, inner ones first."""
    for child in module.children():
        _reset(child)
    method = _find_reset(module)
    if method is not None:
        method()


def _copy_on_host(module: nn.Module, copies: dict[int, Any]) -> nn.Module:
    """Return a copy of a module with full fp32 tensors on the host, filled with nan (integers: 0).

    copies: id of a module or tensor -> its copy, so that shared ones stay shared; it is added to.
    """
    if id(module) in copies:
        return copies[id(module)]
    # FSDP gives a module a class of its own, with bases FSDPModule and the module's class. The copy
    # is of the module's class.
    kind = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)
    # Made without its constructor, whose arguments are not known here.
    copy = nn.Module.__new__(kind)
    copies[id(module)] = copy
    copy.__dict__.update(module.__dict__)

    def copy_empty(tensor: Tensor | None) -> Any:
        if tensor is None or id(tensor) in copies:
            return None if tensor is None else copies[id(tensor)]
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        host = torch.full(tensor.shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype)
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(host, tensor.requires_grad) if is_parameter else host
        return copies[id(tensor)]

    copy._parameters = {name: copy_empty(value) for name, value in module._parameters.items()}
    copy._buffers = {name: copy_empty(value) for name, value in module._buffers.items()}
    copy._modules = {
        name: None if child is None else _copy_on_host(child, copies)
        for name, child in module._modules.items()
    }
    return copy


def _keep_part(model: nn.Module, name: str, tensor: Tensor, value: Tensor | None) -> None:
    """Copy this rank's part of a full value into the extra tensor of a name.

    value: None: the reset has left none. Raises SetupError then, and for one of another shape.
    """
    if value is None or value.shape != tensor.shape:
        shape = None if value is None else list(value.shape)
        fault = "nothing" if shape is None else f"the shape {shape} for {list(tensor.shape)}"
        raise SetupError(
            f"{name}: no checkpoint has it, since the recipe added it, and reset_parameters of its"
            f" module leaves {fault} in it; give it every number there"
        )
    for local, offset in list_local_parts(model, name, tensor):
        local.copy_(value[get_slices(offset, local.shape)])


@contextmanager
def seed_host_generators(key: str) -> Iterator[None]:
    """Seed the host's random generators by the key inside the block, and restore them after it."""
    state = random.getstate()
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Not `torch.manual_seed`: it would seed accelerators too, from which dropout draws.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
