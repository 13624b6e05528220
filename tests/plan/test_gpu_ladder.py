"""benchmarks/gpu_check.py ladder and cards without a GPU: lines, comparisons, dry runs, what runs
out.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check, gpu_ladder
from benchmarks.gpu_ladder_cases import LEVERS, PLAIN, SHIPPED, TINY, ConfigCase, Rung
from benchmarks.gpu_ladder_report import format_page
from recipe_lib.config.schema import MemoryConfig
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY
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
    # A dense model has no experts, and streams what it trains by three keys at once: gpu_check.py
    # plan has both.
    told_elsewhere |= {"stream_layers"}
    assert {field.name for field in dataclasses.fields(MemoryConfig)} <= keys | told_elsewhere


def tiny_rungs(*changes: str) -> list[Rung]:
    """The plain line of the demo, and one for each of these overrides."""
    case = ConfigCase("demo/full", (*TINY, "batch_size=2"))
    added = [
        Rung("full", PLAIN, (word,), dataclasses.replace(case, overrides=(*case.overrides, word)))
        for word in changes
    ]
    return [Rung("full", PLAIN, (), case), *added]


def test_the_dry_run_compares_with_a_real_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rungs = tiny_rungs("memory.optimizer_offload=true", "matmul_dtype=fp8")
    monkeypatch.setattr(gpu_ladder, "list_rungs", lambda gpu, methods: rungs)
    assert gpu_check.main(["ladder", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gpu-ladder-dry-run-cpu.json").read_text())["rows"]
    for row in rows[:2]:
        assert set(row["measured"]["peaks"]) == {FIRST, STEADY}
        for phase, peaks in row["measured"]["peaks"].items():
            assert row["planned"][phase]["requested"] == peaks["requested"] > 0
    assert "refused" in rows[2]["planned"]
    text = (tmp_path / "gpu-ladder-dry-run-cpu.md").read_text()
    assert (
        "Nothing was measured on a GPU" in text
        and "refused: matmul_dtype: found fp8 for cpu" in text
    )
    rows[1]["planned"][STEADY]["requested"] -= 1
    assert [gpu_ladder.has_failed_or_differs(row, False) for row in rows] == [False, True, False]
    assert gpu_ladder.has_failed_or_differs(
        {"failed": "why"}, False
    ) and gpu_ladder.has_failed_or_differs({"planned": {"failed": "why"}}, True)


def line(
    basis: str, words: tuple[str, ...], planned: dict[str, Any], **found: Any
) -> dict[str, Any]:
    """A row as the report has it. planned: in GiB and tokens/s."""
    rung = Rung(
        "full",
        basis,
        words,
        ConfigCase("llama3/8B_full", words),
        removed=basis != PLAIN and bool(words),
    )
    sizes = {name: int(size * GIB) for name, size in planned.items() if name != "tokens_per_second"}
    figures = sizes | {
        "tokens_per_second": planned["tokens_per_second"],
        "verdict": "fits",
        "host": 0,
    }
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
    steady = dict.fromkeys(
        ("active", "allocated", "reserved", "reserved_expandable"), sizes["active"]
    )
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
    text = format_page(report)
    own = "| `a=1` | 1 x 2048 | 50.00 GiB | -10.00 GiB | 52.00 GiB | 0 B | 800 | 0.80 x "
    assert f"{own}| 50.00 GiB | -11.00 GiB | 50.00 GiB | 0 B | 450 | 0.50 x |" in text
    own = "| shipped | 1 x 2048 | 20.00 GiB | -40.00 GiB | 21.00 GiB | 0 B | 500 | 0.50 x "
    assert f"{own}| 20.00 GiB | -41.00 GiB | 20.00 GiB | 0 B | 300 | 0.33 x |" in text
    assert (
        "| `a=0` | 1 x 2048 | 24.00 GiB | +4.00 GiB | 25.00 GiB | 0 B | 600 | 1.20 x | out of"
        " memory, step |" in text
    )
    assert (
        "| 1.20 x | no time left |" in text
        and "worst -1.64%" in text
        and "skipped: 1 of 5 lines" in text
    )
