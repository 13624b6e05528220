#!/usr/bin/env bash
# PEFT saves an adapter whose alpha_pattern has two keys that match one module, and loads it with another scaling.
#
# Versions: torch 2.13.0, transformers 5.23.0, peft 0.21.2 (Python 3.11, Linux x86-64, CPU).
# Expected: PeftModel.from_pretrained(base, folder) computes what the model that was saved computed.
# Seen: of several keys of rank_pattern or alpha_pattern that match a module, the first of the dict counts, and
#   save_pretrained writes adapter_config.json with sorted keys. A key that begins with a letter ("q_proj") stands
#   behind one that begins with a dot (".*\.1\..*") then, whatever the order in which the user gave them. For layer 1
#   the scaling was 3 / 2 = 1.5 when it was trained and is 9 / 2 = 4.5 when it is loaded; logits differ.
# What it means for a reader of adapters: the file's order is the one that PEFT itself follows on loading.
# Exits 0 while that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 peft==0.21.2
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'P'
import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
)
base = LlamaForCausalLM(config)
base.save_pretrained("base")
pattern = {"q_proj": 3, r".*\.1\..*": 9}  # of layer 1, both match q_proj
model = get_peft_model(base, LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj"], alpha_pattern=pattern))
for name, weight in model.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(weight)
ids = torch.arange(16)[None]


def scaling(of):
    return of.base_model.model.model.layers[1].self_attn.q_proj.scaling["default"]


with torch.no_grad():
    before, trained = scaling(model), model(ids).logits
    model.save_pretrained("adapter")
    loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained("base"), "adapter")
    after, logits = scaling(loaded), loaded(ids).logits
saved = list(json.loads(Path("adapter/adapter_config.json").read_text())["alpha_pattern"])
difference = float((trained - logits).abs().max() / trained.abs().max())
print(f"given {list(pattern)}, saved {saved}")
print(f"scaling of layer 1: {before} when trained, {after} when loaded; logits differ by {difference:.3f} of the largest")
sys.exit(not (before == 1.5 and after == 4.5 and saved == list(pattern)[::-1] and difference > 1e-3))
P
