"""Read what to train, and record the steps, in the same way for every side.

A side is our program or a peer, run by the interpreter of its own environment through a script of
this folder. A step is marked when the host has read its loss and the device has done all its work:
from mark to mark is a whole step of the tool, its batches and log lines included.
"""

import json
import resource
import time
from pathlib import Path
from typing import Any


def read_task(path: str) -> dict[str, Any]:
    """Read the task, a run in no tool's words, as `gpu_peers.py` has written it.

    Paths: `model`, `tokenizer`, `adapter` (a PEFT folder to start from), `rows` (.npy of token ids
    `[steps * batch_size, sequence]`), `texts` (the same as numbers in text), `folder` (for what the
    tool writes), `output` (for the record). `method`: full, lora or qlora. `dtype`: bf16 or fp32.
    `device`: cuda or cpu. `checkpointing`: none or full. `compiled`, `liger`, `unsloth`: switches.
    """
    return dict(json.loads(Path(path).read_text(encoding="utf-8")))


class Recorder:
    """Keeps losses, gradient norms, marks and peaks of memory, and writes them at the end.

    Peaks are of the second step on: the first makes the optimizer's states.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        """task: as `read_task` returns it."""
        import torch

        self._output = Path(task["output"])
        self._device = torch.get_device_module("cuda") if task["device"] == "cuda" else None
        self.losses: list[float] = []  # of each step
        self.grad_norms: list[float] = []  # of each step, before clipping
        self.marks: list[float] = []  # seconds of a clock, at the end of each step
        self._most = {"allocated": 0, "reserved": 0}  # peaks in bytes

    def step(self, loss: Any, grad_norm: Any) -> None:
        """Record an optimizer step that is done. loss, grad_norm: numbers, or tensors `[]`."""
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
        """Write the record for `gpu_peers.py`.

        Bytes are `allocated` and `reserved` of the GPU's allocator, or without a GPU `resident`,
        the process's largest resident set.
        """
        record: dict[str, Any] = {
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "marks": self.marks,
        }
        if self._device is not None:
            record |= self._most
        else:
            # Linux gives KiB.
            record["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._output.write_text(json.dumps(record), encoding="utf-8")
