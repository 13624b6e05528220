"""Every key of PEFT's own config: read as PEFT reads it, known to change nothing, or refused by
name.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig as PeftConfig

from recipe_lib.adapters.peft_names import build_file_modules
from recipe_lib.checkpoint.adapter_config import IRRELEVANT, READ, REFUSED, AdapterConfig
from recipe_lib.checkpoint.adapter_files import find_unselected
from tests.adapters.hugging_face import read_folder_spec
from tests.adapters.peft_folders import (
    ask_peft,
    change_config,
    compute_relative_difference,
    make_base,
    merge,
    read_merged,
    train_with_peft,
)
from tests.selection import mark_slow_except

KEYS = sorted(field.name for field in dataclasses.fields(PeftConfig))
# What a key is set to besides its default, in a file whose tensors stay.
OTHERS: dict[str, list[Any]] = {
    "alora_invocation_tokens": [[3, 4]],
    "alpha_pattern": [{"layers.1.*": 3}, {}],
    "arrow_config": [{"top_k": 2}],
    "auto_mapping": [{"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"}],
    "base_model_name_or_path": [None],
    "bias": ["all", "lora_only"],
    "corda_config": [{"corda_method": "ipm"}],
    "ensure_weight_tying": [True],
    "eva_config": [{"rho": 2.0}],
    "exclude_modules": [["q_proj"], ["layers.0.self_attn.q_proj"], r".*layers\.1\..*", ["k_proj"]],
    "fan_in_fan_out": [True],
    "inference_mode": [False],
    "init_lora_weights": [False, "gaussian", "pissa_niter_4", "olora", "loftq"],
    "kasa_config": [{"beta": 1e-4, "gamma": 1e-3}],
    "layer_replication": [[[0, 2], [1, 2]]],
    "layers_pattern": [["layers"], "h"],
    "layers_to_transform": [[0], 1, [], [0, 1]],
    "loftq_config": [{"loftq_bits": 4}],
    "lora_alpha": [0.5],
    "lora_bias": [True],
    "lora_dropout": [0.5],
    "lora_ga_config": [{"direction": "ArBr"}],
    "megatron_config": [{"hidden_size": 32}],
    "megatron_core": ["megatron.other"],
    "modules_to_save": [["lm_head"], ["self_attn"], ["no_such_module"]],
    "monteclora_config": [{"num_samples": 8}],
    "peft_type": ["LOHA"],
    "peft_version": ["0.1.0"],
    "qalora_group_size": [32],
    "r": [8],
    "rank_pattern": [{r".*layers\.1\..*": 2}, {"q_proj": 4}],
    "revision": ["main"],
    "runtime_config": [{"ephemeral_gpu_offload": True}],
    "target_modules": [["k_proj"], ["layers.1.self_attn.q_proj"], r".*layers\.0\..*", r".*_proj", "all-linear", []],
    "target_parameters": [["mlp.up_proj.weight"], []],
    "task_type": [None],
    "trainable_token_indices": [[3], {"embed_tokens": [3]}],
    "use_bdlora": [{"target_modules_bd_a": ["q_proj"], "nblocks": 2}],
    "use_dora": [True],
    "use_qalora": [True],
    "use_rslora": [True],
    "velora_config": [{"num_groups": 4}],
}  # fmt: skip
CASES = [f"{key}={json.dumps(value)}" for key in KEYS for value in OTHERS[key]]
QUICK = ['exclude_modules=["k_proj"]', "layers_to_transform=[0]", "layers_to_transform=[0, 1]", "use_dora=true",
         'init_lora_weights="olora"', "layer_replication=[[0, 2], [1, 2]]", "fan_in_fan_out=true", "use_rslora=true",
         'target_modules=".*_proj"', "ensure_weight_tying=true", 'modules_to_save=["lm_head"]']  # fmt: skip
WRONG_TYPES: list[Any] = [7.5, "7", [None], {"a": [None]}, True, -1, float("nan")]


def test_every_key_of_the_installed_release_is_placed() -> None:
    """A release with a new field turns this red: say what the key changes."""
    placed = [READ, IRRELEVANT, set(REFUSED)]
    assert set(KEYS) == set().union(*placed)
    assert sum(map(len, placed)) == len(set().union(*placed))
    assert set(OTHERS) == set(KEYS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("keys") / "base", "llama")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """A copy of the one adapter that all cases change."""
    kept = base.with_name("adapter")
    if not kept.exists():
        train_with_peft(base, kept)
    return Path(shutil.copytree(kept, tmp_path / "adapter"))


@pytest.mark.parametrize("case", mark_slow_except(CASES, QUICK))
def test_another_value_is_used_as_peft_uses_it_or_refused_by_name(
    case: str, base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    key, _, value = case.partition("=")
    change_config(adapter, **{key: json.loads(value)})
    code, err = merge(base, adapter, tmp_path / "out", capsys)
    if code == 0:
        logits, tensors = ask_peft(base, adapter)
        own_logits, own_tensors, _ = read_merged(tmp_path / "out")
        assert compute_relative_difference(own_logits, logits) < 1e-5
        for name, tensor in tensors.items():
            assert compute_relative_difference(own_tensors[name], tensor) < 1e-5, name
        assert key not in REFUSED
        return
    names_it = f"{adapter}/adapter_config.json: {key}: " in err
    names_tensor = key in READ and f"{adapter}/adapter_model.safetensors: " in err
    assert code == 2 and (names_it or names_tensor) and err.count("\n") == 1, err
    assert key not in IRRELEVANT and not (tmp_path / "out").exists()


# Each key that is read, and two that are not.
TYPED = [*sorted(READ), "auto_mapping", "arrow_config"]


@pytest.mark.parametrize(
    "key", mark_slow_except(TYPED, ["layers_to_transform", "r", "trainable_token_indices"])
)
def test_a_wrong_type_is_one_line(
    key: str, base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    original = (adapter / "adapter_config.json").read_bytes()
    # What is not read is not looked at, whatever it holds.
    for number, value in enumerate(WRONG_TYPES if key in READ else WRONG_TYPES[:1]):
        (adapter / "adapter_config.json").write_bytes(original)
        change_config(adapter, **{key: value})
        code, err = merge(base, adapter, tmp_path / f"out{number}", capsys)
        assert code in (0, 2) and err.count("\n") == (code != 0), (key, value, err)
        if code == 0 and key in READ:
            logits, _ = ask_peft(base, adapter)
            assert (
                compute_relative_difference(read_merged(tmp_path / f"out{number}")[0], logits)
                < 1e-5
            ), (key, value)


@pytest.mark.slow
def test_a_missing_key_has_peft_s_default_or_is_one_line(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    fields = json.loads((adapter / "adapter_config.json").read_text())
    needed = ("peft_type", "r", "lora_alpha")
    for missing in needed:
        left = {name: value for name, value in fields.items() if name != missing}
        (adapter / "adapter_config.json").write_text(json.dumps(left))
        code, err = merge(base, adapter, tmp_path / "out", capsys)
        assert (code, err.count("\n")) == (2, 1), (missing, err)
    left = {name: fields[name] for name in (*needed, "target_modules")}
    (adapter / "adapter_config.json").write_text(json.dumps(left))
    assert merge(base, adapter, tmp_path / "out", capsys) == (0, "")
    logits, _ = ask_peft(base, adapter)
    assert compute_relative_difference(read_merged(tmp_path / "out")[0], logits) < 1e-5


def test_a_key_that_nobody_knows(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    change_config(adapter, use_new_feature={"a": 1})
    code, err = merge(base, adapter, tmp_path / "out", capsys)
    assert (
        code == 2 and "use_new_feature" in err and "remove the key" in err and err.count("\n") == 1
    )
    change_config(adapter, use_new_feature=None)
    assert merge(base, adapter, tmp_path / "out", capsys) == (0, "")


SELECTIONS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": ["layers.1.self_attn.q_proj", "proj", "mlp"]},
    {"target_modules": r".*\.(1)\.(self_attn|mlp)\.(q|up)_proj|lm_head"},
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["layers.0.mlp.up_proj", "proj"]},
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.0\..*"},
    {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    {
        "target_modules": ["q_proj"],
        "layers_to_transform": [0],
        "layers_pattern": ["h", "model.layers"],
    },
    {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "h"},
    {"target_modules": ["q_proj", "up_proj", "lm_head"], "modules_to_save": ["mlp", "lm_head"]},
    {"target_modules": ["embed_tokens", "lm_head", "o_proj"], "modules_to_save": ["tokens"]},
]


@pytest.mark.parametrize("fields", SELECTIONS, ids=str)
def test_the_modules_that_peft_selects(fields: dict[str, Any], base: Path) -> None:
    from peft.tuners.tuners_utils import check_target_module_exists

    selection = {key: value for key, value in fields.items() if key != "modules_to_save"}
    config = AdapterConfig(
        4,
        8,
        False,
        False,
        modules_to_save=tuple(fields.get("modules_to_save", ())),
        selection=selection,
    )
    theirs = PeftConfig(**fields)
    for name in build_file_modules(read_folder_spec(base)):
        assert (find_unselected(config, [name]) is None) == bool(
            check_target_module_exists(theirs, name)
        ), name


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": []},
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj"], "exclude_modules": ["v_proj"]},
    ],
    ids=str,
)
def test_parameters_of_linears_are_selected_by_their_own_key(
    fields: dict[str, Any], base: Path
) -> None:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    ends = ["v_proj.weight"]
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), PeftConfig(**fields, target_parameters=ends)
    )
    adapted = {name.partition(".lora_A")[0] for name in model.state_dict() if ".lora_A" in name}
    names = [name.removeprefix("base_model.model.") for name in adapted]
    assert any(name.endswith("layers.0.self_attn.v_proj") for name in names)
    config = AdapterConfig(4, 8, False, False, parameters=tuple(ends), selection=fields)
    assert find_unselected(config, names) is None
