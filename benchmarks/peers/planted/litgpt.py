"""Run LitGPT's command line for the benchmark of planted faults.

The benchmark plants mistakes into a `Setup`, a run in no tool's words, and asks each `Tool` for its
config, its command and what it trained. `Setup.twist` names a mistake in the config or the command;
this file spells it in LitGPT's words.
"""

import json
import re
from pathlib import Path

from benchmarks.peers.planted.ground import Setup
from benchmarks.peers.planted.running import Result
from benchmarks.peers.planted.tool import Tool, run_json_script

# Step and loss in a line of LitGPT's log.
_STEP = re.compile(r"step (\d+) \| loss train: (\S+?),")
_SCRIPTS = Path(__file__).parent / "scripts"
_CONFIG = """\
checkpoint_dir: {model}
out_dir: {output}
precision: 32-true
devices: {ranks}
{resume}data:
  class_path: litgpt.data.{data}
  init_args:
    json_path: {pairs}
    mask_prompt: true
    prompt_style: platypus
    num_workers: 0
{nested}train:
  save_interval: {save}
  log_interval: 1
  global_batch_size: {whole}
  micro_batch_size: {batch}
  lr_warmup_steps: 1
  epochs: 10
  max_steps: {steps}
  max_seq_length: {max_len}
eval:
  interval: 100
  max_iters: 2
  final_validation: {validate}
  initial_validation: false
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: {lr}
logger_name: csv
seed: 0
{lora}"""
# Reasons why faults do not apply.
_STYLE = "its prompts are styles in code, without a system's turn or a chat template"
_SCHEDULE = (
    "its learning rate follows the number of steps asked for, so halves of a run are not those of a"
    " whole one"
)


class LitGpt(Tool):
    """Run `litgpt convert_to_litgpt FOLDER`, then `litgpt finetune_full --config FILE`."""

    name = "litgpt"
    title = "LitGPT"
    packages = (("torch==2.13.0",), ("litgpt==0.5.13", "requests"))
    shown = ("litgpt", "lightning", "jsonargparse", "torch")
    metric = r"\| loss train:|val loss|\| iter time|Finetuning \||^Training time|tok/s|tok/sec"
    told = (
        "`litgpt convert_to_litgpt FOLDER` (with a model configuration of these sizes added to its"
        " list), then `litgpt finetune_full --config FILE`; rows as instruction and output, without"
        " the system's text"
    )
    unable = {
        "unknown_role": "its rows have no roles",
        **dict.fromkeys(("no_end", "drops_system", "unmarked", "untrained_token"), _STYLE),
        "packing": "fine-tuning has no packing",
        **dict.fromkeys(("sound_resume", "other_world"), _SCHEDULE),
    }

    def prepare(self, setup: Setup) -> list[str]:
        """Write the rows as pairs of instruction and output, and finetune.yaml; return its text."""
        pairs = setup.folder / "pairs"
        pairs.mkdir(exist_ok=True)
        for source, name in ((setup.train, "train"), (setup.held_out, "val")):
            text = "".join(
                f"{convert_to_pair(line)}\n"
                for line in source.read_text(encoding="utf-8").splitlines()
            )
            (pairs / f"{name}.jsonl").write_text(text, encoding="utf-8")
        adapters = setup.targets is not None
        # LitGPT has a switch for each matrix: lora_query, lora_value.
        lora = "".join(
            f"lora_{part}: {str(f'{part[:1]}_proj' in (setup.targets or ())).lower()}\n"
            for part in ("query", "value")
        )
        if "q_prj" in (setup.targets or ()):  # a misspelled module is a misspelled switch here
            lora = lora.replace("lora_query: false", "lora_qury: true")
        text = _CONFIG.format(
            model=setup.model,
            output=setup.output,
            ranks=setup.ranks,
            resume="resume: true\n" if setup.resume else "",
            data="JSONmesages" if setup.twist == "unknown_format" else "JSON",
            pairs=pairs,
            nested="    misspelt_key: 1\n" if setup.twist == "typo_nested" else "",
            save=setup.save_every or 1000,
            whole=setup.batch * setup.ranks,
            batch="two" if setup.twist == "wrong_type" else setup.batch,
            steps=setup.steps,
            max_len=setup.max_len,
            validate=str(setup.validate).lower(),
            lr=setup.lr,
            lora=lora if adapters else "",
        )
        if setup.twist == "typo":
            text = text.replace("  micro_batch_size", "  micro_batch_sise")
        (setup.folder / "finetune.yaml").write_text(text, encoding="utf-8")
        return [text]

    def build_command(self, setup: Setup) -> list[str]:
        """Return the command of scripts/litgpt_run.py, which calls both of LitGPT's.

        LitGPT trains models of its own list; the script adds the benchmark's model to it.
        """
        verb = "finetune_full" if setup.targets is None else "finetune_lora"
        verb = verb.replace("full", "fulll") if setup.twist == "unknown_recipe" else verb
        script = str(_SCRIPTS / "litgpt_run.py")
        return [
            self.python,
            script,
            str(setup.model),
            verb,
            "--config",
            str(setup.folder / "finetune.yaml"),
        ]

    def read_losses(self, setup: Setup, result: Result) -> list[float]:
        """Read the losses from the lines it prints, one an optimizer step."""
        matches = (_STEP.search(line) for _, line in result.lines)
        return [float(match[2]) for match in matches if match]

    def read_label_texts(self, setup: Setup) -> list[list[str]] | None:
        """Return the trained pieces of the first rows, from its dataset of the same rows.

        None if the script fails.
        """
        script = _SCRIPTS / "litgpt_labels.py"
        pairs = setup.folder / "pairs"
        texts = run_json_script(
            self, setup, script, str(setup.model), str(pairs), str(setup.max_len)
        )
        return None if texts is None else list(texts)

    def list_states(self, setup: Setup) -> list[Path]:
        """Return the folders step-N, its saved states."""
        return sorted(setup.output.glob("step-*"))


def convert_to_pair(line: str) -> str:
    """Convert a line with a conversation to one with `instruction` and `output`.

    A line that is no conversation is returned as it is: it is a planted fault.
    """
    try:
        messages = json.loads(line)["messages"]
    except (ValueError, KeyError):
        return line
    by_role = {message["role"]: message["content"] for message in messages}
    names = {"user": "instruction", "assistant": "output"}
    return json.dumps({names[role]: content for role, content in by_role.items() if role in names})
