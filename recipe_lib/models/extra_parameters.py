"""Extra parameters: those, and the buffers, that a recipe adds to a model, which no checkpoint of its family has.

`build_meta` notes what the model is made of; what is there besides, and no adapter's, is extra. It starts from the
`reset_parameters` of its own module, which runs on a copy of that module with whole tensors on the host, so that a
start follows from the seed and the module's name: each rank keeps its part of the same numbers.
"""

import hashlib
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from recipe_lib.errors import SetupError
from recipe_lib.models.language_model import LanguageModel, own_parts, own_tensors
from recipe_lib.models.spec import SCORE
from recipe_lib.ops.device import holds_values

_METHODS = ("reset_parameters", "_reset_parameters")  # torch's own modules have one or the other
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def extra_tensors(model: nn.Module, *, saved: bool = False) -> dict[str, Tensor]:
    """The extra parameters and buffers by name, of this rank's part of the model; shared ones once.

    saved: only what belongs into a file, without the buffers that are not persistent. Empty for a model that was not
    made by `build_meta`.
    """
    own = own_tensors(model)
    if own is None:
        return {}
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    others = set(own)
    for prefix, module in model.named_modules():
        inside = f"{prefix}." if prefix else ""
        others |= {inside + name for name in getattr(module, "adapter_tensors", ())}
        if hasattr(module, "fill_weight"):  # a `StoredWeight`, whose parameters stand for its weight
            others |= {inside + name for name, _ in module.named_parameters(recurse=False) if name[:7] == "weight_"}
        if saved:
            others |= {inside + name for name in module._non_persistent_buffers_set}
    return {name: tensor for name, tensor in tensors.items() if name not in others}


def saved_whole(model: nn.Module) -> dict[str, Tensor]:
    """What the file of an adapter has besides it: the extra parameters, and the weight of a score head."""
    return extra_tensors(model, saved=True) | {
        name: weight for name, weight in model.named_parameters() if name == SCORE and weight.requires_grad
    }


def extra_modules(model: nn.Module) -> list[str]:
    """The modules that are extra as a whole and have something to save: the outermost of each, lists of them apart."""
    found: dict[str, None] = {}
    for name in extra_tensors(model, saved=True):
        around = [path for path in _owners(model, name) if path and not _holds_own(model, path)]
        runs = [path for path in around if not isinstance(model.get_submodule(path), _CONTAINERS)]
        if runs:
            found[runs[-1]] = None
    return list(found)


def check_extra(model: nn.Module) -> None:
    """SetupError for an extra parameter or buffer that nothing could start, or that has the name of an adapter's.

    The model may be on the meta device.
    """
    extras = extra_tensors(model)
    adapted = any(hasattr(module, "adapter_tensors") for module in model.modules())
    for name in extras if adapted else ():
        if any(part.startswith("lora_") for part in name.split(".")):
            raise SetupError(f"{name}: lora_ begins the names of adapters; give what the recipe adds another name")
    _resettable(model, extras.keys() - _computed(model))


@torch.no_grad()
def reset_extra(model: nn.Module, seed: int, loaded: Collection[str] = ()) -> None:
    """Starts the extra tensors of a materialized model, but for those that are loaded, by their modules' own methods.

    In fp32, whatever the model's type; numbers follow from (seed, the module's name). A module around others runs after
    them, as a constructor does. Buffers that were computed when their module was made, not on the meta device, keep
    what they have. Raises SetupError for what has no such method, or is left without a value by it.
    """
    extras = extra_tensors(model)
    wanted = extras.keys() - set(loaded) - _computed(model)
    for path, names in _resettable(model, wanted).items():
        if not all(holds_values(extras[name].device) for name in names):
            continue  # a plan
        with _seeded(f"{seed}/{path}"):
            values = _values_after_reset(model.get_submodule(path))
        for name in sorted(names):
            _keep_part(model, name, extras[name], values.get(name.removeprefix(f"{path}.")))


def _computed(model: nn.Module) -> set[str]:
    """Buffers that have the values that their modules computed."""
    return set(model.computed_buffers) if isinstance(model, LanguageModel) else set()


def _holds_own(model: nn.Module, path: str) -> bool:
    return any(name.startswith(f"{path}.") for name in own_tensors(model) or ())


def _owners(model: nn.Module, name: str) -> list[str]:
    """The module of an extra tensor, which may have the model's own too, and those around it that have none."""
    path = name.rpartition(".")[0]
    owners = [path]
    while "." in path and not _holds_own(model, path):
        path = path.rpartition(".")[0]
        owners.append(path)
    return owners if len(owners) == 1 or not _holds_own(model, owners[-1]) else owners[:-1]


def _resettable(model: nn.Module, names: Collection[str]) -> dict[str, list[str]]:
    """Module -> the extra tensors that its `reset_parameters`, and those of modules in it, are to start.

    It is the outermost extra module that has one. Raises SetupError for a tensor without one.
    """
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        around = _owners(model, name)
        able = [path for path in around if _reset_of(model.get_submodule(path)) is not None]
        if not able:
            kind = type(model.get_submodule(around[0])).__name__.removeprefix("FSDP")
            raise SetupError(
                f"{name}: no checkpoint has it, since the recipe added it, and its module ({kind}) has no "
                "reset_parameters to start it from; put it into a module of your own with that method"
            )
        found.setdefault(able[-1], []).append(name)
    return found


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return next((getattr(module, name) for name in _METHODS if callable(getattr(module, name, None))), None)


def _values_after_reset(module: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and buffers of a module, as its methods start them on the host; without those they leave."""
    copy = _copy_on_host(module, {})
    before = {name: (tensor, tensor._version) for name, tensor in _tensors(copy)}
    _reset(copy)
    written = {}
    for name, tensor in _tensors(copy):
        was, version = before.get(name, (None, 0))
        if (was is not tensor or version != tensor._version) and not (
            tensor.is_floating_point() and tensor.isnan().any()
        ):
            written[name] = tensor
    return written


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _reset(module: nn.Module) -> None:
    for child in module.children():
        _reset(child)
    method = _reset_of(module)
    if method is not None:
        method()


def _copy_on_host(module: nn.Module, made: dict[int, Any]) -> nn.Module:
    """A module like it, with whole tensors of fp32 that have no values yet; what it shares stays shared."""
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
        name: None if child is None else _copy_on_host(child, made) for name, child in module._modules.items()
    }
    return copy


def _keep_part(model: nn.Module, name: str, tensor: Tensor, value: Tensor | None) -> None:
    """Copies this rank's part of a whole value."""
    if value is None or value.shape != tensor.shape:
        found = "nothing" if value is None else f"the shape {list(value.shape)} for {list(tensor.shape)}"
        raise SetupError(
            f"{name}: no checkpoint has it, since the recipe added it, and reset_parameters of its module leaves "
            f"{found} in it; give it every number there"
        )
    for local, offset in own_parts(model, name, tensor):
        local.copy_(value[tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True))])


@contextmanager
def _seeded(key: str) -> Iterator[None]:
    """Inside the block the host's generators draw what follows from the key; after it they go on as before."""
    state = random.getstate()
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # not those of accelerators, which have the dropout's numbers
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
