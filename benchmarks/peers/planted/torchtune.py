"""Run torchtune under planted faults, through its command line."""

import json
import re
from pathlib import Path

from benchmarks.peers.planted.ground import Setup
from benchmarks.peers.planted.running import Result
from benchmarks.peers.planted.tool import Tool, run_json_script

_SCRIPT = Path(__file__).parent / "scripts" / "torchtune_labels.py"
_PER_EPOCH = 2  # steps of an epoch: torchtune saves at the ends of epochs
# Its config file. {nested}, {lora} and {schedule} are lines or empty.
_CONFIG = """\
output_dir: {output}
tokenizer:
  _component_: torchtune.models.llama2.llama2_tokenizer
  path: {model}/tokenizer.model
  max_seq_len: {max_len}
dataset:
  _component_: torchtune.datasets.{dataset}
  source: json
  data_files: {train}
  split: train
  conversation_column: messages
  conversation_style: openai
  packed: {packing}
{nested}seed: 0
shuffle: {shuffle}
model:
  _component_: torchtune.models.llama3_2.{builder}
  vocab_size: {vocab}
  num_layers: {layers}
  num_heads: {heads}
  num_kv_heads: {kv_heads}
  embed_dim: {width}
  intermediate_dim: {mlp}
  max_seq_len: {positions}
  rope_base: 10000
  scale_factor: 1
{lora}checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: {model}
  checkpoint_files: {files}
  output_dir: {output}
  model_type: LLAMA3_2
resume_from_checkpoint: {resume}
batch_size: {batch}
epochs: {epochs}
optimizer:
  _component_: torch.optim.AdamW
  lr: {lr}
{schedule}loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
max_steps_per_epoch: {per_epoch}
gradient_accumulation_steps: 1
optimizer_in_bwd: False
clip_grad_norm: null
compile: False
device: cpu
enable_activation_checkpointing: False
enable_activation_offloading: False
dtype: fp32
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: {output}/logs
log_every_n_steps: 1
log_peak_memory_stats: False
"""
_LORA = """\
  lora_attn_modules: {targets}
  apply_lora_to_mlp: False
  apply_lora_to_output: False
  lora_rank: 8
  lora_alpha: 16
"""
# Its recipes for adapters cannot do without a schedule.
_SCHEDULE = """\
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 0
"""
_CODE = "its chat formats are code of its own; there is no template to plant this in"


class Torchtune(Tool):
    """Runs `tune run RECIPE --config FILE`, and `tune validate FILE` as its check."""

    name = "torchtune"
    title = "torchtune"
    packages = (("torch==2.13.0",), ("torchtune==0.6.1", "torchao==0.15.0"))
    shown = ("torchtune", "torchao", "torch", "datasets")
    metric = r"\|loss:|\d+%\|"
    told = (
        "`tune run full_finetune_single_device --config FILE`; where that says nothing, `tune"
        " validate FILE`; the model is built by its Llama 3.2 builder, the tokenizer is"
        " SentencePiece; states at ends of epochs, cut to two steps"
    )
    unable = {
        "overlap": "the recipe of one process has no validation",
        **dict.fromkeys(("no_end", "pad_is_eos", "drops_system", "unmarked"), _CODE),
        "untrained_token": (
            "its SentencePiece tokenizer takes no tokens from the checkpoint's files"
        ),
    }

    def prepare(self, setup: Setup) -> list[str]:
        """Write tune.yaml, with the sizes of the model's config.json; return its text."""
        sizes = json.loads((setup.model / "config.json").read_text(encoding="utf-8"))
        files = sorted(
            {path.name for path in setup.model.glob("*.safetensors")}
            | self._list_files_of_index(setup)
        )
        saved = self.list_states(setup)
        if setup.resume and saved:
            # The files of the newest epoch are named by hand, as its documentation has it.
            last = max(saved, key=lambda folder: int(folder.name.split("_")[1]))
            files = sorted(f"{last.name}/{path.name}" for path in last.glob("*.safetensors"))
        adapters = setup.targets is not None
        text = _CONFIG.format(
            output=setup.output,
            model=setup.model,
            max_len=setup.max_len,
            train=setup.train,
            dataset="chat_mesages" if setup.twist == "unknown_format" else "chat_dataset",
            packing=setup.packing,
            nested="  misspelt_key: 1\n" if setup.twist == "typo_nested" else "",
            shuffle=setup.shuffle,
            builder="lora_llama3_2" if adapters else "llama3_2",
            vocab=sizes["vocab_size"],
            layers=sizes["num_hidden_layers"],
            heads=sizes["num_attention_heads"],
            kv_heads=sizes["num_key_value_heads"],
            width=sizes["hidden_size"],
            mlp=sizes["intermediate_size"],
            positions=sizes["max_position_embeddings"],
            files=json.dumps(files),
            lora=_LORA.format(targets=json.dumps(setup.targets)) if adapters else "",
            resume=setup.resume,
            batch="two" if setup.twist == "wrong_type" else setup.batch,
            epochs=max(1, setup.steps // _PER_EPOCH),
            lr=setup.lr,
            schedule=_SCHEDULE if adapters else "",
            per_epoch=min(_PER_EPOCH, setup.steps),
        )
        if setup.twist == "typo":
            # Beside the right key, which its recipes read without a default.
            text += "batch_sise: 2\n"
        (setup.folder / "tune.yaml").write_text(text, encoding="utf-8")
        return [text]

    def _list_files_of_index(self, setup: Setup) -> set[str]:
        """Return the names of the files in the checkpoint's index; empty without an index.

        They are given to the tool although one may be missing: that is the fault.
        """
        index = setup.model / "model.safetensors.index.json"
        return (
            set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            if index.exists()
            else set()
        )

    def build_command(self, setup: Setup) -> list[str]:
        """Return the command `tune run`: full or LoRA, on one device or distributed."""
        kind = "full_finetune" if setup.targets is None else "lora_finetune"
        recipe = f"{kind}_single_device" if setup.ranks == 1 else f"{kind}_distributed"
        if setup.twist == "unknown_recipe":
            recipe = f"fulll{recipe[4:]}"  # the planted typo
        ranks = ["--nproc_per_node", str(setup.ranks)] if setup.ranks > 1 else []
        return [
            str(self.environment / "bin" / "tune"),
            "run",
            *ranks,
            recipe,
            "--config",
            str(self._get_config_file(setup)),
        ]

    def build_check_command(self, setup: Setup) -> list[str] | None:
        """Return the command `tune validate`."""
        return [
            str(self.environment / "bin" / "tune"),
            "validate",
            str(self._get_config_file(setup)),
        ]

    def _get_config_file(self, setup: Setup) -> Path:
        """Return the path of the config."""
        return setup.folder / "tune.yaml"

    def remember(self, setup: Setup) -> None:
        """Note the log files that are there; a command writes a new one."""
        self._before = set((setup.output / "logs").glob("*.txt"))

    def read_losses(self, setup: Setup, result: Result) -> list[float]:
        """Read the losses from the file of its DiskLogger."""
        new = sorted(set((setup.output / "logs").glob("*.txt")) - self._before)
        text = "".join(path.read_text(encoding="utf-8") for path in new)
        return [float(value) for value in re.findall(r"loss:(\S+)", text)]

    def read_label_texts(self, setup: Setup) -> list[list[str]] | None:
        """Read the label tokens from the dataset that the same config makes."""
        texts = run_json_script(self, setup, _SCRIPT, str(self._get_config_file(setup)))
        return None if texts is None else list(texts)

    def list_states(self, setup: Setup) -> list[Path]:
        """Return the folders epoch_N, which hold weights.

        The optimizer's state beside them is one file, which is overwritten each time.
        """
        return sorted(setup.output.glob("epoch_*"))
