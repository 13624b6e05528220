"""The loop around a recipe's training step: learning rate, records, when to validate and to save, how it may end."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.optim import Optimizer

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import StepBatches
from recipe_lib.errors import DivergedError, StoppedAndSaved
from recipe_lib.memory import PeakMemory, explain_out_of_memory
from recipe_lib.training.metrics import step_metrics
from recipe_lib.training.optimizers import set_learning_rate
from recipe_lib.training.run_log import RunLog
from recipe_lib.training.schedules import learning_rate
from recipe_lib.training.stop import StopSignal

if TYPE_CHECKING:
    from recipe_lib.data import DataPlan
    from recipe_lib.parallel.world import World


@dataclass
class Step:
    """What an optimizer step leaves on the device: mean loss, norm of the gradient, and numbers of the recipe's own."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


class TrainingLoop:
    """The steps of a run, one after the other; every rank goes through the same calls.

    with TrainingLoop(cfg, world, optimizer, plan, done=step) as loop:
        for batches in loop.steps(batches_of_the_run):
            loop.record(train_step(batches), batches)
            loop.validate_if_due(validate)
            loop.save_if_due(save_state)

    step: optimizer steps done. Out of memory inside the block becomes one line with the levers that are left.
    """

    def __init__(
        self, cfg: FullFinetuneConfig, world: "World", optimizer: Optimizer, plan: "DataPlan", *, done: int
    ) -> None:
        """plan: which rows a step takes. done: steps that an earlier process has trained."""
        self.step = done
        self.total_steps = plan.total_steps(cfg.epochs, cfg.max_steps)
        self._cfg, self._world, self._optimizer, self._plan = cfg, world, optimizer, plan
        self._peak = PeakMemory(world.device)
        self._began = 0.0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(explain_out_of_memory("training", self._cfg, self._peak))
            self._log = stack.enter_context(RunLog(self._cfg, self._world, self.total_steps, done=self.step))
            self._stop = stack.enter_context(StopSignal())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        if exception[0] is None:
            self._log.close("done")
        return self._stack.__exit__(*exception)

    def steps(self, batches: Iterable[StepBatches]) -> Iterator[StepBatches]:
        """The batches of the steps that are left, each when its learning rate is set; `record` ends a step."""
        source = iter(batches)
        while self.step < self.total_steps:
            self._began = time.perf_counter()
            self._peak.reset()
            self._lr = learning_rate(self._cfg.lr_schedule, self._cfg.optimizer.lr, self.step, self.total_steps)
            set_learning_rate(self._optimizer, self._lr)
            yield next(source)

    def record(self, step: Step, batches: StepBatches) -> None:
        """Waits for the step, writes its line, and raises DivergedError if its numbers are not finite."""
        loss, grad_norm = step.loss.item(), step.grad_norm.item()  # the one place that waits for the device
        self.step += 1
        line = step_metrics(
            step=self.step,
            epoch=self._epochs_done(),
            loss=loss,
            grad_norm=grad_norm,
            lr=self._lr,
            seconds=time.perf_counter() - self._began,
            trained_tokens=batches.trained_tokens,
            total_tokens=batches.total_tokens,
            devices=self._world.size,
            peak=self._peak.read(),
        )
        self._log.step(line | {name: value.item() for name, value in step.metrics.items()})
        if not (abs(loss) < float("inf") and abs(grad_norm) < float("inf")):
            self._log.close("diverged")
            raise DivergedError(
                f"step {self.step}: found loss {loss} and grad_norm {grad_norm}, expected finite numbers; lower "
                f"optimizer.lr ({self._cfg.optimizer.lr:g}) or clip_grad_norm, and resume=latest from a saved state"
            )

    def _epochs_done(self) -> float:
        epoch, steps = self._plan.locate(self.step)
        return epoch + steps / self._plan.steps(epoch)

    def validate_if_due(self, validate: Callable[[], Mapping[str, float]]) -> None:
        """Calls it and writes its numbers at each `validation.every_steps`-th step, else at the end of each epoch, and
        after the last step."""
        if self._cfg.validation.source is None:
            return
        every = self._cfg.validation.every_steps
        due = self.step % every == 0 if every else self._plan.locate(self.step)[1] == 0
        if due or self.step == self.total_steps:
            self._log.validation({"step": self.step} | dict(validate()))

    def save_if_due(self, save: Callable[[int], Path]) -> None:
        """Calls it with the step at each `checkpoint.save_every_steps`-th, after the last, and once any rank was told
        to stop; then it raises StoppedAndSaved."""
        stopped = self._stop.agreed(self._world)
        every = self._cfg.checkpoint.save_every_steps
        due = every is not None and (self.step % every == 0 or self.step == self.total_steps)
        if due or stopped:
            path = save(self.step)
        if stopped:
            self._log.close("stopped")
            raise StoppedAndSaved(f"stopped after step {self.step}; go on with resume=latest ({path})")
