"""`tune run`: which words are torchrun's, which is the recipe, and what is refused before anything
starts.
"""

from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from recipe_lib.cli import launch, run
from recipe_lib.cli.main import main
from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError

RECIPE = "full_finetune_distributed"
CONFIG = "llama3/8B_full"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--nproc_per_node", "4"],
        ["--nproc-per-node=4"],
        ["--standalone", "--nproc_per_node=2"],
        [
            "--nnodes",
            "2",
            "--nproc_per_node",
            "8",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "host:29400",
        ],
        ["--nnodes=1:4", "--rdzv_id", "a=b", "--max_restarts", "3", "-t", "3", "-r", "1:1,2:3"],
        ["-t3", "--log_dir", "logs"],
        ["--numa-binding", "node", "--rdzv-conf", "timeout=60"],
    ],
)
def test_the_recipe_is_found_behind_the_flags(flags: list[str]):
    rest = ["--config", CONFIG, "batch_size=1", "~seed"]
    assert launch.split_words([*flags, RECIPE, *rest]) == (flags, RECIPE, rest)


def test_the_table_agrees_with_torchrun():
    ours = launch.FLAGS_WITH_VALUE | launch.FLAGS_WITHOUT_VALUE | launch.REFUSED_FLAGS
    for action in get_args_parser()._actions:
        for name in action.option_strings:
            flag = name.replace("_", "-")
            if flag in ("-h", "--help"):
                continue
            assert flag in ours, f"{flag} is new in this torch; add it to the table"
            if flag not in launch.REFUSED_FLAGS:
                assert (flag in launch.FLAGS_WITH_VALUE) == (action.nargs != 0), flag


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--nproc_per_node", "2"], ["--standalone", "--nproc_per_node", "2"]),
        (["--nnodes", "1"], ["--nnodes", "1"]),
        (["--rdzv_endpoint=a:1"], ["--rdzv_endpoint=a:1"]),
        (["--master_port", "1"], ["--master_port", "1"]),
        (["--standalone"], ["--standalone"]),
    ],
)
def test_standalone_unless_a_rendezvous_is_given(
    flags: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
):
    assert launch.add_rendezvous(flags) == expected
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "a:1")
    assert launch.add_rendezvous(flags) == flags


def test_the_last_value_of_a_flag_counts():
    assert (
        launch.get_flag_value(["--nproc_per_node", "2", "--nproc-per-node=3"], "--nproc-per-node")
        == "3"
    )
    assert launch.get_flag_value(["--standalone"], "--nnodes") is None


USAGE = "expected: tune run [torchrun flags] CONFIG (see `tune ls`)"
MISTAKES = [
    (["--nproc_per_node", "2"], f"tune run: no config; {USAGE}"),
    (["--nproc_per_node"], "tune run: --nproc_per_node: expected a value"),
    (
        ["--nproc_per_nod", "2", RECIPE],
        "tune run: unknown torchrun flag --nproc_per_nod; did you mean --nproc-per-node?",
    ),
    (
        ["--nproc", "2", RECIPE],
        "tune run: unknown torchrun flag --nproc; did you mean --nproc-per-node?",
    ),
    (["--frob", "2", RECIPE], "tune run: unknown torchrun flag --frob; see `torchrun --help`"),
    (
        ["--nproc_per_node", "0", RECIPE],
        "tune run: --nproc_per_node 0: expected a number from 1 to 99999, or auto, cpu, gpu, xpu",
    ),
    (
        ["--nproc_per_node=-2", RECIPE],
        "tune run: --nproc_per_node -2: expected a number from 1 to 99999, or auto, cpu, gpu, xpu",
    ),
    (
        ["--nproc_per_node", "9" * 9, RECIPE],
        (
            "tune run: --nproc_per_node 999999999: expected a number from 1 to 99999, or auto, cpu,"
            " gpu, xpu"
        ),
    ),
    (
        ["--nnodes", "2:1", RECIPE],
        "tune run: --nnodes 2:1: expected N or MIN:MAX, numbers from 1 to 99999",
    ),
    (
        ["--no-python", RECIPE],
        "tune run: --no-python cannot be used: RECIPE is the name of a recipe or a .py file",
    ),
    (["-m", RECIPE], "tune run: -m cannot be used: RECIPE is the name of a recipe or a .py file"),
    (["batch_size=1", RECIPE], "tune run: batch_size=1: overrides come after CONFIG"),
    (
        ["llama3/8B_ful"],
        f"llama3/8B_ful: no such config and no such recipe; did you mean {CONFIG}?",
    ),
    (
        ["full_finetune", "--config", CONFIG],
        f"full_finetune: no such recipe; did you mean {RECIPE}?",
    ),
    ([RECIPE], f"tune run: no config; expected: tune run {RECIPE} --config CONFIG (see `tune ls`)"),
    ([RECIPE, "--confg", CONFIG], "tune run: unknown option --confg; did you mean --config?"),
    (
        [RECIPE, "--config", "llama3/8B_ful"],
        f"llama3/8B_ful: no such config; did you mean {CONFIG}?",
    ),
    (
        [RECIPE, "--config", CONFIG, "--nproc_per_node", "2"],
        "tune run: --nproc_per_node: torchrun's flags come before RECIPE",
    ),
    (
        [RECIPE, "--config", CONFIG, "batch_size"],
        (
            "command line: batch_size: expected key=value, or ~key for the default; a further"
            " config is --config FILE"
        ),
    ),
]


@pytest.mark.parametrize(
    ("words", "line"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES]
)
def test_mistakes_are_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture):
    assert main(["run", *words]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"error: {line}\n"
    assert printed.out == ""


def test_several_faults_are_reported_together(capsys: pytest.CaptureFixture):
    assert main(["run", RECIPE, "--config", CONFIG, "optimizer.lrr=1", "batch_size=0"]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2
    assert printed[0].startswith(
        "error: command line: optimizer.lrr=1: unknown key; did you mean optimizer.lr?"
    )
    assert printed[1].startswith("error: command line: batch_size=0: found 0, expected")


def test_a_config_of_another_recipe(tmp_path, capsys: pytest.CaptureFixture):
    config = tmp_path / "x.yaml"
    config.write_text("recipe: lora_somewhere\nmodel:\n  preset: llama3/8B\n")
    assert main(["run", RECIPE, "--config", str(config)]) == 2
    assert (
        f"error: {config}:1: recipe: found 'lora_somewhere', expected {RECIPE}"
        in capsys.readouterr().err
    )


def test_a_recipe_without_main(tmp_path, capsys: pytest.CaptureFixture):
    recipe = tmp_path / "mainless.py"
    recipe.write_text("x = 1\n")
    assert main(["run", str(recipe)]) == 2
    line = (
        f"error: {show(str(recipe))}: has no function `main(argv)`; expected one, like the shipped"
        " recipes\n"
    )
    assert capsys.readouterr().err == line
    assert [path.name for path in tmp_path.iterdir()] == [
        "mainless.py"
    ]  # no __pycache__ beside a user's program


def test_a_flag_without_its_value_is_named():
    with pytest.raises(ConfigError, match="--rdzv-endpoint: expected a value"):
        launch.split_words(["--nnodes", "2", "--rdzv-endpoint"])


@pytest.mark.parametrize(
    ("words", "configs"),
    [
        ([CONFIG, "batch_size=1"], [CONFIG]),
        ([CONFIG, "--config", "mine.yaml"], [CONFIG, "mine.yaml"]),
        (["--config", CONFIG], [CONFIG]),
        ([f"--config={CONFIG}", RECIPE], [CONFIG]),
        (["--config", CONFIG, RECIPE, "batch_size=1"], [CONFIG]),
        ([RECIPE, "--config", CONFIG], [CONFIG]),
    ],
)
def test_the_recipe_is_the_one_that_the_config_names(
    words: list[str], configs: list[str], tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(f"recipe: {RECIPE}\n")
    flags, name, rest = launch.split_words(["--nproc_per_node", "2", *words])
    recipe, rest = run.find_recipe_and_words(name, rest)
    assert flags == ["--nproc_per_node", "2"] and recipe.name == RECIPE
    assert run.list_named_configs(rest) == configs
    assert RECIPE not in rest


def test_a_config_that_names_another_recipe():
    assert run.find_recipe_and_words("llama3/8B_qlora", [])[0].name == "lora_finetune_distributed"
