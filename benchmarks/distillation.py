"""Train small students of the demo's task, on labels alone and with a teacher, and compare them.

`python -m benchmarks.distillation` writes the table of docs/distillation.md; with options it prints
another one. Students of a seed start alike, on the same rows in the same order, and differ in the
distillation's weight (0: labels alone) and divergence. A share of the rows has the answers of other
rows. Measured is the cross-entropy of the right answers to held-out questions.
"""

import argparse
import json
import random
import statistics
import sys
from pathlib import Path

import torch

from recipe_lib.cli.main import main as tune

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "distillation.md"
# The table stands between these lines of the page.
BEGIN = "<!-- table: python -m benchmarks.distillation -->"
END = "<!-- end of table -->"
TEMPERATURE = 2.0  # of the distributions that are compared
WEIGHT = 0.9  # of the divergence from the teacher; the rest is the labels' cross-entropy
LABELS = "labels alone"
KINDS = ("forward_kl", "reverse_kl", "jensen_shannon")  # divergences

# LABELS or a divergence -> rows in words -> the loss of each seed's student.
Losses = dict[str, dict[str, list[float]]]


def main() -> None:
    """Train teacher and students, and write or print the table."""
    parser = argparse.ArgumentParser(
        description="Train students on labels alone and with a teacher, and compare them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--kinds", nargs="*", default=[KINDS[0]], choices=KINDS)
    parser.add_argument(
        "--wrong", type=float, nargs="+", default=[0.3], help="shares of answers that are exchanged"
    )
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("outputs/distillation"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    teacher = train("full_finetune_distributed", "demo/full", arguments.folder / "teacher")
    losses: Losses = {}
    for share in arguments.wrong:
        data = f"{arguments.rows} rows, {share:.0%} wrong"
        path = arguments.folder / f"{arguments.rows} {share:g}.jsonl"
        write_rows(path, arguments.rows, share)
        for kind in (LABELS, *arguments.kinds):
            for seed in arguments.seeds:
                overrides = build_student_overrides(
                    kind, seed=seed, epochs=arguments.epochs, teacher=teacher
                )
                name = f"{arguments.rows} {arguments.epochs} {share:g} {kind} {seed}"
                run = train(
                    "distill_distributed",
                    "demo/distill",
                    arguments.folder / name,
                    f"data.source={path}",
                    *overrides,
                )
                loss = read_last(run, "cross_entropy")
                losses.setdefault(kind, {}).setdefault(data, []).append(loss)
                print(f"{data}, {kind}, seed {seed}: {loss:.4f}", file=sys.stderr, flush=True)
    text = format_table(read_last(teacher, "loss"), losses, arguments)
    # With other options than these the page's table would be replaced by another experiment's.
    if len(sys.argv) == 1 or sys.argv[1:] == ["--folder", str(arguments.folder)]:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    print(text)


def write_rows(path: Path, count: int, share: float) -> None:
    """Write `count` of the demo's rows; a `share` of them, 0 to 1, have another row's answer."""
    lines = (ROOT / "examples" / "demo" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    chance = random.Random(0)
    rows = [json.loads(line) for line in chance.sample(lines, count)]
    wrong_indices = chance.sample(range(count), round(share * count))
    answers = [rows[index]["output"] for index in wrong_indices]
    # Each takes the answer of the next.
    for index, answer in zip(wrong_indices, answers[1:] + answers[:1], strict=True):
        rows[index]["output"] = answer
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build_student_overrides(kind: str, seed: int, epochs: int, teacher: Path) -> list[str]:
    """Return a student's overrides of configs/demo/distill.yaml.

    kind: LABELS or one of KINDS. teacher: folder of the teacher's run.
    """
    overrides = [
        f"distill.teacher={teacher / 'model'}",
        f"seed={seed}",
        f"epochs={epochs}",
        f"distill.temperature={TEMPERATURE}",
        "data.cache=false",
    ]
    if kind == LABELS:
        overrides.append("distill.weight=0")
    else:
        overrides += [f"distill.divergence={kind}", f"distill.weight={WEIGHT}"]
    return overrides


def train(recipe: str, config: str, output: Path, *words: str) -> Path:
    """Train into a folder and return it, unless a complete run is there already.

    words: overrides of the config. Raises SystemExit if the run fails.
    """
    # The exported model is written at the end of a run.
    if (output / "model" / "config.json").is_file():
        return output
    command = ["run", "--no-plan", recipe, "--config", config]
    command += [f"output_dir={output}", "overwrite_output_dir=true", "log.every_n_steps=1000"]
    code = tune([*command, *words])
    if code:
        raise SystemExit(code)
    return output


def read_last(run: Path, name: str) -> float:
    """Return a metric of a run's last validation, such as `loss` for `validation_loss`."""
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    key = f"validation_{name}"
    return float([line[key] for line in lines if key in line][-1])


def format_table(teacher: float, losses: Losses, arguments: argparse.Namespace) -> str:
    """Return the table as Markdown: a line for LABELS and for each divergence, means over seeds.

    teacher: its own loss on the held-out rows.
    """
    data = list(losses[LABELS])
    steps = arguments.rows // 32 * arguments.epochs  # 32 rows a step in configs/demo/distill.yaml
    lines = [
        (
            f"Held-out cross-entropy of students `demo/0.1M`, {steps} steps, {len(arguments.seeds)}"
            f" seeds: mean, lowest to highest. With a teacher: temperature {TEMPERATURE:g}, weight"
            f" {WEIGHT:g}. The teacher, `demo/0.5M`, has {teacher:.3f}. torch {torch.__version__},"
            " fp32 on a CPU."
        ),
        "",
        f"| trained with | {' | '.join(data)} |",
        f"|---|{'---|' * len(data)}",
    ]
    for kind, losses_by_data in losses.items():
        cells = [format_spread(losses_by_data[name]) for name in data]
        label = kind if kind == LABELS else f"labels and `{kind}`"
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def format_spread(values: list[float]) -> str:
    """Return mean, lowest and highest as `0.512 (0.498 to 0.530)`."""
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
