"""Check the gradients of pipelines, ours and torch's, with frozen, sharded, checkpointed layers.

    python benchmarks/pp_gradients.py --output docs/measurements/pp_gradients.md

A small decoder in float64 goes through pipelines of gloo processes on the CPU, once by ours and
once by torch's PipelineStage and schedule classes. Every gradient is compared with one process's.
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
sys.path.insert(0, str(REPOSITORY))  # for imports of `benchmarks` and `tests`, run as a file

from benchmarks.pp_stock import SCHEDULE_CLASSES, StockStage  # noqa: E402
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

LAYERS = 4
COUNT = 4  # micro-batches of a step
RANKS = 2  # places in the pipeline; with FSDP each of them has two ranks
TOLERANCE = 1e-6  # of a gradient's own size
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
    """A case of the table: how the layers are trained."""

    name: str  # in the table
    frozen: bool = False  # the embedding and the first half of the layers
    reshards: bool | None = None  # does FSDP free gathered parameters after forward? None: no FSDP
    checkpointing: str = "none"  # the value of memory.activation_checkpointing


SITUATIONS = (
    Situation("plain"),
    Situation("early layers frozen", frozen=True),
    Situation("FSDP, gathered parameters kept", reshards=False),
    Situation("FSDP, freed after forward (its default)", reshards=True),
    Situation("full checkpointing", checkpointing="full"),
    Situation("selective checkpointing", checkpointing="selective"),
)
SCHEDULES = [name for name in SCHEDULE_CLASSES if name != "gpipe"]
# By parameter, the distance of its gradient to the expected one over the expected one's norm; None:
# there is no gradient.
GradientErrors = dict[str, float | None]


def main() -> int:
    """Print the table, and write the page; return 1 if a gradient of ours is not right."""
    parser = argparse.ArgumentParser(
        description="Check the gradients of pipelines, ours and torch's, against one process."
    )
    parser.add_argument("--output", type=Path, help="the page")
    output = parser.parse_args().output
    rows = []
    all_right = True
    for situation in SITUATIONS:
        for schedule in SCHEDULES:
            cells = [judge_run(run, situation, schedule) for run in (_run_ours, _run_stock)]
            all_right &= cells[0] == "right"
            rows.append(f"| {situation.name} | `{schedule}` | {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    if output is not None:
        text = PAGE.format(
            rows="\n".join(rows),
            layers=LAYERS,
            count=COUNT,
            ranks=RANKS,
            torch=torch.__version__,
            tolerance=TOLERANCE,
        )
        output.write_text(text)
    return 0 if all_right else 1


def judge_run(run: Any, situation: Situation, schedule: str) -> str:
    """Run the ranks of a case; return its cell: `right`, what is wrong, or the error it raises.

    run: what each rank calls, `_run_ours` or `_run_stock`.
    """
    ranks = RANKS if situation.reshards is None else 2 * RANKS
    try:
        # Each rank returns the errors of its stages' parameters.
        errors: GradientErrors = functools.reduce(
            dict.__or__, run_ranks(run, ranks, situation, schedule, timeout=120)
        )
    except RankFailure as failure:
        error_line = next(line for line in str(failure).splitlines() if "Error: " in line)
        return f"raises: {error_line.partition(': ')[2]}"
    num_missing = sum(error is None for error in errors.values())
    wrong = [error for error in errors.values() if error is not None and error > TOLERANCE]
    faults = []
    if num_missing:
        faults.append(f"{num_missing} of {len(errors)} trained parameters have no gradient")
    if wrong:
        faults.append(f"{len(wrong)} of {len(errors)} are off, by {max(wrong):.0%} at most")
    return f"**{', '.join(faults)}**" if faults else "right"


def _build_config(situation: Situation, schedule: str) -> Any:
    """Return the config of a case."""
    cfg = build_config(schedule, ranks=RANKS, count=COUNT, checkpointing=situation.checkpointing)
    cfg.parallel.reshard_after_forward = bool(situation.reshards)
    return cfg


def _build_rows(world: World) -> list[Batch]:
    """Return the micro-batches of this data rank."""
    return make_micro_batches(COUNT * world.data_ranks)[world.data_rank :: world.data_ranks]


def _freeze(model: nn.Module, situation: Situation) -> None:
    """Freeze the embedding and the first half of the layers where the situation says so."""
    for name, parameter in model.named_parameters():
        early = "embed_tokens" in name or any(
            f"layers.{number}." in name for number in range(LAYERS // 2)
        )
        parameter.requires_grad_(not (situation.frozen and early))


def _run_ours(situation: Situation, schedule: str) -> GradientErrors:
    """Run one step of our pipeline on this rank, and compare its gradients."""
    cfg = _build_config(situation, schedule)
    with start_world(cfg) as world:
        model = build_meta(SPEC, torch.float64)
        pipeline = split_pipeline(model, cfg, world)
        assert pipeline is not None
        _freeze(model, situation)
        apply_activation_checkpointing(model, situation.checkpointing)
        shard_model(model, parallel=cfg.parallel, memory=cfg.memory, world=world)
        materialize(model, cfg.memory, world.device)
        init_weights(model, 1, SPEC)
        for batch in pipeline.train(_build_rows(world)):
            pipeline.backward(model(batch.tokens, labels=batch.labels) / 100)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return _compare_gradients(gradients, situation, world)


def _run_stock(situation: Situation, schedule: str) -> GradientErrors:
    """Run one step of torch's pipeline on this rank, and compare its gradients."""
    cfg = _build_config(situation, schedule)
    with start_world(cfg) as world:
        assert world.pipeline is not None
        num_stages = count_stages(cfg.parallel)
        rank_stages = list_rank_stages(cfg.parallel, world.pipeline.rank)
        group = world.mesh.get_group("pipeline")
        modules = []
        stages = []
        for stage in rank_stages:
            module = _build_stage(situation, stage=stage, num_stages=num_stages, world=world)
            modules.append(module)
            stages.append(
                PipelineStage(
                    module,
                    stage_index=stage,
                    num_stages=num_stages,
                    device=world.device,
                    group=group,
                )
            )
        runtime = SCHEDULE_CLASSES[schedule](
            stages[0] if schedule == "1f1b" else stages,  # 1F1B's class takes one stage
            n_microbatches=COUNT,
            loss_fn=_compute_loss,
            scale_grads=False,
        )
        batches = _build_rows(world)
        # torch's schedule takes the whole batch and splits it; the first stage has the tokens, the
        # last the labels.
        inputs = [torch.cat([batch.tokens for batch in batches])] if 0 in rank_stages else []
        targets: dict[str, Any] = {}
        if num_stages - 1 in rank_stages:
            targets["target"] = torch.cat([batch.labels for batch in batches])
        runtime.step(*inputs, return_outputs=False, **targets)
        gradients: dict[str, Tensor | None] = {}
        for module in modules:
            for name, parameter in module.model.named_parameters():
                gradients[name] = parameter.grad
        return _compare_gradients(gradients, situation, world)


def _build_stage(situation: Situation, stage: int, num_stages: int, world: World) -> StockStage:
    """Return a stage as torch's runtime takes it, with the weights of the whole model's init."""
    stage_layers = LAYERS // num_stages
    layers = range(stage * stage_layers, (stage + 1) * stage_layers)
    model = build_meta(SPEC, torch.float64)
    part = StockStage(model, layers=layers, stage=stage, stages=num_stages)
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
            # The loss is a sum; FSDP would average gradients over its ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return part


def _compute_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed loss of a micro-batch over 100, as `_run_ours` takes it."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 100


def _compare_gradients(
    gradients: dict[str, Tensor | None], situation: Situation, world: World
) -> GradientErrors:
    """Compare a rank's gradients with those of one process, which has no pipeline.

    gradients: by parameter; of frozen ones they are not compared.
    """
    reference: Decoder = build_meta(SPEC, torch.float64).to_empty(device="cpu")
    _freeze(reference, situation)
    init_weights(reference, 1, SPEC)
    for batch in make_micro_batches(COUNT * world.data_ranks):
        (reference(batch.tokens, labels=batch.labels) / 100).backward()
    expected = {
        name: parameter.grad
        for name, parameter in reference.named_parameters()
        if parameter.grad is not None
    }
    return {
        name: _measure_error(gradient, expected[name])
        for name, gradient in gradients.items()
        if name in expected
    }


def _measure_error(gradient: Tensor | None, expected: Tensor) -> float | None:
    """Return the distance of two gradients over the expected one's norm; None without one."""
    if gradient is None:
        return None
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return float(torch.linalg.vector_norm(full - expected) / torch.linalg.vector_norm(expected))


if __name__ == "__main__":
    sys.exit(main())
