"""What is exported says all that transformers 5 has renamed under both names, and means the same by
either.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from recipe_lib.checkpoint.model_export import export_config
from recipe_lib.cli import main
from recipe_lib.external.inspection import spell_config
from recipe_lib.models import build_spec
from tests.checkpoint.spellings import NEWER, OLDER, build_older_config, remove_keys
from tests.models.reference import CASES, SMALL
from tests.recipes import labeled_runs
from tests.recipes.labeled_runs import write_margins
from tests.recipes.runs import (
    FULL,
    LORA,
    REWARD,
    ROOT,
    build_arguments,
    keep_latest,
    make_probe_tokens,
    run_here,
)
from tests.selection import mark_slow_except


def newer_config(case: str, folder: Path) -> dict[str, Any]:
    """A case's config.json as transformers 5 writes it."""
    class_name, options = CASES[case]
    made = getattr(transformers, class_name)(**SMALL | options)
    made.architectures = [
        class_name.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    ]
    made.dtype = "float32"
    made.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def read_by_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers 5 makes of a config.json, but for older names that it keeps as they are."""
    made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    found = {key: value for key, value in made.to_dict().items() if key not in OLDER}
    if "rope_scaling" in config:
        found["rope_parameters"].pop("type", None)  # which transformers keeps beside rope_type
    return found


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What transformers logs, which it keeps from the root logger."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("case", CASES)
def test_either_name_means_what_was_trained(
    case: str, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    newer = newer_config(case, tmp_path)
    older = build_older_config(case, newer)
    expected = read_by_transformers(newer | {"dtype": "bfloat16"})
    said.clear()  # what transformers says of the numbers themselves, once in a process
    for source in (newer, older, newer | older):
        spec = build_spec(source, case)
        exported = export_config(source, spec, torch.bfloat16)
        assert exported["dtype"] == exported["torch_dtype"] == "bfloat16"
        assert {"rope_parameters", "rope_theta", "rope_scaling"} <= exported.keys()
        for left_out in (set(), OLDER, NEWER):
            config = remove_keys(exported, left_out)
            assert build_spec(config, case) == spec
            read = read_by_transformers(config)
            differing = {
                key: (value, read.get(key))
                for key, value in expected.items()
                if read.get(key) != value
            }
            assert not differing
    assert [
        record.getMessage() for record in said.records if record.name.startswith("transformers")
    ] == []


def write_base(folder: Path) -> Path:
    """A Llama whose rotary embedding is scaled, as transformers 5 writes it, with the demo's
    tokenizer.
    """
    torch.manual_seed(0)
    scaling = CASES["llama3.1"][1]["rope_scaling"] | {"rope_theta": 500000.0}
    config = transformers.LlamaConfig(
        **SMALL
        | {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 64,
            "rope_parameters": scaling,
        },
        initializer_range=0.3,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for file in (ROOT / "examples" / "demo" / "tokenizer").iterdir():
        shutil.copy(file, folder)
    return folder


WHOLE = ("reward.trainable=all", "checkpoint.save_model=true")  # of a reward model


def train(base: Path, output: Path, recipe: str, *more: str) -> Path:
    """One step of a recipe on the base; returns the folder of the model that it leaves."""
    given = [
        f"model.path={base}",
        f"tokenizer.path={base}",
        "dtype=fp32",
        "device=cpu",
        "max_steps=1",
    ]
    if recipe == REWARD:
        words = labeled_runs.build_arguments(write_margins(base.parent), output, recipe, *WHOLE)
        words = [word for word in words if not word.startswith("model.preset")]
    else:
        words = [
            *build_arguments(output, "demo/lora" if recipe == LORA else "demo/full"),
            "~model.preset",
        ]
    run = run_here(keep_latest(*words, *given, *more), recipe=recipe)
    assert run.code == 0, run.said
    return output / "model"


def export(*words: Any) -> None:
    assert main.main(["export", *map(str, words)]) == 0


def write_kind(kind: str, base: Path, folder: Path) -> Path:
    """What this kind of export leaves of the base."""
    external = (
        ["model.implementation=transformers", "data.packing=false"]
        if "transformers" in kind
        else []
    )
    if kind.startswith("full"):
        return train(base, folder / "run", FULL, *external)
    if kind == "reward":
        return train(base, folder / "run", REWARD)
    if kind.startswith("merged"):
        train(base, folder / "run", LORA, "lora.merge_on_save=true", *external)
        if "later" not in kind:
            return folder / "run" / "model"
        export(folder / "run" / "adapter", "--merge", "--base", base, "--out", folder / "merged")
        return folder / "merged"
    export(base, "--quantize", kind, "--out", folder / "quantized")
    return folder / "quantized"


KINDS = ["full", "reward", "merged", "merged transformers later", "int4", "int8"]


@torch.no_grad()
@pytest.mark.parametrize(
    "kind", mark_slow_except(KINDS, ["full", "merged transformers later", "int8"])
)
def test_every_kind_of_export_computes_the_same_by_either_name(kind: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    with torch.enable_grad():
        folder = write_kind(kind, base, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500000.0
    assert (
        config["rope_scaling"].items() <= config["rope_parameters"].items()
        and config["rope_scaling"]["factor"] == 8
    )
    assert config["dtype"] == config["torch_dtype"] == "float32"
    opener = (
        transformers.AutoModelForSequenceClassification
        if kind == "reward"
        else transformers.AutoModelForCausalLM
    )
    expected = opener.from_pretrained(folder).eval()(make_probe_tokens()).logits
    for left_out in (NEWER, OLDER):
        (folder / "config.json").write_text(json.dumps(remove_keys(config, left_out)))
        found = opener.from_pretrained(folder).eval()(make_probe_tokens()).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def has_key(config: dict[str, Any], key: str) -> bool:
    """Whether a config.json or a part of it has a key."""
    parts = [
        value
        for name, value in config.items()
        if name.endswith("_config") and isinstance(value, dict)
    ]
    return bool(config.get(key)) or any(has_key(part, key) for part in parts)


# Families with names of their own for the rotary embedding, or with parts. A scaling of the first
# one is said too.
EXTERNAL = [
    "gemma3",
    "gpt_neox",
    "llama4_text",
    "modernbert-decoder",
    "olmo2",
    "phi",
    "phi3",
    "qwen3_moe",
    "stablelm",
]


@pytest.mark.parametrize("family", EXTERNAL)
def test_what_a_class_of_transformers_reads_stays_the_same(family: str) -> None:
    config = json.loads(transformers.AutoConfig.for_model(family).to_json_string())
    spelled = spell_config(config, family)
    assert has_key(spelled, "rope_parameters")
    theta = {"gpt_neox": "rotary_emb_base", "modernbert-decoder": "local_rope_theta"}.get(
        family, "rope_theta"
    )
    assert has_key(spelled, theta)
    expected = transformers.AutoConfig.for_model(**json.loads(json.dumps(config))).to_dict()
    for left_out in (set(), OLDER, NEWER):
        read = transformers.AutoConfig.for_model(**remove_keys(spelled, left_out)).to_dict()
        assert not {
            key for key, value in expected.items() if read.get(key) != value and key not in OLDER
        }


_LONG = {
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 24,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 0.7},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": _LONG,
}
# Families that take a longrope alone -> what it has besides.
OF_PHI: dict[str, dict[str, Any]] = {
    "phi3": {},
    "phimoe": {"short_mscale": 1.1, "long_mscale": 1.2},
}
SCALED = [(family, kind) for family in ("llama", "qwen3_moe", "glm", "olmo2") for kind in SCALINGS]
SCALED += [(family, "longrope") for family in OF_PHI]


@pytest.mark.parametrize(("family", "kind"), SCALED)
def test_every_scaling_is_said_in_older_names_too(family: str, kind: str) -> None:
    rope: dict[str, Any] = (
        {"rope_type": kind, "rope_theta": 777.0} | SCALINGS[kind] | OF_PHI.get(family, {})
    )
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    beside = {"original_max_position_embeddings": 24} if family in OF_PHI else {}
    made = transformers.AutoConfig.for_model(family, **sizes, **beside, rope_parameters=rope)
    config = json.loads(made.to_json_string())
    spelled = spell_config(config, family)
    said = dict(spelled["rope_scaling"])
    assert said.pop("rope_type", kind) == said.pop("type", kind) == kind
    assert spelled["rope_theta"] == 777.0
    said |= {key: spelled[key] for key in ("original_max_position_embeddings",) if key in spelled}
    assert {key: said.get(key) for key in SCALINGS[kind]} == SCALINGS[kind]
    for left_out in (OLDER, NEWER):
        read = read_by_transformers(remove_keys(spelled, left_out))
        assert read["rope_parameters"] == config["rope_parameters"]


@pytest.mark.slow
def test_no_family_of_transformers_fails() -> None:
    """Also those that came with transformers 5, whose classes may not take an older name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    differing = []
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = json.loads(transformers.AutoConfig.for_model(family).to_json_string())
            expected = transformers.AutoConfig.for_model(**json.loads(json.dumps(config))).to_dict()
        except (ValueError, TypeError, StrictDataclassError):  # no config without arguments
            continue
        read = transformers.AutoConfig.for_model(
            **json.loads(json.dumps(spell_config(config, family)))
        ).to_dict()
        if any(read.get(key) != value for key, value in expected.items()):
            differing.append(family)
    assert not differing
