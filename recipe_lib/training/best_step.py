"""Which step of a run is best by a number of its validations, its weights, and when there has been
no better one for long enough.

`checkpoint.keep_best` keeps the weights of the best step in output_dir/state/best/step_N and puts
them back into the model when the steps are done, so that they are what is exported.
`validation.patience` ends the steps. What both count is part of each saved state: a run that was
killed and goes on has the same best step, and ends at the same one.
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

_LOWER = ("loss", "perplexity", "error")  # at the end of a name: less is better
_COUNTS = ("_tokens", "_pairs")  # how much was measured


class BestStep:
    """The best step so far by `checkpoint.best_metric`, on all ranks alike.

    step, value: None before the first finite number. waited: validations since the number was last
    better, by more than validation.min_delta, than when it was so before. folder: of the best
    step's weights, in output_dir/state/best; None where none are kept. last: the step that the run
    has come to, when it has no more.
    """

    def __init__(self, cfg: FullFinetuneConfig) -> None:
        self.metric, self._patience = cfg.checkpoint.best_metric, cfg.validation.patience
        chosen = cfg.checkpoint.greater_is_better
        self.greater = not self.metric.endswith(_LOWER) if chosen is None else chosen
        self.keeps, self._min_delta = cfg.checkpoint.keep_best, cfg.validation.min_delta
        self._exports = cfg.checkpoint.save_model
        self._root = Path(cfg.output_dir) / STATE_FOLDER
        self.step: int | None = None
        self.value: float | None = None
        self.waited = 0
        self.last: int | None = None
        self.folder: str | None = None
        self._reference: float | None = (
            None  # what a number has to be better than for `waited` to begin again
        )

    @property
    def is_asked_for(self) -> bool:
        """Whether the config has a use for it."""
        return self.keeps or self._patience is not None

    @property
    def is_waited_out(self) -> bool:
        """Whether the run ends here, before its last step."""
        return self._patience is not None and self.waited >= self._patience

    @property
    def exported_step(self) -> int | None:
        """The step whose weights are exported; None: the run's last."""
        return self.step if self.folder is not None else None

    def judge(self, step: int, numbers: Mapping[str, float], world: World) -> bool:
        """Count a validation after `step`; return True if it is the best so far. Rank 0's number
        counts. Collective.

        A number that is not finite is never better. ConfigError if the validation does not give
        best_metric.
        """
        if self.metric not in numbers:
            names = [name for name in numbers if not name.endswith(_COUNTS)]
            raise ConfigError(
                f"checkpoint.best_metric: found {self.metric}, expected a number of the recipe's"
                f" validation: {', '.join(names)}{did_you_mean(self.metric, names)}"
            )
        found = float(world.broadcast_json(float(numbers[self.metric])))
        if self._is_better(found, self._reference, self._min_delta):
            self._reference, self.waited = found, 0
        else:
            self.waited += 1
        if not self._is_better(found, self.value):
            return False
        self.step, self.value = step, found
        return True

    def _is_better(self, found: float, than: float | None, by: float = 0.0) -> bool:
        if not math.isfinite(found):
            return False
        return than is None or (found > than + by if self.greater else found < than - by)

    def record(self) -> dict[str, Any] | None:
        """Return what a saved state keeps of it; None if the config has no use for it."""
        if not self.is_asked_for:
            return None
        return {
            "metric": self.metric,
            "greater_is_better": self.greater,
            "step": self.step,
            "value": self.value,
            "waited": self.waited,
            "reference": self._reference,
            "folder": self.folder,
        }

    def restore(self, saved: Mapping[str, Any], state: Path, world: World) -> None:
        """Go on from what a state has. A best step that is later than the state is forgotten with
        it. Collective.

        saved: what the run added to the state. Raises CheckpointError if it was another number that
        decided, or if the weights of the best step are gone.
        """
        if not self.is_asked_for:
            return
        record = saved.get(BEST_RECORD)
        if record is None:
            return
        for key, was, now in (
            ("best_metric", record["metric"], self.metric),
            ("greater_is_better", record["greater_is_better"], self.greater),
        ):
            if was != now:
                raise CheckpointError(
                    f"{state}: was saved with checkpoint.{key}={_text(was)}, found {_text(now)};"
                    " what was best until then was decided by it: set"
                    f" checkpoint.{key}={_text(was)}"
                )
        self.waited, self._reference = record["waited"], record["reference"]
        if not self.keeps:
            self.step, self.value = record["step"], record["value"]
        elif record["folder"] is not None:
            self.step, self.value = record["step"], record["value"]
            self.folder = run_on_rank_0(
                world, lambda: copy_best_state(state, self._root, record["folder"])
            )
            run_on_rank_0(world, lambda: prune_best(self._root, self.folder))

    def keep(self, step: int, model: nn.Module, world: World) -> None:
        """Save the weights of this best step, and then remove those of others that no state needs.
        Collective.
        """
        root = self._root / BEST_FOLDER
        extra = {"step": step, "metric": self.metric, "value": self.value}
        path = save_state(root, step, model, None, extra, world, None)
        self.folder = path.name
        self.remove_others(world)

    def remove_others(self, world: World) -> None:
        """Remove the weights of best steps that neither this run nor any of its states needs.
        Collective.
        """
        if self.keeps:
            run_on_rank_0(world, lambda: prune_best(self._root, self.folder))

    def load(self, model: nn.Module, last: int, total_steps: int, world: World) -> None:
        """Put the weights of the best step into the model, which is at the step `last`, when the
        steps are done. Collective.
        """
        if not self.is_asked_for:
            return
        self.last = last
        get_logger().info("%s", self.sentence(total_steps))
        if self.folder is None or self.step == last:
            return
        path = self._root / BEST_FOLDER / self.folder
        with phase("loading the best step"):
            damage = verify_state(path, world)
            if damage:
                raise CheckpointError(
                    f"{path}: holds the weights of the best step: {damage}; to export the last step"
                    " in its place, resume=latest checkpoint.keep_best=false"
                )
            load_state(path, model, None, world)

    def sentence(self, total_steps: int) -> str | None:
        """`best step 40 of 60: validation_loss 1.2340`, and whether the run stopped early; None if
        the config has no use for it. total_steps: that the run was to have.
        """
        if not self.is_asked_for:
            return None
        value = "" if self.value is None else f"{self.metric} {self.value:.4f}"
        early = ""
        if self.is_waited_out and self.last is not None and self.last < total_steps:
            many = "s" if self._patience != 1 else ""
            early = (
                f"; stopped early (of {total_steps} steps) after {self.waited} validation{many}"
                " without improvement"
            )
        last = total_steps if self.last is None else self.last
        if self.folder is not None:
            return f"best step {self.step} of {last}: {value}{early}"
        why = (
            f"the best was step {self.step}: {value}"
            if value
            else f"no validation gave a finite {self.metric}"
        )
        return f"last step {last}; {why}{early}"

    def facts(self, total_steps: int) -> dict[str, Any]:
        """For the summary; empty if the config has no use for it."""
        if not self.is_asked_for:
            return {}
        found = {"best_metric": self.metric, "best_step": self.step, "best_value": self.value}
        if self.folder is not None:
            found["best_weights"] = f"{STATE_FOLDER}/{BEST_FOLDER}/{self.folder}"
        if self._exports:
            found["exported_step"] = self.exported_step or self.last
        return found | {"outcome": self.sentence(total_steps)}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe_best(cfg: FullFinetuneConfig) -> list[str]:
    """Return a line for the log: by which number the best step is found, and what follows from it."""
    best = BestStep(cfg)
    if not best.is_asked_for:
        return []
    parts = [f"best step: by {best.metric}, {'higher' if best.greater else 'lower'} is better"]
    if best.keeps:
        parts.append("its weights are kept and exported")
    if cfg.validation.patience is not None:
        by = f" by more than {cfg.validation.min_delta:g}" if cfg.validation.min_delta else ""
        parts.append(
            f"the run stops after {pluralize(cfg.validation.patience, 'validation')} without"
            f" improvement{by}; the learning rate is scheduled over all steps all the same"
        )
    return ["; ".join(parts)]
