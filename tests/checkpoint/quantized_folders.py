"""Checkpoints that are quantized already, made by torchao's and transformers' quantizers, and what
they stand for.
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

WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
Tensors = dict[str, Tensor]


def build_fp8_section(block: tuple[int, int] = (128, 128), **more: Any) -> dict[str, Any]:
    """The section quantization_config of FP8 with scales of such blocks."""
    said = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }
    return said | more


def write_mxfp4_folder(folder: Path) -> Path:
    """A gpt-oss whose experts torchao has quantized; everything else is in bf16."""
    build_reference_model("gpt-oss", dtype=torch.bfloat16, **WIDE).save_pretrained(folder)

    def quantize(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, value in tensors.items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                found[name] = value
                continue
            matrices = value.transpose(1, 2)
            codes = [compute_mxfp4_codes(matrix) for matrix in matrices]
            found[f"{name}_blocks"], found[f"{name}_scales"] = map(
                torch.stack, zip(*codes, strict=True)
            )
        return found

    return rewrite(folder, quantize, MXFP4)


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
    """A model whose matrices transformers has quantized, but for those with one of `left` in their
    names.
    """
    model = build_reference_model(case, dtype=torch.bfloat16, **WIDE | changes)
    model.save_pretrained(folder, save_original_format=not fused)
    kind = "ue8m0" if scales == torch.float8_e8m0fnu else "float"
    quantizer = Fp8Quantize(_write_with_config(block, kind))

    def quantize(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, value in tensors.items():
            if value.dim() < 2 or any(part in name for part in left):
                found[name] = value
                continue
            rows, columns = value.shape[-2:]
            padded = F.pad(value, (0, -columns % block[1], 0, -rows % block[0]))
            made = quantizer.convert({name: padded})
            found[name] = made.pop(name)[..., :rows, :columns].contiguous()
            found |= {name: value.to(scales) for name, value in made.items()}
        return found

    said = build_fp8_section(block, modules_to_not_convert=["lm_head", *left], scale_fmt=kind)
    return rewrite(folder, quantize, said)


def write_twin(folder: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """The folder with plain weights, as transformers' own functions dequantize its codes."""
    section = json.loads((folder / "config.json").read_text())["quantization_config"]

    def dequantize(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, value in tensors.items():
            if name.endswith("_blocks"):
                bare = name.removesuffix("_blocks")
                found[bare] = convert_moe_packed_tensors(
                    value, tensors[f"{bare}_scales"], dtype=dtype
                )
            elif f"{name}_scale_inv" in tensors:
                found[name] = decode_fp8(
                    value, tensors[f"{name}_scale_inv"], section["weight_block_size"], dtype
                )
            elif not name.endswith(("_scales", "_scale_inv")):
                found[name] = value.to(dtype)
        return found

    return rewrite(copy(folder, out), dequantize, None)


def decode_fp8(codes: Tensor, scales: Tensor, block: list[int], dtype: torch.dtype) -> Tensor:
    """What transformers makes of FP8; it knows whole blocks alone, so that others are made so
    before.
    """
    rows, columns = codes.shape[-2:]
    bits = F.pad(codes.view(torch.uint8), (0, -columns % block[1], 0, -rows % block[0]))
    whole = Fp8Dequantize(None)._dequantize_one(bits.view(torch.float8_e4m3fn), scales, dtype)
    return whole[..., :rows, :columns]


def _write_with_config(block: tuple[int, int], kind: str) -> SimpleNamespace:
    return SimpleNamespace(
        quantization_config=FineGrainedFP8Config(weight_block_size=block, scale_fmt=kind)
    )


def copy(folder: Path, out: Path) -> Path:
    """The folder's config.json and tensors in a new one."""
    out.mkdir()
    for name in ("config.json", "model.safetensors"):
        (out / name).write_bytes((folder / name).read_bytes())
    return out


def rewrite(folder: Path, change: Callable[[Tensors], Tensors], section: Any) -> Path:
    """Changes a folder's tensors, and what its config.json says of quantized weights (None:
    nothing).
    """
    tensors = change(load_file(folder / "model.safetensors"))
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(
        json.dumps(config | ({"quantization_config": section} if section else {}))
    )
    return folder
