"""Regular expressions of adapter_config.json: matched as PEFT matches them, and never without
end.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.checkpoint import adapter_config
from recipe_lib.checkpoint.adapter_config import MAX_PATTERN_CHARACTERS, find_first_matches
from recipe_lib.checkpoint.adapter_files import check_adapter
from recipe_lib.checkpoint.peft_folders import load_adapter
from recipe_lib.errors import CheckpointError
from tests.adapters.hugging_face import build_config, load_ours, save_with_peft
from tests.adapters.peft_folders import (
    ask_peft,
    change_config,
    compute_relative_difference,
    make_base,
    make_tokens,
    merge,
    read_merged,
    train_with_peft,
)
from tests.selection import mark_slow_except

MODULES = [
    f"model.layers.{layer}.{leaf}"
    for layer in (0, 1, 11)
    for leaf in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj")
] + ["model.embed_tokens", "lm_head", "model.language_model.layers.1.self_attn.q_proj"]
PATTERNS = [
    "q_proj", "self_attn.q_proj", "layers.1.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "_proj", "proj",
    "^q_proj", "^model.layers.0.mlp.gate_proj", "^layers.0.mlp.gate_proj", r".*layers\.1\..*q_proj", r".*q_proj",
    r"layers\.(0|11)\.mlp\.(gate|up)_proj", r"layers\.\d+\.mlp\..*", r"layers\.\d\..*", "q_proj|k_proj", ".*", "",
    "model.layers.1", "layers.1.*", r"(?:q|k)_proj", r"(?i:Q_PROJ)", r"(?<!self_attn\.)\w+_proj", r"q_proj$", "lm_head",
    r"a)|(lm_head", r"(?P<x>q)_proj", r"[^k]_proj", r".*?\.1\..*?", "embed.tokens", r"\bq_proj\b", "Q_proj", "q_proj ",
]  # fmt: skip
ENDLESS = ["(.+.*)+!", "q" * (MAX_PATTERN_CHARACTERS + 1)]


def test_each_pattern_matches_what_peft_matches() -> None:
    from peft.utils.other import get_pattern_key

    for pattern in PATTERNS:
        expected = [get_pattern_key([pattern], name) == pattern for name in MODULES]
        assert [
            match == 0 for match in find_first_matches((pattern,), tuple(MODULES), "")
        ] == expected, pattern


def test_the_first_pattern_that_matches_counts() -> None:
    from peft.utils.other import get_pattern_key

    for order in (PATTERNS, PATTERNS[::-1], sorted(PATTERNS, key=len)):
        used = [pattern for pattern in order if pattern not in ("", ".*")]
        found = [
            None if match is None else used[match]
            for match in find_first_matches(tuple(used), tuple(MODULES), "")
        ]
        keys = [get_pattern_key(used, name) for name in MODULES]
        assert found == [key if key in used and key != name or key == "lm_head" else None
                         for key, name in zip(keys, MODULES, strict=True)]  # fmt: skip


@pytest.mark.parametrize("pattern", mark_slow_except(["(q_proj", "(?i)q_proj"], ["(q_proj"]))
@pytest.mark.parametrize(
    "key", ["rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"]
)
def test_what_is_no_regular_expression(key: str, pattern: str, tmp_path: Path, capsys: Any) -> None:
    base = make_base(tmp_path / "base", "llama")
    adapter = train_with_peft(base, tmp_path / "adapter")
    change_config(adapter, **{key: {pattern: 4} if key.endswith("pattern") else pattern})
    if not key.endswith("pattern") and pattern == "(?i)q_proj":  # which is one by itself
        return
    with pytest.raises(re.error):
        ask_peft(base, adapter)
    code, err = merge(base, adapter, tmp_path / "out", capsys)
    assert code == 2 and f"{adapter}/adapter_config.json: {key}: " in err and err.count("\n") == 1


@pytest.mark.parametrize("pattern", mark_slow_except(ENDLESS, ["(.+.*)+!"]))
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern", "target_modules"])
def test_a_pattern_without_end_is_refused_by_name(
    key: str, pattern: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_config, "PATTERN_SECONDS", 0.2)
    base = make_base(tmp_path / "base", "llama")
    adapter = train_with_peft(base, tmp_path / "adapter")
    change_config(adapter, **{key: {pattern: 4} if key.endswith("pattern") else pattern})
    code, err = merge(base, adapter, tmp_path / "out", capsys)
    assert code == 2 and f"{adapter}/adapter_config.json: {key}: " in err and err.count("\n") == 1


SETTINGS: dict[str, dict[str, Any]] = {
    "rank": {"rank_pattern": {r".*layers\.1\..*q_proj": 2}},
    "alpha": {"alpha_pattern": {r".*v_proj": 64}},
    "order": {
        "rank_pattern": {r"layers\.0\..*": 2, "q_proj": 6},
        "alpha_pattern": {"q_proj": 3, r".*\.1\..*": 9},
    },
    "anchored": {"rank_pattern": {r"^model\.layers\.[01]\.self_attn\.q_proj": 2, "^q_proj": 7}},
    "alternatives, rslora": {
        "alpha_pattern": {r"layers\.\d+\.self_attn\.(q|v)_proj": 12},
        "use_rslora": True,
    },
    "dora": {"rank_pattern": {r".*(q|k)_proj": 2}, "use_dora": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_merged_generated_with_and_trained_on_as_peft_does(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    base = make_base(tmp_path / "base", "llama")
    adapter, settings = tmp_path / "adapter", {"r": 4, "lora_alpha": 8} | SETTINGS[name]
    model = save_with_peft(base, adapter, target_modules=["q_proj", "v_proj"], **settings)
    logits, tensors = ask_peft(base, adapter)
    assert merge(base, adapter, tmp_path / "out", capsys) == (0, "")
    own_logits, own_tensors, _ = read_merged(tmp_path / "out")
    assert compute_relative_difference(own_logits, logits) < 1e-5
    for key, tensor in tensors.items():
        assert compute_relative_difference(own_tensors[key], tensor) < 1e-5, key
    fields = json.loads((adapter / "adapter_config.json").read_text())
    ranks = [parameter.shape[0] for key, parameter in model.named_parameters() if "lora_A" in key]
    kind = {"dora": fields["use_dora"], "rslora": fields["use_rslora"]}
    cfg = build_config(target_modules=["q", "v"], rank=max(ranks), **kind)
    try:
        check_adapter(adapter, load_ours(base, cfg, moved=0).spec, cfg, base)
    except CheckpointError as error:  # its remedy is followed
        alpha = re.search(r"lora\.alpha=([\d.]+)$", str(error))
        assert alpha, error
        cfg = build_config(
            target_modules=["q", "v"], rank=max(ranks), alpha=float(alpha[1]), **kind
        )
        check_adapter(adapter, load_ours(base, cfg, moved=0).spec, cfg, base)
    own = load_ours(base, cfg, moved=0)
    load_adapter(own, own.spec, adapter)
    with torch.no_grad():
        assert compute_relative_difference(own(make_tokens()), logits) < 1e-5


PARAMETERS: dict[str, tuple[str, dict[str, Any]]] = {
    "of the parameter": (
        "llama",
        {
            "target_parameters": ["q_proj.weight"],
            "rank_pattern": {"q_proj.weight": 2},
            "alpha_pattern": {"q_proj": 3},
        },
    ),
    "beside modules": (
        "qwen2",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["v_proj.weight"],
            "alpha_pattern": {"v_proj": 2, "v_proj.weight": 17},
        },
    ),
    "of dense layers among experts": (
        "qwen3_moe",
        {
            "target_parameters": ["mlp.gate_proj.weight"],
            "rank_pattern": {"gate_proj": 2, "gate_proj.weight": 3},
        },
    ),
}


@pytest.mark.parametrize("name", mark_slow_except(PARAMETERS, ["of the parameter"]))
def test_patterns_of_parameters_are_compared_with_their_whole_names(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    """PEFT compares the name of what has the adapter, `....q_proj.weight`, where that is named by a
    parameter.
    """
    family, settings = PARAMETERS[name]
    base = make_base(
        tmp_path / "base", family, **({"mlp_only_layers": [1]} if family == "qwen3_moe" else {})
    )
    adapter = train_with_peft(base, tmp_path / "adapter", **({"target_modules": []} | settings))
    assert merge(base, adapter, tmp_path / "out", capsys) == (0, "")
    assert (
        compute_relative_difference(read_merged(tmp_path / "out")[0], ask_peft(base, adapter)[0])
        < 1e-5
    )


def test_an_embedding_that_is_a_parameter_is_refused_by_name(tmp_path: Path, capsys: Any) -> None:
    base = make_base(tmp_path / "base", "llama")
    settings = {"target_modules": [], "target_parameters": ["embed_tokens.weight"]}
    code, err = merge(
        base, train_with_peft(base, tmp_path / "adapter", **settings), tmp_path / "out", capsys
    )
    assert (
        code == 2
        and "target_parameters: found the embedding's weight" in err
        and err.count("\n") == 1
    )
