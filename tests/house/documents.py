"""README and docs as the house tests read them: fenced blocks with their kind, commands, links."""

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.house.files import ROOT

# `<!-- rows: alpaca -->` above a block says what it is.
_BLOCK = re.compile(
    r"(?:<!-- (\w+): ([\w.]+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"\]\(([^)#\s]+)(#[\w-]+)?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block. language: `bash`, `json`, ...; mark, name: of the comment above it, if there
    is one.
    """

    language: str
    text: str
    mark: str
    name: str

    def commands(self) -> list[list[str]]:
        """The command lines of a bash block as words; a backslash joins lines."""
        joined = self.text.replace("\\\n", " ")
        return [
            shlex.split(line)
            for line in joined.splitlines()
            if line.strip() and not line.startswith("#")
        ]


@cache
def list_documents() -> list[Path]:
    """README, CONTRIBUTING and everything under docs that people read."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def list_blocks(path: Path) -> list[Block]:
    """The fenced blocks of a file, in order."""
    found = _BLOCK.findall(path.read_text(encoding="utf-8"))
    return [Block(language, text, mark, name) for mark, name, language, text in found]


def list_links(path: Path) -> list[str]:
    """Targets of relative links."""
    return [
        target
        for target, _ in _LINK.findall(path.read_text(encoding="utf-8"))
        if "://" not in target
    ]
