"""A list of sections: `data.sources` in a file and on the command line, all faults in one go, each
in its place.
"""

import dataclasses

import pytest

from recipe_lib.config import FullFinetuneConfig, load_config, resolve_sources
from recipe_lib.config.load import load_with_origins
from recipe_lib.config.schema import DataConfig, SourceConfig, key
from recipe_lib.errors import ConfigError

KEYS = "source, weight, format, split, columns, max_samples"
TWO = """\
model: {path: x}
data:
  sources:
    - source: a.jsonl
      weight: 2
    - {source: hub:a/b, split: test}
"""


def test_in_a_file(write):
    cfg = load_config(write(TWO))
    assert cfg.data.sources == [SourceConfig("a.jsonl", 2.0), SourceConfig("hub:a/b", split="test")]
    assert isinstance(cfg.data.sources[0].weight, float)


def test_on_the_command_line(load):
    text = "[{source: a.jsonl, weight: 2}, {source: b, columns: {instruction: question}}]"
    cfg = load("", "~data.source", f"data.sources={text}")
    assert cfg.data.sources == [
        SourceConfig("a.jsonl", 2.0),
        SourceConfig("b", columns={"instruction": "question"}),
    ]
    assert load("", "~data.source", f"data={{sources: {text}}}").data.sources == cfg.data.sources


def test_one_key_of_one_section(write):
    path = write(TWO)
    cfg = load_config(
        path,
        ["data.sources[1].weight=0.5", "data.sources[0].format=text", "data.sources[1].split=null"],
    )
    assert cfg.data.sources == [SourceConfig("a.jsonl", 2.0, "text"), SourceConfig("hub:a/b", 0.5)]
    told = {
        name: where
        for name, _, where in load_with_origins(path, ["data.sources[1].weight=0.5"]).rows
    }
    assert told["data.sources"] == f"{path}:3, command line"
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["data.sources[2].weight=1", "data.sources[0].wieght=1", "data.sources[0].weight=x",
                           "data.format[0].weight=1"])  # fmt: skip
    assert caught.value.faults[:3] == [
        (
            "command line: data.sources[2].weight=1: data.sources[2] is not there, the last one is"
            " data.sources[1]; write data.sources=[...] for another list"
        ),
        "command line: data.sources[0].wieght=1: unknown key; did you mean data.sources[0].weight?",
        "command line: data.sources[0].weight=x: found 'x', expected a number > 0",
    ]
    assert caught.value.faults[3].startswith(
        "command line: data.format[0].weight=1: unknown key; the keys of data are"
    )


def test_a_key_of_a_section_that_no_list_has(faults):
    assert faults("", "data.sources[0].weight=1") == [
        "command line: data.sources[0].weight=1: data.sources[0] is not there, the list is empty; "
        "write data.sources=[...] for another list"
    ]


def test_all_faults_of_a_file_in_its_order(faults):
    text = (
        "model: {path: x}\ndata:\n  sources:\n    - source: a.jsonl\n      wieght: 2\n      format:"
        " alpacca\n    - 3\n    - path: b\n    - {source: c, weight: 0, max_samples: 1.5, columns:"
        " x}\n    - weight: 1\n    - {source: a, source: b}\n    - [a]\nseed: x\n"
    )
    formats = (
        "auto, alpaca, sharegpt, messages, prompt_completion, text, preference, kto, classification"
    )
    assert faults(text, whole=True) == [
        "c.yaml:5: data.sources[0].wieght: unknown key; did you mean data.sources[0].weight?",
        (
            f"c.yaml:6: data.sources[0].format: found 'alpacca', expected one of {formats}, or"
            " null; did you mean alpaca?"
        ),
        f"c.yaml:7: data.sources[1]: found 3, expected a section of keys ({KEYS})",
        "c.yaml:8: data.sources[2].path: unknown key; did you mean data.sources[2].source?",
        "c.yaml:9: data.sources[3].weight: found 0, expected a number > 0",
        "c.yaml:9: data.sources[3].max_samples: found 1.5, expected an integer >= 1, or null",
        "c.yaml:9: data.sources[3].columns: found 'x', expected a mapping {name: text}, or null",
        "c.yaml:10: data.sources[4].source: is not set, expected text",
        "c.yaml:11: data.sources[5].source: set twice, first on line 11; remove one of the two",
        f"c.yaml:12: data.sources[6]: found a list, expected a section of keys ({KEYS})",
        "c.yaml:13: seed: found 'x', expected an integer >= 0",
    ]


def test_all_faults_of_an_override(faults):
    word = "data.sources=[{source: a, wieght: 2}, x, {weight: 1}]"
    assert faults("", "~data.source", word) == [
        (
            f"command line: {word}: data.sources[0].wieght: unknown key; did you mean"
            " data.sources[0].weight?"
        ),
        f"command line: {word}: data.sources[1]: found 'x', expected a section of keys ({KEYS})",
        f"command line: {word}: data.sources[2].source: is not set, expected text",
    ]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("a.jsonl", f"found 'a.jsonl', expected a list of sections ({KEYS})"),
        (
            "{source: a}",
            f"found a section of keys, expected a list of sections ({KEYS})",
        ),
        ("null", f"found null, expected a list of sections ({KEYS})"),
        ("", f"found nothing, expected a list of sections ({KEYS})"),
    ],
)
def test_what_is_no_list(faults, value, what):
    text = f"model: {{path: x}}\ndata:\n  sources: {value}\n"
    assert faults(text, whole=True) == [f"c.yaml:3: data.sources: {what}"]


def test_a_faulty_list_is_not_judged(faults):
    """Neither as missing data nor as sources without splits."""
    text = "model: {path: x}\ndata:\n  split: test\n  sources: [{source: 'hub:a/b', weight: -1}]\n"
    assert faults(text, whole=True) == [
        "c.yaml:4: data.sources[0].weight: found -1, expected a number > 0"
    ]


def test_fifty_faults_are_enough(faults):
    items = ", ".join("{source: 3}" for _ in range(80))
    found = faults(f"model: {{path: x}}\ndata: {{sources: [{items}]}}\n", whole=True)
    assert len(found) == 51 and found[-1] == "the first 50 faults are shown; there are more"


def test_lists_of_a_users_own_sections(load, faults):
    @dataclasses.dataclass
    class Stage:
        steps: int = key(10, "Steps.", minimum=1)
        sizes: list[int] = key([1, 2], "Sizes.")

    @dataclasses.dataclass
    class Mine(FullFinetuneConfig):
        stages: list[Stage] = key([], "Stages.")

    cfg = load("stages: [{}, {steps: 3, sizes: [4]}]\n", schema=Mine)
    assert cfg.stages == [Stage(), Stage(3, [4])]
    assert faults("stages:\n  - steps: 0\n    sizes: [x]\n", schema=Mine) == [
        "c.yaml:2: stages[0].steps: found 0, expected an integer >= 1",
        "c.yaml:3: stages[0].sizes: found 'x', expected a list [...] of integers",
    ]


def test_choices_of_the_items_of_a_list(load, faults):
    @dataclasses.dataclass
    class Mine(FullFinetuneConfig):
        roles: list[str] = key([], "Roles.", items=("system", "user"))

    assert load("roles: [user, system]\n", schema=Mine).roles == ["user", "system"]
    assert faults("roles: [user, usr]\n", schema=Mine) == [
        "c.yaml:1: roles: found 'usr', expected a list [...] of system, user; did you mean user?"
    ]


def test_sections_inside_the_sections_of_a_list_are_refused(write):
    @dataclasses.dataclass
    class Deep:
        inner: SourceConfig = dataclasses.field(default_factory=lambda: SourceConfig("a"))

    @dataclasses.dataclass
    class Mine(FullFinetuneConfig):
        deep: list[Deep] = key([], "Deep.")

    with pytest.raises(ConfigError, match=r"^Mine\.deep: a config cannot hold the type list"):
        load_config(write(TWO), (), Mine)


def test_resolved_sources():
    assert resolve_sources(DataConfig()) == []
    one = DataConfig(source="a", format="text", split="x", columns={"text": "t"}, max_samples=3)
    assert resolve_sources(one) == [SourceConfig("a", 1.0, "text", "x", {"text": "t"}, 3)]
    several = DataConfig(
        sources=[
            SourceConfig("a", 2.0, "messages"),
            SourceConfig("b", columns={}, max_samples=7, split="y"),
        ],
        columns={"output": "answer"},
        max_samples=5,
    )
    assert resolve_sources(several) == [
        SourceConfig("a", 2.0, "messages", "train", {"output": "answer"}, 5),
        SourceConfig("b", 1.0, "auto", "y", {}, 7),
    ]
    assert several.sources[0].columns is None
