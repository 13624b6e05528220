"""What INT4 costs: held-out losses of small models, rounded after training and with rounding
trained in.

    python -m benchmarks.qat --output docs/measurements/qat.md       about ten minutes of CPU time

The folder that REALDATA_DIR names has stories260K-hf, real weights. For each seed two runs of as
many steps from the same random weights with the same rows: one without `qat`, one whose later half
trains with it. Each exported folder is loaded by transformers, as it is and quantized by torchao,
and all held-out answers are scored there; what the second run's own last validation said is next to
it.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.realdata import find_real_data
from recipe_lib.cli.main import main as tune
from recipe_lib.config import FullFinetuneConfig, load_config
from recipe_lib.config.paths import get_configs_folder
from recipe_lib.data import build_dataset
from recipe_lib.data.batches import make_validation_steps
from recipe_lib.logs import silence_torchao
from recipe_lib.memory.qat import build_torchao_config
from recipe_lib.tokenizers import load_tokenizer
from recipe_lib.training.records import read_metrics

KIND, HELD_OUT = "int4", "examples/demo/heldout.jsonl"
NAMES = ("without qat", "without qat, int4 after it", "with qat", "with qat, int4 after it")


@dataclass(frozen=True)
class Setup:
    """A model, the weights that share a scale, how long it is trained, and what its runs set
    besides.
    """

    model: str
    group: int
    steps: int
    overrides: tuple[str, ...] = ()


# Of real weights; with the demo's model, but that 128 divides its rows.
REAL = "stories260K-hf"
STORIES = f"{os.environ.get('REALDATA_DIR', 'REALDATA_DIR')}/{REAL}"
FINE_TUNED = (
    "~model.preset",
    f"model.path={STORIES}",
    f"tokenizer.path={STORIES}",
    "optimizer.lr=1e-3",
    "batch_size=8",
)
SETUPS = (
    Setup("stories260K-hf, fine-tuned", 4, 200, FINE_TUNED),
    Setup("demo/0.5M", 32, 600),
    Setup("benchmarks/qat_model.json", 128, 500, ("model.preset=benchmarks/qat_model.json",)),
)

PAGE = """# Quantization-aware training, held-out losses

Made by `python -m benchmarks.qat --output docs/measurements/qat.md` on a CPU: torch {torch}, torchao {torchao},
transformers {transformers}. Small models are trained on the demo's rows, in fp32: one run without `qat`, one of the
same seed whose later half has it. The first model is fine-tuned (real weights of 260 K parameters, from the folder
that `REALDATA_DIR` names), the others begin at random. INT4 is torchao's `IntxWeightOnlyConfig` for the layers'
linears. Loss in nats per token of the answers of the {rows} rows of `{held_out}`, computed by transformers' model;
perplexity is its exponential.
"""

SECTION = """
## {model}, a scale for {group} weights

    {command}

| model | {seeds} | mean loss | perplexity |
| --- | {dashes} | ---: | ---: |
{table}

Rounding after training costs {after:.4f} nats on average ({all_after}). Trained with rounding, the rounded model is
{trained:+.4f} from the other run's before that was rounded ({all_trained}), and better than that one rounded on
{better} of {count} seeds. Before either is rounded the two runs of a seed are {apart} apart.
In training, the last validations of the runs with `qat` gave what transformers gives for their quantized exports, to
{off:.1e}.
"""


def main(argv: list[str] | None = None) -> int:
    """Writes the page, or prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each run, for a trial")
    parser.add_argument(
        "--only",
        type=int,
        choices=[setup.group for setup in SETUPS],
        help="weights that share a scale",
    )
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    silence_torchao()
    if arguments.only in (None, SETUPS[0].group):
        find_real_data(REAL)
    setups = [
        replace(setup, steps=arguments.steps or setup.steps)
        for setup in SETUPS
        if arguments.only in (None, setup.group)
    ]
    page = build_page(setups, arguments.seeds)
    if arguments.output is None:
        print(page, end="")
    else:
        arguments.output.write_text(page, encoding="utf-8")
    return 0


def build_page(setups: Sequence[Setup], seeds: int) -> str:
    """Trains and scores everything."""
    return PAGE.format(
        torch=torch.__version__,
        torchao=version("torchao"),
        transformers=version("transformers"),
        rows=len(tokenize_held_out(setups[0])),
        held_out=HELD_OUT,
    ) + "".join(format_section(setup, seeds) for setup in setups)


def format_section(setup: Setup, seeds: int) -> str:
    """One setup's table, and what it comes to."""
    found = [run_losses(setup, seed) for seed in range(seeds)]
    losses = [one for one, _ in found]
    rows = []
    for number, name in enumerate(NAMES):
        column = [one[number] for one in losses]
        mean = statistics.fmean(column)
        rows.append(
            f"| {name} | {' | '.join(f'{loss:.4f}' for loss in column)} | {mean:.4f} |"
            f" {math.exp(mean):.4f} |"
        )
    after, trained = ([one[number] - one[0] for one in losses] for number in (1, 3))
    return SECTION.format(
        model=setup.model,
        group=setup.group,
        command=" ".join(["tune run demo/full", *build_words(setup, 0), *add_qat(setup)]).replace(
            STORIES, "stories260K-hf"
        ),
        seeds=" | ".join(f"seed {seed}" for seed in range(seeds)),
        dashes=" | ".join("---:" for _ in range(seeds)),
        table="\n".join(rows),
        after=statistics.fmean(after),
        all_after=", ".join(f"{one:+.4f}" for one in after),
        trained=statistics.fmean(trained),
        all_trained=", ".join(f"{one:+.4f}" for one in trained),
        apart=", ".join(f"{one[2] - one[0]:+.4f}" for one in losses),
        better=sum(one[3] < one[1] for one in losses),
        count=seeds,
        off=max(off for _, off in found),
    )


def build_words(setup: Setup, seed: int) -> list[str]:
    """What all runs set."""
    steps = setup.steps
    return [
        *setup.overrides,
        f"max_steps={steps}",
        f"seed={seed}",
        f"validation.every_n_steps={steps}",
        "log.every_n_steps=1000",
    ]


def add_qat(setup: Setup) -> list[str]:
    """What a run with rounding sets besides."""
    return [f"qat={KIND}", f"qat_group_size={setup.group}", f"qat_start_step={setup.steps // 2}"]


def load_run_config(setup: Setup, seed: int) -> FullFinetuneConfig:
    """Of the runs without rounding."""
    return load_config(
        get_configs_folder() / "demo" / "full.yaml", build_words(setup, seed), FullFinetuneConfig
    )


def run_losses(setup: Setup, seed: int) -> tuple[list[float], float]:
    """Losses as in NAMES, and by how much a run's own last validation is off the last of them."""
    found, own = [], 0.0
    for rounding in ([], add_qat(setup)):
        with tempfile.TemporaryDirectory() as folder:
            output = [*build_words(setup, seed), *rounding, f"output_dir={folder}/run"]
            if code := tune(["run", "--no-plan", "demo/full", *output]):
                raise SystemExit(f"a run ended with exit code {code}")
            run = Path(folder) / "run"
            found += [score(run / "model", setup, quantized) for quantized in (False, True)]
            own = [
                line["validation_loss"] for line in read_metrics(run) if "validation_loss" in line
            ][-1]
    return found, abs(own - found[-1])


def tokenize_held_out(setup: Setup) -> Any:
    """The rows that no run has trained on, tokenized as in validation."""
    cfg = load_run_config(setup, 0)
    cfg.data.source = HELD_OUT
    return build_dataset(cfg.data, load_tokenizer(Path(str(cfg.tokenizer.path))), cfg.max_seq_len)


@torch.no_grad()
def score(folder: Path, setup: Setup, quantized: bool) -> float:
    """Mean loss of the held-out answers by transformers' model, which torchao quantizes while it is
    loaded.
    """
    from transformers import AutoModelForCausalLM, TorchAoConfig

    rounding = (
        TorchAoConfig(quant_type=build_torchao_config(KIND, setup.group)) if quantized else None
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=rounding, dtype=torch.float32
    )
    total, count = 0.0, 0
    for batches in make_validation_steps(tokenize_held_out(setup), 0, 1, 50):
        (batch,) = batches.micro_batches
        logits = model(batch.tokens).logits.double()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
        )
        total, count = total + float(losses), count + int((batch.labels != -100).sum())
    return total / count


if __name__ == "__main__":
    sys.exit(main())
