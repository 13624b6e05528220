"""What would stop a run before its first step is told by `tune validate`, `tune plan` and `tune
run`, in one line.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.cli import start_checks
from recipe_lib.cli.main import main as tune
from recipe_lib.config import load_config, local_files
from recipe_lib.errors import ConfigError
from tests.cli.commands import ROOT, build_environment
from tests.cli.test_plan import captured
from tests.plan.apart import call_in_fork

RECIPE = "full_finetune_distributed"
PRESET = ROOT / "recipe_lib/models/presets/llama3/8B.json"
# Of a fault the overrides, and the line. {folder}: a folder of the test's own.
FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "model": (
        ("model.path={folder}/none", "~model.preset"),
        "{folder}/none: no such folder; expected a model folder, or a hub id such as OWNER/NAME",
    ),
    "config.json": (
        ("model.path={folder}/empty", "~model.preset"),
        (
            "{folder}/empty/config.json: no such file; expected a Hugging Face model folder with"
            " config.json"
        ),
    ),
    "output is a file": (
        ("output_dir={folder}/rows.jsonl",),
        (
            "output_dir: {folder}/rows.jsonl is a file, expected a folder or a new name; choose"
            " another output_dir"
        ),
    ),
    "earlier model": (
        ("output_dir={folder}/earlier",),
        (
            "output_dir: {folder}/earlier holds a trained model of an earlier run;"
            " overwrite_output_dir=true replaces what is there, or choose another output_dir"
        ),
    ),
    "state": (
        ("resume={folder}/step_3",),
        (
            "resume={folder}/step_3: no such folder; expected a whole state folder: resume=latest"
            " takes the newest whole one"
        ),
    ),
    "tracker": (
        ("log.trackers=[trackio]",),
        (
            "log.trackers: trackio cannot be imported (No module named 'trackio'); pip install"
            " 'trackio>=0.4', or remove trackio from log.trackers"
        ),
    ),
    "account": (
        ("log.trackers=[wandb]",),
        "log.trackers: wandb is not logged in; run `wandb login`, or set WANDB_MODE=offline",
    ),
}
# What a plan does without.
ROWS: dict[str, tuple[tuple[str, ...], str]] = {
    "rows": (
        ("data.source={folder}/none.jsonl",),
        (
            "{folder}/none.jsonl: no such file or folder; set data.source to one of yours, or to"
            " hub:OWNER/NAME for a hub dataset"
        ),
    ),
    "second rows": (
        (
            "data.sources=[{{source: examples/demo/train.jsonl}}, {{source: {folder}/none.jsonl}}]",
            "~data.source",
        ),
        (
            "{folder}/none.jsonl: no such file or folder; set data.sources[1].source to one of"
            " yours, or to hub:OWNER/NAME for a hub dataset"
        ),
    ),
    "no validation rows": (
        ("validation.source={folder}/none.jsonl",),
        (
            "{folder}/none.jsonl: no such file or folder; set validation.source to one of yours, or"
            " to hub:OWNER/NAME for a hub dataset"
        ),
    ),
    "validation rows": (
        ("validation.source={folder}/empty",),
        (
            "{folder}/empty: found no file of samples in the folder (.csv, .json, .jsonl, .parquet,"
            " .tsv, .txt, or one of them with .gz or .zst); set validation.source to one with data"
        ),
    ),
    "tokenizer": (
        ("tokenizer.path={folder}/none",),
        "{folder}/none: no such folder or file; set tokenizer.path to a folder with a tokenizer",
    ),
    "weights": (
        ("model.path={folder}/bare", "~model.preset"),
        (
            "{folder}/bare: has neither model.safetensors nor model.safetensors.index.json;"
            " download the weights with `tune download`"
        ),
    ),
    "weights of transformers": (
        ("model.path={folder}/pickled", "~model.preset", "model.implementation=transformers"),
        (
            "{folder}/pickled: has pytorch_model.bin but no model.safetensors; pickled weights can"
            " run code and are not read: download the safetensors files, or convert them"
        ),
    ),
    "shard": (
        ("model.path={folder}/sharded", "~model.preset"),
        (
            "{folder}/sharded/model.safetensors.index.json: names model-00002-of-00002.safetensors,"
            " which is missing; download it with `tune download`"
        ),
    ),
    "tokenizer's files": (
        ("tokenizer.path={folder}/empty",),
        (
            "{folder}/empty: found no files, expected tokenizer.json or tokenizer.model; set"
            " tokenizer.path to a folder with one"
        ),
    ),
    "model's tokenizer": (
        ("model.path={folder}/whole", "~model.preset", "~tokenizer.path"),
        (
            "{folder}/whole: found config.json, model.safetensors, expected tokenizer.json or"
            " tokenizer.model; set tokenizer.path to a folder with one"
        ),
    ),
    "template is a folder": (
        ("tokenizer.chat_template={folder}/empty",),
        (
            "{folder}/empty: cannot be read (is a folder, expected a regular file); set"
            " tokenizer.chat_template to a Jinja file"
        ),
    ),
    "template": (
        ("tokenizer.chat_template={folder}/none.jinja",),
        "{folder}/none.jinja: no such file; set tokenizer.chat_template to a Jinja file",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With rows, an empty folder and an earlier run; a machine that has wandb and none of the other
    extras.
    """
    (tmp_path / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "earlier" / "model").mkdir(parents=True)
    weights = {"bare": "", "pickled": "pytorch_model.bin", "whole": "model.safetensors"}
    weights["sharded"] = "model-00001-of-00002.safetensors"
    for name, file in weights.items():
        (tmp_path / name).mkdir()
        shutil.copy(PRESET, tmp_path / name / "config.json")
        if file:
            (tmp_path / name / file).touch()
    index = {
        "weight_map": {f"{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    }
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(
        json.dumps(index), encoding="utf-8"
    )
    monkeypatch.setattr(
        local_files, "has_package", lambda name: name in ("wandb", "tensorboard", "transformers")
    )
    for name in (
        "WANDB_API_KEY",
        "WANDB_MODE",
        "WANDB_DISABLED",
        "NETRC",
        "WANDB_IDENTITY_TOKEN_FILE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(ROOT)
    return tmp_path


def words_of(fault: tuple[tuple[str, ...], str], folder: Path) -> tuple[list[str], str]:
    overrides, line = fault
    output = (
        []
        if any(word.startswith("output_dir") for word in overrides)
        else [f"output_dir={folder}/new"]
    )
    return [
        *output,
        *(word.format(folder=folder) for word in overrides),
    ], f"error: {line.format(folder=folder)}\n"


@pytest.mark.parametrize("name", [*FAULTS, *ROWS])
def test_a_fault_is_one_line_of_each_verb(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, line = words_of((FAULTS | ROWS)[name], folder)
    verbs = [["validate", "demo/full"], ["run", RECIPE, "--config", "demo/full"]]
    verbs.append(["run", "--nproc_per_node", "2", RECIPE, "--config", "demo/full"])
    verbs += (
        [["plan", "--config", "demo/full"]] if name in FAULTS and name != "earlier model" else []
    )
    for verb in verbs:
        assert tune([*verb, *words]) == 2, verb
        said = capsys.readouterr()
        assert (said.out, said.err) == ("", line), verb
    assert not (folder / "new").exists()


def test_all_faults_are_told_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        words_of(fault, folder)
        for fault in (FAULTS["earlier model"], ROWS["template"], ROWS["rows"])
    ]
    assert tune(["validate", "demo/full", *(word for words, _ in found for word in words)][:2] +
                ["output_dir=" + str(folder / "earlier"), *found[1][0][1:], *found[2][0][1:]]) == 2  # fmt: skip
    assert capsys.readouterr().err == "".join(line for _, line in found)


def test_a_package_for_rows_of_the_hub_is_a_note_before_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All shipped configs read such rows, and are valid where it is still to be installed."""
    words = ["data.source=hub:owner/rows", f"output_dir={folder}/new"]
    line = (
        "data.source: hub:owner/rows needs the package datasets; run `pip install 'datasets<6,>=4'"
        " 'pyarrow>=17'`\n"
    )
    assert tune(["validate", "demo/full", *words]) == 0
    assert capsys.readouterr().out == f"demo/full: a valid config of {RECIPE}\nnote: {line}"
    assert tune(["run", RECIPE, "--config", "demo/full", *words]) == 2
    assert capsys.readouterr().err == f"error: {line}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [FAULTS["earlier model"], ROWS["rows"]], ids=lambda one: one[0][0]
)
def test_a_plan_notes_what_a_run_here_refuses(
    fault: tuple[tuple[str, ...], str], folder: Path
) -> None:
    """It may be a plan for another machine, or of what is to be run with
    overwrite_output_dir=true.
    """
    words, line = words_of(fault, folder)
    words = [*words, "--sequence", "16", "--device", "24GB", "--json", "-"]
    code, out, _ = call_in_fork(captured, ["plan", "--config", "demo/full", *words])
    assert code == 0
    assumed = json.loads(out)["assumptions"]
    assert (
        f"`tune run` refuses to start on this machine: {line.removeprefix('error: ').strip()}"
        in assumed
    )


def test_a_model_that_is_to_come_is_a_note_and_no_fault_before_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "meta-llama/Meta-Llama-3-8B"
    line = (
        f"{name}: no such folder, and not in the hub cache; fetch it with `tune download {name}`\n"
    )
    words = ["tokenizer.path=examples/demo/tokenizer", "data.source=examples/demo/train.jsonl"]
    assert tune(["validate", "llama3/8B_full", *words]) == 0
    valid = f"llama3/8B_full: a valid config of {RECIPE}\n"
    assert capsys.readouterr().out == f"{valid}note: {line}"
    for flags in ([], ["--nproc_per_node", "2"]):
        assert tune(["run", *flags, RECIPE, "--config", "llama3/8B_full", *words]) == 2
        assert capsys.readouterr().err == f"error: {line}"
    snapshot = folder / "hub" / "models--meta-llama--Meta-Llama-3-8B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc", encoding="utf-8")
    shutil.copy(PRESET, snapshot / "config.json")
    assert tune(["validate", "llama3/8B_full", *words]) == 0
    assert capsys.readouterr().out.startswith(
        f"{valid}note: {snapshot}: has neither model.safetensors nor "
    )
    (snapshot.parents[1] / "blobs").mkdir()
    (snapshot.parents[1] / "blobs" / "def").touch()
    (snapshot / "model.safetensors").symlink_to("../../blobs/def")
    assert tune(["validate", "llama3/8B_full", *words]) == 0
    assert capsys.readouterr().out == valid


@pytest.mark.parametrize(
    ("flags", "overrides", "line"),
    [
        (
            [],
            ["parallel.tensor=2"],
            "parallel.tensor: found 2 for 1 rank, expected a divisor of 1; start a multiple",
        ),
        (
            ["--nproc_per_node", "3"],
            ["parallel.data_replicate=2"],
            "parallel.data_replicate: found 2 copies for 3",
        ),
        (
            ["--nproc_per_node=2", "--nnodes", "2"],
            ["parallel.data_shard=3"],
            "parallel: found data_replicate 1 x data",
        ),
    ],
)
def test_ranks_that_do_not_fit_the_mesh(
    flags: list[str],
    overrides: list[str],
    line: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--config", "demo/full", f"output_dir={folder}/new", *overrides]
    for verb in ("run", "plan"):
        assert tune([verb, *flags, RECIPE, *words]) == 2
        assert capsys.readouterr().err.startswith(f"error: {line}")


@pytest.mark.parametrize(
    ("variable", "value", "file", "logged_in"),
    [
        ("", "", "", False),
        ("WANDB_API_KEY", "k" * 40, "", True),
        ("WANDB_MODE", "offline", "", True),
        ("WANDB_MODE", "online", "", False),
        ("", "", ".netrc", True),
        ("NETRC", "{folder}/elsewhere", "elsewhere", True),
        ("WANDB_BASE_URL", "https://wandb.here:8080", ".netrc", False),
    ],
)
def test_whether_wandb_has_an_account(
    variable: str,
    value: str,
    file: str,
    logged_in: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable:
        monkeypatch.setenv(variable, value.format(folder=folder))
    if file:
        (folder / file).write_text(
            "machine api.wandb.ai\n  login user\n  password x\n", encoding="utf-8"
        )
    cfg = load_config(
        "demo/full", ["log.trackers=[wandb, tensorboard]", f"output_dir={folder}/new"]
    )
    if logged_in:
        assert start_checks.check_start(cfg) == []
        return
    with pytest.raises(ConfigError, match="^log.trackers: wandb is not logged in"):
        start_checks.check_start(cfg)


def test_nothing_of_it_imports_torch(folder: Path) -> None:
    """Validating, and what stops a run."""
    rows, line = words_of(ROWS["rows"], folder)
    commands = [["validate", "demo/full", f"output_dir={folder}/new"]]
    commands += [
        ["run", *flags, RECIPE, "--config", "demo/full", *rows]
        for flags in ([], ["--nproc_per_node", "2"])
    ]
    for name in (
        "weights",
        "shard",
        "tokenizer's files",
        "model's tokenizer",
        "template is a folder",
    ):
        commands.append(["run", RECIPE, "--config", "demo/full", *words_of(ROWS[name], folder)[0]])
    commands += [["generate", str(folder / "none")], ["generate", "owner/none"]]
    program = (
        "import sys\nfrom recipe_lib.cli.main import main\nprint([main(one) for one in"
        f" {commands!r}])\n"
    )
    program += "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=build_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"[0{', 2' * 9}]", done.stderr
    assert done.stderr.startswith(line * 2) and done.stderr.count("\n") == 9


PACKED = (
    "data.packing=true",
    "max_seq_len=32",
    "gradient_accumulation_steps=16",
    "batch_size=2",
)


def planned(folder: Path, *overrides: str) -> tuple[int, str, str]:
    words = ["--config", "demo/full", "--device", "24GB", f"output_dir={folder}/new", *overrides]
    words += (
        [] if any(word.startswith("data.cache=") for word in overrides) else ["data.cache=false"]
    )
    return call_in_fork(captured, ["plan", "--nproc_per_node", "2", RECIPE, *words])


def rows_of(folder: Path, count: int, **fields: Any) -> str:
    row = {"instruction": "say a word", "input": "", "output": "a word"} | fields
    (folder / "own.jsonl").write_text(f"{json.dumps(row)}\n" * count, encoding="utf-8")
    return f"data.source={folder}/own.jsonl"


@pytest.mark.slow
def test_a_plan_has_the_faults_that_rows_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of the run, of which data.order says the first: too few packs for a step of all
    ranks.
    """
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    few = rows_of(folder, 40)
    code, out, err = planned(folder, few, "~validation.source", *PACKED)
    assert (code, out) == (2, "") and err.startswith("error: data.packing: found ")
    assert (
        "expected at least 64 for one step (batch_size x gradient_accumulation_steps x ranks)"
        in err
    )
    for cached in ("true", "false"):
        columns = "data.columns={output: answer}"
        code, out, err = planned(folder, few, "~validation.source", columns, f"data.cache={cached}")
        assert code == 2 and f"{folder}/own.jsonl:1" in err and "answer" in err
    (folder / "empty.jsonl").write_text("", encoding="utf-8")
    code, out, err = planned(folder, few, f"validation.source={folder}/empty.jsonl")
    assert code == 2 and "empty.jsonl: the file is empty, expected samples" in err
    code, out, err = planned(folder, f"data.source={folder}/none.jsonl")
    assert code == 0 and "the dataset is not available" in " ".join(out.split())
