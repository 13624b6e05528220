"""Trace the memory of one rank of Megatron-LM's GPT training, as it was in September 2023.

`planner_rows.py` calls `trace_stages` and compares the planner's bytes with published runs. The
modules allocate and keep what Megatron's do; values mean nothing. Tensor parallelism without
sequence parallelism, 1F1B, the distributed optimizer (ZeRO-1) with fp32 master weights, and one
contiguous fp32 gradient buffer. Activations are `[s, b, h]`: sequence, batch, width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.config.schema import ParallelConfig
from recipe_lib.plan.allocation.scratch import make_kernel_memory
from recipe_lib.plan.simulated_world.cached_fake_mode import CachedFakeMode
from recipe_lib.plan.simulated_world.simulated_device import NAME
from recipe_lib.plan.simulated_world.simulated_ranks import (
    connect_streams,
    enter_simulated_world,
    use_fake_tensors,
)
from recipe_lib.plan.tracing.activations import classify_activations
from recipe_lib.plan.tracing.trace import Trace
from recipe_lib.plan.tracing.tracer import Tracer

MICRO_BATCHES = 3  # of a step that are traced; all leave the memory alike
# Phases of a trace: SETUP, `first step` and STEP.
SETUP = "setup"
STEP = "step"
# Cache of operators' results by their arguments' shapes, for all traces of this process.
_known_calls: dict[Any, Any] = {}


@dataclass(frozen=True)
class Layout:
    """Hold how a run is divided."""

    micro_batch: int  # sequences
    data: int  # ranks that the batch, and the optimizer's states, are divided over
    pipeline: int  # ranks that the layers are divided over
    tensor: int  # ranks that each matrix is divided over

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.data * self.pipeline * self.tensor


@dataclass(frozen=True)
class Gpt:
    """Hold the sizes and options of a GPT.

    The defaults are those of the 7B that Megatron's memory tool prints as its example, and
    Megatron's own for what it does not print.
    """

    layers: int = 32
    hidden: int = 4096  # width
    heads: int = 32
    # Width behind the gate. Megatron takes 8/3 of `hidden`, rounded down to a multiple of 64.
    feed_forward: int = 10880
    vocabulary: int = 50257  # rows before they are padded to a multiple of 128 on each tensor rank
    sequence: int = 2048  # tokens
    biases: bool = True  # linears have them
    positions: bool = True  # position embeddings are learned
    tied: bool = True  # the output projection is the embedding
    dropout: float = 0.1  # rate, of embedding, attention and residual
    # A linear's weight gradient is added to the fp32 buffer by its matmul; else a bf16 gradient is
    # allocated in between.
    fused_weight_gradients: bool = True
    architecture: str = "sm90"  # the GPU's; sets how large torch's workspaces are

    def build_stage(self, layout: Layout, place: int, group: Any, device: Any) -> "Stage":
        """Build this rank's part of a stage.

        place: the rank's position in its pipeline, from 0. group: process group of tensor ranks.
        """
        return Stage(self, layout=layout, place=place, group=group, device=device)


def _compute_linear(
    hidden: Tensor, weight: Tensor, reduced: bool, fused: bool, group: Any
) -> Tensor:
    """Return `hidden @ weight.T`, `[s, b, outputs]`.

    reduced: row-parallel, outputs are summed over the group in forward; else column-parallel, input
    gradients are summed in backward. fused: the weight's gradient takes no memory of its own.
    """
    if fused:
        # Autograd makes no gradient for it. The fp32 buffer that it is added to exists already.
        weight = weight.detach()
    return _Linear.apply(hidden, weight, reduced, fused, group)


class _Linear(torch.autograd.Function):
    """Compute `_compute_linear`'s product, and keep its input for backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, reduced: bool, fused: bool, group: Any
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.reduced, ctx.fused, ctx.group = reduced, fused, group
        output = hidden @ weight.t()
        if reduced:
            _all_reduce(output, group)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        hidden_gradient = gradient @ weight
        if not ctx.reduced:
            _all_reduce(hidden_gradient, ctx.group)
        weight_gradient = None
        if not ctx.fused:
            weight_gradient = gradient.flatten(0, 1).t() @ hidden.flatten(0, 1)
        return hidden_gradient, weight_gradient, None, None, None


class _BiasDropoutAdd(torch.autograd.Function):
    """Compute residual + dropout(hidden + bias) as one kernel; its mask takes a byte an element."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, bias: Tensor | None, residual: Tensor, rate: float
    ) -> Tensor:
        ctx.mask = torch.empty_like(hidden, dtype=torch.bool) if rate else None
        ctx.biased = bias is not None
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden_gradient = torch.empty_like(gradient) if ctx.mask is not None else gradient
        ctx.mask = None
        bias_gradient = hidden_gradient.sum((0, 1)) if ctx.biased else None
        return hidden_gradient, bias_gradient, gradient, None


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Compute the loss of each token, `[s, b]`, from this rank's columns of the fp32 logits.

    Keeps the softmax, which backward turns into the gradient in place.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Any) -> Tensor:
        largest = logits.max(dim=-1)[0]
        _all_reduce(largest, group)
        logits = logits - largest.unsqueeze(-1)
        # Labels of other ranks' columns. As values mean nothing, every rank takes the first part.
        is_elsewhere = labels >= logits.shape[-1]
        flat_labels = labels.masked_fill(is_elsewhere, 0).flatten()
        label_logits = logits.flatten(0, 1).gather(1, flat_labels[:, None]).view_as(labels)
        _all_reduce(label_logits, group)
        logits.exp_()
        total = logits.sum(-1)
        _all_reduce(total, group)
        losses = total.log() - label_logits
        logits.div_(total.unsqueeze(-1))
        ctx.save_for_backward(logits, is_elsewhere, flat_labels)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        softmax, _, flat_labels = ctx.saved_tensors
        softmax.flatten(0, 1).scatter_(1, flat_labels[:, None], 0.0)
        return softmax.mul_(gradient.unsqueeze(-1)), None, None


def _all_reduce(tensor: Tensor, group: Any) -> None:
    """Sum a tensor over the group in place; without an operator for a group of one."""
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)


class _Weight(nn.Module):
    """Hold a matrix `[outputs, inputs]` in bf16, and a bias `[outputs]` or None."""

    def __init__(self, outputs: int, inputs: int, biased: bool, device: Any):
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(outputs, inputs, dtype=torch.bfloat16, device=device)
        )
        self.bias = (
            nn.Parameter(torch.empty(outputs, dtype=torch.bfloat16, device=device))
            if biased
            else None
        )


class _Attention(nn.Module):
    """Compute this rank's heads by flash attention, without the output's bias.

    `_BiasDropoutAdd` adds that bias, after the ranks' outputs are summed.
    """

    def __init__(self, gpt: Gpt, group: Any, device: Any):
        super().__init__()
        self.gpt = gpt
        self.group = group
        local_width = gpt.hidden // group.size()
        self.qkv = _Weight(3 * local_width, inputs=gpt.hidden, biased=gpt.biases, device=device)
        self.dense = _Weight(gpt.hidden, inputs=local_width, biased=gpt.biases, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        gpt = self.gpt
        fused = gpt.fused_weight_gradients
        qkv = _compute_linear(hidden, self.qkv.weight, reduced=False, fused=fused, group=self.group)
        if self.qkv.bias is not None:
            qkv = qkv + self.qkv.bias
        num_heads = gpt.heads // self.group.size()
        head_width = gpt.hidden // gpt.heads
        # Each is `[s, b, heads, head width]`, then copied to `[b, heads, s, head width]`.
        parts = qkv.view(*qkv.shape[:2], num_heads, 3 * head_width).split(head_width, dim=-1)
        q, k, v = (part.transpose(0, 1).contiguous().transpose(1, 2) for part in parts)
        output = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, gpt.dropout, True)[0]
        context = output.permute(2, 0, 1, 3).flatten(2).contiguous()
        return _compute_linear(
            context, self.dense.weight, reduced=True, fused=fused, group=self.group
        )


class _Mlp(nn.Module):
    """Compute the MLP with SwiGLU of separate operators, without the output's bias.

    `_BiasDropoutAdd` adds that bias, after the ranks' outputs are summed.
    """

    def __init__(self, gpt: Gpt, group: Any, device: Any):
        super().__init__()
        self.gpt = gpt
        self.group = group
        local_width = gpt.feed_forward // group.size()
        self.up = _Weight(2 * local_width, inputs=gpt.hidden, biased=gpt.biases, device=device)
        self.down = _Weight(gpt.hidden, inputs=local_width, biased=gpt.biases, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        fused = self.gpt.fused_weight_gradients
        gate_and_up = _compute_linear(
            hidden, self.up.weight, reduced=False, fused=fused, group=self.group
        )
        if self.up.bias is not None:
            gate_and_up = gate_and_up + self.up.bias
        gate, up = gate_and_up.chunk(2, dim=-1)
        return _compute_linear(
            F.silu(gate) * up, self.down.weight, reduced=True, fused=fused, group=self.group
        )


class _Layer(nn.Module):
    """Compute a layer of the decoder, `[s, b, h]` to `[s, b, h]`."""

    def __init__(self, gpt: Gpt, group: Any, device: Any):
        super().__init__()
        self.rate = gpt.dropout
        self.input_norm = nn.LayerNorm(gpt.hidden, device=device, dtype=torch.bfloat16)
        self.post_norm = nn.LayerNorm(gpt.hidden, device=device, dtype=torch.bfloat16)
        self.attention = _Attention(gpt, group, device)
        self.mlp = _Mlp(gpt, group, device)

    def forward(self, hidden: Tensor) -> Tensor:
        attended = self.attention(self.input_norm(hidden))
        hidden = _BiasDropoutAdd.apply(attended, self.attention.dense.bias, hidden, self.rate)
        return _BiasDropoutAdd.apply(
            self.mlp(self.post_norm(hidden)), self.mlp.down.bias, hidden, self.rate
        )


class Stage(nn.Module):
    """Compute the layers of one pipeline rank, the first with embedding, the last with the loss."""

    def __init__(self, gpt: Gpt, layout: Layout, place: int, group: Any, device: Any):
        """Allocate this rank's part of the stage's weights, uninitialized.

        place: position in the pipeline, from 0. group: process group of tensor ranks.
        """
        super().__init__()
        self.gpt = gpt
        self.group = group
        self.device = device
        self.rows = layout.micro_batch  # sequences
        self.first = place == 0
        self.last = place == layout.pipeline - 1
        multiple = 128 * layout.tensor
        local_vocabulary = -(-gpt.vocabulary // multiple) * multiple // layout.tensor
        if self.first:
            self.embedding = _Weight(
                local_vocabulary, inputs=gpt.hidden, biased=False, device=device
            )
            self.positions = (
                _Weight(gpt.sequence, inputs=gpt.hidden, biased=False, device=device)
                if gpt.positions
                else None
            )
        self.layers = nn.ModuleList(
            _Layer(gpt, group, device) for _ in range(gpt.layers // layout.pipeline)
        )
        if self.last:
            self.norm = nn.LayerNorm(gpt.hidden, device=device, dtype=torch.bfloat16)
            # In a pipeline the last rank has a copy of a tied embedding.
            is_shared = gpt.tied and self.first
            self.output = (
                self.embedding
                if is_shared
                else _Weight(local_vocabulary, inputs=gpt.hidden, biased=False, device=device)
            )

    def forward(
        self,
        received: Tensor | None,
        tokens: Tensor,
        positions: Tensor,
        weights: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """Return hidden states `[s, b, h]`; of the last stage, the mean loss `[]`.

        received: hidden states of the stage before, None of the first one. The others are those of
        `make_batch`.
        """
        hidden = self._embed(tokens[:, :-1].contiguous(), positions) if self.first else received
        for layer in self.layers:
            hidden = layer(hidden)
        if not self.last:
            return hidden
        labels = tokens[:, 1:].t().contiguous()
        logits = _compute_linear(
            self.norm(hidden),
            self.output.weight,
            reduced=False,
            fused=self.gpt.fused_weight_gradients,
            group=self.group,
        )
        losses = _VocabularyCrossEntropy.apply(logits.float(), labels, self.group)
        return (losses.t() * weights).sum() / weights.sum()

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the embedded tokens after dropout, `[s, b, h]`."""
        embedded = F.embedding(tokens, self.embedding.weight)
        # Outside of autograd: backward has no collective for it.
        _all_reduce(embedded.detach(), self.group)
        if self.positions is not None:
            embedded = embedded + F.embedding(positions, self.positions.weight)
        return F.dropout(embedded.transpose(0, 1).contiguous(), self.gpt.dropout)

    def make_batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Make a micro-batch.

        Tokens `[b, s + 1]`, positions `[b, s]`, weights of losses `[b, s]`, mask `[1, 1, s, s]`.
        Flash attention does not read the mask, but Megatron allocates it.
        """
        rows, length = self.rows, self.gpt.sequence
        tokens = torch.zeros(rows, length + 1, dtype=torch.int64, device=self.device)
        positions = torch.arange(length, device=self.device).expand(rows, length).clone()
        weights = torch.ones(rows, length, device=self.device)
        mask = torch.ones(1, 1, length, length, device=self.device).tril() < 0.5
        return tokens, positions, weights, mask

    def make_message(self) -> Tensor:
        """Allocate the buffer that a stage receives into, bf16 `[s, b, h]`."""
        return torch.empty(
            self.gpt.sequence, self.rows, self.gpt.hidden, dtype=torch.bfloat16, device=self.device
        )


class Training:
    """Hold a rank's model, gradient buffer and optimizer, and run its steps."""

    def __init__(self, sizes: Any, layout: Layout, place: int, world: Any):
        """Allocate all of it.

        sizes: `Gpt` or another with its `build_stage`. place: position in the pipeline, from 0.
        world: this process's simulated device and mesh.
        """
        self.layout = layout
        self.place = place
        self.device = world.device
        self.groups = {
            dim: world.mesh.get_group(dim) for dim in ("tensor", "pipeline", "data_shard")
        }
        self.model = sizes.build_stage(
            layout, place=place, group=self.groups["tensor"], device=self.device
        )
        parameters = list(self.model.parameters())
        element_count = sum(parameter.numel() for parameter in parameters)
        element_count += -element_count % layout.data  # padded to equal parts of data ranks
        self.gradients = torch.zeros(element_count, dtype=torch.float32, device=self.device)
        begin = 0
        for parameter in parameters:
            size = parameter.numel()
            # Megatron's name for a parameter's view of the buffer.
            parameter.main_grad = (  # type: ignore[attr-defined]
                self.gradients[begin : begin + size].view(parameter.shape)
            )
            parameter.register_post_accumulate_grad_hook(_accumulate_into_main_grad)
            begin += size
        self.states = [
            torch.zeros(element_count // layout.data, dtype=torch.float32, device=self.device)
            for _ in ("master weights", "first moments", "second moments")
        ]

    def label(self, tracer: Tracer) -> None:
        """Tell the tracer which memory is parameters, gradients, states and logits."""
        for name, parameter in self.model.named_parameters():
            tracer.label(parameter, "parameters", name)
        tracer.label(self.gradients, "gradients", "gradients")
        for state in self.states:
            tracer.label(state, "optimizer", "states")
        if self.model.last:
            # A tensor with such a last dimension counts as logits.
            tracer.vocabulary.add(self.model.output.weight.shape[0])

    def run_step(self) -> None:
        """Run 1F1B over MICRO_BATCHES, reduce gradients and gather the weights.

        The update itself, which is in place, is left out.
        """
        self.gradients.zero_()
        pending: list[tuple[Tensor | None, Tensor]] = []  # `_forward`'s, before their backward
        num_warm_up = self.layout.pipeline - 1 - self.place
        # The gradient that the last micro-batch sent back. A variable of Megatron's loop holds it
        # until the next one is assigned, and so does this one.
        sent_gradient = None
        for number in range(MICRO_BATCHES + num_warm_up):
            if number < MICRO_BATCHES:
                pending.append(self._forward())
            if number >= num_warm_up:
                sent_gradient = self._backward(*pending.pop(0))
        del sent_gradient
        shard = self.gradients.chunk(self.layout.data)[0]
        if self.layout.data > 1:
            dist.reduce_scatter_tensor(shard, self.gradients, group=self.groups["data_shard"])
            # Megatron gathers updated weights inside the gradient buffer, which is free by then.
            gathered = self.gradients.view(torch.bfloat16)[: len(self.gradients)]
            dist.all_gather_into_tensor(
                gathered, gathered.chunk(self.layout.data)[0], group=self.groups["data_shard"]
            )

    def _forward(self) -> tuple[Tensor | None, Tensor]:
        """Return (hidden states that were received or None, this stage's output).

        The output's memory is freed once it is sent; its graph is kept for backward.
        """
        received = None
        if not self.model.first:
            received = self.model.make_message().requires_grad_()
            dist.recv(received.detach(), group=self.groups["pipeline"], group_src=self.place - 1)
        output = self.model(received, *self.model.make_batch())
        if not self.model.last:
            dist.send(output.detach(), group=self.groups["pipeline"], group_dst=self.place + 1)
            # As Megatron's `deallocate_output_tensor`: backward needs the graph, not the values.
            output.untyped_storage().resize_(0)
        return received, output

    def _backward(self, received: Tensor | None, output: Tensor) -> Tensor | None:
        """Run backward, send the gradient to the stage before and return it; None of the first."""
        gradient = None
        if not self.model.last:
            gradient = self.model.make_message()
            dist.recv(gradient, group=self.groups["pipeline"], group_src=self.place + 1)
        torch.autograd.backward(output, gradient)
        if received is None:
            return None
        dist.send(received.grad, group=self.groups["pipeline"], group_dst=self.place - 1)
        return received.grad


def _accumulate_into_main_grad(parameter: Any) -> None:
    """Add a parameter's gradient to the fp32 buffer and free it; called by autograd."""
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def trace_stages(sizes: Any, layout: Layout) -> list[Trace]:
    """Trace the set-up and two steps of one rank of each stage, in the pipeline's order.

    sizes: `Gpt` or another class with its `build_stage` and `architecture`.
    """
    return [_trace(sizes, layout, place) for place in range(layout.pipeline)]


def _trace(sizes: Any, layout: Layout, place: int) -> Trace:
    """Trace the first rank at this position of the pipeline, on the simulated device."""
    parallel = ParallelConfig(pipeline=layout.pipeline, tensor=layout.tensor)
    # Ranks of a pipeline position are consecutive.
    rank = place * layout.ranks // layout.pipeline
    with enter_simulated_world(parallel, rank, layout.ranks) as world, use_fake_tensors() as mode:
        tracer = Tracer(
            NAME, CachedFakeMode(mode, _known_calls), make_kernel_memory(sizes.architecture)
        )
        connect_streams(tracer)
        with tracer.activate():
            tracer.begin_phase(SETUP)
            training = Training(sizes, layout=layout, place=place, world=world)
            tracer.name_modules(training.model)
            training.label(tracer)
            for name in (f"first {STEP}", STEP):
                tracer.begin_phase(name)
                training.run_step()
    classify_activations(tracer.trace)
    return tracer.trace
