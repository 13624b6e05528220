"""validation.metrics in the loop: transformers on the exported model finds the same, whatever
divides the model.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.ranks import run_ranks
from tests.evaluation.models import (
    ROWS,
    compute_likelihood,
    encode_samples,
    generate_answer,
    write_model,
    write_rows,
)
from tests.recipes.runs import PLAIN, keep_latest, read_metrics, run_here

PLUGIN = """
from recipe_lib.config import register

@register("metric", "letters")
def letters(prediction, reference):
    return len(prediction)
"""
SCORED = "validation.metrics=[token_accuracy, exact_match]"
# How the model is divided over two ranks, and what else the run has.
DIVISIONS = {
    "fsdp": ["validation.metrics=[token_accuracy, exact_match, letters]"],
    "pipeline": [
        SCORED,
        "parallel.pipeline=2",
        "batch_size=10",
        "parallel.pipeline_microbatches=2",
    ],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows and a plugin."""
    folder = tmp_path_factory.mktemp("files")
    write_model("llama", folder / "model")
    write_rows(folder)
    (folder / "plugin.py").write_text(PLUGIN)
    return folder


def words(files: Path, output: Path, *more: str) -> list[str]:
    return keep_latest(
        "--config", str(PLAIN), "--plugin", str(files / "plugin.py"), f"model.path={files / 'model'}",
        f"data.source={files / 'rows.jsonl'}", "data.format=alpaca", f"validation.source={files / 'rows.jsonl'}",
        f"output_dir={output}", "data.cache=false", "max_seq_len=64", "dtype=fp32", "device=cpu", "batch_size=5",
        "max_steps=16", "epochs=60", "optimizer.lr=1e-2", "validation.every_n_steps=16", "validation.max_new_tokens=12",
        "validation.batch_size=3", "lr_scheduler.type=constant", *more,
    )  # fmt: skip


def by_transformers(folder: Path) -> dict[str, float]:
    """Of the exported model, by its plain forward and its own search."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    known = encode_samples(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = [(*compute_likelihood(model, sample), len(sample.answer)) for sample in known]
    said = [generate_answer(model, tokenizer, sample, 12) for sample in known]
    return {
        "loss": -sum(each[0] for each in found) / sum(each[2] for each in found),
        "token_accuracy": sum(each[1] for each in found) / sum(each[2] for each in found),
        "exact_match": sum(right == count for _, right, count in found) / len(found),
        "said": (
            sum(text == row["output"] for text, row in zip(said, ROWS, strict=True)) / len(ROWS)
        ),
        "letters": sum(map(len, said)) / len(said),
    }


def check(output: Path) -> dict[str, float]:
    (line,) = [line for line in read_metrics(output) if "validation_loss" in line]
    wanted = by_transformers(output / "model")
    assert line["validation_loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    for name in ("token_accuracy", "exact_match", "letters"):
        if f"validation_{name}" in line:
            assert line[f"validation_{name}"] == pytest.approx(wanted[name], abs=1e-9), name
    assert (
        wanted["exact_match"] == wanted["said"]
    )  # greedy decoding gives what is likeliest all along
    assert wanted["exact_match"] > 0
    return line


def test_numbers_of_one_rank_are_those_of_transformers(files: Path, tmp_path: Path) -> None:
    run = run_here(words(files, tmp_path / "run", DIVISIONS["fsdp"][0]))
    assert run.code == 0, run.said
    line = check(tmp_path / "run")
    assert (
        0 < line["validation_exact_match"] < line["validation_token_accuracy"] < 1
        and "validation_letters" in line
    )
    said = next(text for text in run.said if "validation loss" in text)
    assert f"exact match {line['validation_exact_match']:.4f}" in said and "letters" in said


@pytest.mark.slow
def test_numbers_of_two_ranks_are_those_of_transformers(files: Path, tmp_path: Path) -> None:
    def train() -> None:
        for name, more in DIVISIONS.items():
            run = run_here(words(files, tmp_path / name, *more))
            assert run.code == 0, run.said

    run_ranks(train, 2)
    for name in DIVISIONS:
        assert ("validation_letters" in check(tmp_path / name)) == (name == "fsdp")


def test_a_metric_of_answers_needs_a_question(files: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one hundred and two " * 90)
    sources = [f"data.source={text}", "data.format=text", f"validation.source={text}"]
    run = run_here(words(files, tmp_path / "run", *sources, "validation.metrics=[letters]"))
    assert run.code == 2 and "letters is measured of answers, and no sequence of" in run.said[-1]


def test_a_metric_that_raises_is_named(files: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "wrong.py"
    plugin.write_text(PLUGIN.replace("letters", "wrong").replace("len(prediction)", "1 / 0"))
    line = words(
        files,
        tmp_path / "run",
        "validation.metrics=[wrong]",
        "max_steps=1",
        "~validation.every_n_steps",
    )
    line = [str(plugin) if word.endswith("plugin.py") else word for word in line]
    run = run_here([word for word in line if not word.startswith("validation.every_n_steps=")])
    assert (
        run.code == 2
        and "metric wrong: raised ZeroDivisionError for the answer of sequence 0" in run.said[-1]
    )
