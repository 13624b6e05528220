"""Train a small Llama on one process and on tensor-parallel gloo ranks, and return its losses.

`tp_trace.py` and tests/parallel/test_tensor_curve.py call `train_losses`. Model and settings are
those of nanotron's check of its #203 (tied embedding, as many key heads as query heads, AdamW,
clipping at 1, warm-up and cosine), with smaller numbers.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.realdata import find_real_data
from benchmarks.tp_ways import share_one_buffer
from recipe_lib.config.schema import FullFinetuneConfig, ParallelConfig
from recipe_lib.models import build_meta, build_spec, init_weights
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel import all_reduce_gradients, materialize, parallelize, start_world
from recipe_lib.training import clip_grad_norm
from tests.distributed.ranks import run_ranks

RANKS = 4  # tensor-parallel
STEPS = 100
MICRO_BATCHES = 2  # a step
ROWS = 1  # sequences of a micro-batch
LENGTH = 512  # tokens of a sequence
BYTES = 256  # the vocabulary: a token is a byte
RATE = 1e-3  # the learning rate after the warm-up
LEAST_RATE = 1e-5  # where the cosine ends
WARM_UP = 2  # steps
STORIES = "datasets/tinystories/tinystories_train_head.txt"  # in the folder of REALDATA_DIR
SPEC = build_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": BYTES,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "small",
)


def read_stories() -> Tensor:
    """Return the bytes of real stories as int64 `[n, LENGTH + 1]`."""
    return split_into_rows(find_real_data(STORIES).read_bytes())


def split_into_rows(text: bytes) -> Tensor:
    """Return the bytes as int64 `[n, LENGTH + 1]`, without an incomplete row at the end.

    A row has one token more than a sequence, since labels are shifted.
    """
    count = len(text) // (LENGTH + 1)
    return torch.tensor(list(text[: count * (LENGTH + 1)])).view(count, LENGTH + 1)


@dataclass(frozen=True)
class Run:
    """Settings of a run: where gathered tokens lie, and whether backward gathers them again."""

    regather: str = "true"  # the value of `parallel.tensor_regather_in_backward`
    one_buffer: bool = False  # all gathers write to the same memory


# A fault: backward reads gathered tokens from the buffer, where a later gather has written.
WRONG = Run("false", one_buffer=True)


def train_losses(
    rows: Tensor, steps: int, ranks: int, runs: Sequence[Run] = (Run(),)
) -> list[list[float]]:
    """Train by each run in turn; return for each the mean loss of every step, in fp32.

    rows: int64 `[n, s + 1]`, taken in order and again from the first. ranks: tensor-parallel.
    """
    return run_ranks(_train_each, ranks, rows, steps, ranks, runs, timeout=1200.0)[0]  # type: ignore[no-any-return]


def _train_each(rows: Tensor, steps: int, ranks: int, runs: Sequence[Run]) -> list[list[float]]:
    """Train by each run on this rank."""
    return [_train(rows, steps=steps, ranks=ranks, run=run) for run in runs]


def _train(rows: Tensor, steps: int, ranks: int, run: Run) -> list[float]:
    """Train by a run on this rank; return the mean loss of every step."""
    cfg = FullFinetuneConfig(device="cpu", dtype="fp32")
    cfg.parallel = ParallelConfig(tensor=ranks, tensor_regather_in_backward=run.regather)
    with start_world(cfg) as world, share_one_buffer() if run.one_buffer else nullcontext():
        model = build_meta(SPEC, torch.float32)
        divided = parallelize(model, cfg, world)
        materialize(model, cfg.memory, world.device)
        init_weights(model, 1, SPEC)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01
        )
        losses = []
        for step in range(steps):
            loss = torch.zeros(())
            for number in range(MICRO_BATCHES):
                first = (step * MICRO_BATCHES + number) * ROWS
                batch = rows[torch.arange(first, first + ROWS) % len(rows)]
                tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
                loss_sum = model(tokens, labels=labels, head_loss=CrossEntropy(1))
                micro_loss = loss_sum / (MICRO_BATCHES * labels.numel())
                micro_loss.backward()
                loss += micro_loss.detach()
            all_reduce_gradients(model, divided, world)
            clip_grad_norm(
                model.parameters(),
                max_norm=1.0,
                world=world,
                parallel=divided,
                norms_in_backward=None,
            )
            for group in optimizer.param_groups:
                group["lr"] = _compute_rate(step, steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(world.all_reduce_sum(loss)))
        return losses


def _compute_rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0: a linear warm-up, then a cosine."""
    if step < WARM_UP:
        return RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LEAST_RATE + (RATE - LEAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def find_largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference of two curves, relative to the expected one."""
    return max(abs(loss - right) / abs(right) for loss, right in zip(losses, expected, strict=True))
