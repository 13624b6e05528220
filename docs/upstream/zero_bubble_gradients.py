"""Gradients of torch's pipeline schedules against one process: python zero_bubble_gradients.py (two
gloo processes).
"""

import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor

RANKS, STAGES, MICRO_BATCHES, WIDTH = 2, 4, 4, 8
NAMES = [
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
]
SITUATIONS = [
    "plain",
    "first half frozen",
    "fully_shard, reshard_after_forward=False",
    "fully_shard, defaults",
]


def make_layers():
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        for _ in range(STAGES)
    ]
    return [layer.double() for layer in layers]


def loss_of(output, target):
    return ((output - target) ** 2).sum()


def freeze(layers, situation):
    for layer in layers[: STAGES // 2] if situation == "first half frozen" else []:
        layer.requires_grad_(False)


def layers_of(rank, name):
    """By stage of this rank, the numbers of its layers."""
    if name == "Schedule1F1B":
        return {rank: [2 * rank, 2 * rank + 1]}
    v_shaped = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    return {stage: [stage] for stage in (rank, STAGES - 1 - rank if v_shaped else rank + RANKS)}


def run(rank, name, situation, mesh, data):
    layers, numbers = make_layers(), layers_of(rank, name)
    freeze(layers, situation)
    parts = {stage: nn.Sequential(*(layers[i] for i in of)) for stage, of in numbers.items()}
    if situation.startswith("fully_shard"):
        options = {"reshard_after_forward": False} if "False" in situation else {}
        for part in parts.values():
            for module in (*part, part):
                fully_shard(module, mesh=mesh["dp"], **options)
    count = RANKS if name == "Schedule1F1B" else STAGES
    stages = [
        PipelineStage(part, at, count, torch.device("cpu"), group=mesh.get_group("pp"))
        for at, part in parts.items()
    ]
    schedule = getattr(schedules, name)(
        stages[0] if name == "Schedule1F1B" else stages,
        n_microbatches=MICRO_BATCHES,
        loss_fn=loss_of,
        scale_grads=False,
    )
    inputs, target = data
    schedule.step(
        *([inputs] if 0 in parts else []), **({"target": target} if count - 1 in parts else {})
    )
    return {i: [p.grad for p in layers[i].parameters()] for of in numbers.values() for i in of}


def compare(found, expected):
    missing = off = 0
    most = 0.0
    for number, gradients in found.items():
        for gradient, right in zip(gradients, expected[number], strict=True):
            if right is None:
                continue
            if gradient is None:
                missing += 1
                continue
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            error = float((whole - right).norm() / right.norm())
            off, most = off + (error > 1e-9), max(most, error)
    return torch.tensor(
        [missing, off, most, sum(g is not None for n in found for g in expected[n])]
    )


def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("pp", "dp"))
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(4 * MICRO_BATCHES, WIDTH, generator=generator).double() for _ in range(2)]
    for situation in SITUATIONS:
        layers = make_layers()
        freeze(layers, situation)
        loss_of(nn.Sequential(*layers)(data[0]), data[1]).backward()
        expected = [[p.grad for p in layer.parameters()] for layer in layers]
        for name in NAMES:
            numbers = compare(run(rank, name, situation, mesh, data), expected)
            every = [torch.empty_like(numbers) for _ in range(RANKS)]
            dist.all_gather(every, numbers)
            missing, off, _, count = (int(sum(one[i] for one in every)) for i in range(4))
            most = max(float(one[2]) for one in every)
            said = (
                f"of {count} trained parameters {missing} without gradient, {off} wrong (by"
                f" {most:.0%} at most)"
            )
            if rank == 0:
                print(f"{situation:41} {name:30} {said if missing or off else 'right'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(main, args=(f"{folder}/store",), nprocs=RANKS)
