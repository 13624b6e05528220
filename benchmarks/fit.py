"""Recommended settings for 1, 2, 4 and 8 cards of 24 GB, from 1B to 70B, as docs/fit.md; every line a whole plan.

    python -m benchmarks.fit --output docs/fit.md [--only 8B]

For a model, a way to train it and a number of cards, settings are planned in the order of LADDERS, each rung slower or
further from the config than the one before; the first that fits is the line. The longest sequences are searched with
every lever on that makes long sequences cheap. Needs no GPU, no weights and no data. With --only the other lines are
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
from typing import Any

import torch

from recipe_lib.cli.choose_strategy import decided
from recipe_lib.cli.plan import recipe_class
from recipe_lib.cli.recipes import recipe_for
from recipe_lib.config import load_config
from recipe_lib.plan.build_plan import PlanSettings, make_plan
from recipe_lib.plan.hardware import parse_fit
from recipe_lib.plan.result import DOES_NOT_FIT
from recipe_lib.plan.search.estimate import quick
from recipe_lib.plan.search.estimate_facts import Estimate
from recipe_lib.plan.search.trials import usable_bytes
from recipe_lib.plan.world.sequence_lengths import planned_sequence
from recipe_lib.plan.world.shape_only_model import plannable
from recipe_lib.units import format_bytes, format_count

COMMAND = "python -m benchmarks.fit --output docs/fit.md"
MODELS = {
    "1B": "llama3_2/1B",
    "3B": "llama3_2/3B",
    "8B": "llama3/8B",
    "14B": "qwen2_5/14B",
    "32B": "qwen2_5/32B",
    "70B": "llama3/70B",
}
METHODS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
CARDS = (1, 2, 4, 8)
ON_HOST, PIECES = "memory.optimizer_offload=true", "memory.activation_checkpointing=full"
IN_BACKWARD = ("memory.optimizer_in_backward=true", "clip_grad_norm=null", "gradient_accumulation_steps=1")
# `rows`: one sequence at a time, as many times as the config has sequences in a step.
LADDERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "full": (
        (),
        ("rows", PIECES),
        ("rows", PIECES, ON_HOST),
        ("batch_size=1", PIECES, *IN_BACKWARD, ON_HOST),
        ("rows", PIECES, "memory.cpu_offload=true"),
    ),
    "lora": ((), ("rows", PIECES), ("rows", PIECES, "memory.cpu_offload=true")),
    "qlora": ((), ("rows", PIECES), ("rows", PIECES, "memory.cpu_offload=true")),
}
# Tokens of a sequence: powers of two, and quarters between them.
LENGTHS = [quarters * 2**power for power in range(9, 15) for quarters in (4, 5, 6, 7)] + [2**17]
CLOSE = 0.02  # of the card: what the estimate may be off by, looked at in full


@dataclass
class Line:
    """A line of the page. host: bytes of one rank. tokens_per_second: None where it is not planned. longest: tokens of
    a sequence, with its settings and bytes of host memory; 0 where not even the shortest fits."""

    model: str
    method: str
    cards: int
    settings: list[str] | None
    active: int = 0
    reserved: int = 0
    host: int = 0
    tokens_per_second: float | None = None
    verdict: str = ""
    longest: int = 0
    longest_host: int = 0


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
    """The first rung that fits, and the longest sequence."""
    model, method, cards = cell
    line = Line(model, method, cards, None)
    for rung in LADDERS[method]:
        found = planned(model, method, cards, rung)
        if found is None:
            continue
        settings, plan, seconds, tokens = found
        rank = plan.heaviest
        line.settings, line.verdict = settings, plan.verdict
        line.active, line.reserved, line.host = rank.peak.active, rank.reserved, rank.host
        if not any("cpu_offload" in word for word in settings):
            line.tokens_per_second = tokens / seconds
        line.longest, line.longest_host = longest(model, method, cards, settings)
        break
    return line


def planned(model: str, method: str, cards: int, rung: tuple[str, ...]) -> tuple[list[str], Any, float, int] | None:
    """(settings, plan, seconds and tokens of a step) of a rung that fits; None for one that does not."""
    own = read(model, method, ())
    rows = f"gradient_accumulation_steps={own.batch_size * own.gradient_accumulation_steps}"
    words = [word for part in rung for word in (["batch_size=1", rows] if part == "rows" else [part])]
    cfg, settings = prepared(model, method, cards, words)
    kind = recipe_class(recipe_for(f"{MODELS[model]}_{method}"))
    if cards > 1 and cfg.parallel.strategy == "auto":
        cfg, _ = decided(kind, cfg, settings)
    estimate = quick(kind, cfg, settings)
    if estimate.active > usable_bytes(cfg, settings) * (1 + CLOSE):
        return None
    plan, _ = make_plan(kind, cfg, replace(settings, timed=False))
    if plan.verdict == DOES_NOT_FIT:
        return None
    return words, plan, estimate.seconds, estimate.tokens


def longest(model: str, method: str, cards: int, words: list[str]) -> tuple[int, int]:
    """Tokens of the longest sequence that fits one at a time, and bytes of host memory, by estimates; see `quick`.

    A config with `parallel.strategy: auto` is estimated with FSDP, which is chosen where only that has the room.
    """
    auto = read(model, method, words).parallel.strategy == "auto"
    strategy = ["parallel.strategy=fsdp"] if auto and cards > 1 else []
    kind = recipe_class(recipe_for(f"{MODELS[model]}_{method}"))

    def estimate(tokens: int, *, timed: bool) -> tuple[Estimate, int]:
        cfg, settings = prepared(model, method, cards, [*with_long_rows(words, tokens), *strategy])
        return quick(kind, cfg, replace(settings, timed=timed)), usable_bytes(cfg, settings)

    def is_too_long(tokens: int) -> bool:
        found, usable = estimate(tokens, timed=False)
        return found.active > usable

    for tokens in reversed(LENGTHS[: bisect.bisect_left(LENGTHS, True, key=is_too_long)]):
        found, usable = estimate(tokens, timed=True)
        if found.reserved <= usable:
            return tokens, found.host
    return 0, 0


def with_long_rows(words: list[str], tokens: int) -> list[str]:
    """A line's settings for one sequence of so many tokens at a time."""
    kept = [word for word in words if not word.startswith(("batch_size", "gradient_accumulation"))]
    return [*kept, *long_rows(tokens)]


def long_rows(tokens: int) -> list[str]:
    """The settings that make long sequences cheap; logits of 1024 tokens, and the MLPs of 8192, at a time."""
    words = ["batch_size=1", "gradient_accumulation_steps=1", f"max_seq_len={tokens}", PIECES]
    words += ["memory.activation_offload=true", f"memory.loss_chunks={max(1, tokens // 1024)}"]
    return [*words, f"memory.mlp_tiles={max(1, tokens // 8192)}"]


def read(model: str, method: str, words: tuple[str, ...] | list[str]) -> Any:
    """The config with these overrides."""
    config = f"{MODELS[model]}_{method}"
    return load_config(config, words, recipe_for(config).schema())


def prepared(model: str, method: str, cards: int, words: list[str]) -> tuple[Any, PlanSettings]:
    """What a plan takes."""
    cfg, _ = plannable(read(model, method, words))
    ranks, hardware = parse_fit(f"{cards}x24GB")
    sequence = planned_sequence(cfg, "max", ranks=ranks)
    return cfg, PlanSettings(hardware=hardware, ranks=ranks, sequence=sequence, phases=("load", "save"))


def page(lines: list[Line]) -> str:
    """The page."""
    parts = [
        TEXT.format(command=COMMAND, torch=torch.__version__, long=" ".join(f"`{word}`" for word in long_rows(2**16)))
    ]
    for model, config in MODELS.items():
        for method, title in METHODS.items():
            found = [line for line in lines if (line.model, line.method) == (model, method)]
            if found:
                cfg = read(model, method, ())
                rows = f"{cfg.batch_size * cfg.gradient_accumulation_steps} sequences of {cfg.max_seq_len} tokens"
                recipe = recipe_for(f"{config}_{method}").name
                command = f"tune run --nproc_per_node CARDS {recipe} --config {config}_{method} SETTINGS"
                parts.append(f"## {model}, {title}\n\n`{command}`, {rows} per rank and step.\n\n" + table(found))
    return "\n\n".join(parts) + "\n"


def table(lines: list[Line]) -> str:
    """The lines of one model and method."""
    rows = [
        "| cards | settings | active | reserved | host | tokens/s | verdict | longest sequence | its host |",
        "|---:|---|---:|---:|---:|---:|---|---:|---:|",
    ]
    for line in lines:
        if line.settings is None:
            rows.append(f"| {line.cards} | does not fit | | | | | | | |")
            continue
        words = f"`{' '.join(line.settings)}`" if line.settings else "as shipped"  # one span: some go together only
        speed = "not planned" if line.tokens_per_second is None else format_count(line.tokens_per_second)
        sizes = " | ".join(map(format_bytes, (line.active, line.reserved, line.host)))
        far = f"{line.longest:,} | {format_bytes(line.longest_host)}" if line.longest else f"under {LENGTHS[0]:,} | "
        rows.append(f"| {line.cards} | {words} | {sizes} | {speed} | {line.verdict} | {far} |")
    return "\n".join(rows)


TEXT = """# Recommended settings for 1-8 x 24 GB

Generated by `{command}` with torch {torch}.

Nothing here was measured: each line is a whole plan (`tune plan`) of the first settings that fit, in this order: the
config as shipped; one sequence at a time with full checkpointing; optimizer states in host memory; for full fine-tuning
also stepped in backward, without clipping and with one sequence per step; everything in host memory, stepped on the
CPU, whose time is not planned. Active and reserved are bytes of the heaviest rank, host those of one rank, which holds
them pinned. Sequences are as long as the config's `max_seq_len`. tokens/s, of all cards, come from data sheets and are
for ranking only. 24GB is a card of which CUDA reports 23.5 GiB; context, NCCL and reserved headroom are subtracted.
`fits` leaves 3 % of the card; `risky` leaves less, or needs `PYTORCH_ALLOC_CONF=expandable_segments:True`.

The longest sequence is the longest that fits, one at a time, with the same settings and, for 65,536 tokens,
{long};
lengths are powers of two and quarters between them, none over 131,072. These are estimates, extrapolated from a few of
the model's layers, and not whole plans; what is reserved has to fit, without a margin and without expandable segments,
so that a `risky` line can have less than its shipped length. Its host memory is one rank's.

Each table's command is above it. `tune plan` instead of `tune run` shows what such a run takes, byte by byte;
`tune plan --config CONFIG --search --fit 4x24GB` looks for the fastest settings rather than the first ones. A config
with `parallel.strategy: auto` is planned with what `tune run` chooses on these cards, DDP or FSDP.
[Which memory lever to pull](memory_levers.md) explains the settings."""


if __name__ == "__main__":
    main()
