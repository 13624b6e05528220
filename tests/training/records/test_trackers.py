"""Trackers: what reaches each library, who logs, and the line when one is missing."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe_lib.config.schema import FullFinetuneConfig, LogConfig
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.training.run_log import RunLog

MAIN, OTHER = (
    SimpleNamespace(is_main=main, size=1, raise_together=nullcontext) for main in (True, False)
)
LINE = {
    "step": 3,
    "loss": 1.5,
    "memory_kind": "device",
    "grad_norm": None,
    "label_tokens": 7,
    "flag": True,
}
NUMBERS = {"loss": 1.5, "label_tokens": 7.0}


def open_log(folder: Path, world: Any = MAIN, **log: Any) -> RunLog:
    """The log of a run in a folder, with trackers."""
    cfg = FullFinetuneConfig(output_dir=str(folder), seed=1, log=LogConfig(progress="plain", **log))
    return RunLog(cfg, world, 3, done=0)


class Recorder(ModuleType):
    """A module that records the calls of the functions that a tracker uses."""

    class Error(Exception):
        """What wandb raises."""

    def __init__(self, name: str):
        super().__init__(name)
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def init(self, **given: Any) -> "Recorder":
        self.calls.append(("init", given))
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append(("log", {"metrics": metrics, "step": step}))

    def finish(self) -> None:
        self.calls.append(("finish", {}))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_reaches_the_library(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Recorder(name)
    monkeypatch.setitem(sys.modules, name, library)
    log = open_log(tmp_path / "run7", trackers=[name], project="p")
    log.record_validation(LINE)
    log.close("done")
    kinds = [kind for kind, _ in library.calls]
    assert kinds == ["init", "log", "finish"]
    given = library.calls[0][1]
    assert (given["project"], given["name"], given["config"]["seed"]) == ("p", "run7", 1)
    assert library.calls[1][1] == {"metrics": NUMBERS, "step": 3}


def test_the_run_name_of_the_config_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Recorder("trackio")
    monkeypatch.setitem(sys.modules, "trackio", library)
    open_log(tmp_path, trackers=["trackio"], run_name="mine")
    assert library.calls[0][1]["name"] == "mine"


def test_tensorboard_gets_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Any, ...]] = []

    class SummaryWriter:
        def __init__(self, log_dir: str):
            written.append(("open", log_dir))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def add_text(self, name: str, text: str) -> None:
            written.append((name, "    seed: 1" in text.splitlines()))

        def close(self) -> None:
            written.append(("close",))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = open_log(tmp_path, trackers=["tensorboard"])
    log.record_validation(LINE)
    log.close("done")
    assert written == [
        ("open", str(tmp_path / "trackers" / "tensorboard")),
        ("settings", True),
        ("loss", 1.5, 3),
        ("label_tokens", 7.0, 3),
        ("close",),
    ]


def test_event_files_by_the_real_library(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="extra `tensorboard` is not installed")
    log = open_log(tmp_path, trackers=["tensorboard"])
    log.record_validation(LINE)
    log.close("done")
    assert any(path.name.startswith("events.out") for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_one_line_with_the_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    expected = (
        rf"^log\.trackers: {name} cannot be imported \(.*\); pip install .{name}>=[\d.]+., "
        rf"or remove {name} from log\.trackers$"
    )
    with pytest.raises(ConfigError, match=expected):
        open_log(tmp_path, trackers=[name])
    assert not (tmp_path / "trackers").exists()


def test_a_refusal_of_wandb_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorder("wandb")

    def refuse(**given: Any) -> None:
        raise library.Error("api_key not configured\n(no-tty)")

    library.init = refuse  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "wandb", library)
    expected = (
        r"^log\.trackers: wandb refused to start \(api_key not configured \(no-tty\)\); run `wandb"
        r" login`, or "
    )
    with pytest.raises(SetupError, match=expected):
        open_log(tmp_path, trackers=["wandb"])


def test_other_ranks_open_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorder("wandb")
    monkeypatch.setitem(sys.modules, "wandb", library)
    log = open_log(tmp_path, OTHER, trackers=["wandb"])
    log.record_validation(LINE)
    log.close("done")
    assert library.calls == []
