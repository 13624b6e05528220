"""Configs of Axolotl and LLaMA-Factory as ours: no key is lost, effective values are equal, differences are said."""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.imported_configs import count_table, outcomes
from recipe_lib.config import DpoFinetuneConfig, load_config
from recipe_lib.config.hints import meant_by
from recipe_lib.config.keys import read_schema
from recipe_lib.config.other_configs import TOOLS, Imported, import_file
from recipe_lib.config.other_configs.conversion import CARRIED, CHANGED, DEFAULT, DROPPED
from recipe_lib.config.other_configs.methods import is_here
from recipe_lib.config.other_configs.warm_up import WARM_UP
from recipe_lib.config.recipes import RECIPE_CONFIGS
from recipe_lib.errors import ConfigError
from recipe_lib.optim.lr_scheduler import learning_rate
from tests.cli.commands import ROOT

FOLDER = Path(__file__).parent / "other_tools"
FILES = sorted(FOLDER.rglob("*.yaml"))
NAMES = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FILES]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a file as PyYAML reads it."""
    if isinstance(value, dict) and value:
        for word, inner in value.items():
            yield from leaves(inner, f"{name}.{word}" if name else word)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{name}[{number}]")
    else:
        yield name, value


def read(text: str, tmp_path: Path, **options: Any) -> Imported:
    path = tmp_path / "theirs.yaml"
    path.write_text(text, encoding="utf-8")
    return import_file(str(path), **options)


def check_whole(path: Path, imported: Imported, tmp_path: Path) -> None:
    """Every key of the file has one row, and the text is the config."""
    theirs = dict(leaves(yaml.safe_load(path.read_text(encoding="utf-8"))))
    rows = {key: fate for key, fate in imported.fates.items() if fate.kind != DEFAULT}
    assert set(rows) == set(theirs)
    assert {fate.kind for fate in rows.values()} <= {CARRIED, CHANGED, DROPPED}
    assert sum(imported.counts().values()) == len(theirs)
    assert all(fate.why for fate in rows.values() if fate.kind != CARRIED)
    said = imported.table()
    assert all(key in said or key.rpartition(".")[2] in said for key in theirs)
    ours = tmp_path / "ours.yaml"
    ours.write_text(imported.yaml("ours.yaml"), encoding="utf-8")
    schema = RECIPE_CONFIGS[imported.recipe]
    assert load_config(ours, (), schema) == imported.cfg
    assert max(map(len, ours.read_text(encoding="utf-8").splitlines()[:3])) <= 120


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_key_goes_unmentioned(path: Path, tmp_path: Path):
    check_whole(path, import_file(str(path)), tmp_path)


def test_the_page_counts_them():
    page = (ROOT / "docs" / "import.md").read_text(encoding="utf-8")
    assert count_table(outcomes(FOLDER)) in page, (
        "put what `python -m benchmarks.imported_configs --counts tests/config/other_tools` prints into docs/import.md"
    )


def test_there_are_configs_of_both_tools():
    assert len([name for name in NAMES if name.startswith("axolotl/")]) >= 10
    assert len([name for name in NAMES if name.startswith("llama_factory/")]) >= 8


# What each file trains, by hand from the tools' documentation.
EFFECTIVE: dict[str, dict[str, Any]] = {
    "axolotl/lora_alpaca": {
        "recipe": "lora_finetune_distributed", "batch_size": 2, "gradient_accumulation_steps": 4, "epochs": 4,
        "optimizer.state_bits": 8, "optimizer.betas": [0.9, 0.999], "lora.rank": 32, "lora.alpha": 16,
        "lora.quantize_base": "int8", "lora.target_modules": ["all-linear"], "lr_scheduler.warmup_ratio": 0.1,
        "max_seq_len": 4096, "data.packing": True, "data.split": "train[:95%]", "validation.split": "train[95%:]",
        "data.truncation": "drop", "clip_grad_norm": 1.0, "memory.activation_checkpointing": "full",
    },
    "axolotl/qlora_fsdp_70b": {
        "lora.quantize_base": "nf4", "lora.dtype": None, "memory.cpu_offload": True, "lr_scheduler.min_lr_ratio": 0.1,
        "max_seq_len": 512, "data.split": "train[:50%]", "optimizer.lr": 1e-5,
    },
    "axolotl/dpo_messages": {
        "recipe": "dpo_distributed", "dpo.beta": 0.2, "dpo.loss": "sigmoid", "dpo.trainable": "adapters",
        "data.columns": {"conversations": "conversation"}, "lr_scheduler.type": "linear", "optimizer.state_bits": 8,
        "lora.target_modules": ["q", "k", "v", "o"], "lora.dtype": "fp32",
    },
    "axolotl/ipo_full": {
        "dpo.loss": "ipo", "dpo.beta": 0.3, "dpo.trainable": "all", "data.columns": {"prompt": "question"},
        "max_steps": 200, "epochs": 1000, "lr_scheduler.type": "constant", "optimizer.weight_decay": 0.01,
    },
    "axolotl/simpo_lora": {"dpo.loss": "simpo", "dpo.simpo_gamma": 1.0, "dpo.beta": 2.0, "lora.rslora": True},
    "axolotl/pretrain": {
        "data.source": "hub:allenai/c4:en", "data.format": "text", "optimizer.betas": [0.9, 0.95],
        "optimizer.eps": 1e-5, "clip_grad_norm": 0.5, "memory.activation_offload": True, "log.trackers": ["wandb"],
        "checkpoint.save_every_n_steps": 100, "checkpoint.keep_last_n": 3,
    },
    "axolotl/parallel_nd": {"parallel.data_shard": 2, "parallel.tensor": 2, "optimizer.lr": 2e-6},
    "axolotl/roles_tests": {
        "data.train_on": "assistant", "validation.split": "test_sft", "validation.every_n_steps": 50,
        "validation.batch_size": 4, "optimizer.name": "muon", "data.truncation": "truncate",
    },
    "llama_factory/lora_sft": {
        "lora.rank": 8, "lora.alpha": 16, "lora.dtype": "fp32", "epochs": 3, "data.max_samples": 1000,
        "memory.activation_checkpointing": "full", "batch_size": 1, "gradient_accumulation_steps": 8,
        "overwrite_output_dir": True, "checkpoint.save_every_n_steps": 500,
    },
    "llama_factory/qlora_val": {
        "lora.quantize_base": "nf4", "data.max_samples": 900, "validation.split": "train[900:1000]",
        "validation.every_n_steps": 500, "lora.target_modules": ["q", "v"],
    },
    "llama_factory/full_sft_z3": {
        "optimizer.master_weights": True, "memory.cpu_offload": True, "data.packing": True,
        "data.columns": {"instruction": "question", "output": "response", "system": "system_prompt"},
    },
    "llama_factory/dpo_lora": {
        "data.source": "hub:llamafactory/DPO-En-Zh-20k:en", "dpo.beta": 0.1, "lora.alpha": 8, "data.columns": {},
    },
    "llama_factory/simpo_full": {
        "dpo.loss": "simpo", "dpo.beta": 2.0, "dpo.simpo_gamma": 1.5, "optimizer.master_weights": False,
        "data.columns": {"prompt": "instruction"},
    },
    "llama_factory/dora_mask": {
        "lora.dora": True, "data.train_on": "last", "memory.activation_checkpointing": "none", "lora.rank": 8,
    },
    "llama_factory/short": {
        "batch_size": 8, "max_steps": 30, "epochs": 1000, "lr_scheduler.type": "linear", "matmul_dtype": "fp8",
        "log.every_n_steps": 500, "log.trackers": ["tensorboard"], "optimizer.state_bits": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EFFECTIVE)
def test_effective_values(name: str):
    imported = import_file(str(FOLDER / f"{name}.yaml"))
    for key, value in EFFECTIVE[name].items():
        found = imported.cfg
        for word in key.split("."):
            found = getattr(found, word)
        assert found == value, key


def test_weight_decay_of_norms_is_said():
    """transformers leaves norms and biases out; adapters have none."""
    full, adapters = (import_file(str(FOLDER / f"axolotl/{name}.yaml")) for name in ("ipo_full", "qlora_fsdp_70b"))
    fate = full.fates["weight_decay"]
    assert fate.kind == CHANGED and fate.why == "here of every parameter, there not of norms and biases"
    assert adapters.fates["weight_decay"].kind == CARRIED


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_rates_are_theirs_but_for_the_warm_up(kind: str, tmp_path: Path):
    """transformers' lambdas, by hand: in the warm-up ours is one step ahead, as the row says, and then equal."""
    names = {"constant": "constant_with_warmup"}
    text = AXOLOTL + f"lr_scheduler: {names.get(kind, kind)}\nwarmup_steps: 10\nlearning_rate: 0.5\n"
    imported = read(text, tmp_path)
    assert imported.fates["warmup_steps"].kind == CHANGED and imported.fates["warmup_steps"].why == WARM_UP
    total, warm_up = 50, 10

    def theirs(step: int) -> float:
        if step < warm_up:
            return 0.5 * step / warm_up
        done = (step - warm_up) / (total - warm_up)
        return 0.5 * {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[kind]

    ours = [learning_rate(imported.cfg.lr_scheduler, imported.cfg.optimizer.lr, step, total) for step in range(total)]
    assert ours[:warm_up] == pytest.approx([theirs(step + 1) for step in range(warm_up)])
    assert ours[warm_up:] == pytest.approx([theirs(step) for step in range(warm_up, total)])


AXOLOTL = """base_model: o/m
datasets: [{path: o/d, type: alpaca}]
micro_batch_size: 1
"""
FACTORY = f"""model_name_or_path: o/m
stage: sft
dataset_dir: {FOLDER / "llama_factory/data"}
dataset: alpaca_en
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (AXOLOTL + "rl: grpo\n", "rl: grpo: there is no recipe for reinforcement learning"),
        (AXOLOTL + "rl: orpo\n", "rl: orpo: there is no ORPO"),
        (AXOLOTL + "adapter: ia3\n", "adapter: ia3: expected lora, qlora, or none"),
        (AXOLOTL + "optimizer: lion_8bit\n", ":4: optimizer: 'lion_8bit': no such optimizer; known are adamw_torch,"),
        (AXOLOTL + "lr_scheduler: rex\n", ":4: lr_scheduler: 'rex': no such schedule; known are cosine, linear"),
        (AXOLOTL + "neftune_noise_alpha: 5\n", "no noise is added to embeddings; --without neftune_noise_alpha"),
        (AXOLOTL + "lora_modules_to_save: [lm_head]\nadapter: lora\nlora_alpha: 1\nlora_target_linear: true\n",
         "nothing is trained whole next to adapters"),
        (AXOLOTL + "load_in_4bit: true\n", "quantized weights are not trained without an adapter"),
        (AXOLOTL + "num_epochs: 0.5\n", "epochs are whole here; set max_steps"),
        (AXOLOTL + "num_epochs: many\n", "num_epochs: 'many': is no value of this key"),
        (AXOLOTL + "learning_rat: 1\n", "known here; did you mean learning_rate? --without"),
        (AXOLOTL + "micro_batch_size: 2\n", "micro_batch_size: set twice, first on line 3"),
        (AXOLOTL + "sequence_len: 0\n", "as ours: max_seq_len=0: "),
        (AXOLOTL + "deepspeed: my.json\n", "expected a file that is named after its stage"),
        (AXOLOTL.replace("alpaca", "reflection"), "datasets[0].type: 'reflection': no such type; known are alpaca"),
        (AXOLOTL.replace("o/d", "s3://bucket/d"), "storage by URL is not read"),
        ("base_model: o/m\n", "datasets is missing, which says what is trained on; data.source=FILE"),
        (AXOLOTL + "is_multimodal: true\n", "there are no images here, only text"),
        (FACTORY + "finetuning_type: freeze\n", "finetuning_type: freeze: there is none of it; choose full or lora"),
        (FACTORY + "use_galore: true\n", "use_galore: there is no GaLore"),
        (FACTORY + "pissa_init: true\n", "adapters begin at zero"),
        (FACTORY + "quantization_bit: 3\n", "expected 4 (nf4) or 8 bits of bitsandbytes"),
        (FACTORY.replace("sft", "ppo"), "stage: ppo: there is no recipe for reinforcement learning"),
        (FACTORY.replace("alpaca_en", "nothing"), "has no dataset nothing"),
        (FACTORY.replace("alpaca_en", "pictures"), "pictures has images, which is not read here"),
        (FACTORY.replace("alpaca_en", "pairs"), "pairs has pairs of answers, stage is sft"),
        (FACTORY.replace(str(FOLDER), "/nowhere"), "which is neither here nor above the file"),
        ("model_name_or_path: o/m\ntemplate: llama3\n", "trains nothing; `tune generate MODEL`"),
        ("model_name_or_path: o/m\ntemplate: llama3\nexport_dir: x\n", "it merges an adapter; `tune export RUN`"),
        ("a: 1\n", "its keys are not those of one of torchtune, axolotl, llama-factory; --from says"),
        ("recipe: full_finetune_distributed\n", "has a key recipe, as configs of ours have"),
        ("- a\n", "expected keys with values"),
        ("a: &x 1\nb: *x\n", "found the anchor &x"),
        (AXOLOTL + "wandb_name: ${nothing.here}\n", "expected ${section.key} of this file"),
        (AXOLOTL + "wandb_name: ${oc.env:HOME}\n", "expected ${section.key} of this file"),
        (AXOLOTL + "wandb_name: ${wandb_project}\nwandb_project: ${wandb_name}\n", "name each other in a circle"),
        (AXOLOTL + "weight_decay: [[1]]\n", "weight_decay: found a list in a list"),
    ],
    ids=lambda value: "" if "\n" in value else value[:50],
)  # fmt: skip
def test_what_cannot_be_carried_is_one_line(text: str, line: str, tmp_path: Path):
    with pytest.raises(ConfigError) as raised:
        read(text, tmp_path)
    assert any(line in fault for fault in raised.value.faults), raised.value.faults
    assert all(str(tmp_path / "theirs.yaml") in fault for fault in raised.value.faults)


PAIRS = AXOLOTL.replace("type: alpaca", "type: llama3.ultra")


@pytest.mark.parametrize(
    ("text", "needs", "values", "line"),
    [
        (AXOLOTL + "qat: {weight_dtype: int4, group_size: 64, activation_dtype: int8}\n", "qat",
         {"qat": "int4", "qat_group_size": 64}, "qat: there is no quantization-aware training"),
        (PAIRS + "rl: kto\nkto_desirable_weight: 0.2\n", "dpo.desirable_weight",
         {"dpo.loss": "kto", "dpo.desirable_weight": 0.2, "data.format": "kto"}, "rl: kto: there is no KTO"),
        (AXOLOTL.replace("alpaca", "bradley_terry.chat_template") + "reward_model: true\n", "reward.loss",
         {"reward.trainable": "all", "data.format": "preference", "data.columns": {"prompt": "input"}},
         "reward_model: there is no recipe for reward models"),
        (AXOLOTL + "val_set_size: 0.1\nearly_stopping_patience: 3\n", "validation.patience",
         {"validation.patience": 3}, "a run ends after its steps"),
        (AXOLOTL + "val_set_size: 0.1\nload_best_model_at_end: true\n", "checkpoint.keep_best",
         {"checkpoint.keep_best": True}, "the model of the last step is saved"),
    ],
    ids=["qat", "kto", "reward", "patience", "best"],
)  # fmt: skip
def test_methods_are_imported_where_a_recipe_has_them(
    text: str, needs: str, values: dict[str, Any], line: str, tmp_path: Path
):
    if not is_here(needs):
        with pytest.raises(ConfigError) as raised:
            read(text, tmp_path)
        assert line in str(raised.value)
        return
    imported = read(text, tmp_path)
    assert {key: imported.settings.get(key) for key in values} == values


def test_all_faults_are_told_at_once(tmp_path: Path):
    with pytest.raises(ConfigError) as raised:
        read(AXOLOTL + "optimizer: lion_8bit\nneftune_noise_alpha: 5\nlearning_rat: 1\n", tmp_path)
    assert len(raised.value.faults) == 3


def test_a_key_is_left_out_when_asked(tmp_path: Path):
    text = AXOLOTL + "neftune_noise_alpha: 5\nlr_groups: [{name: a, lr: 1}]\n"
    imported = read(text, tmp_path, omitted=["neftune_noise_alpha", "lr_groups"])
    assert imported.fates["lr_groups[0].lr"].why == "left out by --without"
    with pytest.raises(ConfigError, match="--without: .* has no key 'neftun'"):
        read(text, tmp_path, omitted=["neftun"])


def test_any_key_can_be_left_out():
    """As if the file did not have it: imported, or refused for what is missing then."""
    draw = random.Random(1)
    for path in FILES:
        for key, _ in draw.sample(list(leaves(yaml.safe_load(path.read_text(encoding="utf-8")))), 4):
            try:
                assert import_file(str(path), omitted=[key]).fates[key].why == "left out by --without"
            except ConfigError as error:
                assert all("\n" not in fault for fault in error.faults)


def test_what_the_user_sets_wins(tmp_path: Path):
    text = AXOLOTL + "warmup_steps: 5\n"
    overrides = ["model.path=mine", "batch_size=3", "lr_scheduler.warmup_ratio=0.2", "data.sources=[{source: hub:a/b}]"]
    imported = read(text, tmp_path, overrides=overrides)
    assert imported.cfg.batch_size == 3 and imported.cfg.model.path == "mine"
    assert imported.cfg.lr_scheduler.warmup_steps == 0 and imported.cfg.data.source is None
    assert imported.fates["micro_batch_size"].why == "batch_size is set on the command line"
    with pytest.raises(ConfigError, match="^command line: batch_size=no: found"):
        read(text, tmp_path, overrides=["batch_size=no"])


def test_samples_of_the_user_take_the_place_of_names(tmp_path: Path):
    text = FACTORY.replace(str(FOLDER), "/nowhere")
    imported = read(text, tmp_path, overrides=["data.source=rows.jsonl"])
    assert imported.cfg.data.source == "rows.jsonl" and imported.fates["dataset"].kind == DROPPED


def test_other_names_of_a_value(tmp_path: Path):
    """`fp16`, weights of 16 bits without a scale, is bf16; sharding strategies of FSDP; a schedule without warm-up."""
    text = AXOLOTL + "fp16: true\nbf16: false\nfsdp: [shard_grad_op]\nlr_scheduler: constant\nwarmup_steps: 5\n"
    imported = read(text, tmp_path)
    assert imported.cfg.dtype == "bf16" and not imported.cfg.parallel.reshard_after_forward
    assert (
        imported.cfg.lr_scheduler.warmup_steps == 0 and "constant has no warm-up" in imported.fates["warmup_steps"].why
    )
    assert read(AXOLOTL + "bf16: false\nfp16: false\n", tmp_path).cfg.dtype == "fp32"
    assert read(AXOLOTL + "warmup_steps: 0.1\n", tmp_path).cfg.lr_scheduler.warmup_ratio == 0.1
    assert read(AXOLOTL + "max_grad_norm: 0\n", tmp_path).cfg.clip_grad_norm is None


def test_a_secret_is_neither_shown_nor_written(tmp_path: Path):
    token = "hf_" + "gH" * 17
    with pytest.raises(ConfigError) as raised:
        read(AXOLOTL + f"wandb_name: {token}\n", tmp_path)
    assert token not in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        read(AXOLOTL + f"my_key: {token}\n", tmp_path)
    assert token not in str(raised.value)
    imported = read(FACTORY + f"hf_hub_token: {token}\n", tmp_path)
    assert token not in imported.yaml("a.yaml") + imported.table()


GARBAGE = ["abc", -3, [1, "a"], {"a": {"b": 1}}, [[1], [2]], [{"x": 1}], None]


def test_values_of_any_kind_are_imported_or_refused(tmp_path: Path):
    """A value of another kind in the place of one that is right: never anything but ConfigError."""
    draw = random.Random(0)
    for path in FILES:
        whole = yaml.safe_load(path.read_text(encoding="utf-8"))
        for key in draw.sample(list(whole), 5):
            text = yaml.safe_dump({**whole, key: draw.choice(GARBAGE)}, sort_keys=False)
            try:
                read(text.replace("dataset:", f"dataset_dir: {FOLDER}/llama_factory/data\ndataset:", 1), tmp_path)
            except ConfigError as error:
                assert all("\n" not in fault for fault in error.faults)


@pytest.mark.parametrize("tool", TOOLS)
def test_tables_name_keys_of_ours(tool: str):
    """What a table carries is a key of some recipe, but for methods that are not here; no key is in two tables."""
    table = TOOLS[tool].TABLE
    known = {key for schema in RECIPE_CONFIGS.values() for key in read_schema(schema).keys}
    later = {"distill", "reward", "qat_group_size", "qat_start_step", "dpo.desirable_weight", "dpo.undesirable_weight"}
    for theirs, ours in table.same.items():
        assert ours in known or ours in later or ours.partition(".")[0] in later, theirs
        assert meant_by(theirs, read_schema(DpoFinetuneConfig)) in ([ours], []), theirs  # as `tune validate` answers it
    rows = [*table.same, *table.converted, *table.without, *table.refused]
    assert {key for key in rows if rows.count(key) > 1} == set()


@pytest.mark.parametrize("last", ["aaaaaaaaaa", "''", "[a, b]"])
@pytest.mark.parametrize("written", ["{}" * 10, "[{}, {}, {}]", "x {} {} {}"])
def test_names_that_grow_end_in_a_line(
    last: str, written: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Twelve names, each of several of the next: filled in anew each time they would be a billion texts."""
    monkeypatch.setattr("recipe_lib.config.other_configs.their_file._LONGEST", 2**10)
    lines = [f"a{n}: {written}".replace("{}", f"'${{a{n - 1}}}'" if "[" in written else f"${{a{n - 1}}}")
             for n in range(9, 0, -1)]  # fmt: skip
    (tmp_path / "theirs.yaml").write_text("\n".join(["base_model: a/b", *lines, f"a0: {last}", ""]))
    from recipe_lib.cli.main import main

    assert main(["import", str(tmp_path / "theirs.yaml"), "--from", "axolotl"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and len(said) < 600
