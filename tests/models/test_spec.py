"""What is read from config.json, and every line that refuses one."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import transformers

from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.models import build_spec, list_presets, read_config, read_preset_config
from recipe_lib.models.spec import DecoderSpec
from tests.models.reference import CASES, SMALL

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
}


def test_the_spec_is_small_and_needs_no_torch() -> None:
    assert len(fields(DecoderSpec)) <= 36
    code = (
        "import sys; from recipe_lib.models import read_preset_config, build_spec; "
        "build_spec(read_preset_config('gemma3/27B'), 'x'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_what_a_file_leaves_out() -> None:
    spec = build_spec(LLAMA, "here")
    assert (spec.num_kv_heads, spec.head_width, spec.tied, spec.rope.base) == (
        4,
        12,
        False,
        10000.0,
    )
    gemma = build_spec(LLAMA | {"model_type": "gemma2", "architectures": None}, "here")
    assert gemma.tied and gemma.head_width == 256 and gemma.attention_softcap == 50.0
    assert gemma.windows == (4096, None)
    bare = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 7,
        "model_type": "gemma3_text",
    }
    gemma3 = build_spec({"model_type": "gemma3", "text_config": bare, "vision_config": {}}, "here")
    assert gemma3.windows == (4096,) * 5 + (None, 4096)
    assert (gemma3.vocab_size, gemma3.num_heads, gemma3.num_kv_heads) == (262208, 8, 4)
    assert gemma3.rope.base == 1e6 and gemma3.local_rope.base == 1e4


@pytest.mark.parametrize("case", CASES)
def test_both_spellings_of_the_rotary_embedding(case: str) -> None:
    """transformers 5 writes rope_parameters; the older rope_theta and rope_scaling mean the
    same.
    """
    class_name, options = CASES[case]
    new = getattr(transformers, class_name)(**SMALL | options).to_dict()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    given = new["rope_parameters"]
    if "full_attention" in given:
        old |= {
            "rope_theta": given["full_attention"]["rope_theta"],
            "rope_local_base_freq": given["sliding_attention"]["rope_theta"],
            "rope_scaling": {
                key: value for key, value in given["full_attention"].items() if key != "rope_theta"
            },
        }
    else:
        scaling = {
            key: value
            for key, value in given.items()
            if key not in ("rope_theta", "partial_rotary_factor")
        }
        scaling["type"] = scaling.pop("rope_type")
        old |= {"rope_theta": given["rope_theta"], "rope_scaling": scaling}
        old |= {"partial_rotary_factor": given.get("partial_rotary_factor", 1.0)}
    assert build_spec(old, "old") == build_spec(new, "new")


def test_windows_of_qwen() -> None:
    qwen = LLAMA | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 8,
    }
    assert build_spec(qwen, "x").windows == (None, None)
    assert build_spec(qwen | {"use_sliding_window": True, "max_window_layers": 1}, "x").windows == (
        None,
        8,
    )


TYPES = (
    "gemma, gemma2, gemma3, gpt_oss, granite, granitemoehybrid (without Mamba layers and experts),"
    " llama, mistral, mixtral, olmoe, phi3, qwen2, qwen3, qwen3_moe, smollm3"
)
HYBRID = {
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
}
SMOLLM3 = {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 6}
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen2_moe": (
        {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]},
        (
            "model_type 'qwen2_moe' (Qwen2MoeForCausalLM) is not supported; expected a causal"
            f" language model of type {TYPES}; to train it in transformers' own class, set"
            " model.implementation=transformers"
        ),
    ),
    "layers of Mamba": (
        HYBRID | {"layer_types": ["mamba", "attention"], "num_local_experts": 0},
        (
            "model_type 'granitemoehybrid' (GraniteMoeHybridForCausalLM) is not supported; expected"
            f" a causal language model of type {TYPES}; to train it in transformers' own class, set"
            " model.implementation=transformers"
        ),
    ),
    "experts of Granite": (
        HYBRID | {"layer_types": ["attention"] * 2, "num_local_experts": 4},
        (
            "model_type 'granitemoehybrid' (GraniteMoeHybridForCausalLM) is not supported; expected"
            f" a causal language model of type {TYPES}; to train it in transformers' own class, set"
            " model.implementation=transformers"
        ),
    ),
    "layers that rotate": (
        SMOLLM3 | {"no_rope_layers": [1]},
        "no_rope_layers: found [1], expected a 1 or 0 for each of 2 layers",
    ),
    "layers that rotate, in words": (
        SMOLLM3 | {"no_rope_layers": ["yes", "no"]},
        "no_rope_layers: found ['yes', 'no'], expected a 1 or 0 for each of 2 layers",
    ),
    "interval of layers that rotate": (
        SMOLLM3 | {"no_rope_layer_interval": 0},
        "no_rope_layer_interval: found 0, expected a positive integer",
    ),
    "scale of logits": (
        {"model_type": "granite", "architectures": [], "logits_scaling": 0},
        "logits_scaling: found 0, expected a number from 1e-30 to 1e+30",
    ),
    "reward model": (
        {"architectures": ["LlamaForSequenceClassification"]},
        (
            "LlamaForSequenceClassification has a score head, which predicts no tokens; expected a"
            " causal language model; transformers' AutoModelForSequenceClassification opens it, and"
            " reward_distributed goes on training it"
        ),
    ),
    "no model_type": (
        {"model_type": None, "architectures": None},
        (f"model_type None is not supported; expected a causal language model of type {TYPES}"),
    ),
    "bitsandbytes": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        (
            "quantization_config: the weights are quantized (bitsandbytes); expected fp32, bf16 or"
            " fp16 weights, or fp8 with weight_block_size; download the checkpoint that this one"
            " was made from"
        ),
    ),
    "mlx": (
        {"quantization": {"group_size": 64, "bits": 4}},
        (
            "quantization: the weights are quantized (MLX); expected fp32, bf16 or fp16 weights, or"
            " fp8 with weight_block_size; download the checkpoint that this one was made from"
        ),
    ),
    "missing": (
        {"hidden_size": ...},
        "hidden_size: found no such key, expected a positive integer",
    ),
    "text": ({"vocab_size": "97"}, "vocab_size: found '97', expected a positive integer"),
    "true": ({"vocab_size": True}, "vocab_size: found True, expected a positive integer"),
    "nan": (
        {"rms_norm_eps": float("nan")},
        "rms_norm_eps: found nan, expected a number from 1e-30 to 1e+30",
    ),
    "flag": (
        {"tie_word_embeddings": "yes"},
        "tie_word_embeddings: found 'yes', expected true or false",
    ),
    "width": (
        {"hidden_size": 50},
        "hidden_size: found 50, expected a multiple of num_attention_heads = 4",
    ),
    "kv heads": (
        {"num_key_value_heads": 3},
        "num_key_value_heads: found 3, expected a divisor of num_attention_heads = 4",
    ),
    "activation": (
        {"hidden_act": "relu"},
        "hidden_act: found 'relu', expected one of silu, swish, gelu, gelu_pytorch_tanh",
    ),
    "odd head": (
        {"head_dim": 7},
        (
            "head width 7 with partial_rotary_factor 1 gives 7 rotating channels; expected an even"
            " number from 2 to 7"
        ),
    ),
    "rope": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        (
            "rope_scaling: type 'dynamic' is not supported; expected one of default, linear,"
            " llama3, yarn, longrope"
        ),
    ),
    "rope list": ({"rope_scaling": [1]}, "rope_scaling: found [1], expected an object, or null"),
    "rope false": (
        {"rope_parameters": False},
        "rope_parameters: found False, expected an object, or null",
    ),
    "rope 0": ({"rope_scaling": 0}, "rope_scaling: found 0, expected an object, or null"),
    "rope of full attention": (
        {
            "model_type": "gemma3_text",
            "architectures": [],
            "rope_parameters": {"full_attention": 0, "sliding_attention": {}},
        },
        "rope_parameters.full_attention: found 0, expected an object, or null",
    ),
    "rope of sliding attention": (
        {
            "model_type": "gemma3_text",
            "architectures": [],
            "rope_parameters": {"full_attention": None, "sliding_attention": []},
        },
        "rope_parameters.sliding_attention: found [], expected an object, or null",
    ),
    "rope of a kind of layers": (
        {
            "model_type": "gemma3_text",
            "architectures": [],
            "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": 3},
        },
        "rope_parameters.sliding_attention: found 3, expected an object, or null",
    ),
    "rope number": (
        {"rope_scaling": {"rope_type": "linear"}},
        "rope_scaling.factor: found no such key, expected a number from 1e-09 to 1e+09",
    ),
    "rope factors": (
        {"rope_scaling": LONGROPE},
        "rope_scaling.short_factor: found [1.0], expected a list of 6 numbers from 1e-09 to 1e+09",
    ),
    "bidirectional": (
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention: found True, expected false (a causal model)",
    ),
    "layer types": (
        {"model_type": "gemma2", "architectures": [], "layer_types": ["chunked_attention"]},
        (
            "layer_types: found ['chunked_attention'], expected 2 times sliding_attention or"
            " full_attention"
        ),
    ),
    "no window": (
        {"model_type": "gemma2", "architectures": [], "sliding_window": None},
        (
            "sliding_window: found None, expected a positive integer, because some layers are"
            " sliding_attention"
        ),
    ),
    "window layers": (
        {
            "model_type": "qwen3",
            "architectures": [],
            "use_sliding_window": True,
            "max_window_layers": "all",
        },
        "max_window_layers: found 'all', expected an integer",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_config_that_cannot_be_used_is_one_line(fault: str) -> None:
    change, line = FAULTS[fault]
    config = {key: value for key, value in (LLAMA | change).items() if value is not ...}
    with pytest.raises(CheckpointError) as caught:
        build_spec(config, "models/mine")
    assert str(caught.value) == f"models/mine: config.json: {line}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"config\.json: no such file; expected a Hugging Face model folder with",
    ):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(
        CheckpointError,
        match=r"config\.json: found a JSON list, expected an object with model_type",
    ):
        read_config(tmp_path)
    for broken in (b"{", b"\xff\xfe", b'{"a": ' * 100000):
        (tmp_path / "config.json").write_bytes(broken)
        with pytest.raises(
            CheckpointError, match="not a readable JSON file .*; download the file again"
        ) as caught:
            read_config(tmp_path / "config.json")
        assert "\n" not in str(caught.value)


def test_presets_by_name_and_by_path(tmp_path: Path) -> None:
    assert read_preset_config("llama3/8B")["intermediate_size"] == 14336
    assert "qwen2_5/7B" in list_presets()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert (
        read_preset_config(str(tmp_path))
        == read_preset_config(str(tmp_path / "config.json"))
        == LLAMA
    )
    with pytest.raises(
        ConfigError,
        match=r"^model\.preset=llama3/9B: no such preset or file; expected a path .* gemma2/27B",
    ):
        read_preset_config("llama3/9B")


REAL = {
    "gemma-2b-it": ("gemma", True),
    "gemma-3-1b-it": ("gemma3", True),
    "llama-2-7b-chat": ("llama", False),
    "llama-3.2-1b": ("llama", True),
    "mistral-7b-instruct-v0.3": ("mistral", False),
    "phi-3-mini-merge": ("phi3", False),
    "qwen2.5-14b-cogito": ("qwen2", False),
}


@pytest.mark.parametrize("name", REAL)
def test_real_configs(name: str, realdata: Path) -> None:
    spec = build_spec(read_config(realdata / "hf-layouts" / name), name)
    assert (spec.family, spec.tied) == REAL[name]


def test_real_configs_of_other_models(realdata: Path) -> None:
    for name in ("granite-3.1-1b-a400m-moe", "llama-3.2-1b-instruct-config"):
        with pytest.raises(
            CheckpointError, match="is not supported; expected a causal language model of type"
        ):
            build_spec(read_config(realdata / "hf-layouts" / name), name)
