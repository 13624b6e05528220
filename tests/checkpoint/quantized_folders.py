"""Write quantized checkpoints with torchao's and transformers' quantizers, and their plain twins.

A twin has the weights that transformers dequantizes; our model has to load both alike.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.models.reference import build_reference_model
from tests.torchao_oracle import compute_mxfp4_codes

# Sizes that MXFP4's blocks of 32 divide.
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
Tensors = dict[str, Tensor]  # by name in the file


def build_fp8_section(block: tuple[int, int] = (128, 128), **more: Any) -> dict[str, Any]:
    """Return the section quantization_config of FP8 with a scale for each block.

    block: (rows, columns). more: further keys.
    """
    section = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }
    return section | more


def write_mxfp4_folder(folder: Path) -> Path:
    """Write a gpt-oss whose experts torchao has quantized, all else in bf16; return its folder."""
    build_reference_model("gpt-oss", dtype=torch.bfloat16, **WIDE).save_pretrained(folder)

    def quantize(tensors: Tensors) -> Tensors:
        quantized: Tensors = {}
        for name, value in tensors.items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                quantized[name] = value
                continue
            # The model has experts `[E, i, o]`, codes are of `[E, o, i]`.
            experts = [compute_mxfp4_codes(matrix) for matrix in value.transpose(1, 2)]
            quantized[f"{name}_blocks"] = torch.stack([codes for codes, _ in experts])
            quantized[f"{name}_scales"] = torch.stack([scales for _, scales in experts])
        return quantized

    return rewrite_folder(folder, quantize, MXFP4)


def write_fp8_folder(
    folder: Path,
    case: str,
    block: tuple[int, int] = (128, 128),
    *,
    scales: torch.dtype = torch.float32,
    left: tuple[str, ...] = ("embed_tokens", "lm_head", "mlp.gate."),
    fused: bool = False,
    **changes: Any,
) -> Path:
    """Write a model whose matrices transformers has quantized to FP8; return the folder.

    case: of tests/models/reference.py. block: (rows, columns) that share a scale. scales: their
    dtype. left: parts of the names of matrices that are not quantized. fused: with the names and
    fused matrices of transformers 5. changes: of the case's config.
    """
    model = build_reference_model(case, dtype=torch.bfloat16, **WIDE | changes)
    model.save_pretrained(folder, save_original_format=not fused)
    kind = "ue8m0" if scales == torch.float8_e8m0fnu else "float"
    quantizer = Fp8Quantize(_build_quantizer_stub(block, kind))

    def quantize(tensors: Tensors) -> Tensors:
        quantized: Tensors = {}
        for name, value in tensors.items():
            if value.dim() < 2 or any(part in name for part in left):
                quantized[name] = value
                continue
            rows, columns = value.shape[-2:]
            # transformers quantizes full blocks only.
            padded = F.pad(value, (0, -columns % block[1], 0, -rows % block[0]))
            converted = quantizer.convert({name: padded})
            quantized[name] = converted.pop(name)[..., :rows, :columns].contiguous()
            for scale_name, scale in converted.items():
                quantized[scale_name] = scale.to(scales)
        return quantized

    section = build_fp8_section(block, modules_to_not_convert=["lm_head", *left], scale_fmt=kind)
    return rewrite_folder(folder, quantize, section)


def write_twin(folder: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a copy of the folder with plain weights, as transformers dequantizes its codes.

    Returns `out`.
    """
    section = json.loads((folder / "config.json").read_text())["quantization_config"]

    def dequantize(tensors: Tensors) -> Tensors:
        plain: Tensors = {}
        for name, value in tensors.items():
            if name.endswith("_blocks"):
                weight_name = name.removesuffix("_blocks")
                scales = tensors[f"{weight_name}_scales"]
                plain[weight_name] = convert_moe_packed_tensors(value, scales, dtype=dtype)
            elif f"{name}_scale_inv" in tensors:
                scales = tensors[f"{name}_scale_inv"]
                block = section["weight_block_size"]
                plain[name] = decode_fp8(value, scales, block=block, dtype=dtype)
            elif not name.endswith(("_scales", "_scale_inv")):
                plain[name] = value.to(dtype)
        return plain

    return rewrite_folder(copy_folder(folder, out), dequantize, None)


def decode_fp8(codes: Tensor, scales: Tensor, block: list[int], dtype: torch.dtype) -> Tensor:
    """Return the weights that transformers dequantizes from FP8 codes `[..., o, i]`.

    scales: one for each block. block: (rows, columns).
    """
    rows, columns = codes.shape[-2:]
    # transformers dequantizes full blocks only; torch pads no float8.
    bits = F.pad(codes.view(torch.uint8), (0, -columns % block[1], 0, -rows % block[0]))
    weights = Fp8Dequantize(None)._dequantize_one(bits.view(torch.float8_e4m3fn), scales, dtype)
    return weights[..., :rows, :columns]


def _build_quantizer_stub(block: tuple[int, int], kind: str) -> SimpleNamespace:
    """Return an object that stands for transformers' quantizer, of which only the config is read.

    kind: of the scales, "float" or "ue8m0" (powers of two).
    """
    return SimpleNamespace(
        quantization_config=FineGrainedFP8Config(weight_block_size=block, scale_fmt=kind)
    )


def copy_folder(folder: Path, out: Path) -> Path:
    """Copy a folder's config.json and tensors into the new folder `out`; return it."""
    out.mkdir()
    for name in ("config.json", "model.safetensors"):
        (out / name).write_bytes((folder / name).read_bytes())
    return out


def rewrite_folder(folder: Path, change: Callable[[Tensors], Tensors], section: Any) -> Path:
    """Change a folder's tensors, and quantization_config of its config.json; return the folder.

    change: returns the new tensors. section: the new quantization_config; None removes it.
    """
    tensors = change(load_file(folder / "model.safetensors"))
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    if section:
        config["quantization_config"] = section
    (folder / "config.json").write_text(json.dumps(config))
    return folder
