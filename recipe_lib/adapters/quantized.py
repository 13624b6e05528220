"""Linears whose frozen weight is kept in 4 or 8 bits, sharded like any other parameter and never
whole in between.

`nf4`: blocks of 64 numbers of the flattened matrix `[out, in]`, see `recipe_lib.adapters.nf4`.
`weight_codes` `[n, 32]` and `weight_scales` `[n]` for n blocks, `weight_factors` fp32. `int8`:
`weight_codes` `[out, in]` in [-127, 127], and `weight_factors` fp32 `[out]`, a row's largest
magnitude over 127.

Codes and scales are bits that are carried as float8, because FSDP takes floating-point parameters
only: they are looked at as integers where they are used, and nothing may convert them
(`model.to(dtype)` comes before). FSDP shards whole blocks or rows, so no shard needs to end where a
row of the matrix does. A tensor-parallel group cuts at the same blocks, so that the numbers are
those of one process: rows of the matrix, or columns of whole blocks, whose codes are then `[out, in
/ 64, 32]`, scales `[out, in / 64]`. Each of its ranks has all factors of NF4, which are few.
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

# Rows of codes in [-127, 127] and a factor for each, back to numbers.


def dequantize_rows(codes: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """`codes [m, n] * factors [m]`, computed in fp32, of dtype; in pieces, unless it is one
    kernel.
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
    """As one expression."""
    return (codes.float() * factors.unsqueeze(1)).to(dtype)


KINDS = ("nf4", "int8")
_BITS = torch.float8_e4m3fn  # any type of 8 bits that counts as floating point
_PIECE_ELEMENTS = 2**23  # elements quantized at a time


def can_quantize(in_features: int, out_features: int, kind: str) -> bool:
    """Whether a weight `[out, in]` can be kept so: NF4 needs a whole number of blocks of 64."""
    return kind != "nf4" or in_features * out_features % nf4.BLOCK == 0


def can_cut(
    in_features: int, out_features: int, kind: str, parts: int, *, by_columns: bool
) -> bool:
    """Whether so many ranks can each have as many columns, or rows, of a weight `[out, in]`: NF4
    cuts no block.
    """
    cut, other = (in_features, 1) if by_columns else (out_features, in_features)
    return cut % parts == 0 and (kind != "nf4" or cut // parts * other % nf4.BLOCK == 0)


def _list_shapes_to_fill(linear: "QuantizedLinear", *_: Any) -> list[Any]:
    """Return what quantizing a weight to NF4 follows from."""
    parameters = (linear.weight_codes, linear.weight_scales, linear.weight_factors)
    parts = [locate_local_part(parameter) for parameter in parameters if parameter is not None]
    numbers = (linear.in_features, linear.out_features, linear.rows, linear.columns, linear.dtype)
    return [*numbers, *((part.shape, first) for part, first in parts)]


class QuantizedLinear(nn.Module):
    """A linear with a frozen weight of 4 or 8 bits; arithmetic is done in `dtype`, on the weight
    made whole in passing.

    For backward nothing is kept but the codes; backward makes the weight a second time.
    """

    bias: nn.Parameter | None

    def __init__(self, base: nn.Linear, kind: str) -> None:
        """base: the linear that it replaces, still on the meta device; its bias is taken over.
        kind: of KINDS.

        Raises ValueError for a weight that `can_quantize` refuses, or in fp64.
        """
        nn.Module.__init__(self)
        possible = kind in KINDS and can_quantize(base.in_features, base.out_features, kind)
        if not possible or base.weight.dtype not in nf4.DTYPES:
            shape = f"{base.out_features} x {base.in_features}"
            raise ValueError(
                f"a weight of {shape} numbers of type {base.weight.dtype} cannot be kept as {kind}"
            )
        self.in_features, self.out_features, self.kind = base.in_features, base.out_features, kind
        self.dtype = base.weight.dtype
        self.rows, self.columns = (
            (0, base.out_features),
            (0, base.in_features),
        )  # what this process computes with
        self.bias = base.bias
        # Where to quantize, if outside of its forward the parameters lie in host memory.
        self.computes_on: torch.device | None = None
        device = base.weight.device
        blocks = base.in_features * base.out_features // nf4.BLOCK
        codes = (blocks, nf4.BLOCK // 2) if kind == "nf4" else (base.out_features, base.in_features)
        factors = nf4.count_factors(blocks) if kind == "nf4" else base.out_features
        self.weight_codes = make_frozen_parameter(codes, _BITS, device)
        self.weight_scales = (
            make_frozen_parameter((blocks,), _BITS, device) if kind == "nf4" else None
        )
        self.weight_factors = make_frozen_parameter((factors,), torch.float32, device)

    def take_part(self, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        """From now on computes with rows and columns from the first to the second number
        (exclusive) of each alone.

        For a tensor-parallel group, on the meta device. The parameters are still those of the whole
        weight, in a form that the caller may cut there (see the module's docstring) or not. The
        part is one that `can_cut` allows.
        """
        self.rows, self.columns = rows, columns
        if self.weight_scales is not None and columns != (0, self.in_features):
            blocks, device = (
                (self.out_features, self.in_features // nf4.BLOCK),
                self.weight_codes.device,
            )
            self.weight_codes = make_frozen_parameter((*blocks, nf4.BLOCK // 2), _BITS, device)
            self.weight_scales = make_frozen_parameter(blocks, _BITS, device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden `[..., in]` to `[..., out]`, in hidden's type."""
        return self.product(hidden, self.bias)

    def product(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """Hidden `[..., c]` to `[..., r]` by the r rows and c columns that this process computes
        with.
        """
        # To a mode it is one call of a linear.
        if not torch.compiler.is_dynamo_compiling() and has_torch_function((hidden,)):
            return cast(
                Tensor,
                handle_torch_function(self.linear, (hidden,), hidden, self.weight_codes, bias),
            )
        return self.linear(hidden, self.weight_codes, bias)

    def linear(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`product`, called as `F.linear` is; weight: not looked at."""
        first, last = self.columns
        storage = (*self._part(), bias, last - first, self.dtype, self._place())
        return multiply(hidden, *storage)

    def count_local_rows(self) -> int:
        """How many rows, or parts of them, are here: more than it computes with where the caller
        did not cut there.
        """
        first, last = self.columns
        return count_rows(get_local(self.weight_codes), self.weight_scales, last - first)

    def _part(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Codes, scales and factors of what this process computes with, of which it may hold
        more.
        """
        codes, factors = get_local(self.weight_codes), get_local(self.weight_factors)
        scales = None if self.weight_scales is None else get_local(self.weight_scales)
        first, last = self.rows
        spare = self.count_local_rows() > last - first
        if scales is None:
            return (
                (codes[first:last], None, factors[first:last]) if spare else (codes, None, factors)
            )
        if codes.dim() == 3:
            return codes.flatten(0, 1), scales.flatten(), factors
        begin, end = (number * self.in_features // nf4.BLOCK for number in (first, last))
        return (codes[begin:end], scales[begin:end], factors) if spare else (codes, scales, factors)

    def _place(self) -> list[int]:
        """Which of the whole weight's blocks the part has, see `nf4.block_numbers`; empty: all, or
        int8.
        """
        (top, bottom), (first, last) = self.rows, self.columns
        if self.kind != "nf4" or (bottom - top, last - first) == (
            self.out_features,
            self.in_features,
        ):
            return []
        blocks = self.out_features * self.in_features // nf4.BLOCK
        begin = (top * self.in_features + first) // nf4.BLOCK
        if last - first == self.in_features:
            return [begin, blocks, blocks, blocks]
        return [begin, (last - first) // nf4.BLOCK, self.in_features // nf4.BLOCK, blocks]

    def dequantize_weight(self) -> Tensor:
        """The dequantized weight `[out, in]`, in the type that it was quantized from.

        The module is gathered, if it is sharded at all.
        """
        return self.dequantize_weight_rows(0, self.out_features)

    @torch.no_grad()
    def dequantize_local_weight(self) -> Tensor:
        """The dequantized rows and columns that this process computes with."""
        first, last = self.columns
        return dequantize(*self._part(), last - first, self.dtype, self._place())

    @torch.no_grad()
    def dequantize_weight_rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` (exclusive) of `full_weight`, without the others `[stop - start,
        in]`.
        """
        storage = (self.weight_codes, self.weight_scales, self.weight_factors)
        return dequantize(*storage, self.in_features, self.dtype, (), start, stop)

    @torch.no_grad()
    def fill_weight(self, read_rows: Callable[[int, int, slice], Tensor]) -> None:
        """Quantizes a weight while it is read; each rank its own blocks or rows of it, some at a
        time.

        read_rows: `(start, stop, columns)` to those rows and columns of the weight, of any type, on
        any device. The largest magnitude of every block, or of a row that is cut, is found over the
        ranks that share the weight (all of them must call), so that scales are those of the whole
        matrix, the same bits for any number of ranks.
        """
        if self.kind == "nf4":
            self._fill_nf4(read_rows)
        else:
            self._fill_int8(read_rows)

    def get_working_device(self) -> torch.device:
        """Where to quantize: on the accelerator, also when the parameters are kept in host
        memory.
        """
        codes = self.weight_codes
        if self.computes_on is not None:
            return self.computes_on
        return (
            torch.device(codes.device_mesh.device_type)
            if isinstance(codes, DTensor)
            else codes.device
        )

    @register_shaped_work(_list_shapes_to_fill)
    def _fill_nf4(self, read_rows: Callable[[int, int, slice], Tensor]) -> None:
        codes, (begin, *_) = locate_local_part(self.weight_codes)
        device = self.get_working_device()
        largest = torch.zeros(codes.shape[:-1], dtype=self.dtype, device=device)
        for start, stop in cut_rows(len(codes), 2 * codes.shape[1:].numel(), _PIECE_ELEMENTS):
            blocks = self._read_blocks(read_rows, begin + start, begin + stop).to(
                device, self.dtype
            )
            quantized, found = nf4.quantize_blocks(blocks.view(-1, nf4.BLOCK))
            codes[start:stop].copy_(quantized.view(_BITS).view(codes[start:stop].shape))
            largest[start:stop] = found.view(largest[start:stop].shape)
        every = gather_full(largest, self.weight_codes, self.weight_codes.shape[:-1])
        scales, factors = nf4.quantize_scales(every.flatten())
        if self.weight_scales is not None:
            _copy_local_part(self.weight_scales, scales.view(_BITS))
        _copy_local_part(self.weight_factors, factors)

    def _read_blocks(
        self, read_rows: Callable[[int, int, slice], Tensor], start: int, stop: int
    ) -> Tensor:
        """The numbers of blocks `start` to `stop`, flat; where columns are cut, those of this part
        in such rows.
        """
        width = self.in_features
        if self.weight_codes.dim() == 3:
            return read_rows(start, stop, slice(*self.columns)).flatten()
        first, last = start * nf4.BLOCK, stop * nf4.BLOCK  # numbers of the flattened matrix
        top = first // width
        return read_rows(top, -(-last // width), slice(None)).flatten()[
            first - top * width : last - top * width
        ]

    def _fill_int8(self, read_rows: Callable[[int, int, slice], Tensor]) -> None:
        codes, (begin, _) = locate_local_part(self.weight_codes)
        factors, _ = locate_local_part(self.weight_factors)
        device = self.get_working_device()
        pieces = cut_rows(len(codes), codes.shape[1], _PIECE_ELEMENTS)
        largest = torch.zeros(len(codes), device=device)

        def read(start: int, stop: int) -> Tensor:
            return (
                read_rows(begin + start, begin + stop, slice(*self.columns))
                .to(device, self.dtype)
                .float()
            )

        def quantize(start: int, stop: int, values: Tensor) -> None:
            factor = largest[start:stop] / 127
            steps = values / factor.masked_fill(factor == 0, 1).unsqueeze(1)
            codes[start:stop].copy_(steps.round_().clamp_(-127, 127).to(torch.int8).view(_BITS))
            factors[start:stop].copy_(factor)

        cut = self.columns != (
            0,
            self.in_features,
        )  # then other ranks may have what is larger: read twice
        for start, stop in pieces:
            values = read(start, stop)
            largest[start:stop] = values.abs().amax(dim=1)
            if not cut:
                quantize(start, stop, values)
        if cut:
            parameter = self.weight_codes
            for dim, placement in enumerate(
                parameter.placements if isinstance(parameter, DTensor) else ()
            ):
                if placement.is_shard(1):
                    dist.all_reduce(
                        largest, dist.ReduceOp.MAX, group=parameter.device_mesh.get_group(dim)
                    )
            for start, stop in pieces:
                quantize(start, stop, read(start, stop))


@torch.no_grad()
def fake_quantize_weight(weight: Tensor, kind: str) -> Tensor:
    """Return what `kind` makes of a whole weight `[out, in]`: the numbers that a model with such a
    base is trained with, in the weight's type, which is the run's (config key `dtype`).
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
    """A parameter that wants no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def _copy_local_part(parameter: Tensor, whole: Tensor) -> None:
    local, offset = locate_local_part(parameter)
    part = tuple(
        slice(first, first + size) for first, size in zip(offset, local.shape, strict=True)
    )
    local.copy_(whole.view(parameter.shape)[part])


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
    """Rows `start` to `stop` of the weight, or part of it, `[stop - start, columns]`; by default
    all of them.
    """
    if scales is None:
        return dequantize_rows(codes[start:stop].view(torch.int8), factors[start:stop], dtype)
    first = start * columns
    last = len(codes) * nf4.BLOCK if stop is None else stop * columns
    begin, end = first // nf4.BLOCK, -(-last // nf4.BLOCK)
    bits = (codes.view(torch.uint8), scales.view(torch.int8))
    numbers = nf4.dequantize(*bits, factors, dtype, begin, end, place).flatten()
    return numbers[first - begin * nf4.BLOCK : last - begin * nf4.BLOCK].view(-1, columns)


def _multiply(
    hidden: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    factors: Tensor,
    bias: Tensor | None,
    columns: int,
    dtype: torch.dtype,
    place: Sequence[int],
) -> Tensor:
    """`hidden @ weight.T + bias`."""
    return F.linear(
        hidden, dequantize(codes, scales, factors, columns, dtype, place).to(hidden.dtype), bias
    )


def _multiply_gradient(
    gradient: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    factors: Tensor,
    columns: int,
    dtype: torch.dtype,
    place: Sequence[int],
) -> Tensor:
    return gradient @ dequantize(codes, scales, factors, columns, dtype, place).to(gradient.dtype)


def count_rows(codes: Tensor, scales: Tensor | None, columns: int) -> int:
    """Rows of so many columns that codes stand for."""
    return codes.numel() * (1 if scales is None else 2) // columns


# Keeps the codes, which are parameters anyway, and neither hidden nor weight.
multiply = make_opaque_node(
    "quantized_linear",
    _multiply,
    lambda hidden, codes, scales, factors, bias, columns, *_: hidden.new_empty(
        (*hidden.shape[:-1], count_rows(codes, scales, columns))
    ),
    _multiply_gradient,
    lambda gradient, codes, scales, factors, columns, *_: gradient.new_empty(
        (*gradient.shape[:-1], columns)
    ),
    kept=(1, 2, 3, 5, 6, 7),
)
