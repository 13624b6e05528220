"""`gpu_check.py plan`: what the planner says against what the same configs take on this machine's
GPU.

Peaks: each config runs as one rank of N in torch's fake process group, with the default allocator
and with expandable segments, each in a process of its own; requested, allocated and reserved bytes
of the first and of later steps are compared with `make_plan` for this device, which runs beside it
on the CPU's cores. Thresholds: some configs run under a cap 2 % below and above the smallest one
that the plan gives. Events: the allocator's history of small configs is stored for the tests, and
replayed.

Without a GPU tiny configs are planned for the CPU and compared with a trace of a real run there:
nothing is measured.
"""

import argparse
import dataclasses
import functools
import gc
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.allocator_events import (
    find_smallest_cap,
    read_fixture,
    read_snapshot_events,
    replay_events,
    write_fixture,
)
from benchmarks.gpu_check import REPOSITORY, describe_device, fill_weights, run_apart
from benchmarks.gpu_plan_cases import PlanCase, Runnable, describe, list_cases, list_recorded_cases
from benchmarks.gpu_plan_report import compute_errors, summarize, write_plan_report
from recipe_lib.errors import ConfigError
from recipe_lib.parallel import World, start_world
from recipe_lib.plan.build_plan import PlanSettings, make_plan
from recipe_lib.plan.hardware import Hardware, find_hardware
from recipe_lib.plan.plan_schema import RankPlan
from recipe_lib.plan.simulated_world.planned_data import PlannedData
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY, trace_real_run
from recipe_lib.units import GIB

MINUTES = 9.0
CASE_SECONDS = 60
PLAN_SECONDS = 120
MARGIN = 0.02  # each side of the planned smallest cap
FIXTURE_BYTES = 200 * 1024
STEADY_STEPS = 2  # after the first one
HISTORY = 2_000_000  # entries, more than any of the recorded configs makes
Planner = Callable[[Any, Hardware], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Job:
    """kind: `peaks`, `threshold` or `events`. factor: of the planned smallest cap, or between what
    was allocated and what was reserved without a cap; 0 is no cap.
    """

    kind: str
    case: PlanCase
    expandable: bool = False
    factor: float = 0.0


def main(argv: list[str]) -> int:
    """Runs all jobs and writes the report after each; 1 if one failed, or a config that was said to
    fit ran out.
    """
    parser = argparse.ArgumentParser(prog="gpu_check.py plan", description=__doc__)
    folder = REPOSITORY / "docs" / "measurements"
    parser.add_argument("--output", type=Path, default=folder, help="folder of the report")
    fixtures = REPOSITORY / "tests" / "plan" / "fixtures"
    parser.add_argument(
        "--fixtures", type=Path, default=fixtures, help="folder for recorded events"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for all of it")
    options = parser.parse_args(argv)
    started = time.monotonic()
    device = run_apart(describe_device, CASE_SECONDS)
    gpu = device.get("type") == "cuda"
    hardware = look_up_hardware(device)
    report = begin_report("plan", argv, device, hardware)
    todo = list_jobs(gpu)
    paths: list[Path] = []
    with plan_in_processes([job.case for job in todo if job.kind == "peaks"], hardware) as planned:
        for job in todo:
            left = options.minutes * 60 - (time.monotonic() - started)
            row = run_job(job, gpu, planned, left, report, options.fixtures)
            report["rows"].append(row)
            report["seconds"] = round(time.monotonic() - started)
            print(f"{report['seconds']:5d} s  {name_of(job)}: {describe_row(row)}", flush=True)
            paths = write_plan_report(report, options.output)
    print("\n".join(summarize(report)))
    print("\n".join(map(str, paths)))
    ran_out = any(
        row.get("said") == "fits" and row.get("found") == "ran out" for row in report["rows"]
    )
    return 1 if ran_out or any("failed" in row for row in report["rows"]) else 0


def begin_report(
    part: str, argv: list[str], device: dict[str, Any], hardware: Hardware
) -> dict[str, Any]:
    """A report of `gpu_check.py PART` without rows."""
    gpu = device.get("type") == "cuda"
    return {
        "kind": "planned and measured" if gpu else "dry run, CPU: nothing was measured on a GPU",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python benchmarks/gpu_check.py", part, *argv]),
        "device": device,
        "hardware": hardware.name,
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "rows": [],
    }


def list_jobs(gpu: bool) -> list[Job]:
    """What to do, the most telling first: events, which are quick; a config of each kind;
    thresholds; the others.
    """
    if not gpu:
        return [Job("peaks", case) for case in list_cases(gpu)]
    peaks = [
        Job("peaks", case, expandable) for case in list_cases(gpu) for expandable in (False, True)
    ]
    telling = 2 * 12
    events = [
        Job("events", case, expandable)
        for case in list_recorded_cases()
        for expandable in (False, True)
    ]
    events.append(Job("events", list_recorded_cases()[0], factor=0.5))
    thresholds = [
        Job("threshold", case, expandable, factor)
        for case in list_cases(gpu)
        if case.threshold
        for expandable in (False, True)
        for factor in (1 - MARGIN, 1 + MARGIN)
    ]
    return [*events, *peaks[:telling], *thresholds, *peaks[telling:]]


def look_up_hardware(device: dict[str, Any]) -> Hardware:
    """The table's entry for the device, with the memory that it has; by its size where the table
    does not have it.
    """
    if device.get("type") != "cuda":
        return find_hardware("cpu")
    try:
        found = find_hardware(device["name"])
    except ConfigError:
        found = find_hardware(f"{device['memory_gib']:.1f}GiB")
    return dataclasses.replace(found, memory=int(device["memory_gib"] * GIB))


# Planning, in processes of its own


@contextmanager
def plan_in_processes(
    wanted: Sequence[Runnable], hardware: Hardware, plan: Planner | None = None
) -> Iterator[Callable[[Any, float], dict[str, Any]]]:
    """Plans the cases in as many processes as there are cores to spare; yields what waits for a
    case's plan.

    plan: what makes one, `plan_peaks` or another.
    """
    todo = list(dict.fromkeys(wanted))
    workers = max(1, min(12, (os.cpu_count() or 1) - 2, len(todo)))
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="gpu-plan-") as folder:
        places = {case: Path(folder) / f"{number}.json" for number, case in enumerate(todo)}
        pieces = list(places.items())
        processes = [
            context.Process(
                target=_plan_all, args=(pieces[at::workers], hardware, plan or plan_peaks)
            )
            for at in range(workers)
        ]
        for process in processes:
            process.start()

        def wait(case: Any, seconds: float) -> dict[str, Any]:
            until = time.monotonic() + min(seconds, PLAN_SECONDS)
            while not places[case].exists():
                worker = processes[todo.index(case) % workers]
                if time.monotonic() > until or not worker.is_alive() and not places[case].exists():
                    return {
                        "failed": "no plan in time" if worker.is_alive() else "the planner ended"
                    }
                time.sleep(0.05)
            return json.loads(places[case].read_text())

        try:
            yield wait
        finally:
            for process in processes:
                process.kill()
                process.join()


def _plan_all(todo: list[tuple[Any, Path]], hardware: Hardware, plan: Planner) -> None:
    """In a planner's process, which must not see the GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    for case, place in todo:
        try:
            found = plan(case, hardware)
        except Exception as error:  # noqa: BLE001  (the other cases are planned still)
            found = {"failed": f"planning: {type(error).__name__}: {error}"}
        part = place.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(place)


def plan_peaks(case: PlanCase, hardware: Hardware) -> dict[str, Any]:
    """By phase what `read_peaks` gives; for a threshold the smallest caps."""
    recipe_class, cfg = case.load()
    settings = PlanSettings(
        hardware, case.rows, case.ranks, traced_ranks=(case.rank,), phases=(), timed=False
    )
    plan, trace = make_plan(recipe_class, cfg, settings)
    found: dict[str, Any] = read_peaks(plan.heaviest)
    if case.threshold:
        found["caps"] = [
            find_smallest_cap(trace, expandable=expandable) for expandable in (False, True)
        ]
    return found


def read_peaks(rank: RankPlan) -> dict[str, dict[str, int]]:
    """By phase `requested`, `active`, `allocated`, `reserved`, `reserved_expandable`."""
    names = ("requested", "active", "allocated", "reserved", "reserved_expandable")
    return {peak.phase: {name: getattr(peak, name) for name in names} for peak in rank.peaks}


# Measuring, each in a process of its own


def run_job(
    job: Job,
    gpu: bool,
    planned: Callable[[PlanCase, float], dict[str, Any]],
    left: float,
    report: dict[str, Any],
    fixtures: Path,
) -> dict[str, Any]:
    """A row of the report."""
    row: dict[str, Any] = {
        "kind": job.kind,
        "case": dataclasses.asdict(job.case),
        "expandable": job.expandable,
    }
    if left < 5:
        return row | {"skipped": "no time left"}
    seconds = min(CASE_SECONDS, left)
    if job.kind == "events":
        return row | _record_events(job, seconds, report, fixtures)
    plan = planned(job.case, left)
    if "failed" in plan:
        return row | plan
    if job.kind == "threshold":
        cap = int(plan["caps"][job.expandable] * job.factor)
        result = run_apart(functools.partial(measure, job.case, job.expandable, cap), seconds)
        said = "fits" if job.factor > 1 else "does not fit"
        found = "ran out" if "out_of_memory" in result else "ran"
        return (
            row
            | {"cap": cap, "said": said}
            | (result if "failed" in result else {"found": found, "result": result})
        )
    work = (
        functools.partial(measure, job.case, job.expandable)
        if gpu
        else functools.partial(trace_on_cpu, job.case)
    )
    result = run_apart(work, seconds)
    return row | {"planned": plan} | (result if "failed" in result else {"measured": result})


def measure(
    case: Runnable,
    expandable: bool = False,
    cap: int = 0,
    history: str = "",
    steady: int = STEADY_STEPS,
) -> dict[str, Any]:
    """Peaks and seconds of a case's steps on the GPU, `steady` of them after the first.

    cap: bytes the allocator may take, 0: all. history: a file to record events in.
    """
    choose_allocator(expandable)
    module: Any = torch.get_device_module("cuda")
    module.init()
    if history:
        module.memory._record_memory_history(
            enabled="all", context=None, stacks="python", max_entries=HISTORY
        )
    dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.ranks)
    recipe_class, cfg = case.load()
    with start_world(cfg) as world:
        if cap:
            total = module.get_device_properties(world.device).total_memory
            module.set_per_process_memory_fraction(min(1.0, cap / total), world.device)
        result = run_steps(recipe_class, cfg, world, case, module, bool(history), steady)
        free, total = module.mem_get_info(world.device)
        stats = module.memory_stats(world.device)
        result["retries"] = stats.get("num_alloc_retries", 0)
        result["outside"] = total - free - stats.get("reserved_bytes.all.current", 0)
        result["total"] = total
        result["pinned"] = module.memory.host_memory_stats().get("allocated_bytes.peak", 0)
        snapshot = module.memory._snapshot()
        if (
            bool(snapshot.get("allocator_settings", {}).get("expandable_segments", expandable))
            != expandable
        ):
            raise RuntimeError(f"the allocator does not have expandable_segments={expandable}")
        if history:
            names = ("allocated", "active", "reserved")
            figures = {name: stats[f"{name}_bytes.all.peak"] for name in names} | {
                "retries": result["retries"]
            }
            stream = read_snapshot_events(snapshot, cap=cap or None, measured=figures)
            write_fixture(stream, Path(history))
            result["figures"] = figures
    return result


def choose_allocator(expandable: bool) -> None:
    """Before the process's first use of the device."""
    setting = f"expandable_segments:{expandable}"
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = setting
    older: Any = torch.get_device_module("cuda").memory
    change = (
        getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        or older._set_allocator_settings
    )
    change(setting)  # the variables may have been read when torch was imported


def run_steps(
    recipe_class: type,
    cfg: Any,
    world: World,
    case: Runnable,
    module: Any,
    whole_history: bool,
    steady: int = STEADY_STEPS,
) -> dict[str, Any]:
    """The phases that the planner simulates, for real; all steps after the first count as the
    second.

    `peaks` of each phase, bytes; `seconds` of each step. Tokens are drawn at random: equal ones are
    computed faster.
    """
    result: dict[str, Any] = {"peaks": {}, "seconds": []}
    phase = "setup"
    gc.collect()
    gc.disable()  # it frees at moments that no other run repeats
    try:
        recipe: Any = recipe_class(cfg, world)
        recipe.setup_model()
        for model in filter(None, (recipe.model, getattr(recipe, "teacher", None))):
            fill_weights(model)
        recipe.setup_optimizer()
        recipe.data = PlannedData(cfg, world, case.rows)
        for phase in (FIRST, *[STEADY] * steady):
            if not whole_history:
                module.reset_peak_memory_stats(world.device)
            batches = next(recipe.data.batches())
            for batch in batches.micro_batches:
                batch.tokens.random_(recipe.spec.vocab_size)
            began = time.perf_counter()
            recipe.train_step(batches)
            del batch, batches
            module.synchronize(world.device)
            result["seconds"].append(time.perf_counter() - began)
            stats = module.memory_stats(world.device)
            names = ("requested", "active", "allocated", "reserved")
            found = {name: stats[f"{name}_bytes.all.peak"] for name in names}
            earlier = result["peaks"].get(phase, found)
            result["peaks"][phase] = {name: max(found[name], earlier[name]) for name in found}
    except torch.OutOfMemoryError:
        result["out_of_memory"] = phase
    return result


def trace_on_cpu(case: Runnable) -> dict[str, Any]:
    """Peaks of the tensors that a real run on the CPU holds, seen by the planner's own tracer."""
    dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.ranks)
    recipe_class, cfg = case.load()
    cfg.device = "cpu"
    with start_world(cfg) as world:
        peaks = trace_real_run(recipe_class, cfg, world, case.rows).trace.find_active_peaks()
    return {"peaks": {phase: {"requested": peaks[phase]} for phase in (FIRST, STEADY)}}


def _record_events(
    job: Job, seconds: float, report: dict[str, Any], fixtures: Path
) -> dict[str, Any]:
    """Records a case's events, keeps them if they are few enough, and replays them."""
    cap = 0
    if job.factor:
        free = [row["figures"] for row in report["rows"] if row["kind"] == "events" and not row["expandable"] and
                "figures" in row and row["case"] == dataclasses.asdict(job.case)]  # fmt: skip
        if not free:
            return {"failed": "there is no recording without a cap to choose one by"}
        allocated, reserved = free[0]["allocated"], free[0]["reserved"]
        cap = int(allocated + job.factor * (reserved - allocated))
    words = [
        job.case.method,
        job.case.model,
        f"{job.case.ranks}x{job.case.sequence}",
        job.case.checkpointing,
    ]
    words += ["expandable"] * job.expandable + ["capped"] * bool(cap)
    with tempfile.TemporaryDirectory(prefix="gpu-plan-") as folder:
        file = Path(folder) / f"{'-'.join(words)}.json.gz"
        result = run_apart(
            functools.partial(measure, job.case, job.expandable, cap, str(file)), seconds
        )
        if "failed" in result:
            return result
        compared = run_apart(
            functools.partial(compare_events, str(file), result["figures"]), seconds
        )
        if file.stat().st_size <= FIXTURE_BYTES:
            fixtures.mkdir(parents=True, exist_ok=True)
            (fixtures / file.name).write_bytes(file.read_bytes())
        return {
            "file": file.name,
            "size": file.stat().st_size,
            "cap": cap,
            "figures": result["figures"],
        } | compared


def compare_events(file: str, figures: dict[str, int]) -> dict[str, Any]:
    """A recording replayed: the number of the first segment that differs, and the figures that
    do.
    """
    stream = read_fixture(Path(file))
    found = replay_events(stream)
    different = {
        name: getattr(found, name)
        for name, figure in figures.items()
        if getattr(found, name) != figure
    }
    return {
        "events": len(stream["events"]),
        "first_difference": found.first_difference,
        "different": different,
    }


def name_of(job: Job) -> str:
    """A job in a few words."""
    allocator = ", expandable" if job.expandable else ""
    return f"{job.kind}, {describe(job.case)}{allocator}{f', x {job.factor}' if job.factor else ''}"


def describe_row(row: dict[str, Any]) -> str:
    """What came of it, in a few words."""
    for key in ("failed", "skipped"):
        if key in row:
            return f"{key}, {row[key]}"
    if row["kind"] == "threshold":
        return f"said {row['said']} {row['cap'] / GIB:.2f} GiB, {row['found']}"
    if row["kind"] == "events":
        exact = row.get("first_difference") is None and not row.get("different")
        return f"{row['file']}, {row.get('events')} events, {'exact' if exact else 'differs'}"
    if "out_of_memory" in row["measured"]:
        return f"out of memory in {row['measured']['out_of_memory']}"
    found = [
        f"{name} {error:+.2%}" for phase, name, error in compute_errors(row) if phase == STEADY
    ]
    return ", ".join(found)
