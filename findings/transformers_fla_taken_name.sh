#!/usr/bin/env bash
# transformers says that flash-linear-attention is not installed, where it is and the two claim one name.
#
# Versions: torch 2.13.0, transformers 5.23.0, flash-linear-attention 0.1.1, triton 3.5.1 (Python 3.11, Linux x86-64,
#   CPU).
# Expected: with a package that cannot be imported, the error, or that the package is there and of which version.
# Seen: `import fla` of 0.1.1 registers a config named `bitnet`, which transformers has by now: ValueError. The
#   decorator of Qwen3-Next's gated delta rule (`use_kernel_func_from_hub_with_fallback`) catches every exception
#   of that import, runs torch's loop, and warns that `flash-linear-attention` "is not installed"; pip lists it. Who
#   follows the warning installs what is installed. 0.2.2 is imported.
# What it means for whoever picks kernels: ask for the package's version and for the function, and name both.
# Exits 0 while that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 triton==3.5.1 einops
"$folder/venv/bin/pip" install --quiet --no-deps flash-linear-attention==0.1.1
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'P' 2>&1 | grep -v "Skipping import\|_pytree.py"
import importlib.metadata
import io
import logging

import torch
import transformers

heard = io.StringIO()
logging.getLogger("transformers").addHandler(logging.StreamHandler(heard))
try:
    import fla  # noqa: F401
    reason = ""
except ValueError as error:
    reason = str(error)
config = transformers.Qwen3NextConfig(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    vocab_size=64, layer_types=["linear_attention"],
)
model = transformers.Qwen3NextForCausalLM(config)
model(torch.arange(1, 17)[None], use_cache=False)
found = importlib.metadata.version("flash-linear-attention")
warnings = [line for line in heard.getvalue().splitlines() if "chunk_gated_delta_rule" in line]
print("flash-linear-attention", found, "import fla:", reason)
print("\n".join(warnings))
is_so = "bitnet" in reason and any("`flash-linear-attention` is not installed" in line for line in warnings)
print("as seen" if is_so else "changed")
raise SystemExit(not is_so)
P
