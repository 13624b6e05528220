"""Choose between the kernels and the loops of scans, by device, and say which will run.

Transformers computes scans (gated delta rules, Mamba's, short convolutions) by a kernel of another
package where that is installed, whatever the device, and else by a loop in torch's operators. It
leaves out arguments that a kernel does not take. `choose_scans_by_device` lets the kernels, which
are for GPUs, run there alone, and `check_scan_kernels` refuses packages that lack a function or an
argument.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from recipe_lib.config.scan_packages import SCAN_PACKAGES, find_version
from recipe_lib.errors import SetupError
from recipe_lib.external.planned_scans import PLANNED
from recipe_lib.external.recomputed_scans import SCANS, recompute_scan
from recipe_lib.ops.device import get_kernel_type

# What transformers' wrapper around a loop refers to.
_WRAPPED = {"func_name", "package", "torch_function", "implementation", "is_new_implementation"}
_MODELS = "transformers.models."  # how the names of files with its classes begin
# Functions for one new token, which training does not call.
_GENERATION = re.compile("update|recurrent")
# Arguments of the loops that do not change what they compute.
_NEEDLESS = {"chunk_size", "use_mambapy", "use_associative_scan"}


@dataclass(frozen=True)
class ScanKernel:
    """A scan of a class of transformers."""

    name: str  # of the kernel
    package: str  # that has the kernel
    function: Callable[..., Any]  # as the class calls it: the kernel, or else the loop
    loop: Callable[..., Any]
    kernel: Callable[..., Any] | None  # None: the package is not here, or has none

    @property
    def distribution(self) -> str:
        """The name by which the package is installed."""
        names = (name for name, package in SCAN_PACKAGES.items() if package == self.package)
        return next(names, self.package)

    def explain_fault(self) -> str:
        """Return why an installed package does not serve; empty: it does, or is not installed."""
        if self.kernel is not None:
            takes = inspect.signature(self.kernel).parameters
            keywords = [
                name
                for name, parameter in inspect.signature(self.loop).parameters.items()
                if parameter.default is not parameter.empty
            ]
            missing = [name for name in keywords if name not in takes and name not in _NEEDLESS]
            return f"its {self.name} takes no {missing[0]}" if missing else ""
        if find_spec(self.package) is None:
            return ""
        try:
            import_module(self.package)
        except Exception as error:  # noqa: BLE001
            # Kernels are linked with CUDA's libraries, which a machine without GPU lacks.
            first_line = str(error).partition("\n")[0]
            return f"its import fails ({first_line})" if torch.cuda.is_available() else ""
        return f"it has no {self.name}"


def find_scans(model: nn.Module) -> list[ScanKernel]:
    """Return the scans that the classes of a model's modules call in training."""
    return _find_scans(map(type, model.modules()))


def _find_scans(kinds: Iterable[type]) -> list[ScanKernel]:
    scans = [scan for scope in _list_scopes(kinds) for scan in map(_read_scan, scope.values())]
    return [scan for scan in scans if scan is not None and not _GENERATION.search(scan.name)]


def _list_scopes(kinds: Iterable[type]) -> list[dict[str, Any]]:
    """Return the names of each of transformers' files that has some of these classes."""
    files = {base.__module__ for kind in set(kinds) for base in kind.__mro__}
    return [vars(sys.modules[file]) for file in sorted(files) if file.startswith(_MODELS)]


def _read_scan(function: Any) -> ScanKernel | None:
    """Return the scan that a function computes; None for any other function."""
    if scan := getattr(function, "scan", None):
        return scan if isinstance(scan, ScanKernel) else None
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if not _WRAPPED <= set(names):
        return None
    values = dict(zip(names, (cell.cell_contents for cell in function.__closure__), strict=True))
    kernel = values["implementation"] if values["is_new_implementation"] else None
    return ScanKernel(
        values["func_name"],
        values["package"],
        function,
        loop=values["torch_function"],
        kernel=kernel,
    )


def choose_scans_by_device(model: nn.Module) -> None:
    """Let kernels compute scans on a GPU, and loops elsewhere.

    The functions are replaced where the classes of a model's modules find them, once in a process.
    """
    for scope in _list_scopes(map(type, model.modules())):
        for name, function in list(scope.items()):
            scan = _read_scan(function)
            if scan is not None and scan.function is function:
                scope[name] = _choose_by_device(scan)


def _choose_by_device(scan: ScanKernel) -> Callable[..., Any]:
    signature = inspect.signature(scan.loop)
    plan = PLANNED.get(scan.name)
    loop = recompute_scan(scan.loop) if scan.loop.__name__ in SCANS else scan.loop

    @wraps(scan.loop)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (scan.kernel and uses_kernels(args[0])):
            return scan.function(*args, **kwargs)
        if scan.kernel and plan and is_planned(args[0]):
            return plan(signature.bind(*args, **kwargs).arguments)
        return loop(*args, **kwargs)

    run.scan = scan  # type: ignore[attr-defined]
    return run


def is_planned(values: Tensor) -> bool:
    """Return True for a tensor without data that stands for one on a GPU."""
    return get_kernel_type(values.device) == "cuda" and not uses_kernels(values)


def uses_kernels(values: Tensor) -> bool:
    """Return True for a tensor that kernels can read: on a GPU, and with data."""
    return values.is_cuda and not isinstance(values, FakeTensor)


def takes_documents(module: nn.Module, values: Tensor) -> bool:
    """Return True if kernels compute a module's scans, and keep documents in a row apart.

    values: on the device of its arguments.
    """
    kind: Any = type(module)
    return uses_kernels(values) and _takes_documents(kind)


@cache
def _takes_documents(kind: Any) -> bool:
    scans = _find_scans([kind])
    source = "".join(
        inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith(_MODELS)
    )
    # The class has a name of its own for the bounds; arguments that it does not know it hands on.
    passes = {"cu_seqlens": "cu_seq_lens_q" in source, "seq_idx": "**kwargs" in source}
    return bool(scans) and all(
        scan.kernel is not None
        and any(passes[name] for name in passes.keys() & inspect.signature(scan.kernel).parameters)
        for scan in scans
    )


def check_scan_kernels(model: nn.Module) -> None:
    """Raise SetupError if an installed package does not serve the classes of a model's modules."""
    for scan in find_scans(model):
        if fault := scan.explain_fault():
            name = scan.distribution
            raise SetupError(
                f"{name}: found version {find_version(name) or 'unknown'}, which"
                f" {type(model).__name__} cannot use, as {fault}; `pip install --upgrade {name}`,"
                " or uninstall it to run torch's loop"
            )


def list_scan_packages(model: nn.Module) -> tuple[tuple[str, str | None], ...]:
    """Return (package, version) of the kernels that a model's scans have; None: it is not here."""
    versions = {
        scan.distribution: (find_version(scan.distribution) or "of no version")
        if scan.kernel
        else None
        for scan in find_scans(model)
    }
    return tuple(versions.items())
