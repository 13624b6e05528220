"""Write a GGUF file a part of a tensor at a time, and read it back.

`gguf_adapter` calls `choose_types`, `write_gguf` and `check_gguf`. The package `gguf` writes the
head of the file and encodes weights in blocks of up to 32. The types q4_K, q5_K and q6_K, in blocks
of 256, it reads and does not write: `encode_blocks` does.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
# Kind of file -> type of all its matrices; q4_k_m mixes types.
_MATRIX_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
# Type in blocks of 256 -> one of about as many bits in blocks of 32, for rows that are not whole
# blocks of 256.
_FALLBACK_TYPES = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def choose_types(
    shapes: Mapping[str, tuple[int, ...]], kind: str, layers: int, *, large: bool = False
) -> dict[str, str]:
    """Return the type of each tensor of a file, by its name in the file.

    They are those of llama.cpp's own conversion and quantization. Vectors and tables of factors
    stay in fp32.

    shapes: of all tensors by name, rows first. kind: `f16`, `bf16`, `f32`, `q8_0` or `q4_k_m`.
    layers: their number. large: a model of 80 layers whose value heads serve several query heads,
    where value projections get one more bit.
    """
    is_tied = "output.weight" not in shapes
    types: dict[str, str] = {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            types[name] = "F32"
            continue
        columns = shape[-1]
        best = _MATRIX_TYPES.get(kind) or _choose_mixed_type(
            name, columns, layers=layers, large=large, tied=is_tied
        )
        # fp16 if rows are no whole blocks of either.
        candidates = (best, _FALLBACK_TYPES.get(best, "F16"))
        fitting = (type_ for type_ in candidates if columns % BLOCK_SIZES[type_] == 0)
        types[name] = next(fitting, "F16")
    return types


def _choose_mixed_type(name: str, columns: int, *, layers: int, large: bool, tied: bool) -> str:
    """Return the type of a matrix in q4_k_m: 4 bits, and more for the matrices that matter most.

    These are the output projection, and in half of the layers the value projection (`attn_qkv`
    where it is one matrix with query and key) and the down projection.

    name: in the GGUF file. layers, large: as for `choose_types`. tied: the output projection is the
    embedding.
    """
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return "Q8_0" if columns % BLOCK_SIZES["Q4_K"] else "Q6_K"
    match = re.fullmatch(r"blk\.(\d+)\.(attn_v|ffn_down|attn_qkv)\.weight", name)
    if match is None:
        return "Q4_K"
    layer = int(match[1])
    eighth = layers // 8
    # The first eighth of the layers, the last, and every third between.
    if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
        return "Q6_K"
    return "Q5_K" if large and match[2] != "ffn_down" else "Q4_K"


_PIECE_WEIGHTS = 2**22  # weights that are converted at a time
# Types without blocks -> torch's.
_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Type -> the most that a weight may change, as a share of the largest in its block: half a step of
# the codes, a whole one where the outermost codes stop short of the largest weight, and the
# rounding of its parts' scales.
_MAX_CHANGES = {
    "Q8_0": 0.5 / 127,
    "Q6_K": 0.045,
    "Q5_0": 1 / 16,
    "Q5_1": 0.04,
    "Q5_K": 0.09,
    "Q4_K": 0.17,
}
_F16_ROUNDING = 2.0**-10  # relative rounding of the scales of blocks, which are in fp16
BLOCK = 256  # weights
_LEVELS = {"q4_K": 15, "q5_K": 31}  # type -> the largest code of a weight
_SCALE_LEVELS = 63  # the largest code of a part's scale or minimum, of 6 bits
# Type -> stretches that are tried: weights are rounded as if their part's range had so many levels
# more (or fewer) than the type has codes.
_STRETCHES = {
    "q4_K": [round(-1 + 0.1 * step, 1) for step in range(21)],
    "q5_K": [round(-0.5 + 0.1 * step, 1) for step in range(16)],
    "q6_K": [round(0.1 * step, 1) for step in range(-9, 10)],
}
# Weights that are worked on together: as many as stay in a processor's cache.
_WEIGHTS_AT_ONCE = 2**18


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file."""

    # In the file.
    name: str
    # In the file, rows first.
    shape: tuple[int, ...]
    # The format's name of its type.
    kind: str
    # Returns its values as they are in the model.
    read: Callable[[], Tensor]


def import_gguf() -> Any:
    """Return the package `gguf`. Raises SetupError if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise SetupError(f"--gguf: found no package gguf; {format_install_line('gguf')}") from None
    return gguf


def write_gguf(
    out: Path, architecture: str, fields: Mapping[str, Any], tensors: Sequence[GgufTensor]
) -> None:
    """Write the file `out`, which takes its name when it is whole.

    architecture: llama.cpp's name. fields: metadata by full keys; an int is written as 32 bits
    without a sign, a float as fp32. Raises StorageError if the disk refuses, CheckpointError for
    weights that are not finite or beyond the range of their type; then there is no file.
    """
    gguf = import_gguf()
    types = {tensor.name: gguf.GGMLQuantizationType[tensor.kind] for tensor in tensors}
    sizes: dict[str, int] = {}
    for tensor in tensors:
        block, block_bytes = gguf.GGML_QUANT_SIZES[types[tensor.name]]
        sizes[tensor.name] = math.prod(tensor.shape) // block * block_bytes
    with files.report_storage_faults():
        files.remove_leftovers(out.parent, out.name)  # first: they take the space
        files.require_space(out.parent, sum(sizes.values()) + 64 * MIB, "the GGUF file")
        writer = gguf.GGUFWriter(None, architecture)
        _put_fields(writer, fields)
        for tensor in tensors:
            dtype = torch.empty(0).numpy().dtype  # required, and ignored since `raw_dtype` is given
            writer.add_tensor_info(
                tensor.name, tensor.shape, dtype, sizes[tensor.name], raw_dtype=types[tensor.name]
            )
        with files.write_aside(out, replace=False) as temporary, closing(writer):
            files.before_operation("open", temporary)
            _write_all(writer, temporary=temporary, tensors=tensors, sizes=sizes)


def _put_fields(writer: Any, fields: Mapping[str, Any]) -> None:
    add_by_type = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in fields.items():
        add_by_type[type(value)](key, value)  # by `type`, since a bool is an int too


# Write head and tensors and flush them. sizes: bytes of each tensor in the file, by name.
def _write_all(
    writer: Any, temporary: Path, tensors: Sequence[GgufTensor], sizes: Mapping[str, int]
) -> None:
    writer.write_header_to_file(temporary)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # The package takes whole tensors alone, so their bytes are written into its file directly.
    stream = writer.fout[0]
    writer.write_padding(stream, stream.tell())
    with phase("writing the GGUF file", sum(sizes.values()), "bytes") as progress:
        for tensor in tensors:
            num_bytes = 0
            for piece in _encode_tensor(tensor):
                files.before_operation("write", temporary)
                stream.write(memoryview(piece.numpy()))
                num_bytes += piece.numel()
                progress.advance(piece.numel())
            if num_bytes != sizes[tensor.name]:
                raise RuntimeError(
                    f"{tensor.name}: {num_bytes} bytes do not fill the planned {sizes[tensor.name]}"
                )
            writer.write_padding(stream, num_bytes)
    stream.flush()
    files.before_operation("flush", temporary)
    os.fsync(stream.fileno())


def _split_rows(values: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's rows `[n, columns]`, about _PIECE_WEIGHTS at a time; a vector is one row."""
    rows = values.reshape(-1, values.shape[-1])
    yield from rows.split(max(1, _PIECE_WEIGHTS // max(1, rows.shape[1])))


def _encode_tensor(tensor: GgufTensor) -> Iterator[Tensor]:
    """Yield the tensor's bytes, some rows at a time. Raises CheckpointError for NaN or infinity."""
    for piece in _split_rows(tensor.read()):
        if not bool(torch.isfinite(piece).all()):
            raise CheckpointError(
                f"{tensor.name}: found NaN or an infinity among the weights; use an earlier state"
            )
        yield encode(piece, tensor.kind, tensor.name).contiguous().view(-1)


def encode(rows: Tensor, kind: str, name: str) -> Tensor:
    """Return the bytes `[rows, bytes of a row]` of weights `[rows, columns]`.

    kind: the format's name of the type. name: of the tensor, for errors. Raises CheckpointError if
    the type is fp16 and a weight is beyond its range.
    """
    if kind in _TORCH_DTYPES:
        cast = rows.to(_TORCH_DTYPES[kind])
        if kind == "F16" and not bool(torch.isfinite(cast).all()):
            raise CheckpointError(
                f"{name}: has weights beyond the range of fp16; write it as bf16 (--gguf bf16)"
            )
        return cast.contiguous().view(torch.uint8)
    if kind.endswith("_K"):
        return encode_blocks(rows, kind.replace("Q", "q"))
    gguf = import_gguf()
    codes = gguf.quants.quantize(rows.float().numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(codes)


def check_gguf(out: Path, fields: Mapping[str, Any], tensors: Sequence[GgufTensor]) -> None:
    """Read the file and compare its metadata and every tensor with what it was made of.

    fields, tensors: as for `write_gguf`. Raises CheckpointError if the file differs by more than
    the rounding of its types.
    """
    gguf = import_gguf()
    reader = gguf.GGUFReader(out)
    for key, value in fields.items():
        file_field = reader.get_field(key)
        if file_field is None or not _is_same_field(file_field.contents(), value):
            raise _make_fault(out, f"{key} differs")
    file_tensors = {file_tensor.name: file_tensor for file_tensor in reader.tensors}
    if list(file_tensors) != [tensor.name for tensor in tensors]:
        raise _make_fault(out, "has other tensors")
    with phase("reading the GGUF file back", len(tensors), "tensors") as progress:
        for tensor in tensors:
            _check_tensor(gguf, out, tensor=tensor, file_tensor=file_tensors[tensor.name])
            progress.advance(1)


# Return True if a field reads back as it was written. contents: in the file.
def _is_same_field(contents: Any, value: Any) -> bool:
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float32).item() == contents
    if isinstance(value, list) and value and isinstance(value[0], float):
        written = torch.tensor(value, dtype=torch.float32)
        return torch.equal(torch.tensor(contents, dtype=torch.float32), written)
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        # The package decodes pieces of a vocabulary, some of which are no whole characters.
        return [piece.decode("utf-8", errors="replace") for piece in value] == contents
    return bool(contents == value)


def _check_tensor(gguf: Any, out: Path, *, tensor: GgufTensor, file_tensor: Any) -> None:
    """Raise CheckpointError for a tensor that differs by more than its type rounds.

    gguf: the package. file_tensor: its reader's view of the tensor in the file.
    """
    kind = tensor.kind
    tensor_type = file_tensor.tensor_type
    # The format has the fastest dimension first.
    file_shape = tuple(reversed(file_tensor.shape.tolist()))
    if tensor_type.name != kind or file_shape != tensor.shape:
        raise _make_fault(out, f"{tensor.name} has another type or shape")
    file_bytes = file_tensor.data.reshape(-1).view("uint8")
    block, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
    start = 0
    for rows in _split_rows(tensor.read()):
        num_bytes = rows.numel() // block * block_bytes
        # The file is mapped read-only, which torch warns of.
        piece = torch.from_numpy(file_bytes[start : start + num_bytes].copy())
        start += num_bytes
        codes = piece.view(rows.shape[0], -1).numpy()
        decoded = torch.from_numpy(gguf.quants.dequantize(codes, tensor_type))
        if kind in _TORCH_DTYPES and not torch.equal(decoded, rows.to(_TORCH_DTYPES[kind]).float()):
            raise _make_fault(out, f"{tensor.name} has other weights")
        if kind not in _TORCH_DTYPES and not _is_within_rounding(decoded, rows.float(), kind):
            raise _make_fault(out, f"{tensor.name} differs by more than {kind.lower()} rounds")


def _is_within_rounding(decoded: Tensor, rows: Tensor, kind: str) -> bool:
    """Return True if no weight has changed by more than its type rounds.

    decoded, rows: weights `[n, columns]` from the file, and from the model.
    """
    block = BLOCK_SIZES[kind]
    largest = rows.reshape(-1, block).abs().amax(1, keepdim=True)
    allowed = largest * (_MAX_CHANGES[kind] + _F16_ROUNDING)
    allowed += 32 * 2.0**-24  # where a scale is as small as fp16's smallest steps
    return bool(((decoded - rows).reshape(-1, block).abs() <= allowed).all())


def _make_fault(out: Path, fault: str) -> CheckpointError:
    return CheckpointError(f"{out}: {fault} from what was written; do not use it, and report this")


def encode_blocks(values: Tensor, kind: str) -> Tensor:
    """Return the bytes `[rows, bytes of a row]` of weights `[rows, columns]` in blocks of 256.

    A block consists of parts of 32 weights (q6_K: 16), and has one or two numbers in fp16. A part
    has its scale as a small integer, a multiple of the first number; in q4_K and q5_K also its
    minimum (how far below zero its smallest weight may be), a multiple of the second. For each part
    several roundings of its weights are fitted, and the scale and minimum with the least weighted
    squared error are taken.

    kind: `q4_K`, `q5_K` or `q6_K`. Raises ValueError if the columns are no multiple of 256.
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
    pieces = [encode(part.float()) for part in blocks.split(max(1, _WEIGHTS_AT_ONCE // BLOCK))]
    return torch.cat(pieces).view(rows, -1)


def _encode_shifted_blocks(blocks: Tensor, kind: str) -> Tensor:
    """Return the bytes of blocks `[n, 256]` in q4_K or q5_K: a weight is scale * code - minimum."""
    levels = _LEVELS[kind]
    parts = blocks.unflatten(1, (8, 32))
    scales, minimums = _fit_shifted(parts, levels, _STRETCHES[kind])
    block_scale, scale_codes = _quantize_to_six_bits(scales)
    block_minimum, minimum_codes = _quantize_to_six_bits(minimums)
    step = block_scale.float() * scale_codes
    shift = block_minimum.float() * minimum_codes
    # With the scales and minimums as they are in the file, so that their rounding is made up for.
    codes = ((parts + shift[..., None]) * _invert(step)[..., None]).round()
    codes = codes.clamp(0, levels).to(torch.uint8)
    head = torch.cat([block_scale, block_minimum], 1).view(torch.uint8)
    packed = [head, _pack_six_bits(scale_codes.to(torch.uint8), minimum_codes.to(torch.uint8))]
    if kind == "q5_K":
        # The fifth bits of the weights at one place of all eight parts are one byte.
        bits = torch.arange(8, dtype=torch.uint8)[:, None]
        packed.append(((codes >> 4) << bits).sum(1, dtype=torch.uint8))
    # Two neighboring parts share their bytes: the first has the lower four bits.
    low = (codes & 15).unflatten(1, (4, 2))
    packed.append((low[:, :, 0] | (low[:, :, 1] << 4)).flatten(1))
    return torch.cat(packed, 1)


def _fit_shifted(parts: Tensor, levels: int, stretches: list[float]) -> tuple[Tensor, Tensor]:
    """Return scale and minimum `[n, 8]` (both >= 0) of parts `[n, 8, 32]`, by least squares.

    The errors of larger weights count for more, as in llama.cpp.

    levels: the largest code. stretches: see _STRETCHES.
    """
    importance = parts.square().mean(-1, keepdim=True).sqrt() + parts.abs()
    total = importance.sum(-1)
    moment = (importance * parts).sum(-1)
    best_low = parts.amin(-1).clamp(max=0)
    highest = parts.amax(-1)
    best_scale = (highest - best_low) / levels
    best_error = torch.full_like(best_scale, math.inf)
    for stretch in (None, *stretches):
        inverse = _invert(highest - best_low) * (levels + (stretch or 0.0))
        codes = ((parts - best_low[..., None]) * inverse[..., None]).round().clamp(0, levels)
        scale = best_scale
        low = best_low
        if stretch is not None:
            # The line scale * code + low through these codes: the normal equations of two unknowns.
            weighted = importance * codes
            code_sum = weighted.sum(-1)
            square_sum = (weighted * codes).sum(-1)
            product_sum = (weighted * parts).sum(-1)
            determinant = total * square_sum - code_sum * code_sum
            scale = (total * product_sum - moment * code_sum) / determinant
            low = (square_sum * moment - code_sum * product_sum) / determinant
            # The format has no minimum above 0: the line goes through 0 then.
            scale = torch.where(low > 0, product_sum / square_sum, scale)
            low = low.clamp(max=0)
        error = (importance * (scale[..., None] * codes + low[..., None] - parts).square()).sum(-1)
        is_better = error < best_error  # never where the fit has no solution
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
        best_low = torch.where(is_better, low, best_low)
    return best_scale.clamp(min=0), -best_low


def _quantize_to_six_bits(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers `[n, 8]` >= 0 as one in fp16 `[n, 1]` times codes `[n, 8]` from 0 to 63."""
    largest = numbers.amax(-1, keepdim=True)
    codes = (numbers * (_invert(largest) * _SCALE_LEVELS)).round().clamp(0, _SCALE_LEVELS)
    return (largest / _SCALE_LEVELS).half(), codes


def _pack_six_bits(scales: Tensor, minimums: Tensor) -> Tensor:
    """Return two tensors of codes `[n, 8]` of 6 bits in 12 bytes `[n, 12]`."""
    # Above the 6 bits of the first four parts stand the upper 2 bits of the last four.
    first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    second = minimums[:, :4] | ((minimums[:, 4:] >> 4) << 6)
    # The lower 4 bits of the last four parts share bytes.
    return torch.cat([first, second, (scales[:, 4:] & 15) | ((minimums[:, 4:] & 15) << 4)], 1)


def _encode_symmetric_blocks(blocks: Tensor) -> Tensor:
    """Return the bytes of blocks `[n, 256]` in q6_K: a weight is scale * (code - 32).

    Codes are from 0 to 63, scales have 8 bits with a sign.
    """
    parts = blocks.unflatten(1, (16, 16))
    scales = _fit_symmetric(parts)
    largest = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    block_scale = (largest / -128).half()
    scale_codes = (scales * (_invert(largest) * -128)).round().clamp(-128, 127)
    step = block_scale.float() * scale_codes
    codes = (parts * _invert(step)[..., None]).round().clamp(-32, 31) + 32
    # In each half of the block four runs of 32 weights: the lower 4 bits of two runs share a byte,
    # the upper 2 bits of all four another one.
    halves = codes.to(torch.uint8).view(-1, 2, 4, 32)
    low = halves & 15
    high = halves >> 4
    lows = torch.stack([low[:, :, 0] | (low[:, :, 2] << 4), low[:, :, 1] | (low[:, :, 3] << 4)], 2)
    highs = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    scale_bytes = scale_codes.to(torch.int8).view(torch.uint8)
    block_scale_bytes = block_scale.view(torch.uint8)
    return torch.cat([lows.flatten(1), highs.flatten(1), scale_bytes, block_scale_bytes], 1)


def _fit_symmetric(parts: Tensor) -> Tensor:
    """Return the scale `[n, 16]` of parts `[n, 16, 16]`, by least squares.

    The error of a weight counts by its square.
    """
    extreme = parts.gather(-1, parts.abs().argmax(-1, keepdim=True)).squeeze(-1)
    importance = parts.square()
    best_scale = torch.zeros_like(extreme)
    best_gain = torch.zeros_like(extreme)
    for stretch in _STRETCHES["q6_K"]:
        inverse = _invert(extreme) * -(32 + stretch)
        codes = (parts * inverse[..., None]).round().clamp(-32, 31)
        product_sum = (importance * parts * codes).sum(-1)
        square_sum = (importance * codes.square()).sum(-1)
        # By how much the squared error is smaller than with a scale of 0.
        gain = product_sum.square() * _invert(square_sum)
        is_better = gain > best_gain
        best_gain = torch.where(is_better, gain, best_gain)
        best_scale = torch.where(is_better, product_sum * _invert(square_sum), best_scale)
    return best_scale


def _invert(numbers: Tensor) -> Tensor:
    """Return 1 / numbers, and 0 for 0: a part of zeros has the scale 0."""
    return torch.where(numbers == 0, 0.0, 1 / numbers)
