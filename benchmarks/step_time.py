"""Where a planned step's time goes, for 8B on four cards, with chains operator by operator and as
fused kernels.

python -m benchmarks.step_time --output docs/measurements/step_time.md
"""

import argparse
import re
from collections import Counter
from pathlib import Path

import torch

from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.timing.cost import compute_op_seconds
from recipe_lib.plan.timing.stream_schedule import (
    ATTENTION,
    KINDS,
    MATMULS,
    MEMORY_BOUND,
    classify_op,
    count_launched_operators,
    schedule,
    sum_time_by_kind,
)
from recipe_lib.plan.tracing.trace import Trace
from recipe_lib.plan.tracing.trace_rank import STEADY, simulate
from tests.plan.apart import build_settings, call_in_fork

# Method -> config, ranks.
METHODS = {
    "full": ("llama3/8B_full", 4),
    "LoRA": ("llama3/8B_lora", 1),
    "QLoRA": ("llama3/8B_qlora", 1),
}
ROW = 2048  # tokens of a sequence
TOKENS = (2048, 8192)  # of a micro-batch
OVERRIDES = (
    "data.source=examples/demo/train.jsonl",
    f"max_seq_len={ROW}",
    "gradient_accumulation_steps=1",
)
CARDS = ("rtx3090", "rtx4090", "a100-80gb", "h100")
FUSED = {"one by one": "fused_kernels=false", "fused": "fused_kernels=true"}
SHARE, AIM = (
    0.03,
    1.25,
)  # of a step's kernels, from which a module's memory-bound ones are listed; of kernels / useful
# Why what is left above SHARE is as it is: module, method ("": any), reason.
REASONS = (
    ("model.layers.*.mlp", "", "one kernel forward, one backward"),
    ("model.layers.*", "full", "FSDP's copies, a kernel each: shards into and out of the buffer of a gather, gradients "
                               "into that of a reduction; every micro-batch makes them, however long"),
    *((f"model.layers.*.mlp.{name}", "QLoRA", "the weight's numbers of 4 bits, forward, again and backward, a kernel "
                                              "each; the adapter's part is added to each result")
      for name in ("gate_proj", "up_proj", "down_proj")),
)  # fmt: skip
TEXT = """# Where a planned step's time goes

By `python -m benchmarks.step_time --output docs/measurements/step_time.md`, torch {torch}: the steady step of rank 0,
planned, layers not compiled, with `{overrides}` and `batch_size` for the micro-batch's tokens; full fine-tuning on 4
ranks, the others on one, checkpointed as their configs are. Rates of data sheets, uncalibrated: how far such plans are
off published speeds is in [planned_times.md](planned_times.md).
Nothing here was measured on a GPU. The time of all kernels over that of matmuls and attention should be {aim}
at most: {verdict}.

`fused`: rotary embedding, gated activation, the loss, and in QLoRA the dequantized weights are a kernel or
few each (`fused_kernels`, the default); `one by one`: `fused_kernels=false`. That both train alike is what
`tests/recipes/test_fused_runs.py` shows; [fused_kernels.md](fused_kernels.md) has the kernels. Layers that are compiled
as a whole (`compile=true`) have no row here.

## By kind

Seconds of each kind alone, and when all of it is scheduled: `exposed`, while a collective or a copy runs and no kernel
does; `idle`, while nothing does: the host launches, or a stream waits. `kernels / useful` is the time of all kernels
over that of matmuls and attention.

{kinds}

## Memory-bound kernels

By module, with fused kernels, those of {share:.0%} of a card's kernels or more; numbers of layers are `*`.

{modules}
"""


def trace_method(method: str, *overrides: str, tokens: int = ROW) -> Trace:
    """The trace of a method's first rank."""
    config, ranks = METHODS[method]
    recipe, cfg, wanted = build_settings(
        config, ranks, *OVERRIDES, f"batch_size={tokens // ROW}", *overrides
    )
    return simulate(recipe, cfg, wanted.sequence, ranks=ranks, phases=()).trace


def measure_rows(method: str, tokens: int) -> tuple[list[str], list[str], list[str]]:
    """Lines of the two tables, and the cases beyond the aim."""
    traces = {
        name: trace_method(method, override, tokens=tokens) for name, override in FUSED.items()
    }
    kinds, modules, beyond = [], [], []
    for card in CARDS:
        hardware = find_hardware(card)
        for name, trace in traces.items():
            times, timing = (
                sum_time_by_kind(trace, STEADY, hardware),
                schedule(trace, STEADY, hardware),
            )
            idle = timing.step - timing.compute - timing.exposed - timing.copies_exposed
            cells = [f"{times[kind]:.3f}" for kind in KINDS if kind != "copies"]
            cells += [
                f"{timing.exposed + timing.copies_exposed:.3f}",
                f"{max(0.0, idle):.3f}",
                f"{timing.step:.3f}",
            ]
            kernels = sum(times[kind] for kind in KINDS[:3])
            useful = times[MATMULS] + times[ATTENTION]
            cells += [f"{count_launched_operators(trace, STEADY):,}", f"{kernels / useful:.2f}"]
            kinds.append(f"| {method} | {tokens} | {card} | {name} | {' | '.join(cells)} |")
        if kernels / useful > AIM:
            beyond.append(f"{method}, {tokens} tokens, {card}: {kernels / useful:.2f}")
        count: Counter[str] = Counter()
        seconds: Counter[str] = Counter()
        for op in trace.iterate_ops(STEADY):
            if classify_op(op) == MEMORY_BOUND:
                module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", op.module) or f"({op.part})"
                count[module] += op.repeats
                seconds[module] += op.repeats * compute_op_seconds(op, hardware)
        for module, together in seconds.most_common():
            if together >= SHARE * kernels:
                cells = [f"{count[module]:,}", f"{together:.3f}", f"{together / kernels:.1%}"]
                reason = next(
                    (why for named, of, why in REASONS if module == named and of in ("", method)),
                    "",
                )
                modules.append(
                    f"| {method} | {tokens} | {card} | `{module}` |"
                    f" {' | '.join([*cells, reason])} |"
                )
        cells = ["", f"{times[MEMORY_BOUND]:.3f}", f"{times[MEMORY_BOUND] / kernels:.1%}", ""]
        modules.append(f"| {method} | {tokens} | {card} | all together | {' | '.join(cells)} |")
    return kinds, modules, beyond


def main() -> None:
    """Prints, and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    heads = ["method", "tokens", "card", "chains", *(kind for kind in KINDS if kind != "copies"), "exposed", "idle",
             "step", "operators", "kernels / useful"]  # fmt: skip
    kinds = ["| " + " | ".join(heads) + " |", "|---|---:|---|---|" + "---:|" * (len(heads) - 4)]
    modules = [
        "| method | tokens | card | module | kernels | seconds | share | why |",
        "|---|---:|---|---|---:|---:|---:|---|",
    ]
    missed: list[str] = []
    for method in METHODS:
        for tokens in TOKENS:
            more, of_modules, beyond = call_in_fork(measure_rows, method, tokens)
            kinds += more
            modules += of_modules
            missed += beyond
            print("\n".join([*more, *of_modules]), flush=True)
    cases = len(METHODS) * len(TOKENS) * len(CARDS)
    verdict = f"so it is in {cases - len(missed)} of {cases} cases with fused kernels" + (
        f", and not in {'; '.join(missed)}" if missed else ""
    )
    text = TEXT.format(
        torch=torch.__version__, overrides=" ".join(OVERRIDES), share=SHARE, kinds="\n".join(kinds), aim=AIM,
        modules="\n".join(modules), verdict=verdict,
    )  # fmt: skip
    output.write_text(text)


if __name__ == "__main__":
    main()
