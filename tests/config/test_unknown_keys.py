"""Unknown keys: the nearest valid one, in its section, also for names that other tools use."""

import pytest

from recipe_lib.config import FullFinetuneConfig
from recipe_lib.config.aliases import CHOICE_ALIASES
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.paths import read_aliases, read_recipe_configs
from recipe_lib.config.registry import list_names
from recipe_lib.config.schema import LINEARS
from recipe_lib.methods.dpo.config import DpoFinetuneConfig

ALL = "; `tune cat CONFIG --describe` lists all keys"

TOP = [
    ("bach_size", "; did you mean batch_size?"),
    ("Batch_Size", "; did you mean batch_size?"),
    ("lr", "; did you mean optimizer.lr?"),
    ("activation_checkpointing", "; did you mean memory.activation_checkpointing?"),
    ("activation_checkpoint", "; did you mean memory.activation_checkpointing?"),
    ("wrapping", "; did you mean parallel.fsdp_wrap_policy?"),
    ("source", "; did you mean data.source or validation.source?"),
    ("learning_rate", "; did you mean optimizer.lr?"),
    ("micro_batch_size", "; did you mean batch_size?"),
    ("per-device-train-batch-size", "; did you mean batch_size?"),
    ("max_length", "; did you mean max_seq_len?"),
    ("model_name_or_path", "; did you mean model.path?"),
    ("num_train_epochs", "; did you mean epochs?"),
    ("gradient_accumulation_step", "; did you mean gradient_accumulation_steps?"),
    ("optimiser", "; did you mean optimizer?"),
    ("optimizer.lr", "; write lr: under optimizer:"),
    ("checkpoint.keep_last", "; did you mean checkpoint.keep_last_n?"),
    ("zzzz", ALL),
    (
        "_component_",
        "; no config names Python code; `tune cat CONFIG --describe` lists the keys that choose",
    ),
]

INSIDE = [
    ("optimizer", "lrr", "; did you mean optimizer.lr?"),
    ("optimizer", "learning_rate", "; did you mean optimizer.lr?"),
    ("optimizer", "batch_size", "; did you mean batch_size?"),
    ("optimizer", "type", "; did you mean optimizer.name?"),
    ("memory", "wrapping", "; did you mean parallel.fsdp_wrap_policy?"),
    ("lr_scheduler", "warmup_step", "; did you mean lr_scheduler.warmup_steps?"),
    ("lr_scheduler", "_component_", "; did you mean lr_scheduler.type?"),
    (
        "lr_scheduler",
        "_target",
        "; the keys of lr_scheduler are type, warmup_ratio, warmup_steps, min_lr_ratio",
    ),
]


@pytest.mark.parametrize(("key", "hint"), TOP)
def test_unknown_at_the_top(faults, key, hint):
    assert faults(f"{key}: 1\n") == [f"c.yaml:1: {key}: unknown key{hint}"]


@pytest.mark.parametrize(("section", "key", "hint"), INSIDE)
def test_unknown_in_a_section(faults, section, key, hint):
    assert faults(f"{section}:\n  {key}: 1\n") == [f"c.yaml:2: {section}.{key}: unknown key{hint}"]


def test_a_section_as_a_word(faults):
    inside = (
        "name, lr, weight_decay, betas, eps, momentum, state_bits, master_weights,"
        " stochastic_rounding, implementation"
    )
    for value, found in (("adamw", "'adamw'"), ("[adamw]", "a list"), ("null", "null")):
        assert faults(f"optimizer: {value}\n") == [
            f"c.yaml:1: optimizer: found {found}, expected a section of keys ({inside})"
        ]


def test_odd_keys(faults):
    assert faults("'': 1\n") == [f"c.yaml:1: '': unknown key{ALL}"]
    assert faults('"a\\nb": 1\n') == [f"c.yaml:1: a\\nb: unknown key{ALL}"]
    assert faults("${x}: 1\n") == [f"c.yaml:1: ${{x}}: unknown key{ALL}"]


def test_every_single_typo_finds_its_key(faults):
    """One letter left out of any key of four letters or more: the key is named."""
    schema = read_schema(FullFinetuneConfig)
    missed = []
    names = [name for name in schema.keys if len(name.rpartition(".")[2]) >= 4]
    for name in names:
        section, _, word = name.rpartition(".")
        typo = word[:2] + word[3:]
        text = f"{section}:\n  {typo}: 1\n" if section else f"{typo}: 1\n"
        if section in ("model", "data"):
            text += "  path: x\n" if section == "model" else "  source: x\n"
        if not any(f"did you mean {name}?" in fault for fault in faults(text)):
            missed.append(name)
    assert len(names) > 45
    assert missed == []


def test_aliases_lead_to_keys_that_exist():
    schema = read_schema(DpoFinetuneConfig)
    every = [read_schema(each) for each in read_recipe_configs().values()]
    assert set(read_aliases().keys.values()) <= {
        name for each in every for name in (*each.keys, *each.sections)
    }
    assert not set(read_aliases().keys) & set(schema.keys)
    choices = {*LINEARS, "embedding", "head", "router", "experts"} | {
        choice for key in schema.keys.values() for choice in key.limits.get("choices", ())
    }
    assert {meant.split(" with ")[0] for meant in CHOICE_ALIASES.values()} <= {
        *choices,
        *list_names("data.format"),
        "adamw",
    }


@pytest.mark.parametrize(
    ("word", "ours"),
    [("lora_r", "lora.rank"), ("lora_alpha", "lora.alpha"), ("lora_target_modules", "lora.target_modules"),
     ("use_dora", "lora.dora"),
     ("load_in_4bit", "lora.quantize_base"), ("sample_packing", "data.packing"), ("loss_type", "dpo.loss"),
     ("lora.r", "lora.rank"), ("dataset_num_proc", "data.num_proc"), ("roles_to_train", "data.train_on"),
     ("data.datasets", "data.sources"), ("lora.ranks", "lora.rank"), ("dpo.gamma", "dpo.simpo_gamma")],
)  # fmt: skip
def test_words_of_adapters_and_data(faults, word, ours):
    found = faults("", f"{word}=1", "data.format=preference", schema=DpoFinetuneConfig)
    assert found == [f"command line: {word}=1: unknown key; did you mean {ours}?"]


def test_a_key_of_another_recipe(faults):
    assert faults("lora: {rank: 8}\n", "lora.alpha=8", "dpo_beta=0.2", "load_in_4bit=true") == [
        "c.yaml:1: lora: unknown key; lora is a section of the recipe lora_finetune_distributed",
        (
            "command line: lora.alpha=8: unknown key; lora.alpha is a key of the recipe"
            " lora_finetune_distributed"
        ),
        "command line: dpo_beta=0.2: unknown key; dpo.beta is a key of the recipe dpo_distributed",
        (
            "command line: load_in_4bit=true: unknown key; lora.quantize_base is a key of the"
            " recipe lora_finetune_distributed"
        ),
    ]


def test_all_faults_at_once_in_file_order(faults):
    text = (
        "lr: 3\nseed: x\nlog:\n  every_n_steps: 0\n  every_n_steps: 2\nresume:"
        " latest\noverwrite_output_dir: true\n"
    )
    assert faults(text, "epochs=0", "nope=1") == [
        "c.yaml:1: lr: unknown key; did you mean optimizer.lr?",
        "c.yaml:2: seed: found 'x', expected an integer >= 0",
        "c.yaml:5: log.every_n_steps: set twice, first on line 4; remove one of the two",
        "command line: epochs=0: found 0, expected an integer >= 1",
        f"command line: nope=1: unknown key{ALL}",
        (
            "c.yaml:7: resume, overwrite_output_dir: one goes on from what output_dir holds, the"
            " other replaces it; remove one of the two"
        ),
    ]


def test_a_misspelt_key_is_not_reported_as_missing_too(faults):
    text = "model:\n  pth: x\ndata:\n  sorce: x\n"
    assert faults(text, whole=True) == [
        "c.yaml:2: model.pth: unknown key; did you mean model.path?",
        "c.yaml:4: data.sorce: unknown key; did you mean data.source?",
    ]


def test_another_recipe(faults, load):
    assert load("recipe: full_finetune_distributed\n").recipe == "full_finetune_distributed"
    assert faults("# x\nrecipe: full_finetune\n") == [
        "c.yaml:2: recipe: found 'full_finetune', expected full_finetune_distributed; "
        "did you mean full_finetune_distributed?"
    ]


def test_a_config_of_another_shipped_recipe(faults, monkeypatch):
    from recipe_lib.config import load

    monkeypatch.setitem(load.read_recipe_configs(), "other_recipe", FullFinetuneConfig)
    assert faults("recipe: other_recipe\n") == [
        "c.yaml:1: recipe: found 'other_recipe', expected full_finetune_distributed; run it with"
        " that recipe: tune run other_recipe, or override it: recipe=full_finetune_distributed"
    ]


def test_a_section_of_another_tool_is_gone_through(faults):
    text = (
        "training:\n  steps: 10\n  seq_len: 64\nparallelism: {tensor_parallel_degree: 8}\nparalel:"
        " {tensor: 2}\n"
    )
    assert faults(text) == [
        "c.yaml:2: training.steps: unknown key; did you mean max_steps?",
        "c.yaml:3: training.seq_len: unknown key; did you mean max_seq_len?",
        "c.yaml:4: parallelism.tensor_parallel_degree: unknown key; did you mean parallel.tensor?",
        "c.yaml:5: paralel: unknown key; did you mean parallel?",
    ]
    assert faults("", "training={steps: 5}") == [
        "command line: training={steps: 5}: unknown key; did you mean max_steps?"
    ]
    assert faults("checkpointing: {keep_last_n: 2}\n") == [
        "c.yaml:1: checkpointing.keep_last_n: unknown key; did you mean checkpoint.keep_last_n?"
    ]
