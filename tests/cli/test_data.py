"""`tune data show` and `tune data check`, on rows with faults that were put there."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from recipe_lib.cli.data import FINDINGS
from recipe_lib.cli.main import main
from recipe_lib.data import inspect

TOKENIZER = "examples/demo/tokenizer"
ROWS = [
    {"instruction": "Write 5 in words.", "output": "five"},
    {"instruction": "Write 6 in words.", "output": "six"},
    {"instruction": "Write 7 in words.", "output": "seven"},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def arguments(rows: Path, *overrides: str) -> list[str]:
    own = (
        "model.preset=demo/0.5M",
        f"tokenizer.path={TOKENIZER}",
        f"data.source={rows}",
        "device=cpu",
    )
    length = (
        [] if any(word.startswith("max_seq_len=") for word in overrides) else ["max_seq_len=64"]
    )
    return ["tests/recipes/plain.yaml", *own, "dtype=fp32", *length, *overrides]


def tune(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["data", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def between(text: str) -> list[str]:
    """What stands between the marks of trained text."""
    return [part.partition("»")[0] for part in text.split("«")[1:]]


def test_show_marks_what_is_trained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = write(tmp_path / "rows.jsonl", ROWS)
    code, out, err = tune(capsys, "show", *arguments(rows, "data.shuffle=false"), "--limit", "2")
    assert (code, err) == (0, f"data: format alpaca, found by the columns of {rows}\n")
    monkeypatch.setenv("TUNE_VERBOSITY", "")  # restored after the test
    assert tune(capsys, "show", *arguments(rows, "data.shuffle=false"), "--limit", "2", "-q") == (
        0,
        out,
        "",
    )
    assert "".join(between(out.split("── sequence 2")[0])).startswith("five")
    assert "".join(between(out.split("── sequence 2")[1])).startswith("six")
    assert f"{rows}:1" in out and f"{rows}:2" in out and f"{rows}:3" not in out
    assert "Write 5 in words." in out.replace("«", "").replace("»", "")
    trained = int(out.split(" trained")[0].rsplit(" ", 1)[1])
    assert 1 < trained < 12


def test_rows_cannot_write_to_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    sly = {"instruction": "\x1b[2J\rGo\x07", "output": "a\x1b]0;title\x07\n\tb\0"}
    code, out, _ = tune(capsys, "show", *arguments(write(tmp_path / "rows.jsonl", [sly])))
    assert code == 0
    assert "\\x1b[2J\\rGo\\x07" in out and "«a\\x1b]0;title\\x07\n\\tb\\x00" in out
    assert not set("\x1b\r\x07\0\t") & set(out)


@pytest.mark.parametrize("action", ["show", "check"])
def test_a_fault_is_one_line_whatever_the_row_holds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, action: str
):
    rows = write(tmp_path / "rows.jsonl", [*ROWS, {"a\nb\x1b[31m\ud800": 1}])
    code, out, err = tune(capsys, action, *arguments(rows))
    assert code == 2
    assert "found the columns a\\nb\\x1b[31m\\ud800, expected instruction, output" in err
    assert "\x1b" not in out + err and all(line.startswith("error: ") for line in err.splitlines())


def test_a_step_behind_the_last_one(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    words = [
        "show",
        *arguments(write(tmp_path / "rows.jsonl", ROWS), "batch_size=2", "epochs=2"),
        "--step",
    ]
    assert tune(capsys, *words, "2")[0] == 0
    code, out, err = tune(capsys, *words, "3")
    assert (code, out, err.splitlines(True)[-1]) == (
        2,
        "",
        "error: --step: found 3, expected at most 2: the config's epochs end there\n",
    )


def test_show_packs(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", ROWS)
    words = ["show", *arguments(rows, "data.packing=true", "data.shuffle=false", "max_seq_len=256")]
    code, out, _ = tune(capsys, *words)
    assert code == 0
    assert "in 3 documents" in out and "-- document 3 of 3: " in out and "── pack 2" not in out
    code, out, _ = tune(capsys, *words, "--json")
    documents = json.loads(out)["sequences"][0]
    said = [
        "".join(piece["text"] for piece in row["pieces"] if piece["trained"]) for row in documents
    ]
    assert sorted(text[:3] for text in said) == ["fiv", "sev", "six"]
    assert [row["trained"] > 0 for row in documents] == [True] * 3
    words[words.index("data.packing=true")] = "data.packing=auto"
    code, out, err = tune(capsys, *words)
    assert code == 0 and "in 3 documents" in out
    assert "data.packing=auto: shown as for a model that packs\n" in err


def test_pairs_are_told_apart_and_packed_in_twos(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    pairs = [{"prompt": f"Say {n}.", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(8)]
    rows = write(tmp_path / "rows.jsonl", pairs)
    words = [
        *arguments(rows, "data.format=preference", "dpo.trainable=all"),
        "--recipe",
        "dpo_distributed",
    ]
    words[0] = "tests/recipes/pairs.yaml"
    code, out, err = tune(capsys, "show", *words, "--limit", "1")
    assert (code, err) == (0, "")
    assert between(out)[0].startswith("yes") and between(out)[1].startswith("no")
    assert "document 1 of 2, chosen: " in out and "document 2 of 2, rejected: " in out
    code, out, _ = tune(capsys, "check", *words, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["pack_length"] == 128 and 0 < found["packing_efficiency"] <= 1


@pytest.mark.parametrize(("recipe", "form", "labels"), [
    ("dpo", "kto", {True: "wanted", False: "not wanted"}),
    ("reward", "classification", {"good": "class good", "bad": "class bad"}),
])  # fmt: skip
def test_labels_are_shown(
    recipe: str,
    form: str,
    labels: dict[Any, str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    rows = [{"prompt": f"Say {n}.", "label": label} for n, label in enumerate([*labels, *labels])]
    rows = [row | {"completion": "yes"} for row in rows] if form == "kto" else rows
    words = arguments(
        write(tmp_path / "rows.jsonl", rows), f"data.format={form}", f"{recipe}.loss={form}"
    )
    words[0] = str(tmp_path / "c.yaml")
    Path(words[0]).write_text(f"recipe: {recipe}_distributed\n")
    code, out, err = tune(
        capsys, "show", *words, f"{recipe}.trainable=all", "data.shuffle=false", "--limit", "4"
    )
    assert (code, err) == (0, "")
    for number, row in enumerate(rows, start=1):
        assert f"rows.jsonl:{number}, {labels[row['label']]}\n" in out


def test_check_of_good_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    code, out, err = tune(capsys, "check", *arguments(write(tmp_path / "rows.jsonl", ROWS)))
    assert (code, err) == (0, "")
    assert "faults: none" in out and "data: 3 sequences of 3 samples read" in out


def planted(tmp_path: Path) -> list[str]:
    """Rows with one fault of each kind that rows alone can have."""
    long = {"instruction": "Write a lot.", "output": "a lot of words " * 40}
    hidden = {"instruction": "word " * 200, "output": "never seen"}
    bad = {"instruction": "no answer"}
    train = write(tmp_path / "train.jsonl", [*ROWS, ROWS[1], long, bad, hidden])
    validation = write(
        tmp_path / "validation.jsonl",
        [ROWS[2], {"instruction": "Write 8 in words.", "output": "eight"}],
    )
    return arguments(train, f"validation.source={validation}")


def test_check_finds_every_fault(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    words = planted(tmp_path)
    code, out, err = tune(capsys, "check", *words)
    assert code == 2
    for name in ("bad-samples", "duplicates", "overlap", "truncation", "no-answer-left"):
        assert f"error: {name}: " in err, name
    assert f"{tmp_path}/train.jsonl:6" in err  # the bad row
    assert f"{tmp_path}/train.jsonl:4" in err  # the copy
    assert f"{tmp_path}/validation.jsonl:1" in err
    assert all(line.startswith("error: ") for line in err.splitlines())
    code, out, _ = tune(capsys, "check", *words, "--json")
    found = json.loads(out)
    assert code == 2
    assert (
        found["samples_read"],
        found["bad_samples"],
        found["duplicate_sequences"],
        found["overlapping_sequences"],
    ) == (7, 1, 1, 1)
    assert found["truncated_sequences"] == 2 and found["sequences_without_answer_left"] == 1
    assert found["lost_answer_tokens"] > 0
    assert found["sequences"] == 5
    assert 0 < found["packing_efficiency"] <= 1


def without_name(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        finding | {"line": finding["line"].removeprefix("validation: "), "dataset": ""}
        for finding in findings
    ]


def test_what_is_checked_of_training_samples_is_checked_of_those_for_validation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    planted(tmp_path)
    good = write(tmp_path / "good.jsonl", [{"instruction": "Write 9 in words.", "output": "nine"}])
    alone = json.loads(tune(capsys, "check", *arguments(tmp_path / "train.jsonl"), "--json")[1])
    words = arguments(good, f"validation.source={tmp_path}/train.jsonl")
    code, out, _ = tune(capsys, "check", *words, "--json")
    found = json.loads(out)
    assert code == 2
    assert {finding["dataset"] for finding in found["findings"]} == {"validation"}
    assert (
        without_name(found["findings"]) == without_name(alone["findings"])
        and len(alone["findings"]) > 3
    )
    assert found["bad_samples"] == 0 and found["validation"] == {
        name: alone[name] for name in found["validation"]
    }
    code, out, err = tune(capsys, "check", *words)
    assert code == 2
    assert "error: bad-samples: validation: 1 bad sample: no column output\n" in err
    assert f"error: bad-samples:   {tmp_path}/train.jsonl:6: found the columns instruction" in err
    assert f"validation: 5 sequences of 7 samples read from {tmp_path}/train.jsonl" in out
    assert "faults: bad-samples, truncation, no-answer-left, untrained-ends, duplicates\n" in out


BAD = [
    {"instruction": 1, "output": "x"},
    {"instruction": "a", "output": ""},
    {"instruction": "a", "output": "b"},
]
CAUSES = ("instruction is no text", "empty answer")


@pytest.mark.parametrize("where", ["training", "one of several", "validation"])
def test_where_no_sample_is_usable_all_are_counted_by_cause(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, where: str
):
    good, bad = (
        write(tmp_path / "good.jsonl", ROWS),
        write(tmp_path / "bad.jsonl", [BAD[0], BAD[1], BAD[0]]),
    )
    words = {
        "training": arguments(bad),
        "one of several": [
            *(word for word in arguments(good) if not word.startswith("data.source=")),
            f"data.sources=[{{source: {good}}}, {{source: {bad}}}]",
        ],
        "validation": arguments(good, f"validation.source={bad}"),
    }[where]
    code, out, err = tune(capsys, "check", *words)
    assert code == 2
    assert (
        f"data: format alpaca, found by the columns of {good if where == 'validation' else bad}\n"
        in out
    )
    name = "validation: " if where == "validation" else ""
    for cause, count, lines in (
        (CAUSES[0], "2 bad samples", (1, 3)),
        (CAUSES[1], "1 bad sample", (2,)),
    ):
        _, found, places = err.partition(f"error: bad-samples: {name}{count}: {cause}\n")
        assert found, err
        for line, place in zip(lines, places.splitlines(), strict=False):
            assert place.startswith(f"error: bad-samples:   {bad}:{line}: ")
    assert f"error: nothing-left: {name}{bad}: found no sample to train on among 3: 3 bad (" in err
    assert "faults: bad-samples, nothing-left\n" in out
    assert all(line.startswith("error: ") for line in err.splitlines())
    code, out, _ = tune(capsys, "check", *words, "--json", "--allow", "bad-samples")
    found = json.loads(out)
    own = found["validation"] if where == "validation" else found
    assert code == 2
    assert own["bad_samples_by_cause"] == {CAUSES[0]: 2, CAUSES[1]: 1}
    assert own["sequences"] == (3 if where == "one of several" else 0)


def test_a_source_without_samples_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    rows = tmp_path / "rows.json"
    rows.write_text("[]")
    code, out, err = tune(capsys, "check", *arguments(rows, "data.format=alpaca"))
    assert (code, err) == (
        2,
        f"error: nothing-left: {rows}: found no samples, expected at least one\n",
    )
    assert "lengths: " not in out


def test_places_are_named_of_each_cause_and_counted_beyond(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    rows = write(
        tmp_path / "rows.jsonl", [*ROWS, *[BAD[0]] * 25, *[BAD[1]] * 3, *[{"output": "x"}] * 8]
    )
    code, out, err = tune(capsys, "check", *arguments(rows, "data.format=alpaca"))
    assert code == 2
    lines = err.splitlines()
    for cause, first, named, count in (
        (CAUSES[0], 4, 5, 25),
        (CAUSES[1], 29, 3, 3),
        ("no column instruction", 32, 5, 8),
    ):
        at = lines.index(f"error: bad-samples: {count} bad samples: {cause}")
        for number in range(named):
            assert lines[at + 1 + number].startswith(
                f"error: bad-samples:   {rows}:{first + number}: "
            )
        more = [f"error: bad-samples:   and {count - named} more"] if count > named else []
        assert lines[at + 1 + named : at + 2 + named][: len(more)] == more
    assert err.count(f"{rows}:") == 13 and err.count(" more\n") == 2
    code, out, _ = tune(capsys, "check", *arguments(rows, "data.format=alpaca"), "--json")
    findings = [
        finding for finding in json.loads(out)["findings"] if finding["name"] == "bad-samples"
    ]
    assert [len(finding["places"]) + finding["more"] for finding in findings] == [25, 8, 3]
    assert [finding["more"] for finding in findings] == [20, 3, 0]


def test_who_puts_bos_is_said_once_of_both(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    held_out = write(
        tmp_path / "held_out.jsonl", [{"instruction": "Write 9 in words.", "output": "nine"}]
    )
    rows = write(tmp_path / "rows.jsonl", ROWS)
    code, out, err = tune(capsys, "check", *arguments(rows, f"validation.source={held_out}"))
    assert (code, err) == (0, "")
    assert out.count("BOS") == 1
    assert f"validation: 1 sequence of 1 sample read from {held_out}" in out


def test_faults_can_be_allowed(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    words = planted(tmp_path)
    names = (
        "bad-samples",
        "duplicates",
        "overlap",
        "truncation",
        "no-answer-left",
        "untrained-ends",
    )
    allowed = [word for name in names for word in ("--allow", name)]
    code, out, err = tune(capsys, "check", *words, *allowed)
    assert (code, err) == (0, "")
    assert (
        "faults: bad-samples, truncation, no-answer-left, untrained-ends, duplicates, overlap"
        in out
    )


def test_check_finds_embeddings_that_were_never_trained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from recipe_lib.models import build_meta, build_spec, init_weights, read_preset_config

    config = read_preset_config("demo/0.5M")
    spec = build_spec(config, "demo")
    model = build_meta(spec, torch.float32).to_empty(device="cpu")
    init_weights(model, 1, spec)
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(TOKENIZER).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: value.detach().clone() for name, value in model.named_parameters()}
    rows = write(tmp_path / "rows.jsonl", ROWS)
    words = [
        "tests/recipes/plain.yaml",
        f"model.path={folder}",
        f"data.source={rows}",
        "max_seq_len=64",
    ]
    save_file(tensors, folder / "model.safetensors")
    code, out, err = tune(capsys, "check", *words)
    assert (code, err) == (0, ""), err
    assert "every one that the samples use has a trained embedding" in out
    tensors["model.embed_tokens.weight"][config["eos_token_id"]] = 0  # which ends each answer
    save_file(tensors, folder / "model.safetensors")
    code, _, err = tune(capsys, "check", *words)
    assert code == 2
    assert err.startswith("error: untrained-tokens: the sequences use ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["shwo", "x"], "error: tune data: unknown action shwo; did you mean show?\n"),
        (["check", "tests/recipes/plain.yaml", "--allow", "duplicate"], "did you mean duplicates?"),
        (
            ["show", "tests/recipes/plain.yaml", "--limit", "0"],
            "error: --limit: found 0, expected a number >= 1\n",
        ),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], line: str):
    code, _, err = tune(capsys, *words)
    assert code == 2
    assert line in err and err.count("\n") == 1


def test_special_tokens_that_stay_text_are_a_fault_and_parsed_ones_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    rows = write(
        tmp_path / "rows.jsonl",
        [*ROWS, {"instruction": "Stop<|end|>", "output": "a<|end|><|user|>b<|end|>"}],
    )
    code, out, err = tune(capsys, "check", *arguments(rows))
    assert code == 2 and "faults: split-special-tokens" in out
    assert "error: split-special-tokens: 1 sample spells out special tokens that stay text" in err
    assert f"  {rows}:4: found '<|end|>' 3 times, '<|user|>' once\n" in err
    assert tune(capsys, "check", *arguments(rows), "--allow", "split-special-tokens")[0] == 0
    _, out, _ = tune(capsys, "check", *arguments(rows), "--json")
    numbers = json.loads(out)
    assert numbers["special_tokens_unparsed"] == {"<|end|>": 3, "<|user|>": 1}
    assert (
        numbers["samples_with_unparsed_special_tokens"] == 1
        and numbers["special_tokens_parsed"] == {}
    )
    code, out, err = tune(capsys, "check", *arguments(rows, "data.parse_special_tokens=true"))
    assert (code, err) == (0, "") and "faults: none" in out  # what the fault's line tells to do
    assert (
        "special tokens that the samples spell out are parsed: '<|end|>' 3 times, '<|user|>' once"
        in out
    )


def test_the_findings_to_allow_are_those_that_are_reported() -> None:
    """The command line has a copy of the names, as their module imports torch."""
    names = set()
    for node in ast.walk(ast.parse(Path(inspect.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("Finding", "_make_finding"):
                keywords = {keyword.arg: keyword.value for keyword in node.keywords}
                if isinstance(keywords["name"], ast.Constant):
                    names.add(keywords["name"].value)
    assert names == set(FINDINGS)
