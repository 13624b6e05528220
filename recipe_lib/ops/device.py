"""Which device's kernels a tensor is computed with: those of its device, or, on a simulated one, of what it stands for."""

import torch


def kernels_of(device: torch.device) -> str:
    """`cpu`, `cuda`, or another device's type. A simulated device tells it in its module's attribute `kernels`."""
    if device.type in ("cpu", "cuda"):
        return device.type
    return str(getattr(torch.get_device_module(device), "kernels", device.type))
