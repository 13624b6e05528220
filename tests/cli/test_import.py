"""`tune import`: what it prints where, what it writes, and what it refuses."""

import json
import os
from pathlib import Path

import pytest

from recipe_lib.cli.main import main
from tests.cli.commands import ROOT, tune_forked
from tests.config.test_torchtune_configs import STYLE


@pytest.fixture
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config in torchtune's style."""
    path = tmp_path_factory.mktemp("theirs") / "lora_alpaca.yaml"
    path.write_text(STYLE + "log_level: INFO\n", encoding="utf-8")
    return path


def test_the_config_is_printed_and_the_table_told_apart(
    theirs: Path, capsys: pytest.CaptureFixture
):
    assert main(["import", str(theirs)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("# Imported from lora_alpaca.yaml of torchtune; ")
    assert (
        "#   tune run lora_finetune_distributed --config mine.yaml\nrecipe:"
        " lora_finetune_distributed\n" in printed.out
    )
    assert printed.err.startswith("lora_alpaca.yaml: a config of torchtune's\ncarried (")
    for key, said in (("model.lora_rank", "-> lora.rank: 8"), ("log_level", "`tune run -q` and `-v` say less"),
                      ("dataset._component_", "data.source: hub:yahma"), ("their default", "(")):  # fmt: skip
        row = next(line for line in printed.err.splitlines() if line.strip().startswith(f"{key} "))
        assert said in row


def test_quiet_is_the_config_alone(
    theirs: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TUNE_VERBOSITY", "")  # restored after the test
    assert main(["import", "-q", str(theirs)]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out.startswith("# Imported")


def test_what_is_written_runs_as_any_config(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    ours = tmp_path / "ours.yaml"
    assert main(["import", str(theirs), "--out", str(ours), "--model", "o/other", "epochs=1"]) == 0
    assert capsys.readouterr().out == f"{ours}\n"
    text = ours.read_text(encoding="utf-8")
    assert f"--config {ours}\n" in text and "  path: o/other\n" in text and "epochs" not in text
    assert main(["validate", str(ours)]) == 0
    assert "a valid config of lora_finetune_distributed" in capsys.readouterr().out


def test_no_file_is_replaced_and_none_is_left_by_an_error(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
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
        assert main(["import", str(theirs), "--out", str(out)]) == 2
        printed = capsys.readouterr()
        assert (
            printed.err.startswith("error: --out: ")
            and said in printed.err
            and printed.err.count("\n") == 1
        )
        assert printed.out == ""
    assert main(["import", str(theirs), "--out", str(tmp_path / "new.yaml"), "batch_size=no"]) == 2
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "ours.yaml"] and ours.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere.yaml"], "error: nowhere.yaml: no such file; expected a config of torchtune's"),
        (["nowhere.txt"], "error: nowhere.txt: expected a file that ends in .yaml or .yml"),
        ([], "error: tune import: FILE is missing; see `tune import --help`"),
        (
            ["x.yaml", "--witout", "seed"],
            "error: tune import: unknown option --witout; did you mean --without?",
        ),
        (
            ["x.yaml", "--from", "axolotl"],
            "error: tune import: argument --from: invalid choice: 'axolotl'",
        ),
        (["THEIRS", "--without", "lora_x"], "error: --without: THEIRS has no key 'lora_x'"),
        (
            ["THEIRS", "batch_size=1", "batch_size=2"],
            "error: command line: batch_size: given twice",
        ),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], line: str, theirs: Path, capsys: pytest.CaptureFixture
):
    assert main(["import", *(word.replace("THEIRS", str(theirs)) for word in words)]) == 2
    printed = capsys.readouterr()
    assert (
        printed.err.startswith(line.replace("THEIRS", str(theirs))) and printed.err.count("\n") == 1
    )
    assert printed.out == ""


def test_their_own_name_may_be_said(theirs: Path):
    assert main(["import", str(theirs), "--from", "torchtune"]) == 0


def test_a_fault_has_the_line_of_the_file(theirs: Path, capsys: pytest.CaptureFixture):
    theirs.write_text(STYLE + "resume_from_checkpoint: True\n", encoding="utf-8")
    number = len(theirs.read_text(encoding="utf-8").splitlines())
    assert main(["import", str(theirs)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {theirs}:{number}: resume_from_checkpoint: 'True': a state of torchtune's"
        " cannot be gone on with; states are read from output_dir/state: resume=latest goes on"
        " with a run of ours; --without resume_from_checkpoint imports the rest\n"
    )
    assert main(["import", str(theirs), "--without", "resume_from_checkpoint"]) == 0


TRAINS = f"""model: {{_component_: torchtune.models.llama3.lora_llama3_8b, lora_rank: 4, lora_alpha: 8,
        apply_lora_to_mlp: True, lora_attn_modules: [q_proj, k_proj, v_proj, output_proj]}}
tokenizer: {{_component_: torchtune.models.llama3.llama3_tokenizer, path: /tmp/m/tokenizer.model, max_seq_len: 128}}
checkpointer: {{_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/m}}
dataset: {{_component_: torchtune.datasets.instruct_dataset, source: json, data_files: {ROOT}/examples/demo/train.jsonl,
          column_map: {{input: instruction, output: output}}, packed: True}}
dataset_val: {{_component_: torchtune.datasets.instruct_dataset, source: json,
              data_files: {ROOT}/examples/demo/heldout.jsonl, column_map: {{input: instruction, output: output}}}}
batch_size: 4
epochs: 1
gradient_accumulation_steps: 1
max_steps_per_epoch: 3
optimizer: {{_component_: torch.optim.AdamW, lr: 1e-3}}
lr_scheduler: {{_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 2}}
loss: {{_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}}
dtype: fp32
output_dir: ./out
"""


@pytest.mark.slow
def test_what_is_imported_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps, rates and what is trained are those that the file asks for."""
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(TRAINS, encoding="utf-8")
    model = [
        "~model.path",
        "model.preset=demo/0.5M",
        f"tokenizer.path={ROOT}/examples/demo/tokenizer",
        "device=cpu",
    ]
    assert main(["import", "theirs.yaml", "--out", "ours.yaml", *model]) == 0
    done = tune_forked(
        "run", "ours.yaml", "data.max_samples=400", "validation.max_samples=8", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    steps = [
        json.loads(line)
        for line in Path("out/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [step["lr"] for step in steps if "lr" in step] == pytest.approx([0.5e-3, 1e-3, 1e-3])
    adapter = json.loads(Path("out/adapter/adapter_config.json").read_text(encoding="utf-8"))
    assert (adapter["r"], adapter["lora_alpha"], len(adapter["target_modules"])) == (4, 8, 7)
