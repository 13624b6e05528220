"""`tune import`: what it prints where, what it writes, and what it refuses."""

import json
import os
from pathlib import Path

import pytest

from recipe_lib.cli.main import main
from tests.cli.commands import ROOT, tune

THEIRS = ROOT / "tests" / "config" / "other_tools" / "axolotl" / "lora_alpaca.yaml"
FACTORY = ROOT / "tests" / "config" / "other_tools" / "llama_factory" / "dpo_lora.yaml"


def test_the_config_is_printed_and_the_table_told_apart(capsys: pytest.CaptureFixture):
    assert main(["import", str(THEIRS)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("# Imported from lora_alpaca.yaml of axolotl: ")
    assert (
        "#   tune run lora_finetune_distributed --config mine.yaml\nrecipe: lora_finetune_distributed\n" in printed.out
    )
    assert printed.err.startswith("lora_alpaca.yaml: a config of axolotl\ncarried (")
    for key, said in (("lora_r", "-> lora.rank: 32"), ("tf32", "matrices are multiplied in dtype"),
                      ("val_set_size", "-> validation.source: "), ("their default", "(2)")):  # fmt: skip
        row = next(line for line in printed.err.splitlines() if line.strip().startswith(f"{key} "))
        assert said in row


def test_quiet_is_the_config_alone(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TUNE_VERBOSITY", "")  # restored after the test
    assert main(["import", "-q", str(THEIRS)]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out.startswith("# Imported")


def test_what_is_written_runs_as_any_config(tmp_path: Path, capsys: pytest.CaptureFixture):
    ours = tmp_path / "ours.yaml"
    assert main(["import", str(THEIRS), "--out", str(ours), "--model", "o/other", "epochs=1"]) == 0
    assert capsys.readouterr().out == f"{ours}\n"
    text = ours.read_text(encoding="utf-8")
    assert f"--config {ours}\n" in text and "  path: o/other\n" in text and "epochs" not in text
    assert main(["validate", str(ours)]) == 0
    assert "a valid config of lora_finetune_distributed" in capsys.readouterr().out


def test_no_file_is_replaced_and_none_is_left_by_an_error(tmp_path: Path, capsys: pytest.CaptureFixture):
    ours = tmp_path / "ours.yaml"
    ours.write_text("mine", encoding="utf-8")
    link = tmp_path / "link.yaml"
    link.symlink_to(tmp_path / "nowhere.yaml")
    for out, said in (
        (ours, "is there already; choose another name"),
        (link, "is there already; choose another name"),
        (tmp_path / "ours.txt", "expected a file that ends in .yaml or .yml"),
        (tmp_path / "none" / "ours.yaml", "no such folder; make it"),
    ):
        assert main(["import", str(THEIRS), "--out", str(out)]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("error: --out: ") and said in printed.err and printed.err.count("\n") == 1
        assert printed.out == ""
    assert main(["import", str(THEIRS), "--out", str(tmp_path / "new.yaml"), "batch_size=no"]) == 2
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "ours.yaml"] and ours.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere.yaml"], "error: nowhere.yaml: no such file; expected a config of another tool"),
        (["nowhere.txt"], "error: nowhere.txt: expected a file that ends in .yaml or .yml"),
        ([], "error: tune import: FILE is missing; see `tune import --help`"),
        (["x.yaml", "--frm", "axolotl"], "error: tune import: unknown option --frm; did you mean --from?"),
        (["x.yaml", "--from", "trl"], "error: tune import: argument --from: invalid choice: 'trl'"),
        ([str(THEIRS), "--without", "lora_x"], f"error: --without: {THEIRS} has no key 'lora_x'"),
        ([str(THEIRS), "batch_size=1", "batch_size=2"], "error: command line: batch_size: given twice"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture):
    assert main(["import", *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(line) and printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_fault_has_the_line_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture):
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(THEIRS.read_text(encoding="utf-8") + "neftune_noise_alpha: 5\n", encoding="utf-8")
    number = len(theirs.read_text(encoding="utf-8").splitlines())
    assert main(["import", str(theirs)]) == 2
    assert capsys.readouterr().err == (
        f"error: {theirs}:{number}: neftune_noise_alpha: '5': no noise is added to embeddings; "
        "--without neftune_noise_alpha imports the rest\n"
    )
    assert main(["import", str(theirs), "--without", "neftune_noise_alpha"]) == 0


def test_datasets_are_found_above_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """dataset_info.json lies in a folder next to those of the examples, from wherever it is called."""
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(FACTORY), "--from", "llama-factory"]) == 0
    assert "source: hub:llamafactory/DPO-En-Zh-20k:en" in capsys.readouterr().out


TRAINS = f"""base_model: o/m
datasets: [{{path: json, data_files: {ROOT}/examples/demo/train.jsonl, type: alpaca}}]
test_datasets: [{{path: json, data_files: {ROOT}/examples/demo/heldout.jsonl, type: alpaca}}]
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
sequence_len: 128
sample_packing: true
micro_batch_size: 4
max_steps: 3
warmup_steps: 2
optimizer: adamw_torch
learning_rate: 1e-3
lr_scheduler: linear
bf16: false
output_dir: ./out
"""


@pytest.mark.slow
def test_what_is_imported_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps, rates and what is trained are those that the file asks for."""
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(TRAINS, encoding="utf-8")
    model = ["~model.path", "model.preset=demo/0.5M", f"tokenizer.path={ROOT}/examples/demo/tokenizer", "device=cpu"]
    assert main(["import", "theirs.yaml", "--out", "ours.yaml", *model]) == 0
    done = tune("run", "ours.yaml", "data.max_samples=64", "validation.max_samples=8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in Path("out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [step["lr"] for step in steps if "lr" in step] == pytest.approx([0.5e-3, 1e-3, 1e-3])
    adapter = json.loads(Path("out/adapter/adapter_config.json").read_text(encoding="utf-8"))
    assert (adapter["r"], adapter["lora_alpha"], len(adapter["target_modules"])) == (4, 8, 7)
