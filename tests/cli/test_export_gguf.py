"""`tune export --gguf`: of a model folder, of runs, of an adapter by itself, and what is
refused.
"""

import builtins
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from tests.checkpoint.gguf.made_models import SMALL, save_model
from tests.cli.adapter_runs import write_adapter_run
from tests.cli.export_calls import call_export, expect_refusal


def tensors(file: Path) -> dict[str, Any]:
    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}


def contents(file: Path, key: str) -> Any:
    return gguf.GGUFReader(file).get_field(key).contents()


@pytest.fixture(scope="module")
def adapted(realdata: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """output_dir of a run of adapters."""
    folder = tmp_path_factory.mktemp("adapted") / "mine"
    write_adapter_run(realdata, folder, "lora.target_modules=[q,v,down]")
    return folder


def test_a_model_folder(realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    shutil.copytree(realdata / "stories260K-hf", tmp_path / "stories")
    code, out, err = call_export(capsys, tmp_path / "stories", "--gguf", "f16")
    assert (code, err) == (0, "")
    file = tmp_path / "stories-f16.gguf"
    lines = out.splitlines()
    assert lines[0] == f"model: {file} (f16, 523.34 KiB)"
    assert lines[-2].startswith("check: 47 tensors read back, 36 in f16, 11 in f32; ")
    assert lines[-1] == f"next: llama-cli -m {file}"
    assert contents(file, "general.name") == "stories"
    again = expect_refusal(capsys, tmp_path / "stories", "--gguf", "f16")
    assert again == f"{file}: exists; choose another name with --out, or remove it"
    assert (
        call_export(capsys, tmp_path / "stories", "--gguf", "q4_k_m", "--out", tmp_path / "x.gguf")[
            0
        ]
        == 0
    )


@pytest.mark.slow
def test_a_run_of_adapters_is_merged_on_the_way(adapted: Path, capsys: pytest.CaptureFixture):
    code, out, err = call_export(capsys, adapted, "--gguf", "f32")
    assert (code, err) == (0, "")
    assert (
        out.splitlines()[0] == f"merged: {adapted / 'adapter'} into its base, for this export alone"
    )
    assert sorted(path.name for path in adapted.iterdir() if "model" in path.name) == [
        "model-f32.gguf"
    ]
    assert contents(adapted / "model-f32.gguf", "general.name") == "mine"
    assert call_export(capsys, adapted, "--merge", "--out", adapted.parent / "merged")[0] == 0
    merged = load_file(adapted.parent / "merged" / "model.safetensors")
    found = tensors(adapted / "model-f32.gguf")["blk.2.ffn_down.weight"]
    assert np.array_equal(found, merged["model.layers.2.mlp.down_proj.weight"].float().numpy())


def test_an_adapter_by_itself(adapted: Path, capsys: pytest.CaptureFixture):
    code, out, err = call_export(capsys, adapted / "adapter", "--gguf", "f32")
    assert (code, err) == (0, "")
    file = adapted / "adapter-f32.gguf"
    lines = out.splitlines()
    assert (
        lines[0].startswith(f"adapter: {file} (f32, ")
        and lines[-1] == f"next: llama-cli -m BASE.gguf --lora {file}"
    )
    found, source = tensors(file), load_file(adapted / "adapter" / "adapter_model.safetensors")
    assert len(found) == 2 * 3 * 5
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
    assert np.array_equal(
        found["blk.1.attn_q.weight.lora_a"], source[name.format("A")].float().numpy()
    )
    second, heads, width = source[name.format("B")].float().numpy(), 8, 8
    order = [
        head * width + half * width // 2 + pair
        for head in range(heads)
        for pair in range(4)
        for half in (0, 1)
    ]
    assert np.array_equal(found["blk.1.attn_q.weight.lora_b"], second[order])
    config = json.loads((adapted / "adapter" / "adapter_config.json").read_text())
    kinds = ("general.type", "adapter.type", "general.architecture")
    assert [contents(file, key) for key in kinds] == ["adapter", "lora", "llama"]
    assert contents(file, "adapter.lora.alpha") == config["lora_alpha"]


@pytest.mark.slow
def test_what_an_adapters_file_cannot_be(
    adapted: Path, realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    adapter = adapted / "adapter"
    assert (
        expect_refusal(capsys, adapter, "--gguf", "q4_k_m")
        == "--gguf: found q4_k_m, expected one of f16, bf16, f32 for an adapter by itself; merge"
        f" it first (tune export {adapter} --merge), and export the merged model"
    )
    assert expect_refusal(capsys, adapter, "--gguf", "f16", "--pre", "qwen2").startswith(
        "--pre: the file of an adapter has no"
    )
    dora = tmp_path / "dora"
    write_adapter_run(realdata, dora, "lora.dora=true")
    assert (
        expect_refusal(capsys, dora / "adapter", "--gguf", "f16")
        == f"{dora / 'adapter'}: is a DoRA adapter, which llama.cpp does not load; merge it (tune"
        f" export {dora / 'adapter'} --merge)"
    )
    assert call_export(capsys, dora, "--gguf", "f16")[0] == 0  # merged on the way


def test_options_that_do_not_go_together(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    model = realdata / "stories260K-hf"
    one = (
        "tune export: expected one of --merge, --adapter, --hf, --gguf and --quantize; see `tune"
        " export --help`"
    )
    assert (
        expect_refusal(capsys, model)
        == expect_refusal(capsys, model, "--gguf", "f16", "--hf")
        == one
    )
    assert "argument --gguf: invalid choice: 'q4'" in expect_refusal(capsys, model, "--gguf", "q4")
    assert expect_refusal(capsys, model, "--hf", "--pre", "qwen2").startswith(
        "--pre: only a GGUF file names a pre-tokenizer"
    )
    assert expect_refusal(capsys, model, "--gguf", "f16", "--device", "cuda").startswith(
        "--device: found cuda, but this export"
    )
    assert expect_refusal(capsys, model, "--gguf", "f16", "--dtype", "bf16").startswith(
        "--dtype: only a merged model may have"
    )
    assert (
        expect_refusal(capsys, model, "--gguf", "f16", "--out", tmp_path / "no" / "x.gguf")
        == f"--out: {tmp_path / 'no'}: no such folder; make it, or choose another name"
    )
    assert expect_refusal(capsys, model, "--gguf", "f16", "--base", model).startswith("--base: ")


def test_families_that_are_not_written(tmp_path: Path, capsys: pytest.CaptureFixture):
    import transformers

    small = SMALL | {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**small))
    model.save_pretrained(tmp_path / "mixtral")
    found = expect_refusal(capsys, tmp_path / "mixtral", "--gguf", "f16")
    assert found.startswith(
        f"{tmp_path / 'mixtral'}: model_type 'mixtral' is not written as GGUF; expected one of"
        " llama,"
    )


def test_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    save_model("llama2", tmp_path / "model", num_hidden_layers=1)
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "__import__", without)
        found = expect_refusal(capsys, tmp_path / "model", "--gguf", "f16")
    assert found.startswith("--gguf: found no package gguf; pip install ")


# In the embedding's first block: a weight; the upper byte of the scale, which q6_K has at its end.
PLACES = {"f32": 3, "q8_0": 1, "q4_k_m": 209}


@pytest.mark.parametrize("kind", PLACES)
def test_a_file_that_was_changed_is_noticed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The check at the end, with one bit of a tensor turned over after it was written."""
    from recipe_lib.checkpoint.gguf import gguf_adapter
    from recipe_lib.errors import CheckpointError

    save_model("qwen2", tmp_path / "model", num_hidden_layers=1)
    write = gguf_adapter.write_gguf

    def damaged(out: Path, **rest: Any) -> None:
        write(out, **rest)
        first = next(
            tensor for tensor in gguf.GGUFReader(out).tensors if tensor.name == "token_embd.weight"
        )
        content = bytearray(out.read_bytes())
        content[int(first.data_offset) + PLACES[kind]] ^= 0x10
        out.write_bytes(content)

    monkeypatch.setattr(gguf_adapter, "write_gguf", damaged)
    with pytest.raises(
        CheckpointError,
        match=r"token_embd.weight .* from what was written; do not use it, and report",
    ):
        gguf_adapter.write_gguf_model(tmp_path / "model", tmp_path / "x.gguf", kind, name="x")
