"""Planned step times next to measured ones, on this machine's CPU: calibrated once, then 20 runs it has not seen.

    python -m benchmarks.cpu_times --output docs/measurements/cpu_times.md

The machine has to be idle otherwise. Calibrates as `tune plan --calibrate` does, draws small configs, runs each for
some steps in this process and plans it. Ten minutes.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from recipe_lib.cli.plan import calibrate, small_config, training_step
from recipe_lib.cli.plan_request import recipe_class
from recipe_lib.cli.recipes import RecipeFile
from recipe_lib.parallel import start_world
from recipe_lib.plan.build_plan import PlanSettings, make_plan
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.timing.calibration import read_calibration
from recipe_lib.plan.timing.cost import Calibration
from recipe_lib.plan.world.sequence_lengths import planned_sequence
from recipe_lib.plan.world.shape_only_model import plannable

FULL, LORA = "full_finetune_distributed", "lora_finetune_distributed"
CONFIGS = {FULL: "llama3_2/1B_full", LORA: "llama3_2/1B_lora"}
STEPS = 15

PAGE = """# Planned and measured step times on a CPU

Made by `python -m benchmarks.cpu_times --output docs/measurements/cpu_times.md`: torch {torch}, --threads
{threads}, --seed {seed}.

`tune plan --calibrate` measures the operators of eight small Llamas' steps one by one, in fp32 and bf16; then Llamas of
drawn sizes, which it has not seen, are planned with the file and run. Measured is the median of {steps} steps in the
process of this benchmark, after three; planned / measured is given next to it.

| run | hidden | layers | MLP | vocabulary | tokens | overrides | planned, ms | measured, ms | ratio |
|---|--:|--:|--:|--:|--:|---|--:|--:|--:|
{rows}

{summary}
"""


def drawn(number: int, seed: int) -> tuple[str, tuple[int, ...], list[str]]:
    """(recipe, size, overrides) of the run with a number."""
    dice = random.Random(f"{seed} {number}")
    hidden = 64 * dice.randint(1, 8)
    size = (
        hidden,
        dice.randint(1, 6),
        32 * dice.randint(hidden // 32, 3 * hidden // 32),
        256 * dice.randint(1, 16),
        16 * dice.randint(1, 16),
        dice.choice((1, 2, 4)),
    )
    recipe = dice.choice((FULL, FULL, LORA))
    overrides = [
        f"dtype={dice.choice(('fp32', 'bf16'))}",
        f"memory.activation_checkpointing={dice.choice(('none', 'none', 'full'))}",
        f"gradient_accumulation_steps={dice.choice((1, 1, 2, 3))}",
    ]
    return recipe, size, overrides


def measured(cfg: Any, recipe: str) -> float:
    """Seconds of a step."""
    with start_world(cfg) as world:
        step = training_step(cfg, world, recipe)
        for _ in range(3):
            step()
        taken = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            step()
            taken.append(time.perf_counter() - begun)
    return median(taken)


def planned(cfg: Any, recipe: str, rates: Calibration) -> float:
    """The same, as planned."""
    cfg, _ = plannable(cfg)
    sequence = planned_sequence(cfg, str(cfg.max_seq_len))
    settings = PlanSettings(find_hardware("cpu"), sequence, 1, calibration=rates, phases=())
    plan, _ = make_plan(recipe_class(RecipeFile.find(recipe)), cfg, settings)
    assert plan.time is not None
    return plan.time.step


def main(argv: list[str] | None = None) -> int:
    """Writes the page, or prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--calibration", type=Path, help="a file made before, in place of measuring now")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--threads", type=int, default=1, help="of torch; one is disturbed least by what else runs")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    rows, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.calibration or Path(folder) / "calibration.json"
        if not arguments.calibration:
            print(calibrate(path), flush=True)
        rates = read_calibration(path, find_hardware("cpu"))
        for number in range(arguments.runs):
            recipe, size, overrides = drawn(number, arguments.seed)
            cfg = small_config(Path(folder), size, *overrides, recipe=recipe, config=CONFIGS[recipe])
            seconds = measured(cfg, recipe)
            expected = planned(cfg, recipe, rates)
            ratios.append(expected / seconds)
            *shape, tokens, count = size
            cells = [recipe.partition("_")[0], *shape, f"{count} x {tokens}", f"`{' '.join(overrides)}`"]
            cells += [f"{expected * 1e3:.1f}", f"{seconds * 1e3:.1f}", f"{ratios[-1]:.2f}"]
            rows.append("| " + " | ".join(map(str, cells)) + " |")
            print(rows[-1], flush=True)
    off = sorted(abs(ratio - 1) for ratio in ratios)
    summary = (
        f"{len(off)} runs: mean error {sum(off) / len(off):.1%}, 95 % of them within "
        f"{off[max(0, -(-95 * len(off) // 100) - 1)]:.1%}, the worst {off[-1]:.1%}."
    )
    page = PAGE.format(
        torch=torch.__version__, threads=torch.get_num_threads(), seed=arguments.seed, steps=STEPS,
        rows="\n".join(rows), summary=summary,
    )  # fmt: skip
    if arguments.output:
        arguments.output.write_text(page, encoding="utf-8")
    print(page if not arguments.output else summary)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
