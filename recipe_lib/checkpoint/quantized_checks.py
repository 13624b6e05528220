"""Files with quantized weights of which config.json says something else: found from the headers, one line each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from recipe_lib.checkpoint.tensor_files import FileTensor
from recipe_lib.models.spec import DecoderSpec, ModelSpec
from recipe_lib.units import name_first

_FP8, _MXFP4 = "F8_E4M3", "U8"
_BLOCKS = ("gate_up_proj_blocks", "down_proj_blocks")  # ends of the names of MXFP4
_ORIGINAL = "take the checkpoint that this one was made from"


def quantized_fault(spec: ModelSpec, folder: Path, found: Mapping[str, FileTensor]) -> str | None:
    """One line for codes that config.json does not speak of, and for codes without their scales; None: no such fault.

    Of tensors that are no codes nothing is said here.
    """
    if not isinstance(spec, DecoderSpec):
        return None
    types = {name: tensor.entry.dtype for name, tensor in found.items()}
    blocks = sorted(name for name in types if name.endswith(_BLOCKS))
    odd = [name for name in blocks if types[name] != _MXFP4]
    if odd:
        named = name_first(odd, "has", "have")
        return f"{folder}: {named} the name of MXFP4 blocks and type {types[odd[0]]}, expected U8; {_ORIGINAL}"
    if blocks and not spec.codes.mxfp4:
        return _unsaid(folder, blocks, "MXFP4 blocks", "quant_method mxfp4")
    codes = sorted(name for name, kind in types.items() if kind == _FP8)
    bare = [name for name in codes if f"{name}_scale_inv" not in types]
    if len(bare) < len(codes) and spec.codes.fp8_block is None:
        return _unsaid(folder, codes, "FP8 numbers with scales of blocks", "quant_method fp8 and weight_block_size")
    if bare and spec.codes.fp8_block is not None:
        named = name_first(bare, "has", "have")
        return f"{folder}: {named} FP8 numbers without scales, expected {bare[0]}_scale_inv; {_ORIGINAL}"
    return None


def _unsaid(folder: Path, names: Sequence[str], what: str, expected: str) -> str:
    return (
        f"{folder}: {name_first(names, 'has', 'have')} {what}, which config.json does not say; expected "
        f"quantization_config with {expected}: take the config.json of the same checkpoint"
    )
