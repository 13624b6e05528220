"""Count the bytes that a layer keeps for backward by formulas, from the numbers of a model's spec.

docs/memory.md has the same formulas in words. Nothing here reads a measurement or runs a model.
Weights, adapters and hidden states are in bf16.
"""

from dataclasses import dataclass

from recipe_lib.models.spec import DecoderSpec

BF16 = 2
FP32 = 4
INT64 = 8
RANDOM_STATE = 24  # bytes of seed and offset, which a GPU's attention kernels return


@dataclass(frozen=True)
class Adapters:
    """The adapters of all linears of a layer; in a layer with experts, of its attention."""

    rank: int
    dora: bool = False
    dropout: bool = False
    experts: bool = False  # the experts' matrices have adapters too


@dataclass(frozen=True)
class Widths:
    """The numbers of elements of a token that the formulas are made of."""

    d: int  # width of the model
    q: int  # all heads of queries
    kv: int  # all heads of keys, or of values
    f: int  # inner channels of the MLP, those of all of a token's experts
    num_experts: int  # E, 0: the layer has an MLP
    top_k: int

    @classmethod
    def read(cls, spec: DecoderSpec, layer: int) -> "Widths":
        mixture = spec.mixture if spec.mixture and spec.mixture.layers[layer] else None
        return cls(
            d=spec.width,
            q=spec.num_heads * spec.head_width,
            kv=spec.num_kv_heads * spec.head_width,
            f=spec.mlp_width if mixture is None else mixture.top_k * mixture.mlp_width,
            num_experts=0 if mixture is None else mixture.num_experts,
            top_k=0 if mixture is None else mixture.top_k,
        )

    def list_linears(self, adapters: Adapters) -> list[tuple[int, int]]:
        """Return (input, output) channels of the linears that have adapters, experts left out."""
        d = self.d
        q = self.q
        kv = self.kv
        f = self.f
        attention = [(d, q), (d, kv), (d, kv), (q, d)]
        return attention if self.num_experts else [*attention, (d, f), (d, f), (f, d)]


def count_kept_bytes(
    spec: DecoderSpec,
    layer: int,
    tokens: int,
    *,
    adapters: Adapters | None = None,
    recomputes: bool = True,
    on_gpu: bool = False,
) -> int:
    """Return the bytes that a layer keeps for backward for `tokens` tokens.

    layer: its index. adapters: None: all weights are trained. recomputes: the value of
    `memory.recompute_cheap`. on_gpu: with a GPU's kernels, else with a CPU's.
    """
    widths = Widths.read(spec, layer)
    token_bytes = BF16 * _count_elements(spec, widths)
    token_bytes += count_attention_bytes(spec) + count_router_bytes(spec, widths)
    if on_gpu:
        token_bytes += FP32 * _count_norm_rows(spec)
    if not recomputes:
        token_bytes += BF16 * _count_remade_elements(spec, widths, adapters)
        token_bytes += count_remade_router_bytes(spec, widths, adapters)
        if on_gpu and spec.norm_offset:
            # Gemma's norms save their inputs in fp32, in place of bf16.
            token_bytes += (FP32 - BF16) * _count_norm_inputs(spec, widths)
    layer_bytes = FP32 * widths.num_experts  # the end of each expert's rows, int32
    if on_gpu and spec.attention_softcap is None:
        # With sinks the kernel below `varlen_attn` is called, which returns one tensor of both.
        layer_bytes += 16 if spec.sinks else RANDOM_STATE
    if on_gpu and spec.norm_offset:  # 1 + weight of each norm, in fp32
        layer_bytes += FP32 * _count_norm_weights(spec)
    if adapters is not None:
        token_bytes += _count_adapter_bytes(spec, widths, adapters, recomputes=recomputes)
        if adapters.dora:
            outputs = sum(output for _, output in widths.list_linears(adapters))
            # Vectors: norms, magnitudes over norms, and with dropout these less 1.
            layer_bytes += (3 if adapters.dropout else 2) * BF16 * outputs
    return token_bytes * tokens + layer_bytes


def _count_elements(spec: DecoderSpec, widths: Widths) -> int:
    """Count what is kept in any case, and all else is made of."""
    # The layer's input; the sum after attention, or attention's output before its norm.
    elements = 2 * widths.d
    elements += 2 * widths.q  # queries, and attention's result
    elements += 2 * widths.kv
    elements += 2 * widths.f  # gate and up
    if spec.post_norms:
        elements += widths.d  # the MLP's output before its norm
    return elements


def count_attention_bytes(spec: DecoderSpec) -> int:
    """Count the log-sum-exps of attention's kernels. Capped attention computes them again."""
    return 0 if spec.attention_softcap is not None else FP32 * spec.num_heads


def count_router_bytes(spec: DecoderSpec, widths: Widths) -> int:
    """Count the experts that tokens chose, the rows of these choices, and their scores."""
    if not widths.num_experts:
        return 0
    assert spec.mixture is not None
    scores = widths.top_k if spec.mixture.normalized else widths.num_experts
    return 2 * INT64 * widths.top_k + FP32 * scores


def _count_norm_rows(spec: DecoderSpec) -> int:
    """Count the rows of a token that norms scale, each with a factor that a GPU's kernel saves."""
    rows = 4 if spec.post_norms else 2
    if spec.width_norms:
        return rows + 2
    return rows + (spec.num_heads + spec.num_kv_heads if spec.head_norms else 0)


def _count_norm_weights(spec: DecoderSpec) -> int:
    """Count the weights of a layer's norms."""
    weights = (4 if spec.post_norms else 2) * spec.width
    return weights + (2 * spec.head_width if spec.head_norms else 0)


def _count_norm_inputs(spec: DecoderSpec, widths: Widths) -> int:
    """Count the elements of a token that all norms of a layer read."""
    inputs = (4 if spec.post_norms else 2) * widths.d
    return inputs + (widths.q + widths.kv if spec.head_norms else 0)


def _count_remade_elements(spec: DecoderSpec, widths: Widths, adapters: Adapters | None) -> int:
    """Count what `memory.recompute_cheap` leaves out, of elements in bf16."""
    # With dropout each adapter reads a copy of its own, see `_count_adapter_bytes`.
    is_read = adapters is None or not adapters.dropout
    # Experts without adapters are frozen: they save none of their inputs.
    is_mlp_read = adapters is None or adapters.experts or (is_read and not widths.num_experts)
    elements = widths.d if is_read else 0  # the normed input
    if is_mlp_read:
        elements += widths.f  # the gated product
    if is_mlp_read or widths.num_experts:  # a router saves its input, trained or not
        elements += widths.d  # the normed input of the MLP
    if spec.attention_softcap is not None and not is_read:
        elements -= widths.q  # capped attention saves no result, and dropout's copies are apart
    if spec.post_norms:
        elements += widths.d  # the sum after attention
    if spec.head_norms or spec.width_norms:
        elements += widths.q + widths.kv  # after norm and rotation
    if spec.qkv_clip is not None:
        elements += widths.q + 2 * widths.kv  # between norm and clamp; values before their clamp
    return elements


def count_remade_router_bytes(spec: DecoderSpec, widths: Widths, adapters: Adapters | None) -> int:
    """Count what `memory.recompute_cheap` leaves out of a mixture's router."""
    if not widths.num_experts:
        return 0
    assert spec.mixture is not None
    remade = (INT64 + FP32) * widths.top_k  # the token and the score of each row
    if spec.mixture.expert_bias and adapters is None:
        # For the gradients of biases: each row's expert, and all experts' scores.
        remade += INT64 * widths.top_k + BF16 * widths.num_experts
    return remade


def _count_adapter_bytes(
    spec: DecoderSpec, widths: Widths, adapters: Adapters, *, recomputes: bool
) -> int:
    """Count what adapters keep for a token."""
    linears = widths.list_linears(adapters)
    elements = adapters.rank * len(linears)
    if adapters.experts:
        elements += adapters.rank * 2 * widths.top_k
    masks = 0
    if adapters.dropout:
        masks = sum(width for width, _ in linears)  # a byte for each element
        elements += 0 if recomputes else masks
    if adapters.dora:
        outputs = sum(output for _, output in linears)
        if adapters.dropout:
            # The product, for the magnitudes' gradient, and B's product.
            elements += outputs if recomputes else 2 * outputs
        elif not recomputes:
            elements += outputs  # the product before it is multiplied by the magnitudes
        elif not spec.post_norms:
            # Only where no function reads the result: it is in place of others elsewhere.
            elements += widths.d * (1 if widths.num_experts else 2)
    return BF16 * elements + masks
