"""Attention with sinks: each head has a score that takes part in its softmax and attends to none.

This is the attention of gpt-oss; where sinks come from: arXiv 2309.17453. With L the log-sum-exp of
a query's scores and L' that of scores and sink, the result is what attention without a sink gives,
times exp(L - L'). Backward is a kernel's own, given that result and L', since a share of the
softmax is exp(score - L'). So kernels that know of no sink serve: torch's varlen kernel, that of
the CPU, and elsewhere matmuls over some queries at a time.

Shapes: q `[b, h, s, e]`, keys and values `[b, k, t, e]`, log-sum-exps `[b, h, s]`, sinks `[h]`.
"""

from typing import Any, cast

import torch
from torch import Tensor

from recipe_lib.ops.capped_attention import (
    make_visible_mask,
    multiply_heads,
    split_queries,
    stack_heads,
)
from recipe_lib.ops.device import get_kernel_type


def attend_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    boundaries: Tensor | None,
    longest: int,
    mask: Tensor | None,
    documents: Tensor | None,
    window: int | None,
    scale: float,
) -> Tensor:
    """Return causal attention with sinks, `[b, h, s, e]`.

    boundaries, longest, mask, documents: see `AttentionInfo`; boundaries None: no varlen kernel.
    window: the most keys that a token sees, its own included. scale: multiplies the scores.
    """
    settings = (boundaries, longest, mask, documents, window, scale)
    return cast(Tensor, _SinkAttention.apply(q, k, v, sinks, *settings))


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *settings: Any) -> Tensor:
        boundaries, longest, mask, documents, window, scale = settings
        rng_state = None
        if boundaries is not None:
            out, log_sums, rng_state = _run_varlen(
                q, k, v, boundaries=boundaries, longest=longest, window=window, scale=scale
            )
        elif get_kernel_type(q.device) == "cpu":
            out, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q,
                k,
                v,
                dropout_p=0.0,
                is_causal=_is_plain_causal(q, mask),
                attn_mask=mask,
                scale=scale,
            )
        else:
            out, log_sums = _run_in_pieces(q, k, v, documents, window, scale=scale)
        sink_scores = sinks.to(log_sums.dtype).view(1, -1, 1)
        with_sink = torch.logaddexp(log_sums, sink_scores)
        out = (out * torch.exp(log_sums - with_sink).unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(
            q, k, v, sinks, out, with_sink, boundaries, mask, documents, rng_state
        )
        ctx.settings = (longest, window, scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        longest, window, scale = ctx.settings
        q, k, v, sinks, out, log_sums, boundaries, mask, documents, rng_state = ctx.saved_tensors
        sink_grad = None
        if ctx.needs_input_grad[3]:
            # A sink's share of the softmax takes from every key's, in proportion to the result.
            shares = torch.exp(sinks.to(log_sums.dtype).view(1, -1, 1) - log_sums)
            sink_grad = (
                -(shares * (out_grad * out).sum(dim=-1, dtype=log_sums.dtype))
                .sum(dim=(0, 2))
                .to(sinks.dtype)
            )
        tensors = (out_grad, q, k, v, out, log_sums)
        if boundaries is not None:
            input_grads = _run_varlen_backward(
                *tensors,
                boundaries=boundaries,
                longest=longest,
                rng_state=rng_state,
                window=window,
                scale=scale,
            )
        elif get_kernel_type(q.device) == "cpu":
            # By position: torch.compile takes a keyword `out` for a tensor to write to.
            input_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *tensors,
                dropout_p=0.0,
                is_causal=_is_plain_causal(q, mask),
                attn_mask=mask,
                scale=scale,
            )
        else:
            input_grads = _run_backward_in_pieces(
                *tensors, documents=documents, window=window, scale=scale
            )
        return (*input_grads, sink_grad, *(None,) * 6)


# Each kernel, forward: results `[b, h, s, e]` and log-sum-exps `[b, h, s]`; backward: the gradients
# of q, k and v.


def flatten_tokens(tensor: Tensor) -> Tensor:
    """Return `[b, h, s, e]` as `[b s, h, e]`, the layout of the varlen kernel."""
    return tensor.transpose(1, 2).flatten(0, 1)


def unflatten_tokens(flat: Tensor, like: Tensor) -> Tensor:
    """Return `[b s, h, e]` as `[b, h, s, e]`, with b and s those of `like`."""
    return flat.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)


def get_left_window(window: int | None) -> int:
    """Return a window as the varlen kernel takes it, which counts the tokens left of its own."""
    return -1 if window is None else window - 1


def _run_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    boundaries: Tensor,
    longest: int,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # The operator below `varlen_attn`, for its random state: there is no dropout, but the kernel's
    # backward asks for it.
    flat_out, flat_log_sums, rng_state, _, _ = torch.ops.aten._flash_attention_forward(
        flatten_tokens(q),
        flatten_tokens(k),
        flatten_tokens(v),
        cum_seq_q=boundaries,
        cum_seq_k=boundaries,
        max_q=longest,
        max_k=longest,
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=scale,
        window_size_left=get_left_window(window),
        window_size_right=0,
    )
    # [h, b s] to [b, h, s]
    log_sums = flat_log_sums.unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)
    return unflatten_tokens(flat_out, q), log_sums, rng_state


def _run_varlen_backward(
    out_grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    *,
    boundaries: Tensor,
    longest: int,
    rng_state: Tensor,
    window: int | None,
    scale: float,
) -> tuple[Tensor, ...]:
    flat_grads = torch.ops.aten._flash_attention_backward(
        flatten_tokens(out_grad),
        flatten_tokens(q),
        flatten_tokens(k),
        flatten_tokens(v),
        flatten_tokens(out),
        logsumexp=log_sums.transpose(0, 1).flatten(1).contiguous(),
        cum_seq_q=boundaries,
        cum_seq_k=boundaries,
        max_q=longest,
        max_k=longest,
        dropout_p=0.0,
        is_causal=True,
        rng_state=rng_state,
        unused=rng_state.new_empty(0),
        scale=scale,
        window_size_left=get_left_window(window),
        window_size_right=0,
    )
    return tuple(
        unflatten_tokens(grad, like) for grad, like in zip(flat_grads, (q, k, v), strict=True)
    )


def _is_plain_causal(q: Tensor, mask: Tensor | None) -> bool:
    # A single query, as in decoding, sees all keys.
    return mask is None and q.shape[2] > 1


def _run_in_pieces(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend by matmuls, some queries at a time: for what no kernel takes, as fp32 on a GPU."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    log_sums = torch.empty(q.shape[:3], dtype=wide, device=q.device)
    for part, seen, reach in split_queries(q, k, documents, window):
        keys, values = (tensor[:, :, seen].flatten(0, 1) for tensor in (k, v))
        scores = _compute_scores(q[:, :, part], k, keys, reach=reach, scale=scale, wide=wide)
        log_sums[:, :, part] = scores.logsumexp(dim=-1)
        shares = scores.softmax(dim=-1).to(q.dtype)
        out[:, :, part] = torch.bmm(stack_heads(shares, k), values).view(out[:, :, part].shape)
    return out, log_sums


def _run_backward_in_pieces(
    out_grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    *,
    documents: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, ...]:
    wide = log_sums.dtype
    q_grad = torch.empty_like(q, memory_format=torch.contiguous_format)
    # Every piece adds to the gradients of keys and values: in bf16 the sum would lose bits.
    k_grad, v_grad = (torch.zeros(tensor.shape, dtype=wide, device=k.device) for tensor in (k, v))
    # The sum over the keys of share x its gradient, which softmax's backward subtracts.
    row_sums = (out_grad * out).sum(dim=-1, keepdim=True, dtype=wide)
    for part, seen, reach in split_queries(q, k, documents, window):
        keys, values = (tensor[:, :, seen].flatten(0, 1) for tensor in (k, v))
        queries, slopes = (stack_heads(tensor[:, :, part], k) for tensor in (q, out_grad))
        # Nested: a name for the scores would hold one more tensor of their size.
        shares = torch.exp(
            _compute_scores(q[:, :, part], k, keys, reach=reach, scale=scale, wide=wide)
            - log_sums[:, :, part].unsqueeze(-1)
        )
        v_grad[:, :, seen] += torch.bmm(
            stack_heads(shares.to(q.dtype), k).transpose(1, 2), slopes
        ).view_as(v[:, :, seen])
        share_grads = multiply_heads(slopes, values, reach, q.shape[1])
        score_grads = stack_heads(
            (shares * (share_grads - row_sums[:, :, part]) * scale).to(q.dtype), k
        )
        q_grad[:, :, part] = torch.bmm(score_grads, keys).view(q_grad[:, :, part].shape)
        k_grad[:, :, seen] += torch.bmm(score_grads.transpose(1, 2), queries).view_as(k[:, :, seen])
    return q_grad, k_grad.to(k.dtype), v_grad.to(v.dtype)


def _compute_scores(
    q: Tensor, k: Tensor, keys: Tensor, *, reach: Tensor, scale: float, wide: torch.dtype
) -> Tensor:
    scores = multiply_heads(stack_heads(q, k), keys, reach, q.shape[1]).to(wide) * scale
    return scores.masked_fill(~make_visible_mask(reach, keys.shape[1]), float("-inf"))
