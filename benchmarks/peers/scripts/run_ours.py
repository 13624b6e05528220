"""Train a task by our own program: `tune run RECIPE --config FILE`, with a tracker as recorder.

`gpu_peers.py` runs this with the path of a task, see `recorder.read_task`.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recorder import Recorder, read_task

RECIPES = {"full": "full_finetune_distributed"}  # by method; adapters have the other recipe


def build_settings(task: dict[str, Any]) -> dict[str, Any]:
    """Return the config.

    A row is a text of numbers, of which the task's tokenizer makes the given ids. Rows are full, so
    nothing is packed; the last token has no label, and one token of padding makes up for it.
    """
    sequence = task["sequence"]
    config: dict[str, Any] = {
        "recipe": RECIPES.get(task["method"], "lora_finetune_distributed"),
        "model": {"path": task["model"]},
        "tokenizer": {"path": task["tokenizer"]},
        "data": {
            "source": task["texts"],
            "format": "text",
            "shuffle": False,
            "pad_to_multiple_of": sequence,
            "check_label_mask": False,
            "cache": False,
            "num_proc": 1,
        },
        "optimizer": {"lr": task["lr"], "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        "lr_scheduler": {"type": "constant"},
        "memory": {"activation_checkpointing": task["checkpointing"], "loss_chunks": 16},
        "checkpoint": {"save_model": False},
        "log": {"trackers": ["record"], "progress": "plain"},
        "dtype": task["dtype"],
        "device": task["device"],
        "batch_size": task["batch_size"],
        "max_seq_len": sequence,
        "max_steps": task["steps"],
        "clip_grad_norm": 1.0,
        "compile": task["compiled"],
        "output_dir": str(Path(task["folder"]) / "output"),
        "overwrite_output_dir": True,
    }
    if task["method"] != "full":
        quantize = "nf4" if task["method"] == "qlora" else "none"
        config["lora"] = {
            "rank": task["rank"],
            "alpha": task["alpha"],
            "target_modules": ["all-linear"],
            "adapter_path": task["adapter"],
            "quantize_base": quantize,
        }
    return config


def main(path: str) -> int:
    """Register the tracker, as a plugin would, run the command and return its exit code."""
    from recipe_lib.cli.main import main as tune
    from recipe_lib.config import register

    task = read_task(path)

    class Record:
        """A tracker of our training log that keeps the record."""

        def __init__(
            self, project: str, run_name: str, folder: Path, settings: Mapping[str, Any]
        ) -> None:
            self._recorder = Recorder(task)

        def log(self, metrics: Mapping[str, float], step: int) -> None:
            """Record one step."""
            self._recorder.step(metrics["loss"], metrics["grad_norm"])

        def close(self) -> None:
            """Write the record: the run is over."""
            self._recorder.write()

    register("log.trackers", "record")(Record)
    config = build_settings(task)
    file = Path(task["folder"]) / "config.yaml"
    file.write_text(json.dumps(config, indent=1), encoding="utf-8")  # JSON is YAML
    return tune(["run", config["recipe"], "--config", str(file)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
