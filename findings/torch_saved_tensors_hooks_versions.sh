#!/usr/bin/env bash
# With hooks on saved tensors, autograd no longer notices that a saved tensor was written into: gradients are wrong, no error.
#
# Versions: torch 2.13.0 (Python 3.11, Linux x86-64, CPU).
# Expected: `saved_tensors_hooks` whose two functions return what they are given change nothing. Without hooks a tensor that
#   is modified in place between forward and backward is an error, by its version.
# Seen: with these hooks backward computes with the new values. A hook that holds a tensor itself, as one does that decides
#   tensor by tensor what to move or to compute again, has to note `tensor._version` when it packs, and compare when it
#   unpacks. Hooks that copy (`save_on_cpu`) are not concerned.
# Exits 0 while that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cd "$folder"
venv/bin/python - <<'P'
import sys
from contextlib import nullcontext

import torch


def compute_gradient(hooks) -> str:
    leaf = torch.ones(3, requires_grad=True)
    doubled = leaf * 2
    with hooks:
        loss = (doubled * doubled).sum()  # saves `doubled`
    with torch.no_grad():
        doubled.mul_(10)
    try:
        loss.backward()
    except RuntimeError as error:
        return f"RuntimeError: {str(error)[:67]}"
    return f"{leaf.grad.tolist()}, where 8.0 is right"


def identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


plain = compute_gradient(nullcontext())
hooked = compute_gradient(torch.autograd.graph.saved_tensors_hooks(identity, identity))
print(f"torch {torch.__version__}\nwithout hooks: {plain}\nwith hooks that change nothing: {hooked}")
sys.exit(not (plain.startswith("RuntimeError") and hooked.startswith("[80.0")))
P
