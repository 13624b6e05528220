"""Run by every side's own interpreter: what to train, and a record of the steps that all sides keep
alike.

A step is marked when the host has read its loss, and the device has done all its work: from mark to
mark is a whole step of the tool, its batches and its log lines included.
"""

import json
import resource
import time
from pathlib import Path
from typing import Any


def read_task(path: str) -> dict[str, Any]:
    """Read the run in no tool's words, as gpu_peers.py has written it."""
    return dict(json.loads(Path(path).read_text(encoding="utf-8")))


class Recorder:
    """Losses, norms of the gradient before clipping, marks in seconds, and the most memory from the
    second step on.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        import torch

        self._output = Path(task["output"])
        self._device = torch.get_device_module("cuda") if task["device"] == "cuda" else None
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.marks: list[float] = []
        self._most = {"allocated": 0, "reserved": 0}

    def step(self, loss: Any, grad_norm: Any) -> None:
        """Record an optimizer step that is done.

        The first one makes the optimizer's states, and its memory is not counted.
        """
        self.losses.append(float(loss))
        self.grad_norms.append(float(grad_norm))
        if self._device is not None:
            self._device.synchronize()
        self.marks.append(time.perf_counter())
        if self._device is None:
            return
        if len(self.marks) > 1:  # a tool may reset the peaks at each step, as ours does
            self._most["allocated"] = max(
                self._most["allocated"], self._device.max_memory_allocated()
            )
            self._most["reserved"] = max(self._most["reserved"], self._device.max_memory_reserved())
        else:
            self._device.reset_peak_memory_stats()

    def write(self) -> None:
        """Write the record for gpu_peers.py.

        Bytes are of a GPU's allocator, or of the resident set.
        """
        record: dict[str, Any] = {
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "marks": self.marks,
        }
        if self._device is not None:
            record |= self._most
        else:
            record["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._output.write_text(json.dumps(record), encoding="utf-8")
