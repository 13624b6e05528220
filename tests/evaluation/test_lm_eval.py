"""`tune eval --lm-eval`: tasks whose rows are local, with the numbers of the harness's own class on
the same folder.
"""

import json
from pathlib import Path

import pytest

from recipe_lib.cli.main import main
from tests.evaluation.models import ROWS, write_model

lm_eval = pytest.importorskip("lm_eval", reason="extra `eval` is not installed")

CHOICE = """
task: number_choice
dataset_path: json
dataset_kwargs: {{data_files: {{validation: "{rows}"}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{instruction}}}}\\nAnswer:"
doc_to_target: 0
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
ROLLING = """
task: number_text
dataset_path: json
dataset_kwargs: {{data_files: {{validation: "{rows}"}}}}
validation_split: validation
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""
UNTIL = """
task: number_words
dataset_path: json
dataset_kwargs: {{data_files: {{validation: "{rows}"}}}}
validation_split: validation
output_type: generate_until
doc_to_text: "{{{{instruction}}}} "
doc_to_target: "{{{{output}}}}"
generation_kwargs: {{until: ["and", "\\n"], max_gen_toks: 12, do_sample: false}}
metric_list:
  - metric: exact_match
  - metric: bleu
"""
TASKS = ("number_choice", "number_text", "number_words")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            **row,
            "choices": [row["output"], row["instruction"], "no"],
            "text": f"{row['instruction']} {row['output']} " * 9,
        }
        for row in ROWS
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in zip(TASKS, (CHOICE, ROLLING, UNTIL), strict=True):
        (folder / f"{name}.yaml").write_text(text.format(rows=folder / "rows.jsonl"))
    return folder


def theirs(folder: Path, tasks: Path) -> dict[str, float]:
    """By the harness's own class."""
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        "hf",
        model_args={"pretrained": str(folder), "dtype": "float32", "attn_implementation": "eager"},
        tasks=list(TASKS), device="cpu", batch_size=4, log_samples=False, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )["results"]  # fmt: skip
    return {
        f"{task} {key.removesuffix(',none')}": value
        for task, numbers in found.items()
        for key, value in numbers.items()
        if isinstance(value, float) and "stderr" not in key
    }


@pytest.mark.slow
def test_numbers_are_those_of_its_own_class(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_model("llama", tmp_path / "model")
    words = [
        "eval",
        str(folder),
        "--lm-eval",
        ",".join(TASKS),
        "--include-path",
        str(tasks),
        "--json",
    ]
    capsys.readouterr()
    assert main(words) == 0
    ours = json.loads(capsys.readouterr().out.splitlines()[-1])["tuned"]
    expected = theirs(folder, tasks)
    assert expected.keys() <= ours.keys() and len(expected) >= 6
    assert {name: ours[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.slow
def test_an_unknown_task_is_named(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own tasks, which are thousands of files, are left out."""
    from lm_eval import tasks as of_harness

    manager = of_harness.TaskManager
    monkeypatch.setattr(
        of_harness, "TaskManager", lambda **words: manager(**words | {"include_defaults": False})
    )
    folder = write_model("llama", tmp_path / "model")
    capsys.readouterr()
    assert (
        main(["eval", str(folder), "--lm-eval", "number_chioce", "--include-path", str(tasks)]) == 2
    )
    assert (
        "--lm-eval: unknown task number_chioce; did you mean number_choice?"
        in capsys.readouterr().err
    )
