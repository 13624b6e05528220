"""docs/extending.md is followed to the letter in a copy of the repository: each change has as many
files of the library as the page counts, and what comes of it runs and computes what it should.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from recipe_lib.cli.main import main
from recipe_lib.config.registry import load_plugin
from recipe_lib.config.schema import OptimizerConfig
from recipe_lib.optim.optimizers import build_optimizer, count_optimizer_state_bytes
from tests.house.files import ROOT

PAGE = ROOT / "docs" / "extending.md"
SECTION = re.compile(r"^## (.+?): (.+)$", re.MULTILINE)
EDIT = re.compile(
    r"^(?:New file|In) `([^`]+)`(?:, (a copy of|above|below|in place of) `([^`\n]+)`)?[^`\n]*\n"
    r"(?:\n```\w+\n(.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


def sections() -> dict[str, tuple[str, str]]:
    """`A recipe` -> what the heading says of files, and the section's text."""
    parts = SECTION.split(PAGE.read_text(encoding="utf-8"))
    return {
        name: (files, text)
        for name, files, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    }


def follow(text: str, root: Path) -> list[str]:
    """Makes every change that a section tells; the files it concerns."""
    touched = []
    for name, how, what, block in EDIT.findall(text):
        path = root / name
        touched.append(name)
        path.parent.mkdir(exist_ok=True)
        if how == "a copy of":
            shutil.copy(root / what, path)
        elif not how:
            assert not path.exists(), name
            path.write_text(block, encoding="utf-8")
        else:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            (at,) = [number for number, line in enumerate(lines) if line.strip() == what]
            first, last = {
                "above": (at, at),
                "below": (at + 1, at + 1),
                "in place of": (at, at + 1),
            }[how]
            lines[first:last] = [block]
            path.write_text("".join(lines), encoding="utf-8")
    return list(dict.fromkeys(touched))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for folder in ("recipe_lib", "recipes", "configs", "examples"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path


def python(root: Path, *words: str) -> str:
    """What a process of the copy prints."""
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tune(root: Path, *commands: list[str]) -> str:
    """What commands of the copy print, which one process runs in their order."""
    work = "import json, sys\nfrom recipe_lib.cli.main import main\n"
    work += "for words in json.loads(sys.argv[1]):\n    assert main(words) == 0, words"
    return python(root, "-c", work, json.dumps(commands))


FOLLOWED = [
    "A family in the library's decoder",
    "A recipe",
    "An optimizer",
    "A memory lever",
    "A data format",
    "A verb",
]


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_page_counts_right(name: str, copy: Path) -> None:
    said, text = sections()[name]
    touched = follow(text, copy)
    assert len([file for file in touched if file.startswith(("recipe_lib/", "recipes/"))]) == int(
        said.split()[0]
    )
    for file in touched:
        if file.endswith(".py"):
            compile((copy / file).read_text(encoding="utf-8"), file, "exec")


def test_the_page_counts_the_files_of_a_mesh_dimension() -> None:
    """Those that it names."""
    said, text = sections()["A mesh dimension"]
    named = set(re.findall(r"`(recipe_lib/[\w/]+\.py)`", text))
    assert all((ROOT / name).is_file() for name in named) and len(named) == int(said.split()[0])


def test_every_block_of_code_is_followed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    counted = Counter(re.findall(r"^```(\w+)$", text, re.MULTILINE))
    assert counted["python"] + counted["yml"] == sum(
        bool(block) for *_, block in EDIT.findall(text)
    )


LOGITS = """
import sys, torch
from pathlib import Path
from transformers import Olmo2Config, Olmo2ForCausalLM
from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.errors import ConfigError
from recipe_lib.models import build_meta, read_config, build_spec
from recipe_lib.parallel.tensor import refuse_for_tensor

shape = dict(vocab_size=96, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4)
torch.manual_seed(0)
config = Olmo2Config(**shape, num_key_value_heads=2, initializer_range=0.2, pad_token_id=0, eos_token_id=1)
theirs = Olmo2ForCausalLM(config).double().eval()
for name, value in theirs.named_parameters():
    if "norm" in name:
        torch.nn.init.uniform_(value, 0.5, 1.5)
theirs.save_pretrained("tiny")
spec = build_spec(read_config(Path("tiny")), "tiny")
ours = build_meta(spec, torch.float64).to_empty(device="cpu")
load_weights(ours, spec, Path("tiny"), 0)
tokens = torch.randint(0, 96, (2, 17))
with torch.no_grad():
    print(float((ours(tokens) - theirs(tokens).logits).abs().max()), float(theirs(tokens).logits.std()))
try:
    refuse_for_tensor(build_meta(spec, torch.float32))
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_family_has_the_logits_of_transformers(copy: Path) -> None:
    """And is refused by tensor parallel, rather than trained by the forward of another layer."""
    follow(sections()["A family in the library's decoder"][1], copy)
    said, refusal = python(copy, "-c", LOGITS).splitlines()
    difference, spread = map(float, said.split())
    assert difference < 1e-5 * spread  # transformers computes its norms in fp32
    assert "parallel.tensor: found another forward of model.layers.0" in refusal


@pytest.mark.slow
def test_the_recipe_runs(copy: Path) -> None:
    """Its loss is cross-entropy with anchor.weight 0, and at its first step nothing with 1."""
    follow(sections()["A recipe"][1], copy)
    short = ["data.max_samples=64", "batch_size=4", "optimizer.lr=1e-3"]
    plain = [
        "full_finetune_distributed",
        "--config",
        "demo/full",
        "~validation.source",
        "lr_scheduler.warmup_steps=0",
    ]
    start = [*short, "max_steps=2", "model.path=outputs/demo/model"]
    commands = [
        ["ls", "anchored_finetune"],
        ["validate", "demo/anchored"],
        ["run", "--no-plan", *plain, *short, "max_steps=1", "output_dir=outputs/demo"],
        ["run", "--no-plan", *plain, "~model.preset", *start, "output_dir=outputs/plain"],
    ]
    for share in (0, 0.5, 1):
        options = [*start, f"anchor.weight={share}", f"output_dir=outputs/share_{share}"]
        commands.append(
            ["run", "--no-plan", "anchored_finetune", "--config", "demo/anchored", *options]
        )
    assert "anchored_finetune: Anchored fine-tuning: every parameter is trained" in tune(
        copy, *commands
    )

    def losses(name: str) -> list[float]:
        lines = (copy / "outputs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["loss"] for line in lines]

    assert losses("share_0") == pytest.approx(losses("plain"), rel=1e-4)
    assert losses("share_1")[0] == pytest.approx(
        0, abs=1e-5
    )  # the anchor is what the model begins with
    assert losses("share_0.5")[0] == pytest.approx(losses("plain")[0] / 2, rel=1e-4)


def write_lion(folder: Path) -> Path:
    """Write the page's optimizer into a file outside of the library."""
    ((_, _, _, block),) = EDIT.findall(sections()["An optimizer"][1])
    (folder / "lion.py").write_text(block, encoding="utf-8")
    return folder / "lion.py"


@pytest.mark.slow
def test_the_optimizer_steps_by_its_formula(tmp_path: Path) -> None:
    """Its file read as a plugin: it registers itself in both."""
    load_plugin(write_lion(tmp_path))
    torch.manual_seed(0)
    cfg = OptimizerConfig(name="lion", lr=0.1, betas=[0.9, 0.99], weight_decay=0.5)
    weight = torch.nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
    weights = [weight.tolist()]
    optimizer = build_optimizer(cfg, [weight], torch.device("cpu"))
    gradients = [torch.randn_like(weight) for _ in range(4)]
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        weights.append(weight.tolist())
    stored = count_optimizer_state_bytes(cfg, [weight])
    assert stored == 15 * 8
    for row in range(3):
        for column in range(5):
            value, mean = weights[0][row][column], 0.0
            for step, gradient in enumerate(gradients):
                given = float(gradient[row][column])
                mixed = 0.9 * mean + 0.1 * given
                value = value * (1 - 0.1 * 0.5) - 0.1 * ((mixed > 0) - (mixed < 0))
                mean = 0.99 * mean + 0.01 * given
                assert weights[step + 1][row][column] == pytest.approx(value, rel=1e-12)


@pytest.mark.slow
def test_the_same_file_is_a_plugin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = ["--plugin", str(write_lion(tmp_path)), "optimizer.name=lion", "optimizer.eps=1e-6"]
    assert main(["validate", "demo/full", f"output_dir={tmp_path / 'new'}", *plugin]) == 0
    assert "optimizer.eps has no effect: optimizer.name is lion" in capsys.readouterr().out


@pytest.mark.slow
def test_the_optimizer_is_planned_and_trained(copy: Path) -> None:
    """Its keys are checked, its states are in the plan to the byte, and a run of two steps ends."""
    follow(sections()["An optimizer"][1], copy)
    words = ["full_finetune_distributed", "--config", "demo/full", "optimizer.name=lion"]
    said = tune(
        copy,
        ["validate", "demo/full", "optimizer.name=lion", "optimizer.eps=1e-6"],
        ["run", "--no-plan", *words, "max_steps=2", "data.max_samples=64", "~validation.source"],
        [
            "plan",
            *words,
            "--json",
            "plan.json",
        ],  # the last: its simulated device stays in a process
    )
    assert "optimizer.eps has no effect: optimizer.name is lion" in said
    alive = json.loads((copy / "plan.json").read_text(encoding="utf-8"))["rank_plans"][0]["alive"]
    held = {
        kind: sum(one["bytes"] for one in alive if one["kind"] == kind)
        for kind in ("parameters", "optimizer")
    }
    assert held["optimizer"] == held["parameters"] > 10**6  # one state of each parameter's type
    assert re.search(r"^ +optimizer +1\.74 MiB .* 38 tensors$", said, re.MULTILINE)


@pytest.mark.slow
def test_the_lever_halves_what_layers_keep(copy: Path) -> None:
    """In the plan, with a loss of a run that is the same to bf16's rounding in its second step."""
    follow(sections()["A memory lever"][1], copy)
    words = ["full_finetune_distributed", "--config", "demo/full", "~validation.source"]
    words += ["memory.activation_checkpointing=none", "data.max_samples=64"]
    commands = []
    for name, lever in (("fp32", []), ("bf16", ["memory.saved_dtype=bf16"])):
        output = f"output_dir=outputs/{name}"
        commands.append(["run", "--no-plan", *words, *lever, "max_steps=2", output])
    for name, lever in (("fp32", []), ("bf16", ["memory.saved_dtype=bf16"])):
        commands.append(["plan", *words, *lever, "--json", f"{name}.json"])
    tune(copy, *commands)
    losses = {}
    activations = {}
    for name in ("fp32", "bf16"):
        log = (copy / "outputs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses[name] = [json.loads(line)["loss"] for line in log]
        plan = json.loads((copy / f"{name}.json").read_text(encoding="utf-8"))
        alive = plan["rank_plans"][0]["alive"]
        activations[name] = sum(one["bytes"] for one in alive if one["kind"] == "activations")
    # The first loss is computed before anything is kept in bf16.
    assert losses["bf16"][0] == losses["fp32"][0]
    assert losses["bf16"][1] != losses["fp32"][1]
    assert losses["bf16"][1] == pytest.approx(losses["fp32"][1], rel=1e-3)
    assert 0.4 < activations["bf16"] / activations["fp32"] < 0.7
    refused = subprocess.run(
        [sys.executable, "-m", "recipe_lib", "validate", "demo/full", "device=cuda"]
        + ["memory.saved_dtype=bf16", "memory.activation_offload=true"],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2 and "each decides what becomes of" in refused.stderr


@pytest.mark.slow
def test_the_data_format_is_found_by_its_columns(copy: Path) -> None:
    follow(sections()["A data format"][1], copy)
    rows = [
        {"question": "Which is a prime?", "choices": ["4", "7"], "answer": 1},
        {"question": "Which is even?", "choices": ["4", "7"], "answer": 2},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (copy / "choices.jsonl").write_text(text, encoding="utf-8")
    words = ["demo/full", "~validation.source", "data.source=choices.jsonl"]
    shown = tune(copy, ["data", "show", *words, "data.on_invalid=skip"])
    assert "Which is a prime?" in shown and "A. 4" in shown and "B. 7" in shown
    checked = subprocess.run(
        [sys.executable, "-m", "recipe_lib", "data", "check", *words],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert "1 sequence of 2 samples" in checked.stdout, checked
    assert "expected the index of one of 2 choices" in checked.stdout + checked.stderr, checked


@pytest.mark.slow
def test_the_verb_counts_as_transformers_does(copy: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    follow(sections()["A verb"][1], copy)
    assert "count the parameters of a config's model" in tune(copy, ["--help"])
    printed = tune(copy, ["count", "demo/full", "model.preset=llama3_2/1B"])
    preset = copy / "recipe_lib" / "models" / "presets" / "llama3_2" / "1B.json"
    config = AutoConfig.for_model(**json.loads(preset.read_text(encoding="utf-8")))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = sum(parameter.numel() for parameter in model.model.layers.parameters())
    assert f"{model.num_parameters():,} parameters, {layers:,} of them in layers" in printed
