"""The block formats that the package gguf reads only: its own reader gives back what was meant, as
near as llama.cpp's quantizer comes.
"""

import ctypes
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from recipe_lib.checkpoint.gguf.gguf_file import encode_blocks
from tests.checkpoint.gguf.made_models import import_llama_cpp

KINDS = ("q4_K", "q5_K", "q6_K")
# Bits of a weight, scales included, as the format has them.
BITS = {"q4_K": 4.5, "q5_K": 5.5, "q6_K": 6.5625}


def weights(kind: str, rows: int = 64, columns: int = 512) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, columns, generator=generator)
    uniform = torch.rand(rows, columns, generator=generator)
    return {
        "normal": normal * 0.02,
        "heavy tails": normal / (uniform + 0.05),
        "above zero": uniform + 0.1,
        "below zero": -uniform - 0.1,
        "few": normal * (uniform < 0.02),
        "zeros": torch.zeros(rows, columns),
        "one value": torch.full((rows, columns), 0.3),
    }[kind]


def read(codes: torch.Tensor, kind: str) -> np.ndarray:
    return gguf.quants.dequantize(codes.numpy(), gguf.GGMLQuantizationType[kind.upper()])


def difference(values: torch.Tensor, found: np.ndarray) -> float:
    """Root mean square of the difference, as a share of that of the weights."""
    wide = values.double().numpy()
    return float(np.sqrt(((found - wide) ** 2).mean() / max((wide**2).mean(), 1e-30)))


# What llama.cpp's ggml_quantize_chunk (ggml 0.25.3) comes to on the same weights.
REFERENCE = {
    ("normal", "q4_K"): 0.071422, ("normal", "q5_K"): 0.036095, ("normal", "q6_K"): 0.017732,
    ("heavy tails", "q4_K"): 0.101438, ("heavy tails", "q5_K"): 0.051191, ("heavy tails", "q6_K"): 0.027604,
    ("above zero", "q4_K"): 0.027712, ("above zero", "q5_K"): 0.013744, ("above zero", "q6_K"): 0.01251,
    ("below zero", "q4_K"): 0.024121, ("below zero", "q5_K"): 0.012523, ("below zero", "q6_K"): 0.01251,
    ("few", "q4_K"): 0.029993, ("few", "q5_K"): 0.02515, ("few", "q6_K"): 0.004352,
    ("zeros", "q4_K"): 0.0, ("zeros", "q5_K"): 0.0, ("zeros", "q6_K"): 0.0,
    ("one value", "q4_K"): 0.000357, ("one value", "q5_K"): 0.000332, ("one value", "q6_K"): 0.000163,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", sorted({shape for shape, _ in REFERENCE}))
def test_what_the_package_reads_is_as_near_as_llama_cpp_comes(shape: str, kind: str):
    values = weights(shape, 512, 1024)
    codes = encode_blocks(values, kind)
    assert codes.shape == (512, 1024 * BITS[kind] / 8)
    assert difference(values, read(codes, kind)) <= REFERENCE[shape, kind] * 1.005


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_nearly_those_of_llama_cpp(kind: str):
    library = ctypes.CDLL(str(Path(import_llama_cpp().__file__).parent / "lib" / "libggml-base.so"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    values = weights("normal")
    codes, source = encode_blocks(values, kind).numpy(), np.ascontiguousarray(values.numpy())
    theirs = np.zeros_like(codes)
    number = gguf.GGMLQuantizationType[kind.upper()].value
    library.ggml_quantize_chunk(number, source.ctypes.data, theirs.ctypes.data, 0, 64, 512, None)
    assert (codes == theirs).mean() > 0.97
    reached = difference(values, read(torch.from_numpy(theirs), kind))
    assert difference(values, read(torch.from_numpy(codes), kind)) <= reached * 1.005


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_format_has_exactly_is_kept(kind: str):
    """Weights that are codes times a scale: all 16, 32 or 64 of them, in an order that shows each
    byte's place.
    """
    levels = {"q4_K": 16, "q5_K": 32, "q6_K": 64}[kind]
    steps = (torch.arange(256) * 37) % levels
    lowest = levels // 2 if kind == "q6_K" else 0
    values = ((steps - lowest).float() * 0.5).repeat(3, 1)
    values[1] *= 2
    found = read(encode_blocks(values, kind), kind)
    assert np.allclose(found, values.numpy(), rtol=0, atol=0.02 * float(values.abs().max()))
    assert [np.argsort(row, kind="stable").tolist() for row in np.round(found / 0.5)] == [
        np.argsort(row, kind="stable").tolist() for row in np.round(values.numpy() / 0.5)
    ]


def test_rows_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="multiple of 256 weights, found 250"):
        encode_blocks(torch.zeros(2, 250), "q4_K")
