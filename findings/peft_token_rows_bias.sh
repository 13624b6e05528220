#!/usr/bin/env bash
# PEFT's trainable_token_indices on a head with a bias leaves the bias out: an adapter that has learned nothing changes
# the logits.
#
# Versions: torch 2.13.0, transformers 5.23.0, peft 0.21.2 (Python 3.11, Linux x86-64, CPU).
# Expected: get_peft_model begins with the base's own logits, and merge_and_unload keeps what the adapter computed.
# Seen: for the lm_head of a PhiForCausalLM, which has a bias, both differ by the bias: the adapter's forward computes
#   x W^T alone, while the base and the merged model add the bias. Without a bias in the base nothing differs.
# What it means for a reader of adapters: for such a matrix no merged weights compute what the adapter was trained as.
# Exits 0 while that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 peft==0.21.2
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'P'
import copy
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import PhiConfig, PhiForCausalLM

torch.manual_seed(0)
config = PhiConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, bos_token_id=0,
    eos_token_id=1, pad_token_id=2,
)
ids = torch.arange(16)[None]


def differences(bias):
    """How far the logits of a new adapter, and of the merged model, are from the base's."""
    base = PhiForCausalLM(config).eval()
    torch.nn.init.constant_(base.lm_head.bias, bias)
    settings = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices={"lm_head": [3, 7]})
    with torch.no_grad():
        wanted = base(ids).logits
        model = get_peft_model(copy.deepcopy(base), settings).eval()
        new = model(ids).logits
        merged = model.merge_and_unload()(ids).logits
    return tuple(round(float((logits - wanted).abs().max()), 4) for logits in (new, merged))


with_bias, without = differences(0.5), differences(0.0)
print(f"bias 0.5: a new adapter's logits are off by {with_bias[0]}, the merged model's by {with_bias[1]}")
print(f"bias 0: a new adapter's logits are off by {without[0]}, the merged model's by {without[1]}")
sys.exit(not (with_bias == (0.5, 0.0) and without == (0.0, 0.0)))
P
