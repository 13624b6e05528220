"""benchmarks/gpu_check.py peers: who did equal work, when goals are met, our side beside what peers recorded."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from benchmarks import gpu_check
from benchmarks.peers import gpu_peers, ground, report
from benchmarks.peers.cases import PACKAGES, SIDES, TOOLS, PeerCase, cases, tolerances
from benchmarks.peers.planted.running import Result
from recipe_lib.tokenizers import load_tokenizer

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this would be the real comparison"),
]
RECORDED = Path(__file__).parent.parent / "docs" / "measurements" / "peers-dry-run-cpu.json"
CASE = PeerCase("full", 8, 1, "none", 1e-3, steps=4, warmup=1)


def run_of(*losses: float, norm: float = 1.0, step: float = 0.5, **memory: int) -> dict[str, Any]:
    """A record with a slow first step, whose time must not count."""
    marks = [100.0 + step * (at + 9 * (at > 0)) for at in range(len(losses))]
    return {"losses": list(losses), "grad_norms": [norm] * len(losses), "marks": marks, **memory}


def test_work_is_equal_at_every_step_or_it_is_not():
    ours = run_of(4.0, 3.0, 2.0, 1.0)
    others = {
        "same": run_of(4.0, 3.0, 2.0, 1.00005),
        "last": run_of(4.0, 3.0, 2.0, 1.0002),
        "norm": run_of(4.0, 3.0, 2.0, 1.0, norm=1.002),
        "short": run_of(4.0, 3.0, 2.0),
        "broken": run_of(4.0, 3.0, 2.0, float("nan")),
    }
    results = {"ours": {"runs": [ours]}} | {name: {"runs": [found]} for name, found in others.items()}
    results["later"] = {"runs": [ours, others["last"]]}  # of several runs the worst counts
    results["gone"] = {"runs": [{"failed": "out of memory"}]}
    found = report.compare(results, CASE, "fp32")
    assert {name: told["equal"] for name, told in found.items()} == {
        "ours": True, "same": True, "last": False, "norm": False, "short": False, "broken": False, "later": False
    }  # fmt: skip
    assert found["last"]["loss"] == pytest.approx(2e-4) and found["norm"]["grad_norm"] == pytest.approx(2e-3)
    assert report.relative_difference([0.0, 1.0], [0.0, 1.0]) == 0 < report.relative_difference([0.0], [1e-9])
    without = report.compare({"trl": {"runs": [ours]}}, CASE, "fp32")
    assert without["trl"]["equal"] is None


def test_seconds_of_a_step_leave_the_first_ones_out():
    runs = [run_of(4, 3, 2, step=step) for step in (0.5, 0.25, 2.0)]
    assert report.seconds_per_step({"runs": [*runs, {"failed": "out of memory"}]}, CASE) == 0.5
    assert report.seconds_per_step({"runs": [run_of(1.0)]}, CASE) is None


@pytest.mark.parametrize(
    "speed, reserved, told",
    [(2200, 50, "1.10 times slow in no more memory (ours), met"), (2200, 51, "more memory (ours), MISSED"),
     (2100, 50, "1.05 times slow in no more memory (ours), MISSED")],
)  # fmt: skip
def test_goals(speed: float, reserved: float, told: str):
    sides = {
        "ours": {"tokens_per_second": speed, "reserved": reserved, "share": 0.5},
        "slow": {"tokens_per_second": 2000, "reserved": 50},
        "wrong": {"tokens_per_second": 9000, "reserved": 1},  # fast, but it did other work
    }
    same = {"ours": {"equal": True}, "slow": {"equal": True}, "wrong": {"equal": False}}
    first, last = report.goals([(CASE, sides)], [same])
    assert first.endswith("50.0% (ours), met") and last.endswith(told)
    sides["ours"]["share"] = 0.49
    assert report.goals([(CASE, sides)], [same])[0].endswith("49.0% (ours), MISSED")
    (lora,) = [case for case in cases(gpu=True) if case.name == "lora-4096"]
    assert "MISSED" in report.goals([(lora, sides)], [same])[0]
    assert report.goals([(CASE, {})], [{}]) == ["full-8: not measured"]


def test_what_is_shown_of_a_gpu(tmp_path: Path):
    """A device that is not there: times, shares and memory are in the page; paths of this machine are not."""
    folder = tmp_path / "model"
    ground.make_model("demo/0.5M", folder, torch.float32)
    entry = report.case_entry(CASE, {"told": "a model", "model": str(folder)})
    sizes = {"allocated": 2**30, "reserved": 2**31}
    entry["results"] = {
        "ours": {"runs": [run_of(4, 3, 2, 1, **sizes), {"failed": "no time left"}]},
        "torchtune": {"runs": [run_of(4, 3, 2, 1.5, **sizes)]},
        "trl": {"runs": [{"failed": "out of memory"}]},
        "unsloth": {"runs": [], "absent": "not run: no environment unsloth"},
    }
    device = dict.fromkeys(("memory_gib", "driver", "cuda", "power_limit"), "1") | {"type": "cuda", "name": "A Card"}
    told: dict[str, Any] = {
        "kind": "Head to head",
        "date": "",
        "command": "",
        "repeats": 2,
        "dtype": "bf16",
        "versions": {"ours": {}},
    }
    told |= {"device": device, "matmul": 1e9, "cases": [entry]}
    report.judge(entry, str(folder), told)
    paths = report.write_peers_report(told, tmp_path / "out")
    kept, page = (path.read_text(encoding="utf-8") for path in paths)
    assert [path.name for path in paths] == ["peers-a-card.json", "peers-a-card.md"]
    assert str(tmp_path) not in kept + page and '"marks"' in kept
    assert "| ours, 1 of 2 runs | 4.00000 | 1.00000 | 0.0e+00 | 0.0e+00 | yes | 0.500 | 16 |" in page
    assert "| torchtune | 4.00000 | 1.50000 | 5.0e-01 | 0.0e+00 | NO |" in page and "| trl | out of memory |" in page
    assert "equal work: 0 of 1 runs of peers; not shown for torchtune in full-8" in page
    assert "| unsloth | not run: no environment unsloth |" in page and "no peer did equal work" in page
    assert report.earlier_cases(paths[0], ["full-9"]) == [entry] and report.earlier_cases(paths[0], ["full-8"]) == []
    assert gpu_peers.verdict(told) == 1
    del entry["results"]["ours"]["runs"][1], entry["results"]["torchtune"], entry["results"]["trl"]
    report.judge(entry, str(folder), told)
    assert gpu_peers.verdict(told) == 0


def test_rows_are_the_same_ids_as_an_array_and_as_text(tmp_path: Path):
    places = ground.make_rows(CASE, 300, tmp_path)
    ground.make_tokenizer(300, tmp_path)
    rows = np.load(places["rows"])
    assert rows.shape == (4, 8) and rows.min() >= 3 and rows.max() < 300 and len(np.unique(rows)) > 20
    tokenizer = load_tokenizer(tmp_path)
    texts = [json.loads(line)["text"] for line in Path(places["texts"]).read_text().splitlines()]
    assert [tokenizer.encode(text) for text in texts] == rows.tolist()


def test_a_large_model_is_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ground, "SHARD_BYTES", 2**19)
    ground.make_model(str(cases(gpu=False)[-1].own_model), tmp_path, torch.bfloat16)
    places = json.loads((tmp_path / ground.INDEX).read_text())["weight_map"]
    assert len(set(places.values())) > 2
    for name, file in places.items():
        with safe_open(str(tmp_path / file), framework="pt") as opened:
            values = opened.get_tensor(name).float()
        assert values.std() == pytest.approx(0.0 if name.endswith("norm.weight") else 0.1, abs=0.01)


def test_cases_and_sides():
    found = {case.name for case in cases(gpu=True)}
    assert found == {"full-2048", "full-8192", "lora-2048", "lora-4096", "lora-8192", "qlora-4096"}
    assert set(PACKAGES) == {"trl", "torchtune", "unsloth"} and "transformers" in TOOLS
    for case in cases(gpu=False):
        loss, norm = tolerances(case, "fp32")
        assert loss <= (5e-3 if case.method == "qlora" else 1e-4) and norm <= 2e-2
    for side in SIDES:
        assert (gpu_peers.SCRIPTS / side.script).is_file() and side.told
    assert SIDES[-1].modules(cases(True)[0])[0] == "unsloth"  # before transformers, which it patches


def test_the_command_is_told_without_where_its_files_go():
    words = ["--output", "/tmp/a", "--tools", "ours", "--work", "b", "--keep"]
    assert gpu_peers.command_of(words) == "python benchmarks/gpu_check.py peers --tools ours --keep"


def test_why_a_side_has_no_figures(tmp_path: Path):
    (case, *_), by_name = cases(gpu=True), {side.name: side for side in SIDES}
    assert gpu_peers.absence(by_name["unsloth"], case, tmp_path, gpu=False) == "not run: needs a GPU"
    assert gpu_peers.absence(by_name["trl"], case, tmp_path, gpu=False) == "not run: no environment trl"
    lines = [(0.0, "Traceback (most recent call last):"), (0.1, "ValueError: a | b"), (0.2, "closing")]
    assert gpu_peers.reason(Result([], 1, lines)) == "ValueError: a / b"
    assert gpu_peers.reason(Result([], 1, [(0.0, "torch.OutOfMemoryError: CUDA")])) == "out of memory"
    assert gpu_peers.reason(Result([], None, [], 7.0, timed_out=True)) == "not done after 7 s"


@pytest.mark.parametrize(
    "words, told",
    [(["--cases", "full-9"], "there are none of these here"), (["--model", "gemma2/2B"], "expected a Llama"),
     (["--model", "nowhere"], "no such preset or file")],
)  # fmt: skip
def test_mistakes_are_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert gpu_peers.main(["--tools", "ours", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    with pytest.raises(SystemExit):
        gpu_peers.main(["--tools", "outs"])


@pytest.mark.parametrize("name", ["full-64", "lora-128", "qlora-64"])
def test_our_steps_are_those_that_peers_recorded(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The run itself, in a fork; losses and norms of each peer are those in the report of the dry run."""
    if name == "qlora-64":
        pytest.importorskip("torchao")
    monkeypatch.syspath_prepend(gpu_peers.SCRIPTS)
    from run_ours import main as run_ours

    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    (entry,) = [entry for entry in recorded["cases"] if PeerCase(**entry["case"]).name == name]
    case, (ours, *_) = PeerCase(**entry["case"]), SIDES
    assert case in cases(gpu=False)
    model = case.own_model or str(request.getfixturevalue("realdata") / "stories260K-hf")
    given = gpu_peers.make_ground(model, tmp_path, "fp32")
    task = {
        **given,
        **ground.make_rows(case, given["size"], tmp_path),
        **gpu_peers.settings(case, ours, False, tmp_path),
    }
    (tmp_path / "task.json").write_text(json.dumps(task))
    assert gpu_check.run_apart(lambda: {"code": run_ours(str(tmp_path / "task.json"))}, 120) == {"code": 0}
    record = json.loads(Path(task["output"]).read_text())
    peers = {side: result for side, result in entry["results"].items() if report.good_runs(result)}
    assert {"transformers", "trl", "torchtune"} <= set(peers)
    same = report.compare(peers | {"ours": {"runs": [record]}}, case, "fp32")
    assert all(found["equal"] for found in same.values()), same
    plain = report.compare(peers | {"ours": {"runs": [record]}}, dataclasses.replace(case, method="full"), "fp32")
    assert plain["torchtune"]["equal"]  # its NF4 is torchao's, as ours is


def test_memory_is_the_most_of_all_steps_but_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A device that is not there, and a tool that resets its peaks."""
    monkeypatch.syspath_prepend(gpu_peers.SCRIPTS)
    from recorder import Recorder

    class Device:
        readings, resets = iter([7, 5]), 0

        def synchronize(self) -> None:
            pass

        def reset_peak_memory_stats(self) -> None:
            self.resets += 1

        def max_memory_allocated(self) -> int:
            return next(self.readings)

        def max_memory_reserved(self) -> int:
            return 9

    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    recorder = Recorder({"output": str(tmp_path / "record.json"), "device": "cuda"})
    for loss in (3.0, torch.tensor(2.0), 1.0):
        recorder.step(loss, torch.tensor(0.5))
    recorder.write()
    found = json.loads((tmp_path / "record.json").read_text())
    assert found["losses"] == [3, 2, 1] and found["grad_norms"] == [0.5] * 3 and len(found["marks"]) == 3
    assert (found["allocated"], found["reserved"], device.resets) == (7, 9, 1)
