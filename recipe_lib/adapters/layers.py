"""Modules with a frozen weight and a trained adapter next to it: linears, the embedding, the output
head.

The adapter of a matrix W `[out, in]` is `scaling * B A`, with A `[r, in]` and B `[out, r]` (LoRA,
arXiv 2106.09685). DoRA (arXiv 2402.09353) also trains the length m `[out]` of every row: the matrix
is `m * (W + scaling * B A) / norms`, where the norms are those of the rows of `W + scaling * B A`,
and no gradient flows through them. Parameters have the names that PEFT gives them, after the name
of the module: `lora_A.weight`, `lora_B.weight`, `lora_magnitude_vector`, `lora_embedding_A`,
`lora_embedding_B`; the frozen ones keep theirs.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function

from recipe_lib.adapters import nf4
from recipe_lib.adapters.quantized import (
    QuantizedLinear,
    can_quantize,
    count_rows,
    dequantize,
    make_frozen_parameter,
)
from recipe_lib.models.decoder import OutputHead, ScaledEmbedding
from recipe_lib.models.mixture import ExpertLinear, Router
from recipe_lib.ops.deferred import linear_in_dtype
from recipe_lib.ops.fused_kernels import make_opaque_node
from recipe_lib.ops.grouped import Groups, grouped_linear, grouped_matmul, sum_token_rows, take_rows
from recipe_lib.ops.head_losses import HeadLoss, OutputAdapter, run_head_loss

_NORM_ELEMENTS = 2**24  # elements of W + scaling * B A that exist at a time: 64 MiB in fp32


@dataclass(frozen=True)
class AdapterSettings:
    """What all adapters of a model share; dtype: of their parameters."""

    rank: int
    scaling: float
    dropout: float
    dora: bool
    dtype: torch.dtype


class AdaptedModule(nn.Module):
    """A module in the place of another, whose weight it has as it is, frozen, with an adapter next
    to it.

    A class derived from it and from that of the other computes the frozen part by the forward of
    the latter. Adapters are made on the meta device.
    """

    adapter_tensors = (
        "lora_A.weight",
        "lora_B.weight",
        "lora_magnitude_vector",
        "lora_embedding_A",
        "lora_embedding_B",
    )
    settings: AdapterSettings
    is_off: bool = False
    transposed: bool = False  # the frozen weight is `[in, out]`
    lora_magnitude_vector: nn.Parameter | None
    compute_weight_norms: Callable[
        [], Tensor
    ]  # lengths of the adapted matrix, in the order and type of that; no gradient

    def __init__(self, base: nn.Module, settings: AdapterSettings) -> None:
        """base: is not to be used any more."""
        nn.Module.__init__(self)
        members = {
            name: dict(base.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")
        }
        self.__dict__.update(base.__dict__ | members)
        self.settings = settings

    def compute_relative_lengths(self) -> Tensor | None:
        """What DoRA multiplies each output channel by: its trained length over the adapted matrix's
        own; None: LoRA.
        """
        if self.lora_magnitude_vector is None:
            return None
        return self.lora_magnitude_vector / self.compute_weight_norms()

    def _add_magnitude(self, width: int) -> None:
        settings = self.settings
        empty = torch.empty(width, dtype=settings.dtype, device="meta") if settings.dora else None
        self.lora_magnitude_vector = None if empty is None else nn.Parameter(empty)


class AdaptedMatrix(AdaptedModule):
    """An adapted matrix that hidden states are multiplied by."""

    bias: Tensor | None

    def __init__(
        self, base: Any, settings: AdapterSettings, shape: tuple[int, int] | None = None
    ) -> None:
        """shape: of the matrix, where base does not say it."""
        super().__init__(base, settings)
        outputs, inputs = shape or (base.out_features, base.in_features)
        self.lora_A = nn.Linear(
            inputs, settings.rank, bias=False, device="meta", dtype=settings.dtype
        )
        self.lora_B = nn.Linear(
            settings.rank, outputs, bias=False, device="meta", dtype=settings.dtype
        )
        self._add_magnitude(outputs)

    def get_frozen_rows(self, start: int, stop: int) -> Tensor:
        """Rows of W `[stop - start, in]`."""
        weight: Any = self.weight
        return weight[start:stop]

    def frozen_forward(self, hidden: Tensor) -> Tensor:
        """Hidden `[..., in]` to `[..., out]` by the frozen part alone, bias included."""
        return super().forward(hidden)

    @torch.no_grad()
    def compute_weight_norms(self) -> Tensor:
        """Lengths `[out]` of the rows of `W + scaling * B A`, which never exists as a whole."""
        return self.compute_norms_with(self.get_frozen_rows, self.lora_A.weight, self.lora_B.weight)

    def compute_norms_with(
        self, frozen_rows: Callable[[int, int], Tensor], first: Tensor, second: Tensor
    ) -> Tensor:
        """As `weight_norms`, of a part of the matrix: rows, or columns, of W, and what A and B have
        for them.
        """
        wide = torch.promote_types(second.dtype, torch.float32)
        rows = max(1, _NORM_ELEMENTS // first.shape[1])
        lengths = []
        for start in range(0, second.shape[0], rows):
            scaled = second[start : start + rows]
            frozen = frozen_rows(start, start + scaled.shape[0]).to(
                second.device, wide
            )  # it may lie on the host
            adapted = add_scaled(frozen, scaled @ first, self.settings.scaling)
            lengths.append(torch.linalg.vector_norm(adapted, dim=1))
        return torch.cat(lengths).to(second.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden `[..., in]` to `[..., out]`."""
        if self.is_off:
            return self.frozen_forward(hidden)
        return self.adapted(
            hidden, self.lora_A.weight, self.lora_B.weight, self.compute_relative_lengths()
        )

    def adapted(
        self,
        hidden: Tensor,
        first: Tensor,
        second: Tensor,
        lengths: Tensor | None,
        frozen: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Hidden `[..., in]` to `[..., out]`. first, second: A and B. lengths: those of
        `relative_lengths`.

        frozen: in place of `frozen_forward`, where the weight it finds is another by the time it is
        called.
        """
        scaling, rate = self.settings.scaling, self.settings.dropout
        frozen = frozen or self.frozen_forward
        plain = frozen(hidden)
        dropped = hidden
        if rate and self.training:
            # An inferred plan does not count it: its calls are those of a forward without dropout.
            is_counted = torch.compiler.is_dynamo_compiling() or not has_torch_function((hidden,))
            with nullcontext() if is_counted else torch._C.DisableTorchFunction():
                dropped = F.dropout(hidden, rate)
        # Scaled while it is `[..., r]`: neither a product with `[..., out]` numbers, nor one in
        # backward.
        update = F.linear(cast_linear(dropped, first) * scaling, second)
        if lengths is None:
            return (plain + update).to(plain.dtype)
        if dropped is hidden:
            product = plain if self.bias is None else plain - self.bias
            turned = lengths * (product + update)
            return (turned if self.bias is None else turned + self.bias).to(plain.dtype)
        # With dropout the frozen part sees all of the input at its old lengths, their change what
        # is left of it.
        product = frozen(dropped)
        product = product if self.bias is None else product - self.bias
        return (plain + (lengths - 1) * product + lengths * update).to(plain.dtype)


def add_scaled(tensor: Tensor, update: Tensor, scaling: float) -> Tensor:
    """`tensor + scaling * update`, without the product in memory.

    Not `torch.add(..., alpha=scaling)`, the same to the bit: where `update` is a product of two
    matrices, inductor of torch 2.11 to 2.13 makes an `addmm` of it, and leaves alpha out
    (docs/upstream/add_alpha.md).
    """
    return torch.sub(tensor, update, alpha=-scaling)


def cast_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """`hidden.to(weight.dtype) @ weight.T`; keeps hidden as it came."""
    if hidden.dtype == weight.dtype:
        return F.linear(hidden, weight)
    if not torch.compiler.is_dynamo_compiling() and has_torch_function(
        (hidden, weight)
    ):  # to a mode it is one call
        return cast(Tensor, handle_torch_function(linear, (hidden, weight), hidden, weight))
    return linear(hidden, weight)


def linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """`cast_linear` of two types."""
    return linear_in_dtype(hidden, weight, weight.dtype)


class AdaptedLinear(AdaptedMatrix, nn.Linear):
    """A linear with a frozen weight (and bias) and an adapter."""


class AdaptedRouter(AdaptedMatrix, Router):
    """A router with a frozen weight and an adapter; its logits stay in fp32."""


class AdaptedQuantizedLinear(AdaptedMatrix, QuantizedLinear):
    """A linear with a frozen weight of 4 or 8 bits and an adapter."""

    def get_frozen_rows(self, start: int, stop: int) -> Tensor:
        return self.dequantize_weight_rows(start, stop)


class AdaptedHead(AdaptedMatrix, OutputHead):
    """The output head with a frozen weight and an adapter; the loss still comes without logits of
    all tokens.
    """

    def __init__(self, base: OutputHead, settings: AdapterSettings) -> None:
        super().__init__(base, settings, (base.weight.shape[0], base.weight.shape[1]))
        self.bias = None

    def get_frozen_rows(self, start: int, stop: int) -> Tensor:
        """Rows of W `[stop - start, d]`; outside of a forward a weight shared with a sharded
        embedding is gathered.
        """
        rows = self.weight[start:stop]
        return rows.full_tensor() if isinstance(rows, DTensor) else rows

    def frozen_forward(self, hidden: Tensor) -> Tensor:
        """Hidden `[..., d]` to logits `[..., v]` by the frozen part alone, without the cap."""
        return F.linear(hidden, self.weight)

    def forward(  # type: ignore[override]  # that of a head
        self, hidden: Tensor, *, labels: Tensor | None = None, head_loss: HeadLoss | None = None
    ) -> Tensor:
        if self.is_off:
            return OutputHead.forward(self, hidden, labels=labels, head_loss=head_loss)
        trained = (self.lora_A.weight, self.lora_B.weight, self.compute_relative_lengths())
        if labels is None:
            return self.finish(self.adapted(hidden, *trained))
        # Where backward projects again, a tied and sharded weight is no longer this module's.
        adapter = OutputAdapter(self.adapted, trained, partial(F.linear, weight=self.weight))
        return run_head_loss(
            head_loss, hidden, self.weight, labels, softcap=self.softcap, adapter=adapter
        )


class AdaptedEmbedding(AdaptedModule, nn.Embedding):
    """An embedding with a frozen weight `[v, d]` and an adapter; DoRA's lengths are those of its d
    columns.

    Dropout does not apply: the input is tokens.
    """

    def __init__(self, base: nn.Embedding, settings: AdapterSettings) -> None:
        super().__init__(base, settings)
        self.scale = base.scale if isinstance(base, ScaledEmbedding) else None
        vocabulary, width, rank = base.num_embeddings, base.embedding_dim, settings.rank
        self.lora_embedding_A = nn.Parameter(
            torch.empty(rank, vocabulary, dtype=settings.dtype, device="meta")
        )
        self.lora_embedding_B = nn.Parameter(
            torch.empty(width, rank, dtype=settings.dtype, device="meta")
        )
        self._add_magnitude(width)

    @torch.no_grad()
    def compute_weight_norms(self) -> Tensor:
        """Lengths `[d]` of the columns of `W + scaling * (B A).T`, which never exists as a
        whole.
        """
        first, second = self.lora_embedding_A, self.lora_embedding_B
        wide = torch.promote_types(second.dtype, torch.float32)
        rows = max(1, _NORM_ELEMENTS // self.embedding_dim)
        squares = torch.zeros(self.embedding_dim, dtype=wide, device=second.device)
        for part, scaled in zip(self.weight.split(rows), first.split(rows, dim=1), strict=True):
            update = scaled.t() @ second.t()
            squares += (
                add_scaled(part.to(second.device, wide), update, self.settings.scaling)
                .square_()
                .sum(dim=0)
            )
        return squares.sqrt_().to(second.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens `[b, s]` to `[b, s, d]`."""
        plain = F.embedding(tokens, self.weight)
        factor = None if self.scale is None else plain.new_full((), self.scale)
        plain = plain if factor is None else plain * factor
        if self.is_off:
            return plain
        # Backward reads a copy of B, which is small, so that sharding need not gather the whole
        # embedding for it.
        second = self.lora_embedding_B.clone()
        update = (
            F.linear(F.embedding(tokens, self.lora_embedding_A.t()), second) * self.settings.scaling
        )
        update = update if factor is None else update * factor
        lengths = self.compute_relative_lengths()
        if lengths is None:
            return (plain + update).to(plain.dtype)
        return (lengths * (plain + update)).to(plain.dtype)


# Experts with frozen weights, kept in 4 or 8 bits, with a trained adapter next to each, or both; an
# adapted router.
#
# The weights `[E, o, i]` of all experts are quantized as one matrix `[E o, i]`, see
# `recipe_lib.adapters.quantized`; no block of it reaches from one expert into the next. An adapter
# has factors of its own for each expert, A `[E, r, i]` and B `[E, o, r]`: two more grouped matmuls.


class QuantizedExperts(QuantizedLinear):
    """Experts whose frozen weights are kept in 4 or 8 bits, and made whole in passing; backward
    makes them again.

    `out_features` counts the rows of all experts. cut: which part of how many of each run of rows,
    see `take_rows_of_runs`; None: all.
    """

    cut: tuple[int, int] | None = None

    def __init__(self, base: ExpertLinear, kind: str) -> None:
        """base: what it replaces, still on the meta device; its bias is taken over. kind: see
        `QuantizedLinear`.
        """
        rows, dtype = base.num_experts * base.out_features, base.weight.dtype
        QuantizedLinear.__init__(
            self, nn.Linear(base.in_features, rows, False, "meta", dtype), kind
        )
        self.num_experts, self.expert_rows = base.num_experts, base.out_features
        self.bias = base.bias

    def take_part_of_runs(self, runs: int, rank: int, size: int) -> None:
        """From now on computes with part number `rank` of `size` of each of so many runs of rows
        alone.

        For a tensor-parallel group, on the meta device, of NF4: blocks of a run follow one another,
        and codes and scales are then `[runs, blocks, 32]` and `[runs, blocks]`, to be cut by their
        second dimension.
        """
        assert self.weight_scales is not None
        self.cut = (rank, size)
        device, blocks = self.weight_codes.device, self.out_features * self.in_features // nf4.BLOCK
        self.weight_codes = make_frozen_parameter(
            (runs, blocks // runs, nf4.BLOCK // 2), self.weight_codes.dtype, device
        )
        self.weight_scales = make_frozen_parameter(
            (runs, blocks // runs), self.weight_scales.dtype, device
        )

    def _place(self) -> list[int]:
        if self.cut is None:
            return super()._place()
        rank, size = self.cut
        _, stride, _ = self.weight_codes.shape
        blocks = self.out_features * self.in_features // nf4.BLOCK
        return [rank * (stride // size), stride // size, stride, blocks]

    def _read_blocks(
        self, read_rows: Callable[[int, int, slice], Tensor], start: int, stop: int
    ) -> Tensor:
        if self.cut is None:
            return super()._read_blocks(read_rows, start, stop)
        rank, size = self.cut
        height = self.out_features // self.weight_codes.shape[0]  # rows of a run
        first, last = rank * height // size, (rank + 1) * height // size
        whole = slice(0, self.in_features)
        return torch.cat(
            [
                read_rows(run * height + first, run * height + last, whole).flatten()
                for run in range(start, stop)
            ]
        )

    def forward(self, rows: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:  # type: ignore[override]
        return self.grouped_product(rows, groups, of_tokens)

    def grouped_product(self, rows: Tensor, groups: Groups, of_tokens: bool) -> Tensor:
        """Rows `[m, i]`, or tokens `[n, i]`, to `[m, o]` by what of the weights this process
        computes with.
        """
        first, last = self.columns
        numbers = (self.num_experts, last - first, groups.choices if of_tokens else 0)
        order = (groups.tokens, groups.places, groups.ends)
        codes, scales, factors = self._part()
        settings = (*numbers, self.dtype, self._place())
        return multiply_groups(rows, codes, scales, factors, *order, *settings)


def _dequantize_experts(
    codes: Tensor, scales: Tensor | None, factors: Tensor, shape: tuple[int, int], settings: Any
) -> Tensor:
    """The dequantized weights `[E, o, i]`. shape: E and i. settings: type and place, see
    `QuantizedLinear`.
    """
    experts, columns = shape
    return dequantize(codes, scales, factors, columns, *settings).view(experts, -1, columns)


def _multiply_groups(
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
    weights = _dequantize_experts(codes, scales, factors, (experts, columns), (dtype, place)).to(
        rows.dtype
    )
    return grouped_matmul(take_rows(rows, tokens, choices), weights.transpose(1, 2), ends)


def _multiply_groups_gradient(
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
    weights = _dequantize_experts(codes, scales, factors, (experts, columns), (dtype, place)).to(
        gradient.dtype
    )
    found = grouped_matmul(gradient.contiguous(), weights, ends)
    del weights
    return sum_token_rows(found, places, choices) if choices else found


# Keeps the codes, which are parameters anyway, and neither rows nor weights.
multiply_groups = make_opaque_node(
    "quantized_experts",
    _multiply_groups,
    lambda rows, codes, scales, factors, tokens, places, ends, experts, columns, *_: rows.new_empty(
        (tokens.shape[0], count_rows(codes, scales, columns) // experts)
    ),
    _multiply_groups_gradient,
    lambda gradient, codes, scales, factors, places, ends, experts, columns, choices, *_: (
        gradient.new_empty((gradient.shape[0] // max(1, choices), columns))
    ),
    kept=(1, 2, 3, 5, 6, 7, 8, 9, 10, 11),
)


class AdaptedExpertModule(AdaptedModule):
    """Experts with an adapter; a class derived from it says what the frozen part is."""

    lora_magnitude_vector = None

    def __init__(self, base: Any, settings: AdapterSettings) -> None:
        """Raises ValueError for DoRA and dropout, which adapters of parameters do not have in PEFT
        either.
        """
        if settings.dora or settings.dropout:
            raise ValueError("adapters of experts have neither DoRA's lengths nor dropout")
        super().__init__(base, settings)
        outputs = base.expert_rows if isinstance(base, QuantizedExperts) else base.out_features
        with torch.device("meta"):
            self.lora_A = ExpertLinear(base.num_experts, base.in_features, settings.rank, False).to(
                settings.dtype
            )
            self.lora_B = ExpertLinear(base.num_experts, settings.rank, outputs, False).to(
                settings.dtype
            )

    def forward(self, rows: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:
        plain = super().forward(rows, groups, of_tokens=of_tokens)
        return self.add_update(
            plain, rows, groups, of_tokens, self.lora_A.weight, self.lora_B.weight
        )

    def add_update(
        self,
        plain: Tensor,
        rows: Tensor,
        groups: Groups,
        of_tokens: bool,
        first: Tensor,
        second: Tensor,
    ) -> Tensor:
        """What the frozen part gave `[m, o]`, with what the adapter of these A and B adds to it."""
        if self.is_off:
            return plain
        narrow = grouped_linear(rows, first, groups, of_tokens=of_tokens) * self.settings.scaling
        return (plain + grouped_linear(narrow, second, groups)).to(plain.dtype)


class AdaptedExperts(AdaptedExpertModule, ExpertLinear):
    """Experts with frozen weights and adapters."""


class AdaptedQuantizedExperts(AdaptedExpertModule, QuantizedExperts):  # type: ignore[misc]  # called as experts are
    """Experts with frozen weights of 4 or 8 bits and adapters."""


# What takes the place of what, the more special class first.
_ADAPTED: dict[type[nn.Module], Callable[[Any, AdapterSettings], AdaptedModule]] = {
    QuantizedExperts: AdaptedQuantizedExperts,
    QuantizedLinear: AdaptedQuantizedLinear,
    ExpertLinear: AdaptedExperts,
    Router: AdaptedRouter,
    nn.Linear: AdaptedLinear,
    OutputHead: AdaptedHead,
    nn.Embedding: AdaptedEmbedding,
}


def adapt(base: Any, settings: AdapterSettings | None, quantize: str = "none") -> nn.Module:
    """Return what takes the place of a linear, experts, a router, the head or the embedding.

    settings: None for one without an adapter. quantize: of linears and experts, as
    lora.quantize_base.
    """
    if quantize != "none" and can_quantize(base.in_features, base.out_features, quantize):
        base = (QuantizedExperts if isinstance(base, ExpertLinear) else QuantizedLinear)(
            base, quantize
        )
    if settings is None:
        return cast(nn.Module, base)
    return next(adapted for kind, adapted in _ADAPTED.items() if isinstance(base, kind))(
        base, settings
    )
