"""Run TRL with PEFT under planted faults, through its command line."""

import ast
import re
from pathlib import Path

from benchmarks.peers.planted.ground import Setup
from benchmarks.peers.planted.running import Result
from benchmarks.peers.planted.tool import Tool, run_json_script

# The dict in a line of metrics, as transformers' trainer prints it.
_METRIC = re.compile(r"(\{'(?:loss|eval_loss|train_runtime)'.*\})")
_SCRIPT = Path(__file__).parent / "scripts" / "trl_labels.py"


class Trl(Tool):
    """Runs `trl sft --config FILE`."""

    name = "trl"
    title = "TRL"
    packages = (("torch==2.13.0",), ("trl", "peft"))
    shown = ("trl", "peft", "transformers", "accelerate", "datasets", "torch")
    metric = r"\{'(loss|eval_loss|train_runtime)'|\d+%\|"
    told = (
        "`trl sft --config FILE`, with `assistant_only_loss: true`; rows in a folder with"
        " train.jsonl and test.jsonl"
    )
    unable = {"unknown_format": "tells a row's format by its columns; there is no name to misspell"}

    def prepare(self, setup: Setup) -> list[str]:
        """Write sft.yaml, with the setup's planted mistake (`twist`), and return its text."""
        settings: dict[str, object] = {
            "model_name_or_path": setup.model,
            "dataset_name": setup.train.parent,
            "output_dir": setup.output,
            "max_steps": setup.steps,
            (
                "per_device_train_batch_sise"
                if setup.twist == "typo"
                else "per_device_train_batch_size"
            ): ("two" if setup.twist == "wrong_type" else setup.batch),
            "learning_rate": setup.lr,
            "lr_scheduler_type": "constant",
            "max_length": setup.max_len,
            "packing": str(setup.packing).lower(),
            "assistant_only_loss": "true",
            "use_cpu": "true",
            "bf16": "false",
            "dtype": "float32",
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "steps" if setup.save_every else '"no"',
            "save_steps": setup.save_every or 500,
            "eval_strategy": "steps" if setup.validate else '"no"',
            "eval_steps": 2,
        }
        if not setup.shuffle:
            settings["train_sampling_strategy"] = "sequential"
        if setup.twist == "typo_nested":
            # A nested section: a mixture of datasets in place of `dataset_name`.
            del settings["dataset_name"]
            settings["datasets"] = (
                f"\n  - path: {setup.train.parent}\n    split: train\n    misspelt_key: 1"
            )
        if setup.targets is not None:
            settings |= {
                "use_peft": "true",
                "lora_target_modules": "".join(f"\n  - {name}" for name in setup.targets),
            }
        if setup.resume:
            settings["resume_from_checkpoint"] = "true"
        text = "".join(f"{key}: {value}\n" for key, value in settings.items())
        (setup.folder / "sft.yaml").write_text(text, encoding="utf-8")
        return [text]

    def build_command(self, setup: Setup) -> list[str]:
        """Return the command `trl sft`; for several ranks its script under torchrun.

        The command's own launcher wants GPUs for several.
        """
        verb = "sftt" if setup.twist == "unknown_recipe" else "sft"
        words = ["--config", str(setup.folder / "sft.yaml")]
        if setup.ranks == 1:
            return [str(self.environment / "bin" / "trl"), verb, *words]
        (script,) = self.environment.glob("lib/python*/site-packages/trl/scripts/sft.py")
        return [
            str(self.environment / "bin" / "torchrun"),
            "--nproc_per_node",
            str(setup.ranks),
            str(script),
            *words,
        ]

    def build_environment(self, setup: Setup) -> dict[str, str]:
        """Return the variables; `trl` starts `accelerate`, so its own programs come first."""
        import os

        path = f"{self.environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        return super().build_environment(setup) | {"PATH": path, "ACCELERATE_USE_CPU": "true"}

    def read_losses(self, setup: Setup, result: Result) -> list[float]:
        """Read the losses from the dictionaries that the trainer prints."""
        return read_trainer_losses(result)

    def read_label_texts(self, setup: Setup) -> list[list[str]] | None:
        """Read the label tokens from the first batch of the trainer that the same config makes."""
        texts = run_json_script(self, setup, _SCRIPT, str(setup.folder / "sft.yaml"))
        return None if texts is None else list(texts)

    def list_states(self, setup: Setup) -> list[Path]:
        """Return the folders checkpoint-N."""
        return sorted(setup.output.glob("checkpoint-*")) if setup.output.is_dir() else []


def read_trainer_losses(result: Result) -> list[float]:
    """Read the losses that transformers' trainer has printed, one a step.

    LLaMA-Factory's are printed so too: it is built on that trainer.
    """
    matches = (_METRIC.search(line) for _, line in result.lines)
    # nan and inf are no Python literals: they are quoted, and `float` reads them.
    values = [
        ast.literal_eval(re.sub(r": (nan|inf)\b", r": '\1'", match[1]))
        for match in matches
        if match
    ]
    return [float(value["loss"]) for value in values if "loss" in value]
