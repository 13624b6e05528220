"""torchtune's configs as ours: those of its wheel where it is here, and some in their style."""

import contextlib
import io
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.imported_configs import (
    find_torchtune_configs,
    format_count_table,
    format_key_table,
    format_table,
    import_all,
)
from recipe_lib.cli.main import main
from recipe_lib.config import load_config
from recipe_lib.config.paths import read_recipe_configs
from recipe_lib.config.schema_data import resolve_sources, resolve_validation_source
from recipe_lib.config.torchtune import ImportedConfig, import_file
from recipe_lib.config.torchtune.conversion import CARRIED, CHANGED, DEFAULT, DROPPED
from recipe_lib.errors import ConfigError
from recipe_lib.optim.optimizers import compute_learning_rate
from tests.cli.commands import ROOT
from tests.plan.apart import call_in_fork

WHEEL = find_torchtune_configs()
needs_wheel = pytest.mark.skipif(
    WHEEL is None,
    reason=(
        "torchtune's configs are not here: set TORCHTUNE_CONFIGS to the folder recipes/configs of"
        " its wheel (0.6.1)"
    ),
)

# What is refused of the wheel's, by names.
REFUSED = {
    r".*(evaluation|eleuther_evaluation)$": "tasks: it measures a model",
    r".*generation": "max_new_tokens: it generates",
    r"quantization$": "quantizer: it quantizes a model; `tune export MODEL --quantize int4`",
    r".*vision/|dev/11B": "there are no images here, only text",
    r".*ppo": "it is for reinforcement learning (PPO)",
}


def refusal(name: str) -> str | None:
    return next((line for pattern, line in REFUSED.items() if re.match(pattern, name)), None)


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


def check_whole(path: Path, imported: ImportedConfig, tmp_path: Path) -> None:
    """Every key of the file has one row, and the text is the config."""
    theirs = dict(leaves(yaml.safe_load(path.read_text(encoding="utf-8"))))
    rows = {key: fate for key, fate in imported.fates.items() if fate.kind != DEFAULT}
    assert set(rows) == set(theirs)
    assert {fate.kind for fate in rows.values()} <= {CARRIED, CHANGED, DROPPED}
    assert all(fate.why for fate in rows.values() if fate.kind != CARRIED)
    said = imported.format_table()
    assert all(key in said or key.rpartition(".")[2] in said for key in theirs)
    ours = tmp_path / "ours.yaml"
    ours.write_text(imported.format_yaml("ours.yaml"), encoding="utf-8")
    schema = read_recipe_configs()[imported.recipe]
    assert load_config(ours, (), schema) == imported.cfg
    assert max(map(len, ours.read_text(encoding="utf-8").splitlines()[:3])) <= 120


@pytest.mark.slow
@needs_wheel
def test_all_of_the_wheel_are_imported_or_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    assert WHEEL is not None
    found = dict(import_all(WHEEL))
    assert len(found) == 156
    for number, (name, outcome) in enumerate(found.items()):
        line = refusal(name.removesuffix(".yaml"))
        if line is not None:
            assert isinstance(outcome, str) and line in outcome and "\n" not in outcome, name
            continue
        assert isinstance(outcome, ImportedConfig), (name, outcome)
        if number % 4 == 0:
            check_whole(WHEEL / name, outcome, tmp_path)
        check_equal(yaml.safe_load((WHEEL / name).read_text(encoding="utf-8")), outcome)
    assert len(format_table(found.items()).splitlines()) == 156 + 2
    page = (ROOT / "docs" / "import.md").read_text(encoding="utf-8")
    rerun = "put what `python -m benchmarks.imported_configs --counts` prints into docs/import.md"
    assert format_count_table(found.items()) in page, rerun
    keys = (ROOT / "docs" / "measurements" / "imported_keys.md").read_text(encoding="utf-8")
    assert keys.endswith(f"\n\n{format_key_table(found.items())}"), (
        "put what it prints with --keys into that page"
    )


def check_equal(theirs: dict[str, Any], imported: ImportedConfig) -> None:
    """Values that have to be theirs, read from the file without our tables."""
    cfg = imported.cfg
    assert (
        cfg.batch_size * cfg.gradient_accumulation_steps
        == theirs["batch_size"] * theirs["gradient_accumulation_steps"]
    )
    assert cfg.optimizer.lr == float(theirs["optimizer"]["lr"])
    assert cfg.optimizer.weight_decay == theirs["optimizer"].get(
        "weight_decay", 0.01
    )  # torch's own default
    assert cfg.optimizer.betas == [0.9, 0.999] and cfg.optimizer.eps == 1e-8
    assert (cfg.optimizer.state_bits == 8) == theirs["optimizer"]["_component_"].endswith("8bit")
    assert cfg.clip_grad_norm == theirs.get("clip_grad_norm")
    assert cfg.epochs == theirs["epochs"] and cfg.max_steps == theirs["max_steps_per_epoch"]
    assert cfg.lr_scheduler.type == ("cosine" if "lr_scheduler" in theirs else "constant")
    assert cfg.lr_scheduler.warmup_steps == theirs.get("lr_scheduler", {}).get(
        "num_warmup_steps", 0
    )
    checkpoints = theirs["enable_activation_checkpointing"] or theirs.get("ac_mode") is not None
    assert (cfg.memory.activation_checkpointing != "none") == checkpoints
    assert cfg.memory.optimizer_in_backward == theirs.get("optimizer_in_bwd", False)
    assert cfg.max_seq_len == (theirs["tokenizer"].get("max_seq_len") or 2048)
    assert cfg.dtype == theirs["dtype"] and cfg.compile == theirs["compile"]
    builder = theirs["model"]["_component_"].rpartition(".")[2]
    adapters = cfg.trained_adapters
    assert (adapters is not None) == (builder.startswith(("lora_", "qlora_")))
    if adapters is not None:
        assert (
            adapters.alpha / adapters.rank
            == theirs["model"]["lora_alpha"] / theirs["model"]["lora_rank"]
        )
        assert adapters.dropout == theirs["model"].get("lora_dropout", 0.0)
        assert (adapters.quantize_base == "nf4") == (
            builder.startswith("qlora_") or "quantize_base" in theirs["model"]
        )
        assert ("head" in adapters.target_modules) == theirs["model"].get(
            "apply_lora_to_output", False
        )
        assert adapters.dora == theirs["model"].get("use_dora", False)
    assert (
        cfg.model.path.partition("/")[2]
        == theirs["checkpointer"]["checkpoint_dir"].strip("/").split("/")[1]
    )


@needs_wheel
@pytest.mark.parametrize(
    "name",
    [
        "llama3_1/8B_lora_single_device",
        "llama3/8B_full_single_device",
        "llama2/7B_lora_dpo",
        "llama2/70B_qlora",
    ],
)
def test_imported_configs_are_valid(name: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Weights that are not here are a note."""
    ours = tmp_path / "ours.yaml"
    assert main(["import", f"{WHEEL}/{name}.yaml", "--out", str(ours)]) == 0
    capsys.readouterr()
    assert main(["validate", str(ours)]) == 0
    said = capsys.readouterr().out
    assert "a valid config of" in said and "fetch it with `tune download" in said


# In the style of the wheel's, on a model of ours that is small enough to be planned at once.
STYLE = (ROOT / "tests" / "config" / "torchtune_lora.yaml").read_text(encoding="utf-8")


def read(text: str, tmp_path: Path, **options: Any) -> ImportedConfig:
    path = tmp_path / "theirs.yaml"
    path.write_text(text, encoding="utf-8")
    return import_file(str(path), **options)


def test_a_config_in_their_style(tmp_path: Path):
    imported = read(STYLE, tmp_path)
    cfg = imported.cfg
    assert imported.recipe == "lora_finetune_distributed"
    assert cfg.model.path == "o/Small-Model"  # as the download line has it; there is no such folder
    assert cfg.data.source == "hub:yahma/alpaca-cleaned" and cfg.data.train_on == "all"
    assert cfg.lora.target_modules == ["q", "v", "o", "gate", "up", "down"] and cfg.lora.alpha == 16
    assert (
        cfg.clip_grad_norm is None
        and cfg.optimizer.weight_decay == 0.01
        and cfg.optimizer.betas == [0.9, 0.999]
    )
    assert cfg.max_steps == 100 and imported.fates["max_steps_per_epoch"].kind == CHANGED
    assert cfg.output_dir == "/tmp/out" and imported.fates["checkpointer.output_dir"].why
    assert set(imported.fates) >= {name for name, _ in leaves(yaml.safe_load(STYLE))}
    header = imported.format_yaml("mine.yaml").splitlines()
    assert "#   tune download o/Small-Model" in header
    assert "#   tune run lora_finetune_distributed --config mine.yaml" in header


def test_what_is_absent_is_torchtunes_default(tmp_path: Path):
    """No schedule, no clipping, no limit of lengths, a new seed each time."""
    text = re.sub(r"lr_scheduler: .*", "seed: null", STYLE).replace(
        "max_seq_len: 64", "max_seq_len: null"
    )
    imported = read(text.replace(".lora_llama3_1_8b", ".qlora_llama3_1_8b"), tmp_path)
    assert (
        imported.cfg.lr_scheduler.type == "constant" and imported.cfg.lr_scheduler.warmup_steps == 0
    )
    assert imported.cfg.lora.quantize_base == "nf4" and imported.cfg.max_seq_len == 2048
    for key in ("seed", "tokenizer.max_seq_len"):
        assert imported.fates[key].kind == CHANGED and "there" in imported.fates[key].why


def test_a_models_own_template_is_that_of_its_tokenizer(tmp_path: Path):
    named = STYLE.replace(
        "max_seq_len: 64", "prompt_template: torchtune.models.mistral.MistralChatTemplate"
    )
    assert (
        "chat template of the tokenizer's files"
        in read(named, tmp_path).fates["tokenizer.prompt_template"].why
    )


def test_a_folder_that_is_here_stays(tmp_path: Path):
    (tmp_path / "Small-Model" / "original").mkdir(parents=True)
    imported = read(STYLE.replace("/tmp/Small", f"{tmp_path}/Small"), tmp_path)
    assert imported.cfg.model.path == f"{tmp_path}/Small-Model"
    other = STYLE.replace("/tmp/Small-Model/,", f"{tmp_path}/Small-Model/original/,")
    assert read(other, tmp_path).cfg.model.path == f"{tmp_path}/Small-Model"
    assert (
        read(STYLE.replace("tune download", "fetch"), tmp_path).cfg.model.path == "/tmp/Small-Model"
    )


def test_rates_are_theirs_but_for_the_warm_up(tmp_path: Path):
    """The lambda of get_cosine_schedule_with_warmup, by hand, and one step ahead in the warm-up."""
    cfg, warm_up, total = read(STYLE, tmp_path).cfg, 10, 100
    for step in range(total):
        at = step + 1 if step < warm_up else step
        done = (at - warm_up) / (total - warm_up)
        theirs = at / warm_up if at < warm_up else 0.5 * (1 + math.cos(math.pi * 0.5 * 2 * done))
        assert compute_learning_rate(
            cfg.lr_scheduler, cfg.optimizer.lr, step, total
        ) == pytest.approx(3e-4 * theirs)


DATASETS = {
    "samsum_dataset}": {"format": "alpaca", "columns": {"instruction": "dialogue", "output": "summary"},
                        "source": "hub:Samsung/samsum", "train_on": "assistant"},
    "alpaca_dataset, train_on_input: False}": {"format": "alpaca", "train_on": "assistant"},
    "instruct_dataset, source: o/d, column_map: {input: question, output: answer}, packed: True}": {
        "format": "alpaca", "columns": {"instruction": "question", "output": "answer"}, "packing": True},
    "chat_dataset, source: json, data_files: a.json, conversation_column: talk, conversation_style: sharegpt}": {
        "format": "sharegpt", "columns": {"conversations": "talk"}, "source": "a.json"},
    "chat_dataset, source: o/d, conversation_column: messages, conversation_style: openai, split: 'train[:5%]'}": {
        "format": "messages", "columns": {}, "source": "hub:o/d", "split": "train[:5%]"},
    "text_completion_dataset, source: o/d, column: body}": {"format": "text", "columns": {"text": "body"}},
    "wikitext_dataset}": {"source": "hub:EleutherAI/wikitext_document_level:wikitext-103-v1",
                          "columns": {"text": "page"}},
    "cnn_dailymail_articles_dataset}": {"source": "hub:ccdv/cnn_dailymail:3.0.0", "columns": {"text": "article"}},
    "grammar_dataset}": {"source": "hub:liweili/c4_200m", "columns": {"instruction": "input"}},
    "text_completion_dataset, source: o/d, add_eos: False}": {"add_eos": False},
    "slimorca_dataset}": {"source": "hub:Open-Orca/SlimOrca-Dedup", "format": "sharegpt"},
}  # fmt: skip


@pytest.mark.parametrize("dataset", DATASETS)
def test_datasets(dataset: str, tmp_path: Path):
    text = STYLE.replace("alpaca_cleaned_dataset}", dataset)
    data = read(text, tmp_path).cfg.data
    for key, value in DATASETS[dataset].items():
        assert getattr(data, key) == value, key


def test_several_datasets_and_one_for_validation(tmp_path: Path):
    several = """[{_component_: torchtune.datasets.samsum_dataset},
                  {_component_: torchtune.datasets.slimorca_dataset, split: "train[:10%]"}]"""
    text = re.sub(r"dataset: .*", f"dataset: {several}", STYLE)
    sources = read(text, tmp_path).cfg.data.sources
    assert [source.source for source in sources] == [
        "hub:Samsung/samsum",
        "hub:Open-Orca/SlimOrca-Dedup",
    ]
    assert sources[1].split == "train[:10%]" and sources[0].columns["output"] == "summary"
    held_out = """dataset_val: {_component_: torchtune.datasets.alpaca_dataset, split: "train[95%:]"}
batch_size_val: 4
run_val_every_n_steps: 25
"""
    cfg = read(STYLE + held_out, tmp_path).cfg
    assert cfg.validation.source == "hub:tatsu-lab/alpaca" and cfg.validation.split == "train[95%:]"
    assert cfg.validation.batch_size == 4 and cfg.validation.every_n_steps == 25
    without = read(STYLE + "batch_size_val: 4\n", tmp_path)
    assert without.fates["batch_size_val"].why.startswith("validation.batch_size has no effect: ")


def with_datasets(train: str, held_out: str = "") -> str:
    """STYLE with other datasets, in brackets of flow style without the functions' module."""
    text = re.sub(r"dataset: .*", f"dataset: {train}", STYLE)
    text += f"dataset_val: {held_out}\n" if held_out else ""
    return re.sub(r"(\w+_dataset)\b", r"_component_: torchtune.datasets.\1", text)


TEXTS = "text_completion_dataset, source: o/d"


@pytest.mark.parametrize(
    ("train", "held_out", "key", "name", "value"),
    [
        ("{samsum_dataset, train_on_input: False}", "{samsum_dataset, train_on_input: True}",
         "train_on_input", "train_on", "assistant"),
        ("{samsum_dataset, train_on_input: True}", "{samsum_dataset, train_on_input: False}",
         "train_on_input", "train_on", "all"),
        ("{samsum_dataset}", "{samsum_dataset, train_on_input: True}", "train_on_input", "train_on", "assistant"),
        ("[{samsum_dataset, train_on_input: True}]", "{samsum_dataset}", "train_on_input", "train_on", "all"),
        ("{alpaca_dataset, train_on_input: False}", "{alpaca_dataset}", "train_on_input", "train_on", "assistant"),
        ("{samsum_dataset, packed: True}", "{samsum_dataset, packed: False}", "packed", "packing", True),
        ("{samsum_dataset}", "{samsum_dataset, packed: True}", "packed", "packing", False),
        (f"{{{TEXTS}}}", f"{{{TEXTS}, add_eos: False}}", "add_eos", "add_eos", True),
        # Of a text every token is a label, so that no training data has the key.
        (f"{{{TEXTS}}}", "{alpaca_dataset}", "train_on_input", "train_on", "assistant"),
    ],
)  # fmt: skip
def test_validation_sets_no_key_of_the_training_data(
    train: str, held_out: str, key: str, name: str, value: Any, tmp_path: Path
):
    """It is read with the same keys, and a line of the table says where its own differ."""
    imported = read(with_datasets(train, held_out), tmp_path)
    assert getattr(imported.cfg.data, name) == value
    is_in_file = f"{key}:" in held_out
    fate = imported.fates[f"dataset_val.{key}"]
    assert fate.kind == (CHANGED if is_in_file else DEFAULT) and not fate.ours
    row = f"dataset_val.{key}  validation has the data.{name} of the training data"
    assert row in re.sub(" {2,}", "  ", imported.format_table())
    # Of one value there is nothing to say.
    same = read(with_datasets(train, train.strip("[]")), tmp_path)
    assert "of the training data" not in same.format_table()


@pytest.mark.parametrize(
    ("train", "key", "name"),
    [
        ("{samsum_dataset, train_on_input: False}, {samsum_dataset, train_on_input: True}",
         "[1].train_on_input: 'True'", "train_on"),
        ("{samsum_dataset, train_on_input: True}, {slimorca_dataset, train_on_input: False}",
         "[1].train_on_input: 'False'", "train_on"),
        # torchtune's defaults, of which that of alpaca_dataset is to train on prompts.
        ("{alpaca_dataset}, {samsum_dataset}", "[1].train_on_input: 'False'", "train_on"),
        ("{samsum_dataset}, {alpaca_dataset}", "[1].train_on_input: 'True'", "train_on"),
        ("{samsum_dataset, packed: True}, {samsum_dataset, packed: False}", "[1].packed: 'False'", "packing"),
        (f"{{{TEXTS}, add_eos: False}}, {{{TEXTS}}}", "[1].add_eos: 'True'", "add_eos"),
    ],
)  # fmt: skip
def test_datasets_of_a_list_differ_in_no_key_that_holds_for_all(
    train: str, key: str, name: str, tmp_path: Path
):
    with pytest.raises(ConfigError) as raised:
        read(with_datasets(f"[{train}]"), tmp_path)
    (fault,) = raised.value.faults
    assert fault.startswith(f"{tmp_path}/theirs.yaml")
    assert f": dataset{key}" in fault
    assert f": data.{name} holds for all datasets; give each the same value" in fault


@pytest.mark.parametrize("override", ["data.packing=true", "data.source=a.jsonl"])
def test_an_override_decides_where_datasets_of_a_list_differ(override: str, tmp_path: Path):
    differing = "[{samsum_dataset, packed: True}, {samsum_dataset, packed: False}]"
    imported = read(with_datasets(differing), tmp_path, overrides=[override, "data.format=alpaca"])
    assert imported.cfg.data.packing
    why = f"{override.partition('=')[0]} is set on the command line"
    assert imported.fates["dataset[1].packed"].why == why


def test_a_default_of_torchtune_is_told_as_one(tmp_path: Path):
    with pytest.raises(ConfigError, match="train_on_input: 'False', torchtune's default: data"):
        read(with_datasets("[{alpaca_dataset}, {samsum_dataset}]"), tmp_path)


def test_keys_of_other_formats_do_not_differ(tmp_path: Path):
    """A text has no train_on_input, and conversations have no add_eos."""
    several = f"[{{{TEXTS}, add_eos: False}}, {{samsum_dataset, train_on_input: True}}]"
    data = read(with_datasets(several), tmp_path).cfg.data
    assert data.train_on == "all" and data.add_eos is False


def test_an_override_is_not_told_as_a_default(tmp_path: Path):
    imported = read(STYLE, tmp_path, overrides=["data.packing=true"])
    assert imported.cfg.data.packing and "dataset.packed" not in imported.format_table()


@pytest.mark.parametrize(
    ("train", "columns"),
    [
        ("{samsum_dataset}, {samsum_dataset, split: validation}", {"instruction": "dialogue", "output": "summary"}),
        ("{slimorca_dataset}, {samsum_dataset}", {"instruction": "dialogue", "output": "summary"}),
        ("{samsum_dataset}, {slimorca_dataset}", {}),
    ],
)  # fmt: skip
def test_validation_has_columns_beside_a_list_of_datasets(
    train: str, columns: dict[str, str], tmp_path: Path
):
    """They are `data.columns`, which no dataset takes over."""
    alone = resolve_sources(read(with_datasets(f"[{train}]"), tmp_path).cfg.data)
    held_out = "{samsum_dataset}" if columns else "{slimorca_dataset}"
    imported = read(with_datasets(f"[{train}]", held_out), tmp_path)
    cfg = imported.cfg
    source = resolve_validation_source(cfg.data, cfg.validation)
    assert source is not None and source.columns == columns
    assert resolve_sources(cfg.data) == alone
    check_whole(tmp_path / "theirs.yaml", imported, tmp_path)


def test_validation_has_the_columns_of_one_dataset(tmp_path: Path):
    assert read(with_datasets("{samsum_dataset}", "{samsum_dataset}"), tmp_path).cfg
    with pytest.raises(ConfigError) as raised:
        read(with_datasets("{samsum_dataset}", "{alpaca_dataset, train_on_input: False}"), tmp_path)
    (fault,) = raised.value.faults
    assert fault.endswith(
        "validation has the columns of the training data; rename those in its file"
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            ("torch.optim.AdamW", "torch.optim.Adafactor"),
            "optimizer._component_: 'torch.optim.Adafactor': no such",
        ),
        (("torch.optim.AdamW", "torch.optim.Adam"), ""),
        (
            ("lora_llama3_1_8b", "lora_llama3_1_reward_8b"),
            "no model with a head for classes or rewards",
        ),
        (
            ("torchtune.models.llama3_1.lora", "mine.models.lora"),
            "expected a builder of one of code_llama2, gemma",
        ),
        (
            ("CEWithChunkedOutputLoss", "ForwardKLLoss"),
            "no such loss; there are cross-entropy and those of dpo.loss",
        ),
        (
            ("torchtune.modules.loss.CEWithChunkedOutputLoss", "torchtune.rlhf.loss.RSOLoss"),
            "no such loss",
        ),
        (
            ("alpaca_cleaned_dataset}", "alpaca_dataset, new_system_prompt: hi}"),
            "no message is put before a sample's",
        ),
        (
            ("alpaca_cleaned_dataset}", "alpaca_dataset, filter_fn: mine.f}"),
            "no config names Python code",
        ),
        (("alpaca_cleaned_dataset}", "mine_dataset}"), "no such dataset; known are alpaca_dataset"),
        (
            ("alpaca_cleaned_dataset}", "multimodal.the_cauldron_dataset}"),
            "there are no images here, only text",
        ),
        (("dtype: bf16", "dtype: fp16"), "dtype: 'fp16': expected bf16 or fp32"),
        (("device: cuda", "device: mps"), "device: 'mps': expected cuda or cpu"),
        (
            ("epochs: 2", "epochs: 2\nresume_from_checkpoint: True"),
            "a state of torchtune's cannot be gone on with",
        ),
        (
            (
                "max_seq_len: 64",
                "max_seq_len: 64, prompt_template: torchtune.data.SummarizeTemplate",
            ),
            "tokenizer.chat_template takes a Jinja file",
        ),
        (
            ("num_warmup_steps: 10", "num_warmup_steps: 10, num_cycles: 2"),
            "the rate falls once, by half a cosine",
        ),
        (("dataset:", "data_set:"), "dataset._component_ is missing"),
        (
            ("batch_size: 2", "batch_siz: 2"),
            "known here; did you mean batch_size? --without batch_siz",
        ),
        (
            ("batch_size: 2", "batch_size: 0"),
            ":11: batch_size: as ours: batch_size=0: found 0, expected an integer",
        ),
        (("epochs: 2", "epochs: 2\nepochs: 3"), "epochs: set twice, first on line 12"),
        (("lora_rank: 8", "lora_rank: [[1]]"), "model.lora_rank: found a list in a list"),
        (
            ("alpaca_cleaned_dataset}", "text_completion_dataset, source: 's3://b/d'}"),
            "storage by URL is not read",
        ),
        (("lr: 3e-4", "lr: &x 3e-4"), "found the anchor &x"),
        (
            ("/tmp/out", "'${nothing.here}'"),
            "output_dir: found '${nothing.here}', expected ${section.key} of this file",
        ),
        (
            ("/tmp/out", "'${oc.env:HOME}'"),
            "environment variables and resolvers are refused, write the value itself",
        ),
        (("/tmp/out", "'${checkpointer.output_dir}'"), "the keys name each other in a circle"),
        (
            ("get_cosine_schedule_with_warmup", "get_rex"),
            "no such schedule; known are get_cosine_schedule_with_warmup",
        ),
    ],
)
def test_what_cannot_be_carried_is_one_line(change: tuple[str, str], line: str, tmp_path: Path):
    if not line:
        assert (
            read(STYLE.replace(*change), tmp_path).cfg.optimizer.weight_decay == 0.0
        )  # torch's default of Adam
        return
    with pytest.raises(ConfigError) as raised:
        read(STYLE.replace(*change), tmp_path)
    assert len(raised.value.faults) == 1 and line in raised.value.faults[0], raised.value.faults
    assert str(tmp_path / "theirs.yaml") in raised.value.faults[0]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("base_model: o/m\nmicro_batch_size: 1\n", "has no key _component_, as torchtune's configs have, which alone "
         "are imported; `tune validate FILE` checks a config of ours, and has our key for each of another tool's"),
        ("recipe: full_finetune_distributed\n", "has no key _component_, as torchtune's configs have"),
        ("- a\n", "expected keys with values"),
    ],
    ids=["axolotl", "ours", "list"],
)  # fmt: skip
def test_a_file_of_another_tool_is_one_line(text: str, line: str, tmp_path: Path):
    with pytest.raises(ConfigError) as raised:
        read(text, tmp_path)
    (fault,) = raised.value.faults
    assert fault.startswith(f"{tmp_path}/theirs.yaml: ")
    assert line in fault.replace(f"{tmp_path}/theirs.yaml`", "FILE`")


def test_all_faults_are_told_at_once(tmp_path: Path):
    with pytest.raises(ConfigError) as raised:
        read(
            STYLE.replace("bf16", "fp16").replace("device: cuda", "device: mps\nlearning_rat: 1"),
            tmp_path,
        )
    assert len(raised.value.faults) == 3


def test_a_key_is_left_out_when_asked(tmp_path: Path):
    text = STYLE + "mine: {a: 1, b: [{c: 2}]}\nother: 1\n"
    imported = read(text, tmp_path, omitted=["mine", "other"])
    assert imported.fates["mine.b[0].c"].why == "left out by --without"
    with pytest.raises(ConfigError, match="--without: .* has no key 'min'"):
        read(text, tmp_path, omitted=["min"])


def test_any_key_can_be_left_out(tmp_path: Path):
    """As if the file did not have it: imported, or refused for what is missing then."""
    draw = random.Random(1)
    for text in PLANNED.values():
        for key, _ in draw.sample(list(leaves(yaml.safe_load(text))), 8):
            try:
                assert read(text, tmp_path, omitted=[key]).fates[key].why == "left out by --without"
            except ConfigError as error:
                assert all("\n" not in fault for fault in error.faults)


PLANNED = {
    "lora": STYLE,
    "qlora": STYLE.replace("lora_llama3_1_8b", "qlora_llama3_1_8b"),
    "dpo": STYLE.replace("torchtune.modules.loss.CEWithChunkedOutputLoss", "torchtune.rlhf.loss.DPOLoss")
                .replace("alpaca_cleaned_dataset", "stack_exchange_paired_dataset"),
    "full": re.sub(r"lora_llama3_1_8b,(.|\n)*?16\}", "llama3_1_8b}", STYLE).replace("torch.optim.AdamW, fused: True",
                   "bitsandbytes.optim.PagedAdamW8bit"),
}  # fmt: skip


def planned(*words: str) -> str:
    """What the verb prints; in a process of its own."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["plan", *words]) == 0
    return printed.getvalue()


@pytest.mark.slow
def test_what_is_imported_can_be_planned(tmp_path: Path):
    ours = tmp_path / "ours.yaml"
    ours.write_text(read(PLANNED["qlora"], tmp_path).format_yaml("ours.yaml"), encoding="utf-8")
    words = [
        "~model.path",
        "model.preset=demo/0.5M",
        "tokenizer.path=examples/demo/tokenizer",
        "--device",
        "24GB",
    ]
    assert "FITS" in call_in_fork(planned, str(ours), *words)


@needs_wheel
@pytest.mark.slow
def test_a_config_of_the_wheel_can_be_planned(tmp_path: Path):
    """With a small model in place of theirs."""
    ours = tmp_path / "ours.yaml"
    assert main(["import", f"{WHEEL}/llama3_1/8B_lora_dpo.yaml", "--out", str(ours)]) == 0
    words = [
        "~model.path",
        "model.preset=demo/0.5M",
        "tokenizer.path=examples/demo/tokenizer",
        "--device",
        "80GB",
    ]
    assert "FITS" in call_in_fork(planned, str(ours), *words)
