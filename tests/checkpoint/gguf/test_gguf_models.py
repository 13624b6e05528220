"""GGUF files, read by the package gguf: every tensor is the source's, every number
config.json's.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recipe_lib.checkpoint.gguf.gguf_adapter import write_gguf_model
from recipe_lib.checkpoint.gguf.gguf_file import choose_types
from recipe_lib.errors import CheckpointError
from tests.checkpoint.gguf.made_models import CASES, save_model
from tests.selection import mark_slow_except

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
HALVES = {"f16": np.float16, "f32": np.float32}


def name_of(name: str, gemma: bool) -> str:
    """The file's name of a tensor, written down here by hand."""
    module, _, leaf = name.rpartition(".")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{leaf}"
    _, _, layer, part = module.split(".", 3)
    own = NAMES | {"post_attention_layernorm": "post_attention_norm" if gemma else "ffn_norm"}
    return f"blk.{layer}.{own[part]}.{leaf}"


def unpermuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order of Hugging Face's files: first the channels that are first of their pair,
    then the second.
    """
    found, width = np.empty_like(values), len(values) // heads
    for head in range(heads):
        for pair in range(width // 2):
            for second in (0, 1):
                found[head * width + second * (width // 2) + pair] = values[
                    head * width + 2 * pair + second
                ]
    return found


def expected_values(folder: Path) -> dict[str, np.ndarray]:
    """The source's tensors by their names in the file, with Gemma's norms counted from 1."""
    config = json.loads((folder / "config.json").read_text())
    gemma = "gemma" in config["model_type"]
    source = {
        name: tensor.float().numpy()
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    if config.get("tie_word_embeddings"):
        source.pop("lm_head.weight", None)
    return {
        name_of(name, gemma and config["model_type"] != "gemma"): (
            values + 1 if gemma and "norm" in name else values
        )
        for name, values in source.items()
    }


def read_values(file: Path, folder: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Type and values of each tensor, in the order of Hugging Face's files."""
    config = json.loads((folder / "config.json").read_text())
    found = {}
    for tensor in gguf.GGUFReader(file).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if config["model_type"] in ("llama", "mistral") and ".attn_q." in tensor.name:
            values = unpermuted(values, config["num_attention_heads"])
        if config["model_type"] in ("llama", "mistral") and ".attn_k." in tensor.name:
            values = unpermuted(values, config["num_key_value_heads"])
        found[tensor.name] = (tensor.tensor_type.name, values)
    return found


def fields_of(file: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(file)
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"root": tmp_path_factory.mktemp("models")}


def saved(case: str, folders: dict[str, Path]) -> Path:
    if case not in folders:
        save_model(case, folders["root"] / case)
        folders[case] = folders["root"] / case
    return folders[case]


FAST = ["llama3.1", "llama-biases", "qwen3", "gemma2", "gemma3", "phi3.5-long"]


@pytest.mark.parametrize("case", mark_slow_except(CASES, FAST))
def test_every_tensor_and_number_is_the_sources(
    case: str, folders: dict[str, Path], tmp_path: Path
):
    folder = saved(case, folders)
    file = tmp_path / "model.gguf"
    write_gguf_model(folder, file, "f32", name="a model")
    found, expected = read_values(file, folder), expected_values(folder)
    tables = {name for name in found if name.startswith("rope_")}
    assert set(found) - tables == set(expected)
    for name, values in expected.items():
        assert found[name][0] == "F32" and np.array_equal(found[name][1], values), name
    check_numbers(case, json.loads((folder / "config.json").read_text()), fields_of(file))
    check_tables(case, found)


def check_numbers(case: str, config: dict[str, Any], fields: dict[str, Any]) -> None:
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(
        config["model_type"], config["model_type"]
    )
    assert fields["general.architecture"] == arch
    assert (fields["general.type"], fields["general.name"], fields["general.file_type"]) == (
        "model",
        "a model",
        0,
    )
    assert fields["general.quantization_version"] == 2
    heads, width = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim") or width // heads
    expected = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": width,
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head,
        "attention.value_length": head,
        "vocab_size": config["vocab_size"],
    }
    rope = config["rope_parameters"]
    main = rope.get("full_attention", rope)
    expected["rope.dimension_count"] = int(head * main.get("partial_rotary_factor", 1.0))
    assert fields.items() >= {f"{arch}.{key}": value for key, value in expected.items()}.items()
    numbers = {
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": main["rope_theta"],
    }
    if case == "gemma2":
        numbers |= {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attention.sliding_window": 6,
        }
    if case == "gemma3":
        numbers |= {
            "rope.freq_base_swa": 5000.0,
            "rope.scaling.factor": 8.0,
            "attention.sliding_window": 6,
        }
    if case == "llama-yarn":
        usual = 0.1 * np.log(4.0) + 1
        numbers |= {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
        numbers["rope.scaling.attn_factor"] = 0.7 / usual
    if case == "llama-linear":
        numbers["rope.scaling.factor"] = 2.5
    if case == "phi3.5-long":
        numbers["rope.scaling.attn_factor"] = np.sqrt(1 + np.log(512 / 64) / np.log(64))
        numbers["rope.scaling.original_context_length"] = 64
    for key, value in numbers.items():
        assert fields[f"{arch}.{key}"] == pytest.approx(value, rel=1e-6), key
    kinds = {
        "gemma3": "linear",
        "llama-linear": "linear",
        "llama-yarn": "yarn",
        "phi3.5-long": "longrope",
    }
    if case in kinds:
        assert fields[f"{arch}.rope.scaling.type"] == kinds[case]


def check_tables(case: str, found: dict[str, tuple[str, np.ndarray]]) -> None:
    """Factors of the rotary embedding: those of config.json, or what transformers divides its
    frequencies by.
    """
    if case == "phi3.5-long":
        assert np.allclose(
            found["rope_factors_short.weight"][1], [1 + 0.1 * pair for pair in range(32)]
        )
        assert np.allclose(
            found["rope_factors_long.weight"][1], [2 + 0.5 * pair for pair in range(32)]
        )
    if case == "llama3.1":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        from tests.checkpoint.gguf.made_models import make_model

        scaled = ROPE_INIT_FUNCTIONS["llama3"](make_model(case).config, device="cpu")[0]
        plain = 500000.0 ** (-torch.arange(0, 64, 2) / 64)
        assert np.allclose(found["rope_freqs.weight"][1], (plain / scaled).numpy(), rtol=1e-5)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves_are_the_sources_bits(kind: str, tmp_path: Path):
    """A source of the same type comes through unchanged, vectors in fp32."""
    save_model("qwen2", tmp_path / "model", {"f16": torch.float16, "bf16": torch.bfloat16}[kind])
    report = write_gguf_model(tmp_path / "model", tmp_path / "model.gguf", kind, name="a model")
    found = read_values(tmp_path / "model.gguf", tmp_path / "model")
    for name, values in expected_values(tmp_path / "model").items():
        assert found[name][0] == (kind.upper() if values.ndim == 2 else "F32")
        assert np.array_equal(found[name][1], values), name
    assert report.check == f"38 tensors read back, 22 in {kind}, 16 in f32; 26 fields are equal"


# What a mixture has, by llama.cpp's rule for 8 layers: 0, 7 and every third between them have more
# bits.
MORE_BITS = (0, 3, 6, 7)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama3.1", "phi3"])
def test_the_mixture_of_types(case: str, tmp_path: Path):
    save_model(case, tmp_path / "model", num_hidden_layers=8)
    write_gguf_model(tmp_path / "model", tmp_path / "model.gguf", "q4_k_m", name="a model")
    found, expected = (
        read_values(tmp_path / "model.gguf", tmp_path / "model"),
        expected_values(tmp_path / "model"),
    )
    top = "token_embd" if case == "llama3.1" else "output"
    for name, values in expected.items():
        wanted = "F32" if values.ndim == 1 else "Q4_K"
        layer, _, part = name.removeprefix("blk.").partition(".")
        with_more = (
            part in ("attn_v.weight", "attn_qkv.weight", "ffn_down.weight")
            and int(layer) in MORE_BITS
        )
        if name == f"{top}.weight" or with_more:
            wanted = "Q6_K"
        kind, read = found[name]
        assert kind == wanted, name
        share = np.sqrt(((read - values) ** 2).mean() / (values**2).mean())
        assert share <= {"F32": 0.0, "Q4_K": 0.073, "Q6_K": 0.0182}[kind], name
    assert fields_of(tmp_path / "model.gguf")["general.file_type"] == 15


def test_rows_that_are_no_whole_blocks_have_smaller_ones(tmp_path: Path):
    save_model(
        "llama2", tmp_path / "model", hidden_size=128, intermediate_size=80, num_hidden_layers=8
    )
    report = write_gguf_model(tmp_path / "model", tmp_path / "model.gguf", "q4_k_m", name="a model")
    kinds = {
        name: kind
        for name, (kind, _) in read_values(tmp_path / "model.gguf", tmp_path / "model").items()
    }
    assert kinds["blk.1.attn_q.weight"] == "Q5_0" and kinds["blk.0.attn_v.weight"] == "Q8_0"
    assert kinds["output.weight"] == "Q8_0" and kinds["blk.0.ffn_down.weight"] == "F16"
    assert report.types == Counter(kinds.values())


@pytest.mark.parametrize(
    ("case", "changes", "line"),
    [
        (
            "gemma2",
            {"query_pre_attn_scalar": 20},
            "found query_pre_attn_scalar 20, expected 32, which llama.cpp does",
        ),
        (
            "llama-yarn",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0}},
            "other beta_fast",
        ),
        (
            "gemma",
            {"attention_bias": True},
            "found attention_bias, which llama.cpp does not compute",
        ),
        ("gemma3", {"layer_types": ["full_attention"] * 7, "num_hidden_layers": 7}, None),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    case: str, changes: Any, line: str | None, tmp_path: Path
):
    save_model(case, tmp_path / "model", **changes)
    if line is None:  # no window anywhere is nothing that needs a pattern
        write_gguf_model(tmp_path / "model", tmp_path / "model.gguf", "f16", name="x")
        return
    with pytest.raises(CheckpointError, match=line):
        write_gguf_model(tmp_path / "model", tmp_path / "model.gguf", "f16", name="x")
    assert not list(tmp_path.glob("*gguf*"))


def test_a_window_that_llama_cpp_lacks_is_said(tmp_path: Path):
    save_model("phi3", tmp_path / "model", sliding_window=9)
    report = write_gguf_model(tmp_path / "model", tmp_path / "model.gguf", "f16", name="x")
    assert report.notes[0].startswith("llama.cpp has no sliding window for phi3: beyond 9 tokens")


def test_weights_beyond_the_range_of_fp16(tmp_path: Path):
    from safetensors.torch import save_file

    save_model("llama2", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e6
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError,
        match=r"blk.1.ffn_up.weight: has weights beyond the range of fp16; write it",
    ):
        write_gguf_model(tmp_path / "model", tmp_path / "model.gguf", "f16", name="x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    write_gguf_model(tmp_path / "model", tmp_path / "model.gguf", "bf16", name="x")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import errno

    from recipe_lib import files
    from recipe_lib.errors import StorageError

    save_model("llama2", tmp_path / "model")
    for operation in ("open", "write", "flush", "rename"):

        def fail(what: str, path: Path, operation: str = operation) -> None:
            if what == operation:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))

        with monkeypatch.context() as patched:
            patched.setattr(files, "before_operation", fail)
            with pytest.raises(StorageError, match="No space left on device"):
                write_gguf_model(tmp_path / "model", tmp_path / "model.gguf", "f16", name="x")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model"], operation


def test_a_model_of_80_layers_keeps_more_of_its_values():
    """Llama's 70B, whose value heads serve eight query heads each."""
    shapes = {
        f"blk.{layer}.{part}.weight": (256, 256)
        for layer in range(80)
        for part in ("attn_v", "ffn_down")
    }
    chosen = choose_types(shapes | {"output.weight": (256, 256)}, "q4_k_m", 80, large=True)
    assert {chosen[f"blk.11.{part}.weight"] for part in ("attn_v", "ffn_down")} == {"Q5_K", "Q4_K"}
    assert {chosen[f"blk.12.{part}.weight"] for part in ("attn_v", "ffn_down")} == {"Q6_K"}
    assert chosen["blk.9.attn_v.weight"] == chosen["blk.70.attn_v.weight"] == "Q6_K"
