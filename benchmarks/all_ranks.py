"""A plan of 16 ranks: who is in which group, what all of them communicate, and one rank beside the
full model.

    python benchmarks/all_ranks.py --output docs/measurements/all_ranks.md

Prints what `tune plan --full` prints, the tables that are about all ranks.
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
tune plan --nnodes 2 --nproc_per_node 8 full_finetune_distributed --config llama2/7B_full --device h100 \
parallel.tensor=2 parallel.pipeline=2 batch_size=4 gradient_accumulation_steps=32 \
memory.activation_checkpointing=none --full"""
TITLES = (
    "a step of the full model",
    "layers",
    "communication of all ranks",
    "groups of ranks",
    "stages and the ranks",
)

PAGE = """# All ranks of a run, planned

Made by `python benchmarks/all_ranks.py --output docs/measurements/all_ranks.md`: Llama 2 7B on two machines of eight
H100, two pipeline stages, two ranks for each matrix, four shards; 32 micro-batches of 4 sequences of 2048 tokens,
nothing recomputed. Planned, on a machine without a GPU; [the definitions](../plan_report.md#all-ranks).

```bash
{command}
```

From its report:

```text
{least}

{tables}
```
"""


def report() -> str:
    """What the command prints, 100 columns wide."""
    printed = io.StringIO()
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(printed):
        run([*shlex.split(COMMAND)[2:], "--sequence", "max"])
    return printed.getvalue()


def page(text: str) -> str:
    """The page of a report."""
    parts = text.split("\n\n")
    tables = [part for title in TITLES for part in parts if part.startswith(title)]
    least = next(line for line in text.splitlines() if line.startswith("  smallest card"))
    return PAGE.format(command=COMMAND, least=least, tables="\n\n".join(tables))


def main() -> None:
    """Writes the page, or prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="the page")
    arguments = parser.parse_args()
    text = page(report())
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
