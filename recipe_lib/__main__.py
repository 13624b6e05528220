"""Start `tune`, also as `python -m recipe_lib`."""

import sys


def start() -> int:
    """Run `tune` with the process's arguments; return the exit code, 130 for Ctrl-C."""
    try:
        # Imported here, so that Ctrl-C during the import is answered as well.
        from recipe_lib.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(start())
