"""Build the facts that `tune doctor` gathers of a machine, for tests to plant faults in.

`build_healthy()` returns all of them, nested dicts as the command measures them; `set_fact` plants.
Sizes are in bytes, rates in bytes a second and for matmuls in operations a second.
"""

import copy
from typing import Any

from recipe_lib.config.scan_packages import SCAN_PACKAGES
from recipe_lib.units import GIB

RANGE = ("all_reduce", "all_gather", "reduce_scatter")  # the collectives that are measured


def build_links(backend: str = "nccl", ranks: int = 2, **changes: Any) -> dict[str, Any]:
    """Return measured collectives without a fault. changes: keys to replace."""
    points = []  # time over size: 10 us and 10 GB/s
    for size in (4096, 2**20):
        for name in RANGE:
            points.append({"operation": name, "bytes": size, "seconds": 1e-5 + size / 1e10})
    return {"backend": backend, "ranks": ranks, "points": points, "failed": []} | changes


def build_gpu(**changes: Any) -> dict[str, Any]:
    """Return an RTX 4090 as torch describes it. changes: keys to replace."""
    size = int(23.5 * GIB)
    card = {
        "name": "NVIDIA GeForce RTX 4090",
        "memory": size,
        "free": size - GIB // 2,
        "capability": [8, 9],
    }
    return card | changes


def build_checked_copies(wrong: list[str] | None = None) -> dict[str, Any]:
    """Return the checked copies between two GPUs. wrong: faults of the first copy."""
    return {
        "copies from GPU 0 to GPU 1": {"wrong": wrong or [], "rate": 2e10},
        "copies from GPU 1 to GPU 0": {"wrong": [], "rate": 2e10},
    }


def build_healthy() -> dict[str, Any]:
    """Return the facts of a machine with two RTX 4090 and no fault."""
    folder = {"path": "/runs", "total": 900 * GIB, "free": 500 * GIB, "fault": None}
    calibration = {
        "version": 1, "device": "NVIDIA GeForce RTX 4090", "dry_run": False, "torch": "2.13.0", "date": "2026-11-22",
        "matmul": {"bf16": [{"shape": [4096, 14336, 4096], "rate": 1.4e14}]}, "attention": 6e13, "bandwidth": 8e11,
        "host_seconds": 5e-6, "kernel_seconds": 2e-6, "link_bandwidth": None,
        "copy_to_device": 2.4e10, "copy_to_host": 2.5e10,
    }  # fmt: skip
    facts = {
        "machine": {
            "python": "3.12.3",
            "system": "Linux",
            "cores": 32,
            "scan_kernels": dict.fromkeys(SCAN_PACKAGES),
            "packages": dict.fromkeys(("safetensors", "peft", "triton"), "1.0")
            | {"torch": "2.13.0+cu130", "torchao": "0.18.0"},
            "compiler": "/usr/bin/gcc",
            "driver": "580.65",
            "listed_gpus": ["NVIDIA GeForce RTX 4090"] * 2,
            "shared_memory": {"path": "/dev/shm", "total": 128 * GIB, "free": 127 * GIB, "fault": None},
            "folders": [{"use": use, **folder} for use in ("output_dir", "models", "data.cache_dir")],
        },
        "steps": {
            "torch": {
                "version": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9",
                "gpus": [build_gpu(), build_gpu()], "error": None,
            },
            "host memory": {"total": 256 * GIB, "free": 200 * GIB, "what": "free on this machine"},
            "int8 matmuls": 2.8e14,
            "fp8 matmuls": 2.7e14,
            "calibration": calibration,
            **build_checked_copies(),
        },
        "failed": {},
        "links": build_links(),
    }  # fmt: skip
    for number in (0, 1):
        rates = {"copy_to_device": 2.4e10, "copy_to_host": 2.5e10, "bf16": 1.4e14 + number * 1e12}
        facts["steps"][f"rates of GPU {number}"] = rates
    return copy.deepcopy(facts)  # else a change of one folder or driver row would change others


def set_fact(facts: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """Set one value of the facts in place; return them.

    place: a path such as `machine/memory/available` or `steps/torch/gpus/0/free`.
    """
    *parents, last = place.split("/")
    target: Any = facts
    for key in parents:
        target = target[int(key) if isinstance(target, list) else key]
    target[int(last) if isinstance(target, list) else last] = value
    return facts
