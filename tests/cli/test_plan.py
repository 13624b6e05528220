"""`tune plan` from its words to its files, and the process that makes the plan of a run."""

import io
import json
import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile

import pytest
import torch

from recipe_lib.cli import plan as plan_verb
from recipe_lib.cli import plan_during_run
from recipe_lib.cli.main import main as tune
from recipe_lib.config.suggest import show
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.measured.receipts import ReceiptRun, append_receipt, get_receipts_file
from recipe_lib.plan.plan_schema import DOES_NOT_FIT, FITS, Plan, read_typed
from recipe_lib.plan.tracing.trace import STORAGE_KINDS
from recipe_lib.plan.views.tables import list_outermost
from recipe_lib.units import MIB
from tests.cli.commands import ROOT, tune_forked
from tests.plan.apart import call_in_fork
from tests.plan.made_receipts import build_receipt
from tests.plan.timing.test_calibrate import good

RECIPE = "full_finetune_distributed"
CONFIG = ["--config", "demo/full", "data.max_samples=200", "~validation.source", "batch_size=2"]
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "num_local_experts": 4,
}


def main(words: list[str]) -> int:
    """`tune WORDS` in a process of its own, what it says said here."""
    code, out, err = call_in_fork(captured, words)
    sys.stdout.write(out)
    sys.stderr.write(err)
    return code


def captured(words: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = tune(words)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch):
    """Paths of the demo's config begin at the root of a clone."""
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
def test_all_that_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The report quotes a run that was measured, and so does the JSON."""
    monkeypatch.delenv("TUNE_RECEIPTS")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    measured = build_receipt(
        recipe=RECIPE, config="demo/full", card_memory=find_hardware("rtx4090").memory
    )
    append_receipt(get_receipts_file(), measured)
    files = {name: tmp_path / f"plan.{name}" for name in ("json", "html", "snapshot")}
    outputs = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert (
        main(["plan", "--nproc_per_node", "2", RECIPE, *CONFIG, "--device", "rtx4090", *outputs])
        == 0
    )
    said = capsys.readouterr().out
    assert said.startswith("FITS  2 x rtx4090")
    quote = (
        "receipt: 2026-11-20, rtx4090, full_finetune_distributed demo/full: planned 15.21 GiB"
        " reserved, measured"
    )
    assert f" {quote} 15.43 GiB (-1.4%); " in " ".join(said.split())
    plan = Plan.from_json(json.loads(files["json"].read_text(encoding="utf-8")))
    assert (plan.verdict, plan.ranks, plan.recipe, plan.config) == (FITS, 2, RECIPE, "demo/full")
    assert plan.overrides == CONFIG[2:]
    assert f"receipt: {plan.receipt}".startswith(quote)
    assert 0 < plan.sequence["tokens"] < 128
    assert "200 sequences" in plan.sequence["source"]
    assert [rank.rank for rank in plan.rank_plans] == [0]
    assert files["html"].read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    assert files["snapshot"].stat().st_size > 1000
    assert sorted(tmp_path.iterdir()) == sorted([*files.values(), tmp_path / "state"])


def test_exit_code_and_nothing_but_json(capsys: pytest.CaptureFixture):
    words = [*CONFIG, "--sequence", "max", "--device", "2GiB", "--reserve-gib", "2", "--json", "-"]
    assert main(["plan", *words]) == 3
    plan = Plan.from_json(json.loads(capsys.readouterr().out))
    assert plan.verdict == DOES_NOT_FIT
    assert plan.margin < 0
    assert plan.outside.reserve == 2048 * MIB
    assert plan.sequence["tokens"] == 128


@pytest.mark.slow
def test_a_change_in_a_copied_recipe_is_in_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture):
    """And --diff shows it; what the copy may not do is told with its line."""
    text = (ROOT / "recipes" / f"{RECIPE}.py").read_text(encoding="utf-8")
    line = "        materialize(self.model, cfg.memory, self.device)\n"
    keeps = (
        f"{line}        self.kept = torch.empty({64 * MIB}, dtype=torch.uint8,"
        " device=self.device)\n"
    )
    reads = f"{line}        print(next(self.model.parameters()).sum().item())\n"
    for name, changed in (
        ("planned_copy", line),
        ("planned_more", keeps),
        ("planned_reads", reads),
    ):
        (tmp_path / f"{name}.py").write_text(text.replace(line, changed), encoding="utf-8")
    common = [*CONFIG, "--sequence", "16", "--device", "24GB"]
    peaks = {}
    for name in ("planned_copy", "planned_more"):
        assert (
            main(
                [
                    "plan",
                    str(tmp_path / f"{name}.py"),
                    *common,
                    "--json",
                    str(tmp_path / f"{name}.json"),
                ]
            )
            == 0
        )
        plan = Plan.from_json(json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")))
        peaks[name] = {peak.phase: peak.active for peak in plan.rank_plans[0].peaks}["step"]
    assert peaks["planned_more"] - peaks["planned_copy"] == 64 * MIB
    capsys.readouterr()
    before = tmp_path / "planned_copy.json"
    assert main(["plan", str(tmp_path / "planned_more.py"), *common, "--diff", str(before)]) == 0
    assert "+64.00 MiB" in capsys.readouterr().out
    assert main(["plan", str(tmp_path / "planned_reads.py"), *common]) == 2
    number = next(
        at
        for at, found in enumerate(text.replace(line, reads).splitlines(), 1)
        if ".item()" in found
    )
    said = capsys.readouterr()
    place = f"{show(str(tmp_path / 'planned_reads.py'))}:{number}"
    assert said.err.startswith(f"error: {place}: reads a number back from the device")
    assert said.err.count("\n") == 1


def test_a_value_read_in_a_step_is_told_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    text = (ROOT / "recipes" / f"{RECIPE}.py").read_text(encoding="utf-8")
    step = "        self.optimizer.step()\n"
    copy = tmp_path / "planned_step.py"
    copy.write_text(text.replace(step, f"        assert loss < 100\n{step}"), encoding="utf-8")
    assert main(["plan", str(copy), *CONFIG, "--sequence", "16", "--device", "24GB"]) == 2
    number = text.splitlines().index(step.rstrip()) + 1
    said = capsys.readouterr().err
    assert said.startswith(
        f"error: {copy}:{number}: FullFinetune.train_step: reads the value of a tensor"
    )
    assert said.count("\n") == 1


def test_a_plan_uses_what_is_measured_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """And is none of another device."""
    file = tmp_path / "rates.json"
    monkeypatch.setattr(
        plan_verb, "calibrate", lambda path: path.write_text(json.dumps(good())) and "measured"
    )
    words = ["plan", RECIPE, *CONFIG, "--sequence", "16", "--calibrate", str(file), "--device"]
    assert main([*words, "rtx4090"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("measured\n") and "\n  step " in said and "not calibrated" not in said
    assert main([*words, "h100"]) == 2
    assert (
        "was measured on 'NVIDIA GeForce RTX 4090', the plan is for h100" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_mixture_of_another_library_is_planned_in_fp32(tmp_path: Path):
    """Its grouped matmul takes bf16 alone without data. While layers are compiled, too, which has
    torch set up its loggers anew; of its own process, for the same.
    """
    pytest.importorskip("transformers")
    (tmp_path / "mixtral.json").write_text(json.dumps(MIXTRAL), encoding="utf-8")
    words = [
        f"model.preset={tmp_path}/mixtral.json",
        "model.implementation=transformers",
        "dtype=fp32",
    ]
    done = tune_forked("plan", RECIPE, *CONFIG, *words, "compile=true", "--device", "24GB")
    assert done.returncode == 0 and not done.stderr
    assert "\nFITS: " in done.stdout


def test_an_operator_without_a_simulation_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def raise_fault(*_: object, **__: object) -> None:
        raise RuntimeError("Expected inputs of BF16 type")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", raise_fault)
    preset = ROOT / "recipe_lib" / "models" / "presets" / "demo"
    words = [
        f"model.preset={next(preset.glob('*.json'))}",
        "model.implementation=transformers",
        "dtype=fp32",
    ]
    assert main(["plan", RECIPE, *CONFIG, *words, "--device", "24GB"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: model.implementation=transformers: its class raised RuntimeError on the simu"
    )
    assert error.count("\n") == 1 and "try another dtype (found dtype=fp32)" in error


def test_a_relative_path_and_what_a_recipe_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """A fault in a step is told with its line, and nothing but the plan is on standard output."""
    text = (ROOT / "recipes" / f"{RECIPE}.py").read_text(encoding="utf-8")
    step = "        self.optimizer.step()\n"
    for name, added in (("planned_prints", "print(loss)"), ("planned_reads_here", "loss.item()")):
        (tmp_path / f"{name}.py").write_text(
            text.replace(step, f"        {added}\n{step}"), encoding="utf-8"
        )
    monkeypatch.chdir(tmp_path)
    common = [*CONFIG, "--sequence", "16", "--device", "24GB"]
    assert main(["plan", "planned_prints.py", *common, "--json", "-"]) == 0
    said = capsys.readouterr()
    assert Plan.from_json(json.loads(said.out)).verdict == FITS
    assert "FakeTensor" in said.err
    assert main(["plan", "planned_reads_here.py", *common]) == 2
    number = text.splitlines().index(step.rstrip()) + 1
    place = (
        f"error: {tmp_path / 'planned_reads_here.py'}:{number}: FullFinetune.train_step: reads the"
        " value of a tens"
    )
    assert capsys.readouterr().err.startswith(place)


def test_the_fused_sgd_is_planned_and_padding_is_said(capsys: pytest.CaptureFixture):
    """Its momentum is as large as the parameters. Rates are those of the run's own dtype."""
    words = [
        *CONFIG,
        "--sequence",
        "30",
        "--device",
        "24GB",
        "dtype=fp32",
        "data.pad_to_multiple_of=64",
        "--json",
        "-",
    ]
    assert main(["plan", *words, "optimizer.name=sgd", "optimizer.momentum=0.9"]) == 0
    plan = Plan.from_json(json.loads(capsys.readouterr().out))
    alive = {
        kind: sum(row.bytes for row in plan.heaviest.alive if row.kind == kind)
        for kind in STORAGE_KINDS
    }
    assert alive["optimizer"] == 4 * sum(row.parameters for row in list_outermost(plan.layers))
    assert (
        plan.device.flops
        == find_hardware("24GB").get_rate("fp32")
        < find_hardware("24GB").get_rate("bf16")
    )
    assert any(
        said.startswith("sequences of 30 tokens, padded to 64 ") for said in plan.assumptions
    )


def beside(
    figures: Path,
    *,
    seconds: int = plan_during_run.CPU_SECONDS,
    used: float = 0.0,
    run_ended: bool = False,
) -> tuple[str, int]:
    """(standard error, exit code) of the process that makes a run's plan, in a fork.

    It does not give way here, where nothing runs beside it. used: seconds of CPU that it has used
    before.
    """
    words = [
        str(figures),
        "--nproc_per_node",
        "2",
        RECIPE,
        *CONFIG,
        "data.cache=false",
        "output_dir=outputs/x",
    ]
    of_plan, of_run = os.pipe()  # the run's end is open as long as it goes on

    def begin() -> None:
        os.close(of_run)
        for number, descriptor in enumerate((of_plan, errors.fileno(), errors.fileno())):
            os.dup2(descriptor, number)
        sys.stdin = open(0, closefd=False)
        sys.stderr = open(2, "w", closefd=False)
        os.nice = id  # type: ignore[assignment]
        plan_during_run.CPU_SECONDS = seconds
        while time.process_time() < used:
            continue
        plan_during_run.main(words)

    with TemporaryFile("w+") as errors:
        process = get_context("fork").Process(target=begin)
        process.start()
        os.close(of_plan)
        if run_ended:
            os.close(of_run)
        process.join(60)
        if not run_ended:
            os.close(of_run)
        assert process.exitcode is not None
        errors.seek(0)
        return errors.read(), process.exitcode


@pytest.mark.slow
def test_the_plan_of_a_run(tmp_path: Path):
    said, code = beside(tmp_path / "figures.json")
    assert said.startswith(f"plan: {FITS} (2 x ")
    assert said.count("\n") == 1
    assert code == 0
    planned = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert planned["output_dir"] == str(ROOT / "outputs" / "x")
    assert 0 < planned["active"] <= planned["allocated"] <= planned["reserved"]
    assert planned["tokens_per_second"] > 0 and planned["own_device"] is False
    run = read_typed(ReceiptRun, planned["run"], "run")
    assert (run.recipe, run.config, run.ranks, run.settings["batch_size"]) == (
        RECIPE,
        "demo/full",
        2,
        "2",
    )


def test_a_plan_that_takes_too_long_is_one_line(tmp_path: Path):
    said, code = beside(tmp_path / "figures.json", seconds=1, used=0.8)
    assert (
        said == "plan: takes more than 1 s of CPU; `tune plan` with the same arguments makes it\n"
    )
    assert code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_plan_ends_with_its_run(tmp_path: Path):
    said, code = beside(tmp_path / "figures.json", run_ended=True)
    assert (said, code) == ("", 0)
    assert list(tmp_path.iterdir()) == []
