"""Where a planned step's time goes, for 8B on four cards: products, attention, memory-bound kernels, launches, waits.

python -m benchmarks.step_time --output docs/measurements/step_time.md
"""

import argparse
from pathlib import Path

import torch

from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.timing.stream_schedule import schedule
from recipe_lib.plan.timing.time_by_kind import (
    KINDS,
    MEMORY_BOUND,
    kernel_overhead,
    memory_bound_by_module,
    operators_launched,
    time_by_kind,
)
from recipe_lib.plan.trace import Trace
from recipe_lib.plan.tracing.simulate import STEADY, simulate
from tests.plan.apart import apart, settings

# Method -> config, ranks.
METHODS = {"full": ("llama3/8B_full", 4), "LoRA": ("llama3/8B_lora", 1), "QLoRA": ("llama3/8B_qlora", 1)}
OVERRIDES = (
    "data.source=examples/demo/train.jsonl",
    "max_seq_len=2048",
    "batch_size=1",
    "gradient_accumulation_steps=1",
)
CARDS = ("rtx3090", "rtx4090", "a100-80gb", "h100")
SHARE = 0.03  # of a step's kernels, from which a module's memory-bound ones are listed
TEXT = """# Where a planned step's time goes

By `python -m benchmarks.step_time --output docs/measurements/step_time.md`, torch {torch}: the steady step of rank 0,
planned, eager, with `{overrides}`; full fine-tuning on 4 ranks, the others on one. Rates of data sheets, uncalibrated:
tens of percent. Nothing here was measured on a GPU. `kernels / useful` is the time of all kernels over that of products
and attention; the aim is 1.25, which is not reached where the figure is larger.

## By kind

Seconds of each kind alone, and when all of it is scheduled: `exposed`, while a collective or a copy runs and no kernel
does; `idle`, while nothing does: the host launches, or a stream waits.

{kinds}

## Memory-bound kernels

By module, those of {share:.0%} of a card's kernels or more; numbers of layers are `*`.

{modules}
"""


def trace_of(method: str) -> Trace:
    """The trace of a method's first rank."""
    config, ranks = METHODS[method]
    recipe, cfg, wanted = settings(config, ranks, *OVERRIDES)
    return simulate(recipe, cfg, wanted.sequence, ranks=ranks, phases=()).trace


def rows_of(method: str) -> tuple[list[str], list[str]]:
    """Lines of the two tables."""
    trace = trace_of(method)
    kinds, modules = [], []
    launched = operators_launched(trace, STEADY)
    for card in CARDS:
        hardware = find_hardware(card)
        times, timing = time_by_kind(trace, STEADY, hardware), schedule(trace, STEADY, hardware)
        idle = timing.step - timing.compute - timing.exposed - timing.copies_exposed
        cells = [f"{times[kind]:.3f}" for kind in KINDS]
        cells += [f"{timing.exposed + timing.copies_exposed:.3f}", f"{max(0.0, idle):.3f}", f"{timing.step:.3f}"]
        kinds.append(f"| {method} | {card} | {' | '.join(cells)} | {launched:,} | {kernel_overhead(times):.2f} |")
        kernels = sum(times[kind] for kind in KINDS[:3])
        for row in memory_bound_by_module(trace, STEADY, hardware):
            if row.seconds >= SHARE * kernels:
                share = row.seconds / kernels
                modules.append(
                    f"| {method} | {card} | `{row.module}` | {row.kernels:,} | {row.seconds:.3f} | {share:.1%} |"
                )
        rest = times[MEMORY_BOUND] / kernels
        modules.append(f"| {method} | {card} | all together | | {times[MEMORY_BOUND]:.3f} | {rest:.1%} |")
    return kinds, modules


def main() -> None:
    """Prints, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    heads = ["method", "card", *KINDS, "exposed", "idle", "step", "operators launched", "kernels / useful"]
    kinds = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    modules = ["| method | card | module | kernels | seconds | share |", "|---|---|---|---:|---:|---:|"]
    for method in METHODS:
        more, of_modules = apart(rows_of, method)
        kinds += more
        modules += of_modules
        print("\n".join(more), flush=True)
    text = TEXT.format(
        torch=torch.__version__, overrides=" ".join(OVERRIDES), share=SHARE, kinds="\n".join(kinds),
        modules="\n".join(modules),
    )  # fmt: skip
    output.write_text(text)


if __name__ == "__main__":
    main()
