"""Writes into the header of each shipped config what a rank's peak is planned to be, with the processes of its command.

    python benchmarks/planned_peaks.py              all configs, about four seconds of CPU each
    python benchmarks/planned_peaks.py llama3/8B_full llama3/8B_qlora

Rows are as long as max_seq_len allows. A test estimates the same peaks anew and fails where one has drifted.
"""

import argparse
import math
import multiprocessing
import os
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from recipe_lib.config.places import configs_folder  # noqa: E402
from recipe_lib.units import format_bytes  # noqa: E402

DEVICE = "rtx4090"
PEAK = re.compile(
    r"^# Planned peak of a rank: ([0-9.]+) ([GM]iB) active, ([0-9.]+) ([GM]iB) reserved \(.*\)\.\n", re.MULTILINE
)
_COMMAND = re.compile(r"^#   tune (run|download)\b.*", re.MULTILINE)
_PROCESSES = re.compile(r"--(?:nnodes|nproc_per_node) (\d+)")
_BLANK = "\n#\n"


def names() -> list[str]:
    """The shipped configs."""
    return sorted(
        path.relative_to(configs_folder()).with_suffix("").as_posix() for path in configs_folder().rglob("*.yaml")
    )


def ranks_of(text: str) -> int:
    """The processes of the first `tune run` in a config's header, on all of its machines."""
    command = next(match[0] for match in _COMMAND.finditer(text) if match[1] == "run")
    return math.prod(map(int, _PROCESSES.findall(command)))


def write_peak(name: str) -> str:
    """Plans one config and writes its line; returns it."""
    from recipe_lib.plan.make import make_plan
    from tests.plan.apart import settings

    path = configs_folder() / f"{name}.yaml"
    text = PEAK.sub("", path.read_text(encoding="utf-8"))
    ranks = ranks_of(text)
    plan, _ = make_plan(*settings(name, ranks, device=DEVICE))
    peak = f"{format_bytes(plan.heaviest.peak.active)} active, {format_bytes(plan.heaviest.reserved)} reserved"
    many = f"{ranks} ranks" if ranks > 1 else "1 rank"
    line = f"# Planned peak of a rank: {peak} ({many}, rows of {plan.sequence['tokens']} tokens)."
    commands = next(iter(_COMMAND.finditer(text))).start()
    at = text.rindex(_BLANK, 0, commands) + 1  # below what the config is for
    path.write_text(f"{text[:at]}{line}\n{text[at:]}", encoding="utf-8")
    return f"{name}: {line}"


def main() -> None:
    """Plans the configs that are named, or all, on all cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CONFIG")
    chosen = parser.parse_args().names or names()
    import recipe_lib.plan.make  # noqa: F401  (once, for all processes)

    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=8) as pool:
        for line in pool.imap_unordered(write_peak, chosen):
            print(line, flush=True)


if __name__ == "__main__":
    main()
