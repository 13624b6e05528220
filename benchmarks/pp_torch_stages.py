"""Our full fine-tuning recipe through torch's own stages and schedules, for the planner. Used by
pp_memory.py.

The layers, the optimizer, the data and the device are ours; what runs the stages is torch's
`PipelineStage` with its schedule classes, as `benchmarks.pp_stock` has them for real processes.
Written for the stages of torch 2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, _utils
from torch.distributed.pipelining.schedules import _PipelineSchedule

from benchmarks.pp_stock import SCHEDULE_CLASSES, Part
from recipe_lib import training
from recipe_lib.cli.recipes import RecipeFile, load_module
from recipe_lib.config.mesh import compute_micro_batches, count_stages, list_rank_stages
from recipe_lib.data import StepBatches
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.models import build_meta
from recipe_lib.parallel import DTYPES, Parallel

RECIPE = "full_finetune_distributed"


def make_recipe_class(*, attached: bool = False) -> type:
    """The recipe. attached: outputs and losses keep their graphs, as before torch's #138119 and
    #138504.
    """
    full = load_module(RecipeFile.find(RECIPE).path).FullFinetune
    return type("TorchStages", (_TorchStages, full), {"attached": attached})


class _TorchStages:
    """Comes before the recipe's class. losses: of the last step, which a user holds until the next
    one.
    """

    attached: bool
    cfg: Any
    spec: Any
    world: Any
    device: torch.device
    model: Any
    losses: list[Tensor]

    def setup_model(self) -> None:
        """The stages of this rank, layers shared out evenly, and what runs them."""
        cfg, self.parallel, self.losses = self.cfg, Parallel(), []
        stages, mine = (
            count_stages(cfg.parallel),
            list_rank_stages(cfg.parallel, self.world.pipeline.rank),
        )
        each = self.spec.num_layers // stages
        self.mine, self.last = mine, stages - 1
        parts = [
            self._part(stage, range(stage * each, (stage + 1) * each), stages) for stage in mine
        ]
        self.model = nn.ModuleList(parts)
        wrapped = [
            self._stage(part, stage, stages) for part, stage in zip(parts, mine, strict=True)
        ]
        name = cfg.parallel.pipeline_schedule
        made: Any = wrapped[0] if name in ("gpipe", "1f1b") else wrapped
        count = compute_micro_batches(cfg)[1]
        self.schedule = SCHEDULE_CLASSES[name](
            made, n_microbatches=count, loss_fn=_compute_loss, scale_grads=False
        )

    def _part(self, stage: int, layers: range, stages: int) -> Part:
        model = build_meta(self.spec, DTYPES[self.cfg.dtype])
        part = Part(model, layers, stage, stages)
        apply_activation_checkpointing(model, self.cfg.memory.activation_checkpointing)
        part.to_empty(device=self.device)
        return part

    def _stage(self, part: Part, stage: int, stages: int) -> PipelineStage:
        """With the shapes given: what torch would otherwise learn by running, and by sending."""
        shape = (compute_micro_batches(self.cfg)[0], self.cfg.max_seq_len)

        def made(width: int | None) -> Tensor:
            if width is None:
                return torch.zeros(shape, dtype=torch.int64, device=self.device)
            return torch.zeros(
                *shape, width, dtype=DTYPES[self.cfg.dtype], device=self.device, requires_grad=True
            )

        given = made(None if stage == 0 else self.spec.width)
        gives = made(self.spec.vocab_size if stage == stages - 1 else self.spec.width)
        group = self.world.mesh.get_group("pipeline")
        return PipelineStage(
            part, stage, stages, self.device, input_args=given, output_args=gives, group=group
        )

    def train_step(self, batches: StepBatches) -> Any:
        """One step of torch's schedule, and the optimizer."""
        tokens, labels = (
            torch.cat([getattr(batch, what) for batch in batches.micro_batches])
            for what in ("tokens", "labels")
        )
        more: dict[str, Any] = (
            {"target": labels, "losses": self.losses} if self.last in self.mine else {}
        )
        with _hold_graphs() if self.attached else _assume_known_shapes():
            self.schedule.step(*([tokens] if 0 in self.mine else []), return_outputs=False, **more)
        self.optimizer.step()  # type: ignore[attr-defined]
        self.optimizer.zero_grad(set_to_none=True)  # type: ignore[attr-defined]
        return training.Step(torch.zeros(()), torch.zeros(()))


def _compute_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


@contextmanager
def _assume_known_shapes() -> Iterator[None]:
    """No vote among the ranks on it, which reads what has been sent: here nothing is."""

    def agreed(schedule: Any, stages: list[Any], *args: Any) -> None:
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.STATIC

    with mock.patch.object(_PipelineSchedule, "_warmup_p2p", agreed):
        yield


@contextmanager
def _hold_graphs() -> Iterator[None]:
    """The fault that #138119 and #138504 took away: what is returned is not detached from its
    graph.
    """
    with _assume_known_shapes(), mock.patch.object(torch.Tensor, "detach_", lambda tensor: tensor):
        yield
