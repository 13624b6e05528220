"""Run the shipped recipes on small models in this process, and read what they write.

run = expect_done(run_here(build_arguments(tmp_path / "run", "demo/full")))
losses = read_losses(tmp_path / "run")
"""

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
PLAIN = Path(__file__).parent / "plain.yaml"  # a config that names the recipe and sets nothing else

Hook = Callable[[Any], None]  # called with the recipe

# Names of the shipped recipes, files of the folder recipes.
FULL = "full_finetune_distributed"
LORA = "lora_finetune_distributed"
DPO = "dpo_distributed"
REWARD = "reward_distributed"
DISTILL = "distill_distributed"


@cache
def import_recipe_module(name: str = FULL) -> ModuleType:
    """Import a recipe's file, once a process, and return the module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build_arguments(output: Path, config: str = "demo/full") -> list[str]:
    """Return the command line, behind the recipe's name, of a run of seconds.

    It has the demo's tokenizer and rows, and a model of two layers of width 32. output: the run's
    folder. config: name of a shipped config, or a path.
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


def build_story_arguments(realdata: Path, output: Path, *overrides: str) -> list[str]:
    """Return the command line of a run that starts from a real model of 260 K weights.

    realdata: the folder that has the model. overrides: name the data, and whatever else differs.
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
    """Return the words without overrides whose key is given again later, as `tune` refuses them."""
    last_index = {word.partition("=")[0]: index for index, word in enumerate(words) if "=" in word}
    return [
        word
        for index, word in enumerate(words)
        if "=" not in word or last_index[word.partition("=")[0]] == index
    ]


@dataclass
class Run:
    """How a run in this process ended."""

    code: int  # the exit code
    said: list[str]  # log lines, then the error's
    recipe: Any  # the recipe object; None if the run ended before there was one


def get_recipe_class(module: ModuleType) -> type[Any]:
    """Return the class with a training step that the module itself defines."""
    for value in vars(module).values():
        if getattr(value, "__module__", "") == module.__name__ and hasattr(value, "train_step"):
            return value
    raise AssertionError(f"{module.__name__} defines no recipe")


def run_here(
    argv: list[str],
    before_training: Hook | None = None,
    before_model: Hook | None = None,
    recipe: str = FULL,
) -> Run:
    """Call the recipe's `main(argv)` and return exit code and log lines as the command has them.

    before_training: called when all is set up and resumed. before_model: called when the data is
    read. recipe: a name such as FULL.
    """
    module = import_recipe_module(recipe)
    original = get_recipe_class(module)
    recipes: list[Any] = []  # the recipe object, once it is constructed

    class Observed(original):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            recipes.append(self)

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
    return Run(code, log.lines, recipes[0] if recipes else None)


class _Lines(logging.Handler):
    """Keeps the logged lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the full tensor; a sharded one is gathered (a collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def list_parameters(recipe: Any) -> dict[str, torch.Tensor]:
    """Return copies of the model's full parameters by name. A collective if it is sharded."""
    recipe.model.state_dict()  # FSDP's hook frees gathered parameters
    return {
        name: gather_whole(parameter.detach())
        for name, parameter in recipe.model.named_parameters()
    }


def list_states(recipe: Any) -> dict[str, torch.Tensor]:
    """Return copies of the optimizer's full states by `PARAMETER/KIND`.

    A collective if the model is sharded.
    """
    recipe.model.state_dict()  # FSDP's hook frees gathered parameters
    full_states = {}
    for name, parameter in recipe.model.named_parameters():
        states = recipe.optimizer.state.get(parameter, {})
        for kind, value in sorted(states.items()):
            if value is not None:
                full_states[f"{name}/{kind}"] = gather_whole(torch.as_tensor(value))
    return full_states


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """Return every line of metrics.jsonl; an incomplete line is an error."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def read_steps(output: Path) -> list[tuple[int, float, float]]:
    """Return (step, loss, gradient norm) of every training line of metrics.jsonl."""
    return [
        (line["step"], line["loss"], line["grad_norm"])
        for line in read_metrics(output)
        if "loss" in line
    ]


def read_losses(output: Path) -> list[float]:
    """Return the loss of every step."""
    return [loss for _, loss, _ in read_steps(output)]


def find_largest_difference(values: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two series of the same length."""
    assert len(values) == len(expected) > 0, (values, expected)
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


def read_tree(folder: Path) -> dict[str, bytes]:
    """Return the contents of every file under the folder, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def expect_done(run: Any) -> Any:
    """Return a run of `run_here`; raise AssertionError if it failed, and wait for other ranks."""
    assert run.code == 0, run.said
    if dist.is_initialized():
        dist.barrier()  # else a rank would look for files that the others still write
    return run


def make_probe_tokens() -> torch.Tensor:
    """Return tokens int64 `[2, 24]` to compare logits on."""
    return torch.randint(3, 512, (2, 24), generator=torch.Generator().manual_seed(0))


def offload_on_a_cpu() -> None:
    """Let a CPU offload to the host as a GPU does, by copies; for the rest of the process.

    Without this, offloading on a CPU copies nothing: its memory is the host's already.
    """
    for module in (optimizers, activation_offload, layer_stream):
        module.has_host = lambda device: True  # type: ignore[attr-defined]
