#!/usr/bin/env bash
# Compiled, two checkpointed functions one after the other keep the tensor between them; one around both keeps none.
#
# Versions: torch 2.13.0 (Python 3.11, Linux x86-64, CPU).
# Expected: `torch.compile` recomputes in backward what happens inside of `torch.utils.checkpoint`, so that g(f(x)) keeps the
#   same tensors whether f and g are checkpointed one by one or together: their input, from which both follow.
# Seen: one by one, the result of f is kept besides the input. Where cheap steps follow one another (a norm, then a
#   rotation; dropout after a norm), only one checkpoint around the whole chain saves its memory.
# Exits 0 while that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cd "$folder"
venv/bin/python - <<'P'
import sys

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 8, 16


def first(tensor: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(tensor) * tensor


def second(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tanh(tensor) + tensor * 0.5


def list_saved(together: bool) -> list[tuple[int, ...]]:
    torch._dynamo.reset()
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def run(rows: torch.Tensor) -> torch.Tensor:
        hidden = rows @ weight
        if together:
            hidden = checkpoint(lambda tensor: second(first(tensor)), hidden, use_reentrant=False)
        else:
            hidden = checkpoint(first, hidden, use_reentrant=False)
            hidden = checkpoint(second, hidden, use_reentrant=False)
        return hidden @ weight

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    saved = []
    rows = torch.randn(ROWS, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
    ):
        torch.compile(run, backend=backend)(rows).sum().backward()
    return sorted(saved)


apart, together = list_saved(False), list_saved(True)
print(f"torch {torch.__version__}\none by one: {apart}\ntogether: {together}")
sys.exit(not len(apart) == len(together) + 1)
P
