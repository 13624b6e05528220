"""Read README and docs for the house tests: fenced blocks, their commands, links.

House tests, in this folder, check the code's and the pages' own rules.
"""

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.house.files import ROOT

# A fenced block, with the comment above it that says what it is, such as `<!-- rows: alpaca -->`.
_BLOCK = re.compile(
    r"(?:<!-- (\w+): ([\w.]+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
# The target of a link, and its anchor.
_LINK = re.compile(r"\]\(([^)#\s]+)(#[\w-]+)?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a Markdown file."""

    language: str  # `bash`, `json`, ...
    text: str
    mark: str  # "rows" of a comment `<!-- rows: alpaca -->` above the block; empty without one
    name: str  # "alpaca" of that comment; empty without one

    def list_commands(self) -> list[list[str]]:
        """Return the command lines of a bash block as words; a backslash joins lines."""
        joined = self.text.replace("\\\n", " ")
        return [
            shlex.split(line)
            for line in joined.splitlines()
            if line.strip() and not line.startswith("#")
        ]


@cache
def list_documents() -> list[Path]:
    """Return README, CONTRIBUTING and every page under docs."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def list_blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a file, in order."""
    blocks = _BLOCK.findall(path.read_text(encoding="utf-8"))
    return [
        Block(language=language, text=text, mark=mark, name=name)
        for mark, name, language, text in blocks
    ]


def list_links(path: Path) -> list[str]:
    """Return the targets of a file's relative links, in order."""
    return [
        target
        for target, _ in _LINK.findall(path.read_text(encoding="utf-8"))
        if "://" not in target
    ]
