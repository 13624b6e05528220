"""The simulated device's streams and events have what torch's own have."""

import pytest
import torch

from recipe_lib.plan.simulated_world import simulated_device

# Of a driver's handles, which no simulation has and torch's Python code does not ask for.
HANDLES = {"native_handle", "event_id", "from_ipc_handle", "ipc_handle"}


@pytest.mark.parametrize("name", ["Stream", "Event"])
def test_what_torch_calls_is_there(name: str) -> None:
    theirs = {member for member in dir(getattr(torch, name)) if not member.startswith("_")}
    ours = {
        *dir(getattr(simulated_device, name)),
        "device",
        "stream_id",
    }  # the last two of each object
    assert theirs - ours <= HANDLES
