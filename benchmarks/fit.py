"""Search the fastest settings that fit 1, 2, 4 and 8 cards of 24 GB, and write docs/fit*.md.

Run `python -m benchmarks.fit --output docs/fit.md [--only 8B] [--cards 1 2]`; needs no GPU, weights
or data. A cell is (model, method, number of cards), a line its entry in docs/fit.json and on a
page. With `--only` and `--cards`, other lines are kept: `--only none` writes the pages again.
`gpu_cards.py` measures the lines; `python -m benchmarks.longest --output docs/longest.json` must
have run before.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import longest
from benchmarks.fastest_settings import search_settings
from recipe_lib.cli.recipes import find_config_recipe
from recipe_lib.config import load_config
from recipe_lib.plan.search.trials import format_overrides
from recipe_lib.units import format_bytes, format_count

COMMAND = "python -m benchmarks.fit --output docs/fit.md"
# Names on the pages -> shipped configs, without the method.
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
# Hybrids and mixtures of experts by transformers' class, searched for QLoRA on one card alone.
HYBRIDS = {
    "Qwen3.5-9B": "qwen3_5/9B",
    "LFM2-8B-A1B": "lfm2/8B",
    "Gemma-4-26B-A4B": "gemma4/26B",
    "GLM-4.7-Flash": "glm4/flash_30B",
    "Nemotron-3-Nano": "nemotron3/nano_30B",
    "Granite-4-small": "granite4/small_32B",
    "Qwen3.6-35B-A3B": "qwen3_6/35B",
    "Qwen3-Next-80B-A3B": "qwen3_next/80B",
}
CONFIGS = MODELS | HYBRIDS
LARGE = ("32B", "70B", "gpt-oss-20b", "Qwen3-30B-A3B")  # on a page of their own
# By the configs' suffix: titles.
METHODS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
CARDS = (1, 2, 4, 8)
# The optimizer steps in backward, so without clipping and with one sequence a step. Searched where
# nothing else fits, or only with parameters in host memory.
IN_BACKWARD = (
    "memory.optimizer_in_backward=true",
    "clip_grad_norm=null",
    "batch_size=1",
    "gradient_accumulation_steps=1",
)
OFFLOADED = "memory.cpu_offload"  # parameters in host memory


@dataclass
class Line:
    """Hold a line of a page: a cell and the fastest settings that fit it."""

    model: str  # of CONFIGS
    method: str  # of METHODS
    cards: int
    settings: list[str] | None  # overrides; empty: as shipped; None: nothing fits
    # Peaks of the rank that takes most, bytes of torch's allocator.
    active: int = 0  # in use by tensors or streams
    reserved: int = 0  # taken from the device
    host: int = 0  # bytes of host memory of one rank
    tokens_per_second: float = 0.0  # of all cards
    verdict: str = ""  # `fits` or `risky`; empty: nothing fits
    tried: int = 0  # number of settings that were estimated
    # Number of settings that a lower bound ruled out; one may stand for several batch sizes.
    skipped: int = 0
    # True: searched with a release whose layers kept a third more for backward, and in which
    # adapters took longer. It fits still.
    is_older: bool = True


def main() -> None:
    """Search line by line, write each into the .json file, and at the end write the pages."""
    parser = argparse.ArgumentParser(
        description="Search the fastest settings for 24 GB cards and write docs/fit*.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="the first page; the others and the lines, as .json, are beside it",
    )
    parser.add_argument(
        "--only", default="", help="lines whose config has this in it, such as 8B_full"
    )
    parser.add_argument("--cards", type=int, nargs="+", default=CARDS, help="numbers of cards")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    lines_file = arguments.output.with_suffix(".json")
    lines = {}
    if lines_file.exists():
        lines = {tuple(cell): Line(**fields) for cell, fields in json.loads(lines_file.read_text())}
    cells = list_cells()
    chosen_cells = [
        cell
        for cell in cells
        if arguments.only in f"{CONFIGS[cell[0]]}_{cell[1]}" and cell[2] in arguments.cards
    ]
    # A new process for each search: a simulated device cannot be removed from a process.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=spawn, max_tasks_per_child=1) as pool:
        for future in as_completed([pool.submit(plan_line, cell) for cell in chosen_cells]):
            line = future.result()
            lines[line.model, line.method, line.cards] = line
            text = json.dumps(
                [[cell, asdict(lines[cell])] for cell in cells if cell in lines], indent=1
            )
            lines_file.write_text(text + "\n")
            print(line, file=sys.stderr, flush=True)
    longest_lines = longest.read_longest_sequences(arguments.output.with_name("longest.json"))
    pages = format_pages([lines[cell] for cell in cells if cell in lines], longest_lines)
    for name, text in pages.items():
        arguments.output.with_name(name).write_text(text)


def list_cells() -> list[tuple[str, str, int]]:
    """Return all cells: (model, method, number of cards)."""
    return [
        *itertools.product(MODELS, METHODS, CARDS),
        *((model, "qlora", 1) for model in HYBRIDS),
    ]


def plan_line(cell: tuple[str, str, int]) -> Line:
    """Search for the fastest settings that fit a cell, in this process.

    cell: (model, method, number of cards).
    """
    model, method, cards = cell
    line = Line(model, method=method, cards=cards, settings=None, is_older=False)
    config = f"{CONFIGS[model]}_{method}"
    cards_of_size = f"{cards}x24GB"
    plain_search = search_settings(config, cards_of_size)
    searches = [plain_search]
    is_offloaded = not plain_search.fitting or OFFLOADED in plain_search.fitting[0].changes
    if method == "full" and is_offloaded:
        searches.append(search_settings(config, cards_of_size, IN_BACKWARD))
    line.tried = sum(result.tried for result in searches)
    line.skipped = sum(result.skipped for result in searches)
    # Not strict: without the second search there is one result. `fitting` has the fastest first.
    fitting = [
        (result.fitting[0], overrides)
        for result, overrides in zip(searches, ((), IN_BACKWARD), strict=False)
        if result.fitting
    ]
    if not fitting:
        return line
    best, overrides = max(fitting, key=lambda pair: pair[0].speed)
    line.settings = [*overrides, *format_overrides(best.changes).split()]
    line.verdict = best.verdict
    line.active = best.estimate.active
    line.reserved = best.estimate.reserved
    line.host = best.estimate.host
    line.tokens_per_second = best.speed
    return line


def format_pages(lines: list[Line], longest_lines: list[longest.Longest]) -> dict[str, str]:
    """Return the text of each page by its file's name."""
    small = [format_section(lines, model) for model in MODELS if model not in LARGE]
    large = [format_section(lines, model) for model in LARGE]
    hybrids = [format_section(lines, model) for model in HYBRIDS]
    provenance = MADE_BY.format(command=COMMAND, torch=torch.__version__)
    return {
        "fit.md": "\n\n".join([SMALL_TEXT + provenance, *small, *hybrids, HOW]) + "\n",
        "fit_large.md": "\n\n".join([LARGE_TEXT + provenance, *large]) + "\n",
        "fit_longest.md": longest.format_page(longest_lines) + "\n",
    }


def format_section(lines: list[Line], model: str) -> str:
    """Return a model's section of a page: a table for each method that has lines."""
    parts = [f"## {model}"]
    for method, title in METHODS.items():
        method_lines = [line for line in lines if (line.model, line.method) == (model, method)]
        if not method_lines:
            continue
        config = f"{CONFIGS[model]}_{method}"
        recipe = find_config_recipe(config)
        cfg = load_config(config, (), recipe.load_schema())
        sequences = cfg.batch_size * cfg.gradient_accumulation_steps
        command = f"tune run --nproc_per_node CARDS {recipe.name} --config {config} SETTINGS"
        parts += [
            f"### {model}, {title}",
            f"`{command}`, {sequences} sequences of {cfg.max_seq_len} tokens per rank and step.",
            format_table(method_lines),
        ]
    return "\n\n".join(parts)


def format_table(lines: list[Line]) -> str:
    """Return a table of the lines of one model and method."""
    rows = [
        "| cards | settings | tokens/s | active | reserved | host | verdict | tried |",
        "|---:|---|---:|---:|---:|---:|---|---:|",
    ]
    for line in lines:
        tried = f"{line.tried} + {line.skipped}{', older' if line.is_older else ''}"
        if line.settings is None:
            rows.append(f"| {line.cards} | does not fit | | | | | | {tried} |")
            continue
        # One span of code to copy whole, since some settings are refused without the others.
        settings = f"`{' '.join(line.settings)}`" if line.settings else "as shipped"
        sizes = " | ".join(map(format_bytes, (line.active, line.reserved, line.host)))
        speed = format_count(line.tokens_per_second)
        rows.append(f"| {line.cards} | {settings} | {speed} | {sizes} | {line.verdict} | {tried} |")
    return "\n".join(rows)


MADE_BY = (
    """Nothing here was measured. The tables were generated by `{command}` with torch {torch}."""
)

SMALL_TEXT = """# Recommended settings for 1-8 x 24 GB

For those who want a command for a dense model of 1 to 14 billion parameters on 1, 2, 4 or 8 cards \
of 24 GB, or for a hybrid or mixture of experts of 2025 and 2026 on one.

```bash
tune plan --fit 1x24GB --config llama3/8B_qlora
```

Above each table is its command: put the cards of a line in place of CARDS, its settings in place \
of SETTINGS. \
[Larger models and mixtures of experts](fit_large.md) and [the longest sequences](fit_longest.md) \
have pages of their \
own. [Which memory lever to pull](memory_levers.md) explains the settings.

"""

LARGE_TEXT = """# Recommended settings for large models on 1-8 x 24 GB

For those who want a command for a model of 32 or 70 billion parameters, or for a mixture of \
experts, on 1, 2, 4 or 8 \
cards of 24 GB.

```bash
tune plan --fit 4x24GB --config qwen2_5/32B_qlora
```

Above each table is its command: put the cards of a line in place of CARDS, its settings in place \
of SETTINGS. \
[Recommended settings](fit.md#how-to-read-a-line) explains the columns.
Times of mixtures of experts are those of even loads; their experts in host memory are not \
searched: [moe.md](moe.md).

"""

HOW = """## How to read a line

| column | what it has |
|---|---|
| settings | the fastest that `tune plan --search` finds, confirmed by a whole plan |
| tokens/s | of all cards; by the data sheet and [rates of kernels](measurements/planned_times.md) \
of an RTX 3090 |
| active, reserved | bytes of the heaviest rank |
| host | pinned host memory of one rank |
| verdict | `fits` leaves 3 % of the card; `risky` leaves less, or needs \
`PYTORCH_ALLOC_CONF=expandable_segments:True` |
| tried | how many settings were estimated, and how many were ruled out without a simulation; \
`older`: before layers kept a third less for backward (`memory.recompute_cheap`) and LoRA's products \
were added where they are made: such a line fits, and `--search` may find a faster one |

`tune plan` instead of `tune run` shows what such a run takes, byte by byte. `tune plan --config \
CONFIG --search --fit \
4x24GB` prints all settings that were tried.

24GB is a card of which CUDA reports 23.5 GiB; context, NCCL and reserved headroom are subtracted. \
Sequences are as \
long as the config's `max_seq_len`, and as many to a step as the config has.

## What was searched

- DDP and FSDP, with copies of the model, with weights or gradients kept whole through a step \
(ZeRO-1).
- Pipelines with the schedules `1f1b` and `zbv`.
- Checkpointing `none`, `selective` and `full`.
- Every size of micro-batch.
- Only where none of them fits: optimizer states of full fine-tuning in 8 bits or in host memory.
- Where that does not fit either: parameters in host memory. There full fine-tuning is also \
stepped in backward, \
without clipping and with one sequence a step, and the faster of both is the line.

A setting is ruled out without a simulation where parameters, gradients, states and kept \
activations alone take too \
much, or their operations alone take longer than the fastest."""


if __name__ == "__main__":
    main()
