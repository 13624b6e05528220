"""Whatever stands in a config of torchtune's, it is a config of ours or a line."""

import random
from pathlib import Path

import pytest
import yaml

from recipe_lib.config.torchtune import import_file
from recipe_lib.errors import UserError
from tests.config.test_torchtune_configs import PLANNED, WHEEL, needs_wheel
from tests.hostile import change_json

KINDS = ("full", "lora", "KD_lora", "qat", "dpo")


def imported(path: Path) -> str:
    """Return the faults of a file, empty if it becomes a config of ours."""
    try:
        import_file(str(path)).format_yaml("ours.yaml")
    except UserError as error:
        assert error.faults and all(
            "\n" not in fault and len(fault) < 6000 for fault in error.faults
        )
        return str(error)
    return ""


def check_changes(text: str, path: Path, count: int) -> None:
    for seed in range(count):
        draw = random.Random(seed)
        theirs = yaml.safe_load(text)
        for _ in range(draw.choice((1, 1, 2, 3))):
            theirs = change_json(theirs, draw)
        path.write_text(yaml.safe_dump(theirs))
        imported(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANNED)
def test_changed_configs(kind: str, tmp_path: Path):
    check_changes(PLANNED[kind], tmp_path / "theirs.yaml", 25)


@needs_wheel
@pytest.mark.parametrize("kind", KINDS)
def test_changed_configs_of_the_wheel(kind: str, tmp_path: Path):
    assert WHEEL is not None
    path = min(WHEEL.rglob(f"*{kind}*.yaml"))
    check_changes(path.read_text(encoding="utf-8"), tmp_path / path.name, 20)


@pytest.mark.parametrize("text", ["a", "[a, b]"])
def test_names_that_grow_end_in_a_line(text: str, tmp_path: Path):
    """Ten names of ten names: filled in anew each time they would be a million texts."""
    path = tmp_path / "theirs.yaml"
    lines = [
        f"a0: {text}",
        *(f"a{number}: {f'${{a{number - 1}}}' * 10}" for number in range(1, 12)),
    ]
    path.write_text("\n".join(reversed(lines)) + "\n")
    assert "grow beyond" in imported(path)
