"""Recommended settings for 1, 2, 4 and 8 cards of 24 GB, dense models and mixtures of experts, as docs/fit.md.

    python -m benchmarks.fit --output docs/fit.md [--only 8B]

For a model, a way to train it and a number of cards, the search of `tune plan --search` looks for the fastest settings
that fit. The longest sequences are searched with every lever on that makes long sequences cheap.
Needs no GPU, no weights and no data. With --only the other lines are
kept, so that `--only none` writes the page from the kept lines.
"""

import argparse
import bisect
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.fastest_settings import prepared, searched
from recipe_lib.cli.plan import recipe_class
from recipe_lib.cli.recipes import recipe_for
from recipe_lib.config import load_config
from recipe_lib.plan.search.estimate import quick
from recipe_lib.plan.search.estimate_facts import Estimate
from recipe_lib.plan.search.trials import override_text, usable_bytes
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
PIECES = "memory.activation_checkpointing=full"
# Another way to train, for cards on which nothing fits but parameters in host memory: no clipping, a sequence a step.
IN_BACKWARD = (
    "memory.optimizer_in_backward=true", "clip_grad_norm=null", "batch_size=1", "gradient_accumulation_steps=1"
)  # fmt: skip
OFFLOADED = "memory.cpu_offload"
# Tokens of a sequence: powers of two, and quarters between them.
LENGTHS = [quarters * 2**power for power in range(9, 15) for quarters in (4, 5, 6, 7)] + [2**17]


@dataclass
class Line:
    """A line of the page. host: bytes of one rank. longest: tokens of a sequence, with its settings and bytes of host
    memory; 0 where not even the shortest fits. tried: settings that were estimated; skipped: settings, each for more of
    its kind, that were ruled out without a simulation."""

    model: str
    method: str
    cards: int
    settings: list[str] | None
    active: int = 0
    reserved: int = 0
    host: int = 0
    tokens_per_second: float = 0.0
    verdict: str = ""
    longest: int = 0
    longest_host: int = 0
    tried: int = 0
    skipped: int = 0


def main() -> None:
    """Plans and writes the page, line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the page; its lines are kept beside it, as .json")
    parser.add_argument("--only", default="", help="lines whose config has this in it, such as 8B_full")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    kept = arguments.output.with_suffix(".json")
    lines = {tuple(key): Line(**fields) for key, fields in json.loads(kept.read_text())} if kept.exists() else {}
    cells = [(model, method, cards) for model in MODELS for method in METHODS for cards in CARDS]
    wanted = [cell for cell in cells if arguments.only in f"{MODELS[cell[0]]}_{cell[1]}"]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=spawn, max_tasks_per_child=1) as pool:
        for future in as_completed([pool.submit(plan_line, cell) for cell in wanted]):
            line = future.result()
            lines[line.model, line.method, line.cards] = line
            text = json.dumps([[cell, asdict(lines[cell])] for cell in cells if cell in lines], indent=1)
            kept.write_text(text + "\n")
            print(line, file=sys.stderr, flush=True)
    arguments.output.write_text(page([lines[cell] for cell in cells if cell in lines]))


def plan_line(cell: tuple[str, str, int]) -> Line:
    """The fastest settings that fit, and the longest sequence."""
    model, method, cards = cell
    line = Line(model, method, cards, None)
    config, on = f"{MODELS[model]}_{method}", f"{cards}x24GB"
    found = [searched(config, on)]
    if method == "full" and not any(result and OFFLOADED not in result.found[0].changes for result in found):
        found.append(searched(config, on, IN_BACKWARD))
    line.tried, line.skipped = (sum(getattr(result, name) for result in found) for name in ("tried", "skipped"))
    fitting = [(result.found[0], begun) for result, begun in zip(found, ((), IN_BACKWARD), strict=False) if result]
    if not fitting:
        return line
    best, begun = max(fitting, key=lambda pair: pair[0].tokens_per_second)
    line.settings, line.verdict = [*begun, *override_text(best.changes).split()], best.verdict
    line.active, line.reserved, line.host = best.active, best.reserved, best.host
    line.tokens_per_second = best.tokens_per_second
    line.longest, line.longest_host = longest(config, cards, line.settings)
    return line


def longest(config: str, cards: int, words: list[str]) -> tuple[int, int]:
    """Tokens of the longest sequence that fits one at a time, and bytes of host memory, by estimates; see `quick`.

    The model is shared by FSDP, whichever way the line shares it: that has room for the longest.
    """
    kind = recipe_class(recipe_for(config))

    def estimate(tokens: int, *, timed: bool) -> tuple[Estimate, int]:
        cfg, settings = prepared(config, f"{cards}x24GB", with_long_rows(words, tokens, cards))
        return quick(kind, cfg, replace(settings, timed=timed)), usable_bytes(cfg, settings)

    def is_too_long(tokens: int) -> bool:
        found, usable = estimate(tokens, timed=False)
        return found.active > usable

    for tokens in reversed(LENGTHS[: bisect.bisect_left(LENGTHS, True, key=is_too_long)]):
        found, usable = estimate(tokens, timed=True)
        if found.reserved <= usable:
            return tokens, found.host
    return 0, 0


def with_long_rows(words: list[str], tokens: int, cards: int) -> list[str]:
    """A line's settings for one sequence of so many tokens at a time, the model shared by FSDP among the cards."""
    kept = [word for word in words if not word.startswith(("batch_size", "gradient_accumulation", "parallel."))]
    return [*kept, *long_rows(tokens), *(["parallel.strategy=fsdp"] if cards > 1 else [])]


def long_rows(tokens: int) -> list[str]:
    """The settings that make long sequences cheap; logits of 1024 tokens, and the MLPs of 8192, at a time."""
    words = ["batch_size=1", "gradient_accumulation_steps=1", f"max_seq_len={tokens}", PIECES]
    words += ["memory.activation_offload=true", f"memory.loss_chunks={max(1, tokens // 1024)}"]
    return [*words, f"memory.mlp_tiles={max(1, tokens // 8192)}"]


def page(lines: list[Line]) -> str:
    """The page."""
    parts = [
        TEXT.format(command=COMMAND, torch=torch.__version__, long=" ".join(f"`{word}`" for word in long_rows(2**16)))
    ]
    for model, config in MODELS.items():
        for method, title in METHODS.items():
            found = [line for line in lines if (line.model, line.method) == (model, method)]
            if found:
                cfg = load_config(f"{config}_{method}", (), recipe_for(f"{config}_{method}").schema())
                rows = f"{cfg.batch_size * cfg.gradient_accumulation_steps} sequences of {cfg.max_seq_len} tokens"
                recipe = recipe_for(f"{config}_{method}").name
                command = f"tune run --nproc_per_node CARDS {recipe} --config {config}_{method} SETTINGS"
                parts.append(f"## {model}, {title}\n\n`{command}`, {rows} per rank and step.\n\n" + table(found))
    return "\n\n".join(parts) + "\n"


def table(lines: list[Line]) -> str:
    """The lines of one model and method."""
    rows = [
        "| cards | settings | tokens/s | active | reserved | host | verdict | longest sequence | its host | tried |",
        "|---:|---|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    for line in lines:
        tried = f"{line.tried} + {line.skipped}"
        if line.settings is None:
            rows.append(f"| {line.cards} | does not fit | | | | | | | | {tried} |")
            continue
        words = f"`{' '.join(line.settings)}`" if line.settings else "as shipped"  # one span: some go together only
        sizes = " | ".join(map(format_bytes, (line.active, line.reserved, line.host)))
        far = f"{line.longest:,} | {format_bytes(line.longest_host)}" if line.longest else f"under {LENGTHS[0]:,} | "
        speed = format_count(line.tokens_per_second)
        rows.append(f"| {line.cards} | {words} | {speed} | {sizes} | {line.verdict} | {far} | {tried} |")
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

The longest sequence is the longest that fits, one at a time, with the same settings, but for FSDP among all cards, and,
for 65,536 tokens, {long}; lengths are powers of two and quarters between them, none over 131,072. These are estimates,
extrapolated from a few of the model's layers, and not whole plans; what is reserved has to fit, without a margin and
without expandable segments, so that a `risky` line can have less than its shipped length. Its host memory is one
rank's.

Times of mixtures of experts are those of even loads. Their `memory.expert_offload` is not searched: [moe.md](moe.md).

Each table's command is above it. `tune plan` instead of `tune run` shows what such a run takes, byte by byte;
`tune plan --config CONFIG --search --fit 4x24GB` says all settings that were tried.
[Which memory lever to pull](memory_levers.md) explains the settings."""


if __name__ == "__main__":
    main()
