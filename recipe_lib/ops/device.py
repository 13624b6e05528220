"""Whose kernels a tensor is computed with.

Those of its device, or on a simulated device those of the device that it stands for. The module of
a simulated device (`torch.get_device_module`) says so in its attributes.
"""

import torch


def get_kernel_type(device: torch.device) -> str:
    """Return `cpu`, `cuda`, or another device's type."""
    if device.type in ("cpu", "cuda", "meta"):
        return device.type
    # A simulated device tells it in its module's attribute `kernels`.
    return str(getattr(torch.get_device_module(device), "kernels", device.type))


def get_compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU, or of the one that a simulated device stands for.

    None on a CPU.
    """
    if get_kernel_type(device) != "cuda":
        return None
    major, minor = torch.get_device_module(device).get_device_capability(device)
    return int(major), int(minor)


def holds_values(device: torch.device) -> bool:
    """Return True if tensors on the device have values, which those of a simulated one have not."""
    return bool(getattr(torch.get_device_module(device), "holds_values", True))


def has_host(device: torch.device) -> bool:
    """Return True if there is host memory besides the device's.

    Not on a CPU, nor on a device that stands for one.
    """
    return get_kernel_type(device) != "cpu"
