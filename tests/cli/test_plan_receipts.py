"""Receipts from a run's end to the list: what is kept of which run, and that a run never pays for
it.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipe_lib.cli import plan, plan_during_run
from recipe_lib.cli.main import main as tune
from recipe_lib.config import load_config
from recipe_lib.config.schema import LoraFinetuneConfig
from recipe_lib.plan.build_plan import PlanSettings
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.measured.receipts import append_receipt, read_receipts
from recipe_lib.plan.simulated_world.planned_data import PlannedSequence
from recipe_lib.plan.simulated_world.shape_only_model import make_plannable
from tests.cli.commands import ROOT, build_environment
from tests.plan.made_receipts import build_receipt, build_run_files


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the receipts of these tests are."""
    monkeypatch.delenv("TUNE_RECEIPTS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "tune-recipes" / "receipts.jsonl"


def end_of_a_run(
    folder: Path, code: int = 0, changed: dict | None = None, **measured: object
) -> None:
    """What `tune run` does at its end, with the figures that a run on a GPU would have measured."""
    figures, summary, steps = build_run_files(output_dir=str(folder / "out"), **(changed or {}))
    (folder / "out").mkdir(exist_ok=True)
    (folder / "figures.json").write_text(json.dumps(figures))
    (folder / "out" / "summary.json").write_text(json.dumps(summary | measured))
    (folder / "out" / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in steps)
    )
    plan_during_run._compare(folder / "figures.json", time.time() - 60, code)


def test_each_run_on_a_gpu_adds_a_receipt(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture
):
    """And the first says so."""
    said = []
    for code in (0, 3):
        end_of_a_run(tmp_path, code)
        said.append(capsys.readouterr().err)
    receipts, unreadable = read_receipts(file)
    assert (len(receipts), unreadable) == (2, 0)
    assert receipts[0].run.config == "llama3/8B_lora" and receipts[0].measured["seconds"] == 2.5
    assert all("planned / measured: active 11.00 GiB / 10.00 GiB (+10.0%)" in text for text in said)
    assert str(file) in said[0] and "tune plan --receipts" in said[0] and "receipt" not in said[1]


@pytest.mark.parametrize(
    ("code", "variable", "kind"),
    [
        (0, None, "resident set"),
        (0, None, "resident set since start"),
        (0, "off", "device"),
        (5, None, "device"),
    ],
)
def test_nothing_is_kept_of_other_runs(
    code, variable, kind, tmp_path: Path, file: Path, monkeypatch
):
    """On a CPU, with TUNE_RECEIPTS=off, of a run that failed."""
    if variable:
        monkeypatch.setenv("TUNE_RECEIPTS", variable)
    end_of_a_run(tmp_path, code, memory_kind=kind)
    assert not file.parent.parent.exists()


@pytest.mark.parametrize(
    "obstacle", ["state", "state/tune-recipes", "state/tune-recipes/receipts.jsonl/x"]
)
def test_a_folder_that_cannot_be_written_is_one_warning(
    obstacle, tmp_path: Path, capsys: pytest.CaptureFixture
):
    if obstacle.endswith("x"):
        (tmp_path / obstacle).mkdir(parents=True)
    else:
        (tmp_path / obstacle).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / obstacle).write_text("a file where a folder should be")
    end_of_a_run(tmp_path)
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if not line.startswith("planned / measured")
    ]
    assert (
        len(lines) == 1 and lines[0].startswith("warning: ") and str(tmp_path / "state") in lines[0]
    )


def test_figures_that_say_nonsense_are_one_warning(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture
):
    end_of_a_run(tmp_path, changed={"run": {"recipe": 3}})
    end_of_a_run(tmp_path, changed={"tokens_per_second": float("nan")})
    assert capsys.readouterr().err.count("warning: ") == 2 and not file.exists()


def test_the_list(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    assert tune(["plan", "--receipts"]) == 0
    empty = capsys.readouterr().out
    assert empty.startswith(f"no receipts in {file}: ") and empty.count("\n") == 1
    append_receipt(file, build_receipt())
    assert tune(["plan", "--receipts"]) == 0
    assert "-1.4%" in capsys.readouterr().out
    assert tune(["plan", "--receipts", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["receipts"][0]["run"]["config"] == "llama3/8B_lora"
    for _ in range(2):  # its own file may be replaced
        assert tune(["plan", "--receipts", "--json", str(tmp_path / "list.json")]) == 0
    assert json.loads((tmp_path / "list.json").read_text())["file"] == str(file)
    (tmp_path / "notes.json").write_text("{}")
    assert tune(["plan", "--receipts", "--json", str(tmp_path / "notes.json")]) == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [(["demo/full"], "demo/full"), (["--device", "h100"], "--device"), (["--nnodes", "2"], "--nnodes"),
     (["--advice"], "--advice"), (["--context-gib", "1"], "--context-gib"), (["--calibrate", "x"], "--calibrate")],
)  # fmt: skip
def test_a_list_takes_no_other_words(words: list[str], named: str, capsys: pytest.CaptureFixture):
    assert tune(["plan", "--receipts", *words]) == 2
    assert (
        capsys.readouterr().err
        == f"error: --receipts: lists runs and makes no plan; leave {named} out\n"
    )


def test_a_file_that_is_none_is_one_line(file: Path, capsys: pytest.CaptureFixture):
    file.mkdir(parents=True)
    assert tune(["plan", "--receipts"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("error: --receipts: ") and "is a folder" in said and said.count("\n") == 1
    )


def test_the_list_needs_no_torch(file: Path):
    append_receipt(file, build_receipt())
    code = (
        "import sys\nfrom recipe_lib.cli.main import main\n"
        "assert main(['plan', '--receipts']) == 0\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=build_environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def quoted() -> str:
    card = find_hardware("rtx4090")
    cfg = load_config("llama3/8B_lora", ["max_seq_len=512"], LoraFinetuneConfig)
    settings = PlanSettings(
        card, PlannedSequence(512, "max_seq_len"), recipe="lora_finetune_distributed"
    )
    return plan.quote_receipt(cfg, make_plannable(cfg)[0], settings)


def test_a_plan_quotes_the_nearest(file: Path, monkeypatch: pytest.MonkeyPatch):
    assert quoted() == ""
    memory = find_hardware("rtx4090").memory
    append_receipt(file, build_receipt(card="h100"))
    assert quoted() == ""
    append_receipt(file, build_receipt(16.0, card_memory=memory, settings={"dtype": "fp32"}))
    append_receipt(
        file,
        build_receipt(17.0, card_memory=memory, settings={"dtype": "fp32", "mesh": "data_shard 2"}),
    )
    assert "planned 16.00 GiB reserved" in quoted()
    monkeypatch.setenv("TUNE_RECEIPTS", "off")
    assert quoted() == ""
    monkeypatch.delenv("TUNE_RECEIPTS")
    file.unlink()
    file.mkdir()  # what is wrong with the file is nothing to a plan
    assert quoted() == ""
