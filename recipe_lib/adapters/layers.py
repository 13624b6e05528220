"""Build modules with a frozen weight and a trained adapter: LoRA or DoRA, as PEFT computes them.

`adapters.lora` calls `adapt(module, settings)` for each linear, router, experts, embedding and head
that gets an adapter or is quantized, and puts the result in the module's place. Experts are the
matrices of a mixture-of-experts layer, stacked to `[E, out, in]`; its router chooses among them.
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
from torch.overrides import has_torch_function

from recipe_lib.adapters.adapted_product import (
    FrozenProduct,
    add_scaled,
    can_add_in_place,
    cast_linear,
    multiply_adapted,
)
from recipe_lib.adapters.quantized import (
    QuantizedLinear,
    can_quantize,
    count_rows,
    dequantize,
    differentiate_quantized,
    multiply_quantized,
)
from recipe_lib.models.decoder import OutputHead, ScaledEmbedding
from recipe_lib.models.mixture import ExpertLinear, Router
from recipe_lib.ops.dtensor_shards import get_local
from recipe_lib.ops.fused_kernels import make_opaque_node
from recipe_lib.ops.head_losses import HeadLoss, OutputAdapter, run_head_loss
from recipe_lib.ops.kept_tensors import drop_out, note_cheap, run_cheap
from recipe_lib.ops.mlp import (
    Groups,
    grouped_linear,
    grouped_matmul,
    sum_token_rows,
    take_rows,
)

# The adapter of a matrix W `[out, in]` is `scaling * B A`, with A `[r, in]` and B `[out, r]` (LoRA,
# arXiv 2106.09685). DoRA (arXiv 2402.09353) also trains the magnitude m `[out]` of every row: the
# matrix is `m * (W + scaling * B A) / norms`, with the norms of the rows of `W + scaling * B A`,
# through which no gradient flows. Parameters have PEFT's names after the module's, listed in
# `AdaptedModule.adapter_tensors`; the frozen ones keep theirs.

_NORM_ELEMENTS = 2**24  # elements of W + scaling * B A that exist at a time: 64 MiB in fp32


@dataclass(frozen=True)
class AdapterSettings:
    """The settings that all adapters of a model share."""

    rank: int  # r
    scaling: float  # factor of the product B A
    dropout: float  # probability, applied to the adapter's input
    dora: bool  # False: LoRA
    dtype: torch.dtype  # of the adapters' parameters


class AdaptedModule(nn.Module):
    """A module with the frozen weight of the one whose place it takes, and an adapter next to it.

    A derived class also derives from the other module's class, whose forward computes the frozen
    part. Adapters are made on the meta device.
    """

    # Names of all tensors that adapters have; a module has some of them.
    adapter_tensors = (
        "lora_A.weight",
        "lora_B.weight",
        "lora_magnitude_vector",
        "lora_embedding_A",
        "lora_embedding_B",
    )
    settings: AdapterSettings
    is_off: bool = False  # True: forward computes the frozen part alone (`lora.disable_adapters`)
    transposed: bool = False  # the frozen weight is `[in, out]`
    lora_magnitude_vector: nn.Parameter | None  # DoRA's m, by output channel; None: LoRA
    # Returns the norms that DoRA divides by, in the magnitudes' order and type, without gradient.
    compute_weight_norms: Callable[[], Tensor]

    def __init__(self, base: nn.Module, settings: AdapterSettings) -> None:
        """Take over all that `base` holds, which is not to be used afterwards."""
        nn.Module.__init__(self)
        # Copies of the dicts: what is registered here must not appear in base too.
        members = {
            name: dict(base.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")
        }
        self.__dict__.update(base.__dict__ | members)
        self.settings = settings

    def compute_relative_lengths(self) -> Tensor | None:
        """Return DoRA's factors of the output channels, `m / norms`; None: LoRA."""
        if self.lora_magnitude_vector is None:
            return None
        return self.lora_magnitude_vector / self.compute_weight_norms()

    def _add_magnitude(self, width: int) -> None:
        """Add DoRA's magnitudes if the settings have it; width: the number of output channels."""
        self.lora_magnitude_vector = None
        if self.settings.dora:
            self.lora_magnitude_vector = nn.Parameter(
                torch.empty(width, dtype=self.settings.dtype, device="meta")
            )


class AdaptedMatrix(AdaptedModule):
    """An adapted matrix that hidden states are multiplied by."""

    bias: Tensor | None  # of the frozen part

    def __init__(
        self, base: Any, settings: AdapterSettings, shape: tuple[int, int] | None = None
    ) -> None:
        """Add A, B and with DoRA m. shape: (out, in), for a base without those attributes."""
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
        """Return rows of W `[stop - start, in]`, for DoRA's norms."""
        weight: Any = self.weight
        return weight[start:stop]

    def frozen_forward(self, hidden: Tensor) -> Tensor:
        """Return `[..., out]` of hidden `[..., in]` by the frozen part alone, bias included."""
        return super().forward(hidden)

    def get_frozen_product(self) -> FrozenProduct | None:
        """Return what `frozen_forward` does, for `multiply_adapted`; None: it cannot be told."""
        return None

    @torch.no_grad()
    def compute_weight_norms(self) -> Tensor:
        """Return the norms `[out]` of the rows of `W + scaling * B A`, computed some at a time."""
        return self.compute_norms_with(self.get_frozen_rows, self.lora_A.weight, self.lora_B.weight)

    def compute_norms_with(
        self, read_rows: Callable[[int, int], Tensor], lora_a: Tensor, lora_b: Tensor
    ) -> Tensor:
        """Return the norms of the rows of a part of `W + scaling * B A`, such as a rank's.

        read_rows: `fn(start, stop)` returns rows of that part of W. lora_a, lora_b: the parts of A
        and B whose product is that part of `B A`.
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

        factors: from `compute_relative_lengths`; None: LoRA. frozen: computes the frozen part in
        place of `frozen_forward`, for a call at a time when the module may have another weight.
        """
        rate = self.settings.dropout if self.training else 0
        is_plain = frozen is None and factors is None and not rate
        if is_plain and can_add_in_place(hidden, lora_a):
            # Not sooner: under a torch function mode that counts calls, it would call.
            product = self.get_frozen_product()
            if product is not None and not product.is_trained():
                return multiply_adapted(hidden, product, lora_a, lora_b, self.settings.scaling)
        frozen = frozen or self.frozen_forward
        plain = frozen(hidden)
        dropped = hidden
        if rate:
            # Hidden from a torch function mode that numbers the calls of a forward, to apply a
            # tensor-parallel plan to another library's model: it was made without dropout.
            is_counted = torch.compiler.is_dynamo_compiling() or not has_torch_function((hidden,))
            with nullcontext() if is_counted else torch._C.DisableTorchFunction():
                dropped = drop_out(hidden, rate)
        # Scaled while it is `[..., r]`: scaling `[..., out]` would make a tensor of that size in
        # forward, and one in backward.
        narrow = cast_linear(dropped, lora_a) * self.settings.scaling
        update = F.linear(narrow, lora_b)
        if factors is None:
            return (plain + update).to(plain.dtype)
        if dropped is hidden:
            product = plain if self.bias is None else plain - self.bias
            return run_cheap(_scale_rows, product + update, factors, self.bias, plain.dtype)
        # The factors' gradient reads it: backward makes it again of its r channels.
        update = note_cheap(update, F.linear, narrow, lora_b)
        # As in PEFT: W x + b + (factors - 1) W dropout(x) + factors * scaling * B A dropout(x).
        product = frozen(dropped)
        product = product if self.bias is None else product - self.bias
        return (plain + (factors - 1) * product + factors * update).to(plain.dtype)


def _scale_rows(
    product: Tensor, factors: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `product [..., out] * factors [out] + bias`, in `dtype`."""
    return (product * factors if bias is None else product * factors + bias).to(dtype)


class AdaptedLinear(AdaptedMatrix, nn.Linear):
    """A linear with a frozen weight (and bias) and an adapter."""

    def get_frozen_product(self) -> FrozenProduct | None:
        # `memory.low_precision` gives it another forward.
        if "frozen_forward" in vars(self):
            return None
        return FrozenProduct(F.linear, _differentiate_linear, (self.weight, self.bias))


def _differentiate_linear(out_grad: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
    return out_grad @ weight


class AdaptedRouter(AdaptedMatrix, Router):
    """A router with a frozen weight and an adapter; its logits stay in fp32."""


class AdaptedQuantizedLinear(AdaptedMatrix, QuantizedLinear):
    """A linear with a frozen weight of 4 or 8 bits and an adapter."""

    def get_frozen_product(self) -> FrozenProduct:
        arguments = self.list_product_arguments(self.bias)
        return FrozenProduct(multiply_quantized, differentiate_quantized, arguments)

    def get_frozen_rows(self, start: int, stop: int) -> Tensor:
        return self.dequantize_weight_rows(start, stop)


class AdaptedHead(AdaptedMatrix, OutputHead):
    """The output head with a frozen weight and an adapter.

    With labels it returns the loss without ever having the logits of all tokens.
    """

    def __init__(self, base: OutputHead, settings: AdapterSettings) -> None:
        super().__init__(base, settings, (base.weight.shape[0], base.weight.shape[1]))
        self.bias = None

    def get_frozen_rows(self, start: int, stop: int) -> Tensor:
        # Outside of a forward a weight shared with a sharded embedding is not gathered yet.
        rows = self.weight[start:stop]
        return rows.full_tensor() if isinstance(rows, DTensor) else rows

    def frozen_forward(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., v]` of the frozen part alone, without the cap."""
        return F.linear(hidden, self.weight)

    def forward(  # type: ignore[override]  # OutputHead's signature
        self, hidden: Tensor, *, labels: Tensor | None = None, head_loss: HeadLoss | None = None
    ) -> Tensor:
        """Return logits `[..., v]`, or with labels the result of `head_loss`.

        head_loss: see `ops.head_losses`; None: the sum of the tokens' cross-entropies.
        """
        if self.is_off:
            return OutputHead.forward(self, hidden, labels=labels, head_loss=head_loss)
        trained = (self.lora_A.weight, self.lora_B.weight, self.compute_relative_lengths())
        if labels is None:
            return self.finish(self.apply_adapter(hidden, *trained))
        # Backward may project again, when this module no longer has the gathered weight (a tied one
        # of a sharded model): the frozen part is bound to the weight of now.
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

    A is `[r, v]` and B `[d, r]`, of the transposed matrix, as in PEFT: DoRA's magnitudes are those
    of the d columns. Dropout does not apply, as the input is tokens.
    """

    def __init__(self, base: nn.Embedding, settings: AdapterSettings) -> None:
        super().__init__(base, settings)
        # Factor of the embeddings (Gemma); None: 1. Forward rounds it to their dtype first.
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
        """Return the norms `[d]` of the columns of `W + scaling * (B A).T`, some rows at a time."""
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
        # A copy of B, which is small: backward reads the copy, so that FSDP need not gather the
        # whole embedding for it.
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
# has an A and a B for each expert, A `[E, r, i]` and B `[E, o, r]`: two more grouped matmuls. The m
# rows are the n tokens, once for each expert that they chose, sorted by expert.


class QuantizedExperts(QuantizedLinear):
    """Experts whose frozen weights are kept in 4 or 8 bits.

    They are dequantized for each product, and once more by backward. `out_features` counts the rows
    of all experts together.
    """

    def __init__(self, base: ExpertLinear, kind: str) -> None:
        """Take the place of `base`, on the meta device, and take over its bias.

        kind: `nf4` or `int8`.
        """
        matrix = nn.Linear(
            base.in_features,
            base.num_experts * base.out_features,
            bias=False,
            device="meta",
            dtype=base.weight.dtype,
        )
        QuantizedLinear.__init__(self, matrix, kind)
        self.num_experts = base.num_experts
        self.expert_rows = base.out_features  # rows of one expert
        self.transposed = base.transposed  # in files; rows and columns here are those of `[o, i]`
        self.output_dim = 2 if base.transposed else 1
        self.bias = base.bias

    def forward(  # type: ignore[override]  # ExpertLinear's signature
        self, rows: Tensor, groups: Groups, *, of_tokens: bool = False
    ) -> Tensor:
        return self.grouped_product(rows, groups, of_tokens)

    def grouped_product(self, rows: Tensor, groups: Groups, of_tokens: bool) -> Tensor:
        """Return rows `[m, i]`, sorted by expert, times the matrix of each one's expert: `[m, o]`.

        of_tokens: `rows` are the tokens `[n, i]`, from which the m rows are gathered. o counts the
        output channels that this process computes, which may be a part.
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

    shape: (E, i). settings: (dtype, place) of `adapters.quantized.dequantize`.
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
    """Return `QuantizedExperts.grouped_product`.

    codes, scales, factors, dtype, place: see `adapters.quantized.dequantize`. tokens, places, ends,
    choices: of `Groups`; choices 0: `rows` are rows, else tokens. experts: E. columns: i.
    """
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
    """Return the gradient of `rows`, given that of the result `[m, o]`; see `_multiply_groups`."""
    weights = _dequantize_experts(
        codes, scales=scales, factors=factors, shape=(experts, columns), settings=(dtype, place)
    ).to(gradient.dtype)
    rows_grad = grouped_matmul(gradient.contiguous(), weights, ends)
    del weights  # before the sum is made
    return sum_token_rows(rows_grad, places, choices) if choices else rows_grad


# Saves the codes for backward, which are parameters anyway, and neither rows nor weights. `kept`
# are the indices of the arguments of `function` that follow `gradient` in its backward.
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
    """Experts with an adapter; derived classes add the frozen part."""

    lora_magnitude_vector = None  # no DoRA

    def __init__(self, base: Any, settings: AdapterSettings) -> None:
        """Add A and B for each expert.

        Raises ValueError if `settings` has DoRA or dropout, which PEFT's adapters of parameters
        lack too.
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
        """Return rows times the adapted matrix of each one's expert, `[m, o]`.

        rows: sorted by expert, `[m, i]`; with of_tokens the tokens `[n, i]`, from which they are
        gathered. groups: the expert and token of each row.
        """
        plain: Tensor = super().forward(rows, groups, of_tokens=of_tokens)
        if self.is_off:
            return plain
        lora_a = get_local(self.lora_A.weight)
        lora_b = get_local(self.lora_B.weight)
        narrow = grouped_linear(rows, lora_a, groups, of_tokens=of_tokens) * self.settings.scaling
        return (plain + grouped_linear(narrow, lora_b, groups)).to(plain.dtype)


class AdaptedExperts(AdaptedExpertModule, ExpertLinear):
    """Experts with frozen weights and adapters."""


class AdaptedQuantizedExperts(AdaptedExpertModule, QuantizedExperts):  # type: ignore[misc]
    """Experts with frozen weights of 4 or 8 bits and adapters."""


# Class of a module -> class that takes its place. Derived classes stand before their base: the
# first match counts.
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
    """Return the module that takes the place of a linear, experts, a router, head or embedding.

    settings: of the adapter; None: no adapter. quantize: `none`, `nf4` or `int8`, for linears and
    experts; a weight that `can_quantize` refuses stays as it is.
    """
    if quantize != "none" and can_quantize(base.in_features, base.out_features, quantize):
        storage = QuantizedExperts if isinstance(base, ExpertLinear) else QuantizedLinear
        base = storage(base, quantize)
    if settings is None:
        return cast(nn.Module, base)
    adapted = next(adapted for kind, adapted in _ADAPTED.items() if isinstance(base, kind))
    return adapted(base, settings)
