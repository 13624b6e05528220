"""Name the packages with kernels for the scans of hybrid models, and say which of them run."""

import importlib.metadata
from collections.abc import Mapping

# Distribution -> the package that is imported.
SCAN_PACKAGES = {
    "flash-linear-attention": "fla",
    "causal-conv1d": "causal_conv1d",
    "mamba-ssm": "mamba_ssm",
}


def find_version(distribution: str) -> str | None:
    """Return the version of a package, without importing it; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_scans(versions: Mapping[str, str | None], device_type: str) -> str:
    """Return a text on what computes scans on a device.

    versions: of the packages that have kernels for them; None: it is not here. device_type: such as
    `cuda`.
    """
    kernels = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = " and ".join(name for name, version in versions.items() if version is None)
    if not kernels:
        return f"torch's loops, without the kernels of {missing}"
    if device_type != "cuda":
        return f"torch's loops, as the kernels of {kernels} run on a GPU alone"
    return f"kernels of {kernels}" + (f", and torch's loops without {missing}" if missing else "")
