"""Register the optimizers that ship: one in each file, which has the name of `optimizer.name`."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
