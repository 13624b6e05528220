"""The table of file names, against real indexes and against itself."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from recipe_lib.models import build_spec, list_presets, read_config, read_preset_config
from recipe_lib.models.families import get_text_config
from recipe_lib.models.weight_names import (
    WeightEntry,
    build_weight_map,
    compute_parameter_shapes,
    find_tied_copies,
    why_left_out,
)
from tests.models.reference import load_ours

INDEXED = [
    "gemma-2b-it",
    "llama-2-7b-chat",
    "mistral-7b-instruct-v0.3",
    "phi-3-mini-merge",
    "qwen2.5-14b-cogito",
]


@pytest.mark.parametrize("name", INDEXED)
def test_every_name_of_a_real_index_is_known(name: str, realdata: Path) -> None:
    folder = realdata / "hf-layouts" / name
    spec = build_spec(read_config(folder), name)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    entries = build_weight_map(spec, index)
    mapped = {entry.file_name for entry in entries}
    assert mapped <= set(index)
    unused = set(index) - mapped - find_tied_copies(spec, entries, index).keys()
    assert all(why_left_out(spec, other, 1) for other in unused)


@pytest.mark.parametrize(
    "preset", [name for name in list_presets() if name.startswith(("phi", "gemma3", "qwen3/0"))]
)
def test_entries_fill_each_file_tensor_exactly(preset: str) -> None:
    spec = build_spec(read_preset_config(preset), preset)
    shapes, filled = compute_parameter_shapes(spec), {}
    entries = build_weight_map(spec)
    assert [entry.our_name for entry in entries] == list(shapes)
    for entry in entries:
        assert entry.start == filled.get(entry.file_name, 0), "parts follow one another"
        filled[entry.file_name] = entry.start + shapes[entry.our_name][0]
        assert entry.length in (None, shapes[entry.our_name][0])
    assert spec.fused_file == any(entry.length for entry in entries)


def test_fused_tensors_of_phi() -> None:
    spec = build_spec(read_preset_config("phi4/14B"), "phi4")
    table = {entry.our_name: entry for entry in build_weight_map(spec)}
    qkv, gate_up = (
        "model.layers.3.self_attn.qkv_proj.weight",
        "model.layers.3.mlp.gate_up_proj.weight",
    )
    k_proj, up_proj = "model.layers.3.self_attn.k_proj.weight", "model.layers.3.mlp.up_proj.weight"
    assert table[k_proj] == WeightEntry(k_proj, qkv, 5120, 1280)
    assert table[up_proj] == WeightEntry(up_proj, gate_up, 17920, 17920)
    assert compute_parameter_shapes(spec)[k_proj] == (1280, 5120)


def test_names_that_may_be_left_over() -> None:
    tied = build_spec(read_preset_config("llama3_2/1B"), "tied")
    untied = build_spec(read_preset_config("llama3/8B"), "untied")
    names = [entry.file_name for entry in build_weight_map(tied)] + ["lm_head.weight"]
    assert find_tied_copies(tied, build_weight_map(tied, names), names).keys() == {"lm_head.weight"}
    assert not find_tied_copies(untied, build_weight_map(untied, names), names)
    frequencies = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    for name, dims in (
        (frequencies[0], 1),
        (frequencies[1], 1),
        ("h.0.attn.masked_bias", 0),
        ("h.0.attn.bias", 4),
    ):
        assert why_left_out(untied, name, dims)
    assert not why_left_out(untied, "h.0.attn.bias", 1)
    for name in (
        "score.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "vision_tower.x",
        "base_model.lora_A.weight",
    ):
        assert not why_left_out(untied, name, 1)


@pytest.mark.parametrize("newer_layout", [False, True])
@torch.no_grad()
def test_the_text_part_of_a_multimodal_gemma(newer_layout: bool, tmp_path: Path) -> None:
    text = transformers.Gemma3TextConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=5,
    )
    vision = transformers.SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    if newer_layout:  # what some versions of transformers wrote
        _rename(tmp_path / "model.safetensors")
    tokens = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        load_ours(tmp_path)(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5
    )
    exported = get_text_config(read_config(tmp_path))
    assert (
        exported["architectures"] == ["Gemma3ForCausalLM"]
        and exported["model_type"] == "gemma3_text"
    )
    assert build_spec(exported, "out") == build_spec(read_config(tmp_path), "in")


def _rename(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    moved = {}
    for name, tensor in load_file(file).items():
        if name.startswith("language_model.model."):
            moved["model.language_model." + name.removeprefix("language_model.model.")] = tensor
        else:
            moved["model." + name] = tensor
    save_file(moved, file, {"format": "pt"})
