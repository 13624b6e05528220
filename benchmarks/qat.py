"""What INT4 costs: held-out losses of the demo, rounded after training and with rounding trained in.

    python -m benchmarks.qat --output docs/measurements/qat.md       about ten minutes of CPU time

For each seed two runs of as many steps from the same random weights with the same rows: one without `qat`, one whose
later half trains with it. Each exported folder is loaded by transformers, as it is and quantized by torchao, and all
held-out answers are scored there; what the second run's own last validation said is next to it.
"""

import argparse
import math
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from recipe_lib.cli.main import main as tune
from recipe_lib.config import FullFinetuneConfig, load_config
from recipe_lib.config.paths import configs_folder
from recipe_lib.data import build_dataset
from recipe_lib.data.batches import validation_steps
from recipe_lib.logs import silence_torchao
from recipe_lib.memory.qat import base_config
from recipe_lib.tokenizers import load_tokenizer
from recipe_lib.training.records.metrics import read_metrics

KIND, GROUP, HELD_OUT = "int4", 128, "examples/demo/heldout.jsonl"
MODEL = "benchmarks/qat_model.json"  # the demo's, but that 128 divides its rows
NAMES = ("without qat", "without qat, int4 after it", "with qat", "with qat, int4 after it")

PAGE = """# Quantization-aware training, held-out losses

Made by `python -m benchmarks.qat{steps_given} --output docs/measurements/qat.md` on a CPU: torch {torch}, torchao
{torchao}, transformers {transformers}. The demo with rows of 128 and 256 weights (`{model}`), from random
weights, {steps} steps of {batch} rows, fp32; INT4 weights of the layers' linears, a scale for {group} of a row
(`IntxWeightOnlyConfig`); with `qat` from step {start} on. Loss in nats per token of the answers of the {rows} rows of
`{held_out}`, computed by transformers' model; perplexity is its exponential.

    {command}

| model | {seeds} | mean loss | perplexity |
| --- | {dashes} | ---: | ---: |
{table}

Rounding after training costs {after:.4f} nats on average ({all_after}). Trained with rounding, the rounded model is
{trained:+.4f} from the model of the other run before it was rounded ({all_trained}): {recovered}. Two runs differ by
chance too: what the unrounded models of both are apart is {apart}. In training, the last validations of the runs with
`qat` gave what transformers gives for their quantized exports, to {off:.1e}.
"""


def main(argv: list[str] | None = None) -> int:
    """Writes the page, or prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    silence_torchao()
    page = page_of(arguments.steps, arguments.seeds, "" if arguments.steps == 500 else f" --steps {arguments.steps}")
    if arguments.output is None:
        print(page, end="")
    else:
        arguments.output.write_text(page, encoding="utf-8")
    return 0


def page_of(steps: int, seeds: int, steps_given: str = "") -> str:
    """Trains and scores everything."""
    found = [losses_of(seed, steps) for seed in range(seeds)]
    losses = [one for one, _ in found]
    rows = []
    for number, name in enumerate(NAMES):
        column = [one[number] for one in losses]
        mean = statistics.fmean(column)
        rows.append(f"| {name} | {' | '.join(f'{loss:.4f}' for loss in column)} | {mean:.4f} | {math.exp(mean):.4f} |")
    after, trained = ([one[number] - one[0] for one in losses] for number in (1, 3))
    gained = statistics.fmean(after) - statistics.fmean(trained)
    share = gained / statistics.fmean(after)
    return PAGE.format(
        steps_given=steps_given,
        torch=torch.__version__,
        torchao=version("torchao"),
        transformers=version("transformers"),
        steps=steps,
        batch=config(steps, 0).batch_size,
        group=GROUP,
        start=steps // 2 + 1,
        rows=len(held_out(steps)),
        held_out=HELD_OUT,
        command=" ".join(["tune run demo/full", *words(steps, 0), *with_qat(steps)]),
        seeds=" | ".join(f"seed {seed}" for seed in range(seeds)),
        dashes=" | ".join("---:" for _ in range(seeds)),
        table="\n".join(rows),
        after=statistics.fmean(after),
        all_after=", ".join(f"{one:+.4f}" for one in after),
        trained=statistics.fmean(trained),
        all_trained=", ".join(f"{one:+.4f}" for one in trained),
        recovered=f"{share:.0%} of the cost is gained back",
        apart=", ".join(f"{one[2] - one[0]:+.4f}" for one in losses),
        model=MODEL,
        off=max(off for _, off in found),
    )


def words(steps: int, seed: int) -> list[str]:
    """What all runs set."""
    return [
        f"model.preset={MODEL}",
        f"max_steps={steps}",
        f"seed={seed}",
        f"validation.every_n_steps={steps}",
        "log.every_n_steps=1000",
    ]


def with_qat(steps: int) -> list[str]:
    """What a run with rounding sets besides."""
    return [f"qat={KIND}", f"qat_group_size={GROUP}", f"qat_start_step={steps // 2}"]


def config(steps: int, seed: int) -> FullFinetuneConfig:
    """Of the runs without rounding."""
    return load_config(configs_folder() / "demo" / "full.yaml", words(steps, seed), FullFinetuneConfig)


def losses_of(seed: int, steps: int) -> tuple[list[float], float]:
    """Losses as in NAMES, and by how much a run's own last validation is off the last of them."""
    found, own = [], 0.0
    for rounding in ([], with_qat(steps)):
        with tempfile.TemporaryDirectory() as folder:
            output = [*words(steps, seed), *rounding, f"output_dir={folder}/run"]
            if code := tune(["run", "--no-plan", "demo/full", *output]):
                raise SystemExit(f"a run ended with exit code {code}")
            run = Path(folder) / "run"
            found += [score(run / "model", quantized, steps) for quantized in (False, True)]
            own = [line["validation_loss"] for line in read_metrics(run) if "validation_loss" in line][-1]
    return found, abs(own - found[-1])


def held_out(steps: int) -> Any:
    """The rows that no run has trained on, tokenized as in validation."""
    cfg = config(steps, 0)
    cfg.data.source = HELD_OUT
    return build_dataset(cfg.data, load_tokenizer(Path(str(cfg.tokenizer.path))), cfg.max_seq_len)


@torch.no_grad()
def score(folder: Path, quantized: bool, steps: int) -> float:
    """Mean loss of the held-out answers by transformers' model, which torchao quantizes while it is loaded."""
    from transformers import AutoModelForCausalLM, TorchAoConfig

    rounding = TorchAoConfig(quant_type=base_config(KIND, GROUP)) if quantized else None
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=rounding, dtype=torch.float32)
    total, count = 0.0, 0
    for batches in validation_steps(held_out(steps), 0, 1, 50):
        (batch,) = batches.micro_batches
        logits = model(batch.tokens).logits.double()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
        )
        total, count = total + float(losses), count + int((batch.labels != -100).sum())
    return total / count


if __name__ == "__main__":
    sys.exit(main())
