"""Take out every wait between streams, line by line, and show what `--check-streams` then reports.

    python -m benchmarks.stream_mutations --output docs/measurements/stream_checks.md

A case (of tests/plan/streams/mutations.py) is a simulated run. It is checked as it is, and once for
each line of code, ours or torch's, that makes a stream or the host wait, without that line's waits.
"""

import argparse
import linecache
from collections import defaultdict
from pathlib import Path

import torch

from recipe_lib.plan.streams.code_lines import Line, format_line
from tests.plan.streams.mutations import CASES, check

_MAX_CHARACTERS = 230  # of a message in the table
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
# Code of a line that waits needlessly -> why.
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
    """Print the runs as they are checked, and write the page."""
    parser = argparse.ArgumentParser(
        description="Take out waits between streams, and show what `--check-streams` then reports."
    )
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    runs = [
        "| run | command | ranks | reported as shipped | lines that wait |",
        "|---|---|---:|---:|---:|",
    ]
    # By line, for each run in which it waits: the check reports something without it.
    detected: dict[Line, list[bool]] = defaultdict(list)
    first_faults: dict[Line, str] = {}  # by line, the first report
    for name, case in CASES.items():
        checker, waits = check(name)
        command = " ".join((case.config, *case.overrides))
        runs.append(
            f"| {name} | `{command}` | {case.ranks} | {len(checker.list_faults())} | {len(waits)} |"
        )
        for line in waits:
            faults = check(name, line)[0].list_faults()
            detected[line].append(bool(faults))
            if faults:
                first_faults.setdefault(line, faults[0])
        print(runs[-1], flush=True)
    lines = ["| line | waits in | found in | what is said |", "|---|---:|---:|---|"]
    for line in sorted(detected, key=_order_lines):
        code = linecache.getline(*line).strip()
        message = first_faults.get(line) or f"needless: {REASONS.get(code, code)}"
        if len(message) > _MAX_CHARACTERS:
            message = f"{message[:_MAX_CHARACTERS]}..."
        cells = [format_line(line), str(len(detected[line])), str(sum(detected[line])), message]
        lines.append(f"| {' | '.join(cells)} |")
    text = TEXT.format(torch=torch.__version__, runs="\n".join(runs), lines="\n".join(lines))
    output.write_text(text)


def _order_lines(line: Line) -> tuple[bool, str]:
    """Return the key by which lines are sorted: ours before torch's, then by their text."""
    text = format_line(line)
    return not text.startswith("recipe_lib"), text


if __name__ == "__main__":
    main()
