"""Runs of seconds on rows with labels: answers that are wanted or not, pairs with margins, and
texts of classes.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.recipes.runs import ROOT, keep_latest, offload_on_a_cpu, read_metrics, run_here

STEPS, ITEMS = 3, 4  # items of a step, over all ranks
COMPARED = ("loss", "grad_norm", "kl", "accuracy", "reward", "validation")


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_answers(folder: Path) -> Path:
    """Answers of different lengths, two of three wanted."""
    polite, rude = "Gladly: it sleeps all day. ", "No. Go away. "
    return write(
        folder / "answers.jsonl",
        [
            {
                "prompt": f"Tell me about cat {at} " * (1 + at % 3),
                "completion": (polite if at % 3 else rude) * (1 + at % 2),
                "label": at % 3 > 0,
            }
            for at in range(24)
        ],
    )


def write_margins(folder: Path) -> Path:
    return write(
        folder / "pairs.jsonl",
        [
            {
                "prompt": f"Tell me about cat {at} " * (1 + at % 3),
                "chosen": "Gladly: " + "it sleeps all day. " * (1 + at % 2),
                "rejected": "No. " + "Go away. " * (at % 4),
                "margin": 0.1 * (at % 4),
            }
            for at in range(24)
        ],
    )


def write_classes(folder: Path) -> Path:
    kinds = {"cat": "it purrs ", "dog": "it barks at me ", "fish": "it swims "}
    names = [list(kinds)[at % 3] for at in range(24)]
    return write(
        folder / "classes.jsonl",
        [
            {"text": f"{at}: {kinds[name] * (1 + at % 4)}", "label": name}
            for at, name in enumerate(names)
        ],
    )


def build_arguments(data: Path, output: Path, recipe: str, *overrides: str) -> list[str]:
    """A model of two layers of width 32 and 64."""
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


def validate_run(data: Path) -> list[str]:
    """Every second step, by the first rows of the same file."""
    return [f"validation.source={data}", "validation.max_samples=7", "validation.every_n_steps=2"]


def train(
    data: Path, recipe: str, ranks: int, overrides: tuple[str, ...]
) -> list[dict[str, float]]:
    """What each line of a run has recorded; with saved states, of a second run that goes on after
    the first step.
    """
    output = data.parent / "run"
    accumulation = 2 if "gradient_accumulation_steps=2" in overrides else 1
    together = ("parallel.tensor", "parallel.context", "parallel.pipeline")
    shared = 2 if any(each.startswith(together) for each in overrides) else 1
    size = f"batch_size={ITEMS * shared // ranks // accumulation}"
    argv = build_arguments(data, output, recipe, size, *validate_run(data), *overrides)
    starts = [[*argv, "overwrite_output_dir=true"]]
    if any("save_every_n_steps" in override for override in overrides):
        starts.append([*argv, f"resume={output / 'state' / 'step_1'}"])
    for start in starts:
        run = run_here(start, recipe=recipe)
        assert run.code == 0, run.said
        dist.barrier()  # a rank that is there first would find the folder in use
    lines = read_metrics(output)
    dist.barrier()
    return [
        {name: value for name, value in line.items() if name.startswith(COMPARED)} for line in lines
    ]


def train_all(
    data: Path, recipe: str, ranks: int, cases: Sequence[tuple[str, ...]]
) -> dict[tuple[str, ...], list[dict[str, float]]]:
    """By overrides."""
    offload_on_a_cpu()
    return {case: train(data, recipe, ranks, case) for case in cases}


metrics_of = read_metrics
