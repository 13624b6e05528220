"""Check that no memory is used on two streams without a wait, by our checker and by torch's.

`python benchmarks/gpu_check.py streams` calls `main`. A case is a run of
`tests/plan/streams/mutations.py`, with a config key that copies to or from the host. Our checker
simulates it (`tune plan --check-streams`). On a GPU it also runs as rank 0 of a fake process group,
under torch's sanitizer, and under torch's warnings where the host waits for the device.
"""

import argparse
import functools
import tempfile
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu_cases import Case as MeasuredCase
from benchmarks.gpu_check import (
    REPOSITORY,
    describe_device,
    fill_weights,
    make_random_batches,
    run_apart,
)
from benchmarks.gpu_plan_report import name_device, write_pair
from recipe_lib.cli.plan_request import find_recipe_class
from recipe_lib.cli.recipes import find_config_recipe
from recipe_lib.config import load_config
from recipe_lib.parallel import start_world
from recipe_lib.plan.allocation.caching_allocator import LAUNCH_QUEUE
from recipe_lib.plan.simulated_world.shape_only_model import make_plannable
from tests.plan.streams.mutations import CASES, Case, follow

DRY_CASES = ("activation offload", "optimizer offload")
STEPS = 3
BUSY_CYCLES = 4 * 10**9  # of the device's clock: two or three seconds
MOST_LAUNCHES = 8 * LAUNCH_QUEUE
WAITED = 0.1  # seconds of a launch: longer, and it has waited for the device


def main(words: list[str]) -> int:
    """Run all cases and write the report.

    Return 1 if a check found a missing wait or failed to run.
    """
    parser = argparse.ArgumentParser(
        prog="gpu_check.py streams",
        description="Check that no memory is used on two streams without a wait.",
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "measurements")
    options = parser.parse_args(words)
    device = run_apart(describe_device, 60)
    on_gpu = device.get("type") == "cuda"
    rows: list[dict[str, Any]] = []
    for name in CASES if on_gpu else DRY_CASES:
        row: dict[str, Any] = {"case": name}
        row["ours"] = run_apart(functools.partial(simulate_case, name), 90)
        if on_gpu:
            row["sanitizer"] = run_apart(functools.partial(run_sanitizer, name), 120)
            row["host"] = run_apart(functools.partial(count_waits, name), 120)
        rows.append(row)
        print(format_line(row), flush=True)
    queue = run_apart(count_queued_launches, 60) if on_gpu else {}
    write_report(rows, device=device, folder=options.output, queue=queue)
    return 1 if "failed" in queue or any(has_failed(row) for row in rows) else 0


def simulate_case(name: str) -> dict[str, Any]:
    """Return `faults`, missing waits that our checker finds, and `waits` of the host in a step."""
    checker = follow(CASES[name])
    return {"faults": checker.list_faults(), "waits": len(checker.waits)}


def run_sanitizer(name: str) -> dict[str, Any]:
    """Return what torch's sanitizer reports of a case's steps on the GPU.

    `faults` has the first 20 messages, `count` the number of all.
    """
    # Private, since torch only lets the whole process stop at the first error that it finds.
    from torch.cuda import _sanitizer

    messages: list[str] = []
    handle_kernel_launch = _sanitizer.EventHandler._handle_kernel_launch

    def keep_errors(self: Any, *args: Any, **kwargs: Any) -> list[Any]:
        errors = handle_kernel_launch(self, *args, **kwargs)
        messages.extend(str(error) for error in errors)
        return []  # else the sanitizer would end the run at the first

    _sanitizer.EventHandler._handle_kernel_launch = keep_errors  # type: ignore[method-assign]
    sanitizer = _sanitizer.CUDASanitizer()
    sanitizer.enable()
    run(CASES[name])
    return {"faults": messages[:20], "count": len(messages)}


def count_waits(name: str) -> dict[str, Any]:
    """Return {"waits": how often torch sees the host wait in the last step}.

    Waits for the numbers that are logged are among them.
    """
    wait_counts: list[int] = []
    run(CASES[name], wait_counts)
    return {"waits": wait_counts[-1]}


def run(case: Case, wait_counts: list[int] | None = None) -> None:
    """Run STEPS steps of a case's first rank on the GPU, with random weights.

    wait_counts: gets the number of torch's warnings that the host waits, of each step; None: torch
    is not asked to warn.
    """
    # Its collectives move nothing and use no stream of their own.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    recipe_file = find_config_recipe(case.config)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        overrides = (*case.overrides, "device=auto", "max_seq_len=128", f"output_dir={folder}/out")
        cfg, _ = make_plannable(load_config(case.config, overrides, recipe_file.load_schema()))
        with start_world(cfg) as world:
            recipe = case.recipe(find_recipe_class(recipe_file))(cfg, world)
            recipe.setup_model()
            fill_weights(recipe.model)
            recipe.setup_optimizer()
            # Its sizes alone are used.
            measured_case = MeasuredCase("speed", "", sequence=128, batch_size=cfg.batch_size)
            batches = make_random_batches(measured_case, recipe)
            for _ in range(STEPS):
                with warnings.catch_warnings(record=True) as caught_warnings:
                    warnings.simplefilter("always")
                    if wait_counts is not None:
                        torch.cuda.set_sync_debug_mode("warn")
                    recipe.train_step(batches).read_numbers()
                    if wait_counts is not None:
                        torch.cuda.set_sync_debug_mode("default")
                if wait_counts is not None:
                    wait_counts.append(
                        sum("synchronizing" in str(warning.message) for warning in caught_warnings)
                    )


def count_queued_launches() -> dict[str, Any]:
    """Return {"launches": kernels that a host issues on a busy stream before a launch waits}.

    The planner takes LAUNCH_QUEUE for this number. It is MOST_LAUNCHES if none has waited by then.
    """
    tensor = torch.zeros(1, device="cuda")
    tensor.add_(1)  # loads the kernel, which takes time of its own
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    for num_launches in range(MOST_LAUNCHES):
        began = time.perf_counter()
        tensor.add_(1)
        if time.perf_counter() - began > WAITED:
            return {"launches": num_launches}
    return {"launches": MOST_LAUNCHES}


def has_failed(row: dict[str, Any]) -> bool:
    """Return True if a check failed to run or found a missing wait."""
    checks = [row[name] for name in ("ours", "sanitizer") if name in row]
    return any("failed" in check or check["faults"] for check in checks)


def format_line(row: dict[str, Any]) -> str:
    """Format a case as a line of a table."""
    ours = row["ours"]
    sanitizer = row.get("sanitizer", {})
    host = row.get("host", {})
    cells = [
        row["case"],
        ours.get("failed") or len(ours["faults"]),
        ours.get("waits", "-"),
        sanitizer.get("failed") or sanitizer.get("count", "not measured"),
        host.get("failed") or host.get("waits", "not measured"),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def write_report(
    rows: list[dict[str, Any]], *, device: dict[str, Any], folder: Path, queue: dict[str, Any]
) -> None:
    """Write gpu-streams-DEVICE.md, a table, and .json, with all messages.

    queue: of `count_queued_launches`; empty without a GPU.
    """
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "rows": rows,
        "queue": queue,
    }
    paths = write_pair(folder / f"gpu-streams-{name_device(device)}", report, format_page(report))
    print(paths[-1])


def format_page(report: dict[str, Any]) -> str:
    """Return the Markdown page of a report.

    Optional keys of the report: `commit`, `torch` (version).
    """
    queue = report["queue"]
    device = report["device"]
    commit = f", commit {report['commit']}" if "commit" in report else ""
    torch_version = f", torch {report['torch']}" if "torch" in report else ""
    head = (
        f"# Streams and waits\n\n`python benchmarks/gpu_check.py streams`, {report['date']}{commit},"
        f" {device['name']}{torch_version}"
    )
    if "driver" in device:
        head += f", driver {device['driver']}, power limit {device['power_limit']}"
    head += "\n"
    if device.get("type") != "cuda":
        head += "\nNothing was measured on a GPU: this checks the program, not a machine.\n"
    launches = queue.get("failed") or queue.get("launches", "not measured")
    lines = [
        (
            "| run | ours: faults | ours: waits a step | torch's sanitizer: faults | torch's"
            " warnings of waits a step |"
        ),
        "|---|---:|---:|---:|---:|",
        *map(format_line, report["rows"]),
        "",
        (
            f"Kernels that a host issues on a busy stream before it waits: {launches}; the planner"
            f" takes {LAUNCH_QUEUE}."
        ),
    ]
    return head + "\n" + "\n".join(lines) + "\n"


def summarize(report: dict[str, Any]) -> str:
    """Return in a line what torch's sanitizer reported, and which runs did not come to it."""
    counts = [row["sanitizer"]["count"] for row in report["rows"] if "sanitizer" in row]
    left_out = [row["case"] for row in report["rows"] if "sanitizer" not in row]
    line = f"{len(counts)} runs under torch's sanitizer, {sum(counts)} faults"
    return line + (f"; did not come to run: {'; '.join(left_out)}" if left_out else "")
