"""Compare the memory that `make_plan` plans with what the same configs take on this machine's GPU.

`python benchmarks/gpu_check.py plan` calls `main`; other parts of it call `measure` and
`plan_in_processes`. A case is a config, run as one rank of N in torch's fake process group. A job
is one comparison (peaks, thresholds or recorded events), a row its entry in the report. Without a
GPU, tiny cases are planned for the CPU and compared with a trace of a real run there.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

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
from benchmarks.gpu_check import LEAST_SECONDS, REPOSITORY, describe_device, fill_weights, run_apart
from benchmarks.gpu_plan_cases import PlanCase, Runnable, describe, list_cases, list_recorded_cases
from benchmarks.gpu_plan_report import METRICS, compute_errors, summarize, write_plan_report
from benchmarks.gpu_rows import PlanRow
from recipe_lib.errors import ConfigError
from recipe_lib.parallel import World, start_world
from recipe_lib.plan.build_plan import PlanSettings, make_plan
from recipe_lib.plan.hardware import Hardware, find_hardware
from recipe_lib.plan.plan_schema import RankPlan
from recipe_lib.plan.simulated_world.planned_data import PlannedData
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY, trace_real_run
from recipe_lib.units import GIB

MINUTES = 9.0  # default limit of all jobs together
CASE_SECONDS = 60  # limit of one measurement
PLAN_SECONDS = 120  # limit of waiting for one plan
MARGIN = 0.02  # each side of the smallest planned memory, as a share of it
FIXTURE_BYTES = 200 * 1024  # a larger recording is not kept
STEADY_STEPS = 2  # after the first one
HISTORY = 2_000_000  # entries, more than any of the recorded configs makes
TELLING_CASES = 12  # of `list_cases`, one of each kind, which come before the thresholds
# Plans a case for a device; returns what a row has as `planned`.
Planner = Callable[[Any, Hardware], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Job:
    """Hold one comparison of a plan and a measurement."""

    # `peaks`: planned and measured peaks. `threshold`: whether a run goes through under a cap.
    # `events`: the allocator's recorded events, stored for the tests and replayed.
    kind: str
    case: PlanCase
    expandable: bool = False  # the allocator has expandable segments
    # Sets the cap. `threshold`: a multiple of the smallest planned one. `events`: 0 is no cap, 0.5
    # half-way from the most allocated to the most reserved bytes of the recording without one.
    factor: float = 0.0


def main(argv: list[str]) -> int:
    """Run all jobs and write the report after each, so that a cut run leaves what it has.

    Return 1 if a job failed, or a config ran out of memory that was planned to fit.
    """
    parser = argparse.ArgumentParser(
        prog="gpu_check.py plan",
        description="Compare the memory that is planned with what configs take on this GPU.",
    )
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
    report = begin_report("plan", argv, device=device, hardware=hardware)
    jobs = list_jobs(gpu)
    cases = [job.case for job in jobs if job.kind == "peaks"]
    paths: list[Path] = []
    with plan_in_processes(cases, hardware) as wait_for_plan:
        for job in jobs:
            content = run_job(
                job,
                gpu=gpu,
                wait_for_plan=wait_for_plan,
                seconds_left=options.minutes * 60 - (time.monotonic() - started),
                earlier_rows=report["rows"],
                fixtures=options.fixtures,
            )
            row = cast(PlanRow, content)  # of plain dicts, which other processes have sent
            report["rows"].append(row)
            report["seconds"] = round(time.monotonic() - started)
            print(f"{report['seconds']:5d} s  {describe_job(job)}: {describe_row(row)}", flush=True)
            paths = write_plan_report(report, options.output)
    print("\n".join(summarize(report)))
    print("\n".join(map(str, paths)))
    ran_out = any(
        row.get("said") == "fits" and row.get("found") == "ran out" for row in report["rows"]
    )
    return 1 if ran_out or any("failed" in row for row in report["rows"]) else 0


def begin_report(
    part: str, argv: list[str], *, device: dict[str, Any], hardware: Hardware
) -> dict[str, Any]:
    """Return the report of `gpu_check.py PART` without rows.

    part: such as `plan`. device: as `describe_device` returns it. hardware: what is planned for.
    """
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
    """List the jobs, the most telling first, in case time runs out.

    gpu: False for the dry run's.
    """
    cases = list_cases(gpu)
    if not gpu:
        return [Job("peaks", case) for case in cases]
    recorded_cases = list_recorded_cases()
    return [
        *_list_both_allocators("events", recorded_cases),  # first, because they are quick
        # After the recording without a cap, of which the cap is computed.
        Job("events", recorded_cases[0], factor=0.5),
        *_list_both_allocators("peaks", cases[:TELLING_CASES]),
        *_list_thresholds(case for case in cases if case.threshold),
        *_list_both_allocators("peaks", cases[TELLING_CASES:]),
    ]


def _list_both_allocators(kind: str, cases: Sequence[PlanCase]) -> list[Job]:
    """Return two jobs of each case: without and with expandable segments."""
    jobs = []
    for case in cases:
        jobs.append(Job(kind, case, expandable=False))
        jobs.append(Job(kind, case, expandable=True))
    return jobs


def _list_thresholds(cases: Iterable[PlanCase]) -> list[Job]:
    """Return four jobs of each case: MARGIN below and above the smallest cap, each allocator."""
    jobs = []
    for case in cases:
        for expandable in (False, True):
            for factor in (1 - MARGIN, 1 + MARGIN):
                jobs.append(Job("threshold", case, expandable=expandable, factor=factor))
    return jobs


def look_up_hardware(device: dict[str, Any]) -> Hardware:
    """Return the hardware that plans for this device are made for, with the memory that it has.

    device: as `describe_device` returns it. A name that the planner's table does not have is looked
    up by its memory.
    """
    if device.get("type") != "cuda":
        return find_hardware("cpu")
    try:
        hardware = find_hardware(device["name"])
    except ConfigError:
        hardware = find_hardware(f"{device['memory_gib']:.1f}GiB")
    return dataclasses.replace(hardware, memory=int(device["memory_gib"] * GIB))


# Planning, in processes of its own


@contextmanager
def plan_in_processes(
    cases: Sequence[Runnable], hardware: Hardware, plan: Planner | None = None
) -> Iterator[Callable[[Any, float], dict[str, Any]]]:
    """Plan the cases in as many processes as there are cores to spare, while the block runs.

    Yields `wait_for_plan(case, seconds)`, which returns the case's plan, or {"failed": why} without
    one after that time. plan: None for `plan_peaks`.
    """
    unique_cases = list(dict.fromkeys(cases))  # jobs share cases; in order, without duplicates
    # Two cores are left to the measurement.
    num_workers = max(1, min(12, (os.cpu_count() or 1) - 2, len(unique_cases)))
    # Forked, so that workers have the imports; this process has not touched the GPU.
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="gpu-plan-") as folder:
        files = {case: Path(folder) / f"{index}.json" for index, case in enumerate(unique_cases)}
        case_files = list(files.items())
        workers = []
        for index in range(num_workers):
            # Cases are dealt out in turn, so that the first ones are planned first.
            arguments = (case_files[index::num_workers], hardware, plan or plan_peaks)
            workers.append(context.Process(target=_plan_all, args=arguments))
        for worker in workers:
            worker.start()

        def wait_for_plan(case: Any, seconds: float) -> dict[str, Any]:
            """Return a case's plan, or {"failed": why}."""
            deadline = time.monotonic() + min(seconds, PLAN_SECONDS)
            worker = workers[unique_cases.index(case) % num_workers]
            while not files[case].exists():
                if time.monotonic() > deadline and worker.is_alive():
                    return {"failed": "no plan in time"}
                # The worker may have written the plan and ended since the loop looked.
                if not worker.is_alive() and not files[case].exists():
                    return {"failed": "the planner ended"}
                time.sleep(0.05)
            return json.loads(files[case].read_text())

        try:
            yield wait_for_plan
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _plan_all(case_files: list[tuple[Any, Path]], hardware: Hardware, plan: Planner) -> None:
    """Plan cases one after the other, and write each plan into its file.

    Runs in a process of its own, from which it hides the GPU.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    for case, file in case_files:
        try:
            planned = plan(case, hardware)
        except Exception as error:  # noqa: BLE001  (the other cases are planned still)
            planned = {"failed": f"planning: {type(error).__name__}: {error}"}
        # Renamed when it is whole, since another process waits for the file to exist.
        part = file.with_suffix(".part")
        part.write_text(json.dumps(planned))
        part.replace(file)


def plan_peaks(case: PlanCase, hardware: Hardware) -> dict[str, Any]:
    """Plan the peaks of a case by phase, as `read_peaks` returns them, and `pinned` host bytes.

    A case with `threshold` also has `caps`: bytes of the least device memory that it runs in,
    without and with expandable segments.
    """
    recipe_class, cfg = case.load()
    settings = PlanSettings(
        hardware, case.rows, case.ranks, traced_ranks=(case.rank,), phases=(), timed=False
    )
    plan, trace = make_plan(recipe_class, cfg, settings)
    planned: dict[str, Any] = read_peaks(plan.heaviest)
    planned["pinned"] = plan.heaviest.host
    if case.threshold:
        planned["caps"] = [
            find_smallest_cap(trace, expandable=False),
            find_smallest_cap(trace, expandable=True),
        ]
    return planned


def read_peaks(rank: RankPlan) -> dict[str, dict[str, int]]:
    """Return a rank's planned peaks: phase -> name of a figure of the allocator -> bytes."""
    names = ("requested", "active", "allocated", "reserved", "reserved_expandable")
    return {peak.phase: {name: getattr(peak, name) for name in names} for peak in rank.peaks}


# Measuring, each in a process of its own


def run_job(
    job: Job,
    *,
    gpu: bool,
    wait_for_plan: Callable[[PlanCase, float], dict[str, Any]],
    seconds_left: float,
    earlier_rows: list[PlanRow],
    fixtures: Path,
) -> dict[str, Any]:
    """Run a job and return its row of the report, a `PlanRow`.

    earlier_rows: of the report. fixtures: folder for recordings.
    """
    row: dict[str, Any] = {
        "kind": job.kind,
        "case": dataclasses.asdict(job.case),
        "expandable": job.expandable,
    }
    if seconds_left < LEAST_SECONDS:
        return row | {"skipped": "no time left"}
    seconds = min(CASE_SECONDS, seconds_left)
    if job.kind == "events":
        return row | _record_events(
            job, seconds=seconds, earlier_rows=earlier_rows, fixtures=fixtures
        )
    plan = wait_for_plan(job.case, seconds_left)
    if "failed" in plan:
        return row | plan
    if job.kind == "threshold":
        return row | _run_threshold(job, plan["caps"][job.expandable], seconds)
    row["planned"] = plan
    measure_case = (
        functools.partial(measure, job.case, job.expandable)
        if gpu
        else functools.partial(trace_on_cpu, job.case)
    )
    result = run_apart(measure_case, seconds)
    return row | (result if "failed" in result else {"measured": result})


def _run_threshold(job: Job, smallest_cap: int, seconds: float) -> dict[str, Any]:
    """Run a case just below or above its planned smallest cap, bytes."""
    cap = int(smallest_cap * job.factor)
    row = {"cap": cap, "said": "fits" if job.factor > 1 else "does not fit"}
    result = run_apart(
        functools.partial(measure, job.case, expandable=job.expandable, cap=cap), seconds
    )
    if "failed" in result:
        return row | result
    outcome = "ran out" if "out_of_memory" in result else "ran"
    return row | {"found": outcome, "result": result}


def measure(
    case: Runnable,
    expandable: bool = False,
    cap: int = 0,
    history: str = "",
    steady: int = STEADY_STEPS,
) -> dict[str, Any]:
    """Measure peaks and seconds of a case's steps on the GPU, in a process of its own.

    cap: bytes the allocator may take, 0: all. history: file to record the allocator's events in,
    empty: none. steady: number of steps after the first. Returns `run_steps`' dict and `retries`
    (times the allocator gave all back to find room), `outside` (bytes that context and kernels
    take), `total` (the device's bytes) and `pinned` (peak bytes of pinned host memory).
    Raises RuntimeError if the allocator did not take `expandable`.
    """
    choose_allocator(expandable)
    module: Any = torch.get_device_module("cuda")
    module.init()
    if history:
        # A replay needs every event from the process's first allocation on.
        module.memory._record_memory_history(
            enabled="all", context=None, stacks="python", max_entries=HISTORY
        )
    # Its collectives return at once and move nothing, so one process can be any rank of N.
    dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.ranks)
    recipe_class, cfg = case.load()
    with start_world(cfg) as world:
        if cap:
            total = module.get_device_properties(world.device).total_memory
            module.set_per_process_memory_fraction(min(1.0, cap / total), world.device)
        result = run_steps(
            recipe_class,
            cfg,
            world=world,
            case=case,
            module=module,
            whole_history=bool(history),
            steady=steady,
        )
        free, total = module.mem_get_info(world.device)
        stats = module.memory_stats(world.device)
        result["retries"] = stats.get("num_alloc_retries", 0)
        result["outside"] = total - free - stats.get("reserved_bytes.all.current", 0)
        result["total"] = total
        result["pinned"] = module.memory.host_memory_stats().get("allocated_bytes.peak", 0)
        snapshot = module.memory._snapshot()
        allocator_settings = snapshot.get("allocator_settings", {})
        if bool(allocator_settings.get("expandable_segments", expandable)) != expandable:
            raise RuntimeError(f"the allocator does not have expandable_segments={expandable}")
        if history:
            figures = {
                "allocated": stats["allocated_bytes.all.peak"],
                "active": stats["active_bytes.all.peak"],
                "reserved": stats["reserved_bytes.all.peak"],
                "retries": result["retries"],
            }
            events = read_snapshot_events(snapshot, cap=cap or None, measured=figures)
            write_fixture(events, Path(history))
            result["figures"] = figures
    return result


def choose_allocator(expandable: bool) -> None:
    """Choose whether segments are expandable, before the process's first use of the device."""
    setting = f"expandable_segments:{expandable}"
    # The older and the newer name of one variable.
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = setting
    os.environ["PYTORCH_ALLOC_CONF"] = setting
    # The variables may have been read already, when torch was imported. Older versions of torch
    # have the second function alone.
    set_allocator_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_allocator_settings is None:
        cuda_memory: Any = torch.get_device_module("cuda").memory
        set_allocator_settings = cuda_memory._set_allocator_settings
    set_allocator_settings(setting)


def run_steps(
    recipe_class: type,
    cfg: Any,
    *,
    world: World,
    case: Runnable,
    module: Any,
    whole_history: bool,
    steady: int = STEADY_STEPS,
) -> dict[str, Any]:
    """Set up a recipe and run its first step and `steady` later ones, the planner's two phases.

    module: `torch.cuda`. whole_history: peaks count from the process's start, as those of recorded
    events do; else from the step's. Returns `peaks` (phase -> figure of METRICS -> bytes, of later
    steps the most), `seconds` of each step, and after running out of memory `out_of_memory`: the
    phase.
    """
    result: dict[str, Any] = {"peaks": {}, "seconds": []}
    phase = "setup"
    gc.collect()
    gc.disable()  # the collector would free tensors at moments that no other run repeats
    try:
        recipe: Any = recipe_class(cfg, world)
        recipe.setup_model()
        fill_weights(recipe.model)
        teacher = getattr(recipe, "teacher", None)
        if teacher is not None:
            fill_weights(teacher)
        recipe.setup_optimizer()
        recipe.data = PlannedData(cfg, world, case.rows)
        for phase in (FIRST, *[STEADY] * steady):
            if not whole_history:
                module.reset_peak_memory_stats(world.device)
            batches = next(recipe.data.batches())
            for batch in batches.micro_batches:
                # At random, since equal tokens are computed faster.
                batch.tokens.random_(recipe.spec.vocab_size)
            began = time.perf_counter()
            recipe.train_step(batches)
            # Else these names would hold the batch while the next one is made.
            del batch, batches
            module.synchronize(world.device)
            result["seconds"].append(time.perf_counter() - began)
            stats = module.memory_stats(world.device)
            peaks = {name: stats[f"{name}_bytes.all.peak"] for name in METRICS}
            earlier_peaks = result["peaks"].get(phase, peaks)
            result["peaks"][phase] = {
                name: max(peaks[name], earlier_peaks[name]) for name in METRICS
            }
    except torch.OutOfMemoryError:
        result["out_of_memory"] = phase
    return result


def trace_on_cpu(case: Runnable) -> dict[str, Any]:
    """Run a case on the CPU under the planner's tracer, and return `peaks` by phase.

    They have `requested` alone, bytes of tensors that are alive: a CPU has no caching allocator.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.ranks)
    recipe_class, cfg = case.load()
    cfg.device = "cpu"
    with start_world(cfg) as world:
        peaks = trace_real_run(
            recipe_class, cfg=cfg, world=world, sequence=case.rows
        ).trace.find_active_peaks()
    return {"peaks": {phase: {"requested": peaks[phase]} for phase in (FIRST, STEADY)}}


def _record_events(
    job: Job, *, seconds: float, earlier_rows: list[PlanRow], fixtures: Path
) -> dict[str, Any]:
    """Record a case's events and replay them; store a recording of at most FIXTURE_BYTES.

    Returns {"failed": why}, or `file`, `size` and `cap` in bytes, `figures` as measured, and the
    keys of `compare_events`.
    """
    cap = 0
    if job.factor:
        uncapped_figures = _find_uncapped_figures(job.case, earlier_rows)
        if uncapped_figures is None:
            return {"failed": "there is no recording without a cap to choose one by"}
        allocated = uncapped_figures["allocated"]
        cap = int(allocated + job.factor * (uncapped_figures["reserved"] - allocated))
    # Of the file's name.
    name_parts = [
        job.case.method,
        job.case.model,
        f"{job.case.ranks}x{job.case.sequence}",
        job.case.checkpointing,
    ]
    if job.expandable:
        name_parts.append("expandable")
    if cap:
        name_parts.append("capped")
    with tempfile.TemporaryDirectory(prefix="gpu-plan-") as folder:
        file = Path(folder) / f"{'-'.join(name_parts)}.json.gz"
        result = run_apart(
            functools.partial(
                measure, job.case, expandable=job.expandable, cap=cap, history=str(file)
            ),
            seconds,
        )
        if "failed" in result:
            return result
        replay = run_apart(functools.partial(compare_events, str(file), result["figures"]), seconds)
        if file.stat().st_size <= FIXTURE_BYTES:
            fixtures.mkdir(parents=True, exist_ok=True)
            (fixtures / file.name).write_bytes(file.read_bytes())
        recording = {
            "file": file.name,
            "size": file.stat().st_size,
            "cap": cap,
            "figures": result["figures"],
        }
        return recording | replay


def _find_uncapped_figures(case: PlanCase, rows: list[PlanRow]) -> dict[str, int] | None:
    """Return the figures of a case's recording by the default allocator; None if there is none."""
    for row in rows:
        is_recording = row["kind"] == "events" and "figures" in row
        if is_recording and not row["expandable"] and row["case"] == dataclasses.asdict(case):
            return row["figures"]
    return None


def compare_events(file: str, figures: dict[str, int]) -> dict[str, Any]:
    """Replay a recording in the planner's model of the allocator, and compare.

    figures: as measured, bytes and `retries`. Returns `events` (their number), `first_difference`
    (index of the first segment that differs, None if none does) and `different` (the replay's value
    of each figure that is not the measured one).
    """
    stream = read_fixture(Path(file))
    replay = replay_events(stream)
    replayed_figures = {name: getattr(replay, name) for name in figures}
    return {
        "events": len(stream["events"]),
        "first_difference": replay.first_difference,
        "different": {
            name: replayed_figures[name]
            for name in figures
            if replayed_figures[name] != figures[name]
        },
    }


def describe_job(job: Job) -> str:
    """Describe a job in a few words, for the log."""
    allocator = ", expandable" if job.expandable else ""
    factor = f", x {job.factor}" if job.factor else ""
    return f"{job.kind}, {describe(job.case)}{allocator}{factor}"


def describe_row(row: PlanRow) -> str:
    """Describe the outcome of a row in a few words: of peaks, errors of later steps."""
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
    errors = [
        f"{name} {error:+.2%}" for phase, name, error in compute_errors(row) if phase == STEADY
    ]
    return ", ".join(errors)
