"""A GGUF file, written a part of a tensor at a time, and read back.

The package `gguf` writes the head of the file and knows the block formats of up to 32 weights.
q4_K, q5_K and q6_K it reads and does not write; they are written here.

A row is cut into blocks of 256 weights. A block has one or two numbers in fp16, and for each 32
(q6_K: 16) of its weights a small integer that these are multiplied by: the scale of that part and,
in q4_K and q5_K, how far below zero its smallest weight may be. What is chosen is, for each part,
the scale and minimum with the least weighted squared error among the best fits to some roundings of
its weights.
"""

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipe_lib import files
from recipe_lib.config.local_files import format_install_line
from recipe_lib.errors import CheckpointError, SetupError
from recipe_lib.report.phases import phase
from recipe_lib.units import MIB

# Which type each tensor of a GGUF file has, as llama.cpp's own conversion and quantization choose
# it. No torch.


# The format's name of a type -> weights in a block of it, of which a row has a whole number.
BLOCK_SIZES = {
    "F32": 1,
    "F16": 1,
    "BF16": 1,
    "Q8_0": 32,
    "Q5_0": 32,
    "Q5_1": 32,
    "Q4_K": 256,
    "Q5_K": 256,
    "Q6_K": 256,
}
_WHOLE = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
# Of rows that are not whole blocks of 256: a type of about as many bits in blocks of 32.
_SMALLER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def choose_types(
    shapes: Mapping[str, tuple[int, ...]], kind: str, layers: int, *, large: bool = False
) -> dict[str, str]:
    """The type of each tensor of a file, by its name in the file.

    shapes: of all tensors, rows first. kind: one of GGUF_KINDS. large: a model of 80 layers whose
    value heads serve several query heads, where values get a bit more. Vectors and tables of
    factors stay in fp32.
    """
    return {
        name: _choose_type(name, shape, kind, layers, large, shapes)
        for name, shape in shapes.items()
    }


def _choose_type(
    name: str, shape: tuple[int, ...], kind: str, layers: int, large: bool, names: Collection[str]
) -> str:
    if len(shape) < 2:
        return "F32"
    wanted = _WHOLE.get(kind) or _choose_mixed_type(
        name, shape[-1], layers, large, tied="output.weight" not in names
    )
    fitting = (
        kind for kind in (wanted, _SMALLER.get(wanted, "F16")) if shape[-1] % BLOCK_SIZES[kind] == 0
    )
    return next(fitting, "F16")


def _choose_mixed_type(name: str, columns: int, layers: int, large: bool, tied: bool) -> str:
    """q4_k_m: 4 bits, more for what decides most: the output, and in half of the layers values (in
    one matrix with queries and keys where the model has them so) and the way down.
    """
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return "Q8_0" if columns % BLOCK_SIZES["Q4_K"] else "Q6_K"
    found = re.fullmatch(r"blk\.(\d+)\.(attn_v|ffn_down|attn_qkv)\.weight", name)
    if found is None:
        return "Q4_K"
    layer = int(found[1])
    eighth = layers // 8
    # The first eighth of the layers, the last, and every third between.
    if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
        return "Q6_K"
    return "Q5_K" if large and found[2] != "ffn_down" else "Q4_K"


_PIECE = 2**22  # weights that are converted at a time
_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The most that a weight may change, as a share of the largest in its block: half a step of the
# codes, a whole one where the outermost codes stop short of it, and what rounding the scales of its
# parts adds.
_MOST = {"Q8_0": 0.5 / 127, "Q6_K": 0.045, "Q5_0": 1 / 16, "Q5_1": 0.04, "Q5_K": 0.09, "Q4_K": 0.17}
_F16_ROUNDING = 2.0**-10  # of the scales of blocks, which are in fp16
BLOCK = 256
_LEVELS = {"q4_K": 15, "q5_K": 31}  # the largest code of a weight
_SCALE_LEVELS = 63  # scales and minimums of parts have 6 bits
# Roundings that are tried: the range of the part is divided into so many levels more than there
# are.
_STRETCHES = {
    "q4_K": [round(-1 + 0.1 * step, 1) for step in range(21)],
    "q5_K": [round(-0.5 + 0.1 * step, 1) for step in range(16)],
    "q6_K": [round(0.1 * step, 1) for step in range(-9, 10)],
}
_BLOCKS_AT_ONCE = (
    2**18
)  # weights that are worked on together: as many as stay in a processor's cache


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file: its name and shape there, rows first, its type, and what gives its
    values as they are in the model.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Tensor]


def import_gguf() -> Any:
    """The package `gguf`. SetupError: it is not installed."""
    try:
        import gguf
    except ImportError:
        raise SetupError(f"--gguf: found no package gguf; {format_install_line('gguf')}") from None
    return gguf


def write_gguf(
    out: Path, architecture: str, fields: Mapping[str, Any], tensors: Sequence[GgufTensor]
) -> None:
    """Writes the file `out`, which takes its name when it is whole. StorageError, CheckpointError:
    there is no file.

    fields: metadata by their full keys; an int is written as 32 bits without a sign, a float as
    fp32.
    """
    gguf = import_gguf()
    types = {tensor.name: gguf.GGMLQuantizationType[tensor.kind] for tensor in tensors}
    sizes: dict[str, int] = {}
    for tensor in tensors:
        block, block_bytes = gguf.GGML_QUANT_SIZES[types[tensor.name]]
        sizes[tensor.name] = math.prod(tensor.shape) // block * block_bytes
    with files.report_storage_faults():
        files.remove_leftovers(out.parent, out.name)
        files.require_space(out.parent, sum(sizes.values()) + 64 * MIB, "the GGUF file")
        writer = gguf.GGUFWriter(None, architecture)
        _put_fields(writer, fields)
        for tensor in tensors:
            dtype = torch.empty(0).numpy().dtype  # of no meaning beside `raw_dtype`
            writer.add_tensor_info(
                tensor.name, tensor.shape, dtype, sizes[tensor.name], raw_dtype=types[tensor.name]
            )
        with files.write_aside(out, replace=False) as temporary, closing(writer):
            files.before_operation("open", temporary)
            _write_all(writer, temporary, tensors, sizes)


def _put_fields(writer: Any, fields: Mapping[str, Any]) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            add[type(value)](key, value)


def _write_all(
    writer: Any, temporary: Path, tensors: Sequence[GgufTensor], sizes: Mapping[str, int]
) -> None:
    writer.write_header_to_file(temporary)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    stream = writer.fout[0]
    writer.write_padding(stream, stream.tell())
    with phase("writing the GGUF file", sum(sizes.values()), "bytes") as going:
        for tensor in tensors:
            written = 0
            for piece in _encode_tensor(tensor):
                files.before_operation("write", temporary)
                stream.write(memoryview(piece.numpy()))
                written += piece.numel()
                going.advance(piece.numel())
            if written != sizes[tensor.name]:
                raise RuntimeError(
                    f"{tensor.name}: {written} bytes do not fill the planned {sizes[tensor.name]}"
                )
            writer.write_padding(stream, written)
    stream.flush()
    files.before_operation("flush", temporary)
    os.fsync(stream.fileno())


def _split_rows(values: Tensor) -> Iterator[Tensor]:
    """The rows, some at a time."""
    rows = values.reshape(-1, values.shape[-1])
    yield from rows.split(max(1, _PIECE // max(1, rows.shape[1])))


def _encode_tensor(tensor: GgufTensor) -> Iterator[Tensor]:
    """The tensor's bytes, some rows at a time."""
    kind = tensor.kind
    values = tensor.read()
    for piece in _split_rows(values):
        if not bool(torch.isfinite(piece).all()):
            raise CheckpointError(
                f"{tensor.name}: found NaN or an infinity among the weights; use an earlier state"
            )
        yield encode(piece, kind, tensor.name).contiguous().view(-1)


def encode(rows: Tensor, kind: str, name: str) -> Tensor:
    """The bytes `[rows, bytes of a row]` of weights `[rows, columns]`. CheckpointError: beyond the
    range of fp16.
    """
    if kind in _TORCH:
        cast = rows.to(_TORCH[kind])
        if kind == "F16" and not bool(torch.isfinite(cast).all()):
            raise CheckpointError(
                f"{name}: has weights beyond the range of fp16; write it as bf16 (--gguf bf16)"
            )
        return cast.contiguous().view(torch.uint8)
    if kind.endswith("_K"):
        return encode_blocks(rows, kind.replace("Q", "q"))
    gguf = import_gguf()
    return torch.from_numpy(
        gguf.quants.quantize(rows.float().numpy(), gguf.GGMLQuantizationType[kind])
    )


def check_gguf(out: Path, fields: Mapping[str, Any], tensors: Sequence[GgufTensor]) -> None:
    """Reads the file and compares its metadata and every tensor with what it was made of.

    CheckpointError: it differs by more than the rounding of its types.
    """
    gguf = import_gguf()
    reader = gguf.GGUFReader(out)
    for key, value in fields.items():
        held = reader.get_field(key)
        if held is None or not _is_same_field(held.contents(), value):
            raise _make_fault(out, f"{key} differs")
    found = {held.name: held for held in reader.tensors}
    if list(found) != [tensor.name for tensor in tensors]:
        raise _make_fault(out, "has other tensors")
    with phase("reading the GGUF file back", len(tensors), "tensors") as going:
        for tensor in tensors:
            _check_tensor(gguf, out, tensor, found[tensor.name])
            going.advance(1)


def _is_same_field(held: Any, value: Any) -> bool:
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float32).item() == held
    if isinstance(value, list) and value and isinstance(value[0], float):
        return torch.equal(
            torch.tensor(held, dtype=torch.float32), torch.tensor(value, dtype=torch.float32)
        )
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        return [one.decode("utf-8", errors="replace") for one in value] == held
    return bool(held == value)


def _check_tensor(gguf: Any, out: Path, tensor: GgufTensor, held: Any) -> None:
    """Raise CheckpointError for a tensor that differs by more than its type rounds."""
    kind = tensor.kind
    if held.tensor_type.name != kind or [*reversed(held.shape.tolist())] != list(tensor.shape):
        raise _make_fault(out, f"{tensor.name} has another type or shape")
    stored = held.data.reshape(-1).view("uint8")
    block, size = gguf.GGML_QUANT_SIZES[held.tensor_type]
    at = 0
    for rows in _split_rows(tensor.read()):
        length = rows.numel() // block * size
        piece = torch.from_numpy(stored[at : at + length].copy())
        at += length
        codes = piece.view(rows.shape[0], -1).numpy()
        read = torch.from_numpy(gguf.quants.dequantize(codes, held.tensor_type))
        if kind in _TORCH and not torch.equal(read, rows.to(_TORCH[kind]).float()):
            raise _make_fault(out, f"{tensor.name} has other weights")
        if kind not in _TORCH and not _is_within_rounding(read, rows.float(), kind):
            raise _make_fault(out, f"{tensor.name} differs by more than {kind.lower()} rounds")


def _is_within_rounding(read: Tensor, rows: Tensor, kind: str) -> bool:
    """Whether no weight has changed by more than its type rounds."""
    width = 256 if kind.endswith("_K") else 32
    largest = rows.reshape(-1, width).abs().amax(1, keepdim=True)
    allowed = (
        largest * (_MOST[kind] + _F16_ROUNDING) + 32 * 2.0**-24
    )  # a scale of fp16 may be as small as that
    return bool(((read - rows).reshape(-1, width).abs() <= allowed).all())


def _make_fault(out: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{out}: {what} from what was written; do not use it, and report this")


def encode_blocks(values: Tensor, kind: str) -> Tensor:
    """The bytes `[rows, bytes of a row]` of weights `[rows, columns]`, columns a multiple of 256.

    kind: `q4_K`, `q5_K` or `q6_K`.
    """
    rows, columns = values.shape
    if columns % BLOCK:
        raise ValueError(f"{kind} takes rows of a multiple of {BLOCK} weights, found {columns}")
    blocks = values.reshape(-1, BLOCK)
    encode = (
        _encode_symmetric_blocks
        if kind == "q6_K"
        else lambda part: _encode_shifted_blocks(part, kind)
    )
    pieces = [encode(part.float()) for part in blocks.split(max(1, _BLOCKS_AT_ONCE // BLOCK))]
    return torch.cat(pieces).view(rows, -1)


def _encode_shifted_blocks(blocks: Tensor, kind: str) -> Tensor:
    """q4_K and q5_K: a weight is scale * code - minimum."""
    levels, parts = _LEVELS[kind], blocks.unflatten(1, (8, 32))
    scales, minimums = _fit_shifted(parts, levels, _STRETCHES[kind])
    block_scale, scale_codes = _quantize_to_six_bits(scales)
    block_minimum, minimum_codes = _quantize_to_six_bits(minimums)
    step = block_scale.float() * scale_codes
    shift = block_minimum.float() * minimum_codes
    codes = (
        ((parts + shift[..., None]) * _invert(step)[..., None])
        .round()
        .clamp(0, levels)
        .to(torch.uint8)
    )
    head = torch.cat([block_scale, block_minimum], 1).view(torch.uint8)
    packed = [head, _pack_six_bits(scale_codes.to(torch.uint8), minimum_codes.to(torch.uint8))]
    if kind == "q5_K":
        # the fifth bit of the weights at one place of all eight parts is one byte
        places = torch.arange(8, dtype=torch.uint8)[:, None]
        packed.append(((codes >> 4) << places).sum(1, dtype=torch.uint8))
    low = (codes & 15).unflatten(1, (4, 2))
    packed.append((low[:, :, 0] | (low[:, :, 1] << 4)).flatten(1))
    return torch.cat(packed, 1)


def _fit_shifted(parts: Tensor, levels: int, stretches: list[float]) -> tuple[Tensor, Tensor]:
    """Scale and minimum (both >= 0) of each part `[n, 8, 32]`, by least squares; larger weights
    count for more.
    """
    importance = parts.square().mean(-1, keepdim=True).sqrt() + parts.abs()
    total, moment = importance.sum(-1), (importance * parts).sum(-1)
    best_low, highest = parts.amin(-1).clamp(max=0), parts.amax(-1)
    best_scale = (highest - best_low) / levels
    best_error = torch.full_like(best_scale, math.inf)
    for stretch in (None, *stretches):
        inverse = _invert(highest - best_low) * (levels + (stretch or 0.0))
        codes = ((parts - best_low[..., None]) * inverse[..., None]).round().clamp(0, levels)
        if stretch is None:
            scale, low = best_scale, best_low
        else:
            weighted = importance * codes
            first, second = weighted.sum(-1), (weighted * codes).sum(-1)
            product = (weighted * parts).sum(-1)
            determinant = total * second - first * first
            scale = (total * product - moment * first) / determinant
            low = (second * moment - first * product) / determinant
            only_scale = product / second
            scale, low = torch.where(low > 0, only_scale, scale), low.clamp(max=0)
        error = (importance * (scale[..., None] * codes + low[..., None] - parts).square()).sum(-1)
        better = error < best_error  # never where the fit has no solution
        best_error = torch.where(better, error, best_error)
        best_scale, best_low = (
            torch.where(better, scale, best_scale),
            torch.where(better, low, best_low),
        )
    return best_scale.clamp(min=0), -best_low


def _quantize_to_six_bits(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers `[n, 8]` >= 0 as one in fp16 `[n, 1]` times codes `[n, 8]` from 0 to 63."""
    largest = numbers.amax(-1, keepdim=True)
    codes = (numbers * (_invert(largest) * _SCALE_LEVELS)).round().clamp(0, _SCALE_LEVELS)
    return (largest / _SCALE_LEVELS).half(), codes


def _pack_six_bits(scales: Tensor, minimums: Tensor) -> Tensor:
    """Twice eight codes `[n, 8]` of 6 bits in 12 bytes: those of the first four parts have the
    upper bits of the last four above them.
    """
    first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    second = minimums[:, :4] | ((minimums[:, 4:] >> 4) << 6)
    return torch.cat([first, second, (scales[:, 4:] & 15) | ((minimums[:, 4:] & 15) << 4)], 1)


def _encode_symmetric_blocks(blocks: Tensor) -> Tensor:
    """q6_K: a weight is scale * (code - 32), with codes from 0 to 63 and scales of 8 bits with a
    sign.
    """
    parts = blocks.unflatten(1, (16, 16))
    scales = _fit_symmetric(parts)
    largest = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    block_scale = (largest / -128).half()
    codes_of_scales = (scales * (_invert(largest) * -128)).round().clamp(-128, 127)
    step = block_scale.float() * codes_of_scales
    codes = (parts * _invert(step)[..., None]).round().clamp(-32, 31) + 32
    halves = codes.to(torch.uint8).view(-1, 2, 4, 32)
    low, high = halves & 15, halves >> 4
    lows = torch.stack([low[:, :, 0] | (low[:, :, 2] << 4), low[:, :, 1] | (low[:, :, 3] << 4)], 2)
    highs = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    packed = [lows.flatten(1), highs.flatten(1), codes_of_scales.to(torch.int8).view(torch.uint8)]
    return torch.cat([*packed, block_scale.view(torch.uint8)], 1)


def _fit_symmetric(parts: Tensor) -> Tensor:
    """The scale of each part `[n, 16, 16]`, by least squares weighted with the weights' squares."""
    extreme = parts.gather(-1, parts.abs().argmax(-1, keepdim=True)).squeeze(-1)
    importance = parts.square()
    best_scale, best_gain = torch.zeros_like(extreme), torch.zeros_like(extreme)
    for stretch in _STRETCHES["q6_K"]:
        inverse = _invert(extreme) * -(32 + stretch)
        codes = (parts * inverse[..., None]).round().clamp(-32, 31)
        product = (importance * parts * codes).sum(-1)
        second = (importance * codes.square()).sum(-1)
        gain = product.square() * _invert(
            second
        )  # by how much the squared error is smaller than with zeros
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, product * _invert(second), best_scale)
    return best_scale


def _invert(numbers: Tensor) -> Tensor:
    """1 / numbers, and 0 for 0."""
    return torch.where(numbers == 0, 0.0, 1 / numbers)
