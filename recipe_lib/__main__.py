"""`tune`, and `python -m recipe_lib`: the entry point, which imports nothing before it answers
Ctrl-C.
"""

import sys


def start() -> int:
    """Runs `tune` with the process's arguments; returns the exit code."""
    try:
        from recipe_lib.cli.main import main

        return main()
    except KeyboardInterrupt:  # while it imports
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(start())
