"""`tune generate --prompts`: each answer is the one that transformers gives to its prompt; a second
start goes on.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe_lib.cli.main import main
from tests.evaluation.models import ROWS, encode_samples, generate_answer, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts and conversations."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": row["instruction"]} for row in ROWS]
    rows[3] = {"messages": [{"role": "user", "content": ROWS[3]["instruction"]}]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(folder: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "answers.jsonl"
    words = [
        "generate",
        folder,
        "--prompts",
        prompts,
        "--out",
        out,
        "--batch-size",
        3,
        "--max-new-tokens",
        7,
    ]
    assert main([str(word) for word in words]) == 0
    return out


def test_answers_are_those_of_transformers(folder: Path, whole: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = [generate_answer(model, tokenizer, sample, 7) for sample in encode_samples(folder)]
    found = answers(whole)
    assert [line["answer"] for line in found] == expected
    assert [line["number"] for line in found] == list(range(1, len(ROWS) + 1))
    assert all(line["ended_by"] in ("stop", "length") and line["tokens"] <= 7 for line in found)


@pytest.mark.parametrize("cut", [0, 1, 250, 700])
def test_a_second_start_goes_on_after_the_last_whole_line(
    folder: Path, prompts: Path, whole: Path, cut: int, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    out.write_bytes(whole.read_bytes()[:cut])
    words = [
        "generate",
        folder,
        "--prompts",
        prompts,
        "--out",
        out,
        "--batch-size",
        2,
        "--max-new-tokens",
        7,
    ]
    assert main([str(word) for word in words]) == 0
    assert out.read_bytes() == whole.read_bytes()


def test_answers_of_other_settings_are_not_mixed(
    folder: Path, prompts: Path, whole: Path, capsys: pytest.CaptureFixture
) -> None:
    kept = whole.read_bytes()
    words = ["generate", folder, "--prompts", prompts, "--out", whole, "--max-new-tokens", 8]
    assert main([str(word) for word in words]) == 2
    assert (
        "answers.jsonl:1: was made with another model, other prompts or other options"
        in capsys.readouterr().err
    )
    assert whole.read_bytes() == kept


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "found no prompt, expected one a line"),
        ("{", "prompts.jsonl:1: column 2: invalid JSON"),
        ('{"prompt": "x"}\n[1]\n', "prompts.jsonl:2: found a list, expected"),
        ('{"promt": "x"}', "prompts.jsonl:1: found promt, expected"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            "the last message is the assistant's",
        ),
    ],
)
def test_prompts_that_are_none(
    text: str, line: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    assert main(["generate", str(folder), "--prompts", str(path)]) == 2
    said = capsys.readouterr()
    assert line in said.err and said.out == "" and said.err.count("error: ") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--out", "a.jsonl"], "--out: is of --prompts, which is missing"),
        (["--prompts", "a.csv"], "--prompts: found a.csv, expected a file .txt or .jsonl"),
        (
            ["--prompts", "a.txt", "--batch-size", "0"],
            "--batch-size: found 0, expected a number >= 1",
        ),
        (["--prompts", "a.txt", "--prompt", "x"], "--prompt: --prompts has prompts already"),
        (["--prompts", "a.txt"], "--prompts: a.txt: No such file or directory"),
    ],
)
def test_options_that_do_not_go_together(
    words: list[str], line: str, folder: Path, capsys: pytest.CaptureFixture
):
    assert main(["generate", str(folder), *words]) == 2
    assert line in capsys.readouterr().err
