"""Exported files in llama.cpp itself: logits are transformers'. Skipped without it."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from recipe_lib.checkpoint.gguf.gguf_adapter import write_gguf_adapter, write_gguf_model
from tests.checkpoint.gguf.made_models import (
    CASES,
    compute_llama_logits,
    import_llama_cpp,
    make_tokens,
    save_model,
)
from tests.selection import mark_slow_except

# Largest difference as a share of the largest logit. GELU is a table in fp16 there.
MOST = {"f32": 1e-5, "f16": 5e-3, "q8_0": 0.1}


@pytest.mark.parametrize(
    "case", mark_slow_except(CASES, ["llama3.1", "qwen3", "gemma2", "phi3.5-long"])
)
@torch.no_grad()
def test_logits_are_those_of_transformers(case: str, tmp_path: Path):
    import_llama_cpp()
    model, ids = save_model(case, tmp_path / "model"), make_tokens()
    if case == "phi3.5-long":  # llama.cpp goes by its context of 256
        ids = make_tokens(100)
    expected = model(torch.tensor([ids])).logits[0].numpy()
    for kind, most in MOST.items():
        write_gguf_model(tmp_path / "model", tmp_path / f"{kind}.gguf", kind, name="x")
        found = compute_llama_logits(tmp_path / f"{kind}.gguf", ids)
        allowed = max(most, 1e-3) if "gemma" in case else most
        assert np.abs(found - expected).max() <= allowed * np.abs(expected).max(), kind


@torch.no_grad()
def test_four_bits_keep_a_real_models_loss(realdata: Path, tmp_path: Path):
    """Of a model that was trained: its rows are short, so that most of its matrices are in q5_0."""
    import_llama_cpp()
    from recipe_lib.tokenizers import load_tokenizer

    folder = realdata / "stories260K-hf"
    text = (realdata / "datasets/tinystories/tinystories_v2_sample.txt").read_text()[:600]
    ids = load_tokenizer(folder).encode(text, add_bos=True)[:200]
    losses = {}
    for kind in ("f32", "q4_k_m"):
        write_gguf_model(folder, tmp_path / f"{kind}.gguf", kind, name="x")
        logits = torch.from_numpy(compute_llama_logits(tmp_path / f"{kind}.gguf", ids))
        losses[kind] = float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])))
    assert losses["f32"] < 1.6
    assert abs(losses["q4_k_m"] - losses["f32"]) < 0.03


@pytest.mark.parametrize("case", ["llama2", "phi3"])
@torch.no_grad()
def test_an_adapter_does_what_it_does_in_peft(case: str, tmp_path: Path):
    import_llama_cpp()
    import peft

    model, ids = save_model(case, tmp_path / "model"), make_tokens()
    names = {
        "llama2": ["q_proj", "k_proj", "v_proj", "down_proj", "lm_head"],
        "phi3": ["qkv_proj", "gate_up_proj"],
    }
    ranks = {"llama2": {"down_proj": 8}, "phi3": {"gate_up_proj": 8}}
    config = peft.LoraConfig(
        r=4, lora_alpha=10, target_modules=names[case], rank_pattern=ranks[case]
    )
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = adapted(torch.tensor([ids])).logits[0].numpy()
    write_gguf_model(tmp_path / "model", tmp_path / "model.gguf", "f32", name="x")
    write_gguf_adapter(
        tmp_path / "adapter", tmp_path / "model", tmp_path / "adapter.gguf", "f32", name="x"
    )
    found = compute_llama_logits(tmp_path / "model.gguf", ids, tmp_path / "adapter.gguf")
    without = compute_llama_logits(tmp_path / "model.gguf", ids)
    largest = np.abs(expected).max()
    assert np.abs(without - expected).max() > 0.1 * largest
    assert np.abs(found - expected).max() <= 1e-5 * largest


LAYERS = {"num_hidden_layers": 9}
QUANTIZED = {
    "llama3.1": LAYERS,
    "phi3": LAYERS,
    "gemma2": LAYERS,
    "qwen3": {"hidden_size": 128, "intermediate_size": 80, "num_hidden_layers": 5},
    "llama2": {"hidden_size": 96, "intermediate_size": 352, "num_hidden_layers": 4},
}


@pytest.mark.parametrize("case", mark_slow_except(QUANTIZED, ["llama3.1", "qwen3"]))
def test_types_are_those_that_llama_cpp_chooses(case: str, tmp_path: Path):
    """Of its own quantization of our fp32 file; and our blocks are as near to the weights as its
    own.
    """
    library = import_llama_cpp()
    save_model(case, tmp_path / "model", **QUANTIZED[case])
    for kind, number in (("q4_k_m", 15), ("q8_0", 7)):
        for own in ("f32", kind):
            (tmp_path / f"{own}.gguf").unlink(missing_ok=True)
            write_gguf_model(tmp_path / "model", tmp_path / f"{own}.gguf", own, name="x")
        options = library.llama_model_quantize_default_params()
        options.ftype, options.nthread = number, 1
        theirs = tmp_path / "theirs.gguf"
        assert (
            library.llama_model_quantize(
                str(tmp_path / "f32.gguf").encode(), str(theirs).encode(), options
            )
            == 0
        )
        source, found, expected = (
            {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
            for file in (tmp_path / "f32.gguf", tmp_path / f"{kind}.gguf", theirs)
        )
        kinds = {name: tensor.tensor_type.name for name, tensor in found.items()}
        assert kinds == {name: tensor.tensor_type.name for name, tensor in expected.items()}
        for name, tensor in source.items():
            weights = tensor.data.astype(np.float64)
            ours, reached = (
                np.sqrt(
                    ((gguf.quants.dequantize(held.data, held.tensor_type) - weights) ** 2).sum()
                )
                for held in (found[name], expected[name])
            )
            assert ours <= reached * 1.005 + 1e-9, name
