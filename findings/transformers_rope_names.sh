#!/usr/bin/env bash
# A model that transformers 5 saves is another model in transformers 4.57, which says nothing.
#
# Versions: torch 2.13.0, transformers 5.23.0 to save, transformers 4.57.6 to read (Python 3.11, Linux x86-64, CPU).
# Expected: the release of a year ago computes the same logits from the folder, or refuses it.
# Seen: save_pretrained writes the base and the scaling of the rotary embedding under `rope_parameters` alone. The
#   earlier release looks for `rope_theta` and `rope_scaling`, finds neither, and takes 10000 and no scaling. For a
#   Llama whose base is 500000 and whose scaling is llama3, logits differ by more than the largest of them; no warning,
#   no missing or unexpected weight. With `rope_theta` and `rope_scaling` added to config.json both releases agree.
#   The number of experts of a Qwen3-MoE is renamed too (`num_local_experts`): there the weights do not fit 128 experts.
# What it means for a writer of exports: say all of it under both names; transformers 5 reads both.
# Exits 0 while that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for release in 5.23.0 4.57.6; do
  "${PYTHON:-python3}" -m venv "$folder/$release"
  "$folder/$release/bin/pip" install --quiet torch==2.13.0
  "$folder/$release/bin/pip" install --quiet "transformers==$release"
done
cd "$folder"
export HF_HUB_OFFLINE=1
5.23.0/bin/python - <<'P'
import json
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
scaling = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=64, max_position_embeddings=128, initializer_range=0.5, rope_theta=500000.0, rope_scaling=dict(scaling),
)
model = LlamaForCausalLM(config).eval()
model.save_pretrained("new")
shutil.copytree("new", "both")
both = json.loads(Path("both/config.json").read_text()) | {"rope_theta": 500000.0, "rope_scaling": scaling}
Path("both/config.json").write_text(json.dumps(both))
ids = torch.arange(48)[None]
with torch.no_grad():
    logits = model(ids).logits
    again = LlamaForCausalLM.from_pretrained("both").eval()(ids).logits
torch.save({"ids": ids, "logits": logits, "again": again}, "expected.pt")
P
4.57.6/bin/python - <<'P'
import json
import logging
import sys
from pathlib import Path

import torch
import transformers

records = []
handler = logging.Handler()
handler.emit = records.append
logging.getLogger("transformers").addHandler(handler)
expected = torch.load("expected.pt")
differences, told = {}, 0
for folder in ("new", "both"):
    model, info = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        logits = model.eval()(expected["ids"]).logits
    differences[folder] = float((logits - expected["logits"]).abs().max() / expected["logits"].abs().max())
    told += len(records) + sum(len(value) for value in info.values())
newer = float((expected["again"] - expected["logits"]).abs().max())
keys = sorted(key for key in json.loads(Path("new/config.json").read_text()) if "rope" in key)
print(f"config.json of 5.23.0 has {keys}; warnings and names that do not fit in 4.57.6: {told}")
print(f"4.57.6: logits differ by {differences['new']:.2f} of the largest, with both names by {differences['both']:.1g}")
print(f"5.23.0 with both names: logits differ by {newer:.1g}")
is_so = keys == ["rope_parameters"] and told == 0 and differences["new"] > 0.1
sys.exit(not (is_so and differences["both"] < 1e-5 and newer < 1e-5))
P
