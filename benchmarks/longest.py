"""Find the longest sequences that fit 1, 2, 4 and 8 cards of 24 GB and of 80 GB, by plans.

Run `python -m benchmarks.longest --output docs/longest.json`, then `python -m benchmarks.fit
--output docs/fit.md --only none`, which calls `format_page`. Needs no GPU, weights or data. A cell
is (model, method, number of cards, GB of a card), a line its result; `--only` keeps other lines.
All cards share one sequence by context parallelism. A variant is a set of further overrides.
"""

import argparse
import bisect
import json
import multiprocessing
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.fastest_settings import prepare_request
from recipe_lib.cli.plan_request import find_recipe_class
from recipe_lib.cli.recipes import find_config_recipe
from recipe_lib.errors import UserError
from recipe_lib.plan.build_plan import make_plan
from recipe_lib.plan.plan_schema import FITS
from recipe_lib.plan.search.trials import compute_usable_bytes, estimate_run, sum_transfers
from recipe_lib.units import format_bytes, format_duration

# Names on the page -> shipped configs, without the method.
MODELS = {
    "1B": "llama3_2/1B",
    "8B": "llama3/8B",
    "14B": "qwen2_5/14B",
    "32B": "qwen2_5/32B",
    "70B": "llama3/70B",
    "gpt-oss-20b": "gpt_oss/20B",
}
# By the configs' suffix: titles.
METHODS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
CARDS = (1, 2, 4, 8)
SIZES = (24, 80)  # GB of a card
# Tokens of a sequence: powers of two, and quarters between them, to 4 Mi.
LENGTHS = [quarters * 2**power for power in range(11, 20) for quarters in (4, 5, 6, 7)] + [2**22]
# By method: overrides that save memory and cost time, the fastest first. A later one is taken if it
# has room for sequences half as long again. None changes a result.
VARIANTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "full": ((), ("memory.cpu_offload=true",)),
    "lora": ((), ("memory.stream_layers=true",)),
    "qlora": ((), ("memory.stream_layers=true",)),
}


@dataclass
class Longest:
    """Hold a line: the longest sequence of a model and a method on cards of one size."""

    model: str  # of MODELS
    method: str  # of METHODS
    cards: int
    size: int  # GB of a card
    tokens: int = 0  # of the sequence; 0: not even the shortest fits
    settings: tuple[str, ...] = ()  # overrides
    # Peaks of the rank that takes most, bytes of torch's allocator.
    active: int = 0  # in use by tensors or streams
    reserved: int = 0  # taken from the device
    host: int = 0  # bytes of host memory of all ranks together
    sent: int = 0  # bytes that one rank sends to others in a step
    seconds: float = 0.0  # of a step


def main() -> None:
    """Plan line by line, and write each into the file."""
    parser = argparse.ArgumentParser(
        description="Find the longest sequences that fit cards of 24 GB and of 80 GB.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--only", default="", help="lines in which this pattern is, such as: llama3/70B_full 8x80GB"
    )
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    lines = {}
    if arguments.output.exists():
        lines = {build_cell(line): line for line in read_longest_sequences(arguments.output)}
    cells = []
    for model, method in list_models_and_methods():
        for size in SIZES:
            cells += [(model, method, cards, size) for cards in CARDS]
    chosen_cells = [
        cell for cell in cells if re.search(arguments.only, " ".join(name_config_and_cards(cell)))
    ]
    # A new process for each line: a simulated device cannot be removed from a process.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=spawn, max_tasks_per_child=1) as pool:
        for future in as_completed([pool.submit(plan_line, cell) for cell in chosen_cells]):
            line = future.result()
            lines[build_cell(line)] = line
            entries = [asdict(lines[cell]) for cell in cells if cell in lines]
            arguments.output.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
            print(line, file=sys.stderr, flush=True)


Cell = tuple[str, str, int, int]  # model, method, number of cards, GB of a card


def list_models_and_methods() -> Iterator[tuple[str, str]]:
    """Yield every model with every method."""
    yield from ((model, method) for model in MODELS for method in METHODS)


def name_config_and_cards(cell: Cell) -> tuple[str, str]:
    """Return the config and the cards of a cell, such as `llama3/8B_full`, `8x24GB`."""
    model, method, cards, size = cell
    return f"{MODELS[model]}_{method}", f"{cards}x{size}GB"


def build_cell(line: Longest) -> Cell:
    """Return the cell of a line."""
    return line.model, line.method, line.cards, line.size


def read_longest_sequences(path: Path) -> list[Longest]:
    """Read the lines of a file that `main` wrote."""
    return [
        Longest(**line | {"settings": tuple(line["settings"])})
        for line in json.loads(path.read_text("utf-8"))
    ]


def plan_line(cell: Cell) -> Longest:
    """Find the longest sequence of a cell by the variant that estimates choose.

    If none of its whole plans fits, the other variants are tried. Without any, `tokens` is 0.
    """
    _, method, cards, _ = cell
    variants = VARIANTS[method]
    config, cards_of_size = name_config_and_cards(cell)
    # Indices of LENGTHS.
    guesses = {
        variant: _guess_longest(config, cards_of_size=cards_of_size, variant=variant, cards=cards)
        for variant in variants
    }
    best = variants[0]
    for variant in variants:
        # Two indices further in LENGTHS is half as long again, or nearly.
        if guesses[variant] > guesses[best] + 1:
            best = variant
    # Then those that save most. A second try of `best` finds nothing again.
    for variant in (best, *reversed(variants)):
        if guesses[variant] < 0:
            continue
        line = _find_longest(
            Longest(*cell),
            config=config,
            cards_of_size=cards_of_size,
            variant=variant,
            last_index=guesses[variant],
        )
        if line.tokens:
            return line
    return Longest(*cell)


def build_settings(variant: tuple[str, ...], tokens: int, cards: int) -> tuple[str, ...]:
    """Return the overrides of a line: one sequence at a time, shared by all cards."""
    local_tokens = tokens // cards  # of the sequence, on each card
    overrides = ["batch_size=1", "gradient_accumulation_steps=1", f"max_seq_len={tokens}"]
    overrides += ["memory.activation_checkpointing=full", "memory.activation_offload=true"]
    # A card computes logits for 1,024 tokens at a time, and MLPs for 8,192. The bounds on the
    # number of parts make it more than that from 131,072 tokens a card on.
    overrides += [
        f"memory.loss_chunks={min(128, max(1, local_tokens // 1024))}",
        f"memory.mlp_tiles={min(16, max(1, local_tokens // 8192))}",
    ]
    if cards > 1:
        overrides += [f"parallel.context={cards}", "parallel.strategy=fsdp"]
    return (*overrides, *variant)


def _find_longest(
    line: Longest, config: str, cards_of_size: str, variant: tuple[str, ...], last_index: int
) -> Longest:
    """Return the longest whole plan that fits, of LENGTHS up to `last_index`; `line` if none."""
    for tokens in reversed(LENGTHS[: last_index + 1]):
        planned_line = _plan_length(
            line, config=config, cards_of_size=cards_of_size, variant=variant, tokens=tokens
        )
        if planned_line is not None:
            return planned_line
    return line


def _guess_longest(config: str, cards_of_size: str, variant: tuple[str, ...], cards: int) -> int:
    """Guess the index in LENGTHS of the longest that there is room for; -1: none.

    Memory is nearly linear in the tokens, so two estimates give a straight line.
    """
    recipe_class = find_recipe_class(find_config_recipe(config))
    points = []  # (tokens, active bytes)
    for tokens in (cards * 2**14, cards * 2**16):
        overrides = build_settings(variant, tokens, cards)
        try:
            cfg, settings = prepare_request(config, cards_of_size, overrides)
            estimate = estimate_run(recipe_class, cfg, replace(settings, timed=False))
        except UserError:
            return -1  # such as heads that so many cards cannot share
        points.append((tokens, estimate.active))
    (low_tokens, low_bytes), (high_tokens, high_bytes) = points
    free_bytes = compute_usable_bytes(cfg, settings) - low_bytes
    tokens = free_bytes * (high_tokens - low_tokens) / max(1, high_bytes - low_bytes) + low_tokens
    return bisect.bisect_right(LENGTHS, tokens) - 1


def _plan_length(
    line: Longest, config: str, cards_of_size: str, variant: tuple[str, ...], tokens: int
) -> Longest | None:
    """Make the whole plan of a length; return it as a line, or None if it does not fit.

    line: the cell, filled in the copy that is returned.
    """
    overrides = build_settings(variant, tokens, line.cards)
    cfg, settings = prepare_request(config, cards_of_size, overrides)
    plan, trace = make_plan(find_recipe_class(find_config_recipe(config)), cfg, settings)
    # Notes are of tensors of 2^31 elements or more, which kernels cannot index.
    if plan.verdict != FITS or plan.time is None or plan.notes:
        return None
    heaviest = plan.heaviest
    return replace(
        line,
        tokens=tokens,
        settings=overrides,
        active=heaviest.peak.active,
        reserved=heaviest.reserved,
        host=heaviest.host * line.cards,
        sent=sum_transfers(trace)[0],
        seconds=plan.time.step,
    )


TITLE = """# The longest sequences on 1-8 cards

For those who train on long documents and want to know how many tokens of one sequence their cards \
hold, of 24 GB or
of 80 GB.

```bash
tune plan llama3/8B_full --fit 4x24GB {settings}
```

Nothing here was measured. Every line is a whole plan that fits, with 3 % of the card to spare and \
without expandable
segments, by `python -m benchmarks.longest --output docs/longest.json`. That a length fits does \
not say that a model
understands it: a model knows the positions it was trained with.

| column | what it has |
|---|---|
| longest sequence | one at a time; powers of two and quarters between them, from {shortest:,} to \
{longest:,} |
| `p` | parameters and states in host memory too, where sequences can be half as long again so, or \
nothing fits else |
| `s` | frozen layers streamed from host memory, likewise |
| host | of all ranks together |
| sent | what one rank sends to others in a step |
| step | by the rates of [Recommended settings](fit.md#how-to-read-a-line); for 80 GB an A100's |

The command above has the settings of 65,536 tokens on 4 cards. The cards share every sequence \
(`parallel.context`), and
what layers keep is in host memory. No line has a tensor of 2^31 elements, at which FlashAttention \
2 fails: that is what
bounds an 8B on 80 GB. [Long sequences](long_sequences.md) explains the levers."""
# Override of a variant -> its mark in the table.
MARKS = {"memory.cpu_offload=true": "p", "memory.stream_layers=true": "s"}


def format_page(lines: list[Longest]) -> str:
    """Return the text of docs/fit_longest.md."""
    settings = " ".join(build_settings((), 2**16, 4))
    parts = [TITLE.format(shortest=LENGTHS[0], longest=LENGTHS[-1], settings=settings)]
    for model, method in list_models_and_methods():
        method_lines = [line for line in lines if (line.model, line.method) == (model, method)]
        if method_lines:
            parts += [
                f"## {model}, {METHODS[method]}: `{MODELS[model]}_{method}`",
                _format_table(method_lines),
            ]
    return "\n\n".join(parts)


def _format_table(lines: list[Longest]) -> str:
    """Return a table of the lines of one model and method."""
    rows = [
        "| cards | longest sequence | | active | reserved | host | sent | step |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for line in lines:
        cards = f"{line.cards} x {line.size} GB"
        if not line.tokens:
            rows.append(f"| {cards} | under {LENGTHS[0]:,} | | | | | | |")
            continue
        marks = "".join(mark for word, mark in MARKS.items() if word in line.settings)
        sizes = " | ".join(map(format_bytes, (line.active, line.reserved, line.host, line.sent)))
        rows.append(
            f"| {cards} | {line.tokens:,} | {marks} | {sizes} | {format_duration(line.seconds)} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
