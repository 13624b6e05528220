"""What a run leaves: every file of output_dir, numbers that an independent computation confirms,
and runs by `tune` as users start it: a copied recipe, several processes, several nodes.
"""

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from recipe_lib.cli.main import main as tune_here
from recipe_lib.config import load_config
from recipe_lib.data import build_validation_dataset
from recipe_lib.tokenizers import load_tokenizer
from tests.distributed.ranks import find_free_port, run_ranks
from tests.recipes.runs import (
    ROOT,
    build_arguments,
    build_story_arguments,
    find_largest_difference,
    gather_whole,
    list_parameters,
    read_losses,
    read_metrics,
    read_steps,
    run_here,
)

STEP_KEYS = {
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "label_tokens",
    "label_token_fraction",
    "peak_memory_active_gib",
    "peak_memory_allocated_gib",
    "peak_memory_reserved_gib",
    "memory_kind",
    "seconds",
    "tokens",
}
COMMUNICATION_KEYS = {"communication_share", "communication_exposed_share", "scaling_efficiency"}
RANKS = 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs of two ranks from random weights: `fp32` with validation, `again` from its config.yaml,
    `diverged`.
    """
    folder = tmp_path_factory.mktemp("outputs")
    validation = [
        "validation.source=examples/demo/heldout.jsonl",
        "validation.max_samples=7",
        "validation.every_n_steps=2",
    ]

    def train() -> dict[str, Any]:
        start: list[Any] = []
        keep = lambda recipe: start.append(list_parameters(recipe))  # noqa: E731
        small = ["batch_size=4", "max_steps=3", "log.every_n_steps=2"]
        found = {
            "fp32": run_here([*build_arguments(folder / "fp32"), *small, *validation], keep),
            "again": run_here(
                ["--config", str(folder / "fp32" / "config.yaml"), f"output_dir={folder / 'again'}"]
            ),
            "reseeded": run_here([*build_arguments(folder / "reseeded"), *small, "seed=7"], keep),
            "diverged": run_here(
                [
                    *build_arguments(folder / "diverged"),
                    *small,
                    "optimizer.name=sgd",
                    "optimizer.lr=1e30",
                    "~clip_grad_norm",
                ]
            ),
        }
        ended = {name: {"code": run.code, "said": run.said} for name, run in found.items()}
        return {**ended, "start": start}

    ranks = run_ranks(train, RANKS)
    told = [
        line for rank in ranks for line in rank["diverged"]["said"] if line.startswith("error: ")
    ]
    return {"folder": folder, "told": told, **ranks[0]}


@pytest.mark.slow
def test_the_folder_holds_these_files(runs: dict[str, Any]):
    assert runs["fp32"]["code"] == 0, runs["fp32"]["said"]
    found = sorted(path.name for path in (runs["folder"] / "fp32").iterdir())
    assert found == [
        "config.yaml",
        "metrics.jsonl",
        "model",
        "report.html",
        "summary.json",
        "written.json",
    ]
    model = {path.name for path in (runs["folder"] / "fp32" / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= model


@pytest.mark.slow
def test_metrics_of_every_step(runs: dict[str, Any]):
    lines = read_metrics(runs["folder"] / "fp32")
    trained = [line for line in lines if "loss" in line]
    validated = [line for line in lines if "loss" not in line]
    assert [line["step"] for line in trained] == [1, 2, 3]
    assert [line["step"] for line in validated] == [2, 3]
    assert all(set(line) == STEP_KEYS for line in trained[:2])
    assert set(trained[2]) == STEP_KEYS | COMMUNICATION_KEYS  # log.communication_step is 3
    assert all(set(line) == {"step", "validation_loss", "validation_tokens"} for line in validated)
    for line in trained:
        assert line["epoch"] == line["step"] / 3  # 24 rows, 8 a step
        assert line["lr"] == pytest.approx(
            4e-3 * (1 + math.cos(math.pi * (line["step"] - 1) / 3)) / 2, rel=1e-12
        )
        assert 0 < line["label_tokens"] < line["tokens"] <= 8 * 64
        assert line["label_token_fraction"] == line["label_tokens"] / line["tokens"]
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
        assert line["tokens_per_second_per_device"] == pytest.approx(
            line["tokens_per_second"] / RANKS
        )
        assert line["memory_kind"] == "resident set"
        assert 0.01 < line["peak_memory_active_gib"] < 10


def test_the_resolved_config_repeats_the_run(runs: dict[str, Any]):
    assert runs["again"]["code"] == 0, runs["again"]["said"]
    first, again = runs["folder"] / "fp32", runs["folder"] / "again"
    assert read_steps(again) == read_steps(first)
    kept, repeated = (load_config(folder / "config.yaml") for folder in (first, again))
    repeated.output_dir = kept.output_dir
    assert repeated == kept
    assert (again / "model/model.safetensors").read_bytes() == (
        first / "model/model.safetensors"
    ).read_bytes()


def test_the_summary_adds_up(runs: dict[str, Any]):
    summary = json.loads((runs["folder"] / "fp32" / "summary.json").read_text())
    lines = read_metrics(runs["folder"] / "fp32")
    trained = [line for line in lines if "loss" in line]
    validated = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert summary["status"] == "done"
    assert (summary["steps"], summary["total_steps"], summary["world_size"]) == (3, 3, RANKS)
    assert (summary["first_loss"], summary["final_loss"]) == (
        trained[0]["loss"],
        trained[-1]["loss"],
    )
    assert (summary["final_validation_loss"], summary["best_validation_loss"]) == (
        validated[-1],
        min(validated),
    )
    assert summary["label_tokens"] == sum(line["label_tokens"] for line in trained)
    assert summary["peak_memory_active_gib"] == max(
        line["peak_memory_active_gib"] for line in trained
    )
    assert 0 < summary["training_seconds"] <= summary["wall_seconds"]
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["settings"]["optimizer"]["lr"] == 4e-3


@pytest.mark.slow
def test_every_epoch_takes_each_row_once_in_an_order_of_its_own(tmp_path: Path):
    def train(shuffle: bool) -> list[list[int]]:
        """The rows, as one number each, that this rank takes in each step."""
        taken: list[list[int]] = []

        def watch(recipe: Any) -> None:
            data = recipe.data
            ids = {
                tuple(data.dataset[number].tokens.tolist()): number
                for number in range(len(data.dataset))
            }
            honest = recipe.train_step

            def train_step(batches: Any) -> Any:
                rows = [row for batch in batches.micro_batches for row in batch.tokens.tolist()]
                taken.append([ids[tuple(_without_end(row, data.tokenizer.pad_id))] for row in rows])
                return honest(batches)

            recipe.train_step = train_step

        argv = [
            *build_arguments(tmp_path / f"run {shuffle}"),
            "batch_size=1",
            "gradient_accumulation_steps=4",
            "epochs=3",
        ]
        argv += [
            "data.max_samples=23",
            "checkpoint.save_model=false",
            f"data.shuffle={str(shuffle).lower()}",
        ]
        assert run_here(argv, watch).code == 0
        return taken

    both = run_ranks(lambda: [train(shuffle) for shuffle in (True, False)], RANKS)
    for shuffle, *ranks in zip((True, False), *both, strict=True):
        rows = [first + second for first, second in zip(*ranks, strict=True)]  # of each step
        epochs = [[row for step in rows[at : at + 2] for row in step] for at in range(0, 6, 2)]
        assert len(rows) == 6
        assert all(
            len(epoch) == len(set(epoch)) == 16 for epoch in epochs
        )  # 23 rows: two whole steps of 8
        if shuffle:
            assert len({tuple(epoch) for epoch in epochs}) == 3
            assert (
                len({tuple(sorted(epoch)) for epoch in epochs}) == 3
            )  # those left out differ as well
        else:
            assert all(sorted(epoch) == list(range(16)) for epoch in epochs)


def _without_end(ids: list[int], pad: int) -> list[int]:
    while ids and ids[-1] == pad:
        ids = ids[:-1]
    return ids


class _Outside(HTMLParser):
    """Collects what a page would fetch, and counts its charts."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.charts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.charts += tag == "svg"
        named = {"src", "href", "xlink:href", "data", "srcset", "action", "poster"}
        self.fetched += [f"{tag} {name}={value}" for name, value in attrs if name in named]
        self.fetched += [tag] if tag in ("link", "iframe", "object", "embed", "base") else []


@pytest.mark.parametrize("name", ["fp32", "diverged"])
def test_the_report_fetches_nothing(runs: dict[str, Any], name: str):
    text = (runs["folder"] / name / "report.html").read_text()
    page = _Outside()
    page.feed(text)
    assert page.fetched == []
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/)", text)
    assert page.charts >= 3
    assert "validation" in text or name != "fp32"


def test_a_run_that_diverges_ends_with_its_own_code(runs: dict[str, Any]):
    ended, lines = runs["diverged"], read_metrics(runs["folder"] / "diverged")
    assert ended["code"] == 4
    last = lines[-1]["step"]
    number = r"(nan|inf|[\d.e+]+)"
    assert re.fullmatch(
        rf"error: step {last}: found loss {number} and grad_norm {number}, expected finite"
        r" numbers; "
        r"lower optimizer\.lr \(1e\+30\) or clip_grad_norm, and resume=latest from a saved state",
        *runs["told"],  # by one of the ranks
    ), runs["told"]
    assert None in (lines[-1]["loss"], lines[-1]["grad_norm"])
    assert (
        json.loads((runs["folder"] / "diverged" / "summary.json").read_text())["status"]
        == "diverged"
    )
    assert not (runs["folder"] / "diverged" / "model").exists()


def test_random_weights_are_the_same_on_any_number_of_ranks(runs: dict[str, Any], tmp_path: Path):
    def start() -> dict[str, torch.Tensor]:
        found: list[Any] = []
        run = run_here(
            [*build_arguments(tmp_path / "one"), "max_steps=1", "batch_size=8"],
            lambda recipe: found.append(list_parameters(recipe)),
        )
        assert run.code == 0, run.said
        return found[0]

    one, (two, reseeded) = run_ranks(start, 1, process_group=False)[0], runs["start"]
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    matrices = [name for name in one if one[name].dim() == 2]
    assert len(matrices) == 1 + 2 * 7 and not any(
        torch.equal(reseeded[name], two[name]) for name in matrices
    )
    assert 0.019 < one["model.embed_tokens.weight"].std() < 0.021
    assert (
        find_largest_difference(
            read_losses(tmp_path / "one"), read_losses(runs["folder"] / "fp32")[:1]
        )
        <= 1e-5
    )


# --- real weights


@pytest.fixture(scope="module")
def real_runs(realdata: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs of two ranks from real weights on Alpaca rows, with validation on 13 rows, 3 at a time:
    fp32 and bf16.
    """
    folder = tmp_path_factory.mktemp("real")
    rows = realdata / "datasets" / "alpaca"

    def train() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, overrides in {
            "fp32": [],
            "bf16": ["dtype=bf16", "parallel.reduce_dtype=fp32"],
        }.items():
            run = run_here(
                build_story_arguments(
                    realdata,
                    folder / name,
                    f"data.source={rows / 'alpaca_en_demo.json'}",
                    "data.max_samples=24",
                    f"validation.source={rows / 'identity.json'}",
                    "validation.max_samples=13",
                    "validation.batch_size=3",
                    "batch_size=4",
                    *overrides,
                )
            )
            assert run.code == 0, run.said
            with torch.no_grad():
                found[name] = gather_whole(run.recipe.model(probe()))
        return found

    return {"folder": folder, "logits": run_ranks(train, RANKS)[0]}


def probe() -> torch.Tensor:
    """Tokens `[2, 24]` to compare logits on."""
    return torch.randint(3, 512, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_validation_loss_is_that_of_transformers(real_runs: dict[str, Any]):
    folder = real_runs["folder"] / "fp32"
    cfg = load_config(folder / "config.yaml")
    rows = build_validation_dataset(cfg, load_tokenizer(Path(cfg.model.path)))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    total, count = 0.0, 0
    for number in range(len(rows)):
        row = rows[number]
        with torch.no_grad():
            logits = model(torch.tensor([row.tokens.tolist()])).logits[0].double()
        labels = torch.tensor(row.labels.tolist())
        total += F.cross_entropy(logits[labels >= 0], labels[labels >= 0], reduction="sum").item()
        count += int((labels >= 0).sum())
    last = read_metrics(folder)[-1]
    assert len(rows) == 13
    assert last["validation_tokens"] == count
    assert last["validation_loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.slow
def test_a_run_in_bf16(real_runs: dict[str, Any]):
    fp32, bf16 = (read_losses(real_runs["folder"] / name) for name in ("fp32", "bf16"))
    assert find_largest_difference(bf16, fp32) <= 0.03 and bf16 != fp32
    model = transformers.AutoModelForCausalLM.from_pretrained(
        real_runs["folder"] / "bf16" / "model", dtype="auto"
    )
    assert model.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        theirs = model(probe()).logits.float()
    ours = real_runs["logits"]["bf16"].float()
    assert (ours - theirs).abs().max() <= 0.02 * theirs.abs().max()


# --- started by `tune`


OWN_CONFIG = """
from dataclasses import dataclass
from recipe_lib.config.schema import key

@dataclass
class Config(FullFinetuneConfig):
    loss_scale: float = key(1.0, "The loss is multiplied by it.", above=0)
"""


@pytest.fixture(scope="module")
def own_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the recipe that has a key more, and a config that sets it."""
    folder = tmp_path_factory.mktemp("own")
    assert tune_here(["cp", "full_finetune_distributed", str(folder / "mine.py")]) == 0
    text = (folder / "mine.py").read_text()
    for before, after in {
        "\nConfig = FullFinetuneConfig\n": OWN_CONFIG,
        "return self.model(*inputs": "return self.cfg.loss_scale * self.model(*inputs",
    }.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    (folder / "mine.py").write_text(text)
    (folder / "mine.yaml").write_text("recipe: full_finetune_distributed\nloss_scale: 2.0\n")
    return folder


def absolute(output: Path) -> list[str]:
    """`build_arguments` without the config, with paths that hold in any working folder."""
    shipped = load_config("demo/full")
    return [
        *build_arguments(output)[2:],
        f"tokenizer.path={ROOT / shipped.tokenizer.path}",
        f"data.source={ROOT / shipped.data.source}",
        "dtype=fp32",
        "device=cpu",
        "optimizer.lr=4e-3",
        "memory.loss_chunks=1",
        "max_steps=3",
        "log.progress=plain",
    ]


def test_a_copied_recipe_with_a_key_of_its_own(
    runs: dict[str, Any], own_recipe: Path, tmp_path: Path
):
    recipe, config = str(own_recipe / "mine.py"), str(own_recipe / "mine.yaml")

    def run(*overrides: str) -> int:
        words = [word for word in absolute(tmp_path / "out") if not word.startswith("batch_size=")]
        return tune_here(["run", recipe, "--config", config, *words, "batch_size=8", *overrides])

    assert run_ranks(run, 1, "clip_grad_norm=null", process_group=False) == [0]
    assert read_losses(tmp_path / "out")[0] == pytest.approx(
        2 * read_losses(runs["folder"] / "fp32")[0], rel=1e-6
    )
    assert "loss_scale: 2.0" in (tmp_path / "out" / "config.yaml").read_text()
    assert run_ranks(run, 1, "overwrite_output_dir=true", "loss_scale=0", process_group=False) == [
        2
    ]
    assert run_ranks(run, 1, "overwrite_output_dir=true", "loss_scal=1", process_group=False) == [2]


@pytest.mark.slow
def test_two_nodes_run_a_copied_recipe_from_anywhere(
    runs: dict[str, Any], own_recipe: Path, tmp_path: Path
):
    flags = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv-backend", "c10d"]
    flags += [f"--rdzv-endpoint=localhost:{find_free_port()}"]
    words = [
        "run",
        *flags,
        "mine.py",
        "--config",
        "mine.yaml",
        "loss_scale=1",
        *absolute(tmp_path / "out"),
    ]

    def launch_node() -> int:
        """Do as `tune` in a process of its own, which nothing tells yet that it is a rank."""
        number = os.environ["RANK"]
        for name in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        ):
            del os.environ[name]
        os.environ["PYTHONPATH"] = str(ROOT)
        os.chdir(own_recipe)
        for stream in (1, 2):
            os.dup2(os.open(tmp_path / f"{number} {stream}", os.O_WRONLY | os.O_CREAT), stream)
        return tune_here(words)

    codes = run_ranks(launch_node, 2, timeout=150, process_group=False)
    said = [[(tmp_path / f"{node} {stream}").read_text() for stream in (1, 2)] for node in (0, 1)]
    assert codes == [0, 0], said
    quiet, main = sorted((errors for _, errors in said), key=lambda errors: "step 3/3" in errors)
    assert [output for output, _ in said] == ["", ""]
    assert "devices: 2 cpu" in main and "step 3/3" in main and "step 3/3" not in quiet
    assert not any(
        word in errors for errors in (quiet, main) for word in ("Warning", "Traceback")
    ), said
    assert (
        main.count("global batch: 8 sequences") == 1 and "global batch" not in quiet
    )  # one rank speaks
    assert read_steps(tmp_path / "out") == read_steps(runs["folder"] / "fp32")
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
