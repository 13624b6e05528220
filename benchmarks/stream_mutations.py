"""Every wait between streams taken out by its line, in runs of every lever that copies: what the
check then says.

python -m benchmarks.stream_mutations --output docs/measurements/stream_checks.md
"""

import argparse
import linecache
from collections import defaultdict
from pathlib import Path

import torch

from recipe_lib.plan.streams.stream_checker import Line, format_line
from tests.plan.streams.mutations import CASES, check

_MOST_WORDS = 230
TEXT = """# Waits between streams, taken out

By `python -m benchmarks.stream_mutations --output docs/measurements/stream_checks.md`, torch {torch}, on a CPU: two
simulated steps of each run below, once as they are and once for each line of code that makes a stream or the host
wait, without that line's waits. The check is the one of `tune plan --check-streams`.

{runs}

## Lines

`found in`: runs in which the check reports something when the line's waits are gone, of those in which it waits. A
line that is found in none is needless there: what it waits for is waited for by another line too.

{lines}
"""
# Needless, and why.
REASONS = {
    "self._comm_ctx.all_gather_stream.wait_stream(current_stream)": (
        "each gather waits for its copy-in's stream"
    ),
    "self._comm_ctx.all_gather_stream.wait_event(all_gather_state.event)": "the same",
    "self.comm_ctx.all_gather_stream.wait_event(event)": "the same",
    "self._device_handle.current_stream().wait_event(rs_state.event)": (
        "the gradients' own event comes later"
    ),
    "self.device_handle.current_stream().wait_event(self._post_reduce_event)": (
        "the end of backward waits for it too"
    ),
    "torch.get_device_module(device).current_stream().synchronize()": (
        "torch 2.13 waits in its copy, 2.11 does not"
    ),
}


def main() -> None:
    """Prints, and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    runs = [
        "| run | command | ranks | reported as shipped | lines that wait |",
        "|---|---|---:|---:|---:|",
    ]
    found: dict[Line, list[bool]] = defaultdict(list)
    words: dict[Line, str] = {}
    for name, case in CASES.items():
        checker, waits = check(name)
        command = " ".join((case.config, *case.overrides))
        runs.append(
            f"| {name} | `{command}` | {case.ranks} | {len(checker.list_faults())} | {len(waits)} |"
        )
        for line in waits:
            faults = check(name, line)[0].list_faults()
            found[line].append(bool(faults))
            if faults:
                words.setdefault(line, faults[0])
        print(runs[-1], flush=True)
    lines = ["| line | waits in | found in | what is said |", "|---|---:|---:|---|"]
    for line in sorted(
        found, key=lambda line: (not format_line(line).startswith("recipe_lib"), format_line(line))
    ):
        code = linecache.getline(*line).strip()
        said = words.get(line) or f"needless: {REASONS.get(code, code)}"
        short = said if len(said) <= _MOST_WORDS else f"{said[:_MOST_WORDS]}..."
        lines.append(f"| {format_line(line)} | {len(found[line])} | {sum(found[line])} | {short} |")
    output.write_text(
        TEXT.format(torch=torch.__version__, runs="\n".join(runs), lines="\n".join(lines))
    )


if __name__ == "__main__":
    main()
