"""Run this project's `tune` for the benchmark of planted faults.

The benchmark plants mistakes into a `Setup`, a run in no tool's words, and asks each `Tool` for its
config, its command and what it trained. `Setup.twist` names a mistake in the config or the command;
this file spells it in our words.
"""

import itertools
import json
import sys
from pathlib import Path

from benchmarks.peers.planted.ground import Setup
from benchmarks.peers.planted.running import Result
from benchmarks.peers.planted.tool import Tool

ROOT = Path(__file__).parents[3]
_CONFIG = """\
recipe: {recipe}
model:
  path: {model}
  implementation: {implementation}
data:
  source: {train}
  format: {format}
  shuffle: {shuffle}
  packing: {packing}
{nested}{lora}{validation}optimizer:
  lr: {lr}
lr_scheduler:
  type: constant
checkpoint:
  save_every_n_steps: {save}
device: cpu
dtype: fp32
{batch_key}: {batch}
max_steps: {steps}
epochs: 4
max_seq_len: {max_len}
output_dir: {output}
"""


class Ours(Tool):
    """Run `tune run RECIPE --config FILE`, and `tune data check FILE` where it says nothing."""

    name = "ours"
    title = "tune-recipes"
    shown = ("torch", "torchao")
    metric = r"^\s*step \d+/\d+"
    told = "`tune run RECIPE --config FILE`; where that says nothing, `tune data check FILE`"

    @property
    def python(self) -> str:
        """Return the interpreter that the benchmark runs in."""
        return sys.executable

    def prepare(self, setup: Setup) -> list[str]:
        """Write config.yaml; return its text, which the tool may echo."""
        adapters = setup.targets is not None
        # Our names of modules are without `_proj`.
        targets = [name.removesuffix("_proj") for name in setup.targets or ()]
        bits = "  quantize_base: nf4\n" if setup.base_bits == 4 else ""
        text = _CONFIG.format(
            recipe=self._choose_recipe(setup),
            model=setup.model,
            train=setup.train,
            format="mesages" if setup.twist == "unknown_format" else "messages",
            shuffle=str(setup.shuffle).lower(),
            packing=str(setup.packing).lower(),
            nested="  misspelt_key: 1\n" if setup.twist == "typo_nested" else "",
            lora=f"lora:\n  target_modules: {json.dumps(targets)}\n{bits}" if adapters else "",
            implementation="transformers" if setup.twist == "transformers" else "native",
            validation=f"validation:\n  source: {setup.held_out}\n" if setup.validate else "",
            lr=setup.lr,
            save=setup.save_every or "null",
            batch_key="batch_sise" if setup.twist == "typo" else "batch_size",
            batch="two" if setup.twist == "wrong_type" else setup.batch,
            steps=setup.steps,
            max_len=setup.max_len,
            output=setup.output,
        )
        (setup.folder / "config.yaml").write_text(text, encoding="utf-8")
        return [text]

    def _choose_recipe(self, setup: Setup) -> str:
        """Return the recipe's name: full fine-tuning, or LoRA."""
        return "full_finetune_distributed" if setup.targets is None else "lora_finetune_distributed"

    def build_command(self, setup: Setup) -> list[str]:
        """Return the command `tune run`, with torchrun's flag where there are several ranks."""
        recipe = (
            "fulll_finetune_distributed"
            if setup.twist == "unknown_recipe"
            else self._choose_recipe(setup)
        )
        ranks = ["--nproc_per_node", str(setup.ranks)] if setup.ranks > 1 else []
        resume = ["resume=latest"] if setup.resume else []
        return [
            *self._build_tune_command("run"),
            *ranks,
            recipe,
            "--config",
            str(setup.folder / "config.yaml"),
            *resume,
        ]

    def build_check_command(self, setup: Setup) -> list[str]:
        """Return the command `tune data check`."""
        return [*self._build_tune_command("data"), "check", str(setup.folder / "config.yaml")]

    def _build_tune_command(self, verb: str) -> list[str]:
        """Return the beginning of a command, of this checkout's `tune`."""
        return [self.python, "-m", "recipe_lib.cli.main", verb]

    def build_environment(self, setup: Setup) -> dict[str, str]:
        """Return the environment variables, with which no memory plan is made beside the run.

        The machine is shared, and a plan takes time of its own.
        """
        return super().build_environment(setup) | {"PYTHONPATH": str(ROOT), "TUNE_PLAN": "off"}

    def remember(self, setup: Setup) -> None:
        """Keep the lines of metrics.jsonl, to which a resumed run only adds."""
        self._before = self._read_metrics(setup)

    def _read_metrics(self, setup: Setup) -> list[str]:
        """Return the lines of metrics.jsonl; empty if there is no such file."""
        path = setup.output / "metrics.jsonl"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def read_losses(self, setup: Setup, result: Result) -> list[float]:
        """Return the loss of every step that the last command did, from metrics.jsonl."""
        lines_now = self._read_metrics(setup)
        # Not strict: a run that begins anew may have fewer lines than the one before.
        num_earlier_lines = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(self._before, lines_now, strict=False)
            )
        )
        lines = [json.loads(line) for line in lines_now[num_earlier_lines:]]
        # NaN is null there.
        return [
            float("nan" if line["loss"] is None else line["loss"])
            for line in lines
            if "loss" in line
        ]

    def read_label_texts(self, setup: Setup) -> list[list[str]] | None:
        """Return the trained pieces of each of the first rows, by `tune data show --json`.

        None if that command fails.
        """
        command = [
            *self._build_tune_command("data"),
            "show",
            str(setup.folder / "config.yaml"),
            "--json",
            "--limit",
            "4",
        ]
        result = self.start(setup, command)
        if result.code != 0:
            return None
        slots = json.loads(result.lines[-1][1])["sequences"]
        return [
            [piece["text"] for piece in row["pieces"] if piece["trained"]]
            for slot in slots
            for row in slot
        ]

    def list_states(self, setup: Setup) -> list[Path]:
        """List the states in output/state, finished or not."""
        folder = setup.output / "state"
        return sorted(folder.iterdir()) if folder.is_dir() else []
