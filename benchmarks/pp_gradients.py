"""Which gradients torch's own pipeline gives, with each schedule, where layers are frozen, resharded or checkpointed.

    python benchmarks/pp_gradients.py

A small decoder in two gloo processes, PipelineStage and the Schedule classes, against one process. Ours in the same
situations, and more: tests/parallel/pipeline/test_equality.py. No time is measured.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.pp_stock import SCHEDULE_CLASSES, _loss, _part  # noqa: E402
from benchmarks.pp_traced import config, micro_batches, small_spec  # noqa: E402
from recipe_lib.config.pipeline import stage_count, stages_of_rank  # noqa: E402
from tests.distributed.ranks import RankFailure, run_ranks  # noqa: E402

LAYERS, COUNT, RANKS = 8, 4, 2
Change = Callable[[nn.Module], None]


def main() -> int:
    """Prints a table; 0."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"torch {torch.__version__}: parameters that should have a gradient, of them without one, of them wrong")
    for name, (mode, change) in SITUATIONS.items():
        for schedule in SCHEDULE_CLASSES:
            try:
                found = run_ranks(_gradients, RANKS, schedule, mode, change, timeout=120)
                wanted, missing, wrong = (sum(counts) for counts in zip(*found, strict=True))
                told = f"{wanted}, {missing}, {wrong}"
            except RankFailure as failure:
                told = next(line for line in str(failure).splitlines() if "Error: " in line)
            print(f"{name:24} {schedule:24} {told}", flush=True)
    return 0


def _nothing(part: nn.Module) -> None:
    pass


def _freeze_first_half(part: nn.Module) -> None:
    for name, parameter in part.named_parameters():
        early = "embed_tokens" in name or any(f"layers.{number}." in name for number in range(LAYERS // 2))
        parameter.requires_grad_(not early)


def _reshard(part: nn.Module) -> None:
    """FSDP as it is by default: layers are resharded after their forward. Over one rank, which is enough."""
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("pipeline", "data"))["data"]
    for layer in part.model.model.layers.children():  # type: ignore[union-attr, operator]
        fully_shard(layer, mesh=mesh)
    fully_shard(part, mesh=mesh)


SITUATIONS: dict[str, tuple[str, Change]] = {
    "all trained": ("none", _nothing),
    "first half frozen": ("none", _freeze_first_half),
    "FSDP, resharded": ("none", _reshard),
    "selective checkpointing": ("selective", _nothing),
}


def _gradients(schedule: str, mode: str, change: Change) -> list[int]:
    """Of this rank's parameters: those with a gradient in one process, of them without one here, of them wrong."""
    cfg, spec = config(schedule, RANKS, COUNT, mode), small_spec(LAYERS)
    stages, mine = stage_count(cfg.parallel), stages_of_rank(cfg.parallel, dist.get_rank())
    each = LAYERS // stages
    rows = micro_batches(COUNT)
    tokens, labels = torch.cat([one.tokens for one in rows]), torch.cat([one.labels for one in rows])
    alone = _part(config(schedule, RANKS, COUNT, "none"), spec, 0, range(LAYERS), 1)[1]
    if change is not _reshard:
        change(alone)
    for one in rows:
        _loss(alone(one.tokens), one.labels).backward()
    parts = [_part(cfg, spec, stage, range(stage * each, (stage + 1) * each), stages)[1] for stage in mine]
    for part in parts:
        change(part)
    wrapped = [PipelineStage(part, stage, stages, torch.device("cpu")) for stage, part in zip(mine, parts, strict=True)]
    single = schedule in ("gpipe", "1f1b")
    run = SCHEDULE_CLASSES[schedule](
        wrapped[0] if single else wrapped, n_microbatches=COUNT, loss_fn=_loss, scale_grads=False
    )
    more: dict[str, Any] = {"target": labels} if stages - 1 in mine else {}
    run.step(*([tokens] if 0 in mine else []), return_outputs=False, **more)
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    found = {name: parameter.grad for part in parts for name, parameter in part.named_parameters()}
    wanted = {name: value for name, value in expected.items() if name in found and value is not None}
    missing = [name for name in wanted if found[name] is None]
    wrong = [name for name in wanted if found[name] is not None and _differs(found[name], wanted[name])]
    return [len(wanted), len(missing), len(wrong)]


def _differs(found: Tensor | None, expected: Tensor) -> bool:
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    assert whole is not None
    return bool(torch.linalg.vector_norm(whole - expected) > 1e-3 * torch.linalg.vector_norm(expected))


if __name__ == "__main__":
    sys.exit(main())
