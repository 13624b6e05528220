"""Format tables of the pages in docs/measurements."""

from collections.abc import Sequence


def format_markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown. head: titles of the columns. rows: cells, line by line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
