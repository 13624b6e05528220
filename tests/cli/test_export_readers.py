"""What `tune export` says of an export that transformers and PEFT themselves have opened, and where
they have not.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe_lib.checkpoint import adapter_config, open_exports
from recipe_lib.checkpoint.open_exports import (
    compute_prompt_logits,
    load_model,
    load_model_with_adapter,
)
from recipe_lib.cli import main
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.models import read_config, read_trained_spec
from tests.adapters import peft_folders
from tests.adapters.exported_adapters import make_base, write_adapter
from tests.adapters.test_peft_saved import make_case
from tests.selection import mark_slow_except

MIXED = "qwen3_moe, one dense layer"
READ = "read with PEFT "
# Each kind with PEFT's numbers is in tests/adapters/test_peft_saved.py.
SAVED = ["both of more tokens", "rows of new tokens", "adapted with DoRA, more tokens"]
CPU = torch.device("cpu")


def export(capsys: pytest.CaptureFixture, *words: object) -> tuple[int, list[str], str]:
    capsys.readouterr()
    code = main.main(["export", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out.splitlines(), said.err


def make_adapter(folder: Path, base: str = MIXED, **settings: Any) -> tuple[Path, Path]:
    """A base, and an adapter of it."""
    cfg = LoraConfig(**({"rank": 4, "alpha": 8.0} | settings))
    made = make_base(base, folder / "base")
    return made, write_adapter(base, made, cfg, folder) / "adapter"


def change_config(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense layers": (MIXED, {}),
    "experts": (MIXED, {"target_modules": ["q", "experts", "router"]}),
    "a base in 8 bits": ("llama", {"quantize_base": "int8"}),
    "fused matrices": ("phi3", {"dora": True}),
    "of transformers": ("deepseek_v3 of transformers", {}),
}


@pytest.mark.parametrize("kind", mark_slow_except(KINDS, ["dense layers"]))
def test_peft_opens_the_adapter_and_the_line_says_so(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    base, settings = KINDS[kind]
    _, adapter = make_adapter(tmp_path, base, **settings)
    code, lines, err = export(capsys, adapter, "--adapter")
    assert (code, err) == (0, "")
    own, theirs = [line for line in lines if line.startswith("check: logits differ by")]
    assert own.endswith(", read with tune") and READ in theirs and " on transformers " in theirs
    assert not any(line.startswith("note: not opened") for line in lines)


def test_a_merged_model_is_opened_by_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    _, adapter = make_adapter(tmp_path)
    code, lines, err = export(capsys, adapter, "--merge", "--out", tmp_path / "merged")
    assert (code, err) == (0, "")
    assert sum("read with transformers " in line for line in lines) == 1
    spec = read_trained_spec(read_config(tmp_path / "merged"), "merged")
    logits = compute_prompt_logits(load_model(spec, tmp_path / "merged", torch.float32, CPU))
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += 0.1
    save_file(tensors, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match="transformers .* computes another model than was trained"
    ):
        open_exports.check_with_transformers(tmp_path / "merged", spec, torch.float32, CPU, logits)


@pytest.mark.parametrize("kind", mark_slow_except(SAVED, ["both of more tokens"]))
def test_peft_opens_what_brings_weights_of_the_base_along(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    base, adapter, _ = make_case(f"qwen2: {kind}", tmp_path)
    code, lines, err = export(capsys, adapter, "--adapter", "--base", base)
    assert (code, err) == (0, "") and any(READ in line for line in lines), lines


_ALL: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "up_proj"]}
# What PEFT has made -> (family, changes of its base, what PEFT was told)
MADE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "both, DoRA": (
        "qwen2",
        {},
        _ALL | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}, "use_dora": True},
    ),
    "all linears, a dense layer": (
        "qwen3_moe",
        {"mlp_only_layers": [1]},
        {"target_modules": "all-linear"},
    ),
    "dense layers alone": (
        "qwen3_moe",
        {"mlp_only_layers": [1]},
        {
            "target_modules": ["k_proj"],
            "target_parameters": ["up_proj.weight"],
            "alpha_pattern": {"k_proj": 9},
        },
    ),
}


@pytest.mark.parametrize("made", mark_slow_except(MADE, ["dense layers alone"]))
def test_peft_opens_its_own_adapters_as_they_are_written_anew(
    made: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    family, changes, settings = MADE[made]
    base = peft_folders.make_base(tmp_path / "base", family, **changes)
    adapter = peft_folders.train_with_peft(base, tmp_path / "made", **settings)
    for out in (tmp_path / "new", tmp_path / "again"):
        code, lines, err = export(capsys, adapter, "--adapter", "--base", base, "--out", out)
        assert (code, err) == (0, "") and any(READ in line for line in lines), lines
        expected, _ = peft_folders.ask_peft(base, adapter)
        assert (
            peft_folders.compute_relative_difference(peft_folders.ask_peft(base, out)[0], expected)
            < 1e-5
        )
        adapter = out


AS_BEFORE = [
    "down_proj",
    "gate_proj",
    "k_proj",
    "o_proj",
    "q_proj",
    "up_proj",
    "v_proj",
]  # what older releases wrote


@pytest.mark.slow
def test_an_older_adapter_is_named_and_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    _, adapter = make_adapter(tmp_path)
    change_config(adapter, target_modules=AS_BEFORE, target_parameters=None)
    code, lines, err = export(capsys, adapter, "--adapter")
    assert (
        code == 2 and err.count("\n") == 1 and "computes another model than was trained" in err
    ), err
    assert f"(tune export {adapter} --merge)" in err and "--adapter --out" in err
    code, lines, err = export(capsys, adapter, "--adapter", "--out", tmp_path / "new")
    assert (code, err) == (0, "") and any(READ in line for line in lines)
    assert export(capsys, adapter, "--merge", "--out", tmp_path / "merged")[0] == 0


@pytest.mark.slow
def test_what_peft_does_not_open_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _, adapter = make_adapter(tmp_path)
    change_config(adapter, lora_dropout=0.1)  # which PEFT refuses beside target_parameters
    code, _, err = export(capsys, adapter, "--adapter")
    assert (
        code == 2 and err.count("\n") == 1 and " does not open it (" in err and "--merge" in err
    ), err
    assert export(capsys, adapter, "--merge", "--out", tmp_path / "merged")[0] == 0


ABSENT = {
    "peft": "found no package peft; pip install ",
    "transformers": "found no package transformers; pip install ",
}


@pytest.mark.parametrize("package", mark_slow_except(list(ABSENT), ["peft"]))
def test_without_the_package_the_line_says_who_read(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, adapter = make_adapter(tmp_path, "llama")
    monkeypatch.setattr(open_exports, "has_package", lambda name: name != package)
    code, lines, err = export(capsys, adapter, "--adapter")
    assert (code, err) == (0, "")
    (own,) = [line for line in lines if line.startswith("check: logits differ by")]
    assert own.endswith(", read with tune")
    assert any(
        line.startswith(f"note: not opened with PEFT: {ABSENT[package]}") for line in lines
    ), lines


def test_memory_that_is_not_there_is_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, adapter = make_adapter(tmp_path, "llama")
    monkeypatch.setattr(
        open_exports, "find_free_host_memory", lambda: (1000, "free on this machine")
    )
    code, lines, _ = export(capsys, adapter, "--adapter")
    assert code == 0 and any(
        "of host memory, 1000 B free on this machine" in line for line in lines
    ), lines


@pytest.mark.slow
def test_a_pattern_without_end_does_not_reach_peft(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with the names in the file, and not with those of the base's other modules."""
    _, adapter = make_adapter(tmp_path, "llama", target_modules=["q"])
    change_config(
        adapter, target_modules=r"model\.layers\.\d\.self_attn\.q_proj|model\.layers\.0\.([\w.]+)+!"
    )
    monkeypatch.setattr(adapter_config, "PATTERN_SECONDS", 0.5)
    code, _, err = export(capsys, adapter, "--adapter")
    assert code == 2 and "a pattern takes more than" in err and err.count("\n") == 1, err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_adapter_that_is_dropped_is_seen_in_each_type(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    base, adapter = make_adapter(tmp_path)
    spec = read_trained_spec(read_config(base), "base")
    model = load_model_with_adapter(adapter, spec, base, dtype, CPU)[0]
    logits = (compute_prompt_logits(model), compute_prompt_logits(model, with_adapters=False))
    assert READ in open_exports.check_with_peft(adapter, base, spec, dtype, CPU, logits)
    change_config(adapter, target_modules=AS_BEFORE, target_parameters=None)
    with pytest.raises(CheckpointError, match="computes another model"):
        open_exports.check_with_peft(adapter, base, spec, dtype, CPU, logits)
