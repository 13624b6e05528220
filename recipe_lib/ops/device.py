"""Tell what a device computes with, also one that `tune plan` simulates.

Code asks these functions where kernels or memory differ. A simulated device stands for a CPU or a
GPU; its tensors have sizes but no values. Its module (`torch.get_device_module`) has the attributes
`kernels` and `holds_values`, and `get_device_capability`.
"""

import torch


def get_kernel_type(device: torch.device) -> str:
    """Return the device type whose kernels compute tensors of the device: `cpu`, `cuda`, ..."""
    if device.type in ("cpu", "cuda", "meta"):
        return device.type
    # Of a simulated device: `cpu` or `cuda`.
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
    """Return True if tensors on the device have values; those of a simulated device have none."""
    return bool(getattr(torch.get_device_module(device), "holds_values", True))


def has_host(device: torch.device) -> bool:
    """Return True if host memory is not the device's own: for all devices but a CPU."""
    return get_kernel_type(device) != "cpu"
