"""Trackers: tensorboard, wandb and trackio with one small protocol; each an extra, imported when asked for."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from recipe_lib.config.local_files import no_tracker
from recipe_lib.config.registry import register, registered
from recipe_lib.config.schema import LogConfig
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.redaction import redact_values

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World


class Tracker(Protocol):
    """Where metrics go besides metrics.jsonl."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the numbers of one step."""

    def close(self) -> None:
        """Sends what is left and ends the run at the tracker."""


Builder = Callable[[str, str, Path, Mapping[str, Any]], Tracker]


class Trackers:
    """All trackers of a run as one; on ranks other than the main one there are none and nothing happens."""

    def __init__(self, cfg: LogConfig, output_dir: Path, settings: Mapping[str, Any], world: "World") -> None:
        """Opens the trackers named in `cfg.trackers`, on the main rank.

        output_dir: trackers that write files do so in `output_dir/trackers`. settings: the resolved config.
        ConfigError, on the main rank, with the pip command when a package is missing; call it inside `world.agree`.
        """
        run_name = cfg.run_name if cfg.run_name is not None else Path(output_dir).name
        folder = Path(output_dir) / "trackers"
        self._trackers: list[Tracker] = []
        for name in cfg.trackers if world.is_main else ():
            build: Builder = registered("log.trackers", name)
            self._trackers.append(build(cfg.project, run_name, folder, redact_values(settings)))

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Hands the numbers of a metrics line to every tracker; text, null and the step itself are left out."""
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for tracker in self._trackers:
            tracker.log(numbers, step)

    def close(self) -> None:
        """Closes every tracker."""
        for tracker in self._trackers:
            tracker.close()


@register("log.trackers", "tensorboard")
class TensorBoard:
    """Event files in `output_dir/trackers/tensorboard`, written by torch's own SummaryWriter."""

    def __init__(self, project: str, run_name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        _require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder / "tensorboard"))
        self._writer.add_text("settings", "\n".join(f"    {key}: {value}" for key, value in settings.items()))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()


@register("log.trackers", "wandb")
class WandB:
    """A run at Weights & Biases; its local files are in `output_dir/trackers`."""

    def __init__(self, project: str, run_name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        wandb = _require("wandb")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(project=project, name=run_name, dir=str(folder), config=dict(settings))
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise SetupError(
                f"log.trackers: wandb refused to start ({reason}); run `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


@register("log.trackers", "trackio")
class Trackio:
    """A run in trackio's local database (TRACKIO_DIR, by default in the Hugging Face cache)."""

    def __init__(self, project: str, run_name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self._trackio = _require("trackio")
        self._trackio.init(project=project, name=run_name, config=dict(settings))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._trackio.finish()


def _require(package: str) -> ModuleType:
    """The imported package, or one line that says how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(no_tracker(package, str(error))) from error
