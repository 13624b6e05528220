"""Run LitGPT's two documented commands: convert a model, then finetune it.

`planted/litgpt.py` runs it by LitGPT's own interpreter, with the model's folder and the second
command's words. LitGPT knows models by name; the benchmark's model is added to its list.
"""

import json
import sys
from pathlib import Path


def main(folder: Path, words: list[str]) -> None:
    """Convert the Hugging Face folder unless that is done, then run LitGPT with the words."""
    from litgpt import config
    from litgpt.__main__ import main as litgpt

    # A misspelled command is run as it is, without a conversion before it.
    if (
        not words
        or not words[0].startswith("finetune_")
        or words[0] in ("finetune_full", "finetune_lora")
    ):
        sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config.name_to_config["planted"] = {
            "name": "planted",
            "hf_config": {},
            "block_size": sizes["max_position_embeddings"],
            "vocab_size": sizes["vocab_size"],
            "padded_vocab_size": sizes["vocab_size"],
            "n_layer": sizes["num_hidden_layers"],
            "n_head": sizes["num_attention_heads"],
            "n_embd": sizes["hidden_size"],
            "n_query_groups": sizes["num_key_value_heads"],
            "rotary_percentage": 1.0,
            "parallel_residual": False,
            "bias": False,
            "norm_class_name": "RMSNorm",
            "norm_eps": sizes["rms_norm_eps"],
            "mlp_class_name": "LLaMAMLP",
            "intermediate_size": sizes["intermediate_size"],
        }
        if not (folder / "lit_model.pth").exists():
            sys.argv = ["litgpt", "convert_to_litgpt", str(folder), "--model_name", "planted"]
            litgpt()
    sys.argv = ["litgpt", *words]
    litgpt()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
