"""Define the decoder of all families of models that this project implements itself.

`models.meta_init.build_meta` builds a `Decoder` on the meta device; recipes call it with tokens and
labels. Parameters are named as in Hugging Face's files. Constructors choose what differs between
families, by a `DecoderSpec` (the model's shape as plain numbers). Nothing here knows of ranks:
parallelism replaces modules and forwards from outside.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.models.language_model import LanguageModel, hold_tied_weight
from recipe_lib.models.mixture import Mixture
from recipe_lib.models.spec import DecoderSpec, RopeSpec, StageParts
from recipe_lib.ops.attention import AttentionInfo, attention, has_varlen, prepare_attention
from recipe_lib.ops.chunked_heads import Finish
from recipe_lib.ops.head_losses import HeadLoss, run_head_loss
from recipe_lib.ops.kept_tensors import note_cheap, run_cheap
from recipe_lib.ops.mlp import gated_activation
from recipe_lib.ops.norm import offset_rms_norm, rms_norm
from recipe_lib.ops.rope import FREQUENCIES, apply_rotation, compute_rotation

# Shapes: b batch, s sequence, d model width, h heads, k kv heads, e head width, f MLP width, v
# vocabulary, n labels of a score head, but in `[n, d]` tokens of a tensor-parallel rank.


class KVCache:
    """Keys and values of the tokens already read, so that decoding computes each token once."""

    def __init__(
        self,
        spec: DecoderSpec,
        batch: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (2, batch, spec.num_kv_heads, max_len, spec.head_width)
        # For each layer keys and values, [2, batch, k, max_len, e].
        self.layers = [
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)
        ]
        self.max_len = max_len  # tokens that each row has room for
        self.length = 0  # tokens that each row holds, the same number in all

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v `[b, k, s, e]` to those of `layer`, and return all, `[b, k, length + s, e]`.

        Raises ValueError when there is no room left.
        """
        # `length` stays as it is: `Trunk.forward` increases it when all layers have been extended.
        end = self.length + k.shape[2]
        if end > self.max_len:
            raise ValueError(f"the cache has room for {self.max_len} tokens, {end} are needed")
        keys, values = self.layers[layer]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]


# Cosines and sines of positions, each fp32 [b, s, 1, r / 2]; r of a head's channels are rotated.
Rotation = tuple[Tensor, Tensor]


class Norm(nn.Module):
    """RMS norm over `width` channels; with `spec.norm_offset` it multiplies by 1 + weight."""

    def __init__(self, spec: DecoderSpec, width: int, scale: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = spec.norm_eps
        norm = offset_rms_norm if spec.norm_offset else rms_norm
        # scale: multiplies what is normed. Not the weight, whose rounding all tokens would share.
        self.norm = norm if scale is None else partial(_norm_and_scale, norm, scale)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden `[..., width]`, normed, in its own dtype."""
        return run_cheap(self.norm, hidden, self.weight, self.eps)


def _norm_and_scale(norm: Callable[..., Tensor], scale: float, *args: Any) -> Tensor:
    return norm(*args) * scale


class WidthNorm(Norm):
    """RMS norm over the channels of all heads together (OLMoE)."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden `[..., h, e]`, normed."""
        return super().forward(hidden.flatten(-2)).view_as(hidden)


class Clamp(nn.Module):
    """A clamp of all elements into [-bound, bound]."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, hidden: Tensor) -> Tensor:
        return run_cheap(torch.clamp, hidden, -self.bound, self.bound)


class ScaledEmbedding(nn.Embedding):
    """Embeddings times a constant."""

    def __init__(self, vocab_size: int, width: int, scale: float) -> None:
        super().__init__(vocab_size, width)
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings `[b, s, d]` of tokens `[b, s]`."""
        hidden = super().forward(tokens)
        # The constant is rounded to their dtype first, as it was when the models were trained.
        return hidden * hidden.new_full((), self.scale)


class Rotary:
    """Cosines and sines of positions; not a module, as it has no parameters and no buffers."""

    def __init__(self, rope: RopeSpec) -> None:
        # `fn(positions)` -> the frequencies, which some kinds choose by the highest position.
        self.frequencies = partial(FREQUENCIES[rope.kind], rope.width, rope.base, **rope.numbers)
        self.factor = rope.attention_factor  # multiplies cosines and sines

    def __call__(self, positions: Tensor) -> Rotation:
        """Return cosines and sines of positions `[b, s]`."""
        return compute_rotation(positions, self.frequencies(positions), self.factor)


# What an `Attention` does without context parallelism. No lambdas: a model can be pickled.
def _keep_heads(*heads_and_sinks: Any) -> tuple[Any, ...]:
    return heads_and_sinks


def _keep_tokens(attended: Tensor) -> Tensor:
    return attended


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245): `[b, s, d]` to `[b, s, d]`."""

    def __init__(self, spec: DecoderSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer  # index of the decoder's layer, for the cache
        self.head_width = spec.head_width
        self.is_rotated = spec.rotated is None or spec.rotated[layer]
        self.attend = partial(
            attention,
            window=spec.windows[layer],
            softcap=spec.attention_softcap,
            scale=spec.attention_scale,
        )
        # Attention sinks (gpt-oss): a score per head that takes part in the softmax, without value.
        self.sinks = nn.Parameter(torch.empty(spec.num_heads)) if spec.sinks else None
        query_width = spec.num_heads * spec.head_width
        key_width = spec.num_kv_heads * spec.head_width
        self.q_proj = nn.Linear(spec.width, query_width, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.width, key_width, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.width, key_width, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(query_width, spec.width, bias=spec.output_bias)
        self.q_norm = _build_head_norm(spec, spec.num_heads)
        self.k_norm = _build_head_norm(spec, spec.num_kv_heads)
        self.clamp = nn.Identity() if spec.qkv_clip is None else Clamp(spec.qkv_clip)
        # Replaced by context parallelism, whose ranks have all heads of some tokens. `to_heads`
        # exchanges q, k, v and sinks for those of all tokens and some heads; `to_tokens` exchanges
        # the results back.
        self.to_heads: Callable[..., Any] = _keep_heads
        self.to_tokens: Callable[[Tensor], Tensor] = _keep_tokens

    def forward(
        self, hidden: Tensor, rotation: Rotation, info: AttentionInfo, cache: KVCache | None
    ) -> Tensor:
        """Return the attention of hidden states `[b, s, d]`, projected, `[b, s, d]`.

        rotation: of the tokens' positions. info: the documents of the batch and their masks, from
        `prepare_attention`. cache: extended by these tokens, which attend to all in it; None: they
        attend to each other alone.
        """
        q, k, v = (
            project(hidden).unflatten(-1, (-1, self.head_width))  # [b, s, h or k, e]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = self.rotate(q, self.q_norm, rotation)
        k = self.rotate(k, self.k_norm, rotation)
        v = self.clamp(v).transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        q, k, v, sinks = self.to_heads(q, k, v, self.sinks)
        return self.o_proj(
            self.to_tokens(self.attend(q, k, v, info, sinks=sinks)).transpose(1, 2).flatten(2)
        )

    def rotate(self, heads: Tensor, norm: nn.Module, rotation: Rotation) -> Tensor:
        """Return queries or keys `[b, s, h or k, e]`, normed and rotated, `[b, h or k, s, e]`."""
        normed = self.clamp(norm(heads))
        if not self.is_rotated:
            return normed.transpose(1, 2)
        # Attention saves what is rotated, and a norm before it what it is made of.
        rotated = note_cheap(apply_rotation(normed, *rotation), apply_rotation, normed, *rotation)
        return rotated.transpose(1, 2)


def _build_head_norm(spec: DecoderSpec, num_heads: int) -> nn.Module:
    """Build the norm of queries, or of keys; an identity in families without one.

    num_heads: of the queries or keys.
    """
    if spec.width_norms:
        return WidthNorm(spec, num_heads * spec.head_width)
    return Norm(spec, spec.head_width) if spec.head_norms else nn.Identity()


def describe_attention(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> str:
    """Return the kernels of attention that torch chooses for training on a device, in words."""
    if spec.attention_softcap is not None or spec.sinks:
        return "this library's, for soft-capped scores or sinks"
    q = torch.empty(
        1, spec.num_heads, 128, spec.head_width, dtype=dtype, device=device, requires_grad=True
    )
    # As `scaled_dot_product` hands keys without a mask to torch.
    k = q[:, : spec.num_kv_heads] if dtype in (torch.float16, torch.bfloat16) else q
    # Private: SDPA itself calls it to choose, and no public function tells what it will run.
    choice = torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=len(k[0]) < len(q[0]))
    name = torch.nn.attention.SDPBackend(choice).name.lower().replace("_", " ")
    packed = "varlen flash" if has_varlen(device, dtype, spec.head_width) else "by a mask"
    return f"{name} on {device.type} (with packed documents or windows: {packed})"


class MLP(nn.Module):
    """Gated MLP (arXiv 2002.05202): `[b, s, d]` to `[b, s, d]` over f channels."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.width, spec.mlp_width, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.width, spec.mlp_width, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.mlp_width, spec.width, bias=spec.mlp_bias)
        self.activation = spec.activation

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(
            gated_activation(self.gate_proj(hidden), self.up_proj(hidden), self.activation)
        )


class DecoderLayer(nn.Module):
    """A layer of attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, spec: DecoderSpec, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(spec, layer)
        has_experts = spec.mixture is not None and spec.mixture.layers[layer]
        self.mlp = Mixture(spec) if has_experts else MLP(spec)
        self.input_layernorm = Norm(spec, spec.width)
        self.post_attention_layernorm = Norm(spec, spec.width)
        self.residual_scale = spec.residual_scale

    def forward(
        self, hidden: Tensor, rotation: Rotation, info: AttentionInfo, cache: KVCache | None = None
    ) -> Tensor:
        """Return the hidden states `[b, s, d]` after this layer; arguments: see `Attention`."""
        hidden = hidden.add(
            self.self_attn(self.input_layernorm(hidden), rotation, info, cache),
            alpha=self.residual_scale,
        )
        return hidden.add(
            self.run_mlp(self.post_attention_layernorm(hidden), info), alpha=self.residual_scale
        )

    def run_mlp(self, hidden: Tensor, info: AttentionInfo) -> Tensor:
        # A mixture counts the tokens of each expert, and is told which are padding.
        return self.mlp(hidden, info.real) if isinstance(self.mlp, Mixture) else self.mlp(hidden)


class SandwichLayer(DecoderLayer):
    """A layer with norms before and after attention and MLP, by the names of Gemma 2's files."""

    def __init__(self, spec: DecoderSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.pre_feedforward_layernorm = Norm(spec, spec.width)
        self.post_feedforward_layernorm = Norm(spec, spec.width)

    def forward(
        self, hidden: Tensor, rotation: Rotation, info: AttentionInfo, cache: KVCache | None = None
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), rotation, info, cache)
        hidden = run_cheap(torch.add, hidden, self.post_attention_layernorm(attended))
        return hidden + self.post_feedforward_layernorm(
            self.run_mlp(self.pre_feedforward_layernorm(hidden), info)
        )


class Trunk(nn.Module):
    """Embedding, layers, final norm: tokens `[b, s]` to hidden states `[b, s, d]`."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        make_layer = SandwichLayer if spec.post_norms else DecoderLayer
        self.embed_tokens = (
            nn.Embedding(spec.vocab_size, spec.width)
            if spec.embedding_scale is None
            else ScaledEmbedding(spec.vocab_size, spec.width, spec.embedding_scale)
        )
        self.layers = nn.ModuleList(make_layer(spec, layer) for layer in range(spec.num_layers))
        # Its scale is that of logits, which are linear in what it returns.
        self.norm = Norm(spec, spec.width, scale=spec.logit_scale)
        # Layers with a window may have other frequencies (Gemma 3): `rotary_of_layer` has the
        # index in `rotary` for each layer.
        self.rotary = [Rotary(rope) for rope in (spec.rope, spec.local_rope) if rope is not None]
        self.rotary_of_layer = [
            int(spec.local_rope is not None and window is not None) for window in spec.windows
        ]
        # Makes the masks of a batch that attention needs, once for all layers.
        self.prepare = partial(
            prepare_attention,
            windows=tuple(dict.fromkeys(spec.windows)),
            head_width=spec.head_width,
            capped=spec.attention_softcap is not None,
            sinks=spec.sinks,
        )

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        info: AttentionInfo | None,
        cache: KVCache | None,
    ) -> Tensor:
        """Return the normed hidden states `[b, s, d]` of tokens `[b, s]`.

        positions, cache: see `Decoder.forward`. info: there `attention`.
        """
        hidden = self.run_layers(
            self.embed_tokens(tokens),
            shape=tokens.shape,
            positions=positions,
            info=info,
            cache=cache,
        )
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.norm(hidden)

    def run_layers(
        self,
        hidden: Tensor,
        shape: torch.Size,
        positions: Tensor | None,
        info: AttentionInfo | None,
        cache: KVCache | None = None,
        layers: Iterable[int] | None = None,
    ) -> Tensor:
        """Return the hidden states after layers, in the shape in which they are given.

        hidden: before the first of these layers, `[b, s, d]`, on tensor-parallel ranks `[n, d]`.
        shape: (b, s) of the tokens. positions, cache: see `Decoder.forward`. info: there
        `attention`. layers: their indices in the whole model, in order; None: all.
        """
        rows, length = shape
        num_past = cache.length if cache is not None else 0  # tokens before these
        if positions is None:
            positions = torch.arange(num_past, num_past + length, device=hidden.device)
            # LongRoPE chooses frequencies by the highest position of all, so that those of padding
            # must not be higher than those of tokens.
            if info is not None and info.real is not None:
                positions.clamp_(max=info.real.longest - 1)
            positions = positions.expand(rows, length)
        # Rotations and masks are the same for all layers: they are computed once.
        rotations = [rotary(positions) for rotary in self.rotary]
        info = self.prepare(
            info,
            rows=rows,
            queries=length,
            keys=num_past + length,
            dtype=hidden.dtype,
            device=hidden.device,
        )
        for index in range(len(self.layers)) if layers is None else layers:
            # By its name: on a rank of a pipeline the list lacks entries, so that positions in it
            # are not the layers' indices.
            layer = self.layers.get_submodule(str(index))
            hidden = layer(hidden, rotations[self.rotary_of_layer[index]], info, cache)
        return hidden


def _apply_softcap(logits: Tensor, cap: float) -> Tensor:
    """Return logits limited to [-cap, cap] by a tanh (Gemma 2)."""
    return cap * torch.tanh(logits / cap)


class OutputHead(nn.Module):
    """The output projection of hidden states `[b, s, d]` to logits `[b, s, v]`.

    With labels it returns the summed loss instead, without making the logits of all tokens at once.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab_size, spec.width))
        self.softcap = spec.logit_softcap  # logits become softcap * tanh(logits / softcap)
        self.finish = (
            nn.Identity()
            if spec.logit_softcap is None
            else partial(_apply_softcap, cap=spec.logit_softcap)
        )

    def forward(
        self, hidden: Tensor, *, labels: Tensor | None = None, head_loss: HeadLoss | None = None
    ) -> Tensor:
        """Return logits, or with labels `[b, s]` the result of `head_loss`.

        head_loss: see `recipe_lib.ops.head_losses`; None: the sum of token losses, cross-entropy.
        """
        if labels is None:
            return self.finish(F.linear(hidden, self.weight))
        return run_head_loss(
            head_loss, hidden=hidden, weight=self.weight, labels=labels, softcap=self.softcap
        )


class Decoder(LanguageModel):
    """A causal language model; with `spec.num_labels` a model of scores, for rewards or classes.

    It then has a score head and no `lm_head`, and returns scores `[b, s, n]` in place of logits
    `[b, s, v]`.
    """

    spec: DecoderSpec  # the model's shape

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.model = Trunk(spec)
        self.spec = spec
        self.lm_head: Any = OutputHead(spec) if spec.num_labels is None else None
        self.score = None if spec.num_labels is None else ScoreHead(spec.num_labels, spec.width)
        self._tie()

    def _tie(self) -> None:
        if self.spec.tied and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def find_stage_parts(self) -> StageParts:
        embedding = "model.embed_tokens"
        return StageParts(
            first=(embedding,),
            layers=tuple(f"model.layers.{index}" for index in range(self.spec.num_layers)),
            last=("model.norm", "lm_head" if self.spec.num_labels is None else "score"),
            embedding=embedding,
            width=self.spec.width,
        )

    @property
    def head(self) -> Any:
        """Return the output projection or the score head; None: another pipeline rank has it."""
        return self.lm_head if self.spec.num_labels is None else self.score

    def run_stage(
        self,
        hidden: Tensor | None,
        tokens: Tensor,
        positions: Tensor | None,
        attention: AttentionInfo | None,
        layers: Iterable[int],
    ) -> Tensor:
        hidden = self.model.embed_tokens(tokens) if hidden is None else hidden
        return self.model.run_layers(
            hidden, shape=tokens.shape, positions=positions, info=attention, layers=layers
        )

    def compute_hidden_shape(self, tokens: torch.Size, ranks: int) -> tuple[int, ...]:
        """Return the shape of hidden states between layers, of tokens `[b, s]`.

        It is `[b, s, d]`, or `[n, d]` on each of several tensor-parallel `ranks`, which divide the
        tokens.
        """
        shared = tokens if ranks == 1 else (tokens.numel() // ranks,)
        return (*shared, self.spec.width)

    def run_head(
        self,
        hidden: Tensor,
        tokens: Tensor,
        *,
        labels: Tensor | None = None,
        head_loss: HeadLoss | None = None,
    ) -> Tensor:
        return self.head(self.model.norm(hidden), labels=labels, head_loss=head_loss)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention: AttentionInfo | None = None,
    ) -> Tensor:
        """Return the hidden states `[b, s, d]` of tokens `[b, s]` that the head is given.

        Each tensor-parallel rank returns those of its tokens, `[n, d]`. Arguments: see `forward`.
        """
        return self.model(tokens, positions, attention, None)

    def keep_stages(self, layers: Collection[int], *, first: bool, last: bool) -> None:
        all_modules = {name for name, _ in self.named_modules() if name}
        # Entries are deleted, not renumbered, so that parameters keep the names of the files.
        for name in [name for name in self.model.layers._modules if int(name) not in layers]:
            del self.model.layers._modules[name]
        trunk: Any = self.model
        if not first:
            # A head on the last rank needs its tied weight, although another rank embeds.
            is_tied = last and self.spec.tied
            trunk.embed_tokens = hold_tied_weight(trunk.embed_tokens) if is_tied else None
        if not last:
            trunk.norm = self.lm_head = self.score = None
        self.modules_elsewhere = frozenset(all_modules - {name for name, _ in self.named_modules()})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Decoder":
        super()._apply(fn, recurse)
        # Conversions such as `to_empty` make new parameters module by module, which unties tied
        # ones.
        self._tie()
        return self

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention: AttentionInfo | None = None,
        *,
        labels: Tensor | None = None,
        head_loss: HeadLoss | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Return logits `[b, s, v]` of tokens `[b, s]`, or with labels the result of `head_loss`.

        positions: `[b, s]`; None: 0, 1, ... in each row, after the tokens of the cache. attention:
        the documents of each row; None: a row is one document. labels: `[b, s]`, `labels[b, i]` is
        the token that follows `tokens[b, i]`; -100 does not count. head_loss: `fn(hidden, weight,
        labels)`, see `recipe_lib.ops.head_losses`; None: the sum of token losses, fp32 `[]` (fp64
        for fp64). cache: keys and values of earlier tokens; this call's are added to it; None: no
        earlier tokens. logits_to_keep: number of tokens at the end of each row whose logits are
        returned; 0: all.
        """
        hidden = self.model(tokens, positions, attention, cache)
        if logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        return self.head(hidden, labels=labels, head_loss=head_loss)


class ScoreHead(nn.Module):
    """The head of a reward model, or of a classifier, in place of the output projection.

    It is called as an `OutputHead` is, and returns the scores of all tokens. Its caller takes those
    of the tokens that it needs, such as the last one of each sequence.
    """

    def __init__(self, num_labels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_labels, width))

    def forward(
        self, hidden: Tensor, *, labels: Tensor | None = None, head_loss: object = None
    ) -> Tensor:
        """Return scores `[..., n]` of hidden states `[..., d]`, in the weight's dtype.

        labels, head_loss: not read.
        """
        return F.linear(hidden.to(self.weight.dtype), self.weight)


@dataclass
class LogitTransform:
    """The operations on logits in the forward of another library's model; by default none."""

    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    finish: Finish | None = None  # `fn(logits) -> logits`, elementwise, run before the softcap


class LinearHead(nn.Linear):
    """The output projection of another library's model, called as `OutputHead` is.

    Sharding recognizes the head by this class.
    """

    @classmethod
    def adopt(cls, linear: nn.Linear) -> None:
        """Turn a plain linear into a LinearHead, in place."""
        # No new module: others of the model may refer to this one.
        linear.__class__ = cls

    def forward(
        self,
        hidden: Tensor,
        *,
        labels: Tensor | None = None,
        head_loss: HeadLoss | None = None,
        logit_transform: LogitTransform | None = None,
    ) -> Tensor:
        """Return logits of hidden `[..., d]`, or with labels the result of `head_loss`.

        logit_transform: the operations that the model's own forward applies to logits. They are
        applied for the loss alone: logits are returned without them. None: there are none.
        """
        if labels is None:
            return F.linear(hidden, self.weight, self.bias)
        logit_transform = logit_transform or LogitTransform()
        return run_head_loss(
            head_loss,
            hidden=hidden,
            weight=self.weight,
            labels=labels,
            softcap=logit_transform.softcap,
            finish=logit_transform.finish,
            bias=self.bias,
        )
