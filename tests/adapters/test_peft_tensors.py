"""Every tensor of an adapter's file: renamed, added, left out or broken in turn; never left aside
in silence.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from recipe_lib.checkpoint.adapter_files import check_adapter
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.generation.source import find_source
from tests.adapters.hugging_face import read_folder_spec
from tests.adapters.peft_folders import (
    TENSORS,
    ask_peft,
    change_config,
    change_tensors,
    compute_relative_difference,
    make_base,
    merge,
    read_merged,
    train_with_peft,
)
from tests.selection import mark_slow_but, mark_slow_except

# kind -> family, resized vocabulary, what PEFT is told
ADAPTERS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "dora": ("llama", None, {"use_dora": True}),
    "saved": ("qwen2", None, {"modules_to_save": ["embed_tokens", "lm_head", "norm"]}),
    "resized, tied": ("qwen2", 100, {}),
    "rows": ("llama", None, {"trainable_token_indices": [3, 7]}),
    "biases": ("qwen2", None, {"bias": "all", "lora_bias": True}),
    "fused": ("phi3", None, {"target_modules": ["qkv_proj"], "modules_to_save": ["down_proj"]}),
}


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, int | None]:
    family, vocabulary, settings = ADAPTERS[request.param]
    base = make_base(tmp_path / "base", family)
    return base, train_with_peft(base, tmp_path / "adapter", vocabulary, **settings), vocabulary


def try_change(
    case: tuple[Path, Path, int | None],
    change: Callable[[dict[str, Tensor]], Any],
    capsys: Any,
    config: Any = None,
) -> int:
    """Merges a changed copy: it is what PEFT makes of it, or one line names one of its tensors or
    keys.
    """
    base, adapter, vocabulary = case
    copy, out = adapter.with_name("changed"), adapter.with_name("out")
    for folder in (copy, out):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(adapter, copy)
    change_tensors(copy, change)
    change_config(copy, **(config or {}))
    code, err = merge(base, copy, out, capsys)
    if code:
        assert code == 2 and all(str(copy) in line for line in err.splitlines()), err
        assert not out.exists()
        return code
    logits, tensors = ask_peft(base, copy, vocabulary)
    own_logits, own_tensors, _ = read_merged(out)
    assert compute_relative_difference(own_logits, logits) < 1e-5
    for name, tensor in tensors.items():
        if name not in ("model.embed_tokens.weight", "lm_head.weight"):
            assert compute_relative_difference(own_tensors[name], tensor) < 1e-5, name
    return 0


@pytest.mark.parametrize(
    "case", mark_slow_except(["saved", "dora", "resized, tied", "rows"], ["saved"]), indirect=True
)
def test_each_tensor_left_out(
    case: tuple[Path, Path, int | None], capsys: pytest.CaptureFixture
) -> None:
    for name in load_file(case[1] / TENSORS):
        try_change(case, lambda tensors, name=name: tensors.pop(name), capsys)


@pytest.mark.parametrize(
    "case", mark_slow_except(["saved", "biases", "fused"], ["saved"]), indirect=True
)
def test_each_tensor_renamed(
    case: tuple[Path, Path, int | None], capsys: pytest.CaptureFixture
) -> None:
    def rename(tensors: dict[str, Tensor], old: str, new: str) -> None:
        tensors[new] = tensors.pop(old)

    for name in load_file(case[1] / TENSORS):
        for new in (
            name.replace("base_model.model.", "", 1),
            f"{name}_x",
            name.replace("model.model.", "model.mode."),
        ):
            if new != name:
                assert (
                    try_change(
                        case, lambda tensors, old=name, new=new: rename(tensors, old, new), capsys
                    )
                    == 2
                ), new


ADDED = [
    "base_model.model.model.layers.0.self_attn.q_proj.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.bias",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_diag",
    "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias",
    "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight",
    "base_model.model.model.layers.7.mlp.down_proj.weight",
    "base_model.model.model.layers.0.input_layernorm.weight",
    "base_model.model.model.norm.weight",
    "base_model.model.model.norm.bias",
    "base_model.model.lm_head.modules_to_save.weight",
    "base_model.model.lm_head.original_module.weight",
    "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
    "base_model.model.model.rotary_emb.inv_freq",
    "base_model.model.prompt_embeddings",
    "lm_head.weight",
]


@pytest.mark.slow
def test_each_kind_of_tensor_added(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base = make_base(tmp_path / "base", "llama")
    case = base, train_with_peft(base, tmp_path / "adapter"), None
    for name in ADDED:
        shape = (32,) if "norm" in name else (32, 32)
        try_change(
            case,
            lambda tensors, name=name, shape=shape: tensors.update({name: torch.ones(shape)}),
            capsys,
        )


@pytest.mark.parametrize(
    ("number", "case"),
    mark_slow_but([(float("nan"), "saved"), (float("inf"), "dora")], 1),
    indirect=["case"],
)
def test_numbers_that_are_none(
    number: float, case: tuple[Path, Path, int | None], capsys: pytest.CaptureFixture
) -> None:
    base, adapter, _ = case
    original = (adapter / TENSORS).read_bytes()
    for name in load_file(adapter / TENSORS):
        change_tensors(
            adapter, lambda tensors, name=name: tensors[name].view(-1)[-1:].fill_(number)
        )
        code, err = merge(base, adapter, adapter.with_name("out"), capsys)
        assert code == 2 and f"{adapter}/{TENSORS}: {name} holds NaN or infinite numbers" in err, (
            err
        )
        with pytest.raises(CheckpointError, match="NaN or infinite"):
            find_source(str(adapter), str(base))
        (adapter / TENSORS).write_bytes(original)


def test_training_says_so_too(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    adapter = train_with_peft(base, tmp_path / "adapter")
    change_tensors(adapter, lambda tensors: next(iter(tensors.values())).fill_(float("nan")))
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        check_adapter(
            adapter,
            read_folder_spec(base),
            LoraConfig(rank=4, alpha=6.0, target_modules=["q"]),
            base,
        )


@pytest.mark.slow
def test_what_peft_s_file_has_is_all_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The cases above would pass with a file that is refused as it is."""
    for kind in ADAPTERS:
        family, vocabulary, settings = ADAPTERS[kind]
        base = make_base(tmp_path / kind / "base", family)
        adapter = train_with_peft(base, tmp_path / kind / "adapter", vocabulary, **settings)
        lora_bias = json.loads((adapter / "adapter_config.json").read_text())["lora_bias"]
        code = try_change((base, adapter, vocabulary), lambda tensors: None, capsys)
        assert code == 0 or lora_bias, kind
