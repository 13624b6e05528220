"""Imitate the memory of one rank of Megatron core with Transformer Engine's modules of early 2026.

`planner_simumax.py` plans `Llama`s; `megatron_stack.py` calls `build_stage` and runs the training
around it (1F1B, fp32 gradient buffer, optimizer states divided over data ranks). Each function
allocates, keeps for backward and frees what their public code does; what it computes is of no
interest. With sequence parallel: `[s / tensor ranks, b, width]` outside of attention and MLP.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.megatron_stack import Layout
from recipe_lib.plan.allocation.untraced_memory import compute_attention_backward_scratch

# Bytes that Transformer Engine allocates once for its matmuls, from Hopper on
# (cpp_extensions/gemm.py).
WORKSPACE = 32 * 2**20 + 1024
# Values of `Llama.dummy_gradients`.
KEPT = "kept"  # one tensor for each shape, for good
OUTPUT_ANEW = "the output projection's made anew"  # kept, but for that one
ANEW = "made anew"  # a new tensor for each weight and backward


@dataclass(frozen=True)
class Llama:
    """Sizes of a Llama, and what may be otherwise in versions of the stack."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int = 128256  # rows before they are padded to a multiple of 128 on each tensor rank
    sequence: int = 4096  # tokens
    # Autograd wants a gradient of a weight although the matmul has added it to the fp32 buffer: it
    # gets an empty bf16 tensor. Theirs are kept by shape (`get_dummy_wgrad`).
    dummy_gradients: str = KEPT
    # The GPU whose size torch's own workspaces of matmuls have; torch gave Blackwell those of
    # Ampere until 2.11 (pytorch pull request 175344).
    architecture: str = "sm80"

    @property
    def head_width(self) -> int:
        """Return the width of a query, key or value."""
        return self.hidden // self.heads

    def build_stage(
        self, layout: Layout, place: int, group: Any, device: Any
    ) -> "TokenSharingStage":
        """Build the layers of one place in the pipeline. group: process group of tensor ranks."""
        return TokenSharingStage(self, layout=layout, place=place, group=group, device=device)


class _Rank:
    """The tensor ranks and the memory that stays, shared by all modules of a rank."""

    def __init__(self, llama: Llama, group: Any, device: Any):
        self.llama = llama
        self.group = group  # process group of tensor ranks
        self.device = device
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self.dummies: dict[tuple[int, ...], Tensor] = {}  # kept dummy gradients, by shape
        self.gathered_for_output: Tensor | None = None  # see `get_output_buffer`; made when used

    def make_empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return an empty tensor on the device."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def gather(self, local_tokens: Tensor) -> Tensor:
        """Return the tokens of all tensor ranks. local_tokens: this rank's, `[s / ranks, ...]`."""
        if self.group.size() == 1:
            return local_tokens
        shape = (len(local_tokens) * self.group.size(), *local_tokens.shape[1:])
        all_tokens = self.make_empty(*shape, dtype=local_tokens.dtype)
        dist.all_gather_into_tensor(all_tokens, local_tokens.contiguous(), group=self.group)
        return all_tokens

    def scatter(self, all_tokens: Tensor) -> Tensor:
        """Return this rank's part of the tokens, summed over ranks. all_tokens: `[s, ...]`."""
        if self.group.size() == 1:
            return all_tokens
        shape = (len(all_tokens) // self.group.size(), *all_tokens.shape[1:])
        local_tokens = self.make_empty(*shape)
        dist.reduce_scatter_tensor(local_tokens, all_tokens, group=self.group)
        return local_tokens

    def get_output_buffer(self, shape: tuple[int, ...]) -> Tensor:
        """Return Megatron's global buffer, into which it gathers the output projection's input.

        It has the shape of the first call, which all others have, too.
        """
        if self.gathered_for_output is None:
            self.gathered_for_output = self.make_empty(*shape)
        return self.gathered_for_output

    def make_dummy_gradient(self, weight: Tensor, of_output: bool = False) -> Tensor:
        """Allocate a weight's dummy gradient, see `Llama.dummy_gradients`; return it.

        of_output: the weight is the output projection's.
        """
        kind = self.llama.dummy_gradients
        if kind == ANEW or (kind == OUTPUT_ANEW and of_output):
            return torch.empty_like(weight)
        if tuple(weight.shape) not in self.dummies:
            self.dummies[tuple(weight.shape)] = torch.empty_like(weight)
        return self.dummies[tuple(weight.shape)]


# The functions below take and return activations `[s / tensor ranks or s, b, width]`; `gather` and
# `scatter` go between the two. Backward returns None for a weight: its gradient goes to the fp32
# buffer without autograd, and weights are passed detached.


class _NormLinear(torch.autograd.Function):
    """RMS norm, then a column-parallel linear.

    It keeps input and normed input of the rank's own tokens, and an fp32 statistic of each; the
    gathered tokens are gathered again in backward.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scale: Tensor, weight: Tensor, rank: _Rank) -> Tensor:
        normed = torch.empty_like(hidden)
        statistics = rank.make_empty(hidden.shape[0] * hidden.shape[1], dtype=torch.float32)
        gathered = rank.gather(normed)
        ctx.save_for_backward(hidden, scale, weight, normed, statistics)
        ctx.rank = rank
        return rank.make_empty(*gathered.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden, scale, weight, normed, _ = ctx.saved_tensors
        gathered = ctx.rank.gather(normed)
        gathered_gradient = ctx.rank.make_empty(*gathered.shape)
        normed_gradient = ctx.rank.scatter(gathered_gradient)
        del gathered  # the weight's gradient is made by here
        hidden_gradient = torch.empty_like(normed_gradient)
        scale_gradient = torch.empty_like(scale)
        ctx.rank.make_dummy_gradient(weight)
        return hidden_gradient.view_as(hidden), scale_gradient, None, None


class _DividedLinear(torch.autograd.Function):
    """A row-parallel linear, whose outputs are reduce-scattered: keeps its input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rank: _Rank) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.rank = rank
        return rank.scatter(rank.make_empty(*hidden.shape[:-1], len(weight)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        gathered_gradient = ctx.rank.gather(gradient)
        hidden_gradient = torch.empty_like(hidden)
        del gathered_gradient
        ctx.rank.make_dummy_gradient(weight)
        return hidden_gradient, None, None


class _RmsNorm(torch.autograd.Function):
    """RMS norm: keeps its input and an fp32 statistic of each token."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scale: Tensor, rank: _Rank) -> Tensor:
        ctx.save_for_backward(
            hidden, scale, rank.make_empty(hidden.shape[0] * hidden.shape[1], dtype=torch.float32)
        )
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden, scale, _ = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(scale), None


class _FusedRotation(torch.autograd.Function):
    """Rotary embedding of q or k: keeps no activation, only the tables of cosine and sine."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return torch.empty_like(hidden, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return torch.empty_like(gradient, memory_format=torch.contiguous_format)


class _FusedAttention(torch.autograd.Function):
    """Attention by cuDNN's or the flash kernel.

    It keeps q, k, v `[s, b, h, e]`, the output, and in fp32 a sum for each row.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rank: _Rank) -> Tensor:
        tokens, rows, heads, _ = q.shape  # rows: b
        output = torch.empty_like(q)
        row_sums = rank.make_empty(rows, heads, tokens, 1, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, row_sums)
        ctx.rank = rank
        return output.flatten(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        q, k, v, _, _ = ctx.saved_tensors
        # Scratch of the flash kernel; that of cuDNN's is not known.
        sizes = compute_attention_backward_scratch(
            rows=q.shape[1],
            heads=q.shape[2],
            kv_heads=k.shape[2],
            queries=len(q),
            keys=len(k),
            head_width=q.shape[3],
        )
        scratch = [ctx.rank.make_empty(size, dtype=torch.uint8) for size in sizes]
        gradients = [torch.empty_like(tensor) for tensor in (q, k, v)]
        del scratch
        return *gradients, None


class _SwiGlu(torch.autograd.Function):
    """SwiGLU by one kernel each way: keeps its input `[..., 2 f]`, gate and then up."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate = gate_and_up[..., : gate_and_up.shape[-1] // 2]
        return torch.empty_like(gate, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return torch.empty_like(ctx.saved_tensors[0])


class _SharedTokens(torch.autograd.Function):
    """The embedding's reduce-scatter: each tensor rank has looked up its part of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, rank: _Rank) -> Tensor:
        ctx.rank = rank
        return rank.scatter(words)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.rank.gather(gradient), None


class _OutputProjection(torch.autograd.Function):
    """Megatron's own column-parallel linear with torch's matmuls: keeps the rank's own tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rank: _Rank) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.rank = rank
        return _OutputProjection.gather(hidden, rank) @ weight.t()

    @staticmethod
    def gather(hidden: Tensor, rank: _Rank) -> Tensor:
        """Return all tokens, in Megatron's global buffer."""
        if rank.group.size() == 1:
            return hidden
        buffer = rank.get_output_buffer((len(hidden) * rank.group.size(), *hidden.shape[1:]))
        dist.all_gather_into_tensor(buffer, hidden, group=rank.group)
        return buffer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        _OutputProjection.gather(hidden, ctx.rank)  # again, for the weight's gradient
        gathered_gradient = gradient @ weight
        hidden_gradient = ctx.rank.scatter(gathered_gradient)
        ctx.rank.make_dummy_gradient(weight, of_output=True)
        return hidden_gradient, None, None


class _FusedCrossEntropy(torch.autograd.Function):
    """Transformer Engine's Triton kernel: losses in fp32, the gradient over the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rank: _Rank) -> Tensor:
        tokens = labels.numel()
        losses = torch.zeros(tokens, dtype=torch.float32, device=rank.device)
        # Three numbers a token, which ranks exchange to sum over their parts of the vocabulary.
        sums = torch.zeros(3 * tokens, dtype=torch.float32, device=rank.device)
        rank.gather(sums)
        ctx.save_for_backward(logits.detach())
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.saved_tensors[0], None, None


class _Parameter(nn.Module):
    """A parameter of this rank, in bf16."""

    def __init__(self, *shape: int, device: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device))


class _FusedLayer(nn.Module):
    """A decoder layer: attention and MLP, each with the norm before it."""

    def __init__(self, llama: Llama, rank: _Rank):
        super().__init__()
        self.llama = llama
        self.rank = rank
        ranks = rank.group.size()
        width = llama.hidden
        self.groups = llama.kv_heads // ranks  # key heads of this rank, each with its queries
        qkv_width = (llama.heads + 2 * llama.kv_heads) * llama.head_width
        self.input_norm = _Parameter(width, device=rank.device)
        self.qkv = _Parameter(qkv_width // ranks, width, device=rank.device)
        self.projection = _Parameter(width, width // ranks, device=rank.device)
        self.post_norm = _Parameter(width, device=rank.device)
        self.fc1 = _Parameter(2 * llama.feed_forward // ranks, width, device=rank.device)
        self.fc2 = _Parameter(width, llama.feed_forward // ranks, device=rank.device)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attend(hidden)
        gate_and_up = _NormLinear.apply(
            hidden, self.post_norm.weight, self.fc1.weight.detach(), self.rank
        )
        return hidden + _DividedLinear.apply(
            _SwiGlu.apply(gate_and_up), self.fc2.weight.detach(), self.rank
        )

    def _attend(self, hidden: Tensor) -> Tensor:
        """Return attention's output after its projection."""
        width = self.llama.head_width
        queries_per_group = self.llama.heads // self.llama.kv_heads
        mixed = _NormLinear.apply(
            hidden, self.input_norm.weight, self.qkv.weight.detach(), self.rank
        )
        # Each group's queries, then its key and its value.
        mixed = mixed.view(*mixed.shape[:2], self.groups, (queries_per_group + 2) * width)
        q, k, v = mixed.split([queries_per_group * width, width, width], dim=-1)  # views
        del mixed
        # `reshape` copies where there are several groups, whose queries do not lie together.
        # Rotation makes q and k anew.
        q = _FusedRotation.apply(q.reshape(*q.shape[:2], self.groups * queries_per_group, width))
        k = _FusedRotation.apply(k)
        # Attention copies v, whose strides differ from k's.
        output = _FusedAttention.apply(q, k, v.contiguous(), self.rank)
        return _DividedLinear.apply(output, self.projection.weight.detach(), self.rank)


class TokenSharingStage(nn.Module):
    """The layers of one place in the pipeline.

    The first has the embedding, too, the last the final norm and the output projection.
    """

    def __init__(self, llama: Llama, layout: Layout, place: int, group: Any, device: Any):
        super().__init__()
        self.llama = llama
        self.rows = layout.micro_batch
        self.device = device
        self.rank = _Rank(llama, group, device)
        self.first = place == 0
        self.last = place == layout.pipeline - 1
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
        """Return `[sequence / tensor ranks, b, hidden]`; in the last stage the mean loss, `[]`.

        received: output of the stage before; None in the first. The others are of `make_batch`.
        """
        hidden: Any = received
        if self.first:
            words = F.embedding(tokens, self.embedding.weight)  # [b, s, hidden]
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

    def make_batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Make a micro-batch: tokens, labels and loss weights `[b, s]`, mask `[1, 1, s, s]`.

        Nobody reads the mask; it takes its memory.
        """
        length = self.llama.sequence
        tokens = torch.zeros(self.rows, length, dtype=torch.int64, device=self.device)
        labels = torch.zeros(self.rows, length, dtype=torch.int64, device=self.device)
        weights = torch.ones(self.rows, length, device=self.device)
        mask = torch.empty(1, 1, length, length, dtype=torch.bool, device=self.device)
        return tokens, labels, weights, mask

    def make_message(self) -> Tensor:
        """Allocate what a stage receives from another, `[sequence / tensor ranks, b, hidden]`."""
        return self.rank.make_empty(
            self.llama.sequence // self.rank.group.size(), self.rows, self.llama.hidden
        )
