"""Whose kernels a tensor is computed with: its device's, or on a simulated one those of the device
it stands for.
"""

import torch


def get_kernel_type(device: torch.device) -> str:
    """`cpu`, `cuda`, or another device's type. A simulated device tells it in its module's
    attribute `kernels`.
    """
    if device.type in ("cpu", "cuda", "meta"):
        return device.type
    return str(getattr(torch.get_device_module(device), "kernels", device.type))


def get_compute_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU, or of the one that a simulated device stands for; None on a
    CPU.
    """
    if get_kernel_type(device) != "cuda":
        return None
    module = torch.get_device_module(device)
    found = module.get_device_capability(device)
    return int(found[0]), int(found[1])


def holds_values(device: torch.device) -> bool:
    """Whether tensors there are made of numbers: not on a simulated device, whose module's
    `holds_values` is False.
    """
    return bool(getattr(torch.get_device_module(device), "holds_values", True))


def has_host(device: torch.device) -> bool:
    """Whether there is host memory besides the device's: not on a CPU, nor on a device that stands
    for one.
    """
    return get_kernel_type(device) != "cpu"
