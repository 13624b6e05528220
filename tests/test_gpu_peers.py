"""benchmarks/gpu_check.py peers: who did equal work, when goals are met, our side beside what peers
recorded.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.peers import gpu_peers, ground, report
from benchmarks.peers.cases import SIDES, PeerCase, list_cases
from benchmarks.peers.results import (
    CaseEntry,
    PeersReport,
    RunRecord,
    SideComparison,
    SideFigures,
    SideResult,
    read_peers_report,
)

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="on a GPU this would be the real comparison"
    ),
]
RECORDED = Path(__file__).parent.parent / "docs" / "measurements" / "peers-dry-run-cpu.json"
CASE = PeerCase("full", 8, 1, "none", 1e-3, steps=4, warmup=1)


@pytest.mark.parametrize(
    "speed, reserved, told",
    [(2200, 50, "1.10 times slow in no more memory (ours), met"), (2200, 51, "more memory (ours), MISSED"),
     (2100, 50, "1.05 times slow in no more memory (ours), MISSED")],
)  # fmt: skip
def test_goals(speed: float, reserved: float, told: str):
    entry = CaseEntry(CASE, "a model")
    entry.figures = {
        "ours": _make_figures(speed, reserved, share=0.5),
        "slow": _make_figures(2000, 50),
        "wrong": _make_figures(9000, 1),  # fast, but it did other work
    }
    for side in entry.figures:
        entry.comparison[side] = SideComparison(0.0, 0.0, equal=side != "wrong")
    first, last = report.format_goals([entry])
    assert first.endswith("50.0% (ours), met") and last.endswith(told)
    entry.figures["ours"] = _make_figures(speed, reserved, share=0.49)
    assert report.format_goals([entry])[0].endswith("49.0% (ours), MISSED")
    (lora,) = [case for case in list_cases(gpu=True) if case.name == "lora-4096"]
    assert "MISSED" in report.format_goals([dataclasses.replace(entry, case=lora)])[0]
    assert report.format_goals([CaseEntry(CASE, "a model")]) == ["full-8: not measured"]


def _make_figures(speed: float, reserved: int, share: float | None = None) -> SideFigures:
    return SideFigures(
        seconds=1.0,
        tokens_per_second=speed,
        flop_per_second=1.0,
        share=share,
        allocated=0,
        reserved=reserved,
    )


@pytest.mark.parametrize("path", [RECORDED, RECORDED.with_name("peers-nvidia-h200.json")])
def test_a_report_is_written_as_it_was_read(path: Path, tmp_path: Path):
    json_path, page_path = report.write_peers_report(read_peers_report(path), tmp_path)
    assert json_path.name == path.name
    assert json_path.read_text().rstrip() == path.read_text().rstrip()
    assert page_path.read_bytes() == path.with_suffix(".md").read_bytes()


def test_a_dry_run_keeps_no_step_times():
    entry = CaseEntry(CASE, "a model", {"ours": SideResult([RunRecord([1.0], [2.0], [3.0])])})
    written = PeersReport(
        kind="dry run", date="", command="", device={"type": "cpu"}, dtype="fp32", repeats=1,
        cases=[entry], matmul=None, versions={},
    ).to_json()  # fmt: skip
    runs = written["cases"][0]["results"]["ours"]["runs"]
    assert runs == [{"losses": [1.0], "grad_norms": [2.0]}]


@pytest.mark.parametrize("name", ["full-64", "qlora-64"])
def test_our_steps_are_those_that_peers_recorded(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The run itself, in a fork; losses and norms of each peer are those in the report of the dry
    run.
    """
    if name == "qlora-64":
        pytest.importorskip("torchao")
    monkeypatch.syspath_prepend(gpu_peers.SCRIPTS)
    from run_ours import main as run_ours

    recorded = read_peers_report(RECORDED)
    (entry,) = [entry for entry in recorded.cases if entry.case.name == name]
    case = entry.case
    ours = SIDES[0]
    assert case in list_cases(gpu=False)
    model = case.own_model or str(request.getfixturevalue("realdata") / "stories260K-hf")
    given = gpu_peers.make_ground(model, tmp_path, "fp32")
    task = {
        **given,
        **ground.make_rows(case, given["size"], tmp_path),
        **gpu_peers.build_settings(case, ours, False, tmp_path),
    }
    (tmp_path / "task.json").write_text(json.dumps(task))
    assert gpu_check.run_apart(lambda: {"code": run_ours(str(tmp_path / "task.json"))}, 120) == {
        "code": 0
    }
    record = RunRecord(**json.loads(Path(task["output"]).read_text()))
    peers = {side: result for side, result in entry.results.items() if result.list_good_runs()}
    assert {"transformers", "trl", "torchtune"} <= set(peers)
    same = report.compare(peers | {"ours": SideResult([record])}, case, "fp32")
    assert all(found.equal for found in same.values()), same
    plain = report.compare(
        peers | {"ours": SideResult([record])}, dataclasses.replace(case, method="full"), "fp32"
    )
    assert plain["torchtune"].equal  # its NF4 is torchao's, as ours is
