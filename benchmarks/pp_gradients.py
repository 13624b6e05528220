"""Which gradients are right, of ours and of torch's own stages, when layers are frozen, sharded or
checkpointed.

    python benchmarks/pp_gradients.py --output docs/measurements/pp_gradients.md

A small decoder in float64 goes through pipelines of gloo processes on the CPU, once by ours and
once by torch's PipelineStage and schedule classes; every gradient is compared with one process. No
time is measured.
"""

import argparse
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.pp_stock import SCHEDULE_CLASSES, Part  # noqa: E402
from benchmarks.pp_traced import build_config, build_small_spec, make_micro_batches  # noqa: E402
from recipe_lib.config.mesh import count_stages, list_rank_stages  # noqa: E402
from recipe_lib.data import Batch  # noqa: E402
from recipe_lib.memory import apply_activation_checkpointing  # noqa: E402
from recipe_lib.models import Decoder, build_meta, init_weights  # noqa: E402
from recipe_lib.parallel import (  # noqa: E402
    World,
    materialize,
    shard_model,
    split_pipeline,
    start_world,
)
from tests.distributed.ranks import RankFailure, run_ranks  # noqa: E402

LAYERS, COUNT, RANKS, TOLERANCE = 4, 4, 2, 1e-6
SPEC = build_small_spec(LAYERS)

PAGE = """# Gradients of a pipeline

Made by `python benchmarks/pp_gradients.py --output docs/measurements/pp_gradients.md`: {layers} layers of a small
decoder in float64, {count} micro-batches, pipelines of {ranks} gloo ranks (with FSDP {ranks} x 2), one training
step, against one process; ours and torch {torch}'s `PipelineStage` with its schedule classes. Right: every
trained parameter has a gradient that is within {tolerance} of its own size. torch's wrong ones come without an error
or a warning.

| what is trained | schedule | ours | torch's |
| --- | --- | --- | --- |
{rows}
"""


@dataclass(frozen=True)
class Situation:
    """What is done to the layers. reshards: None: no FSDP; else whether it frees what it has
    gathered after forward.
    """

    name: str
    frozen: bool = False
    reshards: bool | None = None
    checkpointing: str = "none"


SITUATIONS = (
    Situation("plain"),
    Situation("early layers frozen", frozen=True),
    Situation("FSDP, gathered parameters kept", reshards=False),
    Situation("FSDP, freed after forward (its default)", reshards=True),
    Situation("full checkpointing", checkpointing="full"),
    Situation("selective checkpointing", checkpointing="selective"),
)
SCHEDULES = [name for name in SCHEDULE_CLASSES if name != "gpipe"]
# By name, how far a gradient is from the expected one, of its size; None: there is none.
Found = dict[str, float | None]


def main() -> int:
    """Prints the table, and writes the page; 1 if a gradient of ours is not right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="the page")
    output = parser.parse_args().output
    rows, all_right = [], True
    for situation in SITUATIONS:
        for schedule in SCHEDULES:
            cells = [judge_run(run, situation, schedule) for run in (_run_ours, _run_stock)]
            all_right &= cells[0] == "right"
            rows.append(f"| {situation.name} | `{schedule}` | {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    if output is not None:
        words = {
            "layers": LAYERS,
            "count": COUNT,
            "ranks": RANKS,
            "torch": torch.__version__,
            "tolerance": TOLERANCE,
        }
        output.write_text(PAGE.format(rows="\n".join(rows), **words))
    return 0 if all_right else 1


def judge_run(run: Any, situation: Situation, schedule: str) -> str:
    """`right`, or what is not."""
    ranks = RANKS if situation.reshards is None else 2 * RANKS
    try:
        found: Found = functools.reduce(
            dict.__or__, run_ranks(run, ranks, situation, schedule, timeout=120)
        )
    except RankFailure as failure:
        return (
            "raises:"
            f" {next(line for line in str(failure).splitlines() if 'Error: ' in line).partition(': ')[2]}"
        )
    missing = [name for name, off in found.items() if off is None]
    wrong = [off for off in found.values() if off is not None and off > TOLERANCE]
    told = [f"{len(missing)} of {len(found)} trained parameters have no gradient"] * bool(missing)
    told += [
        f"{len(wrong)} of {len(found)} are off, by {max(wrong, default=0):.0%} at most"
    ] * bool(wrong)
    return f"**{', '.join(told)}**" if told else "right"


def _build_config(situation: Situation, schedule: str) -> Any:
    cfg = build_config(schedule, RANKS, COUNT, situation.checkpointing)
    cfg.parallel.reshard_after_forward = bool(situation.reshards)
    return cfg


def _build_rows(world: World) -> list[Batch]:
    """The micro-batches of this data rank."""
    return make_micro_batches(COUNT * world.data_ranks)[world.data_rank :: world.data_ranks]


def _freeze(model: nn.Module, situation: Situation) -> None:
    for name, parameter in model.named_parameters():
        early = "embed_tokens" in name or any(
            f"layers.{number}." in name for number in range(LAYERS // 2)
        )
        parameter.requires_grad_(not (situation.frozen and early))


def _run_ours(situation: Situation, schedule: str) -> Found:
    cfg = _build_config(situation, schedule)
    with start_world(cfg) as world:
        model = build_meta(SPEC, torch.float64)
        pipeline = split_pipeline(model, cfg, world)
        assert pipeline is not None
        _freeze(model, situation)
        apply_activation_checkpointing(model, situation.checkpointing)
        shard_model(model, cfg.parallel, cfg.memory, world)
        materialize(model, cfg.memory, world.device)
        init_weights(model, 1, SPEC)
        for batch in pipeline.train(_build_rows(world)):
            pipeline.backward(model(batch.tokens, labels=batch.labels) / 100)
        return _compare_gradients(
            {name: one.grad for name, one in model.named_parameters()}, situation, world
        )


def _run_stock(situation: Situation, schedule: str) -> Found:
    cfg = _build_config(situation, schedule)
    with start_world(cfg) as world:
        assert world.pipeline is not None
        stages, mine = (
            count_stages(cfg.parallel),
            list_rank_stages(cfg.parallel, world.pipeline.rank),
        )
        each, group = LAYERS // stages, world.mesh.get_group("pipeline")
        parts = [
            _build_stage(situation, range(stage * each, (stage + 1) * each), stage, stages, world)
            for stage in mine
        ]
        wrapped = [
            PipelineStage(part, stage, stages, world.device, group=group)
            for part, stage in zip(parts, mine, strict=True)
        ]
        run = SCHEDULE_CLASSES[schedule](
            wrapped[0] if schedule == "1f1b" else wrapped,
            n_microbatches=COUNT,
            loss_fn=_compute_loss,
            scale_grads=False,
        )
        tokens, labels = (
            torch.cat([getattr(one, what) for one in _build_rows(world)])
            for what in ("tokens", "labels")
        )
        more: dict[str, Any] = {"target": labels} if stages - 1 in mine else {}
        run.step(*([tokens] if 0 in mine else []), return_outputs=False, **more)
        found = {name: one.grad for part in parts for name, one in part.model.named_parameters()}
        return _compare_gradients(found, situation, world)


def _build_stage(
    situation: Situation, layers: range, stage: int, stages: int, world: World
) -> Part:
    """A stage as torch's runtime takes it, with values."""
    model = build_meta(SPEC, torch.float64)
    part = Part(model, layers, stage, stages)
    _freeze(model, situation)
    apply_activation_checkpointing(model, situation.checkpointing)
    model.to_empty(device="cpu")
    init_weights(model, 1, SPEC)
    if situation.reshards is not None:
        for module in [*model.model.layers.children(), part]:
            fully_shard(
                module, mesh=world.mesh["data_shard"], reshard_after_forward=situation.reshards
            )
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return part


def _compute_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 100


def _compare_gradients(
    found: dict[str, Tensor | None], situation: Situation, world: World
) -> Found:
    """Of this rank's parameters that are trained in one process."""
    alone: Decoder = build_meta(SPEC, torch.float64).to_empty(device="cpu")
    _freeze(alone, situation)
    init_weights(alone, 1, SPEC)
    for one in make_micro_batches(COUNT * world.data_ranks):
        (alone(one.tokens, labels=one.labels) / 100).backward()
    expected = {
        name: parameter.grad
        for name, parameter in alone.named_parameters()
        if parameter.grad is not None
    }
    return {
        name: _measure_error(grad, expected[name])
        for name, grad in found.items()
        if name in expected
    }


def _measure_error(found: Tensor | None, expected: Tensor) -> float | None:
    if found is None:
        return None
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    return float(torch.linalg.vector_norm(whole - expected) / torch.linalg.vector_norm(expected))


if __name__ == "__main__":
    sys.exit(main())
