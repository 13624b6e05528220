"""`tune export`: adapters and models out of runs, states and adapter folders, and the check that
comes with them.
"""

import json
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe_lib.checkpoint import open_exports
from recipe_lib.checkpoint.open_exports import compare_logits
from recipe_lib.checkpoint.peft_folders import export_adapter
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.checkpoint.resumable_state import save_state
from recipe_lib.cli import export_source, export_trained, main
from recipe_lib.config.describe import format_config
from recipe_lib.config.schema import (
    DataConfig,
    FullFinetuneConfig,
    LoraConfig,
    LoraFinetuneConfig,
    ModelConfig,
)
from tests.adapters.hugging_face import (
    compute_difference,
    load_ours,
    load_plain,
    load_theirs,
    load_with_peft,
    save_with_peft,
)

LORA = LoraConfig(rank=4, alpha=8.0, target_modules=["q", "v", "embedding"])


def call(capsys: pytest.CaptureFixture, *words: object) -> tuple[int, str, str]:
    capsys.readouterr()  # what other libraries have said
    code = main.main(["export", *map(str, words)])
    written = capsys.readouterr()
    return code, written.out, written.err


@pytest.fixture
def base(realdata: Path) -> Path:
    return realdata / "stories260K-hf"


def make_run(
    folder: Path, base: Path, lora: LoraConfig = LORA, finished: bool = False, **more: Any
) -> Any:
    """An output_dir as the recipe leaves it: config, a state of step 3, and if finished the
    adapter.
    """
    folder.mkdir()
    data = DataConfig(source="rows.jsonl")
    cfg = LoraFinetuneConfig(
        model=ModelConfig(path=str(base)),
        data=data,
        lora=lora,
        dtype="fp32",
        output_dir=str(folder),
        **more,
    )
    (folder / "config.yaml").write_text(format_config(cfg))
    model = load_ours(base, lora)
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1
    )
    save_state(folder / "state", 3, model, optimizer, {"step": 3}, SingleRank(), keep=1)
    if finished:
        export_adapter(
            model, model.spec, lora, folder / "adapter", base=str(base), world=SingleRank()
        )
    return model


@pytest.mark.slow
def test_the_adapter_of_a_state(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = make_run(tmp_path / "run", base)
    code, out, err = call(capsys, tmp_path / "run" / "state/step_3", "--adapter")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "check: 11 modules have their adapter, none of 11 in the file is left over"
    assert lines[1] == f"adapter: {tmp_path / 'run' / 'adapter_step_3'}"
    assert lines[2].startswith("check: logits differ by 0 at most (the largest is 16")
    assert (
        compute_difference(model, load_with_peft(base, tmp_path / "run" / "adapter_step_3")) < 1e-5
    )
    assert (tmp_path / "run" / "adapter_step_3" / "tokenizer.model").is_file()


@pytest.mark.parametrize("part", ["adapter", "state/step_3"])
def test_a_folder_named_by_a_dot_knows_its_run(
    part: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    make_run(run, base, finished=True)
    monkeypatch.chdir(run / part)
    arguments = Namespace(checkpoint=".", recipe=None, hf=False)
    source = export_source.find_export_source(arguments)
    assert (source.run, source.records) == (run, run)
    assert source.cfg.output_dir == str(run)


@pytest.mark.slow
def test_the_merged_model_of_a_run(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    lora = LoraConfig(rank=4, alpha=8.0, target_modules=["q", "v"], quantize_base="nf4")
    model = make_run(tmp_path / "run", base, lora, finished=True)
    code, out, err = call(capsys, tmp_path / "run", "--merge")
    assert (code, err) == (0, "")
    assert (
        out.splitlines()[0]
        == "check: 10 adapted modules are merged, every tensor of the model is there"
    )
    assert compute_difference(model, load_theirs(tmp_path / "run" / "model")) < 1e-5
    code, out, err = call(capsys, tmp_path / "run", "--merge")
    assert code == 2
    assert (
        err == f"error: {tmp_path / 'run' / 'model'}: exists; choose another folder with --out, or"
        " remove it\n"
    )


@pytest.mark.slow
def test_an_adapter_that_peft_made(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = save_with_peft(
        base, tmp_path / "a", r=4, target_modules=["k_proj", "lm_head"], use_dora=True
    )
    code, out, err = call(capsys, tmp_path / "a", "--adapter")
    assert (code, err) == (0, "")
    assert "note: vLLM does not load DoRA adapters" in out
    code, out, err = call(capsys, tmp_path / "a", "--merge", "--dtype", "fp32")
    assert (code, err) == (0, "")
    assert compute_difference(load_plain(tmp_path / "a-model"), model) < 1e-5


@pytest.mark.slow
def test_an_adapter_of_some_layers_is_checked_and_merged(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    peft = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    model = save_with_peft(base, tmp_path / "a", layers_to_transform=[1, 3], **peft)
    code, out, err = call(capsys, tmp_path / "a", "--adapter", "--base", base)
    assert (code, err) == (0, "")
    assert out.startswith(
        "check: 4 modules have their adapter, none of 4 in the file is left over\n"
    )
    code, out, err = call(capsys, tmp_path / "a", "--merge", "--base", base)
    assert (code, err) == (0, "")
    assert compute_difference(load_plain(tmp_path / "a-model"), model) < 1e-5


@pytest.mark.slow
def test_a_state_newer_than_the_adapter_is_named(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "run"
    make_run(run, base, finished=True)
    assert "note:" not in call(capsys, run, "--adapter")[1]
    written = (run / "adapter" / "adapter_config.json").stat().st_mtime
    os.utime(run / "state" / "step_3" / "manifest.json", (written + 60, written + 60))
    code, out, err = call(capsys, run, "--adapter")
    assert (code, err) == (0, "")
    note = (
        f"note: {run}/state/step_3 is newer than {run}/adapter, which is taken; name the state to"
        " export it"
    )
    assert out.splitlines()[0] == note


def test_a_base_that_has_moved(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    base = tmp_path / "base"
    shutil.copytree(realdata / "stories260K-hf", base)
    make_run(tmp_path / "run", base, finished=True)
    base.rename(tmp_path / "moved")
    for which in ("run", "run/adapter"):
        code, out, err = call(capsys, tmp_path / which, "--adapter")
        assert code == 2
        assert err.startswith(
            f"error: {tmp_path / which}: its base is {base}: no such folder"
        ) and err.endswith(", or say where it is with --base\n")
        assert err.count("\n") == 1
    assert call(capsys, tmp_path / "run", "--adapter", "--base", tmp_path / "moved")[0] == 0


def test_the_model_of_a_full_run(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    cfg = FullFinetuneConfig(
        model=ModelConfig(path=str(base)), data=DataConfig(source="rows.jsonl"), dtype="fp32"
    )
    (folder / "config.yaml").write_text(format_config(cfg))
    model = load_plain(base)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_state(folder / "state", 7, model, optimizer, {"step": 7}, SingleRank(), keep=1)
    code, out, err = call(capsys, folder, "--hf")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"model: {folder / 'model_step_7'}"
    assert compute_difference(model, load_theirs(folder / "model_step_7")) < 1e-5
    code, out, err = call(capsys, folder, "--merge")
    assert (code, err) == (
        2,
        f"error: {folder / 'state/step_7'}: is of a run that trained all weights; use --hf\n",
    )


def test_an_export_that_differs_is_an_error(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is changed between writing and loading it again: the check has to see one number."""
    make_run(tmp_path / "run", base)
    real = open_exports.load_model_with_adapter

    def changed(folder: Path, **arguments: Any) -> Any:
        tensors = load_file(folder / "adapter_model.safetensors")
        tensors["base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"][3, 1] += 1.0
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        return real(folder, **arguments)

    monkeypatch.setattr(export_trained, "load_model_with_adapter", changed)
    code, out, err = call(capsys, tmp_path / "run", "--adapter")
    assert code == 2
    assert err.startswith(
        f"error: {tmp_path / 'run/adapter_step_3'}: does not compute what was trained: logits"
        " differ by"
    )


def test_nan_never_agrees() -> None:
    logits = torch.ones(1, 2, 3)
    assert compare_logits(logits, logits).is_within_rounding(torch.float32)
    assert not compare_logits(logits, logits * float("nan")).is_within_rounding(torch.bfloat16)
    assert not compare_logits(logits, logits + 1e-3).is_within_rounding(torch.float32)


def test_the_folder_names_its_base(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    make_run(tmp_path / "run", base, finished=True)
    (tmp_path / "run" / "adapter").rename(tmp_path / "alone")
    config = tmp_path / "alone" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": ""}))
    code, out, err = call(capsys, tmp_path / "alone", "--merge")
    assert (code, err) == (
        2,
        f"error: {tmp_path / 'alone'}: adapter_config.json names no base; give it with --base\n",
    )
    code, out, err = call(capsys, tmp_path / "alone", "--merge", "--base", base)
    assert (code, err) == (0, "")
    assert (tmp_path / "alone-model" / "model.safetensors").is_file()
