"""Quantized checkpoints that are not read: one line each, with the key of config.json or the
tensor.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.checkpoint.tensor_matching import check_weights
from recipe_lib.config.schema import ModelConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.models import read_config, read_spec
from recipe_lib.training.resolve_model import resolve_model
from tests.adapters.hugging_face import load_plain, read_folder_spec
from tests.checkpoint.quantized_folders import (
    MXFP4,
    WIDE,
    Tensors,
    build_fp8_section,
    copy_folder,
    rewrite_folder,
    write_fp8_folder,
    write_mxfp4_folder,
    write_twin,
)
from tests.models.reference import build_reference_model

LAYER = "model.layers.0"
GATE = f"{LAYER}.mlp.experts.gate_up_proj"
QUERY = f"{LAYER}.self_attn.q_proj.weight"
ORIGINAL = "download the checkpoint that this one was made from"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in bf16."""
    folder = tmp_path_factory.mktemp("dense")
    build_reference_model("qwen3", dtype=torch.bfloat16, **WIDE).save_pretrained(folder)
    return folder


def refused(config: dict[str, Any]) -> str:
    """The one line of a config.json that is refused."""
    with pytest.raises(CheckpointError) as caught:
        read_spec(config, "model", "native")
    assert len(caught.value.faults) == 1 and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("section", "method"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemm"}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fbgemm_fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "nvfp4"}, "nvfp4"),
        ({"quant_method": "torchao", "quant_type": {"default": {}}}, "torchao"),
        ({"quant_method": "of_tomorrow"}, "of_tomorrow"),
        ({"quant_method": ["fp8"]}, "['fp8']"),
        ({"bits": 4}, "unknown method"),
        ("fp8", "unknown method"),
    ],
)
def test_methods_that_are_not_read(dense: Path, section: Any, method: str) -> None:
    assert (
        refused(read_config(dense) | {"quantization_config": section})
        == f"model: config.json: quantization_config: the weights are quantized ({method});"
        f" expected fp32, bf16 or fp16 weights, or fp8 with weight_block_size; {ORIGINAL}"
    )


def test_mxfp4_is_gpt_oss_alone(dense: Path) -> None:
    assert (
        refused(read_config(dense) | {"quantization_config": MXFP4})
        == "model: config.json: quantization_config: the weights are quantized (mxfp4), which is"
        " read of model_type gpt_oss alone; found qwen3, expected fp32, bf16 or fp16 weights;"
        f" {ORIGINAL}"
    )


@pytest.mark.parametrize(
    ("key", "changes", "found", "expected"),
    [
        (
            "weight_block_size",
            None,
            "none",
            "two positive integers (scales of whole rows or tensors are not read)",
        ),
        (
            "weight_block_size",
            [128],
            "[128]",
            "two positive integers (scales of whole rows or tensors are not read)",
        ),
        (
            "weight_block_size",
            [0, 1],
            "[0, 1]",
            "two positive integers (scales of whole rows or tensors are not read)",
        ),
        ("activation_scheme", "static", "static", "dynamic (scales of activations are not read)"),
        ("fmt", "e5m2", "e5m2", "e4m3"),
        ("scale_fmt", "int", "int", "float or ue8m0"),
        ("expert_dtype", "fp4", "fp4", "fp8"),
        ("modules_to_convert", ["embed"], "['embed']", "none (embeddings in fp8 are not read)"),
    ],
)
def test_forms_of_fp8_that_are_not_read(
    dense: Path, key: str, changes: Any, found: str, expected: str
) -> None:
    section = {
        name: value
        for name, value in (build_fp8_section() | {key: changes}).items()
        if value is not None
    }
    assert (
        refused(read_config(dense) | {"quantization_config": section})
        == f"model: config.json: quantization_config.{key}: found {found} (quant_method fp8),"
        f" expected {expected}; {ORIGINAL}"
    )


@pytest.mark.parametrize("key", ["compression_config", "quantization"])
def test_a_second_section_is_refused_too(dense: Path, key: str) -> None:
    config = read_config(dense) | {
        "quantization_config": build_fp8_section(),
        key: {"quant_method": "other"},
    }
    assert f"config.json: {key}: the weights are quantized (other)" in refused(config)


def test_the_inner_config_of_a_multimodal_one_is_looked_at() -> None:
    config = build_reference_model("gemma3").config.to_dict()
    outer = {
        "model_type": "gemma3",
        "text_config": config | {"quantization_config": {"quant_method": "gptq"}},
    }
    for more in ({}, {"quantization_config": build_fp8_section()}):
        assert "the weights are quantized (gptq)" in refused(outer | more)


def test_transformers_own_class_takes_none(dense: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec(
            read_config(dense) | {"quantization_config": build_fp8_section()},
            "model",
            "transformers",
        )
    assert (
        str(caught.value)
        == "model: config.json: quantization_config: the weights are quantized (fp8); expected"
        f" fp32, bf16 or fp16 weights, or model.implementation=native; {ORIGINAL}"
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A gpt-oss in MXFP4 and a Qwen 3 in FP8."""
    folder = tmp_path_factory.mktemp("quantized")
    return {
        "mxfp4": write_mxfp4_folder(folder / "oss"),
        "fp8": write_fp8_folder(folder / "qwen", "qwen3", (32, 32)),
    }


def changed(folder: Path, out: Path, change: Callable[[Tensors], Any], section: Any = ...) -> Path:
    """A copy with other tensors, and config.json with another section (default: as it is)."""

    def rewritten(tensors: Tensors) -> Tensors:
        change(tensors)
        return tensors

    kept = read_config(folder)["quantization_config"]
    return rewrite_folder(copy_folder(folder, out), rewritten, kept if section is ... else section)


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def with_value(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: make(tensors[name])})


ONE_CHECKPOINT = "check that config.json and the weights are of one checkpoint"
ONE_MODEL = "check that config.json and the weights are of one model"
FAULTS: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "no scales of blocks": (
        "mxfp4",
        without(f"{GATE}_scales"),
        f"{GATE}_scales is missing; download the folder again",
    ),
    "no blocks": (
        "mxfp4",
        without(f"{GATE}_blocks"),
        f"{GATE}_blocks is missing; download the folder again",
    ),
    "blocks of another type": (
        "mxfp4",
        with_value(f"{GATE}_blocks", lambda value: value.bfloat16()),
        (
            f"{GATE}_blocks has the name of MXFP4 blocks and type BF16, expected U8; take the"
            " checkpoint that this one was made from"
        ),
    ),
    "scales of another type": (
        "mxfp4",
        with_value(f"{GATE}_scales", lambda value: value.float()),
        f"{GATE}_scales is of type F32, expected U8; {ONE_CHECKPOINT}",
    ),
    "blocks of another shape": (
        "mxfp4",
        with_value(f"{GATE}_blocks", lambda value: value.flatten(2)),
        f"{GATE}_blocks has shape [5, 192, 32], config.json makes it [5, 192, 2, 16]; {ONE_MODEL}",
    ),
    "no scales of fp8": (
        "fp8",
        without(f"{QUERY}_scale_inv"),
        (
            f"{QUERY} has FP8 numbers without scales, expected {QUERY}_scale_inv; take the"
            " checkpoint that this one was made from"
        ),
    ),
    "scales of other blocks": (
        "fp8",
        with_value(f"{QUERY}_scale_inv", lambda value: value[:1]),
        f"{QUERY}_scale_inv has shape [1, 2], config.json makes it [2, 2]; {ONE_MODEL}",
    ),
    "fp8 of another kind": (
        "fp8",
        with_value(QUERY, lambda value: value.float().to(torch.float8_e5m2)),
        f"{QUERY} is of type F8_E5M2, expected F8_E4M3; {ONE_CHECKPOINT}",
    ),
    "integers": (
        "fp8",
        with_value(QUERY, lambda value: value.view(torch.int8)),
        f"{QUERY} is of type I8, expected F8_E4M3; {ONE_CHECKPOINT}",
    ),
    "scales of integers": (
        "fp8",
        with_value(f"{QUERY}_scale_inv", lambda value: value.int()),
        (
            f"{QUERY}_scale_inv is of type I32, expected F64, F32, BF16, F16, F8_E8M0 or U8;"
            f" {ONE_CHECKPOINT}"
        ),
    ),
    "numbers that are none": (
        "fp8",
        with_value(
            QUERY, lambda value: torch.full_like(value.view(torch.uint8), 127).view(value.dtype)
        ),
        (
            f"{QUERY} holds NaN or infinite numbers; take an earlier state of its training, or"
            " download it again"
        ),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_files_with_a_fault(made: dict[str, Path], tmp_path: Path, name: str) -> None:
    kind, change, line = FAULTS[name]
    folder = changed(made[kind], tmp_path / "model", change)
    with pytest.raises(CheckpointError) as caught:
        check_weights(read_folder_spec(folder), folder)
        load_plain(folder)
    assert str(caught.value) == f"{folder}: {line}"


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_codes_of_which_config_json_says_nothing(
    made: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    folder = changed(made[kind], tmp_path / "model", lambda tensors: None, section=None)
    with pytest.raises(CheckpointError) as caught:
        resolve_model(ModelConfig(path=str(folder)))
    found, expected = {
        "mxfp4": (f"{LAYER}.mlp.experts.down_proj_blocks and 3 more have MXFP4 blocks", "mxfp4"),
        "fp8": (
            f"{LAYER}.mlp.down_proj.weight and 13 more have FP8 numbers with scales of blocks",
            "fp8 and weight_block_size",
        ),
    }[kind]
    assert (
        str(caught.value)
        == f"{folder}: {found}, which config.json does not say; expected quantization_config with"
        f" quant_method {expected}: take the config.json of the same checkpoint"
    )


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_plain_weights_that_config_json_calls_quantized_are_read(
    made: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    bare = write_twin(made[kind], tmp_path / "bare")
    said = read_config(made[kind])["quantization_config"]
    rewrite_folder(write_twin(made[kind], tmp_path / "said"), lambda tensors: tensors, said)
    expected = dict(load_plain(bare).named_parameters())
    for name, parameter in load_plain(tmp_path / "said").named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_a_header_that_lies_about_its_codes_is_refused(
    made: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(made["fp8"], tmp_path / "model", lambda tensors: None)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[QUERY]["shape"] = [64, 32]
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(CheckpointError, match=f"found an impossible entry for {QUERY}"):
        check_weights(read_folder_spec(folder), folder)
