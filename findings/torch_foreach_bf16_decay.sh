#!/usr/bin/env bash
# AdamW(foreach=True) with bf16 parameters on a CPU has another decay than AdamW(foreach=False).
#
# Versions: torch 2.13.0 (Python 3.11, Linux x86-64, CPU).
# Expected: torch._foreach_mul_ of one tensor is that tensor's mul_, and AdamW's second moment is the same by either.
# Seen: Tensor.mul_ multiplies bf16 by the Python number and rounds the product; torch._foreach_mul_ rounds the number to
#   bf16 first. 0.99 becomes 0.98828, and 0.999 becomes 1. So with betas[1] = 0.99, 200 gradients of 1 and then 200 of 0,
#   `foreach` leaves a second moment of half of what the loop over parameters leaves. In fp64 it is 0.116: the loop's is
#   too large, since bf16 loses small changes, and foreach's is too small.
# What it means for who trains in bf16: states in fp32, or fused kernels, whose arithmetic is fp32.
# Exits 0 while that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
cd "$folder"
venv/bin/python - <<'P'
import sys

import torch


def second_moment(foreach: bool) -> float:
    parameter = torch.nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter], lr=0.0, betas=(0.9, 0.99), foreach=foreach)
    for step in range(400):
        parameter.grad = torch.full_like(parameter, 1.0 if step < 200 else 0.0)
        optimizer.step()
    return optimizer.state[parameter]["exp_avg_sq"][0].item()


significands = (torch.arange(128, 256) / 128).bfloat16()
rounded = [float(torch.tensor(factor, dtype=torch.bfloat16)) for factor in (0.99, 0.999)]
same_as_rounded = []
differs = []
for factor, in_bf16 in zip((0.99, 0.999), rounded):
    by_list = [significands.clone()]
    torch._foreach_mul_(by_list, factor)
    same_as_rounded.append(torch.equal(by_list[0], significands.clone().mul_(in_bf16)))
    differs.append(int((by_list[0] != significands.clone().mul_(factor)).sum()))
exact = (1 - 0.99**200) * 0.99**200
loop, together = second_moment(False), second_moment(True)
print(f"torch {torch.__version__}: 0.99 and 0.999 in bf16 are {rounded}")
print(f"of 128 significands differ from Tensor.mul_: {differs}; equal to a product with the rounded number: {same_as_rounded}")
print(f"second moment of AdamW in bf16: foreach=False {loop:.4f}, foreach=True {together:.4f}; exact {exact:.4f}")
is_so = all(same_as_rounded) and differs[0] > 0 and together < 0.6 * loop
sys.exit(not is_so)
P
