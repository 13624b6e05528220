"""The table of combinations that are refused: each row is found, alone, and without any half of it
all is fine.
"""

import dataclasses

import pytest

from recipe_lib.config import FullFinetuneConfig, LoraFinetuneConfig, load_config, register
from recipe_lib.config.compatibility.table import find_broken_rules, list_rules
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.paths import read_recipe_configs
from recipe_lib.errors import ConfigError
from recipe_lib.methods.dpo.config import DpoFinetuneConfig

GOOD = "model: {path: x}\ndata: {source: rows.jsonl}\n"
# Micro-batches enough for a pipeline.
MANY = ("gradient_accumulation_steps=4", "batch_size=4", "parallel.pipeline_microbatches=4")
PAIRS = "model: {path: x}\ndata: {source: rows.jsonl, format: preference}\n"
TAUGHT = GOOD.replace("\n", "\ndistill: {teacher: y}\n", 1)


def good(entry) -> str:
    """A config of the entry's recipe that is right."""
    return {"dpo_distributed": PAIRS, "distill_distributed": TAUGHT}.get(entry.recipe, GOOD)


@pytest.fixture(autouse=True)
def another_loss():
    register("loss", "mine")(lambda logits, labels: logits)
    register("metric", "mine")(lambda prediction, reference: 0.0)


@pytest.mark.parametrize("entry", list_rules(), ids=lambda entry: " ".join(entry.example))
def test_each_is_refused_alone(write, entry):
    path, schema = write(good(entry)), read_recipe_configs()[entry.recipe]
    with pytest.raises(ConfigError) as caught:
        load_config(path, entry.example, schema)
    place = str(path) if all(word.startswith("~") for word in entry.example) else "command line"
    assert len(caught.value.faults) == 1
    named, _, line = caught.value.faults[0].partition(": ")
    assert named in (place, f"{path}:2, command line", f"{path}:1, command line")
    assert line.startswith(f"{', '.join(entry.keys)}: ")
    what = line.removeprefix(f"{', '.join(entry.keys)}: ")
    assert what.startswith("found ") or what == f"{entry.reason}; {entry.remedy}"


@pytest.mark.parametrize(
    "entry",
    [entry for entry in list_rules() if len(entry.example) > 1],
    ids=lambda e: " ".join(e.example),
)
def test_each_half_is_fine(write, entry):
    """Without any one of the overrides of a pair, nothing is refused (by this entry)."""
    for left_out in range(len(entry.example)):
        rest = [word for place, word in enumerate(entry.example) if place != left_out]
        try:
            load_config(write(good(entry)), rest, read_recipe_configs()[entry.recipe])
        except ConfigError as error:
            # Defaults, which naming does not change; and what only another entry asks for.
            is_idle = entry.example[left_out] in (
                "optimizer.name=adamw",
                "~validation.source",
                "tokenizer.path=x",
                "clip_grad_norm=null",
                *MANY,
            )
            assert is_idle or entry.reason not in str(error)


def test_keys_exist_and_rows_differ():
    for entry in list_rules():
        assert {*entry.keys, *entry.reads} <= set(
            read_schema(read_recipe_configs()[entry.recipe]).keys
        )
    assert len({(entry.keys, entry.reason) for entry in list_rules()}) == len(list_rules())


def test_predicates_read_objects_too():
    """The table also serves code that holds a finished config object."""
    cfg = FullFinetuneConfig()
    cfg.resume, cfg.overwrite_output_dir = "latest", True
    assert [
        entry.keys for entry in find_broken_rules(cfg, read_schema(FullFinetuneConfig).keys)
    ] == [
        ("model.path", "model.preset"),
        ("resume", "overwrite_output_dir"),
        ("data.source", "data.sources"),
    ]


def test_the_line_is_that_of_the_later_key(faults):
    text = GOOD + "overwrite_output_dir: true\nseed: 3\nresume: latest\n"
    reason = (
        "resume, overwrite_output_dir: one goes on from what output_dir holds, the other replaces"
        " it; remove one of the two"
    )
    assert faults(text, whole=True) == [f"c.yaml:5: {reason}"]
    assert faults(GOOD + "resume: latest\n", "overwrite_output_dir=true", whole=True) == [
        f"c.yaml:3, command line: {reason}"
    ]


def test_no_combination_is_judged_by_a_wrong_value(faults):
    assert faults("resume: latest\noverwrite_output_dir: 3\n") == [
        "c.yaml:2: overwrite_output_dir: found 3, expected true or false"
    ]
    assert faults("dtype: fp46\ndevice: cuda\n") == [
        "c.yaml:1: dtype: found 'fp46', expected one of fp32, bf16, fp64; did you mean fp64?"
    ]


def test_sensible_things_are_not_refused(load):
    """Combinations that look odd and are right, or that only the machine can judge."""
    for overrides in (
        ["max_steps=10", "lr_scheduler.warmup_steps=50", "epochs=3"],
        ["data.source=hub:owner/name", "data.split=test"],
        ["validation.source=hub:owner/name", "data.split=test"],
        ["parallel.data_shard=1", "parallel.data_replicate=8"],
        ["dtype=fp64", "device=auto"],
        ["memory.cpu_offload=true", "device=auto"],
        ["memory.cpu_offload=true", "device=cuda", "optimizer.implementation=fused"],
        ["dtype=fp32", "parallel.reduce_dtype=bf16"],
        ["compile=true", "memory.activation_checkpointing=selective"],
        ["checkpoint.save_model=false"],
        ["log.project=mine"],
        ["model.path=/no/such/folder", "data.source=/no/such/file"],
        [
            "~data.source",
            "data.sources=[{source: 'hub:owner/name'}, {source: b.jsonl}]",
            "data.split=test",
        ],
        [
            "~data.source",
            "data.sources=[{source: a, format: text}, {source: b}]",
            "data.train_on=last",
        ],
        ["data.format=text", "data.train_on=all"],
        ["data.format=text", "data.packing=true"],
    ):
        load("", *overrides)
    for overrides in (
        [
            "lora.dora=true",
            "lora.target_modules=[q, embedding, head]",
            "lora.quantize_base=nf4",
            "lora.dtype=fp32",
        ],
        ["lora.rslora=true", "lora.dropout=0.1", "memory.cpu_offload=true"],
        ["dtype=fp64", "device=cpu"],
    ):
        load("", *overrides, schema=LoraFinetuneConfig)
    for overrides in (
        ["data.packing=true", "dpo.loss=simpo", "dpo.simpo_gamma=1"],
        ["dpo.label_smoothing=0.1", "dpo.reference_free=true"],
        ["dpo.trainable=all", "dpo.loss=ipo"],
        ["~data.source", "data.sources=[{source: a, weight: 0.5}, {source: b}]"],
    ):
        load("", "data.format=preference", *overrides, schema=DpoFinetuneConfig)


def test_a_format_of_a_plugin_may_give_pairs(load):
    register("data.format", "my_pairs")(lambda row: row)
    assert load("", "data.format=my_pairs", schema=DpoFinetuneConfig).data.format == "my_pairs"


def test_formats_of_sources_are_judged_one_by_one(faults):
    line = (
        "command line: dpo.loss, data.format: the loss compares a chosen with a rejected answer,"
        " which samples of this "
    )
    found = faults("", "~data.source", "data.sources=[{source: a, format: preference}, {source: b, format: alpaca}]",
                   schema=DpoFinetuneConfig)  # fmt: skip
    assert found == [
        line.replace("command line", "c.yaml") + "format do not have; set data.format to preference"
    ]
    found = faults("", "data.format=preference", "validation.source=v.jsonl", "validation.format=alpaca",
                   schema=DpoFinetuneConfig)  # fmt: skip
    assert found == [line + "format do not have; set data.format to preference"]


def test_a_class_without_a_section_is_judged_by_the_rest(tmp_path):
    @dataclasses.dataclass
    class Small:
        resume: str | None = None
        overwrite_output_dir: bool = False

    path = tmp_path / "c.yaml"
    path.write_text("overwrite_output_dir: true\n")
    assert load_config(path, (), Small).overwrite_output_dir is True
    with pytest.raises(
        ConfigError, match=r"^\S*c.yaml:1, command line: resume, overwrite_output_dir: one goes on"
    ):
        load_config(path, ["resume=latest"], Small)
