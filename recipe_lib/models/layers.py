"""Where a model's layers are: the modules that sharding, checkpointing and compilation treat one by one."""

from torch import nn


def layer_names(model: nn.Module) -> list[str]:
    """Names of the layers: the elements with parameters of every outermost module list, in module order."""
    names: list[str] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(outer) for outer in lists):
            lists.append(f"{name}." if name else "")
            held = (index for index, element in enumerate(module) if next(element.parameters(), None) is not None)
            names += [f"{lists[-1]}{index}" for index in held]
    return names
