"""Which type each tensor of a GGUF file has, as llama.cpp's own conversion and quantization choose it. No torch."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

# The format's name of a type -> weights in a block of it, of which a row has a whole number.
BLOCK_SIZES = {"F32": 1, "F16": 1, "BF16": 1, "Q8_0": 32, "Q5_0": 32, "Q5_1": 32, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256}
_WHOLE = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
# Of rows that are not whole blocks of 256: a type of about as many bits in blocks of 32.
_SMALLER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class TypeChoice:
    """The type of a tensor, and the one that the mixture wanted where the length of its rows does not allow that."""

    name: str
    instead_of: str | None = None


def choose_types(
    shapes: Mapping[str, tuple[int, ...]], kind: str, layers: int, *, large: bool = False
) -> dict[str, TypeChoice]:
    """The type of each tensor of a file, by its name in the file.

    shapes: of all tensors, rows first. kind: one of GGUF_KINDS. large: a model of 80 layers whose value heads serve
    several query heads, where values get a bit more. Vectors and tables of factors stay in fp32.
    """
    return {name: _choose(name, shape, kind, layers, large, shapes) for name, shape in shapes.items()}


def _choose(
    name: str, shape: tuple[int, ...], kind: str, layers: int, large: bool, names: Collection[str]
) -> TypeChoice:
    if len(shape) < 2:
        return TypeChoice("F32")
    wanted = _WHOLE.get(kind) or _in_mixture(name, shape[-1], layers, large, tied="output.weight" not in names)
    allowed = wanted
    if shape[-1] % BLOCK_SIZES[wanted]:
        allowed = _SMALLER.get(wanted, "F16")
        if shape[-1] % BLOCK_SIZES[allowed]:
            allowed = "F16"
    return TypeChoice(allowed, None if allowed == wanted else wanted)


def _in_mixture(name: str, columns: int, layers: int, large: bool, tied: bool) -> str:
    """q4_k_m: 4 bits, more for what decides most: the output, and in half of the layers values (in one matrix with
    queries and keys where the model has them so) and the way down."""
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return "Q8_0" if columns % BLOCK_SIZES["Q4_K"] else "Q6_K"
    found = re.fullmatch(r"blk\.(\d+)\.(attn_v|ffn_down|attn_qkv)\.weight", name)
    if found is None:
        return "Q4_K"
    if _has_more_bits(int(found[1]), layers):
        return "Q6_K"
    return "Q5_K" if large and found[2] != "ffn_down" else "Q4_K"


def _has_more_bits(layer: int, layers: int) -> bool:
    """The first eighth of the layers, the last, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
