#!/usr/bin/env bash
# UntypedStorage.resize_ to the size that a storage has allocates its memory once more, and copies.
#
# Versions: torch 2.13.0 (Python 3.11, Linux x86-64, CPU). On an H200 (torch 2.11.0+cu130) the peak of the allocator shows it
#   too.
# Expected: a storage that has the size already stays as it is, as std::vector::resize and numpy's ndarray.resize leave it.
# Seen: the data move to another address, and both copies exist for a moment. So code that makes a tensor, and resizes its
#   storage before each use (FSDP's way to free and to take memory), needs twice the memory at the first use alone, unless
#   it compares the sizes itself. A plan that takes the call for nothing is too low by one tensor.
# Exits 0 while that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cd "$folder"
venv/bin/python - <<'P'
import resource
import sys

import numpy
import torch

SIZE = 512 * 2**20


def read_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


array = numpy.full(SIZE, 7, dtype=numpy.uint8)
address = array.ctypes.data
array.resize(SIZE, refcheck=False)
array_moved = array.ctypes.data != address
del array
storage = torch.full((SIZE,), 7, dtype=torch.uint8).untyped_storage()
address, peak = storage.data_ptr(), read_peak()
storage.resize_(SIZE)
moved, more = storage.data_ptr() != address, read_peak() - peak
print(f"torch {torch.__version__}, numpy {numpy.__version__}: {SIZE >> 20} MiB resized to {SIZE >> 20} MiB")
print(f"numpy: moved {array_moved}; torch: moved {moved}, peak of the process {more / 2**20:.0f} MiB higher")
sys.exit(not (moved and not array_moved and more > 0.9 * SIZE))
P
