#!/usr/bin/env bash
# Phi-3.5-MoE's long factors are never used in transformers 5: beyond its first context it turns by the short ones.
#
# Versions: torch 2.13.0, transformers 5.23.0, and 4.57.6 beside it (Python 3.11, Linux x86-64, CPU).
# Expected: a LongRoPE has two lists of factors. A sequence longer than `original_max_position_embeddings` is turned by
#   `long_factor`, a shorter one by `short_factor`; transformers' own `_compute_longrope_parameters` says so.
# Seen: PhimoeRotaryEmbedding.forward asks for the frequencies anew and passes no length, which means the short ones.
#   Those that the decorator `dynamic_rope_update` has just set for the length are not read. Only `long_mscale` is
#   taken by the length. For 48 tokens of a model that began with 16 the table is that of the short factors to the
#   bit, and other long factors give the same logits. Release 4.57.6 passes the length: there the logits differ.
# What it means: the model, trained or evaluated beyond 4,096 tokens, is not the one of a year ago, without a word.
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
cat > logits.py <<'P'
import copy

import torch
import transformers
from transformers import PhimoeConfig, PhimoeForCausalLM

LONG, SHORT = 8.0, 1.0


def make_config(long_factor: float) -> PhimoeConfig:
    scaling = {
        "type": "longrope", "long_factor": [long_factor] * 4, "short_factor": [SHORT] * 4,
        "long_mscale": 1.0, "short_mscale": 1.0, "original_max_position_embeddings": 16,
    }
    return PhimoeConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, num_local_experts=2, rope_theta=10000.0, rope_scaling=scaling,
        initializer_range=0.5,
    )


torch.manual_seed(0)
model = PhimoeForCausalLM(make_config(LONG)).eval()
other = PhimoeForCausalLM(make_config(3 * LONG)).eval()
other.load_state_dict(copy.deepcopy(model.state_dict()))
ids = torch.arange(48)[None]
with torch.no_grad():
    first, second = model(ids).logits, other(ids).logits
differs = (first - second).abs().max().item()
print(f"transformers {transformers.__version__}: logits of 48 tokens differ by {differs:.3f} with other long factors")
P
5.23.0/bin/python logits.py | tee new
4.57.6/bin/python logits.py | tee old
5.23.0/bin/python - <<'P'
import sys
from pathlib import Path

import torch

sys.argv = ["logits.py"]
scope: dict = {}
exec(Path("logits.py").read_text().split("torch.manual_seed")[0], scope)
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

rotary = PhimoeRotaryEmbedding(scope["make_config"](scope["LONG"]))
positions = torch.arange(48)
cos, _ = rotary(torch.zeros(1), positions[None])
frequencies = 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
tables = {}
for name in ("LONG", "SHORT"):
    angles = positions[:, None].float() * (frequencies / scope[name])
    tables[name] = (cos[0] - torch.cat((angles, angles), -1).cos()).abs().max().item()
print(f"5.23.0, table of 48 positions: {tables['LONG']:.3f} off the long factors', {tables['SHORT']:.6f} the short ones'")
newer, older = (float(Path(name).read_text().split("differ by ")[1].split()[0]) for name in ("new", "old"))
as_seen = tables["SHORT"] < 1e-5 and tables["LONG"] > 0.1 and newer == 0 and older > 0.01
print("as described above" if as_seen else "changed: see the lines above")
raise SystemExit(0 if as_seen else 1)
P
