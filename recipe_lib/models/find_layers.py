"""Where a model's layers are: the modules that sharding, checkpointing and compilation treat one by one."""

from torch import nn


def layer_names(model: nn.Module) -> list[str]:
    """Names of the layers: the elements with parameters of every outermost module list, in module order."""
    names: list[str] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(outer) for outer in lists):
            lists.append(f"{name}." if name else "")
            elements = module.named_children()  # by name: a part of a model may lack some
            names += [
                f"{lists[-1]}{index}" for index, element in elements if next(element.parameters(), None) is not None
            ]
    return names
