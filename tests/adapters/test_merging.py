"""Merged models: what base and adapter compute together, as one model of transformers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipe_lib import files
from recipe_lib.checkpoint import adapter_merging as merged
from recipe_lib.checkpoint.adapter_merging import Update, merge_adapter, merge_rows
from recipe_lib.checkpoint.peft_folders import export_adapter
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig
from recipe_lib.errors import CheckpointError, StorageError
from recipe_lib.parallel import start_world
from tests.adapters.hugging_face import (
    VARIANTS,
    build_config,
    compute_difference,
    load_ours,
    load_plain,
    load_theirs,
    save_with_peft,
    write_tiny_folder,
)
from tests.distributed.ranks import run_ranks


def trained(folder: Path, cfg: LoraConfig, out: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model with adapters, which are also written to `out`."""
    model = load_ours(folder, cfg, dtype)
    export_adapter(
        model, model.spec, cfg, out, base=str(folder), base_folder=folder, world=SingleRank()
    )
    return model


def merge(
    folder: Path, adapter: Path, out: Path, dtype: torch.dtype = torch.float32, **more: Any
) -> Path:
    merge_adapter(
        folder, adapter, out, **({"quantize": "none", "ranks": SingleRank()} | more), dtype=dtype
    )
    return out


@pytest.mark.parametrize("variant", ["lora", "everywhere"])
def test_merged_models_load_in_transformers(variant: str, realdata: Path, tmp_path: Path) -> None:
    folder, cfg = realdata / "stories260K-hf", build_config(**VARIANTS[variant])
    model = trained(folder, cfg, tmp_path / "adapter")
    out = merge(folder, tmp_path / "adapter", tmp_path / "model")
    assert compute_difference(model, load_theirs(out)) < 1e-5
    assert compute_difference(model, load_theirs(folder)) > 1e-3
    untied = variant == "everywhere"  # the base is tied
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is not untied
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) is untied
    assert {path.name for path in folder.iterdir()} <= {path.name for path in out.iterdir()}


@pytest.mark.parametrize("variant", ["rslora", "dora", "embedding", "head"])
def test_merging_is_exact_in_fp64(variant: str, realdata: Path, tmp_path: Path) -> None:
    folder, cfg = realdata / "stories260K-hf", build_config(**VARIANTS[variant])
    model = trained(folder, cfg, tmp_path / "adapter", torch.float64)
    out = merge(folder, tmp_path / "adapter", tmp_path / "model", torch.float64)
    assert compute_difference(model, load_plain(out, torch.float64)) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_quantized_base_is_merged_as_it_was_trained(
    kind: str, family: str, tmp_path: Path
) -> None:
    folder = write_tiny_folder(tmp_path / "base", family)
    cfg = build_config(quantize_base=kind, target_modules=["q", "v", "down"])
    model = trained(folder, cfg, tmp_path / "adapter")
    out = merge(folder, tmp_path / "adapter", tmp_path / "model", quantize=kind)
    assert compute_difference(model, load_theirs(out)) < 1e-5
    other = merge(folder, tmp_path / "adapter", tmp_path / "other")
    assert compute_difference(model, load_theirs(other)) > 1e-3


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_fused_adapters_merge_as_peft_merges_them(kind: dict, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "base", "phi3")
    model = save_with_peft(
        folder,
        tmp_path / "adapter",
        r=3,
        lora_alpha=5,
        target_modules="all-linear",
        rank_pattern={"o_proj": 2},
        **kind,
    )
    out = merge(folder, tmp_path / "adapter", tmp_path / "model")
    expected = model.merge_and_unload().state_dict()
    for name, tensor in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def test_bf16_is_rounded_once(tmp_path: Path) -> None:
    """The sum is made in fp32; the trained model's own base is bf16."""
    folder = write_tiny_folder(tmp_path / "base", "llama")
    trained(folder, build_config(target_modules=["q"]), tmp_path / "adapter")
    wide = load_file(
        merge(
            folder, tmp_path / "adapter", tmp_path / "wide", torch.bfloat16, out_dtype=torch.float32
        )
        / "model.safetensors"
    )
    narrow = load_file(
        merge(folder, tmp_path / "adapter", tmp_path / "narrow", torch.bfloat16)
        / "model.safetensors"
    )
    for name, tensor in narrow.items():
        assert tensor.dtype == torch.bfloat16 and wide[name].dtype == torch.float32
        assert torch.equal(wide[name].bfloat16(), tensor)
    name = "model.layers.0.self_attn.q_proj.weight"
    base, adapter = (
        load_file(folder / "model.safetensors")[name].bfloat16().double(),
        load_ours(folder, build_config(target_modules=["q"])),
    )
    module = adapter.model.layers[0].self_attn.q_proj
    exact = base + 2.0 * module.lora_B.weight.double() @ module.lora_A.weight.double()
    torch.testing.assert_close(wide[name].double(), exact, rtol=0, atol=1e-6)


def test_ranks_share_the_files(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "base", "llama")
    trained(folder, build_config(), tmp_path / "adapter")
    one = merge(folder, tmp_path / "adapter", tmp_path / "one", max_shard_bytes=20_000)

    def work() -> None:
        with start_world(FullFinetuneConfig(device="cpu")) as world:
            merge(
                folder, tmp_path / "adapter", tmp_path / "two", ranks=world, max_shard_bytes=20_000
            )

    run_ranks(work, 2)
    assert len(list(one.glob("*.safetensors"))) > 3
    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()
    }


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_folder(tmp_path / "base", "llama")
    trained(folder, build_config(), tmp_path / "adapter")

    def full(operation: str, path: Path) -> None:
        if operation == "write" and path.name.startswith("model-00003"):
            raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(files, "before_operation", full)
    with pytest.raises(StorageError, match="No space left on device"):
        merge(folder, tmp_path / "adapter", tmp_path / "model", max_shard_bytes=20_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_another_base_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "base", "llama")
    trained(folder, build_config(), tmp_path / "adapter")
    other = write_tiny_folder(tmp_path / "other", "llama", rms_norm_eps=1e-6)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += 0.1
    from safetensors.torch import save_file

    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        merge(other, tmp_path / "adapter", tmp_path / "model")
    assert (
        str(error.value)
        == f"{tmp_path / 'adapter'}: was trained on other weights than those of {other}; use its"
        f" own base model, {folder}"
    )
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_pieces_of_rows_are_the_formula(
    by_column: bool, dora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged, "_PIECE_ELEMENTS", 20)
    torch.manual_seed(0)
    weight = torch.randn(7, 5).double()
    lora_a = torch.randn(2, 5).double()
    lora_b = torch.randn(7, 2).double()
    magnitudes = torch.rand(5 if by_column else 7).double() if dora else None
    pieces = list(
        merge_rows(
            lambda a, b: weight[a:b], 7, Update(lora_a, lora_b, math.pi, magnitudes, by_column)
        )
    )
    expected = weight + math.pi * lora_b @ lora_a
    if magnitudes is not None:
        norms = expected.norm(dim=0 if by_column else 1)
        expected = expected * (magnitudes / norms if by_column else (magnitudes / norms)[:, None])
    assert [len(piece) for piece in pieces] == [4, 3]
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-13, atol=1e-13)
