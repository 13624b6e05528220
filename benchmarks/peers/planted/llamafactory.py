"""Run LLaMA-Factory's command line for the benchmark of planted faults.

The benchmark plants mistakes into a `Setup`, a run in no tool's words, and asks each `Tool` for its
config, its command and what it trained. `Setup.twist` names a mistake in the config or the command;
this file spells it in LLaMA-Factory's words.
"""

import json
import os
from pathlib import Path

from benchmarks.peers.planted.ground import Setup
from benchmarks.peers.planted.running import Result
from benchmarks.peers.planted.tool import Tool
from benchmarks.peers.planted.trl import read_trainer_losses


class LlamaFactory(Tool):
    """Run `llamafactory-cli train FILE`."""

    name = "llamafactory"
    title = "LLaMA-Factory"
    packages = (
        ("torch==2.11.0", "torchaudio==2.11.0", "torchvision==0.26.0"),
        ("llamafactory==0.9.5",),
    )
    shown = ("llamafactory", "transformers", "trl", "peft", "datasets", "torch")
    metric = r"\{'(loss|eval_loss|train_runtime)'|\d+%\||^\s*(train|eval)_\w+\s*=|examples/s"
    told = (
        "`llamafactory-cli train FILE`, no `template`, so that it takes the tokenizer's own; rows"
        " as `sharegpt` with the tags of `messages` in dataset_info.json"
    )
    unable: dict[str, str] = {}  # all faults apply

    def prepare(self, setup: Setup) -> list[str]:
        """Write train.yaml and dataset_info.json; return their texts."""
        tags = {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "system_tag": "system",
        }
        columns = {"messages": "messages"} | (
            {"misspelt_key": "x"} if setup.twist == "typo_nested" else {}
        )
        kind = "mesages" if setup.twist == "unknown_format" else "sharegpt"
        dataset_info = {
            name: {"file_name": file.name, "formatting": kind, "columns": columns, "tags": tags}
            for name, file in (("rows", setup.train), ("held_out", setup.held_out))
        }
        info = json.dumps(dataset_info, indent=1)
        (setup.train.parent / "dataset_info.json").write_text(info, encoding="utf-8")
        settings: dict[str, object] = {
            "model_name_or_path": setup.model,
            "stage": "sft",
            "do_train": "true",
            "finetuning_type": "full" if setup.targets is None else "lora",
            "dataset_dir": setup.train.parent,
            "dataset": "rows",
            "cutoff_len": setup.max_len,
            "overwrite_cache": "true",
            "packing": str(setup.packing).lower(),
            "output_dir": setup.output,
            "max_steps": setup.steps,
            (
                "per_device_train_batch_sise"
                if setup.twist == "typo"
                else "per_device_train_batch_size"
            ): ("two" if setup.twist == "wrong_type" else setup.batch),
            "learning_rate": setup.lr,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "steps" if setup.save_every else '"no"',
            "save_steps": setup.save_every or 500,
            "report_to": "none",
            "use_cpu": "true",
            "bf16": "false",
            "disable_shuffling": str(not setup.shuffle).lower(),
        }
        if setup.targets is not None:
            settings["lora_target"] = ",".join(setup.targets)
        if setup.validate:
            settings |= {"eval_dataset": "held_out", "eval_strategy": "steps", "eval_steps": 2}
        if setup.resume:
            settings["resume_from_checkpoint"] = "true"
        if setup.ranks > 1:
            settings["ddp_backend"] = "gloo"
        text = "".join(f"{key}: {value}\n" for key, value in settings.items())
        (setup.folder / "train.yaml").write_text(text, encoding="utf-8")
        return [text, info]

    def build_command(self, setup: Setup) -> list[str]:
        """Return the command `llamafactory-cli train`."""
        verb = "trainn_sftt" if setup.twist == "unknown_recipe" else "train"
        return [
            str(self.environment / "bin" / "llamafactory-cli"),
            verb,
            str(setup.folder / "train.yaml"),
        ]

    def build_environment(self, setup: Setup) -> dict[str, str]:
        """Return the environment variables; for several ranks, those that ask for torchrun."""
        # Its own programs come first.
        path = f"{self.environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        ranks = (
            {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(setup.ranks)} if setup.ranks > 1 else {}
        )
        # Without LLaMA-Factory's check of its packages' versions.
        return (
            super().build_environment(setup) | {"PATH": path, "DISABLE_VERSION_CHECK": "1"} | ranks
        )

    def read_losses(self, setup: Setup, result: Result) -> list[float]:
        """Read the losses from the dictionaries that the trainer prints."""
        return read_trainer_losses(result)

    def start(
        self, setup: Setup, command: "list[str] | tuple[str, ...]", **options: object
    ) -> Result:  # type: ignore[override]
        """Run a command and keep its result for `read_label_texts`."""
        self._last = super().start(setup, command, **options)
        return self._last

    def read_label_texts(self, setup: Setup) -> list[list[str]] | None:
        """Return the trained text of the first row, as one piece; None if the run shows none.

        The run prints an example: `labels:` and the text, which may go on over more lines.
        """
        lines = [line for _, line in self._last.lines]
        label_lines = [at for at, line in enumerate(lines) if line.startswith("labels:")]
        if not label_lines:
            return None
        text = [lines[label_lines[0]].removeprefix("labels:")]
        for line in lines[label_lines[0] + 1 :]:
            # Beginnings of its other lines of output.
            if line.startswith(("[", "{", "Running", "Generating")):
                break
            text.append(line)
        return [["\n".join(text)]]

    def list_states(self, setup: Setup) -> list[Path]:
        """Return the folders checkpoint-N, its saved states."""
        return sorted(setup.output.glob("checkpoint-*")) if setup.output.is_dir() else []
