"""Modules with a frozen weight and a trained adapter next to it: linears, the embedding, the output head.

The adapter of a matrix W `[out, in]` is `scaling * B A`, with A `[r, in]` and B `[out, r]` (LoRA, arXiv 2106.09685).
DoRA (arXiv 2402.09353) also trains the length m `[out]` of every row: the matrix is `m * (W + scaling * B A) / norms`,
where the norms are those of the rows of `W + scaling * B A`, and no gradient flows through them. Parameters have the
names that PEFT gives them, after the name of the module: `lora_A.weight`, `lora_B.weight`, `lora_magnitude_vector`,
`lora_embedding_A`, `lora_embedding_B`; the frozen ones keep theirs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function

from recipe_lib.adapters.quantized import QuantizedLinear, can_quantize
from recipe_lib.models.decoder import OutputHead, ScaledEmbedding
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


class AdaptedModule(nn.Module, ABC):
    """What every adapted module has: its settings, and a switch that leaves the frozen weight alone to work."""

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

    @abstractmethod
    def weight_norms(self) -> Tensor:
        """Lengths of the adapted matrix, in the order and type of `lora_magnitude_vector`. No gradient."""

    def relative_lengths(self) -> Tensor | None:
        """What DoRA multiplies each output channel by: its trained length over the adapted matrix's own; None: LoRA."""
        if self.lora_magnitude_vector is None:
            return None
        return self.lora_magnitude_vector / self.weight_norms()

    def _add_lengths(self, width: int) -> None:
        settings = self.settings
        empty = torch.empty(width, dtype=settings.dtype, device="meta") if settings.dora else None
        self.lora_magnitude_vector = None if empty is None else nn.Parameter(empty)


class AdaptedMatrix(AdaptedModule):
    """An adapted matrix that hidden states are multiplied by; a class derived from it says what the frozen part is."""

    bias: Tensor | None

    def add_adapter(self, in_features: int, out_features: int, settings: AdapterSettings) -> None:
        """Registers the adapter's parameters, on the meta device."""
        self.settings = settings
        self.lora_A = nn.Linear(in_features, settings.rank, bias=False, device="meta", dtype=settings.dtype)
        self.lora_B = nn.Linear(settings.rank, out_features, bias=False, device="meta", dtype=settings.dtype)
        self._add_lengths(out_features)

    @abstractmethod
    def frozen_rows(self, start: int, stop: int) -> Tensor:
        """Rows of W `[stop - start, in]`."""

    @abstractmethod
    def frozen_forward(self, hidden: Tensor) -> Tensor:
        """Hidden `[..., in]` to `[..., out]` by the frozen part alone, bias included."""

    @torch.no_grad()
    def weight_norms(self) -> Tensor:
        """Lengths `[out]` of the rows of `W + scaling * B A`, which never exists as a whole."""
        return self.lengths_with(self.frozen_rows, self.lora_A.weight, self.lora_B.weight)

    def lengths_with(self, frozen_rows: Callable[[int, int], Tensor], first: Tensor, second: Tensor) -> Tensor:
        """As `weight_norms`, of a part of the matrix: rows, or columns, of W, and what A and B have for them."""
        wide = torch.promote_types(second.dtype, torch.float32)
        rows = max(1, _NORM_ELEMENTS // first.shape[1])
        lengths = []
        for start in range(0, second.shape[0], rows):
            scaled = second[start : start + rows]
            frozen = frozen_rows(start, start + scaled.shape[0]).to(second.device, wide)  # it may lie on the host
            adapted = add_scaled(frozen, scaled @ first, self.settings.scaling)
            lengths.append(torch.linalg.vector_norm(adapted, dim=1))
        return torch.cat(lengths).to(second.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden `[..., in]` to `[..., out]`."""
        if self.is_off:
            return self.frozen_forward(hidden)
        return self.adapted(hidden, self.lora_A.weight, self.lora_B.weight, self.relative_lengths())

    def adapted(
        self,
        hidden: Tensor,
        first: Tensor,
        second: Tensor,
        lengths: Tensor | None,
        frozen: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Hidden `[..., in]` to `[..., out]`. first, second: A and B. lengths: those of `relative_lengths`.

        frozen: in place of `frozen_forward`, where the weight it finds is another by the time it is called.
        """
        scaling, rate = self.settings.scaling, self.settings.dropout
        frozen = frozen or self.frozen_forward
        plain = frozen(hidden)
        dropped = _dropped(hidden, rate) if rate and self.training else hidden
        # Scaled while it is `[..., r]`: neither a product with `[..., out]` numbers, nor one in backward.
        update = F.linear(cast_linear(dropped, first) * scaling, second)
        if lengths is None:
            return (plain + update).to(plain.dtype)
        if dropped is hidden:
            product = plain if self.bias is None else plain - self.bias
            turned = lengths * (product + update)
            return (turned if self.bias is None else turned + self.bias).to(plain.dtype)
        # With dropout the frozen part sees all of the input at its old lengths, their change what is left of it.
        product = frozen(dropped)
        product = product if self.bias is None else product - self.bias
        return (plain + (lengths - 1) * product + lengths * update).to(plain.dtype)


def _dropped(hidden: Tensor, rate: float) -> Tensor:
    """`F.dropout`, which an inferred plan does not count: its calls are those of a forward without dropout."""
    if torch.compiler.is_dynamo_compiling() or not has_torch_function((hidden,)):
        return F.dropout(hidden, rate)
    with torch._C.DisableTorchFunction():
        return F.dropout(hidden, rate)


def add_scaled(tensor: Tensor, update: Tensor, scaling: float) -> Tensor:
    """`tensor + scaling * update`, without the product in memory.

    Not `torch.add(..., alpha=scaling)`, the same to the bit: where `update` is a product of two matrices, inductor of
    torch 2.11 to 2.13 makes an `addmm` of it, and leaves alpha out (docs/upstream/add_alpha.md).
    """
    return torch.sub(tensor, update, alpha=-scaling)


def cast_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """`hidden.to(weight.dtype) @ weight.T`; keeps hidden as it came."""
    if hidden.dtype == weight.dtype:
        return F.linear(hidden, weight)
    if not torch.compiler.is_dynamo_compiling() and has_torch_function((hidden, weight)):  # to a mode it is one call
        return cast(Tensor, handle_torch_function(linear, (hidden, weight), hidden, weight))
    return linear(hidden, weight)


def linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """`cast_linear` of two types."""
    return cast(Tensor, _CastLinear.apply(hidden, weight))


class _CastLinear(torch.autograd.Function):
    """`hidden.to(weight.dtype) @ weight.T`; keeps hidden as it came, not a wider copy for each linear that reads it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden.to(weight.dtype), weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        (gradient,) = gradients
        hidden_grad = (gradient @ weight).to(hidden.dtype) if ctx.needs_input_grad[0] else None
        weight_grad = gradient.flatten(0, -2).t() @ hidden.flatten(0, -2).to(weight.dtype)
        return hidden_grad, weight_grad


class AdaptedLinear(AdaptedMatrix, nn.Linear):
    """A linear with a frozen weight (and bias) and an adapter."""

    def __init__(self, base: nn.Linear, settings: AdapterSettings) -> None:
        has_bias = base.bias is not None
        nn.Linear.__init__(self, base.in_features, base.out_features, has_bias, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.add_adapter(base.in_features, base.out_features, settings)

    def frozen_rows(self, start: int, stop: int) -> Tensor:
        """Rows of W `[stop - start, in]`."""
        return self.weight[start:stop]

    def frozen_forward(self, hidden: Tensor) -> Tensor:
        """Hidden `[..., in]` to `[..., out]` by the frozen part alone."""
        return F.linear(hidden, self.weight, self.bias)


class AdaptedQuantizedLinear(AdaptedMatrix, QuantizedLinear):
    """A linear with a frozen weight of 4 or 8 bits and an adapter."""

    def __init__(self, base: nn.Linear, kind: str, settings: AdapterSettings) -> None:
        QuantizedLinear.__init__(self, base, kind)
        self.add_adapter(base.in_features, base.out_features, settings)

    def frozen_rows(self, start: int, stop: int) -> Tensor:
        """Rows of W `[stop - start, in]`."""
        return self.weight_rows(start, stop)

    def frozen_forward(self, hidden: Tensor) -> Tensor:
        """Hidden `[..., in]` to `[..., out]` by the frozen part alone."""
        return QuantizedLinear.forward(self, hidden)


def adapted_linear(base: nn.Linear, settings: AdapterSettings | None, quantize: str) -> nn.Module:
    """What takes the place of a linear; settings: None for one without an adapter. quantize: as lora.quantize_base."""
    if quantize != "none" and can_quantize(base.in_features, base.out_features, quantize):
        return QuantizedLinear(base, quantize) if settings is None else AdaptedQuantizedLinear(base, quantize, settings)
    return base if settings is None else AdaptedLinear(base, settings)


class AdaptedHead(AdaptedMatrix, OutputHead):
    """The output head with a frozen weight and an adapter; the loss still comes without logits of all tokens."""

    def __init__(self, base: OutputHead, settings: AdapterSettings) -> None:
        nn.Module.__init__(self)
        self.weight, self.softcap, self.finish = base.weight, base.softcap, base.finish
        self.bias = None
        self.add_adapter(base.weight.shape[1], base.weight.shape[0], settings)

    def frozen_rows(self, start: int, stop: int) -> Tensor:
        """Rows of W `[stop - start, d]`; outside of a forward a weight shared with a sharded embedding is gathered."""
        rows = self.weight[start:stop]
        return rows.full_tensor() if isinstance(rows, DTensor) else rows

    def frozen_forward(self, hidden: Tensor) -> Tensor:
        """Hidden `[..., d]` to logits `[..., v]` by the frozen part alone, without the cap."""
        return F.linear(hidden, self.weight)

    def forward(  # type: ignore[override]  # that of a head
        self, hidden: Tensor, *, labels: Tensor | None = None, head_loss: HeadLoss | None = None
    ) -> Tensor:
        """As `OutputHead.forward`."""
        if self.is_off:
            return OutputHead.forward(self, hidden, labels=labels, head_loss=head_loss)
        trained = (self.lora_A.weight, self.lora_B.weight, self.relative_lengths())
        if labels is None:
            return self.finish(self.adapted(hidden, *trained))
        # Where backward projects again, a tied and sharded weight is no longer this module's.
        adapter = OutputAdapter(self.adapted, trained, partial(F.linear, weight=self.weight))
        return run_head_loss(head_loss, hidden, self.weight, labels, softcap=self.softcap, adapter=adapter)


class AdaptedEmbedding(AdaptedModule, nn.Embedding):
    """An embedding with a frozen weight `[v, d]` and an adapter; DoRA's lengths are those of its d columns.

    Dropout does not apply: the input is tokens.
    """

    def __init__(self, base: nn.Embedding, settings: AdapterSettings) -> None:
        nn.Embedding.__init__(self, base.num_embeddings, base.embedding_dim, device="meta")
        self.weight = base.weight
        self.scale = base.scale if isinstance(base, ScaledEmbedding) else None
        self.settings = settings
        vocabulary, width, rank = base.num_embeddings, base.embedding_dim, settings.rank
        self.lora_embedding_A = nn.Parameter(torch.empty(rank, vocabulary, dtype=settings.dtype, device="meta"))
        self.lora_embedding_B = nn.Parameter(torch.empty(width, rank, dtype=settings.dtype, device="meta"))
        self._add_lengths(width)

    @torch.no_grad()
    def weight_norms(self) -> Tensor:
        """Lengths `[d]` of the columns of `W + scaling * (B A).T`, which never exists as a whole."""
        first, second = self.lora_embedding_A, self.lora_embedding_B
        wide = torch.promote_types(second.dtype, torch.float32)
        rows = max(1, _NORM_ELEMENTS // self.embedding_dim)
        squares = torch.zeros(self.embedding_dim, dtype=wide, device=second.device)
        for part, scaled in zip(self.weight.split(rows), first.split(rows, dim=1), strict=True):
            update = scaled.t() @ second.t()
            squares += add_scaled(part.to(second.device, wide), update, self.settings.scaling).square_().sum(dim=0)
        return squares.sqrt_().to(second.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens `[b, s]` to `[b, s, d]`."""
        plain = F.embedding(tokens, self.weight)
        factor = None if self.scale is None else plain.new_full((), self.scale)
        plain = plain if factor is None else plain * factor
        if self.is_off:
            return plain
        # Backward reads a copy of B, which is small, so that sharding need not gather the whole embedding for it.
        second = self.lora_embedding_B.clone()
        update = F.linear(F.embedding(tokens, self.lora_embedding_A.t()), second) * self.settings.scaling
        update = update if factor is None else update * factor
        lengths = self.relative_lengths()
        if lengths is None:
            return (plain + update).to(plain.dtype)
        return (lengths * (plain + update)).to(plain.dtype)
