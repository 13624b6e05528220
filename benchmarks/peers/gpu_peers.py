"""`gpu_check.py peers`: this tool and others, head to head on one machine, on the same work.

    python benchmarks/gpu_check.py peers --environments FOLDER
    python benchmarks/gpu_check.py peers --environments FOLDER --install trl,torchtune
    python benchmarks/gpu_check.py peers --environments FOLDER --tools ours,torchtune --cases full-2048,lora-4096

Every side trains the same Hugging Face folder on the same rows of token ids, in the same order,
from the same start, each by its own documented way, in a virtual environment of its own: FOLDER/trl
(transformers too), FOLDER/torchtune, FOLDER/unsloth. That the work is equal is shown, not said: the
loss and the norm of the gradient of every step stand beside ours. Sides take turns, each in a
process of its own, so that what slows the machine slows all of them.

With a GPU: Llama 3 8B's shape with random weights, made once in --work, or the --model that is
given. Without one: a tiny model for a few steps in fp32, which checks that the sides do equal work,
and no time is kept.
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
    build_case_entry,
    format_file_name,
    judge,
    list_good_runs,
    read_earlier_cases,
    write_peers_report,
)
from recipe_lib.errors import ConfigError, SetupError, run_for_exit_code
from recipe_lib.models import build_spec, read_preset_config

SCRIPTS = Path(__file__).parent / "scripts"
RUN_SECONDS = 900.0


def main(argv: list[str]) -> int:
    """Run all sides in turns and write the report after each.

    Returns 1 if a side failed or did other work, 2 for a mistake of the user.
    """
    return run_for_exit_code(lambda: _run(_parse_arguments(argv), argv))


def _run(options: argparse.Namespace, argv: list[str]) -> int:
    started = time.monotonic()
    for name in options.install:
        install(options.environments / name, name)
    device = run_apart(describe_device, 60)
    gpu = device.get("type") == "cuda"
    repeats = options.repeats or (3 if gpu else 1)
    cases = [case for case in list_cases(gpu) if not options.cases or case.name in options.cases]
    if not cases:
        known = ", ".join(case.name for case in list_cases(gpu))
        raise ConfigError(
            f"--cases {','.join(options.cases)}: there are none of these here, expected some of"
            f" {known}"
        )
    sides = [side for side in SIDES if side.tool in options.tools]
    report: dict[str, Any] = {
        "kind": "Head to head" if gpu else "Head to head, dry run on a CPU: no time was measured",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": format_command(argv),
        "device": device,
        "dtype": "bf16" if gpu else "fp32",
        "repeats": repeats,
        "cases": [],
        "matmul": run_apart(measure_matmul, 60).get("flop_per_second") if gpu else None,
        "versions": {side.name: read_versions(side, options.environments) for side in sides},
    }
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        work = (options.work or Path(folder)).resolve()
        report["model"] = options.model or ("llama3/8B" if gpu else "demo/0.5M")
        if options.keep:
            path = options.output / format_file_name(device, ".json")
            report["cases"] += read_earlier_cases(path, [case.name for case in cases])
        for case in cases:
            ground = make_ground(case.own_model or report["model"], work, report["dtype"])
            entry = build_case_entry(case, ground)
            report["cases"].append(entry)
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
                entry["results"][side.name] = result
                judge(entry, ground["model"], report)
                report["seconds"] = round(time.monotonic() - started)
                paths = write_peers_report(report, options.output)
    print("\n".join(map(str, paths)))
    return judge_report(report)


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py peers",
        description=__doc__,
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
    return [name for name in text.split(",") if name]


def install(folder: Path, name: str) -> None:
    """Make an environment, or put into an existing one what it lacks."""
    if not (folder / "bin" / "python").exists():
        make_environment(folder, PACKAGES[name])
        return
    for packages in PACKAGES[name][1:]:
        subprocess.run(
            [folder / "bin" / "python", "-m", "pip", "install", "-q", *packages], check=True
        )


def format_command(argv: list[str]) -> str:
    """Return the command line, without where its files go."""
    options = {at for at, word in enumerate(argv) if word in ("--output", "--work")}
    words = [word for at, word in enumerate(argv) if not {at, at - 1} & options]
    return " ".join(["python benchmarks/gpu_check.py peers", *words])


# What all sides are given


@functools.cache
def make_ground(model: str, work: Path, dtype: str) -> dict[str, Any]:
    """Make model, adapter and tokenizer, once.

    Returns what the model is (`told`), the `size` of the vocabulary, and folders by name. Raises
    UserError.
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
    """Return the environment variables of a side's run.

    No network, no plan beside our run; without a GPU one thread, so that sums have one order; else
    one GPU, since some tools take all that they see.
    """
    variables = ENVIRONMENT | {
        "PYTHONPATH": str(REPOSITORY),
        "TUNE_PLAN": "off",
        "ACCELERATE_USE_CPU": str(not gpu).lower(),
    }
    if gpu:
        del variables["OMP_NUM_THREADS"]
        # One, since some tools take all that they see.
        visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        variables["CUDA_VISIBLE_DEVICES"] = visible_gpus.split(",")[0]
    return variables


def read_versions(side: Side, environments: Path) -> dict[str, str]:
    """Read the versions of the packages that count, as the side's interpreter finds them."""
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
    """Explain why a side takes no part in a case; None: it does."""
    if side.gpu and not gpu:
        return "not run: needs a GPU"
    python = find_python(side, environments)
    if not Path(python).exists():
        return f"not run: no environment {ENVIRONMENTS[side.tool]}"
    return _find_import_faults(python, side.list_modules(case), gpu)


@functools.cache
def _find_import_faults(python: str, modules: tuple[str, ...], gpu: bool) -> str | None:
    result = run([python, "-c", f"import {', '.join(modules)}"], Path.cwd(), build_environment(gpu))
    return None if result.code == 0 else f"not run: {explain_end(result)}"


def explain_end(result: Result) -> str:
    """Explain why a command ended as it did, in a line for a table's cell."""
    if result.timed_out:
        return f"not done after {result.seconds:.0f} s"
    if "OutOfMemoryError" in result.text or "out of memory" in result.text.lower():
        return "out of memory"
    lines = [line.strip() for _, line in result.lines if line.strip()]
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
) -> Iterator[tuple[Side, dict[str, Any]]]:
    """Yield each side's result so far after each of its runs.

    All sides run once, then all of them again.
    """
    rows = make_rows(case, ground["size"], work / case.name)
    results: dict[str, dict[str, Any]] = {}
    for repeat in range(repeats):
        for side in sides:
            result = results.setdefault(side.name, {"runs": []})
            if repeat == 0:
                reason = explain_absence(
                    side, case=case, environments=options.environments, gpu=gpu
                )
                if reason:
                    result["absent"] = reason
            if "absent" not in result:
                seconds_left = options.minutes * 60 - (time.monotonic() - started)
                folder = work / case.name / side.name
                task = {**ground, **rows, **build_settings(case, side=side, gpu=gpu, folder=folder)}
                run_record = {"failed": "no time left"}
                if seconds_left >= 5:
                    run_record = run_side(
                        side,
                        task=task,
                        environments=options.environments,
                        seconds_left=seconds_left,
                    )
                result["runs"].append(run_record)
            end = result.get("absent") or result["runs"][-1].get("failed") or "done"
            print(
                f"{time.monotonic() - started:5.0f} s  {case.name}, {side.name}: {end}", flush=True
            )
            yield side, result


def build_settings(case: PeerCase, side: Side, gpu: bool, folder: Path) -> dict[str, Any]:
    """Return the rest of a task: see peers/scripts."""
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
) -> dict[str, Any]:
    """Run a side once, and return its record, or why there is none."""
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
    paths = f"{Path(command[0]).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    result = run(
        command,
        folder=folder,
        environment=build_environment(gpu) | {"PATH": paths},
        limit=min(RUN_SECONDS, seconds_left),
    )
    (folder / "log.txt").write_text(result.text, encoding="utf-8")
    if result.code != 0 or not output.exists():
        return {"failed": explain_end(result)}
    record = dict(json.loads(output.read_text(encoding="utf-8")))
    num_finite = 0
    for loss, grad_norm in zip(record["losses"], record["grad_norms"], strict=True):
        num_finite += math.isfinite(loss) and math.isfinite(grad_norm)
    if num_finite != task["steps"]:
        return {"failed": f"{num_finite} of {task['steps']} steps with finite numbers"}
    return record


def judge_report(report: dict[str, Any]) -> int:
    """Return 0 if every side that took part came to its end and did the same work, else 1."""
    for entry in report["cases"]:
        for result in entry["results"].values():
            if "absent" not in result and len(list_good_runs(result)) != len(result["runs"]):
                return 1
        if any(compared["equal"] is False for compared in entry["comparison"].values()):
            return 1
    return 0
