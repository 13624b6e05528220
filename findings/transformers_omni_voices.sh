#!/usr/bin/env bash
# Qwen2.5-Omni's own `from_pretrained` drops the revision that it is given, and cannot report on names.
#
# Versions: torch 2.13.0, transformers 5.23.0 (Python 3.11, Linux x86-64, CPU).
# Expected: `revision=` pins every file that is read, `local_files_only=True` keeps the call from the network, and
#   `output_loading_info=True` returns the model and a report on its names, as for every other class.
# Seen: Qwen2_5OmniForConditionalGeneration wraps the method to read its voices, `spk_dict.pt`. It names `revision` and
#   `local_files_only` in its signature, passes them on for the weights, and then looks for the same two in `kwargs`,
#   where they can no longer be: the voices are asked for with revision None, which is the newest one, and with
#   local_files_only False. With `output_loading_info=True` the pair (model, report) is taken for the model:
#   AttributeError, 'tuple' object has no attribute 'load_speakers'.
# What it means: weights of a pinned commit with voices of today; offline, a folder of the cache is looked up on the
#   network; and a check of missing or unexpected names has to go around this class.
# Exits 0 while that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.23.0
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'P'
import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as module

text = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}
audio = {"d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "encoder_layers": 1, "output_dim": 32}
vision = {"hidden_size": 32, "depth": 1, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
config = Qwen2_5OmniConfig(
    thinker_config={"text_config": text, "audio_config": audio, "vision_config": vision}, enable_audio_output=False
)
model = Qwen2_5OmniForConditionalGeneration(config)
model.save_pretrained("omni")
torch.save({}, "omni/spk_dict.pt")

asked = {}
find = module.cached_file


def note(folder, name, **options):
    asked.update(options)
    return find(folder, name, **options)


module.cached_file = note
Qwen2_5OmniForConditionalGeneration.from_pretrained("omni", revision="a-commit", local_files_only=True)
print("voices asked for with", {name: asked[name] for name in ("revision", "local_files_only")})
try:
    Qwen2_5OmniForConditionalGeneration.from_pretrained("omni", output_loading_info=True)
    told = "a report"
except AttributeError as error:
    told = str(error)
print("output_loading_info=True:", told)
as_seen = asked["revision"] is None and asked["local_files_only"] is False and "load_speakers" in told
print("as described above" if as_seen else "changed: see the lines above")
raise SystemExit(0 if as_seen else 1)
P
