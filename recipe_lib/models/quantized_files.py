"""Weights that a `config.json` says are quantized already: the two layouts that are read, and the refusal of others."""

from collections.abc import Mapping
from typing import Any

from recipe_lib.errors import CheckpointError
from recipe_lib.models.spec import FileCodes

_KEYS = ("quantization_config", "compression_config", "quantization")
_PLAIN = "fp32, bf16 or fp16 weights"
_REMEDY = "download the checkpoint that this one was made from"


def read_codes(config: Mapping[str, Any], where: str) -> FileCodes:
    """How the weights of the files are quantized, if they are.

    where: as for `spec_from_config`. Raises CheckpointError, with the key and the method, for a layout that is not
    read.
    """
    codes = FileCodes()
    for key in _KEYS:
        found = config.get(key)
        if not found:
            continue
        method = found.get("quant_method") if key == _KEYS[0] and isinstance(found, Mapping) else None
        if method == "fp8":
            codes = FileCodes(fp8_block=_fp8_block(found, where))
        elif method == "mxfp4" and config.get("model_type") == "gpt_oss":
            codes = FileCodes(mxfp4=True)
        elif method == "mxfp4":
            kind = str(config.get("model_type"))[:80]
            raise CheckpointError(
                f"{where}: config.json: {key}: the weights are quantized (mxfp4), which is read of model_type gpt_oss "
                f"alone; found {kind}, expected {_PLAIN}; {_REMEDY}"
            )
        else:
            raise _refusal(key, found, where, f"{_PLAIN}, or fp8 with weight_block_size")
    return codes


def refuse_quantized(config: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError when the weights are quantized in any form: for models that are not native."""
    for key in _KEYS:
        found = config.get(key)
        if found:
            ours = isinstance(found, Mapping) and found.get("quant_method") in ("fp8", "mxfp4")
            raise _refusal(key, found, where, f"{_PLAIN}, or model.implementation=native" if ours else _PLAIN)


def _refusal(key: str, found: Any, where: str, expected: str) -> CheckpointError:
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if method is None:
        method = "MLX" if key == "quantization" else "unknown method"
    return CheckpointError(
        f"{where}: config.json: {key}: the weights are quantized ({str(method)[:80]}); expected {expected}; {_REMEDY}"
    )


def _fp8_block(found: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Rows and columns that share a scale. found: the section of quant_method fp8."""

    def check(key: str, good: bool, expected: str) -> None:
        if not good:
            said = str(found[key])[:80] if key in found else "none"
            raise CheckpointError(
                f"{where}: config.json: quantization_config.{key}: found {said} (quant_method fp8), expected "
                f"{expected}; {_REMEDY}"
            )

    block = found.get("weight_block_size")
    pair = isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)
    check("weight_block_size", pair, "two positive integers (scales of whole rows or tensors are not read)")
    scheme = found.get("activation_scheme", "dynamic")
    check("activation_scheme", str(scheme).lower() == "dynamic", "dynamic (scales of activations are not read)")
    check("fmt", found.get("fmt") in (None, "e4m3"), "e4m3")
    check("scale_fmt", found.get("scale_fmt") in (None, "float", "ue8m0"), "float or ue8m0")
    check("expert_dtype", found.get("expert_dtype") in (None, "fp8"), "fp8")
    check("modules_to_convert", not found.get("modules_to_convert"), "none (embeddings in fp8 are not read)")
    assert isinstance(block, list)
    return block[0], block[1]
