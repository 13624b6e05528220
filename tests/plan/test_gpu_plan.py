"""benchmarks/gpu_check.py plan without a GPU: cases, report, dry run. The replications: commands, imitated stacks."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check, gpu_plan
from benchmarks.allocator_events import events_from_snapshot, read_fixture, write_fixture
from benchmarks.gpu_plan import Job
from benchmarks.gpu_plan_cases import LABELED, PlanCase, cases, recorded
from benchmarks.gpu_plan_report import errors_of, plan_markdown, share_below, summary
from benchmarks.planner_stacks import FSDP1, FSDP2, Stack, recipe_class
from benchmarks.planner_streams import marking
from recipe_lib.config import FullFinetuneConfig, load_config
from recipe_lib.parallel import start_world
from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings
from recipe_lib.plan.allocation.replay import replay
from recipe_lib.plan.tracing.simulate import FIRST, STEADY, simulate
from recipe_lib.plan.world.sequence_lengths import Sequence
from recipe_lib.units import GIB
from tests.plan.allocation.test_snapshot import snapshot_of
from tests.plan.made_traces import steps_of_training

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this would be the real check"),
]
TINY = PlanCase("full", "demo", 4, 64)


def test_the_cases_cover_what_is_asked_and_are_valid() -> None:
    found = cases(gpu=True)
    assert len(found) == len(set(found)) >= 40
    for name, wanted in {
        "method": {"full", "lora", "qlora", "distill", "qat", *LABELED},
        "model": {"llama3_2/1B", "llama3_2/3B", "llama3/8B", "qwen3_moe/30B", "gpt_oss/20B", "olmoe/7B"},
        "ranks": {1, 2, 4, 8},
        "sequence": {512, 2048, 8192, 32768, 65536, 262144},
        "checkpointing": {"none", "selective", "full", "budget"},
        "wrapping": {"layers", "memory_efficient"},
    }.items():
        assert {getattr(case, name) for case in found} == wanted
    assert {case.optimizer for case in found} >= {"fused", "foreach", "single", "sgd foreach"}
    assert {(case.method, case.documents > 0) for case in found} >= {
        (method, packed) for method in ("full", "lora", "qlora") for packed in (False, True)
    }
    for case in [*found, *cases(gpu=False), *recorded()]:
        recipe, cfg = case.load()
        assert callable(recipe.train_step) and cfg.max_seq_len == case.rows.tokens
        assert cfg.data.packing == (case.documents > 0) and cfg.memory.activation_checkpointing == case.checkpointing
        assert getattr(getattr(cfg, "lora", None), "quantize_base", "none") == {"qlora": "nf4"}.get(case.method, "none")


def test_every_config_is_run_with_both_allocators_and_some_on_both_sides_of_their_caps() -> None:
    todo = gpu_plan.jobs(gpu=True)
    peaks = {(job.case, job.expandable) for job in todo if job.kind == "peaks"}
    assert peaks == {(case, expandable) for case in cases(True) for expandable in (False, True)}
    caps = [(job.case, job.expandable, job.factor > 1) for job in todo if job.kind == "threshold"]
    chosen = [case for case in cases(True) if case.threshold]
    assert len(caps) == len(set(caps)) == 4 * len(chosen) >= 16
    kinds = [job.kind for job in todo]
    assert kinds[0] == "events" and kinds[-1] == "peaks" and len(todo) == len(set(todo))


def row(error: float, *, expandable: bool = False) -> dict[str, Any]:
    """One whose figures were all planned too high by a share."""
    measured = {"active": 2 * GIB, "allocated": 3 * GIB, "reserved": 4 * GIB}
    planned = {name: int(size * (1 + error)) for name, size in measured.items()}
    planned["reserved_expandable"] = planned.pop("reserved") if expandable else 1
    planned.setdefault("reserved", 1)
    return {
        "kind": "peaks",
        "case": dataclasses.asdict(TINY),
        "expandable": expandable,
        "planned": {STEADY: planned},
        "measured": {"peaks": {STEADY: measured}},
    }


def report_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    device = {"type": "cuda", "name": "A Card", "memory_gib": 24, "driver": "1"}
    versions = dict.fromkeys(("torch", "python", "system"), "")
    return {"kind": "", "date": "", "command": "", "hardware": "", "device": device, "versions": versions, "rows": rows}


def test_goals_are_met_or_missed() -> None:
    assert share_below([-0.4, 0.1, 0.2, -0.3], 0.5) == 0.2 and share_below([0.1], 0.95) == 0.1
    good = [row(0.005, expandable=index % 2 == 1) for index in range(19)]
    assert {round(error, 6) for found in good for *_, error in errors_of(found)} == {0.005}
    lines = summary(report_of([*good, row(-0.5)]))
    assert lines[1].startswith("allocated: 20 figures, half within 0.50%, 95 % within 0.50%, worst -50.00%")
    assert lines[1].endswith("met") and lines[2].endswith("met") and len(lines) == 3
    lines = summary(report_of([*good, row(-0.02), row(0.02)]))
    assert lines[1].endswith("MISSED") and lines[2].endswith("met")


def test_what_was_said_to_fit_and_ran_out_is_told() -> None:
    common = {"kind": "threshold", "case": dataclasses.asdict(TINY), "expandable": False, "cap": GIB}
    rows = [
        common | {"said": said, "found": found, "result": {"retries": 2}}
        for said, found in [("fits", "ran"), ("fits", "ran"), ("does not fit", "ran out"), ("does not fit", "ran")]
    ]
    assert (
        "said fits: 2 ran, 0 ran out (goal 0: met); said does not fit: 1 ran out, 1 ran" in summary(report_of(rows))[3]
    )
    rows.append(common | {"said": "fits", "found": "ran out", "result": {"retries": 2}})
    rows.append(common | {"skipped": "no time left"})
    text = plan_markdown(report_of(rows))
    assert "1 ran out (goal 0: MISSED)" in text and "skipped: 1 of 6 rows" in text and "| 1.00 | fits | ran |" in text


def test_the_dry_run_compares_with_a_real_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_plan, "jobs", lambda gpu: [Job("peaks", TINY)])
    assert gpu_check.main(["plan", "--output", str(tmp_path)]) == 0
    assert "allocated: not measured" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-plan-dry-run-cpu.json", "gpu-plan-dry-run-cpu.md"]
    assert "Nothing was measured on a GPU" in (tmp_path / "gpu-plan-dry-run-cpu.md").read_text()
    (found,) = json.loads((tmp_path / "gpu-plan-dry-run-cpu.json").read_text())["rows"]
    assert [error for *_, error in errors_of(found)] == [0, 0]


class Module:
    """Stands in for the device's module: each reading of its statistics is one byte more."""

    def __init__(self) -> None:
        self.bytes = self.resets = 0

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        self.bytes += 1
        return {f"{name}_bytes.all.peak": self.bytes for name in ("requested", "active", "allocated", "reserved")}

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.resets += 1

    def synchronize(self, device: torch.device) -> None:
        if self.resets == 0:
            raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize("whole_history", [False, True])
def test_steps_are_run_as_the_planner_simulates_them(whole_history: bool) -> None:
    case = dataclasses.replace(TINY, ranks=1)

    def run() -> dict[str, Any]:
        recipe, cfg = case.load()
        with start_world(cfg) as world:
            return gpu_plan.run_steps(recipe, cfg, world, case, Module(), whole_history)

    found = gpu_check.run_apart(run, 60)
    seconds = found.pop("seconds")
    if whole_history:  # here it is also the one that runs out of memory
        assert found == {"peaks": {}, "out_of_memory": FIRST} and not seconds
        return
    assert len(seconds) == 3 and min(seconds) > 0
    alike = dict.fromkeys(("requested", "active", "allocated", "reserved"), 1)
    assert found == {"peaks": {FIRST: alike, STEADY: dict.fromkeys(alike, 3)}}


def test_recorded_events_are_kept_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, folder = steps_of_training(), tmp_path / "fixtures"

    def measure(case: PlanCase, expandable: bool, cap: int, history: str) -> dict[str, Any]:
        snapshot = snapshot_of(trace, tmp_path, expandable=expandable, cap=cap or None, by_fraction=bool(cap))
        stream = events_from_snapshot(snapshot, cap=cap or None)
        write_fixture(stream, Path(history))
        found = replay(trace, AllocatorSettings(expandable=expandable, cap=cap or None, by_fraction=bool(cap)))
        allocated = max(phase.allocated for phase in found.phases.values())
        return {"figures": {"reserved": stream["measured"]["reserved"], "allocated": allocated}}

    monkeypatch.setattr(gpu_plan, "measure", measure)
    report: dict[str, Any] = {"rows": []}
    for job in (Job("events", TINY), Job("events", TINY, factor=0.9)):
        report["rows"].append(gpu_plan.run_job(job, True, lambda *_: {}, 60, report, folder))
    free, capped = report["rows"]
    assert free["first_difference"] is None and not free["different"] and free["events"] > 10
    assert 0 < capped["cap"] < free["figures"]["reserved"] and capped["first_difference"] is None
    names = ["full-demo-4x64-full-capped.json.gz", "full-demo-4x64-full.json.gz"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert read_fixture(folder / names[0])["settings"]["cap"] == capped["cap"]
    assert "2 of 2 exact" in "\n".join(summary(report))
    late = gpu_plan.run_job(Job("events", TINY), True, lambda *_: {}, 0, report, folder)
    assert late["skipped"] == "no time left"


def test_imitated_stacks_hold_what_theirs_would() -> None:
    """fp32 where it was bf16 is twice as much; fp32 logits of 64 tokens over 512 words are held through backward."""
    stacks = {
        "plain": Stack(sharding=FSDP2, logits="until backward"),
        "mixed": Stack(sharding=FSDP2, logits="bf16 until backward", saved_matmuls=True, mixed=True),
        "flat": Stack(sharding=FSDP1, logits="through backward", norms=True, expanded_keys=True),
    }

    def run() -> dict[str, Any]:
        found = {}
        for name, stack in stacks.items():
            overrides = ["dtype=bf16", "memory.activation_checkpointing=full", "optimizer.implementation=single"]
            cfg = load_config("demo/full", [*overrides, "output_dir=nowhere", "batch_size=1"], FullFinetuneConfig)
            with marking():
                done = simulate(recipe_class(stack), cfg, Sequence(64, ""), ranks=4, phases=())
            stored: dict[str, int] = {}
            for number in done.trace.alive_at_peak(STEADY):
                storage = done.trace.storages[number]
                stored[storage.kind] = stored.get(storage.kind, 0) + storage.bytes
            found[name] = stored
        return found

    found = gpu_check.run_apart(run, 120)
    assert set(found) == set(stacks), found
    for kind in ("parameters", "optimizer"):
        assert found["mixed"][kind] == 2 * found["plain"][kind]
        assert found["flat"][kind] == pytest.approx(found["plain"][kind], rel=0.02)  # padded to a multiple of ranks
    assert found["flat"]["logits"] - found["plain"].get("logits", 0) == 4 * 64 * 512
