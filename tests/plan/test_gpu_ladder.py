"""benchmarks/gpu_check.py ladder and cards without a GPU: lines, comparisons, dry runs, what runs out."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_cards, gpu_check, gpu_ladder, gpu_plan
from benchmarks.fit import Line
from benchmarks.gpu_ladder_cases import EVERYTHING, LEVERS, PLAIN, SHIPPED, TINY, ConfigCase, Rung, ladder
from benchmarks.gpu_ladder_report import ladder_markdown
from benchmarks.longest import Longest
from recipe_lib.config.schema import MemoryConfig
from recipe_lib.plan.tracing.simulate import FIRST, STEADY
from recipe_lib.units import GIB

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this would be the real check"),
]


def test_every_key_of_the_section_memory_is_a_lever() -> None:
    keys = {word.removeprefix("memory.").partition("=")[0] for lever in LEVERS for word in lever.on}
    told_elsewhere = {
        "activation_offload_prefetch_layers",
        "host_memory_limit_gib",
    }  # how far ahead, and how much at most, of the others
    # A dense model has no experts, and streams what it trains by three keys at once: gpu_check.py plan has both.
    told_elsewhere |= {"stream_layers"}
    assert {field.name for field in dataclasses.fields(MemoryConfig)} <= keys | told_elsewhere


def plain_key(method: str) -> tuple[str, str, tuple[str, ...]]:
    """Of the line without levers."""
    return (method, PLAIN, ())


@pytest.mark.parametrize("method", ["full", "qlora"])
def test_a_line_differs_from_what_it_is_compared_with_by_one_lever(method: str) -> None:
    rungs = ladder(method)
    by_key = {rung.key: rung for rung in rungs}
    assert len(by_key) == len(rungs)
    mine = [lever for lever in LEVERS if method in lever.methods and method not in lever.kept]
    assert {rung.words for rung in rungs if rung.basis == PLAIN} == {(), *(lever.on for lever in mine)}
    common = {("memory.activation_checkpointing=none",), ("memory.loss_chunks=1",)}
    rounded = {("lora.quantize_base=none",)} if method == "qlora" else set()
    assert {rung.words for rung in rungs if rung.basis == SHIPPED} == {(), *common, *rounded}
    saving = {lever.off for lever in mine if lever.saves}
    assert {rung.words for rung in rungs if rung.basis == EVERYTHING} == {(), *saving, *rounded}
    plain = by_key[plain_key(method)].case
    assert plain.read(*(word for lever in mine for word in lever.off)) == plain.read(), "plain has one already"
    bases = {rung.key: rung.case.read() for rung in rungs if not rung.words}
    for rung in rungs:
        if rung.words:
            assert rung.case.overrides == (*by_key[rung.against].case.overrides, *rung.words)
            assert rung.case.read() != bases[rung.against]
        else:
            assert rung.against == plain_key(method)


def tiny_rungs(*changes: str) -> list[Rung]:
    """The plain line of the demo, and one for each of these overrides."""
    case = ConfigCase("demo/full", (*TINY, "batch_size=2"))
    added = [
        Rung("full", PLAIN, (word,), dataclasses.replace(case, overrides=(*case.overrides, word))) for word in changes
    ]
    return [Rung("full", PLAIN, (), case), *added]


def test_the_dry_run_compares_with_a_real_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rungs = tiny_rungs("memory.optimizer_offload=true", "compile=true", "matmul_dtype=fp8")
    monkeypatch.setattr(gpu_ladder, "rungs", lambda gpu, methods: rungs)
    assert gpu_check.main(["ladder", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gpu-ladder-dry-run-cpu.json").read_text())["rows"]
    for row in rows[:2]:
        assert set(row["measured"]["peaks"]) == {FIRST, STEADY}
        for phase, peaks in row["measured"]["peaks"].items():
            assert row["planned"][phase]["requested"] == peaks["requested"] > 0
    assert rows[2]["planned"]["active"] > 0 and "measured" not in rows[2] and "refused" in rows[3]["planned"]
    text = (tmp_path / "gpu-ladder-dry-run-cpu.md").read_text()
    assert "Nothing was measured on a GPU" in text and "refused: matmul_dtype: found fp8 for cpu" in text
    rows[1]["planned"][STEADY]["requested"] -= 1
    assert [gpu_ladder.is_wrong(row, False) for row in rows] == [False, True, False, False]
    assert gpu_ladder.is_wrong({"failed": "why"}, False) and gpu_ladder.is_wrong({"planned": {"failed": "why"}}, True)


def test_planned_lines_are_written_and_other_methods_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = dataclasses.replace(tiny_rungs()[0], method="lora")
    rungs = [*tiny_rungs("memory.cpu_offload=true"), lora]
    both = ("full", "lora")
    monkeypatch.setattr(gpu_ladder, "rungs", lambda gpu, methods=both: [r for r in rungs if r.method in methods])
    file = tmp_path / "ladder.md"
    earlier = {"rows": [gpu_ladder.row_of(lora) | {"planned": {"refused": "kept"}}]}
    file.with_suffix(".json").write_text(json.dumps(earlier))
    words = ["--planned", "--output", str(file), "--only", "full"]
    assert gpu_ladder.main([*words, "--device", "rtx4090"]) == 0
    plain, offloaded, kept = json.loads(file.with_suffix(".json").read_text())["rows"]
    assert kept["planned"] == {"refused": "kept"}
    assert plain["planned"]["host"] < offloaded["planned"]["host"] and plain["planned"]["tokens_per_second"] > 0
    assert 0 < offloaded["planned"]["tokens_per_second"] < plain["planned"]["tokens_per_second"]
    text = file.read_text()
    assert "Nothing here was measured" in text and "rtx4090" in text


def line(basis: str, words: tuple[str, ...], planned: dict[str, Any], **found: Any) -> dict[str, Any]:
    """A row as the report has it. planned: in GiB and tokens/s."""
    rung = Rung("full", basis, words, ConfigCase("llama3/8B_full", words), removed=basis != PLAIN and bool(words))
    sizes = {name: int(size * GIB) for name, size in planned.items() if name != "tokens_per_second"}
    figures = sizes | {"tokens_per_second": planned["tokens_per_second"], "verdict": "fits", "host": 0}
    against = [*rung.against[:2], list(rung.against[2])]
    shown = {
        "method": "full",
        "config": "llama3/8B_full",
        "overrides": list(words),
        "basis": basis,
        "words": list(words),
    }
    shown |= {
        "removed": rung.removed,
        "rounds": False,
        "exact": True,
        "against": against,
        "rows": 1,
        "row_tokens": 2048,
    }
    steady = dict.fromkeys(("active", "allocated", "reserved", "reserved_expandable"), sizes["active"])
    return shown | {"planned": figures | {FIRST: steady, STEADY: steady}, **found}


def test_lines_are_compared_with_their_basis_and_bases_with_plain() -> None:
    def measured(size: float, rate: float) -> dict[str, Any]:
        peaks = {STEADY: {name: int(size * GIB) for name in ("active", "allocated", "reserved")}}
        return {"peaks": peaks, "pinned": 0, "tokens_per_second": rate, "seconds": [1.0]}

    ran_out = {"peaks": {}, "out_of_memory": STEADY}
    rows = [
        line(PLAIN, (), {"active": 60, "reserved": 61, "tokens_per_second": 1000}, measured=measured(61, 900)),
        line(PLAIN, ("a=1",), {"active": 50, "reserved": 52, "tokens_per_second": 800}, measured=measured(50, 450)),
        line(SHIPPED, (), {"active": 20, "reserved": 21, "tokens_per_second": 500}, measured=measured(20, 300)),
        line(SHIPPED, ("a=0",), {"active": 24, "reserved": 25, "tokens_per_second": 600}, measured=ran_out),
        line(SHIPPED, ("b=0",), {"active": 24, "reserved": 25, "tokens_per_second": 600}, skipped="no time left"),
    ]  # fmt: skip
    device = {"type": "cuda", "name": "A Card", "memory_gib": 24, "driver": "1"}
    versions = dict.fromkeys(("torch", "python", "system"), "")
    report = {
        "kind": "",
        "date": "",
        "command": "",
        "hardware": "",
        "device": device,
        "versions": versions,
        "rows": rows,
    }
    text = ladder_markdown(report)
    own = "| `a=1` | 1 x 2048 | 50.00 GiB | -10.00 GiB | 52.00 GiB | 0 B | 800 | 0.80 x "
    assert f"{own}| 50.00 GiB | -11.00 GiB | 50.00 GiB | 0 B | 450 | 0.50 x |" in text
    own = "| shipped | 1 x 2048 | 20.00 GiB | -40.00 GiB | 21.00 GiB | 0 B | 500 | 0.50 x "
    assert f"{own}| 20.00 GiB | -41.00 GiB | 20.00 GiB | 0 B | 300 | 0.33 x |" in text
    assert "| `a=0` | 1 x 2048 | 24.00 GiB | +4.00 GiB | 25.00 GiB | 0 B | 600 | 1.20 x | out of memory, step |" in text
    assert "| 1.20 x | no time left |" in text and "worst -1.64%" in text and "skipped: 1 of 5 lines" in text


LINES = [
    Line("1B", "full", 1, [], verdict="fits"),
    Line("70B", "qlora", 2, ["batch_size=1"], verdict="risky", host=3),
    Line("8B", "qlora", 4, ["gradient_accumulation_steps=4", "memory.optimizer_offload=true"]),
    Line("8B", "full", 1, None),
    Line("8B", "full", 4, ["batch_size=1"], active=7, reserved=8),
]
FAR = [
    Longest("1B", "full", 1, 24, 2048, ("max_seq_len=2048",)),
    Longest("70B", "qlora", 2, 24, 4096, ("max_seq_len=4096",), 11, 12, host=10),
    Longest("8B", "qlora", 4, 24, 65536, ("max_seq_len=65536", "parallel.context=4")),
    Longest("8B", "full", 4, 24, 2048, ("max_seq_len=2048",)),
    Longest("8B", "full", 1, 24),
]


def test_lines_are_run_with_their_settings_and_their_longest_rows_the_most_telling_first() -> None:
    found = gpu_cards.jobs(LINES, FAR)
    assert [(job.model, job.method, job.cards, job.tokens) for job in found] == [
        ("8B", "full", 4, 0),
        ("8B", "qlora", 4, 0),
        ("70B", "qlora", 2, 0),
        ("8B", "qlora", 4, 65536),
        ("8B", "full", 4, 2048),
        ("1B", "full", 1, 0),
        ("1B", "full", 1, 2048),
        ("70B", "qlora", 2, 4096),
    ]
    assert (found[0].active, found[0].reserved, found[4].active) == (7, 8, 0)
    assert (found[2].host, found[2].said, found[7].host, found[7].said, found[7].active) == (3, "risky", 5, "fits", 11)
    cfg = found[3].case.read()
    assert cfg.max_seq_len == 65536 and cfg.parallel.context == 4 and not cfg.memory.optimizer_offload
    assert found[2].case == ConfigCase("llama3/70B_qlora", ("batch_size=1",), 2)


def test_the_cards_dry_run_runs_settings_and_longest_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_cards, "DRY", gpu_cards.DRY[:1])
    monkeypatch.setattr(gpu_cards, "DRY_LONGEST", gpu_cards.DRY_LONGEST[:1])
    assert gpu_check.main(["cards", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gpu-cards-dry-run-cpu.json").read_text())["rows"]
    assert [(row["row_tokens"], row["cards"]) for row in rows] == [(64, 2), (96, 2)]
    for row in rows:
        assert row["planned"][STEADY]["requested"] == row["measured"]["peaks"][STEADY]["requested"] > 0
        assert 21 * GIB < row["cap"] < 23.5 * GIB  # of 23.52 GiB, less context, reserve and NCCL
    assert "Nothing was measured on a GPU" in (tmp_path / "gpu-cards-dry-run-cpu.md").read_text()


@pytest.mark.parametrize(("rooms", "said"), [([True], "ran"), ([False, True], "ran, expandable segments"),
                                             ([False, False], "ran out, step")])  # fmt: skip
def test_what_runs_out_is_run_again_with_expandable_segments(
    rooms: list[bool], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def run_apart(work: Any, seconds: float) -> dict[str, Any]:
        calls.append(work.args[1:])
        peaks = {STEADY: {"active": GIB, "allocated": GIB, "reserved": GIB}}
        return {"peaks": peaks} | ({} if rooms[len(calls) - 1] else {"out_of_memory": STEADY})

    monkeypatch.setattr(gpu_cards, "run_apart", run_apart)
    job = gpu_cards.jobs(gpu_cards.DRY, [])[0]
    row = gpu_cards.row_of(job)
    row |= gpu_cards.measured(job, True, row["cap"], 60)
    assert calls == [(job.case, expandable, row["cap"]) for expandable in (False, True)[: len(rooms)]]
    assert gpu_cards.outcome(row) == said and gpu_cards.was_wrong(row) == (not rooms[-1])
    device = {"type": "cuda", "name": "A Card", "memory_gib": 24, "driver": "1"}
    report = gpu_plan.begun_report("cards", [], device, gpu_plan.hardware_of({"type": "cpu"})) | {"rows": [row]}
    assert f"| {said} |" in gpu_cards.cards_markdown(report)
    assert f"said fits, {said.split(',')[0]}: 1" in gpu_cards.summary(report)
    monkeypatch.setattr(gpu_cards, "free_host_memory", lambda: (2 * GIB, "free on this machine"))
    found = gpu_cards.measured(dataclasses.replace(job, host=3 * GIB), True, row["cap"], 60)
    assert found == {"skipped": "host memory: found 2.00 GiB, expected 3.00 GiB"}


def test_the_speed_is_that_of_the_median_step_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[str, Any] = {"peaks": {STEADY: {"active": 1}}, "seconds": [9.0, 2.0, 4.0, 1.0]}
    monkeypatch.setattr(gpu_ladder, "run_apart", lambda work, seconds: dict(ran))
    case = tiny_rungs()[0].case  # 2 rows of 64 tokens
    assert gpu_ladder.measured_line(case, {}, True, 60)["measured"]["tokens_per_second"] == 64
    ran["out_of_memory"] = STEADY
    assert "tokens_per_second" not in gpu_ladder.measured_line(case, {}, True, 60)["measured"]
    assert gpu_ladder.measured_line(case, {"refused": "by name"}, True, 60) == {}
    monkeypatch.setattr(gpu_ladder, "free_host_memory", lambda: (2 * GIB, "free on this machine"))
    found = gpu_ladder.measured_line(case, {"host": 3 * GIB}, True, 60)
    assert found == {"skipped": "host memory: found 2.00 GiB, expected 3.00 GiB"}
