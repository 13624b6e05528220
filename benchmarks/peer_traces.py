"""Trace training steps of the models of `peer_stacks.py`, to plan runs that others published.

`planner_peers.py` calls `trace_run` and replays the trace in the planner's model of torch's
allocator. A trace has the allocations of a run on the simulated device, whose tensors have sizes
and no bytes.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils

from benchmarks.peer_stacks import PeerRun, build_model
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
from recipe_lib.plan.tracing.trace_rank import pause_collector
from recipe_lib.plan.tracing.tracer import Tracer

# Phases of a trace.
SETUP = "setup"
FIRST = "first step"  # it makes AdamW's states
STEP = "step"
# Cache of operators' results by their arguments' shapes, for all traces of this process.
_known_calls: dict[Any, Any] = {}


def trace_run(run: PeerRun, sizes: Mapping[str, Any]) -> Trace:
    """Trace the set-up and two steps of a run.

    sizes: entries of transformers' config.
    """
    architecture = run.workspace or f"sm{run.capability[0]}{run.capability[1]}"
    world = enter_simulated_world(ParallelConfig(), 0, 1, capability=run.capability)
    with world as ranks, use_fake_tensors() as mode, pause_collector(), _choose_attention(run):
        tracer = Tracer(NAME, CachedFakeMode(mode, _known_calls), make_kernel_memory(architecture))
        connect_streams(tracer)
        with tracer.activate():
            tracer.begin_phase(SETUP)
            model = build_model(run, sizes, ranks.device)
            tracer.name_modules(model)
            for name, parameter in model.named_parameters():
                tracer.label(parameter, "parameters", name)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)
            batch = torch.zeros(run.batch, run.tokens, dtype=torch.int64, device=ranks.device)
            for name in (FIRST, STEP):
                tracer.begin_phase(name)
                train_step(run, model=model, optimizer=optimizer, trained=trained, batch=batch)
    classify_activations(tracer.trace)
    return tracer.trace


def train_step(
    run: PeerRun, model: Any, optimizer: Any, trained: list[Tensor], batch: Tensor
) -> None:
    """Run a step: drop gradients, forward, backward, AdamW.

    trained: the parameters that require gradients. batch: token ids `[b, s]`, labels as well.
    """
    optimizer.zero_grad(set_to_none=True)
    if run.loss_chunk:
        hidden = model.model(input_ids=batch).last_hidden_state
        loss = compute_chunked_loss(
            model.lm_head, hidden=hidden, labels=batch, chunk=run.loss_chunk
        )
        del hidden
    else:
        output = model(input_ids=batch, labels=batch)
        loss = output.loss
        if not run.keeps_logits:
            del output
    loss.backward()
    if run.clipped:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()


def compute_chunked_loss(head: Any, hidden: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Return the mean cross-entropy of hidden states `[b, s, d]`, `chunk` tokens at a time.

    head: the output projection. labels: `[b, s]`. Logits are made again in backward.
    """
    shifted_labels = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    rows = hidden.flatten(0, 1)
    is_label = shifted_labels != -100
    # The last token has no label. Its removal is a copy, which takes memory.
    rows = rows[:-1].clone()
    shifted_labels = shifted_labels[:-1].clone()
    total: Any = None
    for begin in range(0, len(rows), chunk):
        chunk_loss = checkpoint(
            partial(_sum_losses, head),
            rows[begin : begin + chunk],
            shifted_labels[begin : begin + chunk],
            use_reentrant=False,
        )
        total = chunk_loss if total is None else total + chunk_loss
    return total / is_label.sum()


def _sum_losses(head: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy of hidden states `[m, d]`."""
    return F.cross_entropy(head(hidden).float(), labels, ignore_index=-100, reduction="sum")


@contextmanager
def _choose_attention(run: PeerRun) -> Iterator[None]:
    """Make attention take the run's kernel, and transformers make no mask, inside the block."""
    with ExitStack() as stack:
        # transformers looks at positions for packed sequences. They have no values here, and the
        # runs have none packed.
        stack.enter_context(
            mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda *_: None)
        )
        if run.attention in ("efficient", "math"):
            attend = partial(_attend, run.attention)
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attend))
        yield


def _attend(
    kernel: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention's output by a kernel, `math` or `efficient`.

    The other arguments are those of `F.scaled_dot_product_attention`, which it replaces.
    """
    aten = torch.ops.aten
    if kernel == "math":
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    # This kernel has no grouped queries, so each query head gets a copy of keys and values.
    if key.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(groups, dim=-3) for tensor in (key, value))
    needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needed, dropout_p, is_causal, scale=scale
    )[0]
