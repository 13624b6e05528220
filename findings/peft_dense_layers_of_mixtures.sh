#!/usr/bin/env bash
# PEFT takes the MLP of a dense layer of a mixture, given by its whole name or a pattern, for the experts of the others.
#
# Versions: torch 2.13.0, transformers 5.23.0, peft 0.21.2 (Python 3.11, Linux x86-64, CPU).
# Input: a Qwen3-MoE of two layers, the second of which is dense (mlp_only_layers=[1]); target_modules names the linears
#   of its MLP, as whole names (model.layers.1.mlp.gate_proj, ...) or as a pattern that matches nothing else.
# Expected: adapters on these three linears; an adapter that transformers 4 has trained on them is loaded.
# Seen: adapters on the fused experts of the first layer (mlp.experts.gate_up_proj and down_proj), none on the dense
#   layer. PeftModel.from_pretrained of an adapter with the three linears' tensors drops them: it computes what the base
#   does, and warns of missing keys only. With use_dora=True it raises, as fused experts have no DoRA. A whole name is
#   taken for the experts because it ends in .gate_proj (peft.utils.transformers_weight_conversion).
# What it means for a writer of adapters: target_parameters (mlp.gate_proj.weight, ...) are left as they are, and the
#   tensors have the same names and shapes there.
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
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

warnings.simplefilter("ignore")
torch.manual_seed(0)
config = Qwen3MoeConfig(
    hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64, mlp_only_layers=[1],
)
Qwen3MoeForCausalLM(config).save_pretrained("base")
ids = torch.arange(16)[None]
linears = [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]


def open_base():
    return Qwen3MoeForCausalLM.from_pretrained("base")


def adapted(**settings):
    model = get_peft_model(open_base(), LoraConfig(r=2, **settings))
    names = {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    return model, sorted(name.removeprefix("base_model.model.") for name in names)


names = adapted(target_modules=linears)[1]
pattern = adapted(target_modules=r"model\.layers\.1\.mlp\.(gate|up|down)_proj")[1]
model, parameters = adapted(target_modules=[], target_parameters=[f"{name}.weight" for name in linears])
print(f"whole names: {names}\npattern: {pattern}\ntarget_parameters: {parameters}")
for name, weight in model.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(weight)
with torch.no_grad():
    base, trained = open_base()(ids).logits, model(ids).logits
    model.save_pretrained("adapter")
    by_parameters = PeftModel.from_pretrained(open_base(), "adapter")(ids).logits
    path = Path("adapter/adapter_config.json")
    fields = json.loads(path.read_text()) | {"target_modules": linears, "target_parameters": None}
    path.write_text(json.dumps(fields))
    by_names = PeftModel.from_pretrained(open_base(), "adapter")(ids).logits
    path.write_text(json.dumps(fields | {"use_dora": True}))
    try:
        PeftModel.from_pretrained(open_base(), "adapter")
        dora = "opened"
    except ValueError as error:
        dora = str(error)
largest = trained.abs().max()
changed, kept = (float((one - trained).abs().max() / largest) for one in (by_names, by_parameters))
is_base = torch.equal(by_names, base)
print(f"loaded by target_parameters: logits differ by {kept:.1e} of the largest; by whole names: {changed:.3f}")
print(f"by whole names it computes what the base does: {is_base}\nwith use_dora: {dora}")
experts = ["model.layers.0.mlp.experts", "model.layers.0.mlp.experts.base_layer"]
same = names == pattern == experts and parameters == sorted(linears)
sys.exit(not (same and kept < 1e-5 and changed > 1e-2 and is_base and "use_dora" in dora))
P
