"""The most memory a process has held since it was last asked: on its device, or its resident set on a CPU."""

import resource
import sys
from pathlib import Path
from typing import TypedDict

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): writing it resets the peak resident set


class Peaks(TypedDict):
    """Bytes since the last reset.

    active: in blocks handed out, and in freed ones that a stream still uses. allocated: in blocks handed out.
    reserved: taken from the device by the caching allocator. kind: `device`; or `resident set`, where all three are
    the process's resident set; or `resident set since start`, where the system does not let that be reset.
    """

    active: int
    allocated: int
    reserved: int
    kind: str


class PeakMemory:
    """Peaks of the memory of `device`; `reset` starts a new measurement, `read` gives the peaks since then."""

    def __init__(self, device: torch.device):
        self.device = device
        self.resettable = False
        self.reset()

    def reset(self) -> None:
        """Peaks are counted from what is held now."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)
            return
        try:
            _CLEAR.write_text(_RESET_PEAK)
            self.resettable = True
        except OSError:  # no such file (macOS), or not allowed: the peak since the start is all there is
            self.resettable = False

    def read(self) -> Peaks:
        """The peaks, in bytes."""
        if self.device.type != "cpu":
            stats = torch.get_device_module(self.device).memory_stats(self.device)
            active, allocated, reserved = (
                int(stats.get(f"{kind}_bytes.all.peak", 0)) for kind in ("active", "allocated", "reserved")
            )
            return Peaks(active=active, allocated=allocated, reserved=reserved, kind="device")
        peak = _resident_peak()
        kind = "resident set" if self.resettable else "resident set since start"
        return Peaks(active=peak, allocated=peak, reserved=peak, kind=kind)


def _resident_peak() -> int:
    """Bytes of the process's peak resident set."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
