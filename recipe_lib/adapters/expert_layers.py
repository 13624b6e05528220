"""Experts with frozen weights, kept in 4 or 8 bits, with a trained adapter next to each, or both; an adapted router.

The weights `[E, o, i]` of all experts are quantized as one matrix `[E o, i]`, see `recipe_lib.adapters.quantized`; no
block of it reaches from one expert into the next. An adapter has factors of its own for each expert, A `[E, r, i]` and
B `[E, o, r]`: two more grouped matmuls.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from recipe_lib.adapters import nf4, quantized
from recipe_lib.adapters.layers import AdaptedMatrix, AdaptedModule, AdapterSettings
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.models.mixture import ExpertLinear, Router
from recipe_lib.ops.grouped import Groups, grouped_linear, grouped_matmul, sum_of_rows, taken_rows


def can_quantize_experts(experts: ExpertLinear, kind: str) -> bool:
    """Whether the weights can be kept so: NF4 needs a whole number of blocks of 64 in each expert."""
    return kind != "nf4" or nf4.blocks_of(experts.in_features * experts.out_features) is not None


class QuantizedExperts(QuantizedLinear):
    """Experts whose frozen weights are kept in 4 or 8 bits, and made whole in passing; backward makes them again.

    `out_features` counts the rows of all experts. cut: which part of how many of each run of rows, see
    `take_rows_of_runs`; None: all.
    """

    cut: tuple[int, int] | None = None

    def __init__(self, base: ExpertLinear, kind: str) -> None:
        """base: what it replaces, still on the meta device; its bias is taken over. kind: see `QuantizedLinear`."""
        rows, dtype = base.num_experts * base.out_features, base.weight.dtype
        QuantizedLinear.__init__(self, nn.Linear(base.in_features, rows, False, "meta", dtype), kind)
        self.num_experts, self.expert_rows = base.num_experts, base.out_features
        self.bias = base.bias

    def take_rows_of_runs(self, runs: int, rank: int, size: int) -> None:
        """From now on computes with part number `rank` of `size` of each of so many runs of rows alone.

        For a tensor-parallel group, on the meta device, of NF4: blocks of a run follow one another, and codes and
        scales are then `[runs, blocks, 32]` and `[runs, blocks]`, to be cut by their second dimension.
        """
        assert self.weight_scales is not None
        self.cut = (rank, size)
        device, blocks = self.weight_codes.device, self.out_features * self.in_features // nf4.BLOCK
        self.weight_codes = quantized.frozen((runs, blocks // runs, nf4.BLOCK // 2), self.weight_codes.dtype, device)
        self.weight_scales = quantized.frozen((runs, blocks // runs), self.weight_scales.dtype, device)

    def _place(self) -> list[int]:
        if self.cut is None:
            return super()._place()
        rank, size = self.cut
        _, stride, _ = self.weight_codes.shape
        blocks = self.out_features * self.in_features // nf4.BLOCK
        return [rank * (stride // size), stride // size, stride, blocks]

    def _read_blocks(self, read_rows: Callable[[int, int, slice], Tensor], start: int, stop: int) -> Tensor:
        if self.cut is None:
            return super()._read_blocks(read_rows, start, stop)
        rank, size = self.cut
        height = self.out_features // self.weight_codes.shape[0]  # rows of a run
        first, last = rank * height // size, (rank + 1) * height // size
        whole = slice(0, self.in_features)
        return torch.cat(
            [read_rows(run * height + first, run * height + last, whole).flatten() for run in range(start, stop)]
        )

    def forward(self, rows: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:  # type: ignore[override]
        """As `ExpertLinear.forward`."""
        return self.grouped_product(rows, groups, of_tokens)

    def grouped_product(self, rows: Tensor, groups: Groups, of_tokens: bool) -> Tensor:
        """Rows `[m, i]`, or tokens `[n, i]`, to `[m, o]` by what of the weights this process computes with."""
        first, last = self.columns
        numbers = (self.num_experts, last - first, groups.choices if of_tokens else 0)
        order = (groups.tokens, groups.places, groups.ends)
        codes, scales, factors = self._part()
        if torch.compiler.is_compiling():
            return _compiled(rows, codes, scales, factors, *order, *numbers, self.dtype, self._place())
        return cast(
            Tensor,
            _GroupedProduct.apply(rows, codes, scales, factors, *order, *numbers, self.dtype, self._place()),
        )


def _weights(codes: Tensor, scales: Tensor | None, factors: Tensor, shape: tuple[int, int], settings: Any) -> Tensor:
    """The dequantized weights `[E, o, i]`. shape: E and i. settings: type and place, see `QuantizedLinear`."""
    experts, columns = shape
    return quantized.dequantize(codes, scales, factors, columns, *settings).view(experts, -1, columns)


class _GroupedProduct(torch.autograd.Function):
    """Keeps the codes, which are parameters anyway, and neither rows nor weights."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        codes: Tensor,
        scales: Tensor | None,
        factors: Tensor,
        tokens: Tensor,
        places: Tensor,
        ends: Tensor,
        experts: int,
        columns: int,
        choices: int,
        *settings: Any,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, factors, places, ends)
        ctx.shape, ctx.choices, ctx.settings = (experts, columns), choices, settings
        weights = _weights(codes, scales, factors, ctx.shape, settings).to(rows.dtype)
        return grouped_matmul(taken_rows(rows, tokens, choices), weights.transpose(1, 2), ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales, factors, places, ends = ctx.saved_tensors
        weights = _weights(codes, scales, factors, ctx.shape, ctx.settings).to(gradients[0].dtype)
        found = grouped_matmul(gradients[0].contiguous(), weights, ends)
        del weights
        return (sum_of_rows(found, places, ctx.choices) if ctx.choices else found, *(None,) * 11)


# Under torch.compile an operation that the compiler cannot look into, as in `recipe_lib.adapters.quantized`.


@torch.library.custom_op("tune_recipes::quantized_experts", mutates_args=())
def _compiled(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    factors: Tensor,
    tokens: Tensor,
    places: Tensor,
    ends: Tensor,
    experts: int,
    columns: int,
    choices: int,
    dtype: torch.dtype,
    place: Sequence[int],
) -> Tensor:
    weights = _weights(codes, scales, factors, (experts, columns), (dtype, place)).to(rows.dtype)
    return grouped_matmul(taken_rows(rows, tokens, choices), weights.transpose(1, 2), ends)


@_compiled.register_fake
def _(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    factors: Tensor,
    tokens: Tensor,
    places: Tensor,
    ends: Tensor,
    experts: int,
    columns: int,
    choices: int,
    dtype: torch.dtype,
    place: Sequence[int],
) -> Tensor:
    numbers = codes.numel() * (1 if scales is None else 2)
    return rows.new_empty((tokens.shape[0], numbers // columns // experts))


@torch.library.custom_op("tune_recipes::quantized_experts_backward", mutates_args=())
def _compiled_backward(
    gradient: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    factors: Tensor,
    places: Tensor,
    ends: Tensor,
    experts: int,
    columns: int,
    choices: int,
    dtype: torch.dtype,
    place: Sequence[int],
) -> Tensor:
    weights = _weights(codes, scales, factors, (experts, columns), (dtype, place)).to(gradient.dtype)
    found = grouped_matmul(gradient.contiguous(), weights, ends)
    return sum_of_rows(found, places, choices) if choices else found


@_compiled_backward.register_fake
def _(
    gradient: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    factors: Tensor,
    places: Tensor,
    ends: Tensor,
    experts: int,
    columns: int,
    choices: int,
    dtype: torch.dtype,
    place: Sequence[int],
) -> Tensor:
    return gradient.new_empty((gradient.shape[0] // max(1, choices), columns))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scales, factors, _, places, ends, *ctx.settings = inputs
    ctx.save_for_backward(codes, scales, factors, places, ends)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return (_compiled_backward(gradient, *ctx.saved_tensors, *ctx.settings), *(None,) * 11)


_compiled.register_autograd(_backward, setup_context=_save_for_backward)


class AdaptedExpertModule(AdaptedModule):
    """Experts with an adapter; a class derived from it says what the frozen part is."""

    lora_magnitude_vector = None

    def add_adapter(self, experts: int, in_features: int, out_features: int, settings: AdapterSettings) -> None:
        """Registers the adapter's parameters, on the meta device. Raises ValueError for DoRA and dropout, which
        adapters of parameters do not have in PEFT either."""
        if settings.dora or settings.dropout:
            raise ValueError("adapters of experts have neither DoRA's lengths nor dropout")
        self.settings = settings
        with torch.device("meta"):
            self.lora_A = ExpertLinear(experts, in_features, settings.rank, False).to(settings.dtype)
            self.lora_B = ExpertLinear(experts, settings.rank, out_features, False).to(settings.dtype)

    def weight_norms(self) -> Tensor:
        """Of DoRA, which experts have not."""
        raise ValueError("adapters of experts have no lengths")

    def with_adapter(self, plain: Tensor, rows: Tensor, groups: Groups, of_tokens: bool) -> Tensor:
        """What the frozen part gave `[m, o]`, with what the adapter adds to it."""
        return self.with_factors(plain, rows, groups, of_tokens, self.lora_A.weight, self.lora_B.weight)

    def with_factors(
        self, plain: Tensor, rows: Tensor, groups: Groups, of_tokens: bool, first: Tensor, second: Tensor
    ) -> Tensor:
        """The same with these as A and B, which may be parts of them."""
        if self.is_off:
            return plain
        narrow = grouped_linear(rows, first, groups, of_tokens=of_tokens) * self.settings.scaling
        return (plain + grouped_linear(narrow, second, groups)).to(plain.dtype)


class AdaptedExperts(AdaptedExpertModule, ExpertLinear):
    """Experts with frozen weights and adapters."""

    def __init__(self, base: ExpertLinear, settings: AdapterSettings) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.in_features, self.out_features = base.num_experts, base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.add_adapter(base.num_experts, base.in_features, base.out_features, settings)

    def forward(self, rows: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:
        """As `ExpertLinear.forward`."""
        plain = ExpertLinear.forward(self, rows, groups, of_tokens=of_tokens)
        return self.with_adapter(plain, rows, groups, of_tokens)


class AdaptedQuantizedExperts(AdaptedExpertModule, QuantizedExperts):
    """Experts with frozen weights of 4 or 8 bits and adapters."""

    def __init__(self, base: ExpertLinear, kind: str, settings: AdapterSettings) -> None:
        QuantizedExperts.__init__(self, base, kind)
        self.add_adapter(base.num_experts, base.in_features, base.out_features, settings)

    def forward(self, rows: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:  # type: ignore[override]
        """As `ExpertLinear.forward`."""
        plain = QuantizedExperts.forward(self, rows, groups, of_tokens=of_tokens)
        return self.with_adapter(plain, rows, groups, of_tokens)


class AdaptedRouter(AdaptedMatrix, Router):
    """A router with a frozen weight and an adapter; its logits stay in fp32."""

    def __init__(self, base: Router, settings: AdapterSettings) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.add_adapter(base.in_features, base.out_features, settings)

    def frozen_rows(self, start: int, stop: int) -> Tensor:
        """Rows of W `[stop - start, d]`."""
        return self.weight[start:stop]

    def frozen_forward(self, hidden: Tensor) -> Tensor:
        """Tokens `[n, d]` to logits `[n, E]` by the frozen part alone."""
        return Router.forward(self, hidden)


def adapted_experts(base: ExpertLinear, settings: AdapterSettings | None, quantize: str) -> nn.Module:
    """What takes the place of experts; settings: None without an adapter. quantize: as lora.quantize_base."""
    if quantize != "none" and can_quantize_experts(base, quantize):
        if settings is None:
            return QuantizedExperts(base, quantize)
        return AdaptedQuantizedExperts(base, quantize, settings)
    return base if settings is None else AdaptedExperts(base, settings)
