"""Files that an option names are not written over files of another kind."""

import json
from pathlib import Path

import pytest

from recipe_lib.cli.arguments import check_output
from recipe_lib.cli.main import main
from recipe_lib.errors import ConfigError


@pytest.mark.parametrize("option", ["--json", "--html", "--snapshot", "--calibrate", "--write"])
@pytest.mark.parametrize(
    "content", ["recipe: full_finetune_distributed\n", "{}", '{"schema": 1}', "", "<html>"]
)
def test_a_file_of_another_kind_stays(option: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        check_output(option, str(path))
    assert (
        str(caught.value)
        == f"{option}: {path} is there already and is no file that {option} writes; move it away,"
        " or choose another name"
    )


def test_what_the_option_wrote_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    for option, content in {
        "--json": json.dumps({"schema": 1, "verdict": "fits", "recipe": "x"}),
        "--calibrate": json.dumps({"version": 1, "device": "cpu", "matmul": {}}),
        "--write": json.dumps({"version": 1, "device": "cpu", "matmul": {}}),
        "--html": '<!DOCTYPE html>\n<meta name="generator" content="tune-recipes: plan">\n',
    }.items():
        path.write_text(content)
        check_output(option, str(path))


def test_a_plan_is_not_written_over_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: full_finetune_distributed\n")
    for command, said in (
        (
            ["plan", "full_finetune_distributed", "--config", str(path)],
            "is the file of --config too",
        ),
        (["tp-plan", "llama3_8b"], "is there already and is no file that --json writes"),
    ):
        assert main([*command, "--json", str(path)]) == 2
        assert said in capsys.readouterr().err
    assert path.read_text() == "recipe: full_finetune_distributed\n"


@pytest.mark.parametrize("way", ["the same", "a link"])
def test_no_output_of_a_plan_is_another_one_or_an_input(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, rates, same = tmp_path / "plan.json", tmp_path / "rates.json", tmp_path / "same"
    plan.write_text(json.dumps({"schema": 1, "verdict": "fits"}))
    rates.write_text(json.dumps({"version": 1, "device": "cpu", "matmul": {}}))
    before = plan.read_bytes(), rates.read_bytes()
    for read, written, path in (
        ("--diff", "--json", plan),
        ("--calibration", "--calibrate", rates),
        ("--json", "--html", tmp_path / "new"),
    ):
        other = path
        if way == "a link":
            same.unlink(missing_ok=True)
            same.symlink_to(path)
            other = same
        assert main(["plan", "demo/full", read, str(path), written, str(other)]) == 2
        assert (
            capsys.readouterr().err
            == f"error: {written}: {other} is the file of {read} too; choose another name\n"
        )
    assert (plan.read_bytes(), rates.read_bytes()) == before


def test_a_harness_that_writes_nothing_takes_no_place_to_write(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["eval", "demo", "--lm-eval", "arc_easy", "--out", "results"]) == 2
    assert "--out: --lm-eval prints its numbers and writes nothing" in capsys.readouterr().err
