"""Train a task by torchtune: `tune run full_finetune_single_device`, or `lora_...`, with a config.

`gpu_peers.py` runs this with the path of a task, see `recorder.read_task`, by the interpreter of
torchtune's environment.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from recorder import read_task

PARTS = "torchtune_parts"  # the module of this folder that the config names


def build_config(task: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the config. file: path of the task.

    Models, losses and recipes are torchtune's own; rows, logger, checkpointer and the adapter's
    start are of `torchtune_parts.py`.
    """
    model = Path(task["model"])
    shape = json.loads((model / "config.json").read_text(encoding="utf-8"))
    output = str(Path(task["folder"]) / "output")
    adapters = task["method"] != "full"
    settings: dict[str, Any] = {
        "output_dir": output,
        "tokenizer": {"_component_": f"{PARTS}.Tokenizer"},
        "dataset": {"_component_": f"{PARTS}.Rows", "source": task["rows"]},
        "seed": 0,
        "shuffle": False,
        "model": _build_model(task, shape),
        "checkpointer": {
            "_component_": f"{PARTS}.Checkpointer",
            "checkpoint_dir": str(model),
            "checkpoint_files": sorted(path.name for path in model.glob("*.safetensors")),
            "output_dir": output,
            "model_type": "LLAMA3_2" if shape["tie_word_embeddings"] else "LLAMA3",
        },
        "resume_from_checkpoint": False,
        "batch_size": task["batch_size"],
        "epochs": 1,
        "max_steps_per_epoch": task["steps"],
        "gradient_accumulation_steps": 1,
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "lr": task["lr"],
            "weight_decay": 0.0,
            "fused": True,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "optimizer_in_bwd": False,
        "clip_grad_norm": 1.0,
        "compile": task["compiled"],
        "device": task["device"],
        "enable_activation_checkpointing": task["checkpointing"] == "full",
        "enable_activation_offloading": False,
        "dtype": task["dtype"],
        "metric_logger": {"_component_": f"{PARTS}.Logger", "task": file},
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
    }
    if adapters:
        settings["save_adapter_weights_only"] = True
        settings["lr_scheduler"] = {"_component_": f"{PARTS}.build_constant_schedule"}
    return settings


def _build_model(task: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """Return the config's `model`: torchtune's Llama 3 builder, or its 3.2's for tied embeddings.

    shape: the model's config.json.
    """
    sizes: dict[str, Any] = {
        "vocab_size": shape["vocab_size"],
        "num_layers": shape["num_hidden_layers"],
        "num_heads": shape["num_attention_heads"],
        "num_kv_heads": shape["num_key_value_heads"],
        "embed_dim": shape["hidden_size"],
        "intermediate_dim": shape["intermediate_size"],
        "max_seq_len": shape["max_position_embeddings"],
        "norm_eps": shape["rms_norm_eps"],
        "rope_base": int(shape["rope_theta"]),
    }
    if shape["tie_word_embeddings"]:
        sizes["scale_factor"] = 1  # rotary embedding without Llama 3.2's scaling
    if task["method"] == "full":
        builder = "llama3_2.llama3_2" if shape["tie_word_embeddings"] else "llama3.llama3"
        return {"_component_": f"torchtune.models.{builder}", **sizes}
    return {
        "_component_": f"{PARTS}.build_adapted_model",
        "adapter": task["adapter"],
        "tied": shape["tie_word_embeddings"],
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "apply_lora_to_output": False,
        "lora_rank": task["rank"],
        "lora_alpha": task["alpha"],
        "lora_dropout": 0.0,
        "quantize_base": task["method"] == "qlora",
        **sizes,
    }


def main(path: str) -> None:
    """Write the config and run the command in this process."""
    from torchtune._cli.tune import main as tune

    task = read_task(path)
    file = Path(task["folder"]) / "tune.yaml"
    file.write_text(
        json.dumps(build_config(task, os.path.abspath(path)), indent=1), encoding="utf-8"
    )  # JSON is YAML
    kind = "full" if task["method"] == "full" else "lora"
    sys.argv = ["tune", "run", f"{kind}_finetune_single_device", "--config", str(file)]
    tune()


if __name__ == "__main__":
    main(sys.argv[1])
