"""Plan models with streamed layers on small cards, and write the table of docs/small_cards.md.

    python -m benchmarks.small_cards --output docs/small_cards.md

A line of the table is one plan, made without a GPU, weights or data. Streamed layers lie in host
memory, each on the card while it runs. The page's text outside of its two marks stays as it is.
"""

import argparse
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recipe_lib.plan.build_plan  # noqa: F401  (once, before the processes are forked)
from recipe_lib.plan.build_plan import make_plan
from recipe_lib.units import format_bytes, format_count
from tests.plan.apart import build_settings, call_in_fork

# What is replaced: (first mark, text between, last mark).
PLANS = re.compile(r"(<!-- plans: .* -->\n)(.*)(<!-- end of plans -->\n)", re.DOTALL)
_HEAD = """\
| model | card | plan | allocated | reserved | host memory | tokens/s | step, s | copies, s | not hidden, s |
|---|---:|---|---:|---:|---:|---:|---:|---:|---:|"""
# Overrides.
STREAM = "memory.stream_layers=true"
WINDOW = "memory.activation_offload=true"
# The optimizer steps each layer in backward, which allows neither a norm of all gradients nor
# gradients summed over micro-batches.
STEPPING = (
    "memory.optimizer_in_backward=true",
    "memory.optimizer_offload=true",
    "clip_grad_norm=null",
    "gradient_accumulation_steps=1",
)
FOUR_BITS = ("optimizer.state_bits=4", "optimizer.stochastic_rounding=true")


@dataclass(frozen=True)
class SmallCard:
    """A line of the table."""

    what: str  # model and way to train it
    card: str  # as `--device` takes it
    config: str  # a shipped one
    words: tuple[str, ...]  # overrides, `key=value`

    @property
    def recipe(self) -> str:
        """Return the recipe whose config it is."""
        is_full = self.config.endswith("full")
        return "full_finetune_distributed" if is_full else "lora_finetune_distributed"

    @property
    def command(self) -> str:
        """Return the command that plans it.

        With `run` in place of `plan` and without `--device` it trains.
        """
        words = [
            "tune",
            "plan",
            self.recipe,
            "--config",
            self.config,
            "--device",
            self.card,
            *self.words,
        ]
        return shlex.join(words)


LINES = (
    SmallCard("8B, QLoRA", card="4GB", config="llama3/8B_qlora", words=(STREAM,)),
    SmallCard("32B, QLoRA", card="8GB", config="qwen2_5/32B_qlora", words=(STREAM,)),
    SmallCard("70B, QLoRA", card="8GB", config="llama3/70B_qlora", words=(STREAM, WINDOW)),
    SmallCard("70B, QLoRA", card="24GB", config="llama3/70B_qlora", words=(STREAM,)),
    SmallCard(
        "8B, full, 4 sequences",
        card="8GB",
        config="llama3/8B_full",
        words=(STREAM, *STEPPING, "batch_size=4", WINDOW),
    ),
    SmallCard(
        "70B, full", card="24GB", config="llama3/70B_full", words=(STREAM, *STEPPING, *FOUR_BITS)
    ),
    SmallCard(
        "70B, full, 8 sequences",
        card="24GB",
        config="llama3/70B_full",
        words=(STREAM, *STEPPING, *FOUR_BITS, WINDOW, "batch_size=8", "memory.mlp_tiles=4"),
    ),
)


def plan_line(line: SmallCard) -> dict[str, Any]:
    """Plan a line and return its figures.

    `allocated`, `reserved` and `outside` (of torch) are bytes on the card, `host` in host memory.
    `step`, `copies` and `exposed` (copies that no kernel hides) are seconds, `rate` is tokens a
    second.
    """
    plan, _ = make_plan(*build_settings(line.config, 1, *line.words, device=line.card))
    rank, time = plan.heaviest, plan.time
    assert time is not None
    return {
        "verdict": plan.verdict,
        "allocated": rank.peak.allocated,
        "reserved": rank.reserved,
        "outside": plan.outside.total,
        "host": rank.host,
        "step": time.step,
        "rate": time.tokens_per_second,
        "copies": time.copies,
        "exposed": time.copies_exposed,
    }


def format_row(line: SmallCard, figures: dict[str, Any]) -> str:
    """Return a line of the page's table. figures: what `plan_line` returned."""
    sizes = [format_bytes(figures[key]) for key in ("allocated", "reserved", "host")]
    return (
        f"| {line.what} | {line.card.replace('GB', ' GB')} | {figures['verdict']} |"
        f" {' | '.join(sizes)} | {format_count(figures['rate'])} | {figures['step']:.1f} |"
        f" {figures['copies']:.1f} | {figures['exposed']:.1f} |"
    )


def format_table(planned: list[dict[str, Any]]) -> str:
    """Return what the page has between its two marks. planned: figures of each line of LINES.

    Raises AssertionError if the cards do not all need as much outside of torch.
    """
    outside = {format_bytes(figures["outside"]) for figures in planned}
    assert len(outside) == 1, outside
    rows = "\n".join(
        format_row(line, figures) for line, figures in zip(LINES, planned, strict=True)
    )
    commands = "\n".join(line.command for line in LINES)
    return (
        f"A card also has to hold what is outside of torch: {outside.pop()}.\n\n{_HEAD}\n{rows}\n\n"
        f"```bash\n{commands}\n```\n"
    )


def main() -> None:
    """Plan every line and write the page."""
    parser = argparse.ArgumentParser(description="Plan models with streamed layers on small cards.")
    parser.add_argument("--output", type=Path, required=True, help="docs/small_cards.md")
    output = parser.parse_args().output
    table = format_table([call_in_fork(plan_line, line) for line in LINES])
    text = output.read_text(encoding="utf-8")
    text = PLANS.sub(lambda match: f"{match[1]}{table}{match[3]}", text)
    output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
