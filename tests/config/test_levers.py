"""Keys that change a run's memory, and overrides that may be kept in a file about runs."""

from recipe_lib.config import load_config
from recipe_lib.config.describe import LEVER_SECTIONS, LEVERS, NO_LEVERS, harmless_overrides, levers_of
from recipe_lib.config.keys import read_schema
from recipe_lib.config.recipes.distill_distributed import DistillFinetuneConfig
from recipe_lib.config.recipes.dpo_distributed import DpoFinetuneConfig
from recipe_lib.config.recipes.lora_finetune_distributed import LoraFinetuneConfig


def test_every_lever_is_a_key_of_the_schema():
    keys = dict(read_schema(DpoFinetuneConfig).keys) | dict(read_schema(DistillFinetuneConfig).keys)
    assert {*LEVERS, *NO_LEVERS} <= set(keys)
    assert {name.partition(".")[0] for name in NO_LEVERS} <= set(LEVER_SECTIONS)
    paths = {name for name, key in keys.items() if key.limits.get("path")}
    levers = {name for name in keys if name in LEVERS or name.partition(".")[0] in LEVER_SECTIONS} - set(NO_LEVERS)
    assert not levers & paths


def test_what_is_not_at_its_default():
    words = ["lora.rank=8", "lora.alpha=5", "compile=true", "dtype=fp32", "data.packing=false", "optimizer.lr=1"]
    before = levers_of(load_config("llama3/8B_lora", ["data.packing=false"], LoraFinetuneConfig))
    found = levers_of(load_config("llama3/8B_lora", words, LoraFinetuneConfig))
    assert found == before | {"lora.rank": "8", "compile": "true"}


def test_overrides_say_nothing_about_the_user():
    kept = [
        "batch_size=2", "lora.rank=8", "memory.activation_checkpointing=full", "~validation.source",
        "data.packing=true", "data.max_samples=200", "optimizer.lr=1e-4",
        "model.path=meta-llama/Meta-Llama-3-8B", "dtype=fp32",
        "distill.divergence=reverse_kl", "distill.stream_teacher=true",
        "my_own_flag=true", "clip_grad_norm=null", "parallel.fsdp_wrap_policy=[layers]",
    ]  # fmt: skip
    dropped = [
        "data.source=/home/me/patients.jsonl", "data.sources=[{source: a}]", "validation.source=b", "output_dir=/x",
        "tokenizer.path=/home/me/t", "log.project=secret-plan", "log.run_name=x", "resume=/home/me/state/step_4",
        "lora.adapter_path=/home/me/a", "lora={adapter_path: /home/me/a}", "my_own_text=/home/me", "data.template=mine",
        "data.split=train", "data={source: a}", "distill.teacher=/home/me/large",
    ]  # fmt: skip
    assert harmless_overrides([*dropped[:5], *kept, *dropped[5:]]) == kept
