"""Run this tool and others head to head on one machine, on the same work.

`python benchmarks/gpu_check.py peers --environments FOLDER` calls `main`. A side is a tool with its
settings, in a virtual environment below FOLDER; ours is in this one. A case is a run that all sides
make; the ground is what it starts from: model, adapter, tokenizer. Rows are sequences of token ids.
Sides take turns, so that what slows the machine slows all. Without a GPU, only losses are compared.
"""

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import (
    REPOSITORY,
    describe_device,
    measure_matmul,
    parse_minutes,
    run_apart,
)
from benchmarks.peers.cases import (
    ALPHA,
    ENVIRONMENTS,
    OURS,
    PACKAGES,
    RANK,
    SIDES,
    TOOLS,
    PeerCase,
    Side,
    list_cases,
)
from benchmarks.peers.ground import make_adapter, make_model, make_rows, make_tokenizer
from benchmarks.peers.planted.running import Result, run
from benchmarks.peers.planted.tool import ENVIRONMENT, make_environment
from benchmarks.peers.report import (
    format_file_name,
    judge,
    read_earlier_cases,
    write_peers_report,
)
from benchmarks.peers.results import CaseEntry, PeersReport, RunRecord, SideResult
from recipe_lib.errors import ConfigError, SetupError, run_for_exit_code
from recipe_lib.models import build_spec, read_preset_config

SCRIPTS = Path(__file__).parent / "scripts"  # run by the sides' own interpreters
RUN_SECONDS = 900.0  # limit of one side's run


def main(argv: list[str]) -> int:
    """Run all sides in turns and write the report after each.

    Returns 1 if a side failed or its losses differ from ours, 2 for a mistake of the user.
    """
    return run_for_exit_code(lambda: _run(_parse_arguments(argv), argv))


def _run(options: argparse.Namespace, argv: list[str]) -> int:
    """Run the cases and sides that the options name; return the exit code.

    Raises ConfigError if `--cases` names none of them.
    """
    started = time.monotonic()
    for name in options.install:
        install(options.environments / name, name)
    device = run_apart(describe_device, 60)
    gpu = device.get("type") == "cuda"
    repeats = options.repeats or (3 if gpu else 1)  # without a GPU no time is compared
    cases = [case for case in list_cases(gpu) if not options.cases or case.name in options.cases]
    if not cases:
        known = ", ".join(case.name for case in list_cases(gpu))
        raise ConfigError(
            f"--cases {','.join(options.cases)}: there are none of these here, expected some of"
            f" {known}"
        )
    sides = [side for side in SIDES if side.tool in options.tools]
    report = PeersReport(
        kind="Head to head" if gpu else "Head to head, dry run on a CPU: no time was measured",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=format_command(argv),
        device=device,
        dtype="bf16" if gpu else "fp32",
        repeats=repeats,
        cases=[],
        matmul=run_apart(measure_matmul, 60).get("flop_per_second") if gpu else None,
        versions={side.name: read_versions(side, options.environments) for side in sides},
    )
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        work = (options.work or Path(folder)).resolve()
        report.model = options.model or ("llama3/8B" if gpu else "demo/0.5M")
        if options.keep:
            path = options.output / format_file_name(device, ".json")
            report.cases += read_earlier_cases(path, [case.name for case in cases])
        for case in cases:
            ground = make_ground(case.own_model or report.model, work, report.dtype)
            entry = CaseEntry(case, model=ground["told"])
            report.cases.append(entry)
            for side, result in run_in_turns(
                case,
                sides=sides,
                repeats=repeats,
                options=options,
                ground=ground,
                work=work,
                gpu=gpu,
                started=started,
            ):
                entry.results[side.name] = result
                # Compares this side's losses with ours, and computes its speed.
                judge(entry, ground["model"], report)
                report.seconds = round(time.monotonic() - started)
                paths = write_peers_report(report, options.output)
    print("\n".join(map(str, paths)))
    return judge_report(report)


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse and check the command line; a mistake ends the process with argparse's exit code 2."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.py peers",
        description="Run this tool and others head to head on one machine, on the same work.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=Path("environments"),
        help="folder of virtual environments",
    )
    parser.add_argument(
        "--install",
        type=_parse_names,
        default=[],
        help=f"environments to make first: {', '.join(PACKAGES)}",
    )
    parser.add_argument(
        "--tools", type=_parse_names, default=list(TOOLS), help="names, with commas; default: all"
    )
    parser.add_argument(
        "--cases", type=_parse_names, default=[], help="names, with commas; default: all"
    )
    parser.add_argument(
        "--model", help="a Llama as a Hugging Face folder, or a shipped preset for random weights"
    )
    parser.add_argument(
        "--repeats", type=int, help="runs of each side; default: 3, without a GPU 1"
    )
    parser.add_argument("--minutes", type=parse_minutes, default=600.0, help="time for all of it")
    parser.add_argument(
        "--work", type=Path, help="folder for model and runs, kept; default: removed"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the earlier report's other cases beside those of now",
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "measurements")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.tools) - set(TOOLS)) + sorted(set(options.install) - set(PACKAGES))
    if unknown:
        parser.error(
            f"found {', '.join(unknown)}, expected tools {', '.join(TOOLS)}; installed:"
            f" {', '.join(PACKAGES)}"
        )
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats: found {options.repeats}, expected 1 or more")
    if set(options.tools) - {"ours"} and not (options.install or options.environments.is_dir()):
        parser.error(
            f"--environments {options.environments}: found no such folder; --install makes what is"
            " to be in it"
        )
    return options


def _parse_names(text: str) -> list[str]:
    """Split names at commas."""
    return [name for name in text.split(",") if name]


def install(folder: Path, name: str) -> None:
    """Make an environment, or put into an existing one what it lacks.

    Raises CalledProcessError if pip fails.
    """
    if not (folder / "bin" / "python").exists():
        make_environment(folder, PACKAGES[name])
        return
    # The benchmark of planted faults makes the same environments, without some later groups.
    for packages in PACKAGES[name][1:]:
        subprocess.run(
            [folder / "bin" / "python", "-m", "pip", "install", "-q", *packages], check=True
        )


def format_command(argv: list[str]) -> str:
    """Return the command line without `--output` and `--work`, which differ by machine."""
    option_indices = {at for at, word in enumerate(argv) if word in ("--output", "--work")}
    # Nor the word after each of them.
    words = [word for at, word in enumerate(argv) if not {at, at - 1} & option_indices]
    return " ".join(["python benchmarks/gpu_check.py peers", *words])


# What all sides are given


@functools.cache
def make_ground(model: str, work: Path, dtype: str) -> dict[str, Any]:
    """Make model, adapter and tokenizer, once.

    model: a Hugging Face folder, or a preset that gets random weights. Returns `told` (the model in
    words), `size` (of its vocabulary), and the folders `model`, `adapter` and `tokenizer`. Raises
    ConfigError if it is no Llama, SetupError if its weights could not be made.
    """
    folder = Path(model).resolve()
    config = read_preset_config(model)
    description = folder.name
    if config["model_type"] != "llama":
        raise ConfigError(
            f"--model {model}: found {config['model_type']}, expected a Llama, which all tools have"
        )
    if not folder.is_dir():
        shape = Path(model).name if model.endswith(".json") else model
        description = f"the shape of {shape}, random weights"
        folder = work / f"{Path(model).name}-{dtype}"
        make = functools.partial(
            make_model, model, folder, torch.bfloat16 if dtype == "bf16" else torch.float32
        )
        # In a process of its own, which gives back the GPU's memory.
        failed = run_apart(lambda: {"made": make()}, RUN_SECONDS).get("failed")
        if failed:
            raise SetupError(
                f"--model {model}: its random weights could not be made: {failed}; look at {folder}"
            )
    size = build_spec(config, model).vocab_size
    adapter = work / f"adapter-{folder.name}"
    tokenizer = work / f"tokenizer-{folder.name}"
    make_adapter(folder, adapter)
    make_tokenizer(size, tokenizer)
    return {
        "told": description,
        "size": size,
        "model": str(folder),
        "adapter": str(adapter),
        "tokenizer": str(tokenizer),
    }


# The sides


def find_python(side: Side, environments: Path) -> str:
    """Return the interpreter of a side's environment; ours is this one."""
    if side.tool == OURS:
        return sys.executable
    return str((environments / ENVIRONMENTS[side.tool] / "bin" / "python").absolute())


def build_environment(gpu: bool) -> dict[str, str]:
    """Return the environment variables of a side's run, which has no network.

    Without a GPU it has one thread, so that sums have one order.
    """
    variables = ENVIRONMENT | {
        "PYTHONPATH": str(REPOSITORY),
        "TUNE_PLAN": "off",  # ours makes no memory plan beside its run
        "ACCELERATE_USE_CPU": str(not gpu).lower(),
    }
    if gpu:
        del variables["OMP_NUM_THREADS"]
        # One GPU, since some tools take all that they see.
        visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        variables["CUDA_VISIBLE_DEVICES"] = visible_gpus.split(",")[0]
    return variables


def read_versions(side: Side, environments: Path) -> dict[str, str]:
    """Read the versions of `side.shown`, as the side's interpreter finds them.

    Empty if there is no such environment or the interpreter fails.
    """
    python = find_python(side, environments)
    if not Path(python).exists():
        return {}
    code = (
        "import importlib.metadata as m, json, sys\nfound = [d for d in m.distributions() if"
        f" d.name in {side.shown!r}]\nprint(json.dumps({{d.name: d.version for d in found}} |"
        " {'python': sys.version.split()[0]}))"
    )
    result = run([python, "-c", code], Path.cwd(), {})
    return dict(json.loads(result.lines[-1][1])) if result.code == 0 else {}


def explain_absence(side: Side, case: PeerCase, environments: Path, gpu: bool) -> str | None:
    """Return why a side takes no part in a case, for the report; None if it does."""
    if side.gpu and not gpu:
        return "not run: needs a GPU"
    python = find_python(side, environments)
    if not Path(python).exists():
        return f"not run: no environment {ENVIRONMENTS[side.tool]}"
    return _find_import_faults(python, side.list_modules(case), gpu)


@functools.cache
def _find_import_faults(python: str, modules: tuple[str, ...], gpu: bool) -> str | None:
    """Return why an interpreter cannot import these modules; None if it can."""
    result = run([python, "-c", f"import {', '.join(modules)}"], Path.cwd(), build_environment(gpu))
    return None if result.code == 0 else f"not run: {explain_end(result)}"


def explain_end(result: Result) -> str:
    """Return why a command failed, in a line for a table's cell."""
    if result.timed_out:
        return f"not done after {result.seconds:.0f} s"
    if "OutOfMemoryError" in result.text or "out of memory" in result.text.lower():
        return "out of memory"
    lines = [line.strip() for _, line in result.lines if line.strip()]
    # Last lines of tracebacks, such as `ValueError: ...`; else the last line of all.
    error_lines = [line for line in lines if "Error" in line.split(" ")[0]]
    reasons = error_lines or lines or [f"ended with {result.code}"]
    return reasons[-1][:200].replace("|", "/")


def run_in_turns(
    case: PeerCase,
    *,
    sides: list[Side],
    repeats: int,
    options: argparse.Namespace,
    ground: Mapping[str, Any],
    work: Path,
    gpu: bool,
    started: float,
) -> Iterator[tuple[Side, SideResult]]:
    """Yield (side, its result so far) after each run: all sides once, then all of them again.

    ground: as `make_ground` returns it. work: folder for runs. started: `time.monotonic()` of the
    program's start, from which `options.minutes` count.
    """
    rows = make_rows(case, ground["size"], work / case.name)
    results: dict[str, SideResult] = {}
    for repeat in range(repeats):
        for side in sides:
            result = results.setdefault(side.name, SideResult())
            if repeat == 0:
                reason = explain_absence(
                    side, case=case, environments=options.environments, gpu=gpu
                )
                if reason:
                    result.absent = reason
            if result.absent is None:
                seconds_left = options.minutes * 60 - (time.monotonic() - started)
                folder = work / case.name / side.name
                task = {**ground, **rows, **build_settings(case, side=side, gpu=gpu, folder=folder)}
                run_record = RunRecord(failed="no time left")
                if seconds_left >= 5:
                    run_record = run_side(
                        side,
                        task=task,
                        environments=options.environments,
                        seconds_left=seconds_left,
                    )
                result.runs.append(run_record)
            end = result.absent or result.runs[-1].failed or "done"
            print(
                f"{time.monotonic() - started:5.0f} s  {case.name}, {side.name}: {end}", flush=True
            )
            yield side, result


def build_settings(case: PeerCase, side: Side, gpu: bool, folder: Path) -> dict[str, Any]:
    """Return the settings of a side's run, for the scripts that run it.

    folder: of this run; the script writes its record to `output` in it.
    """
    return {
        "method": case.method,
        "sequence": case.sequence,
        "batch_size": case.batch_size,
        "steps": case.steps,
        "checkpointing": case.checkpointing,
        "lr": case.lr,
        "rank": RANK,
        "alpha": ALPHA,
        "dtype": "bf16" if gpu else "fp32",
        "device": "cuda" if gpu else "cpu",
        "compiled": side.compiled,
        "liger": side.liger,
        "unsloth": side.tool == "unsloth",
        "folder": str(folder),
        "output": str(folder / "record.json"),
    }


def run_side(
    side: Side, task: dict[str, Any], environments: Path, seconds_left: float
) -> RunRecord:
    """Run a side once; return the record that its script has written, or why it failed.

    task: `build_settings` and the paths of model and rows.
    """
    folder = Path(task["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    output = Path(task["output"])
    output.unlink(missing_ok=True)
    (folder / "task.json").write_text(json.dumps(task, indent=1), encoding="utf-8")
    command = [
        find_python(side, environments),
        str(SCRIPTS / side.script),
        str(folder / "task.json"),
    ]
    gpu = task["device"] == "cuda"
    # A tool's own programs come first.
    paths = f"{Path(command[0]).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    result = run(
        command,
        folder=folder,
        environment=build_environment(gpu) | {"PATH": paths},
        limit=min(RUN_SECONDS, seconds_left),
    )
    (folder / "log.txt").write_text(result.text, encoding="utf-8")
    if result.code != 0 or not output.exists():
        return RunRecord(failed=explain_end(result))
    record = RunRecord(**json.loads(output.read_text(encoding="utf-8")))
    num_finite = 0
    for loss, grad_norm in zip(record.losses, record.grad_norms, strict=True):
        num_finite += math.isfinite(loss) and math.isfinite(grad_norm)
    if num_finite != task["steps"]:
        return RunRecord(failed=f"{num_finite} of {task['steps']} steps with finite numbers")
    return record


def judge_report(report: PeersReport) -> int:
    """Return 0 if every side that took part ended well with losses equal to ours, else 1."""
    for entry in report.cases:
        for result in entry.results.values():
            if result.absent is None and len(result.list_good_runs()) != len(result.runs):
                return 1
        if any(compared.equal is False for compared in entry.comparison.values()):
            return 1
    return 0
