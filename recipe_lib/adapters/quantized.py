"""Keep the frozen weights of linears in 4 or 8 bits, sharded like any other parameter.

`adapters.layers.adapt` puts a `QuantizedLinear` in a linear's place; `fill_weight` quantizes its
weight while it is read, some rows at a time. A part of it is what one rank of a tensor-parallel
group computes with. `dequantize` and `multiply` work on the stored tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function

from recipe_lib.adapters import nf4
from recipe_lib.ops.dtensor_shards import gather_full, get_local, locate_local_part
from recipe_lib.ops.fused_kernels import (
    cut_rows,
    make_opaque_node,
    register_fused,
    register_shaped_work,
    should_fuse,
)

# The parameters of a weight `[out, in]`:
# `nf4`: the flattened matrix is cut into n blocks of 64 elements, see `recipe_lib.adapters.nf4`.
#     `weight_codes` `[n, 32]`, `weight_scales` `[n]`, and `weight_factors` in fp32, one for each
#     group of scales, and the mean of the scales.
# `int8`: `weight_codes` `[out, in]` in [-127, 127], and `weight_factors`, fp32 `[out]`, a row's
#     largest magnitude over 127.
#
# FSDP shards whole blocks or rows, so no shard needs to end where a row of the matrix does. A
# tensor-parallel group cuts at the same blocks, so that values are those of one process: rows of
# the matrix, or columns of whole blocks, whose codes are then `[out, in / 64, 32]`, scales
# `[out, in / 64]`. Each of its ranks has all factors of NF4, which are few.

KINDS = ("nf4", "int8")  # values of `lora.quantize_base` besides `none`
# Any type of 8 bits that counts as floating point: FSDP takes no integers. Codes and scales are
# viewed as integers where they are used. Nothing may convert them: `model.to(dtype)` comes before.
_BITS = torch.float8_e4m3fn
_PIECE_ELEMENTS = 2**23  # elements computed with at a time: 32 MiB in fp32


def dequantize_rows(codes: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `codes [m, n] * factors [m]` (int8), computed in fp32, converted to dtype.

    It is one kernel where chains of operators are fused, else it is computed in pieces.
    """
    if should_fuse(codes.device):
        return _dequantize(codes, factors, dtype)
    rows = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for start, stop in cut_rows(codes.shape[0], codes.shape[1], _PIECE_ELEMENTS):
        piece = slice(start, stop)
        rows[piece].copy_(codes[piece].float().mul_(factors[piece].unsqueeze(1)))
    return rows


@register_fused(
    "dequantize_int8(Tensor codes, Tensor factors, ScalarType dtype) -> Tensor",
    lambda codes, factors, dtype: codes.new_empty(codes.shape, dtype=dtype),
)
def _dequantize(codes: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `codes [m, n] * factors [m]` in dtype, by one expression that can be fused."""
    return (codes.float() * factors.unsqueeze(1)).to(dtype)


def can_quantize(in_features: int, out_features: int, kind: str) -> bool:
    """Return True if a weight `[out, in]` can be kept in `kind`: NF4 needs whole blocks of 64."""
    return kind != "nf4" or in_features * out_features % nf4.BLOCK == 0


def can_cut(
    in_features: int, out_features: int, kind: str, parts: int, *, by_columns: bool
) -> bool:
    """Return True if a weight can be cut into `parts` equal parts, for tensor-parallel ranks.

    NF4 cuts no block. by_columns: cut columns; False: rows.
    """
    length, width = (in_features, 1) if by_columns else (out_features, in_features)
    return length % parts == 0 and (kind != "nf4" or length // parts * width % nf4.BLOCK == 0)


def _list_shapes_to_fill(linear: "QuantizedLinear", *_: Any) -> list[Any]:
    """Return the sizes that decide which operators `_fill_nf4` runs, for `tune plan`."""
    parameters = (linear.weight_codes, linear.weight_scales, linear.weight_factors)
    parts = [locate_local_part(parameter) for parameter in parameters if parameter is not None]
    sizes = (linear.in_features, linear.out_features, linear.rows, linear.columns, linear.dtype)
    # Codes in host memory are copied there, for which the host waits.
    devices = (linear.get_working_device(), parts[0][0].device)
    return [*sizes, *devices, *((part.shape, first) for part, first in parts)]


class QuantizedLinear(nn.Module):
    """A linear with a frozen weight of 4 or 8 bits.

    The weight is dequantized to `dtype` for each product. Only the stored tensors are saved for
    backward, which dequantizes a second time.
    """

    bias: nn.Parameter | None
    num_experts: int = 1  # matrices that are one above the other
    output_dim: int = 0  # dimension of the weight that has output channels, in files
    # (rank, size) of the tensor-parallel group, see `take_part_of_runs`; None: not divided so
    cut: tuple[int, int] | None = None

    def __init__(self, base: nn.Linear, kind: str) -> None:
        """Take the place of the linear `base`, on the meta device, and take over its bias.

        kind: of KINDS. Raises ValueError for another kind, for a weight that `can_quantize` refuses
        and for one in fp64.
        """
        nn.Module.__init__(self)
        is_possible = kind in KINDS and can_quantize(base.in_features, base.out_features, kind)
        if not is_possible or base.weight.dtype not in nf4.DTYPES:
            raise ValueError(
                f"a weight of {base.out_features} x {base.in_features} numbers of type"
                f" {base.weight.dtype} cannot be kept as {kind}"
            )
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.kind = kind
        self.dtype = base.weight.dtype  # of the dequantized weight
        # What this process computes with, as (first, one after the last)
        self.rows = (0, base.out_features)
        self.columns = (0, base.in_features)
        self.bias = base.bias
        # Where to quantize, if `memory.stream_layers` keeps the parameters on the host between
        # forwards; None: see `get_working_device`.
        self.computes_on: torch.device | None = None
        device = base.weight.device
        blocks = base.in_features * base.out_features // nf4.BLOCK
        codes = (blocks, nf4.BLOCK // 2) if kind == "nf4" else (base.out_features, base.in_features)
        num_factors = nf4.count_factors(blocks) if kind == "nf4" else base.out_features
        self.weight_codes = make_frozen_parameter(codes, _BITS, device)
        self.weight_scales = (
            make_frozen_parameter((blocks,), _BITS, device) if kind == "nf4" else None
        )
        self.weight_factors = make_frozen_parameter((num_factors,), torch.float32, device)

    def take_part(self, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        """Compute with these rows and columns from now on, each as (first, one after the last).

        For a tensor-parallel group, on the meta device. The parameters are still those of the whole
        weight; for a part of the columns of NF4 they get the shapes `[out, in / 64, ...]`, so that
        the caller can shard them at the part. The part is one that `can_cut` allows.
        """
        self.rows = rows
        self.columns = columns
        if self.weight_scales is not None and columns != (0, self.in_features):
            device = self.weight_codes.device
            blocks = (self.out_features, self.in_features // nf4.BLOCK)
            self.weight_codes = make_frozen_parameter((*blocks, nf4.BLOCK // 2), _BITS, device)
            self.weight_scales = make_frozen_parameter(blocks, _BITS, device)

    def take_part_of_runs(self, runs: int, rank: int, size: int) -> None:
        """Compute with part `rank` of `size` of each run of consecutive rows from now on.

        runs: how many equal runs all rows are cut into. For a tensor-parallel group, on the meta
        device. Codes and scales of NF4 become `[runs, blocks, 32]` and `[runs, blocks]`, codes and
        factors of int8 `[runs, rows, i]` and `[runs, rows]`: the caller shards their second
        dimension.
        """
        self.cut = (rank, size)
        names = ("codes", "factors" if self.weight_scales is None else "scales")
        for name in (f"weight_{kind}" for kind in names):
            whole = self.get_parameter(name)
            shape = (runs, whole.shape[0] // runs, *whole.shape[1:])
            setattr(self, name, make_frozen_parameter(shape, whole.dtype, whole.device))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `[..., out]` of hidden `[..., in]`, in hidden's dtype."""
        return self.product(hidden, self.bias)

    def product(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `[..., r]` of hidden `[..., c]`.

        r, c: the number of rows and columns that this process computes with.
        """
        # A torch function mode sees one call, of a linear, and none of what it consists of.
        if not torch.compiler.is_dynamo_compiling() and has_torch_function((hidden,)):
            arguments = (hidden, self.weight_codes, bias)
            return cast(Tensor, handle_torch_function(self.linear, (hidden,), *arguments))
        return self.linear(hidden, self.weight_codes, bias)

    def linear(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `product`, called as `F.linear` is; weight is not read."""
        return multiply(hidden, *self.list_product_arguments(bias))

    def list_product_arguments(self, bias: Tensor | None) -> tuple[Any, ...]:
        """Return the arguments of `multiply_quantized` after hidden."""
        first, last = self.columns
        storage = self._get_local_storage()
        return *storage, bias, last - first, self.dtype, self._get_block_place()

    def count_local_rows(self) -> int:
        """Return how many rows, or parts of them, this rank stores.

        They are more than it computes with where the caller of `take_part` did not shard.
        """
        first, last = self.columns
        return count_rows(get_local(self.weight_codes), self.weight_scales, last - first)

    def _get_local_storage(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return codes, scales and factors of the part that this process computes with.

        Scales are None for int8.
        """
        codes = get_local(self.weight_codes)
        factors = get_local(self.weight_factors)
        scales = None if self.weight_scales is None else get_local(self.weight_scales)
        first, last = self.rows
        is_whole = self.count_local_rows() <= last - first
        if scales is None:
            rows = slice(None) if is_whole else slice(first, last)
            return codes[rows], None, factors[rows]
        if codes.dim() == 3:
            return codes.flatten(0, 1), scales.flatten(), factors
        if is_whole:
            return codes, scales, factors
        blocks = slice(first * self.in_features // nf4.BLOCK, last * self.in_features // nf4.BLOCK)
        return codes[blocks], scales[blocks], factors

    def _get_block_place(self) -> list[int]:
        """Return which of the whole weight's blocks the part has: [begin, run, stride, total].

        That is `run` blocks from number `begin` on, then as many from `begin + stride` on, and so
        forth, of `total` blocks. []: all of them, or int8.
        """
        top, bottom = self.rows
        first, last = self.columns
        shape = (bottom - top, last - first)
        is_whole = self.cut is None and shape == (self.out_features, self.in_features)
        if self.kind != "nf4" or is_whole:
            return []
        blocks = self.out_features * self.in_features // nf4.BLOCK
        if self.cut is not None:
            rank, size = self.cut
            _, stride, _ = self.weight_codes.shape
            return [rank * (stride // size), stride // size, stride, blocks]
        begin = (top * self.in_features + first) // nf4.BLOCK
        if last - first == self.in_features:
            return [begin, blocks, blocks, blocks]
        return [begin, (last - first) // nf4.BLOCK, self.in_features // nf4.BLOCK, blocks]

    def dequantize_weight(self) -> Tensor:
        """Return the weight `[out, in]`, in the dtype that it was quantized from.

        A module that is sharded must be gathered.
        """
        return self.dequantize_weight_rows(0, self.out_features)

    @torch.no_grad()
    def dequantize_local_weight(self) -> Tensor:
        """Return the rows and columns of the weight that this process computes with."""
        first, last = self.columns
        return dequantize(
            *self._get_local_storage(), last - first, self.dtype, self._get_block_place()
        )

    @torch.no_grad()
    def dequantize_weight_rows(self, start: int, stop: int) -> Tensor:
        storage = (self.weight_codes, self.weight_scales, self.weight_factors)
        # By position: in a plan `dequantize` is replaced by a function that takes no keywords.
        return dequantize(*storage, self.in_features, self.dtype, (), start, stop)

    @torch.no_grad()
    def fill_weight(self, read_rows: Callable[[int, int, slice], Tensor]) -> None:
        """Quantize a weight while it is read: each rank its own blocks or rows, some at a time.

        read_rows: `fn(start, stop, columns)` returns those rows and columns of the weight, in any
        dtype, on any device. A collective of the ranks that share the weight: they exchange the
        largest magnitudes of blocks, or of rows that are cut. So scales are those of the whole
        matrix, the same bits for any number of ranks.
        """
        if self.kind == "nf4":
            self._fill_nf4(read_rows)
        else:
            self._fill_int8(read_rows)

    def get_working_device(self) -> torch.device:
        """Return the device to quantize on: the accelerator, also for parameters in host memory."""
        if self.computes_on is not None:
            return self.computes_on
        codes = self.weight_codes
        if isinstance(codes, DTensor):
            return torch.device(codes.device_mesh.device_type)
        return codes.device

    # Shaped work: its operators follow from shapes, so that `tune plan` simulates one call for all
    # calls with the same.
    @register_shaped_work(_list_shapes_to_fill)
    def _fill_nf4(self, read_rows: Callable[[int, int, slice], Tensor]) -> None:
        codes, (begin, *_) = locate_local_part(self.weight_codes)
        device = self.get_working_device()
        largest = torch.zeros(codes.shape[:-1], dtype=self.dtype, device=device)
        for start, stop in cut_rows(len(codes), 2 * codes.shape[1:].numel(), _PIECE_ELEMENTS):
            blocks = self._read_blocks(read_rows, begin + start, begin + stop)
            blocks = blocks.to(device, self.dtype)
            quantized, magnitudes = nf4.quantize_blocks(blocks.view(-1, nf4.BLOCK))
            codes[start:stop].copy_(quantized.view(_BITS).view(codes[start:stop].shape))
            largest[start:stop] = magnitudes.view(largest[start:stop].shape)
        # Scales are quantized by the mean of all of them, and in groups that may cross ranks.
        all_largest = gather_full(largest, self.weight_codes, self.weight_codes.shape[:-1])
        scales, factors = nf4.quantize_scales(all_largest.flatten())
        if self.weight_scales is not None:
            _copy_local_part(self.weight_scales, scales.view(_BITS))
        _copy_local_part(self.weight_factors, factors)

    def _read_blocks(
        self, read_rows: Callable[[int, int, slice], Tensor], start: int, stop: int
    ) -> Tensor:
        """Return the elements of blocks `start` to `stop` (exclusive), flat.

        Where columns are cut, and in int8, start and stop are rows, of which this part's columns
        are returned. Where runs are cut, they are runs, of which its rows are.
        """
        if self.cut is not None:
            rank, size = self.cut
            height = self.out_features // self.weight_codes.shape[0]  # rows of a run
            first = rank * height // size
            last = (rank + 1) * height // size
            runs = [
                read_rows(run * height + first, run * height + last, slice(None)).flatten()
                for run in range(start, stop)
            ]
            return torch.cat(runs)
        if self.weight_scales is None or self.weight_codes.dim() == 3:
            return read_rows(start, stop, slice(*self.columns)).flatten()
        # Blocks need not begin and end with a row.
        width = self.in_features
        top = start * nf4.BLOCK // width
        rows = read_rows(top, -(-stop * nf4.BLOCK // width), slice(None)).flatten()
        return rows[start * nf4.BLOCK - top * width : stop * nf4.BLOCK - top * width]

    def _fill_int8(self, read_rows: Callable[[int, int, slice], Tensor]) -> None:
        codes, (begin, *_) = locate_local_part(self.weight_codes)
        factors, _ = locate_local_part(self.weight_factors)
        device = self.get_working_device()
        pieces = cut_rows(len(codes), codes.shape[1:].numel(), _PIECE_ELEMENTS)
        largest = torch.zeros(codes.shape[:-1], device=device)

        # Rows count from 0 in this rank's part.
        def read(start: int, stop: int) -> Tensor:
            values = self._read_blocks(read_rows, begin + start, begin + stop)
            return values.to(device, self.dtype).float().view(codes[start:stop].shape)

        def quantize(start: int, stop: int, values: Tensor) -> None:
            factor = largest[start:stop] / 127
            steps = values / factor.masked_fill(factor == 0, 1).unsqueeze(-1)
            codes[start:stop].copy_(steps.round_().clamp_(-127, 127).to(torch.int8).view(_BITS))
            factors[start:stop].copy_(factor)

        # Of a row that is cut, another rank may have the largest element. Then rows are read
        # twice, as they are not kept in between.
        is_cut = self.columns != (0, self.in_features)
        for start, stop in pieces:
            values = read(start, stop)
            largest[start:stop] = values.abs().amax(dim=-1)
            if not is_cut:
                quantize(start, stop, values)
        if is_cut:
            parameter = self.weight_codes
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            for dim, placement in enumerate(placements):
                if placement.is_shard(1):
                    group = parameter.device_mesh.get_group(dim)
                    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            for start, stop in pieces:
                quantize(start, stop, read(start, stop))


@torch.no_grad()
def fake_quantize_weight(weight: Tensor, kind: str) -> Tensor:
    """Return a full weight `[out, in]` quantized to `kind` and dequantized, in its own dtype.

    These are the values that a model with such a base is trained with, if the weight's dtype is
    that of the run (config key `dtype`).
    """
    linear = nn.Linear(
        weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype
    )
    module = QuantizedLinear(linear, kind).to_empty(device=weight.device)
    module.fill_weight(lambda start, stop, columns: weight[start:stop, columns])
    return module.dequantize_weight()


def make_frozen_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """Return a parameter without values and without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def _copy_local_part(parameter: Tensor, values: Tensor) -> None:
    local, offset = locate_local_part(parameter)
    part = tuple(
        slice(first, first + size) for first, size in zip(offset, local.shape, strict=True)
    )
    local.copy_(values.view(parameter.shape)[part])


@register_shaped_work()
def dequantize(
    codes: Tensor,
    scales: Tensor | None,
    factors: Tensor,
    columns: int,
    dtype: torch.dtype,
    place: Sequence[int] = (),
    start: int = 0,
    stop: int | None = None,
) -> Tensor:
    """Return rows `start` to `stop` (exclusive) of a weight or a part of it, in dtype.

    codes, scales, factors: as stored; scales None: int8. columns: of a row. place: which blocks of
    the weight the part has, see `nf4.compute_block_numbers`; empty: all. stop: None: to the end.
    """
    if scales is None:
        rows = codes.flatten(0, -2)[start:stop].view(torch.int8)
        return dequantize_rows(rows, factors.flatten()[start:stop], dtype)
    first = start * columns
    last = len(codes) * nf4.BLOCK if stop is None else stop * columns
    # Blocks need not begin and end with a row.
    first_block = first // nf4.BLOCK
    elements = nf4.dequantize(
        codes.view(torch.uint8),
        scales=scales.view(torch.int8),
        factors=factors,
        dtype=dtype,
        first=first_block,
        last=-(-last // nf4.BLOCK),
        place=place,
    ).flatten()
    offset = first_block * nf4.BLOCK
    return elements[first - offset : last - offset].view(-1, columns)


def multiply_quantized(
    hidden: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    factors: Tensor,
    bias: Tensor | None,
    columns: int,
    dtype: torch.dtype,
    place: Sequence[int],
) -> Tensor:
    """Return `hidden @ weight.T + bias`, in hidden's dtype; see `dequantize`."""
    storage = (codes, scales, factors)
    return F.linear(hidden, dequantize(*storage, columns, dtype, place).to(hidden.dtype), bias)


def differentiate_quantized(
    gradient: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    factors: Tensor,
    bias: Tensor | None,
    columns: int,
    dtype: torch.dtype,
    place: Sequence[int],
) -> Tensor:
    """Return the gradient of hidden, given that of the result of `multiply_quantized`."""
    storage = (codes, scales, factors)
    return gradient @ dequantize(*storage, columns, dtype, place).to(gradient.dtype)


def count_rows(codes: Tensor, scales: Tensor | None, columns: int) -> int:
    """Return how many rows of so many columns the codes stand for; scales None: int8."""
    return codes.numel() * (1 if scales is None else 2) // columns


# Called as `multiply_quantized` is, and differentiable by hidden. Saves the codes for backward,
# which are parameters anyway, and neither hidden nor weight: `kept` are the indices of the
# arguments that `differentiate_quantized` takes after the gradient.
multiply = make_opaque_node(
    "quantized_linear",
    function=multiply_quantized,
    shapes=lambda hidden, codes, scales, factors, bias, columns, *_: hidden.new_empty(
        (*hidden.shape[:-1], count_rows(codes, scales, columns))
    ),
    gradient=differentiate_quantized,
    gradient_shapes=lambda gradient, codes, scales, factors, bias, columns, *_: gradient.new_empty(
        (*gradient.shape[:-1], columns)
    ),
    kept=range(1, 8),
)
