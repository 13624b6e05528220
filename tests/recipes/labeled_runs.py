"""Run the recipes that learn from labels for seconds: KTO, reward models, classifiers.

`write_answers`, `write_margins` and `write_classes` write the rows; `train_all` runs cases on a
rank and returns their metrics, which tests compare between numbers of ranks.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.recipes.runs import ROOT, keep_latest, offload_on_a_cpu, read_metrics, run_here

STEPS = 3
ITEMS = 4  # sequences or pairs of a step, over all ranks
# Beginnings of the names of the metrics that runs are compared by.
COMPARED = ("loss", "grad_norm", "kl", "accuracy", "reward", "validation")


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as JSON lines and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_answers(folder: Path) -> Path:
    """Write KTO's rows: answers of different lengths, two of three desirable."""
    polite = "Gladly: it sleeps all day. "
    rude = "No. Go away. "
    rows = [
        {
            "prompt": f"Tell me about cat {number} " * (1 + number % 3),
            "completion": (polite if number % 3 else rude) * (1 + number % 2),
            "label": number % 3 > 0,
        }
        for number in range(24)
    ]
    return write(folder / "answers.jsonl", rows)


def write_margins(folder: Path) -> Path:
    """Write pairs with a margin between their answers."""
    rows = [
        {
            "prompt": f"Tell me about cat {number} " * (1 + number % 3),
            "chosen": "Gladly: " + "it sleeps all day. " * (1 + number % 2),
            "rejected": "No. " + "Go away. " * (number % 4),
            "margin": 0.1 * (number % 4),
        }
        for number in range(24)
    ]
    return write(folder / "pairs.jsonl", rows)


def write_classes(folder: Path) -> Path:
    """Write texts of three classes."""
    texts = {"cat": "it purrs ", "dog": "it barks at me ", "fish": "it swims "}
    rows = []
    for number in range(24):
        label = list(texts)[number % 3]
        rows.append({"text": f"{number}: {texts[label] * (1 + number % 4)}", "label": label})
    return write(folder / "classes.jsonl", rows)


def build_arguments(data: Path, output: Path, recipe: str, *overrides: str) -> list[str]:
    """Return the command line of a run in fp64 of a model of two layers of width 32.

    data: file of rows; the run's config is written beside it. output: the run's folder.
    """
    config = data.parent / f"{recipe}.yaml"
    config.write_text(f"recipe: {recipe}\n")
    return keep_latest(
        "--config",
        str(config),
        f"model.preset={ROOT / 'tests' / 'recipes' / 'tiny.json'}",
        "tokenizer.path=examples/demo/tokenizer",
        f"data.source={data}",
        "data.template=plain",
        "data.cache=false",
        "max_seq_len=128",
        "dtype=fp64",
        "device=cpu",
        "optimizer.lr=3e-3",
        "lr_scheduler.type=constant",
        "checkpoint.save_model=false",
        "log.every_n_steps=1000",
        "gradient_accumulation_steps=1",
        f"max_steps={STEPS}",
        f"output_dir={output}",
        *overrides,
    )


def list_validation_overrides(data: Path) -> list[str]:
    """Return overrides that validate every second step, on the first 7 rows of the same file."""
    return [f"validation.source={data}", "validation.max_samples=7", "validation.every_n_steps=2"]


def train(
    data: Path, recipe: str, ranks: int, overrides: tuple[str, ...]
) -> list[dict[str, float]]:
    """Run on this rank; return the COMPARED metrics of each line of metrics.jsonl.

    ranks: that run together. If the overrides save states, a second run resumes the first one after
    its first step.
    """
    output = data.parent / "run"
    accumulation = 2 if "gradient_accumulation_steps=2" in overrides else 1
    # Two ranks of these dimensions read the same items.
    sharing_dimensions = ("parallel.tensor", "parallel.context", "parallel.pipeline")
    ranks_per_batch = 2 if any(word.startswith(sharing_dimensions) for word in overrides) else 1
    batch_size = f"batch_size={ITEMS * ranks_per_batch // ranks // accumulation}"
    argv = build_arguments(
        data, output, recipe, batch_size, *list_validation_overrides(data), *overrides
    )
    command_lines = [[*argv, "overwrite_output_dir=true"]]
    if any("save_every_n_steps" in override for override in overrides):
        command_lines.append([*argv, f"resume={output / 'state' / 'step_1'}"])
    for command_line in command_lines:
        run = run_here(command_line, recipe=recipe)
        assert run.code == 0, run.said
        dist.barrier()  # else a rank that starts the next run first would find the folder in use
    lines = read_metrics(output)
    dist.barrier()
    return [
        {name: value for name, value in line.items() if name.startswith(COMPARED)} for line in lines
    ]


def train_all(
    data: Path, recipe: str, ranks: int, cases: Sequence[tuple[str, ...]]
) -> dict[tuple[str, ...], list[dict[str, float]]]:
    """Return what `train` returns of each case; a case is the overrides of a run."""
    offload_on_a_cpu()
    return {case: train(data, recipe, ranks, case) for case in cases}
