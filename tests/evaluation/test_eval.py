"""`tune eval` against transformers: likelihoods, answers, adapters by PEFT, several ranks."""

import io
import json
import math
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe_lib.cli import eval as eval_verb
from recipe_lib.cli.main import main
from tests.distributed.ranks import run_ranks
from tests.evaluation.models import (
    FAMILIES,
    ROWS,
    compute_likelihood,
    encode_samples,
    generate_answer,
    write_model,
    write_rows,
)

PLUGIN = """
from recipe_lib.config import register

@register("metric", "same_start")
def same_start(prediction, reference):
    return float(prediction[:1] == reference[:1])
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(request.param, tmp_path_factory.mktemp(request.param))


def evaluated(out: Path, *words: object) -> tuple[dict, list[dict]]:
    """(summary, examples) that the verb writes."""
    assert main(["eval", *map(str, words), "--out", str(out)]) == 0
    examples = [json.loads(line) for line in (out / "examples.jsonl").read_text().splitlines()]
    return json.loads((out / "summary.json").read_text()), examples


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


@pytest.mark.slow
def test_likelihoods_and_answers_are_those_of_transformers(
    folder: Path, rows: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN)
    words = [
        folder,
        "--data",
        rows,
        "--plugin",
        plugin,
        "--metric",
        "same_start",
        "--max-new-tokens",
        6,
    ]
    summary, examples = evaluated(tmp_path / "out", *words, "validation.batch_size=4")
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    known = encode_samples(folder)
    total, said = 0.0, []
    for example, sample, row in zip(examples, known, ROWS, strict=True):
        wanted, right = compute_likelihood(model, sample)
        tuned = example["tuned"]
        assert tuned["log_likelihood"] == pytest.approx(wanted, rel=1e-5)
        assert (tuned["label_tokens"], tuned["likeliest_tokens"]) == (len(sample.answer), right)
        assert example["reference"] == row["output"] and row["instruction"] in example["prompt"]
        said.append(generate_answer(model, tokenizer, sample, 6))
        assert tuned["prediction"] == said[-1]
        total += wanted
    tokens = sum(len(sample.answer) for sample in known)
    numbers = summary["tuned"]
    assert numbers["loss"] == pytest.approx(-total / tokens, rel=1e-5)
    assert numbers["perplexity"] == pytest.approx(math.exp(-total / tokens), rel=1e-5)
    starts = [text[:1] == row["output"][:1] for text, row in zip(said, ROWS, strict=True)]
    assert numbers["same_start"] == pytest.approx(sum(starts) / len(starts))
    assert (summary["sequences"], summary["label_tokens"], summary["answers"]) == (
        len(ROWS),
        tokens,
        len(ROWS),
    )


def test_exact_match_counts_the_answers_that_transformers_gives_too(
    rows: Path, tmp_path: Path
) -> None:
    """Some of the samples' answers are what the model says anyway."""
    folder = write_model("llama", tmp_path / "model")
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    changed = []
    for number, (row, sample) in enumerate(zip(ROWS, encode_samples(folder), strict=True)):
        said = generate_answer(model, tokenizer, sample, 4)
        changed.append({**row, "output": said} if number % 3 == 0 else row)
    data = tmp_path / "rows.json"
    data.write_text(json.dumps(changed))
    summary, examples = evaluated(tmp_path / "out", folder, "--data", data, "--max-new-tokens", 4)
    expected = [
        row["output"] == example["tuned"]["prediction"]
        for row, example in zip(changed, examples, strict=True)
    ]
    assert sum(expected) >= 4 and not all(expected)
    assert summary["tuned"]["exact_match"] == sum(expected) / len(expected)
    assert [example["tuned"]["exact_match"] for example in examples] == [
        float(right) for right in expected
    ]


def test_an_adapter_is_measured_next_to_its_base_as_peft_has_them(
    rows: Path, tmp_path: Path
) -> None:
    folder = write_model("llama", tmp_path / "model")
    base = load(folder)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], lora_alpha=16)
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3)
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    adapted.save_pretrained(tmp_path / "adapter")
    summary, examples = evaluated(
        tmp_path / "out", tmp_path / "adapter", "--data", rows, "--no-generate"
    )
    known = encode_samples(folder)
    for example, sample in zip(examples, known, strict=True):
        assert example["tuned"]["log_likelihood"] == pytest.approx(
            compute_likelihood(adapted, sample)[0], rel=1e-5
        )
        with adapted.disable_adapter():
            assert example["base"]["log_likelihood"] == pytest.approx(
                compute_likelihood(adapted, sample)[0], rel=1e-5
            )
    assert abs(summary["tuned"]["loss"] - summary["base"]["loss"]) > 0.01
    assert summary["models"] == {"tuned": str(tmp_path / "adapter"), "base": str(folder)}


def launch_forks(flags: Sequence[str], script: Path, words: Sequence[str]) -> int:
    """As torchrun does, in forks: what `tests/cli/test_launch.py` has of real ranks is left out."""
    assert "--nproc_per_node=2" in flags or flags[flags.index("--nproc_per_node") + 1] == "2"
    assert script == Path(eval_verb.__file__)

    def evaluate() -> str:
        with redirect_stdout(io.StringIO()) as printed:
            eval_verb.main(list(words))
        return printed.getvalue()

    first, second = run_ranks(evaluate, 2)
    print(first + second, end="")
    return 0


@pytest.mark.slow
def test_ranks_share_the_sequences_and_print_the_numbers_of_one(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_verb, "launch", launch_forks)
    folder = write_model("gemma2", tmp_path / "model")
    words = [folder, "--data", rows, "--max-new-tokens", 5, "dtype=fp64", "validation.batch_size=3"]
    one, alone = evaluated(tmp_path / "one", *words)
    ranks = ["eval", "--nproc_per_node", "2", *map(str, words), "--json"]
    capsys.readouterr()
    assert main([*ranks, "--temperature", "0", "--out", str(tmp_path / "two")]) == 0
    two = json.loads(capsys.readouterr().out)
    assert two == json.loads((tmp_path / "two" / "summary.json").read_text())
    assert two["tuned"] == pytest.approx(one["tuned"], rel=1e-12) and two["settings"]["ranks"] == 2
    together = [
        json.loads(line) for line in (tmp_path / "two" / "examples.jsonl").read_text().splitlines()
    ]
    assert [each["tuned"]["prediction"] for each in together] == [
        each["tuned"]["prediction"] for each in alone
    ]
    assert main([*ranks, "--no-generate", "parallel.tensor=2"]) == 0
    split = json.loads(capsys.readouterr().out)
    assert split["tuned"]["loss"] == pytest.approx(one["tuned"]["loss"], rel=1e-12)


def test_text_counts_in_perplexity_and_is_not_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_model("llama", tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("one hundred and two " * 200)
    assert main(["eval", str(folder), "--data", str(text), "--json"]) == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert (
        summary["settings"]["max_seq_len"] == 128 and summary["sequences"] > 1
    )  # as many as the model reads
    assert (
        summary["answers"] == 0
        and "exact_match" not in summary["tuned"]
        and summary["tuned"]["perplexity"] > 1
    )
    assert "have no question to answer" in printed.err


def test_a_base_of_another_shape_is_refused(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder, other = (
        write_model("llama", tmp_path / "model"),
        write_model("phi3", tmp_path / "other"),
    )
    assert (
        main(["eval", str(folder), "--data", str(rows), "--base", str(other), "--no-generate"]) == 2
    )
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {other}")


def test_pages_show_both_models_and_escape_their_answers(rows: Path, tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "model")
    evaluated(tmp_path / "out", folder, "--data", rows, "--max-new-tokens", 2, "--max-samples", 3)
    page = (tmp_path / "out" / "report.html").read_text()
    assert (
        "perplexity" in page
        and "&lt;|user|&gt;" in page
        and "<script" not in page
        and "http" not in page
    )
    assert len((tmp_path / "out" / "examples.jsonl").read_text().splitlines()) == 3
