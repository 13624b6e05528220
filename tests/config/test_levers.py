"""Keys that change a run's memory."""

from recipe_lib.config import load_config
from recipe_lib.config.describe import LEVER_SECTIONS, LEVERS, NO_LEVERS, list_changed_levers
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.schema import LoraFinetuneConfig
from recipe_lib.methods.distill.config import DistillFinetuneConfig
from recipe_lib.methods.dpo.config import DpoFinetuneConfig


def test_every_lever_is_a_key_of_the_schema():
    keys = dict(read_schema(DpoFinetuneConfig).keys) | dict(read_schema(DistillFinetuneConfig).keys)
    own = {*DpoFinetuneConfig.memory_keys, *DistillFinetuneConfig.memory_keys}
    assert {*LEVERS, *NO_LEVERS, *own} <= set(keys)
    assert {name.partition(".")[0] for name in NO_LEVERS} <= set(LEVER_SECTIONS)
    paths = {name for name, key in keys.items() if key.limits.get("path")}
    levers = {
        name for name in keys if name in {*LEVERS, *own} or name.partition(".")[0] in LEVER_SECTIONS
    } - set(NO_LEVERS)
    assert not levers & paths


def test_what_is_not_at_its_default():
    words = [
        "lora.rank=8",
        "lora.alpha=5",
        "compile=true",
        "dtype=fp32",
        "data.packing=false",
        "optimizer.lr=1",
    ]
    before = list_changed_levers(
        load_config("llama3/8B_lora", ["data.packing=false"], LoraFinetuneConfig)
    )
    found = list_changed_levers(load_config("llama3/8B_lora", words, LoraFinetuneConfig))
    assert found == before | {"lora.rank": "8", "compile": "true"}
