"""One rank of Megatron core's GPT with Transformer Engine's modules, as of early 2026, for the
planner.

Written from what their public code allocates, keeps for backward and gives up; the sizes of
products are made, not the products. Training itself (one fp32 gradient buffer, states divided over
data ranks, 1F1B) is in `megatron_stack`. Tokens are shared between tensor ranks outside of
attention and MLP (`--sequence-parallel`): what is gathered for a linear is gathered once more in
backward, not kept. Activations are `[sequence, batch, width]`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.megatron_stack import Layout
from recipe_lib.plan.allocation.untraced_memory import compute_attention_backward_scratch

WORKSPACE = (
    32 * 2**20 + 1024
)  # of Transformer Engine's products, once; cpp_extensions/gemm.py, from Hopper on
KEPT, OUTPUT_ANEW, ANEW = "kept", "the output projection's made anew", "made anew"


@dataclass(frozen=True)
class Llama:
    """Sizes, and what may be otherwise.

    vocabulary: rows before they are padded to a multiple of 128 on each tensor rank.
    dummy_gradients: what autograd is given for a weight whose gradient its product has added to the
    fp32 buffer: an empty tensor in bf16, `kept` one for each shape (`get_dummy_wgrad`), or made
    anew. architecture: whose size torch's own workspaces of products have; torch gave Blackwell
    those of Ampere until 2.11 (pytorch pull request 175344).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int = 128256
    sequence: int = 4096
    dummy_gradients: str = KEPT
    architecture: str = "sm80"

    @property
    def head_width(self) -> int:
        """Of a query, key or value."""
        return self.hidden // self.heads

    def stage(self, layout: Layout, place: int, group: Any, device: Any) -> "TokenSharingStage":
        """The layers of one place in the pipeline. group: of tensor ranks."""
        return TokenSharingStage(self, layout, place, group, device)


class _Rank:
    """What products share on a rank: the tensor ranks, and memory that stays."""

    def __init__(self, llama: Llama, group: Any, device: Any):
        self.llama, self.group, self.device = llama, group, device
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self.dummies: dict[tuple[int, ...], Tensor] = {}
        self.gathered_for_output: Tensor | None = None

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def gather(self, part: Tensor) -> Tensor:
        """All tokens of a part of them."""
        if self.group.size() == 1:
            return part
        whole = self.empty(len(part) * self.group.size(), *part.shape[1:], dtype=part.dtype)
        dist.all_gather_into_tensor(whole, part.contiguous(), group=self.group)
        return whole

    def scatter(self, whole: Tensor) -> Tensor:
        """A part of the tokens, summed over ranks."""
        if self.group.size() == 1:
            return whole
        part = self.empty(len(whole) // self.group.size(), *whole.shape[1:])
        dist.reduce_scatter_tensor(part, whole, group=self.group)
        return part

    def output_buffer(self, shape: tuple[int, ...]) -> Tensor:
        """Megatron's global buffer, into which it gathers what the output projection reads."""
        if self.gathered_for_output is None:
            self.gathered_for_output = self.empty(*shape)
        return self.gathered_for_output

    def dummy_gradient(self, weight: Tensor, of_output: bool = False) -> Tensor:
        kind = self.llama.dummy_gradients
        if kind == ANEW or (kind == OUTPUT_ANEW and of_output):
            return torch.empty_like(weight)
        if tuple(weight.shape) not in self.dummies:
            self.dummies[tuple(weight.shape)] = torch.empty_like(weight)
        return self.dummies[tuple(weight.shape)]


class _NormLinear(torch.autograd.Function):
    """RMS norm, then a linear whose outputs are divided: keeps input, normed input and a statistic
    of each token.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scale: Tensor, weight: Tensor, rank: _Rank) -> Tensor:
        normed = torch.empty_like(hidden)
        statistics = rank.empty(hidden.shape[0] * hidden.shape[1], dtype=torch.float32)
        whole = rank.gather(normed)
        ctx.save_for_backward(hidden, scale, weight, normed, statistics)
        ctx.rank = rank
        return rank.empty(*whole.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden, scale, weight, normed, _ = ctx.saved_tensors
        whole = ctx.rank.gather(normed)
        of_whole = ctx.rank.empty(*whole.shape)
        of_normed = ctx.rank.scatter(of_whole)
        del whole
        of_hidden, of_scale = torch.empty_like(of_normed), torch.empty_like(scale)
        ctx.rank.dummy_gradient(weight)
        return of_hidden.view_as(hidden), of_scale, None, None


class _DividedLinear(torch.autograd.Function):
    """A linear whose inputs are divided, and its outputs summed: keeps its input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rank: _Rank) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.rank = rank
        return rank.scatter(rank.empty(*hidden.shape[:-1], len(weight)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        whole = ctx.rank.gather(gradient)
        of_hidden = torch.empty_like(hidden)
        del whole
        ctx.rank.dummy_gradient(weight)
        return of_hidden, None, None


class _RmsNorm(torch.autograd.Function):
    """Keeps its input and a statistic of each token."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scale: Tensor, rank: _Rank) -> Tensor:
        ctx.save_for_backward(
            hidden, scale, rank.empty(hidden.shape[0] * hidden.shape[1], dtype=torch.float32)
        )
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden, scale, _ = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(scale), None


class _FusedRotation(torch.autograd.Function):
    """Rotary positions, whose tables are all that it keeps."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return torch.empty_like(hidden, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return torch.empty_like(gradient, memory_format=torch.contiguous_format)


class _FusedAttention(torch.autograd.Function):
    """cuDNN's or the flash kernel: keeps q, k, v `[s, b, h, e]`, the output, and in fp32 a sum for
    each row.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rank: _Rank) -> Tensor:
        tokens, rows, heads, _ = q.shape
        found = torch.empty_like(q)
        ctx.save_for_backward(
            q, k, v, found, rank.empty(rows, heads, tokens, 1, dtype=torch.float32)
        )
        ctx.rank = rank
        return found.flatten(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        q, k, v, _, _ = ctx.saved_tensors
        sizes = compute_attention_backward_scratch(
            rows=q.shape[1],
            heads=q.shape[2],
            kv_heads=k.shape[2],
            queries=len(q),
            keys=len(k),
            head_width=q.shape[3],
        )  # the flash kernel's; that of cuDNN's is not known
        scratch = [ctx.rank.empty(size, dtype=torch.uint8) for size in sizes]
        gradients = [torch.empty_like(tensor) for tensor in (q, k, v)]
        del scratch
        return *gradients, None


class _SwiGlu(torch.autograd.Function):
    """One kernel each way: keeps its input, gate and up next to each other."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor) -> Tensor:
        ctx.save_for_backward(wide)
        return torch.empty_like(
            wide[..., : wide.shape[-1] // 2], memory_format=torch.contiguous_format
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return torch.empty_like(ctx.saved_tensors[0])


class _SharedTokens(torch.autograd.Function):
    """Embedded tokens, summed and divided over tensor ranks."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, rank: _Rank) -> Tensor:
        ctx.rank = rank
        return rank.scatter(words)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.rank.gather(gradient), None


class _OutputProjection(torch.autograd.Function):
    """Megatron's own linear with torch's products: keeps its part of the tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rank: _Rank) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.rank = rank
        return _OutputProjection.gathered(hidden, rank) @ weight.t()

    @staticmethod
    def gathered(hidden: Tensor, rank: _Rank) -> Tensor:
        """All tokens, in the buffer for them."""
        if rank.group.size() == 1:
            return hidden
        whole = rank.output_buffer((len(hidden) * rank.group.size(), *hidden.shape[1:]))
        dist.all_gather_into_tensor(whole, hidden, group=rank.group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        _OutputProjection.gathered(hidden, ctx.rank)
        of_whole = gradient @ weight
        of_hidden = ctx.rank.scatter(of_whole)
        ctx.rank.dummy_gradient(weight, of_output=True)
        return of_hidden, None, None


class _FusedCrossEntropy(torch.autograd.Function):
    """The Triton kernel: losses in fp32, and the gradient in the logits' own memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rank: _Rank) -> Tensor:
        tokens = labels.numel()
        losses = torch.zeros(tokens, dtype=torch.float32, device=rank.device)
        sums = torch.zeros(3 * tokens, dtype=torch.float32, device=rank.device)
        rank.gather(sums)
        ctx.save_for_backward(logits.detach())
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.saved_tensors[0], None, None


class _Parameter(nn.Module):
    """One in bf16 of this rank."""

    def __init__(self, *shape: int, device: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device))


class _FusedLayer(nn.Module):
    """Attention and MLP, each with the norm before it; weights' gradients go to the fp32 buffer
    without autograd.
    """

    def __init__(self, llama: Llama, rank: _Rank):
        super().__init__()
        self.llama, self.rank, ranks, width = llama, rank, rank.group.size(), llama.hidden
        self.groups = llama.kv_heads // ranks
        both = (llama.heads + 2 * llama.kv_heads) * llama.head_width
        self.input_norm = _Parameter(width, device=rank.device)
        self.qkv = _Parameter(both // ranks, width, device=rank.device)
        self.projection = _Parameter(width, width // ranks, device=rank.device)
        self.post_norm = _Parameter(width, device=rank.device)
        self.fc1 = _Parameter(2 * llama.feed_forward // ranks, width, device=rank.device)
        self.fc2 = _Parameter(width, llama.feed_forward // ranks, device=rank.device)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attend(hidden)
        wide = _NormLinear.apply(hidden, self.post_norm.weight, self.fc1.weight.detach(), self.rank)
        return hidden + _DividedLinear.apply(
            _SwiGlu.apply(wide), self.fc2.weight.detach(), self.rank
        )

    def _attend(self, hidden: Tensor) -> Tensor:
        """q, k and v are split as views; queries of several groups are copied to lie next to each
        other, rotation makes q and k anew, and attention copies v, whose strides differ from k's.
        """
        width, shared = self.llama.head_width, self.llama.heads // self.llama.kv_heads
        mixed = _NormLinear.apply(
            hidden, self.input_norm.weight, self.qkv.weight.detach(), self.rank
        )
        mixed = mixed.view(*mixed.shape[:2], self.groups, (shared + 2) * width)
        q, k, v = mixed.split([shared * width, width, width], dim=-1)
        del mixed
        q = _FusedRotation.apply(q.reshape(*q.shape[:2], self.groups * shared, width))
        k = _FusedRotation.apply(k)
        found = _FusedAttention.apply(q, k, v.contiguous(), self.rank)
        return _DividedLinear.apply(found, self.projection.weight.detach(), self.rank)


class TokenSharingStage(nn.Module):
    """The layers of one place in the pipeline, with embedding and output where they belong."""

    def __init__(self, llama: Llama, layout: Layout, place: int, group: Any, device: Any):
        super().__init__()
        self.llama, self.rows, self.device = llama, layout.micro_batch, device
        self.rank = _Rank(llama, group, device)
        self.first, self.last = place == 0, place == layout.pipeline - 1
        multiple = 128 * layout.tensor
        vocabulary = -(-llama.vocabulary // multiple) * multiple // layout.tensor
        if self.first:
            self.embedding = _Parameter(vocabulary, llama.hidden, device=device)
        self.layers = nn.ModuleList(
            _FusedLayer(llama, self.rank) for _ in range(llama.layers // layout.pipeline)
        )
        if self.last:
            self.norm = _Parameter(llama.hidden, device=device)
            self.output = _Parameter(vocabulary, llama.hidden, device=device)

    def forward(
        self,
        received: Tensor | None,
        tokens: Tensor,
        labels: Tensor,
        weights: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """`[sequence / tensor ranks, batch, hidden]` of a stage that is not the last, the loss of
        one that is. received: what the stage before made; the others as `batch` gives them.
        """
        hidden: Any = received
        if self.first:
            words = F.embedding(tokens, self.embedding.weight)
            hidden = _SharedTokens.apply(words.transpose(0, 1).contiguous(), self.rank)
            del words
        for layer in self.layers:
            hidden = layer(hidden)
        if not self.last:
            return hidden
        hidden = _RmsNorm.apply(hidden, self.norm.weight, self.rank)
        logits = _OutputProjection.apply(hidden, self.output.weight.detach(), self.rank)
        losses = _FusedCrossEntropy.apply(logits, labels.t().contiguous(), self.rank)
        return (losses.t() * weights).sum() / weights.sum()

    def batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens and labels `[b, s]`, weights of losses `[b, s]`, a mask `[1, 1, s, s]` that nobody
        reads.
        """
        length = self.llama.sequence
        tokens, labels = (
            torch.zeros(self.rows, length, dtype=torch.int64, device=self.device)
            for _ in ("tokens", "labels")
        )
        weights = torch.ones(self.rows, length, device=self.device)
        mask = torch.empty(1, 1, length, length, dtype=torch.bool, device=self.device)
        return tokens, labels, weights, mask

    def message(self) -> Tensor:
        """What stages send to each other, `[sequence / tensor ranks, batch, hidden]`."""
        return self.rank.empty(
            self.llama.sequence // self.rank.group.size(), self.rows, self.llama.hidden
        )
