"""How often torch's pipeline schedules run a checkpointed block: python
zero_bubble_recomputation.py (2 processes).
"""

import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

RANKS, MICRO_BATCHES, WIDTH, LENGTH = 2, 4, 16, 8
NAMES = [
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
]


class Block(nn.Module):
    """Attention and a gated MLP, nine parameters; `runs` counts forwards."""

    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed, self.runs = checkpointed, 0
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x):
        return (
            checkpoint(self.compute, x, use_reentrant=False)
            if self.checkpointed
            else self.compute(x)
        )

    def compute(self, x):
        self.runs += 1
        y = self.norm1(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y)))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def loss_of(output, target):
    return ((output - target) ** 2).sum()


def run(rank, name, checkpointed):
    """Forwards of each block of this rank in a second step, for one micro-batch."""
    each = 1 if name == "Schedule1F1B" else 2
    count = RANKS * each
    v_shaped = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    mine = [rank] if each == 1 else [rank, count - 1 - rank if v_shaped else rank + RANKS]
    torch.manual_seed(0)
    blocks = [Block(checkpointed) for _ in mine]
    stages = [
        PipelineStage(block, at, count, torch.device("cpu"))
        for block, at in zip(blocks, mine, strict=True)
    ]
    schedule = getattr(schedules, name)(
        stages[0] if each == 1 else stages, n_microbatches=MICRO_BATCHES, loss_fn=loss_of
    )
    inputs, target = (torch.randn(MICRO_BATCHES, LENGTH, WIDTH) for _ in range(2))
    for _ in range(2):  # the first step also runs each stage to learn its shapes
        for block in blocks:
            block.runs = 0
        schedule.step(
            *([inputs] if 0 in mine else []), **({"target": target} if count - 1 in mine else {})
        )
    return [f"{block.runs / MICRO_BATCHES:g}" for block in blocks]


def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for checkpointed in (False, True):
        for name in NAMES:
            every = [None] * RANKS
            dist.all_gather_object(every, run(rank, name, checkpointed))
            if rank == 0:
                told = "checkpoint" if checkpointed else "plain"
                print(
                    f"{told:10} {name:30} forwards a micro-batch, by rank and block: {every}",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(main, args=(f"{folder}/store",), nprocs=RANKS)
