"""Modules with a frozen weight and a trained adapter: linears, experts, the embedding, the head.

`adapt(module, settings)` returns what takes a module's place. The adapter of a matrix W `[out, in]`
is `scaling * B A`, with A `[r, in]` and B `[out, r]` (LoRA, arXiv 2106.09685). DoRA (arXiv
2402.09353) also trains the magnitude m `[out]` of every row: the matrix is
`m * (W + scaling * B A) / norms`, where the norms are those of the rows of `W + scaling * B A`, and
no gradient flows through them.

Parameters have PEFT's names after the module's: `lora_A.weight`, `lora_B.weight`,
`lora_magnitude_vector`, `lora_embedding_A`, `lora_embedding_B`; the frozen ones keep theirs.
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
from recipe_lib.ops.head_losses import HeadLoss, OutputAdapter, run_head_loss
from recipe_lib.ops.mlp import Groups, grouped_linear, grouped_matmul, sum_token_rows, take_rows

_NORM_ELEMENTS = 2**24  # elements of W + scaling * B A that exist at a time: 64 MiB in fp32


@dataclass(frozen=True)
class AdapterSettings:
    """The settings that all adapters of a model share."""

    rank: int
    scaling: float  # of the product B A
    dropout: float  # of the adapter's input
    dora: bool
    dtype: torch.dtype  # of the adapters' parameters


class AdaptedModule(nn.Module):
    """A module with the frozen weight of the one whose place it takes, and an adapter next to it.

    A derived class also derives from the other module's class, whose forward computes the frozen
    part. Adapters are made on the meta device.
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
    # Norms of the rows of the adapted matrix, in their order and type; no gradient.
    compute_weight_norms: Callable[[], Tensor]

    def __init__(self, base: nn.Module, settings: AdapterSettings) -> None:
        """Take over what `base` holds, which is not to be used any more."""
        nn.Module.__init__(self)
        # Copies of the dicts: what is registered here must not appear in base too.
        members = {
            name: dict(base.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")
        }
        self.__dict__.update(base.__dict__ | members)
        self.settings = settings

    def compute_relative_lengths(self) -> Tensor | None:
        """Return DoRA's factors of the output channels: trained magnitudes over present norms.

        None: LoRA.
        """
        if self.lora_magnitude_vector is None:
            return None
        return self.lora_magnitude_vector / self.compute_weight_norms()

    def _add_magnitude(self, width: int) -> None:
        self.lora_magnitude_vector = None
        if self.settings.dora:
            self.lora_magnitude_vector = nn.Parameter(
                torch.empty(width, dtype=self.settings.dtype, device="meta")
            )


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
        """Return rows of W `[stop - start, in]`."""
        weight: Any = self.weight
        return weight[start:stop]

    def frozen_forward(self, hidden: Tensor) -> Tensor:
        """Return `[..., out]` of hidden `[..., in]` by the frozen part alone, bias included."""
        return super().forward(hidden)

    @torch.no_grad()
    def compute_weight_norms(self) -> Tensor:
        """Return the norms `[out]` of the rows of `W + scaling * B A`, made some rows at a time."""
        return self.compute_norms_with(self.get_frozen_rows, self.lora_A.weight, self.lora_B.weight)

    def compute_norms_with(
        self, read_rows: Callable[[int, int], Tensor], lora_a: Tensor, lora_b: Tensor
    ) -> Tensor:
        """Return the norms of the rows of a part of the adapted matrix.

        read_rows: gives rows of that part of W. lora_a, lora_b: what A and B have for it.
        """
        wide = torch.promote_types(lora_b.dtype, torch.float32)
        rows = max(1, _NORM_ELEMENTS // lora_a.shape[1])
        norms = []
        for start in range(0, lora_b.shape[0], rows):
            part = lora_b[start : start + rows]
            # W may lie on the host.
            frozen = read_rows(start, start + part.shape[0]).to(part.device, wide)
            adapted = add_scaled(frozen, part @ lora_a, self.settings.scaling)
            norms.append(torch.linalg.vector_norm(adapted, dim=1))
        return torch.cat(norms).to(lora_b.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `[..., out]` of hidden `[..., in]`."""
        if self.is_off:
            return self.frozen_forward(hidden)
        factors = self.compute_relative_lengths()
        return self.apply_adapter(
            hidden, lora_a=self.lora_A.weight, lora_b=self.lora_B.weight, factors=factors
        )

    def apply_adapter(
        self,
        hidden: Tensor,
        lora_a: Tensor,
        lora_b: Tensor,
        factors: Tensor | None,
        frozen: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return `[..., out]` of hidden `[..., in]` with these A, B and factors.

        factors: those of `compute_relative_lengths`. frozen: in place of `frozen_forward`, where
        the module has another weight by the time it is called.
        """
        rate = self.settings.dropout
        frozen = frozen or self.frozen_forward
        plain = frozen(hidden)
        dropped = hidden
        if rate and self.training:
            # An inferred plan does not count it: its calls are those of a forward without dropout.
            is_counted = torch.compiler.is_dynamo_compiling() or not has_torch_function((hidden,))
            with nullcontext() if is_counted else torch._C.DisableTorchFunction():
                dropped = F.dropout(hidden, rate)
        # Scaled while it is `[..., r]`: scaling `[..., out]` would make a tensor of that size in
        # forward, and one in backward.
        update = F.linear(cast_linear(dropped, lora_a) * self.settings.scaling, lora_b)
        if factors is None:
            return (plain + update).to(plain.dtype)
        if dropped is hidden:
            product = plain if self.bias is None else plain - self.bias
            scaled = factors * (product + update)
            return (scaled if self.bias is None else scaled + self.bias).to(plain.dtype)
        # With dropout the frozen part sees all of the input with factor 1, and what is left of it
        # with the change of the factor, as in PEFT.
        product = frozen(dropped)
        product = product if self.bias is None else product - self.bias
        return (plain + (factors - 1) * product + factors * update).to(plain.dtype)


def add_scaled(tensor: Tensor, update: Tensor, scaling: float) -> Tensor:
    """Return `tensor + scaling * update`, without the product in memory."""
    # Not `torch.add(..., alpha=scaling)`, the same to the bit: where `update` is a product of two
    # matrices, inductor of torch 2.11 to 2.13 makes an `addmm` of it, and leaves alpha out
    # (docs/upstream/add_alpha.md).
    return torch.sub(tensor, update, alpha=-scaling)


def cast_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return `hidden.to(weight.dtype) @ weight.T`; hidden is saved for backward as it came."""
    if hidden.dtype == weight.dtype:
        return F.linear(hidden, weight)
    # To a function mode it is one call of `linear`.
    if not torch.compiler.is_dynamo_compiling() and has_torch_function((hidden, weight)):
        return cast(Tensor, handle_torch_function(linear, (hidden, weight), hidden, weight))
    return linear(hidden, weight)


def linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return `hidden.to(weight.dtype) @ weight.T` of two types."""
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
    """The output head with a frozen weight and an adapter.

    As without one, the loss comes without the logits of all tokens at a time.
    """

    def __init__(self, base: OutputHead, settings: AdapterSettings) -> None:
        super().__init__(base, settings, (base.weight.shape[0], base.weight.shape[1]))
        self.bias = None

    def get_frozen_rows(self, start: int, stop: int) -> Tensor:
        """Return rows of W `[stop - start, d]`."""
        # Outside of a forward a weight shared with a sharded embedding is not gathered yet.
        rows = self.weight[start:stop]
        return rows.full_tensor() if isinstance(rows, DTensor) else rows

    def frozen_forward(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., v]` of the frozen part alone, without the cap."""
        return F.linear(hidden, self.weight)

    def forward(  # type: ignore[override]  # that of a head
        self, hidden: Tensor, *, labels: Tensor | None = None, head_loss: HeadLoss | None = None
    ) -> Tensor:
        if self.is_off:
            return OutputHead.forward(self, hidden, labels=labels, head_loss=head_loss)
        trained = (self.lora_A.weight, self.lora_B.weight, self.compute_relative_lengths())
        if labels is None:
            return self.finish(self.apply_adapter(hidden, *trained))
        # Backward projects again, when a tied and sharded weight is no longer this module's: so the
        # frozen part is bound to the weight of now.
        adapter = OutputAdapter(self.apply_adapter, trained, partial(F.linear, weight=self.weight))
        return run_head_loss(
            head_loss,
            hidden=hidden,
            weight=self.weight,
            labels=labels,
            softcap=self.softcap,
            adapter=adapter,
        )


class AdaptedEmbedding(AdaptedModule, nn.Embedding):
    """An embedding with a frozen weight `[v, d]` and an adapter.

    DoRA's magnitudes are those of its d columns. Dropout does not apply: the input is tokens.
    """

    def __init__(self, base: nn.Embedding, settings: AdapterSettings) -> None:
        super().__init__(base, settings)
        self.scale = base.scale if isinstance(base, ScaledEmbedding) else None
        rank = settings.rank
        width = base.embedding_dim
        with torch.device("meta"):
            lora_a = torch.empty(rank, base.num_embeddings, dtype=settings.dtype)
            self.lora_embedding_A = nn.Parameter(lora_a)
            self.lora_embedding_B = nn.Parameter(torch.empty(width, rank, dtype=settings.dtype))
        self._add_magnitude(width)

    @torch.no_grad()
    def compute_weight_norms(self) -> Tensor:
        """Return the norms `[d]` of the columns of `W + scaling * (B A).T`, made in pieces."""
        lora_a = self.lora_embedding_A
        lora_b = self.lora_embedding_B
        wide = torch.promote_types(lora_b.dtype, torch.float32)
        rows = max(1, _NORM_ELEMENTS // self.embedding_dim)
        squares = torch.zeros(self.embedding_dim, dtype=wide, device=lora_b.device)
        for frozen, part in zip(self.weight.split(rows), lora_a.split(rows, dim=1), strict=True):
            update = part.t() @ lora_b.t()
            adapted = add_scaled(frozen.to(lora_b.device, wide), update, self.settings.scaling)
            squares += adapted.square_().sum(dim=0)
            del adapted  # before the next piece is made
        return squares.sqrt_().to(lora_b.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings `[b, s, d]` of tokens `[b, s]`."""
        plain = F.embedding(tokens, self.weight)
        scale = None if self.scale is None else plain.new_full((), self.scale)
        plain = plain if scale is None else plain * scale
        if self.is_off:
            return plain
        # Backward reads a copy of B, which is small, so that sharding need not gather the whole
        # embedding for it.
        lora_b = self.lora_embedding_B.clone()
        update = F.linear(F.embedding(tokens, self.lora_embedding_A.t()), lora_b)
        update = update * self.settings.scaling
        update = update if scale is None else update * scale
        factors = self.compute_relative_lengths()
        if factors is None:
            return (plain + update).to(plain.dtype)
        return (factors * (plain + update)).to(plain.dtype)


# The weights `[E, o, i]` of all experts are quantized as one matrix `[E o, i]`, see
# `recipe_lib.adapters.quantized`; no block of it reaches from one expert into the next. An adapter
# has factors of its own for each expert, A `[E, r, i]` and B `[E, o, r]`: two more grouped matmuls.


class QuantizedExperts(QuantizedLinear):
    """Experts whose frozen weights are kept in 4 or 8 bits.

    They are dequantized in passing, and once more by backward. `out_features` counts the rows of
    all experts.
    """

    # (rank, size): which part of how many of each run of rows, see `take_part_of_runs`; None: all
    cut: tuple[int, int] | None = None

    def __init__(self, base: ExpertLinear, kind: str) -> None:
        """Take the place of `base`, on the meta device, and take over its bias. kind: of KINDS."""
        matrix = nn.Linear(
            base.in_features,
            base.num_experts * base.out_features,
            bias=False,
            device="meta",
            dtype=base.weight.dtype,
        )
        QuantizedLinear.__init__(self, matrix, kind)
        self.num_experts = base.num_experts
        self.expert_rows = base.out_features
        self.bias = base.bias

    def take_part_of_runs(self, runs: int, rank: int, size: int) -> None:
        """Compute with part `rank` of `size` of each of so many runs of rows from now on.

        For a tensor-parallel group, on the meta device, of NF4. Blocks of a run follow one another:
        codes and scales are then `[runs, blocks, 32]` and `[runs, blocks]`, to be divided by their
        second dimension.
        """
        assert self.weight_scales is not None
        self.cut = (rank, size)
        device = self.weight_codes.device
        shape = (runs, self.out_features * self.in_features // nf4.BLOCK // runs)
        self.weight_codes = make_frozen_parameter(
            (*shape, nf4.BLOCK // 2), self.weight_codes.dtype, device
        )
        self.weight_scales = make_frozen_parameter(shape, self.weight_scales.dtype, device)

    def _get_block_place(self) -> list[int]:
        if self.cut is None:
            return super()._get_block_place()
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
        first = rank * height // size
        last = (rank + 1) * height // size
        all_columns = slice(0, self.in_features)
        runs = [
            read_rows(run * height + first, run * height + last, all_columns).flatten()
            for run in range(start, stop)
        ]
        return torch.cat(runs)

    def forward(  # type: ignore[override]  # called as experts are
        self, rows: Tensor, groups: Groups, *, of_tokens: bool = False
    ) -> Tensor:
        return self.grouped_product(rows, groups, of_tokens)

    def grouped_product(self, rows: Tensor, groups: Groups, of_tokens: bool) -> Tensor:
        """Return `[m, o]` of rows `[m, i]`, or of tokens `[n, i]`.

        By the weights that this process computes with, which may be a part.
        """
        first, last = self.columns
        codes, scales, factors = self._get_local_storage()
        # Without names: an operator takes its arguments by position.
        return multiply_groups(
            rows,
            codes,
            scales,
            factors,
            groups.tokens,
            groups.places,
            groups.ends,
            self.num_experts,
            last - first,
            groups.choices if of_tokens else 0,
            self.dtype,
            self._get_block_place(),
        )


def _dequantize_experts(
    codes: Tensor, scales: Tensor | None, factors: Tensor, shape: tuple[int, int], settings: Any
) -> Tensor:
    """Return the dequantized weights `[E, o, i]`.

    shape: E and i. settings: the type and the place of blocks, see `dequantize`.
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
    weights = _dequantize_experts(
        codes, scales=scales, factors=factors, shape=(experts, columns), settings=(dtype, place)
    ).to(rows.dtype)
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
    weights = _dequantize_experts(
        codes, scales=scales, factors=factors, shape=(experts, columns), settings=(dtype, place)
    ).to(gradient.dtype)
    rows_grad = grouped_matmul(gradient.contiguous(), weights, ends)
    del weights  # before the sum is made
    return sum_token_rows(rows_grad, places, choices) if choices else rows_grad


# Saves the codes for backward, which are parameters anyway, and neither rows nor weights.
multiply_groups = make_opaque_node(
    "quantized_experts",
    function=_multiply_groups,
    shapes=lambda rows, codes, scales, factors, tokens, places, ends, experts, columns, *_: (
        rows.new_empty((tokens.shape[0], count_rows(codes, scales, columns) // experts))
    ),
    gradient=_multiply_groups_gradient,
    # The last: columns and choices.
    gradient_shapes=lambda gradient, codes, scales, factors, places, ends, experts, *last: (
        gradient.new_empty((gradient.shape[0] // max(1, last[1]), last[0]))
    ),
    kept=(1, 2, 3, 5, 6, 7, 8, 9, 10, 11),
)


class AdaptedExpertModule(AdaptedModule):
    """Experts with an adapter; a class derived from it says what the frozen part is."""

    lora_magnitude_vector = None

    def __init__(self, base: Any, settings: AdapterSettings) -> None:
        """Add A and B for each expert.

        Raises ValueError for DoRA and dropout, which PEFT's adapters of parameters lack too.
        """
        if settings.dora or settings.dropout:
            raise ValueError("adapters of experts have neither DoRA's lengths nor dropout")
        super().__init__(base, settings)
        outputs = base.expert_rows if isinstance(base, QuantizedExperts) else base.out_features
        with torch.device("meta"):
            lora_a = ExpertLinear(
                base.num_experts,
                in_features=base.in_features,
                out_features=settings.rank,
                bias=False,
            )
            lora_b = ExpertLinear(
                base.num_experts, in_features=settings.rank, out_features=outputs, bias=False
            )
        self.lora_A = lora_a.to(settings.dtype)
        self.lora_B = lora_b.to(settings.dtype)

    def forward(self, rows: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:
        plain = super().forward(rows, groups, of_tokens=of_tokens)
        return self.add_update(
            plain,
            rows=rows,
            groups=groups,
            of_tokens=of_tokens,
            lora_a=self.lora_A.weight,
            lora_b=self.lora_B.weight,
        )

    def add_update(
        self,
        plain: Tensor,
        rows: Tensor,
        groups: Groups,
        of_tokens: bool,
        lora_a: Tensor,
        lora_b: Tensor,
    ) -> Tensor:
        """Return the frozen part's output `[m, o]` plus what the adapter of these A and B adds."""
        if self.is_off:
            return plain
        narrow = grouped_linear(rows, lora_a, groups, of_tokens=of_tokens) * self.settings.scaling
        return (plain + grouped_linear(narrow, lora_b, groups)).to(plain.dtype)


class AdaptedExperts(AdaptedExpertModule, ExpertLinear):
    """Experts with frozen weights and adapters."""


class AdaptedQuantizedExperts(AdaptedExpertModule, QuantizedExperts):  # type: ignore[misc]
    """Experts with frozen weights of 4 or 8 bits and adapters."""


# By the class of a module: the class that takes its place. Derived classes stand before their
# base.
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

    settings: None for a module without an adapter. quantize: of linears and experts, as
    lora.quantize_base.
    """
    if quantize != "none" and can_quantize(base.in_features, base.out_features, quantize):
        storage = QuantizedExperts if isinstance(base, ExpertLinear) else QuantizedLinear
        base = storage(base, quantize)
    if settings is None:
        return cast(nn.Module, base)
    adapted = next(adapted for kind, adapted in _ADAPTED.items() if isinstance(base, kind))
    return adapted(base, settings)
