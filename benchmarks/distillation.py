"""A small student of the demo's task, trained on labels alone and with a teacher: `python -m benchmarks.distillation`.

    python -m benchmarks.distillation                              writes the table of docs/distillation.md
    python -m benchmarks.distillation --seeds 1 --kinds forward_kl  a quicker look; prints the table

The teacher is the demo's model of 0.5 M parameters, trained as `make demo` does it. Students are `demo/0.1M`, from the
same random start for each seed, on the same sequences in the same order, with the same learning rate and steps; they
differ in distill.weight and distill.divergence alone. With weight 0 the loss is the labels' cross-entropy. What is
counted is on held-out questions: cross-entropy of the right answers, and answers that are right to the letter.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from recipe_lib.cli.main import main as tune

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "distillation.md"
BEGIN, END = "<!-- table: python -m benchmarks.distillation -->", "<!-- end of table -->"
EPOCHS, TEMPERATURE, WEIGHT = 3, 2.0, 0.9
LABELS = "labels alone"
KINDS = ("forward_kl", "reverse_kl", "jensen_shannon")


def main() -> None:
    """Trains teacher and students, and writes or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--folder", type=Path, default=Path("outputs/distillation"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    teacher = train("full_finetune_distributed", "demo/full", arguments.folder / "teacher")
    found: dict[str, list[dict[str, float]]] = {}
    for kind in (LABELS, *arguments.kinds):
        for seed in range(1, arguments.seeds + 1):
            words = student(kind, seed, arguments.epochs, teacher)
            run = train("distill_distributed", "demo/distill", arguments.folder / f"{kind} {seed}", *words)
            found.setdefault(kind, []).append(measured(run))
            print(kind, seed, found[kind][-1], file=sys.stderr, flush=True)
    text = table(measured(teacher, of_labels="validation_loss"), found, arguments)
    whole = arguments.seeds == 3 and tuple(arguments.kinds) == KINDS and arguments.epochs == EPOCHS
    if whole:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    print(text)


def student(kind: str, seed: int, epochs: int, teacher: Path) -> list[str]:
    """Overrides of configs/demo/distill.yaml."""
    loss = ["distill.weight=0"] if kind == LABELS else [f"distill.divergence={kind}", f"distill.weight={WEIGHT}"]
    return [f"distill.teacher={teacher / 'model'}", f"seed={seed}", f"epochs={epochs}", *loss]


def train(recipe: str, config: str, output: Path, *words: str) -> Path:
    """The output folder of a run; one that is there already, complete, is taken."""
    if not (output / "model" / "config.json").is_file():
        plain = [f"output_dir={output}", "overwrite_output_dir=true", "log.every_n_steps=1000"]
        code = tune(["run", "--no-plan", recipe, "--config", config, *plain, *words])
        if code:
            raise SystemExit(code)
    return output


def measured(run: Path, of_labels: str = "validation_cross_entropy") -> dict[str, float]:
    """Held-out cross-entropy at the end, share of right answers, and optimizer steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if of_labels in line][-1]
    score = score_module()
    rows = score.read_heldout()
    model, spec, tokenizer = score.load_model(str(run / "model"))
    right = sum(score.answer(model, spec, tokenizer, row).right for row in rows)
    return {"loss": last[of_labels], "right": right / len(rows), "steps": max(line["step"] for line in lines)}


def score_module() -> ModuleType:
    """examples/demo/score.py."""
    spec = importlib.util.spec_from_file_location("score", ROOT / "examples" / "demo" / "score.py")
    assert spec and spec.loader
    module = sys.modules.setdefault("score", importlib.util.module_from_spec(spec))
    if not hasattr(module, "read_heldout"):
        spec.loader.exec_module(module)
    return module


def table(teacher: dict[str, float], found: dict[str, list[dict[str, float]]], arguments: Any) -> str:
    """Markdown: a row of each way to train, means over seeds with the lowest and the highest."""
    steps = int(next(iter(found.values()))[0]["steps"])
    lines = [
        f"Teacher `demo/0.5M` ({int(teacher['steps'])} steps), students `demo/0.1M` ({steps} steps each), "
        f"{arguments.seeds} seeds, temperature {TEMPERATURE:g}, weight {WEIGHT:g} with a teacher; torch "
        f"{torch.__version__}, fp32 on a CPU. Mean, and from lowest to highest.",
        "",
        "| trained with | held-out cross-entropy | right answers |",
        "|---|---|---|",
        f"| (the teacher itself) | {teacher['loss']:.3f} | {teacher['right']:.1%} |",
    ]
    for kind, runs in found.items():
        name = kind if kind == LABELS else f"`{kind}`"
        cells = [spread([run[key] for run in runs], form) for key, form in (("loss", ".3f"), ("right", ".1%"))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def spread(values: list[float], form: str) -> str:
    """`0.512 (0.498 to 0.530)`."""
    mean, lowest, highest = statistics.mean(values), min(values), max(values)
    return f"{mean:{form}} ({lowest:{form}} to {highest:{form}})"


if __name__ == "__main__":
    main()
