"""Every command in README and docs: run where it needs nothing but the repository, checked where it
needs more.

The commands of a document run in its order, in an empty folder that has the clone's files in it.
`tune ls`, `cat`, `cp`, `validate`, `generate`, plans and one-process runs of the demo are run (for
two steps); runs that need weights, GPUs or several processes are checked as far as `tune run`
checks them before it starts; targets, scripts and flags of other programs have to exist. A command
that no rule here knows fails the test.
"""

import json
import math
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from itertools import takewhile
from pathlib import Path

import pytest

import recipe_lib
from recipe_lib.cli import data as data_verb
from recipe_lib.cli import doctor as doctor_verb
from recipe_lib.cli import eval, launch, plan_request
from recipe_lib.cli import export as export_verb
from recipe_lib.cli import generate as generate_verb
from recipe_lib.cli import plan as plan_verb
from recipe_lib.cli import run as run_verb
from recipe_lib.cli import tp_plan as tp_plan_verb
from recipe_lib.cli import upload as upload_verb
from recipe_lib.cli.main import main as tune
from recipe_lib.cli.recipes import check_arguments
from tests.house.documents import Block, list_blocks, list_documents
from tests.house.files import ROOT
from tests.house.test_imports import PROJECT, distribution
from tests.plan.apart import call_in_fork
from tests.selection import mark_slow_except

# Set where recipe_lib is the one of a wheel, and no clone is around; tests/house/test_package.py
# does it.
IN_A_WHEEL = "TUNE_TEST_WHEEL"
OF_A_CLONE = ("make", "python", "sbatch", "pip", "source")
QUICK = (
    "adapters",
    "checkpoints",
    "doctor",
    "evaluation",
    "import",
    "qat",
)  # pages whose commands take no time
WITH_COMMANDS = [
    path
    for path in list_documents()
    if any(block.language == "bash" for block in list_blocks(path))
]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the files of a clone that commands name, and rows of a user's own; of a
    wheel, those rows alone.
    """
    for name in (
        ("examples", "recipes", "configs", "benchmarks", "Makefile")
        if IN_A_WHEEL not in os.environ
        else ()
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    rows = (ROOT / "examples" / "demo" / "heldout.jsonl").read_text(encoding="utf-8")
    for name in ("rows.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_text(rows, encoding="utf-8")
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SECONDS = [ROOT / "docs" / name for name in ("your_data.md", "plan.md")]  # what their commands take


@pytest.mark.parametrize(
    "path",
    mark_slow_except(
        WITH_COMMANDS, [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in QUICK)]
    ),
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_commands(path: Path, clone: Path, capfd: pytest.CaptureFixture[str]):
    if IN_A_WHEEL in os.environ:
        assert Path(recipe_lib.__file__).is_relative_to(os.environ[IN_A_WHEEL])
    for block in list_blocks(path):
        if block.mark == "file":
            (clone / block.name).write_text(block.text, encoding="utf-8")
        elif block.mark == "recipe":
            edit_recipe(clone / "mine.py", block)
        elif block.language == "bash":
            for words in block.list_commands():
                check(words, clone)
                assert "Traceback" not in capfd.readouterr().err


def check(words: list[str], clone: Path) -> None:
    """Runs or checks one command."""
    line = " ".join(words)
    program, *rest = words
    if IN_A_WHEEL in os.environ and (
        program in OF_A_CLONE or any(re.match(r"\.venv/|recipes/", word) for word in words)
    ):
        return
    if program == "tune":
        check_tune(rest)
    elif program == "make":
        done = subprocess.run(["make", "-n", *rest], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr}"
    elif program == "torchrun":
        flags, name, arguments = launch.split_words(rest)
        launch.check_launch(flags)
        assert (clone / name).is_file(), line
        assert tune(["validate", arguments[1], *arguments[2:], "--recipe", name]) == 0, line
    elif program == "python":
        check_python(rest, clone)
    elif program == "sbatch":  # its flags, then a file, whose words are those of `tune run`
        file = next(at for at, word in enumerate(rest) if word.endswith(".sbatch"))
        assert (clone / rest[file]).is_file(), line
        check_tune(["run", "--nnodes", "2", *rest[file + 1 :]])
    elif program.startswith(".venv/bin/"):
        development = {
            distribution(name) for name in PROJECT["project"]["optional-dependencies"]["dev"]
        }
        assert distribution(program.removeprefix(".venv/bin/")) in development, line
    else:
        install = line.replace(" --no-compile", "")
        assert install.startswith("pip install torch>=") or install in (
            "pip install -e .",
            "source .venv/bin/activate",
        ), line


def check_python(words: list[str], clone: Path) -> None:
    """Asks a script, a module (`-m NAME`) or a part of a script (`gpu_check.py plan`) for its help,
    in this process: it has to have the part and the flags.
    """
    if words[0] == "-m":
        words = [f"{words[1].replace('.', '/')}.py", *words[2:]]
    script = clone / words[0]
    parts = list(takewhile(str.isalpha, words[1:]))
    said = StringIO()
    with (
        pytest.MonkeyPatch.context() as patched,
        redirect_stdout(said),
        pytest.raises(SystemExit) as ended,
    ):
        patched.setattr(sys, "argv", [str(script), *parts, "--help"])
        patched.setattr(sys, "path", [str(script.resolve().parent), *sys.path])
        runpy.run_path(str(script), run_name="__main__")
    flags = [word for word in words if word.startswith("--")]
    assert not ended.value.code and all(word in said.getvalue() for word in (*parts, *flags)), (
        " ".join(words)
    )


def check_tune(words: list[str]) -> None:
    """Runs or checks one command of ours."""
    line = "tune " + " ".join(words)
    verb, *rest = words
    if verb == "download":
        assert re.fullmatch(r"[\w-]+/[\w.-]+", rest[0]) and len(rest) == 1, line
    elif verb == "generate":
        generate_verb.check_options(generate_verb.PARSER.parse(rest))
        if Path(rest[0]).is_dir():
            assert tune(words) == 0, line
    elif verb == "run":
        check_run(rest)
    elif verb == "data":
        arguments = data_verb.read_arguments(rest)
        if arguments.config.startswith("demo/full"):
            assert tune([*words, "data.max_samples=200"]) == 0, line
        else:
            assert tune(["validate", arguments.config, *arguments.overrides]) == 0, line
    elif verb == "export":
        export_verb.read(rest)
    elif verb == "eval":
        _, own = launch.take_flags(rest, verb)
        arguments = eval.PARSER.parse(own)
        if Path(arguments.what).is_dir():
            assert tune([*words, "--max-samples", "2", "--max-new-tokens", "4"]) == 0, line
    elif verb == "upload":
        upload_verb.PARSER.parse(rest)
    elif verb == "plan":
        arguments = plan_request.read_arguments(rest)
        if arguments.receipts:
            assert tune(words) == 0, line
        elif arguments.config[0].startswith("demo/"):
            assert call_in_fork(tune, words) in (
                0,
                plan_verb.NO_ROOM,
            ), line  # the simulated device stays in a process
        else:
            assert tune(["validate", *arguments.config, *arguments.overrides]) == 0, line
    elif verb == "doctor":
        doctor_verb.read_arguments(
            rest
        )  # what it does then depends on the machine; tests/cli/test_doctor.py runs it
    elif verb == "tp-plan":
        tp_plan_verb.read_model_config(tp_plan_verb.read_arguments(rest).model)
    else:
        assert verb in (
            "ls",
            "cat",
            "cp",
            "import",
            "validate",
            "help",
            "completion",
        ), f"no rule for: {line}"
        assert tune(words) == 0, line


def check_run(words: list[str]) -> None:
    """A run of the demo in one process is run for two steps; others are checked as before their
    start.
    """
    flags, name, rest = launch.split_words(words)
    launch.check_launch(flags)
    recipe, rest = run_verb.find_recipe_and_words(name, rest)
    config = rest[rest.index("--config") + 1]
    if flags or not (config == "demo/full" or Path(config).is_file()):
        check_arguments(recipe, rest)
        return
    name = name if name.endswith(".py") else recipe.name
    sys.modules.pop(f"recipe_{Path(name).stem}", None)  # the copy may have been edited since
    resumed = any(word.startswith("resume=") for word in rest)
    kept = [
        word
        for word in rest
        if not word.startswith(("max_steps=", "checkpoint.save_every_n_steps="))
    ]
    steps = 3 if resumed else 2
    short = [
        f"max_steps={steps}",
        "data.max_samples=200",
        "validation.max_samples=32",
        "lr_scheduler.warmup_steps=0",
    ]
    saved = ["checkpoint.save_every_n_steps=1"] if len(kept) + 1 < len(rest) else []
    assert tune(["run", name, *kept, *short, *saved]) == 0, " ".join(words)


def edit_recipe(path: Path, block: Block) -> None:
    """Follows docs/your_recipe.md: the block named Config takes a line's place, that named
    Correction is put above the recipe's class, the others below a line.
    """
    text = path.read_text(encoding="utf-8")
    if block.name == "Config":
        line = "Config = FullFinetuneConfig\n"
        imported = "from recipe_lib.config import FullFinetuneConfig, parse_arguments\n"
        assert text.count(line) == 1 and text.count(imported) == 1
        text = text.replace(line, block.text).replace(
            imported, f"{imported}from recipe_lib.config.schema import key\n"
        )
        text = text.replace("from pathlib", "from dataclasses import dataclass\nfrom pathlib", 1)
    elif block.name == "Correction":
        text = text.replace("class FullFinetune:", f"{block.text}\n\nclass FullFinetune:", 1)
    elif block.name == "metrics":
        assert text.count("return training.Step(") == 1
        text = re.sub(r" *return training\.Step\(.*\n", lambda _: block.text, text)
    else:
        line = next(line for line in text.splitlines(keepends=True) if "build_meta(" in line)
        text = text.replace(line, line + block.text)
    path.write_text(text, encoding="utf-8")


def test_edited_recipe_freezes_the_embedding(clone: Path):
    """The example of docs/your_recipe.md does what it says."""
    from safetensors.torch import load_file

    assert tune(["cp", "full_finetune_distributed", "mine.py"]) == 0
    for block in list_blocks(ROOT / "docs" / "your_recipe.md"):
        if block.mark == "recipe" and block.name in ("Config", "setup_model"):
            edit_recipe(clone / "mine.py", block)
    sys.modules.pop("recipe_mine", None)
    embeddings = {}
    for name, steps, frozen in (("start", 1, "true"), ("frozen", 3, "true"), ("free", 3, "false")):
        options = [
            f"max_steps={steps}",
            f"freeze_embedding={frozen}",
            f"output_dir={name}",
            "data.max_samples=200",
        ]
        assert (
            tune(["run", "./mine.py", "--config", "demo/full", *options, "~validation.source"]) == 0
        )
        embeddings[name] = load_file(clone / name / "model" / "model.safetensors")[
            "model.embed_tokens.weight"
        ]
    assert (embeddings["frozen"] == embeddings["start"]).all()
    assert not (embeddings["free"] == embeddings["start"]).all()


def test_edited_recipe_records_its_own_metrics(clone: Path):
    """Every step's line has the number, and the report its chart."""
    assert tune(["cp", "full_finetune_distributed", "mine.py"]) == 0
    for block in list_blocks(ROOT / "docs" / "your_recipe.md"):
        if block.mark == "recipe" and block.name == "metrics":
            edit_recipe(clone / "mine.py", block)
    sys.modules.pop("recipe_mine", None)
    options = ["max_steps=2", "output_dir=own", "data.max_samples=200", "~validation.source"]
    assert tune(["run", "./mine.py", "--config", "demo/full", *options]) == 0
    lines = [
        json.loads(line)
        for line in (clone / "own" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [line["perplexity"] for line in lines] == pytest.approx(
        [math.exp(line["loss"]) for line in lines]
    )
    assert "<figcaption>perplexity</figcaption>" in (clone / "own" / "report.html").read_text(
        encoding="utf-8"
    )


def test_edited_recipe_adds_a_layer(clone: Path):
    """It begins as without the layer, and ends with one that is trained and written."""
    from safetensors.torch import load_file

    first_loss = []
    for name in ("plain.py", "mine.py"):
        assert tune(["cp", "full_finetune_distributed", name]) == 0
        for block in list_blocks(ROOT / "docs" / "your_recipe.md"):
            if (
                name == "mine.py"
                and block.mark == "recipe"
                and block.name in ("Correction", "add_layer")
            ):
                edit_recipe(clone / name, block)
        sys.modules.pop(f"recipe_{Path(name).stem}", None)
        options = [
            "max_steps=2",
            f"output_dir=out_{name[:-3]}",
            "data.max_samples=200",
            "checkpoint.extra_parameters=save",
        ]
        assert tune(["run", f"./{name}", "--config", "demo/full", *options]) == 0
        lines = (
            (clone / f"out_{name[:-3]}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        )
        first_loss.append(json.loads(lines[0])["loss"])
    assert first_loss[0] == first_loss[1]
    written = load_file(clone / "out_mine" / "model" / "model.safetensors")
    corrections = [
        value for name, value in written.items() if name.endswith("mlp.correction.weight")
    ]
    assert len(corrections) == 4 and all(value.any() for value in corrections)
