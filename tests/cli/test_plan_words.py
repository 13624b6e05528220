"""`tune plan`: its words, this machine's devices, and which class of a recipe's file is planned."""

import dataclasses
import os
import re
import sys
from pathlib import Path

import pytest

from recipe_lib.cli import launch, plan_request
from recipe_lib.cli.recipes import RecipeFile, load_module
from recipe_lib.config import load_config
from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.timing.cost import compute_collective_seconds
from recipe_lib.plan.tracing.trace import Collective

CONFIG = ["--config", "llama3/8B_full"]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--nproc_per_node", "4"],
        ["--nproc-per-node=4"],
        ["--standalone", "--nproc_per_node=2"],
        ["--nnodes=1:4", "--rdzv_id", "a=b", "--max_restarts", "3", "-t", "3", "-r", "1:1,2:3"],
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
    ],
)
def test_a_command_line_of_tune_run_is_one_of_tune_plan(flags: list[str]):
    words = ["full_finetune_distributed", *CONFIG, "batch_size=1", "~seed", "--plugin", "parts.py"]
    for order in ([*flags, *words], [*words, *flags]):
        found = plan_request.read_arguments(order)
        assert found.flags == flags
        assert (found.recipe, found.config) == ("full_finetune_distributed", ["llama3/8B_full"])
        assert found.overrides == ["batch_size=1", "~seed"]
        assert found.plugin == ["parts.py"]


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ([], (1, 1)),
        (["--nproc_per_node", "4"], (4, 1)),
        (["--nproc_per_node=8", "--nnodes", "2"], (8, 2)),
        (["--nproc_per_node", "2", "--nnodes", "3:5"], (2, 3)),
        (["--nproc_per_node", "gpu"], (2, 1)),
        (["--nproc_per_node", "auto"], (2, 1)),
        (["--nproc_per_node", "cpu"], (launch.count_cores(), 1)),
    ],
)
def test_ranks(flags: list[str], ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "list_local_gpus", lambda: [("NVIDIA L4", 2**34)] * 2)
    assert launch.count_ranks_and_machines(flags) == ranks


def test_all_gpus_of_a_machine_without_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "list_local_gpus", list)
    with pytest.raises(
        ConfigError, match=r"--nproc_per_node gpu: this machine has none; give a number"
    ):
        launch.count_ranks_and_machines(["--nproc_per_node", "gpu"])
    assert launch.count_ranks_and_machines(["--nproc_per_node", "auto"]) == (
        launch.count_cores(),
        1,
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--nproc_per_nod", "4", *CONFIG],
            "unknown option --nproc_per_nod; did you mean --nproc_per_node?",
        ),
        ([*CONFIG, "--rdzv-id"], "--rdzv-id: expected a value"),
        (
            ["-m", "recipe", *CONFIG],
            "-m cannot be used: RECIPE is the name of a recipe or a .py file",
        ),
        (
            ["--nnodes", "2:1", *CONFIG],
            "--nnodes 2:1: expected N or MIN:MAX, numbers from 1 to 99999",
        ),
        (["one", "two", *CONFIG], "unexpected argument two; see `tune plan --help`"),
        ([], "no config; expected: tune plan [RECIPE --config] CONFIG"),
        (
            ["--calibrate", "rates.json", "full_finetune_distributed"],
            "no config; expected: tune plan [RECIPE --config]",
        ),
    ],
)
def test_mistakes(words: list[str], line: str):
    with pytest.raises(ConfigError) as raised:
        plan_request.read_arguments(words)
    assert str(raised.value).startswith(f"tune plan: {line}")


def test_a_search_makes_no_plan_to_write():
    with pytest.raises(ConfigError, match="^--search: .*; leave --json out"):
        plan_request.read_arguments([*CONFIG, "--search", "--json", "-"])


@pytest.mark.parametrize("size", ["-0.5", "nan", "inf", "1e30"])
def test_a_size_that_is_none(size: str):
    with pytest.raises(ConfigError, match=r"^--nccl-gib: found .*, expected a number of GiB >= 0"):
        plan_request.read_arguments([*CONFIG, "--nccl-gib", size])


def test_outputs_are_checked_before_the_work(tmp_path: Path):
    for option in ("--json", "--html", "--snapshot", "--calibrate"):
        with pytest.raises(ConfigError, match=f"^{option}: .* is a folder"):
            plan_request.read_arguments([*CONFIG, option, str(tmp_path)])
        with pytest.raises(ConfigError, match=f"^{option}: .*: no such folder"):
            plan_request.read_arguments([*CONFIG, option, str(tmp_path / "absent" / "file")])
    assert plan_request.read_arguments([*CONFIG, "--json", "-"]).json == "-"


LISTED = """\
0, GPU-1a2b3c, NVIDIA GeForce RTX 4090, 24564
1, GPU-4d5e6f, NVIDIA Unheard Of, 40960
"""


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An nvidia-smi that lists two cards."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\nprint({LISTED!r}, end='')\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launch.list_local_gpus.cache_clear()
    yield
    launch.list_local_gpus.cache_clear()


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA GeForce RTX 4090", "NVIDIA Unheard Of"]),
        ("1,0", ["NVIDIA Unheard Of", "NVIDIA GeForce RTX 4090"]),
        ("GPU-4d5", ["NVIDIA Unheard Of"]),
        ("", []),
        ("7", []),
    ],
)
def test_the_gpus_that_a_process_would_see(
    two_gpus, visible, names: list[str], monkeypatch: pytest.MonkeyPatch
):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [name for name, _ in launch.list_local_gpus()] == names


def test_the_own_device_is_one_of_the_table_or_has_its_own_memory(
    two_gpus, monkeypatch: pytest.MonkeyPatch
):
    assert launch.find_local_device() == find_hardware("rtx4090")
    launch.list_local_gpus.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = launch.find_local_device()
    assert found is not None
    assert found.name == "NVIDIA Unheard Of"
    assert 0.97 < found.memory / (40960 * 2**20) < 1
    ranks, device, assumed = plan_request.choose_planned_device(plan_request.read_arguments(CONFIG))
    assert (ranks, device.name) == (1, "NVIDIA Unheard Of")
    assert "--device names another" in assumed[0]


def test_without_a_gpu_a_card_of_24_gb_is_planned_and_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "list_local_gpus", list)
    ranks, device, assumed = plan_request.choose_planned_device(
        plan_request.read_arguments([*CONFIG, "--nproc_per_node", "4"])
    )
    assert (ranks, device) == (4, dataclasses.replace(find_hardware("24GB"), ranks_per_node=4))
    assert "no GPU here" in assumed[0]
    assert plan_request.choose_planned_device(
        plan_request.read_arguments([*CONFIG, "--fit", "2xrtx4090"])
    ) == (
        2,
        find_hardware("rtx4090"),
        [],
    )


def test_what_crosses_machines_goes_over_the_network():
    """However many ranks a machine has, those of another are not in it."""
    words = [*CONFIG, "--nproc_per_node", "2", "--nnodes", "2", "--device", "h100"]
    ranks, device, assumed = plan_request.choose_planned_device(plan_request.read_arguments(words))
    assert (ranks, assumed) == (4, ["2 ranks on each of 2 machines"])
    inside, across = (
        Collective("all_reduce", "data_replicate", ranks, 2**31) for ranks in ((0, 1), (0, 2))
    )
    assert compute_collective_seconds(across, device) > 2 * compute_collective_seconds(
        inside, device
    )


RECIPE = """
class Base:
    def setup_model(self): ...
    def setup_optimizer(self): ...

class Training(Base):
    def train_step(self, batches): ...
"""


def test_the_class_of_a_recipe(tmp_path: Path):
    for name in ("full_finetune_distributed", "lora_finetune_distributed", "dpo_distributed"):
        assert callable(plan_request.find_recipe_class(RecipeFile.find(name)))
    one, two, none = (
        tmp_path / f"{name}.py" for name in ("planned_one", "planned_two", "planned_none")
    )
    one.write_text(RECIPE, encoding="utf-8")
    two.write_text(f"{RECIPE}\nclass Other(Training): ...\n", encoding="utf-8")
    none.write_text("class Training: ...\n", encoding="utf-8")
    assert plan_request.find_recipe_class(RecipeFile.find(str(one))).__name__ == "Training"
    with pytest.raises(
        ConfigError, match=r"planned_two\.py: found several classes with .* \(Training, Other\)"
    ):
        plan_request.find_recipe_class(RecipeFile.find(str(two)))
    with pytest.raises(
        ConfigError,
        match=r"planned_none\.py: found no class with setup_model, setup_optimizer and tr",
    ):
        plan_request.find_recipe_class(RecipeFile.find(str(none)))


def test_what_a_copied_recipe_raises_is_told_with_its_line(tmp_path: Path):
    file = tmp_path / "planned_raises.py"
    file.write_text("def step():\n    raise KeyError('weights')\n", encoding="utf-8")
    recipe = RecipeFile.find(str(file))
    step = load_module(file).step
    told = re.escape(f"{show(str(file))}:2: raised KeyError while it was planned: 'weights'")
    with pytest.raises(ConfigError, match=f"^{told}"):
        with plan_request.explain_errors(recipe, load_config("demo/full")):
            step()
    external = load_config("demo/full", ["model.implementation=transformers"])
    with pytest.raises(
        ConfigError,
        match="^model.implementation=transformers: its class raised KeyError on the simulated",
    ):
        with plan_request.explain_errors(RecipeFile.find("full_finetune_distributed"), external):
            step()
    with (
        pytest.raises(KeyError),
        plan_request.explain_errors(
            RecipeFile.find("full_finetune_distributed"), load_config("demo/full")
        ),
    ):
        step()
