"""Plan a run of 16 ranks and write the tables of its report that are about all ranks.

Run `python benchmarks/all_ranks.py --output docs/measurements/all_ranks.md`. The tables are parts
of what `tune plan --full` prints: groups of ranks, communication, one rank beside the full model.
"""

import argparse
import contextlib
import io
import os
import shlex
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from recipe_lib.cli.plan import run  # noqa: E402

COMMAND = """\
tune plan --nnodes 2 --nproc_per_node 8 full_finetune_distributed --config llama2/7B_full \
--device h100 parallel.tensor=2 parallel.pipeline=2 batch_size=4 gradient_accumulation_steps=32 \
memory.activation_checkpointing=none --full"""
# Beginnings of the tables that are taken, in the page's order.
TITLES = (
    "a step of the full model",
    "layers",
    "communication of all ranks",
    "groups of ranks",
    "stages and the ranks",
)

PAGE = """# All ranks of a run, planned

Made by `python benchmarks/all_ranks.py --output docs/measurements/all_ranks.md`: Llama 2 7B on \
two machines of eight
H100, two pipeline stages, two ranks for each matrix, four shards; 32 micro-batches of 4 sequences \
of 2048 tokens,
nothing recomputed. Planned, on a machine without a GPU; [the \
definitions](../plan_report.md#all-ranks).

```bash
{command}
```

From its report:

```text
{least}

{tables}
```
"""


def run_command() -> str:
    """Run COMMAND in this process and return what it prints, 100 columns wide."""
    printed = io.StringIO()
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(printed):
        run([*shlex.split(COMMAND)[2:], "--sequence", "max"])  # without `tune plan`
    return printed.getvalue()


def format_page(report: str) -> str:
    """Return the page as Markdown. report: what the command has printed."""
    parts = report.split("\n\n")  # tables and paragraphs
    tables = []
    for title in TITLES:
        tables += [part for part in parts if part.startswith(title)]
    smallest_card = next(line for line in report.splitlines() if line.startswith("  smallest card"))
    return PAGE.format(command=COMMAND, least=smallest_card, tables="\n\n".join(tables))


def main() -> None:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(
        description="Plan a run of 16 ranks and write its tables that are about all ranks.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="the page")
    arguments = parser.parse_args()
    text = format_page(run_command())
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
