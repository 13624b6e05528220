"""Recommended settings for 1, 2, 4 and 8 cards of 24 GB, dense models and mixtures of experts, as
docs/fit.md.

    python -m benchmarks.fit --output docs/fit.md [--only 8B]

For a model, a way to train it and a number of cards, the search of `tune plan --search` looks for
the fastest settings that fit. The last part of the page is of `benchmarks/longest.py`. Needs no
GPU, no weights and no data. With --only the other lines are kept, so that `--only none` writes the
page from the kept lines.
"""

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import longest
from benchmarks.fastest_settings import searched
from recipe_lib.cli.recipes import recipe_for
from recipe_lib.config import load_config
from recipe_lib.plan.search.trials import format_overrides
from recipe_lib.units import format_bytes, format_count

COMMAND = "python -m benchmarks.fit --output docs/fit.md"
MODELS = {
    "1B": "llama3_2/1B",
    "3B": "llama3_2/3B",
    "8B": "llama3/8B",
    "14B": "qwen2_5/14B",
    "32B": "qwen2_5/32B",
    "70B": "llama3/70B",
    "gpt-oss-20b": "gpt_oss/20B",
    "Qwen3-30B-A3B": "qwen3_moe/30B",
}
METHODS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
CARDS = (1, 2, 4, 8)
# Another way to train, for cards on which nothing fits but parameters in host memory: no clipping,
# a sequence a step.
IN_BACKWARD = (
    "memory.optimizer_in_backward=true", "clip_grad_norm=null", "batch_size=1", "gradient_accumulation_steps=1"
)  # fmt: skip
OFFLOADED = "memory.cpu_offload"


@dataclass
class Line:
    """A line of the page. host: bytes of one rank. tried: settings that were estimated; skipped:
    settings, each for more of its kind, that were ruled out without a simulation.
    """

    model: str
    method: str
    cards: int
    settings: list[str] | None
    active: int = 0
    reserved: int = 0
    host: int = 0
    tokens_per_second: float = 0.0
    verdict: str = ""
    tried: int = 0
    skipped: int = 0


def main() -> None:
    """Plans and writes the page, line by line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="the page; its lines are kept beside it, as .json",
    )
    parser.add_argument(
        "--only", default="", help="lines whose config has this in it, such as 8B_full"
    )
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    kept = arguments.output.with_suffix(".json")
    lines = (
        {tuple(key): Line(**fields) for key, fields in json.loads(kept.read_text())}
        if kept.exists()
        else {}
    )
    cells = [(model, method, cards) for model in MODELS for method in METHODS for cards in CARDS]
    wanted = [cell for cell in cells if arguments.only in f"{MODELS[cell[0]]}_{cell[1]}"]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=spawn, max_tasks_per_child=1) as pool:
        for future in as_completed([pool.submit(plan_line, cell) for cell in wanted]):
            line = future.result()
            lines[line.model, line.method, line.cards] = line
            text = json.dumps(
                [[cell, asdict(lines[cell])] for cell in cells if cell in lines], indent=1
            )
            kept.write_text(text + "\n")
            print(line, file=sys.stderr, flush=True)
    far = longest.read(arguments.output.with_name("longest.json"))
    arguments.output.write_text(page([lines[cell] for cell in cells if cell in lines], far))


def plan_line(cell: tuple[str, str, int]) -> Line:
    """The fastest settings that fit."""
    model, method, cards = cell
    line = Line(model, method, cards, None)
    config, on = f"{MODELS[model]}_{method}", f"{cards}x24GB"
    found = [searched(config, on)]
    if method == "full" and not any(
        result.found and OFFLOADED not in result.found[0].changes for result in found
    ):
        found.append(searched(config, on, IN_BACKWARD))
    line.tried, line.skipped = (
        sum(getattr(result, name) for result in found) for name in ("tried", "skipped")
    )
    fitting = [
        (result.found[0], begun)
        for result, begun in zip(found, ((), IN_BACKWARD), strict=False)
        if result.found
    ]
    if not fitting:
        return line
    best, begun = max(fitting, key=lambda pair: pair[0].speed)
    line.settings, line.verdict = [*begun, *format_overrides(best.changes).split()], best.verdict
    line.active = best.quick.active
    line.reserved = best.quick.reserved
    line.host = best.quick.host
    line.tokens_per_second = best.speed
    return line


def page(lines: list[Line], far: list[longest.Longest]) -> str:
    """The page. far: the longest sequences."""
    parts = [TEXT.format(command=COMMAND, torch=torch.__version__)]
    for model, config in MODELS.items():
        for method, title in METHODS.items():
            found = [line for line in lines if (line.model, line.method) == (model, method)]
            if found:
                cfg = load_config(
                    f"{config}_{method}", (), recipe_for(f"{config}_{method}").schema()
                )
                rows = (
                    f"{cfg.batch_size * cfg.gradient_accumulation_steps} sequences of"
                    f" {cfg.max_seq_len} tokens"
                )
                recipe = recipe_for(f"{config}_{method}").name
                command = (
                    f"tune run --nproc_per_node CARDS {recipe} --config {config}_{method} SETTINGS"
                )
                parts.append(
                    f"## {model}, {title}\n\n`{command}`, {rows} per rank and step.\n\n"
                    + table(found)
                )
    return "\n\n".join([*parts, longest.section(far)]) + "\n"


def table(lines: list[Line]) -> str:
    """The lines of one model and method."""
    rows = [
        "| cards | settings | tokens/s | active | reserved | host | verdict | tried |",
        "|---:|---|---:|---:|---:|---:|---|---:|",
    ]
    for line in lines:
        tried = f"{line.tried} + {line.skipped}"
        if line.settings is None:
            rows.append(f"| {line.cards} | does not fit | | | | | | {tried} |")
            continue
        words = (
            f"`{' '.join(line.settings)}`" if line.settings else "as shipped"
        )  # one span: some go together only
        sizes = " | ".join(map(format_bytes, (line.active, line.reserved, line.host)))
        speed = format_count(line.tokens_per_second)
        rows.append(f"| {line.cards} | {words} | {speed} | {sizes} | {line.verdict} | {tried} |")
    return "\n".join(rows)


TEXT = """# Recommended settings for 1-8 x 24 GB

Generated by `{command}` with torch {torch}.

Nothing here was measured: each line is the fastest that `tune plan --search` finds, confirmed by a whole plan. Searched
are, with the sequences of a step as the config has them: DDP and FSDP, with copies of the model, with weights or
gradients kept whole through a step (ZeRO-1), and pipelines with the schedules `1f1b` and `zbv`; checkpointing `none`,
`selective` and `full`; every size of micro-batch. Only where none of them fits, optimizer states of full fine-tuning
have 8 bits or are in host memory; and where that does not fit, parameters are in host memory. There full fine-tuning is
also stepped in backward, without clipping and with one sequence a step, and the faster of both is the line. The last
column has how many settings were estimated, and how many were ruled out without a simulation: what parameters,
gradients, states and kept activations alone take is too much, or their operations alone take longer than the fastest.

Active and reserved are bytes of the heaviest rank, host those of one rank, which holds them pinned. Sequences are as
long as the config's `max_seq_len`. tokens/s, of all cards, come from data sheets and [rates of
kernels](measurements/planned_times.md), those of an RTX 3090. 24GB is a card of which CUDA reports 23.5 GiB; context,
NCCL and reserved headroom are subtracted. `fits` leaves 3 % of the card; `risky` leaves less, or needs
`PYTORCH_ALLOC_CONF=expandable_segments:True`.

The longest sequences are at the end of the page.

Times of mixtures of experts are those of even loads. Their experts on the host are not searched: [moe.md](moe.md).

Each table's command is above it. `tune plan` instead of `tune run` shows what such a run takes, byte by byte;
`tune plan --config CONFIG --search --fit 4x24GB` says all settings that were tried.
[Which memory lever to pull](memory_levers.md) explains the settings."""


if __name__ == "__main__":
    main()
