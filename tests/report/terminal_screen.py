"""Emulate a terminal: `read_lines(text)` gives what a stream leaves on the screen.

It knows the few escape codes that the library writes. Lines never wrap. As in tmux, a screen that
is erased from its first position on stays in the history.
"""

import io
import re

# An escape code (number, letter), or any other character.
CODES = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|(.)", re.DOTALL)


class Terminal(io.StringIO):
    """Standard error as it is on a terminal; `read_lines(stream.getvalue())` gives the screen."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def read_lines(text: str) -> list[str]:
    """Return the lines on the screen after `text`, history first, without the last empty ones."""
    lines = [""]
    row = 0
    column = 0
    history: list[str] = []
    for number, code, letter in CODES.findall(text):
        if code == "A":  # cursor up
            row = max(0, row - int(number or 1))
        elif code == "C":  # cursor right
            column += int(number or 1)
        elif code == "K":  # erase to the end of the line
            lines[row] = lines[row][:column]
        elif code == "J":  # erase to the end of the screen
            if row == column == 0:
                history += [line for line in lines if line.strip()]
            lines = [*lines[:row], lines[row][:column]]
        elif code == "m":  # color
            continue
        elif code:
            raise AssertionError(f"an unknown code: {code}")
        elif letter == "\r":
            column = 0
        elif letter == "\n":
            row += 1
            column = 0
            if row == len(lines):
                lines.append("")
        else:
            lines[row] = lines[row][:column].ljust(column) + letter + lines[row][column + 1 :]
            column += 1
    while lines and not lines[-1].strip():
        lines.pop()
    return [*history, *(line.rstrip() for line in lines)]
