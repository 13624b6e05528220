"""What matmuls in 8 bits do to products and to training: errors of single products, and losses of whole runs.

    python benchmarks/low_precision.py --output docs/measurements/low_precision.md

On the CPU, where the arithmetic of int8 is that of a GPU (sums are exact) and FP8's differs from it in the order of
sums alone. The shipped demo is trained from random weights with the same rows in the same order in each type. No time
is measured: a CPU's says nothing of a GPU's.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from recipe_lib.cli.main import main as tune  # noqa: E402
from recipe_lib.memory import apply_levers as lever  # noqa: E402
from recipe_lib.ops.low_precision import scaled_linear  # noqa: E402
from recipe_lib.training.metrics import read_metrics  # noqa: E402

WINDOW = 20  # steps that a loss is the mean of
TOKENS, WIDTH, MLP_WIDTH = 512, 1024, 2816

PAGE = """# Matmuls in 8 bits

Made by `python benchmarks/low_precision.py --output docs/measurements/low_precision.md` on a CPU, torch {torch}. No
time is measured. FP8 is refused on a CPU in a run; here its arithmetic is looked at all the same.

## One linear

Relative error of the output and of both gradients against fp64 (length of the difference over length of the result),
for {tokens} tokens, a weight of {rows} x {columns}, normal numbers rounded to bf16; with `spikes` one channel in a
hundred of the input is thirty times as large, as activations of language models have it.

| inputs | products in | output | input's gradient | weight's gradient |
| --- | --- | --- | --- | --- |
{errors}

## Runs

    {command}

with `dtype` and `matmul_dtype` as named: the mean training loss of the {window} steps up to each step, and the
largest distance of such a mean from fp32's at any step from {window} on. `other seed` is fp32 with other rows and
weights: what chance alone does.

| run | {steps} | furthest |
| --- | {dashes} | --- |
{losses}
"""


def main(argv: list[str] | None = None) -> int:
    """Writes the page, or prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    page = page_of(arguments.steps)
    if arguments.output is None:
        print(page, end="")
    else:
        arguments.output.write_text(page)
    return 0


def page_of(steps: int) -> str:
    """Measures everything."""
    marks = [step for step in (20, 50, 100, 200, 300, 500, 1000) if WINDOW <= step < steps] + [steps]
    curves = {name: losses(words, steps) for name, words in RUNS.items()}
    means = {name: smoothed(curve) for name, curve in curves.items()}
    lines = []
    for name, found in means.items():
        off = max(abs(one - other) for one, other in zip(found, means["fp32"], strict=True))
        cells = [f"{found[step - WINDOW]:.4f}" for step in marks]
        lines.append(f"| {name} | {' | '.join(cells)} | {'' if name == 'fp32' else f'{off:.4f}'} |")
    return PAGE.format(
        torch=torch.__version__,
        tokens=TOKENS,
        rows=MLP_WIDTH,
        columns=WIDTH,
        errors="\n".join(errors()),
        command=" ".join(["tune run full_finetune_distributed --config demo/full", *common(steps)]),
        window=WINDOW,
        steps=" | ".join(f"step {step}" for step in marks),
        dashes=" | ".join("---" for _ in marks),
        losses="\n".join(lines),
    )


RUNS = {
    "fp32": ["dtype=fp32"],
    "bf16": ["dtype=bf16"],
    "fp32, int8": ["dtype=fp32", "matmul_dtype=int8"],
    "bf16, int8": ["dtype=bf16", "matmul_dtype=int8"],
    "bf16, fp8": ["dtype=bf16", "matmul_dtype=fp8"],
    "other seed": ["dtype=fp32", "seed=43"],
}


def common(steps: int) -> list[str]:
    """What all runs have."""
    return [
        "device=auto",
        f"max_steps={steps}",
        "epochs=1000",
        "batch_size=8",
        "log.every_n_steps=1000",
        "checkpoint.save_model=false",
    ]


def losses(words: list[str], steps: int) -> list[float]:
    """Training losses of a run, step by step."""
    check, lever._check_fp8 = lever._check_fp8, lambda device: None
    try:
        with tempfile.TemporaryDirectory() as folder:
            own = [f"output_dir={folder}/run", "~validation", *words]
            code = tune(
                ["run", "--no-plan", "full_finetune_distributed", "--config", "demo/full", *common(steps), *own]
            )
            if code:
                raise SystemExit(f"a run ended with exit code {code}")
            return [line["loss"] for line in read_metrics(Path(folder) / "run")]
    finally:
        lever._check_fp8 = check


def smoothed(curve: list[float]) -> list[float]:
    """Means of WINDOW losses, from the first WINDOW on."""
    return [statistics.fmean(curve[end - WINDOW : end]) for end in range(WINDOW, len(curve) + 1)]


def errors() -> list[str]:
    """Rows of the first table."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(TOKENS, WIDTH, generator=generator)
    spikes = plain.clone()
    spikes[:, ::100] *= 30
    weight = torch.randn(MLP_WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    gradient = torch.randn(TOKENS, MLP_WIDTH, generator=generator)
    rows = []
    for name, hidden in (("normal", plain), ("spikes", spikes)):
        rounded = [tensor.bfloat16() for tensor in (hidden, weight, gradient)]
        exact = products([tensor.double() for tensor in rounded], "")
        for kind in ("bf16", "int8", "fp8"):
            found = products(rounded, "" if kind == "bf16" else kind)
            off = [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]
            rows.append(f"| {name} | {kind} | {' | '.join(f'{100 * share:.2f} %' for share in off)} |")
    return rows


def products(operands: list[Tensor], kind: str) -> list[Tensor]:
    """Of input, weight and output's gradient the output and both gradients; kind "": in the tensors' own type."""
    hidden, weight = (tensor.clone().requires_grad_() for tensor in operands[:2])
    out = scaled_linear(hidden, weight, None, kind) if kind else torch.nn.functional.linear(hidden, weight)
    out.backward(operands[2])
    return [out.detach(), *(leaf.grad for leaf in (hidden, weight) if leaf.grad is not None)]


if __name__ == "__main__":
    sys.exit(main())
