"""States of the random number generators of one rank, as uint8 tensors in a safetensors file."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from recipe_lib.checkpoint.tensor_files import PlannedTensor, write_tensor_file
from recipe_lib.files import FileRecord


def file_name(rank: int) -> str:
    """Name of the rank's file in a state folder."""
    return f"rng-{rank + 1:05d}.safetensors"


def _device_states(device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    yield "cpu", torch.get_rng_state()
    if device.type != "cpu":
        yield device.type, torch.get_device_module(device).get_rng_state(device)


def save_rng(folder: Path, rank: int, device: torch.device) -> FileRecord:
    """Writes this rank's generators: the host's, and that of its device."""
    states = dict(_device_states(device))
    plan = [PlannedTensor(name, state.dtype, tuple(state.shape)) for name, state in states.items()]
    return write_tensor_file(folder / file_name(rank), plan, states.values(), {"format": "pt"})


def load_rng(folder: Path, rank: int, device: torch.device) -> None:
    """Sets this rank's generators as they were saved; a device type that has no saved state is left alone."""
    with safe_open(str(folder / file_name(rank)), framework="pt") as file:
        saved = set(file.keys())
        if "cpu" in saved:
            torch.set_rng_state(file.get_tensor("cpu"))
        if device.type != "cpu" and device.type in saved:
            torch.get_device_module(device).set_rng_state(file.get_tensor(device.type), device)
