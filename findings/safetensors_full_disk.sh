#!/usr/bin/env bash
# A disk that is full while safetensors writes raises no OSError: who catches that, as for any file, does not see it.
#
# Versions: safetensors 0.8.0, numpy 2.4.6 (Python 3.11, Linux x86-64).
# Expected: OSError with errno EFBIG or ENOSPC, as open().write() raises it.
# Seen: safetensors.SafetensorError, a plain Exception without errno; the system's words stand in its text alone.
#   transformers' save_pretrained hands it on. (Nothing is left under the file's name.)
# What it means: a writer has to catch SafetensorError beside OSError, and cannot tell a full disk by its errno.
# Exits 0 while that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'P'
import os
import resource
import signal
import sys

import numpy
from safetensors import SafetensorError
from safetensors.numpy import save_file

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # past the limit a write is an error then, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
seen = None
try:
    with open("plain", "wb", buffering=0) as file:
        file.write(bytes(4096))
        file.write(bytes(4096))
except OSError as error:
    print(f"open().write(): {type(error).__name__}, errno {error.errno}")
try:
    save_file({"weight": numpy.zeros(100_000, dtype=numpy.float32)}, "model.safetensors")
except Exception as error:  # noqa: BLE001
    seen = error
print(f"save_file(): {type(seen).__name__}: {seen}")
left = os.path.getsize("model.safetensors") if os.path.exists("model.safetensors") else None
print(f"bytes left under its name: {left}; bases: {[base.__name__ for base in type(seen).__mro__[1:]]}")
sys.exit(not (isinstance(seen, SafetensorError) and not isinstance(seen, OSError) and not hasattr(seen, "errno")))
P
