"""Run our full fine-tuning recipe with torch's own pipeline, for the planner.

`pp_7b.py` plans the class that `make_recipe_class` returns. Layers, optimizer, data and the
simulated device are ours; torch's `PipelineStage` and schedule classes run the stages. Written for
those of torch 2.13, of which private parts are patched.
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

from benchmarks.pp_stock import SCHEDULE_CLASSES, StockStage
from recipe_lib import training
from recipe_lib.cli.recipes import RecipeFile, load_module
from recipe_lib.config.mesh import compute_micro_batches, count_stages, list_rank_stages
from recipe_lib.data import StepBatches
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.models import build_meta
from recipe_lib.parallel import DTYPES, Parallel

RECIPE = "full_finetune_distributed"


def make_recipe_class(*, attached: bool = False) -> type:
    """Return the recipe's class with torch's pipeline in place of ours.

    attached: outputs and losses keep their graphs, as before torch's #138119 and #138504.
    """
    full = load_module(RecipeFile.find(RECIPE).path).FullFinetune
    return type("TorchStages", (_TorchStages, full), {"attached": attached})


class _TorchStages:
    """The replaced methods of the recipe, a base before the recipe's own class."""

    attached: bool  # outputs and losses keep their graphs
    # The recipe's own attributes, but for `losses`.
    cfg: Any
    spec: Any
    world: Any
    device: torch.device
    model: Any
    losses: list[Tensor]  # of the last step; a training loop that logs them holds them so

    def setup_model(self) -> None:
        """Build the stages of this rank, layers shared out evenly, and the schedule."""
        cfg = self.cfg
        self.parallel = Parallel()  # ours does nothing here: torch's schedule runs the stages
        self.losses = []
        num_stages = count_stages(cfg.parallel)
        self.rank_stages = list_rank_stages(cfg.parallel, self.world.pipeline.rank)
        self.last_stage = num_stages - 1
        modules = [self._build_module(stage, num_stages) for stage in self.rank_stages]
        self.model = nn.ModuleList(modules)
        stages = [
            self._build_stage(module, stage, num_stages)
            for module, stage in zip(modules, self.rank_stages, strict=True)
        ]
        name = cfg.parallel.pipeline_schedule
        self.schedule = SCHEDULE_CLASSES[name](
            stages[0] if name in ("gpipe", "1f1b") else stages,
            n_microbatches=compute_micro_batches(cfg)[1],
            loss_fn=_compute_loss,
            scale_grads=False,
        )

    def _build_module(self, stage: int, num_stages: int) -> StockStage:
        """Return a stage's layers, checkpointed by the config, in the simulated device's memory."""
        stage_layers = self.spec.num_layers // num_stages
        layers = range(stage * stage_layers, (stage + 1) * stage_layers)
        model = build_meta(self.spec, DTYPES[self.cfg.dtype])
        module = StockStage(model, layers=layers, stage=stage, stages=num_stages)
        apply_activation_checkpointing(model, self.cfg.memory.activation_checkpointing)
        module.to_empty(device=self.device)
        return module

    def _build_stage(self, module: StockStage, stage: int, num_stages: int) -> PipelineStage:
        """Return the stage with its shapes, which torch would otherwise learn by running."""
        shape = (compute_micro_batches(self.cfg)[0], self.cfg.max_seq_len)

        def make_boundary(width: int | None) -> Tensor:
            """Return an example of a micro-batch: `[b, s, width]`; tokens `[b, s]` for None."""
            if width is None:
                return torch.zeros(shape, dtype=torch.int64, device=self.device)
            return torch.zeros(
                *shape, width, dtype=DTYPES[self.cfg.dtype], device=self.device, requires_grad=True
            )

        return PipelineStage(
            module,
            stage_index=stage,
            num_stages=num_stages,
            device=self.device,
            input_args=make_boundary(None if stage == 0 else self.spec.width),
            output_args=make_boundary(
                self.spec.vocab_size if stage == num_stages - 1 else self.spec.width
            ),
            group=self.world.mesh.get_group("pipeline"),
        )

    def train_step(self, batches: StepBatches) -> Any:
        """Run one step of torch's schedule, and the optimizer."""
        # torch's schedule takes the whole batch and splits it; the first stage has the tokens, the
        # last the labels.
        tokens = torch.cat([batch.tokens for batch in batches.micro_batches])
        labels = torch.cat([batch.labels for batch in batches.micro_batches])
        inputs = [tokens] if 0 in self.rank_stages else []
        targets: dict[str, Any] = {}
        if self.last_stage in self.rank_stages:
            targets = {"target": labels, "losses": self.losses}  # torch empties and fills the list
        with _hold_graphs() if self.attached else _assume_known_shapes():
            self.schedule.step(*inputs, return_outputs=False, **targets)
        self.optimizer.step()  # type: ignore[attr-defined]
        self.optimizer.zero_grad(set_to_none=True)  # type: ignore[attr-defined]
        return training.Step(torch.zeros(()), torch.zeros(()))  # nobody reads loss and norm here


def _compute_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed loss of a micro-batch, from fp32 logits."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


@contextmanager
def _assume_known_shapes() -> Iterator[None]:
    """Skip torch's agreement of the ranks on how shapes are learned.

    It reads what another rank has sent, and the simulated ranks send nothing. All shapes are given,
    which is `STATIC`.
    """

    def set_known_shapes(schedule: Any, stages: list[Any], *args: Any) -> None:
        """Stand in for `_PipelineSchedule._warmup_p2p`."""
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.STATIC

    with mock.patch.object(_PipelineSchedule, "_warmup_p2p", set_known_shapes):
        yield


@contextmanager
def _hold_graphs() -> Iterator[None]:
    """Plant back what #138119 and #138504 took away, by making `Tensor.detach_` do nothing.

    Torch's schedules detach outputs and losses from their graphs with it.
    """
    with _assume_known_shapes(), mock.patch.object(torch.Tensor, "detach_", lambda tensor: tensor):
        yield
