"""Plant some thirty mistakes (faults) under our tool and others, and write what each says of them.

    python -m benchmarks.peers.planted_faults --model FOLDER --environments FOLDER --tools ours,trl

A tool is a training program in its own environment, which --install makes. Every run takes seconds:
--model is a small Llama in fp32 (stories260K was used). Results are kept by tool in --results, and
the page is written from all of them. The fault of a small disk needs the right to mount one.
"""

import argparse
import datetime
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.planted.faults import FAULTS, Fault
from benchmarks.peers.planted.ground import make_model
from benchmarks.peers.planted.litgpt import LitGpt
from benchmarks.peers.planted.llamafactory import LlamaFactory
from benchmarks.peers.planted.ours import Ours
from benchmarks.peers.planted.page import format_page
from benchmarks.peers.planted.playing import load_sound_runs, run_one
from benchmarks.peers.planted.states import CHANGES, Change, Unfit
from benchmarks.peers.planted.tool import Tool
from benchmarks.peers.planted.torchtune import Torchtune
from benchmarks.peers.planted.trl import Trl

COMMAND = "python -m benchmarks.peers.planted_faults --model FOLDER --environments FOLDER"
TOOLS: tuple[type[Tool], ...] = (Ours, Trl, Torchtune, LitGpt, LlamaFactory)
RESULTS = Path("docs/measurements/planted_faults.json")


def main(argv: list[str]) -> None:
    """Plant every fault under every tool that was asked for.

    Results are written after each fault, the page at the end. argv: without the program's name.
    """
    arguments = _parse_arguments(argv)
    tools = [kind(arguments.environments) for kind in TOOLS if kind.name in arguments.tools]
    for tool in tools:
        if tool.name in arguments.install:
            tool.install()
    results = _load_kept(arguments.results)
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        work = arguments.work or Path(folder)
        model = work / "model"
        if not model.exists():
            make_model(arguments.model, model)
        for tool in tools:
            tool_results = examine(
                tool,
                work=work / tool.name,
                model=model,
                only=arguments.only,
                before=results.get(tool.name),
            )
            for tool_result in tool_results:
                # Read again: another process may have written its tools.
                results = _load_kept(arguments.results) | {tool.name: tool_result}
                ordered = {name: results[name] for name in sorted(results)}
                text = json.dumps(ordered, indent=1, ensure_ascii=False) + "\n"
                arguments.results.write_text(text, encoding="utf-8")
    arguments.output.write_text(
        format_page(results, [kind.name for kind in TOOLS]), encoding="utf-8"
    )


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Plant some thirty mistakes under our tool and others; show what each says."
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="a small Llama in fp32, as a Hugging Face folder"
    )
    parser.add_argument(
        "--environments", type=Path, required=True, help="folder of the peers' virtual environments"
    )
    parser.add_argument(
        "--tools",
        type=_parse_names,
        default=[kind.name for kind in TOOLS],
        help="names, with commas",
    )
    parser.add_argument(
        "--install", type=_parse_names, default=[], help="tools whose environments to make first"
    )
    parser.add_argument(
        "--only", default="", help="faults that match this regular expression; others are kept"
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="folder for the runs, kept, sound runs for the next time; default: removed",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=RESULTS.with_suffix(".md"))
    return parser.parse_args(argv)


def _load_kept(path: Path) -> dict[str, Any]:
    """Return the results of earlier runs, by tool; {} without the file."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _parse_names(text: str) -> list[str]:
    """Return the names in a text with commas between them."""
    return [name for name in text.split(",") if name]


def examine(
    tool: Tool, work: Path, model: Path, only: str, before: dict[str, Any] | None
) -> Iterator[dict[str, Any]]:
    """Plant the faults under a tool, and yield its results so far after each.

    They are as in the results' file: by fault, `cells` has the fields of its `Outcome`. `unfit` is
    why the runs without a fault fail; then nothing is planted. work: folder for the runs. only:
    regular expression of faults' names; empty: all. before: an earlier result, whose other cells
    are kept.
    """
    started = time.monotonic()
    load = os.getloadavg()[0]  # of the machine, before the runs
    cells: dict[str, Any] = dict(before["cells"]) if before else {}
    tool_result: dict[str, Any] = {
        "title": tool.title,
        "told": tool.told,
        "versions": tool.read_versions(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.date.today().isoformat(),
        "cells": cells,
    }
    try:
        sound, outcomes = load_sound_runs(tool, work, model)
    except Unfit as reason:
        print(f"{tool.name}: {reason}", flush=True)
        yield tool_result | {"unfit": str(reason)}
        return
    cells |= {name: outcome.to_json() for name, outcome in outcomes.items()}
    faults: list[Fault | Change] = [*FAULTS, *CHANGES]
    for fault in faults:
        if only and not re.search(only, fault.name):
            continue
        outcome = run_one(fault, tool=tool, work=work, model=model, sound=sound)
        cells[fault.name] = outcome.to_json()
        evidence = f"{outcome.line[:160]} {outcome.note[:160]}"
        print(
            f"{tool.name:12} {fault.name:18} {outcome.outcome:17} {outcome.seconds:5.1f} s "
            f" {evidence}",
            flush=True,
        )
        tool_result["load"] = [round(load, 1), round(os.getloadavg()[0], 1)]
        tool_result["seconds"] = round(time.monotonic() - started)
        yield tool_result


if __name__ == "__main__":
    main(sys.argv[1:])
