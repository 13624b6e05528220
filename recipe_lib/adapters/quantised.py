"""Linears whose frozen weight is kept in 4 or 8 bits, sharded like any other parameter and never whole in between.

`nf4`: blocks of 64 numbers of the flattened matrix `[out, in]`, see `recipe_lib.adapters.nf4`. `weight_codes` `[n, 32]`
and `weight_scales` `[n]` for n blocks, `weight_factors` fp32. `int8`: `weight_codes` `[out, in]` in [-127, 127], and
`weight_factors` fp32 `[out]`, a row's largest magnitude over 127.

Codes and scales are bits that are carried as float8, because FSDP takes floating-point parameters only: they are
looked at as integers where they are used, and nothing may convert them (`model.to(dtype)` comes before). FSDP shards
whole blocks or rows, so no shard needs to end where a row of the matrix does.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.adapters import nf4
from recipe_lib.models.build import local_part

KINDS = ("nf4", "int8")
_BITS = torch.float8_e4m3fn  # any type of 8 bits that counts as floating point
_PIECE_ELEMENTS = 2**23  # elements quantised, or of int8 dequantised, at a time


def can_quantise(in_features: int, out_features: int, kind: str) -> bool:
    """Whether a weight `[out, in]` can be kept so: NF4 needs a whole number of blocks of 64."""
    return kind != "nf4" or nf4.blocks_of(in_features * out_features) is not None


class QuantisedLinear(nn.Module):
    """A linear with a frozen weight of 4 or 8 bits; arithmetic is done in `dtype`, on the weight made whole in passing.

    For backward nothing is kept but the codes; backward makes the weight a second time.
    """

    bias: nn.Parameter | None

    def __init__(self, base: nn.Linear, kind: str) -> None:
        """base: the linear that it replaces, still on the meta device; its bias is taken over. kind: of KINDS.

        Raises ValueError for a weight that `can_quantise` refuses, or in fp64.
        """
        nn.Module.__init__(self)
        possible = kind in KINDS and can_quantise(base.in_features, base.out_features, kind)
        if not possible or base.weight.dtype not in nf4.DTYPES:
            shape = f"{base.out_features} x {base.in_features}"
            raise ValueError(f"a weight of {shape} numbers of type {base.weight.dtype} cannot be kept as {kind}")
        self.in_features, self.out_features, self.kind = base.in_features, base.out_features, kind
        self.dtype = base.weight.dtype
        self.bias = base.bias
        device = base.weight.device
        blocks = base.in_features * base.out_features // nf4.BLOCK
        codes = (blocks, nf4.BLOCK // 2) if kind == "nf4" else (base.out_features, base.in_features)
        factors = nf4.factors_of(blocks) if kind == "nf4" else base.out_features
        self.weight_codes = _frozen(codes, _BITS, device)
        self.weight_scales = _frozen((blocks,), _BITS, device) if kind == "nf4" else None
        self.weight_factors = _frozen((factors,), torch.float32, device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden `[..., in]` to `[..., out]`, in hidden's type."""
        scales = self.weight_scales
        storage = (self.weight_codes, scales, self.weight_factors, self.bias, self.in_features, self.dtype)
        if torch.compiler.is_compiling():
            return _compiled(hidden, *storage)
        return cast(Tensor, _Product.apply(hidden, *storage))

    def full_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dequantised weight `[out, in]` of `dtype` (None: the one it was quantised from).

        The module is gathered, if it is sharded at all.
        """
        return self.weight_rows(0, self.out_features, dtype)

    @torch.no_grad()
    def weight_rows(self, start: int, stop: int, dtype: torch.dtype | None = None) -> Tensor:
        """Rows `start` to `stop` (exclusive) of `full_weight`, without the others `[stop - start, in]`."""
        storage = (self.weight_codes, self.weight_scales, self.weight_factors)
        rows = _dequantise(*storage, self.in_features, self.dtype, start, stop)
        return rows if dtype is None else rows.to(dtype)

    @torch.no_grad()
    def fill_weight(self, read_rows: Callable[[int, int], Tensor]) -> None:
        """Quantises a weight while it is read; each rank its own blocks or rows of it, some at a time.

        read_rows: `(start, stop)` to those rows `[stop - start, in]` of the weight, of any type, on any device. NF4:
        the largest magnitude of every block is gathered over the ranks that share the weight (all of them must call),
        so that scales are those of the whole matrix, the same bits for any number of ranks.
        """
        if self.kind == "nf4":
            self._fill_nf4(read_rows)
        else:
            self._fill_int8(read_rows)

    def _fill_nf4(self, read_rows: Callable[[int, int], Tensor]) -> None:
        codes, (begin, _) = local_part(self.weight_codes)
        device, columns = _working_device(self.weight_codes), self.in_features
        largest = torch.zeros(len(codes), dtype=self.dtype, device=device)
        for start, stop in _pieces(len(codes), nf4.BLOCK):
            first, last = (begin + start) * nf4.BLOCK, (begin + stop) * nf4.BLOCK  # numbers of the flattened matrix
            top = first // columns
            values = read_rows(top, -(-last // columns)).to(device, self.dtype).flatten()
            blocks = values[first - top * columns : last - top * columns].view(-1, nf4.BLOCK)
            quantised, largest[start:stop] = nf4.quantise_blocks(blocks)
            codes[start:stop].copy_(quantised.view(_BITS))
        scales, factors = nf4.quantise_scales(_gathered(largest, self.weight_codes))
        if self.weight_scales is not None:
            _keep_part(self.weight_scales, scales.view(_BITS))
        _keep_part(self.weight_factors, factors)

    def _fill_int8(self, read_rows: Callable[[int, int], Tensor]) -> None:
        codes, (begin, _) = local_part(self.weight_codes)
        factors, _ = local_part(self.weight_factors)
        device = _working_device(self.weight_codes)
        for start, stop in _pieces(len(codes), self.in_features):
            values = read_rows(begin + start, begin + stop).to(device, self.dtype).float()
            factor = values.abs().amax(dim=1) / 127
            steps = values / factor.masked_fill(factor == 0, 1).unsqueeze(1)
            codes[start:stop].copy_(steps.round_().clamp_(-127, 127).to(torch.int8).view(_BITS))
            factors[start:stop].copy_(factor)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, kind={self.kind}"


@torch.no_grad()
def dequantised(weight: Tensor, kind: str) -> Tensor:
    """What `kind` makes of a whole weight `[out, in]`: the numbers that a model with such a base is trained with.

    The weight is of the type that the run had (config key `dtype`), and so is what is returned.
    """
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    module = QuantisedLinear(linear, kind).to_empty(device=weight.device)
    module.fill_weight(lambda start, stop: weight[start:stop])
    return module.full_weight()


def _frozen(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def _pieces(count: int, width: int) -> list[tuple[int, int]]:
    """`range(count)` in parts of at most _PIECE_ELEMENTS elements, `width` of them each."""
    step = max(1, _PIECE_ELEMENTS // width)
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def _working_device(parameter: Tensor) -> torch.device:
    """Where to quantise: on the accelerator, also when the parameters are kept in host memory."""
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def _gathered(part: Tensor, parameter: Tensor) -> Tensor:
    """One number for each of the parameter's first dimension, from the parts that the ranks have. A collective."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    shape = parameter.shape[:1]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=(1,)).full_tensor()


def _keep_part(parameter: Tensor, whole: Tensor) -> None:
    local, (begin,) = local_part(parameter)
    local.copy_(whole[begin : begin + len(local)])


def _dequantise(
    codes: Tensor,
    scales: Tensor | None,
    factors: Tensor,
    columns: int,
    dtype: torch.dtype,
    start: int = 0,
    stop: int | None = None,
) -> Tensor:
    """Rows `start` to `stop` of the weight `[stop - start, columns]`; by default all of them."""
    if scales is None:
        return _dequantise_int8(codes[start:stop].view(torch.int8), factors[start:stop], dtype)
    first = start * columns
    last = len(codes) * nf4.BLOCK if stop is None else stop * columns
    begin, end = first // nf4.BLOCK, -(-last // nf4.BLOCK)
    numbers = nf4.dequantise(codes.view(torch.uint8), scales.view(torch.int8), factors, dtype, begin, end).flatten()
    return numbers[first - begin * nf4.BLOCK : last - begin * nf4.BLOCK].view(-1, columns)


def _dequantise_int8(codes: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    rows = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for start, stop in _pieces(len(codes), codes.shape[1]):
        rows[start:stop].copy_(codes[start:stop].float().mul_(factors[start:stop].unsqueeze(1)))
    return rows


class _Product(torch.autograd.Function):
    """`hidden @ weight.T + bias`; keeps the codes, which are parameters anyway, and neither hidden nor weight."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        codes: Tensor,
        scales: Tensor | None,
        factors: Tensor,
        bias: Tensor | None,
        columns: int,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, factors)
        ctx.columns, ctx.dtype = columns, dtype
        return F.linear(hidden, _dequantise(codes, scales, factors, columns, dtype).to(hidden.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        codes, scales, factors = ctx.saved_tensors
        weight = _dequantise(codes, scales, factors, ctx.columns, ctx.dtype)
        return (gradient @ weight.to(gradient.dtype), *(None,) * 6)


# Under torch.compile the same as an operation that the compiler cannot look into: it would see that forward and
# backward make the same weight, and keep it in between.


@torch.library.custom_op("tune_recipes::quantised_linear", mutates_args=())
def _compiled(
    hidden: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    factors: Tensor,
    bias: Tensor | None,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    return F.linear(hidden, _dequantise(codes, scales, factors, columns, dtype).to(hidden.dtype), bias)


@_compiled.register_fake
def _(
    hidden: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    factors: Tensor,
    bias: Tensor | None,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    rows = codes.numel() * (1 if scales is None else 2) // columns
    return hidden.new_empty((*hidden.shape[:-1], rows))


@torch.library.custom_op("tune_recipes::quantised_linear_backward", mutates_args=())
def _compiled_backward(
    gradient: Tensor, codes: Tensor, scales: Tensor | None, factors: Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    return gradient @ _dequantise(codes, scales, factors, columns, dtype).to(gradient.dtype)


@_compiled_backward.register_fake
def _(
    gradient: Tensor, codes: Tensor, scales: Tensor | None, factors: Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    return gradient.new_empty((*gradient.shape[:-1], columns))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scales, factors, _, ctx.columns, ctx.dtype = inputs
    ctx.save_for_backward(codes, scales, factors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return (_compiled_backward(gradient, *ctx.saved_tensors, ctx.columns, ctx.dtype), *(None,) * 6)


_compiled.register_autograd(_backward, setup_context=_save_for_backward)
