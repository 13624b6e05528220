"""`tune doctor`: check whether this machine's GPUs, links, memory and folders do what they should.

doctor_probes.py measures, doctor_report.py judges the facts and prints them.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from recipe_lib.cli.arguments import SWITCH, Options, Parser, check_output, find_low_numbers
from recipe_lib.cli.doctor_probes import Step, run_isolated
from recipe_lib.cli.launch import count_cores
from recipe_lib.config.local_files import get_cache_root
from recipe_lib.errors import DONE, ConfigError, raise_faults
from recipe_lib.files import replace_text
from recipe_lib.report.phases import phase

FOUND = 1  # exit code: something is not as it should be
STEP_SECONDS = 60.0  # for one step of a process; the slowest takes some seconds
VERSION = 3  # of what --json writes
# Without GPUs: more would stand in each other's way, and a process takes some 200 MB.
RANKS_PER_CORE = 4
DESCRIPTION = """Looks at this machine as a run would use it: versions, GPUs and whether copies \
between them arrive
whole, collectives by size, copies to the host, rates of matrix products, memory, folders. Says in \
a line each
what is wrong, and what to set. Takes seconds on a CPU, longer with more GPUs; leaves no file but \
that of --write.

  tune doctor
  tune doctor --nproc_per_node 2 --write machine.json
  tune plan --config llama3/8B_full --calibration machine.json

Exit codes: 0 all is well; 1 something is not, see the findings; 2 a mistake to correct."""
OPTIONS: Options = {
    "--nproc_per_node --nproc-per-node": {
        "type": int,
        "metavar": "N",
        "help": "ranks that exchange; default: one a GPU",
    },
    "--output_dir --output-dir": {
        "metavar": "DIR",
        "default": "outputs",
        "help": "where runs will write; default: outputs",
    },
    "--json": SWITCH | {"help": "everything as one JSON object, in place of the report"},
    "--write": {
        "metavar": "FILE",
        "help": "write the measured rates, for `tune plan --calibration FILE`",
    },
}


def run(words: list[str]) -> int:
    """Print facts and findings; write the measured rates where asked to."""
    arguments = read_arguments(words)
    facts = gather_facts(arguments)
    from recipe_lib.cli.doctor_report import ADVICE, find_faults, format_report

    findings = find_faults(facts)
    is_healthy = all(finding["name"] in ADVICE for finding in findings)
    if arguments.json:
        head = {"version": VERSION, "healthy": is_healthy, "findings": findings}
        print(json.dumps(head | facts, indent=2))
    else:
        print(format_report(facts, findings), end="")
    if arguments.write:
        print(write_rates(arguments.write, facts), file=sys.stderr)
    return DONE if is_healthy else FOUND


def parser() -> Parser:
    """Return the options of the verb."""
    return Parser("doctor", DESCRIPTION, OPTIONS)


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the command line; `nproc_per_node` is None for one rank a GPU. Raises ConfigError."""
    arguments = parser().parse(words)
    raise_faults(ConfigError, find_low_numbers(arguments, nproc_per_node=1))
    check_output("--write", arguments.write)
    return arguments


def gather_facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all facts as `--json` shows them: machine, steps, failed, links.

    machine: `describe_machine`. steps: step -> its result. failed: step -> why it failed. links:
    `measure_links`, None for one rank.
    """
    from huggingface_hub import constants

    folders = {
        "output_dir": Path(arguments.output_dir),
        "models": Path(constants.HF_HUB_CACHE),
        "data.cache_dir": get_cache_root(None),
    }
    with phase("measuring this machine's device"):
        device = run_isolated(list_device_steps, seconds=STEP_SECONDS)[0]
    facts: dict[str, Any] = {
        "machine": describe_machine(folders),
        "steps": device.values,
        "failed": device.failed,
        "links": None,
    }
    gpus = len(facts["steps"].get("torch", {}).get("gpus", []))
    ranks = arguments.nproc_per_node or max(1, gpus)
    max_ranks = gpus or RANKS_PER_CORE * count_cores()
    if ranks > max_ranks:
        reason = (
            "the GPUs that torch sees"
            if gpus
            else f"{RANKS_PER_CORE} for each core, as there is no GPU"
        )
        raise ConfigError(
            f"--nproc_per_node: found {ranks}, expected at most {max_ranks}, {reason}"
        )
    # A torch that does not start would fail in each rank again.
    if ranks > 1 and "torch" not in facts["failed"]:
        with phase(f"timing collectives among {ranks} ranks"):
            facts["links"] = measure_links(ranks, gpus > 0)
    return facts


def measure_links(ranks: int, on_gpu: bool) -> dict[str, Any]:
    """Time collectives among ranks on this machine; return backend, ranks, points and failed.

    points: operation, bytes, and seconds of the slowest rank. failed: what hung, broke or gave
    wrong numbers, as "rank 1: all_reduce of 1.00 MiB: why".
    """
    import torch

    from recipe_lib.plan.measured.measure_rates import CPU_SIZES, GPU_SIZES, list_collective_steps

    def list_steps(rank: int, folder: Path) -> Iterable[Step]:
        # This rank's share of the cores, as the others run at the same time.
        if not on_gpu:
            torch.set_num_threads(max(1, count_cores() // ranks))
        sizes = GPU_SIZES if on_gpu else CPU_SIZES
        return list_collective_steps(
            rank, ranks, folder, on_gpu=on_gpu, sizes=sizes, seconds=2 * STEP_SECONDS
        )

    outcomes = run_isolated(list_steps, ranks, STEP_SECONDS)
    points = []
    failed = []
    for rank, outcome in enumerate(outcomes):
        failed += [f"rank {rank}: {name}: {reason}" for name, reason in outcome.failed.items()]
    for name in outcomes[0].values:
        rows = [outcome.values[name] for outcome in outcomes if name in outcome.values]
        # "meet" joins the group and moves nothing; a time without all ranks is none.
        if name == "meet" or len(rows) < ranks:
            continue
        if wrong := sum(row["wrong"] for row in rows):
            failed.append(f"{name}: {wrong} wrong numbers")
        points.append(rows[0] | {"seconds": max(row["seconds"] for row in rows)})
    return {
        "backend": "nccl" if on_gpu else "gloo",
        "ranks": ranks,
        "points": points,
        "failed": failed,
    }


def write_rates(path: str, facts: dict[str, Any]) -> str:
    """Write the rates as a calibration file, if they were measured; return a line about it."""
    from recipe_lib.plan.measured.rates_file import add_links

    steps = facts["steps"]
    links = facts["links"]
    measured = steps.get("calibration")
    if measured is None:
        return f"{path}: not written, as the device's rates could not be measured; see the findings"
    # Times of links where a collective failed or was wrong are no rates.
    if links and links["failed"]:
        links = None
    low_precision = {
        name: steps[f"{name} matmuls"] for name in ("int8", "fp8") if f"{name} matmuls" in steps
    }
    replace_text(Path(path), json.dumps(add_links(measured, links, low_precision), indent=2) + "\n")
    return f"{path}: rates of {measured['device']}; `tune plan --calibration {path}` uses the file"
