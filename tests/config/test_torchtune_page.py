"""docs/torchtune.md: each key of torchtune that it lists is answered with the key beside it when it
is typed here.
"""

import re
from pathlib import Path

import pytest

from recipe_lib.cli.main import main
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.paths import read_recipe_configs
from recipe_lib.config.schema import LoraFinetuneConfig
from tests.house.files import ROOT

TEXT = (ROOT / "docs" / "torchtune.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| `([^`]+)` \| `([\w.]+)`(.*) \|$", TEXT.partition("## Keys")[2], re.MULTILINE
)
SAME = {"tokenizer.path", "lora.target_modules"}


def test_the_table_is_read():
    assert len(ROWS) > 30


@pytest.mark.parametrize(
    ("theirs", "ours", "rest"), ROWS, ids=lambda text: text if "." in text else None
)
def test_a_key_is_answered_with_ours(
    theirs: str, ours: str, rest: str, capsys: pytest.CaptureFixture
):
    keys = read_schema(LoraFinetuneConfig).keys
    assert ours in keys or any(key.startswith(f"{ours}.") for key in keys)
    for name in re.findall(r"`([a-z_]+\.[a-z_]+)`", rest):
        assert name in keys
    if theirs == ours:
        return
    assert main(["validate", "llama3/8B_lora", f"{theirs}=1"]) == 2
    said = capsys.readouterr().err
    assert f"{theirs}=1: unknown key; did you mean {ours}" in said, said


# The keys of a config of torchtune's for LoRA on one device, which names no recipe.
THEIRS = """model: {_component_: a.b, lora_attn_modules: [q_proj], apply_lora_to_mlp: true, apply_lora_to_output: false,
        lora_rank: 8, lora_alpha: 16, lora_dropout: 0.0}
tokenizer: {_component_: a.b, max_seq_len: null}
checkpointer: {_component_: a.b, checkpoint_dir: x, checkpoint_files: [a], recipe_checkpoint: null, output_dir: x,
               model_type: LLAMA3}
resume_from_checkpoint: false
save_adapter_weights_only: false
dataset: {_component_: a.b, packed: false, column_map: {}, conversation_column: c, new_system_prompt: s}
shuffle: true
run_val_every_n_steps: null
dataset_val: {_component_: a.b, split: train}
batch_size_val: 2
optimizer: {_component_: a.b, fused: true}
lr_scheduler: {_component_: a.b, num_warmup_steps: 100}
max_steps_per_epoch: null
metric_logger: {_component_: a.b, log_dir: x}
log_every_n_steps: 1
log_peak_memory_stats: true
log_level: INFO
enable_activation_checkpointing: true
enable_activation_offloading: false
optimizer_in_bwd: false
custom_sharded_layers: [tok_embeddings]
fsdp_cpu_offload: false
profiler: {_component_: a.b}
"""


def test_every_key_of_a_config_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Not with a list of all keys, or of all those of a section; keys of adapters with the recipe
    that has them.
    """
    config = tmp_path / "theirs.yaml"
    config.write_text(THEIRS, encoding="utf-8")
    assert main(["validate", str(config)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "unknown key" in line]
    assert len(lines) == 43  # all that stand above
    for line in lines:
        assert "lists all keys" not in line and not re.search(r"the keys of \w+ are", line), line
    adapters = [line for line in lines if "lora" in line.split(": ")[2]]
    assert len(adapters) == 6 and all(
        "is a key of the recipe lora_finetune_distributed" in line for line in adapters
    )


@pytest.mark.parametrize("name", sorted({
    name for row in re.findall(r"^\| (`\w+_(?:distributed|single_device)`.*?) \|", TEXT, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", row)
}))  # fmt: skip
def test_a_recipe_is_answered_with_ours(name: str, capsys: pytest.CaptureFixture):
    if name in read_recipe_configs():
        return
    assert main(["run", name, "--config", "llama3/8B_full"]) == 2
    said = capsys.readouterr().err
    assert any(
        re.search(rf"did you mean {ours}( with [a-z_]+=\w+)?\?", said)
        for ours in read_recipe_configs()
    ), said
