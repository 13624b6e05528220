"""Which layers of a model are alike: the same code with the same settings, and exchanges at the same calls.

What one of them does to its tensors is then what another one does to its own, so that a compiler has to look at one
alone. Only what compares equal counts: settings that are objects of a layer's own make it one of a kind.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan

# Attributes that number layers; whoever runs one in the place of another one sees to it that they are not read.
NUMBERS = ("layer_idx", "layer_id", "layer_number")
_OF_ALL = frozenset(vars(nn.Module())) | {"forward", *NUMBERS}


def alike_layers(
    layers: Mapping[str, nn.Module], plan: ShardingPlan, forwards: Mapping[str, Callable[..., Any]]
) -> dict[str, str]:
    """For each layer the first one that it is like, by name. forwards: of modules by name, before a plan ran them."""
    found: dict[str, str] = {}
    first: list[tuple[Any, str]] = []
    for name, layer in layers.items():
        described = _described(layer, name, plan, forwards)
        like = next((other for each, other in first if each == described), None)
        if like is None:
            first.append((described, name))
        found[name] = like or name
    return found


def _described(layer: nn.Module, path: str, plan: ShardingPlan, forwards: Mapping[str, Callable[..., Any]]) -> Any:
    """All that a layer's forward depends on apart from its tensors."""
    modules = []
    for name, module in layer.named_modules():
        forward = forwards.get(f"{path}.{name}" if name else path)
        settings = {key: _comparable(value) for key, value in vars(module).items() if key not in _OF_ALL}
        held = [key for tensors in (module._parameters, module._buffers) for key in tensors if tensors[key] is not None]
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()] if name else []
        modules.append((name, type(module), getattr(forward, "__func__", forward), settings, held, hooks))
    return modules, _exchanges(path, plan)


def _comparable(value: Any) -> Any:
    """What compares equal only to the same setting: containers by what is in them, tensors and others by identity."""
    if isinstance(value, (list, tuple)):
        return type(value), [_comparable(each) for each in value]
    if isinstance(value, dict):
        return {key: _comparable(each) for key, each in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value), value
    return id(value) if isinstance(value, Tensor) or type(value).__hash__ is None else value


def _exchanges(path: str, plan: ShardingPlan) -> Any:
    """The plan's boundaries, parameters to assemble and rewrites in a layer, by names within it."""
    inside, numbers = f"{path}.", {-1: -1}
    boundaries = []
    for each in plan.boundaries:
        if each.module == path or each.module.startswith(inside):
            own, named = numbers.setdefault(each.activation, len(numbers)), each.module.removeprefix(path)
            boundaries.append(replace(each, module=named, activation=own, axes=(), parameters=(), source=""))
    whole = [replace(each, name=each.name.removeprefix(inside), axis=0, reason="") for each in plan.parameters
             if each.whole and each.name.startswith(inside)]  # fmt: skip
    divided = [replace(each, module=each.module.removeprefix(path), axes=()) for each in plan.rewrites
               if each.module == path or each.module.startswith(inside)]  # fmt: skip
    return boundaries, whole, divided
