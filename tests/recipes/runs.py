"""Small runs of the shipped recipe, for the tests of this folder."""

import importlib.util
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from recipe_lib.errors import STOPPED_AND_SAVED, StoppedAndSaved, UserError
from recipe_lib.logs import get_logger
from recipe_lib.memory import activation_offload, layer_stream
from recipe_lib.optim import optimizers

ROOT = Path(__file__).parent.parent.parent
PLAIN = Path(__file__).parent / "plain.yaml"  # a config that sets nothing

Hook = Callable[[Any], None]


FULL, LORA, DPO = "full_finetune_distributed", "lora_finetune_distributed", "dpo_distributed"
REWARD, DISTILL = "reward_distributed", "distill_distributed"


@cache
def import_recipe_module(name: str = FULL) -> ModuleType:
    """A recipe's file as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build_arguments(output: Path, config: str = "demo/full") -> list[str]:
    """Command line of a run of seconds: the demo's tokenizer and rows, a model of two layers of
    width 32.
    """
    return [
        "--config",
        config,
        f"model.preset={ROOT / 'tests' / 'recipes' / 'tiny.json'}",
        "max_seq_len=64",
        "batch_size=4",
        "gradient_accumulation_steps=1",
        "data.max_samples=24",
        f"output_dir={output}",
        "~validation",
        "lr_scheduler.warmup_steps=0",
    ]


def write_stories(realdata: Path, output: Path, *overrides: str) -> list[str]:
    """Command line of a run that starts from real weights, 260 K of them; the data is for
    `overrides` to say.
    """
    return keep_latest(
        "--config",
        str(PLAIN),
        f"model.path={realdata / 'stories260K-hf'}",
        f"output_dir={output}",
        "max_seq_len=128",
        "dtype=fp32",
        "device=cpu",
        "optimizer.lr=1e-3",
        "log.every_n_steps=1000",
        *overrides,
    )


def keep_latest(*words: str) -> list[str]:
    """The words without those whose key is given again later: a command line has each key once."""
    last = {word.partition("=")[0]: at for at, word in enumerate(words) if "=" in word}
    return [
        word
        for at, word in enumerate(words)
        if "=" not in word or last[word.partition("=")[0]] == at
    ]


@dataclass
class Run:
    """A run in this process. recipe: None if it ended before there was one. said: log lines, then
    the error's.
    """

    code: int
    said: list[str]
    recipe: Any


def get_recipe_class(module: ModuleType) -> type[Any]:
    """The class that a recipe's file is about: the one with a training step."""
    made = (
        value
        for value in vars(module).values()
        if getattr(value, "__module__", "") == module.__name__
    )
    return next(value for value in made if hasattr(value, "train_step"))


def run_here(
    argv: list[str],
    before_training: Hook | None = None,
    before_model: Hook | None = None,
    recipe: str = FULL,
) -> Run:
    """The recipe's `main(argv)`, with exit code and lines as `exit_code_of` would give them.

    before_model, before_training: called with the recipe when its data is read, and when all is set
    up and resumed.
    """
    module = import_recipe_module(recipe)
    original = get_recipe_class(module)
    made: list[Any] = []

    class Observed(original):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

        def setup_data(self, prepared: Any) -> None:
            super().setup_data(prepared)
            if before_model:
                before_model(self)

        def train(self) -> None:
            if before_training:
                before_training(self)
            super().train()

    log = _Lines()
    get_logger().addHandler(log)
    setattr(module, original.__name__, Observed)
    try:
        code = module.main(argv) or 0
    except UserError as error:
        code = error.exit_code
        log.lines += [f"error: {fault}" for fault in error.faults]
    except StoppedAndSaved as stopped:
        code = STOPPED_AND_SAVED
        log.lines.append(str(stopped))
    finally:
        setattr(module, original.__name__, original)
        get_logger().removeHandler(log)
    return Run(code, log.lines, made[0] if made else None)


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor, gathered if it is sharded. A collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def list_parameters(recipe: Any) -> dict[str, torch.Tensor]:
    """The model's parameters, whole. A collective."""
    recipe.model.state_dict()  # FSDP's hook frees what is gathered
    return {
        name: gather_whole(parameter.detach())
        for name, parameter in recipe.model.named_parameters()
    }


def list_states(recipe: Any) -> dict[str, torch.Tensor]:
    """The optimizer's states by parameter and kind, whole. A collective."""
    recipe.model.state_dict()
    held = recipe.optimizer.state
    return {
        f"{name}/{kind}": gather_whole(torch.as_tensor(value))
        for name, parameter in recipe.model.named_parameters()
        for kind, value in sorted(held.get(parameter, {}).items())
        if value is not None
    }


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl, none of them torn."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def read_steps(output: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every training line of metrics.jsonl."""
    return [
        (line["step"], line["loss"], line["grad_norm"])
        for line in read_metrics(output)
        if "loss" in line
    ]


def read_losses(output: Path) -> list[float]:
    """The loss of every step."""
    return [loss for _, loss, _ in read_steps(output)]


def find_largest_difference(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of two series of the same length."""
    assert len(found) == len(expected) > 0, (found, expected)
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def read_tree(folder: Path) -> dict[str, bytes]:
    """Relative path -> contents of every file under the folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def expect_done(run: Any) -> Any:
    """A run of `run_here` that has to have ended well on every rank."""
    assert run.code == 0, run.said
    if dist.is_initialized():
        dist.barrier()  # a rank that is there first would not find what the others still write
    return run


def probe() -> torch.Tensor:
    """Tokens `[2, 24]` to compare logits on."""
    return torch.randint(3, 512, (2, 24), generator=torch.Generator().manual_seed(0))


def offload_on_a_cpu() -> None:
    """What is kept on the host is copied there and back though the device is a CPU; for the rest of
    a process.
    """
    for module in (optimizers, activation_offload, layer_stream):
        module.has_host = lambda device: True  # type: ignore[attr-defined]
