"""Measure what INT4 costs: held-out losses of models rounded after training and during it.

    python -m benchmarks.qat --output docs/measurements/qat.md       about ten minutes of CPU time

For each seed two runs start from the same weights and see the same sequences: one without `qat`
(quantization-aware training), one whose later half has it. Each exported model is scored by
transformers, as it is and quantized by torchao. REALDATA_DIR names a folder with stories260K-hf.
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

KIND = "int4"  # the value of the key `qat`
HELD_OUT = "examples/demo/heldout.jsonl"
# The scores of a seed, in the order in which `run_losses` returns them.
NAMES = ("without qat", "without qat, int4 after it", "with qat", "with qat, int4 after it")


@dataclass(frozen=True)
class Setup:
    """A model and how its runs train it."""

    model: str  # as the page names it
    group: int  # weights of a row that share a scale; has to divide the rows of every linear
    steps: int  # of each run
    overrides: tuple[str, ...] = ()  # of configs/demo/full.yaml, `key=value`


# Real weights: a folder that REALDATA_DIR has. Without the variable the setup can be listed, not
# run.
REAL = "stories260K-hf"
STORIES = f"{os.environ.get('REALDATA_DIR', 'REALDATA_DIR')}/{REAL}"
FINE_TUNED = (
    "~model.preset",
    f"model.path={STORIES}",
    f"tokenizer.path={STORIES}",
    "optimizer.lr=1e-3",
    "batch_size=8",
)
# The last is the demo's model, but that 128 divides the rows of its matrices.
SETUPS = (
    Setup("stories260K-hf, fine-tuned", group=4, steps=200, overrides=FINE_TUNED),
    Setup("demo/0.5M", group=32, steps=600),
    Setup(
        "benchmarks/qat_model.json",
        group=128,
        steps=500,
        overrides=("model.preset=benchmarks/qat_model.json",),
    ),
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
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(
        description="Measure held-out losses of models rounded to INT4 after and during training."
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
        find_real_data(REAL)  # missing data ends the program here, before anything is trained
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
    """Train and score every setup, and return the page. seeds: how many, from 0 on."""
    head = PAGE.format(
        torch=torch.__version__,
        torchao=version("torchao"),
        transformers=version("transformers"),
        rows=len(tokenize_held_out(setups[0])),
        held_out=HELD_OUT,
    )
    return head + "".join(format_section(setup, seeds) for setup in setups)


def format_section(setup: Setup, seeds: int) -> str:
    """Train and score a setup with every seed, and return its section of the page."""
    runs = [run_losses(setup, seed) for seed in range(seeds)]
    columns = [losses for losses, _ in runs]  # of each seed: a loss for each of NAMES
    rows = []
    for number, name in enumerate(NAMES):
        losses = [column[number] for column in columns]
        mean = statistics.fmean(losses)
        cells = [name, *(f"{loss:.4f}" for loss in losses), f"{mean:.4f}", f"{math.exp(mean):.4f}"]
        rows.append(f"| {' | '.join(cells)} |")
    # Differences of losses in nats per token, by seed.
    rounded_after = []  # what rounding costs a run without qat
    trained_with_rounding = []  # the rounded model of the run with qat, to the other unrounded
    apart = []  # both runs unrounded
    num_better = 0  # seeds on which qat's rounded model is better than the other's
    for plain, plain_int4, qat, qat_int4 in columns:
        rounded_after.append(plain_int4 - plain)
        trained_with_rounding.append(qat_int4 - plain)
        apart.append(qat - plain)
        num_better += qat_int4 < plain_int4
    command = " ".join(
        ["tune run demo/full", *build_overrides(setup, 0), *list_qat_overrides(setup)]
    )
    return SECTION.format(
        model=setup.model,
        group=setup.group,
        command=command.replace(STORIES, "stories260K-hf"),
        seeds=" | ".join(f"seed {seed}" for seed in range(seeds)),
        dashes=" | ".join(["---:"] * seeds),
        table="\n".join(rows),
        after=statistics.fmean(rounded_after),
        all_after=", ".join(f"{difference:+.4f}" for difference in rounded_after),
        trained=statistics.fmean(trained_with_rounding),
        all_trained=", ".join(f"{difference:+.4f}" for difference in trained_with_rounding),
        apart=", ".join(f"{difference:+.4f}" for difference in apart),
        better=num_better,
        count=seeds,
        off=max(difference for _, difference in runs),
    )


def build_overrides(setup: Setup, seed: int) -> list[str]:
    """Return the overrides of both runs of a seed."""
    return [
        *setup.overrides,
        f"max_steps={setup.steps}",
        f"seed={seed}",
        f"validation.every_n_steps={setup.steps}",
        "log.every_n_steps=1000",
    ]


def list_qat_overrides(setup: Setup) -> list[str]:
    """Return the overrides that the run with qat has besides: it rounds in its later half."""
    return [f"qat={KIND}", f"qat_group_size={setup.group}", f"qat_start_step={setup.steps // 2}"]


def load_run_config(setup: Setup, seed: int) -> FullFinetuneConfig:
    """Return the config of the run without qat."""
    path = get_configs_folder() / "demo" / "full.yaml"
    return load_config(path, build_overrides(setup, seed), FullFinetuneConfig)


def run_losses(setup: Setup, seed: int) -> tuple[list[float], float]:
    """Train without and with qat; return losses as in NAMES, and how far validation is off.

    The latter is the difference of the last validation loss, from the run with qat, to the loss of
    its quantized export. Raises SystemExit if a run fails.
    """
    losses = []
    validation_losses = []
    for qat_overrides in ([], list_qat_overrides(setup)):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            overrides = [*build_overrides(setup, seed), *qat_overrides, f"output_dir={run}"]
            if code := tune(["run", "--no-plan", "demo/full", *overrides]):
                raise SystemExit(f"a run ended with exit code {code}")
            losses.append(score(run / "model", setup, quantized=False))
            losses.append(score(run / "model", setup, quantized=True))
            for line in read_metrics(run):
                if "validation_loss" in line:
                    validation_losses.append(line["validation_loss"])
    return losses, abs(validation_losses[-1] - losses[-1])


def tokenize_held_out(setup: Setup) -> Any:
    """Return the held-out dataset, tokenized as in validation."""
    cfg = load_run_config(setup, 0)
    cfg.data.source = HELD_OUT
    return build_dataset(cfg.data, load_tokenizer(Path(str(cfg.tokenizer.path))), cfg.max_seq_len)


@torch.no_grad()
def score(folder: Path, setup: Setup, quantized: bool) -> float:
    """Return the mean loss of a token of the held-out answers by transformers' model, in nats.

    folder: of an exported model. quantized: torchao quantizes it while it is loaded.
    """
    from transformers import AutoModelForCausalLM, TorchAoConfig

    quantization = None
    if quantized:
        quantization = TorchAoConfig(quant_type=build_torchao_config(KIND, setup.group))
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.float32
    )
    total = 0.0
    count = 0
    held_out = tokenize_held_out(setup)
    # All rows once; the size of a batch changes no sum.
    for batches in make_validation_steps(held_out, data_rank=0, data_ranks=1, batch_size=50):
        (batch,) = batches.micro_batches
        logits = model(batch.tokens).logits.double()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
        )
        total += float(losses)
        count += int((batch.labels != -100).sum())  # label tokens, which are those of the answers
    return total / count


if __name__ == "__main__":
    sys.exit(main())
