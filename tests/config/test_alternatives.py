"""Of two keys for the same thing the one that is set later counts, and the other one is said to
have no effect.
"""

from pathlib import Path

import pytest

from recipe_lib.config.load import ALTERNATIVES, load_with_origins
from recipe_lib.errors import ConfigError

BASE = "model: {preset: demo/0.5M}\ntokenizer: {path: t}\n"
RATIO = "lr_scheduler: {warmup_ratio: 0.1}\n"
STEPS = "lr_scheduler: {warmup_steps: 7}\n"
ONE = "data: {source: a.jsonl}\n"
SEVERAL = "data: {sources: [{source: b.jsonl}]}\n"


@pytest.fixture
def write(tmp_path: Path):
    def file(name: str, text: str) -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return file


@pytest.mark.parametrize(
    ("first", "override", "taken", "kept"),
    [
        (
            ONE + RATIO,
            "lr_scheduler.warmup_steps=30",
            "lr_scheduler.warmup_ratio",
            "lr_scheduler.warmup_steps",
        ),
        (
            ONE + STEPS,
            "lr_scheduler.warmup_ratio=0.2",
            "lr_scheduler.warmup_steps",
            "lr_scheduler.warmup_ratio",
        ),
        (ONE, "data.sources=[{source: b.jsonl}]", "data.source", "data.sources"),
        (SEVERAL, "data.source=c.jsonl", "data.sources", "data.source"),
    ],
)
def test_the_command_line_takes_the_place_of_the_file(
    first: str, override: str, taken: str, kept: str, write
):
    loaded = load_with_origins(write("c.yaml", BASE + first), [override])
    assert loaded.describe_idle_keys() == [
        f"{taken} has no effect: {kept} takes its place (command line)"
    ]
    rows = {name: (value, where) for name, value, where in loaded.rows}
    assert rows[kept][1] == "command line"
    assert rows[taken][0] in (None, [], 0) and rows[taken][1].endswith(
        f"no effect: {kept} takes its place (command line)"
    )
    assert {taken, kept} in [set(pair) for pair in ALTERNATIVES]


def test_a_later_file_takes_the_place_of_an_earlier_one(write):
    files = [write("a.yaml", BASE + ONE + RATIO), write("b.yaml", STEPS + SEVERAL)]
    cfg = load_with_origins(files).cfg
    assert (cfg.lr_scheduler.warmup_ratio, cfg.lr_scheduler.warmup_steps) == (None, 7)
    assert cfg.data.source is None and [one.source for one in cfg.data.sources] == ["b.jsonl"]
    cfg = load_with_origins([files[1], files[0]]).cfg
    assert (cfg.lr_scheduler.warmup_ratio, cfg.lr_scheduler.warmup_steps) == (0.1, 0)
    assert cfg.data.source == "a.jsonl" and cfg.data.sources == []


def test_both_in_one_place_are_refused(write):
    path = write("c.yaml", BASE + "data: {source: a.jsonl, sources: [{source: b.jsonl}]}\n")
    with pytest.raises(ConfigError, match="both are set"):
        load_with_origins(path)
    with pytest.raises(ConfigError, match="both are set"):
        load_with_origins(
            write("d.yaml", BASE + ONE), ["data.source=x.jsonl", "data.sources=[{source: y.jsonl}]"]
        )
