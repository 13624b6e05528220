"""Track the best step of a run by a number of its validations, keep its weights, and stop early.

`TrainingLoop` calls `BestStep.judge` after each validation. `checkpoint.keep_best` keeps the
weights of the best step in output_dir/state/best/step_N and loads them into the model after the
last step, to be exported. `validation.patience` ends the run early. Each saved state (a folder to
resume from) records both, so that a resumed run has the same best step and ends at the same step.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from recipe_lib.checkpoint.rank_groups import run_on_rank_0
from recipe_lib.checkpoint.resumable_state import load_state, save_state, verify_state
from recipe_lib.checkpoint.run_files import BEST_RECORD, copy_best_state, prune_best
from recipe_lib.config.local_files import BEST_FOLDER, STATE_FOLDER
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.config.suggest import did_you_mean
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.logs import get_logger
from recipe_lib.parallel.world import World
from recipe_lib.report.phases import phase
from recipe_lib.units import pluralize

# Ends of the names of metrics of which less is better
_LOWER = ("loss", "perplexity", "error", "divergence", "cross_entropy", "_kl", "_rejected")
# Ends of the names of counts, by which no step is better
_COUNTS = ("_tokens", "_pairs", "_samples", "_sequences")


class BestStep:
    """The best step so far by `checkpoint.best_metric`; every rank has the same."""

    def __init__(self, cfg: FullFinetuneConfig) -> None:
        self.metric = cfg.checkpoint.best_metric  # name of a validation's number
        self.greater_is_better = (
            not self.metric.endswith(_LOWER)
            if cfg.checkpoint.greater_is_better is None
            else cfg.checkpoint.greater_is_better
        )
        self.keeps_weights = cfg.checkpoint.keep_best
        self._exports = cfg.checkpoint.save_model  # True: the run ends with an export
        self._patience = cfg.validation.patience  # validations without improvement; None: no limit
        self._min_delta = cfg.validation.min_delta  # a smaller gain is no improvement
        self._root = Path(cfg.output_dir) / STATE_FOLDER
        # The best step (number of steps done) and its metric; None before the first finite value
        self.step: int | None = None
        self.value: float | None = None
        # Validations since the metric last improved by more than validation.min_delta
        self.num_waited = 0
        # The metric at that improvement. The next is compared with it and not with the best value,
        # so that small gains add up
        self._reference: float | None = None
        # The run's last step; None while it trains
        self.last_step: int | None = None
        # Name of the best step's folder in output_dir/state/best; None if no weights are kept
        self.folder: str | None = None

    @property
    def is_asked_for(self) -> bool:
        return self.keeps_weights or self._patience is not None

    @property
    def is_waited_out(self) -> bool:
        """Return True if `validation.patience` ends the run after this step."""
        return self._patience is not None and self.num_waited >= self._patience

    @property
    def exported_step(self) -> int | None:
        """Return the step whose weights are exported; None: the run's last step."""
        return self.step if self.folder is not None else None

    def judge(self, step: int, numbers: Mapping[str, float], world: World) -> bool:
        """Count a validation after `step`; return True if it is the best so far. Collective.

        numbers: of the validation, by name. A metric that is not finite is never better. Raise
        ConfigError if best_metric is not among the numbers.
        """
        if self.metric not in numbers:
            names = [name for name in numbers if not name.endswith(_COUNTS)]
            raise ConfigError(
                f"checkpoint.best_metric: found {self.metric}, expected a number of the recipe's"
                f" validation: {', '.join(names)}{did_you_mean(self.metric, names)}"
            )
        # Ranks must decide alike, though rounding may differ between them: rank 0's number counts.
        value = float(world.broadcast_json(float(numbers[self.metric])))
        if self._is_better(value, self._reference, self._min_delta):
            self._reference = value
            self.num_waited = 0
        else:
            self.num_waited += 1
        if not self._is_better(value, self.value):
            return False
        self.step = step
        self.value = value
        return True

    def _is_better(self, value: float, reference: float | None, delta: float = 0.0) -> bool:
        """Return True if a value is finite and better than the reference by more than `delta`.

        reference: None: any finite value is better.
        """
        if not math.isfinite(value):
            return False
        if reference is None:
            return True
        return value > reference + delta if self.greater_is_better else value < reference - delta

    def make_record(self) -> dict[str, Any] | None:
        """Return the record that a saved state keeps; None if no best step is asked for."""
        if not self.is_asked_for:
            return None
        return {
            "metric": self.metric,
            "greater_is_better": self.greater_is_better,
            "step": self.step,
            "value": self.value,
            "waited": self.num_waited,
            "reference": self._reference,
            "folder": self.folder,
        }

    def restore(self, saved: Mapping[str, Any], state: Path, world: World) -> None:
        """Restore the best step that a saved state records. Collective.

        A best step that was found after that state is forgotten. saved: what `TrainingLoop` gave
        the state as `extra`. state: its folder. Raise CheckpointError if best_metric or its
        direction has changed, or if the weights of the best step are gone.
        """
        record = saved.get(BEST_RECORD)
        if not self.is_asked_for or record is None:
            return
        for key, was, now in (
            ("best_metric", record["metric"], self.metric),
            ("greater_is_better", record["greater_is_better"], self.greater_is_better),
        ):
            if was != now:
                raise CheckpointError(
                    f"{state}: was saved with checkpoint.{key}={_format_setting(was)}, found"
                    f" {_format_setting(now)}; what was best until then was decided by it: set"
                    f" checkpoint.{key}={_format_setting(was)}"
                )
        self.num_waited = record["waited"]
        self._reference = record["reference"]
        # The state's run kept no weights, so that its best step could not be exported: the search
        # for the best step begins anew.
        if self.keeps_weights and record["folder"] is None:
            return
        self.step = record["step"]
        self.value = record["value"]
        if self.keeps_weights:
            self.folder = run_on_rank_0(
                world, lambda: copy_best_state(state, self._root, record["folder"])
            )
            self.prune(world)

    def save_weights(self, step: int, model: nn.Module, world: World) -> None:
        """Save the weights of this best step, then `prune`. Collective."""
        extra = {"step": step, "metric": self.metric, "value": self.value}
        path = save_state(
            self._root / BEST_FOLDER,
            step,
            model,
            optimizer=None,
            extra=extra,
            world=world,
            keep=None,
        )
        self.folder = path.name
        self.prune(world)

    def prune(self, world: World) -> None:
        """Remove weights of best steps that no saved state of the run needs. Collective."""
        if self.keeps_weights:
            run_on_rank_0(world, lambda: prune_best(self._root, self.folder))

    def load(self, model: nn.Module, last_step: int, total_steps: int, world: World) -> None:
        """Load the weights of the best step into the model after the last step. Collective.

        last_step: the step that the model is at. total_steps: of the run by its config. Raise
        CheckpointError if the weights are damaged.
        """
        if not self.is_asked_for:
            return
        self.last_step = last_step
        get_logger().info("%s", self.describe_outcome(total_steps))
        if self.folder is None or self.step == last_step:
            return
        path = self._root / BEST_FOLDER / self.folder
        with phase("loading the best step"):
            damage = verify_state(path, world)
            if damage:
                raise CheckpointError(
                    f"{path}: holds the weights of the best step: {damage}; to export the last step"
                    " in its place, resume=latest checkpoint.keep_best=false"
                )
            load_state(path, model=model, optimizer=None, world=world)

    def describe_outcome(self, total_steps: int) -> str | None:
        """Return `best step 40 of 60: validation_loss 1.2340`, and whether the run stopped early.

        None if no best step is asked for. total_steps: of the run by its config.
        """
        if not self.is_asked_for:
            return None
        value = "" if self.value is None else f"{self.metric} {self.value:.4f}"
        last_step = total_steps if self.last_step is None else self.last_step
        early = ""
        if self.is_waited_out and last_step < total_steps:
            waited = pluralize(self.num_waited, "validation")
            early = f"; stopped early (of {total_steps} steps) after {waited} without improvement"
        if self.folder is not None:
            return f"best step {self.step} of {last_step}: {value}{early}"
        if value:
            return f"last step {last_step}; the best was step {self.step}: {value}{early}"
        return f"last step {last_step}; no validation gave a finite {self.metric}{early}"

    def list_facts(self, total_steps: int) -> dict[str, Any]:
        """Return key -> value for summary.json, on the best step; empty if none is asked for.

        total_steps: of the run by its config.
        """
        if not self.is_asked_for:
            return {}
        facts = {"best_metric": self.metric, "best_step": self.step, "best_value": self.value}
        if self.folder is not None:
            facts["best_weights"] = f"{STATE_FOLDER}/{BEST_FOLDER}/{self.folder}"
        if self._exports:
            facts["exported_step"] = self.exported_step or self.last_step
        return facts | {"outcome": self.describe_outcome(total_steps)}


def _format_setting(value: Any) -> str:
    """Return a value as it is written on the command line: `true`, not `True`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe_best(cfg: FullFinetuneConfig) -> list[str]:
    """Return a log line on the best step's metric and what it decides, in a list.

    The list is empty if no best step is asked for.
    """
    best = BestStep(cfg)
    if not best.is_asked_for:
        return []
    better = "higher" if best.greater_is_better else "lower"
    parts = [f"best step: by {best.metric}, {better} is better"]
    if best.keeps_weights:
        parts.append("its weights are kept and exported")
    if cfg.validation.patience is not None:
        margin = f" by more than {cfg.validation.min_delta:g}" if cfg.validation.min_delta else ""
        parts.append(
            f"the run stops after {pluralize(cfg.validation.patience, 'validation')} without"
            f" improvement{margin}; the learning rate is scheduled over all steps all the same"
        )
    return ["; ".join(parts)]
